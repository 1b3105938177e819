# SPDX-License-Identifier: Apache-2.0
"""A program with computed patterns, rewritten so that the ordinary stages lower it.

Each assembled axis becomes a dense one, and each result over it a dense stand-in that is never allocated. Where an
assembled axis stands in the list of an iteration, the axes of the body's operands take its place. An initialisation
is taken out: it says what an element is before the first statement sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.assemble.coordinates import driving
from sparsetir.errors import LoweringError
from sparsetir.ir import Axis, Program, SparseBuffer, SpIter, cast, decode
from sparsetir.lower.host.promote_halves import HALVES
from sparsetir.lower.rewriting import collect, mentions, seq

LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Result:
    """A result over assembled axes.

    Parameters
    ----------
    name : str
        As a user calls it.
    storage : str
        Its parameter.
    dtype : str
    initial : Expr
        What an element is before the first statement sets it.
    lengths : tuple of Expr
        Of its assembled axes, outermost first.
    """

    name: str
    storage: str
    dtype: str
    initial: ir.Expr
    lengths: tuple[ir.Expr, ...]

    @property
    def held_dtype(self) -> str:
        """In which it is added up."""
        return "float32" if self.dtype in HALVES else self.dtype


@dataclass(frozen=True, eq=False)
class Assembly:
    """A program whose assembled axes are dense stand-ins.

    Parameters
    ----------
    source : Program
        As it was written.
    func : PrimFunc
    axes : tuple of Axis
        The assembled ones, outermost first.
    rows : tuple of Axis
        Those above them.
    results : tuple of Result
    """

    source: Program
    func: tirx.PrimFunc
    axes: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        """Of the function."""
        return str(self.func.attrs["global_symbol"])

    @property
    def has_rows(self) -> bool:
        """Whether the assembled axes lie below others."""
        return bool(self.rows)

    @property
    def rows_name(self) -> str:
        """The axis whose positions are the rows."""
        return self.rows[-1].name if self.rows else "the root"

    @property
    def key_dtype(self) -> str:
        """Of a coordinate below a row: of several axes one number."""
        return self.axes[0].idtype if len(self.axes) == 1 else "int64"

    def result_of(self, buffer: Var) -> Result | None:
        """The result whose stand-in an array is."""
        return next((r for r in self.results if r.storage == str(buffer.name)), None)


def is_assembled(program: Program) -> bool:
    """Whether a program computes patterns."""
    return any(axis.is_assembled for axis in program.axes.values())


def assemble(func: tirx.PrimFunc) -> Assembly:
    """Rewrite a program.

    Raises
    ------
    LoweringError
        It is of a form that is not supported; the message says which.
    """
    program = decode(func)
    axes = _chain(program)
    rows = axes[0].ancestors
    held = [b for b in program.buffers.values() if any(a.is_assembled for a in b.axes)]
    results = tuple(_result(b, axes, rows, program) for b in held)
    return Assembly(program, _rewritten(program, axes, held), axes, rows, results)


def _chain(program: Program) -> tuple[Axis, ...]:
    """The assembled axes, which must be one below the other."""
    found = [a for a in program.axes.values() if a.is_assembled]
    last = max(found, key=lambda a: len(a.ancestors))
    chain = tuple(a for a in (*last.ancestors, last) if a.is_assembled)
    if len(chain) != len(found):
        names = ", ".join(a.name for a in found)
        raise LoweringError(f"a program computes one pattern, found {names}: write a program for each")
    return chain


def _result(buffer: SparseBuffer, axes: tuple[Axis, ...], rows: tuple[Axis, ...], program: Program) -> Result:
    if buffer.axes != (*rows, *axes):
        names = ", ".join(a.name for a in (*rows, *axes))
        raise LoweringError(f"{buffer.name} must lie over the axes {names}, in that order")
    others = [a for a in rows[1:] if a.kind != "dense_fixed"]
    if others:
        raise LoweringError(f"the rows of {buffer.name} are one dense axis; found {others[0]!r}")
    initial = cast(_initial(buffer, program), buffer.dtype)
    return Result(buffer.name, str(buffer.storage.name), buffer.dtype, initial, tuple(a.length for a in axes))


def _initial(buffer: SparseBuffer, program: Program) -> ir.Expr:
    """What ``T.init`` of some iteration sets the elements of a buffer to; its default value without one."""
    found: list[ir.Expr] = []
    for iteration in program.iterations:
        if iteration.block.init is None:
            continue
        stores = [s for s in collect(iteration.block.init, tirx.BufferStore) if s.buffer.same_as(buffer.view)]
        for store in stores:
            if mentions(store.value, list(iteration.vars)) or collect(store.value, ir.TensorLoad):
                message = f"{buffer.name} begins with {store.value}"
                raise LoweringError(f"{message}: elements of a computed pattern begin with one number")
            found.append(store.value)
    return found[0] if found else buffer.default


def _rewritten(program: Program, axes: tuple[Axis, ...], held: list[SparseBuffer]) -> tirx.PrimFunc:
    """The program with dense stand-ins."""
    dense = {a.var: op.call("dense_fixed", [a.length], a.idtype) for a in axes}
    stand_ins = {b.storage: _stand_in(b, axes) for b in held}
    iterations = {it.block: it for it in program.iterations}

    def on_bind(node: tirx.Bind, mutator: Any) -> tirx.Stmt:
        return tirx.Bind(node.var, dense[node.var]) if node.var in dense else mutator.default_mutate(node)

    def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
        found = next((it for it in program.iterations if it.node.same_as(node)), None)
        inner = mutator.default_mutate(node)
        return inner if found is None else _iteration(found, inner, program, axes, held)

    del iterations
    body = tvm_ffi.structural_mutate(program.func.body, [(tirx.Bind, on_bind), (s_tir.SBlockRealize, on_realize)])
    body = _with_buffers(body, stand_ins)
    params = [stand_ins.get(p, p) for p in program.func.params]
    return tirx.PrimFunc(params, body, program.func.ret_type, program.func.attrs)


def _stand_in(buffer: SparseBuffer, axes: tuple[Axis, ...]) -> Var:
    """A dense array in the place of a result's values."""
    above = [tree[-1].count for tree in _without(buffer, axes).trees] if len(buffer.axes) > len(axes) else []
    shape = [*above, *(a.length for a in axes)]
    old = buffer.storage
    return tirx.decl_buffer(shape, buffer.dtype, name=str(old.name), layout=None)


