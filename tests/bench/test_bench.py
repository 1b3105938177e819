# SPDX-License-Identifier: Apache-2.0
"""Peers agree with scipy, timing takes turns, bounds are bounds, generated inputs and pictures are what they say."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import bench, formats
from sparsetir.bench import measure, report, roofline, search, search_rate, sweep
from sparsetir.bench import roofline as roofs
from sparsetir.bench import sweep as scale
from sparsetir.errors import ArgumentError, ArgumentTypeError, FileFormatError, TuningError
from sparsetir.interop import CooTensor
from sparsetir.tuning.tuned_kernel import TunedKernel
from sparsetir.utils import machine, packages
from sparsetir.utils.machine import shipped_profile
from sparsetir.workloads import ceilings as limits
from sparsetir.workloads import inputs, peers, reference, suite, timing
from sparsetir.workloads.inputs import Case, make_case
from sparsetir.workloads.plot import best_so_far

pytestmark = pytest.mark.usefixtures("quick_ceilings")

DTYPES = ("float32", "float64")
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


def matrix(dtype: str, *, m: int = 31, n: int = 47, density: float = 0.1) -> sp.csr_array:
    """A random matrix whose first and last rows are empty."""
    found = sp.random_array((m, n), density=density, format="lil", dtype=dtype, rng=np.random.default_rng(5))
    found[[0, m - 1], :] = 0
    return sp.csr_array(found)


def dense(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


def cube(entries: int) -> CooTensor:
    """A tensor in no order, with empty slices, in which some coordinates occur twice."""
    rng = np.random.default_rng(2)
    coords = np.stack([rng.integers(1, n - 1, entries) for n in (6, 7, 9)]).astype("int32")
    return CooTensor(coords, rng.standard_normal(entries, "float32"), (6, 7, 9))


def filled(tensor: CooTensor) -> np.ndarray:
    out = np.zeros(tensor.shape)
    np.add.at(out, tuple(tensor.coords), tensor.values)
    return out


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
    monkeypatch.setattr(peers, "GATHERED_FLOATS", 100)
    S, X, Y = matrix(dtype), dense(dtype, 31, 9), dense(dtype, 47, 9)
    if peer not in bench.available("sddmm"):
        with pytest.raises(ArgumentError, match=f"sddmm is timed against .*, got '{peer}'"):
            bench.sddmm(peer, S, X, Y)
        return
    expected = S.multiply(X @ Y.T).tocsr()
    call = bench.sddmm(peer, S, X, Y)
    for _ in range(2):
        np.testing.assert_allclose(call(), expected.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gathered", [1 << 20, 20])
def test_mttkrp_agrees_with_a_dense_product(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GATHERED_FLOATS", gathered)
    tensor = cube(entries=90)
    B, C = dense("float32", 7, 5), dense("float32", 9, 5)
    expected = np.einsum("ijk,jr,kr->ir", filled(tensor), B, C)
    call = bench.mttkrp("numpy", tensor, B, C)
    for _ in range(2):
        np.testing.assert_allclose(call(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="tensor of 3 dimensions, got 2"):
        bench.mttkrp("numpy", CooTensor(np.zeros((2, 1), int), np.ones(1, "float32"), (2, 2)), B, C)


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


def test_threads_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer that has threads is told, and no other."""
    told: list[tuple[str, int]] = []
    torch = SimpleNamespace(set_num_threads=lambda count: told.append(("torch", count)))
    monkeypatch.setattr(peers, "torch_module", lambda: torch)
    monkeypatch.setattr(peers.mkl, "set_threads", lambda count: told.append(("mkl", count)))
    for installed in (["scipy", "torch", "mkl"], ["scipy"]):
        monkeypatch.setattr(peers, "available", lambda installed=installed: installed)
        bench.set_threads(3)
    assert told == [("torch", 3), ("mkl", 3)]


def test_peers_use_the_threads_that_were_set() -> None:
    used = {
        "torch": lambda: peers.torch_module().get_num_threads(),
        "mkl": lambda: peers.mkl.library().MKL_Get_Max_Threads(),
    }
    installed = [name for name in used if name in peers.available()]
    for count in (1, 2):
        bench.set_threads(count)
        assert {name: used[name]() for name in installed} == dict.fromkeys(installed, count)


