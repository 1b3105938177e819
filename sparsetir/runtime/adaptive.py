# SPDX-License-Identifier: Apache-2.0
"""Bound kernels that convert their matrix to other formats, and keep whichever is fastest in calls.

Rules and the cost model predict which format is faster; timed calls decide. A matrix that is bound for many calls is
converted at the first one (``sparsetir.build(program, expected_calls=...)``), or on a background thread once its calls
have taken long enough that a conversion costs less than it may save. Bursts of calls then alternate between the kernels
until each has been timed a few times, and the fastest kernel makes all later calls.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from sparsetir import interop
from sparsetir.errors import SparseTIRError
from sparsetir.formats import heuristics
from sparsetir.formats.pattern import checksum
from sparsetir.formats.tensor import SparseTensor
from sparsetir.runtime.call_plan import PlanMismatch, Run, shaped
from sparsetir.utils import buffers
from sparsetir.utils.caches import ForkLock
from sparsetir.utils.machine import LINE

if TYPE_CHECKING:
    from sparsetir.runtime.bound import BoundKernel

Call: TypeAlias = Callable[..., Any]

SWITCH = "SPARSETIR_CONVERT"  # 0 turns conversions on background threads off
MIN_ENTRIES = 1 << 14  # of a matrix; code for another format costs more than the calls of a smaller one
TRIAL_CALLS = 8  # before formats are compared if expected_calls is not set
TRIAL_SECONDS = 0.2  # of these calls at least: about what compiling and converting take, so that short runs do neither
SAMPLES, MOST_SAMPLES = 4, 20  # timed calls of each candidate
BURST = 3  # consecutive calls of a candidate; the first one reads its matrix from memory, not from a cache
SAMPLED_SECONDS = 1e-3  # that the samples of a candidate with short calls take together
SHORT_CALL = 20e-6  # seconds; overhead dominates shorter calls, so that a format for expected calls is kept
TIMED_SHORT = 16  # short calls for each timed one
MOST_SHAPES = 64  # of arguments whose faster kernel is recorded


class Trial:
    """Time calls of candidates in turn, until the fastest is known.

    The first call of each is not timed, as it may compile. Bursts of calls follow, at least two of each candidate, so
    that a phase in which the machine is slower counts for all of them; the first call of a burst is not timed either.
    The first candidate's first burst comes before all others, see `is_short`.

    Parameters
    ----------
    candidates : sequence of (str, callable)
        Names and what to call; the first one is what is called anyway.

    Attributes
    ----------
    best : callable or None
        The fastest, once each has been timed often enough.

    Examples
    --------
    >>> trial = Trial([("slow", lambda: time.sleep(1e-3)), ("fast", lambda: None)])
    >>> while trial.best is None:
    ...     trial()
    >>> trial.winner
    'fast'
    """

    def __init__(self, candidates: Sequence[tuple[str, Call]]) -> None:
        self.candidates = [_Candidate(name, call) for name, call in candidates]
        self.best: Call | None = None
        self.winner = ""

    def __call__(self, *operands: Any, **arguments: Any) -> Any:
        """Make a call by the candidate with the fewest bursts of calls; those that only ever fail are left out."""
        able = [candidate for candidate in self.candidates if candidate.failures < BURST or candidate.has_worked]
        left = able or self.candidates
        # One burst of the first tells whether calls are so short that the others need not be compiled.
        candidate = left[0] if left[0].bursts < 2 else min(left, key=lambda candidate: candidate.bursts)
        try:
            result = candidate(operands, arguments)
        except Exception:
            # What no candidate has done yet may fail because of the arguments.
            candidate.failures += any(other.has_worked for other in self.candidates)
            raise
        if able and all(candidate.is_sampled for candidate in able):
            fastest = min(able, key=lambda candidate: min(candidate.seconds))
            self.winner, self.best = fastest.name, fastest.call
        return result

    @property
    def is_short(self) -> bool:
        """True if calls take less than `SHORT_CALL`, where the choice of a candidate matters little."""
        return any(min(candidate.seconds, default=math.inf) < SHORT_CALL for candidate in self.candidates)

    def __str__(self) -> str:
        return ", ".join(f"{c.name} {min(c.seconds) * 1e3:.3g} ms" for c in self.candidates if c.seconds)


class _Candidate:
    """A candidate of a trial, with the seconds of its timed calls."""

    def __init__(self, name: str, call: Call) -> None:
        self.name, self.call = name, call
        self.seconds: list[float] = []
        self.calls = self.failures = 0
        self.has_worked = False

    def __call__(self, operands: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
        is_timed = self.calls > 0 and (self.calls - 1) % BURST > 0
        self.calls += 1
        start = time.perf_counter()
        result = self.call(*operands, **arguments)
        if is_timed:
            self.seconds.append(time.perf_counter() - start)
        self.has_worked = True
        return result

    @property
    def bursts(self) -> int:
        """The number of complete bursts; the first call of all counts as one."""
        return 0 if self.calls == 0 else 1 + (self.calls - 1) // BURST

    @property
    def is_sampled(self) -> bool:
        """True if enough calls were timed."""
        count = len(self.seconds)
        return count >= SAMPLES and (sum(self.seconds) >= SAMPLED_SECONDS or count > MOST_SAMPLES)


_spare: list[np.ndarray] = []  # buffer of the last copy of an operand, for the next copy of any kernel


class AlignedOperand:
    """Call a function with a copy of an operand whose rows begin at cache lines, where calls with a copy are faster.

    numpy's arrays begin at any multiple of 16 bytes, so that a gathered row of one line lies in two. Rows whose length
    is no multiple of a line have gaps between them in the copy.

    Parameters
    ----------
    function : callable
    place : int
        Of the operand among the arguments.
    on_copies : callable
        Takes an operand; returns the function to call with a copy, or None where none is worth a trial, and the
        elements from one row of the copy to the next.
    """

    def __init__(self, function: Call, place: int, on_copies: Callable[[np.ndarray], tuple[Call | None, int]]) -> None:
        self.function, self.place, self.on_copies = function, place, on_copies
        # For each number of columns: the trial, and whether copies have gaps between their rows.
        self.trials: dict[int, tuple[Trial | None, bool]] = {}
        self.last: weakref.ref[Any] | None = None  # the last operand that is best read as it is

    def __call__(self, *ready: Any) -> Any:
        operand = ready[self.place]
        last = self.last
        if (last is not None and last() is operand) or not isinstance(operand, np.ndarray):
            return self.function(*ready)
        trial, has_gaps = self.trials.get(operand.shape[-1]) or self._trial(operand)
        if trial is None or (not has_gaps and operand.ctypes.data % LINE == 0):
            self.last = weakref.ref(operand)
            return self.function(*ready)
        return (trial.best or trial)(*ready)

    def _trial(self, operand: np.ndarray) -> tuple[Trial | None, bool]:
        """Create the trial for operands with this number of columns; return it, and whether copies have gaps."""
        if len(self.trials) >= MOST_SHAPES:
            return None, False
        called, length = self.on_copies(operand)
        columns, trial = operand.shape[-1], None
        if called is not None:
            on_copy: Call = partial(self._with_copy, called, length)
            trial = Trial([("as passed", self.function), ("copied", on_copy)])
        self.trials[columns] = trial, length != columns
        return self.trials[columns]

    def _with_copy(self, called: Call, length: int, *ready: Any) -> Any:
        operand, passed = ready[self.place], list(ready)
        shape, columns = (*operand.shape[:-1], length), operand.shape[-1]
        nbytes = math.prod(shape) * operand.itemsize
        try:
            memory = _spare.pop()  # pop() is atomic, so that threads cannot share a buffer
        except IndexError:
            memory = None
        if memory is None or memory.nbytes < nbytes:
            memory = buffers.empty((nbytes,), np.dtype(np.uint8))
        copy = memory[:nbytes].view(operand.dtype).reshape(shape)
        copy[..., :columns] = operand
        copy[..., columns:] = 0  # kernels compute with the gaps, and subnormal numbers would be slow
        passed[self.place] = copy
        try:
            return called(*passed)
        finally:
            _spare[:] = [memory]


_converters: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def in_background(convert: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Start a thread that converts a matrix.

    It is no daemon: Python waits for it before LLVM is unloaded. A fork waits for it too, because a child would find
    locked for ever what the thread had locked.
    """
    thread = threading.Thread(target=convert, args=arguments, name="sparsetir-converter")
    _converters.add(thread)
    thread.start()
    return thread


