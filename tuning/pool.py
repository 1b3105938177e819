# SPDX-License-Identifier: Apache-2.0
"""Where candidates run: in worker processes, which may crash or hang without harm to the caller, or in this one.

The workers of a pool compile side by side and measure one at a time, while the others wait. They outlive a search,
so that the next one finds TVM warm; a worker whose parent is gone ends by itself.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tvm

from sparsetir.errors import ExecutorLostError, TuningError
from sparsetir.formats.format import Format
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.database import Key, Record
from sparsetir.tuning.evaluator import Evaluator, Formats, Prepared
from sparsetir.tuning.measure import Measurement, at_pace, duel
from sparsetir.tuning.space import Values
from sparsetir.tuning.workers import (
    WORKER,
    WORKERS,
    LocalWorker,
    Lost,
    RemoteWorker,
    Worker,
    can_isolate,
    compile_candidate,
    compile_together,
    interleaved_seconds,
    prepare,
    time_candidate,
    typical_seconds,
)

MOST_BYTES = 1 << 30  # of arguments that are copied to workers
TURN_SECONDS = 0.005  # of a candidate's second and third turn
CLOSE, TURNS = 1.15, 3  # times the best so far: slower candidates get no second turn; and how many turns there are
AHEAD = 2  # formats that are prepared while a batch is compiled
TIMEOUT = 20.0  # seconds of one compilation or measurement
ALLOWED = 20.0  # times the seconds of the untuned kernel, if that is more
CHEAP = 0.3  # seconds of a conversion that a second worker may repeat in order to share the compilation
SENT = ("numpy", "scipy", "sparsetir", "builtins", "ml_dtypes")  # whose objects can be sent to a worker


class Pool(Formats):
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
        self.usual: float | None = None  # seconds of the untuned kernel

    def keep_pace(self, seconds: float | None) -> None:
        """Report what is timed as if the untuned kernel took this long, None for as long as it will."""
        self.usual = seconds

    is_here = True  # this process is as fast as the workers are
    gone: Exception | None = None  # what ended all measuring
    slots = 0  # a batch as large as a search likes

    def keyed(self, key: Key) -> Key:
        """The key of records of the workers' machine, which is this one."""
        return key

    def noted(self, key: Key, record: Record) -> Iterator[tuple[Key, Record]]:
        """A record as its machine's."""
        yield key, record

    # ------------------------------------------------------------------------------------------ formats

    def values(self, format: Format | None) -> Values | None:
        """The open choices of a format; None where it has no variant."""
        if format not in self.known:
            self._home(format).post(prepare, format)
            self._look_ahead(len(self.workers) - 1)
            for worker in self.workers:
                self._drain(worker)
        return self.known[format].values

    def _look_ahead(self, count: int) -> None:
        """Let the next formats be prepared while other work is waited for."""
        while count > 0 and self.upcoming:
            format = self.upcoming.popleft()
            if format not in self.homes:
                self._home(format).post(prepare, format)
                count -= 1

    def _home(self, format: Format | None) -> Worker:
        """The worker that prepares a format: the one with the fewest."""
        if format not in self.homes:
            counts = [sum(worker in held for held in self.homes.values()) for worker in self.workers]
            self.homes[format] = [self.workers[int(np.argmin(counts))]]
        return self.homes[format][0]

    # ----------------------------------------------------------------------------------------- measuring

    def measure(self, batch: Sequence[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Compile candidates side by side, then check and time one after another."""
        workers, timed = self._compile(batch, ahead=AHEAD), dict[Candidate, Measurement]()
        try:
            for candidate, worker in workers.items():
                found = Measurement(error=worker) if isinstance(worker, str) else self.time(candidate, worker)
                timed[candidate] = found
            for turn in range(1, TURNS):
                near = [c for c, found in timed.items() if found.wants_a_turn(CLOSE * self.best, turn)]
                self._time_again({c: workers[c] for c in near}, timed)
        except KeyboardInterrupt:
            yield from timed.items()
            raise
        yield from timed.items()

    def _time_again(self, workers: Mapping[Candidate, Any], timed: dict[Candidate, Measurement]) -> None:
        """Another turn for candidates, each some time after its last one, and those of a worker after each other."""
        for candidate, worker in sorted(workers.items(), key=lambda item: self.workers.index(item[1])):
            worker.post(interleaved_seconds, candidate, TURN_SECONDS)
            *_, found = worker.result()
            seconds, untuned = (float("inf"), float("inf")) if isinstance(found, Lost) else found
            timed[candidate] = self._noted(
                candidate, timed[candidate].again(at_pace(seconds, untuned, self.usual or untuned))
            )

    def time(self, candidate: Candidate | None, worker: Worker | None = None) -> Measurement:
        """Check and time a candidate, None for the untuned kernel."""
        if candidate is None and worker is None:
            # In every worker, as they start side by side: what starts takes time from what is timed.
            return min(
                (self.time(None, each) for each in reversed(self.workers)), key=lambda m: m.seconds or float("inf")
            )
        worker = worker or self.workers[0]
        worker.post(time_candidate, candidate)
        *_, found = worker.result()
        if isinstance(found, Lost):
            return Measurement(error=f"its process {found}")
        if candidate is None and found.seconds is not None:
            self.usual = min(found.seconds, self.usual or found.seconds)
            for each in self.workers:
                each.allow(ALLOWED * found.seconds)
        return self._noted(candidate, found if self.usual is None else found.paced(self.usual))

    def _noted(self, candidate: Candidate | None, found: Measurement) -> Measurement:
        """A measurement, its seconds kept in place of earlier ones of the candidate."""
        if found.seconds is not None:
            self.times[candidate] = found.seconds
        return found

    @property
    def best(self) -> float:
        """Seconds of the fastest."""
        return min(self.times.values(), default=float("inf"))

    def _compile(self, batch: Sequence[Candidate], *, ahead: int = 0) -> dict[Candidate, Worker | str]:
        """Where each candidate is ready, or why it is not."""
        found: dict[Candidate, Worker | str] = {}
        shares: dict[int, list[Candidate]] = {n: [] for n in range(len(self.workers))}
        for candidate in batch:
            found[candidate] = worker = self._least_busy(candidate.format, shares)
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
                    found[candidate] = error
        return found

    def _drain(self, worker: Worker) -> list[tuple[Candidate, str | None]]:
        """Take all results of a worker: formats are noted, compilations returned."""
        compiled = []
        while worker.pending:
            job, (asked, *_), found = worker.result()
            if job is prepare:
                self.known[asked] = Prepared(error=f"its process {found}") if isinstance(found, Lost) else found
            elif job is compile_candidate:
                compiled.append((asked, f"its process {found}" if isinstance(found, Lost) else found))
        return compiled

    def _least_busy(self, format: Format | None, shares: Mapping[int, Sequence[Candidate]]) -> Worker:
        """The worker for a candidate: one with its format, or another if those are busier and converting is cheap.

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
        """Seconds of candidates and, at None, of the untuned kernel, in turn; as they were where no worker begins."""
        try:
            workers = self._compile(candidates)
            cases: dict[Candidate | None, Worker] = {None: self.workers[0]}
            cases.update({c: worker for c, worker in workers.items() if not isinstance(worker, str)})
            return duel({candidate: partial(_typical, worker, candidate) for candidate, worker in cases.items()})
        except ExecutorLostError:
            return {c: self.times[c] for c in (None, *candidates) if c in self.times}

    def rest(self) -> None:
        """Let the worker processes go; they begin again with the next job."""
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _typical(worker: Worker, candidate: Candidate | None, seconds: float) -> float:
    worker.post(typical_seconds, candidate, seconds)
    *_, found = worker.result()
    return float("inf") if isinstance(found, Lost) else float(found)


def pool_of(evaluator: Evaluator, upcoming: Iterable[Format] = (), *, isolate: bool, timeout: float = TIMEOUT) -> Pool:
    """Workers for an evaluator, or this process where they are not wanted or cannot be.

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
        return Pool([LocalWorker(evaluator)], upcoming)
    count = max(1, min(WORKERS, MOST_BYTES // max(len(payload), 1)))
    pool = Pool([RemoteWorker(payload, timeout) for _ in range(count)], upcoming)
    remote = [worker for worker in pool.workers if isinstance(worker, RemoteWorker)]
    if evaluator.template is None or all(worker.begins() is None for worker in remote):
        return pool
    pool.close()  # a worker imports the template's module, and may not find it or find it changed
    return Pool([LocalWorker(evaluator)], upcoming)


def can_send(inputs: Mapping[str, Any]) -> bool:
    """Whether all arguments are of packages whose objects workers can read."""
    return all(type(value).__module__.partition(".")[0] in SENT for value in inputs.values())


def packed(evaluator: Evaluator) -> bytes | None:
    """What an evaluator is made of; None if it cannot be sent to a worker, or is very large."""
    if not can_send(evaluator.inputs):
        return None
    if sum(array.nbytes for array in evaluator.workload.arrays.values()) > MOST_BYTES:
        return None
    try:
        text = evaluator.template.text if evaluator.template is not None else None
        func = tvm.ir.save_json(evaluator.func)
        return pickle.dumps((func, evaluator.inputs, evaluator.target, evaluator.template, text), protocol=5)
    except Exception:  # what objects from elsewhere raise is theirs to choose
        return None
