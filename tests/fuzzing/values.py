# SPDX-License-Identifier: Apache-2.0
"""Operands of a case: stored entries, the class that holds them, and the source text that makes the same object.

A `Value` is immutable and small. It is made into an object for each run, printed in a stand-alone script, and reduced
one property at a time by the minimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
DENSE = ("numpy", "torch")
LAYOUTS = ("plain",) * 8 + ("columns", "strided", "unaligned", "readonly")
#: mantissa bits: whole numbers up to this are exact
EXACT = {"float16": 2.0**11, "bfloat16": 2.0**8, "float32": 2.0**24, "float64": 2.0**53}
EXACT |= {"complex64": 2.0**24, "complex128": 2.0**53}
#: classes that store zeros beside the entries, which products may multiply
PADDED = ("bsr_array", "dia_array")
#: text of a script that makes an object of dense contents, coordinates, data and shape
PRELUDE = '''
import numpy as np, scipy.sparse as sp, sparsetir
import ml_dtypes
from numpy import inf, nan

def csr(kind, data, rows, columns, shape, idtype):
    """A compressed matrix that keeps the order of its entries and repeated ones."""
    major, minor = (rows, columns) if "csr" in kind else (columns, rows)
    length = shape[0] if "csr" in kind else shape[1]
    order = np.argsort(major, kind="stable")
    made = getattr(sp, kind)(shape, dtype=data.dtype)
    made.data, made.indices = data[order], minor[order].astype(idtype)
    made.indptr = np.concatenate([[0], np.cumsum(np.bincount(major, minlength=length))]).astype(idtype)
    return made

def laid_out(array, layout):
    """The array in another layout."""
    if layout == "columns":
        return np.asfortranarray(array)
    if layout == "strided":
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]
    if layout == "unaligned":
        moved = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        moved[...] = array
        return moved
    array.flags.writeable = layout != "readonly"
    return array

def torch_of(array):
    """A torch tensor of an array, bfloat16 too."""
    import torch
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(array.copy())

def stored(kind, data, coords, shape, idtype, block):
    """A sparse object with these entries."""
    if kind.startswith(("csr", "csc")):
        return csr(kind, data, coords[0], coords[1], shape, idtype)
    if kind.startswith("SparseTensor "):
        tensor = sparsetir.CooTensor(coords, data, shape)
        return sparsetir.SparseTensor.from_any(tensor, kind.partition(" ")[2], idtype=idtype)
    if kind == "CooTensor":
        return sparsetir.CooTensor(coords, data, shape)
    if kind.startswith("torch"):
        import torch
        whole = torch.sparse_coo_tensor(torch.from_numpy(coords.copy()), torch_of(data), shape, check_invariants=False)
        return whole if kind == "torch_coo" else whole.to_sparse_csr() if kind == "torch_csr" else whole.to_sparse_csc()
    coo = sp.coo_array((data, tuple(coords)), shape=shape)
    return sp.bsr_array(coo, blocksize=block) if kind == "bsr_array" else coo.asformat(kind.partition("_")[0])
'''
_MADE: dict[str, Any] = {}


def helpers() -> dict[str, Any]:
    """The functions of the prelude, compiled once."""
    if not _MADE:
        exec(compile(PRELUDE, "<prelude>", "exec"), _MADE)
    return dict(_MADE)


@dataclass(frozen=True, eq=False)
class Value:
    """An operand.

    Parameters
    ----------
    kind : str
        The class that holds it: numpy, torch, or a sparse one.
    data : ndarray
        All elements of a dense operand, the entries of a sparse one.
    letters : str
        The name of the size of each dimension; those with one name shrink together.
    coords : ndarray, optional
        Of a sparse operand, ``[order, nnz]``.
    shape : tuple of int
    """

    kind: str
    data: Array
    letters: str
    shape: tuple[int, ...]
    coords: Array | None = None
    idtype: str = "int32"
    layout: str = "plain"
    block: tuple[int, int] = (1, 1)

    @property
    def is_sparse(self) -> bool:
        return self.coords is not None

    @property
    def dtype(self) -> str:
        return str(self.data.dtype)

    def make(self) -> Any:
        """A new object."""
        tools = helpers()
        if self.coords is not None:
            return tools["stored"](self.kind, self.data.copy(), self.coords, self.shape, self.idtype, self.block)
        array = tools["laid_out"](self.data.copy(), self.layout)
        return tools["torch_of"](array) if self.kind == "torch" else array

    def source(self) -> str:
        """The expression that makes it in a script."""
        if self.coords is not None:
            coords = f"np.array({self.coords.tolist()}, 'int64').reshape({len(self.shape)}, -1)"
            rest = f"{self.shape}, {self.idtype!r}, {self.block}"
            return f"stored({self.kind!r}, {literal(self.data)}, {coords}, {rest})"
        text = literal(self.data)
        text = text if self.layout == "plain" else f"laid_out({text}, {self.layout!r})"
        return f"torch_of({text})" if self.kind == "torch" else text

    def dense(self) -> tuple[Array, Array]:
        """All elements, repeated entries added up in the operand's dtype, and where something is stored."""
        if self.coords is None:
            return self.data, np.ones(self.shape, bool)
        whole, mask = np.zeros(self.shape, self.data.dtype), np.zeros(self.shape, bool)
        with np.errstate(all="ignore"):
            for at, number in zip(self.coords.T.tolist(), self.data, strict=True):
                place = tuple(at)
                whole[place] = whole[place] + number if mask[place] else number
                mask[place] = True
        return whole, mask

    def sizes(self) -> Array:
        """The sums of the absolute values of entries with one coordinate, which bound what their sum rounds."""
        if self.coords is None or not self.has_repeats():
            return np.abs(self.dense()[0])
        whole = np.zeros(self.shape, np.float64)
        with np.errstate(all="ignore"):
            np.add.at(whole, tuple(self.coords), np.abs(self.data).astype(np.float64))
        return whole

    def has_repeats(self) -> bool:
        """Return whether two entries have the same coordinates."""
        return self.coords is not None and len(np.unique(self.coords, axis=1).T) < self.coords.shape[1]

    # ------------------------------------------------------------------ reduction

    def smaller(self) -> Iterator[Value]:
        """Values with one property less; sizes are shared with others and stay."""
        if self.is_sparse:
            for part in parts(len(self.data)):
                yield self._without(part)
        if self.layout != "plain":
            yield replace(self, layout="plain")
        if self.is_sparse and self.kind != "csr_array" and len(self.shape) == 2:
            yield replace(self, kind="csr_array", block=(1, 1))
        if self.kind == "torch":
            yield replace(self, kind="numpy")
        if self.idtype != "int32":
            yield replace(self, idtype="int32")
        yield from self._plainer()

    def cast(self, dtype: str) -> Value:
        """The value in another dtype."""
        with np.errstate(all="ignore"):
            return replace(self, data=self.data.astype(dtype))

    def _without(self, part: slice) -> Value:
        kept = np.ones(len(self.data), bool)
        kept[part] = False
        assert self.coords is not None
        return replace(self, data=self.data[kept], coords=self.coords[:, kept])

    def _plainer(self) -> Iterator[Value]:
        """Values with plainer numbers: all ones, or one of them."""
        flat = self.data.reshape(-1)
        one = np.ones((), self.data.dtype)
        odd = np.flatnonzero(np.array([bool(n != one) for n in flat], bool))
        for part in parts(len(odd)):
            changed = flat.copy()
            changed[odd[part]] = one
            yield replace(self, data=changed.reshape(self.data.shape))

    def cut(self, letter: str, at: int) -> Value:
        """The value without one coordinate along each dimension of this name."""
        made = self
        for axis, own in enumerate(self.letters):
            if own == letter and made.shape[axis] > 1:
                made = made._cut(axis, at)
        return made

    def _cut(self, axis: int, at: int) -> Value:
        shape = tuple(n - (d == axis) for d, n in enumerate(self.shape))
        if self.coords is None:
            return replace(self, data=np.ascontiguousarray(np.delete(self.data, at, axis)), shape=shape)
        kept = self.coords[axis] != at
        coords = self.coords[:, kept].copy()
        coords[axis] -= coords[axis] > at
        return replace(self, data=self.data[kept], coords=coords, shape=shape)


