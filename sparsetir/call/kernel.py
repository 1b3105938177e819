# SPDX-License-Identifier: Apache-2.0
"""A compiled program that is called by the names in its script."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from sparsetir import interop
from sparsetir.call.plans import Caller, Plan, Run, Seen, Unfit, fits, look, remember, shaped
from sparsetir.call.signature import Arguments, Signature
from sparsetir.errors import ArgumentError, ArgumentTypeError, VerifyError
from sparsetir.ir import decode
from sparsetir.schedules import suit
from sparsetir.shown import shown_signature
from sparsetir.spare import Spare
from sparsetir.usage import Usage

Fit = Callable[[], Callable[..., Any]]

HOT_CALLS, FEW_CALLS = 32, 4  # of one plan, before other code is compiled for it
# What completion leaves out: for other modules of this package.
HIDDEN = "calls compiled finite fitting function is_small plans suitable sums_numbers usage".split()


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls."""

    median: float
    best: float
    worst: float
    calls: int

    def __str__(self) -> str:
        spread = f"{self.best * 1e3:.3f} to {self.worst * 1e3:.3f}"
        return f"{self.median * 1e3:.3f} ms (median of {self.calls} calls, {spread})"


class Kernel:
    """A compiled function, called by buffer names.

    Parameters
    ----------
    func : PrimFunc
        The stage-I program.
    compiled : Compiled
        What `sparsetir.build` made of it.
    calls : int, optional
        About how often a bound kernel will be called.
    finite : bool
        Whether arguments are promised to hold neither infinities nor NaN.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> kernel = sparsetir.build(sparsetir.ops.spmm())
    >>> A = sp.random_array((4, 3), density=0.5, format="csr", dtype="float32", random_state=0)
    >>> B = np.ones((3, 2), "float32")
    >>> bool(np.allclose(kernel(A=A, B=B), A @ B))
    True
    """

    def __init__(self, func: tirx.PrimFunc, compiled: Any, *, calls: int | None = None, finite: bool = False) -> None:
        self.func = func
        self.compiled = compiled
        self.calls, self.finite = calls, finite
        self.name = compiled.name
        self.signature = Signature(decode(func), compiled.searched)
        self.function: Callable[..., Any] = compiled.function
        self.plans: dict[Any, Plan | None] = {}
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
        """
        if unnamed:
            raise self.signature.unnamed(unnamed)
        seen = look(arguments)
        if seen is not None and (plan := self.plans.get(seen.key)) is not None:
            try:
                return plan.at(seen.dims)(seen.values, arguments)
            except Unfit:
                pass
        args = self._prepare(arguments)
        self._run(args)
        if seen is not None and seen.key not in self.plans and not args.copy_back:
            caller = Caller(self.signature, self.function, lambda args: self.fitting(args), {}, Arguments())
            remember(self.plans, seen.key, self._plan(caller, args, seen.values))
        return self._results(args, arguments)

    def _plan(self, caller: Caller, args: Arguments, arguments: Mapping[str, Any]) -> Plan | None:
        """How later calls like one that was made can be made sooner."""
        try:
            return Plan(caller, args, arguments, [_passed(args, p) for p in self.signature.params])
        except Unfit:
            return None

    def fitting(self, args: Arguments, *, is_bound: bool = False) -> tuple[Fit | None, int]:
        """What makes a function that suits these arguments better, and after how many calls it pays.

        `sparsetir.schedules.suit` decides what does. None where nothing is better, or a schedule was asked for.
        """
        if self.compiled.schedule is not None:
            return None, 0
        changes = self.suitable(args)
        if not changes:
            return None, 0
        after = HOT_CALLS if self.is_small(args) else 0 if is_bound else FEW_CALLS
        return lambda: self.compiled.variant(**changes), after

    def suitable(self, args: Arguments) -> dict[str, int]:
        """The choices that suit these arguments better than the usual ones."""
        written = [args.arrays[name] for name in self.signature.effects.written]
        return suit.changes(self.usage, args.arrays, written, is_small=self.is_small(args))

    def is_small(self, args: Arguments) -> bool:
        """Whether waking a second thread takes longer than the work."""
        return suit.is_small(args.arrays, sums_numbers=self.sums_numbers(args))

    def sums_numbers(self, args: Arguments) -> bool:
        """Whether each entry is used for one number, in a sum: not for a row of them, and not looked for in another."""
        program, holder = self.signature.program, self.signature.holder
        others = (a for n, a in args.arrays.items() if n not in holder or holder[n].is_dense)
        if self.compiled.searched or any(a.ndim > 1 and a.dtype.kind not in "iu" for a in others):
            return False
        is_dense = all(n not in holder or holder[n].is_dense for n in self.signature.effects.written)
        return is_dense and all("R" in iteration.kinds for iteration in program.iterations)

    def _prepare(self, arguments: dict[str, Any], known: Arguments | None = None) -> Arguments:
        signature = self.signature
        args = signature.gather(arguments, known)
        signature.check(args)
        signature.allocate(args)
        _check_overlap(args, signature)
        return args

    def _run(self, args: Arguments) -> None:
        self.function(*(_passed(args, p) for p in self.signature.params))
        for target, storage in args.copy_back:
            array, buffer = args.arrays[storage], self.signature.holder.get(storage)
            stored = args.stored.get(buffer.name) if buffer is not None else None
            target[...] = array.reshape(target.shape) if stored is None else interop.entries(stored, array)

    def _results(self, args: Arguments, arguments: dict[str, Any]) -> Any:
        names = self.signature.outputs or self.signature.effects.updated
        out = tuple(self.signature.result(args, n, arguments) for n in names)
        return out[0] if len(out) == 1 else out

    def bind(self, **arguments: Any) -> BoundKernel:
        """Fix some arguments, usually the sparse ones: they are checked and laid out once.

        The arrays are used as they are at this moment: values changed in place are seen by later calls where no
        copy was needed, structure must not be changed. A kernel that was built for many calls may store a matrix in
        another format when it sees the first call, and has a copy of its values then.
        """
        return BoundKernel(self, arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Timing:
        """Time repeated calls of the compiled function itself, arguments ready.

        Parameters
        ----------
        seconds : float
            How long to measure, at least three calls.
        **arguments
            As for a call.
        """
        args = self._prepare(arguments)
        ready = [_passed(args, p) for p in self.signature.params]
        return measure(lambda: self.function(*ready), seconds=seconds)

    # ------------------------------------------------------------------ looking inside

    def script(self, stage: int = 1, *, outline: bool = False, **sizes: int) -> str:
        """The program's text at a stage.

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
        from sparsetir.script.outline import outline as outlined
        from sparsetir.script.printer import script
        from sparsetir.specialize import with_sizes

        if stage not in (1, 2, 3):
            raise VerifyError(f"stage must be 1, 2 or 3, found {stage!r}; source() shows machine code")
        func = with_sizes(self.func, sizes)
        if stage > 1:
            func = (self.compiled.of(func) if sizes else self.compiled).stage(stage)
        return outlined(script(func)) if outline else script(func)

    def source(self, kind: str = "ll") -> str:
        """The compiled module as ``"ll"`` (LLVM IR) or ``"asm"``."""
        return self.compiled.source(kind)

    def save(self, path: str | Path) -> Path:
        """Write the kernel to a file, machine code included; `sparsetir.load` reads it.

        Where the processor, the number of threads or the versions differ, it is compiled anew when it is loaded.
        """
        from sparsetir.call.saving import save

        return save(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        from sparsetir.call.saving import reduced

        return reduced(self)

    def __deepcopy__(self, _memo: Any) -> Kernel:
        return Kernel(self.func, self.compiled, calls=self.calls, finite=self.finite)  # machine code does not change

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a shared library and a C header that run without Python.

        Parameters
        ----------
        path : str or Path
            The library, ``.so``. Written completely or not at all.
        header : str or Path, optional
            Default: beside the library, with suffix ``.h``.

        Returns
        -------
        Path
            The header.
        """
        from sparsetir.compile.export import export

        return export(self, Path(path), Path(header) if header is not None else None)


class BoundKernel:
    """A kernel with some arguments fixed; a call costs microseconds on top of the loops.

    A result that nobody has any more gives its memory to the next one.
    """

    def __init__(self, kernel: Kernel, arguments: dict[str, Any]) -> None:
        self.kernel = kernel
        self.fixed = dict(arguments)
        signature = kernel.signature
        self.args = Arguments()
        signature.take(self.args, arguments)
        if self.args.copy_back:
            name = signature.shown(self.args.copy_back[0][1])
            fault = f"{name} is written by this kernel and has another layout, so that each call would copy it"
            raise ArgumentError(f"{fault}: bind a contiguous array, or pass it at each call")
        self.plans: dict[Any, Plan | None] = {}
        self.last: tuple[Any, Run | None] = ((), None)  # the arrays of a call, and what makes such calls
        self.over_another: Any = None  # a BoundComposedKernel
        self.spare = Spare()
        self.is_open = kernel.calls is not None and kernel.compiled.schedule is None

    def __repr__(self) -> str:
        if self.over_another is not None:
            return repr(self.over_another)
        return f"{self.kernel!r} with {', '.join(self.fixed) or 'nothing'} fixed"

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run with the open arguments; see `Kernel.__call__`."""
        if unnamed:
            raise self.kernel.signature.unnamed(unnamed)
        key, run = self.last
        if run is not None and fits(key, arguments):
            try:
                return run(arguments)
            except Unfit:
                pass
        if self.is_open:
            self._choose_format(arguments)
        if self.over_another is None:
            return self._planned(arguments)
        found = self.over_another(**arguments)
        self.last = self.over_another.last  # its plans are as good as ours
        return found

    def _planned(self, arguments: dict[str, Any]) -> Any:
        seen = look(arguments)
        plan = self.plans.get(seen.key) if seen is not None else None
        if seen is not None and plan is not None:
            try:
                run = plan.at(seen.dims)
                if key := shaped(arguments):
                    self.last = key, run
                return run(seen.values, arguments)
            except Unfit:
                pass
        return self._first(arguments, seen)

    def _choose_format(self, arguments: dict[str, Any]) -> None:
        """Convert the bound matrix if that pays within the calls that were announced."""
        from sparsetir.call.converting import bound_over_another

        self.over_another = bound_over_another(self.kernel, self.fixed, arguments)
        self.is_open = False

    def _first(self, arguments: dict[str, Any], seen: Seen | None) -> Any:
        """A call of a kind not seen yet, or one that does not fit: everything is checked."""
        kernel, signature = self.kernel, self.kernel.signature
        for name in arguments:
            self._check_open(name)
        args = kernel._prepare(arguments, self._merged())
        kernel._run(args)
        if seen is not None and seen.key not in self.plans and not args.copy_back:
            fitting = lambda args: kernel.fitting(args, is_bound=True)  # noqa: E731
            caller = Caller(signature, kernel.function, fitting, self.fixed, self.args, self.spare)
            remember(self.plans, seen.key, kernel._plan(caller, args, seen.values))
        return kernel._results(args, {**self.fixed, **arguments})

    def _check_open(self, name: str) -> None:
        """Raise if an argument is fixed, or an array of one that is."""
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

    def save(self, path: str | Path) -> Path:
        """Write it to a file with the fixed arguments; see `Kernel.save`."""
        from sparsetir.call.saving import save

        return save(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        from sparsetir.call.saving import rebound

        return rebound, (self.kernel, self.fixed)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a C library of the kernel, whose function takes the fixed arguments too; see `Kernel.export`."""
        return self.kernel.export(path, header=header)

    def _merged(self) -> Arguments:
        a = self.args
        return Arguments(
            dict(a.arrays), dict(a.sizes), dict(a.sources), dict(a.stored), set(a.raw), dict(a.given), [], a.torch
        )

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Timing:
        """Time repeated calls of the compiled function, all arguments ready."""
        if self.is_open:
            self._choose_format(arguments)
        if self.over_another is not None:
            return self.over_another.time(seconds=seconds, **arguments)
        return self.kernel.time(seconds=seconds, **self.fixed, **arguments)


def _passed(args: Arguments, param: Any) -> Any:
    if not param.is_array:
        return args.sizes[param.name]
    array = args.arrays[param.name]
    if array.size == 0:
        # numpy's strides of an empty array are not the compact ones that the compiled checks ask for.
        return tvm.runtime.empty(array.shape, param.dtype)
    return _bfloat16(array) if param.dtype == "bfloat16" else interop.writable_alias(array)


def _bfloat16(array: np.ndarray) -> Any:
    """A TVM tensor over a bfloat16 array, which numpy itself cannot hand out."""
    bits = tvm_ffi.from_dlpack(interop.writable_alias(array.view(np.uint16)))
    return bits._create_view(array.shape, "bfloat16")


def _check_overlap(args: Arguments, signature: Signature) -> None:
    """Outputs passed by the caller must not lie in an input: the loops assume that they do not."""
    for storage in signature.effects.written:
        if storage not in args.given:
            continue
        for other, array in args.arrays.items():
            if other != storage and np.may_share_memory(args.arrays[storage], array):
                name = signature.shown(storage)
                pair = f"{name} and {signature.shown(other)} share memory"
                raise ArgumentError(f"{pair}, and {name} is written: pass a separate array")


def measure(call: Callable[[], Any], *, seconds: float = 0.2) -> Timing:
    """Time `call` for `seconds` after one warm-up call."""
    call()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    ordered = sorted(samples)
    return Timing(ordered[len(ordered) // 2], ordered[0], ordered[-1], len(ordered))


__all__ = ["BoundKernel", "Kernel", "Timing", "measure"]
