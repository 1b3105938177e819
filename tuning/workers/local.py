# SPDX-License-Identifier: Apache-2.0
"""Local worker processes that measure candidates and may crash or hang."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import tvm
from tvm import tirx

from sparsetir.errors import ExecutorLostError, TuningError
from sparsetir.formats.format import Format
from sparsetir.tuning.evaluator import Evaluator, Measurer, Prepared
from sparsetir.tuning.lowered_program import keep
from sparsetir.tuning.measure import Measurement, at_pace, duel
from sparsetir.tuning.space import Candidate, Values
from sparsetir.utils.arguments import package_of
from sparsetir.utils.machine import CORES
from sparsetir.utils.threads import get_num_threads

# Worker processes of a search. A crash or a hang of a candidate does not affect the caller; a worker exits after its
# parent.


WORKERS = max(1, min(4, CORES))
# TVM imports torch where it is installed, which takes seconds; workers need none, as no torch object is sent (`SENT`).
# The first message to the parent is the result of `begin`; a string is the reason why there is no evaluator.
BEGIN = """
import sys
try:
    sys.modules["torch"] = None
    import tvm
    del sys.modules["torch"]
    from sparsetir.tuning.workers.local import serve
except BaseException as error:
    from multiprocessing.connection import Connection
    Connection(int(sys.argv[1])).send(f"{type(error).__name__}: {error}")
    raise
