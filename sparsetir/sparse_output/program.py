# SPDX-License-Identifier: Apache-2.0
"""Rewrites of programs with computed patterns to ones that the ordinary stages lower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.errors import LoweringError
from sparsetir.interop.arrays import HALVES
from sparsetir.ir import dialect
from sparsetir.ir.effects import Both, Coordinates, StoredCoordinates, operand_coordinates
from sparsetir.ir.rewriting import collect, mentions, product, same, seq
from sparsetir.ir.rules import stores
from sparsetir.ir.views import Axis, Program, SparseBuffer, SpIter, cast, decode
from sparsetir.ir.visitor import structural_mutate

# The list entry that replaces an assembled axis in an iteration: the axes of the body's operands.


@dataclass(frozen=True)
class _Set:
    """The coordinates of one axis, or of several together."""

    members: tuple[ir.Expr, ...]
    how: str = ""

    @property
    def entry(self) -> ir.Expr:
        """The entry of an iteration's list."""
        if len(self.members) == 1:
            return self.members[0]
        return dialect.call(self.how, list(self.members), str(self.members[0].ty.dtype))


def driving(iteration: SpIter, var: Var, axis: Axis, program: Program) -> ir.Expr:
    """Return the list entry that replaces an assembled axis with variable `var`.

    Raises
    ------
    LoweringError
        No operand has stored coordinates there, or sums and products of operands are nested.
    """
    coordinates = operand_coordinates(iteration, var, axis, program)
    if coordinates is None:
        message = f"no operand of iteration {iteration.name} stores coordinates {var.name}"
        raise LoweringError(f"{message}: list the axis that it runs over instead of the assembled one")
    entries = _set_of(coordinates, iteration, program)
    if entries is None:
        message = f"{var.name} of iteration {iteration.name} would run over unions and intersections at once"
        raise LoweringError(f"{message}: list one axis, T.union or T.intersect in place of {axis.name}")
    return entries.entry


def _set_of(coordinates: Coordinates, iteration: SpIter, program: Program) -> _Set | None:
    """Return the coordinates to iterate over; None if unions and intersections are nested."""
    if isinstance(coordinates, StoredCoordinates):
        return _Set((_placed(coordinates, iteration, program),))
    operation = "intersect" if isinstance(coordinates, Both) else "union"
    first, *sets = (_set_of(part, iteration, program) for part in coordinates.parts)
    for operand in sets:
        first = None if first is None or operand is None else _joined(operation, first, operand)
    return first


def _placed(stored: StoredCoordinates, iteration: SpIter, program: Program) -> ir.Expr:
    """Return the form of an axis in the iteration: below its parent, or attached to the axis that gives its position.

    An assembled axis is replaced by the axes of its operands, one of which is the parent.
    """
    axis, buffer = stored.axis, program.buffers[stored.buffer]
    if axis.parent is None:
        return axis.var
    index = stored.indices[buffer.axes.index(axis.parent)]
    pairs = [(a, v) for e in iteration.entries for a, v in zip(e.axes, e.vars, strict=False)]
    parent = next((a for a, v in pairs if isinstance(index, Var) and v.same_as(index)), None)
    if parent is None:
        message = f"{buffer.name} is read at {index} of axis {axis.parent.name}"
        raise LoweringError(f"{message}: the rows that an assembled axis runs over are named by a variable")
    is_own = parent is axis.parent or parent.is_assembled
    return axis.var if is_own else dialect.call("attach", [axis.var, parent.var], axis.idtype)


def _joined(operation: str, first: _Set, second: _Set) -> _Set | None:
    """Join two sets; return None if one of them is joined differently."""
    if len(first.members) == 1 == len(second.members) and same(first.members[0], second.members[0]):
        return first
    if any(len(s.members) > 1 and s.how != operation for s in (first, second)):
        return None
    return _Set((*first.members, *second.members), operation)


