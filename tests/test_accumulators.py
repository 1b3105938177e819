# SPDX-License-Identifier: Apache-2.0
"""How rows of a computed pattern are collected: the same result in every way, and a search for the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from corpus.computed import PROGRAMS, SHAPES, draw_arguments, matrix
from each import pairwise
from sparsetir import Accumulators, ops
from sparsetir.assemble.options import KINDS
from sparsetir.call.assembled import AssembledKernel
from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.tuning import accumulators
from sparsetir.tuning.contest import Outcome, judged
from sparsetir.tuning.measure import Measurement

pytestmark = pytest.mark.usefixtures("quick_comparisons")

NAMES = ["least sums", "a tensor times a matrix"]
WAYS = pairwise(NAMES, (0, 3, 64), ("both", "bits", "bytes", "table"), (False, True))


def operands(rows: int = 60) -> dict[str, sp.csr_array]:
    rng = np.random.default_rng(0)
    return {"A": matrix(rng, rows, rows, 0.1), "B": matrix(rng, rows, rows, 0.1)}


def pattern_of(kernel: AssembledKernel, arguments: dict[str, Any]) -> list[bytes]:
    found = kernel.assemble(kernel.prepare((), arguments))
    return [a.tobytes() for a in (found.indptr, found.keys, *found.values)]


@pytest.mark.parametrize(("name", "insertion", "kind", "counted"), WAYS)
def test_every_way_gives_the_same(name: str, insertion: int, kind: str, counted: bool) -> None:
    program = sparsetir.parse(PROGRAMS[name])
    way = Accumulators(insertion, kind, counted)
    usual, other = sparsetir.build(program), sparsetir.build(program, schedule=way)
    for shape in SHAPES:
        for density in (0, 0.1, 0.6):
            arguments = draw_arguments(name, shape, density)
            assert pattern_of(other, arguments) == pattern_of(usual, arguments), (shape, density)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"insertion": -1}, "a number of entries from 0 to 256; found -1"),
        ({"insertion": True}, "found True"),
        ({"insertion": 257}, "found 257"),
        ({"kind": "heap"}, "expected one of the kinds both, bits, bytes, table; found 'heap'"),
        ({"counted": 1}, "counted is True or False, found 1"),
    ],
)
def test_values_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accumulators(**values)


class Timed(accumulators.Trials):
    """Trials with made-up times: bits without insertion are twice as fast as anything else."""

    def seconds(self, kernel: AssembledKernel) -> float:
        chosen = kernel.options.accumulators
        return 1e-3 if (chosen.kind, chosen.insertion) == ("bits", 0) else 2e-3

    def untuned(self) -> Measurement:
        return Measurement(2e-3, 2e-3, 0.0)

    def measured(self, candidate: Any) -> Measurement:
        assert accumulators.same(self.of(candidate).assemble(self.args), self.expected)
        return Measurement(*[self.seconds(self.of(candidate))] * 2, 0.0)

    def compare(self, candidates: Any) -> dict[Any, float]:
        return {None: 2e-3, **{c: self.seconds(self.of(c)) for c in candidates}}

    def confirm(self, candidate: Any) -> Outcome:
        return judged({c: np.array([seconds]) for c, seconds in self.compare([candidate]).items()})


def test_a_search_finds_the_fastest_and_records_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "Trials", Timed)
    monkeypatch.setattr(accumulators, "VALUES", {**accumulators.VALUES, "insertion": (24, 0), "counted": (False,)})
    records, given = tmp_path / "records.json", operands()
    found = sparsetir.tune_sparse(ops.spgemm(), given, strategy="exhaustive", database=records)
    assert (found.speedup, len(found.history)) == (2.0, 9)
    assert (found.schedule.kind, found.schedule.insertion) == ("bits", 0)
    assert "bits" in found.report()
    assert "chosen: as it is counted=False insertion=0 kind='bits'" in found.explain()
    expected = given["A"] @ given["B"]
    assert (found.kernel(**given) != expected).nnz == 0
    again = sparsetir.tune_sparse(ops.spgemm(), given, strategy="exhaustive", database=records)
    assert (again.measured, again.schedule) == (0, found.schedule)
    built = sparsetir.build(ops.spgemm(), database=records)
    assert built.options.accumulators == found.schedule
    assert (built(**given) != expected).nnz == 0
    other = sparsetir.build(ops.masked_spgemm(), database=records)
    assert other.options.accumulators == Accumulators()


def test_a_mask_in_any_order() -> None:
    """Every accumulator gives the same bits, also for a mask whose rows are unsorted and hold entries twice."""
    rng = np.random.default_rng(5)
    A, B, M = (sp.random_array((60, 60), density=d, rng=rng, format="csr", dtype="float32") for d in (0.2, 0.2, 0.3))
    M.data[:] = 1
    ones = M.astype(bool)
    twice = sp.csr_array((np.ones(2 * M.nnz, bool), np.repeat(M.indices, 2), 2 * M.indptr), shape=M.shape)
    shuffled = ones.indices[np.lexsort((rng.random(M.nnz), np.repeat(np.arange(60), np.diff(M.indptr))))]
    unsorted = sp.csr_array((ones.data, shuffled, M.indptr), shape=M.shape)
    right = (A @ B).multiply(M).tocsr()
    for kind in KINDS:
        kernel = sparsetir.build(ops.masked_spgemm(), schedule=Accumulators(kind=kind))
        first = kernel(A=A, B=B, M=ones)
        assert abs(first - right).max() < 1e-5
        assert np.array_equal(first.indices, right.sorted_indices().indices)
        for mask in (twice, unsorted):
            found = kernel(A=A, B=B, M=mask)
            assert np.array_equal(found.indices, first.indices)
            assert found.data.tobytes() == first.data.tobytes()


def test_a_search_times_for_real() -> None:
    found = sparsetir.tune_sparse(ops.spgemm(), operands(), max_trials=2)
    assert [r.error for r in found.history] == [None, None]
    assert found.best.seconds is not None
    assert found.best.seconds > 0


def test_merges_have_nothing_to_choose() -> None:
    found = sparsetir.tune_sparse(ops.add(), operands(), max_trials=3)
    assert (found.space, len(found.history), found.schedule) == ({}, 1, None)


def test_a_wrong_candidate_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "same", lambda _one, _other: False)
    found = sparsetir.tune_sparse(ops.spgemm(), operands(), max_trials=2)
    assert [r.error for r in found.history] == [None, "the result differs from the untuned kernel's"]
    assert found.schedule is None


def test_what_is_not_searched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="formats is not searched for computed patterns"):
        sparsetir.tune_sparse(ops.spgemm(), operands(), formats=[sparsetir.formats.csr()])
    with pytest.raises(LoweringError, match="tune_sparse searches its accumulators"):
        sparsetir.autotune(configs=[sparsetir.Choices()])(ops.spgemm())
    with pytest.raises(ArgumentError, match="there is no database"):
        sparsetir.build(ops.spgemm(), database=tmp_path / "none.json")
    (tmp_path / "empty.json").touch()
    with pytest.raises(ArgumentError, match="leave schedule out"):
        sparsetir.build(ops.spgemm(), schedule=Accumulators(), database=tmp_path / "empty.json")
