# SPDX-License-Identifier: Apache-2.0
"""Train networks side by side: epochs, losses, times, memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.nn.functional import cross_entropy

import torch
from sparsetir.bench.training.networks import Contender, initialise
from sparsetir.bench.training.problems import NodeProblem
from sparsetir.errors import ArgumentError
from sparsetir.utils.memory import CLEAR, forget_peak, resident
from sparsetir.workloads.timing import Timing

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
        raise ArgumentError(f"expected one epoch or more, found {epochs}")
    times = in_turn({name: training.epoch for name, training in trainings.items()}, epochs, clock=clock)
    return {name: TrainingRun(made.losses, times[name], made.accuracy()) for name, made in trainings.items()}


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


__all__ = [
    "CLOSE",
    "HEAD",
    "Training",
    "TrainingRun",
    "added",
    "apart",
    "cells",
    "difference",
    "in_turn",
    "quietly",
    "side_by_side",
]
