# SPDX-License-Identifier: Apache-2.0
"""Products and sums of sparse matrices on drawn inputs, judged entry by entry."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import FULL, on
from product_oracle import (
    DTYPES,
    SIZES,
    Entries,
    both,
    check,
    drawn,
    entries,
    magnitudes,
    pairs,
    plus,
    product_of,
    stored,
    times,
    union,
    values,
    wide,
)
from sparsetir.sparse_output import AccumulatorOptions, fast_paths, workspace
from sparsetir.sparse_output import kernel as assembled
from sparsetir.sparse_output.blocks import assembled_kernel
from sparsetir.sparse_output.result import ResultPattern, as_object
from sparsetir.workloads import suite


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """inf - inf is NaN without a word."""
    with np.errstate(all="ignore"):
        yield


# --- programs ---------------------------------------------------------------------------------------------

Case = tuple[Any, Entries, Entries, tuple[int, int]]
Program = Callable[[np.random.Generator, str], Case]


def sizes(rng: np.random.Generator, count: int) -> list[int]:
    return [int(n) for n in rng.choice(SIZES, count)]


def of_matmul(rng: np.random.Generator, dtype: str) -> Case:
    m, p, n = sizes(rng, 3)
    A, B = drawn(rng, m, p, dtype), drawn(rng, p, n, dtype)
    return sparsetir.matmul(A, B), *product_of(A, B), (m, n)


def of_square(rng: np.random.Generator, dtype: str) -> Case:
    (n,) = sizes(rng, 1)
    A = drawn(rng, n, n, dtype)
    return sparsetir.matmul(A, A), *product_of(A, A), (n, n)


def of_chain(rng: np.random.Generator, dtype: str) -> Case:
    shape = sizes(rng, 4)
    A, B, C = (drawn(rng, m, n, dtype) for m, n in itertools.pairwise(shape))
    return sparsetir.matmul(sparsetir.matmul(A, B), C), *product_of(A, B, C), (shape[0], shape[3])


def of_masked(rng: np.random.Generator, dtype: str) -> Case:
    m, p, n = sizes(rng, 3)
    A, B, M = drawn(rng, m, p, dtype), drawn(rng, p, n, dtype), drawn(rng, m, n, str(rng.choice(DTYPES)))
    mask, complement = entries(M), bool(rng.random() < 0.5)
    kept = ({at: v for at, v in of.items() if (at in mask) != complement} for of in product_of(A, B))
    return sparsetir.matmul(A, B, mask=M, complement=complement), *kept, (m, n)


def of_plan(rng: np.random.Generator, dtype: str) -> Case:
    m, p, n = sizes(rng, 3)
    A, B = drawn(rng, m, p, dtype), drawn(rng, p, n, dtype)
    plan = sparsetir.matmul_plan(A, B)
    for X in (A, B):
        X.data = values(rng, X.nnz, dtype)
    return plan(A, B), *product_of(A, B), (m, n)


def of_add(rng: np.random.Generator, dtype: str) -> Case:
    m, n = sizes(rng, 2)
    A, B = drawn(rng, m, n, dtype), drawn(rng, m, n, dtype)
    a, b, zero = entries(A), entries(B), wide(np.zeros(1, dtype))[0]
    alpha, beta = (1, 1) if dtype == "bool" else (int(x) for x in rng.integers(-2, 3, 2))
    weighed = [{at: times(wide(np.full(1, w, dtype))[0], v) for at, v in X.items()} for w, X in ((alpha, a), (beta, b))]
    scale = union(*map(magnitudes, weighed), plus, zero)
    return sparsetir.add(A, B, alpha=alpha, beta=beta), union(*weighed, plus, zero), scale, (m, n)


def of_subtract(rng: np.random.Generator, dtype: str) -> Case:
    m, n = sizes(rng, 2)
    A, B = drawn(rng, m, n, dtype), drawn(rng, m, n, dtype)
    a, b, zero = entries(A), entries(B), wide(np.zeros(1, dtype))[0]
    scale = union(magnitudes(a), magnitudes(b), plus, zero)
    return sparsetir.subtract(A, B), union(a, b, lambda x, y: x - y, zero), scale, (m, n)


def of_multiply(rng: np.random.Generator, dtype: str) -> Case:
    m, n = sizes(rng, 2)
    A, B = drawn(rng, m, n, dtype), drawn(rng, m, n, dtype)
    a, b = entries(A), entries(B)
    return sparsetir.multiply(A, B), both(a, b), both(magnitudes(a), magnitudes(b)), (m, n)


def compared(A: sp.csr_array) -> sp.csr_array:
    """Without NaN, of which no maximum is defined."""
    A.data[A.data != A.data] = 1
    return A


def of_maximum(rng: np.random.Generator, dtype: str) -> Case:
    m, n = sizes(rng, 2)
    A, B = (compared(drawn(rng, m, n, dtype)) for _ in range(2))
    a, b, zero = entries(A), entries(B), wide(np.zeros(1, dtype))[0]
    expected = union(a, b, np.maximum, zero)
    return sparsetir.maximum(A, B), expected, magnitudes(expected), (m, n)


def whole(rng: np.random.Generator, A: sp.csr_array) -> sp.csr_array:
    """Small whole numbers, whose sums are exact in any order."""
    A.data = rng.integers(-4, 5, A.nnz).astype(A.dtype)
    return A


def of_rap(rng: np.random.Generator, dtype: str) -> Case:
    c, n = sizes(rng, 2)
    R, A, P = (whole(rng, M) for M in (drawn(rng, c, n, dtype), drawn(rng, n, n, dtype), drawn(rng, n, c, dtype)))
    return sparsetir.rap(R, A, P), *product_of(R, A, P), (c, c)


def of_top(rng: np.random.Generator, dtype: str) -> Case:
    """Of equal values those in the first columns stay."""
    m, p, n = sizes(rng, 3)
    A, B = whole(rng, drawn(rng, m, p, dtype)), whole(rng, drawn(rng, p, n, dtype))
    top = [None, 1, 2, 3, 50][rng.integers(5)]
    above = [None, 0, -1 if dtype == "bool" else 2][rng.integers(3)]
    exact, scale = product_of(A, B)
    kept: Entries = {}
    for row in range(m):
        found = [(-int(v), j) for (i, j), v in exact.items() if i == row and (above is None or v > above)]
        kept |= {(row, j): exact[row, j] for _, j in sorted(found)[:top]}
    return sparsetir.matmul(A, B, top=top, threshold=above), kept, {at: scale[at] for at in kept}, (m, n)


PROGRAMS: dict[str, Program] = {
    "matmul": of_matmul,
    "square": of_square,
    "chain": of_chain,
    "masked": of_masked,
    "plan": of_plan,
    "add": of_add,
    "subtract": of_subtract,
    "multiply": of_multiply,
    "maximum": of_maximum,
    "rap": of_rap,
    "top": of_top,
}


# numpy has no difference of bools.
LEFT_OUT = {(of_subtract, "bool")}


def judge(program: Program, seed: int, count: int, dtypes: tuple[str, ...] = DTYPES) -> None:
    """Run a program on drawn inputs of each dtype."""
    for dtype in dtypes:
        for rng, n in pairs(seed, count):
            if (program, dtype) in LEFT_OUT:
                continue
            with on((dtype, n)):
                found, expected, scale, shape = program(rng, dtype)
                check(found, expected, scale, shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_drawn_inputs(name: str, request: pytest.FixtureRequest) -> None:
    """One test, so that one process compiles the kernels of all dtypes."""
    judge(PROGRAMS[name], 1, 6)
    if not request.config.getoption("--quick"):
        judge(PROGRAMS[name], 2, 50 if FULL else 9)


# --- ways through -----------------------------------------------------------------------------------------


WAYS = {
    "small, two threads": {},
    "at once": {},
    "at once, two threads": {"SERIAL_WORK": -1},
    "counted first": {"ROOMY_BYTES": -1},
    "counted first, two threads": {"ROOMY_BYTES": -1, "SERIAL_WORK": -1},
}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["matmul", "masked", "add", "multiply", "plan", "top"])
def test_all_ways_agree(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large inputs go through, on small ones."""
    if way.startswith("small"):
        monkeypatch.setattr(fast_paths, "SHARED_WORK", -1)
    else:
        monkeypatch.setattr(fast_paths, "limits", lambda: (-1, -1))
    for limit, value in WAYS[way].items():
        monkeypatch.setattr(assembled, limit, value)
    judge(PROGRAMS[name], 3, 40 if FULL else 15, ("float32", "int32"))


