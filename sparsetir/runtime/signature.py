# SPDX-License-Identifier: Apache-2.0
"""Bind named arguments to the parameters of a compiled function, infer the others; signatures as text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from sparsetir import interop
from sparsetir.errors import ArgumentError, ArgumentTypeError, OffsetError
from sparsetir.ir import sizes
from sparsetir.ir.effects import Effects, analyse, order_free_axes
from sparsetir.ir.views import Axis, Program, SparseBuffer
from sparsetir.lower.annotations import FINITE
from sparsetir.runtime.validation import is_sound
from sparsetir.utils import buffers as alignment
from sparsetir.utils.arguments import as_int64, is_integer

#: The kinds of a buffer's axes, but for dense axes that stand alone, and what the layout is called.
LAYOUTS = {
    ("dense_fixed", "sparse_variable"): "csr",
    ("sparse_fixed", "singleton"): "coo",
    ("sparse_variable", "sparse_variable"): "dcsr",
    ("dense_fixed", "sparse_fixed"): "ell",
    ("dense_fixed", "dense_variable"): "ragged",
    ("dense_fixed", "sparse_variable", "sparse_variable"): "csf",
}


def layout_of(buffer: SparseBuffer) -> str:
    """Return the name of a buffer's layout; empty for a dense one.

    Examples
    --------
    >>> import sparsetir
    >>> [layout_of(sparsetir.ir.decode(sparsetir.ops.spmm(format=f)).buffer("A")) for f in ("csr", "csc", "bsr", "coo")]
    ['csr', 'csc', 'bsr', 'coo']
    """
    if buffer.is_dense:
        return ""
    sparse = [tree for tree in buffer.trees if len(tree) > 1 or tree[0].kind != "dense_fixed"]
    kinds = tuple(axis.kind.replace("sparse_assembled", "sparse_variable") for axis in sparse[0])
    name = LAYOUTS.get(kinds, "sparse") if len(sparse) == 1 else "sparse"
    if name == "csr" and len(buffer.trees) == 3:
        return "bsr"
    in_order = [buffer.axes.index(axis) for axis in sparse[0]]
    return "csc" if name == "csr" and in_order == [1, 0] else name


def shown_buffer(buffer: SparseBuffer, *, layout: bool = True) -> str:
    """Return name, dtype, sizes and layout of a buffer, as in ``A: float32[m, n] csr``."""
    sizes = ", ".join(str(axis.length) for axis in buffer.axes)
    layout_text = layout_of(buffer) if layout else ""
    return f"{buffer.name}: {buffer.dtype}[{sizes}] {layout_text}".rstrip()


def shown_signature(signature: Signature, converted: Collection[str] = (), declared: Program | None = None) -> str:
    """Return the arguments and results of a kernel.

    Index arrays of buffers that are passed whole are left out.

    Parameters
    ----------
    signature : Signature
    converted : collection of str
        Buffers whose class is free: they are shown without their layout.
    declared : Program, optional
        The program as it was written, where the signature is of one with stand-ins for results.
    """
    written: dict[str, SparseBuffer] = {} if declared is None else {b.name: b for b in declared.buffers.values()}
    holders = [signature.holder[p.name] for p in signature.params if p.name in signature.holder]
    outputs = [signature.holder[name] for name in signature.results]

    def show(buffer: SparseBuffer) -> str:
        return shown_buffer(written.get(buffer.name, buffer), layout=buffer.name not in converted)

    inputs = [show(b) for b in holders if b not in outputs]
    inputs += [p.name for p in signature.params if p.is_array and p.name not in _passed_whole(signature)]
    return f"({', '.join(inputs)}) -> {', '.join(map(show, outputs)) or 'updates in place'}"


def _passed_whole(signature: Signature) -> set[str]:
    """Return the array parameters that a caller need not name: those of buffers, and of the axes of buffers."""
    axes = [axis for buffer in signature.buffers.values() for axis in buffer.axes]
    arrays = [array for axis in axes for array in (axis.indptr, axis.indices) if array is not None]
    return {*signature.holder, *(str(array.name) for array in arrays)}


# The arguments of one call, and whether their index arrays are checked.


LARGEST_INT32 = sizes.LARGEST_INT32
# One for each thread or asyncio task: a block in one must not disable checks in another.
_checks: ContextVar[bool] = ContextVar("_checks", default=True)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Trust the index arrays of sparse arguments inside the block: no check, and a crash if they are wrong.

    Only calls in the block's own thread are meant, and without ``with`` nothing changes.

    Examples
    --------
    >>> import sparsetir
    >>> with sparsetir.unchecked():
    ...     pass
    """
    before = _checks.get()
    _checks.set(False)
    try:
        yield
    finally:
        _checks.set(before)


