# SPDX-License-Identifier: Apache-2.0
"""`tune_sparse`: from a program and the arguments of a call to the fastest kernel found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tvm

import sparsetir
from sparsetir.build import _versions, build, make_target, single
from sparsetir.errors import ArgumentError, ArgumentTypeError, TuningError
from sparsetir.kernel import Kernel
from sparsetir.schedules import Choices
from sparsetir.script.printer import script
from sparsetir.threads import get_num_threads
from sparsetir.tuning import features, space
from sparsetir.tuning.database import Database, Key, Record, digest, fingerprint, machine_name
from sparsetir.tuning.measure import Form, Measurement, Measurer, Workload, duel
from sparsetir.tuning.progress import Progress
from sparsetir.tuning.reference import KnownOp, Reference, recognise
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.search import Search

Measure = Callable[[list[Choices]], Iterable[tuple[Choices, Measurement]]]

# The fastest candidates of a search are compared again, interleaved with the untuned kernel.
FINALISTS = 4
# A tuned kernel takes the untuned one's place if it needs at most this share of its time.
WORTH = 0.98
# Share of the time budget kept for the last comparison, and the most seconds it may need.
FINISH_SHARE, FINISH_SECONDS = 0.1, 2.0


@dataclass
class Budget:
    """When a search ends.

    Parameters
    ----------
    trials : int
        Counting those read from a database.
    seconds : float, optional
        From when the budget was made.
    patience : int, optional
        Trials in a row without a better one.
    """

    trials: int
    seconds: float | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def is_spent(self, history: list[Record]) -> bool:
        """Whether no further trial may begin; the first always may."""
        if not history:
            return False
        if len(history) >= self.trials or (self.seconds is not None and self.elapsed >= self.seconds):
            return True
        return self.patience is not None and stale(history) >= self.patience


def stale(history: list[Record]) -> int:
    """Trials since the best one."""
    times = [float("inf") if record.seconds is None else record.seconds for record in history]
    return len(times) - 1 - times.index(min(times))


@dataclass
class Log:
    """The trials of a search in order.

    Parameters
    ----------
    budget : Budget
    seed : int
        Noted in the records.
    history : list of Record
        Trials read from a database, to begin with.
    on_record : callable
        Called with each new record.
    """

    budget: Budget
    seed: int
    history: list[Record]
    on_record: Callable[[Record], None] = lambda _record: None

    def __post_init__(self) -> None:
        self.before = max((record.elapsed for record in self.history), default=0.0)

    def add(self, choices: Choices, fixed: dict[str, int], found: Measurement) -> None:
        """Note a measurement."""
        times = (found.seconds, found.median, found.spread, found.error)
        record = Record(choices, fixed, *times, elapsed=self.before + self.budget.elapsed, seed=self.seed)
        self.history.append(with_best(record, self.history))
        self.on_record(self.history[-1])


def is_untuned(record: Record) -> bool:
    """Whether it is of the kernel that is built without tuning."""
    return record.choices == Choices() and not record.fixed


def with_best(record: Record, history: list[Record]) -> Record:
    """`record` with the best time so far."""
    known = [r.seconds for r in (*history, record) if r.seconds is not None]
    return replace(record, best=min(known, default=None))


def explore(search: Search, measure: Measure, log: Log, *, fixed: dict[str, int]) -> None:
    """Ask, measure and tell until the budget is spent or the space is exhausted.

    Parameters
    ----------
    search : Search
        It was told the trials that the log begins with.
    measure : callable
        Yields a measurement for each candidate of a list.
    log : Log
    fixed : dict of str to int
        Sizes that are compiled into the candidates.
    """
    budget = log.budget
    while not budget.is_spent(log.history):
        batch = search.ask()[: max(1, budget.trials - len(log.history))]
        if not batch:
            return
        for choices, found in measure(batch):
            search.tell(choices, found.seconds)
            log.add(choices, fixed, found)
            if budget.is_spent(log.history):
                return


def finalists(history: list[Record]) -> list[Choices]:
    """The fastest candidates; ties go to the smaller choices."""
    timed = [(r.seconds, tuple(r.choices.as_dict().values()), r.choices) for r in history if r.seconds is not None]
    timed.sort(key=lambda entry: entry[:2])
    return [choices for *_, choices in timed[:FINALISTS]]


def winner(times: Mapping[Choices | None, float]) -> Choices | None:
    """The fastest; None, the untuned kernel, if nothing is clearly faster."""
    tuned = [c for c in times if c is not None]
    best = min(tuned, key=lambda c: (times[c], tuple(c.as_dict().values())), default=None)
    return best if best is not None and times[best] <= WORTH * times[None] else None


class Session:
    """One program on one workload: everything that a search needs and that does not change during it."""

    def __init__(self, program: Any, inputs: Mapping[str, Any], target: Any) -> None:
        self.func, self.target = single(program), target
        self.kernel = build(self.func, target)
        self.workload = Workload(self.kernel, dict(inputs))
        self.known: KnownOp | None = recognise(self.func)
        decoded, sizes = self.kernel.signature.program, self.sizes
        self.flops = self.known.flops(sizes) if self.known is not None else None
        self.key = self._key()
        self.untuned = self.workload.call(self.kernel.function, [str(p.name) for p in self.func.params])
        self.reference, self.checked_against = self._reference(inputs)
        self.fixed = {name: sizes[name] for name in space.free_sizes(decoded)}
        self.form = Form(space.fixed(decoded, self.fixed), target)
        feat = self.workload.feat
        freedom = make_target(target, self.func)
        self.values = space.open_choices(self.form.second, threads=get_num_threads(), feat=feat, target=freedom)
        self.pattern = features.statistics(decoded, self.workload.arrays, feat)
        self.measure = Measurer(self.form, self.workload, self.reference)

    @property
    def sizes(self) -> dict[str, int]:
        """Every size symbol."""
        return {name: int(value) for name, value in self.workload.args.sizes.items()}

    def _key(self) -> Key:
        signature = self.kernel.signature
        return Key(
            name=self.kernel.name,
            program=digest(script(self.func)),
            pattern=fingerprint(signature.program, self.workload.arrays),
            sizes=self.sizes,
            dtype=" ".join(signature.by_name[name].dtype for name in signature.effects.written),
            target=str(self.kernel.target),
            machine=machine_name(),
            threads=get_num_threads(),
            versions=f"sparsetir {sparsetir.__version__} {digest(_versions())}, tvm {tvm.__version__}",
        )

    def _reference(self, inputs: Mapping[str, Any]) -> tuple[Reference, str]:
        """What the untuned kernel computes, compared with scipy where the program is a known one."""
        absolute = self.workload.absolute()
        magnitudes = absolute.fresh(absolute.call(self.kernel.function, [str(p.name) for p in self.func.params]))
        reference = Reference(self.workload.fresh(self.untuned), magnitudes)
        computed = self.known.compute(inputs) if self.known is not None else None
        if computed is None:
            return reference, "the untuned kernel"
        (name,) = reference.expected
        wrong = reference.disagreement({name: computed})
        if wrong is not None:
            raise TuningError(f"the untuned kernel disagrees with scipy, whose {wrong}; please report this program")
        return reference, "scipy"

    def search(self, seed: int) -> Search:
        """A search of this session's space."""
        rows = partial(features.matrix, pattern=self.pattern)
        return Search(space.points(self.values), first=space.portfolio(self.values), features=rows, seed=seed)

    def compare(self, candidates: list[Choices]) -> dict[Choices | None, float]:
        """Times of candidates and, at None, of the untuned kernel, interleaved."""
        calls = [(choices, self.measure.call(choices)) for choices in candidates]
        ready = {choices: call for choices, call in calls if not isinstance(call, Measurement)}
        return duel({None: self.untuned, **ready})

    def built(self, choices: Choices) -> Kernel:
        """The kernel of a candidate, through the ordinary caches."""
        return build(self.form.func, self.target, schedule=choices)

    def confirm(self, choices: Choices, kernel: Kernel) -> dict[Choices | None, float]:
        """Times of the kernel that would be returned and of the untuned one, from runs that chose neither.

        The comparison that picks a winner flatters it: with noise, the fastest of several is also the luckiest.
        """
        call = self.workload.call(kernel.function, self.form.names)
        wrong = self.reference.disagreement(self.workload.fresh(call))
        if wrong is not None:
            raise TuningError(f"the tuned kernel is wrong although its candidate was right: {wrong}")
        return duel({None: self.untuned, choices: call})