def by_scipy(A: sp.csr_array, B: sp.csr_array) -> sp.csr_array:
    """Of positive numbers, so that scipy drops nothing."""
    found = A @ B
    found.sort_indices()
    return found


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("n", [63, 64, 65, 4096, 4097, 65_536, 65_537, 300_000])
def test_widths_around_words(n: int, idtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all lengths: short, long, the first and the last column."""
    rng = np.random.default_rng(n)
    lengths = [0, 1, 24, 25, min(n, 2000), 3]
    columns = [np.sort(rng.choice(n, length, replace=False)) for length in lengths]
    columns[1] = np.array([n - 1])
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    B = sp.csr_array((rng.random(indptr[-1]) + 0.5, np.concatenate(columns), indptr), shape=(len(lengths), n))
    A = sp.csr_array(rng.random((40, len(lengths))) * (rng.random((40, len(lengths))) < 0.5))
    for M in (A, B):
        M.indptr, M.indices = M.indptr.astype(idtype), M.indices.astype(idtype)
    found, expected = sparsetir.matmul(A, B), by_scipy(A, B)
    assert np.array_equal(found.indptr, expected.indptr)
    assert np.array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.data, expected.data)
    for limit, value in (("SHARED_WORK", -1), ("limits", lambda: (-1, -1))):
        monkeypatch.setattr(fast_paths, limit, value)
        shared = sparsetir.matmul(A, B)
        for name in ("indptr", "indices", "data"):
            assert getattr(shared, name).tobytes() == getattr(found, name).tobytes()


def test_masks_of_wide_matrices_with_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash tables take the place of arrays that would be filled in each call; both find the same."""
    A = sp.random_array((400, 400), density=0.002, format="csr", rng=np.random.default_rng(0))
    expected = sparsetir.matmul(A, A, mask=A.T)
    monkeypatch.setattr(fast_paths, "limits", lambda: (-1, -1))
    monkeypatch.setattr(assembled, "KEPT_BYTES", 0)
    for most in (0, 1 << 30):
        monkeypatch.setattr(assembled, "HYPERSPARSE", most)
        found = sparsetir.matmul(A, A, mask=A.T)
        for name in ("indptr", "indices", "data"):
            assert getattr(found, name).tobytes() == getattr(expected, name).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["rmat", "giant_row", "copied_rows", "bipartite", "fem_blocks", "pruned_90"])