def parts(count: int) -> Iterator[slice]:
    """Halves, quarters and single ones of so many."""
    size = count
    while size:
        yield from (slice(start, start + size) for start in range(0, count, size))
        size = size // 2 if size <= 16 or size >= 4 else 0


def literal(array: Array) -> str:
    """An array as an expression."""
    if array.dtype == ml_dtypes.bfloat16:
        return f"np.array({array.astype(np.float64).tolist()}).astype(ml_dtypes.bfloat16)"
    text = f"np.array({array.tolist()}, {str(array.dtype)!r})"
    return text if array.size else f"np.zeros({array.shape}, {str(array.dtype)!r})"


# ---------------------------------------------------------------------------------------------- drawing


def numbers(rng: Random, shape: tuple[int, ...], dtype: str, style: str) -> Array:
    """Numbers of a style: ``whole`` are small integers, ``real`` are normal, ``special`` are not all finite."""
    draw = np.random.default_rng(rng.randrange(1 << 62))
    kind = np.dtype(dtype).kind
    if kind == "b":
        return draw.random(shape) < 0.7
    if style == "real" and kind not in "iu":
        made = draw.standard_normal(shape)
        return (made + 1j * draw.standard_normal(shape) if kind == "c" else made).astype(dtype)
    made = draw.integers(0 if kind == "u" else -3, 4, shape)
    if kind == "c":
        return (made + 1j * draw.integers(-3, 4, shape)).astype(dtype)
    made = np.array(made).astype(dtype)
    if style == "special" and kind not in "iu" and made.size:
        flat = made.reshape(-1)
        for at in draw.integers(0, flat.size, 1 + flat.size // 8):
            flat[at] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0])
    return made


