# SPDX-License-Identifier: Apache-2.0
"""Data sets of measurements: plan, points, files, tables."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
import tvm
from tvm import tirx

from sparsetir import ops
from sparsetir.codegen.calibration import machine_profile
from sparsetir.codegen.target import native_target
from sparsetir.errors import ArgumentError, SparseTIRError, TuningError
from sparsetir.formats.encoding import parse_format
from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import ranked_candidates
from sparsetir.formats.pattern import Pattern, pattern
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import CooTensor
from sparsetir.ir.effects import free_sizes
from sparsetir.ir.views import Program, decode
from sparsetir.kernel_factory import make_kernel
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.transform.decompose import decompose_format
from sparsetir.tuning import features
from sparsetir.tuning.features import ArgumentStorage, Estimates, MatrixFacts, Operands, WorkloadEncoding, matrix_names
from sparsetir.tuning.lowered_program import LoweredProgram, compile_together
from sparsetir.tuning.records import LEAST, Recording, digest
from sparsetir.tuning.space import Candidate, Values, drawn, fixed, start
from sparsetir.tuning.train.collect import CollectionSource, listed
from sparsetir.tuning.variants import PreparedCall, own_storage, uncompiled
from sparsetir.tuning.work import USUAL, CoreRates, Work, measure_rates
from sparsetir.utils import packages
from sparsetir.utils.buffers import aligned
from sparsetir.utils.caches import cached_property
from sparsetir.utils.files import writing_file
from sparsetir.utils.machine import CORES, MachineProfile, machine_name, shipped_profile
from sparsetir.utils.memory import old_objects_aside
from sparsetir.utils.packages import __version__
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads import suite
from sparsetir.workloads.inputs import DENSE, say
from sparsetir.workloads.reference import Reference

# Plan of a data set of measurements: matrices, and for each of them programs, dtypes and numbers of threads.


SMALLEST, LARGEST = 3_000, 500_000  # entries of generated matrices
MOST_WORK, MOST_ELEMENTS = 24e6, 6e6  # entries times columns, and elements of a dense operand
# What is drawn for a matrix: weight, operation, dtype, columns of dense operands, threads. Few enough combinations that
# each kernel is compiled once and measured on many matrices.
PROGRAMS = 6  # different programs drawn at random
COMBINATIONS: tuple[tuple[float, str, str, tuple[int, ...], int], ...] = (
    (10, "spmm", "float32", (8, 32, 128, 512), 1),
    (4, "spmm", "float64", (32,), 1),
    (3, "spmm", "bfloat16", (64,), 1),
    (4, "spmm", "float32", (64,), 2),
    (4, "spmv", "float32", (1,), 1),
    (2, "spmv", "float64", (1,), 1),
    (1, "spmv", "bfloat16", (1,), 1),
    (2, "spmv", "float32", (1,), 2),
    (4, "sddmm", "float32", (8, 64, 512), 1),
    (2, "sddmm", "float64", (64,), 1),
    (1, "sddmm", "bfloat16", (64,), 1),
    (2, "sddmm", "float32", (64,), 2),
    (8, "drawn", "float32", (32,), 1),
    (1, "drawn", "float64", (32,), 1),
)
OF_TENSORS: tuple[tuple[float, str, str, tuple[int, ...], int], ...] = (
    (3, "mttkrp", "float32", (16, 64), 1),
    (1, "mttkrp", "float64", (32,), 1),
    (1, "mttkrp", "float32", (32,), 2),
)
TENSORS = 0.08  # of tensors among matrices
NUMBERED = re.compile(r"_\d+d?$")  # members that differ in a number, such as pruned_50 and pruned_90, are one family


@dataclass(frozen=True)
class Job:
    """A program to be measured on a matrix.

    Parameters
    ----------
    op : str
        ``"spmm"``, ..., or ``"drawn_7"`` for a program that is drawn at random.
    feat : int
        Columns of the dense operands; 1 where they are vectors.
    dtype : str
    threads : int
    """

    op: str
    feat: int
    dtype: str
    threads: int

    @property
    def kind(self) -> str:
        """The operation; ``"drawn"`` for all programs drawn at random."""
        return self.op.partition("_")[0]

    @property
    def program(self) -> tirx.PrimFunc:
        """At stage I."""
        if self.kind == "drawn":
            return suite.draw_program(int(self.op.partition("_")[2]), self.dtype).program
        func: tirx.PrimFunc = getattr(ops, self.op)(self.dtype)
        return func

    def inputs(self, sparse: Any) -> dict[str, Any]:
        """Return the arguments of a call on a matrix or tensor."""
        matrix = typed(sparse, self.dtype)
        if self.kind == "drawn":
            return suite.draw_program(int(self.op.partition("_")[2]), self.dtype).inputs(matrix, self.feat, self.dtype)
        rng, shape = np.random.default_rng(0), sparse.shape
        sizes = {n: (shape[d], self.feat) if wide else (shape[d],) for n, (d, wide) in DENSE[self.op].items()}
        dense = {n: aligned(rng.standard_normal(s, np.float32).astype(self.dtype)) for n, s in sizes.items()}
        return {{"sddmm": "S", "mttkrp": "T_"}.get(self.op, "A"): matrix, **dense}


def typed(sparse: Any, dtype: str) -> Any:
    """Return a matrix or tensor with values of a dtype; scipy has no bfloat16."""
    if isinstance(sparse, CooTensor):
        return sparse.with_values(sparse.values.astype(dtype))
    return SparseTensor.from_any(sparse).astype(dtype) if dtype == "bfloat16" else sparse.astype(dtype)


def sources(matrices: int, *, seed: int = 0, data: Path | None = None) -> Iterator[CollectionSource]:
    """Return generated matrices and tensors, families in turn, of random sizes; then the files below a folder."""
    rng = np.random.default_rng(seed)
    names = [name for name in suite.families() if name != "empty"]
    for n in range(matrices):
        of = list(suite.tensors()) if rng.random() < TENSORS else names
        name, size = of[n % len(of)], int(np.exp(rng.uniform(np.log(SMALLEST), np.log(LARGEST))))
        yield CollectionSource(
            f"{name}-{size}-{seed + n}", NUMBERED.sub("", name), partial(suite.generate, name, size, seed=seed + n)
        )
    yield from listed(data)


def jobs(sparse: Any, count: int, rng: np.random.Generator) -> list[Job]:
    """Return different programs for a matrix or tensor; fewer where it is too large for most."""
    wanted = [_job(sparse, rng) for _ in range(2 * count)]
    return list(dict.fromkeys(job for job in wanted if job is not None))[:count]


def _job(sparse: Any, rng: np.random.Generator) -> Job | None:
    rows = OF_TENSORS if len(sparse.shape) == 3 else COMBINATIONS
    weights = np.array([row[0] for row in rows])
    _, op, dtype, feats, threads = rows[int(rng.choice(len(rows), p=weights / weights.sum()))]
    if op == "drawn":
        number = int(rng.integers(PROGRAMS))
        op, feats = f"drawn_{number}", feats if suite.draw_program(number).has_feat else (1,)
    most = min(MOST_WORK / max(sparse.nnz, 1), MOST_ELEMENTS / max(sparse.shape))
    fitting = [feat for feat in feats if feat <= max(most, 1)]
    return Job(op, fitting[int(rng.integers(len(fitting)))], dtype, threads) if fitting else None


# The cases of a data set as recorded trials, with what a model sees of each point computed again.


@dataclass(frozen=True, eq=False)
class RecordedWorkload(WorkloadEncoding):
    """The features that all points of a recorded case share; the matrix itself is no longer available.

    Parameters
    ----------
    noted : MatrixFacts
    stored : mapping of Format to ArgumentStorage
        The estimates, by format.
    """

    noted: MatrixFacts | None = None
    stored: Mapping[Format | None, ArgumentStorage] = field(default_factory=dict)

    @property
    def structure(self) -> MatrixFacts:
        return self.noted or MatrixFacts.of(None)

    @property
    def estimates(self) -> Any:
        return self.stored.__getitem__


@lru_cache(maxsize=256)
def _program(op: str, dtype: str) -> Program:
    return decode(Job(op, 1, dtype, 1).program)


@lru_cache(maxsize=4096)
def _format(text: str) -> Format | None:
    return parse_format(text) if text else None


def is_data_set(path: Path) -> bool:
    """Return whether a file is a data set rather than records of searches."""
    try:
        with of_processor(path)[0].open("rb") as file:
            return b'"points":' in file.readline()
    except OSError:
        return False  # the reader of the records reports why


def recordings(path: Path, *, spread: float = float("inf")) -> list[Recording]:
    """Return the cases of a data set.

    Parameters
    ----------
    path : Path
    spread : float
        Points whose two measurements are farther apart, as a logarithm, are left out: the machine was busy.
    """
    path, processor = of_processor(path)
    return [case for line in profiled(lines(path), processor) if (case := recording(line, spread)) is not None]


def of_processor(path: Path) -> tuple[Path, str | None]:
    """Return a data set's file, and the processor that it was measured on where one is named: FILE@sapphirerapids.

    Examples
    --------
    >>> str(of_processor(Path("points.jsonl@znver4"))[0]), of_processor(Path("points.jsonl@znver4"))[1]
    ('points.jsonl', 'znver4')
    """
    name, at, processor = path.name.rpartition("@")
    return (path.with_name(name), processor) if at and name and not path.exists() else (path, None)


def profiled(cases: Iterable[dict[str, Any]], processor: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of cases with the profile of the machine that they were measured on.

    A file has it once, in the first line that a machine writes in a run; for older files the shipped one of the
    processor counts.

    Parameters
    ----------
    cases : iterable of dict
    processor : str, optional
        LLVM's name, where a hypervisor hid it from the run; its shipped profile is taken.
    """
    profiles: dict[str, MachineProfile] = {}
    for line in cases:
        machine, mcpu = str(line.get("machine", "")), str(line.get("mcpu", ""))
        if processor is None and isinstance(line.get("profile"), Mapping):
            profiles[machine] = MachineProfile.from_dict(line["profile"])
        shipped = shipped_profile(mcpu if processor is None else processor)
        yield {**line, "profile": profiles.get(machine, shipped)}


