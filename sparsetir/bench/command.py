# SPDX-License-Identifier: Apache-2.0
"""A run over many matrices and tensors and several operations."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

from sparsetir.bench.kernels import MeasurementPlan
from sparsetir.bench.measure import TAKEN, MeasuredRow, SizedOp, measure, suits
from sparsetir.bench.report import Report
from sparsetir.bench.results import measure_result
from sparsetir.bench.roofline import Roofline, levels, measure_roofline
from sparsetir.codegen.calibration import machine_profile
from sparsetir.errors import ArgumentError
from sparsetir.utils.machine import MachineProfile
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads import peers, result_peers
from sparsetir.workloads.inputs import InputSource, loaded, say
from sparsetir.workloads.results import OPERATIONS


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
        raise ArgumentError("expected files with matrices, --data FOLDER or --suite NAME; found none")
    report = Report(load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    if threads is not None:
        set_num_threads(threads)
    module = result_peers if any(product.op in OPERATIONS for product in products) else peers
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


__all__ = ["run"]
