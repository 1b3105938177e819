# SPDX-License-Identifier: Apache-2.0
"""Pictures of the measured results in this folder: speedups by class of matrix, and their history.

``python docs/benchmarks/draw.py`` writes them into ``docs/_static`` and prints the table of the README.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

FOLDER = Path(__file__).parent
PICTURES = FOLDER.parent / "_static"
MACHINES = ("amd_zen4", "amd_zen3", "intel_xeon")
LIBRARIES = {"scipy": "C7", "torch": "C1", "mkl": "C2"}
# Readable on a light and on a dark page.
GREY = "#7d858f"
CLASSES = {
    "graphs": [
        "amazon_computers",
        "as_caida",
        "cora",
        "enzymes_batch",
        "pubmed",
        "squirrel_directed",
        "tolokers",
        "usroads",
    ],
    "meshes, circuits": ["bcsstk16", "beam_elasticity", "dg_diffusion", "g3_circuit", "landmark", "west0479"],
    "features, weights": ["cora_features", "wavernn_gru_4x4"],
}


@dataclass(frozen=True)
class Row:
    """Milliseconds of a call on one matrix."""

    matrix: str
    columns: int | None
    ours: float
    peers: dict[str, float]

    def over(self, library: str) -> float:
        """Return the time of a library, or of the fastest (``best``), over ours."""
        seconds = min(self.peers.values()) if library == "best" else self.peers[library]
        return seconds / self.ours


@dataclass(frozen=True)
class Run:
    """Rows that one command measured, and where."""

    machine: str
    operation: str
    commit: str | None
    date: str
    threads: int
    rows: list[Row]

    def mean(self, library: str, matrices: Iterable[str] | None = None) -> float:
        """Return the geometric mean of the speedups over a library."""
        chosen = set(matrices) if matrices is not None else {row.matrix for row in self.rows}
        return geometric_mean(row.over(library) for row in self.rows if row.matrix in chosen)

    def least(self, library: str) -> float:
        """Return the smallest speedup over a library."""
        return min(row.over(library) for row in self.rows)


def read(name: str) -> list[Run]:
    """Return the runs of a machine, oldest first."""
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [_run(content["machine"], content["columns"], run) for run in content["runs"]]


def _run(machine: str, columns: list[str], run: dict[str, Any]) -> Run:
    """Return a run of a file."""
    named = [dict(zip(columns, row, strict=True)) for row in run["rows"]]
    rows = [
        Row(row["matrix"], row["columns"], row["sparsetir_ms"], {name: row[f"{name}_ms"] for name in LIBRARIES})
        for row in named
    ]
    return Run(machine, run["operation"], run.get("commit"), run["date"], run["threads"], rows)


def latest(runs: list[Run], operation: str) -> Run | None:
    """Return the last run of an operation."""
    return next((run for run in reversed(runs) if run.operation == operation), None)


def bars(name: str) -> dict[str, dict[str, float]]:
    """Return the speedups over each library, by class of matrix, of a machine."""
    runs = read(name)
    spmm, spgemm = latest(runs, "SpMM"), latest(runs, "SpGEMM")
    means = {}
    for title, matrices in CLASSES.items():
        means[f"SpMM, {title}"] = {library: spmm.mean(library, matrices) for library in LIBRARIES}
    if spgemm is not None:
        means["SpGEMM, graphs"] = {library: spgemm.mean(library) for library in LIBRARIES}
    return means


def table() -> str:
    """Return the table of the README."""
    lines = ["| machine, operation | scipy | best of scipy, torch, MKL |", "|---|---:|---:|"]
    for name, operation in (("amd_zen4", "SpMM"), ("amd_zen4", "SpGEMM"), ("intel_xeon", "SpMM")):
        run = latest(read(name), operation)
        cells = [f"{run.mean(library):.1f} ({run.least(library):.2f})" for library in ("scipy", "best")]
        cases = f"{len(run.rows)} cases, {run.threads} thread{'s' * (run.threads > 1)}"
        lines.append(f"| {run.machine.partition(',')[0]}, {operation}, {cases} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_speed(path: Path) -> None:
    """Draw a panel for each machine."""
    from matplotlib import pyplot

    content = {name: bars(name) for name in MACHINES}
    heights = [len(groups) for groups in content.values()]
    figure, panels = pyplot.subplots(
        len(MACHINES),
        figsize=(6.8, 0.52 * sum(heights) + 1.6),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
    )
    for axes, (name, groups) in zip(panels, content.items(), strict=True):
        for n, (library, colour) in enumerate(LIBRARIES.items()):
            places = [group + 0.27 * (n - 1) for group in range(len(groups))]
            speedups = [group[library] for group in groups.values()]
            drawn = axes.barh(
                places, speedups, height=0.25, color=colour, label=f"over {library.replace('mkl', 'MKL')}"
            )
            axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize="x-small")
        axes.set_yticks(range(len(groups)), groups)
        axes.invert_yaxis()
        axes.axvline(1, color=GREY, linewidth=1)
        run = latest(read(name), "SpMM")
        axes.set_title(f"{run.machine}; {run.threads} thread{'s' * (run.threads > 1)}", loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set(xlabel="time of the other library over ours, geometric mean")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def draw_history(path: Path) -> None:
    """Draw the means of all runs of SpMM, one after the other."""
    from matplotlib import pyplot

    dated = [run for name in MACHINES for run in read(name) if run.operation == "SpMM" and run.commit]
    runs = sorted(dated, key=lambda run: run.date)
    figure, axes = pyplot.subplots(figsize=(6.8, 3.4), layout="constrained")
    markers = dict(zip(sorted({run.machine for run in runs}), "os^", strict=True))
    for library, colour in {"scipy": "C7", "best": "C0"}.items():
        for machine, marker in markers.items():
            places = [n for n, run in enumerate(runs) if run.machine == machine]
            label = f"over {'the fastest other' if library == 'best' else library}, {machine.partition(',')[0]}"
            axes.plot(places, [runs[n].mean(library) for n in places], marker=marker, color=colour, label=label)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xticks(range(len(runs)), [f"{run.date[5:]}\n{run.commit[:7]}" for run in runs], fontsize="x-small")
    axes.set_ylim(bottom=0)
    axes.set(ylabel="speedup, geometric mean", xlabel="day and commit")
    axes.legend(fontsize="x-small", frameon=False, ncols=2)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Write both pictures."""
    import matplotlib

    matplotlib.use("Agg")
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    matplotlib.rcParams.update(dict.fromkeys(inks, GREY) | {"svg.hashsalt": "sparsetir"})
    draw_speed(PICTURES / "speed.svg")
    draw_history(PICTURES / "history.svg")
    print(table())


if __name__ == "__main__":
    main()
