# SPDX-License-Identifier: Apache-2.0
"""The smallest forms of what random programs found."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
import pytest
import scipy.sparse as sp
from tvm import s_tir

import sparsetir
from decomposing import compiled
from fences import Fences, fenced
from sparsetir import formats
from sparsetir.errors import ScheduleError, VerifyError
from sparsetir.lower.analysis.accesses import places, sites

AHEAD_OF_A_SINGLETON = """
@T.prim_func
def gather(b: T.handle, c: T.handle, y: T.handle, i: T.handle, j: T.handle, n: T.int32, m: T.int32, w: T.int32):
    I = T.singleton(None, n, i)
    J = T.sparse_fixed(None, (m, w), j, sorted=False)
    D = T.dense_fixed(n)
    B = T.match_sparse_buffer(b, (J,), "float32")
    C = T.match_sparse_buffer(c, (D,), "int32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I], "S", "gather") as [k]:
        T.sp_iter_attr({"search": "hoist"})
        Y[k] = B[C[k]]
"""

AHEAD_OF_AN_ITERATION = """
@T.prim_func
def pairs(b: T.handle, c: T.handle, y: T.handle, j: T.handle, n: T.int32, m: T.int32, w: T.int32):
    I = T.dense_fixed(n)
    K = T.dense_fixed(2)
    J = T.sparse_fixed(None, (m, w), j)
    B = T.match_sparse_buffer(b, (J,), "float32")
    C = T.match_sparse_buffer(c, (I,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I], "S", "pairs") as [i]:
        T.sp_iter_attr({"search": "hoist"})
        Y[i] = B[i]
        with T.sp_iter([K], "R", "inner") as [k]:
            Y[i] = Y[i] + B[k + i] * C[i]
"""

AHEAD_OF_A_LOOP = AHEAD_OF_AN_ITERATION.replace(
    'with T.sp_iter([K], "R", "inner") as [k]:', "for k in T.serial(2):"
).replace("    K = T.dense_fixed(2)\n", "")

INIT_IN_A_FUSED_PAIR = """
@T.prim_func
def pair(a: T.handle, y: T.handle, p: T.handle, j: T.handle, n: T.int32, m: T.int32, z: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (m, z), (p, j))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([T.fuse(I, J)], "SS", "pair") as [i, k]:
        with T.init():
            Y[i] = 3
        Y[i] = Y[i] + A[i, k]
"""

INIT_BY_COORDINATE = """
@T.prim_func
def add(a: T.handle, y: T.handle, i: T.handle, j: T.handle, n: T.int32, m: T.int32, w: T.int32):
    I = T.sparse_fixed(None, (n, w), i, unique=False)
    J = T.singleton(I, m, j)
    D = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (D,), "float32")
    Y = T.match_sparse_buffer(y, (I, J), "float32")
    with T.sp_iter([D], "S", "add") as [d]:
        with T.init():
            Y[d, d + 1] = 5
        Y[d, d + 1] = Y[d, d + 1] + A[d]
"""

CHOICE_IN_A_CHOICE = """
@T.prim_func
def rows(s: T.handle, y: T.handle, i: T.handle, p: T.handle, d: T.int32, n: T.int32, m: T.int32, w: T.int32,
         l: T.int32, z: T.int32):
    D = T.dense_fixed(d)
    I = T.dense_fixed(n)
    J = T.sparse_fixed(I, (m, w), i)
    K = T.dense_variable(J, (l, z), p)
    S = T.match_sparse_buffer(s, (I, J, K), "float32")
    Y = T.match_sparse_buffer(y, (D,), "float32")
    with T.sp_iter([D], "S", "rows") as [x]:
        Y[x] = S[2, x, x + 1] * 2