def dense_value(rng: Random, letters: str, sizes: dict[str, int], dtype: str, style: str, kinds: Any = DENSE) -> Value:
    """A dense operand."""
    shape = tuple(sizes[c] for c in letters)
    return Value(
        rng.choice(kinds),
        numbers(rng, shape, dtype, style),
        letters,
        shape,
        layout=rng.choice(LAYOUTS) if letters else "plain",
    )


def serves(kind: str, dtype: str) -> bool:
    """Return whether objects of a class exist with a dtype."""
    is_half = dtype in ("float16", "bfloat16")
    return not (is_half and kind.endswith(("_array", "_matrix"))) and not (dtype == "bool" and kind.startswith("torch"))


def sparse_value(
    rng: Random, letters: str, sizes: dict[str, int], dtype: str, style: str, kinds: Any, *, repeats: bool = True
) -> Value:
    """A sparse operand: any pattern, in any order, entries with the same coordinates now and then."""
    shape = tuple(sizes[c] for c in letters)
    cells, kind = int(np.prod(shape)), rng.choice([k for k in kinds if serves(k, dtype)] or ["CooTensor"])
    share = rng.choice([0, 0.1, 0.3, 0.3, 0.6, 1])
    places = [n for n in range(cells) if rng.random() < share]
    if cells and rng.random() < 0.15:  # a full line, so that lines are of very different lengths
        places = sorted({*places, *range(shape[-1])})
    if repeats and places and rng.random() < 0.2:
        places += [rng.choice(places) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        rng.shuffle(places)
    coords = np.array(np.unravel_index(np.array(places, np.int64), shape), np.int64).reshape(len(shape), -1)
    block = rng.choice([(1, 1), (2, 2), (1, 2), (2, 1), (3, 2)])
    block = block if kind == "bsr_array" and not any(n % b for n, b in zip(shape, block, strict=True)) else (1, 1)
    data = numbers(rng, (len(places),), dtype, style)
    if kind in PADDED:
        data[data == 0] = 1  # a zero would be no entry
    return Value(kind, data, letters, shape, coords, rng.choice(["int32", "int32", "int64"]), block=block)


__all__ = [
    "DENSE",
    "EXACT",
    "PADDED",
    "PRELUDE",
    "Value",
    "dense_value",
    "helpers",
    "literal",
    "numbers",
    "parts",
    "sparse_value",
]