def _wait_for_converters() -> None:
    for thread in list(_converters):
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_converters)


class _CountedRun:
    """A plan that counts and times its calls, until another format is ready for a trial (`PlanMismatch`)."""

    def __init__(self, adaptive: Adaptive, run: Run) -> None:
        self.adaptive, self.run = adaptive, run
        self.each = self.left = 1  # calls for each timed call, and calls until the next timed one

    def __call__(self, arguments: dict[str, Any]) -> Any:
        self.left -= 1
        if self.left > 0:
            return self.run(arguments)
        adaptive, calls = self.adaptive, self.each
        if adaptive.others or adaptive.is_settled:
            raise PlanMismatch
        start = time.perf_counter()
        result = self.run(arguments)
        seconds = time.perf_counter() - start
        self.each = self.left = TIMED_SHORT if seconds < SHORT_CALL else 1
        # Untimed calls were short; a delay of the timed call says nothing of them.
        adaptive._count(arguments, seconds + (calls - 1) * min(seconds, SHORT_CALL), calls)
        return result


class Adaptive:
    """Choice of the format that the calls of a bound kernel use.

    Parameters
    ----------
    bound : BoundKernel
        Over the format of the matrix as it was passed.
    matrices : sequence of str
        Names of the fixed sparse arguments.
    """

    def __init__(self, bound: BoundKernel, matrices: Sequence[str]) -> None:
        self._bound = weakref.ref(bound)  # weak: a cycle would need the garbage collector
        self.kernel, self.matrices = bound.kernel, matrices
        self.announced = bound.kernel.expected_calls
        self.is_asked = self.announced is None  # whether formats were compared for the expected calls
        self.is_settled = False  # True: no other format will be tried
        self.calls, self.seconds = 0, 0.0
        self.next_calls, self.next_seconds = TRIAL_CALLS, TRIAL_SECONDS  # at which formats are compared
        self.converter: threading.Thread | None = None
        self.starting = ForkLock()
        self.others: tuple[Any, ...] = ()  # bound kernels over other formats; one once the first trial is decided
        self.checked: list[tuple[np.ndarray, int]] = []  # values that may change, and their checksums
        self.trials: dict[Any, Trial | bool] = {}  # by shapes of the open arguments: whether the other format is faster
        self.history: list[str] = []

    @property
    def other(self) -> Any:
        """The first of the bound kernels over other formats; None where there is none."""
        return self.others[0] if self.others else None

    @property
    def bound(self) -> BoundKernel:
        bound = self._bound()
        assert bound is not None  # the caller refers to it during a call
        return bound

    # ------------------------------------------------------------------ calls

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Make a call with one of the kernels."""
        if self.is_settled:
            return self.bound.planned(arguments)
        if self.others:
            return self._by_either(arguments)
        start = time.perf_counter()
        result = self.bound.planned(arguments)
        if not self.is_asked:
            self.ask(arguments, time.perf_counter() - start)
            return result
        self._count(arguments, time.perf_counter() - start)
        key, run = self.bound.last
        if run is not None and type(run) is not _CountedRun:  # a call of another kind may have set the last plan
            self.bound.last = key, _CountedRun(self, run)
        return result

    def _count(self, arguments: Mapping[str, Any], seconds: float, calls: int = 1) -> None:
        self.calls += calls
        self.seconds += seconds
        if self.calls < self.next_calls or self.seconds < self.next_seconds:
            return
        if self.starting.acquire(blocking=False):  # otherwise another thread is starting a conversion
            try:
                if not self._is_converting():
                    self._start_conversion(arguments)
            finally:
                self.starting.release()

    def _is_converting(self) -> bool:
        """Return whether a conversion is running or complete; its thread may end during a call.

        A second conversion would replace the checksums of values that are on trial.
        """
        converter = self.converter  # read first: a thread sets `others` before it ends
        return (converter is not None and converter.is_alive()) or bool(self.others) or self.is_settled

    def _by_either(self, arguments: dict[str, Any]) -> Any:
        key = shaped(arguments) or tuple((n, np.shape(v), type(v)) for n, v in arguments.items())
        choice = self.trials.get(key)
        if choice is None:
            choice = self._new_trial(key)
        if isinstance(choice, Trial):
            result = choice(**arguments)
            self.bound.last = (), None
            self._decide(key, choice)
        elif choice and (other := self.other) is not None:
            result = self._by_other(other, **arguments)
            if self.others:
                self.bound.last = self._checked(*other.last)
        else:
            result = self.bound.planned(arguments)
        return result

    def _new_trial(self, key: Any) -> Trial:
        if len(self.trials) >= MOST_SHAPES:
            self.trials.clear()
        candidates: list[tuple[str, Call]] = [("as passed", self._by_own)]
        candidates += [(_name(other), partial(self._by_other, other)) for other in self.others]
        trial = self.trials[key] = Trial(candidates if self.announced is None else candidates[::-1])
        return trial

    def _decide(self, key: Any, trial: Trial) -> None:
        """Keep the winner of a trial for arguments of these shapes.

        The other kernels are freed where the first trial says so; later ones are between its winner and the matrix as
        it was passed.
        """
        if self.is_settled:
            return
        if self.announced is not None and trial.is_short:
            self._keep(key, self.other)
            self.history.append(f"{_described(key)}: kept {self.description} without a trial, because calls are short")
        elif (best := trial.best) is not None:
            is_first = all(isinstance(choice, Trial) for choice in list(self.trials.values()))
            self.history.append(f"{_described(key)}: {trial}; kept {trial.winner}")
            if isinstance(best, partial):
                self._keep(key, best.args[0])
                return
            self.trials[key] = False
            if is_first:
                self._settle()

    def _keep(self, key: Any, other: Any) -> None:
        """Make calls of these shapes with another kernel, and drop the slower ones."""
        if len(self.others) > 1:
            self.others = (other,)
            self.trials.clear()  # trials of other shapes include the kernels that were dropped
        self.trials[key] = True

    def _by_own(self, **arguments: Any) -> Any:
        """Make a call over the matrix as it was passed."""
        return self.bound.planned(arguments)

    def _by_other(self, other: Any, **arguments: Any) -> Any:
        """Make a call over another format, unless values have changed since they were converted."""
        is_open = self.others and not self._has_changed()
        return other(**arguments) if is_open else self.bound.planned(arguments)

    def _checked(self, key: Any, run: Run | None) -> tuple[Any, Run | None]:
        """Return a plan of the other kernel that checks for changed values first."""
        if run is None or not self.checked:
            return key, run

        def checked(arguments: dict[str, Any]) -> Any:
            if self._has_changed():
                raise PlanMismatch
            return run(arguments)

        return key, checked

    def _has_changed(self) -> bool:
        """Return whether values changed since their conversion; if so, settle on the matrix as it was passed.

        Another thread may have detected a change: a call that still has a plan over the other format must not use it.
        """
        if self.is_settled:
            return True
        if all(checksum(array) == previous for array, previous in self.checked):
            return False
        self.history.append("values of the matrix have changed: it stays as it was passed")
        self._settle()
        return True

    def _settle(self) -> None:
        """Make all later calls over the matrix as it was passed."""
        self.is_settled, self.others = True, ()
        self.trials.clear()
        self.bound.last = (), None

    # ------------------------------------------------------------------ conversions

    @property
    def description(self) -> str:
        """The other format, or the other schedule of the same one."""
        return _name(self.other)

    def ask(self, arguments: dict[str, Any], seconds: float = math.inf) -> None:
        """Compare formats for the expected calls, after the first of them, which took `seconds`."""
        if self.is_asked:
            return
        self.is_asked = True
        bound, calls = self.bound, (self.announced or 0) - 1
        if self._may_pay(calls, seconds):
            timed = None
            if not self.kernel.signature.effects.updated:
                start = time.perf_counter()
                bound.planned(arguments)  # a second call: the first one includes work that is done only once
                timed = time.perf_counter() - start
            if timed is None or self._may_pay(calls, timed):
                self.others = self._converted(bound, bound.fixed, arguments, calls, timed)
        bound.last = (), None
        if not self.others:
            self.history.append(f"no other format pays within {self.announced} calls")
            self.is_settled = not self.announced or bool(why_not_counted(bound))
            # After more calls than expected, formats are compared as if no number had been given.
            self.next_calls, self.announced = 2 * (self.announced or 0), None

    def _may_pay(self, calls: float, seconds: float) -> bool:
        """Return whether so many calls take much longer than the comparison of formats."""
        entries = sum(_entries(self.bound.fixed[name]) for name in self.matrices)
        return heuristics.is_worth_looking(entries, calls, seconds)

    def _converted(
        self,
        bound: BoundKernel,
        fixed: Mapping[str, Any],
        arguments: Mapping[str, Any],
        calls: float,
        seconds: float | None,
    ) -> tuple[Any, ...]:
        assert self.kernel.convert is not None
        plain = _plain(bound)
        return tuple(self.kernel.convert(self.kernel, fixed, arguments, calls=calls, seconds=seconds, plain=plain))

    def _start_conversion(self, arguments: Mapping[str, Any]) -> None:
        """Convert on a background thread, for as many further calls as were made so far."""
        bound = self.bound
        calls, seconds = self.calls, self.seconds / self.calls
        self.next_calls, self.next_seconds = 2 * calls, 2 * self.seconds
        checked = [(array, checksum(array)) for array in self._values() if not is_frozen(array)]
        fixed = dict(bound.fixed)
        if checked:  # a copy, as values may change during the conversion
            fixed |= {name: _copied(fixed[name]) for name in self.matrices}
        operands = {name: _copied(value) for name, value in arguments.items()}
        self.converter = in_background(self._convert, bound, fixed, operands, checked, calls, seconds)

    def _convert(
        self,
        bound: BoundKernel,
        fixed: dict[str, Any],
        operands: dict[str, Any],
        checked: list[tuple[np.ndarray, int]],
        calls: int,
        seconds: float,
    ) -> None:
        kernel, others = self.kernel, ()
        try:
            others = self._converted(bound, fixed, operands, calls, seconds)
            if not others:
                self.history.append(f"no other format pays within {calls} calls")
            else:
                expected = type(kernel)(kernel.func, kernel.compiled)(**fixed, **operands)
                others = tuple(other for other in others if self._is_right(other, operands, expected))
                self.is_settled = not others
        except (SparseTIRError, MemoryError) as error:
            self.history.append(f"converting failed: {error}")
            others, self.is_settled = (), True
        finally:
            self.checked, self.others, self.converter = checked, others, None

    def _is_right(self, other: Any, operands: dict[str, Any], expected: Any) -> bool:
        """Return whether a kernel over another format comes to the expected result."""
        is_right = _agree(expected, other(**operands))
        if not is_right:
            self.history.append(f"results over {_name(other)} differ: it is not used")
        return is_right

    def _values(self) -> list[np.ndarray]:
        """Return the arrays of values of the matrices, as the kernel reads them."""
        signature, args = self.kernel.signature, self.bound.args
        names = (signature.storage_name(name) for name in self.matrices)
        return [args.arrays[name] for name in names if name in args.arrays]

    def explain(self) -> str:
        """Return what was compared, a line each."""
        if self.history:
            return "\n".join(self.history)
        if self.others:
            return "on trial: as passed, " + "; ".join(map(_name, self.others))
        calls = f"{self.calls} calls in {self.seconds:.3g} s" if self.is_asked else "no call yet"
        return f"as passed: {calls}; another format is looked for after {self.next_calls} in {self.next_seconds:.3g} s"


def _plain(bound: BoundKernel) -> Call:
    """Return calls over the matrix as it was passed that leave no plan behind, and do not keep `bound` alive."""
    reference = weakref.ref(bound)

    def plain(**arguments: Any) -> Any:
        bound = reference()
        assert bound is not None  # it makes the call
        last = bound.last
        result = bound.planned(arguments)
        bound.last = last
        return result

    return plain


def adaptive(bound: BoundKernel) -> Adaptive | None:
    """Return what may convert the matrix of a bound kernel; None where it stays as it was passed."""
    return None if why_not_adaptive(bound) else Adaptive(bound, _matrices(bound))


def why_not_adaptive(bound: BoundKernel) -> str:
    """Return why the matrix of a bound kernel stays as it was passed; empty where it may be converted."""
    kernel = bound.kernel
    if kernel.convert is None or kernel.compiled.schedule is not None:
        return "the schedule was given" if kernel.compiled.schedule is not None else "the build does not allow it"
    return "" if kernel.expected_calls is not None else why_not_counted(bound)


def why_not_counted(bound: BoundKernel) -> str:
    """Return why no format is looked for after a number of calls; empty where one may be."""
    matrices = _matrices(bound)
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if len(matrices) != 1:
        return "it is for a single bound matrix or tensor"
    effects = bound.kernel.signature.effects
    if effects.updated:
        return "the program updates its results"
    if not bound.args.arrays.keys().isdisjoint(effects.written):
        return "a result is bound, which a background thread must not write to"
    return "" if _entries(bound.fixed[matrices[0]]) >= MIN_ENTRIES else "the matrix is small"


def _matrices(bound: BoundKernel) -> list[str]:
    """Return the names of fixed sparse arguments."""
    return [name for name, value in bound.fixed.items() if interop.is_sparse(value)]


def _entries(matrix: Any) -> int:
    nnz = getattr(matrix, "nnz", None)
    return int(nnz if nnz is not None else matrix._nnz())


def is_frozen(array: Any) -> bool:
    """Return whether an array is read-only, and so are those it is a view of."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        if array.base is None:
            return True
        array = array.base
    return isinstance(array, bytes)


