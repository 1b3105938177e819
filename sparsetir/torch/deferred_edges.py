# SPDX-License-Identifier: Apache-2.0
"""Tensors of a value for each edge that are computed only when something needs their values.

What a layer does with them is recorded as a `Recipe`, with the tensors that it takes:

==============================================  ============================
``x[j]``                                        `GatheredRows`
``x[j] + e``                                    `Edged`
``x[j] * weight``                               `Weighted`
``a[i] + b[j]``, also ``+ e``                   `Sums`
``leaky_relu`` of these                         `AdditiveScores`
``x[i] + y[j]``, also ``+ e``, of features      `Ends`
``leaky_relu`` of these, that times a weight    `Rectified`, `WeightedScores`
the latter summed over features                 `DynamicScores`
``q[i] * k[j]``, also ``q[i] * (k[j] + e)``     `EndProducts`
these summed over features, times a number      `Dots`
the softmax of `AdditiveScores`, `DynamicScores` or `Dots`  `Shares`, also with dropout
``x[j] * shares``, also ``(x[j] + e) * shares`` `Mixed`
==============================================  ============================

Reducing one at targets is an operator of the graph. For everything else they are tensors with values and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import _pytree as pytree

import torch
from sparsetir.errors import StructureError
from sparsetir.torch.graph import SEEDS, Graph
from sparsetir.torch.graph_caches import GraphCache
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)


# ------------------------------------------------------------------ recipes


class Recipe:
    """Computation of values of edges from tensors. Methods return None for values without a recipe."""

    def __call__(self, *tensors: Tensor) -> Tensor:
        raise NotImplementedError

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        """Return the shape of the values."""
        raise NotImplementedError

    def times(self, _tensors: tuple[Tensor, ...], _other: Any) -> Tensor | None:
        """Return the product with another value of edges."""
        return None

    def plus(self, _tensors: tuple[Tensor, ...], _other: Any) -> Tensor | None:
        """Return the sum with another value of edges."""
        return None

    def rectified(self, _tensors: tuple[Tensor, ...], _slope: float) -> Tensor | None:
        """``leaky_relu`` of the values."""
        return None

    def shares(self, _tensors: tuple[Tensor, ...], _graph: Graph) -> Tensor | None:
        """Return the softmax over the edges of each target of a graph."""
        return None

    def scaled(self, _tensors: tuple[Tensor, ...], _factor: float) -> Tensor | None:
        """Return the product with a number."""
        return None

    def dropped(self, _tensors: tuple[Tensor, ...], _rate: float) -> Tensor | None:
        """Return the values of which some are dropped."""
        return None

    def summed(self, _tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the sums over the last axis."""
        return None

    def as_column(self, _tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the values with an axis of length 1 at the end."""
        return None

    def reduced(self, _graph: Graph, _tensors: tuple[Tensor, ...], _reduce: str) -> Tensor | None:
        """Return the values reduced at the targets of a graph."""
        return None


@dataclass(frozen=True, eq=False)
class GatheredRows(Recipe):
    """Rows of x for every edge.

    Parameters
    ----------
    index : Tensor
        The row of each edge.
    is_target : bool or None
        Whether these are the targets of the edges; None where that is not known.
    graphs : GraphCache
    """

    index: Tensor
    is_target: bool | None
    graphs: GraphCache

    def __call__(self, *tensors: Tensor) -> Tensor:
        return tensors[0].index_select(0, self.index)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return (self.index.numel(), *tensors[0].shape[1:])

    def times(self, tensors: tuple[Tensor, ...], other: Any) -> Tensor | None:
        """Return the product with a weight of each edge, or of each edge and head, or with values of the other ends."""
        (x,), shape = tensors, self.shape(*tensors)
        source, shape_of_other = recipe(other), tuple(getattr(other, "shape", ()))
        ends = self._ends(tensors, other)
        if ends is not None and 2 <= x.dim() <= 3:
            return note(EndProducts(*ends[:3]), *ends[3:])
        is_usable = type(other) in PLAIN or isinstance(source, Shares)
        if not is_usable or other.dtype is not x.dtype or not 2 <= x.dim() <= 3 or len(shape_of_other) != x.dim():
            return None
        edges, *heads, last = shape_of_other
        if edges != shape[0] or last != 1 or tuple(heads) not in ((), (1,), shape[1:-1]):
            return None
        if isinstance(source, Shares):
            return note(Mixed(self, source), x, *other.tensors)
        return note(Weighted(self), x, other.flatten() if 1 in heads or x.dim() == 2 else other.squeeze(-1))

    def plus(self, tensors: tuple[Tensor, ...], other: Any) -> Tensor | None:
        """Return the sum with the values of the other ends, or of sources with features of the edges."""
        ends = self._ends(tensors, other)
        if ends is None and self.is_target is False and tensors[0].dim() == 3:
            return _with_edges(Edged(self), tensors, other, most=2)
        if ends is None or ends[3].dim() > 3:
            return None
        return note(Ends(*ends[:3]) if ends[3].dim() == 3 else Sums(ends[0]), *ends[3:])

    def _ends(
        self, tensors: tuple[Tensor, ...], other: Any
    ) -> tuple[Graph, GatheredRows, GatheredRows, Tensor, Tensor] | None:
        """Return the graph whose targets and sources two values of edges belong to, and these, first of the targets."""
        source, (x,) = recipe(other), tensors
        if type(source) is not GatheredRows or {self.is_target, source.is_target} != {True, False}:
            return None
        pair = (self, x), (source, other.tensors[0])
        (at, sources), (to, targets) = pair[::-1] if self.is_target else pair
        if targets.dtype is not sources.dtype or targets.shape[1:] != sources.shape[1:]:
            return None
        graph = self.graphs.of(to.index, at.index, targets.shape[0], sources.shape[0])
        return graph, to, at, targets, sources

    def reduced(self, graph: Graph, tensors: tuple[Tensor, ...], reduce: str) -> Tensor | None:
        return graph.spmm(tensors[0], None, reduce)


@dataclass(frozen=True, eq=False)
class Edged(Recipe):
    """Rows of sources plus features of the edges."""

    rows: GatheredRows

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.rows(tensors[0]) + tensors[1]

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.rows.shape(tensors[0])

    def times(self, tensors: tuple[Tensor, ...], other: Any) -> Tensor | None:
        """Return the product with the values of the targets, or with shares that use the same features of edges."""
        (x, edges), source = tensors, recipe(other)
        ends = self.rows._ends((x,), other)
        if ends is not None:
            return note(EndProducts(*ends[:3]), *ends[3:], edges)
        if not isinstance(source, Shares) or not source.is_column or not isinstance(source.scores, Dots):
            return None
        if len(other.tensors) != 3 or other.tensors[2] is not edges or other.dtype is not x.dtype:
            return None
        return note(Mixed(self.rows, source, True), x, *other.tensors) if x.shape[1:] == edges.shape[1:] else None


@dataclass(frozen=True, eq=False)
class Weighted(Recipe):
    """Rows times a weight, [edges] or [edges, heads]."""

    rows: GatheredRows

    def __call__(self, *tensors: Tensor) -> Tensor:
        x, weight = tensors
        return self.rows(x) * weight.view(*weight.shape, *[1] * (x.dim() - weight.dim()))

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.rows.shape(tensors[0])

    def reduced(self, graph: Graph, tensors: tuple[Tensor, ...], reduce: str) -> Tensor | None:
        return graph.spmm(tensors[0], tensors[1], reduce)


@dataclass(frozen=True, eq=False)
class Sums(Recipe):
    """Sums of the values of both ends of the edges of a graph, and perhaps of the edges themselves."""

    graph: Graph

    def __call__(self, *tensors: Tensor) -> Tensor:
        sums = self.graph.edge_sum(*tensors[:2])
        return sums + tensors[2] if len(tensors) == 3 else sums

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return (self.graph.num_edges, *tensors[0].shape[1:])

    def plus(self, tensors: tuple[Tensor, ...], other: Any) -> Tensor | None:
        return _with_edges(self, tensors, other)

    def rectified(self, tensors: tuple[Tensor, ...], slope: float) -> Tensor | None:
        return note(AdditiveScores(self.graph, slope), *tensors)


def _with_edges(how: Recipe, tensors: tuple[Tensor, ...], other: Any, most: int = 3) -> Tensor | None:
    """Return the sum of values of the ends and values of the edges, which are added at most once."""
    if len(tensors) == most or type(other) not in PLAIN or other.dtype is not tensors[0].dtype:
        return None
    return note(how, *tensors, other) if other.shape == how.shape(*tensors) else None


class Scores(Recipe):
    """Scores of attention: a number for each edge of a graph, or for each edge and head."""

    graph: Graph

    def attended(self, x: Tensor, tensors: tuple[Tensor, ...], **dropping: Any) -> Tensor:
        """Return sums of rows of x by the softmax of scores; without heads x and the tensors have no axis for them."""
        raise NotImplementedError

    def without_heads(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors of one head without the axis of heads."""
        return tuple(t.flatten(1) for t in tensors)

    def shares(self, tensors: tuple[Tensor, ...], graph: Graph) -> Tensor | None:
        return note(Shares(self), *tensors) if graph is self.graph else None


@dataclass(frozen=True, eq=False)
class AdditiveScores(Scores):
    """``leaky_relu`` of sums of the values of both ends."""

    graph: Graph
    slope: float

    def __call__(self, *tensors: Tensor) -> Tensor:
        return functional.leaky_relu(Sums(self.graph)(*tensors), self.slope)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return (self.graph.num_edges, *tensors[0].shape[1:])

    def without_heads(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t.flatten() for t in tensors)

    def attended(self, x: Tensor, tensors: tuple[Tensor, ...], **dropping: Any) -> Tensor:
        targets, sources, *edges = tensors
        edge_values = edges[0] if edges else None
        return self.graph.additive_attention(targets, sources, x, self.slope, edges=edge_values, **dropping)


@dataclass(frozen=True, eq=False)
class Ends(Recipe):
    """Features of both ends of the edges of a graph, added, and perhaps features of the edges themselves."""

    graph: Graph
    to: GatheredRows
    at: GatheredRows

    def __call__(self, *tensors: Tensor) -> Tensor:
        sums = self.to(tensors[0]) + self.at(tensors[1])
        return sums + tensors[2] if len(tensors) == 3 else sums

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.to.shape(*tensors)

    def plus(self, tensors: tuple[Tensor, ...], other: Any) -> Tensor | None:
        return _with_edges(self, tensors, other)

    def rectified(self, tensors: tuple[Tensor, ...], slope: float) -> Tensor | None:
        return note(Rectified(self, slope), *tensors)


@dataclass(frozen=True, eq=False)
class Rectified(Recipe):
    """``leaky_relu`` of such sums."""

    ends: Ends
    slope: float

    def __call__(self, *tensors: Tensor) -> Tensor:
        return functional.leaky_relu(self.ends(*tensors), self.slope)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.ends.shape(*tensors)

    def times(self, tensors: tuple[Tensor, ...], other: Any) -> Tensor | None:
        """Return the product with one weight for all edges."""
        if type(other) not in PLAIN or other.dtype is not tensors[0].dtype:
            return None
        inner = tensors[0].shape[1:]
        return note(WeightedScores(self), *tensors, other) if other.shape in (inner, (1, *inner)) else None


@dataclass(frozen=True, eq=False)
class WeightedScores(Recipe):
    """That times a weight, the last of the tensors."""

    rectified_: Rectified

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.rectified_(*tensors[:-1]) * tensors[-1]

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.rectified_.shape(*tensors)

    def summed(self, tensors: tuple[Tensor, ...]) -> Tensor | None:
        return note(DynamicScores(self.rectified_.ends.graph, self), *tensors)


@dataclass(frozen=True, eq=False)
class DynamicScores(Scores):
    """That summed over features."""

    graph: Graph
    weighed: WeightedScores

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.weighed(*tensors).sum(-1)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.weighed.shape(*tensors)[:-1]

    def attended(self, x: Tensor, tensors: tuple[Tensor, ...], **dropping: Any) -> Tensor:
        targets, sources, *edges, weight = tensors
        slope, weight = self.weighed.rectified_.slope, weight.view(targets.shape[1:])
        edge_values = edges[0] if edges else None
        return self.graph.dynamic_attention(targets, sources, weight, x, edge_values, slope, **dropping)


@dataclass(frozen=True, eq=False)
class EndProducts(Recipe):
    """Features of both ends of the edges of a graph, multiplied; those of the edges may be added to the sources."""

    graph: Graph
    to: GatheredRows
    at: GatheredRows

    def __call__(self, *tensors: Tensor) -> Tensor:
        sources = self.at(tensors[1])
        return self.to(tensors[0]) * (sources + tensors[2] if len(tensors) == 3 else sources)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.to.shape(*tensors)

    def summed(self, tensors: tuple[Tensor, ...]) -> Tensor | None:
        return note(Dots(self.graph, self.to), *tensors)


@dataclass(frozen=True, eq=False)
class Dots(Scores):
    """Dot products along the edges of a graph, times a number."""

    graph: Graph
    to: GatheredRows
    factor: float = 1.0

    def __call__(self, *tensors: Tensor) -> Tensor:
        dots = self.graph.sddmm(*tensors[:2])
        dots = dots + (self.to(tensors[0]) * tensors[2]).sum(-1) if len(tensors) == 3 else dots
        return dots if self.factor == 1 else dots * self.factor

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return (self.graph.num_edges, *tensors[0].shape[1:-1])

    def scaled(self, tensors: tuple[Tensor, ...], factor: float) -> Tensor | None:
        return note(replace(self, factor=self.factor * factor), *tensors)

    def attended(self, x: Tensor, tensors: tuple[Tensor, ...], **dropping: Any) -> Tensor:
        """Attend as `Scores.attended` says; features of edges are added to x as well."""
        is_usual = math.isclose(self.factor, max(tensors[0].shape[-1], 1) ** -0.5)
        q, k, *edges = tensors
        edge_values = edges[0] if edges else None
        return self.graph.attention(q, k, x, None if is_usual else self.factor, edges=edge_values, **dropping)


@dataclass(frozen=True, eq=False)
class Shares(Recipe):
    """The softmax of scores, perhaps with an axis of length 1 at the end.

    Parameters
    ----------
    scores : Scores
    is_column : bool
    rate : float
        The probability with which each is dropped.
    seed : Tensor or None
        Determines which are.
    """

    scores: Scores
    is_column: bool = False
    rate: float = 0.0
    seed: Tensor | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        graph = self.scores.graph
        shares = graph.softmax(self.scores(*tensors))
        shares = graph.dropout(shares, **self.dropping) if self.rate else shares
        return shares.unsqueeze(-1) if self.is_column else shares

    @property
    def dropping(self) -> dict[str, Any]:
        """The arguments of operators of graphs."""
        return {"dropout": self.rate, "seed": self.seed}

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return (*self.scores.shape(*tensors), *[1] * self.is_column)

    def as_column(self, tensors: tuple[Tensor, ...]) -> Tensor | None:
        return None if self.is_column else note(replace(self, is_column=True), *tensors)

    def dropped(self, tensors: tuple[Tensor, ...], rate: float) -> Tensor | None:
        return None if self.rate else note(replace(self, rate=rate, seed=torch.randint(SEEDS, (1,))), *tensors)


@dataclass(frozen=True, eq=False)
class Mixed(Recipe):
    """Rows times such shares; if `is_edged`, the features of edges that the scores use are added to the rows."""

    rows: GatheredRows
    weight: Shares
    is_edged: bool = False

    def __call__(self, *tensors: Tensor) -> Tensor:
        x, *operands = tensors
        selected = self.rows(x)
        return (selected + operands[2] if self.is_edged else selected) * self.weight(*operands)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        return self.rows.shape(tensors[0])

    def reduced(self, graph: Graph, tensors: tuple[Tensor, ...], reduce: str) -> Tensor | None:
        """Attention, where the same edges are summed over; a product with the shares otherwise."""
        (x, *operands), scores = tensors, self.weight.scores
        heads = scores.shape(*operands)[1:]
        is_flat = x.dim() == 2 or heads == (1,)
        is_same = graph is scores.graph and reduce in ("sum", "add")
        if self.is_edged and not is_same:
            return None
        is_fit = self.is_edged or not isinstance(scores, Dots) or len(operands) == 2
        if not is_same or not is_fit:
            weight = self.weight(*operands)
            return graph.spmm(x, weight.flatten() if is_flat else weight.squeeze(-1), reduce)
        dropping = self.weight.dropping
        if not is_flat:
            return scores.attended(x, tuple(operands), **dropping)
        alone = scores.without_heads(tuple(operands)) if heads else tuple(operands)
        return scores.attended(x.flatten(1), alone, **dropping).view(-1, *x.shape[1:])


# ------------------------------------------------------------------ deferred tensors


class DeferredEdges(Tensor):
    """Values of edges by their recipe; computed once, as soon as they are used."""

    recipe: Recipe
    tensors: tuple[Tensor, ...]
    made: Tensor | None
    versions: list[int] | None

    def tensor(self) -> Tensor:
        """Return the values, with gradients of what they are computed from."""
        if self.made is None:
            if self.versions != _versions(self.tensors):
                raise StructureError(
                    "what messages are made of was changed in place after they were made, and they are used only now: "
                    "use the messages before the change, or change a copy"
                )
            self.made = self.recipe(*self.tensors)
        return self.made

    @property
    def is_usual(self) -> bool:
        """True while neither the values nor their operands were changed otherwise than by the recipe."""
        tensor = self.made
        if self.versions != _versions(self.tensors):
            return False
        return tensor is None or not (
            tensor.is_inference() or tensor._version or tensor._backward_hooks or tensor.retains_grad
        )

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = KNOWN[func](*args, **kwargs) if func in KNOWN else None
        return func(*_values(args), **_values(kwargs)) if result is None else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_values(args), **_values(kwargs or {}))


