# SPDX-License-Identifier: Apache-2.0
"""`tune_many`: several kernels under one budget, the highest expected gain per second first."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsetir.errors import ArgumentError, ArgumentTypeError, ExecutorLostError
from sparsetir.lower import single
from sparsetir.tuning.accumulators import refuse_assembled
from sparsetir.tuning.api import check_arguments, check_flags, database_of
from sparsetir.tuning.loop import Budget, is_untuned
from sparsetir.tuning.records import RADIUS, Database, Key, Record, distance
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.search import Search, check_strategy
from sparsetir.tuning.session import SearchRun, Session, full_cost
from sparsetir.tuning.workers.local import TIMEOUT
from sparsetir.tuning.workers.remote import check_executor, opened
from sparsetir.utils.arguments import as_positive, as_seconds, as_sequence, renamed_parameters, shown
from sparsetir.workloads.plot import aligned

# Task scheduler of `tune_many`: the next trials go to the search with the highest expected gain per second.
#
# The objective is the time of all kernels, each weighted by its calls. Ansor distributes the trials of a model's
# subgraphs by a gradient of this kind (Zheng et al., OSDI 2020). Here a batch costs the seconds that it takes, and the
# remaining gain decays faster: a search guided by a trained model reaches most of its gain in the first few trials.


BATCH = 4  # trials of a batch for the estimates
# Share of a kernel's time that a search may still gain after t trials, times t: with the shipped model, searches reach
# 0.94, 0.98 and 0.995 of their final speed after 5, 15 and 60 trials.
LEFT = 0.3
FADING = 0.5  # of what was gained by the last batches, and as much again is expected of the next ones
TRUST = 0.5  # weight of the gain of a similar kernel
FIRST_SECONDS = 0.5  # estimate for a batch before one was measured
WAKING = 0.5  # seconds to resume a search whose workers are in use by another one


@dataclass
class TaskProgress:
    """Progress of a search over time.

    Parameters
    ----------
    calls : float
        Of the kernel, in the whole.
    points : list of (int, float)
        Trials and the best time after each batch, the first with the untuned kernel alone.
    batches : list of float
        Seconds of each batch.
    hinted : float, optional
        The time with the gain of a similar kernel, until the candidate of that kernel is tried.
    is_open : bool
        Whether there is anything left to try.
    """

    calls: float = 1.0
    points: list[tuple[int, float]] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    hinted: float | None = None
    is_open: bool = True

    @property
    def best(self) -> float:
        """The shortest time so far."""
        return self.points[-1][1]

    @property
    def pace(self) -> float:
        """Seconds of the next batch, as long as the last ones."""
        last = self.batches[-3:]
        return sum(last) / len(last) if last else FIRST_SECONDS

    def add(self, trials: int, best: float, seconds: float) -> None:
        """Note a batch."""
        self.points.append((trials, best))
        self.batches.append(seconds)
        self.hinted = None

    def gain(self) -> float:
        """Return seconds that a call is expected to gain by the next batch."""
        trials, best = self.points[-1]
        ahead = best * LEFT * (1 / max(trials, 1) - 1 / (max(trials, 1) + BATCH))
        behind = FADING * (self.points[-3:][0][1] - best) / 2
        similar = TRUST * (best - self.hinted) if self.hinted is not None else 0.0
        return max(ahead, behind, similar)


Policy = Callable[[Sequence[TaskProgress], Sequence[bool]], "int | None"]


def most_gain(curves: Sequence[TaskProgress], awake: Sequence[bool]) -> int | None:
    """Return the search from which the whole is expected to gain most a second; None if all have ended.

    Examples
    --------
    >>> often, rarely = TaskProgress(100.0, [(1, 2e-3)]), TaskProgress(1.0, [(1, 2e-3)])
    >>> most_gain([rarely, often], [True, True])
    1
    >>> often.add(41, 1e-3, 10.0), often.add(81, 1e-3, 10.0), often.add(121, 1e-3, 10.0)  # no gain is left
    (None, None, None)
    >>> most_gain([rarely, often], [True, True])
    0
    """
    worth = {
        n: curve.calls * curve.gain() / (curve.pace + (0.0 if is_awake else WAKING))
        for n, (curve, is_awake) in enumerate(zip(curves, awake, strict=True))
        if curve.is_open
    }
    return max(worth, key=lambda n: worth[n], default=None)


def equal(curves: Sequence[TaskProgress], awake: Sequence[bool]) -> int | None:
    """Return the search that had the least time; None if all have ended."""
    trial_counts = {n: sum(curve.batches) for n, curve in enumerate(curves) if curve.is_open}
    return min(trial_counts, key=lambda n: trial_counts[n], default=None)


POLICIES: dict[str, Policy] = {"gain": most_gain, "equal": equal}


# `tune_many`: several kernels, such as those of a model, under one budget.


SECONDS = 60.0
MOST_TRIALS = 400  # of a task
PATIENCE = 48  # trials of a task without an improvement, after which it stops
AWAKE = 2  # searches that have worker processes at a time
FINISH_SHARE, FINISH_SECONDS = 0.2, 0.6  # of the budget at most, and of each task
FINALISTS = 3
MANY_SECONDS = 5.0  # budget from which on worker processes are started


@renamed_parameters(calls="expected_calls")
@dataclass(frozen=True)
class TuneTask:
    """A kernel to be tuned with others.

    Parameters
    ----------
    program : PrimFunc or IRModule with one PrimFunc
        At stage I.
    inputs : mapping of str to array
        The arguments of a call by name.
    expected_calls : float
        How often it is called where the others are called so often as they say: its weight.
    name : str, optional
        In the report; by default the program's.
    """

    program: Any
    inputs: Mapping[str, Any]
    expected_calls: float = 1.0
    name: str | None = None


@dataclass(frozen=True)
class TuneManyResult(Sequence[TuneResult]):
    """Results of all tasks, in their order: a sequence of `TuneResult`.

    Parameters
    ----------
    results : tuple of TuneResult
        Tasks with the same program and arguments have the same.
    tasks : tuple of TuneTask
    spent : tuple of float
        Seconds of the search of each.
    seconds : float
        All took.
    interrupted : bool
        Whether Ctrl-C, or the loss of an executor, ended it.
    """

    results: tuple[TuneResult, ...]
    tasks: tuple[TuneTask, ...] = field(repr=False)
    spent: tuple[float, ...] = field(repr=False)
    seconds: float
    interrupted: bool = False

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    @property
    def untuned(self) -> float:
        """Seconds of all calls by the untuned kernels."""
        return sum(
            task.expected_calls * (r.untuned.seconds or 0.0) for task, r in zip(self.tasks, self.results, strict=True)
        )

    @property
    def tuned(self) -> float:
        """Seconds of all calls by the kernels that were found."""
        return sum(
            task.expected_calls * (r.best.seconds or 0.0) for task, r in zip(self.tasks, self.results, strict=True)
        )

    @property
    def speedup(self) -> float:
        """How many times faster all calls are than with the untuned kernels."""
        return self.untuned / self.tuned if self.tuned else 1.0

    def report(self) -> str:
        """Return a line for each task, and one for the whole."""
        head = ["task", "calls", "trials", "search s", "untuned ms", "tuned ms", "speedup", "chosen"]
        rows = [head, *map(_row, self.tasks, self.results, self.spent)]
        total = [f"{self.untuned * 1e3:.4g}", f"{self.tuned * 1e3:.4g}", f"{self.speedup:.2f}", ""]
        trials = sum(len(result.history) for result in {id(r): r for r in self.results}.values())
        rows.append(["all calls", "", str(trials), f"{self.seconds:.1f}", *total])
        return "\n".join([*aligned(rows), *(["ended early"] if self.interrupted else [])])


def _row(task: TuneTask, result: TuneResult, spent: float) -> list[str]:
    """Return a line of the report."""
    description = "the untuned kernel" if result.best == result.untuned else str(result.best.candidate)
    times = [f"{(record.seconds or 0.0) * 1e3:.4g}" for record in (result.untuned, result.best)]
    trials = [str(len(result.history)), f"{spent:.1f}"]
    return [
        task.name or result.key.name,
        f"{task.expected_calls:g}",
        *trials,
        *times,
        f"{result.speedup:.2f}",
        description,
    ]


class TaskRun(SearchRun):
    """The search of a task, and how its time went.

    Parameters
    ----------
    session : Session
    search : Search
    records : Database
    calls : float
    patience : int
        Trials without a better one after which it ends.
    """

    search: Search

    def __init__(self, session: Session, search: Search, records: Database, calls: float, patience: int) -> None:
        super().__init__(session, search, Budget(MOST_TRIALS, None, patience), records)
        self.curve = TaskProgress(calls)

    def begin(self) -> None:
        """Read the records, and time the untuned kernel if they lack it."""
        start = time.perf_counter()
        super().begin()
        self._note(start)
        self.curve.batches.clear()  # the start is not representative of a batch

    def advance(self) -> None:
        """Run one batch."""
        start = time.perf_counter()
        has_more = self.loop.step()
        self._note(start)
        self.curve.is_open = has_more and not self.budget.is_spent(self.history)

    def _note(self, start: float) -> None:
        best = self.history[-1].best
        self.curve.add(len(self.history), float("inf") if best is None else best, time.perf_counter() - start)
        if best is None:  # the untuned kernel failed, and no candidate was timed
            self.curve.is_open = False

    @property
    def untuned(self) -> float | None:
        """Seconds of the untuned kernel."""
        return next((record.seconds for record in self.history if is_untuned(record)), None)

    @property
    def leader(self) -> Record | None:
        """The best trial of a candidate."""
        timed = [r for r in self.history if r.seconds is not None and not is_untuned(r)]
        return min(timed, key=full_cost, default=None)

    @property
    def spent(self) -> float:
        """Seconds of the search."""
        return sum(self.curve.batches)

    def is_like(self, other: TaskRun) -> bool:
        """Return whether what is best for another task may be for this one: the same program on a similar pattern."""
        session, other_session = self.session, other.session
        if session.key.program != other_session.key.program or session.fixed.keys() != other_session.fixed.keys():
            return False
        return (
            session.key.pattern == other_session.key.pattern or distance(session.facts, other_session.facts) <= RADIUS
        )

    def learn(self, other: TaskRun) -> None:
        """Try the candidate that another search found, if that search gained more."""
        leader, before, own_seconds = other.leader, other.untuned, self.untuned
        if leader is None or leader.seconds is None or before is None or own_seconds is None or not self.is_like(other):
            return
        expected = own_seconds * leader.seconds / before
        if expected < self.curve.best and self.search.hint(leader.candidate):
            self.curve.hinted, self.curve.is_open = expected, True


@renamed_parameters(finite="assume_finite")
def tune_many(
    tasks: Sequence[Any],
    *,
    seconds: float = SECONDS,
    policy: str = "gain",
    strategy: str = "guided",
    patience: int = PATIENCE,
    seed: int = 0,
    database: str | Path | Database | None = None,
    target: Any = None,
    isolate: bool | None = None,
    timeout: float = TIMEOUT,
    executor: Executor | str | None = None,
    machines: str = "same",
    assume_finite: bool = False,
) -> TuneManyResult:
    """Tune several kernels, such as those of a model, under one budget: the next trials where most is to be gained.

    A batch of trials goes to the search from which the time of all calls is expected to gain most a second: by how long
    the kernel takes, how often it is called, how many trials it had and what the last ones brought. What is best for
    one kernel is tried soon for those of the same program whose patterns are similar. A search ends where nothing gets
    better any more, and all do when the budget is spent.

    Parameters
    ----------
    tasks : sequence of TuneTask
        Or of tuples: a program, its inputs as for `tune_sparse`, and how often it is called (1). Tasks of the same
        program and arguments are tuned once.
    seconds : float
        Of everything. The untuned kernel of every task is timed all the same, and the results are compared once more.
    policy : {"gain", "equal"}
        Equal shares of time are a baseline.
    strategy, seed, database, target, isolate, timeout, executor, machines, assume_finite
        As for `tune_sparse`. Worker processes are started for a budget of more than 5 seconds.
    patience : int
        Trials without a better one after which a search ends.

    Returns
    -------
    TuneManyResult

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no task, a task is no pair of a program and inputs, or an option is not one of these.
    TuningError
        The untuned kernel of a task is wrong, or the database cannot be written.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.random_array((50, 40), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    >>> spmm, B = sparsetir.ops.spmm(), np.ones((40, 8), "float32")
    >>> found = sparsetir.tune_many([(spmm, {"A": A, "B": B}), (spmm, {"A": A[:25], "B": B}, 10)], seconds=1)
    >>> [bool(np.allclose(result.kernel(A=M, B=B), M @ B, rtol=1e-5)) for result, M in zip(found, [A, A[:25]])]
    [True, True]
    """
    sequence = as_sequence(tasks, "tasks", "tasks such as (program, inputs)")
    task_list = tuple(_task(task, n) for n, task in enumerate(sequence))
    if not task_list:
        raise ArgumentError("expected tasks, such as [(program, inputs), ...], got none")
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ArgumentError(f"policy is one of {', '.join(POLICIES)}, got {shown(policy)}")
    seconds, timeout = as_seconds(seconds, "seconds", positive=True), as_seconds(timeout, "timeout", positive=True)
    for task in task_list:
        check_arguments(task.inputs, max_trials=1, max_seconds=seconds, seed=seed, patience=patience)
        refuse_assembled(single(task.program), "tune_many")
    check_executor(executor, machines)
    records = database_of(database)
    isolate, assume_finite = check_flags(isolate=isolate, assume_finite=assume_finite)
    check_strategy(strategy)
    apart = seconds > MANY_SECONDS if isolate is None else isolate
    settings: dict[str, Any] = {"isolate": apart, "timeout": timeout, "assume_finite": assume_finite}
    begin = time.perf_counter()
    with ExitStack() as stack, closing(records):
        settings |= {"executor": stack.enter_context(opened(executor)), "machines": machines}
        many = Many(records, policy, patience)
        for task in task_list:
            session = stack.enter_context(closing(Session(task.program, task.inputs, target, **settings)))
            many.add(task, session, lambda session: session.search(seed, strategy, records=records))
        many.go(begin + seconds)
        return many.result(task_list, begin)


class Many:
    """The searches of several tasks."""

    def __init__(self, records: Database, policy: str, patience: int) -> None:
        self.records, self.policy, self.patience = records, POLICIES[policy], patience
        self.runs: dict[str, TaskRun] = {}
        self.order: list[str] = []
        self.awake: list[TaskRun] = []
        self.interrupted = False

    def add(self, task: TuneTask, session: Session, search_in: Any) -> None:
        """Add a task, with those of the same key."""
        name = _name(session.key)
        self.order.append(name)
        if name in self.runs:
            self.runs[name].curve.calls += task.expected_calls
            session.pool.rest()
            return
        run = TaskRun(session, search_in(session), self.records, task.expected_calls, self.patience)
        self.runs[name] = run
        self._wake(run)
        run.begin()

    def _wake(self, run: TaskRun) -> None:
        """Let a search have worker processes, those that had none for longest go without."""
        if run in self.awake:
            self.awake.remove(run)
        self.awake.append(run)
        while len(self.awake) > AWAKE:
            self.awake.pop(0).session.pool.rest()

    def go(self, end: float) -> None:
        """Run batch after batch until a time, or until nothing is left."""
        runs = list(self.runs.values())
        reserved = min(FINISH_SHARE * max(end - time.perf_counter(), 0.0), FINISH_SECONDS * len(runs))
        try:
            while time.perf_counter() < end - reserved:
                number = self.policy([run.curve for run in runs], [run in self.awake for run in runs])
                if number is None:
                    return
                self._wake(runs[number])
                runs[number].advance()
                for other in self._others(runs[number]):
                    other.learn(runs[number])
        except KeyboardInterrupt:
            self.interrupted = True
        except ExecutorLostError as error:
            self.interrupted = True
            warnings.warn(f"the search ended early: {error}", stacklevel=4)

    def _others(self, run: TaskRun) -> Iterator[TaskRun]:
        """Yield the searches that may learn from one, if it has got better just now."""
        points = run.curve.points[-2:]
        if points[-1][1] < points[0][1]:
            yield from (other for other in self.runs.values() if other is not run)

    def result(self, tasks: tuple[TuneTask, ...], begin: float) -> TuneManyResult:
        """Return the results."""
        results_by_name = {}
        for name, run in self.runs.items():
            self._wake(run)
            run.interrupted = self.interrupted
            results_by_name[name] = run.finish(most=FINALISTS)
        results = tuple(results_by_name[name] for name in self.order)
        seconds = tuple(self.runs[name].spent for name in self.order)
        return TuneManyResult(results, tasks, seconds, time.perf_counter() - begin, self.interrupted)


def _name(key: Key) -> str:
    return repr((key.program, key.pattern, sorted(key.sizes.items()), key.dtype, key.target))


def _task(task: Any, number: int) -> TuneTask:
    """Return a task, from a tuple if it is one."""
    if isinstance(task, tuple) and 2 <= len(task) <= 3:
        task = TuneTask(*task)
    if not isinstance(task, TuneTask):
        fault = f"task {number} is {type(task).__name__}"
        raise ArgumentTypeError(f"tasks are TuneTask(program, inputs, expected_calls) or tuples of these; {fault}")
    return replace(task, expected_calls=as_positive(task.expected_calls, f"expected_calls of task {number}"))


__all__ = ["POLICIES", "Policy", "TaskProgress", "TuneManyResult", "TuneTask", "equal", "most_gain", "tune_many"]
