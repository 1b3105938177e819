# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of kernels of every class, bound or not, end in a result or an error of this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import sparsetir
from sparsetir import formats, ops
from sparsetir.utils.memory import MemoryLimitError
from tests.bad_arguments import BAD, Case, faults_of, matrix
from tests.quick_code import quick_code

A = matrix()
B, Y = np.ones((4, 3), "float32"), np.ones((4, 3), "float32")
PARTS = {"a": A.data, "indptr": A.indptr, "indices": A.indices}


def read_only(array: np.ndarray) -> np.ndarray:
    """The array, which is not to be written."""
    array.flags.writeable = False
    return array


#: what only kernels take: arrays of a dtype, a layout or contents that do not fit
ARRAYS: dict[str, Callable[[], Any]] = {
    "read-only": lambda: read_only(np.zeros((4, 3), "float32")),
    "columns": lambda: np.zeros((3, 4), "float32").T,
    "one dimension more": lambda: np.zeros((1, 4, 3), "float32"),
    "one row less": lambda: np.zeros((3, 3), "float32"),
    "other order of bytes": lambda: np.zeros((4, 3), ">f4"),
    "unaligned": lambda: np.zeros(49, "uint8")[1:].view("float32").reshape(4, 3),
    "broadcast": lambda: np.broadcast_to(np.float32(1), (4, 3)),
    "not whole numbers": lambda: np.array([0, np.nan, 2, 3, 5]),
    "fractions": lambda: np.array([0, 0.5, 2, 3, 5]),
    "unsorted": lambda: np.array([2, 1, 0, 3, 1], "int32"),
    "unsigned": lambda: np.array([0, 2, 3, 4, 5], "uint64"),
    "beyond int32": lambda: np.array([0, 2, 3, 4, 1 << 40]),
    "beyond int64": lambda: np.array([0, 2, 3, 4, 1 << 63], "uint64"),
    "negative offset": lambda: np.array([-1, 2, 3, 4, 5], "int32"),
    "overlong": lambda: np.zeros(1000, "int32"),
    "one element": lambda: np.zeros(1, "int32"),
    "range": lambda: range(5),
    "iterator": lambda: iter([0, 1, 2]),
    "words": lambda: ["a", "b"],
    "number in a list": lambda: [[[1]]],
    "pointer": lambda: memoryview(b"\x00" * 48),
    "bytes": lambda: bytearray(48),
}


def cases() -> dict[str, Case]:
    """Calls that work, by what is called."""
    build = sparsetir.build
    spmm, ell = build(ops.spmm()), build(ops.spmm(), schedule=None, target=None)
    stored = build(sparsetir.decompose_format(ops.spmm(), {"A": formats.bsr(2, 2)}))
    sddmm, spgemm = build(ops.sddmm()), build(ops.spgemm())
    out = {"C": np.zeros((4, 3), "float32")}
    bound = spmm.bind(A=A)
    return {
        "kernel": (spmm, {"A": A, "B": B, **out}),
        "kernel of parts": (ell, {**PARTS, "B": B, "m": 4, "n": 4, "nnz": 5, "feat": 3, **out}),
        "kernel of a format": (stored, {"A": A, "B": B, **out}),
        "sddmm": (sddmm, {"S": A, "X": B, "Y": Y}),
        "spgemm": (spgemm, {"A": A, "B": A}),
        "spmv": (build(ops.spmv()), {"A": A, "x": np.ones(4, "float32")}),
        "bind": (spmm.bind, {"A": A}),
        "bind of parts": (spmm.bind, PARTS),
        "bind of a format": (stored.bind, {"A": A}),
        "bound kernel": (bound, {"B": B, **out}),
        "bound kernel of a format": (stored.bind(A=A), {"B": B, **out}),
        "bound structure": (spmm.bind(indptr=A.indptr, indices=A.indices), {"a": A.data, "B": B}),
        "time": (lambda **arguments: spmm.time(seconds=0, **arguments), {"A": A, "B": B}),
        "script": (spmm.script, {"stage": 2}),
        "source": (spmm.source, {"kind": "ll"}),
        "save": (spmm.save, {"path": "missing/kernel"}),
        "export": (spmm.export, {"path": "missing/kernel.so", "header": None}),
        "unknown name": (lambda value: spmm(A=A, B=B, no_such_name=value), {"value": 1}),
        "by position": (lambda first, second: spmm(first, second), {"first": A, "second": B}),
    }


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, Case]]:
    """The calls, with kernels that are built quickly."""
    with quick_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield cases()


