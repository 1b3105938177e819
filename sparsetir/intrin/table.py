# SPDX-License-Identifier: Apache-2.0
"""Table of matrix instructions: dot products and tiles, with shapes, dtypes, required features and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.utils.arguments import shown

PREFIX = "sparsetir."  # of the names under which TVM knows the tensor intrinsics


@dataclass(frozen=True)
class Intrinsic:
    """An instruction that adds a product of small matrices: ``C[i, j] += sum_q A[i, q] * B[q, j]``.

    Operands are laid out as the instruction reads them: `group` successive elements of the sum lie side by side. A
    has the shape ``(m, k / group, group)``, B ``(k / group, n, group)`` and C ``(m, n)``. Dimensions of one element are
    left out: a dot product, with one row and one group, takes ``(group,)``, ``(n, group)`` and ``(n,)``.

    Parameters
    ----------
    name : str
        ``sparsetir.NAME`` is the tensor intrinsic for ``sch.tensorize``.
    instruction : str
        The mnemonic.
    m, n, k : int
        Rows and columns of C, terms of each sum.
    group : int
        Terms that lie side by side.
    a, b, c : str
        Dtypes of the operands and of the sum.
    features : tuple of str
        LLVM's names of the processor features that it needs.
    architecture : {"x86_64", "aarch64"}
    flushes : bool
        Whether denormal numbers count as zero.

    Examples
    --------
    >>> from sparsetir import intrin
    >>> unit = intrin.get("dot_u8s8_512")
    >>> unit.instruction, unit.shape, unit.features
    ('vpdpbusd', (1, 16, 4), ('avx512vnni', 'avx512bw'))
    """

    name: str
    instruction: str
    m: int
    n: int
    k: int
    group: int
    a: str
    b: str
    c: str
    features: tuple[str, ...]
    architecture: str = "x86_64"
    flushes: bool = False

    @property
    def tensor_intrinsic(self) -> str:
        """The name under which TVM's schedules know it."""
        return PREFIX + self.name

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows and columns of the result, and terms of each sum."""
        return self.m, self.n, self.k

    @property
    def is_tile(self) -> bool:
        """Use of tile registers, which a thread configures."""
        return self.instruction.startswith("tdp")

    @property
    def is_dot(self) -> bool:
        """True for a single row and a single group."""
        return self.m == 1 and self.groups == 1

    @property
    def groups(self) -> int:
        """Groups of terms of a sum."""
        return self.k // self.group

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of A, B and C as the instruction reads them."""
        full = (self.m, self.groups, self.group), (self.groups, self.n, self.group), (self.m, self.n)
        a, b, c = (tuple(extent for extent in shape if extent > 1) for shape in full)
        return a or (1,), b, c

    def compute(self, a: Any, b: Any, c: Any) -> np.ndarray:
        """Return ``c + a @ b`` in numpy, for operands in the layout of the instruction.

        Parameters
        ----------
        a, b, c : ndarray
            Of `operand_shapes`.

        Returns
        -------
        ndarray
            Of the shape and dtype of `c`. Floats are summed in float64 and rounded once, which the instruction's order
            of operations may differ from by a rounding of each term.
        """
        shapes = self.operand_shapes
        arrays = [np.asarray(x, np.dtype(dtype)) for x, dtype in zip((a, b, c), (self.a, self.b, self.c), strict=True)]
        for name, array, shape in zip("abc", arrays, shapes, strict=True):
            if array.shape != shape:
                fault = f"{name}: expected an array of shape {shape}, got {array.shape}."
                raise ArgumentError(f"{fault} Lay it out as {self.name} reads it.")
        wide = np.int64 if self.c.startswith("int") else np.float64
        rows = arrays[0].astype(wide).reshape(self.m, self.k)
        columns = arrays[1].astype(wide).reshape(self.groups, self.n, self.group).transpose(0, 2, 1)
        product = rows @ columns.reshape(self.k, self.n)
        total = product + arrays[2].astype(wide).reshape(self.m, self.n)
        return total.astype(arrays[2].dtype).reshape(shapes[2])


