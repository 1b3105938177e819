# SPDX-License-Identifier: Apache-2.0
"""The programs behind the operators of a graph, and those of their gradients.

Each goes along the rows of one compressed structure: I are its rows, J the columns that a row stores, N all columns. An
edge has a value, or one a head; they lie in the order of this structure, or ("via") in the order of its transpose, to
which the array P leads. Gradients with respect to the columns are programs over the transpose, so that every program
owns the rows it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tvm import tirx

from sparsetir.build import build
from sparsetir.ir.halves import PRECISIONS, by_three_products
from sparsetir.lower.annotations import FREE_SUMS
from sparsetir.relax.training.layers import GOLDEN, MASK, mixed
from sparsetir.runtime.kernel import Kernel
from sparsetir.script.writer import Axes, ProgramWriter
from sparsetir.utils.caches import remember

Sizes = tuple[tuple[str, int | None], ...]  # axes of heads (H) and features (K, D), with the sizes that are known


@dataclass
class EdgeDraft(ProgramWriter):
    """A program along the edges of a graph."""

    dtype: str = "float32"
    idtype: str = "int32"
    inner: Sizes = ()
    is_via: bool = False
    made: dict[str, tirx.Var] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dense("I", self.extent("m"), self.idtype)
        self.inputs += ["indptr", "indices"]
        sizes = (self.size("n", self.extent("n")), self.size("nnz", self.extent("nnz")))
        self.compressed("J", "I", sizes, ("indptr", "indices"), self.idtype, sorted=False, unique=False)
        self.dense("N", self.extent("n"), self.idtype)
        for name, extent in self.inner:
            self.dense(name, self.extent(name.lower()) if extent is None else extent, self.idtype)
        if self.is_via:
            self.dense("E", self.extent("nnz"), self.idtype)
            self.array("P", ("I", "J"), self.idtype)

    def extent(self, name: str) -> tirx.Var:
        return self.made.setdefault(name, tirx.Var(f"{name}_extent", "int64"))

    @property
    def all(self) -> Axes:
        """The axes of heads and features."""
        return tuple(name for name, _ in self.inner if name != "D")

    @property
    def mixed(self) -> Axes:
        """The axes of heads and of the features that attention mixes."""
        return tuple(name for name, _ in self.inner if name != "K")

    @property
    def heads(self) -> Axes:
        return tuple(name for name in self.all if name == "H")

    @property
    def dots(self) -> Axes:
        """The order of dot products along edges: of one head after the other, so that a row stays in registers."""
        return ("I", *self.heads, "J", "K") if "K" in self.all else ("I", "J", *self.all)

    @property
    def mixed_dots(self) -> Axes:
        """The same over the features that attention mixes."""
        return ("I", *self.heads, "J", "D")

    @property
    def wide(self) -> str:
        """The dtype that exponentials are computed in."""
        return "float64" if self.dtype == "float64" else "float32"

    def edges(self, name: str, *, result: bool = False) -> str:
        """Declare values of edges; return the current element."""
        return self.edge_rows(name, self.heads, result=result)

    def edge_rows(self, name: str, inner: Axes | None = None, *, result: bool = False) -> str:
        """Declare features of edges; return the current element."""
        inner = self.all if inner is None else inner
        is_via = self.is_via and not result
        outer, place = (("E",), ["P[i, j]"]) if is_via else (("I", "J"), ["i", "j"])
        self.array(name, (*outer, *inner), self.dtype, result=result)
        return f"{name}[{', '.join([*place, *_lower(inner)])}]"

    def rows(self, name: str, inner: Axes, *, result: bool = False) -> str:  # type: ignore[override]
        """Declare values of rows; return the current element."""
        self.array(name, ("I", *inner), self.dtype, result=result)
        return f"{name}[{', '.join(['i', *_lower(inner)])}]"

    def columns(self, name: str, inner: Axes) -> str:
        """Declare values of columns; return the current element."""
        self.array(name, ("N", *inner), self.dtype)
        return f"{name}[{', '.join(['j', *_lower(inner)])}]"

    def shares(self, *, keep: bool) -> str:
        """Declare the shares of edges, a result if `keep`, else scratch; return the current element."""
        if keep:
            return self.edges("P_", result=True)
        self.scratch("P_", ("I", "J", *self.heads), self.dtype)
        return f"P_[{', '.join(['i', 'j', *_lower(self.heads)])}]"

    def dropped(self, rate: float) -> str:
        """Return whether dropout removes the current element: by 32 bits of its position and the seed."""
        self.dense("ONE", 1, self.idtype)
        self.array("SEED", ("ONE",), "int64")
        self.array("PLACE", ("I", "J"), self.idtype)
        self.scratch("key", ("ONE",), "int64")
        key = mixed('T.Cast("uint32", SEED[one])')
        self.iterate(("ONE",), "S", "start", [f'key[one] = T.Cast("int64", {key})'])
        place = 'T.Cast("uint32", PLACE[i, j])'
        place += f' + T.Cast("uint32", h) * T.uint32({GOLDEN})' if self.heads else ""
        bits = mixed(f'T.bitwise_xor({place}, T.Cast("uint32", key[0]))')
        return f"{bits} < T.uint32({min(int(rate * 2**32), MASK)})"

    def wide_scratch(self, name: str, axes: Axes) -> str:
        """Declare scratch; return the current element."""
        self.scratch(name, axes, self.wide)
        return f"{name}[{', '.join(_lower(axes))}]"

    def in_place(self, o: str, name: str) -> str:
        """Return where intermediate values of an element are: there, or in scratch if its dtype is too narrow."""
        return o if self.dtype == self.wide else self.wide_scratch(name, ("I", "J", *self.heads))

    def reduce(self, name: str, axes: Axes, line: str, init: str, over: str = "J") -> None:
        """Add an iteration that reduces over an axis."""
        kinds = "".join("R" if axis == over else "S" for axis in axes)
        self.iterate(axes, kinds, name, [line], init=init)

    def add(self, name: str, axes: Axes, total: str, value: str, over: str = "J") -> None:
        """Add an iteration that sums values over an axis."""
        self.reduce(name, axes, f"{total} = {total} + {value}", f"{total} = 0", over)

    def spread(self, name: str, axes: Axes, line: str) -> None:
        """Add an iteration that reduces over no axis."""
        self.iterate(axes, "S" * len(axes), name, [line])


def _lower(axes: Axes) -> list[str]:
    return [axis.lower() for axis in axes]


# ------------------------------------------------------------------ products


def spmm(
    draft: EdgeDraft, reduce: str, weighted: bool, scaled: str, biased: bool = False, activation: str = ""
) -> None:
    """``Y[i] = reduce_j W[i, j] * X[j]``; `scaled`: by a number of each row, or column, or neither.

    A bias may be added, and what is below zero be set to zero (relu).
    """
    factors = [draft.edges("W")] if weighted else []
    factors += [draft.rows("S", ()) if scaled == "row" else draft.columns("S", ())] if scaled else []
    value = " * ".join([*factors, draft.columns("X", draft.all)])
    y, axes = draft.rows("Y", draft.all, result=True), ("I", "J", *draft.all)
    if reduce == "sum":
        draft.add("spmm", axes, y, value)
        return _epilogue(draft, y, biased, activation)
    draft.scratch("count", ("I",), "int32")
    draft.reduce("count", ("I", "J"), "count[i] = count[i] + 1", "count[i] = 0")
    worst = _worst(draft, reduce)
    draft.reduce("spmm", axes, f"{y} = T.{reduce}({y}, {value})", f"{y} = {worst}")
    empty = f"{y} = T.if_then_else(count[i] > 0, {y}, T.{draft.dtype}(0))"
    return draft.spread("empty", ("I", *draft.all), empty)


def _worst(draft: EdgeDraft, reduce: str) -> str:
    """Return the identity of a maximum or minimum."""
    if draft.dtype == "bool":
        return f"T.bool({reduce == 'min'})"
    if "int" in draft.dtype:
        return f'T.{"min" if reduce == "max" else "max"}_value("{draft.dtype}")'
    return f'T.Cast("{draft.dtype}", {"-" if reduce == "max" else ""}T.infinity("{draft.wide}"))'


def _epilogue(draft: EdgeDraft, y: str, biased: bool, activation: str) -> None:
    if biased:
        draft.array("B", draft.all, draft.dtype)
        draft.spread("bias", ("I", *draft.all), f"{y} = {y} + B[{', '.join(_lower(draft.all))}]")
    if activation:
        zero = f"T.{draft.dtype}(0)"
        draft.spread("relu", ("I", *draft.all), f"{y} = T.if_then_else({y} < {zero}, {zero}, {y})")  # nan stays


def linear(draft: EdgeDraft) -> None:
    """``Y[b, i] = sum_j W[i, j] * X[b, j]``, rows of X one after the other."""
    w = draft.edges("W")
    draft.array("X", ("K", "N"), draft.dtype)
    draft.array("Y", ("K", "I"), draft.dtype, result=True)
    draft.reduce("linear", ("I", "J", "K"), f"Y[k, i] = Y[k, i] + {w} * X[k, j]", "Y[k, i] = 0")


def row_sum(draft: EdgeDraft) -> None:
    """``Y[i] = sum_j W[i, j]``."""
    w, y = draft.edges("W"), draft.rows("Y", draft.heads, result=True)
    draft.add("row_sum", ("I", "J", *draft.heads), y, w)


def sddmm(draft: EdgeDraft, scaled: bool) -> None:
    """``O[i, j] = sum_k X[i, k] * Y[j, k]``, scaled by a number of each row."""
    value = f"{draft.rows('X', draft.all)} * {draft.columns('Y', draft.all)}"
    value += f" * {draft.rows('S', ())}" if scaled else ""
    o = draft.edges("O", result=True)
    draft.add("sddmm", draft.dots, o, value, over="K")


def edge_sum(draft: EdgeDraft) -> None:
    """``O[i, j] = X[i] + Y[j]``."""
    value = f"{draft.rows('X', draft.heads)} + {draft.columns('Y', draft.heads)}"
    draft.spread("edge_sum", ("I", "J", *draft.heads), f"{draft.edges('O', result=True)} = {value}")


# ------------------------------------------------------------------ gradients of maxima


def ties(draft: EdgeDraft, weighted: bool) -> None:
    """``O[i] = G[i] / count_j(W[i, j] * X[j] == Y[i])``: entries that are equal share a gradient evenly."""
    value = _product(draft, draft.columns, weighted)
    y, g, o = draft.rows("Y", draft.all), draft.rows("G", draft.all), draft.rows("O", draft.all, result=True)
    one, zero = (f"T.{draft.dtype}({n})" for n in (1, 0))
    draft.add("ties", ("I", "J", *draft.all), o, f"T.Select({value} == {y}, {one}, {zero})")
    draft.spread("share", ("I", *draft.all), f"{o} = T.Select({y} == {y}, {g} / T.max({o}, {one}), {y})")


def picked(draft: EdgeDraft, weighted: bool) -> None:
    """``O[i] = sum_j (W[i, j] * X[i] == Y[j]) * W[i, j] * G[j]``: I are the columns of the product."""
    value = _product(draft, draft.rows, weighted)
    y, g, o = draft.columns("Y", draft.all), draft.columns("G", draft.all), draft.rows("O", draft.all, result=True)
    part = value.split(" * ")[0] if weighted else f"T.{draft.dtype}(1)"
    # The product with G, which is NaN where the maximum is, makes such gradients NaN.
    gradient = f"T.Select({value} == {y}, {part}, T.{draft.dtype}(0)) * {g}"
    draft.add("picked", ("I", "J", *draft.all), o, gradient)


def picked_edges(draft: EdgeDraft) -> None:
    """``O[i, j] = sum_k (W[i, j] * X[j, k] == Y[i, k]) * X[j, k] * G[i, k]``."""
    value = _product(draft, draft.columns, True)
    y, g, o = draft.rows("Y", draft.all), draft.rows("G", draft.all), draft.edges("O", result=True)
    gradient = f"T.Select({value} == {y}, {value.split(' * ')[-1]}, T.{draft.dtype}(0)) * {g}"
    draft.add("picked", ("I", "J", *draft.all), o, gradient, over="K")


def _product(draft: EdgeDraft, declare: Callable[[str, Axes], str], weighted: bool) -> str:
    factors = [draft.edges("W")] if weighted else []
    return " * ".join([*factors, declare("X", draft.all)])


# ------------------------------------------------------------------ softmax and attention


def softmax(draft: EdgeDraft) -> None:
    """Add the softmax of every row's values."""
    value = f'T.Cast("{draft.wide}", {draft.edges("W")})'
    _softmax(draft, value, draft.edges("O", result=True))


