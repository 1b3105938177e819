# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels in memory and on disk, keyed by content."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from sparsetir.codegen.pipeline import lowered, machine_code, scheduled, to_stage_2, to_stage_3
from sparsetir.errors import ScheduleError, SparseTIRError, VerifyError, WriteError
from sparsetir.ir import dialect
from sparsetir.ir.effects import analyse
from sparsetir.ir.sizes import with_constants
from sparsetir.ir.views import decode
from sparsetir.ir.visitor import structural_walk
from sparsetir.lower.annotations import PADDED
from sparsetir.lower.checks.compiled import with_checked_results, with_checked_rows
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.utils.arguments import shown
from sparsetir.utils.caches import Cache, cached_property, shared_cache
from sparsetir.utils.files import CACHE_VARIABLE as CACHE_VARIABLE
from sparsetir.utils.files import PREFIX, cache_folder, make_private, replacing, warn_unwritable
from sparsetir.utils.packages import quick_source_digest, source_digest
from sparsetir.utils.threads import get_num_threads

# Whole files in the folder of compiled kernels.


MAX_VARIANTS = 64  # of a program, whose keys are kept
ROOM = 1 << 24  # bytes that a library may take, its object files included

# ---------------------------------------------------------------------------------------------- files


def digest(library: Path) -> str:
    """Return the hash that identifies an undamaged library."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def write(library: Any, path: Path, facts: dict[str, Any]) -> None:
    """Write a library and its metadata; readers see all of them or nothing, also after a power cut.

    Raises
    ------
    OSError
        There is no room.
    """
    make_private(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=PREFIX) as folder:
        check_room(Path(folder))
        # The facts get their name first: a library is looked for by its own.
        with replacing(path) as whole, replacing(path.with_suffix(".json")) as beside:
            library.export_library(str(whole), workspace_dir=folder)
            beside.write_text(json.dumps({**facts, "digest": digest(whole)}))


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write what is known of a library beside it, all or nothing.

    Raises
    ------
    OSError
        There is no room.
    """
    with replacing(path) as whole:
        whole.write_text(json.dumps(facts))


def check_room(folder: Path, size: int = ROOM) -> None:
    """Raise an OSError where a disk has no room: LLVM ends the process when it cannot write."""
    with tempfile.TemporaryFile(dir=folder) as trial:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(trial.fileno(), 0, size)
        elif shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def writing(path: Path, size: int = ROOM) -> Iterator[None]:
    """Make sure that a file of `size` bytes can be written, and name it where that fails all the same."""
    try:
        for folder in {path.parent, Path(tempfile.gettempdir())}:
            check_room(folder, size)
        yield
    except SparseTIRError:
        raise
    except OSError as error:
        raise WriteError(f"{path.name} cannot be written: {error.strerror or error}") from error


# The machine code of a function, made by LLVM or taken from a library.


# Crossing TVM, where Ctrl-C mostly comes upon a build, it would become a RuntimeError that is taken for a failed one.
tvm_ffi.register_error(KeyboardInterrupt)


class Compiled:
    """The machine code of one function and how it came about.

    ``function`` takes the program's parameters in order. Its loops (`stage`, `source`) are made when asked for.

    Parameters
    ----------
    func : PrimFunc
        At stage I.
    target : Target
    schedule : object
        As `sparsetir.build` takes it.
    stages : dict of int to IRModule, optional
        What it is lowered to, where that is known.
    """

    suffix = ""  # of the key, for machine code that differs for the same program

    def __init__(
        self, func: tirx.PrimFunc, target: Any, schedule: Any, stages: dict[int, ir.IRModule] | None = None
    ) -> None:
        self.func, self.target, self.schedule = func, target, schedule
        self.name = str(func.attrs["global_symbol"])
        self.searched: set[str] = set()
        self.function: Callable[..., Any] = _not_loaded
        self.library: Any = None
        self.variant_keys = Cache[str](MAX_VARIANTS)  # by the choices that were asked for
        self._stages = stages

    @cached_property
    def usual_choices(self) -> Choices:
        """The default choices for this function, independent of its arguments."""
        return defaults.usual(self.func, Registers.of(self.target))

    @cached_property
    def second(self) -> ir.IRModule:
        """The scheduled stage-II module."""
        return scheduled(to_stage_2(self.func), self.schedule, self.target)

    @cached_property
    def stages(self) -> dict[int, ir.IRModule]:
        """The scheduled stage-II module and the stage-III module."""
        return self._lowered() if self._stages is None else self._stages

    def _lowered(self) -> dict[int, ir.IRModule]:
        if callable(self.schedule):
            return {2: self.second, 3: to_stage_3(self.second)}
        return lowered(to_stage_2(self.func), self.schedule, self.target)

    def stage(self, stage: int) -> tirx.PrimFunc:
        """Return the function at stage 2 or 3."""
        return self.stages[stage][self.name]

    def of(self, func: tirx.PrimFunc) -> Compiled:
        """Return the machine code object of another program under the same schedule, not compiled yet."""
        if isinstance(self.schedule, s_tir.Schedule):
            raise ScheduleError("this kernel has a schedule of its own blocks: show it without sizes")
        return Compiled(func, self.target, self.schedule)

    def compile(self) -> None:
        """Lower and compile."""
        self.searched = searched_arrays(self.stages[2][self.name])
        self.library = machine_code(self.stages[3], self.target)
        self.function = self.library[self.name]

    def load(self, path: Path, facts: dict[str, Any]) -> None:
        """Load the machine code from a library on disk.

        Raises
        ------
        ValueError
            The library is not the one that was written.
        """
        self.read_library(path, facts)
        self.function = self.library[self.name]
        self.searched = set(facts["searched"])

    def read_library(self, path: Path, facts: dict[str, Any]) -> None:
        """Open a library after comparing its digest."""
        if digest(path) != facts["digest"]:
            raise ValueError(f"{path} is damaged")
        self.library = tvm.runtime.load_module(str(path))

    def save(self, path: Path) -> None:
        """Write the library where `load` finds it."""
        write(self.library, path, {"searched": sorted(self.searched)})

    def source(self, kind: str) -> str:
        """Return LLVM IR (``"ll"``) or assembly (``"asm"``)."""
        if not isinstance(kind, str) or kind not in ("ll", "asm"):
            raise VerifyError(f"source is 'll' or 'asm', got {shown(kind)}; script(stage=3) shows the loops")
        if not hasattr(self.library, "mod"):
            self.library = machine_code(self.stages[3], self.target)
        return str(self.library.mod.inspect_source(kind))


