# SPDX-License-Identifier: Apache-2.0
"""The loops of a program without its arithmetic."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

HEADS = ("for ", "if ", "else:", "with T.s")
STORE = re.compile(r"( *)(\w+)\[.*\] = .*")


def outline(text: str) -> str:
    """The loops and conditions of a script, and which arrays are stored to in them; of searches, that there is one.

    Examples
    --------
    >>> print(outline("for i in range(m):\\n    x = T.int32()\\n    y[i * 4] = a[i] + y[i]\\n    y[i] = T.exp(a[i])"))
    for i in range(m):
        y[...] = ...
    """
    return "\n".join(line for line, _ in itertools.groupby(_kept(text.splitlines())))


def _kept(lines: list[str]) -> Iterator[str]:
    searched = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if searched is not None and depth > searched:
            continue
        searched = depth if line.lstrip().startswith("while ") else None
        if searched is not None:
            yield f"{line[:depth]}while ...:"
            continue
        store = STORE.fullmatch(line)
        if store is not None:
            yield f"{store[1]}{store[2]}[...] = ..."
        elif line.lstrip().startswith(HEADS):
            yield line


__all__ = ["outline"]