def _softmax(draft: EdgeDraft, value: str, o: str, rate: float = 0.0, rises: str = "") -> str:
    """Write the shares of edges, those that are dropped with a minus; return the factors of values.

    `rises`: the part of the value that differs among the edges of a row, if the value rises with it.
    """
    rows, edges = ("I", *draft.heads), ("I", "J", *draft.heads)
    top, total = draft.wide_scratch("top", rows), draft.wide_scratch("total", rows)
    power = draft.in_place(o, "power")
    largest = f"{top} = T.max({top}, {rises or value})"
    draft.reduce("row_max", edges, largest, f'{top} = -T.infinity("{draft.wide}")')
    if rises:
        draft.spread("top", rows, f"{top} = {value.replace(rises, top)}")
    draft.spread("exponent", edges, f"{power} = T.exp({value} - {top})")
    draft.add("row_sum", edges, total, power)
    share = f"{power} / {total}"
    if rate:
        share = f"T.if_then_else({draft.dropped(rate)}, -({share}), {share})"
    draft.spread("share", edges, f'{o} = T.Cast("{draft.dtype}", {share})')
    return _kept(o, draft.dtype, rate)


def _kept(p: str, dtype: str, rate: float) -> str:
    """Return a share, scaled to make up for those that are dropped; 0 if it is dropped itself, as its sign shows."""
    if not rate:
        return p
    return f"T.max({p}, T.{dtype}(0)) * {_gain(dtype, rate)}"


