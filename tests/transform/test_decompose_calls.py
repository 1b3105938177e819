# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels over other formats: what they take, give back, keep and refuse."""

from __future__ import annotations

import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparsetir
from decomposing import (
    CUBES,
    DRAWN,
    FORMATS,
    MATRICES,
    OPERANDS,
    READY,
    SCALE,
    SPECIAL,
    TYPES,
    by_entries,
    check_call,
    close,
    compiled,
    made,
    matrices,
    nested,
    operands,
    own,
    random_matrix,
    ready,
    small,
    typed,
    types_of,
    with_unsorted_rows,
)
from sparsetir import CooTensor, SparseTensor, formats
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.utils import memory

# ---------------------------------------------------------------- calls

SPARSE_CLASSES = ("csr", "csc", "coo", "bsr", "lil", "dok", "dia")


@cache
def blocked(op: str) -> Any:
    return ready(op, "bsr", "float32", "int32")[1]


@pytest.fixture
def given_csr() -> tuple[Any, np.ndarray, np.ndarray]:
    return operands(MATRICES["random"], "float32", 7)


@pytest.mark.parametrize("kind", SPARSE_CLASSES)
@pytest.mark.parametrize("family", ["array", "matrix"])
def test_sparse_classes(kind: str, family: str, given_csr: Any) -> None:
    csr, X, Y = given_csr
    A = getattr(sp, f"{kind}_{family}")(csr)
    close(blocked("spmm")(A=A, B=Y), csr @ Y)
    O = blocked("sddmm")(S=A, X=X, Y=Y)
    assert type(O) is type(A)
    close(O.toarray(), csr.toarray() * (X @ Y.T))


def test_tensors_of_coordinates(given_csr: Any) -> None:
    csr, X, Y = given_csr
    coo = csr.tocoo()
    order = np.random.default_rng(0).permutation(csr.nnz)
    tensor = CooTensor(np.stack(coo.coords)[:, order], coo.data[order], coo.shape)
    close(blocked("spmm")(A=tensor, B=Y), csr @ Y)
    O = blocked("sddmm")(S=tensor, X=X, Y=Y)
    assert isinstance(O, CooTensor)
    assert np.array_equal(O.coords, tensor.coords)
    i, j = tensor.coords
    close(O.values, tensor.values * np.einsum("pk,pk->p", X[i], Y[j]))


@pytest.mark.parametrize("origin", ["csr", "csc", "unsorted", "shuffled coo", "twice"])
@pytest.mark.parametrize("name", ["csr", "csc", "bsr", "hyb", "coo"])
def test_sparse_tensors(name: str, origin: str, given_csr: Any) -> None:
    """In whatever order the object listed its entries that a tensor was made of."""
    csr, X, Y = given_csr
    unsorted = _reversed_rows(csr)
    twice = sp.coo_array((np.tile(csr.data / 2, 2), [np.tile(c, 2) for c in csr.tocoo().coords]), csr.shape)
    origins = {"csr": csr, "csc": csr.tocsc(), "unsorted": unsorted, "shuffled coo": unsorted.tocoo(), "twice": twice}
    tensor = SparseTensor.from_scipy(origins[origin], made(name))
    for _ in range(2):
        close(blocked("spmm")(A=tensor, B=Y), csr @ Y)
        close(blocked("spmm").bind(A=tensor)(B=Y), csr @ Y)
    for O in (blocked("sddmm")(S=tensor, X=X, Y=Y), blocked("sddmm").bind(S=tensor)(X=X, Y=Y)):
        assert isinstance(O, SparseTensor)
        close(O.to_dense(), csr.toarray() * (X @ Y.T))


def test_torch_tensors(given_csr: Any) -> None:
    torch = pytest.importorskip("torch")
    csr, X, Y = given_csr
    A = torch.sparse_csr_tensor(*(torch.from_numpy(a.copy()) for a in (csr.indptr, csr.indices, csr.data)), csr.shape)
    C = blocked("spmm")(A=A, B=torch.from_numpy(Y))
    assert isinstance(C, torch.Tensor)
    close(C.numpy(), csr @ Y)
    O = blocked("sddmm")(S=A, X=torch.from_numpy(X), Y=torch.from_numpy(Y))
    assert O.layout == torch.sparse_csr


