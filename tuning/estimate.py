# SPDX-License-Identifier: Apache-2.0
"""How a format would store a matrix, as the cost model sees it: from the numbers of its pattern, nothing is converted.

The cost model sees these numbers for every candidate, also where the format was converted meanwhile: what it learnt
from must not differ from what it is asked about.
"""

from __future__ import annotations

from sparsetir.formats.estimate import Estimate
from sparsetir.formats.format import Format
from sparsetir.formats.pattern import Pattern
from sparsetir.tuning.features import Stored

INDEX = 4  # bytes


class Estimates:
    """How formats would store a tensor.

    Parameters
    ----------
    pattern : Pattern or None
        Of the tensor, where it is known.
    own : Stored
        How the argument is stored as it came.
    itemsize : int
        Bytes of a value.
    """

    def __init__(self, pattern: Pattern | None, own: Stored, itemsize: int) -> None:
        self.pattern, self.own, self.itemsize = pattern, own, itemsize
        self._made: dict[Format | None, Stored] = {None: own}

    def __call__(self, format: Format | None) -> Stored:
        """The estimate for a format; None is as the argument came."""
        if format not in self._made:
            self._made[format] = self._estimated(format) if format is not None else self.own
        return self._made[format]

    def _estimated(self, format: Format) -> Stored:
        found = Estimate(self.own.values) if self.pattern is None else format.estimate(self.pattern)
        values, rows = round(found.values), format.block[0]
        numbers = values // found.per_index if found.per_index else 0
        pointers = self.pattern.shape[0] // rows if self.pattern is not None else 0
        return Stored(values, values * self.itemsize + INDEX * (numbers + pointers), found.pieces, rows)


__all__ = ["Estimates"]
