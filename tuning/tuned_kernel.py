# SPDX-License-Identifier: Apache-2.0
"""Tuned kernels, from a search or from records."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from sparsetir.codegen.cache import Compiled, versions
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.interop import is_sparse
from sparsetir.ir.views import decode
from sparsetir.kernel_factory import make_kernel
from sparsetir.lower import single
from sparsetir.runtime.bound import Bound, BoundKernel
from sparsetir.runtime.call_plan import CallTiming
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.serialization import Saved
from sparsetir.runtime.signature import Signature
from sparsetir.runtime.validation import GuardedBound, NonFiniteGuard
from sparsetir.script.printer import script
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.transform.decompose import decompose_format
from sparsetir.tuning.knobs import Template
from sparsetir.tuning.loop import WORTH, Comparison, compared, is_untuned
from sparsetir.tuning.lowered_program import with_knobs
from sparsetir.tuning.records import Database, Key, Record, digest, fingerprint
from sparsetir.tuning.space import Candidate, fixed
from sparsetir.utils.arguments import as_path
from sparsetir.utils.caches import cached_property
from sparsetir.utils.machine import machine_name
from sparsetir.utils.packages import __version__
from sparsetir.utils.threads import get_num_threads

# Tuned kernels: dispatch to the best known kernel for the arguments of a call.


MOST_BOUND = 64  # sets of sizes for which a bound kernel keeps its choices
Sizes = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Variant:
    """A candidate of one program.

    Parameters
    ----------
    func : PrimFunc
        The program.
    target : Target, str or dict, optional
    candidate : Candidate
    argument : str or None
        The sparse argument that its format is for.
    fixed : dict of str to int
        Sizes that are compiled in.
    template : Template or None
        Whose knobs its choices are.
    sizes : dict of str to int
        Of the arguments that it was tuned on.
    pattern : str or None
        Hash of the index arrays that it is for; None: of any.
    """

    func: tirx.PrimFunc
    target: Any
    candidate: Candidate
    argument: str | None
    fixed: Sizes
    template: Template | None = None
    sizes: Sizes = field(default_factory=dict)
    pattern: str | None = None

    @cached_property
    def kernel(self) -> Kernel | ComposedKernel | None:
        """Compiled for its sizes; None if it is unavailable."""
        try:
            return self.built()
        except SparseTIRError:  # a record of what another program could do
            return None

    @cached_property
    def general(self) -> Kernel | ComposedKernel | None:
        """Over the same format for all sizes, scheduled by the rules or by the template; None if it is unavailable."""
        schedule = with_knobs(self.template, self.candidate.choices) if self.template is not None else None
        try:
            return self._built({}, schedule)
        except SparseTIRError:
            return None

    def built(self) -> Kernel | ComposedKernel:
        """Return `kernel`.

        Raises
        ------
        SparseTIRError
            It is unavailable.
        """
        return self._built(self.fixed, with_knobs(self.template, self.candidate.choices))

    def _built(self, sizes: Sizes, schedule: Any) -> Any:
        func = fixed(decode(self.func), sizes)
        if self.candidate.format is not None:
            format = self.candidate.format
            func = decompose_format(func, format if self.argument is None else {self.argument: format})
        return make_kernel(func, self.target, schedule=schedule)

    def fits(self, sizes: Sizes) -> bool:
        """Return whether a call with these sizes can use its kernel."""
        return all(sizes.get(name) == value for name, value in self.fixed.items())

    def distance(self, sizes: Sizes) -> float:
        """Return how far a call's sizes are from those it was tuned on."""
        pairs = [(sizes[n], value) for n, value in self.sizes.items() if n in sizes]
        return sum(abs(log2(max(a, 1) / max(b, 1))) for a, b in pairs)


