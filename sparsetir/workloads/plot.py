# SPDX-License-Identifier: Apache-2.0
"""Plots of patterns and searches, tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop.sources import open_source
from sparsetir.utils.arguments import as_count, as_path, as_positive, as_real, as_sequence, shown
from sparsetir.utils.files import writing_file
from sparsetir.utils.packages import require

# Tables as text.


def aligned(rows: list[list[str]]) -> list[str]:
    """Format rows as text in columns, the first to the left and the others to the right."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    first, *other_widths = widths
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], other_widths)]).rstrip() for row in rows]


def markdown(cells: list[list[str]]) -> str:
    """Format cells as a Markdown table, numbers to the right."""
    heading, *body = cells
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heading, rule, *body])


# Pictures: a matrix's pattern, how a search went. Needs matplotlib, imported on first use.


MAX_BINS = 512


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return an empty figure and its axes. No pyplot: nothing global changes and no display is needed."""
    figure = require("matplotlib.figure", extra="plot", purpose="drawing").Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def check_picture(path: str | Path) -> Path:
    """Return the path of a picture.

    Raises
    ------
    ArgumentError
        No format of pictures has its suffix.
    """
    target = as_path(path, "path", "the path of a picture")
    canvas = require("matplotlib.backend_bases", extra="plot", purpose="drawing").FigureCanvasBase
    suffixes = sorted(canvas.get_supported_filetypes())
    if target.suffix.removeprefix(".").lower() not in suffixes:
        fault = f"expected a name that ends in .png or another format of pictures, got {shown(str(target))}"
        raise ArgumentError(f"path: {fault}. Choose one of {', '.join(suffixes)}.")
    return target


def save(figure: Any, path: str | Path) -> Path:
    """Write the figure in the format of the file's suffix."""
    target = check_picture(path)
    with writing_file(target, makes_folder=True) as partial:
        figure.savefig(partial, dpi=120, bbox_inches="tight")
    return target


