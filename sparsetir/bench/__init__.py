# SPDX-License-Identifier: Apache-2.0
"""Measure against other libraries, on matrices that are at hand, and draw what was found."""

from __future__ import annotations

from sparsetir.utils.packages import MissingPackageError
from sparsetir.workloads import suite
from sparsetir.workloads.inputs import term_document
from sparsetir.workloads.peers import available, missing, mttkrp, sddmm, set_threads, spmm, spmv
from sparsetir.workloads.plot import curve, density, spy
from sparsetir.workloads.timing import Timing, interleave

__all__ = [
    "MissingPackageError",
    "Timing",
    "available",
    "curve",
    "density",
    "interleave",
    "missing",
    "mttkrp",
    "sddmm",
    "set_threads",
    "spmm",
    "spmv",
    "spy",
    "suite",
    "term_document",
]