# Returns whether index arrays are checked where they enter; the method itself, because every call asks.
checks_are_on = _checks.get


class SizeOf(int):
    """A size and its source, for messages."""

    source: str

    def __new__(cls, value: int, source: str) -> SizeOf:
        size = super().__new__(cls, value)
        size.source = source
        return size


@dataclass
class Arguments:
    """Arrays and sizes of one call, as far as they are known."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    stored: dict[str, interop.StoredArgument] = field(default_factory=dict)
    raw: set[str] = field(default_factory=set)
    given: dict[str, str] = field(default_factory=dict)
    copy_back: list[tuple[Any, str]] = field(default_factory=list)
    torch: bool = False
    in_order: bool = False  # whether rows are sorted even where a program takes entries in any order

    def size(self, name: str, value: Any, source: str) -> None:
        """Set size `name` to `value`; raise an error that names both sources if they differ."""
        previous = self.sizes.get(name)
        if previous is None:
            self.sizes[name], self.sources[name] = value, source
        elif previous != value:
            raise ArgumentError(f"{name} is {previous} from {self.sources[name]} but {value} from {source}")


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for a TVM dtype; bfloat16 comes from ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


# Parameters of a program, and the arrays of its axes.


@dataclass(frozen=True, eq=False)
class Param:
    """One parameter of the compiled function."""

    name: str
    dtype: str
    shape: tuple[sizes.Size, ...] | None  # None: a scalar

    @property
    def is_array(self) -> bool:
        return self.shape is not None


def parameter(var: Any) -> Param:
    """Return the description of a parameter of a function."""
    if tirx.is_buffer_var(var):
        return Param(str(var.name), str(var.ty.dtype), tuple(sizes.Size(d) for d in var.ty.shape))
    return Param(str(var.name), str(var.ty.dtype), None)


def levels(buffer: SparseBuffer, free: Collection[Axis] = (), *, may_repeat: bool = False) -> list[interop.Level]:
    """Return the axes of a buffer, as far as the program tells them.

    Entries of `free` ones may come in any order, and repeatedly if they `may_repeat`.
    """
    axes = list(buffer.axes)
    return [
        interop.Level(
            axis.name,
            axis.kind,
            axes.index(axis.parent) if axis.parent is not None else None,
            axis.idtype,
            sorted=axis.sorted and axis not in free,
            unique=axis.unique and not (may_repeat and axis in free),
            full=axis.full,
        )
        for axis in axes
    ]


def fixed_levels(levels: list[interop.Level], buffer: SparseBuffer) -> list[interop.Level] | None:
    """Return the levels themselves when no call has to fill anything in."""
    plain = ("dense_fixed", "sparse_variable")
    lengths = [_constant(a.length) for a in buffer.axes]
    if all(a.kind in plain and a.rule is None for a in buffer.axes) and not any(n is not None for n in lengths):
        return levels
    return None


def _constant(expr: Any) -> int | None:
    return int(expr) if isinstance(expr, tirx.IntImm) else None


def axis_counts(program: Program) -> dict[Axis, Callable[[dict[str, int]], tuple[int, ...]]]:
    """Return functions of the sizes that compute (positions above, positions, length) of each axis."""
    out = {}
    for axis in program.axes.values():
        above = tirx.const(1, "int32") if axis.parent is None else axis.parent.count
        out[axis] = sizes.evaluator([above, axis.count, axis.length])
    return out


def arrays_of_axes(program: Program) -> dict[Axis, tuple[str | None, str | None]]:
    """Return the names of the indptr and indices parameters of each axis that has any."""
    out = {}
    for axis in program.axes.values():
        names = tuple(str(b.name) if b is not None else None for b in (axis.indptr, axis.indices))
        if any(names):
            out[axis] = (names[0], names[1])
    return out


# The argument list of the compiled function.


def argument_list(signature: Signature, args: Arguments, *, without: Collection[str] = ()) -> list[Any]:
    """Return arrays and sizes in the order of the parameters, except those named in `without`."""
    return [_passed(args, param) for param in signature.params if param.name not in without]


def _passed(args: Arguments, param: Param) -> Any:
    if not param.is_array:
        return args.sizes[param.name]
    return as_passed(args.arrays[param.name], param.dtype)


def as_passed(array: np.ndarray, dtype: str) -> Any:
    """Return an array as the function takes it."""
    if array.size == 0:
        # The compiled checks require compact strides, which numpy does not give empty arrays.
        return tvm.runtime.empty(array.shape, dtype)
    return as_bfloat16(array) if dtype == "bfloat16" else interop.writable_alias(array)


def as_bfloat16(array: np.ndarray) -> Any:
    """Return a TVM tensor over a bfloat16 array, which numpy cannot export by DLPack."""
    return alignment.as_tensor(interop.writable_alias(array))


def check_overlap(signature: Signature, args: Arguments) -> None:
    """Raise where an output of the caller overlaps an input, as the loops assume that they are disjoint."""
    for storage in signature.effects.written:
        if storage not in args.given:
            continue
        for other_storage, array in args.arrays.items():
            if other_storage != storage and np.may_share_memory(args.arrays[storage], array):
                name = signature.shown(storage)
                pair = f"{name} and {signature.shown(other_storage)} share memory"
                raise ArgumentError(f"{pair}, and {name} is written: pass a separate array")


# Named arguments to the argument list of the compiled function.
#
# Sizes are inferred, and an error for different sizes names both sources; structures are checked when they are passed.


class Signature:
    """The parameters of a program and what may be passed for them.

    Parameters
    ----------
    program : Program
    searched : set of str
        Index arrays in which the compiled function looks coordinates up.
    covered : collection of str
        Results of which every element is surely written, although the program does not show it.
    internal : collection of str
        Arrays that no caller passes.
    """

    def __init__(
        self, program: Program, searched: set[str], covered: Collection[str] = (), internal: Collection[str] = ()
    ) -> None:
        self.program, self.internal = program, internal
        self.effects: Effects = analyse(program, covered)
        self.params = [parameter(p) for p in program.func.params]
        self.by_name = {p.name: p for p in self.params}
        self.buffers = {b.name: b for b in program.buffers.values() if not b.allocated}
        self.holder = {str(b.storage.name): b for b in self.buffers.values()}
        self.caller_names: dict[str, str] = {}  # names for callers, where they differ; see `ComposedKernel`
        self.searched = searched
        self.outputs = self.effects.outputs
        self.levels = {name: levels(b) for name, b in self.buffers.items()}
        self.length = {a: sizes.Size(a.length) for a in program.axes.values()}
        self.width = {a: sizes.Size(a.width) for a in program.axes.values() if a.width is not None}
        # Entries with the same coordinates are added up first, which matters where a sum overflows.
        may_repeat = bool((program.func.attrs or {}).get(FINITE, False))
        free = {
            a
            for a in order_free_axes(program, may_repeat=may_repeat)
            if a.indices is None or str(a.indices.name) not in searched
        }
        self.open_levels = {name: levels(b, free, may_repeat=may_repeat) for name, b in self.buffers.items()}
        self.fixed_levels = {
            (name, in_order): fixed_levels(levels_of[name], b)
            for in_order, levels_of in ((True, self.levels), (False, self.open_levels))
            for name, b in self.buffers.items()
        }
        self.counts = axis_counts(program)
        self.axes_of_array = arrays_of_axes(program)
        self.scalars = {
            p.name: sizes.Size(v) for p, v in zip(self.params, program.func.params, strict=True) if not p.is_array
        }
        self.narrow_sizes = [p.name for p in self.params if p.dtype == "int32" and not p.is_array]
        self.index_arrays = {n for names in self.axes_of_array.values() for n in names if n is not None}
        self.narrow = all(p.dtype != "int64" for p in self.params if not p.is_array)
        self.narrow_extents = sizes.narrow_extents(program)
        formulas = [" * ".join(map(sizes.code, extents)) for extents in self.narrow_extents.values()]
        self._counts = sizes.compiled(f"({''.join(f'{formula}, ' for formula in formulas)})")
        self.axis_of_size = {n.name: a.name for a, n in reversed(self.length.items()) if n.name is not None}

    @property
    def results(self) -> list[str]:
        """The arrays that a call returns: outputs, which may be passed, and arrays that no caller passes."""
        return [*self.outputs, *(name for name in self.internal if name not in self.outputs)]

    # ------------------------------------------------------------------ names

    def storage_name(self, name: str) -> str | None:
        """Return the array parameter that argument `name` fills; None if there is none."""
        if name in self.buffers:
            return str(self.buffers[name].storage.name)
        param = self.by_name.get(name)
        return name if param is not None and param.is_array else None

    def knows(self, name: str) -> bool:
        """Return whether the program has a buffer or a parameter of a name."""
        return name in self.buffers or name in self.by_name

    def shown(self, storage: str) -> str:
        """Return the user's name of the parameter `storage`."""
        if storage in self.caller_names:
            return self.caller_names[storage]
        return self.holder[storage].name if storage in self.holder else storage

    def unknown(self, name: str) -> ArgumentTypeError:
        """Return the error for an argument that the program does not have."""
        buffers = [b.name for storage, b in self.holder.items() if storage not in self.internal]
        buffers += [p.name for p in self.params if p.is_array and p.name not in self.holder]
        scalars = [p.name for p in self.params if not p.is_array]
        hint = f"it takes the buffers {', '.join(buffers)}"
        return ArgumentTypeError(
            f"this kernel has no argument {name!r}; {hint}{' and the sizes ' + ', '.join(scalars) if scalars else ''}"
        )

    def unnamed(self, arguments: tuple[Any, ...]) -> ArgumentTypeError:
        """Return the error for arguments without names."""
        inputs = [b.name for n, b in self.holder.items() if n not in self.results and b.name.isidentifier()]
        form = ", ".join(f"{name}=..." for name in inputs)
        count = len(arguments)
        description = f"got {count} without {'a name' if count == 1 else 'names'}"
        return ArgumentTypeError(f"a kernel takes its arguments by name, as in kernel({form}), {description}")

    def is_plain(self, storage: str) -> bool:
        """Return whether a parameter is an ordinary dense array for the caller."""
        buffer = self.holder.get(storage)
        return buffer is None or buffer.is_dense

    # ------------------------------------------------------------------ gathering

    def gather(self, kwargs: Mapping[str, Any], bound: Arguments | None = None) -> Arguments:
        """Return arrays and sizes of named arguments, checked against each other and `bound`, without outputs."""
        args = Arguments() if bound is None else bound
        self.take(args, kwargs)
        self._infer(args)
        return args

    def take(self, args: Arguments, kwargs: Mapping[str, Any]) -> None:
        """Add named arguments, sizes first."""
        arrays: list[tuple[str, Any]] = []
        for name, value in kwargs.items():
            param = self.by_name.get(name)
            if param is not None and not param.is_array:
                self._scalar(args, param, value)
            else:
                arrays.append((name, value))
        for name, value in arrays:
            self._array(args, name, value)

    def check_number(self, name: str, value: Any) -> None:
        """Raise unless a value suits a scalar parameter."""
        param = self.by_name[name]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer, float, np.floating)):
            raise ArgumentTypeError(f"{param.name}: expected a number ({param.dtype}), got {type(value).__name__}")
        if not param.dtype.startswith(("int", "uint")):
            return
        if not is_integer(value):
            raise ArgumentTypeError(f"{param.name}: expected an integer, got {value!r}")
        if param.dtype == "int32" and abs(int(value)) > LARGEST_INT32:
            raise ArgumentError(f"{param.name} = {value} does not fit int32; write the program with T.int64 sizes")
        bounds = np.iinfo(param.dtype)
        if not bounds.min <= int(value) <= bounds.max:
            raise ArgumentError(f"{param.name} = {value} does not fit {param.dtype}")

    def _scalar(self, args: Arguments, param: Param, value: Any) -> None:
        self.check_number(param.name, value)
        source = getattr(value, "source", "the argument")
        if param.dtype.startswith(("int", "uint")):
            value = as_int64(int(value))
        args.size(param.name, value, source)

    def _array(self, args: Arguments, name: str, value: Any) -> None:
        storage = self.storage_name(name)
        if storage is None:
            raise self.unknown(name)
        if storage in args.given:
            raise ArgumentTypeError(f"{args.given[storage]} and {name} are the same argument; pass one of them")
        args.given[storage] = name
        buffer = self.holder.get(storage)
        if interop.is_torch(value):
            interop.check_detached(value, name, "a kernel")
        if interop.is_sparse(value):
            if buffer is not None and name != buffer.name and not buffer.is_dense:
                message = f"{name} is the array of the values that {buffer.name} stores, got a sparse"
                raise ArgumentTypeError(f"{message} {type(value).__name__}: pass it as {buffer.name}=...")
            if buffer is None or buffer.is_dense:
                fault = f"{name} is dense in this kernel, got a sparse {type(value).__name__}"
                raise ArgumentTypeError(f"{fault}: pass a dense array of it")
            self._sparse(args, buffer, value)
            return
        args.torch = args.torch or interop.is_torch(value)
        option = "idtype" if storage in self.index_arrays else "dtype"
        array_of_caller, copied = interop.as_numpy(value, name)
        array, moved = interop.aligned_contiguous(
            array_of_caller, self.by_name[storage].dtype, name=name, option=option
        )
        if storage in self.effects.written:
            check_writable(array_of_caller, name, type(value), copied=copied)
            if moved:
                args.copy_back.append((array_of_caller, storage))
        args.arrays[storage] = array
        args.raw.add(storage)

    def _sparse(self, args: Arguments, buffer: SparseBuffer, value: Any) -> None:
        shape = tuple(value.shape)
        if len(shape) == len(buffer.axes):
            for d, axis in enumerate(buffer.axes):
                self._unify(args, self.length[axis], shape[d], buffer.name, d)
        levels, dtype = self.known_levels(buffer, args), buffer.dtype
        stored = interop.store(value, levels, name=buffer.name, dtype=dtype, check=checks_are_on(), is_sound=is_sound)
        args.stored[buffer.name] = stored
        storage = str(buffer.storage.name)
        args.arrays[storage] = stored.values
        if storage in self.effects.written:
            caller_values = stored.source.values
            check_writable(caller_values, buffer.name, type(value), copied=not interop.holds_own_values(value))
            if not np.may_share_memory(caller_values, stored.values):
                args.copy_back.append((caller_values, storage))
        for d, axis in enumerate(buffer.axes):
            if d in stored.lengths:
                self._unify(args, self.length[axis], stored.lengths[d], buffer.name, d)
            if d in stored.widths and axis.width is not None:
                self._unify(args, self.width[axis], stored.widths[d], f"the longest row of {buffer.name}")
            for array, where in ((axis.indptr, stored.indptr), (axis.indices, stored.indices)):
                if array is not None and d in where:
                    self._share(args, str(array.name), where[d], buffer.name, axis)

    def _share(self, args: Arguments, storage: str, array: np.ndarray, name: str, axis: Axis) -> None:
        """Add an index array; raise unless other arguments over the axis have an equal one."""
        array = np.ascontiguousarray(array)
        shared = args.arrays.get(storage)
        if shared is not None and shared is not array and not np.array_equal(shared, array):
            source = args.given.get(storage, "another argument")
            raise ArgumentError(f"{name} and {source} share axis {axis.name} but have different structures")
        args.arrays[storage] = array
        args.given.setdefault(storage, name)

    def _unify(self, args: Arguments, size: sizes.Size, value: int, name: str, d: int | None = None) -> None:
        """Set `size` to `value`, from dimension `d` of argument `name`."""
        previous = size.known(args.sizes)
        if previous == value:
            return
        source = name if d is None else f"{name}.shape[{d}]"
        if size.value is not None:
            raise ArgumentError(f"{source} is {value} but this kernel is written for {size.value}")
        if size.name is not None:
            args.size(size.name, int(value), source)
        elif previous is not None:
            because = "; ".join(f"{n} = {args.sizes[n]} from {args.sources[n]}" for n in size.symbols)
            raise ArgumentError(f"{source} is {value} but {size.text} is {previous} ({because})")
        else:
            solution = size.solve(int(value), args.sizes)
            if solution is not None:
                args.size(solution[0], solution[1], source)

    def known_levels(self, buffer: SparseBuffer, args: Arguments) -> list[interop.Level]:
        """Return the levels of a buffer with the sizes that are known so far."""
        declared = self.levels if args.in_order else self.open_levels
        return self.fixed_levels[buffer.name, args.in_order] or [
            self._known(level, axis, args) for level, axis in zip(declared[buffer.name], buffer.axes, strict=True)
        ]

    def _known(self, level: interop.Level, axis: Axis, args: Arguments) -> interop.Level:
        """Return `level` with the sizes that are known so far."""
        rules: dict[str, Any] = {
            name: sizes.formula(expr, args.sizes)
            for name, expr in (
                ("rule", axis.rule),
                ("extent_rule", axis.extent_rule),
                ("offset_rule", axis.offset_rule),
            )
            if expr is not None
        }
        width = self.width[axis].known(args.sizes) if axis.kind == "sparse_fixed" else None
        return replace(level, length=self.length[axis].known(args.sizes), width=width, **rules)

    def _infer(self, args: Arguments) -> None:
        """Infer sizes from array shapes, and numbers of positions from row pointers, until no further size is known."""
        self._infer_from_shapes(args)
        while any(not p.is_array and p.name not in args.sizes for p in self.params) and self._infer_from_pointers(args):
            self._infer_from_shapes(args)
        self._require_sizes(args)

    def _infer_from_pointers(self, args: Arguments) -> bool:
        """Infer how many positions an axis has from its last row pointer; return whether a size was set."""
        before = len(args.sizes)
        for axis, (indptr, _) in self.axes_of_array.items():
            pointers = None if indptr is None else args.arrays.get(indptr)
            if pointers is not None and pointers.ndim == 1 and len(pointers) and pointers[-1] >= 0:
                name = args.given.get(str(indptr), self.shown(str(indptr)))
                self._unify(args, sizes.Size(axis.count), int(pointers[-1]), f"the last element of {name}")
        return len(args.sizes) > before

    def _infer_from_shapes(self, args: Arguments) -> None:
        before = -1
        while before != len(args.sizes):
            before = len(args.sizes)
            for storage, array in args.arrays.items():
                shape = self.by_name[storage].shape or ()
                if array.ndim != len(shape):
                    array = args.arrays[storage] = self._reshaped(args, self.by_name[storage], array)
                for d, size in enumerate(shape):
                    if size.known(args.sizes) != array.shape[d]:
                        self._unify(args, size, array.shape[d], self._dimension(args, storage, d))

    def _require_sizes(self, args: Arguments) -> None:
        """Raise where a size is unknown, or does not fit its dtype."""
        for name in self.narrow_sizes:
            if args.sizes.get(name, 0) > LARGEST_INT32:
                fault = f"{name} is {args.sizes[name]} from {args.sources[name]}, which does not fit int32"
                raise OffsetError(f"{fault}: write the program with T.int64 sizes (idtype='int64')")
        missing = [p.name for p in self.params if not p.is_array and p.name not in args.sizes]
        if missing:
            self.complete(args)
            name = missing[0]
            raise ArgumentTypeError(f"the size {name} cannot be inferred from the arguments: pass {name}=...")
        self._refuse_unknown_results(args)
        self.check_sizes(args.sizes)

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Raise where an axis would have a negative length, or 32 bits cannot address the elements of a buffer.

        Raises
        ------
        ArgumentError
            A length is negative.
        OffsetError
            A buffer, or scratch, has too many elements.
        """
        for name, axis in self.axis_of_size.items():
            if sizes[name] < 0:
                raise ArgumentError(f"{name} is {sizes[name]}, but it is the length of axis {axis}: pass 0 or more")
        for name, count in zip(self.narrow_extents, self._counts(sizes), strict=True):
            if count > LARGEST_INT32:
                message = f"{name} has {count} elements, more than 32-bit indices can address"
                raise OffsetError(f"{message}: build the program with T.int64 sizes (idtype='int64')")

    def _refuse_unknown_results(self, args: Arguments) -> None:
        """Raise where the length of a result depends on the contents of an array."""
        for storage in self.outputs:
            unknown = [n for size in self.by_name[storage].shape or () for n in size.symbols if n not in args.sizes]
            if unknown:
                self.complete(args)
                message = f"the size {unknown[0]} of the result {self.shown(storage)} cannot be inferred"
                raise ArgumentTypeError(f"{message} from the arguments: pass {self.shown(storage)}=numpy.empty(...)")

    def _dimension(self, args: Arguments, storage: str, d: int) -> str:
        """Return the user's name of a dimension of an array."""
        name = args.given.get(storage, self.shown(storage))
        if storage in args.raw:
            return f"{name}.shape[{d}]"
        if any(storage == indptr for indptr, _ in self.axes_of_array.values()):
            return f"the number of row pointers of {name}"
        return f"the number of entries stored in {name}" if d == 0 else f"dimension {d} of the entries of {name}"

    def _reshaped(self, args: Arguments, param: Param, array: np.ndarray) -> np.ndarray:
        """Return the values of a sparse buffer with the dimensions that are stored; raise where there are fewer."""
        buffer = self.holder.get(param.name)
        rank = len(param.shape or ())
        if buffer is None or buffer.is_dense or array.ndim < rank:
            name = args.given.get(param.name, self.shown(param.name))
            dimensions = f"{rank} dimension{'s' if rank != 1 else ''}"
            hint = "; reshape it" if array.ndim == 1 else ""
            raise ArgumentError(f"{name} must have {dimensions}, got shape {array.shape}{hint}")
        at = array.ndim - rank + 1
        return array.reshape(math.prod(array.shape[:at]), *array.shape[at:])

    # ------------------------------------------------------------------ checks

    def check(self, args: Arguments) -> None:
        """Check index arrays that are passed by name, and that 32 bits can count the elements."""
        for storage, array in args.arrays.items():
            self._check_size(storage, array.size)
        if not checks_are_on():
            return
        for axis, names in self.axes_of_array.items():
            if any(n in args.raw for n in names if n):
                self.check_axis(axis, names, args.arrays, args.sizes)

    def _check_size(self, storage: str, elements: int) -> None:
        if self.narrow and elements > LARGEST_INT32:
            message = f"{self.shown(storage)} has {elements} elements, more than 32-bit indices can address"
            raise OffsetError(f"{message}: build the program with T.int64 sizes (idtype='int64')")

    def check_axis(
        self, axis: Axis, names: tuple[str | None, str | None], arrays: Mapping[str, Any], sizes: dict[str, int]
    ) -> None:
        """Raise unless the arrays of an axis, which are passed by name, have the structure that it declares."""
        indptr, indices = (arrays.get(n) if n else None for n in names)
        parent_count, count, length = self.counts[axis](sizes)
        level = interop.Level(axis.name, axis.kind, None, axis.idtype, sorted=axis.sorted, unique=False)
        lengths = {"parent_count": int(parent_count), "length": int(length)}
        need_sorted = axis.sorted and names[1] in self.searched
        if not _is_compressed_sound(level, indptr, indices, need_sorted, lengths):
            interop.check_level(
                level,
                indptr,
                indices,
                name=names[1] or names[0] or axis.name,
                need_sorted=need_sorted,
                count=int(count) if indices is None else None,
                **lengths,
            )
        if axis.unique and axis.parent is None and indices is not None:
            interop.check_distinct(indices, int(length), f"axis {axis.name} of {names[1]}")

    # ------------------------------------------------------------------ outputs

    def allocate(self, args: Arguments) -> list[str]:
        """Allocate the outputs that were not passed; return the names of all outputs."""
        self.complete(args)
        for storage in self.outputs:
            if storage not in args.arrays:
                args.arrays[storage] = self.new_output(storage, args.sizes)
        return self.outputs

    def complete(self, args: Arguments) -> None:
        """Raise unless every array that is not an output was passed."""
        provided = {*args.arrays, *self.outputs, *self.internal}
        for param in self.params:
            if param.is_array and param.name not in provided:
                raise self.missing(param)

    def new_output(self, storage: str, sizes: dict[str, int]) -> np.ndarray:
        """Allocate one output; fill it with zeros unless every element is written."""
        shape = tuple(size.at(sizes) for size in self.by_name[storage].shape or ())
        if any(n < 0 for n in shape):
            raise ArgumentError(f"{self.shown(storage)} would have shape {shape}: sizes must not be negative")
        self._check_size(storage, math.prod(shape))
        dtype = numpy_dtype(self.by_name[storage].dtype)
        return alignment.empty(shape, dtype) if storage in self.effects.covered else np.zeros(shape, dtype)

    def missing(self, param: Param) -> ArgumentTypeError:
        """Return the error for an array that a call does not have."""
        name = self.shown(param.name)
        if param.name in self.effects.updated:
            advice = "Pass it, or set it with T.init() in the program."
            return ArgumentTypeError(f"missing argument {name}: the kernel updates what it holds. {advice}")
        for axis, names in self.axes_of_array.items():
            if param.name in names:
                users = [b.name for b in self.buffers.values() if axis in b.axes]
                message = f"missing the structure of axis {axis.name}: pass a sparse {' or '.join(users) or 'argument'}"
                return ArgumentTypeError(f"{message}, or the array {param.name}=...")
        return ArgumentTypeError(f"missing argument {name}")

    def result(self, args: Arguments, storage: str, passed: dict[str, Any]) -> Any:
        """Return one output in the class that the caller receives."""
        array = args.arrays[storage]
        output_of_caller = passed.get(args.given.get(storage, ""))
        if output_of_caller is not None:
            return output_of_caller
        model = self.model(args, storage)
        if model is not None:
            return interop.restore(args.stored[model], array)
        return interop.to_torch(array) if args.torch else array

    def model(self, args: Arguments, storage: str) -> str | None:
        """Return the sparse argument whose structure an output has."""
        buffer = self.holder.get(storage)
        if buffer is None or buffer.is_dense:
            return None
        return next((name for name in args.stored if self.buffers[name].axes == buffer.axes), None)


