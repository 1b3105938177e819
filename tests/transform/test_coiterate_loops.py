# SPDX-License-Identifier: Apache-2.0
"""Loops over unions and intersections: compiled, interpreted and in numpy, over members of many formats."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from tvm.script import sparsetir as T

import sparsetir
from sparsetir.errors import StructureError
from sparsetir.ir.interpreter import interpret

NAMES = "abcd"

#: of each format of a member below dense rows: the declaration of its axis, and how its rows are drawn
FORMATS = {
    "csr": ("T.sparse_variable(I, n, (p_{x}, i_{x}))", dict(sorted=True, unique=True)),
    "long": ('T.sparse_variable(I, n, (p_{x}, i_{x}), "int64")', dict(sorted=True, unique=True)),
    "repeated": ("T.sparse_variable(I, n, (p_{x}, i_{x}), unique=False)", dict(sorted=True, unique=False)),
    "unsorted": ("T.sparse_variable(I, n, (p_{x}, i_{x}), sorted=False)", dict(sorted=False, unique=True)),
    "bag": ("T.sparse_variable(I, n, (p_{x}, i_{x}), sorted=False, unique=False)", dict(sorted=False, unique=False)),
    "ell": ("T.sparse_fixed(I, (n, 3), i_{x})", dict(width=3)),
    "band": ("T.sparse_fixed(I, (n, 3), lambda i, s: i + s - 1)", dict(band=True)),
    "ragged": ("T.dense_variable(I, n, p_{x})", dict(ragged=True)),
}
BODIES = {
    ("union", "sum"): 'Y[i] + ({sum}) * T.cast(j + 1, "float64")',
    ("intersect", "sum"): 'Y[i] + ({product}) * T.cast(j + 1, "float64")',
    ("union", "min"): "T.min(Y[i], {sum})",
    ("intersect", "min"): "T.min(Y[i], {sum})",
}
STARTS = {"sum": 0.0, "min": np.inf}


@functools.cache
def program(merge: str, formats: tuple[str, ...], kind: str, search: str = ""):
    """``Y[i]`` from the rows of members that are walked together."""
    members = NAMES[: len(formats)]
    held = [f"p_{x}" for x, f in zip(members, formats, strict=True) if f not in ("ell", "band")]
    held += [f"i_{x}" for x, f in zip(members, formats, strict=True) if f not in ("band", "ragged")]
    reads = [f"{x.upper()}[i, j] * T.float64({k + 1})" for k, x in enumerate(members)]
    start = "T.float64(0)" if kind == "sum" else 'T.infinity("float64")'
    value = BODIES[merge, kind].format(sum=" + ".join(reads), product=" * ".join(reads))
    lines = [
        "@T.prim_func",
        f"def merged({', '.join(f'{h}: T.handle' for h in [*members, 'y', *held])}, m: T.int32, n: T.int32):",
    ]
    lines += ["    I = T.dense_fixed(m)"]
    for x, f in zip(members, formats, strict=True):
        lines.append(f"    J{x} = {FORMATS[f][0].format(x=x)}")
    for x in members:
        lines.append(f'    {x.upper()} = T.match_sparse_buffer({x}, (I, J{x}), "float64")')
    lines += ['    Y = T.match_sparse_buffer(y, (I,), "float64")']
    lines += [f'    with T.sp_iter([I, T.{merge}({", ".join(f"J{x}" for x in members)})], "SR", "merged") as [i, j]:']
    lines += [f'        T.sp_iter_attr({{"search": "{search}"}})'] if search else []
    lines += ["        with T.init():", f"            Y[i] = {start}", f"        Y[i] = {value}"]
    return sparsetir.parse("\n".join(lines))


@functools.cache
def kernel(*key):
    return sparsetir.build(program(*key))


def member(
    rng: np.random.Generator, x: str, m: int, n: int, *, sorted=True, unique=True, width=0, band=False, ragged=False
):
    """(arrays, values by coordinate added up, number of entries by coordinate) of a member."""
    rows = []
    for i in range(m):
        if band:
            held = [i + s - 1 for s in range(3)]
        elif ragged:
            held = list(range(int(rng.integers(0, n + 1))))
        else:
            held = [int(c) for c in rng.permutation(n)[: rng.integers(0, (width or n) + 1)]]
            held += [held[0]] * int(rng.integers(0, 3)) if held and not unique else []
            held = np.sort(held).tolist() if sorted else held
        rows.append(held + [n] * max(0, width - len(held)))
    flat = np.array([c for row in rows for c in row], int)
    values = rng.integers(1, 6, len(flat)).astype("float64")
    total, count = np.zeros((m, n)), np.zeros((m, n), int)
    for i, c, v in zip(np.repeat(np.arange(m), [len(r) for r in rows]), flat, values, strict=True):
        if 0 <= c < n:
            total[i, c] += v
            count[i, c] += 1
    arrays = {x: values, f"i_{x}": flat, f"p_{x}": np.cumsum([0, *(len(r) for r in rows)])}
    return arrays, total, count


def expected(merge: str, kind: str, totals: list[np.ndarray], counts: list[np.ndarray]) -> np.ndarray:
    """The same in numpy, over dense matrices and patterns."""
    weighted = [t * (k + 1) for k, t in enumerate(totals)]
    pattern = np.any(counts, axis=0) if merge == "union" else np.all(counts, axis=0)
    if kind == "min":
        return np.min(np.where(pattern, sum(weighted), np.inf), axis=1, initial=np.inf)
    combined = sum(weighted) if merge == "union" else np.prod(weighted, axis=0)
    return (np.where(pattern, combined, 0) * np.arange(1, totals[0].shape[1] + 1)).sum(1)


SUMS = [
    ("csr", "csr"),
    ("csr", "csr", "csr", "csr"),
    ("ell", "csr", "band"),
    ("long", "csr"),
    ("ragged", "csr"),
    ("repeated", "csr", "repeated"),
    ("bag", "unsorted", "csr"),
    ("csr", "bag"),
    ("unsorted", "ell", "ragged", "repeated"),
]
SHAPES = [(0, 0), (0, 3), (3, 0), (1, 1), (4, 5), (7, 3), (3, 9)]
CASES = [
    *((merge, formats, "sum") for merge in ("union", "intersect") for formats in SUMS),
    *((merge, ("csr", "unsorted", "ell"), "min") for merge in ("union", "intersect")),
    ("intersect", ("csr", "csr", "ell"), "sum", "inline"),
    ("intersect", ("csr", "csr"), "sum", "hoist"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join([c[0], *c[1], *c[2:]]))
def test_loops_give_what_the_language_means(case):
    merge, formats, kind, *_ = case
    for seed, (m, n) in enumerate(SHAPES):
        rng = np.random.default_rng(seed)
        drawn = [member(rng, x, m, n, **FORMATS[f][1]) for x, f in zip(NAMES, formats, strict=False)]
        func = program(*case)
        wanted = {str(p.name): str(p.ty.dtype) for p in func.params}
        args = {k: v.astype(wanted[k]) for arrays, _, _ in drawn for k, v in arrays.items() if k in wanted} | {
            "m": m,
            "n": n,
        }
        right = expected(merge, kind, [t for _, t, _ in drawn], [c for _, _, c in drawn])
        np.testing.assert_array_equal(interpret(func, args)["y"], right)
        np.testing.assert_array_equal(kernel(*case)(**args), right)


def test_rows_that_should_be_sorted_are_refused():
    args = dict(a=np.ones(2), b=np.ones(1), p_a=[0, 2], i_a=[1, 0], p_b=[0, 1], i_b=[0], m=1, n=2)
    arrays = {k: np.asarray(v, "int32") if "_" in k else v for k, v in args.items()}
    for merge in ("union", "intersect"):
        arrays |= dict(i_a=np.array([0, 1], "int32"), i_b=np.array([0], "int32"))
        kernel(merge, ("csr", "csr"), "sum")(**arrays)
    with pytest.raises(StructureError, match="not sorted in row 0"):
        kernel("union", ("csr", "csr"), "sum")(**arrays | {"i_a": np.array([1, 0], "int32")})


# ---------------------------------------------------------------------------------------------- other trees


@T.prim_func
def columns(
    a: T.handle, b: T.handle, y: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32,
):  # fmt: skip
    J = T.dense_fixed(n)
    IA = T.sparse_variable(J, m, (ap, ai))
    IB = T.sparse_variable(J, m, (bp, bi))
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (IA, J), "float64")
    B = T.match_sparse_buffer(b, (IB, J), "float64")
    Y = T.match_sparse_buffer(y, (I,), "float64")
    with T.sp_iter([J, T.union(IA, IB)], "RS", "columns") as [j, i]:
        with T.init():
            Y[i] = T.float64(-1)
        Y[i] = Y[i] + A[i, j] * T.float64(10) - B[i, j]


def test_columns_are_merged_and_every_row_is_initialised():
    ap, ai, a = [0, 2, 2, 3], [0, 2, 1], [1, 2, 3]
    bp, bi, b = [0, 1, 3, 3], [2, 0, 3], [5, 6, 7]
    args = dict(zip(("ap", "ai", "bp", "bi"), (np.array(x, "int32") for x in (ap, ai, bp, bi)), strict=True))
    args |= dict(a=np.array(a, "float64"), b=np.array(b, "float64"), m=5, n=3)
    right = [-1 + 10 - 6, -1 + 30, -1 + 20 - 5, -1 - 7, -1]
    assert interpret(columns, args)["y"].tolist() == right
    assert sparsetir.build(columns)(**args).tolist() == right


@T.prim_func
def trees(
    a: T.handle, b: T.handle, s: T.handle, t: T.handle, u: T.handle,
    ip: T.handle, ii: T.handle, jp: T.handle, ji: T.handle, kp: T.handle, ki: T.handle,
    iq: T.handle, ij: T.handle, jq: T.handle, jj: T.handle, kq: T.handle, kj: T.handle,
    m: T.int32, n: T.int32, o: T.int32,
):  # fmt: skip
    IA = T.sparse_variable(None, m, (ip, ii))
    JA = T.sparse_variable(IA, n, (jp, ji))
    KA = T.sparse_variable(JA, o, (kp, ki))
    IB = T.sparse_variable(None, m, (iq, ij))
    JB = T.sparse_variable(IB, n, (jq, jj))
    KB = T.sparse_variable(JB, o, (kq, kj))
    I = T.dense_fixed(m)
    E = T.dense_fixed(1)
    A = T.match_sparse_buffer(a, (IA, JA, KA), "int64")
    B = T.match_sparse_buffer(b, (IB, JB, KB), "int64")
    S = T.match_sparse_buffer(s, (I,), "int64")
    P = T.match_sparse_buffer(t, (E,), "int64")
    Q = T.match_sparse_buffer(u, (I,), "bool")
    with T.sp_iter([T.union(IA, IB), T.union(JA, JB), T.union(KA, KB)], "SRR", "sums") as [i, j, k]:
        with T.init():
            S[i] = T.int64(0)
        S[i] = S[i] + A[i, j, k] + T.int64(100) * B[i, j, k]
    with T.sp_iter([T.intersect(IA, IB), T.intersect(JA, JB), T.intersect(KA, KB)], "RRR", "dot") as [i, j, k]:
        P[0] = P[0] + A[i, j, k] * B[i, j, k]
    with T.sp_iter([T.intersect(IA, IB), T.union(JA, JB), KA], "SRR", "mixed") as [i, j, k]:
        with T.init():
            Q[i] = False
        Q[i] = Q[i] or B[i, j, k] == T.int64(0)


def tree(cells: set[tuple[int, int, int]]):
    """Index arrays of a tree of three compressed levels."""
    arrays, above = [], [()]
    for depth in (1, 2, 3):
        nodes = sorted({c[:depth] for c in cells})
        counts = [sum(n[:-1] == up for n in nodes) for up in above]
        arrays += [np.cumsum([0, *counts]).astype("int32"), np.array([n[-1] for n in nodes], "int32")]
        above = nodes
    return arrays


TREES = functools.cache(lambda: sparsetir.build(trees))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_levels_of_trees_are_merged_one_below_the_other(seed):
    rng = np.random.default_rng(seed)
    shape = (4, 3, 3) if seed else (2, 1, 1)
    cells = [c for c in itertools.product(*map(range, shape))]
    left, right = ({c for c in cells if rng.random() < 0.35 * min(seed, 2)} for _ in range(2))
    dense = np.zeros((2, *shape), "int64")
    for side, held in enumerate((left, right)):
        for c in sorted(held):
            dense[side][c] = rng.integers(1, 9)
    args = dict(zip(("ip", "ii", "jp", "ji", "kp", "ki"), tree(left), strict=True))
    args |= dict(zip(("iq", "ij", "jq", "jj", "kq", "kj"), tree(right), strict=True))
    args |= dict(a=np.array([dense[0][c] for c in sorted(left)], "int64"))
    args |= dict(b=np.array([dense[1][c] for c in sorted(right)], "int64"))
    args |= dict(zip("mno", shape, strict=True)) | {"t": np.zeros(1, "int64")}
    found = interpret(trees, args)
    np.testing.assert_array_equal(found["s"], (dense[0] + 100 * dense[1]).sum((1, 2)))
    assert found["t"].tolist() == [(dense[0] * dense[1]).sum()]
    only = [any(c[0] == i and c not in right for c in left) and any(c[0] == i for c in right) for i in range(shape[0])]
    assert found["u"].tolist() == only
    passed = args | {"t": np.zeros(1, "int64")}
    results = dict(zip(("s", "u"), TREES()(**passed), strict=True)) | {"t": passed["t"]}
    for name, array in results.items():
        np.testing.assert_array_equal(array, found[name])


@T.prim_func
def looked_up(
    a: T.handle, b: T.handle, d: T.handle, y: T.handle,
    pa: T.handle, ja: T.handle, qa: T.handle, ka: T.handle, pb: T.handle, jb: T.handle, qb: T.handle, kb: T.handle,
    pd: T.handle, jd: T.handle, qd: T.handle, kd: T.handle, m: T.int32, n: T.int32, o: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, n, (pa, ja))
    KA = T.sparse_variable(JA, o, (qa, ka))
    JB = T.sparse_variable(I, n, (pb, jb))
    KB = T.sparse_variable(JB, o, (qb, kb))
    JD = T.sparse_variable(I, n, (pd, jd))
    KD = T.sparse_variable(JD, o, (qd, kd))
    A = T.match_sparse_buffer(a, (I, JA, KA), "float64")
    B = T.match_sparse_buffer(b, (I, JB, KB), "float64")
    D = T.match_sparse_buffer(d, (I, JD, KD), "float64")
    Y = T.match_sparse_buffer(y, (I,), "float64")
    with T.sp_iter([I, T.union(JA, JB), T.union(KA, KB)], "SRR", "looked_up") as [i, j, k]:
        with T.init():
            Y[i] = T.float64(0)
        Y[i] = Y[i] + (A[i, j, k] - B[i, j, k]) * D[i, j, k]


LOOKED_UP = functools.cache(lambda: sparsetir.build(looked_up))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_no_member_of_a_union_stores_is_looked_up_at_its_coordinates(seed):
    rng, shape = np.random.default_rng(seed), (3, 4, 5)
    args, dense = dict(zip("mno", shape, strict=True)), []
    for x in "abd":
        rows = rng.random(shape[:2]) < 0.45
        held = (rng.random(shape) < 0.45) & rows[..., None]
        dense.append(np.where(held, rng.integers(-3, 5, shape), 0).astype("float64"))
        args[f"p{x}"] = np.cumsum([0, *rows.sum(1)]).astype("int32")
        args[f"q{x}"] = np.cumsum([0, *held.sum(2)[rows]]).astype("int32")
        args[f"j{x}"], args[f"k{x}"] = (np.nonzero(a)[-1].astype("int32") for a in (rows, held))
        args[x] = dense[-1][held]
    right = ((dense[0] - dense[1]) * dense[2]).sum((1, 2))
    np.testing.assert_array_equal(interpret(looked_up, args)["y"], right)
    np.testing.assert_array_equal(LOOKED_UP()(**args), right)


@T.prim_func
def coordinate_lists(
    a: T.handle,
    b: T.handle,
    y: T.handle,
    ra: T.handle,
    ca: T.handle,
    rb: T.handle,
    cb: T.handle,
    m: T.int32,
    n: T.int32,
):
    IA = T.sparse_fixed(None, m, ra, unique=False)
    JA = T.singleton(IA, n, ca)
    IB = T.sparse_fixed(None, m, rb, unique=False)
    JB = T.singleton(IB, n, cb)
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (IA, JA), "float32")
    B = T.match_sparse_buffer(b, (IB, JB), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([T.intersect(IA, IB), T.intersect(JA, JB)], "SR", "lists") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j] * B[i, j]


def test_lists_of_coordinates_are_intersected():
    args = dict(ra=[0, 0, 2, 2], ca=[1, 3, 0, 2], rb=[0, 1, 2, 2, 2], cb=[3, 1, 0, 1, 2])
    args = {k: np.array(v, "int32") for k, v in args.items()}
    args |= dict(a=np.array([1, 2, 3, 4], "float32"), b=np.array([5, 6, 7, 8, 9], "float32"), m=4, n=4)
    assert interpret(coordinate_lists, args)["y"].tolist() == [10, 0, 57, 0]
    assert sparsetir.build(coordinate_lists)(**args).tolist() == [10, 0, 57, 0]


# ---------------------------------------------------------------------------------------------- the loops


def loops_of(case) -> str:
    return sparsetir.script(sparsetir.lower(program(*case), stage=3))


def test_two_sorted_members_are_walked_without_searches():
    union = loops_of(("union", ("csr", "csr"), "sum"))
    assert union.count("while ") == 3
    assert "while at_0[0] < count_0 and at_1[0] < count_1:" in union
    assert 'at_0[0] = place_0 + T.Cast("int32", head_0 <= head_1)' in union
    shared = loops_of(("intersect", ("csr", "csr"), "sum"))
    assert shared.count("while ") == 1
    assert "if head_0 == head_1:" in shared


def test_other_members_are_searched():
    assert "while at_0[0] < count_0 and" not in loops_of(("union", ("csr", "csr", "csr", "csr"), "sum"))
    assert "while at_0[0] < count_0 and" not in loops_of(("union", ("bag", "unsorted", "csr"), "sum"))
    assert "head_0 == head_1" not in loops_of(("intersect", ("csr", "csr"), "sum", "hoist"))


@pytest.mark.parametrize("merge", ["union", "intersect"])
def test_steps_may_be_split(merge):
    case = (merge, ("csr", "csr"), "sum")
    func = program(*case)

    def split(sch):
        loop = sch.get_loops(sch.get_sblock("merged"))[-1]
        sch.split(loop, [None, 3])

    changed = sparsetir.build(func, schedule=split)
    for seed, (m, n) in enumerate(SHAPES):
        rng = np.random.default_rng(seed)
        drawn = [member(rng, x, m, n, **FORMATS["csr"][1]) for x in "ab"]
        args = {k: v.astype("int32") if "_" in k else v for arrays, _, _ in drawn for k, v in arrays.items()}
        right = expected(merge, "sum", [t for _, t, _ in drawn], [c for _, _, c in drawn])
        np.testing.assert_array_equal(changed(**args, m=m, n=n), right)


@pytest.mark.parametrize("merge", ["union", "intersect"])
@pytest.mark.parametrize("choices", [dict(chunks=2, lanes=8), dict(tile=16, chunks=4, unroll=2, prefetch=4, carry=1)])
def test_choices_of_loops_keep_the_result(merge, choices):
    changed = sparsetir.build(program(merge, ("csr", "csr"), "sum"), schedule=sparsetir.Choices(**choices))
    for seed, (m, n) in enumerate([*SHAPES, (40, 30)]):
        rng = np.random.default_rng(seed)
        drawn = [member(rng, x, m, n, **FORMATS["csr"][1]) for x in "ab"]
        args = {k: v.astype("int32") if "_" in k else v for arrays, _, _ in drawn for k, v in arrays.items()}
        right = expected(merge, "sum", [t for _, t, _ in drawn], [c for _, _, c in drawn])
        np.testing.assert_array_equal(changed(**args, m=m, n=n), right)
