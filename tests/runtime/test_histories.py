# SPDX-License-Identifier: Apache-2.0
"""What came before a call must not change what it gives: see tests/fuzzing/histories.py."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import sparsetir
import torch
from fuzzing.histories import ADD, MAKERS, History, run
from sparsetir import SparseTensor
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.runtime import call_plan

NAMES = ["spmm", "sddmm", "add", "update", "spmm over ell"]
RANDOM = st.randoms(use_true_random=False)


class Histories(RuleBasedStateMachine):
    """Calls of a kernel and of bound ones, each compared with a fresh kernel."""

    @initialize(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        self.history = History(name, Random(0))

    @rule(random=RANDOM)
    def call(self, random: Random) -> None:
        self.history.random = random
        self.history.call()

    @rule(random=RANDOM)
    def bind(self, random: Random) -> None:
        self.history.random = random
        self.history.bind()

    @rule(random=RANDOM)
    def call_bound(self, random: Random) -> None:
        self.history.random = random
        self.history.call_bound()

    @rule(random=RANDOM)
    def change(self, random: Random) -> None:
        self.history.random = random
        self.history.change()

    @rule(random=RANDOM)
    def spoil(self, random: Random) -> None:
        self.history.random = random
        self.history.spoil()


Histories.TestCase.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestHistories = Histories.TestCase


@pytest.mark.parametrize("name", NAMES)
def test_histories_of_known_seeds(name: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(6):
        run(name, seed, 25, counts)
    assert not any(what.startswith("foreign") for what in counts), counts
    assert counts["result"] > 10
    assert counts["error"] > 3


def test_every_subject_is_one_of_the_kinds_that_are_planned() -> None:
    assert set(NAMES) <= set(MAKERS)


# ------------------------------------------------------------------ one by one


def csr(columns: list[int], values: tuple[float, ...] = (1, 2, 3)) -> sp.csr_array:
    return sp.csr_array(
        (np.array(values, np.float32), np.array(columns, np.int32), np.array([0, 2, 3], np.int32)), (2, 3)
    )


@pytest.mark.parametrize("columns", [[2, 0, 1], [1, 1, 2]])
def test_rows_that_are_not_sorted_follow_sorted_ones(columns: list[int]) -> None:
    kernel, B = sparsetir.build(sparsetir.ops.spmm()), np.eye(3, dtype=np.float32)
    for matrix in (csr([0, 2, 1]), csr(columns), csr([0, 2, 1]), csr(columns)):
        np.testing.assert_array_equal(kernel(A=matrix, B=B), matrix.toarray())


@pytest.mark.parametrize("is_bound", [False, True])
def test_two_sparse_arguments_are_compared_at_every_call(is_bound: bool) -> None:
    kernel, A, other = sparsetir.build(sparsetir.parse(ADD)), csr([0, 2, 1]), csr([0, 1, 2])
    bound = kernel.bind(A=A)
    call = (lambda B: bound(B=B)) if is_bound else lambda B: kernel(A=A, B=B)
    for _ in range(3):
        np.testing.assert_array_equal(call(A.copy()).toarray(), 2 * A.toarray())
        with pytest.raises(ArgumentError, match="share axis J but have different structures"):
            call(other)


@pytest.mark.parametrize("columns", [[2, 0, 1], [2, 2, 1]])
def test_a_bound_matrix_that_is_not_sorted_gives_its_structure_to_every_result(columns: list[int]) -> None:
    S, X, Y = csr(columns), np.array([[1], [10]], np.float32), np.array([[1], [2], [3]], np.float32)
    bound = sparsetir.build(sparsetir.ops.sddmm()).bind(S=S)
    for _ in range(3):
        found = bound(X=X, Y=Y)
        np.testing.assert_array_equal(found.indices, S.indices)
        np.testing.assert_array_equal(found.toarray(), S.toarray() * (X @ Y.T))


def test_results_have_index_arrays_of_their_own() -> None:
    S, X, Y = csr([0, 2, 1]), np.array([[1], [10]], np.float32), np.array([[0], [2], [3]], np.float32)
    bound, want = sparsetir.build(sparsetir.ops.sddmm()).bind(S=S), S.toarray() * (X @ Y.T)
    for _ in range(3):
        found = bound(X=X, Y=Y)
        np.testing.assert_array_equal(found.toarray(), want)
        found.eliminate_zeros()
        found.indices[...] = 0


@pytest.mark.parametrize("columns", [[0, 2, 1], [2, 0, 1], [2, 2, 1]])
def test_a_sparse_result_is_written_to_what_was_passed_for_it(columns: list[int]) -> None:
    S, X, Y = csr(columns), np.array([[1], [10]], np.float32), np.array([[1], [2], [3]], np.float32)
    kernel, out = sparsetir.build(sparsetir.ops.sddmm()), S.copy()
    for _ in range(3):
        out.data[:] = 9
        assert kernel(S=S, X=X, Y=Y, O=out) is out
        np.testing.assert_array_equal(out.toarray(), S.toarray() * (X @ Y.T))
    out.data.flags.writeable = False
    with pytest.raises(ArgumentError, match="O is written by this kernel but the array passed for it is read-only"):
        kernel(S=S, X=X, Y=Y, O=out)
    with pytest.raises(ArgumentError, match="a lil_array cannot be written in place: leave it out and take the result"):
        kernel(S=S, X=X, Y=Y, O=S.tolil())


@pytest.mark.parametrize("is_bound", [False, True])
def test_results_in_pieces_are_not_written_to_read_only_arrays(is_bound: bool) -> None:
    S, X, Y = csr([0, 2, 1]), np.array([[1], [10]], np.float32), np.array([[1], [2], [3]], np.float32)
    parts = sparsetir.decompose_format(sparsetir.ops.sddmm(), {"S": sparsetir.formats.hyb(1)})
    kernel, out = sparsetir.build(parts), S.copy()
    called = kernel.bind(S=S) if is_bound else lambda **given: kernel(S=S, **given)
    assert called(X=X, Y=Y, O=out) is out
    out.data.flags.writeable = False
    with pytest.raises(ArgumentError, match="O is written by this kernel but the array passed for it is read-only"):
        called(X=X, Y=Y, O=out)
    with pytest.raises(ArgumentError, match="a lil_array cannot be written in place: leave it out and take the result"):
        called(X=X, Y=Y, O=S.tolil())


def test_bound_decomposed_kernels_with_sparse_results() -> None:
    S, X, Y = csr([0, 2, 1]), np.array([[1], [10]], np.float32), np.array([[1], [2], [3]], np.float32)
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.sddmm(), {"S": sparsetir.formats.hyb(1, (1, 2))}))
    out, want, bound = S.copy(), S.toarray() * (X @ Y.T), kernel.bind(S=S)
    whole = kernel.bind(S=S, O=out)
    for _ in range(2):
        out.data[:] = 9
        assert whole(X=X, Y=Y) is out
        np.testing.assert_array_equal(out.toarray(), want)
        np.testing.assert_array_equal(bound(X=X, Y=Y, m=2).toarray(), want)
    refused(ArgumentError, r"m is 2 from S.shape\[0\] but 5 from the argument", bound, X=X, Y=Y, m=5)
    refused(ArgumentTypeError, "m: expected a number", bound, X=X, Y=Y, m=True)
    refused(ArgumentError, "O and S share axes", bound, X=X, Y=Y, O=csr([0, 1, 2]))
    short = S.copy()
    short.data = short.data[:2]
    refused(StructureError, "has 2 values but 3 indices", kernel, S=short, X=X, Y=Y)


@pytest.mark.parametrize(
    ("name", "match"), [("a", "a is stored as ell"), ("indices", "indices belongs to A, .* as ell")]
)
def test_arrays_of_a_decomposed_argument_are_refused(name: str, match: str) -> None:
    A, B = csr([0, 2, 1]), np.ones((3, 2), np.float32)
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": sparsetir.formats.ell()}))
    refused(ArgumentTypeError, match, kernel, A=A, B=B, **{name: A.data})
    refused(ArgumentTypeError, match, kernel.bind(A=A), B=B, **{name: A.data})
    refused(ArgumentTypeError, "no argument 'other'; it takes the buffers A, B, C", kernel.bind(A=A), B=B, other=1)


def test_a_bound_result_must_be_contiguous() -> None:
    kernel, wide = sparsetir.build(sparsetir.ops.spmm()), np.zeros((2, 2), np.float32)
    with pytest.raises(ArgumentError, match="C is written by this kernel and has another layout"):
        kernel.bind(A=csr([0, 2, 1]), C=wide[:, :1])
    assert kernel(A=csr([0, 2, 1]), B=np.ones((3, 1), np.float32), C=wide[:, :1]).tolist() == [[3], [3]]


def test_results_larger_than_32_bits_can_count_are_refused() -> None:
    A = sp.coo_array((np.ones(1, np.int8), (np.array([69_999]), np.array([0]))), shape=(70_000, 2))
    with pytest.raises(ArgumentError, match="C has 2800000000 elements, more than 32-bit indices can address"):
        sparsetir.build(sparsetir.ops.spmm("int8", "coo"))(A=A, B=np.ones((2, 40_000), np.int8))


@pytest.mark.parametrize(
    ("dtype", "columns", "index"), [("int8", 138, -119), ("int8", 128, -1), ("int16", 40_000, -30_000)]
)
def test_narrow_indices_must_not_be_negative(dtype: str, columns: int, index: int) -> None:
    A = sp.csr_array((1, columns), dtype=np.float32)
    A.data, A.indices, A.indptr = np.ones(3, np.float32), np.array([0, index, 5], dtype), np.array([0, 3], np.int32)
    with pytest.raises(StructureError, match=f"hold {index} at position 1"):
        sparsetir.build(sparsetir.ops.spmm())(A=A, B=np.ones((columns, 1), np.float32))


@pytest.mark.parametrize("index", [4, -1, 1_000_000])
def test_only_the_length_stands_for_no_entry(index: int) -> None:
    kernel = sparsetir.build(sparsetir.ops.spmm(format="ell"))
    given = {"a": np.ones(4, np.float32), "b": np.eye(3, dtype=np.float32), "m": 2}
    assert kernel(indices=np.array([0, 3, 1, 2], np.int32), **given).tolist() == [[1, 0, 0], [0, 1, 1]]
    with pytest.raises(StructureError, match=rf"hold {index} at position 1, expected one of \[0, 3\), or 3 where"):
        kernel(indices=np.array([0, index, 1, 2], np.int32), **given)


@pytest.mark.parametrize("layout", ["read-only", "unaligned", "strided"])
def test_index_arrays_of_any_layout_are_validated_in_any_call(layout: str) -> None:
    """Also once a compiled function validates them."""
    kernel, A, B = sparsetir.build(sparsetir.ops.spmm()), csr([0, 2, 1]), np.eye(3, dtype=np.float32)
    arrays = {"a": A.data, "indptr": A.indptr, "indices": A.indices}
    for name in arrays:
        for _ in range(8):
            result = kernel(**{**arrays, name: laid_out_as(layout, arrays[name])}, B=B)
            np.testing.assert_array_equal(result, A.toarray())
        wrong = laid_out_as(layout, np.array([0, 3, 1], np.int32))
        with pytest.raises(StructureError, match="hold 3 at position 1"):
            kernel(**{**arrays, name: laid_out_as(layout, arrays[name]), "indices": wrong}, B=B)


def laid_out_as(layout: str, array: np.ndarray) -> np.ndarray:
    """The array read-only, at an odd address, or with gaps."""
    if layout == "strided":
        return np.repeat(array, 2)[::2]
    made = np.zeros(array.nbytes + 1, np.uint8)[1 if layout == "unaligned" else 0 :][: array.nbytes].view(array.dtype)
    made[...] = array
    made.flags.writeable = layout != "read-only"
    return made


@pytest.mark.parametrize("layout", ["read-only", "unaligned", "strided", "in columns", "mapped", "torch"])
def test_operands_of_any_layout_take_the_short_way(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = csr([0, 2, 1]), np.arange(6, dtype=np.float32).reshape(3, 2)
    kernel = sparsetir.build(sparsetir.ops.spmm())

    def laid_out(B: np.ndarray) -> Any:
        if layout in ("in columns", "torch"):
            return np.asfortranarray(B) if layout == "in columns" else torch.from_numpy(np.asfortranarray(B))
        if layout == "mapped":
            B.tofile(tmp_path / "B")
            return np.memmap(tmp_path / "B", B.dtype, "r", shape=B.shape)
        return (
            np.repeat(B, 2, axis=1)[:, ::2] if layout == "strided" else laid_out_as(layout, B.reshape(-1)).reshape(3, 2)
        )

    others = {"A": A}
    if layout != "torch":
        others = {"A": sp.csr_array((A.data, A.indices, A.indptr), shape=A.shape)}
        others["A"].data, others["A"].indptr, others["A"].indices = (
            laid_out_as("unaligned" if layout == "unaligned" else "read-only", a) for a in (A.data, A.indptr, A.indices)
        )
    bound = kernel.bind(A=A)
    calls = [kernel, lambda B: kernel(**others, B=B), bound]
    calls[0] = lambda B: kernel(A=A, B=B)
    for call in calls:
        call(B=laid_out(B))
    monkeypatch.setattr(type(kernel), "prepare", lambda *_: pytest.fail("the long way"))
    for factor in (1, 2):
        for call in calls:
            np.testing.assert_array_equal(np.asarray(call(B=laid_out(factor * B))), A.toarray() @ (factor * B))


@pytest.mark.parametrize("is_bound", [False, True])
def test_results_are_written_in_any_layout(is_bound: bool) -> None:
    A, B = csr([0, 2, 1]), np.eye(3, dtype=np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmm())
    call = kernel.bind(A=A) if is_bound else partial(kernel, A=A)
    for out in (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4", order="F"), np.zeros((2, 6), "f4")[:, ::2]) * 2:
        for operand in (B, np.asfortranarray(B), np.repeat(B, 2, axis=1)[:, ::2]) * 2:
            out[...] = 9
            assert call(B=operand, C=out) is out
            np.testing.assert_array_equal(out, A.toarray())
    frozen = np.zeros((2, 3), "f4")
    frozen.flags.writeable = False
    for _ in range(2):
        with pytest.raises(ArgumentError, match="read-only"):
            call(B=B, C=frozen)
    assert not frozen.any()


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "dcsr", "ell"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sparse_tensors_are_called_like_the_matrices_of_scipy(format: str, dtype: str) -> None:
    """Plans take a tensor's arrays: later calls see its values, and results have its class."""
    number = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    product = sparsetir.build(sparsetir.ops.spmm(dtype=dtype))
    sampled = sparsetir.build(sparsetir.ops.sddmm(dtype=dtype))
    X = (np.arange(12, dtype=np.int8).reshape(4, 3) % 4).astype(number)
    for seed in range(3):  # other structures, each called more often than it takes to make a plan
        dense = (np.random.default_rng(seed).random((5, 4)) < 0.5).astype(number) * number.type(seed + 1)
        S = SparseTensor.from_dense(dense, format)
        for _ in range(3):
            np.testing.assert_array_equal(product(A=S, B=X).astype("f8"), (dense.astype("f8") @ X.astype("f8")))
            if S.values.flags.writeable:
                S.values[...] = S.values + S.values
            else:
                S = S.with_values(S.values + S.values)
            dense = dense + dense
        rows, columns = np.ones((5, 2), number), np.ones((4, 2), number)
        for _ in range(3):
            result = sampled(S=S, X=rows, Y=columns)
            assert type(result) is SparseTensor
            assert result.format.name == format
            np.testing.assert_array_equal(result.to_dense().astype("f8"), 2 * dense.astype("f8"))
    with pytest.raises(ArgumentError, match="B"):
        product(A=S, B=X[:2])


