# SPDX-License-Identifier: Apache-2.0
"""The machine code of a program with computed patterns: several functions in one library."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from tvm import ir, tirx

from sparsetir.assemble.functions import Functions
from sparsetir.assemble.options import FIRST, FUNCTIONS, Options
from sparsetir.assemble.program import Assembly, assemble
from sparsetir.assemble.rows import lower_rows
from sparsetir.compile.compiled import Compiled
from sparsetir.compile.pipeline import machine_code
from sparsetir.errors import VerifyError, own_errors
from sparsetir.lower import TO_FLAT, run
from sparsetir.lower.host.promote_halves import PromoteHalves

LATE = [tirx.transform.ConvertSSA(), PromoteHalves, *TO_FLAT]


class AssembledCompiled(Compiled):
    """Like `Compiled`, with several functions: see `sparsetir.assemble.functions`."""

    @cached_property
    def assembly(self) -> Assembly:
        """The program with dense stand-ins."""
        with own_errors():
            return assemble(self.func)

    @cached_property
    def functions(self) -> Functions:
        """What makes its functions."""
        with own_errors():
            return Functions(self.assembly, lower_rows(self.assembly), self.schedule or Options())

    @cached_property
    def held(self) -> tuple[str, ...]:
        """The names of the functions that are compiled with it."""
        names = (self.schedule or Options()).functions
        return ("alone",) if names == FIRST and self.assembly.merge is not None else names

    @cached_property
    def stages(self) -> dict[int, ir.IRModule]:
        """All functions, those that wait for a call that wants them, too."""
        made = self._module(FUNCTIONS)
        return {2: made, 3: run(LATE, made)}

    def stage(self, stage: int) -> Any:
        """All functions at a stage."""
        return self.stages[stage]

    def compile(self) -> None:
        """Lower and compile the functions that it holds."""
        made = self._module(self.held)
        self.library = machine_code(run(LATE, made), self.target)

    def _module(self, names: tuple[str, ...]) -> ir.IRModule:
        with own_errors():
            return self.functions.module(names)

    def load(self, path: Path, facts: dict[str, Any]) -> None:
        """Take the machine code from a library on disk."""
        self.read_library(path, facts)

    def named(self, name: str) -> Callable[..., Any]:
        """One of the functions."""
        if self.library is None:
            raise VerifyError("this program is not compiled yet")
        found: Callable[..., Any] = self.library[f"{self.name}_{name}"]
        return found

    def of(self, func: tirx.PrimFunc) -> Compiled:
        """Another program, not compiled yet."""
        return AssembledCompiled(func, self.target, self.schedule)


__all__ = ["AssembledCompiled"]
