# SPDX-License-Identifier: Apache-2.0
"""Histories of calls: what came before must not change a call, on one thread, on two, and after a fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from fuzzing.case import Case, Finding, Front, unclear
from fuzzing.histories import MAKERS, Difference, History
from fuzzing.values import parts

STEPS, FORK_SECONDS = 40, 60
SCRIPT = """
# The calls are drawn by the project's tests: run this from its root.
import sys

sys.path.insert(0, "tests")
from fuzzing.fronts.histories import HistoryCase

found = {case}.run()
print("expected what a kernel without a past gives")
print("got     ", found.detail if found else "the same")
sys.exit(found is not None)
"""


@dataclass(frozen=True)
class HistoryCase(Case):
    """Some steps of a history of calls of a kernel; `way` is alone, threads or fork."""

    kernel: str
    seed: str
    steps: tuple[int, ...]
    way: str = "alone"

    def run(self) -> Finding | None:
        history = History(self.kernel, Random(self.seed))
        if self.way == "threads":
            return self._threads(history)
        half = len(self.steps) // 2 if self.way == "fork" else len(self.steps)
        finding = self._calls(history, self.steps[:half])
        return finding or (self._forked(history, self.steps[half:]) if self.way == "fork" else None)

    def _calls(self, history: History, steps: tuple[int, ...]) -> Finding | None:
        """Make the steps, each of its own randomness: others may be left out."""
        for step in steps:
            history.random = Random(f"{self.seed} {step}")
            try:
                what = history.step()
            except Difference as difference:
                return Finding("wrong", f"{self.way} {self.kernel}", str(difference))
            if what.startswith("foreign"):
                return Finding("unclear", f"{self.kernel} {what[:50]}", f"{what}\n" + "\n".join(history.log))
        return None

    def _threads(self, history: History) -> Finding | None:
        """Make two histories of one kernel at once."""
        other = History(self.kernel, Random(self.seed))
        other.kernel, found = history.kernel, []

        def work(own: History, steps: tuple[int, ...]) -> None:
            try:
                found.append(self._calls(own, steps))
            except Exception as error:  # of the oracle
                found.append(unclear(error, "in the fuzzer: "))

        threads = [
            threading.Thread(target=work, args=(own, steps))
            for own, steps in ((history, self.steps[::2]), (other, self.steps[1::2]))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return next((finding for finding in found if finding), None)

    def _forked(self, history: History, steps: tuple[int, ...]) -> Finding | None:
        """Make the other steps in a forked process."""
        pid = os.fork()
        if not pid:
            signal.alarm(FORK_SECONDS)
            os._exit(3 if self._calls(history, steps) else 0)
        status = os.waitpid(pid, 0)[1]
        if not status:
            return None
        return Finding("wrong", f"fork {self.kernel}", f"status {status} of the forked process")

    def smaller(self) -> Iterator[Case]:
        if self.way != "alone":
            yield replace(self, way="alone")
        for part in parts(len(self.steps)):
            yield replace(self, steps=self.steps[: part.start] + self.steps[part.stop :])

    def script(self) -> str:
        return SCRIPT.format(case=repr(self))


class Histories(Front):
    """Calls of ten kernels, bound and unbound, with arguments of every class, layout and fault."""

    name, groups, patience = "histories", 2, 1 << 30
    fenced = False  # at a page's end other arrays are aligned than their copies

    def draw(self, rng: Random) -> Iterator[Case]:
        way = rng.choice(["alone"] * 10 + ["threads", "threads", "fork"])
        kernel, seed = rng.choice(list(MAKERS)), str(rng.randrange(1 << 40))
        if way != "alone":
            yield HistoryCase(kernel, seed, tuple(range(STEPS)), way)
            return
        history = History(kernel, Random(seed))
        for step in range(STEPS):
            case = Step(kernel, seed, tuple(range(step + 1)), "alone")
            object.__setattr__(case, "history", history)
            yield case


class Step(HistoryCase):
    """The last step of a history whose steps before were made already; alone it makes all of them."""

    def run(self) -> Finding | None:
        history = self.__dict__.get("history")
        return super().run() if history is None else self._calls(history, self.steps[-1:])

    def __reduce__(self) -> object:
        return HistoryCase, (self.kernel, self.seed, self.steps, self.way)


__all__ = ["Histories", "HistoryCase"]
