# SPDX-License-Identifier: Apache-2.0
"""Peers agree with scipy, timing takes turns, pictures are written, the library's own matrix is what it says."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir import bench
from sparsetir.bench import _optional, peers, plot, timing
from sparsetir.errors import ArgumentError, ArgumentTypeError, FileFormatError

DTYPES = ("float32", "float64")
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


def matrix(dtype: str, *, m: int = 31, n: int = 47, density: float = 0.1) -> sp.csr_array:
    """A random matrix whose first and last rows are empty."""
    found = sp.random_array((m, n), density=density, format="lil", dtype=dtype, rng=np.random.default_rng(5))
    found[[0, m - 1], :] = 0
    return sp.csr_array(found)


def dense(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


@pytest.fixture(params=peers.PEERS)
def peer(request: pytest.FixtureRequest) -> str:
    if request.param in bench.missing():
        pytest.skip(bench.missing()[request.param])
    return str(request.param)


# --- peers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 32, 33])
def test_spmm_agrees_with_scipy(peer: str, dtype: str, width: int) -> None:
    A, B = matrix(dtype), dense(dtype, 47, width)
    call = bench.spmm(peer, A, B)
    for _ in range(2):  # the second call writes over the first one's result
        np.testing.assert_allclose(call(), A @ B, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spmv_agrees_with_scipy(peer: str, dtype: str) -> None:
    A, x = matrix(dtype), dense(dtype, 47)
    call = bench.spmv(peer, A, x)
    for _ in range(2):
        np.testing.assert_allclose(call(), A @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sddmm_agrees_with_a_dense_product(peer: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if peer not in bench.available("sddmm"):
        pytest.skip(f"{peer} has no SDDMM")
    monkeypatch.setattr(peers, "GATHERED_FLOATS", 100)
    S, X, Y = matrix(dtype), dense(dtype, 31, 9), dense(dtype, 47, 9)
    expected = S.multiply(X @ Y.T).tocsr()
    call = bench.sddmm(peer, S, X, Y)
    for _ in range(2):
        np.testing.assert_allclose(call(), expected.data, rtol=1e-4, atol=1e-5)


def test_operands_may_be_strided_and_int64(peer: str) -> None:
    A, B = matrix("float32"), dense("float32", 8, 47).T
    A.indptr, A.indices = A.indptr.astype(np.int64), A.indices.astype(np.int64)
    np.testing.assert_allclose(bench.spmm(peer, A, B)(), A @ B, rtol=1e-5, atol=1e-5)


def test_a_call_keeps_its_operands_alive(peer: str) -> None:
    A, B = matrix("float32"), dense("float32", 47, 16)
    expected = A @ B
    call = bench.spmm(peer, A.copy(), B.copy())
    trash = [np.full((47, 16), np.nan, np.float32) for _ in range(50)]
    np.testing.assert_allclose(call(), expected, rtol=1e-5, atol=1e-5)
    assert len(trash) == 50


def test_a_matrix_without_nonzeros(peer: str) -> None:
    A = sp.csr_array((5, 6), dtype=np.float32)
    assert not bench.spmm(peer, A, dense("float32", 6, 4))().any()


def test_scipy_is_always_there() -> None:
    assert bench.available()[0] == "scipy"
    assert set(bench.available()) | set(bench.missing()) == set(peers.PEERS)
    assert "mkl" not in bench.available("sddmm")


def test_threads_can_be_set() -> None:
    bench.set_threads(1)
    bench.set_threads(2)


def test_a_missing_peer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: {"torch": "torch is not installed; try: pip install x"})
    assert "torch" not in peers.available()
    with pytest.raises(bench.MissingPackageError, match="torch is not installed; try"):
        peers.spmm("torch", matrix("float32"), dense("float32", 47, 2))


def test_a_missing_package_is_an_import_error() -> None:
    with pytest.raises(ImportError, match=r"reading needs no_such_package.*pip install 'sparsetir\[plot\]'"):
        _optional.require("no_such_package.part", extra="plot", purpose="reading")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("dgl", matrix("float32"), dense("float32", 47, 2)), ArgumentError, "against scipy, torch, mkl, found 'dgl'"),
        (("scipy", matrix("float32").tocoo(), dense("float32", 47, 2)), ArgumentTypeError, r"try A\.tocsr\(\)"),
        (("scipy", matrix("float32"), dense("float32", 48, 2)), ArgumentError, r"47 x any, found \(48, 2\)"),
        (("scipy", matrix("float32"), dense("float32", 47)), ArgumentError, r"47 x any, found \(47,\)"),
        (("scipy", matrix("float32"), dense("float64", 47, 2)), ArgumentTypeError, "dtype float32, found float64"),
    ],
)
def test_wrong_operands(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bench.spmm(*arguments)


def test_an_unknown_operation() -> None:
    with pytest.raises(ArgumentError, match="spmm, spmv, sddmm, found 'gemm'"):
        bench.available("gemm")


@pytest.mark.skipif("mkl" in bench.missing(), reason="no MKL")
@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (sp.csr_array((3, 3), dtype=np.complex64), ArgumentTypeError, "float32 or float64, found complex64"),
        (sp.csr_array((0, 3), dtype=np.float32), ArgumentError, "without rows or columns"),
    ],
)
def test_what_mkl_does_not_take(A: sp.csr_array, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bench.spmm("mkl", A, np.ones((3, 2), A.dtype))


# --- timing -----------------------------------------------------------------------------------------------


def test_cases_take_turns() -> None:
    order: list[str] = []
    cases = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = bench.interleave(cases, rounds=2, burst_seconds=0.0, rest=0.0)
    assert "".join(order) == "aaaabbbb" * 2  # one call to warm up and three that count
    assert [len(t.samples) for t in times.values()] == [6, 6]
    assert list(times) == ["a", "b"]


def test_a_sleep_takes_as_long_as_it_says() -> None:
    found = bench.interleave({"sleep": lambda: time.sleep(0.002)}, rounds=1, burst_seconds=0.02, rest=0.0)["sleep"]
    assert 0.002 <= found.min <= found.median <= found.max
    assert len(found.samples) <= 11


def test_rest_comes_before_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    bench.interleave({"a": int, "b": int}, rounds=3, burst_seconds=0.0, rest=0.25)
    assert rests == [0.25] * 6


def test_a_disturbed_burst_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = iter([[1e-4, 4.1e-3, 4.1e-3], [1e-4, 8.1e-3, 4.1e-3], [1e-4, 1.1e-4, 1e-4]])
    monkeypatch.setattr(timing, "burst", lambda call, seconds: next(bursts))
    found = bench.interleave({"a": int}, rounds=1, rest=0.0)["a"]
    assert (found.max, found.discarded) == (1.1e-4, 2)


def test_a_machine_that_stays_busy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "burst", lambda call, seconds: [1e-4, 4.1e-3, 4.1e-3])
    found = bench.interleave({"a": int}, rounds=2, rest=0.0)["a"]
    assert found.discarded == 4
    assert found.median == 4.1e-3


def test_long_calls_are_not_taken_for_disturbed() -> None:
    assert not timing.is_disturbed([0.30, 0.31, 0.32])


def test_spread_is_relative_to_the_median() -> None:
    assert bench.Timing.of([1.0] * 8).spread == 0.0
    assert bench.Timing.of([1.0, 2.0, 3.0, 4.0]).spread == pytest.approx(2 / 2.5)


def test_at_least_one_round() -> None:
    with pytest.raises(ArgumentError, match="at least 1, found 0"):
        bench.interleave({"a": int}, rounds=0)


# --- the standard library's matrix ------------------------------------------------------------------------


def test_term_document_of_two_files(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("x = y + y  # caf\N{LATIN SMALL LETTER E WITH ACUTE}", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.py").write_text("_z1 y")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "d.py").write_text("hidden")
    (tmp_path / "empty.py").touch()
    found, documents, terms = bench.term_document(tmp_path)
    assert documents == ["a/c.py", "b.py", "empty.py"]
    assert terms == ["_z1", "caf", "x", "y"]
    counts = [[1, 0, 0, 1], [0, 1, 1, 2], [0, 0, 0, 0]]
    np.testing.assert_allclose(found.toarray(), np.log1p(np.array(counts, "float32")))


def test_a_folder_without_sources(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="found none"):
        bench.term_document(tmp_path)


def test_term_document_of_the_standard_library() -> None:
    found, documents, terms = bench.term_document()
    assert found.shape == (len(documents), len(terms))
    assert (found.dtype, found.indices.dtype, found.has_canonical_format) == (np.float32, np.int32, True)
    assert 1e5 <= found.nnz <= 1e6
    assert "json/decoder.py" in documents
    assert found[documents.index("json/decoder.py"), terms.index("JSONDecodeError")] > 0
    degrees = np.bincount(found.indices)
    assert degrees.min() == 1
    assert degrees.max() > len(documents) / 2


# --- pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(3, 5), (7, 700), (1000, 513), (512, 1)])
def test_density_counts_every_nonzero_in_its_cell(m: int, n: int) -> None:
    A = sp.random_array((m, n), density=0.05, format="coo", rng=np.random.default_rng(1))
    height, width = min(m, 512), min(n, 512)
    expected = np.zeros((height, width), int)
    np.add.at(expected, (A.row.astype(int) * height // m, A.col.astype(int) * width // n), 1)
    np.testing.assert_array_equal(bench.density(A), expected)


@needs_matplotlib
@pytest.mark.parametrize(
    "A", [matrix("float32"), sp.csr_array((0, 4)), sp.csr_array((4, 4)), sp.random_array((2000, 3))]
)
def test_spy_writes_a_picture(A: sp.sparray, tmp_path: Path) -> None:
    written = bench.spy(A, tmp_path / "new" / "spy.png")
    assert written.read_bytes().startswith(b"\x89PNG")


HISTORIES = {
    "objects": [SimpleNamespace(seconds=s, elapsed=i * 0.1) for i, s in enumerate([3e-3, 1e-3, 2e-3])],
    "mappings": [{"seconds": 3e-3}, {"seconds": None}, {"seconds": 1e-3}],
    "failures": [{"seconds": float("inf")}, {"seconds": None}],
}


@needs_matplotlib
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_curve_writes_a_picture(history: list, tmp_path: Path) -> None:
    written = bench.curve(history, tmp_path / "curve.png")
    assert written.read_bytes().startswith(b"\x89PNG")


def test_best_so_far_skips_failures() -> None:
    found = plot.best_so_far(np.array([np.nan, 3.0, np.nan, 1.0, 2.0]))
    np.testing.assert_array_equal(found, [np.nan, 3.0, 3.0, 1.0, 1.0])


def test_a_curve_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one trial"):
        bench.curve([], tmp_path / "curve.png")


def test_drawing_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(bench.MissingPackageError, match=r"sparsetir\[plot\]"):
        bench.spy(matrix("float32"), tmp_path / "spy.png")
