# SPDX-License-Identifier: Apache-2.0
"""Cost models: what they learn, how they are saved, and what a search and a call without trials make of them."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir import formats, ops
from sparsetir.cli import main
from sparsetir.errors import ArgumentError, ArgumentTypeError, TuningError
from sparsetir.formats.heuristics import ranked_candidates
from sparsetir.formats.pattern import pattern
from sparsetir.formats.tensor import SparseTensor
from sparsetir.schedules import Choices, defaults
from sparsetir.tuning import Candidate, Database, Key, Record, tune_sparse
from sparsetir.tuning import session as sessions
from sparsetir.tuning.evaluator import Evaluator, paced
from sparsetir.tuning.features import (
    ArgumentStorage,
    Estimates,
    MatrixFacts,
    Operands,
    WorkloadEncoding,
    choice_names,
    density,
    matrix_names,
    of_pattern,
    pattern_names,
    terms,
)
from sparsetir.tuning.model import OBJECTIVES, PATH, AnalyticModel, CostModel, RandomModel, closeness, pretrained
from sparsetir.tuning.predict import bounds_of, guess
from sparsetir.tuning.records import Recording, distance, hints, load, neighbours
from sparsetir.tuning.search import BATCH, Search
from sparsetir.tuning.space import Space, start
from sparsetir.tuning.train import collect, evaluate, pretrain
from sparsetir.tuning.train.evaluate import pairs_in_order, ranking, safe_margin
from sparsetir.tuning.train.replay import replayed
from sparsetir.tuning.variants import own_storage
from sparsetir.workloads import suite

pytestmark = pytest.mark.usefixtures("quick_comparisons")

FEAT = 32
VALUES = {"tile": (8, 16, 32), "chunks": (0, 2, 8), "unroll": (1, 2, 4), "prefetch": (0, 8)}
KEY = Key("spmm", "a program", "p", {"feat": FEAT}, "float32", "llvm", "a machine", 2, "1")
BLOCKS = formats.bsr(4, 4)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETIR_CACHE", "off")
    monkeypatch.setitem(pretrain.SETTINGS, "nthread", 1)  # others run beside


def encoding_of(matrix: Any) -> WorkloadEncoding:
    """What a session over SpMM would have."""
    found = pattern(matrix)
    facts = of_pattern(found) | density(matrix.indptr, matrix.indices, matrix.shape[1])
    own = ArgumentStorage(matrix.nnz, 8 * matrix.nnz + 4 * matrix.shape[0] + 4)
    rows, columns = matrix.shape
    return WorkloadEncoding(facts, found, own, Operands(FEAT, 4 * FEAT * columns, 4 * FEAT * rows, 4, 2, FEAT))


def new_space() -> Space:
    return Space([None, BLOCKS, formats.ell()], lambda _format: VALUES)


def made_up_seconds(candidate: Candidate, encoding: WorkloadEncoding) -> float:
    """Blocks pay where they are full; one core pays for small matrices; the wider the tile, the better."""
    choices, stored = candidate.choices, encoding.estimates(candidate.format)
    work = stored.values * (0.5 if candidate.format == BLOCKS else 1.0)
    threads = 2.0 if choices.chunks else 1.0
    steps = 1.0 + 0.1 * abs(np.log2(choices.tile) - 5) + 0.05 * abs(np.log2(choices.unroll) - 1)
    return float(1e-9 * work * steps * (1.05 if choices.prefetch else 1.0) / threads + 2e-6 * (threads - 1))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of made-up times for several matrices."""
    path = tmp_path_factory.mktemp("recorded") / "space.jsonl"
    database, space, rng = Database(path), new_space(), np.random.default_rng(0)
    for family in ("uniform", "banded", "fem_blocks", "attention_mask"):
        for size in (2_000, 9_000):
            encoding = encoding_of(suite.generate(family, size))
            facts = {"matrix": f"{family}-{size}", "family": family, "op": "spmm:32"}
            key = replace(KEY, pattern=facts["matrix"])
            usual = Candidate(Choices(tile=32, chunks=2))
            seconds = 1.2 * made_up_seconds(usual, encoding)
            named = encoding.named(usual, specialised=False)
            database.append(key, Record(Choices(), seconds=seconds), features=named, **facts)
            for candidate in dict.fromkeys(space.sample(rng) for _ in range(60)):
                stored_as = None if candidate.format is None else repr(candidate.format)
                seconds = made_up_seconds(candidate, encoding)
                record = Record(candidate.choices, stored_as, {"feat": FEAT}, seconds=seconds)
                database.append(key, record, features=encoding.named(candidate), **facts)
    database.close()
    return path


