# SPDX-License-Identifier: Apache-2.0
"""Gather, matmul and scatter with a structure that is known when the model is built: entries of one kind together.

Row by row every entry loads a matrix of its own for one row of X. Here a tile of rows of the result is scratch of one
step, and its entries are in groups of the same kind: a group is a product of a few gathered rows with one matrix, a
register tile, and its rows are added where they belong. A group that is not full adds its last rows to one beyond the
tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, tirx

from sparsetir.relax.programs import Draft, Epilogue, Program

TILE_BYTES = 1 << 17  # of a tile of the result: with the matrices it stays in the second-level cache
TILES_EACH = 8  # at least, for each thread: they differ in their work
MOST_PADDED = 2.0  # rows computed for each entry; with more the groups cost what they save


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
        Of each entry of each group: the row of X, and that of the result within its tile.
    height : int
        Rows of the largest tile; the padding has this one.
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
        """Groups of `size` entries in tiles of at most `most` rows, about `tiles` of them at least."""
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
        own = lambda array: array.astype(indptr.dtype)  # noqa: E731
        return cls(own(tile_ptr), own(group_ptr), own(np.repeat(kind[starts], groups)), cols, rows, height)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """By the names of parameters."""
        names = ("tile_ptr", "group_ptr", "kinds", "cols", "rows")
        return {name: getattr(self, name) for name in names}


def _tiles(indptr: np.ndarray, most_rows: int, most_entries: int) -> np.ndarray:
    """The first row of each tile, and the number of rows."""
    starts, m = [0], indptr.size - 1
    while starts[-1] < m:
        here = starts[-1]
        end = int(np.searchsorted(indptr, indptr[here] + most_entries, side="right")) - 1
        starts.append(min(max(end, here + 1), here + most_rows, m))
    return np.asarray(starts)


def groups_of(
    structure: dict[str, Any], shape: dict[str, Any], itemsize: int, *, size: int, threads: int
) -> Groups | None:
    """The groups of constant index arrays; None if one is not constant, or too few entries of a kind meet."""
    if not all(isinstance(value, ir.GenericConst) for value in structure.values()):
        return None
    arrays = {name: np.asarray(value.value.numpy()) for name, value in structure.items()}
    if not arrays["indices"].size:
        return None
    out = int(shape["out"]) if isinstance(shape["out"], (int, tirx.IntImm)) else 1
    most = max(TILE_BYTES // (out * itemsize), size)
    found = Groups.of(**arrays, size=size, most=most, tiles=TILES_EACH * threads)
    return found if found.cols.size <= MOST_PADDED * arrays["indices"].size else None


def grouped(shape: dict[str, Any], dtype: str, groups: Groups, size: int, epilogue: Epilogue | None = None) -> Program:
    """``Y[i, d] = sum_jc X[j, c] * W[kind[i, j], c, d]`` over entries in groups of `size`."""
    idtype, wide = str(groups.cols.dtype), "float64" if dtype == "float64" else "float32"
    draft = Draft("gather_matmul_scatter")
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


def _declare(draft: Draft, shape: dict[str, Any], groups: Groups, size: int, idtype: str) -> None:
    """The axes of the structure: tiles, their rows and groups; an entry's place in its group, column and row."""
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


__all__ = ["Groups", "grouped", "groups_of"]
