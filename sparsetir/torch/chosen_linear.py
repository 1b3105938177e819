# SPDX-License-Identifier: Apache-2.0
"""Linear layers in compiled programs: dense or sparse, chosen at the first call by the values of the weight."""

from __future__ import annotations

import threading
from typing import Any

from torch.nn import functional

import torch
from sparsetir.torch.pruned_choice import Inputs, Options, decide
from sparsetir.torch.pruned_layers import PrunedLinear
from torch import Tensor, nn

MAX_CHANGES = 2  # A weight that changes more often stays dense.
LINEAR = (functional.linear, torch.ops.aten.linear.default)


class ChosenLinear(nn.Module):
    """``torch.nn.functional.linear`` with a weight that is constant, for calls without gradients.

    Parameters
    ----------
    options : Options
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.layer: PrunedLinear | None = None
        self._decided: tuple[Any, ...] = ()
        self._changes, self._lock = 0, threading.Lock()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        operands = [t for t in (x, weight, bias) if t is not None]
        if weight.dim() != 2 or (torch.is_grad_enabled() and any(t.requires_grad for t in operands)):
            return functional.linear(x, weight, bias)
        layer = self._layer_of(x, weight, bias)
        return functional.linear(x, weight, bias) if layer is None else layer(x)

    def _layer_of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> PrunedLinear | None:
        """Return the layer that was chosen for the weight; choose again after changes in place."""
        state = tuple(None if t is None else (t.data_ptr(), version_of(t)) for t in (weight, bias))
        with self._lock:
            if state == self._decided:
                return self.layer
            self._changes += 1
            self._decided, self.layer = state, None
            if self._changes <= MAX_CHANGES and x.numel():
                self.layer = _chosen(x, weight, bias, self.options)
            elif not x.numel():
                self._decided, self._changes = (), self._changes - 1
            return self.layer


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> PrunedLinear | None:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    if x.dtype is not weight.dtype:
        return None
    chosen = decide(layer.eval(), Inputs(x.detach()), options).layer
    return chosen if isinstance(chosen, PrunedLinear) else None


def choose_linear_layers(module: torch.fx.GraphModule, options: Options) -> None:
    """Replace linear layers whose weight is a parameter of the program, in place."""
    for number, node in enumerate(list(module.graph.nodes)):
        if node.op != "call_function" or node.target not in LINEAR:
            continue
        names = ("input", "weight", "bias")
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if getattr(arguments["weight"], "op", "") not in ("placeholder", "get_attr"):
            continue
        module.add_submodule(f"chosen_linear_{number}", ChosenLinear(options))
        with module.graph.inserting_before(node):
            operands = tuple(arguments.get(name) for name in names)
            node.replace_all_uses_with(module.graph.call_module(f"chosen_linear_{number}", operands))
        module.graph.erase_node(node)


__all__ = ["ChosenLinear", "choose_linear_layers"]
