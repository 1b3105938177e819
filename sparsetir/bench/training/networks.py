# SPDX-License-Identifier: Apache-2.0
"""Layers of graph networks over products that are passed in.

Their parameters have the names and shapes of those of torch_geometric, so that all networks begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.nn.functional import linear

import torch
from sparsetir.torch import Graph
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]  # sums, means or maxima of what the sources of each node have
Inputs: TypeAlias = Tensor | Product  # features of nodes; sparse ones as the product with them


@dataclass(frozen=True)
class Neighbours:
    """Sums, means or maxima of what the sources of each node of a graph have."""

    graph: Graph
    reduce: str = "sum"

    def __call__(self, x: Tensor) -> Tensor:
        return self.graph.spmm(x, reduce=self.reduce)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return these rows of x, times ``weight.T``, and a bias."""
        return self.graph.conv(x, weight, bias, self.reduce)


def times(x: Inputs, weight: Tensor) -> Tensor:
    """``x @ weight.T``."""
    return linear(x, weight) if isinstance(x, Tensor) else x(weight.t())


class GCN(nn.Module):
    """``A (x W) + b``, A the adjacency with loops, normalised by the degrees of both ends.

    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Inputs, product: Product) -> Tensor:
        if isinstance(product, Neighbours) and isinstance(x, Tensor):
            return product.conv(x, self.lin.weight, self.bias)
        return product(times(x, self.lin.weight)) + self.bias


class SAGE(nn.Module):
    """``reduce(x) W_l + x W_r + b``, the mean or the maximum of neighbours.

    Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(inputs, outputs)
        self.lin_r = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Inputs, product: Product) -> Tensor:
        if isinstance(product, Neighbours) and isinstance(x, Tensor):
            return product.conv(x, self.lin_l.weight, self.lin_l.bias).addmm_(x, self.lin_r.weight.t())
        if isinstance(x, Tensor):
            return self.lin_l(product(x)).addmm_(x, self.lin_r.weight.t())
        return product(times(x, self.lin_l.weight)) + self.lin_l.bias + times(x, self.lin_r.weight)  # of means only


class GAT(nn.Module):
    """Attention with scores ``leaky_relu(a_dst . h_i + a_src . h_j)``, h = x W; the heads one after the other.

    Velickovic et al., "Graph Attention Networks", ICLR 2018.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin = nn.Linear(inputs, heads * outputs, bias=False)
        self.att_src = nn.Parameter(torch.zeros(1, heads, outputs))
        self.att_dst = nn.Parameter(torch.zeros(1, heads, outputs))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x: Inputs, graph: Graph) -> Tensor:
        h = times(x, self.lin.weight).unflatten(1, (self.heads, -1))
        targets, sources = self.ends(x, h)
        return graph.additive_attention(targets, sources, h).flatten(1) + self.bias

    def ends(self, x: Inputs, h: Tensor) -> Iterator[Tensor]:
        """Return ``a . h`` for the targets and for the sources, as ``x (W a)`` where h has no fewer features than x."""
        if not isinstance(x, Tensor) or self.lin.in_features > self.lin.out_features:
            return ((h * weight).sum(-1) for weight in (self.att_dst, self.att_src))
        weight = self.lin.weight.unflatten(0, (self.heads, -1))
        return (linear(x, (weight * a.movedim(0, -1)).sum(1)) for a in (self.att_dst, self.att_src))


class GATv2(nn.Module):
    """Attention with scores ``a . leaky_relu(W_r x_i + W_l x_j)``; the heads one after the other.

    Brody, Alon and Yahav, "How Attentive are Graph Attention Networks?", ICLR 2022.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin_l = nn.Linear(inputs, heads * outputs)
        self.lin_r = nn.Linear(inputs, heads * outputs)
        self.att = nn.Parameter(torch.zeros(1, heads, outputs))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        sources, targets = (lin(x).unflatten(1, (self.heads, -1)) for lin in (self.lin_l, self.lin_r))
        return graph.dynamic_attention(targets, sources, self.att[0], sources).flatten(1) + self.bias


class RGCN(nn.Module):
    """``sum_r mean_r(x) W_r + x W_0 + b``, the means over the neighbours by edges of each relation.

    Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", ESWC 2018.
    """

    def __init__(self, inputs: int, outputs: int, relations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(relations, inputs, outputs))
        self.root = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, means: Product, sums: Product, counts: list[int]) -> Tensor:
        """`means` gives one row for each node and relation that meet, by relations; `sums` adds those of a node."""
        parts = means(x).split(counts)
        messages = torch.cat([part @ weight for part, weight in zip(parts, self.weight, strict=True)])
        return linear(x, self.root.t(), self.bias) + sums(messages)


class Network(nn.Module):
    """Two layers of a kind, with a ReLU between them (ELU for GAT)."""

    def __init__(self, first: nn.Module, second: nn.Module, *structure: Any, is_elu: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([first, second])
        self.structure, self.is_elu = structure, is_elu

    def forward(self, x: Inputs) -> Tensor:
        first, second = self.layers
        inner = first(x, *self.structure)
        return second(nn.functional.elu(inner) if self.is_elu else inner.relu_(), *self.structure)


def initialise(network: nn.Module, seed: int) -> None:
    """Draw all parameters, those of one name alike for every network; biases are zero."""
    for name, parameter in sorted(network.named_parameters()):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            bound = (6 / (parameter.shape[-2] + parameter.shape[-1])) ** 0.5
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


__all__ = ["GAT", "GCN", "RGCN", "SAGE", "GATv2", "Neighbours", "Network", "initialise"]