"""


def _floats(*values: float) -> np.ndarray:
    return np.array(values, "float32")


def _ints(*values: int) -> np.ndarray:
    return np.array(values, "int32")


PAIRS = {"b": _floats(1, 2, 4), "c": _floats(1, 10), "y": _floats(9, 9), "j": _ints(0, 1, 2), "n": 2, "m": 3, "w": 3}
FOUND: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "a search ahead of a slot without a coordinate": (
        AHEAD_OF_A_SINGLETON,
        {"b": _floats(7), "c": _ints(0, 0), "y": _floats(9), "i": _ints(2), "j": _ints(0), "n": 2, "m": 1, "w": 1},
        [9],
    ),
    "a search in an iteration inside": (AHEAD_OF_AN_ITERATION, PAIRS, [1 + 1 + 2, 2 + 20 + 40]),
    "a search in a loop inside": (AHEAD_OF_A_LOOP, PAIRS, [1 + 1 + 2, 2 + 20 + 40]),
    "a fused pair without columns": (
        INIT_IN_A_FUSED_PAIR,
        {"a": _floats(), "y": _floats(9, 9), "p": _ints(0, 0, 0), "j": _ints(), "n": 2, "m": 0, "z": 0},
        [3, 3],
    ),
    "a choice in a choice that reads": (
        CHOICE_IN_A_CHOICE,
        {
            **{"s": _floats(1, 2, 3, 4, 5), "y": _floats(9, 9), "i": _ints(0, 2, 3, 3), "p": _ints(0, 1, 3, 5, 5)},
            **{"d": 2, "n": 1, "m": 3, "w": 4, "l": 3, "z": 5},
        },
        [0, 0],
    ),
    "every entry at a coordinate is initialised": (
        INIT_BY_COORDINATE,
        {
            **{
                "a": _floats(1, 2, 4),
                "y": _floats(9, 9, 9, 9, 9),
                "i": _ints(0, 0, 0, 1, 3),
                "j": _ints(1, 0, 1, 2, 0),
            },
            **{"n": 3, "m": 3, "w": 5},
        },
        [6, 9, 5, 7, 9],
    ),
}


@pytest.mark.parametrize(("text", "args", "expected"), FOUND.values(), ids=FOUND)
def test_found(text: str, args: dict[str, Any], expected: list[float]) -> None:
    kernel, fences = compiled(sparsetir.parse(text)), Fences()
    held = {name: fences.fenced(a) if isinstance(a, np.ndarray) else a for name, a in args.items()}
    kernel(**held)
    assert held["y"].tolist() == expected


UNREAD = """
@T.prim_func
def scale(a: T.handle, b: T.handle, i: T.handle, n: T.int32, w: T.int32):
    I = T.sparse_fixed(None, (n, w), i)
    K = T.dense_fixed(2)
    D = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (D,), "float32")
    B = T.match_sparse_buffer(b, (I,), "float32")
    with T.sp_iter([I, K], "SR", "scale") as [j, k]:
        A[j] = A[j] + B[j]
"""


def test_a_cache_that_nobody_reads_copies_nothing() -> None:
    """The copy would read the element of a slot without a coordinate."""
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(UNREAD), stage=2))
    copied = sch.cache_read(sch.get_sblock("scale"), 0, "global")
    sch.compute_at(sch.cache_read(copied, 0, "global"), sch.get_loops(copied)[-1])
    kernel, fences = sparsetir.build(sch, {"kind": "llvm", "opt-level": 0}), Fences()
    a = fences.fenced(_floats(1, 2))
    kernel(a=a, b=fences.fenced(_floats(3, 4)), i=fences.fenced(_ints(1, 2)), n=2, w=2)
    assert a.tolist() == [1, 8]


ATTACHED = """
@T.prim_func
def reached(h: T.handle, y: T.handle, u: T.handle, j: T.handle, n: T.int32, m: T.int32, w: T.int32):
    V = T.dense_fixed(n)
    U = T.singleton(V, m, u)
    W = T.sparse_fixed(None, (m, w), lambda s: s)
    X = T.singleton(W, m, j)
    H = T.match_sparse_buffer(h, (V,), "float32")
    Y = T.match_sparse_buffer(y, (V,), "float32")
    with T.sp_iter([V, U, T.attach(X, U)], "SRR", "reached") as [v, c, x]:
        Y[v] = Y[v] + H[v]