class CompiledLoops(Compiled):
    """Machine code of a function that is written at stage III."""

    def compile(self) -> None:
        """Compile the loops as they are."""
        self.library = machine_code(ir.IRModule({self.name: self.func}), self.target)
        self.function = self.library[self.name]


class CompiledWithChecks(Compiled):
    """Machine code that validates the index arrays of compressed rows as it reads them; see `with_checked_rows`.

    Raises
    ------
    ScheduleError
        The stages are asked for, and do not read each row just once.
    """

    suffix = "-checks"

    def _lowered(self) -> dict[int, ir.IRModule]:
        stages = super()._lowered()
        checked = with_checked_rows(decode(self.func), stages[3][self.name])
        if checked is None:
            raise ScheduleError(f"{self.name} does not read the rows of one matrix just once")
        return {**stages, 3: ir.IRModule({self.name: checked}, attrs=stages[3].attrs)}


class CompiledWithResultCheck(Compiled):
    """Machine code that raises a ValueError after results with NaN; see `with_checked_results`.

    Raises
    ------
    ScheduleError
        The results are not of one dimension and of float32 or float64.
    """

    suffix = "-results"

    def _lowered(self) -> dict[int, ir.IRModule]:
        stages = super()._lowered()
        checked = with_checked_results(stages[3][self.name], analyse(decode(self.func)).written)
        if checked is None:
            raise ScheduleError(f"{self.name} has results of several dimensions, or of other dtypes")
        return {**stages, 3: ir.IRModule({self.name: checked}, attrs=stages[3].attrs)}


def _not_loaded(*_args: Any) -> None:
    raise VerifyError("this function is not compiled yet")


def searched_arrays(func: tirx.PrimFunc) -> set[str]:
    """Return the names of the index arrays in which a lowered function looks coordinates up."""
    names: set[str] = set()

    def on_call(call: ir.Call) -> None:
        if dialect.is_call(call, "find"):
            names.add(str(call.args[0].source.name))
        for part in call.args[2:] if dialect.is_call(call, "find_union") else []:
            structural_walk(part, (ir.TensorLoad, lambda x: names.add(str(x.source.name))))

    structural_walk(func, (ir.Call, on_call))
    return names


# Programs are compiled once: machine code is kept in the process and on disk, keyed by content.


EXIT_SECONDS = 5.0


MAX_PENDING = 128  # kernels that wait for the disk: beyond them, the first ones are written at once

_kernels = shared_cache("compiled kernels", 256)
_pending: list[tuple[Compiled, Path]] = []
SHIPPED: dict[str, tuple[bytes, dict[str, Any]]] = {}  # of a file with kernels, while it is loaded


@cache
def versions() -> str:
    """Return what decides the machine code besides the program: versions, and this package's own sources."""
    folder = cache_folder()
    digest = source_digest() if folder is None else quick_source_digest(folder)
    return f"{tvm.__version__} {np.__version__} {scipy.__version__} {digest}"


