# SPDX-License-Identifier: Apache-2.0
"""Buffers of more than 2**31 elements in models: 64-bit offsets where sizes are constant, a clear error elsewhere."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax, sym, tirx

import sparsetir.relax
from sparsetir.errors import OffsetError
from sparsetir.ir.rewriting import substitute
from sparsetir.ir.sizes import LARGEST_INT32, fits_int32, narrow_extents
from sparsetir.ir.views import decode
from sparsetir.relax import programs
from sparsetir.relax.training import layers

ROWS, FEATURES = 70_000, 33_000  # of float16: 4.6 GB, of which a few pages are touched
SIZES = {"m": ROWS, "n": 2, "nnz": 3, "feat": FEATURES}
LARGE: dict[str, Callable[[], programs.NamedProgram]] = {
    "spmm": lambda: programs.spmm(SIZES, "float32", "int32"),
    "batch": lambda: programs.spmm({**SIZES, "m": 2, "batch": ROWS}, "float32", "int32"),
    "linear": lambda: programs.linear({**SIZES, "batch": FEATURES}, "float32", "int32"),
    "sddmm": lambda: programs.sddmm(SIZES, "float32", "int32"),
    "segment": lambda: programs.segment_reduce(SIZES, "float32", "int32", "mean"),
    "segment_expand": lambda: programs.segment_expand(SIZES, "float32", "int32"),
    "gather": lambda: programs.gather_matmul_scatter(
        {**SIZES, "kinds": 3, "in": ROWS, "out": ROWS}, "float32", "int32"
    ),
    "gather_outer": lambda: programs.gather_outer({**SIZES, "others": 4, "in": ROWS, "out": ROWS}, "float32", "int32"),
    "matmul": lambda: programs.matmul(SIZES, "float32", 4),
    "gemv": lambda: programs.gemv({"m": ROWS, "n": ROWS}, "float32"),
    "dropout": lambda: layers.program(3_000_000_000, "float32", 0.5, 1),
    "attention": lambda: programs.attention(
        {"heads": ROWS, "blocks": 4000, "block": 16, "nnz": 3, "feat": 16, "out": 16}, "float32", "int32", 1.0
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_constant_sizes_have_offsets_that_hold_them(name: str) -> None:
    program = LARGE[name]()
    for extents in narrow_extents(decode(program.func), with_constants=True).values():
        assert int(fits_int32(extents))
    sparsetir.build(program.func)


def zeros(rows: int, columns: int) -> np.ndarray:
    """Memory of which only touched pages exist; it begins at a page, so that nothing is copied."""
    return np.frombuffer(mmap.mmap(-1, rows * columns * 2), np.float16).reshape(rows, columns)


def sampled(rows: Any, features: Any) -> Any:
    """A model of ``sddmm`` with three entries."""
    types = {
        "data": ((3,), "float16"),
        "indptr": ((ROWS + 1,), "int32"),
        "indices": ((3,), "int32"),
        "X": ((rows, features), "float16"),
        "Y": ((2, features), "float16"),
    }
    params = [relax.Var(name, relax.TensorType(*kind)) for name, kind in types.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        builder.emit_func_output(builder.emit(sparsetir.relax.sddmm(*params)))
    return sparsetir.relax.compile_model(builder.get())


def operands() -> tuple[np.ndarray, ...]:
    X, Y = zeros(ROWS, FEATURES), np.full((2, FEATURES), 0.5, "float16")
    X[0, -1], X[60_000, 7], X[-1, -1] = 5, 3, 4
    indptr = np.searchsorted([0, 60_000, ROWS - 1], np.arange(ROWS + 1)).astype("int32")
    return np.ones(3, "float16"), indptr, np.array([0, 1, 0], "int32"), X, Y


def test_a_model_of_constant_sizes_addresses_all_of_a_large_operand() -> None:
    np.testing.assert_array_equal(sampled(ROWS, FEATURES)(*operands()), [2.5, 1.5, 2])


def test_a_model_of_symbolic_sizes_refuses_what_32_bits_cannot_address() -> None:
    model = sampled(ROWS, tirx.Var("features", "int64"))
    data, indptr, indices, X, Y = operands()
    np.testing.assert_array_equal(
        model(data, indptr, indices, np.ones((ROWS, 4), "float16"), Y[:, :4].copy()), [2, 2, 2]
    )
    message = "sddmm: X has more elements than 32-bit indices can address. Pass int64 index arrays"
    with pytest.raises(OffsetError, match=message):
        model(data, indptr, indices, X, Y)


@pytest.mark.scheduled
def test_a_function_that_32_bits_cannot_address_is_refused_when_the_model_is_built() -> None:
    func = sparsetir.parse(
        """
@T.prim_func
def copied(x: T.handle, y: T.handle):
    I = T.dense_fixed(70000)
    J = T.dense_fixed(33000)
    X = T.match_sparse_buffer(x, (I, J), "float16")
    Y = T.match_sparse_buffer(y, (I, J), "float16")
    with T.sp_iter([I, J], "SS", "copied") as [i, j]:
        Y[i, j] = X[i, j]
"""
    )
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((ROWS, FEATURES), "float16"))
    with builder.function("main", [x]):
        var = builder.add_func(func, "copied")
        builder.emit_func_output(builder.emit(relax.call_tir(var, [x], x.ty)))
    with pytest.raises(OffsetError, match="copied: X has more elements than 32-bit indices can address"):
        sparsetir.relax.build(builder.get())


@pytest.mark.parametrize(
    ("extents", "fits"),
    [
        ((), True),
        ((LARGEST_INT32,), True),
        ((2, 2**30), False),
        ((46_340, 46_340), True),
        ((46_341, 46_341), False),
        ((2**30, 2**30, 2**30, 0), True),
        ((2**16, 2**16, 2**16, 2**16), False),
    ],
)
def test_products_are_compared_without_overflow(extents: tuple[int, ...], fits: bool) -> None:
    names = [tirx.Var(f"n{n}", "int32") for n in range(len(extents))]
    condition = fits_int32(names)
    values = {v: tirx.const(n, "int32") for v, n in zip(names, extents, strict=True)}
    assert bool(int(sym.Analyzer().simplify(substitute(condition, values)))) == fits
