# SPDX-License-Identifier: Apache-2.0
"""Programs that compute the pattern of their results, and operands for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import CooTensor

PROGRAMS = {
    "least sums": """
@T.prim_func
def f(
    a: T.handle, b: T.handle, c: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    m: T.int32, p: T.int32, n: T.int32, za: T.int32, zb: T.int32,
):
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, (p, za), (pa, ja))
    KD = T.dense_fixed(p)
    JB = T.sparse_variable(KD, (n, zb), (pb, jb))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, K), "float32")
    B = T.match_sparse_buffer(b, (KD, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, K, J], "SRS", "mp") as [i, k, j]:
        with T.init():
            C[i, j] = T.float32(1e30)
        C[i, j] = T.min(C[i, j], A[i, k] + B[k, j])
""",
    "two iterations over the same rows": """
@T.prim_func
def f(
    a: T.handle, b: T.handle, c: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    d: T.handle, pd: T.handle, jd: T.handle, m: T.int32, p: T.int32, n: T.int32, za: T.int32, zb: T.int32,
    zd: T.int32,
):
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, (p, za), (pa, ja))
    KD = T.dense_fixed(p)
    JB = T.sparse_variable(KD, (n, zb), (pb, jb))
    JD = T.sparse_variable(I, (n, zd), (pd, jd))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, K), "float32")
    B = T.match_sparse_buffer(b, (KD, JB), "float32")
    D = T.match_sparse_buffer(d, (I, JD), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, K, J], "SRS", "mm") as [i, k, j]:
        C[i, j] = C[i, j] + A[i, k] * B[k, j]
    with T.sp_iter([I, JD], "SS", "plus") as [i, j]:
        C[i, j] = C[i, j] + D[i, j]
""",
    "computed subscripts": """
@T.prim_func
def f(
    a: T.handle, b: T.handle, c: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    m: T.int32, n: T.int32, za: T.int32, zb: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, za), (pa, ja))
    JB = T.sparse_variable(I, (n, zb), (pb, jb))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, JA), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, JA], "SS", "s") as [i, j]:
        C[i, n - 1 - j] = C[i, n - 1 - j] + A[i, j] * B[i, j]
""",
    "a union of three axes": """
@T.prim_func
def f(
    a: T.handle, b: T.handle, c: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    d: T.handle, pd: T.handle, jd: T.handle, m: T.int32, n: T.int32, za: T.int32, zb: T.int32, zd: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, za), (pa, ja))
    JB = T.sparse_variable(I, (n, zb), (pb, jb))
    JD = T.sparse_variable(I, (n, zd), (pd, jd))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, JA), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    D = T.match_sparse_buffer(d, (I, JD), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, T.union(JA, JB, JD)], "SS", "s") as [i, j]:
        C[i, j] = A[i, j] + B[i, j] * D[i, j]
""",
    "an intersection of three axes": """
@T.prim_func
def f(
    a: T.handle, b: T.handle, c: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    d: T.handle, pd: T.handle, jd: T.handle, m: T.int32, n: T.int32, za: T.int32, zb: T.int32, zd: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, za), (pa, ja))
    JB = T.sparse_variable(I, (n, zb), (pb, jb))
    JD = T.sparse_variable(I, (n, zd), (pd, jd))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, JA), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    D = T.match_sparse_buffer(d, (I, JD), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, T.intersect(JA, JB, JD)], "SS", "s") as [i, j]:
        C[i, j] = A[i, j] + B[i, j] * D[i, j]
""",
    "a union of unsorted axes": """
@T.prim_func
def f(
    a: T.handle, b: T.handle, c: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    m: T.int32, n: T.int32, za: T.int32, zb: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, za), (pa, ja), sorted=False)
    JB = T.sparse_variable(I, (n, zb), (pb, jb), sorted=False)
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, JA), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, T.union(JA, JB)], "SS", "s") as [i, j]:
        C[i, j] = A[i, j] - B[i, j]
""",
    "a tensor times a matrix": """
@T.prim_func
def ttm(
    a: T.handle, b: T.handle, c: T.handle, pj: T.handle, ij: T.handle, pk: T.handle, ik: T.handle,
    pb: T.handle, jb: T.handle, m: T.int32, n: T.int32, p: T.int32, q: T.int32, zj: T.int32, zk: T.int32,
    zb: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, zj), (pj, ij))
    KA = T.sparse_variable(JA, (p, zk), (pk, ik))
    KD = T.dense_fixed(p)
    LB = T.sparse_variable(KD, (q, zb), (pb, jb))
    J = T.sparse_assembled(I, n)
    L = T.sparse_assembled(J, q)
    A = T.match_sparse_buffer(a, (I, JA, KA), "float32")
    B = T.match_sparse_buffer(b, (KD, LB), "float32")
    C = T.match_sparse_buffer(c, (I, J, L), "float32")
    with T.sp_iter([I, JA, KA, T.attach(LB, KA)], "SSRS", "ttm") as [i, j, k, l]:
        with T.init():
            C[i, j, l] = 0
        C[i, j, l] = C[i, j, l] + A[i, j, k] * B[k, l]
