# SPDX-License-Identifier: Apache-2.0
"""Search over how the rows of a computed pattern are collected, in which order, and in which blocks.

The space is small and the results are the same bit by bit, so candidates are built and timed in this process,
interleaved with the untuned kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tvm import tirx

from sparsetir.assemble import Accumulators, Options, is_assembled
from sparsetir.assemble.blocks import Product
from sparsetir.assemble.options import KINDS, ORDERS
from sparsetir.assemble.segments import LEAST_PARTS, SHIFT, update_of
from sparsetir.call.assembled import AssembledKernel
from sparsetir.call.blocked import shared_blocks
from sparsetir.call.make import assembled_kernel, single
from sparsetir.call.pattern_results import Pattern
from sparsetir.call.row_orders import rows_axis
from sparsetir.call.workspace import Call
from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.ir import decode
from sparsetir.sizes import Size
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.comparison import Comparison, compared, note, rescaled, winner
from sparsetir.tuning.contest import Outcome, contest
from sparsetir.tuning.database import Database, Key, Record, fingerprint
from sparsetir.tuning.knobs import AccumulatorKnobs, Config
from sparsetir.tuning.measure import BURST_SECONDS, Measurement, Timed, burst, duel, reason, summary, typical
from sparsetir.tuning.progress import Progress
from sparsetir.tuning.recorded import circumstances
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.search import Search
from sparsetir.tuning.space import Space, Values
from sparsetir.tuning.trials import Budget, Log, explore, is_untuned, with_best

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
    """Whether a program is searched here."""
    return is_assembled(decode(single(program)))


def refuse_assembled(func: tirx.PrimFunc) -> None:
    """Raise where a program computes patterns, of which no listed configurations are compared."""
    if is_assembled(decode(func)):
        found = f"{func.attrs['global_symbol']} computes the pattern of its results"
        raise LoweringError(f"{found}: autotune compares loops and formats; tune_sparse searches its accumulators")


def refuse_others(**given: Any) -> None:
    """Raise where a search was given what only other programs leave open."""
    wrong = next((name for name, value in given.items() if value is not None), None)
    if wrong is not None:
        raise ArgumentError(f"{wrong} is not searched for computed patterns, only how their rows are collected")


class Trials:
    """Times candidates on one call.

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
        self.built: dict[Candidate, AssembledKernel] = {}

    def key(self) -> Key:
        """What the times hold for."""
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
        """Whether some row is long enough to be computed in segments of its columns."""
        segments = -(-call.width // (1 << SHIFT))
        longest = 0 if call.bound is None else int(call.bound.max(initial=0))
        can_be_cut = update_of(self.kernel.compiled.functions.rows) is not None
        return can_be_cut and segments > 1 and longest >= segments * LEAST_PARTS

    def orders(self, call: Call) -> tuple[str, ...]:
        """The orders of the rows that may make a difference."""
        if not Options(accumulators=Accumulators(order="nonempty")).orders(self.kernel.assembly):
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
        """None, and the sizes of the largest blocks that both operands consist of."""
        product = Product.of(self.kernel.assembly.source)
        return (None,) if product is None else (None, *shared_blocks(product, self.args)[:MOST_BLOCKS])

    def call(self, kernel: AssembledKernel) -> Callable[[], Pattern]:
        """A call of a kernel on the arguments."""
        return lambda: kernel.assemble(self.args)

    def of(self, candidate: Candidate) -> AssembledKernel:
        """The kernel of a candidate."""
        if candidate not in self.built:
            schedule = Accumulators(**candidate.choices.as_dict())
            self.built[candidate] = assembled_kernel(self.func, self.target, Options(accumulators=schedule))
        return self.built[candidate]

    def untuned(self) -> Measurement:
        """Of the kernel that is built without a search."""
        return summary(burst(self.call(self.kernel), BURST_SECONDS))

    def measure(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Measurements, one after another."""
        usual = typical(self.call(self.kernel), BURST_SECONDS)
        for candidate in candidates:
            try:
                yield candidate, self.measured(candidate).paced(usual)
            except (RuntimeError, MemoryError) as error:
                yield candidate, Measurement(error=reason(error))

    def measured(self, candidate: Candidate) -> Measurement:
        """A candidate between two looks at the untuned kernel; an error if its result differs."""
        kernel = self.of(candidate)
        if not same(self.call(kernel)(), self.expected):
            return Measurement(error="the result differs from the untuned kernel's")
        before = typical(self.call(self.kernel), BURST_SECONDS)
        found = summary(burst(self.call(kernel), BURST_SECONDS))
        after = typical(self.call(self.kernel), BURST_SECONDS)
        times = (found.seconds, found.median, found.spread)
        return Measurement(*times, usual=(before + after) / 2)

    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        """Seconds of candidates and the untuned kernel, interleaved."""
        return duel(self._cases(candidates))

    def confirm(self, candidate: Candidate) -> Outcome:
        """A contest of a candidate and the untuned kernel."""
        return contest(self._cases([candidate]))

    def _cases(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, Timed]:
        kernels: dict[Candidate | None, AssembledKernel] = {None: self.kernel, **{c: self.of(c) for c in candidates}}
        return {c: partial(typical, self.call(kernel)) for c, kernel in kernels.items()}


def same(one: Pattern, other: Pattern) -> bool:
    """Whether two results are equal, bit by bit."""
    pairs = zip((one.indptr, one.keys, *one.values), (other.indptr, other.keys, *other.values), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def rows(candidates: Sequence[Candidate]) -> np.ndarray:
    """What a model of the trials sees of candidates."""
    given = [c.choices.as_dict() for c in candidates]
    places = [[_place(name, value) for name, value in sorted(values.items())] for values in given]
    return np.array(places, "float64").reshape(len(given), -1)


def _place(name: str, value: Any) -> int:
    """A value of a knob as a number; of blocks how many products of elements they have."""
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
    """`sparsetir.tune_sparse` of a program that computes the pattern of its results."""
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
        bar.say("comparing the fastest")
        return _result(trials, history, space, budget, records, key, interrupted=interrupted)


def _explored(
    trials: Trials, search: Search, history: list[Record], budget: Budget, records: Database, key: Key, bar: Progress
) -> tuple[list[Record], bool]:
    """Trials until the budget is spent, and whether Ctrl-C ended them."""
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
            explore(search, trials.measure, log, fixed={})
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
    mine = sorted((r for r in history if r.seconds is not None and not is_untuned(r)), key=lambda r: r.seconds or 0.0)
    times = trials.compare([r.candidate for r in mine[: 1 if interrupted else FINALISTS]])
    best = winner(times)
    if best is not None:
        confirmed = trials.confirm(best)
        times = rescaled(times, confirmed.times, best)
        best = confirmed.chosen
    held = [Record(r.choices, seconds=times[r.candidate]) for r in mine if r.candidate in times]
    held.sort(key=lambda r: r.seconds or 0.0)
    found = Comparison(times[None], tuple(held), best)
    if not interrupted:
        note(records, key, found)
    untuned = Record(Candidate().choices, seconds=times[None])
    return TuneResult(
        kernel=trials.kernel if best is None else trials.of(best),
        best=found.best or untuned,
        untuned=untuned,
        history=history,
        space=space.values(None) or {},
        seconds=budget.elapsed,
        key=key,
        checked_against="the untuned kernel",
        database=records.path,
        interrupted=interrupted,
        template=AccumulatorKnobs(),
        comparison=found,
    )


def recorded_accumulators(program: Any, target: Any, path: str | Path) -> AssembledKernel:
    """The kernel that the last search for a program on this machine ended with; the untuned one without any."""
    path = Path(path)
    if not path.is_file():
        raise ArgumentError(f"there is no database {path}: tune_sparse(..., database={str(path)!r}) makes one")
    func = single(program)
    untuned = assembled_kernel(func, target)
    about = circumstances(untuned)
    ended = [
        found
        for key, found in compared(Database(path), about["program"])
        if all(getattr(key, name) == value for name, value in about.items())
    ]
    best = ended[-1].best if ended else None
    if best is None:
        return untuned
    return assembled_kernel(func, target, Options(accumulators=Accumulators(**best.choices.as_dict())))


__all__ = ["computes_patterns", "recorded_accumulators", "refuse_assembled", "refuse_others", "tune_accumulators"]
