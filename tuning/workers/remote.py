# SPDX-License-Identifier: Apache-2.0
"""Workers of a `concurrent.futures` executor that measure candidates."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import current_process, get_context, spawn
from pathlib import Path
from typing import Any

from sparsetir.errors import ArgumentError, ArgumentTypeError, ExecutorLostError, TuningError
from sparsetir.formats.format import Format
from sparsetir.schedules import Choices
from sparsetir.tuning.evaluator import Evaluator, Measurer, Prepared
from sparsetir.tuning.measure import Measurement, MeasurementPlace, at_pace, duel, reason
from sparsetir.tuning.records import Key, Record
from sparsetir.tuning.space import Candidate, Values
from sparsetir.tuning.tuned_kernel import circumstances
from sparsetir.tuning.workers.local import (
    ALLOWED,
    CLOSE,
    PATIENT,
    TIMEOUT,
    TURN_SECONDS,
    TURNS,
    Job,
    LocalWorker,
    Lost,
    ProcessMeasurer,
    RemoteWorker,
    Worker,
    can_isolate,
    compile_candidate,
    evaluator_of,
    interleaved_seconds,
    packed,
    prepare,
    time_candidate,
    typical_seconds,
)
from sparsetir.tuning.workers.rpc import parsed
from sparsetir.utils.arguments import package_of, shown
from sparsetir.utils.machine import machine_name
from sparsetir.utils.threads import get_num_threads

# The worker side: `work`, a function that any `concurrent.futures.Executor` can send.
#
# Candidates run in a child process of the worker, so that a crash or a hang ends neither the worker nor its executor.
# The data of an evaluator are stored by their hash: a worker reads them from a file of the caller where it can, and
# otherwise requests them once. A lock per machine serializes timing, also across executors.


try:
    import fcntl
except ImportError:  # on Windows, where timing has no lock
    fcntl = None  # type: ignore[assignment]

MOST_HELD = 4  # idle evaluators that a worker keeps
LOCK = "sparsetir-timing.lock"
LOOK_SECONDS = 0.003  # between attempts to acquire the lock


@dataclass(frozen=True)
class JobRequest:
    """A job for a worker.

    Parameters
    ----------
    token : str
        Hash of what the evaluator is made of.
    path : str
        A file that holds it, where the worker sees the same files.
    job : callable
        One of `JOBS`.
    args : tuple
    timeout : float
        Seconds of a compilation or a measurement.
    here : tuple of (str, int)
        The machine of the caller, and its number of threads.
    payload : bytes, optional
        What the evaluator is made of, for a worker that asked for it.
    """

    token: str
    path: str
    job: Job
    args: tuple[Any, ...]
    timeout: float
    here: tuple[str, int]
    payload: bytes | None = None


@dataclass(frozen=True)
class JobResult:
    """A worker's answer to an order.

    Parameters
    ----------
    value : object
    place : MeasurementPlace, optional
        Where it ran.
    load : float, optional
        The machine's load average of the last minute.
    error : str, optional
        Why the worker could not begin.
    is_missing : bool
        Whether it must be given what the evaluator is made of.
    """

    value: Any = None
    place: MeasurementPlace | None = None
    load: float | None = None
    error: str | None = None
    is_missing: bool = False


def work(order: JobRequest) -> JobResult:
    """Do a job.

    Whatever goes wrong with a candidate is part of the answer.
    """
    with _desk(order) as desk:
        if desk is None:
            return JobResult(is_missing=True)
        try:
            outcome = order.job(desk, *order.args)
            return JobResult(outcome, desk.place, load_average())
        except TuningError as error:
            desk.close()
            return JobResult(error=f"{error} (on {machine_name()})")


def token_of(payload: bytes) -> str:
    """Return the name of what an evaluator is made of."""
    return hashlib.sha256(payload).hexdigest()


def load_average() -> float | None:
    """Return the load average of the last minute, where the system reports it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


# --------------------------------------------------------------------------------------------------- one evaluator