def test_operands_are_copied_only_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = csr([0, 2, 1]), np.asfortranarray(np.arange(6, dtype=np.float32).reshape(3, 2))
    kernel = sparsetir.build(sparsetir.ops.spmm())
    bound, out = kernel.bind(A=A), np.zeros((2, 2), "f4", order="F")
    copied: list[tuple[str, ...]] = []
    copies = call_plan.ready_operands
    monkeypatch.setattr(
        call_plan, "ready_operands", lambda values, unready: copied.append(unready) or copies(values, unready)
    )
    for call in (bound, partial(kernel, A=A)):
        for _ in range(2):  # F-ordered results are copied in each call, where no plan is
            np.testing.assert_array_equal(call(B=B, C=out), A.toarray() @ B)
        assert not copied
        call(B=B)
        assert not copied
        call(B=B)
        assert copied == [("B",)]
        copied.clear()


@pytest.mark.slow
def test_ever_new_shapes_take_the_short_way() -> None:
    kernel = sparsetir.build(sparsetir.ops.spmm())
    for rows in range(1, 200):
        A = sp.eye_array(rows, format="csr", dtype=np.float32)
        A.indices, A.indptr = A.indices.astype(np.int32), A.indptr.astype(np.int32)
        assert kernel(A=A, B=np.full((rows, 2), rows, np.float32))[-1].tolist() == [rows, rows]
    assert len(kernel.plans) == 1
    (plan,) = kernel.plans.values()
    assert 0 < len(plan.runs) <= 64


