# SPDX-License-Identifier: Apache-2.0
"""Each pass of the lowering alone: what it rewrites, what it leaves, and that TVM finds its result well formed."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var
from tvm.script import tirx as tir

import sparsetir
from fences import fenced
from scheduling import csr_of_row_lengths, program, stage2_schedule
from sparsetir.errors import LoweringError, ScheduleError
from sparsetir.ir.rewriting import collect, renewed, substitute
from sparsetir.ir.views import const
from sparsetir.lower import TO_STAGE_2, TO_STAGE_3, as_module, run
from sparsetir.lower.annotations import CHUNKS, PARALLEL_MARK
from sparsetir.lower.checks.cached_copies import CheckCaches, GuardCopies, GuardDomains
from sparsetir.lower.checks.execution import CheckScratch, CheckWrites
from sparsetir.lower.rows.partition import BalanceNonzeros, work_before
from sparsetir.lower.target.arithmetic import GuardDivisions
from sparsetir.lower.target.half_floats import PromoteHalves
from sparsetir.lower.target.initialization import DecomposeInit
from sparsetir.lower.target.scratch import (
    MOST_ELEMENTS,
    BoundLocals,
    HoistScratch,
    LimitScratch,
    PromoteToStack,
    ReplaceAggregates,
    _limited,
)
from sparsetir.lower.target.search import LowerFind
from sparsetir.lower.vector.loop_transforms import PeelRemainders, UnrollRagged, _lane, _update
from sparsetir.lower.vector.memory_hints import InsertPrefetch
from sparsetir.lower.vector.registers import PromoteRegisters
from sparsetir.lower.vector.vectorize import ScalarizeLoops
from sparsetir.schedules import Choices, schedule

PARALLEL, VECTORIZED, UNROLLED = tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED


def applied(func: tirx.PrimFunc, *passes: Any) -> tirx.PrimFunc:
    """`func` after some passes, checked after each."""
    mod = as_module(func)
    for step in passes:
        mod = run([step], mod)
        assert all(s_tir.analysis.verify_well_formed(f) for f in mod.functions.values())
    return next(iter(mod.functions.values()))


def compiled(func: tirx.PrimFunc) -> Any:
    """Machine code of flat loops."""
    return tvm.compile(as_module(func), target="llvm", tir_pipeline="s_tir")["main"]


def loops(func: tirx.PrimFunc, kind: Any = None) -> list[tirx.For]:
    return [loop for loop in collect(func.body, tirx.For) if kind is None or loop.kind == kind]


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "name",
    ["csrmm", "ell_spmm", "csrmm_dense_merge", "sddmm", "bsrmm", "mttkrp_3d", "fused_spmm"],
)
@pytest.mark.parametrize("choices", [Choices(), Choices(tile=8, chunks=3, unroll=4, prefetch=8)], ids=["plain", "all"])
def test_every_pass_leaves_well_formed_functions(name: str, choices: Choices) -> None:
    mod = as_module(program(name))
    for step in TO_STAGE_2:
        mod = run([step], mod)
    mod = schedule(mod, choices).mod
    for step in TO_STAGE_3:
        mod = run([step], mod)
        if step in (UnrollRagged, InsertPrefetch):
            continue  # ConvertSSA comes next: the rest of an unrolled loop still has the loop variables of its groups
        for func in mod.functions.values():
            assert s_tir.analysis.verify_well_formed(func), step.info.name


@tir.prim_func(s_tir=True)
def plain(x: tir.Buffer((8,), "float32"), y: tir.Buffer((8,), "float32")) -> None:
    for i in range(8):
        y[i] = x[i] + tir.float32(1)


FLAT = [
    BalanceNonzeros,
    BoundLocals,
    CheckScratch,
    DecomposeInit,
    GuardCopies,
    GuardDomains,
    HoistScratch,
    InsertPrefetch,
    PromoteRegisters,
    LowerFind,
    PeelRemainders,
    PromoteHalves,
    ScalarizeLoops,
    UnrollRagged,
]


@pytest.mark.parametrize("step", FLAT, ids=lambda step: str(step.info.name).split(".")[1])
def test_a_pass_leaves_alone_what_is_not_its_own(step: Any) -> None:
    assert tvm_ffi.structural_equal(applied(plain, step), as_module(plain)["plain"])


# ---------------------------------------------------------------- BalanceNonzeros


def _visits(chunks: int) -> tirx.PrimFunc:
    """Counts visits of rows and of their positions; `owner` gets the number of the chunk."""

    @tir.prim_func(s_tir=True)
    def main(rows: tir.handle, total: tir.handle, owner: tir.handle, indptr: tir.handle, m: tir.int32) -> None:
        tir.func_attr({"sparsetir.indptr": ["starts"]})
        starts = tir.match_buffer(indptr, (m + 1,), "int32", align=4)
        seen = tir.match_buffer(rows, (m,), "int32", align=4)
        work = tir.match_buffer(total, (m,), "int32", align=4)
        who = tir.match_buffer(owner, (m,), "int32", align=4)
        for i in tir.serial(m, annotations={CHUNKS: chunks, PARALLEL_MARK: True}):
            seen[i] = seen[i] + 1
            who[i] = -7
            for _ in range(starts[i + 1] - starts[i]):
                work[i] = work[i] + 1

    return main


def _owner_is_the_chunk(func: tirx.PrimFunc) -> tirx.PrimFunc:
    (loop,) = loops(func, PARALLEL)

    def on_store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        mine = isinstance(node.value, tirx.IntImm) and int(node.value) == -7
        return tirx.BufferStore(node.buffer, loop.loop_var, node.indices) if mine else mutator.default_mutate(node)

    return tirx.PrimFunc(
        func.params, tvm_ffi.structural_mutate(func.body, [(tirx.BufferStore, on_store)]), func.ret_type, func.attrs
    )


@functools.cache
def _balanced(chunks: int) -> Any:
    return compiled(_owner_is_the_chunk(applied(_visits(chunks), BalanceNonzeros)))


LENGTHS = {
    "no rows": [],
    "one row": [5],
    "one empty row": [0],
    "empty": [0] * 20,
    "equal": [3] * 32,
    "giant first": [1000] + [1] * 30,
    "giant last": [1] * 30 + [1000],
    "giant amid empty": [0] * 15 + [500] + [0] * 15,
    "alternating": [0, 7] * 20,
    "growing": list(range(40)),
}


@pytest.mark.parametrize("chunks", [1, 2, 3, 16, 64])
def test_chunks_cover_every_row_once_and_share_the_work(chunks: int) -> None:
    for kind, lengths in LENGTHS.items():
        m, indptr = len(lengths), np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
        seen, work, owner = (np.zeros(m, "int32") for _ in range(3))
        if m:
            _balanced(chunks)(seen, work, owner, indptr, m)
        assert (seen == 1).all(), kind
        assert (work == lengths).all(), kind
        assert (np.diff(owner) >= 0).all(), kind
        assert ((owner >= 0) & (owner < chunks)).all(), kind
        weight = np.array(lengths, int) + 1
        fair = weight.sum() / chunks + weight.max(initial=0)
        assert all(weight[owner == chunk].sum() <= fair for chunk in range(chunks)), kind


def test_rows_are_weighed_by_their_innermost_positions() -> None:
    """CSF: the last rows hold as many fibers as the first, but all the positions."""

    @tir.prim_func(s_tir=True)
    def main(owner: tir.handle, fibers: tir.handle, points: tir.handle, m: tir.int32, f: tir.int32) -> None:
        tir.func_attr({"sparsetir.indptr": ["ptr0", "ptr1"]})
        ptr0 = tir.match_buffer(fibers, (m + 1,), "int32", align=4)
        ptr1 = tir.match_buffer(points, (f + 1,), "int32", align=4)
        who = tir.match_buffer(owner, (m,), "int32", align=4)
        for i in tir.serial(m, annotations={CHUNKS: 4, PARALLEL_MARK: True}):
            who[i] = -7
            for j in range(ptr0[i + 1] - ptr0[i]):
                for k in range(ptr1[ptr0[i] + j + 1] - ptr1[ptr0[i] + j]):
                    tir.evaluate(k)

    function = compiled(_owner_is_the_chunk(applied(main, BalanceNonzeros)))
    ptr0 = (np.arange(41) * 2).astype("int32")
    points = np.concatenate([[0], np.cumsum([0] * 60 + [50] * 20)]).astype("int32")
    owner = np.zeros(40, "int32")
    function(owner, ptr0, points, 40, 80)
    assert (np.diff(owner) >= 0).all()
    heavy = np.bincount(owner[30:], minlength=4)
    assert heavy.max() <= 3
    assert (owner[:30] == 0).all()


def test_rows_without_a_ragged_loop_are_shared_evenly() -> None:
    @tir.prim_func(s_tir=True)
    def main(owner: tir.handle, m: tir.int32) -> None:
        who = tir.match_buffer(owner, (m,), "int32", align=4)
        for i in tir.serial(m, annotations={CHUNKS: 4, PARALLEL_MARK: True}):
            who[i] = -7

    owner = np.zeros(10, "int32")
    compiled(_owner_is_the_chunk(applied(main, BalanceNonzeros)))(owner, 10)
    assert np.bincount(owner, minlength=4).tolist() == [2, 3, 2, 3]


def test_only_independent_loops_are_shared() -> None:
    @tir.prim_func(s_tir=True)
    def main(y: tir.Buffer((1,), "float32"), x: tir.Buffer((64,), "float32")) -> None:
        for i in tir.serial(64, annotations={CHUNKS: 4}):
            y[0] = y[0] + x[i]

    with pytest.raises(ScheduleError, match=r"sparsetir\.chunks"):
        applied(main, BalanceNonzeros)


# ---------------------------------------------------------------- DecomposeInit


def _same(func: tirx.PrimFunc, expected: tirx.PrimFunc) -> None:
    """Equal, whatever the functions are called."""
    first, second = (f.with_attr("global_symbol", "main") for f in (func, expected))
    tvm.ir.assert_structural_equal(first, second)


def test_an_initialisation_keeps_the_guards_of_its_own_loops() -> None:
    """Lane `l` of the last group may have no element, but it has a partial sum; column 12 of 12 is none."""

    @tir.prim_func(s_tir=True)
    def before(starts: tir.Buffer((2,), "int32"), x: tir.Buffer((64,), "float32"), y: tir.Buffer((4, 12), "float32")):
        for g, l, k_0, k_1 in tir.grid((starts[1] - starts[0] + 3) // 4, 4, 2, 7):
            with tir.sblock("sum"):
                vg, vl = tir.axis.remap("RS", [g, l])
                vk = tir.axis.spatial(12, k_0 * 7 + k_1)
                tir.where(g * 4 + l < starts[1] - starts[0] and k_0 * 7 + k_1 < 12)
                tir.reads(x[vg * 4 + vl])
                tir.writes(y[vl, vk])
                with tir.init():
                    y[vl, vk] = tir.float32(0)
                y[vl, vk] = y[vl, vk] + x[vg * 4 + vl]

    @tir.prim_func(s_tir=True)
    def after(starts: tir.Buffer((2,), "int32"), x: tir.Buffer((64,), "float32"), y: tir.Buffer((4, 12), "float32")):
        for l, k_0, k_1 in tir.grid(4, 2, 7):
            with tir.sblock("sum_init"):
                vl = tir.axis.spatial(4, l)
                vk = tir.axis.spatial(12, k_0 * 7 + k_1)
                tir.where(k_0 * 7 + k_1 < 12)
                tir.reads()
                tir.writes(y[vl, vk])
                y[vl, vk] = tir.float32(0)
        for g, l, k_0, k_1 in tir.grid((starts[1] - starts[0] + 3) // 4, 4, 2, 7):
            with tir.sblock("sum_update"):
                vg, vl = tir.axis.remap("RS", [g, l])
                vk = tir.axis.spatial(12, k_0 * 7 + k_1)
                tir.where(g * 4 + l < starts[1] - starts[0] and k_0 * 7 + k_1 < 12)
                tir.reads(y[vl, vk], x[vg * 4 + vl])
                tir.writes(y[vl, vk])
                y[vl, vk] = y[vl, vk] + x[vg * 4 + vl]

    _same(applied(before, DecomposeInit), after)


# ---------------------------------------------------------------- GuardDomains


def test_block_variables_are_held_in_their_domains() -> None:
    @tir.prim_func(s_tir=True)
    def before(y: tir.Buffer((12,), "float32")) -> None:
        tir.func_attr({"sparsetir.indptr": []})
        for k_0, k_1 in tir.grid(2, 7):
            with tir.sblock("set"):
                vk = tir.axis.spatial(12, k_0 * 7 + k_1)
                y[vk] = tir.float32(0)

    @tir.prim_func(s_tir=True)
    def after(y: tir.Buffer((12,), "float32")) -> None:
        tir.func_attr({"sparsetir.indptr": []})
        for k_0, k_1 in tir.grid(2, 7):
            with tir.sblock("set"):
                vk = tir.axis.spatial(12, k_0 * 7 + k_1)
                tir.where(k_0 * 7 + k_1 < 12)
                y[vk] = tir.float32(0)

    _same(applied(before, GuardDomains), after)
    _same(applied(after, GuardDomains), after)


# ---------------------------------------------------------------- GuardCopies


def test_a_copy_is_made_only_where_it_is_read() -> None:
    @tir.prim_func(s_tir=True)
    def before(starts: tir.Buffer((2,), "int32"), x: tir.Buffer((64,), "float32"), y: tir.Buffer((64,), "float32")):
        tir.func_attr({"sparsetir.indptr": ["starts"]})
        held = tir.sblock_alloc_buffer((64,), "float32")
        for g, l in tir.grid((starts[1] - starts[0] + 3) // 4, 4):
            with tir.sblock("held"):
                v = tir.axis.spatial(64, starts[0] + g * 4 + l)
                held[v] = x[v]
            with tir.sblock("use"):
                v = tir.axis.spatial(starts[1] - starts[0], g * 4 + l)
                tir.where(g * 4 + l < starts[1] - starts[0])
                y[v] = held[starts[0] + v]

    @tir.prim_func(s_tir=True)
    def after(starts: tir.Buffer((2,), "int32"), x: tir.Buffer((64,), "float32"), y: tir.Buffer((64,), "float32")):
        tir.func_attr({"sparsetir.indptr": ["starts"]})
        held = tir.sblock_alloc_buffer((64,), "float32")
        for g, l in tir.grid((starts[1] - starts[0] + 3) // 4, 4):
            if g * 4 + l < starts[1] - starts[0]:
                with tir.sblock("held"):
                    v = tir.axis.spatial(64, starts[0] + g * 4 + l)
                    held[v] = x[v]
            with tir.sblock("use"):
                v = tir.axis.spatial(starts[1] - starts[0], g * 4 + l)
                tir.where(g * 4 + l < starts[1] - starts[0])
                y[v] = held[starts[0] + v]

    _same(applied(before, GuardCopies), after)


# ---------------------------------------------------------------- CheckWrites and CheckCaches


def _block_program(body: str) -> tirx.PrimFunc:
    """Blocks over `x` and `y` with a cache `c` of one row of `x`."""
    head = """
