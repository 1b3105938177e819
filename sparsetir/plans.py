# SPDX-License-Identifier: Apache-2.0
"""What is left to do in a call once one like it has been checked in full.

A plan belongs to the names, classes, shapes and dtypes of a call's arguments. It fills the compiled function's
argument list, checks what may differ between such calls (the contents of index arrays), and makes the outputs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm_ffi

from sparsetir import alignment, interop
from sparsetir.errors import ArgumentError
from sparsetir.signature import Arguments, Signature, checks_are_on
from sparsetir.spare import Spare

COMPRESSED = ("csr", "csc", "bsr")


def key_of(arguments: dict[str, Any]) -> Any:
    """What decides whether a plan fits; None where every call must take the long way."""
    key: list[Any] = []
    for name, value in arguments.items():
        if type(value) is np.ndarray:
            if not value.flags.carray or value.size == 0:  # contiguous, aligned and writeable
                return None
            key.append((name, value.shape, value.dtype))
        elif isinstance(value, (sp.sparray, sp.spmatrix)) and value.format in COMPRESSED:
            data, indices = value.data, value.indices
            if not (data.flags.writeable and indices.flags.writeable) or data.size == 0:
                return None
            key.append((name, type(value), value.shape, data.shape, data.dtype, indices.dtype, indices.size))
        elif type(value) is int:
            key.append((name, value))
        else:
            return None
    return tuple(key)


def fits(key: Any, arguments: dict[str, Any]) -> bool:
    """Whether a key of nothing but arrays is that of these arguments; sooner than by making theirs."""
    if len(key) != len(arguments):
        return False
    for name, shape, dtype in key:
        value = arguments.get(name)
        if type(value) is not np.ndarray or value.shape != shape or value.dtype is not dtype or not value.flags.carray:
            return False
    return True


def is_of_arrays(key: Any) -> bool:
    """Whether a key is of nothing but arrays."""
    return all(len(entry) == 3 for entry in key)


class _Compressed:
    """Fills in a scipy matrix whose arrays are the buffer's own."""

    def __init__(self, signature: Signature, name: str, args: Arguments, place: dict[str, int]) -> None:
        buffer = signature.buffers[name]
        axis = next(a for a in buffer.axes if a.kind == "sparse_variable")
        self.name, self.axis = name, axis
        self.values = place[str(buffer.storage.name)]
        indptr, indices = signature.axes_of_array[axis]
        self.indptr, self.indices = place[indptr or ""], place[indices or ""]
        self.places = (self.values, self.indptr, self.indices)
        self.shape = args.arrays[str(buffer.storage.name)].shape
        self.level = signature.levels[name][buffer.axes.index(axis)]
        self.parent_count, _, self.length = (int(n) for n in signature.counts[axis](args.sizes))

    def fill(self, value: Any, ready: list[Any]) -> None:
        """Check the structure and pass the arrays on."""
        if checks_are_on():
            interop.check_level(
                self.level,
                value.indptr,
                value.indices,
                parent_count=self.parent_count,
                length=self.length,
                name=self.name,
                need_sorted=True,
            )
        ready[self.values], ready[self.indptr], ready[self.indices] = value.data, value.indptr, value.indices


def _borrows(signature: Signature, name: str, value: Any, args: Arguments) -> bool:
    """Whether a sparse argument's own arrays were passed on, so that the next one's can be too."""
    stored = args.stored.get(name)
    if stored is None or not stored.is_borrowed or len(stored.indptr) != 1:
        return False
    arrays = (value.data, value.indptr, value.indices)
    held = (stored.values, *stored.indptr.values(), *stored.indices.values())
    return all(_is_same(a, h) for a, h in zip(arrays, held, strict=True))


def _is_same(array: np.ndarray, held: np.ndarray) -> bool:
    return array.dtype == held.dtype and array.shape == held.shape and np.may_share_memory(array, held)


def _is_repeatable(signature: Signature, storage: str) -> bool:
    """Whether an array of the same shape and dtype needs no further look."""
    is_index = any(storage in names for names in signature.axes_of_array.values())
    return not is_index and signature.by_name[storage].dtype != "bfloat16"


