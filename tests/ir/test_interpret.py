# SPDX-License-Identifier: Apache-2.0
"""The interpreter against results worked out by hand.

The matrix most tests use is ``[[1, 0, 2], [0, 0, 0], [0, 3, 0]]``: an empty row and unequal rows.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

import sparsetir
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.ir.interpreter import interpret

CSR = {"indptr": [0, 2, 2, 3], "indices": [0, 2, 1], "a": [1, 2, 3]}
JUNK = 99.0


def check(func: Any, args: dict[str, Any], out: str, expected: Any) -> None:
    """Run and compare the buffer `out` with `expected`, exactly."""
    found = interpret(func, args)[out]
    np.testing.assert_array_equal(found, np.asarray(expected, found.dtype))


@T.prim_func
def spmm(
    a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_dense, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = T.float32(0)
        C[i, k] = C[i, k] + A[i, j] * B[j, k]


def test_spmm_csr_with_an_empty_row():
    args = {**CSR, "b": [[1, 10], [2, 20], [3, 30]], "c": np.full((3, 2), JUNK), "m": 3, "n": 3, "nnz": 3, "feat": 2}
    check(spmm, args, "c", [[7, 70], [0, 0], [6, 60]])


def test_sizes_are_inferred_and_missing_buffers_are_zeros():
    found = interpret(spmm, {**CSR, "b": [[1, 10], [2, 20], [3, 30]]})
    assert found["c"].tolist() == [[7, 70], [0, 0], [6, 60]]
    assert found["c"].dtype == np.float32
    assert set(found) == {"a", "b", "c", "indptr", "indices"}


def test_the_callers_arrays_are_not_changed():
    c = np.full((3, 2), JUNK, "float32")
    interpret(spmm, {**CSR, "b": np.ones((3, 2), "float32"), "c": c})
    assert (c == JUNK).all()


@pytest.mark.parametrize(("m", "n", "feat"), [(0, 0, 0), (0, 3, 2), (3, 0, 2), (3, 3, 0)])
def test_empty_matrices(m, n, feat):
    empty = {"indptr": np.zeros(m + 1), "indices": [], "a": []}
    sizes = {"m": m, "n": n, "nnz": 0, "feat": feat}
    args = {**empty, **sizes, "b": np.ones((n, feat)), "c": np.full((m, feat), JUNK)}
    check(spmm, args, "c", np.zeros((m, feat)))


@T.prim_func
def spmv_csc(a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
             m: T.int32, n: T.int32, nnz: T.int32):  # fmt: skip
    J = T.dense_fixed(n)
    I = T.sparse_variable(J, (m, nnz), (indptr, indices))
    I_dense = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J,), "float32")
    Y = T.match_sparse_buffer(y, (I_dense,), "float32")
    with T.sp_iter([J, I], "RS", "spmv") as [j, i]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, j] * X[j]


def test_csc_with_row_first_subscripts():
    args = {"indptr": [0, 1, 2, 3], "indices": [0, 2, 0], "a": [1, 3, 2], "x": [1, 10, 100], "y": [JUNK] * 3}
    check(spmv_csc, args, "y", [201, 0, 30])


COO = {"rows_ptr": [0, 4], "rows": [0, 0, 2, 2], "cols": [1, 1, 0, 2], "a": [1, 2, 3, 4]}


@T.prim_func
def spmv_coo(a: T.handle, x: T.handle, y: T.handle, rows_ptr: T.handle, rows: T.handle, cols: T.handle,
             m: T.int32, n: T.int32, nnz: T.int32):  # fmt: skip
    I = T.sparse_variable(None, (m, nnz), (rows_ptr, rows), unique=False)
    J = T.singleton(I, n, cols)
    I_dense = T.dense_fixed(m)
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I_dense,), "float32")
    with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        with T.init():
            Y[i] = Y[i] + T.float32(1)
        Y[i] = Y[i] + A[i, j] * X[j]


def test_coo_iterates_every_duplicate_and_initialises_once():
    check(spmv_coo, {**COO, "x": [1, 10, 100], "y": [0, 0, 0]}, "y", [31, 1, 404])


@T.prim_func
def densify_coo(a: T.handle, d: T.handle, rows_ptr: T.handle, rows: T.handle, cols: T.handle,
                m: T.int32, n: T.int32, nnz: T.int32):  # fmt: skip
    I = T.sparse_variable(None, (m, nnz), (rows_ptr, rows), unique=False)
    J = T.singleton(I, n, cols)
    I_dense = T.dense_fixed(m)
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    D = T.match_sparse_buffer(d, (I_dense, J_dense), "float32")
    with T.sp_iter([I_dense, J_dense], "SS", "densify") as [i, j]:
        D[i, j] = A[i, j]


def test_random_access_to_coo_takes_the_first_match_and_finds_the_second_entry_of_a_row():
    args = {**COO, "d": np.full((3, 3), JUNK)}
    check(densify_coo, args, "d", [[0, 1, 0], [0, 0, 0], [3, 0, 4]])


@T.prim_func
def sddmm_coo(o: T.handle, x: T.handle, y: T.handle, rows_ptr: T.handle, rows: T.handle, cols: T.handle,
              m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):  # fmt: skip
    I = T.sparse_variable(None, (m, nnz), (rows_ptr, rows), unique=False)
    J = T.singleton(I, n, cols)
    I_dense = T.dense_fixed(m)
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    O = T.match_sparse_buffer(o, (I, J), "float32")
    X = T.match_sparse_buffer(x, (I_dense, K), "float32")
    Y = T.match_sparse_buffer(y, (J_dense, K), "float32")
    with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
        with T.init():
            O[i, j] = T.float32(0)
        O[i, j] = O[i, j] + X[i, k] * Y[j, k]


def test_every_duplicate_of_an_output_is_initialised_and_gets_its_own_sum():
    coo = {name: COO[name] for name in ("rows_ptr", "rows", "cols")}
    args = {**coo, "o": [JUNK] * 4, "x": [[1, 2], [0, 0], [3, 4]], "y": [[1, 0], [10, 1], [0, 5]]}
    check(sddmm_coo, args, "o", [12, 12, 3, 20])


@T.prim_func
def spmv_ell(a: T.handle, x: T.handle, y: T.handle, indices: T.handle, m: T.int32, n: T.int32, width: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_fixed(I, (n, width), indices, sorted=False)
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, j] * X[j]


def test_ell_skips_absent_slots_on_both_sides():
    args = {"indices": [0, 2, 1, -1, 3, -1], "a": [1, 2, 3, JUNK, JUNK, JUNK], "x": [1, 10, 100], "y": [JUNK] * 3}
    check(spmv_ell, {**args, "width": 2}, "y", [201, 30, 0])


@T.prim_func
def spmv_band(a: T.handle, x: T.handle, y: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_fixed(I, (n, 3), lambda i, s: i + s - 1)
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, j] * X[j]


def test_band_from_a_formula():
    a = [JUNK, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, JUNK]
    check(spmv_band, {"a": a, "x": [1, 2, 3, 4], "y": [JUNK] * 4, "n": 4}, "y", [5, 26, 65, 11])


@T.prim_func
def segment_max(a: T.handle, y: T.handle, indptr: T.handle, n: T.int32, length: T.int32, nnz: T.int32):
    I = T.dense_fixed(n)
    J = T.dense_variable(I, (length, nnz), indptr)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "segment_max") as [i, j]:
        with T.init():
            Y[i] = T.float32(-100)
        Y[i] = T.max(Y[i], A[i, j])


def test_ragged_max():
    args = {"indptr": [0, 2, 2, 5], "a": [-2, 1, -5, -3, -4], "y": [JUNK] * 3, "length": 3}
    check(segment_max, args, "y", [1, -100, -3])


@T.prim_func
def ragged_tail(a: T.handle, d: T.handle, indptr: T.handle, n: T.int32, length: T.int32):
    I = T.dense_fixed(n)
    J = T.dense_variable(I, length, indptr)
    D = T.dense_fixed(length)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(d, (I, D), "float32")
    with T.sp_iter([I, D], "SS", "tail") as [i, d]:
        B[i, d] = A[i, d + 1]


def test_ragged_random_access_stays_in_its_row():
    args = {"indptr": [0, 2, 2, 5], "a": [1, 2, 3, 4, 5], "n": 3, "length": 3}
    check(ragged_tail, args, "d", [[2, 0, 0], [0, 0, 0], [4, 5, 0]])


@T.prim_func
def triangular(a: T.handle, x: T.handle, y: T.handle, d: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    J = T.dense_variable(I, n, extent=lambda i: i + 1, offset=lambda i: i * (i + 1) // 2)
    J_dense = T.dense_fixed(n)
    L = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    D = T.match_sparse_buffer(d, (I, J_dense), "float32")
    with T.sp_iter([I, J], "SR", "product") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + L[i, j] * X[j]
    with T.sp_iter([I, J_dense], "SS", "unpack") as [i, j]:
        D[i, j] = L[i, j]


def test_packed_triangle():
    args = {"a": [1, 2, 3, 4, 5, 6], "x": [1, 10, 100], "n": 3}
    check(triangular, args, "y", [1, 32, 654])
    check(triangular, args, "d", [[1, 0, 0], [2, 3, 0], [4, 5, 6]])


@T.prim_func
def densify_shifted(a: T.handle, d: T.handle, e: T.handle, indptr: T.handle, indices: T.handle,
                    m: T.int32, n: T.int32, nnz: T.int32):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32", default_value=-1)
    D = T.match_sparse_buffer(d, (I, J_dense), "float32")
    E = T.match_sparse_buffer(e, (I, J_dense), "float32")
    with T.sp_iter([I, J_dense], "SS", "densify") as [i, j]:
        D[i, j] = A[i, j]
        E[i + 1, j] = A[i - 1, j + 1] * T.float32(2)


def test_absent_reads_are_the_default_and_absent_stores_vanish():
    args = {**CSR, "e": np.full((3, 3), JUNK), "d": np.full((3, 3), JUNK)}
    check(densify_shifted, args, "d", [[1, -1, 2], [-1, -1, -1], [-1, 3, -1]])
    check(densify_shifted, args, "e", [[JUNK] * 3, [-2, -2, -2], [-2, 4, -2]])


@T.prim_func
def sparsify(a: T.handle, d: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    D = T.match_sparse_buffer(d, (I, J_dense), "float32")
    with T.sp_iter([I, J_dense], "SS", "sparsify") as [i, j]:
        A[i, j] = D[i, j]


@T.prim_func
def shifted_products(a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
                     m: T.int32, n: T.int32, nnz: T.int32):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J_dense], "SR", "shifted") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + X[j] * A[i, j] * A[i, j + 1]


def test_sums_leave_out_products_with_an_absent_factor():
    inf = float("inf")
    A = sp.csr_array(np.array([[1, 2, 0], [0, 0, 0], [3, 0, 4]], "float32"))
    arrays = {"indptr": A.indptr, "indices": A.indices, "a": A.data, "x": np.array([5, inf, inf], "float32")}
    check(shifted_products, {**arrays, "m": 3}, "y", [10, 0, 0])
    np.testing.assert_array_equal(sparsetir.build(shifted_products)(A=A, X=arrays["x"]), [10, 0, 0])


def test_stores_reach_only_stored_coordinates():
    check(sparsify, {**CSR, "d": [[11, 12, 13], [21, 22, 23], [31, 32, 33]]}, "a", [11, 13, 32])


@T.prim_func
def spmv_dcsr(a: T.handle, x: T.handle, y: T.handle, rows_ptr: T.handle, rows: T.handle, indptr: T.handle,
              indices: T.handle, m: T.int32, n: T.int32, stored: T.int32, nnz: T.int32):  # fmt: skip
    I = T.sparse_variable(None, (m, stored), (rows_ptr, rows))
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    I_dense = T.dense_fixed(m)
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I_dense,), "float32")
    with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, j] * X[j]


def test_rows_that_are_not_stored_are_initialised():
    structure = {"rows_ptr": [0, 2], "rows": [1, 3], "indptr": [0, 1, 3], "indices": [2, 0, 1]}
    args = {**structure, "a": [5, 6, 7], "x": [1, 10, 100], "y": [JUNK] * 5}
    check(spmv_dcsr, args, "y", [0, 500, 0, 76, 0])


@T.prim_func
def softmax(a: T.handle, o: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float64")
    O = T.match_sparse_buffer(o, (I, J), "float64")
    top = T.alloc_sparse_buffer((I,), "float64")
    total = T.alloc_sparse_buffer((I,), "float64")
    with T.sp_iter([I], "S", "rows") as [i]:
        with T.sp_iter([J], "R", "largest") as [j]:
            with T.init():
                top[i] = T.float64(-1000)
            top[i] = T.max(top[i], A[i, j])
        with T.sp_iter([J], "R", "sum") as [j]:
            with T.init():
                total[i] = T.float64(0)
            total[i] = total[i] + T.exp(A[i, j] - top[i])
        with T.sp_iter([J], "S", "divide") as [j]:
            O[i, j] = T.exp(A[i, j] - top[i]) / total[i]


def test_softmax_with_nested_iterations():
    log3 = 1.0986122886681098
    args = {"indptr": [0, 2, 2, 5], "indices": [0, 2, 0, 1, 2], "a": [0, log3, 700, 700 + log3, 700], "n": 3}
    found = interpret(softmax, args)["o"]
    np.testing.assert_allclose(found, [0.25, 0.75, 0.2, 0.6, 0.2], rtol=1e-12)


@T.prim_func
def hypergraph(x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, indptr_t: T.handle,
               indices_t: T.handle, n: T.int32, m: T.int32, nnz: T.int32, feat: T.int32):  # fmt: skip
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (m, nnz), (indptr, indices))
    J_dense = T.dense_fixed(m)
    I_T = T.sparse_variable(J_dense, (n, nnz), (indptr_t, indices_t))
    I_dense = T.dense_fixed(n)
    F = T.dense_fixed(feat)
    X = T.match_sparse_buffer(x, (I_dense, F), "float32")
    Y = T.match_sparse_buffer(y, (I, F), "float32")
    with T.sp_iter([I, F, J, T.attach(I_T, J)], "SSRR", "hyper_gnn") as [i, f, j, i_t]:
        with T.init():
            Y[i, f] = T.float32(0)
        Y[i, f] = Y[i, f] + X[i_t, f]


def test_attach_chooses_the_fiber_by_coordinate():
    edges = {"indptr": [0, 1, 3, 4], "indices": [0, 0, 1, 1], "indptr_t": [0, 2, 4], "indices_t": [0, 1, 1, 2]}
    args = {**edges, "x": [[1, 2], [10, 20], [100, 200]], "y": np.full((3, 2), JUNK), "m": 2}
    check(hypergraph, args, "y", [[11, 22], [121, 242], [110, 220]])


@T.prim_func
def two_hops(v: T.handle, y: T.handle, keys_ptr: T.handle, keys: T.handle, indptr: T.handle, indices: T.handle,
             indptr_t: T.handle, indices_t: T.handle, n: T.int32, m: T.int32, stored: T.int32, nnz: T.int32,
             nnz_t: T.int32):  # fmt: skip
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (m, nnz), (indptr, indices))
    Key = T.sparse_variable(None, (m, stored), (keys_ptr, keys))
    L = T.sparse_variable(Key, (n, nnz_t), (indptr_t, indices_t))
    V = T.match_sparse_buffer(v, (Key, L), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J, T.attach(L, J)], "SRR", "two_hops") as [i, j, k]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + V[j, k]


def test_attach_below_an_absent_coordinate_is_empty():
    first = {"indptr": [0, 2, 3], "indices": [0, 5, 4], "m": 6}
    second = {"keys_ptr": [0, 2], "keys": [2, 5], "indptr_t": [0, 1, 3], "indices_t": [0, 0, 1], "v": [7, 20, 300]}
    check(two_hops, {**first, **second, "y": [JUNK] * 2}, "y", [320, 0])


@T.prim_func
def triangles(a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "int32")
    Y = T.match_sparse_buffer(y, (I,), "int32")
    with T.sp_iter([I, J, T.attach(J, J)], "SRR", "triangles") as [i, j, k]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j] * A[j, k] * A[i, k]


def test_an_axis_attached_to_itself():
    args = {"indptr": [0, 3, 5, 6, 6], "indices": [1, 2, 3, 2, 3, 3], "a": [1, 2, 3, 4, 5, 6], "n": 4}
    check(triangles, args, "y", [1 * 4 * 2 + 1 * 5 * 3 + 2 * 6 * 3, 4 * 6 * 5, 0, 0])


@T.prim_func
def sddmm_fused(a: T.handle, x: T.handle, y: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
                m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (I, K), "float32")
    Y = T.match_sparse_buffer(y, (J_dense, K), "float32")
    O = T.match_sparse_buffer(o, (I, J), "float32")
    with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:
        with T.init():
            O[i, j] = T.float32(0)
        O[i, j] = O[i, j] + A[i, j] * X[i, k] * Y[j, k]


def test_fused_sddmm():
    args = {**CSR, "x": [[1, 2], [3, 4], [5, 6]], "y": [[1, 0], [0, 1], [1, 1]], "o": [JUNK] * 3}
    check(sddmm_fused, args, "o", [1, 6, 18])


@T.prim_func
def bsrmv(a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
          mb: T.int32, nb: T.int32, nnzb: T.int32):  # fmt: skip
    IO = T.dense_fixed(mb)
    JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
    II = T.dense_fixed(2)
    JI = T.dense_fixed(2)
    JO_dense = T.dense_fixed(nb)
    A = T.match_sparse_buffer(a, (IO, II, JO, JI), "float32")
    X = T.match_sparse_buffer(x, (JO_dense, JI), "float32")
    Y = T.match_sparse_buffer(y, (IO, II), "float32")
    with T.sp_iter([IO, JO, II, JI], "SRSR", "bsrmv") as [io, jo, ii, ji]:
        with T.init():
            Y[io, ii] = T.float32(0)
        Y[io, ii] = Y[io, ii] + A[io, ii, jo, ji] * X[jo, ji]


def test_a_buffer_over_several_trees_is_stored_tree_by_tree():
    args = {"indptr": [0, 0, 1], "indices": [1], "a": [[[1, 2], [3, 4]]], "x": [[0, 0], [1, 10]]}
    check(bsrmv, args, "y", [[0, 0], [21, 43]])


@T.prim_func
def padded_chain(a: T.handle, y: T.handle, outer: T.handle, indptr: T.handle, indices: T.handle,
                 m: T.int32, p: T.int32, n: T.int32, nnz: T.int32):  # fmt: skip
    I = T.dense_fixed(m)
    P = T.sparse_fixed(I, (p, 2), outer)
    J = T.sparse_variable(P, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, P, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, P, J], "SRR", "chain") as [i, q, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, q, j] * T.Cast("float32", 100 * q + j)


def test_a_variable_axis_below_padded_slots():
    structure = {"outer": [0, 3, 1, -1], "indptr": [0, 1, 2, 4, 5], "indices": [2, 0, 0, 1, 2]}
    args = {**structure, "a": [1, 1, 1, 2, JUNK], "m": 2, "p": 4, "n": 3}
    check(padded_chain, args, "y", [302, 302])


@T.prim_func(check_well_formed=False)
def powers(a: T.handle, y: T.handle, cols: T.handle, indptr: T.handle, indices: T.handle, steps: T.int32,
           m: T.int32, n: T.int32, nnz: T.int32):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    P = T.singleton(J, n, lambda i, j, s: n - 1 - j)
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J, P), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    C = T.match_sparse_buffer(cols, (J_dense,), "float32")
    for step in range(steps):
        with T.sp_iter([I], "S", "rows") as [i]:
            row = T.alloc_buffer((n,), "float32")
            with T.sp_iter([J, P], "SS", "scatter") as [j, p]:
                row[p] = A[i, j, p]
            with T.sp_iter([J_dense], "R", "gather") as [q]:
                with T.init():
                    Y[i] = T.float32(0)
                if step > 0:
                    Y[i] = Y[i] + row[q] * C[q]


def test_iterations_in_loops_with_fresh_scratch_and_a_mirrored_singleton():
    args = {**CSR, "cols": [1, 10, 100], "y": [JUNK] * 3, "steps": 2}
    check(powers, args, "y", [102, 0, 30])
    check(powers, {**args, "steps": 1}, "y", [0, 0, 0])
    check(powers, {**args, "steps": 0}, "y", [JUNK] * 3)


@T.prim_func
def mttkrp(a: T.handle, b: T.handle, c: T.handle, d: T.handle, keys_ptr: T.handle, keys: T.handle, indptr_j: T.handle,
           indices_j: T.handle, indptr_k: T.handle, indices_k: T.handle, m: T.int32, n: T.int32, o: T.int32,
           rank: T.int32, nnz_i: T.int32, nnz_j: T.int32, nnz_k: T.int32):  # fmt: skip
    I = T.sparse_variable(None, (m, nnz_i), (keys_ptr, keys))
    J = T.sparse_variable(I, (n, nnz_j), (indptr_j, indices_j))
    K = T.sparse_variable(J, (o, nnz_k), (indptr_k, indices_k))
    I_dense = T.dense_fixed(m)
    J_dense = T.dense_fixed(n)
    K_dense = T.dense_fixed(o)
    R = T.dense_fixed(rank)
    A = T.match_sparse_buffer(a, (I, J, K), "float32")
    B = T.match_sparse_buffer(b, (J_dense, R), "float32")
    C = T.match_sparse_buffer(c, (K_dense, R), "float32")
    D = T.match_sparse_buffer(d, (I_dense, R), "float32")
    with T.sp_iter([I, J, K, R], "SRRS", "mttkrp") as [i, j, k, r]:
        with T.init():
            D[i, r] = T.float32(0)
        D[i, r] = D[i, r] + A[i, j, k] * B[j, r] * C[k, r]


def test_three_dimensional_csf():
    tree = {"keys_ptr": [0, 2], "keys": [0, 2], "indptr_j": [0, 2, 3], "indices_j": [0, 1, 1]}
    leaves = {"indptr_k": [0, 1, 3, 4], "indices_k": [1, 0, 1, 0], "a": [1, 2, 3, 4]}
    args = {**tree, **leaves, "b": [[1, 2], [3, 4]], "c": [[1, 10], [100, 1000]], "d": np.full((3, 2), JUNK)}
    check(mttkrp, args, "d", [[1 * 100 + 2 * 3 + 3 * 300, 2000 + 2 * 40 + 3 * 4000], [0, 0], [4 * 3, 4 * 40]])


@T.prim_func
def mixed(x: T.Buffer((4,), "int32"), y: T.Buffer((4,), "int32"), z: T.Buffer((2,), "int32")):
    for r in range(2):
        scratch = T.alloc_buffer((1,), "int32")
        scratch[0] = scratch[0] + 1
        for i in T.serial(2):
            with T.sblock("total"):
                vr, vi = T.axis.remap("SR", [r, i])
                with T.init():
                    z[vr] = 10
                z[vr] = z[vr] + x[2 * vr + vi] * scratch[0]
    for i in range(4):
        if x[i] < 0:
            y[i] = T.truncdiv(x[i], 2) * 100 + T.truncmod(x[i], 2)
        else:
            y[i] = T.if_then_else(i < 3, x[T.min(i + 1, 3)] // 2, (x[i] << 2) ^ 1)


def test_ordinary_loops_blocks_and_integer_arithmetic():
    args = {"x": [3, -7, -4, 5], "y": [0] * 4, "z": [0, 0]}
    check(mixed, args, "z", [10 + 3 - 7, 10 - 4 + 5])
    check(mixed, args, "y", [-4, -301, -200, 21])


@T.prim_func
def scaled_gather(x: T.handle, e: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, w: T.handle,
                  m: T.int64, n: T.int64, nnz: T.int64, alpha: T.float16):  # fmt: skip
    I = T.dense_fixed(m, "int64")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int64")
    E = T.match_sparse_buffer(e, (I, J), "int32", default_value=1)
    X = T.match_sparse_buffer(x, (I, J), "bool")
    Y = T.match_sparse_buffer(y, (I, J), "float16")
    W = T.match_buffer(w, (2,), "bfloat16")
    with T.sp_iter([I, J], "SS", "gather") as [i, j]:
        Y[i, j] = T.Select(X[i, j], alpha, T.float16(1)) * T.Cast("float16", W[E[i, j]])


def test_other_dtypes_and_indirect_subscripts():
    w = np.array([0.5, 3.0], ml_dtypes.bfloat16)
    args = {**CSR, "e": [0, 1, 1], "x": [True, False, True], "W": w, "alpha": 0.1, "n": 3}
    del args["a"]
    found = interpret(scaled_gather, args)["y"]
    assert found.dtype == np.float16
    assert found.tolist() == [float(np.float16(0.04998779296875)), 3.0, 0.2998046875]


@T.prim_func
def functions(x: T.Buffer((6,), "float32"), y: T.Buffer((6,), "float32")):
    y[0] = T.sigmoid(x[0]) + T.tanh(x[0]) + T.erf(x[0])
    y[1] = T.sqrt(x[1]) + T.rsqrt(x[1]) + T.log(T.exp(x[1]))
    y[2] = T.floor(x[2]) * T.float32(100) + T.ceil(x[2]) * T.float32(10) + T.round(x[2])
    y[3] = T.pow(x[1], T.float32(3)) + T.abs(x[2])
    y[4] = T.if_then_else(x[4] > T.float32(2) and not (x[0] != x[3] or x[1] < x[2]), x[4] * x[4], T.float32(0))
    y[5] = T.max(T.min(x[5], T.float32(2)), T.float32(-2))


def test_functions():
    check(functions, {"x": [0, 4, -2.5, 0, 3, 7]}, "y", [0.5, 6.5, -322, 66.5, 9, 2])


@T.prim_func
def foreign(y: T.Buffer((1,), "float32")):
    y[0] = T.call_extern("float32", "rand")


@T.prim_func
def overrun(x: T.Buffer((2,), "float32"), y: T.Buffer((2,), "float32")):
    for i in range(2):
        y[i] = x[i - 1]


def test_errors_name_the_cause():
    with pytest.raises(LoweringError, match="Call call_extern"):
        interpret(foreign, {})
    with pytest.raises(ArgumentError, match=r"buffer x has shape \(2,\), the program subscripts it at \(-1,\)"):
        interpret(overrun, {})
    with pytest.raises(ArgumentTypeError, match="no parameter is called 'A'; there are: a, b, c, feat"):
        interpret(spmm, {"A": [1]})
    with pytest.raises(ArgumentError, match=r"c must have shape \(3, 2\), got \(5,\)"):
        interpret(spmm, {**CSR, "b": np.ones((3, 2)), "c": np.zeros(5)})
    with pytest.raises(ArgumentError, match="nothing gives a value to n"):
        interpret(spmm, CSR)
