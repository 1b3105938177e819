# SPDX-License-Identifier: Apache-2.0
"""Attention under a block-sparse mask as one program: scores, softmax and mixture, a row of blocks at a time."""

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
    wide = "float64" if dtype == "float64" else "float32"
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
    draft.scratch("score", ("H", "IO", "JO", "II", "JI"), wide)
    draft.scratch("top", ("H", "IO", "II"), wide)
    draft.scratch("total", ("H", "IO", "II"), wide)
    at, row = "score[h, io, jo, ii, ji]", "h, io, ii"
    product = "Q[h, io, ii, f] * K[h, jo, ji, f]"
    pairs = ("H", "IO", "JO", "II", "JI")
    draft.iterate((*pairs, "F"), "SSSSSR", "scores", [f"{at} = {at} + {product}"], init=f"{at} = 0")
    lowest = f'T.min_value("{wide}")'
    draft.iterate(pairs, "SSRSR", "row_max", [f"top[{row}] = T.max(top[{row}], {at})"], init=f"top[{row}] = {lowest}")
    power = f"T.exp(({at} - top[{row}]) * T.{wide}({scale}))"
    draft.iterate(pairs, "SSSSS", "exponent", [f"{at} = {power}"])
    draft.iterate(pairs, "SSRSR", "row_sum", [f"total[{row}] = total[{row}] + {at}"], init=f"total[{row}] = 0")
    place = f"O[{row}, d]"
    share = f"{at} / total[{row}]"
    mixed = f"{place} = {place} + {share} * V[h, jo, ji, d]"
    draft.iterate((*pairs, "D"), "SSRSRS", "mix", [mixed], init=f"{place} = 0")
    return draft.program()


__all__ = ["attention"]