def _gain(dtype: str, rate: float) -> str:
    """Return the factor that makes up for the shares that are dropped."""
    return f"T.{dtype}({1 / (1 - rate) if rate < 1 else 0.0!r})"


def _whole(p: str, rate: float) -> str:
    """Return a share, whether it is dropped or not."""
    return f"T.max({p}, -{p})" if rate else p


def dropout(draft: EdgeDraft, rate: float) -> None:
    """``O[i, j] = W[i, j] / (1 - rate)``, or 0 if it is dropped."""
    w, o = draft.edges("W"), draft.edges("O", result=True)
    scaled = f"{w} * {_gain(draft.dtype, rate)}"
    line = f"{o} = T.if_then_else({draft.dropped(rate)}, T.{draft.dtype}(0), {scaled})"
    draft.spread("dropout", ("I", "J", *draft.heads), line)


def softmax_gradient(draft: EdgeDraft) -> None:
    """``O = P * (G - sum_j P * G)`` of every row."""
    p, g, o = draft.edges("P_"), draft.edges("G"), draft.edges("O", result=True)
    total, edges = draft.wide_scratch("total", ("I", *draft.heads)), ("I", "J", *draft.heads)
    p_wide, g_wide = (f'T.Cast("{draft.wide}", {value})' for value in (p, g))
    draft.add("row_sum", edges, total, f"{p_wide} * {g_wide}")
    draft.spread("gradient", edges, f'{o} = T.Cast("{draft.dtype}", {p_wide} * ({g_wide} - {total}))')


