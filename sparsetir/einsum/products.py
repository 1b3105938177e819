# SPDX-License-Identifier: Apache-2.0
"""Public products and sums of sparse operands with sparse or dense ones."""

from __future__ import annotations

from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.build import build
from sparsetir.einsum import operators
from sparsetir.einsum.expression import is_outside, matmul_outside, product_door
from sparsetir.einsum.operators import by_parts, complex_product, complex_sum, has_complex
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import array_of_numbers, as_numpy, check_detached, is_sparse, is_torch
from sparsetir.interop import to_torch as as_torch
from sparsetir.ops.dense_output import EIGHT_BITS, quantized_spmm
from sparsetir.sparse_output import products
from sparsetir.sparse_output.fast_paths import ROWS
from sparsetir.sparse_output.postings import Postings
from sparsetir.utils.arguments import as_count, as_flag, dtype_name, shown, take_old_argument

SCIPY = (sp.sparray, sp.spmatrix)


def matmul(
    A: Any,
    B: Any,
    *,
    mask: Any = None,
    complement: bool = False,
    top: int | None = None,
    threshold: float | None = None,
    precision: str | None = None,
    scale: Any = None,
    zero_point: int | None = None,
    bias: Any = None,
    **old_names: Any,
) -> Any:
    """Multiply sparse matrices, or a sparse and a dense one, on all threads.

    Parameters
    ----------
    A : sparse matrix, shape (m, p)
        Of scipy, a torch tensor with a sparse layout, a `SparseTensor` or a `CooTensor`. Rows may be unsorted and hold
        entries with the same coordinates, which are added up before dtypes meet. One of the
        operands may be a dense matrix or vector, of numpy or torch; the other then also a matrix on disk
        (`open_blocks`, a backed matrix of anndata, an open group of h5py or zarr), or `A` a dask array.
    B : sparse matrix, shape (p, n)
        With ``top=`` also a `Postings` index of one, which is searched without reading all of it.
    mask : sparse matrix, shape (m, n), optional
        Entries of the product are computed where it stores one, whatever its value.
    complement : bool
        Compute them where the mask stores none instead.
    top : int, optional
        Keep so many entries of each row, those with the largest values; of equal ones those in the first columns.
    threshold : float, optional
        Keep the entries with larger values. With one of the two NaN is not kept.
    precision : {"bf16x3"}, optional
        For a sparse and a dense operand in float32: as for `sparsetir.ops.spmm`.
    scale : float or array, shape (m,), optional
        For a sparse `A` and a dense matrix `B` of int8 or uint8: sum products in int32, and return
        ``scale[:, None] * (A @ (B - zero_point)) + bias[:, None]`` in float32, as `sparsetir.ops.quantized_spmm` does.
    zero_point : int, optional
        The number that stands for zero in `B`.
    bias : array, shape (m,), optional
        Added to the rows of the result.
    **old_names
        ``above``, the former name of `threshold`, with a DeprecationWarning.

    Returns
    -------
    sparse matrix, shape (m, n)
        Of the class of `A` and the common dtype of both, each row sorted. An entry is stored where a product of stored
        entries falls, also where its value is zero; a block where a product of blocks falls, of scipy's matrices of
        blocks that fit each other. A dense array where an operand is dense.

    Raises
    ------
    ArgumentTypeError
        No operand is sparse, or one is of a dtype that no program takes.
    ArgumentError
        The shapes do not match, or ``complement`` comes without a mask.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 4]], "float32"))
    >>> sparsetir.matmul(A, np.ones(2, "float32")).tolist()
    [2.0, 7.0]
    >>> sparsetir.matmul(A, A).toarray().tolist()
    [[6.0, 8.0], [12.0, 22.0]]
    >>> sparsetir.matmul(A, A, mask=A).toarray().tolist()
    [[0.0, 8.0], [12.0, 22.0]]
    >>> sparsetir.matmul(A, A, top=1).toarray().tolist()
    [[0.0, 8.0], [0.0, 22.0]]
    """
    if old_names:
        threshold = take_old_argument(old_names, "above", "threshold", threshold, "matmul")
    if scale is not None or zero_point is not None or bias is not None:
        is_plain = mask is top is threshold is precision is None and complement is False
        return _quantized(A, B, scale, zero_point, bias, is_plain=is_plain)
    if precision is not None:
        return _in_parts(A, B, precision, has_options=complement or not mask is top is threshold is None)
    try:
        if type(A) in ROWS and type(B) in ROWS:
            return products.matmul(A, B, mask=mask, complement=complement, top=top, threshold=threshold)
        if isinstance(B, Postings):
            return _of_postings(A, B, mask, top, threshold)
        if mask is top is threshold is None and complement is False:
            product = product_door(A, B)
            if product is not None:
                return product
        return _matmul(A, B, mask, as_flag(complement, "complement"), top, threshold)
    except ArgumentTypeError:
        if not has_complex(A, B):
            raise
    return complex_product(matmul, A, B, mask=mask, complement=complement, top=top, threshold=threshold)


