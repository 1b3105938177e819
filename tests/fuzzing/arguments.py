# SPDX-License-Identifier: Apache-2.0
"""Arguments of every class, layout and fault, which can be made twice alike, aliases included."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir

try:
    import torch
except ImportError:  # the suite needs it only where it is tested
    torch = None  # type: ignore[assignment]

Memo = dict[int, np.ndarray]
SCIPY = ("csr_array", "csr_matrix", "csc_array", "bsr_array", "coo_array", "lil_array", "dia_array")
OWN = (
    "numpy",
    "memoryview",
    "torch",
    "csr_array",
    "csr_matrix",
    "csc_array",
    "bsr_array",
)  # hold the arrays themselves
TENSORS = {"SparseTensor": "csr", "SparseTensor of csc": "csc", "SparseTensor of coo": "coo"}
KINDS = (*("csr_array",) * 20, *SCIPY, "CooTensor", *TENSORS, "torch_csr", "torch_coo")


def clone(array: np.ndarray, memo: Memo) -> np.ndarray:
    """The same numbers in the same layout; views of one memory become views of one again."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if id(root) not in memo:
        memo[id(root)] = np.frombuffer(bytearray(root.tobytes("A")), np.uint8)
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    copy = np.ndarray(array.shape, array.dtype, memo[id(root)], start if array.size else 0, array.strides)
    copy.flags.writeable = array.flags.writeable
    return copy


@dataclass
class Item:
    """An argument, by the arrays that hold it.

    Parameters
    ----------
    kind : str
        What is made of the arrays.
    arrays : tuple of ndarray
    shape : tuple of int
        Of a sparse one.
    """

    kind: str
    arrays: tuple[np.ndarray, ...]
    shape: tuple[int, ...] = ()
    object: Any = field(init=False)

    def __post_init__(self) -> None:
        self.object = make(self.kind, self.arrays, self.shape)

    def twin(self, memo: Memo) -> Item:
        """The same argument in other memory."""
        return Item(self.kind, tuple(clone(a, memo) for a in self.arrays), self.shape)

    def state(self) -> tuple[bytes, ...]:
        """What its arrays hold."""
        return tuple(a.tobytes() for a in self.arrays)


