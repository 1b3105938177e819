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
from fences import fenced
from sparsetir import formats
from sparsetir.ir.rewriting import collect, mentions
from sparsetir.lower import as_module
from sparsetir.lower.vector.vectorize import VectorizeDots
from sparsetir.schedules import Choices, defaults

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("tile", "prefetch"), [(16, 0), (64, 4), (256, 0)])
def test_rows_that_sums_share_are_kept_in_parts(dtype: str, tile: int, prefetch: int) -> None:
    kernel = sparsetir.build(sparsetir.ops.sddmm(dtype=dtype), schedule=Choices(tile=tile, prefetch=prefetch))
    S, rng = pattern(dtype), np.random.default_rng(3)
    for feat in (1, 15, 16, 17, 63, 64, 65, 100, 128, 130, 255, 256, 300, 513):
        X, Y = rng.standard_normal((11, feat)).astype(dtype), rng.standard_normal((20, feat)).astype(dtype)
        want = S.multiply(X.astype("float64") @ Y.T.astype("float64")).toarray()
        tolerance = 20 * feat * np.finfo(dtype).eps
        np.testing.assert_allclose(kernel(S=S, X=X, Y=Y).toarray(), want, rtol=0, atol=tolerance, err_msg=str(feat))


@pytest.mark.parametrize("format", [formats.bsr(2, 2), formats.bsr(4, 1), formats.ell(20), formats.sell(4, 8)], ids=str)
def test_rows_of_other_formats_are_fetched_where_they_are_gathered(format: formats.Format) -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.sddmm(), {"S": format})
    kernel, S, rng = sparsetir.build(parts, schedule=Choices(tile=32, prefetch=4)), pattern(), np.random.default_rng(3)
    X, Y = rng.standard_normal((11, 70)).astype("float32"), rng.standard_normal((20, 70)).astype("float32")
    found = kernel(S=S, X=X, Y=Y)
    np.testing.assert_allclose(found.toarray(), S.multiply(X @ Y.T).toarray(), rtol=1e-4, atol=1e-4)


def test_rows_without_columns_give_zeros() -> None:
    S = pattern()
    found = sparsetir.build(sparsetir.ops.sddmm())(S=S, X=np.ones((11, 0), np.float32), Y=np.ones((20, 0), np.float32))
    np.testing.assert_array_equal(found.data, np.zeros_like(S.data))


def test_short_rows_are_kept_as_a_whole() -> None:
    kernel, S = sparsetir.build(sparsetir.ops.sddmm()), pattern()
    for feat, tile in ((8, 0), (16, 16), (60, 64), (64, 64), (127, 128), (128, 0), (500, 0)):
        args = kernel.prepare({"S": S, "X": np.ones((11, feat), np.float32), "Y": np.ones((20, feat), np.float32)})
        assert defaults.changes(kernel.usage, args.arrays).get("tile", 0) == tile
        bound, X = kernel.bind(S=S), np.ones((11, feat), np.float32)
        for _ in range(3):
            np.testing.assert_allclose(bound(X=X, Y=np.ones((20, feat), np.float32)).data, S.data * feat, rtol=1e-6)


def test_the_shared_row_is_loaded_once_for_all_sums() -> None:
    func = sparsetir.build(sparsetir.ops.sddmm(), schedule=Choices(tile=64)).compiled.stage(3)
    rows = [b for b in collect(func.body, tirx.AllocBuffer) if str(b.buffer.name).startswith("row")]
    assert [[int(n) for n in b.buffer.ty.shape] for b in rows] == [[64]]


def test_no_loop_iterates_columns_one_by_one() -> None:
    """Only sums that are not finite are computed again in scalar steps."""
    func = sparsetir.build(sparsetir.ops.sddmm(), schedule=Choices(tile=8, chunks=0)).compiled.stage(3)
    (feat,) = (p for p in func.params if str(p.name) == "feat")
    over_columns = [f for f in collect(func.body, tirx.For) if mentions(f.extent, [feat])]
    scalar = [f for f in over_columns if not any(x.kind == VECTORIZED for x in collect(f.body, tirx.For))]
    assert over_columns
    assert {str(f.loop_var.name) for f in scalar} <= {"k_again"}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_columns_after_the_last_block_are_added_once(dtype: str) -> None:
    S, rng = pattern(dtype), np.random.default_rng(1)
    S.data = np.ones_like(S.data)
    kernel = sparsetir.build(sparsetir.ops.sddmm(dtype))
    for feat in (*range(1, 40), 47, 63, 65, 100, 130):
        X, Y = (fenced(rng.integers(0, 3, (n, feat)).astype(dtype)) for n in S.shape)
        found = kernel(S=S, X=X, Y=Y)
        want = S.astype("float64").multiply(X.astype("float64") @ Y.T.astype("float64")).toarray()
        np.testing.assert_array_equal(found.toarray(), want, err_msg=f"feat {feat}")


def test_an_infinite_column_is_added_once() -> None:
    """A column that two vectors share must not become NaN in the one in which it does not count."""
    S, kernel = pattern(), sparsetir.build(sparsetir.ops.sddmm())
    S.data[:] = 1
    for feat in (3, 18, 30, 33, 50):
        X, Y = np.ones((11, feat), np.float32), np.ones((20, feat), np.float32)
        Y[:, feat - 2] = np.inf
        assert np.isposinf(kernel(S=S, X=X, Y=Y).data).all()


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
