# SPDX-License-Identifier: Apache-2.0
"""Programs rewritten over other formats, on real matrices and tensors: against scipy and numpy in double precision.

Needs the folder that SPARSETIR_DATA names, with its MANIFEST.json; skipped without it. With SPARSETIR_EXAMPLES set,
every format and some formats within formats, and the largest matrix too. A format is compiled once for each program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import permutations, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import pairwise
from sparsetir import formats
from sparsetir.utils import memory

pytestmark = pytest.mark.real
DATA = Path(os.environ.get("SPARSETIR_DATA", ""))
MANIFEST = DATA / "MANIFEST.json"
HERE = bool(os.environ.get("SPARSETIR_DATA")) and MANIFEST.is_file()
THOROUGH = "SPARSETIR_EXAMPLES" in os.environ
FILES: list[dict[str, Any]] = json.loads(MANIFEST.read_text(encoding="utf-8"))["files"] if HERE else []
MOST_NONZEROS = 2_000_000
MOST_BYTES = 1 << 28  # a format that takes more for a matrix is none for it
LARGE = "g3_circuit"
MATRICES = {
    f["name"]: DATA / f["file"]
    for f in FILES
    if f["kind"] in ("csr", "original") and (f["nnz"] < MOST_NONZEROS or (THOROUGH and f["name"] == LARGE))
}
TENSORS = {f["name"]: DATA / f["file"] for f in FILES if f["kind"] == "coo_tensor" and len(f["shape"]) == 3}

FEW: dict[str, dict[str, Any]] = {
    "bsr": {"r": 4, "c": 4},
    "hyb": {"c": 1, "widths": (1, 2, 4, 8, 16, 32)},
    "sell": {"C": 8, "sigma": 64},
    "blocks": {"r": 4, "c": 4, "density": 0.5},
    "rows": {"p": 2},
    "coo": {},
}
MORE: dict[str, dict[str, Any]] = {
    "csr": {},
    "csc": {},
    "dcsr": {},
    "csf": {"order": (1, 0)},
    "ragged": {},
    "ell": {},
    "ell_rest": {"width": 4},
    "dbsr": {"r": 3, "c": 3},
    "padded_csr": {"t": 4},
    "sr_bcrs": {"t": 8, "g": 8},
    "nm": {"n": 4, "m": 4},
    "dia": {},
    "columns": {"c": 3},
    "buckets": {"widths": (1, 3, 7)},
    "dia_rest": {"density": 0.5},
    "hdia": {"C": 16, "density": 0.3},
    "dense_rows": {"density": 0.1},
    "dense_columns": {"density": 0.1},
    # formats within formats
    "columns of bsr": {"c": 2, "each": "bsr"},
    "columns of sell": {"c": 2, "each": "sell"},
    "columns of buckets": {"c": 2, "each": "buckets"},
    "rows of coo": {"p": 3, "each": "coo"},
    "rows of blocks": {"p": 2, "each": "blocks"},
    "blocks of coo": {"r": 2, "c": 2, "rest": "coo"},
    "blocks of hyb": {"r": 3, "c": 3, "density": 0.7, "rest": "hyb"},
    "ell_rest of csc": {"width": 2, "rest": "csc"},
    "dia_rest of sell": {"density": 0.5, "rest": "sell"},
    "dense_rows of ell_rest": {"density": 0.1, "rest": "ell_rest"},
    "dense_columns of bsr": {"density": 0.1, "rest": "bsr"},
}
FORMATS = FEW | MORE if THOROUGH else FEW
LARGE_FORMATS = ("bsr", "sell", "rows", "coo")
OPERANDS = {"spmm": "A", "spmv": "A", "sddmm": "S"}


def runs() -> Iterator[tuple[str, str, str]]:
    """Matrix, format and program; what shares operands stands together."""
    names = [*FORMATS, *(["band"] if THOROUGH else [])]
    each = product if THOROUGH else pairwise
    yield from sorted(
        each([which for which in MATRICES if which != LARGE], names, list(OPERANDS)), key=itemgetter(0, 2)
    )
    yield from product([LARGE] if LARGE in MATRICES else [], LARGE_FORMATS, ("spmm", "spmv"))


# ---------------------------------------------------------------- what is compared


@lru_cache(maxsize=1)
def matrix(which: str) -> sp.csr_array:
    return sp.csr_array(sparsetir.read(MATRICES[which])).astype("float32")


@lru_cache(maxsize=1)
def prepared(which: str, op: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Arguments, the result in double precision, and the sums of the magnitudes of its terms."""
    A, feat = matrix(which), 4 if which == LARGE else 11
    rng = np.random.default_rng(len(which))
    X, Y = (rng.uniform(-1, 1, (n, feat)).astype("float32") for n in A.shape)
    wide = A.astype("float64")
    if op == "spmm":
        return {"A": A, "B": Y}, wide @ Y.astype("float64"), abs(wide) @ abs(Y).astype("float64")
    if op == "spmv":
        y = Y[:, 0].copy()
        return {"A": A, "x": y}, wide @ y.astype("float64"), abs(wide) @ abs(y).astype("float64")
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    dots = [np.einsum("pk,pk->p", x[rows], y[A.indices]) for x, y in widened(X, Y)]
    return {"S": A, "X": X, "Y": Y}, wide.data * dots[0], abs(wide.data) * dots[1]


