# SPDX-License-Identifier: Apache-2.0
"""What the first implementation of the dialect got wrong, one test for each mistake on its list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME, Case
from corpus.case import Arguments
from corpus.running import check, draw, run
from sparsetir import formats
from sparsetir.errors import SparseTIRError


def built(name: str, dtype: str = "float32", idtype: str = "int32") -> Any:
    return sparsetir.build(BY_NAME[name].make(dtype, idtype))


def agrees(case: Case, dtype: str, args: Arguments) -> None:
    """Whether the compiled program matches its oracle."""
    func = case.make(dtype, "int32")
    check(case, func, dtype, run(case, sparsetir.build(func), args), args)


def csr(*rows: dict[int, float], n: int) -> dict[str, Any]:
    """The arrays of a matrix given row by row."""
    indptr = np.cumsum([0, *map(len, rows)]).astype("int32")
    indices = np.array([col for row in rows for col in row], "int32")
    data = np.array([value for row in rows for value in row.values()], "float32")
    return {"a": data, "indptr": indptr, "indices": indices, "m": len(rows), "n": n, "nnz": len(data)}


def test_1_attached_axes_start_from_the_coordinate_not_the_position() -> None:
    # Node 0 is in hyperedge 2 only, which is at position 0 of its row: edge 0 must not be visited.
    arrays = {"indptr": [0, 1, 2, 3], "indices": [2, 0, 2], "indptr_t": [0, 1, 1, 3], "indices_t": [1, 0, 2]}
    args = {name: np.array(value, "int32") for name, value in arrays.items()}
    x = np.array([[1], [10], [100]], "float32")
    y = built("hyper_gnn")(**args, x=x, m=3, n=3, nnz=3, feat=1)
    assert y.ravel().tolist() == [101, 10, 101]


@pytest.mark.parametrize("position", ["first", "last", "middle"])
def test_2_fused_axes_keep_their_neighbours(position: str) -> None:
    @T.prim_func
    def first(x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        K = T.dense_fixed(2)
        L = T.dense_fixed(3)
        X = T.match_sparse_buffer(x, (I, J, K, L), "float32")
        Y = T.match_sparse_buffer(y, (I, J, K), "float32")
        with T.sp_iter([T.fuse(I, J), K, L], "SSSR", "sums") as [i, j, k, q]:
            with T.init():
                Y[i, j, k] = 0
            Y[i, j, k] = Y[i, j, k] + X[i, j, k, q]

    @T.prim_func
    def last(x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        K = T.dense_fixed(2)
        L = T.dense_fixed(3)
        X = T.match_sparse_buffer(x, (I, J, K, L), "float32")
        Y = T.match_sparse_buffer(y, (I, J, K), "float32")
        with T.sp_iter([K, L, T.fuse(I, J)], "SRSS", "sums") as [k, q, i, j]:
            with T.init():
                Y[i, j, k] = 0
            Y[i, j, k] = Y[i, j, k] + X[i, j, k, q]

    @T.prim_func
    def middle(x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        K = T.dense_fixed(2)
        L = T.dense_fixed(3)
        X = T.match_sparse_buffer(x, (I, J, K, L), "float32")
        Y = T.match_sparse_buffer(y, (I, J, K), "float32")
        with T.sp_iter([K, T.fuse(I, J), L], "SSSR", "sums") as [k, i, j, q]:
            with T.init():
                Y[i, j, k] = 0
            Y[i, j, k] = Y[i, j, k] + X[i, j, k, q]

    args = csr({1: 0}, {}, {0: 0, 2: 0, 3: 0}, n=4)
    del args["a"]
    x = np.arange(24, dtype="float32").reshape(4, 2, 3)
    y = sparsetir.build({"first": first, "last": last, "middle": middle}[position])(x=x, **args)
    np.testing.assert_array_equal(y, x.sum(axis=2))


def test_2_only_a_chain_of_parents_and_children_can_be_fused() -> None:
    with pytest.raises(SparseTIRError, match="not the parent"):

        @T.prim_func
        def func(a: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
            I = T.dense_fixed(m)
            J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
            K = T.dense_fixed(2)
            A = T.match_sparse_buffer(a, (I, J, K), "float32")
            with T.sp_iter([T.fuse(I, K), J], "SSS", "scale") as [i, k, j]:
                A[i, j, k] = A[i, j, k] * 2


@pytest.mark.parametrize("search", ["inline", "hoist", "merge"])
def test_3_absent_coordinates_read_the_default_not_a_neighbour(search: str) -> None:
    @T.prim_func
    def gather(
        a: T.handle, where: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, count: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        P = T.dense_fixed(count)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        W = T.match_sparse_buffer(where, (P,), "int32")
        C = T.match_sparse_buffer(c, (I, P), "float32")
        with T.sp_iter([I, P], "SS", "gather") as [i, p]:
            T.sp_iter_attr({"search": search})
            C[i, p] = A[i, W[p]]

    # Between, before and behind the stored columns; outside the matrix; behind the last element of all.
    where = np.array([-7, -1, 0, 1, 2, 3, 4, 5, 6, 1000], "int32")
    args = csr({1: 1, 4: 2}, {}, {5: 3}, n=6)
    found = sparsetir.build(gather)(**args, where=where, count=len(where))
    assert found.tolist() == [[0, 0, 0, 1, 0, 0, 2, 0, 0, 0], [0] * 10, [0, 0, 0, 0, 0, 0, 0, 3, 0, 0]]


def test_3_an_absent_row_reads_the_default() -> None:
    @T.prim_func
    def gather(
        a: T.handle, where: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, count: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        J_dense = T.dense_fixed(n)
        P = T.dense_fixed(count)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        W = T.match_sparse_buffer(where, (P,), "int32")
        C = T.match_sparse_buffer(c, (P, J_dense), "float32")
        with T.sp_iter([P, J_dense], "SS", "gather") as [p, j]:
            C[p, j] = A[W[p], j]

    where = np.array([2, -1, 3, 0, 2**30], "int32")
    found = sparsetir.build(gather)(**csr({0: 1}, {}, {1: 2}, n=2), where=where, count=len(where))
    assert found.tolist() == [[0, 2], [0, 0], [0, 0], [1, 0], [0, 0]]


def test_3_a_store_to_an_absent_coordinate_stores_nothing() -> None:
    @T.prim_func
    def scatter(
        a: T.handle, where: T.handle, x: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, count: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        P = T.dense_fixed(count)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        W = T.match_sparse_buffer(where, (P,), "int32")
        X = T.match_sparse_buffer(x, (P,), "float32")
        with T.sp_iter([P], "S", "scatter") as [p]:
            if X[p] > 0:
                A[W[p], W[p] + 1] = A[W[p], W[p] + 1] + X[p]

    args = csr({1: 1, 4: 2}, {}, {3: 3}, n=6)
    where, x = np.array([-1, 0, 1, 2, 3, 2], "int32"), np.array([1, 10, 20, 30, 40, 50], "float32")
    sparsetir.build(scatter)(**args, where=where, x=x, count=6)
    assert args["a"].tolist() == [11, 2, 83]


def test_3_one_store_may_search_twice() -> None:
    args = csr({0: 1, 2: 2}, {}, {1: 3}, n=3)
    other = {f"{k}_b": v for k, v in csr({2: 10}, {0: 20}, {}, n=3).items() if k in ("indptr", "indices", "nnz")}
    found = built("union_add")(**args, **other, b=np.array([10, 20], "float32"))
    assert found.tolist() == [[1, 0, 12], [20, 0, 0], [0, 3, 0]]


def test_4_a_variable_axis_below_a_fixed_one_counts_every_slot() -> None:
    # Two slots a row; row 0 has one column and a padded slot (n = 3) whose fiber is not empty.
    arrays = {"slots": [1, 3, 0, 2], "indptr": [0, 2, 3, 3, 5], "indices": [0, 1, 0, 0, 1]}
    args = {name: np.array(value, "int32") for name, value in arrays.items()}
    x = np.array([[1, 2], [3, 4], [5, 6]], "float32")
    y = built("csr_below_ell")(
        **args, a=np.array([1, 10, np.nan, 100, 1000], "float32"), x=x, m=2, n=3, width=2, p=2, nnz=5
    )
    assert y.tolist() == [1 * 3 + 10 * 4, 100 * 5 + 1000 * 6]


def test_5_two_children_of_one_axis_do_not_fit_one_buffer() -> None:
    with pytest.raises(SparseTIRError, match="chain"):

        @T.prim_func
        def func(a: T.handle, indptr_j: T.handle, indptr_k: T.handle, m: T.int32, n: T.int32, p: T.int32, q: T.int32):
            I = T.dense_fixed(m)
            J = T.dense_variable(I, (n, p), indptr_j, "int32")
            K = T.dense_variable(I, (n, q), indptr_k, "int32")
            A = T.match_sparse_buffer(a, (I, J, K), "float32")
            with T.sp_iter([I, J, K], "SSS", "scale") as [i, j, k]:
                A[i, j, k] = A[i, j, k] * 2


@pytest.mark.parametrize("kind", ["random", "empty_rows", "skewed"])
def test_5_two_children_of_one_axis_fit_two_buffers(kind: str) -> None:
    case = BY_NAME["siblings"]
    args = draw(case, kind, "float64", "int32")
    agrees(case, "float64", args)


@pytest.mark.slow
def test_6_decomposition_keeps_sortedness_defaults_and_other_buffers() -> None:
    @T.prim_func
    def highest(
        a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, scale: T.Buffer((2,), "float32"),
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), sorted=False)
        A = T.match_sparse_buffer(a, (I, J), "float32", default_value=-7)
        Y = T.match_sparse_buffer(y, (I,), "float32")
        S = T.alloc_sparse_buffer((I, J), "float32", default_value=-9)
        with T.sp_iter([I, J], "SS", "scaled") as [i, j]:
            S[i, j] = A[i, j] * scale[1]
        with T.sp_iter([I, J], "SR", "highest") as [i, j]:
            with T.init():
                Y[i] = -100
            Y[i] = T.max(Y[i], S[i, j])

    A = sp.csr_array(np.array([[-3, 0, -5], [0, 0, 0], [0, -1, 0], [-2, -4, -6]], "float32"))
    scale = np.array([0, 2], "float32")
    for chosen in (formats.bsr(2, 2), formats.ell(), formats.blocks(2, 2, density=0.5)):
        parts = sparsetir.decompose_format(highest, {"A": chosen})
        views = [b for b in sparsetir.ir.decode(parts.func).buffers.values() if b.name != "Y"]
        defaults = {int(b.default.value) for b in views if not b.name.startswith("valid")}
        assert defaults == {-7, -9}
        assert sparsetir.build(parts)(A=A, scale=scale).tolist() == [-6, -100, -2, -4]


@pytest.mark.parametrize("name", ["sparse_softmax", "sparse_softmax_nested"])
def test_7_softmax_rows_add_up_to_one(name: str) -> None:
    args = csr({0: 1000, 2: 1000}, {}, {1: -1000}, {0: 0, 1: 500, 2: 501}, n=3)
    found = built(name)(**args)
    np.testing.assert_allclose(found[:3], [0.5, 0.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(found[3:], [0, 1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-6)


@pytest.mark.parametrize("name", ["rgcn_hetero", "rgcn_hetero_spatial", "rgcn_hetero_two_steps"])
def test_8_a_sum_over_relations_keeps_the_earlier_ones(name: str) -> None:
    # Node 0 receives in both relations, node 1 in none.
    arrays = {"indptr_i": [0, 1, 2], "indices_i": [0, 0], "indptr_j": [0, 1, 2], "indices_j": [0, 1]}
    args = {key: np.array(value, "int32") for key, value in arrays.items()}
    operands = {"w": np.array([[[1]], [[10]]], "float32"), "x": np.array([[3], [4]], "float32")}
    y = built(name)(**args, **operands, n=2, r=2, fi=1, fo=1, nnz_i=2, nnz_j=2)
    assert y.ravel().tolist() == [43, 0]


@pytest.mark.slow
def test_9_overlapping_formats_add_up() -> None:
    """Every row has entries in both pieces: the second must not start from zero again."""
    A = sp.csr_array(np.array([[1, 2, 0, 4], [3, 0, 0, 5], [0, 6, 7, 0]], "float32"))
    B = np.array([[1, 10], [2, 20], [3, 30], [4, 40]], "float32")
    for chosen in (formats.columns(2), formats.blocks(1, 2, density=1.0), formats.ell_rest(1)):
        kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": chosen}))
        assert len(kernel.convert("A", A).pieces) == 2
        assert kernel(A=A, B=B).tolist() == (A @ B).tolist()


@pytest.mark.parametrize("search", ["inline", "hoist", "merge"])
def test_10_a_search_follows_the_statement_that_makes_what_it_searches(search: str) -> None:
    @T.prim_func
    def func(
        a: T.handle, c: T.handle, source: T.handle, m: T.int32, n: T.int32, nnz: T.int32,
        indptr: T.Buffer((m + 1,), "int32"), indices: T.Buffer((nnz,), "int32"),
    ):  # fmt: skip
        S = T.match_buffer(source, (nnz,), "int32")
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        J_dense = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        C = T.match_sparse_buffer(c, (I, J_dense), "float32")
        for p in T.serial(nnz):
            indices[p] = S[p] + 1
        with T.sp_iter([I, J_dense], "SS", "read") as [i, j]:
            T.sp_iter_attr({"search": search})
            C[i, j] = A[i, j]

    args = csr({0: 1, 2: 2}, {1: 3}, n=4)
    args["S"], args["indices"] = args["indices"], np.zeros(3, "int32")
    found, _ = sparsetir.build(func)(**args)
    assert found.tolist() == [[0, 1, 0, 2], [0, 0, 3, 0]]


@pytest.mark.slow
def test_11_an_empty_bucket_is_no_problem() -> None:
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.buckets(widths=(1, 2, 4))}))
    for dense in (np.eye(3), np.zeros((3, 3)), np.ones((3, 3)), np.zeros((0, 3))):
        A, B = sp.csr_array(dense.astype("float32")), np.arange(6, dtype="float32").reshape(3, 2)
        assert kernel(A=A, B=B).tolist() == (A @ B).tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", ["m", "n", "nnz", "feat"])
@pytest.mark.parametrize("name", ["csrmm", "csrmm_dense_iter", "csrmm_transposed", "sddmm", "fused_sddmm"])
def test_12_any_size_may_be_zero(name: str, zero: str) -> None:
    sizes = {"m": 3, "n": 4, "nnz": 0, "feat": 2, zero: 0}
    case = BY_NAME[name]
    left, right = ("x", "y") if "sddmm" in name else ("a", "b")
    rows = {"csrmm_transposed": "m"}.get(name, "n")
    args: dict[str, Any] = {"indptr": np.zeros(sizes["m"] + 1, "int32"), "indices": np.zeros(0, "int32"), **sizes}
    args[left] = np.zeros(0 if left == "a" else (sizes["m"], sizes["feat"]), "float32")
    args[right] = np.ones((sizes[rows], sizes["feat"]), "float32")
    agrees(case, "float32", args)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "unsorted", "array"])
def test_13_values_follow_their_structure(form: str) -> None:
    rng = np.random.default_rng(13)
    matrix = sp.random(13, 9, 0.3, format="csr", dtype="float32", random_state=rng)
    b = rng.standard_normal((9, 4)).astype("float32")
    given = {
        "csr": lambda: matrix,
        "csc": matrix.tocsc,
        "coo": matrix.tocoo,
        "unsorted": lambda: shuffled_columns(matrix, rng),
        "array": lambda: sp.csr_array(matrix),
    }[form]()
    found = built("csrmm")(A=given, B=b)
    np.testing.assert_allclose(found, matrix.toarray() @ b, rtol=1e-5, atol=1e-6)


def shuffled_columns(matrix: sp.csr_matrix, rng: np.random.Generator) -> sp.csr_matrix:
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    order = np.lexsort((rng.random(matrix.nnz), rows))
    return sp.csr_matrix((matrix.data[order], matrix.indices[order], matrix.indptr), matrix.shape)


def test_14_coordinates_past_32_bits_stay_apart() -> None:
    @T.prim_func
    def dot(
        a: T.handle, b: T.handle, y: T.handle,
        indptr: T.handle, indices: T.handle, indptr_b: T.handle, indices_b: T.handle,
        n: T.int64, nnz: T.int64, nnz_b: T.int64,
    ):  # fmt: skip
        ONE = T.dense_fixed(1)
        J = T.sparse_variable(None, (n, nnz), (indptr, indices), "int64")
        J2 = T.sparse_variable(None, (n, nnz_b), (indptr_b, indices_b), "int64")
        A = T.match_sparse_buffer(a, (J,), "float32")
        B = T.match_sparse_buffer(b, (J2,), "float32")
        Y = T.match_sparse_buffer(y, (ONE,), "float32")
        with T.sp_iter([ONE, J], "SR", "dot") as [o, j]:
            with T.init():
                Y[o] = 0
            Y[o] = Y[o] + A[j] * B[j]

    # 5 and 2**33 + 5 agree in their lower 32 bits.
    left, right = np.array([2**33 + 5, 2**40 - 1]), np.array([5, 2**31, 2**40 - 1])
    args = {"indptr": np.array([0, 2]), "indices": left, "indptr_b": np.array([0, 3]), "indices_b": right}
    operands = {"a": np.array([1, 10], "float32"), "b": np.array([100, 1000, 7], "float32")}
    assert sparsetir.build(dot)(**args, **operands, n=2**40, nnz=2, nnz_b=3).tolist() == [70]


@pytest.mark.parametrize("name", ["csrmm", "csrmm_dense_iter", "fused_sddmm", "csr2bsr", "mttkrp_3d"])
def test_14_int64_index_arrays_give_what_int32_ones_give(name: str) -> None:
    case = BY_NAME[name]
    found = [
        run(case, built(name, idtype=idtype), draw(case, "random", "float32", idtype)) for idtype in ("int32", "int64")
    ]
    np.testing.assert_array_equal(found[0][0], found[1][0])
