# SPDX-License-Identifier: Apache-2.0
"""Dense programs over sparse formats: the results of the dense ones, or refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

import sparsetir
from sparsetir import CooTensor, sparsify
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError


@T.prim_func
def matmul(A: T.Buffer((16, 8), "float32"), B: T.Buffer((8, 4), "float32"), C: T.Buffer((16, 4), "float32")):
    for i, j, k in T.grid(16, 4, 8):
        with T.sblock("matmul"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@T.prim_func
def residual(a: T.handle, b: T.handle, x: T.handle, y: T.handle):
    m = T.int32()
    n = T.int32()
    A = T.match_buffer(a, (m, n), "float32")
    B = T.match_buffer(b, (m,), "float32")
    X = T.match_buffer(x, (n,), "float32")
    Y = T.match_buffer(y, (m,), "float32")
    for i in range(m):
        Y[i] = B[i]
        for j in range(n):
            Y[i] = Y[i] - A[i, j] * X[j]


@T.prim_func
def sddmm(
    S: T.Buffer((16, 8), "float32"),
    X: T.Buffer((16, 4), "float32"),
    Y: T.Buffer((8, 4), "float32"),
    O: T.Buffer((16, 8), "float32"),
):
    for i, j in T.grid(16, 8):
        O[i, j] = T.float32(0)
        for k in range(4):
            O[i, j] = O[i, j] + S[i, j] * X[i, k] * Y[j, k]


@T.prim_func
def mttkrp(
    X: T.Buffer((5, 6, 7), "float32"),
    B: T.Buffer((6, 3), "float32"),
    C: T.Buffer((7, 3), "float32"),
    D: T.Buffer((5, 3), "float32"),
):
    for i, j, k, r in T.grid(5, 6, 7, 3):
        with T.sblock("mttkrp"):
            vi, vj, vk, vr = T.axis.remap("SRRS", [i, j, k, r])
            with T.init():
                D[vi, vr] = T.float32(0)
            D[vi, vr] = D[vi, vr] + X[vi, vj, vk] * B[vj, vr] * C[vk, vr]


@T.prim_func
def ttv(X: T.Buffer((5, 6, 7), "float32"), v: T.Buffer((7,), "float32"), Y: T.Buffer((5, 6), "float32")):
    for i, j in T.grid(5, 6):
        Y[i, j] = T.float32(0)
        for k in T.serial(7):
            Y[i, j] = Y[i, j] + X[i, j, k] * v[k]


@T.prim_func
def ttm(X: T.Buffer((5, 6, 7), "float32"), B: T.Buffer((7, 3), "float32"), Y: T.Buffer((5, 6, 3), "float32")):
    for i, j, r, k in T.grid(5, 6, 3, 7):
        with T.sblock("ttm"):
            vi = T.axis.spatial(5, i)
            vj = T.axis.spatial(6, j)
            vr = T.axis.spatial(3, r)
            vk = T.axis.reduce(7, k)
            with T.init():
                Y[vi, vj, vr] = T.float32(0)
            Y[vi, vj, vr] = Y[vi, vj, vr] + X[vi, vj, vk] * B[vk, vr]


@T.prim_func
def convolution(x: T.Buffer((20,), "float32"), w: T.Buffer((5,), "float32"), y: T.Buffer((16,), "float32")):
    for i in range(16):
        y[i] = T.float32(0)
        for k in range(5):
            y[i] = y[i] + x[i + k] * w[k]


@T.prim_func
def layers(
    A: T.Buffer((16, 16), "float32"),
    X: T.Buffer((16, 4), "float32"),
    W: T.Buffer((4, 3), "float32"),
    Y: T.Buffer((16, 3), "float32"),
):
    H = T.alloc_buffer((16, 3), "float32")
    for i, j, k in T.grid(16, 3, 4):
        with T.sblock("dense"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                H[vi, vj] = T.float32(0)
            H[vi, vj] = H[vi, vj] + X[vi, vk] * W[vk, vj]
    for i, j, k in T.grid(16, 3, 16):
        with T.sblock("sparse"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                Y[vi, vj] = T.float32(0)
            Y[vi, vj] = Y[vi, vj] + A[vi, vk] * H[vk, vj]


@T.prim_func
def plus(A: T.Buffer((16, 8), "float32"), C: T.Buffer((16, 8), "float32")):
    for i, j in T.grid(16, 8):
        C[i, j] = A[i, j] + T.float32(1)


@T.prim_func
def halves(A: T.Buffer((16, 8), "float32"), C: T.Buffer((16, 8), "float32")):
    for i, j in T.grid(16, 8):
        C[i, j] = T.max(A[i, j] * T.float32(0.5), T.float32(0))


def drawn(*shape: int, density: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(shape)
    return np.where(rng.random(shape) < density, rng.uniform(-1, 1, shape), 0).astype("float32")


MATRIX, CUBE = drawn(16, 8, density=0.3), drawn(5, 6, 7, density=0.2)


def built(func: Any, formats: dict[str, str], **arguments: Any) -> np.ndarray:
    found = sparsetir.build(sparsify(func, formats))(**arguments)
    return found.toarray() if sp.issparse(found) else found


@pytest.mark.parametrize(
    "fmt", ["csr", "csc", "dcsr", "coo", "bsr(r=2, c=2)", "hyb", "(i, j) -> (j : compressed, i : dense)"]
)
def test_matmul_over_formats(fmt: str) -> None:
    B = drawn(8, 4)
    np.testing.assert_allclose(built(matmul, {"A": fmt}, A=sp.csr_array(MATRIX), B=B), MATRIX @ B, atol=1e-6)


@pytest.mark.slow
def test_programs() -> None:
    A, b, x = sp.csr_array(MATRIX), drawn(16), drawn(8)
    X, Y = drawn(16, 4), drawn(8, 4)
    B, C = drawn(6, 3), drawn(7, 3)
    T3 = CooTensor.from_dense(CUBE)
    close = lambda found, expected: np.testing.assert_allclose(found, expected, atol=1e-5)  # noqa: E731
    close(built(residual, {"A": "csr"}, A=A, B=b, X=x), b - MATRIX @ x)
    close(built(sddmm, {"S": "csr"}, S=A, X=X, Y=Y), MATRIX * (X @ Y.T))
    close(built(sddmm, {"S": "csr", "O": "csr"}, S=A, X=X, Y=Y), MATRIX * (X @ Y.T))
    close(built(mttkrp, {"X": "csf"}, X=T3, B=B, C=C), np.einsum("ijk,jr,kr->ir", CUBE, B, C))
    close(built(ttv, {"X": "csf"}, X=T3, v=drawn(7)), CUBE @ drawn(7))
    close(built(ttm, {"X": "csf"}, X=T3, B=C), CUBE @ C)
    close(built(plus, {"A": "csr"}, A=A), MATRIX + 1)
    close(built(halves, {"A": "csc"}, A=A), np.maximum(MATRIX / 2, 0))
    close(built(halves, {"A": "csr", "C": "csr"}, A=A), np.maximum(MATRIX / 2, 0))
    square = drawn(16, 16, density=0.2)
    close(built(layers, {"A": "csr"}, A=sp.csr_array(square), X=X, W=drawn(4, 3)), square @ (X @ drawn(4, 3)))


@pytest.mark.parametrize("name", ["x", "w"])
def test_convolution(name: str) -> None:
    arrays = {"x": drawn(20), "w": drawn(5)}
    arrays[name] = drawn(*arrays[name].shape, density=0.5)
    given = {**arrays, name: CooTensor.from_dense(arrays[name])}
    found = built(convolution, {name: "(i) -> (i : compressed)"}, **given)
    np.testing.assert_allclose(found, np.correlate(arrays["x"], arrays["w"], "valid"), atol=1e-6)


def test_the_program_is_what_a_person_writes() -> None:
    text = sparsetir.script(sparsify(matmul, {"A": "csr"}))
    assert text.partition("    I = ")[2].splitlines()[1:] == [
        '    K = T.sparse_variable(I, (8, nnz_k), (indptr_k, indices_k), "int32")',
        "    K_dense = T.dense_fixed(8)",
        "    J = T.dense_fixed(4)",
        '    A = T.match_sparse_buffer(a, (I, K), "float32")',
        '    B = T.match_sparse_buffer(b, (K_dense, J), "float32")',
        '    C = T.match_sparse_buffer(c, (I, J), "float32")',
        '    with T.sp_iter([I, K, J], "SRS", "matmul") as [i, k, j]:',
        "        with T.init():",
        "            C[i, j] = T.float32(0.0)",
        "        C[i, j] = C[i, j] + A[i, k] * B[k, j]",
    ]
    assert "[I, J]" in sparsetir.script(sparsify(halves, {"A": "csr"}))
    assert "[I, J_dense]" in sparsetir.script(sparsify(plus, {"A": "csr"}))


# ------------------------------------------------------------------ refusals


@T.prim_func
def running(A: T.Buffer((16, 8), "float32"), y: T.Buffer((16,), "float32")):
    total = T.alloc_buffer((1,), "float32")
    for i in range(16):
        total[0] = T.float32(0)
        for j in range(8):
            total[0] = total[0] + A[i, j]
        y[i] = total[0]


@T.prim_func
def branching(A: T.Buffer((16, 8), "float32"), y: T.Buffer((16,), "float32")):
    for i in range(16):
        if i > 3:
            y[i] = A[i, 0]


@T.prim_func
def last(A: T.Buffer((16, 8), "float32"), y: T.Buffer((16,), "float32")):
    for i, j in T.grid(16, 8):
        y[i] = A[i, j]


@pytest.mark.parametrize(
    ("func", "formats", "error", "message"),
    [
        (matmul, {"M": "csr"}, ArgumentError, "matmul has no buffer 'M'; there are A, B, C"),
        (matmul, {"A": "csf(order=(0, 1, 2))"}, ArgumentError, "stores tensors of 3 dimensions"),
        (matmul, {"C": "csr"}, ArgumentError, "C is a result: it can be sparse where a factor"),
        (plus, {"A": "csr", "C": "csr"}, ArgumentError, "C is a result: it can be sparse where a factor"),
        (running, {"A": "csr"}, LoweringError, "used by two statements of loop i, which cannot be split"),
        (branching, {"A": "csr"}, LoweringError, "reads loops, blocks and stores, got something else: if"),
        (last, {"A": "csr"}, LoweringError, "stores the same element of y again and again"),
        (sparsetir.ops.spmm(), {"A": "csr"}, ArgumentError, "takes a dense program"),
        (print, {}, ArgumentTypeError, "takes a PrimFunc, got builtin"),
    ],
)
def test_refusals(func: Any, formats: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sparsify(func, formats)
