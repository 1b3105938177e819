# SPDX-License-Identifier: Apache-2.0
"""Tensors handed to other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.interop import coordinates_of, is_half
from sparsetir.interop import to_torch as as_torch

if TYPE_CHECKING:
    from sparsetir.formats.tensor import SparseTensor

SCIPY = ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")
SHARED = ("bsr", "coo", "csc", "csr")


def to_scipy(tensor: SparseTensor, format: str | None, *, copy: bool) -> Any:
    """The tensor as a scipy.sparse array."""
    if format is not None and (not isinstance(format, str) or format not in SCIPY):
        raise ArgumentError(f"scipy has the formats {', '.join(SCIPY)}, found {format!r}")
    if tensor.ndim != 2:
        if format not in (None, "coo"):
            found = f"scipy stores {format} as a matrix, the tensor has {tensor.ndim} dimensions"
            raise ArgumentError(f"{found}: pass format='coo'")
        return _coordinates(tensor.coords, tensor.values, tensor.shape, copy)
    own = tensor.format.name
    if own in SHARED and format in (None, own) and not (own == "bsr" and _sticks_out(tensor)):
        return _same_layout(tensor, copy)
    if format == "bsr" and own == "bsr":
        shape, block = tensor.shape, tensor.format.parameters
        found = f"blocks of {block['r']} x {block['c']} do not divide {shape[0]} x {shape[1]}"
        raise ArgumentError(f"scipy wants blocks that divide the shape, but {found}: leave format out")
    if format in ("csc", "coo") and is_half(tensor):
        return _same_layout(tensor.convert(format), copy=False)
    if format == "coo" and own == "dcsr":  # which may have too many rows for pointers
        return _coordinates(tensor.coords, tensor.values, tensor.shape, copy)
    csr = tensor if own == "csr" else tensor.convert("csr")
    return _same_layout(csr, copy and own == "csr").asformat(format or "csr")


def _coordinates(coords: Iterable[Any], values: Any, shape: tuple[int, ...], copy: bool) -> Any:
    if is_half(values):
        return coordinates_of([c.copy() if copy else c for c in coords], values.copy() if copy else values, shape)
    return sp.coo_array((values, tuple(coords)), shape=shape, copy=copy)


def _sticks_out(tensor: SparseTensor) -> bool:
    block = tensor.format.parameters
    return bool(tensor.shape[0] % block["r"] or tensor.shape[1] % block["c"])


def _same_layout(tensor: SparseTensor, copy: bool) -> Any:
    piece, name = tensor.pieces[0], tensor.format.name
    if name == "coo":
        return _coordinates(piece.arrays.values(), piece.values, tensor.shape, copy)
    values = piece.values
    if name == "bsr":
        block = tensor.format.parameters
        values = values.reshape(-1, block["r"], block["c"])
    make = getattr(sp, f"{name}_array")
    return make((values, piece.arrays["indices"], piece.arrays["indptr"]), shape=tensor.shape, copy=copy)


def to_torch(tensor: SparseTensor) -> Any:
    """The tensor as a torch sparse tensor."""
    torch = importlib.import_module("torch")
    if tensor.ndim != 2 or tensor.format.name == "coo":
        coords = np.stack([c.astype(np.int64) for c in tensor.coords])
        values = as_torch(tensor.values.copy())
        return torch.sparse_coo_tensor(as_torch(coords), values, tensor.shape, is_coalesced=True)
    own = tensor.format.name
    is_same = own in ("csr", "csc") or (own == "bsr" and not _sticks_out(tensor))
    tensor = tensor if is_same else tensor.convert("csr")
    piece, name = tensor.pieces[0], tensor.format.name
    values = piece.values
    if name == "bsr":
        values = values.reshape(-1, tensor.format.parameters["r"], tensor.format.parameters["c"])
    indptr, indices, values = (as_torch(a.copy()) for a in (piece.arrays["indptr"], piece.arrays["indices"], values))
    layout = getattr(torch, f"sparse_{name}")
    return torch.sparse_compressed_tensor(indptr, indices, values, size=tensor.shape, layout=layout)


__all__ = ["to_scipy", "to_torch"]
