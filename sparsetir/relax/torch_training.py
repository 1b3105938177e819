# SPDX-License-Identifier: Apache-2.0
"""A torch module as a Relax function whose parameters are its own, to be trained."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tvm import ir, relax

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.relax.torch_import import imported
from sparsetir.relax.torch_models import with_fixed
from sparsetir.relax.torch_values import explained


def is_module(model: Any) -> bool:
    """Whether a model is one of torch."""
    return any(base.__module__ == "torch.nn.modules.module" for base in type(model).__mro__)


def from_module(
    model: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, static: Collection[str]
) -> tuple[ir.IRModule, dict[str, Any], list[str]]:
    """A module as it is, in train mode or not: its function, the values of its tensors, and which are not trained.

    Parameters
    ----------
    model : torch.nn.Module
    args, kwargs, static
        See `sparsetir.relax.train_step`.
    """
    torch = importlib.import_module("torch")
    if args is None and kwargs is None:
        raise ArgumentTypeError("a module is traced with arguments: pass example_args, a tuple of tensors")
    if isinstance(args, torch.Tensor):
        raise ArgumentTypeError("example_args is a tuple of arguments; found a tensor: pass (tensor,)")
    _check_dense(torch, model)
    _check_averages(torch, model)
    own = copy.deepcopy(model)
    whole, given, named, known = with_fixed(own, tuple(args or ()), dict(kwargs or {}), static)
    for module, original in zip(own.modules(), model.modules(), strict=True):
        module.training = original.training  # which `with_fixed` ended
    with torch.no_grad(), explained(), known:
        exported = torch.export.export(whole, given, named)
    prefix = "model." if static else ""
    targets = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if spec.target is not None}
    mod, held = relax.frontend.detach_params(imported(exported, keeps_params=True))
    func = mod["main"]
    first = len(func.params) - len(held.get("main", ()))
    names = [str(targets[str(p.name)]).removeprefix(prefix) for p in func.params[first:]]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    values = dict(zip(names, held.get("main", ()), strict=True))
    return ir.IRModule({"main": _named(func, first, names)}), values, [name for name in names if name not in trained]


def _check_dense(torch: Any, model: Any) -> None:
    """Raise for weights that would not stay sparse."""
    prune = importlib.import_module("torch.nn.utils.prune")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout != torch.strided:
            fault = f"{name} is sparse ({tensor.layout}), which torch.export does not take"
            raise ArgumentError(f"{fault}: train it with sparsetir.torch.SparseLinear, or write the model in Relax")
    if prune.is_pruned(model):
        fault = "the model is pruned by hooks of torch.nn.utils.prune, which would not hold its zeros"
        raise ArgumentError(f"{fault}: make its layers sparse with sparsetir.torch.sparsify_ and train them in torch")


def _check_averages(torch: Any, model: Any) -> None:
    """Raise for averages over all steps, whose share of a batch the step would have to be compiled for."""
    for name, module in model.named_modules():
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
        if is_norm and module.track_running_stats and module.momentum is None:
            fault = f"{name or 'the model'} is a batch norm with momentum=None, an average over all steps"
            raise ArgumentError(f"{fault}: give it a momentum, such as 0.1")


def _named(func: relax.Function, first: int, names: Sequence[str]) -> relax.Function:
    """The function with the names of torch for its parameters."""
    new = [relax.Var(name, p.ty) for name, p in zip(names, func.params[first:], strict=True)]
    bound = func.bind_params(dict(zip(func.params[first:], new, strict=True)))
    return relax.Function([*bound.params, *new], bound.body, func.ret_ty, func.is_pure)


__all__ = ["from_module", "is_module"]