"""


def test_a_copy_ahead_of_an_attached_axis_without_steps() -> None:
    """Whether a slot of the attached axis has a coordinate is only known where there is a slot."""
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(ATTACHED), stage=2))
    block = sch.get_sblock("reached")
    names = [str(r.source.name) for r in sch.get(block).reads]
    sch.cache_read(block, names.index("h"), "global")
    kernel, fences = sparsetir.build(sch, {"kind": "llvm", "opt-level": 0}), Fences()
    y, u, j = (fences.fenced(x) for x in (_floats(1, 2, 3), _ints(2, 0, 1), _ints(0, 3)))
    kernel(h=fences.fenced(_floats(4, 5, 6)), y=y, u=u, j=j, n=3, m=3, w=2)
    assert y.tolist() == [1, 7, 3]


STORED_AND_READ = """
@T.prim_func
def passed(f: T.handle, g: T.handle, h: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    F = T.match_sparse_buffer(f, (I,), "float32")
    G = T.match_sparse_buffer(g, (I,), "float32")
    H = T.match_sparse_buffer(h, (I,), "float32")
    with T.sp_iter([I], "S", "passed") as [i]:
        F[i] = G[i]
        H[i] = H[i] + F[i]
"""
KEPT = STORED_AND_READ.replace("        H[i] = H[i] + F[i]\n", "").replace("F[i] = G[i]", "F[0] = F[0]")


@pytest.mark.parametrize(
    ("text", "primitive", "expected"),
    [(STORED_AND_READ, "cache_write", [3, 4]), (KEPT, "cache_inplace", [1, 2])],
)
def test_a_cache_that_is_read_where_it_is_stored(text: str, primitive: str, expected: list[float]) -> None:
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(text), stage=2))
    getattr(sch, primitive)(sch.get_sblock("passed"), 0, "global")
    args = {"f": _floats(1, 2), "g": _floats(3, 4), "h": _floats(5, 6)}
    sparsetir.build(sch, {"kind": "llvm", "opt-level": 0})(**args, n=2)
    assert args["f"].tolist() == expected


TRANSPOSED = """
@T.prim_func
def double(a: T.handle, b: T.handle, p: T.handle, j: T.handle, n: T.int32, z: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (n, z), (p, j))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J, I), "float32")
    with T.sp_iter([I, J], "SS", "double") as [i, j_]:
        A[i, j_] = B[j_, i] * 2
"""


def test_a_structure_with_its_axes_in_two_orders_is_not_called_over_formats() -> None:
    parts = sparsetir.decompose_format(sparsetir.parse(TRANSPOSED), {"A": formats.coo()})
    with pytest.raises(VerifyError, match=r"over \(I, J\), but B is over \(J, I\): list the same axes in one order"):
        sparsetir.build(parts)


SIZES = {"m": 2, "n": 2, "z": 4, "w": 1}
ATTACHED_BY_RULE = """
@T.prim_func
def shifted(a: T.handle, b: T.handle, p: T.handle, j: T.handle, m: T.int32, n: T.int32, z: T.int32, w: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, z), (p, j))
    K = T.singleton(J, w, lambda i, j, s: j)
    D = T.dense_fixed(w)
    A = T.match_sparse_buffer(a, (I, J, K), "float32")
    B = T.match_sparse_buffer(b, (D,), "int32")
    with T.sp_iter([I, J, K], "RSR", "add") as [i, j_, k]:
        A[B[k], i, j_] = A[B[k], i, j_] + T.float32(1)
"""


def test_a_search_at_an_attached_coordinate_by_rule_stays_where_that_is_there() -> None:
    sch = sparsetir.Schedule(sparsetir.parse(ATTACHED_BY_RULE))
    sch.set_search("add", "hoist")
    sch.to_dense("add", "J", guard=True)
    assert "sp.find(" not in sparsetir.lower(sch.func, stage=2).script().partition('sblock("add_0")')[0]
    args = {"p": np.array([0, 2, 4], "int32"), "j": np.array([0, 1, 0, 1], "int32")}
    a, b = np.zeros(4, "float32"), fenced(np.array([1], "int32"))
    expected = sparsetir.interpret(sparsetir.parse(ATTACHED_BY_RULE), {**args, "a": a.copy(), "b": b, **SIZES})["a"]
    sparsetir.build(sch, {"kind": "llvm", "opt-level": 0})(**args, a=a, b=b, **SIZES)
    assert a.tolist() == np.asarray(expected).tolist()


LAST_OF_NONE = """
@T.prim_func
def cleared(a: T.handle, b: T.handle, n: T.int32, m: T.int32):
    I = T.dense_fixed(n)
    J = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (J,), "float32")
    B = T.match_sparse_buffer(b, (I,), "float32")
    with T.sp_iter([I, J], "SS", "clear") as [i, j]:
        A[j] = T.float32(0)
