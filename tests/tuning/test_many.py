# SPDX-License-Identifier: Apache-2.0
"""Several kernels under one budget: where the next trials go, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import relax

import sparsetir
import sparsetir.relax as srelax
from sparsetir import ops
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.schedules import Choices
from sparsetir.tuning import Candidate, Database, TuneTask, tune_many
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.many import BATCH, Policy, TaskProgress, equal, most_gain
from sparsetir.tuning.records import Key, Record
from sparsetir.tuning.workers.local import pool_of

pytestmark = [
    pytest.mark.usefixtures("quick_comparisons"),
    pytest.mark.optimised,  # records of workers are those of this machine
]


def matrix(rows: int, seed: int = 0, density: float = 0.2) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    return sp.csr_array(sp.random_array((rows, 30), density=density, format="csr", dtype="float32", rng=rng))


B = np.random.default_rng(1).standard_normal((30, 16)).astype("float32")


def task(rows: int, calls: float = 1.0, **how: Any) -> TuneTask:
    return TuneTask(ops.spmm(), {"A": matrix(rows, **how), "B": B}, calls, f"{rows} rows")


def check(found: Sequence[Any], tasks: Sequence[TuneTask]) -> None:
    for result, each in zip(found, tasks, strict=True):
        np.testing.assert_allclose(result.kernel(**each.inputs), each.inputs["A"] @ B, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- the policy

Kernel = tuple[float, float, Callable[[int], float]]  # calls, seconds of a batch, best time after some trials


def replayed(kernels: Sequence[Kernel], policy: Policy, seconds: float) -> list[TaskProgress]:
    """The curves of searches whose trials are known beforehand."""
    curves = [TaskProgress(calls, [(1, best(1))]) for calls, _, best in kernels]
    while seconds > 0:
        chosen = policy(curves, [True] * len(curves))
        if chosen is None:
            break
        (_, took, best), trials = kernels[chosen], curves[chosen].points[-1][0] + BATCH
        curves[chosen].add(trials, best(trials), took)
        curves[chosen].is_open = trials < 200
        seconds -= took
    return curves


def whole(curves: Sequence[TaskProgress]) -> float:
    return sum(curve.calls * curve.best for curve in curves)


def recorded(times: Sequence[float]) -> Callable[[int], float]:
    """The best after so many of these trials; none is better later."""
    return lambda trials: min(times[:trials])


def drawn(rng: np.random.Generator) -> list[Kernel]:
    """Searches of a model's kernels: few gain much, most of it early; times, calls and batches of all lengths."""
    kernels = []
    for _ in range(rng.integers(3, 12)):
        final = 10 ** rng.uniform(-5, -2.5)
        steps = rng.exponential(rng.choice([0.02, 0.3]), 200) * rng.uniform(0.5, 1.5)
        times = final * (1 + steps)
        times[0] = final * (1 + rng.choice([0.0, 0.05, 0.5, 2.0]))
        kernels.append((float(rng.integers(1, 20)), 10 ** rng.uniform(-1, 0.5), recorded(times.tolist())))
    return kernels


@pytest.mark.parametrize(("seconds", "ratio"), [(5.0, 0.95), (20.0, 0.998), (80.0, 1.0)])
def test_the_whole_gains_more_than_by_equal_shares(seconds: float, ratio: float) -> None:
    ratios = []
    for seed in range(40):
        kernels = drawn(np.random.default_rng(seed))
        by_gain, by_shares = (whole(replayed(kernels, policy, seconds)) for policy in (most_gain, equal))
        ratios.append(by_gain / by_shares)
    assert float(np.exp(np.mean(np.log(ratios)))) < ratio
    assert np.mean(np.array(ratios) <= 1.001) > 0.75


def test_where_the_next_trials_go() -> None:
    def curve(calls: float, *points: tuple[int, float], **how: Any) -> TaskProgress:
        return TaskProgress(calls, list(points), [1.0] * len(points), **how)

    def first(*curves: TaskProgress, awake: Sequence[bool] = ()) -> int | None:
        return most_gain(curves, awake or [True] * len(curves))

    assert first(curve(1, (9, 1.0)), curve(1, (9, 2.0))) == 1  # what takes longer
    assert first(curve(3, (9, 1.0)), curve(1, (9, 2.0))) == 0  # what is called more often
    assert first(curve(1, (9, 1.0)), curve(1, (5, 1.0))) == 1  # what was searched less
    got_better = curve(1, (41, 1.5), (45, 1.2), (49, 1.0))
    assert first(curve(1, (13, 1.0)), got_better) == 1  # what has got better just now
    assert first(curve(1, (9, 1.0)), curve(1, (9, 1.0), hinted=0.5)) == 1  # what is like one that got better
    assert first(curve(1, (9, 1.0)), curve(1, (9, 1.0)), awake=[False, True]) == 1  # what need not begin anew
    assert first(curve(1, (9, 9.0), is_open=False), curve(1, (9, 1.0))) == 1  # what is not at its end
    assert first(curve(1, (9, 9.0), is_open=False)) is None
    assert equal([curve(1, (9, 9.0)), curve(1)], [True, True]) == 1


# --------------------------------------------------------------------------------------------------------- the search


