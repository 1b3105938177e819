# SPDX-License-Identifier: Apache-2.0
"""Every program of the corpus, compiled, against its oracle, and the interpreter against the same.

One kernel per program and pair of types: sizes are arguments, so it meets every structure.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
import torch
from corpus import BY_NAME, CASES, LARGE_KIND, SMALL_KINDS, Case
from corpus.running import check, copied, draw, run
from each import FULL, on, share
from sparsetir import SparseTensor, formats
from sparsetir.errors import ArgumentError
from sparsetir.ir.interpreter import interpret

pytestmark = pytest.mark.optimised

IDTYPES = ("int32", "int64")
# The first dtype of each program and a third of the others, each with one index type in turn; SPARSETIR_FULL=1 compiles
# every pair.
FIRST = [(case.name, case.dtypes[0], IDTYPES[c % 2]) for c, case in enumerate(CASES)]
OTHERS = [(case.name, t, IDTYPES[n % 2]) for n, (case, t) in enumerate((c, t) for c in CASES for t in c.dtypes[1:])]
EVERY = [(case.name, dtype, idtype) for case in CASES for dtype in case.dtypes for idtype in IDTYPES]
TYPED = EVERY if FULL else [*FIRST, *share(OTHERS, 3)]


@functools.cache
def program(name: str, dtype: str, idtype: str) -> Any:
    return BY_NAME[name].make(dtype, idtype)


@functools.cache
def kernel(name: str, dtype: str, idtype: str) -> Any:
    """LLVM optimises the first type of each program; the others are compiled in half the time."""
    is_first = dtype == BY_NAME[name].dtypes[0]
    target = None if is_first or FULL else {"kind": "llvm", "opt-level": 0}
    return sparsetir.build(program(name, dtype, idtype), target)


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    before = sparsetir.get_num_threads()
    sparsetir.set_num_threads(2)
    try:
        yield
    finally:
        sparsetir.set_num_threads(before)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype", "idtype"), TYPED)
def test_the_kernel_matches_the_oracle(name: str, dtype: str, idtype: str) -> None:
    case, func = BY_NAME[name], program(name, dtype, idtype)
    for kind in case.kinds:
        with on(kind):
            args = draw(case, kind, dtype, idtype)
            check(case, func, dtype, run(case, kernel(name, dtype, idtype), args), args)
    if dtype == case.dtypes[0]:
        rows_in_parallel_do_not_disturb_each_other(case, dtype, idtype)


def rows_in_parallel_do_not_disturb_each_other(case: Case, dtype: str, idtype: str) -> None:
    """Two threads, enough rows for both: right, and the same each time."""
    args, func = draw(case, LARGE_KIND, dtype, idtype), program(case.name, dtype, idtype)
    with on(LARGE_KIND), two_threads():
        first, *others = (run(case, kernel(case.name, dtype, idtype), args) for _ in range(3))
        check(case, func, dtype, first, args)
        for again in others:
            for got, want in zip(again, first, strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("name", "dtype", "idtype"), TYPED)
def test_the_interpreter_matches_the_oracle(name: str, dtype: str, idtype: str) -> None:
    case, func = BY_NAME[name], program(name, dtype, idtype)
    for kind in SMALL_KINDS:
        with on(kind):
            args = draw(case, kind, dtype, idtype)
            memory = interpret(func, copied(args))
            check(case, func, dtype, [memory[output] for output in case.output_names], args)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["wide", "skewed"])
def test_half_precision_rounds_once(dtype: str, kind: str) -> None:
    case = BY_NAME["csrmm_half"]
    args = draw(case, kind, dtype, "int32")
    (found,) = run(case, kernel("csrmm_half", dtype, "int32"), args)
    (exact,) = case.expected(args)
    limits = ml_dtypes.finfo(dtype)
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=float(limits.eps) * 0.51, atol=1e-6)


def test_repeated_calls_in_bfloat16_are_planned() -> None:
    A = sp.random_array((9, 7), density=0.4, format="csr", dtype="float32", rng=np.random.default_rng(1))
    A.data = np.rint(A.data * 8)
    bound = sparsetir.build(sparsetir.ops.spmm("bfloat16")).bind(A=SparseTensor.from_scipy(A).astype("bfloat16"))
    kept = []
    for n in (5, 5, 0, 5, 1, 0, 5):
        B = np.full((7, n), 1 + n, "bfloat16")
        expected = (A @ B.astype("float32")).astype("bfloat16")
        out = np.zeros((9, n), "bfloat16")
        half = torch.from_numpy(B.view("int16")).view(torch.bfloat16)
        results = [bound(B=B), bound(B=B, C=out), bound(B=half).view(torch.int16).numpy().view("bfloat16")]
        for found in results:
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        assert results[1] is out
        kept.append((results[0], expected))
    for found, expected in kept:
        np.testing.assert_array_equal(found, expected)
    assert len(bound.plans) == 3
    assert None not in bound.plans.values()


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "format",
    [
        formats.bsr(4, 4),
        formats.bsr(3, 1),
        formats.dcsr(),
        formats.ell(20),
        formats.hyb(2, widths=(1, 4)),
        formats.sell(8, 64),
    ],
    ids=str,
)
def test_results_over_formats_keep_nothing_of_the_last_one(format: formats.Format) -> None:
    """Rows without entries and the last, cut block of rows are set too."""
    A = sp.random_array((103, 50), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    A.data[A.indptr[40] : A.indptr[60]] = 0
    A.eliminate_zeros()
    B = np.random.default_rng(1).standard_normal((50, 33)).astype("float32")
    bound = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": format})).bind(A=A)
    for _ in range(2):
        first = bound(B=B)
    place, first[:] = first.ctypes.data, np.nan
    del first
    found = bound(B=B)
    assert found.ctypes.data == place  # its memory is used again
    np.testing.assert_allclose(found, A @ B, rtol=1e-4, atol=1e-5)


def test_a_bound_kernel_writes_to_memory_that_nobody_has() -> None:
    rng = np.random.default_rng(0)
    A = sp.random_array((1000, 300), density=0.05, format="csr", dtype="float32", rng=rng)
    B, other = (rng.standard_normal((300, 512)).astype("float32") for _ in range(2))
    bound = sparsetir.build(sparsetir.ops.spmm()).bind(A=A)
    bound(B=B)
    first = bound(B=B)
    second = bound(B=other)
    assert not np.may_share_memory(first, second)
    np.testing.assert_allclose(first, A @ B, rtol=1e-3, atol=1e-4)
    part = second[3:5]
    del second
    third = bound(B=B)
    assert not np.may_share_memory(part, third)
    np.testing.assert_allclose(part, (A @ other)[3:5], rtol=1e-3, atol=1e-4)
    where = third.ctypes.data
    del third
    assert bound(B=other).ctypes.data == where


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("format", ["csr", "bsr"])
@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("op", ["spmv", "spmm"])
def test_results_and_operands_that_share_memory_are_refused_at_any_call(
    op: str, is_bound: bool, format: str, before: int
) -> None:
    """Be the result bound or passed, and whatever calls came before."""
    rng, operand, result = np.random.default_rng(0), *(("x", "y") if op == "spmv" else ("B", "C"))
    A = sp.random_array((48, 48), density=0.2, format="csr", dtype="float32", rng=rng)
    shape = (48,) if op == "spmv" else (48, 8)
    memory = rng.standard_normal(96 * 8).astype("float32")
    out, apart, shifted = (memory[at : at + math.prod(shape)].reshape(shape) for at in (0, 48 * 8, 5))
    program = getattr(sparsetir.ops, op)()
    program = program if format == "csr" else sparsetir.decompose_format(program, {"A": sparsetir.formats.bsr(4, 4)})
    bound = sparsetir.build(program).bind(A=A, **({result: out} if is_bound else {}))
    passed = {} if is_bound else {result: out}
    for overlapping in (out, shifted):
        for _ in range(before):
            np.testing.assert_allclose(bound(**{operand: apart}, **passed), A @ apart, rtol=1e-4, atol=1e-4)
        with pytest.raises(ArgumentError, match="share memory"):
            bound(**{operand: overlapping}, **passed)


# ---------------------------------------------------------------------------------------------- later calls


LISTED = """@T.prim_func
def listed(a: T.handle, y: T.handle, indices: T.handle, n: T.int32, count: T.int32):
    O = T.dense_fixed(1)
    L = T.sparse_fixed(O, (n, count), indices, "int32")
    N = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (O, L), "float32")
    Y = T.match_sparse_buffer(y, (N,), "float32")
    with T.sp_iter([O, L], "SS", "listed") as [o, l]:
        Y[l] = A[o, l]
