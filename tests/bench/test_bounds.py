# SPDX-License-Identifier: Apache-2.0
"""What a model sees of a program, the bounds of the gains that it expects, and what is said of them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import SparseTensor, formats, ops
from sparsetir.codegen.target import emulating_target
from sparsetir.errors import ArgumentError
from sparsetir.formats import heuristics
from sparsetir.formats.heuristics import Conversion
from sparsetir.ir.views import decode
from sparsetir.runtime import adaptive
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import Choices
from sparsetir.tuning import Candidate, predict, tune_sparse
from sparsetir.tuning.features import Operands, matrix_names
from sparsetir.tuning.model import CostModel, pretrained
from sparsetir.tuning.predict import Bounds, bounds_of, judge
from sparsetir.tuning.records import Recording
from sparsetir.tuning.search import Search
from sparsetir.tuning.train import dataset, pretrain
from sparsetir.tuning.train import dataset as plan
from sparsetir.tuning.train.dataset import is_data_set, recordings
from sparsetir.tuning.train.evaluate import Ranking, folds
from sparsetir.tuning.train.replay import Recorded, stopped, stops
from sparsetir.tuning.work import USUAL, CoreRates, Work
from sparsetir.workloads import suite

pytestmark = pytest.mark.usefixtures("quick_comparisons")

SIZES = {"m": 1000, "n": 500, "nnz": 20_000, "feat": 64}


# --- programs ---------------------------------------------------------------------------------------------------


def test_the_work_of_a_product() -> None:
    work = Work.of(decode(ops.spmm()), SIZES)
    assert (work.flops, work.points, work.entries) == (2 * 20_000 * 64, 20_000 * 64, 20_000)
    assert (work.width, work.inner, work.sums, work.is_sparse, work.itemsize) == (64, 64, False, False, 4)
    assert work.gathered is not None
    assert (work.gathered.points, work.gathered.elements) == (20_000 * 64, 500 * 64)
    assert [a.elements for a in work.results] == [1000 * 64]


def test_programs_differ_by_what_they_do_and_not_by_their_names() -> None:
    sampled = Work.of(decode(ops.sddmm("float64")), SIZES)
    assert (sampled.sums, sampled.is_sparse, sampled.itemsize) == (True, True, 8)
    vector = Work.of(decode(ops.spmv("bfloat16")), SIZES)
    assert (vector.width, vector.sums, vector.itemsize) == (1, True, 2)
    tensor = Work.of(decode(ops.mttkrp()), {"n_i": 9, "n_j": 8, "n_k": 7, "fibers": 30, "nnz": 90, "rank": 16})
    assert len(tensor.of_kind("gather")) == 2
    renamed = ops.spmm().with_attr("global_symbol", "other")
    assert Work.of(decode(renamed), SIZES) == Work.of(decode(ops.spmm()), SIZES)
    assert len({Work.of(decode(suite.draw_program(n).program), SIZES).flops for n in range(8)}) > 2


@pytest.mark.parametrize("sizes", [{}, {"m": 0, "n": 0, "nnz": 0, "feat": 0}, {**SIZES, "nnz": 0}])
def test_the_work_of_nothing_has_finite_numbers(sizes: dict[str, int]) -> None:
    for program in (ops.spmm(), ops.sddmm(), ops.spmv()):
        work = Work.of(decode(program), sizes)
        assert all(np.isfinite(value) for value in work.numbers(USUAL, 1.0).values())
        assert Operands.of(work, 1).threads == 1


def test_amounts_are_times_on_the_rates_of_the_machine() -> None:
    work = Work.of(decode(ops.spmm()), {**SIZES, "feat": 512})
    usual, fast = (
        work.numbers(rates, 1.0) for rates in (USUAL, CoreRates(*(4 * n for n in (100e9, 200e9, 60e9, 25e9))))
    )
    assert usual["time_floor"] - fast["time_floor"] == pytest.approx(2)
    assert {n: v for n, v in usual.items() if n != "time_floor"} == {n: v for n, v in fast.items() if n != "time_floor"}
    assert work.numbers(USUAL, 2.0)["time_floor"] > usual["time_floor"]


# --- bounds -----------------------------------------------------------------------------------------------------


def ranked(rng: np.random.Generator, count: int, wrong: float = 0.2) -> list[Ranking]:
    """Rankings of made-up cases of ten families, whose gains are wrong by a normal error."""
    found = []
    for n in range(count):
        case = Recording(f"c{n}", {}, {}, family=f"f{n % 10}", kind=f"k{n % 3}")
        actual, row = (
            rng.normal(0.3, 0.3),
            {"work_is_sparse": float(n % 2), "work_run": 9.0, "row_cv": float(n % 10) ** 2},
        )
        gain = float(np.exp(actual + wrong * rng.normal()))
        found.append(Ranking(case, 1.0, 1.0, 1.0, gain=gain, actual=float(np.exp(actual)), chosen=row))
    return found


def test_bounds_hold_as_often_as_they_should() -> None:
    rng = np.random.default_rng(0)
    bounds, new = predict.Bounds.fit(ranked(rng, 2000)), ranked(rng, 2000)
    told = np.array([bounds.interval(np.log(r.gain), r.chosen) for r in new])
    actual = np.log([r.actual for r in new])
    assert 0.88 < np.mean(actual >= told[:, 0]) < 0.92
    assert 0.88 < np.mean((told[:, 1] <= actual) & (actual <= told[:, 2])) < 0.92
    assert set(bounds.margins) == {"", "rows near", "rows far", "entries near", "entries far"}


@pytest.mark.slow
def test_coverage_is_of_families_that_bounds_were_not_made_of() -> None:
    found = ranked(np.random.default_rng(1), 1000)
    table = predict.coverage(found, "family")
    assert set(table) == {*(f"f{n}" for n in range(10)), "all"}
    assert len(table["all"].held) == 1000
    assert 0.86 < np.mean(table["all"].held) < 0.94
    assert all(gain > -1 for gain in table["all"].taken)
    text = predict.cells(table, "family")
    assert text[-1][0] == "all"
    assert all(len(row) == len(text[0]) for row in text)
    assert predict.Coverage().cells()[0] == "0"


def of_operations(rng: np.random.Generator, count: int, wrong: dict[str, float]) -> list[Ranking]:
    """Rankings of made-up cases of some operations, and by how much the expected gains of each are wrong."""
    found = []
    for n in range(count):
        kind = list(wrong)[n % len(wrong)]
        row = {"work_gathers": float(list(wrong).index(kind)), "work_run": 9.0, "row_cv": float(n % 7)}
        actual = rng.normal(0.2, 0.2)
        gain = float(np.exp(actual + wrong[kind] * rng.normal()))
        case = Recording(f"c{n}", {}, {}, family=f"f{n % 7}", kind=kind)
        found.append(Ranking(case, 1.0, 1.0, 1.0, gain=gain, actual=float(np.exp(actual)), chosen=row))
    return found


@pytest.mark.slow
def test_bounds_of_an_operation_that_is_not_known_are_those_of_the_worst_that_was_left_out() -> None:
    rng, kinds = np.random.default_rng(2), ("a", "b", "c", "d")
    familiar = of_operations(rng, 1600, dict.fromkeys(kinds, 0.05))
    strange = of_operations(rng, 1600, dict(zip(kinds, (0.2, 0.2, 0.4, 0.4), strict=True)))
    bounds = predict.Bounds.fit(familiar, strange=strange)
    assert [each[0] for each in bounds.known] == [0, 1, 2, 3]
    as_known, not_known = ({"work_gathers": n, "work_run": 9.0} for n in (1.0, 7.0))
    assert bounds.interval(0.0, as_known) == predict.Bounds.fit(familiar).interval(0.0, as_known)
    assert bounds.interval(0.0, not_known)[0] < -0.4 < bounds.interval(0.0, as_known)[0]
    again = predict.Bounds(**json.loads(json.dumps(bounds.as_dict())))
    assert again.interval(0.0, not_known) == bounds.interval(0.0, not_known)
    assert again.interval(0.0, as_known) == bounds.interval(0.0, as_known)
    narrow, wide = predict.coverage(familiar, "kind"), predict.coverage(strange, "kind", familiar=familiar)
    assert 0.86 < np.mean(narrow["all"].held) < 0.94
    assert 0.88 < np.mean(wide["all"].held)
    assert np.mean(wide["all"].inside) > 0.88 > np.mean(predict.coverage(strange, "kind")["all"].inside) - 0.05


def test_the_shipped_model_knows_which_operations_it_knows() -> None:
    model = pretrained()
    assert model is not None
    bounds = bounds_of(model.about)
    assert bounds is not None
    programs = {name: getattr(ops, name)() for name in ("spmm", "spmv", "sddmm", "mttkrp")}
    programs |= {f"drawn_{n}": suite.draw_program(n).program for n in range(plan.PROGRAMS)}
    rows = {name: Work.of(decode(program), {}).numbers(USUAL, 1.0) for name, program in programs.items()}
    known = set(map(tuple, bounds.known))
    called = {name: {predict.operation({**row, "work_run": run}) for run in (1.0, 6.0)} for name, row in rows.items()}
    assert known <= set().union(*called.values())
    # Programs of several operands, over the entries only, have one schedule: nobody learns anything from them.
    assert {name for name, each in called.items() if each & known} >= set(rows) - {"drawn_4", "drawn_5"}
    product = {**rows["spmm"], "work_run": 6.0}
    margins = [bounds.margin(row) for row in (product, {**product, "work_gathers": 9.0})]
    assert bounds.least == margins[0] < margins[1]


def test_few_cases_have_wide_bounds() -> None:
    assert predict.quantiles([], 0.9) == (-np.inf, np.inf, np.inf)
    assert predict.quantiles([0.1, 0.5], 0.9) == (0.1, 0.5, 0.5)
    nothing = predict.Bounds.fit([])
    assert nothing.margin({}) == np.inf
    assert nothing.interval(1.0, {})[0] == -np.inf


def test_folds_in_groups() -> None:
    cases = [Recording(str(n), {}, {}, matrix=str(n)) for n in range(7)]
    found = list(folds(cases, "matrix", 3))
    assert len(found) == 3
    assert sorted(case.name for _, own in found for case in own) == [str(n) for n in range(7)]
    assert all(not set(others) & set(own) for others, own in found)


# --- data sets and models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of a few small matrices."""
    path = tmp_path_factory.mktemp("points") / "points.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SURE_FORMATS": 1, "OTHER_FORMATS": 0, "BURST": 1e-5, "OWN_CHOICES": 8}.items():
            patch.setattr(dataset, name, value)
        patch.setattr(plan, "COMBINATIONS", ((1, "spmm", "float32", (8,), 1), (1, "spmv", "float32", (1,), 1)))
        made = [plan.CollectionSource(n, n, lambda n=n: suite.generate(n, 700)) for n in ("uniform", "banded", "arrow")]
        dataset.collect(path, made, programs=2)
    return path