def recording(line: Mapping[str, Any], spread: float = float("inf")) -> Recording | None:
    """Return a case; None where too few points of it are left."""
    kept = list(_points(line, spread))
    if len(kept) < LEAST:
        return None
    encoding = encoding_of(line)
    features_of = dict(zip([c for c, _ in kept], encoding.rows([c for c, _ in kept]), strict=True))
    usual = Candidate(Choices(**line["usual"]))
    untuned = (least(line["plain"]), encoding.rows([usual], specialised=False)[0])
    job = Job(**line["job"])
    return Recording(
        line["case"],
        {c: least(seconds) for c, seconds in kept},
        features_of,
        matrix_names(),
        line["matrix"],
        line["family"],
        f"{job.kind}:{job.feat}",
        untuned,
        tuple({c: seconds[n] for c, seconds in kept} for n in range(2)),
        job.kind,
        job.dtype,
        job.threads,
        line.get("mcpu", ""),
        "rates" in line,
    )


def least(seconds: list[float]) -> float:
    """Return the least of two measurements: whatever else runs only adds to them."""
    return min(seconds)


def _points(line: Mapping[str, Any], spread: float) -> Iterator[tuple[Candidate, list[float]]]:
    """Yield the candidates of a case with their measurements, none twice."""
    seen = set()
    for text, choices, _stored, _conversion, *seconds in line["points"]:
        candidate = Candidate(Choices(**{"chunks": line["job"]["threads"], **choices}), _format(text))
        if candidate not in seen and abs(np.log(seconds[0] / seconds[1])) <= spread:
            seen.add(candidate)
            yield candidate, seconds


