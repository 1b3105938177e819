# SPDX-License-Identifier: Apache-2.0
"""Call plans: skip argument validation for calls whose signature was validated before."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import tvm
import tvm_ffi
from numpy import ndarray  # looked up in each call

from sparsetir import interop
from sparsetir.errors import ArgumentError, StructureError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop.sources import torch_to_numpy, undifferentiated
from sparsetir.ir import sizes
from sparsetir.ir.views import Axis
from sparsetir.lower.checks.compiled import ROWS_MESSAGE, order_of
from sparsetir.runtime.signature import (
    LARGEST_INT32,
    Arguments,
    Signature,
    SizeOf,
    argument_list,
    as_bfloat16,
    checks_are_on,
    numpy_dtype,
)
from sparsetir.runtime.validation import is_sound
from sparsetir.schedules.defaults import NARROW
from sparsetir.utils import buffers
from sparsetir.utils.arguments import as_seconds
from sparsetir.utils.buffers import OutputPool

# Times of calls.


@dataclass(frozen=True)
class CallTiming:
    """Seconds of repeated calls."""

    median: float
    best: float
    worst: float
    calls: int

    def __str__(self) -> str:
        spread = f"{self.best * 1e3:.3f} to {self.worst * 1e3:.3f}"
        return f"{self.median * 1e3:.3f} ms (median of {self.calls} calls, {spread})"


def measure(call: Callable[[], Any], *, seconds: float = 0.2) -> CallTiming:
    """Time `call` for `seconds` after one warm-up call.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The seconds are not finite, negative or no number.
    """
    duration = as_seconds(seconds, "seconds")
    call()
    samples: list[float] = []
    stop = time.perf_counter() + duration
    while len(samples) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    ordered = sorted(samples)
    return CallTiming(ordered[len(ordered) // 2], ordered[0], ordered[-1], len(ordered))


# Keys of calls, and the parts of a plan.


COMPRESSED = ("csr", "csc", "bsr")
COMPRESSED_TORCH = {
    "torch.sparse_csr": sp.csr_array,
    "torch.sparse_csc": sp.csc_array,
    "torch.sparse_bsr": sp.bsr_array,
}
_FORMATS = {  # of scipy's own classes: a look-up here is faster than their properties
    getattr(sp, f"{name}_{kind}"): name for name in COMPRESSED for kind in ("array", "matrix")
}

_TENSORS = {"Tensor": "torch", "Parameter": "torch.nn.parameter"}  # modules of classes, which are not imported for it

Values: TypeAlias = Mapping[str, Any]


class PlanMismatch(Exception):
    """A plan does not apply to a call."""


# The properties of a call that a plan inspects: what decides which plan it takes; the dimensions of its arguments; the
# arguments, tensors of torch and `SparseTensor`s as objects of numpy and scipy; the names of those that are read-only,
# or that compiled functions take only as copies. A tuple, because a named one takes longer to make.
CallKey: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...], Values, tuple[str, ...]]


def ready_operands(values: Values, unready: tuple[str, ...]) -> Values:
    """Return the values with those that are not ready replaced: by others over their memory, or by copies."""
    operands = dict(values)
    for name in unready:
        value = operands[name]
        is_reordered = type(value) is ndarray and not value.flags.c_contiguous
        operands[name] = np.array(value, order="C") if is_reordered else _in_reach(value)
    return operands


def make_call_key(arguments: Values) -> CallKey | None:
    """Return the properties of a call that a plan depends on; None where a call must take the long way."""
    key: list[Any] = []
    dims: list[int] = []
    values = arguments
    unready: tuple[str, ...] = ()
    for name, value in arguments.items():
        kind, mark = type(value), ""
        if kind is not ndarray and kind not in _FORMATS:
            if kind is SparseTensor:
                value, mark = value.compressed, "tensor"
            elif kind is int or kind is SizeOf:
                key.append(name)
                dims.append(value)
                continue
            elif kind.__module__ == _TENSORS.get(kind.__name__):
                value, mark = _from_torch(value), "torch"
            elif kind is np.memmap:
                value = value.view(ndarray)
            values = {**values, name: value}
        if type(value) is ndarray:
            is_ready = value.flags.carray  # contiguous, aligned and writeable
            key.append((name, mark, is_ready, value.ndim, value.dtype))
            dims += value.shape
        else:
            entry = _matrix_key(value, dims)
            if entry is None:
                return None
            is_ready = entry[0]
            key.append((name, mark, *entry))
        if not is_ready:
            unready += (name,)
    return tuple(key), tuple(dims), values, unready


def _in_reach(value: Any) -> Any:
    """Return an array, or a matrix of arrays, that compiled functions take: over the same memory if it has their order.

    For arguments that are read: `add_plan` makes no plan of calls that write to one, as these copy back or are refused.
    """
    if not isinstance(value, ndarray):
        indptr, indices, data = (_in_reach(array.view(ndarray)) for array in (value.indptr, value.indices, value.data))
        return interop.compressed_of(type(value), indptr, indices, data, value.shape)
    passed = interop.passable(value)
    return np.array(value, order="C") if passed is None else passed


def _from_torch(tensor: Any) -> Any:
    """Return the memory of a host tensor without gradient, of a compressed one in scipy's class; else None."""
    try:
        tensor = undifferentiated(tensor)
        if tensor is None:
            return None
        layout = str(tensor.layout)
        if layout != "torch.strided":
            return _compressed_torch(tensor, layout)
        return torch_to_numpy(tensor, "") if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
    except (TypeError, RuntimeError):
        return None


