# SPDX-License-Identifier: Apache-2.0
"""A training step as one function: forward pass, backward pass and update.

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

import re
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax
from tvm.relax.training.utils import AppendLoss

from sparsetir.errors import LoweringError
from sparsetir.relax.training.layers import with_batch_norm, with_dropout
from sparsetir.relax.training.rules import Loss, Optimizer

PREDICT, TRAIN, LOSS = "predict", "train", "loss"


@dataclass
class Plan:
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


__all__ = ["PREDICT", "TRAIN", "Plan"]
