# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices of any class in compressed rows, as programs that compute patterns read them."""

from __future__ import annotations

from typing import Any

import scipy.sparse as sp

from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import is_half, is_torch


def compressed_rows(value: Any) -> Any:
    """A sparse matrix in compressed rows: of torch if it is one, else of scipy.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> compressed_rows(sp.coo_array(([1.0, 2.0], ([1, 0], [0, 2])), shape=(2, 3))).indices.tolist()
    [2, 0]
    """
    if is_torch(value):
        return _torch_rows(value)
    if not sp.issparse(value) or (value.format != "csr" and is_half(value)):
        return SparseTensor.from_any(value, "csr").to_scipy("csr", copy=False)
    return value if value.format == "csr" else value.tocsr()


def _torch_rows(value: Any) -> Any:
    """torch makes rows neither of blocks nor of lists whose entries are dense."""
    layout = str(value.layout).removeprefix("torch.sparse_")
    if layout == "csr":
        return value
    has_numbers = layout == "csc" or (layout == "coo" and value.dense_dim() == 0)
    return value.to_sparse_csr() if has_numbers else SparseTensor.from_any(value, "csr").to_torch()


__all__ = ["compressed_rows"]