""",
    "the sum of two tensors in two iterations": """
@T.prim_func
def plus(
    a: T.handle, b: T.handle, c: T.handle, pj: T.handle, ij: T.handle, pk: T.handle, ik: T.handle,
    pj2: T.handle, ij2: T.handle, pk2: T.handle, ik2: T.handle, m: T.int32, n: T.int32, p: T.int32,
    zj: T.int32, zk: T.int32, zj2: T.int32, zk2: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, zj), (pj, ij))
    KA = T.sparse_variable(JA, (p, zk), (pk, ik))
    JB = T.sparse_variable(I, (n, zj2), (pj2, ij2))
    KB = T.sparse_variable(JB, (p, zk2), (pk2, ik2))
    J = T.sparse_assembled(I, n)
    K = T.sparse_assembled(J, p)
    A = T.match_sparse_buffer(a, (I, JA, KA), "float32")
    B = T.match_sparse_buffer(b, (I, JB, KB), "float32")
    C = T.match_sparse_buffer(c, (I, J, K), "float32")
    with T.sp_iter([I, JA, KA], "SSS", "first") as [i, j, k]:
        C[i, j, k] = C[i, j, k] + A[i, j, k]
    with T.sp_iter([I, JB, KB], "SSS", "second") as [i, j, k]:
        C[i, j, k] = C[i, j, k] + B[i, j, k]
""",
    "the sum of two tensors": """
@T.prim_func
def plus(
    a: T.handle, b: T.handle, c: T.handle, pj: T.handle, ij: T.handle, pk: T.handle, ik: T.handle,
    pj2: T.handle, ij2: T.handle, pk2: T.handle, ik2: T.handle, m: T.int32, n: T.int32, p: T.int32,
    zj: T.int32, zk: T.int32, zj2: T.int32, zk2: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, zj), (pj, ij))
    KA = T.sparse_variable(JA, (p, zk), (pk, ik))
    JB = T.sparse_variable(I, (n, zj2), (pj2, ij2))
    KB = T.sparse_variable(JB, (p, zk2), (pk2, ik2))
    J = T.sparse_assembled(I, n)
    K = T.sparse_assembled(J, p)
    A = T.match_sparse_buffer(a, (I, JA, KA), "float32")
    B = T.match_sparse_buffer(b, (I, JB, KB), "float32")
    C = T.match_sparse_buffer(c, (I, J, K), "float32")
    with T.sp_iter([I, J, K], "SSS", "both") as [i, j, k]:
        C[i, j, k] = A[i, j, k] + B[i, j, k]
""",
    "a product of blocks": """
@T.prim_func
def blocks(
    a: T.handle, b: T.handle, c: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    m: T.int32, p: T.int32, n: T.int32, za: T.int32, zb: T.int32, r: T.int32, q: T.int32, s: T.int32,
):
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, (p, za), (pa, ja))
    KD = T.dense_fixed(p)
    JB = T.sparse_variable(KD, (n, zb), (pb, jb))
    J = T.sparse_assembled(I, n)
    II = T.dense_fixed(r)
    KI = T.dense_fixed(q)
    JI = T.dense_fixed(s)
    A = T.match_sparse_buffer(a, (I, K, II, KI), "float32")
    B = T.match_sparse_buffer(b, (KD, JB, KI, JI), "float32")
    C = T.match_sparse_buffer(c, (I, J, II, JI), "float32")
    with T.sp_iter([I, K, J, II, KI, JI], "SRSSRS", "blocks") as [i, k, j, ii, ki, ji]:
        with T.init():
            C[i, j, ii, ji] = T.float32(2)
        C[i, j, ii, ji] = C[i, j, ii, ji] + A[i, k, ii, ki] * B[k, j, ki, ji]
""",
    "a sum of blocks, and the least of each row of them": """
