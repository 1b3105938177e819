# SPDX-License-Identifier: Apache-2.0
"""Operations of `sparsetir.torch.Graph`, and layers such as `SparseLinear`, in models that are traced for Relax.

torch sees each as one call of ``sparsetir::along_rows`` with the name of a method. While `from_torch` traces a model,
such a call is written with the operators of `register_torch_ops` instead, which stay sparse. The structure is constant.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparsetir.errors import LoweringError
from sparsetir.relax.torch_import.operators import NAMESPACE, register_torch_ops

ALONG_ROWS = f"{NAMESPACE}::along_rows"


def operator_name(func: Any) -> str:
    """Return the name of a torch operator without its overload, or an empty string for any other function."""
    return str(getattr(func, "_qualified_op_name", "") or getattr(func, "_name", "")).partition(".")[0]


def along_rows(
    indptr: Any,
    indices: Any,
    rows: int,
    columns: int,
    there: Any,
    back: Any,
    method: str,
    tensors: list[Any],
    reduce: str = "",
    scale: float | None = None,
    dropout: float = 0.0,
    activation: str = "",
) -> Any:
    """Write a method of a graph with the operators of `register_torch_ops`.

    Raises
    ------
    LoweringError
        The method, or its dropout, is not supported in a model for `from_torch`.
    """
    if method not in METHODS or dropout:
        description = f"{method} with dropout" if dropout else method
        raise LoweringError(
            f"Graph.{description}: expected one of {', '.join(METHODS)} in a model for from_torch. Write it with these."
        )
    graph = Rows(indptr, indices, rows, columns, there, back)
    if method == "spmm":
        x, weight, *bias = tensors
        y = graph.spmm(x, weight, reduce or "sum")
        y = y if not bias or bias[0] is None else y + bias[0]
        return y.relu() if activation else y
    return graph.attention(*tensors, scale=scale) if method == "attention" else METHODS[method](graph, *tensors)


@dataclass(frozen=True)
class Rows:
    """The structure of a graph, as torch traces it."""

    indptr: Any
    indices: Any
    rows: int
    columns: int
    there: Any
    back: Any

    def by_rows(self, edges: Any) -> Any:
        """Permute values of edges into row order."""
        return edges if self.there is None else edges.index_select(0, self.there)

    def as_given(self, edges: Any) -> Any:
        """Permute values of edges from row order into the order in which the graph was given."""
        return edges if self.back is None else edges.index_select(0, self.back)

    def linear(self, values: Any, x: Any) -> Any:
        return register_torch_ops().linear(x, self.by_rows(values), self.indptr, self.indices)

    def spmm(self, x: Any, weight: Any, reduce: str = "sum") -> Any:
        edges = x.new_ones(self.indices.shape[0]) if weight is None else self.by_rows(weight)
        return self._sums(edges, x, reduce)

    def _sums(self, edges: Any, x: Any, reduce: str) -> Any:
        torch, operators = importlib.import_module("torch"), register_torch_ops()
        if edges.dim() == 2:
            heads = range(edges.shape[1])
            return torch.stack([self._sums(edges[:, h].contiguous(), x[:, h], reduce) for h in heads], dim=1)
        flat = x.reshape(self.columns, math.prod(x.shape[1:]))
        if reduce in ("sum", "mean"):
            y = operators.spmm(edges, self.indptr, self.indices, flat)
            counts = (self.indptr[1:] - self.indptr[:-1]).clamp(min=1).to(y.dtype) if reduce == "mean" else None
            y = y if counts is None else y / counts.unsqueeze(1)
        else:
            values = flat.index_select(0, self.indices) * edges.unsqueeze(1)
            y = operators.segment_reduce(values, self.indptr, reduce)
        return y.reshape(self.rows, *x.shape[1:])

    def softmax(self, scores: Any) -> Any:
        return self.as_given(self._shares(self.by_rows(scores)))

    def sddmm(self, q: Any, k: Any) -> Any:
        return self.as_given(self._scores(q, k))

    def attention(self, q: Any, k: Any, v: Any, *edges: Any, scale: float | None = None) -> Any:
        scores = self._scores(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores + self.by_rows(edges[0]) if edges and edges[0] is not None else scores
        return self._sums(self._shares(scores), v, "sum")

    def _shares(self, scores: Any) -> Any:
        operators = register_torch_ops()
        return _each_head(lambda s: operators.softmax(s, self.indptr), 1, scores)

    def _scores(self, q: Any, k: Any) -> Any:
        operators = register_torch_ops()
        ones = q.new_ones(self.indices.shape[0])
        return _each_head(lambda a, b: operators.sddmm(ones, self.indptr, self.indices, a, b), 2, q, k)


def _each_head(compute: Callable[..., Any], rank: int, *tensors: Any) -> Any:
    """Apply `compute` to tensors of a given rank, or to each head (dimension 1) of tensors with one dimension more."""
    if tensors[0].dim() == rank:
        return compute(*tensors)
    torch = importlib.import_module("torch")
    heads = range(tensors[0].shape[1])
    return torch.stack([compute(*(t[:, h].contiguous() for t in tensors)) for h in heads], dim=1)


METHODS: dict[str, Callable[..., Any]] = {
    "linear": Rows.linear,
    "spmm": Rows.spmm,
    "softmax": Rows.softmax,
    "sddmm": Rows.sddmm,
    "attention": Rows.attention,
}


__all__ = ["ALONG_ROWS", "along_rows", "operator_name"]