def encoding_of(line: Mapping[str, Any]) -> RecordedWorkload:
    """Return the encoding from a case's candidates to what a model sees of them."""
    job = Job(**line["job"])
    work = Work.of(_program(job.op, job.dtype), line["sizes"])
    own = ArgumentStorage(*line["own"])
    stored = {_format(text): ArgumentStorage(*sizes) for text, _, sizes, *_ in line["points"]}
    rates = CoreRates(**line["rates"]) if "rates" in line else USUAL
    profile = line.get("profile")
    if not isinstance(profile, MachineProfile):
        profile = next(profiled([dict(line)]))["profile"]
    operands = Operands.of(work, job.threads, rates, profile)
    return RecordedWorkload(
        line["facts"], None, own, operands, noted=MatrixFacts(**line["structure"]), stored={**stored, None: own}
    )


# A data set of measurements: what the shipped cost model is trained on, see docs/dataset.md.
#
# ``sparsetir collect points.jsonl`` measures kernels of many programs on many matrices, each kernel twice, and goes on
# where it was stopped. Programs are symbolic in the matrix, so a kernel is compiled once and measured on every matrix
# that it suits.
#
# Kernels of one thread are timed by the processor time of the calling thread, which work of others on the machine does
# not add to; kernels of several threads by the clock. A line of the file is a case: a program on a matrix, with all of
# its points.


