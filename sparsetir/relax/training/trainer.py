# SPDX-License-Identifier: Apache-2.0
"""Compile a model for training: its step as one function, and the compiled step with parameters and optimizer state.

A training step as one function: forward pass, backward pass and update.

before::

    @R.function
    def predict(x, weight):
        ...
        return scores

after, beside it::

    @R.function
    def train(x, weight, target, lr, first_share, second_share, weight_first, weight_second):
        ...
        return loss, weight, weight_first, weight_second      # the new ones; averages of batch_norm after them
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax
from tvm.relax.frontend.nn import Parameter
from tvm.relax.training.utils import AppendLoss

from sparsetir.codegen.target import cpu_target
from sparsetir.errors import (
    ArgumentError,
    ArgumentTypeError,
    FileFormatError,
    LoweringError,
    MissingFileError,
    own_errors,
)
from sparsetir.interop.sources import array_of_numbers
from sparsetir.relax.epilogues import known
from sparsetir.relax.model import ModelSignature, bind, build, from_tvm, library_of, to_tvm
from sparsetir.relax.torch_import.models import first_names, from_module, is_module, static_names
from sparsetir.relax.training.layers import (
    Loss,
    Optimizer,
    averages,
    check_classes,
    loss_of,
    optimizer_of,
    with_batch_norm,
    with_dropout,
)
from sparsetir.utils.arguments import as_count, as_mapping, as_path, as_real, as_sequence, shown
from sparsetir.utils.files import check_folder_of, writing_file


class TrainStep:
    """A training step: ``step(x, y)`` computes the loss, updates the parameters, and returns the loss before that.

    It is made by `sparsetir.relax.train_step`. The inputs are the parameters of the model without a value, in the
    model's order, and the target, as torch tensors, numpy arrays or TVM tensors.

    Attributes
    ----------
    lr : float
        Learning rate; it may be set between steps.
    count : int
        Number of steps so far.
    mod : IRModule
        Functions ``train`` and ``predict`` before lowering.
    executable : relax.VMExecutable
        Both functions, compiled.
    """

    def __init__(
        self,
        machine: relax.VirtualMachine,
        signatures: Mapping[str, ModelSignature],
        params: Mapping[str, np.ndarray],
        state: Mapping[str, np.ndarray],
        rule: Optimizer,
        classes: int | None,
        *,
        mod: ir.IRModule,
        executable: relax.VMExecutable,
    ) -> None:
        self.machine, self.mod, self.executable = machine, mod, executable
        self._run = {name: machine[name] for name in signatures}
        self._dtype, self._classes = next(iter(params.values())).dtype, classes
        self._params = {name: tvm.runtime.tensor(value) for name, value in params.items()}
        self._slots = {name: tvm.runtime.tensor(value) for name, value in state.items()}
        self.count = 0
        self.lr, self._rule = rule.lr, rule
        stored_names = {*self._params, *self._slots, "count", *rule.scalars(rule.lr, 1)}
        self._names = {part: [a.name for a in signature.arguments] for part, signature in signatures.items()}
        self._inputs = {part: _without(signature, stored_names) for part, signature in signatures.items()}

    @property
    def lr(self) -> float:
        """Learning rate."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = _learning_rate(value)

    def __call__(self, *inputs: Any, **keywords: Any) -> float:
        """Train on a batch, and return the loss before the update of the parameters.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The number, dtypes or shapes of the arguments differ from the signature, or the target has a label that is
            no class.
        """
        values = self._inputs[TRAIN].positions(inputs, keywords)
        if self._classes is not None:
            values[-1] = _labels(values[-1], self._classes)
        scalars = self._rule.scalars(self.lr, self.count + 1)
        scalar_tensors = {name: tvm.runtime.tensor(np.array(value, self._dtype)) for name, value in scalars.items()}
        scalar_tensors["count"] = tvm.runtime.tensor(np.array(self.count, "int64"))
        loss, *updated = self._run[TRAIN](*self._tensors(TRAIN, values, {**scalar_tensors, **self._slots}))
        count = len(self._params)
        self._params = dict(zip(self._params, updated[:count], strict=True))
        self._slots = dict(zip(self._slots, updated[count:], strict=True))
        self.count += 1
        return float(loss.numpy())

    step = __call__

    def predict(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's result with the current parameters and without dropout."""
        values = self._inputs[PREDICT].positions(inputs, keywords)
        return from_tvm(self._run[PREDICT](*self._tensors(PREDICT, values, self._slots)), library_of(values))

    def _tensors(self, part: str, values: list[Any], state: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a function in its order: the validated batch, the parameters and the state."""
        signature = self._inputs[part]
        tensors = [to_tvm(value, a.name) for a, value in zip(signature.arguments, values, strict=True)]
        signature.check(tensors)
        batch = {a.name: tensor for a, tensor in zip(signature.arguments, tensors, strict=True)}
        tensors_by_name = {**batch, **self._params, **state}
        return [tensors_by_name[name] for name in self._names[part]]

    @property
    def params(self) -> dict[str, np.ndarray]:
        """Copies of the trained parameters, by name."""
        return {name: tensor.numpy().copy() for name, tensor in self._params.items()}

    @property
    def state(self) -> dict[str, Any]:
        """Copies of the optimizer state and running averages, arrays by name, and ``count`` and ``lr``."""
        slots = {name: tensor.numpy().copy() for name, tensor in self._slots.items()}
        return {"count": self.count, "lr": self.lr, **slots}

    def set(self, params: Mapping[str, Any] | None = None, state: Mapping[str, Any] | None = None) -> None:
        """Replace some parameters, or some of the state.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            A name is unknown, or a value has another shape or dtype. The step is then unchanged.
        """
        params = {} if params is None else as_mapping(params, "params", "arrays by the names of parameters")
        arrays = {} if state is None else as_mapping(state, "state", "arrays by the names of the state")
        count = as_count(as_real(arrays.pop("count", self.count), "count"), "count", least=0)
        lr = _learning_rate(arrays.pop("lr", self.lr))
        new, new_state = _fitting(params, self._params, "parameter"), _fitting(arrays, self._slots, "state")
        self._params.update(new)
        self._slots.update(new_state)
        self.count, self.lr = count, lr

    def save(self, path: str | Path) -> Path:
        """Write the parameters and the state as an ``.npz`` file, which `load` reads to resume training.

        Raises
        ------
        ArgumentError
            The suffix is wrong, or the folder does not exist.
        WriteError
            The disk is full.
        """
        path = as_path(path, "path")
        if path.suffix != ".npz":
            raise ArgumentError(
                f"a state of training is saved by numpy: expected a name ending in .npz, got {path.name}"
            )
        check_folder_of(path)
        state = {f"state:{name}": np.asarray(value) for name, value in self.state.items()}
        arrays = {**{f"param:{name}": value for name, value in self.params.items()}, **state}
        with writing_file(path, "path") as partial:
            np.savez(partial, allow_pickle=False, **arrays)
        return path

    def load(self, path: str | Path) -> None:
        """Read the parameters and the state that `save` wrote for a step of the same model and optimizer.

        Raises
        ------
        MissingFileError
        FileFormatError
            The file is damaged, or is not in numpy's format.
        ArgumentError, ArgumentTypeError
            The file is of another model or optimizer. The step is then unchanged.
        """
        path = as_path(path, "path")
        if not path.is_file():
            raise MissingFileError(f"path: there is no state of training at {path}.")
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
        except Exception as error:  # numpy and zipfile raise errors of many classes
            raise FileFormatError(f"{path.name} is no state of training: {error}") from error
        parts = {kind: _named(arrays, kind) for kind in ("param", "state")}
        missing = {*self._params} - {*parts["param"]} or {*self._slots, "count", "lr"} - {*parts["state"]}
        if missing:
            raise ArgumentError(f"{path.name} has no {min(missing)}: it is of another model or optimizer")
        self.set(parts["param"], parts["state"])

    def __repr__(self) -> str:
        return f"TrainStep {self._inputs[TRAIN]}: {self.count} steps"


def _without(signature: ModelSignature, stored_names: set[str]) -> ModelSignature:
    """Return a signature without the arguments that the step stores itself."""
    arguments = tuple(a for a in signature.arguments if a.name not in stored_names)
    return ModelSignature(signature.function, arguments, signature.bounds)


def _labels(target: Any, classes: int) -> np.ndarray:
    """Convert labels to int64, after checking that each is a class or ignored."""
    array = array_of_numbers(target.numpy() if isinstance(target, tvm.runtime.Tensor) else target, "target")
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"the target has dtype {array.dtype}; cross_entropy takes a class for each row, as integers"
        )
    labels = np.ascontiguousarray(array, "int64")
    check_classes(labels, classes)
    return labels


def _named(arrays: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{kind}:"): value for name, value in arrays.items() if name.startswith(f"{kind}:")}


def _learning_rate(value: Any) -> float:
    rate = float(as_real(value, "lr"))
    if not 0 <= rate < math.inf:
        raise ArgumentError(f"lr: expected a finite number that is not negative, got {shown(value)}.")
    return rate


def _fitting(values: Mapping[str, Any], stored: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Convert values to tensors, after checking that they match the stored ones in name, shape and dtype."""
    tensors = {}
    for name, value in values.items():
        if name not in stored:
            raise ArgumentError(f"there is no {kind} {name}: there are {', '.join(stored) or 'none'}")
        value = value.numpy() if isinstance(value, tvm.runtime.Tensor) else value
        tensor, array = stored[name], array_of_numbers(value, f"{kind} {name}")
        if tuple(tensor.shape) != array.shape:
            raise ArgumentError(f"{kind} {name} has shape {array.shape}; expected {tuple(tensor.shape)}")
        if str(tensor.dtype) != str(array.dtype):
            raise ArgumentTypeError(f"{kind} {name} has dtype {array.dtype}; expected {tensor.dtype}")
        tensors[name] = tvm.runtime.tensor(np.array(array))
    return tensors


# --------------------------------------------------------------------------------------- training step


PREDICT, TRAIN, LOSS = "predict", "train", "loss"


@dataclass
class TrainingFunctions:
    """The functions that a model is compiled to for training.

    Parameters
    ----------
    mod : IRModule
        With the function ``predict``.
    trained : tuple of str
        Names of the trainable parameters of ``predict``, in its order.
    rule : Optimizer
    loss : Loss
    seed : int
        Seed of dropout.
    kept : tuple of str
        Names of the parameters that hold running averages of batch normalization, in the function's order.
    """

    mod: ir.IRModule
    trained: tuple[str, ...]
    rule: Optimizer
    loss: Loss
    seed: int
    kept: tuple[str, ...] = ()

    @property
    def predictions(self) -> relax.TensorType:
        """Type of the model's result."""
        return self.mod[PREDICT].ret_ty

    @property
    def slots(self) -> dict[str, str]:
        """Optimizer state: names of the arrays, each with the parameter whose shape and dtype it has."""
        return {f"{name}_{slot}": name for name in self.trained for slot in self.rule.slots}

    @property
    def reserved(self) -> set[str]:
        """Names of the arguments that ``train`` has in addition to those of the model."""
        return {"target", "count", *self.rule.scalars(self.rule.lr, 1), *self.slots}

    def module(self) -> ir.IRModule:
        """Build the module with ``predict`` and ``train``."""
        func = with_dropout(self.mod[PREDICT], self.seed) or self.mod[PREDICT]
        func = with_batch_norm(func, list(self.kept))
        mod = self.mod.clone()
        mod[LOSS] = func.with_attr("global_symbol", LOSS)
        mod = relax.transform.CanonicalizeBindings()(mod)
        name = f"{LOSS}_of"
        mod = AppendLoss(LOSS, self.loss.function(self.predictions), 1, name)(mod)
        mod = _differentiated(mod, name, [p for p in mod[name].params if str(p.name) in self.trained])
        mod[TRAIN] = self._updated(mod[f"{name}_adjoint"])
        functions = {var: f for var, f in mod.functions.items() if not var.name_hint.startswith(LOSS)}
        return relax.transform.DeadCodeElimination([PREDICT, TRAIN])(ir.IRModule(functions))

    def _updated(self, adjoint: relax.Function) -> relax.Function:
        """Append the update of the parameters to a function that returns a loss and gradients."""
        params_by_name = {str(p.name): p for p in adjoint.params}
        number = relax.TensorType([], params_by_name[self.trained[0]].ty.dtype)
        scalars = {name: relax.Var(name, number) for name in self.rule.scalars(self.rule.lr, 1)}
        slots = {name: relax.Var(name, params_by_name[like].ty) for name, like in self.slots.items()}
        losses, gradients = adjoint.body.body.fields  # Updated running averages follow the loss.
        loss, *averages = losses.fields if isinstance(losses, relax.Tuple) else [losses]
        builder = relax.BlockBuilder()
        with builder.function(TRAIN, [*params_by_name.values(), *scalars.values(), *slots.values()]):
            with builder.dataflow():
                for binding in adjoint.body.blocks[0].bindings:
                    builder.emit_normalized(binding)
                params, new_slots = [], []
                for name, gradient in zip(self.trained, gradients.fields, strict=True):
                    slot_values = [slots[f"{name}_{slot}"] for slot in self.rule.slots]
                    p, after = self.rule.update(builder.emit, params_by_name[name], gradient, slot_values, scalars)
                    params.append(p)
                    new_slots += after
                results = builder.emit_output(relax.Tuple([loss, *params, *new_slots, *averages]))
            builder.emit_func_output(results)
        return builder.get()[TRAIN]


def _differentiated(mod: ir.IRModule, name: str, params: list[Any]) -> ir.IRModule:
    try:
        return relax.transform.Gradient(name, require_grads=params)(mod)
    except Exception as error:
        missing = re.search(r"FPrimalGradient has not been registered for relax\.(\S+)", str(error))
        if missing is None:
            raise
        fault = f"R.{missing[1]} has no gradient, and trained parameters come before it"
        raise LoweringError(f"{fault}: register one with tvm.relax.op.base.register_gradient") from error


# ---------------------------------------------------------------------------- compilation for training


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
    rate = None if lr is None else _learning_rate(lr)
    chosen, rule, measure = (
        cpu_target(target, "models"),
        optimizer_of(optimizer, {**options, "lr": rate}),
        loss_of(loss),
    )
    frozen = as_sequence(frozen, "frozen", "names of parameters")
    if not all(isinstance(name, str) for name in frozen):
        raise ArgumentTypeError(f"frozen: expected names of parameters, got {shown(tuple(frozen))}. Pass strings.")
    if is_module(model):
        if params is not None:
            raise ArgumentTypeError("a module of torch has parameters of its own: pass no params")
        tied = first_names(model, frozen)
        model, params, fixed = from_module(model, example_args, example_kwargs, static)
        kept = averages(model["main"])
        frozen = [*tied, *(name for name in fixed if name not in kept)]
    elif example_args is not None or example_kwargs is not None or static_names(static):
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
    plan = TrainingFunctions(mod, tuple(trained), rule, measure, seed, tuple(kept))
    taken = next((str(p.name) for p in mod[PREDICT].params if str(p.name) in plan.reserved), None)
    if taken is not None:
        raise ArgumentError(f"the model has a parameter {taken}, which is a name of the step's own: rename it")
    with own_errors(), chosen:
        training = plan.module()
    executable = build(training, chosen, database=database)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    signatures = {part: ModelSignature.of(training, part) for part in (PREDICT, TRAIN)}
    classes = int(plan.predictions.shape.values[-1]) if measure.is_classes else None
    slots = {name: np.zeros_like(trained[like]) for name, like in plan.slots.items()}
    state = {**slots, **{name: values[name] for name in kept}}
    return TrainStep(machine, signatures, trained, state, rule, classes, mod=training, executable=executable)


def _function(model: Any) -> tuple[str, relax.Function]:
    """Return the name of a model's function, and the function."""
    if not isinstance(model, ir.IRModule):
        raise ArgumentTypeError(f"expected an IRModule with a Relax function main, got {type(model).__name__}")
    functions = {str(var.name_hint): f for var, f in model.functions.items() if isinstance(f, relax.Function)}
    if "main" not in functions and len(functions) != 1:
        listed = ", ".join(functions) or "none"
        raise ArgumentError(f"expected a module with a function main, or with one Relax function, got {listed}")
    name = "main" if "main" in functions else next(iter(functions))
    return name, functions[name]


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
    trained = {n: values[n] for n in names if n in values and n not in frozen and values[n].dtype.kind == "f"}
    if not trained:
        raise ArgumentError("there is nothing to train: params has no array of floats that is not frozen")
    dtypes = sorted({str(value.dtype) for value in trained.values()})
    if len(dtypes) > 1 or dtypes[0] not in TRAINED:
        raise ArgumentTypeError(f"parameters are trained in {' or in '.join(TRAINED)}, got {' and '.join(dtypes)}")
    return trained


def _array(name: str, value: Any) -> np.ndarray:
    array = value.data if isinstance(value, Parameter) else value
    if array is None:
        raise ArgumentError(f"params has no value for {name}: give the layer a weight first")
    array = array.numpy() if isinstance(array, tvm.runtime.Tensor) else array
    return np.array(array_of_numbers(array, f"params[{name!r}]"))


def _check_fits(name: str, value: np.ndarray, expected: Any) -> None:
    shape = expected.shape.values if isinstance(expected.shape, relax.ShapeExpr) else []
    if len(shape) != value.ndim or not all(int(a) == b for a, b in zip(shape, value.shape, strict=True) if known([a])):
        raise ArgumentError(f"params has {name} of shape {value.shape}; the model takes {expected}")
    if str(expected.dtype.dtype) != str(value.dtype):
        raise ArgumentTypeError(f"params has {name} of {value.dtype}; the model takes {expected}")


def _plain(mod: ir.IRModule) -> ir.IRModule:
    """Return the module with its function as one dataflow block, where no tuple is built only to be unpacked."""
    func = mod[PREDICT] = _with_one_result(mod[PREDICT])
    result = func.ret_ty
    if not isinstance(result, relax.TensorType):
        raise ArgumentError(f"expected a model that returns one tensor, got {result}: return the predictions only")
    for part in (*(param.ty for param in func.params), result):
        if (
            not isinstance(part, relax.TensorType)
            or not isinstance(part.shape, relax.ShapeExpr)
            or not known(part.shape.values)
        ):
            fault = f"a step is compiled for known sizes, got {part}"
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


__all__ = ["PREDICT", "TRAIN", "TrainStep", "TrainingFunctions", "train_step"]
