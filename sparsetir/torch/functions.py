# SPDX-License-Identifier: Apache-2.0
"""The operators of a graph as functions of torch with gradients.

Values of edges are here in the order of the rows. A gradient is a kernel again, over the rows or over the columns, and
keeps nothing that is as large as edges times features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.autograd import Function
from torch.autograd import forward_ad as _forward_level

import torch
from sparsetir.errors import LoweringError
from sparsetir.torch import block_attention
from sparsetir.torch.programs import Sizes
from sparsetir.utils.caches import cached_property
from torch import Tensor

if TYPE_CHECKING:
    from sparsetir.torch.structure import GraphRows


NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

WHOLE = {  # those that torch computes with
    getattr(torch, name): name for name in ("bool", "int8", "uint8", "int16", "int32", "int64")
}


def in_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors in the dtype of autocast, which leaves float64 and integers as they are."""
    dtype = torch.get_autocast_dtype("cpu")
    return [t.to(dtype) if t is not None and t.dtype in NAMES and t.dtype is not torch.float64 else t for t in tensors]


FEATURES: Sizes = (("K", None),)


def heads_of(values: Tensor) -> Sizes:
    """Return the axes of values of nodes or edges besides the first: one of heads, or none."""
    return (("H", None),) if values.dim() == 2 else ()


class _Refused(Function):
    """Gradients that have no gradients themselves."""

    @staticmethod
    def forward(ctx: Any, name: str, gradient: Tensor, *_saved: Tensor) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> None:
        fault = f"the gradients of {ctx.name} are kernels without gradients of their own"
        raise LoweringError(f"{fault}: differentiate it once, without create_graph=True; or use dense operations")


def differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse batches of gradients in a backward function of operations that have gradients themselves."""

    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        try:
            return backward(ctx, *gradients)
        except RuntimeError:
            if any(map(_is_batched, gradients)):
                fault = f"the gradients of {_name_of(ctx)} are kernels for one gradient at a time"
                raise LoweringError(f"{fault}: leave out is_grads_batched=True, or vectorize=True") from None
            raise

    return wrapper


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a backward function without gradients, and refuse to differentiate what it returns."""
    run = differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(ctx, *gradients)
        with torch.no_grad():
            gradients_in = run(ctx, *gradients)
        if not any(g.requires_grad for g in (*gradients, *ctx.saved_tensors) if g is not None):
            return gradients_in
        name, sources = _name_of(ctx), (*gradients, *ctx.saved_tensors)
        refuse = lambda g: g if g is None else _Refused.apply(name, g, *(s for s in sources if s is not None))  # noqa: E731
        return tuple(map(refuse, gradients_in)) if isinstance(gradients_in, tuple) else refuse(gradients_in)

    return wrapper