def _dots(
    name: str, instruction: str, bits: int, kinds: str, features: tuple[str, ...], **more: Any
) -> list[Intrinsic]:
    """Return the dot products of registers of `bits` for pairs of operand kinds such as ``"u8s8 s8u8"``."""
    out = []
    for pair in kinds.split():
        a, b = (DTYPES[kind] for kind in (pair[:2], pair[2:]))
        group = 4 if "8" in a else 2
        accumulator = "int32" if "8" in a else "float32"
        kind = "bf16" if a == "bfloat16" else pair
        unit = Intrinsic(f"{name}_{kind}_{bits}", instruction, 1, bits // 32, group, group, a, b, accumulator, features)
        out.append(Intrinsic(**{**vars(unit), **more}))
    return out


DTYPES = {"s8": "int8", "u8": "uint8", "bf": "bfloat16", "hf": "float16"}


def _tiles() -> list[Intrinsic]:
    instructions = {"s8s8": "tdpbssd", "s8u8": "tdpbsud", "u8s8": "tdpbusd", "u8u8": "tdpbuud"}
    amx = ("amx-tile", "amx-int8")
    out = [
        Intrinsic(f"tile_{kind}", code, 16, 16, 64, 4, DTYPES[kind[:2]], DTYPES[kind[2:]], "int32", amx)
        for kind, code in instructions.items()
    ]
    bf16, f16 = ("amx-tile", "amx-bf16"), ("amx-tile", "amx-fp16")
    halves = (("bf16", "tdpbf16ps", "bfloat16", bf16), ("f16", "tdpfp16ps", "float16", f16))
    return out + [
        Intrinsic(f"tile_{kind}", code, 16, 16, 32, 2, dtype, dtype, "float32", features, flushes=True)
        for kind, code, dtype, features in halves
    ]


def _arm() -> list[Intrinsic]:
    """Return the units of AArch64: registers of 128 bits, which SVE machines have as well."""
    out = []
    for name, code, dtype, c, group, feature in (
        ("s8s8", "sdot", "int8", "int32", 4, "dotprod"),
        ("u8u8", "udot", "uint8", "int32", 4, "dotprod"),
        ("bf16", "bfdot", "bfloat16", "float32", 2, "bf16"),
    ):
        features = ("neon", feature)
        out.append(Intrinsic(f"dot_{name}_neon", code, 1, 4, group, group, dtype, dtype, c, features, "aarch64"))
    for name, code, a, b, c, k, feature in (
        ("s8s8", "smmla", "int8", "int8", "int32", 8, "i8mm"),
        ("u8u8", "ummla", "uint8", "uint8", "int32", 8, "i8mm"),
        ("u8s8", "usmmla", "uint8", "int8", "int32", 8, "i8mm"),
        ("bf16", "bfmmla", "bfloat16", "bfloat16", "float32", 4, "bf16"),
    ):
        out.append(Intrinsic(f"mmla_{name}_neon", code, 2, 2, k, k, a, b, c, ("neon", feature), "aarch64"))
    return out


TABLE: tuple[Intrinsic, ...] = (
    *_dots("dot", "vdpbf16ps", 512, "bfbf", ("avx512bf16", "avx512bw"), flushes=True),
    *_dots("dot", "vdpbf16ps", 256, "bfbf", ("avx512bf16", "avx512vl"), flushes=True),
    *_dots("dot", "vpdpbusd", 512, "u8s8 s8u8", ("avx512vnni", "avx512bw")),
    *_dots("dot", "vpdpbusd", 256, "u8s8 s8u8", ("avx512vnni", "avx512vl")),
    *_dots("dot_vex", "vpdpbusd", 256, "u8s8 s8u8", ("avxvnni",)),
    Intrinsic("fma_f16_512", "vfmadd231ph", 1, 32, 1, 1, "float16", "float16", "float16", ("avx512fp16",)),
    *_tiles(),
    *_arm(),
)
BY_NAME = {unit.name: unit for unit in TABLE}


def get(name: str) -> Intrinsic:
    """Return an intrinsic of the table by its name.

    Parameters
    ----------
    name : str
        With or without the prefix ``sparsetir.``.

    Returns
    -------
    Intrinsic

    Raises
    ------
    ArgumentError
        The table has none of that name.
    """
    unit = BY_NAME.get(str(name).removeprefix(PREFIX))
    if unit is None:
        raise ArgumentError(f"name: expected one of {', '.join(BY_NAME)}, got {shown(name)}. Choose one of the table.")
    return unit


__all__ = ["BY_NAME", "PREFIX", "TABLE", "Intrinsic", "get"]
