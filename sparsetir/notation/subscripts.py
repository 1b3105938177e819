# SPDX-License-Identifier: Apache-2.0
"""Subscripts of index notation, as numpy writes them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sparsetir.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Terms:
    """The letters of an expression.

    Parameters
    ----------
    inputs : tuple of str
        The letters of each operand, one for each dimension.
    output : str
        Those of the result.

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
    """The letters of a text such as ``"ik,kj->ij"``.

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
        raise ArgumentTypeError(f"subscripts are text such as 'ik,kj->ij', found {type(text).__name__}")
    plain = "".join(text.split())
    left, arrow, right = plain.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(orders):
        raise ArgumentError(f"{text!r} is written for {len(inputs)} operands, found {len(orders)}")
    for term in (*inputs, right):
        _check_term(text, term)
    free = [c for c in string.ascii_letters if c not in plain]
    widest = _widest(text, inputs, orders)
    if widest > len(free):
        raise ArgumentError(f"{text!r} needs {widest} more letters for '...', only {len(free)} are left")
    rest = "".join(free[:widest])
    filled = tuple(_filled(t, n, rest) for t, n in zip(inputs, orders, strict=True))
    output = _output(text, right, rest) if arrow else _implicit(left, rest)
    terms = Terms(filled, output)
    unknown = [letter for letter in output if letter not in terms.letters]
    if unknown:
        raise ArgumentError(f"the result of {text!r} has the letter {unknown[0]!r}, which no operand has")
    return terms


def _check_term(text: str, term: str) -> None:
    letters = term.replace("...", "", 1)
    bad = [c for c in letters if not c.isalpha()]
    if bad:
        raise ArgumentError(
            f"expected letters, ',', '...' and one '->' in the subscripts, found {bad[0]!r} in {text!r}"
        )


def _widest(text: str, inputs: Sequence[str], orders: Sequence[int]) -> int:
    """The number of dimensions that ``...`` stands for."""
    widest = 0
    for at, (term, order) in enumerate(zip(inputs, orders, strict=True)):
        named = len(term.replace("...", ""))
        if "..." in term and named <= order:
            widest = max(widest, order - named)
        elif named != order:
            found = f"{term!r} names {named} dimensions" + (" besides '...'" if "..." in term else "")
            raise ArgumentError(f"operand {at} of {text!r} has {order} dimensions, but {found}")
    return widest


def _filled(term: str, order: int, rest: str) -> str:
    count = order - len(term.replace("...", ""))
    return term.replace("...", rest[len(rest) - count :])


def _output(text: str, right: str, rest: str) -> str:
    output = right.replace("...", rest)
    twice = [letter for letter in output if output.count(letter) > 1]
    if twice:
        raise ArgumentError(f"the result of {text!r} has the letter {twice[0]!r} twice")
    return output


def _implicit(left: str, rest: str) -> str:
    named = left.replace("...", "").replace(",", "")
    return rest + "".join(letter for letter in sorted(set(named)) if named.count(letter) == 1)


__all__ = ["Terms", "parse"]