def composed(steps: Callable[..., Any]) -> Callable[..., Any]:
    """Differentiate a backward function through a composition of operators that have gradients of gradients.

    `steps` computes the result again from the saved tensors; it returns None where no composition is available.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        refused = once(backward)

        @wraps(backward)
        def wrapper(ctx: Any, g: Any) -> Any:
            result = steps(ctx) if torch.is_grad_enabled() and not _is_batched(g) else None
            if result is None:
                return refused(ctx, g)
            tensors = iter(ctx.saved_tensors)
            sources = [next(tensors) if is_tensor else None for is_tensor in ctx.are_tensors]
            wanted = [t for t, needs in zip(sources, ctx.needs_input_grad, strict=True) if needs]
            gradients = iter(torch.autograd.grad(result, wanted, g, create_graph=True))
            return tuple(next(gradients) if needs else None for needs in ctx.needs_input_grad)

        return wrapper

    return decorate


def _name_of(ctx: Any) -> str:
    """Return the name of the autograd function of a context."""
    return type(ctx).__name__.removesuffix("Backward")


def _is_batched(gradient: Any) -> bool:
    """Return whether torch passes a batch of gradients as one tensor."""
    return isinstance(gradient, Tensor) and "Batched" in str(torch._C._dispatch_keys(gradient))


class _NoContext:
    """Context of a call that saves nothing for backward."""

    needs_input_grad = (False,) * 10

    def save_for_backward(self, *tensors: Any) -> None:
        """Nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing."""


# torch's own `apply` without what `Function` adds in Python; `torch.compile` fails at ``super(Function, cls).apply``.
_apply = torch._C._FunctionBase.__dict__["apply"]


class KernelFunction(Function):
    """A function whose gradients go backward only."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call it, without torch's bookkeeping where nothing wants a gradient: that costs more than a small kernel.

        Torch's own `apply` also looks for transforms of functions, which graphs have refused before.
        """
        if not torch.is_grad_enabled() or not any(a.requires_grad for a in args if isinstance(a, Tensor)):
            if _forward_level._current_level < 0:
                return cls.forward(_NoContext(), *args)
        return _apply.__get__(None, cls)(*args)

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> Any:
        fault = f"{_name_of(ctx)} has kernels for gradients backward, none for those forward"
        raise LoweringError(f"{fault}: use torch.autograd.grad; or dense operations")


class GraphOrientations:
    """The view of a graph that a function uses: rows and, when a gradient needs them, columns."""

    rows: GraphRows
    shape: tuple[int, int]

    @property
    def columns(self) -> GraphRows:
        """The edges by columns."""
        return self.rows.transposed


@dataclass(frozen=True, eq=False)
class PreciseRows:
    """Rows for products in a precision of float32."""

    plain: GraphRows
    precision: str

    def run(self, name: str, dtype: str, inner: Sizes, *options: Any, **tensors: Tensor | None) -> Any:
        """Call a program as `GraphRows.run` does."""
        return self.plain.run(name, self.precision, inner, *options, **tensors)

    @cached_property
    def transposed(self) -> PreciseRows:
        """The edges by columns."""
        return PreciseRows(self.plain.transposed, self.precision)


@dataclass(frozen=True, eq=False)
class PreciseGraph(GraphOrientations):
    """A graph for products in a precision of float32."""

    rows: Any
    shape: tuple[int, int]


class SpMM(KernelFunction):
    """Sums and means of neighbours, perhaps with a bias and an activation."""

    @staticmethod
    def forward(
        ctx: Any, graph: GraphOrientations, inner: Sizes, is_mean: bool, activation: str, *tensors: Any
    ) -> Tensor:
        weight, x, bias = tensors
        ctx.graph, ctx.inner, ctx.share = graph, inner, graph.rows.share(x.dtype) if is_mean else None
        more = (bias is not None, activation) if bias is not None or activation else ()
        options = (NAMES[x.dtype], inner, "sum", weight is not None, "row" if is_mean else "", *more)
        y = graph.rows.run("spmm", *options, w_data=weight, S=ctx.share, X=x, B=bias)
        ctx.save_for_backward(weight, x if ctx.needs_input_grad[4] else None, y if activation else None)
        return y

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        graph, inner, share = ctx.graph, ctx.inner, ctx.share
        _, _, _, _, needs_weight, needs_x, needs_bias = ctx.needs_input_grad
        weight, x, y = ctx.saved_tensors
        g = g.contiguous() if y is None else torch.ops.aten.threshold_backward(g.contiguous(), y.detach(), 0)
        g_x = TransposedSpMM.apply(graph, inner, share, weight, g) if needs_x else None
        g_weight = SDDMM.apply(graph, inner, share, g, x) if needs_weight else None
        return None, None, None, None, g_weight, g_x, g.sum(0) if needs_bias else None


class TransposedSpMM(KernelFunction):
    """Sums over the edges of each column, with values of edges in the order of rows and a factor for each row."""

    @staticmethod
    def forward(
        ctx: Any, graph: GraphOrientations, inner: Sizes, share: Tensor | None, weight: Tensor | None, g: Tensor
    ) -> Any:
        ctx.graph, ctx.inner, ctx.share = graph, inner, share
        ctx.save_for_backward(weight, g if ctx.needs_input_grad[3] else None)
        options = (NAMES[g.dtype], inner, "sum", weight is not None, "" if share is None else "column")
        return graph.columns.run("spmm", *options, W=weight, S=share, X=g)

    @staticmethod
    @differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        graph, inner, share = ctx.graph, ctx.inner, ctx.share
        _, _, _, needs_weight, needs_g = ctx.needs_input_grad
        (weight, g), gradient = ctx.saved_tensors, gradient.contiguous()
        g_weight = SDDMM.apply(graph, inner, share, g, gradient) if needs_weight else None
        g_g = SpMM.apply(graph, inner, share is not None, "", weight, gradient, None) if needs_g else None
        return None, None, None, g_weight, g_g


class ReadLinear(KernelFunction):
    """A dense layer of nodes some of which no edge reads: NaN and infinities of these reach no gradient."""

    @staticmethod
    def forward(ctx: Any, unread: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(unread, x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        unread, x, weight = ctx.saved_tensors
        g_x = g_weight = None
        if ctx.needs_input_grad[1]:
            g_x = (g @ weight).index_fill_(0, unread, 0)
        if ctx.needs_input_grad[2]:
            g_weight = g.t() @ x
            if not g_weight.isfinite().all():  # which costs less than to clear rows of x each time
                g_weight = g.t() @ x.index_fill(0, unread, 0)
        return None, g_x, g_weight


class LinearFunction(KernelFunction):
    """A layer ``x @ W.T``, or ``x @ W``, W the matrix of the graph with values in the order of rows."""

    @staticmethod
    def forward(ctx: Any, graph: GraphOrientations, is_transposed: bool, values: Tensor, x: Tensor) -> Tensor:
        ctx.graph, ctx.is_transposed = graph, is_transposed
        ctx.save_for_backward(values, x if ctx.needs_input_grad[2] else None)
        if is_transposed:
            return graph.columns.run("linear", NAMES[x.dtype], FEATURES, W=values, X=x)
        return graph.rows.run("linear", NAMES[x.dtype], FEATURES, w_data=values, X=x)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (values, x), g_values, g_x = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[3]:
            g_x = LinearFunction.apply(ctx.graph, not ctx.is_transposed, values, g.contiguous())
        if ctx.needs_input_grad[2]:
            rows, columns = (x, g) if ctx.is_transposed else (g, x)
            g_values = SDDMM.apply(ctx.graph, FEATURES, None, rows.t().contiguous(), columns.t().contiguous())
        return None, None, g_values, g_x


class SDDMM(KernelFunction):
    """Dot products along edges, perhaps with a factor for each row."""

    @staticmethod
    def forward(ctx: Any, graph: GraphOrientations, inner: Sizes, share: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
        ctx.graph, ctx.inner, ctx.share = graph, inner, share
        _, _, _, needs_q, needs_k = ctx.needs_input_grad[:5]
        ctx.save_for_backward(q if needs_k else None, k if needs_q else None)
        return graph.rows.run("sddmm", NAMES[q.dtype], inner, share is not None, X=q, S=share, Y=k)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        graph, inner, share = ctx.graph, ctx.inner, ctx.share
        q, k = ctx.saved_tensors
        g, g_q, g_k = g.contiguous(), None, None
        if ctx.needs_input_grad[3]:
            g_q = SpMM.apply(graph, inner, share is not None, "", g, k, None)
        if ctx.needs_input_grad[4]:
            g_k = TransposedSpMM.apply(graph, inner, share, g, q)
        return None, None, None, g_q, g_k


class EdgeSum(KernelFunction):
    """Sums of the values of the two ends of edges."""

    @staticmethod
    def forward(ctx: Any, graph: GraphOrientations, inner: Sizes, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.graph, ctx.inner = graph, inner
        return graph.rows.run("edge_sum", NAMES[rows.dtype], inner, X=rows, Y=columns)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        g, g_rows, g_columns = g.contiguous(), None, None
        if ctx.needs_input_grad[2]:
            g_rows = EndSum.apply(ctx.graph, ctx.inner, False, g)
        if ctx.needs_input_grad[3]:
            g_columns = EndSum.apply(ctx.graph, ctx.inner, True, g)
        return None, None, g_rows, g_columns


class EndSum(KernelFunction):
    """Sums of values of edges, in the order of rows, over the edges of each row or of each column."""

    @staticmethod
    def forward(ctx: Any, graph: GraphOrientations, inner: Sizes, of_columns: bool, values: Tensor) -> Tensor:
        ctx.graph, ctx.inner, ctx.of_columns = graph, inner, of_columns
        if of_columns:
            return graph.columns.run("row_sum", NAMES[values.dtype], inner, W=values)
        return graph.rows.run("row_sum", NAMES[values.dtype], inner, w_data=values)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, None, _at_edges(ctx.graph, ctx.inner, g.contiguous(), of_columns=ctx.of_columns)


def _at_edges(graph: GraphOrientations, inner: Sizes, ends: Tensor, *, of_columns: bool = False) -> Tensor:
    """Return the value of the row, or of the column, of each edge."""
    zeros = ends.new_zeros(graph.shape[0 if of_columns else 1], *ends.shape[1:])
    return EdgeSum.apply(graph, inner, *((zeros, ends) if of_columns else (ends, zeros)))


def _extreme_by_steps(ctx: Any) -> Tensor | None:
    """Sum what each edge adds to the extreme: equal ones an even part of it each, which is constant."""
    weight, x, y = ctx.saved_tensors
    if x.dtype.itemsize < 4:  # kernels multiply 16-bit floats in 32 bits
        return None
    inner: Sizes = (("H", None),)
    values = _at_edges(ctx.graph, inner, x.reshape(x.shape[0], -1), of_columns=True)
    if weight is not None:
        features = weight.unsqueeze(-1).expand(*weight.shape, x.shape[-1])
        values = values * features.reshape(values.shape)
    extremes = _at_edges(ctx.graph, inner, y.detach().reshape(y.shape[0], -1))
    is_extreme = (values.detach() == extremes).to(values.dtype)
    counts = _at_edges(ctx.graph, inner, EndSum.apply(ctx.graph, inner, False, is_extreme)).clamp(min=1)
    share = torch.where(extremes == extremes, is_extreme / counts, extremes)  # NaN where the extreme is
    return EndSum.apply(ctx.graph, inner, False, values * share).view(y.shape)


class Extreme(KernelFunction):
    """Maxima and minima of neighbours; equal ones share a gradient evenly."""

    @staticmethod
    def forward(
        ctx: Any, graph: GraphOrientations, inner: Sizes, reduce: str, weight: Tensor | None, x: Tensor
    ) -> Tensor:
        ctx.graph, ctx.inner = graph, inner
        y = graph.rows.run("spmm", NAMES[x.dtype], inner, reduce, weight is not None, "", w_data=weight, X=x)
        ctx.are_tensors = (False, False, False, True, True)
        ctx.save_for_backward(weight, x, y)
        return y

    @staticmethod
    @composed(_extreme_by_steps)
    def backward(ctx: Any, g: Tensor) -> Any:
        graph, inner = ctx.graph, ctx.inner
        weight, x, y = ctx.saved_tensors
        dtype, is_weighted, g_weight, g_x = NAMES[g.dtype], weight is not None, None, None
        shared = graph.rows.run("ties", dtype, inner, is_weighted, w_data=weight, X=x, Y=y, G=g.contiguous())
        if ctx.needs_input_grad[4]:
            g_x = graph.columns.run("picked", dtype, inner, is_weighted, W=weight, X=x, Y=y, G=shared)
        if ctx.needs_input_grad[3]:
            g_weight = graph.rows.run("picked_edges", dtype, inner, w_data=weight, X=x, Y=y, G=shared)
        return None, None, None, g_weight, g_x


class Softmax(KernelFunction):
    """The softmax of the edges of each row."""

    @staticmethod
    def forward(ctx: Any, graph: GraphOrientations, inner: Sizes, scores: Tensor) -> Tensor:
        ctx.graph, ctx.inner = graph, inner
        weights = graph.rows.run("softmax", NAMES[scores.dtype], inner, w_data=scores)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (p,) = ctx.saved_tensors
        return None, None, SoftmaxGradient.apply(ctx.graph, ctx.inner, p, g.contiguous())


class SoftmaxGradient(KernelFunction):
    """``p * (g - sum_j p * g)`` over the edges of each row: symmetric in g, as the Jacobian of softmax is."""

    @staticmethod
    def forward(ctx: Any, graph: GraphOrientations, inner: Sizes, p: Tensor, g: Tensor) -> Tensor:
        ctx.graph, ctx.inner = graph, inner
        ctx.save_for_backward(p, g)
        return graph.rows.run("softmax_gradient", NAMES[p.dtype], inner, p__data=p, g_data=g)

    @staticmethod
    @differentiable
    def backward(ctx: Any, h: Tensor) -> Any:
        graph, inner, (p, g) = ctx.graph, ctx.inner, ctx.saved_tensors
        h, g_p = h.contiguous(), None
        if ctx.needs_input_grad[2]:
            sums = (EndSum.apply(graph, inner, False, (p * factor).contiguous()) for factor in (g, h))
            of_g, of_h = (_at_edges(graph, inner, ends) for ends in sums)
            g_p = h * (g - of_g) - g * of_h
        return None, None, g_p, SoftmaxGradient.apply(graph, inner, p, h)


class Dropout(KernelFunction):
    """Values of edges some of which are dropped; their gradients are dropped alike."""

    @staticmethod
    def forward(ctx: Any, graph: GraphOrientations, inner: Sizes, rate: float, values: Tensor, seed: Tensor) -> Tensor:
        ctx.graph, ctx.inner, ctx.rate = graph, inner, rate
        ctx.save_for_backward(seed)
        return graph.rows.run("dropout", NAMES[values.dtype], inner, rate, w_data=values, seed_data=seed)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (seed,) = ctx.saved_tensors
        return None, None, None, Dropout.apply(ctx.graph, ctx.inner, ctx.rate, g.contiguous(), seed), None


def _shared_out(graph: GraphOrientations, rate: float, scores: Tensor, v: Tensor, seed: Tensor | None) -> Tensor:
    """Return the sums of values by the softmax of scores along edges, in single operators."""
    inner = heads_of(scores)
    shares = Softmax.apply(graph, inner, scores.contiguous())
    shares = Dropout.apply(graph, inner, rate, shares, seed) if rate else shares
    outer = (("H", v.shape[1]), ("K", v.shape[2])) if v.dim() == 3 else FEATURES
    return SpMM.apply(graph, outer, False, "", shares, v, None)


def _attention_by_steps(ctx: Any) -> Tensor | None:
    q, k, v, e, seed, _ = ctx.saved_tensors
    scale, _, rate = ctx.options
    if e is not None:
        return None
    scores = SDDMM.apply(ctx.graph, ctx.inner[:-1], None, q.contiguous(), k.contiguous()) * scale
    return _shared_out(ctx.graph, rate, scores, v.contiguous(), seed)


def _additive_by_steps(ctx: Any) -> Tensor:
    targets, sources, v, e, seed, _ = ctx.saved_tensors
    slope, _, rate = ctx.options
    scores = EdgeSum.apply(ctx.graph, heads_of(targets), targets, sources)
    scores = torch.nn.functional.leaky_relu(scores if e is None else scores + e, slope)
    return _shared_out(ctx.graph, rate, scores, v, seed)


class Attention(KernelFunction):
    """Attention along edges, or over blocks of edges: one kernel forward, and backward one by rows and one by columns.

    Shares that are dropped are kept with a minus.
    """

    @staticmethod
    def forward(
        ctx: Any, graph: GraphOrientations, inner: Sizes, options: tuple[float, float], *tensors: Any
    ) -> Tensor:
        q, k, v, e, seed = tensors
        scale, rate = options
        ctx.graph, ctx.inner, ctx.options = graph, inner, (scale, e is not None, rate)
        keep = any(ctx.needs_input_grad)
        pattern = None if e is not None or rate else graph.rows.blocks
        mixed = None if pattern is None else block_attention.attend(pattern, q, k, v, scale, keep=keep)
        ctx.is_blocked = mixed is not None
        out, p = _mix_edges(ctx, tensors, keep=keep) if mixed is None else mixed
        if keep:
            ctx.are_tensors = (False, False, False, True, True, True, True, True)
            ctx.save_for_backward(q, k, v, e, seed, p)
        return out

    @staticmethod
    @composed(_attention_by_steps)
    def backward(ctx: Any, g: Tensor) -> Any:
        graph, inner, (scale, _, rate) = ctx.graph, ctx.inner, ctx.options
        q, k, v, e, seed, p = ctx.saved_tensors
        of_columns = any(ctx.needs_input_grad[4:6])
        if ctx.is_blocked:
            gradients = block_attention.gradients(graph.rows.blocks, p, q, k, v, g, scale, of_columns=of_columns)
            if gradients is not None:
                return None, None, None, *gradients, None, None
            _, p = _mix_edges(ctx, (q, k, v, e, seed), keep=True)
        q, k, v, g = (t.contiguous() for t in (q, k, v, g))
        dtype, g_k, g_v, g_e = NAMES[g.dtype], None, None, None
        operands = {"p__data": p, "G": g, "V": v, "KEYS": k, "edges_data": e, "edges_v_data": e}
        s, g_q = graph.rows.run("attention_rows", dtype, inner, *ctx.options, **operands)
        if of_columns:
            g_k, g_v = graph.columns.run("attention_columns", dtype, inner, rate, P_=p, S=s, Q=q, G=g)
        if ctx.needs_input_grad[6]:
            g_e = graph.rows.run("attention_edges", dtype, inner[:-1], rate, p__data=p, s_data=s, Q=q, G=g)
        return None, None, None, g_q, g_k, g_v, g_e, None


def _mix_edges(ctx: Any, tensors: Any, *, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Return attention along single edges, and the shares of edges if `keep`."""
    q, k, v = (t.contiguous() for t in tensors[:3])
    e, seed = tensors[3:]
    operands = {"Q": q, "KEYS": k, "V": v, "edges_data": e, "edges_v_data": e, "seed_data": seed}
    return _mixed(ctx, "attention", q.dtype, operands, keep=keep)


