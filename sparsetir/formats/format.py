# SPDX-License-Identifier: Apache-2.0
"""Formats: pieces, each a rewrite rule for programs and arrays for data; helpers of packers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError, checks_keywords
from sparsetir.formats.base import Estimate, FormatRewriteRule
from sparsetir.interop.arrays import CHUNK, changes, index_dtype, put, take
from sparsetir.utils.arguments import as_index, is_integer, shown
from sparsetir.utils.caches import cached_property
from sparsetir.utils.memory import check_memory, check_values, fits

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


# What a format is: pieces, each a rewrite rule on the program's side and arrays on the data's side.


Lazy: TypeAlias = "Array | Callable[[], Array] | None"
Maker = TypeVar("Maker", bound=Callable[..., Any])

INT32_END = 2**31  # a dimension or a number of stored values that reaches it needs 64-bit indices
IDTYPES = ("int32", "int64")


class CapacityError(StructureError):
    """A piece would store more values than its index type can count."""


class Entries:
    """The nonzeros of a tensor as a format packs them: sorted by coordinates, none twice.

    Parameters
    ----------
    shape : tuple of int
    coords : tuple of ndarray of int
        One array per dimension, all as long as there are entries, in lexicographic order.
    indptr : ndarray of int, optional
        Where each row (first coordinate) begins in the list of entries; counted when it is not given.
    """

    def __init__(self, shape: tuple[int, ...], coords: Sequence[Array], indptr: Array | None = None) -> None:
        self.shape = tuple(int(n) for n in shape)
        self._inner = tuple(coords)
        if indptr is not None:
            self.indptr = indptr

    @classmethod
    def of_rows(cls, shape: tuple[int, ...], indptr: Array, columns: Array) -> Entries:
        """Make entries from the row pointers and columns of a matrix; row numbers are only computed on demand."""
        return cls(shape, (columns,), indptr)

    @cached_property
    def indptr(self) -> Array:
        rows, m = self._inner[0], self.shape[0]
        check_memory(m * rows.itemsize, f"pointers to {m} rows")
        return np.searchsorted(rows, np.arange(m + 1, dtype=rows.dtype)).astype(rows.dtype)

    @property
    def coords(self) -> tuple[Array, ...]:
        """Coordinates of the entries; row numbers that are known by `indptr` only are written out at each look."""
        if len(self._inner) == len(self.shape):
            return self._inner
        counts = np.diff(self.indptr)
        return (np.repeat(np.arange(len(counts), dtype=self._inner[-1].dtype), counts), *self._inner)

    @property
    def occupied(self) -> tuple[Array, Array]:
        """The rows (first coordinates) that hold entries, and where each begins in the list; it ends with `nnz`."""
        if "indptr" in vars(self):
            rows = np.flatnonzero(np.diff(self.indptr))
            return rows, np.append(self.indptr[rows], self.nnz)
        heads = np.flatnonzero(changes(self._inner[:1]))
        return self._inner[0][heads], np.append(heads, self.nnz)

    @property
    def last(self) -> Array:
        """The last coordinate: a matrix' columns."""
        return self._inner[-1]

    @property
    def nnz(self) -> int:
        return len(self._inner[-1])


