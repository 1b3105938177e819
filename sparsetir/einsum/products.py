# SPDX-License-Identifier: Apache-2.0
"""Public products and sums of sparse operands with sparse or dense ones, and grouped products.

Kernels of grouped products sum a tile of ROWS x VECTORS registers over the whole depth before they store it. The last
tile of a group is moved back to end with the group, so that tiles have one size; rows that two tiles have in common are
computed twice. Threads share the rows evenly, however long the groups are.
"""

from __future__ import annotations

from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.build import build
from sparsetir.einsum import operators
from sparsetir.einsum.expression import COMPRESSED, PRODUCT, evaluate_by_door, is_outside, matmul_outside
from sparsetir.einsum.operators import by_parts, complex_product, complex_sum, has_complex, product_by_scipy
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.canonical import distinct_rows
from sparsetir.formats.tensor import MIN_HYPERSPARSE, SparseTensor
from sparsetir.interop import HALVES, array_of_numbers, as_numpy, check_detached, is_sparse, is_torch, to_torch
from sparsetir.interop import to_torch as as_torch
from sparsetir.ops.dense_output import EIGHT_BITS, quantized_spmm
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.validation import is_sound
from sparsetir.script.printer import parse
from sparsetir.sparse_output import products
from sparsetir.sparse_output.fast_paths import ROWS
from sparsetir.sparse_output.postings import Postings
from sparsetir.utils.arguments import as_count, as_flag, dtype_name, shown, take_old_argument
from sparsetir.utils.caches import remember
from sparsetir.utils.threads import get_num_threads

DTYPES = ("float32", "float64", "float16", "bfloat16")
ROW_TILES = (6, 3, 1)  # with four vectors, 24 accumulators, 4 registers of W and a broadcast: 29 of 32 registers
VECTORS = 4
VECTOR_BYTES = 64

HEADER = """
@T.prim_func(s_tir=True)
def {name}(x: T.handle, w: T.handle, y: T.handle, offsets: T.handle,
           groups: T.int64, rows: T.int64, depth: T.int64, feat: T.int64, chunks: T.int64):
    T.func_attr({{"tirx.noalias": True}})
    X = T.match_buffer(x, (rows, depth), "{dtype}", align={align})
    W = T.match_buffer(w, {w_shape}, "{dtype}", align={align})
    Y = T.match_buffer(y, {y_shape}, "{dtype}", align={align})
    offsets_ = T.match_buffer(offsets, (groups + 1,), "int64", align=8)
    for t in T.parallel(chunks):
        c = T.alloc_buffer(({most},), "{sums}", scope="local")
        for g in range(groups):
            low: T.let[T.int64] = {low}
            high: T.let[T.int64] = {high}
"""
BOUNDS = {
    "rows": ("T.max(offsets_[g], rows * t // chunks)", "T.min(offsets_[g + 1], rows * (t + 1) // chunks)"),
    "weights": ("depth * t // chunks", "depth * (t + 1) // chunks"),
}
ELEMENTS = {  # of the left operand, the right one and the result
    "rows": ("X[{row}, d]", "W[g, d, {column}]", "Y[{row}, {column}]"),
    "weights": ("X[offsets_[g] + d, {row}]", "W[offsets_[g] + d, {column}]", "Y[g, {row}, {column}]"),
}
DEPTHS = {"rows": "depth", "weights": "offsets_[g + 1] - offsets_[g]"}


def _tile(result: str, dtype: str, rows: int, vectors: int, lanes: int) -> list[str]:
    """Return the lines of one tile of registers at `row` and `column`."""
    sums = "float32" if dtype in HALVES else dtype
    row, column = f"row + u // {vectors}", f"column + u % {vectors} * {lanes} + l"
    left, right, out = (element.format(row=row, column=column) for element in ELEMENTS[result])
    total = f"c[u * {lanes} + l]"
    left, right = (e if sums == dtype else f'T.Cast("{sums}", {e})' for e in (left, right))
    each = [f"for u in T.unroll({rows * vectors}):", f"    for l in T.vectorized({lanes}):"]
    stored = total if sums == dtype else f'T.Cast("{dtype}", {total})'
    return [
        *each,
        f"        {total} = T.{sums}(0)",
        f"for d in range({DEPTHS[result]}):",
        *(f"    {line}" for line in each),
        f"            {total} = {total} + {left} * {right}",
        *each,
        f"        {out} = {stored}",
    ]


