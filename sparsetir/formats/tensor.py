# SPDX-License-Identifier: Apache-2.0
"""`SparseTensor`: a sparse tensor of any order in a format, and its export."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats import binsparse
from sparsetir.formats import encoding as encodings
from sparsetir.formats import format as limits
from sparsetir.formats.base import FormatRewriteRule
from sparsetir.formats.encoding import Encoding
from sparsetir.formats.format import Array, CapacityError, Entries, Format, Packed, check_idtype, make
from sparsetir.formats.operators import Operators
from sparsetir.formats.origin import Origin, open_dense, open_origin
from sparsetir.interop import (
    CooTensor,
    aligned_contiguous,
    array_of_numbers,
    compressed_of,
    coordinates_of,
    is_half,
    is_sparse,
)
from sparsetir.interop import to_torch as as_torch
from sparsetir.interop.arrays import index_array
from sparsetir.interop.sources import CompressedSource, Coordinates, Source, check_numbers, is_torch, whole_sizes
from sparsetir.io import read
from sparsetir.io.stores import is_open
from sparsetir.utils.arguments import as_flag, as_mapping, as_path, shown
from sparsetir.utils.caches import cached_property
from sparsetir.utils.memory import MemoryLimitError, readable

# One piece of a tensor as it is stored.


@dataclass(frozen=True, eq=False)
class Piece:
    """One piece of a tensor.

    Parameters
    ----------
    rule : FormatRewriteRule
        Its axes, as a program sees them.
    packed : Packed
        Its index arrays and sizes, by the names in the rule's description.
    values : ndarray, shape (packed.count,)
        What its buffer holds, padding included.
    """

    rule: FormatRewriteRule
    packed: Packed
    values: Array

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def arrays(self) -> dict[str, Array]:
        return self.packed.arrays

    @property
    def sizes(self) -> dict[str, int]:
        return self.packed.sizes

    @property
    def nnz(self) -> int:
        """Entries held."""
        return self.packed.size

    @property
    def nbytes(self) -> int:
        """Bytes of the values and the index arrays."""
        return self.values.nbytes + sum(a.nbytes for a in self.arrays.values())

    @property
    def padding(self) -> float:
        """Fraction of the stored values that are no entry."""
        return 1 - self.nnz / self.packed.count if self.packed.count else 0.0

    @property
    def layout(self) -> str:
        """Axes and sizes in a line."""
        axes = ", ".join(f"{axis.name}: {axis.kind}" for axis in self.rule.buffer.axes)
        return f"[{axes}] " + ", ".join(f"{name}={n}" for name, n in self.sizes.items())

    def __repr__(self) -> str:
        return f"{self.name} {self.layout}; {amounts(self.nnz, self.padding, self.nbytes)}"


def amounts(nnz: int, padding: float, nbytes: int) -> str:
    """Describe the stored amounts in words."""
    return f"{nnz} entries, {padding:.0%} padding, {readable(nbytes)}"


# Tensors handed to other libraries.


SCIPY = ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")
SHARED = ("bsr", "coo", "csc", "csr")


def to_scipy(tensor: SparseTensor, format: str | None, *, copy: bool) -> Any:
    """Return the tensor as a scipy.sparse array."""
    if format is not None and (not isinstance(format, str) or format not in SCIPY):
        raise ArgumentError(f"scipy has the formats {', '.join(SCIPY)}, got {shown(format)}")
    if tensor.ndim != 2:
        if format not in (None, "coo"):
            fault = f"scipy stores {format} as a matrix, the tensor has {tensor.ndim} dimensions"
            raise ArgumentError(f"{fault}: pass format='coo'")
        return _coordinates(tensor.coords, tensor.values, tensor.shape, copy)
    own_format = tensor.format.name
    if own_format in SHARED and format in (None, own_format) and not (own_format == "bsr" and _sticks_out(tensor)):
        return _same_layout(tensor, copy)
    if format == "bsr" and own_format == "bsr":
        shape, block = tensor.shape, tensor.format.parameters
        fault = f"blocks of {block['r']} x {block['c']} do not divide {shape[0]} x {shape[1]}"
        raise ArgumentError(f"scipy wants blocks that divide the shape, but {fault}: leave format out")
    if format in ("csc", "coo") and is_half(tensor):
        return _same_layout(tensor.convert(format), copy=False)
    if format == "coo" and own_format == "dcsr":  # which may have too many rows for pointers
        return _coordinates(tensor.coords, tensor.values, tensor.shape, copy)
    csr = tensor if own_format == "csr" else tensor.convert("csr")
    return _same_layout(csr, copy and own_format == "csr").asformat(format or "csr")


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


UNCHECKED = {"check_invariants": False}  # said by name, because torch warns where it is not


def to_torch(tensor: SparseTensor) -> Any:
    """Return the tensor as a torch sparse tensor."""
    torch = importlib.import_module("torch")
    if tensor.ndim != 2 or tensor.format.name == "coo":
        coords = np.stack([c.astype(np.int64) for c in tensor.coords])
        values = as_torch(tensor.values.copy())
        return torch.sparse_coo_tensor(as_torch(coords), values, tensor.shape, is_coalesced=True, **UNCHECKED)
    own_format = tensor.format.name
    is_same = own_format in ("csr", "csc") or (own_format == "bsr" and not _sticks_out(tensor))
    tensor = tensor if is_same else tensor.convert("csr")
    piece, name = tensor.pieces[0], tensor.format.name
    values = piece.values
    if name == "bsr":
        values = values.reshape(-1, tensor.format.parameters["r"], tensor.format.parameters["c"])
    indptr, indices, values = (as_torch(a.copy()) for a in (piece.arrays["indptr"], piece.arrays["indices"], values))
    layout = getattr(torch, f"sparse_{name}")
    return torch.sparse_compressed_tensor(indptr, indices, values, size=tensor.shape, layout=layout, **UNCHECKED)


# `SparseTensor`: a sparse tensor of any order, held in a format.


MIN_HYPERSPARSE = 1 << 27  # rows, of which pointers take a gigabyte
ROWS_AN_ENTRY = 16  # from which on pointers outweigh the entries


def is_hypersparse(shape: Sequence[int], count: int) -> bool:
    """Return whether pointers along a dimension would outweigh so many entries by far."""
    longest = max(shape, default=0)
    return longest >= MIN_HYPERSPARSE and longest > ROWS_AN_ENTRY * count


@dataclass(frozen=True, eq=False, repr=False)
class SparseTensor(Operators):
    """A sparse tensor of any order, held in a format.

    Make one with `from_any` or a constructor for a class of arguments. It stands wherever a kernel takes a sparse
    argument.

    Parameters
    ----------
    format : Format
        With everything chosen.
    pieces : tuple of Piece
        One for each rule of the format.
    origin : Origin
        The argument it was made of.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> csr = sp.csr_array(np.array([[1, 2, 0, 0], [0, 3, 0, 0], [0, 0, 0, 4]], "float32"))
    >>> t = sparsetir.SparseTensor.from_scipy(csr, format="bsr", r=2, c=2)
    >>> t
    SparseTensor 3 x 4 float32 as bsr(r=2, c=2): 4 entries, 50% padding, 52 bytes
      [IO: dense_fixed, JO: sparse_variable, II: dense_fixed, JI: dense_fixed] mb=2, nb=2, nnzb=2
    >>> t.convert("ell").restore().toarray().tolist() == csr.toarray().tolist()
    True
    """

    format: Format
    pieces: tuple[Piece, ...]
    origin: Origin

    # ------------------------------------------------------------------ made of other things

    @classmethod
    def from_any(
        cls,
        value: Any,
        format: str | Format | None = None,
        *,
        idtype: str | None = None,
        check: bool = True,
        **parameters: Any,
    ) -> SparseTensor:
        """Store a sparse tensor of any class.

        Parameters
        ----------
        value : object
            A scipy.sparse array or matrix, a torch sparse tensor, an object with coords, values and shape, one with
            ``__binsparse__``, a dense ndarray, the path of a file, a backed matrix of anndata, or a `SparseTensor`.
        format : str or Format, optional
            A name that `formats.make` knows, an encoding as `sparsetir.format` takes it, or a format; csr for a matrix
            and csf for anything else by default, dcsr for a matrix with far more rows than entries.
        idtype : {"int32", "int64"}, optional
            Of the index arrays. By default that of the argument's own, and int64 where a dimension or the number of
            stored values needs it.
        check : bool
            False trusts the index arrays, and those of a compressed argument to be sorted and free of duplicates.
        **parameters
            Of the format called by its name.

        Returns
        -------
        SparseTensor
            Shares the argument's arrays where its layout is the format's. Entries with the same coordinates are
            added up; entries that hold zero stay entries.

        Raises
        ------
        ArgumentTypeError
            When the class of `value` is not supported.
        ArgumentError
            When the format or its parameters do not fit.
        StructureError
            When the argument's index arrays are broken, or `idtype` cannot hold what the format stores.
        MemoryLimitError
            When what the format stores does not fit into memory; it is a `StructureError` and a `MemoryError`.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, sparsetir
        >>> csr = sp.csr_array(np.eye(3))
        >>> t = sparsetir.SparseTensor.from_any(csr, "csr")
        >>> np.shares_memory(t.pieces[0].values, csr.data)
        True
        """
        check = as_flag(check, "check")
        if isinstance(value, SparseTensor):
            return value.convert(value.format if format is None else format, idtype=idtype, **parameters)
        if isinstance(value, (str, Path)) or is_open(value):
            return cls.from_any(read(value), format, idtype=idtype, check=check, **parameters)
        if isinstance(value, np.ndarray):
            return cls.from_dense(value, format, idtype=idtype, **parameters)
        if not is_sparse(value) and hasattr(value, "__binsparse_descriptor__"):
            return cls.from_binsparse(value, format=format, idtype=idtype, check=check, **parameters)
        return cls._store(open_origin(value, check=check), format, idtype, parameters)

    @classmethod
    def from_entries(cls, value: Any, format: Format, *, check: bool) -> SparseTensor:
        """Store the entries of a sparse object in its own order; of a `SparseTensor`, `restore` makes one again."""
        return cls._store(open_origin(value, check=check), format, format.index_type, {})

    @classmethod
    def from_scipy(cls, value: Any, format: str | Format | None = None, **options: Any) -> SparseTensor:
        """`from_any` of a scipy.sparse array or matrix."""
        if not sp.issparse(value):
            raise ArgumentTypeError(f"expected a scipy.sparse array or matrix, got {type(value).__name__}")
        return cls.from_any(value, format, **options)

    @classmethod
    def from_torch(cls, value: Any, format: str | Format | None = None, **options: Any) -> SparseTensor:
        """`from_any` of a torch sparse tensor of any layout."""
        if not is_torch(value) or not is_sparse(value):
            raise ArgumentTypeError(f"expected a torch sparse tensor, got {type(value).__name__}")
        return cls.from_any(value, format, **options)

    @classmethod
    def from_file(cls, path: str | Path, format: str | Format | None = None, **options: Any) -> SparseTensor:
        """`from_any` of a file that `sparsetir.read` reads (.mtx, .npz, .smtx, .tns)."""
        return cls.from_any(as_path(path, "path"), format, **options)

    @classmethod
    def from_coo(
        cls, coords: Any, values: Any, shape: Sequence[int], format: str | Format | None = None, **options: Any
    ) -> SparseTensor:
        """`from_any` of a list of coordinates, shape (order, nnz), in any order, with their values, shape (nnz,)."""
        coords = array_of_numbers(coords, "coords")
        coords = coords.astype("int32") if coords.size == 0 else coords
        tensor = CooTensor(coords, array_of_numbers(values, "values"), whole_sizes(shape, "shape"))
        return cls.from_any(tensor, format, **options)

    @classmethod
    def from_dense(
        cls,
        array: Any,
        format: str | Format | None = None,
        *,
        idtype: str | None = None,
        **parameters: Any,
    ) -> SparseTensor:
        """Store the nonzero elements of a dense array of any order; `restore` makes a dense array again."""
        return cls._store(open_dense(array), format, idtype, parameters)

    @classmethod
    def from_binsparse(
        cls,
        descriptor: Any,
        arrays: dict[str, Any] | None = None,
        format: str | Format | None = None,
        **options: Any,
    ) -> SparseTensor:
        """Store a tensor that follows the Binsparse specification, version 0.1.

        Parameters
        ----------
        descriptor : dict or object
            The descriptor, or an object that has ``__binsparse_descriptor__`` and ``__binsparse__``.
        arrays : dict of str to array
            The arrays by the specification's names, with a descriptor.
        format, **options
            As for `from_any`; by default the format of the descriptor.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> t = sparsetir.SparseTensor.from_dense(np.eye(2), format="dcsr")
        >>> again = sparsetir.SparseTensor.from_binsparse(t.__binsparse_descriptor__(), t.__binsparse__())
        >>> again.format, again.to_dense().tolist()
        (dcsr(), [[1.0, 0.0], [0.0, 1.0]])
        """
        if not isinstance(descriptor, dict):
            if isinstance(descriptor, type) or not hasattr(descriptor, "__binsparse_descriptor__"):
                fault = f"expected a dict or an object with __binsparse_descriptor__, got {shown(descriptor)}"
                raise ArgumentTypeError(f"descriptor: {fault}. Pass one of the two.")
            descriptor, arrays = descriptor.__binsparse_descriptor__(), descriptor.__binsparse__()
        value, own_format = binsparse.decode(
            descriptor, {} if arrays is None else as_mapping(arrays, "arrays", "arrays by their names")
        )
        return cls.from_any(value, own_format if format is None else format, **options)

    @classmethod
    def _store(
        cls,
        origin: Origin,
        format: str | Format | None,
        idtype: str | None,
        parameters: dict[str, Any],
        before: SparseTensor | None = None,
    ) -> SparseTensor:
        """Pack the entries of `origin`, with the values of the tensor `before` if there is one."""
        check_idtype(idtype)
        shape = origin.source.shape
        if format is None and len(shape) == 2 and is_hypersparse(shape[:1], origin.source.values.size):
            format = "dcsr"
        chosen = _named(format, len(shape), parameters)
        chosen = chosen.with_idtype(idtype) if idtype else chosen
        fixed, origin_idtype = chosen.idtype, origin.idtype if before is None else before.idtype
        first = fixed or ("int64" if _is_large(*shape, origin.source.values.size) else origin_idtype)
        if fixed == "int32" and _is_large(*shape):
            extents = " x ".join(map(str, shape))
            raise CapacityError(f"int32 indices cannot count the dimensions {extents}: leave idtype out")
        values = None if before is None else before.values
        try:
            return cls._packed(origin, values, chosen, first)
        except CapacityError:
            if fixed is not None or first == "int64":
                raise
            return cls._packed(origin, values, chosen, "int64")

    @classmethod
    def _packed(cls, origin: Origin, values: Array | None, format: Format, idtype: str) -> SparseTensor:
        requested, format = format, format.resolve(len(origin.source.shape), idtype)
        filled = format.borrow(origin.source, origin.slots) if values is None and origin.is_ordered else None
        if filled is None:
            try:
                filled = format.fill(origin.entries, origin.values() if values is None else values)
            except MemoryLimitError as error:
                raise _does_not_fit(origin, requested, error) from None
        for packed, _ in filled:
            format.check_count(packed.count)
        pieces = zip(format.rules, filled, strict=True)
        return cls(format, tuple(Piece(rule, packed, flat.reshape(-1)) for rule, (packed, flat) in pieces), origin)

    # ------------------------------------------------------------------ properties

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.origin.source.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pieces[0].values.dtype if self.pieces else self.origin.source.values.dtype

    @property
    def idtype(self) -> str:
        """Dtype of the index arrays."""
        return self.format.index_type

    @property
    def nnz(self) -> int:
        """Entries, those that hold zero too; entries with the same coordinates count once."""
        return sum(piece.nnz for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of all values and index arrays of the pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def padding(self) -> float:
        """Fraction of the stored values that are no entry."""
        stored = sum(piece.packed.count for piece in self.pieces)
        return 1 - self.nnz / stored if stored else 0.0

    @property
    def entries(self) -> Entries:
        """The structure apart from the format."""
        return self.origin.entries

    @cached_property
    def coords(self) -> tuple[Array, ...]:
        """Coordinates of the entries in lexicographic order, one array for each dimension."""
        return self.entries.coords

    @cached_property
    def values(self) -> Array:
        """Value of each entry in the order of `coords`; the piece's own array where that is its order.

        Elsewhere, as in compressed columns, it is a read-only copy: pass new values to `with_values`.
        """
        arrays = [piece.values for piece in self.pieces]
        values = self._entry_values(arrays)
        if not any(values is array for array in arrays):
            values.flags.writeable = False
        return values

    @cached_property
    def compressed(self) -> Any:
        """scipy's object around the arrays of a matrix in compressed rows or columns; None in other formats."""
        kind = {"csr": sp.csr_array, "csc": sp.csc_array}.get(self.format.name)
        if kind is None or len(self.shape) != 2:
            return None
        piece = self.pieces[0]
        return compressed_of(kind, piece.arrays["indptr"], piece.arrays["indices"], piece.values, self.shape)

    @property
    def scipy_matrix(self) -> Any:
        """`compressed`, as scipy's functions take it: in order, with distinct coordinates.

        None of other matrices, and of numbers that scipy does not know, such as floats of 16 or 8 bits.
        """
        matrix = None if is_half(self) or self.dtype.isbuiltin == 2 else self.compressed
        if matrix is None or not self._is_canonical:
            return None
        matrix.has_canonical_format = True
        return matrix

    @cached_property
    def _is_canonical(self) -> bool:
        return bool(self.compressed.has_canonical_format)

    def as_source(self) -> Source:
        """Return the entries in order, as `interop` opens an argument; a matrix by rows."""
        rebuild = lambda values, _: self.with_values(values)  # noqa: E731
        if self.ndim == 2 and not is_hypersparse(self.shape[:1], self.nnz):
            return CompressedSource(self.shape, self.values, rebuild, self.entries.indptr, self.entries.last, 0)
        return Coordinates(self.shape, self.values, rebuild, self.coords)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        stored_amounts = amounts(self.nnz, self.padding, self.nbytes)
        head = f"SparseTensor {shape} {self.dtype} as {self.format!r}: {stored_amounts}"
        lines = [self.pieces[0].layout] if len(self.pieces) == 1 else map(repr, self.pieces)
        return "\n  ".join([head, *lines])

    def encoding(self) -> Encoding:
        """Return the encoding of the format: `str` of it is short, ``.mlir`` as MLIR writes it.

        Raises
        ------
        ArgumentError
            When the format has no encoding.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> t = sparsetir.SparseTensor.from_dense(np.eye(4), format="csc")
        >>> print(t.encoding())
        (d0, d1) -> (d1 : dense, d0 : compressed), posWidth = 32, crdWidth = 32
        """
        return encodings.encoding_of(self.format)

    # ------------------------------------------------------------------ other values, other formats

    def with_values(self, values: Array | Sequence[Array]) -> SparseTensor:
        """Return the same structure with other values.

        Parameters
        ----------
        values : sequence of ndarray, or ndarray
            One array for each piece, laid out like the piece's values: a kernel's output over its buffer. What lies
            in padding is dropped. Or a single ndarray, shape (nnz,), in the order of `coords`.

        Returns
        -------
        SparseTensor
            Shares the index arrays, and the values of pieces without padding.
        """
        if isinstance(values, np.ndarray):
            return self._with_entry_values(self._checked(values, self.nnz, "entries"))
        flat = self._flat(values)
        if all(piece.packed.size == piece.packed.count for piece in self.pieces):
            pieces = [replace(piece, values=v) for piece, v in zip(self.pieces, flat, strict=True)]
            return SparseTensor(self.format, tuple(pieces), self.origin)
        return self._with_entry_values(self._entry_values(flat))

    def convert(self, format: str | Format, *, idtype: str | None = None, **parameters: Any) -> SparseTensor:
        """Convert the tensor to another format; `restore` still returns the class of the original argument.

        Parameters
        ----------
        format, idtype, **parameters
            As for `from_any`.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> t = sparsetir.SparseTensor.from_dense(np.eye(4))
        >>> t.convert("ell", width=2).padding
        0.5
        """
        return SparseTensor._store(self.origin, format, idtype, parameters, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SparseTensor.from_any, (self.restore(), self.format)

    def restore(self, values: Sequence[Array] | Array | None = None) -> Any:
        """Return an object of the argument's class, with its entries in the argument's order.

        Parameters
        ----------
        values : sequence of ndarray, or ndarray, optional
            As for `with_values`; by default the tensor's own. Any dtype.

        Returns
        -------
        object
            Of entries with the same coordinates, which were added up, the first holds the sum and the others zero.
            It shares no index array with the argument, and values only with what was passed here.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, sparsetir
        >>> csc = sp.csc_array(np.array([[0, 1.0], [2.0, 3.0]]))
        >>> t = sparsetir.SparseTensor.from_any(csc, "bsr", r=2)
        >>> tripled = t.restore([3 * t.pieces[0].values])
        >>> type(tripled).__name__, tripled.data.tolist()
        ('csc_array', [6.0, 3.0, 9.0])
        """
        if values is None:
            return self.origin.give_back(self.values.copy())
        if isinstance(values, np.ndarray):
            entries = self._checked(values, self.nnz, "entries")
        else:
            entries = self._entry_values(self._flat(values))
        return self.origin.give_back(entries)

    def restore_as(self, source: Source, values: Sequence[Array]) -> Any:
        """Return an object of the class of `source`, whose structure is that of the argument, with other values.

        Parameters
        ----------
        source : Source
            Of an argument that lists its entries as the argument of this tensor did.
        values : sequence of ndarray
            One array for each piece, as for `with_values`.
        """
        return self.origin.give_back(self._entry_values(self._flat(values)), source=source)

    # ------------------------------------------------------------------ made into other things

    def to_coo(self) -> CooTensor:
        """Return a `CooTensor` with the entries in order."""
        return CooTensor(np.stack([index_array(c, self.idtype) for c in self.coords]), self.values, self.shape)

    def to_dense(self) -> Array:
        """Return an ndarray of the same shape."""
        if (matrix := self.scipy_matrix) is not None:
            return np.asarray(matrix.toarray(order="C"))
        dense = np.zeros(self.shape, self.dtype)
        np.add.at(dense, tuple(self.coords), self.values)
        return dense

    def to_scipy(self, format: str | None = None, *, copy: bool = True) -> Any:
        """Return a scipy.sparse array.

        Parameters
        ----------
        format : str, optional
            As scipy calls it. By default csr, csc, bsr or coo where the tensor has that format, else csr for a matrix
            (coo for one with far more rows than entries); a tensor of another order can only be coo.
        copy : bool
            False shares the tensor's arrays where the layout is the same; scipy changes index arrays in place.
        """
        listed = self.ndim == 2 and self.format.name == "dcsr" and is_hypersparse(self.shape[:1], self.nnz)
        return to_scipy(self, "coo" if listed and format is None else format, copy=as_flag(copy, "copy"))

    def to_torch(self) -> Any:
        """Return a torch sparse tensor: csr, csc, bsr or coo as `to_scipy` chooses. Shares no memory with this one."""
        return to_torch(self)

    def __binsparse_descriptor__(self) -> dict[str, Any]:
        """Return the descriptor of `__binsparse__` by the Binsparse specification, version 0.1."""
        return binsparse.encode(self)[0]

    def __binsparse__(self) -> dict[str, Array]:
        """Return the arrays by the names of the Binsparse specification; they are the tensor's own."""
        return binsparse.encode(self)[1]

    # ------------------------------------------------------------------ entries and pieces

    def _flat(self, values: Any) -> list[Array]:
        if not isinstance(values, (list, tuple, np.ndarray)) or (isinstance(values, np.ndarray) and not values.ndim):
            fault = f"values: expected an array for each of the {len(self.pieces)} pieces, got {shown(values)}."
            raise ArgumentTypeError(f"{fault} Pass a list of arrays, or one array with a value for each entry.")
        if len(values) != len(self.pieces):
            raise ArgumentError(f"expected values for {len(self.pieces)} pieces, got {len(values)}")
        return [
            self._checked(v, p.packed.count, f"values in piece {p.name}")
            for v, p in zip(values, self.pieces, strict=True)
        ]

    def _checked(self, values: Any, size: int, what: str) -> Array:
        array = aligned_contiguous(values)[0]
        if array.dtype.kind not in "biufc":
            check_numbers(array, "values")
        if array.size != size:
            raise ArgumentError(f"expected {size} {what}, got an array of shape {array.shape}")
        return array.reshape(-1)

    def _entry_values(self, flat: Sequence[Array]) -> Array:
        if len(flat) == 1 and self.pieces[0].packed.is_plain:
            return flat[0]
        out = np.zeros(self.nnz, np.result_type(*flat) if len(flat) > 1 else flat[0].dtype)
        for piece, values in zip(self.pieces, flat, strict=True):
            piece.packed.gather(values, out)
        return out

    def _with_entry_values(self, values: Array) -> SparseTensor:
        pieces = [replace(piece, values=piece.packed.values(values)) for piece in self.pieces]
        return SparseTensor(self.format, tuple(pieces), self.origin)


def _named(format: str | Format | None, ndim: int, parameters: dict[str, Any]) -> Format:
    if isinstance(format, Format):
        if parameters:
            raise ArgumentError(f"{format!r} has its parameters; {', '.join(parameters)} go with the name of a format")
        return format
    if format is not None and not isinstance(format, str):
        fault = f"format: expected a name, an encoding or a Format, got {type(format).__name__}."
        raise ArgumentTypeError(f"{fault} Pass one such as 'csr' or formats.csr().")
    if format is not None and "->" in format:
        return encodings.format(format)
    return make(format or ("csr" if ndim == 2 else "csf"), **parameters)


def _does_not_fit(origin: Origin, format: Format, error: MemoryLimitError) -> MemoryLimitError:
    shape, nnz = " x ".join(map(str, origin.source.shape)), origin.source.values.size
    fault = f"cannot store {shape} with {nnz} entries as {format!r}: {error}"
    return MemoryLimitError(f"{fault}; take a format that stores less besides the entries, such as dcsr or coo")


def _is_large(*numbers: int) -> bool:
    return max(numbers) >= limits.INT32_END


__all__ = ["MIN_HYPERSPARSE", "Piece", "SparseTensor", "amounts", "is_hypersparse", "to_scipy", "to_torch"]