class Packed:
    """The index arrays of one piece, and where in its values the entries lie.

    Parameters
    ----------
    arrays : dict of str to ndarray
        Every array parameter of the rule's description by name, but for the values.
    sizes : dict of str to int
        Every scalar parameter of the rule's description.
    count : int
        Number of values the piece stores, padding included.
    entries : ndarray of int or None
        Which of the tensor's entries the piece holds, ascending or not; None: all, in order.
    slots : ndarray of int or None
        Where in the piece's flat values each of them lies; None: in order from 0.
    size : int, optional
        Number of entries held. Needed where `entries` or `slots` are not arrays but functions that make them when
        they are first used.
    """

    def __init__(
        self,
        arrays: dict[str, Array],
        sizes: dict[str, int],
        count: int,
        entries: Lazy = None,
        slots: Lazy = None,
        *,
        size: int | None = None,
    ) -> None:
        self.arrays, self.sizes, self.count = arrays, sizes, int(count)
        self._entries, self._slots, self._size = entries, slots, size

    @property
    def entries(self) -> Array | None:
        if callable(self._entries):
            self._entries = self._entries()
        return self._entries

    @property
    def slots(self) -> Array | None:
        if callable(self._slots):
            self._slots = self._slots()
        return self._slots

    @property
    def is_plain(self) -> bool:
        """Whether the values are those of the tensor's entries, all and in order."""
        return self._entries is None and self._slots is None and self.size == self.count

    def values(self, values: Array) -> Array:
        """Return the piece's flat values, from those of the tensor's entries; padding is zero."""
        piece_values = values if self.entries is None else take(values, self.entries)
        if self.slots is None and len(piece_values) == self.count:
            return np.ascontiguousarray(piece_values)
        out = np.zeros(self.count, values.dtype)
        put(out, slice(len(piece_values)) if self.slots is None else self.slots, piece_values)
        return out

    def gather(self, stored: Array, out: Array) -> None:
        """Scatter the piece's values to their entries in `out`: the reverse of `values`."""
        flat = stored.reshape(-1)
        piece_values = flat[: self.size] if self.slots is None else take(flat, self.slots)
        put(out, slice(None) if self.entries is None else self.entries, piece_values)

    @property
    def size(self) -> int:
        """Number of entries held."""
        if self._size is None:
            index = self.entries if self.slots is None else self.slots
            self._size = self.count if index is None else len(index)
        return self._size


class Format:
    """A way to store a tensor: the rules of its pieces, and how entries are packed into them.

    A subclass defines `name`, `rules` and `pack`, and `estimate` and `block` where a search needs to know how it stores
    a matrix. Its parameters are the fields of a dataclass, or `parameters`. With `idtype` None the tensor decides the
    width of the indices: see `resolve`.
    """

    name: str = ""
    dimensions: int | None = 2
    idtype: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, as `make` takes them."""
        chosen: dict[str, Any] = {}
        if is_dataclass(self):
            chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: as_index(value) for name, value in chosen.items() if name != "idtype" or value is not None}

    @property
    def rules(self) -> Sequence[FormatRewriteRule]:
        """One rule for each piece, under different names."""
        raise NotImplementedError

    def pack(self, entries: Entries) -> list[Packed]:
        """Return the pieces of a tensor, one for each rule in the same order; a piece may hold nothing."""
        raise NotImplementedError

    def estimate(self, pattern: Any) -> Estimate:
        """Estimate the storage of a tensor with a `Pattern` (a `MatrixPattern` for formats of matrices only)."""
        return Estimate(pattern.nnz)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share an index and have loops of their own."""
        return 1, 1

    @property
    def column_parts(self) -> int:
        """Ranges of columns that are stored one after the other."""
        return 1

    def fill(self, entries: Entries, values: Array) -> list[tuple[Packed, Array]]:
        """Return `pack` with the flat values of each piece; a format may override it to compute both at once."""
        pieces = self.pack(entries)
        check_values(sum(piece.count for piece in pieces), values.dtype)
        return [(piece, piece.values(values)) for piece in pieces]

    def borrow(self, source: Any, slots: Callable[[], Array]) -> list[tuple[Packed, Array]] | None:
        """Return the arrays of an `interop` source as they are if its layout is this format's, else None.

        ``slots()`` returns the place of each entry among the source's values. `fill` is called where this returns None.
        """
        return None

    def resolve(self, ndim: int, idtype: str) -> Format:
        """Return this format with all parameters set that a tensor of `ndim` dimensions determines."""
        if self.dimensions not in (None, ndim):
            expected = f"{self.name} stores tensors of {self.dimensions} dimensions"
            raise ArgumentError(f"{expected}, got one of {ndim}: take csf, coo, or a tree of your own")
        return self if self.idtype is not None else self.with_idtype(idtype)

    def with_idtype(self, idtype: str) -> Format:
        """Return this format with index arrays of another type."""
        check_idtype(idtype)
        if is_dataclass(self):
            return replace(self, idtype=idtype)
        copied = copy.copy(self)
        vars(copied).pop("rules", None)  # may be cached
        vars(copied)["idtype"] = idtype
        return copied

    @property
    def index_type(self) -> str:
        """Dtype of the index arrays; int32 by default."""
        return self.idtype or "int32"

    def check_count(self, count: int, *, indices: int = 0) -> int:
        """Return `count` as an int; raise unless the index type can represent it and the values fit into memory.

        Parameters
        ----------
        count : int
            Values stored, padding included; a byte each at the least.
        indices : int
            Numbers of the index type stored with them.

        Raises
        ------
        CapacityError
            When the index type cannot count them.
        MemoryLimitError
            When they do not fit.
        """
        nbytes = count + indices * np.dtype(self.index_type).itemsize
        if self.index_type == "int32" and count >= INT32_END:
            fault = f"{self!r} would store {count} values, more than int32 indices can count"
            remedy = "leave idtype out or pass idtype='int64'" if fits(nbytes) else "take one that stores less"
            raise CapacityError(f"{fault}: {remedy}")
        check_memory(nbytes, f"{count} values")
        return int(count)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "rules"}  # made again when needed

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.parameters.items() if v is not None and (k, v) != ("idtype", "int32")}
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


