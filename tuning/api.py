# SPDX-License-Identifier: Apache-2.0
"""`tune_sparse` and `autotune`: from a program and the arguments of a call to the fastest kernel found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tvm import tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.format import Format
from sparsetir.ir.effects import free_sizes
from sparsetir.ir.views import decode
from sparsetir.kernel_factory import make_kernel
from sparsetir.lower import single
from sparsetir.runtime.call_plan import CallTiming
from sparsetir.schedules import Choices
from sparsetir.sparse_output import Accumulators
from sparsetir.tuning.accumulators import computes_patterns, refuse_assembled, refuse_others, tune_accumulators
from sparsetir.tuning.knobs import Template
from sparsetir.tuning.loop import Budget, Progress
from sparsetir.tuning.model import CostModel, Model, as_model
from sparsetir.tuning.records import Database
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.search import check_strategy
from sparsetir.tuning.session import SearchRun, Session
from sparsetir.tuning.space import Candidate, Space
from sparsetir.tuning.workers.local import TIMEOUT
from sparsetir.tuning.workers.remote import check_executor, opened
from sparsetir.utils import arguments
from sparsetir.utils.arguments import (
    as_flag,
    as_index,
    as_path,
    as_positive,
    as_seconds,
    as_sequence,
    is_real,
    renamed_parameters,
)
from sparsetir.utils.memory import old_objects_aside

ALONE = 24  # candidates for which no worker process is started
# Share of the time budget kept for the last comparison, and the most seconds it may need.
FINISH_SHARE, FINISH_SECONDS = 0.1, 2.0


STOP_PROBABILITY = 0.05  # see `tune_sparse`, where nothing but a preset says how long to search
PRESETS: dict[str, tuple[int, float | None]] = {"quick": (24, 8.0), "standard": (64, None), "thorough": (400, 120.0)}


@renamed_parameters(until="stop_probability", against="compare_with", finite="assume_finite")
def tune_sparse(
    program: Any,
    inputs: Mapping[str, Any],
    *,
    max_trials: int | None = None,
    max_seconds: float | None = None,
    preset: str = "standard",
    strategy: str = "guided",
    formats: Sequence[Format] | None = None,
    schedule: Template | None = None,
    amortize_over: float | None = None,
    seed: int = 0,
    database: str | Path | Database | None = None,
    patience: int | None = None,
    stop_probability: float | None = None,
    target: Any = None,
    isolate: bool | None = None,
    timeout: float = TIMEOUT,
    executor: Executor | str | None = None,
    machines: str = "same",
    compare_with: Sequence[str] = (),
    assume_finite: bool = False,
    model: Any = None,
    progress: bool | None = None,
) -> TuneResult:
    """Find the fastest format and schedule of a program on the arguments of one call.

    Sizes that no sparse axis depends on, such as the number of features, are compiled in. Every candidate is run
    on the arguments themselves and its result compared with the untuned kernel's. The untuned kernel is the first
    trial, and what is returned unless the winner beats it again in runs that did not choose the winner.

    Parameters
    ----------
    program : PrimFunc or IRModule with one PrimFunc
        At stage I. Of one that computes the pattern of its results, `Accumulators` are searched, in this process.
    inputs : mapping of str to array
        The arguments of a call by name; they are not changed. Where just one of them is sparse and the results are
        dense, other formats are tried for it.
    max_trials : int, optional
        Candidates, counting those whose times are read from the database. By default that of the preset. 0 times the
        untuned kernel only and builds what was best in the database, or what the pretrained model expects to be clearly
        faster; it is checked but not timed.
    max_seconds : float, optional
        Of the search, everything included; by default that of the preset.
    preset : {"quick", "standard", "thorough"}
        24 trials in 8 seconds, 64 trials, 400 trials in two minutes.
    strategy : {"guided", "evolution", "annealing", "portfolio", "random", "exhaustive"}
        How candidates are chosen; "guided" is the evolution led by the shipped cost model, where that knows the
        program's features: not with a `schedule`.
    formats : sequence of Format, optional
        The formats that are tried besides the program's own; none searches schedules only. By default those that suit
        the pattern; none with a `schedule`.
    schedule : Template, optional
        A schedule of yours, see `sparsetir.template`: its knobs are searched rather than the sketches' choices.
    amortize_over : float, optional
        How many calls a conversion is shared among; by default it costs nothing.
    seed : int
        The same seed and the same times give the same candidates in the same order.
    database : str, Path or Database, optional
        A file of JSON lines to which every trial is added. Trials in it of the same program, pattern, sizes,
        target, machine, threads and version are not measured again.
    patience : int, optional
        End after this many trials without a better one.
    stop_probability : float, optional
        End when it is less likely than this that something that was not tried is more than 3 % faster, by what the cost
        model expects and how far it was wrong lately. By default 0.05 where the preset alone limits the search; 0
        never ends one.
    target : Target, str or dict, optional
        As for `sparsetir.build`.
    isolate : bool, optional
        Whether candidates run in worker processes, where a crash or a hang costs one candidate; the workers compile
        side by side. By default where more than 24 candidates may be tried, as the first search waits about two
        seconds for them. Arguments of more than 1 GiB or of other packages than numpy and scipy, and templates that a
        worker cannot import by their names, stay in this process.
    timeout : float
        Seconds that a compilation or a measurement may take in a worker; more if the untuned kernel is slow.
    executor : concurrent.futures.Executor or str, optional
        Whose workers compile and measure candidates, on this machine or others: a ``ProcessPoolExecutor``, dask's
        ``Client.get_executor()``, mpi4py's ``MPIPoolExecutor``. They need this package; arguments are sent once. What
        is measured is alone on its machine, and a record is its machine's. By name: ``"processes:2"``,
        ``"tcp://host:8786"`` for a dask scheduler, ``"rpc://host:9190/key"`` for servers of TVM's RPC.
    machines : {"same", "each"}
        Whether the executor's workers must be of one kind of machine, number of threads and versions, or may be of
        several, of which each has its own records.
    compare_with : sequence of {"scipy", "torch", "mkl"}
        Libraries that are timed side by side with the result, where the program is one of `sparsetir.ops`:
        `TuneResult.break_even_with` tells after how many calls the conversion has paid.
    assume_finite : bool
        A promise that the kernel's arguments will hold neither infinities nor NaN. Without it, results over formats
        that store zeros between the entries are checked for NaN and infinities.
    model : str, Path or object, optional
        The cost model that leads ``strategy="guided"`` in place of the shipped one: the path of a trained one
        (``python -m sparsetir.tuning.train.pretrain``), or an object with ``predict(features)``, which returns a score
        for each row of features, higher for faster.
    progress : bool, optional
        Whether to show a progress line on stderr; by default if it is a terminal or in a notebook.

    Returns
    -------
    TuneResult

    Raises
    ------
    ArgumentError
        A budget is not positive, there is no such preset or strategy, or the arguments do not fit the program.
    ScheduleError, TuningError
        The template does not fit the program.
    TuningError
        The untuned kernel is wrong, the database cannot be written, or arguments cannot be sent to an executor.
    ExecutorLostError
        The executor takes no jobs, or does not answer, before the untuned kernel was timed; later it is a warning, and
        the result holds the best kernel so far.

    Notes
    -----
    Ctrl-C ends the search, not the program: the result holds the best kernel so far.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.random_array((50, 40), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    >>> B = np.ones((40, 8), "float32")
    >>> result = sparsetir.tune_sparse(sparsetir.ops.spmm(), {"A": A, "B": B}, max_trials=2)
    >>> bool(np.allclose(result.kernel(A=A, B=B), A @ B, rtol=1e-5)), len(result.history)
    (True, 2)
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ArgumentError(f"expected one of the presets {', '.join(PRESETS)}, got {arguments.shown(preset)}")
    usual_trials, usual_seconds = PRESETS[preset]
    trials_left = usual_trials if max_trials is None else max_trials
    seconds_left = usual_seconds if max_seconds is None and max_trials is None else max_seconds
    if formats is not None:
        formats = as_sequence(formats, "formats", "formats such as bsr(4, 4)")
    invalid = next((format for format in formats or () if not isinstance(format, Format)), None)
    if invalid is not None:
        raise ArgumentTypeError(
            f"formats are those of sparsetir.formats, such as bsr(4, 4), got {arguments.shown(invalid)}"
        )
    if schedule is not None and not isinstance(schedule, Template):
        schedule_name = type(schedule).__name__
        raise ArgumentTypeError(
            f"the schedule of a search is a function below @sparsetir.template, got {schedule_name}"
        )
    check_arguments(inputs, max_trials=trials_left, max_seconds=seconds_left, seed=seed, patience=patience)
    check_strategy(strategy)
    own_model = None if model is None else _model_for(model, strategy, trials_left, schedule)
    timeout = as_seconds(timeout, "timeout", positive=True)
    compare_with = check_limits(stop_probability, compare_with)
    if amortize_over is not None:
        amortize_over = as_positive(amortize_over, "amortize_over", "a positive number of calls")
    search_seconds = (
        seconds_left - min(FINISH_SECONDS, FINISH_SHARE * seconds_left) if seconds_left is not None else None
    )
    is_preset = max_trials is None and max_seconds is None
    budget = Budget(
        trials_left,
        search_seconds,
        patience,
        STOP_PROBABILITY if stop_probability is None and is_preset else stop_probability,
    )
    records = database_of(database)
    isolate, progress, assume_finite = check_flags(isolate=isolate, progress=progress, assume_finite=assume_finite)
    if computes_patterns(program):
        searched = {"formats": formats, "schedule": schedule, "amortize_over": amortize_over, "model": own_model}
        elsewhere = {"executor": executor, "machines": machines != "same"}
        refuse_others(searched, {**elsewhere, "isolate": isolate, "timeout": timeout != TIMEOUT}, compare_with)
        settings: dict[str, Any] = {"strategy": strategy, "seed": seed, "target": target, "progress": progress}
        return tune_accumulators(program, inputs, budget, records, **settings)
    apart = trials_left > ALONE if isolate is None else isolate
    check_executor(executor, machines)
    with old_objects_aside(), opened(executor) as workers, Progress(budget, shown=progress) as bar:
        bar.say("preparing the untuned kernel")
        settings = {"isolate": apart, "timeout": timeout, "assume_finite": assume_finite}
        settings |= {"executor": workers, "machines": machines, "model": own_model}
        with closing(Session(program, inputs, target, formats, schedule, **settings)) as session:
            peers, search = session.peers(compare_with), session.search(seed, strategy, records=records)
            run = SearchRun(session, search, budget, records, amortize_over, bar)
            run.explore()
            if not run.interrupted and (not trials_left or run.is_repeated()):
                result = run.recall()
            else:
                bar.say("comparing the fastest")
                result = run.finish()
            return replace(result, peers=session.time_peers(result.kernel, peers, result.best.seconds))


def _model_for(value: Any, strategy: str, trials: int, schedule: Any) -> Model:
    """Return the model of a search; refuse it where the search would not ask it."""
    model = as_model(value)
    if strategy != "guided":
        raise ArgumentError(f"model: expected none with strategy={strategy!r}, which asks none. Leave strategy out.")
    if not trials and not isinstance(model, CostModel):
        raise ArgumentError("model: expected the path of a trained model where max_trials=0, got an object. Save one.")
    if schedule is not None and isinstance(model, CostModel):
        raise ArgumentError("model: expected an object for a schedule of your own, whose knobs no trained model knows.")
    return model


def database_of(database: Any) -> Database:
    """Return the records that an argument is or names."""
    if isinstance(database, Database):
        return database
    return Database(None if database is None else as_path(database, "database", "the path of a file of records"))


def check_flags(**flags: Any) -> list[Any]:
    """Return flags that may be None."""
    return [None if value is None else as_flag(value, name) for name, value in flags.items()]


def check_limits(stop_probability: Any, compare_with: Any) -> list[str]:
    """Raise unless the probability is one; return the names of libraries."""
    if stop_probability is not None and not (is_real(stop_probability) and 0 <= stop_probability <= 1):
        raise ArgumentError(
            f"stop_probability: expected a probability from 0 to 1, got {arguments.shown(stop_probability)}. Pass 0.05."
        )
    if isinstance(compare_with, str):
        raise ArgumentTypeError(
            f'compare_with: expected a list of libraries, got {arguments.shown(compare_with)}. Pass ["mkl"].'
        )
    compare_with = as_sequence(compare_with, "compare_with", 'names of libraries such as "mkl"')
    if not all(isinstance(name, str) for name in compare_with):
        kinds = ", ".join(map(arguments.shown, compare_with))
        raise ArgumentTypeError(f'compare_with: expected names of libraries, got {kinds}. Pass ["mkl"].')
    return compare_with


def check_arguments(
    inputs: Mapping[str, Any], *, max_trials: int, max_seconds: float | None, seed: int, patience: int | None
) -> None:
    """Raise unless the budgets are positive and the inputs have names."""
    if not isinstance(inputs, Mapping):
        class_name = type(inputs).__name__
        raise ArgumentTypeError(f'inputs must name the arguments, as in {{"A": A, "B": B}}, got {class_name}')
    for name, value, least in (("max_trials", max_trials, 0), ("patience", patience, 1)):
        value = as_index(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            description = "a positive integer" if least else "a non-negative integer"
            raise ArgumentError(f"{name}: expected {description}, got {arguments.shown(value)}")
    if max_seconds is not None:
        as_seconds(max_seconds, "max_seconds", positive=True)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ArgumentError(f"seed: expected a non-negative integer, got {arguments.shown(seed)}")


# -------------------------------------------------------------------------------------------- autotune


Config: TypeAlias = "Choices | Format | Candidate"


class Listed(Space):
    """Just the candidates of a list."""

    def __init__(self, candidates: Sequence[Candidate], space: Space) -> None:
        super().__init__(list(dict.fromkeys(c.format for c in candidates)), space.values)
        self.candidates = list(dict.fromkeys(candidates))

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __contains__(self, candidate: Candidate) -> bool:
        return candidate in self.candidates


class Autotuned:
    """A program with a list of configurations, called by name like a kernel.

    Parameters
    ----------
    program : PrimFunc or IRModule with one PrimFunc
    configs : sequence of Choices, Format or Candidate
    key : sequence of str
        Size symbols: when one of them has a new value the configurations are measured again.
    target, database
        As for `sparsetir.tune_sparse`.
    """

    def __init__(
        self, program: Any, configs: Sequence[Config], key: Sequence[str], target: Any, database: str | Path | None
    ) -> None:
        self.func: tirx.PrimFunc = single(program)
        refuse_assembled(self.func, "autotune")
        self.candidates = [candidate(config) for config in configs]
        self.target, self.database = target, database_of(database)
        self.kernel = make_kernel(self.func, target)
        sizes = [p.name for p in self.kernel.signature.params if not p.is_array]
        unknown = [name for name in key if name not in sizes]
        if unknown:
            raise ArgumentError(f"key names sizes of the program: {', '.join(sizes)}, got {unknown[0]!r}")
        self.key = list(dict.fromkeys([*key, *free_sizes(decode(self.func))]))
        self.results: dict[tuple[int, ...], TuneResult] = {}

    def __repr__(self) -> str:
        return f"{self.kernel!r}, the fastest of {len(self.candidates)} for each {', '.join(self.key) or 'program'}"

    def __call__(self, **arguments: Any) -> Any:
        """Run the kernel for these sizes; the first time the configurations are measured on these arguments."""
        return self.result(**arguments).kernel(**arguments)

    def bind(self, **arguments: Any) -> BoundAutotuned:
        """Fix some arguments; the kernel is chosen with the first call."""
        return BoundAutotuned(self, arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the kernel for these sizes; see `Kernel.time`."""
        return self.result(**arguments).kernel.time(seconds=seconds, **arguments)

    def result(self, **arguments: Any) -> TuneResult:
        """Return the result for the sizes of these arguments; search if they are new."""
        sizes = self.kernel.prepare(arguments).sizes
        at = tuple(int(sizes[name]) for name in self.key)
        if at not in self.results:
            self.results[at] = self._measured(arguments)
        return self.results[at]

    def _measured(self, arguments: dict[str, Any]) -> TuneResult:
        formats = list(dict.fromkeys(c.format for c in self.candidates if c.format is not None))
        session = Session(self.func, arguments, self.target, formats)
        session.space = Listed(self.candidates, session.space)
        search, budget = session.search(0, "exhaustive"), Budget(len(self.candidates) + 1)
        with Progress(budget) as bar:
            run = SearchRun(session, search, budget, self.database, bar=bar)
            run.explore()
        return run.finish()


class BoundAutotuned:
    """An autotuned program with some arguments fixed."""

    def __init__(self, program: Autotuned, arguments: dict[str, Any]) -> None:
        self.program, self.fixed = program, dict(arguments)
        self.bound: Any = None

    def __repr__(self) -> str:
        kernel = self.program if self.bound is None else self.bound.kernel
        return f"{kernel!r} with {', '.join(self.fixed)} fixed"

    def __call__(self, **arguments: Any) -> Any:
        """Run with the open arguments; see `Kernel.__call__`."""
        return self._chosen(arguments)(**arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls, all arguments ready."""
        return self._chosen(arguments).time(seconds=seconds, **arguments)

    def _chosen(self, arguments: dict[str, Any]) -> Any:
        if self.bound is None:
            self.bound = self.program.result(**self.fixed, **arguments).kernel.bind(**self.fixed)
        return self.bound


def candidate(config: Config) -> Candidate:
    """Return a configuration as a candidate."""
    if isinstance(config, Candidate) and isinstance(config.choices, Choices):
        return config
    if isinstance(config, Choices):
        return Candidate(config)
    if isinstance(config, Format):
        return Candidate(format=config)
    expected = "sparsetir.Choices, a format or a sparsetir.tuning.Candidate"
    hint = "; tune_sparse searches those" if isinstance(config, Accumulators) else ""
    raise ArgumentTypeError(f"a configuration is {expected}, got {type(config).__name__}{hint}")


def autotune(
    *programs: Any,
    configs: Sequence[Config] = (),
    key: Sequence[str] = (),
    target: Any = None,
    database: str | Path | None = None,
) -> Callable[[Any], Autotuned]:
    """Let a program pick the fastest of some configurations when it is first called with new sizes.

    Parameters
    ----------
    configs : sequence of Choices, Format or Candidate
        What to try; formats are for the only sparse argument.
    key : sequence of str
        Size symbols whose values decide; those that are compiled in, such as the number of features, always do.
    target : Target, str or dict, optional
        As for `sparsetir.build`.
    database : str or Path, optional
        A file of JSON lines with the trials, see `sparsetir.tune_sparse`.

    Returns
    -------
    callable
        From a program to an `Autotuned`; for use as a decorator above ``@T.prim_func``, too.

    Raises
    ------
    ArgumentTypeError
        A configuration is something else.
    ArgumentError
        There is no configuration, or `key` names no size.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> from sparsetir import Choices, formats
    >>> spmm = sparsetir.autotune(configs=[Choices(tile=8), formats.bsr(2, 2)], key=["m"])(sparsetir.ops.spmm())
    >>> A = sp.random_array((20, 30), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    >>> B = np.ones((30, 8), "float32")
    >>> bool(np.allclose(spmm(A=A, B=B), A @ B, rtol=1e-5)), len(spmm.result(A=A, B=B).history)
    (True, 3)
    """
    if programs:
        fault = "give the configurations first, then the program"
        raise ArgumentTypeError(f"{fault}: sparsetir.autotune(configs=[sparsetir.Choices(tile=32)])(program)")
    if not configs:
        raise ArgumentError("autotune needs at least one configuration, such as sparsetir.Choices(tile=32)")
    checked = [candidate(config) for config in configs]
    if isinstance(key, str):
        raise ArgumentTypeError(f'key: expected a list of names of sizes, got {arguments.shown(key)}. Pass ["m"].')
    names = as_sequence(key, "key", 'names of sizes such as "m"')
    return partial(Autotuned, configs=checked, key=names, target=target, database=database)


__all__ = [
    "ALONE",
    "FINISH_SECONDS",
    "FINISH_SHARE",
    "PRESETS",
    "STOP_PROBABILITY",
    "Autotuned",
    "autotune",
    "check_arguments",
    "tune_sparse",
]