# Rewrite of a program with computed patterns.
#
# Each assembled axis becomes a dense one, and each result over it a dense stand-in that is never allocated. An
# assembled axis in the list of an iteration is replaced by the axes of the body's operands. An initialisation is
# removed: it becomes the value of an element before the first statement sets it.


@dataclass(frozen=True, eq=False)
class SparseResult:
    """A result over assembled axes.

    Parameters
    ----------
    name : str
        The name in the script.
    storage : str
        Name of its parameter.
    dtype : str
    initial : Expr
        The value of an element before the first statement sets it.
    lengths : tuple of Expr
        Of its assembled axes, outermost first.
    inner : tuple of Expr
        Lengths of the dense axes behind those: each coordinate has a block of so many elements.
    """

    name: str
    storage: str
    dtype: str
    initial: ir.Expr
    lengths: tuple[ir.Expr, ...]
    inner: tuple[ir.Expr, ...] = ()

    @property
    def block(self) -> tuple[ir.Expr, ...]:
        """The number of elements of a coordinate, in 64 bits; empty if it is one."""
        return (product([cast(n, "int64") for n in self.inner]),) if self.inner else ()

    @property
    def held_dtype(self) -> str:
        """The dtype in which elements are accumulated."""
        return "float32" if self.dtype in HALVES else self.dtype


@dataclass(frozen=True, eq=False)
class Merge:
    """An iteration over the coordinates of sorted axes of each row, which stores every element once.

    Parameters
    ----------
    how : {"union", "intersect"}
    members : tuple of Axis
    row, var : Var
        Of the iteration.
    stores : tuple of BufferStore
    """

    how: str
    members: tuple[Axis, ...]
    row: Var
    var: Var
    stores: tuple[tirx.BufferStore, ...]

    @property
    def idtype(self) -> str:
        """A dtype that holds the row pointers and coordinates of all axes."""
        dtypes = {str(a.ty.dtype) for m in self.members for a in (m.indptr, m.indices) if a is not None}
        return dtypes.pop() if len(dtypes) == 1 else "int64"


@dataclass(frozen=True, eq=False)
class AssembledProgram:
    """A program whose assembled axes are dense stand-ins.

    Parameters
    ----------
    source : Program
        The program as written.
    func : PrimFunc
    axes : tuple of Axis
        The assembled ones, outermost first.
    rows : tuple of Axis
        The axes above them.
    results : tuple of SparseResult
    filters : tuple of Axis
        Axes below the row that an intersection lists and that store each coordinate once: others are not entered.
    merge : Merge, optional
        The one iteration of the program, where that merges sorted axes of the row.
    """

    source: Program
    func: tirx.PrimFunc
    axes: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    results: tuple[SparseResult, ...]
    filters: tuple[Axis, ...] = ()
    merge: Merge | None = None

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.func.attrs["global_symbol"])

    @property
    def has_rows(self) -> bool:
        """Whether the assembled axes lie below others."""
        return bool(self.rows)

    @property
    def rows_name(self) -> str:
        """The name of the axis whose positions are the rows."""
        return self.rows[-1].name if self.rows else "the root"

    @property
    def key_dtype(self) -> str:
        """The dtype of a coordinate below a row; several axes share one number."""
        return self.axes[0].idtype if len(self.axes) == 1 else "int64"

    @property
    def mask(self) -> Axis | None:
        """The only filter, if it is sorted without duplicates, so that rows may be collected in its order."""
        plain = [a for a in self.filters if a.sorted and a.unique and a.indices is not None]
        return plain[0] if len(plain) == len(self.filters) == 1 else None

    def result_of(self, buffer: Var) -> SparseResult | None:
        """Return the result whose stand-in an array is, or None."""
        return next((r for r in self.results if r.storage == str(buffer.name)), None)


def is_assembled(program: Program) -> bool:
    """Return whether a program computes patterns."""
    return any(axis.is_assembled for axis in program.axes.values())


