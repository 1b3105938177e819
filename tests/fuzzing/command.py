# SPDX-License-Identifier: Apache-2.0
"""The command: distribute time over fronts, watch the processes, minimise what is found, report.

python -m tests.fuzzing --seconds 600 --seed 1                 # all fronts
python -m tests.fuzzing --seconds 600 --front einsum --front lazy --workers 2
python -m tests.fuzzing --front lazy --seed 1 --group 17       # one group again
python -m tests.fuzzing --report docs/reliability.md           # write the table of the latest summary
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
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

HANG_SECONDS = 240.0  # of processor time without a new case, or of waiting without any
IDLE = 0.01  # share of a processor below which a process only waits
SLICE_SECONDS = 60.0
MINIMISE_SECONDS = 60.0
MAX_ALIKE = 2  # findings of one label that are minimised
MAX_MINIMISED = 60
MAX_FAILURES = 3  # of the fuzzer itself, one after the other, in a front
WRITE_SECONDS = 2.0  # between two summaries of a run that goes on
ENTRY = str(Path(__file__).with_name("__main__.py"))


class Process:
    """A process of this command that answers lines by lines."""

    def __init__(self, *arguments: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        variables = {**os.environ, **(environment() or {})}
        command = [sys.executable, ENTRY, *arguments]
        # Ctrl-C is for this process, which ends the others.
        self.process = subprocess.Popen(command, text=True, bufsize=1, env=variables, start_new_session=True, **pipes)
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
        with contextlib.suppress(BrokenPipeError):  # of a job that an ended process did not read
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.stop()
        self.errors.close()


class Progress:
    """Watches a process: whether it hangs in a case. On a busy machine it may wait long for a processor."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.since = self.idle_since = time.monotonic()
        self.used = self.used_at_idle = 0.0

    def is_stuck(self, place: Any, used: float) -> bool:
        """Return whether a case took too much time, given where the process is and its seconds of processor time."""
        now = time.monotonic()
        if place != self.latest:
            self.latest, self.used = place, used
            self.idle_since, self.used_at_idle = now, used
        if used - self.used_at_idle > IDLE * (now - self.idle_since):
            self.idle_since, self.used_at_idle = now, used
        return used - self.used > HANG_SECONDS or now - self.idle_since > HANG_SECONDS


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and of the children that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or the system has no /proc
        return 0.0
    return sum(int(n) for n in fields[11:15]) / os.sysconf("SC_CLK_TCK")


