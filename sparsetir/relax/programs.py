# SPDX-License-Identifier: Apache-2.0
"""Stage-I programs behind the operators and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import ir, tirx

from sparsetir.lower.annotations import FREE_SUMS
from sparsetir.script.writer import Axes, ProgramWriter

# Attention under a block-sparse mask as one program: scores, softmax and weighted sum of one row of blocks at a time.
#
# The scores of a row are scratch of one step, which stays in the private cache of a core. They are transposed, with the
# positions of the row along vectors. Both products are then register tiles that read their operands as they are stored:
# elements of K and of the scores as scalars, Q (transposed once per step) and V as vectors. Maxima and sums need no
# reduction within a vector.


def attention(shape: dict[str, Any], dtype: str, idtype: str, scale: float) -> NamedProgram:
    """Return the program of ``softmax(scale * Q K^T) V`` over the blocks of a structure; a row without blocks is zero.

    Parameters
    ----------
    shape : dict
        ``heads``, ``blocks`` of ``block`` positions, ``nnz`` listed blocks, ``feat`` and ``out`` features.
    dtype, idtype : str
    scale : float
    """
    draft = OperatorWriter("block_sparse_attention")
    draft.dense("H", shape["heads"], idtype)
    draft.dense("IO", shape["blocks"], idtype)
    draft.rows("JO", "IO", shape["blocks"], shape["nnz"], idtype)
    for name, size in (("N", "blocks"), ("II", "block"), ("JI", "block"), ("F", "feat"), ("D", "out")):
        draft.dense(name, shape[size], idtype)
    draft.array("Q", ("H", "IO", "II", "F"), dtype)
    draft.array("K", ("H", "N", "JI", "F"), dtype)
    draft.array("V", ("H", "N", "JI", "D"), dtype)
    draft.array("O", ("H", "IO", "II", "D"), dtype, result=True)
    # Rows of blocks are the outer loop: they are partitioned by their numbers of blocks, however few heads there are.
    with draft.steps(("IO", "H"), "rows"):
        _row(draft, dtype, "float64" if dtype == "float64" else "float32", scale)
    return draft.program()


def _row(draft: OperatorWriter, dtype: str, wide: str, scale: float) -> None:
    """Write the attention of a row of blocks of one head, computed in `wide`."""
    draft.scratch("turned", ("F", "II"), wide)
    draft.scratch("score", ("N", "JI", "II"), wide)
    for name, axes in (("top", ("II",)), ("total", ("II",)), ("mixed", ("II", "D"))):
        draft.scratch(name, axes, wide)
    at, pairs = "score[jo, ji, ii]", ("JO", "JI", "II")
    query = f'turned[f, ii] = T.Cast("{wide}", Q[h, io, ii, f]) * T.{wide}({scale})'
    draft.iterate(("II", "F"), "SS", "turn", [query])
    product = f'{at} = {at} + turned[f, ii] * T.Cast("{wide}", K[h, jo, ji, f])'
    draft.iterate(("JO", "JI", "F", "II"), "SSRS", "scores", [product], init=f"{at} = 0", is_stored=True)
    draft.iterate(pairs, "RRS", "row_max", [f"top[ii] = T.max(top[ii], {at})"], init=f'top[ii] = T.min_value("{wide}")')
    draft.iterate(pairs, "SSS", "exponent", [f"{at} = T.exp({at} - top[ii])"])
    draft.iterate(pairs, "RRS", "row_sum", [f"total[ii] = total[ii] + {at}"], init="total[ii] = 0")
    mixture = f'mixed[ii, d] = mixed[ii, d] + {at} * T.Cast("{wide}", V[h, jo, ji, d])'
    draft.iterate((*pairs, "D"), "RRSS", "mix", [mixture], init="mixed[ii, d] = 0")
    # The largest exponential is 1, so a sum below 1 means that the row has no blocks.
    share = f'O[h, io, ii, d] = T.Cast("{dtype}", mixed[ii, d] / T.max(total[ii], T.{wide}(1)))'
    draft.iterate(("II", "D"), "SS", "share", [share])


# Stage-I programs that appear in gradients.


def segment_expand(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> NamedProgram:
    """Return the program of ``Y[e] = X[i]`` for each entry e of row i."""
    draft = OperatorWriter("segment_expand")
    inner = ("K",) if "feat" in shape else ()
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["nnz"], shape["nnz"], idtype, indices=False)
    if inner:
        draft.dense("K", shape["feat"], idtype)
    draft.array("X", ("I", *inner), dtype)
    axes = ("I", "J", *inner)
    target = draft.finish("Y", axes, dtype, epilogue)
    line = f"{target}[{', '.join(axes).lower()}] = X[{', '.join(('I', *inner)).lower()}]"
    draft.iterate(axes, "S" * len(axes), "expand", [line])
    draft.follow("Y", target, axes, epilogue, {"E": ("I", "J")})
    return draft.program()


def gather_outer(shape: dict[str, Any], dtype: str, idtype: str) -> NamedProgram:
    """Return the program of ``W[r, c, d] = sum_e X[left[e], c] * Y[right[e], d]`` over the entries e of row r."""
    draft = OperatorWriter("gather_outer")
    draft.dense("R", shape["m"], idtype)
    draft.rows("E", "R", shape["nnz"], shape["nnz"], idtype, indices=False)
    for name, size in (("N", "n"), ("M", "others"), ("C", "in"), ("D", "out")):
        draft.dense(name, shape[size], idtype)
    draft.array("left", ("R", "E"), idtype)
    draft.array("right", ("R", "E"), idtype)
    draft.array("X", ("N", "C"), dtype)
    draft.array("Y", ("M", "D"), dtype)
    draft.array("W", ("R", "C", "D"), dtype, result=True)
    line = "W[r, c, d] = W[r, c, d] + X[left[r, e], c] * Y[right[r, e], d]"
    draft.iterate(("R", "E", "C", "D"), "SRSS", "gather_outer", [line], init="W[r, c, d] = 0")
    return draft.program()


# ------------------------------------------------------------------ attention


@dataclass(frozen=True)
class _Side:
    """The sum that is the gradient of one operand: over the blocks that its own blocks are paired with.

    Attributes
    ----------
    score, part : (str, str)
        The operands, own side first, whose products are the scores, and the gradients of probabilities.
    mixed : str
        The operand that is summed with these weights.
    place : str
        The index of a query position, which is on the own or on the paired side.
    """

    score: tuple[str, str]
    part: tuple[str, str] | None
    mixed: str
    place: str


SIDES = {
    "query": _Side(("Q", "K"), ("G", "V"), "K", "h, io, ii"),
    "key": _Side(("K", "Q"), ("V", "G"), "Q", "h, jo, ji"),
    "value": _Side(("K", "Q"), None, "G", "h, jo, ji"),
}
FEATURES = {"Q": "F", "K": "F", "V": "D", "G": "D"}


def attention_lse(shape: dict[str, Any], dtype: str, idtype: str, scale: float) -> NamedProgram:
    """Return the program of the log-sum-exp of each position's scores; minus infinity where a position has none."""
    draft, wide = OperatorWriter("block_sparse_attention_lse"), _wide(dtype)
    _axes(draft, shape, idtype)
    own, paired = _operand(draft, "Q", dtype, is_own=True), _operand(draft, "K", dtype)
    draft.array("LSE", ("H", "IO", "II"), wide, result=True)
    with draft.steps(("IO", "H"), "rows"):
        for name, axes in (("turned", ("F", "II")), ("score", ("N", "JI", "II")), ("top", ("II",)), ("total", ("II",))):
            draft.scratch(name, axes, wide)
        _product(draft, "score", "turned", own, paired, "F", wide, scale)
        at, pairs = "score[jo, ji, ii]", ("JO", "JI", "II")
        lowest = f'top[ii] = T.min_value("{wide}")'
        draft.iterate(pairs, "RRS", "row_max", [f"top[ii] = T.max(top[ii], {at})"], init=lowest)
        draft.iterate(pairs, "SSS", "exponent", [f"{at} = T.exp({at} - top[ii])"])
        draft.iterate(pairs, "RRS", "row_sum", [f"total[ii] = total[ii] + {at}"], init="total[ii] = 0")
        draft.iterate(("II",), "S", "leave", ["LSE[h, io, ii] = top[ii] + T.log(total[ii])"])
    return draft.program()


