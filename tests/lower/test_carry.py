# SPDX-License-Identifier: Apache-2.0
"""Rows that are split among chunks: the numbers stay those of whole rows, whatever the rows are like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import tirx

import sparsetir
from fences import fenced
from sparsetir.codegen.cache import variant
from sparsetir.errors import ScheduleError
from sparsetir.ir import effects
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import decode
from sparsetir.lower import TO_STAGE_2, TO_STAGE_3, as_module, run
from sparsetir.lower.annotations import CARRY, INDPTR
from sparsetir.lower.rows.partition import RowParts, SplitMergePath, Unsplittable
from sparsetir.schedules import Choices, defaults, schedule
from sparsetir.schedules.registers import OwnSums
from sparsetir.workloads import suite

CHUNKS = (1, 2, 3, 7, 16, 64)
FAMILIES = suite.families()


def carrying(name: str, dtype: str = "float32", idtype: str = "int32", **choices: int) -> Any:
    """A ready program whose rows are split."""
    func = getattr(sparsetir.ops, name)(dtype, idtype=idtype)
    return sparsetir.build(func, schedule=Choices(carry=1, **choices))


def is_split(kernel: Any) -> bool:
    """Whether the loops keep what a chunk has of a row that goes on."""
    return "owner = T.alloc_buffer" in kernel.script(stage=3)


def drawn(rng: np.random.Generator, dtype: str) -> sp.csr_array:
    """A matrix of a random shape, its row lengths from one of several distributions; small whole numbers."""
    m, n = (int(x) for x in rng.integers(1, 60, 2))
    kind = rng.integers(0, 5)
    lengths = np.zeros(m, np.int64)
    if kind == 0:
        lengths[rng.integers(0, m)] = n  # one row has everything
    elif kind == 1:
        lengths = rng.integers(0, n + 1, m)
    elif kind == 2:
        lengths = np.minimum(rng.zipf(1.5, m), n)
    elif kind == 3:
        lengths = (rng.random(m) < 0.2) * n  # empty and full rows
    else:
        lengths[[0, m - 1]] = n  # the first and the last
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    indices = np.concatenate([np.sort(rng.permutation(n)[:k]) for k in lengths])
    values = rng.integers(-4, 5, indices.size).astype(dtype)
    return sp.csr_array((values, indices.astype(np.int64), indptr), shape=(m, n))


def indexed(matrix: sp.csr_array, idtype: str) -> sp.csr_array:
    """The same with index arrays of a type."""
    parts = matrix.data, matrix.indices.astype(idtype), matrix.indptr.astype(idtype)
    return sp.csr_array(parts, shape=matrix.shape)


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small whole numbers, whose sums are exact in any order."""
    return rng.integers(-4, 5, shape).astype(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "idtype"), [("float64", "int32"), ("float32", "int64")])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_spmv_of_random_row_lengths(chunks: int, dtype: str, idtype: str) -> None:
    kernel = carrying("spmv", dtype, idtype, chunks=chunks)
    assert is_split(kernel)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        A = indexed(drawn(rng, dtype), idtype)
        x = whole(rng, A.shape[1:], dtype)
        np.testing.assert_array_equal(kernel(A=A, x=x), A @ x)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "idtype"), [("float32", "int32"), ("float64", "int64")])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_spmm_of_random_row_lengths(chunks: int, dtype: str, idtype: str) -> None:
    kernel = carrying("spmm", dtype, idtype, chunks=chunks, tile=16, unroll=2, prefetch=4)
    assert is_split(kernel)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        A = indexed(drawn(rng, dtype), idtype)
        B = whole(rng, (A.shape[1], int(rng.choice([1, 3, 8, 16, 37]))), dtype)
        np.testing.assert_array_equal(kernel(A=A, B=B), A @ B)


@pytest.mark.slow
@pytest.mark.shared(3)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_sddmm_needs_no_carry(chunks: int) -> None:
    kernel = carrying("sddmm", chunks=chunks)
    assert "start[0]" in kernel.script(stage=3)
    assert not is_split(kernel)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        A = indexed(drawn(rng, "float32"), "int32")
        X, Y = whole(rng, (A.shape[0], 19), "float32"), whole(rng, (A.shape[1], 19), "float32")
        rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
        found = kernel(S=A, X=X, Y=Y)
        np.testing.assert_array_equal(found.data, A.data * (X[rows] * Y[A.indices]).sum(1))


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], Any]:
    return {(name, chunks): carrying(name, chunks=chunks) for name in ("spmv", "spmm") for chunks in (2, 16)}


