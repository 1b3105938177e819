# SPDX-License-Identifier: Apache-2.0
"""Ragged axes whose extents and offsets are read from arrays that the caller passes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm

import sparsetir

TEXT = """
@T.prim_func
def windows(
    x: T.handle, q: T.handle, y: T.handle, z: T.handle, sizes: T.handle, starts: T.handle, m: T.int32, longest: T.int32
):
    size = T.match_buffer(sizes, (m,), "IDTYPE")
    start = T.match_buffer(starts, (m,), "IDTYPE")
    I = T.dense_fixed(m)
    J = T.dense_variable(I, longest, idtype="IDTYPE", extent=lambda i: size[i], offset=lambda i: start[i])
    X = T.match_sparse_buffer(x, (I, J), "float32")
    Q = T.match_sparse_buffer(q, (I,), "IDTYPE")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I,), "float32")
    with T.sp_iter([I, J], "SR", "sums") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + X[i, j]
    with T.sp_iter([I], "S", "look_up") as [i]:
        Z[i] = X[i, Q[i]]
"""


@cache
def built(idtype: str) -> tuple[Any, Any]:
    program = sparsetir.parse(TEXT.replace("IDTYPE", idtype))
    return program, sparsetir.build(program)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_slots_outside_of_the_stored_positions_are_absent(idtype: str) -> None:
    program, kernel = built(idtype)
    rng = np.random.default_rng(0)
    for count, m in ((7, 4), (7, 0), (0, 3), (1, 1)):
        x, longest = rng.random(count).astype("float32"), 3
        for _ in range(20):
            sizes, starts = (rng.integers(-4, 10, m).astype(idtype) for _ in range(2))
            wanted = rng.integers(-2, 5, m).astype(idtype)
            y, z = kernel(X=x, size=sizes, start=starts, Q=wanted, longest=longest)
            rows = [
                x[b : max(b, min(b + min(n, longest), count))] if b >= 0 else x[:0]
                for b, n in zip(starts.tolist(), sizes.tolist(), strict=True)
            ]
            at = [row[j] if 0 <= j < len(row) else 0 for row, j in zip(rows, wanted.tolist(), strict=True)]
            np.testing.assert_allclose(y, [row.sum() for row in rows], rtol=1e-5)
            np.testing.assert_array_equal(z, np.array(at, "float32"))
            arguments = {"x": x, "size": sizes, "start": starts, "q": wanted, "longest": longest}
            found = sparsetir.interpret(program, arguments)
            np.testing.assert_allclose(found["y"], y, rtol=1e-5)
            np.testing.assert_array_equal(found["z"], z)


def test_the_count_is_the_length_of_the_values() -> None:
    program, kernel = built("int32")
    assert "(longest, start_nnz)" in sparsetir.script(program)
    tvm.ir.assert_structural_equal(sparsetir.parse(sparsetir.script(program)), program)
    sparsetir.verify(sparsetir.lower(program, stage=2), stage=2)
    assert kernel.script(stage=3)