serve(int(sys.argv[1]), int(sys.argv[2]))
"""
WORKER = "SPARSETIR_WORKER"  # environment variable of a worker
LAST_SECONDS = 5.0  # for a worker whose parent has ended to write machine code to disk
WATCH_SECONDS = 1.0  # between checks that the parent runs
BEGINNINGS = 3  # attempts to start a worker that dies before its first job
PATIENT = 6.0  # factor of the timeout for a conversion, and for the start of a worker

Job: TypeAlias = "Callable[..., Any]"

# ---------------------------------------------------------------- jobs: functions of an evaluator, sent by their names


def prepare(evaluator: Evaluator, format: Format | None) -> Prepared:
    """Run `Evaluator.prepare` in the worker."""
    return evaluator.prepare(format)


def compile_candidate(evaluator: Evaluator, candidate: Candidate) -> str | None:
    """Run `Evaluator.compile` in the worker."""
    return evaluator.compile(candidate)


def compile_together(evaluator: Evaluator, *candidates: Candidate) -> None:
    """Run `Evaluator.compile_together` in the worker."""
    evaluator.compile_together(candidates)


def time_candidate(evaluator: Evaluator, candidate: Candidate | None) -> Measurement:
    """Run `Evaluator.time` in the worker."""
    return evaluator.time(candidate)


def typical_seconds(evaluator: Evaluator, candidate: Candidate | None, seconds: float) -> float:
    """Run `Evaluator.typical` in the worker."""
    return evaluator.typical(candidate, seconds)


def interleaved_seconds(evaluator: Evaluator, candidate: Candidate, seconds: float) -> tuple[float, float]:
    """Run `Evaluator.interleaved` in the worker."""
    return evaluator.interleaved(candidate, seconds)


# ------------------------------------------------------------------------------------------------------------- workers


class Lost(Exception):
    """A worker died or took too long."""


class Worker(Protocol):
    """Runner of jobs, functions of an `Evaluator`, in the order in which they are posted."""

    def post(self, job: Job, *args: Any) -> None:
        """Send a job."""

    def result(self) -> tuple[Job, tuple[Any, ...], Any]:
        """Return the oldest job whose result was not taken, and its result; a `Lost` if it cost a worker its life."""

    @property
    def pending(self) -> int:
        """Jobs whose result was not taken."""

    def allow(self, seconds: float) -> None:
        """Extend the timeout of a job to at least so many seconds."""

    def close(self) -> None:
        """Forget everything; the next job begins from the start."""


class LocalWorker:
    """An evaluator in this process."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.done: deque[tuple[Job, tuple[Any, ...], Any]] = deque()

    @property
    def pending(self) -> int:
        return len(self.done)

    def post(self, job: Job, *args: Any) -> None:
        self.done.append((job, args, job(self.evaluator, *args)))

    def result(self) -> tuple[Job, tuple[Any, ...], Any]:
        return self.done.popleft()

    def allow(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        self.done.clear()


class Process:
    """A Python process that answers jobs."""

    idle: ClassVar[list[Process]] = []

    def __init__(self, threads: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.threads, self.path = threads or get_num_threads(), modules_path()
        own = {"PYTHONPATH": self.path, "TVM_NUM_THREADS": str(self.threads), WORKER: "1"}
        environment = {**os.environ, **own}  # the threads that wait sleep soon, see `sparsetir.utils.threads`
        command = [sys.executable, "-c", BEGIN, str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C interrupts the parent only
        )
        theirs.close()
        self.connection: Connection[Any, Any] = Connection(ours.detach())

    @classmethod
    def take(cls, threads: int | None = None) -> Process:
        """Return an idle worker process, or a new one; with as many threads as this process unless told otherwise."""
        wanted = threads or get_num_threads()
        while cls.idle:
            idle_process = cls.idle.pop()
            is_same = (idle_process.threads, idle_process.path) == (wanted, modules_path())
            if idle_process.process.poll() is None and is_same:
                return idle_process
            idle_process.kill()
        return cls(wanted)

    @classmethod
    def warm(cls) -> None:
        """Begin as many as a pool may want, side by side: loading TVM takes each of them a second or more."""
        while can_isolate() and len(cls.idle) < WORKERS:
            cls.idle.append(cls())

    def rest(self) -> None:
        """Keep the process for the next search, if it is still there."""
        try:
            self.connection.send((end, ()))
        except OSError:
            self.kill()
        else:
            self.idle.append(self)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def can_isolate() -> bool:
    """Return whether this process may begin others."""
    return os.name == "posix" and bool(sys.executable) and WORKER not in os.environ


def modules_path() -> str:
    """Return where a worker looks for modules, such as that of a template."""
    return os.pathsep.join(entry for entry in sys.path if entry)


@atexit.register
def _dismiss() -> None:
    """End idle workers; each writes its machine code to disk first."""
    while Process.idle:
        idle_process = Process.idle.pop()
        idle_process.connection.close()
        idle_process.process.returncode = 0  # the process is not waited for


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Process.idle.clear)  # they are processes of the parent


class RemoteWorker:
    """An evaluator in a process of its own.

    Parameters
    ----------
    payload : bytes
        What an evaluator is made of, pickled.
    timeout : float
        Seconds of one job.
    threads : int, optional
        Of its kernels; by default as many as in this process.
    """

    def __init__(self, payload: bytes, timeout: float, threads: int | None = None) -> None:
        self.payload, self.timeout, self.threads = payload, timeout, threads
        self.jobs: deque[tuple[Job, tuple[Any, ...]]] = deque()
        self.process: Process | None = None
        self.is_dead = False  # before its evaluator was made
        self.start()

    def start(self) -> None:
        """Send the evaluator to a process, then every job that waits; its answer is awaited with the first result."""
        self.has_begun = False
        for attempt in range(1, BEGINNINGS + 1):
            self.process = None
            try:
                self.process = Process.take(self.threads)
                self.process.connection.send((begin, (self.payload,)))
                for job in self.jobs:
                    self.process.connection.send(job)
                return
            except OSError as error:  # the process has just ended
                if self.process is not None:
                    self.process.kill()
                if attempt == BEGINNINGS:
                    raise ExecutorLostError(f"a worker process could not be started: {error}") from error

    @property
    def pending(self) -> int:
        return len(self.jobs)

    def post(self, job: Job, *args: Any) -> None:
        if self.process is None:
            self.start()
        assert self.process is not None
        self.jobs.append((job, args))
        try:
            self.process.connection.send((job, args))
        except OSError:
            pass  # the process has ended: reported when the result is awaited

    def result(self) -> tuple[Job, tuple[Any, ...], Any]:
        job, args = self.jobs[0]
        if not self.has_begun:
            self._await_beginning()
        try:
            outcome = self._receive(self.timeout * _patience(job, args))
        except Lost as lost:
            outcome = lost
        self.jobs.popleft()
        if isinstance(outcome, Lost):
            self.start()
        return job, args, outcome

    def allow(self, seconds: float) -> None:
        self.timeout = max(self.timeout, seconds)

    def begins(self) -> str | None:
        """Wait until the evaluator is there; the reason where there can be none."""
        try:
            error: str | None = self._receive(self.timeout * PATIENT)
        except Lost as lost:
            error, self.is_dead = str(lost), True
        else:
            self.is_dead = False
        self.has_begun = error is None
        return error

    def _await_beginning(self) -> None:
        for _ in range(BEGINNINGS):
            error = self.begins()
            if error is None:
                return
            if not self.is_dead:
                break
            self.start()  # after a kill, which the evaluator need not have caused
        raise ExecutorLostError(f"a worker process could not begin: {error}; try isolate=False")

    def _receive(self, limit: float) -> Any:
        assert self.process is not None
        try:
            if self.process.connection.poll(limit):
                return self.process.connection.recv()
            why = f"took more than {limit:g} s"
        except (EOFError, OSError):
            why = f"crashed: {how_it_ended(self.process.process.wait())}"
        self.process.kill()
        raise Lost(why)

    def close(self) -> None:
        if self.process is not None and self.has_begun and not self.jobs:
            self.process.rest()
        elif self.process is not None:
            self.process.kill()
        self.process = None


def _patience(job: Job, args: tuple[Any, ...]) -> float:
    """Return how many times as long as another a job may take."""
    if job is compile_together:
        return float(len(args))
    return PATIENT if job is prepare or args[0] is None else 1.0  # also for the untuned kernel, which must be timed


def how_it_ended(code: int) -> str:
    """Return the exit code of a process in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, as when memory runs out" if name == "SIGKILL" else name


def serve(descriptor: int, parent: int) -> None:
    """Answer the jobs that come over a socket until its other end is closed, or the process `parent` ends."""
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    served = Served()
    while True:
        try:
            job, args = connection.recv()
            if job is end:
                served.evaluator = None
            else:
                connection.send(job(served if job is begin else served.evaluator, *args))
        except (EOFError, OSError):
            ending.set()
            keep(seconds=LAST_SECONDS)  # the process is not waited for
            os._exit(0)  # handlers of the exit have run


ending = threading.Event()


def _end_after(parent: int) -> None:
    """End this process when its parent has ended, also from within a candidate that hangs."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    if ending.wait(WATCH_SECONDS):
        time.sleep(2 * LAST_SECONDS)
    os._exit(1)


class Served:
    """State of a worker process: one evaluator after another."""

    evaluator: Evaluator | None = None


def begin(served: Served, payload: bytes) -> str | None:
    """Make the evaluator of a payload; the reason where that cannot be."""
    served.evaluator = None
    served.evaluator, error = _unpacked(payload)
    return error


def end(served: Served) -> None:
    """End the evaluator without waiting for an answer."""


def _unpacked(payload: bytes) -> tuple[Evaluator | None, str | None]:
    try:
        return evaluator_of(payload), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def evaluator_of(payload: bytes) -> Evaluator:
    """Return the evaluator that a payload is made of.

    Raises
    ------
    TuningError
        Its template is another one here.
    """
    program, inputs, target, template, text = pickle.loads(payload)
    if template is not None and template.text != text:
        raise TuningError(f"{template!r} is another one there")
    func = tvm.ir.load_json(program)
    assert isinstance(func, tirx.PrimFunc)
    return Evaluator(func, inputs, target, template, is_first=False)


# Measurement of candidates in worker processes, whose crashes and hangs do not affect the caller, or in this process.
#
# The workers of a pool compile in parallel and measure one at a time, while the others wait. They outlive a search, so
# that the next one need not start processes and import TVM; a worker exits after its parent.


MOST_BYTES = 1 << 30  # of arguments to copy to workers
TURN_SECONDS = 0.005  # of a candidate's second and third turn
CLOSE, TURNS = 1.15, 3  # slower candidates, relative to the best so far, get no second turn; and the number of turns
AHEAD = 2  # formats that are prepared while a batch is compiled
TIMEOUT = 20.0  # seconds of one compilation or measurement
ALLOWED = 20.0  # multiple of the time of the untuned kernel, if that is longer
CHEAP = 0.3  # seconds of a conversion that a second worker may repeat in order to share the compilation
SENT = ("numpy", "scipy", "sparsetir", "builtins", "ml_dtypes")  # packages whose objects are sent to workers


class ProcessMeasurer(Measurer):
    """Workers that share the work of a search.

    Parameters
    ----------
    workers : sequence of Worker
    upcoming : sequence of Format
        In the order in which they will be wanted.
    """

    def __init__(self, workers: Sequence[Worker], upcoming: Iterable[Format] = ()) -> None:
        self.workers = list(workers)
        self.upcoming = deque(upcoming) if len(self.workers) > 1 else deque()
        self.homes: dict[Format | None, list[Worker]] = {None: list(self.workers)}
        super().__init__()
        self.times: dict[Candidate | None, float] = {}

    # ------------------------------------------------------------------------------------------ formats

    def values(self, format: Format | None) -> Values | None:
        """Return the open choices of a format; None where it has no variant."""
        if format not in self.known:
            self._home(format).post(prepare, format)
            self._look_ahead(len(self.workers) - 1)
            for worker in self.workers:
                self._drain(worker)
        return self.known[format].values

    def _look_ahead(self, count: int) -> None:
        """Send the preparation of the next formats, which runs while other results are awaited."""
        while count > 0 and self.upcoming:
            format = self.upcoming.popleft()
            if format not in self.homes:
                self._home(format).post(prepare, format)
                count -= 1

    def _home(self, format: Format | None) -> Worker:
        """Return the worker that prepares a format: the one with the fewest."""
        if format not in self.homes:
            counts = [sum(worker in members for members in self.homes.values()) for worker in self.workers]
            self.homes[format] = [self.workers[int(np.argmin(counts))]]
        return self.homes[format][0]

    # ----------------------------------------------------------------------------------------- measuring

    def measure(self, batch: Sequence[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Compile candidates side by side, then check and time one after another."""
        workers, timed = self._compile(batch, ahead=AHEAD), dict[Candidate, Measurement]()
        try:
            for candidate, worker in workers.items():
                measurement = Measurement(error=worker) if isinstance(worker, str) else self.time(candidate, worker)
                timed[candidate] = measurement
            for turn in range(1, TURNS):
                near = [c for c, measurement in timed.items() if measurement.wants_a_turn(CLOSE * self.best, turn)]
                self._time_again({c: workers[c] for c in near}, timed)
        except KeyboardInterrupt:
            yield from timed.items()
            raise
        yield from timed.items()

    def _time_again(self, workers: Mapping[Candidate, Any], timed: dict[Candidate, Measurement]) -> None:
        """Time candidates again, each some time after its last turn, and those of a worker one after another."""
        for candidate, worker in sorted(workers.items(), key=lambda item: self.workers.index(item[1])):
            worker.post(interleaved_seconds, candidate, TURN_SECONDS)
            *_, outcome = worker.result()
            seconds, untuned = (float("inf"), float("inf")) if isinstance(outcome, Lost) else outcome
            timed[candidate] = self._noted(
                candidate, timed[candidate].again(at_pace(seconds, untuned, self.usual or untuned))
            )

    def time(self, candidate: Candidate | None = None, worker: Worker | None = None) -> Measurement:
        """Check and time a candidate, None for the untuned kernel."""
        if candidate is None and worker is None:
            # In every worker, as they start in parallel: a starting process would disturb the timing of another.
            return min(
                (self.time(None, each) for each in reversed(self.workers)), key=lambda m: m.seconds or float("inf")
            )
        worker = worker or self.workers[0]
        worker.post(time_candidate, candidate)
        *_, outcome = worker.result()
        if isinstance(outcome, Lost):
            return Measurement(error=f"its process {outcome}")
        if candidate is None and outcome.seconds is not None:
            self.usual = min(outcome.seconds, self.usual or outcome.seconds)
            for each in self.workers:
                each.allow(ALLOWED * outcome.seconds)
        return self._noted(candidate, outcome if self.usual is None else outcome.paced(self.usual))

    def _noted(self, candidate: Candidate | None, measurement: Measurement) -> Measurement:
        """Return a measurement, its seconds kept in place of earlier ones of the candidate."""
        if measurement.seconds is not None:
            self.times[candidate] = measurement.seconds
        return measurement

    @property
    def best(self) -> float:
        """Seconds of the fastest."""
        return min(self.times.values(), default=float("inf"))

    def _compile(self, batch: Sequence[Candidate], *, ahead: int = 0) -> dict[Candidate, Worker | str]:
        """Return where each candidate is ready, or why it is not."""
        compiled_by: dict[Candidate, Worker | str] = {}
        shares: dict[int, list[Candidate]] = {n: [] for n in range(len(self.workers))}
        for candidate in batch:
            compiled_by[candidate] = worker = self._least_busy(candidate.format, shares)
            shares[self.workers.index(worker)].append(candidate)
        for n, share in shares.items():
            if len(share) > 1:
                self.workers[n].post(compile_together, *share)
            for candidate in share:
                self.workers[n].post(compile_candidate, candidate)
        self._look_ahead(ahead)
        for worker in self.workers:
            for candidate, error in self._drain(worker):
                if error is not None:
                    compiled_by[candidate] = error
        return compiled_by

    def _drain(self, worker: Worker) -> list[tuple[Candidate, str | None]]:
        """Take all results of a worker: formats are noted, compilations returned."""
        compiled = []
        while worker.pending:
            job, (asked, *_), outcome = worker.result()
            if job is prepare:
                self.known[asked] = Prepared(error=f"its process {outcome}") if isinstance(outcome, Lost) else outcome
            elif job is compile_candidate:
                compiled.append((asked, f"its process {outcome}" if isinstance(outcome, Lost) else outcome))
        return compiled

    def _least_busy(self, format: Format | None, shares: Mapping[int, Sequence[Candidate]]) -> Worker:
        """Return a worker for a candidate: one with its format, or another if busier and converting is cheap.

        `shares` has what each is to do that was not asked for yet.
        """
        self._home(format)
        holders = self.homes[format]

        def tasks(worker: Worker) -> int:
            return worker.pending + len(shares[self.workers.index(worker)])

        own, other = min(holders, key=tasks), min(self.workers, key=tasks)
        ready = self.known.get(format)
        is_cheap = ready is not None and ready.stored is not None and ready.stored.seconds < CHEAP
        if tasks(own) - tasks(other) < 2 or not is_cheap:
            return own
        holders.append(other)
        return other

    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        """Time candidates and, at None, the untuned kernel, in turn; times stay as they were where no worker begins."""
        try:
            workers = self._compile(candidates)
            cases: dict[Candidate | None, Worker] = {None: self.workers[0]}
            cases.update({c: worker for c, worker in workers.items() if not isinstance(worker, str)})
            return duel({candidate: partial(_typical, worker, candidate) for candidate, worker in cases.items()})
        except ExecutorLostError:
            return {c: self.times[c] for c in (None, *candidates) if c in self.times}

    def rest(self) -> None:
        """Release the worker processes; the next job acquires some again."""
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _typical(worker: Worker, candidate: Candidate | None, seconds: float) -> float:
    worker.post(typical_seconds, candidate, seconds)
    *_, outcome = worker.result()
    return float("inf") if isinstance(outcome, Lost) else float(outcome)


def pool_of(
    evaluator: Evaluator, upcoming: Iterable[Format] = (), *, isolate: bool, timeout: float = TIMEOUT
) -> ProcessMeasurer:
    """Return workers for an evaluator, or this process where they are not wanted or cannot be.

    Parameters
    ----------
    evaluator : Evaluator
    upcoming : iterable of Format
    isolate : bool
        Whether to use worker processes.
    timeout : float
        Seconds of one job.
    """
    if WORKER in os.environ:
        begun = "a worker process imported the module of a template, which begins a search"
        raise TuningError(f'{begun}; put the search below if __name__ == "__main__"')
    payload = packed(evaluator) if isolate and can_isolate() else None
    if payload is None:
        return ProcessMeasurer([LocalWorker(evaluator)], upcoming)
    count = max(1, min(WORKERS, MOST_BYTES // max(len(payload), 1)))
    pool = ProcessMeasurer([RemoteWorker(payload, timeout) for _ in range(count)], upcoming)
    remote = [worker for worker in pool.workers if isinstance(worker, RemoteWorker)]
    if evaluator.template is None or all(worker.begins() is None for worker in remote):
        return pool
    pool.close()  # a worker imports the template's module, which may be missing or changed
    return ProcessMeasurer([LocalWorker(evaluator)], upcoming)


def can_send(inputs: Mapping[str, Any]) -> bool:
    """Return whether all arguments are of packages whose objects workers can read."""
    return all(package_of(value) in SENT for value in inputs.values())


def packed(evaluator: Evaluator) -> bytes | None:
    """Return the serialized parts of an evaluator; None if it cannot be sent to a worker or is very large."""
    if not can_send(evaluator.inputs):
        return None
    if sum(array.nbytes for array in evaluator.workload.arrays.values()) > MOST_BYTES:
        return None
    try:
        text = evaluator.template.text if evaluator.template is not None else None
        func = tvm.ir.save_json(evaluator.func)
        return pickle.dumps((func, evaluator.inputs, evaluator.target, evaluator.template, text), protocol=5)
    except Exception:  # objects of other packages may raise any error
        return None
