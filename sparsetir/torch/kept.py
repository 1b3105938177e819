# SPDX-License-Identifier: Apache-2.0
"""What is computed of constant tensors, once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

MOST = 4  # sets of tensors that are known


class _Entry(NamedTuple):
    owners: list[Any]
    versions: list[int]
    result: Tensor | None

    def is_of(self, tensors: tuple[Tensor, ...], versions: list[int]) -> bool:
        """Whether it belongs to these, as they are now."""
        return self.versions == versions and all(o() is t for o, t in zip(self.owners, tensors, strict=True))


class Kept:
    """Results of tensors that come again, for as long as these live and nothing changes them in place.

    What comes for the first time is only noted: features of ever new batches are not worth the memory.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[Hashable, _Entry] = OrderedDict()

    def of(self, name: str, tensors: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> Tensor | None:
        """The result of a name, which nobody may change; None if the tensors, as they are now, have not been here."""
        key, versions = (name, *map(id, tensors)), [t._version for t in tensors]
        entry = self.found.get(key)
        if entry is None or not entry.is_of(tensors, versions):
            self._put(key, tensors, versions, None)
            return None
        if entry.result is not None:
            return entry.result
        result = compute()
        self._put(key, tensors, versions, result)
        return result

    def _put(self, key: Hashable, tensors: tuple[Tensor, ...], versions: list[int], result: Tensor | None) -> None:
        me = ref(self)

        def forget(_dead: Any) -> None:
            kept = me()
            if kept is not None:
                kept.found.pop(key, None)

        self.found[key] = _Entry([ref(t, forget) for t in tensors], versions, result)
        while len(self.found) > MOST:
            self.found.popitem(last=False)


__all__ = ["Kept"]
