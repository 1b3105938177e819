# SPDX-License-Identifier: Apache-2.0
"""A sparse matrix of uint8 blocks times a dense one of int8, tensorized by hand with a dot-product instruction."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import s_tir

import sparsetir
from sparsetir import T, intrin
from sparsetir.bench import interleave
from sparsetir.codegen.target import native_target

FEAT, ROWS, GROUP, LANES = 512, 8, 4, 16


@T.prim_func
def quantized(
    a: T.handle,
    b: T.handle,
    c: T.handle,
    indptr: T.handle,
    indices: T.handle,
    mb: T.int32,
    nb: T.int32,
    nnzb: T.int32,
) -> None:
    IO = T.dense_fixed(mb)
    JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
    JO_dense = T.dense_fixed(nb)
    II = T.dense_fixed(ROWS)
    JI = T.dense_fixed(GROUP)
    K = T.dense_fixed(FEAT)
    A = T.match_sparse_buffer(a, (IO, JO, II, JI), "uint8")
    B = T.match_sparse_buffer(b, (JO_dense, K, JI), "int8")  # four terms of a sum lie side by side
    C = T.match_sparse_buffer(c, (IO, II, K), "int32")
    with T.sp_iter([IO, JO, II, K, JI], "SRSSR", "spmm") as [io, jo, ii, k, ji]:
        with T.init():
            C[io, ii, k] = 0
        C[io, ii, k] = C[io, ii, k] + T.Cast("int32", A[io, jo, ii, ji]) * T.Cast("int32", B[jo, k, ji])


def by_hand(sch: s_tir.Schedule) -> None:
    """Replace the loops over 16 columns and four terms by one instruction."""
    block = sch.get_sblock("spmm")
    jo, ii, k, ji = sch.get_loops(block)[-4:]
    ko, ki = sch.split(k, [None, LANES])
    sch.reorder(ko, jo, ii, ki, ji)
    sch.decompose_reduction(block, jo)
    sch.tensorize(ki, intrin.get("dot_u8s8_512").tensor_intrinsic)


def arguments(rng: np.random.Generator) -> dict[str, Any]:
    """Return the operands: blocks in a tenth of the places of a 1,024 x 1,024 matrix."""
    places = sp.random_array((128, 256), density=0.1, format="csr", rng=rng)
    values = rng.integers(0, 256, (places.nnz, ROWS, GROUP)).astype(np.uint8)
    A = sp.bsr_array((values, places.indices, places.indptr), shape=(128 * ROWS, 256 * GROUP))
    return {"A": A, "B": rng.integers(-128, 128, (256, FEAT, GROUP)).astype(np.int8)}


def main() -> None:
    unit = intrin.get("dot_u8s8_512")
    if unit not in intrin.available(native_target()):
        print(f"loops for {unit.name} need a processor with {', '.join(unit.features)}")
        return
    operands = arguments(np.random.default_rng(0))
    A, B = operands["A"], operands["B"]
    kernel = sparsetir.build(quantized, schedule=by_hand)
    expected = A.astype(np.int32) @ B.transpose(0, 2, 1).reshape(-1, FEAT).astype(np.int32)
    np.testing.assert_array_equal(kernel(**operands).reshape(-1, FEAT), expected)
    print(kernel.script(stage=3))
    print(f"{unit.instruction} in the machine code: {unit.instruction in kernel.source('asm')}")

    loops = sparsetir.build(quantized, schedule=lambda sch: sch).bind(**operands)
    tensorized = kernel.bind(**operands)
    times = interleave({"loops": loops, "tensorized": tensorized}, rounds=3, rest=0.1)
    for name, timing in times.items():
        print(f"{name:10} {timing.median * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
