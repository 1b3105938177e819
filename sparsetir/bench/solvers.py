# SPDX-License-Identifier: Apache-2.0
"""scipy's iterative solvers on a matrix, and on `sparsetir.linear_operator` of it.

Run ``sparsetir bench solvers``. A solve includes wrapping the matrix, so that compiling and converting in the
background count. Both sides run in turn; the tables have the least time of several rounds. A product of each kind is
compiled before, as the disk cache keeps it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as linalg

from sparsetir.einsum.linear_operators import linear_operator
from sparsetir.utils.threads import get_num_threads

EIGENVALUES = 4
Problem = tuple[Any, Callable[[Any, Any], Any], np.ndarray]


def stencil(side: int, wind: float = 0.0, stretch: float = 1.0) -> sp.csr_array:
    """Return the 5-point stencil of a square, of convection and diffusion where there is wind.

    Eigenvalues of a stretched square are single ones.
    """
    ones = np.ones(side - 1)
    line = sp.diags_array([-(1 + wind) * ones, 2.01 * np.ones(side), -(1 - wind) * ones], offsets=[-1, 0, 1])
    identity = sp.eye_array(side)
    return sp.csr_array(sp.kron(identity, line) + stretch * sp.kron(line, identity))


def observations(rows: int, columns: int, rng: np.random.Generator) -> sp.csr_array:
    """Return a matrix of least squares with eight entries in a row."""
    indices = rng.integers(columns, size=8 * rows)
    return sp.csr_array((rng.standard_normal(8 * rows), indices, np.arange(0, 8 * rows + 1, 8)), shape=(rows, columns))


def problems(side: int, iterations: int) -> dict[str, Problem]:
    """Return matrix, solver and right-hand side of each problem by the solver's name."""
    rng = np.random.default_rng(0)
    n = side * side
    settings: dict[str, Any] = {"rtol": 1e-30, "maxiter": iterations}
    return {
        "cg": (stencil(side), lambda A, b: linalg.cg(A, b, **settings)[0], rng.random(n)),
        "gmres": (
            stencil(side, 0.4),
            lambda A, b: linalg.gmres(A, b, rtol=1e-30, restart=20, maxiter=max(1, iterations // 20))[0],
            rng.random(n),
        ),
        "lsqr": (
            observations(n, n // 4, rng),
            lambda A, b: linalg.lsqr(A, b, atol=0, btol=0, conlim=0, iter_lim=iterations)[0],
            rng.random(n),
        ),
        "eigsh": (
            stencil(side, stretch=1.3),
            lambda A, b: linalg.eigsh(A, EIGENVALUES, which="LM", v0=b, tol=1e-2)[0],
            rng.random(n),
        ),
    }


def _unchanged(A: Any) -> Any:
    return A


def lines(sides: Sequence[int], iterations: Sequence[int], repeat: int) -> Iterator[str]:
    """Yield the rows of the table."""
    yield "| solver | rows | iterations | scipy ms | ours ms | announced ms | scipy / ours | scipy / announced |"
    yield "|---|---|---|---|---|---|---|---|"
    for side in sides:
        for most in iterations:
            for name, (A, solve, b) in problems(side, most).items():
                ways: dict[str, Callable[[], Any]] = {
                    "scipy": partial(_unchanged, A),
                    "ours": partial(linear_operator, A),
                    "calls": partial(linear_operator, A, expected_calls=most),
                }
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                expected = solve(A, b)
                for wrap in ways.values():  # compiles
                    np.testing.assert_allclose(solve(wrap(), b), expected, rtol=1e-3, atol=1e-3 * abs(expected).max())
                for _ in range(repeat):
                    for way, wrap in ways.items():
                        start = time.perf_counter()
                        solve(wrap(), b)
                        seconds[way].append(time.perf_counter() - start)
                scipy, ours, calls = (1e3 * min(seconds[way]) for way in ways)
                figures = f"{scipy:.1f} | {ours:.1f} | {calls:.1f} | {scipy / ours:.2f} | {scipy / calls:.2f}"
                yield f"| {name} | {A.shape[0]} | {most} | {figures} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("sparsetir bench solvers", description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[50, 300, 700], help="of the square of the stencil")
    parser.add_argument("--iterations", type=int, nargs="+", default=[5, 100, 400], help="limits of the solvers")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of which the least time counts")
    options = parser.parse_args(arguments)
    print(f"{get_num_threads()} thread(s), float64\n")
    for line in lines(options.sides, options.iterations, options.repeat):
        print(line, flush=True)


if __name__ == "__main__":
    main()


__all__ = ["lines", "main", "problems", "stencil"]