def test_values_are_read_at_each_call(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel, C = blocked("spmm"), A @ B
    close(kernel(A=A, B=B), C)
    A.data *= 2
    close(kernel(A=A, B=B), 2 * C)
    A.data = A.data / 4
    close(kernel(A=A, B=B), C / 2)


def test_another_matrix_with_the_same_index_arrays(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel = blocked("spmm")
    other = sp.csr_array((np.ones(A.nnz, "float32"), A.indices, A.indptr), A.shape)
    close(kernel(A=A, B=B), A @ B)
    count = len(kernel.converter.kept)
    close(kernel(A=other, B=B), other @ B)
    assert len(kernel.converter.kept) == count


def test_the_same_index_arrays_with_another_shape(given_csr: Any) -> None:
    A, _, B = given_csr
    wider = sp.csr_array((A.data, A.indices, A.indptr), (17, 24))
    kernel = blocked("spmm")
    close(kernel(A=A, B=B), A @ B)
    with pytest.raises(ArgumentError, match=r"n is 24 from A.shape\[1\] but 23 from B.shape\[0\]"):
        kernel(A=wider, B=B)


def test_more_matrices_than_are_remembered(given_csr: Any) -> None:
    _, _, B = given_csr
    kernel = blocked("spmm")
    many = [random_matrix(seed, 17, 23).astype("float32") for seed in range(12)]
    for _ in range(2):
        for A in many:
            close(kernel(A=A, B=B), A @ B)


def test_entries_sorted_between_calls(given_csr: Any) -> None:
    """`sort_indices` and many scipy operations move entries within their arrays."""
    _, _, B = given_csr
    A = typed(with_unsorted_rows(10, 23), "float32")
    kernel, C = blocked("spmm"), A.toarray() @ B
    close(kernel(A=A, B=B), C)
    A.sort_indices()
    close(kernel(A=A, B=B), C)


def test_columns_changed_between_calls(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel = blocked("spmm")
    kernel(A=A, B=B)
    A.indices[:] = 22 - A.indices
    close(kernel(A=A, B=B), A.toarray() @ B)


def test_a_structure_outlives_the_matrix_it_was_seen_in(given_csr: Any) -> None:
    """The csr format shares the arrays of the first matrix; what happens to them is nothing to the second."""
    A, _, B = given_csr
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.csr()}))
    first, expected = A.copy(), A.toarray() @ B
    close(kernel(A=first, B=B), expected)
    first.indices[:] = 22 - first.indices[::-1]
    close(kernel(A=A, B=B), expected)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "uint64", "swapped", "dia", "bsr", "lil"])
@pytest.mark.parametrize("format", ["csr", "csc", "bsr"])
def test_results_have_the_structure_of_the_argument_of_the_call(format: str, kind: str, given_csr: Any) -> None:
    """Even where another matrix of this structure was seen first, and has changed since."""
    csr, X, Y = given_csr
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.sddmm(), {"S": made(format)}))
    first, second = (_as_kind(csr, kind) for _ in "12")
    expected = csr.toarray() * (X @ Y.T)
    close(_to_dense(kernel(S=first, X=X, Y=Y)), expected)
    if kind == "lil":
        first[0, 0], first[16, 22] = 9, 7
    for part in ("indices", "row", "col", "offsets"):
        if hasattr(first, part):
            array = getattr(first, part)
            array[...] = array[::-1].copy()
    close(_to_dense(kernel(S=second, X=X, Y=Y)), expected)


def _to_dense(matrix: Any) -> np.ndarray:
    """As an array, also if scipy has no code for the type of its indices."""
    if matrix.format != "csr":
        return matrix.toarray()
    return sp.csr_array(
        (matrix.data, *(a.astype("int64") for a in (matrix.indices, matrix.indptr))), matrix.shape
    ).toarray()


def _as_kind(csr: Any, kind: str) -> Any:
    """A copy in a format of scipy, or with row pointers and columns of another type."""
    if kind not in ("uint64", "swapped"):
        return csr.asformat(kind, copy=True)
    made, dtype = csr.copy(), {"uint64": np.uint64, "swapped": np.dtype(np.int32).newbyteorder()}[kind]
    made.indptr, made.indices = made.indptr.astype(dtype), made.indices.astype(dtype)
    return made


