# SPDX-License-Identifier: Apache-2.0
"""What a data set of measurements is of: matrices, and for each of them programs, dtypes and numbers of threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
from tvm import tirx

from sparsetir import ops
from sparsetir.alignment import aligned
from sparsetir.formats.tensor import SparseTensor
from sparsetir.harness import drawn, suite
from sparsetir.harness.inputs import find_files, from_files
from sparsetir.harness.operands import DENSE
from sparsetir.interop import CooTensor

SMALLEST, LARGEST = 3_000, 500_000  # entries of generated matrices
MOST_WORK, MOST_ELEMENTS = 24e6, 6e6  # entries times columns, and elements of a dense operand
# What is drawn for a matrix: weight, operation, dtype, columns of dense operands, threads. Few enough combinations that
# each kernel is compiled once and measured on many matrices.
PROGRAMS = 6  # different programs drawn at random
COMBINATIONS: tuple[tuple[float, str, str, tuple[int, ...], int], ...] = (
    (10, "spmm", "float32", (8, 32, 128, 512), 1),
    (4, "spmm", "float64", (32,), 1),
    (3, "spmm", "bfloat16", (64,), 1),
    (4, "spmm", "float32", (64,), 2),
    (4, "spmv", "float32", (1,), 1),
    (2, "spmv", "float64", (1,), 1),
    (1, "spmv", "bfloat16", (1,), 1),
    (2, "spmv", "float32", (1,), 2),
    (4, "sddmm", "float32", (8, 64, 512), 1),
    (2, "sddmm", "float64", (64,), 1),
    (1, "sddmm", "bfloat16", (64,), 1),
    (2, "sddmm", "float32", (64,), 2),
    (8, "drawn", "float32", (32,), 1),
    (1, "drawn", "float64", (32,), 1),
)
OF_TENSORS: tuple[tuple[float, str, str, tuple[int, ...], int], ...] = (
    (3, "mttkrp", "float32", (16, 64), 1),
    (1, "mttkrp", "float64", (32,), 1),
    (1, "mttkrp", "float32", (32,), 2),
)
TENSORS = 0.08  # of tensors among matrices
NUMBERED = re.compile(r"_\d+d?$")  # members that differ in a number, such as pruned_50 and pruned_90, are one family


@dataclass(frozen=True)
class Source:
    """A matrix or tensor that is not in memory yet.

    Parameters
    ----------
    name, family : str
        What it is called, and what kind it is.
    load : callable
        Gives a scipy.sparse array or a CooTensor.
    """

    name: str
    family: str
    load: Callable[[], Any]


@dataclass(frozen=True)
class Job:
    """A program to be measured on a matrix.

    Parameters
    ----------
    op : str
        ``"spmm"``, ..., or ``"drawn_7"`` for a program that is drawn at random.
    feat : int
        Columns of the dense operands; 1 where they are vectors.
    dtype : str
    threads : int
    """

    op: str
    feat: int
    dtype: str
    threads: int

    @property
    def kind(self) -> str:
        """The operation; ``"drawn"`` for all programs drawn at random."""
        return self.op.partition("_")[0]

    @property
    def program(self) -> tirx.PrimFunc:
        """At stage I."""
        if self.kind == "drawn":
            return drawn.draw(int(self.op.partition("_")[2]), self.dtype).program
        func: tirx.PrimFunc = getattr(ops, self.op)(self.dtype)
        return func

    def inputs(self, sparse: Any) -> dict[str, Any]:
        """The arguments of a call on a matrix or tensor."""
        held = typed(sparse, self.dtype)
        if self.kind == "drawn":
            return drawn.draw(int(self.op.partition("_")[2]), self.dtype).inputs(held, self.feat, self.dtype)
        rng, shape = np.random.default_rng(0), sparse.shape
        sizes = {n: (shape[d], self.feat) if wide else (shape[d],) for n, (d, wide) in DENSE[self.op].items()}
        dense = {n: aligned(rng.standard_normal(s, np.float32).astype(self.dtype)) for n, s in sizes.items()}
        return {{"sddmm": "S", "mttkrp": "T_"}.get(self.op, "A"): held, **dense}


def typed(sparse: Any, dtype: str) -> Any:
    """A matrix or tensor with values of a dtype; scipy has no bfloat16."""
    if isinstance(sparse, CooTensor):
        return sparse.with_values(sparse.values.astype(dtype))
    return SparseTensor.from_any(sparse).astype(dtype) if dtype == "bfloat16" else sparse.astype(dtype)


def sources(matrices: int, *, seed: int = 0, data: Path | None = None) -> Iterator[Source]:
    """Generated matrices and tensors, the families in turn, of sizes drawn at random; then the files below a folder."""
    rng = np.random.default_rng(seed)
    names = [name for name in suite.families() if name != "empty"]
    for n in range(matrices):
        of = list(suite.tensors()) if rng.random() < TENSORS else names
        name, size = of[n % len(of)], int(np.exp(rng.uniform(np.log(SMALLEST), np.log(LARGEST))))
        yield Source(
            f"{name}-{size}-{seed + n}", NUMBERED.sub("", name), partial(suite.generate, name, size, seed=seed + n)
        )
    for found in from_files(find_files(data)) if data is not None else []:
        yield Source(found.name, found.name, found.load)


def jobs(sparse: Any, count: int, rng: np.random.Generator) -> list[Job]:
    """Different programs for a matrix or tensor; fewer where it is too large for most."""
    wanted = [_job(sparse, rng) for _ in range(2 * count)]
    return list(dict.fromkeys(job for job in wanted if job is not None))[:count]


def _job(sparse: Any, rng: np.random.Generator) -> Job | None:
    rows = OF_TENSORS if len(sparse.shape) == 3 else COMBINATIONS
    weights = np.array([row[0] for row in rows])
    _, op, dtype, feats, threads = rows[int(rng.choice(len(rows), p=weights / weights.sum()))]
    if op == "drawn":
        number = int(rng.integers(PROGRAMS))
        op, feats = f"drawn_{number}", feats if drawn.draw(number).has_feat else (1,)
    most = min(MOST_WORK / max(sparse.nnz, 1), MOST_ELEMENTS / max(sparse.shape))
    fitting = [feat for feat in feats if feat <= max(most, 1)]
    return Job(op, fitting[int(rng.integers(len(fitting)))], dtype, threads) if fitting else None


__all__ = ["Job", "Source", "jobs", "sources", "typed"]