def test_large_inputs(family: str) -> None:
    A = abs(suite.generate(family, 60_000)).astype("float64")
    B = A if A.shape[0] == A.shape[1] else sp.csr_array(A.T)
    found, expected = sparsetir.matmul(A, B), by_scipy(A, B)
    assert np.array_equal(found.indptr, expected.indptr)
    assert np.array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.data, expected.data)


# --- other sums and products ------------------------------------------------------------------------------


SEMIRING = """
@T.prim_func
def product(a: T.handle, b: T.handle, c: T.handle, indptr_a: T.handle, indices_a: T.handle, indptr_b: T.handle,
            indices_b: T.handle, m: T.int32, p: T.int32, n: T.int32, nnz_a: T.int32, nnz_b: T.int32):
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, (p, nnz_a), (indptr_a, indices_a), sorted=False, unique=False)
    K_dense = T.dense_fixed(p)
    J_b = T.sparse_variable(K_dense, (n, nnz_b), (indptr_b, indices_b), sorted=False, unique=False)
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, K), "{dtype}")
    B = T.match_sparse_buffer(b, (K_dense, J_b), "{dtype}")
    C = T.match_sparse_buffer(c, (I, J), "{dtype}")
    with T.sp_iter([I, K, J], "SRS", "product") as [i, k, j]:
        with T.init():
            C[i, j] = {zero}
        C[i, j] = {body}
"""
# The first value, the body in the script, and what the body does with the value before and two factors.
SEMIRINGS: dict[str, tuple[str, str, float, Callable[[Any, Any, Any], Any]]] = {
    "min, plus": ("1000000000", "T.min(C[i, j], A[i, k] + B[k, j])", 10**9, lambda c, a, b: min(c, a + b)),
    "max, times": ("-1000000000", "T.max(C[i, j], A[i, k] * B[k, j])", -(10**9), lambda c, a, b: max(c, a * b)),
    "plus, min": ("0", "C[i, j] + T.min(A[i, k], B[k, j])", 0, lambda c, a, b: c + min(a, b)),
    "from 5 on": ("5", "C[i, j] - A[i, k] * B[k, j]", 5, lambda c, a, b: c - a * b),
    "plus, squares": ("0", "C[i, j] + (A[i, k] - B[k, j]) * (A[i, k] - B[k, j])", 0, lambda c, a, b: c + (a - b) ** 2),
}


