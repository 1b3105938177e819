# SPDX-License-Identifier: Apache-2.0
"""The time below which a product cannot be expected to come.

The model is that of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", CACM 2009, with one roof for each level of the memory, which `sparsetir.workloads.ceilings` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.utils.machine import Level, levels
from sparsetir.workloads.ceilings import DRAM, FLOAT, Ceilings, Roofline, measure_roofline

# ---------------------------------------------------------------------------------------------------- bounds


@dataclass(frozen=True)
class Work:
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
class Bound:
    """The least time of a call.

    Parameters
    ----------
    seconds : float
    limit : str
        What takes it: ``"compute"``, ``"gather L2"`` (loads from the gathered operand) or ``"stream DRAM"`` (all data
        once), with the level.
    """

    seconds: float
    limit: str


def work_of(op: str, inputs: Mapping[str, Any]) -> Work:
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

    Returns
    -------
    Work
    """
    if op not in WORK:
        raise ArgumentError(f"bounds are known for {', '.join(WORK)}; found {op!r}")
    sparse, *dense = inputs.values()
    return WORK[op](sparse, *dense)


def spmm_work(csr: Any, B: np.ndarray) -> Work:
    """SpMM, and SpMV where B is a vector."""
    columns = B.shape[1] if B.ndim == 2 else 1
    row = FLOAT * columns
    gathered = touched(csr.indices, csr.shape[1]) * row
    moved = structure(csr) + gathered + csr.shape[0] * row
    return Work(2 * int(csr.nnz) * columns, int(csr.nnz) * row, gathered, moved)


def sddmm_work(csr: Any, X: np.ndarray, Y: np.ndarray) -> Work:
    """SDDMM, row by row."""
    row = FLOAT * Y.shape[1]
    row_bytes = int(np.count_nonzero(np.diff(csr.indptr))) * row
    gathered = touched(csr.indices, csr.shape[1]) * row
    moved = structure(csr) + csr.data.nbytes + row_bytes + gathered
    return Work((2 * X.shape[1] + 1) * int(csr.nnz), int(csr.nnz) * row, gathered, moved)


def mttkrp_work(tensor: Any, B: np.ndarray, C: np.ndarray) -> Work:
    """MTTKRP of a tensor stored as CSF."""
    i, j, k = tensor.coords
    nnz, rank, index = int(tensor.nnz), B.shape[1], tensor.coords.itemsize
    row = FLOAT * rank
    rows = [touched(at, extent) * row for at, extent in ((j, B.shape[0]), (k, C.shape[0]))]
    fibers = count_different(i.astype(np.int64) * max(1, B.shape[0]) + j)
    tree = index * (tensor.shape[0] + 1 + fibers + fibers + 1 + nnz)
    moved = tensor.values.nbytes + tree + sum(rows) + tensor.shape[0] * row
    return Work(2 * (nnz + fibers) * rank, nnz * row, min(rows), moved)


WORK: dict[str, Callable[..., Work]] = {
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


def bound(work: Work, roofline: Roofline) -> Bound:
    """Return the least time of a call with all threads, operands in the fastest memory that holds them.

    ``t_min = max(flops / peak, gather / BW(level of the gathered operand), compulsory / BW(level of all))``: the level
    of the gathered operand is the first cache of a core that holds its touched rows; that of all is the first that
    holds the compulsory bytes, counting the caches of every thread, as calls that follow each other find them there.
    For what no cache holds both are DRAM.

    The second term holds for a kernel that loads a row for every entry and finds it at that level. One that uses a
    loaded row for several entries, as those over blocks do, or finds most rows in a nearer cache, as in a narrow band,
    may be faster.

    Parameters
    ----------
    work : Work
    roofline : Roofline

    Returns
    -------
    Bound
    """
    most = roofline.most
    near = holds(work.gathered, {level.name: level.size for level in roofline.levels})
    far = holds(work.compulsory, {level.name: level.capacity(most.threads) for level in roofline.levels})
    terms = [
        Bound(work.flops / most.peak, "compute"),
        Bound(work.gather / most.bandwidth[near], f"gather {near}"),
        Bound(work.compulsory / most.bandwidth[far], f"stream {far}"),
    ]
    return max(terms, key=lambda term: term.seconds)


def holds(nbytes: int, sizes: Mapping[str, int]) -> str:
    """Return the first level that holds so much."""
    return next((name for name, size in sizes.items() if nbytes <= size), DRAM)


__all__ = ["Bound", "Ceilings", "Level", "Roofline", "Work", "bound", "levels", "measure_roofline", "work_of"]
