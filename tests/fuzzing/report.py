# SPDX-License-Identifier: Apache-2.0
"""Counts by front, the summary, and the table in the document."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from fuzzing.case import OUTCOMES
from sparsetir.utils.machine import machine_name
from sparsetir.utils.packages import __version__

START, END = "<!-- counts: begin -->", "<!-- counts: end -->"
SHOWN = {"crashed": "crashes", "unclear": "unclear errors"}


class Counts:
    """Outcomes of one front."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.seconds = 0.0

    def add(self, outcomes: dict[str, int], refusals: dict[str, int], seconds: float = 0.0) -> None:
        self.seconds += seconds
        self.outcomes.update(outcomes)
        self.refusals.update(refusals)


def summary_of(
    counts: dict[str, Counts], findings: list[dict[str, Any]], labels: list[Any], seconds: float, seed: int
) -> dict[str, Any]:
    """The summary of a run, for JSON."""
    fronts: dict[str, dict[str, Any]] = {}
    for name, front in counts.items():
        fronts[name] = {kind: front.outcomes[kind] for kind in ("cases", *OUTCOMES)}
        fronts[name]["seconds"] = round(front.seconds, 1)
    refusals = {n: dict(c.refusals.most_common(40)) for n, c in counts.items()}
    facts = {"date": datetime.date.today().isoformat(), "seconds": round(seconds), "seed": seed}
    facts |= {"version": version(), "machine": machine_name()}
    return {**facts, "fronts": fronts, "labels": labels, "refusals": refusals, "findings": findings}


@cache
def version() -> str:
    """Return the version that is tested, with its commit if the project is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return f"{__version__} at {commit}"


def added(summary: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A summary with the counts and findings of another one before it."""
    fronts = {**before["fronts"], **summary["fronts"]}
    for name, counts in fronts.items():
        others = before["fronts"].get(name, {}) if name in summary["fronts"] else {}
        fronts[name] = {kind: round(number + others.get(kind, 0), 1) for kind, number in counts.items()}
    parts = {kind: before[kind] + summary[kind] for kind in ("labels", "findings")}
    seconds = before["seconds"] + summary["seconds"]
    seeds = f"{before['seed']}, {summary['seed']}"
    texts = {name: joined(before.get(name, "unknown"), summary[name]) for name in ("version", "machine")}
    return {**summary, **parts, **texts, "fronts": fronts, "seconds": seconds, "seed": seeds}


def joined(before: str, latest: str) -> str:
    """Return a list, as text, with one more element unless it has that already."""
    return " and ".join(dict.fromkeys([*before.split(" and "), latest]))


def table(summary: dict[str, Any]) -> str:
    """Counts by front, as Markdown."""
    columns = ("cases", *(o for o in OUTCOMES if o != "known" or any(c["known"] for c in summary["fronts"].values())))
    head = [SHOWN.get(c, c) for c in columns]
    rows = [[name, *(f"{counts[c]:,}" for c in columns)] for name, counts in summary["fronts"].items()]
    total = {c: sum(counts[c] for counts in summary["fronts"].values()) for c in columns}
    rows.append(["all", *(f"{n:,}" for n in total.values())])
    lines = [["front", *head], ["---", *["---:"] * len(head)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(document: Path, path: Path) -> None:
    """Replace the table between the marks of a document by that of a summary."""
    summary = json.loads(path.read_text())
    text = document.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{document}: expected the lines {START} and {END}")
    seeds = f"{'seeds' if ',' in str(summary['seed']) else 'seed'} {summary['seed']}"
    said = f"{summary['seconds'] // 60:,} minutes with {seeds}, {summary['date']}, version {summary['version']}"
    said += f" on {summary['machine']}:"
    document.write_text(f"{before}{start}\n{said}\n\n{table(summary)}\n{end}{after}", encoding="utf-8")


__all__ = ["Counts", "added", "summary_of", "table", "write_report"]