# --- fitting and files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_both_objectives_learn_the_order_within_cases(objective: str) -> None:
    rng = np.random.default_rng(0)
    features = rng.random((300, 4))
    cases = np.repeat(np.arange(3), 100)
    # The level of a case says nothing; within it the second number counts.
    seconds = 10.0 ** (cases * 3) * np.exp(features[:, 1] + 0.2 * features[:, 2])
    model = CostModel.fit(features, seconds, cases=cases, objective=objective)
    other = rng.random((100, 4))
    truth = np.exp(other[:, 1] + 0.2 * other[:, 2])
    assert pairs_in_order(model.predict(other), truth) > 0.9
    # Scores are logarithms of ratios of times.
    slope = np.polyfit(model.predict(other), -np.log(truth), 1)[0]
    assert 0.6 < slope < 1.6
    assert next(iter(model.importance(["a", "b", "c", "d"]))) == "b"


def test_unknown_objectives() -> None:
    with pytest.raises(ArgumentError, match="objectives regression, rank, got 'luck'"):
        CostModel.fit(np.zeros((2, 1)), np.ones(2), objective="luck")


def test_failures_are_slow() -> None:
    features = np.repeat(np.eye(2), 20, axis=0)
    seconds = np.where(features[:, 0] == 1, 1.0, np.inf)
    low, high = CostModel.fit(features, seconds).predict(np.eye(2)[::-1])
    assert low < high


def test_good_trials_count_more_where_what_is_good_counts() -> None:
    """Those at 0 are as fast on average as those at 1, and better at best."""
    features, seconds = np.array([[0.0], [0.0], [1.0], [1.0]]), np.array([1.0, 2.9, 1.7, 1.71])
    gaps = []
    for focused in (False, True):
        model = CostModel.fit(features, seconds, min_child_weight=0, focused=focused)
        at_0, at_1 = model.predict(np.array([[0.0], [1.0]]))
        gaps.append(at_0 - at_1)
    assert abs(gaps[0]) < 0.02
    assert gaps[1] > 0.05


def test_how_bad_a_candidate_is_makes_no_difference_to_how_good_others_are() -> None:
    cases = np.array([0, 0, 1, 1])
    some, others = np.array([1.0, 3.1, 5.0, np.inf]), np.array([1.0, 90.0, 5.0, 25.0])
    np.testing.assert_array_equal(closeness(some, cases), closeness(others, cases))
    features = np.array([[0.0], [1.0], [0.0], [1.0]])
    models = [CostModel.fit(features, held, cases=cases, focused=True) for held in (some, others)]
    np.testing.assert_array_equal(*(model.predict(features) for model in models))


def test_a_model_corrects_another_one() -> None:
    features = np.random.default_rng(0).random((80, 2))
    seconds = np.exp(-features[:, 0] - features[:, 1])
    prior = features[:, 0]
    model = CostModel.fit(features, seconds, prior=prior)
    assert set(model.importance(["known", "new"])) >= {"new"}
    assert pairs_in_order(prior + model.predict(features), seconds) > 0.95
    assert np.corrcoef(model.predict(features), features[:, 1])[0, 1] > 0.95


def test_models_are_saved(tmp_path: Path) -> None:
    features = np.random.default_rng(0).random((50, 2))
    model = CostModel.fit(features, features[:, 0] + 0.1, names=("a", "b"))
    model = replace(model, about={"margin": 1.3})
    model.save(tmp_path / "new" / "model.json")
    again = CostModel.load(tmp_path / "new" / "model.json", names=["a", "b"])
    np.testing.assert_array_equal(again.predict(features), model.predict(features))
    assert (again.names, again.objective, again.about) == (("a", "b"), "regression", {"margin": 1.3})
    facts = json.loads((tmp_path / "new" / "model.json").read_text())
    assert facts["importance"]["a"] > 0.9
    assert facts["sparsetir"]


def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(TuningError, match="got FileNotFoundError"):
        CostModel.load(path)
    path.write_text("{")
    with pytest.raises(TuningError, match="got JSONDecodeError"):
        CostModel.load(path)
    path.write_text('{"format": 99}')
    with pytest.raises(TuningError, match="got format 99"):
        CostModel.load(path)
    path.write_text('{"format": 1, "names": ["a"], "objective": "rank", "scale": 1, "about": {}, "trees": "AAAA"}')
    with pytest.raises(TuningError, match="got error"):
        CostModel.load(path)
    with pytest.raises(TuningError, match="other features: it does not know b and it wants a"):
        CostModel.load(path, names=["b"])
    with pytest.warns(UserWarning, match=r"other features.*begin without it"):
        assert pretrained(path) is None
    assert pretrained(tmp_path / "none.json") is None


