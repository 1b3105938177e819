# SPDX-License-Identifier: Apache-2.0
"""Candidates in worker processes: same answers, and a crash or a hang costs one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir import formats, ops
from sparsetir.errors import ArgumentError
from sparsetir.schedules import Choices
from sparsetir.tuning import Candidate, lowered_program, tune_sparse
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.lowered_program import LoweredProgram
from sparsetir.tuning.workers.local import (
    WORKER,
    WORKERS,
    Job,
    LocalWorker,
    Process,
    RemoteWorker,
    compile_candidate,
    compile_together,
    how_it_ended,
    packed,
    pool_of,
    time_candidate,
)
from sparsetir.utils.caches import Cache

pytestmark = [pytest.mark.usefixtures("quick_comparisons"), pytest.mark.slow]

BLOCKS = formats.bsr(2, 2)
CANDIDATES = [Candidate(Choices(tile=tile)) for tile in (8, 16)] + [Candidate(Choices(tile=8), BLOCKS)]


def arguments() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    A = sp.csr_array(sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=rng))
    return {"A": A, "B": rng.standard_normal((30, 16)).astype("float32")}


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(ops.spmm(), arguments(), None)


@pytest.fixture(autouse=True)
def no_strangers() -> Iterator[None]:
    """Processes that other tests left idle are used, too; none is left behind by the last one."""
    yield
    assert all(process.process.poll() is None for process in Process.idle)


def test_workers_do_what_this_process_does(evaluator: Evaluator) -> None:
    for isolate in (False, True):
        pool = pool_of(evaluator, [BLOCKS], isolate=isolate)
        assert isinstance(pool.workers[0], RemoteWorker if isolate else LocalWorker)
        assert pool.values(BLOCKS) == evaluator.prepare(BLOCKS).values
        stored = evaluator.prepare(BLOCKS).stored
        assert stored is not None
        assert pool.stored[BLOCKS].values == stored.values
        untuned, found = pool.time(None), dict(pool.measure(CANDIDATES))
        assert untuned.seconds
        assert list(found) == CANDIDATES
        assert all(each.seconds for each in found.values())
        assert all(seconds > 0 for seconds in pool.compare(CANDIDATES).values())
        pool.close()


def test_workers_do_not_load_torch(evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Process, "idle", [])  # what is idle looks for modules elsewhere, and would be ended
    worker = RemoteWorker(packed(evaluator) or b"", timeout=60.0)
    assert worker.process is not None
    assert worker.process.path.startswith(str(tmp_path))
    assert worker.begins() is None
    assert not (tmp_path / "loaded").exists()
    worker.process.kill()


def test_processes_are_begun_ahead_once(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    Process.warm()
    idle = list(Process.idle)
    assert len(idle) >= WORKERS
    Process.warm()
    assert Process.idle == idle
    made = pool_of(evaluator, isolate=True)
    assert all(isinstance(worker, RemoteWorker) and worker.process in idle for worker in made.workers)
    made.time(None)
    made.close()
    monkeypatch.setenv(WORKER, "1")
    monkeypatch.setattr(Process, "idle", [])
    Process.warm()
    assert Process.idle == []  # a worker begins none


def test_a_format_that_is_refused_says_why(evaluator: Evaluator) -> None:
    pool = pool_of(evaluator, isolate=True)
    assert pool.values(formats.nm(1, 4)) is None
    assert pool.refused[formats.nm(1, 4)]
    pool.close()


def disturb(monkeypatch: pytest.MonkeyPatch, number: int, is_meant: Callable[[Job, tuple[Any, ...]], bool]) -> None:
    """Send a signal to the worker that gets the first job that is meant."""
    post, sent = RemoteWorker.post, []

    def spoiled(self: RemoteWorker, job: Job, *args: Any) -> None:
        if is_meant(job, args) and not sent:
            assert self.process is not None
            sent.append(job)
            os.kill(self.process.process.pid, number)
        post(self, job, *args)

    monkeypatch.setattr(RemoteWorker, "post", spoiled)


def test_a_crash_costs_one_candidate(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(evaluator, isolate=True)
    assert pool.time(None).seconds
    disturb(monkeypatch, signal.SIGKILL, lambda asked, args: asked is time_candidate and args[0] == CANDIDATES[0])
    found = dict(pool.measure(CANDIDATES))
    assert found[CANDIDATES[0]].seconds is None
    assert "SIGKILL" in (found[CANDIDATES[0]].error or "")
    assert all(found[candidate].seconds for candidate in CANDIDATES[1:])
    assert pool.time(CANDIDATES[0]).seconds
    pool.close()


def test_a_crash_while_several_are_compiled_costs_none(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetir.tuning.workers.local.WORKERS", 1)
    pool = pool_of(evaluator, isolate=True)
    assert pool.time(None).seconds
    disturb(monkeypatch, signal.SIGKILL, lambda asked, args: asked is compile_together)
    assert all(found.seconds for _, found in pool.measure(CANDIDATES))  # a new worker compiles them one by one
    pool.close()


def test_a_candidate_that_does_not_compile_costs_no_other(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowered_program, "_forms", Cache(64))
    other = Evaluator(ops.spmm(), arguments(), None)

    def spoiled(self: LoweredProgram, choices: Choices) -> Any:
        if choices.tile == 16:
            raise RuntimeError("LLVM gave up")
        return loops(self, choices)

    loops = LoweredProgram.shared_loops
    monkeypatch.setattr(LoweredProgram, "shared_loops", spoiled)
    other.compile_together(CANDIDATES)
    assert [other.compile(candidate) for candidate in CANDIDATES] == [None, "RuntimeError: LLVM gave up", None]


def test_workers_that_die_before_they_begin_are_begun_anew(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsetir.tuning.workers.local.WORKERS", 1)
    take, deaths = Process.take, iter([True, False, True])

    def doomed(threads: int | None = None) -> Process:
        found = take(threads)
        if next(deaths, False):
            found.process.kill()
            found.process.wait()
        return found

    monkeypatch.setattr(Process, "take", doomed)
    pool = pool_of(evaluator, isolate=True)
    assert pool.time(None).seconds
    pool.close()


def test_a_search_whose_workers_all_die_ends_with_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetir.tuning.workers.local.WORKERS", 1)
    start, begun = RemoteWorker.start, []

    def doomed(self: RemoteWorker) -> None:
        start(self)
        begun.append(self)
        assert self.process is not None
        if len(begun) > 1:
            kill(self.process)

    monkeypatch.setattr(RemoteWorker, "start", doomed)
    disturb(monkeypatch, signal.SIGKILL, lambda asked, args: asked is time_candidate and args[0] is not None)
    inputs = arguments()
    with pytest.warns(UserWarning, match="the search ended early, after .* trials: a worker process could not begin"):
        result = tune_sparse(ops.spmm(), inputs, max_trials=6, isolate=True, progress=False)
    assert result.interrupted
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)


def test_a_hang_costs_one_candidate(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(evaluator, isolate=True, timeout=2.0)
    assert pool.time(None).seconds
    disturb(monkeypatch, signal.SIGSTOP, lambda asked, args: asked is time_candidate and args[0] == CANDIDATES[1])
    found = dict(pool.measure(CANDIDATES))
    assert "took more than" in (found[CANDIDATES[1]].error or "")
    assert found[CANDIDATES[2]].seconds
    pool.close()


def test_a_search_goes_on_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments()
    monkeypatch.setattr("sparsetir.tuning.workers.local.WORKERS", 1)  # so that the one that crashed measures the others
    disturb(monkeypatch, signal.SIGSEGV, lambda asked, args: asked is time_candidate and args[0] is not None)
    result = tune_sparse(ops.spmm(), inputs, max_trials=6, isolate=True, progress=False)
    errors = [record.error for record in result.history if record.error is not None]
    assert len(result.history) == 6
    assert errors == ["its process crashed: SIGSEGV"]
    assert all(record.seconds for record in result.history if record.error is None)
    assert "1 failed" in result.report()
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)


def test_processes_are_used_again(evaluator: Evaluator) -> None:
    def processes() -> set[int]:
        pool = pool_of(evaluator, isolate=True)
        assert pool.time(None).seconds
        running = [w.process for w in pool.workers if isinstance(w, RemoteWorker) and w.process]
        found = {process.process.pid for process in running}
        for worker in pool.workers:
            worker.post(compile_candidate, CANDIDATES[0])
            worker.result()
        pool.close()
        return found

    assert processes() == processes()


def test_objects_of_other_packages_stay_here(evaluator: Evaluator) -> None:
    class Array:
        pass

    other = Evaluator(ops.spmm(), arguments(), None)
    assert packed(other) is not None
    other.inputs["B"] = Array()
    assert packed(other) is None
    assert isinstance(pool_of(other, isolate=True).workers[0], LocalWorker)


def test_how_processes_end() -> None:
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(-signal.SIGSEGV) == "SIGSEGV"
    assert "memory" in how_it_ended(-signal.SIGKILL)


def test_a_timeout_is_positive() -> None:
    with pytest.raises(ArgumentError, match="timeout: expected a positive, finite number of seconds"):
        tune_sparse(ops.spmm(), arguments(), timeout=0.0)


# These end processes that nothing begins again: they are the last ones.


def test_a_worker_that_is_gone_is_not_kept(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    process = closed_after(evaluator, monkeypatch, lambda worker: kill(worker.process))
    assert process not in Process.idle


def test_what_was_asked_and_not_taken_ends_the_process(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    process = closed_after(evaluator, monkeypatch, lambda worker: worker.post(compile_candidate, CANDIDATES[0]))
    assert process not in Process.idle
    assert process.process.poll() is not None


def kill(process: Process | None) -> None:
    assert process is not None
    process.process.kill()
    process.process.wait()


def closed_after(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, do: Callable[[RemoteWorker], object]
) -> Process:
    """The process of a pool of one worker that was closed after something was done."""
    monkeypatch.setattr("sparsetir.tuning.workers.local.WORKERS", 1)
    pool = pool_of(evaluator, isolate=True)
    pool.time(None)
    (worker,) = pool.workers
    assert isinstance(worker, RemoteWorker)
    assert worker.process is not None
    process = worker.process
    do(worker)
    pool.close()
    return process
