# SPDX-License-Identifier: Apache-2.0
"""Schedules with knobs: what may be chosen, what a search makes of it, and what is refused in words."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import s_tir

import sparsetir
from clocks import keep_time
from sparsetir import formats, ops
from sparsetir.codegen.cache import write_cache
from sparsetir.errors import ArgumentTypeError, ScheduleError, SparseTIRError, TuningError
from sparsetir.lower import as_module
from sparsetir.schedules import Choices, leaves
from sparsetir.tuning import Candidate, Database, Key, Record, autotune, features, tune_sparse
from sparsetir.tuning import session as sessions
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.features import WorkloadEncoding
from sparsetir.tuning.knobs import Config, Knobs, LoopSplit, Template, factorisations, powers
from sparsetir.tuning.model import CostModel, of_width
from sparsetir.tuning.records import Recording
from sparsetir.tuning.space import Space
from sparsetir.tuning.train import replay
from sparsetir.tuning.workers import local
from sparsetir.tuning.workers.local import WORKER, LocalWorker, RemoteWorker

pytestmark = pytest.mark.usefixtures("quick_comparisons")

building = importlib.import_module("sparsetir.codegen.cache")

FEAT = 16
BLOCKS = formats.bsr(2, 2)
KEY = Key("spmm", "p", "s", {"m": 3}, "float32", "llvm", "a machine", 2, "1")


def arguments() -> dict[str, Any]:
    A = sp.random_array((60, 50), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    return {"A": A, "B": np.random.default_rng(1).standard_normal((50, FEAT)).astype("float32")}


def fixed(feat: int = FEAT) -> Any:
    """SpMM with a number of features filled in."""
    func = ops.spmm()
    return func.specialize({param: feat for param in func.params if str(param.name) == "feat"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Kernels of a test go to a folder of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPARSETIR_CACHE", str(folder))
    yield folder
    write_cache()


def loops(sch: s_tir.Schedule) -> list[Any]:
    """Loops around the innermost block; the last one runs over a row of the result."""
    return list(sch.get_loops(sch.get_sblock("spmm")))


@sparsetir.template
def tiled(cfg: Knobs, sch: s_tir.Schedule) -> None:
    """A tile of a row in vectors."""
    *others, k = loops(sch)
    cfg.define_split("tile", k, max_factor=16)
    cfg.define_knob("chunks", [0, 2])
    outer, lanes = cfg["tile"].apply(sch, k)
    sch.reorder(outer, *others, lanes)
    sch.vectorize(lanes)
    if cfg["chunks"]:
        (i,) = sch.get_loops(sch.get_sblock("spmm_0"))
        sch.annotate(i, "sparsetir.chunks", cfg["chunks"])


def knobs_of(define: Callable[[Knobs, s_tir.Schedule], Any], func: Any = None) -> dict[str, Any]:
    """The knobs that a function defines, by default on SpMM with a fixed number of features."""
    return sparsetir.template(define).space(sparsetir.lower(fixed() if func is None else func, stage=2))


# --- values of knobs ------------------------------------------------------------------------------------------


def test_a_configuration_is_a_value() -> None:
    config = Config.of({"b": [4, 8], "a": np.int64(3)})
    assert config == Config.of({"a": 3, "b": (4, 8)})
    assert len({config, Config.of(json.loads(json.dumps(config.as_dict())))}) == 1
    assert config["b"] == (4, 8)
    assert config.changed(a=4).as_dict() == {"a": 4, "b": (4, 8)}
    assert pickle.loads(pickle.dumps(config)) == config
    assert str(Candidate(config, BLOCKS)) == "bsr(r=2, c=2) a=3 b=(4, 8)"
    assert str(Candidate(config)) == "as it is a=3 b=(4, 8)"
    with pytest.raises(ArgumentTypeError, match=r"a number, a text, None or a tuple of those.*got ndarray"):
        Config.of({"a": np.ones(2)})


def test_factors_are_every_product() -> None:
    assert list(factorisations(8, 2)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert list(factorisations(12, 2, 3)) == [(12, 1), (6, 2), (4, 3)]
    found = list(factorisations(48, 3))
    assert len(set(found)) == len(found) == 45
    assert all(np.prod(factors) == 48 for factors in found)
    assert next(iter(factorisations(7, 3))) == (7, 1, 1)


def test_powers_of_two_leave_the_outermost_loop_open() -> None:
    assert list(powers(6, 2, None)) == [(None, 1), (None, 2), (None, 4)]
    assert list(powers(None, 2, 4)) == [(None, 1), (None, 2), (None, 4)]
    assert list(powers(4, 3, 2)) == [(None, 1, 1), (None, 1, 2), (None, 2, 1), (None, 2, 2)]


def test_what_is_asked_for_is_what_is_searched() -> None:
    def define(cfg: Knobs, sch: s_tir.Schedule) -> None:
        k = loops(sch)[-1]
        assert cfg.define_split("a", k) == cfg["a"] == LoopSplit((FEAT, 1))
        assert cfg.define_split("b", k, policy="power2", max_factor=2) == (None, 1)
        assert cfg.define_split("c", 6, num_outputs=3, candidates=[(None, 2, 3), [6, 1, 1]]) == (None, 2, 3)
        assert cfg.define_knob("d", ["x", "y", "x"]) == "x"
        assert cfg.define_knob("d", ["x", "y"]) == "x"
        cfg.define_knob("one", [4])

    assert knobs_of(define) == {
        "a": ((16, 1), (8, 2), (4, 4), (2, 8), (1, 16)),
        "b": ((None, 1), (None, 2)),
        "c": ((None, 2, 3), (6, 1, 1)),
        "d": ("x", "y"),
    }


def test_values_that_are_decided_are_not_searched() -> None:
    second = sparsetir.lower(fixed(), stage=2)
    assert list(tiled.space(second)) == ["tile", "chunks"]
    assert list(tiled.with_values(tile=(4, 4)).space(second)) == ["chunks"]
    assert list(tiled.with_values(tile=(4, 4)).with_values(chunks=2).space(second)) == []


# --- building -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_template_builds_with_values_and_without() -> None:
    inputs = arguments()
    for schedule in (tiled, tiled.with_values(tile=[2, 8]), tiled.with_values(tile=(1, 16), chunks=2)):
        kernel = sparsetir.build(fixed(), schedule=schedule)
        np.testing.assert_allclose(kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)
    assert "T.vectorized(16)" in kernel.script(stage=3)
    assert "T.parallel(2)" in kernel.script(stage=3)


def test_a_size_of_the_call_takes_an_open_split() -> None:
    kernel = sparsetir.build(ops.spmm(), schedule=tiled.with_values(tile=(None, 8)))
    inputs = arguments()
    inputs["B"] = np.ones((50, 21), "float32")
    np.testing.assert_allclose(kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)


def test_a_template_may_return_another_schedule() -> None:
    @sparsetir.template
    def on_a_copy(cfg: Knobs, sch: s_tir.Schedule) -> s_tir.Schedule:
        copy = sch.copy()
        copy.split(loops(copy)[-1], list(cfg.define_split("tile", FEAT, candidates=[(4, 4)])))
        return copy

    assert "k_1" in sparsetir.build(fixed(), schedule=on_a_copy).script(stage=2)


@pytest.mark.slow
def test_kernels_of_functions_are_cached_by_what_they_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    building.forget()
    width = 4

    def split(sch: s_tir.Schedule) -> None:
        sch.split(loops(sch)[-1], [None, width])

    first = sparsetir.build(fixed(), schedule=split).compiled
    assert sparsetir.build(fixed(), schedule=lambda sch: split(sch)).compiled is first
    width = 8
    assert sparsetir.build(fixed(), schedule=split).compiled is not first
    same, other = (tiled.with_values(tile=(n, FEAT // n)) for n in (2, 4))
    compiled = sparsetir.build(fixed(), schedule=same).compiled
    assert sparsetir.build(fixed(), schedule=same).compiled is compiled
    assert sparsetir.build(fixed(), schedule=other).compiled is not compiled
    write_cache()
    if not list(cache.glob("*.so")):
        pytest.skip("no C compiler to write the cache with")
    building.forget()
    monkeypatch.setattr(building.Compiled, "compile", lambda self: pytest.fail("it is on disk"))
    sparsetir.build(fixed(), schedule=same)


def test_templates_are_pickled_by_their_names() -> None:
    there = pickle.loads(pickle.dumps(tiled.with_values(chunks=2)))
    assert isinstance(there, Template)
    assert (there.function, there.values) == (tiled.function, Config.of({"chunks": 2}))
    with pytest.raises(pickle.PicklingError, match=r"is not found as .*<locals>"):
        pickle.dumps(sparsetir.template(lambda cfg, sch: None))


def make(width: int) -> Template:
    @sparsetir.template
    def of_width(cfg: Knobs, sch: s_tir.Schedule) -> None:
        cfg.define_knob("lanes", [width, FEAT])

    return of_width


def test_records_tell_templates_apart_by_their_text() -> None:
    assert "sch.vectorize(lanes)" in tiled.text
    assert 'get_sblock("spmm")' in tiled.text  # of the function it calls
    assert make(4).text == make(4).text
    assert make(4).text != make(8).text
    assert tiled.with_values(chunks=2).text != tiled.text
    typed: dict[str, Any] = {}
    exec("def typed(cfg, sch):\n    pass", typed)
    unknown = sparsetir.template(typed["typed"])
    assert unknown.text == unknown.text
    assert unknown.text != sparsetir.template(typed["typed"]).text


# --- what is refused ------------------------------------------------------------------------------------------


def twice(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_knob("unroll", [1, 2])
    cfg.define_knob("unroll", [1, 4])


def unknown_knob(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_knob("unroll", [1, 2])
    cfg["unrol"]


def returns_a_number(cfg: Knobs, sch: s_tir.Schedule) -> int:
    return 3


def wrong_split(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_split("tile", loops(sch)[-1], candidates=[(4, 8)])


def wrong_length(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_split("tile", loops(sch)[-1], candidates=[(2, 2, 4)])


def other_loop(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_split("tile", 8)
    cfg["tile"].apply(sch, loops(sch)[-1])


def no_value(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_knob("unroll", [])


def a_text(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_knob("order", "ijk")


def no_loop(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_split("tile", "k")


def no_policy(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_split("tile", 8, policy="verbose")


def one_output(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_split("tile", 8, num_outputs=1)


def no_name(cfg: Knobs, sch: s_tir.Schedule) -> None:
    cfg.define_knob("tile k", [1])


def refused_by_tvm(cfg: Knobs, sch: s_tir.Schedule) -> None:
    sch.reorder(loops(sch)[-1], sch.get_loops(sch.get_sblock("spmm_0"))[0])


@pytest.mark.parametrize(
    ("define", "words"),
    [
        (twice, "'unroll' is defined twice, as one of 1, 2 and of 1, 4"),
        (unknown_knob, "no knob 'unrol' is defined; there are unroll"),
        (
            returns_a_number,
            "template returns_a_number changes the schedule .* returns a schedule or nothing, got int",
        ),
        (wrong_split, r"split 'tile' is \(4, 8\), which makes 32 steps; the loop has 16"),
        (wrong_length, r"steps of 2 loops, one of them None .* got \(2, 2, 4\)"),
        (other_loop, r"split 'k' is \(8, 1\), which makes 8 steps; the loop has 16"),
        (no_value, "knob 'unroll' needs at least one value"),
        (a_text, "knob 'order' needs a list of values, got 'ijk'"),
        (no_loop, "a loop as sch.get_loops gives it, or a number of steps, got str"),
        (no_policy, "policies factors, power2, got 'verbose'"),
        (one_output, "at least 2 loops, got num_outputs=1"),
        (no_name, "an identifier such as tile_k, got 'tile k'"),
        (refused_by_tvm, "^ScheduleError: "),
    ],
)
def test_templates_that_are_wrong(define: Any, words: str) -> None:
    with pytest.raises(SparseTIRError, match=words):
        knobs_of(define)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tile": (4, 32)}, r"split 'tile' is \(4, 32\), which makes 128 steps; the loop has 16"),
        ({"tile": 4}, "steps of 2 loops, one of them None .* got 4"),
        ({"tile": (0, 16)}, r"positive numbers of steps .* got \(0, 16\)"),
        ({"tile": (None, None)}, r"one of them None .* got \(None, None\)"),
        ({"chunks": 3}, "knob 'chunks' is one of 0, 2, got 3"),
        ({"unroll": 3}, "template tiled has the knobs tile, chunks, got a value for 'unroll'"),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        sparsetir.build(fixed(), schedule=tiled.with_values(**values))


def test_sizes_that_are_known_at_the_call_only() -> None:
    unknown = "has feat steps, which is known only when the kernel is called"
    with pytest.raises(ScheduleError, match=f"{unknown}; try policy='power2' with max_factor"):
        sparsetir.build(ops.spmm(), schedule=tiled)
    with pytest.raises(ScheduleError, match=f"{unknown}: one of them must be None"):
        sparsetir.build(ops.spmm(), schedule=tiled.with_values(tile=(4, 4)))


def test_what_is_no_template() -> None:
    with pytest.raises(ArgumentTypeError, match=r"function of cfg and sch, got .*one_argument\(sch"):

        @sparsetir.template
        def one_argument(sch: s_tir.Schedule) -> None:  # type: ignore[arg-type]
            pass

    with pytest.raises(ArgumentTypeError, match="got int"):
        sparsetir.template(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"a template, a tvm.s_tir.Schedule or a function of one, got Config"):
        sparsetir.build(ops.spmm(), schedule=Config())
    with pytest.raises(ArgumentTypeError, match=r"below @sparsetir.template, got function"):
        tune_sparse(ops.spmm(), arguments(), schedule=lambda sch: sch)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="got Candidate"):
        autotune(configs=[Candidate(Config())])


# --- searching ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_turns_the_knobs(tmp_path: Path) -> None:
    inputs, path = arguments(), tmp_path / "tuning.jsonl"
    how: dict[str, Any] = {"schedule": tiled, "database": path, "isolate": False, "progress": False}
    result = tune_sparse(ops.spmm(), inputs, max_trials=20, **how)
    tried = [r.choices for r in result.history if isinstance(r.choices, Config)]
    assert len(set(tried)) == len(tried) == 10  # all of 5 splits times 2; nothing else is searched
    assert tried[0] == Config.of({"tile": (16, 1), "chunks": 0})
    assert not [r for r in result.history if r.error]
    assert result.history[0].choices == Choices()
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)
    report, why = result.report(), result.explain()
    assert "template tiled" in report
    assert re.search(r"format +chunks +tile +sizes +ms", report)
    assert re.search(r"as it is +2 +\(\d+, \d+\)", report)
    assert "knob tile[" in why
    assert set(result.gains()) == {"tile", "chunks"}

    lines = path.read_text()
    again = tune_sparse(ops.spmm(), inputs, max_trials=20, **how)
    assert (again.measured, path.read_text()) == (0, lines)
    assert [r.candidate for r in again.history] == [r.candidate for r in result.history]
    how["schedule"] = tiled.with_values(chunks=2)
    assert tune_sparse(ops.spmm(), inputs, max_trials=3, **how).measured == 3


@pytest.mark.slow
def test_the_winner_is_built_with_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Config.of({"tile": (2, 8), "chunks": 2})

    def it_wins(cases: Any) -> dict[Any, float]:
        return {c: 0.5 if c is not None and c.choices == wanted else 1.0 for c in cases}

    keep_time(monkeypatch, it_wins)
    monkeypatch.setattr(sessions, "finalists", lambda history, _cost: [Candidate(wanted)])
    result = tune_sparse(ops.spmm(), arguments(), schedule=tiled, strategy="exhaustive", isolate=False, progress=False)
    assert result.best.choices == wanted
    assert "T.vectorized(8)" in result.kernel.script(stage=3)
    assert isinstance(result.schedule, Template)
    assert sparsetir.build(fixed(), schedule=result.schedule).compiled is result.kernel.best.compiled
    assert "chosen: as it is chunks=2 tile=(2, 8), 2.00 times" in result.explain()


@sparsetir.template
def of_five_ways(cfg: Knobs, sch: s_tir.Schedule) -> s_tir.Schedule | None:
    """One way is right; the others compute something else, or fail in TVM, in Python and in the compiler."""
    way = cfg.define_knob("way", ["right", "wrong", "refused", "broken", "late"])
    j, _ = loops(sch)
    if way == "wrong":
        text = sparsetir.script(fixed()).replace("B[j, k]", "B[j, k] * T.float32(2)")
        return s_tir.Schedule(sparsetir.lower(as_module(sparsetir.parse(text)), stage=2))
    if way == "refused":
        sch.vectorize(j)
    if way == "broken":
        [][1]
    if way == "late":
        sch.unroll(j)
    return None


@pytest.mark.slow
def test_a_wrong_schedule_costs_only_itself() -> None:
    result = tune_sparse(
        ops.spmm(), arguments(), schedule=of_five_ways, strategy="exhaustive", isolate=False, progress=False
    )
    errors = {r.choices["way"]: r.error for r in result.history if isinstance(r.choices, Config)}
    assert errors["right"] is None
    assert "wrong result: c[" in (errors["wrong"] or "")
    assert "ScheduleError: " in (errors["refused"] or "")
    assert errors["broken"] == "IndexError: list index out of range"
    assert "to unroll loop j its number of steps must be a constant" in (errors["late"] or "")


@sparsetir.template
def by_format(cfg: Knobs, sch: s_tir.Schedule) -> None:
    """Another knob where there are blocks, and nothing for ELL."""
    (name,) = leaves(sch.mod["spmm"])
    if name == "spmm_ell":
        raise NotImplementedError("no such luck")
    k = sch.get_loops(sch.get_sblock(name))[-1]
    _, inner = cfg.define_split("wide" if name == "spmm_bsr" else "tile", k).apply(sch, k)
    sch.vectorize(inner)


@pytest.mark.slow
def test_a_template_over_formats() -> None:
    how: dict[str, Any] = {"schedule": by_format, "formats": [BLOCKS, formats.ell()], "progress": False}
    result = tune_sparse(ops.spmm(), arguments(), max_trials=11, **how)
    knobs = {(r.stored_as, *r.choices.as_dict()) for r in result.history[1:]}
    assert knobs == {(None, "tile"), ("bsr(r=2, c=2)", "wide")}
    assert not [r for r in result.history if r.error]
    assert len({r.candidate for r in result.history}) == len(result.history) == 11
    assert "no such luck" in result.refused["ell()"]
    assert "no such luck" in result.explain()
    assert re.search(r"format +tile +wide +sizes +ms", result.report())


@pytest.mark.slow
def test_a_template_may_fit_a_format_only() -> None:
    how: dict[str, Any] = {"formats": [BLOCKS], "max_trials": 3, "progress": False}

    @sparsetir.template
    def for_blocks(cfg: Knobs, sch: s_tir.Schedule) -> None:
        sch.unroll(sch.get_loops(sch.get_sblock("spmm_bsr"))[cfg.define_knob("loop", [1, 2]) - 4])

    result = tune_sparse(ops.spmm(), arguments(), schedule=for_blocks, **how)
    assert [r.stored_as for r in result.history] == [None, "bsr(r=2, c=2)", "bsr(r=2, c=2)"]
    assert "spmm_bsr" in result.refused["as it is"]
    with pytest.raises(ScheduleError, match=r"^knob 'unroll' is defined twice"):
        tune_sparse(ops.spmm(), arguments(), schedule=sparsetir.template(twice))
    with pytest.raises(TuningError, match=r"template twice does not fit the program: .*; over bsr.*defined twice"):
        tune_sparse(ops.spmm(), arguments(), schedule=sparsetir.template(twice), **how)


@pytest.mark.slow
def test_without_knobs_there_is_one_candidate() -> None:
    result = tune_sparse(
        ops.spmm(), arguments(), schedule=tiled.with_values(tile=(1, 16), chunks=0), isolate=False, progress=False
    )
    assert [r.choices for r in result.history[1:]] == [Config()]
    assert result.gains() == {}


# --- worker processes, and what a search begins with ------------------------------------------------------------

MODULE = """
import sparsetir

