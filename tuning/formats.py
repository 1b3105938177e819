# SPDX-License-Identifier: Apache-2.0
"""Which formats are searched, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsetir.formats.blocks import BSR
from sparsetir.formats.candidates import considered
from sparsetir.formats.coordinates import COO, CSF
from sparsetir.formats.diagonals import DIA, Band
from sparsetir.formats.format import Format
from sparsetir.formats.layouts import CSC, CSR, ELL, Ragged
from sparsetir.formats.narrow import NarrowCSR, NarrowSELL
from sparsetir.formats.partitions import Columns, Rows
from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.formats.row_buckets import Hyb
from sparsetir.formats.row_groups import RowGroups
from sparsetir.formats.special import SELL
from sparsetir.formats.splits import HDIA, DiaRest
from sparsetir.interop import is_sparse
from sparsetir.machine import last_cache

# The loops of the program as it is, or in an order that has no row to share out.
LEFT_OUT = (CSR, CSC, COO, CSF, Ragged)
EARLY = (BSR, SELL, RowGroups, ELL, DIA, HDIA)  # have loops that others cannot have
LATE = (Band, DiaRest, Columns, Rows, Hyb)  # are compiled or converted long
NARROW = (NarrowCSR, NarrowSELL)  # read less from memory: not what dense rows are, nor what caches hold
VECTORS = (HDIA,)  # have loops for vectors
ENTRY = 8  # bytes of a value and a column


def promising(pattern: Pattern, *, most: float, feat: int = 1) -> list[Format]:
    """The formats that suit a pattern, the likeliest first.

    Parameters
    ----------
    pattern : Pattern
    most : float
        Most values that a format may store for each entry.
    feat : int
        Length of the dense rows, 1 for vectors: see `dense_rows`.
    """
    found = [c for c in considered(pattern, most=most) if c.objection is None]
    if not isinstance(pattern, MatrixPattern):
        return [c.format for c in found]
    kept = [c for c in found if not isinstance(c.format, LEFT_OUT)]
    if feat > 1 or ENTRY * pattern.nnz <= last_cache():
        kept = [c for c in kept if not isinstance(c.format, NARROW)]
    if feat > 1:
        kept = [c for c in kept if not isinstance(c.format, VECTORS)]
    turn = {id(c): isinstance(c.format, LATE) - isinstance(c.format, EARLY) for c in kept}
    return [c.format for c in sorted(kept, key=lambda c: (turn[id(c)], c.values))]


def dense_rows(inputs: Mapping[str, Any]) -> int:
    """How long the rows of the dense arguments are, at most; 1 where all are vectors."""
    dense = (np.shape(value) for value in inputs.values() if not is_sparse(value))
    return max((shape[-1] for shape in dense if len(shape) > 1), default=1)


__all__ = ["dense_rows", "promising"]
