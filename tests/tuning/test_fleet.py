# SPDX-License-Identifier: Apache-2.0
"""Candidates measured by an executor's workers: same answers; workers that die, hang or are gone cost no record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import formats, ops
from sparsetir.errors import ArgumentError, ArgumentTypeError, ExecutorLostError, TuningError
from sparsetir.schedules import Choices
from sparsetir.tuning import Candidate, Database, tune_sparse
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.measure import MeasurementPlace
from sparsetir.tuning.records import Key, Record
from sparsetir.tuning.workers import local
from sparsetir.tuning.workers.local import Lost, RemoteWorker, packed, prepare
from sparsetir.tuning.workers.remote import (
    ROOM,
    ExecutorMeasurer,
    JobRequest,
    alone,
    described,
    opened,
    sendable,
    slots_of,
    threads_for,
    token_of,
    untuned,
    work,
)
from sparsetir.utils.machine import CORES, machine_name

pytestmark = [
    pytest.mark.usefixtures("quick_comparisons"),
    pytest.mark.slow,
    pytest.mark.optimised,  # workers know no other target than this machine
]

BLOCKS = formats.bsr(2, 2)
CANDIDATES = [Candidate(Choices(tile=tile)) for tile in (8, 16)] + [Candidate(Choices(tile=8), BLOCKS)]


def arguments() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    A = sp.csr_array(sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=rng))
    return {"A": A, "B": rng.standard_normal((30, 16)).astype("float32")}


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(ops.spmm(), arguments(), None)


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    """Workers in this process, whose candidates run in the processes that other tests left idle."""
    with ThreadPoolExecutor(1) as executor:
        yield executor
    leave_room()


def leave_room() -> None:
    """Let the evaluators of this process go."""
    while ROOM.free:
        ROOM.free.popitem()[1][1].close()


def check(kernel: Any) -> None:
    inputs = arguments()
    np.testing.assert_allclose(kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)


def test_workers_do_what_this_process_does(evaluator: Evaluator, processes: Executor) -> None:
    fleet = ExecutorMeasurer(processes, evaluator, [BLOCKS])
    assert fleet.values(BLOCKS) == evaluator.prepare(BLOCKS).values
    assert fleet.values(formats.nm(1, 4)) is None
    assert "nm" in fleet.refused[formats.nm(1, 4)]
    stored = evaluator.prepare(BLOCKS).stored
    assert stored is not None
    assert fleet.stored[BLOCKS].values == stored.values
    before, found = fleet.time(), dict(fleet.measure(CANDIDATES))
    assert before.seconds
    assert list(found) == CANDIDATES
    assert all(each.seconds and each.place == fleet.place for each in found.values())
    assert fleet.is_here
    assert (fleet.place.machine, fleet.place.threads) == (machine_name(), sparsetir.get_num_threads())
    times = fleet.compare(CANDIDATES)
    assert list(times) == [None, *CANDIDATES]
    assert all(0 < seconds < 1 for seconds in times.values())
    fleet.close()
    assert not Path(fleet.path).exists()


def test_a_search_goes_on_from_its_records(processes: Executor, tmp_path: Path) -> None:
    path, inputs = tmp_path / "tuning.jsonl", arguments()
    result = tune_sparse(ops.spmm(), inputs, max_trials=5, executor=processes, database=path)
    check(result.kernel)
    assert (result.measured, result.interrupted) == (5, False)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    trials = [line for line in lines if "comparison" not in line]
    assert len(trials) == 5
    assert all(line["machine"] == machine_name() and line["load"] >= 0 for line in trials)
    # What an executor's workers measured counts where processes of this one would measure.
    again = tune_sparse(ops.spmm(), inputs, max_trials=5, database=path, isolate=False)
    assert again.measured == 0
    assert again.best.candidate == result.best.candidate
    check(sparsetir.build(ops.spmm(), database=path))


class Spoiled(Database):
    """Does something after a record."""

    def __init__(self, path: Path, after: int, do: Callable[[], object]) -> None:
        super().__init__(path)
        self.after, self.do = after, do

    def append(self, key: Key, record: Record, **facts: Any) -> None:
        super().append(key, record, **facts)
        self.after -= 1
        if self.after == 0:
            self.do()


def recorded(path: Path) -> list[dict[str, Any]]:
    """The trials on disk."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if "comparison" not in line]


