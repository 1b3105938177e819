# SPDX-License-Identifier: Apache-2.0
"""What the cost model sees: numbers of a sparsity pattern and of a candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsetir.ir import Axis, Program, SparseBuffer
from sparsetir.schedules import Choices

SAMPLED = 1 << 16
STATISTICS = ("rows", "cols", "nnz", "mean", "longest", "cv", "empty", "offset", "feat")


def main_buffer(program: Program, arrays: Mapping[str, np.ndarray]) -> SparseBuffer | None:
    """The sparse parameter with most values."""
    held = [b for b in program.buffers.values() if not b.is_dense and str(b.storage.name) in arrays]
    return max(held, key=lambda b: arrays[str(b.storage.name)].size, default=None)


def row_pointers(axis: Axis, arrays: Mapping[str, np.ndarray], nnz: int) -> np.ndarray:
    """Where each fiber of `axis` begins, and the end of the last."""
    if axis.indptr is not None:
        return arrays[str(axis.indptr.name)]
    rows = 1
    if axis.parent is not None and axis.kind == "sparse_fixed" and axis.indices is not None:
        shape = arrays[str(axis.indices.name)].shape
        rows = shape[0] if len(shape) > 1 else 1
    return np.linspace(0, nnz, rows + 1).astype(np.int64)


def statistics(program: Program, arrays: Mapping[str, np.ndarray], feat: int | None) -> dict[str, float]:
    """Numbers that say what a pattern is like.

    Parameters
    ----------
    program : Program
        Decoded stage I.
    arrays : mapping of str to ndarray
        What is passed for each parameter.
    feat : int or None
        Length of a dense output row.

    Returns
    -------
    dict of str to float
        Keys `STATISTICS`. Of the innermost sparse axis: number of fibers and coordinates, nonzeros, the mean
        and largest length of a fiber, their coefficient of variation, the fraction that are empty, and the mean
        distance from the diagonal as a fraction of the width.
    """
    found = dict.fromkeys(STATISTICS, 0.0) | {"feat": float(feat or 1)}
    buffer = main_buffer(program, arrays)
    axis = next((a for a in reversed(buffer.axes) if not a.is_dense), None) if buffer is not None else None
    if axis is None:
        return found
    indices = arrays[str(axis.indices.name)].reshape(-1) if axis.indices is not None else np.zeros(0, np.int32)
    indptr = row_pointers(axis, arrays, indices.size)
    lengths = np.diff(indptr)
    if lengths.size == 0 or indices.size == 0:
        return found
    mean = float(lengths.mean())
    cols = int(indices.max()) + 1
    found |= {"rows": float(lengths.size), "cols": float(cols), "nnz": float(indices.size), "mean": mean}
    found |= {"longest": float(lengths.max()), "cv": float(lengths.std() / mean), "empty": float((lengths == 0).mean())}
    return found | {"offset": mean_offset(indptr, indices, cols)}


def mean_offset(indptr: np.ndarray, indices: np.ndarray, cols: int) -> float:
    """Mean distance of nonzeros from the diagonal, as a fraction of the width; evenly spaced samples of many."""
    at = np.linspace(0, indices.size - 1, min(indices.size, SAMPLED)).astype(np.int64)
    row = np.searchsorted(indptr, at, side="right") - 1
    return float(np.abs(row / (len(indptr) - 1) - indices[at] / cols).mean())


def vector(choices: Choices, pattern: Mapping[str, float]) -> list[float]:
    """One row of the model's input: logarithms of sizes, and the ratios on which a good choice depends."""
    decided = choices.as_dict()
    pieces = max(1, choices.chunks)
    sizes = [pattern["rows"], pattern["cols"], pattern["nnz"], pattern["mean"], pattern["longest"], pattern["feat"]]
    ratios = [pattern["feat"] / choices.tile, pattern["nnz"] / pieces, pattern["mean"] / choices.unroll]
    flags = [float(choices.chunks == 0), float(choices.prefetch == 0)]
    flags += [pattern["cv"], pattern["empty"], pattern["offset"]]
    return [*np.log2(1.0 + np.array([*decided.values(), *sizes, *ratios])).tolist(), *flags]


def matrix(candidates: list[Choices], pattern: Mapping[str, float]) -> Any:
    """`vector` of every candidate, one row each."""
    return np.array([vector(c, pattern) for c in candidates], np.float32)