@T.prim_func(s_tir=True)
def main(starts: T.Buffer((2,), "int32"), x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
    T.func_attr({"sparsetir.indptr": ["starts"]})
    with T.sblock("root"):
        c = T.sblock_alloc_buffer((8,), "float32")
"""
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return sparsetir.parse(head + lines)


def _block(name: str, store: str, loop: str = "range(8)") -> str:
    return f"""
for i in {loop}:
    with T.sblock("{name}"):
        v = T.axis.spatial(8, i)
        {store}"""


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (
            [_block("copy", "c[v] = x[v]"), _block("change", "x[v] = T.float32(0)"), _block("use", "y[v] = c[v]")],
            "block change changes x while block use reads the copy c of it; use x itself",
        ),
        (
            [_block("set", "c[v] = T.float32(1)"), _block("use", "y[v] = x[v]"), _block("back", "x[v] = c[v]")],
            "block use reads x, of which the cache c holds the new elements; use x itself",
        ),
        (
            [_block("copy", "c[v] = x[v]"), _block("update", "c[v] = c[v] + y[v]")],
            "what block update stores to the cache c is never copied back",
        ),
        (
            [_block("set", "c[starts[0] + v] = T.float32(1)"), _block("use", "y[v] = c[v]")],
            "block set stores only some elements of the cache c as the data say",
        ),
        (
            [_block("set", "c[v * 2 % 8] = T.float32(1)"), _block("use", "y[v] = c[v]")],
            "block set stores only some elements of the cache c",
        ),
        (
            [_block("set", "if x[v] > T.float32(0): c[v] = x[v]"), _block("use", "y[v] = c[v]")],
            "block set stores to the cache c only where x",
        ),
        ([_block("use", "y[v] = c[v]"), _block("set", "c[v] = x[v]")], "block use reads the cache c before anything"),
    ],
)
def test_caches_that_would_be_read_unset_or_stale(blocks: list[str], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        applied(_block_program("".join(blocks)), CheckCaches)


def test_sound_caches_pass() -> None:
    sound = [_block("copy", "c[v] = x[v]"), _block("update", "c[v] = c[v] + y[v]"), _block("back", "x[v] = c[v]")]
    func = _block_program("".join(sound))
    assert tvm_ffi.structural_equal(applied(func, CheckCaches), as_module(func)["main"])


def test_a_dense_row_is_not_set_in_the_loop_of_a_ragged_one() -> None:
    func = _block_program(
        """
for i in range((starts[1] - starts[0]) * 8):
    with T.sblock("set"):
        v = T.axis.spatial(8, i % 8)
        y[v] = T.float32(0)
"""
    )
    with pytest.raises(ScheduleError, match="block set writes y below loop i, which runs zero times for an empty row"):
        applied(func, CheckWrites)


# ---------------------------------------------------------------- HoistScratch, CheckScratch and ScalarizeLoops


def test_scratch_of_unknown_size_leaves_serial_loops() -> None:
    @tir.prim_func(s_tir=True)
    def before(x: tir.handle, m: tir.int32, n: tir.int32) -> None:
        X = tir.match_buffer(x, (m, n), "float32")
        for i in tir.parallel(m):
            for _ in range(3):
                row = tir.alloc_buffer((n,), "float32")
                cell = tir.alloc_buffer((1,), "float32")
                for j in range(n):
                    row[j] = X[i, j]
                cell[0] = row[0]
                X[i, 0] = cell[0]

    @tir.prim_func(s_tir=True)
    def after(x: tir.handle, m: tir.int32, n: tir.int32) -> None:
        X = tir.match_buffer(x, (m, n), "float32")
        for i in tir.parallel(m):
            row = tir.alloc_buffer((n,), "float32")
            for _ in range(3):
                cell = tir.alloc_buffer((1,), "float32")
                for j in range(n):
                    row[j] = X[i, j]
                cell[0] = row[0]
                X[i, 0] = cell[0]

    _same(applied(before, HoistScratch, tirx.transform.StmtSimplify()), applied(after, tirx.transform.StmtSimplify()))


def test_scratch_that_tvm_cannot_place_is_refused() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, m: tir.int32) -> None:
        tir.func_attr({"sparsetir.indptr": []})
        X = tir.match_buffer(x, (m + 1,), "int32")
        for i in tir.parallel(m):
            copy = tir.alloc_buffer((m + 1,), "int32")
            for j in range(m + 1):
                copy[j] = X[j]
            X[i] = copy[i + 1]

    with pytest.raises(ScheduleError, match="cannot place the scratch copy of unknown size inside a parallel loop"):
        applied(main, CheckScratch)


# ---------------------------------------------------------------- ReplaceAggregates


def _tile(lane: str) -> tirx.PrimFunc:
    """A tile of 8 times 32 sums, of which `lane` is the element of row i and column k."""
    text = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((800,), "float32"), y: T.Buffer((3200,), "float32"), z: T.Buffer((256,), "float32")):
    acc = T.alloc_local((256,), "float32")
    for i in T.unroll(8):
        for k in T.vectorized(32):
            acc[{lane}] = T.float32(0)
    for j in range(100):
        for i in T.unroll(8):
            for k in T.vectorized(32):
                acc[{lane}] = acc[{lane}] + x[i * 100 + j] * y[j * 32 + k]
    for i in T.unroll(8):
        for k in T.vectorized(32):
            z[i * 32 + k] = acc[{lane}]
"""
    return sparsetir.parse(text.format(lane=lane))


def test_large_tiles_are_taken_apart() -> None:
    func = applied(_tile("i * 32 + k"), ReplaceAggregates, PromoteToStack)
    arrays = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    assert [[int(n) for n in b.ty.shape] for b in arrays] == [[32]] * 8
    assert {str(b.ty.storage_scope) for b in arrays} == {"global"}
    x, y = (np.random.default_rng(n).standard_normal(800 * (1 + 3 * n)).astype("float32") for n in range(2))
    z = np.zeros(256, "float32")
    compiled(func)(*(tvm.runtime.tensor(a) for a in (x, y)), out := tvm.runtime.tensor(z))
    np.testing.assert_allclose(out.numpy().reshape(8, 32), x.reshape(8, 100) @ y.reshape(100, 32), rtol=1e-4, atol=1e-4)


def test_a_large_array_behind_one_that_is_taken_apart_stays() -> None:
    text = """
@T.prim_func(s_tir=True)
def main(z: T.Buffer((256,), "float32")):
    acc = T.alloc_local((256,), "float32")
    old = T.alloc_local((300,), "float32")
    for i in range(256):
        old[i] = z[255 - i]
    for i in T.unroll(8):
        for k in T.vectorized(32):
            acc[i * 32 + k] = T.float32(1)
    for i in T.unroll(8):
        for k in T.vectorized(32):
            z[i * 32 + k] = acc[i * 32 + k] + old[i * 32 + k]
"""
    func = applied(sparsetir.parse(text), ReplaceAggregates, PromoteToStack)
    z = np.arange(256, dtype="float32")
    compiled(func)(out := tvm.runtime.tensor(z))
    np.testing.assert_array_equal(out.numpy(), z[::-1] + 1)


def test_tiles_whose_vectors_are_in_several_parts_stay_whole() -> None:
    func = _tile("k * 8 + i")
    assert tvm_ffi.structural_equal(applied(func, ReplaceAggregates), func)


def test_work_is_that_of_the_loop_with_the_most_inside() -> None:
    @tir.prim_func(s_tir=True)
    def main(few: tir.Buffer((9,), "int32"), many: tir.Buffer((9,), "int32"), x: tir.Buffer((8,), "float32")) -> None:
        for i in range(8):
            for _j in range(many[i + 1] - many[i]):
                for _ in range(16):
                    x[i] = x[i] + tir.float32(1)
            for _j in range(few[i + 1] - few[i]):
                x[i] = x[i] + tir.float32(1)

    (outer, *_) = loops(main)
    assert str(work_before(outer, {"few", "many"}).source.name) == "many"


def _lanes(extent: str, body: str) -> tirx.PrimFunc:
    text = """
@T.prim_func(s_tir=True)
def main(starts: T.Buffer((9,), "int32"), x: T.Buffer((8,), "float32"), n: T.int32):
    for i in T.vectorized(8):
        for j in range({extent}):
            {body}
"""
    return sparsetir.parse(text.format(extent=extent, body=body))


@pytest.mark.parametrize(
    ("extent", "body", "kept"),
    [
        ("n", "x[i] = x[i] + T.float32(1)", 1),
        ("starts[i + 1] - starts[i]", "x[i] = x[i] + T.float32(1)", 0),
        ("n", "for k in T.vectorized(4): x[k] = T.float32(1)", 1),
    ],
)
def test_lanes_that_differ_take_turns(extent: str, body: str, kept: int) -> None:
    func = applied(_lanes(extent, body), ScalarizeLoops)
    assert len(loops(func, VECTORIZED)) == kept
    assert len(loops(func)) == len(loops(_lanes(extent, body)))


def test_copies_define_their_own_variables() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.Buffer((8,), "float32")) -> None:
        held = tir.alloc_local((8,), "float32")
        for i in range(8):
            held[i] = x[i]
        for i in range(8):
            x[i] = held[7 - i]

    twice = tirx.PrimFunc(main.params, tirx.SeqStmt([main.body, renewed(main.body)]), main.ret_type, main.attrs)
    assert s_tir.analysis.verify_well_formed(twice)
    assert tvm_ffi.structural_equal(renewed(main.body), main.body)


