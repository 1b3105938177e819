# SPDX-License-Identifier: Apache-2.0
"""What a worker of an executor does: `work`, a function that any `concurrent.futures.Executor` can send.

Candidates run in a child process of the worker, so that one that crashes or hangs costs neither the worker nor its
executor. What an evaluator is made of is kept by its hash: it comes by a file where the caller's can be read, else it
is asked for once. One job of a machine is timed at a time, whichever executor it belongs to.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparsetir.errors import TuningError
from sparsetir.formats.format import Format
from sparsetir.machine import machine_name
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.evaluator import Evaluator, Prepared
from sparsetir.tuning.measure import Measurement, Place, at_pace, duel
from sparsetir.tuning.pool import CLOSE, TURN_SECONDS, TURNS
from sparsetir.tuning.recorded import circumstances
from sparsetir.tuning.workers import (
    Job,
    LocalWorker,
    Lost,
    RemoteWorker,
    Worker,
    can_isolate,
    compile_candidate,
    evaluator_of,
    interleaved_seconds,
    prepare,
    time_candidate,
    typical_seconds,
)

try:
    import fcntl
except ImportError:  # not on Windows: what is timed there is not alone
    fcntl = None  # type: ignore[assignment]

MOST_HELD = 4  # evaluators that a worker keeps besides the one that works
LOCK = "sparsetir-timing.lock"
LOOK_SECONDS = 0.003  # between looks at a lock that is taken


@dataclass(frozen=True)
class Order:
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
class Answer:
    """What a worker says to an order.

    Parameters
    ----------
    value : object
    place : Place, optional
        Where it ran.
    load : float, optional
        The machine's load average of the last minute.
    error : str, optional
        Why the worker could not begin.
    is_missing : bool
        Whether it must be given what the evaluator is made of.
    """

    value: Any = None
    place: Place | None = None
    load: float | None = None
    error: str | None = None
    is_missing: bool = False


def work(order: Order) -> Answer:
    """Do a job.

    Whatever goes wrong with a candidate is part of the answer.
    """
    with _desk(order) as desk:
        if desk is None:
            return Answer(is_missing=True)
        try:
            found = order.job(desk, *order.args)
            return Answer(found, desk.place, load_average())
        except TuningError as error:
            desk.close()
            return Answer(error=f"{error} (on {machine_name()})")


def token_of(payload: bytes) -> str:
    """The name of what an evaluator is made of."""
    return hashlib.sha256(payload).hexdigest()


def load_average() -> float | None:
    """Of the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


# --------------------------------------------------------------------------------------------------- one evaluator


class Desk:
    """One evaluator of a worker, in a process of its own where that can be.

    Parameters
    ----------
    payload : bytes
    timeout : float
    threads : int
    """

    def __init__(self, payload: bytes, timeout: float, threads: int) -> None:
        self.timeout, self.is_open = timeout, True
        if can_isolate():
            self.worker: Worker = RemoteWorker(payload, timeout, threads)
        else:
            self.worker = LocalWorker(evaluator_of(payload))
        self.place: Place | None = None

    def ask(self, job: Job, *args: Any) -> Any:
        """The result of a job of an evaluator, a `Lost` where it cost the process its life."""
        self.worker.allow(self.timeout)
        self.worker.post(job, *args)
        *_, found = self.worker.result()
        return found

    def alone(self) -> Any:
        """The time in which nothing else is timed on this machine."""
        return alone(self.timeout) if fcntl is not None else nullcontext()

    def close(self) -> None:
        self.is_open = False
        self.worker.close()


def described(desk: Desk) -> None:
    """Find out where the evaluator runs."""
    if desk.place is None:
        found = desk.ask(place_of, None)
        if isinstance(found, Lost):  # one that was killed as it began says nothing of the next
            found = desk.ask(place_of, None)
        if isinstance(found, Lost):
            raise TuningError(f"a worker process could not begin: it {found}")
        desk.place = found


def place_of(evaluator: Evaluator, _: None) -> Place:
    """What records say of where an evaluator runs."""
    about = circumstances(evaluator.kernel, evaluator.template)
    return Place(**{name: about[name] for name in ("machine", "threads", "target", "versions")})


def prepared(desk: Desk, format: Format | None) -> Prepared:
    """A format that is ready, or why it cannot be had."""
    found = desk.ask(prepare, format)
    return Prepared(error=f"its process {found}") if isinstance(found, Lost) else found


