# SPDX-License-Identifier: Apache-2.0
"""Recorded trials, grouped by what was tuned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import TuningError
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.database import Database
from sparsetir.tuning.encoding import SPECIALISED
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.model import of_width

LEAST = 8  # trials of a case


@dataclass(frozen=True, eq=False)
class Recording:
    """The recorded trials of one program on one matrix.

    Parameters
    ----------
    name : str
    seconds : mapping of Candidate to float
        Infinite for those that failed.
    features : mapping of Candidate to ndarray
        What the cost model saw; not a number where a candidate lacks a knob of another.
    names : tuple of str
        Of the features.
    matrix, family, op : str
        What the matrix is called, what kind it is, and the operation; "" where nobody said it.
    untuned : (float, ndarray) or None
        Seconds and features of the kernel that is built without tuning.
    passes : sequence of mapping of Candidate to float
        The first and the second measurement of those that were measured more than once and ran; `seconds` has the
        mean of all.
    kind, dtype : str
        The operation without its sizes, and the type of its values; "" where nobody said it.
    threads : int
        0 where nobody said it.
    mcpu : str
        The processor that kernels were compiled for; "" where nobody said it.
    is_placed : bool
        Whether times among the features go by measured rates of the machine, rather than by those of a usual one.
    """

    name: str
    seconds: Mapping[Candidate, float]
    features: Mapping[Candidate, np.ndarray]
    names: tuple[str, ...] = ()
    matrix: str = ""
    family: str = ""
    op: str = ""
    untuned: tuple[float, np.ndarray] | None = field(default=None, repr=False)
    passes: tuple[Mapping[Candidate, float], ...] = field(default=(), repr=False)
    kind: str = ""
    dtype: str = ""
    threads: int = 0
    mcpu: str = ""
    is_placed: bool = False

    @property
    def best(self) -> float:
        """The fastest of all."""
        return min(self.seconds.values())

    @property
    def ran(self) -> list[Candidate]:
        """Those that did not fail."""
        return [c for c, seconds in self.seconds.items() if np.isfinite(seconds)]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Features of the trials that ran, and their seconds."""
        ran = self.ran
        return np.array([self.features[c] for c in ran]), np.array([self.seconds[c] for c in ran])


def load(path: Path, *, spread: float = float("inf")) -> list[Recording]:
    """The cases of a database, those of at least `LEAST` trials.

    Of several measurements of one candidate the geometric mean counts. Records that say which matrix they are of belong
    together whatever version measured them; others by their key. The untuned kernel is no candidate of a search of
    knobs, and templates are told apart by their text.

    Parameters
    ----------
    path : Path
    spread : float
        Trials whose quartiles were farther apart than this, relative to the median, are left out: the machine was busy.

    Raises
    ------
    TuningError
        There is none, or the records have no features.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, record, line in Database(path).everything():
        if "features" not in line or (record.spread or 0.0) > spread:
            continue
        label = {name: str(line.get(name, "")) for name in ("matrix", "family", "op")}
        sizes = {} if line["features"].get(SPECIALISED) == 0.0 else record.fixed
        kind = f"Config {key.program}" if isinstance(record.choices, Config) else "Choices"
        name = f"{key.name} {label['matrix'] or key.pattern} {label['op'] or json.dumps(sizes)} {kind}"
        seconds = float("inf") if record.seconds is None else record.seconds
        case = found.setdefault(name, {**label, "names": list(line["features"]), "trials": {}, "untuned": None})
        names, features = case["names"], line["features"]
        if isinstance(record.choices, Config):  # of which formats may have different ones
            names += [name for name in features if name not in names]
        elif list(features) != names:
            continue
        row = np.array([features.get(name, np.nan) for name in names], np.float32)
        if line["features"].get(SPECIALISED) == 0.0:
            case["untuned"] = case["untuned"] or (seconds, row)
        else:
            case["trials"].setdefault(record.candidate, ([], row))[0].append(seconds)
    cases = [_recording(name, held) for name, held in found.items() if len(held["trials"]) >= LEAST]
    cases = [case for case in cases if np.isfinite(case.best)]
    if not cases:
        raise TuningError(f"expected records of at least {LEAST} trials of one case in {path}; found none")
    return cases


def _recording(name: str, held: dict[str, Any]) -> Recording:
    trials = held["trials"]
    return Recording(
        name,
        {c: _mean(seconds) for c, (seconds, _) in trials.items()},
        dict(zip(trials, of_width([row for _, row in trials.values()], len(held["names"])), strict=True)),
        tuple(held["names"]),
        held["matrix"] or name,
        held["family"] or name,
        held["op"] or name.partition(" ")[0],
        held["untuned"],
        tuple({c: ran(seconds)[n] for c, (seconds, _) in trials.items() if len(ran(seconds)) > 1} for n in range(2)),
    )


def _mean(seconds: Sequence[float]) -> float:
    """The geometric mean of the measurements that ran: the least of several would be that of the luckiest."""
    return float(np.exp(np.mean(np.log(ran(seconds))))) if ran(seconds) else float("inf")


def ran(seconds: Sequence[float]) -> list[float]:
    """The measurements that are numbers."""
    return [value for value in seconds if np.isfinite(value)]


__all__ = ["LEAST", "Recording", "load"]