def test_the_shipped_model_fits_the_features() -> None:
    if not PATH.exists():
        pytest.skip("no model is in the package yet")
    model = pretrained()
    assert model is not None
    assert model is pretrained()
    # Choices that it was not trained with come last.
    assert model.names == matrix_names()[: len(model.names)]
    assert all(name.startswith("choice_") for name in matrix_names()[len(model.names) :])
    assert model.about["margin"] >= 1
    assert bounds_of(model.about).least > 1
    assert model.about["threads"] == [1, 2]
    assert PATH.stat().st_size < 1 << 20


# --- what models see ----------------------------------------------------------------------------------------


def test_estimates_come_near_what_is_stored() -> None:
    """Of every promising format of some matrices."""
    for name in ("fem_blocks", "stencil_2d", "bipartite"):
        encoding = encoding_of(suite.generate(name, 3_000))
        held = SparseTensor.from_any(suite.generate(name, 3_000))
        for format in ranked_candidates(encoding.described):
            stored = sum(piece.packed.count for piece in held.convert(format).pieces)
            assert 0.6 < encoding.estimates(format).values / stored < 1.6, format


def test_formats_of_ones_own_have_estimates() -> None:
    own = ArgumentStorage(100, 900)
    assert Estimates(None, own, 4)(None) == own
    found = Estimates(pattern(suite.generate("uniform", 1_000)), own, 4)(formats.bsr(5, 5))
    assert found.rows == 5
    assert found.values > 1_000


def test_rows_are_the_named_numbers() -> None:
    encoding = encoding_of(suite.generate("fem_blocks", 2_000))
    candidates = [Candidate(Choices(tile=8)), Candidate(Choices(chunks=0), BLOCKS)]
    named = [list(encoding.named(c).values()) for c in candidates]
    np.testing.assert_allclose(encoding.rows(candidates), np.array(named), rtol=1e-4)
    assert tuple(encoding.names) == matrix_names()
    assert {"row_mean", "nnz"} <= pattern_names()
    assert not {"tile", "roofline", "padding", "feat"} & pattern_names()
    assert {"tile", "lanes", "feat", "is_bsr"} <= choice_names()
    assert not {"row_mean", "roofline", "padding", "bytes"} & choice_names()


def test_terms_follow_the_loops() -> None:
    structure = MatrixFacts(1_000_000, 50_000, 50_000, 100, 20_000.0, 1.0)
    operands, stored = Operands(256, 51_200_000, 51_200_000, 4, 2), ArgumentStorage(1_000_000, 8_000_000)

    def of(**choices: int) -> dict[str, float]:
        return terms(Candidate(Choices(**{"tile": 64, "chunks": 2, **choices})), stored, operands, structure)

    base = of()
    assert of(panel=32)["between_private"] < base["between_private"]
    assert of(chunks=0)["roofline"] > base["roofline"]
    assert of(chunks=0)["threads_used"] == 1
    assert of(tile=256)["registers"] == 4 * base["registers"]
    assert of(unroll=4)["body"] == base["body"] + 2
    assert base["vector_efficiency"] == 1
    giant = replace(structure, longest=900_000)
    skewed = terms(Candidate(Choices(tile=64, chunks=2)), stored, operands, giant)
    assert skewed["balance"] > base["balance"] == 0
    blocked = Candidate(Choices(tile=64, chunks=2), BLOCKS)
    four = terms(blocked, replace(stored, rows=4), operands, structure)
    assert four["bytes_private"] < base["bytes_private"]
    assert four["block_columns"] == 4
    spmv = Operands(1, 200_000, 200_000, 4, 2, 1)
    assert terms(Candidate(), stored, spmv, structure)["vector_efficiency"] == 1 / 16


def test_the_baselines() -> None:
    names = ["a", "roofline"]
    scores = AnalyticModel(names).predict(np.array([[0.0, -10.0], [0.0, -12.0]]))
    assert scores[1] - scores[0] == pytest.approx(np.log(4.0))
    assert sorted(RandomModel(1).predict(np.zeros((9, 2)))) == sorted(RandomModel(1).predict(np.ones((9, 3))))


# --- searches -----------------------------------------------------------------------------------------------