FORMAT = 1
HEAD = b'{"format"'  # how a line begins
OWN_CHOICES, CHOICES = 10, 3  # of the program as it is, and of each format
SURE_FORMATS, OTHER_FORMATS = 4, 3  # of a case: those most likely to suit, and others
BURSTS, BURST = 6, 0.8e-3  # of a measurement, and the seconds of each
SHORTEST = 1e-9  # seconds, of a clock that did not move
LONG = 8e-3  # seconds of a call that is timed alone
MOST_SECONDS = 0.25  # of a call; longer ones are left out


@dataclass(frozen=True)
class Form:
    """A program over a format, and the kernels that were compiled of it.

    Parameters
    ----------
    kernel : ComposedKernel or None
        Converts the arguments; None for the program as it is.
    variant : LoweredProgram
    values : mapping of str to tuple
        The choices that make a difference.
    pool : sequence of Choices
        That are measured for it.
    """

    kernel: ComposedKernel | None
    variant: LoweredProgram
    values: Values
    pool: list[Choices]
    compiled: dict[Choices, Callable[..., Any]] = field(default_factory=dict)

    def function(self, choices: Choices) -> Callable[..., Any]:
        """Machine code; that of the whole pool is compiled by one call of the compiler when some is first asked for."""
        if not self.compiled:
            with suppress(Exception):  # those that fail raise an error of their own later
                compile_together((self.variant, each) for each in self.pool)
        if choices not in self.compiled:
            self.compiled[choices] = self.variant.compile(choices)
        return self.compiled[choices]


@dataclass
class Forms:
    """The forms of all programs for a target, made once each."""

    target: Any = None
    held: dict[tuple[Any, ...], Form] = field(default_factory=dict)

    def __call__(
        self, job: Job, kernel: Kernel, format: Format | None, sizes: Mapping[str, int], feat: int | None
    ) -> Form:
        """Return the form of a job's program over a format, with these sizes and result row length compiled in."""
        key = job.op, job.dtype, job.threads > 1, repr(format), *sizes.items()
        if key not in self.held:
            self.held[key] = self._made(job, kernel, format, sizes, feat, digest(repr(key)))
        return self.held[key]

    def _made(
        self, job: Job, kernel: Kernel, format: Format | None, sizes: Mapping[str, int], feat: int | None, text: str
    ) -> Form:
        func, composed = kernel.func, None
        if format is not None:
            name = next(b.name for b in kernel.signature.buffers.values() if not b.is_dense)
            parts = decompose_format(func, {name: format})
            composed = ComposedKernel(parts, partial(uncompiled, self.target))
            if not composed.has_plain_results:
                raise TuningError("its results would be stored in pieces")
            func = parts.func
        variant = LoweredProgram(fixed(decode(func), sizes), self.target)
        values = variant.open_choices(feat)
        base = defaults.usual(kernel.func, Registers.of(kernel.compiled.target))
        return Form(composed, variant, values, pool_of(values, base, job.threads, int(text[:8], 16), format is None))


def pool_of(values: Values, base: Choices, threads: int, seed: int, is_own: bool) -> list[Choices]:
    """Return the choices measured for a form: what usually suits it, and random others; on one thread serial."""
    chunks = tuple(n for n in values.get("chunks", ()) if (n > 0) == (threads > 1))
    candidate_values = {**values, "chunks": chunks or (0,)}
    begun = start({n: v for n, v in candidate_values.items() if n != "chunks"}, base)
    usual = base.changed(**{**begun.as_dict(), "chunks": threads if chunks[:1] > (0,) else 0})
    rng, count = np.random.default_rng(seed), OWN_CHOICES if is_own else CHOICES
    others = [usual.changed(**drawn(candidate_values, rng)) for _ in range(4 * count)]
    return list(dict.fromkeys([usual, *others]))[:count]


