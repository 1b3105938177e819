# SPDX-License-Identifier: Apache-2.0
"""Effects of a program: parameters read and written, operands of a computed pattern, use and samples of arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.ir import dialect, sizes
from sparsetir.ir.rewriting import collect, factors, is_element, loads_of, mentions, same
from sparsetir.ir.views import INIT, STORED, Axis, Program, SparseBuffer, SpIter, accesses, is_sp_iter
from sparsetir.ir.visitor import structural_walk

# Which operands decide what an assembled axis stores.
#
# The variable of an assembled axis runs over the coordinates that the operands of the body store: those of both factors
# of a product, those of either term of a sum. `StoredCoordinates` is one access, `Both` and `Either` combine them.


@dataclass(frozen=True, eq=False)
class StoredCoordinates:
    """The coordinates that a buffer stores along one of its axes, at the other subscripts of an access."""

    buffer: Var
    indices: tuple[ir.Expr, ...]
    axis: Axis


@dataclass(frozen=True)
class Both:
    """The coordinates that all parts store."""

    parts: tuple[Coordinates, ...]


@dataclass(frozen=True)
class Either:
    """The coordinates that one part stores, or several."""

    parts: tuple[Coordinates, ...]


Coordinates: TypeAlias = "StoredCoordinates | Both | Either"

_PRODUCTS = (tirx.Mul, tirx.And, tirx.BitwiseAnd)
_QUOTIENTS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.LShift, tirx.RShift)


def results_over(axis: Axis, program: Program) -> list[Var]:
    """Return the buffers that lie over `axis`."""
    return [view for view, buffer in program.buffers.items() if axis in buffer.axes]


def operand_coordinates(iteration: SpIter, var: Var, axis: Axis, program: Program) -> Coordinates | None:
    """Return the coordinates that `var` of an assembled axis iterates; None if no operand stores any.

    Only stores of results over `axis` count, and in them accesses that `var` itself subscripts at an axis that is not
    dense. A product takes the coordinates of both factors, a quotient those of what is divided, a choice those of its
    values, anything else those of all its parts. What has no such access has no opinion, and so have results.
    """
    reader = _CoordinateReader(var, program, results_over(axis, program))
    return reader.statement(iteration.block.body)


def leaves(coordinates: Coordinates | None) -> Iterator[StoredCoordinates]:
    """Yield the accesses that coordinates are combined of."""
    if isinstance(coordinates, StoredCoordinates):
        yield coordinates
    elif coordinates is not None:
        for part in coordinates.parts:
            yield from leaves(part)


class _CoordinateReader:
    """Reads the coordinates of one variable off statements and expressions."""

    def __init__(self, var: Var, program: Program, results: Sequence[Var]) -> None:
        self.var, self.program, self.results = var, program, results
        self.named: dict[Var, Coordinates | None] = {}

    def statement(self, node: Any) -> Coordinates | None:
        if isinstance(node, tirx.BufferStore):
            return self.value(node.value) if node.buffer in self.results else None
        if isinstance(node, tirx.Bind):
            self.named[node.var] = self.value(node.value)
            return None
        if isinstance(node, tirx.SeqStmt):
            return _combined(Either, [self.statement(s) for s in node.seq])
        if isinstance(node, tirx.IfThenElse):
            return _combined(Either, [self.statement(s) for s in (node.then_case, node.else_case) if s is not None])
        inner = getattr(node, "body", None)
        return None if inner is None else self.statement(inner)

    def value(self, node: Any) -> Coordinates | None:
        if isinstance(node, ir.TensorLoad):
            return self._load(node)
        if isinstance(node, Var):
            return self.named.get(node)
        if isinstance(node, (tirx.Cast, tirx.Not)):
            return self.value(node.value if isinstance(node, tirx.Cast) else node.a)
        if isinstance(node, tirx.Let):
            self.named[node.var] = self.value(node.value)
            return self.value(node.body)
        if isinstance(node, tirx.Select):
            return _combined(Either, [self.value(node.true_value), self.value(node.false_value)])
        if isinstance(node, Call):
            chosen = node.args[1:] if dialect.is_if_then_else(node) else node.args
            return _combined(Either, [self.value(a) for a in chosen])
        if not hasattr(node, "a"):
            return None
        parts = [self.value(node.a), self.value(node.b)]
        if isinstance(node, _QUOTIENTS):
            return parts[1] if parts[0] is None else parts[0]
        return _combined(Both if isinstance(node, _PRODUCTS) else Either, parts)

    def _load(self, node: ir.TensorLoad) -> Coordinates | None:
        buffer = self.program.buffers.get(node.source)
        if buffer is None or node.source in self.results:
            return None
        pairs = zip(buffer.axes, node.indices, strict=True)
        coordinates = [
            StoredCoordinates(node.source, tuple(node.indices), a)
            for a, i in pairs
            if self.var.same_as(i) and not a.is_dense
        ]
        return _combined(Both, list(coordinates))


def _combined(kind: type[Both] | type[Either], parts: Sequence[Coordinates | None]) -> Coordinates | None:
    present = [p for p in parts if p is not None]
    return present[0] if len(present) == 1 else kind(tuple(present)) if present else None


# Which parameters a stage-I program reads and writes, and in which order.


@dataclass
class Effects:
    """Names of storage parameters by what happens to them.

    ``outputs`` are written and never read before; ``covered`` are the outputs whose every element is surely
    written; ``updated`` are read before they are written.
    """

    read_first: set[str] = field(default_factory=set)
    written: list[str] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)

    @property
    def outputs(self) -> list[str]:
        return [n for n in self.written if n not in self.read_first]

    @property
    def updated(self) -> list[str]:
        return [n for n in self.written if n in self.read_first]


class _Order:
    """Walks statements in execution order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.effects = Effects()
        self.certain = True
        self.allocated: set[str] = set()

    def _name(self, buffer: Var) -> str:
        view = self.program.buffers.get(buffer)
        return str((view.storage if view is not None else buffer).name)

    def expr(self, node: Any) -> None:
        """Record the reads of an expression."""

        def on_load(load: ir.TensorLoad) -> None:
            name = self._name(load.source)
            if name not in self.effects.written:
                self.effects.read_first.add(name)

        structural_walk(node, (ir.TensorLoad, on_load))

    def stmt(self, node: Any) -> None:
        """Record the reads of a statement, then its writes."""
        if isinstance(node, tirx.SeqStmt):
            for child in node.seq:
                self.stmt(child)
        elif isinstance(node, tirx.BufferStore):
            self._store(node)
        elif isinstance(node, s_tir.SBlockRealize):
            self._block(node)
        elif isinstance(node, tirx.For):
            self.expr(node.extent)
            self._maybe(node.body)
        elif isinstance(node, (tirx.IfThenElse, tirx.While)):
            self.expr(node.condition)
            for body in (node.body,) if isinstance(node, tirx.While) else (node.then_case, node.else_case):
                self._maybe(body)
        elif isinstance(node, tirx.AttrStmt):
            self.stmt(node.body)
        elif isinstance(node, (tirx.Bind, tirx.Evaluate)) and isinstance(node.value, Call):
            self.expr(node.value)

    def _maybe(self, body: Any) -> None:
        """Visit a body that may not run."""
        certain, self.certain = self.certain, False
        if body is not None:
            self.stmt(body)
        self.certain = certain

    def _store(self, node: tirx.BufferStore) -> None:
        self.expr(node.value)
        for index in node.indices:
            self.expr(index)
        name = self._name(node.buffer)
        if name not in self.effects.written:
            self.effects.written.append(name)

    def _block(self, node: s_tir.SBlockRealize) -> None:
        if is_sp_iter(node):
            iteration = next((it for it in self.program.iterations if it.node.same_as(node)), None)
            if iteration is not None and self.certain:
                self._cover(iteration)
        inner = self._maybe if node.block.iter_vars else self.stmt
        if node.block.init is not None:
            inner(node.block.init)
        inner(node.block.body)

    def _cover(self, iteration: SpIter) -> None:
        """Record the buffers that the iteration sets everywhere."""
        for part, is_init in ((iteration.block.init, True), (iteration.block.body, False)):
            store = part if isinstance(part, tirx.BufferStore) else None
            if store is not None and self._covers(iteration, store, is_init):
                self.effects.covered.add(self._name(store.buffer))

    def _covers(self, iteration: SpIter, store: tirx.BufferStore, is_init: bool) -> bool:
        buffer = self.program.buffers.get(store.buffer)
        if buffer is None or len(set(store.indices)) != len(store.indices):
            return False
        axis_of = dict(zip(iteration.vars, iteration.axes, strict=True))
        if any(i not in axis_of for i in store.indices) or any(e.attached_to or e.merge for e in iteration.entries):
            return False
        used = [axis_of[i] for i in store.indices]
        pairs = list(zip(used, buffer.axes, strict=True))
        if is_init and str(iteration.block.annotations.get(INIT, "")) != STORED:
            unused = [a for a, k in zip(iteration.axes, iteration.kinds, strict=True) if k == "S" and a not in used]
            return all(_has_points(a) for a in unused) and all(_initialises(u, stored_axis) for u, stored_axis in pairs)
        return (
            "R" not in iteration.kinds
            and len(iteration.vars) == len(used)
            and all(_walks(u, stored_axis) for u, stored_axis in pairs)
        )


