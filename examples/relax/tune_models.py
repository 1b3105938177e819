# SPDX-License-Identifier: Apache-2.0
"""Tuning the models of these examples under one budget: trials where most is to be gained, beside equal shares.

Each example's products with constant matrices are the tasks of `sparsetir.tune_many`, once with either policy, from an
empty database. What was found is then timed in turn. Examples without such products have nothing to tune.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import common
from common import Case, options

import sparsetir
import sparsetir.relax as srelax
from sparsetir.workloads.plot import markdown
from sparsetir.workloads.timing import interleave

EXAMPLES = ("gat", "gcn", "lidar_conv", "pruned_layers", "rgcn", "sparse_attention")
POLICIES = ("gain", "equal")
HEAD = ("models", "tasks", "untuned ms", *(f"{p} ms" for p in POLICIES), "untuned / gain", "equal / gain")


@dataclass(frozen=True)
class Line:
    """The seconds of all calls of an example's products, by policy and untuned."""

    name: str
    tasks: int
    times: dict[str, float]

    def cells(self) -> list[str]:
        """For the table."""
        ratios = [self.times[name] / self.times["gain"] for name in ("untuned", "equal")]
        times = [f"{1e3 * self.times[name]:.3f}" for name in ("untuned", *POLICIES)]
        return [self.name, str(self.tasks), *times, *(f"{ratio:.3f}" for ratio in ratios)]


def cases_of(example: Any, argv: Sequence[str]) -> list[Case]:
    """Return the models of an example, which compares none of them."""
    found: list[Case] = []

    def kept(_title: str, cases: Sequence[Case], **_how: Any) -> list[Any]:
        found.extend(cases)
        return []

    compare, example.compare = example.compare, kept
    try:
        example.main(argv)
    finally:
        example.compare = compare
    return found


def tasks_of(name: str, argv: Sequence[str]) -> list[sparsetir.TuneTask]:
    """Return the products of an example's models with constant matrices."""
    cases = cases_of(importlib.import_module(name), argv)
    return [replace(task, name=case.name) for case in cases for task in srelax.tasks(case.sparse)]


def measured(name: str, tasks: Sequence[sparsetir.TuneTask], seconds: float, rounds: int) -> Line:
    """Tune by either policy, and time what was found in turn."""
    kernels = {"untuned": [sparsetir.build(task.program) for task in tasks]}
    for policy in POLICIES:
        found = sparsetir.tune_many(tasks, seconds=seconds, policy=policy)
        print(f"{name}, {policy}:\n{found.report()}\n", flush=True)
        kernels[policy] = [result.kernel for result in found]
    totals = dict.fromkeys(kernels, 0.0)
    for n, task in enumerate(tasks):
        calls = {policy: call_of(found[n], task) for policy, found in kernels.items()}
        for policy, times in interleave(calls, rounds=rounds, rest=common.REST).items():
            totals[policy] += task.expected_calls * times.median
    return Line(name, len(tasks), totals)


def call_of(kernel: Any, task: sparsetir.TuneTask) -> Callable[[], Any]:
    """Return a call of a kernel on a task's arguments, of which the matrix is known beforehand."""
    others = {name: value for name, value in task.inputs.items() if name != "A"}
    bound = kernel.bind(A=task.inputs["A"])
    return lambda: bound(**others)


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Print the table."""
    args = options(__doc__, argv, seconds=(60.0, "of each search (default: 60)"))
    given = ["--small"] if args.small else []
    lines = []
    for name in EXAMPLES:
        tasks = tasks_of(name, given)
        if tasks:
            lines.append(measured(name, tasks, args.seconds, args.rounds))
        else:
            print(f"{name}: no product with a constant matrix", flush=True)
    print(markdown([list(HEAD), *(line.cells() for line in lines)]))
    return lines


if __name__ == "__main__":
    main()