"""


def test_a_cache_is_not_written_below_a_loop_that_its_elements_do_not_follow() -> None:
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(LAST_OF_NONE), stage=2))
    sch.cache_write(sch.get_sblock("clear"), 0, "global")
    with pytest.raises(ScheduleError, match="stores to the cache a_global below loop i, which may run zero times"):
        sparsetir.build(sch)


def test_a_copy_of_another_array_is_no_copy_of_the_cached_one() -> None:
    text = LAST_OF_NONE.replace("A[j] = T.float32(0)", "A[j] = B[i]")
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(text), stage=2))
    sch.cache_write(sch.get_sblock("clear"), 0, "global")
    with pytest.raises(ScheduleError, match="stores to the cache a_global below loop i, which may run zero times"):
        sparsetir.build(sch)


AT_A_PADDED_PLACE = """
@T.prim_func
def least(a: T.handle, b: T.handle, p: T.handle, i: T.handle, k: T.handle, n: T.int32, z: T.int32, m: T.int32):
    I = T.sparse_variable(None, (n, z), (p, i))
    K = T.singleton(I, m, k)
    D = T.dense_fixed(n)
    E = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (D, E), "float32")
    B = T.match_sparse_buffer(b, (I, K), "float32")
    with T.sp_iter([I, K], "SS", "least") as [x, y]:
        A[x, y] = T.min(A[x, y], B[x, y])
"""


def test_an_element_at_an_absent_coordinate_is_not_cached() -> None:
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(AT_A_PADDED_PLACE), stage=2))
    sch.blockize(sch.get_loops(sch.get_sblock("least"))[-1])
    block = sch.get_sblock("least")
    sch.cache_inplace(block, [str(r.source.name) for r in sch.get(block).reads].index("a"), "global")
    with pytest.raises(ScheduleError, match=r"copies elements that may not exist: they are read only where .*k\["):
        sparsetir.build(sch)


AT_A_CONSTANT = """
@T.prim_func
def gathered(b: T.handle, c: T.handle, y: T.handle, p: T.handle, j: T.handle, n: T.int32, m: T.int32, z: T.int32,
             w: T.int32):
    I = T.dense_fixed(n)
    J = T.dense_variable(I, (m, z), p)
    K = T.singleton(J, w, lambda i, j, s: 1)
    S = T.sparse_fixed(None, (m, n), j, sorted=False)
    D = T.dense_fixed(w)
    B = T.match_sparse_buffer(b, (S,), "float32")
    C = T.match_sparse_buffer(c, (D,), "int32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J, K], "SRR", "gathered") as [i, s, k]:
        T.sp_iter_attr({"search": "hoist"})
        Y[i] = Y[i] + B[C[k]]
"""


@pytest.mark.parametrize("width", [1, 2])
def test_a_search_at_a_constant_coordinate_stays_where_that_is_there(width: int) -> None:
    func = sparsetir.parse(AT_A_CONSTANT)
    assert "gathered_find" not in sparsetir.lower(func, stage=2).script()
    args = {"b": _floats(3, 4), "p": _ints(0, 1, 3), "j": _ints(0, 1), "y": _floats(0, 0)}
    sizes, c = {"n": 2, "m": 2, "z": 3, "w": width}, fenced(_ints(0, 1)[:width])
    expected = sparsetir.interpret(func, {**args, "y": args["y"].copy(), "c": c, **sizes})["y"]
    compiled(func)(**args, c=c, **sizes)
    assert args["y"].tolist() == np.asarray(expected).tolist() == ([0, 0] if width == 1 else [4, 8])


WIDE_ROWS = """
@T.prim_func
def sums(a: T.handle, b: T.handle, p: T.handle, j: T.handle, n: T.int32, m: T.int32, z: T.int32):
    I = T.dense_fixed(n, "int64")
    J = T.sparse_variable(I, (m, z), (p, j), "int64")
    D = T.dense_fixed(m, "int64")
    A = T.match_sparse_buffer(a, (I,), "float32")
    B = T.match_sparse_buffer(b, (D,), "float32")
    with T.sp_iter([I, J], "SR", "sums") as [i, k]:
        A[i] = A[i] + B[k]
"""


@pytest.mark.parametrize("chunks", [2, 16])
def test_rows_with_int64_positions_and_int32_sizes_are_balanced(chunks: int) -> None:
    func = sparsetir.parse(WIDE_ROWS)
    choices = {"tile": 8, "chunks": chunks, "unroll": 4, "prefetch": 0, "stream": 0, "carry": 1, "panel": 0, "lanes": 4}
    kernel = sparsetir.build(func, schedule=sparsetir.Choices(**choices))
    p, j = np.array([0, 3, 3, 40], "int64"), np.arange(40, dtype="int64") % 11
    b, a = np.arange(11, dtype="float32"), np.zeros(3, "float32")
    kernel(a=a, b=b, p=p, j=j, n=3, m=11, z=40)
    assert a.tolist() == [b[j[s:e]].sum() for s, e in itertools.pairwise(p)]


ROWS_THAT_MAY_NOT_EXIST = """
@T.prim_func
def total(f: T.handle, e: T.handle, i: T.handle, p: T.handle, j: T.handle, n: T.int32, r: T.int32, m: T.int32,
          z: T.int32):
    V = T.singleton(None, n, i)
    W = T.dense_fixed(r)
    J = T.sparse_variable(W, (m, z), (p, j))
    D = T.dense_fixed(m)
    O = T.dense_fixed(1)
    F = T.match_sparse_buffer(f, (D,), "float32")
    E = T.match_sparse_buffer(e, (O,), "float32")
    with T.sp_iter([V, T.attach(J, V)], "RR", "total") as [v, k]:
        with T.init():
            E[0] = 1
        E[0] = E[0] + F[k]
"""


@pytest.mark.parametrize("row", [0, 1, 2**30])
def test_a_row_that_may_not_exist_is_summed_where_it_does(row: int) -> None:
    kernel = sparsetir.build(sparsetir.parse(ROWS_THAT_MAY_NOT_EXIST), schedule=sparsetir.Choices(lanes=2))
    arrays = {"f": _floats(5), "i": _ints(row), "p": fenced(_ints(0, 1)), "j": fenced(_ints(0)), "e": _floats(7)}
    kernel(**arrays, n=2**31 - 1, r=1, m=1, z=1)
    assert arrays["e"].tolist() == [1 + (5 if row == 0 else 0)]


LAST_OF_A_RAGGED_ROW = """
@T.prim_func
def last(a: T.handle, b: T.handle, p: T.handle, n: T.int32, z: T.int32):
    X = T.dense_variable(None, (n, z), p)
    O = T.dense_fixed(1)
    D = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (O,), "float32")
    B = T.match_sparse_buffer(b, (O, D), "float32")
    with T.sp_iter([X, O], "SS", "last") as [x, o]:
        A[o] = B[o, x]
