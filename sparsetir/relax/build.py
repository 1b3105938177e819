# SPDX-License-Identifier: Apache-2.0
"""Build of Relax models with sparse operators."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, tirx
from tvm.relax.frontend.nn import Parameter

from sparsetir.codegen.target import make_target, makes_tangents, may_reassociate, native_target
from sparsetir.errors import ArgumentError, ArgumentTypeError, own_errors
from sparsetir.formats.fingerprint import hash_indices
from sparsetir.relax.constants import task_of
from sparsetir.relax.dense import ScheduleDense, is_ours
from sparsetir.relax.legalize import LowerSparse
from sparsetir.relax.operators import has_zero, reshape
from sparsetir.relax.programs import OPAQUE
from sparsetir.tuning import TuneTask, tune_many
from sparsetir.utils.arguments import renamed_parameters
from sparsetir.utils.threads import get_num_threads


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.MarkOpaque")
def MarkOpaque(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Mark the programs of the dialect as opaque, so that Relax fuses nothing with them."""
    for var, func in list(mod.functions.items()):
        if isinstance(func, tirx.PrimFunc) and is_ours(func):
            mod.update_func(var, func.with_attr("op_pattern", OPAQUE))
    return mod


@relax.expr_functor.mutator
class _ZeroHider(relax.PyExprMutator):
    """Mutator that gives scalar zeros of products and quotients a dimension, so that they are not folded."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if call.op not in (ir.Op.get("relax.multiply"), ir.Op.get("relax.divide")):
            return call
        args = [_with_dimension(arg) if _is_scalar_zero(arg) else arg for arg in call.args]
        if all(a.same_as(b) for a, b in zip(args, call.args, strict=True)):
            return call
        result = self.builder_.emit(relax.Call(call.op, args, call.attrs))
        return result if call.ty.ndim else reshape(result, ())


def _is_scalar_zero(value: relax.Expr) -> bool:
    if not isinstance(value, ir.GenericConst) or value.ty.ndim != 0:
        return False
    return str(value.ty.dtype).startswith(("float", "bfloat")) and not np.any(value.value.numpy())


def _with_dimension(zero: ir.GenericConst) -> ir.GenericConst:
    return relax.const(zero.value.numpy().reshape(1), str(zero.ty.dtype))


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.HideZeros")
def HideZeros(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Keep TVM from folding ``x * 0`` and ``0 / x`` to 0, which is wrong for infinities and NaN."""
    for var, func in list(mod.functions.items()):
        if isinstance(func, relax.Function):
            mod.update_func(var, _ZeroHider(mod).visit_expr(func))
    return mod


@relax.expr_functor.mutator
class _EmptyFolder(relax.PyExprMutator):
    """Mutator that replaces the calls of operators whose result is known to have no elements."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        shape = getattr(call.ty, "shape", None)
        is_legalized = isinstance(call.op, ir.Op) and call.op.has_attr("FLegalize")
        if not is_legalized or not isinstance(shape, relax.ShapeExpr) or not has_zero(shape.values):
            return call
        return relax.op.builtin.alloc_tensor(shape, str(call.ty.dtype.dtype), 0)


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.FoldEmpty")
def FoldEmpty(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Compute nothing for a result without elements.

    TVM makes copies into such results reshapes, whose sizes of zero it takes for "as in the argument".
    """
    for var, func in list(mod.functions.items()):
        if isinstance(func, relax.Function):
            mod.update_func(var, _EmptyFolder(mod).visit_expr(func))
    return mod


def lowering(
    target: Any, database: Path | None, *, checked: bool = True, assume_finite: bool = False
) -> list[tvm.transform.Pass]:
    """Return the passes that run before TVM's own, in order."""
    return [
        MarkOpaque,  # A user's programs are not to be fused with other operators.
        relax.transform.DecomposeOpsForInference(),
        # Lower the operators and dense products, with their epilogues.
        LowerSparse(target, database, checked=checked, assume_finite=assume_finite),
        relax.transform.RemoveRedundantReshape(),
        HideZeros,
        FoldEmpty,
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.RewriteDataflowReshape(),  # Must run while the loops are still recognized as copies.
        relax.transform.DeadCodeElimination(),
        ScheduleDense,
    ]