def _compressed_torch(tensor: Any, layout: str) -> Any:
    """Return the arrays of a compressed matrix in scipy's class, not validated; None for other tensors."""
    kind: Any = COMPRESSED_TORCH.get(layout)
    if kind is None or tensor.ndim != 2:
        return None
    if kind is sp.csc_array:
        parts = tensor.ccol_indices(), tensor.row_indices()
    else:
        parts = tensor.crow_indices(), tensor.col_indices()
    values = tensor.values()
    if values.ndim != (3 if kind is sp.bsr_array else 1):
        return None
    matrix = kind.__new__(kind)  # its constructor would validate the arrays by numpy
    matrix._shape = tuple(tensor.shape)
    matrix.data, (matrix.indptr, matrix.indices) = values.numpy(), (part.numpy() for part in parts)
    return matrix


def _matrix_key(value: Any, dims: list[int]) -> tuple[Any, ...] | None:
    """Return whether compiled functions take a compressed matrix as it is, and its properties that decide.

    Its dimensions are added to the others. None of other objects.
    """
    form = _FORMATS.get(type(value))
    is_own = form is not None
    if form is None:
        form = value.format if isinstance(value, (sp.sparray, sp.spmatrix)) else None
        if form not in COMPRESSED:
            return None
    data, indptr, indices = value.data, value.indptr, value.indices
    is_ready = type(data) is type(indptr) is type(indices) is ndarray
    is_ready = is_ready and data.flags.carray and indptr.flags.carray and indices.flags.carray
    if not is_ready and not (is_own and all(isinstance(array, ndarray) for array in (data, indptr, indices))):
        return None  # derived classes cannot be made around other arrays
    grid = value.shape if form != "bsr" else _grid(value.shape, data.shape[1:])
    if grid is None or len(grid) != 2:
        return None
    dims += (*grid, *data.shape, *indptr.shape, *indices.shape)
    return is_ready, type(value), data.ndim, data.dtype, indptr.ndim, indptr.dtype, indices.ndim, indices.dtype


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the numbers of block rows and block columns; None where blocks do not divide the shape."""
    if len(block) != 2 or 0 in block or shape[0] % block[0] or shape[1] % block[1]:
        return None
    return shape[0] // block[0], shape[1] // block[1]


def shaped(arguments: Values) -> tuple[Any, ...] | None:
    """Return what `fits` compares with later calls; None unless all arguments are arrays."""
    if any(type(value) is not np.ndarray for value in arguments.values()):
        return None
    return tuple((name, value.shape, value.dtype) for name, value in arguments.items())


def fits(key: tuple[Any, ...], arguments: Values) -> bool:
    """Return whether a call is one of nothing but arrays like those of another one; sooner than by looking at it."""
    if len(key) != len(arguments):
        return False
    for name, shape, dtype in key:
        value = arguments.get(name)
        if type(value) is not ndarray or value.shape != shape or value.dtype is not dtype or not value.flags.carray:
            return False
    return True


class CompressedFiller:
    """Fills in a scipy matrix whose arrays are the buffer's own."""

    def __init__(self, signature: Signature, name: str, value: Any, args: Arguments, place: dict[str, int]) -> None:
        buffer = signature.buffers[name]
        levels = signature.known_levels(buffer, args)
        source = interop.open_source(value, name)
        if not interop.has_layout(source, levels, name) or value.data.dtype != numpy_dtype(buffer.dtype):
            raise PlanMismatch
        axis = next(a for a in buffer.axes if a.kind == "sparse_variable")
        if any(a.dtype != axis.idtype for a in (value.indptr, value.indices)) or buffer.dtype == "bfloat16":
            raise PlanMismatch
        indptr, indices = signature.axes_of_array[axis]
        self.name, self.buffer = name, buffer
        self.names = (str(buffer.storage.name), str(indptr), str(indices))
        self.places = tuple(place[n] for n in self.names)
        self.values, self.indptr, self.indices = self.places
        self.level = levels[buffer.axes.index(axis)]
        self.need_sorted = self.level.sorted or self.level.unique
        self.takes_distinct = self.level.unique and not self.level.sorted  # coordinates, in any order
        self.is_unordered = False  # whether rows of the last call were
        self.axis_counts = signature.counts[axis]
        order = "any" if not self.need_sorted else "distinct" if self.level.unique else "ascending"
        self.is_in_order_of_program = order == order_of(signature.program, axis)
        self.shared: list[tuple[int, np.ndarray | None]] = []
        self.validated = 0  # entries of all calls

    def share(self, others: set[int], bound_arrays: Mapping[int, np.ndarray]) -> None:
        """Record which index arrays must equal those of another argument of the call, or a bound array."""
        self.shared = [(at, bound_arrays.get(at)) for at in self.places[1:] if at in others or at in bound_arrays]

    def expected(self, signature: Signature) -> list[tuple[int | None, list[sizes.Size]]]:
        """Return the sizes of its rows and columns, and of its arrays."""
        arrays = [(at, list(signature.by_name[n].shape or ())) for at, n in zip(self.places, self.names, strict=True)]
        return [(None, [signature.length[axis] for axis in self.buffer.axes[:2]]), *arrays]

    def counts(self, sizes: dict[str, int]) -> tuple[int, int]:
        """Return the number of positions above the axis with indices, and its length."""
        parents, _, length = self.axis_counts(sizes)
        return int(parents), int(length)

    def fill(self, value: Any, ready: list[Any], parents: int, length: int, *, is_trusted: bool) -> None:
        """Check the structure, unless it is trusted or checked later, and pass the arrays on."""
        data, indptr, indices = value.data, value.indptr, value.indices
        if indptr[-1] != len(indices) or len(data) != len(indices):
            raise PlanMismatch
        if not is_trusted:
            self.validated += len(indices) + CALL_VALIDATED
            lengths: dict[str, Any] = {"parent_count": parents, "length": length}
            is_ordered = not self.is_unordered and is_sound(
                self.level, indptr, indices, need_sorted=self.need_sorted, **lengths
            )
            if not is_ordered:
                self._check_distinct(indptr, indices, lengths)
        for at, bound in self.shared:
            expected, array = ready[at] if bound is None else bound, indptr if at == self.indptr else indices
            if expected is not array and not np.array_equal(expected, array):
                raise PlanMismatch
        ready[self.values], ready[self.indptr], ready[self.indices] = data, indptr, indices

    def _check_distinct(self, indptr: np.ndarray, indices: np.ndarray, lengths: dict[str, Any]) -> None:
        """Raise unless rows may be out of order and are known to repeat no coordinate, or are in order again."""
        rows, length = lengths["parent_count"], lengths["length"]
        if self.is_unordered and interop.are_distinct(indptr, indices, rows, length, None):
            return
        if self.is_unordered and is_sound(self.level, indptr, indices, need_sorted=self.need_sorted, **lengths):
            self.is_unordered = False
        elif self.takes_distinct and interop.are_distinct(indptr, indices, rows, length, is_sound):
            self.is_unordered = True
        else:
            raise PlanMismatch


