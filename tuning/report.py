# SPDX-License-Identifier: Apache-2.0
"""What a search found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sparsetir.kernel import Kernel
from sparsetir.schedules import Choices
from sparsetir.tuning.database import Key, Record
from sparsetir.tuning.space import Values, start

SHOWN = 8


@dataclass(frozen=True)
class TuneResult:
    """The best kernel and how it was found.

    Parameters
    ----------
    kernel : Kernel
        Built with the best choices, for the sizes in ``best.fixed``; ``sparsetir.build(program,
        schedule=result.best.choices)`` makes one for all sizes.
    best, untuned : Record
        With the times of a last, interleaved comparison of the two, which did not choose the winner.
    history : list of Record
        Every trial in order.
    space : mapping of str to tuple of int
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
    """

    kernel: Kernel
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

    @property
    def speedup(self) -> float:
        """How many times faster than the untuned kernel."""
        return (self.untuned.seconds or 0.0) / (self.best.seconds or 1.0)

    @property
    def measured(self) -> int:
        """Trials that were measured now rather than read from the database."""
        return sum(not record.reused for record in self.history)

    def gains(self) -> dict[str, float]:
        """What each choice is worth: of all trials, the best time with it left alone over the best time."""
        return gains([record for record in self.history if record.fixed] or self.history, start(self.space))

    def report(self) -> str:
        """The fastest candidates, the untuned one, and what each choice is worth, as text."""
        return "\n".join([*self._heading(), "", *self._table(), "", *self._gains()])

    def plot(self, path: str | Path) -> Path:
        """Draw every trial and the best so far over the time of the search; needs matplotlib."""
        from sparsetir.bench.plot import curve

        return curve(self.history, path)

    def _heading(self) -> list[str]:
        sizes = ", ".join(f"{name} = {value}" for name, value in self.key.sizes.items())
        failed = sum(record.error is not None for record in self.history)
        counts = f"{len(self.history)} trials, {len(self.history) - self.measured} from the database, {failed} failed"
        pace = f"{self.seconds:.1f} s, {self.measured / max(self.seconds, 1e-9):.1f} trials/s"
        state = " (interrupted)" if self.interrupted else ""
        return [
            f"{self.key.name}: {sizes}, {self.key.dtype}, {self.key.threads} threads",
            f"{counts}; {pace}{state}; results checked against {self.checked_against}",
        ]

    def _table(self) -> list[str]:
        ran = sorted((r for r in self.history if r.seconds is not None), key=lambda r: r.seconds or 0.0)
        shown = {candidate(self.best), candidate(self.untuned)}
        rows = [("best", self.best)]
        rows += [("", record) for record in ran if candidate(record) not in shown][: SHOWN - 2]
        rows += [("untuned", self.untuned)] if len(shown) == 2 else []
        names = list(Choices().as_dict())
        head = ["", *names, "ms", *(["GFLOP/s"] if self.flops else []), "speedup"]
        return aligned([head, *(self._row(label, record) for label, record in rows)])

    def _row(self, label: str, record: Record) -> list[str]:
        seconds = record.seconds or float("nan")
        rate = [f"{self.flops / seconds / 1e9:.1f}"] if self.flops else []
        speedup = (self.untuned.seconds or float("nan")) / seconds
        return [label, *map(str, record.choices.as_dict().values()), f"{seconds * 1e3:.4g}", *rate, f"{speedup:.2f}"]

    def _gains(self) -> list[str]:
        found = sorted(self.gains().items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {gain:.2f}x" for name, gain in found)
        sizes = ", ".join(f"{name} = {value}" for name, value in self.best.fixed.items())
        return [
            f"worth of each choice (best time with it left alone / best time): {listed or 'there was none'}",
            f"compiled for {sizes or 'all sizes'}",
        ]


def candidate(record: Record) -> tuple[Choices, bool]:
    """What tells candidates of one search apart."""
    return record.choices, bool(record.fixed)


def gains(history: list[Record], base: Choices) -> dict[str, float]:
    """See `TuneResult.gains`; `base` has the values that count as left alone."""
    times = {record.choices: record.seconds for record in history if record.seconds is not None}
    if not times:
        return {}
    fastest, out = min(times.values()), {}
    for name, value in base.as_dict().items():
        held = [seconds for choices, seconds in times.items() if choices.as_dict()[name] == value]
        if held and len({choices.as_dict()[name] for choices in times}) > 1:
            out[name] = min(held) / fastest
    return out


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows as text in columns, the first to the left and the others to the right."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    first, *rest = widths
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]).rstrip() for row in rows]
