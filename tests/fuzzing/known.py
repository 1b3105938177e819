# SPDX-License-Identifier: Apache-2.0
"""Classes of faults that are known and open: their findings are counted apart. Remove a class once it is mended."""

from __future__ import annotations

from collections.abc import Callable

from fuzzing.case import Case, Finding


def is_of(front: str, *words: str, outcome: str = "") -> Callable[[str, Case, Finding], bool]:
    """Findings of a front whose label has one of some words."""

    def belongs(where: str, case: Case, finding: Finding) -> bool:
        has_word = not words or any(word in finding.label for word in words)
        return where == front and has_word and outcome in ("", finding.outcome)

    return belongs


#: class -> whether a finding of a front belongs to it
KNOWN: dict[str, Callable[[str, Case, Finding], bool]] = {}


def known_class(front: str, case: Case, finding: Finding) -> str | None:
    """The name of the class that a finding belongs to, if any."""
    return next((name for name, belongs in KNOWN.items() if belongs(front, case, finding)), None)


__all__ = ["KNOWN", "known_class"]