class _Note(Function):
    """Make a deferred tensor; its gradient, if it is needed, is that of its recipe."""

    @staticmethod
    def forward(ctx: Any, how: Recipe, *tensors: Tensor) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(*tensors)
        kind: Any = {"dtype": tensors[0].dtype, "device": tensors[0].device}
        return Tensor._make_wrapper_subclass(DeferredEdges, how.shape(*tensors), **kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        leaves = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.how(*leaves)
        gradients = iter(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], g))
        return None, *(next(gradients) if n else None for n in needed)


def note(how: Recipe, *tensors: Tensor) -> DeferredEdges:
    """Return the values of edges that a recipe makes of tensors."""
    deferred: Any = _Note.apply(how, *tensors)
    deferred.recipe, deferred.tensors, deferred.made, deferred.versions = how, tensors, None, _versions(tensors)
    return deferred


def recipe(value: Any) -> Recipe | None:
    """Return how a deferred value is computed; None for other values."""
    return value.recipe if type(value) is DeferredEdges and value.is_usual else None


def values(value: Any) -> Any:
    """Return the values of a deferred tensor; other objects as they are."""
    return value.tensor() if type(value) is DeferredEdges else value


def _values(nested: Any) -> Any:
    return pytree.tree_map(values, nested)


def _versions(tensors: tuple[Tensor, ...]) -> list[int] | None:
    return None if any(t.is_inference() for t in tensors) else [t._version for t in tensors]


