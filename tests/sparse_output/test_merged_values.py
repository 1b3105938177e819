# SPDX-License-Identifier: Apache-2.0
"""What merged rows store, whatever the statement computes and the operands hold: NaN, infinities, zero divisors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import CooTensor

FLOATS = [
    "T.if_then_else(a > b, a, b)",
    "T.if_then_else(a != a, T.float32(1), a)",
    "T.if_then_else(not (a < b), a - b, b)",
    "a / b",
    "a * b",
    "T.exp(a) * b",
    "T.sqrt(T.abs(a))",
    "T.Cast('float32', i) * a + T.Cast('float32', j)",
    "T.if_then_else(T.isnan(a) or a == b, b, a)",
    "T.if_then_else(a == a, a, b)",
    "T.if_then_else(a < b and b < 1, a, -b)",
    "T.pow(T.abs(a), b)",
    "a * X[i] + Y[j]",
    "T.Select(a > 0, a, b)",
    "T.if_then_else(a >= b, T.float32(1), T.float32(0)) + T.if_then_else(a <= b, T.float32(1), T.float32(0))",
]
WHOLE = [
    "a // b",
    "a % b",
    "b // a",
    "T.truncdiv(a, T.if_then_else(b == 0, 1, b))",
    "a & b",
    "a ^ b",
    "~a",
    "a << T.min(T.abs(b), 5)",
    "T.if_then_else(a != b, a, b)",
    "T.max(a, b) - T.min(a, b)",
    "a * i - b * j",
]


def program(expressions: list[str], dtype: str, how: str, axis: str = "T.sparse_assembled(I, n)") -> str:
    """A program whose results, one for each expression, lie over merged rows; their columns are `axis`."""
    numbers = range(len(expressions))
    params = "".join(f", c{n}: T.handle" for n in numbers)
    results = "\n".join(f"    C{n} = T.match_sparse_buffer(c{n}, (I, J), '{dtype}')" for n in numbers)
    texts = [re.sub(r"\b([ab])\b", lambda m: f"{m[0].upper()}[i, j]", text) for text in expressions]
    stores = "\n".join(f"        C{n}[i, j] = {text}" for n, text in enumerate(texts))
    return f"""@T.prim_func