class EvaluatorWorker:
    """One evaluator of a worker, in a process of its own where that can be."""

    def __init__(self, payload: bytes, timeout: float, threads: int) -> None:
        self.timeout, self.is_open = timeout, True
        if can_isolate():
            self.worker: Worker = RemoteWorker(payload, timeout, threads)
        else:
            self.worker = LocalWorker(evaluator_of(payload))
        self.place: MeasurementPlace | None = None

    def ask(self, job: Job, *args: Any) -> Any:
        """Return the result of a job of an evaluator, a `Lost` where it cost the process its life."""
        self.worker.allow(self.timeout)
        self.worker.post(job, *args)
        *_, outcome = self.worker.result()
        return outcome

    def alone(self) -> Any:
        """Return a context manager that excludes other timings on this machine."""
        return alone(self.timeout) if fcntl is not None else nullcontext()

    def close(self) -> None:
        self.is_open = False
        self.worker.close()


def described(desk: EvaluatorWorker) -> None:
    """Find out where the evaluator runs."""
    if desk.place is None:
        place = desk.ask(place_of, None)
        if isinstance(place, Lost):  # a kill at the start does not predict the next one
            place = desk.ask(place_of, None)
        if isinstance(place, Lost):
            raise TuningError(f"a worker process could not begin: it {place}")
        desk.place = place


def place_of(evaluator: Evaluator, _: None) -> MeasurementPlace:
    """Return the place where an evaluator runs, for records."""
    about = circumstances(evaluator.kernel, evaluator.template)
    return MeasurementPlace(**{name: about[name] for name in ("machine", "threads", "target", "versions")})


def prepared(desk: EvaluatorWorker, format: Format | None) -> Prepared:
    """Return a format that is ready, or why it is unavailable."""
    outcome = desk.ask(prepare, format)
    return Prepared(error=f"its process {outcome}") if isinstance(outcome, Lost) else outcome


def untuned(desk: EvaluatorWorker) -> Measurement:
    """Return the untuned kernel, checked and timed."""
    with desk.alone():
        return _measurement(desk.ask(time_candidate, None))


def measured(desk: EvaluatorWorker, candidate: Candidate, best: float) -> Measurement:
    """Return a candidate compiled, checked and timed, twice more if it is near the best.

    Parameters
    ----------
    desk : EvaluatorWorker
    candidate : Candidate
    best : float
        The shortest time so far, relative to that of the untuned kernel.
    """
    error = desk.ask(compile_candidate, candidate)
    if error is not None:
        return Measurement(error=f"its process {error}" if isinstance(error, Lost) else error)
    with desk.alone():
        measurement = _measurement(desk.ask(time_candidate, candidate))
        for number in range(1, TURNS):
            if measurement.usual is None or not measurement.wants_a_turn(CLOSE * best * measurement.usual, number):
                return measurement
            turn = desk.ask(interleaved_seconds, candidate, TURN_SECONDS)
            seconds, usual = (float("inf"), measurement.usual) if isinstance(turn, Lost) else turn
            measurement = measurement.again(at_pace(seconds, usual, measurement.usual))
        return measurement


