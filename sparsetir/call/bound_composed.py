# SPDX-License-Identifier: Apache-2.0
"""Kernels over other formats with some arguments fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparsetir.call.arguments import SizeOf
from sparsetir.call.bound import Bound
from sparsetir.call.conversion import Converted, agree
from sparsetir.call.timing import Timing
from sparsetir.errors import ArgumentTypeError

if TYPE_CHECKING:
    from sparsetir.call.composed import ComposedKernel


class BoundComposedKernel(Bound):
    """A composed kernel with some arguments fixed: converted once."""

    def __init__(self, kernel: ComposedKernel, arguments: Mapping[str, Any]) -> None:
        super().__init__(kernel, arguments)
        given, self.converted = kernel.converter.translate(arguments, is_kept=True)
        self.given = kernel.needed(given)
        self.bound = kernel.kernel.bind(**self.given)
        self.is_plain = kernel.has_plain_results

    def dispatch(self, arguments: dict[str, Any]) -> Any:
        kernel = self.kernel
        if self.is_plain and kernel.names.issuperset(arguments):
            found = self.bound(**arguments)
            self.last = self.bound.last  # its plans are as good as ours
            return found
        for name in arguments:
            if name in self.fixed:
                raise ArgumentTypeError(f"{name} is fixed by bind; do not pass it again")
        given, converted = self._translated(arguments)
        kernel.converter.check_complete(converted)
        made = kernel.new_outputs(converted, {**self.given, **given})
        out = self.bound(**given, **made)
        return kernel.results(out, converted, {**self.given, **given, **made}, {**self.fixed, **arguments})

    def _translated(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Converted]]:
        """The open arguments of the compiled function, which must agree with the fixed ones, and every structure."""
        given, converted = self.kernel.converter.translate(arguments, self.converted)
        for name in given.keys() & self.given.keys():
            if isinstance(given[name], SizeOf):
                agree(self.given, name, given[name])
        return {n: v for n, v in self.kernel.needed(given).items() if n not in self.given}, converted

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Timing:
        """Time repeated calls of the compiled function, all arguments ready."""
        given, converted = self.kernel.converter.translate(arguments)
        made = self.kernel.new_outputs({**self.converted, **converted}, {**self.given, **given})
        every = {**given, **made, **self.given}
        return self.bound.kernel.time(seconds=seconds, **self.kernel.needed(every))


__all__ = ["BoundComposedKernel"]