# ---------------------------------------------------------------- PeelRemainders


@functools.cache
def _tiled_spmm(tile: int) -> Any:
    return sparsetir.build(sparsetir.ops.spmm(), schedule=Choices(tile=tile, chunks=0))


@pytest.mark.parametrize("tile", [8, 16, 64])
def test_tiles_cover_rows_of_every_length(tile: int) -> None:
    A = csr_of_row_lengths([0, 1, 2, 5, 0, 3], 7)
    rng = np.random.default_rng(1)
    for feat in range(1, 71):
        B = rng.uniform(-1, 1, (7, feat)).astype("float32")
        C = fenced(np.full((6, feat), np.nan, "float32"))
        _tiled_spmm(tile)(A=A, B=fenced(B), C=C)
        np.testing.assert_allclose(C, A @ B, rtol=1e-5, atol=1e-5, err_msg=f"feat {feat}")


@pytest.mark.parametrize("tile", [8, 16, 64])
def test_vector_loops_have_no_checks(tile: int) -> None:
    sch = stage2_schedule("csrmm")
    leaf = sch.get_sblock("csrmm")
    j, k = sch.get_loops(leaf)
    ko, ki = sch.split(k, [None, tile])
    sch.reorder(ko, j, ki)
    sch.vectorize(ki)
    flat = run(TO_STAGE_3[: TO_STAGE_3.index(PeelRemainders)], sch.mod)
    func = next(iter(run([PeelRemainders, tirx.transform.ConvertSSA()], flat).functions.values()))
    widths = {int(loop.extent) for loop in loops(func, VECTORIZED)}
    assert widths == {width for width in (2, 4, 8, 16, 32, 64) if width <= tile}
    assert not any(collect(loop.body, tirx.IfThenElse) for loop in loops(func, VECTORIZED))