class Wanted:
    """A model whose favourites are blocks with tile 8; wrong, unless that is what is wanted."""

    def __init__(self, names: list[str]) -> None:
        self.blocks, self.tile = names.index("is_bsr"), names.index("tile")

    def predict(self, features: np.ndarray) -> np.ndarray:
        return 2 * features[:, self.blocks] - features[:, self.tile]


def new_search(encoding: WorkloadEncoding, **how: Any) -> Search:
    return Search(new_space(), features=encoding.rows, strategy="guided", **how)


def explored(search: Search, encoding: WorkloadEncoding, trials: int) -> Iterator[Candidate]:
    while len(search.told) < trials:
        for candidate in search.ask():
            search.tell(candidate, made_up_seconds(candidate, encoding))
            yield candidate


def test_many_workers_are_given_more_than_a_batch() -> None:
    encoding = encoding_of(suite.generate("uniform", 2_000))
    search = new_search(encoding)
    list(explored(search, encoding, 8))
    first, more = search.ask(), search.ask(30)
    assert more[: len(first)] == first
    assert len(set(more)) == 30
    assert not set(more) & set(search.told)
    assert search.ask() == first  # nothing was told
    assert search.ask(1) == first
    small = Search(new_space(), features=encoding.rows, strategy="exhaustive")
    every = small.ask(10_000)
    assert len(every) == len(set(every)) == len(list(small.space))


def test_a_prior_model_is_asked_first() -> None:
    encoding = encoding_of(suite.generate("uniform", 2_000))
    search = new_search(encoding, prior=Wanted(encoding.names))
    first = search.ask()
    assert first[0] == Candidate(start(new_space().values(BLOCKS)), BLOCKS)  # the simplest of what it likes
    assert first[1].format == BLOCKS
    assert first[1].choices.tile == 8
    assert BLOCKS not in {c.format for c in first[2:]}  # for all that: not one format only
    told = dict.fromkeys(first, 1.0)
    for candidate, seconds in told.items():
        search.tell(candidate, seconds)
    assert all(p is not None and p > 0 for p in search.predicted(search.ask()))


def test_a_wrong_prior_is_corrected() -> None:
    encoding = encoding_of(suite.generate("uniform", 2_000))
    best = min(made_up_seconds(c, encoding) for c in new_space())
    found = list(explored(new_search(encoding, prior=Wanted(encoding.names)), encoding, 40))
    assert min(made_up_seconds(c, encoding) for c in found) <= 1.05 * best


def test_every_format_is_tried_though_the_model_expects_nothing_of_it() -> None:
    encoding = encoding_of(suite.generate("uniform", 2_000))
    unwanted = Wanted(encoding.names)
    unwanted.blocks = unwanted.tile  # of blocks it thinks as of anything else
    found = list(explored(new_search(encoding, prior=unwanted), encoding, 8))
    assert any(c.format == BLOCKS for c in found)


def test_a_search_with_a_prior_goes_on_as_it_would_have() -> None:
    encoding = encoding_of(suite.generate("banded", 2_000))
    prior, hint = Wanted(encoding.names), [Candidate(Choices(tile=16, chunks=8, unroll=4))]
    whole = list(explored(new_search(encoding, prior=prior, hints=hint), encoding, 24))
    assert whole[0] == hint[0]
    resumed = new_search(encoding, prior=prior, hints=hint)
    for candidate in whole[:10]:
        resumed.tell(candidate, made_up_seconds(candidate, encoding))
    assert whole[:10] + list(explored(resumed, encoding, 24)) == whole


def test_hints_lie_in_the_space() -> None:
    encoding = encoding_of(suite.generate("banded", 2_000))
    given = [Candidate(Choices(tile=256), BLOCKS), Candidate(format=formats.dia())]
    first = new_search(encoding, hints=given).ask()
    assert first[0].format == BLOCKS
    assert len(first) == BATCH
    assert all(c in new_space() for c in first)


# --- nearest patterns ---------------------------------------------------------------------------------------


def record_of(candidate: Candidate, seconds: float, feat: int = FEAT) -> Record:
    stored_as = None if candidate.format is None else repr(candidate.format)
    return Record(candidate.choices, stored_as, {"feat": feat}, seconds=seconds)


def test_members_of_a_family_are_near() -> None:
    small = {name: of_pattern(pattern(suite.generate(name, 20_000))) for name in ("banded", "rmat", "fem_blocks")}
    large = {name: of_pattern(pattern(suite.generate(name, 60_000))) for name in small}
    for name, facts in large.items():
        assert min(small, key=lambda other: distance(facts, small[other])) == name
    assert distance({}, {}) == float("inf")