@pytest.mark.slow
@pytest.mark.shared(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, compiled: dict[tuple[str, int], Any]) -> None:
    A = FAMILIES[family](size="small", seed=0)
    rng = np.random.default_rng(1)
    B = rng.standard_normal((A.shape[1], 33), np.float32)
    exact, size = A.astype("float64"), abs(A.astype("float64"))
    for (name, chunks), kernel in compiled.items():
        operand = B[:, 0].copy() if name == "spmv" else B
        found = kernel(A=A, **{"x" if name == "spmv" else "B": operand})
        error = abs(found - exact @ operand.astype("float64"))
        # A sum in float32 is off by less than its terms' sizes times the rounding unit times a few.
        assert (error <= 1e-4 * (size @ abs(operand.astype("float64"))) + 1e-30).all(), (name, chunks)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 40), (7, 3)], ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 64])
def test_degenerate_matrices(shape: tuple[int, int], chunks: int) -> None:
    spmv, spmm = carrying("spmv", chunks=chunks), carrying("spmm", chunks=chunks)
    for density in (0.0, 1.0):
        A = sp.csr_array(np.full(shape, density, np.float32))
        x, B = np.ones(shape[1], np.float32), np.ones((shape[1], 9), np.float32)
        np.testing.assert_array_equal(spmv(A=A, x=x), A @ x)
        np.testing.assert_array_equal(spmm(A=A, B=B), A @ B)
        assert spmm(A=A, B=B[:, :0]).shape == (shape[0], 0)


# ---------------------------------------------------------------------------------------------- other programs

ROWS = """
@T.prim_func
def rows(a: T.handle, y_data: T.handle, w_data: T.handle, indptr: T.handle, indices: T.handle,
         m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    A = T.match_sparse_buffer(a, (I, J), "{dtype}")
    y = T.match_sparse_buffer(y_data, (I,), "{dtype}")
    w = T.match_sparse_buffer(w_data, (I,), "{dtype}")
    with T.sp_iter([I, J], "SR", "rows") as [i, j]:
{init}
        y[i] = {update}
"""


def rows(update: str, init: str | None, dtype: str = "float32", chunks: int = 7) -> Any:
    """A reduction of every row of a matrix."""
    start = "" if init is None else f"        with T.init():\n            y[i] = {init}"
    text = ROWS.format(update=update, init=start, dtype=dtype)
    return sparsetir.build(sparsetir.parse(text), schedule=Choices(carry=1, chunks=chunks))


REDUCTIONS = {
    "old value counts": ("y[i] + A[i, j]", None, lambda row, w, y: y + row.sum()),
    "starts elsewhere": ("y[i] + A[i, j]", "w[i]", lambda row, w, y: w + row.sum()),
    "starts at a number": ("A[i, j] * w[i] + y[i]", "3", lambda row, w, y: 3 + w * row.sum()),
    "max": ("T.max(y[i], A[i, j])", "-2", lambda row, w, y: max([-2, *row])),
    "max of negative numbers": ("T.max(y[i], w[i] * A[i, j])", "-99", lambda row, w, y: max([-99, *(w * row)])),
    "min": ("T.min(y[i], A[i, j])", "w[i]", lambda row, w, y: min([w, *row])),
}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_other_reductions(name: str, dtype: str) -> None:
    update, init, want = REDUCTIONS[name]
    kernel = rows(update, init, dtype)
    assert is_split(kernel)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        A = indexed(drawn(rng, dtype), "int32")
        w, y = whole(rng, A.shape[:1], dtype), whole(rng, A.shape[:1], dtype)
        parts = [A.data[a:b] for a, b in zip(A.indptr, A.indptr[1:], strict=False)]
        expected = [want(row, *pair) for row, pair in zip(parts, zip(w, y, strict=True), strict=True)]
        kernel(A=A, w=w, y=y)
        np.testing.assert_array_equal(y, np.array(expected, dtype))


@pytest.mark.parametrize("update", ["y[i] * T.float32(0.5) + A[i, j]", "A[i, j]", "y[i] + A[i, j] * (w[i] + y[i])"])
def test_recurrences_keep_whole_rows(update: str) -> None:
    kernel = rows(update, "0")
    assert "start[0]" not in kernel.script(stage=3)
    A = sp.csr_array(np.arange(12, dtype=np.float32).reshape(3, 4) + 1)
    w, y = np.ones(3, np.float32), np.zeros(3, np.float32)
    found = kernel(A=A, w=w)
    for value in A.toarray().T:
        y = {"A[": value, "y[i] *": y * 0.5 + value, "y[i] +": y + value * (w + y)}[
            next(k for k in ("A[", "y[i] *", "y[i] +") if update.startswith(k))
        ]
    np.testing.assert_allclose(found, y, rtol=1e-6)


