# SPDX-License-Identifier: Apache-2.0
"""A compiled program that is called by the names in its script."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import s_tir, tirx

from sparsetir import interop
from sparsetir.codegen.cache import (
    Compiled,
    compile_cached,
    variant,
    variant_with_checks,
    variant_with_padded_rows,
    write_one,
)
from sparsetir.codegen.pipeline import PassTrace, trace_passes
from sparsetir.errors import VerifyError
from sparsetir.ir.effects import Usage
from sparsetir.ir.sizes import with_sizes
from sparsetir.ir.views import decode
from sparsetir.runtime.adaptive import AlignedOperand
from sparsetir.runtime.bound import BoundKernel
from sparsetir.runtime.call_plan import (
    CallKey,
    CallPlan,
    CallTiming,
    PlanContext,
    PlanMismatch,
    add_plan,
    make_call_key,
    measure,
)
from sparsetir.runtime.serialization import Saved
from sparsetir.runtime.signature import Arguments, Signature, argument_list, check_overlap, shown_signature
from sparsetir.schedules import Choices, defaults
from sparsetir.schedules.registers import OwnSums, Registers
from sparsetir.script.printer import outline as outlined
from sparsetir.script.printer import script
from sparsetir.utils.arguments import as_flag, as_path, renamed_parameters, shown
from sparsetir.utils.memory import raise_of_memory
from sparsetir.utils.threads import get_num_threads

Fit: TypeAlias = Callable[[], Callable[..., Any]]
Convert: TypeAlias = Callable[..., Any]

HOT_CALLS, FEW_CALLS = 32, 4  # calls of one plan before other code is compiled for it
# Attributes for other modules of this package, which completion omits.
HIDDEN = """
    assume_finite call_inspected calls checked compiled compiled_parts
    convert covered expected_calls filling finite fitting function is_small plans
    preferred prepare results run steps suitable sums_numbers usage
