# SPDX-License-Identifier: Apache-2.0
"""Stage-II schedules of corpus programs: make or draw one, build it, compare with the oracle.

Outputs are handed in full of NaN, so an element that a schedule leaves unset is found. Arrays end at pages that must
not be touched, so a copy past the end of one is found too.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import ir, s_tir, tirx
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME
from corpus.blocks import bsr_expected
from corpus.case import Arguments, Case, case
from corpus.data import matrix, values
from corpus.matrix import spmm_expected, spmm_inputs
from corpus.running import draw
from fences import fenced
from sparsetir.ir.rewriting import collect
from sparsetir.lower import TO_STAGE_2, as_module, run

#: rows of every length from none to all columns, and structures without rows or without positions
KINDS = ("random", "empty_rows", "skewed", "wide", "zero_nnz", "one_by_one", "no_rows")
BLOCK, WIDTH, EVEN = 4, 16, 24

ScheduleFn = Callable[..., Any]


# ---------------------------------------------------------------- programs with sizes the primitives must know


def _blocked_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    operands = {"a": values(rng, (s.nnz, BLOCK, BLOCK), dtype), "b": values(rng, (s.n, BLOCK, WIDTH), dtype)}
    return {**operands, **s.arrays(idtype), "mb": s.m, "nb": s.n, "nnzb": s.nnz, "blk": BLOCK, "feat": WIDTH}


def _blocked_expected(args: Arguments) -> np.ndarray:
    return bsr_expected({**args, "blk": BLOCK, "feat": WIDTH})


def _without(*names: str) -> Any:
    """The blocked inputs without sizes that are constants of the program."""

    def inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
        args = _blocked_inputs(rng, kind, dtype, idtype)
        return {name: value for name, value in args.items() if name not in names}

    return inputs


@case(_without("blk", "feat"), _blocked_expected, "c")
def blocked(dtype: str, idtype: str) -> Any:
    """BSR with constant blocks: a dense tile below a ragged loop."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        mb: T.int32, nb: T.int32, nnzb: T.int32,
    ):  # fmt: skip
        IO = T.dense_fixed(mb)
        JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices), idtype)
        JO_dense = T.dense_fixed(nb)
        II = T.dense_fixed(BLOCK)
        JI = T.dense_fixed(BLOCK)
        K = T.dense_fixed(WIDTH)
        A = T.match_sparse_buffer(a, (IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (JO_dense, JI, K), dtype)
        C = T.match_sparse_buffer(c, (IO, II, K), dtype)
        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "blocked") as [io, jo, ii, ji, k]:
            with T.init():
                C[io, ii, k] = 0
            C[io, ii, k] = C[io, ii, k] + A[io, jo, ii, ji] * B[jo, ji, k]

    return func


def _even_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = spmm_inputs(rng, kind, dtype, idtype)
    del args["feat"]
    return {**args, "b": values(rng, (args["n"], EVEN), dtype)}


@case(_even_inputs, spmm_expected, "c")
def even(dtype: str, idtype: str) -> Any:
    """SpMM whose rows have a constant, highly divisible length."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
    ):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(EVEN)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "even") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


PROGRAMS: dict[str, Case] = {**BY_NAME, "blocked": blocked, "even": even}


# ---------------------------------------------------------------- schedules


@functools.cache
def program(name: str, dtype: str = "float32", idtype: str = "int32") -> Any:
    """The stage-I function of a program."""
    return PROGRAMS[name].make(dtype, idtype)


@functools.cache
def _stage2(name: str, dtype: str, idtype: str) -> ir.IRModule:
    return run(TO_STAGE_2, as_module(program(name, dtype, idtype)))


def stage2_schedule(name: str, dtype: str = "float32", idtype: str = "int32", **options: Any) -> s_tir.Schedule:
    """A stock schedule of a program's stage-II module, working on its function."""
    mod = _stage2(name, dtype, idtype)
    sch = s_tir.Schedule(mod, **options)
    sch.work_on(next(iter(mod.functions)).name_hint)
    return sch


def _unset(shape: Any, dtype: str) -> np.ndarray:
    """An output before the call."""
    return np.full(shape, np.nan if "float" in dtype else 77, dtype)


def is_right(name: str, schedule: Any, dtype: str = "float32", idtype: str = "int32", kinds: Any = KINDS) -> None:
    """Build a program with a schedule and compare its results on structures of several kinds."""
    subject, func = PROGRAMS[name], program(name, dtype, idtype)
    kernel = sparsetir.build(func, schedule=schedule)
    types = {str(p.name): str(p.ty.dtype) for p in func.params}
    for kind in (k for k in kinds if k in subject.kinds):
        args = draw(subject, kind, dtype, idtype)
        expected = subject.expected(args)
        held = {n: fenced(value) if isinstance(value, np.ndarray) else value for n, value in args.items()}
        for output, want in zip(subject.output_names, expected, strict=True):
            held.setdefault(output, fenced(_unset(want.shape, types[output])))
        kernel(**held)
        tolerance = subject.tolerance_for(dtype)
        for output, want in zip(subject.output_names, expected, strict=True):
            note = f"{output} on the structure {kind!r}"
            np.testing.assert_allclose(held[output], want, rtol=tolerance, atol=tolerance, err_msg=note)