class TunedKernel(Saved):
    """A kernel that takes for each call the best one that is known for its arguments.

    One that was tuned for the sizes of the call, else one over the format that was best for other sizes, else the
    untuned kernel; the kernels are compiled when they are first needed. Infinities and NaN reach the same results as
    with the untuned kernel, whatever the format.

    Parameters
    ----------
    plain : Kernel
        The untuned one.
    variants : sequence of Variant
        The best first.
    assume_finite : bool
        Whether arguments are promised to hold neither infinities nor NaN: results are not checked then.
    """

    def __init__(self, plain: Kernel, variants: Sequence[Variant], *, assume_finite: bool = False) -> None:
        self.plain, self.variants, self.assume_finite = plain, tuple(variants), assume_finite
        self._fixed = sorted({name for v in self.variants for name in (*v.fixed, *v.sizes)})
        self._places = _places(plain.signature)
        self.is_for_patterns = any(v.pattern is not None for v in self.variants)
        self.watch = NonFiniteGuard(plain.signature)

    # ------------------------------------------------------------------ properties

    @property
    def func(self) -> tirx.PrimFunc:
        """The stage-I program."""
        return self.plain.func

    @property
    def name(self) -> str:
        return self.plain.name

    @property
    def target(self) -> Any:
        """The TVM target it is compiled for."""
        return self.plain.target

    @property
    def signature(self) -> Signature:
        """The parameters of the program."""
        return self.plain.signature

    @property
    def best(self) -> Kernel | ComposedKernel:
        """The kernel of the first variant, compiled for its sizes; the untuned one where there is none."""
        return (self.variants[0].kernel if self.variants else None) or self.plain

    def __repr__(self) -> str:
        if not self.variants:
            return f"{self.plain!r}, untuned"
        if len(self.variants) > 1:
            patterns = len({v.pattern for v in self.variants})
            return f"{self.plain!r}, tuned for {len(self.variants)} calls with {patterns} patterns"
        (only,) = self.variants
        format = only.candidate.format
        stored = f" with {only.argument or 'the sparse argument'} as {format!r}" if format is not None else ""
        sizes = ", ".join(f"{name} = {value}" for name, value in only.fixed.items())
        return f"{self.plain!r}{stored}{', tuned for ' + sizes if sizes else ''}"

    # ------------------------------------------------------------------ calling

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run the kernel; see `Kernel.__call__`."""
        if unnamed:
            raise self.signature.unnamed(unnamed)
        kernel = self.chosen(arguments)
        if kernel is self.plain:
            return kernel(**arguments)
        try:
            if self.assume_finite or not _multiplies_zeros(kernel):
                return kernel(**arguments)
            return self.watch.call(kernel, self.plain, arguments, {})
        except SparseTIRError:  # the format does not take this matrix, or the arguments are wrong: then that says how
            return self.plain(**arguments)

    def bind(self, **arguments: Any) -> BoundTunedKernel:
        """Fix some arguments, usually the sparse ones: they are looked at and converted once."""
        return BoundTunedKernel(self, arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the compiled function itself; see `Kernel.time`."""
        return self.chosen(arguments).time(seconds=seconds, **arguments)

    def chosen(self, arguments: Mapping[str, Any]) -> Kernel | ComposedKernel:
        """Return the kernel for a call with these arguments."""
        return self.suited(self.sizes(arguments), self.pattern(arguments))

    def suited(self, sizes: Sizes, pattern: str | None) -> Kernel | ComposedKernel:
        """Return the kernel for a call with these sizes and this pattern."""
        matching = [v for v in self.variants if v.pattern is None or v.pattern == pattern]
        exact = next((v for v in matching if v.fits(sizes)), None)
        if exact is not None:
            return exact.kernel or self.plain
        formatted = [v for v in matching if v.candidate.format is not None or v.template is not None]
        near = min(formatted, key=lambda v: v.distance(sizes), default=None)
        general = near.general if near is not None else None
        return self.plain if general is None else general

    def sizes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes of a call that decide which kernel is used."""
        values: dict[str, int] = {}
        for name in self._fixed:
            value = arguments.get(name)
            if value is None:
                value = self._from_shapes(name, arguments)
            if isinstance(value, int):
                values[name] = value
        return values

    def _from_shapes(self, size: str, arguments: Mapping[str, Any]) -> int | None:
        for name, d in self._places.get(size, ()):
            shape = getattr(arguments.get(name), "shape", ())
            if len(shape) > d:
                return int(shape[d])
        return None

    def pattern(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the hash of a call's index arrays; None where none is asked for, or not all are given."""
        if not self.is_for_patterns:
            return None
        index_arrays = {name for pair in self.signature.axes_of_array.values() for name in pair}
        structures = {n: v for n, v in arguments.items() if is_sparse(v) or n in index_arrays}
        args = BoundKernel(self.plain, structures).args
        try:
            return fingerprint(self.signature.program, args.arrays)
        except KeyError:
            return None

    # ------------------------------------------------------------------ looking inside

    @property
    def formats(self) -> dict[str, Any]:
        """The format of each buffer that the best kernel stores otherwise."""
        return dict(getattr(self.best, "formats", {}))

    def script(self, stage: int = 1) -> str:
        """Return the text of the best kernel at a stage; see `Kernel.script`."""
        return self.best.script(stage)

    def source(self, kind: str = "ll") -> str:
        """LLVM IR or assembly of the best kernel; see `Kernel.source`."""
        return self.best.source(kind)

    def compiled_parts(self) -> Iterator[Compiled]:
        for kernel in (self.plain, self.best):
            yield from kernel.compiled_parts()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.plain, self.variants, self.assume_finite)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write the best kernel as a C library; see `Kernel.export`."""
        return self.best.export(path, header=header)


class BoundTunedKernel(Bound):
    """A tuned kernel with some arguments fixed; the kernel for the others' sizes is chosen when they are first seen."""

    def __init__(self, kernel: TunedKernel, arguments: dict[str, Any]) -> None:
        super().__init__(kernel, arguments)
        self.checked = BoundKernel(kernel.plain, self.fixed)  # raises for wrong arguments here and not in a call
        self.pattern = kernel.pattern(arguments)
        self.held: dict[tuple[tuple[str, int], ...], Any] = {}

    def dispatch(self, arguments: dict[str, Any]) -> Any:
        bound = self._bound(arguments)
        result = bound(**arguments)
        self.last = bound.last
        return result

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the compiled function, all arguments ready."""
        return self._bound(arguments).time(seconds=seconds, **arguments)

    def _bound(self, arguments: Mapping[str, Any]) -> Any:
        every = {**self.fixed, **arguments}
        sizes = self.kernel.sizes(every)
        at = tuple(sizes.items())
        if at in self.held:
            return self.held[at]
        pattern = self.pattern if self.pattern is not None else self.kernel.pattern(every)
        kernel = self.kernel.suited(sizes, pattern)
        if self.pattern is None and self.kernel.is_for_patterns:
            return self._over(kernel)  # the next call may have another
        if len(self.held) >= MOST_BOUND:
            self.held.pop(next(iter(self.held)))
        self.held[at] = self._over(kernel)
        return self.held[at]

    def _over(self, kernel: Kernel | ComposedKernel) -> Any:
        """Return the fixed arguments bound to a kernel, which is watched where it multiplies zeros."""
        if kernel is self.kernel.plain:
            return self.checked
        try:
            bound = kernel.bind(**self.fixed)
        except SparseTIRError:  # the format does not take this matrix
            return self.checked
        if self.kernel.assume_finite or not _multiplies_zeros(kernel) or self._is_full(kernel):
            return bound
        return GuardedBound(bound, lambda: self.checked, self.kernel.watch)

    def _is_full(self, kernel: Any) -> bool:
        """Return whether the bound argument has no zeros between the entries in its format."""
        names = [name for name in kernel.converter.groups if name in self.fixed]
        return bool(names) and all(kernel.convert(name, self.fixed[name]).padding == 0 for name in names)


def _restored(plain: Kernel, variants: Sequence[Variant], assume_finite: bool) -> TunedKernel:
    """Return a tuned kernel out of what pickle kept."""
    return TunedKernel(plain, variants, assume_finite=assume_finite)


def _multiplies_zeros(kernel: Kernel | ComposedKernel) -> bool:
    return isinstance(kernel, ComposedKernel) and kernel.decomposition.multiplies_zeros


def _places(signature: Signature) -> dict[str, list[tuple[str, int]]]:
    """Return for each size the arguments whose shapes tell it, and their dimension."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, buffer in signature.buffers.items():
        for d, axis in enumerate(buffer.axes):
            size = signature.length[axis].name
            if size is not None:
                places.setdefault(size, []).append((name, d))
    for param in signature.params:
        for d, extent in enumerate(param.shape or ()):
            if extent.name is not None:
                places.setdefault(extent.name, []).append((param.name, d))
    return places