# ------------------------------------------------------------------ measuring


def clock_of(threads: int) -> Callable[[], float]:
    """Return the clock for kernels that run on a number of threads."""
    return time.thread_time if threads == 1 else time.perf_counter


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return seconds of a call: the least of some bursts, as whatever else runs only adds to it."""
    begin = clock()
    call()
    once = max(clock() - begin, 1e-7)
    if once > LONG:
        begin = clock()
        call()
        return min(once, clock() - begin)
    count = max(1, int(BURST / once))
    fastest = float("inf")
    for _ in range(BURSTS):
        begin = clock()
        for _ in range(count):
            call()
        fastest = min(fastest, (clock() - begin) / count)
    return max(fastest, SHORTEST)


@dataclass
class Point:
    """A kernel of a case, ready to be timed.

    Parameters
    ----------
    format : str
        As it prints; "" for the program as it is.
    choices : Choices
    stored : ArgumentStorage
        How the format stores the argument, as it is estimated from the pattern: what a model sees.
    conversion : float
        Seconds that storing it so took.
    call : callable
    seconds : list of float
        As measured, in turn.
    """

    format: str
    choices: Choices
    stored: ArgumentStorage
    conversion: float
    call: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)

    def as_list(self) -> list[Any]:
        """Return plain values for JSON."""
        usual = Choices(tile=self.choices.tile, chunks=get_num_threads()).as_dict()
        changed = {n: v for n, v in self.choices.as_dict().items() if n == "tile" or v != usual[n]}
        stored = [self.stored.values, self.stored.bytes, self.stored.pieces, self.stored.rows]
        seconds = [float(f"{s:.4g}") for s in self.seconds]
        return [self.format, changed, stored, float(f"{self.conversion:.3g}"), *seconds]


class MeasuredCase:
    """A case: a program on a matrix, with its points."""

    def __init__(self, job: Job, sparse: Any, forms: Forms) -> None:
        self.job, self.sparse, self.forms = job, sparse, forms
        set_num_threads(job.threads)
        self.clock = clock_of(job.threads)
        self.kernel = make_kernel(job.program, forms.target)
        self.inputs = job.inputs(sparse)
        self.workload = PreparedCall(self.kernel, self.inputs)
        self.names = [str(p.name) for p in self.kernel.func.params]
        fit, _after = self.kernel.fitting(self.workload.args, is_bound=True)
        self.untuned = self.workload.call(self.kernel.function if fit is None else fit(), self.names)
        absolute = self.workload.absolute()
        magnitudes = absolute.fresh(absolute.call(self.kernel.function, self.names))
        self.reference = Reference(self.workload.fresh(self.untuned), magnitudes)
        sizes = {name: int(value) for name, value in self.workload.args.sizes.items()}
        self.sizes = sizes
        self.fixed = {name: sizes[name] for name in free_sizes(self.kernel.signature.program)}
        self.failures = 0

    def points(self, rng: np.random.Generator) -> Iterator[Point]:
        """Yield what is measured of it, checked."""
        own = self.forms(self.job, self.kernel, None, self.fixed, self.workload.feat)
        suits = {n: v for n, v in self.kernel.suitable(self.workload.args).items() if n != "chunks"}
        for choices in dict.fromkeys([own.pool[0].changed(**suits), *own.pool]):
            yield from self._checked(None, choices, 0.0, own, self.workload)
        for format in self._formats(rng):
            try:
                form = self.forms(self.job, self.kernel, format, self.fixed, self.workload.feat)
                workload, seconds = self._converted(form)
            except (SparseTIRError, ValueError, RuntimeError, MemoryError):
                self.failures += 1
                continue
            for choices in form.pool:
                yield from self._checked(format, choices, seconds, form, workload)

    def _formats(self, rng: np.random.Generator) -> list[Format]:
        written = self.kernel.signature.effects.written
        holder = self.kernel.signature.holder
        if any(n in holder and not holder[n].is_dense for n in written):
            return []
        ranked_formats = ranked_candidates(self.pattern, feat=self.job.feat)
        sure, others = ranked_formats[:SURE_FORMATS], ranked_formats[SURE_FORMATS:]
        return [*sure, *(others[n] for n in sorted(rng.permutation(len(others))[:OTHER_FORMATS]))]

    def _converted(self, form: Form) -> tuple[PreparedCall, float]:
        """Return the arguments over a format, and the seconds that it took."""
        if form.kernel is None:
            return self.workload, 0.0
        begin = time.perf_counter()
        arguments, _structures = form.kernel.converter.translate(self.inputs)
        seconds = time.perf_counter() - begin
        return PreparedCall(form.kernel.kernel, form.kernel.needed(arguments), like=self.workload), seconds

    def _checked(
        self, format: Format | None, choices: Choices, conversion: float, form: Form, workload: PreparedCall
    ) -> Iterator[Point]:
        """Yield a point whose kernel has the right results."""
        try:
            call = workload.call(form.function(choices), form.variant.names)
            if self.reference.disagreement(workload.fresh(call)) is None:
                name = "" if format is None else repr(format)
                yield Point(name, choices, self.estimates(format), conversion, call)
                return
        except (SparseTIRError, ValueError, RuntimeError, MemoryError):
            pass
        self.failures += 1

    @cached_property
    def pattern(self) -> Pattern:
        """Numbers of the matrix or tensor."""
        return pattern(self.sparse)

    @cached_property
    def estimates(self) -> Estimates:
        """How formats store it."""
        itemsize = next(iter(self.workload.written.values())).itemsize
        return Estimates(self.pattern, own_storage(self.workload.signature, self.workload.arrays), itemsize)

    def measured(self, rng: np.random.Generator) -> dict[str, Any]:
        """Return the case for JSON: all points measured, then all once more in another order."""
        every_point = [Point("", Choices(), self.estimates(None), 0.0, self.untuned), *self.points(rng)]
        load = []
        for _ in range(2):
            load.append(round(os.getloadavg()[0], 2))
            for n in rng.permutation(len(every_point)):
                point = every_point[n]
                if not point.seconds or point.seconds[0] < MOST_SECONDS:
                    point.seconds.append(timed(point.call, self.clock))
        plain, *points = [p for p in every_point if len(p.seconds) == 2]
        usual = defaults.usual(self.kernel.func, Registers.of(self.kernel.compiled.target))
        chosen = usual.changed(**self.kernel.suitable(self.workload.args)).as_dict()
        return {
            "job": asdict(self.job),
            "sizes": self.sizes,
            "fixed": self.fixed,
            "facts": {name: float(f"{value:.5g}") for name, value in self._facts().items()},
            "load": load,
            "failed": self.failures,
            "usual": chosen,
            "plain": [float(f"{s:.4g}") for s in plain.seconds],
            "own": [plain.stored.values, plain.stored.bytes],
            "structure": asdict(MatrixFacts.of(self.pattern)),
            "points": [p.as_list() for p in points],
        }

    def _facts(self) -> dict[str, float]:
        facts = features.of_pattern(self.pattern)
        if len(self.sparse.shape) != 2:
            return facts
        return facts | features.density(self.sparse.indptr, self.sparse.indices, self.sparse.shape[1])


# ------------------------------------------------------------------ collecting


def header(target: Any) -> dict[str, Any]:
    """Return the facts that every case compiled for a target records."""
    about = {"format": FORMAT, "sparsetir": __version__, "machine": machine_name(), "mcpu": mcpu_of(target)}
    return about | {"rates": measure_rates(target).as_dict()}


def mcpu_of(target: Any) -> str:
    """Return the processor that a target is for; None is this one."""
    return str((native_target() if target is None else tvm.target.Target(target)).attrs.get("mcpu", ""))


def target_of(mcpu: str | None) -> Any:
    """Return this machine's target as if it were another processor, such as ``"x86-64-v3"``; None is this one.

    Raises
    ------
    ArgumentError
        LLVM knows no such processor.
    """
    if mcpu is None or mcpu == mcpu_of(None):
        return None
    kept = {name: value for name, value in native_target().export().items() if name not in ("mcpu", "mattr")}
    arch_list = tvm.get_global_func("target.llvm_get_cpu_archlist")(tvm.target.Target(kept))
    if mcpu not in map(str, arch_list):
        raise ArgumentError(f"mcpu is a processor that LLVM knows, such as x86-64-v3, got {mcpu!r}")
    return {**kept, "mcpu": mcpu}


def known_cases(path: Path) -> set[str]:
    """Return the cases that a file holds; a line that a killed process left half-written does not count."""
    return {line["case"] for line in lines(path)} if path.exists() else set()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the cases of a file.

    Raises
    ------
    TuningError
        The file cannot be read, or holds something else.
    """
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise TuningError(f"the data set {path} cannot be read: {error.strerror or error}") from error
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # killed in the midst of a line
            line = {} if text[: len(HEAD)] == HEAD[: len(text)] else None
        if line == {}:
            continue
        if not isinstance(line, dict) or line.get("format") != FORMAT or "points" not in line:
            beginning = text[:40].decode(errors="replace")
            raise TuningError(f"expected a data set of format {FORMAT} in {path}, got the line {beginning!r}")
        yield line


