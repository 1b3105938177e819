# SPDX-License-Identifier: Apache-2.0
"""Products in another precision than that of their dtype: expressions, operands of every class, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.errors import ArgumentError

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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparsetir.einsum("ij,jk->ik", A.astype(float), B, **PRECISION), "got 'bf16x3' for float64"),
        (lambda: sparsetir.matmul(A, B, precision="high"), "expected None, or 'bf16x3' for float32, got 'high'"),
        (lambda: sparsetir.matmul(A, A.T, **PRECISION), "but for a sparse and a dense operand in memory"),
        (lambda: sparsetir.matmul(A, B, mask=A, **PRECISION), "but for a sparse and a dense operand in memory"),
        (lambda: sparsetir.einsum("ij,ik,jk->ij", A, B[:40], B, **PRECISION), "it has no sum of products"),
        (lambda: sparsetir.einsum("ij,j->ij", A, B[:, 0], **PRECISION), "it has no sum of products"),
    ],
)
def test_precisions_that_do_not_apply_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
