# SPDX-License-Identifier: Apache-2.0
"""Elementwise sums and products of sparse tensors, and products under a mask."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir import interop, ops
from sparsetir.einsum.emit import Nest, Operand
from sparsetir.einsum.operands import Layout, rows
from sparsetir.einsum.steps import KernelStep, Step
from sparsetir.errors import ArgumentError
from sparsetir.formats.compressed_rows import compressed_rows
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import CooTensor, compressed_of
from sparsetir.sparse_output import Options
from sparsetir.sparse_output.blocks import assembled_kernel
from sparsetir.sparse_output.kernel import AssembledKernel
from sparsetir.sparse_output.result import write_coordinates
from sparsetir.utils.arguments import dtype_name

# Elementwise sums and products of tensors: their rows are merged as those of matrices.
#
# The dimensions after the first are flattened to one, so that the program is that of two matrices, whatever the order
# of the tensors is.


MOST_ROWS = 1 << 22  # above, a whole tensor is one row: its row pointers would be longer than most lists of entries
LARGEST = {"int32": 2**31 - 1, "int64": 2**63 - 1}


class FlatStep(KernelStep):
    """Elementwise step over sparse tensors of one dimension or of more than two.

    Parameters
    ----------
    members : tuple of int
    letters : sequence of str
        Letters of the operands; the result has them in the order of `nest.output`, which is that of the tensors.
    output : str
    nest : Nest
        The operation on two or more matrices.
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
        copied = copy.copy(self)
        copied.wide = copied if self.wide is self else copy.copy(self.wide)
        return copied

    def _fitting_step(self, flat: Sequence[Any]) -> KernelStep:
        """Return the step for the index type of the matrices."""
        return self if flat[0].indices.dtype == np.int32 else self.wide

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        fixed_flat = {at: self.flat(at, value) for at, value in fixed.items()}

        def call(values: Sequence[Any]) -> Any:
            flat = [fixed_flat[at] if at in fixed_flat else self.flat(at, value) for at, value in enumerate(values)]
            return self._merged(flat, self.shape(values))

        return call

    def shape(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the shape of the result."""
        return tuple(values[0].shape[self.letters[0].index(c)] for c in self.output)

    def flat(self, at: int, value: Any) -> sp.csr_array:
        """Convert an operand to a matrix."""
        dims = [self.letters[at].index(c) for c in self.output]
        tensor = value if isinstance(value, SparseTensor) else SparseTensor.from_any(value)
        return matrix(tensor, dims)

    def _merged(self, flat: Sequence[Any], shape: tuple[int, ...]) -> CooTensor:
        if any(m.shape != flat[0].shape for m in flat):
            raise ArgumentError(f"tensors that are joined element by element have one shape, found one of {shape}")
        return tensor(KernelStep.__call__(self._fitting_step(flat), flat), shape)


def matrices(nest: Nest) -> Nest:
    """Return the step over matrices by rows."""
    operand = Operand("ij", Layout(rows(2), nest.idtype))
    return replace(nest, operands=(operand,) * len(nest.operands), output="ij", assembled=True)


def first_numbered(shape: Sequence[int]) -> int:
    """Return the first flattened dimension: 1, or 0 if the tensor becomes one row."""
    return int(len(shape) > 1 and (shape[0] <= MOST_ROWS or math.prod(shape) > LARGEST["int64"]))


def matrix(tensor: SparseTensor, dims: Sequence[int]) -> sp.csr_array:
    """Flatten a tensor to a matrix, with its dimensions in the order `dims`."""
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
    csr: sp.csr_array = compressed_of(sp.csr_array, starts, key.astype(dtype, copy=False), values, (count, width))
    return csr


def tensor(csr: Any, shape: Sequence[int]) -> CooTensor:
    """Restore the tensor from a flattened matrix."""
    first = first_numbered(shape)
    narrow = np.int32 if max(*shape, csr.nnz, 0) <= LARGEST["int32"] else np.int64
    coords = np.empty((len(shape), csr.nnz), narrow)
    if first:
        coords[0] = np.repeat(np.arange(shape[0], dtype=narrow), np.diff(csr.indptr))
    write_coordinates(coords, csr.indices, shape, first)
    return CooTensor(coords, csr.data, tuple(shape))


# Masked product: three matrices whose letters form a triangle, one of which masks the product of the others.
#
# ``S[i, j] * A[i, k] * B[k, j]``, summed over k or over all letters, is a product under a mask: rows of B are added
# up in the order of a row of S. A loop over S would search each of its columns in every row of B.


SEARCHED = 6  # products in the time of a search


class Roles(NamedTuple):
    """The operands that are mask and factors, and which of the three are transposed."""

    mask: int
    first: int
    second: int
    transposed: tuple[bool, bool, bool]


def roles(terms: Sequence[str], pattern: int | None) -> Roles | None:
    """Assign roles to three operands whose letters form a triangle; the mask is that of the pattern, if there is one.

    Examples
    --------
    >>> roles(["ij", "ik", "kj"], 0)
    Roles(mask=0, first=1, second=2, transposed=(False, False, False))
    >>> roles(["ij", "jk", "ki"], None)  # B @ C under the transpose of A
    Roles(mask=0, first=1, second=2, transposed=(True, False, False))
    """
    if len(terms) != 3 or any(len(set(term)) != 2 or len(term) != 2 for term in terms):
        return None
    candidates: list[Roles] = []
    for mask, first, second in permutations(range(3)):
        for row, column in permutations(terms[mask]):
            inner = terms[first].replace(row, "")
            if len(inner) != 1 or set(terms[second]) != {inner, column}:
                continue
            expected = (row + column, row + inner, inner + column)
            flipped = tuple(terms[n] != w for n, w in zip((mask, first, second), expected, strict=True))
            candidates.append(Roles(mask, first, second, flipped))  # type: ignore[arg-type]
    suited = [r for r in candidates if pattern is None or (r.mask == pattern and not r.transposed[0])]
    return min(suited, key=lambda r: (sum(r.transposed), r), default=None)


def pays(roles: Roles, stored: Sequence[float | None], sizes: Sequence[tuple[int, int]]) -> bool:
    """Return whether the products take less work than searching the entries of the mask one by one."""
    mask, first, second = (stored[n] or 0.0 for n in roles[:3])
    rows, inner = sizes[roles.first][:: -1 if roles.transposed[1] else 1]
    products = first * second / max(inner, 1)
    return products < SEARCHED * mask * first / max(rows, 1) + mask


class MaskedStep(Step):
    """Product under a mask.

    Parameters
    ----------
    nested : KernelStep
        The same contraction as one loop nest over the mask, for masks whose pattern is kept and is not in sorted rows.
    roles : Roles
    """

    def __init__(self, nested: KernelStep, roles: Roles) -> None:
        self.members, self.nested, self.roles = nested.members, nested, roles
        self.keeps = bool(nested.nest.output)

    def __call__(self, values: Sequence[Any]) -> Any:
        return self.made(values, [self.laid(place, values) for place in (1, 2)])

    def laid(self, place: int, values: Sequence[Any] | Mapping[int, Any]) -> Any:
        """Return the mask or a factor in compressed rows."""
        value = values[self.roles[:3][place]]
        return compressed_rows(interop.transposed(value, (1, 0)) if self.roles.transposed[place] else value)

    def made(self, values: Sequence[Any], factors: Sequence[Any]) -> Any:
        """Compute the result from the operands and the converted factors."""
        if self.keeps and values[self.roles.mask].format != "csr":
            return self.nested(values)
        mask_matrix = self.laid(0, values)
        interop.open_source(mask_matrix, "the mask").check("the mask")
        mask = sp.csr_array(
            (np.ones(len(mask_matrix.data), np.bool_), mask_matrix.indices, mask_matrix.indptr), shape=mask_matrix.shape
        )
        if not mask.has_canonical_format:
            if self.keeps:
                return self.nested(values)
            mask_matrix = mask_matrix.copy()
            mask_matrix.has_canonical_format = False
            mask_matrix.sum_duplicates()
            mask = sp.csr_array(
                (np.ones(len(mask_matrix.data), np.bool_), mask_matrix.indices, mask_matrix.indptr),
                shape=mask_matrix.shape,
            )
        wide = any(m.indices.dtype == np.int64 for m in (mask, *factors))
        sums = _kernel(dtype_name(mask_matrix.dtype), "int64" if wide else "int32")(
            A=factors[0], B=factors[1], M=mask
        ).data
        # The mask is too wide for a table of columns, or infinity and NaN would be multiplied by products that are
        # not stored.
        if len(sums) != len(mask_matrix.data) or not np.isfinite(mask_matrix.data).all():
            return self.nested(values)
        if not self.keeps:
            return np.dot(mask_matrix.data, sums)
        # The result has the class of the mask, and its own index arrays.
        return type(mask_matrix)(
            (mask_matrix.data * sums, mask_matrix.indices.copy(), mask_matrix.indptr.copy()), shape=mask_matrix.shape
        )

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        fixed_factors = {place: self.laid(place, fixed) for place in (1, 2) if self.roles[:3][place] in fixed}
        return lambda values: self.made(
            values, [fixed_factors[place] if place in fixed_factors else self.laid(place, values) for place in (1, 2)]
        )

    def script(self) -> str:
        from sparsetir.script.printer import script

        return script(_program(self.nested.nest.dtype, "int32"))


def _program(dtype: str, idtype: str) -> Any:
    return ops.masked_spgemm(dtype, idtype=idtype)


@cache
def _kernel(dtype: str, idtype: str) -> AssembledKernel:
    return assembled_kernel(_program(dtype, idtype), None, Options(whole=True))


__all__ = ["FlatStep", "MaskedStep", "Roles", "pays", "roles"]
