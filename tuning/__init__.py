# SPDX-License-Identifier: Apache-2.0
"""Search for the fastest schedule of a program on given data."""

from __future__ import annotations

from sparsetir.tuning.api import autotune, tune_sparse
from sparsetir.tuning.many import TuneManyResult, TuneTask, tune_many
from sparsetir.tuning.records import Database, Key, Record
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.space import Candidate

__all__ = [
    "Candidate",
    "Database",
    "Key",
    "Record",
    "TuneManyResult",
    "TuneResult",
    "TuneTask",
    "autotune",
    "tune_many",
    "tune_sparse",
]
