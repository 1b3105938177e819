# SPDX-License-Identifier: Apache-2.0
"""One search: a program on a workload, its trials, those in the database first, and the last comparison."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ExecutorLostError, SparseTIRError, TuningError
from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import Conversion, dense_rows, ranked_candidates
from sparsetir.formats.pattern import MatrixPattern, pattern
from sparsetir.kernel_factory import Judge, conversion_for
from sparsetir.lower import single
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.validation import NonFiniteGuard
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.tuning import features
from sparsetir.tuning.evaluator import Evaluator, Measurer
from sparsetir.tuning.features import WorkloadEncoding
from sparsetir.tuning.knobs import Config, Template
from sparsetir.tuning.loop import (
    WORTH,
    Budget,
    CandidateSource,
    Comparison,
    Cost,
    Log,
    Outcome,
    Progress,
    TrialLoop,
    is_untuned,
    judged,
    last_of,
    note,
    rescaled,
    select_final,
    winner,
    with_best,
)
from sparsetir.tuning.measure import duel, reason, typical
from sparsetir.tuning.model import CostModel, Model, prior_for, rates_known
from sparsetir.tuning.predict import Prediction, Recommendation, chosen, guess, judge
from sparsetir.tuning.records import Database, Key, Record, fingerprint, hints
from sparsetir.tuning.report import OWN, TuneResult
from sparsetir.tuning.search import Search
from sparsetir.tuning.space import Candidate, Space
from sparsetir.tuning.tuned_kernel import TunedKernel, Variant, circumstances
from sparsetir.tuning.variants import Call, own_storage
from sparsetir.tuning.work import Work
from sparsetir.tuning.workers.local import TIMEOUT, Process, can_send, pool_of
from sparsetir.tuning.workers.remote import ExecutorMeasurer
from sparsetir.tuning.workers.rpc import RPCMeasurer
from sparsetir.utils.caches import cached_property
from sparsetir.utils.threads import get_num_threads
from sparsetir.workloads.inputs import dense_shapes

ANNOUNCED = 1000  # calls: the result is not slower than the kernel that is built for so many


class Session:
    """One program on one workload: everything that a search needs and that does not change during it.

    Parameters
    ----------
    program : PrimFunc or IRModule with one PrimFunc
    inputs : mapping of str to array
    target : Target, str or dict, optional
    formats : sequence of Format, optional
        By default those that suit the pattern; none with a template.
    template : Template, optional
        Whose knobs are searched; by default the sketches schedule.
    isolate : bool
        Whether candidates run in worker processes.
    timeout : float
        Seconds of a compilation or a measurement there.
    assume_finite : bool
        Whether arguments are promised to hold neither infinities nor NaN.
    executor : concurrent.futures.Executor or str, optional
        Whose workers measure, rather than processes of this one; the address of an RPC tracker.
    machines : {"same", "each"}
        Whether these must be of one kind.
    """

    def __init__(
        self,
        program: Any,
        inputs: Mapping[str, Any],
        target: Any,
        formats: Sequence[Format] | None = None,
        template: Template | None = None,
        *,
        isolate: bool = False,
        timeout: float = TIMEOUT,
        assume_finite: bool = False,
        executor: Executor | str | None = None,
        machines: str = "same",
        model: Model | None = None,
    ) -> None:
        self.assume_finite, self.model = assume_finite, model
        if isolate and executor is None and can_send(inputs):
            Process.warm()
        self.evaluator = Evaluator(single(program), inputs, target, template)
        self.func, self.kernel, self.workload = self.evaluator.func, self.evaluator.kernel, self.evaluator.workload
        sizes = self.sizes
        self.flops = self.evaluator.known.flops(sizes) if self.evaluator.known is not None else None
        self.key = self._key()
        name = self.evaluator.name
        self.described = pattern(self.evaluator.inputs[name]) if name is not None else None
        self.fixed = self.evaluator.fixed
        format_list = self._formats(formats)
        self.named = None if formats is None else [None, *formats]
        if template is not None and not format_list:
            # Raised from here, an error shows the line of the template.
            template.space(self.evaluator.variants(None).form.second)
        if executor is None:
            self.pool: Measurer = pool_of(self.evaluator, format_list, isolate=isolate, timeout=timeout)
        elif isinstance(executor, str):
            self.pool = RPCMeasurer(executor, self.evaluator, timeout=timeout)
        else:
            self.pool = ExecutorMeasurer(executor, self.evaluator, format_list, machines=machines, timeout=timeout)
        self.key = self.pool.keyed(self.key)
        base = self.usual.choices if template is None else Config()
        self.space = Space([None, *format_list], self.pool.values, base, self._ready, self.pool.usual_over)
        self._check_template()
        self.facts = self._facts()

    @property
    def template(self) -> Template | None:
        """Whose knobs are searched."""
        return self.evaluator.template

    def _check_template(self) -> None:
        """Raise unless the template, if there is one, fits the program as it is or over some format."""
        if self.template is None or any(self.space.values(format) is not None for format in self.space.formats):
            return
        self.close()
        raise TuningError(f"{self.template!r} does not fit the program: {told(self.pool.refused)}")

    def _formats(self, formats: Sequence[Format] | None) -> list[Format]:
        """Return the formats that are worth trying, the likeliest first."""
        if self.described is None:
            return []
        if formats is not None:
            return list(formats)
        if self.template is not None:  # it is written for the loops of the program as it is
            return []
        promising_formats = ranked_candidates(self.described, feat=dense_rows(dense_shapes(self.evaluator.inputs)))
        ruled = dict.fromkeys([self._ruled_for(ANNOUNCED), self.ruled])
        likely = [f for f in ruled if f is not None and f not in promising_formats]
        return [*likely, *promising_formats]

    @cached_property
    def ruled(self) -> Format | None:
        """The format that the rules choose for any number of calls, if any."""
        return self._ruled_for(math.inf)

    @cached_property
    def preferred(self) -> Conversion | None:
        """The format and choices that ``sparsetir.build(program, expected_calls=ANNOUNCED)`` tries first, if any."""
        return self._conversion_for(ANNOUNCED, partial(chosen, described=self.described))

    def _conversion_for(self, calls: float, judge: Judge | None = None) -> Conversion | None:
        if self.evaluator.name is None or self.template is not None:
            return None
        return conversion_for(self.kernel, self.evaluator.name, self.evaluator.inputs, calls=calls, judge=judge)

    def _ruled_for(self, calls: float) -> Format | None:
        conversion = self._conversion_for(calls)
        return None if conversion is None else conversion.format

    @cached_property
    def announced(self) -> Candidate | None:
        """Return the candidate of a build with expected calls; None if the same as the untuned kernel.

        None, too, where the caller's formats or configurations are without it.
        """
        if self.preferred is None:
            return None
        usual, changes = self._usual_over(self.preferred.format), self.preferred.choices
        if usual is None or not changes or not isinstance(usual.choices, Choices):
            return usual
        candidate = Candidate(usual.choices.changed(**changes), usual.format)
        return candidate if candidate in self.space else usual

    @cached_property
    def first(self) -> list[Candidate]:
        """The candidates that are measured first: the `announced` one, and the choice of the rules if it differs."""
        candidates = [self.announced, None if self.ruled is None else self._usual_over(self.ruled)]
        return [candidate for candidate in dict.fromkeys(candidates) if candidate is not None]

    def _usual_over(self, format: Format | None) -> Candidate | None:
        candidate = self.space.usual(format)
        return candidate if candidate is not None and candidate in self.space else None

    def _ready(self, format: Format | None) -> Sequence[Choices]:
        """Return the choices whose machine code is on disk: none for a template, which has other choices."""
        if self.template is not None or not self.pool.is_here:
            return ()
        return self.evaluator.variants.shelf.listed(format)

    def _facts(self) -> dict[str, float]:
        """Return numbers of the pattern."""
        facts = features.of_pattern(self.described)
        buffer = features.main_buffer(self.kernel.signature.buffers, self.workload.arrays)
        axis = next((a for a in reversed(buffer.axes) if a.indptr is not None), None) if buffer is not None else None
        if axis is None or axis.indptr is None or axis.indices is None or not isinstance(self.described, MatrixPattern):
            return facts
        indptr, indices = (self.workload.arrays[str(b.name)] for b in (axis.indptr, axis.indices))
        return facts | features.density(indptr, indices, int(self.described.shape[1]))

    @property
    def sizes(self) -> dict[str, int]:
        """Every size symbol."""
        return {name: int(value) for name, value in self.workload.args.sizes.items()}

    def _key(self) -> Key:
        pattern = fingerprint(self.kernel.signature.program, self.workload.arrays)
        return Key(pattern=pattern, sizes=self.sizes, **circumstances(self.kernel, self.template))

    def search(
        self, seed: int, strategy: str = "evolution", *, informed: bool = True, records: Database | None = None
    ) -> Search:
        """Return a search of this session's space; an informed one begins with what was best for similar matrices."""
        informed = informed and strategy in ("evolution", "guided")
        similar = hints(records, self.key, self.facts, self.fixed) if informed and records is not None else []
        prior = (self.model or self.prior) if strategy == "guided" else None
        return Search(self.space, features=self.encoding.rows, strategy=strategy, seed=seed, prior=prior, hints=similar)

    @cached_property
    def prior(self) -> CostModel | None:
        """The trained model that was given, or else the shipped one; neither knows anything of knobs."""
        if self.template is not None:
            return None
        return self.model if isinstance(self.model, CostModel) else prior_for(self.encoding)

    def judged(self, record: Record) -> Prediction | None:
        """Return the trained model's prediction for a record's kernel."""
        if self.prior is None or isinstance(record.choices, Config):
            return None
        return judge(self.prior, self.encoding, record.candidate, self.usual)

    @cached_property
    def operands(self) -> features.Operands:
        """The sizes and the work of the call."""
        work = Work.of(self.kernel.signature.program, self.sizes)
        trained = self.model if isinstance(self.model, CostModel) else None
        return features.Operands.of(work, self.key.threads, rates_known(trained))

    @cached_property
    def encoding(self) -> WorkloadEncoding:
        """The encoding of candidates for a cost model."""
        knobs = self.space.values if self.template is not None else None
        return WorkloadEncoding(
            self.facts, self.described, own_storage(self.workload.signature, self.workload.arrays), self.operands, knobs
        )

    def seen(self, record: Record) -> dict[str, float]:
        """Return the features of a record for a cost model, by name."""
        if is_untuned(record):
            return self.encoding.named(self.usual, specialised=False)
        return self.encoding.named(record.candidate)

    @cached_property
    def usual(self) -> Candidate:
        """The candidate of the untuned kernel for these arguments."""
        base = defaults.usual(self.func, Registers.of(self.kernel.compiled.target))
        return Candidate(base.changed(**self.kernel.suitable(self.workload.args)))

    def conversion(self, format: Format | None) -> float:
        """Return seconds that storing the sparse argument in a format took."""
        stored = self.pool.stored.get(format)
        return stored.seconds if stored is not None else 0.0

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    def may_have(self, candidate: Candidate | None) -> bool:
        """Return whether the requested formats, if any, allow a candidate; None is the untuned kernel."""
        return self.named is None or candidate is None or candidate.format in self.named

    def variant(self, candidate: Candidate) -> Variant:
        """Return a candidate on its own."""
        evaluator = self.evaluator
        return Variant(self.func, evaluator.target, candidate, evaluator.name, self.fixed, self.template, self.sizes)

    def tuned(self, variant: Variant) -> Any:
        """Return a variant's kernel for callers: it takes other sizes and numbers that are not finite."""
        kernel = variant.built()
        is_plain = isinstance(kernel, Kernel) or not kernel.decomposition.multiplies_zeros
        if (is_plain or self.assume_finite) and not variant.fixed:
            return kernel
        return TunedKernel(self.kernel, [variant], assume_finite=self.assume_finite)

    def peers(self, names: Sequence[str]) -> dict[str, Call]:
        """Return calls of other libraries for the same product.

        Raises
        ------
        ArgumentError
            A library is not installed or has no such operation.
        """
        if not names:
            return {}
        from sparsetir.workloads import peers

        operation, (name, *_) = self.evaluator.known, names
        if operation is None:
            raise ArgumentError(
                f"{name} cannot be timed side by side with {self.kernel.name}, which is no program of sparsetir.ops"
            )
        operands = operation.given(self.evaluator.inputs)
        if any(operand is None for operand in operands):
            expected, passed_names = ", ".join(operation.operands), ", ".join(self.evaluator.inputs)
            raise ArgumentError(f"{name} is timed on the arguments {expected}, got {passed_names}")
        peers.set_threads(get_num_threads())
        return {name: peers.setup(operation.name, name)(*operands) for name in names}

    def time_peers(self, kernel: Any, peers: Mapping[str, Call], seconds: float | None) -> dict[str, float]:
        """Return seconds of other libraries, in turn with the kernel that is returned, if that takes `seconds`."""
        if not peers:
            return {}
        bound = kernel.bind(**{n: v for n, v in self.evaluator.inputs.items() if n == self.evaluator.name})
        dense_inputs = {n: v for n, v in self.evaluator.inputs.items() if n != self.evaluator.name}
        calls: dict[str | None, Call] = {None: lambda: bound(**dense_inputs)}
        calls.update(peers)
        times = duel({name: partial(typical, call) for name, call in calls.items()})
        pace = 1.0 if seconds is None else seconds / times[None]
        return {name: times[name] * pace for name in peers}

    def confirm(
        self,
        kernels: Mapping[Candidate, Any],
        incumbents: Sequence[Candidate | None] = (None,),
        extra: Mapping[Candidate, float] | None = None,
    ) -> Outcome:
        """Run a contest, in this process, of the kernels that may be returned and of the untuned one.

        The comparison that picks a winner flatters it: with noise, the fastest of several is also the luckiest. Where
        the workers' machine is another one, it decides.
        """
        checked = {candidate: self.checked(candidate, kernel) for candidate, kernel in kernels.items()}
        if not self.pool.is_here:
            there = self.pool.compare(list(kernels))
            return judged({name: np.array([seconds]) for name, seconds in there.items()}, incumbents, extra)
        calls: dict[Candidate | None, Call] = {None: self.evaluator.untuned}
        calls.update({candidate: self.watched(call, kernels[candidate]) for candidate, call in checked.items()})
        return select_final({name: partial(typical, call) for name, call in calls.items()}, incumbents, extra)

    def watched(self, call: Callable[[], Any], kernel: Any) -> Callable[[], Any]:
        """Return a call with the check for NaN and infinities that it needs if the format multiplies zeros."""
        parts = getattr(kernel, "decomposition", None)
        name, inputs = self.evaluator.name, self.evaluator.inputs
        if self.assume_finite or parts is None or not parts.multiplies_zeros or name is None:
            return call
        if not kernel.convert(name, inputs[name]).padding:
            return call
        written, watch = tuple(self.workload.written.values()), NonFiniteGuard(self.kernel.signature)

        def both() -> Any:
            call()
            return watch.is_spoilt(written, inputs)

        return both

    def checked(self, candidate: Candidate, kernel: Any) -> Callable[[], Any]:
        """Return a call of a candidate's kernel that was run once with the right results."""
        compiled = getattr(kernel, "kernel", kernel)
        names = [str(p.name) for p in compiled.func.params]
        call, difference = self.evaluator.disagreement(compiled.function, names, candidate.format)
        if difference is not None:
            raise TuningError(f"the kernel of {candidate} is wrong: {difference}")
        return call