def _has_points(axis: Axis) -> bool:
    """Return whether an axis has a coordinate whatever the sizes: without one, nothing is initialised."""
    return isinstance(axis.length, tirx.IntImm) and int(axis.length) > 0


def _initialises(used: Axis, stored_axis: Axis) -> bool:
    """Return whether the coordinates of `used` reach every position of `stored_axis`; a search finds a repeat once."""
    reached = used is stored_axis or stored_axis.unique
    return reached and not _has_gaps(stored_axis) and same(used.length, stored_axis.length)


def _has_gaps(axis: Axis) -> bool:
    """Return whether stored elements may lack a coordinate: padding, or gaps between rows given by formulas."""
    return axis.may_be_absent or axis.kind == "dense_implicit"


def _walks(used: Axis, stored_axis: Axis) -> bool:
    """Return whether iterating `used` reaches every position of `stored_axis`."""
    if used is stored_axis:
        return not _has_gaps(used)
    dense = used.kind == stored_axis.kind == "dense_fixed"
    return dense and same(used.length, stored_axis.length)


def analyse(program: Program, covered: Collection[str] = ()) -> Effects:
    """Return the reads and writes of a program's parameters; outputs in `covered` are taken as written everywhere."""
    order = _Order(program)
    order.stmt(program.func.body)
    names = {str(p.name) for p in program.func.params}
    effects = order.effects
    effects.written = [str(p.name) for p in program.func.params if str(p.name) in effects.written]
    effects.read_first &= names
    effects.covered &= names
    effects.covered |= set(covered) & set(effects.outputs)
    return effects


