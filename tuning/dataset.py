# SPDX-License-Identifier: Apache-2.0
"""A data set of measurements: what the shipped cost model is trained on, see docs/dataset.md.

``sparsetir collect points.jsonl`` measures kernels of many programs on many matrices, each kernel twice, and goes on
where it was stopped. Programs are symbolic in the matrix, so a kernel is compiled once and measured on every matrix
that it suits.

Kernels of one thread are timed by the processor time of the calling thread, which work of others on the machine does
not add to; kernels of several threads by the clock. A line of the file is a case: a program on a matrix, with all of
its points.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from sparsetir.call.composed import ComposedKernel
from sparsetir.call.kernel import Kernel
from sparsetir.call.make import make_kernel
from sparsetir.compile.compiled import Compiled
from sparsetir.compile.target import make_target, native_target
from sparsetir.errors import ArgumentError, SparseTIRError, TuningError
from sparsetir.formats.format import Format
from sparsetir.formats.pattern import Pattern, pattern
from sparsetir.formats.suit import promising
from sparsetir.harness.inputs import say
from sparsetir.harness.reference import Reference
from sparsetir.ir import decode
from sparsetir.machine import CORES, machine_name
from sparsetir.pauses import old_objects_aside
from sparsetir.schedules import Choices, Registers, suit
from sparsetir.threads import get_num_threads, set_num_threads
from sparsetir.transform.decompose import decompose_format
from sparsetir.tuning import features
from sparsetir.tuning.analytic import Structure
from sparsetir.tuning.ceilings import measure_rates
from sparsetir.tuning.database import digest
from sparsetir.tuning.estimate import Estimates
from sparsetir.tuning.features import Stored
from sparsetir.tuning.form import FormatVariant, compile_together
from sparsetir.tuning.plan import Job, Source, jobs
from sparsetir.tuning.space import Values, drawn, fixed, free_sizes, start
from sparsetir.tuning.variants import own_storage
from sparsetir.tuning.workload import Workload
from sparsetir.version import __version__

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
    variant : FormatVariant
    values : mapping of str to tuple
        The choices that make a difference.
    pool : sequence of Choices
        That are measured for it.
    """

    kernel: ComposedKernel | None
    variant: FormatVariant
    values: Values
    pool: list[Choices]
    compiled: dict[Choices, Callable[..., Any]] = field(default_factory=dict)

    def function(self, choices: Choices) -> Callable[..., Any]:
        """Machine code; that of the whole pool is compiled by one call of the compiler when some is first asked for."""
        if not self.compiled:
            with suppress(Exception):  # what does not compile says so by itself
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
        """The form of a job's program over a format, with these sizes compiled in and rows so long of the result."""
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
            composed = ComposedKernel(parts, self._not_compiled)
            if not composed.has_plain_results:
                raise TuningError("its results would be stored in pieces")
            func = parts.func
        variant = FormatVariant(fixed(decode(func), sizes), self.target)
        values = variant.open_choices(feat)
        base = suit.usual(kernel.func, Registers.of(kernel.compiled.target))
        return Form(composed, variant, values, pool_of(values, base, job.threads, int(text[:8], 16), format is None))

    def _not_compiled(self, func: Any, covered: Any) -> Kernel:
        return Kernel(func, Compiled(func, make_target(self.target, func), None), covered=covered)


def pool_of(values: Values, base: Choices, threads: int, seed: int, is_own: bool) -> list[Choices]:
    """The choices that are measured for a form: what suits it usually, and others at random; on one thread serial."""
    chunks = tuple(n for n in values.get("chunks", ()) if (n > 0) == (threads > 1))
    known = {**values, "chunks": chunks or (0,)}
    begun = start({n: v for n, v in known.items() if n != "chunks"}, base)
    usual = base.changed(**{**begun.as_dict(), "chunks": threads if chunks[:1] > (0,) else 0})
    rng, count = np.random.default_rng(seed), OWN_CHOICES if is_own else CHOICES
    others = [usual.changed(**drawn(known, rng)) for _ in range(4 * count)]
    return list(dict.fromkeys([usual, *others]))[:count]


