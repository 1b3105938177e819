# SPDX-License-Identifier: Apache-2.0
"""How rows of a computed pattern are collected: the same result in every way, and a search for the fastest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from corpus.computed import PROGRAMS, SHAPES, draw_arguments, matrix
from each import pairwise
from fences import Fences
from sparsetir import Accumulators, ops
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, VerifyError
from sparsetir.sparse_output.accumulators import KINDS, ORDERS
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.tuning import accumulators
from sparsetir.tuning.loop import Outcome, judged
from sparsetir.tuning.measure import Measurement

pytestmark = pytest.mark.usefixtures("quick_comparisons")

NAMES = ["least sums", "a tensor times a matrix"]
WAYS = pairwise(NAMES, (0, 3, 64), ("both", "bits", "bytes", "table"), (False, True), (0, 5, 111))


def operands(rows: int = 60) -> dict[str, sp.csr_array]:
    rng = np.random.default_rng(0)
    return {"A": matrix(rng, rows, rows, 0.1), "B": matrix(rng, rows, rows, 0.1)}


def pattern_of(kernel: SparseOutputKernel, arguments: dict[str, Any]) -> list[bytes]:
    found = kernel.assemble(kernel.prepare((), arguments))
    return [a.tobytes() for a in (found.indptr, found.keys, *found.values)]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "insertion", "kind", "counted", "ranked"), WAYS)
def test_every_way_gives_the_same(name: str, insertion: int, kind: str, counted: bool, ranked: int) -> None:
    program = sparsetir.parse(PROGRAMS[name])
    way = Accumulators(insertion, kind, counted, ranked=ranked)
    usual, other = sparsetir.build(program), sparsetir.build(program, schedule=way)
    for shape in SHAPES:
        for density in (0, 0.1, 0.6):
            arguments = draw_arguments(name, shape, density)
            assert pattern_of(other, arguments) == pattern_of(usual, arguments), (shape, density)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"insertion": -1}, "a number of entries from 0 to 256, got -1"),
        ({"insertion": True}, "got True"),
        ({"insertion": 257}, "got 257"),
        ({"ranked": 112}, "ranked is a number of entries from 0 to 111, got 112"),
        ({"kind": "heap"}, "expected one of the kinds both, bits, bytes, table, segments, got 'heap'"),
        ({"counted": 1}, "counted is True or False, got 1"),
        ({"order": "random"}, "expected one of the orders stored, nonempty, clustered, banded, got 'random'"),
        ({"block": (2, 2)}, r"block is three positive sizes \(r, q, s\) or None, got \(2, 2\)"),
        ({"block": (2, 0, 2)}, "got"),
    ],
)
def test_values_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Accumulators(**values)


class Timed(accumulators.Trials):
    """Trials with made-up times: bits without insertion are twice as fast as anything else."""

    def seconds(self, kernel: SparseOutputKernel) -> float:
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


@pytest.mark.slow
def test_a_search_finds_the_fastest_and_records_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "Trials", Timed)
    fewer = {"insertion": (24, 0), "counted": (False,), "order": ("stored",), "ranked": (0,)}
    monkeypatch.setattr(accumulators, "VALUES", {**accumulators.VALUES, **fewer})
    records, given = tmp_path / "records.json", operands()
    found = sparsetir.tune_sparse(ops.spgemm(), given, strategy="exhaustive", database=records)
    assert (found.speedup, len(found.history)) == (2.0, 9)
    assert (found.schedule.kind, found.schedule.insertion) == ("bits", 0)
    assert "bits" in found.report()
    chosen = "block=None counted=False insertion=0 kind='bits' order='stored' ranked=0"
    assert f"chosen: as it is {chosen}" in found.explain()
    expected = given["A"] @ given["B"]
    assert (found.kernel(**given) != expected).nnz == 0
    again = sparsetir.tune_sparse(ops.spgemm(), given, strategy="exhaustive", database=records)
    assert (again.measured, again.schedule) == (0, found.schedule)
    lines = len(records.read_text().splitlines())
    for fewer in (0, 2):
        recalled = sparsetir.tune_sparse(ops.spgemm(), given, max_trials=fewer, database=records)
        assert (recalled.schedule, recalled.is_recalled, recalled.speedup) == (found.schedule, True, 2.0)
        assert recalled.kernel.accumulators == found.schedule
        assert "nothing was timed again" in recalled.report()
    built = sparsetir.build(ops.spgemm(), database=records)
    assert built.options.accumulators == found.schedule
    assert (built(**given) != expected).nnz == 0
    with pytest.warns(UserWarning, match="has no records of this program"):
        other = sparsetir.build(ops.masked_spgemm(), database=records)
    assert other.options.accumulators == Accumulators()
    written = records.read_text().splitlines(keepends=True)
    assert len(written) == lines + 1  # the trial of the untuned kernel without a budget, and no end but the first
    assert sum('"comparison"' in line for line in written) == 1
    trials = [line for line in written if '"comparison"' not in line]
    records.write_text("".join(trials))  # as of a search that was ended
    assert sparsetir.build(ops.spgemm(), database=records).options.accumulators == found.schedule
    assert sparsetir.tune_sparse(ops.spgemm(), given, max_trials=0, database=records).schedule == found.schedule


DAMAGE: list[dict[str, Any]] = [{"kind": "x"}, {"insertion": None}, {"block": [0, 0, 0]}, {"other": 1}, {"order": []}]


@pytest.mark.slow
def test_damaged_ends_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "Trials", Timed)
    fewer: dict[str, tuple[Any, ...]] = {name: values[:1] for name, values in accumulators.VALUES.items()}
    monkeypatch.setattr(accumulators, "VALUES", {**fewer, "insertion": (0,), "kind": ("both", "bits")})
    records, given = tmp_path / "records.json", operands()
    found = sparsetir.tune_sparse(ops.spgemm(), given, strategy="exhaustive", database=records)
    assert found.schedule.kind == "bits"
    *trials, end = records.read_text().splitlines()
    for damage in DAMAGE:
        line = json.loads(end)
        chosen = line["comparison"]["candidates"][line["comparison"]["chosen"]]
        chosen["knobs"] |= damage
        for before in ([end], []):  # the end before it counts, else the best trial
            records.write_text("\n".join([*trials, *before, json.dumps(line)]) + "\n")
            assert sparsetir.build(ops.spgemm(), database=records).options.accumulators == found.schedule, damage
            again = sparsetir.tune_sparse(ops.spgemm(), given, max_trials=0, database=records)
            assert again.schedule == found.schedule, damage


class Blocked(Timed):
    """Trials with made-up times: blocks in an order of the rows are twice as fast as anything else."""

    def seconds(self, kernel: SparseOutputKernel) -> float:
        chosen = kernel.accumulators
        return 1e-3 if (chosen.block, chosen.order) == ((2, 3, 2), "clustered") else 2e-3


@pytest.mark.slow
def test_a_search_finds_blocks_and_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "Trials", Blocked)
    orders = ("stored", "clustered", "banded")
    fewer = {"kind": ("both",), "insertion": (24,), "counted": (False,), "order": orders, "ranked": (96,)}
    monkeypatch.setattr(accumulators, "VALUES", {**accumulators.VALUES, **fewer})
    records, given = tmp_path / "records.json", full_blocks(7)
    found = sparsetir.tune_sparse(ops.spgemm(), given, strategy="exhaustive", database=records)
    assert found.space["block"] == (None, (2, 3, 2), (1, 3, 2), (2, 3, 1), (2, 1, 2))
    assert found.space["order"] == ("stored", "clustered")  # there are not as many columns as rows
    assert (found.schedule.block, found.schedule.order, found.speedup) == ((2, 3, 2), "clustered", 2.0)
    built = sparsetir.build(ops.spgemm(), database=records)
    assert built.accumulators == found.schedule
    assert pattern_of(built, given) == pattern_of(sparsetir.build(ops.spgemm()), given)


def full_blocks(seed: int, dtype: str = "float32") -> dict[str, sp.csr_array]:
    """Operands of full blocks of (2, 3) and (3, 2) elements, with unsorted rows."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape, block in (("A", (40, 30), (2, 3)), ("B", (30, 35), (3, 2))):
        coarse = sp.random_array(shape, density=0.1, format="csr", rng=rng)
        blocks = sp.kron(coarse, np.ones(block), format="csr").astype(dtype)
        blocks.data[:] = rng.integers(-9, 9, blocks.nnz).astype(dtype)
        order = np.lexsort((rng.random(blocks.nnz), np.repeat(np.arange(blocks.shape[0]), np.diff(blocks.indptr))))
        parts = blocks.data[order], blocks.indices[order], blocks.indptr
        made[name] = sp.csr_array(parts, shape=blocks.shape)
    return made