class Function:
    """The compiled function; after some calls, a function that is specialized for the arguments replaces it.

    Choosing a specialization takes a millisecond or two, so that it waits until there are many calls or elements.
    """

    def __init__(self, caller: PlanContext, elements: int) -> None:
        self.unfitted = min(MOST_UNFITTED, UNFITTED_ELEMENTS // max(elements, 1))
        self.function, self.left = caller.function, self.unfitted
        self.waiting: list[Any] = [(caller.fitting, None)]
        self.checked: Callable[..., Any] | None = None
        self.checking = [] if caller.checked is None else [caller.checked]

    def check(self, entry: CompressedFiller, arguments: Callable[[], Arguments]) -> None:
        """Prepare a function that validates the arrays of a matrix itself, for these arrays, if there is one."""
        try:
            checking = self.checking.pop()
        except IndexError:  # another thread has it
            return
        checked = checking(arguments())
        self.checked = None if checked is None else partial(_call_checked, checked, entry)

    def next(self, arguments: Callable[[], Arguments]) -> Callable[..., Any]:
        """Return what to call now, with these arrays."""
        self.left -= 1
        if self.left >= 0:
            return self.function
        try:
            fitting, fit = self.waiting.pop()
        except IndexError:  # another thread has it
            return self.function
        if fit is None:
            fit, after = fitting(arguments())
            if fit is None:
                return self.function
            self.left = after - self.unfitted
            if self.left > 0:
                self.left -= 1
                self.waiting.append((fitting, fit))
                return self.function
        self.function = fit()
        return self.function


class Results:
    """New arrays for the results of a call."""

    def __init__(self, new_results: list[NewResult], spare: OutputPool | None) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype, _ in new_results]
        self.made = [(*one, _make(covered=one[-1], size=size)) for one, size in zip(new_results, sizes, strict=True)]
        self.fillers = [
            spare.filler(shape, dtype, at) if spare and covered and 0 not in shape else None
            for at, shape, dtype, covered in new_results
        ]
        self.fill: Callable[[list[Any]], list[tuple[int, np.ndarray]]] = self._fill
        if self.fillers == [None] and 0 not in new_results[0][1] and new_results[0][2].kind != "V":
            self.fill = self._fill_one(*self.made[0])

    def _fill_one(
        self, at: int, shape: tuple[int, ...], dtype: Any, _covered: bool, make: Callable[..., np.ndarray]
    ) -> Callable[[list[Any]], list[tuple[int, np.ndarray]]]:
        """Return `fill` for one result, which most calls have."""

        def fill(ready: list[Any]) -> list[tuple[int, np.ndarray]]:
            ready[at] = make(shape, dtype)
            return []

        return fill

    def _fill(self, ready: list[Any]) -> list[tuple[int, np.ndarray]]:
        """Pass them on; those that were passed in another guise, or not at all, come back with their place."""
        outputs = []
        for (at, shape, dtype, _, make), fill in zip(self.made, self.fillers, strict=True):
            if 0 in shape:
                outputs.append((at, np.empty(shape, dtype)))
            elif fill is not None:
                outputs.append((at, fill(ready)))
            elif dtype.kind == "V":  # bfloat16
                outputs.append((at, make(shape, dtype)))
                ready[at] = as_bfloat16(outputs[-1][1])
            else:
                ready[at] = make(shape, dtype)
        return outputs


