# SPDX-License-Identifier: Apache-2.0
"""Kernels with fixed arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.runtime.adaptive import adaptive, why_not_adaptive
from sparsetir.runtime.call_plan import (
    CallKey,
    CallPlan,
    CallTiming,
    PlanContext,
    PlanMismatch,
    Run,
    add_plan,
    fits,
    make_call_key,
    shaped,
)
from sparsetir.runtime.serialization import Saved
from sparsetir.runtime.signature import Arguments
from sparsetir.runtime.validation import finds_nan
from sparsetir.utils.buffers import OutputPool
from sparsetir.utils.memory import raise_of_memory

if TYPE_CHECKING:
    from sparsetir.codegen.cache import Compiled
    from sparsetir.runtime.kernel import Kernel


class Bound(Saved):
    """A kernel of any class with some arguments fixed.

    Parameters
    ----------
    kernel : Kernel, ComposedKernel or TunedKernel
    fixed : mapping of str to object
        The arguments.

    Attributes
    ----------
    last : tuple
        The arrays of a call and its plan, see `sparsetir.runtime.call_plan.fits`; None before the first call.
    """

    def __init__(self, kernel: Any, fixed: Mapping[str, Any]) -> None:
        self.kernel, self.fixed = kernel, dict(fixed)
        self.last: tuple[Any, Run | None] = ((), None)

    def __repr__(self) -> str:
        return f"{self.kernel!r} with {', '.join(self.fixed) or 'nothing'} fixed"

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run with the open arguments; see `Kernel.__call__`."""
        if unnamed:
            raise self.kernel.signature.unnamed(unnamed)
        key, run = self.last
        if run is not None and fits(key, arguments):
            try:
                return run(arguments)
            except PlanMismatch:
                pass
            except RuntimeError as error:
                raise_of_memory(error, self.kernel.name)
        try:
            return self.dispatch(arguments)
        except RuntimeError as error:
            raise_of_memory(error, self.kernel.name)

    @abstractmethod
    def dispatch(self, arguments: dict[str, Any]) -> Any:
        """Make a call whose key differs from that of the last one."""

    def compiled_parts(self) -> Iterator[Compiled]:
        yield from self.kernel.compiled_parts()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebound, (self.kernel, self.fixed)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a C library of the kernel, whose function takes the fixed arguments too; see `Kernel.export`."""
        return self.kernel.export(path, header=header)


class BoundKernel(Bound):
    """A kernel with some arguments fixed; a call costs microseconds on top of the loops.

    The memory of an unreferenced result is reused for the next one.
    """

    def __init__(self, kernel: Kernel, arguments: dict[str, Any]) -> None:
        super().__init__(kernel, arguments)
        signature = kernel.signature
        self.args = Arguments(in_order=True)  # rows are sorted once, as sorted rows are read faster
        signature.take(self.args, arguments)
        if self.args.copy_back:
            name = signature.shown(self.args.copy_back[0][1])
            fault = f"{name} is written by this kernel and has another layout, so that each call would copy it"
            raise ArgumentError(f"{fault}: bind a contiguous array, or pass it at each call")
        self.plans: dict[Any, CallPlan | None] = {}
        self.spare = OutputPool()
        self.adaptive = adaptive(self)

    @property
    def over_another(self) -> Any:
        """A bound kernel over another format, in use or on trial; None where there is none."""
        return None if self.adaptive is None else self.adaptive.other

    @property
    def over_others(self) -> tuple[Any, ...]:
        """Bound kernels over other formats: the one in use, or those on trial."""
        return () if self.adaptive is None else self.adaptive.others

    def __repr__(self) -> str:
        return super().__repr__() if self.over_another is None else repr(self.over_another)

    def dispatch(self, arguments: dict[str, Any]) -> Any:
        return self.planned(arguments) if self.adaptive is None else self.adaptive(arguments)

    def explain(self) -> str:
        """Report which formats were compared for the bound matrix, and which one is kept.

        Examples
        --------
        >>> import scipy.sparse as sp, sparsetir
        >>> bound = sparsetir.build(sparsetir.ops.spmm()).bind(A=sp.eye_array(9, format="csr", dtype="float32"))
        >>> bound.explain()
        'as passed: no other format is looked for, because the matrix is small'
        """
        if self.adaptive is not None:
            return self.adaptive.explain()
        return f"as passed: no other format is looked for, because {why_not_adaptive(self)}"

    def planned(self, arguments: dict[str, Any]) -> Any:
        """Make a call over the arguments as they were passed."""
        call_key = make_call_key(arguments)
        plan = self.plans.get(call_key[0]) if call_key is not None else None
        if call_key is not None and plan is not None:
            try:
                if key := shaped(arguments):
                    self.last = key, plan.at(call_key[1])
                return plan.call(call_key, arguments)
            except PlanMismatch:
                pass
        return self._first(arguments, call_key)

    def _first(self, arguments: dict[str, Any], call_key: CallKey | None) -> Any:
        """Make a call without a plan, with full validation: its key is new, or its plan does not apply."""
        kernel, signature = self.kernel, self.kernel.signature
        for name in arguments:
            self._check_open(name)
        args = kernel.prepare(arguments, self._merged())
        kernel.run(args)
        fitting = partial(kernel.fitting, is_bound=True)
        add_plan(
            self.plans,
            call_key,
            PlanContext(signature, kernel.function, fitting, self.fixed, self.args, self.spare),
            args,
        )
        return kernel.results(args, {**self.fixed, **arguments})

    def _check_open(self, name: str) -> None:
        """Raise if an argument is fixed, or is an array of a fixed one."""
        signature = self.kernel.signature
        storage = signature.storage_name(name)
        bound = self.args.given.get(storage) if storage is not None else None
        if bound is None:
            return
        if name == bound:
            raise ArgumentTypeError(f"{name} is fixed by bind; do not pass it again")
        fault, buffer = f"{name} belongs to {bound}, which is fixed by bind", signature.holder.get(storage or "")
        arrays = [n for axis in buffer.axes for n in signature.axes_of_array.get(axis, ()) if n] if buffer else []
        if arrays and bound in self.args.stored:
            form = ", ".join(f"{n}=..." for n in dict.fromkeys(arrays))
            fault += f": to pass other values at each call, bind the structure alone, bind({form})"
        raise ArgumentTypeError(fault)

    def _merged(self) -> Arguments:
        a = self.args
        return Arguments(
            dict(a.arrays), dict(a.sizes), dict(a.sources), dict(a.stored), set(a.raw), dict(a.given), [], a.torch
        )

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the compiled function, all arguments ready."""
        for name in arguments:
            self._check_open(name)
        if self.adaptive is not None:
            self.adaptive.ask(arguments)
        if self.over_another is not None:
            try:
                return self.over_another.time(seconds=seconds, **arguments)
            except (ValueError, RuntimeError) as error:
                if not finds_nan(error):
                    raise
        return self.kernel.time(seconds=seconds, **self.fixed, **arguments)


def _rebound(kernel: Any, arguments: dict[str, Any]) -> Any:
    """Return a bound kernel from its pickled state."""
    return kernel.bind(**arguments)


__all__ = ["Bound", "BoundKernel"]