def test_an_odd_tile_keeps_its_check() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "float32")
        for o in range((n + 5) // 6):
            for i in tir.vectorized(6):
                if o * 6 + i < n:
                    X[o * 6 + i] = tir.float32(1)

    assert tvm_ffi.structural_equal(applied(main, PeelRemainders), as_module(main)["main"])


def test_a_tile_whose_number_is_used_otherwise_keeps_its_check() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "int32", align=4)
        for o in range((n + 7) // 8):
            for i in tir.vectorized(8):
                if o * 8 + i < n:
                    X[o * 8 + i] = o

    func = applied(main, PeelRemainders)
    for n in (0, 1, 7, 8, 21):
        out = np.full(n, -1, "int32")
        if n:
            compiled(func)(out, n)
        assert (out == np.arange(n) // 8).all()


# ---------------------------------------------------------------- UnrollRagged


@pytest.mark.parametrize("factor", range(1, 9))
def test_groups_and_rest_cover_rows_of_every_length(factor: int) -> None:
    kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=Choices(tile=8, chunks=0, unroll=factor))
    A = csr_of_row_lengths([*range(10), 0, 9, 4], 11)
    B = np.random.default_rng(factor).uniform(-1, 1, (11, 13)).astype("float32")
    np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", range(1, 9))
def test_unrolled_steps_keep_their_order(factor: int) -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "int64", align=8)
        Y = tir.match_buffer(y, (1,), "int64", align=8)
        for i in tir.serial(n, annotations={"sparsetir.unroll": factor}):
            Y[0] = Y[0] * tir.int64(3) + X[i]

    func = applied(main, UnrollRagged)
    assert [int(loop.extent) for loop in loops(func, UNROLLED)] == ([factor] if factor > 1 else [])
    function = compiled(func)
    for n in range(1, 10):
        values, out = np.arange(n, dtype="int64") + 5, np.zeros(1, "int64")
        function(values, out, n)
        assert out[0] == sum(int(v) * 3 ** (n - 1 - i) for i, v in enumerate(values))


# ---------------------------------------------------------------- InsertPrefetch


def _chained(prefetch: int) -> Any:
    """B's rows are found through two index arrays."""
    text = """
@T.prim_func
def chained(a: T.handle, b: T.handle, c: T.handle, perm: T.handle, indptr: T.handle, indices: T.handle,
            m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):
    P = T.match_buffer(perm, (n,), "int32")
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_dense, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "chained") as [i, j, k]:
        with T.init():
            C[i, k] = T.float32(0)
        C[i, k] = C[i, k] + A[i, j] * B[P[j], k]
"""
    return sparsetir.build(sparsetir.parse(text), schedule=Choices(tile=8, chunks=0, prefetch=prefetch))


def _prefetches(func: tirx.PrimFunc) -> list[ir.Call]:
    return [c for c in collect(func.body, ir.Call) if "prefetch" in str(c)]


@pytest.mark.parametrize("distance", [1, 8, 100])
def test_prefetching_stays_inside_the_index_arrays(distance: int) -> None:
    """The index arrays end at a page that must not be touched."""
    kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=Choices(tile=8, chunks=0, prefetch=distance))
    for lengths in ([3, 0, 2], [1], [0, 0, 4], [0]):
        A = csr_of_row_lengths(lengths, 5)
        parts = {"a": A.data, "indptr": A.indptr, "indices": A.indices, "b": np.ones((5, 9), "float32")}
        sizes = {"m": len(lengths), "n": 5, "nnz": A.nnz, "feat": 9}
        found = kernel(**{name: fenced(array) for name, array in parts.items()}, **sizes)
        np.testing.assert_allclose(found, A @ parts["b"], rtol=1e-5, atol=1e-5)


