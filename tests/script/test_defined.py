# SPDX-License-Identifier: Apache-2.0
"""Every element of a returned array is defined: memory that is full of something else shows what nobody writes."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
from sparsetir.utils import buffers

# How the result's second dimension is stored, with the sizes and arrays that say so.
AXES = {
    "dense": "J = T.dense_fixed(n)",
    "padded": "J = T.sparse_fixed(I, (n, w), ij)",
    "repeated": "J = T.sparse_fixed(I, (n, w), ij, sorted=False, unique=False)",
    "band": "J = T.sparse_fixed(I, (n, w), lambda i, s: i + s - 1)",
    "singleton": "J = T.singleton(I, n, ij)",
    "triangle": "J = T.dense_variable(I, n, extent=lambda i: T.min(i, n), offset=lambda i: i * n)",
}
# What is done: everywhere, at stored points only, for each of something else, a part of the rows, or just somewhere.
BODIES = {
    "sum": """
    with T.sp_iter([I, J, K], "SSR", "sum") as [i, j, k]:
        with T.init():
            C[i, j] = 0
        C[i, j] = C[i, j] + X[i, k]
""",
    "stored": """
    with T.sp_iter([I, J, K], "SSR", "sum") as [i, j, k]:
        T.sp_iter_attr({"init": "stored"})
        with T.init():
            C[i, j] = 0
        C[i, j] = C[i, j] + X[i, k]
""",
    "store": """
    with T.sp_iter([I, J], "SS", "set") as [i, j]:
        C[i, j] = X[i, 0]
""",
    "for_each": """
    with T.sp_iter([K, I, J], "SSS", "set") as [k, i, j]:
        with T.init():
            C[i, j] = 1
        C[i, j] = C[i, j] + X[i, k]
""",
    "coordinates": """
    with T.sp_iter([I, N], "SS", "set") as [i, x]:
        C[i, x] = X[i, 0]
""",
    "corner": """
    with T.sp_iter([K], "S", "set") as [k]:
        C[0, k] = X[0, k]
""",
}
TEXT = """
@T.prim_func
def program(x: T.handle, c: T.handle, ij: T.handle, m: T.int32, n: T.int32, w: T.int32, f: T.int32):
    I = T.dense_fixed(m)
    AXIS
    K = T.dense_fixed(f)
    N = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I, K))
    C = T.match_sparse_buffer(c, (I, J))
"""


@cache
def compiled(axis: str, body: str) -> tuple[Any, Any]:
    text = TEXT.replace("AXIS", AXES[axis]) + BODIES[body]
    if "ij" not in AXES[axis]:
        text = text.replace("ij: T.handle, ", "")
    if "(n, w)" not in AXES[axis]:
        text = text.replace("w: T.int32, ", "")
    program = sparsetir.parse(text)
    return program, sparsetir.build(program)


def filled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Memory that was used before."""
    return np.full(math.prod(shape) * np.dtype(dtype).itemsize, 0xAB, np.uint8).view(dtype).reshape(shape)


PAIRS = [("dense", body) for body in BODIES] + [("padded", body) for body in ("sum", "store", "coordinates")]
PAIRS += [(axis, body) for axis in ("repeated", "band", "singleton", "triangle") for body in ("sum", "store")]


@pytest.mark.parametrize(("axis", "body"), PAIRS)
def test_every_element_is_defined(axis: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, kernel = compiled(axis, body)
    monkeypatch.setattr(buffers, "empty", filled)

    @settings(max_examples=12, deadline=None, database=None)
    @given(st.tuples(st.integers(1, 4), *[st.integers(0, 3)] * 3), st.integers(0, 2**32 - 1), st.booleans())
    def compare(drawn: tuple[int, ...], seed: int, again: bool) -> None:
        rng = np.random.default_rng(seed)
        m, n, w, f = drawn
        sizes = {"m": m, "n": n, "w": w, "f": f}
        names = [str(p.name) for p in program.params]
        args: dict[str, Any] = {name: size for name, size in sizes.items() if name in names}
        args["x"] = rng.integers(1, 9, (m, f)).astype("float32")
        if "ij" in names:
            width = 1 if axis == "singleton" else w
            args["ij"] = np.sort(rng.integers(0, n + 1, (m, width)), axis=1).astype("int32").reshape(-1)
        expected = sparsetir.interpret(program, dict(args))["c"]
        for _ in range(1 + again):
            assert np.array_equal(np.asarray(kernel(**args)).ravel(), expected.ravel())

    compare()
