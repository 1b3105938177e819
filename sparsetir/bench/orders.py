# SPDX-License-Identifier: Apache-2.0
"""Chains of three to five matrices: the order that `einsum` takes beside every order of products of two.

``sparsetir bench orders`` prints a Markdown table: the steps that were chosen, the milliseconds of a call, of
the best of all orders by hand and of the worst, and the chosen over the best. The geometric mean is in the last row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from sparsetir.einsum import einsum, einsum_expression
from sparsetir.utils.arguments import parse_seconds
from sparsetir.utils.threads import set_num_threads
from sparsetir.workloads import suite
from sparsetir.workloads.inputs import say
from sparsetir.workloads.plot import markdown
from sparsetir.workloads.timing import interleave

Tree: TypeAlias = "int | tuple[Tree, Tree]"
FAMILIES = ("uniform", "rmat", "banded", "fem_blocks", "communities", "long_tail")
SHAPES = ("A A X", "A X W", "A W X", "R A P", "A A P", "A A A X", "R A A P X")
LETTERS = "abcdefgh"
AGGREGATE = 8  # rows of A that are one of P
SEED = 7


@dataclass(frozen=True)
class ChainResult:
    """One chain: its name, the steps that were chosen, and seconds."""

    name: str
    steps: list[tuple[int, ...]]
    own: float
    best: float
    worst: float

    @property
    def ratio(self) -> float:
        return self.own / self.best

    def cells(self) -> list[str]:
        times = [f"{t * 1e3:.3g}" for t in (self.own, self.best, self.worst)]
        return [self.name, " ".join(map(str, self.steps)), *times, f"{self.ratio:.2f}"]


def operands(A: Any, shape: str) -> list[Any]:
    """Return the matrices of a chain: R and P aggregate rows of A, X has 16 columns, W more and X fewer after it."""
    rng, n = np.random.default_rng(SEED), A.shape[1]
    count = -(-n // AGGREGATE)
    P = sp.csr_array((np.ones(n, np.float32), np.arange(n) // AGGREGATE, np.arange(n + 1)), shape=(n, count))
    values: list[Any] = []
    for name in shape.split():
        rows = values[-1].shape[1] if values else 0
        dense = {"X": (rows, 16), "W": (rows, 64)}.get(name)
        matrices = {"A": A, "P": P, "R": P.T.tocsr()}
        values.append(matrices[name] if dense is None else rng.standard_normal(dense, np.float32))
    return values


def trees(first: int, after: int) -> Iterator[Tree]:
    """Yield the orders of products of two, of the operands from `first` up to `after`.

    Examples
    --------
    >>> [len(list(trees(0, n))) for n in (2, 3, 4, 5)]
    [1, 2, 5, 14]
    """
    if after - first == 1:
        yield first
    for middle in range(first + 1, after):
        yield from ((left, right) for left in trees(first, middle) for right in trees(middle, after))


def evaluate(tree: Tree, values: Sequence[Any]) -> Any:
    """Return the product of the operands in one order."""
    if isinstance(tree, int):
        return values[tree]
    return einsum("ij,jk->ik", *(evaluate(part, values) for part in tree))


def measure(name: str, values: Sequence[Any], *, rounds: int, rest: float) -> ChainResult:
    """Time one chain in the order that `einsum` takes and in all others."""
    count = len(values)
    text = ",".join(LETTERS[n : n + 2] for n in range(count)) + f"->{LETTERS[0]}{LETTERS[count]}"
    calls: dict[str, Callable[[], Any]] = {"own": partial(einsum, text, *values)}
    calls |= {str(tree): partial(evaluate, tree, values) for tree in trees(0, count)}
    for call in calls.values():
        call()
    times = {key: timing.median for key, timing in interleave(calls, rounds=rounds, rest=rest).items()}
    alternatives = [seconds for key, seconds in times.items() if key != "own"]
    steps = [step.members for step in einsum_expression(text, *values).steps]
    return ChainResult(name, steps, times["own"], min(alternatives), max(alternatives))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="sparsetir bench orders", description=__doc__)
    parser.add_argument("--nnz", type=int, default=100_000, metavar="N", help="entries of A")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each order")
    parser.add_argument("--rest", type=parse_seconds, default=0.0, metavar="SECONDS", help="sleep before each turn")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--families", default=",".join(FAMILIES), metavar="NAMES", help="of generated matrices")
    parser.add_argument("--shapes", default=",".join(SHAPES), metavar="NAMES", help="chains of A, P, R, X and W")
    args = parser.parse_args(argv)
    if not set(args.shapes.split(",")) <= set(SHAPES):
        parser.error(f"--shapes names some of {', '.join(SHAPES)}, got {args.shapes}")
    unknown = set(args.families.split(",")) - set(suite.families())
    if unknown or min(args.nnz, args.rounds) < 1:
        parser.error(f"--families names some of {', '.join(suite.families())}; --nnz and --rounds are at least 1")
    if args.threads is not None:
        set_num_threads(args.threads)
    chains = []
    for family in args.families.split(","):
        A = suite.generate(family, args.nnz, seed=SEED)
        for shape in args.shapes.split(",") if A.shape[0] == A.shape[1] else ():
            chains.append(measure(f"{family}: {shape}", operands(A, shape), rounds=args.rounds, rest=args.rest))
            say(" | ".join(chains[-1].cells()))
    if not chains:
        parser.error("none of these families is square")
    mean = math.exp(sum(math.log(f.ratio) for f in chains) / len(chains))
    rows = [["", "steps", "own ms", "best ms", "worst ms", "own / best"], *(f.cells() for f in chains)]
    print(markdown([*rows, ["geometric mean", "", "", "", "", f"{mean:.2f}"]]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())


__all__ = ["ChainResult", "evaluate", "main", "measure", "operands", "trees"]
