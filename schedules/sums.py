# SPDX-License-Identifier: Apache-2.0
"""Ragged sums: one result for each row of unknown length, summed in vectors.

before::

    for j in range(indptr[i + 1] - indptr[i]):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 8}):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.lower.rewriting import collect
from sparsetir.lower.sum_ragged import SUM
from sparsetir.schedules.choices import Choices
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.rows import REDUCE


def tile_sum(sch: s_tir.Schedule, block: Any, choices: Choices | None, registers: Registers) -> bool:
    import os
    L = int(os.environ.get("SPMV_L", "8"))
    node = sch.get(block)
    store = node.body
    if not L or not isinstance(store, tirx.BufferStore) or not node.iter_vars or not isinstance(store.value, tirx.Add):
        return False
    along, loop = node.iter_vars[-1], sch.get_loops(block)[-1]
    if int(along.iter_type) != REDUCE or not collect(sch.get(loop).extent, ir.TensorLoad):
        return False
    sch.annotate(loop, SUM, L)
    return True


__all__ = ["tile_sum"]
