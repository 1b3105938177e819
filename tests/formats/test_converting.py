# SPDX-License-Identifier: Apache-2.0
"""Matrices that are converted where many calls were announced."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import share
from sparsetir import formats
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats import Entries, heuristics
from sparsetir.formats.diagonals import slice_diagonals
from sparsetir.ir.views import decode
from sparsetir.runtime import adaptive
from sparsetir.schedules import Choices
from sparsetir.workloads.suite import families

MANY = 10**9


def blocks(size: int, rows: int = 240) -> Any:
    """Dense blocks at random places."""
    mask = sp.random_array((rows // size, rows // size), density=0.1, rng=np.random.default_rng(size))
    return sp.kron(mask, np.ones((size, size)), format="csr").astype(np.float32)


def short_rows() -> Any:
    """Enough of them that a processor does not learn their lengths, in no order that shows."""
    grid = families()["stencil_2d"]("medium")
    order = np.random.default_rng(0).permutation(grid.shape[0])
    return sp.csr_array(grid[order][:, order])


@pytest.mark.parametrize(("size", "wanted"), [(1, None), (2, 2), (3, 3), (4, 4)])
def test_dense_blocks(size: int, wanted: int | None) -> None:
    found = heuristics.choose_format(decode(sparsetir.ops.spmm()), blocks(size), {"B": (240, 32)})
    assert (found and found.format) == (wanted and formats.bsr(wanted, wanted))


def test_short_rows_of_a_matrix_times_a_vector() -> None:
    program, A = decode(sparsetir.ops.spmv()), short_rows()
    found = heuristics.choose_format(program, A, {"x": (A.shape[1],)})
    assert found is not None
    assert found.format == formats.sell(16, 1024)
    assert (
        heuristics.choose_format(program, families()["uniform"]("small")[:50], {"x": (1250,)}) is None
    )  # too little of it
    ends = np.cumsum(np.where(np.arange(40_000) % 10 == 0, 40, 0), dtype=np.int32)
    skewed = sp.csr_array((np.ones(ends[-1], "float32"), np.arange(ends[-1], dtype=np.int32) % 1000, [0, *ends]),
                          shape=(40_000, 1000))  # fmt: skip
    assert skewed.nnz / skewed.shape[0] == 4
    found = heuristics.choose_format(program, skewed, {"x": (1000,)})
    assert found is not None
    assert found.format == formats.sell(8, 1024)  # fuller than slices of 16
    powers = np.random.default_rng(0).zipf(2.2, 40_000).clip(max=1000)
    ends = np.cumsum(powers, dtype=np.int32)
    uneven = sp.csr_array((np.ones(ends[-1], "float32"), np.arange(ends[-1], dtype=np.int32) % 1000, [0, *ends]),
                          shape=(40_000, 1000))  # fmt: skip
    found = heuristics.choose_format(program, uneven, {"x": (1000,)})
    assert found is not None
    assert found.format == formats.sell(8, 8192)  # of rows of like length from further away
    assert heuristics.choose_format(program, families()["giant_row"]("medium"), {"x": (500_000,)}) is None
    hub = sp.csr_array((np.ones(70_000, "float32"), np.arange(70_000, dtype=np.int32), [0, 70_000, *[70_000] * 19_999]),
                       shape=(20_000, 70_000))  # fmt: skip
    assert heuristics.choose_format(program, hub, {"x": (70_000,)}) is None


@pytest.mark.parametrize(("cache", "wanted"), [(1 << 20, None), (1 << 10, formats.sell(16, 1024))])
def test_longer_rows_are_summed_side_by_side_where_vectors_are_far(
    cache: int, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = sp.random_array((2000, 4000), density=40 / 4000, format="csr", dtype="float32", rng=np.random.default_rng(0))
    monkeypatch.setattr(heuristics, "private_cache", lambda: cache)
    found = heuristics.choose_format(decode(sparsetir.ops.spmv()), A, {"x": (4000,)})
    assert (found and found.format) == wanted


@pytest.mark.parametrize("name", ["stencil_2d", "stencil_3d"])
def test_grids_are_summed_on_diagonals(name: str) -> None:
    program, A = decode(sparsetir.ops.spmv()), families()[name]("medium")
    found = heuristics.choose_format(program, A, {"x": (A.shape[1],)})
    assert found is not None
    assert found.format == formats.hdia(16)
    few = heuristics.choose_format(program, A, {"x": (A.shape[1],)}, calls=found.calls - 1)
    assert few is not None
    assert few.format == formats.sell(16, 1024)


@pytest.mark.parametrize("rows", [8, 16])
def test_diagonals_of_slices_are_summed_in_vectors(rows: int) -> None:
    """LLVM gathers what lies side by side from registers of 512 bits, where the loops leave it the choice."""
    program = sparsetir.decompose_format(sparsetir.ops.spmv(), {"A": formats.hdia(rows)})
    script = sparsetir.build(program).script(stage=3)
    whole, partly = script.partition("for s_main_slice_diagonals")[2].partition("else:")[::2]
    assert whole.count(f"in T.vectorized({rows})") == 2
    assert "T.vectorized" not in partly.partition("for s_rest")[0]


def test_an_arrow_stays_in_rows() -> None:
    """Its diagonal could be apart, but the slices of the rest hold little beside its long row."""
    n = 200_000
    arrow = sp.csr_array(sp.vstack([np.ones((1, n), "float32"), sp.eye_array(n, dtype="float32", format="csr")[1:]]))
    assert slice_diagonals(Entries.of_rows(arrow.shape, arrow.indptr, arrow.indices), 16, 0.5)[0] > 0.3
    assert heuristics.choose_format(decode(sparsetir.ops.spmv()), arrow, {"x": (n,)}) is None


def test_similar_rows_are_looked_for_if_grouping_them_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    program, A = decode(sparsetir.ops.spmm()), families()["copied_rows"]("small")
    found = heuristics.choose_format(program, A, {"B": (A.shape[1], 32)})
    assert found is not None
    assert found.format == formats.row_groups(4)
    monkeypatch.setattr(heuristics, "group_gain", lambda *_args: pytest.fail("looked"))
    assert heuristics.choose_format(program, A, {"B": (A.shape[1], 32)}, calls=found.calls - 1) is None


def test_converting_has_to_pay() -> None:
    A, B = blocks(4), np.ones((240, 64), np.float32)
    for calls, is_converted in ((1, False), (MANY, True)):
        bound = sparsetir.build(sparsetir.ops.spmm(), expected_calls=calls).bind(A=A)
        np.testing.assert_allclose(bound(B=B), A @ B, rtol=1e-5)
        assert (bound.over_another is not None) is is_converted
        assert ("bsr" in repr(bound)) is is_converted
        assert bound.time(B=B, seconds=0.01).calls >= 3


@pytest.mark.parametrize(("family", "op"), share(product(families(), ["spmm", "spmv", "sddmm"]), 2))
def test_results_stay_what_they_are(family: str, op: str) -> None:
    A, rng = families()[family]("small"), np.random.default_rng(0)
    bound = sparsetir.build(getattr(sparsetir.ops, op)(), expected_calls=MANY).bind(
        **{"S" if op == "sddmm" else "A": A}
    )
    x, y = rng.standard_normal((A.shape[1], 16), np.float32), rng.standard_normal((A.shape[0], 16), np.float32)
    for _ in range(2):
        if op == "spmm":
            np.testing.assert_allclose(bound(B=x), A.astype("float64") @ x, rtol=1e-3, atol=1e-3)
        elif op == "spmv":
            vector = np.ascontiguousarray(x[:, 0])
            np.testing.assert_allclose(bound(x=vector), A.astype("float64") @ vector, rtol=1e-3, atol=1e-3)
        else:
            rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
            want = A.data * np.einsum("ek,ek->e", y[rows].astype("float64"), x[A.indices].astype("float64"))
            np.testing.assert_allclose(bound(X=y, Y=x).data, want, rtol=1e-3, atol=1e-3)


def test_later_calls_go_straight_to_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    A, rng = families()["stencil_2d"]("small"), np.random.default_rng(0)
    bound = sparsetir.build(sparsetir.ops.spmv(), expected_calls=MANY).bind(A=A)
    vectors = [rng.standard_normal(A.shape[1], np.float32) for _ in range(4)]
    monkeypatch.setattr(adaptive, "SHORT_CALL", 10.0)  # seconds: the other format is kept without a trial
    for x in 2 * vectors[:3]:
        np.testing.assert_allclose(bound(x=x), A @ x, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(type(bound.over_another), "__call__", lambda *_args, **_named: pytest.fail("went the long way"))
    np.testing.assert_allclose(bound(x=vectors[3]), A @ vectors[3], rtol=1e-3, atol=1e-4)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="x"):
        bound(x=vectors[0][:-1])
    with pytest.raises(ArgumentTypeError, match="A is fixed by bind"):
        bound(A=A, x=vectors[0])
    out = np.zeros(A.shape[0], np.float32)
    for x in vectors:
        assert bound(x=x, y=out) is out
        np.testing.assert_allclose(out, A @ x, rtol=1e-3, atol=1e-4)
    other = bound.over_another
    other(x=vectors[0])
    monkeypatch.setattr(type(bound), "__call__", lambda *_args, **_named: pytest.fail("went the long way"))
    np.testing.assert_allclose(other(x=vectors[3]), A @ vectors[3], rtol=1e-3, atol=1e-4)
    monkeypatch.undo()
    np.testing.assert_allclose(bound(x=vectors[0]), A @ vectors[0], rtol=1e-3, atol=1e-4)


def test_what_was_asked_for_is_kept() -> None:
    A, B = blocks(4), np.ones((240, 64), np.float32)
    bound = sparsetir.build(sparsetir.ops.spmm(), schedule=Choices(tile=16), expected_calls=MANY).bind(A=A)
    bound(B=B)
    assert bound.over_another is None


@pytest.mark.parametrize("calls", [0, -1, 1.5, True])
def test_calls_are_a_number(calls: Any) -> None:
    with pytest.raises(ArgumentError, match="expected_calls: expected an integer of at least 1"):
        sparsetir.build(sparsetir.ops.spmm(), expected_calls=calls)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (6, 6)])
def test_nothing_stored(shape: tuple[int, int]) -> None:
    A = sp.csr_array(shape, dtype=np.float32)
    bound = sparsetir.build(sparsetir.ops.spmm(), expected_calls=MANY).bind(A=A)
    np.testing.assert_array_equal(bound(B=np.ones((shape[1], 8), np.float32)), np.zeros((shape[0], 8), np.float32))
    assert bound.over_another is None
