# SPDX-License-Identifier: Apache-2.0
"""The search is reproducible and resumes, wrong candidates never win, records survive what processes do to them."""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

from clocks import keep_time
from sparsetir import formats, ops
from sparsetir.build import build
from sparsetir.codegen.cache import write_cache
from sparsetir.codegen.target import make_target
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError, TuningError
from sparsetir.formats.encoding import parse_format
from sparsetir.formats.heuristics import Conversion
from sparsetir.formats.pattern import pattern
from sparsetir.interop import CooTensor
from sparsetir.ir.effects import free_sizes
from sparsetir.ir.views import decode
from sparsetir.schedules import Choices
from sparsetir.tuning import (
    Database,
    Key,
    Record,
    TuneResult,
    autotune,
    evaluator,
    features,
    measure,
    space,
    tune_sparse,
)
from sparsetir.tuning import session as sessions
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.features import ArgumentStorage, Operands
from sparsetir.tuning.loop import Budget, Log, Progress, TrialLoop, winner
from sparsetir.tuning.lowered_program import LoweredProgram
from sparsetir.tuning.measure import Measurement
from sparsetir.tuning.records import fingerprint
from sparsetir.tuning.search import BATCH, STRATEGIES, Search
from sparsetir.tuning.space import Candidate, Space
from sparsetir.tuning.train import replay
from sparsetir.tuning.variants import PreparedCall
from sparsetir.tuning.workers import local
from sparsetir.tuning.workers.local import LocalWorker
from sparsetir.workloads import suite, timing
from sparsetir.workloads.inputs import make_case
from sparsetir.workloads.reference import Reference, recognise

pytestmark = pytest.mark.usefixtures("quick_comparisons")

FEAT = 16
VALUES = {n: v for n, v in Choices.space(threads=2, feat=256).items() if n in ("tile", "chunks", "unroll", "prefetch")}
KEY = Key("spmm", "p", "s", {"m": 3}, "float32", "llvm", "a machine", 2, "1")


def matrix(seed: int = 0, *, m: int = 60, n: int = 50, density: float = 0.1) -> sp.csr_array:
    """A random matrix with empty rows at both ends."""
    found = sp.random_array((m, n), density=density, format="lil", dtype="float32", rng=np.random.default_rng(seed))
    found[[0, m - 1], :] = 0
    return sp.csr_array(found)


