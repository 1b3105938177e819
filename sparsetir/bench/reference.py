# SPDX-License-Identifier: Apache-2.0
"""What a kernel must compute, in float64 by scipy and numpy, a part at a time so that large results fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import SparseTIRError
from sparsetir.tuning.operands import Case
from sparsetir.tuning.reference import differs

# Numbers in an intermediate array.
PART = 1 << 22
# Columns of a dense operand at a time.
COLUMNS = 32
# Rounding errors, relative to the sum of magnitudes.
TOLERANCE = 1e-5

Part = tuple[Any, np.ndarray, np.ndarray]


class WrongResultError(SparseTIRError, ArithmeticError):
    """A result is not the reference's."""


def spmm_parts(csr: Any, B: np.ndarray) -> Iterator[Part]:
    """``csr @ B``, some columns at a time."""
    matrix = sp.csr_array(csr, dtype=np.float64)
    magnitudes = abs(matrix)
    for first in range(0, B.shape[1], COLUMNS):
        part = np.s_[:, first : first + COLUMNS]
        yield part, matrix @ B[part], magnitudes @ np.abs(B[part])


def spmv_parts(csr: Any, x: np.ndarray) -> Iterator[Part]:
    """``csr @ x`` at once."""
    matrix = sp.csr_array(csr, dtype=np.float64)
    yield np.s_[:], matrix @ x, abs(matrix) @ np.abs(x)


def sddmm_parts(csr: Any, X: np.ndarray, Y: np.ndarray) -> Iterator[Part]:
    """``csr * (X @ Y.T)`` at the entries of `csr`, some of them at a time."""
    rows = np.repeat(np.arange(csr.shape[0]), np.diff(csr.indptr))
    step = max(1, PART // max(1, X.shape[1]))
    for first in range(0, csr.nnz, step):
        part = np.s_[first : first + step]
        left, right, values = X[rows[part]].astype(np.float64), Y[csr.indices[part]], csr.data[part]
        magnitudes = np.einsum("pk,pk->p", np.abs(left), np.abs(right))
        yield part, values * np.einsum("pk,pk->p", left, right), np.abs(values) * magnitudes


def mttkrp_parts(tensor: Any, B: np.ndarray, C: np.ndarray) -> Iterator[Part]:
    """The tensor, unfolded, times the Khatri-Rao product of B and C, some columns at a time."""
    i, j, k = tensor.coords
    entries = (tensor.values.astype(np.float64), (i, np.arange(tensor.values.size)))
    unfolded = sp.csr_array(entries, shape=(tensor.shape[0], tensor.values.size))
    magnitudes = abs(unfolded)
    step = max(1, PART // max(1, tensor.values.size))
    for first in range(0, B.shape[1], step):
        part = np.s_[:, first : first + step]
        product = B[part][j].astype(np.float64) * C[part][k]
        yield part, unfolded @ product, magnitudes @ np.abs(product)


PARTS: Mapping[str, Callable[..., Iterator[Part]]] = {
    "spmm": spmm_parts,
    "spmv": spmv_parts,
    "sddmm": sddmm_parts,
    "mttkrp": mttkrp_parts,
}


def check(name: str, call: Callable[[], np.ndarray], case: Case) -> None:
    """Compare the result of a call with the reference.

    Parameters
    ----------
    name : str
        What is said to be wrong.
    call : callable
        Computes and returns the result; for sddmm the values of O in the order of S.
    case : Case

    Raises
    ------
    WrongResultError
        With the first element that differs by more than rounding.
    """
    found = call()
    for part, expected, magnitude in PARTS[case.op](*case.inputs.values()):
        wrong = differs(found[part], expected, TOLERANCE * magnitude)
        if wrong.any():
            at = np.unravel_index(int(wrong.argmax()), wrong.shape)
            values = f"{found[part][at]:.7g}, expected {expected[at]:.7g}"
            raise WrongResultError(f"{name}: our result differs from the reference: found {values}; please report this")


__all__ = ["WrongResultError", "check"]