def _in_parts(A: Any, B: Any, precision: str, *, has_options: bool) -> Any:
    """Multiply a sparse and a dense operand in another precision than that of their dtype."""
    A, B = (x if is_outside(x) else _as_operand(x, y, name) for x, y, name in ((A, B, "A"), (B, A, "B")))
    if has_options or is_outside(A) or is_outside(B) or not _is_one_dense(A, B):
        fault = f"precision: expected None but for a sparse and a dense operand in memory, got {shown(precision)}"
        raise ArgumentError(f"{fault}. Leave it out, or mask=, top= and threshold=.")
    return operators.matmul(A, B, precision)


@cache
def _quantized_kernel(entries: str, operand: str, has_zero: bool, has_bias: bool, idtype: str) -> Any:
    return build(quantized_spmm(entries, operand, zero_point=has_zero, bias=has_bias, idtype=idtype))


def _quantized(A: Any, B: Any, scale: Any, zero_point: Any, bias: Any, *, is_plain: bool) -> Any:
    """Multiply a sparse and a dense matrix of 8-bit integers, with scales of the rows, a zero point and a bias."""
    if not is_plain or scale is None or is_outside(A) or is_outside(B):
        fault = "scale, zero_point, bias: expected a scale and no other options, for matrices in memory"
        raise ArgumentError(f"{fault}, got others. Pass scale=1.0 for plain sums.")
    A, B = _as_operand(A, B, "A"), _as_operand(B, A, "B")
    if not is_sparse(A) or is_sparse(B) or len(A.shape) != 2 or len(B.shape) != 2:
        raise ArgumentError("scale: expected a sparse matrix A and a dense matrix B, got others. Swap or convert them.")
    dtypes, rows = [dtype_name(x.dtype) for x in (A, B)], A.shape[0]
    for name, dtype in zip("AB", dtypes, strict=True):
        if dtype not in EIGHT_BITS:
            raise ArgumentTypeError(f"{name}: expected int8 or uint8 with a scale, got {dtype}. Quantize it.")
    arguments: dict[str, Any] = {"scale": _of_rows(scale, rows, "scale")}
    if zero_point is not None:
        least, most = EIGHT_BITS[dtypes[1]]
        arguments["zero_point"] = np.array([as_count(zero_point, "zero_point", least=least, most=most)], "int32")
    if bias is not None:
        arguments["bias"] = _of_rows(bias, rows, "bias")
    has = [name in arguments for name in ("zero_point", "bias")]
    idtype = "int64" if max(A.shape) > np.iinfo("int32").max else "int32"
    return _quantized_kernel(*dtypes, *has, idtype)(A=A, B=B, **arguments)


def _of_rows(value: Any, rows: int, name: str) -> np.ndarray:
    """Return a float32 number for each row."""
    array = np.asarray(as_numpy(value, name)[0] if is_torch(value) else value)
    if array.dtype.kind not in "iuf" or array.shape not in ((), (rows,)):
        raise ArgumentError(f"{name}: expected a number or {rows} of them, got the shape {array.shape}. Reshape it.")
    return np.ascontiguousarray(np.broadcast_to(array, (rows,)), "float32")


def _of_postings(A: Any, index: Postings, mask: Any, top: Any, threshold: Any) -> Any:
    if top is None:
        raise ArgumentError("top: expected a number of documents, got None. Pass top=10 to search an index.")
    if mask is not None or threshold is not None:
        raise ArgumentError("mask, threshold: expected none with an index, got one. Multiply by the matrix itself.")
    return index.top(A, top)


def _matmul(A: Any, B: Any, mask: Any, complement: bool, top: Any, threshold: Any) -> Any:
    has_options = complement or not mask is top is threshold is None
    if not (isinstance(A, SCIPY) and isinstance(B, SCIPY)):
        if is_outside(A) or is_outside(B):
            if has_options:
                raise ArgumentError("mask=, top= and threshold= choose entries of results in memory: read the matrix")
            return matmul_outside(A, B)
        A, B = _as_operand(A, B, "A"), _as_operand(B, A, "B")
        if _is_one_dense(A, B):
            if has_options:
                options = "mask=, complement=, top= and threshold="
                raise ArgumentError(f"{options} choose entries of sparse results, but an operand is dense")
            return operators.matmul(A, B)
    try:
        return products.matmul(A, B, mask=mask, complement=complement, top=top, threshold=threshold)
    except (ArgumentError, ArgumentTypeError):
        if has_options or not _has_vector(A, B):
            raise
    return operators.matmul(A, B)


def _as_operand(value: Any, other: Any, name: str) -> Any:
    """Return what a sparse matrix is multiplied by: lists and the tables of other libraries as arrays."""
    if isinstance(value, np.ndarray) or is_torch(value) or is_sparse(value) or not is_sparse(other):
        return value
    return array_of_numbers(value, name)


def _has_vector(A: Any, B: Any) -> bool:
    return is_sparse(A) and is_sparse(B) and (len(A.shape) != 2 or len(B.shape) != 2)