def test_what_was_best_nearby_is_hinted(tmp_path: Path) -> None:
    near, mine = encoding_of(suite.generate("banded", 20_000)), encoding_of(suite.generate("banded", 30_000))
    far = encoding_of(suite.generate("giant_row", 20_000))
    database = Database(tmp_path / "records.jsonl")
    good, second, bad = (Candidate(Choices(tile=tile, chunks=2), BLOCKS) for tile in (8, 16, 32))
    for key, encoding, candidate, seconds in (
        (replace(KEY, pattern="near"), near, bad, 3.0),
        (replace(KEY, pattern="near"), near, good, 1.0),
        (replace(KEY, pattern="near"), near, second, 2.0),
        (replace(KEY, pattern="far"), far, Candidate(), 0.1),
        (replace(KEY, pattern="near", dtype="float64"), near, Candidate(Choices(tile=64)), 0.1),
    ):
        database.append(key, record_of(candidate, seconds), features=encoding.named(candidate))
    assert hints(database, KEY, mine.facts, {"feat": FEAT}) == [good, second]
    assert hints(database, KEY, mine.facts, {"feat": 2 * FEAT}) == []
    assert hints(database, KEY, {}, {"feat": FEAT}) == []
    assert hints(Database(None), KEY, mine.facts, {"feat": FEAT}) == []


def test_the_same_pattern_with_other_sizes_is_nearest(tmp_path: Path) -> None:
    mine = encoding_of(suite.generate("banded", 20_000))
    database = Database(tmp_path / "records.jsonl")
    for feat in (64, 512):
        other = replace(KEY, sizes={"feat": feat})
        database.append(other, record_of(Candidate(Choices(tile=16)), 1.0, feat), features=mine.named(Candidate()))
    found = neighbours(database, KEY, mine.facts, {"feat": FEAT})
    assert [n.distance for n in found] == sorted(n.distance for n in found)
    assert found[0].records[0].fixed == {"feat": 64}


@pytest.mark.slow
def test_a_search_begins_with_what_was_best_nearby(tmp_path: Path) -> None:
    path, inputs = tmp_path / "records.jsonl", inputs_of("banded", 4_000)
    first = tune_sparse(ops.spmm(), inputs, max_trials=4, formats=[], database=path, progress=False)
    tuned = [r for r in first.history if r.fixed and r.seconds is not None]
    best = min(tuned, key=lambda r: r.seconds or 0.0).candidate
    other = inputs_of("banded", 6_000)
    again = tune_sparse(ops.spmm(), other, max_trials=2, formats=[], database=path, progress=False)
    assert again.history[1].candidate == best


@pytest.mark.slow
def test_a_search_is_led_by_the_shipped_model_unless_told_otherwise() -> None:
    how: dict[str, Any] = {"max_trials": 6, "formats": [], "progress": False}
    led = tune_sparse(ops.spmm(), inputs_of("uniform", 2000), **how)
    unled = tune_sparse(ops.spmm(), inputs_of("uniform", 2000), strategy="evolution", **how)
    assert led.history[-1].predicted is not None
    assert unled.history[-1].predicted is None  # its own trials are too few


# --- without trials -----------------------------------------------------------------------------------------


def inputs_of(family: str, size: int) -> dict[str, Any]:
    A = suite.generate(family, size)
    return {"A": A, "B": np.random.default_rng(0).standard_normal((A.shape[1], FEAT)).astype("float32")}


def ready(monkeypatch: pytest.MonkeyPatch, gain: float, margin: float = 1.2) -> None:
    """A pretrained model that expects so much of blocks."""
    names = matrix_names()
    rows = np.zeros((200, len(names)), np.float32)
    rows[::2, names.index("is_bsr")] = 1
    model = CostModel.fit(rows, np.where(rows[:, names.index("is_bsr")] == 1, 1.0, gain), names=names, eta=0.5)
    found = replace(model, about={"margin": margin})
    monkeypatch.setattr(sessions, "prior_for", lambda encoding: found if tuple(encoding.names) == names else None)


def test_without_trials_the_model_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch, gain=2.0)
    inputs = inputs_of("fem_blocks", 30_000)
    result = tune_sparse(ops.spmm(), inputs, max_trials=0, formats=[formats.bsr(3, 3)], progress=False)
    assert result.best.stored_as == "bsr(r=3, c=3)"
    assert result.best.seconds is None
    assert result.is_guess
    assert len(result.history) == 1
    assert result.speedup == pytest.approx(2.0, rel=0.05)
    assert "chosen without timing it: the pretrained model expects" in result.report()
    assert "expected to be" in result.explain()
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)