def attention_backward(shape: dict[str, Any], dtype: str, idtype: str, scale: float, operand: str) -> NamedProgram:
    """Return the program of the gradient of one operand of an attention, which recomputes the probabilities.

    With ``P = exp(scale * Q K^T - lse)`` and ``S = scale * P * (G V^T - delta)`` the gradients are ``S K`` of the
    queries, ``S^T Q`` of the keys and ``P^T G`` of the values: sums over the blocks that the structure lists for each
    block of the operand.

    Parameters
    ----------
    shape : dict
        As for `attention`.
    dtype, idtype : str
    scale : float
    operand : {"query", "key", "value"}
    """
    draft, wide, side = OperatorWriter(f"block_sparse_attention_{operand}"), _wide(dtype), SIDES[operand]
    _axes(draft, shape, idtype)
    pairs = [side.score] if side.part is None else [side.score, side.part]
    operands = {name: _operand(draft, name, dtype, is_own=n == 0) for pair in pairs for n, name in enumerate(pair)}
    if side.mixed not in operands:
        operands[side.mixed] = _operand(draft, side.mixed, dtype)
    for name in ("LSE", "DELTA")[: len(pairs)]:
        draft.array(name, ("H", "N" if "jo" in side.place else "IO", "II" if "ii" in side.place else "JI"), wide)
    last = FEATURES[side.mixed]
    draft.array("O", ("H", "IO", "II", last), dtype, result=True)
    with draft.steps(("IO", "H"), "rows"):
        _mix(draft, side, operands, wide, scale)
        draft.iterate(
            ("II", last),
            "SS",
            "leave",
            [f'O[h, io, ii, {last.lower()}] = T.Cast("{dtype}", mixed[ii, {last.lower()}])'],
        )
    return draft.program()