@pytest.mark.parametrize("kind", ["lil", "dok"])
def test_elements_set_between_calls(kind: str, given_csr: Any) -> None:
    csr, _, B = given_csr
    A = csr.asformat(kind)
    kernel = blocked("spmm")
    close(kernel(A=A, B=B), csr @ B)
    A[0, 0], A[1, 1], A[16, 22] = 9, 3, 7
    close(kernel(A=A, B=B), A.toarray() @ B)


def test_results_in_place(given_csr: Any) -> None:
    A, X, B = given_csr
    C = np.full((17, 7), np.nan, "float32")
    assert blocked("spmm")(A=A, B=B, C=C) is C
    close(C, A @ B)
    O = A.copy()
    assert blocked("sddmm")(S=A, X=X, Y=B, O=O) is O
    close(O.toarray(), A.toarray() * (X @ B.T))


@pytest.mark.parametrize("kind", ["csc", "shuffled coo", "unsorted"])
def test_results_in_place_in_another_order(kind: str, given_csr: Any) -> None:
    A, X, B = given_csr
    O = {"csc": A.tocsc(), "shuffled coo": _reversed_rows(A).tocoo(), "unsorted": _reversed_rows(A)}[kind]
    assert blocked("sddmm")(S=A, X=X, Y=B, O=O) is O
    close(O.toarray(), A.toarray() * (X @ B.T))


def _reversed_rows(A: Any) -> Any:
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    order = np.lexsort((-A.indices, rows))
    return sp.csr_array((A.data[order], A.indices[order], A.indptr), A.shape)


def test_a_result_that_cannot_be_written_to(given_csr: Any) -> None:
    A, X, B = given_csr
    coo = A.tocoo()
    O = CooTensor(np.stack(coo.coords), coo.data, coo.shape)
    with pytest.raises(ArgumentError, match="a CooTensor cannot be written in place: leave it out"):
        blocked("sddmm")(S=A, X=X, Y=B, O=O)


def test_bound_arguments(given_csr: Any) -> None:
    A, X, B = given_csr
    kernel = blocked("spmm")
    bound = kernel.bind(A=A)
    for _ in range(2):
        close(bound(B=B), A @ B)
    close(bound(B=2 * B), 2 * (A @ B))
    C = np.zeros((17, 7), "float32")
    assert bound(B=B, C=C) is C
    open_matrix = kernel.bind(B=B)
    for other in (A, random_matrix(12, 18, 23).astype("float32"), random_matrix(13, 3, 23).astype("float32")):
        close(open_matrix(A=other), other @ B)
    O = blocked("sddmm").bind(S=A)(X=X, Y=B)
    assert type(O) is type(A)
    close(O.toarray(), A.toarray() * (X @ B.T))


def test_bound_arguments_updated_in_place(given_csr: Any) -> None:
    A, _, _ = given_csr
    expected = np.exp(A.data)
    own("bsr", SCALE, "A:I,J").bind(A=A)()
    close(A.data, expected)


@pytest.mark.parametrize("kind", ["random", "divisible"])
def test_what_is_wrong_with_a_call(kind: str) -> None:
    A, _, B = operands(MATRICES[kind], "float32", 7)
    kernel, (m, n) = blocked("spmm"), A.shape
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"A": A, "B": B[:-1]}, ArgumentError, rf"n is {n} from A.shape\[1\] but {n - 1} from B.shape\[0\]"),
        ({"A": A, "B": B, "C": np.zeros((m + 1, 7), "float32")}, ArgumentError, rf"m is {m} .*but {m + 1} from C\."),
        ({"A": A.astype("float64"), "B": B}, ArgumentTypeError, "A holds float64 but the kernel computes in float32"),
        ({"A": A, "B": B.astype("float64")}, ArgumentTypeError, "B holds float64 but the kernel computes in float32"),
        ({"A": A}, ArgumentTypeError, "missing argument B"),
        ({"A": A.toarray(), "B": B}, ArgumentTypeError, "A is stored as bsr.*pass a sparse object, got ndarray"),
        ({"a": A.data, "B": B}, ArgumentTypeError, "a is stored as bsr.*pass a sparse object, got ndarray"),
        ({"A": A, "B": B, "Z": 1}, ArgumentTypeError, "this kernel has no argument 'Z'"),
        ({"A": sp.coo_array(np.ones(5, "float32")), "B": B}, ArgumentError, r"A has shape \(5,\) but .*axes I, J"),
    ]
    for given_arguments, error, message in cases:
        with pytest.raises(error, match=message):
            kernel(**given_arguments)
    with pytest.raises(ArgumentTypeError, match="A is fixed by bind; do not pass it again"):
        kernel.bind(A=A)(A=A, B=B)
    with pytest.raises(ArgumentError, match=rf"n is {n} from A.shape\[1\] but 2 from B.shape\[0\]"):
        kernel.bind(A=A)(B=B[:2])


