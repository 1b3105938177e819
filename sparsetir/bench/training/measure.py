# SPDX-License-Identifier: Apache-2.0
"""Epochs of graph networks, and operators with gradients, in several ways in turn: losses, times, memory, tables.

Each loss is compared with ours. Memory is that of a process of its own for each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch.nn.functional import cross_entropy

import torch
from sparsetir.bench.training.networks import (
    OURS,
    WAYS,
    Contender,
    NodeProblem,
    Spec,
    available,
    initialise,
    load,
    make,
    ways,
)
from sparsetir.errors import ArgumentError, SparseTIRError
from sparsetir.torch import Graph, SparseLinear
from sparsetir.utils.memory import CLEAR, forget_peak, resident
from sparsetir.utils.threads import set_num_threads
from sparsetir.workloads.inputs import reason, say
from sparsetir.workloads.plot import markdown
from sparsetir.workloads.reference import WrongResultError
from sparsetir.workloads.timing import Timing
from torch import Tensor

# Training: an epoch, its loss, and how many of the other nodes are right.


class Training:
    """A network that is trained on a graph with Adam.

    Parameters
    ----------
    contender : Contender
    problem : NodeProblem
    seed : int
        Networks of a kind begin alike with the same one.
    rate : float
        Of learning.

    Attributes
    ----------
    losses : list of float
        Of all epochs so far, each before its step.
    """

    def __init__(self, contender: Contender, problem: NodeProblem, *, seed: int = 0, rate: float = 0.01) -> None:
        self.problem, self.contender = problem, contender
        self.losses: list[float] = []
        initialise(contender.network, seed)
        self.optimizer = torch.optim.Adam(contender.network.parameters(), rate)

    def epoch(self) -> None:
        """One step on all nodes."""
        problem = self.problem
        with self.contender.context:
            out = self.contender.network(self.contender.x)
            loss = cross_entropy(out[problem.train], problem.y[problem.train])
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def accuracy(self) -> float:
        """Return the share of the nodes not trained on whose class is found."""
        problem = self.problem
        with self.contender.context, torch.no_grad():
            predicted = self.contender.network(self.contender.x)[problem.test].argmax(dim=1)
        return float((predicted == problem.y[problem.test]).float().mean())


# Several trainings side by side: losses, times of an epoch, and the memory of each in a process of its own.


REST = 0.02  # seconds before a turn, in which threads of another library go to sleep
CLOSE = 1e-4


class Trained(Protocol):
    """Something that is trained."""

    losses: list[float]

    def epoch(self) -> None:
        """Train on all there is once, and note the loss."""

    def accuracy(self) -> float:
        """Return the share of right answers."""


@dataclass(frozen=True)
class TrainingRun:
    """One training.

    Parameters
    ----------
    losses : list of float
    timing : Timing
        Of an epoch; the first ones are left out.
    accuracy : float
        At the end.
    peak : int or None
        Bytes at most over those before the structure was made; None where that was not measured.
    """

    losses: list[float]
    timing: Timing
    accuracy: float
    peak: int | None = None


def side_by_side(
    trainings: Mapping[str, Trained], epochs: int, *, clock: Callable[[], float] | None = None
) -> dict[str, TrainingRun]:
    """Train all of them, an epoch of each in turn.

    Parameters
    ----------
    trainings : mapping of str to Trained
        Each has had its first epochs, in which kernels are built.
    epochs : int
    clock : callable, optional
        What times are taken with. Default: ``time.perf_counter``.

    Raises
    ------
    ArgumentError
        `epochs` is less than one.
    """
    if epochs < 1:
        raise ArgumentError(f"expected one epoch or more, got {epochs}")
    times = in_turn({name: training.epoch for name, training in trainings.items()}, epochs, clock=clock)
    return {
        name: TrainingRun(training.losses, times[name], training.accuracy()) for name, training in trainings.items()
    }


def in_turn(
    calls: Mapping[str, Callable[[], object]], rounds: int, *, clock: Callable[[], float] | None = None
) -> dict[str, Timing]:
    """Return times of calls, one of each in turn."""
    now = clock or time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(REST)
            start = now()
            call()
            seconds[name].append(now() - start)
    return {name: Timing.of(samples) for name, samples in seconds.items()}


def difference(runs: Mapping[str, TrainingRun]) -> float:
    """Return the largest difference of two losses of an epoch, relative to the loss where that is above one."""
    curves = [run.losses for run in runs.values()]
    return max((max(step) - min(step)) / max(1.0, max(map(abs, step))) for step in zip(*curves, strict=True))


# ------------------------------------------------------------------ memory


def added(prepare: Callable[[], Any], train: Callable[[Any], Any], small: Callable[[], Any]) -> int:
    """Bytes that a training adds at its peak, its structure among them.

    `small` trains the same on little, so that kernels are built, and libraries loaded, before.
    """
    small()
    forget_peak()
    before = resident("VmRSS")
    prepared = prepare()
    train(prepared)
    return resident("VmHWM") - before


def apart(*command: str) -> int | None:
    """Return the number that ``python command...`` prints last in a process of its own, if the system reports memory.

    Raises
    ------
    ArgumentError
        The process failed.
    """
    if not CLEAR.exists():
        return None
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        raise ArgumentError(f"{' '.join(command)}: {lines[-1] if lines else 'the process was ended'}")
    return int(json.loads(process.stdout.splitlines()[-1]))


def quietly() -> None:
    """Leave out torch's notes that sparse tensors are new."""
    warnings.filterwarnings("ignore", message="Sparse")