def test_what_is_not_clearly_better_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch, gain=2.0, margin=2.5)
    inputs = inputs_of("fem_blocks", 3_000)
    result = tune_sparse(ops.spmm(), inputs, max_trials=0, formats=[formats.bsr(3, 3)], progress=False)
    assert result.best == result.untuned
    assert not result.is_guess


def test_a_conversion_for_few_calls_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch, gain=2.0)
    inputs, only = inputs_of("fem_blocks", 3_000), [formats.bsr(3, 3)]
    result = tune_sparse(ops.spmm(), inputs, max_trials=0, formats=only, amortize_over=0.001, progress=False)
    assert result.best.stored_as is None


def test_a_wrong_kernel_is_not_taken_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch, gain=2.0)

    def wrong(*_args: Any) -> Any:
        raise TuningError("the kernel is wrong")

    monkeypatch.setattr(sessions.Session, "checked", wrong)
    inputs, only = inputs_of("fem_blocks", 3_000), [formats.bsr(3, 3)]
    result = tune_sparse(ops.spmm(), inputs, max_trials=0, formats=only, progress=False)
    assert result.best == result.untuned
    assert "wrong" in result.refused["bsr(r=3, c=3)"]


def test_without_trials_records_come_first(tmp_path: Path) -> None:
    inputs, path = inputs_of("fem_blocks", 3_000), tmp_path / "records.jsonl"
    session = sessions.Session(ops.spmm(), inputs, None)
    candidate = Candidate(Choices(tile=16, chunks=2), formats.bsr(3, 3))
    Database(path).append(session.key, record_of(candidate, 1e-9))
    result = tune_sparse(ops.spmm(), inputs, max_trials=0, database=path, progress=False)
    assert result.best.candidate == candidate
    assert not result.is_guess
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)


def test_formats_are_ranked_before_they_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    ready(monkeypatch, gain=2.0)
    inputs = inputs_of("fem_blocks", 3_000)
    session = sessions.Session(ops.spmm(), inputs, None)
    model = sessions.prior_for(session.encoding)
    assert model is not None
    found = guess(session, model, seconds=1.0)
    assert found is not None
    assert len(session.evaluator.variants.held) == 2  # the program as it is, and the one that was chosen
    assert guess(session, replace(model, about={"margin": 9.0}), seconds=1.0) is None


# --- collecting and training --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_collection_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "space.jsonl"
    command = ["--out", str(out), "--suite", "pruned_50", "--sizes", "600", "--ops", "spmm:8", "--trials"]
    assert collect.main([*command, "9"]) == 0
    lines = out.read_text().splitlines()
    assert len(lines) == 9
    first = json.loads(lines[-1])
    assert (first["matrix"], first["family"], first["op"]) == ("pruned_50-600", "pruned", "spmm:8")
    assert collect.main([*command, "9"]) == 0
    assert len(out.read_text().splitlines()) == 9
    assert collect.main([*command, "10"]) == 0
    assert len(out.read_text().splitlines()) == 10
    cases = load(out)
    assert [case.matrix for case in cases] == ["pruned_50-600"]
    assert all(case.untuned is not None and case.names == matrix_names() for case in cases)
    assert "9 new trials" in capsys.readouterr().err


