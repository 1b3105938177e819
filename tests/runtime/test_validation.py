# SPDX-License-Identifier: Apache-2.0
"""Index arrays that change between calls: each call finds what is wrong in them, and reads only what it uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from fences import Fences
from sparsetir import interop, ops, parse
from sparsetir.errors import StructureError
from sparsetir.interop import levels, storage
from sparsetir.ir import effects
from sparsetir.ir.views import decode
from sparsetir.runtime import call_plan, validation
from sparsetir.runtime import kernel as kernels

RNG = np.random.default_rng(0)
EXTREMES = {"int32": (-(2**31), -1, 2**31 - 1), "int64": (-(2**63), -1, 2**32, 2**63 - 1)}
CHECKS = [  # sorted, unique, need_sorted
    (False, False, False),
    (True, False, True),
    (True, True, True),
]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the functions in the first call, and share the work of small arrays out."""
    monkeypatch.setattr(validation, "CALLS_UNTIL_COMPILED", 0)
    monkeypatch.setattr(validation, "MAX_SERIAL_ENTRIES", 16)


def matrix(rows: int, columns: int, density: float, idtype: str = "int32") -> sp.csr_array:
    A = sp.random_array((rows, columns), density=density, format="csr", dtype="float32", rng=RNG)
    A.sort_indices()
    A.indptr, A.indices = A.indptr.astype(idtype), A.indices.astype(idtype)
    return A