def compared(desk: EvaluatorWorker, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
    """Return seconds of candidates and, at None, of the untuned kernel, in turn."""
    ready = [c for c in candidates if desk.ask(compile_candidate, c) is None]
    with desk.alone():
        return duel({c: partial(_typical, desk, c) for c in (None, *ready)})


def forgotten(desk: EvaluatorWorker) -> None:
    """Release the evaluator."""
    desk.close()


def _measurement(outcome: Measurement | Lost) -> Measurement:
    return Measurement(error=f"its process {outcome}") if isinstance(outcome, Lost) else outcome


def _typical(desk: EvaluatorWorker, candidate: Candidate | None, seconds: float) -> float:
    outcome = desk.ask(typical_seconds, candidate, seconds)
    return float("inf") if isinstance(outcome, Lost) else float(outcome)


# ------------------------------------------------------------------------------------------- evaluators of a process


class WorkerPool:
    """The desks of this process that are idle, those that were used last at the end."""

    def __init__(self) -> None:
        self.free: OrderedDict[int, tuple[str, EvaluatorWorker]] = OrderedDict()
        self.lock = threading.Lock()

    def take(self, token: str) -> EvaluatorWorker | None:
        """Return a free desk with an evaluator, if there is any."""
        with self.lock:
            number = next((n for n, (worker_token, _) in reversed(self.free.items()) if worker_token == token), None)
            return self.free.pop(number)[1] if number is not None else None

    def put(self, token: str, desk: EvaluatorWorker) -> None:
        """Leave a desk to the next order; those that were not used for longest are closed."""
        with self.lock:
            self.free[id(desk)] = (token, desk)
            while len(self.free) > MOST_HELD:
                self.free.popitem(last=False)[1][1].close()

    def make(self, payload: bytes, order: JobRequest) -> EvaluatorWorker:
        """Return a desk for an evaluator that this process does not have."""
        with self.lock:  # threads share the idle processes
            return EvaluatorWorker(payload, order.timeout, threads_for(*order.here))


ROOM = WorkerPool()


def _after_fork_in_child() -> None:
    """Forget the parent's desks: their processes belong to the parent."""
    global ROOM
    ROOM = WorkerPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@contextmanager
def _desk(order: JobRequest) -> Iterator[EvaluatorWorker | None]:
    """Yield a desk for an order; None if what its evaluator is made of is not known here."""
    desk = ROOM.take(order.token)
    if desk is None:
        payload = order.payload if order.payload is not None else _read(order.path, order.token)
        if payload is None:
            yield None
            return
        desk = ROOM.make(payload, order)
    desk.timeout = order.timeout
    try:
        yield desk
    except BaseException:
        desk.close()
        raise
    if desk.is_open:
        ROOM.put(order.token, desk)


def _read(path: str, token: str) -> bytes | None:
    """Return a file if it exists with the expected contents: anybody may write to a common folder."""
    try:
        payload = Path(path).read_bytes()
    except (OSError, ValueError):
        return None
    return payload if token_of(payload) == token else None


def threads_for(machine: str, threads: int) -> int:
    """Return a worker's kernel threads: the caller's number on its machine, else all, at most its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("TVM_NUM_THREADS", "")
    wanted = threads if machine == machine_name() else int(told) if told.isdecimal() else cores
    return max(1, min(wanted, cores))


# --------------------------------------------------------------------------------------------------- one at a time


@contextmanager
def alone(seconds: float) -> Iterator[None]:
    """Hold the lock of this machine; after so many seconds of waiting proceed without.

    Who holds it for longer than a measurement may take was stopped, and times nothing.
    """
    file = _lock_file()
    try:
        end = time.monotonic() + seconds
        while not _is_taken(file) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        os.close(file)


def _is_taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock_file() -> int:
    """Return the machine's lock, which another user may have made; one of this user where that cannot be opened."""
    own = f"{os.getuid()}-{LOCK}"
    for name in (LOCK, own):
        path = Path(tempfile.gettempdir()) / name
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):
            with suppress(OSError):
                return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    raise TuningError(f"the lock {path} cannot be made: is there a folder for temporary files? Set TMPDIR")


# The search side: measurement by the workers of an executor, on this machine or others, as `ProcessMeasurer` does with
# local processes.
#
# Compilations run in parallel, as do measurements on different machines. Trials are reported in the order of their
# requests; if the executor is lost, the trials that were reported before remain valid.


MACHINES = ("same", "each")
SLOTS, MOST_SLOTS = 4, 64  # minimum and maximum number of concurrent jobs
KILLED = "KilledWorker"  # the error of dask if several workers died during a job


@dataclass(frozen=True)
class Waiting:
    """A job whose answer is outstanding.

    Parameters
    ----------
    name : object
        Of the job, for who asked.
    order : JobRequest
    is_second : bool
        Whether it was sent to another worker, as the first did not answer.
    """

    name: Any
    order: JobRequest
    is_second: bool = False