def shown(format: Format | None) -> str:
    """Return the name of a format in a report."""
    return OWN if format is None else repr(format)


def told(refused: Mapping[Format | None, str]) -> str:
    """Return why there is no form, by format."""
    return "; ".join(why if format is None else f"over {format!r}: {why}" for format, why in refused.items())


FINALISTS = 8  # that are compared again, interleaved with the untuned kernel


@dataclass
class SearchRun:
    """One search: its space, its budget, its database, and its trials so far.

    Parameters
    ----------
    session : Session
    search : CandidateSource
    budget : Budget
    records : Database
    amortize_over : float, optional
        How many calls share a conversion; by default it costs nothing.
    bar : Progress, optional
    history : list of Record
        The trials so far.
    interrupted : bool
        Whether Ctrl-C, or the loss of an executor, ended the trials.
    """

    session: Session
    search: CandidateSource
    budget: Budget
    records: Database
    amortize_over: float | None = None
    bar: Progress | None = None
    history: list[Record] = field(default_factory=list)
    interrupted: bool = False

    def cost(self, record: Record) -> float:
        """Return seconds of a call, and its share of the conversion."""
        return full_cost(record, self.amortize_over)

    # ------------------------------------------------------------------------------------------------ trials

    def explore(self) -> None:
        """Run the trials; Ctrl-C ends them once the untuned kernel was timed, and closes the records."""
        try:
            self.begin()
            self.loop.explore(self.search.chance if isinstance(self.search, Search) else None)
        except (KeyboardInterrupt, ExecutorLostError) as error:
            if not any(is_untuned(record) for record in self.history):
                raise
            if isinstance(error, ExecutorLostError):
                warnings.warn(f"the search ended early, after {len(self.history)} trials: {error}", stacklevel=3)
            self.interrupted = True
        finally:
            self.records.close()

    def begin(self) -> None:
        """Tell the search about recorded trials; then measure the kernels that the result must not be slower than."""
        session, history = self.session, self.history
        for record in self._reusable():
            history.append(with_best(record, history))
            if record.fixed == session.fixed and not is_untuned(record):
                self.search.tell(record.candidate, self.cost(record))
        log = self.loop.log
        # New measurements must be comparable with the recorded ones.
        session.pool.keep_pace(next((r.seconds for r in history if is_untuned(r)), None))
        if not any(is_untuned(record) for record in history):
            log.add(Candidate(), {}, session.pool.time(None))
        # With any strategy, budget and records the result must not be slower than these.
        room = self.budget.trials - len(history) if self.budget.trials > 1 else 0
        for _ in self.loop.measured(self._untried(history)[:room]):
            pass

    @cached_property
    def loop(self) -> TrialLoop:
        """The loop of the trials, which begins with what was read from the records."""
        session, reused = self.session, len(self.history)
        bar = Progress(self.budget, shown=False) if self.bar is None else self.bar
        bar.flops = session.flops

        def on_record(record: Record) -> None:
            for key, noted in session.pool.noted(session.key, record):
                self.records.append(key, noted, features=session.seen(noted))
            bar.update(len(self.history), record, reused=reused)

        log = Log(self.budget, self.search.seed, self.history, on_record)
        settings: dict[str, Any] = {
            "fixed": session.fixed,
            "conversion": session.conversion,
            "slots": session.pool.slots,
        }
        return TrialLoop(self.search, session.pool.measure, log, cost=self.cost, **settings)

    def _reusable(self) -> list[Record]:
        """Return the records to begin with; they leave room for what must be measured."""
        trials = self.budget.trials
        recorded = self.records.load(self.session.key)[:trials]
        is_full = len(recorded) == trials > 1
        return recorded[: max(trials - len(self._untried(recorded)), 1)] if is_full else recorded

    def _untried(self, history: Sequence[Record]) -> list[Candidate]:
        """Return the candidates that every search measures first and this one has not measured."""
        fixed = self.session.fixed
        tried = {record.candidate for record in history if record.fixed == fixed and not is_untuned(record)}
        return [candidate for candidate in self.session.first if candidate not in tried]

    # ------------------------------------------------------------------------------------------------ result

    def finish(self, *, most: int = FINALISTS) -> TuneResult:
        """Compare the fastest candidates once more, and confirm the winner in further runs.

        All comparisons include the kernel of ``sparsetir.build(program, expected_calls=1000)``, even if its trial was
        slow: see `sparsetir.tuning.loop`. The comparisons are recorded, unless Ctrl-C ended the search.
        """
        session = self.session
        tuned = [r for r in self.history if r.fixed == session.fixed and not is_untuned(r)]
        try:
            times, best = compared(session, tuned, self.cost, most=1 if self.interrupted else most)
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.interrupted = True  # the best trial is compared with the untuned kernel alone
            times, best = compared(session, tuned, self.cost, most=1)
        kernel = session.kernel if best is None else session.tuned(session.variant(best))
        compared_records = [replace(r, seconds=times[r.candidate]) for r in tuned if r.candidate in times]
        timed = sorted((r for r in compared_records if r.seconds != float("inf")), key=lambda r: r.seconds or 0.0)
        comparison = Comparison(times[None], tuple(timed), best, self.amortize_over, session.evaluator.name)
        if not self.interrupted:
            with closing(self.records):
                note(self.records, session.key, comparison)
        baseline = replace(self._baseline(), seconds=times[None])
        return self._result(kernel, comparison.best or baseline, baseline, comparison)

    def is_repeated(self) -> bool:
        """Return whether every trial was read from the records of a search that ended: it ends as it did then."""
        last = last_of(self.records, self.session.key) if all(r.reused for r in self.history) else None
        return last is not None and last.amortize_over == self.amortize_over and self.session.may_have(last.chosen)

    def recall(self) -> TuneResult:
        """Return the best candidate of earlier searches, else the pretrained model's favourite, else the untuned one.

        Nothing is timed but the untuned kernel; a kernel that is wrong, or unavailable, is not taken.
        """
        session, baseline = self.session, self._baseline()
        last = last_of(self.records, session.key)
        last = last if last is None or session.may_have(last.chosen) else None
        if last is not None:
            baseline = replace(baseline, seconds=last.untuned)
            record = chosen_then(last, self.amortize_over)
        else:
            record, before = self._known_best(baseline)
            baseline = baseline if record is None else replace(baseline, seconds=before.seconds)
        if last is None and record is None and session.prior is not None and baseline.seconds is not None:
            settings: dict[str, Any] = {"amortize_over": self.amortize_over, "seed": self.search.seed}
            recommendation = guess(session, session.prior, seconds=baseline.seconds, **settings)
            if recommendation is not None:
                record = expected(session, recommendation, baseline.seconds)
        kernel = session.kernel
        if record is not None:
            try:
                variant = session.variant(record.candidate)
                session.checked(record.candidate, variant.built())
                kernel = session.tuned(variant)
            except (SparseTIRError, RuntimeError) as error:
                session.pool.refuse(record.candidate.format, reason(error))
                record = None
        return self._result(kernel, baseline if record is None else record, baseline, last, is_recalled=True)

    def _baseline(self) -> Record:
        """Return the trial of the untuned kernel."""
        return next(record for record in self.history if is_untuned(record))

    def _known_best(self, untuned: Record) -> tuple[Record | None, Record]:
        """Return the best trial of an unfinished search if clearly better than the untuned one, and that one."""
        session = self.session
        recorded = self.records.load(session.key)
        tuned = [r for r in recorded if r.seconds is not None and r.fixed == session.fixed and not is_untuned(r)]
        best = min((r for r in tuned if session.may_have(r.candidate)), key=self.cost, default=None)
        before = next((r for r in recorded if is_untuned(r) and r.seconds is not None), untuned)
        return best if best is not None and self.cost(best) <= WORTH * self.cost(before) else None, before

    def _result(
        self, kernel: Any, best: Record, untuned: Record, comparison: Comparison | None, *, is_recalled: bool = False
    ) -> TuneResult:
        """Return the result with its report."""
        session, search = self.session, self.search
        return TuneResult(
            kernel=kernel,
            best=best,
            untuned=untuned,
            history=self.history,
            space=session.space.values(best.candidate.format) or {},
            seconds=self.budget.elapsed,
            key=session.key,
            checked_against=session.evaluator.checked_against,
            flops=session.flops,
            database=self.records.path,
            interrupted=self.interrupted,
            comparison=comparison,
            is_recalled=is_recalled,
            refused={shown(format): why for format, why in session.pool.refused.items()},
            importance=search.importance(session.encoding.names) if isinstance(search, Search) else {},
            template=session.template,
            judgement=session.judged(best) if best != untuned else None,
        )