def check_idtype(idtype: str | None) -> None:
    """Raise `ArgumentTypeError` unless `idtype` is one that an axis can have."""
    is_name = isinstance(idtype, (str, np.dtype)) and idtype in IDTYPES  # an array is compared element by element
    if idtype is not None and not is_name:
        raise ArgumentTypeError(f"idtype: expected one of {', '.join(IDTYPES)}, got {shown(idtype)}")


def check_positive(name: str, **numbers: Any) -> None:
    """Raise `ArgumentError` unless the parameters of format `name` are positive integers."""
    for parameter, number in numbers.items():
        if not is_integer(number) or number < 1:
            raise ArgumentError(f"{parameter} of {name}: expected a positive integer, got {shown(number)}")


REGISTRY: dict[str, Callable[..., Format]] = {}


def register(name: str) -> Callable[[Maker], Maker]:
    """Make a format, or a function that makes one, known to `make` under a name.

    Parameters
    ----------
    name : str
        An identifier. An own format of that name is replaced, one of this package is not.

    Returns
    -------
    callable
        A decorator of a subclass of `Format`, or of a function that returns a format.

    Raises
    ------
    ArgumentTypeError
        `name` is no string, or what is decorated cannot be called.
    ArgumentError
        The name is no identifier, or belongs to a format of this package.

    Examples
    --------
    >>> from sparsetir.formats.format import REGISTRY, Format, make, register
    >>> @register("nothing")
    ... class Nothing(Format):
    ...     name = "nothing"
    >>> make("nothing")
    nothing()
    >>> del REGISTRY["nothing"]
    """
    if not isinstance(name, str):
        fault = f"name: expected the name of a format, got {type(name).__name__}"
        raise ArgumentTypeError(f'{fault}. Decorate the class with @formats.register("name").')
    if not name.isidentifier():
        raise ArgumentError(f"name: expected an identifier, got {shown(name)}. Use letters, digits and underscores.")

    def keep(maker: Maker) -> Maker:
        if not callable(maker):
            fault = f"format {name}: expected a class or a function, got {type(maker).__name__}"
            raise ArgumentTypeError(f"{fault}. Register a function that returns the format.")
        if _is_of_package(REGISTRY.get(name)) and not _is_of_package(maker):
            raise ArgumentError(
                f"name: expected a new name, got {shown(name)}, a format of this package. Choose another."
            )
        checked = checks_keywords(maker, name)
        REGISTRY[name] = checked
        return checked

    return keep


def _is_of_package(maker: Any) -> bool:
    """Return whether a class or function is defined in this package."""
    return str(getattr(maker, "__module__", "")).startswith("sparsetir.")


def make(name: str, **parameters: Any) -> Format:
    """Return the format called `name`.

    Parameters
    ----------
    name : str
        A key of `REGISTRY`.
    **parameters
        As the format's own function takes them.

    Raises
    ------
    ArgumentError
        When no format has that name.
    ArgumentTypeError
        When the format takes no such parameters, or its function returns something else.

    Examples
    --------
    >>> from sparsetir import formats
    >>> formats.make("bsr", r=4, c=2)
    bsr(r=4, c=2)
    """
    if not isinstance(name, str):
        fault = f"format: expected the name of a format, got {type(name).__name__}."
        raise ArgumentTypeError(f"{fault} Pass one such as 'csr'.")
    if name not in REGISTRY:
        raise ArgumentError(f"no format is called {shown(name)}; there are {', '.join(sorted(REGISTRY))}")
    try:
        format = REGISTRY[name](**parameters)
    except TypeError as error:
        if isinstance(error, ArgumentTypeError):
            raise
        raise ArgumentTypeError(f"format {name} takes other parameters: {error}") from error
    if not isinstance(format, Format):
        fault = f"format {name}: expected its function to return a format, got {type(format).__name__}"
        raise ArgumentTypeError(f"{fault}. Return one of sparsetir.formats.")
    return format


