# SPDX-License-Identifier: Apache-2.0
"""Candidates measured by the workers of an executor, on this machine or others: what a `Pool` is for local processes.

Compilations go on side by side, and so do measurements on different machines. Each trial is told as soon as those asked
for before it are; when the executor is gone, what was measured until then still counts.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsetir.errors import ArgumentError, ArgumentTypeError, ExecutorLostError, TuningError
from sparsetir.formats.format import Format
from sparsetir.machine import machine_name
from sparsetir.schedules import Choices
from sparsetir.threads import get_num_threads
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.database import Key, Record
from sparsetir.tuning.evaluator import Evaluator, Formats, Prepared
from sparsetir.tuning.executors import start_error
from sparsetir.tuning.measure import Measurement, Place, reason
from sparsetir.tuning.pool import ALLOWED, TIMEOUT, Pool, packed
from sparsetir.tuning.served import (
    Answer,
    Order,
    compared,
    described,
    forgotten,
    measured,
    prepared,
    token_of,
    untuned,
    work,
)
from sparsetir.tuning.space import Values
from sparsetir.tuning.workers import PATIENT, Job, LocalWorker

MACHINES = ("same", "each")
SLOTS, MOST_SLOTS = 4, 64  # jobs at a time, at least and at most
KILLED = "KilledWorker"  # what dask raises where a job cost several workers their lives


@dataclass(frozen=True)
class Waiting:
    """A job whose answer is not there yet.

    Parameters
    ----------
    name : object
        Of the job, for who asked.
    order : Order
    is_second : bool
        Whether it was sent to another worker, as the first did not answer.
    """

    name: Any
    order: Order
    is_second: bool = False


class Fleet(Formats):
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
        The executor takes no jobs, or nobody answers.
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
        self.asked: dict[Format | None, Future[Answer]] = {}
        self.times: dict[Candidate | None, float] = {}
        self.usual: float | None = None
        self.gone: ExecutorLostError | None = None  # what ended all measuring
        self.places: dict[Place, float | None] = {}  # seconds of the untuned kernel there
        self.told: set[Place] = set()  # places with a record of the untuned kernel
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

    def _main_place(self) -> Place:
        """The kind of machine that a search is for: this one where it is among the workers."""
        orders = {n: self._order(described) for n in range(self.slots)}
        here = (machine_name(), get_num_threads())
        for _, answer in self._answers(orders):
            place = answer.place
            if place is not None and (self.machines == "same" or (place.machine, place.threads) == here):
                return place
        return next(iter(self.places))

    @property
    def is_here(self) -> bool:
        """Whether this process is as fast as the workers."""
        return (self.place.machine, self.place.threads) == (machine_name(), get_num_threads())

    def keyed(self, key: Key) -> Key:
        """The key of records of the workers' machine."""
        return replace(key, **asdict(self.place))

    def noted(self, key: Key, record: Record) -> Iterator[tuple[Key, Record]]:
        """A record as its machine's, and before the first one of a machine that of the untuned kernel there."""
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

    def _met(self, place: Place) -> None:
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
            raise ExecutorLostError(f'machines="same" expects one kind of worker, found {first} and {second}; {tried}')

    # ------------------------------------------------------------------------------------------------- questions

    def keep_pace(self, seconds: float | None) -> None:
        """Report what is timed as if the untuned kernel took this long, None for as long as it will."""
        self.usual = seconds

    def values(self, format: Format | None) -> Values | None:
        """The open choices of a format; None where it has no variant."""
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
        """Compile, check and time candidates; each is told when all before it are.

        Raises
        ------
        ExecutorLostError
            The executor is gone. What was measured is told before.
        """
        found: dict[Candidate, Measurement] = {}
        waiting = deque(batch)
        try:
            for candidate, answer in self._answers({c: self._order(measured, c, self.best) for c in batch}):
                found[candidate] = self._timed(candidate, answer)
                while waiting and waiting[0] in found:
                    yield waiting[0], found[waiting.popleft()]
        except (KeyboardInterrupt, ExecutorLostError) as error:
            self.gone = error if isinstance(error, ExecutorLostError) else None
            yield from ((c, found[c]) for c in waiting if c in found)
            raise

    def _timed(self, candidate: Candidate | None, answer: Answer) -> Measurement:
        """A measurement as if it were the main machine's, and as fast as that one usually is."""
        found: Measurement = replace(answer.value, place=answer.place, load=answer.load)
        if candidate is None and found.seconds is not None:
            self.usual = self.usual or found.seconds
            self.timeout = max(self.timeout, ALLOWED * found.seconds)
        if answer.place is not None and self.places.get(answer.place) is None:
            self.places[answer.place] = self.usual if answer.place == self.place else found.usual
        found = found if self.usual is None else found.paced(self.usual)
        if found.seconds is not None:
            self.times[candidate] = found.seconds
        return found

    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        """Seconds of candidates and, at None, of the untuned kernel, in turn on the main machine.

        Where the executor is gone, they are compared in this process, or as fast as they were.
        """
        try:
            for _ in range(MOST_SLOTS):
                ((_, answer),) = self._answers({None: self._order(compared, list(candidates))})
                if answer.place == self.place:
                    return dict(answer.value)
        except ExecutorLostError:
            pass
        if self.is_here:
            return Pool([LocalWorker(self.evaluator)]).compare(candidates)
        return {c: self.times[c] for c in (None, *candidates) if c in self.times}

    def rest(self) -> None:
        """Nothing: workers of an executor let go of what they did not use for longest."""

    def close(self) -> None:
        """Let the workers' evaluators go."""
        with suppress(Exception):  # there may be no executor any more
            for _ in range(self.slots):
                self.executor.submit(work, self._order(forgotten))
        with suppress(OSError):
            os.unlink(self.path)

    # --------------------------------------------------------------------------------------- orders and answers

    def _order(self, job: Job, *args: Any) -> Order:
        here = machine_name(), get_num_threads()
        return Order(self.token, self.path, job, args, self.timeout, here)

    def _answers(self, orders: Mapping[Any, Order]) -> Iterator[tuple[Any, Answer]]:
        """The answers to orders as they come.

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

    def _given_up(self, pending: dict[Future[Answer], Waiting], has_answered: bool) -> Iterator[tuple[Any, Answer]]:
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
    def _failed(name: Any, why: str) -> Answer:
        return Answer(Measurement(error=why) if isinstance(name, Candidate) else Prepared(error=why))

    def _checked(self, answer: Answer) -> Answer:
        """An answer of a worker that could begin."""
        if answer.error is not None:
            raise ExecutorLostError(f"a worker of the executor could not begin: {answer.error}")
        if answer.place is not None:
            self._met(answer.place)
        return answer

    def _sent(self, order: Order) -> Future[Answer]:
        try:
            found = self.executor.submit(work, order)
        except Exception as error:  # whatever an executor of another package raises
            raise ExecutorLostError(lost(reason(error))) from error
        if not isinstance(found, Future):
            raise ExecutorLostError(lost(f"submit returned {type(found).__name__}, not a concurrent.futures.Future"))
        return found


def taken(future: Future[Answer]) -> Answer:
    """What a worker said."""
    try:
        answer = future.result()
        if isinstance(answer, Answer):
            return answer
        raise TuningError(f"a job was answered by {type(answer).__name__}, not by what it returned")
    except CancelledError as error:
        raise ExecutorLostError(lost("its jobs were cancelled, as when a scheduler is gone")) from error
    except Exception as error:
        if type(error).__name__ == KILLED:
            return Answer(Measurement(error=f"its worker died: {reason(error)}"))
        raise ExecutorLostError(lost(reason(error))) from error


def lost(why: str) -> str:
    """What to do where an executor is gone."""
    return f"the executor measures no more candidates: {why}; go on with a new executor and the same database"


def sendable(evaluator: Evaluator) -> bytes:
    """What an evaluator is made of, for workers.

    Raises
    ------
    TuningError
        It cannot be sent.
    """
    payload = packed(evaluator)
    if payload is not None:
        return payload
    kinds = sorted({type(value).__module__.partition(".")[0] for value in evaluator.inputs.values()})
    limit = "workers of an executor are sent arguments of numpy and scipy, at most 1 GiB, and templates of a module"
    raise TuningError(f"{limit}; found arguments of {', '.join(kinds)}: convert them, or leave executor out")


def spooled(payload: bytes) -> str:
    """A file for workers that see this machine's files."""
    file, path = tempfile.mkstemp(prefix="sparsetir-", suffix=".operands")
    with os.fdopen(file, "wb") as stream:
        stream.write(payload)
    return path


def slots_of(executor: Any) -> int:
    """How many candidates to ask an executor for at a time: as many as it has workers, where it says so."""
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
    """Raise unless an executor and what it may consist of are what they should be."""
    if machines not in MACHINES:
        raise ArgumentError(f"machines is 'same' or 'each', found {machines!r}")
    if executor is None and machines != "same":
        raise ArgumentError(f"machines={machines!r} is about the workers of an executor, and none is given")
    if isinstance(executor, str) or executor is None:  # by name: see `sparsetir.tuning.executors.opened`
        return
    if not callable(getattr(executor, "submit", None)):
        wanted = "a concurrent.futures.Executor, such as ProcessPoolExecutor(2) or dask's Client.get_executor()"
        hint = ", which is its get_executor()" if type(executor).__module__.startswith("distributed") else ""
        raise ArgumentTypeError(f"executor must be {wanted}; found {type(executor).__name__}{hint}")


__all__ = ["Fleet", "check_executor", "slots_of"]