WIDTH = 4


@sparsetir.template
def of_width(cfg, sch):
    *_, k = sch.get_loops(sch.get_sblock("spmm"))
    outer, lanes = cfg.define_split("tile", k, candidates=[(None, WIDTH), (None, 2 * WIDTH)]).apply(sch, k)
    sch.vectorize(lanes)
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with a template that another process can import."""
    (tmp_path / "templates_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("templates_of_a_test")
    sys.modules.pop("templates_of_a_test")


def first_worker(template: Template) -> Any:
    """Where candidates of a template run if workers are wanted."""
    found = local.pool_of(Evaluator(ops.spmm(), arguments(), None, template), isolate=True)
    found.close()
    return found.workers[0]


@pytest.mark.slow
def test_workers_turn_the_knobs(imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = Evaluator(ops.spmm(), arguments(), None, imported.of_width)
    made = local.pool_of(evaluator, [BLOCKS], isolate=True)
    assert isinstance(made.workers[0], RemoteWorker)
    assert made.values(None) == evaluator.prepare(None).values == {"tile": ((None, 4), (None, 8))}
    assert made.values(BLOCKS) is None
    assert "Cannot find a block with the name: spmm" in made.refused[BLOCKS]
    right, wrong = (Candidate(Config.of({"tile": tile})) for tile in ((None, 8), (2, 4)))
    found = dict(made.measure([right, wrong]))
    assert found[right].seconds
    assert "which makes 8 steps; the loop has 16" in (found[wrong].error or "")
    made.close()

    monkeypatch.setattr(imported, "WIDTH", 8)  # another template than the one that a worker would import
    assert isinstance(first_worker(imported.of_width.with_values()), LocalWorker)


@pytest.mark.slow
def test_templates_that_a_worker_cannot_import_stay_here(imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(first_worker(make(4)), LocalWorker)
    folder = str(Path(imported.__file__).parent)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != folder])
    assert pickle.loads(pickle.dumps(imported.of_width)).function is imported.of_width.function
    assert isinstance(first_worker(imported.of_width), LocalWorker)


def test_a_search_that_begins_where_a_template_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER, "1")
    with pytest.raises(TuningError, match=r"imported the module of a template.*below if __name__"):
        tune_sparse(ops.spmm(), arguments(), schedule=tiled, max_trials=2)


@pytest.mark.slow
def test_without_trials(tmp_path: Path) -> None:
    how: dict[str, Any] = {"schedule": tiled, "max_trials": 0, "database": tmp_path / "tuning.jsonl"}
    result = tune_sparse(ops.spmm(), arguments(), **how)
    assert (result.best, result.schedule, len(result.history)) == (result.untuned, None, 1)
    assert not result.is_guess
    session = sessions.Session(ops.spmm(), arguments(), None, template=tiled)
    assert session.prior is None
    best = Record(Config.of({"tile": (2, 8), "chunks": 2}), fixed=session.fixed, seconds=1e-9)
    database = Database(how["database"])
    database.append(session.key, best)
    database.close()
    known = tune_sparse(ops.spmm(), arguments(), **how)
    assert known.best.choices == best.choices
    assert "T.vectorized(8)" in known.kernel.script(stage=3)
    assert re.search(r"best +as it is +2 +\(2, 8\)", known.report())


@pytest.mark.slow
def test_a_search_begins_with_what_suited_a_similar_matrix(tmp_path: Path) -> None:
    inputs, path = arguments(), tmp_path / "tuning.jsonl"
    tune_sparse(ops.spmm(), inputs, schedule=tiled, max_trials=4, database=path, progress=False)
    inputs["A"] = sp.random_array((60, 50), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(1))
    session = sessions.Session(ops.spmm(), inputs, None, template=tiled)
    hinted = session.search(0, records=Database(path)).hints
    assert hinted
    assert all(candidate in session.space for candidate in hinted)
    other = sessions.Session(ops.spmm(), inputs, None, template=tiled.with_values(chunks=2))
    assert not other.search(0, records=Database(path)).hints


# --- the same search, on made-up times ------------------------------------------------------------------------

VALUES = {
    None: {"tile": tuple(factorisations(64, 3)), "order": ("ijk", "ikj", "kij"), "unroll": (1, 2, 4, 8)},
    BLOCKS: {"tile": tuple(factorisations(64, 3)), "rows": (1, 2)},
}


def new_space() -> Space:
    return Space([None, BLOCKS], VALUES.get, Config())


def seconds_of(candidate: Candidate) -> float:
    """Fastest as it is, at (2, 2, 16), ikj and unroll 4."""
    chosen = candidate.choices.as_dict()
    off = abs(np.log2(chosen["tile"][2]) - 4) + 0.5 * abs(np.log2(chosen["tile"][1]) - 1)
    off += 2.0 if candidate.format else 0.5 * abs(np.log2(chosen["unroll"]) - 2) + (chosen["order"] != "ikj")
    return 1e-3 * (1.0 + off)


def test_offspring_lies_in_the_space() -> None:
    found, rng = new_space(), np.random.default_rng(0)
    for _ in range(200):
        one, other = found.sample(rng), found.sample(rng)
        for child in (one, found.mutate(one, rng), found.crossover(one, other, rng), *found.steps(one)):
            assert child in found
    assert list(found.first()) == [
        Candidate(Config.of({"tile": (64, 1, 1), "order": "ijk", "unroll": 1})),
        Candidate(Config.of({"tile": (64, 1, 1), "rows": 1}), BLOCKS),
    ]
    for outside in (Choices(), Config(), Config.of({"tile": (64, 1, 1), "rows": 1})):
        assert Candidate(outside) not in found


def test_knobs_are_numbers_to_the_model() -> None:
    values = {"tile": ((None, 4), (2, 8)), "order": ("ijk", "ikj"), "unroll": (1, 2), "shift": (-1, 1), "alone": (3,)}
    config = Config.of({"tile": (None, 8), "order": "ikj", "unroll": 1, "shift": -1, "alone": 3})
    found = features.of_knobs(config, values)
    assert found == {
        "knob alone": 2.0,
        "knob order": 1.0,
        "knob shift": -1.0,
        "knob tile[1]": np.log2(9),
        "knob unroll": 1.0,
    }
    assert features.of_knobs(config.changed(tile=(2, 8)), values)["knob tile[0]"] == np.log2(3)


def test_a_model_takes_columns_that_came_later() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    model = CostModel.fit(rows, rows[:, 0] + 1)
    later = of_width([*rows, [0.0], [0.0, 0.0, 7.0]], 3)
    assert later.shape == (8, 3)
    assert np.isnan(later[6, 1])
    np.testing.assert_array_equal(model.predict(later)[:6], model.predict(rows))


def test_columns_are_added_as_formats_bring_knobs() -> None:
    encoding = WorkloadEncoding(
        {"nnz": 3.0}, None, features.ArgumentStorage(9, 90), features.Operands(64, 900, 900, 4, 2), VALUES.get
    )
    own, blocks = new_space().first()
    (before,) = encoding.rows([own])
    assert encoding.names == list(encoding.named(own))
    rows = encoding.rows([blocks, own])
    assert encoding.names[len(before) :] == ["knob rows"]
    assert list(np.isnan(rows[:, -1])) == [False, True]
    np.testing.assert_array_equal(rows[1, :-1], before)
    assert np.isnan(rows[0, encoding.names.index("knob unroll")])
    assert encoding.named(blocks)["knob rows"] == 1.0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of made-up times, and beside them those of the sketches' choices."""
    path = tmp_path_factory.mktemp("recorded") / "space.jsonl"
    database, found, rng = Database(path), new_space(), np.random.default_rng(0)
    stored, operands = features.ArgumentStorage(1000, 8000), features.Operands(64, 9000, 9000, 4, 2)
    for candidate in [Candidate(), *dict.fromkeys(found.sample(rng) for _ in range(200))]:
        known = VALUES[candidate.format] if isinstance(candidate.choices, Config) else {}
        named = features.of_candidate(candidate, stored, operands, 1000, known)
        seconds = seconds_of(candidate) if known else 0.1
        stored_as = repr(candidate.format) if candidate.format else None
        database.append(KEY, Record(candidate.choices, stored_as, seconds=seconds), features=named)
    database.close()
    return path


