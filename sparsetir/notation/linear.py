# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices as linear operators of scipy."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse.linalg as linalg

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import is_sparse
from sparsetir.notation.expression import einsum_expression
from sparsetir.scalars import is_float


def linear_operator(A: Any) -> linalg.LinearOperator:
    """A sparse matrix for scipy's solvers, laid out once.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
        Of scipy, torch or a `SparseTensor`, of float32 or float64. Integers, bools and other floats become float64.

    Returns
    -------
    scipy.sparse.linalg.LinearOperator
        Its products, also those with the transposed matrix, run on all threads. Values of `A` that change later may
        not be seen.

    Raises
    ------
    ArgumentTypeError
        `A` is not sparse, or complex.
    ArgumentError
        `A` is no matrix.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, scipy.sparse.linalg as linalg, sparsetir
    >>> A = sp.diags_array([-np.ones(9), 2.5 * np.ones(10), -np.ones(9)], offsets=[-1, 0, 1]).tocsr()
    >>> x, info = linalg.cg(sparsetir.linear_operator(A), np.ones(10))
    >>> info, bool(np.allclose(A @ x, np.ones(10), atol=1e-4))
    (0, True)
    """
    if not is_sparse(A):
        raise ArgumentTypeError(f"linear_operator takes a sparse matrix, found {type(A).__name__}")
    if len(A.shape) != 2:
        raise ArgumentError(f"linear_operator takes a matrix, found {len(A.shape)} dimensions")
    tensor = A if isinstance(A, SparseTensor) else SparseTensor.from_any(A, "csr")
    if tensor.dtype.kind not in "iub" and not is_float(tensor.dtype):
        raise ArgumentTypeError(f"linear_operator takes real numbers, found {tensor.dtype}")
    if tensor.dtype not in (np.float32, np.float64):
        tensor = _in_float64(tensor)
    return _Operator(tensor)


def _in_float64(tensor: SparseTensor) -> SparseTensor:
    """The same numbers in float64; refuse those that it does not hold."""
    wide = tensor.astype("float64")
    if tensor.dtype.itemsize < 8:
        return wide
    values, exact = tensor.values, wide.values
    limit = {"i": 2.0**63, "u": 2.0**64}.get(tensor.dtype.kind, np.inf)
    inside = np.abs(exact) < limit if np.isfinite(limit) else np.full(exact.shape, fill_value=True)
    same = (np.where(inside, exact, 0).astype(tensor.dtype) == values) & inside | (values != values)
    if not same.all():
        raise ArgumentTypeError(f"A: expected values that float64 holds, got {tensor.dtype} {values[~same][0]}")
    return wide


class _Operator(linalg.LinearOperator):
    def __init__(self, tensor: SparseTensor) -> None:
        self.tensor = tensor
        super().__init__(tensor.dtype, tensor.shape)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the compiled products, which are made again where they are needed."""
        return {name: value for name, value in self.__dict__.items() if name != "_products"}

    @cached_property
    def _products(self) -> dict[str, Any]:
        """Bound products by their text, made when they are first needed."""
        return {}

    def _product(self, text: str, x: Any) -> Any:
        x = np.ascontiguousarray(x)
        if x.dtype.kind == "c":
            return self._product(text, x.real) + 1j * self._product(text, x.imag)
        if x.dtype != self.tensor.dtype:
            x = x.astype(self._common_dtype(x))
        key = f"{text}{x.dtype}"
        if key not in self._products:
            self._products[key] = einsum_expression(text, self.tensor, x).bind(self.tensor)
        return self._products[key](x)

    def _common_dtype(self, x: Any) -> np.dtype[Any]:
        """The dtype that a vector is multiplied in, by numpy's rules."""
        if x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
            raise ArgumentTypeError(f"x: expected numbers that float64 holds, got {x.dtype}. Convert them with astype.")
        return np.result_type(x.dtype, self.tensor.dtype)

    def _matvec(self, x: Any) -> Any:
        return self._product("ij,j->i", x.reshape(-1))

    def _rmatvec(self, x: Any) -> Any:
        return self._product("ij,i->j", x.reshape(-1))

    def _matmat(self, X: Any) -> Any:
        return self._product("ij,jk->ik", X)

    def _rmatmat(self, X: Any) -> Any:
        return self._product("ij,ik->jk", X)


__all__ = ["linear_operator"]