def _make(*, covered: bool, size: int) -> Callable[..., np.ndarray]:
    """Return what makes an array of so many bytes; small ones do not gain the time that aligning takes."""
    if not covered:
        return np.zeros
    return np.empty if size <= SMALL_RESULT else buffers.empty


class AliasCheck:
    """Checks that arrays to be written lie apart from all others, unless they are those of the last call.

    Parameters
    ----------
    fixed, outputs : list of ndarray
        Arrays that every call has, and those of them that are written.
    written, passed : list of int
        Places of the written arrays that a call passes, and of all that it passes.
    """

    def __init__(
        self, fixed: list[np.ndarray], outputs: list[np.ndarray], written: list[int], passed: list[int]
    ) -> None:
        self.fixed, self.outputs, self.written, self.passed = fixed, outputs, written, passed
        self.is_needed = bool(outputs or written)
        self.last: list[tuple[int, weakref.ref[Any]]] = []

    def check(self, ready: list[Any]) -> None:
        """Raise if one does not."""
        for at, ref in self.last:
            if ref() is not ready[at]:
                break
        else:
            if self.last:
                return
        for at in self.written:
            inputs = [*self.fixed, *(ready[n] for n in self.passed if n != at)]
            if any(np.may_share_memory(ready[at], array) for array in inputs):
                raise PlanMismatch
        for output in self.outputs:
            if any(np.may_share_memory(output, ready[at]) for at in self.passed):
                raise PlanMismatch
        self.last = [(at, weakref.ref(ready[at])) for at in self.passed]


# Plans: the work that remains in a call after one with the same key has been validated in full.
#
# The key of a plan is the names, classes and dtypes of a call's arguments. A plan computes the sizes, fills the
# argument list of the compiled function, checks what may differ between calls of one key, and allocates the results.
# Where a call does not fit, the plan raises `PlanMismatch` before anything has run, and the call is validated in full.
# Results and errors of a call therefore do not depend on earlier calls.


# Entries that are validated outside of the function before a function is compiled that validates its matrix itself, and
# the entries that a call counts for: dozens of calls with small matrices, a few with large ones.
MOST_VALIDATED, CALL_VALIDATED = 1 << 20, 1 << 13
SMALL_RESULT = 1 << 13  # bytes
MOST_UNFITTED, UNFITTED_ELEMENTS = 32, 1 << 21  # calls, and elements of their arguments, before a specialization
MOST_PLANS, MOST_SHAPES = 64, 64  # of a kernel, and of a plan; more than these clear the table

NewResult: TypeAlias = tuple[int, tuple[int, ...], Any, bool]  # place, shape, dtype, whether all of it is written
Run: TypeAlias = Callable[..., Any]  # takes the arguments, and those of the caller where they share memory


def remember(plans: dict[Any, Any], key: Any, value: Any, most: int = MOST_PLANS) -> None:
    """Store a value for later calls; a full table is cleared, so that its memory is bounded."""
    if len(plans) >= most:
        plans.clear()
    plans[key] = value