# Kernels from the records of earlier searches, without a search: `sparsetir.build(func, database=...)`.


def circumstances(kernel: Kernel | SparseOutputKernel, template: Template | None = None) -> dict[str, Any]:
    """Return the fields of a record's key that do not depend on the arguments."""
    texts = [script(kernel.func), *([template.text] if template is not None else [])]
    written = kernel.signature.effects.written
    return {
        "name": kernel.name,
        "program": digest("\0".join(texts)),
        "dtype": " ".join(kernel.signature.by_name[name].dtype for name in written),
        "target": str(kernel.target),
        "machine": machine_name(),
        "threads": get_num_threads(),
        "versions": f"sparsetir {__version__} {digest(versions())}, tvm {tvm.__version__}",
    }


def recorded(func: Any, target: Any, schedule: Any, path: str | Path, *, assume_finite: bool = False) -> TunedKernel:
    """Return the kernel that takes for each call what the last search for such arguments ended with.

    Parameters
    ----------
    func : PrimFunc or IRModule with one PrimFunc
    target : Target, str or dict, optional
    schedule : Template or None
        Whose knobs were searched.
    path : str or Path
        The database.
    assume_finite : bool
        See `TunedKernel`.

    Raises
    ------
    ArgumentError
        There is no such file.
    ArgumentTypeError
        `schedule` is something else.
    """
    if schedule is not None and not isinstance(schedule, Template):
        fault = "with a database the schedule is a template that was tuned, or none"
        raise ArgumentTypeError(f"{fault}, got {type(schedule).__name__}")
    records, program = existing_database(path), single(func)
    plain: Kernel = make_kernel(program, target)
    about = circumstances(plain, schedule)
    agreeing = ((key, comparison) for key, comparison in compared(records, about["program"]) if agrees(key, about))
    comparisons = {_arguments(key): (key, comparison) for key, comparison in agreeing}
    best: list[tuple[Key, dict[str, int], Record, Comparison | None]]
    best = [
        (key, r.fixed, r, comparison) for key, comparison in comparisons.values() if (r := comparison.best) is not None
    ]
    best += [(key, r.fixed, r, None) for key, r in unfinished(records, about) if _arguments(key) not in comparisons]
    if not comparisons and not best:
        warn_of_no_records(records.path)
    variants = [_variant(program, target, schedule, *parts) for parts in reversed(best)]
    return TunedKernel(plain, variants, assume_finite=assume_finite)