def row_chunks(indptr: Array, step: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that begin at a multiple of `step` and hold about as many entries as are moved at a time.

    Rows behind the last entry may be left out.
    """
    rows, nnz = len(indptr) - 1, int(indptr[-1])
    edges = np.append(indptr[:-1:step], indptr[-1])
    cuts = np.searchsorted(edges, np.arange(0, nnz, CHUNK).astype(edges.dtype))
    for begin, end in pairwise(np.unique(np.append(cuts, len(edges) - 1 if nnz else [])).astype(int)):
        yield int(begin) * step, min(int(end) * step, rows)


def row_numbers(indptr: Array) -> Iterator[tuple[slice, Array]]:
    """Yield chunks of the entries, each with the row of every entry in it."""
    nnz = int(indptr[-1])
    for begin in range(0, nnz, CHUNK):
        end = min(begin + CHUNK, nnz)
        first = int(np.searchsorted(indptr, indptr.dtype.type(begin), side="right")) - 1
        last = int(np.searchsorted(indptr, indptr.dtype.type(end)))
        edges = np.clip(indptr[first : last + 1], begin, end)
        yield slice(begin, end), np.repeat(np.arange(first, last), np.diff(edges))


def choose(mask: Array, indptr: Array) -> tuple[Array, Array]:
    """Return the indices of the entries that `mask` selects, and the row pointers of these entries."""
    index = np.empty(np.count_nonzero(mask), index_dtype(len(mask)))
    starts, done = np.empty_like(indptr), 0
    for first in range(0, len(mask), CHUNK):
        part = mask[first : first + CHUNK]
        selected = np.flatnonzero(part)
        np.add(selected, first, out=index[done : done + len(selected)], casting="same_kind")
        low, high = np.searchsorted(indptr, np.array([first, first + len(part)], indptr.dtype))
        before = np.cumsum(part, dtype=indptr.dtype)
        before += indptr.dtype.type(done) - part
        starts[low:high] = before[indptr[low:high] - first]
        done += len(selected)
    starts[np.searchsorted(indptr, indptr.dtype.type(len(mask))) :] = done
    return index, starts


def subset(entries: Entries, mask: Array) -> tuple[Entries, Array | None]:
    """Return the entries that `mask` selects, and their indices in `entries` (None if it selects all)."""
    if mask.all():
        return entries, None
    index, indptr = choose(mask, entries.indptr)
    return Entries.of_rows(entries.shape, indptr, take(entries.last, index)), index


def strided(begin: Array, starts: Array, step: int, count: int) -> Array:
    """Return the slots of runs: element k of run r is at ``begin[r] + step * (k - starts[r])``, all below `count`."""
    dtype = index_dtype(count)
    # differences may leave the dtype, but wrap around to where they belong
    shift = begin - step * starts[:-1].astype(np.int64)
    out = np.repeat(shift.astype(dtype), np.diff(starts))
    for first in range(0, len(out), CHUNK):
        part = out[first : first + CHUNK]
        part += (step * np.arange(first, first + len(part))).astype(dtype)
    return out


def padded(count: int, absent: int, idtype: str, slots: Array, columns: Array, entries: Array | None = None) -> Array:
    """Return `count` indices that are `absent` except at `slots`, which hold the columns (of these entries)."""
    out = np.full(count, absent, idtype)
    for begin in range(0, len(slots), CHUNK):
        part = slice(begin, begin + CHUNK)
        out[slots[part]] = columns[part] if entries is None else columns[entries[part]]
    return out


def lengths_of(entries: Entries) -> Array:
    """Return the number of entries of each row."""
    return np.diff(entries.indptr).astype(np.int64, copy=False)


__all__ = [
    "REGISTRY",
    "Array",
    "CapacityError",
    "Entries",
    "Format",
    "Packed",
    "check_idtype",
    "check_positive",
    "choose",
    "lengths_of",
    "make",
    "padded",
    "register",
    "row_chunks",
    "row_numbers",
    "strided",
    "subset",
]
