# SPDX-License-Identifier: Apache-2.0
"""A graph for training with torch: its structure once, and operators with gradients along its edges."""

from __future__ import annotations

import math
import sys
from functools import reduce
from typing import Any

import numpy as np
from torch.nn.functional import linear

import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.interop.sources import TRANSFORMED
from sparsetir.ir.halves import check_precision
from sparsetir.torch import functions, structure
from sparsetir.torch.programs import Sizes
from sparsetir.utils.arguments import as_flag, is_real, shown
from torch import Tensor

FEATURES: Sizes = (("K", None),)
SEEDS = 1 << 32
SUMS = {"sum": False, "add": False, "mean": True}  # is the sum divided by the count?
EXTREMES = {"max": "max", "amax": "max", "min": "min", "amin": "min"}


class Graph(functions.GraphOrientations):
    """The edges of a graph, for sums, softmax and attention along them in forward and backward.

    An edge leads from a column (source) to a row (target): a product sums what sources have at their targets, as
    ``A @ x`` does. The structure is copied and laid out by rows; gradients need it by columns, which is made when one
    is first asked for. A graph does not change; it can be pickled, copied, and used in several threads.

    Parameters
    ----------
    graph : sparse matrix, Tensor or ndarray
        A matrix of scipy or torch (CSR, CSC, COO), m x n; or a dense one of floats or bools, whose nonzeros are edges;
        or an edge index of integers [2, edges], sources above targets, as torch_geometric has it. Edges may repeat and
        come in any order.
    num_nodes : int or (int, int), optional
        Of an edge index: how many nodes there are, or how many sources and targets. Default: those up to the largest.

    Attributes
    ----------
    shape : (int, int)
        Rows (targets) and columns (sources).
    num_edges : int
    is_symmetric : bool
        Whether each edge has one in the other direction: then columns have the index arrays of rows.
    weight : Tensor or None
        The values of a matrix of floats, in its order; what `spmm` multiplies with where no other weight is given.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        `graph` is none of these, or requires a gradient, or has another shape than `num_nodes` says.
    StructureError
        Indices out of range.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> graph = sparsetir.torch.Graph(torch.tensor([[0, 1, 2], [1, 1, 0]]))
    >>> x = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    >>> graph.spmm(x).flatten().tolist()
    [3.0, 3.0, 0.0]
    >>> graph.spmm(x, reduce="max").sum().backward()
    >>> x.grad.flatten().tolist()
    [0.0, 1.0, 1.0]
    """

    def __init__(self, graph: Any, num_nodes: Any = None) -> None:
        edges = structure.read(graph, num_nodes)
        self.shape, self.weight = edges.shape, edges.values
        self.rows, order = edges.compressed()
        self.rows.watched = structure.versions(graph)
        self._precise: dict[str, functions.PreciseGraph] = {}
        self.there: Tensor | None = None  # of entries of rows, the user's edges
        self.back: Tensor | None = None
        if order is not None:
            back = np.empty_like(order)
            back[order] = np.arange(order.size, dtype=order.dtype)
            self.there, self.back = torch.from_numpy(order), torch.from_numpy(back)

    @classmethod
    def of_rows(cls, rows: structure.GraphRows, there: Tensor | None, back: Tensor | None) -> Graph:
        """Return the graph with these rows, without a weight."""
        graph = object.__new__(cls)
        graph.rows, graph.shape, graph.weight, graph.there, graph.back = (
            rows,
            (rows.rows, rows.columns),
            None,
            there,
            back,
        )
        graph._precise = {}
        return graph

    @property
    def num_edges(self) -> int:
        return int(self.rows.indices.size)

    @property
    def is_symmetric(self) -> bool:
        return self.columns.indices is self.rows.indices

    @property
    def is_sorted(self) -> bool:
        """Whether the edges were given in the order of rows."""
        return self.there is None

    @property
    def edge_index(self) -> Tensor:
        """Sources and targets of all edges in the order of rows, [2, edges] of int64.

        Of a graph that is made of these, values of edges need not be brought into another order.
        """
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.rows.indptr))
        return torch.from_numpy(np.stack([self.rows.indices.astype(np.int64), rows]))

    def __repr__(self) -> str:
        weighted = "" if self.weight is None else f", weight: {functions.NAMES.get(self.weight.dtype)}"
        return f"Graph({self.shape[0]} x {self.shape[1]}, {self.num_edges} edges{weighted})"

    def weighted(self, weight: Tensor | None) -> Graph:
        """Return the same graph with another default weight of edges, or with none; the structure is shared."""
        graph = object.__new__(Graph)
        vars(graph).update(vars(self), weight=weight)
        return graph

    def __deepcopy__(self, _memo: Any) -> Graph:
        return self.weighted(None if self.weight is None else self.weight.detach().clone())

    def in_precision(self, precision: str | None) -> functions.GraphOrientations:
        """Return the graph for products in a precision of float32."""
        if precision is None:
            return self
        if precision not in self._precise:
            self._precise[precision] = functions.PreciseGraph(functions.PreciseRows(self.rows, precision), self.shape)
        return self._precise[precision]

    # ------------------------------------------------------------------ operators

    def spmm(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        reduce: str = "sum",
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
        precision: str | None = None,
    ) -> Tensor:
        """Reduce values of the sources of each row: ``y[i] = reduce_j weight[i, j] * x[j]``; 0 where there are none.

        Parameters
        ----------
        x : Tensor
            [n, ...]; [n, heads, features] for weights of several heads.
        weight : Tensor, optional
            Of edges, in the order in which the graph was given: [edges], or [edges, heads]. Default: `Graph.weight`,
            or 1.
        reduce : {"sum", "mean", "max", "min"}
            Means divide by the number of edges. Equal maxima share a gradient evenly.
        bias : Tensor, optional
            Added to each row, also to those without edges; of the shape of a row of `x`.
        activation : {"relu"}, optional
            Of the result: sums and means, the bias and it are one kernel.
        precision : {"bf16x3"}, optional
            Of sums and means of float32 with weights: they and their gradients are computed by three products of
            bfloat16 numbers, as `sparsetir.ops.spmm` does.

        Returns
        -------
        Tensor
            [m, ...], of the dtype of `x`. Integers and bools have no means; sums of bools tell whether one is true.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            Tensors of other dtypes, devices or shapes; a precision for another product.
        """
        weight = self.weight if weight is None else weight
        x, weight, bias = _alike(x, weight, bias)
        _check_precision(precision, x)
        if activation is not None and (not isinstance(activation, str) or activation != "relu"):
            raise ArgumentError(f'activation is None or "relu", got {shown(activation)}')
        if self.is_to_trace(x):
            options = {"activation": activation or "", "precision": precision or ""}
            return self._traced("spmm", [x, weight, bias], reduce=reduce, **options)
        if isinstance(x, Tensor) and x.dtype in functions.WHOLE:
            return self._whole_spmm(x, weight, reduce, bias, activation)
        self._check(x=x, weight=weight, bias=bias)
        self._check_nodes("x", x, self.shape[1])
        if bias is not None and (bias.shape != x.shape[1:] or bias.dtype is not x.dtype):
            raise ArgumentError(f"bias is {_shown(bias)}, expected the shape and dtype of a row of x, {_shown(x)}")
        edges = None if weight is None else self._own if weight is self.weight else self.by_rows(weight)
        if edges is not None and edges.dtype is not x.dtype:
            raise ArgumentTypeError(f"x and weight must have one dtype; x is {x.dtype} and weight is {edges.dtype}")
        x, inner, shape = self._product(x.contiguous(), edges)
        if not isinstance(reduce, str) or (reduce not in SUMS and reduce not in EXTREMES):
            raise ArgumentError(f'reduce is one of "sum", "mean", "max" and "min", got {shown(reduce)}')
        is_mean = SUMS.get(reduce)
        if precision is not None and (is_mean is not False or edges is None or inner != FEATURES):
            y = self._precise_spmm(x, edges, inner, reduce, precision).view(shape)
            y = y if bias is None else y + bias
            return y.relu() if activation else y
        if is_mean is not None:
            flat = None if bias is None else bias.reshape(x.shape[1:])
            graph = self.in_precision(precision)
            y = functions.SpMM.apply(graph, inner, is_mean, activation or "", edges, x, flat)
            return y if len(shape) == y.dim() else y.view(shape)
        y = functions.Extreme.apply(self, inner, EXTREMES[reduce], edges, x).view(shape)
        y = y if bias is None else y + bias
        return y.relu() if activation else y

    def _precise_spmm(self, x: Tensor, edges: Tensor | None, inner: Sizes, reduce: str, precision: str) -> Tensor:
        """Compute sums or means of products in another precision, of one head at a time: units have no heads."""
        if edges is None or reduce not in SUMS or "K" not in dict(inner):
            fault = "precision: expected None but for sums and means of rows of x, which weights multiply"
            raise ArgumentError(f"{fault}, got {shown(precision)}. Leave it out.")
        graph = self.in_precision(precision)
        products = [
            functions.SpMM.apply(graph, FEATURES, False, "", w.contiguous(), part.contiguous(), None)
            for w, part in ([(edges, x)] if inner == FEATURES else zip(edges.unbind(1), x.unbind(1), strict=True))
        ]
        if inner == FEATURES:
            y = products[0]
        else:
            y = torch.stack(products, 1) if products else x[:0].sum(0, keepdim=True)
        share = self.rows.share(x.dtype) if SUMS[reduce] else None
        return y if share is None else y * share.view(-1, *[1] * (y.dim() - 1))

    def _whole_spmm(self, x: Tensor, weight: Tensor | None, reduce: Any, bias: Any, activation: Any) -> Tensor:
        """Reduce integers or bools, in their own dtype: sums wrap around, sums of bools tell whether one is true."""
        self.rows.check()
        for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
            is_tensor = isinstance(tensor, Tensor) and tensor.is_cpu and tensor.layout is torch.strided
            if tensor is not None and not (is_tensor and tensor.dtype is x.dtype):
                fault = f"{name}: expected a dense tensor of {x.dtype} on the cpu, got {_shown(tensor)}"
                raise ArgumentTypeError(f"{fault}. Convert it, or pass x.float().")
        if bias is not None and bias.shape != x.shape[1:]:
            raise ArgumentError(f"bias is {_shown(bias)}, expected the shape and dtype of a row of x, {_shown(x)}")
        self._check_nodes("x", x, self.shape[1])
        if not isinstance(reduce, str) or reduce not in ("sum", "add", *EXTREMES):
            raise ArgumentError(f'reduce is "sum", "max" or "min" for {x.dtype}, got {shown(reduce)}: pass x.float()')
        edges = None if weight is None else self.by_rows(weight)
        x, inner, shape = self._product(x.contiguous(), edges)
        options = (EXTREMES.get(reduce, "sum"), edges is not None, "")
        y = self.rows.run("spmm", functions.WHOLE[x.dtype], inner, *options, w_data=edges, X=x).view(shape)
        if bias is not None:
            y = y + bias
        return y.relu() if activation else y

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        reduce: str = "sum",
        activation: str | None = None,
        *,
        precision: str | None = None,
    ) -> Tensor:
        """Return a layer ``activation(A @ x @ weight.T + bias)``, A the graph with its own weight; or means, maxima.

        Sums and means are multiplied by the weight before or after, whichever makes the sums narrower. Sums of features
        that are constant are computed once: they are kept when the same ones come again, as long as these live, and
        made again where they or the weight of the graph were changed in place.

        Parameters
        ----------
        x : Tensor
            [n, inputs].
        weight : Tensor
            [outputs, inputs], as that of ``torch.nn.Linear``.
        bias : Tensor, optional
            [outputs].
        reduce : {"sum", "mean", "max", "min"}
        activation : {"relu"}, optional
        precision : {"bf16x3"}, optional
            Of the sums along edges, as in `spmm`. The product with `weight` stays in float32.

        Returns
        -------
        Tensor
            [m, outputs].
        """
        if not isinstance(weight, Tensor) or not isinstance(x, Tensor) or x.dim() != 2 or weight.dim() != 2:
            description = " and ".join(map(_described, (x, weight)))
            raise ArgumentError(f"expected x of [n, inputs] and weight of [outputs, inputs], got {description}")
        if activation is not None and (not isinstance(activation, str) or activation != "relu"):
            raise ArgumentError(f'activation is None or "relu", got {shown(activation)}')
        if bias is not None and not (isinstance(bias, Tensor) and bias.shape == weight.shape[:1]):
            raise ArgumentError(f"bias: expected a tensor of [{weight.shape[0]}], got {_described(bias)}. Pass one.")
        if x.shape[1] != weight.shape[1]:
            fault = f"expected weight of [outputs, {x.shape[1]}] for x of {_shown(x)}, got {_shown(weight)}"
            raise ArgumentError(f"{fault}. Pass the weight of a layer with as many inputs.")
        if not torch.is_autocast_enabled("cpu") and not self.is_to_trace(x):
            _check_precision(precision, x)
            self._check(x=x, weight=weight, bias=bias)
            if not all(t.dtype is x.dtype for t in (weight, bias) if t is not None):
                raise ArgumentTypeError(
                    f"expected tensors of one dtype, got {_shown(x)} and {_shown(weight)}. Convert."
                )
        if not isinstance(reduce, str) or (reduce not in SUMS and reduce not in EXTREMES):
            raise ArgumentError(f'reduce is one of "sum", "mean", "max" and "min", got {shown(reduce)}')
        sums = self._sums_of_constant(x, reduce, precision)
        if sums is None and (reduce in EXTREMES or x.shape[1] < weight.shape[0]):
            sums = self.spmm(x, reduce=reduce, precision=precision)
        if sums is None:
            options: dict[str, Any] = {"bias": bias, "activation": activation, "precision": precision}
            return self.spmm(self._linear(x, weight), None, reduce, **options)
        y = linear(sums, weight, bias)
        return y.relu_() if activation else y

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return a dense layer of all nodes, in whose gradients only nodes with edges count."""
        is_wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if not is_wanted or self.is_to_trace(x) or torch._C._are_functorch_transforms_active():
            return linear(x, weight)
        if torch.is_autocast_enabled("cpu") or x.dtype is not weight.dtype or self.rows.unread is None:
            return linear(x, weight)
        return functions.ReadLinear.apply(self.rows.unread, x, weight)

    def _sums_of_constant(self, x: Tensor, reduce: str, precision: str | None) -> Tensor | None:
        """Return the sums of features that came before as well and that nothing changes; None of others."""
        tensors = (x,) if self.weight is None else (x, self.weight)
        if self.is_to_trace(x) or torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        if not all(type(t) is Tensor and not t.requires_grad and not t.is_inference() for t in tensors):
            return None
        name = f"{reduce} {precision}"
        return self.rows.kept.of(name, tensors, lambda: self.spmm(x, reduce=reduce, precision=precision))

    def sddmm(self, q: Tensor, k: Tensor, *, precision: str | None = None) -> Tensor:
        """Dot products along edges: ``s[i, j] = sum_d q[i, d] * k[j, d]``.

        Parameters
        ----------
        q, k : Tensor
            [m, features] and [n, features], or [m, heads, features] and [n, heads, features].
        precision : {"bf16x3"}, optional
            For float32: as for `sparsetir.ops.spmm`, also of both gradients.

        Returns
        -------
        Tensor
            [edges] or [edges, heads], in the order in which the graph was given.
        """
        q, k = _alike(q, k)
        _check_precision(precision, q)
        if self.is_to_trace(q):
            return self._traced("sddmm", [q, k], precision=precision or "")
        self._check(q=q, k=k)
        inner = self._pair("q", q, "k", k)
        graph = self.in_precision(precision)
        if precision is None or inner == FEATURES or not q.shape[1]:
            return self.as_given(functions.SDDMM.apply(graph, inner, None, q.contiguous(), k.contiguous()))
        # Units multiply the gradients, sums of rows, of one head at a time.
        heads = zip(q.unbind(1), k.unbind(1), strict=True)
        parts = [functions.SDDMM.apply(graph, FEATURES, None, a.contiguous(), b.contiguous()) for a, b in heads]
        return self.as_given(torch.stack(parts, 1))

    def edge_sum(self, targets: Tensor, sources: Tensor) -> Tensor:
        """Add the values of both ends of each edge: ``s[i, j] = targets[i] + sources[j]``.

        Parameters
        ----------
        targets, sources : Tensor
            [m] and [n], or [m, heads] and [n, heads].

        Returns
        -------
        Tensor
            [edges] or [edges, heads], in the order in which the graph was given.
        """
        targets, sources = _alike(targets, sources)
        if self.is_to_trace(targets):
            return self._traced("edge_sum", [targets, sources])
        self._check(targets=targets, sources=sources)
        self._pair("targets", targets, "sources", sources, ranks=(1, 2))
        ends = (targets.contiguous(), sources.contiguous())
        return self.as_given(functions.EdgeSum.apply(self, functions.heads_of(targets), *ends))

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the softmax over the edges of each row.

        Parameters
        ----------
        scores : Tensor
            [edges] or [edges, heads], in the order in which the graph was given.

        Returns
        -------
        Tensor
            Of the same shape and order.
        """
        if self.is_to_trace(scores):
            return self._traced("softmax", [scores])
        self._check(scores=scores)
        edges = self.by_rows(scores, "scores")
        return self.as_given(functions.Softmax.apply(self, functions.heads_of(scores), edges))

    def dropout(
        self, values: Tensor, dropout: float = 0.5, *, training: bool = True, seed: Tensor | None = None
    ) -> Tensor:
        """Values of edges of which some are dropped, and the others divided by ``1 - dropout``.

        A seed and the place of an edge determine whether it is dropped, so that gradients need no mask. Attention drops
        the same shares with the same seed, or the same state of torch's generator.

        Parameters
        ----------
        values : Tensor
            [edges] or [edges, heads], in the order in which the graph was given.
        dropout : float
            The probability of each.
        training : bool
            Whether anything is dropped.
        seed : Tensor, optional
            One integer of 64 bits, of which 32 count. Default: from torch's generator, see ``torch.manual_seed``.

        Returns
        -------
        Tensor
            Of the same shape and order.
        """
        rate, seed = _dropping(dropout, training, seed)
        if self.is_to_trace(values):
            return self._traced("dropout", [values], dropout=rate, seed=seed)
        self._check(values=values)
        edges = self.by_rows(values, "values")
        if not rate:
            return values
        return self.as_given(functions.Dropout.apply(self, functions.heads_of(values), rate, edges, seed))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        *,
        edges: Tensor | None = None,
        dropout: float = 0.0,
        training: bool = True,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Attention of each row over its sources: ``y[i] = sum_j softmax_j(scale * q[i] k[j]) * v[j]``.

        Edges that fill blocks of 16 to 64 rows and columns, as those of block and window masks do, are computed in
        products of blocks; other ones one by one.

        Parameters
        ----------
        q, k, v : Tensor
            [m, features], [n, features] and [n, out], or each with heads, [m, heads, features], or with heads and
            batches, [..., m, heads, features].
        scale : float or Tensor, optional
            A number, which may be trained. Default: ``features ** -0.5``.
        edges : Tensor, optional
            What edges add to ``k[j]`` and to ``v[j]``, whose features are as many then, as in TransformerConv: [edges,
            features] or [edges, heads, features], in the order in which the graph was given.
        dropout, training, seed
            Of the shares of edges, after the softmax; see `dropout`. Nothing as large as these is kept for it.

        Returns
        -------
        Tensor
            [m, out], [m, heads, out] or [..., m, heads, out]; 0 for rows without edges.
        """
        q, k, v, edges = _alike(q, k, v, edges)
        if isinstance(q, Tensor) and q.dim() > 3:
            options = {"dropout": dropout, "training": training, "seed": seed}
            return self._attention_of_batches(q, k, v, scale, edges, options)
        q, scale = _scaled(q, scale)
        rate, seed = _dropping(dropout, training, seed)
        if self.is_to_trace(q):
            return self._traced("attention", [q, k, v, edges], scale=scale, dropout=rate, seed=seed)
        self._check(q=q, k=k, v=v, edges=edges)
        inner = self._pair("q", q, "k", k)
        self._check_nodes("v", v, self.shape[1])
        if v.dim() != q.dim() or v.dtype is not q.dtype or v.shape[1:-1] != q.shape[1:-1]:
            raise ArgumentError(f"v is {_shown(v)}, expected the dtype and the heads of q, {_shown(q)}")
        if edges is not None:
            if edges.shape[1:] != q.shape[1:] or v.shape[1:] != q.shape[1:] or edges.dtype is not q.dtype:
                description = f"edges of {_shown(edges)} and v of {_shown(v)}"
                raise ArgumentError(f"expected edges and v with rows as those of q, {_shown(q)}, got {description}")
            edges = self.by_rows(edges, "edges", ranks=(2, 3))
        out: Sizes = (("D", v.shape[-1] if v.dim() == 3 else None),)
        scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
        return functions.Attention.apply(self, inner + out, (scale, rate), q, k, v, edges, seed)

    def _attention_of_batches(self, q: Tensor, k: Any, v: Any, scale: Any, edges: Any, options: Any) -> Tensor:
        """Compute attention with batches as further heads."""
        if edges is not None:
            raise ArgumentError("edges: expected None for q, k and v with batches. Call attention for each batch.")
        outer = (*q.shape[:-3], q.shape[-2])
        for name, tensor in (("k", k), ("v", v)):
            if not isinstance(tensor, Tensor) or (*tensor.shape[:-3], *tensor.shape[-2:-1]) != outer:
                described = _shown(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
                expected = f"the batches and heads of q, {_shown(q)}"
                raise ArgumentError(f"{name}: expected {expected}, got {described}. Expand it.")
        q, k, v = (t.movedim(-3, 0).flatten(1, -2) for t in (q, k, v))
        y = self.attention(q, k, v, scale, **options)
        return y.unflatten(1, outer).movedim(0, -3)

    def additive_attention(
        self,
        targets: Tensor,
        sources: Tensor,
        v: Tensor,
        slope: float = 0.2,
        *,
        edges: Tensor | None = None,
        dropout: float = 0.0,
        training: bool = True,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Attention as in GAT: ``y[i] = sum_j softmax_j(leaky_relu(targets[i] + sources[j] + edges[ij])) * v[j]``.

        Parameters
        ----------
        targets, sources : Tensor
            [m] and [n], or [m, heads] and [n, heads].
        v : Tensor
            [n, out], or [n, heads, out].
        slope : float
            Of ``leaky_relu`` below zero.
        edges : Tensor, optional
            What edges add to the sum of both ends, [edges] or [edges, heads], in the order in which the graph was
            given.
        dropout, training, seed
            Of the shares of edges, after the softmax; see `dropout`. Nothing as large as these is kept for it.

        Returns
        -------
        Tensor
            [m, out] or [m, heads, out]; 0 for rows without edges.
        """
        slope = _number("slope", slope)
        targets, sources, v, edges = _alike(targets, sources, v, edges)
        rate, seed = _dropping(dropout, training, seed)
        if self.is_to_trace(v):
            tensors = [targets, sources, v, edges]
            return self._traced("additive_attention", tensors, scale=slope, dropout=rate, seed=seed)
        self._check(targets=targets, sources=sources, v=v, edges=edges)
        self._pair("targets", targets, "sources", sources, ranks=(1, 2))
        self._check_nodes("v", v, self.shape[1])
        if v.dim() != targets.dim() + 1 or v.dtype is not targets.dtype or v.shape[1:-1] != targets.shape[1:]:
            expected = f"[{self.shape[1]}, {'heads, ' if targets.dim() == 2 else ''}out]"
            raise ArgumentError(f"v is {_shown(v)}, expected {expected} with the dtype and heads of {_shown(targets)}")
        if edges is not None:
            if edges.shape[1:] != targets.shape[1:] or edges.dtype is not targets.dtype:
                raise ArgumentError(
                    f"edges are {_shown(edges)}, expected heads and dtype of targets, {_shown(targets)}"
                )
            edges = self.by_rows(edges, "edges")
        inner: Sizes = (("H", v.shape[1]), ("D", v.shape[2])) if v.dim() == 3 else (("D", None),)
        operands = (targets.contiguous(), sources.contiguous(), v.contiguous(), edges, seed)
        return functions.AdditiveAttention.apply(self, inner, (slope, rate), *operands)

    def dynamic_attention(
        self,
        targets: Tensor,
        sources: Tensor,
        weight: Tensor,
        v: Tensor,
        edges: Tensor | None = None,
        slope: float = 0.2,
        *,
        dropout: float = 0.0,
        training: bool = True,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Attention as in GATv2: ``y[i] = sum_j softmax_j(weight . leaky_relu(targets[i] + sources[j])) * v[j]``.

        Brody, Alon and Yahav, "How Attentive are Graph Attention Networks?", ICLR 2022.

        Parameters
        ----------
        targets, sources : Tensor
            [m, features] and [n, features], or [m, heads, features] and [n, heads, features].
        weight : Tensor
            [features] or [heads, features].
        v : Tensor
            [n, out], or [n, heads, out].
        edges : Tensor, optional
            What is added to the sum of both ends, [edges, features] or [edges, heads, features], in the order in which
            the graph was given.
        slope : float
            Of ``leaky_relu`` below zero.
        dropout, training, seed
            Of the shares of edges, after the softmax; see `dropout`. Nothing as large as these is kept for it.

        Returns
        -------
        Tensor
            [m, out] or [m, heads, out]; 0 for rows without edges.
        """
        slope = _number("slope", slope)
        targets, sources, weight, v, edges = _alike(targets, sources, weight, v, edges)
        rate, seed = _dropping(dropout, training, seed)
        if self.is_to_trace(v):
            tensors = [targets, sources, weight, v, edges]
            return self._traced("dynamic_attention", tensors, scale=slope, dropout=rate, seed=seed)
        self._check(targets=targets, sources=sources, weight=weight, v=v, edges=edges)
        if weight is None:
            raise ArgumentTypeError(_fault("weight", weight))
        inner = self._pair("targets", targets, "sources", sources)
        self._check_nodes("v", v, self.shape[1])
        if weight.shape != targets.shape[1:] or weight.dtype is not targets.dtype:
            raise ArgumentError(f"weight is {_shown(weight)}, expected the shape and dtype of a row of targets")
        if v.dim() != targets.dim() or v.dtype is not targets.dtype or v.shape[1:-1] != targets.shape[1:-1]:
            raise ArgumentError(f"v is {_shown(v)}, expected the dtype and the heads of targets, {_shown(targets)}")
        if edges is not None:
            if edges.shape[1:] != targets.shape[1:] or edges.dtype is not targets.dtype:
                raise ArgumentError(f"edges are {_shown(edges)}, expected rows as those of targets, {_shown(targets)}")
            edges = self.by_rows(edges, "edges", ranks=(2, 3))
        out: Sizes = (("D", v.shape[-1] if v.dim() == 3 else None),)
        operands = (targets.contiguous(), sources.contiguous(), weight.contiguous(), v.contiguous(), edges, seed)
        return functions.DynamicAttention.apply(self, inner + out, (slope, rate), *operands)

    def linear(self, values: Tensor, x: Tensor, *, precision: str | None = None) -> Tensor:
        """Return a layer ``x @ W.T`` for rows x [..., n], W the matrix with these values at the edges; [..., m].

        Parameters
        ----------
        values : Tensor
            [edges], in the order in which the graph was given.
        x : Tensor
        precision : {"bf16x3"}, optional
            Of the product and of the gradient in `x`, as in `spmm`.
        """
        values, x = _alike(values, x)
        _check_precision(precision, x)
        if self.is_to_trace(x):
            return self._traced("linear", [values, x], precision=precision or "")
        self._check(values=values, x=x)
        if x.dim() == 0 or x.shape[-1] != self.shape[1]:
            raise ArgumentError(f"x: expected a tensor of [..., {self.shape[1]}], got {_shown(x)}. Transpose it.")
        rows = x.reshape(math.prod(x.shape[:-1]), self.shape[1]).contiguous()  # numel() would fix sizes in an export
        y = functions.LinearFunction.apply(self.in_precision(precision), False, self.by_rows(values), rows)
        return y.view(*x.shape[:-1], self.shape[0])

    # ------------------------------------------------------------------ programs that torch traces

    def is_to_trace(self, tensor: Any) -> bool:
        """Return whether torch compiles or exports the caller; another thread may do so at any time."""
        if torch.compiler.is_dynamo_compiling():
            return True
        return torch.compiler.is_compiling() and type(tensor) not in (Tensor, torch.nn.Parameter)

    def _traced(self, method: str, tensors: list[Any], *, seed: Tensor | None = None, **options: Any) -> Tensor:
        """Call one operator, in which such a program sees no Python: see `tracing.py`."""
        structure = (*self.rows.tensors, *self.shape, self.there, self.back)
        if seed is not None:
            tensors = [*tensors, seed]
        return torch.ops.sparsetir.along_rows(*structure, method, tensors, **options)

    # ------------------------------------------------------------------ arguments

    @property
    def _own(self) -> Tensor:
        """The weight of the graph, by rows; brought into that order again where it has changed."""
        weight: Any = self.weight
        if self.there is None or weight.requires_grad or weight.is_inference():
            return self.by_rows(weight)
        cached = vars(self).get("_ordered")
        if cached is None or cached[0] is not weight or cached[1] != weight._version:
            cached = self._ordered = (weight, weight._version, self.by_rows(weight))
        return cached[2]

    def by_rows(self, edges: Tensor, name: str = "weight", ranks: tuple[int, int] = (1, 2)) -> Tensor:
        """Values of edges in the order of rows."""
        if not isinstance(edges, Tensor):
            raise ArgumentTypeError(_fault(name, edges))
        if edges.dim() not in ranks or edges.shape[0] != self.num_edges:
            n, inner = self.num_edges, "" if ranks[0] == 1 else ", features"
            expected = f"[{n}{inner}] or [{n}, heads{inner}]"
            raise ArgumentError(f"{name} has one value for each edge: expected {expected}, got {_shown(edges)}")
        if self.there is None:
            return edges.contiguous()
        return functions.Reorder.apply(edges, self.there, self.back)

    def as_given(self, edges: Tensor) -> Tensor:
        """Values of edges in the order in which the graph was given."""
        return edges if self.there is None else functions.Reorder.apply(edges, self.back, self.there)

    def _product(self, x: Tensor, edges: Tensor | None) -> tuple[Tensor, Sizes, tuple[int, ...]]:
        """Return the second factor for a program, the axes of heads and features, and the shape of the result."""
        shape = (self.shape[0], *x.shape[1:])
        if edges is None or edges.dim() == 1:
            if x.dim() == 1:
                return x, (), shape
            return x if x.dim() == 2 else x.flatten(1), FEATURES, shape
        if x.dim() not in (2, 3) or x.shape[1] != edges.shape[1]:
            expected = f"[{self.shape[1]}, {edges.shape[1]}, features]"
            raise ArgumentError(f"weight has {edges.shape[1]} heads: expected x of {expected}, got {_shown(x)}")
        inner: Sizes = (("H", None),) if x.dim() == 2 else (("H", x.shape[1]), ("K", x.shape[2]))
        return x, inner, shape

    def _pair(self, one: str, q: Tensor, other: str, k: Tensor, ranks: tuple[int, int] = (2, 3)) -> Sizes:
        """Return the axes of values of rows and of columns that belong together."""
        self._check_nodes(one, q, self.shape[0])
        self._check_nodes(other, k, self.shape[1])
        if q.dim() not in ranks or q.shape[1:] != k.shape[1:] or q.dtype is not k.dtype:
            expected = f"{ranks[0]} or {ranks[1]} dimensions, {one} and {other} with the same after the first"
            raise ArgumentError(f"expected {expected} and one dtype, got {_shown(q)} and {_shown(k)}")
        return (("H", q.shape[1]), ("K", q.shape[2])) if q.dim() == 3 else (("K", None),)

    def _check(self, **tensors: Tensor | None) -> None:
        self.rows.check()
        check_transforms()
        for name, tensor in tensors.items():
            if (tensor is not None or name not in OPTIONAL) and not (
                isinstance(tensor, Tensor)
                and tensor.dtype in functions.NAMES
                and tensor.is_cpu
                and tensor.layout is torch.strided
            ):
                raise ArgumentTypeError(_fault(name, tensor))

    def _check_nodes(self, name: str, tensor: Tensor, count: int) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != count:
            nodes = "rows (targets)" if count == self.shape[0] else "columns (sources)"
            raise ArgumentError(
                f"the graph has {count} {nodes}, and {name} is {_shown(tensor)}: expected [{count}, ...]"
            )


def check_transforms() -> None:
    """Refuse transforms of functions, which kernels do not go through."""
    if torch._C._are_functorch_transforms_active():
        raise LoweringError(TRANSFORMED)
    if torch._C._get_tracing_state() is not None:
        raise LoweringError("torch.jit.trace would keep results of kernels as constants: use torch.export instead")


def check_layer_operand(x: Tensor) -> None:
    """Refuse what layers do not take: sparse and nested tensors, and transforms of functions."""
    if torch.compiler.is_compiling():
        return
    if x.is_nested:
        raise ArgumentTypeError("x: expected a dense tensor, got a nested one. Pass x.values(), and wrap the result.")
    if x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        raise ArgumentTypeError(f"x: expected a dense tensor, got a {kind} one. Pass x.to_dense().")
    check_transforms()


OPTIONAL = ("weight", "bias", "edges")


def _alike(*tensors: Any) -> tuple[Any, ...]:
    """Operands inside autocast, where they are brought to the widest of their dtypes as by torch's own operators."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    floats = [t.dtype for t in tensors if isinstance(t, Tensor) and t.dtype in functions.NAMES]
    widest = reduce(torch.promote_types, floats, floats[0]) if floats else None
    return tuple(t.to(widest) if isinstance(t, Tensor) and t.dtype in functions.NAMES else t for t in tensors)


def _check_precision(precision: Any, x: Any) -> None:
    """Raise for a precision that the dtype of an operand does not have."""
    if precision is not None and isinstance(x, Tensor):
        check_precision(precision, str(x.dtype).removeprefix("torch."))


def _scaled(q: Any, scale: Any) -> tuple[Any, float | None]:
    """Multiply the operand by an unusual scale: kernels are built for few numbers."""
    if scale is None:
        return q, None
    if not isinstance(scale, Tensor) and _number("scale", scale) == 1:
        return q, 1.0
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ArgumentError(f"scale is one number, got a tensor of shape {list(scale.shape)}")
    if not isinstance(q, Tensor):
        return q, 1.0  # which is refused in a moment
    return q * (scale.reshape(()).to(q.dtype) if isinstance(scale, Tensor) else float(scale)), 1.0


def _dropping(rate: Any, training: bool, seed: Any) -> tuple[float, Tensor | None]:
    """Return the probability of dropout and its seed; 0 and None where nothing is dropped."""
    if not is_real(rate) or not 0 <= rate <= 1:
        raise ArgumentError(f"dropout is a probability, from 0 to 1, got {shown(rate)}")
    if not as_flag(training, "training") or not rate:
        return 0.0, None
    if seed is None:
        return float(rate), torch.randint(SEEDS, (1,))
    if not isinstance(seed, Tensor) or seed.dtype is not torch.int64 or seed.numel() != 1 or not seed.is_cpu:
        description = f"{list(seed.shape)} of {seed.dtype}" if isinstance(seed, Tensor) else type(seed).__name__
        raise ArgumentError(f"seed is a tensor of one int64, as torch.tensor([7]), got {description}")
    return float(rate), seed.reshape(1)


def _number(name: str, value: Any) -> float:
    # A tensor is refused: its gradient would be lost.
    if not is_real(value) or abs(value) == math.inf or value != value or abs(value) > sys.float_info.max:
        raise ArgumentError(f"{name} is a finite number, got {shown(value)}")
    return float(value)


def _fault(name: str, value: Any) -> str:
    """Return the text of an error for an argument."""
    if isinstance(value, torch.fx.Proxy):
        return f"{name} is a torch tensor, got a Proxy of torch.fx.symbolic_trace: trace with torch.export instead"
    if not isinstance(value, Tensor):
        return f"{name} is a torch tensor, got {type(value).__name__}"
    if value.is_nested:
        return f"{name} is a dense tensor, got a nested one: pass {name}.values(), the rows of all its parts"
    if not value.is_cpu:
        return f"{name} is on the device {value.device}, and kernels run on the cpu: pass {name}.cpu()"
    if value.layout is not torch.strided:
        return f"{name} is a dense tensor on the cpu, got one of {value.layout} on {value.device}: convert it"
    advice = f"call it for {name}.real and {name}.imag" if value.is_complex() else f"pass {name}.float()"
    return f"{name} is a tensor of floats, got {value.dtype}: {advice}"


def _described(value: Any) -> str:
    return _shown(value) if isinstance(value, Tensor) else type(value).__name__


def _shown(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return shown(tensor)
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


__all__ = ["SEEDS", "Graph"]