def existing_database(path: str | Path) -> Database:
    """Return a database; raise where the file does not exist."""
    path = as_path(path, "database", "the path of a file of records")
    if not path.is_file():
        raise ArgumentError(f"there is no database {path}: tune_sparse(..., database={str(path)!r}) makes one")
    return Database(path)


def warn_of_no_records(path: Path | None) -> None:
    """Warn the caller of `build` that a database has no records of a kernel."""
    fields = "program, target, machine, number of threads and versions"
    warnings.warn(f"{path} has no records of this {fields}: the kernel is untuned", stacklevel=4)


def _variant(
    program: tirx.PrimFunc,
    target: Any,
    template: Template | None,
    key: Key,
    fixed: dict[str, int],
    record: Record,
    comparison: Comparison | None,
) -> Variant:
    argument = comparison.argument if comparison is not None else None
    return Variant(program, target, record.candidate, argument, fixed, template, key.sizes, key.pattern)


def agrees(key: Key, about: dict[str, Any]) -> bool:
    """Return whether records of a key count in these `circumstances`."""
    return all(getattr(key, name) == value for name, value in about.items())


def _arguments(key: Key) -> tuple[Any, ...]:
    """Return the identity of a call."""
    return key.pattern, *sorted(key.sizes.items())


def unfinished(records: Database, about: dict[str, Any]) -> Iterator[tuple[Key, Record]]:
    """Yield the best trials of searches that were ended before their last comparison, where they are clearly better."""
    trials: dict[tuple[Any, ...], list[tuple[Key, Record]]] = {}
    for key, record, _line in records.of_program(about["program"]):
        if agrees(key, about) and record.seconds is not None:
            trials.setdefault(_arguments(key), []).append((key, record))
    for records_of_key in trials.values():
        before = [r.seconds for _, r in records_of_key if is_untuned(r) and r.seconds is not None]
        tuned = [(key, r) for key, r in records_of_key if not is_untuned(r)]
        best = min(tuned, key=lambda each: each[1].seconds or 0.0, default=None)
        if best is not None and before and (best[1].seconds or 0.0) <= WORTH * before[0]:
            yield best


__all__ = [
    "BoundTunedKernel",
    "TunedKernel",
    "Variant",
    "agrees",
    "circumstances",
    "existing_database",
    "recorded",
    "unfinished",
    "warn_of_no_records",
]