@pytest.mark.slow
def test_blocks_of_entries() -> None:
    """Blocks give the same bits where they are full, also with other products and sums; else entries are multiplied."""
    least = sparsetir.parse(PROGRAMS["least sums"])
    for program in (ops.spgemm(), ops.spgemm("int64", idtype="int64"), least):
        usual = sparsetir.build(program)
        dtype = usual.assembly.results[0].dtype
        kernel = sparsetir.build(program, schedule=Accumulators(block=(2, 3, 2), order="clustered"))
        for seed in range(3):
            given = full_blocks(seed, dtype)
            assert pattern_of(kernel, given) == pattern_of(usual, given)
        assert any(entry.value is not None for entry in kernel._structures.entries)
        given["A"].data[:3] = np.nan if dtype == "float32" else 0  # the same pattern
        assert pattern_of(kernel, given) == pattern_of(usual, given)
        given["A"].indices[0] = given["A"].indices[1]  # changed in place: no longer full, and a coordinate twice
        assert pattern_of(kernel, given) == pattern_of(usual, given)
        rng = np.random.default_rng(3)
        for shape, density in (((7, 5, 3), 0.3), ((6, 6, 6), 0.0), ((6, 6, 4), 0.4), ((0, 6, 2), 0.0)):
            m, p, n = shape
            others = {"A": matrix(rng, m, p, density).astype(dtype), "B": matrix(rng, p, n, density).astype(dtype)}
            assert pattern_of(kernel, others) == pattern_of(usual, others)