def workers_of(executor: ProcessPoolExecutor) -> list[int]:
    return list(executor._processes)  # what a test may know of the standard library


def children_of(process: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")
def test_what_is_killed_costs_one_trial_or_ends_the_search(
    evaluator: Evaluator, tmp_path: Path, processes: Executor
) -> None:
    """A candidate's process the first, an executor's worker the second; no record is lost."""
    path, inputs = tmp_path / "tuning.jsonl", arguments()
    with ProcessPoolExecutor(1) as executor:
        fleet = ExecutorMeasurer(executor, evaluator)
        assert fleet.time().seconds
        (child,) = children_of(workers_of(executor)[0])
        os.kill(child, signal.SIGKILL)
        first = dict(fleet.measure(CANDIDATES))
        assert any("SIGKILL" in (found.error or "") for found in first.values())
        assert all(found.seconds for found in dict(fleet.measure(CANDIDATES)).values())
        fleet.close()
        records = Spoiled(path, 3, lambda: os.kill(workers_of(executor)[0], signal.SIGKILL))
        with pytest.warns(UserWarning, match="ended early, after .* measures no more candidates: BrokenProcessPool"):
            result = tune_sparse(ops.spmm(), inputs, max_trials=9, executor=executor, database=records)
        with pytest.raises(ExecutorLostError, match="go on with a new executor and the same database"):
            tune_sparse(ops.spmm(), inputs, max_trials=9, executor=executor)
    assert result.interrupted
    check(result.kernel)
    assert 3 <= len(result.history) == len(recorded(path)) < 9
    again = tune_sparse(ops.spmm(), inputs, max_trials=9, executor=processes, database=path)
    assert again.measured == 9 - len(result.history)


def hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_hangs_is_done_without(evaluator: Evaluator) -> None:
    with ProcessPoolExecutor(2) as executor:
        fleet = ExecutorMeasurer(executor, evaluator)
        assert fleet.time().seconds
        executor.submit(hang)
        try:
            assert all(each.seconds for each in dict(fleet.measure(CANDIDATES)).values())
            executor.submit(hang)
            fleet.timeout = 0.3  # of which a worker has six to answer
            with pytest.raises(ExecutorLostError, match=r"no worker of the executor answered within 1\.8 s, twice"):
                dict(fleet.measure(CANDIDATES))
        finally:
            for worker in workers_of(executor):
                os.kill(worker, signal.SIGCONT)
        fleet.close()


class Scheduler(Executor):
    """One that may be lost: jobs it has are cancelled, and later ones refused."""

    def __init__(self, workers: Executor) -> None:
        self.workers, self.pending, self.is_lost = workers, list[Future[Any]](), False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.is_lost:
            raise ConnectionError("the scheduler is gone")
        self.pending.append(self.workers.submit(fn, *args, **kwargs))
        return self.pending[-1]

    def lose(self) -> None:
        self.is_lost = True
        for future in self.pending:
            future.cancel()


def test_a_lost_scheduler_loses_no_record(threads: Executor, tmp_path: Path) -> None:
    path, scheduler = tmp_path / "tuning.jsonl", Scheduler(threads)
    records = Spoiled(path, 4, scheduler.lose)
    with pytest.warns(UserWarning, match="ended early, after .* trials: the executor measures no more candidates"):
        result = tune_sparse(ops.spmm(), arguments(), max_trials=12, executor=scheduler, database=records)
    assert result.interrupted
    assert 4 <= len(result.history) == len(recorded(path)) < 12
    check(result.kernel)


def pin_every_other(count: Any) -> None:
    """One worker of two has a single core."""
    with count.get_lock():
        count.value += 1
        if count.value % 2 == 0:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.mark.skipif(CORES < 2, reason="workers of two kinds need two cores")
def test_workers_of_two_kinds(tmp_path: Path, evaluator: Evaluator) -> None:
    path, inputs = tmp_path / "tuning.jsonl", arguments()
    context = get_context("fork")
    with ProcessPoolExecutor(2, context, pin_every_other, (context.Value("i", 0),)) as executor:
        fleet = ExecutorMeasurer(executor, evaluator, machines="each")
        while len(fleet.places) < 2:  # one may take seconds to begin
            assert fleet.time().seconds
        how: dict[str, Any] = {"max_trials": 12, "executor": executor, "formats": []}
        message = 'machines="same" expects one kind of worker, got .* and .*; use machines="each"'
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with pytest.raises((ExecutorLostError, UserWarning), match=message):
                tune_sparse(ops.spmm(), inputs, **how)
        kinds: set[int] = set()
        for more in range(1, 9):  # one worker may be so fast that it takes all trials of a short search
            how["max_trials"] = 12 * more
            result = tune_sparse(ops.spmm(), inputs, machines="each", database=path, **how)
            kinds = {line["threads"] for line in recorded(path)}
            if len(kinds) > 1:
                break
        fleet.close()
    check(result.kernel)
    assert result.key.threads in (1, sparsetir.get_num_threads())
    assert kinds == {1, sparsetir.get_num_threads()}
    for kind in kinds:
        mine = [line for line in recorded(path) if line["threads"] == kind]
        assert not mine[0]["fixed"]  # the untuned kernel
        assert all(line["fixed"] for line in mine[1:])


def test_arguments_come_by_a_file_or_are_asked_for(evaluator: Evaluator, tmp_path: Path) -> None:
    payload = sendable(evaluator)
    order = JobRequest(token_of(payload), str(tmp_path / "operands"), described, (), 60.0, (machine_name(), 1))
    leave_room()
    assert work(order).is_missing
    (tmp_path / "operands").write_bytes(b"something else")
    assert work(order).is_missing  # and not loaded
    (tmp_path / "operands").write_bytes(payload)
    place = work(order).place
    assert place is not None
    assert place.threads == 1
    (tmp_path / "operands").unlink()
    assert work(order).place == place  # they are kept
    other = JobRequest("0" * 64, "", untuned, (), 60.0, (machine_name(), 1), b"no pickle")
    assert "could not begin" in (work(other).error or "")
    leave_room()


def test_one_is_timed_at_a_time() -> None:
    inside, most = [], []

    def enter() -> None:
        with alone(10.0):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    each = [threading.Thread(target=enter) for _ in range(4)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert most == [1, 1, 1, 1]
    with alone(10.0), alone(0.02):  # who holds it for too long is not waited for
        pass


def test_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert [threads_for(machine_name(), n) for n in (1, 4, 8)] == [1, 4, 4]
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    assert threads_for("another", 1) == 4
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    assert threads_for("another", 1) == 3


class Odd(Executor):
    """One that gives every job the same answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.answer


def answered(value: Any) -> Future[Any]:
    found: Future[Any] = Future()
    found.set_result(value)
    return found


def test_what_is_no_executor(threads: Executor) -> None:
    inputs = arguments()
    with pytest.raises(ArgumentTypeError, match=r"executor: expected a concurrent\.futures\.Executor, .* got int"):
        tune_sparse(ops.spmm(), inputs, executor=2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="machines is 'same' or 'each', got 'all'"):
        tune_sparse(ops.spmm(), inputs, executor=threads, machines="all")
    with pytest.raises(ArgumentError, match="machines='each' is about the workers of an executor, and none is given"):
        tune_sparse(ops.spmm(), inputs, machines="each")
    for answer, message in ((None, "submit returned NoneType"), (answered("hello"), "a job was answered by str, not")):
        with pytest.raises(ExecutorLostError, match=message):
            tune_sparse(ops.spmm(), inputs, executor=Odd(answer))
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with pytest.raises(ExecutorLostError, match="RuntimeError: cannot schedule new futures after shutdown"):
        tune_sparse(ops.spmm(), inputs, executor=closed)
    assert [slots_of(executor) for executor in (threads, ThreadPoolExecutor(9), object())] == [4, 9, 4]


def test_arguments_that_cannot_be_sent(threads: Executor) -> None:
    class Array(np.ndarray):
        pass

    inputs = arguments()
    inputs["B"] = inputs["B"].view(Array)
    with pytest.raises(TuningError, match=r"workers of an executor are sent arguments of numpy and scipy, .* got"):
        tune_sparse(ops.spmm(), inputs, executor=threads)


def test_executors_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("threads:2", "processes:0", "processes:two", "tcp:host", ""):
        with pytest.raises(ArgumentError, match="an executor by name is processes:2, or an address such as"):
            opened(text).__enter__()
    with opened("processes:3") as executor:
        assert slots_of(executor) == 4
    with opened(None) as executor:
        assert executor is None
    pytest.importorskip("distributed")
    with pytest.raises(ArgumentError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:1: "), short_wait():
        opened("tcp://127.0.0.1:1").__enter__()


@contextmanager
def short_wait() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsetir.tuning.workers.remote.CONNECT_SECONDS", 0.5)
        yield


@pytest.mark.slow
def test_workers_of_dask(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    path, inputs = tmp_path / "tuning.jsonl", arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a dashboard's port that is taken
        cluster = distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
    with cluster, opened(cluster.scheduler_address) as executor:
        result = tune_sparse(ops.spmm(), inputs, max_trials=3, formats=[], executor=executor, database=path)
    check(result.kernel)
    assert [record.place.machine for record in result.history if record.place] == [machine_name()] * 3
    assert len(recorded(path)) == 3


class Answers:
    """A desk with the answers that it will give."""

    def __init__(self, *answers: Any) -> None:
        self.place, self.answers = None, iter(answers)

    def ask(self, *_: Any) -> Any:
        return next(self.answers)


def test_a_process_that_dies_as_it_begins_is_begun_again() -> None:
    place = MeasurementPlace("here", 2, "llvm", "1")
    desk: Any = Answers(Lost("was killed"), place)
    described(desk)
    assert desk.place is place
    with pytest.raises(TuningError, match="a worker process could not begin: it was killed"):
        described(Answers(Lost("was killed"), Lost("was killed")))  # type: ignore[arg-type]


def script(search: str) -> str:
    """Write a script that prints the error of a search."""
    return f"""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import numpy as np, scipy.sparse as sp, sparsetir

def stop():
    raise KeyError("no licence")

def search(executor):
    A = sp.random_array((20, 20), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    inputs = {{"A": A, "B": np.ones((20, 8), "float32")}}
    try:
        sparsetir.tune_sparse(sparsetir.ops.spmm(), inputs, max_trials=1, formats=[], executor=executor, progress=False)
    except Exception as error:
        print("OUTCOME", type(error).__name__, error, flush=True)

{search}
"""


POOL = 'ProcessPoolExecutor(1, get_context("spawn")'
STARTS = {
    "by name": ('search("processes:1")', "below `if __name__ =="),
    "a pool": (f"with {POOL}) as pool:\n    search(pool)", "below `if __name__ =="),
    "an import that fails": (
        'if __name__ != "__main__":\n    raise ValueError("no such device")\nsearch("processes:1")',
        "ValueError: no such device",
    ),
    "an initializer": (
        f'if __name__ == "__main__":\n    with {POOL}, initializer=stop) as pool:\n        search(pool)',
        "KeyError: 'no licence'",
    ),
}


@pytest.mark.parametrize("case", STARTS)
def test_why_the_processes_of_a_pool_cannot_start(case: str, tmp_path: Path) -> None:
    search, expected = STARTS[case]
    path = tmp_path / "script.py"
    path.write_text(script(search))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=110, check=False)
    outcomes = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME")]
    assert len(outcomes) == 1, done.stderr  # none of a process of the pool
    assert outcomes[0].startswith("OUTCOME ExecutorLostError the worker processes of the executor cannot start: ")
    assert expected in outcomes[0]


def test_why_a_process_of_a_search_cannot_begin(monkeypatch: pytest.MonkeyPatch, evaluator: Evaluator) -> None:
    monkeypatch.setattr(local.Process, "idle", [])
    monkeypatch.setattr(local, "BEGIN", local.BEGIN.replace("import tvm", "import tvm_that_is_not_there"))
    worker = RemoteWorker(packed(evaluator) or b"", 20.0)
    worker.post(prepare, None)
    with pytest.raises(ExecutorLostError, match="could not begin: ModuleNotFoundError: No module named 'tvm_that"):
        worker.result()
    monkeypatch.setattr(sys, "executable", "/there/is/no/such/python")
    with pytest.raises(ExecutorLostError, match=r"could not be started: .*No such file"):
        RemoteWorker(b"", 20.0)
