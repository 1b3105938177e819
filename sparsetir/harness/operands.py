# SPDX-License-Identifier: Apache-2.0
"""A ready program with a sparse operand from outside and random dense ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir import ops
from sparsetir.alignment import aligned
from sparsetir.errors import ArgumentError
from sparsetir.interop import CooTensor, is_sparse
from sparsetir.ir import decode

DTYPE = "float32"
MOST_32_BITS = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """An operation on data.

    Parameters
    ----------
    op : str
        One of `DENSE`.
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


# The dense operands of each operation: which dimensions of the sparse one they share, and whether they have columns.
DENSE: dict[str, dict[str, tuple[int, bool]]] = {
    "spmm": {"B": (1, True)},
    "spmv": {"x": (1, False)},
    "sddmm": {"X": (0, True), "Y": (1, True)},
    "mttkrp": {"B": (1, True), "C": (2, True)},
}


def dense_shapes(inputs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of the dense arguments."""
    return [np.shape(value) for value in inputs.values() if not is_sparse(value)]


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
        Of the dense operands, which are normally distributed and begin at a cache line.

    Raises
    ------
    ArgumentError
        `op` is not known, or takes something of another number of dimensions.
    """
    if op not in DENSE:
        raise ArgumentError(f"expected one of the operations {', '.join(DENSE)}; found {op!r}")
    if seed < 0:
        raise ArgumentError(f"seed must be an integer that is not negative, found {seed}")
    if feat < 1:
        raise ArgumentError(f"feat must be a positive number of columns, found {feat}")
    rank, shape = (3 if op == "mttkrp" else 2), tuple(sparse.shape)
    if len(shape) != rank:
        sizes = " x ".join(map(str, shape))
        other = "spmm" if len(shape) == 2 else "mttkrp" if len(shape) == 3 else "another file"
        raise ArgumentError(f"{op} takes a sparse operand of {rank} dimensions, found {sizes}; try {other}")
    idtype = "int32" if max(sparse.nnz, *shape) <= MOST_32_BITS else "int64"
    program = getattr(ops, op)(DTYPE, idtype=idtype)
    name = next(buffer.name for buffer in decode(program).buffers.values() if not buffer.is_dense)
    rng = np.random.default_rng(seed)
    inputs = {name: as_float32(sparse)}
    for dense, (dim, has_columns) in DENSE[op].items():
        size = (shape[dim], feat) if has_columns else (shape[dim],)
        inputs[dense] = aligned(rng.standard_normal(size, np.float32))
    return Case(op, program, inputs)


def as_float32(sparse: Any) -> Any:
    """The same entries with values of the programs' dtype; a matrix as CSR with sorted rows."""
    if isinstance(sparse, CooTensor):
        return sparse.with_values(sparse.values.astype(DTYPE))
    matrix = sp.csr_array(sparse, dtype=DTYPE)
    if not matrix.has_canonical_format:
        matrix.sum_duplicates()
    return matrix