def _of_edges(draft: EdgeDraft, edged: bool) -> tuple[str, str]:
    """Return a key and a value, with the features of the edge added to both."""
    k, v = draft.columns("KEYS", draft.all), draft.columns("V", draft.mixed)
    if not edged:
        return k, v
    return f"({k} + {draft.edge_rows('EDGES')})", f"({v} + {draft.edge_rows('EDGES_V', draft.mixed)})"


def attention(draft: EdgeDraft, scale: float, edged: bool, rate: float, keep: bool) -> None:
    """``O[i] = sum_j P[i, j] * V[j]``, P the softmax of ``scale * Q[i] K[j]``, a result if it is to be kept.

    Shares are dropped with probability `rate`: these have a minus, by which gradients recognize them.
    """
    q, (k, v) = draft.rows("Q", draft.all), _of_edges(draft, edged)
    p = draft.shares(keep=keep)
    score = draft.in_place(p, "score")
    o = draft.rows("O", draft.mixed, result=True)
    product = f'T.Cast("{draft.wide}", {q}) * T.Cast("{draft.wide}", {k}) * T.{draft.wide}({scale})'
    draft.add("scores", draft.dots, score, product, over="K")
    share = _softmax(draft, score, p, rate)
    draft.add("mix", ("I", "J", *draft.mixed), o, f"{share} * {v}")