class ExecutorMeasurer(Measurer):
    """The workers of an executor.

    Parameters
    ----------
    executor : concurrent.futures.Executor
    evaluator : Evaluator
    upcoming : iterable of Format
        In the order in which they will be wanted.
    machines : {"same", "each"}
        Whether all workers must be of one kind, or may be of several, whose records stay apart.
    timeout : float
        Seconds of a compilation or a measurement.

    Raises
    ------
    TuningError
        The arguments cannot be sent.
    ExecutorLostError
        The executor takes no jobs, or does not answer.
    """

    def __init__(
        self,
        executor: Executor,
        evaluator: Evaluator,
        upcoming: Iterable[Format] = (),
        *,
        machines: str = "same",
        timeout: float = TIMEOUT,
    ) -> None:
        self.executor, self.evaluator, self.upcoming = executor, evaluator, deque(upcoming)
        self.machines, self.timeout, self.slots = machines, timeout, slots_of(executor)
        super().__init__()
        self.asked: dict[Format | None, Future[JobResult]] = {}
        self.times: dict[Candidate | None, float] = {}
        self.gone = None
        self.places: dict[MeasurementPlace, float | None] = {}  # seconds of the untuned kernel there
        self.told: set[MeasurementPlace] = set()  # places with a record of the untuned kernel
        self.payload = sendable(evaluator)
        self.token = token_of(self.payload)
        self.path = spooled(self.payload)
        try:
            self.place = self._main_place()
        except BaseException as error:
            self.close()
            why = start_error(executor) if isinstance(error.__cause__, BrokenExecutor) else None
            if why is None:
                raise
            raise ExecutorLostError(f"the worker processes of the executor cannot start: {why}") from error

    # -------------------------------------------------------------------------------------------- where it runs

    def _main_place(self) -> MeasurementPlace:
        """Return the kind of machine that a search is for: this one where it is among the workers."""
        orders = {n: self._order(described) for n in range(self.slots)}
        here = (machine_name(), get_num_threads())
        for _, answer in self._answers(orders):
            place = answer.place
            if place is not None and (self.machines == "same" or (place.machine, place.threads) == here):
                return place
        return next(iter(self.places))

    @property
    def is_here(self) -> bool:  # type: ignore[override]
        """Whether this process is as fast as the workers."""
        return (self.place.machine, self.place.threads) == (machine_name(), get_num_threads())

    def keyed(self, key: Key) -> Key:
        """Return the key of records of the workers' machine."""
        return replace(key, **asdict(self.place))

    def noted(self, key: Key, record: Record) -> Iterator[tuple[Key, Record]]:
        """Yield a record as its machine's, and before the first one of a machine that of the untuned kernel there."""
        place = record.place or self.place
        usual = self.places.get(place)
        if place == self.place or usual is None or not self.usual:
            yield key, record
            return
        there, pace = replace(key, **asdict(place)), usual / self.usual
        if place not in self.told:
            self.told.add(place)
            yield there, Record(Choices(), seconds=usual, median=usual, elapsed=record.elapsed, seed=record.seed)
        seconds, predicted = (t if t is None else t * pace for t in (record.seconds, record.predicted))
        yield there, replace(record, seconds=seconds, predicted=predicted)

    def _met(self, place: MeasurementPlace) -> None:
        """Note where a worker runs.

        Raises
        ------
        ExecutorLostError
            All workers must be of one kind, and this is another one.
        """
        self.places.setdefault(place, None)
        if self.machines == "same" and len(self.places) > 1:
            first, second = list(self.places)[:2]
            tried = 'use machines="each", or an executor of workers that are alike'
            raise ExecutorLostError(f'machines="same" expects one kind of worker, got {first} and {second}; {tried}')

    # ------------------------------------------------------------------------------------------------- questions

    def values(self, format: Format | None) -> Values | None:
        """Return the open choices of a format; None where it has no variant."""
        if format not in self.known:
            ahead = [self.upcoming.popleft() for _ in range(min(self.slots - 1, len(self.upcoming)))]
            wanted = [f for f in dict.fromkeys([format, *ahead]) if f not in self.known]
            for asked, answer in self._answers({f: self._order(prepared, f) for f in wanted}):
                self.known[asked] = answer.value
        return self.known[format].values

    @property
    def best(self) -> float:
        """The shortest time so far, relative to the untuned kernel's."""
        return min(self.times.values(), default=float("inf")) / self.usual if self.usual else float("inf")

    def time(self, candidate: None = None) -> Measurement:
        """Check and time the untuned kernel."""
        ((_, answer),) = self._answers({None: self._order(untuned)})
        return self._timed(None, answer)

    def measure(self, batch: Sequence[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Compile, check and time candidates; each is reported when all before it are.

        Raises
        ------
        ExecutorLostError
            The executor was lost. Measurements are reported before.
        """
        measurements: dict[Candidate, Measurement] = {}
        waiting = deque(batch)
        try:
            for candidate, answer in self._answers({c: self._order(measured, c, self.best) for c in batch}):
                measurements[candidate] = self._timed(candidate, answer)
                while waiting and waiting[0] in measurements:
                    yield waiting[0], measurements[waiting.popleft()]
        except (KeyboardInterrupt, ExecutorLostError) as error:
            self.gone = error if isinstance(error, ExecutorLostError) else None
            yield from ((c, measurements[c]) for c in waiting if c in measurements)
            raise

    def _timed(self, candidate: Candidate | None, answer: JobResult) -> Measurement:
        """Return a measurement as if it were the main machine's, and as fast as that one usually is."""
        measurement: Measurement = replace(answer.value, place=answer.place, load=answer.load)
        if candidate is None and measurement.seconds is not None:
            self.usual = self.usual or measurement.seconds
            self.timeout = max(self.timeout, ALLOWED * measurement.seconds)
        if answer.place is not None and self.places.get(answer.place) is None:
            self.places[answer.place] = self.usual if answer.place == self.place else measurement.usual
        measurement = measurement if self.usual is None else measurement.paced(self.usual)
        if measurement.seconds is not None:
            self.times[candidate] = measurement.seconds
        return measurement

    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        """Return seconds of candidates and, at None, of the untuned kernel, in turn on the main machine.

        If the executor was lost, they are compared in this process, or by their earlier times.
        """
        try:
            for _ in range(MOST_SLOTS):
                ((_, answer),) = self._answers({None: self._order(compared, list(candidates))})
                if answer.place == self.place:
                    return dict(answer.value)
        except ExecutorLostError:
            pass
        if self.is_here:
            return ProcessMeasurer([LocalWorker(self.evaluator)]).compare(candidates)
        return {c: self.times[c] for c in (None, *candidates) if c in self.times}

    def rest(self) -> None:
        """Do nothing: workers of an executor drop their least recently used evaluators."""

    def close(self) -> None:
        """Release the evaluators of the workers."""
        with suppress(Exception):  # the executor may have been shut down
            for _ in range(self.slots):
                self.executor.submit(work, self._order(forgotten))
        with suppress(OSError):
            os.unlink(self.path)

    # --------------------------------------------------------------------------------------- orders and answers

    def _order(self, job: Job, *args: Any) -> JobRequest:
        here = machine_name(), get_num_threads()
        return JobRequest(self.token, self.path, job, args, self.timeout, here)

    def _answers(self, orders: Mapping[Any, JobRequest]) -> Iterator[tuple[Any, JobResult]]:
        """Yield the answers to orders as they come.

        An order that no worker answers for long is given to another, and fails if that does not answer either.
        """
        pending = {self._sent(order): Waiting(name, order) for name, order in orders.items()}
        has_answered = False
        while pending:
            done, _ = wait(pending, timeout=PATIENT * self.timeout, return_when=FIRST_COMPLETED)
            if not done:
                yield from self._given_up(pending, has_answered)
                continue
            for future in done:
                asked = pending.pop(future)
                answer = taken(future)
                if answer.is_missing:
                    again = replace(asked.order, payload=self.payload)
                    pending[self._sent(again)] = replace(asked, order=again)
                    continue
                has_answered = True
                yield asked.name, self._checked(answer)

    def _given_up(
        self, pending: dict[Future[JobResult], Waiting], has_answered: bool
    ) -> Iterator[tuple[Any, JobResult]]:
        """Send orders that are not answered to other workers, the first time; fail them the second time."""
        late = list(pending.items())
        pending.clear()
        for future, asked in late:
            future.cancel()
            if not asked.is_second:
                pending[self._sent(asked.order)] = replace(asked, is_second=True)
        failed = [asked.name for _, asked in late if asked.is_second]
        silent = f"no worker of the executor answered within {PATIENT * self.timeout:g} s"
        if failed and not has_answered:
            raise ExecutorLostError(lost(f"{silent}, twice"))
        yield from ((name, self._failed(name, silent)) for name in failed)

    @staticmethod
    def _failed(name: Any, why: str) -> JobResult:
        return JobResult(Measurement(error=why) if isinstance(name, Candidate) else Prepared(error=why))

    def _checked(self, answer: JobResult) -> JobResult:
        """Return an answer of a worker that could begin."""
        if answer.error is not None:
            raise ExecutorLostError(f"a worker of the executor could not begin: {answer.error}")
        if answer.place is not None:
            self._met(answer.place)
        return answer

    def _sent(self, order: JobRequest) -> Future[JobResult]:
        try:
            future = self.executor.submit(work, order)
        except Exception as error:  # executors of other packages may raise any error
            raise ExecutorLostError(lost(reason(error))) from error
        if not isinstance(future, Future):
            raise ExecutorLostError(lost(f"submit returned {type(future).__name__}, not a concurrent.futures.Future"))
        return future


def taken(future: Future[JobResult]) -> JobResult:
    """Return the answer of a worker."""
    try:
        answer = future.result()
        if isinstance(answer, JobResult):
            return answer
        raise TuningError(f"a job was answered by {type(answer).__name__}, not by what it returned")
    except CancelledError as error:
        raise ExecutorLostError(lost("its jobs were cancelled, as when a scheduler is gone")) from error
    except Exception as error:
        if type(error).__name__ == KILLED:
            return JobResult(Measurement(error=f"its worker died: {reason(error)}"))
        raise ExecutorLostError(lost(reason(error))) from error


def lost(why: str) -> str:
    """Return the message for a lost executor."""
    return f"the executor measures no more candidates: {why}; go on with a new executor and the same database"


def sendable(evaluator: Evaluator) -> bytes:
    """Return the serialized parts of an evaluator, for workers.

    Raises
    ------
    TuningError
        It cannot be sent.
    """
    payload = packed(evaluator)
    if payload is not None:
        return payload
    kinds = sorted({package_of(value) for value in evaluator.inputs.values()})
    limit = "workers of an executor are sent arguments of numpy and scipy, at most 1 GiB, and templates of a module"
    raise TuningError(f"{limit}, got arguments of {', '.join(kinds)}: convert them, or leave executor out")


def spooled(payload: bytes) -> str:
    """Return a file for workers that see this machine's files."""
    file, path = tempfile.mkstemp(prefix="sparsetir-", suffix=".operands")
    with os.fdopen(file, "wb") as stream:
        stream.write(payload)
    return path


def slots_of(executor: Any) -> int:
    """Return how many candidates to submit to an executor at a time: its number of workers, if it tells."""
    counts: list[Callable[[], Any]] = [
        lambda: executor._max_workers,  # those of concurrent.futures
        lambda: executor.num_workers,  # of mpi4py
        lambda: len(executor._client.ncores()),  # of dask
    ]
    for count in counts:
        with suppress(Exception):
            return max(SLOTS, min(MOST_SLOTS, int(count())))
    return SLOTS


def check_executor(executor: Any, machines: str) -> None:
    """Raise unless an executor and its options are valid."""
    if not isinstance(machines, str) or machines not in MACHINES:
        raise ArgumentError(f"machines is 'same' or 'each', got {shown(machines)}")
    if executor is None and machines != "same":
        raise ArgumentError(f"machines={shown(machines)} is about the workers of an executor, and none is given")
    if isinstance(executor, str) or executor is None:  # by name: see `sparsetir.tuning.workers.remote.opened`
        return
    if not callable(getattr(executor, "submit", None)):
        wanted = "a concurrent.futures.Executor, such as ProcessPoolExecutor(2) or dask's Client.get_executor()"
        hint = ", which is its get_executor()" if package_of(executor) == "distributed" else ""
        raise ArgumentTypeError(f"executor: expected {wanted}, got {type(executor).__name__}{hint}")


# Executors that a command line names: processes of this machine, or the workers of a dask scheduler.


PROCESSES, RPC = "processes", "rpc"
SCHEMES = ("tcp", "tls", "ucx", "ws", "wss")  # of dask's addresses
ADDRESSES = "tcp://host:8786 of a dask scheduler, or rpc://host:9190/key of TVM's RPC tracker"
EXPECTED = f"an executor by name is processes:2, or an address such as {ADDRESSES}"
CONNECT_SECONDS = 10.0
START_SECONDS = 60.0  # for the error with which a second import of the main module ends
GUARD = 'RuntimeError: the script starts processes as it is imported, which each of them does: \
move what it runs below `if __name__ == "__main__":`'
# What a process of a pool does before its first job, with the text of errors kept.
START = """
import pickle, sys
from multiprocessing import process, spawn
process.current_process()._inheriting = True
spawn.prepare(pickle.load(sys.stdin.buffer))
initializer, arguments = pickle.load(sys.stdin.buffer)
if initializer is not None:
    initializer(*arguments)
"""


@contextmanager
def opened(executor: Executor | str | None) -> Iterator[Executor | str | None]:
    """Yield an executor or an RPC address as it is, or the executor that a text names, which is shut down afterwards.

    Raises
    ------
    ArgumentError
        The text names none, dask is not installed, or no scheduler answers.

    Examples
    --------
    >>> with opened("processes:2") as executor:
    ...     print(type(executor).__name__)
    ProcessPoolExecutor
    """
    is_named = isinstance(executor, str) and executor.partition(":")[0] == PROCESSES
    if is_named or isinstance(executor, ProcessPoolExecutor):
        refuse_import()
    if not isinstance(executor, str):
        yield executor
        return
    kind, _, rest = executor.partition(":")
    if kind == RPC:
        parsed(executor)
        yield executor
    elif kind == PROCESSES and (not rest or (rest.isdecimal() and int(rest) > 0)):
        # Spawned: a fork would copy the memory of this process, with locks of threads that it does not copy.
        with ProcessPoolExecutor(int(rest) if rest else None, get_context("spawn")) as processes:
            yield processes
    elif kind in SCHEMES and rest.startswith("//"):
        with dask_client(executor) as client:
            yield client.get_executor()
    else:
        raise ArgumentError(f"{EXPECTED}, got {executor!r}")


def refuse_import() -> None:
    """End a process of a pool whose import of the main module begins a search with processes of its own.

    Raises
    ------
    SystemExit
        An `Exception` might be caught by the script, which would then run to its end in each process.
    """
    if getattr(current_process(), "_inheriting", False):
        raise SystemExit(GUARD)


def start_error(executor: Executor) -> str | None:
    """Return the error that ends the processes of a pool before their first job, or None where they start."""
    context = getattr(executor, "_mp_context", None)
    if context is None or context.get_start_method() == "fork":
        return None
    prepared = spawn.get_preparation_data("SparseTIR")
    prepared["authkey"] = bytes(prepared["authkey"])  # its own class is pickled for children of this process only
    first = getattr(executor, "_initializer", None), getattr(executor, "_initargs", ())
    try:
        sent = pickle.dumps(prepared) + pickle.dumps(first)
        command = [sys.executable, "-c", START]
        done = subprocess.run(command, input=sent, capture_output=True, timeout=START_SECONDS, check=False)
    except Exception:  # the import cannot be started or does not end, so that it has no error to report
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if done.returncode and lines else None


def dask_client(address: str) -> Any:
    """Return a client of a dask scheduler.

    Raises
    ------
    ArgumentError
        dask.distributed is not installed, or the scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ArgumentError(f"{address} is dask's, which is not installed: pip install distributed") from None
    try:
        return Client(address, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ArgumentError(f"no dask scheduler answers at {address}: {why}") from error


__all__ = [
    "EvaluatorWorker",
    "ExecutorMeasurer",
    "JobRequest",
    "JobResult",
    "check_executor",
    "compared",
    "dask_client",
    "described",
    "forgotten",
    "measured",
    "opened",
    "prepared",
    "slots_of",
    "start_error",
    "token_of",
    "untuned",
    "work",
]
