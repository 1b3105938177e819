# SPDX-License-Identifier: Apache-2.0
"""The libraries we are measured against, behind one interface.

A peer is set up once, outside the time that counts (conversion, inspection, allocation of the output where the
library allows it), and gives a call without arguments that computes and returns the result. The array it
returns may be written again by the next call.

==========  ====  ====  =====  ======
peer        spmm  spmv  sddmm  mttkrp
==========  ====  ====  =====  ======
``scipy``   yes   yes   numpy  no
``torch``   yes   yes   yes    no
``mkl``     yes   yes   no     no
``numpy``   no    no    no     yes
==========  ====  ====  =====  ======

scipy has no SDDMM: what stands in its place gathers rows in numpy, as a scipy user would write it. No library here has
MTTKRP: it is timed against rows gathered and added up in numpy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop import CooTensor, array_of_numbers
from sparsetir.interop.sources import open_source
from sparsetir.utils.arguments import as_count, shown
from sparsetir.utils.packages import MissingPackageError, require
from sparsetir.workloads import mkl

Call = Callable[[], np.ndarray]
GATHERED_FLOATS = 1 << 20
MOST_THREADS = 1 << 12


def scipy_matmul(csr: Any, dense: np.ndarray) -> Call:
    """``csr @ dense`` for a matrix or a vector, by scipy."""
    return lambda: csr @ dense


def scipy_sddmm(csr: Any, X: np.ndarray, Y: np.ndarray) -> Call:
    """SDDMM by numpy: gather the rows of both operands, a bounded number of nonzeros at a time."""
    rows = np.repeat(np.arange(csr.shape[0]), np.diff(csr.indptr))
    step = max(1, GATHERED_FLOATS // max(1, X.shape[1]))
    out = np.empty_like(csr.data)

    def call() -> np.ndarray:
        for begin in range(0, csr.nnz, step):
            part = slice(begin, begin + step)
            np.einsum("pk,pk->p", X[rows[part]], Y[csr.indices[part]], out=out[part])
        return np.multiply(out, csr.data, out=out)

    return call


def numpy_mttkrp(tensor: Any, B: np.ndarray, C: np.ndarray) -> Call:
    """MTTKRP by numpy: multiply gathered rows and add up those of an output row, some entries at a time."""
    order = np.argsort(tensor.coords[0], kind="stable")
    (i, j, k), values = tensor.coords[:, order], tensor.values[order, None]
    step = max(1, GATHERED_FLOATS // max(1, B.shape[1]))
    parts = [slice(begin, begin + step) for begin in range(0, values.size, step)]
    starts = [np.flatnonzero(np.diff(i[part], prepend=-1)) for part in parts]
    out = np.zeros((tensor.shape[0], B.shape[1]), values.dtype)

    def call() -> np.ndarray:
        out.fill(0)
        for part, start in zip(parts, starts, strict=True):
            product = B[j[part]]
            product *= C[k[part]]
            product *= values[part]
            out[i[part][start]] += np.add.reduceat(product, start, axis=0)
        return out

    return call


def torch_module() -> Any:
    """Return the torch module, imported on first use because it is large."""
    return require("torch", extra="bench", purpose="the torch peer")


def torch_csr(csr: Any) -> Any:
    """Return `csr` as a torch CSR tensor that shares its arrays."""
    torch = torch_module()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CSR.*beta.*")
        warnings.filterwarnings("ignore", message=".*[Ii]nvariant checks.*")
        parts = (torch.from_numpy(part) for part in (csr.indptr, csr.indices, csr.data))
        return torch.sparse_csr_tensor(*parts, size=csr.shape, check_invariants=False)


def torch_spmm(csr: Any, dense: np.ndarray) -> Call:
    """``torch.mm`` of a CSR tensor, into one tensor that is reused."""
    torch, matrix = torch_module(), torch_csr(csr)
    operand = torch.from_numpy(dense)
    out = torch.zeros((csr.shape[0], dense.shape[1]), dtype=operand.dtype)
    return lambda: torch.mm(matrix, operand, out=out).numpy()


def torch_spmv(csr: Any, dense: np.ndarray) -> Call:
    """``matrix @ vector`` of a CSR tensor."""
    torch, matrix = torch_module(), torch_csr(csr)
    operand = torch.from_numpy(dense)
    return lambda: (matrix @ operand).numpy()


def torch_sddmm(csr: Any, X: np.ndarray, Y: np.ndarray) -> Call:
    """``torch.sparse.sampled_addmm``, then the product with the values that it leaves out."""
    torch, matrix = torch_module(), torch_csr(csr)
    sampled = torch.sparse.sampled_addmm
    left, right, values = torch.from_numpy(X), torch.from_numpy(Y).t(), torch.from_numpy(csr.data)
    out = sampled(matrix, left, right, beta=0.0)
    return lambda: sampled(matrix, left, right, beta=0.0, out=out).values().mul_(values).numpy()


def mkl_spmm(csr: Any, dense: np.ndarray) -> Call:
    """``mkl_sparse_?_mm``, inspected for as many columns as `dense` has."""
    return mkl.MKLMatrix(csr).mm(dense)


def mkl_spmv(csr: Any, dense: np.ndarray) -> Call:
    """``mkl_sparse_?_mv``, inspected for many calls."""
    return mkl.MKLMatrix(csr).mv(dense)


PEERS = ("scipy", "torch", "mkl")
SETUPS: dict[str, dict[str, Callable[..., Call]]] = {
    "spmm": {"scipy": scipy_matmul, "torch": torch_spmm, "mkl": mkl_spmm},
    "spmv": {"scipy": scipy_matmul, "torch": torch_spmv, "mkl": mkl_spmv},
    "sddmm": {"scipy": scipy_sddmm, "torch": torch_sddmm},
    "mttkrp": {"numpy": numpy_mttkrp},
}


@lru_cache(maxsize=1)
def missing() -> dict[str, str]:
    """Return the peers that cannot be used here, each with the reason and what to install."""
    reasons: dict[str, str] = {}
    if find_spec("torch") is None:
        reasons["torch"] = "torch is not installed; try: pip install 'sparsetir[bench]'"
    try:
        mkl.library()
    except MissingPackageError as error:
        reasons["mkl"] = str(error)
    return reasons


def available(op: str | None = None) -> list[str]:
    """Return the names of the installed peers, of those that have `op` if it is given."""
    names = PEERS if op is None else tuple(setups(op))
    return [peer for peer in names if peer not in missing()]


def set_threads(count: int) -> None:
    """Let every installed peer use `count` threads. scipy's sparse products always use one."""
    count, peers = as_count(count, "count", most=MOST_THREADS), available()
    if "torch" in peers:
        torch_module().set_num_threads(count)
    if "mkl" in peers:
        mkl.set_threads(count)


