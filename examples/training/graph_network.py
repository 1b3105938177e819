# SPDX-License-Identifier: Apache-2.0
"""Train a graph network: ours beside torch's sparse matrices and torch_geometric, and the losses of all in one picture.

``python examples/training/graph_network.py --model gat --graph cora --epochs 50 --out pictures``, or gcn, sage-mean,
sage-max, gatv2, and rgcn, which learns from the relations of a knowledge graph.

The networks themselves are in `sparsetir.bench.training.networks`. Real graphs are read from the folder that
SPARSETIR_DATA names; without one, or as ``--graph rmat:1e5``, they are generated. The classes that are learned are made
up, see `networks.load`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import sparsetir
import torch
from sparsetir.bench import MissingPackageError
from sparsetir.bench.training import measure
from sparsetir.bench.training.measure import TrainingRun, trained, with_memory
from sparsetir.bench.training.networks import BACKENDS, KINDS, OURS, Spec, load, usual, ways
from sparsetir.workloads.plot import aligned, losses


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="gcn", help=f"{', '.join(KINDS)}, with features between the layers: gcn:16, gat:8x8")
    add("--graph", help="cora, pubmed, fb15k237, ..., rmat:1e5, communities:1e5; by default a real one if there is one")
    add("--epochs", type=int, default=50)
    add("--threads", type=int, default=2, help="of torch and of kernels (default: 2)")
    add("--out", type=Path, help="folder for a picture of the losses")
    add("--no-memory", action="store_true", help="leave out the peaks, for which every way is trained in a process")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, TrainingRun]:
    """Print the table."""
    args = arguments(argv)
    measure.quietly()
    torch.set_num_threads(args.threads)
    sparsetir.set_num_threads(args.threads)
    spec = Spec.parse(args.model)
    name = args.graph or usual(relations=spec.kind == "rgcn")
    problem = load(name)
    print(f"{problem}; {spec}, {args.epochs} epochs, {args.threads} threads\n")

    chosen = ways(spec.kind)
    if spec.kind == "rgcn":  # torch.compile takes minutes for a loop over hundreds of relations
        chosen = [way for way in chosen if way not in BACKENDS]
    runs = trained(problem, spec, chosen, args.epochs)
    if not args.no_memory:
        runs = with_memory(runs, name, spec, args.threads)
    print("\n".join(aligned([["", *measure.HEAD], *measure.cells(runs, OURS)])))

    off = measure.difference(runs)
    print(f"\nlargest difference of losses: {off:.1e}")
    if off > measure.CLOSE:
        raise AssertionError(f"the losses differ by {off:.1e}, expected at most {measure.CLOSE:.0e}")
    if args.out is not None:
        draw(runs, f"{spec} on {problem.name}", args.out)
    return runs


def draw(runs: dict[str, TrainingRun], title: str, folder: Path) -> None:
    """Plot the losses of all."""
    name = title.replace(" ", "_").replace(":", "_")
    try:
        print(f"wrote {losses({way: run.losses for way, run in runs.items()}, folder / f'{name}.png', title=title)}")
    except MissingPackageError as error:
        print(f"no picture: {error}")


if __name__ == "__main__":
    main()