@pytest.mark.parametrize("format", ["csc", "dcsr", "ell", "bsr", "coo"])
def test_other_formats_give_the_same_numbers(format: str) -> None:
    func = sparsetir.ops.spmm(format=format)
    kernel, split = sparsetir.build(func), sparsetir.build(func, schedule=Choices(carry=1, chunks=7))
    rng = np.random.default_rng(3)
    A = indexed(drawn(rng, "float32"), "int32")
    assert "start[0]" in split.script(stage=3) if format == "bsr" else not is_split(split)
    stored = sp.bsr_array((whole(rng, (9, 4, 4), "float32"), np.arange(9) % 5, [0, 0, 1, 6, 6, 9]), shape=(20, 20))
    if format == "bsr":
        B = whole(rng, (5, 4, 21), "float32")
        np.testing.assert_array_equal(split(A=stored, B=B), kernel(A=stored, B=B))
    elif format in ("csc", "coo"):
        B = whole(rng, (A.shape[1], 21), "float32")
        np.testing.assert_array_equal(split(A=A.asformat(format), B=B), A @ B)


RAGGED = """
@T.prim_func
def ragged(a: T.handle, x_data: T.handle, y_data: T.handle, indptr: T.handle,
           m: T.int32, longest: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_variable(I, (longest, nnz), indptr, "{idtype}")
    K = T.dense_fixed(longest)
    A = T.match_sparse_buffer(a, (I, J), "{dtype}")
    x = T.match_sparse_buffer(x_data, (K,), "{dtype}")
    y = T.match_sparse_buffer(y_data, (I,), "{dtype}")
    with T.sp_iter([I, J], "SR", "ragged") as [i, j]:
        with T.init():
            y[i] = 0
        y[i] = y[i] + A[i, j] * x[j]
"""


@pytest.mark.parametrize(("dtype", "idtype"), [("float32", "int32"), ("float64", "int64")])
def test_parts_of_ragged_rows_count_their_entries_from_the_begin_of_the_row(dtype: str, idtype: str) -> None:
    """The coordinate of an entry of a dense ragged axis is its number in the row, wherever its chunk begins."""
    kernel = sparsetir.build(
        sparsetir.parse(RAGGED.format(dtype=dtype, idtype=idtype)), schedule=Choices(carry=1, chunks=7)
    )
    assert is_split(kernel)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        indptr = drawn(rng, dtype).indptr.astype(idtype)
        values = whole(rng, (int(indptr[-1]),), dtype)
        lengths = np.diff(indptr)
        x = whole(rng, (int(lengths.max()),), dtype)
        numbers = np.arange(values.size) - np.repeat(indptr[:-1], lengths)
        want = np.bincount(np.repeat(np.arange(lengths.size), lengths), values * x[numbers], lengths.size)
        np.testing.assert_array_equal(kernel(A=values, x=x, indptr=indptr), want.astype(dtype))


# ---------------------------------------------------------------------------------------------- the pass and the choice


def shared_loop(func: tirx.PrimFunc) -> tuple[list[tirx.For], set[str]]:
    """The loops of a program that are to be split when the pass sees them, and its row pointers."""
    mod = schedule(run(TO_STAGE_2, as_module(func)), Choices(carry=1)).mod
    lowered = run(TO_STAGE_3[: TO_STAGE_3.index(SplitMergePath)], mod)
    main = next(iter(lowered.functions.values()))
    return [f for f in collect(main.body, tirx.For) if CARRY in f.annotations], {str(n) for n in main.attrs[INDPTR]}


def test_refusals_say_why() -> None:
    (loop,), pointers = shared_loop(sparsetir.ops.spmv())
    RowParts(loop, pointers)
    with pytest.raises(Unsplittable, match="the entries of a row are not those between two row pointers"):
        RowParts(loop, set())
    text = ROWS.format(update="y[i] * A[i, j]", init="", dtype="float32")
    (loop,), pointers = shared_loop(sparsetir.parse(text))
    with pytest.raises(Unsplittable, match="y_data is no sum, maximum or minimum of terms"):
        RowParts(loop, pointers)