@pytest.mark.slow
def test_every_format_of_a_search_begins_with_what_suits_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "SHARE", 0.0)  # every result is large
    A = sp.random_array((60, 50), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
    session = sessions.Session(ops.spmm(), {"A": A, "B": np.ones((50, 16), np.float32)}, None)
    try:
        first = list(session.space.first())
    finally:
        session.close()
    assert {c.format for c in first} > {None}
    assert all(c.choices.stream == 1 for c in first)


def test_what_would_be_the_best_is_compared_with_the_untuned_kernel_again() -> None:
    """A pause of the machine that hit the untuned kernel alone must not make another one the best."""
    for of_candidate, times, expected in ((2.0, [3.0, 1.0], 1.0), (2.0, [1.0, 3.0], 1.0), (4.0, [3.0, 1.0], 3.0)):
        left, known = iter(times), SimpleNamespace(paces=deque(), best=1.0)
        known.typical = lambda candidate, _seconds, left=left, of=of_candidate: next(left) if candidate is None else of
        known._doubted = partial(Evaluator._doubted, known)
        assert Evaluator.interleaved(known, Candidate(), 1e-3) == (of_candidate, expected)


def test_what_was_timed_a_moment_ago_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [0.0], iter([3e-3, 4e-3, 5e-3, 2.0, 9.0])
    monkeypatch.setattr("sparsetir.tuning.evaluator.time", SimpleNamespace(perf_counter=lambda: now[0]))
    known = SimpleNamespace(typical=lambda _candidate, _seconds: next(left), paces=deque(maxlen=4))
    found = []
    for now[0] in (0.0, 0.02, 0.04, 9.0, 9.03, 9.1, 99.0):  # a moment is some calls where these are long
        found.append(paced(known, 1e-3))
    assert found == [3e-3, 3e-3, 3e-3, 5e-3, 5e-3, 5e-3, 9.0]


@pytest.mark.slow
def test_a_collection_is_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "space.jsonl"
    command = ["--out", str(out), "--suite", "pruned_50", "--sizes", "600", "--ops", "spmm:8", "--trials", "12"]
    assert collect.main(command) == 0
    once = load(out)
    assert all(held == {} for case in once for held in case.passes)
    assert evaluate.repeated(once) == []
    assert collect.main([*command, "--again"]) == 0
    for case, before in zip(load(out), once, strict=True):
        first, second = case.passes
        ran = {c for c, seconds in before.seconds.items() if np.isfinite(seconds)}
        assert set(first) == set(second) == ran
        for c in ran:
            assert first[c] == pytest.approx(before.seconds[c])
            assert case.seconds[c] == pytest.approx(np.sqrt(first[c] * second[c]))
    assert len(evaluate.repeated(load(out))) == 1
    twice = [case.passes for case in load(out)]
    assert collect.main([*command, "--again"]) == 0
    assert [case.passes for case in load(out)] == twice  # a third measurement is neither
    assert len(out.read_text().splitlines()) == 12 + 2 * sum(len(case.passes[0]) for case in load(out))


def test_a_second_measurement_is_ranked_like_a_model() -> None:
    made = [Candidate(Choices(tile=8 << n)) for n in range(8)]
    first = {c: 1.0 + n for n, c in enumerate(made)}
    second = {c: 1.0 + (n + 1) % 8 for n, c in enumerate(made)}
    case = Recording("one", first, {}, passes=(first, second))
    (found,) = evaluate.repeated([case])
    assert found.pairs == pytest.approx(1 - 7 / 28)
    assert (found.top_1, found.top_5) == (1 / 8, 1.0)


def test_noise_is_not_held_against_a_model() -> None:
    made = [Candidate(Choices(tile=8 << n)) for n in range(8)]
    scores = {c: -float(n) for n, c in enumerate(made)}
    first = {c: 1.0 + n for n, c in enumerate(made)}
    swapped = {**first, made[0]: first[made[1]], made[1]: first[made[0]]}
    assert evaluate.certain_in_order(scores, (first, first)) == 1
    assert evaluate.certain_in_order(scores, (first, swapped)) == 1  # nobody knows which of the two is faster
    assert evaluate.certain_in_order({**scores, made[0]: -1.5}, (first, swapped)) == 1
    assert evaluate.certain_in_order({**scores, made[0]: -2.5}, (first, swapped)) == pytest.approx(1 - 1 / 27)
    assert evaluate.certain_in_order(scores, (swapped, swapped)) == pytest.approx(1 - 1 / 28)
    assert math.isnan(evaluate.certain_in_order(scores, ({}, {})))
    assert math.isnan(evaluate.certain_in_order(scores, ()))


def test_wrong_collections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "space.jsonl")]
    assert collect.main([*out, "--suite", "magic"]) == 2
    assert "got 'magic'" in capsys.readouterr().err
    assert collect.main([*out, "--ops", "spmm:wide"]) == 2
    assert "got 'spmm:wide'" in capsys.readouterr().err
    assert pretrain.main([str(tmp_path / "none.jsonl")]) == 2
    assert "got none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain.main(["space.jsonl", "--over", "others.jsonl"])
    assert "--searches" in capsys.readouterr().err


def test_pairs_in_order() -> None:
    seconds = np.array([1.0, 2.0, 3.0])
    assert pairs_in_order(-seconds, seconds) == 1
    assert pairs_in_order(seconds, seconds) == 0
    assert pairs_in_order(np.zeros(3), seconds) == 0.5


