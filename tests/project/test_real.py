# SPDX-License-Identifier: Apache-2.0
"""Kernels on real matrices: the corpus on corners of them, the ready programs on whole ones.

Needs the folder that SPARSETIR_DATA names; skipped without it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from corpus import CASES
from corpus.data import add_real
from corpus.running import check, draw, run
from each import share

pytestmark = pytest.mark.real
DATA = Path(os.environ.get("SPARSETIR_DATA", ""))
HERE = bool(os.environ.get("SPARSETIR_DATA")) and DATA.is_dir()
FILES = sorted(f for f in DATA.rglob("*.npz") if "tensors" not in f.parts) if HERE else []
TENSORS = sorted((DATA / "tensors").glob("*.npz")) if HERE else []
CORNERS = ("cora", "amazon_computers", "bcsstk16", "wavernn_gru_4x4")
MOST_NONZEROS = 1_200_000


@cache
def matrix(path: Path) -> Any:
    """The file as canonical CSR, or None where it holds no matrix (or one too large for a test)."""
    try:
        found = sparsetir.read(path)
    except sparsetir.SparseTIRError:
        return None
    if not sp.issparse(found) or found.ndim != 2 or found.nnz > MOST_NONZEROS:
        return None
    return sp.csr_array(found).astype("float32")


@cache
def corners() -> tuple[str, ...]:
    """Kinds of the corpus made of real matrices."""
    paths = [f for f in FILES if f.stem in CORNERS]
    return tuple(add_real(f.stem, matrix(f)) for f in paths)


def on_matrices(case: Any) -> bool:
    """Whether a case of the corpus draws two-dimensional structures of any size."""
    try:
        draw(case, corners()[0], "float32", "int32")
    except (KeyError, IndexError, ValueError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="SPARSETIR_DATA names no folder")
@pytest.mark.parametrize("case", share(CASES, 3, 1), ids=lambda c: c.name)
def test_the_corpus_on_corners_of_real_matrices(case: Any) -> None:
    if "float32" not in case.dtypes or not on_matrices(case):
        pytest.skip("not a program over matrices")
    func = case.make("float32", "int32")
    kernel = sparsetir.build(func)
    # Sums of hundreds of terms: the corpus's tolerance is for its own small matrices.
    wider = replace(case, tolerance=100 * case.tolerance)
    for kind in corners():
        args = draw(case, kind, "float32", "int32")
        check(wider, func, "float32", run(case, kernel, args), args)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda f: f.stem)
@pytest.mark.parametrize(("dtype", "idtype"), [("float32", "int32"), ("float64", "int64")])
def test_the_ready_programs_on_whole_matrices(path: Path, dtype: str, idtype: str) -> None:
    found = matrix(path)
    if found is None:
        pytest.skip("no matrix of a size for a test")
    A = found.astype(dtype)
    rng = np.random.default_rng(0)
    B, X = (rng.uniform(-1, 1, (n, 19)).astype(dtype) for n in (A.shape[1], A.shape[0]))
    tolerance = 200 * np.finfo(dtype).eps
    scale = abs(A) @ abs(B)
    for name in ("csr", "csc", "coo", "dcsr"):
        C = sparsetir.build(sparsetir.ops.spmm(dtype, name, idtype=idtype))(A=A, B=B)
        assert np.all(abs(C - A @ B) <= tolerance * (scale + 1)), name
    y = sparsetir.build(sparsetir.ops.spmv(dtype, idtype=idtype))(A=A, x=B[:, 0].copy())
    assert np.all(abs(y - A @ B[:, 0]) <= tolerance * (scale[:, 0] + 1))
    O = sparsetir.build(sparsetir.ops.sddmm(dtype, idtype=idtype))(S=A, X=X, Y=B)
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    expected = A.data * np.einsum("pk,pk->p", X[rows], B[A.indices])
    assert np.all(abs(O.data - expected) <= tolerance * 20 * (abs(A.data) + 1))


@pytest.mark.parametrize("path", TENSORS, ids=lambda f: f.stem)
def test_mttkrp_on_tensors(path: Path) -> None:
    tensor = sparsetir.read(path)
    if tensor.order != 3:
        pytest.skip("mttkrp is written for three dimensions")
    rng = np.random.default_rng(0)
    B, C = (rng.uniform(-1, 1, (n, 16)).astype("float32") for n in tensor.shape[1:])
    D = sparsetir.build(sparsetir.ops.mttkrp())(T_=tensor, B=B, C=C)
    i, j, k = tensor.coords
    expected = np.zeros((tensor.shape[0], 16))
    np.add.at(expected, i, tensor.values[:, None].astype("float64") * B[j] * C[k])
    np.testing.assert_allclose(D, expected, rtol=1e-4, atol=1e-4)
