# SPDX-License-Identifier: Apache-2.0
"""What is made small: the losses of `sparsetir.relax.train_step`, as torch has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from sparsetir.errors import ArgumentError, ArgumentTypeError

op = relax.op
IGNORED = -100  # the label of rows that do not count, as in torch


@dataclass(frozen=True)
class Loss:
    """A loss of predictions and a target.

    Parameters
    ----------
    name : str
    write : callable
        Of the predictions, the target and what emits an expression; it returns a scalar.
    is_classes : bool
        Whether the target is a class for each row.
    """

    name: str
    write: Callable[[Any, Any, Callable[[Any], Any]], Any]
    is_classes: bool = False

    def target(self, predictions: Any) -> relax.TensorType:
        """The type of the target.

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
        """The loss as a function of predictions and a target."""
        builder = relax.BlockBuilder()
        x, target = relax.Var("predictions", predictions), relax.Var("target", self.target(predictions))
        with builder.function("loss", [x, target]):
            with builder.dataflow():
                found = builder.emit_output(self.write(x, target, builder.emit))
            builder.emit_func_output(found)
        return builder.get()["loss"]


def _cross_entropy(x: Any, target: Any, emit: Callable[[Any], Any]) -> Any:
    """The mean over the rows that count of minus the logarithm of the probability of their class."""
    dtype, ignored = str(x.ty.dtype.dtype), relax.const(IGNORED, "int64")
    counts = emit(op.astype(op.not_equal(target, ignored), dtype))
    safe = emit(op.where(op.equal(target, ignored), relax.const(0, "int64"), target))
    each = emit(op.nn.nll_loss(emit(op.nn.log_softmax(x, -1)), safe, reduction="none"))
    return op.sum(each * counts) / op.maximum(op.sum(counts), relax.const(1.0, dtype))


def _mse(x: Any, target: Any, emit: Callable[[Any], Any]) -> Any:
    error = emit(x - target)
    return op.mean(error * error)


def _l1(x: Any, target: Any, _emit: Callable[[Any], Any]) -> Any:
    return op.mean(op.abs(x - target))


def _binary_cross_entropy(x: Any, target: Any, _emit: Callable[[Any], Any]) -> Any:
    """Of scores before the sigmoid."""
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


def loss_of(found: Any) -> Loss:
    """A loss from its name, or from a function of predictions and a target that has their shape."""
    if isinstance(found, str) and found in LOSSES:
        return LOSSES[found]
    if callable(found):
        return Loss("loss", lambda x, target, _emit: found(x, target))
    expected = f"one of {', '.join(LOSSES)}, or a function of two Relax expressions"
    raise ArgumentTypeError(f"loss is {expected}; found {found!r}")


def check_classes(target: np.ndarray, classes: int) -> None:
    """Raise unless labels are classes, or that of rows that do not count."""
    wrong = target[((target < 0) | (target >= classes)) & (target != IGNORED)]
    if wrong.size:
        limits = f"from 0 to {classes - 1}, or {IGNORED} for rows that do not count"
        raise ArgumentError(f"the target has label {wrong[0]}; expected classes {limits}")


__all__ = ["IGNORED", "LOSSES", "Loss", "check_classes", "loss_of"]
