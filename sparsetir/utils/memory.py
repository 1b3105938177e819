# SPDX-License-Identifier: Apache-2.0
"""Memory of the machine and this process, the error for allocations that do not fit, and pauses of garbage collection.

Garbage collection pauses while a program is parsed or compiled, and runs less often during a search: TVM and what is
imported with it are half a million objects, a full collection takes as long as a small kernel takes to compile, and
the many objects of a lowering set it off.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np

from sparsetir.errors import StructureError

# How much memory there is, and the error of what would not fit into it.


CONTROL_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class MemoryLimitError(StructureError, MemoryError):
    """A format would need more memory for a tensor than there is."""


def check_memory(nbytes: int, what: str) -> None:
    """Raise `MemoryLimitError` where `what` needs at least `nbytes` and the memory is smaller."""
    if not fits(nbytes):
        fault = f"{what} would take {readable(nbytes)} or more"
        raise MemoryLimitError(f"{fault}, but there are {readable(memory_size())} of memory")


def raise_of_memory(error: Exception, what: str) -> NoReturn:
    """Raise `MemoryLimitError` for an allocation of compiled code that failed, and any other error as it is."""
    if "bad_alloc" not in str(error):
        raise error
    raise MemoryLimitError(f"{what} needs more memory for its scratch than there is") from None


def fits(nbytes: int) -> bool:
    """Return whether there is so much memory at all."""
    return nbytes <= memory_size()


def check_values(count: int, dtype: np.dtype[Any]) -> None:
    """Raise `MemoryLimitError` where that many values of a dtype do not fit into memory."""
    check_memory(count * dtype.itemsize, f"{count} values")


@cache
def memory_size() -> int:
    """Bytes of memory of the machine or, where that is less, of the container; no limit where the system is silent."""
    return min(_of_machine(), *map(_of_control_group, CONTROL_GROUPS))


def _of_machine() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _of_control_group(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize


def readable(nbytes: int) -> str:
    """Return a number of bytes in the largest unit of which there is at least one."""
    power = next((k for k in range(4) if nbytes < 1024 ** (k + 1)), 4)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{nbytes / 1024**power:.{min(power, 1)}f} {unit}"


# Memory of this process, as Linux tells it.


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """Bytes of this process: ``"VmRSS"`` now, ``"VmHWM"`` at most since `forget_peak`."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Give freed memory back, and reset the peak."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    CLEAR.write_text("5")


def added(call: Callable[[], object]) -> int | None:
    """Bytes that a call adds at its peak, its result among them; None where the system does not tell."""
    try:
        forget_peak()
    except OSError:
        return None
    before = resident("VmRSS")
    result = call()
    peak = resident("VmHWM") - before
    del result
    return peak


# ---------------------------------------------------------------------------------- garbage collection


P = ParamSpec("P")
R = TypeVar("R")


_pausing: list[bool] = []  # by threads that turned garbage collection off


def _collect_again() -> None:
    """Turn garbage collection on in a forked process, where the threads that would do it are not."""
    if _pausing:
        _pausing.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_again)


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
        if was_on:
            _pausing.append(True)
        try:
            return function(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()
                with suppress(IndexError):
                    _pausing.pop()

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


__all__ = [
    "CLEAR",
    "STATUS",
    "MemoryLimitError",
    "added",
    "check_memory",
    "check_values",
    "fits",
    "forget_peak",
    "memory_size",
    "old_objects_aside",
    "readable",
    "resident",
    "uncollected",
]