def _without(buffer: SparseBuffer, axes: tuple[Axis, ...]) -> SparseBuffer:
    kept = tuple(a for a in buffer.axes if a not in axes)
    return SparseBuffer(buffer.view, buffer.storage, kept, buffer.default)


def _with_buffers(body: tirx.Stmt, mapping: Mapping[Var, Var]) -> tirx.Stmt:
    return tvm_ffi.structural_map(body, with_def_region_kind=(Var, lambda v, _kind: mapping.get(v, v)))


def _iteration(
    iteration: SpIter, node: s_tir.SBlockRealize, program: Program, axes: tuple[Axis, ...], held: list[SparseBuffer]
) -> tirx.Stmt:
    """An iteration over the axes of its operands, without the initialisation of results."""
    values = list(node.iter_values)
    for n, value in enumerate(values):
        axis = program.axes.get(value.args[0]) if isinstance(value.args[0], Var) else None
        if axis is not None and axis in axes:
            entry = driving(iteration, iteration.block.iter_vars[n].var, program, held)
            values[n] = op.call("coord", [entry, 0], axis.idtype)
    block = node.block
    init = block.init
    if init is not None:
        kept = [s for s in _statements(init) if not _sets(s, held)]
        init = seq(*kept) if kept else None
    made = s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
    return s_tir.SBlockRealize(values, node.predicate, made)


def _statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    return list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]


def _sets(stmt: tirx.Stmt, held: list[SparseBuffer]) -> bool:
    return isinstance(stmt, tirx.BufferStore) and any(stmt.buffer.same_as(b.view) for b in held)


__all__ = ["Assembly", "Result", "assemble", "is_assembled"]
