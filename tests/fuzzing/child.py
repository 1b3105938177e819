# SPDX-License-Identifier: Apache-2.0
"""The process that runs cases: it takes jobs from its input, and writes a line of JSON for each group and finding."""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from fences import Everything
from fuzzing.case import Case, Finding, Front, Skip, unclear
from fuzzing.fronts import FRONTS
from fuzzing.known import known_class
from quick_code import quick_code
from sparsetir.errors import SparseTIRError
from sparsetir.runtime import call_plan

MAX_MEMORY = 2 << 30  # bytes: TVM keeps what it compiled
OPTIMISED_EVERY = 8  # one group in so many is compiled with LLVM's optimisations
FENCED_EVERY = 4  # one group in so many has all arrays between unreadable pages
FITTED_LATE_EVERY = 3  # one group in so many chooses code for its arguments after as many calls as users' processes do
PLACE = struct.Struct("qqq")  # group, case, how many cases so far


class Place:
    """A few bytes shared with the parent: which case is running."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self.memory, self.count = mmap.mmap(file.fileno(), PLACE.size), 0

    def set(self, group: int, index: int) -> None:
        self.count += 1
        PLACE.pack_into(self.memory, 0, group, index, self.count)


def rng_of(front: str, seed: int, group: int) -> Random:
    """The source of everything drawn for a group."""
    return Random(f"{front} {seed} {group}")


def surroundings(front: Front, group: int) -> Any:
    """The context of a group: how it is compiled, and where its arrays lie."""
    stack = contextlib.ExitStack()
    if not front.optimised and group % OPTIMISED_EVERY != OPTIMISED_EVERY - 1:
        stack.enter_context(quick_code())
    if front.fenced and group % FENCED_EVERY == 1:
        stack.enter_context(everything().within())
    if group % FITTED_LATE_EVERY:  # few calls of a history are more than those before code is chosen for them
        stack.enter_context(mock.patch.object(call_plan, "MOST_UNFITTED", 0))
    return stack


@cache
def everything() -> Everything:
    """The memory of fenced arrays."""
    return Everything()


def outcome_of(case: Case) -> tuple[str, str, Finding | None]:
    """The outcome, the refusal's text, and what was found."""
    try:
        finding = case.run()
    except Skip:
        raise
    except SparseTIRError as error:
        return "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}", None
    except Exception as error:
        finding = unclear(error, "in the fuzzer: ")
    return ("right", "", None) if finding is None else (finding.outcome, "", finding)


@dataclass(frozen=True)
class Undrawn(Case):
    """Placeholder for a case that could not be drawn: a fault of the fuzzer."""

    finding: Finding

    def run(self) -> Finding:
        return self.finding

    def smaller(self) -> Iterator[Case]:
        return iter(())

    def script(self) -> str:
        return f"print({self.finding.detail!r})\nraise SystemExit(1)\n"


def run_group(front: Front, seed: int, group: int, place: Place, tell: Callable[..., None]) -> None:
    """Run the cases of a group, and tell how they came out."""
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    place.set(group, -1)
    since = time.monotonic()
    with surroundings(front, group):
        for index, case in enumerate(drawn(front, seed, group)):
            place.set(group, index)
            try:
                outcome, refusal, finding = judged(front, case)
            except Skip:
                continue
            counts["cases"] += 1
            counts[outcome] += 1
            if refusal:
                refusals[refusal] += 1
            if finding is not None:
                told = {"outcome": outcome, "label": finding.label, "detail": finding.detail}
                tell(finding={**told, "group": group, "index": index, "case": packed(case)})
            if counts["refused"] == counts["cases"] >= front.patience:
                break
    tell(group=group, counts=counts, refusals=refusals, seconds=time.monotonic() - since)


def judged(front: Front, case: Case) -> tuple[str, str, Finding | None]:
    """The outcome of a case, where findings of a known class are no findings."""
    outcome, refusal, finding = outcome_of(case)
    known = None if finding is None else known_class(front.name, case, finding)
    return ("known", f"known: {known}", None) if known else (outcome, refusal, finding)


def drawn(front: Front, seed: int, group: int) -> Iterator[Case]:
    """The cases of a group; drawing ends where the package refuses a step of it."""
    try:
        yield from front.draw(rng_of(front.name, seed, group))
    except SparseTIRError:
        return
    except Exception as error:
        yield Undrawn(unclear(error, "in the fuzzer: "))


def packed(case: Case) -> str:
    return base64.b64encode(pickle.dumps(case)).decode()


def unpacked(text: str) -> Case:
    return pickle.loads(base64.b64decode(text))


def memory() -> int:
    """Return the resident bytes of this process; `ru_maxrss` would include those of the parent before exec."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def run_job(job: dict[str, Any], place: Place, tell: Callable[..., None]) -> None:
    """Run groups until the job's end, its time or the memory is over."""
    front, until = FRONTS[job["front"]], time.monotonic() + (job["seconds"] or 1e9)
    group = job["first"]
    while job["stop"] is None or group < job["stop"]:
        run_group(front, job["seed"], group, place, tell)
        group += job["step"]
        if time.monotonic() >= until or memory() >= MAX_MEMORY:
            break  # after at least one group, so that a job always advances
    is_over = job["stop"] is not None and group >= job["stop"]
    tell(finished=group, is_over=is_over or time.monotonic() >= until, is_full=memory() >= MAX_MEMORY)


def main(place_path: str) -> None:
    """Serve jobs until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not stand between the lines
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)  # before the parent ends a process that hangs
    place = Place(place_path)

    def tell(**facts: Any) -> None:
        out.write(json.dumps(facts) + "\n")

    for line in sys.stdin:
        run_job(json.loads(line), place, tell)


def one_case(front: str, seed: int, group: int, index: int) -> Case:
    """A case that was drawn before."""
    for at, case in enumerate(drawn(FRONTS[front], seed, group)):
        if at == index:
            return case
    raise IndexError(index)


__all__ = ["PLACE", "main", "one_case", "outcome_of", "packed", "rng_of", "run_group", "unpacked"]
