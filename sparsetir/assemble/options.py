# SPDX-License-Identifier: Apache-2.0
"""How the rows of a computed pattern are collected."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sparsetir.errors import ArgumentError

SMALL = 24  # entries up to which a row is sorted by insertion
MOST_INSERTED = 256  # every build has room for so many on its stack
FUNCTIONS = ("bound", "symbolic", "numeric", "values")
FIRST = ("bound", "numeric")
KINDS = ("both", "bits", "bytes", "table")


@dataclass(frozen=True)
class Accumulators:
    """How a kernel collects the rows of a result whose pattern it computes, for ``sparsetir.build(schedule=...)``.

    Results are the same with all of them. `sparsetir.tune_sparse` searches them.

    Parameters
    ----------
    insertion : int
        Entries, repeated ones included, up to which a row is sorted by insertion; from 0 to 256.
    kind : {"both", "bits", "bytes", "table"}
        What collects longer rows: an array as wide as the result whose entries are marked by bits, by bytes, or by
        either of them as the row is sparse or dense; or a hash table and a sort. With "both" all rows under a mask that
        is no complement are collected in the order of the mask's.
    counted : bool
        Whether rows are counted before they are written, also where there is memory for the most that they may have.

    Raises
    ------
    ArgumentError
        A value is none of these.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir import Accumulators
    >>> kernel = sparsetir.build(sparsetir.ops.spgemm(), schedule=Accumulators(insertion=8, kind="bits"))
    """

    insertion: int = SMALL
    kind: str = "both"
    counted: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.insertion, int) and not isinstance(self.insertion, bool)
        if not whole or not 0 <= self.insertion <= MOST_INSERTED:
            message = f"insertion is a number of entries from 0 to {MOST_INSERTED}"
            raise ArgumentError(f"{message}; found {self.insertion!r}")
        if self.kind not in KINDS:
            raise ArgumentError(f"expected one of the kinds {', '.join(KINDS)}; found {self.kind!r}")
        if not isinstance(self.counted, bool):
            raise ArgumentError(f"counted is True or False, found {self.counted!r}")

    @property
    def is_table(self) -> bool:
        """Whether long rows are collected in hash tables."""
        return self.kind == "table"

    def as_dict(self) -> dict[str, Any]:
        """Names and values, for records."""
        return asdict(self)


@dataclass(frozen=True)
class Options:
    """What the functions of a program do besides.

    Parameters
    ----------
    complement : bool
        Coordinates are entered where the filters store none.
    select : bool
        Of each row only the largest values are kept.
    whole : bool
        Under a mask, where `stamps`: every entry of it is stored, also where nothing is entered.
    accumulators : Accumulators
    functions : tuple of str
        Which of them are compiled together. Others follow when a call wants them: they take as long again.
    """

    complement: bool = False
    select: bool = False
    whole: bool = False
    accumulators: Accumulators = field(default_factory=Accumulators)
    functions: tuple[str, ...] = FIRST

    def stamps(self, *, has_mask: bool) -> bool:
        """Whether rows under a mask are collected in its order."""
        return has_mask and not self.complement and self.accumulators.kind == "both"

    def tabled(self) -> Options:
        """The same with hash tables."""
        return replace(self, accumulators=replace(self.accumulators, kind="table"))


__all__ = ["Accumulators", "Options"]
