# SPDX-License-Identifier: Apache-2.0
"""How a sparse tensor shows itself in a notebook: a table, and a drawing of where its entries lie."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

SIDE = 64  # cells of the drawing's longer side


def html(tensor: Any) -> str:
    """The tensor as HTML.

    Parameters
    ----------
    tensor : SparseTensor
    """
    shape = " x ".join(map(str, tensor.shape)) or "1"
    facts = {
        "shape": shape,
        "dtype": str(tensor.dtype),
        "format": repr(tensor.format),
        "entries": f"{tensor.nnz:,}",
        "bytes": f"{tensor.nbytes:,}",
        "padding": f"{tensor.padding:.0%}",
    }
    lines = "".join(f"<tr><th style='text-align:left'>{k}</th><td>{escape(v)}</td></tr>" for k, v in facts.items())
    return f"<div style='display:flex;gap:1em'><table>{lines}</table>{spy(tensor)}</div>"


def cells(tensor: Any) -> np.ndarray:
    """How many entries fall into each cell of a grid over the last two dimensions."""
    rows, columns = (1, *tensor.shape)[-2:]
    coords = tensor.coords
    i = coords[-2] if tensor.ndim > 1 else np.zeros(tensor.nnz, np.int64)
    scale = min(1.0, SIDE / max(rows, columns, 1))
    grid = (max(1, round(rows * scale)), max(1, round(columns * scale)))
    down = i.astype(np.int64) * grid[0] // max(rows, 1)
    right = coords[-1].astype(np.int64) * grid[1] // max(columns, 1)
    return np.bincount(down * grid[1] + right, minlength=grid[0] * grid[1]).reshape(grid)


def spy(tensor: Any) -> str:
    """A drawing of where the entries lie, darker where there are more."""
    counts = cells(tensor)
    m, n = counts.shape
    top = np.log1p(counts.max(initial=0)) or 1.0
    marks = []
    for i, j in zip(*np.nonzero(counts), strict=True):
        shade = 0.25 + 0.75 * float(np.log1p(counts[i, j]) / top)
        marks.append(f"<rect x='{j}' y='{i}' width='1' height='1' fill-opacity='{shade:.2f}'/>")
    size = 4 if max(m, n) > 16 else 12
    frame = f"<rect width='{n}' height='{m}' fill='none' stroke='gray' stroke-width='0.2'/>"
    view = f"width='{n * size}' height='{m * size}' viewBox='0 0 {n} {m}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {view}>{frame}{''.join(marks)}</svg>"


__all__ = ["html", "spy"]