def _mixed(
    ctx: Any, name: str, dtype: torch.dtype, operands: dict[str, Tensor | None], *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a kernel of attention: return the sums of values, and the shares of edges if `keep`."""
    result = ctx.graph.rows.run(name, NAMES[dtype], ctx.inner, *ctx.options, keep, **operands)
    return (result[1], result[0]) if keep else (result, None)


class AdditiveAttention(KernelFunction):
    """Attention whose scores are sums of what the ends of edges have: kernels as those of `Attention`."""

    @staticmethod
    def forward(
        ctx: Any, graph: GraphOrientations, inner: Sizes, options: tuple[float, float], *tensors: Any
    ) -> Tensor:
        t, s, v, e, seed = tensors
        slope, rate = options
        ctx.graph, ctx.inner, ctx.options = graph, inner, (slope, e is not None, rate)
        keep = any(ctx.needs_input_grad)
        operands = {"TARGETS": t, "SOURCES": s, "edges_data": e, "V": v, "seed_data": seed}
        out, p = _mixed(ctx, "additive", v.dtype, operands, keep=keep)
        if keep:
            ctx.are_tensors = (False, False, False, True, True, True, True, True)
            ctx.save_for_backward(t, s, v, e, seed, p)
        return out

    @staticmethod
    @composed(_additive_by_steps)
    def backward(ctx: Any, g: Tensor) -> Any:
        graph, inner, (*_, rate) = ctx.graph, ctx.inner, ctx.options
        t, s, v, e, _, p = ctx.saved_tensors
        dtype, g = NAMES[g.dtype], g.contiguous()
        operands = {"TARGETS": t, "SOURCES": s, "edges_data": e, "p__data": p, "G": g, "V": v}
        scores, g_t = graph.rows.run("additive_rows", dtype, inner, *ctx.options, **operands)
        g_s = g_v = None
        if any(ctx.needs_input_grad[4:6]):
            g_s, g_v = graph.columns.run("additive_columns", dtype, inner, rate, P_=p, S=scores, G=g)
        return None, None, None, g_t, g_s, g_v, scores if ctx.needs_input_grad[6] else None, None


class DynamicAttention(KernelFunction):
    """Attention whose scores are a weight times `leaky_relu` of the sums of both ends.

    The gradient of a score at the sum of the ends is that weight times 1 or the slope: sums of the latter over the
    edges of each end are what all gradients are made of, those of the weight as well.
    """

    @staticmethod
    def forward(
        ctx: Any, graph: GraphOrientations, inner: Sizes, options: tuple[float, float], *tensors: Any
    ) -> Tensor:
        t, s, a, v, e, seed = tensors
        slope, rate = options
        ctx.graph, ctx.inner, ctx.options = graph, inner, (slope, e is not None, rate)
        keep = any(ctx.needs_input_grad)
        operands = {"TARGETS": t, "SOURCES": s, "edges_data": e, "seed_data": seed, "A": a, "V": v}
        out, p = _mixed(ctx, "dynamic", v.dtype, operands, keep=keep)
        if keep:
            ctx.save_for_backward(t, s, a, v, e, p)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        graph, inner, options = ctx.graph, ctx.inner, ctx.options
        t, s, a, v, e, p = ctx.saved_tensors
        _, _, _, needs_t, needs_s, needs_a, needs_v, needs_e, _ = ctx.needs_input_grad
        dtype, g, ends = NAMES[g.dtype], g.contiguous(), {"TARGETS": t, "SOURCES": s}
        rows = {**ends, "edges_data": e, "p__data": p, "G": g, "V": v}
        scores, at_rows = graph.rows.run("dynamic_rows", dtype, inner, *options, **rows)
        g_s = g_v = g_a = g_e = None
        if needs_s or needs_v or needs_a:
            columns = {"TARGETS": s, "SOURCES": t, "EDGES": e, "P_": p, "S": scores, "G": g}
            at_columns, g_v = graph.columns.run("dynamic_columns", dtype, inner, *options, **columns)
            g_s = _of_reached(at_columns, a) if needs_s else None
            g_a = _of_reached(at_rows, t).sum(0) + _of_reached(at_columns, s).sum(0) if needs_a else None
        if e is not None and (needs_e or needs_a):
            edges = {**ends, "edges_data": e, "s_data": scores}
            g_e = graph.rows.run("dynamic_edges", dtype, inner[:-1], options[0], **edges)
            g_a = g_a + (g_e * e).sum(0) if needs_a else None
            g_e = g_e.mul_(a) if needs_e else None
        return None, None, None, at_rows.mul_(a) if needs_t else None, g_s, g_a, g_v, g_e, None


def _of_reached(sums: Tensor, factor: Tensor) -> Tensor:
    """Multiply sums over edges; those of nodes without edges stay 0, also where the factor is NaN or infinite."""
    return torch.where(sums == 0, sums, sums * factor)


class Reorder(KernelFunction):
    """Values of edges in another order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.order, ctx.back = order, back
        return values.index_select(0, order)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return Reorder.apply(g, ctx.back, ctx.order), None, None


__all__ = [
    "NAMES",
    "SDDMM",
    "WHOLE",
    "AdditiveAttention",
    "Attention",
    "Dropout",
    "DynamicAttention",
    "EdgeSum",
    "Extreme",
    "GraphOrientations",
    "KernelFunction",
    "LinearFunction",
    "Reorder",
    "Softmax",
    "SpMM",
    "heads_of",
    "in_autocast",
]
