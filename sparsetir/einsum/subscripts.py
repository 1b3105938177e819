# SPDX-License-Identifier: Apache-2.0
"""Parser of index notation, and semirings."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.utils.arguments import VALUE_DTYPES, shown

# Subscripts of index notation, in numpy's syntax.


@dataclass(frozen=True)
class Terms:
    """The letters of an expression.

    Parameters
    ----------
    inputs : tuple of str
        The letters of each operand, one for each dimension.
    output : str
        The letters of the result.

    Examples
    --------
    >>> terms = parse("ik,kj", (2, 2))
    >>> terms.inputs, terms.output, terms.summed
    (('ik', 'kj'), 'ij', 'k')
    """

    inputs: tuple[str, ...]
    output: str

    @property
    def letters(self) -> str:
        """Each letter once, in the order in which the operands have them."""
        return "".join(dict.fromkeys("".join(self.inputs)))

    @property
    def summed(self) -> str:
        """Letters that the result does not have."""
        return "".join(letter for letter in self.letters if letter not in self.output)

    def __str__(self) -> str:
        return f"{','.join(self.inputs)}->{self.output}"


@lru_cache(maxsize=1024)
def parse(text: str, orders: tuple[int, ...]) -> Terms:
    """Parse a text such as ``"ik,kj->ij"`` to letters.

    Parameters
    ----------
    text : str
        With ``...`` for the remaining dimensions of an operand, which broadcast from the right; without ``->`` the
        result has the letters that occur once, in alphabetical order after those of ``...``.
    orders : tuple of int
        The number of dimensions of each operand.

    Raises
    ------
    ArgumentError
        The text is no expression, or does not fit the operands.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"subscripts are text such as 'ik,kj->ij', got {type(text).__name__}")
    plain = "".join(text.split())
    terms_text, arrow, right = plain.partition("->")
    inputs = terms_text.split(",")
    if len(inputs) != len(orders):
        raise ArgumentError(f"{text!r} is written for {len(inputs)} operands, got {len(orders)}")
    for term in (*inputs, right):
        _check_term(text, term)
    free = [c for c in string.ascii_letters if c not in plain]
    widest = _widest(text, inputs, orders)
    if widest > len(free):
        raise ArgumentError(f"{text!r} needs {widest} more letters for '...', only {len(free)} are left")
    ellipsis_letters = "".join(free[:widest])
    filled = tuple(_filled(t, n, ellipsis_letters) for t, n in zip(inputs, orders, strict=True))
    output = _output(text, right, ellipsis_letters) if arrow else _implicit(terms_text, ellipsis_letters)
    terms = Terms(filled, output)
    unknown = [letter for letter in output if letter not in terms.letters]
    if unknown:
        raise ArgumentError(f"the result of {text!r} has the letter {unknown[0]!r}, which no operand has")
    return terms


def _check_term(text: str, term: str) -> None:
    letters = term.replace("...", "", 1)
    bad = [c for c in letters if not c.isalpha()]
    if bad:
        raise ArgumentError(f"expected letters, ',', '...' and one '->' in the subscripts, got {bad[0]!r} in {text!r}")


def _widest(text: str, inputs: Sequence[str], orders: Sequence[int]) -> int:
    """Return the number of dimensions that ``...`` represents."""
    widest = 0
    for at, (term, order) in enumerate(zip(inputs, orders, strict=True)):
        letters = len(term.replace("...", ""))
        if "..." in term and letters <= order:
            widest = max(widest, order - letters)
        elif letters != order:
            mismatch = f"{term!r} names {letters} dimensions" + (" besides '...'" if "..." in term else "")
            raise ArgumentError(f"operand {at} of {text!r} has {order} dimensions, but {mismatch}")
    return widest


def _filled(term: str, order: int, ellipsis: str) -> str:
    count = order - len(term.replace("...", ""))
    return term.replace("...", ellipsis[len(ellipsis) - count :])


def _output(text: str, right: str, ellipsis: str) -> str:
    output = right.replace("...", ellipsis)
    twice = [letter for letter in output if output.count(letter) > 1]
    if twice:
        raise ArgumentError(f"the result of {text!r} has the letter {twice[0]!r} twice")
    return output


def _implicit(left: str, ellipsis: str) -> str:
    letters = left.replace("...", "").replace(",", "")
    return ellipsis + "".join(letter for letter in sorted(set(letters)) if letters.count(letter) == 1)


# Reduction and combination of an expression, and the value of entries that are not stored.


REDUCE = {"sum": "sum", "add": "sum", "prod": "prod", "max": "max", "min": "min", "any": "sum", "all": "prod"}
COMBINE = {"mul": "mul", "add": "add", "max": "max", "min": "min", "and": "mul", "or": "add"}
LOGICAL = ("any", "all", "and", "or")
LIMITS = {name: (int(np.iinfo(name).min), int(np.iinfo(name).max)) for name in VALUE_DTYPES if "int" in name}
LIMITS["bool"] = (False, True)