def test_every_index_of_a_chain_is_clamped() -> None:
    kernel = _chained(32)
    A = csr_of_row_lengths([2, 0, 3], 4)
    B = np.random.default_rng(0).uniform(-1, 1, (4, 8)).astype("float32")
    perm = np.array([3, 1, 0, 2], "int32")
    parts = {"a": A.data, "b": B, "P": perm, "indptr": A.indptr, "indices": A.indices}
    found = kernel(**{name: fenced(array) for name, array in parts.items()}, m=3, n=4, nnz=A.nnz, feat=8)
    np.testing.assert_allclose(found, A @ B[perm], rtol=1e-5, atol=1e-5)


def test_each_line_of_a_gathered_tile_is_fetched_once() -> None:
    mod = schedule(run(TO_STAGE_2, as_module(program("csrmm"))), Choices(tile=64, chunks=0, prefetch=4)).mod
    flat = run(TO_STAGE_3[: TO_STAGE_3.index(PeelRemainders)], mod)
    func = applied(next(iter(flat.functions.values())), InsertPrefetch)
    fetched = [str(c.args[1]) for c in _prefetches(func) if "address_of" not in str(c.op)]
    assert len(fetched) == len(set(fetched)) == 64 * 4 // 64


def test_nothing_is_fetched_without_a_gather() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.Buffer((1,), "float32"), n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "float32")
        for i in tir.serial(n, annotations={"sparsetir.prefetch": 8}):
            y[0] = y[0] + X[i]

    assert not _prefetches(applied(main, InsertPrefetch))


# ---------------------------------------------------------------- PromoteRegisters


def _stores(node: Any, name: str) -> list[tirx.BufferStore]:
    return [s for s in collect(node, tirx.BufferStore) if str(s.buffer.name) == name]


def test_a_running_value_leaves_memory_alone_inside_the_loop() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, n: tir.int32, m: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "float32", align=4)
        Y = tir.match_buffer(y, (m,), "float32", align=4)
        for i in range(n):
            Y[0] = Y[0] + X[i]

    func = applied(main, PromoteRegisters)
    (inner,) = loops(func)
    assert not _stores(inner, "Y")
    assert len(_stores(func.body, "Y")) == 1
    out = np.array([2], "float32")
    compiled(func)(np.arange(4, dtype="float32"), out, 4, 1)
    assert out[0] == 8


def test_a_loop_without_steps_does_not_touch_its_element() -> None:
    """Y may have no element at all; the first load would be out of bounds."""

    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, at: tir.int32, n: tir.int32) -> None:
        X = tir.match_buffer(x, (4,), "float32", align=4)
        Y = tir.match_buffer(y, (1,), "float32", align=4)
        for i in range(n):
            Y[at] = Y[at] + X[i]

    out = fenced(np.array([3], "float32"))
    compiled(applied(main, PromoteRegisters))(np.zeros(4, "float32"), out, 1 << 20, 0)
    assert out[0] == 3


def test_other_elements_of_the_buffer_keep_it_in_memory() -> None:
    @tir.prim_func(s_tir=True)
    def main(y: tir.handle, n: tir.int32) -> None:
        Y = tir.match_buffer(y, (n,), "float32", align=4)
        for i in range(n):
            Y[0] = Y[0] + Y[i]

    func = applied(main, PromoteRegisters)
    assert tvm_ffi.structural_equal(func, as_module(main)["main"])


def test_an_element_that_moves_stays_in_memory() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "int32", align=4)
        Y = tir.match_buffer(y, (n,), "float32", align=4)
        for i in range(n):
            Y[X[i]] = Y[X[i]] + tir.float32(1)

    assert tvm_ffi.structural_equal(applied(main, PromoteRegisters), as_module(main)["main"])


@pytest.mark.parametrize(("subscript", "is_held"), [("i + 4", True), ("B[i]", False), ("i // 2", False)])
def test_lanes_have_registers_where_their_elements_are_different_ones(subscript: str, is_held: bool) -> None:
    text = f"""
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((4,), "float32"), b: tir.handle, y: tir.Buffer((8,), "float32"), n: tir.int32):
    B = tir.match_buffer(b, (4,), "int32", align=4)
    for j in range(n):
        for i in tir.unroll(4):
            y[{subscript}] = y[{subscript}] + x[i]
"""
    func = applied(tvm.script.from_source(text, {"tir": tir}), PromoteRegisters)
    assert bool(_stores(func.body, "acc")) == is_held
    y, at = np.zeros(8, "float32"), np.array([5, 5, 0, 5], "int32")
    compiled(func)(np.array([1, 2, 3, 4], "float32"), at, y, 2)
    targets = {"i + 4": np.arange(4) + 4, "B[i]": at, "i // 2": np.arange(4) // 2}[subscript]
    want = np.zeros(8, "float32")
    np.add.at(want, np.tile(targets, 2), np.tile([1, 2, 3, 4], 2))
    np.testing.assert_array_equal(y, want)


def test_a_subscript_that_the_loop_changes_stays_in_memory() -> None:
    @tir.prim_func(s_tir=True)
    def main(y: tir.handle, n: tir.int32) -> None:
        Y = tir.match_buffer(y, (n,), "int32", align=4)
        for _ in range(n):
            Y[Y[0]] = Y[Y[0]] + 1

    assert tvm_ffi.structural_equal(applied(main, PromoteRegisters), as_module(main)["main"])


@pytest.mark.parametrize("condition", ["0 < n", "n > 0", "ok[0]", "not ok[0]", "0 < n and ok[0]", "1 < n"])
def test_running_values_begin_with_what_memory_holds_if_it_was_set_under_a_condition(condition: str) -> None:
    text = f"""
@tir.prim_func(s_tir=True)
def main(y: tir.Buffer((4,), "float32"), ok: tir.Buffer((1,), "bool"), n: tir.int32):
    if {condition}:
        y[1] = 5.0
    for i in range(n):
        y[1] = y[1] + 2.0
"""
    func = applied(tvm.script.from_source(text, {"tir": tir}), PromoteRegisters)
    reads = [x for x in collect(func.body, ir.TensorLoad) if str(x.source.name) == "y"]
    assert len(reads) == 1
    for n, ok in itertools.product((0, 1, 3), (False, True)):
        y = np.ones(4, "float32")
        compiled(func)(y, np.array([ok]), n)
        start = 5 if eval(condition, {"n": n, "ok": [ok]}) else 1
        assert y[1] == start + 2 * n


# ---------------------------------------------------------------- BoundLocals


def _local(func: tirx.PrimFunc) -> list[int]:
    held = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    return [int(d) for b in held if str(b.ty.storage_scope) == "local" for d in b.ty.shape]


def test_a_local_tile_gets_the_size_of_its_subscripts() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "float32", align=4)
        Y = tir.match_buffer(y, (n,), "float32", align=4)
        for o in range(n // 8):
            held = tir.alloc_local((n,), "float32")
            for i in range(8):
                held[o * 8 + i] = X[o * 8 + i] * tir.float32(2)
            for i in range(8):
                Y[o * 8 + i] = held[o * 8 + 7 - i]

    func = applied(main, BoundLocals)
    assert _local(func) == [8]
    values = np.arange(16, dtype="float32")
    out = np.zeros(16, "float32")
    compiled(func)(values, out, 16)
    np.testing.assert_array_equal(out, 2 * values.reshape(2, 8)[:, ::-1].ravel())


def test_a_local_array_without_a_bound_is_refused() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "float32", align=4)
        Y = tir.match_buffer(y, (n,), "float32", align=4)
        held = tir.alloc_local((n,), "float32")
        for i in range(n):
            held[i] = X[i]
        for i in range(n):
            Y[i] = held[n - 1 - i]

    with pytest.raises(LoweringError, match=r"held has no fixed size.*tile the loop by a constant"):
        applied(main, BoundLocals)


