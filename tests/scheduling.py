# SPDX-License-Identifier: Apache-2.0
"""Stage-II schedules of corpus programs: make one, build it, compare with the oracle.

Outputs are handed in full of NaN, so an element that a schedule leaves unset is found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import ir, s_tir
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME
from corpus.blocks import bsr_expected
from corpus.case import Arguments, Case, case
from corpus.data import matrix, values
from corpus.matrix import spmm_expected, spmm_inputs
from corpus.running import copied, draw
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


def is_right(name: str, schedule: Any, dtype: str = "float32", idtype: str = "int32", kinds: Any = KINDS) -> None:
    """Build a program with a schedule and compare its results on structures of several kinds."""
    subject, func = PROGRAMS[name], program(name, dtype, idtype)
    kernel = sparsetir.build(func, schedule=schedule)
    for kind in kinds:
        args = draw(subject, kind, dtype, idtype)
        expected = subject.expected(args)
        held = copied(args)
        for output, want in zip(subject.output_names, expected, strict=True):
            held.setdefault(output, np.full(want.shape, np.nan, dtype))
        kernel(**held)
        tolerance = subject.tolerance_for(dtype)
        for output, want in zip(subject.output_names, expected, strict=True):
            note = f"{output} on the structure {kind!r}"
            np.testing.assert_allclose(held[output], want, rtol=tolerance, atol=tolerance, err_msg=note)


def csr_of_row_lengths(lengths: Any, columns: int, seed: int = 0) -> sp.csr_array:
    """A random matrix whose rows have these numbers of nonzeros."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
    rows = [np.sort(rng.permutation(columns)[:count]) for count in lengths]
    indices = np.concatenate([*rows, np.zeros(0)]).astype("int32")
    data = rng.uniform(-1, 1, len(indices)).astype("float32")
    return sp.csr_array((data, indices, indptr), shape=(len(indptr) - 1, columns))