@pytest.mark.parametrize("name", SEMIRINGS)
def test_other_sums_and_products(name: str) -> None:
    zero, body, first, step = SEMIRINGS[name]
    kernel = sparsetir.build(sparsetir.parse(SEMIRING.format(dtype="int32", zero=f"T.int32({zero})", body=body)))
    for rng, seed in pairs(4, 40):
        with on(seed):
            m, p, n = sizes(rng, 3)
            A, B = drawn(rng, m, p, "int32"), drawn(rng, p, n, "int32")
            expected: Entries = {}
            for (i, k), a in stored(A):
                for (l, j), b in stored(B):
                    if k == l:
                        expected[i, j] = step(expected.get((i, j), first), a, b)
            check(kernel(A=A, B=B), expected, magnitudes(expected), (m, n), "int32")


# --- the largest entries of a row -------------------------------------------------------------------------


def largest(row: np.ndarray, top: int | None, above: float | None) -> np.ndarray:
    """Where the entries of a row are that are kept."""
    kept = np.flatnonzero(row == row if above is None else row > above)
    order = sorted(kept, key=lambda at: (-int(row[at]) if row.dtype.kind in "iub" else -row[at], at))
    return np.sort(np.array(order[:top], np.int64))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint64", "int8", "bool"])
def test_the_largest_entries_of_any_row(dtype: str) -> None:
    rng = np.random.default_rng(11)
    info = np.finfo(dtype) if np.dtype(dtype).kind == "f" else None
    few = [0, 1, 2, 3, 1, 1] if info is None else [0, 1, -1.5, np.nan, np.inf, -np.inf, info.max, info.min, 1, 1]
    if np.dtype(dtype).kind in "iu":
        few += [np.iinfo(dtype).max, np.iinfo(dtype).min]
    n = 300
    lengths = np.concatenate([np.arange(40), rng.integers(0, n, 60)])
    values = [
        rng.choice(np.array(few, dtype), count) if at % 2 else rng.permutation(count).astype(dtype)
        for at, count in enumerate(lengths)
    ]
    columns = [np.sort(rng.choice(n, count, replace=False)) for count in lengths]
    arrays = np.concatenate(values), np.concatenate(columns), np.append(0, np.cumsum(lengths))
    B = sp.csr_array(arrays, (len(lengths), n))
    one = sp.eye_array(len(lengths), format="csr", dtype=dtype)
    for top in (1, 2, 9, 15, 16, 17, 60, None):
        for above in (None, 0) if top else (0,):
            found = sparsetir.matmul(one, B, top=top, threshold=above)
            for row, (held, at) in enumerate(zip(values, columns, strict=True)):
                wanted, here = largest(held, top, above), slice(*found.indptr[row : row + 2])
                assert np.array_equal(found.indices[here], at[wanted]), (top, above, row)
                assert np.array_equal(found.data[here], held[wanted] + np.zeros(1, dtype)), (top, above, row)


@pytest.mark.slow
def test_the_largest_entries_without_wide_vectors() -> None:
    rng = np.random.default_rng(12)
    B = sp.random_array((60, 90), density=0.6, format="csr", dtype="float32", rng=rng)
    plain = sparsetir.build(sparsetir.ops.spgemm(), target={"kind": "llvm", "mcpu": "x86-64-v2"}).selecting()
    one = sp.eye_array(60, format="csr", dtype="float32")
    for top in (2, 16, 20):
        assert (plain(A=one, B=B, top=top) != sparsetir.matmul(one, B, top=top)).nnz == 0


# --- searches ---------------------------------------------------------------------------------------------


def with_hubs(rng: np.random.Generator, n: int, dtype: str, idtype: str, *, is_sorted: bool) -> sp.csr_array:
    """Most rows have a few entries, mostly in the columns of the few rows that have many."""
    rows = np.concatenate([rng.integers(0, n, 4 * n), np.repeat(np.arange(4), n)])
    ends = np.concatenate([np.minimum(rng.zipf(1.6, 4 * n), n) - 1, rng.integers(0, n, 4 * n)])
    kind = np.dtype(dtype).kind
    data = rng.random(len(rows)) - 0.5 if kind == "f" else rng.integers(0, 2 if kind == "b" else 90, len(rows))
    found = sp.coo_array((data.astype(dtype), (rows, ends)), shape=(n, n)).tocsr()
    at = np.random.default_rng(n).permutation(n)
    found = sp.csr_array(found[at][:, at])
    found.sort_indices()
    if not is_sorted:
        found.data, found.indices = found.data[::-1], found.indices[::-1]
        found.indptr = found.nnz - found.indptr[::-1]
    found.indices, found.indptr = (a.astype(idtype) for a in (found.indices, found.indptr))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "idtype"), [("float32", "int32"), ("float64", "int64"), ("int32", "int32")])
