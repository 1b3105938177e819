# SPDX-License-Identifier: Apache-2.0
"""Attention under a block-sparse mask as one program: scores, softmax and mixture of a row of blocks after the other.

A row's scores are scratch of one step, which stays in the core's own cache, and lie transposed: the positions of the
row are the vectors. Both products are then register tiles that find their operands as they lie in memory, the factors
of K and of the scores one by one, Q (turned once a step) and V in vectors; and maxima and sums need no reduction within
a vector.
"""

from __future__ import annotations

from typing import Any

from sparsetir.relax.programs import Draft, Program


def attention(shape: dict[str, Any], dtype: str, idtype: str, scale: float) -> Program:
    """``softmax(scale * Q K^T) V`` over the blocks that a structure lists; a row without any is zero.

    Parameters
    ----------
    shape : dict
        ``heads``, ``blocks`` of ``block`` positions, ``nnz`` listed blocks, ``feat`` and ``out`` features.
    dtype, idtype : str
    scale : float
    """
    draft = Draft("block_sparse_attention")
    draft.dense("H", shape["heads"], idtype)
    draft.dense("IO", shape["blocks"], idtype)
    draft.rows("JO", "IO", shape["blocks"], shape["nnz"], idtype)
    for name, size in (("N", "blocks"), ("II", "block"), ("JI", "block"), ("F", "feat"), ("D", "out")):
        draft.dense(name, shape[size], idtype)
    draft.array("Q", ("H", "IO", "II", "F"), dtype)
    draft.array("K", ("H", "N", "JI", "F"), dtype)
    draft.array("V", ("H", "N", "JI", "D"), dtype)
    draft.array("O", ("H", "IO", "II", "D"), dtype, result=True)
    # Rows of blocks outside the heads: they are shared out by their numbers of blocks, however few heads there are.
    with draft.steps(("IO", "H"), "rows"):
        _row(draft, dtype, "float64" if dtype == "float64" else "float32", scale)
    return draft.program()


def _row(draft: Draft, dtype: str, wide: str, scale: float) -> None:
    """What is done for a row of blocks of one head, computed in `wide`."""
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
    # The largest power is one, so that a sum is less only where there is none.
    share = f'O[h, io, ii, d] = T.Cast("{dtype}", mixed[ii, d] / T.max(total[ii], T.{wide}(1)))'
    draft.iterate(("II", "D"), "SS", "share", [share])


__all__ = ["attention"]
