# SPDX-License-Identifier: Apache-2.0
"""Delta debugging: reduce a case as long as it fails alike, each candidate in a forked process that may crash."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from fuzzing.case import Case, Finding
from fuzzing.child import one_case, outcome_of, unpacked
from quick_code import quick_code

CASE_SECONDS = 60.0
SIZE = struct.Struct("q")


class Runner:
    """A forked process that runs cases; forked again after each crash.

    The parent compiles nothing, so that a fork finds no threads to wait for.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.to = self.back = -1

    def start(self) -> None:
        read, self.to = os.pipe()
        self.back, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.to)
            os.close(self.back)
            with quick_code():
                serve(read, write)
            os._exit(0)
        os.close(read)
        os.close(write)

    def stop(self) -> int:
        """End the process; return its signal, if it had ended by one."""
        os.close(self.to)
        if not self._waits():
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.back)
        self.pid = 0
        return status

    def _waits(self) -> bool:
        return bool(select.select([self.back], [], [], 2.0)[0])

    def run(self, case: Case) -> Finding | None:
        """Return the finding of a case; None where it is right or refused."""
        return self.ask("run", case)

    def ask(self, what: str, case: Case) -> Any:
        """An answer about a case, or the finding that it ended the process."""
        if not self.pid:
            self.start()
        send(self.to, pickle.dumps((what, case)))
        if not select.select([self.back], [], [], CASE_SECONDS)[0]:
            os.kill(self.pid, signal.SIGKILL)
            self.stop()
            return Finding("crashed", "hang", f"no answer for {CASE_SECONDS:.0f} seconds")
        answer = receive(self.back)
        if answer is not None:
            return pickle.loads(answer)
        status = self.stop()
        return Finding("crashed", "crash", f"the process ended by signal {status & 127}, exit status {status >> 8}")


def serve(read: int, write: int) -> None:
    """Run the cases that come through a pipe."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while (message := receive(read)) is not None:
        what, case = pickle.loads(message)
        try:
            found: Any = outcome_of(case)[2] if what == "run" else case.script()
        except Exception:  # a smaller case that is no case any more
            found = None
        send(write, pickle.dumps(found))


def send(to: int, message: bytes) -> None:
    data = SIZE.pack(len(message)) + message
    while data:
        data = data[os.write(to, data) :]


def receive(source: int) -> bytes | None:
    """A message, or None at the end."""
    head = exactly(source, SIZE.size)
    return None if head is None else exactly(source, SIZE.unpack(head)[0])


def exactly(source: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = os.read(source, count - len(data))
        if not part:
            return None
        data += part
    return data


def alike(one: Finding | None, other: Finding) -> bool:
    """Return whether two findings may have one cause."""
    if one is None or one.outcome != other.outcome:
        return False
    return one.outcome != "unclear" or one.label == other.label


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, leaving out what cannot be made smaller."""
    try:
        yield from case.smaller()
    except (ValueError, IndexError, KeyError):
        return


def minimised(case: Case, finding: Finding, seconds: float) -> tuple[Case, Finding | None]:
    """The smallest case within the time, and what it gives; None where the case alone does not fail."""
    runner, until = Runner(), time.monotonic() + seconds
    latest = runner.run(case)
    if not alike(latest, finding):
        return case, None
    is_smaller = True
    while is_smaller and time.monotonic() < until:
        is_smaller = False
        for smaller in candidates(case):
            if time.monotonic() > until:
                break
            found = runner.run(smaller)
            if alike(found, finding):
                case, latest, is_smaller = smaller, found, True
                break
    if runner.pid:
        runner.stop()
    return case, latest


def script_of(case: Case) -> str:
    """The script of a case, which may have to compile it."""
    runner = Runner()
    script = runner.ask("script", case)
    if runner.pid:
        runner.stop()
    return script if isinstance(script, str) else case.short_script()


def answer(message: Any) -> dict[str, Any]:
    """Minimise a finding that came from a child, and make its script."""
    case = unpacked(message["case"]) if message.get("case") else one_case(*message["place"])
    finding = Finding(message["outcome"], message["label"], message["detail"])
    case, latest = minimised(case, finding, message["seconds"])
    if latest is None:
        return {"is_alone": False}
    return {"is_alone": True, "detail": latest.detail, "script": script_of(case)}


def main() -> None:
    """Answer messages until the input ends; what cannot be answered is not alone."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            text = json.dumps(answer(json.loads(line)))
        except Exception as error:
            text = json.dumps({"is_alone": False, "error": repr(error)})
        out.write(text + "\n")


__all__ = ["main", "minimised"]
