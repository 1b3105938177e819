# SPDX-License-Identifier: Apache-2.0
"""Matrix units of a thread: tiles are configured where they are used, and emulated where the target says so.

before::

    for chunk in T.parallel(chunks):
        for i in range(begin[chunk], begin[chunk + 1]):
            st_tile_zero_0()
            ...

after::

    for chunk in T.parallel(chunks):
        configuration = T.alloc_buffer((64,), "uint8")
        configuration[0] = 1
        ...
        st_tile_config(address_of(configuration[0]))
        for i in range(begin[chunk], begin[chunk + 1]):
            st_tile_zero_0()
            ...
        st_tile_release()

The registers of tiles belong to a thread: they are configured inside parallel loops, and released before a thread goes
on to other work, so that the operating system saves no more state of it than of others. Emulated tiles are an array of
the thread, which each function takes as its first argument.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.intrin import tiles
from sparsetir.intrin.emulation import STATE_BYTES, define_tiles, emulate
from sparsetir.ir.rewriting import collect, seq
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import EMULATED
from sparsetir.lower.loops import PARALLEL, with_, with_body

IMPORT = "pragma_import_llvm"


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ConfigureTiles")
def ConfigureTiles(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Configure tiles, define their functions, and replace units that the target emulates."""
    emulated = func.attrs is not None and EMULATED in func.attrs
    names = tiles.functions(func.body)
    if emulated:
        func = with_body(func, structural_mutate(func.body, [(tirx.AttrStmt, _emulated)]))
    if not names:
        return func
    body = _configured(func.body, emulated=emulated)
    names = tiles.functions(body)
    text = define_tiles(names) if emulated else tiles.define(names)
    return with_body(func, tirx.AttrStmt(const(0), IMPORT, ir.StringImm(text), body))


def _emulated(node: tirx.AttrStmt, mutator: Any) -> tirx.Stmt:
    changed = mutator.default_mutate(node)
    if changed.attr_key != IMPORT:
        return changed
    return tirx.AttrStmt(changed.node, IMPORT, ir.StringImm(emulate(str(changed.value.value))), changed.body)


def _configured(stmt: tirx.Stmt, *, emulated: bool) -> tirx.Stmt:
    """Configure tiles in the largest parts of a statement that use them and have no parallel loop."""
    if not tiles.functions(stmt):
        return stmt
    if isinstance(stmt, tirx.For) and stmt.kind == PARALLEL:
        return with_(stmt, body=_around(stmt.body, emulated=emulated))
    loops = [lp for lp in collect(stmt, tirx.For) if lp.kind == PARALLEL and tiles.functions(lp.body)]
    if not loops:
        return _around(stmt, emulated=emulated)
    if isinstance(stmt, tirx.SeqStmt):
        return seq(*(_configured(part, emulated=emulated) for part in stmt.seq))
    if isinstance(stmt, tirx.For):
        return with_(stmt, body=_configured(stmt.body, emulated=emulated))
    if isinstance(stmt, tirx.IfThenElse):
        branches = (stmt.then_case, stmt.else_case)
        return tirx.IfThenElse(stmt.condition, *(b and _configured(b, emulated=emulated) for b in branches))
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, _configured(stmt.body, emulated=emulated))
    return _around(stmt, emulated=emulated)


def _around(stmt: tirx.Stmt, *, emulated: bool) -> tirx.Stmt:
    """Configure tiles before a statement of one thread, and release them after it."""
    where = tirx.decl_buffer([tiles.CONFIGURATION_BYTES], "uint8", "configuration", scope="local", layout=None)
    values = enumerate(tiles.configuration())
    filled = [tirx.BufferStore(where, const(value, "uint8"), [const(n)]) for n, value in values]
    begin, end = tiles.call("config", _first(where)), tiles.call("release")
    body = seq(begin, stmt, end)
    if not emulated:
        return seq(tirx.AllocBuffer(where), *filled, body)
    state = tirx.decl_buffer([STATE_BYTES], "uint8", "tile_state", scope="local", layout=None)

    def on_call(call: ir.Call, mutator: Any) -> Any:
        changed = mutator.default_mutate(call)
        name = tiles.called(changed)
        if not name:
            return changed
        return tirx.call_extern("void", tiles.PREFIX + name, _first(state), *changed.args[1:])

    body = structural_mutate(body, [(ir.Call, on_call)])
    # TVM makes arrays as short as the elements that are seen to be used.
    last = tirx.BufferStore(state, const(0, "uint8"), [const(STATE_BYTES - 1)])
    return seq(tirx.AllocBuffer(where), tirx.AllocBuffer(state), *filled, last, body)


def _first(buffer: Any) -> ir.Expr:
    return tirx.address_of(tirx.BufferLoad(buffer, [const(0)]))


__all__ = ["ConfigureTiles"]