def content_key(func: tirx.PrimFunc, target: Any, schedule: Any) -> str:
    """Return a key for the machine code of a program, target and schedule, which may be a scheduled module."""
    loops = schedule.mod if isinstance(schedule, s_tir.Schedule) else schedule
    text = loops.script() if isinstance(loops, ir.IRModule) else repr(schedule)
    parts = [tvm.ir.save_json(func), str(target), text, str(get_num_threads()), versions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def write_cache(*, seconds: float | None = None) -> None:
    """Write the kernels compiled so far to disk; done for `EXIT_SECONDS` when the process ends.

    Not in the background: LLVM does not allow a second thread during a compilation.

    Parameters
    ----------
    seconds : float, optional
        Stop after this long; the newest kernels come first.
    """
    stop = time.monotonic() + (math.inf if seconds is None else seconds)
    while time.monotonic() < stop:
        try:
            compiled, path = _pending.pop()
        except IndexError:  # none is left
            return
        _keep(compiled, path)


def write_one(compiled: Compiled) -> None:
    """Write one pending kernel to disk now."""
    for entry in [entry for entry in list(_pending) if entry[0] is compiled]:
        try:
            _pending.remove(entry)
        except ValueError:  # another thread writes it
            continue
        _keep(*entry)


def _keep(compiled: Compiled, path: Path) -> None:
    """Write a kernel to disk: a full disk or a missing linker costs the cache, not the kernel."""
    try:
        compiled.save(path)
    except OSError as error:
        warn_unwritable(path.parent, error)
    except Exception:  # no linker
        return


def _limit_pending() -> None:
    """Write the kernels that wait longest while there are too many: each holds its loops and its machine code."""
    for compiled, _path in _pending[: max(len(_pending) - MAX_PENDING, 0)]:
        write_one(compiled)


def waiting() -> int:
    """Return the number of kernels to be written to disk."""
    return len(_pending)


def forget() -> None:
    """Clear the in-memory cache and the pending writes; the disk cache is kept."""
    _kernels.clear()
    _pending.clear()


@contextlib.contextmanager
def separate() -> Iterator[None]:
    """Isolate the in-memory cache: kernels compiled inside are not found outside, nor the reverse."""
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
    return _compiled_as(_key(compiled), compiled)


def _key(compiled: Compiled) -> str:
    """Return the key of a function under its schedule."""
    schedule = compiled.schedule
    # A function may read anything, so its name or text would not do: what it makes of the loops does.
    schedule = compiled.second if callable(schedule) else schedule
    return content_key(compiled.func, compiled.target, schedule) + compiled.suffix


def _compiled_as(key: str, compiled: Compiled) -> Compiled:
    """Return what is kept for a key, else compile and keep it."""
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


def variant(compiled: Compiled, sizes: Mapping[str, int] | None = None, **changes: int) -> Callable[..., Any]:
    """Return the function of the same program with other choices, compiled when first asked for.

    Return the function itself if its schedule was chosen by the user, or if the other choices are refused.

    Parameters
    ----------
    compiled : Compiled
    sizes : mapping of str to int, optional
        Sizes to compile in; they remain parameters, which are ignored.
    **changes : int
    """
    if compiled.schedule is not None:
        return compiled.function
    try:
        return _compiled_variant(compiled, sizes, changes).function
    except SparseTIRError:
        return compiled.function


def variant_with_checks(
    compiled: Compiled, sizes: Mapping[str, int] | None = None, **changes: int
) -> Callable[..., Any] | None:
    """Return a function of the same program that validates the index arrays it reads, or None where there is none.

    It raises a ValueError with `sparsetir.lower.checks.compiled.ROWS_MESSAGE` at the first wrong row. Parameters as for
    `variant`.
    """
    if compiled.schedule is not None:
        return None
    try:
        return _compiled_variant(compiled, sizes, changes, CompiledWithChecks).function
    except SparseTIRError:
        return None


def variant_with_padded_rows(
    compiled: Compiled, padded: Mapping[str, int], sizes: Mapping[str, int] | None = None, **changes: int
) -> Callable[..., Any] | None:
    """Return a function of the same program for arrays with gaps between their rows, or None where there is none.

    Parameters
    ----------
    compiled : Compiled
    padded : mapping of str to int
        By the name of an array, the length of its rows in memory, in elements.
    sizes, **changes
        As for `variant`.
    """
    if compiled.schedule is not None:
        return None
    try:
        return _compiled_variant(compiled, sizes, changes, padded=padded).function
    except SparseTIRError:
        return None


def _compiled_variant(
    compiled: Compiled,
    sizes: Mapping[str, int] | None,
    changes: Mapping[str, int],
    make: type[Compiled] | None = None,
    padded: Mapping[str, int] | None = None,
) -> Compiled:
    kind = make or type(compiled)
    parts = (sorted((part or {}).items()) for part in (sizes, changes, padded))
    asked = (kind, get_num_threads(), *map(tuple, parts))
    ready: Compiled | None = _kernels.get(compiled.variant_keys.get(asked))
    if ready is not None:
        return ready
    choices = compiled.usual_choices.changed(**changes)
    func = with_constants(compiled.func, sizes) if sizes else compiled.func
    if padded:
        func = func.with_attr(PADDED, [f"{name}:{length}" for name, length in padded.items()])
    other = kind(func, compiled.target, choices)
    key = compiled.variant_keys[asked] = _key(other)
    return _compiled_as(key, other)


__all__ = [
    "SHIPPED",
    "Compiled",
    "CompiledLoops",
    "CompiledWithChecks",
    "CompiledWithResultCheck",
    "cache_folder",
    "compile_cached",
    "content_key",
    "digest",
    "forget",
    "separate",
    "variant",
    "variant_with_checks",
    "variant_with_padded_rows",
    "versions",
    "waiting",
    "write",
    "write_cache",
    "write_facts",
    "write_one",
    "writing",
]