def arguments(seed: int = 0) -> dict[str, Any]:
    A = matrix(seed)
    return {"A": A, "B": np.random.default_rng(1).standard_normal((A.shape[1], FEAT)).astype("float32")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Kernels of a test go to a folder of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPARSETIR_CACHE", str(folder))
    yield folder
    write_cache()


# --- the search, on made-up times ---------------------------------------------------------------------------


BLOCKS = formats.bsr(4, 4)


def made_up_seconds(candidate: Candidate) -> float:
    """Fastest over blocks at tile 128, 8 chunks, unroll 2 and prefetch 8, with interactions."""
    wanted = {"tile": 7.0, "chunks": 3.0, "unroll": 1.0, "prefetch": 3.0}
    chosen = candidate.choices.as_dict()
    off = [abs(np.log2(max(1, chosen[name])) - best) for name, best in wanted.items()]
    seconds = 1e-3 * (1.0 + 0.2 * off[0] + 0.1 * off[1] + 0.05 * off[2] * off[0] + 0.1 * off[3])
    return seconds if candidate.format == BLOCKS else 1.5 * seconds


def fake(batch: list[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
    for candidate in batch:
        yield candidate, Measurement(made_up_seconds(candidate))


def new_space(values: Any = VALUES) -> Space:
    """Three formats, one of which cannot be had."""
    return Space([None, formats.dia(), BLOCKS], lambda format: None if format == formats.dia() else values)


def made_up_features(candidates: Sequence[Candidate]) -> np.ndarray:
    found = [
        features.of_candidate(c, ArgumentStorage(1000, 8000), Operands(256, 9000, 9000, 4, 2), 1000) for c in candidates
    ]
    return np.array([list(named.values()) for named in found])


def new_search(seed: int = 0, strategy: str = "evolution") -> Search:
    return Search(new_space(), features=made_up_features, seed=seed, strategy=strategy)


def explored(search: Search, trials: int, measure: Any = fake, **limits: Any) -> list[Record]:
    log = Log(Budget(trials, **limits), 0, [])
    TrialLoop(search, measure, log).explore()
    return log.history


def order(history: list[Record]) -> list[Candidate]:
    return [record.candidate for record in history]


@pytest.mark.parametrize("strategy", ["evolution", "annealing", "random"])
def test_seed_and_times_decide_the_candidates(strategy: str) -> None:
    first = order(explored(new_search(strategy=strategy), 40))
    assert first == order(explored(new_search(strategy=strategy), 40))
    assert first != order(explored(new_search(seed=1, strategy=strategy), 40))
    assert len(set(first)) == 40


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("stopped_after", [1, 10, 24])
def test_a_stopped_search_goes_on_as_it_would_have(stopped_after: int, strategy: str) -> None:
    whole = order(explored(new_search(strategy=strategy), 40))
    resumed = new_search(strategy=strategy)
    for candidate in whole[:stopped_after]:
        resumed.tell(candidate, made_up_seconds(candidate))
    rest = order(explored(resumed, 40 - stopped_after))
    assert whole[:stopped_after] + rest == whole


def test_records_of_another_search_do_not_end_it() -> None:
    search = new_search()
    for candidate in islice(new_space(), 3 * BATCH + 1):
        search.tell(candidate, made_up_seconds(candidate))
    assert len(order(explored(search, 20))) == 20


@pytest.mark.slow
def test_the_model_finds_what_is_fast() -> None:
    times = sorted(made_up_seconds(c) for c in new_space())
    for seed in range(3):
        found = {name: explored(new_search(seed, name), 64)[-1].best for name in ("evolution", "random")}
        assert found["evolution"] is not None
        assert found["evolution"] <= 1.05 * times[0]
        assert found["random"] is not None
        assert found["evolution"] <= found["random"]


def test_strategies_find_what_is_better_than_the_median() -> None:
    times = sorted(made_up_seconds(c) for c in new_space())
    for strategy in ("annealing", "portfolio", "random"):
        best = explored(new_search(strategy=strategy), 40)[-1].best
        assert best is not None
        assert best < times[len(times) // 2]


def test_unknown_strategies() -> None:
    with pytest.raises(ArgumentError, match="strategies evolution, annealing"):
        new_search(strategy="luck")


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_small_space_is_exhausted(strategy: str) -> None:
    small = new_space({"chunks": (0, 2, 4)})
    search = Search(small, features=made_up_features, strategy=strategy)
    assert set(order(explored(search, 50))) == set(small)
    assert len(set(small)) == 6


def test_failures_never_win_and_do_not_end_the_search() -> None:
    def failing(batch: list[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        for candidate in batch:
            bad = candidate.choices.unroll > 1
            yield candidate, Measurement(error="no") if bad else Measurement(made_up_seconds(candidate))

    history = explored(new_search(), 40, failing)
    assert len(history) == 40
    assert any(record.error for record in history)
    ran = [record.seconds for record in history if record.seconds is not None]
    assert history[-1].best == min(ran)


def test_budgets() -> None:
    def slow(batch: list[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        for candidate in batch:
            time.sleep(0.01)
            yield candidate, Measurement(1.0)

    assert len(explored(new_search(), 7)) == 7
    assert 2 <= len(explored(new_search(), 500, slow, seconds=0.1)) <= 11
    assert len(explored(new_search(), 500, slow, patience=5)) == 6
    assert len(explored(new_search(), 1, slow, seconds=1e-9)) == 1


def test_a_close_finish_keeps_the_untuned_kernel() -> None:
    a, b = Candidate(Choices(tile=32)), Candidate(Choices(tile=128))
    assert winner({None: 1.0, a: 0.99, b: 1.2}) is None
    assert winner({None: 1.0, a: 0.9, b: 0.8}) == b
    assert winner({None: 1.0, a: 0.8, b: 0.8}) == min(a, b, key=lambda c: c.key)
    assert winner({None: 1.0}) is None


# --- the space and what the model sees ----------------------------------------------------------------------


def test_offspring_lies_in_the_space() -> None:
    found, rng = new_space(), np.random.default_rng(0)
    for _ in range(200):
        one, other = found.sample(rng), found.sample(rng)
        for child in (one, found.mutate(one, rng), found.crossover(one, other, rng), *found.steps(one)):
            assert child in found
    assert Candidate(format=formats.dia()) not in found
    assert Candidate(Choices(tile=512)) not in found


def test_steps_differ_in_one_choice() -> None:
    base = Candidate(Choices(tile=64, chunks=2), BLOCKS)
    steps = new_space().steps(base)
    assert {s.choices.tile for s in steps} == {32, 64, 128}
    for step in steps:
        assert sum(a != b for a, b in zip(step.key, base.key, strict=True)) == 1


def test_the_portfolio_has_every_format() -> None:
    first = list(new_space().first())
    assert first[0] == Candidate(space.start(VALUES))
    assert {c.format for c in first} == {None, BLOCKS}
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(
    "format", [formats.bsr(3, 3), formats.hyb(4), formats.sell(8, 64), formats.blocks(2, 2), formats.csf((1, 0, 2))]
)
def test_formats_are_read_as_they_print(format: Any) -> None:
    assert parse_format(repr(format)) == format


@pytest.mark.parametrize(
    "text", ["", "bsr", "bsr(2, 2)", "bsr(r=)", "os.system('x')", "magic(r=1)", "3", "bsr(r=-1, c=1)"]
)
def test_other_texts_are_no_formats(text: str) -> None:
    with pytest.raises(SparseTIRError):
        parse_format(text)


def test_the_space_follows_the_sizes() -> None:
    assert Choices.space(threads=3, feat=16)["tile"] == (8, 16)
    assert Choices.space(threads=3, feat=20)["tile"] == (8, 16, 32)  # the last one holds a row at once
    assert Choices.space(threads=3, feat=2)["tile"] == (8,)
    assert set(Choices.space(threads=3)["chunks"]) == {0, 3, 6, 12, 24, 48, 96}
    assert space.start({"tile": (8, 16)}) == Choices(tile=16)
    assert list(space.points({"tile": (8, 16)})) == [Choices(tile=8), Choices(tile=16)]


def test_choices_that_change_nothing_are_left_out() -> None:
    assert "tile" in space.open_choices(LoweredProgram(ops.spmm(), None).second, threads=2)
    assert "prefetch" not in space.open_choices(LoweredProgram(ops.spmv(), None).second, threads=2)
    assert "lanes" not in space.open_choices(LoweredProgram(ops.spmm(), None).second, threads=2)


def test_lanes_are_open_where_a_row_makes_one_number() -> None:
    target = make_target(None, ops.spmv())
    values = space.open_choices(LoweredProgram(ops.spmv(), None).second, threads=2, target=target)
    assert values["lanes"] == Choices.space(threads=2)["lanes"]
    assert values["staged"] == Choices.space(threads=2)["staged"]


def test_free_sizes() -> None:
    assert free_sizes(decode(ops.spmm())) == ["feat"]
    assert free_sizes(decode(ops.spmm(format="bsr"))) == ["feat"]
    assert free_sizes(decode(ops.spmv())) == []
    assert free_sizes(decode(ops.mttkrp())) == ["rank"]
    func = space.fixed(decode(ops.spmm()), {"feat": 32})
    assert [str(p.name) for p in func.params][-1] == "nnz"
    A = matrix()
    B = np.ones((A.shape[1], 32), "float32")
    np.testing.assert_allclose(build(func)(A=A, B=B), A @ B, rtol=1e-5)
    with pytest.raises(ArgumentError, match="32"):
        build(func)(A=A, B=B[:, :16].copy())


def test_features_of_a_pattern() -> None:
    A = sp.csr_array(np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], "float32"))
    found = features.of_pattern(pattern(A))
    assert found["row_empty"] == 0.25
    assert found["nnz"] == pytest.approx(np.log2(5))
    assert found["length_0"] == 0.25
    assert found["length_1"] == 0.5
    image = features.density(A.indptr, A.indices, 4)
    assert sum(v for n, v in image.items() if n.startswith("cell")) == pytest.approx(1.0)


def test_features_have_the_same_names_for_every_candidate() -> None:
    inputs = arguments()
    session = sessions.Session(ops.spmm(), inputs, None)
    candidates = [*islice(session.space.first(), 6)]
    assert session.encoding.rows(candidates).shape == (6, len(session.encoding.names))
    assert len({c.format for c in candidates}) > 1


def test_a_fingerprint_is_of_the_pattern_only() -> None:
    def of(A: sp.csr_array, feat: int = FEAT) -> str:
        work = PreparedCall(build(ops.spmm()), {"A": A, "B": np.ones((A.shape[1], feat), "float32")})
        return fingerprint(work.signature.program, work.arrays)

    A = matrix()
    moved = A.copy()
    row = int(np.flatnonzero(np.diff(A.indptr))[0])
    moved.indices[A.indptr[row]] = min(set(range(A.shape[1])) - set(A.indices[A.indptr[row] : A.indptr[row + 1]]))
    moved.sort_indices()
    assert of(A) == of(A * 2) == of(A, feat=8)
    assert of(moved) != of(A)


# --- records ------------------------------------------------------------------------------------------------


def test_records_survive_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "tuning.jsonl"
    database = Database(path)
    database.append(
        KEY, Record(Choices(tile=8), "dia()", {"feat": 4}, seconds=1.0, median=2.0, spread=0.1, elapsed=3.0)
    )
    database.append(KEY, Record(Choices(tile=16), error="no"))
    database.close()
    path.write_bytes(path.read_bytes()[:-20])
    assert [r.choices.tile for r in Database(path).load(KEY)] == [8]

    later = Database(path)
    later.append(KEY, Record(Choices(tile=32), seconds=1.0))
    later.close()
    found = Database(path).load(KEY)
    assert [r.choices.tile for r in found] == [8, 32]
    assert found[0] == Record(
        Choices(tile=8), "dia()", {"feat": 4}, seconds=1.0, median=2.0, spread=0.1, elapsed=3.0, reused=True
    )


def test_records_of_other_keys_and_versions_do_not_count(tmp_path: Path) -> None:
    database = Database(tmp_path / "tuning.jsonl")
    database.append(KEY, Record(Choices(tile=8), seconds=1.0))
    database.append(KEY, Record(Choices(tile=8), seconds=2.0))
    for other in (
        replace(KEY, machine="b"),
        replace(KEY, versions="2"),
        replace(KEY, target="c"),
        replace(KEY, threads=1),
    ):
        database.append(other, Record(Choices(tile=16), seconds=1.0))
    database.close()
    with (tmp_path / "tuning.jsonl").open("a") as stream:
        line = {**json.loads(json.dumps(KEY.__dict__)), "format": 2, "choices": {"unknown": 1}}
        stream.write("\n[1, 2]\nnonsense\n" + json.dumps(line) + "\n" + json.dumps({**line, "format": 99}) + "\n")
    found = Database(tmp_path / "tuning.jsonl").load(KEY)
    assert [(r.choices.tile, r.seconds) for r in found] == [(8, 1.0)]


def test_a_database_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TuningError, match=r"cannot be written.*another path"):
        Database(tmp_path / "file" / "tuning.jsonl").append(KEY, Record(Choices()))
    Database(None).append(KEY, Record(Choices()))
    assert Database(None).load(KEY) == []


def _append(path: Path, tile: int, count: int) -> None:
    database = Database(path)
    for n in range(count):
        database.append(KEY, Record(Choices(tile=tile, chunks=n), seconds=1.0, error="x" * 300))
    database.close()


def test_two_processes_append_at_once(tmp_path: Path) -> None:
    path, count = tmp_path / "tuning.jsonl", 200
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(path, tile, count)) for tile in (8, 16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    found = Database(path).load(KEY)
    assert len(path.read_text().splitlines()) == 2 * count
    assert {(r.choices.tile, r.choices.chunks) for r in found} == {(t, n) for t in (8, 16) for n in range(count)}


# --- the whole ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """One search that several tests look at."""
    path = tmp_path_factory.mktemp("tuned") / "tuning.jsonl"
    return tune_sparse(ops.spmm(), arguments(), max_trials=9, database=path, progress=False)


@pytest.mark.slow
def test_the_result_is_right_and_not_slower(tuned: TuneResult) -> None:
    inputs = arguments()
    np.testing.assert_allclose(tuned.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)
    assert tuned.speedup >= 1.0
    assert tuned.checked_against == "scipy"
    assert tuned.history[0].choices == Choices()
    assert tuned.history[0].fixed == {}
    assert {r.fixed["feat"] for r in tuned.history[1:]} == {FEAT}
    assert [r.best for r in tuned.history] == list(np.fmin.accumulate([r.seconds for r in tuned.history]))
    assert not tuned.interrupted
    assert tuned.measured == len(tuned.history) == 9
    assert tuned.flops == 2 * inputs["A"].nnz * FEAT


@pytest.mark.slow
def test_the_report(tuned: TuneResult) -> None:
    text = tuned.report()
    assert f"feat = {FEAT}" in text
    assert "9 trials, 0 from the database, 0 failed" in text
    assert "checked against scipy" in text
    assert "best" in text
    assert all(gain >= 1.0 for gain in tuned.gains().values())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")
def test_the_curve(tuned: TuneResult, tmp_path: Path) -> None:
    assert tuned.plot(tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.slow
def test_records_are_used_again(tuned: TuneResult) -> None:
    assert tuned.database is not None
    lines = tuned.database.read_bytes()
    again = tune_sparse(ops.spmm(), arguments(), max_trials=9, database=tuned.database, progress=False)
    assert again.measured == 0
    assert tuned.database.read_bytes() == lines
    assert order(again.history) == order(tuned.history)

    trials = lines[: lines.rindex(b"\n", 0, -1)]  # the last line says how the search ended
    tuned.database.write_bytes(trials[:-30])
    more = tune_sparse(ops.spmm(), arguments(), max_trials=10, database=tuned.database, progress=False)
    assert more.measured == 2
    # What is proposed after the trials that were read may be another candidate than the one whose line was damaged:
    # the first time it was proposed in a batch, before the results of the others were known, which come in any order.
    assert order(more.history)[:8] == order(tuned.history)[:8]
    assert len(set(order(more.history))) == 10
    values = {**arguments(), "A": arguments()["A"] * 2}
    assert tune_sparse(ops.spmm(), values, max_trials=3, database=tuned.database, progress=False).measured == 0
    assert tune_sparse(ops.spmm(), arguments(1), max_trials=2, database=tuned.database, progress=False).measured == 2


@pytest.mark.slow
def test_inputs_are_not_changed_and_candidates_are_not_kept(cache: Path) -> None:
    inputs = arguments()
    inputs["C"] = np.full((inputs["A"].shape[0], FEAT), 7.0, "float32")
    before = {name: value.copy() for name, value in inputs.items()}
    tune_sparse(ops.spmm(), inputs, max_trials=1, progress=False)
    write_cache()
    untuned = set(cache.glob("*.so"))
    result = tune_sparse(ops.spmm(), inputs, max_trials=6, progress=False)
    np.testing.assert_array_equal(inputs["B"], before["B"])
    np.testing.assert_array_equal(inputs["C"], before["C"])
    np.testing.assert_array_equal(inputs["A"].data, before["A"].data)
    write_cache()
    assert len(result.history) == 6
    assert len(untuned) <= 2  # for all cores and for one
    assert len(set(cache.glob("*.so")) - untuned) <= 1  # the winner


def wrong_for(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[Choices], bool], spoil: Callable[..., None]) -> None:
    """Let some candidates run `spoil` on their arguments instead of the kernel."""
    compile_rightly = LoweredProgram.compile
    monkeypatch.setattr(LoweredProgram, "compile", lambda self, c: spoil if is_bad(c) else compile_rightly(self, c))


@pytest.mark.slow
def test_a_wrong_candidate_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_for(monkeypatch, lambda c: c.tile == 16, lambda *arrays: None)
    result = tune_sparse(ops.spmm(), arguments(), max_trials=10, progress=False)
    bad = [r for r in result.history[1:] if r.choices.tile == 16]
    assert bad
    assert all(r.seconds is None and (r.error or "").startswith("wrong result: c[") for r in bad)
    assert result.best.choices.tile != 16 or not result.best.fixed
    assert result.best.error is None


@pytest.mark.slow
def test_a_candidate_that_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arrays: Any) -> None:
        raise ValueError("first line\nno such luck")

    wrong_for(monkeypatch, lambda c: True, refuse)
    result = tune_sparse(ops.spmm(), arguments(), max_trials=5, progress=False)
    assert {r.error for r in result.history[1:]} == {"ValueError: no such luck"}
    assert result.speedup == 1.0
    assert result.best == result.untuned
    assert "4 failed" in result.report()


@pytest.mark.slow
def test_a_search_begins_with_what_the_rules_choose_for_many_calls() -> None:
    A = sp.csr_array(np.kron(np.eye(12), np.ones((4, 4))), dtype="float32")
    inputs = {"A": A, "B": np.ones((48, 32), "float32")}
    with closing(sessions.Session(ops.spmm(), inputs, None)) as session:
        assert session.preferred is not None
        assert session.ruled == session.preferred.format == formats.bsr(4, 4)
        assert [c.format for c in session.first] == [formats.bsr(4, 4)]
    with closing(sessions.Session(ops.spmm(), inputs, None, [])) as session:
        assert session.first == []
    for strategy in ("guided", "random"):
        found = tune_sparse(ops.spmm(), inputs, max_seconds=1e-9, strategy=strategy, isolate=False, progress=False)
        assert [r.stored_as for r in found.history] == [None, "bsr(r=4, c=4)"]


def test_a_search_begins_with_what_the_model_chooses_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    A = sp.csr_array(np.kron(np.eye(12), np.ones((4, 4))), dtype="float32")
    inputs = {"A": A, "B": np.ones((48, 32), "float32")}
    other = formats.bsr(8, 8)

    def overruled(_kernel: Any, _matrix: Any, _arguments: Any, found: Any, **_how: Any) -> list[Conversion]:
        assert found is None or found.format == formats.bsr(4, 4)
        return [Conversion(other, 1.0, {"unroll": 1})]

    monkeypatch.setattr(sessions, "chosen", overruled)
    with closing(sessions.Session(ops.spmm(), inputs, None, [formats.bsr(4, 4), other])) as session:
        assert [c.format for c in session.first] == [other, formats.bsr(4, 4)]
        assert session.announced == session.first[0]
        assert session.first[0].choices == session.space.usual(other).choices.changed(unroll=1)
    with closing(sessions.Session(ops.spmm(), inputs, None, [])) as session:
        assert session.announced is None


@pytest.mark.parametrize("strategy", ["guided", "evolution"])
@pytest.mark.parametrize("turn", ["the last comparison", "the confirmation"])
@pytest.mark.slow
def test_what_many_calls_get_is_never_dropped_from_a_search(
    monkeypatch: pytest.MonkeyPatch, strategy: str, turn: str
) -> None:
    """It was slow when it was tried, and is the fastest when it is compared again."""
    inputs, compared = blocked(), list[set[Any]]()
    monkeypatch.setattr(sessions, "chosen", lambda *_a, **_k: [Conversion(BLOCKS, 1.0)])

    def is_announced(c: Candidate | None) -> bool:
        return c is not None and c.format == BLOCKS

    def clock(cases: Any) -> dict[Any, float]:
        compared.append(set(cases))
        first = 0.4 if turn == "the last comparison" else 0.6
        of_blocks = first if len(compared) == 1 else 0.4
        return {c: 1.0 if c is None else of_blocks if is_announced(c) else 0.5 for c in cases}

    measured = local.ProcessMeasurer.time

    def slow_blocks(self: Any, candidate: Candidate | None = None, worker: Any = None) -> measure.Measurement:
        found = measured(self, candidate, worker)
        return replace(found, seconds=9.0 if is_announced(candidate) else 0.5 if candidate else 1.0, turns=())

    keep_time(monkeypatch, clock)
    monkeypatch.setattr(local, "TURNS", 1)
    monkeypatch.setattr(local.ProcessMeasurer, "time", slow_blocks)
    monkeypatch.setattr(sessions, "FINALISTS", 2)
    result = tune_sparse(
        ops.spmm(), inputs, max_trials=8, formats=[BLOCKS], strategy=strategy, patience=20, progress=False
    )
    assert [r.stored_as for r in result.history[:2]] == [None, repr(BLOCKS)]
    assert all(any(is_announced(c) for c in cases) for cases in compared)
    assert result.best.stored_as == repr(BLOCKS)
    assert result.speedup == 2.5
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("turns", "dropped"),
    [([2.0, 2.0], True), ([2.0, 1.2], False), ([1.0], False)],
    ids=["behind", "disturbed once", "as fast"],
)
def test_a_candidate_far_behind_the_best_is_dropped(
    monkeypatch: pytest.MonkeyPatch, turns: list[float], dropped: bool
) -> None:
    known = Evaluator(ops.spmm(), arguments(), None)
    assert known.time(Candidate(Choices(tile=8))).error is None
    waiting, long = list(turns), list[float]()
    monkeypatch.setattr(evaluator, "timed_calls", lambda *_a, **_k: [waiting.pop(0)] * 2)
    monkeypatch.setattr(evaluator, "burst", lambda _call, seconds: long.append(seconds) or [1.0] * 5)
    monkeypatch.setattr(known, "typical", lambda _candidate, _seconds: 1.0)
    known.best = 1.0
    known.paces.clear()
    monkeypatch.setattr(evaluator, "LONG_CALL", float("inf"))
    found = known.time(Candidate(Choices(tile=16)))
    assert (long == []) == dropped
    assert not waiting
    assert found.error is None
    assert found.seconds == (turns[0] if dropped else 1.0)
    assert found.usual == known.best == 1.0


def test_a_long_call_that_was_checked_is_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Evaluator(ops.spmm(), arguments(), None)
    monkeypatch.setattr(evaluator, "LONG_CALL", 0.0)
    monkeypatch.setattr(evaluator, "timed_calls", None)
    monkeypatch.setattr(evaluator, "burst", None)
    monkeypatch.setattr(known, "typical", lambda _candidate, _seconds: 1.0)
    known.best = 1e-12
    found = known.time(Candidate(Choices(tile=16)))
    assert found.error is None
    assert found.seconds is not None
    assert 0 < found.seconds < 1
    assert known.best == 1e-12


@pytest.mark.slow
def test_a_lucky_winner_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def lucky_once(cases: Any) -> dict[Any, float]:
        seen.append(len(cases))
        return {name: (1.0 if name is None else 0.5 if len(seen) == 1 else 1.5) for name in cases}

    keep_time(monkeypatch, lucky_once)
    result = tune_sparse(ops.spmm(), arguments(), max_trials=4, progress=False)
    assert seen == [4, 2]
    assert result.speedup == 1.0
    assert result.best == result.untuned
    assert result.kernel.signature.by_name["feat"]


@pytest.mark.slow
def test_the_speedup_is_that_of_the_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def shrinking(cases: Any) -> dict[Any, float]:
        seen.append(len(cases))
        return {name: (1.0 if name is None else 0.25 if len(seen) == 1 else 0.5) for name in cases}

    keep_time(monkeypatch, shrinking)
    assert tune_sparse(ops.spmm(), arguments(), max_trials=4, progress=False).speedup == 2.0


def test_a_lucky_call_or_turn_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DUEL_SECONDS", 2.0)
    turns = {"lucky": iter([1.0, 5.0, 5.0, 4.0, 6.0]), "steady": iter([3.0] * 5)}
    found = measure.duel({name: lambda _seconds, t=t: next(t) for name, t in turns.items()})
    assert found == pytest.approx({"lucky": 5.0, "steady": 3.0})
    clock = iter([0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 10.0, 10.0, 10.0, 109.0, 109.0, 109.0, 111.0, 111.0])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert measure.typical(lambda: None, 110.0) == 2.0  # of calls that take 9 s, 1 s, 99 s and 2 s


@pytest.mark.parametrize("pace", [[1.0] * 5, [1.0, 2.0, 1.0, 4.0, 4.0]], ids=["steady", "slowing down"])
def test_what_is_far_behind_has_no_further_turns(monkeypatch: pytest.MonkeyPatch, pace: list[float]) -> None:
    monkeypatch.setattr(measure, "DUEL_SECONDS", 2.0)
    of_each = {None: 3.0, "fast": 1.0, "near": 1.1, "far": 1.2, "lost": float("inf")}
    taken: dict[Any, int] = dict.fromkeys(of_each, 0)

    def run(_seconds: float, name: Any) -> float:
        taken[name] += 1
        return of_each[name] * pace[taken[name] - 1]

    found = measure.duel({name: partial(run, name=name) for name in of_each})
    assert taken == {None: 5, "fast": 5, "near": 5, "far": 2, "lost": 2}
    for name, seconds in of_each.items():
        assert found[name] / found["fast"] == pytest.approx(seconds)


def test_a_case_that_was_disturbed_once_keeps_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DUEL_SECONDS", 2.0)
    turns = {"first": iter([1.0] * 5), "second": iter([5.0, 0.9, 0.9, 0.9, 0.9])}
    found = measure.duel({name: lambda _seconds, t=t: next(t) for name, t in turns.items()})
    assert found["second"] == pytest.approx(0.9 * found["first"])
    assert list(measure.duel({"only": lambda _seconds: 2.0})) == ["only"]


def test_few_calls_that_may_wait_for_a_core_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, calls in ((timing.LONG_CALL / 4, measure.FEW), (2 * timing.LONG_CALL, 2)):
        now = [0.0]

        def call(now: list[float] = now, seconds: float = seconds) -> None:
            now[0] += seconds

        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda now=now: now[0]))
        assert measure.burst(call, seconds / 2) == pytest.approx([seconds] * calls)


def test_a_lucky_first_turn_does_not_stay_the_best() -> None:
    lucky, steady = (Candidate(Choices(tile=tile)) for tile in (8, 16))
    turns, usual = {lucky: [1e-3, 3e-3, 3e-3], steady: [2e-3, 2e-3, 2e-3], None: [4e-3]}, 4e-3
    evaluator = SimpleNamespace(
        compile=lambda _candidate: None,
        compile_together=lambda _candidates: None,
        time=lambda candidate: Measurement(turns[candidate].pop(0), usual=usual),
        interleaved=lambda candidate, _seconds: (turns[candidate].pop(0), usual),
    )
    made = local.ProcessMeasurer([LocalWorker(evaluator)])
    made.time(None)
    found = dict(made.measure([lucky, steady]))
    assert {c: m.seconds for c, m in found.items()} == {lucky: 3e-3, steady: 2e-3}
    assert made.best == 2e-3


def test_cases_are_compared_at_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DUEL_SECONDS", 2.0)
    pace = [1.0, 1.0, 2.0, 2.0, 2.0]
    turns = {"better": iter([0.9, 0.9, 1.8, 3.6, 3.6]), "worse": iter(pace)}  # in two turns one alone is slowed down
    found = measure.duel({name: lambda _seconds, t=t: next(t) for name, t in turns.items()})
    assert found["better"] == pytest.approx(0.9 * found["worse"])
    lost = measure.interleaved_medians(np.array([[np.inf, np.inf], [1.0, 3.0]]))
    assert lost.tolist() == [np.inf, 2.0]


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed, seen = Evaluator.time, []

    def stop_at_fourth(self: Evaluator, candidate: Candidate | None) -> Measurement:
        seen.append(candidate)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return timed(self, candidate)

    monkeypatch.setattr(Evaluator, "time", stop_at_fourth)
    path, inputs = tmp_path / "tuning.jsonl", arguments()
    result = tune_sparse(ops.spmm(), inputs, max_trials=30, database=path, isolate=False, progress=False)
    assert result.interrupted
    assert len(result.history) == len(path.read_text().splitlines()) == 3
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)
    assert "(interrupted)" in result.report()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["spmm", "spgemm"])