def _is_one_dense(A: Any, B: Any) -> bool:
    """Return whether one operand is sparse and the other a dense array of numpy or torch."""
    if sp.issparse(A) and sp.issparse(B):
        return False
    return any(
        (isinstance(x, np.ndarray) or (is_torch(x) and not is_sparse(x))) and is_sparse(y) for x, y in ((A, B), (B, A))
    )


@by_parts(complex_product)
def multiply(A: Any, B: Any) -> Any:
    """Multiply two sparse matrices elementwise, or a sparse one and a dense one or a number, on all threads.

    Parameters
    ----------
    A, B : sparse matrix, shape (m, n)
        As for `matmul`. One may be a dense array of a shape that numpy would stretch to this one, as a row of factors,
        or a number, which meets the dtype of the other as in numpy: Python's numbers widen no float.

    Returns
    -------
    sparse matrix, shape (m, n)
        Of the class of `A`, or of the sparse one. An entry is stored where both store one; of a dense array all count.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 1]], "float32"))
    >>> sparsetir.multiply(A, np.array([[10], [1]], "float32")).toarray().tolist()
    [[0.0, 20.0], [3.0, 1.0]]
    >>> sparsetir.multiply(A, A.T).toarray().tolist()
    [[0.0, 6.0], [6.0, 1.0]]
    >>> sparsetir.multiply(A, 2.0).toarray().tolist()
    [[0.0, 4.0], [6.0, 2.0]]
    """
    numbers = [isinstance(x, (Number, np.generic)) for x in (A, B)]
    if sum(numbers) == 1 and is_sparse(A if numbers[1] else B):
        sparse, number = (A, B) if numbers[1] else (B, A)
        return operators.over_number(sparse, number)
    if _is_one_dense(A, B):
        sparse, dense = (A, B) if is_sparse(A) else (B, A)
        return operators.over_dense(sparse, dense)
    if is_sparse(A) and is_sparse(B) and tuple(A.shape) != tuple(B.shape):
        return operators.like_class(A, operators.stretched(*map(SparseTensor.from_any, (A, B))))
    return products.multiply(A, B)


@by_parts(complex_sum)
def add(A: Any, B: Any, alpha: float = 1, beta: float = 1) -> Any:
    """Compute the linear combination ``alpha * A + beta * B`` of sparse matrices, or of a sparse and a dense one.

    Parameters
    ----------
    A, B : sparse matrix, shape (m, n)
        As for `matmul`; complex ones too. One may be a dense array that broadcasts to the shape of the other.
    alpha, beta : float
        Numbers.

    Returns
    -------
    sparse matrix, shape (m, n)
        Of the class of `A`. An entry is stored where one of the two stores one, also where the sum is zero. A dense
        array where an operand is dense.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        As `matmul`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> sparsetir.add(A, A.T, beta=2).toarray().tolist()
    [[0.0, 8.0], [7.0, 0.0]]
    >>> sparsetir.add(A, np.ones(2, "float32")).tolist()
    [[1.0, 3.0], [4.0, 1.0]]
    """
    if not (type(A) in ROWS and type(B) in ROWS) and _is_one_dense(A, B):
        return _dense_sum(A, B, alpha, beta)
    return products.add(A, B, alpha, beta)


@by_parts(complex_sum)
def subtract(A: Any, B: Any) -> Any:
    """Compute the difference ``A - B`` of two matrices; operands and result are as for `add`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> sparsetir.subtract(A, A.T).toarray().tolist()
    [[0.0, -1.0], [1.0, 0.0]]
    """
    if not (type(A) in ROWS and type(B) in ROWS) and _is_one_dense(A, B):
        return _dense_sum(A, B, 1, -1)
    return products.subtract(A, B)


def _dense_sum(A: Any, B: Any, alpha: Any, beta: Any) -> Any:
    """Add a sparse and a dense operand; the result is dense, of torch if the dense one is."""
    for name, number in (("alpha", alpha), ("beta", beta)):
        if not isinstance(number, (Number, np.generic)):
            kind = type(number).__name__
            raise ArgumentTypeError(f"{name}: expected a number, got {kind}. Pass one such as 2.0.")
    sign = -1 if type(beta) is int and beta == -1 else 1
    for name, side in zip("AB", (A, B), strict=True):
        if is_torch(side):
            check_detached(side, name, "this operation")
    sides = [
        SparseTensor.from_any(side) if is_sparse(side) else np.asarray(as_numpy(side, "the dense operand")[0])
        for side in (A, B)
    ]
    for name, side in zip("AB", sides, strict=True):
        if side.dtype.kind not in "biufc" and side.dtype.name != "bfloat16":
            raise ArgumentTypeError(f"{name}: expected numbers, got {side.dtype}. Convert it by astype.")
    scaled = [
        side if type(number) is int and number in (1, sign) else side * number
        for side, number in zip(sides, (alpha, beta), strict=True)
    ]
    result = operators.add(*scaled) if sign > 0 else operators.subtract(*scaled)
    return as_torch(result) if is_torch(A if is_sparse(B) else B) else result


__all__ = ["add", "matmul", "multiply", "subtract"]