def untuned(desk: Desk) -> Measurement:
    """The untuned kernel, checked and timed."""
    with desk.alone():
        return _measurement(desk.ask(time_candidate, None))


def measured(desk: Desk, candidate: Candidate, best: float) -> Measurement:
    """A candidate compiled, checked and timed, twice more if it is near the best.

    Parameters
    ----------
    desk : Desk
    candidate : Candidate
    best : float
        The shortest time so far, relative to that of the untuned kernel.
    """
    error = desk.ask(compile_candidate, candidate)
    if error is not None:
        return Measurement(error=f"its process {error}" if isinstance(error, Lost) else error)
    with desk.alone():
        found = _measurement(desk.ask(time_candidate, candidate))
        for number in range(1, TURNS):
            if found.usual is None or not found.wants_a_turn(CLOSE * best * found.usual, number):
                return found
            turn = desk.ask(interleaved_seconds, candidate, TURN_SECONDS)
            seconds, usual = (float("inf"), found.usual) if isinstance(turn, Lost) else turn
            found = found.again(at_pace(seconds, usual, found.usual))
        return found


def compared(desk: Desk, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
    """Seconds of candidates and, at None, of the untuned kernel, in turn."""
    ready = [c for c in candidates if desk.ask(compile_candidate, c) is None]
    with desk.alone():
        return duel({c: partial(_typical, desk, c) for c in (None, *ready)})


def forgotten(desk: Desk) -> None:
    """Let the evaluator go."""
    desk.close()


def _measurement(found: Measurement | Lost) -> Measurement:
    return Measurement(error=f"its process {found}") if isinstance(found, Lost) else found


def _typical(desk: Desk, candidate: Candidate | None, seconds: float) -> float:
    found = desk.ask(typical_seconds, candidate, seconds)
    return float("inf") if isinstance(found, Lost) else float(found)


# ------------------------------------------------------------------------------------------- evaluators of a process


class Room:
    """The desks of this process that nobody works at, those that were used last at the end."""

    def __init__(self) -> None:
        self.free: OrderedDict[int, tuple[str, Desk]] = OrderedDict()
        self.lock = threading.Lock()

    def take(self, token: str) -> Desk | None:
        """A free desk with an evaluator, if there is any."""
        with self.lock:
            number = next((n for n, (held, _) in reversed(self.free.items()) if held == token), None)
            return self.free.pop(number)[1] if number is not None else None

    def put(self, token: str, desk: Desk) -> None:
        """Leave a desk to the next order; those that were not used for longest are closed."""
        with self.lock:
            self.free[id(desk)] = (token, desk)
            while len(self.free) > MOST_HELD:
                self.free.popitem(last=False)[1][1].close()

    def make(self, payload: bytes, order: Order) -> Desk:
        """A desk for an evaluator that this process does not have."""
        with self.lock:  # processes that are idle are shared by threads
            return Desk(payload, order.timeout, threads_for(*order.here))


ROOM = Room()


def _after_fork_in_child() -> None:
    """The processes at the parent's desks are the parent's."""
    global ROOM
    ROOM = Room()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@contextmanager
def _desk(order: Order) -> Iterator[Desk | None]:
    """A desk for an order; None if what its evaluator is made of is not known here."""
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
    """A file, if it is there and holds what it should: a name in a common folder may be anybody's."""
    try:
        payload = Path(path).read_bytes()
    except (OSError, ValueError):
        return None
    return payload if token_of(payload) == token else None


def threads_for(machine: str, threads: int) -> int:
    """How many threads kernels have in a worker: those of the caller on its machine, else all, at most its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("TVM_NUM_THREADS", "")
    wanted = threads if machine == machine_name() else int(told) if told.isdecimal() else cores
    return max(1, min(wanted, cores))


# --------------------------------------------------------------------------------------------------- one at a time


@contextmanager
def alone(seconds: float) -> Iterator[None]:
    """Hold the lock of this machine; after so many seconds of waiting go on without.

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
    """The machine's lock, which another user may have made; one of this user where that cannot be opened."""
    own = f"{os.getuid()}-{LOCK}"
    for name in (LOCK, own):
        path = Path(tempfile.gettempdir()) / name
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):
            with suppress(OSError):
                return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    raise TuningError(f"the lock {path} cannot be made: is there a folder for temporary files? Set TMPDIR")


__all__ = [
    "Answer",
    "Desk",
    "Order",
    "compared",
    "described",
    "forgotten",
    "measured",
    "prepared",
    "token_of",
    "untuned",
    "work",
]
