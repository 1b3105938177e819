# SPDX-License-Identifier: Apache-2.0
"""Expressions of index notation to measure, their operands, and how other libraries say them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import CooTensor
from sparsetir.utils.packages import require
from sparsetir.workloads.peers import torch_csr

Call = Callable[[], Any]
INF = float("inf")
MOST_DENSE = 1 << 26  # elements of a result that finch-tensor is asked for


@dataclass(frozen=True)
class ExprCase:
    """One expression.

    Parameters
    ----------
    name : str
    text : str
        Its subscripts.
    kinds : str
        Of each operand whether it is sparse ("s") or dense ("d").
    extents : dict of str to int
        Of the letters, relative to the size of a run; those below 100 are as they stand.
    entries : float
        Entries in a row of a sparse operand.
    options : dict
        For `einsum`.
    scipy, torch : callable, optional
        The expression as users of these write it, of operands as these take them.
    others : bool
        Whether libraries that read subscripts say it: sums of products alone.
    """

    name: str
    text: str
    kinds: str
    extents: dict[str, int] = field(default_factory=dict)
    entries: float = 20
    options: dict[str, Any] = field(default_factory=dict)
    scipy: Callable[..., Any] | None = None
    torch: Callable[..., Any] | None = None
    others: bool = True

    @property
    def terms(self) -> list[str]:
        return self.text.partition("->")[0].split(",")

    def operands(self, size: int, seed: int = 0) -> list[Any]:
        """Random operands: `size` stands for an extent of 1000."""
        rng = np.random.default_rng(seed)
        extents = {c: n if n < 100 else max(2, n * size // 1000) for c, n in self.extents.items()}
        shapes = [tuple(extents.get(c, size) for c in term) for term in self.terms]
        return [self._operand(shape, kind, rng) for shape, kind in zip(shapes, self.kinds, strict=True)]

    def _operand(self, shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> Any:
        if kind == "d":
            return rng.random(shape, dtype=np.float32) + np.float32(0.1)
        count = max(1, int(self.entries * shape[0]))
        coords = np.stack([rng.integers(0, n, count) for n in shape])
        values = rng.random(count, dtype=np.float32) + np.float32(0.1)
        if len(shape) == 2:
            made = sp.csr_array((values, tuple(coords.astype("int32"))), shape)
            made.sum_duplicates()
            return made
        return SparseTensor.from_any(CooTensor(coords.astype("int32"), values, shape))


def _minplus(A: Any, x: np.ndarray) -> np.ndarray:
    """Return the least sum in each row of a CSR matrix."""
    sums = A.data + x[A.indices]
    rows = np.flatnonzero(np.diff(A.indptr))
    out = np.full(A.shape[0], np.inf, sums.dtype)
    out[rows] = np.minimum.reduceat(sums, A.indptr[rows])
    return out


def _sampled(S: Any, X: np.ndarray, Y: np.ndarray) -> Any:
    """SDDMM, gathered."""
    rows = np.repeat(np.arange(S.shape[0]), np.diff(S.indptr))
    return sp.csr_array((S.data * np.einsum("pk,pk->p", X[rows], Y[S.indices]), S.indices, S.indptr), S.shape)


def _batched(A: Any, X: np.ndarray) -> np.ndarray:
    return np.stack([A @ x for x in X])


TENSOR = {"i": 1000, "j": 200, "k": 200, "l": 200}
CASES = [
    ExprCase("spmv", "ij,j->i", "sd", scipy=lambda A, x: A @ x, torch=lambda A, x: A @ x),
    ExprCase("transposed spmv", "ij,i->j", "sd", scipy=lambda A, x: A.T @ x),
    ExprCase("spmm", "ij,jk->ik", "sd", {"k": 32}, scipy=lambda A, X: A @ X, torch=lambda A, X: A @ X),
    ExprCase("sddmm", "ij,ik,jk->ij", "sdd", {"k": 32}, scipy=_sampled),
    ExprCase("masked product", "ij,ik,kj->ij", "sss", scipy=lambda S, A, B: S * (A @ B)),
    ExprCase("product", "ik,kj->ij", "ss", scipy=lambda A, B: A @ B, torch=lambda A, B: A @ B),
    ExprCase("transposed product", "ik,jk->ij", "ss", scipy=lambda A, B: A @ B.T),
    ExprCase("sum", "ij,ij->ij", "ss", options={"combine": "add"}, scipy=lambda A, B: A + B, others=False),
    ExprCase("hadamard", "ij,ij->ij", "ss", scipy=lambda A, B: A * B, torch=lambda A, B: A * B),
    ExprCase("columns scaled", "ij,j->ij", "sd", scipy=lambda A, x: A * x[None]),
    ExprCase("bilinear form", "i,ij,j->", "dsd", scipy=lambda x, A, y: x @ (A @ y), torch=lambda x, A, y: x @ (A @ y)),
    ExprCase("triangles", "ij,jk,ki->", "sss", scipy=lambda A, B, C: (A @ B * C.T).sum()),
    ExprCase("row sums", "ij->i", "s", scipy=lambda A: A.sum(axis=1)),
    ExprCase("column sums", "ij->j", "s", scipy=lambda A: A.sum(axis=0)),
    ExprCase("row maxima", "ij->i", "s", options={"reduce": "max", "fill": -INF}, others=False),
    ExprCase("min-plus spmv", "ij,j->i", "sd", options={"reduce": "min", "combine": "add", "fill": INF}, scipy=_minplus,
         others=False),
    ExprCase("two steps", "ij,jk,k->i", "ssd", scipy=lambda A, B, x: A @ (B @ x), torch=lambda A, B, x: A @ (B @ x)),
    ExprCase("two layers", "ij,jk,kl->il", "sdd", {"k": 32, "l": 16}, scipy=lambda A, X, W: A @ (X @ W),
         torch=lambda A, X, W: A @ (X @ W)),
    ExprCase("batched spmm", "ij,bjk->bik", "sd", {"b": 4, "k": 16}, scipy=_batched),
    ExprCase("outer product", "ij,kl->ikjl", "ss", {"i": 40, "j": 40, "k": 40, "l": 40}, entries=4,
         scipy=lambda A, B: sp.kron(A, B)),
    ExprCase("ttv", "ijk,k->ij", "sd", TENSOR),
    ExprCase("ttm", "ijk,kl->ijl", "ss", TENSOR),
    ExprCase("mttkrp", "ijk,jr,kr->ir", "sdd", TENSOR | {"r": 16}),
    ExprCase("tensor sum", "ijk,ijk->ijk", "ss", TENSOR, options={"combine": "add"}, others=False),
    ExprCase("tensor hadamard", "ijk,ijk->ijk", "ss", TENSOR),
    ExprCase("tensor contraction", "ijk,ljk->il", "ss", TENSOR),
    ExprCase("tensor projection", "ijk->ik", "s", TENSOR),
]  # fmt: skip


# ------------------------------------------------------------------ other libraries


def scipy_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """As a user of scipy writes it."""
    how = case.scipy
    return None if how is None else lambda: how(*operands)


def torch_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """As a user of torch writes it, of CSR tensors."""
    how = case.torch
    if how is None:
        return None
    torch = require("torch", extra="bench", purpose="the torch peer")
    given = [torch_csr(v) if sp.issparse(v) else torch.from_numpy(v) for v in operands]
    return lambda: how(*given)


def sparse_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """``sparse.einsum`` of pydata/sparse; sums by its operators."""
    sparse = require("sparse", extra="bench", purpose="the pydata/sparse peer")
    converted = [_pydata(sparse, value) for value in operands]
    if case.others:
        return lambda: sparse.einsum(case.text, *converted)
    return (lambda: converted[0] + converted[1]) if case.options == {"combine": "add"} else None


def _pydata(sparse: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if sp.issparse(value):
        return sparse.COO.from_scipy_sparse(value)
    return sparse.COO(np.stack(value.coords), value.values, value.shape)


def finch_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """``finch.einsum`` of finch-tensor, compiled by Numba: of matrices with 64-bit indices, results are dense."""
    finch = import_module("finch")
    output = case.text.partition("->")[2]
    sizes = dict(zip("".join(case.terms), [n for v in operands for n in v.shape], strict=True))
    if not case.others or any(len(t) > 2 for t in case.terms) or math.prod(sizes[c] for c in output) > MOST_DENSE:
        return None
    given = [finch.asarray(wide(value)) for value in operands]

    def call() -> Any:
        with finch.with_default_scheduler(finch.COMPILE_NUMBA):
            return np.asarray(finch.to_numpy(finch.einsum(case.text, *given)))

    return call


def wide(value: Any) -> Any:
    """Return a CSR matrix with 64-bit indices; anything else as it is."""
    if not sp.issparse(value):
        return value
    result = sp.csr_array(value.shape, dtype=value.dtype)
    result.data, result.indices, result.indptr = value.data, value.indices.astype("int64"), value.indptr.astype("int64")
    return result


PEERS: dict[str, Callable[[ExprCase, list[Any]], Call | None]] = {
    "scipy": scipy_call,
    "torch": torch_call,
    "sparse": sparse_call,
    "finch": finch_call,
}


# ------------------------------------------------------------------ comparing results


def entries(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of any result that are not zero, by number; their values."""
    if not getattr(value, "shape", ()):
        value = np.reshape(value.todense() if hasattr(value, "todense") else value, 1)
    if type(value).__module__.startswith("torch"):
        value = sp.csr_array(value.to_dense().numpy()) if value.ndim == 2 else value.to_dense().numpy()
    if sp.issparse(value):
        matrix = sp.csr_array(value) if value.ndim == 2 else value.tocoo()
        matrix.sum_duplicates()
        coords, values, shape = matrix.tocoo().coords, matrix.tocoo().data, value.shape
    elif hasattr(value, "coords"):
        coords, values, shape = value.coords, getattr(value, "values", getattr(value, "data", None)), value.shape
    else:
        array = np.asarray(value.todense() if hasattr(value, "todense") else value)
        coords, values, shape = array.reshape(-1).nonzero(), array.reshape(-1)[array.reshape(-1) != 0], (array.size,)
    keys = np.ravel_multi_index([np.asarray(c, np.int64) for c in coords], shape)
    order = np.argsort(keys, kind="stable")
    held = np.asarray(values)[order] != 0
    return keys[order][held], np.asarray(values)[order][held]


def agree(found: Any, expected: Any) -> bool:
    """Return whether two results hold the same elements, up to the rounding of float32."""
    (a, x), (b, y) = entries(found), entries(expected)
    return len(a) == len(b) and bool((a == b).all()) and np.allclose(x, y, rtol=1e-3, atol=1e-4)


__all__ = ["CASES", "PEERS", "ExprCase", "agree", "entries"]