def test_a_missing_peer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: {"torch": "torch is not installed; try: pip install x"})
    assert "torch" not in peers.available()
    with pytest.raises(bench.MissingPackageError, match="torch is not installed; try"):
        peers.spmm("torch", matrix("float32"), dense("float32", 47, 2))


def test_a_missing_package_is_an_import_error() -> None:
    with pytest.raises(ImportError, match=r"reading needs no_such_package.*pip install 'sparsetir\[plot\]'"):
        packages.require("no_such_package.part", extra="plot", purpose="reading")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("dgl", matrix("float32"), dense("float32", 47, 2)), ArgumentError, "against scipy, torch, mkl, got 'dgl'"),
        (("scipy", matrix("float32").tocoo(), dense("float32", 47, 2)), ArgumentTypeError, r"try A\.tocsr\(\)"),
        (("scipy", matrix("float32"), dense("float32", 48, 2)), ArgumentError, r"47 x any, got \(48, 2\)"),
        (("scipy", matrix("float32"), dense("float32", 47)), ArgumentError, r"47 x any, got \(47,\)"),
        (("scipy", matrix("float32"), dense("float64", 47, 2)), ArgumentTypeError, "dtype float32, got float64"),
    ],
)
def test_wrong_operands(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bench.spmm(*arguments)


def test_an_unknown_operation() -> None:
    with pytest.raises(ArgumentError, match="spmm, spmv, sddmm, mttkrp, got 'gemm'"):
        bench.available("gemm")


@pytest.mark.skipif("mkl" in bench.missing(), reason="no MKL")
@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (sp.csr_array((3, 3), dtype=np.complex64), ArgumentTypeError, "float32 or float64, got complex64"),
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


@pytest.mark.parametrize(
    ("milliseconds", "quantised"),
    [
        ([12.01, 12.02, 11.99, 0.3], True),
        ([4.0, 8.05, 16.0], True),
        ([4.3, 9.1, 5.5], False),
        ([0.01, 0.01, 4.0], False),
        ([400.0, 400.0, 400.0], False),
    ],
)
def test_whole_scheduler_ticks_are_a_busy_machine(milliseconds: list[float], quantised: bool) -> None:
    samples = [1e-3 * ms for ms in milliseconds]
    assert timing.is_quantised(samples) is quantised
    assert timing.Timing.of(samples).disturbed is (quantised or timing.Timing.of(samples).spread > timing.NOISY)


def test_spread_is_relative_to_the_median() -> None:
    assert bench.Timing.of([1.0] * 8).spread == 0.0
    assert bench.Timing.of([1.0, 2.0, 3.0, 4.0]).spread == pytest.approx(2 / 2.5)


def test_at_least_one_round() -> None:
    with pytest.raises(ArgumentError, match="from 1 to 1000000, got 0"):
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
    with pytest.raises(FileFormatError, match="got none"):
        bench.term_document(tmp_path)


@pytest.mark.slow
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


@pytest.mark.slow
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
    found = best_so_far(np.array([np.nan, 3.0, np.nan, 1.0, 2.0]))
    np.testing.assert_array_equal(found, [np.nan, 3.0, 3.0, 1.0, 1.0])


def test_a_curve_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one trial"):
        bench.curve([], tmp_path / "curve.png")


def test_drawing_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(bench.MissingPackageError, match=r"sparsetir\[plot\]"):
        bench.spy(matrix("float32"), tmp_path / "spy.png")


RATES = {"L1": 200e9, "L2": 100e9, "L3": 50e9, "DRAM": 10e9}
LEVELS = (roofs.CacheLevel("L1", 32 << 10), roofs.CacheLevel("L2", 1 << 20), roofs.CacheLevel("L3", 32 << 20, cores=2))
MACHINE = roofs.Roofline(LEVELS, {1: roofs.Ceilings(1, 50e9, RATES), 2: roofs.Ceilings(2, 100e9, RATES)})


@pytest.mark.slow
@needs_matplotlib
def test_the_roofline_writes_a_picture(tmp_path: Path) -> None:
    for rows in ([], [row(), row(peers={})]):
        assert roofline.draw_roofline(rows, MACHINE, tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


# --- the roofline -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ceilings_are_measured() -> None:
    found = roofs.measure_roofline(seconds=0.002, rounds=1)
    threads = sparsetir.get_num_threads()
    assert list(found.ceilings) == sorted({1, threads})
    assert list(found.most.bandwidth) == [*(level.name for level in roofs.levels()), "DRAM"]
    for ceilings in found.ceilings.values():
        assert all(0 < rate < np.inf for rate in (ceilings.peak, *ceilings.bandwidth.values()))
    assert found.most.peak >= found.ceilings[1].peak
    assert all(found.most.bandwidth[name] >= rate for name, rate in found.ceilings[1].bandwidth.items())
    assert len({len(cells) for cells in found.table()}) == 1


def test_the_kernels_behind_the_ceilings_do_their_work() -> None:
    lanes, threads, repeats = 8, 2, 3
    size = threads * limits.SUMS * lanes
    sums = np.zeros(size, "float32")
    limits.compiled(limits.PEAK, lanes)(np.repeat(np.float32([0.5, 3]), lanes), sums, threads, repeats)
    np.testing.assert_allclose(sums, ((0.5 * 0.5 + 3) * 0.5 + 3) * 0.5 + 3)
    data = np.arange(4 * size, dtype="float32")
    limits.compiled(limits.READ, lanes)(data, sums, threads, repeats, 4)
    expected = repeats * data.reshape(threads, 4, -1).sum(1)
    np.testing.assert_allclose(sums, expected.ravel())


def test_a_call_that_was_held_up_does_not_lower_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, *[1e-9] * 30, *[2.0] * 9])
    monkeypatch.setattr(limits, "elapsed", lambda call, repeats: next(seconds) * repeats)
    assert limits.best_rate(lambda repeats: None, seconds=0.0) == pytest.approx(1e9)


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-1", 2), ("0-3,8,10-11", 7), ("", 1)])
def test_lists_of_processors_are_counted(text: str, count: int) -> None:
    assert machine.count_cpus(text) == count


