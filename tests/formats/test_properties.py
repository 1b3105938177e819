# SPDX-License-Identifier: Apache-2.0
"""Random axes trees, patterns, sizes, types, programs and schedules: compiled code against the interpreter.

`drawing` makes the programs. Results must be equal to the last bit: values are small whole numbers. Inputs end at pages
that must not be touched. ``SPARSETIR_EXAMPLES=500`` draws that many programs of each shape, different ones every time.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparsetir
from drawing import SHAPES, Data, Program
from fences import fenced

THOROUGH = "SPARSETIR_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("SPARSETIR_EXAMPLES", "5"))
#: largest length of an axis in each data set of one program
LENGTHS = (6, 1, 3, 4)
TILES, CHUNKS, UNROLLS, PREFETCHES, LANES = (2, 8, 64), (0, 1, 3, 16), (1, 2, 3, 4), (0, 1, 8), (0, 2, 4, 8)

drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not THOROUGH,
    database=None,
    # Finding a smaller example compiles hundreds of programs: only where someone waits for it.
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if THOROUGH else [])],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
choices = st.builds(
    sparsetir.Choices,
    tile=st.sampled_from(TILES),
    chunks=st.sampled_from(CHUNKS),
    unroll=st.sampled_from(UNROLLS),
    prefetch=st.sampled_from(PREFETCHES),
    lanes=st.sampled_from(LANES),
    carry=st.sampled_from((0, 1)),
)


def run(kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Call a kernel on copies between unreadable pages; outputs are written in place."""
    held = {name: fenced(value) if isinstance(value, np.ndarray) else value for name, value in args.items()}
    kernel(**held)
    return held


def agree(program: Program, schedule: Any, seed: int) -> None:
    """Compile a program once and compare it with the interpreter on several data sets."""
    func = sparsetir.parse(program.text)
    kernel = sparsetir.build(func, schedule=schedule)
    for n, most in enumerate(LENGTHS):
        args = Data(program, seed + n, most).args
        expected = sparsetir.interpret(func, args)
        found = run(kernel, args)
        for name in program.results:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{name} of\n{program.text}\n{args}")


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_programs_agree_with_the_interpreter(shape: str) -> None:
    @drawn
    @given(program=SHAPES[shape], schedule=st.none() | choices, seed=st.integers(0, 1 << 20))
    def check(program: Program, schedule: Any, seed: int) -> None:
        agree(program, schedule, seed)

    check()


@pytest.mark.slow
def test_drawn_programs_survive_printing() -> None:
    @drawn
    @given(program=st.one_of(*SHAPES.values()))
    def check(program: Program) -> None:
        printed = sparsetir.script(sparsetir.parse(program.text))
        assert sparsetir.script(sparsetir.parse(printed)) == printed

    check()


@pytest.mark.slow
@pytest.mark.parametrize("feat", [1, 3, 7, 8, 31, 33, 64, 100, 200])
def test_every_choice_gives_the_same_numbers(feat: int) -> None:
    rng = np.random.default_rng(feat)
    A = sp.csr_array(sp.random_array((37, 29), density=0.2, dtype="float32", rng=rng))
    B = rng.uniform(-1, 1, (29, feat)).astype("float32")
    for tile, chunks, unroll, prefetch in [(8, 0, 1, 0), (16, 3, 2, 4), (128, 64, 4, 16), (32, 1, 8, 32)]:
        picked = sparsetir.Choices(tile=tile, chunks=chunks, unroll=unroll, prefetch=prefetch)
        kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=picked)
        np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what the drawn programs found

NO_SPATIAL = """
@T.prim_func
def dot(a: T.handle, y: T.handle, p: T.handle, i: T.handle, n: T.int32, z: T.int32, nd: T.int32):
    X = T.sparse_variable(None, (n, z), (p, i), "int32")
    D = T.dense_fixed(nd)
    A = T.match_sparse_buffer(a, (X,), "float32")
    Y = T.match_sparse_buffer(y, (D,), "float32")
    with T.sp_iter([X], "R", "dot") as [x]:
        with T.init():
            Y[0] = 2
        Y[0] = Y[0] + A[x]
"""

SEARCH_BELOW_TWO_RAGGED_LOOPS = """
@T.prim_func
def rows(a: T.handle, b: T.handle, p1: T.handle, p2: T.handle, p3: T.handle,
         n: T.int32, z1: T.int32, z2: T.int32, z3: T.int32):
    X0 = T.dense_fixed(n)
    X1 = T.dense_variable(X0, (4, z1), p1, "int32")
    X2 = T.dense_variable(X1, (4, z2), p2, "int32")
    X3 = T.dense_variable(X2, (4, z3), p3, "int32")
    A = T.match_sparse_buffer(a, (X0, X1, X2, X3), "float32")
    B = T.match_sparse_buffer(b, (X0, X1, X2, X3), "float32")
    with T.sp_iter([T.fuse(X0, X1), X2, X3], "SSSS", "rows") as [r, s, t, u]:
        B[r, s, t, u] = A[r, s, t, u] + T.cast(r, "float32")
"""