def _mix(draft: OperatorWriter, side: _Side, operands: dict[str, str], wide: str, scale: float) -> None:
    """Write the sum over a row of blocks of one head."""
    last = FEATURES[side.mixed]
    draft.scratch("score", ("N", "JI", "II"), wide)
    draft.scratch("mixed", ("II", last), wide)
    own, paired = side.score
    draft.scratch("turned", (FEATURES[own], "II"), wide)
    _product(draft, "score", "turned", operands[own], operands[paired], FEATURES[own], wide, scale)
    at, pairs = "score[jo, ji, ii]", ("JO", "JI", "II")
    draft.iterate(pairs, "SSS", "exponent", [f"{at} = T.exp({at} - LSE[{side.place}])"])
    if side.part is not None:
        own, paired = side.part
        draft.scratch("part", ("N", "JI", "II"), wide)
        draft.scratch("turned_part", (FEATURES[own], "II"), wide)
        _product(draft, "part", "turned_part", operands[own], operands[paired], FEATURES[own], wide, scale)
        share = f"{at} = {at} * (part[jo, ji, ii] - DELTA[{side.place}] * T.{wide}({scale}))"
        draft.iterate(pairs, "SSS", "gradient", [share])
    place = f"mixed[ii, {last.lower()}]"
    body = [f'{place} = {place} + {at} * T.Cast("{wide}", {operands[side.mixed]})']
    draft.iterate((*pairs, last), "RRSS", "mix", body, init=f"{place} = 0")


def _axes(draft: OperatorWriter, shape: dict[str, Any], idtype: str) -> None:
    draft.dense("H", shape["heads"], idtype)
    draft.dense("IO", shape["blocks"], idtype)
    draft.rows("JO", "IO", shape["blocks"], shape["nnz"], idtype)
    for name, size in (("N", "blocks"), ("II", "block"), ("JI", "block"), ("F", "feat"), ("D", "out")):
        if size in shape:
            draft.dense(name, shape[size], idtype)


def _operand(draft: OperatorWriter, name: str, dtype: str, *, is_own: bool = False) -> str:
    """Declare an operand, and return the text of its element on its side."""
    last = FEATURES[name]
    axes: Axes = ("H", "IO", "II", last) if is_own else ("H", "N", "JI", last)
    draft.array(name, axes, dtype)
    return f"{name}[h, {'io, ii' if is_own else 'jo, ji'}, {last.lower()}]"


def _product(
    draft: OperatorWriter, result: str, transposed: str, own: str, paired: str, over: str, wide: str, scale: float
) -> None:
    """Write ``scale`` times the products of own and paired positions, with the own operand transposed for vectors."""
    over, at = over.lower(), f"{result}[jo, ji, ii]"
    transpose = f'{transposed}[{over}, ii] = T.Cast("{wide}", {own}) * T.{wide}({scale})'
    draft.iterate(("II", over.upper()), "SS", f"turn_{result}", [transpose])
    line = f'{at} = {at} + {transposed}[{over}, ii] * T.Cast("{wide}", {paired})'
    axes = ("JO", "JI", over.upper(), "II")
    draft.iterate(axes, "SSRS", result, [line], init=f"{at} = 0", is_stored=True)


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


