# SPDX-License-Identifier: Apache-2.0
"""Search over accumulators of computed patterns: how rows are collected, in which order, in which blocks.

The space is small and the results are the same bit by bit, so candidates are built and timed in this process,
interleaved with the untuned kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
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
from sparsetir.tuning.tuned_kernel import agrees, circumstances, unfinished, warn_of_no_records
from sparsetir.utils.arguments import as_path
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
    """Raise where a program computes patterns, which a search that compares loops and formats does not know."""
    if is_assembled(decode(func)):
        program = f"{func.attrs['global_symbol']} computes the pattern of its results"
        raise LoweringError(f"{program}: {search} compares loops and formats; tune_sparse searches its accumulators")


def refuse_others(searched: Mapping[str, Any], apart: Mapping[str, Any], compare_with: Sequence[str]) -> None:
    """Raise where a search was given what only those of other programs take.

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
    """Timer of candidates on one call.

    Parameters
    ----------
    program : PrimFunc or IRModule with one PrimFunc
    inputs : mapping of str to array
    target : Target, str or dict, optional
    """

    def __init__(self, program: Any, inputs: Mapping[str, Any], target: Any = None) -> None:
        self.func, self.target = single(program), target
        self.kernel = assembled_kernel(self.func, target)
        self.args = self.kernel.prepare((), dict(inputs))
        self.expected = self.kernel.assemble(self.args)
        self.built: dict[Candidate, SparseOutputKernel] = {}

    def key(self) -> Key:
        """Return what the times hold for."""
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
        """Return a candidate between two looks at the untuned kernel; an error if its result differs."""
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
    """Return what a candidate stands for.

    Raises
    ------
    ArgumentError
        It is one of something else, or has values that there are not: another version, or no version, wrote the record.
    """
    choices = candidate.choices
    if not isinstance(choices, Config) or not set(VALUES) >= set(choices.keys()):
        raise ArgumentError(f"expected choices among {', '.join(VALUES)}; found {choices}")
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
    """Return what a model of the trials sees of candidates."""
    values_of = [c.choices.as_dict() for c in candidates]
    places = [[_place(name, value) for name, value in sorted(values.items())] for values in values_of]
    return np.array(places, "float64").reshape(len(values_of), -1)


def _place(name: str, value: Any) -> int:
    """Return a value of a knob as a number; of blocks how many products of elements they have."""
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
        history, interrupted = _explored(trials, search, history, budget, records, key, bar)
        last = last_of(records, key) if all(r.reused for r in history) or not budget.trials else None
        last = last if last is not None and (last.chosen is None or last.chosen in space) else None
        if not interrupted and (last is not None or not budget.trials):
            return _recalled(trials, history, space, budget, records, key, last)
        bar.say("comparing the fastest")
        return _result(trials, history, space, budget, records, key, interrupted=interrupted)


def _explored(
    trials: Trials, search: Search, history: list[Record], budget: Budget, records: Database, key: Key, bar: Progress
) -> tuple[list[Record], bool]:
    """Run trials until the budget is spent, and whether Ctrl-C ended them."""
    history = [with_best(record, history[: n + 1]) for n, record in enumerate(history)]
    reused = len(history)

    def on_record(record: Record) -> None:
        records.append(key, record)
        bar.update(len(history), record, reused=reused)

    log = Log(budget, search.seed, history, on_record)
    if not any(is_untuned(record) for record in history):
        log.add(Candidate(), {}, trials.untuned())
    try:
        if trials.values:
            TrialLoop(search, trials.measure, log).explore(search.chance)
    except KeyboardInterrupt:
        return history, True
    return history, False