def f(
    a: T.handle, b: T.handle{params}, x: T.handle, y: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    m: T.int32, n: T.int32, za: T.int32, zb: T.int32,
):
    I = T.dense_fixed(m)
    N = T.dense_fixed(n)
    JA = T.sparse_variable(I, (n, za), (pa, ja))
    JB = T.sparse_variable(I, (n, zb), (pb, jb))
    J = {axis}
    A = T.match_sparse_buffer(a, (I, JA), '{dtype}')
    B = T.match_sparse_buffer(b, (I, JB), '{dtype}')
    X = T.match_sparse_buffer(x, (I,), '{dtype}')
    Y = T.match_sparse_buffer(y, (N,), '{dtype}')
{results}
    with T.sp_iter([I, T.{how}(JA, JB)], "SS", "merged") as [i, j]:
{stores}
"""


def drawn(rng: np.random.Generator, m: int, n: int, dtype: str) -> sp.csr_array:
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, 2, -3.5, 7]
    values = rng.choice(odd, (m, n)) if dtype == "float32" else rng.integers(-4, 5, (m, n))
    rows, columns = np.nonzero(rng.random((m, n)) < 0.5)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=m))]).astype("int32")
    return sp.csr_array((values[rows, columns].astype(dtype), columns.astype("int32"), indptr), shape=(m, n))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "expressions"), [("float32", FLOATS), ("int32", WHOLE)], ids=["float32", "int32"])
@pytest.mark.parametrize("how", ["union", "intersect"])
def test_merged_values_are_the_interpreters(how: str, dtype: str, expressions: list[str]) -> None:
    func = sparsetir.parse(program(expressions, dtype, how))
    kernel, rng = sparsetir.build(func), np.random.default_rng(0)
    assert kernel.assembly.merge is not None
    for m, n in [(6, 9), (1, 1), (3, 0), (20, 15), (20, 15)]:
        dense = {"X": np.arange(m).astype(dtype), "Y": np.arange(n).astype(dtype)}
        given: dict[str, Any] = {"A": drawn(rng, m, n, dtype), "B": drawn(rng, m, n, dtype), **dense}
        args = kernel.prepare((), given)
        with np.errstate(all="ignore"):
            wanted = sparsetir.interpret(func, {**args.arrays, **args.sizes})
        for number, (text, found) in enumerate(zip(expressions, kernel(**given), strict=True)):
            assert np.array_equal(found.indptr, wanted["J_indptr"]), text
            assert np.array_equal(found.indices, wanted["J_indices"]), text
            np.testing.assert_allclose(found.data, wanted[f"c{number}"], rtol=1e-6, atol=1e-7, err_msg=text)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "expressions"), [("float32", FLOATS), ("int32", WHOLE)], ids=["float32", "int32"])
def test_dense_results_over_a_union_are_the_interpreters(dtype: str, expressions: list[str]) -> None:
    func = sparsetir.parse(program(expressions, dtype, "union", "T.dense_fixed(n)"))
    kernel, rng = sparsetir.build(func), np.random.default_rng(0)
    for m, n in [(6, 9), (1, 1), (20, 15)]:
        given: dict[str, Any] = {"A": drawn(rng, m, n, dtype), "B": drawn(rng, m, n, dtype)}
        given |= {"X": np.arange(m).astype(dtype), "Y": np.arange(n).astype(dtype)}
        results = {f"C{k}": np.zeros((m, n), dtype) for k in range(len(expressions))}
        args = kernel.prepare({**given, **{name: array.copy() for name, array in results.items()}})
        with np.errstate(all="ignore"):
            wanted = sparsetir.interpret(func, {**args.arrays, **args.sizes})
        kernel(**given, **results)
        for k, text in enumerate(expressions):
            expected = wanted[f"c{k}"].reshape(m, n)
            np.testing.assert_allclose(results[f"C{k}"], expected, rtol=1e-6, atol=1e-7, err_msg=text)


OF_HALVES: dict[str, Callable[[Any, Any], Any]] = {
    "T.min(a, b)": np.minimum,
    "T.max(a * b, a) + b": lambda a, b: np.maximum(a * b, a) + b,
    "T.if_then_else(a > b, T.min(a, b) - a, b)": lambda a, b: np.where(a > b, np.minimum(a, b) - a, b),
    "T.if_then_else(T.max(a, b) != b, a, b)": lambda a, b: np.where(np.maximum(a, b) != b, a, b),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_extremes_and_comparisons_of_halves(dtype: str) -> None:
    """They are computed in float32, and what neither operand stores is not."""
    kind, rng = np.dtype(getattr(ml_dtypes, dtype, dtype)), np.random.default_rng(2)
    kernel = sparsetir.build(sparsetir.parse(program(list(OF_HALVES), dtype, "union")))
    for m, n in [(1, 1), (6, 9), (70, 40)]:
        dense = [drawn(rng, m, n, "float32").toarray() for _ in "AB"]
        given = {name: CooTensor.from_dense(array.astype(kind)) for name, array in zip("AB", dense, strict=True)}
        held = (dense[0] != 0) | (dense[1] != 0)
        found = kernel(**given, X=np.zeros(m, kind), Y=np.zeros(n, kind))
        for (text, function), result in zip(OF_HALVES.items(), found, strict=True):
            with np.errstate(all="ignore"):
                wanted = np.where(held, function(*dense), 0).astype(kind)
            np.testing.assert_array_equal(result.to_dense().astype("float64"), wanted.astype("float64"), err_msg=text)


def test_the_maximum_with_nan_is_nan() -> None:
    rng = np.random.default_rng(1)
    A, B = (drawn(rng, 30, 20, "float32") for _ in "AB")
    np.testing.assert_array_equal(sparsetir.maximum(A, B).toarray(), np.maximum(A.toarray(), B.toarray()))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_integers_are_divided_by_any_number(dtype: str) -> None:
    """A division by zero, or of the least number by -1, would end the process."""
    func = sparsetir.parse(f"""
@T.prim_func
def divided(a: T.handle, b: T.handle, c: T.handle, d: T.handle, m: T.int32):
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (I,), '{dtype}')
    B = T.match_sparse_buffer(b, (I,), '{dtype}')
    C = T.match_sparse_buffer(c, (I,), '{dtype}')
    D = T.match_sparse_buffer(d, (I,), '{dtype}')
    with T.sp_iter([I], "S", "both") as [i]:
        C[i] = A[i] // B[i]
        D[i] = A[i] % B[i]
""")
    info = np.iinfo(dtype)
    numbers = np.unique(
        np.array([info.min, info.min + 1, 0, 1, 2, 7, info.max, *([-1, -3] if info.min else [])], dtype)
    )
    a, b = (part.ravel() for part in np.meshgrid(numbers, numbers))
    quotient, rest = sparsetir.build(func)(A=a, B=b)
    with np.errstate(all="ignore"):
        assert np.array_equal(quotient, a // b)
        assert np.array_equal(rest, a % b)
