# SPDX-License-Identifier: Apache-2.0
"""Libraries whose results have patterns of their own agree with the reference, and the reference sees what is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp

from each import each
from sparsetir.errors import ArgumentError
from sparsetir.utils import memory
from sparsetir.utils.packages import MissingPackageError
from sparsetir.workloads import mkl, results
from sparsetir.workloads.reference import WrongResultError
from sparsetir.workloads.results import OPERATIONS, SQUARE_ONLY, check_result, make_result_case

OPS = tuple(OPERATIONS)


def matrix(m: int, n: int, density: float = 0.15, seed: int = 3) -> sp.csr_array:
    """Random, with empty rows and columns, and no two values alike."""
    rng = np.random.default_rng(seed)
    found = sp.random_array((m, n), density=density, format="lil", dtype="float32", rng=rng)
    found[:: max(1, m // 2), :] = 0
    return sp.csr_array(found)


MATRICES = {
    "square": matrix(31, 31),
    "wide": matrix(7, 40),
    "high": matrix(40, 7),
    "full": sp.csr_array(np.arange(1.0, 26.0, dtype="float32").reshape(5, 5)),
    "without entries": sp.csr_array((6, 6), dtype="float32"),
    "one": sp.csr_array(np.float32([[2]])),
    "no rows": sp.csr_array((0, 4), dtype="float32"),
    "nothing": sp.csr_array((0, 0), dtype="float32"),
}


def case_of(op: str, A: sp.csr_array) -> results.ResultCase:
    if op in SQUARE_ONLY and A.shape[0] != A.shape[1]:
        A = A[:, : A.shape[0]] if A.shape[0] < A.shape[1] else A[: A.shape[1]]
    return make_result_case(op, A, kept=3)


@pytest.fixture(scope="module", autouse=True)
def quiet_torch() -> None:
    warnings.filterwarnings("ignore", message=".*CSR.*beta.*")


# --- peers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "peer"), [(op, peer) for op in OPS for peer in results.SETUPS[op]])
@each("A", MATRICES)
def test_peers_compute_what_the_reference_says(op: str, peer: str, A: sp.csr_array) -> None:
    if peer in results.missing():
        pytest.skip(results.missing()[peer])
    case = case_of(op, A)
    refused = peer == "mkl" and (0 in A.shape or (op == "add" and not A.nnz))
    if refused:  # no matrix without rows, no sum without entries
        with pytest.raises((ArgumentError, mkl.MklError)):
            results.setup(peer, case)()
        return
    call = results.setup(peer, case)
    results_of = [results.to_scipy(peer, call()) for _ in range(2)]
    for found in results_of:
        check_result(peer, found, case)


def test_each_result_of_mkl_has_memory_of_its_own() -> None:
    if "mkl" in results.missing():
        pytest.skip(results.missing()["mkl"])
    case = case_of("spgemm", MATRICES["square"])
    call = results.setup("mkl", case)
    first = call()
    others = [call() for _ in range(50)]
    assert len(others) == 50
    check_result("mkl", first.to_csr(), case)
    copy = first.to_csr()
    del first, others
    check_result("mkl", copy, case)


def test_scipy_is_always_there() -> None:
    assert all(results.available(op)[0] == "scipy" for op in OPS)


def test_a_missing_peer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "python-graphblas is not installed; try: pip install x"
    monkeypatch.setattr(results, "missing", lambda: {"graphblas": reason})
    assert "graphblas" not in results.available("masked")
    with pytest.raises(MissingPackageError, match="python-graphblas is not installed; try"):
        results.setup("graphblas", case_of("masked", MATRICES["square"]))


def test_threads_are_set_in_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(results.peers, "set_threads", told.append)
    for count in (2, 1):
        results.set_threads(count)
        assert results.THREADS == [count]
        if "graphblas" not in results.missing():
            assert results.graphblas().ss.config["nthreads"] == count
    assert told == [2, 1]


# --- operands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_operands_are_sorted_and_fit(op: str) -> None:
    case = case_of(op, MATRICES["wide"])
    assert all(operand.has_sorted_indices and operand.dtype == np.float32 for operand in case.operands)
    found = results.setup("scipy", case)()
    assert op == "triangles" or found.shape == case.shape


def test_products_are_counted() -> None:
    A = sp.csr_array(np.float32([[1, 1, 0], [0, 0, 1], [1, 1, 1]]))
    assert make_result_case("spgemm", A).products == (2 + 1) + 3 + (2 + 1 + 3)
    assert make_result_case("add", A).products == 12
    R, _, P = (rap := make_result_case("rap", A)).operands
    assert rap.products == int((sp.csr_array(R != 0).astype(int) @ sp.csr_array(A != 0).astype(int)).sum()) + int(
        (sp.csr_array(R @ A != 0).astype(int) @ sp.csr_array(P != 0).astype(int)).sum()
    )


@pytest.mark.parametrize("op", SQUARE_ONLY)
def test_what_takes_a_square_matrix(op: str) -> None:
    with pytest.raises(ArgumentError, match=f"{op} takes a square matrix, got 7 x 40"):
        make_result_case(op, MATRICES["wide"])


def test_an_unknown_operation() -> None:
    with pytest.raises(ArgumentError, match=r"spgemm, add, .*, got 'gemm'"):
        make_result_case("gemm", MATRICES["wide"])


# --- the reference ----------------------------------------------------------------------------------------


def without_last(C: sp.csr_array) -> sp.csr_array:
    C.indptr[-1] -= 1
    return sp.csr_array((C.data[:-1], C.indices[:-1], C.indptr), shape=C.shape)


def scaled(C: sp.csr_array) -> sp.csr_array:
    C.data[C.nnz // 2] *= 1.001
    return C


def moved(C: sp.csr_array) -> sp.csr_array:
    """A coordinate changes in the first row that has room."""
    row = int(np.flatnonzero((np.diff(C.indptr) > 0) & (np.diff(C.indptr) < C.shape[1]))[0])
    part = slice(C.indptr[row], C.indptr[row + 1])
    free = np.setdiff1d(np.arange(C.shape[1]), C.indices[part])[0]
    C.indices[part] = np.sort(np.append(C.indices[part][1:], free))
    return C


def narrow(C: sp.csr_array) -> sp.csr_array:
    return C[:, :-1]


WRONG: dict[str, Callable[[sp.csr_array], sp.csr_array]] = {
    f.__name__: f for f in (without_last, scaled, moved, narrow)
}


@pytest.mark.parametrize("op", [op for op in OPS if op != "triangles"])
@each("spoil", WRONG)
def test_the_reference_sees_what_is_wrong(op: str, spoil: Callable[[sp.csr_array], sp.csr_array]) -> None:
    case = case_of(op, matrix(90, 90, density=0.02))
    found = results.to_scipy("scipy", results.setup("scipy", case)()).astype("float32")
    check_result("scipy", found, case)
    with pytest.raises(WrongResultError, match="ours: our result differs from the reference: expected "):
        check_result("ours", spoil(found), case)


def test_a_wrong_count_is_seen() -> None:
    case = case_of("triangles", MATRICES["full"])
    check_result("right", 10, case)
    with pytest.raises(WrongResultError, match="expected 10 triangles, got 9"):
        check_result("ours", 9, case)


def test_the_smaller_of_two_is_not_among_the_largest() -> None:
    case = make_result_case("topn", sp.csr_array(np.float32([[1, 2], [3, 4]])), kept=1)
    check_result("right", sp.csr_array(np.float32([[0, 11], [0, 25]])), case)
    with pytest.raises(WrongResultError, match="got one that is not among them"):
        check_result("ours", sp.csr_array(np.float32([[5, 0], [0, 25]])), case)


def test_any_of_equal_values_may_be_kept() -> None:
    case = make_result_case("topn", sp.csr_array(np.ones((3, 2), "float32")), kept=1)
    for column in range(3):
        found = sp.csr_array((np.full(3, 2, "float32"), np.full(3, column), np.arange(4)), shape=(3, 3))
        check_result("any", found, case)


def test_rows_are_judged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in OPS:
        case = case_of(op, MATRICES["square"])
        whole = results.to_scipy("scipy", results.setup("scipy", case)())
        monkeypatch.setattr(results, "PRODUCTS", 20)
        parts = list(results.blocks(case))
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop, len(parts) > 3) == (0, case.operands[0].shape[0], True)
        check_result("scipy", whole, case)


def test_entries_that_cancel_are_entries() -> None:
    """Whether scipy keeps them or not."""
    A = sp.csr_array(np.float32([[1, -1], [1, 1]]))
    found = sp.csr_array((np.float32([0, -2, 2, 0]), [0, 1, 0, 1], [0, 2, 4]), shape=(2, 2))
    check_result("kept", found, make_result_case("spgemm", A))


# --- memory -----------------------------------------------------------------------------------------------


def test_memory_that_a_call_adds() -> None:
    if not memory.CLEAR.exists():
        pytest.skip("the system does not tell")
    found = memory.added(lambda: np.ones(4 << 20))
    if found is None:
        pytest.skip("the peak cannot be reset")
    assert 32 << 20 <= found < 40 << 20
