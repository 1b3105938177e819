# SPDX-License-Identifier: Apache-2.0
"""Sparse-output programs, which compute the pattern of their results: sparse products, sums, elementwise products.

A result over a ``T.sparse_assembled`` axis has as many entries as the program enters. `program` makes an ordinary
program of it, `rows` lowers that to a loop over rows, `functions` turns each row's statements into the functions that
count, find and fill the pattern, by way of `accumulators`. `sparsetir.sparse_output.kernel` runs them.
"""

from __future__ import annotations

from sparsetir.sparse_output.accumulators import AccumulatorOptions, Accumulators
from sparsetir.sparse_output.functions import AssembledCompiled
from sparsetir.sparse_output.program import AssembledProgram, SparseResult, is_assembled

__all__ = [
    "AccumulatorOptions",
    "Accumulators",
    "AssembledCompiled",
    "AssembledProgram",
    "SparseResult",
    "is_assembled",
]
