# SPDX-License-Identifier: Apache-2.0
"""The open choices of all sketches, collected from the sketches' declarations."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING

from sparsetir.errors import ScheduleError, checks_keywords
from sparsetir.schedules import matrix_unit, panel, ragged_sum, row
from sparsetir.utils.arguments import as_count, as_index, shown

SKETCHES = (panel, ragged_sum, matrix_unit)
DECLARED = (
    *row.DECLARED,
    *row.CARRY_DECLARED,
    *(choice for sketch in SKETCHES for choice in sketch.DECLARED),
    *ragged_sum.STAGED_DECLARED,  # last, as trained cost models know choices by their place
)
WIDTH, INDENT = 120, " " * 8  # of the documentation


def _with_fields(cls: type) -> type:
    """Turn a class into a frozen dataclass with a field for each declared choice."""
    cls.__annotations__ = {choice.name: "int" for choice in DECLARED}
    for choice in DECLARED:
        usual = choice.default
        setattr(cls, choice.name, field(default_factory=usual) if callable(usual) else usual)
    meanings = (fill(c.meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT) for c in DECLARED)
    listed = "\n".join(f"    {c.name} : int\n{text}" for c, text in zip(DECLARED, meanings, strict=True))
    cls.__doc__ = f"{cls.__doc__}\n\n    Parameters\n    ----------\n{listed}\n    "
    return checks_keywords(dataclass(frozen=True)(cls))


@_with_fields
class Choices:
    """One point of the sketches' space."""

    if TYPE_CHECKING:

        def __init__(self, **values: int) -> None: ...

        def __getattr__(self, name: str) -> int: ...

    def __post_init__(self) -> None:
        for choice in DECLARED:
            raw = getattr(self, choice.name)
            value = raw if type(raw) is int else as_index(raw)  # The fast path matters: searches make thousands.
            if not isinstance(value, int):
                raise ScheduleError(f"{choice.name}: expected an integer, got {shown(raw)}")
            if not choice.allows(value):
                raise ScheduleError(f"{choice.name}: expected {choice.expected}, got {value}")
            object.__setattr__(self, choice.name, value)

    def as_dict(self) -> dict[str, int]:
        """Return names and values, for records."""
        return dict(vars(self))

    def changed(self, **values: int) -> Choices:
        """Return a copy with other values for some choices."""
        return Choices(**{**vars(self), **values})

    @staticmethod
    def space(*, threads: int, feat: int | None = None) -> dict[str, tuple[int, ...]]:
        """Return the values that a search tries for each choice.

        Parameters
        ----------
        threads : int
            The numbers of chunks tried are multiples of it, and 0.
        feat : int, optional
            Length of an output row: of the tiles that cover all of it, only the smallest is tried.

        Examples
        --------
        >>> Choices.space(threads=2, feat=32)["tile"]
        (8, 16, 32)
        """
        threads = as_count(threads, "threads")
        feat = None if feat is None else as_count(feat, "feat", least=0)
        candidates = {choice.name: choice.worth_trying(threads=threads, feat=feat) for choice in DECLARED}
        return {name: values for name, values in candidates.items() if values}
