# SPDX-License-Identifier: Apache-2.0
"""Programs over one CSR matrix that are drawn at random: what a cost model learns from besides the ready ones.

A program multiplies, subtracts or compares the matrix's values with rows, columns and numbers of dense operands, and
sums the terms, or takes the largest, into dense rows, a vector, or the entries of the pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from sparsetir.errors import ArgumentError
from sparsetir.script.printer import parse
from sparsetir.utils.buffers import aligned

# The dense operands that a program may have: their axes and subscripts.
OPERANDS = {
    "B": (("J_dense", "K"), "j, k"),
    "D": (("I", "K"), "i, k"),
    "x": (("J_dense",), "j"),
    "z": (("I",), "i"),
    "w": (("K",), "k"),
}
LENGTHS = {"I": 0, "J_dense": 1}  # dimension of the matrix
# Results: the axes, the kinds of the loops over I, J and K, and the operands of which one is always there.
RESULTS = {
    "rows": (("I", "K"), "SRS", ("B",)),
    "sums": (("I",), "SR", ("x",)),
    "entries": (("I", "J"), "SS", ("x", "z")),
    "dots": (("I", "J"), "SSR", ("B",)),
}
MOST_OPERANDS = 3
DIFFERENCES, LARGEST = 0.25, 0.2  # shares of differences among products, and of programs that take the largest term
HEAD = """
@T.prim_func
def {name}({handles}, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32{feat}):
    I = T.dense_fixed(m, "int32")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_dense = T.dense_fixed(n, "int32")
{axes}{buffers}
    with T.sp_iter([{order}], "{kinds}", "{name}") as [{letters}]:
        with T.init():
            {result} = {start}
        {result} = {update}
"""
PLAIN = """
    with T.sp_iter([{order}], "{kinds}", "{name}") as [{letters}]:
        {result} = {term}
"""


@dataclass(frozen=True)
class Drawn:
    """A program with the names of its operands.

    Parameters
    ----------
    text : str
        As a script.
    operands : tuple of str
        The dense ones that it reads.
    has_feat : bool
        Whether there is an axis of features.
    """

    text: str
    operands: tuple[str, ...]
    has_feat: bool

    @property
    def program(self) -> tirx.PrimFunc:
        """The program at stage I."""
        func: tirx.PrimFunc = parse(self.text)
        return func

    def inputs(self, matrix: Any, feat: int, dtype: str, *, seed: int = 0) -> dict[str, Any]:
        """Random dense operands for a matrix, in one dtype, and the matrix itself."""
        rng, shapes = np.random.default_rng(seed), {**dict(zip(LENGTHS, matrix.shape, strict=True)), "K": feat}
        dense = {
            name: aligned(rng.standard_normal([shapes[a] for a in OPERANDS[name][0]], np.float32).astype(dtype))
            for name in self.operands
        }
        return {"A": matrix, **dense}


def draw(seed: int, dtype: str = "float32") -> Drawn:
    """Return a program, the same for the same seed.

    Parameters
    ----------
    seed : int
    dtype : str
        Of all values.

    Raises
    ------
    ArgumentError
        The seed is negative.

    Examples
    --------
    >>> draw(0).text.splitlines()[1].partition("(")[0]
    'def drawn_0'
    """
    if seed < 0:
        raise ArgumentError(f"seed must be an integer that is not negative, found {seed}")
    rng = np.random.default_rng(seed)
    kind = list(RESULTS)[int(rng.integers(len(RESULTS)))]
    result_axes, kinds, needed = RESULTS[kind]
    has_feat = len(kinds) == 3
    possible = [name for name, (axes, _) in OPERANDS.items() if has_feat or "K" not in axes]
    first = needed[int(rng.integers(len(needed)))]
    others = [name for name in possible if name != first]
    count = int(rng.integers(0, min(MOST_OPERANDS, len(others)) + 1)) if others else 0
    chosen = [first, *(others[n] for n in sorted(rng.permutation(len(others))[:count]))]
    term = _term(rng, chosen)
    return Drawn(_text(f"drawn_{seed}", dtype, result_axes, kinds, chosen, term, rng), tuple(chosen), has_feat)


def _term(rng: np.random.Generator, operands: list[str]) -> str:
    """Return the term of an entry: the matrix's value and the operands, in some order."""
    parts = ["A[i, j]", *(f"{name}[{OPERANDS[name][1]}]" for name in operands)]
    parts = [parts[n] for n in rng.permutation(len(parts))]
    while len(parts) > 1:
        left, right = parts.pop(), parts.pop()
        parts.append(f"({left} - {right})" if rng.random() < DIFFERENCES else f"{left} * {right}")
    return parts[0]


def _text(
    name: str, dtype: str, result: tuple[str, ...], kinds: str, operands: list[str], term: str, rng: np.random.Generator
) -> str:
    buffers = {"A": ("I", "J"), **{name: OPERANDS[name][0] for name in operands}, "C": result}
    lines = [f'    {b} = T.match_sparse_buffer({b.lower()}_, ({", ".join(a)},), "{dtype}")' for b, a in buffers.items()]
    letter = {"I": "i", "J": "j", "K": "k", "J_dense": "j"}
    stored = f"C[{', '.join(letter[a] for a in result)}]"
    is_largest = "R" in kinds and rng.random() < LARGEST
    held = {
        "name": name,
        "handles": ", ".join(f"{b.lower()}_: T.handle" for b in buffers),
        "feat": ", feat: T.int32" if len(kinds) == 3 else "",
        "axes": '    K = T.dense_fixed(feat, "int32")\n' if len(kinds) == 3 else "",
        "buffers": "\n".join(lines),
        "order": ", ".join("IJK"[: len(kinds)]),
        "letters": ", ".join("ijk"[: len(kinds)]),
        "kinds": kinds,
        "result": stored,
        "term": term,
        "start": f'T.min_value("{dtype}")' if is_largest else "0",
        "update": f"T.max({stored}, {term})" if is_largest else f"{stored} + {term}",
    }
    head, _, body = HEAD.rpartition("    with T.sp_iter")
    whole = head + (f"    with T.sp_iter{body}" if "R" in kinds else PLAIN.lstrip("\n"))
    return whole.format(**held).lstrip("\n")


__all__ = ["Drawn", "draw"]
