# SPDX-License-Identifier: Apache-2.0
"""A format with some of its pieces stored in formats of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.formats.arrays import take
from sparsetir.formats.format import Array, Entries, Format, Packed
from sparsetir.formats.rule import FormatRewriteRule


class Nested(Format):
    """`base`, its pieces named in `inner` packed again.

    Parameters
    ----------
    base : Format
        With everything chosen.
    inner : mapping of str to Format
        What to store pieces of `base` in, by the names of their rules. A piece may only be packed again if its axes
        have the coordinates of the tensor's dimensions.

    Examples
    --------
    >>> from sparsetir import formats
    >>> from sparsetir.formats.nested import Nested
    >>> base = formats.columns(2)
    >>> [rule.name for rule in Nested(base, {base.rules[1].name: formats.ell(width=2)}).rules]
    ['c0_csr', 'c1_csr_ell']
    """

    name = "nested"

    def __init__(self, base: Format, inner: Mapping[str, Format]) -> None:
        self.base, self.idtype, self.dimensions = base, base.idtype, base.dimensions
        known = {rule.name: rule for rule in base.rules}
        for piece in inner:
            if piece not in known:
                raise ArgumentError(f"{base!r} has no piece {piece!r}; there are {', '.join(known)}")
            if known[piece].fills or not has_own_coordinates(known[piece]):
                raise ArgumentError(f"piece {piece!r} of {base!r} has coordinates of its own: it is stored as it is")
        self.inner = {n: f.resolve(known[n].order, base.index_type) for n, f in inner.items()}

    @property
    def parameters(self) -> dict[str, Any]:
        return {"base": self.base, "inner": self.inner}

    @cached_property
    def rules(self) -> Sequence[FormatRewriteRule]:
        found: list[FormatRewriteRule] = []
        for rule in self.base.rules:
            below = self.inner[rule.name].rules if rule.name in self.inner else None
            found += [rule] if below is None else [_below(rule, inner, len(self.base.rules) == 1) for inner in below]
        return tuple(found)

    def pack(self, entries: Entries) -> list[Packed]:
        found: list[Packed] = []
        for rule, packed in zip(self.base.rules, self.base.pack(entries), strict=True):
            found += self._again(entries, packed, rule.name) if rule.name in self.inner else [packed]
        return found

    def _again(self, entries: Entries, packed: Packed, name: str) -> list[Packed]:
        """The entries of one piece in its own format."""
        held = np.arange(entries.nnz)[: packed.size] if packed.entries is None else np.sort(packed.entries)
        part = Entries(entries.shape, [take(c, held) for c in entries.coords])
        return [_renumbered(inner, held) for inner in self.inner[name].pack(part)]


def has_own_coordinates(rule: FormatRewriteRule) -> bool:
    """Whether each dimension of the tensor is one axis of the piece, with the same coordinates."""
    probes = list(range(len(rule.buffer.axes)))
    if rule.inverse is None:
        return True
    try:
        found = list(rule.inverse(*(_Probe(n) for n in probes)))
    except TypeError:
        return False
    return all(isinstance(coord, _Probe) for coord in found)


class _Probe:
    """A coordinate with which nothing can be computed."""

    def __init__(self, axis: int) -> None:
        self.axis = axis


def _below(outer: FormatRewriteRule, inner: FormatRewriteRule, is_whole: bool) -> FormatRewriteRule:
    """The rule of a piece's piece, where the piece has all entries or a part of them.

    A format of a part iterates over rows of other parts too, or leaves out empty ones: it must not initialise them.
    """
    alone = is_whole and outer.partitions_rows and inner.partitions_rows
    name, sweep = f"{outer.name}_{inner.name}", outer.sweep or inner.sweep
    return replace(inner, name=name, partitions_rows=alone, meets_rows=False, sweep=sweep)


def _renumbered(packed: Packed, held: Array) -> Packed:
    """The entries of a piece's piece, numbered in the whole tensor."""
    entries = held if packed.entries is None else take(held, packed.entries)
    return Packed(packed.arrays, packed.sizes, packed.count, entries, packed.slots, size=packed.size)


__all__ = ["Nested", "has_own_coordinates"]
