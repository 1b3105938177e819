# SPDX-License-Identifier: Apache-2.0
"""Measured points as a test bench of decisions: the share of the best measured point that a choice reaches."""

from __future__ import annotations

import lzma
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from sparsetir.errors import TuningError
from sparsetir.schedules import Choices, defaults
from sparsetir.schedules.registers import OwnSums
from sparsetir.tuning.features import CHOICES
from sparsetir.tuning.model import CostModel, pretrained
from sparsetir.tuning.predict import MOST_TRIED, Bounds, spread_of, worth_trying
from sparsetir.tuning.records import Recording
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.train.dataset import of_processor, recordings
from sparsetir.tuning.train.evaluate import SLOWER, geomean
from sparsetir.tuning.train.pretrain import SPREAD, train

# The candidate that is chosen, by its place among those of the case; None is the kernel that `build` makes.
Decision: TypeAlias = Callable[[Recording], "int | None"]
HEADING = ("", "cases", "share of the best", "5th percentile", "slower than build")
PARTS = ("op", "family")
SIZES = ("nnz", "rows", "columns", "feat", "tile")
GAIN = 1.2  # times as fast as the kernel that `build` makes, from which on a candidate of a model is taken


@dataclass(frozen=True)
class Verdict:
    """A decision on a case.

    Parameters
    ----------
    case : Recording
    share : float
        Seconds of the best measured point over those of the choice; 1 is the best.
    is_slower : bool
        Whether the choice is slower than the kernel that `build` makes, by more than noise.
    """

    case: Recording
    share: float
    is_slower: bool


def judge(cases: Sequence[Recording], decision: Decision) -> list[Verdict]:
    """Apply a decision to cases.

    Parameters
    ----------
    cases : sequence of Recording
        Those without a measured baseline are left out.
    decision : callable
    """
    return [verdict for case in cases if (verdict := _judged(case, decision)) is not None]


def _judged(case: Recording, decision: Decision) -> Verdict | None:
    if case.untuned is None or not np.isfinite(case.untuned[0]):
        return None
    baseline, (_, seconds) = case.untuned[0], case.rows()
    place = decision(case)
    chosen = baseline if place is None else float(seconds[place])
    return Verdict(case, min(baseline, float(seconds.min())) / chosen, chosen > SLOWER * baseline)


# ------------------------------------------------------------------ decisions


def rules(case: Recording) -> None:
    """Choose the kernel that `build` makes without a hint."""