def test_entries_of_a_mask_are_searched_for(dtype: str, idtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = sparsetir.ops.masked_spgemm(dtype, idtype=idtype)
    kernel = sparsetir.build(program)
    plain = assembled_kernel(program, options=AccumulatorOptions(looks_up=False))
    rng = np.random.default_rng(7)
    searched = []
    for is_sorted in (True, False, True, True, False):
        monkeypatch.setattr(workspace, "MOST_WORDS", 0)
        monkeypatch.setattr(assembled, "SERIAL_WORK", 10**6 if len(searched) == 2 else -1)
        A, B = (with_hubs(rng, n, dtype, idtype, is_sorted=is_sorted) for n in (600, 600))
        M = with_hubs(rng, 600, "bool", idtype, is_sorted=True)
        if np.dtype(dtype).kind == "f":
            B.data[::7] = [np.nan, np.inf, -np.inf, -0.0][len(searched) % 4]
        found, expected = kernel(A=A, B=B, M=M), plain(A=A, B=B, M=M)
        for name in ("indptr", "indices", "data"):
            assert np.array_equal(*(getattr(X, name).view(np.uint8) for X in (found, expected)))
        searched.append(kernel.begin(kernel.prepare((), {"A": A, "B": B, "M": M})).lookups.searches)
    assert searched == [True, False, True, True, False]


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("select", [{}, {"top": 4}, {"mask": True}], ids=["whole", "top", "mask"])
@pytest.mark.parametrize("density", [0.004, 0.03], ids=["few sums", "many sums"])
def test_memory_of_results_is_written_again_once_nobody_has_it(density: float, select: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    matrices = [sp.random_array((n, n), density=density, format="csr", rng=rng) for n in (900, 1000, 1000, 700)]
    masks = {n: sp.random_array((n, n), density=0.5, format="csr", rng=rng) for n in (700, 900, 1000)}

    def product(A: Any) -> Any:
        return sparsetir.matmul(A, A, **(select | ({"mask": masks[A.shape[0]]} if "mask" in select else {})))

    expected = [product(A).copy() for A in matrices]
    held: list[tuple[int, str, np.ndarray]] = []
    for _ in range(60):
        at, part = int(rng.integers(4)), str(rng.choice(["data", "indices", "indptr", "data[5:]", "none"]))
        result = product(matrices[at])
        assert (result != expected[at]).nnz == 0
        assert result.nnz == expected[at].nnz
        name, _, cut = part.partition("[")
        if name != "none":
            array = getattr(result, name)
            held.append((at, part, array[5:] if cut else array))
        if len(held) > 5:
            held.pop(int(rng.integers(len(held))))
        for number, of, array in held:
            name, _, cut = of.partition("[")
            whole = getattr(expected[number], name)
            assert np.array_equal(array, whole[5:] if cut else whole)


def test_results_hold_little_more_than_their_entries() -> None:
    A = sp.random_array((1000, 1000), density=0.02, format="csr", rng=np.random.default_rng(6))
    for _ in range(3):
        result = sparsetir.matmul(A, A)
        for array in (result.data, result.indices):
            assert (array if array.base is None else array.base).nbytes <= 1.5 * array.nbytes


@pytest.mark.parametrize(("extent", "dtype"), [(2**31 - 1, "int32"), (2**31 + 1, "int64")])
def test_coordinates_are_as_wide_as_the_longest_dimension(extent: int, dtype: str) -> None:
    keys = np.array([1, 2 * (extent - 1)], np.int64)  # columns 0 and `extent - 1` of a dimension above one of two
    pattern = ResultPattern((1, extent, 2), np.array([0, 2]), keys, [np.ones(2)])
    found = as_object(pattern, 0, None)
    assert found.coords.dtype == dtype
    assert found.coords.tolist() == [[0, 0], [0, extent - 1], [1, 0]]
