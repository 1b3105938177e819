# SPDX-License-Identifier: Apache-2.0
"""Rows of similar patterns in groups: which rows are put together, and kernels over them against numpy."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi

import sparsetir
from sparsetir import SparseTensor, formats
from sparsetir.errors import ArgumentError, StructureError
from sparsetir.formats.format import Entries
from sparsetir.formats.heuristics import candidates
from sparsetir.formats.row_groups import RowGroups, grouped_share, groups_of, signatures
from sparsetir.interop.levels import Level, check_level
from sparsetir.workloads import suite

FAMILIES = suite.families()
OPERANDS = {"spmm": "A", "spmv": "A", "sddmm": "S"}
TYPES = [("float32", "int32"), ("float64", "int64")]


def entries_of(A: Any) -> Entries:
    return Entries.of_rows(A.shape, A.indptr, A.indices)


def scattered(m: int = 60, n: int = 40, copies: int = 4, seed: int = 0) -> Any:
    """`m` rows of which `copies` at a time have the same columns, in any order."""
    rng = np.random.default_rng(seed)
    dense = np.repeat(rng.random((m // copies, n)) < 0.2, copies, axis=0)
    dense[:, 0] = True
    return sp.csr_array(dense[rng.permutation(m)].astype("float32"))


def degenerate() -> dict[str, Any]:
    empty = np.zeros((9, 7))
    empty[[2, 5, 6]] = 1
    dense = {"no entry": np.zeros((5, 6)), "one": np.ones((1, 1)), "empty rows": empty, "full": np.ones((7, 5))}
    shapes = {"no rows": np.zeros((0, 4)), "no columns": np.zeros((4, 0)), "nothing": np.zeros((0, 0))}
    return {name: sp.csr_array(a.astype("float32")) for name, a in {**dense, **shapes}.items()}


MATRICES = {**{name: make(size="small", seed=0) for name, make in FAMILIES.items()}, **degenerate()}
MATRICES["scattered"] = scattered()


@cache
def kernel(op: str, dtype: str, idtype: str, r: int) -> Any:
    program = getattr(sparsetir.ops, op)(dtype, idtype=idtype)
    return sparsetir.build(sparsetir.decompose_format(program, {OPERANDS[op]: formats.row_groups(r)}))


def typed(A: Any, dtype: str, idtype: str) -> Any:
    return sp.csr_array((A.data.astype(dtype), A.indices.astype(idtype), A.indptr.astype(idtype)), shape=A.shape)


# ---------------------------------------------------------------- kernels


@pytest.mark.slow
@pytest.mark.shared(5)
@pytest.mark.parametrize(("dtype", "idtype"), TYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_products_are_scipys(name: str, dtype: str, idtype: str) -> None:
    A, rng = typed(MATRICES[name], dtype, idtype), np.random.default_rng(1)
    wide, exact = A.astype("float64"), 1e-4 if dtype == "float32" else 1e-10
    for feat in (1, 37):
        B = rng.random((A.shape[1], feat)).astype(dtype)
        found = kernel("spmm", dtype, idtype, 4)(A=A, B=B)
        np.testing.assert_allclose(found, wide @ B.astype("float64"), rtol=exact, atol=exact)
    x = rng.random(A.shape[1]).astype(dtype)
    found = kernel("spmv", dtype, idtype, 2)(A=A, x=x)
    np.testing.assert_allclose(found, wide @ x.astype("float64"), rtol=exact, atol=exact)


@pytest.mark.slow
@pytest.mark.shared(3)
@pytest.mark.parametrize("name", MATRICES)
def test_sampled_products_are_numpys(name: str) -> None:
    S, rng = MATRICES[name].astype("float32"), np.random.default_rng(2)
    X, Y = (rng.random((n, 9)).astype("float32") for n in S.shape)
    found = kernel("sddmm", "float32", "int32", 2)(S=S, X=X, Y=Y)
    rows, columns = S.tocoo().coords
    expected = S.data * (X.astype("float64")[rows] * Y.astype("float64")[columns]).sum(axis=1)
    np.testing.assert_allclose(found.data, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_a_group_share_a_load_and_no_slot_is_tested() -> None:
    kernel_of_groups = kernel("spmm", "float32", "int32", 4)
    text = kernel_of_groups.script(stage=3)
    groups = text[text.index("acc = ") : text.index("rest_dcsr_1[", text.index("acc = "))]
    assert "for r_main_groups in T.unroll(4)" in groups
    assert "< m" not in groups
    assert "< n" not in groups


# ---------------------------------------------------------------- groups


@pytest.mark.shared(6)
@pytest.mark.parametrize("r", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", MATRICES)
def test_groups_keep_their_bound(name: str, r: int) -> None:
    A = MATRICES[name]
    groups = groups_of(entries_of(A), r, 0.5)
    rows = groups.reshape(-1)
    assert groups.shape[1:] == (r,)
    assert len(np.unique(rows)) == len(rows)
    columns = [np.unique(part) for part in np.split(A.indices, A.indptr[1:-1])]  # dense rows may be too wide
    for group in groups:
        held = [columns[row] for row in group]
        assert all(map(len, held))
        assert len(np.unique(np.concatenate(held))) * r <= 1.5 * sum(map(len, held))
    assert (np.diff(groups[:, 0]) > 0).all()


def test_equal_rows_meet_wherever_they_are() -> None:
    A = scattered()
    groups = groups_of(entries_of(A), 4, 0.0)
    assert groups.size >= 0.9 * A.shape[0]
    for group in A.toarray()[groups]:
        assert (group == group[0]).all()


def test_rows_with_little_in_common_are_left_to_the_rest() -> None:
    A = sp.csr_array(np.eye(12, dtype="float32"))
    stored = SparseTensor.from_scipy(A, format="row_groups", r=4)
    assert stored.padding == 0
    assert stored.pieces[0].sizes["groups"] == 0
    assert (stored.to_scipy().toarray() == A.toarray()).all()


@pytest.mark.shared(3)
@pytest.mark.parametrize("name", MATRICES)
def test_storage_is_bounded_and_leads_back(name: str) -> None:
    A = MATRICES[name]
    stored = SparseTensor.from_scipy(A, format="row_groups", r=4, padding=0.5)
    assert sum(piece.values.size for piece in stored.pieces) <= 1.5 * A.nnz
    assert (stored.to_scipy() != A).nnz == 0


def test_similar_rows_share_a_signature() -> None:
    A = scattered()
    found = signatures(entries_of(A), np.arange(A.shape[0]), 3)
    for group in groups_of(entries_of(A), 4, 0.0):
        assert len(set(found[group])) == 1
    assert len(set(found)) > 5


def test_a_sample_tells_what_all_would(monkeypatch: pytest.MonkeyPatch) -> None:
    A = scattered(m=4000, n=300, seed=3)
    all_of_it = grouped_share(entries_of(A), 4, 0.5)
    monkeypatch.setattr(sys.modules[RowGroups.__module__], "SAMPLE", A.nnz // 7)
    np.testing.assert_allclose(grouped_share(entries_of(A), 4, 0.5), all_of_it, atol=0.2)


def test_proposed_only_where_similar_rows_are_no_neighbours() -> None:
    def proposes(A: Any) -> bool:
        return any(found.name == "row_groups" for found in candidates(sparsetir.pattern(A)))

    assert proposes(scattered())
    neighbours = sp.csr_array(np.kron(np.eye(8), np.ones((4, 6))).astype("float32"))
    assert not proposes(neighbours)
    assert not any(proposes(MATRICES[name]) for name in ("uniform", "stencil_2d", "pruned_50", "attention_mask"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"r": 0}, "r of row_groups: expected a positive integer, got 0"),
        ({"padding": -1}, "padding of row_groups: expected a non-negative number, got -1"),
        ({"padding": "much"}, "padding of row_groups: expected a non-negative number, got 'much'"),
    ],
)
def test_what_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        formats.make("row_groups", **parameters)


# ---------------------------------------------------------------- axes without absent slots

FULL = """
@T.prim_func
def full(a: T.handle, indices: T.handle, x: T.handle, y: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_fixed(I, (n, 2), indices, "int32", full=True)
    N = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J))
    X = T.match_sparse_buffer(x, (N,))
    Y = T.match_sparse_buffer(y, (I,))
    with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + A[i, j] * X[j]