# ------------------------------------------------------------------------------------- usage of arrays


WINDOWS = 16  # of an array that are sampled
PROBED = 512  # entries behind a window that are looked for in it
ROWS = 1024  # of a window

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Gather:
    """A dense array whose rows are found through an index array, both by the names of parameters."""

    indices: str
    operand: str
    dimension: int


MATHEMATICAL = frozenset(
    (
        *("exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "pow", "sqrt", "rsqrt", "sigmoid", "erf", "tanh"),
        *("sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "hypot"),
    )
)


@dataclass(frozen=True)
class Starts:
    """The initial values of reductions, which are their results where there is nothing to reduce.

    Parameters
    ----------
    indices : sequence of str
        Index arrays of axes that are reduced: if one of them is empty, so is each reduction.
    values : mapping of str to float
        By the names of the results.
    """

    indices: Sequence[str]
    values: Mapping[str, float]


@dataclass(frozen=True)
class Usage:
    """The uses that a program makes of its parameters, by their names.

    Parameters
    ----------
    gathers : sequence of Gather
    pointers : sequence of str
        Where the rows of a loop over dense rows begin.
    sums : sequence of str
        Where the rows begin that an iteration sums into one number each.
    rows : sequence of (str, int)
        Dense arrays that are summed, and along which dimension.
    widths : sequence of (str, str, int)
        Sizes that no sparse axis depends on, such as the columns of a dense operand, each with a dense array and its
        dimension of this size.
    starts : Starts, optional
        What results are without entries; None where that is not known.
    functions : int
        Calls of mathematical functions, such as exp, in the bodies of iterations.
    """

    gathers: Sequence[Gather]
    pointers: Sequence[str]
    sums: Sequence[str]
    rows: Sequence[tuple[str, int]]
    widths: Sequence[tuple[str, str, int]] = ()
    starts: Starts | None = None
    functions: int = 0

    @classmethod
    def of(cls, program: Program) -> Usage:
        """Return the usage of a program's parameters."""
        return cls(
            gathers(program),
            row_pointers(program),
            ragged_sums(program),
            dense_sums(program),
            widths(program),
            initial_values(program),
            mathematical_calls(program),
        )


# ------------------------------------------------------------------ programs


def gathers(program: Program) -> list[Gather]:
    """Return every gather of a program's iterations."""
    unique: dict[Gather, None] = {}
    for iteration in program.iterations:
        pairs = zip(iteration.vars, iteration.axes, strict=True)
        listed = {v: str(a.indices.name) for v, a in pairs if a.indices is not None}
        for storage, subscripts in dense_accesses(program, iteration):
            for d, subscript in enumerate(subscripts):
                if subscript in listed:
                    unique[Gather(listed[subscript], storage, d)] = None
    return list(unique)


def initial_values(program: Program) -> Starts | None:
    """Return the initial values of a program's reductions.

    None unless the program is nothing but one iteration, which starts from numbers.
    """
    iteration = program.iterations[0] if len(program.iterations) == 1 else None
    if iteration is None or iteration.block.init is None:
        return None
    entries = [entry for entry in iteration.entries if len(entry.axes) == 1 and set(entry.kinds) == {"R"}]
    indices = [str(axis.indices.name) for entry in entries for axis in entry.axes if axis.indices is not None]
    values: dict[str, float] = {}
    for store in collect(iteration.block.init, tirx.BufferStore):
        buffer = program.buffers.get(store.buffer)
        if buffer is None or not isinstance(store.value, (tirx.FloatImm, tirx.IntImm)):
            return None
        values[str(buffer.storage.name)] = store.value.value
    stores = collect(iteration.block.body, tirx.BufferStore)
    if len(stores) + len(values) != len(collect(program.func.body, tirx.BufferStore)):
        return None  # there are other loops
    written = [program.buffers.get(store.buffer) for store in stores]
    is_known = {None if buffer is None else str(buffer.storage.name) for buffer in written} == set(values)
    return Starts(indices, values) if indices and is_known else None


def mathematical_calls(program: Program) -> int:
    """Return the number of calls of mathematical functions in the bodies of iterations."""
    calls = (call for iteration in program.iterations for call in collect(iteration.block.body, Call))
    return sum(dialect.function_of(call) in MATHEMATICAL for call in calls)


def dense_accesses(program: Program, iteration: SpIter) -> Iterator[tuple[str, list[Any]]]:
    """Yield the dense parameters that an iteration reads or writes, with the subscripts."""
    for view, subscripts, _ in accesses(iteration.block):
        buffer = program.buffers.get(view)
        if isinstance(buffer, SparseBuffer) and buffer.is_dense and not buffer.allocated:
            yield str(buffer.storage.name), subscripts


def known(gathers: Sequence[Gather], arrays: Arrays) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield the index array, the operand and the number of its rows, for gathers of something."""
    for gather in gathers:
        indices, operand = arrays.get(gather.indices), arrays.get(gather.operand)
        if indices is not None and operand is not None and operand.size and indices.size:
            yield indices, operand, operand.shape[gather.dimension]


def row_pointers(program: Program) -> list[str]:
    """Return parameters that say where the rows of a loop over dense rows begin."""
    names: dict[str, None] = {}
    for iteration in program.iterations:
        for axis in iteration.axes:
            if axis.indptr is not None and axis.parent is not None and axis.parent.kind == "dense_fixed":
                names[str(axis.indptr.name)] = None
    return list(names)


def ragged_sums(program: Program) -> list[str]:
    """Return the parameters with the row lengths of every iteration that ends in a sum along a ragged row."""
    names: dict[str, None] = {}
    for iteration in program.iterations:
        last = iteration.axes[-1] if iteration.axes else None
        if last is not None and last.indptr is not None and iteration.kinds[-1] == "R":
            names[str(last.indptr.name)] = None
    return list(names)


def order_free_axes(program: Program, *, may_repeat: bool) -> set[Axis]:
    """Return the axes whose entries may come in any order: all are factors of terms of sums.

    ``y[i] = y[i] + A[i, j] * x[j]`` gives the same for entries that were sorted before, and if they `may_repeat` for
    those that were added up. Such an axis belongs to one buffer, which is only read, at the variable of the axis and
    once in each term, and the sums are dense. Programs of several iterations, and those that compute a pattern, have no
    such axes.
    """
    if len(program.iterations) != 1 or any(axis.is_assembled for axis in program.axes.values()):
        return set()
    return {axis for axis in program.axes.values() if _is_order_free(axis, program, may_repeat)}


def _is_order_free(axis: Axis, program: Program, may_repeat: bool) -> bool:
    buffers = [b for b in program.buffers.values() if axis in b.axes]
    if buffers and may_repeat and "float" not in buffers[0].dtype:
        return False  # two True are one, and integers may be widened only after they were added up
    if axis.kind != "sparse_variable" or axis.parent is None or axis.parent.kind != "dense_fixed":
        return False
    if len(buffers) != 1 or buffers[0].allocated or any(child.parent is axis for child in program.axes.values()):
        return False
    loads = loads_of(program.func.body, buffers[0].view)
    return len(loads) == 1 and _sums_entries(program, axis, buffers[0])


def _sums_entries(program: Program, axis: Axis, buffer: SparseBuffer) -> bool:
    """Return whether the iteration does nothing but add up products with one entry of the buffer each."""
    (iteration,) = program.iterations
    store: Any = iteration.block.body
    if axis not in iteration.axes or not isinstance(store, tirx.BufferStore):
        return False
    position, value = iteration.axes.index(axis), store.value
    var, result = iteration.vars[position], program.buffers.get(store.buffer)
    if iteration.kinds[position] != "R" or result is None or not result.is_dense or not isinstance(value, tirx.Add):
        return False
    if mentions(list(store.indices), [var]) or collect(value.b, ir.Call) or not is_element(value.a, store):
        return False
    entries = [x for x in factors(value.b) if isinstance(x, ir.TensorLoad) and x.source.same_as(buffer.view)]
    return len(entries) == 1 and entries[0].indices[buffer.axes.index(axis)].same_as(var)


def dense_sums(program: Program) -> list[tuple[str, int]]:
    """Return the dense operands of every iteration that ends in a sum along a dense axis, and their dimension of it."""
    operands: dict[tuple[str, int], None] = {}
    for iteration in program.iterations:
        last = iteration.axes[-1] if iteration.axes else None
        if last is None or last.indptr is not None or last.indices is not None or iteration.kinds[-1] != "R":
            continue
        for storage, subscripts in dense_accesses(program, iteration):
            for d, subscript in enumerate(subscripts):
                if iteration.vars[-1].same_as(subscript):
                    operands[storage, d] = None
    return list(operands)


def free_sizes(program: Program) -> list[str]:
    """Return size symbols that no sparse or ragged axis depends on, such as the number of features."""
    bound: set[str] = set()
    free: list[str] = []
    roots = {a.root for a in program.axes.values() if a.parent is not None or not a.is_dense}
    for axis in program.axes.values():
        names = [n for e in (axis.length, axis.count, axis.width) if e is not None for n in sizes.symbols(e)]
        if axis.root in roots:
            bound.update(names)
        free += names
    scalars = [str(p.name) for p in program.func.params if not tirx.is_buffer_var(p)]
    return [name for name in scalars if name in free and name not in bound]


def widths(program: Program) -> list[tuple[str, str, int]]:
    """Return the free sizes, each with a dense parameter and the dimension of it that has this size.

    It is the last dimension only if all parameters have it there: vectors run along it then.
    """
    dimensions = []
    for name in free_sizes(program):
        places = [
            (name, str(buffer.storage.name), d, d - len(buffer.storage_shape))
            for buffer in program.buffers.values()
            if buffer.is_dense and not buffer.allocated
            for d, extent in enumerate(buffer.storage_shape)
            if sizes.Size(extent).name == name
        ]
        dimensions += [place[:3] for place in sorted(places, key=lambda place: place[3])[:1]]
    return dimensions


# ------------------------------------------------------------------ arrays


def mean_length(pointers: Sequence[str], arrays: Arrays) -> float:
    """Return entries of a row on average, the least of several arrays; 0 if there is none."""
    lengths = [indptr[-1] / max(len(indptr) - 1, 1) for name in pointers if (indptr := arrays.get(name)) is not None]
    return float(min(lengths, default=0.0))


def share_of_new(indices: np.ndarray, window: int) -> float:
    """Return the mean share of different numbers in a few windows of an index array.

    Parameters
    ----------
    indices : ndarray
    window : int
        Entries.

    Examples
    --------
    >>> share_of_new(np.array([5, 5, 6, 6]), 4)
    0.5
    """
    flat = indices.reshape(-1)
    length = max(1, min(window, len(flat)))
    if not flat.size:
        return 0.0
    ordered = [np.sort(flat[s : s + length]) for s in _starts(len(flat), length)]  # np.unique takes ten times as long
    return float(np.mean([(1 + np.count_nonzero(np.diff(window))) / length for window in ordered]))


def _starts(size: int, length: int) -> list[int]:
    """Return where a few windows of so many entries begin in an array."""
    count = min(WINDOWS, max(1, size // length))
    positions: list[int] = np.linspace(0, max(size - length, 0), count).astype(np.int64).tolist()
    return positions


def share_of_misses(indices: np.ndarray, window: int) -> float:
    """Return the share of the entries of an index array whose number was not among as many entries before them.

    That of a cache with room for `window` rows that replaces the one used longest ago, roughly, in a few samples.

    Parameters
    ----------
    indices : ndarray
    window : int
        Entries.

    Examples
    --------
    >>> share_of_misses(np.array([0, 1, 2, 3] * 9), 4), share_of_misses(np.arange(36), 4)
    (0.0, 1.0)
    """
    flat = indices.reshape(-1)
    before = max(1, min(window, len(flat) // 2))
    after = min(before, PROBED)
    shares = []
    for s in _starts(len(flat), before + after):
        seen, probed = np.sort(flat[s : s + before]), np.unique(flat[s + before : s + before + after])
        found = seen[np.minimum(np.searchsorted(seen, probed), before - 1)] == probed
        shares.append(np.count_nonzero(~found) / after)
    return float(np.mean(shares))


def has_longer_row(indptr: np.ndarray, length: int) -> bool:
    """Return whether a row has more than `length` entries: it contains one of the entries `length`, 2 `length`, ...

    Examples
    --------
    >>> indptr = np.array([0, 2, 7, 8])
    >>> has_longer_row(indptr, 4), has_longer_row(indptr, 5)
    (True, False)
    """
    step = max(length, 1)
    rows = np.searchsorted(indptr, np.arange(0, int(indptr[-1]), step), side="right") - 1
    return bool(np.any(indptr[rows + 1] - indptr[rows] > length))


def some_lengths(indptr: np.ndarray) -> np.ndarray:
    """Return the lengths of the rows in a few windows, a window a line.

    Examples
    --------
    >>> some_lengths(np.array([0, 2, 4, 7, 10])).tolist()
    [[2, 2, 3, 3]]
    """
    length = min(ROWS + 1, len(indptr))
    starts = np.linspace(0, len(indptr) - length, WINDOWS if length < len(indptr) else 1).astype(np.int64)
    return np.stack([np.diff(indptr[s : s + length]) for s in starts])


def share_of_changes(lengths: np.ndarray) -> float:
    """Return the share of rows that are not as long as the row before, of neighbouring rows along the last dimension.

    Examples
    --------
    >>> share_of_changes(np.array([[2, 2, 3, 3]]))
    0.3333333333333333
    """
    changes = np.diff(lengths) != 0
    return float(np.mean(changes)) if changes.size else 0.0


__all__ = [
    "Arrays",
    "Both",
    "Coordinates",
    "Either",
    "Gather",
    "StoredCoordinates",
    "Usage",
    "dense_sums",
    "free_sizes",
    "gathers",
    "has_longer_row",
    "known",
    "leaves",
    "mean_length",
    "operand_coordinates",
    "ragged_sums",
    "results_over",
    "row_pointers",
    "share_of_changes",
    "share_of_misses",
    "share_of_new",
    "some_lengths",
    "widths",
]
