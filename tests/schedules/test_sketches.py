# SPDX-License-Identifier: Apache-2.0
"""Every sketch over every family of generated matrices, against products in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import s_tir

import sparsetir
from each import on, share
from sparsetir import SparseTIRError, formats, schedules
from sparsetir.schedules import Choices
from sparsetir.workloads.suite import families

FEAT = 40  # a full tile, a narrower one, and none

CHOICES = {
    "untuned": None,
    "unrolled": Choices(tile=16, unroll=4),
    "prefetched": Choices(tile=32, prefetch=8, unroll=2),
    "wide": Choices(tile=256, chunks=7),
    "one core": Choices(chunks=0),
    "streamed, prefetched": Choices(tile=8, stream=1, prefetch=16),
    "carried": Choices(tile=16, chunks=5, carry=1),
    "carried, streamed": Choices(tile=16, chunks=5, carry=1, stream=1),
    "panels": Choices(tile=16, panel=32),
    "panels, everything": Choices(tile=8, panel=16, prefetch=4, unroll=2, stream=1, carry=1, chunks=3),
}
FORMATS = {
    "blocks": formats.bsr(4, 4),
    "tall blocks": formats.bsr(8, 1),
    "blocks and a rest": formats.blocks(3, 3),
    "buckets": formats.buckets(),
    "column parts": formats.columns(3),
    "slices": formats.sell(8, 64),
    "groups of rows": formats.row_groups(4),
}


@cache
def kernel(op: str, name: str) -> Any:
    """Compiled once for all families."""
    program = getattr(sparsetir.ops, op)()
    if name in CHOICES:
        return sparsetir.build(program, schedule=CHOICES[name])
    argument = "S" if op == "sddmm" else "A"
    return sparsetir.build(sparsetir.decompose_format(program, {argument: FORMATS[name]}))


@cache
def matrix(family: str) -> Any:
    return families()[family]("small")


@cache
def product(family: str, feat: int) -> tuple[Any, Any, Any]:
    """A dense operand, the product in float64, and the sum of the magnitudes of its terms."""
    A = matrix(family)
    B = np.random.default_rng(0).standard_normal((A.shape[1], feat), np.float32)
    return B, A.astype("float64") @ B.astype("float64"), abs(A).astype("float64") @ abs(B).astype("float64")


def close(found: Any, want: Any, scale: Any) -> None:
    """Within what float32 sums in another order may differ by."""
    limit = 1e-5 * (1 + np.abs(scale))
    assert (np.abs(found - want) <= limit).all()


def drawn_families(name: str) -> Iterator[str]:
    """Yield a third of the families, others for each sketch or format; all with SPARSETIR_FULL=1."""
    for family in share(families(), 3, first=[*CHOICES, *FORMATS].index(name)):
        with on(family):
            yield family


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHOICES, *FORMATS])
def test_spmm(name: str) -> None:
    for family in drawn_families(name):
        B, exact, scale = product(family, FEAT)
        close(kernel("spmm", name)(A=matrix(family), B=B), exact, scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untuned", "one core", "carried", "slices", "buckets", "blocks"])
def test_spmv(name: str) -> None:
    for family in drawn_families(name):
        x, exact, scale = (found[:, 0] for found in product(family, 1))
        close(kernel("spmv", name)(A=matrix(family), x=x), exact, scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untuned", "prefetched", "one core", "blocks"])
def test_sddmm(name: str) -> None:
    for family in drawn_families(name):
        S, rng = matrix(family), np.random.default_rng(0)
        X, Y = (rng.standard_normal((n, FEAT), np.float32) for n in S.shape)
        rows = np.repeat(np.arange(S.shape[0]), np.diff(S.indptr))
        dots = np.einsum("ek,ek->e", X[rows].astype("float64"), Y[S.indices].astype("float64"))
        scale = np.einsum("ek,ek->e", np.abs(X[rows]), np.abs(Y[S.indices]))
        close(kernel("sddmm", name)(S=S, X=X, Y=Y).data, S.data * dots, S.data * scale)


# ---------------------------------------------------------------- what is left where sketches do not lower

LAYER = """
@T.prim_func
def layer(a: T.handle, x: T.handle, w: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, n: T.int32,
          nnz: T.int32, f: T.int32, o: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    Jd = T.dense_fixed(n)
    F = T.dense_fixed(f)
    O = T.dense_fixed(o)
    A = T.match_sparse_buffer(a, (I, J))
    X = T.match_sparse_buffer(x, (Jd, F))
    W = T.match_sparse_buffer(w, (F, O))
    Y = T.match_sparse_buffer(y, (I, O))
    BODY
"""
DENSE_FIRST = """H = T.alloc_sparse_buffer((Jd, O), "float32")
    with T.sp_iter([Jd, F, O], "SRS", "lin") as [i, g, k]:
        with T.init():
            H[i, k] = 0
        H[i, k] = H[i, k] + X[i, g] * W[g, k]
    with T.sp_iter([I, J, O], "SRS", "agg") as [i, j, k]:
        with T.init():
            Y[i, k] = 0
        Y[i, k] = Y[i, k] + A[i, j] * H[j, k]
    with T.sp_iter([I, O], "SS", "relu") as [i, k]:
        Y[i, k] = T.max(Y[i, k], T.float32(0))
"""
SPARSE_FIRST = """H = T.alloc_sparse_buffer((I, F), "float32")
    with T.sp_iter([I, J, F], "SRS", "agg") as [i, j, g]:
        with T.init():
            H[i, g] = 0
        H[i, g] = H[i, g] + A[i, j] * X[j, g]
    with T.sp_iter([I, F, O], "SRS", "lin") as [i, g, k]:
        with T.init():
            Y[i, k] = 0
        Y[i, k] = Y[i, k] + H[i, g] * W[g, k]
    with T.sp_iter([I, O], "SS", "relu") as [i, k]:
        Y[i, k] = T.max(Y[i, k], T.float32(0))
"""


def layer_is_right(kernel: Any) -> None:
    rng = np.random.default_rng(0)
    A = sp.random_array((30, 30), density=0.1, format="csr", dtype="float32", rng=rng)
    X, W = rng.standard_normal((30, 12), "float32"), rng.standard_normal((12, 21), "float32")
    assert np.allclose(kernel(A=A, X=X, W=W), np.maximum(A @ (X @ W), 0), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("body", [DENSE_FIRST, SPARSE_FIRST])
@pytest.mark.parametrize("choices", [None, Choices(tile=8, chunks=4, unroll=2, prefetch=4)])
def test_layers_of_a_dense_and_a_sparse_product(body: str, choices: Choices | None) -> None:
    """Both products are in vectors and registers, and nothing was dropped: the tests are strict."""
    kernel = sparsetir.build(sparsetir.parse(LAYER.replace("BODY", body)), schedule=choices)
    layer_is_right(kernel)
    assert kernel.script(stage=3).count("T.vectorized") > 4


def spoilt(sch: s_tir.Schedule, block: Any, *_args: Any, **_more: Any) -> bool:
    """A sketch that wants a parallel loop inside of another one."""
    sch.annotate(sch.get_loops(block)[-1], "sparsetir.chunks", 2)
    return True


@pytest.mark.slow
def test_what_does_not_lower_is_dropped_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    func = sparsetir.parse(LAYER.replace("BODY", SPARSE_FIRST).replace("def layer", "def spoilt"))
    only_of = lambda sch, block, *args, **more: sch.get(block).name_hint == "lin" and spoilt(sch, block)  # noqa: E731
    monkeypatch.setattr(schedules, "SKETCHES", [only_of, *schedules.SKETCHES])
    with pytest.raises(SparseTIRError, match="cannot be parallel inside the parallel loop"):
        sparsetir.build(func)
    monkeypatch.setenv("SPARSETIR_STRICT", "")
    with caplog.at_level("INFO", logger="sparsetir"):
        kernel = sparsetir.build(func)
    layer_is_right(kernel)
    assert '"sparsetir.dropped": ["lin"]' in kernel.script(stage=2)
    assert [record.message.split(":")[0] for record in caplog.records] == ["another sketch for lin"]
    assert kernel.script(stage=3).count("T.vectorized") > 4


@pytest.mark.slow
def test_a_program_without_a_sketch_that_lowers_has_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETIR_STRICT", "")
    monkeypatch.setattr(schedules, "SKETCHES", [spoilt])
    func = sparsetir.parse(LAYER.replace("BODY", DENSE_FIRST).replace("def layer", "def plain"))
    kernel = sparsetir.build(func, schedule=Choices(chunks=4))
    layer_is_right(kernel)
    assert "T.parallel(4)" in kernel.script(stage=3)