def current_rules(case: Recording) -> int | None:
    """Choose the measured point of what `build` makes today, once a kernel is warm; without one, what was measured.

    The cases were measured in the past, when one thread got a parallel loop too, no length was compiled in, sums along
    rows were not left to LLVM, and rows read in pieces were not packed. For these the median of the measured schedules
    with such a panel stands.
    """
    if case.untuned is None:
        return None
    (rows, _), untuned = case.rows(), case.untuned[1]
    lanes = _lanes(case, untuned)
    free = ("tile", "chunks") if lanes is None else ("tile", "chunks", "lanes")
    same = [case.names.index(name) for name in CHOICES if name not in free]
    chunks = case.threads if case.threads > 1 else 0
    _, _, length = case.op.partition(":")
    is_compiled_in = length.isdigit() and 1 < int(length) <= defaults.NARROW

    def suits(place: int, candidate: Candidate) -> bool:
        choices = candidate.choices
        if candidate.format is not None or not isinstance(choices, Choices) or choices.chunks != chunks:
            return False
        if lanes not in (None, choices.lanes):
            return False
        tile = case.names.index("tile")
        has_tile = choices.tile >= int(length) if is_compiled_in else rows[place][tile] == untuned[tile]
        return bool(has_tile) and np.array_equal(rows[place][same], untuned[same], equal_nan=True)

    panel = _panel(case, untuned)
    packed = [n for n, candidate in enumerate(case.ran) if panel and _has_panel(candidate, panel)]
    if packed:
        seconds = case.rows()[1]
        return sorted(packed, key=lambda n: float(seconds[n]))[len(packed) // 2]
    suitable = [n for n, candidate in enumerate(case.ran) if suits(n, candidate)]
    return min(suitable, key=lambda n: int(case.ran[n].choices.as_dict()["tile"]), default=None)


def _lanes(case: Recording, untuned: np.ndarray) -> int | None:
    """Return the lanes of today's sums along rows; None where they are as they were measured.

    Rows are taken to differ from their neighbours where their lengths have a deviation of half an entry or more.
    """
    if case.kind != "spmv":
        return None
    facts = dict(zip(case.names, untuned.tolist(), strict=False))
    rows, columns, mean = (2.0 ** facts[name] - 1 for name in ("rows", "columns", "row_mean"))
    own_sums = OwnSums(not case.mcpu.startswith("znver"))  # AMD's vector gathers are avoided
    is_regular = facts["row_cv"] * mean < 0.5
    if not is_regular and rows >= defaults.LEARNT and mean <= defaults.STAGED_MEAN:
        return defaults.LANES  # today's terms are staged, which no point did
    operand = int(columns * facts["work_itemsize"])
    return defaults.lanes_for(int(rows), mean, is_regular=is_regular, own_sums=own_sums, operand=operand)


def _panel(case: Recording, untuned: np.ndarray) -> int:
    """Return the columns of the panel that today's rules pack for rows that are read in pieces; else 0."""
    facts = dict(zip(case.names, untuned.tolist(), strict=False))
    if case.kind != "spmm" or not facts.keys() >= set(SIZES):
        return 0
    nnz, rows, columns, feat, tile = (round(2.0 ** facts[name] - 1) for name in SIZES)
    uses = nnz / max(rows, columns, 1)
    itemsize = int(facts["work_itemsize"])
    is_packed = uses >= defaults.OFTEN and feat >= 2 * tile and feat * itemsize >= 2 * defaults.PANEL
    return defaults.PANEL // itemsize if is_packed else 0


def _has_panel(candidate: Candidate, panel: int) -> bool:
    choices = candidate.choices
    if candidate.format is not None or not isinstance(choices, Choices):
        return False
    return choices.panel == panel and choices.tile >= panel


def best_schedule(case: Recording) -> int | None:
    """Choose the fastest measured schedule of the format that the argument came in: what no rule can exceed."""
    _, seconds = case.rows()
    own = [n for n, candidate in enumerate(case.ran) if candidate.format is None]
    best = min(own, key=lambda n: seconds[n], default=None)
    return None if best is None or case.untuned is None or seconds[best] >= case.untuned[0] else best


def of_model(model: CostModel, *, gain: float = 1.0) -> Decision:
    """Return the decision for the first candidate of a cost model, where it expects at least this gain.

    Parameters
    ----------
    model : CostModel
    gain : float
        Times as fast as the kernel that `build` makes, if the model's bounds ask for no more; at 1 or below the first
        candidate is always taken.
    """

    def decide(case: Recording) -> int | None:
        rows, _ = case.rows()
        scores = model.predict(rows)
        best = int(np.argmax(scores))
        if gain <= 1 or case.untuned is None:
            return best
        expected = np.exp(scores[best] - model.predict(case.untuned[1][None])[0])
        return best if expected >= max(gain, _certain(model, case, rows[best])) else None

    return decide


def of_trial(model: CostModel, most: int = MOST_TRIED) -> Decision:
    """Return the decision of a bound kernel that times the rules of today beside what a model would have it try.

    Parameters
    ----------
    model : CostModel
    most : int
        Candidates of the model that are timed.
    """

    def decide(case: Recording) -> int | None:
        rows, seconds = case.rows()
        today = current_rules(case)
        if case.untuned is None:
            return today
        baseline = case.untuned[0] if today is None else float(seconds[today])
        own = case.untuned[1] if today is None else rows[today]
        scores = model.predict(np.vstack([own[None], rows]))
        pool = [(None, {}), *((candidate.format, {"place": n}) for n, candidate in enumerate(case.ran))]
        tried = worth_trying(
            pool,
            np.exp(scores - scores[0]),
            None,
            calls=np.inf,
            seconds=1.0,
            converting=0.0,
            spread=spread_of(model),
            most=most,
        )
        best = min((conversion.choices["place"] for conversion in tried), key=seconds.__getitem__, default=None)
        return today if best is None or seconds[best] >= baseline else best

    return decide


def _certain(model: CostModel, case: Recording, row: np.ndarray) -> float:
    """Return the margin that the bounds of a model add; 1 for a model without bounds."""
    bounds: Any = model.about.get("bounds")
    if not isinstance(bounds, dict):
        return 1.0
    return Bounds(**bounds).margin(dict(zip(case.names, row.tolist(), strict=False)))


def decisions(cases: Sequence[Recording], training: Sequence[Recording] = ()) -> Iterator[tuple[str, Decision]]:
    """Yield the decisions that are compared, by title; `training` are cases of other machines."""
    yield "rules (build without a hint), as measured", rules
    yield "rules of today", current_rules
    yield "best measured schedule", best_schedule
    shipped = pretrained()
    if shipped is not None:
        yield "shipped model, first", of_model(shipped)
        yield f"shipped model, guarded at {GAIN:g}x", of_model(shipped, gain=GAIN)
        yield "rules of today or the shipped model's first, both timed", of_trial(shipped, 1)
        yield f"rules of today or the shipped model's first {MOST_TRIED}, all timed", of_trial(shipped)
    if training:
        other = train(training)
        yield "model of the other machine, first", of_model(other)
        yield f"model of the other machine, guarded at {GAIN:g}x", of_model(other, gain=GAIN)
        yield "rules of today or the first of that model, both timed", of_trial(other, 1)
        yield f"rules of today or the first {MOST_TRIED} of that model, all timed", of_trial(other)


# ------------------------------------------------------------------ tables


def read(path: Path) -> list[Recording]:
    """Return the cases of a file of points, also of one that is compressed by xz, and of FILE@PROCESSOR.

    Raises
    ------
    TuningError
        The file cannot be read or holds no case with enough points.
    """
    path, processor = of_processor(path)
    at = "" if processor is None else f"@{processor}"
    if path.suffix != ".xz":
        cases = recordings(path.with_name(path.name + at), spread=SPREAD)
    else:
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / path.stem
            try:
                plain.write_bytes(lzma.decompress(path.read_bytes()))
            except (OSError, lzma.LZMAError) as error:
                raise TuningError(f"{path}: expected measured points compressed by xz, got {error}") from error
            cases = recordings(plain.with_name(plain.name + at), spread=SPREAD)
    if not cases:
        raise TuningError(
            f"{path}: expected cases with measured points, got none. Measure some with sparsetir collect."
        )
    return cases


def tables(cases: Sequence[Recording], training: Sequence[Recording] = ()) -> Iterator[list[list[str]]]:
    """Yield a table of all decisions, and one of each part of the cases for the rules."""
    verdicts = {title: judge(cases, decision) for title, decision in decisions(cases, training)}
    yield [["decision", *HEADING[1:]], *(_row(title, of_all) for title, of_all in verdicts.items())]
    for part in PARTS:
        yield [[part, "cases", *verdicts], *_by_part(verdicts, part)]


def _row(title: str, verdicts: Sequence[Verdict]) -> list[str]:
    shares = [verdict.share for verdict in verdicts]
    if not shares:
        return [title, "0", "", "", ""]
    slower = float(np.mean([verdict.is_slower for verdict in verdicts]))
    return [title, str(len(shares)), f"{geomean(shares):.3f}", f"{np.percentile(shares, 5):.3f}", f"{slower:.1%}"]


def _by_part(verdicts: Mapping[str, Sequence[Verdict]], part: str) -> Iterator[list[str]]:
    """Yield the shares of each operation or family, those that the first decision suits least first."""
    groups: dict[str, dict[str, list[float]]] = {}
    for title, of_all in verdicts.items():
        for verdict in of_all:
            groups.setdefault(getattr(verdict.case, part), {}).setdefault(title, []).append(verdict.share)
    first = next(iter(verdicts))
    for name, shares in sorted(groups.items(), key=lambda item: geomean(item[1][first])):
        yield [name, str(len(shares[first])), *(f"{geomean(shares[title]):.3f}" for title in verdicts)]


__all__ = [
    "Decision",
    "Verdict",
    "best_schedule",
    "decisions",
    "judge",
    "of_model",
    "of_trial",
    "read",
    "rules",
    "tables",
]
