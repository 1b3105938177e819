# SPDX-License-Identifier: Apache-2.0
"""One line on stderr that says how a search goes."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from sparsetir.tuning.database import Record

WIDTH = 24
INTERVAL = 0.1


class Progress:
    """A bar, the best time so far and the pace.

    Parameters
    ----------
    total : int
        Trials at most.
    seconds : float, optional
        Of search at most: the bar shows whichever limit is nearer.
    shown : bool, optional
        By default only on a terminal.
    flops : int, optional
        Of one call, for GFLOP/s.
    stream : file, optional
        stderr by default.
    """

    def __init__(
        self,
        total: int,
        *,
        seconds: float | None = None,
        shown: bool | None = None,
        flops: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.seconds, self.flops = total, seconds, flops
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty() if shown is None else shown
        self.start = self.last = time.perf_counter()
        self.length = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown and self.length:
            self.stream.write("\n")
            self.stream.flush()

    def update(self, trials: int, last: Record, *, reused: int = 0) -> None:
        """Show the state after `trials` trials, the last one given, of which `reused` were not measured now."""
        now = time.perf_counter()
        if not self.shown or (now - self.last < INTERVAL and trials < self.total):
            return
        self.last = now
        text = self.text(trials, last, reused, now - self.start)
        self.stream.write("\r" + text.ljust(self.length))
        self.stream.flush()
        self.length = len(text)

    def text(self, trials: int, last: Record, reused: int, elapsed: float) -> str:
        """The line."""
        done = max(trials / self.total, elapsed / self.seconds if self.seconds else 0.0)
        full = round(WIDTH * min(1.0, done))
        parts = [f"tuning [{'#' * full}{'.' * (WIDTH - full)}] {trials}/{self.total}"]
        if last.best is not None:
            parts.append(f"best {last.best * 1e3:.4g} ms")
            parts += [f"{self.flops / last.best / 1e9:.1f} GFLOP/s"] if self.flops else []
        if last.predicted is not None and last.seconds is not None:
            parts.append(f"predicted {last.predicted * 1e3:.4g}, measured {last.seconds * 1e3:.4g}")
        return "  ".join([*parts, f"{(trials - reused) / max(elapsed, 1e-9):.1f} trials/s"])
