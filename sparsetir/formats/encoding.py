# SPDX-License-Identifier: Apache-2.0
"""Encodings of formats as text, and the formats of every encoding."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.formats.base import FormatRewriteRule, axis_name, describe
from sparsetir.formats.blocks import BSR, DBSR
from sparsetir.formats.compressed import COO, CSC, CSF, CSR, DCSR
from sparsetir.formats.diagonals import DIA
from sparsetir.formats.format import (
    REGISTRY,
    Array,
    Entries,
    Format,
    Packed,
    check_idtype,
    make,
    register,
)
from sparsetir.formats.padded import NM
from sparsetir.interop.arrays import changes, index_array, sorting_order, take
from sparsetir.script import parser
from sparsetir.utils.caches import cached_property

# How a tensor is stored, as one line of text: levels from the root, as in MLIR's sparse tensor dialect.


KINDS = ("dense", "batch", "compressed", "loose_compressed", "singleton", "structured", "range")
PROPERTIES = ("nonunique", "nonordered", "soa")
WIDTHS = (0, 8, 16, 32, 64)
NAME = re.compile(r"[A-Za-z_]\w*$")
WIDE = re.compile(r"\s*(?:#\w+\s*=\s*)?#sparse_tensor\.encoding\s*<\s*\{(.*)\}\s*>\s*$", re.DOTALL)
MAP = re.compile(r"\s*\(([^()]*)\)\s*->\s*\((.*?)\)\s*((?:,\s*\w+\s*=\s*[-\w.: ]+)*),?\s*$", re.DOTALL)
OPTION = re.compile(r"(\w+)\s*=\s*(-?\d+)(?:\.0*)?(?:\s*:\s*\w+)?$")
LEVEL = re.compile(r"(.*?):\s*(\w+)\s*(\[[^\]]*\])?\s*(\([^)]*\))?\s*$", re.DOTALL)
BLOCK = re.compile(r"(\w+)\s*(floordiv|ceildiv|mod|/|%)\s*(\w+)$")
DIAGONAL = re.compile(r"(\w+)\s*-\s*(\w+)$")


@dataclass(frozen=True)
class LevelText:
    """One level.

    Parameters
    ----------
    dim : int
        The dimension whose coordinates it has.
    kind : str
        One of `KINDS`.
    part : {"", "floordiv", "mod", "minus"}
        What of the dimension: all, the number of a block, the place in a block, or the distance to dimension `other`.
    block : int
        Size of a block.
    other : int
    ratio : tuple of int
        n and m of a structured level, which keeps n of m.
    properties : tuple of str
        Of `PROPERTIES`, in that order.
    """

    dim: int
    kind: str
    part: str = ""
    block: int = 0
    other: int = 0
    ratio: tuple[int, ...] = ()
    properties: tuple[str, ...] = ()

    def text(self, names: Sequence[str]) -> str:
        """Return the level with these names of dimensions."""
        subject = names[self.dim]
        if self.part == "minus":
            subject = f"{subject} - {names[self.other]}"
        elif self.part:
            subject = f"{subject} {self.part} {self.block}"
        ratio = f"[{', '.join(map(str, self.ratio))}]" if self.ratio else ""
        properties = f"({', '.join(self.properties)})" if self.properties else ""
        return f"{subject} : {self.kind}{ratio}{properties}"


@dataclass(frozen=True)
class Encoding:
    """The levels of a format, and the widths of its index arrays.

    Parameters
    ----------
    order : int
        Number of dimensions.
    levels : tuple of LevelText
        From the root.
    pos_width, crd_width : int
        Bits of the arrays that say where fibers begin, and of those with coordinates; 0 leaves them open.
    implicit, explicit : float, optional
        What elements that are not stored hold, and what all stored ones do.
    names : tuple of str
        Of the dimensions, for `str`.

    Examples
    --------
    >>> from sparsetir.formats.encoding import parse
    >>> csc = parse("(i, j) -> (j : dense, i : compressed)")
    >>> print(csc.mlir)
    #sparse_tensor.encoding<{ map = (d0, d1) -> (d1 : dense, d0 : compressed) }>
    >>> parse(csc.mlir) == csc
    True
    """

    order: int
    levels: tuple[LevelText, ...]
    pos_width: int = 0
    crd_width: int = 0
    implicit: float | None = None
    explicit: float | None = None
    names: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return self._text(self.names or tuple(f"d{d}" for d in range(self.order)))

    @property
    def mlir(self) -> str:
        """The text as MLIR writes it."""
        return f"#sparse_tensor.encoding<{{ map = {self._text([f'd{d}' for d in range(self.order)])} }}>"

    def _text(self, names: Sequence[str]) -> str:
        levels = ", ".join(level.text(names) for level in self.levels)
        options: dict[str, float] = {"posWidth": self.pos_width, "crdWidth": self.crd_width}
        options |= {"explicitVal": self.explicit or 0, "implicitVal": self.implicit or 0}
        option_text = "".join(f", {name} = {value:g}" for name, value in options.items() if value)
        return f"({', '.join(names)}) -> ({levels}){option_text}"


def parse(text: str) -> Encoding:
    """Parse an encoding, MLIR's or the part after ``map =`` alone.

    Parameters
    ----------
    text : str
        As in ``"(i, j) -> (i : dense, j : compressed), posWidth = 32"``.

    Raises
    ------
    ArgumentError
        The text is no encoding; the message quotes the part that is wrong.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"text: expected an encoding, got {type(text).__name__}. Pass a string.")
    wide = WIDE.match(text)
    body = re.sub(r"^\s*map\s*=", "", wide.group(1)) if wide else text
    match = MAP.match(body)
    if match is None:
        quoted = text if len(text) < 200 else f"{text[:200]} ..."
        raise ArgumentError(
            f"expected an encoding such as '(i, j) -> (i : dense, j : compressed)', or MLIR's, got {quoted!r}"
        )
    names = [name.strip() for name in match.group(1).split(",")]
    for name in names:
        if not NAME.match(name) or names.count(name) > 1:
            raise ArgumentError(f"dimensions have different names, got {name!r} in {text!r}")
    levels = tuple(_level(part, names) for part in _split(match.group(2)))
    own_names = tuple(names) if names != [f"d{d}" for d in range(len(names))] else ()
    encoding = replace(_options(match.group(3), len(names), levels), names=own_names)
    return _checked(encoding, text)