def test_the_choice_is_checked() -> None:
    with pytest.raises(ScheduleError, match="carry: expected 0 or 1, got 2"):
        Choices(carry=2)


# ---------------------------------------------------------------------------------------------- untuned


@pytest.mark.parametrize("seed", range(20))
def test_longer_rows_are_found(seed: int) -> None:
    indptr = drawn(np.random.default_rng(seed), "float32").indptr
    longest = int(np.diff(indptr).max())
    for length in {1, longest // 2, longest - 1, longest, longest + 1} - {0, -1}:
        assert effects.has_longer_row(indptr, length) is (longest > length)


def test_only_clearly_longer_rows_are_split() -> None:
    pointers = effects.row_pointers(decode(sparsetir.ops.spmm()))
    assert pointers == ["indptr"]
    lengths = np.full(1000, 10)
    for longest, threads, wanted in [(10, 2, False), (9000, 2, False), (40000, 2, True), (40000, 1, False)]:
        lengths[7] = longest
        indptr = np.concatenate(([0], np.cumsum(lengths)))
        assert defaults.suits_carry(pointers, {"indptr": indptr}, threads) is wanted
    assert not defaults.suits_carry(pointers, {"indptr": np.zeros(1, np.int64)}, 2)
    assert not defaults.suits_carry(pointers, {"indptr": np.zeros(9, np.int64)}, 2)


@pytest.mark.parametrize(("gathers", "chosen"), [(False, {"carry": 1, "lanes": 4}), (True, {"carry": 1})])
def test_untuned_kernels_split_a_giant_row(
    monkeypatch: pytest.MonkeyPatch, gathers: bool, chosen: dict[str, int]
) -> None:
    monkeypatch.setattr(OwnSums, "of", lambda _target: OwnSums(gathers))
    asked: list[dict[str, int]] = []
    kernel = sparsetir.build(sparsetir.ops.spmv())
    note = lambda compiled, *sizes, **changes: asked.append(changes) or variant(compiled, *sizes, **changes)  # noqa: E731
    monkeypatch.setattr("sparsetir.runtime.kernel.variant", note)
    monkeypatch.setattr(defaults, "get_num_threads", lambda: 2)
    rng = np.random.default_rng(0)
    dense = whole(rng, (1, 100_000), "float32")
    A = sp.csr_array(sp.vstack([sp.csr_array((5, 100_000), dtype=np.float32), sp.csr_array(dense)]))
    A.indices, A.indptr = A.indices.astype(np.int32), A.indptr.astype(np.int32)
    x = whole(rng, (100_000,), "float32")
    bound, want = kernel.bind(A=A), A @ x
    for _ in range(4):
        np.testing.assert_array_equal(bound(x=x), want)
    assert asked == [chosen]


def test_rows_without_an_element_of_the_result_are_left_alone() -> None:
    """A chunk that ends within the entries of an absent row has nothing to add, and nowhere to add it."""
    func = sparsetir.parse("""
@T.prim_func
def sums(a: T.handle, f: T.handle, ix: T.handle, px: T.handle, iy: T.handle,
         n: T.int32, w: T.int32, k: T.int32, z: T.int32):
    X = T.sparse_fixed(None, (n, w), ix, "int32")
    Y = T.sparse_variable(X, (k, z), (px, iy), "int32")
    D = T.dense_fixed(n, "int32")
    A = T.match_sparse_buffer(a, (X, Y), "float32")
    F = T.match_sparse_buffer(f, (D,), "float32")
    with T.sp_iter([X, Y], "SR", "sums") as [x, y]:
        F[x] = F[x] + A[x, y]
""")
    kernel = sparsetir.build(func, schedule=Choices(carry=1, chunks=3))
    assert is_split(kernel)
    for places in ([1, 1], [0, 1], [0, 2]):
        n = 1 if places[0] else 2
        absent = [place if place < n else n for place in places]
        f = fenced(np.full(n, 2, np.float32))
        indptr, indices = np.array([0, 1, 5], np.int32), np.array([0, 0, 1, 2, 3], np.int32)
        kernel(A=np.ones(5, np.float32), F=f, ix=np.array(absent, np.int32), px=indptr, iy=indices, n=n, k=4)
        want = np.full(n, 2, np.float32)
        for place, count in zip(absent, (1, 4), strict=True):
            want[place : place + 1] += count
        np.testing.assert_array_equal(f, want)