SEARCH_BELOW_CHUNKS = """
@T.prim_func
def last(a: T.handle, c: T.handle, p: T.handle, i: T.handle, q: T.handle, j: T.handle,
         n0: T.int32, z: T.int32, n1: T.int32, m: T.int32, w: T.int32):
    X0 = T.dense_variable(None, (n0, z), p, "int64")
    X1 = T.singleton(X0, n1, i, "int64")
    V = T.sparse_variable(None, (m, w), (q, j), "int32")
    A = T.match_sparse_buffer(a, (X0, X1), "float32")
    C = T.match_sparse_buffer(c, (V,), "float32")
    with T.sp_iter([T.fuse(X0, X1)], "RS", "last") as [x, y]:
        with T.init():
            C[2] = 2
        C[2] = C[2] + A[x, y]
"""

SEARCH_IN_A_SEARCH = """
@T.prim_func
def pairs(a: T.handle, b: T.handle, c: T.handle, i0: T.handle, p1: T.handle, q: T.handle, j0: T.handle, j1: T.handle,
          n: T.int32, z: T.int32, w: T.int32):
    X0 = T.singleton(None, n, i0, "int32")
    X1 = T.dense_variable(X0, (n, z), p1, "int32")
    V0 = T.sparse_variable(None, (n, w), (q, j0), "int32", unique=False)
    V1 = T.singleton(V0, n, j1, "int32")
    A = T.match_sparse_buffer(a, (X0, X1), "float32")
    B = T.match_sparse_buffer(b, (V0, V1), "float32")
    C = T.match_sparse_buffer(c, (X0, X1), "float32")
    with T.sp_iter([T.fuse(X0, X1)], "SS", "pairs") as [x, y]:
        C[x, y] = A[x, y] + B[x + 1, y]
"""

SAME_NAME_TWICE = """
@T.prim_func
def twice(a: T.handle, y: T.handle, p1: T.handle, p2: T.handle, n: T.int32, z1: T.int32, z2: T.int32):
    X0 = T.dense_fixed(n)
    X1 = T.dense_variable(X0, (4, z1), p1, "int32")
    X2 = T.dense_variable(X1, (4, z2), p2, "int32")
    A = T.match_sparse_buffer(a, (X0, X1, X2), "float32")
    S = T.alloc_sparse_buffer((X0, X1, X2), "float32")
    Y = T.match_sparse_buffer(y, (X0,), "float32")
    with T.sp_iter([X0, X1, X2], "SSS", "work") as [r, s, t]:
        S[r, s, t] = A[r, s, t] * 2
    with T.sp_iter([X0, X1, X2], "SRR", "work") as [r, s, t]:
        with T.init():
            Y[r] = 0
        Y[r] = Y[r] + S[r, s, t]
"""

REPEATED_BELOW_ATTACHED = """
@T.prim_func
def total(a: T.handle, y: T.handle, p0: T.handle, i0: T.handle, p1: T.handle, i1: T.handle,
          n: T.int32, z0: T.int32, z1: T.int32):
    I = T.sparse_variable(None, (n, z0), (p0, i0))
    J = T.sparse_variable(I, (n, z1), (p1, i1), unique=False)
    ALL = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (ALL,), "float32")
    with T.sp_iter([ALL, T.attach(J, ALL)], "SR", "total") as [i, j]:
        T.sp_iter_attr({"search": "SEARCH"})
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j]
"""

SEARCH_BELOW_ATTACHED = """
@T.prim_func
def weighted(a: T.handle, b: T.handle, y: T.handle, p0: T.handle, i0: T.handle, p1: T.handle, i1: T.handle,
             pb: T.handle, ib: T.handle, n: T.int32, z0: T.int32, z1: T.int32, zb: T.int32):
    J = T.dense_fixed(n)
    L = T.sparse_variable(J, (n, z0), (p0, i0))
    ALL = T.dense_fixed(n)
    I = T.sparse_variable(L, (n, z1), (p1, i1))
    JB = T.sparse_variable(None, (n, zb), (pb, ib))
    D = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (J, L, I), "float32")
    B = T.match_sparse_buffer(b, (JB,), "float32")
    Y = T.match_sparse_buffer(y, (D,), "float32")
    with T.sp_iter([J, ALL, T.attach(I, ALL)], "RRS", "weighted") as [j, l, i]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + B[j] * A[j, l, i]
"""

