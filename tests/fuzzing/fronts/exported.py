# SPDX-License-Identifier: Apache-2.0
"""Exported kernels called through their C function: results, sizes of zero, and each pointer NULL in turn."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import sparsetir
from corpus import BY_NAME
from corpus.running import copied, draw
from fuzzing.case import Case, Expected, Finding, Front, difference
from fuzzing.values import PRELUDE, literal
from sparsetir.codegen.export import Interface

HAS_COMPILER = sys.platform == "linux" and any(map(shutil.which, ("cc", "gcc", "clang")))
C_TYPES = {f"{kind}_t": getattr(ctypes, f"c_{kind}") for kind in ("int8", "uint8", "int16", "uint16", "int32", "int64")}
C_TYPES |= {"float": ctypes.c_float, "double": ctypes.c_double}
CALL = """
import ctypes

library = tempfile.mkdtemp() + "/libkernel.so"
sparsetir.build(sparsetir.parse(text)).export(library)
loaded = ctypes.CDLL(library)
passed = [value if array is None else ctypes.c_void_p(array.ctypes.data) for array, value in arguments]
status = getattr(loaded, name)(*passed)
"""


@lru_cache(maxsize=1)
def folder() -> Path:
    made = tempfile.mkdtemp(prefix="exported")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


class Exported:
    """A program of the corpus as a library."""

    def __init__(self, name: str, dtype: str, idtype: str) -> None:
        self.case = BY_NAME[name]
        self.program = self.case.make(dtype, idtype)
        self.kernel = sparsetir.build(self.program)
        path = folder() / f"lib{len(list(folder().iterdir()))}.so"
        self.kernel.export(path)
        self.interface = Interface(self.kernel)
        self.loaded = ctypes.CDLL(str(path))
        getattr(self.loaded, f"{self.interface.name}_last_error").restype = ctypes.c_char_p

    def ready(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """All arguments of the C function: outputs allocated, sizes known."""
        gathered = self.kernel.signature.gather(copied(arguments))
        self.kernel.signature.allocate(gathered)
        return {**gathered.arrays, **gathered.sizes}

    def passed(self, arguments: dict[str, Any], null: str | None) -> list[Any]:
        """Arguments as C values."""
        values: list[Any] = []
        for parameter in self.interface.parameters:
            value = arguments[parameter.symbol]
            if parameter.shape is None:
                values.append(C_TYPES[parameter.declaration.split()[0]](value))
            else:
                values.append(None if parameter.symbol == null else ctypes.c_void_p(value.ctypes.data))
        return values

    def call(self, arguments: dict[str, Any], null: str | None) -> str:
        """The message of a call; "" for success."""
        if getattr(self.loaded, self.interface.name)(*self.passed(arguments, null)) == 0:
            return ""
        message = getattr(self.loaded, f"{self.interface.name}_last_error")().decode()
        return message or "an error without a message"


@lru_cache(maxsize=2)
def exported(name: str, dtype: str, idtype: str) -> Exported:
    return Exported(name, dtype, idtype)


@dataclass(frozen=True)
class ExportedCase(Case):
    """A call of an exported kernel; `null` names the array that is not there."""

    name: str
    dtype: str
    idtype: str
    kind: str
    null: str | None = None

    def run(self) -> Finding | None:
        library = exported(self.name, self.dtype, self.idtype)
        arguments = draw(library.case, self.kind, self.dtype, self.idtype)
        ready = library.ready(arguments)
        message = library.call(ready, self.null)
        if self.null is not None:
            is_empty = ready[self.null].size == 0
            if message or is_empty:
                return None
            return Finding("wrong", "NULL is taken", f"{self.null} is NULL, and the function returns success")
        if message:
            return Finding("wrong", "an error of sound arguments", message)
        return self.compared(library, arguments, ready)

    def compared(self, library: Exported, arguments: dict[str, Any], ready: dict[str, Any]) -> Finding | None:
        """Compare the results with the oracle of the corpus."""
        tolerance = library.case.tolerance_for(self.dtype)
        for name, want in zip(library.case.output_names, library.case.expected(arguments), strict=True):
            slack = tolerance * (1 + np.abs(np.nan_to_num(np.asarray(want, np.float64))))
            text = difference(np.asarray(ready[name]), Expected(want, slack))
            if text:
                return Finding("wrong", f"result of {self.name}", f"{name}: {text}")
        return None

    def smaller(self) -> Iterator[Case]:
        return iter(())

    def script(self) -> str:
        library = exported(self.name, self.dtype, self.idtype)
        arguments = draw(library.case, self.kind, self.dtype, self.idtype)
        ready = library.ready(arguments)
        lines = [
            PRELUDE,
            "import ctypes, tempfile",
            f"text = '''{sparsetir.script(library.program)}'''",
            "arguments = []",
        ]
        for parameter in library.interface.parameters:
            value = ready[parameter.symbol]
            if parameter.shape is None:
                kind = C_TYPES[parameter.declaration.split()[0]].__name__
                lines += [f"arguments += [(None, ctypes.{kind}({value}))]"]
            elif parameter.symbol == self.null:
                lines += [f"arguments += [(None, None)]  # {parameter.symbol}"]
            else:
                lines += [f"{parameter.name} = {literal(value)}", f"arguments += [({parameter.name}, None)]"]
        lines += [f"name = {library.interface.name!r}", CALL]
        if self.null is not None:
            lines += [
                f"print('expected an error, as {self.null} is NULL')",
                "print('got     ', status)",
                "raise SystemExit(status == 0)",
            ]
        else:
            for name, want in zip(library.case.output_names, library.case.expected(arguments), strict=True):
                lines += [
                    f"print('expected', {name!r}, {np.asarray(want).tolist()})",
                    f"print('got     ', {name}.tolist())",
                ]
            lines += ["raise SystemExit(1)  # compare the two"]
        return "\n".join([*lines, ""])


class Exporteds(Front):
    """The programs of the corpus, from C."""

    name, groups, optimised, patience = "exported", 1, True, 1 << 30

    def draw(self, rng: Random) -> Iterator[Case]:
        if not HAS_COMPILER:
            return
        case = BY_NAME[rng.choice(sorted(BY_NAME))]
        dtype, idtype = rng.choice(case.dtypes), rng.choice(["int32", "int64"])
        for kind in case.kinds:
            yield ExportedCase(case.name, dtype, idtype, kind)
        for parameter in exported(case.name, dtype, idtype).interface.parameters:
            if parameter.shape is not None:
                yield ExportedCase(case.name, dtype, idtype, rng.choice(case.kinds), parameter.symbol)


__all__ = ["ExportedCase", "Exporteds"]