@pytest.mark.slow
def test_a_data_set_is_trained_on(points: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_data_set(points)
    cases = recordings(points)
    assert {case.kind for case in cases} <= {"spmm", "spmv"}
    assert all(case.names == matrix_names() and case.untuned is not None for case in cases)
    assert all(len(case.passes) == 2 and case.threads == 1 and case.dtype == "float32" for case in cases)
    out = tmp_path / "model.json"
    command = [str(points), "--rounds", "3", "--spread", "9", "--evaluate", "--out", str(out)]
    assert pretrain.main([*command, "--plots", str(tmp_path / "pictures")]) == 0
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {"calibration.png", "learning.png", "searches.png"}
    text = capsys.readouterr().out
    for part in ("one family left out", "one operation left out", "gain above its bound", "nothing of the matrix"):
        assert part in text
    model = CostModel.load(out, names=matrix_names())
    assert set(model.about["bounds"]["margins"]) == {""}


@pytest.mark.slow
def test_what_the_model_thinks_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsetir.tuning import session as sessions

    names = matrix_names()
    rows = np.zeros((200, len(names)), np.float32)
    rows[::2, names.index("is_bsr")] = 1
    seconds = np.where(rows[:, names.index("is_bsr")] == 1, 1.0, 2.0)
    bounds = {"margins": {"": [-0.2, 0.1, 0.3]}}
    model = CostModel.fit(rows, seconds, names=names, eta=0.5)
    model = CostModel(model.booster, names, about={"bounds": bounds})
    monkeypatch.setattr(sessions, "prior_for", lambda _encoding: model)
    A: Any = suite.generate("fem_blocks", 3_000)
    inputs = {"A": A, "B": np.ones((A.shape[1], 32), np.float32)}
    result = tune_sparse(ops.spmm(), inputs, max_trials=0, formats=[formats.bsr(3, 3)], progress=False)
    assert result.is_guess
    assert result.judgement is not None
    assert result.judgement.gain == pytest.approx(2.0, rel=0.05)
    assert result.judgement.bound == pytest.approx(result.judgement.gain * np.exp(-0.1))
    assert result.judgement.low < result.judgement.bound < result.judgement.gain < result.judgement.high
    assert next(iter(result.judgement.decided)) == "is_bsr"
    assert "nine matrices in ten" in result.explain()
    assert "what decided in it" in result.explain()
    assert "is_bsr 2" in result.explain() or "is_bsr 1.9" in result.explain()
    unsure = CostModel(model.booster, names, about={"bounds": {"margins": {"": [-0.2, 0.9, 1.0]}}})
    monkeypatch.setattr(sessions, "prior_for", lambda _encoding: unsure)
    kept = tune_sparse(ops.spmm(), inputs, max_trials=0, formats=[formats.bsr(3, 3)], progress=False)
    assert kept.best == kept.untuned
    assert kept.judgement is None


def test_models_without_bounds_judge_nothing() -> None:
    assert judge(CostModel(None), None, None, None) is None  # type: ignore[arg-type]


# --- what is decided --------------------------------------------------------------------------------------------


class Known:
    """A space of candidates with times that a model foretells."""

    def __init__(self, count: int) -> None:
        self.listed = [Candidate(Choices(chunks=n + 1)) for n in range(count)]

    def search(self, wrong: float) -> Search:
        case = Recording("c", {c: 1.0 + n for n, c in enumerate(self.listed)}, {})
        rows = lambda given: np.array([[float(self.listed.index(c))] for c in given])  # noqa: E731
        prior = SimpleNamespace(predict=lambda found: -np.log(1.0 + found[:, 0]) * (1 + wrong * (found[:, 0] % 2)))
        return Search(Recorded(case), features=rows, strategy="guided", prior=prior)


@pytest.mark.parametrize("wrong", [0.0, 0.9])
def test_a_search_ends_when_nothing_better_is_likely(wrong: float) -> None:
    known = Known(40)
    search = known.search(wrong)
    assert search.chance() == 1.0
    chances = []
    while len(search.told) < 24:
        for candidate in search.ask():
            search.tell(candidate, 1.0 + known.listed.index(candidate))
        chances.append(search.chance())
    assert chances[0] == 1.0
    assert known.listed[0] in search.told
    assert (chances[-1] < 0.05) == (wrong == 0.0) or chances[-1] < chances[1]


def test_nothing_is_left_to_be_better() -> None:
    known = Known(9)
    search = known.search(0.0)
    for n, candidate in enumerate(known.listed):
        search._foretold[candidate] = float(np.log(1.0 + n))
        search.tell(candidate, 1.0 + n)
    assert search.chance() == 0.0


def test_until_is_a_probability() -> None:
    A = suite.generate("uniform", 400)
    with pytest.raises(ArgumentError, match="stop_probability: expected a probability from 0 to 1, got 2"):
        tune_sparse(ops.spmv(), {"A": A, "x": np.ones(A.shape[1], np.float32)}, stop_probability=2)


def kernel_and_inputs() -> tuple[Any, dict[str, Any]]:
    A = suite.generate("fem_blocks", 3_000)
    kernel = sparsetir.build(ops.spmm(), expected_calls=1000)
    return kernel, {"A": A, "B": np.ones((A.shape[1], 32), np.float32)}


def test_the_model_is_asked_only_where_calls_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, inputs = kernel_and_inputs()
    found = Conversion(formats.bsr(3, 3), 10.0)
    monkeypatch.setattr(predict, "pattern", lambda _matrix: pytest.fail("asked"))
    assert predict.chosen(kernel, inputs["A"], inputs, found, calls=50) == [found]
    assert predict.chosen(kernel, inputs["A"], inputs, None, calls=50) == []


def test_what_the_model_expects_more_of_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, inputs = kernel_and_inputs()
    wanted = "bsr(r=3, c=3)"

    def gains(gain: float) -> Any:
        def of(_encoding: Any, candidates: list[Candidate]) -> np.ndarray:
            return np.array([gain if repr(c.format) == wanted else 1.0 for c in candidates])

        return of

    ruled, calls = Conversion(formats.ell(), 10.0), 10**7
    for gain, first in ((2.0, wanted), (1e-3, "ell()")):
        monkeypatch.setattr(predict, "_gains", gains(gain))
        found = predict.chosen(kernel, inputs["A"], inputs, ruled, calls=calls)
        assert repr(found[0].format) == first
        assert "ell()" in {repr(conversion.format) for conversion in found}
        assert len(found) == predict.MOST_TRIED
    empty = sp.csr_array((4, inputs["A"].shape[1]), dtype=np.float32)
    assert predict.chosen(kernel, empty, {**inputs, "A": empty}, None, calls=calls) == []


@pytest.mark.parametrize("calls", [10**3, 10**4, 10**5, 10**7])
@pytest.mark.parametrize("gains", [[1.0], [1.0, 0.2, 0.1], [1.0, 0.9, 0.95], [1.0, 1.3, 1.25, 1.2], [1.0, 4.0, 1.1]])
def test_trying_costs_no_more_than_it_may_save(gains: list[float], calls: int) -> None:
    pool = [(None, {}), *((formats.bsr(n, n), {}) for n in range(2, len(gains) + 1))]
    seconds, converting, spread = 1e-4, 0.05, 0.2
    expected = np.array(gains)
    found = predict.worth_trying(
        pool, expected, None, calls=calls, seconds=seconds, converting=converting, spread=spread
    )
    assert len(found) <= predict.MOST_TRIED
    assert all(conversion.calls <= calls for conversion in found)
    likeliest = max(gains[1:], default=0.0)
    saved = calls * seconds * predict.expected_saving(likeliest, spread) if likeliest else 0.0
    assert bool(found) == (saved >= heuristics.COMPOSING + converting)
    assert not found or found[0].format == pool[gains.index(likeliest)][0]


def test_the_second_that_is_tried_is_of_another_format() -> None:
    pool = [(None, {}), (None, {"unroll": 4}), (None, {"prefetch": 8}), (formats.ell(), {})]
    how = {"calls": 10**7, "seconds": 1e-3, "converting": 0.0, "spread": 0.2}
    found = predict.worth_trying(pool, np.array([1.0, 1.2, 1.19, 0.9]), None, **how)
    assert [(c.format, c.choices) for c in found] == [pool[1], pool[3], pool[2]]


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5])
def test_the_expected_saving_is_that_of_draws(spread: float) -> None:
    rng = np.random.default_rng(0)
    last = 0.0
    for gain in (0.7, 0.9, 1.0, 1.1, 1.5, 3.0):
        drawn = np.maximum(np.log(gain) + spread * rng.standard_normal(200_000), 0.0)
        saving = predict.expected_saving(gain, spread)
        assert saving == pytest.approx(-np.expm1(-drawn.mean()), abs=0.01)
        assert saving > last
        last = saving


