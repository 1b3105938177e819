# SPDX-License-Identifier: Apache-2.0
"""One program on one workload: its expected results, its variants, and the times of candidates.

An evaluator runs in this process, or one in each worker process (`sparsetir.tuning.workers.local`): arguments and
results of its methods can be pickled, and errors of a candidate are returned, not raised.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from sparsetir.errors import TuningError
from sparsetir.formats.format import Format
from sparsetir.interop import is_sparse
from sparsetir.kernel_factory import make_kernel
from sparsetir.schedules import Choices
from sparsetir.tuning.features import ArgumentStorage
from sparsetir.tuning.knobs import Template
from sparsetir.tuning.lowered_program import compile_together
from sparsetir.tuning.measure import (
    BURST_SECONDS,
    PACE_SECONDS,
    Measurement,
    burst,
    lower_quartile,
    reason,
    summary,
    typical,
)
from sparsetir.tuning.records import Key, Record
from sparsetir.tuning.space import Candidate, Values
from sparsetir.tuning.variants import Call, FormatVariants, PreparedCall
from sparsetir.workloads.reference import KnownOp, Reference, recognise
from sparsetir.workloads.timing import LONG_CALL, timed_calls

# The speed of the machine is taken as constant for so many seconds, or calls of the untuned kernel if these take
# longer; a burst of the untuned kernel counts for so many of these periods.
MOMENT, CALLS, LATELY = 0.025, 8, 4
RACE_SECONDS, RACES = 0.003, 2  # of a short burst, and the number of short bursts before a long one
BEHIND, FAR_BEHIND = 1.3, 2.0  # times the best so far: a candidate this slow in all short bursts, or in one, is dropped
NEAR = 1.15  # times the best so far: only faster candidates get a long burst


@dataclass(frozen=True)
class Prepared:
    """A format that is ready, or why it is unavailable.

    Parameters
    ----------
    values : mapping of str to tuple, optional
        The choices that make a difference.
    stored : ArgumentStorage, optional
        How the format stores the argument.
    usual : Choices, optional
        What an untuned kernel over the format does for the arguments.
    error : str, optional
    """

    values: Values | None = None
    stored: ArgumentStorage | None = None
    usual: Choices | None = None
    error: str | None = None


class Measurer(ABC):
    """A measurer of the candidates of a search, here or elsewhere; it knows the formats that were requested.

    Attributes
    ----------
    is_here : bool
        Whether this process is as fast as what measures.
    slots : int
        How many candidates are measured at a time; 0 where a batch may be as large as a search likes.
    gone : Exception, optional
        The error that ended all measuring.
    usual : float, optional
        Seconds of the untuned kernel, at whose pace times are reported; None for as long as it will take.
    """

    is_here: bool = True
    slots: int = 0
    gone: Exception | None = None

    def __init__(self) -> None:
        self.known: dict[Format | None, Prepared] = {}
        self.usual: float | None = None

    @property
    def stored(self) -> dict[Format | None, ArgumentStorage]:
        """How the formats that are ready store the argument."""
        return {f: ready.stored for f, ready in self.known.items() if ready.stored is not None}

    @property
    def refused(self) -> dict[Format | None, str]:
        """The formats that are unavailable, and why; at None why a template does not fit the program as it is."""
        return {f: ready.error for f, ready in self.known.items() if ready.error is not None}

    def usual_over(self, format: Format | None) -> Choices | None:
        """Return the choices of an untuned kernel over a format; None before the format is prepared."""
        ready = self.known.get(format)
        return None if ready is None else ready.usual

    def refuse(self, format: Format | None, error: str) -> None:
        """Record that a format failed."""
        self.known[format] = Prepared(error=error)

    def keep_pace(self, seconds: float | None) -> None:
        """Report what is timed as if the untuned kernel took this long, None for as long as it will."""
        self.usual = seconds

    def keyed(self, key: Key) -> Key:
        """Return the key of records of the machine that measures."""
        return key

    def noted(self, key: Key, record: Record) -> Iterable[tuple[Key, Record]]:
        """Yield a record as its machine's."""
        yield key, record

    @abstractmethod
    def values(self, format: Format | None) -> Values | None:
        """Return the open choices of a format; None where it has no variant."""

    @abstractmethod
    def time(self, candidate: None = None) -> Measurement:
        """Check and time the untuned kernel."""

    @abstractmethod
    def measure(self, batch: Sequence[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Compile, check and time candidates."""

    @abstractmethod
    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        """Return seconds of candidates and, at None, of the untuned kernel, in turn."""

    @abstractmethod
    def rest(self) -> None:
        """Release processes and connections until the next job."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


class Evaluator:
    """Evaluation of a program's candidates: compile, check and time them.

    Parameters
    ----------
    func : PrimFunc
        At stage I.
    inputs : mapping of str to array
        The arguments of a call.
    target : Target, str or dict, optional
    template : Template, optional
        Whose knobs are searched; by default the sketches schedule.
    is_first : bool
        Whether the untuned kernel is still to be compared with scipy, where the program is a known one.

    Raises
    ------
    TuningError
        The untuned kernel disagrees with scipy.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        inputs: Mapping[str, Any],
        target: Any,
        template: Template | None = None,
        *,
        is_first: bool = True,
    ) -> None:
        self.func, self.inputs, self.target, self.template = func, dict(inputs), target, template
        self.kernel = make_kernel(func, target)
        self.workload = PreparedCall(self.kernel, self.inputs)
        self.known: KnownOp | None = recognise(func)
        self.names = [str(p.name) for p in func.params]
        self.untuned = self.workload.call(self._untuned(), self.names)
        self.reference, self.checked_against = self._reference(is_first)
        self.name = self._sparse_argument()
        self.variants = FormatVariants(self.kernel, target, self.inputs, self.workload, self.name, template)
        self.fixed = self.variants(None).sizes
        self.best = float("inf")  # least time of all candidates, relative to the untuned kernel
        self.paces: deque[BaselineTime] = deque(maxlen=LATELY)
        if template is None:
            # A program that the sketches cannot schedule is an error here, not a failed trial.
            self.variants.values(None)

    def _untuned(self) -> Callable[..., Any]:
        """Return the function that a bound kernel calls for these arguments."""
        fit, _after = self.kernel.fitting(self.workload.args, is_bound=True)
        return self.kernel.function if fit is None else fit()

    def _sparse_argument(self) -> str | None:
        """Return the sparse argument that may be stored in another format: the only one, of at least two dimensions."""
        buffers = [n for n, v in self.inputs.items() if is_sparse(v) and n in self.kernel.signature.buffers]
        unused = [n for n, v in self.inputs.items() if is_sparse(v) and n not in buffers]
        return buffers[0] if len(buffers) == 1 and not unused and len(self.inputs[buffers[0]].shape) > 1 else None

    def _reference(self, is_first: bool) -> tuple[Reference, str]:
        """Return the results of the untuned kernel, compared with those of scipy for a known program."""
        absolute = self.workload.absolute()
        magnitudes = absolute.fresh(absolute.call(self.kernel.function, self.names))
        reference = Reference(self.workload.fresh(self.untuned), magnitudes)
        computed = self.known.compute(self.inputs) if self.known is not None and is_first else None
        if computed is None:
            return reference, "the untuned kernel"
        (name,) = reference.expected
        difference = reference.disagreement({name: computed})
        if difference is not None:
            raise TuningError(
                f"the untuned kernel disagrees with scipy, whose {difference}; please report this program"
            )
        return reference, "scipy"

    def prepare(self, format: Format | None) -> Prepared:
        """Convert the sparse argument, and find the choices that are open."""
        values = self.variants.values(format)
        if values is None:
            return Prepared(error=self.variants.refused.get(format))
        ready = self.variants(format)
        return Prepared(values, ready.stored, ready.usual if self.template is None else None)

    def compile(self, candidate: Candidate) -> str | None:
        """Make machine code of a candidate; the reason where there can be none."""
        try:
            self.call(candidate)
        except Exception as error:  # it fails the candidate, not the search
            return reason(error)
        return None

    def compile_together(self, candidates: Sequence[Candidate]) -> None:
        """Compile several candidates in less time than one by one; errors are raised by `compile` later."""
        with suppress(Exception):
            pairs = [(c.format, c.choices) for c in candidates if isinstance(c.choices, Choices)]
            compile_together((self.variants(format).form, choices) for format, choices in pairs)

    def call(self, candidate: Candidate) -> Call:
        """Return a call of a candidate's machine code."""
        return self.variants(candidate.format).call(candidate.choices)

    def time(self, candidate: Candidate | None) -> Measurement:
        """Check what a candidate computes, then time it; None is the untuned kernel."""
        try:
            call = self.untuned if candidate is None else self.call(candidate)
            workload = self.workload if candidate is None else self.variants(candidate.format).workload
            first = Clocked(call)
            difference = self.reference.disagreement(workload.fresh(first))
            if difference is not None:
                return Measurement(error=f"wrong result: {difference}")
            if candidate is None:
                return summary(burst(call, BURST_SECONDS))
            self.variants(candidate.format).form.prove(candidate.choices)
            timing, usual = self._raced(call, first.seconds)
            self.best = min(self.best, (timing.seconds or float("inf")) / usual)
            return replace(timing, usual=usual)
        except Exception as error:
            return Measurement(error=reason(error))

    def typical(self, candidate: Candidate | None, seconds: float) -> float:
        """Return seconds of a typical call; infinite if the candidate fails."""
        try:
            return typical(self.untuned if candidate is None else self.call(candidate), seconds)
        except Exception:
            return float("inf")

    def interleaved(self, candidate: Candidate, seconds: float) -> tuple[float, float]:
        """Return `typical`, and that of the untuned kernel at about the same time."""
        usual = paced(self, seconds)
        seconds_typical = self.typical(candidate, seconds)
        return seconds_typical, self._doubted(seconds_typical, usual, seconds)

    def _raced(self, call: Call, first: float) -> tuple[Measurement, float]:
        """Time a candidate and the untuned kernel; a candidate far behind the best in short bursts only.

        `first` has the seconds of a call that was made already. What the caches held then makes no difference to a long
        one.
        """
        usual, samples = paced(self, PACE_SECONDS), list[float]()
        recorded = [[first]] if first > LONG_CALL else []
        for n in range(RACES):
            turn = recorded[n] if n < len(recorded) else timed_calls(call, RACE_SECONDS, least=2, least_long=1)
            samples += turn
            behind = lower_quartile(turn) / usual / self.best
            if behind > FAR_BEHIND:
                break
            if behind <= BEHIND:
                samples += burst(call, BURST_SECONDS if behind <= NEAR else RACE_SECONDS)
                break
        return summary(samples), self._doubted(lower_quartile(samples), usual, PACE_SECONDS)

    def _doubted(self, seconds: float, usual: float, turn: float) -> float:
        """Return the untuned kernel's time, taken once more where what was timed meanwhile would be the best so far.

        A pause of the machine that hit the untuned kernel alone makes others look fast, and those after them slow.
        """
        if seconds / usual >= self.best:
            return usual
        self.paces.append(BaselineTime(self.typical(None, turn), time.perf_counter()))
        return min(usual, self.paces[-1].seconds)

    def disagreement(
        self, function: Callable[..., Any], names: list[str], format: Format | None
    ) -> tuple[Call, str | None]:
        """Return a call of a function over a format's arguments, and what is wrong with its result."""
        workload = self.variants(format).workload
        call = workload.call(function, names)
        return call, self.reference.disagreement(workload.fresh(call))


@dataclass(frozen=True)
class BaselineTime:
    """A typical call of the untuned kernel, and when it was timed."""

    seconds: float
    at: float

    def is_younger(self, times: float) -> bool:
        """Return whether it was timed within so many moments."""
        return time.perf_counter() - self.at <= times * max(MOMENT, CALLS * self.seconds)


def paced(evaluator: Evaluator, seconds: float) -> float:
    """Return a typical call of the untuned kernel: the fastest of the last bursts, one of which is a moment old.

    Were it the last one, a pause of the machine that hits this kernel alone would make others look fast.
    """
    if not evaluator.paces or not evaluator.paces[-1].is_younger(1):
        typical = evaluator.typical(None, seconds)
        evaluator.paces.append(BaselineTime(typical, time.perf_counter()))
    return min(pace.seconds for pace in evaluator.paces if pace.is_younger(LATELY) or pace is evaluator.paces[-1])


@dataclass
class Clocked:
    """A call that notes how long it took."""

    call: Call
    seconds: float = float("inf")

    def __call__(self) -> Any:
        begin = time.perf_counter()
        result = self.call()
        self.seconds = time.perf_counter() - begin
        return result


__all__ = ["Evaluator", "Measurer", "Prepared"]
