# SPDX-License-Identifier: Apache-2.0
"""Compile programs with LLVM, once: kept in the process and on disk, keyed by content."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from sparsetir import op
from sparsetir.compile import disk_cache
from sparsetir.compile.disk_cache import cache_folder
from sparsetir.compile.pipeline import lowered, machine_code, scheduled, to_stage_2, to_stage_3
from sparsetir.errors import ScheduleError, SparseTIRError, VerifyError
from sparsetir.threads import get_num_threads

# Crossing TVM, where Ctrl-C mostly comes upon a build, it would become a RuntimeError that is taken for a failed one.
tvm_ffi.register_error(KeyboardInterrupt)

EXIT_SECONDS = 5.0


class Compiled:
    """The machine code of one function and how it came about.

    ``function`` takes the program's parameters in order. Its loops (`stage`, `source`) are made when asked for.
    """

    def __init__(self, func: tirx.PrimFunc, target: Any, schedule: Any) -> None:
        self.func, self.target, self.schedule = func, target, schedule
        self.name = str(func.attrs["global_symbol"])
        self.searched: set[str] = set()
        self.function: Callable[..., Any] = _not_loaded
        self.library: Any = None

    @cached_property
    def second(self) -> ir.IRModule:
        """The scheduled stage-II module."""
        return scheduled(to_stage_2(self.func), self.schedule, self.target)

    @cached_property
    def stages(self) -> dict[int, ir.IRModule]:
        """The scheduled stage-II module and the stage-III module."""
        if callable(self.schedule):
            return {2: self.second, 3: to_stage_3(self.second)}
        return lowered(to_stage_2(self.func), self.schedule, self.target)

    def stage(self, stage: int) -> tirx.PrimFunc:
        """The function at stage 2 or 3."""
        return self.stages[stage][self.name]

    def of(self, func: tirx.PrimFunc) -> Compiled:
        """Another program under the same schedule, not compiled yet."""
        if isinstance(self.schedule, s_tir.Schedule):
            raise ScheduleError("this kernel has a schedule of its own blocks: show it without sizes")
        return Compiled(func, self.target, self.schedule)

    def compile(self) -> None:
        """Lower and compile."""
        self.searched = searched_arrays(self.stages[2][self.name])
        self.library = machine_code(self.stages[3], self.target)
        self.function = self.library[self.name]

    def variant(self, **changes: int) -> Callable[..., Any]:
        """The same program with other choices, compiled when first asked for.

        Itself if its schedule was chosen, or where the other choices are refused: nobody asked for them.
        """
        if self.schedule is not None:
            return self.function
        from sparsetir.schedules import Registers, suit

        try:
            choices = suit.usual(self.func, Registers.of(self.target)).changed(**changes)
            return compile_cached(self.func, self.target, choices).function
        except SparseTIRError:
            return self.function

    def load(self, path: Path, facts: dict[str, Any]) -> None:
        """Take the machine code from a library on disk.

        Raises
        ------
        ValueError
            The library is not the one that was written.
        """
        if disk_cache.digest(path) != facts["digest"]:
            raise ValueError(f"{path} is damaged")
        self.library = tvm.runtime.load_module(str(path))
        self.function = self.library[self.name]
        self.searched = set(facts["searched"])

    def save(self, path: Path) -> None:
        """Write the library where `load` finds it."""
        disk_cache.write(self.library, path, {"searched": sorted(self.searched)})

    def source(self, kind: str) -> str:
        """LLVM IR (``"ll"``) or assembly (``"asm"``)."""
        if kind not in ("ll", "asm"):
            raise VerifyError(f"source is 'll' or 'asm', found {kind!r}; script(stage=3) shows the loops")
        if not hasattr(self.library, "mod"):
            self.library = machine_code(self.stages[3], self.target)
        return str(self.library.mod.inspect_source(kind))


def _not_loaded(*_args: Any) -> None:
    raise VerifyError("this function is not compiled yet")


def searched_arrays(func: tirx.PrimFunc) -> set[str]:
    """Names of the index arrays in which a lowered function looks coordinates up."""
    found: set[str] = set()

    def on_call(call: ir.Call) -> None:
        if op.is_call(call, "find"):
            found.add(str(call.args[0].source.name))

    tvm_ffi.structural_walk(func, (ir.Call, on_call))
    return found


# ---------------------------------------------------------------------------------------------- cache

_kernels: dict[str, Compiled] = {}
_pending: list[tuple[Compiled, Path]] = []
SHIPPED: dict[str, tuple[bytes, dict[str, Any]]] = {}  # of a file with kernels, while it is loaded


@cache
def versions() -> str:
    """What else decides the machine code: versions, and the compiler's own sources."""
    digest = hashlib.sha256()
    here = Path(__file__).parent.parent
    import sparsetir.schedules

    own = [*here.glob("*.py"), *(p for folder in ("call", "compile", "lower") for p in (here / folder).rglob("*.py"))]
    for path in sorted([*own, *Path(sparsetir.schedules.__file__).parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return f"{tvm.__version__} {np.__version__} {scipy.__version__} {digest.hexdigest()}"


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


atexit.register(write_cache, seconds=EXIT_SECONDS)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # the parent writes them


def compile_cached(func: tirx.PrimFunc, target: Any, schedule: Any) -> Compiled:
    """Compile, or find what was compiled before in this process or on disk."""
    compiled = Compiled(func, target, schedule)
    # A function may read anything, so its name or text would not do: what it makes of the loops does.
    key = content_key(func, target, compiled.second if callable(schedule) else schedule)
    if key in _kernels:
        return _kernels[key]
    folder = cache_folder()
    path = folder / f"{key}.so" if folder is not None else None
    if key in SHIPPED and _load_shipped(compiled, *SHIPPED[key]):
        _kernels[key] = compiled
        return compiled
    if path is None or not _load_quietly(compiled, path):
        compiled.compile()
        if path is not None:
            _pending.append((compiled, path))
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