def test_records_are_read_as_they_were_written(recorded: Path) -> None:
    records = Database(recorded).load(KEY)
    assert records[0].choices == Choices()
    assert all(record.candidate in new_space() for record in records[1:])
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert {("choices" in line, "knobs" in line) for line in lines[1:]} == {(False, True)}
    assert isinstance(lines[1]["knobs"]["tile"], list)


@pytest.mark.slow
def test_recorded_knobs_are_searched_without_running(recorded: Path) -> None:
    (case,) = replay.load(recorded)
    assert len({len(row) for row in case.features.values()}) == 1
    found = replay.compare([case], ["evolution", "random"], (4, 48), seeds=2)
    assert found["evolution"][1][0] >= found["random"][1][0]
    assert found["evolution"][1][0] > 0.9


@pytest.mark.slow
def test_a_recorded_search_of_one_format() -> None:
    blocks = [c for c in new_space() if c.format]
    case = Recording("blocks", {c: seconds_of(c) for c in blocks}, {c: np.zeros(1, np.float32) for c in blocks})
    assert replay.replayed(case, "evolution", 0, len(blocks))[-1] == 1.0


def test_a_value_for_no_knob_is_named_where_another_knob_is_open() -> None:
    with pytest.raises(ScheduleError, match=r"'tile'.*the value for 'tyle' is of no knob defined so far"):
        sparsetir.build(ops.spmm(), schedule=tiled.with_values(tyle=1))
