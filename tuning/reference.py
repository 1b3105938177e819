# SPDX-License-Identifier: Apache-2.0
"""What a candidate must compute.

The untuned kernel's result is the reference; for the ready programs of `sparsetir.ops` it is itself compared with
scipy first. Sums may be added up in any order, so floating-point results may differ by rounding, relative to the
sum of the terms' absolute values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm_ffi
from tvm import tirx

from sparsetir import ops
from sparsetir.errors import SparseTIRError
from sparsetir.interop import CooTensor
from sparsetir.ir import decode

BLOCK = 1 << 18
ROUNDINGS = 256
LARGEST_TOLERANCE = 0.05


def tolerance(dtype: np.dtype[Any]) -> float:
    """Allowed difference relative to the sum of the terms' absolute values; 0 for integers."""
    if dtype.kind in "iub":
        return 0.0
    epsilon = 2.0**-8 if dtype.kind == "V" or dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
    return min(ROUNDINGS * epsilon, LARGEST_TOLERANCE)


class Reference:
    """Expected arrays and how far a result may be from them.

    Parameters
    ----------
    expected : mapping of str to ndarray
        By parameter name.
    magnitudes : mapping of str to ndarray
        The same sums over absolute values.
    """

    def __init__(self, expected: Mapping[str, np.ndarray], magnitudes: Mapping[str, np.ndarray]) -> None:
        self.expected = {name: array.copy() for name, array in expected.items()}
        self.allowed = {name: allowance(array, magnitudes[name]) for name, array in self.expected.items()}

    def disagreement(self, found: Mapping[str, np.ndarray]) -> str | None:
        """Where a result is wrong, in words; None if it is right."""
        for name, expected in self.expected.items():
            flat, wanted, allowed = (a.reshape(-1) for a in (found[name], expected, self.allowed[name]))
            for start in range(0, flat.size, BLOCK):
                part = slice(start, start + BLOCK)
                wrong = differs(flat[part], wanted[part], allowed[part])
                if wrong.any():
                    at = start + int(wrong.argmax())
                    place = tuple(int(n) for n in np.unravel_index(at, expected.shape))
                    return f"{name}{list(place)} is {flat[at]}, expected {wanted[at]}"
        return None