# ------------------------------------------------------------------ messages


def refused(error: type[Exception], match: str, kernel: object = None, **arguments: object) -> None:
    with pytest.raises(error, match=match):
        (kernel or sparsetir.build(sparsetir.ops.spmm()))(**arguments)  # type: ignore[operator]


def test_messages_of_calls() -> None:
    A, B = csr([0, 2, 1]), np.ones((3, 2), np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmm())
    bound = kernel.bind(A=A)
    for call in (kernel, bound):
        with pytest.raises(ArgumentTypeError, match=r"by name, as in kernel\(A=..., B=...\), got 2 without names"):
            call(A, B)
    assert "with nothing fixed" in repr(kernel.bind())
    refused(ArgumentTypeError, r"A: expected an array, got str: pass sparsetir.read\(path\)", A="m.npz", B=B)
    refused(ArgumentTypeError, "B has a mask, .* pass B.filled", A=A, B=np.ma.masked_array(B, B > 2))
    refused(ArgumentTypeError, "B is dense in this kernel, got a sparse csr_array: pass a dense array", A=A, B=A)
    refused(ArgumentTypeError, r"a belongs to A, which is fixed by bind: .* bind\(indptr=..., indices=...\)", bound,
            a=A.data, B=B)  # fmt: skip
    refused(ArgumentTypeError, "A is fixed by bind; do not pass it again", bound, A=A, B=B)
    refused(ArgumentError, r"nnz is 2 from a.shape\[0\] but 3 from indices.shape\[0\]",
            a=A.data[:2], indptr=A.indptr, indices=A.indices, B=B)  # fmt: skip
    refused(ArgumentTypeError, 'indptr holds int64 but the kernel reads it as int32: .* idtype=\'int64\'',
            a=A.data, indptr=A.indptr.astype(np.int64), indices=A.indices, B=B)  # fmt: skip
    refused(ArgumentTypeError, "m: expected a number", A=A, B=B, m=True)
    out = np.broadcast_to(np.zeros(1, np.float32), (2, 2))
    refused(ArgumentError, "read-only", A=A, B=B, C=out)
    vector = sp.coo_array((np.ones(1, np.float32), (np.array([2]),)), shape=(3,))
    refused(ArgumentError, r"A has shape \(3,\) but the buffer has 2 axes \(I, J\)", A=vector, B=B)
    bsr = sparsetir.build(sparsetir.ops.spmm(format="bsr", block=4))
    refused(ArgumentError, r"a must have 3 dimensions, got shape \(64,\)", bsr, a=np.zeros(64, np.float32))