@renamed_parameters(finite="assume_finite")
def build(
    mod: ir.IRModule,
    target: Any = None,
    *,
    params: Mapping[str, Any] | None = None,
    database: str | Path | None = None,
    tune_seconds: float | None = None,
    checked: bool = True,
    assume_finite: bool = False,
) -> relax.VMExecutable:
    """Compile a model: sparse operators by this package's kernels, everything else by TVM.

    Parameters
    ----------
    mod : IRModule
        A module with a function ``main``.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.
    params : mapping of str to array, optional
        Values of parameters, which become constants; a parameter of ``tvm.relax.frontend.nn`` provides its own value.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`: the best record of a constant matrix determines its format and schedule.
    tune_seconds : float, optional
        Run `sparsetir.tune_many` for so long on the products with constant matrices first, and add to these records.
    checked : bool
        Whether a structure passed at run time is validated in each call, at the cost of a pass over its index
        arrays: an invalid one raises an error, where it would otherwise cause accesses out of bounds. Constants are
        validated by `build`.
    assume_finite : bool
        A promise that operands hold neither infinities nor NaN: constant matrices are then stored in formats with zeros
        between the entries, too, where they are faster.

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
    cpu = cpu_target(target)
    records = None if database is None else Path(database)
    with ExitStack() as stack, own_errors():
        if tune_seconds is not None:
            folder = stack.enter_context(TemporaryDirectory(prefix="sparsetir-"))
            records = Path(folder, "tuning.jsonl") if records is None else records
            if products := tasks(mod, cpu, params=params):
                tune_many(products, seconds=tune_seconds, database=records, target=target, assume_finite=assume_finite)
        module = lowered(mod, cpu, params, records, checked=checked, assume_finite=assume_finite)
        return relax.build(module, _free(cpu, module), tir_pipeline="sparsetir")


def tasks(mod: ir.IRModule, target: Any = None, *, params: Mapping[str, Any] | None = None) -> list[TuneTask]:
    """Return the products of a model with constant matrices, and the count of each, as tasks for `sparsetir.tune_many`.

    Pass the same database to that call and to `build`. Products whose dense operands have unknown sizes are left out.

    Parameters
    ----------
    mod, target, params
        As for `build`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir.relax
    >>> from tvm import relax
    >>> A = sp.csr_array(np.eye(4, dtype="float32"))
    >>> builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([4, 2], "float32"))
    >>> with builder.function("main", [x]):
    ...     out = builder.emit(sparsetir.relax.spmm(*sparsetir.relax.csr_constants(A), x))
    ...     _ = builder.emit_func_output(builder.emit(sparsetir.relax.spmm(*sparsetir.relax.csr_constants(A), out)))
    >>> [(task.inputs["B"].shape, task.expected_calls) for task in sparsetir.relax.tasks(builder.get())]
    [((4, 2), 2)]
    """
    cpu, products = cpu_target(target), list[Any]()
    steps = [MarkOpaque, relax.transform.DecomposeOpsForInference(), LowerSparse(cpu, asked=products)]
    with own_errors(), cpu:
        tvm.transform.Sequential(steps)(bind(mod, params or {}))
    counts: dict[Any, tuple[Any, int]] = {}
    for name, matrix, shapes in products:
        # Tuning depends on the positions of the values: weights with the same mask are one task.
        head = f"{name} {matrix.shape} {matrix.data.dtype} {matrix.indices.dtype} {sorted(shapes.items())}"
        key = hash_indices(head, [matrix.indptr, matrix.indices])
        counts[key] = ((name, matrix, shapes), counts[key][1] + 1 if key in counts else 1)
    return [task_of(name, matrix, shapes, calls) for (name, matrix, shapes), calls in counts.values()]


def _free(target: Any, mod: ir.IRModule) -> Any:
    """Return the target with reassociation of sums permitted, if every program of the dialect permits it."""
    loops = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    programs = [func for func in loops if is_ours(func)]
    free = [make_target(target, func) for func in programs]
    may = all(may_reassociate(func) for func in programs) and not any(makes_tangents(func) for func in loops)
    return free[0] if free and may else target


def cpu_target(target: Any) -> tvm.target.Target:
    """Return the target that models are compiled for, this machine by default."""
    cpu = native_target() if target is None else tvm.target.Target(target)
    if str(cpu.kind.name) != "llvm":
        raise ArgumentError(f"models are compiled for CPUs: expected an llvm target, found {cpu.kind.name!r}")
    return cpu


def lowered(
    mod: ir.IRModule,
    target: Any,
    params: Mapping[str, Any] | None = None,
    database: Path | None = None,
    *,
    checked: bool = True,
    assume_finite: bool = False,
) -> ir.IRModule:
    """Return the module as `build` compiles it: calls of functions only."""
    mod = bind(mod, params or {})
    with own_errors(), target:
        return tvm.transform.Sequential(lowering(target, database, checked=checked, assume_finite=assume_finite))(mod)


def bind(mod: ir.IRModule, params: Mapping[str, Any]) -> ir.IRModule:
    """Bind values to the parameters of a module's functions."""
    if not isinstance(mod, ir.IRModule):
        raise ArgumentTypeError(f"expected an IRModule with a Relax function main, found {type(mod).__name__}")
    functions = {str(v.name_hint): f for v, f in mod.functions.items() if isinstance(f, relax.Function)}
    names = {function: [str(p.name) for p in func.params] for function, func in functions.items()}
    unknown = next((name for name in params if not any(name in params_of for params_of in names.values())), None)
    if unknown is not None:
        available = "; ".join(
            f"{function} has {', '.join(params_of) or 'none'}" for function, params_of in names.items()
        )
        raise ArgumentError(f"there is no parameter {unknown}: {available}")
    tensors = {name: _tensor(value) for name, value in params.items()}
    for function, params_of in names.items():
        values = {name: tensors[name] for name in params_of if tensors.get(name) is not None}
        if values:
            mod = relax.transform.BindParams(function, values)(mod)
    return mod


def _tensor(value: Any) -> tvm.runtime.Tensor | None:
    """Convert a value to a tensor; return None for a parameter of ``tvm.relax.frontend.nn`` without a value."""
    if isinstance(value, Parameter):
        return value.data
    return value if isinstance(value, tvm.runtime.Tensor) else tvm.runtime.tensor(np.asarray(value))


__all__ = ["bind", "build", "cpu_target", "lowered", "lowering", "tasks"]
