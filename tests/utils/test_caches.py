# SPDX-License-Identifier: Apache-2.0
"""Caches are bounded: after more expressions than a bound says, no more than that are kept, and results stay right."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.codegen import cache
from sparsetir.einsum import expression
from sparsetir.utils.caches import CACHES, Cache, ForkLock, cached_property
from sparsetir.utils.memory import uncollected

BOUND = 3
OF_EXPRESSIONS = ("einsum expressions", "kernels of einsum", "programs of einsum", "compiled kernels")
A = sp.random_array((6, 5), density=0.4, format="csr", rng=np.random.default_rng(0))


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with cache.separate():
        for name in OF_EXPRESSIONS:
            monkeypatch.setattr(CACHES[name], "size", BOUND)
            CACHES[name].shrink()
        yield


def evaluate(count: int) -> None:
    """Compare expressions with numpy: products of ever more vectors along the columns."""
    for number in range(1, count + 1):
        vectors = [np.full(5, 1.0 + n) for n in range(number)]
        text = f"ij,{','.join('j' * number)},i->ij"
        dense = sparsetir.einsum(text, A, *vectors, np.ones(6))
        np.testing.assert_allclose(dense.toarray(), A.toarray() * np.prod(vectors, axis=0))
        np.testing.assert_allclose(sparsetir.einsum("ij,j->i", A * number, vectors[0]), number * A.sum(1))


@pytest.mark.slow
@pytest.mark.usefixtures("low_bounds")
def test_many_expressions_leave_bounded_caches() -> None:
    evaluate(3 * BOUND)
    sizes = {name: len(CACHES[name]) for name in OF_EXPRESSIONS}
    assert all(0 < size <= BOUND for size in sizes.values()), sizes
    evaluate(2)  # what was dropped is made again


@pytest.mark.slow
@pytest.mark.usefixtures("low_bounds")
def test_kernels_that_were_dropped_are_freed() -> None:
    evaluate(1)
    first = [weakref.ref(kept) for kept in expression._expressions.values()]
    evaluate(3 * BOUND)
    gc.collect()
    assert [kept for kept in first if kept() is not None and kept() not in expression._expressions.values()] == []
    assert any(kept() is None for kept in first)


def test_kernels_that_wait_for_the_disk_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "MAX_PENDING", 2)
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    with cache.separate():
        for name in OF_EXPRESSIONS:  # what other tests compiled would not be compiled here
            CACHES[name].clear()
        evaluate(4)
        assert cache.waiting() <= 2
        assert len(list(tmp_path.glob("*.so"))) >= 1


def test_the_least_recently_used_are_dropped() -> None:
    kept = Cache[int](2)
    kept["a"], kept["b"] = 1, 2
    assert kept.get("a") == 1
    kept["c"] = 3
    assert list(kept) == ["a", "c"]
    assert ("b" in kept, kept.get("b", 0), kept.pop("a"), kept.pop("a", None)) == (False, 0, 1, None)


def test_threads_share_a_cache() -> None:
    kept, faults = Cache[int](4), []

    def use(first: int) -> None:
        for n in range(2000):
            key = (first + n) % 9
            kept[key] = key
            value = kept.get(key, key)
            faults.extend([] if value == key else [value])

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(kept) <= 4


class Pair:
    """Two properties, each of which needs the other one of another object."""

    def __init__(self, partner: Pair | None = None) -> None:
        self.partner, self.barrier = partner, threading.Barrier(2)

    @cached_property
    def first(self) -> int:
        if self.partner is None:
            return 1
        self.barrier.wait(10)
        return self.partner.second

    @cached_property
    def second(self) -> int:
        if self.partner is None:
            return 2
        self.barrier.wait(10)
        return self.partner.first


def test_properties_of_two_objects_do_not_wait_for_each_other() -> None:
    """Those of `functools` hold a lock of the class in Python 3.11, and both threads would wait for ever."""
    one, two = Pair(Pair()), Pair(Pair())
    two.barrier = one.barrier
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(one.first), daemon=True),
        threading.Thread(target=lambda: found.append(two.second), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [1, 2]
    assert (one.first, two.second) == (2, 1)
    assert Pair.first.__doc__ is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_locks_that_nobody_holds() -> None:
    lock, held, done = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(20)

    collecting = uncollected(lambda: (held.set(), done.wait(20)))
    for target in (hold, collecting):
        held.clear()
        done.clear()
        thread = threading.Thread(target=target)
        thread.start()
        held.wait(20)
        child = os.fork()
        if child == 0:
            os._exit(0 if lock.acquire(blocking=False) and gc.isenabled() else 1)
        done.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