def tune_sparse(
    program: Any,
    inputs: Mapping[str, Any],
    *,
    max_trials: int = 64,
    max_seconds: float | None = None,
    seed: int = 0,
    database: str | Path | Database | None = None,
    patience: int | None = None,
    target: Any = None,
    progress: bool | None = None,
) -> TuneResult:
    """Find the fastest schedule of a program on the arguments of one call.

    Sizes that no sparse axis depends on, such as the number of features, are compiled in. Every candidate is run
    on the arguments themselves and its result compared with the untuned kernel's. The untuned kernel is the first
    trial, and what is returned unless the winner beats it again in runs that did not choose the winner.

    Parameters
    ----------
    program : PrimFunc or IRModule with one PrimFunc
        At stage I.
    inputs : mapping of str to array
        The arguments of a call by name; they are not changed.
    max_trials : int
        Candidates, counting those whose times are read from the database.
    max_seconds : float, optional
        Of the search, everything included.
    seed : int
        The same seed and the same times give the same candidates in the same order.
    database : str, Path or Database, optional
        A file of JSON lines to which every trial is added. Trials in it of the same program, pattern, sizes,
        target, machine, threads and version are not measured again.
    patience : int, optional
        End after this many trials without a better one.
    target : Target, str or dict, optional
        As for `sparsetir.build`.
    progress : bool, optional
        Whether to show a progress line on stderr; by default if it is a terminal.

    Returns
    -------
    TuneResult

    Raises
    ------
    ArgumentError
        A budget is not positive, or the arguments do not fit the program.
    TuningError
        The untuned kernel is wrong, or the database cannot be written.

    Notes
    -----
    Ctrl-C ends the search, not the program: the result holds the best kernel so far.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.random_array((50, 40), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    >>> B = np.ones((40, 8), "float32")
    >>> result = sparsetir.tune_sparse(sparsetir.ops.spmm(), {"A": A, "B": B}, max_trials=2)
    >>> bool(np.allclose(result.kernel(A=A, B=B), A @ B, rtol=1e-5)), len(result.history)
    (True, 2)
    """
    check_arguments(inputs, max_trials=max_trials, max_seconds=max_seconds, seed=seed, patience=patience)
    kept = max_seconds - min(FINISH_SECONDS, FINISH_SHARE * max_seconds) if max_seconds is not None else None
    budget = Budget(max_trials, kept, patience)
    records = database if isinstance(database, Database) else Database(None if database is None else Path(database))
    session = Session(program, inputs, target)
    history, interrupted = trials(session, budget, records, seed=seed, progress=progress)
    return finish(session, history, budget, records.path, interrupted=interrupted)


