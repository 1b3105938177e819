# SPDX-License-Identifier: Apache-2.0
"""Sums and products of tensors, element by element: their rows are merged as those of matrices.

The dimensions after the first are numbered through as one, so that the program is that of two matrices whatever the
order of the tensors is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.call.pattern_results import write_coordinates
from sparsetir.errors import ArgumentError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import CooTensor, compressed_of
from sparsetir.notation.nest import Nest, Operand
from sparsetir.notation.operands import Layout, rows
from sparsetir.notation.steps import KernelStep

MOST_ROWS = 1 << 22  # above, a whole tensor is one row: its row pointers would be longer than most lists of entries
LARGEST = {"int32": 2**31 - 1, "int64": 2**63 - 1}


class FlatStep(KernelStep):
    """An elementwise step over sparse tensors of one or more than two dimensions.

    Parameters
    ----------
    members : tuple of int
    letters : sequence of str
        Those of the operands; the result has them in the order of `nest.output`, which is that of the tensors.
    output : str
    nest : Nest
        What is done with two matrices, or more.
    """

    def __init__(self, members: tuple[int, ...], letters: Sequence[str], output: str, nest: Nest) -> None:
        super().__init__(members, matrices(nest))
        self.letters, self.output = tuple(letters), output
        self.wide: KernelStep = self
        if nest.idtype != "int64":
            self.wide = KernelStep(members, replace(self.nest, idtype="int64"))

    def __call__(self, values: Sequence[Any]) -> Any:
        return self._merged([self.flat(at, value) for at, value in enumerate(values)], self.shape(values))

    def called(self, values: Sequence[Any]) -> tuple[KernelStep, dict[str, Any]]:
        flat = [self.flat(at, value) for at, value in enumerate(values)]
        return self._fitting_step(flat), self.arguments(flat)

    def apart(self) -> FlatStep:
        other = copy.copy(self)
        other.wide = other if self.wide is self else copy.copy(self.wide)
        return other

    def _fitting_step(self, flat: Sequence[Any]) -> KernelStep:
        """The step for the index type of matrices."""
        return self if flat[0].indices.dtype == np.int32 else self.wide

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        held = {at: self.flat(at, value) for at, value in fixed.items()}

        def call(values: Sequence[Any]) -> Any:
            flat = [held[at] if at in held else self.flat(at, value) for at, value in enumerate(values)]
            return self._merged(flat, self.shape(values))

        return call

    def shape(self, values: Sequence[Any]) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(values[0].shape[self.letters[0].index(c)] for c in self.output)

    def flat(self, at: int, value: Any) -> sp.csr_array:
        """An operand as a matrix."""
        dims = [self.letters[at].index(c) for c in self.output]
        tensor = value if isinstance(value, SparseTensor) else SparseTensor.from_any(value)
        return matrix(tensor, dims)

    def _merged(self, flat: Sequence[Any], shape: tuple[int, ...]) -> CooTensor:
        if any(m.shape != flat[0].shape for m in flat):
            raise ArgumentError(f"tensors that are joined element by element have one shape, found one of {shape}")
        return tensor(KernelStep.__call__(self._fitting_step(flat), flat), shape)


def matrices(nest: Nest) -> Nest:
    """The step over matrices by rows."""
    operand = Operand("ij", Layout(rows(2), nest.idtype))
    return replace(nest, operands=(operand,) * len(nest.operands), output="ij", assembled=True)


def first_numbered(shape: Sequence[int]) -> int:
    """The first dimension that is numbered through with those after it: 1, or 0 where the tensor is one row."""
    return int(len(shape) > 1 and (shape[0] <= MOST_ROWS or math.prod(shape) > LARGEST["int64"]))


def matrix(tensor: SparseTensor, dims: Sequence[int]) -> sp.csr_array:
    """The matrix that stands for a tensor with its dimensions in the order `dims`."""
    shape, coords, values = [tensor.shape[d] for d in dims], [tensor.coords[d] for d in dims], tensor.values
    first = first_numbered(shape)
    count, width = math.prod(shape[:first]), math.prod(shape[first:])
    if width > LARGEST["int64"]:
        raise ArgumentError(f"the elements of a tensor of shape {tuple(shape)} cannot be numbered in 64 bits")
    key = np.zeros(len(values), np.int64)
    for d in range(first, len(shape)):
        key = key * shape[d] + coords[d]
    if list(dims) != sorted(dims):
        by = np.lexsort((key, coords[0]))
        key, values = key[by], values[by]
    dtype = "int32" if max(width, len(key)) <= LARGEST["int32"] else "int64"
    counts = np.bincount(coords[0], minlength=count) if first else np.array([len(key)])
    starts = np.concatenate(([0], np.cumsum(counts))).astype(dtype)
    made: sp.csr_array = compressed_of(sp.csr_array, starts, key.astype(dtype, copy=False), values, (count, width))
    return made


def tensor(made: Any, shape: Sequence[int]) -> CooTensor:
    """The tensor that a matrix stands for."""
    first = first_numbered(shape)
    narrow = np.int32 if max(*shape, made.nnz, 0) <= LARGEST["int32"] else np.int64
    coords = np.empty((len(shape), made.nnz), narrow)
    if first:
        coords[0] = np.repeat(np.arange(shape[0], dtype=narrow), np.diff(made.indptr))
    write_coordinates(coords, made.indices, shape, first)
    return CooTensor(coords, made.data, tuple(shape))


__all__ = ["FlatStep"]
