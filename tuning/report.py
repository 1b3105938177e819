# SPDX-License-Identifier: Apache-2.0
"""Result of a search, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparsetir.errors import ArgumentError
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import Choices
from sparsetir.sparse_output import Accumulators
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.tuning.knobs import AccumulatorKnobs, Config, Template
from sparsetir.tuning.loop import Comparison, is_untuned
from sparsetir.tuning.lowered_program import with_knobs
from sparsetir.tuning.predict import Prediction
from sparsetir.tuning.records import Key, Record
from sparsetir.tuning.space import Values, start
from sparsetir.tuning.tuned_kernel import TunedKernel
from sparsetir.utils.arguments import shown
from sparsetir.utils.caches import cached_property
from sparsetir.workloads.plot import aligned

SHOWN = 8
OWN = "as it is"
OTHER = "other formats"
MOST_COLOURS = 8


@dataclass(frozen=True)
class TuneResult:
    """The best kernel and how it was found.

    Parameters
    ----------
    kernel : Kernel, ComposedKernel, TunedKernel or SparseOutputKernel
        Built with the best choices, for the sizes in ``best.fixed``; for others it takes the best kernel that fits.
        ``sparsetir.build(program, schedule=result.schedule)`` makes one for all sizes with the same choices.
    best, untuned : Record
        With the times of a last, interleaved comparison of the two, which did not choose the winner.
    history : list of Record
        Every trial in order.
    space : mapping of str to tuple
        The values of each choice that made a difference.
    seconds : float
        The whole search took.
    key : Key
        What the times hold for.
    checked_against : str
        What the reference was compared with, ``"scipy"`` or nothing but ``"the untuned kernel"``.
    flops : int or None
        Floating-point operations of one call, where known.
    database : Path or None
        Where the records are.
    interrupted : bool
        Whether Ctrl-C ended the search.
    refused : dict of str to str
        Formats that were unavailable, and why.
    importance : dict of str to float
        The features that the cost model used, by their share, the most important first.
    peers : dict of str to float
        Seconds of the libraries that were timed side by side with the kernel.
    template : Template, AccumulatorKnobs or None
        Whose knobs were searched.
    comparison : Comparison or None
        The last one, of the fastest candidates and the untuned kernel; None where nothing was ever compared.
    is_recalled : bool
        Whether nothing was searched: the kernel is that of the records or of the pretrained model.
    judgement : Prediction or None
        What the pretrained model thinks of the kernel next to the untuned one; None where it does not know the program.
    """

    kernel: Kernel | ComposedKernel | TunedKernel | SparseOutputKernel
    best: Record
    untuned: Record
    history: list[Record] = field(repr=False)
    space: Values = field(repr=False)
    seconds: float
    key: Key = field(repr=False)
    checked_against: str
    flops: int | None = None
    database: Path | None = None
    interrupted: bool = False
    refused: dict[str, str] = field(default_factory=dict, repr=False)
    importance: dict[str, float] = field(default_factory=dict, repr=False)
    peers: dict[str, float] = field(default_factory=dict, repr=False)
    template: Template | AccumulatorKnobs | None = field(default=None, repr=False)
    comparison: Comparison | None = field(default=None, repr=False)
    is_recalled: bool = False
    judgement: Prediction | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        trials = f"{len(self.history)} trials, {self.speedup:.2f} times as fast as untuned"
        return f"TuneResult {self.kernel!r}: {trials}; see report() and explain()"

    @property
    def schedule(self) -> Choices | Template | Accumulators | None:
        """For `sparsetir.build`: the best choices, or the template with the best values; None if nothing is faster."""
        if self.best == self.untuned:
            return None
        choices: Choices | Template | Accumulators = with_knobs(self.template, self.best.choices)
        return choices

    @property
    def speedup(self) -> float:
        """How many times faster than the untuned kernel; of a kernel that was not timed, as the model expects."""
        return (self.untuned.seconds or 0.0) / (_cost(self.best) or 1.0)

    @property
    def is_guess(self) -> bool:
        """Whether the kernel was chosen by the pretrained model and never timed."""
        return self.best.seconds is None and self.best.predicted is not None

    @property
    def measured(self) -> int:
        """Trials that were measured now rather than read from the database."""
        return sum(not record.reused for record in self.history)

    @property
    def break_even(self) -> float | None:
        """Calls from which on converting has paid, compared with the untuned kernel; None if it never does."""
        return self._paid(self.untuned.seconds or 0.0)

    def break_even_with(self, peer: str) -> float | None:
        """Return the break-even calls against a library that was timed too, whose own preparation is not counted."""
        if not isinstance(peer, str) or peer not in self.peers:
            raise ArgumentError(f"expected one of {', '.join(self.peers) or 'no library'}, got {shown(peer)}")
        return self._paid(self.peers[peer])

    def _paid(self, seconds: float) -> float | None:
        """Return calls after which the conversion has paid against something that takes `other` seconds."""
        saved = seconds - (_cost(self.best) or 0.0)
        if saved <= 0:
            return None if self.best.conversion or saved < 0 else 0.0
        return self.best.conversion / saved

    @cached_property
    def timed(self) -> list[Record]:
        """The trials that ran: those of the last comparison first, each part from the fastest on.

        Trials that were not compared again have their time relative to that of the untuned kernel at that moment.
        """
        timed = [r for r in self.history if r.seconds is not None and not is_untuned(r)]
        compared = [(r, self._compared(r)) for r in timed]
        again = [replace(r, seconds=seconds) for r, seconds in compared if seconds is not None]
        unfair = [replace(r, seconds=(r.seconds or 0.0) * self._pace) for r, seconds in compared if seconds is None]
        recalled = [self.best] if self.best.seconds is not None and self.best != self.untuned and not timed else []
        rows = [*_by_time([*again, self.untuned, *recalled]), *_by_time(unfair)]
        return [row for row in rows if row.seconds is not None]

    def _compared(self, record: Record) -> float | None:
        """Return the candidate's time in the last comparison; None if it was not compared again."""
        return self.comparison.seconds(record) if self.comparison is not None else None

    @property
    def _pace(self) -> float:
        """How many times longer the untuned kernel took in the last comparison than as a trial."""
        before = next((r.seconds for r in self.history if is_untuned(r) and r.seconds is not None), None)
        return (self.untuned.seconds or 0.0) / before if before and self.untuned.seconds else 1.0

    def gains(self) -> dict[str, float]:
        """Return the gain of each choice: the best time with its default value over the best time."""
        if self.template is not None:
            return gains([r for r in self.timed if isinstance(r.choices, Config)], start(self.space, Config()))
        return gains([record for record in self.timed if record.fixed] or self.timed, start(self.space))

    def formats(self) -> dict[str, Record]:
        """Return the best candidate of each format, the fastest first; the program's own is called ``"as it is"``."""
        by_format: dict[str, Record] = {}
        for record in _by_time(self.timed):
            by_format.setdefault(record.stored_as or OWN, record)
        return by_format

    def explain(self) -> str:
        """Explain this kernel: the formats that were tried or refused, what the choices are worth, and the loops."""
        reasons = [*self._reasons(), *self._peers()]
        return "\n".join([*self._heading(), "", *self._formats(), "", *reasons, "", *self._loops()])

    def report(self) -> str:
        """Return the fastest candidates, the untuned one, and what each choice is worth, as text."""
        return "\n".join([*self._heading(), "", *self._table(), "", *self._gains(), *self._peers()])

    def plot(self, path: str | Path) -> Path:
        """Draw every trial and the best so far over the time of the search; needs matplotlib."""
        from sparsetir.workloads.plot import curve

        sizes = ", ".join(f"{name} = {value}" for name, value in self.key.sizes.items())
        names = {name for name, _ in list(self.formats().items())[:MOST_COLOURS]}
        labels = [r.stored_as or OWN if (r.stored_as or OWN) in names else OTHER for r in self.history]
        untuned = next((r.seconds for r in self.history if is_untuned(r)), None)
        return curve(self.history, path, title=f"{self.key.name}: {sizes}", labels=labels, untuned=untuned)

    def _heading(self) -> list[str]:
        sizes = ", ".join(f"{name} = {value}" for name, value in self.key.sizes.items())
        failed = sum(record.error is not None for record in self.history)
        counts = f"{len(self.history)} trials, {len(self.history) - self.measured} from the database, {failed} failed"
        if self.is_recalled and len(self.history) <= 1:
            counts = "no trials"
        pace = f"{self.seconds:.1f} s, {self.measured / max(self.seconds, 1e-9):.1f} trials/s"
        state = " (interrupted)" if self.interrupted else ""
        template = f", {self.template!r}" if self.template is not None else ""
        lines = [
            f"{self.key.name}: {sizes}, {self.key.dtype}, {self.key.threads} threads{template}",
            f"{counts}; {pace}{state}; results checked against {self.checked_against}",
        ]
        if self.is_guess:
            said = f"the pretrained model expects it to be {self.speedup:.2f} times as fast as the untuned kernel"
            sure = f", at least {self.judgement.bound:.2f} times for nine in ten" if self.judgement is not None else ""
            lines.append(f"chosen without timing it: {said}{sure}")
        elif self.is_recalled and self.comparison is not None:
            lines.append(f"as the last search in {self.database} ended; nothing was timed again")
        elif self.is_recalled and self.best != self.untuned:
            lines.append(f"the best trial of a search in {self.database} that did not end; nothing was timed again")
        elif self.is_recalled:
            lines.append("neither the records nor the pretrained model have anything better than the untuned kernel")
        return lines

    def _formats(self) -> list[str]:
        rows = [["format", "ms", "predicted", "conversion ms", "trials", ""]]
        counts = Counter(record.stored_as or OWN for record in self.history)
        for name, record in self.formats().items():
            guess = "" if record.predicted is None else f"{record.predicted * self._pace * 1e3:.4g}"
            cells = [_ms(record.seconds), guess, _ms(record.conversion), str(counts[name])]
            rows.append([name, *cells, self._remark(record)])
        failed = {r.stored_as or OWN: r.error for r in self.history if r.error is not None}
        notes = [f"{name}: {why}" for name, why in {**failed, **self.refused}.items() if name not in self.formats()]
        return [*aligned(rows), *notes]

    def _reasons(self) -> list[str]:
        fast = f"{self.speedup:.2f} times as fast as the untuned kernel"
        reason = f"{self.best.candidate}, {'expected to be ' if self.is_guess else ''}{fast}"
        if self.best == self.untuned:
            reason = "the untuned kernel: nothing is clearly faster"
        lines = [f"chosen: {reason}", self._gains()[0]]
        if self.best.conversion:
            calls = "never" if self.break_even is None else f"after {self.break_even:,.0f} calls"
            lines.append(f"the conversion of {_ms(self.best.conversion)} ms has paid {calls}")
        if self.judgement is not None and self.best != self.untuned:
            lines.append(f"the pretrained model expects it to be {self.judgement}")
            lines.append(f"what decided in it, each times faster or slower: {self.judgement.why()}")
        used = ", ".join(f"{name} {share:.0%}" for name, share in list(self.importance.items())[:SHOWN])
        return [*lines, f"the cost model looks at: {used}"] if used else lines

    def _peers(self) -> list[str]:
        tuned = self.best.seconds or float("nan")
        lines = []
        for name, seconds in self.peers.items():
            calls = self.break_even_with(name)
            paid = "never" if calls is None else f"after {calls:,.0f} calls" if self.best.conversion else "at once"
            lines.append(
                f"{name}: {_ms(seconds)} ms, {seconds / tuned:.2f} times as long; the tuned kernel has paid {paid}"
            )
        return lines

    def _loops(self) -> list[str]:
        heads = ("for ", "while ", "if ")
        lines = self.kernel.script(stage=3).splitlines()
        return ["loops:", *(line[4:] for line in lines if line.lstrip().startswith(heads))]

    def _table(self) -> list[str]:
        candidates = {candidate(self.best), candidate(self.untuned)}
        rows = [("best", self.best)]
        rows += [("", record) for record in self.timed if candidate(record) not in candidates][: SHOWN - 2]
        rows += [("untuned", self.untuned)] if len(candidates) == 2 else []
        head = ["", "format", *self._choices(), "sizes", "ms", *(["GFLOP/s"] if self.flops else []), "speedup", ""]
        return aligned([head, *(self._row(label, record) for label, record in rows)])

    def _remark(self, record: Record) -> str:
        """Return a remark on a time."""
        if record.seconds is None or candidate(record) in (candidate(self.best), candidate(self.untuned)):
            return ""
        return "" if self._compared(record) is not None else "not compared again"

    def _choices(self) -> list[str]:
        """Return the columns of the table for choices."""
        if self.template is None:
            return list(Choices().as_dict())
        all_records = [*self.history, self.best]  # which may have been found in the database only
        knobs = [r.choices.as_dict() for r in all_records if isinstance(r.choices, Config)]
        return list(dict.fromkeys(name for values in knobs for name in values))

    def _row(self, label: str, record: Record) -> list[str]:
        seconds = _cost(record) or float("nan")
        rate = [f"{self.flops / seconds / 1e9:.1f}"] if self.flops else []
        speedup = (self.untuned.seconds or float("nan")) / seconds
        has_knobs = isinstance(record.choices, Config)
        values = record.choices.as_dict() if has_knobs or self.template is None else {}
        columns = [str(values.get(name, "")) for name in self._choices()]
        sizes = ", ".join(f"{name}={value}" for name, value in record.fixed.items()) or "all"
        times = [f"{seconds * 1e3:.4g}", *rate, f"{speedup:.2f}", self._remark(record)]
        return [label, record.stored_as or OWN, *columns, sizes, *times]

    def _gains(self) -> list[str]:
        gains = sorted(self.gains().items(), key=lambda item: -item[1])
        text = ", ".join(f"{name} {gain:.2f}x" for name, gain in gains)
        sizes = ", ".join(f"{name} = {value}" for name, value in self.best.fixed.items())
        worth = f"worth of each choice (best time with it left alone / best time): {text or 'there was none'}"
        if self.best == self.untuned:
            worth = "no choice is worth anything: nothing is clearly faster than the untuned kernel"
        return [worth, f"compiled for {sizes or 'all sizes'}"]


def candidate(record: Record) -> tuple[Choices | Config, str | None, bool]:
    """Return the identity of a candidate within one search."""
    return record.choices, record.stored_as, bool(record.fixed)


def gains(history: list[Record], base: Choices | Config) -> dict[str, float]:
    """Compute `TuneResult.gains`; `base` has the default values."""
    times = [
        ({"format": r.stored_as or OWN, **r.choices.as_dict()}, r.seconds) for r in history if r.seconds is not None
    ]
    if not times:
        return {}
    fastest, out = min(seconds for _, seconds in times), {}
    for name, value in {"format": OWN, **base.as_dict()}.items():
        with_value = [seconds for values_of, seconds in times if values_of.get(name, value) == value]
        if with_value and len({values_of.get(name, value) for values_of, _ in times}) > 1:
            out[name] = min(with_value) / fastest
    return out


def _by_time(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda r: float("inf") if r.seconds is None else r.seconds)


def _cost(record: Record) -> float | None:
    """Return seconds of a record, those expected where it was not timed."""
    return record.predicted if record.seconds is None and record.error is None else record.seconds


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.4g}"