def test_values_change_where_the_structure_alone_is_bound() -> None:
    A, B = csr([0, 2, 1]), np.eye(3, dtype=np.float32)
    bound = sparsetir.build(sparsetir.ops.spmm()).bind(indptr=A.indptr, indices=A.indices)
    for k in range(3):
        np.testing.assert_array_equal(bound(a=k * A.data, B=B), k * A.toarray())


def test_broken_scipy_matrices_are_refused() -> None:
    B = np.ones((3, 2), np.float32)
    for part, value in {
        "indptr": np.array(3, np.int32),
        "indices": np.array(3, np.int32),
        "data": np.ones(2, np.float32),
    }.items():
        A = csr([0, 2, 1])
        setattr(A, part, value)
        refused(StructureError, "expected one dimension|has 2 values but 3 indices", A=A, B=B)
    coo = sp.coo_array((2, 3), dtype=np.float32)
    coo.coords, coo.data = (np.array([0]), np.array([0, 2])), np.ones(2, np.float32)
    refused(StructureError, r"A needs coords \[order, nnz\]", A=coo, B=B)


def test_decomposed_kernels_find_sizes_of_wide_axes() -> None:
    program = sparsetir.ops.spmm(idtype="int64")
    text = sparsetir.script(program).replace("m: T.int64, n: T.int64", "m: T.int32, n: T.int32")
    parts = sparsetir.decompose_format(sparsetir.parse(text), {"A": sparsetir.formats.ell()})
    A = csr([0, 2, 1])
    np.testing.assert_array_equal(sparsetir.build(parts)(A=A, B=np.eye(3, dtype=np.float32)), A.toarray())