@pytest.mark.parametrize("order", ["csf", "coo"])
def test_a_tensor_is_tried_in_other_orders_of_its_modes(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    coords = np.unique(rng.integers(0, 20, (600, 3)), axis=0).T
    tensor = SparseTensor.from_coo(coords, rng.random(coords.shape[1], np.float32), (20, 20, 20), format=order)
    factors = {name: rng.random((20, 16), np.float32) for name in ("B", "C")}
    monkeypatch.setattr(predict, "ASKING", 0.0)
    monkeypatch.setattr(adaptive, "SHORT_CALL", 0.0)
    monkeypatch.setattr(adaptive, "SAMPLED_SECONDS", 0.0)
    bound = sparsetir.build(ops.mttkrp(), expected_calls=10**9).bind(T_=tensor)
    expected = np.einsum("ijk,jr,kr->ir", tensor.to_dense(), factors["B"], factors["C"])
    np.testing.assert_allclose(bound(**factors), expected, rtol=1e-4)
    assert bound.explain().startswith("on trial: as passed, ")
    assert "csf(order=" in bound.explain()
    for _ in range((predict.MOST_TRIED + 1) * (1 + 2 * adaptive.BURST)):
        np.testing.assert_allclose(bound(**factors), expected, rtol=1e-4)
    assert "kept" in bound.explain()


def test_the_model_may_choose_another_schedule_only(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, inputs = kernel_and_inputs()
    asked: list[Candidate] = []

    def gains(_encoding: Any, candidates: list[Candidate]) -> np.ndarray:
        asked.extend(candidates)
        return np.array([2.0 if c.format is None and c.choices.unroll == 4 else 1.0 for c in candidates])

    monkeypatch.setattr(predict, "_gains", gains)
    found = predict.chosen(kernel, inputs["A"], inputs, None, calls=10**7)[0]
    assert (found.format, found.choices["unroll"]) == (None, 4)
    assert len(set(asked)) == len(asked)
    assert asked[0].format is None  # what `build` makes comes first
    # Announced calls convert at the first one: both kernels are timed, and results are the same.
    monkeypatch.setattr(predict, "chosen", lambda *_a, **_k: [found])
    monkeypatch.setattr(adaptive, "SHORT_CALL", 0.0)
    many = sparsetir.build(ops.spmm(), expected_calls=10**7).bind(A=inputs["A"])
    for _ in range(2 * adaptive.MOST_SAMPLES + 4):
        np.testing.assert_allclose(many(B=inputs["B"]), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)
    assert "unroll=4" in many.explain()
    preferring = Kernel(kernel.func, kernel.compiled, preferred=found.choices)
    assert pickle.loads(pickle.dumps(preferring)).suitable(preferring.prepare(inputs))["unroll"] == 4


@pytest.mark.parametrize(("feat", "format", "names"), [(1, None, {"lanes"}), (1, formats.ell(), set())])
def test_schedules_that_are_looked_at_make_a_difference(feat: int, format: Any, names: set[str]) -> None:
    changes = predict._schedules(Choices(lanes=4), feat, format)
    assert changes[0] == {}
    assert {name for change in changes for name in change} == names
    assert {"lanes": 4} not in changes


def test_panels_are_looked_at_for_wide_rows_of_the_program_as_it_is() -> None:
    has_panels = lambda feat, format: any("panel" in c for c in predict._schedules(Choices(), feat, format))  # noqa: E731
    assert has_panels(128, None)
    assert not has_panels(64, None)
    assert not has_panels(128, formats.ell())


def test_margins_are_no_less_than_what_machines_left_out_need() -> None:
    row = {"work_run": 2.0}
    assert Bounds({"": (-0.1, 0.0, 0.1)}).margin(row) == 1.0
    assert Bounds({"": (-0.1, 0.0, 0.1)}, least=1.5).margin(row) == 1.5
    assert Bounds({"": (-0.1, 1.0, 1.1)}, least=1.5).margin(row) == pytest.approx(np.e)
    assert Bounds(**Bounds({"": (0.0, 0.0, 0.0)}, least=1.3).as_dict()).least == 1.3


@pytest.mark.slow
def test_a_kernel_over_what_the_model_chose_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "chosen", lambda *_a, **_k: [Conversion(formats.sell(4, 8), 1.0)])
    kernel, inputs = kernel_and_inputs()
    bound = kernel.bind(A=inputs["A"])
    np.testing.assert_allclose(bound(B=inputs["B"]), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-4)
    assert "sell" in repr(bound)


def test_the_least_margin_suits_every_machine() -> None:
    """It is that of the machine with most slower ones, however few cases it has."""
    few = [ranking_of("one", gain, actual) for gain, actual in [(1.25, 0.5), *[(1.4, 1.4)] * 9]]
    many = [ranking_of("other", 1.4, 1.4) for _ in range(2000)]
    assert pretrain.cautious(many) == 1.0
    assert pretrain.cautious([*many, *few]) == 1.3


def ranking_of(mcpu: str, gain: float, actual: float) -> Ranking:
    return Ranking(Recording("c", {}, {}, mcpu=mcpu), 1.0, 1.0, 1.0, gain=gain, actual=actual)


def test_stopped_searches_are_replayed() -> None:
    known = Known(12)
    numbers = {c: 1.0 + n for n, c in enumerate(known.listed)}
    rows = {c: np.array([float(n)]) for n, c in enumerate(known.listed)}
    case = Recording("c", numbers, rows)
    found = stopped(case, 0, 0.0)
    assert (found.trials, found.reached, found.missed) == (12, 1.0, False)
    text = stops([case], (0.0, 1.1), 2, lambda _case: None)
    assert text[1][1] == "100%"
    assert len(text) == 3


@pytest.mark.parametrize(("dtype", "operand"), [("bfloat16", "bfloat16"), ("int8", "uint8"), ("float32", "float32")])
def test_blocks_for_tiles_are_tried_where_the_target_has_tiles(
    monkeypatch: pytest.MonkeyPatch, dtype: str, operand: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(predict, "tile_formats", lambda matrix: asked.append(matrix) or heuristics.tile_formats(matrix))
    mask = np.kron(np.random.default_rng(0).random((16, 96)) < 0.2, np.ones((16, 1)))
    A = SparseTensor.from_scipy(sp.csr_array(mask, dtype="float32")).astype(dtype)
    program = ops.quantized_spmm(dtype, operand) if dtype == "int8" else ops.spmm(dtype)
    inputs = {"A": A, "B": np.ones((96, 64), operand), "scale": np.ones(256, "float32")}
    if dtype != "int8":
        del inputs["scale"]
    for target, has_tiles in ((emulating_target(), True), ({"kind": "llvm", "mcpu": "x86-64-v3"}, False)):
        asked.clear()
        found = predict.chosen(sparsetir.build(program, target), A, inputs, None, calls=1e9)
        assert bool(asked) == (has_tiles and dtype != "float32")
        assert not asked or formats.bsr(16, 1) in [conversion.format for conversion in found]