def widened(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Arrays in double precision, then their magnitudes."""
    found = [a.astype("float64") for a in arrays]
    yield found
    yield [abs(a) for a in found]


def close(found: np.ndarray, expected: np.ndarray, magnitude: np.ndarray) -> None:
    """Compare sums, relative to what their terms weigh: where there are none the result is zero."""
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    allowed = 50 * np.finfo("float32").eps * magnitude
    wrong = ~(abs(found - expected) <= allowed)  # NaN is wrong
    at = tuple(int(i) for i in np.unravel_index(wrong.argmax(), wrong.shape)) if wrong.size else ()
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, at {at} {found[at]} is not {expected[at]}"


# ---------------------------------------------------------------- matrices


@cache
def kernel(op: str, format: Any) -> Any:
    return sparsetir.build(sparsetir.decompose_format(getattr(sparsetir.ops, op)(), {OPERANDS[op]: format}))


@cache
def named(name: str) -> Any:
    return formats.make(name.partition(" ")[0], **FORMATS[name])


def band(A: sp.csr_array) -> Any:
    """The band that the matrix needs: the one format that is compiled for each."""
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    offsets = A.indices - rows
    return formats.band(max(0, -int(offsets.min())), max(0, int(offsets.max())))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_size", lambda: MOST_BYTES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("which", "name", "op"), list(runs()))
def test_matrices(which: str, name: str, op: str, little_memory: None) -> None:
    A = matrix(which)
    format = band(A) if name == "band" else named(name)
    given, expected, magnitude = prepared(which, op)
    try:
        tensor = sparsetir.SparseTensor.from_scipy(A, format)
    except memory.MemoryLimitError:
        pytest.skip("the format stores too much for this matrix")
    assert tensor.nnz == A.nnz
    found = kernel(op, format)(**given)
    if op == "sddmm":
        assert np.array_equal(found.indptr, A.indptr)
        assert np.array_equal(found.indices, A.indices)
        found = found.data
    close(found, expected, magnitude)


AGAIN = [("ell_rest", "A_rest_dcsr", "bsr"), ("rows", "A_r1_csr", "sell"), ("columns", "A_c0_csr", "ell")]


@pytest.mark.skipif(not THOROUGH, reason="SPARSETIR_EXAMPLES is not set")
@pytest.mark.parametrize(("first", "piece", "second"), AGAIN)
@pytest.mark.parametrize("which", [which for which in MATRICES if which != LARGE])
def test_a_piece_is_decomposed_again(which: str, first: str, piece: str, second: str, little_memory: None) -> None:
    given, expected, magnitude = prepared(which, "spmm")
    try:
        found = twice(first, piece, second)(**given)
    except memory.MemoryLimitError:
        pytest.skip("the format stores too much for this matrix")
    close(found, expected, magnitude)


@cache
def twice(first: str, piece: str, second: str) -> Any:
    parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": named(first)})
    return sparsetir.build(sparsetir.decompose_format(parts, {piece: formats.make(second)}))


# ---------------------------------------------------------------- tensors of three dimensions

CUBES: dict[str, Callable[[], Any]] = {
    "coo": formats.coo,
    **{f"csf{''.join(map(str, o))}": lambda o=o: formats.csf(o) for o in permutations(range(3))},
}


@cache
def mttkrp(name: str) -> Any:
    return sparsetir.build(sparsetir.decompose_format(sparsetir.ops.mttkrp(), {"T_": CUBES[name]()}))


@lru_cache(maxsize=1)
def prepared_tensor(which: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    tensor = sparsetir.read(TENSORS[which])
    rng = np.random.default_rng(1)
    B, C = (rng.uniform(-1, 1, (n, 11)).astype("float32") for n in tensor.shape[1:])
    i, j, k = tensor.coords
    one = sp.coo_array((np.ones(len(i)), (i, np.arange(len(i)))), (tensor.shape[0], len(i))).tocsr()
    sums = [one @ (v[:, None] * b[j] * c[k]) for v, b, c in widened(tensor.values, B, C)]
    return {"T_": tensor, "B": B, "C": C}, sums[0], sums[1]


@pytest.mark.skipif(not HERE, reason="SPARSETIR_DATA names no folder")
def test_there_are_matrices_and_tensors() -> None:
    assert {"cora", "bcsstk16", "landmark"} <= set(MATRICES)
    assert {"kinship", "fb15k237"} <= set(TENSORS)


@pytest.mark.parametrize("name", CUBES)
@pytest.mark.parametrize("which", TENSORS)
def test_tensors(which: str, name: str) -> None:
    given, expected, magnitude = prepared_tensor(which)
    close(mttkrp(name)(**given), expected, magnitude)
