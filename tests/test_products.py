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
from each import on
from product_oracle import (
    DTYPES,
    SIZES,
    Entries,
    check,
    drawn,
    magnitudes,
    pairs,
    product_of,
    stored,
)
from sparsetir.call import assembled
from sparsetir.harness import suite


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


PROGRAMS: dict[str, Program] = {
    "matmul": of_matmul,
    "square": of_square,
    "chain": of_chain,
}


def judge(program: Program, seed: int, count: int, dtypes: tuple[str, ...] = DTYPES) -> None:
    """Run a program on drawn inputs of each dtype."""
    for dtype in dtypes:
        for rng, n in pairs(seed, count):
            with on((dtype, n)):
                found, expected, scale, shape = program(rng, dtype)
                check(found, expected, scale, shape, dtype)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_few_inputs(name: str) -> None:
    judge(PROGRAMS[name], 1, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_inputs(name: str) -> None:
    judge(PROGRAMS[name], 2, 50)


# --- ways through -----------------------------------------------------------------------------------------


WAYS = {
    "at once, two threads": {"SERIAL_WORK": -1},
    "counted first": {"ROOMY_BYTES": -1},
    "counted first, two threads": {"ROOMY_BYTES": -1, "SERIAL_WORK": -1},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["matmul", "chain"])
def test_all_ways_agree(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large inputs go through, on small ones."""
    for limit, value in WAYS[way].items():
        monkeypatch.setattr(assembled, limit, value)
    judge(PROGRAMS[name], 3, 40, ("float32", "int32"))


def by_scipy(A: sp.csr_array, B: sp.csr_array) -> sp.csr_array:
    """Of positive numbers, so that scipy drops nothing."""
    found = A @ B
    found.sort_indices()
    return found


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("n", [63, 64, 65, 4096, 4097, 300_000])
def test_widths_around_words(n: int, idtype: str) -> None:
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
