# SPDX-License-Identifier: Apache-2.0
"""Each pass of the lowering alone: what it rewrites, what it leaves, and that TVM finds its result well formed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.script import tirx as tir

import sparsetir
from fences import fenced
from scheduling import csr_of_row_lengths, program, stage2_schedule
from sparsetir.errors import LoweringError, ScheduleError
from sparsetir.lower import TO_STAGE_2, TO_STAGE_3, as_module, run
from sparsetir.lower.balance_loops import CHUNKS, PARALLEL_MARK, BalanceLoops
from sparsetir.lower.bound_locals import BoundLocals
from sparsetir.lower.insert_prefetch import InsertPrefetch
from sparsetir.lower.keep_accumulators import KeepAccumulators
from sparsetir.lower.lower_find import LowerFind
from sparsetir.lower.peel_tiles import PeelTiles
from sparsetir.lower.promote_halves import PromoteHalves
from sparsetir.lower.rewriting import collect
from sparsetir.lower.unroll_ragged import UnrollRagged
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


@pytest.mark.parametrize("name", ["csrmm", "sddmm", "bsrmm", "ell_spmm", "mttkrp_3d", "csrmm_dense_merge", "fused_spmm"])
@pytest.mark.parametrize("choices", [Choices(), Choices(tile=8, chunks=3, unroll=4, prefetch=8)], ids=["plain", "all"])
def test_every_pass_leaves_well_formed_functions(name: str, choices: Choices) -> None:
    mod = as_module(program(name))
    for step in TO_STAGE_2:
        mod = run([step], mod)
    mod = schedule(mod, choices).mod
    for step in TO_STAGE_3:
        mod = run([step], mod)
        for func in mod.functions.values():
            assert s_tir.analysis.verify_well_formed(func), step.info.name


@tir.prim_func(s_tir=True)
def plain(x: tir.Buffer((8,), "float32"), y: tir.Buffer((8,), "float32")) -> None:
    for i in range(8):
        y[i] = x[i] + tir.float32(1)


FLAT = [
    BalanceLoops,
    BoundLocals,
    InsertPrefetch,
    KeepAccumulators,
    LowerFind,
    PeelTiles,
    PromoteHalves,
    UnrollRagged,
]


@pytest.mark.parametrize("step", FLAT, ids=lambda step: str(step.info.name).split(".")[1])
def test_a_pass_leaves_alone_what_is_not_its_own(step: Any) -> None:
    assert tvm_ffi.structural_equal(applied(plain, step), as_module(plain)["plain"])


# ---------------------------------------------------------------- BalanceLoops


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
            for j in range(starts[i + 1] - starts[i]):
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
    return compiled(_owner_is_the_chunk(applied(_visits(chunks), BalanceLoops)))


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

    function = compiled(_owner_is_the_chunk(applied(main, BalanceLoops)))
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
    compiled(_owner_is_the_chunk(applied(main, BalanceLoops)))(owner, 10)
    assert np.bincount(owner, minlength=4).tolist() == [3, 2, 3, 2]


def test_only_independent_loops_are_shared() -> None:
    @tir.prim_func(s_tir=True)
    def main(y: tir.Buffer((1,), "float32"), x: tir.Buffer((64,), "float32")) -> None:
        for i in tir.serial(64, annotations={CHUNKS: 4}):
            y[0] = y[0] + x[i]

    with pytest.raises(ScheduleError, match="annotated for chunks"):
        applied(main, BalanceLoops)


# ---------------------------------------------------------------- PeelTiles


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
    flat = run(TO_STAGE_3[: TO_STAGE_3.index(PeelTiles)], sch.mod)
    func = applied(next(iter(flat.functions.values())), PeelTiles)
    widths = {int(loop.extent) for loop in loops(func, VECTORIZED)}
    assert widths == {width for width in (4, 8, 16, 32, 64) if width <= tile}
    assert not any(collect(loop.body, tirx.IfThenElse) for loop in loops(func, VECTORIZED))


def test_an_odd_tile_keeps_its_check() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "float32")
        for o in range((n + 5) // 6):
            for i in tir.vectorized(6):
                if o * 6 + i < n:
                    X[o * 6 + i] = tir.float32(1)

    assert tvm_ffi.structural_equal(applied(main, PeelTiles), as_module(main)["main"])


def test_a_tile_whose_number_is_used_otherwise_keeps_its_check() -> None:
    @tir.prim_func(s_tir=True)
    def main(x: tir.handle, n: tir.int32) -> None:
        X = tir.match_buffer(x, (n,), "int32")
        for o in range((n + 7) // 8):
            for i in tir.vectorized(8):
                if o * 8 + i < n:
                    X[o * 8 + i] = o

    func = applied(main, PeelTiles)
    for n in (0, 1, 7, 8, 21):
        out = np.full(n, -1, "int32")
        if n:
            compiled(func)(tvm.runtime.tensor(out) if False else (kept := tvm.runtime.tensor(out)), n)
            assert (kept.numpy() == np.arange(n) // 8).all()


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
