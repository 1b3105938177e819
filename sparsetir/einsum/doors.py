# SPDX-License-Identifier: Apache-2.0
"""Front doors: calls whose operands are of known kinds go straight to the kernel of an earlier call.

`classify` reads each operand once. A door is kept for the kinds of the operands of an expression that is one kernel
with a dense result and takes the operands as they are; the kernel validates what differs between such calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import SparseTIRError
from sparsetir.formats.tensor import MIN_HYPERSPARSE, SparseTensor
from sparsetir.runtime.kernel import Kernel
from sparsetir.utils.caches import shared_cache

COMPRESSED = (sp.csr_array, sp.csc_array, sp.csr_matrix, sp.csc_matrix)
_IS_ONE = (1).__eq__  # whether a dimension may broadcast


class Door(NamedTuple):
    """A kernel, and the names of its arguments in the order of the operands."""

    kernel: Kernel
    names: tuple[str, ...]


doors = shared_cache("front doors", 256)


def classify(operands: Sequence[Any]) -> tuple[tuple[Any, ...], Sequence[Any]] | None:
    """Return the kinds of operands and what a kernel takes for them; None for operands that need conversion.

    A kind is class, dtype, dtype of the indices, and the order or, where dimensions have extent 1, which ones do.
    """
    kinds: list[Any] = []
    raw = operands
    for at, operand in enumerate(operands):
        value, kind = operand, type(operand)
        if kind is SparseTensor:
            value = operand.compressed
            raw = [*raw[:at], value, *raw[at + 1 :]]
            kind = type(value)
            kinds.append(SparseTensor)
        if kind is np.ndarray:
            shape = value.shape
            kinds.append(value.dtype)
        elif kind in COMPRESSED:
            indices, data = value.indices, value.data
            if type(data) is not np.ndarray or type(indices) is not np.ndarray:
                return None
            kinds += kind, data.dtype, indices.dtype
            shape = value.shape
            if max(shape) >= MIN_HYPERSPARSE:
                return None
        elif kind.__name__ == "Tensor" and kind.__module__ == "torch":
            torch_kind, shape = _kind_of_tensor(value), value.shape
            if torch_kind is None:
                return None
            kinds += torch_kind
        else:
            return None
        kinds.append(tuple(map(_IS_ONE, shape)) if 1 in shape else len(shape))
    return tuple(kinds), raw


def _kind_of_tensor(tensor: Any) -> tuple[Any, ...] | None:
    """Return dtype, layout and the dtype of the indices of a tensor; None if a kernel does not take it as it is."""
    pointers = _pointers(tensor.layout)
    if tensor.requires_grad or pointers is None or (pointers and max(tensor.shape) >= MIN_HYPERSPARSE):
        return None
    return tensor.dtype, tensor.layout, getattr(tensor, pointers)().dtype if pointers else None


@cache
def _pointers(layout: Any) -> str | None:
    """Return the method of a tensor with this layout that returns its pointers, "" if it is dense, None for lists."""
    by_rows, by_columns = dict.fromkeys(("csr", "bsr"), "crow_indices"), dict.fromkeys(("csc", "bsc"), "ccol_indices")
    known = {"torch.strided": ""} | {f"torch.sparse_{name}": pair for name, pair in (by_rows | by_columns).items()}
    return known.get(str(layout))


def product_door(A: Any, B: Any) -> Any:
    """Return the product of a sparse and a dense operand by the kernel of an earlier call, or None."""
    classified = classify((A, B))
    if classified is None:
        return None
    kinds, (left, right) = classified
    door = doors.get(kinds)
    if door is None:
        return None
    kernel, (first, second) = door
    try:
        return kernel(**{first: left, second: right})
    except SparseTIRError:  # the long way names the fault of operands that the kernel refuses
        return None


__all__ = ["Door", "classify", "doors", "product_door"]
