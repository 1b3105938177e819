# SPDX-License-Identifier: Apache-2.0
"""The stage-I programs that gradients are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsetir.relax.programs import Axes, Draft, Epilogue, Program


def segment_expand(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> Program:
    """``Y[e] = X[i]`` for each entry e of row i."""
    draft = Draft("segment_expand")
    inner = ("K",) if "feat" in shape else ()
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["nnz"], shape["nnz"], idtype, indices=False)
    if inner:
        draft.dense("K", shape["feat"], idtype)
    draft.array("X", ("I", *inner), dtype)
    axes = ("I", "J", *inner)
    held = draft.finish("Y", axes, dtype, epilogue)
    line = f"{held}[{', '.join(axes).lower()}] = X[{', '.join(('I', *inner)).lower()}]"
    draft.iterate(axes, "S" * len(axes), "expand", [line])
    draft.follow("Y", held, axes, epilogue, {"E": ("I", "J")})
    return draft.program()


def gather_outer(shape: dict[str, Any], dtype: str, idtype: str) -> Program:
    """``W[r, c, d] = sum_e X[left[e], c] * Y[right[e], d]`` over the entries e of row r."""
    draft = Draft("gather_outer")
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
    """How the gradient of one operand is summed: over the blocks that its own blocks meet.

    Attributes
    ----------
    score, part : (str, str)
        The operands, own side first, whose products are the scores and the gradients of probabilities.
    mixed : str
        The operand that is summed.
    place : str
        The position in a query, own or met.
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


def attention_lse(shape: dict[str, Any], dtype: str, idtype: str, scale: float) -> Program:
    """The logarithm of the sum of exponentials of each position's scores; minus infinity where there are none."""
    draft, wide = Draft("block_sparse_attention_lse"), _wide(dtype)
    _axes(draft, shape, idtype)
    own, met = _operand(draft, "Q", dtype, is_own=True), _operand(draft, "K", dtype)
    draft.array("LSE", ("H", "IO", "II"), wide, result=True)
    with draft.steps(("IO", "H"), "rows"):
        for name, axes in (("turned", ("F", "II")), ("score", ("N", "JI", "II")), ("top", ("II",)), ("total", ("II",))):
            draft.scratch(name, axes, wide)
        _product(draft, "score", "turned", own, met, "F", wide, scale)
        at, pairs = "score[jo, ji, ii]", ("JO", "JI", "II")
        lowest = f'top[ii] = T.min_value("{wide}")'
        draft.iterate(pairs, "RRS", "row_max", [f"top[ii] = T.max(top[ii], {at})"], init=lowest)
        draft.iterate(pairs, "SSS", "exponent", [f"{at} = T.exp({at} - top[ii])"])
        draft.iterate(pairs, "RRS", "row_sum", [f"total[ii] = total[ii] + {at}"], init="total[ii] = 0")
        draft.iterate(("II",), "S", "leave", ["LSE[h, io, ii] = top[ii] + T.log(total[ii])"])
    return draft.program()


def attention_backward(shape: dict[str, Any], dtype: str, idtype: str, scale: float, operand: str) -> Program:
    """The gradient of one operand of an attention, probabilities computed again.

    With ``P = exp(scale * Q K^T - lse)`` and ``S = scale * P * (G V^T - delta)`` these are ``S K`` for the queries,
    ``S^T Q`` for the keys and ``P^T G`` for the values: sums over the blocks that the structure lists for each block of
    the operand.

    Parameters
    ----------
    shape : dict
        See `sparsetir.relax.attention.attention`.
    dtype, idtype : str
    scale : float
    operand : {"query", "key", "value"}
    """
    draft, wide, side = Draft(f"block_sparse_attention_{operand}"), _wide(dtype), SIDES[operand]
    _axes(draft, shape, idtype)
    pairs = [side.score] if side.part is None else [side.score, side.part]
    held = {name: _operand(draft, name, dtype, is_own=n == 0) for pair in pairs for n, name in enumerate(pair)}
    if side.mixed not in held:
        held[side.mixed] = _operand(draft, side.mixed, dtype)
    for name in ("LSE", "DELTA")[: len(pairs)]:
        draft.array(name, ("H", "N" if "jo" in side.place else "IO", "II" if "ii" in side.place else "JI"), wide)
    last = FEATURES[side.mixed]
    draft.array("O", ("H", "IO", "II", last), dtype, result=True)
    with draft.steps(("IO", "H"), "rows"):
        _mix(draft, side, held, wide, scale)
        draft.iterate(
            ("II", last),
            "SS",
            "leave",
            [f'O[h, io, ii, {last.lower()}] = T.Cast("{dtype}", mixed[ii, {last.lower()}])'],
        )
    return draft.program()


