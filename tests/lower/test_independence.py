# SPDX-License-Identifier: Apache-2.0
"""Steps that run at the same time touch different elements: what is proven holds, what does not hold is not proven."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import s_tir, tirx

import sparsetir
from each import FULL
from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import decode
from sparsetir.lower.analysis.independence import ArrayFacts, is_parallel, shared_array
from sparsetir.lower.loops import serial

HEAD = """
@T.prim_func
def program(a: T.handle, b: T.handle, x: T.handle, z: T.handle, ap: T.handle, ai: T.handle,
            ix: T.Buffer(("n",), "int32"), n: T.int32, nnz: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (n, nnz), (ap, ai))
    N = T.dense_fixed(2 * n)
    W = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float64")
    B = T.match_sparse_buffer(b, (N,), "float64")
    X = T.match_sparse_buffer(x, (N,), "float64")
    Z = T.match_sparse_buffer(z, (N, W), "float64")
    S = T.alloc_sparse_buffer((N,), "float64")
    with T.sp_iter([N], "S", "set") as [s]:
        S[s] = 0.0
"""
N = 6


def outermost(text: str) -> bool:
    """Whether the outermost loop of the first iteration is proven independent."""
    program = decode(sparsetir.parse(HEAD + text))
    return is_parallel(program.iterations[-1], program)


# ---------------------------------------------------------------- programs drawn at random

# A subscript as text, and what it is for row i, inner j and the list ix; all lie within 2 N.
ROW: list[tuple[str, Callable[[int, int, Any], int]]] = [
    ("i", lambda i, j, ix: i),
    ("i + 1", lambda i, j, ix: i + 1),
    ("2 * i", lambda i, j, ix: 2 * i),
    ("i // 2", lambda i, j, ix: i // 2),
    ("n - 1 - i", lambda i, j, ix: N - 1 - i),
    ("i - i + 1", lambda i, j, ix: 1),
    ("ix[i]", lambda i, j, ix: int(ix[i])),
    ("0", lambda i, j, ix: 0),
]
INNER = [*ROW, ("j", lambda i, j, ix: j), ("i + j", lambda i, j, ix: i + j), ("ix[j]", lambda i, j, ix: int(ix[j]))]


class Drawn:
    """Rows with an iteration of their own within: loads and stores at random places."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        rows = draw.sample(ROW, draw.randint(1, 2))  # few, for some of the programs to be fit
        inner = [*rows, *draw.sample(INNER, draw.randint(0, 1))]
        self.inner = [(draw.choice("XS"), draw.choice(inner), draw.choice("BXS"), draw.choice(inner)) for _ in range(2)]
        self.outer = [(draw.choice("XSZ"), draw.choice(rows), draw.choice("BXS"), draw.choice(rows))]
        self.column = draw.choice(ROW[:3])

    def target(self, name: str, place: str) -> str:
        return f"Z[{place}, T.min({self.column[0]}, n - 1)]" if name == "Z" else f"{name}[{place}]"

    @property
    def text(self) -> str:
        lines = ['    with T.sp_iter([I], "S", "rows") as [i]:', '        with T.sp_iter([J], "R", "inner") as [j]:']
        lines += [f"            {self.target(t, p[0])} = {s}[{q[0]}] + A[i, j]" for t, p, s, q in self.inner]
        lines += [f"        {self.target(t, p[0])} = {s}[{q[0]}] * 2.0" for t, p, s, q in self.outer]
        return "\n".join(lines)

    def touched(self, i: int, columns: list[int], ix: Any) -> tuple[set[Any], set[Any]]:
        """What row i writes and reads."""
        writes, reads = set(), set()
        for j in columns:
            writes |= {(t, p[1](i, j, ix)) for t, p, _, _ in self.inner}
            reads |= {(s, q[1](i, j, ix)) for _, _, s, q in self.inner}
        column = min(self.column[1](i, 0, ix), N - 1)
        writes |= {(t, p[1](i, 0, ix), *([column] if t == "Z" else [])) for t, p, _, _ in self.outer}
        reads |= {(s, q[1](i, 0, ix)) for _, _, s, q in self.outer}
        return writes, reads

    def are_apart(self, rows: list[list[int]], ix: Any) -> bool:
        steps = [self.touched(i, columns, ix) for i, columns in enumerate(rows)]
        pairs = [(a, b) for n, a in enumerate(steps) for m, b in enumerate(steps) if n != m]
        return not any(a[0] & (b[0] | b[1]) for a, b in pairs)


@pytest.mark.slow
def test_what_is_proven_of_drawn_programs_holds() -> None:
    rng = np.random.default_rng(0)
    proven = 0
    for seed in range(150 if FULL else 50):
        drawn = Drawn(seed)
        if not outermost(drawn.text):
            continue
        proven += 1
        for _ in range(20):
            rows = [sorted(rng.choice(N, rng.integers(0, N), replace=False).tolist()) for _ in range(N)]
            assert drawn.are_apart(rows, rng.integers(0, N, N)), drawn.text
    assert proven > 0


