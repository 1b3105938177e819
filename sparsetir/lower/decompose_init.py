# SPDX-License-Identifier: Apache-2.0
"""Move initialisations out of reduction blocks, above their outermost reduction loop.

before::

    for j, k in T.grid(indptr[vi + 1] - indptr[vi], feat):
        with T.sblock("spmm"):
            vj, vk = T.axis.remap("RS", [j, k])
            with T.init():
                c[vi, vk] = 0
            c[vi, vk] = c[vi, vk] + ...

after::

    for k in range(feat):
        with T.sblock("spmm_init"):
            vk = T.axis.spatial(feat, k)
            c[vi, vk] = 0
    for j, k in T.grid(indptr[vi + 1] - indptr[vi], feat):
        with T.sblock("spmm_update"):
            ...

TVM's own lowering runs the initialisation in the first reduction step, which an empty row does not have.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError

SPATIAL, REDUCE = 0, 2


def _with_init(func: tirx.PrimFunc) -> list[s_tir.SBlockRealize]:
    found: list[s_tir.SBlockRealize] = []

    def on_realize(node: s_tir.SBlockRealize) -> None:
        if node.block.init is not None:
            found.append(node)

    tvm_ffi.structural_walk(func, (s_tir.SBlockRealize, on_realize))
    return found


def _loop_vars(realize: s_tir.SBlockRealize, kind: int) -> list[Var]:
    """Loop variables bound to the block's variables of a kind."""
    found: list[Var] = []
    for iter_var, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        if int(iter_var.iter_type) == kind:
            tvm_ffi.structural_walk(value, (Var, found.append))
    return found


def _refuse_mixed(realize: s_tir.SBlockRealize, reduced: list[Var]) -> None:
    """A loop fused from a reduction and a spatial one does not run for an empty row: its output would stay unset."""
    mixed = [v for v in _loop_vars(realize, SPATIAL) if any(v.same_as(r) for r in reduced)]
    if mixed:
        where = f"loop {mixed[0].name} of block {realize.block.name_hint}"
        message = f"{where} was fused from a reduction and a spatial loop"
        raise ScheduleError(f"{message}: an empty row would not be initialised; fuse loops of one kind")


def decompose(sch: s_tir.Schedule, func_name: str) -> None:
    """Decompose every reduction of one function of a schedule's module."""
    for realize in _with_init(sch.mod[func_name]):
        block = sch.get_sblock(realize.block.name_hint, func_name=func_name)
        loops = sch.get_loops(block)
        reduced = _loop_vars(realize, REDUCE)
        _refuse_mixed(realize, reduced)
        outer = [lp for lp in loops if any(sch.get(lp).loop_var.same_as(v) for v in reduced)]
        if outer:
            sch.decompose_reduction(block, outer[0])


@tvm.transform.module_pass(opt_level=0, name="sparsetir.DecomposeInit")
class DecomposeInit:
    """The pass around `decompose`."""

    def transform_module(self, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        """Decompose every function that has something to decompose."""
        names = [gv.name_hint for gv, f in mod.functions.items() if isinstance(f, tirx.PrimFunc) and _with_init(f)]
        if not names:
            return mod
        sch = s_tir.Schedule(mod)
        for name in names:
            decompose(sch, name)
        return sch.mod
