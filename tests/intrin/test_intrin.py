# SPDX-License-Identifier: Apache-2.0
"""The table of matrix instructions: numbers on this machine, machine code for others, and tensorizing by hand."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir

from sparsetir import build, intrin
from sparsetir.codegen.target import native_target
from sparsetir.errors import ArgumentError
from sparsetir.intrin.tensor import describe, implement

pytestmark = pytest.mark.optimised

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ({"mcpu": "sapphirerapids"}, {"mcpu": "znver4"}, {"mcpu": "alderlake"})
ARM = {"mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"}


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """All values of small integers, and few ones of large integers and floats."""
    if dtype.endswith("int8"):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)
    values = rng.integers(-64, 64, shape) if dtype == "int32" else rng.integers(-64, 64, shape) / 8
    return values.astype(np.dtype(dtype))


def tensorized(unit: intrin.Intrinsic) -> Any:
    """The loops of an intrinsic, replaced by it."""
    sch = s_tir.Schedule(describe(unit).with_attr("global_symbol", "main"))
    sch.tensorize(sch.get_loops(sch.get_sblock("update"))[0], unit.tensor_intrinsic)
    return sch.mod


@pytest.mark.parametrize("unit", intrin.TABLE, ids=lambda unit: unit.name)
def test_the_loops_of_an_intrinsic_compute_what_its_numpy_meaning_does(unit: intrin.Intrinsic) -> None:
    rng = np.random.default_rng(0)
    dtypes = (unit.a, unit.b, unit.c)
    arrays = [numbers(rng, shape, dtype) for shape, dtype in zip(unit.operand_shapes, dtypes, strict=True)]
    mod = tvm.IRModule({"main": describe(unit).with_attr("global_symbol", "main")})
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(mod, target={"kind": "llvm"})["main"](*tensors)
    np.testing.assert_array_equal(tensors[2].numpy(), unit.compute(*arrays))


@pytest.mark.parametrize("unit", intrin.TABLE, ids=lambda unit: unit.name)
def test_an_intrinsic_computes_its_numpy_meaning_where_the_machine_has_it(unit: intrin.Intrinsic) -> None:
    if unit not in intrin.available(native_target()) or unit.is_tile:
        pytest.skip(f"this machine lacks {' '.join(unit.features)}")
    rng = np.random.default_rng(1)
    dtypes = (unit.a, unit.b, unit.c)
    arrays = [numbers(rng, shape, dtype) for shape, dtype in zip(unit.operand_shapes, dtypes, strict=True)]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(tensorized(unit), target=native_target())["main"](*tensors)
    np.testing.assert_array_equal(tensors[2].numpy(), unit.compute(*arrays))


@pytest.mark.parametrize("unit", [u for u in intrin.TABLE if not u.is_tile], ids=lambda unit: unit.name)
def test_other_machines_get_the_instruction(unit: intrin.Intrinsic) -> None:
    machines = [ARM] if unit.architecture == "aarch64" else MACHINES
    targets = [tvm.target.Target({"kind": "llvm", **machine}) for machine in machines]
    target = next(t for t in targets if unit in intrin.available(t))
    host = tvm.target.Target(target, host=target)
    assembly = tvm.compile(tensorized(unit), target=host).mod.inspect_source("asm")
    name = re.sub("231", r"\\d+", unit.instruction)  # The register allocator chooses among forms of multiply-adds.
    assert re.search(rf"\t{name}\b", assembly)


def test_bfloat16_dots_keep_infinities_and_nan_and_flush_denormals() -> None:
    unit = intrin.get("dot_bf16_512")
    if unit not in intrin.available(native_target()):
        pytest.skip("this machine lacks AVX512-BF16")
    kernel = tvm.compile(tensorized(unit), target=native_target())["main"]
    a = np.array([1, 1], np.dtype(unit.a))
    b = np.zeros((16, 2), np.dtype(unit.b))
    b[0, 0], b[1, 1], b[2, 0], b[2, 1], b[3, 0] = np.inf, np.nan, np.inf, -np.inf, 1e-39
    c = tvm.runtime.tensor(np.zeros(16, np.float32))
    kernel(tvm.runtime.tensor(a), tvm.runtime.tensor(b), c)
    out = c.numpy()
    assert out[0] == np.inf
    assert np.isnan(out[1:3]).all()
    assert not out[3:].any()


def test_names_with_and_without_the_prefix() -> None:
    unit = intrin.get("dot_bf16_512")
    assert intrin.get(unit.tensor_intrinsic) is unit
    assert len({u.name for u in intrin.TABLE}) == len(intrin.TABLE)
    with pytest.raises(ArgumentError, match=r"name: expected one of dot_bf16_512, .* got .dot."):
        intrin.get("dot")


def test_operands_in_another_layout_are_refused() -> None:
    unit = intrin.get("dot_u8s8_512")
    with pytest.raises(ArgumentError, match=r"b: expected an array of shape \(16, 4\), got \(4, 16\)"):
        unit.compute(np.ones(4), np.ones((4, 16)), np.ones(16))


def test_tiles_are_called_by_number() -> None:
    text = implement(intrin.get("tile_bf16")).script()
    assert 'T.call_extern("void", "st_tile_tdpbf16ps_0_1_2")' in text


# ------------------------------------------------------------------ by hand


def example() -> Any:
    spec = importlib.util.spec_from_file_location("tensorize_bsr", ROOT / "examples" / "tensorize_bsr.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_block_kernel_is_tensorized_by_hand() -> None:
    if intrin.get("dot_u8s8_512") not in intrin.available(native_target()):
        pytest.skip("this machine lacks AVX512-VNNI")
    module = example()
    operands = module.arguments(np.random.default_rng(2))
    A, B = operands["A"].astype(np.int32), operands["B"].astype(np.int32)
    expected = A @ B.transpose(0, 2, 1).reshape(-1, module.FEAT)
    kernel = build(module.quantized, schedule=module.by_hand)
    assert "vpdpbusd" in kernel.source("asm")
    np.testing.assert_array_equal(kernel(**operands).reshape(-1, module.FEAT), expected)
    # Operands at odd addresses: nothing below stage II relies on the alignment that it declares.
    odd = np.empty(operands["B"].size + 1, np.int8)[1:].reshape(operands["B"].shape)
    odd[...] = operands["B"]
    result = np.empty(expected.size + 1, np.int32)[1:].reshape(-1, module.ROWS, module.FEAT)
    kernel(A=operands["A"], B=odd, C=result)
    np.testing.assert_array_equal(result.reshape(-1, module.FEAT), expected)


def test_stage_2_declares_the_alignment_of_tensor_intrinsics_and_stage_3_that_of_elements() -> None:
    from sparsetir import lower

    module = example()
    second, third = (lower(module.quantized, stage) for stage in (2, 3))
    assert {int(p.ty.data_alignment) for p in second.params if tvm.tirx.is_buffer_var(p)} == {64}
    assert {int(p.ty.data_alignment) for p in third.params if tvm.tirx.is_buffer_var(p)} == {1, 4}