def allowance(expected: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """The largest difference to be blamed on rounding, element by element."""
    if expected.dtype.kind in "iub":
        return np.zeros_like(expected)
    return np.maximum(np.abs(expected), magnitude) * np.asarray(tolerance(expected.dtype), expected.dtype)


def differs(found: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Which elements are wrong. Where the expected value is not finite anything that is not finite is right."""
    if expected.dtype.kind in "iub":
        return found != expected
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(found - expected) <= allowed
    if near.all():
        return np.zeros_like(near)
    return ~(near | (~np.isfinite(expected) & ~np.isfinite(found)))


# ------------------------------------------------------------------------------------------ ready programs


@dataclass(frozen=True)
class KnownOp:
    """A ready program: how to compute it with scipy, and its floating-point operations.

    ``operands`` are the arguments in the order of the formula. ``compute`` takes the named arguments and returns the
    output's elements in order, or None if the arguments are not of classes that scipy takes.
    """

    name: str
    operands: tuple[str, ...]
    compute: Callable[[Mapping[str, Any]], np.ndarray | None]
    flops: Callable[[Mapping[str, int]], int]


def _spmm(inputs: Mapping[str, Any]) -> np.ndarray | None:
    A: Any = inputs.get("A")
    B = inputs.get("B")
    if not sp.issparse(A) or not isinstance(B, np.ndarray):
        return None
    return np.asarray(A.tocsr() @ B.reshape(A.shape[1], -1)).reshape(-1)


def _spmv(inputs: Mapping[str, Any]) -> np.ndarray | None:
    A: Any = inputs.get("A")
    x = inputs.get("x")
    if not sp.issparse(A) or not isinstance(x, np.ndarray):
        return None
    return np.asarray(A.tocsr() @ x).reshape(-1)


def _sddmm(inputs: Mapping[str, Any]) -> np.ndarray | None:
    S: Any = inputs.get("S")
    X, Y = inputs.get("X"), inputs.get("Y")
    if not sp.issparse(S) or S.format != "csr" or not S.has_canonical_format:
        return None
    if not isinstance(X, np.ndarray) or not isinstance(Y, np.ndarray):
        return None
    rows, out = np.repeat(np.arange(S.shape[0]), np.diff(S.indptr)), np.empty_like(S.data)
    step = max(1, BLOCK // max(1, X.shape[1]))
    for start in range(0, S.nnz, step):
        part = slice(start, start + step)
        out[part] = S.data[part] * np.einsum("pk,pk->p", X[rows[part]], Y[S.indices[part]])
    return out


def _mttkrp(inputs: Mapping[str, Any]) -> np.ndarray | None:
    tensor, B, C = (inputs.get(name) for name in "TBC")
    tensor = inputs.get("T_", tensor)
    if not isinstance(tensor, CooTensor) or not isinstance(B, np.ndarray) or not isinstance(C, np.ndarray):
        return None
    out = np.zeros((tensor.shape[0], B.shape[1]), B.dtype)
    step = max(1, BLOCK // max(1, B.shape[1]))
    for start in range(0, tensor.nnz, step):
        i, j, k = tensor.coords[:, start : start + step]
        values = tensor.values[start : start + step]
        rows = sp.csr_array((values, (i, np.arange(len(i)))), shape=(out.shape[0], len(i)))
        out += rows @ (B[j] * C[k])
    return out.reshape(-1)


def _stored(sizes: Mapping[str, int]) -> int:
    return sizes["nnz"] if "nnz" in sizes else sizes.get("m", 0) * sizes.get("width", 0)


OPS = {
    "spmm": (("A", "B"), _spmm, lambda s: 2 * _stored(s) * s["feat"]),
    "spmv": (("A", "x"), _spmv, lambda s: 2 * s["nnz"]),
    "sddmm": (("S", "X", "Y"), _sddmm, lambda s: (2 * s["feat"] + 1) * s["nnz"]),
    "mttkrp": (("T", "B", "C"), _mttkrp, lambda s: 3 * s["rank"] * s["nnz"]),
}


def recognise(func: tirx.PrimFunc) -> KnownOp | None:
    """The ready program that `func` is, whatever its variables are called."""
    name = str(func.attrs["global_symbol"])
    op_name, _, layout = name.partition("_")
    if op_name not in OPS:
        return None
    program = decode(func)
    sparse = next((b for b in program.buffers.values() if not b.is_dense), None)
    if sparse is None:
        return None
    kwargs = {"format": layout} if layout else {}
    if layout == "bsr":
        return _block_op(func, sparse)
    try:
        ready = getattr(ops, op_name)(sparse.dtype, idtype=sparse.axes[0].idtype, **kwargs)
    except SparseTIRError:
        return None
    same = tvm_ffi.structural_equal(func, ready.with_attr("global_symbol", name))
    return KnownOp(op_name, *OPS[op_name]) if same else None


def _block_op(func: tirx.PrimFunc, sparse: Any) -> KnownOp | None:
    edge = sparse.axes[-1].length
    if len(sparse.axes) != 4 or not isinstance(edge, tirx.IntImm):
        return None
    ready = ops.spmm(sparse.dtype, "bsr", idtype=sparse.axes[0].idtype, block=int(edge))
    if not tvm_ffi.structural_equal(func, ready.with_attr("global_symbol", str(func.attrs["global_symbol"]))):
        return None
    cells = int(edge) ** 2
    return KnownOp("spmm", ("A", "B"), _spmm, lambda s: 2 * cells * s["nnzb"] * s["feat"])
