# SPDX-License-Identifier: Apache-2.0
"""Operations on the tile registers of AMX, as calls of functions with one tile number in each name.

A tile number is part of an instruction, so that a function takes it by its name: ``st_tile_load_2(address, stride)``.
The functions are LLVM IR where the target has the unit. Under `emulated` they stay external, and C code that a test
loads computes the same (`sparsetir.codegen.tiles`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tvm import ir, tirx

CONFIGURATION_BYTES = 64
TILES, ROWS, ROW_BYTES = 8, 16, 64  # registers, and the size of each
PALETTE = 1
ROW_BYTES_AT, ROWS_AT = 16, 48  # offsets in the configuration: two bytes a register, one byte a register
IMPORT = "pragma_import_llvm"

_emulated: ContextVar[bool] = ContextVar("emulated", default=False)


@contextmanager
def emulated() -> Iterator[None]:
    """Emit calls of external functions in place of tile instructions while the block runs."""
    token = _emulated.set(True)
    try:
        yield
    finally:
        _emulated.reset(token)


def is_emulated() -> bool:
    """Return whether tile operations are calls of external functions."""
    return _emulated.get()


def call(name: str, *arguments: Any) -> tirx.Stmt:
    """Return the statement that calls one of the functions."""
    return tirx.Evaluate(tirx.call_extern("void", f"st_tile_{name}", *arguments))


def zero(tile: int) -> tirx.Stmt:
    """Return the statement that clears a tile."""
    return call(f"zero_{tile}")


def load(tile: int, address: ir.Expr, stride: ir.Expr) -> tirx.Stmt:
    """Return the statement that loads a tile, whose rows lie `stride` bytes apart."""
    return call(f"load_{tile}", address, tirx.Cast("int64", stride))


def store(tile: int, address: ir.Expr, stride: ir.Expr) -> tirx.Stmt:
    """Return the statement that stores a tile, whose rows lie `stride` bytes apart."""
    return call(f"store_{tile}", address, tirx.Cast("int64", stride))


def multiply(instruction: str, c: int, a: int, b: int) -> tirx.Stmt:
    """Return the statement that adds the product of tiles a and b to tile c."""
    return call(f"{instruction}_{c}_{a}_{b}")


def functions(stmts: Any) -> list[str]:
    """Return the names of the tile functions that a statement calls, without the prefix, each once."""
    from sparsetir.ir.rewriting import collect

    names: dict[str, None] = {}
    for node in collect(stmts, ir.Call):
        if str(getattr(node.op, "name", "")) in ("tirx.call_extern", "tir.call_extern"):
            name = str(getattr(node.args[0], "value", ""))
            if name.startswith("st_tile_"):
                names[name.removeprefix("st_tile_")] = None
    return list(names)


def define(names: Sequence[str]) -> str:
    """Return the LLVM IR of tile functions, for a target with AMX."""
    parts: list[str] = []
    declared: dict[str, None] = {}
    for name in names:
        operation, *tiles = name.split("_")
        body, parameters, declaration = _body(operation, tiles)
        declared[declaration] = None
        features = "+amx-tile,+amx-int8,+amx-bf16"
        parts.append(
            f"define linkonce_odr void @st_tile_{name}({parameters}) alwaysinline nounwind "
            f'"target-features"="{features}" {{\n  {body}\n  ret void\n}}'
        )
    return "\n".join([*parts, *declared])


def _body(operation: str, tiles: Sequence[str]) -> tuple[str, str, str]:
    """Return the call in a tile function, its parameters, and the declaration of LLVM's intrinsic."""
    numbers = ", ".join(f"i8 {tile}" for tile in tiles)
    if operation in ("config", "release"):
        callee, what = {"config": ("ldtilecfg", "ptr"), "release": ("tilerelease", "")}[operation]
        argument = "ptr %at" if what else ""
        return f"call void @llvm.x86.{callee}({argument})", argument, f"declare void @llvm.x86.{callee}({what})"
    if operation == "zero":
        return f"call void @llvm.x86.tilezero({numbers})", "", "declare void @llvm.x86.tilezero(i8 immarg)"
    if operation in ("load", "store"):
        callee = f"llvm.x86.tile{operation}d64"
        text = f"call void @{callee}({numbers}, ptr %at, i64 %stride)"
        return text, "ptr %at, i64 %stride", f"declare void @{callee}(i8 immarg, ptr, i64)"
    callee = f"llvm.x86.{operation}"
    return f"call void @{callee}({numbers})", "", f"declare void @{callee}(i8 immarg, i8 immarg, i8 immarg)"


__all__ = [
    "CONFIGURATION_BYTES",
    "PALETTE",
    "ROWS",
    "ROWS_AT",
    "ROW_BYTES",
    "ROW_BYTES_AT",
    "TILES",
    "call",
    "define",
    "emulated",
    "functions",
    "is_emulated",
    "load",
    "multiply",
    "store",
    "zero",
]
