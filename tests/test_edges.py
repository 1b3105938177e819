# SPDX-License-Identifier: Apache-2.0
"""Programs at an edge: subscripts that cancel out, loops without a step, index arrays before an unreadable page."""

from __future__ import annotations

import numpy as np
import pytest

import sparsetir

UPDATE = """
@T.prim_func
def update(a: T.handle, c: T.handle, n: T.int32, m: T.int32, w: T.int32):
    X = T.dense_fixed(n)
    V0 = T.dense_fixed(m)
    V1 = T.sparse_fixed(V0, (m, w), lambda i, s: RULE)
    A = T.match_sparse_buffer(a, (X,))
    C = T.match_sparse_buffer(c, (V0, V1))
    with T.sp_iter([X], "S", "update") as [x]:
        C[x, WHERE] = C[x, WHERE] + A[x]
"""


@pytest.mark.parametrize(("rule", "where"), [("i - s", "x"), ("i + s", "x + (x - x)"), ("s", "x - x")])
def test_terms_that_cancel_out(rule: str, where: str) -> None:
    func = sparsetir.parse(UPDATE.replace("RULE", rule).replace("WHERE", where))
    a, c = np.array([2, 3, 4], "float32"), np.arange(6, dtype="float32")
    arguments = {"a": a, "n": 3, "m": 3, "w": 2}
    expected = sparsetir.interpret(func, {**arguments, "c": c.copy()})["c"]
    sparsetir.build(func)(a=a, c=c, m=3, w=2)
    assert np.array_equal(c, expected)
