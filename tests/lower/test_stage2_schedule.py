# SPDX-License-Identifier: Apache-2.0
"""Stage II under the stock primitives: every schedule TVM accepts computes the same numbers, or is refused in words.

A schedule here is a function of the schedule and the innermost block. ``@on`` names the programs it fits; one test
builds each pair and compares it with the program's oracle on empty, short and full rows.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi
from tvm import s_tir
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as tir

import each
import sparsetir
from scheduling import EVEN, PROGRAMS, ScheduleFn, drawn_schedule, is_right, program, stage2_schedule
from sparsetir.errors import LoweringError, ScheduleError

SCHEDULES: list[tuple[str, ScheduleFn]] = []
SPMM = ("csrmm", "ell_spmm")


def on(*names: str) -> Any:
    """The programs a schedule is for."""

    def keep(function: ScheduleFn) -> ScheduleFn:
        SCHEDULES.extend((name, function) for name in names)
        return function

    return keep


def loops(sch: s_tir.Schedule, leaf: Any, names: str) -> Any:
    """The loops with these names around a block, or around the block above it."""
    above = f"{sch.get(leaf).name_hint}_0"
    blocks = [block for block in sch.get_child_blocks(sch.get_sblock("root")) if sch.get(block).name_hint == above]
    found = {str(sch.get(lp).loop_var.name): lp for block in (*blocks, leaf) for lp in sch.get_loops(block)}
    return [found[name] for name in names.split()]


def rows_of(sch: s_tir.Schedule, leaf: Any) -> Any:
    """The block above the innermost one."""
    return sch.get_sblock(f"{sch.get(leaf).name_hint}_0")


def reading(sch: s_tir.Schedule, leaf: Any, name: str) -> int:
    """Place of a buffer among what a block reads."""
    return next(n for n, region in enumerate(sch.get(leaf).reads) if str(region.source.name) == name)


# ---------------------------------------------------------------- split


@on(*SPMM)
def split_dense(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.split(k, [None, 8])


@on(*SPMM)
def split_dense_by_the_outer_factor(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.split(k, [3, None])


@on(*SPMM)
def split_dense_in_three(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.split(k, [2, None, 5])


@on("even")
def split_dense_evenly(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.split(k, [2, 3, None])


@on("even")
def split_dense_unevenly(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.split(k, [None, 7])


@on(*SPMM, "spmv", "sddmm")
def split_ragged(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.split(j, [None, 4])


@on(*SPMM, "spmv", "sddmm")
def split_ragged_by_the_outer_factor(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.split(j, [3, None])


@on("csrmm", "spmv", "sddmm")
def split_ragged_in_three(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.split(j, [None, 3, 2])


@on("blocked")
def split_blocks(sch: s_tir.Schedule, leaf: Any) -> None:
    jo, ii, k = loops(sch, leaf, "jo ii k")
    sch.split(jo, [None, 2])
    sch.split(ii, [None, 3])
    sch.split(k, [3, None])


@on(*SPMM, "spmv", "sddmm")
def split_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    (i,) = loops(sch, leaf, "i")
    sch.split(i, [None, 4])


# ---------------------------------------------------------------- reorder and fuse


@on(*SPMM, "sddmm")
def reorder(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    sch.reorder(k, j)


@on(*SPMM, "sddmm")
def reorder_tiles(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    (jo, ji), (ko, ki) = sch.split(j, [None, 2]), sch.split(k, [None, 4])
    sch.reorder(ko, jo, ki, ji)


@on("ell_spmm")
def reorder_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    i, j, k = loops(sch, leaf, "i j k")
    sch.reorder(k, j, i)


@on("blocked")
def reorder_a_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    jo, ii, ji, k = loops(sch, leaf, "jo ii ji k")
    sch.reorder(ii, k, jo, ji)


@on(*SPMM)
def fuse_what_was_split(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    sch.fuse(*sch.split(k, [None, 4]))
    sch.fuse(*sch.split(j, [None, 3]))


@on("blocked")
def fuse_spatial_loops(sch: s_tir.Schedule, leaf: Any) -> None:
    jo, ii, ji, k = loops(sch, leaf, "jo ii ji k")
    sch.reorder(jo, ji, ii, k)
    sch.fuse(ii, k)


@on("blocked")
def fuse_reduction_loops(sch: s_tir.Schedule, leaf: Any) -> None:
    jo, ii, ji, k = loops(sch, leaf, "jo ii ji k")
    sch.reorder(ii, k, jo, ji)
    sch.fuse(jo, ji)


# ---------------------------------------------------------------- kinds of loops


@on("csrmm", "spmv", "sddmm", "ell_spmm")
def parallel_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    (i,) = loops(sch, leaf, "i")
    sch.parallel(i)


@on("csrmm", "sddmm")
def parallel_tiles_of_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    (i,) = loops(sch, leaf, "i")
    outer, inner = sch.split(i, [None, 4])
    sch.parallel(outer)
    sch.unroll(inner)


@on("csrmm")
def parallel_columns(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    sch.reorder(k, j)
    sch.parallel(k)


@on("sddmm")
def parallel_positions(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.parallel(j)


@on(*SPMM, "even", "blocked", "csrmm_dense_iter", "csrmm_dense_merge")
def vectorize(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.vectorize(sch.split(k, [None, 8])[1])


@on("csrmm", "even")
def vectorize_an_odd_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.vectorize(sch.split(k, [None, 6])[1])


@on("sddmm")
def vectorize_positions(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    jo, ji = sch.split(j, [None, 4])
    sch.reorder(jo, k, ji)
    sch.vectorize(ji)


@on("csrmm", "spmv", "sddmm")
def vectorize_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    """Rows of different lengths do not run in step: they take turns."""
    (i,) = loops(sch, leaf, "i")
    sch.vectorize(sch.split(i, [None, 4])[1])


@on("even", "blocked")
def vectorize_twice(sch: s_tir.Schedule, leaf: Any) -> None:
    *_, k = loops(sch, leaf, "k")
    outer, inner = sch.split(k, [None, 8])
    sch.vectorize(inner)
    sch.vectorize(sch.split(outer, [None, 2])[1])


@on("stencil", "union_add")
def vectorize_searches(sch: s_tir.Schedule, leaf: Any) -> None:
    """Every lane looks for a coordinate of its own: the lanes take turns."""
    sch.vectorize(sch.split(sch.get_loops(leaf)[-1], [None, 4])[1])


@on(*SPMM, "spmv", "sddmm")
def unroll(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.unroll(sch.split(j, [None, 4])[1])


# ---------------------------------------------------------------- stages


@on("csrmm")
def cache_read(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_read(leaf, reading(sch, leaf, "a"), "global")


@on("csrmm", "even", "sddmm")
def cache_read_gathered_row(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    copy = sch.cache_read(leaf, reading(sch, leaf, "y" if sch.get(leaf).name_hint == "sddmm" else "b"), "global")
    sch.compute_at(copy, j)


@on(*SPMM)
def cache_read_in_a_split_row(sch: s_tir.Schedule, leaf: Any) -> None:
    """The last group of a row is not full: what the missing nonzeros would gather is not there."""
    (j,) = loops(sch, leaf, "j")
    copy = sch.cache_read(leaf, reading(sch, leaf, "b"), "global")
    sch.compute_at(copy, sch.split(j, [None, 4])[1])


@on("csrmm")
def cache_read_of_a_group(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    copy = sch.cache_read(leaf, reading(sch, leaf, "a"), "local")
    sch.compute_at(copy, sch.split(j, [None, 4])[0])


@on("csr_below_ell")
def cache_read_below_a_guard(sch: s_tir.Schedule, leaf: Any) -> None:
    """Padding is no row of x."""
    sch.cache_read(leaf, reading(sch, leaf, "x"), "global")


@on("csrmm", "spmv")
def cache_row_pointers(sch: s_tir.Schedule, leaf: Any) -> None:
    rows = rows_of(sch, leaf)
    sch.cache_read(rows, reading(sch, rows, "indptr"), "global")


@on("csrmm", "spmv")
def cache_row_pointers_below_the_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    rows = rows_of(sch, leaf)
    copy = sch.cache_read(rows, reading(sch, rows, "indptr"), "global")
    sch.compute_at(copy, sch.split(sch.get_loops(rows)[0], [None, 2])[1])


@on("csrmm")
def cache_searched_indices(sch: s_tir.Schedule, leaf: Any) -> None:
    rows = rows_of(sch, leaf)
    sch.cache_read(rows, reading(sch, rows, "indices"), "global")


@on("csrmm", "sddmm", "spmv")
def cache_write_all_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(rows_of(sch, leaf), 0, "global")


@on("csrmm", "spmv")
def cache_write_some_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    rows = rows_of(sch, leaf)
    copy = sch.cache_write(rows, 0, "global")
    sch.reverse_compute_at(copy, sch.split(sch.get_loops(rows)[0], [None, 4])[0])


@on(*SPMM)
def cache_write(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(leaf, 0, "global")


@on(*SPMM, "even")
def cache_write_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    ko, ki = sch.split(k, [None, 8])
    sch.reorder(ko, j, ki)
    sch.reverse_compute_at(sch.cache_write(leaf, 0, "local"), ko)


@on(*SPMM, "even")
def cache_write_vector_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    ko, ki = sch.split(k, [None, 8])
    sch.reorder(ko, j, ki)
    written = sch.cache_write(leaf, 0, "local")
    sch.reverse_compute_at(written, ko)
    sch.vectorize(ki)
    sch.vectorize(sch.get_loops(written)[-1])


@on("spmv")
def cache_write_scalar(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(leaf, 0, "local")


# ---------------------------------------------------------------- reductions


@on("spmv", *SPMM, "even")
def rfactor(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    steps, lanes = sch.split(j, [None, 4])
    factored = sch.rfactor(lanes, 0)
    sch.decompose_reduction(factored, loops(sch, factored, "j_0")[0])


@on("spmv", "csrmm")
def rfactor_by_the_outer_factor(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    pieces, _ = sch.split(j, [4, None])
    factored = sch.rfactor(pieces, 0)
    sch.decompose_reduction(factored, loops(sch, factored, "j_1")[0])


@on("sddmm")
def rfactor_dense(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    factored = sch.rfactor(sch.split(k, [None, 4])[1], 0)
    sch.decompose_reduction(factored, loops(sch, factored, "k_0")[0])


@on("spmv")
def rfactor_lanes(sch: s_tir.Schedule, leaf: Any) -> None:
    """Four partial sums in vector lanes; a short row fills only some of them."""
    (j,) = loops(sch, leaf, "j")
    factored = sch.rfactor(sch.split(j, [None, 4])[1], 0)
    steps, lanes = loops(sch, factored, "j_0 j_1")
    sch.vectorize(lanes)
    sch.decompose_reduction(factored, steps)


@on("spmv", *SPMM)
def rfactor_alone(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.rfactor(sch.split(j, [None, 4])[1], 0)


@on("spmv", *SPMM)
def rfactor_the_outer_factor_alone(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.rfactor(sch.split(j, [3, None])[0], 0)


@on("spmv", "csrmm")
def rfactor_lanes_in_the_middle(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.rfactor(sch.split(j, [None, 3, 2])[1], 0)


@on("sddmm")
def rfactor_dense_alone(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.rfactor(sch.split(k, [None, 5])[1], 0)


@on("even", "csrmm")
def rfactor_beside_uneven_tiles(sch: s_tir.Schedule, leaf: Any) -> None:
    """Both guards: the columns' belongs to the initialisation, the row's does not."""
    j, k = loops(sch, leaf, "j k")
    _, lanes = sch.split(j, [None, 4])
    ko, ki = sch.split(k, [None, 7])
    sch.reorder(ko, ki, lanes)
    sch.rfactor(lanes, 0)


@on(*SPMM, "spmv")
def decompose(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.decompose_reduction(leaf, j)


@on("sddmm")
def decompose_dense(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.decompose_reduction(leaf, k)


@on("csrmm", "even")
def decompose_a_vector_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    ko, ki = sch.split(k, [None, 8])
    sch.reorder(ko, j, ki)
    sch.vectorize(ki)
    sch.decompose_reduction(leaf, j)


# ---------------------------------------------------------------- blockize and tensorize


@on("csrmm", "even")
def blockize(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.blockize(k)


@on("sddmm")
def blockize_dot(sch: s_tir.Schedule, leaf: Any) -> None:
    (k,) = loops(sch, leaf, "k")
    sch.blockize(k)


@on("blocked")
def blockize_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    (ii,) = loops(sch, leaf, "ii")
    sch.blockize(ii)


@on("even")
def blockize_even_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    ko, ki = sch.split(k, [None, 8])
    sch.reorder(ko, j, ki)
    sch.blockize(ki)


@on("ell_spmm")
def blockize_below_a_guard(sch: s_tir.Schedule, leaf: Any) -> None:
    j, _ = loops(sch, leaf, "j k")
    sch.blockize(j)


@tir.prim_func(s_tir=True)
def _tile_meaning(a: tir.handle, b: tir.handle, c: tir.handle) -> None:
    A = tir.match_buffer(a, (4, 4), "float32", align=4, offset_factor=1)
    B = tir.match_buffer(b, (4, 8), "float32", align=4, offset_factor=1)
    C = tir.match_buffer(c, (4, 8), "float32", align=4, offset_factor=1)
    with tir.sblock("root"):
        tir.reads(C[0:4, 0:8], A[0:4, 0:4], B[0:4, 0:8])
        tir.writes(C[0:4, 0:8])
        for i, j, k in tir.grid(4, 4, 8):
            with tir.sblock("update"):
                vi, vj, vk = tir.axis.remap("SRS", [i, j, k])
                C[vi, vk] = C[vi, vk] + A[vi, vj] * B[vj, vk]


@tir.prim_func(s_tir=True)
def _tile_kernel(a: tir.handle, b: tir.handle, c: tir.handle) -> None:
    A = tir.match_buffer(a, (4, 4), "float32", align=4, offset_factor=1, strides=[tir.int32(), 1])
    B = tir.match_buffer(b, (4, 8), "float32", align=4, offset_factor=1, strides=[tir.int32(), 1])
    C = tir.match_buffer(c, (4, 8), "float32", align=4, offset_factor=1, strides=[tir.int32(), 1])
    with tir.sblock("root"):
        tir.reads(C[0:4, 0:8], A[0:4, 0:4], B[0:4, 0:8])
        tir.writes(C[0:4, 0:8])
        for i, j in tir.grid(4, 4):
            for k in tir.vectorized(8):
                C[i, k] = C[i, k] + A[i, j] * B[j, k]


TensorIntrin.register("test_tile_4x4x8", _tile_meaning, _tile_kernel, override=True)


@on("blocked")
def tensorize(sch: s_tir.Schedule, leaf: Any) -> None:
    jo, ii, ji, k = loops(sch, leaf, "jo ii ji k")
    ko, ki = sch.split(k, [None, 8])
    sch.reorder(ko, jo, ii, ji, ki)
    sch.decompose_reduction(leaf, jo)
    hide_index_arrays(sch, leaf)
    sch.tensorize(ii, "test_tile_4x4x8")


def hide_index_arrays(sch: s_tir.Schedule, leaf: Any) -> None:
    """What the micro kernel does not read itself."""
    names = [str(region.source.name) for region in sch.get(leaf).reads]
    sch.unsafe_hide_buffer_access(leaf, "read", [n for n, name in enumerate(names) if name in ("indptr", "indices")])


# ---------------------------------------------------------------- annotations


@on("csrmm", "spmv")
def annotate(sch: s_tir.Schedule, leaf: Any) -> None:
    i, j = loops(sch, leaf, "i j")
    sch.annotate(j, "pragma_auto_unroll_max_step", 16)
    sch.annotate(i, "sparsetir.chunks", 5)


@on("csrmm", "spmv", "sddmm", "ell_spmm")
def annotate_steps(sch: s_tir.Schedule, leaf: Any) -> None:
    (j,) = loops(sch, leaf, "j")
    sch.annotate(j, "sparsetir.unroll", 3)
    sch.annotate(j, "sparsetir.prefetch", 2)


# ---------------------------------------------------------------- the tests


def _pairs() -> list[Any]:
    return [pytest.param(name, f, id=f"{f.__name__}-{name}") for name, f in SCHEDULES]


def leaf_of(sch: s_tir.Schedule, name: str) -> Any:
    """The innermost block of a program."""
    return sch.get_sblock("csrmm" if name.startswith("csrmm") else LEAVES.get(name, name))


LEAVES = {
    "ell_scale_in_place": "scale",
    "csr2bsr_scatter": "csr2bsr",
    "mttkrp_3d": "mttkrp",
    "conditional": "clip",
    "power_iteration": "multiply",
    "rfc_names": "csrmm",
    "dia_column_sums": "column_sums",
}


@pytest.mark.parametrize(("name", "schedule"), each.share(_pairs(), 2))
def test_a_schedule_does_not_change_the_numbers(name: str, schedule: ScheduleFn) -> None:
    sch = stage2_schedule(name)
    schedule(sch, leaf_of(sch, name))
    is_right(name, sch)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("csrmm", cache_write_vector_tile),
        ("csrmm", split_ragged_in_three),
        ("csrmm", parallel_rows),
        ("spmv", rfactor_lanes),
        ("sddmm", vectorize_positions),
        ("blocked", blockize_tile),
        ("ell_spmm", reorder_tiles),
        ("stencil", vectorize_searches),
    ],
)
def test_wide_indices_and_values(name: str, schedule: ScheduleFn) -> None:
    sch = stage2_schedule(name, "float64", "int64")
    schedule(sch, leaf_of(sch, name))
    is_right(name, sch, "float64", "int64")


# ---------------------------------------------------------------- ways in


def _tile(sch: s_tir.Schedule) -> None:
    leaf = sch.get_sblock("csrmm")
    sch.split(sch.get_loops(leaf)[1], [None, 8])


def test_a_function_schedules_in_place() -> None:
    is_right("csrmm", _tile)


def test_a_function_may_return_another_schedule() -> None:
    def on_a_copy(sch: s_tir.Schedule) -> s_tir.Schedule:
        copy = sch.copy()
        _tile(copy)
        return copy

    is_right("csrmm", on_a_copy)


def test_a_schedule_of_the_lowered_function() -> None:
    sch = s_tir.Schedule(sparsetir.lower(program("csrmm"), stage=2))
    _tile(sch)
    is_right("csrmm", sch)


def test_scheduled_kernels_take_scipy_matrices() -> None:
    kernel = sparsetir.build(program("csrmm"), schedule=_tile)
    A = sp.random_array((30, 20), density=0.2, format="csr", dtype="float32", random_state=1)
    B = np.random.default_rng(2).uniform(-1, 1, (20, 33)).astype("float32")
    np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------- sampling and traces


def _sampled(sch: s_tir.Schedule) -> None:
    """A small space: a tile of the row, a group of nonzeros, which of them runs outside."""
    leaf = sch.get_sblock("even")
    j, k = sch.get_loops(leaf)
    ko, ki = sch.split(k, sch.sample_perfect_tile(k, n=2, max_innermost_factor=16))
    jo, ji = sch.split(j, [None, sch.sample_categorical([1, 2, 3, 4], [0.25] * 4)])
    sch.reorder(ko, jo, ji, ki)
    sch.unroll(ji)
    written = sch.cache_write(leaf, 0, "local")
    sch.reverse_compute_at(written, ko)
    sch.vectorize(ki)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_sampled_schedules_replay(seed: int) -> None:
    sch = stage2_schedule("even", seed=seed)
    _sampled(sch)
    as_json = sch.trace.as_json()
    replayed, from_json = stage2_schedule("even"), stage2_schedule("even")
    sch.trace.apply_to_schedule(replayed, remove_postproc=False)
    s_tir.schedule.Trace.apply_json_to_schedule(as_json, from_json)
    assert tvm_ffi.structural_equal(sch.mod, replayed.mod)
    assert tvm_ffi.structural_equal(sch.mod, from_json.mod)
    is_right("even", replayed)


def test_a_decision_can_be_changed() -> None:
    sch = stage2_schedule("even", seed=1)
    _sampled(sch)
    tile, group = [i for i in sch.trace.insts if i.kind.name.startswith("Sample")]
    trace = sch.trace.with_decision(tile, [EVEN // 3, 3], remove_postproc=False)
    trace = trace.with_decision(group, 2, remove_postproc=False)
    changed = stage2_schedule("even")
    trace.apply_to_schedule(changed, remove_postproc=False)
    extents = [int(changed.get(lp).extent) for lp in changed.get_loops(changed.get_sblock("even"))[2:]]
    assert extents == [3, 3]
    is_right("even", changed)


# ---------------------------------------------------------------- refused


def _fuse_reduction_with_spatial(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.fuse(*loops(sch, leaf, "j k"))


def _fuse_tiles_of_both(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    ko, ki = sch.split(k, [None, 4])
    sch.fuse(j, ko)


def _cache_a_row_of_unknown_length(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(leaf, 0, "local")


def _rfactor_a_whole_row(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.rfactor(loops(sch, leaf, "j")[0], 0)


def _cache_the_values_of_a_row(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(leaf, 0, "global")


def _parallel_reduction(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.parallel(loops(sch, leaf, "j")[0])


def _vectorize_reduction(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.vectorize(sch.split(loops(sch, leaf, "j")[0], [None, 4])[1])


def _fuse_rows_with_positions(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.fuse(*loops(sch, leaf, "i j"))


def _reorder_rows_with_positions(sch: s_tir.Schedule, leaf: Any) -> None:
    i, j = loops(sch, leaf, "i j")
    sch.reorder(j, i)


def _blockize_an_uneven_tile(sch: s_tir.Schedule, leaf: Any) -> None:
    j, k = loops(sch, leaf, "j k")
    ko, ki = sch.split(k, [None, 8])
    sch.reorder(ko, j, ki)
    sch.blockize(ki)


def _decompose_above_the_rows(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.decompose_reduction(leaf, loops(sch, leaf, "i")[0])


def _write_back_below_a_reduction(sch: s_tir.Schedule, leaf: Any) -> None:
    """A row without nonzeros never reaches the write-back."""
    steps, _ = sch.split(loops(sch, leaf, "j")[0], [None, 4])
    sch.reverse_compute_at(sch.cache_write(leaf, 0, "global"), steps)


def _chunks_of_a_reduction(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.annotate(loops(sch, leaf, "j")[0], "sparsetir.chunks", 3)


def _fuse_and_decompose(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.decompose_reduction(leaf, sch.fuse(*loops(sch, leaf, "j k")))


def _fuse_and_blockize(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.blockize(sch.fuse(*loops(sch, leaf, "j k")))


def _cache_below_the_initialisation(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.blockize(loops(sch, leaf, "j")[0])
    sch.cache_write(leaf, 0, "global")


def _cache_what_is_partly_written(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(leaf, 0, "global")


def _cache_a_choice(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(rows_of(sch, leaf), 0, "global")


def _cache_what_a_loop_changes(sch: s_tir.Schedule, leaf: Any) -> None:
    rows = rows_of(sch, leaf)
    sch.cache_read(rows, reading(sch, rows, "x"), "global")


def _reindex_what_is_updated(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.reindex(leaf, ("read", 0))


def _cache_outside_the_band(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_read(leaf, reading(sch, leaf, "a"), "global")


def _cache_the_program_s_scratch(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_write(rows_of(sch, leaf), 0, "global")


def _cache_inplace(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.cache_inplace(leaf, reading(sch, leaf, "a"), "global")


def _bind_threads(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.bind(loops(sch, leaf, "i")[0], "threadIdx.x")


def _unroll_without_a_bound(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.unroll(loops(sch, leaf, "j")[0])


def _vectorize_without_a_bound(sch: s_tir.Schedule, leaf: Any) -> None:
    sch.vectorize(loops(sch, leaf, "k")[0])


def _parallel_twice(sch: s_tir.Schedule, leaf: Any) -> None:
    i, j, k = loops(sch, leaf, "i j k")
    sch.reorder(k, j)
    sch.parallel(k)
    sch.parallel(i)


def _parallel_in_chunks(sch: s_tir.Schedule, leaf: Any) -> None:
    i, j, k = loops(sch, leaf, "i j k")
    sch.reorder(k, j)
    sch.parallel(k)
    sch.annotate(i, "sparsetir.chunks", 4)


UNSET, FUSED = "would stay unset", "fused from a reduction and a spatial loop"
UNREAD = "before anything is stored to it; cache what a block initialises"


@pytest.mark.parametrize(
    ("name", "schedule", "words"),
    [
        ("csrmm", _fuse_reduction_with_spatial, FUSED),
        ("ell_spmm", _fuse_reduction_with_spatial, FUSED),
        ("csrmm", _fuse_tiles_of_both, FUSED),
        ("csrmm", _fuse_and_decompose, f"block csrmm_init writes c below loop j_k_fused_init, .* {UNSET}"),
        ("csrmm", _fuse_and_blockize, f"block csrmm_init writes c below loop j_k_fused, .* {UNSET}"),
        ("csrmm", _cache_a_row_of_unknown_length, "no fixed size"),
        ("ell_spmm", _cache_a_row_of_unknown_length, "no fixed size"),
        ("csrmm", _rfactor_a_whole_row, "as long as a sparse row"),
        ("spmv", _rfactor_a_whole_row, "as long as a sparse row"),
        ("sddmm", _cache_the_values_of_a_row, "as long as a sparse row"),
        ("sddmm", _cache_a_row_of_unknown_length, "no fixed size"),
        ("spmv", _write_back_below_a_reduction, UNSET),
        ("ell_spmm", _write_back_below_a_reduction, UNSET),
        ("rfc_names", _write_back_below_a_reduction, f"writes D below loop j_0, .* {UNSET}"),
        ("spmv", _chunks_of_a_reduction, r"sparsetir\.chunks"),
        ("csrmm", _cache_below_the_initialisation, f"block csrmm reads the cache c_global {UNREAD}"),
        ("accumulate", _cache_what_is_partly_written, f"block accumulate reads the cache c_global {UNREAD}"),
        ("mttkrp_3d", _cache_what_is_partly_written, f"block mttkrp reads the cache y_global {UNREAD}"),
        ("ell_scale_in_place", _cache_what_is_partly_written, f"block scale reads the cache a_global {UNREAD}"),
        ("csr2bsr_scatter", _cache_what_is_partly_written, "stores only some elements of the cache b_global"),
        ("conditional", _cache_a_choice, "block clip stores to the cache b_global only where a.* > "),
        ("power_iteration", _cache_what_a_loop_changes, f"block multiply.* reads the cache x_global {UNREAD}"),
        ("power_iteration", _cache_the_program_s_scratch, r"not well formed: definitions of variable \w+_global"),
        ("ell_scale_in_place", _reindex_what_is_updated, "what block scale stores .* a_reindex is never copied back"),
        ("dia_column_sums", _cache_outside_the_band, "block a_global copies elements that may not exist: they are"),
        ("ell_scale_in_place", _cache_inplace, "not well formed: undefined variable vi; cache_inplace"),
        ("csrmm", _bind_threads, "loop i is bound to threadIdx.x, but kernels run on CPUs"),
        ("csrmm", _unroll_without_a_bound, "to unroll loop j its number of steps must be a constant"),
        ("csrmm", _vectorize_without_a_bound, "to vectorize loop k its number of steps .* got feat; split the loop"),
        ("csrmm", _parallel_twice, "loop k cannot be parallel inside the parallel loop i"),
        ("csrmm", _parallel_in_chunks, "loop k cannot be parallel inside the parallel loop i"),
    ],
)
def test_what_would_miscompile_is_refused(name: str, schedule: ScheduleFn, words: str) -> None:
    sch = stage2_schedule(name)
    schedule(sch, leaf_of(sch, name))
    with pytest.raises((ScheduleError, LoweringError), match=words):
        sparsetir.build(program(name), schedule=sch)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("csrmm", _parallel_reduction),
        ("spmv", _vectorize_reduction),
        ("csrmm", _fuse_rows_with_positions),
        ("sddmm", _fuse_rows_with_positions),
        ("csrmm", _reorder_rows_with_positions),
        ("csrmm", _blockize_an_uneven_tile),
        ("csrmm", _decompose_above_the_rows),
    ],
)
def test_tvm_refuses_at_once(name: str, schedule: ScheduleFn) -> None:
    sch = stage2_schedule(name)
    with pytest.raises(s_tir.ScheduleError):
        schedule(sch, leaf_of(sch, name))


SCATTER = """
@T.prim_func
def scatter(a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    N = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (N,), "float32")
    with T.sp_iter([I, J], "SS", "scatter") as [i, j]:
        Y[j] = A[i, j]