def test_only_products_have_blocks() -> None:
    with pytest.raises(LoweringError, match=r"blocks are multiplied by programs like .* which add is not"):
        sparsetir.build(ops.add(), schedule=Accumulators(block=(2, 2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True])
def test_rows_in_another_order(counted: bool) -> None:
    rng = np.random.default_rng(11)
    usual = sparsetir.build(ops.spgemm())
    some = matrix(rng, 900, 900, 0.02)
    some.data[:] = rng.random(some.nnz)
    half = sp.csr_array(sp.diags_array((np.arange(900) % 3 == 0).astype("float32")) @ some)  # rows without entries
    half.eliminate_zeros()
    for order in ORDERS[1:]:
        kernel = sparsetir.build(ops.spgemm(), schedule=Accumulators(order=order, counted=counted))
        for A in (some, half, sp.csr_array((900, 900), dtype="float32"), half[:40], matrix(rng, 1, 900, 0.2)):
            given = {"A": sp.csr_array(A), "B": some}
            assert pattern_of(kernel, given) == pattern_of(usual, given), order
        some.indices[:] = rng.permutation(900).astype("int32")[some.indices]  # another pattern in the same arrays
        given = {"A": some, "B": some}
        assert pattern_of(kernel, given) == pattern_of(usual, given), order


@pytest.mark.slow
def test_other_programs_take_an_order() -> None:
    for name, orders in (("a tensor times a matrix", ["nonempty"]), ("blocks under a mask", ["clustered"])):
        program = sparsetir.parse(PROGRAMS[name])
        usual = sparsetir.build(program)
        for order in orders:
            kernel = sparsetir.build(program, schedule=Accumulators(order=order))
            for density in (0, 0.3):
                arguments = draw_arguments(name, SHAPES[-1], density)
                assert pattern_of(kernel, arguments) == pattern_of(usual, arguments), (name, order)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_wide_results(kind: str) -> None:
    """Rows with few entries in many columns, beside longer ones."""
    rng = np.random.default_rng(2)
    B = sp.random_array((300, 700_000), density=1e-4, format="csr", dtype="float32", rng=rng)
    A = sp.vstack([matrix(rng, 30, 300, 0.005), matrix(rng, 3, 300, 0.5), matrix(rng, 30, 300, 0.02)], format="csr")
    A.data[:] = 1  # scipy leaves out sums of zeros
    kernel = sparsetir.build(ops.spgemm(), schedule=Accumulators(insertion=3, kind=kind, ranked=0))
    expected = (A @ B).tocsr()
    expected.sort_indices()
    for _ in range(2):  # accumulators are empty again after a call
        for counted in (kernel, sparsetir.build(ops.spgemm(), schedule=Accumulators(0, kind, counted=True))):
            found = counted(A=A, B=B)
            assert np.array_equal(found.indptr, expected.indptr)
            assert np.array_equal(found.indices, expected.indices)
            assert np.allclose(found.data, expected.data, rtol=1e-4)


@pytest.mark.slow
def test_long_rows_with_more_products_than_columns_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product has a place, also of a column that has one; rows with more than there is room for are in one piece.

    The arrays of the products and of the marks end at unreadable pages.
    """
    kept, fences = SparseOutputKernel.take, Fences()

    def taken(kernel: SparseOutputKernel, call: Any) -> Any:
        work = kept(kernel, call)
        work.parts, work.top = [fences.fenced(part) for part in work.parts], fences.fenced(work.top)
        return work

    monkeypatch.setattr(SparseOutputKernel, "take", taken)
    width = 70_000
    columns = np.tile(np.arange(width, dtype="int32"), 40)
    B = sp.csr_array((np.ones(len(columns), "float32"), columns, width * np.arange(41)))
    for order, counted in (("stored", False), ("nonempty", False), ("stored", True)):
        schedule = Accumulators(kind="segments", order=order, counted=counted)
        kernel = sparsetir.build(ops.spgemm(), schedule=schedule)
        for rows in (1, 2, 40):
            A = sp.csr_array(np.ones((1, rows), "float32"))
            found = kernel(A=A, B=B[:rows])
            assert np.array_equal(found.indices, np.arange(width))
            assert (found.data == rows).all()
        few = kernel(A=A, B=B[:, :600])  # less than a segment
        assert np.array_equal(few.indices, np.arange(600))
        assert (few.data == 40).all()


def test_tables_of_a_narrow_result_are_not_those_of_a_wide_one() -> None:
    """The bitmap of a mask's row is as wide as the result, also where the tables beside it have the same size."""
    kernel = sparsetir.build(ops.masked_spgemm(), schedule=Accumulators(kind="table"))
    A = sp.csr_array(np.ones((1, 1), "float32"))
    for width in (40, 400, 40_000):
        B = sp.csr_array((np.ones(30, "float32"), np.arange(width - 30, width), [0, 30]), shape=(1, width))
        args = kernel.prepare((), {"A": A, "B": B, "M": B.astype(bool)})
        work = kernel.take(kernel.begin(args))
        assert [mask.shape for mask in work.allowed] == [(1, -(-width // 64))]
        assert kernel.assemble(args).keys.tolist() == B.indices.tolist()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_matrices_without_entries_have_a_band(rows: int) -> None:
    kernel = sparsetir.build(ops.spgemm(), schedule=Accumulators(order="banded"))
    A, B = sp.csr_array((rows, rows), dtype="float32"), sp.csr_array((rows, 3), dtype="float32")
    assert kernel(A=A, B=B).shape == (rows, 3)


@pytest.mark.slow
def test_long_rows_in_segments() -> None:
    """The same bits as in one piece, for other sums, for floats that round, and where the largest are kept."""
    rng = np.random.default_rng(4)
    B = sp.random_array((300, 300_000), density=1e-3, format="csr", dtype="float32", rng=rng)
    A = sp.vstack([matrix(rng, 20, 300, 0.01), sp.random_array((4, 300), density=0.6, rng=rng, dtype="float32")])
    given = {"A": sp.csr_array(A), "B": B}
    cut = Accumulators(kind="segments")
    for program in (ops.spgemm(), sparsetir.parse(PROGRAMS["least sums"])):
        usual, segments = sparsetir.build(program), sparsetir.build(program, schedule=cut)
        for _ in range(2):
            assert pattern_of(segments, given) == pattern_of(usual, given)
        counted = sparsetir.build(program, schedule=Accumulators(kind="segments", counted=True, order="clustered"))
        assert pattern_of(counted, given) == pattern_of(usual, given)
    largest = sparsetir.build(ops.spgemm(), schedule=cut).selecting()
    assert (largest(**given, top=5) != sparsetir.matmul(given["A"], B, top=5)).nnz == 0
    trials = accumulators.Trials(ops.spgemm(), given)
    assert "segments" in trials.values["kind"]
    assert "segments" not in accumulators.Trials(ops.spgemm(), operands()).values["kind"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_search_ends_when_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "Trials", Timed)
    found = sparsetir.tune_sparse(ops.spgemm(), operands(), max_trials=40, stop_probability=0.9)
    assert 1 < len(found.history) < 40


@pytest.mark.slow
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
    for name, value in {"executor": "processes:2", "machines": "each", "isolate": True, "timeout": 1.0}.items():
        with pytest.raises(ArgumentError, match=f"run in this process, one by one: leave {name} out"):
            sparsetir.tune_sparse(ops.spgemm(), operands(), **{name: value})
    with pytest.raises(ArgumentError, match="no other library is timed against computed patterns"):
        sparsetir.tune_sparse(ops.spgemm(), operands(), compare_with=["scipy"])
    with pytest.raises(LoweringError, match="autotune compares loops and formats; tune_sparse searches its accum"):
        sparsetir.autotune(configs=[sparsetir.Choices()])(ops.spgemm())
    with pytest.raises(LoweringError, match="tune_many compares loops and formats; tune_sparse searches its accum"):
        sparsetir.tune_many([(ops.spgemm(), operands())], seconds=1)
    with pytest.raises(VerifyError, match="got the function spgemm: call it if it makes one"):
        sparsetir.tune_sparse(ops.spgemm, operands())
    with pytest.raises(ArgumentError, match="there is no database"):
        sparsetir.build(ops.spgemm(), database=tmp_path / "none.json")
    (tmp_path / "empty.json").touch()
    with pytest.raises(ArgumentError, match="leave schedule out"):
        sparsetir.build(ops.spgemm(), schedule=Accumulators(), database=tmp_path / "empty.json")
    with pytest.raises(ArgumentTypeError, match="got Accumulators; tune_sparse searches those"):
        sparsetir.autotune(configs=[Accumulators(kind="bits")], key=["m"])


def test_rows_are_fetched_before_they_are_needed() -> None:
    """What is read ahead lies in the arrays; searches are not made for it."""
    text = sparsetir.build(sparsetir.ops.spgemm()).script(3)
    assert text.count("llvm.prefetch") >= 8  # of row pointers, coordinates and values, in each way of collecting
    assert "T.min(" in text[text.index("llvm.prefetch") - 400 : text.index("llvm.prefetch") + 400]
