# SPDX-License-Identifier: Apache-2.0
"""Run random programs in processes of their own, count what happens, and keep what goes wrong.

    python tests/fuzzing/programs.py --mode all --cases 2000 --seed 0 --jobs 2 --out failures.jsonl
    python tests/fuzzing/programs.py --replay failures.jsonl

A case is one program on one set of inputs. What is refused with a `SparseTIRError` is counted; any other exception, a
wrong result, a crash or a hang is a failure. All memory of a call lies between unreadable pages.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("SPARSETIR_CACHE", "off")
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fences import Everything, Fences, environment
from fuzzing.calls import Call, calls
from fuzzing.generate import draw
from fuzzing.known import is_known
from fuzzing.program import Program
from fuzzing.recipe import MODES, Recipe, drawn_recipe
from sparsetir.errors import SparseTIRError

HANG_SECONDS = 180.0
PROGRAMS_A_CHILD = 400  # TVM keeps what it compiled


# ---------------------------------------------------------------------------------------------- one program


class Failure(Exception):
    """A case that went wrong: its kind, what happened, and the call if there was one."""

    def __init__(self, kind: str, detail: str, call: Call | None = None) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.call = kind, detail, call


def program_of(mode: str, seed: int, number: int) -> tuple[Program, random.Random]:
    """The drawn program and the source of what is drawn for it."""
    rng = random.Random(f"{mode} {seed} {number}")
    return draw(rng, is_plain=mode == "formats"), rng


def attempted(kind: str, work: Callable[[], Any]) -> Any:
    """What `work` gives; an exception that is no refusal is a failure."""
    try:
        return work()
    except SparseTIRError:
        raise
    except Exception as error:
        raise Failure(kind, "".join(traceback.format_exception(error))[-3000:]) from error


def run_program(mode: str, seed: int, number: int, tell: Callable[..., None]) -> None:
    """Draw, compile and call one program; `tell` hears how far it came."""
    mode = MODES[number % len(MODES)] if mode == "all" else mode
    program, rng = program_of(mode, seed, number)
    recipe = Recipe(program.text)
    tell(at=number, mode=mode, recipe=asdict(recipe))
    try:
        recipe = attempted("raw error in a schedule", lambda: drawn_recipe(program, mode, rng))
        if (known := is_known(program, recipe)) is not None:
            return tell(done=number, outcome="known", why=known)
        tell(at=number, mode=mode, recipe=asdict(recipe))
        kernel = attempted("raw error in build", recipe.build)
    except SparseTIRError as error:
        return tell(done=number, outcome="refused", why=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    except Failure as failure:
        return tell(done=number, outcome="failed", kind=failure.kind, detail=failure.detail, recipe=asdict(recipe))
    check_calls(program, recipe, kernel, rng.randrange(1 << 40), number, tell)


def check_calls(
    program: Program, recipe: Recipe, kernel: Any, seed: int, number: int, tell: Callable[..., None]
) -> None:
    """Call a kernel on all its inputs; the first that goes wrong ends the program."""
    fences, everything, count, refused = Fences(), Everything(), 0, Counter()
    for call in calls(program, kernel, seed):
        tell(call=call.as_json())
        try:
            with everything.within():
                objections = attempted("raw error in a call", partial(call.objections, kernel, fences))
        except SparseTIRError as error:
            refused[f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"] += 1
            continue
        except Failure as failure:
            return failed(tell, number, count, recipe, call, failure.kind, failure.detail)
        if objections:
            return failed(tell, number, count, recipe, call, "wrong result", "\n".join(objections))
        count += not call.is_repeated
    tell(done=number, outcome="right", calls=count, refused_calls=dict(refused))


def failed(
    tell: Callable[..., None], number: int, count: int, recipe: Recipe, call: Call, kind: str, detail: str
) -> None:
    facts = {"kind": kind, "detail": detail, "recipe": asdict(recipe), "call": call.as_json()}
    tell(done=number, outcome="failed", calls=count, **facts)


# ---------------------------------------------------------------------------------------------- children


def child(mode: str, seed: int, numbers: range) -> None:
    """Run programs and write a line of JSON for each step."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**facts: Any) -> None:
        out.write(json.dumps(facts) + "\n")

    for number in numbers:
        run_program(mode, seed, number, tell)


class Worker:
    """A child process and what it says."""

    def __init__(self, mode: str, seed: int, numbers: range) -> None:
        bounds = [str(n) for n in (numbers.start, numbers.stop, numbers.step)]
        command = [sys.executable, __file__, "--mode", mode, "--seed", str(seed), "--child", *bounds]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **(environment() or {})}, **pipes)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def facts(self) -> Iterator[dict[str, Any] | None]:
        """What it tells; None at the end if it hangs."""
        while True:
            try:
                line = self.lines.get(timeout=HANG_SECONDS)
            except queue.Empty:
                self.process.kill()
                yield None
                return
            if line is None:
                self.process.wait()
                return
            yield json.loads(line)


