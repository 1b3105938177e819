# SPDX-License-Identifier: Apache-2.0
"""The layer of relational graph networks, over the pairs of relation and target that there are.

RGCNConv reduces the messages of one relation after the other at all nodes, and multiplies all of these by the weight of
that relation. Most nodes have no edge of most relations: here only the pairs that have one are reduced, by one product,
multiplied, and added up at their targets by another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sparsetir.torch.graph import Graph
from sparsetir.torch.layers import is_usual
from sparsetir.torch.recent import Graphs

REDUCTIONS = ("sum", "add", "mean", "max", "min")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a relation and a target, by relations.

    Parameters
    ----------
    into : Graph
        From the sources of edges to their pairs.
    sums : Graph
        From pairs to targets.
    counts : list of int
        How many pairs each relation has.
    """

    into: Graph
    sums: Graph
    counts: list[int]

    @classmethod
    def of(cls, edge_index: Tensor, relation: Tensor, relations: int, sources: int, targets: int) -> Pairs:
        """The pairs of edges with a relation each."""
        pairs, at = torch.unique(relation * targets + edge_index[1], return_inverse=True)
        into = Graph(torch.stack([edge_index[0], at.to(edge_index.dtype)]), (sources, pairs.numel()))
        ends = torch.stack([torch.arange(pairs.numel()), pairs % max(targets, 1)])
        counts = torch.bincount(pairs // max(targets, 1), minlength=relations)
        return cls(into, Graph(ends, (pairs.numel(), targets)), counts.tolist())

    def product(self, x: Tensor, weight: Tensor, reduce: str) -> Tensor:
        """``sum_r reduce_r(x) W_r``; weights of blocks are [relations, blocks, inputs, outputs]."""
        parts = self.into.spmm(x, None, reduce).split(self.counts)
        return self.sums.spmm(torch.cat([_times(part, w) for part, w in zip(parts, weight, strict=True)]))


def _times(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return x @ weight
    blocks = x.view(x.shape[0], *weight.shape[:2])
    return torch.einsum("abc,bcd->abd", blocks, weight).flatten(1)


def replaced(original: Callable[..., Any], graphs: Graphs, pairs_of: Callable[..., Pairs]) -> Callable[..., Any]:
    """``RGCNConv.forward`` over pairs, where it does nothing else."""

    @wraps(original)
    def forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
        sources, targets = x if isinstance(x, tuple) else (x, x)
        is_edges = not torch.compiler.is_compiling() and type(edge_index) is Tensor
        if is_edges and not graphs.is_worth(edge_index, self.out_channels):
            return graphs.run_plainly(original, self, x, edge_index, edge_type)
        if not _is_fit(self, sources, targets, edge_index, edge_type):
            return original(self, x, edge_index, edge_type)
        weight = self.weight
        if self.num_bases is not None:
            weight = (self.comp @ weight.flatten(1)).view(self.num_relations, *weight.shape[1:])
        sizes = (self.num_relations, sources.shape[0], targets.shape[0])
        out = pairs_of(edge_index, edge_type, *sizes).product(sources, weight, self.aggr)
        out = out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))  # as the layer adds into such zeros
        out = out if self.root is None else out + targets @ self.root
        return out if self.bias is None else out + self.bias

    return forward


def _is_fit(layer: Any, sources: Any, targets: Any, edge_index: Any, edge_type: Any) -> bool:
    """Whether nothing but the layer itself is to be run, over edges that have one of its relations each."""
    from torch_geometric import typing
    from torch_geometric.nn import RGCNConv

    if typing.WITH_SEGMM or not is_usual(layer, RGCNConv, REDUCTIONS, edge_index, sources, targets):
        return False
    if sources.dtype is not layer.weight.dtype or type(edge_type) is not Tensor or edge_type.dtype is not torch.int64:
        return False
    if not edge_type.is_cpu or edge_type.shape != edge_index.shape[1:]:
        return False
    return _are_below(edge_type, layer.num_relations) and _are_below(edge_index[1], targets.shape[0])


def _are_below(numbers: Tensor, count: int) -> bool:
    """Whether all relations, or all targets, are ones that there are; the layer says what is wrong with others."""
    return not numbers.numel() or (int(numbers.min()) >= 0 and int(numbers.max()) < count)


__all__ = ["Pairs", "replaced"]
