# SPDX-License-Identifier: Apache-2.0
"""The machine code of a function, made by LLVM or taken from a library."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from sparsetir import op
from sparsetir.compile import disk_cache
from sparsetir.compile.pipeline import lowered, machine_code, scheduled, to_stage_2, to_stage_3
from sparsetir.errors import ScheduleError, VerifyError
from sparsetir.walks import structural_walk

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

    def __init__(
        self, func: tirx.PrimFunc, target: Any, schedule: Any, stages: dict[int, ir.IRModule] | None = None
    ) -> None:
        self.func, self.target, self.schedule = func, target, schedule
        self.name = str(func.attrs["global_symbol"])
        self.searched: set[str] = set()
        self.function: Callable[..., Any] = _not_loaded
        self.library: Any = None
        self._stages = stages

    @cached_property
    def second(self) -> ir.IRModule:
        """The scheduled stage-II module."""
        return scheduled(to_stage_2(self.func), self.schedule, self.target)

    @cached_property
    def stages(self) -> dict[int, ir.IRModule]:
        """The scheduled stage-II module and the stage-III module."""
        if self._stages is not None:
            return self._stages
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

    def load(self, path: Path, facts: dict[str, Any]) -> None:
        """Take the machine code from a library on disk.

        Raises
        ------
        ValueError
            The library is not the one that was written.
        """
        self.read_library(path, facts)
        self.function = self.library[self.name]
        self.searched = set(facts["searched"])

    def read_library(self, path: Path, facts: dict[str, Any]) -> None:
        """Open a library, once it is the one that was written."""
        if disk_cache.digest(path) != facts["digest"]:
            raise ValueError(f"{path} is damaged")
        self.library = tvm.runtime.load_module(str(path))

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
        for part in call.args[2:] if op.is_call(call, "find_union") else []:
            structural_walk(part, (ir.TensorLoad, lambda x: found.add(str(x.source.name))))

    structural_walk(func, (ir.Call, on_call))
    return found


__all__ = ["Compiled"]
