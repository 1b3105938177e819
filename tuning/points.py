# SPDX-License-Identifier: Apache-2.0
"""The cases of a data set as recorded trials, with what a model sees of each point computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.formats.format import Format
from sparsetir.formats.text import parse
from sparsetir.ir import Program, decode
from sparsetir.schedules import Choices
from sparsetir.tuning.analytic import Structure
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.ceilings import USUAL, Rates
from sparsetir.tuning.dataset import lines
from sparsetir.tuning.encoding import Encoding, matrix_names
from sparsetir.tuning.features import Operands, Stored
from sparsetir.tuning.plan import Job
from sparsetir.tuning.recordings import LEAST, Recording
from sparsetir.tuning.work import Work


@dataclass(frozen=True, eq=False)
class Noted(Encoding):
    """What is the same for all points of a case, as the data set has it: the matrix is not there any more.

    Parameters
    ----------
    noted : Structure
    stored : mapping of Format to Stored
        The estimates, by format.
    """

    noted: Structure | None = None
    stored: Mapping[Format | None, Stored] = field(default_factory=dict)

    @property
    def structure(self) -> Structure:
        return self.noted or Structure.of(None)

    @property
    def estimates(self) -> Any:
        return self.stored.__getitem__


@lru_cache(maxsize=256)
def _program(op: str, dtype: str) -> Program:
    return decode(Job(op, 1, dtype, 1).program)


@lru_cache(maxsize=4096)
def _format(text: str) -> Format | None:
    return parse(text) if text else None


def is_data_set(path: Path) -> bool:
    """Whether a file is a data set rather than records of searches."""
    try:
        with path.open("rb") as file:
            return b'"points":' in file.readline()
    except OSError:
        return False  # whoever reads the records says why


def recordings(path: Path, *, spread: float = float("inf")) -> list[Recording]:
    """The cases of a data set.

    Parameters
    ----------
    path : Path
    spread : float
        Points whose two measurements are farther apart, as a logarithm, are left out: the machine was busy.
    """
    return [case for line in lines(path) if (case := recording(line, spread)) is not None]


def recording(line: Mapping[str, Any], spread: float = float("inf")) -> Recording | None:
    """A case; None where too few points of it are left."""
    kept = list(_points(line, spread))
    if len(kept) < LEAST:
        return None
    encoding = encoding_of(line)
    found = dict(zip([c for c, _ in kept], encoding.rows([c for c, _ in kept]), strict=True))
    usual = Candidate(Choices(**line["usual"]))
    untuned = (least(line["plain"]), encoding.rows([usual], specialised=False)[0])
    job = Job(**line["job"])
    return Recording(
        line["case"],
        {c: least(seconds) for c, seconds in kept},
        found,
        matrix_names(),
        line["matrix"],
        line["family"],
        f"{job.kind}:{job.feat}",
        untuned,
        tuple({c: seconds[n] for c, seconds in kept} for n in range(2)),
        job.kind,
        job.dtype,
        job.threads,
        line.get("mcpu", ""),
        "rates" in line,
    )


def least(seconds: list[float]) -> float:
    """The least of two measurements: whatever else runs only adds to them."""
    return min(seconds)


def _points(line: Mapping[str, Any], spread: float) -> Iterator[tuple[Candidate, list[float]]]:
    """The candidates of a case with their measurements, none twice."""
    seen = set()
    for text, choices, _stored, _conversion, *seconds in line["points"]:
        candidate = Candidate(Choices(**{"chunks": line["job"]["threads"], **choices}), _format(text))
        if candidate not in seen and abs(np.log(seconds[0] / seconds[1])) <= spread:
            seen.add(candidate)
            yield candidate, seconds


def encoding_of(line: Mapping[str, Any]) -> Noted:
    """From a case's candidates to what a model sees of them."""
    job = Job(**line["job"])
    work = Work.of(_program(job.op, job.dtype), line["sizes"])
    own = Stored(*line["own"])
    stored = {_format(text): Stored(*held) for text, _, held, *_ in line["points"]}
    operands = Operands.of(work, job.threads, Rates(**line["rates"]) if "rates" in line else USUAL)
    return Noted(line["facts"], None, own, operands, noted=Structure(**line["structure"]), stored={**stored, None: own})


__all__ = ["encoding_of", "is_data_set", "recording", "recordings"]
