# SPDX-License-Identifier: Apache-2.0
"""The work for which a structure of edges pays under `sparsetir.torch.patch_pyg`: the measurement behind its rule.

Each step trains two layers on edges that never came before, once with torch_geometric's own functions and once along a
structure that is built for it. Run ``sparsetir bench structures``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

EDGES = (4000, 16000, 64000)
FEATURES = (16, 64, 256)
EDGES_PER_NODE = 4
WORK_OF_STEPS = 3_000_000  # edges times features of all steps together, beyond `MIN_STEPS`
MIN_STEPS = 5


def compare(
    kind: Callable[[int, int], Any], edges: int, features: int, steps: int | None = None
) -> tuple[float, float]:
    """Time training steps of two layers, alternating between both ways.

    Parameters
    ----------
    kind : callable
        A torch_geometric layer of the numbers of features in and out.
    edges, features : int
    steps : int, optional
        Steps to measure after a first one; more for less work by default.

    Returns
    -------
    tuple of float
        Median seconds of processor time of a step with torch_geometric's functions, and along a new structure.
    """
    import torch
    from sparsetir.torch import graph_caches, patch_pyg

    layers = torch.nn.ModuleList([kind(features, features) for _ in range(2)])
    nodes = max(edges // EDGES_PER_NODE, 1)
    seconds: tuple[list[float], list[float]] = ([], [])
    count = MIN_STEPS + WORK_OF_STEPS // (edges * features) if steps is None else steps
    for _ in range(count + 1):
        x, index = torch.randn(nodes, features), torch.randint(0, nodes, (2, edges))
        ways: list[Any] = [nullcontext(), patch_pyg()]
        for samples, context in zip(seconds, ways, strict=True):
            with context, mock.patch.object(graph_caches, "MIN_USES", 0):  # a structure for all edges
                own, start = index.clone(), time.process_time()
                hidden = x
                for layer in layers:
                    hidden = layer(hidden, own).relu()
                hidden.sum().backward()
                samples.append(time.process_time() - start)
    plain, along = (statistics.median(samples[1:]) for samples in seconds)
    return plain, along


def lines(edges: Sequence[int], features: Sequence[int], steps: int | None = None) -> Iterator[str]:
    """Yield the rows of the table, as Markdown."""
    from torch_geometric.nn import GCNConv, SAGEConv

    yield "| layers | edges | features | work | plain (ms) | structure / plain |"
    yield "|---|---:|---:|---:|---:|---:|"
    for kind in (SAGEConv, GCNConv):
        for count in edges:
            for width in features:
                plain, along = compare(kind, count, width, steps)
                row = f"| {kind.__name__} | {count} | {width} | {count * width / 1e6:.2f}M"
                yield f"{row} | {plain * 1e3:.2f} | {along / plain:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("sparsetir bench structures", description=__doc__)
    parser.add_argument("--edges", type=int, nargs="+", default=EDGES)
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args(arguments)
    for line in lines(options.edges, options.features, options.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()


__all__ = ["compare", "lines", "main"]