def test_only_known_dimensions_shrink() -> None:
    """A gathered row: one of `m`, as wide as it is; another array says which."""

    @tir.prim_func(s_tir=True)
    def before(x: tir.handle, which: tir.handle, m: tir.int32, n: tir.int32) -> None:
        X = tir.match_buffer(x, (m, n), "float32")
        W = tir.match_buffer(which, (m,), "int32")
        for i in range(m):
            place = tir.alloc_buffer((m,), "int32")
            place[i] = W[i]
            for _ in range(2):
                row = tir.alloc_buffer((m, n), "float32")
                for j in range(n):
                    row[place[i], j] = X[place[i], j]
                X[i, 0] = row[place[i], n - 1]

    func = applied(before, BoundLocals)
    shapes = {str(a.buffer.name): [str(d) for d in a.buffer.ty.shape] for a in collect(func.body, tirx.AllocBuffer)}
    assert shapes == {"place": ["1"], "row": ["1", "n"]}
    func = applied(func, tirx.transform.FlattenBuffer())
    held, rows = np.arange(6, dtype="float32").reshape(3, 2), np.array([2, 0, 1], "int32")
    compiled(func)(held, rows, 3, 2)
    np.testing.assert_array_equal(held, [[5, 1], [1, 3], [3, 5]])


def test_elements_without_a_use_are_dropped() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.Buffer((16,), "float32")) -> None:
        held = tir.alloc_local((16,), "float32")
        for i in range(8):
            held[i] = x[i]
        x[0] = held[7]

    assert _local(applied(main, BoundLocals)) == [8]


# ---------------------------------------------------------------- LowerFind

FIND = "T.sp.find(indices[indptr[{row}]], indptr[{row} + 1] - indptr[{row}], {want}, {ordered}, {strategy!r})"

LOOKUP = """
@T.prim_func
def main(
    indptr: T.Buffer(("m + 1",), "int32", align=4), indices: T.Buffer(("nnz",), "int32", align=4),
    want: T.Buffer(("w",), "int32", align=4), out: T.Buffer(("m", "w"), "int32", align=4),
    m: T.int32, nnz: T.int32, w: T.int32,
):
    for i in T.{kind}(m):
        for k in range(w):
            {body}
"""


def _lookup(body: str, kind: str = "serial") -> tirx.PrimFunc:
    """A flat function of rows `i` and lookups `k`; its searches are lowered."""
    return applied(sparsetir.parse(LOOKUP.format(body=body, kind=kind)), LowerFind)


def _find(want: str = "want[k]", row: str = "i", *, ordered: bool = True, strategy: str = "inline") -> str:
    return FIND.format(want=want, row=row, ordered=int(ordered), strategy=strategy)


def _call(func: tirx.PrimFunc, rows: list[list[int]], want: list[int]) -> np.ndarray:
    """Slots found for every row and wanted coordinate; index arrays end at a forbidden page."""
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype("int32")
    indices = np.array([c for row in rows for c in row], "int32")
    out = np.full((len(rows), len(want)), -9, "int32")
    arrays = (fenced(indptr), fenced(indices), fenced(np.array(want, "int32")), out)
    # numpy gives an empty array strides that TVM does not take.
    passed = [a if a.size else tvm.runtime.empty(a.shape, "int32") for a in arrays]
    compiled(func)(*passed, len(rows), len(indices), len(want))
    return out


def _slots(rows: list[list[int]], want: list[int]) -> list[list[int]]:
    return [[row.index(c) if c in row else -1 for c in want] for row in rows]


def _depth(func: tirx.PrimFunc, kind: type = tirx.While) -> list[int]:
    """How many loops stand around each node of a kind."""
    found: list[int] = []

    def walk(node: Any, depth: int) -> None:
        def on_for(loop: tirx.For, _mutator: Any) -> Any:
            walk(loop.body, depth + 1)
            return loop

        def on_node(inner: Any, mutator: Any) -> Any:
            found.append(depth)
            return mutator.default_mutate(inner)

        tvm_ffi.structural_mutate(node, [(tirx.For, on_for), (kind, on_node)])

    walk(func.body, 0)
    return found


SORTED_ROWS = [[1, 4, 5, 9], [], [0], [7], [2, 3], list(range(0, 40, 3))]
WANT = [0, 1, 2, 3, 4, 5, 7, 9, 10, 39, 40, -1]


@pytest.mark.parametrize("strategy", ["inline", "merge"])
@pytest.mark.parametrize("want", [WANT, WANT[::-1], [5, 0, 9, 9, 1, 5]], ids=["up", "down", "mixed"])
@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_sorted_searches_are_exact_in_any_order(strategy: str, want: list[int], kind: str) -> None:
    func = _lookup(f"out[i, k] = {_find(strategy=strategy)}", kind)
    assert _call(func, SORTED_ROWS, want).tolist() == _slots(SORTED_ROWS, want)


def test_unsorted_searches_find_the_first() -> None:
    rows = [[5, 1, 5, 3], [], [2, 0], [9, 8, 7, 6, 5]]
    func = _lookup(f"out[i, k] = {_find(ordered=False)}")
    assert _call(func, rows, WANT[:-1]).tolist() == _slots(rows, WANT[:-1])


def test_a_search_leaves_the_loops_that_do_not_move_it() -> None:
    func = _lookup(f"out[i, k] = {_find('want[0]')} + k")
    assert _depth(func) == [1]
    assert _call(func, SORTED_ROWS, [4, 0, 0]).tolist() == [
        [s + k for k in range(3)] for (s,) in _slots(SORTED_ROWS, [4])
    ]


def test_a_search_that_moves_stays() -> None:
    assert _depth(_lookup(f"out[i, k] = {_find()}")) == [2]


def test_equal_searches_are_done_once() -> None:
    once = _find()
    func = _lookup(f"out[i, k] = T.if_then_else({once} >= 0, {once} * 10, {once})")
    assert len(_depth(func)) == 1
    expected = [[s * 10 if s >= 0 else s for s in row] for row in _slots(SORTED_ROWS, WANT)]
    assert _call(func, SORTED_ROWS, WANT).tolist() == expected


def test_a_condition_and_its_value_search_once() -> None:
    """Rows that do not exist are not searched, and the value takes the slot that the condition found."""
    once = _find("i", "want[k]")
    func = _lookup(f"out[i, k] = T.if_then_else(0 <= want[k] and want[k] < m and {once} >= 0, {once}, -3)")
    assert len(_depth(func)) == 1
    want = [0, 5, -1, 2, 6, 4, 99]
    rows = range(len(SORTED_ROWS))
    slots = [[SORTED_ROWS[w].index(i) if w in rows and i in SORTED_ROWS[w] else -3 for w in want] for i in rows]
    assert _call(func, SORTED_ROWS, want).tolist() == slots


def test_a_search_stays_below_the_writes_of_what_it_reads() -> None:
    """Each lookup stores the next wanted coordinate."""
    func = _lookup(f"""out[i, k] = {_find("want[0]")}
            want[0] = want[0] + 1""")
    assert _depth(func) == [2]
    assert _call(func, [[0, 1, 3], [4, 5]], [0, 0, 0]).tolist() == [[0, 1, -1], [-1, 0, 1]]