"""


def test_the_last_step_wins_in_any_schedule() -> None:
    func = sparsetir.parse(LAST_OF_A_RAGGED_ROW)
    for is_turned in (False, True):
        sch = s_tir.Schedule(sparsetir.lower(func, stage=2))
        x, o = sch.get_loops(sch.get_sblock("last"))
        outer, inner = sch.split(x, [None, 4])
        sch.reorder(*((o, inner, outer) if is_turned else (o, outer, inner)))
        if is_turned:
            with pytest.raises(ScheduleError, match="does not keep that of x"):
                sparsetir.build(sch)
            continue
        args = {"a": _floats(3), "b": _floats(3, 1, 3, 3, -1).reshape(1, 5), "p": _ints(0, 5)}
        sparsetir.build(sch)(**args, n=5, z=5)
        assert args["a"].tolist() == [-1]


NESTED_SEARCHES = """
@T.prim_func
def program(a: T.handle, b: T.handle, px1: T.handle, ix1: T.handle, ix3: T.handle,
            nx0: T.int32, nx1: T.int32, zx1: T.int32, nx2: T.int32, wx2: T.int32, nx3: T.int32):
    X0 = T.dense_fixed(nx0)
    X1 = T.sparse_variable(X0, (nx1, zx1), (px1, ix1), sorted=False)
    X2 = T.sparse_fixed(X1, (nx2, wx2), lambda c0, c1, s: 2 * s)
    X3 = T.singleton(X2, nx3, ix3, sorted=False)
    D3 = T.dense_fixed(nx3)
    A = T.match_sparse_buffer(a, (X0, X1, X2, X3), "float32")
    B = T.match_sparse_buffer(b, (D3,), "int32")
    with T.sp_iter([X0, X1, X2, X3], "SSSS", "work") as [x0, x1, x2, x3]:
        A[B[x3], x3, x1, B[x3]] = A[B[x3], x3, x1, B[x3]] + 1