"""


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("n", [5, 3000])
def test_elements_that_are_not_written_are_zero_in_every_call(n: int, is_bound: bool) -> None:
    places = np.array([1, 3], np.int32)
    fixed = {"indices": places, "n": n}
    kernel = sparsetir.build(sparsetir.parse(LISTED))
    call = kernel.bind(**fixed) if is_bound else lambda **given: kernel(**fixed, **given)
    for number in range(1, 6):
        spoilt = [np.full(n, np.nan, np.float32) for _ in range(8)]  # whose memory the result may get
        del spoilt
        found = call(a=np.full(2, number, np.float32))
        expected = np.zeros(n, np.float32)
        expected[[1, 3]] = number
        np.testing.assert_array_equal(found, expected)
        found[:] = np.nan
        del found


def outcome(call: Any) -> Any:
    """The result, or the class of the error."""
    try:
        return np.asarray(call()).tolist()
    except sparsetir.SparseTIRError as error:
        return type(error)


ODD_VECTORS = {
    "another dtype": lambda x: x.astype(np.float64),
    "integers": lambda x: x.astype(np.int32),
    "every second element": lambda x: np.repeat(x, 2)[::2],
    "backwards": lambda x: x[::-1].copy()[::-1],
    "not to be written": lambda x: np.frombuffer(x.tobytes(), x.dtype),
    "at no multiple of its size": lambda x: np.frombuffer(b"1" + x.tobytes(), np.uint8)[1:].view(x.dtype),
    "another shape": lambda x: x[:-1],
}


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("odd", ODD_VECTORS.values(), ids=ODD_VECTORS)
def test_a_vector_of_another_kind_is_treated_as_in_a_first_call(odd: Any, is_bound: bool) -> None:
    A = sp.random_array((30, 30), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
    x = np.arange(30, dtype=np.float32)
    program = sparsetir.ops.spmv()
    kernel = sparsetir.build(program)
    call = kernel.bind(A=A) if is_bound else lambda **given: kernel(A=A, **given)
    expected = outcome(lambda: sparsetir.build(program)(A=A, x=odd(x)))
    for _ in range(3):
        np.testing.assert_allclose(call(x=x), A @ x, rtol=1e-5)
        assert outcome(lambda: call(x=odd(x))) == expected


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_result_in_the_memory_of_an_operand_is_treated_as_in_a_first_call(is_bound: bool) -> None:
    A = sp.random_array((30, 30), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
    memory, apart = np.ones(60, np.float32), np.empty(30, np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmv())
    call = kernel.bind(A=A) if is_bound else lambda **given: kernel(A=A, **given)
    expected = outcome(lambda: sparsetir.build(sparsetir.ops.spmv())(A=A, x=memory[:30], y=memory[20:50]))
    for _ in range(3):
        memory[:] = 1
        np.testing.assert_allclose(call(x=memory[:30], y=apart), A @ memory[:30], rtol=1e-5)
        assert outcome(lambda: call(x=memory[:30], y=memory[20:50])) == expected


# ---------------------------------------------------------------------------------------------- sizes of axes


RAGGED = """@T.prim_func
def expand(x: T.handle, s: T.handle, ptr: T.handle, ptr2: T.handle,
           b: T.int32, l: T.int32, m: T.int32, tot: T.int32, tot2: T.int32):
    B = T.dense_fixed(b)
    J = T.dense_variable(B, (l, tot), ptr)
    K = T.dense_variable(J, (m, tot2), ptr2)
    X = T.match_sparse_buffer(x, (B,), "float32")
    S = T.match_sparse_buffer(s, (B, J, K), "float32")
    with T.sp_iter([B, J, K], "SSS", "expand") as [i, j, k]:
        S[i, j, k] = X[i]