@T.prim_func
def blocks(
    a: T.handle, b: T.handle, c: T.handle, d: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    m: T.int32, n: T.int32, za: T.int32, zb: T.int32, r: T.int32, s: T.int32,
):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, (n, za), (pa, ja))
    JB = T.sparse_variable(I, (n, zb), (pb, jb))
    J = T.sparse_assembled(I, n)
    II = T.dense_fixed(r)
    JI = T.dense_fixed(s)
    A = T.match_sparse_buffer(a, (I, JA, II, JI), "float32")
    B = T.match_sparse_buffer(b, (I, JB, II, JI), "float32")
    C = T.match_sparse_buffer(c, (I, J, II, JI), "float32")
    D = T.match_sparse_buffer(d, (I, J, II), "float32")
    with T.sp_iter([I, T.union(JA, JB), II, JI], "SSSS", "sum") as [i, j, ii, ji]:
        C[i, j, ii, ji] = A[i, j, ii, ji] - B[i, j, ii, ji]
    with T.sp_iter([I, JA, II, JI], "SSSR", "least") as [i, j, ii, ji]:
        with T.init():
            D[i, j, ii] = T.float32(99)
        D[i, j, ii] = T.min(D[i, j, ii], A[i, j, ii, ji])
""",
    "blocks under a mask": """
@T.prim_func
def blocks(
    a: T.handle, b: T.handle, c: T.handle, d: T.handle, pa: T.handle, ja: T.handle, pb: T.handle, jb: T.handle,
    pd: T.handle, jd: T.handle, m: T.int32, p: T.int32, n: T.int32, za: T.int32, zb: T.int32, zd: T.int32,
    r: T.int32, q: T.int32, s: T.int32,
):
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, (p, za), (pa, ja))
    KD = T.dense_fixed(p)
    JB = T.sparse_variable(KD, (n, zb), (pb, jb))
    JD = T.sparse_variable(I, (n, zd), (pd, jd))
    J = T.sparse_assembled(I, n)
    II = T.dense_fixed(r)
    KI = T.dense_fixed(q)
    JI = T.dense_fixed(s)
    A = T.match_sparse_buffer(a, (I, K, II, KI), "float32")
    B = T.match_sparse_buffer(b, (KD, JB, KI, JI), "float32")
    D = T.match_sparse_buffer(d, (I, JD), "float32")
    C = T.match_sparse_buffer(c, (I, J, II, JI), "float32")
    with T.sp_iter([I, K, T.intersect(T.attach(JB, K), JD), II, KI, JI], "SRSSRS", "blocks") as [i, k, j, ii, ki, ji]:
        C[i, j, ii, ji] = C[i, j, ii, ji] + A[i, k, ii, ki] * B[k, j, ki, ji]
""",
}
SHAPES = [(4, 5, 6, 3), (1, 1, 1, 1), (3, 7, 2, 5), (0, 3, 2, 2), (2, 0, 2, 2), (9, 8, 10, 7)]


def matrix(rng: np.random.Generator, rows: int, columns: int, density: float) -> sp.csr_array:
    """A matrix of small integers: sums are exact in any order."""
    made = sp.random_array((rows, columns), density=density, format="csr", dtype="float32", rng=rng)
    made.data = np.round(made.data * 8)
    return made


def tensor(rng: np.random.Generator, shape: tuple[int, ...], density: float) -> CooTensor:
    """A tensor of small integers."""
    held = rng.random(shape) < density
    return CooTensor.from_dense(np.round(held * rng.random(shape) * 8).astype("float32"))


def draw_arguments(name: str, shape: tuple[int, int, int, int], density: float) -> dict[str, Any]:
    """Operands of a program, of the sizes m, n, p and q."""
    rng = np.random.default_rng(0)
    m, n, p, q = shape
    if "tensor" in name:
        first = tensor(rng, (m, n, p), density)
        return {"A": first, "B": matrix(rng, p, q, density) if "matrix" in name else tensor(rng, (m, n, p), density)}
    is_product = name in ("least sums", "two iterations over the same rows") or ("blocks" in name and "sum" not in name)
    sizes = [(m, n), (n, p), (m, p)] if is_product else [(m, n)] * 3
    wanted = "ABD" if "three" in name or "two" in name or "mask" in name else "AB"
    made = {b: matrix(rng, *s, density) for b, s in zip(wanted, sizes, strict=False)}
    if "blocks" not in name:
        return made
    block = {"A": (2, 3), "B": (2, 3) if "sum" in name else (3, q)}
    return {b: blocks(rng, held, block[b]) if b in block else held for b, held in made.items()}


def blocks(rng: np.random.Generator, pattern: sp.csr_array, block: tuple[int, int]) -> sp.bsr_array:
    """A matrix with a block of small integers for each entry of another."""
    values = rng.integers(-8, 8, (pattern.nnz, *block)).astype("float32")
    shape = tuple(n * b for n, b in zip(pattern.shape, block, strict=True))
    return sp.bsr_array((values, pattern.indices, pattern.indptr), shape=shape, blocksize=block)
