# SPDX-License-Identifier: Apache-2.0
"""Graphs of edge indices that were used before, by the memory of the indices or by their contents."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

import numpy as np

import torch
from sparsetir.torch.graph import Graph
from sparsetir.torch.structure import BITS
from sparsetir.utils.caches import Cache, ForkLock
from torch import Tensor

MAX_PLACES = 256  # index tensors that live and are identified by their memory
MOST_EDGES, LEAST_KEPT = 1 << 23, 4  # of the structures that are kept for later passes; the last few are kept anyway
# Edges times features of one layer that pay for a structure which is used in two layers and never again: above it, a
# structure gains more than it costs, as `sparsetir bench structures` measures on the machine at hand.
MIN_BUILD_WORK = 750_000
MIN_FEATURES = 16  # an edge costs as much with fewer
MIN_USES = 32  # by layers of less work, before they are worth a structure
MAX_COUNTED = 1 << 12  # contents, and samples of contents, whose uses are counted
SAMPLED_COLUMNS = 16
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LANES = 64  # interleaved sums of a checksum


class Recent:
    """The most recently used entries, up to a total size."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.lock, self.total = ForkLock(), 0

    def get(self, key: Hashable) -> Any:
        with self.lock:
            if key not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        with self.lock:
            self.total += size - self.entries.pop(key, (None, 0))[1]
            self.entries[key] = value, size
            while len(self.entries) > LEAST_KEPT and self.total > MOST_EDGES:
                self.total -= self.entries.popitem(last=False)[1][1]


def bits(tensor: Tensor) -> Tensor | None:
    """Return the elements as integers of the same width, or None where they are not plain memory."""
    is_plain = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()
    if not is_plain or tensor.element_size() not in BITS:
        return None
    return tensor.detach().contiguous().view(BITS[tensor.element_size()])


def checksum(whole: Tensor) -> bytes:
    """Return a short key of all bytes of `bits`, computed at the speed of memory: equal keys need a full comparison."""
    flat = whole.numpy().reshape(-1)
    count = flat.size // LANES * LANES
    sums, tail = flat[:count].reshape(-1, LANES).sum(0), flat[count:]
    return hashlib.blake2b(sums.tobytes() + tail.tobytes(), digest_size=16).digest()


