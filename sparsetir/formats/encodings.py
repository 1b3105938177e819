# SPDX-License-Identifier: Apache-2.0
"""Formats of encodings: every order of dense and compressed levels, blocks of them, and lists of coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.formats import text as spelled
from sparsetir.formats.arrays import changes, index_array, sorting_order, take
from sparsetir.formats.blocks import BSR, DBSR
from sparsetir.formats.coordinates import COO, CSF
from sparsetir.formats.description import axis_name, describe
from sparsetir.formats.diagonals import DIA
from sparsetir.formats.encoding import Encoding, LevelText, parse
from sparsetir.formats.format import Array, Entries, Format, Packed, check_idtype, register
from sparsetir.formats.layouts import CSC, CSR, DCSR
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.formats.special import NM

SPECIAL = (CSR, CSC, DCSR, COO, CSF, BSR, DBSR, NM, DIA)


def format(text: str | Format) -> Format:
    """The format that a text says.

    Parameters
    ----------
    text : str
        An encoding, such as ``"(i, j) -> (i : dense, j : compressed)"``, MLIR's ``#sparse_tensor.encoding`` of it, or
        a format as it prints: ``"csr"``, ``"bsr(r=4, c=4)"``.

    Returns
    -------
    Format
        For `SparseTensor.from_any` and `decompose_format`; one of `formats` where that has these levels.

    Raises
    ------
    ArgumentError
        The text is no format, or one that tensors cannot be stored in here; the message says why.

    Examples
    --------
    >>> import sparsetir
    >>> sparsetir.format("(i, j) -> (i / 4 : dense, j / 4 : compressed, i % 4 : dense, j % 4 : dense)")
    bsr(r=4, c=4)
    >>> fmt = sparsetir.format("(i, j, k) -> (k : dense, i : compressed, j : dense)")
    >>> print(fmt.encoding.mlir)
    #sparse_tensor.encoding<{ map = (d0, d1, d2) -> (d2 : dense, d0 : compressed, d1 : dense) }>
    """
    if isinstance(text, Format):
        return text
    if not isinstance(text, str):
        raise ArgumentError(f"expected the text of a format, found {type(text).__name__}")
    if "->" not in text:
        return spelled.parse(text if "(" in text else f"{text.strip()}()")
    encoding = parse(text)
    idtype = _idtype(encoding)
    _check_values(encoding)
    known = _known(encoding)
    if known is not None:
        return known.with_idtype(idtype) if idtype else known
    return Encoded(text=text)


def encoding_of(format: Format) -> Encoding:
    """The encoding of a format.

    Raises
    ------
    ArgumentError
        When it has none: several pieces, or levels that encodings do not have.
    """
    if isinstance(format, Encoded):
        return format.encoding
    width = {"int32": 32, "int64": 64}.get(format.idtype or "", 0)
    levels = _levels_of(format)
    if levels is None:
        raise ArgumentError(f"{format!r} has no encoding: its pieces are no levels of dense or compressed dimensions")
    return Encoding(max(level.dim for level in levels) + 1, tuple(levels), width, width)


def _levels_of(format: Format) -> list[LevelText] | None:
    """The levels of the formats that have names."""
    dense, packed = "dense", "compressed"
    if isinstance(format, (BSR, DBSR)):
        r, c = format.block
        rows = packed if isinstance(format, DBSR) else dense
        outer = [LevelText(0, rows, "floordiv", r), LevelText(1, packed, "floordiv", c)]
        return [*outer, LevelText(0, dense, "mod", r), LevelText(1, dense, "mod", c)]
    if isinstance(format, NM):
        return [LevelText(0, dense), LevelText(1, dense, "floordiv", format.m),
                LevelText(1, "structured", "mod", format.m, ratio=(format.n, format.m))]  # fmt: skip
    if isinstance(format, DIA):
        return [LevelText(1, packed, "minus", other=0), LevelText(0, "range")]
    if isinstance(format, COO):
        first = LevelText(0, packed, properties=("nonunique",) if format.ndim > 1 else ())
        inner = [("nonunique", "soa")] * (format.ndim - 2) + [("soa",)]
        return [first, *(LevelText(d, "singleton", properties=p) for d, p in enumerate(inner[: format.ndim - 1], 1))]
    if isinstance(format, CSF):
        return None if format.order is None else [LevelText(d, packed) for d in format.order]
    table: dict[type, list[tuple[int, str]]] = {
        CSR: [(0, dense), (1, packed)],
        CSC: [(1, dense), (0, packed)],
        DCSR: [(0, packed), (1, packed)],
    }
    known = table.get(type(format))
    return None if known is None else [LevelText(d, kind) for d, kind in known]


def _bare(encoding: Encoding) -> tuple[LevelText, ...]:
    """The levels without what only says how the arrays lie in memory."""
    return tuple(
        LevelText(v.dim, v.kind, v.part, v.block, v.other, v.ratio, tuple(p for p in v.properties if p != "soa"))
        for v in encoding.levels
    )


def _known(encoding: Encoding) -> Format | None:
    """The named format with these levels."""
    levels, order = _bare(encoding), encoding.order
    blocks = [v.block for v in levels if v.part == "floordiv"]
    tries: list[Callable[[], Format]] = [CSR, CSC, DCSR, DIA] if order == 2 else []
    tries += [lambda: COO(ndim=order)] if order > 1 else []
    tries.append(lambda: CSF(order=tuple(v.dim for v in levels)))
    if len(blocks) == 2:
        tries += [lambda: BSR(*blocks), lambda: DBSR(*blocks)]
    if levels[-1].ratio:
        tries.append(lambda: NM(*levels[-1].ratio))
    for make in tries:
        try:
            found = make()
        except ArgumentError:  # not with these numbers
            continue
        own = _levels_of(found)
        if own is not None and _bare(Encoding(order, tuple(own))) == levels:
            return found
    return None


def _idtype(encoding: Encoding) -> str | None:
    """The index type that has room for both widths: index arrays of one format are all of 32 bits or all of 64."""
    widest = max(encoding.pos_width, encoding.crd_width)
    return None if not widest else "int64" if widest > 32 else "int32"


def _check_values(encoding: Encoding) -> None:
    if encoding.implicit:
        raise ArgumentError(f"what is not stored is zero, found implicitVal = {encoding.implicit}")
    if encoding.explicit is not None:
        raise ArgumentError("values are always stored, also where all are equal: leave explicitVal out")


COUNTED = ("dense", "batch")  # levels that have all coordinates
LISTED = ("compressed", "loose_compressed")  # levels with a list of coordinates below each position
REASONS = {
    "structured": "n of m are kept in a last level below (i : dense, j floordiv m : dense)",
    "range": "ranges are those of diagonals, as in (j - i : compressed, i : range)",
}


@register("encoded")
class Encoded(Format):
    """A format that an encoding says: dense and compressed levels in any order, blocks, and lists of coordinates.

    Levels ``batch``, which come first, are dense ones: all of a batch has one set of arrays. Levels
    ``loose_compressed`` are compressed ones: no room is left between fibers. Index arrays are of 32 bits where the text
    asks for 8 or 16.

    Parameters
    ----------
    text : str
        The encoding.
    idtype : {"int32", "int64"}, optional
        Of the index arrays, where the text leaves it open.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> fmt = sparsetir.format("(i, j) -> (j : compressed, i : dense)")
    >>> t = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0, 0], [0, 3.0, 4.0]]), format=fmt)
    >>> t.pieces[0].arrays["indices_j"].tolist(), t.pieces[0].values.tolist()
    ([1, 2], [2.0, 3.0, 0.0, 4.0])
    """

    name = "encoded"

    def __init__(self, text: str, idtype: str | None = None) -> None:
        check_idtype(idtype)
        self.text = text
        self.encoding: Encoding = parse(text)
        self.idtype = idtype or _idtype(self.encoding)
        self.dimensions = self.encoding.order
        _check_values(self.encoding)
        self._check_levels()

    def _check_levels(self) -> None:
        previous = None
        for number, level in enumerate(self.encoding.levels):
            if level.kind in REASONS or level.part == "minus":
                reason = REASONS.get(
                    level.kind, "differences are those of diagonals, as in (j - i : compressed, i : range)"
                )
                raise ArgumentError(f"tensors are not stored as {self.text!r}: {reason}")
            if level.kind == "batch" and previous is not None and previous.kind != "batch":
                raise ArgumentError(
                    f"tensors are not stored as {self.text!r}: levels of a batch come before all others, or write dense"
                )
            opens = previous is not None and "nonunique" in previous.properties
            if (level.kind == "singleton") != opens:
                raise ArgumentError(
                    f"tensors are not stored as {self.text!r}: a level is nonunique where singletons follow, and "
                    "singletons follow such a level"
                )
            previous = level
            if number == len(self.encoding.levels) - 1 and "nonunique" in level.properties:
                raise ArgumentError(
                    f"tensors are not stored as {self.text!r}: entries with the same coordinates add up"
                )

    @property
    def parameters(self) -> dict[str, Any]:
        return {"text": self.text, "idtype": self.idtype}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoded) and (self.encoding, self.idtype) == (other.encoding, other.idtype)

    def __hash__(self) -> int:
        return hash((self.encoding, self.idtype))

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoded, (self.text, self.idtype)

    # -------------------------------------------------------------- the program's side

    @cached_property
    def rules(self) -> Sequence[FormatRewriteRule]:
        levels, axes = self.encoding.levels, self._axes()
        arrays, sizes, lines = [], [f"n_{axis_name(d).lower()}" for d in range(self.encoding.order)], []
        sizes += [f"n_{a.lower()}" for v, a in zip(levels, axes, strict=True) if v.part == "floordiv"]
        sizes = [s for s in sizes if not self._is_cut(s)]
        parent = "None"
        for depth, (level, axis) in enumerate(zip(levels, axes, strict=True)):
            low = axis.lower()
            lines.append(f"{axis} = {self._declared(level, axis, parent, depth)}")
            if level.kind not in COUNTED:
                arrays += [f"indptr_{low}", f"indices_{low}"] if level.kind in LISTED else [f"indices_{low}"]
                sizes += [f"nnz_{low}"] if level.kind in LISTED else []
            parent = axis
        description = describe(
            "encoded",
            self.index_type,
            arrays=" ".join(arrays),
            sizes=" ".join(sizes),
            axes="\n".join(lines),
            buffer=", ".join(axes if self._is_blocked else sorted(axes, key=lambda a: levels[axes.index(a)].dim)),
        )
        groups = {d: [a for v, a in zip(levels, axes, strict=True) if v.dim == d] for d in range(self.encoding.order)}
        inverse, forward = (self._inverse, self._forward) if self._is_blocked else (None, None)
        fills = any(v.kind in COUNTED for v in levels[1:])
        return (FormatRewriteRule("encoded", description, groups, inverse=inverse, forward=forward, fills=fills),)

    @property
    def _is_blocked(self) -> bool:
        return any(level.part for level in self.encoding.levels)

    def _is_cut(self, size: str) -> bool:
        """Whether a size is that of a dimension of which blocks have their own."""
        cut = {v.dim for v in self.encoding.levels if v.part}
        return size in {f"n_{axis_name(d).lower()}" for d in cut}

    def _axes(self) -> list[str]:
        suffix = {"": "", "floordiv": "O", "mod": "I"}
        return [f"{axis_name(v.dim)}{suffix[v.part]}" for v in self.encoding.levels]

    def _declared(self, level: LevelText, axis: str, parent: str, depth: int) -> str:
        low = axis.lower()
        size = str(level.block) if level.part == "mod" else f"n_{low}"
        flags = f", sorted={'nonordered' not in level.properties}, unique={'nonunique' not in level.properties}"
        if level.kind in LISTED:
            return f"sparse_variable({parent}, ({size}, nnz_{low}), (indptr_{low}, indices_{low}){flags})"
        if level.kind == "singleton":
            return f"singleton({parent}, {size}, indices_{low}{flags})"
        if depth == 0:
            return f"dense_fixed({size})"
        above = ", ".join([*(f"c{n}" for n in range(depth)), "s"])
        return f"sparse_fixed({parent}, ({size}, {size}), lambda {above}: s, full=True)"

    def _inverse(self, *new: Any) -> list[Any]:
        old: list[Any] = [None] * self.encoding.order
        for level, c in zip(self.encoding.levels, new, strict=True):
            part = c * level.block if level.part == "floordiv" else c
            old[level.dim] = part if old[level.dim] is None else old[level.dim] + part
        return old

    def _forward(self, *old: Any) -> list[Any]:
        return [_level_coord(level, old[level.dim]) for level in self.encoding.levels]

    # -------------------------------------------------------------- the data's side

    def pack(self, entries: Entries) -> list[Packed]:
        levels, axes = self.encoding.levels, self._axes()
        shape = [_extent(level, entries.shape[level.dim]) for level in levels]
        coords: list[Array] = [_level_coord(v, entries.coords[v.dim].astype(np.int64, copy=False)) for v in levels]
        by = sorting_order(coords, shape)
        coords = [c if by is None else take(c, by) for c in coords]
        at, count = np.zeros(entries.nnz, np.int64), 1
        arrays: dict[str, Array] = {}
        sizes = {f"n_{axis_name(d).lower()}": n for d, n in enumerate(entries.shape)}
        sizes = {name: n for name, n in sizes.items() if not self._is_cut(name)}
        for level, axis, c, extent in zip(levels, axes, coords, shape, strict=True):
            low = axis.lower()
            if level.part == "floordiv":
                sizes[f"n_{low}"] = extent
            if level.kind in COUNTED:
                at, count = at * extent + c, self.check_count(count * extent)
                continue
            if level.kind in LISTED:
                heads = self._heads(level, at, c)
                starts = np.searchsorted(at[heads], np.arange(count + 1))
                arrays[f"indptr_{low}"] = index_array(starts, self.index_type)
                at, count = np.cumsum(heads) - 1, int(heads.sum())
                c, sizes[f"nnz_{low}"] = c[heads], count
            arrays[f"indices_{low}"] = index_array(c, self.index_type)
        return [Packed(arrays, sizes, self.check_count(count), entries=by, slots=at, size=entries.nnz)]

    def _heads(self, level: LevelText, at: Array, c: Array) -> Array:
        """Which entries are the first of their position."""
        if "nonunique" in level.properties:
            return np.ones(len(c), np.bool_)
        return changes([at, c])


def _level_coord(level: LevelText, coord: Any) -> Any:
    if level.part == "floordiv":
        return coord // level.block
    return coord % level.block if level.part == "mod" else coord


def _extent(level: LevelText, extent: int) -> int:
    if level.part == "floordiv":
        return -(-extent // level.block)
    return level.block if level.part == "mod" else extent


__all__ = ["Encoded", "encoding_of", "format"]