def make(kind: str, arrays: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> Any:
    """An object that has these arrays."""
    if kind == "numpy":
        return arrays[0]
    if kind == "matrix":
        return arrays[0].view(np.matrix)
    if kind == "masked":
        return np.ma.masked_array(arrays[0], np.zeros(arrays[0].shape, np.bool_))
    if kind == "memoryview":
        return memoryview(arrays[0])
    if kind in ("torch", "torch_grad"):
        tensor = torch.from_numpy(arrays[0])
        return tensor.requires_grad_() if kind == "torch_grad" else tensor
    return make_sparse(kind, arrays, shape)


def make_sparse(kind: str, arrays: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> Any:
    """A sparse object that has these arrays, or is converted from them."""
    data, indptr, indices = arrays
    if kind in ("csr_array", "csr_matrix", "csc_array", "bsr_array"):
        made = getattr(sp, kind)(shape)
        made.data, made.indptr, made.indices = arrays
        return made
    rows = np.repeat(np.arange(shape[0]), np.diff(indptr))
    if kind in ("torch_csr", "torch_coo"):
        values = torch.from_numpy(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "torch_coo":
                where = torch.tensor(np.stack([rows, indices]))
                return torch.sparse_coo_tensor(where, values, shape, check_invariants=False)
            parts = (torch.tensor(a.astype(np.int64)) for a in (indptr, indices))
            return torch.sparse_csr_tensor(*parts, values, size=shape, check_invariants=False)
    if kind == "CooTensor":
        return sparsetir.CooTensor(np.stack([rows, indices]), data, shape)
    coo = sp.coo_array((data, (rows, indices)), shape=shape)
    if kind in TENSORS:
        return sparsetir.SparseTensor.from_any(coo.asformat(TENSORS[kind]))
    return coo if kind == "coo_array" else coo.asformat(kind.removesuffix("_array"))


# ------------------------------------------------------------------ dense


def dense(r: Random, shape: tuple[int, ...], dtype: str, others: list[Item]) -> Item:
    """A dense argument of about this shape: now and then of another one, of another dtype, or with another's memory."""
    fault = r.random()
    if fault < 0.04:
        shape = (*shape[:-1], shape[-1] + 1)
    elif fault < 0.06:
        shape = shape[1:]
    elif fault < 0.08:
        shape = (1, *shape)
    if r.random() < 0.04:
        dtype = r.choice(["float32", "float64", "int32"])
    kind = r.choice(["numpy"] * 12 + ["torch", "torch", "torch", "memoryview", "masked", "matrix", "torch_grad"])
    if kind == "torch_grad" and "float" not in dtype:
        kind = "torch"
    if (kind == "matrix" and len(shape) != 2) or (torch is None and kind.startswith("torch")):
        kind = "numpy"
    whole = [
        o.arrays[0] for o in others if o.kind in OWN and o.arrays[0].dtype == dtype and o.arrays[0].flags.c_contiguous
    ]
    if whole and r.random() < 0.1:
        flat = r.choice(whole).reshape(-1)
        count = int(np.prod(shape))
        if flat.size >= count:
            return Item("numpy", (flat[flat.size - count :].reshape(shape),))
    return Item(kind, (laid_out(r, numbers(r, shape, dtype), is_torch=kind.startswith("torch")),))


def numbers(r: Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small whole numbers: sums of them are the same in any order."""
    return np.random.default_rng(r.randrange(1 << 30)).integers(-4, 5, shape).astype(dtype)


def laid_out(r: Random, array: np.ndarray, *, is_torch: bool = False) -> np.ndarray:
    """The array in some layout, byte order and alignment, perhaps read-only."""
    way = r.choice(["as it is"] * 10 + ["columns", "strided", "swapped", "unaligned", "read-only"])
    if way == "columns":
        array = np.asfortranarray(array)
    elif way == "strided":
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        array = wide[..., 0]
    elif way == "swapped" and not is_torch:
        array = array.astype(array.dtype.newbyteorder())
    elif way == "unaligned" and not is_torch:
        memory = np.zeros(array.nbytes + 1, np.uint8)
        moved = memory[1:].view(array.dtype).reshape(array.shape)
        moved[...] = array
        array = moved
    elif way == "read-only" and not is_torch:
        array.flags.writeable = False
    return array


# ------------------------------------------------------------------ sparse


def sparse(
    r: Random, shape: tuple[int, int], dtype: str, idtype: str, block: int, others: list[Item], *, plain: bool = False
) -> Item:
    """A sparse argument: of few patterns with as many entries, of any class, sorted or not, broken now and then."""
    if r.random() < 0.03:
        shape = (shape[0] + block, shape[1])
    grid = (shape[0] // block, shape[1] // block)
    indptr, indices = pattern(r.randrange(4), grid)
    kind = "bsr_array" if block > 1 else "csr_array" if plain else r.choice(KINDS)
    if block == 1 and kind == "bsr_array":
        kind = "csr_array"
    if torch is None and kind.startswith("torch"):
        kind = "csr_array"
    if kind == "csc_array":
        indptr, indices = pattern(r.randrange(4), grid[::-1])
    like = [o for o in others if o.kind == kind and o.shape == shape and len(o.arrays) == 3]
    data = numbers(r, (indices.size, block, block) if kind == "bsr_array" else (indices.size,), dtype)
    if like and r.random() < 0.7:
        other = r.choice(like)
        _, indptr, indices = other.arrays if r.random() < 0.5 else (a.copy() for a in other.arrays)
        return Item(kind, (numbers(r, other.arrays[0].shape, dtype), indptr, indices), shape)
    indptr, indices = indptr.astype(idtype), indices.astype(idtype)
    if not plain:
        indices = disordered(r, indptr, indices)
    if kind in ("csr_array", "csr_matrix", "csc_array", "bsr_array"):
        if not plain:
            data, indptr, indices = odd(r, data), odd(r, indptr, is_index=True), odd(r, indices, is_index=True)
            data, indptr, indices = broken(r, data, indptr, indices)
        if r.random() < 0.03:
            data = data.astype(r.choice(["float64", "float32"]))
    return Item(kind, (data, indptr, indices), shape)


def pattern(number: int, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """One of few patterns of a size; all but the last have as many entries."""
    rows, columns = grid
    rng = np.random.default_rng(number)
    count = (rows * columns + 1) // 2 if number < 3 else 0
    flat = np.sort(rng.choice(rows * columns, count, replace=False)) if count else np.zeros(0, np.int64)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(flat // max(columns, 1), minlength=rows))])
    return indptr, flat % max(columns, 1)


def disordered(r: Random, indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The indices with a row reversed, or a coordinate twice, now and then."""
    rows = np.flatnonzero(np.diff(indptr) > 1)
    if not rows.size or r.random() < 0.75:
        return indices
    indices, row = indices.copy(), r.choice(rows.tolist())
    begin, end = int(indptr[row]), int(indptr[row + 1])
    if r.random() < 0.6:
        indices[begin:end] = indices[begin:end][::-1].copy()
    else:
        indices[begin + 1] = indices[begin]
    return indices


def odd(r: Random, array: np.ndarray, *, is_index: bool = False) -> np.ndarray:
    """The array in another layout or index type, now and then."""
    if r.random() < 0.85:
        return array
    if is_index and r.random() < 0.5:
        return array.astype(r.choice(["int64", "int32", "int16", "uint64", ">i4"]))
    return laid_out(r, array)


def broken(
    r: Random, data: np.ndarray, indptr: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a matrix with a fault, now and then."""
    fault = r.random()
    if fault > 0.1 or not indices.size:
        return data, indptr, indices
    if fault < 0.03:
        indices = indices.copy()
        indices[r.randrange(indices.size)] = r.choice([99, 7]) if indices.dtype.kind == "u" else r.choice([-1, 99])
    elif fault < 0.05:
        indptr = indptr.copy()
        indptr[r.randrange(indptr.size)] = r.choice([0, 99])
    elif fault < 0.07:
        data = data[:-1]
    elif fault < 0.09:
        data, indices = (np.concatenate([a, a[:1]]) for a in (data, indices))
    else:
        indptr = indptr[:-1]
    return data, indptr, indices


__all__ = ["OWN", "Item", "Memo", "clone", "dense", "numbers", "sparse"]
