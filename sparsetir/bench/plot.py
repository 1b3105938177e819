# SPDX-License-Identifier: Apache-2.0
"""Plots: ceilings of a machine, one matrix."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.bench.roofline import Roofline
from sparsetir.errors import ArgumentError
from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.utils.machine import MachineProfile
from sparsetir.utils.packages import require
from sparsetir.workloads.plot import new_figure, save, shade

# One picture of a matrix: where its nonzeros are, how full its blocks are, how long its rows and columns are.


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
    bars(axes, at, "mean fill of blocks with a nonzero", [block.fill for block in pattern.blocks.values()], -1)
    bars(axes, at, "nonzeros in blocks at least half full", [block.share for block in pattern.blocks.values()], 1)
    axes.set_xticks(at, [f"{r}x{c}" for r, c in pattern.blocks])
    axes.set(ylim=(0, 1), xlabel="rows x columns of a block", title="blocks")
    axes.legend()


def draw_degrees(axes: Any, pattern: MatrixPattern) -> None:
    """Bars for the number of rows and columns by their number of nonzeros, in powers of two."""
    longest = max(len(pattern.rows.histogram), len(pattern.columns.histogram))
    at = np.arange(longest)
    for name, side, lengths in (("rows", -1, pattern.rows), ("columns", 1, pattern.columns)):
        bars(axes, at, name, [*lengths.histogram, *[0] * (longest - len(lengths.histogram))], side)
    axes.set_xticks(at, [str(2**k // 2) for k in range(longest)])
    axes.set(xlabel="nonzeros, from this number to the next", ylabel="how many", title="length of rows and columns")
    if pattern.nnz:
        axes.set_yscale("log")
    axes.legend()


def bars(axes: Any, at: np.ndarray, label: str, heights: list[float], side: int) -> None:
    """Draw a series of bars to the left (-1) or the right (1) of their ticks."""
    axes.bar(at + side * BAR / 2, heights, BAR, label=label)


# A picture of a machine's ceilings and of what was measured below them. Needs matplotlib, imported on first use.


MOST_NAMED = 12  # dots of an operation that are drawn with the names of their matrices
LEAST_INTENSITY = 0.1


def roofline(rows: Iterable[Any], found: Roofline, path: str | Path) -> Path:
    """Draw the rows of a run below the ceilings of the machine, and write the picture.

    Parameters
    ----------
    rows : iterable of Row
        Of `sparsetir.bench.measure`. A dot for the fastest kernel of ours, a cross for the fastest peer.
    found : Roofline
        The ceilings of all threads are drawn.
    path : str or Path
        ``.png``, ``.svg``, ``.pdf``.

    Returns
    -------
    Path
        The file written.
    """
    figure, axes = new_figure(7.5, 5.0)
    by_op: dict[str, list[Any]] = {}
    for row in rows:
        if row.work.flops:
            by_op.setdefault(row.product.op, []).append(row)
    for n, (op, members) in enumerate(by_op.items()):
        for label, marker, times in ((op, "o", "ours"), (f"{op}, fastest peer", "x", "peers")):
            x, y = rates(members, times)
            axes.plot(x, y, marker, color=f"C{n}", label=label, alpha=0.8)
        if len(members) <= MOST_NAMED:
            named = [row for row in members if row.ours]
            for row, a, b in zip(named, *rates(named, "ours"), strict=True):
                axes.annotate(f" {row.name}", (a, b), fontsize="x-small", va="center")
    draw_ceilings(axes, found)
    axes.set_title("products below the ceilings of the machine")
    threads = found.most.threads
    axes.set(xlabel="operations for each compulsory byte", ylabel=f"GFLOP/s, {threads} thread{'s' * (threads > 1)}")
    axes.grid(True, which="both", alpha=0.25)
    if by_op:
        axes.legend(fontsize="small")
    return save(figure, path)


def rates(rows: Iterable[Any], times: str) -> tuple[list[float], list[float]]:
    """Intensity and GFLOP/s of the fastest of a kind in every row that has one."""
    timed = [(row.work, min(t.median for t in getattr(row, times).values())) for row in rows if getattr(row, times)]
    return [work.intensity for work, _ in timed], [work.flops / seconds / 1e9 for work, seconds in timed]


def draw_ceilings(axes: Any, roofline: Roofline) -> None:
    """Draw the peak, and a slope for the bandwidth of each level up to it."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    peak = roofline.most.peak / 1e9
    ridges = [roofline.most.peak / rate for rate in roofline.most.bandwidth.values()]
    left_end, right = min(LEAST_INTENSITY, axes.get_xlim()[0]), max(2 * max(ridges), axes.get_xlim()[1])
    axes.plot([left_end, right], [peak, peak], color="black", linewidth=1)
    axes.annotate("peak", (right, peak), ha="right", va="bottom", fontsize="small")
    for name, rate in roofline.most.bandwidth.items():
        ridge = roofline.most.peak / rate
        axes.plot([left_end, ridge], [left_end * rate / 1e9, ridge * rate / 1e9], color="gray", linewidth=1)
        axes.annotate(name, (ridge, peak), ha="center", va="bottom", fontsize="small")  # clear of lines and axis
    axes.set_xlim(left_end, right)


def draw_profile(profile: MachineProfile, path: str | Path) -> Path:
    """Draw the rates of gathered rows by working set, without prefetch and with the best distance.

    Parameters
    ----------
    profile : MachineProfile
    path : str or Path
        ``.png``, ``.svg``, ``.pdf``.

    Returns
    -------
    Path
        The file written.
    """
    figure, axes = new_figure(7.5, 5.0)
    sizes = [size / 1024 for size in profile.working_sets]
    for n, row in enumerate(profile.row_bytes):
        curve = profile.gather[n]
        axes.plot(sizes, [row / at[0] / 1e9 for at in curve], color=f"C{n}", label=f"{row} bytes")
        axes.plot(sizes, [row / min(at) / 1e9 for at in curve], color=f"C{n}", linestyle=":")
    for level in profile.levels:
        if level.size:
            axes.axvline(level.size / 1024, color="gray", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="working set, KiB", ylabel="GB/s of gathered rows, one thread")
    axes.set_title(f"{profile.name}\ndotted: with the best prefetch distance; gray: effective levels", fontsize="small")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    return save(figure, path)


__all__ = ["draw_profile", "portrait"]