def collect(
    path: Path,
    sources: Iterable[CollectionSource],
    *,
    programs: int = 5,
    seed: int = 0,
    threads: tuple[int, ...] = (1, 2),
    seconds: float | None = None,
    mcpu: str | None = None,
) -> int:
    """Measure what a file does not hold yet; returns how many points are new.

    Parameters
    ----------
    path : Path
        Of JSON lines; it is only added to, a line a case.
    sources : iterable of CollectionSource
    programs : int
        Measured on each matrix.
    seed : int
        Of what is drawn.
    threads : tuple of int
        The numbers of threads that count.
    seconds : float, optional
        After which no further case is begun.
    mcpu : str, optional
        The processor that kernels are compiled for, such as ``"x86-64-v3"``, which this machine must be able to run; by
        default this one. Its cases are others.

    Raises
    ------
    ArgumentError
        LLVM knows no such processor.
    """
    target, before = target_of(mcpu), get_num_threads()
    try:
        with old_objects_aside():
            return _collected(path, sources, programs, seed, threads, seconds, target)
    finally:
        set_num_threads(before)


def _collected(
    path: Path,
    sources: Iterable[CollectionSource],
    programs: int,
    seed: int,
    threads: tuple[int, ...],
    seconds: float | None,
    target: Any,
) -> int:
    done, forms, total, begun = known_cases(path), Forms(target), 0, time.perf_counter()
    about, profile = header(target), {"profile": machine_profile().as_dict()}
    of_target = "" if target is None else f" {mcpu_of(target)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, source in enumerate(sources):
        rng = np.random.default_rng([seed, number])
        try:
            sparse = source.load()  # what is drawn for it depends on its sizes
        except (SparseTIRError, OSError, ValueError, MemoryError) as error:
            say(f"without {source.name}: {' '.join(str(error).split())[:160]}")
            continue
        for job in jobs(sparse, programs, rng):
            name = f"{source.name} {job.op}:{job.feat} {job.dtype} {job.threads}{of_target}"
            if name in done or job.threads not in threads or job.threads > CORES:
                continue
            if seconds is not None and time.perf_counter() - begun > seconds:
                say(f"stopped after {seconds:.0f} s; the same command goes on")
                return total
            try:
                case = MeasuredCase(job, sparse, forms).measured(rng)
            except (SparseTIRError, ValueError, RuntimeError, MemoryError) as error:
                say(f"without {name}: {' '.join(str(error).split())[:160]}")
                continue
            append(path, {**about, **profile, "case": name, "matrix": source.name, "family": source.family, **case})
            profile = {}  # once is enough
            total += len(case["points"])
            say(f"[{number + 1}] {name}: {len(case['points'])} points, {total / (time.perf_counter() - begun):.1f}/s")
    return total


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line by one call, after what a killed process may have left half-written."""
    text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        os.write(file, text if not size or os.pread(file, 1, size - 1) == b"\n" else b"\n" + text)
        os.fsync(file)
    finally:
        os.close(file)


# Export of a data set as a table with a row for each point, for other programs to read.


SUFFIXES = (".parquet", ".npz")


def rows(cases: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the points of some cases, a dict of plain values each; the same names in all."""
    for line in cases:
        job, (first, second) = line["job"], line["plain"]
        of_case = {name: line[name] for name in ("case", "matrix", "family", "machine", "sparsetir")}
        of_case |= {"mcpu": line.get("mcpu", "")}
        of_case |= {"op": job["op"], "feat": job["feat"], "dtype": job["dtype"], "threads": job["threads"]}
        of_case |= {"load": max(line["load"]), "plain_seconds_1": first, "plain_seconds_2": second}
        of_case |= {name: line["structure"][name] for name in ("nnz", "rows", "columns", "longest")}
        for format, choices, stored, conversion, one, two in line["points"]:
            kept = dict(zip(("stored_values", "stored_bytes", "pieces", "block_rows"), stored, strict=True))
            text = " ".join(f"{name}={value}" for name, value in choices.items())
            yield {
                **of_case,
                "format": format,
                "choices": text,
                **kept,
                "conversion_seconds": conversion,
                "seconds_1": one,
                "seconds_2": two,
                "noise": abs(float(np.log(one / two))),
            }


