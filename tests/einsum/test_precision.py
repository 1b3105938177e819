# SPDX-License-Identifier: Apache-2.0
"""Products in another precision than that of their dtype: expressions, operands of every class, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.errors import ArgumentError, ArgumentTypeError

RNG = np.random.default_rng(0)
A = sp.random_array((40, 60), density=0.2, rng=RNG, format="csr", dtype=np.float32)
B = RNG.standard_normal((60, 33)).astype(np.float32)
EXACT, MAGNITUDES = A.astype(float) @ B.astype(float), abs(A).astype(float) @ abs(B).astype(float)
PRECISION = {"precision": "bf16x3"}


def in_parts(result: Any) -> bool:
    """Return whether a result has the error of three products, and not that of float32."""
    error = np.abs(np.asarray(result) - EXACT)
    return bool((error <= 3 * 2.0**-16 * MAGNITUDES).all() and error.max() > 1e-6)


@pytest.mark.parametrize("family", ["csr", "csc", "coo", "SparseTensor"])
def test_matmul_and_einsum_take_a_precision(family: str) -> None:
    matrix = sparsetir.SparseTensor.from_any(A) if family == "SparseTensor" else A.asformat(family)
    assert in_parts(sparsetir.matmul(matrix, B, **PRECISION))
    assert in_parts(sparsetir.einsum("ij,jk->ik", matrix, B, **PRECISION))
    assert not in_parts(sparsetir.matmul(matrix, B))  # the kernel of the other precision is not reused
    assert in_parts(sparsetir.matmul(matrix, B, **PRECISION))


def test_a_dense_operand_on_the_left_and_bound_expressions() -> None:
    left = np.ascontiguousarray(B.T)
    assert in_parts(sparsetir.matmul(left, A.T.tocsr(), **PRECISION).T)
    expression = sparsetir.einsum_expression("ij,jk->ik", A, (60, 33), **PRECISION)
    assert in_parts(expression(A, B))
    assert in_parts(expression.bind(A)(B))
    assert "bfloat16" in expression.script()


def test_sampled_products_take_a_precision() -> None:
    S = sp.random_array((40, 60), density=0.3, rng=RNG, format="csr", dtype=np.float32)
    X, Y = (RNG.standard_normal((n, 33)).astype(np.float32) for n in S.shape)
    result = sparsetir.einsum("ij,ik,jk->ij", S, X, Y, **PRECISION)
    rows, columns = S.nonzero()
    terms = S.data[:, None] * X[rows].astype(float) * Y[columns].astype(float)
    error = np.abs(result.data - terms.sum(axis=1))
    assert (error <= 3 * 2.0**-16 * np.abs(terms).sum(axis=1)).all()
    assert error.max() > 1e-6  # not float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparsetir.einsum("ij,jk->ik", A.astype(float), B, **PRECISION), "got 'bf16x3' for float64"),
        (lambda: sparsetir.matmul(A, B, precision="high"), "expected None, or 'bf16x3' for float32, got 'high'"),
        (lambda: sparsetir.matmul(A, A.T, **PRECISION), "but for a sparse and a dense operand in memory"),
        (lambda: sparsetir.matmul(A, B, mask=A, **PRECISION), "but for a sparse and a dense operand in memory"),
        (lambda: sparsetir.einsum("ij,ij->ij", A, A, **PRECISION), "it has no sum of products"),
        (lambda: sparsetir.einsum("ij,j->ij", A, B[:, 0], **PRECISION), "it has no sum of products"),
    ],
)
def test_precisions_that_do_not_apply_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


Q = sp.csr_array((RNG.integers(-128, 128, A.nnz).astype("int8"), A.indices, A.indptr), A.shape)
DENSE = RNG.integers(0, 256, (60, 33)).astype("uint8")
SCALE, BIAS = RNG.random(40, dtype=np.float32), RNG.standard_normal(40).astype("float32")


@pytest.mark.parametrize("family", ["csr", "csc", "coo", "SparseTensor", "torch"])
def test_quantized_products_of_every_class(family: str) -> None:
    import torch

    if family == "torch":
        matrix: Any = torch.sparse_csr_tensor(*map(torch.from_numpy, (Q.indptr, Q.indices, Q.data)), Q.shape)
    else:
        matrix = sparsetir.SparseTensor.from_any(Q) if family == "SparseTensor" else Q.asformat(family)
    dense = torch.from_numpy(DENSE) if family == "torch" else DENSE
    sums = Q.astype(np.int64) @ DENSE.astype(np.int64)
    result = sparsetir.matmul(matrix, dense, scale=SCALE, zero_point=7, bias=BIAS)
    assert isinstance(result, torch.Tensor) == (family == "torch")
    shifted = (sums - 7 * Q.astype(np.int64).sum(axis=1)[:, None]).astype(np.float32)
    np.testing.assert_allclose(result, shifted * SCALE[:, None] + BIAS[:, None], rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(sparsetir.matmul(matrix, dense, scale=0.5), sums * np.float32(0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_point": 1}, "expected a scale and no other options"),
        ({"scale": 1.0, "precision": "bf16x3"}, "expected a scale and no other options"),
        ({"scale": 1.0, "zero_point": 256}, "zero_point: expected an integer from 0 to 255, got 256"),
        ({"scale": np.ones(3)}, r"scale: expected a number or 40 of them, got the shape \(3,\)"),
        ({"scale": 1.0, "bias": "no"}, "bias: expected a number or 40 of them"),
    ],
)
def test_quantized_products_refuse_other_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sparsetir.matmul(Q, DENSE, **options)


def test_quantized_products_take_a_sparse_and_a_dense_matrix_of_eight_bits() -> None:
    with pytest.raises(ArgumentTypeError, match="B: expected int8 or uint8 with a scale, got float32"):
        sparsetir.matmul(Q, B, scale=1.0)
    with pytest.raises(ArgumentError, match="expected a sparse matrix A and a dense matrix B"):
        sparsetir.matmul(Q, Q, scale=1.0)
