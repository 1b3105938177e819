# SPDX-License-Identifier: Apache-2.0
"""How a tensor is stored, as one line of text: levels from the root, as in MLIR's sparse tensor dialect."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from sparsetir.errors import ArgumentError, ArgumentTypeError

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
        """The level with these names of dimensions."""
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
        held = "".join(f", {name} = {value:g}" for name, value in options.items() if value)
        return f"({', '.join(names)}) -> ({levels}){held}"


def parse(text: str) -> Encoding:
    """The encoding that a text says, MLIR's or the part after ``map =`` alone.

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
        found = text if len(text) < 200 else f"{text[:200]} ..."
        raise ArgumentError(
            f"expected an encoding such as '(i, j) -> (i : dense, j : compressed)', or MLIR's; found {found!r}"
        )
    names = [name.strip() for name in match.group(1).split(",")]
    for name in names:
        if not NAME.match(name) or names.count(name) > 1:
            raise ArgumentError(f"dimensions have different names, found {name!r} in {text!r}")
    levels = tuple(_level(part, names) for part in _split(match.group(2)))
    own = tuple(names) if names != [f"d{d}" for d in range(len(names))] else ()
    made = replace(_options(match.group(3), len(names), levels), names=own)
    return _checked(made, text)


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
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
        raise ArgumentError(f"expected a level such as 'i : dense', found {text.strip()!r}")
    subject, kind, ratio, properties = (group.strip() if group else "" for group in match.groups())
    if kind not in KINDS:
        raise ArgumentError(f"a level is one of {', '.join(KINDS)}; found {kind!r} in {text.strip()!r}")
    given = [p.strip() for p in properties.strip("()").split(",") if p.strip()]
    unknown = [p for p in given if p not in PROPERTIES]
    if unknown:
        raise ArgumentError(f"properties of a level are {', '.join(PROPERTIES)}; found {unknown[0]!r}")
    numbers = [n.strip() for n in ratio.strip("[]").split(",") if n.strip()]
    if any(not n.isdigit() for n in numbers) or (len(numbers) != 2) == (kind == "structured"):
        raise ArgumentError(
            f"a structured level says how many are kept of how many, as structured[2, 4]; found {text!r}"
        )
    made = _subject(subject, names)
    held = tuple(p for p in PROPERTIES if p in given)
    return replace(made, kind=kind, ratio=tuple(int(n) for n in numbers), properties=held)


def _subject(text: str, names: Sequence[str]) -> LevelText:
    """What a level has the coordinates of."""
    if text in names:
        return LevelText(names.index(text), "")
    diagonal, block = DIAGONAL.match(text), BLOCK.match(text)
    if diagonal and diagonal.group(1) in names and diagonal.group(2) in names:
        return LevelText(names.index(diagonal.group(1)), "", "minus", other=names.index(diagonal.group(2)))
    if block is None or block.group(1) not in names or block.group(2) == "ceildiv":
        raise ArgumentError(
            f"a level is a dimension ({', '.join(names)}), i floordiv 4, i mod 4 or j - i; found {text!r}"
        )
    name, part, size = block.groups()
    if not size.isdigit() or int(size) < 1:
        raise ArgumentError(f"the size of a block is a number from 1 on, found {size!r} in {text!r}")
    return LevelText(names.index(name), "", {"/": "floordiv", "%": "mod"}.get(part, part), int(size))


def _options(text: str, order: int, levels: tuple[LevelText, ...]) -> Encoding:
    held: dict[str, int] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        match = OPTION.match(part)
        if match is None or match.group(1) not in ("posWidth", "crdWidth", "explicitVal", "implicitVal"):
            raise ArgumentError(f"options are posWidth, crdWidth, explicitVal and implicitVal; found {part!r}")
        held[match.group(1)] = int(match.group(2))
    for name in ("posWidth", "crdWidth"):
        if held.get(name, 0) not in WIDTHS:
            raise ArgumentError(f"{name} is one of {', '.join(map(str, WIDTHS))}, found {held[name]}")
    return Encoding(
        order,
        levels,
        held.get("posWidth", 0),
        held.get("crdWidth", 0),
        held.get("implicitVal"),
        held.get("explicitVal"),
    )


def _checked(made: Encoding, text: str) -> Encoding:
    """The encoding, once each dimension is stored in full and once."""
    for dim in range(made.order):
        parts = [(level.part, level.block) for level in made.levels if level.dim == dim]
        plain = [part for part, _ in parts if part in ("", "minus")]
        if len(plain) == len(parts) == 1 and (plain != ["minus"] or _has_other(made, dim)):
            continue
        sizes = {block for _, block in parts}
        if sorted(part for part, _ in parts) == ["floordiv", "mod"] and len(sizes) == 1:
            continue
        name = (made.names or [f"d{d}" for d in range(made.order)])[dim]
        _refuse(f"{text!r} stores dimension {name} not exactly once: name it in one level, or in two as blocks")
    return made


def _has_other(made: Encoding, dim: int) -> bool:
    level = next(level for level in made.levels if level.dim == dim)
    return level.other != dim and any(o.dim == level.other and o.part == "" for o in made.levels)


def _refuse(message: str) -> NoReturn:
    raise ArgumentError(message)


__all__ = ["Encoding", "LevelText", "parse"]
