# SPDX-License-Identifier: Apache-2.0
"""Attention over edges that lie in blocks: detection of the blocks, kernels over them, and their gradients.

Scores, softmax and weighted sum of a row of blocks are products of dense tiles, of bfloat16 numbers by matrix units.
Edges that a block lacks are masked; equal masks are stored once. Probabilities are kept for gradients, in blocks: one
number for each pair of a block and each head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp
from tvm import tirx

import torch
from sparsetir.build import build
from sparsetir.codegen.target import native_target
from sparsetir.errors import OffsetError
from sparsetir.lower.annotations import FREE_SUMS
from sparsetir.runtime.bound import BoundKernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import has_unit
from sparsetir.script.writer import ProgramWriter
from sparsetir.utils.caches import Cache, cached_property, remember
from torch import Tensor

Array = np.ndarray

# Time of a pair of a block relative to that of a single edge, as `sparsetir bench attention` compares them.
COSTS = {16: 0.8, 32: 0.7, 64: 0.6}
MIN_RUNS = 0.5  # share of edges that follow their neighbour of the same row: in blocks of 16 it is nearly one
MAX_BOUND = 32
PAIRS = ("JO", "JI", "II")


# ------------------------------------------------------------------ blocks of a pattern


@dataclass(eq=False)
class BlockPattern:
    """Blocks of the edges of a graph: those that have an edge, by rows of blocks.

    Parameters
    ----------
    size : int
        Rows, and columns, of a block.
    shape : (int, int)
        Rows and columns of the graph, which need not be multiples of `size`.
    indptr, indices : ndarray
        The columns of blocks of each row of blocks.
    masks : ndarray or None
        [masks, size, size] of int8, columns of a block before its rows; None where all blocks are full.
    which : ndarray
        The mask of each block.
    is_strict : bool
        Whether values that are not finite must not reach masked pairs of the same block.
    """

    size: int
    shape: tuple[int, int]
    indptr: Array
    indices: Array
    masks: Array | None
    which: Array
    is_strict: bool = True
    bound: Cache[BoundKernel] = field(default_factory=lambda: Cache[BoundKernel](MAX_BOUND))

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return self.indptr.size - 1, -(-self.shape[1] // self.size)

    @cached_property
    def transposed(self) -> tuple[Array, Array, Array]:
        """Row pointers and rows of blocks by columns of blocks, and the place of each in the order of rows."""
        places = np.arange(self.indices.size, dtype=self.indices.dtype)
        by_columns = sp.csr_array((places, self.indices, self.indptr), shape=self.counts).tocsc()
        dtype = self.indices.dtype
        arrays = by_columns.indptr, by_columns.indices, by_columns.data
        return tuple(a.astype(dtype, copy=False) for a in arrays)

    def kernel(self, name: str, dtype: str, feat: int, out: int, is_kept: bool = False) -> BoundKernel:
        """Return a kernel over these blocks, compiled and bound on first use."""
        key = (name, dtype, feat, out, is_kept)
        bound = self.bound.get(key)
        if bound is None:
            masks = self.masks if name.startswith("forward") else None
            masks = masks.transpose(0, 2, 1).copy() if masks is not None and name == "forward_halves" else masks
            compiled = _kernel(name, self.size, dtype, str(self.indices.dtype), feat, out, is_kept, masks is not None)
            if name.startswith("columns"):
                indptr, indices, places = self.transposed
                arrays = {"indptr": indptr, "indices": indices, "place_data": places}
            else:
                arrays = {"indptr": self.indptr, "indices": self.indices}
            if masks is not None:
                arrays |= {"MASK": masks, "WHICH": self.which}
            bound = self.bound[key] = compiled.bind(**arrays)
        return bound


def find_blocks(indptr: Array, indices: Array, columns: int) -> BlockPattern | None:
    """Return the blocks of the size in which attention is expected to be fastest; None where single edges are faster.

    Parameters
    ----------
    indptr, indices : ndarray
        Rows of edges, sorted by columns.
    columns : int
    """
    edges = indices.size
    if not edges or np.count_nonzero(np.diff(indices) == 1) < MIN_RUNS * edges:
        return None
    rows = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    same_row = rows[1:] == rows[:-1]
    if (indices[1:][same_row] <= indices[:-1][same_row]).any():
        return None  # repeated edges
    best, least = None, float(edges)
    for size, cost in COSTS.items():
        width = -(-columns // size)
        keys, of_edge = np.unique(rows // size * width + indices // size, return_inverse=True)
        if cost * keys.size * size**2 < least:
            best, least = (size, width, keys, of_edge), cost * keys.size * size**2
    return None if best is None else _pattern(*best, rows, indices, (indptr.size - 1, columns))


def _pattern(
    size: int, width: int, keys: Array, of_edge: Array, rows: Array, indices: Array, shape: tuple[int, int]
) -> BlockPattern:
    """Return the blocks with these numbers, counted along rows of blocks."""
    dtype = indices.dtype
    indptr = np.zeros(-(-shape[0] // size) + 1, dtype)
    np.cumsum(np.bincount(keys // width, minlength=indptr.size - 1), out=indptr[1:])
    which, masks = np.zeros(keys.size, dtype), None
    if rows.size < keys.size * size**2:
        filled = np.zeros((keys.size, size, size), np.int8)
        filled[of_edge, indices % size, rows % size] = 1
        packed = np.packbits(filled.reshape(keys.size, -1), axis=1)
        _, first, which = np.unique(packed.view(f"V{packed.shape[1]}").ravel(), return_index=True, return_inverse=True)
        masks, which = filled[first], which.astype(dtype)
    return BlockPattern(size, shape, indptr, (keys % width).astype(dtype), masks, which)


# ------------------------------------------------------------------ programs


def _axes(draft: ProgramWriter, idtype: str, *, by_rows: bool) -> None:
    """Declare heads, the blocks by rows or by columns, and all blocks."""
    size_of = {"IO": tirx.Var("row_blocks", "int64"), "JO": tirx.Var("column_blocks", "int64")}
    own, paired = ("IO", "JO") if by_rows else ("JO", "IO")
    count = tirx.Var("count", "int64")
    draft.dense("H", tirx.Var("heads", "int64"), idtype)
    draft.dense(own, size_of[own], idtype)
    draft.rows(paired, own, size_of[paired], count, idtype)
    draft.dense("N", size_of[paired], idtype)
    if not by_rows:
        draft.dense("E", count, idtype)


def _tile_axes(draft: ProgramWriter, size: int, feat: int, out: int, idtype: str) -> None:
    for name, extent in (("II", size), ("JI", size), ("F", feat), ("D", out), ("ONE", 1)):
        draft.dense(name, extent, idtype)


def _scores(draft: ProgramWriter, result: str, own: str, paired: str, over: str, dtype: str) -> None:
    """Write scaled products of the own positions, transposed for vectors, with those of each paired block."""
    over, at = over.lower(), f"{result}[jo, ji, ii]"
    draft.scratch("turned", (over.upper(), "II"), dtype)
    draft.scratch(result, ("N", "JI", "II"), dtype)
    draft.iterate(("II", over.upper()), "SS", "turn", [f"turned[{over}, ii] = {own} * SCALE[0]"])
    line = f"{at} = {at} + turned[{over}, ii] * {paired}"
    draft.iterate(("JO", "JI", over.upper(), "II"), "SSRS", result, [line], init=f"{at} = 0", is_stored=True)


def forward(
    draft: ProgramWriter, size: int, dtype: str, idtype: str, feat: int, out: int, keep: bool, masked: bool
) -> None:
    """Attention; probabilities are a result, too, if `keep`. A row without edges is zero."""
    _axes(draft, idtype, by_rows=True)
    _tile_axes(draft, size, feat, out, idtype)
    draft.array("SCALE", ("ONE",), dtype)
    draft.array("Q", ("IO", "II", "H", "F"), dtype)
    draft.array("K", ("H", "N", "JI", "F"), dtype)
    draft.array("V", ("H", "N", "JI", "D"), dtype)
    if masked:
        draft.dense("M", tirx.Var("masks", "int64"), idtype)
        draft.array("MASK", ("M", "JI", "II"), "int8")
        draft.array("WHICH", ("IO", "JO"), idtype)
    if keep:
        draft.array("P", ("IO", "JO", "H", "JI", "II"), dtype, result=True)
    draft.array("Y", ("IO", "II", "H", "D"), dtype, result=True)
    with draft.steps(("IO", "H"), "rows"):
        _scores(draft, "score", "Q[io, ii, h, f]", "K[h, jo, ji, f]", "F", dtype)
        for name, axes in (("top", ("II",)), ("total", ("II",)), ("mixed", ("II", "D"))):
            draft.scratch(name, axes, dtype)
        at = "score[jo, ji, ii]"
        if masked:
            is_edge = "MASK[WHICH[io, jo], ji, ii] != T.int8(0)"
            draft.iterate(PAIRS, "SSS", "mask", [f'{at} = T.if_then_else({is_edge}, {at}, -T.infinity("{dtype}"))'])
        lowest = f'top[ii] = T.min_value("{dtype}")'  # finite, so that a row without edges has exponentials of zero
        draft.iterate(PAIRS, "RRS", "row_max", [f"top[ii] = T.max(top[ii], {at})"], init=lowest)
        draft.iterate(PAIRS, "SSS", "exponent", [f"{at} = T.exp({at} - top[ii])"])
        draft.iterate(PAIRS, "RRS", "row_sum", [f"total[ii] = total[ii] + {at}"], init="total[ii] = 0")
        mixture = f"mixed[ii, d] = mixed[ii, d] + {at} * V[h, jo, ji, d]"
        draft.iterate((*PAIRS, "D"), "RRSS", "mix", [mixture], init="mixed[ii, d] = 0")
        # The largest exponential is 1, so a sum below 1 means that the row has no edges.
        share = f"T.max(total[ii], T.{dtype}(1))"
        draft.iterate(("II", "D"), "SS", "share", [f"Y[io, ii, h, d] = mixed[ii, d] / {share}"])
        if keep:
            draft.iterate(PAIRS, "SSS", "keep", [f"P[io, jo, h, ji, ii] = {at} / {share}"])


def forward_halves(
    draft: ProgramWriter, size: int, dtype: str, idtype: str, feat: int, out: int, keep: bool, masked: bool
) -> None:
    """`forward` of bfloat16 numbers, laid out for units: sums in float32, of probabilities rounded to bfloat16.

    Columns of a block follow its rows: a unit takes side by side what a sum goes along, features of queries and columns
    of probabilities. Maxima and sums of a row go over blocks first, in vectors.
    """
    _axes(draft, idtype, by_rows=True)
    _tile_axes(draft, size, feat, out, idtype)
    wide, across = "float32", ("JO", "II", "JI")
    draft.array("SCALE", ("ONE",), wide)
    draft.array("Q", ("IO", "H", "II", "F"), dtype)
    draft.array("K", ("H", "N", "F", "JI"), dtype)
    draft.array("V", ("H", "N", "JI", "D"), dtype)
    if masked:
        draft.dense("M", tirx.Var("masks", "int64"), idtype)
        draft.array("MASK", ("M", "II", "JI"), "int8")
        draft.array("WHICH", ("IO", "JO"), idtype)
    if keep:
        draft.array("P", ("IO", "JO", "H", "II", "JI"), dtype, result=True)
    draft.array("Y", ("IO", "II", "H", "D"), dtype, result=True)
    with draft.steps(("IO", "H"), "rows"):
        draft.scratch("score", ("N", "II", "JI"), wide)
        draft.scratch("part", ("N", "II", "JI"), dtype)
        draft.scratch("mixed", ("II", "D"), wide)
        for name in ("top", "total"):
            draft.scratch(name, ("II",), wide)
            draft.scratch(f"{name}s", ("II", "JI"), wide)
        at, place = "score[jo, ii, ji]", "[ii, ji]"
        product = f'T.Cast("{wide}", Q[io, h, ii, f]) * T.Cast("{wide}", K[h, jo, f, ji])'
        axes = ("JO", "II", "F", "JI")
        draft.iterate(axes, "SSRS", "scores", [f"{at} = {at} + {product}"], init=f"{at} = 0", is_stored=True)
        scaled = f"{at} * SCALE[0]"
        if masked:
            is_edge = "MASK[WHICH[io, jo], ii, ji] != T.int8(0)"
            scaled = f'T.if_then_else({is_edge}, {scaled}, -T.infinity("{wide}"))'
        draft.iterate(across, "SSS", "scale", [f"{at} = {scaled}"])
        lowest = f'T.min_value("{wide}")'  # finite, so that a row without edges has exponentials of zero
        step = f"tops{place} = T.max(tops{place}, {at})"
        draft.iterate(across, "RSS", "block_max", [step], init=f"tops{place} = {lowest}")
        step = f"top[ii] = T.max(top[ii], tops{place})"
        draft.iterate(("II", "JI"), "SR", "row_max", [step], init=f"top[ii] = {lowest}")
        draft.iterate(across, "SSS", "exponent", [f"{at} = T.exp({at} - top[ii])"])
        step = f"totals{place} = totals{place} + {at}"
        draft.iterate(across, "RSS", "block_sum", [step], init=f"totals{place} = 0")
        draft.iterate(("II", "JI"), "SR", "row_sum", [f"total[ii] = total[ii] + totals{place}"], init="total[ii] = 0")
        draft.iterate(across, "SSS", "round", [f'part[jo, ii, ji] = T.Cast("{dtype}", {at})'])
        product = f'T.Cast("{wide}", part[jo, ii, ji]) * T.Cast("{wide}", V[h, jo, ji, d])'
        axes = ("JO", "JI", "II", "D")
        draft.iterate(axes, "RRSS", "mix", [f"mixed[ii, d] = mixed[ii, d] + {product}"], init="mixed[ii, d] = 0")
        # The largest exponential is 1, so a sum below 1 means that the row has no edges.
        share = f"T.max(total[ii], T.{wide}(1))"
        draft.iterate(("II", "D"), "SS", "share", [f'Y[io, ii, h, d] = T.Cast("{dtype}", mixed[ii, d] / {share})'])
        if keep:
            line = f'P[io, jo, h, ii, ji] = T.Cast("{dtype}", {at} / {share})'
            draft.iterate(across, "SSS", "keep", [line])


def rows(draft: ProgramWriter, size: int, dtype: str, idtype: str, feat: int, out: int, *_options: bool) -> None:
    """Gradients of the scores and of the queries: ``S = scale * P * (G V^T - sum_j P * G V^T)`` and ``S K``."""
    _axes(draft, idtype, by_rows=True)
    _tile_axes(draft, size, feat, out, idtype)
    draft.array("SCALE", ("ONE",), dtype)
    draft.array("P", ("IO", "JO", "H", "JI", "II"), dtype)
    draft.array("G", ("H", "IO", "II", "D"), dtype)
    draft.array("K", ("H", "N", "JI", "F"), dtype)
    draft.array("V", ("H", "N", "JI", "D"), dtype)
    draft.array("S", ("IO", "JO", "H", "JI", "II"), dtype, result=True)
    draft.array("Y", ("IO", "II", "H", "F"), dtype, result=True)
    with draft.steps(("IO", "H"), "rows"):
        _scores(draft, "part", "G[h, io, ii, d]", "V[h, jo, ji, d]", "D", dtype)
        draft.scratch("delta", ("II",), dtype)
        draft.scratch("mixed", ("II", "F"), dtype)
        at, p = "part[jo, ji, ii]", "P[io, jo, h, ji, ii]"
        draft.iterate(PAIRS, "RRS", "delta", [f"delta[ii] = delta[ii] + {p} * {at}"], init="delta[ii] = 0")
        draft.iterate(PAIRS, "SSS", "gradient", [f"{at} = {p} * ({at} - delta[ii])"])
        draft.iterate(PAIRS, "SSS", "keep", [f"S[io, jo, h, ji, ii] = {at}"])
        mixture = f"mixed[ii, f] = mixed[ii, f] + {at} * K[h, jo, ji, f]"
        draft.iterate((*PAIRS, "F"), "RRSS", "mix", [mixture], init="mixed[ii, f] = 0")
        draft.iterate(("II", "F"), "SS", "leave", ["Y[io, ii, h, f] = mixed[ii, f]"])


def columns(draft: ProgramWriter, size: int, dtype: str, idtype: str, feat: int, out: int, *_options: bool) -> None:
    """Gradients of keys and of values: ``S^T Q`` and ``P^T G``."""
    _axes(draft, idtype, by_rows=False)
    _tile_axes(draft, size, feat, out, idtype)
    draft.array("PLACE", ("JO", "IO"), idtype)
    for name, axes in (("P", ("E", "H", "JI", "II")), ("S", ("E", "H", "JI", "II"))):
        draft.array(name, axes, dtype)
    draft.array("Q", ("H", "N", "II", "F"), dtype)
    draft.array("G", ("H", "N", "II", "D"), dtype)
    draft.array("GK", ("JO", "JI", "H", "F"), dtype, result=True)
    draft.array("GV", ("JO", "JI", "H", "D"), dtype, result=True)
    with draft.steps(("JO", "H"), "columns"):
        for result, factor, source, axis in (("GK", "S", "Q", "F"), ("GV", "P", "G", "D")):
            last, name = axis.lower(), f"mixed_{source.lower()}"
            draft.scratch(name, ("JI", axis), dtype)
            at = f"{name}[ji, {last}]"
            line = f"{at} = {at} + {factor}[PLACE[jo, io], h, ji, ii] * {source}[h, io, ii, {last}]"
            draft.iterate(("IO", "II", "JI", axis), "RRSS", f"mix_{name}", [line], init=f"{at} = 0")
            draft.iterate(("JI", axis), "SS", f"leave_{name}", [f"{result}[jo, ji, h, {last}] = {at}"])


def rows_halves(draft: ProgramWriter, size: int, dtype: str, idtype: str, feat: int, out: int, *_options: bool) -> None:
    """`rows` of bfloat16 numbers, laid out for units as in `forward_halves`; S is rounded to bfloat16."""
    _axes(draft, idtype, by_rows=True)
    _tile_axes(draft, size, feat, out, idtype)
    wide, across, pairs = "float32", ("JO", "II", "JI"), ("IO", "JO", "H", "II", "JI")
    draft.array("SCALE", ("ONE",), wide)
    draft.array("P", pairs, dtype)
    draft.array("G", ("IO", "H", "II", "D"), dtype)
    draft.array("K", ("H", "N", "JI", "F"), dtype)
    draft.array("V", ("H", "N", "D", "JI"), dtype)
    draft.array("S", pairs, dtype, result=True)
    draft.array("Y", ("IO", "II", "H", "F"), dtype, result=True)
    with draft.steps(("IO", "H"), "rows"):
        draft.scratch("part", ("N", "II", "JI"), wide)
        draft.scratch("short", ("N", "II", "JI"), dtype)
        draft.scratch("deltas", ("II", "JI"), wide)
        draft.scratch("delta", ("II",), wide)
        draft.scratch("mixed", ("II", "F"), wide)
        at, p = "part[jo, ii, ji]", f'T.Cast("{wide}", P[io, jo, h, ii, ji])'
        line = f'{at} = {at} + T.Cast("{wide}", G[io, h, ii, d]) * T.Cast("{wide}", V[h, jo, d, ji])'
        draft.iterate(("JO", "II", "D", "JI"), "SSRS", "parts", [line], init=f"{at} = 0", is_stored=True)
        line = f"deltas[ii, ji] = deltas[ii, ji] + {p} * {at}"
        draft.iterate(across, "RSS", "block_deltas", [line], init="deltas[ii, ji] = 0")
        draft.iterate(("II", "JI"), "SR", "delta", ["delta[ii] = delta[ii] + deltas[ii, ji]"], init="delta[ii] = 0")
        line = f'short[jo, ii, ji] = T.Cast("{dtype}", {p} * ({at} - delta[ii]) * SCALE[0])'
        draft.iterate(across, "SSS", "gradient", [line])
        draft.iterate(across, "SSS", "keep", ["S[io, jo, h, ii, ji] = short[jo, ii, ji]"])
        product = f'T.Cast("{wide}", short[jo, ii, ji]) * T.Cast("{wide}", K[h, jo, ji, f])'
        line = f"mixed[ii, f] = mixed[ii, f] + {product}"
        draft.iterate(("JO", "JI", "II", "F"), "RRSS", "mix", [line], init="mixed[ii, f] = 0")
        draft.iterate(("II", "F"), "SS", "leave", [f'Y[io, ii, h, f] = T.Cast("{dtype}", mixed[ii, f])'])


def columns_halves(
    draft: ProgramWriter, size: int, dtype: str, idtype: str, feat: int, out: int, *_options: bool
) -> None:
    """`columns` of bfloat16 numbers: gradients have features before positions, ``Q^T S`` and ``G^T P``."""
    _axes(draft, idtype, by_rows=False)
    wide, sides = "float32", (("F", feat, "GK", "S", "Q"), ("D", out, "GV", "P", "G"))
    draft.dense("II", size, idtype)
    draft.dense("JI", size, idtype)
    for axis, features, *_ in sides:
        draft.dense(f"{axis}O", features // rows_of_unit(features), idtype)
        draft.dense(f"{axis}I", rows_of_unit(features), idtype)
    draft.array("PLACE", ("JO", "IO"), idtype)
    for _, _, _, factor, _ in sides:
        draft.array(factor, ("E", "H", "II", "JI"), dtype)
    for axis, _, _, _, source in sides:
        draft.array(source, ("H", "N", f"{axis}O", f"{axis}I", "II"), dtype)
    for axis, _, result, _, _ in sides:
        draft.array(result, ("JO", "H", f"{axis}O", f"{axis}I", "JI"), dtype, result=True)
    for axis, _, result, factor, source in sides:
        outer, inner = f"{axis}O", f"{axis}I"
        mixed, places = f"mixed_{axis.lower()}", f"{outer}, {inner}".lower()
        with draft.steps(("JO", "H", outer), f"columns_{axis.lower()}"):
            draft.scratch(mixed, (inner, "JI"), wide)
            at = f"{mixed}[{inner.lower()}, ji]"
            left = f'T.Cast("{wide}", {source}[h, io, {places}, ii])'
            line = f'{at} = {at} + {left} * T.Cast("{wide}", {factor}[PLACE[jo, io], h, ii, ji])'
            draft.iterate(("IO", "II", inner, "JI"), "RRSS", f"mix_{axis.lower()}", [line], init=f"{at} = 0")
            line = f'{result}[jo, h, {places}, ji] = T.Cast("{dtype}", {at})'
            draft.iterate((inner, "JI"), "SS", f"leave_{axis.lower()}", [line])


def rows_of_unit(features: int) -> int:
    """Return the features that a kernel sums together: the largest divisor within the rows of a block."""
    return max(n for n in range(1, min(features, max(COSTS)) + 1) if features % n == 0)


_PROGRAMS: dict[str, Callable[..., None]] = {
    "forward": forward,
    "rows": rows,
    "columns": columns,
    "forward_halves": forward_halves,
    "rows_halves": rows_halves,
    "columns_halves": columns_halves,
}


@remember("kernels of block attention", 64)
def _kernel(name: str, size: int, dtype: str, idtype: str, feat: int, out: int, keep: bool, masked: bool) -> Kernel:
    """Return the compiled program of a name, for any number of blocks and heads."""
    draft = ProgramWriter(f"block_attention_{name}", attributes={FREE_SUMS: True})
    _PROGRAMS[name](draft, size, dtype, idtype, feat, out, keep, masked)
    return build(draft.function())


# ------------------------------------------------------------------ calls


def attend(
    pattern: BlockPattern, q: Tensor, k: Tensor, v: Tensor, scale: float, *, keep: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return the attention of tensors [nodes, features] or [nodes, heads, features], and its probabilities if `keep`.

    Halves are computed in float32, those of bfloat16 by units that the machine has for them. None where a masked pair
    would meet a value that is not finite, where there is nothing to compute, and where positions exceed the integers of
    the pattern: single edges have it then.
    """
    if 0 in (*q.shape, *v.shape):
        return None
    may_pollute = pattern.masks is not None and pattern.is_strict
    if may_pollute and not (_are_finite(q, k, v) if keep else _are_finite(v)):
        return None
    try:
        mixed, p = mix(pattern, q, k, v, scale, keep=keep)
    except OffsetError:
        return None
    return None if keep and may_pollute and not _are_finite(mixed) else (mixed, p)


