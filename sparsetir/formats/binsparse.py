# SPDX-License-Identifier: Apache-2.0
"""Tensors in the words of the Binsparse specification, version 0.1: a descriptor and named arrays.

Source: https://graphblas.org/binsparse-specification/. The methods ``__binsparse_descriptor__`` and
``__binsparse__`` are those of the draft in data-apis/array-api, pull request 912.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.formats.compressed import CSF
from sparsetir.formats.format import Array, Format
from sparsetir.interop import CooTensor, Level, aligned_contiguous, check_level
from sparsetir.interop.sources import whole_sizes
from sparsetir.utils.arguments import shown

if TYPE_CHECKING:
    from sparsetir.formats.tensor import SparseTensor


VERSION = "0.1"
PLAIN_TYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float32",
    "float64",
)

# Format -> levels (kind, rank) from the root, and whether the first one is the columns.
ALIASES: dict[str, tuple[list[tuple[str, int]], bool]] = {
    "DVEC": ([("dense", 1)], False),
    "DMAT": ([("dense", 2)], False),
    "DMATR": ([("dense", 2)], False),
    "DMATC": ([("dense", 2)], True),
    "CVEC": ([("sparse", 1)], False),
    "CSR": ([("dense", 1), ("sparse", 1)], False),
    "CSC": ([("dense", 1), ("sparse", 1)], True),
    "DCSR": ([("sparse", 1), ("sparse", 1)], False),
    "DCSC": ([("sparse", 1), ("sparse", 1)], True),
    "COO": ([("sparse", 2)], False),
    "COOR": ([("sparse", 2)], False),
    "COOC": ([("sparse", 2)], True),
}
OWN = {"CSR": "csr", "CSC": "csc", "DCSR": "dcsr", "COO": "coo", "COOR": "coo", "COOC": "coo", "CVEC": "csf"}


# ---------------------------------------------------------------------------------------------- out


def encode(tensor: SparseTensor) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the Binsparse descriptor of a tensor and its arrays."""
    writers = {"csr": _csr, "csc": _csr, "dcsr": _dcsr, "coo": _coo, "csf": _csf}
    write = writers.get(tensor.format.name)
    if write is None:
        names = ", ".join(writers)
        raise ArgumentError(f"Binsparse has no words for {tensor.format!r}: convert it to one of {names}")
    format, arrays = write(tensor)
    dtype, values = _written(tensor.pieces[0].values)
    inner = {
        "version": VERSION,
        "format": format,
        "shape": list(tensor.shape),
        "number_of_stored_values": tensor.nnz,
        "data_types": {**{name: array.dtype.name for name, array in arrays.items()}, "values": dtype},
    }
    return {"binsparse": inner}, {**arrays, "values": values}


def _csr(tensor: SparseTensor) -> tuple[Any, dict[str, Array]]:
    arrays = tensor.pieces[0].arrays
    return tensor.format.name.upper(), {"pointers_to_1": arrays["indptr"], "indices_1": arrays["indices"]}


def _dcsr(tensor: SparseTensor) -> tuple[Any, dict[str, Array]]:
    arrays = tensor.pieces[0].arrays
    names = {"indices_0": "indices_i", "pointers_to_1": "indptr_j", "indices_1": "indices_j"}
    return "DCSR", {name: arrays[own_name] for name, own_name in names.items()}


def _coo(tensor: SparseTensor) -> tuple[Any, dict[str, Array]]:
    arrays = {f"indices_{d}": a for d, a in enumerate(tensor.pieces[0].arrays.values())}
    alias = {1: "CVEC", 2: "COOR"}.get(tensor.ndim)
    return alias or _custom([("sparse", tensor.ndim)]), arrays


def _csf(tensor: SparseTensor) -> tuple[Any, dict[str, Array]]:
    order = list(tensor.format.parameters["order"])
    stored = iter(tensor.pieces[0].arrays.values())
    arrays: dict[str, Array] = {}
    for depth, (indptr, indices) in enumerate(zip(stored, stored, strict=True)):
        if depth:
            arrays[f"pointers_to_{depth}"] = indptr
        arrays[f"indices_{depth}"] = indices
    if len(order) <= 2:
        return {(0,): "CVEC", (0, 1): "DCSR", (1, 0): "DCSC"}[tuple(order)], arrays
    return _custom([("sparse", 1)] * len(order), order), arrays