# ------------------------------------------------------------------ tables

HEAD = ("ms an epoch", "spread", "ratio", "peak MB", "loss", "accuracy")


def cells(runs: Mapping[str, TrainingRun], ours: str) -> list[list[str]]:
    """Return a row for each of them; the ratio is its time over ours."""
    least = runs[ours].timing.median
    rows = []
    for name, run in runs.items():
        t = run.timing
        peak = "-" if run.peak is None else f"{run.peak / 1e6:.1f}"
        columns = [f"{t.median * 1e3:.2f}", f"{t.spread:.0%}", f"{t.median / least:.2f}", peak]
        rows.append([name, *columns, f"{run.losses[-1]:.5f}", f"{run.accuracy:.3f}"])
    return rows


# The command ``sparsetir bench training``.


TORCH = "torch"
OPERATOR_HEAD = ("ours ms", "torch ms", "ratio", "spread")
BATCH, INPUTS, OUTPUTS, DENSITY = 128, 1024, 4096, 0.1
Call = Callable[[], Any]
TOLERANCE = 1e-3


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


def operator_rows(problem: NodeProblem, features: int, rounds: int, *, cpu: bool = False) -> list[list[str]]:
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
        times = in_turn(calls, rounds, clock=time.process_time if cpu else None)
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
        if not torch.allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(expected.abs().max()))):
            raise WrongResultError(f"{name} differs from torch by {float((result - expected).abs().max()):.1e}")


COMMAND = ("-m", "sparsetir", "bench", "training")
NETWORKS = "gcn:16,gcn:128,gcn:256,sage-mean:128,sage-max:128,gat:8x8,gat:4x32,gatv2:8x8,rgcn:16"
SMALL = "rmat:200"
UNTIMED = 2  # epochs in which kernels are built and memory is found


def trained(
    problem: NodeProblem, spec: Spec, selected: Sequence[str], epochs: int, *, cpu: bool = False
) -> dict[str, TrainingRun]:
    """Return a network on a graph in several ways; those that fail are named on stderr."""
    trainings = {}
    for way in selected:
        try:
            training = Training(make(way, spec, problem), problem)
            for _ in range(UNTIMED):
                training.epoch()
        except Exception as error:  # another library's; the others go on
            if way == OURS:
                raise
            say(f"left out: {way}, {spec} on {problem.name}: {reason(error)}")
            continue
        trainings[way] = training
    return side_by_side(trainings, epochs, clock=time.process_time if cpu else None)