def test_coordinates_with_data_are_taken() -> None:
    """As those of the package sparse."""

    class COO:
        def __init__(self, fill_value: float) -> None:
            self.coords, self.data = np.array([[0, 1], [2, 0]]), np.array([5, 7], np.float32)
            self.shape, self.fill_value = (2, 3), fill_value

    kernel, B = sparsetir.build(sparsetir.ops.spmm()), np.eye(3, dtype=np.float32)
    assert kernel(A=COO(0), B=B).tolist() == [[0, 0, 5], [7, 0, 0]]
    refused(ArgumentError, "A is 1 where nothing is stored", kernel, A=COO(1), B=B)


def test_dense_torch_tensors_take_the_short_way() -> None:
    torch = pytest.importorskip("torch")
    A, kernel = csr([0, 2, 1]), sparsetir.build(sparsetir.ops.spmm())
    bound, out = kernel.bind(A=A), torch.zeros(2, 2)
    for k in range(3):
        B = torch.full((3, 2), float(k))
        found = kernel(A=A, B=B), bound(B=B), bound(B=B, C=out)
        assert all(isinstance(part, torch.Tensor) and part.tolist() == [[3 * k] * 2] * 2 for part in found)
        assert found[2] is out
    assert all(plan is not None for plan in [*kernel.plans.values(), *bound.plans.values()])