def test_work_of_spmm_and_spmv_and_sddmm() -> None:
    # 3 x 4 with entries in two rows and two columns: 4 bytes a value, 4 an index, 4 a row pointer.
    A = sp.csr_array((np.ones(3, "float32"), np.int32([1, 3, 1]), np.int32([0, 2, 2, 3])), shape=(3, 4))
    stored = 3 * 4 + 3 * 4 + 4 * 4
    spmm = roofs.work_of("spmm", make_case("spmm", A, feat=8).inputs)
    assert spmm == roofs.OperationWork(2 * 3 * 8, 3 * 32, 2 * 32, stored + 2 * 32 + 3 * 32)
    assert roofs.work_of("spmv", make_case("spmv", A).inputs) == roofs.OperationWork(6, 12, 8, stored + 8 + 12)
    sddmm = roofs.work_of("sddmm", make_case("sddmm", A, feat=8).inputs)
    assert sddmm == roofs.OperationWork(17 * 3, 3 * 32, 2 * 32, stored + 12 + 2 * 32 + 2 * 32)
    with pytest.raises(ArgumentError, match="bounds are known for spmm, spmv, sddmm, mttkrp, got 'gemm'"):
        roofs.work_of("gemm", {})


def test_work_of_mttkrp() -> None:
    tensor = CooTensor(np.int32([[0, 0, 2], [1, 1, 1], [0, 3, 3]]), np.ones(3, "float32"), (3, 2, 5))
    work = roofs.work_of("mttkrp", make_case("mttkrp", tensor, feat=4).inputs)
    fibers, tree = 2, 4 * (4 + 2 + 3 + 3)
    assert work == roofs.OperationWork(2 * (3 + fibers) * 4, 3 * 16, 16, 12 + tree + 16 + 2 * 16 + 3 * 16)


PROFILE = shipped_profile("znver4")


@pytest.mark.parametrize(
    ("rows", "density", "N", "limit"),
    [(200, 0.3, 512, "compute"), (300_000, 1e-5, 512, "gather"), (3000, 1e-5, 512, "stream")],
)
def test_the_longest_of_the_terms_is_the_limit(rows: int, density: float, N: int, limit: str) -> None:
    A = sp.random_array((rows, rows), density=density, format="csr", dtype="float32", rng=np.random.default_rng(0))
    fair = roofs.t_fair(A, "spmm", N, PROFILE)
    assert fair.limit == limit
    assert fair.seconds >= 2 * A.nnz * N / max(PROFILE.fma.values())
    assert roofs.t_fair(A, "spmm", N, PROFILE, threads=2).seconds == fair.seconds / 2