@pytest.mark.slow
def test_kernels_of_all_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    tasks = [task(40, 5), task(20), task(40, 2), task(0), task(7, density=0.0)]
    found = tune_many(tasks, seconds=1.5, database=path, isolate=False)
    check(found, tasks)
    assert len(found) == 5
    assert found[0] is found[2]  # the same program and arguments
    assert all(result.history[0].seconds for result in found)
    assert found.tuned <= found.untuned * 1.001
    lines = found.report().splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [["40", "rows", "5"], ["20", "rows", "1"], ["40", "rows", "2"]]
    assert lines[-1].startswith("all calls")
    trials = [line for line in map(json.loads, path.read_text().splitlines()) if "comparison" not in line]
    assert len(trials) == sum(len(result.history) for result in {id(r): r for r in found}.values())
    again = tune_many([tasks[0]], seconds=0.01, database=path, isolate=False)
    assert len(again[0].history) >= len(found[0].history)
    assert again[0].measured < len(again[0].history)


class Stopped(Database):
    """Ctrl-C after some trials."""

    left = 6

    def append(self, key: Key, record: Record, **facts: Any) -> None:
        super().append(key, record, **facts)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_search_has_all_kernels(tmp_path: Path) -> None:
    tasks = [task(40), task(20)]
    found = tune_many(tasks, seconds=60, database=Stopped(tmp_path / "tuning.jsonl"), isolate=False)
    assert found.interrupted
    assert found.report().endswith("ended early")
    assert sum(len(result.history) for result in found) == 6
    check(found, tasks)


@pytest.mark.slow
def test_a_search_ends_by_itself() -> None:
    found = tune_many([task(2)], seconds=600, patience=3, isolate=False)
    assert found.seconds < 300
    assert len(found[0].history) < 100


@pytest.mark.slow
def test_similar_kernels_share_what_they_find(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsetir.tuning.search import Search

    hinted: list[Candidate] = []
    hint = Search.hint
    monkeypatch.setattr(Search, "hint", lambda self, c: hinted.append(c) or hint(self, c))
    tasks = [task(2000, seed=1), task(2000, seed=2), TuneTask(ops.spmv(), {"A": matrix(40), "x": B[:, 0].copy()})]
    found = tune_many(tasks, seconds=4, policy="equal", isolate=False)
    of_spmm = {r.candidate for result in found[:2] for r in result.history}
    assert set(hinted) <= of_spmm
    search: Any = type("S", (), {"told": {Candidate(): 1.0}, "hints": []})()
    assert not hint(search, Candidate())
    assert hint(search, Candidate(Choices(tile=8)))
    assert not hint(search, Candidate(Choices(tile=8)))


@pytest.mark.slow
def test_workers_that_rest_begin_again() -> None:
    pool = pool_of(Evaluator(ops.spmm(), dict(task(40).inputs), None), isolate=True)
    before = pool.time(None)
    pool.rest()
    found = dict(pool.measure([Candidate(Choices(tile=8)), Candidate(Choices(tile=16))]))
    assert before.seconds
    assert all(each.seconds for each in found.values())
    pool.close()


@pytest.mark.slow
def test_more_tasks_than_have_workers() -> None:
    tasks = [task(rows) for rows in (40, 30, 20)]
    found = tune_many(tasks, seconds=3, isolate=True)
    check(found, tasks)
    assert not any(record.error for result in found for record in result.history)


@pytest.mark.parametrize(
    ("tasks", "how", "message"),
    [
        ([], {}, "expected tasks, such as .* got none"),
        ([ops.spmm()], {}, "tasks are TuneTask.* task 0 is PrimFunc"),
        ([task(3), (ops.spmm(), task(3).inputs, 1, "a", 2)], {}, "task 1 is tuple"),
        ([task(3, calls=0)], {}, "expected_calls of task 0: expected a positive number, got 0"),
        ([task(3, calls=float("inf"))], {}, "expected_calls of task 0: expected a positive number, got inf"),
        ([task(3)], {"seconds": 0}, "seconds: expected a positive, finite number of seconds, got 0"),
        ([task(3)], {"seconds": "1"}, "seconds: expected a positive, finite number of seconds, got '1'"),
        ([task(3)], {"patience": 0}, "patience: expected a positive integer, got 0"),
        ([task(3)], {"policy": "best"}, "policy is one of gain, equal, got 'best'"),
        ([(ops.spmm(), [matrix(3), B])], {}, "inputs must name the arguments"),
        ([task(3)], {"machines": "each"}, "is about the workers of an executor"),
    ],
)
def test_what_is_no_task(tasks: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        tune_many(tasks, **how)


# -------------------------------------------------------------------------------------------------------- with models


@pytest.mark.slow
def test_a_model_is_tuned_as_it_is_built(tmp_path: Path) -> None:
    A, path = sp.csr_array(matrix(30).toarray()), tmp_path / "tuning.jsonl"
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([30, 16], "float32"))
    with builder.function("main", [x]):
        first = builder.emit(srelax.spmm(*srelax.csr_constants(A), x))
        builder.emit_func_output(builder.emit(srelax.spmm(*srelax.csr_constants(A), first)))
    (found,) = srelax.tasks(builder.get())
    assert (found.expected_calls, found.inputs["B"].shape) == (2, (30, 16))
    executable = srelax.build(builder.get(), tune_seconds=0.5, database=path)
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(B))
    np.testing.assert_allclose(got.numpy(), A @ (A @ B), rtol=1e-4, atol=1e-4)
    ended = [line for line in map(json.loads, path.read_text().splitlines()) if "comparison" in line]
    assert len(ended) == 1
    assert sparsetir.build(found.program, database=path)(**found.inputs).shape == (30, 16)
