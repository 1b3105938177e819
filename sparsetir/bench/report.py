# SPDX-License-Identifier: Apache-2.0
"""A run over many matrices and tensors and several operations, and its report as text, Markdown and JSON."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from sparsetir.bench.measure import (
    BEST,
    RATED,
    TAKEN,
    MeasuredRow,
    MeasurementPlan,
    Row,
    SizedOp,
    measure,
    measure_result,
    suits,
)
from sparsetir.bench.roofline import Roofline, levels, measure_roofline
from sparsetir.codegen.calibration import machine_profile
from sparsetir.errors import ArgumentError
from sparsetir.utils.files import write_text
from sparsetir.utils.machine import MachineProfile, machine_name
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads import peers, results
from sparsetir.workloads.inputs import InputSource, loaded, say
from sparsetir.workloads.plot import aligned, markdown
from sparsetir.workloads.results import OPERATIONS
from sparsetir.workloads.timing import NOISY, Timing

PACKAGES = ("apache-tvm", "numpy", "scipy", "torch", "mkl")
RESULT_PACKAGES = tuple(results.PACKAGES.values())
SUMMARIES: dict[str, Callable[[list[float]], float]] = {"geometric mean": geometric_mean, "smallest": min}
ABSENT, WAITED = "-", "*"
FRACTION = "t_fair/t"
BUSY_LOAD = 0.5
LEAST_SCALING = 0.7

Values = dict[str, list[float | None]]


@dataclass
class Report:
    """Rows, and what they hold for.

    Parameters
    ----------
    rows : list of Row
    findings : list of str
        Wrong results and kernels that failed.
    roofline : Roofline or None
    load : float
        Processes that ran on the machine before the first measurement.
    """

    rows: list[Row] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    roofline: Roofline | None = None
    load: float = 0.0

    def by_op(self) -> dict[str, list[Row]]:
        """Return the rows of each operation, in the order in which it first occurs."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.product.op, []).append(row)
        return groups

    def text(self) -> str:
        """Return a table for each operation, the ceilings of the machine, and notes."""
        lines: list[str] = []
        for op, rows in self.by_op().items():
            lines += [op, "", *aligned(table(rows)), ""]
        if self.roofline is not None:
            lines += [*aligned(self.roofline.table()), ""]
        return "\n".join([*lines, *self.notes(), *self.findings])

    def markdown(self) -> str:
        """Return the report in Markdown."""
        parts = [f"### {op}\n\n{markdown(table(rows))}\n" for op, rows in self.by_op().items()]
        if self.roofline is not None:
            parts.append(f"### Ceilings\n\n{markdown(self.roofline.table())}\n")
        return "\n".join([*parts, *(f"{note}  " for note in [*self.notes(), *self.findings])])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": machine_name(),
            "threads": get_num_threads(),
            "packages": versions(self.packages),
            "missing": self.missing,
            "load": self.load,
            "notes": self.notes(),
            "findings": self.findings,
            "roofline": self.roofline.as_dict() if self.roofline is not None else None,
            "summaries": {op: summaries(rows) for op, rows in self.by_op().items()},
            "rows": [row.as_dict() for row in self.rows],
        }

    def notes(self) -> list[str]:
        """Return what the times hold for, the peers that are missing, and whether the machine was busy."""
        packages = ", ".join(f"{name} {version}" for name, version in versions(self.packages).items())
        lines = [f"{machine_name()}; {get_num_threads()} threads (scipy and numpy use one); float32; {packages}"]
        if self.roofline is not None:
            lines.append(f"{FRACTION}: the least time that the machine's profile predicts over our fastest kernel's")
        lines += [f"without {peer}: {why}" for peer, why in self.missing.items()]
        lines += [f"the rows of {peer}'s products are not sorted, those of all others are" for peer in self.unsorted]
        return lines + self.busy()

    @property
    def has_results(self) -> bool:
        """Whether results have patterns of their own, for which there are more peers."""
        return any(row.product.op in OPERATIONS for row in self.rows)

    @property
    def packages(self) -> tuple[str, ...]:
        """Whose versions matter."""
        return PACKAGES + (RESULT_PACKAGES if self.has_results else ())

    @property
    def missing(self) -> dict[str, str]:
        """Peers that are not installed, each with what to do."""
        return results.missing() if self.has_results else peers.missing()

    @property
    def unsorted(self) -> list[str]:
        """Peers some of whose results are not sorted."""
        timed = {(name, row.product.op) for row in self.rows for name in row.peers}
        return [name for name, ops in results.UNSORTED.items() if any((name, op) in timed for op in ops)]

    def busy(self) -> list[str]:
        """One line if other work disturbed the times, none otherwise."""
        reasons = list(self.causes())
        if not reasons:
            return []
        return [f"the machine was busy ({', '.join(reasons)}): repeat on a quiet one before quoting these times"]

    def causes(self) -> Iterable[str]:
        """Yield the reasons."""
        disturbed = sum(row.disturbed for row in self.rows)
        again = sum(row.repeats > 0 for row in self.rows)
        waited = sum(timing.waited for row in self.rows for timing in row.times.values())
        if self.load > BUSY_LOAD:
            yield f"load {self.load:.1f} before the first measurement"
        if self.roofline is not None and self.roofline.scaling < LEAST_SCALING:
            threads, times = self.roofline.most.threads, self.roofline.scaling * self.roofline.most.threads
            yield f"{threads} threads reached {times:.1f} times the peak of one"
        if disturbed:
            disturbance = f"spread above {NOISY:.0%} or calls that waited for a core"
            yield f"{disturbance} in {disturbed} of {len(self.rows)} rows (measured again: {again})"
        if waited:
            yield f"{WAITED} marks {waited} times of calls that waited"


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the installed versions of the packages that matter."""
    installed = {}
    for name in packages:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


# ---------------------------------------------------------------------------------------------------- tables


def names(rows: Sequence[Row], times: Callable[[Row], dict[str, Timing]]) -> list[str]:
    """All that occur, in order."""
    return list(dict.fromkeys(name for row in rows for name in times(row)))


def figures(rows: Sequence[Row]) -> Values:
    """Each ratio's title and its value in every row, None where it has none."""
    rated = [name for name in RATED if any(name in row.ours for row in rows)]
    baseline = next((row.baseline for row in rows if row.baseline), None)
    # Results have more peers, and no two of them the same operations: each has a column.
    compared = names(rows, lambda row: row.peers) if any(row.sizes for row in rows) else [baseline]
    values: Values = {}
    for kind in rated:
        prefix = f"{kind} " if len(rated) > 1 else ""
        for peer in (*compared, BEST) if baseline else ():
            values[f"{prefix}vs {peer}"] = [row.ratio(kind, peer) for row in rows]
    if any(row.bound for row in rows):
        values[FRACTION] = [row.fraction() for row in rows]
    return values


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the geometric mean and the smallest of each figure."""
    present = {name: [value for value in values if value] for name, values in figures(rows).items()}
    return {name: {title: of(v) for title, of in SUMMARIES.items()} for name, v in present.items() if v}


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells: a heading, the rows, the summaries."""
    kernel_names, peer_names = names(rows, lambda row: row.ours), names(rows, lambda row: row.peers)
    ratio_columns, summary = figures(rows), summaries(rows)
    bounded = ["limit"] if FRACTION in ratio_columns else []
    sizes = list(dict.fromkeys(name for row in rows for name in row.sizes)) or ["N"]
    out = [
        [
            "matrix",
            "nonzeros",
            *sizes,
            *(f"{name} ms" for name in [*kernel_names, *peer_names]),
            *ratio_columns,
            *bounded,
            "spread",
        ]
    ]
    for n, row in enumerate(rows):
        times = [row.times.get(name) for name in [*kernel_names, *peer_names]]
        cells = [milliseconds(timing) for timing in times]
        compared = [two_digits(values[n]) for values in ratio_columns.values()]
        limit = [row.bound.limit if row.bound else ABSENT] if bounded else []
        size = [number((row.sizes or {"N": row.product.feat}).get(name)) for name in sizes]
        out.append([row.name, f"{row.nnz:,}", *size, *cells, *compared, *limit, f"{row.spread:.0%}"])
    blank, end = [""] * (1 + len(sizes) + len(kernel_names) + len(peer_names)), [""] * (1 + len(bounded))
    for title in SUMMARIES:
        out.append([title, *blank, *(two_digits(summary.get(name, {}).get(title)) for name in ratio_columns), *end])
    return out


