# SPDX-License-Identifier: Apache-2.0
"""The command: distribute time over fronts, watch the processes, minimise what is found, report.

python -m tests.fuzzing --seconds 600 --seed 1                 # all fronts
python -m tests.fuzzing --seconds 600 --front einsum --front lazy --workers 2
python -m tests.fuzzing --front lazy --seed 1 --group 17       # one group again
python -m tests.fuzzing --report docs/reliability.md           # write the table of the latest summary
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fences import environment
from fuzzing.child import PLACE
from fuzzing.report import Counts, added, summary_of, table, write_report

HANG_SECONDS = 240.0  # without a new case; a compilation on a busy machine takes long
SLICE_SECONDS = 60.0
MINIMISE_SECONDS = 60.0
MAX_ALIKE = 2  # findings of one label that are minimised
MAX_MINIMISED = 60
ENTRY = str(Path(__file__).with_name("__main__.py"))


class Process:
    """A process of this command that answers lines by lines."""

    def __init__(self, *arguments: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        variables = {**os.environ, **(environment() or {})}
        command = [sys.executable, ENTRY, *arguments]
        self.process = subprocess.Popen(command, text=True, bufsize=1, env=variables, **pipes)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def error(self) -> str:
        """The end of what it wrote as errors."""
        self.errors.seek(0)
        return self.errors.read()[-2000:]

    def stop(self) -> None:
        """End the process, now if it does not end by itself."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.stop()
        self.errors.close()


