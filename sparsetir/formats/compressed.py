# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices of any class in compressed rows, as programs that compute patterns read them."""

from __future__ import annotations

from typing import Any

import scipy.sparse as sp

from sparsetir.formats.memory import check_memory
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import check_parts, check_sound, is_half, is_torch, open_source


def compressed_rows(value: Any, name: str = "a matrix") -> Any:
    """A sparse matrix in compressed rows: of torch if it is one, else of scipy.

    Raises
    ------
    StructureError
        When the index arrays of another format are broken: scipy and torch would write past their memory.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> compressed_rows(sp.coo_array(([1.0, 2.0], ([1, 0], [0, 2])), shape=(2, 3))).indices.tolist()
    [2, 0]
    """
    if sp.issparse(value) and value.format == "csr":
        check_parts(value, name)
        return value
    rows = int(value.shape[0])
    check_memory(8 * rows, f"{name}: pointers to the {rows} rows of shape {tuple(value.shape)}")
    if is_torch(value):
        return _torch_rows(value, name)
    if not sp.issparse(value) or is_half(value):
        return SparseTensor.from_any(value, "csr").to_scipy("csr", copy=False)
    check_sound(value, name)
    return value.tocsr()


def _torch_rows(value: Any, name: str) -> Any:
    """torch makes rows neither of blocks nor of lists whose entries are dense."""
    layout = str(value.layout).removeprefix("torch.sparse_")
    if layout == "csr":
        return value
    if layout == "csc" or (layout == "coo" and value.dense_dim() == 0):
        open_source(value, name).check(name)
        return value.to_sparse_csr()
    return SparseTensor.from_any(value, "csr").to_torch()


__all__ = ["compressed_rows"]