def full_cost(record: Record, amortize_over: float | None = None) -> float:
    """Return seconds of a call, and its share of the conversion."""
    if record.seconds is None:
        return float("inf")
    return record.seconds + (record.conversion / amortize_over if amortize_over is not None else 0.0)


def finalists(history: Sequence[Record], cost: Cost) -> list[Candidate]:
    """Return the candidates that cost least; ties go to the smaller choices."""
    timed = [(cost(r), r.candidate.key, r.candidate) for r in history if r.seconds is not None]
    timed.sort(key=lambda entry: entry[:2])
    return [candidate for *_, candidate in timed[:FINALISTS]]


def compared(
    session: Session, tuned: Sequence[Record], cost: Cost, *, most: int = FINALISTS
) -> tuple[dict[Candidate | None, float], Candidate | None]:
    """Return seconds of the kernels that may be returned, as they are next to each other, and the one to return.

    Parameters
    ----------
    session : Session
    tuned : sequence of Record
        The trials, but that of the untuned kernel.
    cost : callable
        The cost to minimize.
    most : int
        How many are compared before the winner is confirmed.
    """
    conversion_costs = {r.candidate: cost(r) - r.seconds for r in tuned if r.seconds is not None}
    sure = [c for c in (session.announced,) if c in conversion_costs]
    times = session.pool.compare(list(dict.fromkeys([*finalists(tuned, cost)[:most], *sure])))
    fastest = winner(added({c: seconds for c, seconds in times.items() if c not in sure}, conversion_costs))
    able = [c for c in dict.fromkeys([fastest, *sure]) if c is not None]
    if not able:
        return times, None
    contest = session.confirm({c: session.variant(c).built() for c in able}, [None, *sure], conversion_costs)
    return rescaled(times, contest.times, able[0]), contest.chosen


def added(times: Mapping[Candidate | None, float], extra: Mapping[Candidate, float]) -> dict[Candidate | None, float]:
    """Return times with each candidate's share of its conversion."""
    return {c: seconds + (extra.get(c, 0.0) if c is not None else 0.0) for c, seconds in times.items()}


def chosen_then(comparison: Comparison, amortize_over: float | None) -> Record | None:
    """Return the result of a search, or its result for that many calls; None for the untuned kernel."""
    if comparison.amortize_over == amortize_over:
        return comparison.best
    costs: dict[Candidate | None, float] = {r.candidate: full_cost(r, amortize_over) for r in comparison.records}
    best = winner({None: comparison.untuned, **costs})
    return next((r for r in comparison.records if r.candidate == best), None)


def expected(session: Session, recommendation: Recommendation, seconds: float) -> Record:
    """Return a recommendation as a record without a time, `seconds` being that of the untuned kernel."""
    candidate, format = recommendation.candidate, recommendation.candidate.format
    stored_as = None if format is None else repr(format)
    conversion = session.conversion(format)
    return Record(
        candidate.choices, stored_as, session.fixed, predicted=seconds / recommendation.gain, conversion=conversion
    )
