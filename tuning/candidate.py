# SPDX-License-Identifier: Apache-2.0
"""One point of the joint space: how the sparse argument is stored, and what the sketches leave open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparsetir.formats.format import Format
from sparsetir.schedules import Choices
from sparsetir.tuning.knobs import Config


@dataclass(frozen=True)
class Candidate:
    """A format and choices.

    Parameters
    ----------
    choices : Choices or Config
        Of the sketches, or of a template's knobs.
    format : Format, optional
        Of the sparse argument; by default as the program declares it.

    Examples
    --------
    >>> from sparsetir import formats
    >>> print(Candidate(Choices(tile=32, chunks=2), formats.bsr(4, 4)))
    bsr(r=4, c=4) tile=32 chunks=2
    """

    choices: Choices | Config = field(default_factory=Choices)
    format: Format | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What candidates are sorted by where their times tie."""
        values = self.choices.as_dict().values()
        return (str(self.format or ""), *(map(repr, values) if isinstance(self.choices, Config) else values))

    def __str__(self) -> str:
        if isinstance(self.choices, Config):
            return f"{self.format!r} {self.choices}" if self.format else f"as it is {self.choices}"
        chosen = {n: v for n, v in self.choices.as_dict().items() if v != getattr(BASE, n) or n in ("tile", "chunks")}
        return " ".join([repr(self.format) if self.format else "as it is", *(f"{n}={v}" for n, v in chosen.items())])


BASE = Choices(chunks=0)

__all__ = ["Candidate"]
