# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit integers with scales and a zero point, summed in int32."""

from __future__ import annotations

from tvm import tirx

from sparsetir.errors import ArgumentError
from sparsetir.ops.memo import memoize_program
from sparsetir.script.printer import parse
from sparsetir.utils.arguments import as_flag, shown

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
    size = f"T.{idtype}"
    lines = [
        "@T.prim_func",
        f"def quantized_spmm({', '.join(f'{h}: T.handle' for h in handles)}, "
        f"m: {size}, n: {size}, nnz: {size}, feat: {size}):",
        f'    I = T.dense_fixed(m, "{idtype}")',
        f'    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "{idtype}")',
        f'    J_dense = T.dense_fixed(n, "{idtype}")',
        f'    K = T.dense_fixed(feat, "{idtype}")',
        f'    A = T.match_sparse_buffer(a, (I, J), "{entries}")',
        f'    B = T.match_sparse_buffer(b, (J_dense, K), "{operand}")',
        '    scale = T.match_sparse_buffer(scale_data, (I,), "float32")',
    ]
    total, terms = "sums[i, k]", []
    if has_zero:
        lines.append(f'    ONE = T.dense_fixed(1, "{idtype}")')
        lines.append('    zero_point = T.match_sparse_buffer(zero_data, (ONE,), "int32")')
        total = "(sums[i, k] - zero_point[0] * row_sums[i])"
    if has_bias:
        lines.append('    bias = T.match_sparse_buffer(bias_data, (I,), "float32")')
        terms.append(" + bias[i]")
    lines.append('    C = T.match_sparse_buffer(c, (I, K), "float32")')
    lines.append('    sums = T.alloc_sparse_buffer((I, K), "int32")')
    if has_zero:
        lines += [
            '    row_sums = T.alloc_sparse_buffer((I,), "int32")',
            '    with T.sp_iter([I, J], "SR", "row_sums") as [i, j]:',
            "        with T.init():",
            "            row_sums[i] = 0",
            '        row_sums[i] = row_sums[i] + T.Cast("int32", A[i, j])',
        ]
    lines += [
        '    with T.sp_iter([I, J, K], "SRS", "products") as [i, j, k]:',
        "        with T.init():",
        "            sums[i, k] = 0",
        '        sums[i, k] = sums[i, k] + T.Cast("int32", A[i, j]) * T.Cast("int32", B[j, k])',
        '    with T.sp_iter([I, K], "SS", "scaled") as [i, k]:',
        f'        C[i, k] = T.Cast("float32", {total}) * scale[i]{"".join(terms)}',
    ]
    return parse("\n".join(lines) + "\n")


__all__ = ["EIGHT_BITS", "quantized_spmm"]
