# SPDX-License-Identifier: Apache-2.0
"""Sums by tile instructions: numbers over blocks and vectors, arrays between unreadable pages, threads, assembly."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from fences import Fences
from sparsetir import CooTensor, build, decompose_format, formats
from sparsetir.codegen.target import emulating_target, native_target
from sparsetir.lower.vector import tile_products
from sparsetir.schedules import Choices
from sparsetir.utils.threads import get_num_threads, set_num_threads
from unit_products import BF16, drawn, program

LAYOUTS = [
    *(("bsr", *shape) for shape in ((8, 4), (16, 1), (16, 64), (24, 2), (32, 32), (64, 3))),
    *(("sr_bcrs", *shape) for shape in ((16, 32), (8, 5), (32, 3))),
]
TYPES = (
    ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("int8", "int8", "int32"),
    ("uint8", "int8", "int32"),
    ("int8", "uint8", "int32"),
    ("uint8", "uint8", "int32"),
)
FEATURES = (0, 1, 7, 16, 17, 30, 33, 64, 100, 130)


def layout(name: str, rows: int, columns: int) -> Any:
    return formats.make(name, r=rows, c=columns) if name == "bsr" else formats.make(name, t=rows, g=columns)


@cache
def kernel(types: tuple[str, str, str], *shape: Any, tiles: int = 4) -> Any:
    parts = decompose_format(program(*types), {"A": layout(*shape)})
    built = build(parts, emulating_target(), schedule=Choices(tiles=tiles))
    assert "st_tile_tdp" in built.script(stage=3)
    return built


def matrix(rng: np.random.Generator, dtype: str) -> sp.coo_array:
    """A matrix with rows and columns that are empty, or one that is empty throughout."""
    m, n = rng.integers(1, (70, 150))
    dense = rng.random((m, n)) < rng.choice([0.0, 0.02, 0.3, 1.0])
    dense[rng.random(m) < 0.3] = False
    places = np.nonzero(dense)
    return sp.coo_array((drawn(rng, len(places[0]), dtype).astype(np.float64), places), shape=(m, n))


def check(built: Any, rng: np.random.Generator, types: tuple[str, str, str], A: sp.coo_array, feat: int) -> None:
    fences = Fences()
    B = fences.fenced(drawn(rng, (A.shape[1], feat), types[1]))
    values = A.data.astype(BF16 if types[0] == "bfloat16" else types[0])
    expected = A @ B.astype(np.float64)
    result_type = BF16 if types[2] == "bfloat16" else np.dtype(types[2])
    C = fences.fenced(np.ones(expected.shape, result_type))
    built(A=CooTensor(np.stack(A.coords), values, A.shape), B=B, C=C)
    np.testing.assert_array_equal(C, expected.astype(np.float32).astype(result_type))


@pytest.mark.parametrize(
    ("types", "shape"), [*((TYPES[0], shape) for shape in LAYOUTS), *((TYPES[2], shape) for shape in LAYOUTS[1::4])]
)
def test_sums_are_those_of_numpy(types: tuple[str, str, str], shape: Any) -> None:
    rng = np.random.default_rng(list(map(ord, repr((types, shape)))))
    for feat in FEATURES:
        check(kernel(types, *shape), rng, types, matrix(rng, types[0]), feat)


@pytest.mark.slow
@pytest.mark.parametrize("types", [TYPES[1], *TYPES[3:]], ids="-".join)
@pytest.mark.parametrize("tiles", [2, 4])
def test_other_dtypes_and_panels(types: tuple[str, str, str], tiles: int) -> None:
    rng = np.random.default_rng(tiles)
    for feat in FEATURES[1::2]:
        check(kernel(types, "sr_bcrs", 16, 32, tiles=tiles), rng, types, matrix(rng, types[0]), feat)


@pytest.mark.slow
def test_padding_multiplies_no_row() -> None:
    """Neither infinities in rows that no entry uses, nor what lies behind the dense operand, get into sums."""
    B = np.full((5, 20), np.inf, BF16)
    B[2] = np.arange(20)
    A = CooTensor(np.array([[3], [2]]), np.ones(1, BF16), (17, 5))
    expected = np.zeros((17, 20))
    expected[3] = np.arange(20)
    np.testing.assert_array_equal(kernel(TYPES[0], "sr_bcrs", 16, 32)(A=A, B=Fences().fenced(B)), expected)


@pytest.mark.parametrize("shape", [("bsr", 16, 1), ("sr_bcrs", 16, 32), ("bsr", 32, 32)])
def test_entries_of_long_rows_are_laid_out_in_parts(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_products, "STEPS", 2)
    built = build(decompose_format(program(*TYPES[0]), {"A": layout(*shape)}), emulating_target())
    rng = np.random.default_rng(0)
    A = sp.random_array((40, 200), density=0.4, rng=rng, format="coo")
    A = sp.coo_array((drawn(rng, A.nnz, "bfloat16").astype(float), A.coords), shape=A.shape)
    for feat in (20, 64, 100, 128):
        check(built, rng, TYPES[0], A, feat)


def test_threads_have_tiles_of_their_own() -> None:
    before = get_num_threads()
    set_num_threads(2)
    try:
        parts = decompose_format(program(*TYPES[0]), {"A": formats.make("bsr", r=16, c=32)})
        built = build(parts, emulating_target(), schedule=Choices(chunks=4))
        rng = np.random.default_rng(0)
        A = sp.random_array((300, 400), density=0.2, rng=rng, format="coo")
        A = sp.coo_array((drawn(rng, A.nnz, "bfloat16").astype(float), A.coords), shape=A.shape)
        for _ in range(5):
            check(built, rng, TYPES[0], A, 70)
    finally:
        set_num_threads(before)


def assembly(mcpu: str, types: tuple[str, str, str]) -> str:
    machine = {**native_target().export(), "mcpu": mcpu, "mattr": []}
    parts = decompose_format(program(*types), {"A": formats.make("bsr", r=16, c=32)})
    return str(build(parts, machine).source("asm"))


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.skipif(native_target().attrs["mtriple"].partition("-")[0] != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize(
    ("mcpu", "instructions"),
    [
        ("sapphirerapids", ("tdpbf16ps", "tdpbssd")),
        ("znver4", ("vdpbf16ps", "vpdpbusd")),
        ("x86-64-v3", ("", "")),
    ],
)
def test_machines_get_their_instructions(mcpu: str, instructions: tuple[str, str]) -> None:
    for types, name in zip((TYPES[0], TYPES[2]), instructions, strict=True):
        found = set(re.findall(r"\t(v?t?dpb\w+|vpdpbusds?|ldtilecfg|tilerelease)\b", assembly(mcpu, types)))
        around = {"ldtilecfg", "tilerelease"} if name.startswith("t") else set()
        assert found == ({name} if name else set()) | around
