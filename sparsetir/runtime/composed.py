# SPDX-License-Identifier: Apache-2.0
"""A kernel over other formats, called like the original: sparse arguments are converted when first seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir.codegen.cache import Compiled
from sparsetir.codegen.export import Interface, export
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError, VerifyError
from sparsetir.formats.format import Format
from sparsetir.formats.pattern import hash_indices
from sparsetir.formats.tensor import Piece, SparseTensor
from sparsetir.interop import aligned_contiguous, check_detached, check_dtype, is_sparse, is_torch
from sparsetir.interop.sources import CompressedSource, Source, holds_own_values, open_source
from sparsetir.ir import sizes
from sparsetir.ir.views import decode
from sparsetir.runtime.bound import Bound
from sparsetir.runtime.call_plan import CallTiming
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.serialization import Saved, layout, write_pieces
from sparsetir.runtime.signature import Signature, SizeOf, check_writable, checks_are_on, shown_signature
from sparsetir.transform.decompose import Decomposition, Group
from sparsetir.transform.structure import MASK_DTYPE
from sparsetir.utils.arguments import as_path, shown
from sparsetir.utils.caches import cached_property

# Conversion of arguments to those of the same program over other formats.


MOST_CONVERTED = 8


@dataclass(frozen=True, eq=False)
class Converted:
    """The structure of a sparse argument in the pieces of a group.

    Parameters
    ----------
    tensor : SparseTensor
        Made of this argument, or of one that had the same structure then.
    source : Source
        This argument.
    hashed : str
        Of its shape and index arrays.
    arguments : dict of str to object
        The index arrays, masks and sizes for the compiled function.
    """

    tensor: SparseTensor
    source: Source
    hashed: str
    arguments: dict[str, Any]

    def held(self) -> list[np.ndarray]:
        """Return the pieces' values for the argument, as they are now."""
        values = self.tensor.origin.in_order(aligned_contiguous(self.source.values)[0])
        return [piece.packed.values(values) for piece in self.tensor.pieces]

    def restore(self, piece_arrays: list[np.ndarray]) -> Any:
        """Return an object of the argument's class and structure with values laid out like the pieces'."""
        return self.tensor.restore_as(self.source, piece_arrays)

    def serves_others(self) -> bool:
        """Return whether the structure may serve other arguments with its hash, even after the original changes."""
        return not self.is_borrowed and _hash(self.tensor.origin.source) == self.hashed

    def is_like(self, other: Converted) -> bool:
        """Return whether two arguments have the same structure, also where it is stored in another order."""
        if self.tensor is other.tensor or self.hashed == other.hashed:
            return True
        pairs = zip(self.tensor.coords, other.tensor.coords, strict=True)
        return self.tensor.shape == other.tensor.shape and all(np.array_equal(a, b) for a, b in pairs)

    @cached_property
    def is_borrowed(self) -> bool:
        """True if the compiled function reads index arrays of the argument itself."""
        own = _index_arrays(self.tensor.origin.source)
        passed = [value for value in self.arguments.values() if isinstance(value, np.ndarray)]
        return any(np.may_share_memory(one, other) for one in own for other in passed)

    def is_of(self, source: Source) -> bool:
        """Return whether the structure was converted from these same arrays."""
        pairs = zip(_index_arrays(self.tensor.origin.source), _index_arrays(source), strict=True)
        return all(a is b for a, b in pairs)

    def has_room(self, source: Source) -> bool:
        """Return whether the argument has as many values: an invalid one may share the index arrays of a valid one."""
        return source.values.shape == self.tensor.origin.source.values.shape

    def values(self, group: Group, storage: str, piece_arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of one buffer by the names of the compiled function."""
        arrays = {}
        for piece, array, stored in zip(group.pieces, piece_arrays, self.tensor.pieces, strict=True):
            if storage in piece.values:
                arrays[piece.values[storage]] = _shaped(stored, array)
        return arrays


class Converter:
    """Converter of the arguments of the original program; keeps the structures that were converted last.

    Parameters
    ----------
    decomposition : Decomposition
    signature : Signature
        Of the original program.
    passed_on : collection of str
        Arguments that the compiled function takes as they are.
    """

    def __init__(self, decomposition: Decomposition, signature: Signature, passed_on: Collection[str]) -> None:
        self.decomposition, self.signature, self.passed_on = decomposition, signature, passed_on
        self.program = signature.program
        self.groups = {name: g for g in decomposition.groups for name in g.buffers}
        self.kept: dict[Any, Converted] = {}
        self.sizes = {p.name for p in signature.params if not p.is_array and p.dtype.startswith("int")}
        self.lengths = {g.name: [sizes.Size(axis.length) for axis in g.axes] for g in decomposition.groups}

    def group_of(self, name: str) -> Group | None:
        """Return the group that holds the buffer called `name`, or whose values array it is."""
        if name in self.groups:
            return self.groups[name]
        holder = self.signature.holder.get(name)
        return self.groups.get(holder.name) if holder is not None else None

    def translate(
        self,
        arguments: Mapping[str, Any],
        before: Mapping[str, Converted] = MappingProxyType({}),
        *,
        is_kept: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Converted]]:
        """Return arguments of the compiled function, and the converted structure of each buffer, also of those before.

        What `is_kept` must not share arrays with other arguments, which may change.
        """
        translated: dict[str, Any] = {}
        converted = dict(before)
        for name, value in arguments.items():
            group = self.group_of(name)
            if group is None and name in self.sizes:
                self.signature.check_number(name, value)
                agree(translated, name, SizeOf(int(value), "the argument"))
                continue
            if group is None and self.signature.storage_name(name) is None and name not in self.signature.by_name:
                raise self.signature.unknown(name)
            if group is None:
                self._check_needed(name)
                translated[name] = value
                continue
            if name not in self.groups or not is_sparse(value):
                expected = f"{name} is stored as {self.decomposition.formats.get(group.name)!r} here"
                raise ArgumentTypeError(f"{expected}: pass a sparse object, got {type(value).__name__}")
            self._add(group, name, value, translated, converted, is_kept)
        return translated, converted

    def translate_complete(
        self, arguments: Mapping[str, Any], before: Mapping[str, Converted] = MappingProxyType({})
    ) -> tuple[dict[str, Any], dict[str, Converted]]:
        """Translate the arguments of a call; raise unless every decomposed structure came with one of them."""
        translated, converted = self.translate(arguments, before)
        self.check_complete(converted)
        return translated, converted

    def _check_needed(self, name: str) -> None:
        """Raise for an index array that the compiled program lacks, as the buffer has another format."""
        for group in self.decomposition.groups:
            arrays = {str(a.name) for axis in group.axes for a in (axis.indptr, axis.indices) if a is not None}
            if name in arrays and name not in self.passed_on:
                format = self.decomposition.formats.get(group.name)
                owner = f"{name} belongs to {group.name}, which is stored as {format!r} here"
                raise ArgumentTypeError(f"{owner}: pass {group.name} as a sparse object")

    def _add(
        self,
        group: Group,
        name: str,
        value: Any,
        translated: dict[str, Any],
        converted: dict[str, Converted],
        is_kept: bool,
    ) -> None:
        if is_torch(value):
            check_detached(value, name, "a kernel")
        buffer, source = self.program.buffer(name), open_source(value, name)
        check_dtype(source.values.dtype, buffer.dtype, name=name)
        own_conversion = self.converted(group, name, value, source, is_kept)
        for other in (n for n in group.buffers if n in converted):
            if not converted[other].is_like(own_conversion):
                raise ArgumentError(f"{name} and {other} share axes but have different structures")
        converted[name] = own_conversion
        translated.update(own_conversion.arguments)
        translated.update(own_conversion.values(group, str(buffer.storage.name), own_conversion.held()))
        for d, (size, length) in enumerate(zip(self.lengths[group.name], own_conversion.tensor.shape, strict=True)):
            self._note(translated, size, SizeOf(length, f"{name}.shape[{d}]"))

    def _note(self, translated: dict[str, Any], size: sizes.Size, value: SizeOf) -> None:
        """Set the sizes that follow from the length of an axis."""
        if size.name in self.sizes:
            agree(translated, size.name, value)
        elif solved := size.solve(value, {n: v for n, v in translated.items() if n in self.sizes}):
            agree(translated, solved[0], SizeOf(solved[1], value.source))

    def converted(self, group: Group, name: str, value: Any, source: Source, is_kept: bool = False) -> Converted:
        """Return the structure of `value` in the group's format; kept under a checksum of its index arrays."""
        key = (group.name, type(value).__name__, _hash(source))
        cached = self.kept.get(key)
        if cached is not None and cached.has_room(source):
            if cached.is_of(source) or (not is_kept and cached.serves_others()):
                return replace(cached, source=source)
        self._check_shape(group, name, tuple(value.shape))
        format = self.decomposition.formats[group.name]
        if not isinstance(format, Format):
            raise ArgumentTypeError(f"{name} is decomposed by bare rules: use formats.tree, or pass the pieces by name")
        tensor = SparseTensor.from_entries(value, format, check=checks_are_on())
        _check_repeats(group, name, tensor, source)
        conversion = Converted(tensor, source, key[-1], _arguments(group, tensor))
        for old in list(self.kept)[: len(self.kept) - MOST_CONVERTED + 1]:  # another thread may add or remove some
            self.kept.pop(old, None)
        self.kept[key] = conversion
        return conversion

    def _check_shape(self, group: Group, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor of this shape fits the buffer."""
        if len(shape) != len(group.axes):
            axes = ", ".join(a.name for a in group.axes)
            raise ArgumentError(f"{name} has shape {shape} but the buffer has the axes {axes}")
        for d, axis in enumerate(group.axes):
            fixed = sizes.Size(axis.length).value
            if fixed is not None and fixed != shape[d]:
                raise ArgumentError(f"{name}.shape[{d}] is {shape[d]} but this kernel is written for {fixed}")

    def check_complete(self, converted: Mapping[str, Converted]) -> None:
        """Raise unless every decomposed buffer that is read was passed, and one of each structure.

        Otherwise the compiled function would ask for its own arrays.
        """
        if (missing := self._missing(converted)) is not None:
            raise self.signature.missing(self.signature.by_name[self._storage(missing)])

    def is_complete(self, converted: Mapping[str, Converted]) -> bool:
        """Return whether no call needs another sparse argument."""
        return self._missing(converted) is None

    def _missing(self, converted: Mapping[str, Converted]) -> str | None:
        """Return the first decomposed buffer that has to be passed and was not."""
        for group in self.decomposition.groups:
            passed = [name for name in group.buffers if name in self.signature.buffers]
            inputs = [name for name in passed if not self._is_result(name)]
            if (missing := next((name for name in inputs if name not in converted), None)) is not None:
                return missing
            if passed and structure_of(group, converted) is None:
                return passed[0]
        return None

    def _storage(self, name: str) -> str:
        return str(self.program.buffer(name).storage.name)

    def _is_result(self, name: str) -> bool:
        """Return whether a buffer is made by a call where it is not passed."""
        return self._storage(name) in self.signature.results


def structure_of(group: Group, converted: Mapping[str, Converted]) -> Converted | None:
    """Return the structure that the buffers of a group share; None if none of them was passed."""
    return next((converted[name] for name in group.buffers if name in converted), None)


def check_axes(decomposition: Decomposition, signature: Signature) -> None:
    """Raise where a parameter of a group has other axes than its structure, or lists them in another order."""
    for name, group in [(name, g) for g in decomposition.groups for name in g.buffers]:
        buffer = signature.program.buffer(name)
        axes_of_buffer, axes_of_group = (", ".join(a.name for a in axes) for axes in (buffer.axes, group.axes))
        if name in signature.buffers and axes_of_buffer != axes_of_group:
            message = f"a kernel over other formats takes and gives entries of {group.name} over ({axes_of_group})"
            raise VerifyError(
                f"{message}, but {name} is over ({axes_of_buffer}): list the same axes in one order", name
            )


def _index_arrays(source: Source) -> list[np.ndarray]:
    return [source.indptr, source.indices] if isinstance(source, CompressedSource) else list(source.coords())


def _hash(source: Source) -> str:
    """Return a key of the contents, so that a structure that was changed in place has another one."""
    major = source.major if isinstance(source, CompressedSource) else None
    return hash_indices(f"{source.shape} {source.block} {major}", _index_arrays(source))


def _shaped(stored: Piece, flat: np.ndarray) -> np.ndarray:
    """Return the values of a piece with one dimension for each of its axes trees."""
    shape = [sizes.Size(n).known(stored.sizes) or 0 for n in stored.rule.buffer.storage_shape]
    return flat.reshape(shape)


def _arguments(group: Group, tensor: SparseTensor) -> dict[str, Any]:
    """Return index arrays, sizes and masks by the names of the compiled function."""
    arguments: dict[str, Any] = {}
    for piece, stored in zip(group.pieces, tensor.pieces, strict=True):
        parts = {**stored.arrays, **stored.sizes}
        arguments.update({param: parts[name] for name, param in piece.params.items()})
        if piece.mask is not None:
            arguments[piece.mask] = _shaped(stored, stored.packed.values(np.ones(tensor.nnz, MASK_DTYPE)))
    return arguments


def agree(translated: dict[str, Any], name: str, size: SizeOf) -> None:
    """Set a size; raise where two sources differ."""
    previous = translated.setdefault(name, size)
    if previous != size:
        source = getattr(previous, "source", "the structure")
        raise ArgumentError(f"{name} is {previous} from {source} but {size} from {size.source}")


def _check_repeats(group: Group, name: str, tensor: SparseTensor, source: Source) -> None:
    """Raise where repeated entries were summed although the program uses each of them."""
    if group.adds_up or tensor.nnz == source.values.size:
        return
    axis = next(a.name for a in group.axes if not a.unique)
    fault = f"{name} holds {source.values.size} entries at {tensor.nnz} coordinates"
    reason = f"this program uses each of them (axis {axis} has unique=False), and a format adds them up first"
    raise StructureError(f"{fault}: {reason}; add them up yourself, or build the program without formats")


# The kernel.


Compile: TypeAlias = Callable[[tirx.PrimFunc, Collection[str]], Kernel]


class ComposedKernel(Saved):
    """A compiled decomposition, called by the buffer names of the original program.

    Parameters
    ----------
    decomposition : Decomposition
        The program over the pieces, and how its parameters come from those of the original.
    compile : callable, optional
        Makes a `Kernel` of a program, told which results are written everywhere; without it arguments can be converted
        only.

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

    kernel: Kernel

    def __init__(self, decomposition: Decomposition, compile: Compile | None = None) -> None:
        self.decomposition = decomposition
        self.signature = Signature(decode(decomposition.original), set())
        self.names: set[str] = set()  # names of arguments that are passed on as they are
        if compile is not None:
            check_axes(decomposition, self.signature)
            # The pieces together write every element that the original writes, given the sizes from the conversion.
            self.kernel = compile(decomposition.func, self.signature.effects.covered)
            inner, outer = self.kernel.signature, self.signature
            inner.caller_names = self._caller_names()
            self.names = (inner.by_name.keys() | inner.buffers.keys()) & (outer.by_name.keys() | outer.buffers.keys())
        self.converter = Converter(decomposition, self.signature, self.names)

    def _caller_names(self) -> dict[str, str]:
        """Return the name of the argument that each array of a piece comes from."""
        names: dict[str, str] = {}
        for group in self.decomposition.groups:
            for piece in group.pieces:
                names |= dict.fromkeys((*piece.params.values(), *filter(None, [piece.mask])), group.name)
                names |= {array: self.signature.shown(storage) for storage, array in piece.values.items()}
        return names

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
        formats_text = ", ".join(f"{name} as {format!r}" for name, format in self.formats.items())
        return f"Kernel {self.name}{shown_signature(self.signature, self.formats)} with {formats_text}"

    # ------------------------------------------------------------------ calling

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run the kernel; see `Kernel.__call__`. A sparse argument is converted when its structure is new."""
        if unnamed:
            raise self.signature.unnamed(unnamed)
        self.check_results(arguments)
        translated, converted = self.converter.translate_complete(arguments)
        translated = self.needed(translated)
        outputs = self.new_outputs(converted, translated)
        out = self.kernel(**translated, **outputs)
        return self.results(out, converted, {**translated, **outputs}, arguments)

    def needed(self, translated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments without those sizes of the original that the compiled program has no use for."""
        params = self.kernel.signature.by_name
        return {n: v for n, v in translated.items() if n in params or not isinstance(v, SizeOf)}

    def bind(self, **arguments: Any) -> BoundComposedKernel:
        """Fix some arguments: sparse ones are converted once, their values too."""
        return BoundComposedKernel(self, arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the compiled function itself, arguments converted and ready."""
        translated, converted = self.converter.translate_complete(arguments)
        return self.kernel.time(seconds=seconds, **self.needed(translated), **self.new_outputs(converted, translated))

    def script(self, stage: int = 1, *, outline: bool = False, **sizes: int) -> str:
        """Return the program over the pieces at a stage; see `Kernel.script`."""
        return self.kernel.script(stage, outline=outline, **sizes)

    def source(self, kind: str = "ll") -> str:
        """Return the LLVM IR or assembly of the kernel; see `Kernel.source`."""
        return self.kernel.source(kind)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a shared library and a C header; see `Kernel.export`.

        The C function takes the arrays and sizes of the pieces in place of the sparse arguments. The header says how
        they are laid out; `write_pieces` writes those of an argument.
        """
        where = Path(header) if header is not None else None
        return export(self.kernel, Path(path), where, interface=Interface(self.kernel, layout(self.decomposition)))

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
        return write_pieces(self, as_path(folder, "folder", "the path of a folder"), arguments)

    def compiled_parts(self) -> Iterator[Compiled]:
        if hasattr(self, "kernel"):
            yield from self.kernel.compiled_parts()

    def __reduce__(self) -> tuple[Any, ...]:
        return _recomposed, (self.decomposition, getattr(self, "kernel", None))

    def convert(self, name: str, value: Any) -> SparseTensor:
        """Return a sparse argument in the format that the kernel has for it."""
        groups = self.converter.groups
        if not isinstance(name, str) or name not in groups:
            raise ArgumentError(f"name: expected one of {', '.join(groups)}, got {shown(name)}. Pass one of these.")
        return self.converter.converted(groups[name], name, value, open_source(value, name)).tensor

    def pieces(self, **arguments: Any) -> dict[str, Any]:
        """Return sparse arguments as arrays and sizes by the names of the compiled function's parameters."""
        return self.converter.translate(arguments)[0]

    # ------------------------------------------------------------------ results

    @property
    def has_plain_results(self) -> bool:
        """Whether no result is stored in pieces."""
        written = [*self.signature.outputs, *self.signature.effects.updated]
        return all(self.converter.group_of(name) is None for name in written)

    def check_results(self, arguments: Mapping[str, Any]) -> None:
        """Raise where a result that is stored in pieces cannot be written to the object that was passed for it."""
        for name in (*self.signature.outputs, *self.signature.effects.updated):
            shown_name = self.signature.shown(name)
            target = arguments.get(shown_name)
            if self.converter.group_of(name) is not None and isinstance(target, (sp.sparray, sp.spmatrix)):
                has_own = holds_own_values(target)
                values = target.data if has_own else np.empty(0)
                check_writable(values, shown_name, type(target), copied=not has_own)

    def new_outputs(self, converted: Mapping[str, Converted], inner_arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return new arrays for the results that are stored in pieces."""
        outputs: dict[str, Any] = {}
        for name in self.signature.outputs:
            group = self.converter.group_of(name)
            if group is None:
                continue
            structure = structure_of(group, converted)
            assert structure is not None  # a complete call has one
            dtype = self.signature.by_name[name].dtype
            zeros = [np.zeros(piece.packed.count, dtype) for piece in structure.tensor.pieces]
            zeros_of = structure.values(group, name, zeros)
            outputs.update({n: a for n, a in zeros_of.items() if n not in inner_arguments})
        return outputs

    def results(
        self,
        out: Any,
        converted: Mapping[str, Converted],
        inner_arguments: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """Return the results of the compiled function, called with `inner_arguments`, in the caller's terms."""
        inner = self.kernel.signature
        names = inner.outputs or inner.effects.updated
        results = dict(zip(names, out if len(names) > 1 else (out,), strict=True))
        effects = self.signature.effects
        also = [n for n in effects.updated if self.converter.group_of(n) is not None]
        results_of = {
            n: self._result(n, results, converted, inner_arguments, arguments) for n in [*self.signature.outputs, *also]
        }
        wanted = tuple(
            results_of[n] if n in results_of else results[n] for n in self.signature.outputs or effects.updated
        )
        return wanted[0] if len(wanted) == 1 else wanted

    def _result(
        self,
        name: str,
        results: Mapping[str, Any],
        converted: Mapping[str, Converted],
        inner_arguments: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """Return one result in the caller's terms."""
        group = self.converter.group_of(name)
        if group is None:
            return results[name]
        buffer_name = self.signature.shown(name)
        structure = converted.get(buffer_name) or structure_of(group, converted)
        assert structure is not None  # a complete call has one
        out = structure.restore([inner_arguments[piece.values[name]] for piece in group.pieces])
        output_of_caller = arguments.get(buffer_name)
        return out if output_of_caller is None else _written(output_of_caller, out)


def _written(target: Any, out: Any) -> Any:
    """Return the caller's own object with the values of a result."""
    if not sp.issparse(target) or target.data.shape != out.data.shape:
        raise ArgumentError(f"a {type(target).__name__} cannot be written in place: leave it out and take the result")
    target.data[...] = out.data
    return target


def _recomposed(decomposition: Decomposition, kernel: Kernel | None) -> ComposedKernel:
    """Return a composed kernel from its pickled state."""
    return ComposedKernel(decomposition, None if kernel is None else lambda _func, _covered: kernel)


# ------------------------------------------------------------------ some arguments fixed


class BoundComposedKernel(Bound):
    """A composed kernel with some arguments fixed: converted once."""

    def __init__(self, kernel: ComposedKernel, arguments: Mapping[str, Any]) -> None:
        super().__init__(kernel, arguments)
        translated, self.converted = kernel.converter.translate(arguments, is_kept=True)
        self.given = kernel.needed(translated)
        self.bound = kernel.kernel.bind(**self.given)
        self.is_plain = kernel.has_plain_results and kernel.converter.is_complete(self.converted)

    def dispatch(self, arguments: dict[str, Any]) -> Any:
        kernel = self.kernel
        if self.is_plain and kernel.names.issuperset(arguments):
            result = self.bound(**arguments)
            self.last = self.bound.last  # plans of the inner kernel serve these calls, too
            return result
        kernel.check_results({**self.fixed, **arguments})
        translated, converted = self._translated(arguments)
        outputs = kernel.new_outputs(converted, {**self.given, **translated})
        out = self.bound(**translated, **outputs)
        return kernel.results(out, converted, {**self.given, **translated, **outputs}, {**self.fixed, **arguments})

    def _translated(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Converted]]:
        """Return the open arguments of the compiled function, which must agree with the fixed ones, and structures."""
        for name in arguments:
            if name in self.fixed:
                raise ArgumentTypeError(f"{name} is fixed by bind; do not pass it again")
        translated, converted = self.kernel.converter.translate_complete(arguments, self.converted)
        for name in translated.keys() & self.given.keys():
            if isinstance(translated[name], SizeOf):
                agree(self.given, name, translated[name])
        return {n: v for n, v in self.kernel.needed(translated).items() if n not in self.given}, converted

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the compiled function, all arguments ready."""
        translated, converted = self._translated(arguments)
        every = {**translated, **self.given}
        return self.bound.kernel.time(seconds=seconds, **every, **self.kernel.new_outputs(converted, every))


__all__ = ["BoundComposedKernel", "ComposedKernel", "Converted", "Converter", "agree", "check_axes", "structure_of"]
