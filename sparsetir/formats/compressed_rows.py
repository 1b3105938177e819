# SPDX-License-Identifier: Apache-2.0
"""Operands as programs read them: matrices in compressed rows, and entries with the same coordinates added up."""

from __future__ import annotations

from typing import Any

import scipy.sparse as sp

from sparsetir.formats.origin import open_origin
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import check_parts, check_sound, in_format, is_half, is_torch, open_source
from sparsetir.utils.memory import check_memory

MATRICES = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "coo": sp.coo_matrix, "bsr": sp.bsr_matrix}


def compressed_rows(value: Any, name: str = "a matrix") -> Any:
    """Convert a sparse matrix to compressed rows: of torch if it is a torch tensor, else of scipy.

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
    """Convert a torch tensor to rows; torch itself converts neither blocks nor lists with dense entries."""
    layout = str(value.layout).removeprefix("torch.sparse_")
    if layout == "csr":
        return value
    if layout == "csc" or (layout == "coo" and value.dense_dim() == 0):
        open_source(value, name).check(name)
        return value.to_sparse_csr()
    return SparseTensor.from_any(value, "csr").to_torch()


def add_duplicates(value: Any) -> Any:
    """Add entries with the same coordinates up, in the operand's own dtype; the class stays.

    A cast must come after this sum: in another dtype, bools are counted and integers overflow elsewhere.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> A = sp.csr_array((np.array([100, 100], "int8"), np.array([0, 0]), np.array([0, 2])), shape=(1, 1))
    >>> add_duplicates(A).data.tolist()
    [-56]
    """
    if isinstance(value, SparseTensor):
        return value
    origin = open_origin(value, check=True)
    if origin.is_ordered or origin.entries.nnz == origin.source.values.size:
        return value
    return _of_class(SparseTensor.from_any(value), value)


def _of_class(tensor: SparseTensor, value: Any) -> Any:
    """Convert a tensor to the class and, as far as it is one of a matrix, the format of another operand."""
    if is_torch(value):
        layout = str(value.layout).removeprefix("torch.sparse_")
        return tensor.convert(layout if layout in ("csr", "csc") else "coo").to_torch()
    if not sp.issparse(value):
        return tensor.to_coo()
    if value.format == "bsr":
        converted = in_format(tensor.to_scipy("csr"), "bsr", value.blocksize)
    else:
        converted = tensor.to_scipy(value.format if value.format in ("csr", "csc") else "coo")
    return converted if isinstance(value, sp.sparray) else MATRICES[converted.format](converted)


__all__ = ["add_duplicates", "compressed_rows"]