# Stage-I programs of the operators, written for the sizes and the epilogue of one call.


OPAQUE = 8  # TVM's OpPatternKind: Relax fuses nothing with an opaque function.


@dataclass(frozen=True)
class EpilogueOperand:
    """A further tensor operand of an epilogue: its Relax expression, and the axes of the result that it runs along.

    An axis of extent one is None.
    """

    value: Any
    axes: tuple[str | None, ...]
    dtype: str


@dataclass(frozen=True)
class Epilogue:
    """An elementwise map applied to a result before it is stored, as the text of an expression.

    Parameters
    ----------
    text : str
        TVMScript, with ``{0}`` for the element and ``{1}``, ``{2}``, ... for those of the operands.
    dtype : str
        Dtype of the final element.
    operands : tuple of EpilogueOperand
    """

    text: str
    dtype: str
    operands: tuple[EpilogueOperand, ...] = ()


@dataclass(frozen=True)
class NamedProgram:
    """A function, the names of its input parameters, and the sizes to pass after them."""

    func: tirx.PrimFunc
    inputs: tuple[str, ...]
    sizes: tuple[ir.Expr, ...]


@dataclass
class OperatorWriter(ProgramWriter):
    """Writer of the program of an operator, which an epilogue may follow."""

    attributes: dict[str, Any] = field(default_factory=lambda: {"op_pattern": OPAQUE, FREE_SUMS: True})

    def finish(self, result: str, axes: Axes, dtype: str, epilogue: Epilogue | None) -> str:
        """Declare a result that an epilogue may follow, and return the name of the buffer to compute it in."""
        out = epilogue.dtype if epilogue is not None else dtype
        self.array(result, axes, out, result=True)
        if out == dtype:
            return result
        self.scratch(f"{result}_sum", axes, dtype)
        return f"{result}_sum"

    def follow(
        self, result: str, source: str, axes: Axes, epilogue: Epilogue | None, axes_of: Mapping[str, Axes] | None = None
    ) -> None:
        """Write the iteration of an epilogue. `axes_of` maps an axis of the result to those it is split into."""
        if epilogue is None:
            return
        names = [f"{source}[{', '.join(axes).lower()}]", *self.operands(epilogue, axes_of)]
        body = f"{result}[{', '.join(axes).lower()}] = {epilogue.text.format(*names)}"
        self.iterate(axes, "S" * len(axes), "epilogue", [body])

    def operands(self, epilogue: Epilogue, axes_of: Mapping[str, Axes] | None = None) -> list[str]:
        """Declare the operands of an epilogue, and return their elements. `axes_of` as in `follow`."""
        if any(axis is None for operand in epilogue.operands for axis in operand.axes):
            self.lines.append("ONE = T.dense_fixed(1)")
        names = []
        for n, operand in enumerate(epilogue.operands):
            axes = [part for axis in operand.axes for part in (axes_of or {}).get(axis or "", (axis,))]
            self.array(f"E{n}", tuple(axis or "ONE" for axis in axes), operand.dtype)
            names.append(f"E{n}[{', '.join(axis.lower() if axis else '0' for axis in axes)}]")
        return names

    def sum_of_products(
        self, result: str, axes: Axes, dtype: str, loops: Axes, factors: str, epilogue: Epilogue | None
    ) -> NamedProgram:
        """Return the program of sums of `factors` over those of `loops` that are not axes of the result."""
        target = self.finish(result, axes, dtype, epilogue)
        place = f"{target}[{', '.join(axes).lower()}]"
        kinds = "".join("S" if axis in axes else "R" for axis in loops)
        self.iterate(loops, kinds, self.name, [f"{place} = {place} + {factors}"], init=f"{place} = 0")
        self.follow(result, target, axes, epilogue)
        return self.program()

    def program(self) -> NamedProgram:
        """Return the finished program."""
        return NamedProgram(self.function(), tuple(self.inputs), tuple(self.sizes.values()))


