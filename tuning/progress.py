# SPDX-License-Identifier: Apache-2.0
"""One line on stderr that says how a search goes."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from sparsetir.tuning.database import Record
from sparsetir.tuning.trials import Budget

WIDTH = 24
INTERVAL = 0.1


class Progress:
    """A bar, the best time so far and the pace.

    Parameters
    ----------
    budget : Budget
        The bar shows how much of the trials is done, or of the seconds where these will be over first.
    shown : bool, optional
        By default only on a terminal and in a notebook.
    flops : int, optional
        Of one call, for GFLOP/s.
    stream : file, optional
        stderr by default.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        shown: bool | None = None,
        flops: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.budget, self.flops = budget, flops
        self.stream = sys.stderr if stream is None else stream
        self.shown = (self.stream.isatty() or in_notebook()) if shown is None else shown
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

    def say(self, text: str) -> None:
        """Show what goes on before and after the trials."""
        if self.shown:
            self._show(f"tuning: {text}")

    def update(self, trials: int, last: Record, *, reused: int = 0) -> None:
        """Show the state after `trials` trials, the last one given, of which `reused` were not measured now."""
        now = time.perf_counter()
        if not self.shown or (now - self.last < INTERVAL and trials < self.budget.trials and trials > reused + 1):
            return
        self.last = now
        self._show(self.text(trials, last, reused, now - self.start))

    def _show(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self.length))
        self.stream.flush()
        self.length = len(text)

    def text(self, trials: int, last: Record, reused: int, elapsed: float) -> str:
        """The line. The bar is as far as the count behind it."""
        total, seconds = max(self.budget.trials, 1), self.budget.seconds
        done, count = trials / total, f"{trials}/{total}"
        spent = self.budget.elapsed
        if seconds is not None and spent / seconds > done:
            done, count = spent / seconds, f"{min(spent, seconds):.1f}/{seconds:.1f} s  {trials} trials"
        full = round(WIDTH * min(1.0, done))
        parts = [f"tuning [{'#' * full}{'.' * (WIDTH - full)}] {count}"]
        if last.best is not None:
            parts.append(f"best {last.best * 1e3:.4g} ms")
            parts += [f"{self.flops / last.best / 1e9:.1f} GFLOP/s"] if self.flops else []
        if last.predicted is not None and last.seconds is not None:
            parts.append(f"predicted {last.predicted * 1e3:.4g}, measured {last.seconds * 1e3:.4g}")
        return "  ".join([*parts, f"{(trials - reused) / max(elapsed, 1e-9):.1f} trials/s"])


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, whose stderr is no terminal and is shown all the same."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules
