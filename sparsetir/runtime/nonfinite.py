# SPDX-License-Identifier: Apache-2.0
"""Infinities and NaN in calls of kernels over formats that store zeros.

Such a kernel multiplies the zeros too, and infinity times zero is NaN: results that do not use the infinity become NaN
as well. Where the format was not the user's choice, his results must not tell. A sum of products shows it: if any zero
met such a number, some result is NaN. Then one look at the results settles it, or one at the operands where those are
smaller; other programs, such as one that takes the maximum of a sum and zero, have their operands looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import ir, tirx

from sparsetir.interop.sources import array_of_numbers
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import Program

if TYPE_CHECKING:
    from sparsetir.runtime.signature import Signature
    from sparsetir.transform.decompose import Decomposition


FLOATS = ("float", "bfloat")
Call = Callable[..., Any]


def has_nan(value: Any) -> bool:
    """Return whether a result, or one of several, holds a NaN.

    Examples
    --------
    >>> has_nan(np.array([1.0, np.inf])), has_nan((np.ones(2), np.array([np.nan])))
    (False, True)
    """
    if isinstance(value, tuple):
        return any(has_nan(part) for part in value)
    if not isinstance(value, np.ndarray):  # a torch tensor
        return bool(value.isnan().any())
    if value.dtype.kind != "f":
        value = value.astype(np.float32)
    # The minimum of numbers of which one is NaN is NaN: a single pass and no array of booleans.
    return value.size > 0 and bool(np.isnan(np.minimum.reduce(value, axis=None)))


def is_finite(value: Any) -> bool:
    """Return whether an operand holds neither infinities nor NaN."""
    array = array_of_numbers(value, "an operand")
    if array.dtype.kind in "biu" or not array.size:
        return True
    array = array if array.dtype.kind == "f" else array.astype(np.float32)
    return bool(np.isfinite(np.minimum.reduce(array, axis=None)) and np.isfinite(np.maximum.reduce(array, axis=None)))


def sums_products(program: Program) -> bool:
    """Return whether the program does nothing but to add up products: a NaN among the terms is one in the result."""
    if len(program.iterations) != 1:
        return False
    stores = collect(program.func.body, tirx.BufferStore)
    views = {b.view for b in program.buffers.values() if not b.allocated}
    plain = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Cast, tirx.FloatImm, tirx.IntImm, ir.TensorLoad, ir.Var)
    return all(s.buffer in views and _is_float(s.buffer) and _is_made_of(s.value, plain) for s in stores)


def _is_float(node: Any) -> bool:
    return str(node.ty.dtype).startswith(FLOATS)


def _is_made_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether floating-point terms are of these kinds only; a call, a maximum or a choice may drop a NaN."""
    if isinstance(value, ir.TensorLoad) or not isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Cast)):
        return isinstance(value, kinds)
    if isinstance(value, tirx.Cast):
        return _is_float(value) and _is_made_of(value.value, kinds)
    return _is_made_of(value.a, kinds) and _is_made_of(value.b, kinds)


def nbytes(value: Any) -> int:
    """Bytes of an array or a torch tensor."""
    return int(value.nbytes) if hasattr(value, "nbytes") else np.asarray(value).nbytes


class NonFiniteGuard:
    """Tells calls whose results the zeros of a format may have spoilt.

    Parameters
    ----------
    signature : Signature
        Of the program as it was written.
    """

    def __init__(self, signature: Signature) -> None:
        effects, program = signature.effects, signature.program
        # What is updated cannot be computed again: it is overwritten.
        self.in_results = sums_products(program) and not effects.updated
        names = [n for n, b in signature.buffers.items() if b.is_dense and str(b.dtype).startswith(FLOATS)]
        read = [n for n in names if signature.storage_name(n) not in effects.outputs]
        self.operands = {n for name in read for n in (name, signature.storage_name(name))}

    @classmethod
    def over(cls, decomposition: Decomposition, signature: Signature) -> NonFiniteGuard | None:
        """Return a watch for a decomposed program; None where no zeros are multiplied."""
        return cls(signature) if decomposition.multiplies_zeros else None

    def call(self, fast: Call, plain: Call, arguments: Mapping[str, Any], fixed: Mapping[str, Any]) -> Any:
        """Return the results of `fast`, or of `plain` where those may be spoilt; `fixed` are bound operands."""
        if not self.in_results:
            is_safe = all(is_finite(value) for value in self.watched(arguments, fixed))
            return fast(**arguments) if is_safe else plain(**arguments)
        result = fast(**arguments)
        return plain(**arguments) if self.has_spoilt(result, arguments, fixed) else result

    def watched(self, arguments: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[Any]:
        """Return the operands that zeros are multiplied with."""
        return [value for name, value in {**fixed, **arguments}.items() if name in self.operands]

    def is_spoilt(self, result: Any, arguments: Mapping[str, Any]) -> bool:
        """Return whether a call with this result must be repeated: the check of every call."""
        if not self.in_results:
            return not all(is_finite(value) for value in self.watched(arguments, {}))
        return self.has_spoilt(result, arguments, {})

    def has_spoilt(self, result: Any, arguments: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
        """Return whether zeros may have made results of `fast` NaN."""
        operands = self.watched(arguments, fixed)
        is_larger = sum(map(nbytes, result if isinstance(result, tuple) else [result])) > sum(map(nbytes, operands))
        if is_larger and all(is_finite(value) for value in operands):
            return False
        return has_nan(result)


class GuardedBound:
    """A bound kernel over another format, and the plain one for arguments that are not finite.

    Parameters
    ----------
    bound : BoundComposedKernel
    plain : callable
        Makes the bound kernel of the program as it was written, when it is first needed.
    watch : NonFiniteGuard
    """

    def __init__(self, bound: Any, plain: Callable[[], Call], watch: NonFiniteGuard) -> None:
        self.bound, self.watch = bound, watch
        self._plain = plain
        self._made: Call | None = None
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def __repr__(self) -> str:
        return repr(self.bound)

    @property
    def fixed(self) -> dict[str, Any]:
        """The arguments that are bound."""
        return self.bound.fixed

    def plain(self, **arguments: Any) -> Any:
        """Run the program as it was written."""
        if self._made is None:
            self._made = self._plain()
        return self._made(**arguments)

    def __call__(self, **arguments: Any) -> Any:
        """Run with the open arguments; see `Kernel.__call__`."""
        return self.watch.call(self.bound, self.plain, arguments, self.bound.fixed)

    @property
    def last(self) -> tuple[Any, Callable[[dict[str, Any]], Any] | None]:
        """The key of a call, and its plan, which has the same care."""
        key, plan = self.bound.last
        if plan is None or not self.watch.in_results:
            return None, None
        if self._last[1] is not plan:
            self._last = key, plan, self._watched(plan)
        return key, self._last[2]

    def _watched(self, plan: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        plain, has_spoilt, fixed = self.plain, self.watch.has_spoilt, self.bound.fixed

        def run(arguments: dict[str, Any]) -> Any:
            result = plan(arguments)
            return plain(**arguments) if has_spoilt(result, arguments, fixed) else result

        return run

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Any:
        """Time repeated calls of the compiled function; see `BoundKernel.time`."""
        return self.bound.time(seconds=seconds, **arguments)


__all__ = ["GuardedBound", "NonFiniteGuard", "has_nan", "is_finite", "sums_products"]