def test_blocks_share_what_they_gather() -> None:
    mask = sp.random_array((20_000, 20_000), density=5e-5, rng=np.random.default_rng(0))
    blocks = sp.csr_array(sp.kron(mask, np.ones((8, 8))), dtype="float32")
    order = np.random.default_rng(1).permutation(blocks.shape[0])
    scattered = sp.csr_array(blocks[order])
    assert roofs.t_fair(blocks, "spmm", 64, PROFILE).seconds < roofs.t_fair(scattered, "spmm", 64, PROFILE).seconds


@pytest.mark.parametrize("op", ["spmm", "spmv", "sddmm"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (4, 4)])
def test_the_limit_of_nothing_is_finite(op: str, shape: tuple[int, int]) -> None:
    assert np.isfinite(roofs.t_fair(sp.csr_array(shape, dtype=np.float32), op, 8, PROFILE).seconds)
    with pytest.raises(ArgumentError, match="op: expected one of spmm"):
        roofs.t_fair(sp.csr_array(shape, dtype=np.float32), "gemm", 8, PROFILE)


# --- generated inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", suite.families())
def test_a_family_of_matrices(name: str) -> None:
    family = suite.families()[name]
    found = family("small")
    assert (found.dtype, found.indices.dtype, found.indptr.dtype) == (np.float32, np.int32, np.int32)
    assert found.has_canonical_format
    found.check_format(full_check=True)
    assert np.isfinite(found.data).all()
    assert np.count_nonzero(found.data) == found.nnz
    assert name == "empty" or 0.5 * 20_000 < found.nnz < 1.1 * 20_000
    again = family(seed=0)
    assert all(np.array_equal(getattr(found, part), getattr(again, part)) for part in ("indptr", "indices", "data"))


@pytest.mark.parametrize("name", suite.tensors())
def test_a_family_of_tensors(name: str) -> None:
    found = suite.tensors()[name]("small", seed=1)
    assert 0.5 * 20_000 < found.nnz <= 20_000
    flat = np.ravel_multi_index(tuple(found.coords), found.shape)
    assert (np.diff(flat) > 0).all()
    assert not np.array_equal(found.values, suite.tensors()[name]("small", seed=2).values[: found.nnz])


def test_families_have_the_shape_they_are_named_after() -> None:
    made = {name: family("small") for name, family in suite.families().items()}
    lengths = {name: np.diff(found.indptr) for name, found in made.items()}
    assert lengths["giant_row"].max() == made["giant_row"].shape[1]
    assert made["empty"].nnz == 0
    assert lengths["rmat"].max() > 8 * lengths["rmat"].mean() > 2 * lengths["uniform"].max()
    assert set(lengths["stencil_2d"]) == {3, 4, 5}
    assert set(lengths["stencil_3d"]) == {4, 5, 6, 7}
    rows, columns = made["banded"].nonzero()
    assert np.abs(rows - columns).max() == suite.HALF_BAND
    for name, edge in (("fem_blocks", 3), ("attention_mask", 16)):
        blocks = sp.bsr_array(made[name], blocksize=(edge, edge))
        assert blocks.nnz == made[name].nnz
    for percent in (50, 80, 90, 95):
        found = made[f"pruned_{percent}"]
        assert found.nnz / np.prod(found.shape) == pytest.approx(1 - percent / 100, abs=1e-3)
    assert made["bipartite"].shape[0] == 8 * made["bipartite"].shape[1]


def test_seeds_and_sizes_of_the_suite() -> None:
    uniform = suite.families()["uniform"]
    assert not np.array_equal(uniform("small", seed=1).indices[:99], uniform("small", seed=2).indices[:99])
    with pytest.raises(ArgumentError, match="sizes small, medium, large, got 'huge'"):
        uniform("huge")
    with pytest.raises(ArgumentError, match="non-negative integer, got -1"):
        uniform(seed=-1)


# --- results are checked ----------------------------------------------------------------------------------


