# SPDX-License-Identifier: Apache-2.0
"""Index arrays that are validated by the loops that read them, as by numpy; nothing is read outside of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from fences import Fences
from sparsetir import interop, ops, parse
from sparsetir.codegen.cache import variant_with_checks
from sparsetir.ir.views import decode
from sparsetir.lower.checks.compiled import ROW_LANES, ROWS_MESSAGE, order_of
from sparsetir.runtime.signature import argument_list
from sparsetir.schedules import defaults

RNG = np.random.default_rng(0)
EXTREMES = {"int32": (-(2**31), -1, 2**31 - 1), "int64": (-(2**63), -1, 2**32, 2**63 - 1)}

REPEATED = """
@T.prim_func
def main(a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32,
         nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32", unique=False)
    K = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (K,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "main") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, j] * X[j]
"""
PROGRAMS: dict[str, Any] = {
    "int32": lambda: sparsetir.build(ops.spmv()),
    "int64": lambda: sparsetir.build(ops.spmv("float64", idtype="int64")),
    "ascending": lambda: sparsetir.build(parse(REPEATED)),
    "any": lambda: sparsetir.build(ops.spmv(), assume_finite=True),
}


def matrices(idtype: str) -> list[sp.csr_array]:
    """Rows without entries, short ones, and ones that are compared in vectors, also of the least length."""
    out = [
        sp.random_array(s, density=d, format="csr", dtype="float32", rng=RNG)
        for s, d in (((9, 5), 0.4), ((3, 90), 0.5))
    ]
    out.append(sp.csr_array(np.ones((2, ROW_LANES + 1), "float32")))
    for A in out:
        A.sort_indices()
        A.indptr, A.indices = A.indptr.astype(idtype), A.indices.astype(idtype)
    return out


def spoiled(A: sp.csr_array) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row pointers and indices, each with one number that may be wrong."""
    pairs = [(A.indptr, A.indices)]
    for name in ("indptr", "indices"):
        array = getattr(A, name)
        for at in {0, 1, len(array) // 2, ROW_LANES % len(array), len(array) - 1}:
            for number in (*EXTREMES[array.dtype.name], *A.shape, A.nnz, A.nnz + 1, 0, array[at] + 1, array[at - 1]):
                changed = {"indptr": A.indptr, "indices": A.indices, name: array.copy()}
                changed[name][at] = number
                pairs.append((changed["indptr"], changed["indices"]))
    return pairs


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_that_read_indices_decide_as_numpy_does(name: str) -> None:
    kernel = PROGRAMS[name]()
    checked = variant_with_checks(kernel.compiled, chunks=0)
    assert checked is not None
    program = decode(kernel.func)
    (axis,) = (a for a in program.axes.values() if a.indptr is not None)
    order = order_of(program, axis)
    level = interop.Level("J", axis.kind, None, axis.idtype, sorted=axis.sorted, unique=axis.unique)
    assert order == {"ascending": "ascending", "any": "any"}.get(name, "distinct")
    dtype, verdicts, fences = "float64" if name == "int64" else "float32", [], Fences()
    for A in matrices(axis.idtype):
        x = RNG.standard_normal(A.shape[1]).astype(dtype)
        args = kernel.prepare({"A": A.astype(dtype), ("x" if "x" in kernel.signature.buffers else "X"): x})
        ready = argument_list(kernel.signature, args)
        place = {p.name: n for n, p in enumerate(kernel.signature.params)}
        result = args.arrays[kernel.signature.outputs[0]]
        for indptr, indices in spoiled(A):
            facts: dict[str, Any] = {"parent_count": A.shape[0], "length": A.shape[1], "need_sorted": order != "any"}
            verdicts.append(interop.is_sound(level, indptr, indices, **facts))
            ready[place["indptr"]], ready[place["indices"]] = fences.fenced(indptr), fences.fenced(indices)
            if verdicts[-1]:
                checked(*ready)
                rows = np.repeat(np.arange(A.shape[0]), np.diff(indptr))
                wanted = np.bincount(rows, A.data.astype(dtype) * x[indices], A.shape[0])
                np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
            else:
                with pytest.raises(ValueError, match=ROWS_MESSAGE):
                    checked(*ready)
        fences.release()
    assert verdicts.count(True) >= 3
    assert verdicts.count(False) >= 3


def test_other_loops_than_one_over_each_row_are_left_alone() -> None:
    for program, changes in (
        (ops.spmm(), {}),
        (ops.spmv(), {"lanes": 4}),
        (ops.spmv(), {"lanes": 8, "staged": 64}),
        (ops.spmv(), {"carry": 1}),
        (ops.spmv(), {"chunks": 2}),
    ):
        assert variant_with_checks(sparsetir.build(program).compiled, **changes) is None


@pytest.mark.parametrize(
    ("rows", "mean", "lanes", "wanted"),
    [(100, 20, 0, True), (10_000, 3, 0, True), (10_000, 20, 0, False), (10_000, 50, 0, True), (10_000, 6, 4, False)],
)
def test_loops_validate_where_that_is_quicker(rows: int, mean: int, lanes: int, wanted: bool) -> None:
    arrays = {"indptr": np.arange(rows + 1) * mean}
    assert defaults.suits_checks(["indptr"], arrays, lanes=lanes) is wanted
    assert not defaults.suits_checks(["indptr"], {}, lanes=lanes)


def test_a_staged_sum_of_few_entries_is_validated_as_it_is_read() -> None:
    lengths = RNG.integers(0, 7, 4000)
    columns = np.concatenate([np.sort(RNG.choice(40, n, replace=False)) for n in lengths])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
    A = sp.csr_array((np.ones(len(columns), "float32"), columns.astype("int32"), indptr), shape=(4000, 40))
    kernel = sparsetir.build(ops.spmv())
    args = kernel.prepare({"A": A, "x": np.ones(40, "float32")})
    assert kernel.suitable(args).get("staged")
    sparsetir.set_num_threads(1)
    assert kernel.checked(args) is not None