""".split()


def _profile() -> Any:
    """Return the rates of the machine that default choices depend on."""
    from sparsetir.codegen.calibration import profile_in_use  # where an operand is large enough for it to matter

    return profile_in_use()


@renamed_parameters(calls="expected_calls", finite="assume_finite")
class Kernel(Saved):
    """A compiled function, called by buffer names.

    Parameters
    ----------
    func : PrimFunc
        The stage-I program.
    compiled : Compiled
        What `sparsetir.build` made of it.
    expected_calls : int, optional
        About how often a bound kernel will be called.
    assume_finite : bool
        Whether arguments are promised to hold neither infinities nor NaN.
    covered : collection of str
        Results of which every element is surely written, although the program does not show it.
    convert : callable, optional
        Of a kernel, the fixed arguments, those of a call, ``calls=`` to come and ``plain=``: makes bound kernels over
        other formats that may pay; see `sparsetir.kernel_factory.bound_over_others`.
    preferred : mapping of str to int, optional
        Choices of the schedule that count more than those of `sparsetir.schedules.defaults`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> kernel = sparsetir.build(sparsetir.ops.spmm())
    >>> A = sp.random_array((4, 3), density=0.5, format="csr", dtype="float32", random_state=0)
    >>> B = np.ones((3, 2), "float32")
    >>> bool(np.allclose(kernel(A=A, B=B), A @ B))
    True
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        compiled: Compiled,
        *,
        expected_calls: int | None = None,
        assume_finite: bool = False,
        covered: Collection[str] = (),
        convert: Convert | None = None,
        preferred: Mapping[str, int] | None = None,
    ) -> None:
        self.func = func
        self.compiled = compiled
        self.expected_calls, self.assume_finite, self.covered, self.convert = (
            expected_calls,
            assume_finite,
            covered,
            convert,
        )
        self.preferred: Mapping[str, int] = preferred or {}
        self.name = compiled.name
        self.signature = Signature(decode(func), compiled.searched, covered)
        self.function: Callable[..., Any] = compiled.function
        self.plans: dict[Any, CallPlan | None] = {}
        self.usage = Usage.of(self.signature.program)

    @property
    def target(self) -> Any:
        """The TVM target it was compiled for."""
        return self.compiled.target

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in HIDDEN]

    def __repr__(self) -> str:
        return f"Kernel {self.name}{shown_signature(self.signature)}"

    # ------------------------------------------------------------------ calling

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run the kernel.

        Parameters
        ----------
        **arguments
            Buffers by the names in the script (or raw arrays by parameter names), sizes where they cannot be
            inferred. An output that is passed is written in place.

        Returns
        -------
        array, sparse object, or tuple of them
            The outputs in the order of the script: dense ones as numpy (torch if a torch tensor came in), sparse
            ones in the class of the argument whose structure they share.

        Raises
        ------
        ArgumentTypeError
            A name, class or dtype the kernel does not take.
        ArgumentError
            Shapes that disagree.
        StructureError
            Index arrays that are not what the axes promise.
        MemoryLimitError
            The program's scratch does not fit into memory.
        """
        if unnamed:
            raise self.signature.unnamed(unnamed)
        return self.call_inspected(make_call_key(arguments), arguments)

    def call_inspected(self, seen: CallKey | None, arguments: dict[str, Any]) -> Any:
        """Run the kernel on arguments whose call key was made before."""
        if seen is not None and (plan := self.plans.get(seen[0])) is not None:
            try:
                return plan.call(seen, arguments)
            except PlanMismatch:
                pass
            except RuntimeError as error:
                raise_of_memory(error, self.name)
        args = self.prepare(arguments)
        try:
            self.run(args)
        except RuntimeError as error:
            raise_of_memory(error, self.name)
        caller = PlanContext(self.signature, self.function, self.fitting, {}, Arguments(), checked=self.checked)
        add_plan(self.plans, seen, caller, args)
        return self.results(args, arguments)

    def fitting(self, args: Arguments, *, is_bound: bool = False) -> tuple[Fit | None, int]:
        """Return what compiles a function for these arguments, and the number of calls after which it pays.

        `sparsetir.schedules.defaults` decides what does. None where nothing is better, or a schedule was asked for.
        """
        if self.compiled.schedule is not None:
            return None, 0
        if (filling := self.filling(args)) is not None:
            return lambda: filling, 0
        is_small = self.is_small(args)
        changes = self.suitable(args, is_small=is_small)
        narrow = defaults.narrow_sizes(self.usage, args.arrays)
        registers, written = Registers.of(self.target), self.signature.effects.written
        copied = defaults.unaligned_operand(self.usage, args.arrays, registers, written)
        if not changes and not narrow and copied is None:
            return None, 0
        is_hot = is_small or (narrow and not changes and not is_bound)
        changes = {**defaults.narrow_tile(self.usage, args.arrays), **changes}
        after = HOT_CALLS if is_hot else 0 if is_bound else FEW_CALLS

        def fit() -> Callable[..., Any]:
            is_other = bool(changes or narrow)
            function = variant(self.compiled, narrow or None, **changes) if is_other else self.function
            if copied is None:
                return function
            place = [p.name for p in self.signature.params].index(copied)

            def on_copies(operand: np.ndarray) -> tuple[Callable[..., Any] | None, int]:
                length = defaults.padded_length(operand, registers)
                if length in (0, operand.shape[-1]):
                    return function if length else None, length
                return variant_with_padded_rows(self.compiled, {copied: length}, narrow or None, **changes), length

            return AlignedOperand(function, place, on_copies)

        return fit, after

    def filling(self, args: Arguments) -> Callable[..., Any] | None:
        """Return a function that writes initial values to the results if nothing is reduced into them; else None."""
        starts, params = self.usage.starts, self.signature.params
        arrays = [] if starts is None else [args.arrays.get(name) for name in starts.indices]
        if starts is None or not any(array is not None and not array.size for array in arrays):
            return None
        halves = any(self.signature.by_name[name].dtype == "bfloat16" for name in starts.values)  # unknown to DLPack
        if halves or not self.signature.effects.covered.issuperset(starts.values):
            return None
        places = [(place, starts.values[p.name]) for place, p in enumerate(params) if p.name in starts.values]

        def fill(*ready: Any) -> None:
            for place, value in places:
                result = ready[place]
                (result if type(result) is np.ndarray else np.from_dlpack(result)).fill(value)

        return fill

    def checked(self, args: Arguments) -> Callable[..., Any] | None:
        """Return a function for such arguments that validates index arrays while it reads them, or None."""
        changes = self.suitable(args)
        if type(self.compiled) is not Compiled:
            return None
        lanes = changes.pop("lanes", 0)
        changes.pop("staged", 0)
        if not defaults.suits_checks(self.usage.pointers, args.arrays, lanes=lanes):
            return None
        if get_num_threads() == 1:
            changes["chunks"] = 0  # no parallel loop, as these contain no checks
        return variant_with_checks(self.compiled, defaults.narrow_sizes(self.usage, args.arrays) or None, **changes)

    def suitable(self, args: Arguments, *, is_small: bool | None = None) -> dict[str, int]:
        """Return the choices that differ from the defaults for these arguments."""
        written = [args.arrays[name] for name in self.signature.effects.written]
        is_small = self.is_small(args) if is_small is None else is_small
        tile = self.compiled.usual_choices.tile
        find = partial(defaults.changes, is_small=is_small, profile=_profile, own_sums=OwnSums.of(self.target))
        changes = find(self.usage, args.arrays, written, tile=tile)
        return {**changes, **self.preferred}

    def is_small(self, args: Arguments) -> bool:
        """Return whether waking a second thread takes longer than the work."""
        steps, sums_numbers = self.steps(args), self.sums_numbers(args)
        return defaults.is_small(self.usage, args.arrays, _profile(), steps=steps, sums_numbers=sums_numbers)

    def steps(self, args: Arguments) -> float:
        """Return about how often the bodies of all iterations run."""
        steps = 0.0
        for iteration in self.signature.program.iterations:
            counts = (self.signature.counts[axis](args.sizes) for axis in iteration.axes)
            steps += math.prod(positions / max(above, 1) for above, positions, _ in counts)
        return steps

    def sums_numbers(self, args: Arguments) -> bool:
        """Return whether each entry is used for one number of a sum, neither for a row of them nor in a search."""
        program, holder = self.signature.program, self.signature.holder
        others = (a for n, a in args.arrays.items() if n not in holder or holder[n].is_dense)
        if self.compiled.searched or any(a.ndim > 1 and a.dtype.kind not in "iu" for a in others):
            return False
        is_dense = all(n not in holder or holder[n].is_dense for n in self.signature.effects.written)
        return is_dense and all("R" in iteration.kinds for iteration in program.iterations)

    def prepare(self, arguments: dict[str, Any], bound: Arguments | None = None) -> Arguments:
        """Return the arguments of a call, checked in full, with new arrays for the results."""
        signature = self.signature
        args = signature.gather(arguments, bound)
        signature.check(args)
        signature.allocate(args)
        check_overlap(signature, args)
        return args

    def run(self, args: Arguments) -> None:
        """Run the loops, and copy results back to arrays that were passed in another layout."""
        self.function(*argument_list(self.signature, args))
        for target, storage in args.copy_back:
            array, buffer = args.arrays[storage], self.signature.holder.get(storage)
            stored = args.stored.get(buffer.name) if buffer is not None else None
            target[...] = array.reshape(target.shape) if stored is None else interop.entries(stored, array)

    def results(self, args: Arguments, arguments: dict[str, Any]) -> Any:
        """Convert the outputs to the classes of the inputs."""
        names = self.signature.outputs or self.signature.effects.updated
        out = tuple(self.signature.result(args, n, arguments) for n in names)
        return out[0] if len(out) == 1 else out

    def bind(self, **arguments: Any) -> BoundKernel:
        """Fix some arguments, usually the sparse ones: they are checked and laid out once.

        The arrays are used as they are at this moment: values changed in place are seen by later calls where no
        copy was needed, structure must not be changed. A kernel that was built for many calls
        (``expected_calls=``) may store a matrix in another format at the first call, and has a copy of its values then.
        One that was not may do so on a background thread, and goes back where values change: see `sparsetir.build`.
        """
        return BoundKernel(self, arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the compiled function itself, arguments ready.

        Parameters
        ----------
        seconds : float
            How long to measure, at least three calls.
        **arguments
            As for a call.
        """
        args = self.prepare(arguments)
        ready = argument_list(self.signature, args)
        try:
            return measure(lambda: self.function(*ready), seconds=seconds)
        except RuntimeError as error:
            raise_of_memory(error, self.name)

    # ------------------------------------------------------------------ looking inside

    def script(self, stage: int = 1, *, outline: bool = False, **sizes: int) -> str:
        """Return the program's text at a stage.

        Parameters
        ----------
        stage : {1, 2, 3}
            1 as written, 2 scheduled blocks, 3 flat loops: what is compiled.
        outline : bool
            Loops, conditions and the names of what is stored, without the arithmetic.
        **sizes
            The text for these sizes, which is shorter: what is done for other sizes falls away.

        Examples
        --------
        >>> import sparsetir
        >>> kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=sparsetir.Choices(chunks=0, tile=64))
        >>> print(kernel.script(stage=3, outline=True, feat=64))
            for i in range(m):
                for k_1_init in T.vectorized(64):
                    c_local[...] = ...
                for j in range(indptr_1[i + 1] - indptr_1[i]):
                    for k_1 in T.vectorized(64):
                        c_local[...] = ...
                for ax0 in T.vectorized(64):
                    c_1[...] = ...
        """
        if type(stage) is not int or stage not in (1, 2, 3):
            raise VerifyError(f"stage: expected 1, 2 or 3, got {shown(stage)}; source() shows machine code")
        func, outline = with_sizes(self.func, sizes), as_flag(outline, "outline")
        if stage > 1:
            func = (self.compiled.of(func) if sizes else self.compiled).stage(stage)
        return outlined(script(func)) if outline else script(func)

    def trace(self, *, outline: bool = False, **sizes: int) -> PassTrace:
        """Return the program after each pass, from the script to the loops that are compiled.

        Parameters
        ----------
        outline : bool
            Loops, conditions and the names of what is stored, without the arithmetic.
        **sizes
            The programs for these sizes, which are shorter.

        Returns
        -------
        PassTrace
            Shown in a notebook as a page of differences; `PassTrace.html` writes it, `print` shows it as text.

        Examples
        --------
        >>> import sparsetir
        >>> trace = sparsetir.build(sparsetir.ops.spmv()).trace()
        >>> [step.name for step in trace.changed][:2]
        ['AlignParams', 'EmitNest']
        """
        func = with_sizes(self.func, sizes)
        compiled = self.compiled.of(func) if sizes else self.compiled
        return trace_passes(func, compiled.stages[2], compiled.name, outlined=as_flag(outline, "outline"))

    def source(self, kind: str = "ll") -> str:
        """Return the compiled module as ``"ll"`` (LLVM IR) or ``"asm"``."""
        return self.compiled.source(kind)

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "expected_calls": self.expected_calls,
            "assume_finite": self.assume_finite,
            "covered": self.covered,
            "convert": self.convert,
            "preferred": self.preferred,
        }

    def compiled_parts(self) -> Iterator[Compiled]:
        yield self.compiled

    def __reduce__(self) -> tuple[Any, ...]:
        compiled = self.compiled
        write_one(compiled)  # the process that unpickles the kernel loads it
        schedule, scheduled = compiled.schedule, None
        if schedule is not None and not isinstance(schedule, Choices):
            schedule, scheduled = None, compiled.second
        return _restored, (self.func, str(compiled.target), schedule, scheduled, self._facts)

    def __deepcopy__(self, _memo: Any) -> Kernel:
        return Kernel(self.func, self.compiled, **self._facts)  # machine code does not change

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a shared library and a C header that run without Python.

        Parameters
        ----------
        path : str or Path
            The library, ``.so``. Written completely or not at all.
        header : str or Path, optional
            Default: next to the library, with suffix ``.h``.

        Returns
        -------
        Path
            The header.
        """
        from sparsetir.codegen.export import export

        return export(self, as_path(path, "path"), as_path(header, "header") if header is not None else None)


def _restored(func: tirx.PrimFunc, target: str, schedule: Any, scheduled: Any, facts: dict[str, Any]) -> Kernel:
    """Return a kernel from its pickled state."""
    restored_schedule = schedule if scheduled is None else s_tir.Schedule(scheduled)
    return Kernel(func, compile_cached(func, tvm.target.Target(target), restored_schedule), **facts)


__all__ = ["Kernel"]