def add_plan(plans: dict[Any, CallPlan | None], seen: CallKey | None, caller: PlanContext, args: Arguments) -> None:
    """Store the plan for later calls with the key of this one; None where there is none."""
    if seen is None or args.copy_back:
        return
    key, _, values, _ = seen
    if key in plans:
        return
    try:
        plan = CallPlan(caller, args, values, argument_list(caller.signature, args))
    except PlanMismatch:
        plan = None
    remember(plans, key, plan)


@dataclass(frozen=True)
class PlanContext:
    """Whose calls are planned.

    Parameters
    ----------
    signature : Signature
    function : callable
        The compiled one.
    fitting : callable
        Of the arguments: what makes a function that suits them better, and after how many calls it pays.
    fixed : mapping of str to object
        Arguments that every call has.
    base : Arguments
        What they come to.
    spare : OutputPool, optional
        Memory for results.
    checked : callable, optional
        Of the arguments: a function that validates their index arrays as it reads them, or None.
    """

    signature: Signature
    function: Callable[..., Any]
    fitting: Callable[[Arguments], tuple[Any, int]]
    fixed: Values
    base: Arguments
    spare: OutputPool | None = None
    checked: Callable[[Arguments], Callable[..., Any] | None] | None = None


class CallPlan:
    """Makes the calls of one key.

    Parameters
    ----------
    caller : PlanContext
    args : Arguments
        Those of a call that was made the long way.
    arguments : mapping of str to object
        What was passed for it, without what is fixed.
    template : list of object
        Its argument list.

    Raises
    ------
    PlanMismatch
        No call of this key is simple enough.
    """

    def __init__(self, caller: PlanContext, args: Arguments, arguments: Values, template: list[Any]) -> None:
        self.caller, signature = caller, caller.signature
        self.place = {p.name: n for n, p in enumerate(signature.params)}
        base_arrays = caller.base.arrays  # the call may have passed equal arrays, or arrays of other shapes
        self.held = {n: a if a.shape == args.arrays[n].shape else args.arrays[n] for n, a in base_arrays.items()}
        self.dense: list[tuple[str, int]] = []
        self.sparse: list[CompressedFiller] = []
        self.raw: set[str] = set()
        sources: list[sizes.Size] = []  # the size of each dimension
        self.parts: list[tuple[int, slice]] = []  # the place of an array, and its dimensions
        for name, value in arguments.items():
            for at, shape in self._expected(name, value, args):
                if at is not None:
                    self.parts.append((at, slice(len(sources), len(sources) + len(shape))))
                sources += shape
        for name in self.held:
            sources += signature.by_name[name].shape or ()
        self.fixed_elements = sum(array.size for array in self.held.values())
        self.fixed_dims = tuple(n for array in self.held.values() for n in array.shape)
        self.axes = self._raw_axes()
        self.made = [n for n in signature.outputs if n not in args.given]
        if any(not p.is_array and p.dtype == "uint64" for p in signature.params):
            raise PlanMismatch  # values from 2**63 on are passed in another form
        self._solve(sources)
        filled = {at for _, at in self.dense} | {at for e in self.sparse for at in e.places}
        self._share(filled)
        self.written = [at for _, at in self.dense if signature.params[at].name in signature.effects.written]
        self.written += [e.values for e in self.sparse if signature.params[e.values].name in signature.effects.written]
        self.filled = sorted(filled)
        self.halves = [at for _, at in self.dense if signature.params[at].dtype == "bfloat16"]
        # Arrays that every call passes or allocates are not stored.
        new = {self.place[n] for n in self.made}
        self.template = [None if at in filled or at in new else _ready(value) for at, value in enumerate(template)]
        self.finish, is_new = _finish(caller, args, arguments, self.place)
        self.is_simple = is_new and self.made[0] in signature.effects.covered
        self.is_simple = self.is_simple and not (self.sparse or self.axes or self.written)
        self.functions: dict[tuple[int, ...], Function] = {}
        self.runs: dict[tuple[int, ...], Run] = {}

    # ------------------------------------------------------------------ what calls of the key bring

    def _expected(self, name: str, value: Any, args: Arguments) -> list[tuple[int | None, list[sizes.Size]]]:
        """Return the sizes that the dimensions of an argument have by the program: places of its arrays, and theirs."""
        signature, param = self.caller.signature, self.caller.signature.by_name.get(name)
        if param is not None and not param.is_array:
            return [(None, [signature.scalars[name]])]
        storage = signature.storage_name(name)
        if storage is None:
            raise PlanMismatch
        if interop.is_sparse(value):
            entry = CompressedFiller(signature, name, value, args, self.place)
            self.sparse.append(entry)
            return entry.expected(signature)
        param = signature.by_name[storage]
        dtype, shape = value.dtype, list(param.shape or ())
        if dtype != numpy_dtype(param.dtype) or not dtype.isnative:
            raise PlanMismatch
        if len(shape) != value.ndim:
            raise PlanMismatch
        self.dense.append((name, self.place[storage]))
        self.raw.add(storage)
        return [(self.place[storage], shape)]

    def _raw_axes(self) -> list[tuple[Axis, tuple[str | None, str | None]]]:
        """Return the axes all of whose arrays are passed by name."""
        axes = []
        for axis, names in self.caller.signature.axes_of_array.items():
            array_names = [n for n in names if n is not None]
            if not any(n in self.raw for n in array_names):
                continue
            if not all(n in self.raw for n in array_names):
                raise PlanMismatch
            axes.append((axis, names))
        return axes

    def _solve(self, sources: list[sizes.Size]) -> None:
        """Express the sizes by the dimensions."""
        signature, base = self.caller.signature, self.caller.base
        solved, self.defined = set(base.sizes), []
        for at, size in enumerate(sources):
            if size.name is not None and size.name not in solved:
                self.defined.append((size.name, at))
                solved.add(size.name)
        self.solved: list[tuple[sizes.Size, int]] = []
        for at, size in enumerate(sources):
            if len(unknown := set(size.symbols) - solved) == 1:
                self.solved.append((size, at))
                solved |= unknown
        outputs = [size for n in self.made for size in signature.by_name[n].shape or ()]
        self.scalars = [(n, p.name) for n, p in enumerate(signature.params) if not p.is_array]
        if any(n not in solved for s in (*sources, *outputs) for n in s.symbols):
            raise PlanMismatch
        if any(name not in solved for _, name in self.scalars):
            raise PlanMismatch
        every = "".join(f"{size.code}, " for size in (*sources, *outputs))
        self.evaluate = sizes.compiled(f"({every})")

    def _share(self, filled: set[int]) -> None:
        """Record which index arrays must equal those of another argument."""
        for number, entry in enumerate(self.sparse):
            others = {at for other in self.sparse[:number] for at in other.places}
            bound_arrays = {self.place[n]: array for n, array in self.held.items()}
            entry.share(others, bound_arrays)
        raw = {at for _, at in self.dense}
        if len(raw) < len(self.dense) or any(raw & set(e.places) for e in self.sparse):
            raise PlanMismatch
        self.others = [a for n, a in self.held.items() if self.place[n] not in filled]
        self.outputs = [self.held[n] for n in self.caller.signature.effects.written if n in self.held]

    # ------------------------------------------------------------------ a call

    def call(self, seen: CallKey, arguments: Values) -> Any:
        """Make a call of the key; `PlanMismatch` where it does not fit."""
        _, dims, values, unready = seen
        run = self.runs.get(dims) or self.at(dims)
        return run(ready_operands(values, unready) if unready else values, arguments)

    def at(self, dims: tuple[int, ...]) -> Run:
        """Make calls of these dimensions."""
        run = self.runs.get(dims)
        if run is None:
            run = self._run(dims)
            remember(self.runs, dims, run, MOST_SHAPES)
        return run

    def _sized(self, dims: tuple[int, ...]) -> tuple[dict[str, int], list[int]]:
        """Return the sizes, and the dimensions of the results."""
        every = dims + self.fixed_dims
        sizes = dict(self.caller.base.sizes)
        for name, at in self.defined:
            sizes[name] = int(every[at])
        for size, at in self.solved:
            solution = size.solve(every[at], sizes)
            if solution is None:
                raise PlanMismatch
            sizes[solution[0]] = solution[1]
        try:
            values = self.evaluate(sizes)
        except ArithmeticError:
            raise PlanMismatch from None
        if values[: len(every)] != every or any(
            abs(sizes[n]) > LARGEST_INT32 for n in self.caller.signature.narrow_sizes
        ):
            raise PlanMismatch
        try:
            self.caller.signature.check_sizes(sizes)
        except ArgumentError:
            raise PlanMismatch from None
        return sizes, list(values[len(every) :])

    def _counted(self, sizes: dict[str, int]) -> list[tuple[CompressedFiller, int, int]]:
        """Return what fills in each matrix, and how many rows and entries it has."""
        return [(entry, *entry.counts(sizes)) for entry in self.sparse]

    def _made(self, remaining: list[int]) -> list[NewResult]:
        """Return place, shape and dtype of each result that a call allocates, and whether all of it is written."""
        signature, outputs = self.caller.signature, []
        for name in self.made:
            param = signature.by_name[name]
            shape = tuple(remaining.pop(0) for _ in param.shape or ())
            outputs.append((self.place[name], shape, numpy_dtype(param.dtype), name in signature.effects.covered))
        return outputs

    def _empty(self, dims: tuple[int, ...], results: list[NewResult]) -> list[tuple[int, Any]]:
        """Return what is passed for arrays without elements, whose strides numpy leaves open."""
        signature = self.caller.signature
        shapes = [(at, dims[part]) for at, part in self.parts] + [(at, shape) for at, shape, *_ in results]
        if any(n < 0 for _, shape in shapes for n in shape):
            raise PlanMismatch
        if signature.narrow and any(math.prod(shape) > LARGEST_INT32 for _, shape in shapes):
            raise PlanMismatch
        return [(at, tvm.runtime.empty(shape, signature.params[at].dtype)) for at, shape in shapes if 0 in shape]

    def _function(self, dims: tuple[int, ...]) -> Function:
        """Return what is called for arguments of about these sizes."""
        # Small lengths may be compiled in as constants, so that each has its own function.
        bucket = tuple([n if n <= NARROW else NARROW + n.bit_length() for n in dims])
        function = self.functions.get(bucket)
        if function is None:
            elements = sum(math.prod(dims[part]) for _, part in self.parts) + self.fixed_elements
            function = Function(self.caller, elements)
            remember(self.functions, bucket, function)
        return function

    def _filled_in(self, sizes: dict[str, int]) -> list[Any]:
        """Return the argument list with its sizes."""
        template = self.template.copy()
        for at, name in self.scalars:
            template[at] = sizes[name]
        return template

    def _run(self, dims: tuple[int, ...]) -> Run:
        caller, current = self.caller, self._function(dims)
        sizes, rest = self._sized(dims)
        checks, result = self._counted(sizes), self._made(rest)
        empty = self._empty(dims, result)
        template = self._filled_in(sizes)
        dense, axes, halves, finish = self.dense, self.axes, self.halves, self.finish
        arguments = partial(self._arguments, sizes)
        results = Results(result, caller.spare)
        separation = AliasCheck(self.others, self.outputs, self.written, self.filled)
        if not empty and (short := self._short_run(template, result, separation, current, arguments)) is not None:
            return short
        has_more = bool(axes or separation.is_needed)
        one = None if has_more or empty else self._validated_inside()

        def run(values: Values, passed: Values | None = None) -> Any:
            ready = template.copy()
            for name, at in dense:
                ready[at] = values[name]
            is_trusted = not checks_are_on()
            ordered = None if one is None or one.is_unordered or is_trusted else one
            checked = None if ordered is None else current.checked
            for entry, parents, length in checks:
                entry.fill(values[entry.name], ready, parents, length, is_trusted=is_trusted or checked is not None)
            if has_more:
                self._check_raw(ready, sizes, separation)
            outputs = results.fill(ready)
            function = checked or current.function
            if checked is None and current.waiting:  # another thread may have replaced the function already
                function = current.next(partial(arguments, ready, outputs))
            elif ordered is not None and ordered.validated >= MOST_VALIDATED and current.checking:
                current.check(ordered, partial(arguments, ready, outputs))
            if halves or empty:
                _as_passed(ready, halves, empty)
            function(*ready)
            for at, array in outputs:
                ready[at] = array
            return finish(ready, passed or values)

        return run

    def _short_run(
        self,
        template: list[Any],
        results: list[NewResult],
        separation: AliasCheck,
        current: Function,
        arguments: Callable[..., Arguments],
    ) -> Run | None:
        """Return the calls of these sizes if they are simpler than others: dense arrays to one array, new or passed."""
        dense, halves, spare = self.dense, self.halves, self.caller.spare
        if self.is_simple and spare is not None:
            return _run_spare(template, dense, halves, results[0], spare, current, arguments)
        if not any((results, self.sparse, self.axes, halves)):
            return _run_in_place(template, dense, separation, current, self.finish, arguments)
        return None

    def _validated_inside(self) -> CompressedFiller | None:
        """Return the only matrix if a function may validate it while it writes results, else None."""
        entry = self.sparse[0] if len(self.sparse) == 1 else None
        return entry if entry is not None and entry.is_in_order_of_program and not entry.shared else None

    def _check_raw(self, ready: list[Any], sizes: dict[str, int], separation: AliasCheck) -> None:
        """Check index arrays that are passed by name, and that written arrays overlap no other."""
        if separation.is_needed:
            separation.check(ready)
        if not self.axes or not checks_are_on():
            return
        arrays = {name: ready[at] for name, at in self.place.items() if name in self.raw}
        try:
            for axis, names in self.axes:
                self.caller.signature.check_axis(axis, names, arrays, sizes)
        except StructureError:
            raise PlanMismatch from None

    def _arguments(self, sizes: dict[str, int], ready: list[Any], outputs: list[tuple[int, np.ndarray]]) -> Arguments:
        """Return the arrays of a call by the names of parameters, and the sizes."""
        output_arrays = dict(outputs)
        every = {name: output_arrays.get(at, ready[at]) for name, at in self.place.items()}
        return Arguments({**{n: a for n, a in every.items() if isinstance(a, np.ndarray)}, **self.held}, dict(sizes))


