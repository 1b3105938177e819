# SPDX-License-Identifier: Apache-2.0
"""Search for the fastest schedule of a program on given data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsetir.utils.packages import load_at_first_use

if TYPE_CHECKING:
    from sparsetir.tuning.api import autotune, tune_sparse
    from sparsetir.tuning.many import TuneManyResult, TuneTask, tune_many
    from sparsetir.tuning.records import Database, Key, Record
    from sparsetir.tuning.report import TuneResult
    from sparsetir.tuning.space import Candidate

# Names -> the modules that define them, imported at the first use of a name: kernels take the cost model from here,
# and need no search.
__getattr__ = load_at_first_use(
    __name__,
    {
        "Candidate": "sparsetir.tuning.space",
        "Database": "sparsetir.tuning.records",
        "Key": "sparsetir.tuning.records",
        "Record": "sparsetir.tuning.records",
        "TuneManyResult": "sparsetir.tuning.many",
        "TuneResult": "sparsetir.tuning.report",
        "TuneTask": "sparsetir.tuning.many",
        "autotune": "sparsetir.tuning.api",
        "tune_many": "sparsetir.tuning.many",
        "tune_sparse": "sparsetir.tuning.api",
    },
)


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
