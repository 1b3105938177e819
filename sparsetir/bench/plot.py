# SPDX-License-Identifier: Apache-2.0
"""A picture of a machine's ceilings and of what was measured below them. Needs matplotlib, imported on first use."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsetir.bench.roofline import Roofline
from sparsetir.harness.plot import new_figure, save

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


def draw_ceilings(axes: Any, found: Roofline) -> None:
    """The peak, and a slope for the bandwidth of each level up to it."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    peak = found.most.peak / 1e9
    ridges = [found.most.peak / rate for rate in found.most.bandwidth.values()]
    left, right = min(LEAST_INTENSITY, axes.get_xlim()[0]), max(2 * max(ridges), axes.get_xlim()[1])
    axes.plot([left, right], [peak, peak], color="black", linewidth=1)
    axes.annotate("peak", (right, peak), ha="right", va="bottom", fontsize="small")
    for name, rate in found.most.bandwidth.items():
        ridge = found.most.peak / rate
        axes.plot([left, ridge], [left * rate / 1e9, ridge * rate / 1e9], color="gray", linewidth=1)
        axes.annotate(name, (ridge, peak), ha="center", va="bottom", fontsize="small")  # clear of lines and axis
    axes.set_xlim(left, right)
