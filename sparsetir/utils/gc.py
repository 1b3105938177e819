# SPDX-License-Identifier: Apache-2.0
"""No garbage collection while a program is parsed or compiled, and less of it during a search.

TVM and what is imported with it are half a million objects: a full collection takes as long as a small kernel takes to
compile, and the many objects of a lowering set it off.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def uncollected(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs without garbage collection, which goes on afterwards where it was on.

    Examples
    --------
    >>> import gc
    >>> uncollected(gc.isenabled)(), gc.isenabled()
    (False, True)
    """

    @wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return paused


@contextmanager
def old_objects_aside() -> Iterator[None]:
    """Leave the objects that there are out of garbage collections; what is made meanwhile is collected as ever.

    Nothing changes where objects were frozen before.

    Examples
    --------
    >>> import gc
    >>> before = gc.get_freeze_count()
    >>> with old_objects_aside():
    ...     print(gc.get_freeze_count() > 0, gc.isenabled())
    True True
    >>> gc.get_freeze_count() == before
    True
    """
    is_first = gc.get_freeze_count() == 0
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()


__all__ = ["old_objects_aside", "uncollected"]