def with_memory(runs: dict[str, TrainingRun], graph: str, spec: Spec, threads: int) -> dict[str, TrainingRun]:
    """Return the runs with the peak memory of each."""
    with_peaks = {}
    for way, run in runs.items():
        options = ("--graph", graph, "--network", str(spec), "--threads", str(threads))
        peak = apart(*COMMAND, "--memory", way, *options)
        with_peaks[way] = replace(run, peak=peak)
    return with_peaks


def memory(way: str, graph: str, spec: Spec) -> int:
    """Bytes that a training adds to this process."""
    small, problem = load(SMALL), load(graph)
    small = replace(small, x=torch.zeros(len(small.x), problem.x.shape[1]))

    def train(problem: NodeProblem) -> None:
        training = Training(make(way, spec, problem), problem)
        for _ in range(3):
            training.epoch()

    return added(lambda: problem, train, lambda: train(small))


def table(graphs: Sequence[str], networks: Sequence[Spec], selected: Sequence[str], args: argparse.Namespace) -> str:
    """Markdown, a row for each way of a network on a graph."""
    rows = [["graph", "network", "way", *HEAD]]
    for name in graphs:
        problem = load(name, features=args.features)
        say(str(problem))
        for spec in networks:
            runs = trained(
                problem, spec, [way for way in selected if way in ways(spec.kind)], args.epochs, cpu=args.cpu
            )
            off = difference(runs)
            if args.peak:
                runs = with_memory(runs, name, spec, args.threads)
            run_rows = [[name, str(spec), *row] for row in cells(runs, OURS)]
            rows += run_rows
            say("\n".join("  ".join(row) for row in run_rows))
            if off > CLOSE:
                say(f"the losses of {spec} on {name} differ by {off:.1e}, expected at most {CLOSE:.0e}")
    return markdown(rows)


def operator_table(graphs: Sequence[str], args: argparse.Namespace) -> str:
    """Markdown, a row for each operator on a graph."""
    rows = [["graph", "operator", *OPERATOR_HEAD]]
    for name in graphs:
        rows += operator_rows(load(name), args.features, args.epochs, cpu=args.cpu)
    return markdown(rows)


def arguments(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser("sparsetir bench training", description=__doc__)
    add = parser.add_argument
    add("--graph", help="names separated by commas: real ones in the folder that SPARSETIR_DATA names, or rmat:1e5")
    add("--network", default=NETWORKS, help=f"kind and features between the layers; {NETWORKS}")
    add("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}; {OURS} is always there")
    add("--epochs", type=int, default=20, help="epochs that are timed (default: 20)")
    add("--features", type=int, default=64, help="of a node, where it has none (default: 64)")
    add("--threads", type=int, default=2, help="of every library (default: 2)")
    add(
        "--cpu", action="store_true", help="CPU time in place of time: says something on a busy machine, for one thread"
    )
    add("--peak", action="store_true", help="peak memory too: a process for each row")
    add("--operators", action="store_true", help="single operators with --features columns in place of networks")
    add("--memory", metavar="WAY", help="print the bytes that a way adds to this process")
    return parser, parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser, args = arguments(argv)
    quietly()
    try:
        networks = [Spec.parse(text) for text in args.network.split(",")]
        torch.set_num_threads(args.threads)
        set_num_threads(args.threads)
        if args.memory:
            print(json.dumps(memory(args.memory, args.graph, networks[0])))
            return
        selected = [way for way in WAYS if way == OURS or way in args.ways.split(",")]
        graphs = args.graph.split(",") if args.graph else available() or ["communities"]
        print(operator_table(graphs, args) if args.operators else table(graphs, networks, selected, args))
    except SparseTIRError as error:
        parser.error(str(error))


__all__ = [
    "CLOSE",
    "HEAD",
    "Training",
    "TrainingRun",
    "added",
    "apart",
    "cases",
    "cells",
    "difference",
    "in_turn",
    "main",
    "memory",
    "operator_rows",
    "quietly",
    "side_by_side",
    "trained",
    "with_memory",
]
