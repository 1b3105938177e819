# SPDX-License-Identifier: Apache-2.0
"""Search over accumulators of computed patterns: how rows are collected, in which order, in which blocks.

The space is small and the results are the same bit by bit, so candidates are built and timed in this process,
interleaved with the untuned kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tvm import tirx

from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.ir.sizes import Size
from sparsetir.ir.views import decode
from sparsetir.lower import single
from sparsetir.sparse_output import AccumulatorOptions, Accumulators, is_assembled
from sparsetir.sparse_output.accumulators import KINDS, ORDERS
from sparsetir.sparse_output.blocks import BlockProduct, assembled_kernel, shared_blocks
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.sparse_output.result import ResultPattern, rows_axis
from sparsetir.sparse_output.rows import LEAST_PARTS, SHIFT, update_of
from sparsetir.sparse_output.workspace import Call
from sparsetir.tuning.knobs import AccumulatorKnobs, Config
from sparsetir.tuning.loop import (
    WORTH,
    Budget,
    Comparison,
    Log,
    Outcome,
    Progress,
    TrialLoop,
    compared,
    is_untuned,
    last_of,
    note,
    rescaled,
    select_final,
    winner,
    with_best,
)
from sparsetir.tuning.measure import BURST_SECONDS, Measurement, Timed, burst, duel, reason, summary, typical
from sparsetir.tuning.records import Database, Key, Record, fingerprint
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.search import Search
from sparsetir.tuning.space import Candidate, Space, Values
from sparsetir.tuning.tuned_kernel import agrees, circumstances, existing_database, unfinished, warn_of_no_records
from sparsetir.utils.caches import cached_property

VALUES: Values = {
    "insertion": (24, 0, 8, 64),
    "kind": KINDS,
    "counted": (False, True),
    "order": ORDERS,
    "block": (None,),
    "ranked": (96, 0, 32),
}
FINALISTS = 4
MOST_BLOCKS = 4  # sizes of blocks that are tried


def computes_patterns(program: Any) -> bool:
    """Return whether a program is searched here."""
    return is_assembled(decode(single(program)))


def refuse_assembled(func: tirx.PrimFunc, search: str) -> None:
    """Raise where a program computes patterns, which a search over loops and formats does not support."""
    if is_assembled(decode(func)):
        program = f"{func.attrs['global_symbol']} computes the pattern of its results"
        raise LoweringError(f"{program}: {search} compares loops and formats; tune_sparse searches its accumulators")


def refuse_others(searched: Mapping[str, Any], apart: Mapping[str, Any], compare_with: Sequence[str]) -> None:
    """Raise where a search was given arguments that apply to other programs only.

    Parameters
    ----------
    searched : mapping of str to value
        What is searched there.
    apart : mapping of str to value
        How candidates run in other processes.
    compare_with : sequence of str
        Libraries to compare with.
    """
    argument = next((name for name, value in searched.items() if value), None)
    if argument is not None:
        raise ArgumentError(f"{argument} is not searched for computed patterns, only how their rows are collected")
    argument = next((name for name, value in apart.items() if value), None)
    if argument is not None:
        raise ArgumentError(f"candidates for computed patterns run in this process, one by one: leave {argument} out")
    if compare_with:
        advice = "`sparsetir bench FILE --ops spgemm` compares products with them"
        raise ArgumentError(f"no other library is timed against computed patterns: leave compare_with out; {advice}")


class Trials:
    """Timer of candidates on one call."""

    def __init__(self, program: Any, inputs: Mapping[str, Any], target: Any = None) -> None:
        self.func, self.target = single(program), target
        self.kernel = assembled_kernel(self.func, target)
        self.args = self.kernel.prepare((), dict(inputs))
        self.expected = self.kernel.assemble(self.args)
        self.built: dict[Candidate, SparseOutputKernel] = {}

    def key(self) -> Key:
        """Return the key of the records."""
        pattern = fingerprint(self.kernel.signature.program, self.args.arrays)
        sizes = {name: int(value) for name, value in self.args.sizes.items()}
        return Key(pattern=pattern, sizes=sizes, **circumstances(self.kernel))

    @cached_property
    def values(self) -> Values:
        """The knobs that make a difference."""
        if self.kernel.assembly.merge is not None:  # cursors over sorted rows, with nothing to choose
            return {}
        call = self.kernel.begin(self.args)
        is_counted = not self.kernel.is_roomy(call)
        kinds = tuple(kind for kind in VALUES["kind"] if kind != "segments" or self.has_segments(call))
        kinds = ("table",) if self.kernel.is_wide(self.args) else kinds
        counted = (True,) if is_counted else VALUES["counted"]
        return {**VALUES, "kind": kinds, "counted": counted, "order": self.orders(call), "block": self.blocks()}

    def has_segments(self, call: Call) -> bool:
        """Return whether some row is long enough to be computed in segments of its columns."""
        segments = -(-call.width // (1 << SHIFT))
        longest = 0 if call.bound is None else int(call.bound.max(initial=0))
        can_be_cut = update_of(self.kernel.compiled.functions.rows) is not None
        return can_be_cut and segments > 1 and longest >= segments * LEAST_PARTS

    def orders(self, call: Call) -> tuple[str, ...]:
        """Return the orders of the rows that may make a difference."""
        if not AccumulatorOptions(accumulators=Accumulators(order="nonempty")).orders(self.kernel.assembly):
            return VALUES["order"][:1]
        axis = rows_axis(self.kernel.assembly.source, self.kernel.assembly.rows[-1]) if call.rows > 1 else None
        is_square = axis is not None and call.rows == int(Size(axis.length).at(self.args.sizes))
        useful = {
            "stored": True,
            "nonempty": call.bound is not None and not call.bound.all(),
            "clustered": axis is not None,
            "banded": is_square,
        }
        return tuple(order for order in VALUES["order"] if useful[order])

    def blocks(self) -> tuple[Any, ...]:
        """Return None, and the sizes of the largest blocks that both operands consist of."""
        product = BlockProduct.of(self.kernel.assembly.source)
        return (None,) if product is None else (None, *shared_blocks(product, self.args)[:MOST_BLOCKS])

    def call(self, kernel: SparseOutputKernel) -> Callable[[], ResultPattern]:
        """Return a call of a kernel on the arguments."""
        return lambda: kernel.assemble(self.args)

    def of(self, candidate: Candidate) -> SparseOutputKernel:
        """Return the kernel of a candidate."""
        if candidate not in self.built:
            schedule = accumulators(candidate)
            self.built[candidate] = assembled_kernel(self.func, self.target, AccumulatorOptions(accumulators=schedule))
        return self.built[candidate]

    def untuned(self) -> Measurement:
        """Measure the kernel that is built without a search."""
        return summary(burst(self.call(self.kernel), BURST_SECONDS))

    def measure(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Yield measurements, one after another."""
        usual = typical(self.call(self.kernel), BURST_SECONDS)
        for candidate in candidates:
            try:
                yield candidate, self.measured(candidate).paced(usual)
            except (RuntimeError, MemoryError) as error:
                yield candidate, Measurement(error=reason(error))

    def measured(self, candidate: Candidate) -> Measurement:
        """Measure a candidate between two measurements of the untuned kernel; an error if its result differs."""
        kernel = self.of(candidate)
        if not self.is_right(candidate):
            return Measurement(error="the result differs from the untuned kernel's")
        before = typical(self.call(self.kernel), BURST_SECONDS)
        timing = summary(burst(self.call(kernel), BURST_SECONDS))
        after = typical(self.call(self.kernel), BURST_SECONDS)
        times = (timing.seconds, timing.median, timing.spread)
        return Measurement(*times, usual=(before + after) / 2)

    def is_right(self, candidate: Candidate) -> bool:
        """Return whether a candidate's result is the untuned kernel's."""
        return same(self.call(self.of(candidate))(), self.expected)

    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        """Return seconds of candidates and the untuned kernel, interleaved."""
        return duel(self._cases(candidates))

    def confirm(self, candidate: Candidate) -> Outcome:
        """Return a contest of a candidate and the untuned kernel."""
        return select_final(self._cases([candidate]))

    def _cases(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, Timed]:
        kernels: dict[Candidate | None, SparseOutputKernel] = {None: self.kernel, **{c: self.of(c) for c in candidates}}
        return {c: partial(typical, self.call(kernel)) for c, kernel in kernels.items()}