def make_plan(
    signature: Signature,
    function: Callable[..., Any],
    args: Arguments,
    arguments: dict[str, Any],
    template: list[Any],
    finish: Callable[[list[Any], dict[str, Any]], Any],
    fit: Callable[[], Callable[..., Any]] | None,
    after: int,
    spare: Spare | None = None,
) -> Callable[[dict[str, Any]], Any] | None:
    """A function of the arguments that does what the call just made did, with fewer checks.

    `template` is that call's argument list; `finish` turns a filled list into results where an output is not a
    plain new array. `fit` makes the function that suits these arrays better; it takes over `after` so many calls. A
    result is written to the memory of `spare` where it can be. None when no shortcut is safe.
    """
    place = {p.name: n for n, p in enumerate(signature.params)}
    sparse_names = [n for n, v in arguments.items() if interop.is_sparse(v)]
    storages = {n: s for n in arguments if n not in sparse_names and (s := signature.storage_name(n)) is not None}
    if not all(_borrows(signature, n, arguments[n], args) for n in sparse_names):
        return None
    if not all(_is_repeatable(signature, s) for s in storages.values()):
        return None
    sparse = [_Compressed(signature, n, args, place) for n in sparse_names]
    dense = [(n, place[s]) for n, s in storages.items()]
    written = [at for name, at in dense if signature.params[at].name in signature.effects.written]
    made = [
        (place[n], args.arrays[n].shape, args.arrays[n].dtype, n in signature.effects.covered)
        for n in signature.outputs
        if n not in args.given
    ]
    plain = _plain(signature, args, place)
    finish = plain or finish  # the other one holds the arrays of this call

    full = [at for at, shape, *_ in made if 0 not in shape]  # a result without elements is passed as it was
    changing = {*(at for _, at in dense), *(at for e in sparse for at in e.places), *full}
    passed = [*(at for _, at in dense), *(at for e in sparse for at in e.places)]
    fixed = [v for at, v in enumerate(template) if at not in changing and isinstance(v, np.ndarray)]
    separation = _Separation(fixed, written, passed)
    # What every call brings or gets anew is not kept.
    template = [None if at in changing else _ready(value) for at, value in enumerate(template)]
    results = _Results(made, spare)
    current = _Function(function, fit, after)
    if plain is not None and spare is not None and not sparse and not written and full:
        ((out, shape, dtype, covered),) = made
        if covered:
            return _run_spare(template, dense, out, partial(spare.take, shape, dtype), current)

    def run(values: dict[str, Any]) -> Any:
        ready = template.copy()
        for name, at in dense:
            ready[at] = values[name]
        for entry in sparse:
            entry.fill(values[entry.name], ready)
        found = results.fill(ready)
        if written:
            separation.check(ready)
        current.next()(*ready)
        for at, array in found:
            ready[at] = array
        return finish(ready, values)

    return run


def _run_spare(
    template: list[Any], dense: list[tuple[str, int]], out: int, take: Callable[[], Any], current: _Function
) -> Callable[[dict[str, Any]], Any]:
    """The plan of most calls of a bound kernel: arrays in, one array out."""

    def run(values: dict[str, Any]) -> Any:
        ready = template.copy()
        for name, at in dense:
            ready[at] = values[name]
        array, ready[out] = take()
        (current.next() if current.waiting else current.function)(*ready)
        return array

    return run


class _Function:
    """The compiled function, until after so many calls the one that `fit` makes takes over."""

    def __init__(self, function: Callable[..., Any], fit: Callable[[], Callable[..., Any]] | None, after: int) -> None:
        self.function, self.left = function, after
        self.waiting = [fit] if fit is not None else []

    def next(self) -> Callable[..., Any]:
        """What to call now."""
        if self.waiting:
            self.left -= 1
            if self.left < 0:
                fit = None
                with contextlib.suppress(IndexError):  # another thread took it
                    fit = self.waiting.pop()
                self.function = self.function if fit is None else fit()
        return self.function


class _Results:
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


def _plain(signature: Signature, args: Arguments, place: dict[str, int]) -> Callable[..., Any] | None:
    """Hands over the only result, a new array as it is; None where results are something else."""
    name = signature.outputs[0] if len(signature.outputs) == 1 else None
    if name is None or not signature.is_plain(name) or args.torch:
        return None
    at = place[name]
    return lambda ready, _values: ready[at]


def _ready(value: Any) -> Any:
    """What the compiled function takes with the least work, over the same memory."""
    return tvm_ffi.from_dlpack(value) if isinstance(value, np.ndarray) else value


class _Separation:
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
                raise ArgumentError("an output shares memory with another argument: pass a separate array")
        self.last = [(at, weakref.ref(ready[at])) for at in self.passed]
