# SPDX-License-Identifier: Apache-2.0
"""`autotune`: a program that picks, on first use with new sizes, the fastest of the configurations in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from sparsetir.runtime.call_plan import Timing
from sparsetir.schedules import Choices
from sparsetir.sparse_output import Accumulators
from sparsetir.tuning.accumulators import refuse_assembled
from sparsetir.tuning.api import finish, full_cost, trials
from sparsetir.tuning.loop import Budget, Progress
from sparsetir.tuning.records import Database
from sparsetir.tuning.report import TuneResult
from sparsetir.tuning.session import Session
from sparsetir.tuning.space import Candidate, Space

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
        self.target, self.database = target, Database(None if database is None else Path(database))
        self.kernel = make_kernel(self.func, target)
        sizes = [p.name for p in self.kernel.signature.params if not p.is_array]
        unknown = [name for name in key if name not in sizes]
        if unknown:
            raise ArgumentError(f"key names sizes of the program: {', '.join(sizes)}; found {unknown[0]!r}")
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

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Timing:
        """Time repeated calls of the kernel for these sizes; see `Kernel.time`."""
        return self.result(**arguments).kernel.time(seconds=seconds, **arguments)

    def result(self, **arguments: Any) -> TuneResult:
        """Return what was found for the sizes of these arguments; measured if they are new."""
        sizes = self.kernel.prepare(arguments).sizes
        at = tuple(int(sizes[name]) for name in self.key)
        if at not in self.results:
            self.results[at] = self._measured(arguments)
        return self.results[at]

    def _measured(self, arguments: dict[str, Any]) -> TuneResult:
        formats = list(dict.fromkeys(c.format for c in self.candidates if c.format is not None))
        session = Session(self.func, arguments, self.target, formats)
        session.search_in(Listed(self.candidates, session.space))
        search, budget = session.search(0, "exhaustive"), Budget(len(self.candidates) + 1)
        with Progress(budget) as bar:
            history, interrupted = trials(session, search, budget, self.database, cost=full_cost, bar=bar)
        return finish(session, search, history, budget, self.database, interrupted=interrupted)


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

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Timing:
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
    raise ArgumentTypeError(f"a configuration is {expected}; found {type(config).__name__}{hint}")


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
    return partial(Autotuned, configs=checked, key=key, target=target, database=database)


__all__ = ["Autotuned", "autotune"]