@dataclass(frozen=True)
class Semiring:
    """Reduction and combination of the elements of operands.

    Parameters
    ----------
    reduce : {"sum", "prod", "max", "min"}
        How the terms of one element of the result are reduced.
    combine : {"mul", "add", "max", "min"}
        How the elements of the operands are combined.
    fill : float or None
        The value of entries that a sparse operand does not store; None where they take no part.

    Examples
    --------
    >>> ring = Semiring("max", "add", float("-inf"))
    >>> ring.skips("float32", 2), ring.body("C[i]", ["A[i, j]", "x[j]"])
    (True, 'T.max(C[i], A[i, j] + x[j])')
    """

    reduce: str = "sum"
    combine: str = "mul"
    fill: float | None = 0

    def identity(self, dtype: str) -> Any:
        """Return the identity of the reduction."""
        if self.reduce in ("sum", "prod"):
            one = self.reduce == "prod"
            return one if dtype == "bool" else int(one)
        low, high = LIMITS.get(dtype, (-math.inf, math.inf))
        return low if self.reduce == "max" else high

    def absorbs(self, dtype: str) -> bool:
        """Return whether `fill` absorbs every other element in a combination."""
        if self.fill is None:
            return True
        low, high = LIMITS.get(dtype, (-math.inf, math.inf))
        signed = {"mul": (0,), "min": (low,), "max": (high,), "add": () if dtype in LIMITS else (low, high)}
        ends = (0, 1) if dtype == "bool" else ()
        logical = {"mul": ends[:1], "add": ends[1:], "min": ends[:1], "max": ends[1:]}
        return self.fill in (logical if dtype == "bool" else signed)[self.combine]

    def skips(self, dtype: str, operands: int) -> bool:
        """Return whether elements that are not stored change no result, so that loops may skip them."""
        return self.fill is None or (self.fill == self.identity(dtype) and (operands == 1 or self.absorbs(dtype)))

    def without_reduction(self, dtype: str, operands: int) -> Semiring:
        """Return the semiring where nothing is reduced: any reduction will do, best one that skips."""
        rings = (replace(self, reduce=name) for name in dict.fromkeys(REDUCE.values()))
        return next((ring for ring in rings if ring.skips(dtype, operands)), self)

    def product(self, reads: Sequence[str]) -> str:
        """Return the text of one product."""
        if self.combine in ("mul", "add"):
            return (" * " if self.combine == "mul" else " + ").join(reads)
        return reduce(lambda a, b: f"T.{self.combine}({a}, {b})", reads)

    def body(self, target: str, reads: Sequence[str]) -> str:
        """Return the text of one step of the reduction."""
        product = self.product(reads)
        if self.reduce == "sum":
            return f"{target} + {product}"
        if self.reduce == "prod":
            return f"{target} * ({product})" if self.combine == "add" and len(reads) > 1 else f"{target} * {product}"
        return f"T.{self.reduce}({target}, {product})"

    @property
    def adds_entries(self) -> bool:
        """True if duplicate entries may stay apart: sums of products add them up."""
        return (self.reduce, self.combine) == ("sum", "mul")

    @property
    def is_usual(self) -> bool:
        """True if these are sum and product."""
        return (self.reduce, self.combine, self.fill) == ("sum", "mul", 0)


USUAL = Semiring()


def semiring(reduce: str, combine: str, fill: Any, dtype: str) -> Semiring:
    """Return the semiring of these names.

    Raises
    ------
    ArgumentError
        A name is not known, or a logical one belongs to another dtype than bool.
    """
    for name, what, functions in ((reduce, "reduce", REDUCE), (combine, "combine", COMBINE)):
        if not isinstance(name, str) or name not in functions:
            raise ArgumentError(f"{what} is one of {', '.join(functions)}, got {shown(name)}")
        if name in LOGICAL and dtype != "bool":
            raise ArgumentError(f"{what}={name!r} is for operands of bool, got {dtype}: pass .astype(bool)")
    return Semiring(REDUCE[reduce], COMBINE[combine], _fill_value(fill, dtype))


def _fill_value(fill: Any, dtype: str) -> float | None:
    if fill is None:
        return None
    if isinstance(fill, str) or getattr(fill, "shape", ()) != ():
        raise ArgumentTypeError(f"fill is a number, got {type(fill).__name__}")
    try:
        value: float = fill.item() if hasattr(fill, "item") else fill
        fits = not isinstance(value, complex) and value == value
        is_whole = dtype not in LIMITS or (math.isfinite(value) and value == int(value))
    except TypeError:
        raise ArgumentTypeError(f"fill is a number, got {type(fill).__name__}") from None
    low, high = LIMITS.get(dtype, (-math.inf, math.inf))
    if not fits or not is_whole or not low <= value <= high:
        raise ArgumentError(f"fill is a value of {dtype}, got {shown(fill)}")
    return value


def literal(value: Any, dtype: str) -> str:
    """Return a number as program text."""
    if dtype not in LIMITS and math.isinf(value):
        return f'T.{dtype}("{"inf" if value > 0 else "-inf"}")'
    return str(value)


__all__ = ["COMBINE", "REDUCE", "USUAL", "Semiring", "Terms", "literal", "parse", "semiring"]