def _score_gradients(draft: EdgeDraft, s: str, operands: tuple[str, str, str], factor: str, rate: float) -> None:
    """``S[i, j] = P[i, j] * (G[i] V[j] - sum_j P[i, j] * G[i] V[j])``, times a factor."""
    part, total = draft.in_place(s, "part"), draft.wide_scratch("total", ("I", *draft.heads))
    p, g, v = (f'T.Cast("{draft.wide}", {value})' for value in operands)
    edges, scaled = ("I", "J", *draft.heads), _kept(p, draft.wide, rate)
    draft.add("part", draft.mixed_dots, part, f"{g} * {v}", over="D")
    draft.add("total", edges, total, f"{scaled} * {part}")
    value = f"({scaled} * {part} - {_whole(p, rate)} * {total})" if rate else f"{p} * ({part} - {total})"
    draft.spread("scores", edges, f'{s} = T.Cast("{draft.dtype}", {value}{factor})')


def attention_rows(draft: EdgeDraft, scale: float, edged: bool, rate: float) -> None:
    """Add the gradients of scores and of Q, from that of the result."""
    p, g = draft.edges("P_"), draft.rows("G", draft.mixed)
    k, v = _of_edges(draft, edged)
    s, o = draft.edges("S", result=True), draft.rows("O", draft.all, result=True)
    _score_gradients(draft, s, (p, g, v), f" * T.{draft.wide}({scale})", rate)
    draft.add("rows", ("I", "J", *draft.all), o, f"{s} * {k}")


def attention_columns(draft: EdgeDraft, rate: float) -> None:
    """Add the gradients of K and V from those of scores and of the result: I are the columns of the graph."""
    p, s = draft.edges("P_"), draft.edges("S")
    q, g = draft.columns("Q", draft.all), draft.columns("G", draft.mixed)
    k, v = draft.rows("KEYS", draft.all, result=True), draft.rows("V", draft.mixed, result=True)
    draft.add("keys", ("I", "J", *draft.all), k, f"{s} * {q}")
    _value_gradients(draft, v, p, g, rate)