def test_an_interrupt_of_the_comparison_keeps_what_was_found(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best trial is compared alone then."""
    from sparsetir.tuning import accumulators

    seen: list[int] = []
    where: Any
    where, name = (sessions, "compared") if program == "spmm" else (accumulators.AccumulatorTuner, "compare")
    usual = getattr(where, name)

    def stops_once(*args: Any, **how: Any) -> Any:
        seen.append(1)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return usual(*args, **how)

    monkeypatch.setattr(where, name, stops_once)
    A = suite.families()["uniform"]("small").astype("float32")
    inputs = {"A": A, "B": A if program == "spgemm" else np.ones((A.shape[1], 8), "float32")}
    how: dict[str, Any] = {"isolate": False} if program == "spmm" else {}
    result = tune_sparse(getattr(ops, program)(), inputs, max_trials=2, database=None, progress=False, **how)
    assert result.interrupted
    assert len(seen) == 2
    np.testing.assert_allclose(abs(result.kernel(**inputs) - A @ inputs["B"]).max(), 0, atol=1e-3)


@pytest.mark.slow
def test_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with each trial."""
    trials, begin, timed = count(1), time.perf_counter(), Evaluator.time
    now = [begin]

    def slowly(self: Evaluator, *args: Any) -> Any:
        now[0] = begin + next(trials)
        return timed(self, *args)

    monkeypatch.setattr(Evaluator, "time", slowly)
    monkeypatch.setattr("sparsetir.tuning.loop.time", SimpleNamespace(perf_counter=lambda: now[0]))
    result = tune_sparse(ops.spmm(), arguments(), max_trials=10_000, max_seconds=8.0, isolate=False, progress=False)
    assert 2 <= len(result.history) <= 8


def cube() -> CooTensor:
    dense = np.random.default_rng(0).standard_normal((6, 7, 8))
    return CooTensor.from_dense(np.where(dense > 1.0, dense, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["spmv", "sddmm", "mttkrp"])
def test_other_operations(op: str) -> None:
    case = make_case(op, cube() if op == "mttkrp" else matrix(), feat=8, seed=3)
    result = tune_sparse(case.program, case.inputs, max_trials=3, progress=False)
    assert result.checked_against == "scipy"
    assert [r.error for r in result.history] == [None] * len(result.history)
    assert result.flops


@pytest.mark.parametrize("format", ["csc", "coo", "ell", "bsr", "dcsr"])
def test_other_formats_are_recognised(format: str) -> None:
    known = recognise(ops.spmm("float64", format, idtype="int64"))
    assert known is not None
    assert known.name == "spmm"


@T.prim_func
def add_product(
    a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_dense,), "float32")
    C = T.match_sparse_buffer(c, (I,), "float32")
    with T.sp_iter([I, J], "SR", "add") as [i, j]:
        C[i] = C[i] + T.float32(2) * A[i, j] * B[j]


def updating() -> dict[str, Any]:
    A = matrix()
    return {"A": A, "B": np.ones(A.shape[1], "float32"), "C": np.ones(A.shape[0], "float32")}


@pytest.mark.slow
def test_a_program_of_ones_own_that_updates() -> None:
    inputs = updating()
    A = inputs["A"]
    result = tune_sparse(add_product, inputs, max_trials=3, progress=False)
    assert result.checked_against == "the untuned kernel"
    assert result.flops is None
    assert all(record.error is None for record in result.history)
    np.testing.assert_array_equal(inputs["C"], 1.0)
    result.kernel(**inputs)
    np.testing.assert_allclose(inputs["C"], 1 + 2 * A.sum(axis=1), rtol=1e-5)


@pytest.mark.slow
def test_formats_start_from_what_an_updated_array_held() -> None:
    result = tune_sparse(add_product, updating(), max_trials=8, formats=[BLOCKS], strategy="portfolio", progress=False)
    assert BLOCKS in {record.candidate.format for record in result.history}
    assert [record.error for record in result.history] == [None] * len(result.history)


@pytest.mark.slow
def test_wrong_use() -> None:
    inputs = arguments()
    for wrong in (
        {"max_trials": -1},
        {"preset": "lazy"},
        {"amortize_over": 0},
        {"max_seconds": 0},
        {"max_seconds": "a"},
        {"patience": 0},
        {"seed": -1},
        {"max_trials": 2.5},
    ):
        kind = ArgumentTypeError if wrong.get("max_seconds") == "a" else ArgumentError
        with pytest.raises(kind, match="got"):
            tune_sparse(ops.spmm(), inputs, **wrong)
    with pytest.raises(ArgumentTypeError, match="name the arguments"):
        tune_sparse(ops.spmm(), [inputs["A"]])  # type: ignore[arg-type]
    with pytest.raises(SparseTIRError):
        tune_sparse(ops.spmm(), {**inputs, "B": inputs["B"][1:]})
    with pytest.raises(ArgumentError, match="3 dimensions"):
        make_case("mttkrp", matrix())
    with pytest.raises(ArgumentError, match="spmm, spmv"):
        make_case("spmx", matrix())


# --- formats and schedules together ---------------------------------------------------------------------------


def blocked() -> dict[str, Any]:
    """A matrix of dense blocks."""
    mask = sp.random_array((60, 60), density=0.1, rng=np.random.default_rng(0))
    A = sp.csr_array(sp.kron(mask, np.ones((4, 4)), format="csr")).astype("float32")
    return {"A": A, "B": np.random.default_rng(1).standard_normal((240, 32)).astype("float32")}


@pytest.mark.slow
def test_formats_are_searched_with_the_schedule() -> None:
    inputs = blocked()
    result = tune_sparse(ops.spmm(), inputs, max_trials=14, progress=False)
    tried = result.formats()
    assert {"as it is", "bsr(r=4, c=4)"} <= set(tried)
    assert not [r for r in result.history if r.error is not None]
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)
    assert all(r.conversion > 0 for r in result.history if r.stored_as)
    text = result.explain()
    assert "bsr(r=4, c=4)" in text
    assert "loops:" in text


