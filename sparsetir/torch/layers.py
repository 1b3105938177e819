# SPDX-License-Identifier: Apache-2.0
"""Layers of torch_geometric that are one product with a weight: GCNConv and SAGEConv.

As `Graph.conv` they sum rows of the narrower kind, and sums of constant features only once. A layer that does anything
else, or that something looks into, is run as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sparsetir.torch.functions import NAMES
from sparsetir.torch.recent import Graphs

PLAIN = (Tensor, torch.nn.Parameter)
HOOKS = [f"_{step}_forward{when}_hooks" for step in ("propagate", "message", "aggregate") for when in ("_pre", "")]
STEPS = {"propagate", "message", "aggregate", "update"}  # that one layer may have of its own
INNER = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_usual(layer: Any, kind: Any, reductions: tuple[str, ...], edge_index: Any, *nodes: Any) -> bool:
    """Whether a layer is what torch_geometric made it, and its operands are plain floats and edges."""
    if torch.compiler.is_compiling() or type(layer) is not kind or layer.explain:
        return False
    if any(getattr(layer, name) for name in HOOKS) or not STEPS.isdisjoint(vars(layer)):
        return False
    if layer.flow != "source_to_target" or not isinstance(layer.aggr, str) or layer.aggr not in reductions:
        return False
    if not all(type(x) in PLAIN and x.dim() == 2 and x.dtype in NAMES and x.is_cpu for x in nodes):
        return False
    if len({x.dtype for x in nodes}) != 1 or torch.is_autocast_enabled("cpu"):
        return False
    is_index = type(edge_index) is Tensor and edge_index.dtype is torch.int64 and edge_index.is_cpu
    return bool(is_index and edge_index.dim() == 2 and edge_index.shape[0] == 2)


def _is_plain(linear: Any, x: Tensor) -> bool:
    """Whether a linear layer is no more than that, of these inputs."""
    from torch_geometric.nn.dense import Linear

    if type(linear) is not Linear or any(getattr(linear, name) for name in INNER) or "forward" in vars(linear):
        return False
    return type(linear.weight) is torch.nn.Parameter and linear.weight.dtype is x.dtype


def _plus(out: Tensor, linear: Any, x: Tensor) -> Tensor:
    """A result that nothing else holds, and what a linear layer makes of `x`: added by the product itself."""
    if _is_plain(linear, x) and linear.bias is None:
        return out.addmm_(x, linear.weight.t())
    return out + linear(x)


def gcn(original: Callable[..., Any], graphs: Graphs, norm: Callable[..., Any]) -> Callable[..., Any]:
    """``GCNConv.forward`` by `Graph.conv`, where it does nothing else."""

    @wraps(original)
    def forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
        is_edges = not torch.compiler.is_compiling() and type(edge_index) is Tensor
        if is_edges and self._cached_edge_index is None and not graphs.is_worth(edge_index, self.out_channels):
            return graphs.run_plainly(original, self, x, edge_index, edge_weight)
        from torch_geometric.nn import GCNConv

        weights = () if edge_weight is None else (edge_weight,)
        is_fit = is_usual(self, GCNConv, ("sum", "add", "mean"), edge_index, x) and _is_plain(self.lin, x)
        if not is_fit or not all(type(w) in PLAIN and w.dim() == 1 and w.dtype is x.dtype for w in weights):
            return original(self, x, edge_index, edge_weight)
        nodes = x.shape[0]
        if self.normalize:
            found = self._cached_edge_index
            if found is None:
                options = (self.improved, self.add_self_loops, self.flow, x.dtype)
                found = norm(edge_index, edge_weight, nodes, *options)
                if self.cached:
                    self._cached_edge_index = found
            edge_index, edge_weight = found
        graph = graphs.of_both(edge_index, (1, 0), nodes, nodes).weighted(edge_weight)
        return graph.conv(x, self.lin.weight, self.bias, self.aggr)

    return forward


def sage(original: Callable[..., Any], graphs: Graphs) -> Callable[..., Any]:
    """``SAGEConv.forward`` by `Graph.conv`, where it does nothing else."""

    @wraps(original)
    def forward(self: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
        is_edges = not torch.compiler.is_compiling() and type(edge_index) is Tensor
        features = x.shape[-1] if isinstance(x, Tensor) else x[0].shape[-1]
        if is_edges and not graphs.is_worth(edge_index, features):
            return graphs.run_plainly(original, self, x, edge_index, size)
        from torch_geometric.nn import SAGEConv

        sources, targets = x if isinstance(x, tuple) and len(x) == 2 else (x, x)
        is_fit = is_usual(self, SAGEConv, ("sum", "add", "mean", "max", "min"), edge_index, sources, targets)
        is_fit = is_fit and size is None and not self.project and _is_plain(self.lin_l, sources)
        if not is_fit:
            return original(self, x, edge_index, size)
        graph = graphs.of_both(edge_index, (1, 0), targets.shape[0], sources.shape[0])
        out = graph.conv(sources, self.lin_l.weight, self.lin_l.bias, self.aggr)
        out = _plus(out, self.lin_r, targets) if self.root_weight else out
        return torch.nn.functional.normalize(out, p=2.0, dim=-1) if self.normalize else out

    return forward


__all__ = ["HOOKS", "PLAIN", "gcn", "is_usual", "sage"]
