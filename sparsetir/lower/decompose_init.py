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

REDUCE = 2


def _with_init(func: tirx.PrimFunc) -> list[s_tir.SBlockRealize]:
    found: list[s_tir.SBlockRealize] = []

    def on_realize(node: s_tir.SBlockRealize) -> None:
        if node.block.init is not None:
            found.append(node)

    tvm_ffi.structural_walk(func, (s_tir.SBlockRealize, on_realize))
    return found


def _reduction_vars(realize: s_tir.SBlockRealize) -> list[Var]:
    """Loop variables bound to the block's reduction variables."""
    found: list[Var] = []
    for iter_var, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        if int(iter_var.iter_type) == REDUCE:
            tvm_ffi.structural_walk(value, (Var, found.append))
    return found


def decompose(sch: s_tir.Schedule, func_name: str) -> None:
    """Decompose every reduction of one function of a schedule's module."""
    for realize in _with_init(sch.mod[func_name]):
        block = sch.get_sblock(realize.block.name_hint, func_name=func_name)
        loops = sch.get_loops(block)
        reduced = _reduction_vars(realize)
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
