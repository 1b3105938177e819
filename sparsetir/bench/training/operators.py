# SPDX-License-Identifier: Apache-2.0
"""Single operators with gradients: ours beside torch's of sparse CSR tensors, and sparse layers beside dense ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import torch
from sparsetir.bench.training import measure
from sparsetir.bench.training.problems import NodeProblem
from sparsetir.torch import Graph, SparseLinear
from sparsetir.workloads.reference import WrongResultError
from torch import Tensor

OURS, TORCH = "ours", "torch"
HEAD = ("ours ms", "torch ms", "ratio", "spread")
BATCH, INPUTS, OUTPUTS, DENSITY = 128, 1024, 4096, 0.1
Call = Callable[[], Any]
CLOSE = 1e-3


def passes(forward: Callable[..., Tensor], *inputs: Tensor) -> Call:
    """Return a call that runs a function and then its gradients; it returns both."""
    wanting = [x.detach().clone().requires_grad_() for x in inputs]
    g = torch.randn(forward(*wanting).shape, generator=torch.Generator().manual_seed(0))

    def call() -> list[Tensor]:
        y = forward(*wanting)
        return [y.detach(), *torch.autograd.grad(y, wanting, g)]

    return call


def cases(problem: NodeProblem, features: int) -> dict[str, dict[str, Call]]:
    """Each operator in both ways, on operands that are alike."""
    graph, matrix = Graph(problem.adjacency).weighted(None), problem.adjacency
    indptr, indices = (torch.from_numpy(part.astype(np.int64)) for part in (matrix.indptr, matrix.indices))
    ones = torch.ones(matrix.nnz)

    def csr(values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(indptr, indices, values, size=matrix.shape, check_invariants=False)

    fixed = csr(ones)
    # No two of a column are equal: torch gives the whole gradient of equal maxima to one of them.
    x = torch.rand(matrix.shape[1], features).argsort(dim=0) / max(matrix.shape[1], 1)
    w = torch.rand(matrix.nnz)
    graph_cases = {
        f"spmm, {features} features": {
            OURS: passes(graph.spmm, x),
            TORCH: passes(lambda x: torch.sparse.mm(fixed, x), x),
        },
        f"spmm with trained weights, {features} features": {
            OURS: passes(graph.spmm, x, w),
            TORCH: passes(lambda x, w: torch.sparse.mm(csr(w), x), x, w),
        },
        f"spmm, maxima, {features} features": {
            OURS: passes(lambda x: graph.spmm(x, reduce="max"), x),
            TORCH: passes(lambda x: torch.sparse.mm(fixed, x, "amax"), x),
        },
    }
    return graph_cases | {f"linear {INPUTS}-{OUTPUTS}, {DENSITY:.0%} of the weights, batch {BATCH}": layers()}


def layers() -> dict[str, Call]:
    """Return a step of a sparse layer, and of the dense layer with all weights."""
    dense = torch.nn.Linear(INPUTS, OUTPUTS)
    sparse, x = SparseLinear.from_dense(dense, DENSITY), torch.randn(BATCH, INPUTS, requires_grad=True)
    g = torch.randn(BATCH, OUTPUTS)
    step = lambda layer: lambda: torch.autograd.grad(layer(x), [x, *layer.parameters()], g)  # noqa: E731
    return {OURS: step(sparse), TORCH: step(dense)}


def rows(problem: NodeProblem, features: int, rounds: int, *, cpu: bool = False) -> list[list[str]]:
    """Return a row of a table for each operator.

    Raises
    ------
    WrongResultError
        The two ways differ.
    """
    table_rows = []
    for name, calls in cases(problem, features).items():
        results = [calls[way]() for way in (OURS, TORCH)]
        if not name.startswith("linear"):
            _check(name, *results)
        times = measure.in_turn(calls, rounds, clock=time.process_time if cpu else None)
        our_seconds, torch_seconds = (times[way].median for way in (OURS, TORCH))
        spread = max(t.spread for t in times.values())
        table_rows.append(
            [
                problem.name,
                name,
                f"{our_seconds * 1e3:.3f}",
                f"{torch_seconds * 1e3:.3f}",
                f"{torch_seconds / our_seconds:.2f}",
                f"{spread:.0%}",
            ]
        )
    return table_rows


def _check(name: str, results: list[Tensor], references: list[Tensor]) -> None:
    for result, expected in zip(results, references, strict=True):
        if not torch.allclose(result, expected, rtol=CLOSE, atol=CLOSE * max(1.0, float(expected.abs().max()))):
            raise WrongResultError(f"{name} differs from torch by {float((result - expected).abs().max()):.1e}")


__all__ = ["HEAD", "cases", "rows"]