@pytest.mark.parametrize("kind", ["random", "divisible"])
def test_sizes_that_contradict_a_matrix(kind: str) -> None:
    A, _, B = operands(MATRICES[kind], "float32", 7)
    with pytest.raises(ArgumentError, match=f"m is {A.shape[0]} from A.shape.*but {A.shape[0] - 1}"):
        blocked("spmm")(A=A, B=B, m=A.shape[0] - 1)


@pytest.mark.parametrize("kind", ["random", "divisible"])
def test_sizes_given_by_name(kind: str) -> None:
    """As for every kernel: a size that is said twice is fine when both agree."""
    A, _, B = operands(MATRICES[kind], "float32", 7)
    close(blocked("spmm")(A=A, B=B, m=A.shape[0], nnz=A.nnz), A @ B)


def test_messages_use_the_names_of_the_program(given_csr: Any) -> None:
    A, _, B = given_csr
    with pytest.raises(ArgumentTypeError, match=r"missing argument A$"):
        blocked("spmm")(B=B)
    with pytest.raises(ArgumentTypeError, match="it takes the buffers A, B, C"):
        blocked("spmm")(A=A, B=B, Z=1)


def test_broken_index_arrays_are_refused(given_csr: Any) -> None:
    A, _, B = given_csr
    A.indices[3] = 99
    with pytest.raises(StructureError, match=r"hold 99 at position 3, expected one of \[0, 23\)"):
        blocked("spmm")(A=A, B=B)


