# SPDX-License-Identifier: Apache-2.0
"""A ready program with a sparse operand from outside and random dense ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir import ops
from sparsetir.errors import ArgumentError
from sparsetir.interop import CooTensor

DTYPE = "float32"
OPS = ("spmm", "spmv", "sddmm", "mttkrp")
MOST_32_BITS = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """An operation on data.

    Parameters
    ----------
    op : str
        One of `OPS`.
    program : PrimFunc
        Of `sparsetir.ops`.
    inputs : dict of str to array
        The arguments of a call.
    """

    op: str
    program: tirx.PrimFunc
    inputs: dict[str, Any]

    @property
    def sparse(self) -> Any:
        """The sparse argument."""
        return next(iter(self.inputs.values()))


def _spmm(A: Any, random: Callable[..., np.ndarray], feat: int) -> dict[str, Any]:
    return {"A": A, "B": random(A.shape[1], feat)}


def _spmv(A: Any, random: Callable[..., np.ndarray], _feat: int) -> dict[str, Any]:
    return {"A": A, "x": random(A.shape[1])}


def _sddmm(A: Any, random: Callable[..., np.ndarray], feat: int) -> dict[str, Any]:
    return {"S": A, "X": random(A.shape[0], feat), "Y": random(A.shape[1], feat)}


def _mttkrp(A: Any, random: Callable[..., np.ndarray], feat: int) -> dict[str, Any]:
    return {"T": A, "B": random(A.shape[1], feat), "C": random(A.shape[2], feat)}


OPERANDS = {"spmm": _spmm, "spmv": _spmv, "sddmm": _sddmm, "mttkrp": _mttkrp}


def make_case(op: str, sparse: Any, *, feat: int = 128, seed: int = 0) -> Case:
    """Put random dense operands to a sparse one.

    Parameters
    ----------
    op : {"spmm", "spmv", "sddmm", "mttkrp"}
    sparse : scipy.sparse array or CooTensor
        A matrix, for mttkrp a tensor of three dimensions; taken as float32.
    feat : int
        Number of columns of the dense operands; spmv has none.
    seed : int
        Of the dense operands, which are normally distributed.

    Raises
    ------
    ArgumentError
        `op` is not known, or takes something of another number of dimensions.
    """
    if op not in OPS:
        raise ArgumentError(f"expected one of the operations {', '.join(OPS)}; found {op!r}")
    if feat < 1:
        raise ArgumentError(f"feat must be a positive number of columns, found {feat}")
    rank, shape = (3 if op == "mttkrp" else 2), tuple(sparse.shape)
    if len(shape) != rank:
        sizes = " x ".join(map(str, shape))
        other = "spmm" if len(shape) == 2 else "mttkrp" if len(shape) == 3 else "another file"
        raise ArgumentError(f"{op} takes a sparse operand of {rank} dimensions, found {sizes}; try {other}")
    draw = np.random.default_rng(seed).standard_normal
    inputs = OPERANDS[op](as_float32(sparse), lambda *shape: draw(shape, DTYPE), feat)
    idtype = "int32" if max(sparse.nnz, *shape) <= MOST_32_BITS else "int64"
    return Case(op, getattr(ops, op)(DTYPE, idtype=idtype), inputs)


def as_float32(sparse: Any) -> Any:
    """The same entries with values of the programs' dtype; a matrix as CSR with sorted rows."""
    if isinstance(sparse, CooTensor):
        return sparse.with_values(sparse.values.astype(DTYPE))
    matrix = sp.csr_array(sparse, dtype=DTYPE)
    if not matrix.has_canonical_format:
        matrix.sum_duplicates()
    return matrix
