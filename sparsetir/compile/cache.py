# SPDX-License-Identifier: Apache-2.0
"""Programs are compiled once: machine code is kept in the process and on disk, keyed by content."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import tvm
from tvm import ir, s_tir, tirx

from sparsetir.caches import shared_cache
from sparsetir.compile.compiled import Compiled
from sparsetir.compile.disk_cache import cache_folder
from sparsetir.errors import SparseTIRError
from sparsetir.schedules import Registers, suit
from sparsetir.threads import get_num_threads
from sparsetir.version import source_digest

EXIT_SECONDS = 5.0


MAX_PENDING = 128  # kernels that wait for the disk: beyond them, the first ones are written at once

_kernels = shared_cache("compiled kernels", 256)
_pending: list[tuple[Compiled, Path]] = []
SHIPPED: dict[str, tuple[bytes, dict[str, Any]]] = {}  # of a file with kernels, while it is loaded


@cache
def versions() -> str:
    """Return what decides the machine code besides the program: versions, and this package's own sources."""
    return f"{tvm.__version__} {np.__version__} {scipy.__version__} {source_digest()}"


def content_key(func: tirx.PrimFunc, target: Any, schedule: Any) -> str:
    """A name for the machine code of a program, target and schedule, which may be a scheduled module."""
    loops = schedule.mod if isinstance(schedule, s_tir.Schedule) else schedule
    text = loops.script() if isinstance(loops, ir.IRModule) else repr(schedule)
    parts = [tvm.ir.save_json(func), str(target), text, str(get_num_threads()), versions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def write_cache(*, seconds: float | None = None) -> None:
    """Put the kernels compiled so far on disk. It happens by itself when the process ends, for `EXIT_SECONDS`.

    Not in the background: LLVM does not allow a second thread during a compilation.

    Parameters
    ----------
    seconds : float, optional
        Stop after this long; the newest kernels come first.
    """
    stop = time.monotonic() + (math.inf if seconds is None else seconds)
    while _pending and time.monotonic() < stop:
        compiled, path = _pending.pop()
        # A full disk or a missing linker costs the cache, not the kernel.
        with contextlib.suppress(Exception):
            compiled.save(path)


def write_one(compiled: Compiled) -> None:
    """Put one kernel on disk now, if it waits for that."""
    for entry in [entry for entry in _pending if entry[0] is compiled]:
        _pending.remove(entry)
        with contextlib.suppress(Exception):
            compiled.save(entry[1])


def _limit_pending() -> None:
    """Write the kernels that wait longest while there are too many: each holds its loops and its machine code."""
    for compiled, _path in _pending[: max(len(_pending) - MAX_PENDING, 0)]:
        write_one(compiled)


def waiting() -> int:
    """How many kernels are to be written to the disk."""
    return len(_pending)


def forget() -> None:
    """Start anew, as another process does: nothing is compiled, and nothing waits; what is on disk stays."""
    _kernels.clear()
    _pending.clear()


@contextlib.contextmanager
def separate() -> Iterator[None]:
    """Kernels compiled inside are not found outside, nor the other way round, but for those on disk."""
    kernels, pending = _kernels.items(), list(_pending)
    forget()
    try:
        yield
    finally:
        forget()
        for key, compiled in kernels:
            _kernels[key] = compiled
        _pending.extend(pending)


atexit.register(write_cache, seconds=EXIT_SECONDS)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # the parent writes them


def compile_cached(func: tirx.PrimFunc, target: Any, schedule: Any, make: type[Compiled] = Compiled) -> Compiled:
    """Compile, or find what was compiled before in this process or on disk."""
    compiled = make(func, target, schedule)
    # A function may read anything, so its name or text would not do: what it makes of the loops does.
    key = content_key(func, target, compiled.second if callable(schedule) else schedule)
    ready: Compiled | None = _kernels.get(key)
    if ready is not None:
        return ready
    folder = cache_folder()
    path = folder / f"{key}.so" if folder is not None else None
    if key in SHIPPED and _load_shipped(compiled, *SHIPPED[key]):
        _kernels[key] = compiled
        return compiled
    if path is None or not _load_quietly(compiled, path):
        compiled.compile()
        if path is not None:
            _pending.append((compiled, path))
            _limit_pending()
    _kernels[key] = compiled
    return compiled


def _load_shipped(compiled: Compiled, library: bytes, facts: dict[str, Any]) -> bool:
    with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(library)
        compiled.load(path, facts)
        return True
    return False


def _load_quietly(compiled: Compiled, path: Path) -> bool:
    try:
        if not path.exists():
            return False
        compiled.load(path, json.loads(path.with_suffix(".json").read_text()))
    except Exception:  # damaged, or of another version: it is compiled again
        return False
    return True


def variant(compiled: Compiled, **changes: int) -> Callable[..., Any]:
    """The function of the same program with other choices, compiled when first asked for.

    Itself if its schedule was chosen, or where the other choices are refused: nobody asked for them.
    """
    if compiled.schedule is not None:
        return compiled.function
    try:
        choices = suit.usual(compiled.func, Registers.of(compiled.target)).changed(**changes)
        return compile_cached(compiled.func, compiled.target, choices).function
    except SparseTIRError:
        return compiled.function


__all__ = [
    "SHIPPED",
    "compile_cached",
    "content_key",
    "forget",
    "separate",
    "variant",
    "versions",
    "waiting",
    "write_cache",
    "write_one",
]