def _panels(result: str, dtype: str, rows: int, lanes: int) -> list[str]:
    """Return the lines that iterate over panels of columns and, within each, tiles of that many rows."""
    lines = []
    for at, (vectors, width) in enumerate(((VECTORS, lanes), (1, lanes), (1, 1))):
        columns, rows = vectors * width, rows if width > 1 else 1
        fits = f"feat >= {columns}" if at == 0 else f"feat < {VECTORS * lanes} and feat >= {lanes}"
        fits = f"feat < {lanes}" if width == 1 else fits
        lines += [
            f"if {fits}:",
            f"    for p in range((feat + {columns - 1}) // {columns}):",
            f"        column: T.let[T.int64] = T.min(p * {columns}, feat - {columns})",
            f"        for r in range((high - low + {rows - 1}) // {rows}):",
            f"            row: T.let[T.int64] = T.min(low + r * {rows}, high - {rows})",
            *(f"            {line}" for line in _tile(result, dtype, rows, vectors, width)),
        ]
    return lines


@remember("kernels of grouped products", 16)
def kernel(dtype: str, result: str) -> Kernel:
    """Return the compiled register-blocked kernel of a grouped product.

    Parameters
    ----------
    dtype : str
    result : {"rows", "weights"}
        ``Y[r] = X[r] @ W[g]`` for rows r of group g, or ``Y[g] = X[g].T @ W[g]``, X and W being rows in groups.
    """
    is_half = dtype in HALVES
    item = {"float64": 8, "float32": 4}.get(dtype, 2)
    lanes = VECTOR_BYTES // max(item, 4)
    low, high = BOUNDS[result]
    shapes = {"rows": ("(groups, depth, feat)", "(rows, feat)"), "weights": ("(rows, feat)", "(groups, depth, feat)")}
    w_shape, y_shape = shapes[result]
    text = HEADER.format(
        name=f"grouped_{result}",
        dtype=dtype,
        align=item,
        w_shape=w_shape,
        y_shape=y_shape,
        most=ROW_TILES[0] * VECTORS * lanes,
        sums="float32" if is_half else dtype,
        low=low,
        high=high,
    )
    above = None
    for rows in ROW_TILES:
        text += " " * 12 + f"if high - low >= {rows}" + (f" and high - low < {above}" if above else "") + ":\n"
        text += "".join(f"{' ' * 16}{line}\n" for line in _panels(result, dtype, rows, lanes))
        above = rows
    return build(parse(text))


def run(dtype: str, result: str, x: Any, w: Any, y: Any, offsets: Any) -> None:
    """Compute a grouped product into `y`; the offsets are validated by the caller."""
    groups = len(offsets) - 1
    (rows, depth), feat = x.shape, w.shape[-1]
    if 0 in y.shape:
        return
    chunks = get_num_threads()
    sizes = {"groups": groups, "rows": rows, "depth": depth, "feat": feat, "chunks": chunks}
    kernel(dtype, result)(X=x, W=w, Y=y, offsets_=offsets, **sizes)


def check_offsets(offsets: np.ndarray, rows: int, *, name: str = "offsets", first: int | None = 0) -> None:
    """Validate offsets of groups.

    Raises
    ------
    ArgumentError
        They descend, are negative, or end beyond the rows; where `first` is given, they begin elsewhere.
    """
    if offsets.size and (offsets[0] < 0 or (np.diff(offsets) < 0).any()):
        raise ArgumentError(
            f"{name}: expected ascending positions from 0, got {_shown(offsets)}. Sort the rows by group."
        )
    if first is not None and (not offsets.size or offsets[0] != first):
        raise ArgumentError(f"{name}: expected {first} as the first position, got {_shown(offsets)}. Prepend it.")
    if offsets.size and offsets[-1] > rows:
        fault = f"{name}: expected positions up to {rows}, the number of rows, got {int(offsets[-1])} as the last one"
        raise ArgumentError(f"{fault}. Give the ends of groups within the rows.")


def _shown(offsets: np.ndarray) -> str:
    few = ", ".join(map(str, offsets[:8].tolist()))
    return f"[{few}{', ...' if offsets.size > 8 else ''}]"