class Run:
    """Programs of one mode, over several children at a time, and the counts."""

    def __init__(self, mode: str, seed: int, cases: int, programs: int | None = None, out: Path | None = None) -> None:
        self.mode, self.seed, self.cases, self.out = mode, seed, cases, out
        self.programs = programs
        self.counts: Counter[str] = Counter()
        self.modes: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.next, self.lock, self.since = 0, threading.Lock(), time.monotonic()

    def is_over(self) -> bool:
        if self.programs is not None and self.next >= self.programs:
            return True
        return self.counts["cases"] >= self.cases

    def take(self) -> range:
        """Numbers of the next programs for a child."""
        with self.lock:
            size = PROGRAMS_A_CHILD if self.programs is None else min(PROGRAMS_A_CHILD, self.programs - self.next)
            self.next += size
            return range(self.next - size, self.next)

    def work(self) -> None:
        """Run children until there are enough cases."""
        while not self.is_over():
            numbers = self.take()
            while numbers:
                numbers = self.watch(numbers)

    def watch(self, numbers: range) -> range:
        """Run a child over these numbers; returns those after one that ended it."""
        worker, latest, inside = Worker(self.mode, self.seed, numbers), {}, None
        for facts in worker.facts():
            if facts is None:
                self.crash(latest, "hang", f"no answer for {HANG_SECONDS:.0f} seconds")
                return range(inside + 1, numbers.stop) if inside is not None else range(0)
            if "at" in facts:
                inside, latest = facts["at"], facts
            latest = {**latest, **facts}
            if "done" in facts:
                inside = None
                self.count({**facts, "mode": latest["mode"]})
                if self.counts["cases"] >= self.cases:
                    worker.process.kill()
                    return range(0)
        if inside is None:
            if worker.process.returncode not in (0, -9):
                raise RuntimeError("".join(worker.errors)[-3000:])
            return range(0)
        status = worker.process.returncode
        self.crash(latest, f"crash (exit status {status})", "".join(worker.errors)[-2000:])
        return range(inside + 1, numbers.stop)

    def crash(self, latest: dict[str, Any], kind: str, detail: str) -> None:
        self.count({**latest, "done": latest.get("at"), "outcome": "failed", "kind": kind, "detail": detail})

    def count(self, facts: dict[str, Any]) -> None:
        """Note what became of one program."""
        with self.lock:
            outcome, cases = facts["outcome"], facts.get("calls", 0) + (facts["outcome"] == "failed")
            for what, number in (("programs", 1), (outcome, 1), ("cases", cases)):
                self.counts[what] += number
                self.modes[facts["mode"], what] += number
            if outcome in ("refused", "known"):
                self.refusals[facts["why"]] += 1
            for why, times in facts.get("refused_calls", {}).items():
                self.counts["refused calls"] += times
                self.refusals[f"call: {why}"] += times
            if outcome == "failed":
                self.failure(facts)
            if self.counts["programs"] % 200 == 0:
                print(self.summary(), flush=True)

    def failure(self, facts: dict[str, Any]) -> None:
        kept = ("kind", "detail", "recipe", "call")
        record = {"mode": facts["mode"], "seed": self.seed, "number": facts["done"], **{k: facts.get(k) for k in kept}}
        self.failures.append(record)
        print(reproducer(record), flush=True)
        if self.out is not None:
            with self.out.open("a") as out:
                out.write(json.dumps(record) + "\n")

    def summary(self) -> str:
        """One line for each mode."""
        lines = [f"after {time.monotonic() - self.since:.0f} s, {self.counts['refused calls']} refused calls"]
        for mode in MODES:
            found = {what: n for (m, what), n in sorted(self.modes.items()) if m == mode}
            if found:
                lines.append(f"  {mode:8s} {', '.join(f'{n} {what}' for what, n in found.items())}")
        return "\n".join(lines)

    def run(self, jobs: int) -> Run:
        threads = [threading.Thread(target=self.work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self


# ---------------------------------------------------------------------------------------------- reports


def reproducer(record: dict[str, Any]) -> str:
    """A failure for a reader: what went wrong, the text, and how to see it again."""
    recipe = dict(record["recipe"] or {})
    text = recipe.pop("text", "")
    lines = [f"--- {record['mode']} {record['seed']} {record['number']}: {record['kind']}", record["detail"], text]
    lines.append(str({k: v for k, v in recipe.items() if v is not None}))
    for name, value in ((record.get("call") or {}).get("arguments") or {}).items():
        lines.append(f"  {name} = {value}")
    return "\n".join(lines)


def replay(path: Path) -> int:
    """Run every failure of a file again; returns how many still fail."""
    still = 0
    for line in path.read_text().splitlines():
        record = json.loads(line)
        outcome = replayed(record)
        still += outcome is not None
        print(f"{record['mode']} {record['seed']} {record['number']}: {outcome or 'right, or refused'}", flush=True)
    return still


def replayed(record: dict[str, Any]) -> str | None:
    """What goes wrong in a child of its own, if anything."""
    pipes: dict[str, Any] = {"input": json.dumps(record), "capture_output": True, "text": True}
    env = {**os.environ, **(environment() or {})}
    made = subprocess.run([sys.executable, __file__, "--one"], env=env, check=False, **pipes)
    if made.returncode:
        return f"exit status {made.returncode}: {made.stderr[-1500:]}"
    return made.stdout.strip() or None


def replay_one() -> None:
    """Run the failure that stands in the input; print what is wrong."""
    record = json.load(sys.stdin)
    recipe = Recipe(**record["recipe"])
    try:
        kernel = recipe.build()
        if record["call"] is not None:
            with Everything().within():
                print("\n".join(Call.from_json(record["call"]).objections(kernel, Fences())))
    except SparseTIRError as error:
        print(f"refused: {error}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all", help="all: in turn")
    parser.add_argument("--cases", type=int, default=1000, help="program x input cases in total")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="file to which failures are appended, a line of JSON each")
    parser.add_argument("--replay", type=Path, help="run the failures of such a file again")
    parser.add_argument("--child", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        replay_one()
        return 0
    if given.child:
        child(given.mode, given.seed, range(*given.child))
        return 0
    if given.replay:
        return min(replay(given.replay), 1)
    run = Run(given.mode, given.seed, given.cases, out=given.out).run(given.jobs)
    print(run.summary())
    for why, count in run.refusals.most_common(30):
        print(f"    {count:5d} {why}")
    return min(len(run.failures), 1)


if __name__ == "__main__":
    sys.exit(main())