def assemble(func: tirx.PrimFunc) -> AssembledProgram:
    """Rewrite a program so that its assembled axes are dense.

    Raises
    ------
    LoweringError
        It is of a form that is not supported; the message says which.
    """
    program = decode(func)
    axes = _chain(program)
    rows = axes[0].ancestors
    buffers = [b for b in program.buffers.values() if any(a.is_assembled for a in b.axes)]
    _check_stores(program, buffers)
    results = tuple(_result(b, axes, rows, program) for b in buffers)
    rewriter = _Rewriter(program, axes, rows, buffers)
    rewritten = rewriter.function()
    return AssembledProgram(program, rewritten, axes, rows, results, tuple(rewriter.filters), rewriter.merge)


def _check_stores(program: Program, assembled: Sequence[SparseBuffer]) -> None:
    """Raise if anything else is stored: functions may visit a row more than once, and rows run in parallel."""
    inside = [x.buffer for x in collect(program.func.body, tirx.AllocBuffer)]  # variables of a body
    allowed = [*inside, *(b.view for b in assembled)]
    unexpected = next((a for a in stores(program.func.body) if not any(a.buffer.same_as(b) for b in allowed)), None)
    if unexpected is not None:
        names = ", ".join(str(b.name) for b in assembled)
        message = f"a program that computes the pattern of {names} stores nothing else, got {unexpected.name}"
        raise LoweringError(f"{message}: write a program of its own for it")


def _chain(program: Program) -> tuple[Axis, ...]:
    """Return the assembled axes; raise unless they form one chain."""
    assembled = [a for a in program.axes.values() if a.is_assembled]
    last = max(assembled, key=lambda a: len(a.ancestors))
    chain = tuple(a for a in (*last.ancestors, last) if a.is_assembled)
    if len(chain) != len(assembled):
        names = ", ".join(a.name for a in assembled)
        raise LoweringError(f"a program computes one pattern, got {names}: write a program for each")
    return chain


def _result(buffer: SparseBuffer, axes: tuple[Axis, ...], rows: tuple[Axis, ...], program: Program) -> SparseResult:
    above = (*rows, *axes)
    inner = buffer.axes[len(above) :]
    if buffer.axes[: len(above)] != above or any(a.kind != "dense_fixed" or a.parent is not None for a in inner):
        names = ", ".join(a.name for a in above)
        raise LoweringError(f"{buffer.name} must lie over the axes {names}, in that order, and dense ones behind them")
    variable = [a for a in rows[1:] if a.kind != "dense_fixed"]
    if variable:
        raise LoweringError(f"the rows of {buffer.name} are one dense axis, got {variable[0]!r}")
    initial = cast(_initial(buffer, program), buffer.dtype)
    lengths, behind = tuple(a.length for a in axes), tuple(a.length for a in inner)
    return SparseResult(buffer.name, str(buffer.storage.name), buffer.dtype, initial, lengths, behind)


def _initial(buffer: SparseBuffer, program: Program) -> ir.Expr:
    """Return the value to which ``T.init`` of an iteration sets a buffer's elements, else the buffer's default."""
    values: list[ir.Expr] = []
    for iteration in program.iterations:
        if iteration.block.init is None:
            continue
        stores = [s for s in collect(iteration.block.init, tirx.BufferStore) if s.buffer.same_as(buffer.view)]
        for store in stores:
            if mentions(store.value, list(iteration.vars)) or collect(store.value, ir.TensorLoad):
                message = f"{buffer.name} begins with {store.value}"
                raise LoweringError(f"{message}: elements of a computed pattern begin with one number")
            values.append(store.value)
    different = next((v for v in values if not same(v, values[0])), None)
    if different is not None:
        message = f"{buffer.name} begins with {values[0]} in one iteration and with {different} in another"
        raise LoweringError(f"{message}: an element begins with the same number in all of them")
    return values[0] if values else buffer.default


