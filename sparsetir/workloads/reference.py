# SPDX-License-Identifier: Apache-2.0
"""Reference products by scipy and numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm_ffi
from tvm import tirx

from sparsetir import ops
from sparsetir.errors import SparseTIRError
from sparsetir.interop import CooTensor
from sparsetir.ir.views import decode
from sparsetir.workloads.inputs import Case

# What the ready programs compute, by scipy and numpy, a part at a time so that large results fit into memory.
#
# Each generator takes the operands in the order of the formula and computes in their types. The sums over absolute
# values by which rounding errors are judged are those of the operands' absolute values.


# Numbers in an intermediate array.
PART = 1 << 22
# Columns of a dense operand at a time.
COLUMNS = 32
# Rounding errors, relative to the sum of magnitudes.
TOLERANCE = 1e-5

Part = tuple[Any, np.ndarray]


class WrongResultError(SparseTIRError, ArithmeticError):
    """A result is not the reference's."""


def spmm_parts(A: Any, B: np.ndarray) -> Iterator[Part]:
    """Yield ``A @ B``, some columns at a time."""
    for first in range(0, B.shape[1], COLUMNS):
        part = np.s_[:, first : first + COLUMNS]
        yield part, A @ B[part]


def spmv_parts(A: Any, x: np.ndarray) -> Iterator[Part]:
    """Yield ``A @ x`` at once."""
    yield np.s_[:], A @ x