def spmm(
    shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None, operand: str | None = None
) -> NamedProgram:
    """Return the program of ``C[i, k] = sum_j A[i, j] * B[j, k]``, for each B of a batch if `shape` has one.

    With `operand`, the dtype of B, both operands are 8-bit integers, and C is their exact product in int32.
    """
    draft = OperatorWriter("spmm")
    outer = ("L",) if "batch" in shape else ()
    if outer:
        draft.dense("L", shape["batch"], idtype)
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.dense("K", shape["feat"], idtype)
    draft.array("A", ("I", "J"), dtype)
    draft.array("B", (*outer, "N", "K"), operand or dtype)
    factors = ["A[i, j]", f"B[{', '.join((*outer, 'J', 'K')).lower()}]"]
    if operand:
        factors = [f'T.Cast("int32", {factor})' for factor in factors]
    dtype, loops = "int32" if operand else dtype, (*outer, "I", "J", "K")
    return draft.sum_of_products("C", (*outer, "I", "K"), dtype, loops, " * ".join(factors), epilogue)


def spmv(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> NamedProgram:
    """Return the program of ``y[i] = sum_j A[i, j] * x[j]``."""
    draft = OperatorWriter("spmv")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.array("A", ("I", "J"), dtype)
    draft.array("X", ("N",), dtype)
    return draft.sum_of_products("Y", ("I",), dtype, ("I", "J"), "A[i, j] * X[j]", epilogue)


def linear(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> NamedProgram:
    """Return the program of ``Y[b, o] = sum_i A[o, i] * X[b, i]``, with row-major X."""
    draft = OperatorWriter("linear")
    draft.dense("O", shape["m"], idtype)
    draft.rows("I", "O", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.dense("B", shape["batch"], idtype)
    draft.array("A", ("O", "I"), dtype)
    draft.array("X", ("B", "N"), dtype)
    return draft.sum_of_products("Y", ("B", "O"), dtype, ("O", "I", "B"), "A[o, i] * X[b, i]", epilogue)


def sddmm(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> NamedProgram:
    """Return the program of ``O[i, j] = S[i, j] * sum_k X[i, k] * Y[j, k]`` at the entries of S."""
    draft = OperatorWriter("sddmm")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.dense("K", shape["feat"], idtype)
    draft.array("S", ("I", "J"), dtype)
    draft.array("X", ("I", "K"), dtype)
    draft.array("Y", ("N", "K"), dtype)
    factors = "S[i, j] * X[i, k] * Y[j, k]"
    return draft.sum_of_products("O", ("I", "J"), dtype, ("I", "J", "K"), factors, epilogue)


def softmax(shape: dict[str, Any], dtype: str, idtype: str) -> NamedProgram:
    """Return the program of the softmax over the entries of each row; an empty row has no result."""
    wide = "float64" if dtype == "float64" else "float32"
    draft = OperatorWriter("sparse_softmax")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["nnz"], shape["nnz"], idtype, indices=False)
    draft.array("A", ("I", "J"), dtype)
    draft.array("P", ("I", "J"), dtype, result=True)
    draft.scratch("top", ("I",), wide)
    draft.scratch("total", ("I",), wide)
    draft.scratch("power", ("I", "J"), wide)
    value = f'T.Cast("{wide}", A[i, j])'
    draft.iterate(
        ("I", "J"), "SR", "row_max", [f"top[i] = T.max(top[i], {value})"], init=f'top[i] = T.min_value("{wide}")'
    )
    draft.iterate(("I", "J"), "SS", "exponent", [f"power[i, j] = T.exp({value} - top[i])"])
    draft.iterate(("I", "J"), "SR", "row_sum", ["total[i] = total[i] + power[i, j]"], init="total[i] = 0")
    draft.iterate(("I", "J"), "SS", "share", [f'P[i, j] = T.Cast("{dtype}", power[i, j] / total[i])'])
    return draft.program()


def segment_reduce(
    shape: dict[str, Any], dtype: str, idtype: str, reduce: str, epilogue: Epilogue | None = None
) -> NamedProgram:
    """Return the program of the sum, mean, maximum or minimum of each segment of rows of X; 0 for an empty segment."""
    draft = OperatorWriter(f"segment_{reduce}")
    inner = ("K",) if "feat" in shape else ()
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["nnz"], shape["nnz"], idtype, indices=False)
    if inner:
        draft.dense("K", shape["feat"], idtype)
    draft.array("X", ("I", "J", *inner), dtype)
    axes = ("I", *inner)
    target = draft.finish("Y", axes, dtype, epilogue)
    at = ", ".join(axes).lower()
    y, x = f"{target}[{at}]", f"X[{', '.join(('I', 'J', *inner)).lower()}]"
    step = {"max": f"T.max({y}, {x})", "min": f"T.min({y}, {x})"}.get(reduce, f"{y} + {x}")
    first = {"max": f'T.min_value("{dtype}")', "min": f'T.max_value("{dtype}")'}.get(reduce, "0")
    if reduce != "sum":
        draft.scratch("count", ("I",), "int32")
        draft.iterate(("I", "J"), "SR", "count", ["count[i] = count[i] + 1"], init="count[i] = 0")
    draft.iterate(("I", "J", *inner), "SR" + "S" * len(inner), "reduce", [f"{y} = {step}"], init=f"{y} = {first}")
    if reduce == "mean":
        share = f'{y} / T.Cast("{dtype}", T.max(count[i], 1))'
        draft.iterate(axes, "S" * len(axes), "mean", [f"{y} = {share}"])
    elif reduce != "sum":
        draft.iterate(axes, "S" * len(axes), "empty", [f"{y} = T.if_then_else(count[i] > 0, {y}, T.{dtype}(0))"])
    draft.follow("Y", target, axes, epilogue)
    return draft.program()


def gather_matmul_scatter(
    shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None
) -> NamedProgram:
    """Return the program of ``Y[i, d] = sum_jc X[j, c] * W[kind[i, j], c, d]`` over the entries j of row i."""
    draft = OperatorWriter("gather_matmul_scatter")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    for name, size in (("N", "n"), ("R", "kinds"), ("C", "in"), ("D", "out")):
        draft.dense(name, shape[size], idtype)
    draft.array("X", ("N", "C"), dtype)
    draft.array("W", ("R", "C", "D"), dtype)
    draft.array("kinds", ("I", "J"), idtype)
    factors = "X[j, c] * W[kinds[i, j], c, d]"
    return draft.sum_of_products("Y", ("I", "D"), dtype, ("I", "J", "C", "D"), factors, epilogue)


def matmul(
    shape: dict[str, Any],
    dtype: str,
    rows: int,
    epilogue: Epilogue | None = None,
    panel: int = 0,
    result: str | None = None,
    right: str | None = None,
    *,
    is_paired: bool = False,
) -> NamedProgram:
    """Return the program of ``C[i, k] = sum_j A[i, j] * B[j, k]`` for dense matrices, `rows` rows of A at a time.

    C and B have the dtypes `result` and `right`, by default that of A. If `shape` has a batch, so have B and C: A is
    multiplied by each B, or each A by its own B if `is_paired`; there is no panel then.

    With a `panel`, which divides the columns, B is packed as panels of so many columns,
    ``B[k // panel, j, k % panel]``. C and the operands of the epilogue then have two dimensions for the columns,
    ``C[i, k // panel, k % panel]``.
    """
    draft = OperatorWriter("matmul")
    columns: Axes = ("KO", "KI") if panel else ("K",)
    outer: Axes = ("L",) if "batch" in shape else columns[:-1]
    if "batch" in shape:
        draft.dense("L", shape["batch"])
    # As a parameter the extent is not known to be small, so that the loop is not unrolled.
    draft.dense("IO", _pieces(shape["m"], rows), is_known=not panel)
    for name, extent in (("II", rows), ("I", shape["m"]), ("J", shape["n"])):
        draft.dense(name, extent)
    for name, extent in zip(
        columns, (_pieces(shape["feat"], panel), panel) if panel else (shape["feat"],), strict=True
    ):
        draft.dense(name, extent)
    lead = outer if is_paired else ()
    draft.array("A", (*lead, "I", "J"), dtype)
    draft.array("B", (*outer, "J", columns[-1]), right or dtype)
    result = result or dtype
    axes: Axes = (*outer, "I", "K") if "batch" in shape else ("I", *columns)
    target = draft.finish("C", axes, result, epilogue)
    row = f"io * {rows} + ii"
    place = f"{target}[{', '.join(row if axis == 'I' else axis.lower() for axis in axes)}]"
    factors = [
        f"A[{', '.join([*map(str.lower, lead), row, 'j'])}]",
        f"B[{', '.join([*outer, 'J', columns[-1]]).lower()}]",
    ]
    if result != dtype:
        factors = [f'T.Cast("{result}", {side})' for side in factors]
    body = [f"{place} = {place} + {' * '.join(factors)}"]
    loops = (*outer, "IO", "II", "J", columns[-1])
    draft.iterate(loops, "S" * len(outer) + "SSRS", "matmul", body, init=f"{place} = 0")
    draft.follow("C", target, axes, epilogue)
    return draft.program()


def gemv(shape: dict[str, Any], dtype: str, epilogue: Epilogue | None = None) -> NamedProgram:
    """Return the program of ``Y[i] = sum_j A[i, j] * X[j]`` for a dense matrix and a vector."""
    draft = OperatorWriter("gemv")
    draft.dense("I", shape["m"])
    draft.dense("J", shape["n"])
    draft.array("A", ("I", "J"), dtype)
    draft.array("X", ("J",), dtype)
    return draft.sum_of_products("Y", ("I",), dtype, ("I", "J"), "A[i, j] * X[j]", epilogue)


def _pieces(extent: Any, size: int) -> Any:
    """Return the number of pieces of a given size, rounded up."""
    if isinstance(extent, (int, tirx.IntImm)):
        return -(-int(extent) // size)
    return tirx.floordiv(extent + (size - 1), tirx.const(size, "int64"))


# Gather, matmul and scatter with a structure that is known when the model is built: entries are grouped by kind.
#
# In row order each entry loads its own matrix for one row of X. In the grouped program a tile of rows of the result is
# scratch of one step, and the entries of a tile are in groups of one kind. A group multiplies a few gathered rows by
# one matrix, in a register tile, and adds the products to their rows of the tile. The padding of a group adds to a row
# beyond the tile.


TILE_BYTES = 1 << 17  # Bytes of a result tile: together with the matrices it stays in the second-level cache.
TILES_EACH = 8  # Minimum number of tiles per thread: the work differs between tiles.
MOST_PADDED = 2.0  # Maximum of computed rows per entry: above it the padding costs more than the groups save.


@dataclass(frozen=True)
class Groups:
    """Entries of a structure in groups of one kind.

    Parameters
    ----------
    tile_ptr : ndarray
        The first row of each tile, and the number of rows.
    group_ptr, kinds : ndarray
        The first group of each tile; the kind of each group.
    cols, rows : ndarray
        Row of X, and row of the result within its tile, of each entry of each group.
    height : int
        Number of rows of the largest tile, which is also the row of the padding.
    """

    tile_ptr: np.ndarray
    group_ptr: np.ndarray
    kinds: np.ndarray
    cols: np.ndarray
    rows: np.ndarray
    height: int

    @classmethod
    def of(
        cls, indptr: np.ndarray, indices: np.ndarray, kinds: np.ndarray, *, size: int, most: int, tiles: int
    ) -> Groups:
        """Group entries by `size` in tiles of at most `most` rows, with about `tiles` tiles or more."""
        tile_ptr = _tiles(indptr, most, max(indices.size // tiles, 1))
        row = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
        tile = np.searchsorted(tile_ptr, row, side="right") - 1
        order = np.lexsort((row, kinds, tile))
        row, kind, tile, source = row[order], kinds[order], tile[order], indices[order]
        is_first = np.ones(row.size, bool)
        is_first[1:] = (tile[1:] != tile[:-1]) | (kind[1:] != kind[:-1])
        starts = np.flatnonzero(is_first)
        counts = np.diff(np.append(starts, row.size))
        groups = -(-counts // size)
        first = np.append(0, np.cumsum(groups))
        place = np.repeat(first[:-1] * size - starts, counts) + np.arange(row.size)
        height = int(np.diff(tile_ptr).max())
        cols, rows = np.zeros(first[-1] * size, indptr.dtype), np.full(first[-1] * size, height, indptr.dtype)
        cols[place], rows[place] = source, row - tile_ptr[tile]
        group_ptr = np.searchsorted(np.repeat(tile[starts], groups), np.arange(tile_ptr.size))
        in_idtype = lambda array: array.astype(indptr.dtype)  # noqa: E731
        return cls(
            in_idtype(tile_ptr), in_idtype(group_ptr), in_idtype(np.repeat(kind[starts], groups)), cols, rows, height
        )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Index arrays by the names of parameters."""
        names = ("tile_ptr", "group_ptr", "kinds", "cols", "rows")
        return {name: getattr(self, name) for name in names}


def _tiles(indptr: np.ndarray, most_rows: int, most_entries: int) -> np.ndarray:
    """Return the first row of each tile, with the number of rows at the end."""
    starts, m = [0], indptr.size - 1
    while starts[-1] < m:
        here = starts[-1]
        end = int(np.searchsorted(indptr, indptr[here] + most_entries, side="right")) - 1
        starts.append(min(max(end, here + 1), here + most_rows, m))
    return np.asarray(starts)


def groups_of(
    structure: dict[str, Any], shape: dict[str, Any], itemsize: int, *, size: int, threads: int
) -> Groups | None:
    """Return the groups of constant index arrays; None if one is no constant, or the groups need too much padding."""
    if not all(isinstance(value, ir.GenericConst) for value in structure.values()):
        return None
    arrays = {name: np.asarray(value.value.numpy()) for name, value in structure.items()}
    if not arrays["indices"].size:
        return None
    out = int(shape["out"]) if isinstance(shape["out"], (int, tirx.IntImm)) else 1
    most = max(TILE_BYTES // (out * itemsize), size)
    groups = Groups.of(**arrays, size=size, most=most, tiles=TILES_EACH * threads)
    return groups if groups.cols.size <= MOST_PADDED * arrays["indices"].size else None


def grouped(
    shape: dict[str, Any], dtype: str, groups: Groups, size: int, epilogue: Epilogue | None = None
) -> NamedProgram:
    """Return the program of ``Y[i, d] = sum_jc X[j, c] * W[kind[i, j], c, d]`` over entries in groups of `size`."""
    idtype, wide = str(groups.cols.dtype), "float64" if dtype == "float64" else "float32"
    draft = OperatorWriter("gather_matmul_scatter")
    draft.inputs += list(groups.arrays)
    _declare(draft, shape, groups, size, idtype)
    for name, size_ in (("N", "n"), ("R", "kinds"), ("C", "in"), ("D", "out")):
        draft.dense(name, shape[size_], idtype)
    draft.array("X", ("N", "C"), dtype)
    draft.array("W", ("R", "C", "D"), dtype)
    draft.array("Y", ("TI", "I", "D"), dtype if epilogue is None else epilogue.dtype, result=True)
    value = f'T.Cast("{dtype}", total[i, d])'
    if epilogue is not None:
        value = epilogue.text.format(value, *draft.operands(epilogue, {"I": ("TI", "I")}))
    with draft.steps(("TI",), "tiles"):
        draft.scratch("total", ("L", "D"), wide)
        draft.scratch("part", ("S", "D"), wide)
        draft.iterate(("L", "D"), "SS", "clear", ["total[l, d] = 0"])
        with draft.steps(("G",), "groups"):
            product = f'T.Cast("{wide}", X[j, c]) * T.Cast("{wide}", W[g, c, d])'
            body = [f"part[e, d] = part[e, d] + {product}"]
            draft.iterate(("E", "D", "J", "C"), "SSRR", "multiply", body, init="part[e, d] = 0", is_stored=True)
            draft.iterate(("E", "P", "D"), "RRS", "add", ["total[p, d] = total[p, d] + part[e, d]"])
        draft.iterate(("I", "D"), "SS", "leave", [f"Y[ti, i, d] = {value}"])
    return draft.program()


def _declare(draft: OperatorWriter, shape: dict[str, Any], groups: Groups, size: int, idtype: str) -> None:
    """Declare the axes of the structure: tiles, their rows and groups, and the position, column and row of an entry."""
    tiles, count, rows = groups.tile_ptr.size - 1, groups.kinds.size, groups.height
    n, kinds = (draft.size(f"{name.lower()}_size", shape[key]) for name, key in (("N", "n"), ("R", "kinds")))
    draft.dense("TI", tiles, idtype)
    draft.lines += [
        f'I = T.dense_variable(TI, ({rows}, {int(groups.tile_ptr[-1])}), tile_ptr, "{idtype}")',
        f'G = T.sparse_variable(TI, ({kinds}, {count}), (group_ptr, kinds), "{idtype}", sorted=False, unique=False)',
        f'E = T.sparse_fixed(G, ({size}, {size}), lambda t, g, s: s, "{idtype}", full=True)',
        f'J = T.sparse_fixed(E, ({n}, 1), cols, "{idtype}", full=True)',
        f'P = T.sparse_fixed(E, ({rows + 1}, 1), rows, "{idtype}", full=True)',
    ]
    draft.dense("S", size, idtype)
    draft.dense("L", rows + 1, idtype)


__all__ = [
    "Epilogue",
    "EpilogueOperand",
    "Groups",
    "NamedProgram",
    "OperatorWriter",
    "attention",
    "attention_backward",
    "attention_lse",
    "gather_matmul_scatter",
    "gather_outer",
    "gemv",
    "grouped",
    "groups_of",
    "linear",
    "matmul",
    "sddmm",
    "segment_expand",
    "segment_reduce",
    "softmax",
    "spmm",
    "spmv",
]