def test_wrong_arguments_end_in_own_errors(calls: dict[str, Case], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    faults = {name: faults_of(case, name, {**BAD, **ARRAYS}) for name, case in calls.items()}
    assert not any(faults.values()), "\n".join(f"{name}: {fault}" for name, fault in faults.items() if fault)


@sparsetir.T.prim_func
def running_sums(x: sparsetir.T.handle, y: sparsetir.T.handle, m: sparsetir.T.int32):
    I = sparsetir.T.dense_fixed(m)
    X = sparsetir.T.match_sparse_buffer(x, (I,), "float32")
    Y = sparsetir.T.match_sparse_buffer(y, (I,), "float32")
    with sparsetir.T.sp_iter([I], "S", "add") as [i]:
        Y[i] = Y[i] + X[i]


def test_a_result_that_is_updated_is_asked_for_with_two_ways_out() -> None:
    kernel, y = sparsetir.build(running_sums), np.ones(3, "float32")
    advice = r"missing argument Y: .* Pass it, or set it with T\.init\(\) in the program\.$"
    with pytest.raises(sparsetir.errors.ArgumentTypeError, match=advice):
        kernel(X=y)
    assert kernel(X=y.copy(), Y=y).tolist() == [2, 2, 2]


SCRATCH = """
@T.prim_func
def scratch(a: T.handle, b: T.handle, n: T.int64, m: T.int64, k: T.int64):
    I, M, K = T.dense_fixed(n, "int64"), T.dense_fixed(m, "int64"), T.dense_fixed(k, "int64")
    A = T.match_sparse_buffer(a, (I,), "float32")
    B = T.match_sparse_buffer(b, (I,), "float32")
    R = T.alloc_sparse_buffer((M, K), "float32")
    with T.sp_iter([I], "S", "fill") as [i]:
        R[i, i] = A[i]
    with T.sp_iter([I], "S", "read") as [i]:
        B[i] = R[i, i]
"""


def test_scratch_that_does_not_fit_is_an_error() -> None:
    """Sizes whose product wraps around to something small, too; the process goes on, and so does the kernel."""
    kernel, a = sparsetir.build(sparsetir.parse(SCRATCH)), np.arange(3, dtype=np.float32)
    for m, k in [(3, 3), (2**32, 2**32), (3, 3), (2**31, 2**33), (2**60, 2**10), (3, 2**50), (2**62, 1), (3, 4)]:
        if m * k < 100:
            np.testing.assert_array_equal(kernel(A=a, m=m, k=k), a)
            continue
        with pytest.raises(MemoryError, match="scratch needs more memory"):
            kernel(A=a, m=m, k=k)
    bound = kernel.bind(A=a)
    with pytest.raises(MemoryError, match="scratch needs more memory"):
        bound(m=2**32, k=2**32)
    np.testing.assert_array_equal(bound(m=3, k=3), a)


@pytest.mark.parametrize("m", [-1, -(2**40)])
def test_negative_lengths_are_errors(m: int) -> None:
    kernel, a = sparsetir.build(sparsetir.parse(SCRATCH)), np.arange(3, dtype=np.float32)
    for _ in range(2):
        with pytest.raises(sparsetir.errors.ArgumentError, match=f"m is {m}, but it is the length of axis M"):
            kernel(A=a, m=m, k=3)
        kernel(A=a, m=3, k=3)


class Unprintable:
    """An object whose text cannot be made, as of a damaged matrix."""

    def __repr__(self) -> str:
        raise IndexError("damaged")


def test_a_schedule_of_another_class_is_refused_before_it_is_printed() -> None:
    with pytest.raises(sparsetir.errors.ArgumentTypeError, match=r"a schedule is .* got Unprintable"):
        sparsetir.build(ops.spmm(), schedule=Unprintable())


@pytest.mark.parametrize("rows", [1 << 33, 1 << 40, 1 << 61, 1 << 62])
def test_a_result_that_does_not_fit_is_named(rows: int) -> None:
    kernel = sparsetir.build(ops.spmm("float64", "csc", idtype="int64"))
    arrays = {"a": np.ones(1), "indptr": np.array([0, 1]), "indices": np.array([1]), "B": np.ones((1, 2))}
    for _ in range(2):  # the second call is planned
        kernel(**arrays, m=4)
    for _ in range(2):
        with pytest.raises(MemoryLimitError, match=rf"an array of shape \({rows}, 2\) would take .* of memory"):
            kernel(**arrays, m=rows)
    assert kernel(**arrays, m=4).tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