"""


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_positions_of_an_output_axis_are_inferred_from_its_row_pointers(idtype: str) -> None:
    """The number of rows of an inner axis is the last row pointer of the outer one."""
    text = RAGGED if idtype == "int32" else RAGGED.replace("T.int32", "T.int64")
    if idtype == "int64":
        text = text.replace("tot), ptr)", 'tot), ptr, "int64")').replace("tot2), ptr2)", 'tot2), ptr2, "int64")')
        text = text.replace("dense_fixed(b)", 'dense_fixed(b, "int64")')
    kernel = sparsetir.build(sparsetir.parse(text))
    outer, inner = np.array([0, 2, 2, 3], idtype), np.array([0, 1, 3, 4], idtype)
    found = kernel(X=np.array([1, 2, 3], "float32"), ptr=outer, ptr2=inner, l=2, m=2)
    assert found.tolist() == [1, 1, 1, 3]
    with pytest.raises(sparsetir.SparseTIRError):
        kernel(X=np.array([1, 2, 3], "float32"), ptr=outer, ptr2=np.array([0, 1, 3, -4], idtype), l=2, m=2)


def test_a_matrix_under_the_name_of_its_values_is_refused_by_name() -> None:
    kernel = sparsetir.build(sparsetir.ops.spmm())
    A = sp.csr_array(np.eye(3, dtype="float32"))
    with pytest.raises(
        sparsetir.errors.ArgumentTypeError, match=r"a is the array of the values that A stores.*pass it as A="
    ):
        kernel(a=A, B=np.ones((3, 2), "float32"))