def test_a_matrix_that_a_format_cannot_hold() -> None:
    A, _, B = operands(MATRICES["full"], "float32", 3)
    for format, message in ((formats.make("nm", n=2, m=4), r"expected at most 2"), (formats.make("band"), "band")):
        kernel = compiled(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": format}))
        with pytest.raises(StructureError, match=message):
            kernel(A=A, B=B)


def test_what_a_kernel_shows(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel = blocked("spmm")
    shown = "Kernel spmm(A: float32[m, n], B: float32[n, feat]) -> C: float32[m, feat] with A as bsr(r=2, c=3)"
    assert repr(kernel) == shown
    assert kernel.formats["A"].name == "bsr"
    assert "spmm_bsr" in kernel.script()
    assert kernel.convert("A", A).padding > 0
    assert kernel.time(A=A, B=B, seconds=0.01).median > 0


# ---------------------------------------------------------------- shapes, indices and results of every kind

THIN = [(1, 1), (1, 9), (9, 1), (1, 60), (40, 1), (2, 33), (33, 2), (0, 5), (5, 0), (0, 0), (1, 0), (0, 1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "op"), READY)
def test_thin_matrices(name: str, op: str) -> None:
    """One row, one column, none; full and half full; without features too."""
    dtype, idtype = types_of(op, name)
    kernel = ready(op, name, dtype, idtype)[1]
    for shape, density in product(THIN, (1.1, 0.4)):
        for feat in (7,) if op == "spmv" else (0, 7):
            check_call(kernel, op, random_matrix(11, *shape, density), dtype, feat)


@pytest.mark.shared(5)
@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("name", FORMATS)
def test_lists_of_entries_in_any_order(name: str, op: str) -> None:
    """Coordinates of any integer type, many of them twice; kernels count in the type of their own."""
    dtype, idtype = types_of(op, name)
    kernel, rng = ready(op, name, dtype, idtype)[1], np.random.default_rng(12)
    for (m, n), given_as in product(((9, 7), (1, 6), (6, 1)), ("int32", "int64", "int16", "uint32", "uint8")):
        coords = np.stack([rng.integers(0, extent, 60) for extent in (m, n)]).astype(given_as)
        tensor = CooTensor(coords, rng.integers(-3, 4, 60).astype(dtype), (m, n))
        X, Y = (rng.integers(-3, 4, (extent, 5)).astype(dtype) for extent in (m, n))
        dense = np.zeros((m, n))
        np.add.at(dense, tuple(coords), tensor.values)
        if op == "sddmm":
            O, found = kernel(S=tensor, X=X, Y=Y), np.zeros((m, n))
            assert np.array_equal(O.coords, coords)
            np.add.at(found, tuple(coords), O.values)
            np.testing.assert_array_equal(found, dense * (X @ Y.T))
        elif op == "spmm":
            np.testing.assert_array_equal(kernel(A=tensor, B=Y), dense @ Y)
        else:
            np.testing.assert_array_equal(kernel(A=tensor, x=Y[:, 0].copy()), dense @ Y[:, 0])


@pytest.mark.shared(5)
@pytest.mark.parametrize("given_as", ["int32", "int64"])
@pytest.mark.parametrize("name", FORMATS)
def test_index_arrays_of_another_type(name: str, given_as: str) -> None:
    dtype, idtype = types_of("spmm", name)
    A, _, B = operands(MATRICES["random"], dtype, 5)
    C = A @ B
    A.indices, A.indptr = A.indices.astype(given_as), A.indptr.astype(given_as)
    close(ready("spmm", name, dtype, idtype)[1](A=A, B=B), C, dtype)


@pytest.mark.shared(2)
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_result_held_does_not_matter(name: str) -> None:
    """Nothing of it is left, in any layout, and nothing is written beside it."""
    dtype, idtype = types_of("spmm", name)
    kernel = ready("spmm", name, dtype, idtype)[1]
    for kind in ("random", "empty_rows", "zero_nnz"):
        A, _, B = operands(MATRICES[kind], dtype, 5)
        m, around = A.shape[0], np.full((2 * A.shape[0], 12), np.nan, dtype)
        results = (around[:m, :5].copy(), around[:m, :5].copy("F"), around[::2, 1:11:2], around[m - 1 :: -1, 6:11])
        for C in results:
            C[...] = np.nan
            assert kernel(A=A, B=B, C=C) is C
            close(C, A.astype("float64") @ B, dtype)
            C[...] = np.nan
        assert np.isnan(around).all()


def test_read_only_arguments(given_csr: Any) -> None:
    A, _, B = given_csr
    for array in (A.data, A.indices, A.indptr, B):
        array.flags.writeable = False
    close(blocked("spmm")(A=A, B=B), A @ B)
    C = np.zeros((17, 7), "float32")
    C.flags.writeable = False
    with pytest.raises(sparsetir.SparseTIRError, match=r"C.*read-only"):
        blocked("spmm")(A=A, B=B, C=C)
    assert not C.any()


@pytest.mark.shared(2)
@pytest.mark.parametrize("name", FORMATS)
def test_a_bound_matrix_meets_many_operands(name: str) -> None:
    """Of any width and layout; each result is an array of its own."""
    dtype, idtype = types_of("spmm", name)
    A = typed(MATRICES["random"], dtype)
    bound, rng, wide = ready("spmm", name, dtype, idtype)[1].bind(A=A), np.random.default_rng(1), A.astype("float64")
    layouts = (np.ascontiguousarray, np.asfortranarray, lambda B: B[::-1], lambda B: np.repeat(B, 2, 1)[:, ::2])
    results = []
    for feat, layout in product((5, 1, 0, 33, 5), layouts):
        B = layout(rng.uniform(-1, 1, (23, feat)).astype(dtype))
        results.append((bound(B=B), wide @ B))
        C = np.full((17, feat), np.nan, dtype)
        assert bound(B=B, C=C) is C
        results.append((C, wide @ B))
    with pytest.raises(ArgumentError, match=r"n is 23 from A.shape\[1\] but 22 from B.shape\[0\]"):
        bound(B=B[1:])
    for found, expected in results:
        close(found, expected, dtype)


@pytest.mark.parametrize("name", ["bsr", "ell", "hyb", "coo"])
def test_a_bound_matrix_meets_operands_at_once(name: str) -> None:
    dtype, idtype = types_of("spmm", name)
    A = typed(MATRICES["random"], dtype)
    bound, rng = ready("spmm", name, dtype, idtype)[1].bind(A=A), np.random.default_rng(1)
    many = [rng.uniform(-1, 1, (23, 9)).astype(dtype) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        for B, found in zip(many, pool.map(lambda B: bound(B=B), many), strict=True):
            close(found, A.astype("float64") @ B, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUBES)
def test_mttkrp_of_thin_tensors(name: str) -> None:
    """Entries twice and in any order, coordinates of any type, a result that held something else."""
    dtype, idtype = TYPES[list(CUBES).index(name) % len(TYPES)]
    func = sparsetir.ops.mttkrp(dtype, idtype=idtype)
    kernel, rng = compiled(sparsetir.decompose_format(func, {"T_": CUBES[name]()})), np.random.default_rng(0)
    for shape, given_as in product(
        ((1, 1, 1), (5, 1, 4), (1, 6, 1), (7, 5, 3), (0, 3, 2), (3, 0, 2), (3, 4, 0)), ("int32", "int64", "uint16")
    ):
        nnz = 40 if 0 not in shape else 0
        coords = np.stack([rng.integers(0, max(n, 1), nnz) for n in shape]).astype(given_as)
        tensor, dense = CooTensor(coords, rng.integers(-3, 4, nnz).astype(dtype), shape), np.zeros(shape)
        np.add.at(dense, tuple(coords), tensor.values)
        bound = kernel.bind(T_=tensor)
        for feat in (1, 0, 9):
            B, C = (rng.integers(-3, 4, (n, feat)).astype(dtype) for n in shape[1:])
            D, expected = np.full((shape[0], feat), np.nan, dtype), np.einsum("ijk,jr,kr->ir", dense, B, C)
            assert bound(B=B, C=C, D=D) is D
            np.testing.assert_array_equal(D, expected)
            np.testing.assert_array_equal(kernel(T_=tensor, B=B, C=C), expected)


plain = st.sampled_from(("csr", "coo", "ell", "dcsr", "csc", "sell", "padded_csr"))


DRAWN_TESTING = {name: DRAWN[name] for name in ("sell", "padded_csr", "ell_rest", "columns", "rows", "buckets", "hyb")}


drawn_testing = st.sampled_from(sorted(DRAWN_TESTING)).flatmap(
    lambda name: st.fixed_dictionaries(
        {key: plain if drawn is nested else drawn for key, drawn in DRAWN_TESTING[name].items()}
    ).map(lambda chosen: (name, chosen))
)


numbers = st.lists(st.sampled_from((-2.0, 0.0, 1.0, *SPECIAL)), min_size=1, max_size=24)


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn_testing, st.lists(st.tuples(matrices(), numbers), min_size=4, max_size=4), small)
def test_drawn_numbers_that_are_not_finite(chosen: Any, found: list[Any], feat: int) -> None:
    name, parameters = chosen
    func = sparsetir.ops.spmm("float64")
    kernel = compiled(sparsetir.decompose_format(func, {"A": formats.make(name, **parameters)}))
    for A, values in found:
        B = np.resize(np.array(values), (A.shape[1], feat))
        np.testing.assert_array_equal(kernel(A=A, B=B), by_entries(A.tocsr(), B))


# ---------------------------------------------------------------- more values than there is memory


def _scattered(n: int, nnz: int) -> sp.csr_array:
    rng = np.random.default_rng(0)
    return sp.coo_array((np.ones(nnz, "float32"), rng.integers(0, n, (2, nnz))), (n, n)).tocsr()


def _full_row(n: int) -> sp.csr_array:
    return sp.csr_array((np.ones(n, "float32"), np.arange(n), np.append(0, np.full(n, n))), (n, n))


def _far_down() -> sp.coo_array:
    return sp.coo_array((np.ones(1, "float32"), (np.array([10**14 - 1]), np.array([0]))), (10**14, 5))


SCATTERED, FULL_ROW, FAR_DOWN = _scattered(1_000_000, 50_000), _full_row(1_000_000), _far_down()


HUGE: list[tuple[str, dict[str, Any], Any]] = [
    ("dia", {}, SCATTERED),
    ("dia_rest", {"density": 1e-9}, SCATTERED),
    ("band", {"lower": 10**6, "upper": 10**6}, SCATTERED),
    ("ell", {}, FULL_ROW),
    ("ell", {"width": 10**6}, SCATTERED),
    ("ell_rest", {"width": 10**6}, SCATTERED),
    ("bsr", {"r": 1 << 12}, SCATTERED),
    ("dbsr", {"r": 1 << 12}, SCATTERED),
    ("blocks", {"r": 1 << 12, "density": 1e-9}, SCATTERED),
    ("sell", {"C": 1 << 20, "sigma": 1}, FULL_ROW),
    ("padded_csr", {"t": 1 << 20}, SCATTERED),
    ("sr_bcrs", {"t": 8, "g": 1 << 20}, SCATTERED),
    ("nm", {"n": 4, "m": 4}, SCATTERED),
    ("ragged", {}, SCATTERED),
    ("dense_rows", {"density": 1e-9}, SCATTERED),
    ("dense_columns", {"density": 1e-9}, SCATTERED),
    ("buckets", {"widths": (1 << 20,)}, SCATTERED),
    ("hyb", {"c": 2, "widths": (1 << 20,)}, SCATTERED),
    ("columns", {"c": 2, "each": "dia"}, SCATTERED),
    ("rows", {"each": "ell"}, FULL_ROW),
    ("csr", {}, FAR_DOWN),
    ("narrow_csr", {}, FAR_DOWN),
    ("csc", {}, FAR_DOWN.T),
    ("bsr", {}, FAR_DOWN),
    ("dia", {}, FAR_DOWN),
]


@pytest.mark.parametrize(("name", "parameters", "A"), HUGE, ids=[f"{name} {given}" for name, given, _ in HUGE])
def test_more_values_than_memory(name: str, parameters: Any, A: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is allocated for them."""
    monkeypatch.setattr(memory, "memory_size", lambda: 1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(MemoryError) as caught:
            SparseTensor.from_any(A, name, **parameters)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value, StructureError)
    assert peak < 1 << 28
    shape, chosen = f"{A.shape[0]} x {A.shape[1]} with {A.nnz} entries", formats.make(name, **parameters)
    found = rf"cannot store {shape} as {re.escape(repr(chosen))}: .+ would take \d+\.\d [GT]iB or more"
    assert re.match(rf"{found}, but there are 1\.0 GiB of memory; take a format that stores less", str(caught.value))


def test_a_call_with_more_values_than_memory() -> None:
    """On this machine, whatever memory it has; the kernel goes on with other matrices."""
    _, kernel = ready("spmm", "ell", *types_of("spmm", "ell"))
    dtype = types_of("spmm", "ell")[0]
    with pytest.raises(StructureError, match=r"ell\(.*1000000000000 values.*take one that stores less"):
        kernel(A=typed(FULL_ROW, dtype), B=np.zeros((1_000_000, 1), dtype))
    check_call(kernel, "spmm", MATRICES["random"], dtype, 7)


def test_values_as_wide_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits as float32 may not fit as float64."""
    A = _scattered(1000, 500)
    stored = SparseTensor.from_any(A, "dia").pieces[0].values.nbytes
    monkeypatch.setattr(memory, "memory_size", lambda: stored)
    assert SparseTensor.from_any(A, "dia").nnz == A.nnz
    with pytest.raises(memory.MemoryLimitError, match=f"{stored // 4} values would take"):
        SparseTensor.from_any(A.astype("float64"), "dia")


def test_what_a_container_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTROL_GROUPS", (limit,))
    sizes = []
    for text in ("max\n", "4096\n", None):
        limit.unlink() if text is None else limit.write_text(text, encoding="ascii")
        sizes.append(memory.memory_size.__wrapped__())
    assert sizes == [sizes[0], 4096, sizes[0]]
    assert sizes[0] > 1 << 20
