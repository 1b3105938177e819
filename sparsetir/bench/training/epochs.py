# SPDX-License-Identifier: Apache-2.0
"""Training: an epoch, its loss, and how many of the other nodes are right."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from sparsetir.bench.training.networks import initialise
from sparsetir.bench.training.problems import Problem
from sparsetir.bench.training.ways import Contender


class Training:
    """A network that is trained on a graph with Adam.

    Parameters
    ----------
    contender : Contender
    problem : Problem
    seed : int
        Networks of a kind begin alike with the same one.
    rate : float
        Of learning.

    Attributes
    ----------
    losses : list of float
        Of all epochs so far, each before its step.
    """

    def __init__(self, contender: Contender, problem: Problem, *, seed: int = 0, rate: float = 0.01) -> None:
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
        """The share of the nodes not trained on whose class is found."""
        problem = self.problem
        with self.contender.context, torch.no_grad():
            found = self.contender.network(self.contender.x)[problem.test].argmax(dim=1)
        return float((found == problem.y[problem.test]).float().mean())


__all__ = ["Training"]