def attention_edges(draft: EdgeDraft, rate: float) -> None:
    """Add the gradients of what edges add to keys and values, which have equally many features."""
    p, s = draft.edges("P_"), draft.edges("S")
    q, g = draft.rows("Q", draft.all), draft.rows("G", draft.all)
    line = f"{draft.edge_rows('O', result=True)} = {s} * {q} + {_kept(p, draft.dtype, rate)} * {g}"
    draft.spread("edges", ("I", "J", *draft.all), line)


def _value_gradients(draft: EdgeDraft, v: str, p: str, g: str, rate: float) -> None:
    draft.add("values", ("I", "J", *draft.mixed), v, f"{_kept(p, draft.dtype, rate)} * {g}")


def _between(draft: EdgeDraft, edged: bool) -> str:
    """``TARGETS[i] + SOURCES[j]``, and ``EDGES[i, j]`` if edges add to it."""
    parts = [draft.rows("TARGETS", draft.all), draft.columns("SOURCES", draft.all)]
    parts += [draft.edge_rows("EDGES")] if edged else []
    return " + ".join(f'T.Cast("{draft.wide}", {part})' for part in parts)


def _rectified(draft: EdgeDraft, value: str, slope: float) -> str:
    """``leaky_relu(value)``."""
    return f"T.{'max' if slope <= 1 else 'min'}({value}, ({value}) * T.{draft.wide}({slope}))"


def _kink(draft: EdgeDraft, value: str, slope: float) -> str:
    """Return the derivative of ``leaky_relu``."""
    return f"T.if_then_else({value} > T.{draft.wide}(0), T.{draft.wide}(1), T.{draft.wide}({slope}))"


def additive(draft: EdgeDraft, slope: float, edged: bool, rate: float, keep: bool) -> None:
    """``O[i] = sum_j P[i, j] * V[j]``, P the softmax of ``leaky_relu(TARGETS[i] + SOURCES[j] + EDGES[i, j])``."""
    value = _rectified(draft, _between(draft, edged), slope)
    v, edges = draft.columns("V", draft.mixed), ("I", "J", *draft.heads)
    p = draft.shares(keep=keep)
    o = draft.rows("O", draft.mixed, result=True)
    if edged or slope < 0:
        score = draft.in_place(p, "score")
        draft.spread("scores", edges, f"{score} = {value}")
        share = _softmax(draft, score, p, rate)
    else:  # the score rises with the value of the source
        source = f'T.Cast("{draft.wide}", SOURCES[{", ".join(["j", *_lower(draft.heads)])}])'
        share = _softmax(draft, value, p, rate, source)
    draft.add("mix", ("I", "J", *draft.mixed), o, f"{share} * {v}")


def additive_rows(draft: EdgeDraft, slope: float, edged: bool, rate: float) -> None:
    """Add the gradients of scores (which are those of EDGES) and of TARGETS, from that of the result."""
    factor = _kink(draft, _between(draft, edged), slope)
    p, g, v = draft.edges("P_"), draft.rows("G", draft.mixed), draft.columns("V", draft.mixed)
    s, o = draft.edges("S", result=True), draft.rows("O", draft.heads, result=True)
    _score_gradients(draft, s, (p, g, v), f" * {factor}", rate)
    draft.add("rows", ("I", "J", *draft.heads), o, s)


def additive_columns(draft: EdgeDraft, rate: float) -> None:
    """Add the gradients of SOURCES and V from those of scores and of the result: I are the columns of the graph."""
    p, s, g = draft.edges("P_"), draft.edges("S"), draft.columns("G", draft.mixed)
    o, v = draft.rows("O", draft.heads, result=True), draft.rows("V", draft.mixed, result=True)
    draft.add("sources", ("I", "J", *draft.heads), o, s)
    _value_gradients(draft, v, p, g, rate)