def _split(text: str) -> list[str]:
    """Return the parts between commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _level(text: str, names: Sequence[str]) -> LevelText:
    match = LEVEL.match(text.strip())
    if match is None:
        raise ArgumentError(f"expected a level such as 'i : dense', got {text.strip()!r}")
    subject, kind, ratio, properties = (group.strip() if group else "" for group in match.groups())
    if kind not in KINDS:
        raise ArgumentError(f"a level is one of {', '.join(KINDS)}, got {kind!r} in {text.strip()!r}")
    names_given = [p.strip() for p in properties.strip("()").split(",") if p.strip()]
    unknown = [p for p in names_given if p not in PROPERTIES]
    if unknown:
        raise ArgumentError(f"properties of a level are {', '.join(PROPERTIES)}, got {unknown[0]!r}")
    numbers = [n.strip() for n in ratio.strip("[]").split(",") if n.strip()]
    if any(not n.isdigit() for n in numbers) or (len(numbers) != 2) == (kind == "structured"):
        raise ArgumentError(f"a structured level says how many are kept of how many, as structured[2, 4], got {text!r}")
    level = _subject(subject, names)
    ordered_properties = tuple(p for p in PROPERTIES if p in names_given)
    return replace(level, kind=kind, ratio=tuple(int(n) for n in numbers), properties=ordered_properties)


def _subject(text: str, names: Sequence[str]) -> LevelText:
    """Parse the dimension or the part of a dimension whose coordinates a level has."""
    if text in names:
        return LevelText(names.index(text), "")
    diagonal, block = DIAGONAL.match(text), BLOCK.match(text)
    if diagonal and diagonal.group(1) in names and diagonal.group(2) in names:
        return LevelText(names.index(diagonal.group(1)), "", "minus", other=names.index(diagonal.group(2)))
    if block is None or block.group(1) not in names or block.group(2) == "ceildiv":
        raise ArgumentError(
            f"a level is a dimension ({', '.join(names)}), i floordiv 4, i mod 4 or j - i, got {text!r}"
        )
    name, part, size = block.groups()
    if not size.isdigit() or int(size) < 1:
        raise ArgumentError(f"the size of a block is a number from 1 on, got {size!r} in {text!r}")
    return LevelText(names.index(name), "", {"/": "floordiv", "%": "mod"}.get(part, part), int(size))


def _options(text: str, order: int, levels: tuple[LevelText, ...]) -> Encoding:
    options: dict[str, int] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        match = OPTION.match(part)
        if match is None or match.group(1) not in ("posWidth", "crdWidth", "explicitVal", "implicitVal"):
            raise ArgumentError(f"options are posWidth, crdWidth, explicitVal and implicitVal, got {part!r}")
        options[match.group(1)] = int(match.group(2))
    for name in ("posWidth", "crdWidth"):
        if options.get(name, 0) not in WIDTHS:
            raise ArgumentError(f"{name} is one of {', '.join(map(str, WIDTHS))}, got {options[name]}")
    return Encoding(
        order,
        levels,
        options.get("posWidth", 0),
        options.get("crdWidth", 0),
        options.get("implicitVal"),
        options.get("explicitVal"),
    )


def _checked(encoding: Encoding, text: str) -> Encoding:
    """Return the encoding, once each dimension is stored in full and once."""
    for dim in range(encoding.order):
        parts = [(level.part, level.block) for level in encoding.levels if level.dim == dim]
        plain = [part for part, _ in parts if part in ("", "minus")]
        if len(plain) == len(parts) == 1 and (plain != ["minus"] or _has_other(encoding, dim)):
            continue
        sizes = {block for _, block in parts}
        if sorted(part for part, _ in parts) == ["floordiv", "mod"] and len(sizes) == 1:
            continue
        name = (encoding.names or [f"d{d}" for d in range(encoding.order)])[dim]
        _refuse(f"{text!r} stores dimension {name} not exactly once: name it in one level, or in two as blocks")
    return encoding


def _has_other(encoding: Encoding, dim: int) -> bool:
    level = next(level for level in encoding.levels if level.dim == dim)
    return level.other != dim and any(o.dim == level.other and o.part == "" for o in encoding.levels)


def _refuse(message: str) -> NoReturn:
    raise ArgumentError(message)


# Formats of encodings: every order of dense and compressed levels, blocks of them, and lists of coordinates.


def format(text: str | Format) -> Format:
    """Return the format that a text denotes.

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
        raise ArgumentError(f"expected the text of a format, got {type(text).__name__}")
    if "->" not in text:
        return parse_format(text if "(" in text else f"{text.strip()}()")
    encoding = parse(text)
    idtype = _idtype(encoding)
    _check_values(encoding)
    known_format = _known(encoding)
    if known_format is not None:
        return known_format.with_idtype(idtype) if idtype else known_format
    return Encoded(text=text)


