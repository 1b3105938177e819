# SPDX-License-Identifier: Apache-2.0
"""Ready programs with dense results, and a sampled product; `sparse_output` has those that compute a pattern."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import sparsetir as T

from sparsetir.errors import ArgumentError
from sparsetir.interop.arrays import HALVES
from sparsetir.ir.halves import by_three_products, check_precision
from sparsetir.ops.sparse_output import add, masked_spgemm, maximum, multiply, rap, scaled_add, spgemm
from sparsetir.script.printer import parse
from sparsetir.script.writer import ProgramWriter, memoize_program
from sparsetir.utils.arguments import as_count, as_dtype, as_flag, shown

MAX_WIDTH = 256  # Places in a range have 8 bits.


@memoize_program
def range_spmm(
    count: int = 32, width: int = 64, *, dtype: str = "float32", operand: str | None = None
) -> tirx.PrimFunc:
    """Sparse times dense matrix, range by range of columns: ``C[i, k] = sum_rs A[r, i, s] * B[r, X[r, i, s], k]``.

    Parameters
    ----------
    count : int
        Entries of each row in each range: 32 for 2:4 and a width of 64.
    width : int
        Columns of a range, a power of two up to 256. As many rows of B, of up to 64 columns, fit the first-level cache.
    dtype : dtype
        Of A, B and C. Sums of 16-bit floats are in float32 and rounded once.
    operand : {"int8", "uint8"}, optional
        Of B, where A is of 8-bit integers as well; C is then the exact product in int32. Like bfloat16 this is meant
        for processors with instructions for it.

    Returns
    -------
    PrimFunc
        Buffers A and X ``(ranges, m, count)``, X of uint8, as `pack_ranges` makes them, B ``(ranges, width, feat)`` and
        C ``(m, feat)``.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> matrix = np.array([[0, 1, 2, 0], [3, 0, 0, 4]], "float32")
    >>> values, places = sparsetir.ops.pack_ranges(matrix, 4)
    >>> kernel = sparsetir.build(sparsetir.ops.range_spmm(2, 4))
    >>> kernel(A=values, X=places, B=np.eye(4, dtype="float32").reshape(1, 4, 4)).tolist()
    [[0.0, 1.0, 2.0, 0.0], [3.0, 0.0, 0.0, 4.0]]
    """
    _check_width(width)
    as_count(count, "count", most=width)
    if operand is not None:
        for argument, value in (("dtype", dtype), ("operand", operand)):
            if value not in EIGHT_BITS:
                fault = f"{argument}: expected int8 or uint8 with an operand, got {shown(value)}"
                raise ArgumentError(f"{fault}. Quantize it, or leave the operand out.")
        return _wide_range_spmm(count, width, dtype, operand, "int32", "int32")
    name = as_dtype(dtype, "dtype")
    if name in HALVES:
        return _wide_range_spmm(count, width, name, None, "float32", None)

    @T.prim_func
    def range_spmm(
        a: T.handle, x: T.handle, b: T.handle, c: T.handle, m: T.int32, ranges: T.int32, feat: T.int32
    ):  # fmt: skip
        JO = T.dense_fixed(ranges)
        JI = T.dense_fixed(width)
        I = T.dense_fixed(m)
        S = T.dense_fixed(count)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (JO, I, S), dtype)
        X = T.match_sparse_buffer(x, (JO, I, S), "uint8")
        B = T.match_sparse_buffer(b, (JO, JI, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, K], "SS", "zero") as [i, k]:
            C[i, k] = 0
        for jo in T.serial(ranges):
            with T.sp_iter([I, S, K], "SRS", "range_spmm") as [i, s, k]:
                C[i, k] = C[i, k] + A[jo, i, s] * B[jo, T.floormod(T.Cast("int32", X[jo, i, s]), width), k]

    return range_spmm


def _wide_range_spmm(
    count: int, width: int, entries: str, operand: str | None, wide: str, result: str | None
) -> tirx.PrimFunc:
    """Return the program whose products are summed in `wide`; the result is that, or rounded to the dtype of A."""
    sums = "C" if result == wide else "sums"
    row = f'B[jo, T.floormod(T.Cast("int32", X[jo, i, s]), {width}), k]'
    lines = [
        "@T.prim_func",
        "def range_spmm(",
        "    a: T.handle, x: T.handle, b: T.handle, c: T.handle, m: T.int32, ranges: T.int32, feat: T.int32",
        "):",
        "    JO = T.dense_fixed(ranges)",
        f"    JI = T.dense_fixed({width})",
        "    I = T.dense_fixed(m)",
        f"    S = T.dense_fixed({count})",
        "    K = T.dense_fixed(feat)",
        f'    A = T.match_sparse_buffer(a, (JO, I, S), "{entries}")',
        '    X = T.match_sparse_buffer(x, (JO, I, S), "uint8")',
        f'    B = T.match_sparse_buffer(b, (JO, JI, K), "{operand or entries}")',
        f'    C = T.match_sparse_buffer(c, (I, K), "{result or entries}")',
        *([] if sums == "C" else [f'    sums = T.alloc_sparse_buffer((I, K), "{wide}")']),
        '    with T.sp_iter([I, K], "SS", "zero") as [i, k]:',
        f"        {sums}[i, k] = 0",
        "    for jo in T.serial(ranges):",
        '        with T.sp_iter([I, S, K], "SRS", "range_spmm") as [i, s, k]:',
        f'            {sums}[i, k] = {sums}[i, k] + T.Cast("{wide}", A[jo, i, s]) * T.Cast("{wide}", {row})',
    ]
    if sums != "C":
        lines.append('    with T.sp_iter([I, K], "SS", "rounded") as [i, k]:')
        lines.append(f'        C[i, k] = T.Cast("{entries}", sums[i, k])')
    return parse("\n".join(lines) + "\n")


def _check_width(width: Any) -> None:
    as_count(width, "width", least=1, most=MAX_WIDTH)
    if width & (width - 1):
        raise ArgumentError(f"width: expected a power of two up to {MAX_WIDTH}, got {width}. Pass 64.")


def pack_ranges(matrix: np.ndarray, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of a dense matrix that are not zero by ranges of columns, and their places, for `range_spmm`.

    Parameters
    ----------
    matrix : ndarray, shape (m, n)
        n is a multiple of the width.
    width : int
        Columns of a range.

    Returns
    -------
    tuple of ndarray
        Values and places of uint8, both ``(ranges, m, count)``. The count is that of the fullest range of a row; slots
        that are left hold zero.
    """
    _check_width(width)
    if getattr(matrix, "ndim", 0) != 2 or matrix.shape[1] % width:
        shape = getattr(matrix, "shape", type(matrix).__name__)
        raise ArgumentError(f"matrix: expected a matrix with a multiple of {width} columns, got {shape}. Pad it.")
    ranges = np.ascontiguousarray(matrix).reshape(len(matrix), matrix.shape[1] // width, width).transpose(1, 0, 2)
    is_entry = ranges != 0
    count = max(int(is_entry.sum(axis=2).max(initial=0)), 1)
    places = np.argsort(~is_entry, axis=2, kind="stable")[:, :, :count]
    return np.ascontiguousarray(np.take_along_axis(ranges, places, 2)), places.astype("uint8")


EIGHT_BITS = {"int8": (-128, 127), "uint8": (0, 255)}


@memoize_program
def quantized_spmm(
    entries: str = "int8",
    operand: str = "int8",
    *,
    zero_point: bool = False,
    bias: bool = False,
    idtype: str = "int32",
) -> tirx.PrimFunc:
    """Sparse times dense matrix of quantized numbers: ``C[i, k] = scale[i] * sum_j A[i, j] * (B[j, k] - z) + bias[i]``.

    Parameters
    ----------
    entries, operand : {"int8", "uint8"}
        Dtypes of A and B. A is symmetric: what it does not store is zero.
    zero_point : bool
        Whether B has a zero point z. It is folded into the sums: ``z`` times the sum of each row of A is subtracted.
    bias : bool
        Whether a bias is added.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers A in CSR, B, `scale` of float32 for each row (the scale of the row of A times that of B), `zero_point`
        of int32 with one element and `bias` of float32 for each row where they are asked for, and C of float32. Sums
        are exact in int32 up to about 65,000 entries in a row. `sparsetir.decompose_format` stores A in other formats.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[2, 0], [-1, 3]], "int8"))
    >>> B = np.array([[10, 11], [10, 14]], "uint8")
    >>> kernel = sparsetir.build(sparsetir.ops.quantized_spmm("int8", "uint8", zero_point=True))
    >>> kernel(A=A, B=B, scale=np.array([0.5, 1], "float32"), zero_point=np.array([10], "int32")).tolist()
    [[0.0, 1.0], [0.0, 11.0]]
    """
    for name, dtype in (("entries", entries), ("operand", operand)):
        if dtype not in EIGHT_BITS:
            raise ArgumentError(f"{name}: expected int8 or uint8, got {shown(dtype)}. Quantize it, or use ops.spmm.")
    has_zero, has_bias = as_flag(zero_point, "zero_point"), as_flag(bias, "bias")
    handles = ["a", "b", "scale_data", *["zero_data"] * has_zero, *["bias_data"] * has_bias, "c", "indptr", "indices"]
    writer = ProgramWriter("quantized_spmm", handles)
    writer.scalars(idtype, "m", "n", "nnz", "feat")
    writer.dense("I", "m", idtype)
    writer.compressed("J", "I", ("n", "nnz"), ("indptr", "indices"), idtype)
    writer.dense("J_dense", "n", idtype)
    writer.dense("K", "feat", idtype)
    writer.match("A", "a", ("I", "J"), entries)
    writer.match("B", "b", ("J_dense", "K"), operand)
    writer.match("scale", "scale_data", ("I",), "float32")
    total, terms = "sums[i, k]", ""
    if has_zero:
        writer.dense("ONE", 1, idtype)
        writer.match("zero_point", "zero_data", ("ONE",), "int32")
        total = "(sums[i, k] - zero_point[0] * row_sums[i])"
    if has_bias:
        writer.match("bias", "bias_data", ("I",), "float32")
        terms = " + bias[i]"
    writer.match("C", "c", ("I", "K"), "float32")
    writer.scratch("sums", ("I", "K"), "int32")
    if has_zero:
        writer.scratch("row_sums", ("I",), "int32")
        line = 'row_sums[i] = row_sums[i] + T.Cast("int32", A[i, j])'
        writer.iterate(("I", "J"), "SR", "row_sums", [line], init="row_sums[i] = 0")
    line = 'sums[i, k] = sums[i, k] + T.Cast("int32", A[i, j]) * T.Cast("int32", B[j, k])'
    writer.iterate(("I", "J", "K"), "SRS", "products", [line], init="sums[i, k] = 0")
    writer.iterate(("I", "K"), "SS", "scaled", [f'C[i, k] = T.Cast("float32", {total}) * scale[i]{terms}'])
    return parse(writer.text())


# Wider dtypes in which products of these are summed.
SUMS = {"bfloat16": ("float32",), "float16": ("float32",), "int8": ("int32",), "uint8": ("int32",)}
FORMATS = ("csr", "csc", "coo", "bsr", "dcsr", "ell")
# The results of grouped products with the kinds of their axes: spatial (S) and reduction (R).
GROUPED_RESULTS = {"rows": "SSRS", "transposed": "SSSR", "weights": "SRSS"}


def _only(format: str, supported: tuple[str, ...], name: str) -> None:
    if format not in supported:
        raise ArgumentError(f"{name} is written for the formats {', '.join(supported)}, got {shown(format)}")


@memoize_program
def spmm(
    dtype: str = "float32",
    format: str = "csr",
    *,
    idtype: str = "int32",
    block: int | None = None,
    precision: str | None = None,
) -> tirx.PrimFunc:
    """Sparse times dense matrix: ``C[i, k] = sum_j A[i, j] * B[j, k]``.

    Parameters
    ----------
    dtype : dtype
        Of A, B and C: float16, bfloat16, float32, float64, int8, uint8, int32, int64 or bool, as text or as numpy or
        torch have it. The results are of the same dtype: sums of integers wrap around as numpy's do, sums of bools are
        or and their products and, 16-bit floats are summed in float32.
    format : {"csr", "csc", "coo", "bsr", "dcsr", "ell"}
        How A is stored. For ``"bsr"`` B and C are ``(blocks, block, feat)``.
    idtype : {"int32", "int64"}
        Of the index arrays.
    block : int, optional
        Edge of a block for ``"bsr"`` (default 4).
    precision : {"bf16x3"}, optional
        For float32: split A and B into two bfloat16 numbers each, and add three of their four products, in float32. A
        sum is off by at most ``3 * 2**-16`` times that of the magnitudes of its terms, besides the rounding of sums,
        and mostly by a tenth of it. Infinities become NaN, and denormal numbers may count as zero. Meant for
        processors with instructions for bfloat16, which the formats csr, bsr and dcsr use, and those that a program
        is decomposed to.

    Returns
    -------
    PrimFunc
        Buffers A, B and C.
    """
    _only(format, FORMATS, "spmm")
    if block is not None and format != "bsr":
        raise ArgumentError(f"block is the edge of a block of the format bsr, got block={shown(block)} for {format}")
    in_parts = check_precision(precision, dtype)
    if format == "bsr":
        program = _spmm_bsr(dtype, idtype, 4 if block is None else block)
    else:
        makers = {"csr": _spmm_csr, "csc": _spmm_csc, "coo": _spmm_coo, "dcsr": _spmm_dcsr, "ell": _spmm_ell}
        program = makers[format](dtype, idtype)
    return by_three_products(program) if in_parts else program


def _spmm_csr(dtype: str, idtype: str, *, accumulate: bool = False) -> tirx.PrimFunc:
    size, name = T.int64 if idtype == "int64" else T.int32, "added_spmm" if accumulate else "spmm"

    @T.prim_func
    def spmm(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: size,
        n: size,
        nnz: size,
        feat: size,
    ):
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", name) as [i, j, k]:
            if not accumulate:
                with T.init():
                    C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm.with_attr("global_symbol", name)


def added_spmm(dtype: str, idtype: str) -> tirx.PrimFunc:
    """Return a program that adds a product to what C holds: ``C += A @ B``."""
    return _spmm_csr(dtype, idtype, accumulate=True)


def _spmm_csc(dtype: str, idtype: str) -> tirx.PrimFunc:
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def spmm_csc(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: size,
        n: size,
        nnz: size,
        feat: size,
    ):
        J = T.dense_fixed(n, idtype)
        I = T.sparse_variable(J, (m, nnz), (indptr, indices), idtype)
        I_dense = T.dense_fixed(m, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([J, I, K], "RSS", "spmm") as [j, i, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm_csc


def _spmm_coo(dtype: str, idtype: str) -> tirx.PrimFunc:
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def spmm_coo(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        rows: T.handle,
        cols: T.handle,
        m: size,
        n: size,
        nnz: size,
        feat: size,
    ):
        I = T.sparse_fixed(None, (m, nnz), rows, idtype, unique=False)
        J = T.singleton(I, n, cols, idtype)
        I_dense = T.dense_fixed(m, idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm_coo


def _spmm_dcsr(dtype: str, idtype: str) -> tirx.PrimFunc:
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def spmm_dcsr(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr_i: T.handle,
        indices_i: T.handle,
        indptr_j: T.handle,
        indices_j: T.handle,
        m: size,
        n: size,
        rows: size,
        nnz: size,
        feat: size,
    ):
        I = T.sparse_variable(None, (m, rows), (indptr_i, indices_i), idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr_j, indices_j), idtype)
        I_dense = T.dense_fixed(m, idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm_dcsr


def _spmm_ell(dtype: str, idtype: str) -> tirx.PrimFunc:
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def spmm_ell(a: T.handle, b: T.handle, c: T.handle, indices: T.handle, m: size, n: size, width: size, feat: size):
        I = T.dense_fixed(m, idtype)
        J = T.sparse_fixed(I, (n, width), indices, idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm_ell


def _spmm_bsr(dtype: str, idtype: str, block: int) -> tirx.PrimFunc:
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def spmm_bsr(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr: T.handle,
        indices: T.handle,
        mb: size,
        nb: size,
        nnzb: size,
        feat: size,
    ):
        IO = T.dense_fixed(mb, idtype)
        JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices), idtype)
        JO_dense = T.dense_fixed(nb, idtype)
        II = T.dense_fixed(block, idtype)
        JI = T.dense_fixed(block, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (JO_dense, JI, K), dtype)
        C = T.match_sparse_buffer(c, (IO, II, K), dtype)
        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm") as [io, jo, ii, ji, k]:
            with T.init():
                C[io, ii, k] = 0
            C[io, ii, k] = C[io, ii, k] + A[io, jo, ii, ji] * B[jo, ji, k]

    return spmm_bsr


@memoize_program
def spmv(dtype: str = "float32", format: str = "csr", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Sparse matrix times vector: ``y[i] = sum_j A[i, j] * x[j]``; buffers A, x and y."""
    _only(format, ("csr",), "spmv")
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def spmv(
        a: T.handle,
        x_data: T.handle,
        y_data: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: size,
        n: size,
        nnz: size,
    ):
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        x = T.match_sparse_buffer(x_data, (J_dense,), dtype)
        y = T.match_sparse_buffer(y_data, (I,), dtype)
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            with T.init():
                y[i] = 0
            y[i] = y[i] + A[i, j] * x[j]

    return spmv


@memoize_program
def linear(
    dtype: str = "float32", format: str = "csr", *, idtype: str = "int32", precision: str | None = None
) -> tirx.PrimFunc:
    """Build a linear layer: ``Y[b, o] = sum_i A[o, i] * X[b, i]``, rows of X in turn; buffers A, X and Y.

    Parameters
    ----------
    dtype, format, idtype, precision
        As for `spmm`, in the format csr.
    """
    _only(format, ("csr",), "linear")
    in_parts = check_precision(precision, dtype)
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def linear(
        a: T.handle,
        x: T.handle,
        y: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: size,
        n: size,
        nnz: size,
        batch: size,
    ):
        O = T.dense_fixed(m, idtype)
        I = T.sparse_variable(O, (n, nnz), (indptr, indices), idtype)
        I_dense = T.dense_fixed(n, idtype)
        B = T.dense_fixed(batch, idtype)
        A = T.match_sparse_buffer(a, (O, I), dtype)
        X = T.match_sparse_buffer(x, (B, I_dense), dtype)
        Y = T.match_sparse_buffer(y, (B, O), dtype)
        with T.sp_iter([O, I, B], "SRS", "linear") as [o, i, b]:
            with T.init():
                Y[b, o] = 0
            Y[b, o] = Y[b, o] + A[o, i] * X[b, i]

    return by_three_products(linear) if in_parts else linear


@memoize_program
def sddmm(
    dtype: str = "float32",
    format: str = "csr",
    *,
    idtype: str = "int32",
    precision: str | None = None,
    result: str | None = None,
) -> tirx.PrimFunc:
    """Sample a dense product: ``O[i, j] = S[i, j] * sum_k X[i, k] * Y[j, k]``; buffers S, X, Y and O.

    Parameters
    ----------
    dtype, format, idtype, precision
        As for `spmm`, in the format csr.
    result : dtype, optional
        Of S, O and the sums, by default that of X and Y: float32 for X and Y of bfloat16 or float16, int32 for those of
        8-bit integers.
    """
    _only(format, ("csr",), "sddmm")
    in_parts = check_precision(precision, dtype)
    wide = dtype if result is None else as_dtype(result, "result")
    if wide != dtype and wide not in SUMS.get(as_dtype(dtype, "dtype"), ()):
        fault = f"result: expected {' or '.join([dtype, *SUMS.get(dtype, ())])} for {dtype}, got {shown(result)}"
        raise ArgumentError(f"{fault}. Leave it out for results of the operands' dtype.")
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def sddmm(
        s: T.handle,
        x: T.handle,
        y: T.handle,
        o: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: size,
        n: size,
        nnz: size,
        feat: size,
    ):
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        S = T.match_sparse_buffer(s, (I, J), wide)
        X = T.match_sparse_buffer(x, (I, K), dtype)
        Y = T.match_sparse_buffer(y, (J_dense, K), dtype)
        O = T.match_sparse_buffer(o, (I, J), wide)
        with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
            with T.init():
                O[i, j] = 0
            if wide == dtype:
                O[i, j] = O[i, j] + S[i, j] * X[i, k] * Y[j, k]
            if wide != dtype:
                O[i, j] = O[i, j] + S[i, j] * T.Cast(wide, X[i, k]) * T.Cast(wide, Y[j, k])

    return by_three_products(sddmm) if in_parts else sddmm


@memoize_program
def mttkrp(dtype: str = "float32", format: str = "csf", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Tensor times Khatri-Rao product: ``D[i, r] = sum_jk T[i, j, k] * B[j, r] * C[k, r]``; buffers T_, B, C and D."""
    _only(format, ("csf",), "mttkrp")
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def mttkrp(
        t: T.handle,
        b: T.handle,
        c: T.handle,
        d: T.handle,
        indptr_j: T.handle,
        indices_j: T.handle,
        indptr_k: T.handle,
        indices_k: T.handle,
        n_i: size,
        n_j: size,
        n_k: size,
        fibers: size,
        nnz: size,
        rank: size,
    ):
        I = T.dense_fixed(n_i, idtype)
        J = T.sparse_variable(I, (n_j, fibers), (indptr_j, indices_j), idtype)
        K = T.sparse_variable(J, (n_k, nnz), (indptr_k, indices_k), idtype)
        J_dense = T.dense_fixed(n_j, idtype)
        K_dense = T.dense_fixed(n_k, idtype)
        R = T.dense_fixed(rank, idtype)
        T_ = T.match_sparse_buffer(t, (I, J, K), dtype)
        B = T.match_sparse_buffer(b, (J_dense, R), dtype)
        C = T.match_sparse_buffer(c, (K_dense, R), dtype)
        D = T.match_sparse_buffer(d, (I, R), dtype)
        with T.sp_iter([I, J, K, R], "SRRS", "mttkrp") as [i, j, k, r]:
            with T.init():
                D[i, r] = 0
            D[i, r] = D[i, r] + T_[i, j, k] * B[j, r] * C[k, r]

    return mttkrp


@memoize_program
def triangles(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Triangles of a graph: ``C[i]`` counts the pairs j, k with entries ``L[i, j]``, ``L[i, k]`` and ``L[j, k]``.

    Parameters
    ----------
    dtype : dtype
        Of L, whose values are not read.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers L, with each edge once below the diagonal, and C of int64, whose sum is the number of triangles. The
        rows of L are sorted.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> L = sp.csr_array(np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0]], "float32"))
    >>> sparsetir.build(sparsetir.ops.triangles())(L=L).tolist()
    [0, 0, 1]
    """
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def triangles(l: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, n: size, nnz: size):
        I = T.dense_fixed(n, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        K = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        L = T.match_sparse_buffer(l, (I, J), dtype)
        C = T.match_sparse_buffer(c, (I,), "int64")
        with T.sp_iter([I, J, T.intersect(K, T.attach(K, J))], "SRR", "triangles") as [i, j, k]:
            with T.init():
                C[i] = T.int64(0)
            C[i] = C[i] + T.int64(1)

    return triangles


@memoize_program
def grouped_matmul(dtype: str = "float32", result: str = "rows", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Product of rows in ragged groups with a matrix for each group: ``Y[g, r, k] = sum_d X[g, r, d] * W[g, d, k]``.

    Parameters
    ----------
    dtype : dtype
        Of X, W and Y.
    result : {"rows", "transposed", "weights"}
        ``"rows"``: the product above. ``"transposed"``: ``X[g, r, d] = sum_k Y[g, r, k] * W[g, d, k]``, the gradient of
        the rows. ``"weights"``: ``W[g, d, k] = sum_r X[g, r, d] * Y[g, r, k]``, the gradient of the matrices.
    idtype : {"int32", "int64"}
        Of the offsets.

    Returns
    -------
    PrimFunc
        Buffers X ``(rows, depth)``, W ``(groups, depth, feat)`` and Y ``(rows, feat)``, the array ``offsets`` of
        groups + 1 positions where groups begin, and the size ``longest``, at least the number of rows of each group.

    Raises
    ------
    ArgumentError
        For another `result`.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> kernel = sparsetir.build(sparsetir.ops.grouped_matmul())
    >>> X, W = np.ones((3, 2), "float32"), np.array([[[1], [1]], [[2], [2]]], "float32")
    >>> kernel(X=X, W=W, offsets=np.array([0, 1, 3], "int32"), longest=2).tolist()
    [[2.0], [4.0], [4.0]]
    """
    if result not in GROUPED_RESULTS:
        raise ArgumentError(
            f"result: expected one of {', '.join(GROUPED_RESULTS)}, got {shown(result)}. Choose one of these."
        )
    size, name = T.int64 if idtype == "int64" else T.int32, {"rows": "matmul"}.get(result, result)

    @T.prim_func
    def grouped(
        x: T.handle,
        w: T.handle,
        y: T.handle,
        offsets: T.handle,
        groups: size,
        longest: size,
        total: size,
        depth: size,
        feat: size,
    ):
        G = T.dense_fixed(groups, idtype)
        R = T.dense_variable(G, (longest, total), offsets, idtype)
        D = T.dense_fixed(depth, idtype)
        K = T.dense_fixed(feat, idtype)
        X = T.match_sparse_buffer(x, (G, R, D), dtype)
        W = T.match_sparse_buffer(w, (G, D, K), dtype)
        Y = T.match_sparse_buffer(y, (G, R, K), dtype)
        with T.sp_iter([G, R, D, K], GROUPED_RESULTS[result], f"grouped_{name}") as [g, r, d, k]:
            if result == "rows":
                with T.init():
                    Y[g, r, k] = 0
                Y[g, r, k] = Y[g, r, k] + X[g, r, d] * W[g, d, k]
            if result == "transposed":
                with T.init():
                    X[g, r, d] = 0
                X[g, r, d] = X[g, r, d] + Y[g, r, k] * W[g, d, k]
            if result == "weights":
                with T.init():
                    W[g, d, k] = 0
                W[g, d, k] = W[g, d, k] + X[g, r, d] * Y[g, r, k]

    return grouped.with_attr("global_symbol", result)


__all__ = [
    "add",
    "grouped_matmul",
    "linear",
    "masked_spgemm",
    "maximum",
    "mttkrp",
    "multiply",
    "pack_ranges",
    "quantized_spmm",
    "range_spmm",
    "rap",
    "scaled_add",
    "sddmm",
    "spgemm",
    "spmm",
    "spmv",
    "triangles",
]