def _mix(draft: Draft, side: _Side, held: dict[str, str], wide: str, scale: float) -> None:
    """What is done for a row of blocks of one head."""
    last = FEATURES[side.mixed]
    draft.scratch("score", ("N", "JI", "II"), wide)
    draft.scratch("mixed", ("II", last), wide)
    own, met = side.score
    draft.scratch("turned", (FEATURES[own], "II"), wide)
    _product(draft, "score", "turned", held[own], held[met], FEATURES[own], wide, scale)
    at, pairs = "score[jo, ji, ii]", ("JO", "JI", "II")
    draft.iterate(pairs, "SSS", "exponent", [f"{at} = T.exp({at} - LSE[{side.place}])"])
    if side.part is not None:
        own, met = side.part
        draft.scratch("part", ("N", "JI", "II"), wide)
        draft.scratch("turned_part", (FEATURES[own], "II"), wide)
        _product(draft, "part", "turned_part", held[own], held[met], FEATURES[own], wide, scale)
        share = f"{at} = {at} * (part[jo, ji, ii] - DELTA[{side.place}] * T.{wide}({scale}))"
        draft.iterate(pairs, "SSS", "gradient", [share])
    place = f"mixed[ii, {last.lower()}]"
    body = [f'{place} = {place} + {at} * T.Cast("{wide}", {held[side.mixed]})']
    draft.iterate((*pairs, last), "RRSS", "mix", body, init=f"{place} = 0")


def _axes(draft: Draft, shape: dict[str, Any], idtype: str) -> None:
    draft.dense("H", shape["heads"], idtype)
    draft.dense("IO", shape["blocks"], idtype)
    draft.rows("JO", "IO", shape["blocks"], shape["nnz"], idtype)
    for name, size in (("N", "blocks"), ("II", "block"), ("JI", "block"), ("F", "feat"), ("D", "out")):
        if size in shape:
            draft.dense(name, shape[size], idtype)


def _operand(draft: Draft, name: str, dtype: str, *, is_own: bool = False) -> str:
    """Declare an operand; its element on its side."""
    last = FEATURES[name]
    axes: Axes = ("H", "IO", "II", last) if is_own else ("H", "N", "JI", last)
    draft.array(name, axes, dtype)
    return f"{name}[h, {'io, ii' if is_own else 'jo, ji'}, {last.lower()}]"


def _product(draft: Draft, result: str, turned: str, own: str, met: str, over: str, wide: str, scale: float) -> None:
    """``scale`` times the products of the own positions with those met, own ones turned to be vectors."""
    over, at = over.lower(), f"{result}[jo, ji, ii]"
    turn = f'{turned}[{over}, ii] = T.Cast("{wide}", {own}) * T.{wide}({scale})'
    draft.iterate(("II", over.upper()), "SS", f"turn_{result}", [turn])
    line = f'{at} = {at} + {turned}[{over}, ii] * T.Cast("{wide}", {met})'
    axes = ("JO", "JI", over.upper(), "II")
    draft.iterate(axes, "SSRS", result, [line], init=f"{at} = 0", is_stored=True)


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


__all__ = ["attention_backward", "attention_lse", "gather_outer", "segment_expand"]
