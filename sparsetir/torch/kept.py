# SPDX-License-Identifier: Apache-2.0
"""What is computed of constant tensors, once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

MOST = 4  # sets of tensors that are known
WIDTH = 64  # elements that are summed for a fingerprint
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> list[Tensor]:
    """Numbers that tell also what numpy changed in the memory of a tensor.

    Sums of the bits of elements, one in `WIDTH` of them, see any one change, and weighted sums of as many neighbours
    that elements were exchanged.
    """
    flat = tensor.detach().resolve_neg().contiguous().flatten()
    count = flat.numel() // WIDTH * WIDTH
    rows, bits = flat[:count].view(-1, WIDTH), flat.view(BITS[flat.element_size()])
    whole = bits[:count].view(-1, WIDTH)
    wide = rows if rows.dtype is torch.float64 else rows.float()
    weighted = torch.mv(wide, _weights(wide.dtype))
    sums = whole.sum(0, dtype=bits.dtype)
    return [sums, weighted.view(BITS[weighted.element_size()]), bits[count:].clone()]


@cache
def _weights(dtype: torch.dtype) -> Tensor:
    return torch.rand(WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(0))


class _Entry(NamedTuple):
    owners: list[Any]
    versions: list[int]
    prints: list[list[Tensor]]
    result: Tensor | None

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether it belongs to these, as they are now."""
        if self.versions != [t._version for t in tensors]:
            return False
        if not all(owner() is t for owner, t in zip(self.owners, tensors, strict=True)):
            return False
        pairs = (
            pair
            for t, known in zip(tensors, self.prints, strict=True)
            for pair in zip(fingerprint(t), known, strict=True)
        )
        return all(torch.equal(found, known) for found, known in pairs)


class Kept:
    """Results of tensors that come again, for as long as these live and nothing changes them in place.

    What comes for the first time is only noted: features of ever new batches are not worth the memory.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[Hashable, _Entry] = OrderedDict()

    def of(self, name: str, tensors: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> Tensor | None:
        """The result of a name, which nobody may change; None if the tensors, as they are now, have not been here."""
        key = (name, *map(id, tensors))
        entry = self.found.get(key)
        if entry is None or not entry.is_of(tensors):
            self._put(key, tensors)
            return None
        if entry.result is not None:
            return entry.result
        result = compute()
        self.found[key] = _Entry(entry.owners, entry.versions, entry.prints, result)
        return result

    def _put(self, key: Hashable, tensors: tuple[Tensor, ...]) -> None:
        me = ref(self)

        def forget(_dead: Any) -> None:
            kept = me()
            if kept is not None:
                kept.found.pop(key, None)

        prints = [fingerprint(t) for t in tensors]
        self.found[key] = _Entry([ref(t, forget) for t in tensors], [t._version for t in tensors], prints, None)
        while len(self.found) > MOST:
            self.found.popitem(last=False)


__all__ = ["Kept"]