def test_gradients_are_refused() -> None:
    torch = pytest.importorskip("torch")
    A, B = csr([0, 2, 1]), torch.ones(3, 2, requires_grad=True)
    kernel = sparsetir.build(sparsetir.ops.spmm())
    composed = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": sparsetir.formats.ell()}))
    for call in (kernel, kernel.bind(A=A), composed, composed.bind(A=A)):
        fixed = {} if call not in (kernel, composed) else {"A": A}
        refused(
            ArgumentTypeError, r"B requires grad, but a kernel has no gradients: pass B.detach\(\)", call, B=B, **fixed
        )
        with torch.no_grad():
            assert call(B=B, **fixed).tolist() == [[3, 3], [3, 3]]
    refused(ArgumentTypeError, "A requires grad", A=B.detach().T.to_sparse_csr().requires_grad_(), B=B.detach())


@pytest.mark.parametrize("chosen", [sparsetir.formats.hyb(1, (1, 2)), sparsetir.formats.padded_csr(1)])
def test_bound_structures_do_not_change_with_other_arguments(chosen: object) -> None:
    """An equal one was converted before, and is changed afterwards."""
    S, X, Y = csr([0, 2, 1]), np.array([[1], [10]], np.float32), np.array([[1], [2], [3]], np.float32)
    want = S.toarray() * (X @ Y.T)
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.sddmm(), {"S": chosen}))
    other = S.copy()
    kernel(S=other, X=X, Y=Y)
    bound = kernel.bind(S=S)
    other.indices[:] = 0
    np.testing.assert_array_equal(bound(X=X, Y=Y).toarray(), want)
