# SPDX-License-Identifier: Apache-2.0
"""Losses and update rules of `train_step`, with torch's semantics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from tvm import relax
from tvm.relax.training import optimizer as tvm_optimizers

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.utils.arguments import shown

# Losses of `sparsetir.relax.train_step`, with torch's semantics.


op = relax.op
IGNORED = -100  # The label of rows that the loss ignores, as in torch.


@dataclass(frozen=True)
class Loss:
    """A loss function of predictions and a target.

    Parameters
    ----------
    name : str
    write : callable
        Takes the predictions, the target and an emit function; returns a scalar expression.
    is_classes : bool
        Whether the target is a class for each row.
    """

    name: str
    write: Callable[[Any, Any, Callable[[Any], Any]], Any]
    is_classes: bool = False

    def target(self, predictions: Any) -> relax.TensorType:
        """Return the type of the target.

        Raises
        ------
        ArgumentError
            Predictions have no classes.
        """
        shape = list(predictions.shape.values)
        if not self.is_classes:
            return relax.TensorType(shape, predictions.dtype)
        if len(shape) != 2:
            raise ArgumentError(
                f"cross_entropy takes a model with a row of scores for each sample; found {predictions}"
            )
        return relax.TensorType(shape[:1], "int64")

    def function(self, predictions: Any) -> relax.Function:
        """Return the loss as a Relax function of predictions and a target."""
        builder = relax.BlockBuilder()
        x, target = relax.Var("predictions", predictions), relax.Var("target", self.target(predictions))
        with builder.function("loss", [x, target]):
            with builder.dataflow():
                loss = builder.emit_output(self.write(x, target, builder.emit))
            builder.emit_func_output(loss)
        return builder.get()["loss"]


def _cross_entropy(x: Any, target: Any, emit: Callable[[Any], Any]) -> Any:
    """Return the mean of the negative log-probability of the labels, over rows with a label other than `IGNORED`."""
    dtype, ignored = str(x.ty.dtype.dtype), relax.const(IGNORED, "int64")
    counts = emit(op.astype(op.not_equal(target, ignored), dtype))
    safe = emit(op.where(op.equal(target, ignored), relax.const(0, "int64"), target))
    losses = emit(op.nn.nll_loss(emit(op.nn.log_softmax(x, -1)), safe, reduction="none"))
    return op.sum(losses * counts) / op.maximum(op.sum(counts), relax.const(1.0, dtype))


def _mse(x: Any, target: Any, emit: Callable[[Any], Any]) -> Any:
    error = emit(x - target)
    return op.mean(error * error)


def _l1(x: Any, target: Any, _emit: Callable[[Any], Any]) -> Any:
    return op.mean(op.abs(x - target))


def _binary_cross_entropy(x: Any, target: Any, _emit: Callable[[Any], Any]) -> Any:
    """Return the mean binary cross entropy of scores before the sigmoid."""
    zero, one = (relax.const(n, str(x.ty.dtype.dtype)) for n in (0.0, 1.0))
    return op.mean(op.maximum(x, zero) - x * target + op.log(one + op.exp(op.negative(op.abs(x)))))


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, is_classes=True),
        Loss("binary_cross_entropy", _binary_cross_entropy),
        Loss("mse", _mse),
        Loss("l1", _l1),
    )
}


def loss_of(loss: Any) -> Loss:
    """Return the loss of a name, or wrap a function of predictions and a target of the same shape."""
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]
    if callable(loss) and not isinstance(loss, type):
        return Loss("loss", lambda x, target, _emit: loss(x, target))
    expected = f"one of {', '.join(LOSSES)}, or a function of two Relax expressions"
    raise ArgumentTypeError(f"loss is {expected}; found {shown(loss)}")


def check_classes(target: np.ndarray, classes: int) -> None:
    """Raise unless every label is a class or the label of ignored rows."""
    invalid = target[((target < 0) | (target >= classes)) & (target != IGNORED)]
    if invalid.size:
        limits = f"from 0 to {classes - 1}, or {IGNORED} for rows that do not count"
        raise ArgumentError(f"the target has label {invalid[0]}; expected classes {limits}")


# Optimizers of `sparsetir.relax.train_step`: update rules with torch's semantics.


Emit: TypeAlias = Callable[[Any], Any]


Scalars: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Sgd:
    """``v = momentum * v + g``, ``p -= lr * v``; with `nesterov` ``p -= lr * (g + momentum * v)``."""

    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def scalars(self, lr: float, count: int) -> dict[str, float]:
        """Return the scalars of one step, where `count` is its number from 1 on."""
        return {"lr": lr}

    @property
    def slots(self) -> tuple[str, ...]:
        """Optimizer state of each parameter, zero before the first step."""
        return ("velocity",) if self.momentum else ()

    def update(self, emit: Emit, p: Any, g: Any, slots: list[Any], scalars: Scalars) -> tuple[Any, list[Any]]:
        """Return the parameter and its state after a step."""
        number = _numbers(p)
        if self.weight_decay:
            g = emit(g + number(self.weight_decay) * p)
        if not self.momentum:
            return emit(p - scalars["lr"] * g), []
        velocity = emit(number(self.momentum) * slots[0] + g)
        direction = g + number(self.momentum) * velocity if self.nesterov else velocity
        return emit(p - scalars["lr"] * direction), [velocity]


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015); with `decoupled` weight decay is applied apart from the gradient (AdamW)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    slots = ("first", "second")

    def scalars(self, lr: float, count: int) -> dict[str, float]:
        """Return the scalars of one step, where `count` is its number from 1 on."""
        first, second = (1 - beta**count for beta in self.betas)
        return {"lr": lr, "first_share": first, "second_share": second}

    def update(self, emit: Emit, p: Any, g: Any, slots: list[Any], scalars: Scalars) -> tuple[Any, list[Any]]:
        """Return the parameter and its state after a step."""
        number = _numbers(p)
        if self.weight_decay and self.decoupled:
            p = emit(p * (number(1.0) - scalars["lr"] * number(self.weight_decay)))
        elif self.weight_decay:
            g = emit(g + number(self.weight_decay) * p)
        first = emit(number(self.betas[0]) * slots[0] + number(1 - self.betas[0]) * g)
        second = emit(number(self.betas[1]) * slots[1] + number(1 - self.betas[1]) * g * g)
        deviation = op.sqrt(second / scalars["second_share"]) + number(self.eps)
        return emit(p - scalars["lr"] * (first / scalars["first_share"]) / deviation), [first, second]


Optimizer: TypeAlias = "Sgd | Adam"
NAMED: Mapping[str, Optimizer] = {
    "sgd": Sgd(),
    "momentum": Sgd(momentum=0.9),
    "adam": Adam(),
    "adamw": Adam(weight_decay=0.01, decoupled=True),
}


def _numbers(p: Any) -> Callable[[float], Any]:
    return lambda value: relax.const(value, str(p.ty.dtype.dtype))


def optimizer_of(optimizer: Any, options: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer of a name with its options, or convert one of ``tvm.relax.training``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no such optimizer, or it has no such option.
    """
    base = NAMED.get(optimizer) if isinstance(optimizer, str) else _of_tvm(optimizer)
    if base is None:
        raise ArgumentError(f"optimizer is one of {', '.join(NAMED)}; found {shown(optimizer)}")
    chosen_options = {name: value for name, value in options.items() if value is not None}
    names = [field.name for field in fields(base) if field.name != "decoupled"]
    unknown = next((name for name in chosen_options if name not in names), None)
    if unknown is not None:
        raise ArgumentTypeError(
            f"{type(base).__name__.lower()} takes {', '.join(names)}; found another option {unknown}"
        )
    return type(base)(**{**{field.name: getattr(base, field.name) for field in fields(base)}, **chosen_options})


def _of_tvm(optimizer: Any) -> Optimizer:
    if isinstance(optimizer, (Sgd, Adam)):
        return optimizer
    if type(optimizer) is tvm_optimizers.SGD:
        return Sgd(optimizer.lr, weight_decay=optimizer.weight_decay)
    if type(optimizer) is tvm_optimizers.Adam:
        return Adam(optimizer.lr, (optimizer.beta1, optimizer.beta2), optimizer.eps, optimizer.weight_decay)
    if type(optimizer) is tvm_optimizers.MomentumSGD and not optimizer.dampening:
        return Sgd(optimizer.lr, optimizer.momentum, optimizer.nesterov, optimizer.weight_decay)
    expected = f"one of {', '.join(NAMED)}, or SGD, MomentumSGD without dampening or Adam of tvm.relax.training"
    raise ArgumentTypeError(f"optimizer is {expected}; found {type(optimizer).__name__}")


__all__ = [
    "IGNORED",
    "LOSSES",
    "NAMED",
    "Adam",
    "Loss",
    "Optimizer",
    "Scalars",
    "Sgd",
    "check_classes",
    "loss_of",
    "optimizer_of",
]