def _copied(value: Any) -> Any:
    """Return an argument that later changes do not reach."""
    if isinstance(value, (np.ndarray, sp.sparray, sp.spmatrix, SparseTensor)):
        return value.copy()
    clone = getattr(value, "clone", None)
    return value if clone is None else clone()


def _agree(first: Any, second: Any) -> bool:
    """Return whether results are the same up to the rounding of sums in another order."""
    if isinstance(first, tuple):
        return all(map(_agree, first, second))
    first, second = (interop.open_source(v, "result").values if interop.is_sparse(v) else v for v in (first, second))
    a, b = (interop.array_of_numbers(v, "result") for v in (first, second))
    if a.dtype.kind in "biu":
        return np.array_equal(a, b)
    eps = 2.0**-4 if a.dtype.itemsize < 4 else float(np.finfo(a.dtype).eps) ** 0.5
    a, b = (x.astype(np.float64, copy=False) for x in (a, b))
    finite = np.abs(a[np.isfinite(a)])
    atol = eps * float(finite.max(initial=0.0))
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0.0, atol=atol, equal_nan=True))


def _name(bound: Any) -> str:
    """Return the format that a bound kernel is over, or the schedule that is another one."""
    kernel = bound.kernel
    formats = getattr(kernel, "formats", {})
    chosen = getattr(kernel, "preferred", None) or getattr(getattr(kernel, "kernel", None), "preferred", {})
    parts = [*map(repr, formats.values()), *(f"{name}={value}" for name, value in chosen.items())]
    return ", ".join(parts) or "another format"


def _described(key: Any) -> str:
    """Return the shapes of open arguments as text."""
    return ", ".join(f"{name} {shape}" for name, shape, _ in key)


__all__ = ["Adaptive", "Trial", "adaptive", "in_background", "is_frozen"]