@pytest.mark.slow
def test_a_format_that_wins_is_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks_win(cases: Any) -> dict[Any, float]:
        return {c: 0.5 if c is not None and c.format == BLOCKS else 1.0 for c in cases}

    keep_time(monkeypatch, blocks_win)
    monkeypatch.setattr(
        sessions, "finalists", lambda history, _cost: [r.candidate for r in history if r.candidate.format]
    )
    inputs = blocked()
    result = tune_sparse(ops.spmm(), inputs, max_trials=8, formats=[BLOCKS], progress=False)
    assert result.best.stored_as == "bsr(r=4, c=4)"
    assert result.speedup == 2.0
    assert "bsr(r=4, c=4)" in repr(result.kernel)
    assert result.break_even is not None
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_no_formats_is_schedules_only() -> None:
    result = tune_sparse(ops.spmm(), blocked(), max_trials=6, formats=[], progress=False)
    assert list(result.formats()) == ["as it is"]


def test_the_conversion_counts_where_calls_are_few() -> None:
    record = Record(Choices(), "bsr(r=4, c=4)", seconds=1.0, conversion=10.0)
    assert sessions.full_cost(record) == 1.0
    assert sessions.full_cost(record, 10) == 2.0
    assert sessions.full_cost(Record(Choices(), error="no")) == float("inf")


