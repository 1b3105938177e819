# SPDX-License-Identifier: Apache-2.0
"""Default choices of untuned kernels."""

from __future__ import annotations

import gc
import io
import json
import lzma
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (names bfloat16 for numpy)
import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME
from fences import Fences
from sparsetir import ops
from sparsetir.codegen.cache import variant
from sparsetir.codegen.pipeline import to_stage_2
from sparsetir.errors import ArgumentError
from sparsetir.ir import effects
from sparsetir.ir.views import decode
from sparsetir.runtime import call_plan
from sparsetir.runtime import kernel as runtime_kernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.torch.functions import FEATURES
from sparsetir.torch.programs import kernel as kernel_of_graphs
from sparsetir.utils.machine import last_cache, private_cache, shipped_profile


def scattered(rows: int, columns: int, nnz: int) -> Any:
    """Columns without any order."""
    rng = np.random.default_rng(0)
    ij = rng.integers(0, rows, nnz), rng.integers(0, columns, nnz)
    return sp.coo_array((np.ones(nnz, np.float32), ij), shape=(rows, columns)).tocsr()


def banded(rows: int) -> Any:
    """Columns close to the diagonal."""
    return sp.diags_array([np.ones(rows)] * 5, offsets=range(-2, 3), shape=(rows, rows)).tocsr().astype(np.float32)


def test_registers_hold_as_many_elements_as_the_widest_result_has() -> None:
    """Positions of 64 bits that a program keeps on the way do not count."""
    wide = Registers(32, 512)
    assert defaults.usual(sparsetir.ops.spmm("float32"), wide).tile == 128
    assert defaults.usual(sparsetir.ops.spmm("float64"), wide).tile == 64
    assert defaults.usual(sparsetir.ops.spmm("float16"), wide).tile == 128  # held as float32
    func = BY_NAME["csrmm_dense_hoist"].make("float32", "int64")
    (second,) = to_stage_2(func).functions.values()
    assert defaults.usual(func, wide) == defaults.usual(second, wide) == Choices(tile=128)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("spmm", [("indices", "b", 0)]),
        ("spmv", [("indices", "x_data", 0)]),
        ("sddmm", [("indices", "y", 0)]),
    ],
)
def test_gathers_of_ready_programs(name: str, wanted: list[tuple[str, str, int]]) -> None:
    found = effects.gathers(decode(getattr(sparsetir.ops, name)()))
    assert [(g.indices, g.operand, g.dimension) for g in found] == wanted


def test_only_scattered_rows_of_large_operands_are_prefetched() -> None:
    gathers = effects.gathers(decode(sparsetir.ops.spmm()))
    rows = 5 * private_cache() // 256 + 1
    large = np.zeros((rows, 64), np.float32)
    for matrix, operand, wanted in [
        (scattered(rows, rows, 5 * rows), large, 16),
        (banded(rows), large, 0),
        (scattered(rows, 100, 5 * rows), large[:100], 0),
        (scattered(rows, rows, 5 * rows), large[:, :8], 0),  # a row is shorter than a cache line
        (sp.csr_array((rows, rows), dtype=np.float32), large, 0),
    ]:
        assert defaults.suitable_prefetch(gathers, {"indices": matrix.indices, "b": operand}) == wanted


@pytest.mark.parametrize(("feat", "ahead"), [(16, 32), (32, 32), (64, 16), (100, 8), (128, 8), (1024, 8)])
def test_short_rows_are_fetched_further_ahead(feat: int, ahead: int) -> None:
    gathers = effects.gathers(decode(sparsetir.ops.spmm()))
    rows = 5 * private_cache() // (4 * feat) + 1
    matrix, operand = scattered(rows, rows, 5 * rows), np.zeros((rows, feat), np.float32)
    assert defaults.suitable_prefetch(gathers, {"indices": matrix.indices, "b": operand}) == ahead