def _result(
    trials: Trials,
    history: list[Record],
    space: Space,
    budget: Budget,
    records: Database,
    key: Key,
    *,
    interrupted: bool,
) -> TuneResult:
    """Compare the fastest once more, let the winner prove itself, and note what came out."""
    tuned = sorted((r for r in history if r.seconds is not None and not is_untuned(r)), key=lambda r: r.seconds or 0.0)
    try:
        times, best = _compared(trials, tuned[: 1 if interrupted else FINALISTS])
    except KeyboardInterrupt:
        if interrupted:
            raise
        interrupted = True
        times, best = _compared(trials, tuned[:1])
    compared_records = [Record(r.choices, seconds=times[r.candidate]) for r in tuned if r.candidate in times]
    compared_records.sort(key=lambda r: r.seconds or 0.0)
    comparison = Comparison(times[None], tuple(compared_records), best)
    if not interrupted:
        note(records, key, comparison)
    facts: dict[str, Any] = {"comparison": comparison, "interrupted": interrupted}
    return _told(trials, history, space, budget, records, key, comparison.best, times[None], **facts)


def _compared(trials: Trials, records: list[Record]) -> tuple[dict[Candidate | None, float], Candidate | None]:
    """Return the times of some candidates, and the one that proved to be faster than the untuned kernel."""
    times = trials.compare([r.candidate for r in records])
    best = winner(times)
    if best is None:
        return times, None
    confirmed = trials.confirm(best)
    return rescaled(times, confirmed.times, best), confirmed.chosen


def _recalled(
    trials: Trials,
    history: list[Record],
    space: Space,
    budget: Budget,
    records: Database,
    key: Key,
    last: Comparison | None,
) -> TuneResult:
    """Return what the last search for the same arguments returned; of one that did not end, its best trial."""
    recorded = [r for r in records.load(key) if r.seconds is not None]
    before = next((r for r in recorded if is_untuned(r)), history[0]).seconds or 0.0
    usable = (
        r for r in recorded if not is_untuned(r) and r.candidate in space and (r.seconds or 0.0) <= WORTH * before
    )
    best = min(usable, key=lambda r: r.seconds or 0.0, default=None) if last is None else last.best
    if best is not None and not trials.is_right(best.candidate):
        best = None
    untuned_seconds = before if last is None else last.untuned
    facts: dict[str, Any] = {"comparison": last, "is_recalled": True}
    return _told(trials, history, space, budget, records, key, best, untuned_seconds, **facts)


def _told(
    trials: Trials,
    history: list[Record],
    space: Space,
    budget: Budget,
    records: Database,
    key: Key,
    best: Record | None,
    seconds: float,
    **facts: Any,
) -> TuneResult:
    """Return the result with all that is reported about it; `seconds` are those of the untuned kernel."""
    baseline = Record(Candidate().choices, seconds=seconds)
    return TuneResult(
        kernel=trials.kernel if best is None else trials.of(best.candidate),
        best=best or baseline,
        untuned=baseline,
        history=history,
        space=space.values(None) or {},
        seconds=budget.elapsed,
        key=key,
        checked_against="the untuned kernel",
        database=records.path,
        template=AccumulatorKnobs(),
        **facts,
    )


def recorded_accumulators(program: Any, target: Any, path: str | Path) -> SparseOutputKernel:
    """Return the kernel that the last search for a program on this machine ended with, whatever its arguments were.

    Without one that ended, the best trial of the last that did not, if it is clearly better; else the untuned kernel.
    """
    path = as_path(path, "database", "the path of a file of records")
    if not path.is_file():
        raise ArgumentError(f"there is no database {path}: tune_sparse(..., database={str(path)!r}) makes one")
    func = single(program)
    kernel, records = assembled_kernel(func, target), Database(path)
    about = circumstances(kernel)
    comparisons = [comparison for key, comparison in compared(records, about["program"]) if agrees(key, about)]
    choices = [comparison.chosen for comparison in comparisons if is_one(comparison.chosen)]
    unfinished_choices = (
        [r.candidate for _, r in unfinished(records, about) if is_one(r.candidate)] if not choices else []
    )
    if (
        not choices
        and not unfinished_choices
        and not any(agrees(key, about) for key, *_ in records.of_program(about["program"]))
    ):
        warn_of_no_records(path, stacklevel=4)
    best = [*unfinished_choices, *choices][-1:]
    if not best or best[0] is None:
        return kernel
    return assembled_kernel(func, target, AccumulatorOptions(accumulators=accumulators(best[0])))


__all__ = [
    "computes_patterns",
    "recorded_accumulators",
    "refuse_assembled",
    "refuse_others",
    "tune_accumulators",
]
