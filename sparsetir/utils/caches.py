# SPDX-License-Identifier: Apache-2.0
"""Bounded caches, keys that differ wherever what is cached may, and properties and locks that forked processes can use.

Python takes 0.0 for -0.0 and 1 for True, while programs with these constants differ; `exact` makes keys that do, too.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar
from weakref import WeakSet

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

CACHES: dict[str, Cache[Any]] = {}  # those of the process, by name

_locks: WeakSet[ForkLock] = WeakSet()


class ForkLock:
    """A reentrant lock that is free in a forked child, where the thread that held it does not exist."""

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Forget who holds it."""
        self.lock = threading.RLock()

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; return whether this thread has it now."""
        return self.lock.acquire(blocking)

    def release(self) -> None:
        """Give it back."""
        with suppress(RuntimeError):  # the process was forked by the thread that held it
            self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:
        """A property that is computed once for each object and kept in its attributes, without a lock.

        That of Python 3.11 holds a lock of the class while it computes: two objects whose properties need each other's
        may wait for ever, and so does a process that is forked meanwhile. Here two threads may compute the same one.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = self.func = function
            self.__doc__, self.__module__ = function.__doc__, function.__module__
            self.name = function.__name__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            values = instance.__dict__
            if self.name not in values:
                # Not `setdefault`: the function may have stored the value of a base class by ``super()``.
                values[self.name] = self.function(instance)
            return values[self.name]


class Cache(Generic[V]):
    """Values by keys; beyond `size` of them, the least recently used are dropped.

    Uses are recorded from half of the size on, so that look-ups in a small cache take no longer than those in a dict.

    Examples
    --------
    >>> cache = Cache[int](2)
    >>> for key in "abc":
    ...     cache[key] = 1
    >>> list(cache), cache.get("a")
    (['b', 'c'], None)
    """

    def __init__(self, size: int) -> None:
        self.size, self.half = size, size // 2
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, default: Any = None) -> V | Any:
        """Return the value of a key, which is now the most recently used, or the default."""
        value = self._values.get(key, default)
        if value is not default and len(self._values) > self.half:
            try:
                self._values.move_to_end(key)
            except KeyError:  # another thread has dropped it since
                pass
        return value

    def __setitem__(self, key: Hashable, value: V) -> None:
        self._values[key] = value
        self.shrink()

    def shrink(self) -> None:
        """Drop what is beyond the size."""
        with suppress(KeyError):  # another thread may have dropped the last one
            while len(self._values) > self.size:
                self._values.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Any:
        return iter(list(self._values))

    def items(self) -> list[tuple[Hashable, V]]:
        """Return the keys and values, the least recently used first."""
        return list(self._values.items())

    def values(self) -> list[V]:
        """Return the values, the least recently used first."""
        return list(self._values.values())

    def pop(self, key: Hashable, default: Any = None) -> V | Any:
        """Remove a key and return its value, or the default."""
        return self._values.pop(key, default)

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()


def shared_cache(name: str, size: int) -> Cache[Any]:
    """Make a cache of the process, listed in `CACHES` by its name."""
    cache = CACHES[name] = Cache[Any](size)
    return cache


def remember(name: str, size: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that keeps the results of a function for its last arguments, up to `size` results.

    Examples
    --------
    >>> @remember("doctest", 8)
    ... def spell(number):
    ...     return f"{number}"
    >>> spell(0.0), spell(-0.0), spell(0), len(CACHES.pop("doctest"))
    ('0.0', '-0.0', '0', 3)
    """
    cache = shared_cache(name, size)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            key = exact((args, tuple(sorted(kwargs.items()))) if kwargs else args)
            value = cache.get(key, cache)
            if value is cache:
                value = cache[key] = function(*args, **kwargs)
            return value

        return call

    return decorate


def exact(value: Any) -> Hashable:
    """Return a key that is equal only for numbers of one type with the same bits; tuples are keys of their parts."""
    if isinstance(value, tuple):
        return (type(value), *map(exact, value))
    if isinstance(value, (float, complex, np.inexact)):
        return type(value), repr(value)
    return (type(value), value) if isinstance(value, (int, np.integer)) else value


__all__ = ["CACHES", "Cache", "ForkLock", "cached_property", "exact", "remember", "shared_cache"]
