# SPDX-License-Identifier: Apache-2.0
"""Map kernels: vectorized exponentials along the positions of a row.

before::

    for i in range(m):
        for j in range(indptr[i + 1] - indptr[i]):
            s[indptr[i] + j] = T.exp(s[indptr[i] + j] - top[i])

after::

    for i in range(m):
        for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.map": 8}):
            s[indptr[i] + j] = T.exp(s[indptr[i] + j] - top[i])

Wins wherever a function that LLVM would call for every element is applied along contiguous positions; LLVM vectorises
functions that it has instructions for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx
from tvm.runtime import DataType

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import all_same, collect, is_along, mentions
from sparsetir.lower.annotations import MAP
from sparsetir.lower.vector.vector_math import is_exp
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import SPATIAL

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices


def tile_map(sch: s_tir.Schedule, block: Any, _choices: Choices, registers: Registers) -> bool:
    """Annotate the innermost loop of a block that maps elements; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, the target's registers.
    rewrite: see the module's before and after.
    """
    node = sch.get(block)
    store = node.body
    if not isinstance(store, tirx.BufferStore) or not node.iter_vars or node.init is not None:
        return False
    along, loop = node.iter_vars[-1], sch.get_loops(block)[-1]
    calls = collect(store.value, ir.Call)
    if int(along.iter_type) != SPATIAL or not any(map(is_exp, calls)) or any(map(dialect.is_if_then_else, calls)):
        return False
    loads = collect(store.value, ir.TensorLoad)
    moving = [x for x in loads if mentions(x, [along.var])]
    result_loads = [x for x in loads if x.source.same_as(store.buffer)]
    place = tirx.BufferLoad(store.buffer, store.indices)
    if not all(is_along(x, along.var) for x in (place, *moving)):
        return False
    if not all(all_same(list(x.indices), list(store.indices)) for x in result_loads):
        return False
    sch.annotate(loop, MAP, registers.bits // int(DataType(str(store.buffer.ty.dtype)).bits))
    return True


__all__ = ["tile_map"]
