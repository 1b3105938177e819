# SPDX-License-Identifier: Apache-2.0
"""Sums along rows in vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import tirx
from tvm.script import tirx as tir

import sparsetir
from sparsetir.lower import as_module
from sparsetir.lower.rewriting import collect
from sparsetir.lower.vectorize_dots import VectorizeDots
from sparsetir.schedules import Choices

VECTORIZED = tirx.ForKind.VECTORIZED


def pattern(dtype: str = "float32") -> Any:
    """Rows of every length from none to nine."""
    rows = np.repeat(np.arange(10), np.arange(10))
    columns = np.concatenate([np.arange(n) * 2 for n in range(10)])
    values = np.random.default_rng(0).standard_normal(len(rows))
    return sp.coo_array((values, (rows, columns)), shape=(11, 20)).tocsr().astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("prefetch", [0, 1, 8])
def test_dots_of_every_length(dtype: str, prefetch: int) -> None:
    kernel = sparsetir.build(sparsetir.ops.sddmm(dtype=dtype), schedule=Choices(prefetch=prefetch))
    S, rng = pattern(dtype), np.random.default_rng(1)
    for feat in (*range(1, 20), 31, 32, 33, 64, 100):
        X, Y = rng.standard_normal((11, feat)).astype(dtype), rng.standard_normal((20, feat)).astype(dtype)
        want = S.multiply(X.astype("float64") @ Y.T.astype("float64")).toarray()
        tolerance = 20 * feat * np.finfo(dtype).eps
        np.testing.assert_allclose(kernel(S=S, X=X, Y=Y).toarray(), want, rtol=0, atol=tolerance, err_msg=str(feat))


def test_dots_are_vectors() -> None:
    func = sparsetir.build(sparsetir.ops.sddmm()).compiled.stage(3)
    loops = [f for f in collect(func.body, tirx.For) if f.kind == VECTORIZED]
    assert loops
    assert all(isinstance(f.extent, tirx.IntImm) for f in loops)


def test_what_is_not_finite_stays_where_it_is() -> None:
    S = pattern()
    X, Y = np.ones((11, 24), np.float32), np.ones((20, 24), np.float32)
    X[3, 5], Y[4, 20] = np.inf, np.nan
    found = sparsetir.build(sparsetir.ops.sddmm())(S=S, X=X, Y=Y)
    want = S.copy()
    want.data = S.data * np.einsum("ek,ek->e", X[np.repeat(np.arange(11), np.diff(S.indptr))], Y[S.indices])
    np.testing.assert_allclose(found.data, want.data, rtol=1e-5)


SUM = """
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((8, 37), "float32"), w: tir.Buffer((37,), "float32"), y: tir.Buffer((8,), "float32")):
    for i in range(8):
        {first}
        for k in tir.serial(37, annotations={{"sparsetir.dot": 16}}):
            {body}
"""


def vectorized(body: str, first: str = "y[i] = tir.float32(2)") -> tirx.PrimFunc:
    text = SUM.format(first=first, body=body)
    return VectorizeDots(as_module(tvm.script.from_source(text, {"tir": tir})))["main"]


def run(func: tirx.PrimFunc) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x, w, y = (rng.standard_normal(shape).astype("float32") for shape in ((8, 37), 37, 8))
    arrays = [tvm.runtime.tensor(a) for a in (x, w, y)]
    target = tvm.target.Target({"kind": "llvm", "fast-math-reassoc": True})
    tvm.compile(as_module(func), target=target, tir_pipeline="s_tir")["main"](*arrays)
    np.testing.assert_allclose(arrays[2].numpy(), EXPECTED["last"](x, w, y), rtol=1e-4, atol=1e-5)
    return x, w, y


EXPECTED: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("first", "body", "expected"),
    [
        ("y[i] = tir.float32(2)", "y[i] = y[i] + x[i, k] * w[k]", lambda x, w, y: 2 + x @ w),
        ("y[i] = tir.float32(2)", "y[i] = y[i] + x[i, k]", lambda x, w, y: 2 + x.sum(1)),
        ("y[i] = tir.float32(2)", "y[i] = y[i] + w[i] * x[i, k] * w[k] * w[i + 1]",
         lambda x, w, y: 2 + w[:8] * w[1:9] * (x @ w)),
        ("y[i] = y[i] * tir.float32(3)", "y[i] = y[i] + x[i, k]", lambda x, w, y: 3 * y + x.sum(1)),
        ("y[0] = y[0]", "y[i] = y[i] + x[i, k]", lambda x, w, y: y + x.sum(1)),
    ],
)  # fmt: skip
def test_sums_begin_as_they_did(first: str, body: str, expected: Any) -> None:
    func = vectorized(body, first)
    assert [f for f in collect(func.body, tirx.For) if f.kind == VECTORIZED]
    EXPECTED["last"] = expected
    run(func)


@pytest.mark.parametrize(
    "body",
    ["y[i] = x[i, k] - y[i]", "y[k % 8] = y[k % 8] + x[i, k]", "y[i] = y[i] + w[i]", "y[i] = y[i] + x[i, k] * y[0]"],
)
def test_other_loops_stay(body: str) -> None:
    func = vectorized(body)
    loops = collect(func.body, tirx.For)
    assert len(loops) == 2
    assert all(f.kind != VECTORIZED and not f.annotations for f in loops)