@pytest.mark.slow
def test_without_trials_the_untuned_kernel_comes_back() -> None:
    inputs = arguments()
    result = tune_sparse(ops.spmm(), inputs, max_trials=0, progress=False)
    assert result.best == result.untuned
    assert len(result.history) == 1
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)


def test_formats_are_formats() -> None:
    with pytest.raises(ArgumentTypeError, match="got 'bsr'"):
        tune_sparse(ops.spmm(), arguments(), formats=["bsr"])  # type: ignore[list-item]


@pytest.mark.slow
def test_formats_that_cannot_be_had_are_told() -> None:
    inputs = make_case("sddmm", matrix(), feat=8).inputs
    result = tune_sparse(ops.sddmm(), inputs, max_trials=8, formats=[BLOCKS], progress=False)
    assert list(result.formats()) == ["as it is"]
    assert "pieces" in result.refused["bsr(r=4, c=4)"]


# --- what counts as right -----------------------------------------------------------------------------------


def test_rounding_is_allowed_and_nothing_else() -> None:
    expected = {"c": np.array([1.0, 0.0, 1e-8, np.nan, np.inf], "float32")}
    reference = Reference(expected, {"c": np.array([1.0, 2.0, 1.0, np.nan, np.inf], "float32")})

    def verdict(*values: float) -> str | None:
        return reference.disagreement({"c": np.array(values, "float32")})

    assert verdict(1.0, 0.0, 1e-8, np.nan, np.inf) is None
    assert verdict(1.0 + 1e-5, 1e-5, 0.0, np.nan, np.nan) is None
    assert "c[0] is 1.00" in (verdict(1.001, 0.0, 0.0, np.nan, np.inf) or "")
    assert "c[1]" in (verdict(1.0, 1.0, 0.0, np.nan, np.inf) or "")
    assert "c[0]" in (verdict(np.nan, 0.0, 0.0, np.nan, np.inf) or "")
    assert "c[3]" in (verdict(1.0, 0.0, 0.0, 3.0, np.inf) or "")


