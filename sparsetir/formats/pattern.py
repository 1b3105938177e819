# SPDX-License-Identifier: Apache-2.0
"""`pattern`: statistics of the structure of a sparse tensor, and hashes of structures and values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import xxhash

from sparsetir.errors import ArgumentTypeError
from sparsetir.formats.diagonals import slice_diagonals
from sparsetir.formats.format import Array, Entries
from sparsetir.formats.origin import Origin, open_origin
from sparsetir.formats.row_groups import grouped_share
from sparsetir.formats.statistics import BlockFill, Degrees, Lines, fibers
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop.arrays import CHUNK, are_sorted
from sparsetir.interop.levels import first_disorder
from sparsetir.interop.sources import CompressedSource

DIGITS = 16  # of a structure: part of the records of earlier searches
VALUE_DIGITS = 32


def hash_arrays(head: str, arrays: Iterable[Array]) -> str:
    """Return a hash of a text and of arrays: of dtypes, shapes and the bits of all elements, 32 hexadecimal digits.

    Elements are not converted: values that differ in one bit, such as 0.0 and -0.0, have different hashes. Byte order
    and strides do not enter.

    Raises
    ------
    ArgumentTypeError
        An array holds objects, whose bytes are addresses.

    Examples
    --------
    >>> import numpy as np
    >>> weights = np.array([[0.1, 0.2], [0.3, 0.4]])
    >>> hash_arrays("", [weights]) == hash_arrays("", [np.asfortranarray(weights)])
    True
    >>> hash_arrays("", [weights]) == hash_arrays("", [np.nextafter(weights, 1)])
    False
    """
    state = hashlib.sha256(f"{len(head)} {head}".encode())
    for array in map(np.asarray, arrays):
        if array.dtype.hasobject:
            raise ArgumentTypeError("array: expected numbers, got dtype object. Convert it to a dtype of numbers.")
        native = array.dtype.newbyteorder("<")
        state.update(f"{native.name} {native.str} {array.shape}".encode())
        _update(state, array, native)
    return state.hexdigest()[:VALUE_DIGITS]


def hash_indices(head: str, arrays: Iterable[Array]) -> str:
    """Return a hash of a text and of integer arrays, 16 hexadecimal digits; the width of the integers does not enter.

    Raises
    ------
    ArgumentTypeError
        An array holds other than integers: `hash_arrays` takes it.

    Examples
    --------
    >>> import numpy as np
    >>> hash_indices("", [np.arange(3, dtype="int32")]) == hash_indices("", [np.arange(3, dtype="int64")])
    True
    """
    state = hashlib.sha256(head.encode())
    for array in map(np.asarray, arrays):
        if array.dtype.kind not in "iub":
            raise ArgumentTypeError(f"array: expected integers, got dtype {array.dtype}. Hash values with hash_arrays.")
        state.update(f"{array.shape}".encode())
        _update(state, array, np.dtype("<i8"))
    return state.hexdigest()[:DIGITS]


def _update(state: Any, array: Array, dtype: np.dtype[Any]) -> None:
    """Feed the elements to a hash, row after row, in chunks of a dtype that holds them exactly."""
    flat = np.ascontiguousarray(array).reshape(-1)
    for begin in range(0, flat.size, CHUNK):
        state.update(flat[begin : begin + CHUNK].astype(dtype, copy=False).view("u1").data)


def fingerprint(entries: Entries) -> str:
    """Return a hash of the coordinates of the entries of a tensor, independent of how they are stored.

    Of the shape, the rows (first coordinates) that hold something, where they begin, and the other coordinates.

    Examples
    --------
    >>> import numpy as np
    >>> listed = Entries((2, 3), [np.array([0, 1]), np.array([2, 0])])
    >>> fingerprint(listed) == fingerprint(Entries.of_rows((2, 3), np.array([0, 1, 2]), np.array([2, 0])))
    True
    """
    rows, starts = entries.occupied
    inner = (entries.last,) if len(entries.shape) == 2 else entries.coords[1:]
    return hash_indices(f"{entries.shape}", [rows, starts, *inner])


def checksum(array: Array) -> int:
    """Return 64 bits that tell whether an array was changed in place, as fast as memory is read.

    Only for comparisons within a process: `hash_arrays` makes what is stored.

    Examples
    --------
    >>> import numpy as np
    >>> values = np.ones(1000, "float32")
    >>> before = checksum(values)
    >>> values *= -1
    >>> checksum(values) == before
    False
    """
    contiguous = array if array.flags.c_contiguous or array.flags.f_contiguous else np.ascontiguousarray(array)
    return int(xxhash.xxh3_64_intdigest(contiguous.reshape(-1, order="A").view(np.uint8).data))


BLOCKS = ((1, 4), (4, 1), (8, 1), (16, 1), (2, 2), (3, 3), (4, 4), (8, 8), (16, 16))
PARTS = (2, 4, 16)
SLICES = (8, 64)  # rows of a slice and of the window in which they are sorted
PANEL = 64  # rows whose distinct columns are counted
HALF = 0.5  # full enough for a full diagonal
HACK = (16, HALF)  # rows of a slice with diagonals of its own, and how full these are
GROUP = (4, 0.5)  # rows of a group, and the zeros that it may store for each entry


@dataclass(frozen=True, repr=False)
class Pattern:
    """The structure of a sparse tensor in numbers; values do not enter. A matrix has more: `MatrixPattern`.

    Parameters
    ----------
    shape : tuple of int
    nnz : int
        Entries, those that hold zero too; entries with the same coordinates count once.
    fibers : tuple of int
        For each mode the fibers that hold something: lines along which only this mode's coordinate changes. Those of
        a matrix' mode 0 are its columns, those of mode 1 its rows.
    is_sorted : bool
        Whether the argument's entries came in order: those of each row (CSR) or column (CSC), or all (COO).
    duplicates : int
        How many of the argument's entries had the coordinates of another one.
    fingerprint : str
        A hash of the shape and of the entries' coordinates. The class of the argument, the width of its indices, the
        order of its entries and their values do not matter.
    """

    shape: tuple[int, ...]
    nnz: int
    fibers: tuple[int, ...]
    is_sorted: bool
    duplicates: int
    fingerprint: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def density(self) -> float:
        """Fraction of the coordinates that hold an entry; 0 where there are none."""
        cells = math.prod(self.shape)
        return self.nnz / cells if cells else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {**asdict(self), "density": self.density}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._head()}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _head(self) -> str:
        sizes = " x ".join(f"{n:,}" for n in self.shape)
        return f"{sizes}, {self.nnz:,} nonzeros, density {self.density:.3g}"

    def _lines(self) -> Iterator[str]:
        yield f"{self._head()}, fingerprint {self.fingerprint}"
        yield f"fibers of each mode: {', '.join(f'{n:,}' for n in self.fibers)}"
        yield self._order()

    def _order(self) -> str:
        return f"{'' if self.is_sorted else 'not '}sorted, {self.duplicates or 'no'} duplicates"


@dataclass(frozen=True, repr=False)
class MatrixPattern(Pattern):
    """The structure of a matrix in numbers.

    Parameters
    ----------
    rows, columns : Degrees
        How many entries they hold.
    bandwidth : (int, int)
        How far entries lie below and above the main diagonal.
    profile : (int, int)
        Slots below the main diagonal from each row's first entry on, and above it from each column's first entry on:
        what skyline storage needs besides the diagonal.
    prefix : int
        Slots up to the last entry of each row.
    sliced : int
        Slots of slices of 8 rows, each as wide as its longest row; rows are sorted by length within windows of 64.
    reach : (int, int)
        How far the last entry lies behind the first one, at most: in a row, and in a window of 64 rows.
    diagonals, full_diagonals : int
        Diagonals that hold something, and those of them on which half of the slots of the longest one are entries.
    diagonal_share : float
        Fraction of the entries that lie on the latter.
    slice_diagonal_share, slice_diagonal_fill : float
        Fraction of the entries on diagonals of 16 neighbouring rows of which half is there, and how full those are.
        Of a large matrix, those of a sample; 0 where most rows or columns hold nothing.
    blocks : mapping of (int, int) to BlockFill
        By rows and columns of a block; the sizes are `BLOCKS`.
    panel_columns : float
        Distinct columns in panels of 64 rows, for each entry: 1 where no column is used twice in a panel.
    reuse_distance : float or None
        Mean number of rows from an entry to the next one of its column; None where no column has two.
    imbalance : mapping of int to float
        For 2, 4 and 16 ranges of equally many rows: how many times its share of the entries the largest one holds.
    symmetry : float or None
        Fraction of the entries off the main diagonal whose mirror image is one, 1 without any; None if not square.
    group_share, group_fill : float
        Fraction of the entries in rows that groups of 4 similar rows take in with little padding, and how full the
        blocks of 4 x 1 are that such groups store (see `formats.row_groups`). Of a large matrix, that of a sample; 0
        where most rows or columns hold nothing.
    """

    rows: Degrees
    columns: Degrees
    bandwidth: tuple[int, int]
    profile: tuple[int, int]
    prefix: int
    sliced: int
    reach: tuple[int, int]
    diagonals: int
    full_diagonals: int
    diagonal_share: float
    slice_diagonal_share: float
    slice_diagonal_fill: float
    blocks: Mapping[tuple[int, int], BlockFill] = field(hash=False)
    panel_columns: float
    reuse_distance: float | None
    imbalance: Mapping[int, float] = field(hash=False)
    symmetry: float | None
    group_share: float
    group_fill: float

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "blocks": [asdict(fill) for fill in self.blocks.values()]}

    def _lines(self) -> Iterator[str]:
        yield f"{self._head()}, fingerprint {self.fingerprint}"
        yield from self._degrees()
        yield _row("blocks", [f"{r}x{c}" for r, c in self.blocks])
        yield _row("fill", [f"{block_fill.fill:.0%}" for block_fill in self.blocks.values()])
        yield _row("half full", [f"{block_fill.share:.0%}" for block_fill in self.blocks.values()])
        full = f"{self.full_diagonals:,} half full with {self.diagonal_share:.0%} of the nonzeros"
        yield f"diagonals: {self.diagonals:,} hold something, {full}"
        share, fill = self.slice_diagonal_share, self.slice_diagonal_fill
        yield f"diagonals of {HACK[0]} rows: those that are half full hold {share:.0%} of the nonzeros, {fill:.0%} full"
        yield f"bandwidth {_two(self.bandwidth)}, profile {_two(self.profile)} (below and above the main diagonal)"
        again = "never again" if self.reuse_distance is None else f"again after {self.reuse_distance:,.1f} rows"
        yield f"columns are used {again}; {PANEL} rows use {self.panel_columns:.2f} columns for a nonzero"
        parts, shares = ", ".join(map(str, self.imbalance)), ", ".join(f"{x:.2f}" for x in self.imbalance.values())
        yield f"of {parts} equal ranges of rows the largest holds {shares} times its share"
        symmetry = "not square" if self.symmetry is None else f"{self.symmetry:.0%} symmetric"
        yield f"{symmetry}, {self._order()}"

    def _degrees(self) -> Iterator[str]:
        names = ("empty", "min", "median", "mean", "max", "std", "cv", "gini")
        yield _row("nonzeros of", names)
        for title, degrees in (("rows", self.rows), ("columns", self.columns)):
            yield _row(title, [_number(getattr(degrees, name)) for name in names])
        both = list(zip_longest(self.rows.histogram, self.columns.histogram, fillvalue=0))
        yield _row("length", [_bin(k) for k in range(len(both))])
        yield _row("rows", [_number(rows) for rows, _ in both])
        yield _row("columns", [_number(columns) for _, columns in both])


def _row(title: str, cells: Any) -> str:
    return title.ljust(11) + "".join(f" {cell:>10}" for cell in cells)


def _number(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def _bin(k: int) -> str:
    """Return the least that the k-th bin of a histogram counts."""
    return f"{2**k // 2}+" if k > 1 else f"{k}"


def _two(pair: tuple[int, int]) -> str:
    return f"{pair[0]:,} and {pair[1]:,}"


def pattern(value: Any) -> MatrixPattern:
    """Describe the structure of a sparse tensor, in time linear in the number of its entries.

    Parameters
    ----------
    value : object
        A scipy.sparse array or matrix, a torch sparse tensor, a `SparseTensor`, a `CooTensor` or any other object with
        coords, values and shape.

    Returns
    -------
    MatrixPattern
        Of tensors of other orders a `Pattern`, which has less.

    Raises
    ------
    ArgumentTypeError
        When the class of `value` is not supported.
    StructureError
        When its index arrays are broken.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> found = pattern(sp.csr_array(np.array([[1, 2, 0, 0], [0, 3, 0, 0], [0, 0, 0, 4]])))
    >>> found
    <MatrixPattern 3 x 4, 4 nonzeros, density 0.333>
    >>> found.rows.max, found.bandwidth, found.blocks[2, 2].fill, found.imbalance[2]
    (2, (0, 1), 0.5, 1.0)
    """
    origin = value.origin if isinstance(value, SparseTensor) else open_origin(value, check=True)
    entries = origin.entries
    facts: dict[str, Any] = {
        "shape": entries.shape,
        "nnz": entries.nnz,
        "is_sorted": _is_sorted(origin),
        "duplicates": origin.source.values.size - entries.nnz,
        "fingerprint": fingerprint(entries),
    }
    if len(entries.shape) != 2:
        # A type checker cannot tell, and most users have matrices.
        return cast(MatrixPattern, Pattern(**facts, fibers=fibers(entries.coords, entries.shape)))
    return MatrixPattern(**facts, **_matrix(entries))


def _is_sorted(origin: Origin) -> bool:
    source = origin.source
    if isinstance(source, CompressedSource):
        return first_disorder(source.indices, source.indptr, strict=False) is None
    return are_sorted(source.coords())


def _matrix(entries: Entries) -> dict[str, Any]:
    lines = Lines(entries)
    rows, columns = lines.row_degrees, lines.column_degrees
    diagonals, full, share = lines.diagonals(HALF)
    few = lines.labels is not None  # rows are not numbered one by one
    share_of_slices, fill_of_slices = (0.0, 0.0) if few else slice_diagonals(entries, *HACK)
    share_of_groups, fill_of_groups = (0.0, 0.0) if few else grouped_share(entries, *GROUP)
    return {
        "fibers": (columns.count - columns.empty, rows.count - rows.empty),
        "rows": rows,
        "columns": columns,
        "bandwidth": lines.bandwidth,
        "profile": lines.profile,
        "prefix": lines.prefix,
        "sliced": lines.sliced(*SLICES),
        "reach": (lines.reach(1), lines.reach(SLICES[1])),
        "diagonals": diagonals,
        "full_diagonals": full,
        "diagonal_share": share,
        "slice_diagonal_share": share_of_slices,
        "slice_diagonal_fill": fill_of_slices,
        "blocks": {(r, c): lines.blocks(r, c) for r, c in BLOCKS},
        "panel_columns": lines.blocks(PANEL, 1).count / max(entries.nnz, 1),
        "reuse_distance": lines.reuse_distance,
        "imbalance": {parts: lines.imbalance(parts) for parts in PARTS},
        "symmetry": lines.symmetry,
        "group_share": share_of_groups,
        "group_fill": fill_of_groups,
    }


__all__ = [
    "BLOCKS",
    "PARTS",
    "SLICES",
    "MatrixPattern",
    "Pattern",
    "checksum",
    "fingerprint",
    "hash_arrays",
    "hash_indices",
    "pattern",
]