def spoiled(A: sp.csr_array) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row pointers and indices, each with one number that may be wrong."""
    extremes = (*EXTREMES[A.indices.dtype.name], *A.shape, A.nnz, A.nnz + 1, 0)
    pairs = [(A.indptr.copy(), A.indices.copy())]
    for number, name in itertools.product(extremes, ("indptr", "indices")):
        for at in {0, 1, len(getattr(A, name)) // 2, len(getattr(A, name)) - 1} if len(getattr(A, name)) else ():
            arrays = {"indptr": A.indptr.copy(), "indices": A.indices.copy()}
            if at < len(arrays[name]):
                arrays[name][at] = np.array(number).astype(A.indices.dtype)
                pairs.append((arrays["indptr"], arrays["indices"]))
    return pairs


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_one_chunk_is_judged_as_several(idtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "CALLS_UNTIL_COMPILED", 0)
    A = matrix(9, 7, 0.6, idtype)
    level = interop.Level("A", "sparse_variable", sorted=True, unique=True)
    facts: dict[str, Any] = {"parent_count": 9, "length": 7, "need_sorted": True}
    verdicts = []
    for most in (0, 1 << 18):
        monkeypatch.setattr(validation, "MAX_SERIAL_ENTRIES", most)
        verdicts.append([validation.is_sound(level, *arrays, **facts) for arrays in spoiled(A)])
    assert verdicts[0] == verdicts[1]
    assert {True, False} == set(verdicts[0])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize(("sorted", "unique", "need_sorted"), CHECKS)
def test_compiled_validation_decides_as_that_by_numpy(
    sorted: bool, unique: bool, need_sorted: bool, idtype: str
) -> None:
    """Also where arrays end at unreadable pages: whatever they hold, nothing is read outside of them."""
    level = interop.Level("J", "sparse_variable", None, idtype, sorted=sorted, unique=unique)
    fences, accepted, total = Fences(), 0, 0
    for A in (matrix(1, 1, 1.0, idtype), matrix(9, 5, 0.4, idtype), matrix(3, 90, 0.5, idtype), matrix(40, 7, 0.05)):
        for indptr, indices in spoiled(A):
            arrays = fences.fenced(indptr), fences.fenced(indices)
            sizes = {"parent_count": A.shape[0], "length": A.shape[1], "need_sorted": need_sorted}
            expected = interop.is_sound(level, indptr, indices, **sizes)
            assert validation.is_sound(level, *arrays, **sizes) == expected
            rows = np.arange(A.shape[0])
            if expected:
                assert validation._are_listed_sound(order_of(unique, need_sorted), *arrays, rows, A.shape[1])
            elif indptr[-1] == indices.size and indptr[0] == 0:
                assert not validation._are_listed_sound(order_of(unique, need_sorted), *arrays, rows, A.shape[1])
            accepted, total = accepted + expected, total + 1
        fences.release()
    assert 4 <= accepted < total


def order_of(unique: bool, need_sorted: bool) -> str:
    return "any" if not need_sorted else "distinct" if unique else "ascending"


CALLS: dict[str, tuple[Any, Callable[[sp.csr_array], dict[str, Any]]]] = {
    "spmv": (ops.spmv, lambda A: {"A": A, "x": np.ones(A.shape[1], "float32")}),
    "spmm": (ops.spmm, lambda A: {"A": A, "B": np.ones((A.shape[1], 3), "float32")}),
    "arrays": (
        ops.spmv,
        lambda A: {
            **{"a": A.data, "indptr": A.indptr, "indices": A.indices},
            **{"x": np.ones(A.shape[1], "float32"), "m": A.shape[0]},
        },
    ),
    "sddmm": (
        ops.sddmm,
        lambda A: {"S": A, "X": np.ones((A.shape[0], 4), "float32"), "Y": np.ones((A.shape[1], 4), "float32")},
    ),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("name", CALLS)
def test_an_index_that_becomes_wrong_is_found_in_the_next_call(name: str, idtype: str) -> None:
    program, arguments = CALLS[name]
    kernel = sparsetir.build(program(idtype=idtype))
    A = matrix(30, 20, 0.3, idtype)
    named = arguments(A)
    right = kernel(**named)
    for _ in range(3):
        kernel(**named)
    for at, number in itertools.product((0, A.nnz // 2, A.nnz - 1), (-1, 20, *EXTREMES[idtype])):
        before, A.indices[at] = A.indices[at], number
        with pytest.raises(StructureError, match=f"hold {number} at position {at}, expected one of|not sorted|twice"):
            kernel(**named)
        A.indices[at] = before
        again = kernel(**named)
        assert (again != right).nnz == 0 if sp.issparse(again) else np.array_equal(again, right)
    for at, number in itertools.product((0, 15, 30), (-1, A.nnz + 1, *EXTREMES[idtype])):
        before, A.indptr[at] = A.indptr[at], number
        with pytest.raises(StructureError, match="indptr of axis"):
            kernel(**named)
        A.indptr[at] = before


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_loops_validate_indices_of_many_calls(idtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is named as before, and neither a result nor the caller's own array has what was computed until then."""
    for module, name in ((kernels, "HOT_CALLS"), (kernels, "FEW_CALLS"), (call_plan, "MOST_VALIDATED")):
        monkeypatch.setattr(module, name, 0)
    kernel = sparsetir.build(ops.spmv(idtype=idtype))
    A, x = matrix(30, 20, 0.3, idtype), np.ones(20, "float32")
    for _ in range(4):
        right = kernel(A=A, x=x)
    apart = call_plan.is_sound
    monkeypatch.setattr(call_plan, "is_sound", lambda *_, **__: pytest.fail("the indices are read twice"))
    np.testing.assert_allclose(kernel(A=A, x=x), right, rtol=1e-6)
    monkeypatch.setattr(call_plan, "is_sound", apart)
    mine = np.full(30, 7, "float32")
    for array, at, number in ((A.indices, 3, -1), (A.indices, A.nnz - 1, 20), (A.indptr, 15, A.nnz + 1)):
        before, array[at] = array[at], number
        for passed in ({}, {"y": mine}):
            with pytest.raises(StructureError, match=r"hold|indptr of axis"):
                kernel(A=A, x=x, **passed)
        assert set(mine) == {7}
        array[at] = before
    B = shuffled(A) if A.indptr[1] else A
    np.testing.assert_allclose(kernel(A=B, x=x), B @ x, rtol=1e-5)
    np.testing.assert_allclose(kernel(A=A, x=x), right, rtol=1e-6)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("top", [None, 3])
