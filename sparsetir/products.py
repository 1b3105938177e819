# SPDX-License-Identifier: Apache-2.0
"""Products, sums and elementwise products of sparse matrices whose pattern is computed, in one call each."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import scipy.sparse as sp

from sparsetir import interop, ops
from sparsetir.build import build
from sparsetir.call.assembled import AssembledKernel
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import CooTensor
from sparsetir.rules import VALUE_DTYPES

LARGEST_INT32 = 2**31 - 1


def matmul(A: Any, B: Any) -> Any:
    """Sparse times sparse matrix, on all threads.

    Parameters
    ----------
    A : sparse matrix, shape (m, p)
        Of scipy, a torch tensor with a sparse layout, a `SparseTensor` or a `CooTensor`. Rows may be unsorted and hold
        entries with the same coordinates.
    B : sparse matrix, shape (p, n)

    Returns
    -------
    sparse matrix, shape (m, n)
        Of the class of `A` and the common dtype of both, each row sorted. An entry is stored where a product of stored
        entries falls, also where its value is zero.

    Raises
    ------
    ArgumentTypeError
        An operand is not sparse, or of a dtype that no program takes.
    ArgumentError
        The shapes do not match.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> sparsetir.matmul(A, A).toarray().tolist()
    [[6.0, 0.0], [0.0, 6.0]]
    """
    operands = _Operands.of("matmul", A=A, B=B)
    if operands["A"].shape[1] != operands["B"].shape[0]:
        shapes = f"{tuple(A.shape)} and {tuple(B.shape)}"
        raise ArgumentError(f"matmul(A, B) takes as many columns of A as rows of B, found shapes {shapes}")
    kernel = _spgemm(operands.dtype, operands.idtype)
    return operands.like_first(kernel(**operands))


class _Operands(dict[str, Any]):
    """Operands in compressed rows, of one dtype and one index dtype."""

    first: Any
    dtype: str
    idtype: str

    @classmethod
    def of(cls, function: str, **given: Any) -> _Operands:
        made = cls()
        made.first = next(iter(given.values()))
        for name, value in given.items():
            made[name] = _rows(value, name, function)
        dtype = np.result_type(*(_dtype(v) for v in made.values()))
        if str(dtype) not in VALUE_DTYPES:
            raise ArgumentTypeError(f"{function} takes values of {', '.join(VALUE_DTYPES)}, found {dtype}")
        made.dtype = str(dtype)
        wide = any(_index_dtype(v).itemsize > 4 or max(v.shape) > LARGEST_INT32 for v in made.values())
        made.idtype = "int64" if wide else "int32"
        for name, value in made.items():
            made[name] = _cast(value, made.dtype)
        return made

    def like_first(self, result: Any) -> Any:
        """A result in the class of the first operand."""
        first = self.first
        if sp.issparse(first) and result.format != first.format:
            return result.asformat(first.format)
        if interop.is_torch(first):
            return _like_torch(result, first)
        if isinstance(first, (CooTensor, SparseTensor)):
            tensor = SparseTensor.from_any(result)
            return tensor.to_coo() if isinstance(first, CooTensor) else tensor
        return result


def _rows(value: Any, name: str, function: str) -> Any:
    """An operand in compressed rows."""
    if not (interop.is_sparse(value) or isinstance(value, SparseTensor)) or len(value.shape) != 2:
        how = "pass a scipy matrix or a torch tensor with a sparse layout"
        raise ArgumentTypeError(f"{name} of {function} is a sparse matrix: {how}; found {type(value).__name__}")
    if interop.is_torch(value):
        interop.check_detached(value, name, function)
        return _torch_rows(value)
    if not sp.issparse(value):
        return SparseTensor.from_any(value).to_scipy("csr")
    return value if value.format == "csr" else value.tocsr()


def _torch_rows(value: Any) -> Any:
    """A torch tensor in compressed rows; torch makes them of blocks by way of coordinates only."""
    layout = str(value.layout)
    if layout in ("torch.sparse_bsr", "torch.sparse_bsc"):
        value = value.to_sparse_coo()
    return value if layout == "torch.sparse_csr" else value.to_sparse_csr()


def _dtype(value: Any) -> np.dtype[Any]:
    return np.dtype(str(value.dtype).removeprefix("torch."))


def _index_dtype(value: Any) -> np.dtype[Any]:
    return np.dtype(
        str((value.crow_indices() if interop.is_torch(value) else value.indices).dtype).removeprefix("torch.")
    )


def _cast(value: Any, dtype: str) -> Any:
    if str(value.dtype).removeprefix("torch.") == dtype:
        return value
    if interop.is_torch(value):
        import torch

        return value.to(getattr(torch, dtype))
    return value.astype(dtype)


def _like_torch(result: Any, first: Any) -> Any:
    layout = str(first.layout).removeprefix("torch.sparse_")
    return {"csc": result.to_sparse_csc, "coo": result.to_sparse_coo}[layout]() if layout in ("csc", "coo") else result


@cache
def _spgemm(dtype: str, idtype: str) -> AssembledKernel:
    return cast("AssembledKernel", build(ops.spgemm(dtype, idtype=idtype)))


__all__ = ["matmul"]