"""


@pytest.mark.slow
def test_readers_of_a_copy_below_the_same_conditions_are_looked_at_once() -> None:
    """Nested searches repeat their conditions: each of hundreds of readers was compared with all conditions of all."""
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(NESTED_SEARCHES), stage=2))
    block = sch.get_sblock("work_0")
    copy = sch.cache_read(block, 0, "global")
    sch.compute_at(copy, sch.get_loops(block)[0])
    found = [s for s in sites(sch.mod["main"]) if str(s.buffer.name) == "px1_global" and not s.is_store]
    assert len(found) > 100
    assert len(places(found)) < 30
    sparsetir.lower(sch.mod["main"], stage=3)


EACH_ENTRY_ITS_OWN = """
@T.prim_func
def each(g: T.handle, p: T.handle, j: T.handle, k: T.handle, n: T.int32, m: T.int32, z: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (m, z), (p, j), unique=False)
    K = T.singleton(J, n, k)
    G = T.match_sparse_buffer(g, (I, J, K), "float32")
    with T.sp_iter([I, J, K], "SSS", "each") as [x, y, w]:
        G[w, y, x] = G[w, y, x] + 3
"""


def test_each_of_several_entries_with_one_coordinate_is_its_own() -> None:
    func = sparsetir.parse(EACH_ENTRY_ITS_OWN)
    args = {"p": _ints(0, 3, 4), "j": _ints(0, 0, 1, 0), "k": _ints(0, 0, 1, 0), "g": _floats(-2, 0, 1, 5)}
    sizes = {"n": 2, "m": 2, "z": 4}
    expected = sparsetir.interpret(func, {**args, "g": args["g"].copy(), **sizes})["g"]
    compiled(func)(**args, **sizes)
    assert args["g"].tolist() == np.asarray(expected).tolist()
    assert args["g"].tolist()[:2] == [1, 3]


BELOW_ITS_OWN_PARENT = """
@T.prim_func
def below(a: T.handle, b: T.handle, c: T.handle, j: T.handle, i: T.handle, p: T.handle, k: T.handle, m: T.int32,
          n: T.int32, w: T.int32, z: T.int32, zb: T.int32):
    J = T.sparse_fixed(None, (n, z), j, unique=False)
    I = T.singleton(J, m, i)
    J_dense = T.dense_fixed(n)
    I_dense = T.dense_fixed(m)
    K = T.sparse_variable(J_dense, (w, zb), (p, k))
    K_dense = T.dense_fixed(w)
    A = T.match_sparse_buffer(a, (J, I), "float32")
    B = T.match_sparse_buffer(b, (J_dense, K), "float32")
    C = T.match_sparse_buffer(c, (I_dense, K_dense), "float32")
    with T.sp_iter([J, T.attach(I, J), T.attach(K, J)], "RSS", "below") as [x, y, v]:
        C[y, v] = C[y, v] + A[x, y] * B[x, v]
"""


def test_an_axis_attached_to_its_own_parent_hangs_from_each_entry_of_it() -> None:
    func = sparsetir.parse(BELOW_ITS_OWN_PARENT)
    args = {"a": _floats(1, 2, 4), "j": _ints(0, 0, 1), "i": _ints(0, 1, 1), "b": _floats(1, 10, 100)}
    args |= {"p": _ints(0, 2, 3), "k": _ints(0, 1, 1), "m": 2, "n": 2, "w": 2}
    expected = [[1, 10], [2, 20 + 400]]
    found = sparsetir.interpret(func, {**args, "c": np.zeros((2, 2), "float32"), "z": 3, "zb": 3})["c"]
    assert np.asarray(found).tolist() == expected
    c = np.zeros((2, 2), "float32")
    compiled(func)(c=c, **args)
    assert c.tolist() == expected


STARTS_OF_REPEATED_COORDINATES = """
@T.prim_func
def starts(a: T.handle, c: T.handle, j: T.handle, k: T.handle, p: T.handle, m: T.int32, n: T.int32, z: T.int32,
           o: T.int32, w: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, z), (p, j))
    K = T.sparse_fixed(None, (o, w), k, sorted=False, unique=False)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, K, J], "SSR", "starts") as [i, k, j]:
        with T.init():
            C[i, k] = 1
        C[i, k] = C[i, k] + A[i, j]