def test_panels_of_what_is_used_often_enough() -> None:
    program = decode(sparsetir.ops.spmm())
    gathers, pointers = effects.gathers(program), effects.row_pointers(program)
    whole, own = last_cache(), private_cache()
    for rows, length, features, wanted in [
        (own // 256, 128, 128, 64),  # used so often that it pays though the operand is near
        (own // 256, 127, 128, 0),
        (own // 256 + 1, 128, 128, 0),  # a panel is no nearer
        (own // 256, 128, 64, 0),  # all columns are one panel
        (own // 1024, 128, 128, 0),
        (whole // 1024, 32, 256, 64),  # more than half the last cache
        (whole // 1024, 31, 256, 0),
        (whole // 512, 32, 512, 32),
    ]:
        indptr = np.array([0, length])
        arrays = {
            "indptr": indptr,
            "indices": np.broadcast_to(np.int32(0), rows * length),
            "b": np.broadcast_to(np.float32(0), (rows, features)),
        }
        assert defaults.suitable_panel(gathers, pointers, arrays) == wanted, (rows, length, features)


@pytest.mark.parametrize(
    ("length", "features", "tile", "wanted"),
    [
        (32, 512, 128, 64),  # read in four pieces
        (31, 512, 128, 0),  # not often enough
        (32, 128, 64, 64),
        (32, 128, 128, 0),  # read at once
        (32, 512, 0, 0),
        (32, 64, 32, 0),  # all columns are one panel
    ],
)
def test_panels_of_rows_that_are_read_in_pieces(length: int, features: int, tile: int, wanted: int) -> None:
    """They lie so far apart that few sets of the caches hold them, however small the operand is."""
    program = decode(sparsetir.ops.spmm())
    arrays = {
        "indptr": np.arange(0, 100 * length + 1, length),
        "indices": np.zeros(100 * length, np.int32),
        "b": np.zeros((100, features), np.float32),
    }
    usage = effects.Usage.of(program)
    assert defaults.changes(usage, arrays, tile=tile).get("panel", 0) == wanted


@pytest.mark.slow
def test_long_rows_of_dots_with_what_the_last_cache_holds_are_read_half_by_half() -> None:
    program = decode(sparsetir.ops.sddmm())
    gathers, pointers, sums = effects.gathers(program), effects.row_pointers(program), effects.dense_sums(program)
    rows, halves = 3 * private_cache() // 512, {"tile": 64, "prefetch": 16}
    for held, length, features, wanted in [
        (rows, 16, 128, halves),
        (rows, 15, 128, {}),  # the hardware does not see that the second halves follow
        (rows, 16, 64, {}),
        (rows, 16, 256, {}),
        (rows // 2, 16, 128, {}),  # half of it is in the core's cache
        (last_cache() // 512, 16, 128, {}),  # from memory
    ]:
        matrix = scattered(held, held, 64 * held)
        arrays = {
            "indptr": np.array([0, length]),
            "indices": matrix.indices,
            "x": np.broadcast_to(np.float32(0), (held, features)),
            "y": np.broadcast_to(np.float32(0), (held, features)),
        }
        found = defaults.suitable_halves(gathers, pointers, sums, arrays)
        assert found == wanted, (held, length, features)
        arrays["indices"] = np.zeros_like(matrix.indices)
        assert defaults.suitable_halves(gathers, pointers, sums, arrays) == {}
    assert effects.dense_sums(decode(sparsetir.ops.spmm())) == []


def test_rows_of_several_heads_are_not_read_in_halves() -> None:
    """Gathered rows of 512 bytes, of which a sum takes the 128 of one head."""
    rows = 3 * private_cache() // 512
    arrays = {
        "indptr": np.array([0, 64]),
        "indices": scattered(rows, rows, 64 * rows).indices,
        "y": np.broadcast_to(np.float32(0), (rows, 4, 32)),
    }
    gathers = [effects.Gather("indices", "y", 0)]
    assert defaults.suitable_halves(gathers, ["indptr"], [("y", 2)], arrays) == {}
    arrays["y"] = arrays["y"].reshape(rows, 1, 128)
    assert defaults.suitable_halves(gathers, ["indptr"], [("y", 2)], arrays) == {"tile": 64, "prefetch": 16}
    others = [*gathers, effects.Gather("indices", "values", 0)]  # rows of which no sum is taken
    assert defaults.suitable_halves(others, ["indptr"], [("y", 2)], arrays) == {}


def test_only_results_that_take_much_of_the_last_cache_are_streamed() -> None:
    rows = last_cache() // 4 // 256 + 1
    assert defaults.suits_streaming([np.empty((rows, 64), np.float32)])
    assert not defaults.suits_streaming([np.empty((rows // 2, 64), np.float32), np.empty(rows * 64, np.float32)])


def test_arrays_that_share_memory_are_found_after_others_that_did_not() -> None:
    """What was apart in one call is not looked at again, what is new is."""
    A, room = scattered(40, 40, 200), np.zeros((100, 8), np.float32)
    B, C = room[:40], room[40:80]
    bound = sparsetir.build(sparsetir.ops.spmm()).bind(A=A)
    for _ in range(3):
        bound(B=B, C=C)
        with pytest.raises(ArgumentError, match="share"):
            bound(B=B, C=room[39:79])
    vector = scattered(40, 40, 40)
    bound = sparsetir.build(sparsetir.ops.spmv()).bind(A=vector)
    for _ in range(3):
        bound(x=room[0:5].reshape(-1), y=room[5:10].reshape(-1))
        with pytest.raises(ArgumentError, match="share"):
            bound(x=room[0:5].reshape(-1), y=vector.data[:40])


@pytest.mark.parametrize("length", [1, 7, 1000, 10**6])
def test_share_of_new_of_known_arrays(length: int) -> None:
    assert effects.share_of_new(np.arange(length), 64) == 1
    assert effects.share_of_new(np.zeros(length, np.int64), 64) == pytest.approx(1 / min(length, 64))


@pytest.mark.parametrize("count", [1, 20, 90, 3000])
@pytest.mark.parametrize("window", [1, 7, 64, 400])
def test_share_of_misses_of_drawn_arrays(window: int, count: int) -> None:
    """Entries are new if neither the window before them nor those between have their number."""
    rng = np.random.default_rng(window + count)
    for length in (0, 1, 2, 2 * window, 2 * window + 1):
        drawn = rng.integers(0, count, length).astype(np.int32)
        before = max(1, min(window, length // 2))
        seen, new = set(drawn[:before].tolist()), 0
        for number in drawn[before : 2 * before].tolist():
            new += number not in seen
            seen.add(number)
        assert effects.share_of_misses(drawn, window) == pytest.approx(new / before)


def test_results_stay_as_they_are_when_other_code_takes_over() -> None:
    rows = 2 * private_cache() // 128 + 1
    A, B = scattered(rows, rows, 3 * rows), np.random.default_rng(1).random((rows, 64), dtype=np.float32)
    kernel, want = sparsetir.build(sparsetir.ops.spmm()), A @ B
    bound = kernel.bind(A=A)
    for _ in range(8):
        np.testing.assert_allclose(kernel(A=A, B=B), want, rtol=1e-5)
        np.testing.assert_allclose(bound(B=B), want, rtol=1e-5)


def test_threads_compile_other_code_once(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = scattered(50, 40, 200), np.ones((40, 8), np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmm())
    made: list[float] = []

    def fit() -> Any:
        made.append(time.monotonic())
        time.sleep(0.05)  # as long as a compiler may take: the others come meanwhile
        return kernel.function

    monkeypatch.setattr(kernel, "fitting", lambda _args, **_options: (fit, 0))
    bound = kernel.bind(A=A)
    bound(B=B)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: bound(B=B), range(16)))
    assert len(made) == 1
    for result in results:
        np.testing.assert_allclose(result, A @ B, rtol=1e-5)


@pytest.mark.parametrize(("after", "asked"), [(0, 5), (2, 5), (7, 8)])
def test_calls_with_few_elements_come_before_other_code_is_looked_for(
    after: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count among those after which it pays; a call with many elements does not wait."""
    monkeypatch.setattr(call_plan, "MOST_UNFITTED", 4)
    A, B = scattered(50, 40, 200), np.ones((40, 8), np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmm())
    calls = [0]
    fitted: list[int] = []
    monkeypatch.setattr(
        kernel, "fitting", lambda _args, **_options: (lambda: fitted.append(calls[0]) or kernel.function, after)
    )
    for elements, expected in ((1 << 21, asked), (1, after + 1)):
        monkeypatch.setattr(call_plan, "UNFITTED_ELEMENTS", elements)
        bound = kernel.bind(A=A)
        fitted.clear()
        for calls[0] in range(12):
            np.testing.assert_allclose(bound(B=B), A @ B, rtol=1e-5)
        assert fitted == [expected]


def test_what_was_asked_for_is_kept() -> None:
    rows = 2 * private_cache() // 128 + 1
    A, B = scattered(rows, rows, 3 * rows), np.zeros((rows, 64), np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=Choices(tile=16, chunks=1))
    assert kernel.fitting(kernel.prepare({"A": A, "B": B})) == (None, 0)
    free = sparsetir.build(sparsetir.ops.spmm())
    fit, after = free.fitting(free.prepare({"A": A, "B": B}))
    assert fit is not None
    assert after > 0


def test_sparse_results_of_later_calls_are_their_own() -> None:
    S, rng = scattered(30, 40, 200), np.random.default_rng(0)
    X, Y = rng.random((30, 8), np.float32), rng.random((40, 8), np.float32)
    bound = sparsetir.build(sparsetir.ops.sddmm()).bind(S=S)
    results = [bound(X=k * X, Y=Y) for k in range(1, 5)]
    for k, found in enumerate(results, 1):
        assert type(found) is type(S)
        np.testing.assert_allclose(found.toarray(), S.multiply(k * X @ Y.T).toarray(), rtol=1e-4)
    out = np.zeros(S.nnz, np.float32)
    for _ in range(3):
        assert bound(X=X, Y=Y, o=out) is out
        np.testing.assert_allclose(out, results[0].data)


def test_one_thread_does_what_is_done_before_another_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes longer to gather than a number, numbers in order less, and some machines wake threads later."""
    zen = shipped_profile("znver4")
    A = scattered(2000, 2000, 12_000)
    x, X = np.ones(2000, np.float32), np.ones((2000, 2), np.float32)

    def is_serial(op: str, matrix: Any, wake: float, **arguments: Any) -> bool:
        monkeypatch.setattr(runtime_kernel, "_profile", lambda: replace(zen, wake=wake))
        kernel = sparsetir.build(getattr(sparsetir.ops, op)())
        return kernel.suitable(kernel.prepare({"A": matrix, **arguments})).get("chunks") == 0

    assert [is_serial("spmv", A[:rows], 2e-6, x=x) for rows in (500, 2000)] == [True, False]
    assert [is_serial("spmm", A[:rows], 5e-6, B=X) for rows in (200, 1000)] == [True, False]
    assert [is_serial("spmv", A, wake, x=x) for wake in (1e-6, 50e-6)] == [False, True]
    in_order, gathered = {"a": np.ones(30_000, np.float32)}, {"a": np.ones(30_000, np.int32)}
    usage = sparsetir.build(sparsetir.ops.spmv()).usage
    small = [defaults.is_small(usage, a, zen, steps=30_000, sums_numbers=True) for a in (in_order, gathered)]
    assert small == [True, False]


@T.prim_func
def potential(x: T.handle, z: T.handle, y: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I,), "float32")
    Z = T.match_sparse_buffer(z, (J,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "potential") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + T.exp(T.float32(0) - (X[i] - Z[j]) * (X[i] - Z[j]))


def test_work_is_counted_by_steps_where_there_are_more_than_elements() -> None:
    """All pairs of two short vectors take long."""
    kernel = sparsetir.build(potential)
    args = {n: kernel.prepare({"X": np.zeros(n, np.float32), "Z": np.zeros(n, np.float32)}) for n in (10, 3000)}
    assert [kernel.steps(args[n]) for n in (10, 3000)] == [100, 9_000_000]
    assert [kernel.is_small(args[n]) for n in (10, 3000)] == [True, False]


@T.prim_func
def row_maximum(a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    A = T.match_sparse_buffer(a, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "row_maximum") as [i, j]:
        with T.init():
            Y[i] = T.float32("-inf")
        Y[i] = T.max(Y[i], A[i, j])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bfloat16"])
@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("passed", [True, False])
def test_results_without_entries_are_initial_values(dtype: str, is_bound: bool, passed: bool) -> None:
    """They are written without a loop over rows, also between calls with entries."""
    kernel, shape, numbers = sparsetir.build(ops.spmv(dtype=dtype)), (300, 5), np.dtype(dtype)
    full = sp.random_array(shape, density=0.5, format="csr", rng=np.random.default_rng(0))
    full.data[:] = 1
    for A in (empty := sp.csr_array(shape), full, empty):
        arrays = {"a": A.data.astype(numbers), "indptr": A.indptr, "indices": A.indices}
        call = kernel.bind(**arrays) if is_bound else partial(kernel, **arrays)
        filling = kernel.filling(kernel.prepare({**arrays, "x": np.zeros(shape[1], numbers)}))
        assert (filling is not None) == (not A.nnz and dtype != "bfloat16")
        for value in (3, np.inf) if dtype != "int8" and not A.nnz else (3,):
            x = np.full(shape[1], value).astype(numbers)
            for _ in range(3):
                out = {"y": np.full(shape[0], 7).astype(numbers)} if passed else {}
                expected = A @ np.full(shape[1], 3.0)
                np.testing.assert_array_equal(call(x=x, **out).astype(np.float64), expected)


@T.prim_func
def with_other_loops(a: T.handle, y: T.handle, z: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32,
                     nnz: T.int32):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    A = T.match_sparse_buffer(a, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I,), "float32")
    for k in range(m):
        Z[k] = Z[k] + T.float32(1)
    with T.sp_iter([I, J], "SR", "rows") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, j]


@pytest.mark.parametrize("is_bound", [True, False])
def test_other_loops_run_without_entries(is_bound: bool) -> None:
    kernel, A = sparsetir.build(with_other_loops), sp.csr_array((30, 7), dtype="float32")
    Z = np.zeros(30, np.float32)
    call = kernel.bind(A=A) if is_bound else partial(kernel, A=A)
    for number in range(1, 41):
        call(Z=Z)
        np.testing.assert_array_equal(Z, number)


def test_maxima_without_entries_are_the_least_number() -> None:
    kernel = sparsetir.build(row_maximum)
    for matrix in (sp.csr_array((40, 7), dtype="float32"), scattered(40, 7, 30)):
        rows = np.diff(matrix.indptr)
        for call in (partial(kernel, A=matrix), kernel.bind(A=matrix)):
            for _ in range(3):
                np.testing.assert_array_equal(call(), np.where(rows, matrix.toarray().max(axis=1), -np.inf))


@pytest.mark.parametrize(("name", "wanted"), [("spmv", True), ("csr_reduce", True), ("ragged_bmm", False),
                                              ("sparse_softmax", False), ("csrmm", False)])  # fmt: skip
def test_sums_of_numbers_are_known(name: str, wanted: bool) -> None:
    """Not products of ragged matrices, whose entries are used many times, nor functions of entries."""
    case = BY_NAME[name]
    kernel = sparsetir.build(case.make("float32", "int32"))
    args = kernel.prepare(case.inputs(np.random.default_rng(0), case.kinds[0], "float32", "int32"))
    assert kernel.sums_numbers(args) is wanted


def test_choices_that_are_refused_leave_the_kernel_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = scattered(30, 40, 200), np.ones((40, 8), np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmm())
    monkeypatch.setattr(defaults, "changes", lambda *_args, **_named: {"tile": 3})  # no power of two
    monkeypatch.setattr(defaults, "is_small", lambda *_args, **_named: False)
    bound = kernel.bind(A=A)
    for _ in range(3):
        np.testing.assert_allclose(bound(B=B), A @ B, rtol=1e-5)


def test_sparse_results_follow_the_structure_of_each_call() -> None:
    """Here the structure is not fixed, though every call brings as many entries."""
    rng = np.random.default_rng(0)
    X, Y = rng.random((6, 8), np.float32), rng.random((6, 8), np.float32)
    bound = sparsetir.build(sparsetir.ops.sddmm()).bind(X=X)
    for shift in range(6):
        columns = (np.arange(6, dtype=np.int32) + shift) % 6
        S = sp.csr_array((np.ones(6, np.float32), columns, np.arange(7, dtype=np.int32)), shape=(6, 6))
        np.testing.assert_allclose(bound(S=S, Y=Y).toarray(), S.multiply(X @ Y.T).toarray(), rtol=1e-5)


@pytest.mark.parametrize(("name", "shape"), [("sddmm", (5, 6)), ("spmm", (0, 6)), ("spmv", (0, 6))])
def test_later_calls_whose_result_has_no_elements_take_the_short_way(name: str, shape: tuple[int, int]) -> None:
    A, X, Y = scattered(*shape, 0), np.ones((shape[0], 8), np.float32), np.ones((6, 8), np.float32)
    calls = {"sddmm": ("S", {"X": X, "Y": Y}), "spmm": ("A", {"B": Y}), "spmv": ("A", {"x": np.ones(6, np.float32)})}
    fixed, given = calls[name]
    bound = sparsetir.build(getattr(sparsetir.ops, name)()).bind(**{fixed: A})
    found = [bound(**given) for _ in range(3)]
    assert len(bound.plans) == 1
    expected = {"sddmm": shape, "spmm": (0, 8), "spmv": (0,)}[name]
    assert [f.shape for f in found] == [expected] * 3
    assert found[1] is not found[2]
    assert sum(f.nnz if name == "sddmm" else f.size for f in found) == 0


@pytest.mark.slow
def test_plans_keep_no_arrays_of_a_call() -> None:
    A = scattered(30, 40, 200)
    bound = sparsetir.build(sparsetir.ops.spmm(), schedule=Choices()).bind(A=A)
    operands = [np.full((40, 8), k, np.float32) for k in range(3)]
    held = [weakref.ref(bound(B=B).base) for B in operands] + [weakref.ref(B) for B in operands]
    assert len(bound.plans) == 1
    del operands
    assert held[1]() is held[2]() is not None  # the third result was made in the memory of the second
    bound.spare.lent.clear()
    gc.collect()
    assert [ref() is None for ref in held] == [True] * 6


@pytest.mark.slow
@pytest.mark.parametrize("op", ["spmm", "sddmm"])
def test_short_rows_of_several_lengths_in_turn(op: str) -> None:
    """Kernels whose length of dense rows is compiled in are used for no other length."""
    rng = np.random.default_rng(0)
    A = sp.random_array((70, 900), density=0.5, format="csr", dtype="float32", rng=rng)
    rows, columns = A.tocoo().coords
    kernel = sparsetir.build(getattr(ops, op)())
    bound = kernel.bind(**{"A" if op == "spmm" else "S": A})
    for length in (8, 1, 16, 9, 65, 8, 64, 16, 0):
        X, Y = (rng.standard_normal((m, length), dtype="float32") for m in A.shape)
        for _ in range(2):
            found = bound(B=Y) if op == "spmm" else bound(X=X, Y=Y).data
        expected = A @ Y if op == "spmm" else A.data * np.sum(X[rows] * Y[columns], axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_lengths_that_are_compiled_in() -> None:
    spmm, sddmm = (effects.Usage.of(decode(program)) for program in (ops.spmm(), ops.sddmm()))
    rows = lambda length: {"b": np.zeros((5, length)), "x": np.zeros((5, length))}  # noqa: E731
    lengths = (0, 1, 2, 17, 64, 65)
    assert [n for n in lengths if defaults.narrow_sizes(spmm, rows(n))] == [2, 17, 64]
    assert [n for n in lengths if defaults.narrow_sizes(sddmm, rows(n))] == [2, 17, 64]
    assert defaults.narrow_sizes(spmm, rows(8)) == {"feat": 8}
    assert not defaults.narrow_sizes(effects.Usage.of(decode(ops.spmv())), {"x": np.zeros(5)})
    assert not defaults.narrow_sizes(spmm, {})
    assert [defaults.least_power(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert defaults.narrow_tile(spmm, rows(17)) == {"tile": 32}
    assert defaults.narrow_tile(sddmm, rows(8)) == {"tile": 8}


def test_a_length_that_vectors_do_not_run_along_decides_no_tile() -> None:
    """Eight heads are compiled in, but rows of 64 features are read by vectors of their own width."""
    func = sparsetir.parse("""
@T.prim_func
def heads(indptr: T.handle, indices: T.handle, a: T.handle, b: T.handle, c: T.handle,
          m: T.int64, n: T.int64, nnz: T.int64, h: T.int64):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    H = T.dense_fixed(h)
    K = T.dense_fixed(64)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (N, H, K), "float32")
    C = T.match_sparse_buffer(c, (I, H, K), "float32")
    with T.sp_iter([I, J, H, K], "SRSS", "heads") as [i, j, h0, k]:
        with T.init():
            C[i, h0, k] = 0.0
        C[i, h0, k] = C[i, h0, k] + A[i, j] * B[j, h0, k]
""")
    usage, arrays = effects.Usage.of(decode(func)), {"b": np.zeros((5, 8, 64)), "c": np.zeros((4, 8, 64))}
    assert defaults.narrow_sizes(usage, arrays) == {"h": 8}
    assert defaults.narrow_tile(usage, arrays) == {}


def built(op: str) -> Kernel:
    return sparsetir.build(getattr(ops, op)())


@pytest.mark.parametrize("length", [1, 3, 17])
@pytest.mark.parametrize("op", ["spmm", "sddmm", "linear", "linear of graphs"])
def test_lengths_that_are_compiled_in_stay_within_arrays(op: str, length: int) -> None:
    """Also where the sizes of a program are of 64 bits, and where results are written one column after the other."""
    kernel = kernel_of_graphs("linear", "float32", "int32", FEATURES, False) if "graph" in op else built(op)
    program, fences, rng = kernel.signature.program, Fences(), np.random.default_rng(length)
    A = sp.random_array((6, 7), density=0.5, format="csr", dtype="float32", rng=rng)
    X, Y = (rng.standard_normal((m, length), dtype="float32") for m in A.shape)
    rows, columns = A.tocoo().coords
    dots = (A.data * np.sum(X[rows] * Y[columns], axis=1)).astype("float32")
    result = dots if op == "sddmm" else np.ascontiguousarray(A @ Y if op == "spmm" else (A @ Y).T)
    operands = {"spmm": [Y], "sddmm": [X, Y]}.get(op, [np.ascontiguousarray(Y.T)])
    structure = [a.astype("int32") for a in (A.indptr, A.indices)]
    values = [*structure, A.data, *operands] if "graph" in op else [A.data, *operands, None, *structure]
    arrays = iter(fences.fenced(np.zeros_like(result) if v is None else v) for v in [*values, None])
    scalars = {"m": 6, "i_size": 6, "n": 7, "nnz": A.nnz} | dict.fromkeys(("feat", "batch", "k_size"), length)
    names = [str(p.name) for p in program.func.params]
    passed = [scalars[n] if n in scalars else next(arrays) for n in names]
    (size,) = (name for name in effects.free_sizes(program))
    run = variant(kernel.compiled, sizes={size: length}, tile=defaults.least_power(length), chunks=0)
    run(*passed)
    (written,) = (a for n, a in zip(names, passed, strict=True) if n in kernel.signature.effects.written)
    np.testing.assert_allclose(written, result, rtol=1e-4, atol=1e-4)


def test_panels_where_the_private_cache_is_far_faster_than_what_is_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a virtual Xeon rows from beyond the second level take several times as long; on a Zen 4 they do not."""
    used = effects.Usage.of(decode(ops.spmm()))

    def panel(A: Any, features: int, mcpu: str) -> int:
        monkeypatch.setattr(defaults, "private_cache", lambda: 1 << 20)
        arrays = {"a": A.data, "b": np.zeros((A.shape[1], features), "f"), "indptr": A.indptr, "indices": A.indices}
        results = [np.zeros((A.shape[0], features), "f")]
        return defaults.estimated_panel(used, arrays, results, lambda: shipped_profile(mcpu))

    many, few = scattered(8000, 8000, 300_000), scattered(8000, 8000, 20_000)
    assert panel(many, 256, "sapphirerapids") in (32, 64)
    assert [panel(many, features, "sapphirerapids") for features in (8, 16)] == [0, 0]  # no wider than two panels
    assert panel(few, 256, "sapphirerapids") == 0  # copying the operand takes longer than reading it
    assert panel(many, 256, "znver4") == 0
    assert panel(scattered(8000, 8000, 0), 256, "sapphirerapids") == 0


def test_panels_on_the_points_of_a_xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate takes panels that were measured to be fast, on a machine of which only points are at hand."""
    data = Path(os.environ.get("SPARSETIR_DATA", ""))
    measured = data / "machines" / "intel_spmm_choices.json"
    if not os.environ.get("SPARSETIR_DATA") or not measured.is_file():
        pytest.skip("SPARSETIR_DATA has no measured points")
    files = {entry["name"]: data / entry["file"] for entry in json.loads((data / "MANIFEST.json").read_text())["files"]}
    monkeypatch.setattr(defaults, "private_cache", lambda: 2 << 20)
    used, shares = effects.Usage.of(decode(ops.spmm())), []
    for case, row in json.loads(measured.read_text())["rows"].items():
        name, features = case.split("/")
        packed = files[name].read_bytes()
        A = sp.load_npz(io.BytesIO(lzma.decompress(packed) if files[name].suffix == ".xz" else packed)).tocsr()
        B, C = (np.zeros((n, int(features)), "f") for n in (A.shape[1], A.shape[0]))
        arrays = {"a": A.data, "b": B, "indptr": A.indptr, "indices": A.indices}
        panel = defaults.estimated_panel(used, arrays, [C], lambda: shipped_profile("sapphirerapids"))
        speedups = {key: speedup for key, speedup in row["speedup"].items() if key != "default"}
        of_panel = [s for k, s in speedups.items() if panel and json.loads(k).get("panel") == panel]
        shares.append((row["speedup"]["default"], max(of_panel, default=row["speedup"]["default"]), *speedups.values()))
    default, chosen, best = (np.array([f(share) for share in shares]) for f in (lambda s: s[0], lambda s: s[1], max))
    before, after = (float(np.exp(np.mean(np.log(speedup / best)))) for speedup in (default, chosen))
    print(f"share of the best choice: {before:.3f} by default, {after:.3f} with estimated panels")
    assert len(shares) == 36
    assert after > before + 0.08
    assert np.min(chosen / default) > 0.9
