# SPDX-License-Identifier: Apache-2.0
"""What a C program needs to know of the formats of an exported kernel, and the converted arrays for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsetir.compile.c_interface import identifier
from sparsetir.errors import ArgumentError
from sparsetir.script.printer import script
from sparsetir.transform.decompose import Decomposition, Group, Piece

if TYPE_CHECKING:
    from sparsetir.call.composed import ComposedKernel

TABLE = "pieces.h"


def layout(decomposition: Decomposition) -> list[str]:
    """Lines that say how each piece is laid out, in terms of the exported function's parameters.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir import formats
    >>> parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(2, 2)})
    >>> for line in layout(parts)[:3]:
    ...     print(line)
    A is stored as bsr(r=2, c=2). Its piece bsr, zeros where there is no entry:
      IO = T.dense_fixed(mb_bsr)
      JO = T.sparse_variable(IO, (nb_bsr, nnzb_bsr), (indptr_bsr, indices_bsr), "int32")
    """
    lines: list[str] = []
    for group in decomposition.groups:
        for piece in group.pieces:
            lines += [*_of_piece(decomposition, group, piece), ""]
    return lines[:-1]


def _of_piece(decomposition: Decomposition, group: Group, piece: Piece) -> list[str]:
    rule = piece.rule
    stored = f"{', '.join(group.buffers)} is stored as {decomposition.formats[group.name]!r}"
    held = ", zeros where there is no entry" if rule.fills else ""
    head = f"{stored}. Its piece {rule.name}{held}:"
    own = str(rule.buffer.storage.name)
    values = list(piece.values.values())
    names = {**piece.params, own: values[0] if values else own}
    body = [line for line in script(rule.description).splitlines() if line.startswith("    ") and " = T." in line]
    lines = [head, *("  " + _renamed(line.strip(), names) for line in body)]
    if len(values) > 1:
        lines.append(f"  {', '.join(values[1:])} are laid out like {values[0]}")
    if piece.mask is not None:
        lines.append(f"  {piece.mask} is 1 where {values[0]} holds an entry, else 0")
    return lines


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(r"\b\w+\b", lambda found: names.get(found[0], found[0]), line)


def write_pieces(kernel: ComposedKernel, folder: Path, arguments: dict[str, Any]) -> Path:
    """Write converted arguments for the exported function; see `ComposedKernel.write_pieces`."""
    if not folder.parent.is_dir():
        raise ArgumentError(f"there is no folder {folder.parent} to make {folder.name} in")
    folder.mkdir(exist_ok=True)
    taken: set[str] = set()
    lines = ["/* Sizes, and how many elements each array has. */"]
    for name, value in kernel.pieces(**arguments).items():
        known = identifier(name, taken)
        if np.ndim(value):
            np.ascontiguousarray(value).tofile(folder / f"{known}.bin")
            lines.append(f"#define PIECES_{known}_COUNT {np.size(value)} /* {value.dtype} */")
        else:
            lines.append(f"#define PIECES_{known} {value}")
    table = folder / TABLE
    table.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return table


__all__ = ["layout", "write_pieces"]