class Child(Process):
    """A process that runs groups."""

    is_hung = False

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

    def facts(self, job: dict[str, Any], stop: threading.Event) -> Iterator[dict[str, Any] | None]:
        """Yield the messages of the child about a job; None last if it hung, ended or is told to stop."""
        with contextlib.suppress(BrokenPipeError):  # of a child that has ended: its lines end, too
            self.process.stdin.write(json.dumps(job) + "\n")
        progress = Progress()
        while not stop.is_set():
            try:
                line = self.lines.get(timeout=1.0)
            except queue.Empty:
                self.is_hung = progress.is_stuck(self.place, processor_seconds(self.process.pid))
                if self.is_hung:
                    self._kill()
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
        self.process.kill()
        yield None

    def _kill(self) -> None:
        """End the process after it has written where it is."""
        self.process.send_signal(signal.SIGUSR1)  # see `child.main`
        time.sleep(1.0)
        self.process.kill()


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
    path : Path, optional
        File of the summary, which is written every few seconds.
    before : dict, optional
        A summary to whose counts those of this run are added in the file.
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
        path: Path | None = None,
        before: dict[str, Any] | None = None,
    ) -> None:
        self.fronts, self.seed, self.seconds, self.workers = fronts, seed, seconds, workers
        self.first, self.groups = first, groups or {}
        self.counts = {front: Counts() for front in fronts}
        self.findings: list[dict[str, Any]] = []
        self.labels: Counter[tuple[str, str, str]] = Counter()
        self.lock, self.since = threading.RLock(), time.monotonic()
        self.path, self.before, self.written = path, before, 0.0
        self.stopped, self.failures = threading.Event(), Counter[str]()
        self.state, self.spent = "running", 0.0

    # ------------------------------------------------------------------ running

    def run(self) -> Run:
        """Run all jobs, and wait for them; after Ctrl-C or SIGTERM what was done is kept."""
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                list(pool.map(self._work, range(self.workers)))
                self.state = "finished"
            except KeyboardInterrupt:
                self.state = "interrupted"
            finally:
                self.stopped.set()
        self.spent = time.monotonic() - self.since
        self.write(is_due=True)
        return self

    def write(self, *, is_due: bool = False) -> None:
        """Write the summary so far, at once or if the last one is older than some seconds."""
        if self.path is None or not (is_due or time.monotonic() - self.written > WRITE_SECONDS):
            return
        with self.lock:
            self.written = time.monotonic()
            summary = self.summary()
            whole = summary if self.before is None else added(summary, self.before)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(whole, indent=1) + "\n")
            partial.replace(self.path)

    def left(self) -> float:
        """Seconds that are left."""
        if self.stopped.is_set():
            return 0.0
        return 1e9 if self.seconds is None else self.seconds - (time.monotonic() - self.since)

    def _work(self, worker: int) -> None:
        """Run one worker's groups of all fronts in turn."""
        following = {front: self.first + worker for front in self.fronts}
        pending, child = list(self.fronts), Child()
        while pending and self.left() > 0:
            front = pending.pop(0)
            child, following[front], is_over = self._job(child, front, following[front])
            if (self.seconds is not None or not is_over) and self.failures[front] < MAX_FAILURES:
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
        for facts in child.facts(job, self.stopped):
            if facts is None and self.stopped.is_set():
                return child, first, True
            if facts is None:
                following = self._crashed(child, front, first)
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
                    self.failures[front] = 0
                self.write()
        raise AssertionError("a job ends by its last line")

    def _crashed(self, child: Child, front: str, first: int) -> int:
        """Count the end of a process; return the next group."""
        group, index, count = child.place
        child.stop()
        status, text = child.process.returncode, child.error()
        child.close()
        outcome, following = "crashed", group + self.workers
        if child.is_hung:
            label = "hang"
        elif not count or (status == 1 and "Traceback" in text):
            outcome, label = (
                "unclear",
                f"the fuzzer itself failed: {(text.strip().splitlines() or ['no message'])[-1][:60]}",
            )
            following = following if count else first
        else:
            label = "killed by the system, which may lack memory" if status == -9 else f"exit status {status}"
        with self.lock:
            self.failures[front] += outcome == "unclear"
            self.counts[front].add({"cases": 1, outcome: 1}, {})
        self._found(front, {"outcome": outcome, "label": label, "detail": text, "group": group, "index": index})
        return following

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
            self.write(is_due=True)
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
        seconds = self.spent or time.monotonic() - self.since
        labels = [[*key, count] for key, count in self.labels.most_common()]
        findings = [{name: part for name, part in finding.items() if name != "case"} for finding in self.findings]
        return {"state": self.state, **summary_of(self.counts, findings, labels, seconds, self.seed)}


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
    path = options.out / "summary.json"
    before = json.loads(path.read_text()) if options.add and path.exists() else None
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    run = Run(fronts, options.seed, workers=options.workers, path=path, before=before, **facts).run()
    if run.state == "finished":
        run.minimise(options.out, max(MINIMISE_SECONDS, options.seconds / 2))
    counts = run.summary()["fronts"].values()
    print(table(json.loads(path.read_text())))
    if run.state != "finished":
        print(f"interrupted after {run.spent:.0f} seconds: these are the counts so far, also in {path}")
        return 128 + signal.SIGINT
    return int(any(c[kind] for c in counts for kind in ("wrong", "crashed", "unclear")))


__all__ = ["Run", "main"]
