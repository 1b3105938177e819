# SPDX-License-Identifier: Apache-2.0
"""Copy to a cache only where the copy is read: elsewhere there may be nothing to copy.

before::

    for j_0, j_1 in T.grid((indptr[vi + 1] - indptr[vi] + 3) // 4, 4):
        b_local[0] = b[indices[indptr[vi] + j_0 * 4 + j_1]]             # past the end of the row
        if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
            ...  # reads b_local[0]

after::

    for j_0, j_1 in T.grid((indptr[vi + 1] - indptr[vi] + 3) // 4, 4):
        if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
            b_local[0] = b[indices[indptr[vi] + j_0 * 4 + j_1]]
        if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
            ...

The stock primitives move a copy without the conditions of its readers: the end of a split row, or a padded slot.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.lower.balance_loops import INDPTR
from sparsetir.lower.rewriting import collect, mentions, same
from sparsetir.lower.sites import Site, caches, common, sites


def _always_in_range(copy: Site, lanes: list[Var]) -> bool:
    """Whether the elements that the copy's own loops walk over exist whatever the data."""
    analyzer = sym.Analyzer()
    for realize in copy.blocks:
        for iv in realize.block.iter_vars:
            analyzer.bind(iv.var, iv.dom)
    realize = copy.blocks[-1]
    pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    lanes = [*lanes, *(iv.var for iv, value in pairs if mentions(value, lanes))]
    needed = [x for e in (copy.value, *realize.iter_values) for x in collect(e, ir.TensorLoad)]
    subscripts = [p for x in needed for p in zip(x.indices, x.source.ty.shape, strict=True) if mentions(p[0], lanes)]
    return all(analyzer.can_prove(i >= 0) and analyzer.can_prove(i < extent) for i, extent in subscripts)


def _conditions(copy: Site, reader: Site) -> list[ir.Expr]:
    """What holds at the reader and not yet at the copy, in the variables visible to both."""
    shared = common(copy.path, reader.path)
    depth = sum(isinstance(n, s_tir.SBlockRealize) for n in copy.path[:shared])
    known = [copy.outwards(g.condition, g.depth, depth) for g in copy.guards]
    found = [reader.outwards(g.condition, g.depth, depth) for g in reader.guards]
    return [c for c in found if not any(same(c, other) for other in known)]


def _visible(condition: ir.Expr, copy: Site, reader: Site) -> bool:
    """Whether a condition of the reader has a value where the copy is."""
    ahead = reader.path[common(copy.path, reader.path) :]
    hidden = [n.loop_var for n in ahead if isinstance(n, tirx.For)]
    hidden += [iv.var for n in ahead if isinstance(n, s_tir.SBlockRealize) for iv in n.block.iter_vars]
    return not mentions(condition, hidden)


def guards_of(copy: Site, readers: list[Site]) -> list[ir.Expr]:
    """The conditions all readers have in common; raises where a copy needs one that it cannot have."""
    first, *others = [(_conditions(copy, reader), reader) for reader in readers]
    shared = [c for c in first[0] if all(any(same(c, d) for d in found) for found, _ in others)]
    visible = [c for c in shared if _visible(c, copy, first[1])]
    missing = [c for found, _ in (first, *others) for c in found if not any(same(c, v) for v in visible)]
    lanes = [n.loop_var for n in copy.path[common(copy.path, first[1].path) :] if isinstance(n, tirx.For)]
    if missing and not _always_in_range(copy, lanes):
        message = f"block {copy.block} copies elements that may not exist: they are read only where {missing[-1]}"
        raise ScheduleError(f"{message}; place the copy at a loop inside, or do not cache {_original(copy).name}")
    return visible


def _original(copy: Site) -> Var:
    return copy.value.source  # type: ignore[union-attr]


def _copies(found: list[Site], cache: Var) -> list[Site]:
    return [s for s in found if s.buffer.same_as(cache) and isinstance(s.value, ir.TensorLoad) and s.blocks]


def guard_copies(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the copies of a function under the conditions of their readers."""
    wanted: dict[s_tir.SBlockRealize, list[ir.Expr]] = {}
    for cache in caches(func):
        found = sites(func)
        readers = [s for s in found if s.buffer.same_as(cache) and not s.is_store]
        for copy in _copies(found, cache) if readers else []:
            wanted[copy.blocks[-1]] = guards_of(copy, readers)

    def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
        out = mutator.default_mutate(node)
        for condition in reversed(wanted.get(node, [])):
            out = tirx.IfThenElse(condition, out, None)
        return out

    if not any(wanted.values()):
        return func
    body = tvm_ffi.structural_mutate(func.body, [(s_tir.SBlockRealize, on_realize)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardCopies")
def GuardCopies(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """The pass around `guard_copies`."""
    return guard_copies(func) if func.attrs is not None and INDPTR in func.attrs else func