def density(matrix: Any, *, bins: int = MAX_BINS) -> np.ndarray:
    """Count the nonzeros of a matrix on a grid.

    Parameters
    ----------
    matrix : scipy.sparse array, shape (m, n)
    bins : int
        Largest number of grid cells along each side.

    Returns
    -------
    numpy.ndarray of int64, shape (min(m, bins), min(n, bins))
    """
    csr, bins = _as_csr(matrix), as_count(bins, "bins")
    height, width = (min(bins, extent) for extent in csr.shape)
    counts = np.zeros((height, width), np.int64)
    # A band of rows at a time keeps the memory small on matrices with 10**8 nonzeros.
    first_rows = -(-np.arange(height + 1) * csr.shape[0] // max(height, 1))
    for band, (begin, end) in enumerate(zip(csr.indptr[first_rows[:-1]], csr.indptr[first_rows[1:]], strict=True)):
        columns = csr.indices[begin:end].astype(np.int64)
        counts[band] = np.bincount(columns * width // csr.shape[1], minlength=width)
    return counts


def _as_csr(matrix: Any) -> Any:
    """Return a matrix as rows whose arrays can be followed."""
    if sp.issparse(matrix):
        open_source(matrix, "matrix").check("matrix")
    elif not isinstance(matrix, np.ndarray) or matrix.dtype.kind not in "biufc":
        fault = f"expected a matrix of scipy, got {shown(matrix)}"
        raise ArgumentTypeError(f"matrix: {fault}. Convert it, for example with scipy.sparse.csr_array.")
    if matrix.ndim != 2:
        raise ArgumentError(f"matrix: expected two dimensions, got shape {matrix.shape}. Pass a matrix.")
    return sp.csr_array(matrix)


def spy(matrix: Any, path: str | Path) -> Path:
    """Draw where the nonzeros are, darker where they are denser (logarithmic), and write the picture.

    Parameters
    ----------
    matrix : scipy.sparse array, shape (m, n)
        Of any size: it is binned to at most 512 x 512 cells first.
    path : str or Path
        ``.png``, ``.svg``, ``.pdf``.

    Returns
    -------
    Path
        The file written.
    """
    matrix = _as_csr(matrix)
    figure, axes = new_figure(6.0, 6.0)
    shade(figure, axes, matrix)
    m, n = matrix.shape
    axes.set_title(f"{m:,} x {n:,}, {matrix.nnz:,} nonzeros")
    return save(figure, path)


def shade(figure: Any, axes: Any, matrix: Any) -> None:
    """Draw where the nonzeros are into a part of a figure, with a scale next to it."""
    norm = require("matplotlib.colors", extra="plot", purpose="drawing").LogNorm
    counts = density(matrix)
    m, n = matrix.shape
    nonzero = np.ma.masked_equal(counts, 0)
    colours = {"norm": norm(1, max(2, counts.max(initial=0))), "cmap": dark_enough(), "interpolation": "nearest"}
    if counts.size:
        image = axes.imshow(nonzero, extent=(0, n, m, 0), aspect=aspect(m, n), **colours)
        scale = figure.colorbar(image, ax=axes, shrink=0.8)
        scale.ax.set_title("nonzeros\nin a cell", fontsize="small")
        scale.ax.yaxis.set_major_formatter("{x:g}")
        scale.ax.yaxis.set_minor_formatter("")


def dark_enough() -> Any:
    """Colours of which the lightest still shows on white."""
    colours = require("matplotlib.colors", extra="plot", purpose="drawing")
    colormap = require("matplotlib", extra="plot", purpose="drawing").colormaps["viridis_r"]
    return colours.LinearSegmentedColormap.from_list("nonzeros", colormap(np.linspace(0.25, 1.0, 256)))


def aspect(m: int, n: int) -> str:
    """Square cells, unless the picture would become a stripe."""
    return "equal" if max(m, n) <= 4 * min(m, n) else "auto"


def best_so_far(seconds: np.ndarray) -> np.ndarray:
    """Return the running minimum of the times, NaN until the first trial that succeeded."""
    return np.fmin.accumulate(seconds) if seconds.size else seconds


def curve(
    history: Iterable[Any],
    path: str | Path,
    *,
    title: str = "",
    labels: Sequence[str] = (),
    untuned: float | None = None,
) -> Path:
    """Draw a search: a dot for each trial and the best time so far, and write the picture.

    Parameters
    ----------
    history : iterable of trials
        In the order of measurement. Each has ``seconds``, the time of one call (None or not finite if the
        trial failed), and may have ``elapsed``, seconds since the search began; without it the horizontal
        axis counts trials. Attributes or mapping keys.
    path : str or Path
        ``.png``, ``.svg``, ``.pdf``.
    title : str
    labels : sequence of str
        What each trial is coloured by, such as its format; by default all are alike.
    untuned : float, optional
        Seconds of the untuned kernel, for a line.

    Returns
    -------
    Path
        The file written.
    """
    trials, labels = as_sequence(history, "history", "trials"), as_sequence(labels, "labels", "names of trials")
    if not isinstance(title, str):
        raise ArgumentTypeError(f"title: expected text, got {shown(title)}. Pass a str.")
    untuned = None if untuned is None else as_positive(untuned, "untuned", "a positive number of seconds")
    if not trials:
        raise ArgumentError("a tuning curve needs at least one trial, got an empty history; try more trials")
    milliseconds = series(trials, "seconds") * 1e3
    elapsed = series(trials, "elapsed")
    timed = bool(np.isfinite(elapsed).all())
    x = elapsed if timed else np.arange(1, len(trials) + 1)
    figure, axes = new_figure(7.0, 4.0)
    kinds = np.array(list(map(str, labels)) if len(labels) == len(trials) else ["trial"] * len(trials))
    for n, kind in enumerate(dict.fromkeys(kinds.tolist())):
        colour = "tab:gray" if len(set(kinds.tolist())) == 1 else f"C{n + 1}"
        axes.plot(x[kinds == kind], milliseconds[kinds == kind], ".", color=colour, alpha=0.7, label=kind)
    if untuned is not None:
        axes.axhline(untuned * 1e3, color="black", linestyle="--", linewidth=1, label="untuned")
    axes.set_title(title, fontsize="medium")
    axes.set_xlim(left=0)
    axes.step(x, best_so_far(milliseconds), where="post", color="tab:blue", label="best so far")
    axes.set(xlabel="seconds of search" if timed else "trial", ylabel="milliseconds per call")
    if np.isfinite(milliseconds).any():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    return save(figure, path)


def series(trials: list[Any], name: str) -> np.ndarray:
    """Field `name` of every trial as float64; NaN where it is absent, None or infinite."""
    points = [trial.get(name) if isinstance(trial, dict) else getattr(trial, name, None) for trial in trials]
    numbers = [np.nan if value is None else as_real(value, f"{name} of a trial") for value in points]
    values = np.array(numbers, np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def losses(curves: Mapping[str, Sequence[float]], path: str | Path, *, title: str = "") -> Path:
    """Draw losses by epochs, later ones thinner so that those below are seen, and write the picture.

    Parameters
    ----------
    curves : mapping of str to sequence of float
    path : str or Path
        ``.png``, ``.svg``, ``.pdf``.
    title : str

    Returns
    -------
    Path
        The file written.
    """
    figure, axes = new_figure(7.0, 4.0)
    for n, (name, values) in enumerate(curves.items()):
        width = 1 + 1.5 * (len(curves) - 1 - n)
        axes.plot(range(len(values)), values, label=name, linewidth=width, linestyle="-" if n % 2 == 0 else "--")
    axes.set(xlabel="epoch", ylabel="loss")
    axes.set_title(title, fontsize="medium")
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize="small")
    return save(figure, path)


__all__ = ["aligned", "markdown"]
