# SPDX-License-Identifier: Apache-2.0
"""Compile a model for training: validate the model, its parameters and its optimizer, and build the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax
from tvm.relax.frontend.nn import Parameter

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, own_errors
from sparsetir.relax.lowered import known
from sparsetir.relax.model import Signature, bind, build, cpu_target
from sparsetir.relax.torch_import.models import from_module, is_module
from sparsetir.relax.training.layers import averages
from sparsetir.relax.training.rules import loss_of, optimizer_of
from sparsetir.relax.training.trainer import PREDICT, TRAIN, Plan, TrainStep

TRAINED = ("float32", "float64")


def train_step(
    model: Any,
    loss: Any = "cross_entropy",
    optimizer: Any = "adam",
    *,
    params: Mapping[str, Any] | None = None,
    frozen: Sequence[str] = (),
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    static: Collection[str] = (),
    lr: float | None = None,
    seed: int = 0,
    target: Any = None,
    database: str | Path | None = None,
    **options: Any,
) -> TrainStep:
    """Compile a model with its loss, its gradients and its optimizer: a training step is one call.

    Parameters
    ----------
    model : IRModule or torch.nn.Module
        A module with a function ``main``, or with one Relax function, of known sizes that returns one tensor. Its
        sparse structures are constants, as from `csr_constants`, or are among `params`. A torch module is traced in its
        current mode, train or eval, and is not modified.
    loss : {"cross_entropy", "binary_cross_entropy", "mse", "l1"} or callable
        Mean over all elements. ``"cross_entropy"`` takes a class for each row of scores, and leaves out rows with
        -100; ``"binary_cross_entropy"`` takes scores before the sigmoid. A callable returns a scalar expression of
        the predictions and a target of the same shape.
    optimizer : {"sgd", "momentum", "adam", "adamw"} or tvm.relax.training.optimizer.Optimizer
        Update rule, with torch's semantics.
    params : mapping of str to array
        Values of parameters of the function. Floating-point arrays are trained; others, such as the index arrays of a
        sparse weight, become constants. Parameters without a value are inputs of each call.
    frozen : sequence of str
        Floating-point parameters that become constants, too.
    example_args, example_kwargs, static
        Only for a torch module, which brings its own parameters: arguments to trace it with, and the names of arguments
        that always equal the examples, such as an edge index, as for `from_torch`.
    lr : float, optional
        Initial learning rate; by default 1e-3 for Adam and 0.01 for SGD.
    seed : int
        Seed of dropout; each step drops other elements.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`, used for constant matrices.
    **options
        Options of the optimizer: ``momentum``, ``nesterov``, ``betas``, ``eps``, ``weight_decay``.

    Returns
    -------
    TrainStep

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The model has unknown sizes or several results, or a parameter, loss or optimizer does not fit.
    LoweringError
        An operator of the model has no gradient; the message names it.

    Examples
    --------
    >>> import numpy as np, sparsetir.relax
    >>> from tvm import relax
    >>> builder = relax.BlockBuilder()
    >>> x, w = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", [8, 3]), ("w", [3, 1])))
    >>> with builder.function("main", [x, w]):
    ...     _ = builder.emit_func_output(builder.emit(relax.op.matmul(x, w)))
    >>> params = {"w": np.zeros((3, 1), "float32")}
    >>> step = sparsetir.relax.train_step(builder.get(), "mse", "sgd", params=params, lr=0.5)
    >>> rows = np.eye(8, 3, dtype="float32")
    >>> first, *_, last = (step(rows, rows[:, :1]) for _ in range(50))
    >>> first > last
    True
    """
    chosen, rule, measure = cpu_target(target), optimizer_of(optimizer, {**options, "lr": lr}), loss_of(loss)
    if is_module(model):
        if params is not None:
            raise ArgumentTypeError("a module of torch has parameters of its own: pass no params")
        model, params, fixed = from_module(model, example_args, example_kwargs, static)
        kept = averages(model["main"])
        frozen = [*frozen, *(name for name in fixed if name not in kept)]
    elif example_args is not None or example_kwargs is not None or static:
        raise ArgumentTypeError(
            "only a module of torch is traced: pass no examples and nothing static with an IRModule"
        )
    name, func = _function(model)
    values = _checked(func, params or {}, frozen)
    kept = [name for name in averages(func) if name not in frozen]
    trained = _trained(func, values, [*frozen, *kept])
    missing = next((name for name in kept if name not in values), None)
    if missing is not None:
        raise ArgumentError(f"params has no value for {missing}, in which batch_norm keeps an average: add it")
    others = {var: other for var, other in model.functions.items() if var.name_hint != name}
    mod = ir.IRModule({**others, ir.GlobalVar(PREDICT): func.with_attr("global_symbol", PREDICT)})
    mod = _plain(bind(mod, {name: value for name, value in values.items() if name not in (*trained, *kept)}))
    plan = Plan(mod, tuple(trained), rule, measure, seed, tuple(kept))
    taken = next((str(p.name) for p in mod[PREDICT].params if str(p.name) in plan.reserved), None)
    if taken is not None:
        raise ArgumentError(f"the model has a parameter {taken}, which is a name of the step's own: rename it")
    with own_errors(), chosen:
        training = plan.module()
    executable = build(training, chosen, database=database)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    signatures = {part: Signature.of(training, part) for part in (PREDICT, TRAIN)}
    classes = int(plan.predictions.shape.values[-1]) if measure.is_classes else None
    slots = {name: np.zeros_like(trained[like]) for name, like in plan.slots.items()}
    state = {**slots, **{name: values[name] for name in kept}}
    return TrainStep(machine, signatures, trained, state, rule, classes, mod=training, executable=executable)


def _function(model: Any) -> tuple[str, relax.Function]:
    """Return the name of a model's function, and the function."""
    if not isinstance(model, ir.IRModule):
        raise ArgumentTypeError(f"expected an IRModule with a Relax function main, found {type(model).__name__}")
    found = {str(var.name_hint): f for var, f in model.functions.items() if isinstance(f, relax.Function)}
    if "main" not in found and len(found) != 1:
        listed = ", ".join(found) or "none"
        raise ArgumentError(f"expected a module with a function main, or with one Relax function; found {listed}")
    name = "main" if "main" in found else next(iter(found))
    return name, found[name]


def _checked(func: relax.Function, params: Mapping[str, Any], frozen: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the values of the parameters as arrays, after checking that they fit the function."""
    types = {str(param.name): param.ty for param in func.params}
    for name in (*params, *frozen):
        if name not in types:
            raise ArgumentError(f"the model has no parameter {name}: it has {', '.join(types)}")
    missing = next((name for name in frozen if name not in params), None)
    if missing is not None:
        raise ArgumentError(f"frozen has {missing}, which has no value: add it to params")
    values = {name: _array(name, value) for name, value in params.items()}
    for name, value in values.items():
        _check_fits(name, value, types[name])
    return values


def _trained(func: relax.Function, values: Mapping[str, np.ndarray], frozen: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the trainable values, in the order of the function's parameters."""
    names = [str(param.name) for param in func.params]
    found = {n: values[n] for n in names if n in values and n not in frozen and values[n].dtype.kind == "f"}
    if not found:
        raise ArgumentError("there is nothing to train: params has no array of floats that is not frozen")
    dtypes = sorted({str(value.dtype) for value in found.values()})
    if len(dtypes) > 1 or dtypes[0] not in TRAINED:
        raise ArgumentTypeError(f"parameters are trained in {' or in '.join(TRAINED)}; found {' and '.join(dtypes)}")
    return found


def _array(name: str, value: Any) -> np.ndarray:
    held = value.data if isinstance(value, Parameter) else value
    if held is None:
        raise ArgumentError(f"params has no value for {name}: give the layer a weight first")
    detached = held.detach() if hasattr(held, "detach") else held
    return np.array(detached.numpy() if hasattr(detached, "numpy") else detached)


def _check_fits(name: str, value: np.ndarray, found: Any) -> None:
    shape = found.shape.values if isinstance(found.shape, relax.ShapeExpr) else []
    if len(shape) != value.ndim or not all(int(a) == b for a, b in zip(shape, value.shape, strict=True) if known([a])):
        raise ArgumentError(f"params has {name} of shape {value.shape}; the model takes {found}")
    if str(found.dtype.dtype) != str(value.dtype):
        raise ArgumentTypeError(f"params has {name} of {value.dtype}; the model takes {found}")


def _plain(mod: ir.IRModule) -> ir.IRModule:
    """Return the module with its function as one dataflow block, where no tuple is built only to be unpacked."""
    func = mod[PREDICT] = _with_one_result(mod[PREDICT])
    result = func.ret_ty
    if not isinstance(result, relax.TensorType):
        raise ArgumentError(f"expected a model that returns one tensor; found {result}: return the predictions only")
    for part in (*(param.ty for param in func.params), result):
        if (
            not isinstance(part, relax.TensorType)
            or not isinstance(part.shape, relax.ShapeExpr)
            or not known(part.shape.values)
        ):
            fault = f"a step is compiled for known sizes; found {part}"
            raise ArgumentError(f"{fault}: make the model with numbers for them, one step for each batch size")
    mod = relax.transform.ConvertToDataflow(min_size=1)(mod)
    mod = relax.transform.CanonicalizeBindings()(relax.transform.Normalize()(mod))
    if len(mod[PREDICT].body.blocks) != 1 or not isinstance(mod[PREDICT].body.blocks[0], relax.DataflowBlock):
        raise LoweringError(
            "the model has branches or effects, which have no gradients: write it as one dataflow block"
        )
    return mod


def _with_one_result(func: relax.Function) -> relax.Function:
    """Unwrap the result of a function that returns a tuple of one tensor, as models from torch do."""
    result = func.ret_ty
    if not isinstance(result, ir.TupleType) or len(result.fields) != 1:
        return func
    out = relax.Var("out", result.fields[0])
    last = relax.BindingBlock([relax.VarBinding(out, relax.TupleGetItem(func.body.body, 0))])
    return relax.Function(func.params, relax.SeqExpr([*func.body.blocks, last], out), out.ty, func.is_pure, func.attrs)


__all__ = ["train_step"]