# ------------------------------------------------------------------ measuring


def clock_of(threads: int) -> Callable[[], float]:
    """What kernels of a number of threads are timed by."""
    return time.thread_time if threads == 1 else time.perf_counter


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Seconds of a call: the least of some bursts, as whatever else runs only adds to it."""
    begin = clock()
    call()
    once = max(clock() - begin, 1e-7)
    if once > LONG:
        begin = clock()
        call()
        return min(once, clock() - begin)
    count = max(1, int(BURST / once))
    found = float("inf")
    for _ in range(BURSTS):
        begin = clock()
        for _ in range(count):
            call()
        found = min(found, (clock() - begin) / count)
    return max(found, SHORTEST)


@dataclass
class Point:
    """A kernel of a case, ready to be timed.

    Parameters
    ----------
    format : str
        As it prints; "" for the program as it is.
    choices : Choices
    stored : Stored
        How the format stores the argument, as it is estimated from the pattern: what a model sees.
    conversion : float
        Seconds that storing it so took.
    call : callable
    seconds : list of float
        As measured, in turn.
    """

    format: str
    choices: Choices
    stored: Stored
    conversion: float
    call: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)

    def as_list(self) -> list[Any]:
        """For JSON."""
        usual = Choices(tile=self.choices.tile).as_dict()
        changed = {n: v for n, v in self.choices.as_dict().items() if n == "tile" or v != usual[n]}
        stored = [self.stored.values, self.stored.bytes, self.stored.pieces, self.stored.rows]
        seconds = [float(f"{s:.4g}") for s in self.seconds]
        return [self.format, changed, stored, float(f"{self.conversion:.3g}"), *seconds]


class Measured:
    """A case: a program on a matrix, with its points."""

    def __init__(self, job: Job, sparse: Any, forms: Forms) -> None:
        self.job, self.sparse, self.forms = job, sparse, forms
        set_num_threads(job.threads)
        self.clock = clock_of(job.threads)
        self.kernel = make_kernel(job.program, forms.target)
        self.inputs = job.inputs(sparse)
        self.workload = Workload(self.kernel, self.inputs)
        self.names = [str(p.name) for p in self.kernel.func.params]
        fit, _after = self.kernel.fitting(self.workload.args, is_bound=True)
        self.untuned = self.workload.call(self.kernel.function if fit is None else fit(), self.names)
        absolute = self.workload.absolute()
        magnitudes = absolute.fresh(absolute.call(self.kernel.function, self.names))
        self.reference = Reference(self.workload.fresh(self.untuned), magnitudes)
        known = {name: int(value) for name, value in self.workload.args.sizes.items()}
        self.sizes = known
        self.fixed = {name: known[name] for name in free_sizes(self.kernel.signature.program)}
        self.failures = 0

    def points(self, rng: np.random.Generator) -> Iterator[Point]:
        """What is measured of it, checked."""
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
        found = promising(self.pattern, feat=self.job.feat)
        sure, others = found[:SURE_FORMATS], found[SURE_FORMATS:]
        return [*sure, *(others[n] for n in sorted(rng.permutation(len(others))[:OTHER_FORMATS]))]

    def _converted(self, form: Form) -> tuple[Workload, float]:
        """The arguments over a format, and the seconds that it took."""
        if form.kernel is None:
            return self.workload, 0.0
        begin = time.perf_counter()
        given, _found = form.kernel.converter.translate(self.inputs)
        seconds = time.perf_counter() - begin
        return Workload(form.kernel.kernel, form.kernel.needed(given), like=self.workload), seconds

    def _checked(
        self, format: Format | None, choices: Choices, conversion: float, form: Form, workload: Workload
    ) -> Iterator[Point]:
        """A point whose kernel computes what it should."""
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
        return Estimates(self.pattern, own_storage(self.workload), itemsize)

    def measured(self, rng: np.random.Generator) -> dict[str, Any]:
        """The case for JSON: all points measured, then all once more in another order."""
        found = [Point("", Choices(), self.estimates(None), 0.0, self.untuned), *self.points(rng)]
        load = []
        for _ in range(2):
            load.append(round(os.getloadavg()[0], 2))
            for n in rng.permutation(len(found)):
                point = found[n]
                if not point.seconds or point.seconds[0] < MOST_SECONDS:
                    point.seconds.append(timed(point.call, self.clock))
        plain, *points = [p for p in found if len(p.seconds) == 2]
        usual = suit.usual(self.kernel.func, Registers.of(self.kernel.compiled.target))
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
            "structure": asdict(Structure.of(self.pattern)),
            "points": [p.as_list() for p in points],
        }

    def _facts(self) -> dict[str, float]:
        found = features.of_pattern(self.pattern)
        if len(self.sparse.shape) != 2:
            return found
        return found | features.density(self.sparse.indptr, self.sparse.indices, self.sparse.shape[1])


# ------------------------------------------------------------------ collecting


def header(target: Any) -> dict[str, Any]:
    """What is said of every case that is compiled for a target."""
    about = {"format": FORMAT, "sparsetir": __version__, "machine": machine_name(), "mcpu": mcpu_of(target)}
    return about | {"rates": measure_rates(target).as_dict()}


def mcpu_of(target: Any) -> str:
    """The processor that a target is for; None is this one."""
    return str((native_target() if target is None else tvm.target.Target(target)).attrs.get("mcpu", ""))


def target_of(mcpu: str | None) -> Any:
    """This machine's target as if it were another processor, such as ``"x86-64-v3"``; None is this one.

    Raises
    ------
    ArgumentError
        LLVM knows no such processor.
    """
    if mcpu is None or mcpu == mcpu_of(None):
        return None
    kept = {name: value for name, value in native_target().export().items() if name not in ("mcpu", "mattr")}
    known = tvm.get_global_func("target.llvm_get_cpu_archlist")(tvm.target.Target(kept))
    if mcpu not in map(str, known):
        raise ArgumentError(f"mcpu is a processor that LLVM knows, such as x86-64-v3; found {mcpu!r}")
    return {**kept, "mcpu": mcpu}


def known_cases(path: Path) -> set[str]:
    """The cases that a file holds; a line that a killed process left half-written does not count."""
    return {line["case"] for line in lines(path)} if path.exists() else set()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a file.

    Raises
    ------
    TuningError
        The file cannot be read, or holds something else.
    """
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise TuningError(f"the data set {path} cannot be read: {error.strerror}") from error
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:  # killed in the midst of a line
            line = {} if text[: len(HEAD)] == HEAD[: len(text)] else None
        if line == {}:
            continue
        if not isinstance(line, dict) or line.get("format") != FORMAT or "points" not in line:
            found = text[:40].decode(errors="replace")
            raise TuningError(f"expected a data set of format {FORMAT} in {path}; found the line {found!r}")
        yield line


def collect(
    path: Path,
    found: Iterable[Source],
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
    found : iterable of Source
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
            return _collected(path, found, programs, seed, threads, seconds, target)
    finally:
        set_num_threads(before)


def _collected(
    path: Path,
    found: Iterable[Source],
    programs: int,
    seed: int,
    threads: tuple[int, ...],
    seconds: float | None,
    target: Any,
) -> int:
    done, forms, total, begun = known_cases(path), Forms(target), 0, time.perf_counter()
    about = header(target)
    of_target = "" if target is None else f" {mcpu_of(target)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, source in enumerate(found):
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
                case = Measured(job, sparse, forms).measured(rng)
            except (SparseTIRError, ValueError, RuntimeError, MemoryError) as error:
                say(f"without {name}: {' '.join(str(error).split())[:160]}")
                continue
            append(path, {**about, "case": name, "matrix": source.name, "family": source.family, **case})
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


__all__ = ["collect", "lines"]