# ------------------------------------------------------------------ functions of torch that have recipes


def _product(one: Any, other: Any = None, **options: Any) -> Any:
    for first, second in ((one, other), (other, one)):
        source = recipe(first)
        multiply = None if source is None else source.scaled if isinstance(second, (int, float)) else source.times
        result = None if multiply is None or options else multiply(first.tensors, second)
        if result is not None:
            return result
    return None


def _sum(one: Any, other: Any = None, **options: Any) -> Any:
    for first, second in ((one, other), (other, one)):
        source = recipe(first)
        result = None if source is None or options else source.plus(first.tensors, second)
        if result is not None:
            return result
    return None


def _quotient(one: Any, other: Any = None, **options: Any) -> Any:
    source = recipe(one)
    if source is None or options or not isinstance(other, (int, float)) or not other:
        return None
    return source.scaled(one.tensors, 1 / other)


def _total(input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    source = recipe(input)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if source is None or options or keepdim or dim not in (-1, input.dim() - 1):
        return None
    return source.summed(input.tensors)


def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    source = recipe(input)
    return None if source is None or inplace else source.rectified(input.tensors, float(negative_slope))


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if p == 0 or (not training and 0 <= p <= 1):
        return input
    source = recipe(input)
    return None if source is None or inplace or not 0 < p <= 1 else source.dropped(input.tensors, float(p))


def _unsqueeze(input: Any, dim: int) -> Any:
    source = recipe(input)
    return None if source is None or dim not in (-1, input.dim()) else source.as_column(input.tensors)


def _getitem(input: Any, index: Any) -> Any:
    is_column = isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and index[1] is None
    return _unsqueeze(input, -1) if is_column else None


def _view(input: Any, *shape: Any, **options: Any) -> Any:
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if options or not all(isinstance(n, int) for n in shape):
        return None
    whole = (*input.shape, 1)
    return _unsqueeze(input, -1) if shape in (whole, (-1, *whole[1:])) and whole[0] else None


KNOWN: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), _product
    ),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _sum),
    **dict.fromkeys(
        (torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__),
        _quotient,
    ),
    **dict.fromkeys((torch.sum, Tensor.sum), _total),
    functional.leaky_relu: _leaky_relu,
    functional.dropout: _dropout,
    **dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze), _unsqueeze),
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
}
METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.__len__,
    Tensor.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_cpu", "is_cuda")
    ),
}


__all__ = ["PLAIN", "DeferredEdges", "GatheredRows", "note", "recipe", "values"]
