# SPDX-License-Identifier: Apache-2.0
"""Results written past the caches."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm

import sparsetir
from sparsetir.schedules import Choices
from sparsetir.workloads.suite import families

pytestmark = pytest.mark.optimised

STREAMED = Choices(tile=16, stream=1)


def product(A: Any, B: Any) -> np.ndarray:
    """In float64."""
    return A.astype("float64") @ B.astype("float64")


@pytest.mark.slow
@pytest.mark.shared(3)
@pytest.mark.parametrize("family", list(families()))
def test_every_family(family: str) -> None:
    A = families()[family]("small")
    B = np.random.default_rng(0).standard_normal((A.shape[1], 20), np.float32)
    kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=STREAMED)
    np.testing.assert_allclose(kernel(A=A, B=B), product(A, B), rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("feat", [1, 3, 8, 16, 17, 40])
def test_any_address(dtype: str, idtype: str, feat: int) -> None:
    """A vector that bypasses the caches must not lie across a line: other addresses take ordinary stores."""
    A = families()["uniform"]("small")[:50].astype(dtype)
    B = np.random.default_rng(0).standard_normal((A.shape[1], feat)).astype(dtype)
    kernel = sparsetir.build(sparsetir.ops.spmm(dtype, idtype=idtype), schedule=STREAMED)
    room = np.zeros(50 * feat + 16, dtype)
    for start in range(9):
        out = room[start : start + 50 * feat].reshape(50, feat)
        kernel(A=A, B=B, C=out)
        np.testing.assert_allclose(out, product(A, B), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (5, 4)])
def test_nothing_to_write(shape: tuple[int, int]) -> None:
    A = sp.csr_array(shape, dtype=np.float32)
    B = np.ones((shape[1], 32), np.float32)
    C = sparsetir.build(sparsetir.ops.spmm(), schedule=STREAMED)(A=A, B=B)
    np.testing.assert_array_equal(C, np.zeros((shape[0], 32), np.float32))


@pytest.mark.slow
def test_machine_code_bypasses_the_caches() -> None:
    if "x86_64" not in str(tvm.target.Target.from_device(tvm.cpu()).export().get("mtriple", "")):
        pytest.skip("reads x86 assembly")
    streamed, plain = (sparsetir.build(sparsetir.ops.spmm(), schedule=Choices(stream=n)) for n in (1, 0))
    assert "vmovntps" in streamed.source("asm") or "movntps" in streamed.source("asm")
    assert "movntps" not in plain.source("asm")


@pytest.mark.slow
@pytest.mark.parametrize(("mcpu", "width"), [("x86-64-v3", 32), ("x86-64-v4", 64)])
def test_lines_are_finished_one_after_the_other(mcpu: str, width: int) -> None:
    """Processors have buffers for a few unfinished lines only."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "mtriple": "x86_64-unknown-linux-gnu"})
    kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=Choices(tile=64, stream=1), target=target)
    found = re.findall(r"movntps\s+%([xyz])mm\d+, (\d*)\(", kernel.source("asm"))
    stores = [({"x": 16, "y": 32, "z": 64}[kind], int(offset or 0)) for kind, offset in found]
    assert max(size for size, _ in stores) == width
    for (size, offset), (_, following) in itertools.pairwise(stores):
        assert following in (offset + size, 0)


@pytest.mark.slow
def test_results_that_are_read_again_are_stored_as_always() -> None:
    """Pieces of a format add to what earlier ones stored."""
    A = families()["bipartite"]("small")
    B = np.random.default_rng(0).standard_normal((A.shape[1], 24), np.float32)
    parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": sparsetir.formats.hyb(2)})
    kernel = sparsetir.build(parts, schedule=STREAMED)
    np.testing.assert_allclose(kernel(A=A, B=B), product(A, B), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "is_streamed"), [(sparsetir.formats.blocks(4, 4), False), (sparsetir.formats.ell(), True)]
)
def test_results_are_streamed_if_no_other_piece_adds_to_them(format: Any, is_streamed: bool) -> None:
    """The first piece initialises its rows, and so only writes."""
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": format}), schedule=STREAMED)
    assert ("sparsetir_stream" in kernel.kernel.script(stage=3)) is is_streamed


@pytest.mark.slow
def test_rows_of_blocks_stay_in_registers() -> None:
    """Together they are a kilobyte, which TVM would take from its runtime."""
    parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": sparsetir.formats.bsr(4, 4)})
    target = {"kind": "llvm", "mcpu": "x86-64-v4"}
    kernel = sparsetir.build(parts, schedule=Choices(tile=64, stream=1), target=tvm.target.Target(target))
    assert "acc_3[T.Ramp(0, 1, 64)])" in kernel.script(stage=3)