def test_integers_must_be_equal() -> None:
    reference = Reference({"c": np.array([1, 2])}, {"c": np.array([1, 2])})
    assert reference.disagreement({"c": np.array([1, 2])}) is None
    assert reference.disagreement({"c": np.array([1, 3])}) == "c[1] is 3, expected 2"


def test_the_progress_line() -> None:
    stream = io.StringIO()
    with Progress(Budget(10), shown=True, flops=2_000_000, stream=stream) as bar:
        bar.say("preparing")
        bar.update(10, Record(Choices(), seconds=2e-3, predicted=3e-3, best=1e-3))
    assert "10/10  best 1 ms  2.0 GFLOP/s" in stream.getvalue()
    assert stream.getvalue().startswith("\rtuning: preparing")
    assert stream.getvalue().endswith("\n")
    silent = io.StringIO()
    with Progress(Budget(10), stream=silent) as bar:
        bar.say("preparing")
        bar.update(10, Record(Choices(), seconds=2e-3, predicted=3e-3, best=1e-3))
    assert silent.getvalue() == ""


@pytest.mark.parametrize(("trials", "elapsed"), [(6, 1.0), (1, 4.0), (1, 9.0), (0, 0.0)])
def test_the_bar_is_as_far_as_its_count(trials: int, elapsed: float) -> None:
    budget = Budget(10, seconds=8.0)
    budget.start -= elapsed
    text = Progress(budget).text(trials, Record(Choices(), seconds=1e-3), 0, elapsed)
    found = re.search(r"\[(#*)(\.*)\] ([\d.]+)/([\d.]+)", text)
    assert found is not None
    assert len(found[1]) / 24 == pytest.approx(float(found[3]) / float(found[4]), abs=0.05)
    assert f"{trials} trials" in text or f"{trials}/10" in text