def grouped_matmul(x: Any, offsets: Any, W: Any) -> Any:
    """Multiply rows in ragged groups with a matrix for each group: ``y[r] = x[r] @ W[g]`` for the rows r of group g.

    Parameters
    ----------
    x : ndarray of shape (rows, depth)
        Rows sorted by group; float32, float64 or float16.
    offsets : array of int of shape (groups + 1,)
        Where each group begins, and the number of rows. Groups may be empty.
    W : ndarray of shape (groups, depth, feat)
        Of the dtype of `x`.

    Returns
    -------
    ndarray of shape (rows, feat)
        A tensor of torch if `x` is one.

    Raises
    ------
    ArgumentError
        Shapes do not fit, or offsets descend, do not begin with 0 or do not end with the number of rows.
    ArgumentTypeError
        Another dtype, or a tensor that requires grad: `sparsetir.torch.grouped_mm` has gradients.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> W = np.array([[[1.0], [1.0]], [[2.0], [2.0]]])
    >>> sparsetir.grouped_matmul(np.ones((3, 2)), [0, 1, 3], W).tolist()
    [[2.0], [4.0], [4.0]]
    """
    for name, value in (("x", x), ("W", W)):
        if is_torch(value):
            check_detached(value, name, "this function")
    is_tensor = is_torch(x)
    x, W, starts = (array_of_numbers(a, name) for a, name in ((x, "x"), (W, "W"), (offsets, "offsets")))
    dtype = dtype_name(x.dtype)
    if dtype not in DTYPES or x.dtype != W.dtype:
        fault = f"x, W: expected arrays of one dtype of {', '.join(DTYPES)}, got {x.dtype} and {W.dtype}"
        raise ArgumentTypeError(f"{fault}. Convert one with astype.")
    if starts.dtype.kind not in "iu" or starts.ndim != 1:
        fault = f"offsets: expected one dimension of integers, got {starts.dtype} of shape {starts.shape}"
        raise ArgumentTypeError(f"{fault}. Give groups + 1 positions.")
    if x.ndim != 2 or W.ndim != 3 or W.shape[:2] != (starts.size - 1, x.shape[-1]):
        fault = f"x, W: expected (rows, depth) and ({starts.size - 1}, depth, feat), got {x.shape} and {W.shape}"
        raise ArgumentError(f"{fault}. Give one matrix for each group.")
    if starts.dtype == np.uint64:  # a cast would make large ones negative
        starts = np.minimum(starts, np.uint64(np.iinfo(np.int64).max))
    starts = starts.astype(np.int64)
    check_offsets(starts, x.shape[0])
    if starts[-1] != x.shape[0]:
        fault = f"offsets: expected {x.shape[0]}, the number of rows, as the last position, got {int(starts[-1])}"
        raise ArgumentError(f"{fault}. Append it.")
    y = np.empty((x.shape[0], W.shape[2]), x.dtype)
    run(dtype, "rows", np.ascontiguousarray(x), np.ascontiguousarray(W), y, starts)
    return to_torch(y) if is_tensor else y


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
    is_plain = mask is top is threshold is precision is scale is zero_point is bias is None and complement is False
    if is_plain and not (type(A) in COMPRESSED and type(B) in COMPRESSED) and not old_names:
        product = evaluate_by_door(PRODUCT, (A, B))
        if product is not None:
            return product
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
        return _matmul(A, B, mask, as_flag(complement, "complement"), top, threshold)
    except ArgumentTypeError:
        if not has_complex(A, B):
            raise
    return complex_product(matmul, A, B, mask=mask, complement=complement, top=top, threshold=threshold)


def _without_lists(A: Any, B: Any) -> tuple[Any, Any]:
    """Return the operands of a product, a list of coordinates that meets an array as rows."""
    for at, (value, dense) in enumerate(((A, B), (B, A))):
        is_list = type(dense) is np.ndarray and sp.issparse(value) and value.format == "coo" and value.ndim == 2
        if is_list and max(value.shape) < MIN_HYPERSPARSE:
            rows = distinct_rows(value, "AB"[at], is_sound)
            return (dense, rows) if at else (rows, dense)
    return A, B


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
        if not has_options:
            A, B = _without_lists(A, B)
            product = product_by_scipy(A, B)
            if product is not None:
                return product
        if is_outside(A) or is_outside(B):
            return _product_outside(A, B, has_options=has_options)
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


def _product_outside(A: Any, B: Any, *, has_options: bool) -> Any:
    if has_options:
        raise ArgumentError("mask=, top= and threshold= choose entries of results in memory: read the matrix")
    return matmul_outside(A, B)


def _as_operand(value: Any, other: Any, name: str) -> Any:
    """Return the other factor of a sparse matrix: lists and the tables of other libraries as arrays."""
    if is_sparse(value) or not is_sparse(other):
        return value
    if not (isinstance(value, np.ndarray) or is_torch(value)):
        value = array_of_numbers(value, name)
    if np.ndim(value) == 0:
        fault = f"{name}: expected a matrix or a vector, got a number."
        raise ArgumentTypeError(f"{fault} Multiply by it with sparsetir.multiply.")
    return value


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
    numbers = [operators.is_number(x) for x in (A, B)]
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


__all__ = ["add", "check_offsets", "grouped_matmul", "kernel", "matmul", "multiply", "run", "subtract"]
