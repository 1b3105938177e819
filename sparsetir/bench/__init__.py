# SPDX-License-Identifier: Apache-2.0
"""Measure against other libraries, on matrices that are at hand, and draw what was found."""

from __future__ import annotations

from sparsetir.bench._optional import MissingPackageError
from sparsetir.bench.peers import available, missing, mttkrp, sddmm, set_threads, spmm, spmv
from sparsetir.bench.plot import curve, density, spy
from sparsetir.bench.stdlib_matrix import term_document
from sparsetir.bench.timing import Timing, interleave

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
    "term_document",
]