def _call_checked(function: Callable[..., Any], entry: CompressedFiller, *ready: Any) -> None:
    """Call a function that validates index arrays; where it finds a fault, the long way says which."""
    try:
        function(*ready)
    except (ValueError, RuntimeError) as error:
        if ROWS_MESSAGE not in str(error):
            raise
        entry.is_unordered = entry.takes_distinct
        raise PlanMismatch from None


def _as_passed(ready: list[Any], halves: list[int], empty: list[tuple[int, Any]]) -> None:
    """Replace arrays of bfloat16, and those without elements, by what the compiled function takes."""
    for at in halves:
        ready[at] = as_bfloat16(ready[at])
    for at, tensor in empty:
        ready[at] = tensor


def _run_spare(
    template: list[Any],
    dense: list[tuple[str, int]],
    halves: list[int],
    result: NewResult,
    spare: OutputPool,
    current: Function,
    arguments: Callable[..., Arguments],
) -> Run:
    """Return the plan of most calls of a bound kernel: arrays in, one array out."""
    out, shape, dtype, _ = result
    fill = spare.filler(shape, dtype, out)

    def run(values: Values, _passed: Values | None = None) -> Any:
        ready = template.copy()
        for name, at in dense:
            ready[at] = values[name]
        array, function = fill(ready), current.function
        if current.waiting:
            function = current.next(partial(arguments, ready, [(out, array)]))
        _as_passed(ready, halves, [])
        function(*ready)
        return array

    if len(dense) != 1 or halves:
        return run
    ((only, place),) = dense

    def run_with_one(values: Values, _passed: Values | None = None) -> Any:
        if current.waiting:
            return run(values)
        ready = template.copy()
        ready[place] = values[only]
        array = fill(ready)
        current.function(*ready)
        return array

    return run_with_one