# ---------------------------------------------------------------- schedules drawn at random


def _constant(sch: s_tir.Schedule, loop: Any, rng: random.Random) -> Any:
    """The loop, or the inner part of it, with a constant number of steps."""
    fixed = isinstance(sch.get(loop).extent, tirx.IntImm)
    return loop if fixed else sch.split(loop, [None, rng.choice([2, 4, 8])])[1]


def _reorder(sch: s_tir.Schedule, block: Any, rng: random.Random) -> None:
    loops = list(sch.get_loops(block))
    sch.reorder(*rng.sample(loops, rng.randint(2, len(loops))))


def _fuse(sch: s_tir.Schedule, block: Any, rng: random.Random) -> None:
    loops = list(sch.get_loops(block))
    at = rng.randrange(len(loops) - 1)
    sch.fuse(loops[at], loops[at + 1])


def _cache_read(sch: s_tir.Schedule, block: Any, rng: random.Random) -> None:
    copy = sch.cache_read(block, rng.randrange(len(sch.get(block).reads)), rng.choice(["global", "global", "local"]))
    if rng.random() < 0.7:
        sch.compute_at(copy, _loop(sch, block, rng))


def _cache_write(sch: s_tir.Schedule, block: Any, rng: random.Random) -> None:
    copy = sch.cache_write(block, rng.randrange(len(sch.get(block).writes)), rng.choice(["global", "global", "local"]))
    if rng.random() < 0.7:
        sch.reverse_compute_at(copy, _loop(sch, block, rng))


def _reindex(sch: s_tir.Schedule, block: Any, rng: random.Random) -> None:
    """TVM ends the process for a block without regions of the kind, and for one that no loop is around."""
    kind = rng.choice(["reads", "writes"])
    if getattr(sch.get(block), kind) and sch.get_loops(block):
        sch.reindex(block, (kind.removesuffix("s"), 0))


def _loop(sch: s_tir.Schedule, block: Any, rng: random.Random) -> Any:
    return rng.choice(list(sch.get_loops(block)))


FACTORS = ([None, 4], [None, 2], [3, None], [None, 3, 2], [2, None])
NOTES = (("sparsetir.chunks", 3), ("sparsetir.unroll", 3))

PRIMITIVES: list[Callable[[s_tir.Schedule, Any, random.Random], Any]] = [
    lambda sch, block, rng: sch.split(_loop(sch, block, rng), rng.choice(FACTORS)),
    lambda sch, block, rng: sch.split(_loop(sch, block, rng), rng.choice(FACTORS)),
    _reorder,
    _fuse,
    lambda sch, block, rng: sch.parallel(_loop(sch, block, rng)),
    lambda sch, block, rng: sch.vectorize(_constant(sch, _loop(sch, block, rng), rng)),
    lambda sch, block, rng: sch.unroll(_constant(sch, _loop(sch, block, rng), rng)),
    _cache_read,
    _cache_read,
    _cache_write,
    _cache_write,
    lambda sch, block, rng: sch.cache_inplace(block, rng.randrange(len(sch.get(block).reads)), "global"),
    _reindex,
    lambda sch, block, rng: sch.rfactor(_loop(sch, block, rng), rng.choice([0, 1])),
    lambda sch, block, rng: sch.decompose_reduction(block, _loop(sch, block, rng)),
    lambda sch, block, rng: sch.blockize(_loop(sch, block, rng)),
    lambda sch, block, rng: sch.compute_inline(block),
    lambda sch, block, rng: sch.set_scope(block, 0, rng.choice(["global", "local"])),
    lambda sch, block, rng: sch.add_unit_loop(block),
    lambda sch, block, rng: sch.annotate(_loop(sch, block, rng), *rng.choice(NOTES)),
]


def drawn_schedule(name: str, seed: int) -> s_tir.Schedule:
    """A random schedule of a program."""
    return drawn_from(stage2_schedule(name), random.Random(seed))


def drawn_from(sch: s_tir.Schedule, rng: random.Random, most: int = 12) -> s_tir.Schedule:
    """Up to `most` primitives at random places, as far as TVM accepts them."""
    for _ in range(rng.randint(2, most)):
        func = next(iter(sch.mod.functions.values()))
        names = [str(b.name_hint) for b in collect(func.body, s_tir.SBlock) if b.name_hint != "root"]
        changed = sch.copy()
        changed.work_on(next(iter(sch.mod.functions)).name_hint)
        with contextlib.suppress(Exception):  # TVM refuses with errors of many classes
            rng.choice(PRIMITIVES)(changed, changed.get_sblock(rng.choice(names)), rng)
            sch = changed
    return sch


def csr_of_row_lengths(lengths: Any, columns: int, seed: int = 0) -> sp.csr_array:
    """A random matrix whose rows have these numbers of nonzeros."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
    rows = [np.sort(rng.permutation(columns)[:count]) for count in lengths]
    indices = np.concatenate([*rows, np.zeros(0)]).astype("int32")
    data = rng.uniform(-1, 1, len(indices)).astype("float32")
    return sp.csr_array((data, indices, indptr), shape=(len(indptr) - 1, columns))