def case_of(op: str, feat: int = 40) -> Case:
    return make_case(op, cube(300) if op == "mttkrp" else matrix("float32"), feat=feat)


@pytest.mark.parametrize("op", measure.DIMENSIONS)
def test_every_element_is_compared(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PART", 500)
    case = case_of(op)
    right = measure.our_call(sparsetir.build(case.program), case)().copy()
    reference.check(op, lambda: right, case)
    rng = np.random.default_rng(0)
    for at in (0, right.size - 1, *rng.integers(0, right.size, 5)):
        wrong = right.copy()
        wrong.flat[at] += 0.01
        with pytest.raises(reference.WrongResultError, match=f"{op}: our result differs from the reference: expected"):
            reference.check(op, lambda found=wrong: found, case)


def test_memory_that_is_not_written_is_a_wrong_result() -> None:
    case = case_of("spmm")
    with pytest.raises(reference.WrongResultError, match=r"expected .*, got nan"):
        reference.check("spmm", lambda: np.full((31, 40), np.nan, "float32"), case)


@pytest.mark.parametrize("op", ["spmm", "sddmm"])
def test_kernels_over_other_formats_are_called_alike(op: str) -> None:
    case = case_of(op)
    parts = sparsetir.decompose_format(case.program, {next(iter(case.inputs)): sparsetir.formats.bsr(2, 2)})
    reference.check(op, measure.our_call(sparsetir.build(parts), case), case)


def test_kernels_that_are_compared_hand_out_results_alike() -> None:
    """Writing where one is told to takes less time than making a sparse array: one of both for all of them."""
    case = case_of("sddmm")
    plain = sparsetir.build(case.program)
    tuned = TunedKernel(plain, [])
    for call in measure.our_calls({"plain": plain, "tuned": tuned}, case).values():
        assert call() is call()
    parts = sparsetir.decompose_format(case.program, {next(iter(case.inputs)): sparsetir.formats.bsr(2, 2)})
    compared = {"plain": plain, "tuned": tuned, "blocks": sparsetir.build(parts)}
    for call in measure.our_calls(compared, case).values():
        assert call() is not call()
        reference.check("sddmm", call, case)


# --- rows -------------------------------------------------------------------------------------------------

QUICK = measure.MeasurementPlan(rounds=1, rest=0.0, repeat=0)


def row(ours: dict | None = None, peers: dict | None = None, **changed: object) -> measure.Row:
    """A row with the given seconds."""
    ours = {"untuned": 1.0} if ours is None else ours
    peers = {"scipy": 4.0, "mkl": 2.0} if peers is None else peers
    times = [{name: bench.Timing.of([t] * 4) for name, t in group.items()} for group in (ours, peers)]
    facts = {"bound": roofs.TimeBound(0.5, "compute"), **changed}
    return measure.Row("a", measure.SizedOp("spmm", 8), (1, 1), 1, *times, roofs.OperationWork(8, 8, 8, 8), **facts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["empty", "giant_row", "tensor_skewed"])
def test_rows_of_all_operations(name: str) -> None:
    source = (suite.families() | suite.tensors())[name]()
    for product in measure.parse_products("spmm:3,spmv,sddmm:3,mttkrp:3"):
        if measure.suits(product, source):
            found = measure.measure(name, source, product, QUICK, PROFILE)
            assert found.findings == []
            assert list(found.row.ours) == ["untuned"]
            assert list(found.row.peers) == bench.available(product.op)
            assert found.row.as_dict()["nnz"] == source.nnz


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_rows_of_nothing(shape: tuple[int, int]) -> None:
    for product in measure.parse_products("spmm:3,spmv,sddmm:3"):
        found = measure.measure("none", sp.csr_array(shape, dtype="float32"), product, QUICK, PROFILE)
        assert found.findings == []
        text = report.Report([found.row], roofline=MACHINE).text()
        assert "none" in text


@pytest.mark.slow
def test_a_wrong_kernel_is_found_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case, _plan: measure.MeasurementPlan) -> dict:
        program = make_case("spmm", -case.inputs["A"]).program
        kernel = sparsetir.build(program)
        return {"negative": SimpleNamespace(signature=kernel.signature, bind=lambda A: kernel.bind(A=-A))}

    monkeypatch.setattr(measure, "KINDS", [*measure.KINDS, wrong])
    found = measure.measure("m", matrix("float32"), measure.SizedOp("spmm", 8), QUICK)
    assert list(found.row.ours) == ["untuned"]
    assert len(found.findings) == 1
    assert found.findings[0].startswith("m spmm:8, negative: our result differs from the reference")
    monkeypatch.setattr(measure, "KINDS", [wrong])
    alone = measure.measure("m", matrix("float32"), measure.SizedOp("spmm", 8), QUICK)
    assert (alone.row, len(alone.findings)) == (None, 1)


