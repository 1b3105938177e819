# SPDX-License-Identifier: Apache-2.0
"""How the rows of a computed pattern are collected."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparsetir.errors import ArgumentError, checks_keywords

if TYPE_CHECKING:
    from sparsetir.assemble.program import Assembly

SMALL = 24  # entries up to which a row is sorted by insertion
RANKED = 96  # entries up to which a row is sorted by ranks
MOST_INSERTED, MOST_RANKED = 256, 111  # every build has room for so many on its stack
FUNCTIONS = ("bound", "symbolic", "numeric", "looking", "values", "packed")  # one chunk of merged rows has "alone"
FIRST = ("bound", "numeric")
KINDS = ("both", "bits", "bytes", "table", "segments")
ORDERS = ("stored", "nonempty", "clustered", "banded")


@checks_keywords
@dataclass(frozen=True)
class Accumulators:
    """How a kernel collects the rows of a result whose pattern it computes, for ``sparsetir.build(schedule=...)``.

    Results are the same with all of them. `sparsetir.tune_sparse` searches them.

    Parameters
    ----------
    insertion : int
        Entries, repeated ones included, up to which a row is sorted by insertion; from 0 to 256.
    kind : {"both", "bits", "bytes", "table", "segments"}
        What collects longer rows: an array as wide as the result whose entries are marked by bits, by bytes, or by
        either of them as the row is sparse or dense; a hash table and a sort; or, where a row is long, such arrays for
        one segment of the columns after the other, whose products are sorted out first. With "both" all rows under a
        mask that is no complement are collected in the order of the mask's.
    counted : bool
        Whether rows are counted before they are written, also where there is memory for the most that they may have.
    order : {"stored", "nonempty", "clustered", "banded"}
        In which order rows are computed: as they are stored; without those that enter nothing, as compressed rows are;
        such that rows with columns in common follow each other; or such that the band around the diagonal is narrow,
        which needs as many columns as rows. The result is in the order of its rows with all of them.
    block : tuple of int, optional
        Of a product, ``(r, q, s)``: A is stored in blocks of shape (r, q), B of (q, s). Operands whose blocks are not
        full are multiplied as they are.

    ranked : int
        Entries, repeated ones included, up to which a row is listed beside an array as wide as the result, and each of
        its entries put where the number of smaller ones says; from 0 to 111. Such rows are not sorted by insertion.
        Hash tables do without.

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
    order: str = "stored"
    block: tuple[int, int, int] | None = None
    ranked: int = RANKED

    def __post_init__(self) -> None:
        for name, found, most in (("insertion", self.insertion, MOST_INSERTED), ("ranked", self.ranked, MOST_RANKED)):
            whole = isinstance(found, int) and not isinstance(found, bool)
            if not whole or not 0 <= found <= most:
                raise ArgumentError(f"{name} is a number of entries from 0 to {most}; found {found!r}")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ArgumentError(f"expected one of the kinds {', '.join(KINDS)}; found {self.kind!r}")
        if not isinstance(self.counted, bool):
            raise ArgumentError(f"counted is True or False, found {self.counted!r}")
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise ArgumentError(f"expected one of the orders {', '.join(ORDERS)}; found {self.order!r}")
        if self.block is not None and not _is_block(self.block):
            raise ArgumentError(f"block is three positive sizes (r, q, s) or None, found {self.block!r}")

    @property
    def is_ordered(self) -> bool:
        """Whether rows are computed in another order than they are stored."""
        return self.order != "stored"

    @property
    def is_table(self) -> bool:
        """Whether long rows are collected in hash tables."""
        return self.kind == "table"

    def as_dict(self) -> dict[str, Any]:
        """Names and values, for records."""
        return asdict(self)


def _is_block(block: Any) -> bool:
    whole = isinstance(block, tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in block)
    return whole and len(block) == 3 and min(block) > 0


@dataclass(frozen=True)
class Options:
    """What the functions of a program do besides.

    Parameters
    ----------
    complement : bool
        Coordinates are entered where the filters store none.
    select : bool
        Of each row only the largest values are kept.
    limited : bool
        With `select`, calls seldom keep all values however small they are: small ones are left out as rows are read.
    whole : bool
        Under a mask, where `stamps`: every entry of it is stored, also where nothing is entered.
    accumulators : Accumulators
    looks_up : bool
        Under a mask, where `stamps`: its rows may be looked up in long rows of operands, see `lookups.py`.
    functions : tuple of str
        Which of them are compiled together. Others follow when a call wants them: they take as long again.
    """

    complement: bool = False
    select: bool = False
    limited: bool = False
    whole: bool = False
    accumulators: Accumulators = field(default_factory=Accumulators)
    looks_up: bool = True
    functions: tuple[str, ...] = FIRST

    def stamps(self, *, has_mask: bool) -> bool:
        """Whether rows under a mask are collected in its order."""
        return has_mask and not self.complement and self.accumulators.kind == "both"

    def orders(self, assembly: Assembly) -> bool:
        """Whether the functions take an order of the rows: not where those are merged, follow a mask's, or are cut."""
        follows = assembly.merge is not None or self.stamps(has_mask=assembly.mask is not None)
        return self.accumulators.is_ordered and not self.select and not follows

    def plain(self) -> Options:
        """The same with rows in the order in which they are stored, each in one piece, and nothing looked up."""
        kind = "both" if self.accumulators.kind == "segments" else self.accumulators.kind
        return replace(self, looks_up=False, accumulators=replace(self.accumulators, order="stored", kind=kind))

    def unblocked(self) -> Options:
        """The same without blocks."""
        return replace(self, accumulators=replace(self.accumulators, block=None))

    def segmented(self) -> Options:
        """The same with long rows in segments."""
        return replace(self, accumulators=replace(self.accumulators, kind="segments"))

    def tabled(self) -> Options:
        """The same with hash tables."""
        return replace(self, accumulators=replace(self.accumulators, kind="table"))


__all__ = ["KINDS", "ORDERS", "Accumulators", "Options"]