def _custom(levels: list[tuple[str, int]], transpose: list[int] | None = None) -> dict[str, Any]:
    level: dict[str, Any] = {"level_desc": "element"}
    for kind, rank in reversed(levels):
        level = {"level_desc": kind, "rank": rank, "level": level}
    turned = transpose is not None and transpose != sorted(transpose)
    return {"custom": {**({"transpose": transpose} if turned else {}), "level": level}}


def _written(values: Array) -> tuple[str, Array]:
    """Return the name of the dtype in a descriptor, and the values as the specification stores them."""
    if values.dtype == np.bool_:
        return "bint8", values.view(np.uint8)
    if values.dtype.kind == "c":
        part = values.real.dtype
        return f"complex[{part.name}]", values.view(part)
    if values.dtype.name not in PLAIN_TYPES:
        raise ArgumentError(f"Binsparse has no name for {values.dtype}: convert the values to float32")
    return values.dtype.name, values


# ---------------------------------------------------------------------------------------------- in


def decode(descriptor: dict[str, Any], arrays: dict[str, Any]) -> tuple[Any, str | Format | None]:
    """Return a sparse argument out of a descriptor and its arrays, and the format it had.

    Raises
    ------
    ArgumentError
        When the descriptor says something that this package does not know, or an array is missing.
    StructureError
        When the index arrays are broken.
    """
    inner = descriptor.get("binsparse", {})
    for key in ("version", "format", "shape", "data_types"):
        if key not in inner:
            raise ArgumentError(f"the descriptor lacks the key {key!r} under 'binsparse', got {', '.join(inner)}")
    if str(inner["version"]).split(".")[0] != VERSION.split(".")[0]:
        raise ArgumentError(f"expected Binsparse version {VERSION}, got {inner['version']}")
    reader = _DescriptorReader(inner, arrays)
    levels, order = _levels(inner)
    coords = reader.coords(levels, [reader.shape[d] for d in order])
    values = reader.values(len(coords[0]))
    ordered_coords = tuple(coords[order.index(d)] for d in range(len(order)))
    ordered_coords, values = _mirrored(ordered_coords, values, inner.get("structure"))
    if inner["format"] in ("CSR", "CSC") and not inner.get("structure"):
        make = sp.csr_array if inner["format"] == "CSR" else sp.csc_array
        indptr, indices = reader.index("pointers_to_1"), reader.index("indices_1")
        return make((values, indices, indptr), shape=reader.shape), OWN[inner["format"]]
    return CooTensor(np.stack(ordered_coords), values, reader.shape), _own_format(inner["format"], levels, order)


def _levels(inner: dict[str, Any]) -> tuple[list[tuple[str, int]], list[int]]:
    """Return the levels (kind, rank) from the root, and the dimension of each of their coordinates."""
    format = inner["format"]
    if isinstance(format, str) and format in ALIASES:
        levels, turned = ALIASES[format]
        order = list(range(sum(rank for _, rank in levels)))
        order = order[::-1] if turned else order
    else:
        custom = format.get("custom") if isinstance(format, dict) else None
        if not isinstance(custom, dict) or "level" not in custom:
            raise ArgumentError(f"expected one of {', '.join(ALIASES)} or a custom format, got {shown(format)}")
        levels = list(_unnested(custom["level"]))
        order = list(custom.get("transpose", range(sum(rank for _, rank in levels))))
    if sorted(order) != list(range(len(inner["shape"]))):
        raise ArgumentError(f"the levels name the dimensions {order} but the shape is {inner['shape']}")
    return levels, order


def _unnested(level: dict[str, Any]) -> Iterator[tuple[str, int]]:
    while level.get("level_desc") != "element":
        if level.get("level_desc") not in ("dense", "sparse") or "level" not in level:
            raise ArgumentError(f"expected the levels dense, sparse and element, got {level}")
        yield level["level_desc"], int(level.get("rank", 1))
        level = level["level"]


