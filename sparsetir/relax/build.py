# SPDX-License-Identifier: Apache-2.0
"""Build a Relax model that has sparse operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, tirx

from sparsetir.build import make_target, may_reassociate, native_target
from sparsetir.errors import ArgumentError, ArgumentTypeError, own_errors
from sparsetir.relax.dense import ScheduleDense, is_ours
from sparsetir.relax.legalize import LowerSparse
from sparsetir.relax.programs import OPAQUE
from sparsetir.threads import get_num_threads


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.MarkOpaque")
def MarkOpaque(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Tell Relax that nothing is to be fused with the programs of the dialect that the module brings along."""
    for var, func in list(mod.functions.items()):
        if isinstance(func, tirx.PrimFunc) and is_ours(func):
            mod.update_func(var, func.with_attr("op_pattern", OPAQUE))
    return mod


def lowering(target: Any, database: Path | None, *, checked: bool = True) -> list[tvm.transform.Pass]:
    """The passes before TVM's own, in their order."""
    return [
        MarkOpaque,  # a user's programs are not to be fused with anything
        relax.transform.DecomposeOpsForInference(),
        LowerSparse(target, database, checked=checked),  # our operators and dense products, what follows them inside
        relax.transform.RemoveRedundantReshape(),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.RewriteDataflowReshape(),  # before their loops are no longer known as copies
        relax.transform.DeadCodeElimination(),
        ScheduleDense,
    ]


def build(
    mod: ir.IRModule,
    target: Any = None,
    *,
    params: Mapping[str, Any] | None = None,
    database: str | Path | None = None,
    checked: bool = True,
) -> relax.VMExecutable:
    """Compile a model: sparse operators by this package's kernels, everything else by TVM.

    Parameters
    ----------
    mod : IRModule
        With a function ``main``.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.
    params : mapping of str to array, optional
        Values of parameters of ``main``, which become constants.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`: a constant matrix is stored and computed with as the best of them says.

    checked : bool
        Whether a structure that comes at run time is looked over in each call, at the cost of a pass over its index
        arrays: a wrong one raises, where it would else be followed to anywhere in memory. Constants are checked here.

    Returns
    -------
    relax.VMExecutable
        For ``tvm.relax.VirtualMachine(executable, tvm.cpu())``; ``executable.export_library("model.so")`` saves it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An operator's arguments do not fit; the message names the operator and the argument.
    """
    get_num_threads()
    chosen = native_target() if target is None else tvm.target.Target(target)
    if str(chosen.kind.name) != "llvm":
        raise ArgumentError(f"models are compiled for CPUs: expected an llvm target, found {chosen.kind.name!r}")
    if not isinstance(mod, ir.IRModule):
        raise ArgumentTypeError(f"expected an IRModule with a Relax function main, found {type(mod).__name__}")
    records = None if database is None else Path(database)
    with own_errors():
        ready = lowered(mod, chosen, params, records, checked=checked)
        return relax.build(ready, _free(chosen, ready), tir_pipeline="sparsetir")


def _free(target: Any, mod: ir.IRModule) -> Any:
    """The target with leave to take sums in another order, if every program of the dialect allows it."""
    ours = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc) and is_ours(func)]
    free = [make_target(target, func) for func in ours]
    return free[0] if free and all(may_reassociate(func) for func in ours) else target


def lowered(
    mod: ir.IRModule,
    target: Any,
    params: Mapping[str, Any] | None = None,
    database: Path | None = None,
    *,
    checked: bool = True,
) -> ir.IRModule:
    """The module as `build` compiles it: calls of functions only."""
    if params:
        mod = relax.transform.BindParams("main", _tensors(mod, params))(mod)
    with own_errors(), target:
        return tvm.transform.Sequential(lowering(target, database, checked=checked))(mod)


def _tensors(mod: ir.IRModule, params: Mapping[str, Any]) -> dict[str, Any]:
    names = [str(p.name) for p in mod["main"].params]
    wrong = next((name for name in params if name not in names), None)
    if wrong is not None:
        raise ArgumentError(f"main has no parameter {wrong}; it has {', '.join(names)}")
    return {n: v if isinstance(v, tvm.runtime.Tensor) else tvm.runtime.tensor(np.asarray(v)) for n, v in params.items()}


__all__ = ["build", "lowered", "lowering"]