def trials(
    session: Session, budget: Budget, records: Database, *, seed: int, progress: bool | None
) -> tuple[list[Record], bool]:
    """Trials of a session, those in the database first, and whether Ctrl-C ended them."""
    search = session.search(seed)
    history: list[Record] = []
    for record in records.load(session.key)[: budget.trials]:
        history.append(with_best(record, history))
        if record.fixed == session.fixed:
            search.tell(record.choices, record.seconds)
    reused = len(history)
    with Progress(budget.trials, seconds=budget.seconds, shown=progress, flops=session.flops) as bar:

        def note(record: Record) -> None:
            records.append(session.key, record, statistics=session.pattern)
            bar.update(len(history), record.best, reused=reused)

        try:
            log = Log(budget, seed, history, note)
            if not any(is_untuned(record) for record in history):
                found = session.measure.measured(session.untuned)
                log.add(Choices(), {}, found)
                if not session.fixed:
                    search.tell(Choices(), found.seconds)
            explore(search, session.measure, log, fixed=session.fixed)
        except KeyboardInterrupt:
            if not any(is_untuned(record) for record in history):
                raise
            return history, True
        finally:
            records.close()
    return history, False


def finish(
    session: Session, history: list[Record], budget: Budget, database: Path | None, *, interrupted: bool
) -> TuneResult:
    """Compare the fastest candidates once more, and let the winner prove itself in runs that did not choose it."""
    close = finalists([record for record in history if record.fixed == session.fixed])
    times = session.compare(close[:1] if interrupted else close)
    best, kernel = winner(times), session.kernel
    if best is not None:
        tuned_kernel = session.built(best)
        times = session.confirm(best, tuned_kernel)
        best = winner(times)
        kernel = kernel if best is None else tuned_kernel
    untuned = replace(next(record for record in history if is_untuned(record)), seconds=times[None])
    tuned = [replace(r, seconds=times[r.choices]) for r in history if r.choices == best and r.fixed == session.fixed]
    return TuneResult(
        kernel=kernel,
        best=tuned[0] if tuned else untuned,
        untuned=untuned,
        history=history,
        space=session.values,
        seconds=budget.elapsed,
        key=session.key,
        checked_against=session.checked_against,
        flops=session.flops,
        database=database,
        interrupted=interrupted,
    )


def check_arguments(
    inputs: Mapping[str, Any], *, max_trials: int, max_seconds: float | None, seed: int, patience: int | None
) -> None:
    """Raise unless the budgets are positive and the inputs have names."""
    if not isinstance(inputs, Mapping):
        found = type(inputs).__name__
        raise ArgumentTypeError(f'inputs must name the arguments, as in {{"A": A, "B": B}}; found {found}')
    for name, value in (("max_trials", max_trials), ("patience", patience)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ArgumentError(f"{name} must be a positive integer, found {value!r}")
    if max_seconds is not None and not max_seconds > 0:
        raise ArgumentError(f"max_seconds must be positive, found {max_seconds!r}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ArgumentError(f"seed must be an integer that is not negative, found {seed!r}")