def encoding_of(format: Format) -> Encoding:
    """Return the encoding of a format.

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
    """Return the levels of the formats that have names."""
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
    levels = table.get(type(format))
    return None if levels is None else [LevelText(d, kind) for d, kind in levels]


def _bare(encoding: Encoding) -> tuple[LevelText, ...]:
    """Return the levels without the properties of the memory layout."""
    return tuple(
        LevelText(v.dim, v.kind, v.part, v.block, v.other, v.ratio, tuple(p for p in v.properties if p != "soa"))
        for v in encoding.levels
    )


def _known(encoding: Encoding) -> Format | None:
    """Return the named format with these levels."""
    levels, order = _bare(encoding), encoding.order
    blocks = [v.block for v in levels if v.part == "floordiv"]
    tries: list[Callable[[], Format]] = [CSR, CSC, DCSR, DIA] if order == 2 else []
    tries += [lambda: COO(ndim=order)] if order > 1 else []
    tries.append(lambda: CSF(order=tuple(v.dim for v in levels)))
    if len(blocks) == 2:
        tries += [lambda: BSR(*blocks), lambda: DBSR(*blocks)]
    if levels[-1].ratio:
        tries.append(lambda: NM(*levels[-1].ratio))
    for constructor in tries:
        try:
            candidate = constructor()
        except ArgumentError:  # not with these numbers
            continue
        levels_of_candidate = _levels_of(candidate)
        if levels_of_candidate is not None and _bare(Encoding(order, tuple(levels_of_candidate))) == levels:
            return candidate
    return None


def _idtype(encoding: Encoding) -> str | None:
    """Return the index type that represents both widths: index arrays of one format are all of 32 bits or all of 64."""
    widest = max(encoding.pos_width, encoding.crd_width)
    return None if not widest else "int64" if widest > 32 else "int32"


def _check_values(encoding: Encoding) -> None:
    if encoding.implicit:
        raise ArgumentError(f"what is not stored is zero, got implicitVal = {encoding.implicit}")
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

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Encoded) and (self.encoding, self.idtype) == (value.encoding, value.idtype)

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
        """Return whether a size is that of a dimension of which blocks have their own."""
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
        """Return which entries are the first of their position."""
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


# Formats from their printed form.


def parse_format(text: str) -> Format:
    """Return the format that prints as `text`.

    Parameters
    ----------
    text : str
        A call of a format's function with literals and formats as arguments: ``repr`` of a format.

    Raises
    ------
    ArgumentError
        The text is something else, or the arguments are none of the format's.

    Examples
    --------
    >>> parse_format("blocks(r=4, c=4, rest='dcsr')").r
    4
    """
    try:
        format = _value(parser.parse(text, mode="eval").body)
    except SparseTIRError:
        raise
    except (SyntaxError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError) as error:
        raise _no_format(text) from error
    if not isinstance(format, Format):
        raise _no_format(text)
    return format


def _no_format(text: Any) -> ArgumentError:
    shown = text if not isinstance(text, str) or len(text) < 200 else f"{text[:200]} ..."
    return ArgumentError(f"expected a format as it prints, such as 'bsr(r=4, c=4)', got {shown!r}")


def _value(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name) or node.func.id not in REGISTRY:
        names = ", ".join(sorted(REGISTRY))
        raise ArgumentError(f"expected one of the formats {names}, got {ast.unparse(node.func)!r}")
    if node.args:
        raise ArgumentError(f"expected named parameters, as {node.func.id} prints them, got {ast.unparse(node)!r}")
    named = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return make(node.func.id, **named)


__all__ = ["Encoded", "Encoding", "LevelText", "encoding_of", "format", "parse", "parse_format"]
