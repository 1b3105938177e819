# SPDX-License-Identifier: Apache-2.0
"""The passes that recognise a pattern: what each makes of the loops that the sketches and the passes before it left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm

import sparsetir
from corpus import BY_NAME
from sparsetir import formats, ops
from sparsetir.codegen.pipeline import scheduled, to_stage_2
from sparsetir.lower import TO_STAGE_3, run
from sparsetir.lower.annotations import FINITE
from sparsetir.lower.rows.block_registers import BlockRegisters
from sparsetir.lower.rows.panels import PackOperands
from sparsetir.lower.rows.partition import SplitMergePath
from sparsetir.lower.vector.loop_transforms import InterchangeLoops
from sparsetir.lower.vector.memory_hints import StoreNontemporal
from sparsetir.lower.vector.ragged_sums import SumBlocks, SumRagged
from sparsetir.lower.vector.registers import FactorInvariants
from sparsetir.lower.vector.vectorize import VectorizeDots, VectorizeMaps
from sparsetir.schedules import Choices

TARGET = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"})


def over_blocks() -> Any:
    """SpMV over blocks of two rows and columns."""
    return sparsetir.decompose_format(ops.spmv(), {"A": formats.bsr(2, 2)}).func


def softmax() -> Any:
    """Exponentials along the rows of a sparse matrix."""
    return BY_NAME["sparse_softmax"].make("float32", "int32")


def finite_mttkrp() -> Any:
    """Factors may leave sums: finite values are promised."""
    return ops.mttkrp().with_attr(FINITE, True)


CASES: dict[str, tuple[Any, Callable[[], Any], Choices]] = {
    "PackOperands": (PackOperands, ops.spmm, Choices(tile=8, chunks=2, panel=16)),
    "SplitMergePath": (SplitMergePath, ops.spmv, Choices(chunks=2, carry=1)),
    "SumBlocks": (SumBlocks, over_blocks, Choices(chunks=2)),
    "InterchangeLoops": (InterchangeLoops, finite_mttkrp, Choices(tile=8, chunks=2)),
    "BlockRegisters": (BlockRegisters, ops.sddmm, Choices(tile=32, chunks=2)),
    "VectorizeDots": (VectorizeDots, ops.sddmm, Choices(tile=8, chunks=2)),
    "VectorizeMaps": (VectorizeMaps, softmax, Choices(chunks=2)),
    "FactorInvariants": (FactorInvariants, finite_mttkrp, Choices(tile=8, chunks=2)),
    "SumRagged": (SumRagged, ops.spmv, Choices(chunks=2, lanes=8)),
    "StoreNontemporal": (StoreNontemporal, ops.spmm, Choices(tile=16, chunks=2, stream=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loops_before_and_after(name: str, golden: Callable[[str, str], None]) -> None:
    step, make, choices = CASES[name]
    mod = scheduled(to_stage_2(make()), choices, TARGET)
    before = run(TO_STAGE_3[: TO_STAGE_3.index(step)], mod)
    (first,), (second,) = before.functions.values(), run([step], before).functions.values()
    texts = [sparsetir.script(func) for func in (first, second)]
    assert texts[0] != texts[1]
    golden(f"pass_{name}", "# ---- before\n{}\n# ---- after\n{}".format(*texts))