def dynamic(draft: EdgeDraft, slope: float, edged: bool, rate: float, keep: bool) -> None:
    """``O[i] = sum_j P[i, j] * V[j]``, P the softmax of ``A . leaky_relu(TARGETS[i] + SOURCES[j])``."""
    value = _between(draft, edged)
    draft.array("A", draft.all, draft.dtype)
    a = f'T.Cast("{draft.wide}", A[{", ".join(_lower(draft.all))}])'
    v = draft.columns("V", draft.mixed)
    p = draft.shares(keep=keep)
    score = draft.in_place(p, "score")
    o = draft.rows("O", draft.mixed, result=True)
    rectified = _rectified(draft, value, slope)
    draft.add("scores", draft.dots, score, f"{a} * {rectified}", over="K")
    share = _softmax(draft, score, p, rate)
    draft.add("mix", ("I", "J", *draft.mixed), o, f"{share} * {v}")


def dynamic_rows(draft: EdgeDraft, slope: float, edged: bool, rate: float) -> None:
    """Add the gradients of scores, and of TARGETS but for the factor A, from that of the result."""
    value = _between(draft, edged)
    p, g, v = draft.edges("P_"), draft.rows("G", draft.mixed), draft.columns("V", draft.mixed)
    s, o = draft.edges("S", result=True), draft.rows("O", draft.all, result=True)
    _score_gradients(draft, s, (p, g, v), "", rate)
    _kinks(draft, s, o, value, slope)


def dynamic_columns(draft: EdgeDraft, slope: float, edged: bool, rate: float) -> None:
    """Add the gradients of SOURCES, but for the factor A, and of V: I are the columns of the graph."""
    value = _between(draft, edged)
    p, s, g = draft.edges("P_"), draft.edges("S"), draft.columns("G", draft.mixed)
    o, v = draft.rows("O", draft.all, result=True), draft.rows("V", draft.mixed, result=True)
    _kinks(draft, s, o, value, slope)
    _value_gradients(draft, v, p, g, rate)


def _kinks(draft: EdgeDraft, s: str, o: str, value: str, slope: float) -> None:
    draft.add("kinks", ("I", "J", *draft.all), o, _through_kink(draft, s, value, slope))


def _through_kink(draft: EdgeDraft, s: str, value: str, slope: float) -> str:
    return f'T.Cast("{draft.dtype}", T.Cast("{draft.wide}", {s}) * {_kink(draft, value, slope)})'


def dynamic_edges(draft: EdgeDraft, slope: float) -> None:
    """Add the gradients of EDGES but for the factor A."""
    value, s = _between(draft, True), draft.edges("S")
    o = draft.edge_rows("O", result=True)
    draft.spread("kinks", ("I", "J", *draft.all), f"{o} = {_through_kink(draft, s, value, slope)}")


# ------------------------------------------------------------------ kernels


PROGRAMS: dict[str, Callable[..., None]] = {
    writer.__name__: writer
    for writer in (
        *(spmm, linear, row_sum, sddmm, edge_sum, ties, picked, picked_edges, dropout, softmax, softmax_gradient),
        *(attention, attention_rows, attention_columns, attention_edges, additive, additive_rows, additive_columns),
        *(dynamic, dynamic_rows, dynamic_columns, dynamic_edges),
    )
}


@remember("kernels of graphs", 256)
def kernel(name: str, dtype: str, idtype: str, inner: Sizes, is_via: bool, *options: object) -> Kernel:
    """Return the compiled program of a name, for graphs of any size; `dtype` may be a precision of float32."""
    attributes, in_parts = {FREE_SUMS: True}, dtype in PRECISIONS
    dtype = "float32" if in_parts else dtype
    draft = EdgeDraft(f"graph_{name}", attributes=attributes, dtype=dtype, idtype=idtype, inner=inner, is_via=is_via)
    PROGRAMS[name](draft, *options)
    function = draft.function()
    return build(by_three_products(function) if in_parts else function)


__all__ = ["Sizes", "kernel"]
