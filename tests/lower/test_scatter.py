# SPDX-License-Identifier: Apache-2.0
"""Sums and stores whose targets are read from a buffer, or shared by rows, over every format and in every loop nest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsetir
from decomposing import FORMATS, as_csr, made, parsed
from sparsetir.errors import SparseTIRError
from sparsetir.schedules.choices import Choices

M, N, K, TARGETS = 14, 12, 5, 9
CHOICES = {
    "default": None,
    "serial": Choices(chunks=0, lanes=4, tile=8),
    "lanes": Choices(chunks=2, lanes=8),
    "many": Choices(tile=4, chunks=2, unroll=4, panel=2, lanes=8, carry=1),
}
BUFFERS = {
    "Y": ("R,", "float32"),
    "W": ("R,", "float32"),
    "Z": ("R, K", "float32"),
    "B": ("I,", "int32"),
    "E": ("N,", "int32"),
    "X": ("N, K", "float32"),
    "C": ("I, J", "float32"),
}
TEXT = """
@T.prim_func
def program({handles}, indptr: T.handle, indices: T.handle,
            {columns}m: T.int32, n: T.int32, t: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    N = T.dense_fixed(n)
    K = T.dense_fixed({k})
    R = T.dense_fixed(t)
{matches}
    with T.sp_iter([{axes}], "{kinds}", "work") as [{variables}]:
{body}
"""

# The statements for an entry (i, j) and, in Z, a column; and what they do to an environment of arrays.
Step = Callable[[Any, int, int, float], None]
ORDERED = ("last", "weighted", "read")  # whose results depend on the order of entries, which formats change
PROGRAMS: dict[str, tuple[list[str], Step]] = {}


def program(name: str, *statements: str) -> Callable[[Step], Step]:
    """Add a program with the steps of its oracle."""

    def add(step: Step) -> Step:
        PROGRAMS[name] = list(statements), step
        return step

    return add


@program("row", "Y[B[i]] = Y[B[i]] + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.B[i]] += c


@program("column", "Y[E[j]] = Y[E[j]] + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.E[j]] += c


@program("both", "Y[(B[i] + E[j]) // 2] = Y[(B[i] + E[j]) // 2] + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[(of.B[i] + of.E[j]) // 2] += c


@program("halved", "Y[i // 2] = Y[i // 2] + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[i // 2] += c


@program("remainder", "Y[i % 3] = Y[i % 3] - C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[i % 3] -= c


@program("columns halved", "Y[j // 2] = Y[j // 2] + C[i, j] * X[j, 0]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[j // 2] += c * of.X[j, 0]


@program("maximum", "Y[B[i]] = T.max(Y[B[i]], C[i, j])")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.B[i]] = max(of.Y[of.B[i]], c)


@program("minimum of columns", "Y[E[j]] = T.min(Y[E[j]], -C[i, j])")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.E[j]] = min(of.Y[of.E[j]], -c)


@program("last", "Y[B[i]] = C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.B[i]] = c


@program("weighted", "Y[B[i]] = Y[B[i]] * 2.0 + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.B[i]] = of.Y[of.B[i]] * 2 + c


@program("two", "Y[B[i]] = Y[B[i]] + C[i, j]", "W[E[j]] = W[E[j]] + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.B[i]] += c
    of.W[of.E[j]] += c


@program("two of one", "Y[B[i]] = Y[B[i]] + C[i, j]", "Y[E[j]] = Y[E[j]] + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[of.B[i]] += c
    of.Y[of.E[j]] += c


@program("read", "Y[i // 2] = Y[i // 2] + C[i, j]", "W[B[i]] = W[B[i]] + Y[i // 2]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Y[i // 2] += c
    of.W[of.B[i]] += of.Y[i // 2]


@program("wide", "Z[B[i], k] = Z[B[i], k] + C[i, j] * X[j, k]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Z[of.B[i]] += c * of.X[j]


@program("wide halves", "Z[i // 2, k] = Z[i // 2, k] + C[i, j] * X[j, k]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Z[i // 2] += c * of.X[j]


@program("wide columns", "Z[E[j], k] = Z[E[j], k] + C[i, j]")
def _(of: Any, i: int, j: int, c: float) -> None:
    of.Z[of.E[j]] += c


@program("permuted columns", "Z[B[i], (k + i) % 5] = Z[B[i], (k + i) % 5] + C[i, j] * X[j, k]")
def _(of: Any, i: int, j: int, c: float) -> None:
    np.add.at(of.Z, (of.B[i], (np.arange(K) + i) % 5), c * of.X[j])


@program("columns together", "Z[B[i], k // 2] = Z[B[i], k // 2] + C[i, j] * X[j, k]")
def _(of: Any, i: int, j: int, c: float) -> None:
    np.add.at(of.Z, (of.B[i], np.arange(K) // 2), c * of.X[j])


def used(statements: list[str]) -> list[str]:
    """The buffers of some statements."""
    return [name for name in BUFFERS if any(f"{name}[" in s for s in statements)]


def text_of(statements: list[str]) -> str:
    """The program around some statements, over columns where they need them."""
    wide = any("Z[" in s for s in statements)
    axes, variables, kinds = ("I, J, K", "i, j, k", "SSS") if wide else ("I, J", "i, j", "SS")
    body = "\n".join(f"        {s}" for s in statements)
    names = used(statements)
    handles = ", ".join(f"{name.lower()}: T.handle" for name in names)
    columns, k = ("k: T.int32, ", "k") if "X" in names or wide else ("", "5")
    matches = [f'    {n} = T.match_sparse_buffer({n.lower()}, ({BUFFERS[n][0]}), "{BUFFERS[n][1]}")' for n in names]
    return TEXT.format(
        handles=handles,
        matches="\n".join(matches),
        columns=columns,
        k=k,
        axes=axes,
        variables=variables,
        kinds=kinds,
        body=body,
    )


class Arrays:
    """Operands and results; small integers, so that sums are exact in any order."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.C = as_csr(rng.integers(1, 4, (M, N)) * (rng.random((M, N)) < 0.4)).astype("float32")
        self.B, self.E = (rng.integers(0, TARGETS, size).astype("int32") for size in (M, N))
        self.X = rng.integers(-2, 3, (N, K)).astype("float32")
        self.Y, self.W = np.zeros(TARGETS, "float32"), np.zeros(TARGETS, "float32")
        self.Z = np.zeros((TARGETS, K), "float32")

    def run(self, step: Step) -> None:
        """Run a program entry by entry."""
        entries = self.C.tocoo()
        for i, j, c in zip(entries.row, entries.col, entries.data, strict=True):
            step(self, int(i), int(j), c)


@pytest.mark.sampled(72)
@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("format", [None, *FORMATS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_targets_that_steps_share_take_every_update(name: str, format: str | None, choices: str) -> None:
    statements, step = PROGRAMS[name]
    func: Any = parsed(text_of(statements))
    if format is not None and name in ORDERED:
        with pytest.raises(SparseTIRError, match="cannot decompose C"):
            sparsetir.decompose_format(func, {"C": made(format)})
        return
    if format is not None:
        func = sparsetir.decompose_format(func, {"C": made(format)})
    kernel = sparsetir.build(func, {"kind": "llvm", "opt-level": 0}, schedule=CHOICES[choices])
    for seed in (0, 1):
        arrays = Arrays(seed)
        operands = {name: getattr(arrays, name) for name in used(statements)}
        results = {name: operands[name].copy() for name in operands if name in "YWZ"}
        kernel(**(operands | results))
        arrays.run(step)
        for key, got in results.items():
            np.testing.assert_array_equal(got, getattr(arrays, key), err_msg=key)