def _own_format(format: Any, levels: list[tuple[str, int]], order: list[int]) -> str | Format | None:
    if isinstance(format, str) and format in OWN:
        return OWN[format]
    if any(kind == "dense" for kind, _ in levels):
        return None
    return "coo" if len(levels) == 1 else CSF(order) if len(levels) == len(order) else None


def _mirrored(coords: tuple[Array, ...], values: Array, structure: str | None) -> tuple[tuple[Array, ...], Array]:
    """Return both triangles of a matrix of which one is stored."""
    if not structure:
        return coords, values
    kind = structure.removesuffix("_lower").removesuffix("_upper")
    if kind not in ("symmetric", "hermitian", "skew_symmetric") or len(coords) != 2:
        raise ArgumentError(f"expected a symmetric, hermitian or skew_symmetric matrix, got structure {structure!r}")
    off_diagonal = coords[0] != coords[1]
    mirrored_values = values[off_diagonal]
    mirrored_values = (
        -mirrored_values
        if kind == "skew_symmetric"
        else np.conj(mirrored_values)
        if kind == "hermitian"
        else mirrored_values
    )
    i, j = coords
    return (np.append(i, j[off_diagonal]), np.append(j, i[off_diagonal])), np.append(values, mirrored_values)


class _DescriptorReader:
    """The arrays of a descriptor."""

    def __init__(self, inner: dict[str, Any], arrays: dict[str, Any]) -> None:
        self.arrays, self.types = arrays, inner["data_types"]
        self.base = int(inner.get("index_base", 0))
        self.shape = whole_sizes(inner["shape"], "the shape of a descriptor")
        if inner.get("fill") and np.any(self.array("fill_value")):
            raise ArgumentError("the tensor is filled with something else than zero, which is not supported")

    def array(self, name: str) -> Array:
        if name not in self.arrays:
            raise ArgumentError(f"the descriptor asks for the array {name}, got {', '.join(self.arrays) or 'none'}")
        return aligned_contiguous(self.arrays[name], name=name)[0]

    def index(self, name: str) -> Array:
        """Return pointers or indices counted from 0, as signed integers."""
        indices = self.array(name)
        if indices.dtype.kind == "u":
            indices = indices.astype(np.int64)
        return indices - indices.dtype.type(self.base) if self.base else indices

    def values(self, count: int) -> Array:
        """Return the stored values in their own dtype."""
        stored, dtype = self.array("values").reshape(-1), str(self.types["values"])
        if dtype.startswith("iso["):
            stored, dtype = np.repeat(stored[:1], count), dtype[4:-1]
        if dtype.startswith("complex["):
            stored = stored.view(np.result_type(stored, np.complex64))
        if dtype == "bint8":
            stored = stored.astype(np.bool_)
        if len(stored) != count:
            raise ArgumentError(f"expected {count} values, got {len(stored)}")
        return stored

    def coords(self, levels: list[tuple[str, int]], extents: list[int]) -> list[Array]:
        """Return the coordinates of every stored value, level by level."""
        levels_coords: list[Array] = []
        count = 1
        for kind, rank in levels:
            depth = len(levels_coords)
            inside = extents[depth : depth + rank]
            step = self._dense if kind == "dense" else self._sparse
            repeats, new = step(depth, count, inside)
            levels_coords = [np.repeat(c, repeats) for c in levels_coords] + new
            count = len(levels_coords[0])
        return levels_coords

    def _dense(self, depth: int, count: int, extents: list[int]) -> tuple[Any, list[Array]]:
        inside = np.indices(extents).reshape(len(extents), -1)
        return inside.shape[1], [np.tile(c, count) for c in inside]

    def _sparse(self, depth: int, count: int, extents: list[int]) -> tuple[Any, list[Array]]:
        indices = [self.index(f"indices_{depth + k}") for k in range(len(extents))]
        pointers = self.index(f"pointers_to_{depth}") if depth else np.array([0, len(indices[0])])
        for k, (index, extent) in enumerate(zip(indices, extents, strict=True)):
            level = Level(str(depth + k), "sparse_variable", sorted=False, unique=False)
            check_level(level, pointers, index, parent_count=count, length=extent, name="the tensor", need_sorted=False)
        return np.diff(pointers), indices


__all__ = ["decode", "encode"]
