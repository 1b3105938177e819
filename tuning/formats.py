# SPDX-License-Identifier: Apache-2.0
"""Which formats are searched, in which order."""

from __future__ import annotations

from sparsetir.formats.blocks import BSR
from sparsetir.formats.candidates import considered
from sparsetir.formats.coordinates import COO, CSF
from sparsetir.formats.diagonals import DIA, Band
from sparsetir.formats.format import Format
from sparsetir.formats.layouts import CSC, CSR, ELL, Ragged
from sparsetir.formats.partitions import Columns, Rows
from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.formats.row_buckets import Hyb
from sparsetir.formats.row_groups import RowGroups
from sparsetir.formats.special import SELL
from sparsetir.formats.splits import DiaRest

# The loops of the program as it is, or in an order that has no row to share out.
LEFT_OUT = (CSR, CSC, COO, CSF, Ragged)
EARLY = (BSR, SELL, RowGroups, ELL, DIA)  # have loops that others cannot have
LATE = (Band, DiaRest, Columns, Rows, Hyb)  # are compiled or converted long


def promising(pattern: Pattern, *, most: float) -> list[Format]:
    """The formats that suit a pattern, the likeliest first.

    Parameters
    ----------
    pattern : Pattern
    most : float
        Most values that a format may store for each entry.
    """
    found = [c for c in considered(pattern, most=most) if c.objection is None]
    if not isinstance(pattern, MatrixPattern):
        return [c.format for c in found]
    kept = [c for c in found if not isinstance(c.format, LEFT_OUT)]
    turn = {id(c): isinstance(c.format, LATE) - isinstance(c.format, EARLY) for c in kept}
    return [c.format for c in sorted(kept, key=lambda c: (turn[id(c)], c.values))]


__all__ = ["promising"]
