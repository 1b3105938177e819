# SPDX-License-Identifier: Apache-2.0
"""What plans of repeated calls are made of: see `sparsetir.call.plans`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from sparsetir import alignment, interop, sizes
from sparsetir.call.arguments import Arguments, SizeOf, checks_are_on, numpy_dtype
from sparsetir.call.signature import Signature
from sparsetir.call.validation import is_sound
from sparsetir.spare import Spare

COMPRESSED = ("csr", "csc", "bsr")

Values: TypeAlias = Mapping[str, Any]


class Unfit(Exception):
    """A call is not one that a plan can make."""


@dataclass(frozen=True)
class Seen:
    """What a plan looks at in a call.

    Parameters
    ----------
    key : tuple
        What decides which plan a call takes.
    dims : tuple of int
    values : mapping of str to object
        The arguments, torch tensors as numpy arrays.
    """

    key: tuple[Any, ...]
    dims: tuple[int, ...]
    values: Values


def look(arguments: Values) -> Seen | None:
    """What a plan looks at; None where a call must take the long way."""
    key: list[Any] = []
    dims: list[int] = []
    values = arguments
    for name, value in arguments.items():
        kind, mark = type(value), None
        if kind.__name__ == "Tensor" and kind.__module__ == "torch":
            value = _torch_array(value)
            values = {**values, name: value}
            kind, mark = type(value), "torch"
        if kind is np.ndarray:
            if not value.flags.carray:  # contiguous, aligned and writeable
                return None
            key.append((name, value.ndim, value.dtype, mark))
            dims += value.shape
        elif kind is int or kind is SizeOf:
            key.append(name)
            dims.append(value)
        elif isinstance(value, (sp.sparray, sp.spmatrix)) and value.format in COMPRESSED and value.ndim == 2:
            entry = _look_at_matrix(value, dims)
            if entry is None:
                return None
            key.append((name, *entry))
        else:
            return None
    return Seen(tuple(key), tuple(dims), values)


def _torch_array(tensor: Any) -> np.ndarray | None:
    """The memory of a dense tensor on the host that requires no gradient; None for others."""
    try:
        return None if tensor.requires_grad else tensor.numpy()
    except (TypeError, RuntimeError):
        return None


def _look_at_matrix(value: Any, dims: list[int]) -> tuple[Any, ...] | None:
    """Properties of a compressed matrix that decide; its dimensions are added to the others."""
    arrays = data, indptr, indices = value.data, value.indptr, value.indices
    for array in arrays:
        if type(array) is not np.ndarray or not array.flags.carray:
            return None
    grid = value.shape if value.format != "bsr" else _grid(value.shape, data.shape[1:])
    if grid is None:
        return None
    dims += grid
    for array in arrays:
        dims += array.shape
    return type(value), data.ndim, data.dtype, indptr.ndim, indptr.dtype, indices.ndim, indices.dtype


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...] | None:
    """Rows and columns counted in blocks; None where blocks do not divide them."""
    if len(block) != 2 or 0 in block or shape[0] % block[0] or shape[1] % block[1]:
        return None
    return shape[0] // block[0], shape[1] // block[1]


def shaped(arguments: Values) -> tuple[Any, ...] | None:
    """What `fits` compares with later calls; None unless all arguments are arrays."""
    if any(type(value) is not np.ndarray for value in arguments.values()):
        return None
    return tuple((name, value.shape, value.dtype) for name, value in arguments.items())


def fits(key: tuple[Any, ...], arguments: Values) -> bool:
    """Whether a call is one of nothing but arrays like those of another one; sooner than by looking at it."""
    if len(key) != len(arguments):
        return False
    for name, shape, dtype in key:
        value = arguments.get(name)
        if type(value) is not np.ndarray or value.shape != shape or value.dtype is not dtype or not value.flags.carray:
            return False
    return True


class Compressed:
    """Fills in a scipy matrix whose arrays are the buffer's own."""

    def __init__(self, signature: Signature, name: str, value: Any, args: Arguments, place: dict[str, int]) -> None:
        buffer = signature.buffers[name]
        levels = signature.known_levels(buffer, args)
        source = interop.open_source(value, name)
        if not interop.has_layout(source, levels, name) or value.data.dtype != numpy_dtype(buffer.dtype):
            raise Unfit
        axis = next(a for a in buffer.axes if a.kind == "sparse_variable")
        if any(a.dtype != axis.idtype for a in (value.indptr, value.indices)) or buffer.dtype == "bfloat16":
            raise Unfit
        indptr, indices = signature.axes_of_array[axis]
        self.name, self.buffer = name, buffer
        self.names = (str(buffer.storage.name), str(indptr), str(indices))
        self.places = tuple(place[n] for n in self.names)
        self.values, self.indptr, self.indices = self.places
        self.level = levels[buffer.axes.index(axis)]
        self.need_sorted = axis.sorted or axis.unique
        self.axis_counts = signature.counts[axis]
        self.shared: list[tuple[int, np.ndarray | None]] = []

    def share(self, others: set[int], held: Mapping[int, np.ndarray]) -> None:
        """Note which index arrays must be those of another argument, which a call brings or which is held."""
        self.shared = [(at, held.get(at)) for at in self.places[1:] if at in others or at in held]

    def expected(self, signature: Signature) -> list[tuple[int | None, list[sizes.Size]]]:
        """The sizes of its rows and columns, and of its arrays."""
        arrays = [(at, list(signature.by_name[n].shape or ())) for at, n in zip(self.places, self.names, strict=True)]
        return [(None, [signature.length[axis] for axis in self.buffer.axes[:2]]), *arrays]

    def counts(self, known: dict[str, int]) -> tuple[int, int]:
        """Positions above the axis with indices, and its length."""
        parents, _, length = self.axis_counts(known)
        return int(parents), int(length)

    def fill(self, value: Any, ready: list[Any], parents: int, length: int) -> None:
        """Check the structure and pass the arrays on."""
        data, indptr, indices = value.data, value.indptr, value.indices
        if indptr[-1] != len(indices) or len(data) != len(indices):
            raise Unfit
        if checks_are_on() and not is_sound(
            self.level, indptr, indices, parent_count=parents, length=length, need_sorted=self.need_sorted
        ):
            raise Unfit
        for at, held in self.shared:
            known, array = ready[at] if held is None else held, indptr if at == self.indptr else indices
            if known is not array and not np.array_equal(known, array):
                raise Unfit
        ready[self.values], ready[self.indptr], ready[self.indices] = data, indptr, indices


