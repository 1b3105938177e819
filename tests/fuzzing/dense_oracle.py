# SPDX-License-Identifier: Apache-2.0
"""Index notation over stored entries, evaluated at every point of the index space in numpy's widest types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fuzzing.case import Expected
from fuzzing.values import EXACT, Array, Value

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
EPSILON |= {"complex64": 2.0**-22, "complex128": 2.0**-51}
REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "any": np.logical_or}
REDUCE |= {"all": np.logical_and}
COMBINE = {"mul": np.multiply, "add": np.add, "max": np.maximum, "min": np.minimum, "and": np.logical_and}
COMBINE |= {"or": np.logical_or}
#: reductions of floats, with the fill that absorbs all else and changes nothing
LEFT_OUT = {("sum", "mul", 0), ("max", "add", -np.inf), ("max", "min", -np.inf)}
LEFT_OUT |= {("min", "add", np.inf), ("min", "max", np.inf)}


@dataclass
class Result:
    """A result: its elements, where a product of stored entries falls, and the sum of the sizes of its terms."""

    values: Array
    stored: Array
    size: Array
    terms: int
    dtype: str

    def expected(self) -> Expected:
        """With the slack that any order of the sums may need."""
        if self.dtype not in EPSILON:
            return Expected(wrapped(self.values, self.dtype))
        size = np.where(np.isfinite(self.size), self.size, 0)
        whole = bool((self.values[np.isfinite(self.values)] % 1 == 0).all()) if self.dtype[0] != "c" else False
        if whole and size.max(initial=0) <= EXACT[self.dtype]:
            return Expected(self.values)
        return Expected(self.values, EPSILON[self.dtype] * (self.terms + 6) * size)


def wrapped(values: Array, dtype: str) -> Array:
    """Numbers in an integer type or bool, as machine arithmetic leaves them."""
    return values.astype(dtype) if dtype == "bool" else values.astype(np.int64).astype(dtype)


def widest(dtype: str) -> type:
    kind = np.dtype(dtype).kind
    return {"c": np.complex128, "b": np.bool_, "i": np.int64, "u": np.int64}.get(kind, np.float64)


def common(values: Sequence[Value]) -> str:
    """The dtype in which operands meet; bfloat16 meets what it cannot hold as float32."""
    dtypes = [v.data.dtype for v in values]
    try:
        return str(np.result_type(*dtypes))
    except TypeError:
        return str(np.result_type(*(np.dtype("float32") if d.name == "bfloat16" else d for d in dtypes)))


def sizes_of(values: Sequence[Value], letters: Sequence[str]) -> dict[str, int]:
    return {c: n for v, own in zip(values, letters, strict=True) for c, n in zip(own, v.shape, strict=True)}


def spread(array: Array, own: str, order: str) -> Array:
    """An operand at every point of the index space; a letter that is there twice takes the diagonal."""
    distinct = "".join(dict.fromkeys(own))
    array = np.einsum(array, [ord(c) - 97 for c in own], [ord(c) - 97 for c in distinct]) if own else array
    present = [c for c in order if c in distinct]
    array = array.transpose([distinct.index(c) for c in present])
    return array[tuple(slice(None) if c in distinct else None for c in order)]


def evaluate(subscripts: str, values: Sequence[Value], dtype: str | None = None) -> Result:
    """A sum of products over what all sparse operands store."""
    left, _, kept = subscripts.partition("->")
    letters = left.split(",")
    dtype = dtype or common(values)
    order = kept + "".join(dict.fromkeys(c for c in "".join(letters) if c not in kept))
    sizes = sizes_of(values, letters)
    shape = tuple(sizes[c] for c in order)
    product: Array | None = None  # not 1: a complex 1 times infinity is not a number
    size, mask = np.ones(shape), np.ones(shape, bool)
    with np.errstate(all="ignore"):
        for value, own in zip(values, letters, strict=True):
            data, stored = value.dense()
            factor = np.broadcast_to(spread(data.astype(widest(dtype)), own, order), shape)
            product = factor if product is None else product * factor
            size = size * spread(value.sizes().astype(np.float64), own, order)
            mask &= spread(stored, own, order)
        assert product is not None
        product = np.where(mask, product, np.zeros((), product.dtype))
        axes = tuple(range(len(kept), len(order)))
        total = product.any(axis=axes) if dtype == "bool" else product.sum(axis=axes)
        size = np.where(mask, size, 0).sum(axis=axes)
    return Result(total, mask.any(axis=axes), size, int(np.prod(shape[len(kept) :], dtype=np.int64)), dtype)


def evaluate_filled(
    subscripts: str, values: Sequence[Value], reduce: str, combine: str, fill: float, result: str = "auto"
) -> Array | None:
    """Any reduction over the whole index space, what is not stored being `fill`; None where there is none.

    What is not stored is left out, whatever it meets, where that changes no result of finite numbers: in sums, and
    where a sparse result has the pattern of an operand.
    """
    left, _, kept = subscripts.partition("->")
    letters, dtype = left.split(","), common(values)
    order = kept + "".join(dict.fromkeys(c for c in "".join(letters) if c not in kept))
    sizes = sizes_of(values, letters)
    shape = tuple(sizes[c] for c in order)
    made: Array | None = None
    mask = np.ones(shape, bool)
    with np.errstate(all="ignore"):
        for value, own in zip(values, letters, strict=True):
            data, stored = value.dense()
            wide = np.where(stored, data.astype(np.float64), fill)
            part = np.broadcast_to(spread(wide, own, order), shape)
            made = part if made is None else COMBINE[combine](made, part).astype(np.float64)
            mask &= spread(stored, own, order)
        assert made is not None
        reductions = {reduce} if len(kept) < len(order) else set(REDUCE)  # of nothing, any
        if widest(dtype) is np.float64 and any((r, combine, fill) in LEFT_OUT for r in reductions):
            made = np.where(mask, made, fill)
        axes = tuple(range(len(kept), len(order)))
        if not all(shape[len(kept) :]) and reduce in ("max", "min"):
            return None
        made = REDUCE[reduce].reduce(made, axis=axes) if axes else made
        patterns = [] if (result, combine, fill) != ("auto", "mul", 0) or not kept else _patterns(values, letters, kept)
        if patterns and not all(np.isfinite(v.data.astype(np.complex128)).all() for v in values):
            if len(patterns) > 1:
                return None  # which of them the result has is open
            made = np.where(patterns[0], made, fill)
    return np.asarray(made).astype(widest(dtype))


def _patterns(values: Sequence[Value], letters: Sequence[str], kept: str) -> list[Array]:
    """Return where each sparse operand with the letters of the result stores elements."""
    like = [(v, own) for v, own in zip(values, letters, strict=True) if v.is_sparse and sorted(own) == sorted(kept)]
    return [spread(value.dense()[1], own, kept) for value, own in like]


__all__ = ["EPSILON", "Result", "common", "evaluate", "evaluate_filled", "wrapped"]
