# SPDX-License-Identifier: Apache-2.0
"""One picture of a matrix: where its nonzeros are, how full its blocks are, how long its rows and columns are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.harness.optional import require
from sparsetir.harness.plot import save, shade

SIZE = (16.0, 5.0)  # inches
BAR = 0.4


def portrait(matrix: Any, pattern: Pattern, path: str | Path) -> Path:
    """Draw a matrix and the numbers of its pattern, and write the picture.

    Parameters
    ----------
    matrix : scipy.sparse array, shape (m, n)
    pattern : Pattern
        ``sparsetir.pattern(matrix)``.
    path : str or Path
        ``.png``, ``.svg``, ``.pdf``.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ArgumentError
        When it is a tensor of another number of dimensions.
    MissingPackageError
        When matplotlib is not installed.
    """
    if not isinstance(pattern, MatrixPattern):
        raise ArgumentError(f"only a matrix can be drawn, found a tensor of {pattern.ndim} dimensions")
    figure = require("matplotlib.figure", extra="plot", purpose="drawing").Figure(figsize=SIZE, layout="constrained")
    where, blocks, degrees = figure.subplots(1, 3)
    shade(figure, where, matrix)
    where.set_title(f"{pattern.shape[0]:,} x {pattern.shape[1]:,}, {pattern.nnz:,} nonzeros")
    draw_blocks(blocks, pattern)
    draw_degrees(degrees, pattern)
    return save(figure, path)


def draw_blocks(axes: Any, pattern: MatrixPattern) -> None:
    """Bars for the mean fill of each size of blocks, and for the nonzeros in blocks at least half full."""
    at = np.arange(len(pattern.blocks))
    bars(axes, at, "mean fill of blocks with a nonzero", [found.fill for found in pattern.blocks.values()], -1)
    bars(axes, at, "nonzeros in blocks at least half full", [found.share for found in pattern.blocks.values()], 1)
    axes.set_xticks(at, [f"{r}x{c}" for r, c in pattern.blocks])
    axes.set(ylim=(0, 1), xlabel="rows x columns of a block", title="blocks")
    axes.legend()


def draw_degrees(axes: Any, pattern: MatrixPattern) -> None:
    """Bars for the number of rows and columns by their number of nonzeros, in powers of two."""
    longest = max(len(pattern.rows.histogram), len(pattern.columns.histogram))
    at = np.arange(longest)
    for name, side, held in (("rows", -1, pattern.rows), ("columns", 1, pattern.columns)):
        bars(axes, at, name, [*held.histogram, *[0] * (longest - len(held.histogram))], side)
    axes.set_xticks(at, [str(2**k // 2) for k in range(longest)])
    axes.set(xlabel="nonzeros, from this number to the next", ylabel="how many", title="length of rows and columns")
    if pattern.nnz:
        axes.set_yscale("log")
    axes.legend()


def bars(axes: Any, at: np.ndarray, label: str, heights: list[float], side: int) -> None:
    """A series of bars to the left (-1) or the right (1) of their ticks."""
    axes.bar(at + side * BAR / 2, heights, BAR, label=label)


__all__ = ["portrait"]