"""


def test_full_is_printed_and_read_back() -> None:
    func = sparsetir.parse(FULL)
    text = sparsetir.script(func)
    assert "full=True" in text
    assert tvm_ffi.structural_equal(func, sparsetir.parse(text))
    assert "< n" not in sparsetir.build(func).script(stage=3)
    tested = sparsetir.parse(FULL.replace(", full=True", ""))
    assert "< n" in sparsetir.build(tested).script(stage=3)


def test_an_absent_slot_of_a_full_axis_is_refused() -> None:
    indices = np.array([0, 1, 2, 3], "int32")
    given: dict[str, Any] = {"parent_count": 2, "length": 3, "name": "A", "need_sorted": True}
    check_level(Level("J", "sparse_fixed", 0, width=2), None, indices, **given)
    with pytest.raises(StructureError, match="hold 3 at position 3, expected one of"):
        check_level(Level("J", "sparse_fixed", 0, width=2, full=True), None, indices, **given)


def test_every_row_is_initialised_where_it_is_summed() -> None:
    text = kernel("spmm", "float32", "int32", 4).script(stage=3)
    assert "= c_1[" not in text  # no result is read
    assert len(re.findall("in T.parallel", text)) == 2  # the groups and the other rows
    same = MATRICES["scattered"]
    A = sp.csr_array(sp.vstack([same, sp.csr_array((3, same.shape[1])), same[:1]]).astype("float32"))
    C = np.full((A.shape[0], 5), np.nan, "float32")
    kernel("spmm", "float32", "int32", 4)(A=A, B=np.ones((A.shape[1], 5), "float32"), C=C)
    np.testing.assert_allclose(C, A @ np.ones((A.shape[1], 5)), rtol=1e-5)


@pytest.mark.parametrize("rest", ["csr", "coo", formats.sell(4, 8)], ids=repr)
def test_other_formats_of_the_rest(rest: Any) -> None:
    A = scattered(50, 40, copies=5)
    parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.row_groups(4, rest=rest)})
    B = np.random.default_rng(0).random((A.shape[1], 5), dtype="float32")
    np.testing.assert_allclose(sparsetir.build(parts)(A=A, B=B), A @ B, rtol=1e-5)