def sample(index: Tensor) -> Hashable:
    """Return the shape, the dtype and a few columns of edges: equal edges have equal ones."""
    step = max(index.shape[-1] // SAMPLED_COLUMNS, 1) if index.dim() else 1
    return index.shape, index.dtype, index.numpy()[..., ::step].tobytes()


class Contents:
    """Values by the contents of tensors, compared bit by bit, as far as these are not too large."""

    def __init__(self) -> None:
        self.recent = Recent()

    def key(self, tensors: list[Tensor], options: Hashable) -> tuple[Hashable, list[Tensor]] | None:
        """Return a key of the contents and the bits that it stands for; None where a tensor has none."""
        parts = [bits(tensor) for tensor in tensors]
        whole = [part for part in parts if part is not None]
        if len(whole) != len(parts):
            return None
        return (
            tuple((t.dtype, t.shape, checksum(part)) for t, part in zip(tensors, whole, strict=True)),
            options,
        ), whole

    def get(self, key: tuple[Hashable, list[Tensor]]) -> Any:
        """Return the value of equal tensors, or None."""
        entry = self.recent.get(key[0])
        if entry is None or not all(map(torch.equal, entry[0], key[1])):
            return None
        return entry[1]

    def put(self, key: tuple[Hashable, list[Tensor]], value: Any) -> None:
        """Keep a value with a copy of the tensors, which later changes in place do not reach."""
        self.recent.put(key[0], ([part.clone() for part in key[1]], value), sum(part.numel() for part in key[1]))


def _owner(index: Tensor) -> Tensor:
    """Return the tensor that owns the memory of an index, which must live and not change for a match."""
    return index if index._base is None else index._base


def _place(index: Tensor | None) -> tuple[Any, ...] | None:
    return None if index is None else (index.data_ptr(), index.numel(), index.dtype, *index.stride())


def is_much(index: Tensor, features: int) -> bool:
    """Return whether one layer along edges gains as much by a structure as this costs."""
    return bool(index.shape) and index.shape[-1] * max(features, MIN_FEATURES) >= MIN_BUILD_WORK


class _ThreadCache(threading.local):
    is_plain = False


class GraphCache:
    """The graphs of edge indices, by their memory or else by their contents."""

    def __init__(self) -> None:
        self.by_place = Cache[tuple[Any, ...]](MAX_PLACES)
        self.by_targets = Cache[Hashable](MAX_PLACES)
        self.recent = Recent()
        self.uses: OrderedDict[Hashable, list[int]] = OrderedDict()  # by samples and by contents
        self.counted: dict[int, tuple[Any, int, list[int], bool]] = {}  # the same counts by the tensors that were seen
        self.local = _ThreadCache()

    def is_worth(self, index: Tensor, features: int = 0, uses: int = 1) -> bool:
        """Count uses of edges, and return whether a structure pays: if it saves much at once, or is used often."""
        if self.local.is_plain:
            return False
        if not MIN_USES or torch._C._are_functorch_transforms_active():
            return True
        owner = _owner(index)
        entry = self.counted.get(id(owner))
        if entry is not None and entry[0]() is owner and entry[1] == owner._version:
            count = entry[2]
            if not entry[3] and count[0] <= MIN_USES and is_much(index, features // 2):
                count = self._count(owner, [MIN_USES + 1])  # a wide layer after narrow ones
        elif type(owner) is not Tensor or is_much(index, features):
            if type(owner) is not Tensor or owner.is_inference():
                return True
            count = self._count(owner, [MIN_USES + 1])  # layers of less work use the structure, too
        else:
            count = self._uses_of(owner)
            if not owner.is_inference():  # otherwise it has no version
                self._count(owner, count)
        count[0] += uses
        return count[0] > MIN_USES

    def run_plainly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in which no edges are worth a structure, and none are counted."""
        before, self.local.is_plain = self.local.is_plain, True
        try:
            return function(*args)
        finally:
            self.local.is_plain = before

    def share_count(self, index: Tensor, derived: Tensor) -> None:
        """Count uses of edges that were derived from others as uses of these, whose contents were seen already."""
        entry = self.counted.get(id(_owner(index)))
        if entry is not None and not derived.is_inference():
            self._count(_owner(derived), entry[2], is_derived=True)

    def _count(self, owner: Tensor, count: list[int], is_derived: bool = False) -> list[int]:
        key = id(owner)
        forget = lambda _dead: self.counted.pop(key, None)  # noqa: E731
        self.counted[key] = ref(owner, forget), owner._version, count, is_derived
        return count

    def _uses_of(self, index: Tensor) -> list[int]:
        """Return the count that all tensors with this content share.

        A content is read in full only if its sample came before, so that edges which never return cost little.
        """
        if index.layout is not torch.strided or not index.is_cpu or index.dtype not in INTEGERS:
            return [0]
        few = sample(index)
        first = self.uses.get(few)
        if first is None:
            return self._keep_uses(few, [0])
        whole = bits(index)
        if whole is None:
            return [0]
        key = (few, checksum(whole))
        count = self.uses.get(key)
        if count is None:  # The first content with this sample was not read: it is taken for this one.
            count, first = first, [0]
        self._keep_uses(few, first)
        return self._keep_uses(key, count)

    def _keep_uses(self, key: Hashable, count: list[int]) -> list[int]:
        """Keep a count as the most recent one."""
        self.uses[key] = count
        try:
            self.uses.move_to_end(key)
            while len(self.uses) > MAX_COUNTED:
                self.uses.popitem(last=False)
        except KeyError:  # another thread has dropped it
            pass
        return count

    def of(self, targets: Tensor, sources: Tensor | None, rows: int, columns: int) -> Graph:
        """Return the graph of edges between nodes; without sources each edge has a column of its own."""
        key = (_place(targets), _place(sources), rows, columns)
        graph = self._at(key)
        if graph is None:
            graph = self._equal(targets, sources, rows, columns)
            self._note(key, targets, sources, graph)
        return graph

    def of_both(self, index: Tensor, at: tuple[int, int], rows: int, columns: int) -> Graph:
        """Return the graph whose targets and sources are two rows of one tensor; a match takes no rows out."""
        key = (index.data_ptr(), index.shape, index.stride(), index.dtype, at, rows, columns)
        graph = self._at(key)
        if graph is None:
            graph = self.of(index[at[0]], index[at[1]], rows, columns)
            if not torch.is_inference_mode_enabled() and not index.is_inference():
                owner = _owner(index)
                forget = lambda _dead: self.by_place.pop(key, None)  # noqa: E731
                self.by_place[key] = graph, (ref(owner, forget), owner._version)
        return graph

    def at_targets(self, targets: Tensor, rows: int) -> Graph | None:
        """Return the graph whose edges have these targets, or None."""
        key = self.by_targets.get((_place(targets), rows))
        return None if key is None else self._at(key)

    def _at(self, key: Hashable) -> Graph | None:
        graph, *owners = self.by_place.get(key, (None,))
        for reference, version in owners:
            owner = reference()
            if owner is None or owner._version != version:
                return None
        return graph

    def _note(self, key: tuple[Any, ...], targets: Tensor, sources: Tensor | None, graph: Graph) -> None:
        indices = [index for index in (targets, sources) if index is not None]
        if torch.is_inference_mode_enabled() or any(index.is_inference() for index in indices):
            return  # they have no versions
        target_key = (key[0], key[2])

        def forget(_dead: Any) -> None:
            self.by_place.pop(key, None)
            self.by_targets.pop(target_key, None)

        owners = [_owner(index) for index in indices]
        self.by_place[key] = (graph, *((ref(owner, forget), owner._version) for owner in owners))
        self.by_targets[target_key] = key

    def _equal(self, targets: Tensor, sources: Tensor | None, rows: int, columns: int) -> Graph:
        """Return the graph of equal indices, or a new one."""
        source_array = np.arange(targets.numel()) if sources is None else sources.numpy()
        index = np.stack([source_array, targets.numpy()])
        key = (rows, columns, index.shape[1], index.dtype, checksum(torch.from_numpy(index)))
        cached = self.recent.get(key)
        if cached is not None and np.array_equal(cached[0], index):
            return cached[1]
        graph = Graph(index, (columns, rows))
        self.recent.put(key, (index, graph), index.shape[1])
        return graph


__all__ = ["Contents", "GraphCache", "Recent"]
