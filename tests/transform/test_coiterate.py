# SPDX-License-Identifier: Apache-2.0
"""Unions and intersections of axes, and axes that a program computes: declaration, meaning, loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import sparsetir as T

import sparsetir
from sparsetir import formats
from sparsetir.errors import ArgumentError, LoweringError, ScheduleError, VerifyError
from sparsetir.ir.interpreter import interpret


@T.prim_func
def spgemm(
    a: T.handle, b: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32, p: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, n, (ap, ai))
    L = T.dense_fixed(n)
    JB = T.sparse_variable(L, p, (bp, bi))
    J = T.sparse_assembled(I, p)
    A = T.match_sparse_buffer(a, (I, K), "float32")
    B = T.match_sparse_buffer(b, (L, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, K, J], "SRS", "spgemm") as [i, k, j]:
        with T.init():
            C[i, j] = 0
        C[i, j] = C[i, j] + A[i, k] * B[k, j]


@T.prim_func
def add(
    a: T.handle, b: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, n, (ap, ai))
    JB = T.sparse_variable(I, n, (bp, bi), idtype="int64")
    J = T.sparse_assembled(I, n, "int64", sorted=False)
    A = T.match_sparse_buffer(a, (I, JA), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, T.union(JA, JB)], "SS", "add") as [i, j]:
        C[i, j] = A[i, j] + B[i, j]


@T.prim_func
def common(c: T.handle, ap: T.handle, ai: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, n, (ap, ai))
    K = T.sparse_variable(I, n, (ap, ai))
    C = T.match_sparse_buffer(c, (I,), "int64")
    with T.sp_iter([I, J, T.intersect(K, T.attach(K, J))], "SRR", "common") as [i, j, k]:
        with T.init():
            C[i] = T.int64(0)
        C[i] = C[i] + T.int64(1)


@T.prim_func
def levels(
    a: T.handle, c: T.handle, d: T.handle, ip: T.handle, ii: T.handle, jp: T.handle, ji: T.handle,
    m: T.int32, n: T.int32,
):  # fmt: skip
    IA = T.sparse_variable(None, m, (ip, ii))
    JA = T.sparse_variable(IA, n, (jp, ji))
    I = T.sparse_assembled(None, m)
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (IA, JA), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    D = T.match_sparse_buffer(d, (I, J), "float64")
    with T.sp_iter([I, J], "SS", "levels") as [i, j]:
        C[i, j] = A[i, j] * T.float32(2)
        D[i, j] = T.cast(A[i, j], "float64")


DECLARED = {"spgemm": spgemm, "add": add, "common": common, "levels": levels}


# ---------------------------------------------------------------------------------------------- declaration


@pytest.mark.parametrize("name", DECLARED)
def test_text_and_json_give_the_program_back(name):
    func = DECLARED[name]
    for text in (sparsetir.script(func), func.script(extra_config={"tirx.prefix": "T"})):
        assert tvm_ffi.structural_equal(sparsetir.parse(text), func, map_free_vars=True)
    assert tvm_ffi.structural_equal(tvm.ir.load_json(tvm.ir.save_json(func)), func, map_free_vars=True)


def test_text_is_in_the_words_of_the_dialect():
    text = sparsetir.script(add)
    assert 'J = T.sparse_assembled(I, n, "int64", sorted=False)' in text
    assert 'with T.sp_iter([I, T.union(JA, JB)], "SS", "add") as [i, j]:' in text
    assert "[I, J, T.intersect(K, T.attach(K, J))]" in sparsetir.script(common)
    assert "T.sp." not in text + sparsetir.script(spgemm) + sparsetir.script(levels)


def test_decoded_entries_say_what_they_merge():
    program = sparsetir.ir.decode(add)
    entry = program.iteration("add").entries[1]
    assert (entry.merge, [a.name for a in entry.axes], entry.kinds) == ("union", ["JA", "JB"], "S")
    assert [str(v.ty.dtype) for v in entry.vars] == ["int64"]
    assert not entry.is_fused
    axis = {a.name: a for a in program.axes.values()}["J"]
    assert (axis.is_assembled, axis.indptr, axis.indices, axis.sorted) == (True, None, None, False)
    hosts = sparsetir.ir.decode(common).iteration("common").entries[2].hosts
    assert [h and h.name for h in hosts] == [None, "J"]
    assert repr(program.iteration("add")) == "add over [I, T.union(JA, JB)] 'SS'"


def test_schedules_refuse_what_they_would_misread():
    with pytest.raises(ScheduleError, match=r"walks a union of axes, T.union\(JA, JB\): this primitive changes"):
        sparsetir.Schedule(add).sparse_reorder("add", ["T.union(JA, JB)", "I"])
    with pytest.raises(ScheduleError, match="'spgemm' computes an axis, J"):
        sparsetir.Schedule(spgemm).sparse_split("spgemm", "I", 4)
    sch = sparsetir.Schedule(common)
    sch.set_search("common", "merge")
    assert sch.get_axes("common") == ["I", "J", "T.intersect(K, T.attach(K, J))"]
    assert "T.intersect(K, T.attach(K, J))" in sch.script()


def test_formats_refuse_what_they_would_misread():
    with pytest.raises(VerifyError, match=r"cannot decompose A: iteration add walks T.union\(JA, JB\)"):
        sparsetir.decompose_format(add, {"A": formats.ell(2)})


@pytest.mark.parametrize("func", [spgemm, levels])
def test_ordinary_loops_refuse_an_axis_that_is_computed(func):
    with pytest.raises(LoweringError, match="which the loops of stored axes do not walk"):
        sparsetir.lower(func, stage=2)


# ---------------------------------------------------------------------------------------------- meaning


def ragged(rows: list[list[tuple[int, float]]], dtype: str = "float32", idtype: str = "int32"):
    """(indptr, indices, values) of rows of (coordinate, value)."""
    indptr = np.cumsum([0, *map(len, rows)]).astype(idtype)
    flat = [entry for row in rows for entry in row]
    return indptr, np.array([c for c, _ in flat], idtype), np.array([v for _, v in flat], dtype)


def drawn(rng: np.random.Generator, m: int, n: int, density: float, repeats: int = 0) -> list[list[tuple[int, float]]]:
    """Rows of small whole numbers, not sorted; `repeats` further entries at coordinates that are there."""
    rows = []
    for _ in range(m):
        held = [(int(c), float(rng.integers(1, 5))) for c in rng.permutation(n) if rng.random() < density]
        held += [(held[int(rng.integers(len(held)))][0], 1.0) for _ in range(repeats if held else 0)]
        rows.append(held)
    return rows


def dense(rows: list[list[tuple[int, float]]], n: int, combine=np.add, start: float = 0.0):
    """The matrix of rows of entries, and where something is stored."""
    values, held = np.full((len(rows), n), start), np.zeros((len(rows), n), bool)
    for i, row in enumerate(rows):
        for c, v in row:
            values[i, c], held[i, c] = combine(values[i, c], v), True
    return values, held


def spread(out: dict, axis: str, values: str, n: int, start: float = 0.0):
    """The matrix of a result over an assembled axis, and its pattern; each row must be sorted and without repeats."""
    indptr, indices = out[f"{axis}_indptr"], out[f"{axis}_indices"]
    rows = [list(zip(indices[b:e], out[values][b:e], strict=True)) for b, e in itertools.pairwise(indptr)]
    assert all([c for c, _ in row] == sorted({c for c, _ in row}) for row in rows)
    return dense(rows, n, lambda _, v: v, start)


@pytest.mark.parametrize("seed", range(6))
def test_a_product_stores_what_its_factors_meet_at(seed):
    rng = np.random.default_rng(seed)
    m, n, p = (int(x) for x in rng.integers(0, 7, 3))
    left, right = drawn(rng, m, n, 0.4, seed % 2), drawn(rng, n, p, 0.4, seed % 3)
    (ap, ai, a), (bp, bi, b) = ragged(left), ragged(right)
    out = interpret(spgemm, dict(ap=ap, ai=ai, a=a, bp=bp, bi=bi, b=b, m=m, n=n, p=p))
    (va, pa), (vb, pb) = dense(left, n), dense(right, p)
    values, pattern = spread(out, "J", "c", p)
    np.testing.assert_array_equal(values, va @ vb)
    np.testing.assert_array_equal(pattern, pa.astype(int) @ pb.astype(int) > 0)
    assert (out["J_indptr"].dtype, out["J_indices"].dtype, out["c"].dtype) == ("int32", "int32", "float32")


@pytest.mark.parametrize("seed", range(4))
def test_a_union_visits_what_one_of_its_members_stores(seed):
    rng = np.random.default_rng(seed)
    m, n = (int(x) for x in rng.integers(0, 7, 2))
    left, right = drawn(rng, m, n, 0.4), drawn(rng, m, n, 0.4)
    (ap, ai, a), (bp, bi, b) = ragged(left), ragged(right, idtype="int64")
    out = interpret(add, dict(ap=ap, ai=ai, a=a, bp=bp, bi=bi, b=b, m=m, n=n))
    (va, pa), (vb, pb) = dense(left, n), dense(right, n)
    values, pattern = spread(out, "J", "c", n)
    np.testing.assert_array_equal(values, va + vb)
    np.testing.assert_array_equal(pattern, pa | pb)
    assert out["J_indptr"].dtype == out["J_indices"].dtype == "int64"


@T.prim_func
def merged_rows(
    a: T.handle, b: T.handle, y: T.handle, z: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, n, (ap, ai), sorted=False, unique=False)
    JB = T.sparse_variable(I, n, (bp, bi), sorted=False, unique=False)
    A = T.match_sparse_buffer(a, (I, JA), "float64")
    B = T.match_sparse_buffer(b, (I, JB), "float64")
    Y = T.match_sparse_buffer(y, (I,), "float64")
    Z = T.match_sparse_buffer(z, (I,), "float64")
    with T.sp_iter([I, T.union(JA, JB)], "SR", "sums") as [i, j]:
        with T.init():
            Y[i] = T.float64(0)
        Y[i] = Y[i] + (A[i, j] - B[i, j]) * T.cast(j + 1, "float64")
    with T.sp_iter([I, T.intersect(JA, JB)], "SR", "products") as [i, j]:
        with T.init():
            Z[i] = T.float64(0)
        Z[i] = Z[i] + A[i, j] * B[i, j] * T.cast(j + 1, "float64")


@pytest.mark.parametrize("seed", range(4))
def test_repeated_entries_count_once_in_a_union_and_in_pairs_in_an_intersection(seed):
    rng = np.random.default_rng(seed)
    left, right = drawn(rng, 4, 5, 0.5, 3), drawn(rng, 4, 5, 0.5, 2 * (seed % 2))
    (ap, ai, a), (bp, bi, b) = ragged(left, "float64"), ragged(right, "float64")
    out = interpret(merged_rows, dict(ap=ap, ai=ai, a=a, bp=bp, bi=bi, b=b, m=4, n=5))
    (va, _), (vb, _), weight = dense(left, 5), dense(right, 5), np.arange(1, 6)
    np.testing.assert_array_equal(out["y"], (va - vb) @ weight)
    np.testing.assert_array_equal(out["z"], (va * vb) @ weight)


def test_triples_of_an_intersection_of_neighbours():
    graph = [[(1, 1), (2, 1)], [(2, 1)], [(0, 1)]]
    ap, ai, _ = ragged(graph)
    adjacency, _ = dense(graph, 3)
    out = interpret(common, dict(ap=ap, ai=ai, n=3))
    np.testing.assert_array_equal(out["c"], (adjacency * (adjacency @ adjacency.T)).sum(1))


@T.prim_func
def cheapest(
    a: T.handle, b: T.handle, c: T.handle, w: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32, p: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, n, (ap, ai))
    L = T.dense_fixed(n)
    JB = T.sparse_variable(L, p, (bp, bi))
    J = T.sparse_assembled(I, p)
    A = T.match_sparse_buffer(a, (I, K), "float64")
    B = T.match_sparse_buffer(b, (L, JB), "float64")
    C = T.match_sparse_buffer(c, (I, J), "float64", default_value=T.infinity("float64"))
    W = T.match_sparse_buffer(w, (I, J), "int32")
    with T.sp_iter([I, K, J], "SRS", "cheapest") as [i, k, j]:
        with T.init():
            C[i, j] = T.infinity("float64")
            W[i, j] = 0
        W[i, j] = W[i, j] + 1
        C[i, j] = T.min(C[i, j], A[i, k] + B[k, j])


def test_a_semiring_and_two_results_on_one_axis():
    rng = np.random.default_rng(3)
    left, right = drawn(rng, 5, 4, 0.5), drawn(rng, 4, 6, 0.4)
    (ap, ai, a), (bp, bi, b) = ragged(left, "float64"), ragged(right, "float64")
    out = interpret(cheapest, dict(ap=ap, ai=ai, a=a, bp=bp, bi=bi, b=b, m=5, n=4, p=6))
    (va, pa), (vb, pb) = dense(left, 4, start=np.inf, combine=min), dense(right, 6, start=np.inf, combine=min)
    values, pattern = spread(out, "J", "c", 6, np.inf)
    np.testing.assert_array_equal(values, np.min(va[:, :, None] + vb[None], axis=1))
    ways = pa.astype(int) @ pb.astype(int)
    np.testing.assert_array_equal(pattern, ways > 0)
    np.testing.assert_array_equal(spread(out, "J", "w", 6)[0], ways)


@T.prim_func
def reachable(
    a: T.handle, c: T.handle, ap: T.handle, ai: T.handle, n: T.int32,
):  # fmt: skip
    I = T.dense_fixed(n)
    K = T.sparse_variable(I, n, (ap, ai))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, K), "bool")
    C = T.match_sparse_buffer(c, (I, J), "bool")
    with T.sp_iter([I, K, J], "SRS", "reachable") as [i, k, j]:
        with T.init():
            C[i, j] = False
        C[i, j] = C[i, j] or (A[i, k] and A[k, j])


def test_bools_are_or_and_and():
    graph = [[(1, 1), (3, 0)], [(2, 1)], [], [(0, 1)]]
    ap, ai, a = ragged(graph, "bool")
    out = interpret(reachable, dict(ap=ap, ai=ai, a=a, n=4))
    assert out["J_indptr"].tolist() == [0, 2, 2, 2, 4]
    assert out["J_indices"].tolist() == [0, 2, 1, 3]
    assert out["c"].tolist() == [False, True, True, False]


@T.prim_func
def blocks(
    a: T.handle, b: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, n, (ap, ai))
    JB = T.sparse_variable(I, n, (bp, bi))
    E = T.dense_fixed(2)
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, JA, E), "float32")
    B = T.match_sparse_buffer(b, (I, JB, E), "float32")
    C = T.match_sparse_buffer(c, (I, J, E), "float32")
    with T.sp_iter([I, J, E], "SSS", "blocks") as [i, j, e]:
        with T.init():
            C[i, j, e] = T.float32(1)
        C[i, j, e] = C[i, j, e] + A[i, j, e] * T.float32(10) - B[i, j, e]


def test_an_assembled_axis_runs_over_the_terms_of_a_sum_and_has_dense_axes_below():
    (ap, ai, _), (bp, bi, _) = ragged([[(0, 0)], [(2, 0), (1, 0)]]), ragged([[], [(1, 0)]])
    a, b = np.arange(6, dtype="float32").reshape(3, 2), np.full((1, 2), 3, "float32")
    out = interpret(blocks, dict(ap=ap, ai=ai, a=a, bp=bp, bi=bi, b=b, m=2, n=3))
    assert (out["J_indptr"].tolist(), out["J_indices"].tolist()) == ([0, 1, 3], [0, 1, 2])
    assert out["c"].tolist() == [[1, 11], [38, 48], [21, 31]]


def test_two_assembled_levels_store_only_rows_that_have_entries():
    args = dict(ip=[0, 3], ii=[4, 0, 2], jp=[0, 2, 2, 3], ji=[3, 1, 0], a=[1, 2, 3], m=5, n=4)
    out = interpret(levels, {k: np.array(v) for k, v in args.items()})
    assert {k: v.tolist() for k, v in out.items() if k.startswith(("I_", "J_"))} == {
        "I_indptr": [0, 2],
        "I_indices": [2, 4],
        "J_indptr": [0, 1, 3],
        "J_indices": [0, 1, 3],
    }
    assert (out["c"].tolist(), out["d"].tolist()) == ([6, 4, 2], [3, 2, 1])
    assert list(out)[-4:] == ["I_indptr", "I_indices", "J_indptr", "J_indices"]


@T.prim_func
def masked(
    a: T.handle, b: T.handle, s: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    sp: T.handle, si: T.handle, n: T.int32,
):  # fmt: skip
    I = T.dense_fixed(n)
    K = T.sparse_variable(I, n, (ap, ai))
    JB = T.sparse_variable(I, n, (bp, bi))
    JS = T.sparse_variable(I, n, (sp, si))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, K), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    S = T.match_sparse_buffer(s, (I, JS), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, K, J], "SRS", "masked") as [i, k, j]:
        with T.init():
            C[i, j] = 0
        C[i, j] = C[i, j] + A[i, k] * B[k, j] * S[i, j]


def test_a_further_factor_masks_a_product():
    rng = np.random.default_rng(5)
    parts = [drawn(rng, 5, 5, 0.5) for _ in range(3)]
    (ap, ai, a), (bp, bi, b), (sp, si, s) = map(ragged, parts)
    out = interpret(masked, dict(ap=ap, ai=ai, a=a, bp=bp, bi=bi, b=b, sp=sp, si=si, s=s, n=5))
    (va, pa), (vb, pb), (vs, ps) = (dense(rows, 5) for rows in parts)
    values, pattern = spread(out, "J", "c", 5)
    np.testing.assert_array_equal(values, (va @ vb) * vs)
    np.testing.assert_array_equal(pattern, (pa.astype(int) @ pb.astype(int) > 0) & ps)


@T.prim_func
def nested_union(
    a: T.handle, b: T.handle, y: T.handle, ip: T.handle, ii: T.handle, jp: T.handle, ji: T.handle,
    lp: T.handle, li: T.handle, m: T.int32, n: T.int32,
):  # fmt: skip
    IA = T.sparse_variable(None, m, (ip, ii))
    JA = T.sparse_variable(IA, n, (jp, ji))
    IB = T.dense_variable(None, (m, m), extent=lambda: m - 1, offset=lambda: 0)
    JB = T.sparse_variable(IB, n, (lp, li))
    R = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (IA, JA), "float32")
    B = T.match_sparse_buffer(b, (IB, JB), "float32")
    Y = T.match_sparse_buffer(y, (R,), "float32")
    with T.sp_iter([T.union(IA, IB), T.union(JA, JB)], "SR", "nested") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + (A[i, j] * T.float32(10) + B[i, j]) * T.cast(j + 1, "float32")


def test_unions_of_two_levels_follow_the_members_that_are_there():
    arrays = dict(ip=[0, 2], ii=[3, 1], jp=[0, 2, 3], ji=[0, 2, 1], a=[1, 2, 3])
    arrays |= dict(lp=[0, 1, 2, 2, 2], li=[2, 1], b=[5, 7])
    out = interpret(nested_union, {k: np.array(v) for k, v in arrays.items()} | dict(m=4, n=3))
    assert out["y"].tolist() == [15.0, 74.0, 0.0, 70.0]


def test_a_result_is_not_an_argument():
    ap, ai, a = ragged([[(0, 1)]])
    with pytest.raises(ArgumentError, match="c is a result whose size the program computes; leave it out"):
        interpret(spgemm, dict(ap=ap, ai=ai, a=a, bp=ap, bi=ai, b=a, c=a, m=1, n=1, p=1))


# ---------------------------------------------------------------------------------------------- compiled

ARRAYS = {"A": ("ap", "ai", "a"), "B": ("bp", "bi", "b"), "S": ("sp", "si", "s")}
COMPILED = {"spgemm": (spgemm, "AB"), "add": (add, "AB"), "masked": (masked, "ABS"), "cheapest": (cheapest, "AB"),
            "reachable": (reachable, "A")}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_find_the_pattern_that_the_interpreter_finds(name):
    func, operands = COMPILED[name]
    kernel, sizes = sparsetir.build(func), [str(p.name) for p in func.params if str(p.name) in ("m", "n", "p")]
    for seed in range(8):
        rng, n = np.random.default_rng(seed), seed
        args = dict.fromkeys(sizes, n)
        for x in operands:
            rows = [sorted(row) for row in drawn(rng, n, n, 0.4)]
            for key, array in zip(ARRAYS[x], ragged(rows), strict=True):
                param = next(p for p in func.params if str(p.name) == key)
                args[key] = array.astype(str(param.ty.dtype))
        right, found = interpret(func, args), kernel(**args)
        for key, result in zip(("c", "w"), found if isinstance(found, tuple) else (found,), strict=False):
            np.testing.assert_array_equal(result.indptr, right["J_indptr"])
            np.testing.assert_array_equal(result.indices, right["J_indices"])
            np.testing.assert_array_equal(result.data, right[key])


@pytest.mark.slow
def test_kernels_of_two_computed_levels():
    kernel, rng = sparsetir.build(levels), np.random.default_rng(0)
    for _ in range(6):
        rows = np.sort(rng.permutation(5)[: rng.integers(0, 6)]).astype("int32")
        jp, ji, a = ragged([sorted(row) for row in drawn(rng, len(rows), 4, 0.4)])
        args = dict(ip=np.array([0, len(rows)], "int32"), ii=rows, jp=jp, ji=ji, a=a, m=5, n=4)
        right, (C, D) = interpret(levels, args), kernel(**args)
        dense = np.zeros((5, 4))
        dense[np.repeat(right["I_indices"], np.diff(right["J_indptr"])), right["J_indices"]] = right["c"]
        np.testing.assert_array_equal(C.toarray(), dense)
        np.testing.assert_array_equal(D.toarray(), dense / 2)
