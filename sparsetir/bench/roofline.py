# SPDX-License-Identifier: Apache-2.0
"""The time below which a product cannot be expected to come, the roofline of the machine, and pictures of both.

The roofline is that of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", CACM 2009, with one roof for each level of the memory, which `sparsetir.workloads.ceilings`
measures. `t_fair` goes by the profile of a core, which knows what gathered rows cost, and by how often rows are used
again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.formats.statistics import block_fill
from sparsetir.ir.effects import share_of_new
from sparsetir.schedules.defaults import gathered_seconds, near_bytes
from sparsetir.utils.arguments import shown
from sparsetir.utils.machine import CacheLevel, MachineProfile, levels
from sparsetir.utils.packages import require
from sparsetir.workloads.ceilings import FLOAT, Ceilings, Roofline, measure_roofline
from sparsetir.workloads.plot import new_figure, save, shade

# ---------------------------------------------------------------------------------------------------- bounds


@dataclass(frozen=True)
class OperationWork:
    """What an operation on data has to do.

    Parameters
    ----------
    flops : int
        Floating-point operations.
    gather : int
        Bytes loaded from the gathered operand, one row for each entry.
    gathered : int
        Bytes of its rows that are touched at all, which decide in which cache it is.
    compulsory : int
        Bytes of everything that is read or written, each counted once: values, index arrays, the touched rows of dense
        operands, the result.
    """

    flops: int
    gather: int
    gathered: int
    compulsory: int

    @property
    def intensity(self) -> float:
        """Floating-point operations for each compulsory byte."""
        return self.flops / self.compulsory if self.compulsory else 0.0


@dataclass(frozen=True)
class TimeBound:
    """The least time of a call.

    Parameters
    ----------
    seconds : float
    limit : str
        What takes it: ``"compute"``, ``"gather"`` (loads from the gathered operand) or ``"stream"`` (all other data).
    """

    seconds: float
    limit: str


def work_of(op: str, inputs: Mapping[str, Any]) -> OperationWork:
    """Count the operations and bytes of a ready program's call.

    With nnz entries, N columns and the touched rows of an operand, in float32 (4 bytes):

    ======  ======================  =====================  ==========================================================
    op      flops                   gather                 compulsory bytes
    ======  ======================  =====================  ==========================================================
    spmm    2 nnz N                 4 nnz N of B           values, indptr, indices; touched rows of B; C
    spmv    2 nnz                   4 nnz of x             the same with N = 1
    sddmm   (2 N + 1) nnz           4 nnz N of Y           values, indptr, indices; touched rows of X and Y; the values
                                                           of O
    mttkrp  2 (nnz + fibers) N      4 nnz N of B or C      values and the CSF index arrays; touched rows of B and C; D
    ======  ======================  =====================  ==========================================================

    In sddmm a row of X stays in registers while the entries of a row are computed. In mttkrp a fiber is the entries
    with the same i and j: the product with B's row is taken once for each; the smaller one of B and C is the one
    gathered for every entry, as an order of the dimensions exists in which it is.

    Parameters
    ----------
    op : {"spmm", "spmv", "sddmm", "mttkrp"}
    inputs : mapping of str to array
        As of `sparsetir.workloads.inputs.make_case`: the sparse operand first.
    """
    if op not in WORK:
        raise ArgumentError(f"bounds are known for {', '.join(WORK)}, got {shown(op)}")
    sparse, *dense = inputs.values()
    return WORK[op](sparse, *dense)


def spmm_work(csr: Any, B: np.ndarray) -> OperationWork:
    """SpMM, and SpMV where B is a vector."""
    columns = B.shape[1] if B.ndim == 2 else 1
    row = FLOAT * columns
    gathered = touched(csr.indices, csr.shape[1]) * row
    moved = structure(csr) + gathered + csr.shape[0] * row
    return OperationWork(2 * int(csr.nnz) * columns, int(csr.nnz) * row, gathered, moved)


def sddmm_work(csr: Any, X: np.ndarray, Y: np.ndarray) -> OperationWork:
    """SDDMM, row by row."""
    row = FLOAT * Y.shape[1]
    row_bytes = int(np.count_nonzero(np.diff(csr.indptr))) * row
    gathered = touched(csr.indices, csr.shape[1]) * row
    moved = structure(csr) + csr.data.nbytes + row_bytes + gathered
    return OperationWork((2 * X.shape[1] + 1) * int(csr.nnz), int(csr.nnz) * row, gathered, moved)


def mttkrp_work(tensor: Any, B: np.ndarray, C: np.ndarray) -> OperationWork:
    """MTTKRP of a tensor stored as CSF."""
    i, j, k = tensor.coords
    nnz, rank, index = int(tensor.nnz), B.shape[1], tensor.coords.itemsize
    row = FLOAT * rank
    rows = [touched(at, extent) * row for at, extent in ((j, B.shape[0]), (k, C.shape[0]))]
    fibers = count_different(i.astype(np.int64) * max(1, B.shape[0]) + j)
    tree = index * (tensor.shape[0] + 1 + fibers + fibers + 1 + nnz)
    moved = tensor.values.nbytes + tree + sum(rows) + tensor.shape[0] * row
    return OperationWork(2 * (nnz + fibers) * rank, nnz * row, min(rows), moved)


WORK: dict[str, Callable[..., OperationWork]] = {
    "spmm": spmm_work,
    "spmv": spmm_work,
    "sddmm": sddmm_work,
    "mttkrp": mttkrp_work,
}


def touched(indices: np.ndarray, extent: int) -> int:
    """Return how many different coordinates occur."""
    return int(np.count_nonzero(np.bincount(indices, minlength=extent)))


def count_different(keys: np.ndarray) -> int:
    """Return how many different keys there are."""
    return int(np.count_nonzero(np.diff(np.sort(keys)))) + (keys.size > 0)


def structure(csr: Any) -> int:
    """Bytes of a matrix's values and index arrays."""
    return sum(int(array.nbytes) for array in (csr.data, csr.indices, csr.indptr))


