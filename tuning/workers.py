# SPDX-License-Identifier: Apache-2.0
"""Workers of a search: processes, which may crash or hang without harm to the caller, or this one.

A process whose parent is gone ends by itself.
"""

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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol, TypeAlias

import tvm
from tvm import tirx

from sparsetir.errors import ExecutorLostError, TuningError
from sparsetir.formats.format import Format
from sparsetir.machine import CORES
from sparsetir.threads import get_num_threads
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.evaluator import Evaluator, Prepared
from sparsetir.tuning.measure import Measurement
from sparsetir.tuning.shelf import keep

WORKERS = max(1, min(4, CORES))
# TVM loads torch where it is installed, which takes seconds; arguments of torch are not sent (`SENT`).
# The parent takes the first answer for that of `begin`: a text is the reason why there is no evaluator.
BEGIN = """
import sys
try:
    sys.modules["torch"] = None
    import tvm
    del sys.modules["torch"]
    from sparsetir.tuning.workers import serve
except BaseException as error:
    from multiprocessing.connection import Connection
    Connection(int(sys.argv[1])).send(f"{type(error).__name__}: {error}")
    raise
serve(int(sys.argv[1]), int(sys.argv[2]))
"""
WORKER = "SPARSETIR_WORKER"  # in the environment of a worker
LAST_SECONDS = 5.0  # of a worker whose parent is gone, to put machine code on disk
WATCH_SECONDS = 1.0  # between looks at whether the parent is there
BEGINNINGS = 3  # times that a worker which dies before it can work is begun anew
PATIENT = 6.0  # times as long for a conversion, or for a worker to begin

Job: TypeAlias = "Callable[..., Any]"

# ---------------------------------------------------------------- jobs: functions of an evaluator, sent by their names


def prepare(evaluator: Evaluator, format: Format | None) -> Prepared:
    """See `Evaluator.prepare`."""
    return evaluator.prepare(format)


def compile_candidate(evaluator: Evaluator, candidate: Candidate) -> str | None:
    """See `Evaluator.compile`."""
    return evaluator.compile(candidate)


def compile_together(evaluator: Evaluator, *candidates: Candidate) -> None:
    """See `Evaluator.compile_together`."""
    evaluator.compile_together(candidates)


def time_candidate(evaluator: Evaluator, candidate: Candidate | None) -> Measurement:
    """See `Evaluator.time`."""
    return evaluator.time(candidate)


def typical_seconds(evaluator: Evaluator, candidate: Candidate | None, seconds: float) -> float:
    """See `Evaluator.typical`."""
    return evaluator.typical(candidate, seconds)


def interleaved_seconds(evaluator: Evaluator, candidate: Candidate, seconds: float) -> tuple[float, float]:
    """See `Evaluator.interleaved`."""
    return evaluator.interleaved(candidate, seconds)


# ------------------------------------------------------------------------------------------------------------- workers


class Lost(Exception):
    """A worker died or took too long."""


class Worker(Protocol):
    """Does jobs, functions of an `Evaluator`, in the order in which they are posted."""

    def post(self, job: Job, *args: Any) -> None:
        """Ask for a job."""

    def result(self) -> tuple[Job, tuple[Any, ...], Any]:
        """The oldest job whose result was not taken, and its result; a `Lost` if it cost a worker its life."""

    @property
    def pending(self) -> int:
        """Jobs whose result was not taken."""

    def allow(self, seconds: float) -> None:
        """Let a job take at least so long."""

    def close(self) -> None:
        """Forget everything; the next job begins anew."""


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
        environment = {**os.environ, **own}  # the threads that wait sleep soon, see `sparsetir.threads`
        command = [sys.executable, "-c", BEGIN, str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        theirs.close()
        self.connection: Connection[Any, Any] = Connection(ours.detach())

    @classmethod
    def take(cls, threads: int | None = None) -> Process:
        """One that is idle, or a new one; with as many threads as this process unless told otherwise."""
        wanted = threads or get_num_threads()
        while cls.idle:
            found = cls.idle.pop()
            is_same = (found.threads, found.path) == (wanted, modules_path())
            if found.process.poll() is None and is_same:
                return found
            found.kill()
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
    """Whether this process may begin others."""
    return os.name == "posix" and bool(sys.executable) and WORKER not in os.environ


def modules_path() -> str:
    """Where a worker looks for modules, such as that of a template."""
    return os.pathsep.join(entry for entry in sys.path if entry)


@atexit.register
def _dismiss() -> None:
    """Let idle workers go: each puts what it compiled on disk before it ends."""
    while Process.idle:
        found = Process.idle.pop()
        found.connection.close()
        found.process.returncode = 0  # nobody waits for it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Process.idle.clear)  # they are the parent's


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
        self.is_dead = False  # before its evaluator was there
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
            except OSError as error:  # it died a moment ago
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
            pass  # it died; noticed when the result is awaited

    def result(self) -> tuple[Job, tuple[Any, ...], Any]:
        job, args = self.jobs[0]
        if not self.has_begun:
            self._await_beginning()
        try:
            found = self._receive(self.timeout * _patience(job, args))
        except Lost as lost:
            found = lost
        self.jobs.popleft()
        if isinstance(found, Lost):
            self.start()
        return job, args, found

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
            self.start()  # it was killed, which need not be the evaluator's fault
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
    """How many times as long as another a job may take."""
    if job is compile_together:
        return float(len(args))
    return PATIENT if job is prepare or args[0] is None else 1.0  # the untuned kernel must be timed


def how_it_ended(code: int) -> str:
    """The exit code of a process in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, as when memory runs out" if name == "SIGKILL" else name


def serve(descriptor: int, parent: int) -> None:
    """Answer the jobs that come over a socket until its other end is closed, or the process `parent` is gone."""
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
            keep(seconds=LAST_SECONDS)  # nobody waits for it
            os._exit(0)  # what happens at exit has been done


ending = threading.Event()


def _end_after(parent: int) -> None:
    """End this process when its parent has ended, also from within a candidate that hangs."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    if ending.wait(WATCH_SECONDS):
        time.sleep(2 * LAST_SECONDS)
    os._exit(1)


class Served:
    """What a worker process works for: one evaluator after another."""

    evaluator: Evaluator | None = None


def begin(served: Served, payload: bytes) -> str | None:
    """Make the evaluator of a payload; the reason where that cannot be."""
    served.evaluator = None
    served.evaluator, error = _unpacked(payload)
    return error


def end(served: Served) -> None:
    """Let the evaluator go; nobody waits for an answer."""


def _unpacked(payload: bytes) -> tuple[Evaluator | None, str | None]:
    try:
        return evaluator_of(payload), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def evaluator_of(payload: bytes) -> Evaluator:
    """The evaluator that a payload is made of.

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
