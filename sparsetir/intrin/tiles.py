# SPDX-License-Identifier: Apache-2.0
"""Operations on the tile registers of AMX, as calls of functions with one tile number in each name.

A tile number is part of an instruction, so that a function takes it by its name: ``st_tile_load_2(address, stride)``.
The pass `sparsetir.lower.vector.tile_products` configures the tiles around the calls, and defines the functions: as the
instructions, or as their emulation (`sparsetir.intrin.emulation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, tirx

PREFIX = "st_tile_"
CONFIGURATION_BYTES = 64
TILES, ROWS, ROW_BYTES = 8, 16, 64  # registers, and the size of each
PALETTE = 1
ROW_BYTES_AT, ROWS_AT = 16, 48  # offsets in the configuration: two bytes a register, one byte a register
FEATURES = {"tdpbf16ps": ",+amx-bf16", "tdpfp16ps": ",+amx-fp16"}  # beyond those of tiles; of 8 bits by default


def configuration() -> bytes:
    """Return the configuration of all tiles in full size."""
    out = bytearray(CONFIGURATION_BYTES)
    out[0] = PALETTE
    for tile in range(TILES):
        out[ROW_BYTES_AT + 2 * tile], out[ROWS_AT + tile] = ROW_BYTES, ROWS
    return bytes(out)


def call(name: str, *arguments: Any) -> tirx.Stmt:
    """Return the statement that calls one of the functions."""
    return tirx.Evaluate(tirx.call_extern("void", PREFIX + name, *arguments))


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


def called(node: Any) -> str:
    """Return the name of the tile function that a call is of, without the prefix; empty for other calls."""
    if str(getattr(node.op, "name", "")) != "tirx.call_extern":
        return ""
    name = str(getattr(node.args[0], "value", ""))
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def functions(node: Any) -> list[str]:
    """Return the names of the tile functions that are called below a node, without the prefix, each once."""
    from sparsetir.ir.rewriting import collect

    return list(dict.fromkeys(name for call in collect(node, ir.Call) if (name := called(call))))


def define(names: Sequence[str]) -> str:
    """Return the LLVM IR of tile functions, for a target with AMX."""
    parts: list[str] = []
    declared: dict[str, None] = {}
    for name in names:
        operation, *tiles = name.split("_")
        body, parameters, declaration = _body(operation, tiles)
        declared[declaration] = None
        features = "+amx-tile" + (FEATURES.get(operation, ",+amx-int8") if operation.startswith("tdp") else "")
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
    "PREFIX",
    "ROWS",
    "ROW_BYTES",
    "TILES",
    "call",
    "called",
    "configuration",
    "define",
    "functions",
    "load",
    "multiply",
    "store",
    "zero",
]
