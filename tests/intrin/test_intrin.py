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
from tvm.script import tirx

from sparsetir import build, intrin
from sparsetir.codegen.target import native_target
from sparsetir.errors import ArgumentError
from sparsetir.intrin import describe, implement
from sparsetir.lower import run
from sparsetir.lower.annotations import EMULATED
from sparsetir.lower.vector.tile_products import ConfigureTiles

pytestmark = pytest.mark.optimised

ROOT = Path(__file__).resolve().parents[2]
MACHINES = tuple({"mcpu": name} for name in ("sapphirerapids", "znver4", "alderlake", "graniterapids"))
EMULATED_UNITS = [unit for unit in intrin.TABLE if unit.architecture == "x86_64" and unit.c != "float16"]
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


def compiled(unit: intrin.Intrinsic, target: Any, *, emulated: bool = False) -> Any:
    """The loops of an intrinsic, replaced by it, with tiles configured around them."""
    func = tensorized(unit)["main"]
    mod = tvm.ir.IRModule({"main": func.with_attr(EMULATED, True) if emulated else func})
    passes = [getattr(s_tir.transform, name)() for name in ("ConvertBlocksToOpaque", "LowerMatchBuffer")]
    return tvm.compile(run([*passes, s_tir.transform.LowerOpaqueBlock(), ConfigureTiles], mod), target=target)


def check(unit: intrin.Intrinsic, *, emulated: bool) -> None:
    rng = np.random.default_rng(1)
    dtypes = (unit.a, unit.b, unit.c)
    arrays = [numbers(rng, shape, dtype) for shape, dtype in zip(unit.operand_shapes, dtypes, strict=True)]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    compiled(unit, native_target(), emulated=emulated)["main"](*tensors)
    np.testing.assert_array_equal(tensors[2].numpy(), unit.compute(*arrays))


@pytest.mark.parametrize("unit", intrin.TABLE, ids=lambda unit: unit.name)
def test_an_intrinsic_computes_its_numpy_meaning_where_the_machine_has_it(unit: intrin.Intrinsic) -> None:
    if unit not in intrin.available(native_target()):
        pytest.skip(f"this machine lacks {' '.join(unit.features)}")
    check(unit, emulated=False)


@pytest.mark.parametrize("unit", EMULATED_UNITS, ids=lambda unit: unit.name)
def test_an_emulated_intrinsic_computes_its_numpy_meaning(unit: intrin.Intrinsic) -> None:
    check(unit, emulated=True)


@pytest.mark.parametrize("unit", intrin.TABLE, ids=lambda unit: unit.name)
def test_other_machines_get_the_instruction(unit: intrin.Intrinsic) -> None:
    machines = [ARM] if unit.architecture == "aarch64" else MACHINES
    targets = [tvm.target.Target({"kind": "llvm", **machine}) for machine in machines]
    target = next(t for t in targets if unit in intrin.available(t))
    assembly = compiled(unit, tvm.target.Target(target, host=target)).mod.inspect_source("asm")
    name = re.sub("231", r"\\d+", unit.instruction)  # The register allocator chooses among forms of multiply-adds.
    assert re.search(rf"\t{name}\b", assembly)
    around = ("ldtilecfg", "tileloadd", "tilestored", "tilerelease")
    assert [f"\t{name}" in assembly for name in around] == [unit.is_tile] * 4


def special(unit: intrin.Intrinsic, *, emulated: bool) -> np.ndarray:
    """Sums of a row with infinities, NaN, denormal numbers, and one that rounds."""
    dtypes = (unit.a, unit.b, unit.c)
    a, b, c = (np.zeros(shape, np.dtype(x)) for shape, x in zip(unit.operand_shapes, dtypes, strict=True))
    pair, columns, sums = a.reshape(unit.m, -1), b.reshape(-1, unit.n, unit.group)[0], c.reshape(unit.m, unit.n)
    pair[0, :2] = 1
    columns[:4] = [[np.inf, 0], [0, np.nan], [np.inf, -np.inf], [1e-39, 0]]
    columns[4], sums[0, 4] = [1, 0], np.float32(2.0**24 + 2)
    columns[5], sums[0, 5] = [2.0**-20, -(2.0**-20)], 1
    columns[6], sums[0, 6] = [0, 0], 1e-39
    tensors = [tvm.runtime.tensor(x) for x in (a, b, c)]
    compiled(unit, native_target(), emulated=emulated)["main"](*tensors)
    return tensors[2].numpy().reshape(unit.m, unit.n)[0, :7]


@pytest.mark.parametrize("name", ["dot_bf16_512", "dot_bf16_256", "tile_bf16"])
def test_bfloat16_units_keep_infinities_and_nan_round_to_even_and_flush_denormals(name: str) -> None:
    unit = intrin.get(name)
    ways = [True, False] if unit in intrin.available(native_target()) else [True]
    for emulated in ways:
        out = special(unit, emulated=emulated)
        assert out[0] == np.inf
        assert np.isnan(out[1:3]).all()
        assert out[3] == out[6] == 0
        assert out[4] == 2.0**24 + 4  # 2**24 + 3 lies between, and the even one is above
        assert out[5] == 1


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


def test_each_thread_configures_its_tiles_inside_the_parallel_loop() -> None:
    @tirx.prim_func(s_tir=True)
    def two_loops(a: tirx.handle, n: tirx.int32) -> None:
        A = tirx.match_buffer(a, (4096,), "uint8")
        for _i in tirx.serial(n):
            tirx.evaluate(tirx.call_extern("void", "st_tile_zero_0"))
        for i in tirx.parallel(8):
            for _j in tirx.serial(n):
                tirx.evaluate(tirx.call_extern("void", "st_tile_store_0", tirx.address_of(A[i * 512]), tirx.int64(64)))

    lines = str(run([ConfigureTiles], tvm.ir.IRModule({"main": two_loops}))["main"].script()).split("\n")
    found = [re.search(r"parallel|st_tile_\w+", line) for line in lines if "import_llvm" not in line]
    names = [match[0] for match in found if match and "define" not in match.string]
    loop = ["st_tile_config", "st_tile_zero_0", "st_tile_release"]
    assert names == [*loop, "parallel", "st_tile_config", "st_tile_store_0", "st_tile_release"]


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