def columns(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a data set.

    Raises
    ------
    TuningError
        It holds no points.
    """
    table_rows = list(rows(lines(path)))
    if not table_rows:
        raise TuningError(f"{path} holds no points yet: `sparsetir collect {path}` measures some")
    return {name: np.array([row[name] for row in table_rows]) for name in table_rows[0]}


def export(path: Path, out: Path) -> Path:
    """Write a data set as a table.

    Parameters
    ----------
    path : Path
        Of a data set.
    out : Path
        ``.parquet``, which needs pyarrow (extra ``data``), or ``.npz``, an array a column.

    Raises
    ------
    ArgumentError
        The table has another suffix.
    MissingPackageError
        pyarrow is needed and not installed.
    """
    if out.suffix not in SUFFIXES:
        raise ArgumentError(f"expected a table {' or '.join(SUFFIXES)}, got {out.name}")
    table_columns = columns(path)
    if out.suffix == ".npz":
        with writing_file(out, makes_folder=True) as partial:
            np.savez_compressed(partial, allow_pickle=False, **table_columns)
        return out
    arrow = packages.require("pyarrow", extra="data", purpose="a table as parquet")
    parquet = packages.require("pyarrow.parquet", extra="data", purpose="a table as parquet")
    table = arrow.table({name: arrow.array(list(values)) for name, values in table_columns.items()})
    with writing_file(out, makes_folder=True) as partial:
        parquet.write_table(table, partial)
    return out


def summary(path: Path) -> list[list[str]]:
    """Return a data set's size and how far two measurements of a point differ, by operation; a heading first."""
    by_family: dict[str, list[Any]] = {}
    for line in lines(path):
        job = line["job"]
        by_family.setdefault(f"{job['op'].partition('_')[0]} {job['dtype']}, threads {job['threads']}", []).append(line)
    table = [["", "points", "cases", "matrices", "families", "noise: median", "95th percentile", "load"]]
    for name, case_lines in [
        *sorted(by_family.items()),
        ("all", [line for part in by_family.values() for line in part]),
    ]:
        noise = [abs(np.log(p[-2] / p[-1])) for line in case_lines for p in line["points"]]
        counts = Counter(key for line in case_lines for key in {("m", line["matrix"]), ("f", line["family"])})
        matrices, families = (sum(key[0] == which for key in counts) for which in "mf")
        apart = [f"{np.percentile(noise, q):.1%}" for q in (50, 95)] if noise else ["", ""]
        load = f"{np.median([max(line['load']) for line in case_lines]):.1f}" if case_lines else ""
        table.append([name, f"{len(noise):,}", f"{len(case_lines):,}", str(matrices), str(families), *apart, load])
    return table


__all__ = [
    "CollectionSource",
    "Job",
    "collect",
    "columns",
    "encoding_of",
    "export",
    "is_data_set",
    "jobs",
    "lines",
    "of_processor",
    "profiled",
    "recording",
    "recordings",
    "rows",
    "sources",
    "summary",
    "typed",
]