def mix(
    pattern: BlockPattern, q: Tensor, k: Tensor, v: Tensor, scale: float, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `attend` for any values; no size is zero."""
    if q.dtype is torch.bfloat16 and has_unit(native_target()):
        return _mix_halves(pattern, q, k, v, scale, keep=keep)
    blocked = {name: _in_blocks(t, pattern) for name, t in zip("KV", (k, v), strict=True)}
    blocked["Q"] = _by_nodes(q, pattern).numpy()
    dtype = str(blocked["Q"].dtype)
    kernel = pattern.kernel("forward", dtype, q.shape[-1], v.shape[-1], keep)
    results = kernel(SCALE=np.full(1, scale, dtype), **blocked)
    p, y = results if keep else (None, results)
    return _out_of_blocks(torch.from_numpy(y), pattern.shape[0], q), None if p is None else torch.from_numpy(p)


def _mix_halves(
    pattern: BlockPattern, q: Tensor, k: Tensor, v: Tensor, scale: float, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `mix` with units that multiply bfloat16 numbers."""
    queries, keys, values = (_by_nodes(t, pattern, torch.bfloat16) for t in (q, k, v))
    orders = ((queries, (0, 2, 1, 3)), (keys, (2, 0, 3, 1)), (values, (2, 0, 1, 3)))
    blocked = {name: t.permute(order).contiguous() for name, (t, order) in zip("QKV", orders, strict=True)}
    kernel = pattern.kernel("forward_halves", "bfloat16", q.shape[-1], v.shape[-1], keep)
    results = kernel(SCALE=np.full(1, scale, "float32"), **blocked)
    p, y = results if keep else (None, results)
    return _out_of_blocks(y, pattern.shape[0], q), p


def gradients(
    pattern: BlockPattern, p: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, *, of_columns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return the gradients of q, and `of_columns` of k and v; None as in `attend`."""
    if pattern.masks is not None and pattern.is_strict and not _are_finite(g):
        return None
    if p.dtype is torch.bfloat16:
        return _gradients_halves(pattern, p, q, k, v, g, scale, of_columns=of_columns)
    blocked = {name: _in_blocks(t, pattern) for name, t in zip("QKVG", (q, k, v, g), strict=True)}
    dtype, sizes = str(blocked["Q"].dtype), (q.shape[-1], v.shape[-1])
    probabilities = p.numpy()
    by_rows = pattern.kernel("rows", dtype, *sizes)
    s, g_q = by_rows(SCALE=np.full(1, scale, dtype), P=probabilities, **{name: blocked[name] for name in "GKV"})
    g_k = g_v = None
    if of_columns:
        by_columns = pattern.kernel("columns", dtype, *sizes)
        results = by_columns(P=probabilities, S=s, Q=blocked["Q"], G=blocked["G"])
        g_k, g_v = (_out_of_blocks(torch.from_numpy(result), pattern.shape[1], q) for result in results)
    return _out_of_blocks(torch.from_numpy(g_q), pattern.shape[0], q), g_k, g_v


def _gradients_halves(
    pattern: BlockPattern, p: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, *, of_columns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute `gradients` with units that multiply bfloat16 numbers."""
    queries, keys, values, gradient = (_by_nodes(t, pattern, torch.bfloat16) for t in (q, k, v, g))
    sizes = (q.shape[-1], v.shape[-1])
    by_rows = pattern.kernel("rows_halves", "bfloat16", *sizes)
    orders = (("G", gradient, (0, 2, 1, 3)), ("K", keys, (2, 0, 1, 3)), ("V", values, (2, 0, 3, 1)))
    blocked = {name: t.permute(order).contiguous() for name, t, order in orders}
    s, g_q = by_rows(SCALE=np.full(1, scale, "float32"), P=p, **blocked)
    if not of_columns:
        return _out_of_blocks(g_q, pattern.shape[0], q), None, None
    by_columns = pattern.kernel("columns_halves", "bfloat16", *sizes)
    turned = {}
    for name, t in (("Q", queries), ("G", gradient)):
        by_features = t.permute(2, 0, 3, 1).contiguous()
        turned[name] = by_features.unflatten(2, (-1, rows_of_unit(t.shape[-1])))
    results = by_columns(P=p, S=s, **turned)
    g_k, g_v = (_out_of_blocks(r.flatten(2, 3).permute(0, 3, 1, 2), pattern.shape[1], q) for r in results)
    return _out_of_blocks(g_q, pattern.shape[0], q), g_k, g_v


def _are_finite(*tensors: Tensor) -> bool:
    """Return whether all elements are finite; false where a sum overflows, too."""
    wide = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return all(bool(tensor.detach().sum(dtype=wide).isfinite()) for tensor in tensors)


def _by_nodes(tensor: Tensor, pattern: BlockPattern, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of nodes as [blocks, size, heads, features], padded with zeros, by default of 32 or 64 bits."""
    wide = dtype or (torch.float64 if tensor.dtype is torch.float64 else torch.float32)
    by_nodes = tensor.detach().resolve_neg()
    by_nodes = (by_nodes if by_nodes.dim() == 3 else by_nodes[:, None]).to(wide)
    rest = -by_nodes.shape[0] % pattern.size
    if rest:
        by_nodes = torch.cat([by_nodes, by_nodes.new_zeros(rest, *by_nodes.shape[1:])])
    return by_nodes.contiguous().unflatten(0, (-1, pattern.size))


def _in_blocks(tensor: Tensor, pattern: BlockPattern) -> Array:
    """Return a tensor of nodes as [heads, blocks, size, features], in which a block's rows lie side by side."""
    return _by_nodes(tensor, pattern).permute(2, 0, 1, 3).contiguous().numpy()


def _out_of_blocks(blocked: Tensor, nodes: int, like: Tensor) -> Tensor:
    """Return blocks of nodes as a tensor of nodes, of the dtype and the rank of another one."""
    by_nodes = blocked.flatten(0, 1)[:nodes].to(like.dtype)
    return by_nodes if like.dim() == 3 else by_nodes[:, 0]


__all__ = ["COSTS", "BlockPattern", "attend", "find_blocks", "gradients", "mix"]