def setups(op: str) -> dict[str, Callable[..., Call]]:
    """Return the peers that have `op`."""
    if not isinstance(op, str) or op not in SETUPS:
        raise ArgumentError(f"peers are timed on {', '.join(SETUPS)}, got {shown(op)}")
    return SETUPS[op]


def setup(op: str, peer: str) -> Callable[..., Call]:
    """Return the function that sets up `op` for `peer`."""
    by_peer = setups(op)
    if not isinstance(peer, str) or peer not in by_peer:
        raise ArgumentError(f"{op} is timed against {', '.join(by_peer)}, got {shown(peer)}")
    if peer in missing():
        raise MissingPackageError(missing()[peer])
    return by_peer[peer]


def checked_csr(csr: Any) -> Any:
    """`csr` if it is what every peer accepts."""
    if not sp.issparse(csr) or csr.format != "csr":
        raise ArgumentTypeError(f"peers take a scipy.sparse CSR array, got {type(csr).__name__}; try A.tocsr()")
    # The libraries follow whatever the arrays hold.
    open_source(csr, "the matrix").check("the matrix")
    if csr.data.dtype.kind not in "fc" or len(csr.data) != len(csr.indices):
        described = f"{len(csr.data)} values of {csr.data.dtype} and {len(csr.indices)} indices"
        raise ArgumentTypeError(f"peers take a matrix of floats, one for each index, got {described}; try A.astype")
    return csr