def test_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ipykernel", "IPython"):
        monkeypatch.setitem(sys.modules, name, None)
    assert Progress(Budget(3), stream=io.StringIO()).shown
    assert not Progress(Budget(3), stream=io.StringIO(), shown=False).shown


@pytest.mark.slow
def test_other_libraries_are_timed_beside_the_result() -> None:
    result = tune_sparse(ops.spmm(), arguments(), max_trials=2, compare_with=["scipy"], progress=False)
    assert result.peers["scipy"] > 0
    assert "scipy: " in result.report()
    with pytest.raises(ArgumentError, match="expected one of scipy"):
        result.break_even_with("mkl")
    slow, fast = replace(result.best, conversion=1.0, seconds=2.0), replace(result.best, conversion=0.0, seconds=1.0)
    assert replace(result, best=slow, peers={"scipy": 4.0}).break_even_with("scipy") == 0.5
    assert replace(result, best=slow, peers={"scipy": 1.0}).break_even_with("scipy") is None
    assert replace(result, best=fast, peers={"scipy": 4.0}).break_even_with("scipy") == 0.0
    A, raw = arguments()["A"], {"B": arguments()["B"]}
    raw |= {"a": A.data, "indptr": A.indptr, "indices": A.indices, "m": A.shape[0], "n": A.shape[1], "nnz": A.nnz}
    with pytest.raises(ArgumentError, match="timed on the arguments A, B, got B, a"):
        tune_sparse(ops.spmm(), raw, max_trials=2, compare_with=["scipy"], progress=False)
    with pytest.raises(ArgumentTypeError, match="compare_with: expected a list of libraries"):
        tune_sparse(ops.spmm(), arguments(), max_trials=2, compare_with="mkl", progress=False)
    with pytest.raises(ArgumentError, match="spmm is timed against"):
        tune_sparse(ops.spmm(), arguments(), max_trials=2, compare_with=["dgl"], progress=False)
    with pytest.raises(ArgumentError, match="no program of"):
        tune_sparse(add_product, updating(), max_trials=2, compare_with=["scipy"], progress=False)