"""


@pytest.mark.parametrize(
    "chosen", [formats.csr(), formats.ell(), formats.dcsr(), formats.hyb(1, (1, 2)), formats.bsr(2, 2)]
)
def test_each_slot_of_a_repeated_coordinate_is_initialised(chosen: Any) -> None:
    A = np.array([[2, 0], [0, 0], [1, 4], [0, 0]], np.float32)
    program = sparsetir.decompose_format(sparsetir.parse(STARTS_OF_REPEATED_COORDINATES), {"A": chosen})
    start = np.full((4, 3), np.nan, np.float32)
    result = sparsetir.build(program)(A=sp.csr_array(A), c=start, k=np.array([1, 0, 1], np.int32), m=4, o=2)
    result = start if result is None else result
    np.testing.assert_array_equal(result, np.repeat(A.sum(1, keepdims=True) + 1, 3, axis=1))


def test_starts_of_repeated_coordinates_elsewhere_are_refused() -> None:
    text = STARTS_OF_REPEATED_COORDINATES.replace("C[i, k] = 1", "C[0, k] = 1")
    with pytest.raises(VerifyError, match="initialises C over axis K, which repeats coordinates, at other coordinates"):
        sparsetir.decompose_format(
            sparsetir.parse(
                text.replace("(I, K)", "(K, I)").replace("C[0, k]", "C[0, i]").replace("C[i, k]", "C[k, i]")
            ),
            {"A": formats.ell()},
        )


EXTREMES_OF_SEARCHES = """
@T.prim_func
def extremes(a: T.handle, b: T.handle, c: T.handle, o: T.handle, p: T.handle, j: T.handle, k: T.handle, l: T.handle,
             m: T.int64, y: T.int64, n: T.int64, z: T.int64, q: T.int64):
    I = T.dense_variable(None, (m, y), o)
    J = T.sparse_variable(I, (n, z), (p, j), sorted=False, unique=False)
    K = T.singleton(None, q, k)
    L = T.singleton(K, q, l, sorted=False)
    N = T.dense_fixed(n, "int32")
    M = T.dense_fixed(m, "int32")
    A = T.match_sparse_buffer(a, (I, J), "DTYPE")
    B = T.match_sparse_buffer(b, (K, L), "DTYPE")
    C = T.match_sparse_buffer(c, (N, M), "DTYPE")
    with T.sp_iter([I, J], "SS", "extremes") as [v, w]:
        A[v, w] = T.min(B[v, v - 1], C[w, v] * T.DTYPE(2))
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_condition_is_not_named_in_another_branch(dtype: str) -> None:
    program = sparsetir.parse(EXTREMES_OF_SEARCHES.replace("DTYPE", dtype))
    kind, index = np.dtype(dtype), np.int32
    arguments = {
        "a": np.zeros(3, kind), "b": np.array([-3], kind), "c": np.arange(6).reshape(2, 3).astype(kind),
        "o": np.array([0, 3], index), "p": np.array([0, 2, 3, 3], index), "j": np.array([1, 0, 1], index),
        "k": np.array([1], index), "l": np.array([0], index), "m": 3, "y": 3, "n": 2, "z": 3, "q": 3,
    }  # fmt: skip
    sparsetir.build(program)(**arguments)
    np.testing.assert_array_equal(arguments["a"].astype(np.float32), [0, 0, -3])


@pytest.mark.parametrize("optimised", [None, {"kind": "llvm", "opt-level": 0}])
@pytest.mark.parametrize(
    "value",
    [
        "T.min(E[x], T.Cast('float64', C[x]))",
        "T.min(E[x], T.Cast('float64', T.Cast('float32', C[x])))",
        "T.Cast('float64', T.min(T.Cast('float32', E[x]), T.Cast('float32', C[x])))",
        "T.min(E[x], T.Cast('float64', T.Cast('int32', C[x])))",
    ],
)
def test_a_bfloat16_that_may_be_absent_is_converted_in_the_meaning_of_a_name(value: str, optimised: Any) -> None:
    text = f"""
@T.prim_func
def least(c: T.handle, e: T.handle, k: T.handle, n: T.int32, m: T.int32):
    X = T.dense_fixed(n)
    K = T.sparse_fixed(None, (n, m), k, sorted=False)
    C = T.match_sparse_buffer(c, (K,), "bfloat16")
    E = T.match_sparse_buffer(e, (X,), "float64")
    with T.sp_iter([X], "S", "least") as [x]:
        E[x] = {value}
"""
    e, c = np.array([1.0, -9, 5]), np.array([-4, 3]).astype("bfloat16")
    sparsetir.build(sparsetir.parse(text), optimised)(c=c, e=e, k=np.array([2, 0], np.int32), n=3, m=2)
    assert e.tolist() == [1, -9, -4]