# ---------------------------------------------------------------------------------------------------- the fair limit


PANELS = (0, 32, 64, 128)  # columns; 0 leaves the operand as it is
GROUPS = (1, 2, 3, 4, 8)  # rows that share what is gathered
LINE = 64  # bytes that are loaded together
SHORT_ROW = 256  # bytes of rows of a sparse operand, usually


def t_fair(matrix: Any, op: str, N: int, profile: MachineProfile, *, threads: int = 1) -> TimeBound:
    """Return the least time that is predicted for a fixed list of schedules, and the resource that takes it.

    A schedule reads panels of some columns, loads a row of the dense operand for each entry or once for a group of
    rows, with a prefetch distance. Its time is the longest of

    * ``"gather"``: loads from the gathered operand, at the profile's rates for their length and working set; what was
      read a short time ago comes from the core's private cache, by samples of the index array;
    * ``"compute"``: multiplications, those with zeros of a group included, at the profile's rate;
    * ``"stream"``: values, index arrays, other operands and the result, once or once a panel.

    Parameters
    ----------
    matrix : scipy.sparse.csr_array or CooTensor
        The sparse operand.
    op : {"spmm", "spmv", "sddmm", "mttkrp"}
    N : int
        Columns of the dense operands; 1 for `spmv`.
    profile : MachineProfile
    threads : int
        Cores that share the work evenly, each at the rates of one.

    Raises
    ------
    ArgumentError
        Another operation.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> from sparsetir.utils.machine import shipped_profile
    >>> A = sp.random_array((1000, 1000), density=0.01, format="csr", dtype="float32", random_state=0)
    >>> few, many = (t_fair(A, "spmm", N, shipped_profile("znver4")) for N in (32, 512))
    >>> few.seconds < many.seconds, few.limit
    (True, 'gather')
    """
    if op not in WORK:
        raise ArgumentError(f"op: expected one of {', '.join(WORK)}, got {shown(op)}")
    N = 1 if op == "spmv" else N
    indices, rows, groups = _gathered(matrix, op)
    operand = FLOAT * N * rows
    peak = max(profile.fma.values())
    read = structure_bytes(matrix)
    reading = profile.read_seconds(read, max(operand, read))
    results = FLOAT * (int(matrix.nnz) if op == "sddmm" else N * matrix.shape[0])
    store_rate = max(profile.store, profile.streaming_store)
    best = TimeBound(math.inf, "")
    for panel, (group, fill), prefetch in itertools.product(PANELS, groups.items(), profile.prefetch):
        if panel >= N and panel:
            continue
        width, passes = (panel, -(-N // panel)) if panel else (N, 1)
        stored = int(matrix.nnz) / max(fill, 1e-9)
        gather = passes * stored / group * _entry_seconds(indices, rows, FLOAT * width, profile, prefetch)
        gather += 2 * operand / store_rate if panel else 0.0
        terms = {
            "compute": 2 * stored * N / peak,
            "gather": gather,
            "stream": passes * reading + results / store_rate,
        }
        limit = max(terms, key=terms.__getitem__)
        best = min(best, TimeBound(terms[limit] / threads, limit), key=lambda bound: bound.seconds)
    return best


def limit_of_work(work: OperationWork, profile: MachineProfile, *, threads: int = 1) -> TimeBound:
    """Return the least time for counted operations and bytes, where nothing is known of the order of accesses.

    Parameters
    ----------
    work : OperationWork
    profile : MachineProfile
    threads : int
        Cores that share the work evenly, each at the rates of one.
    """
    terms = {
        "compute": work.flops / max(profile.fma.values()),
        "gather": work.gather / SHORT_ROW * profile.gather_seconds(SHORT_ROW, work.gathered),
        "stream": profile.read_seconds(work.compulsory, work.compulsory),
    }
    limit = max(terms, key=terms.__getitem__)
    return TimeBound(terms[limit] / threads, limit)


def _gathered(matrix: Any, op: str) -> tuple[np.ndarray, int, dict[int, float]]:
    """Return the index array of an operation, the rows of the gathered operand, and how full groups of rows are."""
    if op == "mttkrp":
        at = min(matrix.coords[1:], key=lambda coords: len(np.unique(coords)))
        return at, int(at.max(initial=-1)) + 1, {1: 1.0}
    sizes = GROUPS if op != "sddmm" and matrix.nnz else (1,)
    fills = {size: block_fill(matrix.indptr, matrix.indices, size, 1) if size > 1 else 1.0 for size in sizes}
    return matrix.indices, int(matrix.shape[1]), fills


def structure_bytes(matrix: Any) -> int:
    """Return the bytes of the values and index arrays of a matrix, or of a tensor's coordinates."""
    if hasattr(matrix, "indptr"):
        return structure(matrix)
    return int(matrix.values.nbytes) + sum(int(coords.nbytes) for coords in matrix.coords)


def _entry_seconds(indices: np.ndarray, rows: int, row_bytes: int, profile: MachineProfile, prefetch: int) -> float:
    """Return the seconds to gather a row for an entry of an index array."""
    near = near_bytes(profile)
    if not indices.size:
        return 0.0
    if row_bytes >= LINE:
        return gathered_seconds(indices, rows, row_bytes, profile, near, prefetch) / indices.size
    # Numbers of one cache line are loaded together where they are used together.
    number = min(profile.scalar_load, profile.vector_gather) * max(row_bytes // FLOAT, 1) ** 0.5
    lines = indices // (LINE // row_bytes)
    working_set = rows * row_bytes
    new = share_of_new(lines, max(near // LINE, 1)) if working_set > near else 0.0
    return number + new * profile.gather_seconds(LINE, working_set, prefetch)


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
        raise ArgumentError(f"only a matrix can be drawn, got a tensor of {pattern.ndim} dimensions")
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


def draw_roofline(rows: Iterable[Any], roofline: Roofline, path: str | Path) -> Path:
    """Draw the rows of a run below the ceilings of the machine, and write the picture.

    Parameters
    ----------
    rows : iterable of Row
        Of `sparsetir.bench.measure`. A dot for the fastest kernel of ours, a cross for the fastest peer.
    roofline : Roofline
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
    draw_ceilings(axes, roofline)
    axes.set_title("products below the ceilings of the machine")
    threads = roofline.most.threads
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


__all__ = [
    "CacheLevel",
    "Ceilings",
    "OperationWork",
    "Roofline",
    "TimeBound",
    "draw_profile",
    "levels",
    "limit_of_work",
    "measure_roofline",
    "portrait",
    "t_fair",
    "work_of",
]