"""


def test_rows_that_store_to_the_same_elements_do_not_run_at_once() -> None:
    """The last row wins; in parallel any row would."""

    def in_parallel(sch: s_tir.Schedule) -> None:
        sch.parallel(sch.get_loops(sch.get_sblock("scatter_0"))[0])

    with pytest.raises(ScheduleError, match="store to the same element of y"):
        sparsetir.build(sparsetir.parse(SCATTER), schedule=in_parallel)


def test_scratch_is_not_larger_than_what_it_copies() -> None:
    sch = stage2_schedule("sddmm")
    leaf = sch.get_sblock("sddmm")
    copy = sch.cache_read(leaf, reading(sch, leaf, "y"), "global")
    sch.reverse_compute_at(copy, sch.get_loops(leaf)[1])
    assert str(2**31 - 1) not in sparsetir.build(program("sddmm"), schedule=sch).script(stage=3)
    is_right("sddmm", sch)


# ---------------------------------------------------------------- drawn at random

DRAWN = int(os.environ.get("SPARSETIR_EXAMPLES", "16"))
FLOAT_PROGRAMS = sorted(name for name, subject in PROGRAMS.items() if "float32" in subject.dtypes)


#: in how many parts the draws are tested, and which share of a part may be refused
PARTS, MOST_REFUSED = 2, 2 / 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_schedules_are_right_or_refused(part: int) -> None:
    """Whatever TVM accepts of a program from the corpus: no wrong number, no step past an array, no foreign error."""
    seeds, refused = range(part, DRAWN, PARTS), {}
    for seed in seeds:
        name = random.Random(-seed).choice(FLOAT_PROGRAMS)
        sch = drawn_schedule(name, seed)
        with each.on((name, seed)):
            try:
                is_right(name, sch)
            except (ScheduleError, LoweringError) as error:
                refused[name, seed] = str(error)
    assert len(refused) <= MOST_REFUSED * len(seeds), refused


def test_parameters_keep_their_layout() -> None:
    """Callers pass arrays as the program declares them, whatever a schedule would like."""

    def turned(sch: s_tir.Schedule) -> None:
        sch.transform_layout(sch.get_sblock("scale"), ("write", 0), lambda i, k: (k, i))

    func = sparsetir.parse(
        """
@T.prim_func
def scale(x: T.handle, y: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    K = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I, K))
    Y = T.match_sparse_buffer(y, (I, K))
    with T.sp_iter([I, K], "SS", "scale") as [i, k]:
        Y[i, k] = X[i, k] * 2
"""
    )
    changed = r"changes parameter y from \(m, n\) float32 to \(n, m\) float32, but callers pass it"
    with pytest.raises(ScheduleError, match=changed):
        sparsetir.build(func, schedule=turned)