def _stand_in(buffer: SparseBuffer, axes: tuple[Axis, ...]) -> Var:
    """Return a dense array that replaces the values of a result."""
    first = buffer.axes.index(axes[0])
    above = [tree[-1].count for tree in _part(buffer, buffer.axes[:first]).trees] if first else []
    shape = [*above, *(a.length for a in buffer.axes[first:])]
    old = buffer.storage
    return tirx.decl_buffer(shape, buffer.dtype, name=str(old.name), layout=None)


def _part(buffer: SparseBuffer, axes: tuple[Axis, ...]) -> SparseBuffer:
    return SparseBuffer(buffer.view, buffer.storage, axes, buffer.default)


def _with_buffers(body: tirx.Stmt, mapping: Mapping[Var, Var]) -> tirx.Stmt:
    return tvm_ffi.structural_map(body, with_def_region_kind=(Var, lambda v, _kind: mapping.get(v, v)))


class _Rewriter:
    """Rewriter of a program with dense stand-ins; records the filters of its iterations, and whether it merges rows."""

    def __init__(
        self, program: Program, axes: tuple[Axis, ...], rows: tuple[Axis, ...], results: list[SparseBuffer]
    ) -> None:
        self.program, self.axes, self.rows, self.held = program, axes, rows, results
        self.filters: list[Axis] = []
        self.merge: Merge | None = None

    def function(self) -> tirx.PrimFunc:
        """Return the rewritten program."""
        program, dense = self.program, {a.var: dialect.call("dense_fixed", [a.length], a.idtype) for a in self.axes}
        stand_ins = {b.storage: _stand_in(b, self.axes) for b in self.held}

        def on_bind(node: tirx.Bind, mutator: Any) -> tirx.Stmt:
            return tirx.Bind(node.var, dense[node.var]) if node.var in dense else mutator.default_mutate(node)

        def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
            iteration = next((it for it in program.iterations if it.node.same_as(node)), None)
            inner = mutator.default_mutate(node)
            return inner if iteration is None else self.iteration(iteration, inner)

        body = structural_mutate(program.func.body, [(tirx.Bind, on_bind), (s_tir.SBlockRealize, on_realize)])
        params = [stand_ins.get(p, p) for p in program.func.params]
        return tirx.PrimFunc(params, _with_buffers(body, stand_ins), program.func.ret_type, program.func.attrs)

    def iteration(self, iteration: SpIter, node: s_tir.SBlockRealize) -> tirx.Stmt:
        """Rewrite an iteration to the axes of its operands, without the initialisation of results."""
        values = [self.entry(iteration, n, value) for n, value in enumerate(node.iter_values)]
        if len(self.program.iterations) == 1:
            self.merge = self.merged(iteration, values)
        block, init = node.block, node.block.init
        if init is not None:
            remaining = [s for s in _statements(init) if not _sets(s, self.held)]
            init = seq(*remaining) if remaining else None
        notes = block.annotations
        parts = [block.iter_vars, block.reads, block.writes, block.name_hint, block.body, init, block.alloc_buffers]
        return s_tir.SBlockRealize(values, node.predicate, s_tir.SBlock(*parts, block.match_buffers, notes))

    def entry(self, iteration: SpIter, number: int, value: Call) -> Call:
        """Return the domain of an iteration variable, without assembled axes and axes that only filter."""
        target = value.args[0]
        if isinstance(target, Var) and self.program.axes[target] in self.axes:
            var = iteration.block.iter_vars[number].var
            target = driving(iteration, var, self.program.axes[target], self.program)
        is_alone = len(self.program.iterations) == 1  # others store where the filters have nothing
        if dialect.is_call(target, "intersect") and is_alone and self.is_key(iteration, number):
            target = self.without_filters(target)
        return dialect.call("coord", [target, *value.args[1:]], str(value.ty.dtype))

    def is_key(self, iteration: SpIter, number: int) -> bool:
        """Return whether a variable of an iteration is the coordinate below the row that every statement enters."""
        var = iteration.block.iter_vars[number].var
        stores = [s for s in collect(iteration.block.body, tirx.BufferStore) if _sets(s, self.held)]
        return len(self.axes) == 1 and all(s.indices[-1].same_as(var) for s in stores)

    def without_filters(self, target: Call) -> ir.Expr:
        """Drop from an intersection the row's axes without children, if it has others.

        Axes with duplicate coordinates stay in it: it visits each duplicate.
        """
        above = {axis.parent for axis in self.program.axes.values()}
        row = [m for m in target.args if isinstance(m, Var) and self.program.axes[m].parent in self.rows]
        fixed = [m for m in row if self.program.axes[m] not in above and self.program.axes[m].unique]
        remaining = [m for m in target.args if m not in fixed]
        if not remaining or not fixed:
            return target
        self.filters += [self.program.axes[m] for m in fixed]
        if len(remaining) == 1:
            return remaining[0]
        return dialect.call("intersect", remaining, str(target.ty.dtype))

    def merged(self, iteration: SpIter, values: list[Call]) -> Merge | None:
        """Return the iteration as a merge of rows, or None if it is not one."""
        target = values[-1].args[0]
        if len(values) != 2 or len(self.axes) != 1 or len(self.rows) != 1 or self.rows[0].kind != "dense_fixed":
            return None
        if not dialect.is_call(target, "union", "intersect") or not values[0].args[0].same_as(self.rows[0].var):
            return None
        row, var = (iv.var for iv in iteration.block.iter_vars)
        axes = list(dict.fromkeys(self.program.axes.get(m) for m in target.args))  # one may be listed twice
        members = tuple(a for a in axes if a is not None and _is_sorted_row(a, self.rows[0]))
        stores = tuple(_statements(iteration.block.body))
        if len(members) != len(axes) or not all(self.is_merged(s, row, var, members) for s in stores):
            return None
        return Merge(dialect.name_of(target), members, row, var, stores)

    def is_merged(self, store: tirx.Stmt, row: Var, var: Var, members: tuple[Axis, ...]) -> bool:
        """Return whether a statement sets the element at the merged coordinate from elements at that coordinate."""
        if not isinstance(store, tirx.BufferStore) or not _sets(store, self.held):
            return False
        loads = collect(store.value, ir.TensorLoad)
        at = [x for x in loads if x.source not in self.program.buffers]
        buffers = [(self.program.buffers[x.source], x) for x in loads if x.source in self.program.buffers]
        direct = all(_is_direct(b, x, row, var, members) for b, x in buffers)
        return not at and direct and _at(store.indices, row, var) and not _sets_itself(store)


