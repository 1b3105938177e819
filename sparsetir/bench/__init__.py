# SPDX-License-Identifier: Apache-2.0
"""Measure against other libraries, on matrices that are at hand, and draw what was found."""

from __future__ import annotations

from sparsetir.harness import suite
from sparsetir.harness.optional import MissingPackageError
from sparsetir.harness.peers import available, missing, mttkrp, sddmm, set_threads, spmm, spmv
from sparsetir.harness.plot import curve, density, spy
from sparsetir.harness.stdlib_matrix import term_document
from sparsetir.harness.timing import Timing, interleave

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