def test_a_kind_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Case, plan: measure.MeasurementPlan) -> dict:
        raise TuningError("no candidate ran")

    monkeypatch.setattr(measure, "KINDS", [*measure.KINDS, fails])
    found = measure.measure("m", matrix("float32"), measure.SizedOp("spmv", 1), QUICK)
    assert found.findings == ["m spmv, fails: no candidate ran"]
    assert list(found.row.ours) == ["untuned"]


def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_operands: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setitem(peers.SETUPS["spmm"], "scipy", fails)
    found = measure.measure("m", matrix("float32"), measure.SizedOp("spmm", 8), QUICK)
    assert "scipy" not in found.row.peers
    assert "m spmm:8: without scipy: RuntimeError: no such luck" in capsys.readouterr().err
    assert report.figures([row(), row(peers={})])["vs scipy"] == [4.0, None]


def test_what_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "free_memory", lambda: 1000.0)
    monkeypatch.setattr(measure, "make_case", lambda *_a, **_k: pytest.fail("allocated"))
    found = measure.measure("wide", matrix("float32"), measure.SizedOp("spmm", 8), QUICK)
    assert (found.row, found.findings) == (None, [])
    assert "skipped: wide spmm:8 needs" in capsys.readouterr().err


@pytest.mark.parametrize(("spreads", "repeats", "kept"), [([0.0], 0, 0), ([9.0, 0.0], 1, 1), ([5.0, 9.0, 7.0], 2, 0)])
def test_disturbed_rows_are_measured_again(
    spreads: list[float], repeats: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [{"a": bench.Timing.of([1e-4, 1e-4, 1e-4 * (1 + s), 1e-4 * (1 + s)])} for s in spreads]
    left = iter(attempts)
    monkeypatch.setattr(measure, "interleave", lambda calls, rounds, rest: next(left))
    assert measure.undisturbed({}, measure.MeasurementPlan(), "a") == (attempts[kept], repeats)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gemm:3", "of spmm, spmv, sddmm, mttkrp, spgemm, .*, topn, rap, triangles, got 'gemm:3'"),
        ("spmm:32,", "got ''"),
        ("spmm:x", "expected a positive number of columns as in spmm:128, got 'spmm:x'"),
        ("mttkrp:0", "as in mttkrp:32, got 'mttkrp:0'"),
        ("spmv:4", "spmv has no number of columns, got 'spmv:4'; try spmv"),
    ],
)
def test_operations_that_are_not(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measure.parse_products(text)


def test_operations_are_named_once() -> None:
    assert [str(p) for p in measure.parse_products("spmm, spmm:128,spmv,mttkrp,spmm:8")] == [
        "spmm:128",
        "spmv",
        "mttkrp:32",
        "spmm:8",
    ]


# --- reports ----------------------------------------------------------------------------------------------


def test_figures_of_a_report() -> None:
    found = report.figures([row(), row(ours={"untuned": 1.0, "tuned": 0.5})])
    assert found == {
        "untuned vs scipy": [4.0, 4.0],
        "untuned vs best peer": [2.0, 2.0],
        "tuned vs scipy": [None, 8.0],
        "tuned vs best peer": [None, 4.0],
        "t_fair/t": [0.5, 1.0],
    }
    assert report.summaries([row(), row(ours={"untuned": 4.0})])["vs best peer"] == {
        "geometric mean": pytest.approx(1.0),
        "smallest": 0.5,
    }


def test_kinds_that_are_not_rated_have_a_column_and_no_ratio() -> None:
    cells = report.table([row(ours={"untuned": 1.0, "sketch 2": 0.25}), row(bound=None, peers={})])
    ratios = ["vs scipy", "vs best peer", "t_fair/t", "limit", "spread"]
    assert cells[0][3:] == ["untuned ms", "sketch 2 ms", "scipy ms", "mkl ms", *ratios]
    assert cells[1][3:9] == ["1000", "250", "4000", "2000", "4.00", "2.00"]
    assert cells[2][4:] == ["-", "-", "-", "-", "-", "-", "-", "0%"]
    assert len({len(line) for line in cells}) == 1
    assert report.markdown(cells).count("\n") == 5


def test_a_report_says_that_the_machine_was_busy() -> None:
    noisy = {"untuned": bench.Timing.of([0.5, 1.0, 3.0, 3.0])}
    assert report.Report([row()], load=0.2, roofline=MACHINE).busy() == []
    busy = measure.Row(
        "b", measure.SizedOp("spmv", 1), (1, 1), 1, noisy, {}, roofs.OperationWork(1, 1, 1, 1), repeats=2
    )
    rows = [row(), busy]
    slow = roofs.Roofline(LEVELS, {1: MACHINE.ceilings[1], 2: roofs.Ceilings(2, 50e9, RATES)})
    assert report.Report(rows, load=3.0, roofline=slow).busy() == [
        "the machine was busy (load 3.0 before the first measurement, 2 threads reached 1.0 times the peak of one, "
        "spread above 30% or calls that waited for a core in 1 of 2 rows (measured again: 1), "
        "* marks 1 times of calls that waited): repeat on a quiet one before quoting these times"
    ]
    assert report.table(rows)[2][3] == "2000*"


# --- runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_frees_one_operand_before_it_loads_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []

    class Counted(sp.csr_array):
        def __del__(self) -> None:
            alive.pop()

    def load() -> Counted:
        assert not alive
        found = Counted(matrix("float32"))
        alive.append(1)
        return found

    monkeypatch.setattr(report, "ceilings", lambda: None)
    monkeypatch.setattr(report, "measure", lambda *_args: measure.MeasuredRow(row()))
    sources = [inputs.InputSource(str(n), load) for n in range(3)]
    *_, found = report.run(sources, [measure.SizedOp("spmm", 8)], QUICK)
    assert len(found.rows) == 3


def test_sources_of_the_suite() -> None:
    names = [source.name for source in inputs.from_suite("all", "small")]
    assert names == [*suite.families(), *suite.tensors()]
    assert inputs.from_suite("empty, rmat", "small")[1].load().nnz > 10_000
    with pytest.raises(ArgumentError, match=r"the suite has all, uniform, .*, got 'random'"):
        inputs.from_suite("empty,random", "small")


# ---------------------------------------------------------------- sweep


@pytest.mark.slow
def test_a_sweep_tries_formats_and_choices_and_keeps_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("spmm", suite.families()["fem_blocks"]("small"), feat=8)
    tried = list(sweep.options(case))
    assert tried[0] == sweep.Option(None, None)
    assert {type(o.format).__name__ for o in tried if o.format is not None} >= {"BSR", "DCSR"}
    monkeypatch.setattr(sweep, "options", lambda _case: iter(tried[:3]))
    seconds = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(sweep, "fastest", lambda _call: next(seconds))
    monkeypatch.setattr(sweep, "interleave", in_turn({str(tried[0]): 3.0, str(tried[1]): 1.5, str(tried[2]): 1.2}))
    found = sweep.best_of(case)
    assert found is not None
    assert found[1] == tried[2]  # the last comparison decides, not the first


def in_turn(medians: dict[str, float]) -> Any:
    """Made-up times for the last comparison."""
    return lambda calls, **_options: {name: SimpleNamespace(median=medians[name]) for name in calls}


def test_a_sweep_measures_no_loops_twice() -> None:
    """Lanes are for sums along rows, prefetching and panels for products with rows of a dense operand."""
    A = suite.families()["fem_blocks"]("small")
    spmm, spmv = (list(sweep.options(make_case(op, A, feat=8))) for op in ("spmm", "spmv"))
    taken = [[o.choices for o in tried if o.choices is not None] for tried in (spmm, spmv)]
    assert not any(choices.lanes for choices in taken[0])
    assert {choices.panel for choices in taken[0]} >= {0, 64}
    assert {choices.lanes for choices in taken[1]} == {0, 4, 8, 16}
    assert not any(choices.panel or choices.prefetch for choices in taken[1])


@pytest.mark.slow
def test_a_sweep_tries_choices_for_the_formats_that_did_well(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("spmm", suite.families()["fem_blocks"]("small"), feat=8)
    block = formats.bsr(3, 3)
    monkeypatch.setattr(sweep, "options", lambda _case: iter([sweep.Option(None, None), sweep.Option(block, None)]))
    monkeypatch.setattr(sweep, "fastest", lambda _call: 1.0)
    tried: list[sweep.Option] = []
    monkeypatch.setattr(sweep, "ranked", lambda times: tried.extend(times) or list(times))
    assert sweep.best_of(case) is not None
    assert {o.choices.prefetch for o in tried if o.format == block and o.choices is not None} >= {0, 8}


def test_a_sweep_leaves_out_what_cannot_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("spmv", suite.families()["uniform"]("small"))
    wanted = sweep.Option(None, None)
    monkeypatch.setattr(sweep, "options", lambda _case: iter([sweep.Option(formats.band(1, 1), None), wanted]))
    found = sweep.best_of(case)
    assert found is not None
    assert found[1] == wanted


@pytest.mark.slow
def test_memory_and_time_of_a_member_of_a_family() -> None:
    for feat in (0, 8):
        found = scale.measure("stencil_2d", 2000, feat)
        assert found["nnz"] > 1000
        assert found["seconds"] > 0
        assert found["peak"] > 0


def test_scale_takes_families_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(["--families", "stencil_9d"])
    assert "got stencil_9d" in capsys.readouterr().err


def test_the_pace_of_a_search() -> None:
    at = [(0.5, 4.0), (1.0, 3.0), (1.5, None), (2.5, 1.02), (4.5, 1.0)]
    history = [SimpleNamespace(elapsed=elapsed, seconds=seconds, reused=False) for elapsed, seconds in at]
    result = SimpleNamespace(history=history, measured=5)
    assert search_rate.rate(result) == 1.0
    assert search_rate.until(result) == 2.0  # from the first trial on
    assert search_rate.until(result, 1.0) == 4.0
    assert np.isnan(search_rate.rate(SimpleNamespace(history=history[:1])))
    *_, middle, smallest, largest = search_rate.table(
        [search_rate.SearchPace("a", result, 6.0, d, 1.0) for d in (1.5, 2.5)]
    ).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (middle, smallest, largest)]
    assert [row[0] for row in cells] == ["median", "smallest", "largest"]
    assert [row[2] for row in cells] == ["1.00"] * 3
    assert [row[-2] for row in cells] == ["2.00", "1.50", "2.50"]


@pytest.mark.slow
def test_searches_on_a_suite_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    search_rate.main(["--suite", "banded", "--size", "small", "--ops", "spmm:8", "--trials", "3"])
    head, _, row, *_ = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in head.split("|")[1:3]] == ["case", "trials"]
    assert [cell.strip() for cell in row.split("|")[1:3]] == ["banded spmm:8", "3"]
    with pytest.raises(SystemExit):
        search_rate.main([])
    assert "expected files, --data FOLDER or --suite NAMES" in capsys.readouterr().err


def test_kernels_of_searches_are_compared_round_by_round() -> None:
    slow = np.array([1.0, 2.0, 2.0, 1.0, 2.0])  # the pace of the machine: medians would be of different rounds
    row = search.SearchRow("a", {"seed 0": 2 * slow, "seed 1": 3 * slow, "sweep": slow * [4, 2, 2, 3, 2]}, results=[])
    assert row.over_tuned("sweep") == 1
    assert row.over_tuned("seed 1") == 1.5
    assert np.isnan(row.over_tuned("schedules"))


@pytest.mark.filterwarnings("error")
def test_a_table_of_searches_without_a_sweep() -> None:
    results = [SimpleNamespace(measured=8, seconds=2.0, history=[SimpleNamespace(seconds=1.0, elapsed=3.0)])]
    times = {"seed 0": np.ones(3), "schedules": np.full(3, 2.0)}
    *_, means = search.table([search.SearchRow(name, times, results) for name in "ab"]).splitlines()
    found = [cell.strip() for cell in means.split("|")[1:-1]]
    assert found == ["geometric mean", "", "", "", "", "1.000", "2.000", "", "1.000", "4.000"]