SCRATCH_BEHIND_A_SEARCH = """
@T.prim_func
def unused(a: T.handle, y: T.handle, i0: T.handle, n: T.int32):
    I = T.singleton(None, n, i0)
    D = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I,), "float32")
    Y = T.match_sparse_buffer(y, (D,), "float32")
    E = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([D], "S", "unused") as [i]:
        Y[i] = A[i]
        E[i] = A[i] - 1
"""


def _floats(*values: float) -> np.ndarray:
    return np.array(values, "float32")


def _ints(*values: int, dtype: str = "int32") -> np.ndarray:
    return np.array(values, dtype)


FOUND: dict[str, tuple[str, dict[str, Any], str]] = {
    "no spatial letter": (
        NO_SPATIAL,
        {"a": _floats(1, 2, 4), "y": _floats(9), "p": _ints(0, 3), "i": _ints(0, 1, 3), "n": 4, "z": 3, "nd": 1},
        "y",
    ),
    "a condition that needs an inner loop": (
        SEARCH_BELOW_TWO_RAGGED_LOOPS,
        {
            "a": _floats(1, 2, 3, 4),
            "b": _floats(9, 9, 9, 9),
            "p1": _ints(0, 1, 3),
            "p2": _ints(0, 0, 1, 2),
            "p3": _ints(0, 1, 4),
            **{"n": 2, "z1": 3, "z2": 2, "z3": 4},
        },
        "b",
    ),
    "a condition that needs the chunk's bounds": (
        SEARCH_BELOW_CHUNKS,
        {
            **{"a": _floats(1, 2, 4), "c": _floats(7, 7), "p": _ints(0, 3, dtype="int64")},
            **{"i": _ints(0, 2, 1, dtype="int64"), "q": _ints(0, 2), "j": _ints(1, 2)},
            **{"n0": 3, "z": 3, "n1": 2, "m": 4, "w": 2},
        },
        "c",
    ),
    "a search for what a search found": (
        SEARCH_IN_A_SEARCH,
        {
            **{"a": _floats(1, 2), "b": _floats(4, 8, 16), "c": _floats(9, 9), "i0": _ints(1), "p1": _ints(0, 2)},
            **{"q": _ints(0, 3), "j0": _ints(0, 2, 2), "j1": _ints(1, 0, 1), "n": 3, "z": 2, "w": 3},
        },
        "c",
    ),
    **{
        f"repeated entries below an attached axis, {search}": (
            REPEATED_BELOW_ATTACHED.replace("SEARCH", search),
            {
                **{"a": _floats(1, 10), "y": _floats(9, 9, 9), "p0": _ints(0, 1), "i0": _ints(1), "p1": _ints(0, 2)},
                **{"i1": _ints(2, 2), "n": 3, "z0": 1, "z1": 2},
            },
            "y",
        )
        for search in ("inline", "hoist", "merge")
    },
    "scratch where a search finds": (
        SCRATCH_BEHIND_A_SEARCH,
        {"a": _floats(3), "y": _floats(9, 9), "i0": _ints(1), "n": 2},
        "y",
    ),
    "a search beside an attached axis": (
        SEARCH_BELOW_ATTACHED,
        {
            **{
                "a": _floats(1, 1, 1),
                "b": _floats(2),
                "y": _floats(9, 9, 9),
                "p0": _ints(0, 1, 2, 2),
                "pb": _ints(0, 1),
            },
            **{"i0": _ints(1, 0), "p1": _ints(0, 2, 3), "i1": _ints(0, 2, 1), "ib": _ints(1)},
            **{"n": 3, "z0": 2, "z1": 3, "zb": 1},
        },
        "y",
    ),
    "two iterations of one name": (
        SAME_NAME_TWICE,
        {"a": _floats(1, 2, 4), "y": _floats(9), "p1": _ints(0, 2), "p2": _ints(0, 1, 3), "n": 1, "z1": 2, "z2": 3},
        "y",
    ),
}


@pytest.mark.parametrize(("text", "args", "result"), FOUND.values(), ids=FOUND)
def test_what_drawn_programs_found(text: str, args: dict[str, Any], result: str) -> None:
    func = sparsetir.parse(text)
    expected = sparsetir.interpret(func, args)[result]
    for schedule in (None, sparsetir.Choices(tile=8, chunks=0)):
        found = run(sparsetir.build(func, schedule=schedule), args)
        np.testing.assert_array_equal(found[result], expected)
