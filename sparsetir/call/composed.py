# SPDX-License-Identifier: Apache-2.0
"""A kernel over other formats, called like the original: sparse arguments are converted when first seen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir import sizes
from sparsetir.call.kernel import BoundKernel, Kernel, Timing
from sparsetir.call.plans import Unfit, fits
from sparsetir.call.signature import Signature, SizeOf, checks_are_on
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError, VerifyError
from sparsetir.formats.fingerprint import hash_arrays
from sparsetir.formats.format import Format
from sparsetir.formats.tensor import Piece, SparseTensor
from sparsetir.interop import aligned_contiguous, check_detached, check_dtype, is_sparse, is_torch
from sparsetir.interop.sources import Compressed, Source, open_source
from sparsetir.ir import Program, decode
from sparsetir.shown import shown_signature
from sparsetir.transform.decompose import Decomposition, Group
from sparsetir.transform.structure import MASK_DTYPE

MOST_CONVERTED = 8


@dataclass(frozen=True, eq=False)
class Converted:
    """The structure of a sparse argument in the pieces of a group.

    ``arguments`` are the index arrays, masks and sizes for the compiled function.
    """

    tensor: SparseTensor
    arguments: dict[str, Any]

    def held(self, source: Source) -> list[np.ndarray]:
        """The pieces' values for an argument of this structure, as they are now."""
        origin = copy.copy(self.tensor.origin)
        object.__setattr__(origin, "source", replace(origin.source, values=aligned_contiguous(source.values)[0]))
        values = origin.values()
        return [piece.packed.values(values) for piece in self.tensor.pieces]

    def is_intact(self, source: Source, hashed: str) -> bool:
        """Whether the argument it was made of, whose arrays it may share, still has the structure of `source`."""
        return self.is_of(source) or _hash(self.tensor.origin.source) == hashed

    def is_of(self, source: Source) -> bool:
        """Whether it was made of these very arrays."""
        pairs = zip(_index_arrays(self.tensor.origin.source), _index_arrays(source), strict=True)
        return all(a is b for a, b in pairs)

    def has_room(self, source: Source) -> bool:
        """Whether the argument has as many values: one that is broken may have its index arrays from a sound one."""
        return source.values.shape == self.tensor.origin.source.values.shape

    def values(self, group: Group, storage: str, held: list[np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of one buffer by the names of the compiled function."""
        found = {}
        for piece, array, stored in zip(group.pieces, held, self.tensor.pieces, strict=True):
            if storage in piece.values:
                found[piece.values[storage]] = _shaped(stored, array)
        return found


class ComposedKernel:
    """A compiled decomposition, called by the buffer names of the original program.

    Parameters
    ----------
    decomposition : Decomposition
        The program over the pieces, and how its parameters come from those of the original.
    compile : callable, optional
        Makes a `Kernel` of a program; without it arguments can be converted only.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> from sparsetir import formats
    >>> parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(2, 2)})
    >>> kernel = sparsetir.build(parts)
    >>> A = sp.random_array((4, 3), density=0.5, format="csr", dtype="float32", random_state=0)
    >>> B = np.ones((3, 2), "float32")
    >>> bool(np.allclose(kernel(A=A, B=B), A @ B))
    True
    """

    def __init__(self, decomposition: Decomposition, compile: Callable[[tirx.PrimFunc], Kernel] | None = None) -> None:
        self.decomposition = decomposition
        self.program: Program = decode(decomposition.original)
        self.signature = Signature(self.program, set())
        self.groups = {name: g for g in decomposition.groups for name in g.buffers}
        self.converted: dict[Any, Converted] = {}
        self.sizes = {p.name for p in self.signature.params if not p.is_array and p.dtype.startswith("int")}
        self.lengths = {g.name: [sizes.Size(axis.length) for axis in g.axes] for g in decomposition.groups}
        self.names: set[str] = set()  # of arguments that are handed on as they are
        if compile is not None:
            self._check_axes()
            self.kernel = compile(decomposition.func)
            inner, outer = self.kernel.signature, self.signature
            self.names = (inner.by_name.keys() | inner.buffers.keys()) & (outer.by_name.keys() | outer.buffers.keys())
            # The pieces together set what the original sets: with the sizes that conversion gives them, every element.
            effects = self.kernel.signature.effects
            effects.covered |= self.signature.effects.covered & set(effects.outputs)

    def _check_axes(self) -> None:
        """Raise where a parameter of a group has other axes than its structure, or lists them in another order."""
        for name, group in self.groups.items():
            buffer = self.program.buffer(name)
            found, wanted = (", ".join(a.name for a in axes) for axes in (buffer.axes, group.axes))
            if name in self.signature.buffers and found != wanted:
                message = f"a kernel over other formats takes and gives entries of {group.name} over ({wanted})"
                raise VerifyError(f"{message}, but {name} is over ({found}): list the same axes in one order", name)

    @property
    def name(self) -> str:
        return str(self.decomposition.func.attrs["global_symbol"])

    @property
    def func(self) -> tirx.PrimFunc:
        """The stage-I program over the pieces."""
        return self.decomposition.func

    @property
    def target(self) -> Any:
        """The TVM target it is compiled for."""
        return self.kernel.target

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each decomposed buffer."""
        return dict(self.decomposition.formats)

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name} as {format!r}" for name, format in self.formats.items())
        return f"Kernel {self.name}{shown_signature(self.signature, self.formats)} with {chosen}"

    # ------------------------------------------------------------------ calling

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run the kernel; see `Kernel.__call__`. A sparse argument is converted when its structure is new."""
        if unnamed:
            raise self.signature.unnamed(unnamed)
        given, converted = self._translate(arguments)
        self._check_complete(converted)
        return self._results(self.kernel, self._taken(given), converted, arguments)

    def _taken(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments without those sizes of the original that the compiled program has no use for."""
        known = self.kernel.signature.by_name
        return {n: v for n, v in given.items() if n in known or not isinstance(v, SizeOf)}

    def _check_complete(self, converted: Mapping[str, Converted]) -> None:
        """Raise unless every decomposed structure has come with an argument."""
        for group in self.decomposition.groups:
            if group.name not in converted:
                needed = next((n for n in group.buffers if n in self.signature.buffers), group.name)
                raise ArgumentTypeError(f"missing argument {needed}")

    def bind(self, **arguments: Any) -> BoundComposedKernel:
        """Fix some arguments: sparse ones are converted once, their values too."""
        return BoundComposedKernel(self, arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Timing:
        """Time repeated calls of the compiled function itself, arguments converted and ready."""
        given, converted = self._translate(arguments)
        return self.kernel.time(seconds=seconds, **self._taken(given), **self._outputs(converted, given))

    def script(self, stage: int = 1, *, outline: bool = False, **sizes: int) -> str:
        """The program over the pieces at a stage; see `Kernel.script`."""
        return self.kernel.script(stage, outline=outline, **sizes)

    def source(self, kind: str = "ll") -> str:
        """Its LLVM IR or assembly; see `Kernel.source`."""
        return self.kernel.source(kind)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a shared library and a C header; see `Kernel.export`.

        The C function takes the arrays and sizes of the pieces in place of the sparse arguments. The header says how
        they are laid out; `write_pieces` writes those of an argument.
        """
        from sparsetir.compile.export import export
        from sparsetir.compile.export_pieces import layout

        where = Path(header) if header is not None else None
        return export(self.kernel, Path(path), where, notes=layout(self.decomposition))

    def write_pieces(self, folder: str | Path, **arguments: Any) -> Path:
        """Write sparse arguments as the exported C function takes them.

        Parameters
        ----------
        folder : str or Path
            Made if it is not there. Each array goes to a file of its own, ``indices_bsr.bin``: elements in order, as
            they lie in memory.
        **arguments
            Sparse arguments by name.

        Returns
        -------
        Path
            A C header with the sizes, ``PIECES_mb_bsr``, and the numbers of elements, ``PIECES_indices_bsr_COUNT``.
        """
        from sparsetir.compile.export_pieces import write_pieces

        return write_pieces(self, Path(folder), arguments)

    def save(self, path: str | Path) -> Path:
        """Write it to a file; see `Kernel.save`."""
        from sparsetir.call.saving import save

        return save(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        from sparsetir.call.saving import recomposed

        return recomposed, (self.decomposition, getattr(self, "kernel", None))

    def convert(self, name: str, value: Any) -> SparseTensor:
        """A sparse argument in the format that the kernel has for it."""
        return self._converted(self.groups[name], name, value, open_source(value, name)).tensor

    def pieces(self, **arguments: Any) -> dict[str, Any]:
        """Sparse arguments as arrays and sizes by the names of the compiled function's parameters."""
        return self._translate(arguments)[0]

    # ------------------------------------------------------------------ arguments

    def _group_of(self, name: str) -> Group | None:
        """The group that holds the buffer called `name`, or whose values array it is."""
        if name in self.groups:
            return self.groups[name]
        holder = self.signature.holder.get(name)
        return self.groups.get(holder.name) if holder is not None else None

    def _translate(
        self,
        arguments: Mapping[str, Any],
        before: Mapping[str, Converted] = MappingProxyType({}),
        *,
        is_kept: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Converted]]:
        """Arguments of the compiled function, and the converted structure of each group, also of what came before.

        What `is_kept` must not share arrays with other arguments, which may change.
        """
        given: dict[str, Any] = {}
        converted = dict(before)
        for name, value in arguments.items():
            group = self._group_of(name)
            if group is None and name in self.sizes:
                self.signature.check_number(name, value)
                _agree(given, name, SizeOf(int(value), "the argument"))
                continue
            if group is None and self.signature.storage_name(name) is None and name not in self.signature.by_name:
                raise self.signature.unknown(name)
            if group is None:
                self._check_needed(name)
                given[name] = value
                continue
            if name not in self.groups or not is_sparse(value):
                expected = f"{name} is stored as {self.formats.get(group.name)!r} here"
                raise ArgumentTypeError(f"{expected}: pass a sparse object, found {type(value).__name__}")
            self._add(group, name, value, given, converted, is_kept)
        return given, converted

    def _check_needed(self, name: str) -> None:
        """Raise for an index array that the compiled program has not, as the buffer is stored otherwise."""
        for group in self.decomposition.groups:
            arrays = {str(a.name) for axis in group.axes for a in (axis.indptr, axis.indices) if a is not None}
            if name in arrays and name not in self.names:
                owner = f"{name} belongs to {group.name}, which is stored as {self.formats.get(group.name)!r} here"
                raise ArgumentTypeError(f"{owner}: pass {group.name} as a sparse object")

    def _add(
        self,
        group: Group,
        name: str,
        value: Any,
        given: dict[str, Any],
        converted: dict[str, Converted],
        is_kept: bool,
    ) -> None:
        if is_torch(value):
            check_detached(value, name, "a kernel")
        buffer, source = self.program.buffer(name), open_source(value, name)
        check_dtype(source.values.dtype, buffer.dtype, name=name)
        found = converted[name] = self._converted(group, name, value, source, is_kept)
        known = converted.setdefault(group.name, found)
        if known is not found and not _same_structure(known.tensor, found.tensor):
            raise ArgumentError(f"{name} and another argument share axes but have different structures")
        given.update(found.arguments)
        given.update(found.values(group, str(buffer.storage.name), found.held(source)))
        for d, (size, length) in enumerate(zip(self.lengths[group.name], found.tensor.shape, strict=True)):
            self._note(given, size, SizeOf(length, f"{name}.shape[{d}]"))

    def _note(self, given: dict[str, Any], size: sizes.Size, value: SizeOf) -> None:
        """Note what the length of an axis says of the sizes."""
        if size.name in self.sizes:
            _agree(given, size.name, value)
        elif solved := size.solve(value, {n: v for n, v in given.items() if n in self.sizes}):
            _agree(given, solved[0], SizeOf(solved[1], value.source))

    def _converted(self, group: Group, name: str, value: Any, source: Source, is_kept: bool = False) -> Converted:
        """The structure of `value` in the group's format; kept under a checksum of its index arrays."""
        key = (group.name, type(value).__name__, _hash(source))
        known = self.converted.get(key)
        if known is not None and known.has_room(source):
            if known.is_of(source) or (not is_kept and known.is_intact(source, key[-1])):
                return known
        self._check_shape(group, name, tuple(value.shape))
        format = self.decomposition.formats[group.name]
        if not isinstance(format, Format):
            raise ArgumentTypeError(f"{name} is decomposed by bare rules: use formats.tree, or pass the pieces by name")
        tensor = SparseTensor.from_any(value, format, idtype=format.index_type, check=checks_are_on())
        _check_repeats(group, name, tensor, source)
        found = Converted(tensor, _arguments(group, tensor))
        if len(self.converted) >= MOST_CONVERTED:
            self.converted.pop(next(iter(self.converted)), None)
        self.converted[key] = found
        return found

    def _check_shape(self, group: Group, name: str, shape: tuple[int, ...]) -> None:
        """Whether a tensor of this shape can stand for the buffer."""
        if len(shape) != len(group.axes):
            axes = ", ".join(a.name for a in group.axes)
            raise ArgumentError(f"{name} has shape {shape} but the buffer has the axes {axes}")
        for d, axis in enumerate(group.axes):
            fixed = sizes.Size(axis.length).value
            if fixed is not None and fixed != shape[d]:
                raise ArgumentError(f"{name}.shape[{d}] is {shape[d]} but this kernel is written for {fixed}")

    # ------------------------------------------------------------------ results

    @property
    def has_plain_results(self) -> bool:
        """Whether no result is stored in pieces."""
        written = [*self.signature.outputs, *self.signature.effects.updated]
        return all(self._group_of(name) is None for name in written)

    def _outputs(self, converted: Mapping[str, Converted], given: Mapping[str, Any]) -> dict[str, Any]:
        """New arrays for the results that are stored in pieces."""
        made: dict[str, Any] = {}
        for name in self.signature.outputs:
            group = self._group_of(name)
            if group is None:
                continue
            if group.name not in converted:
                shown = self.signature.shown(name)
                raise ArgumentTypeError(f"{shown} has the structure of {group.name}: pass {group.name}")
            tensor, dtype = converted[group.name].tensor, self.signature.by_name[name].dtype
            held = [np.zeros(piece.packed.count, dtype) for piece in tensor.pieces]
            found = converted[group.name].values(group, name, held)
            made.update({n: a for n, a in found.items() if n not in given})
        return made

    def _results(
        self,
        kernel: Kernel | BoundKernel,
        given: dict[str, Any],
        converted: Mapping[str, Converted],
        arguments: Mapping[str, Any],
        fixed: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        made = self._outputs(converted, {**fixed, **given})
        out = kernel(**given, **made)
        inner = kernel.kernel.signature if isinstance(kernel, BoundKernel) else kernel.signature
        names = inner.outputs or inner.effects.updated
        results = dict(zip(names, out if len(names) > 1 else (out,), strict=True))
        every = {**fixed, **given, **made}
        effects = self.signature.effects
        also = [n for n in effects.updated if self._group_of(n) is not None]
        found = {n: self._result(n, results, converted, every, arguments) for n in [*self.signature.outputs, *also]}
        wanted = tuple(found[n] if n in found else results[n] for n in self.signature.outputs or effects.updated)
        return wanted[0] if len(wanted) == 1 else wanted

    def _result(
        self,
        name: str,
        results: Mapping[str, Any],
        converted: Mapping[str, Converted],
        every: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """One result in the caller's terms."""
        group = self._group_of(name)
        if group is None:
            return results[name]
        shown = self.signature.shown(name)
        tensor = converted.get(shown, converted[group.name]).tensor
        out = tensor.restore([every[piece.values[name]] for piece in group.pieces])
        passed = arguments.get(shown)
        return out if passed is None else _written(passed, out)


class BoundComposedKernel:
    """A composed kernel with some arguments fixed: converted once."""

    def __init__(self, kernel: ComposedKernel, arguments: Mapping[str, Any]) -> None:
        self.kernel, self.fixed = kernel, dict(arguments)
        given, self.converted = kernel._translate(arguments, is_kept=True)
        self.given = kernel._taken(given)
        self.bound = kernel.kernel.bind(**self.given)
        self.is_plain = kernel.has_plain_results

    def __repr__(self) -> str:
        return f"{self.kernel!r} with {', '.join(self.fixed) or 'nothing'} fixed"

    @property
    def last(self) -> tuple[Any, Callable[[dict[str, Any]], Any] | None]:
        """The key of the last call and its plan, where results are those of the compiled function."""
        return self.bound.last if self.is_plain else ((), None)

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run with the open arguments; see `Kernel.__call__`."""
        kernel = self.kernel
        if unnamed:
            raise kernel.signature.unnamed(unnamed)
        key, plan = self.bound.last
        if self.is_plain and plan is not None and fits(key, arguments):
            try:
                return plan(arguments)
            except Unfit:
                pass
        if self.is_plain and kernel.names.issuperset(arguments):
            return self.bound(**arguments)
        clash = [name for name in arguments if name in self.fixed]
        if clash:
            raise ArgumentTypeError(f"{clash[0]} is fixed by bind; do not pass it again")
        given, converted = kernel._translate(arguments, self.converted)
        for name in given.keys() & self.given.keys():
            if isinstance(given[name], SizeOf):
                _agree(self.given, name, given[name])
        given = {n: v for n, v in kernel._taken(given).items() if n not in self.given}
        every = {**self.fixed, **arguments}
        kernel._check_complete(converted)
        return kernel._results(self.bound, given, converted, every, self.given)

    def save(self, path: str | Path) -> Path:
        """Write it to a file with the fixed arguments; see `Kernel.save`."""
        from sparsetir.call.saving import save

        return save(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        from sparsetir.call.saving import rebound

        return rebound, (self.kernel, self.fixed)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a C library of the kernel, whose function takes the fixed arguments too; see `Kernel.export`."""
        return self.kernel.export(path, header=header)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Timing:
        """Time repeated calls of the compiled function, all arguments ready."""
        given, converted = self.kernel._translate(arguments)
        made = self.kernel._outputs({**self.converted, **converted}, {**self.given, **given})
        every = {**given, **made, **self.given}
        return self.bound.kernel.time(seconds=seconds, **self.kernel._taken(every))


def _index_arrays(source: Source) -> list[np.ndarray]:
    return [source.indptr, source.indices] if isinstance(source, Compressed) else list(source.coords())


def _hash(source: Source) -> str:
    """Of the contents: a structure that was changed in place is another one."""
    major = source.major if isinstance(source, Compressed) else None
    return hash_arrays(f"{source.shape} {source.block} {major}", _index_arrays(source))


def _same_structure(one: SparseTensor, other: SparseTensor) -> bool:
    return one.shape == other.shape and all(np.array_equal(a, b) for a, b in zip(one.coords, other.coords, strict=True))


def _shaped(stored: Piece, flat: np.ndarray) -> np.ndarray:
    """Values of a piece with one dimension for each of its axes trees."""
    shape = [sizes.Size(n).known(stored.sizes) or 0 for n in stored.rule.buffer.storage_shape]
    return flat.reshape(shape)


def _arguments(group: Group, tensor: SparseTensor) -> dict[str, Any]:
    """Index arrays, sizes and masks by the compiled function's names."""
    found: dict[str, Any] = {}
    for piece, stored in zip(group.pieces, tensor.pieces, strict=True):
        known = {**stored.arrays, **stored.sizes}
        found.update({param: known[name] for name, param in piece.params.items()})
        if piece.mask is not None:
            found[piece.mask] = _shaped(stored, stored.packed.values(np.ones(tensor.nnz, MASK_DTYPE)))
    return found


def _agree(given: dict[str, Any], name: str, size: SizeOf) -> None:
    """Note a size; two sources must say the same."""
    known = given.setdefault(name, size)
    if known != size:
        source = getattr(known, "source", "the structure")
        raise ArgumentError(f"{name} is {known} from {source} but {size} from {size.source}")


def _check_repeats(group: Group, name: str, tensor: SparseTensor, source: Source) -> None:
    """Raise where entries were added up of which the program uses each."""
    if group.adds_up or tensor.nnz == source.values.size:
        return
    axis = next(a.name for a in group.axes if not a.unique)
    found = f"{name} holds {source.values.size} entries at {tensor.nnz} coordinates"
    reason = f"this program uses each of them (axis {axis} has unique=False), and a format adds them up first"
    raise StructureError(f"{found}: {reason}; add them up yourself, or build the program without formats")


def _written(passed: Any, out: Any) -> Any:
    """The caller's own object with the values of a result."""
    if not sp.issparse(passed) or passed.data.shape != out.data.shape:
        raise ArgumentError(f"a {type(passed).__name__} cannot be written in place: leave it out and take the result")
    passed.data[...] = out.data
    return passed


__all__ = ["BoundComposedKernel", "ComposedKernel"]