def milliseconds(timing: Timing | None) -> str:
    """Return a time in a table."""
    return f"{timing.median * 1e3:.4g}{WAITED * timing.waited}" if timing else ABSENT


def number(value: float | None) -> str:
    """Return a size in a table: whole, or with two digits."""
    if value is None:
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def two_digits(value: float | None) -> str:
    """Return a ratio in a table."""
    return ABSENT if value is None else f"{value:.2f}"


def written(path: Path, text: str) -> None:
    """Write a file, and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.rstrip() + "\n")
    say(f"wrote {path}")


def run(
    sources: Sequence[InputSource],
    products: Sequence[SizedOp],
    plan: MeasurementPlan,
    *,
    threads: int | None = None,
) -> Iterator[Report]:
    """Measure every operation on every source that it takes.

    Parameters
    ----------
    sources : sequence of InputSource
        Each is loaded when its turn comes and freed after it.
    products : sequence of SizedOp
    plan : MeasurementPlan
    threads : int, optional
        For every library; by default what kernels use.

    Yields
    ------
    Report
        The same one after each row, so that a caller can keep what has been found so far.

    Raises
    ------
    ArgumentError
        When there is no source, or nothing could be measured.
    """
    if not sources:
        raise ArgumentError("expected files with matrices, --data FOLDER or --suite NAME, got none")
    report = Report(load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    if threads is not None:
        set_num_threads(threads)
    module = results if any(product.op in OPERATIONS for product in products) else peers
    module.set_threads(get_num_threads())
    say_of_options(products, plan)
    report.roofline, profile = ceilings(), machine_profile()
    for name, sparse in loaded(sources):
        for _ in rows(name, sparse, products, plan, report, profile):
            yield report
        del sparse
        gc.collect()
    if not report.rows and not report.findings:
        raise ArgumentError("nothing could be measured: no file holds what the operations take")


def say_of_options(products: Sequence[SizedOp], plan: MeasurementPlan) -> None:
    """Name the operations that an option does not reach."""
    titles = ", ".join(str(product) for product in products if product.op in OPERATIONS)
    flags = [f"--{name}" for name in ("sweep", "tune") if getattr(plan, name)]
    if titles and flags:
        are = "is" if len(flags) == 1 else "are"
        say(
            f"{' and '.join(flags)} {are} not for {titles}: sparsetir.tune_sparse searches how their rows are collected"
        )


def ceilings() -> Roofline | None:
    """Those of this machine, unless its caches are not known."""
    if not levels():
        say("no roofline: the system does not tell the sizes of its caches")
        return None
    say("measuring the ceilings of this machine")
    return measure_roofline()


def measured(name: str, sparse: Any, product: SizedOp, plan: MeasurementPlan, profile: MachineProfile) -> MeasuredRow:
    """Measure one operation on one source."""
    measure_case = measure_result if product.op in OPERATIONS else measure
    return measure_case(name, sparse, product, plan, profile)


def rows(
    name: str,
    sparse: Any,
    products: Sequence[SizedOp],
    plan: MeasurementPlan,
    report: Report,
    profile: MachineProfile,
) -> Iterator[Report]:
    """Add the rows of one source to the report."""
    suited_products = [product for product in products if suits(product, sparse)]
    if not suited_products:
        requirements = ", ".join(f"{p} takes {TAKEN[p.op]}" for p in products)
        say(f"skipped: {name} has {len(sparse.shape)} dimensions; {requirements}")
    for product in suited_products:
        measurement = measured(name, sparse, product, plan, profile)
        report.findings += measurement.findings
        if measurement.row is not None:
            report.rows.append(measurement.row)
            say(str(measurement.row))
        del measurement
        gc.collect()
        yield report


__all__ = ["Report", "run", "written"]