def _run_in_place(
    template: list[Any],
    dense: list[tuple[str, int]],
    separation: AliasCheck,
    current: Function,
    finish: Callable[[list[Any], Values], Any],
    arguments: Callable[..., Arguments],
) -> Run:
    """Return the plan of calls of a bound kernel that write to arrays that are passed."""
    check = separation.check

    def run(values: Values, passed: Values | None = None) -> Any:
        ready = template.copy()
        for name, at in dense:
            ready[at] = values[name]
        check(ready)
        if current.waiting:
            current.next(partial(arguments, ready, []))(*ready)
        else:
            current.function(*ready)
        return finish(ready, passed or values)

    return run


def _finish(
    caller: PlanContext, args: Arguments, arguments: Values, place: dict[str, int]
) -> tuple[Callable[[list[Any], Values], Any], bool]:
    """Return a function that returns the results of a call, and whether this is one newly allocated array."""
    signature = caller.signature
    names = signature.outputs or signature.effects.updated
    each = [_one(caller, args, arguments, name, place[name]) for name in names]
    if len(each) > 1:
        return lambda ready, values: tuple(one(ready, values) for one in each), False
    is_new = names[0] not in args.given and signature.is_plain(names[0]) and not args.torch
    return each[0], is_new


def _one(
    caller: PlanContext, args: Arguments, arguments: Values, name: str, at: int
) -> Callable[[list[Any], Values], Any]:
    """Return a function that returns one result of a call."""
    signature, argument = caller.signature, args.given.get(name, "")
    if argument in arguments:
        return lambda _ready, values: values[argument]
    if argument in caller.fixed:
        fixed = caller.fixed[argument]
        return lambda _ready, _values: fixed
    model = signature.model(args, name)
    if model in caller.base.stored:
        stored = caller.base.stored[model]
        return lambda ready, _values: interop.restore(stored, ready[at])
    if model is not None:
        return lambda ready, values: interop.with_values(values[model], ready[at], name=model)
    if args.torch:
        return lambda ready, _values: interop.to_torch(ready[at])
    return lambda ready, _values: ready[at]


def _ready(value: Any) -> Any:
    """Return what the compiled function takes with the least work, over the same memory."""
    return tvm_ffi.from_dlpack(value) if isinstance(value, np.ndarray) else value


__all__ = [
    "CallKey",
    "CallPlan",
    "CallTiming",
    "PlanContext",
    "PlanMismatch",
    "Run",
    "add_plan",
    "fits",
    "make_call_key",
    "measure",
    "ready_operands",
    "shaped",
]
