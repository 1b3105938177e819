# SPDX-License-Identifier: Apache-2.0
"""Calls of a fuzzed program's kernel, what they must give, and both as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse as sp

from fences import Fences
from fuzzing.inputs import Inputs
from fuzzing.oracle import Oracle, Unclear
from fuzzing.program import Buffer, Program
from sparsetir import CooTensor
from sparsetir.runtime.composed import ComposedKernel

#: whole numbers up to this are exact in a type
EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}
#: types of which scipy has no arrays that could be written in place
UNWRITTEN = ("float16", "bfloat16")


@dataclass
class Call:
    """Arguments by name, and the results: an array of expected elements, NaN where anything may stand.

    An argument is a number, an array or, where the buffer is stored in another format, entries: coordinates, values and
    shape. `tolerance` is absolute, by the name of the result. `places` numbers the coordinates of a result's entries:
    those at one place count together, as a format adds them up.
    """

    arguments: dict[str, Any]
    expected: dict[str, np.ndarray]
    tolerance: dict[str, float]
    places: dict[str, np.ndarray]
    note: str = ""
    is_repeated: bool = False  # the same inputs as the call before

    def objections(self, kernel: Any, fences: Fences) -> list[str]:
        """Call the kernel twice; what is not as expected."""
        found = []
        for turn in ("first", "second"):
            held = {name: self.held(name, value, fences) for name, value in self.arguments.items()}
            before = {name: np.array(values_of(value)) for name, value in held.items()}
            out = kernel(**held)
            found += [f"{turn} call, {self.note}: {text}" for text in self.differences(kernel, held, before, out)]
            fences.release()
        return found

    def held(self, name: str, value: Any, fences: Fences) -> Any:
        """An argument as it is passed."""
        if isinstance(value, np.ndarray):
            return fences.fenced(value)
        if not isinstance(value, tuple):
            return value
        coords, values, shape = value
        if name in self.expected and values.dtype.kind != "V" and values.dtype != np.float16:
            return sp.coo_array((values.copy(), tuple(coords)), shape=shape)
        return CooTensor(coords, values.copy(), shape)

    def differences(self, kernel: Any, held: dict[str, Any], before: dict[str, np.ndarray], out: Any) -> Iterator[str]:
        returned = dict(zip(kernel.signature.outputs, out if isinstance(out, tuple) else (out,), strict=False))
        for name, expected in self.expected.items():
            result = values_of(held.get(name, returned.get(name.lower())))
            yield from self.difference(name, np.asarray(result), expected)
        for name, value in before.items():
            if name not in self.expected and not same(values_of(held[name]), value):
                yield f"{name}, which is only read, was changed"

    def difference(self, name: str, result: np.ndarray, expected: np.ndarray) -> Iterator[str]:
        if result.size != expected.size:
            yield f"{name} has shape {result.shape}, expected {expected.shape}"
            return
        got, want = result.astype(np.float64).reshape(expected.shape), expected.astype(np.float64)
        if name in self.places:
            got, want = (np.bincount(self.places[name], values, len(values)) for values in (got, want))
        wrong = ~(np.abs(got - want) <= self.tolerance[name]) & ~np.isnan(want)
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            yield f"{name}{list(at)} is {got[at]}, expected {want[at]} ({wrong.sum()} of {wrong.size} differ)"

    def as_json(self) -> dict[str, Any]:
        expected = {name: encoded(value.astype(np.float64)) for name, value in self.expected.items()}
        given = {name: encoded(value) for name, value in self.arguments.items()}
        places = {name: encoded(value) for name, value in self.places.items()}
        facts = {"tolerance": self.tolerance, "places": places, "note": self.note}
        return {"arguments": given, "expected": expected, **facts}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Call:
        parts = ("arguments", "expected", "places")
        arguments, expected, places = ({n: decoded(v) for n, v in given[k].items()} for k in parts)
        return cls(arguments, expected, given["tolerance"], places, given["note"])


def values_of(held: Any) -> Any:
    """The values of an argument or a result."""
    if isinstance(held, CooTensor):
        return held.values
    return held.data if sp.issparse(held) else held


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        plain = value.astype(np.float64) if value.dtype == ml_dtypes.bfloat16 else value
        return {"dtype": str(value.dtype), "shape": value.shape, "data": plain.ravel().tolist()}
    return [encoded(part) for part in value] if isinstance(value, tuple) else int(value)


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return np.array(value["data"]).astype(np.dtype(value["dtype"])).reshape(value["shape"])
    return tuple(decoded(part) for part in value) if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------- of a program


class Caller:
    """Makes the calls of one set of inputs."""

    def __init__(self, program: Program, kernel: Any, inputs: Inputs) -> None:
        self.program, self.inputs, self.oracle = program, inputs, Oracle(program, inputs)
        groups = kernel.converter.groups if isinstance(kernel, ComposedKernel) else {}
        self.stored = {b for b in program.buffers if b.name in groups and not b.scratch}
        self.left_out = {b for b in self.stored if b.dtype in UNWRITTEN and b.name.lower() in kernel.signature.outputs}
        #: what a kernel over other formats has no use for
        self.hidden: set[str] = set()
        if groups:
            known = {*kernel.kernel.signature.by_name, *kernel.converter.sizes}
            self.hidden = {name for axis in program.axes for name in axis.arrays if name not in known}

    def call(self, arrays: dict[str, np.ndarray], note: str) -> Call | None:
        """A call with these arrays; None where the numbers prove nothing."""
        fresh = {b.name.lower(): np.zeros_like(arrays[b.name.lower()]) for b in self.left_out}
        arrays = {**arrays, **fresh}
        try:
            expected = self.oracle.run(arrays)
        except Unclear:
            return None
        if not self.oracle.is_proof():
            return None
        given = {n: v for n, v in {**self.inputs.args, **arrays}.items() if n not in self.hidden}
        results, tolerance, places = {}, {}, {}
        for buffer in (b for b in self.program.buffers if not b.scratch):
            name = buffer.name.lower()
            key = buffer.name if buffer in self.stored else name
            if buffer in self.stored:
                given[key] = self.entries(buffer, given.pop(name))
                places[key] = np.unique(given[key][0], axis=1, return_inverse=True)[1].reshape(-1)
            if buffer in self.left_out:
                del given[key]
            if buffer.role == "out":
                results[key] = self.result(buffer, expected[name])
                tolerance[key] = self.tolerance(buffer.dtype)
        return Call(given, results, tolerance, places, note)

    def entries(self, buffer: Buffer, values: np.ndarray) -> tuple[Any, ...]:
        """Coordinates, values and shape of what is stored."""
        present = self.oracle.present(buffer)
        places = np.nonzero(present)
        column: dict[Any, np.ndarray] = {}
        for leaf, at in zip(buffer.trees, places, strict=True):
            column |= dict(zip(leaf.chain, self.oracle.tables[leaf].coords[at].T, strict=True))
        coords = np.array([column[axis] for axis in buffer.axes], np.int64)
        return coords, values[present], tuple(self.inputs.lengths[a] for a in buffer.axes)

    def result(self, buffer: Buffer, values: np.ndarray) -> np.ndarray:
        """The expected elements; NaN at slots without coordinates."""
        present = self.oracle.present(buffer)
        found = values.astype(np.float64)
        return found[present] if buffer in self.stored else np.where(present, found, np.nan)

    def tolerance(self, dtype: str) -> float:
        """None where every number on the way is exact."""
        largest = self.oracle.largest
        return largest * 64 / EXACT[dtype] if dtype in EXACT and largest > EXACT[dtype] else 0.0


__all__ = ["Call", "Caller"]
