# SPDX-License-Identifier: Apache-2.0
"""One search from its first trial to its result: trials, those in the database first, and the last comparison."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sparsetir.errors import ExecutorLostError, SparseTIRError
from sparsetir.tuning.loop import (
    WORTH,
    Budget,
    CandidateSource,
    Comparison,
    Cost,
    Log,
    Progress,
    TrialLoop,
    is_untuned,
    last_of,
    note,
    rescaled,
    winner,
    with_best,
)
from sparsetir.tuning.measure import reason
from sparsetir.tuning.predict import Recommendation, guess
from sparsetir.tuning.records import Database, Record
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.search import Search
from sparsetir.tuning.session import Session, shown
from sparsetir.tuning.space import Candidate

FINALISTS = 8  # that are compared again, interleaved with the untuned kernel


@dataclass
class SearchRun:
    """One search: what it searches, how long, where it reads and writes records, and its trials so far.

    Parameters
    ----------
    session : Session
    search : CandidateSource
    budget : Budget
    records : Database
    amortize_over : float, optional
        How many calls share a conversion; by default it costs nothing.
    bar : Progress, optional
    history : list of Record
        The trials so far.
    interrupted : bool
        Whether Ctrl-C, or the loss of an executor, ended the trials.
    """

    session: Session
    search: CandidateSource
    budget: Budget
    records: Database
    amortize_over: float | None = None
    bar: Progress | None = None
    history: list[Record] = field(default_factory=list)
    interrupted: bool = False

    def cost(self, record: Record) -> float:
        """Return seconds of a call, and its share of the conversion."""
        return full_cost(record, self.amortize_over)

    # ------------------------------------------------------------------------------------------------ trials

    def explore(self) -> None:
        """Run the trials; Ctrl-C ends them once the untuned kernel was timed, and closes the records."""
        try:
            self.begin()
            self.loop.explore(self.search.chance if isinstance(self.search, Search) else None)
        except (KeyboardInterrupt, ExecutorLostError) as error:
            if not any(is_untuned(record) for record in self.history):
                raise
            if isinstance(error, ExecutorLostError):
                warnings.warn(f"the search ended early, after {len(self.history)} trials: {error}", stacklevel=3)
            self.interrupted = True
        finally:
            self.records.close()

    def begin(self) -> None:
        """Read what is recorded and tell the search; then measure the kernels that the result must not be behind."""
        session, history = self.session, self.history
        for record in self._reusable():
            history.append(with_best(record, history))
            if record.fixed == session.fixed and not is_untuned(record):
                self.search.tell(record.candidate, self.cost(record))
        log = self.loop.log
        # What is measured now must be comparable with what was recorded.
        session.pool.keep_pace(next((r.seconds for r in history if is_untuned(r)), None))
        if not any(is_untuned(record) for record in history):
            log.add(Candidate(), {}, session.pool.time(None))
        # Whatever the strategy, the seconds or the records: the result must not be behind these.
        room = self.budget.trials - len(history) if self.budget.trials > 1 else 0
        for _ in self.loop.measured(self._untried(history)[:room]):
            pass

    @cached_property
    def loop(self) -> TrialLoop:
        """The loop of the trials, which begins with what was read from the records."""
        session, reused = self.session, len(self.history)
        bar = Progress(self.budget, shown=False) if self.bar is None else self.bar
        bar.flops = session.flops

        def on_record(record: Record) -> None:
            for key, noted in session.pool.noted(session.key, record):
                self.records.append(key, noted, features=session.seen(noted))
            bar.update(len(self.history), record, reused=reused)

        log = Log(self.budget, self.search.seed, self.history, on_record)
        settings: dict[str, Any] = {
            "fixed": session.fixed,
            "conversion": session.conversion,
            "slots": session.pool.slots,
        }
        return TrialLoop(self.search, session.pool.measure, log, cost=self.cost, **settings)

    def _reusable(self) -> list[Record]:
        """Return the records to begin with; they leave room for what must be measured."""
        trials = self.budget.trials
        recorded = self.records.load(self.session.key)[:trials]
        is_full = len(recorded) == trials > 1
        return recorded[: max(trials - len(self._untried(recorded)), 1)] if is_full else recorded

    def _untried(self, history: Sequence[Record]) -> list[Candidate]:
        """Return what every search measures first and this one has not."""
        fixed = self.session.fixed
        tried = {record.candidate for record in history if record.fixed == fixed and not is_untuned(record)}
        return [candidate for candidate in self.session.first if candidate not in tried]

    # ------------------------------------------------------------------------------------------------ result

    def finish(self, *, most: int = FINALISTS) -> TuneResult:
        """Compare the fastest candidates once more, and let the winner prove itself in runs that did not choose it.

        What `sparsetir.build` makes with ``expected_calls=1000`` is in all comparisons, however slow it was when it was
        tried: see `sparsetir.tuning.loop`. What they say is recorded, unless Ctrl-C ended the search.
        """
        session = self.session
        tuned = [r for r in self.history if r.fixed == session.fixed and not is_untuned(r)]
        try:
            times, best = compared(session, tuned, self.cost, most=1 if self.interrupted else most)
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.interrupted = True  # the best trial is compared with the untuned kernel alone
            times, best = compared(session, tuned, self.cost, most=1)
        kernel = session.kernel if best is None else session.tuned(session.variant(best))
        compared_records = [replace(r, seconds=times[r.candidate]) for r in tuned if r.candidate in times]
        timed = sorted((r for r in compared_records if r.seconds != float("inf")), key=lambda r: r.seconds or 0.0)
        comparison = Comparison(times[None], tuple(timed), best, self.amortize_over, session.evaluator.name)
        if not self.interrupted:
            with closing(self.records):
                note(self.records, session.key, comparison)
        baseline = replace(self._baseline(), seconds=times[None])
        return self._result(kernel, comparison.best or baseline, baseline, comparison)

    def is_repeated(self) -> bool:
        """Return whether every trial was read from the records of a search that ended: it ends as it did then."""
        last = last_of(self.records, self.session.key) if all(r.reused for r in self.history) else None
        return last is not None and last.amortize_over == self.amortize_over and self.session.may_have(last.chosen)

    def recall(self) -> TuneResult:
        """Return the best candidate of earlier searches, else the pretrained model's favourite, else the untuned one.

        Nothing is timed but the untuned kernel; a kernel that is wrong, or unavailable, is not taken.
        """
        session, baseline = self.session, self._baseline()
        last = last_of(self.records, session.key)
        last = last if last is None or session.may_have(last.chosen) else None
        if last is not None:
            baseline = replace(baseline, seconds=last.untuned)
            record = chosen_then(last, self.amortize_over)
        else:
            record, before = self._known_best(baseline)
            baseline = baseline if record is None else replace(baseline, seconds=before.seconds)
        if last is None and record is None and session.prior is not None and baseline.seconds is not None:
            settings: dict[str, Any] = {"amortize_over": self.amortize_over, "seed": self.search.seed}
            found = guess(session, session.prior, seconds=baseline.seconds, **settings)
            if found is not None:
                record = expected(session, found, baseline.seconds)
        kernel = session.kernel
        if record is not None:
            try:
                variant = session.variant(record.candidate)
                session.checked(record.candidate, variant.built())
                kernel = session.tuned(variant)
            except (SparseTIRError, RuntimeError) as error:
                session.pool.refuse(record.candidate.format, reason(error))
                record = None
        return self._result(kernel, baseline if record is None else record, baseline, last, is_recalled=True)

    def _baseline(self) -> Record:
        """Return the trial of the untuned kernel."""
        return next(record for record in self.history if is_untuned(record))

    def _known_best(self, untuned: Record) -> tuple[Record | None, Record]:
        """Return the best trial of an unfinished search if clearly better than the untuned one, and that one."""
        session = self.session
        recorded = self.records.load(session.key)
        tuned = [r for r in recorded if r.seconds is not None and r.fixed == session.fixed and not is_untuned(r)]
        best = min((r for r in tuned if session.may_have(r.candidate)), key=self.cost, default=None)
        before = next((r for r in recorded if is_untuned(r) and r.seconds is not None), untuned)
        return best if best is not None and self.cost(best) <= WORTH * self.cost(before) else None, before

    def _result(
        self, kernel: Any, best: Record, untuned: Record, comparison: Comparison | None, *, is_recalled: bool = False
    ) -> TuneResult:
        """Return what was found, with all that is told about it."""
        session, search = self.session, self.search
        return TuneResult(
            kernel=kernel,
            best=best,
            untuned=untuned,
            history=self.history,
            space=session.space.values(best.candidate.format) or {},
            seconds=self.budget.elapsed,
            key=session.key,
            checked_against=session.evaluator.checked_against,
            flops=session.flops,
            database=self.records.path,
            interrupted=self.interrupted,
            comparison=comparison,
            is_recalled=is_recalled,
            refused={shown(format): why for format, why in session.pool.refused.items()},
            importance=search.importance(session.encoding.names) if isinstance(search, Search) else {},
            template=session.template,
            judgement=session.judged(best) if best != untuned else None,
        )


def full_cost(record: Record, amortize_over: float | None = None) -> float:
    """Return seconds of a call, and its share of the conversion."""
    if record.seconds is None:
        return float("inf")
    return record.seconds + (record.conversion / amortize_over if amortize_over is not None else 0.0)


def finalists(history: Sequence[Record], cost: Cost) -> list[Candidate]:
    """Return the candidates that cost least; ties go to the smaller choices."""
    timed = [(cost(r), r.candidate.key, r.candidate) for r in history if r.seconds is not None]
    timed.sort(key=lambda entry: entry[:2])
    return [candidate for *_, candidate in timed[:FINALISTS]]


def compared(
    session: Session, tuned: Sequence[Record], cost: Cost, *, most: int = FINALISTS
) -> tuple[dict[Candidate | None, float], Candidate | None]:
    """Return seconds of the kernels that may be returned, as they are next to each other, and the one to return.

    Parameters
    ----------
    session : Session
    tuned : sequence of Record
        The trials, but that of the untuned kernel.
    cost : callable
        What is to be small.
    most : int
        How many are compared before one of them is to prove itself.
    """
    conversion_costs = {r.candidate: cost(r) - r.seconds for r in tuned if r.seconds is not None}
    sure = [c for c in (session.announced,) if c in conversion_costs]
    times = session.pool.compare(list(dict.fromkeys([*finalists(tuned, cost)[:most], *sure])))
    fastest = winner(added({c: seconds for c, seconds in times.items() if c not in sure}, conversion_costs))
    able = [c for c in dict.fromkeys([fastest, *sure]) if c is not None]
    if not able:
        return times, None
    contest = session.confirm({c: session.variant(c).built() for c in able}, [None, *sure], conversion_costs)
    return rescaled(times, contest.times, able[0]), contest.chosen


def added(times: Mapping[Candidate | None, float], extra: Mapping[Candidate, float]) -> dict[Candidate | None, float]:
    """Return times with each candidate's share of its conversion."""
    return {c: seconds + (extra.get(c, 0.0) if c is not None else 0.0) for c, seconds in times.items()}


def chosen_then(comparison: Comparison, amortize_over: float | None) -> Record | None:
    """Return what a search returned, or would have for that many calls; None for the untuned kernel."""
    if comparison.amortize_over == amortize_over:
        return comparison.best
    costs: dict[Candidate | None, float] = {r.candidate: full_cost(r, amortize_over) for r in comparison.records}
    best = winner({None: comparison.untuned, **costs})
    return next((r for r in comparison.records if r.candidate == best), None)


def expected(session: Session, found: Recommendation, seconds: float) -> Record:
    """Return a recommendation as a record without a time, `seconds` being that of the untuned kernel."""
    candidate, format = found.candidate, found.candidate.format
    stored_as = None if format is None else repr(format)
    conversion = session.conversion(format)
    return Record(candidate.choices, stored_as, session.fixed, predicted=seconds / found.gain, conversion=conversion)


__all__ = ["FINALISTS", "SearchRun", "compared", "full_cost"]