def sddmm_parts(S: Any, X: np.ndarray, Y: np.ndarray) -> Iterator[Part]:
    """``S * (X @ Y.T)`` at the entries of S, some of them at a time."""
    rows = np.repeat(np.arange(S.shape[0]), np.diff(S.indptr))
    step = max(1, PART // max(1, X.shape[1]))
    for first in range(0, S.nnz, step):
        part = np.s_[first : first + step]
        left = X[rows[part]].astype(S.data.dtype)
        yield part, S.data[part] * np.einsum("pk,pk->p", left, Y[S.indices[part]])


def mttkrp_parts(tensor: CooTensor, B: np.ndarray, C: np.ndarray) -> Iterator[Part]:
    """Yield the tensor, unfolded, times the Khatri-Rao product of B and C, some columns at a time."""
    i, j, k = tensor.coords
    unfolded = sp.csr_array((tensor.values, (i, np.arange(i.size))), shape=(tensor.shape[0], i.size))
    step = max(1, PART // max(1, i.size))
    for first in range(0, B.shape[1], step):
        part = np.s_[:, first : first + step]
        yield part, unfolded @ (B[part][j].astype(tensor.values.dtype) * C[part][k])


# ------------------------------------------------------------------------------------------ ready programs


@dataclass(frozen=True)
class KnownOp:
    """A ready program.

    Parameters
    ----------
    name : str
    operands : tuple of str
        The arguments in the order of the formula, the sparse one first.
    parts : callable
        Of the operands: slices of the result with their elements.
    flops : callable
        Floating-point operations for sizes by name.
    """

    name: str
    operands: tuple[str, ...]
    parts: Callable[..., Iterator[Part]]
    flops: Callable[[Mapping[str, int]], int]

    def given(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Return the operands among named arguments; a buffer cannot be called T in a script."""
        return [inputs.get(name, inputs.get(f"{name}_")) for name in self.operands]

    def compute(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        """Return the result's elements in order; None if the arguments are not of classes that scipy takes."""
        sparse, *dense = self.given(inputs)
        if not all(isinstance(operand, np.ndarray) for operand in dense) or not _is_known(self.name, sparse):
            return None
        sparse = sparse.tocsr() if sp.issparse(sparse) else sparse
        if self.name == "spmm":
            dense = [dense[0].reshape(sparse.shape[1], -1)]
        out = np.empty(_shape(self.name, sparse, dense), dense[0].dtype)
        for part, values in self.parts(sparse, *dense):
            out[part] = values
        return out.reshape(-1)


def _is_known(op: str, sparse: Any) -> bool:
    if op == "mttkrp":
        return isinstance(sparse, CooTensor)
    if op == "sddmm":  # its result has the entries as they are stored
        return sp.issparse(sparse) and sparse.format == "csr" and bool(sparse.has_canonical_format)
    return bool(sp.issparse(sparse))


def _shape(op: str, sparse: Any, dense: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return the shape of a result."""
    return (sparse.nnz,) if op == "sddmm" else (sparse.shape[0], *dense[0].shape[1:])


def _stored(sizes: Mapping[str, int]) -> int:
    return sizes["nnz"] if "nnz" in sizes else sizes.get("m", 0) * sizes.get("width", 0)


KNOWN = {
    op.name: op
    for op in (
        KnownOp("spmm", ("A", "B"), spmm_parts, lambda s: 2 * _stored(s) * s["feat"]),
        KnownOp("spmv", ("A", "x"), spmv_parts, lambda s: 2 * s["nnz"]),
        KnownOp("sddmm", ("S", "X", "Y"), sddmm_parts, lambda s: (2 * s["feat"] + 1) * s["nnz"]),
        KnownOp("mttkrp", ("T", "B", "C"), mttkrp_parts, lambda s: 3 * s["rank"] * s["nnz"]),
    )
}


def recognise(func: tirx.PrimFunc) -> KnownOp | None:
    """Return the ready program that `func` is, whatever its variables are called."""
    name = str(func.attrs["global_symbol"])
    op_name, _, layout = name.partition("_")
    if op_name not in KNOWN:
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
    return KNOWN[op_name] if same else None


def _block_op(func: tirx.PrimFunc, sparse: Any) -> KnownOp | None:
    edge = sparse.axes[-1].length
    if len(sparse.axes) != 4 or not isinstance(edge, tirx.IntImm):
        return None
    ready = ops.spmm(sparse.dtype, "bsr", idtype=sparse.axes[0].idtype, block=int(edge))
    if not tvm_ffi.structural_equal(func, ready.with_attr("global_symbol", str(func.attrs["global_symbol"]))):
        return None
    cells = int(edge) ** 2
    return replace(KNOWN["spmm"], flops=lambda s: 2 * cells * s["nnzb"] * s["feat"])


# ----------------------------------------------------------------------------------------------- checking


def check(name: str, call: Callable[[], np.ndarray], case: Case) -> None:
    """Compare the result of a call with the reference in float64.

    Parameters
    ----------
    name : str
        What is said to be wrong.
    call : callable
        Computes and returns the result; for sddmm the values of O in the order of S.
    case : Case

    Raises
    ------
    WrongResultError
        With the first element that differs by more than rounding.
    """
    result, parts = call(), KNOWN[case.op].parts
    sparse, *dense = case.inputs.values()
    exact = _as_float64(sparse)
    magnitudes = parts(_absolute(exact), *(np.abs(operand) for operand in dense))
    for (part, expected), (_, magnitude) in zip(parts(exact, *dense), magnitudes, strict=True):
        differing = differs(result[part], expected, TOLERANCE * magnitude)
        if differing.any():
            at = np.unravel_index(int(differing.argmax()), differing.shape)
            values = f"expected {expected[at]:.7g}, got {result[part][at]:.7g}"
            raise WrongResultError(f"{name}: our result differs from the reference: {values}; please report this")


def _as_float64(sparse: Any) -> Any:
    if isinstance(sparse, CooTensor):
        return sparse.with_values(sparse.values.astype(np.float64))
    return sp.csr_array(sparse, dtype=np.float64)


def _absolute(sparse: Any) -> Any:
    return sparse.with_values(np.abs(sparse.values)) if isinstance(sparse, CooTensor) else abs(sparse)


# What a candidate must compute.
#
# The untuned kernel's result is the reference; for the ready programs of `sparsetir.ops` it is itself compared with
# scipy first (`sparsetir.workloads.reference`). Sums may be added up in any order, so floating-point results may
# differ by rounding, relative to the sum of the terms' absolute values.


BLOCK = 1 << 18
ROUNDINGS = 256
LARGEST_TOLERANCE = 0.05


def tolerance(dtype: np.dtype[Any]) -> float:
    """Return the allowed difference relative to the sum of the terms' absolute values; 0 for integers."""
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

    def disagreement(self, results: Mapping[str, np.ndarray]) -> str | None:
        """Return where a result is wrong, in words; None if it is right."""
        for name, expected in self.expected.items():
            flat, flat_expected, allowed = (a.reshape(-1) for a in (results[name], expected, self.allowed[name]))
            for start in range(0, flat.size, BLOCK):
                part = slice(start, start + BLOCK)
                differing = differs(flat[part], flat_expected[part], allowed[part])
                if differing.any():
                    at = start + int(differing.argmax())
                    place = tuple(int(n) for n in np.unravel_index(at, expected.shape))
                    return f"{name}{list(place)} is {flat[at]}, expected {flat_expected[at]}"
        return None


def allowance(expected: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Return the largest difference to be blamed on rounding, element by element."""
    if expected.dtype.kind in "iub":
        return np.zeros_like(expected)
    return np.maximum(np.abs(expected), magnitude) * np.asarray(tolerance(expected.dtype), expected.dtype)


def differs(result: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Which elements are wrong. Where the expected value is not finite anything that is not finite is right."""
    if expected.dtype.kind in "iub":
        return result != expected
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(result - expected) <= allowed
    if near.all():
        return np.zeros_like(near)
    return ~(near | (~np.isfinite(expected) & ~np.isfinite(result)))


__all__ = ["KNOWN", "KnownOp", "WrongResultError", "check", "recognise"]
