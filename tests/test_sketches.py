# SPDX-License-Identifier: Apache-2.0
"""Every sketch over every family of generated matrices, against products in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import sparsetir
from sparsetir import formats
from sparsetir.bench.suite import families
from sparsetir.schedules import Choices

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


def close(found: Any, want: Any, scale: Any) -> None:
    """Within what float32 sums in another order may differ by."""
    limit = 1e-5 * (1 + np.abs(scale))
    assert (np.abs(found - want) <= limit).all()


@pytest.mark.parametrize("family", list(families()))
@pytest.mark.parametrize("name", [*CHOICES, *FORMATS])
def test_spmm(name: str, family: str) -> None:
    A = families()[family]("small")
    B = np.random.default_rng(0).standard_normal((A.shape[1], FEAT), np.float32)
    exact, scale = A.astype("float64") @ B.astype("float64"), abs(A).astype("float64") @ abs(B).astype("float64")
    close(kernel("spmm", name)(A=A, B=B), exact, scale)


@pytest.mark.parametrize("family", list(families()))
@pytest.mark.parametrize("name", ["untuned", "one core", "carried", "slices", "buckets", "blocks"])
def test_spmv(name: str, family: str) -> None:
    A = families()[family]("small")
    x = np.random.default_rng(0).standard_normal(A.shape[1], np.float32)
    exact, scale = A.astype("float64") @ x.astype("float64"), abs(A).astype("float64") @ abs(x).astype("float64")
    close(kernel("spmv", name)(A=A, x=x), exact, scale)


@pytest.mark.parametrize("family", list(families()))
@pytest.mark.parametrize("name", ["untuned", "prefetched", "one core", "blocks"])
def test_sddmm(name: str, family: str) -> None:
    S, rng = families()[family]("small"), np.random.default_rng(0)
    X, Y = (rng.standard_normal((n, FEAT), np.float32) for n in S.shape)
    rows = np.repeat(np.arange(S.shape[0]), np.diff(S.indptr))
    dots = np.einsum("ek,ek->e", X[rows].astype("float64"), Y[S.indices].astype("float64"))
    scale = np.einsum("ek,ek->e", np.abs(X[rows]), np.abs(Y[S.indices]))
    close(kernel("sddmm", name)(S=S, X=X, Y=Y).data, S.data * dots, S.data * scale)
