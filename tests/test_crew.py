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
from sparsetir.tuning import Candidate, tune_sparse
from sparsetir.tuning.crew import WORKER, WORKERS, Here, Process, Worker, crew_of, how_it_ended, packed
from sparsetir.tuning.lab import Lab

BLOCKS = formats.bsr(2, 2)
CANDIDATES = [Candidate(Choices(tile=tile)) for tile in (8, 16)] + [Candidate(Choices(tile=8), BLOCKS)]


def arguments() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    A = sp.csr_array(sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=rng))
    return {"A": A, "B": rng.standard_normal((30, 16)).astype("float32")}


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(ops.spmm(), arguments(), None)


@pytest.fixture(autouse=True)
def no_strangers() -> Iterator[None]:
    """Processes that other tests left idle are used, too; none is left behind by the last one."""
    yield
    assert all(process.process.poll() is None for process in Process.idle)


def test_workers_do_what_this_process_does(lab: Lab) -> None:
    for isolate in (False, True):
        crew = crew_of(lab, [BLOCKS], isolate=isolate)
        assert isinstance(crew.lanes[0], Worker if isolate else Here)
        assert crew.values(BLOCKS) == lab.prepare(BLOCKS).values
        stored = lab.prepare(BLOCKS).stored
        assert stored is not None
        assert crew.stored[BLOCKS].values == stored.values
        untuned, found = crew.time(None), dict(crew.measure(CANDIDATES))
        assert untuned.seconds
        assert list(found) == CANDIDATES
        assert all(each.seconds for each in found.values())
        assert all(0 < seconds < 1 for seconds in crew.compare(CANDIDATES).values())
        crew.close()


def test_workers_do_not_load_torch(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    worker = Worker(packed(lab) or b"", timeout=60.0)
    assert worker.process is not None
    assert worker.process.path.startswith(str(tmp_path))
    assert worker.begins() is None
    assert not (tmp_path / "loaded").exists()
    worker.process.kill()


def test_processes_are_begun_ahead_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    Process.warm()
    idle = list(Process.idle)
    assert len(idle) >= WORKERS
    Process.warm()
    assert Process.idle == idle
    made = crew_of(lab, isolate=True)
    assert all(isinstance(lane, Worker) and lane.process in idle for lane in made.lanes)
    made.time(None)
    made.close()
    monkeypatch.setenv(WORKER, "1")
    monkeypatch.setattr(Process, "idle", [])
    Process.warm()
    assert Process.idle == []  # a worker begins none


def test_a_format_that_is_refused_says_why(lab: Lab) -> None:
    crew = crew_of(lab, isolate=True)
    assert crew.values(formats.nm(1, 4)) is None
    assert crew.refused[formats.nm(1, 4)]
    crew.close()


def disturb(monkeypatch: pytest.MonkeyPatch, number: int, is_meant: Callable[[str, tuple[Any, ...]], bool]) -> None:
    """Send a signal to the worker that gets the first job that is meant."""
    post, sent = Worker.post, []

    def spoiled(self: Worker, job: str, *args: Any) -> None:
        if is_meant(job, args) and not sent:
            assert self.process is not None
            sent.append(job)
            os.kill(self.process.process.pid, number)
        post(self, job, *args)

    monkeypatch.setattr(Worker, "post", spoiled)


@pytest.mark.parametrize("job", ["compile", "time"])
def test_a_crash_costs_one_candidate(lab: Lab, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    crew = crew_of(lab, isolate=True)
    assert crew.time(None).seconds
    disturb(monkeypatch, signal.SIGKILL, lambda asked, args: asked == job and args[0] == CANDIDATES[0])
    found = dict(crew.measure(CANDIDATES))
    assert found[CANDIDATES[0]].seconds is None
    assert "SIGKILL" in (found[CANDIDATES[0]].error or "")
    assert all(found[candidate].seconds for candidate in CANDIDATES[1:])
    assert crew.time(CANDIDATES[0]).seconds
    crew.close()


def test_a_hang_costs_one_candidate(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = crew_of(lab, isolate=True, timeout=2.0)
    assert crew.time(None).seconds
    disturb(monkeypatch, signal.SIGSTOP, lambda asked, args: asked == "time" and args[0] == CANDIDATES[1])
    found = dict(crew.measure(CANDIDATES))
    assert "took more than" in (found[CANDIDATES[1]].error or "")
    assert found[CANDIDATES[2]].seconds
    crew.close()


def test_a_search_goes_on_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments()
    disturb(monkeypatch, signal.SIGSEGV, lambda asked, args: asked == "time" and args[0] is not None)
    result = tune_sparse(ops.spmm(), inputs, max_trials=6, isolate=True, progress=False)
    errors = [record.error for record in result.history if record.error is not None]
    assert len(result.history) == 6
    assert errors == ["its process crashed: SIGSEGV"]
    assert "1 failed" in result.report()
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)


def test_processes_are_used_again(lab: Lab) -> None:
    def processes() -> set[int]:
        crew = crew_of(lab, isolate=True)
        assert crew.time(None).seconds
        found = {lane.process.process.pid for lane in crew.lanes if isinstance(lane, Worker) and lane.process}
        for lane in crew.lanes:
            lane.post("compile", CANDIDATES[0])
            lane.result()
        crew.close()
        return found

    assert processes() == processes()


def test_what_was_asked_and_not_taken_ends_the_process(lab: Lab) -> None:
    crew = crew_of(lab, isolate=True)
    crew.time(None)
    lane = crew.lanes[0]
    assert isinstance(lane, Worker)
    assert lane.process is not None
    lane.post("compile", CANDIDATES[0])
    process = lane.process
    crew.close()
    assert process not in Process.idle
    assert process.process.poll() is not None


def test_a_worker_that_is_gone_is_not_kept(lab: Lab) -> None:
    crew = crew_of(lab, isolate=True)
    crew.time(None)
    lane = crew.lanes[0]
    assert isinstance(lane, Worker)
    assert lane.process is not None
    process = lane.process
    process.process.kill()
    process.process.wait()
    crew.close()
    assert process not in Process.idle


def test_objects_of_other_packages_stay_here(lab: Lab) -> None:
    class Array:
        pass

    other = Lab(ops.spmm(), arguments(), None)
    assert packed(other) is not None
    other.inputs["B"] = Array()
    assert packed(other) is None
    assert isinstance(crew_of(other, isolate=True).lanes[0], Here)


def test_how_processes_end() -> None:
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(-signal.SIGSEGV) == "SIGSEGV"
    assert "memory" in how_it_ended(-signal.SIGKILL)


def test_a_timeout_is_positive() -> None:
    with pytest.raises(ArgumentError, match="timeout must be positive"):
        tune_sparse(ops.spmm(), arguments(), timeout=0.0)