class Child(Process):
    """A process that runs groups."""

    def __init__(self) -> None:
        with tempfile.NamedTemporaryFile(prefix="fuzz", delete=False) as file:
            file.write(bytes(PLACE.size))
        self.path = Path(file.name)
        super().__init__("--child", file.name)

    def close(self) -> None:
        super().close()
        self.path.unlink(missing_ok=True)

    @property
    def place(self) -> tuple[int, int, int]:
        """Group and index of the running case, and how many there were."""
        return PLACE.unpack(self.path.read_bytes())  # type: ignore[return-value]

    def facts(self, job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Yield the messages of the child about a job; None last if it hung or ended."""
        self.process.stdin.write(json.dumps(job) + "\n")
        latest, since = self.place, time.monotonic()
        while True:
            try:
                line = self.lines.get(timeout=1.0)
            except queue.Empty:
                if self.place != latest:
                    latest, since = self.place, time.monotonic()
                if time.monotonic() - since > HANG_SECONDS:
                    self.process.kill()
                    yield None
                    return
                continue
            if line is None:
                yield None
                return
            facts = json.loads(line)
            yield facts
            if "finished" in facts:
                return


class Run:
    """Groups of several fronts over some processes, and the counts.

    Parameters
    ----------
    fronts : list of str
    seed : int
    seconds : float, optional
        The budget; without it each front runs `groups` groups.
    workers : int
    groups : dict of str to int
        How many groups of each front run, from the first on.
    """

    def __init__(
        self,
        fronts: list[str],
        seed: int,
        *,
        seconds: float | None = None,
        workers: int = 1,
        first: int = 0,
        groups: dict[str, int] | None = None,
    ) -> None:
        self.fronts, self.seed, self.seconds, self.workers = fronts, seed, seconds, workers
        self.first, self.groups = first, groups or {}
        self.counts = {front: Counts() for front in fronts}
        self.findings: list[dict[str, Any]] = []
        self.labels: Counter[tuple[str, str, str]] = Counter()
        self.lock, self.since = threading.Lock(), time.monotonic()

    # ------------------------------------------------------------------ running

    def run(self) -> Run:
        """Run all jobs, and wait for them."""
        with ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(self._work, range(self.workers)))
        return self

    def left(self) -> float:
        """Seconds that are left."""
        return 1e9 if self.seconds is None else self.seconds - (time.monotonic() - self.since)

    def _work(self, worker: int) -> None:
        """Run one worker's groups of all fronts in turn."""
        following = {front: self.first + worker for front in self.fronts}
        pending, child = list(self.fronts), Child()
        while pending and self.left() > 0:
            front = pending.pop(0)
            child, following[front], is_over = self._job(child, front, following[front])
            if self.seconds is not None or not is_over:
                pending.append(front)
        child.close()

    def _job(self, child: Child, front: str, first: int) -> tuple[Child, int, bool]:
        """Run a slice; return the child to go on with, the next group, and whether no group is left."""
        seconds = None if self.seconds is None else min(SLICE_SECONDS, self.left(), self.seconds / len(self.fronts))
        stop = None if self.seconds is not None else self.first + self.groups[front]
        job = {
            "front": front,
            "seed": self.seed,
            "first": first,
            "step": self.workers,
            "stop": stop,
            "seconds": seconds,
        }
        for facts in child.facts(job):
            if facts is None:
                following = self._crashed(child, front)
                return Child(), following, stop is not None and following >= stop
            if "finding" in facts:
                self._found(front, facts["finding"])
            elif "finished" in facts:
                if facts["is_full"]:
                    child.close()
                    child = Child()
                return child, facts["finished"], facts["is_over"]
            else:
                with self.lock:
                    self.counts[front].add(facts["counts"], facts["refusals"], facts["seconds"])
        raise AssertionError("a job ends by its last line")

    def _crashed(self, child: Child, front: str) -> int:
        """Count the end of a process; return the next group."""
        group, index, count = child.place
        child.stop()
        status, text = child.process.returncode, child.error()
        child.close()
        if (status == 1 and "Traceback" in text) or not count:
            raise RuntimeError(f"the fuzzer itself failed in group {group} of {front}:\n{text}")
        label = "hang" if status == -9 else f"exit status {status}"
        with self.lock:
            self.counts[front].add({"cases": 1, "crashed": 1}, {})
        self._found(front, {"outcome": "crashed", "label": label, "detail": text, "group": group, "index": index})
        return group + self.workers

    # ------------------------------------------------------------------ findings

    def _found(self, front: str, finding: dict[str, Any]) -> None:
        """Keep a finding of a new kind."""
        key = (front, finding["outcome"], finding["label"])
        with self.lock:
            self.labels[key] += 1
            if self.labels[key] <= MAX_ALIKE and len(self.findings) < MAX_MINIMISED:
                self.findings.append({"front": front, "seed": self.seed, **finding})
                print(f"found in {front}: {finding['outcome']}, {finding['label']}", flush=True)

    def minimise(self, out: Path, seconds: float) -> None:
        """Write a script for each finding, the shortest that is found in the time."""
        until, process = time.monotonic() + seconds, None
        out.mkdir(parents=True, exist_ok=True)
        for record in self.findings:
            case = record.pop("case", None)
            message = {"place": [record[k] for k in ("front", "seed", "group", "index")], "case": case, **record}
            message["seconds"] = max(1.0, min(MINIMISE_SECONDS, until - time.monotonic()))
            process = process or Process("--minimise")
            process.process.stdin.write(json.dumps(message) + "\n")
            try:
                line = process.lines.get(timeout=message["seconds"] + HANG_SECONDS)
            except queue.Empty:
                line = None
            if line is None:
                process.process.kill()
                process.close()
                process = None
            self._write(out, record, json.loads(line or "{}"))
            print(described(record), flush=True)
        if process is not None:
            process.close()

    def _write(self, out: Path, record: dict[str, Any], answer: dict[str, Any]) -> None:
        record["is_alone"] = answer.get("is_alone", False)
        record["detail"] = answer.get("detail", record["detail"])
        path = out / f"{record['front']}-{self.seed}-{record['group']}-{record['index']}.py"
        path.write_text(answer.get("script") or group_script(record))
        record["script"] = str(path)

    def summary(self) -> dict[str, Any]:
        """Counts and findings, for JSON."""
        seconds = time.monotonic() - self.since
        labels = [[*key, count] for key, count in self.labels.most_common()]
        return summary_of(self.counts, self.findings, labels, seconds, self.seed)


def group_script(record: dict[str, Any]) -> str:
    """A script for what fails only after the other cases of its group."""
    command = [f"--front={record['front']}", f"--seed={record['seed']}", f"--group={record['group']}"]
    return (
        "# This case fails only after others: run its whole group, from the project's root.\n"
        "import subprocess, sys\n\n"
        f"print({record['detail']!r})\n"
        f"raise SystemExit(subprocess.run([sys.executable, '-m', 'tests.fuzzing', *{command}]).returncode)\n"
    )


def described(record: dict[str, Any]) -> str:
    """A finding for the terminal."""
    where = f"{record['front']}, seed {record['seed']}, group {record['group']}, case {record['index']}"
    script = f"\n  {record['script']}" if "script" in record else ""
    return f"--- {record['outcome']}: {record['label']} ({where}){script}\n{record['detail'][-1000:]}"


# ---------------------------------------------------------------------------------------------- arguments


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m tests.fuzzing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seconds", type=float, default=60.0, help="budget, shared by all fronts")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--front", action="append", help="a front, by default all; may be repeated")
    made.add_argument("--workers", type=int, default=1, help="processes at a time")
    made.add_argument("--group", type=int, help="run one group of the fronts again")
    made.add_argument("--first", type=int, default=0, help="number of the first group")
    made.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder of scripts and summary.json")
    made.add_argument("--add", action="store_true", help="add the counts to those of the summary in the folder")
    made.add_argument("--report", type=Path, help="write the table of the summary to this document, and run nothing")
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--minimise", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.child:
        from fuzzing import child

        child.main(options.child)
        return 0
    if options.minimise:
        from fuzzing import minimise

        minimise.main()
        return 0
    if options.report:
        write_report(options.report, options.out / "summary.json")
        return 0
    return fuzz(options)


def fuzz(options: argparse.Namespace) -> int:
    """Run, print the table, write the summary."""
    from fuzzing.fronts import FRONTS

    unknown = set(options.front or ()) - FRONTS.keys()
    if unknown:
        parser().error(f"--front: expected some of {', '.join(FRONTS)}, got {', '.join(sorted(unknown))}")
    fronts = options.front or list(FRONTS)
    facts: dict[str, Any] = {"seconds": options.seconds, "first": options.first}
    if options.group is not None:
        facts = {"seconds": None, "first": options.group, "groups": dict.fromkeys(fronts, 1)}
    run = Run(fronts, options.seed, workers=options.workers, **facts).run()
    run.minimise(options.out, max(MINIMISE_SECONDS, options.seconds / 2))
    summary, path = run.summary(), options.out / "summary.json"
    is_wrong = any(c[kind] for c in summary["fronts"].values() for kind in ("wrong", "crashed", "unclear"))
    if options.add and path.exists():
        summary = added(summary, json.loads(path.read_text()))
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print(table(summary))
    return int(is_wrong)


__all__ = ["Run", "main"]