def _is_sorted_row(axis: Axis, row: Axis) -> bool:
    """Return whether an axis stores the coordinates of each row in ascending order without duplicates."""
    is_plain = axis.kind == "sparse_variable" and axis.rule is None and axis.sorted and axis.unique
    return is_plain and axis.parent is row


def _is_direct(buffer: SparseBuffer, load: ir.TensorLoad, row: Var, var: Var, members: tuple[Axis, ...]) -> bool:
    """Return whether an element is at the merged coordinate, or of a dense buffer."""
    if buffer.is_dense:
        return all(isinstance(i, Var) and (i.same_as(row) or i.same_as(var)) for i in load.indices)
    return len(buffer.axes) == 2 and buffer.axes[1] in members and _at(load.indices, row, var)


def _at(indices: Any, row: Var, var: Var) -> bool:
    return len(indices) == 2 and indices[0].same_as(row) and indices[1].same_as(var)


def _sets_itself(store: tirx.BufferStore) -> bool:
    return any(x.source.same_as(store.buffer) for x in collect(store.value, ir.TensorLoad))


def _statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    return list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]


def _sets(stmt: tirx.Stmt, buffers: list[SparseBuffer]) -> bool:
    return isinstance(stmt, tirx.BufferStore) and any(stmt.buffer.same_as(b.view) for b in buffers)


__all__ = ["AssembledProgram", "Merge", "SparseResult", "assemble", "driving", "is_assembled"]