def checked_dense(name: str, value: np.ndarray, *, shape: tuple[int | None, ...], dtype: np.dtype) -> np.ndarray:
    """`value` as a C-contiguous array, if it has `dtype` and `shape` (None is any extent)."""
    array = np.ascontiguousarray(array_of_numbers(value, name))
    fits = len(shape) == array.ndim and all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    if not fits:
        expected = " x ".join("any" if extent is None else str(extent) for extent in shape)
        raise ArgumentError(f"{name} must have shape {expected}, got {array.shape}")
    if array.dtype != dtype:
        raise ArgumentTypeError(f"{name} must have the matrix's dtype {dtype}, got {array.dtype}")
    return array


def spmm(peer: str, csr: Any, B: np.ndarray) -> Call:
    """Set up ``C = csr @ B`` by `peer`.

    Parameters
    ----------
    peer : str
        One of ``available("spmm")``.
    csr : scipy.sparse.csr_array, shape (m, n)
    B : numpy.ndarray, shape (n, k)
        Of the matrix's dtype; copied once if it is not C-contiguous.

    Returns
    -------
    callable
        Computes and returns C, shape (m, k).

    Examples
    --------
    >>> A = sp.csr_array(np.eye(3, dtype="float32"))
    >>> spmm("scipy", A, np.ones((3, 2), dtype="float32"))().sum()
    np.float32(6.0)
    """
    prepare, matrix = setup("spmm", peer), checked_csr(csr)
    return prepare(matrix, checked_dense("B", B, shape=(matrix.shape[1], None), dtype=matrix.dtype))


def spmv(peer: str, csr: Any, x: np.ndarray) -> Call:
    """Set up ``y = csr @ x`` for a vector `x` of shape (n,) by `peer`; the call returns y, shape (m,)."""
    prepare, matrix = setup("spmv", peer), checked_csr(csr)
    return prepare(matrix, checked_dense("x", x, shape=(matrix.shape[1],), dtype=matrix.dtype))


def sddmm(peer: str, csr: Any, X: np.ndarray, Y: np.ndarray) -> Call:
    """Set up ``O[i, j] = csr[i, j] * dot(X[i], Y[j])`` on the stored entries of `csr` by `peer`.

    Parameters
    ----------
    peer : str
        One of ``available("sddmm")``.
    csr : scipy.sparse.csr_array, shape (m, n)
    X, Y : numpy.ndarray, shapes (m, k) and (n, k)
        Of the matrix's dtype.

    Returns
    -------
    callable
        Computes and returns the values of O, shape (nnz,), in the order of ``csr.data``.
    """
    prepare, matrix = setup("sddmm", peer), checked_csr(csr)
    left = checked_dense("X", X, shape=(matrix.shape[0], None), dtype=matrix.dtype)
    return prepare(matrix, left, checked_dense("Y", Y, shape=(matrix.shape[1], left.shape[1]), dtype=matrix.dtype))


def mttkrp(peer: str, tensor: Any, B: np.ndarray, C: np.ndarray) -> Call:
    """Set up ``D[i, r] = sum_jk tensor[i, j, k] * B[j, r] * C[k, r]`` by `peer`.

    Parameters
    ----------
    peer : str
        One of ``available("mttkrp")``.
    tensor : CooTensor, shape (n_i, n_j, n_k)
    B, C : numpy.ndarray, shapes (n_j, r) and (n_k, r)
        Of the tensor's dtype.

    Returns
    -------
    callable
        Computes and returns D, shape (n_i, r).
    """
    prepare = setup("mttkrp", peer)
    if not isinstance(tensor, CooTensor):
        raise ArgumentTypeError(f"tensor: expected a CooTensor, got {shown(tensor)}. Make one of its coordinates.")
    dtype = tensor.values.dtype
    if len(tensor.shape) != 3:
        raise ArgumentError(f"mttkrp takes a tensor of 3 dimensions, got {len(tensor.shape)}")
    left = checked_dense("B", B, shape=(tensor.shape[1], None), dtype=dtype)
    return prepare(tensor, left, checked_dense("C", C, shape=(tensor.shape[2], left.shape[1]), dtype=dtype))