class Function:
    """The compiled function, until after some calls one that suits the arguments better replaces it."""

    def __init__(self, function: Callable[..., Any], fitting: Callable[[Arguments], tuple[Any, int]]) -> None:
        self.function, self.left = function, 0
        self.waiting: list[Any] = [(fitting, None)]

    def next(self, arrays: Callable[[], dict[str, np.ndarray]]) -> Callable[..., Any]:
        """What to call now, with these arrays."""
        self.left -= 1
        if self.left >= 0:
            return self.function
        try:
            fitting, fit = self.waiting.pop()
        except IndexError:  # another thread has it
            return self.function
        if fit is None:
            fit, self.left = fitting(Arguments(arrays()))
            if fit is None:
                return self.function
            if self.left > 0:
                self.left -= 1
                self.waiting.append((fitting, fit))
                return self.function
        self.function = fit()
        return self.function


class Results:
    """New arrays for the results of a call."""

    def __init__(self, made: list[tuple[int, tuple[int, ...], Any, bool]], spare: Spare | None) -> None:
        self.take = None if spare is None else spare.take
        self.made = made

    def fill(self, ready: list[Any]) -> list[tuple[int, np.ndarray]]:
        """Pass them on; those that were passed in another guise, or not at all, come back with their place."""
        found = []
        for at, shape, dtype, covered in self.made:
            if 0 in shape:
                found.append((at, np.empty(shape, dtype)))
            elif covered and self.take is not None:
                array, ready[at] = self.take(shape, dtype)
                found.append((at, array))
            else:
                ready[at] = alignment.empty(shape, dtype) if covered else np.zeros(shape, dtype)
        return found


class Separation:
    """Checks that arrays to be written lie apart from all others, unless they are those of the last call."""

    def __init__(self, fixed: list[np.ndarray], written: list[int], passed: list[int]) -> None:
        self.fixed, self.written, self.passed = fixed, written, passed
        self.last: list[tuple[int, weakref.ref[Any]]] = []

    def check(self, ready: list[Any]) -> None:
        """Raise if one does not."""
        for at, ref in self.last:
            if ref() is not ready[at]:
                break
        else:
            if self.last:
                return
        for at in self.written:
            others = [*self.fixed, *(ready[n] for n in self.passed if n != at)]
            if any(np.may_share_memory(ready[at], other) for other in others):
                raise Unfit
        self.last = [(at, weakref.ref(ready[at])) for at in self.passed]