# ---------------------------------------------------------------- flat loops, of every combination of a few texts

STEPS, COLUMNS = 5, 9
BEGINS = {"block": ("4 * p", "4"), "fiber": ("ptr[p]", "ptr[p + 1] - ptr[p]")}
# Extents and guards of the inner loop, of the number of elements that belong to a step.
INSIDE = [("SIZE", None), ("SIZE + 1", None), (COLUMNS, "j < SIZE"), (COLUMNS, "j <= SIZE")]
PLACES = ["BEGIN + j", "BEGIN + j - 1", "BEGIN + j + 1", "p", "j"]


def flat_loop(target: str, source: str, extent: Any, guard: str | None) -> tirx.For:
    """A loop over p with one over j inside: ``x[target] = x[source]`` under a guard."""
    names: dict[str, Any] = {name: tirx.Var(name, "int32") for name in "pj"}
    x = tirx.decl_buffer((99,), "float32", name="x", layout=None)
    names["ptr"] = tirx.decl_buffer((STEPS + 1,), "int32", name="ptr", layout=None)
    at = [eval(text, names) for text in (target, source)]
    body: Any = tirx.BufferStore(x, tirx.BufferLoad(x, [at[1]]), [at[0]])
    if guard is not None:
        body = tirx.IfThenElse(eval(guard, names), body, None)
    return serial(names["p"], STEPS, serial(names["j"], eval(str(extent), names), body))


def steps_are_apart(target: str, source: str, extent: Any, guard: str | None, ptr: list[int]) -> bool:
    """Return whether no step writes what another one reads or writes, for given row pointers."""
    writes, reads = [], []
    for p in range(STEPS):
        values = [{"p": p, "j": j, "ptr": ptr} for j in range(eval(str(extent), {"p": p, "ptr": ptr}))]
        values = [names for names in values if guard is None or eval(guard, names)]
        writes.append({eval(target, names) for names in values})
        reads.append({eval(source, names) for names in values})
    pairs = [(p, q) for p in range(STEPS) for q in range(STEPS) if p != q]
    return not any(writes[p] & (writes[q] | reads[q]) for p, q in pairs)


@pytest.mark.parametrize("kind", BEGINS)
def test_what_is_proven_of_flat_loops_holds(kind: str) -> None:
    begin, size = BEGINS[kind]
    pointers = [[0, 3, 3, 5, 9, 12], [0, 0, 1, 1, 6, 7], [0, 4, 8, 12, 16, 20]]
    proven = 0
    for target, source, (extent, guard) in product(PLACES, PLACES, INSIDE):
        texts = [text and str(text).replace("BEGIN", begin).replace("SIZE", size)
                 for text in (target, source, extent, guard)]  # fmt: skip
        if shared_array(flat_loop(*texts), ArrayFacts({"ptr"}, set())) is None:
            proven += 1
            assert all(steps_are_apart(*texts, ptr) for ptr in pointers), texts
    assert proven >= 3  # the block or the fiber itself under the two extents, and the subscript p


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("X[i] = B[i]", True),
        ("X[i] = X[i] * 2.0", True),
        ("X[2 * i + 1] = X[2 * i + 1] * 2.0", True),
        ("X[i] = X[i + 1]", False),
        ("X[i] = B[i] + X[ix[i]]", False),
        ("X[ix[i]] = B[i]", False),
        ("X[i - i] = B[i]", False),
        ("ix[i] = ix[i] + 1", True),
        ("S[i] = B[i]\n        X[i] = S[i] + S[i + 1]", False),
    ],
)
def test_rows(text: str, expected: bool) -> None:
    assert outermost(f'    with T.sp_iter([I], "S", "rows") as [i]:\n        {text}\n') is expected


def test_structure_that_is_written_is_read_by_searches() -> None:
    text = """
@T.prim_func
def grow(a: T.handle, b: T.handle, ap: T.handle, ai: T.Buffer(("nnz",), "int32"), n: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, n, (ap, ai))
    A = T.match_sparse_buffer(a, (I, J))
    B = T.match_sparse_buffer(b, (I,))
    with T.sp_iter([I], "S", "rows") as [i]:
        B[i] = A[0, i]
        ai[i] = 3
"""
    program = decode(sparsetir.parse(text))
    assert not is_parallel(program.iterations[0], program)