def test_a_product_with_few_rows_validates_only_rows_that_it_reads(
    top: int | None, idtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsetir.sparse_output.fast_paths.MOST_STORED", 0)  # as for larger matrices
    D = matrix(200, 50, 0.2, idtype)
    q = sp.csr_array((np.ones(3, "float32"), np.array([7, 90, 199], idtype), np.array([0, 3], idtype)), (1, 200))
    right = sparsetir.matmul(q, D, top=top).toarray()
    for row in (7, 90, 199):
        at = D.indptr[row + 1] - 1
        for number in (-1, 50, *EXTREMES[idtype]):
            before, D.indices[at] = D.indices[at], number
            with pytest.raises(StructureError, match=f"hold {number} at position {at}, expected one of"):
                sparsetir.matmul(q, D, top=top)
            D.indices[at] = before
        for number in (-1, D.nnz + 1, *EXTREMES[idtype]):
            before, D.indptr[row] = D.indptr[row], number
            with pytest.raises(StructureError, match="indptr of axis"):
                sparsetir.matmul(q, D, top=top)
            D.indptr[row] = before
    unread = np.ones(D.nnz, bool)
    for row in (7, 90, 199):
        unread[D.indptr[row] : D.indptr[row + 1]] = False
    D.indices[unread] = -1
    np.testing.assert_array_equal(sparsetir.matmul(q, D, top=top).toarray(), right)
    q.indices[1] = 200
    with pytest.raises(StructureError, match="hold 200 at position 1"):
        sparsetir.matmul(q, D, top=top)


# ------------------------------------------------------------------ what a validation reads


def order_free(text: str) -> set[str]:
    program = decode(parse(PROGRAM.format(text=text)))
    return {axis.name for axis in effects.order_free_axes(program, may_repeat=True)}


PROGRAM = """
@T.prim_func
def main(a: T.handle, x: T.handle, y: T.handle, p: T.handle, q: T.handle, m: T.int32, n: T.int32,
         nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q), "int32")
    K = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (K,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "main") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        {text}
"""
ORDERS = {
    "Y[i] = Y[i] + A[i, j] * X[j]": {"J"},
    "Y[i] = Y[i] + X[j] * A[i, j] * X[j]": {"J"},
    "Y[i] = Y[i] + A[i, j]": {"J"},
    "Y[i] = Y[i] + X[j]": set(),
    "Y[i] = Y[i] + A[i, j] * A[i, j]": set(),
    "Y[i] = Y[i] + (A[i, j] + X[j])": set(),
    "Y[i] = T.max(Y[i], A[i, j] * X[j])": set(),
    "Y[i] = Y[i] + T.exp(A[i, j])": set(),
    "Y[i] = Y[i] * X[j] + A[i, j]": set(),
    "Y[i] = Y[i] + X[j] / A[i, j]": set(),
}


@pytest.mark.parametrize("text", ORDERS)
def test_entries_come_in_any_order_only_as_factors_of_the_terms_of_a_sum(text: str) -> None:
    assert order_free(text) == ORDERS[text]


def test_axes_of_two_buffers_and_of_written_ones_are_in_order() -> None:
    for program in (ops.sddmm(), ops.add(), ops.spgemm(), ops.triangles(), ops.masked_spgemm()):
        assert not effects.order_free_axes(decode(program), may_repeat=False)


def shuffled(A: sp.csr_array) -> sp.csr_array:
    """The matrix with each row backwards, and its first entry in two parts."""
    rows = [np.arange(stop - 1, start - 1, -1) for start, stop in itertools.pairwise(A.indptr)]
    order = np.concatenate([[A.indptr[1] - 1], *rows])
    data = A.data[order]
    data[:2] /= 2
    indptr = A.indptr + (np.arange(len(A.indptr)) > 0).astype(A.indptr.dtype)
    return sp.csr_array((data, A.indices[order], indptr), shape=A.shape)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", ["spmv", "spmm"])
def test_a_sum_takes_unsorted_and_repeated_entries_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first call as in later ones, which give the same bits, where no sum of entries overflows."""
    orders: list[str] = []
    compiled = validation._compiled
    monkeypatch.setattr(validation, "_functions", {})
    monkeypatch.setattr(validation, "_compiled", lambda *key: orders.append(key[2]) or compiled(*key))
    monkeypatch.setattr(storage, "_convert", lambda *_: pytest.fail("the matrix was laid out again"))
    program, arguments = CALLS[name]
    A = matrix(30, 20, 0.3)
    while not A.indptr[1]:
        A = matrix(30, 20, 0.3)
    kernel, named = sparsetir.build(program(), assume_finite=True), arguments(shuffled(A))
    results = [kernel(**named) for _ in range(4)]
    assert set(orders) == {"any"}
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_allclose(results[0], A @ (named["x"] if name == "spmv" else named["B"]), rtol=1e-5)
    named["A"].indices[3] = 20
    with pytest.raises(StructureError, match="hold 20 at position 3, expected one of"):
        kernel(**named)


def out_of_order(A: sp.csr_array, rng: np.random.Generator) -> sp.csr_array:
    """Return the matrix with the entries of each row in a drawn order."""
    order = np.concatenate(
        [np.empty(0, int), *(rng.permutation(np.arange(*pair)) for pair in itertools.pairwise(A.indptr))]
    )
    return sp.csr_array((A.data[order], A.indices[order], A.indptr.copy()), shape=A.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64"])
@pytest.mark.parametrize("columns", [None, 1, 5, 16])
def test_distinct_entries_out_of_order_are_taken_as_they_are(
    columns: int | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls with equal index arrays give the same bits; changed ones are validated again."""
    conversions: list[int] = []
    convert = storage._convert
    monkeypatch.setattr(storage, "_convert", lambda *args: conversions.append(1) or convert(*args))
    rng = np.random.default_rng(columns)
    for rows, width, density in ((40, 30, 0.3), (300, 900, 0.02), (1, 20, 1.0), (7, 1, 0.5), (5, 5, 0.0)):
        A = sp.random_array((rows, width), density=density, rng=rng).tocsr()
        A.data = rng.integers(1, 4, A.nnz).astype(dtype)
        A = out_of_order(A, rng)
        x = rng.integers(0, 4, width if columns is None else (width, columns)).astype(dtype)
        conversions.clear()
        for _ in range(4):
            np.testing.assert_array_equal(sparsetir.matmul(A, x), A @ x)
            A.data[:1] = 3
        assert not conversions
        if dtype == "float32":
            A.data, x = rng.random(A.nnz).astype(dtype), rng.random(x.shape).astype(dtype)
            results = [sparsetir.matmul(A, x) for _ in range(3)]
            assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    A = out_of_order(sp.random_array((40, 30), density=0.3, rng=rng).tocsr().astype(dtype), rng)
    A.data[...], x = 1, np.ones(30, dtype)
    for _ in range(3):
        sparsetir.matmul(A, x)
    row = int(np.argmax(np.diff(A.indptr)))
    at = int(A.indptr[row])
    A.indices[at] = A.indices[at + 1]
    np.testing.assert_array_equal(sparsetir.matmul(A, x), A @ x)
    A.indices[at] = 30
    with pytest.raises(StructureError, match=f"hold 30 at position {at}, expected one of"):
        sparsetir.matmul(A, x)


def test_duplicates_that_come_later_are_added_before_they_are_multiplied() -> None:
    """The matrix of the earlier calls, out of order, had none."""
    A = sp.csr_array((np.array([1e308, 1e308]), np.array([1, 0]), np.array([0, 2])), shape=(1, 2))
    x = np.array([0.5, 0.5])
    for _ in range(3):
        assert sparsetir.matmul(A, x).tolist() == [1e308]
    A.indices[1] = 1
    listed = sparsetir.build(ops.spmm("float64", format="coo"))  # which keeps entries apart that repeat
    listed(A=A, B=x[:, None])
    for _ in range(3):
        assert sparsetir.matmul(A, x).tolist() == [np.inf]


def test_bind_puts_rows_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []
    convert = storage._convert
    monkeypatch.setattr(storage, "_convert", lambda *args: conversions.append(1) or convert(*args))
    A, x = shuffled(matrix(30, 20, 0.9)), np.ones(20, "float32")
    bound = sparsetir.build(ops.spmv()).bind(A=A)
    results = [bound(x=x) for _ in range(3)]
    assert conversions == [1]
    np.testing.assert_allclose(results[-1], A @ x, rtol=1e-5)


LAYOUTS = ["csr", "csc", "bsr"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_torch_matrix_is_validated_once_by_compiled_code(
    narrow: bool, idtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its indices are narrowed in each call."""
    torch = pytest.importorskip("torch")
    calls: list[int] = []
    compiled = validation._compiled
    monkeypatch.setattr(validation, "_functions", {})

    def counting(*key: str) -> Callable[..., None]:
        function = compiled(*key)
        return lambda *args: calls.append(args[1]) or function(*args)

    monkeypatch.setattr(validation, "_compiled", counting)
    A = matrix(30, 20, 0.3, idtype)
    kernel = sparsetir.build(ops.spmv(idtype="int32" if narrow else idtype), assume_finite=True)
    parts = [torch.from_numpy(part) for part in (A.indptr, A.indices, A.data)]
    T, x = torch.sparse_csr_tensor(*parts, size=A.shape, check_invariants=False), torch.ones(20)
    kernel(A=T, x=x)
    for name in ("first_disorder", "first_outside", "check_level"):
        monkeypatch.setattr(levels, name, lambda *_, **__: pytest.fail("numpy validates the matrix"))
    for _ in range(3):
        calls.clear()
        result = kernel(A=T, x=x)
        assert calls == [A.nnz]
        assert isinstance(result, torch.Tensor)
        np.testing.assert_allclose(result.numpy(), A @ np.ones(20, "float32"), rtol=1e-5)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_faults_of_torch_matrices_are_reported_in_every_call(layout: str) -> None:
    torch = pytest.importorskip("torch")
    S = sp.random_array((12, 16), density=0.4, format="csr", dtype="float32", rng=RNG)
    S = S.tobsr((2, 2)) if layout == "bsr" else S.asformat(layout)
    S.sort_indices()
    parts = [torch.from_numpy(part.astype("int64")) for part in (S.indptr, S.indices)]
    make = getattr(torch, f"sparse_{layout}_tensor")
    T = make(*parts, torch.from_numpy(S.data), size=S.shape, check_invariants=False)
    B = torch.ones(16, 3)
    call = lambda: sparsetir.matmul(T, B)  # noqa: E731
    for _ in range(3):
        np.testing.assert_allclose(call().numpy(), S @ np.ones((16, 3), "float32"), rtol=1e-5)
    for at, number in itertools.product((0, len(parts[1]) - 1), (-1, 16, *EXTREMES["int64"])):
        before = int(parts[1][at])
        parts[1][at] = number
        with pytest.raises(StructureError, match=f"hold {number} at position {at}, expected one of"):
            call()
        parts[1][at] = before
    np.testing.assert_allclose(call().numpy(), S @ np.ones((16, 3), "float32"), rtol=1e-5)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("library", ["scipy", "torch"])
def test_coordinates_are_validated_by_compiled_code(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compiled = validation._compiled
    monkeypatch.setattr(validation, "_functions", {})

    def counting(*key: str) -> Callable[..., None]:
        function = compiled(*key)
        return lambda *args: calls.append(args[1]) or function(*args)

    monkeypatch.setattr(validation, "_compiled", counting)
    A = matrix(30, 20, 0.3).tocoo()
    C, coords = A, A.coords
    if library == "torch":
        torch = pytest.importorskip("torch")
        where = torch.from_numpy(np.stack(A.coords).astype("int64"))
        C = torch.sparse_coo_tensor(where, torch.from_numpy(A.data), A.shape, check_invariants=False)
        coords = tuple(C._indices().numpy())
    kernel, x = sparsetir.build(ops.spmv()), np.ones(20, "float32")
    for _ in range(3):
        calls.clear()
        np.testing.assert_allclose(kernel(A=C, x=x), A @ x, rtol=1e-5)
        assert calls == [A.nnz, A.nnz]
    coords[1][5] = 20
    with pytest.raises(StructureError, match="entry 5 of A has coordinate 20 in dimension 1"):
        kernel(A=C, x=x)


@pytest.mark.usefixtures("at_once")
def test_a_refused_call_writes_nothing_to_an_output_that_was_passed() -> None:
    A, x, y = matrix(300, 200, 0.3), np.ones(200, "float32"), np.empty(300, "float32")
    kernel = sparsetir.build(ops.spmv())
    for _ in range(6):
        kernel(A=A, x=x, y_data=y)
        np.testing.assert_allclose(y, A @ x, rtol=1e-5)
        y[:] = 7
        before, A.indices[-1] = A.indices[-1], 200
        with pytest.raises(StructureError, match="hold 200 at position"):
            kernel(A=A, x=x, y_data=y)
        A.indices[-1] = before
        np.testing.assert_array_equal(y, 7)