def _is_compressed_sound(
    level: interop.Level, indptr: Any, indices: Any, need_sorted: bool, lengths: dict[str, Any]
) -> bool:
    """Return whether arrays of compressed rows are known to be valid."""
    if level.kind != "sparse_variable" or indptr is None or indices is None or indices.ndim != 1:
        return False
    return is_sound(level, indptr, indices, need_sorted=need_sorted, **lengths)


def check_writable(array: np.ndarray, name: str, kind: type, *, copied: bool) -> None:
    """Raise unless results can be written to an array that was passed for them."""
    if copied:
        fault = f"{name} is written by this kernel, and a {kind.__name__} cannot be written in place"
        raise ArgumentError(f"{fault}: leave it out and take the result")
    if not array.flags.writeable:
        raise ArgumentError(f"{name} is written by this kernel but the array passed for it is read-only")
    if array.size and any(n > 1 and step == 0 for n, step in zip(array.shape, array.strides, strict=True)):
        raise ArgumentError(f"{name} is written by this kernel but its elements share memory: pass a copy")


__all__ = [
    "LARGEST_INT32",
    "Arguments",
    "Param",
    "Signature",
    "SizeOf",
    "argument_list",
    "arrays_of_axes",
    "as_bfloat16",
    "as_passed",
    "axis_counts",
    "check_overlap",
    "check_writable",
    "checks_are_on",
    "fixed_levels",
    "layout_of",
    "levels",
    "numpy_dtype",
    "parameter",
    "shown_buffer",
    "shown_signature",
    "unchecked",
]