def test_a_search_keeps_the_conditions_it_stands_under() -> None:
    """Row i + 5 of the pointers does not exist for the last rows: nothing of it may be read."""
    func = _lookup(f"out[i, k] = T.if_then_else(i + 5 < m, {_find('want[0]', 'i + 5')}, -3)")
    assert _depth(func) == [1]
    assert "if i + 5 < m" in func.script(), "not run: it would read past the end"
    rows = [*SORTED_ROWS, [4]]
    slots = [s for (s,) in _slots(rows, [4])]
    assert _call(func, rows, [4, 4]).tolist() == [
        [slots[i + 5] if i + 5 < len(rows) else -3] * 2 for i in range(len(rows))
    ]


def test_a_search_of_a_loop_without_steps_is_not_done() -> None:
    """The first search stands before the rows, of which there are none: row 0 has no end."""
    func = _lookup(f"out[i, k] = {_find('3', '0')}")
    assert _depth(func) == [0]
    assert _call(func, [], [1, 2]).shape == (0, 2)


def test_threads_do_not_share_a_place() -> None:
    """The finger of a co-walk belongs to one step of the parallel loop."""
    func = _lookup(f"out[i, k] = {_find(strategy='merge')}", "parallel")
    (rows,) = loops(func, PARALLEL)
    held = [a.buffer for a in collect(rows.body, tirx.AllocBuffer)]
    assert held
    assert {s.buffer for s in collect(func.body, tirx.BufferStore)} <= {*held, *func.params}


def test_lanes_that_search_take_turns() -> None:
    func = _lookup("for lane in T.vectorized(4): out[i, k] = T.max(-9, " + _find("want[k] + lane") + ")")
    assert not loops(func, VECTORIZED)


@pytest.mark.parametrize("value", ["C[0]", "T.Cast('bfloat16', T.Cast('float32', n))", "T.Cast('bfloat16', 2)"])
def test_one_bfloat16_for_all_lanes_is_stored_in_turns(value: str) -> None:
    text = f"""
@T.prim_func(s_tir=True)
def main(c: T.handle, y: T.handle, n: T.int32):
    C = T.match_buffer(c, (n,), "bfloat16")
    Y = T.match_buffer(y, (n * 8,), "bfloat16")
    for i in range(n):
        for lane in T.vectorized(8):
            Y[i * 8 + lane] = {value}
"""
    func = applied(tvm.script.from_source(text), ScalarizeLoops)
    assert not loops(func, VECTORIZED)
    compiled(func)


# ---------------------------------------------------------------- PromoteHalves


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_sums_are_kept_in_single_precision(dtype: str) -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), dtype)
        Y = tir.match_buffer(y, (1,), dtype)
        acc = tir.alloc_local((1,), dtype)
        acc[0] = tir.Cast(dtype, tir.float32(0))
        for i in range(n):
            acc[0] = acc[0] + X[i] * X[i]
        Y[0] = acc[0]

    func = applied(main, PromoteHalves)
    held = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    assert [str(b.ty.dtype) for b in held] == ["float32"]
    for kind in (tirx.Add, tirx.Mul):
        assert {str(e.ty.dtype) for e in collect(func.body, kind)} == {"float32"}


def test_half_sums_round_once() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, y: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "float16", align=2)
        Y = tir.match_buffer(y, (1,), "float16", align=2)
        for i in range(n):
            Y[0] = Y[0] + X[i]

    func = applied(main, PromoteRegisters, PromoteHalves)
    out = np.zeros(1, "float16")
    compiled(func)(np.full(4096, 1, "float16"), out, 4096)
    assert out[0] == 4096, "a float16 sum of ones stops at 2048"