def accumulators(candidate: Candidate) -> Accumulators:
    """Return the accumulators that a candidate stands for.

    Raises
    ------
    ArgumentError
        It is a candidate of another search, or has unknown values: another version wrote the record.
    """
    choices = candidate.choices
    if not isinstance(choices, Config) or not set(VALUES) >= set(choices.keys()):
        raise ArgumentError(f"expected choices among {', '.join(VALUES)}, got {choices}")
    return Accumulators(**choices.as_dict())


def is_one(candidate: Candidate | None) -> bool:
    """Return whether a candidate of a record stands for accumulators; None is the untuned kernel."""
    try:
        return candidate is None or isinstance(accumulators(candidate), Accumulators)
    except ArgumentError:
        return False


def same(first: ResultPattern, second: ResultPattern) -> bool:
    """Return whether two results are equal, bit by bit."""
    pairs = zip((first.indptr, first.keys, *first.values), (second.indptr, second.keys, *second.values), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def rows(candidates: Sequence[Candidate]) -> np.ndarray:
    """Return the features of candidates for a model of the trials."""
    values_of = [c.choices.as_dict() for c in candidates]
    places = [[_place(name, value) for name, value in sorted(values.items())] for values in values_of]
    return np.array(places, "float64").reshape(len(values_of), -1)


def _place(name: str, value: Any) -> int:
    """Return a value of a knob as a number: for a block the number of elements that it multiplies."""
    return math.prod(value or ()) if name == "block" else VALUES[name].index(value)


def tune_accumulators(
    program: Any,
    inputs: Mapping[str, Any],
    budget: Budget,
    records: Database,
    *,
    strategy: str = "guided",
    seed: int = 0,
    target: Any = None,
    progress: bool | None = None,
) -> TuneResult:
    """Run `sparsetir.tune_sparse` on a program that computes the pattern of its results."""
    with Progress(budget, shown=progress) as bar, closing(records):
        trials = Trials(program, inputs, target)
        key, values = trials.key(), trials.values
        base = Config.of({name: values[name][0] for name in values})
        space = Space([None], lambda _format: values, base)
        search = Search(space, features=rows, strategy="evolution" if strategy == "guided" else strategy, seed=seed)
        history = [r for r in records.load(key)[: budget.trials] if is_untuned(r) or r.candidate in space]
        for record in history:
            search.tell(record.candidate, record.seconds)
        history = [with_best(record, history[: n + 1]) for n, record in enumerate(history)]
        tuner = AccumulatorTuner(trials, space, budget, records, key, history)
        interrupted = tuner.explore(search, bar)
        last = last_of(records, key) if all(r.reused for r in history) or not budget.trials else None
        last = last if last is not None and (last.chosen is None or last.chosen in space) else None
        if not interrupted and (last is not None or not budget.trials):
            return tuner.recall(last)
        bar.say("comparing the fastest")
        return tuner.conclude(interrupted=interrupted)


@dataclass
class AccumulatorTuner:
    """The search for the accumulators of one call, `history` its trials."""

    trials: Trials
    space: Space
    budget: Budget
    records: Database
    key: Key
    history: list[Record]

    def explore(self, search: Search, bar: Progress) -> bool:
        """Run trials until the budget is spent; return whether Ctrl-C ended them."""
        reused = len(self.history)

        def on_record(record: Record) -> None:
            self.records.append(self.key, record)
            bar.update(len(self.history), record, reused=reused)

        log = Log(self.budget, search.seed, self.history, on_record)
        if not any(is_untuned(record) for record in self.history):
            log.add(Candidate(), {}, self.trials.untuned())
        try:
            if self.trials.values:
                TrialLoop(search, self.trials.measure, log).explore(search.chance)
        except KeyboardInterrupt:
            return True
        return False

    def conclude(self, *, interrupted: bool) -> TuneResult:
        """Compare the fastest once more, confirm the winner, and record the comparison."""
        measured = [r for r in self.history if r.seconds is not None and not is_untuned(r)]
        measured.sort(key=lambda r: r.seconds or 0.0)
        try:
            times, best = self.compare(measured[: 1 if interrupted else FINALISTS])
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            times, best = self.compare(measured[:1])
        compared_records = [Record(r.choices, seconds=times[r.candidate]) for r in measured if r.candidate in times]
        compared_records.sort(key=lambda r: r.seconds or 0.0)
        comparison = Comparison(times[None], tuple(compared_records), best)
        if not interrupted:
            note(self.records, self.key, comparison)
        return self.report(comparison.best, times[None], comparison=comparison, interrupted=interrupted)

    def compare(self, records: list[Record]) -> tuple[dict[Candidate | None, float], Candidate | None]:
        """Return the times of some candidates, and the one that proved to be faster than the untuned kernel."""
        times = self.trials.compare([r.candidate for r in records])
        best = winner(times)
        if best is None:
            return times, None
        confirmed = self.trials.confirm(best)
        return rescaled(times, confirmed.times, best), confirmed.chosen

    def recall(self, last: Comparison | None) -> TuneResult:
        """Return the result of the last search for the same arguments; if it did not end, its best trial."""
        recorded = [r for r in self.records.load(self.key) if r.seconds is not None]
        before = next((r for r in recorded if is_untuned(r)), self.history[0]).seconds or 0.0
        tuned = [r for r in recorded if not is_untuned(r) and r.candidate in self.space]
        usable = [r for r in tuned if (r.seconds or 0.0) <= WORTH * before]
        best = min(usable, key=lambda r: r.seconds or 0.0, default=None) if last is None else last.best
        if best is not None and not self.trials.is_right(best.candidate):
            best = None
        return self.report(best, before if last is None else last.untuned, comparison=last, is_recalled=True)

    def report(self, best: Record | None, seconds: float, **facts: Any) -> TuneResult:
        """Return the result; `seconds` are those of the untuned kernel."""
        baseline = Record(Candidate().choices, seconds=seconds)
        return TuneResult(
            kernel=self.trials.kernel if best is None else self.trials.of(best.candidate),
            best=best or baseline,
            untuned=baseline,
            history=self.history,
            space=self.space.values(None) or {},
            seconds=self.budget.elapsed,
            key=self.key,
            checked_against="the untuned kernel",
            database=self.records.path,
            template=AccumulatorKnobs(),
            **facts,
        )


def recorded_accumulators(program: Any, target: Any, path: str | Path) -> SparseOutputKernel:
    """Return the kernel that the last search for a program on this machine ended with, whatever its arguments were.

    Without one that ended, the best trial of the last that did not, if it is clearly better; else the untuned kernel.
    """
    records, func = existing_database(path), single(program)
    kernel = assembled_kernel(func, target)
    about = circumstances(kernel)
    comparisons = [comparison for key, comparison in compared(records, about["program"]) if agrees(key, about)]
    choices = [comparison.chosen for comparison in comparisons if is_one(comparison.chosen)]
    choices = choices or [r.candidate for _, r in unfinished(records, about) if is_one(r.candidate)]
    if not choices and not any(agrees(key, about) for key, *_ in records.of_program(about["program"])):
        warn_of_no_records(records.path)
    if not choices or choices[-1] is None:
        return kernel
    return assembled_kernel(func, target, AccumulatorOptions(accumulators=accumulators(choices[-1])))


__all__ = [
    "computes_patterns",
    "recorded_accumulators",
    "refuse_assembled",
    "refuse_others",
    "tune_accumulators",
]