def test_the_evaluation_tells_models_apart(recorded: Path) -> None:
    cases = load(recorded)
    assert len(cases) == 8
    rankings = pretrain.held_out(cases, pretrain.partial(pretrain.train, rounds=30), "matrix")
    assert np.mean([r.pairs for r in rankings]) > 0.75
    assert np.mean([r.pairs for r in pretrain.held_out(cases, lambda _: RandomModel(), "family")]) < 0.6
    assert 1.0 <= safe_margin(rankings) <= 2.0
    whole = pretrain.train(cases, rounds=60)
    assert ranking(whole, cases[0]).top_5 > 0.9
    assert replayed(cases[0], "evolution", 0, 4, whole)[-1] > 0.85


def test_the_command_trains_a_file_that_a_search_takes(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    assert main(["pretrain", str(recorded), "--rounds", "2", "--spread", "9", "--seed", "1", "--out", str(out)]) == 0
    model = CostModel.load(out)
    assert model.about["families"] == ["attention_mask", "banded", "fem_blocks", "uniform"]
    A = sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
    inputs = {"A": A, "B": np.ones((30, 8), "float32")}
    result = tune_sparse(ops.spmm(), inputs, model=out, max_trials=1, progress=False)
    np.testing.assert_allclose(result.kernel(**inputs), A @ inputs["B"], rtol=1e-4)


@pytest.mark.slow
def test_the_script_trains_and_prints(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.json"
    small = ["--rounds", "6", "--out", str(out)]
    assert pretrain.main([str(recorded), "--evaluate", *small]) == 0
    text = capsys.readouterr().out
    for part in (
        "8 cases: 8 matrices of 4 families",
        "one family left out",
        "no statistics of the matrix",
        "nothing of the matrix",
        "untuned",
    ):
        assert part in text
    model = CostModel.load(out, names=matrix_names())
    assert model.about["margin"] >= 1
    assert model.about["operations"] == ["spmm:32"]


def test_records_with_other_features_are_left_out(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "features": {"tile": 1.0}}) + "\n" for line in lines))
    with pytest.raises(TuningError, match="collect them again"):
        pretrain.usable(load(path))


def test_storage_as_it_comes() -> None:
    inputs = inputs_of("uniform", 2_000)
    session = sessions.Session(ops.spmm(), inputs, None)
    assert own_storage(session.workload.signature, session.workload.arrays) == session.encoding.own
    assert session.operands.width == FEAT
    assert isinstance(inputs["A"], sp.csr_array)


@pytest.mark.slow
def test_searches_over_other_records_are_led_by_models_of_other_families(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = load(recorded)
    over, learnt = cases[:1], []

    def train(given: list[Recording], *, rounds: int) -> CostModel:
        learnt.append(given)
        return train_one(given, rounds=rounds)

    train_one = pretrain.train
    monkeypatch.setattr(pretrain, "train", train)
    text = pretrain.searches(cases, over, rounds=10, seeds=1)
    assert learnt == [[case for case in cases if case.family != over[0].family]]
    led, own = (next(line for line in text.splitlines() if name in line) for name in ("guided", "evolution"))
    assert led != own.replace("evolution", "guided")
    assert led.rstrip(" |").endswith("1.000 (1.00)")  # all trials there are


class ByNumber:
    """A model of the user's own, which counts the rows that it is asked about."""

    def __init__(self, scores: Any = None) -> None:
        self.rows, self.scores = 0, scores

    def predict(self, features: np.ndarray) -> Any:
        self.rows += len(features)
        return np.arange(len(features)) if self.scores is None else self.scores


@pytest.mark.slow
def test_a_search_asks_the_model_that_it_is_given(tmp_path: Path) -> None:
    A = sp.random_array((60, 50), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    inputs = {"A": A, "B": np.ones((50, 8), np.float32)}
    tune = partial(tune_sparse, ops.spmm(), inputs, isolate=False, progress=False)
    own = ByNumber()
    result = tune(model=own, max_trials=3)
    assert own.rows > 3
    np.testing.assert_allclose(result.kernel(**inputs), A @ inputs["B"], rtol=1e-4)
    shipped = pretrained()
    assert shipped is not None
    shipped.save(tmp_path / "model.json")
    assert len(tune(model=tmp_path / "model.json", max_trials=0).history) == 1
    (tmp_path / "bad.json").write_text("{}")
    for model, options, error, message in (
        (3, {}, ArgumentTypeError, "expected the path of a trained model"),
        (tmp_path / "bad.json", {}, TuningError, "expected a cost model"),
        (own, {"strategy": "random"}, ArgumentError, "expected none with strategy='random'"),
        (own, {"max_trials": 0}, ArgumentError, "where max_trials=0"),
        (ByNumber("high"), {"max_trials": 3}, TuningError, "one score for each row"),
    ):
        with pytest.raises(error, match=message):
            tune(model=model, **options)