def test_columns_that_are_a_multiple_of_a_size_are_written_for_empty_rows_too() -> None:
    func = sparsetir.parse("""
@T.prim_func
def tiled(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
          m: T.int32, n: T.int32, tiles: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(tiles * 8)
    A = T.match_sparse_buffer(a, (I, J), "float64")
    B = T.match_sparse_buffer(b, (J_dense, K), "float64")
    C = T.match_sparse_buffer(c, (I, K), "float64")
    with T.sp_iter([I, J, K], "SRS", "tiled") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]
""")
    A, kernel = csr_of_row_lengths([0, 3, 0, 1], 5).astype("float64"), sparsetir.build(func)
    for tiles in (0, 1, 5):
        B = np.random.default_rng(0).random((5, 8 * tiles))
        np.testing.assert_allclose(kernel(A=A, B=B, C=np.full((4, 8 * tiles), np.nan)), A @ B, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_scratch_has_no_negative_size_and_none_that_wraps_around(seed: int) -> None:
    """Drawn extents of scratch at drawn sizes, small and huge, beside Python's integers."""
    rng = np.random.default_rng(seed)
    sizes = [ir.Var(name, "int64") for name in "nmk"]
    operators = [(tirx.Add, int.__add__), (tirx.Sub, int.__sub__), (tirx.Mul, int.__mul__)]

    def drawn(depth: int, operators: Any) -> tuple[Any, Any]:
        """An expression, and a function that evaluates it and adds its products to a list."""
        if depth == 0:
            which = int(rng.integers(4))
            return (sizes[which], lambda v, _: v[which]) if which < 3 else (tirx.const(7, "int64"), lambda _v, _p: 7)
        (a, at_a), (b, at_b) = drawn(depth - 1, operators), drawn(depth - 1, operators)
        make, by = operators[int(rng.integers(len(operators)))]

        def value(v: list[int], products: list[int]) -> int:
            exact = by(at_a(v, products), at_b(v, products))
            products += [exact] if make is tirx.Mul else []
            return int(exact)

        return make(a, b), value

    for _ in range(25):
        parts = [drawn(int(rng.integers(3)), operators) for _ in range(2)]
        make, by = [(tirx.Max, max), (tirx.Min, min)][int(rng.integers(2))]
        scratch = tirx.decl_buffer([make(*(e for e, _ in parts))], "float32", name="scratch", layout=None)
        load = tirx.Evaluate(tirx.BufferLoad(scratch, [tirx.const(0, "int64")]))
        func = tirx.PrimFunc(sizes, tirx.SeqStmt([tirx.AllocBuffer(scratch), load]))
        (allocated,) = [a.buffer.ty.shape[0] for a in collect(applied(func, LimitScratch).body, tirx.AllocBuffer)]
        for _ in range(6):
            values = [int(2 ** rng.uniform(0, 40)) * int(rng.choice([1, 1, 1, 0, -1])) for _ in sizes]
            known = {v: tirx.const(n, "int64") for v, n in zip(sizes, values, strict=True)}
            got = tvm.sym.Analyzer().simplify(tvm_ffi.structural_map(allocated, (ir.Var, lambda v, k=known: k[v])))
            want = []
            for _, exact in parts:
                products: list[int] = []
                size = min(max(exact(values, products), 0), 1 << 60)
                want.append(1 << 60 if any(abs(p) >= 1 << 62 for p in products) else size)
            assert int(got) == by(want), (scratch.ty.shape, values)


def test_registers_leave_elements_alone_that_no_step_updates() -> None:
    """The element of an inner loop that does not run may not exist: its subscript lies past the index array."""
    func = sparsetir.parse("""
@T.prim_func
def attached(y: T.handle, s: T.handle, iw: T.handle, pj: T.handle, ij: T.handle, n: T.int32, nj: T.int32, z: T.int32,
             m: T.int32):
    W = T.singleton(None, n, iw)
    J0 = T.dense_variable(None, (nj, z), pj)
    J1 = T.singleton(J0, m, ij, sorted=False)
    DW, DJ = T.dense_fixed(n), T.dense_fixed(m)
    Y = T.match_sparse_buffer(y, (DW,), "float32")
    S = T.match_sparse_buffer(s, (DW, DJ), "float32")
    with T.sp_iter([W, T.attach(J1, W)], "SS", "work") as [w, j]:
        S[w, j] = T.min(S[w, j], Y[w])
""")
    kernel = sparsetir.build(func, {"kind": "llvm", "opt-level": 0})
    for w, places in [(1, [2]), (0, [2]), (1, [0, 2]), (5, [1])]:
        known = {"iw": np.array([w], np.int32), "pj": np.array([0, len(places)], np.int32)}
        arrays = {name: fenced(a) for name, a in {**known, "ij": np.array(places, np.int32)}.items()}
        y, s = np.arange(-6, 0, dtype=np.float32), np.zeros((6, 3), np.float32)
        want = s.copy()
        if w < len(places):
            want[w, places[w]] = y[w]
        kernel(Y=y, S=s, nj=len(places), **arrays)
        np.testing.assert_array_equal(s, want)


def test_reductions_leave_elements_alone_whose_own_coordinate_is_absent() -> None:
    """The coordinate of the only entry lies outside of its axis, and so would the element that it names."""
    func = sparsetir.parse("""
@T.prim_func
def scaled(g: T.handle, h: T.handle, iu: T.handle, n: T.int64):
    U = T.singleton(None, n, iu, "int64", sorted=False)
    D = T.dense_fixed(n, "int64")
    G = T.match_sparse_buffer(g, (D,), "float32")
    H = T.match_sparse_buffer(h, (D,), "float32")
    with T.sp_iter([U], "R", "work") as [u]:
        G[u] = G[u] * H[u]
""")
    kernel = sparsetir.build(func)
    for place, size in [(1, 1), (5, 3), (2, 3), (0, 1)]:
        g, h = fenced(np.full(size, 2, np.float32)), fenced(np.full(size, 3, np.float32))
        with sparsetir.unchecked():
            kernel(G=g, H=h, iu=fenced(np.array([place])), n=size)
        want = np.full(size, 2, np.float32)
        want[place : place + 1] = 6
        np.testing.assert_array_equal(g, want)


# ---------------------------------------------------------------- parts of passes


@pytest.mark.parametrize("size", [-(2**40), -1, 0, 7, 2**60 - 1, 2**60, 2**62])
def test_scratch_has_no_negative_size_and_none_that_does_not_exist(size: int) -> None:
    n = Var("n", ir.PrimType("int64"))
    bound = tvm.sym.Analyzer().simplify(substitute(_limited(n), {n: const(size, "int64")}))
    assert int(bound) == min(max(size, 0), MOST_ELEMENTS)


def _tiles(gap: int, other: int | None) -> tirx.For:
    """Two tiles of a vector of sums that begin `gap` from the first element, and read `other` elements ahead, too."""
    i, j = (Var(name, ir.PrimType("int32")) for name in "ij")
    d = tirx.decl_buffer((80,), "float32", name="d")
    at = i * 32 + j + gap
    term = const(1, "float32") if other is None else tirx.BufferLoad(d, [at + other])
    lanes = tirx.For(j, const(0), const(32), VECTORIZED, tirx.BufferStore(d, tirx.BufferLoad(d, [at]) + term, [at]))
    return tirx.For(i, const(0), const(2), tirx.ForKind.SERIAL, lanes)


@pytest.mark.parametrize("gap", [-1, 0, 1])
def test_tiles_are_interchanged_only_where_they_cover_each_element_once(gap: int) -> None:
    tiles = _tiles(gap, None)
    (store,) = collect(tiles, tirx.BufferStore)
    assert (_lane(tiles, store) is not None) == (gap == 0)


@pytest.mark.parametrize("other", [None, 1, -32])
def test_sums_that_read_other_elements_keep_their_loops(other: int | None) -> None:
    assert (_update(_tiles(0, other).body) is not None) == (other is None)


SEARCHED_MINIMUM = """
@T.prim_func
def searched_minimum(e: T.handle, f: T.handle, g: T.handle, indptr: T.handle, indices: T.handle, ends: T.handle,
                     found: T.handle, m: T.int32, n: T.int32, nnz: T.int32, count: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    V = T.sparse_variable(None, (n, count), (ends, found), "int32")
    D = T.dense_fixed(n)
    E = T.match_sparse_buffer(e, (I,), "float32")
    F = T.match_sparse_buffer(f, (V,), "float32")
    G = T.match_sparse_buffer(g, (D,), "float32")
    with T.sp_iter([I, J], "SR", "sums") as [i, j]:
        with T.init():
            E[i] = T.float32(0)
        E[i] = E[i] + T.min(F[j], G[j])
"""


@pytest.mark.parametrize("lanes", [0, 2, 4, 8])
@pytest.mark.parametrize("found", [[], [0], [3, 8]])
def test_sums_over_a_search_in_an_array_that_may_be_empty(lanes: int, found: list[int]) -> None:
    """A missing element is zero, and the rest of its term still counts."""
    kernel = sparsetir.build(sparsetir.parse(SEARCHED_MINIMUM), schedule=Choices(lanes=lanes))
    lengths = np.array([1, 0, 3, 9, 2, 4])
    rows, columns = np.repeat(np.arange(6), lengths), np.concatenate([np.arange(n) for n in lengths])
    F, G = np.zeros(9, "float32"), np.arange(-5, 4).astype("float32")
    F[found] = -7
    E = kernel(
        f=F[found], g=G, indptr=np.concatenate([[0], np.cumsum(lengths)]).astype("int32"),
        indices=columns.astype("int32"), ends=np.array([0, len(found)], "int32"), found=np.array(found, "int32"),
    )  # fmt: skip
    np.testing.assert_array_equal(E, np.bincount(rows, np.minimum(F, G)[columns], 6).astype("float32"))


NUMBERED_ROWS = """
@T.prim_func
def number_rows(a: T.handle, o: T.handle, p: T.handle, q: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q))
    A = T.match_sparse_buffer(a, (I, J), "int32")
    O = T.match_sparse_buffer(o, (I, J), "int32")
    with T.sp_iter([T.fuse(I, J)], "SS", "number") as [i, j]:
        O[i, j] = A[i, j] + i
"""


@pytest.mark.parametrize("lengths", [[1, 1, 1], [0, 3, 0, 0, 2, 1, 0], [0, 0, 4], [5], [2, 0, 0, 2]], ids=str)
@pytest.mark.parametrize("chunks", [0, 3])
def test_each_position_is_in_the_last_row_that_begins_by_it(lengths: list[int], chunks: int) -> None:
    """Rows are searched for positions of a fused loop: those at which a row begins, and those behind empty rows."""
    pointers, columns = np.cumsum([0, *lengths]), np.concatenate([np.arange(n) for n in lengths])
    A = sp.csr_array((np.zeros(len(columns), np.int32), columns, pointers), shape=(len(lengths), 5))
    kernel = sparsetir.build(sparsetir.parse(NUMBERED_ROWS), schedule=Choices(chunks=chunks))
    np.testing.assert_array_equal(kernel(A=A).data, np.repeat(np.arange(len(lengths)), lengths))


def test_divisors_of_two_loops_over_one_variable_are_guarded() -> None:
    i, n = Var("i", const(0, "int32").ty), Var("n", const(0, "int32").ty)
    a = tirx.decl_buffer((20,), "int32", name="a")
    loops = [
        tirx.For(i, first, 5, tirx.ForKind.SERIAL, tirx.BufferStore(a, tirx.floordiv(n, i), [i])) for first in (0, 1)
    ]
    func = tirx.PrimFunc([n, tirx.Var("a", "handle")], tirx.SeqStmt(loops))
    divisions = collect(GuardDivisions(as_module(func))["main"].body, tirx.FloorDiv)
    assert len(divisions) == 2
    assert all(isinstance(division.b, tirx.Select) for division in divisions)