def test_a_formula_that_repeats_coordinates_is_no_proof() -> None:
    text = """
@T.prim_func
def program(b: T.handle, x: T.handle, n: T.int32):
    I = T.sparse_fixed(None, (n, n), lambda s: RULE)
    N = T.dense_fixed(n)
    B = T.match_sparse_buffer(b, (N,))
    X = T.match_sparse_buffer(x, (N,))
    with T.sp_iter([I], "S", "rows") as [i]:
        X[i] = X[i] + B[i]
"""
    for rule, expected in (("s", True), ("n - 1 - s", True), ("s // 2", False), ("s * 0 + 1", False)):
        program = decode(sparsetir.parse(text.replace("RULE", rule)))
        assert is_parallel(program.iterations[0], program) is expected, rule


SUBSTITUTION = """
@T.prim_func
def solve(a: T.handle, ap: T.handle, ai: T.handle, b: T.handle, x: T.handle, m: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (m, nnz), (ap, ai))
    A = T.match_sparse_buffer(a, (I, J), "float64")
    B = T.match_sparse_buffer(b, (I,), "float64")
    X = T.match_sparse_buffer(x, (I,), "float64")
    S = T.alloc_sparse_buffer((I,), "float64")
    with T.sp_iter([I], "S", "rows") as [i]:
        with T.sp_iter([J], "R", "row") as [j]:
            with T.init():
                S[i] = B[i]
            S[i] = S[i] - T.if_then_else(j < i, A[i, j] * X[j], 0.0)
        X[i] = S[i] / A[i, i]
"""


def test_a_recurrence_runs_in_order_call_after_call() -> None:
    rng = np.random.default_rng(0)
    m = 4000
    below = sp.tril(sp.random_array((m, m), density=0.003, rng=rng, format="csr"), -1)
    matrix = sp.csr_array(0.02 * below + sp.eye_array(m) * 2)
    b = rng.standard_normal(m)
    kernel = sparsetir.build(sparsetir.parse(SUBSTITUTION))
    assert "T.parallel" not in kernel.script(stage=3)
    found = []
    for _ in range(3):
        x = np.zeros(m)
        kernel(A=matrix, B=b, X=x)
        found.append(x)
    assert np.allclose(matrix @ found[0], b)
    assert all(np.array_equal(x, found[0]) for x in found)


def test_an_initialisation_that_meets_itself_runs_in_order() -> None:
    """Every relation sets the whole result; the last one counts."""
    text = """
@T.prim_func
def program(a: T.handle, x: T.handle, r: T.int32, n: T.int32):
    R = T.dense_fixed(r)
    N = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (R, N))
    X = T.match_sparse_buffer(x, (N,))
    with T.sp_iter([R, N], "SS", "add") as [r_, i]:
        with T.init():
            X[i] = T.cast(r_, "float32")
        X[i] = X[i] + A[r_, i]
"""
    second = sparsetir.lower(sparsetir.parse(text), stage=2)
    marked = [b for b in collect(second.body, s_tir.SBlock) if "sparsetir.parallel" in b.annotations]
    assert not marked


# ---------------------------------------------------------------- loops that a schedule asks for

MATRIX = """
@T.prim_func
def program(x: T.handle, y: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    K = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I, K))
    Y = T.match_sparse_buffer(y, (I, K))
    with T.sp_iter([I, K], "SS", "work") as [i, k]:
        BODY
"""


def in_parallel(which: str) -> Callable[[s_tir.Schedule], None]:
    def schedule(sch: s_tir.Schedule) -> None:
        i, k = sch.get_loops(sch.get_sblock("work"))
        if which == "fused":
            sch.parallel(sch.fuse(i, k))
        elif which == "tiles":
            sch.parallel(sch.split(i, [None, 4])[0])
        elif which == "lanes":
            sch.parallel(sch.split(k, [None, 4])[1])
        else:
            sch.parallel({"rows": i, "columns": k}[which])

    return schedule


@pytest.mark.parametrize(
    ("body", "which", "allowed"),
    [
        ("Y[i, k] = X[i, k]", "fused", True),
        ("Y[i, k] = X[i, k]", "lanes", True),
        ("Y[i // 2, k] = X[i, k]", "rows", False),
        ("Y[i // 2, k] = X[i, k]", "columns", True),
        ("Y[T.min(i + k, m - 1), k] = X[i, k]", "rows", False),
        ("Y[T.min(i + k, m - 1), k] = X[i, k]", "columns", True),
    ],
)
def test_parallel_loops_are_proven_or_refused(body: str, which: str, allowed: bool) -> None:
    func = sparsetir.parse(MATRIX.replace("BODY", body))
    sch = s_tir.Schedule(sparsetir.lower(func, stage=2))
    in_parallel(which)(sch)
    if allowed:
        sparsetir.lower(sch.mod["main"], stage=3)
        return
    with pytest.raises(ScheduleError, match="cannot be parallel: two of its steps may store to the same element of y"):
        sparsetir.lower(sch.mod["main"], stage=3)