# --- a list of one's own --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_list_is_measured_once_for_each_size(tmp_path: Path) -> None:
    inputs, path = blocked(), tmp_path / "tuning.jsonl"
    configs = [Choices(tile=8), Candidate(Choices(tile=16, chunks=2)), BLOCKS]
    spmm = autotune(configs=configs, key=["m"], database=path)(ops.spmm())
    for _ in range(2):
        np.testing.assert_allclose(spmm(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)
    history = spmm.result(**inputs).history
    assert [r.candidate for r in history[1:]] == [Candidate(Choices(tile=8)), configs[1], Candidate(format=BLOCKS)]
    assert not [r for r in history if r.error]
    narrow = {**inputs, "B": inputs["B"][:, :8].copy()}
    np.testing.assert_allclose(spmm(**narrow), narrow["A"] @ narrow["B"], rtol=1e-4, atol=1e-4)
    assert len(spmm.results) == 2
    again = autotune(configs=configs, key=["m"], database=path)(ops.spmm())
    assert again.result(**inputs).measured == 0
    bound = again.bind(A=inputs["A"])
    np.testing.assert_allclose(bound(B=inputs["B"]), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)


def test_a_list_is_bound_and_timed() -> None:
    inputs, spmm = arguments(), autotune(configs=[Choices(tile=8)])(ops.spmm())
    bound = spmm.bind(A=inputs["A"])
    assert repr(bound).endswith("with A fixed")
    np.testing.assert_allclose(bound(B=inputs["B"]), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)
    assert bound.time(B=inputs["B"], seconds=0.01).calls >= 3
    assert spmm.time(**inputs, seconds=0.01).calls >= 3
    assert len(repr(spmm.result(**inputs))) < 250
    with pytest.raises(SparseTIRError, match="got Autotuned, which is called as it is"):
        build(spmm)
    with pytest.raises(ArgumentTypeError, match="give the configurations first"):
        autotune(ops.spmm())


def test_wrong_lists() -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        autotune(configs=[])
    with pytest.raises(ArgumentTypeError, match="got int"):
        autotune(configs=[3])
    with pytest.raises(ArgumentError, match="got 'size'"):
        autotune(configs=[Choices()], key=["size"])(ops.spmm())


# --- replay -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of made-up times for two patterns, with features."""
    path = tmp_path_factory.mktemp("recorded") / "space.jsonl"
    database, found = Database(path), new_space()
    for name in ("p", "q"):
        rng = np.random.default_rng(len(name))
        for candidate in dict.fromkeys(found.sample(rng) for _ in range(150)):
            named = features.of_candidate(candidate, ArgumentStorage(1000, 8000), Operands(256, 9000, 9000, 4, 2), 1000)
            stored_as = repr(candidate.format) if candidate.format is not None else None
            record = Record(candidate.choices, stored_as, seconds=made_up_seconds(candidate))
            database.append(replace(KEY, pattern=name), record, features=named)
    database.close()
    return path


@pytest.mark.slow
def test_recorded_spaces_are_searched_without_running(recorded: Path) -> None:
    cases = replay.load(recorded)
    assert len(cases) == 2
    found = replay.compare(cases, ["evolution", "random"], (1, 16, 64), seeds=2)
    for results in found.values():
        means = [mean for mean, _ in results]
        assert means == sorted(means)
        assert all(low <= mean <= 1.0 for mean, low in results)
    assert found["evolution"][2][0] >= 0.97
    assert found["evolution"][2][0] >= found["random"][2][0]
    again = replay.compare(cases[:1], ["evolution"], (1, 16), seeds=2)
    assert again == replay.compare(cases[:1], ["evolution"], (1, 16), seeds=2)


def test_the_table_of_a_replay(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main([str(recorded), "--strategies", "random", "--budgets", "1,4", "--seeds", "2"])
    assert "2 cases" in capsys.readouterr().out


def test_a_replay_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="got none"):
        replay.load(tmp_path / "none.jsonl")
