# SPDX-License-Identifier: Apache-2.0
"""Records of many candidates for many matrices, to train cost models and to compare search strategies.

``python -m sparsetir.tuning.train.collect --out space.jsonl`` measures generated matrices of every family, or files,
with the portfolio, random candidates and, at the end, a search. An interrupted run resumes. With ``--again`` it
measures the candidates of the file a second time, in another order: the differences between both measurements, on a
shared machine, bound the accuracy of a model.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sparsetir.errors import ArgumentError, ExecutorLostError, SparseTIRError
from sparsetir.tuning.loop import Budget, CandidateSource, is_untuned
from sparsetir.tuning.records import Database, Key, Record
from sparsetir.tuning.search import BATCH
from sparsetir.tuning.session import SearchRun, Session
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.workers.remote import opened
from sparsetir.utils.arguments import as_seconds, parse_seconds
from sparsetir.workloads import suite
from sparsetir.workloads.inputs import DENSE, find_files, from_files, make_case, say

SIZES, OPS = "20000,200000,1000000", "spmm:32,spmm:128,sddmm:64,spmv"
TRIALS, SEARCHED = 160, 0.25  # of a case, and the share that a search chooses; the others are random
FEAT = 64  # default number of columns


@dataclass(frozen=True)
class CollectionSource:
    """A matrix or tensor that is not in memory yet.

    Parameters
    ----------
    name, family : str
        What it is called, and what kind it is.
    load : callable
        Gives a scipy.sparse array or a CooTensor.
    """

    name: str
    family: str
    load: Callable[[], Any]


@dataclass
class Labelled(Database):
    """A database in which cases are known by the names of their matrix and operation, whatever version measured them.

    Parameters
    ----------
    path : Path
    label : dict of str to str
        Written into each record: matrix, family and op.
    """

    is_vital: ClassVar[bool] = True
    label: dict[str, str] = field(default_factory=dict)
    _held: dict[tuple[str, str], list[Record]] | None = field(default=None, repr=False)

    def load(self, key: Key) -> list[Record]:
        return self.trials()

    def trials(self) -> list[Record]:
        """Return the trials of the case that is being measured."""
        return [replace(record, reused=True) for record in self._case]

    def append(self, key: Key, record: Record, **facts: Any) -> None:
        super().append(key, record, **self.label, **facts)
        self._case.append(record)

    @property
    def _case(self) -> list[Record]:
        if self._held is None:
            self._held = {}
            for _, record, line in self.everything():
                self._held.setdefault((line.get("matrix", ""), line.get("op", "")), []).append(record)
        return self._held.setdefault((self.label.get("matrix", ""), self.label.get("op", "")), [])


def generated(families: str, sizes: Sequence[int], seeds: int) -> Iterator[CollectionSource]:
    """Yield members of the suite's families (``"all"`` or names separated by commas) with about these entries."""
    names = [name for name in suite.families() if name != "empty"]
    chosen = names if families == "all" else [name for name in families.split(",") if name]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ArgumentError(f"the suite has all, {', '.join(names)}, got {unknown[0]!r}")
    if min(sizes) < 1:
        raise ArgumentError(f"sizes are positive numbers of entries, got {min(sizes)}")
    for size in sizes:
        for seed in range(seeds):
            for name in chosen:
                label = f"{name}-{size}" + (f"-{seed}" if seed else "")
                # Members that differ only in a number, such as pruned_50 and pruned_90, are one family.
                family = re.sub(r"_\d+d?$", "", name)
                yield CollectionSource(label, family, partial(suite.generate, name, size, seed=seed))


def listed(folder: Path | None) -> Iterator[CollectionSource]:
    """Yield the files below a folder, each a family of its own."""
    for source in from_files(find_files(folder)) if folder is not None else []:
        yield CollectionSource(source.name, source.name, source.load)


def operations(text: str) -> list[tuple[str, int]]:
    """Return operations with the lengths of their dense rows, such as ``spmm:32,spmv``."""
    programs = []
    for part in text.split(","):
        op, _, feat = part.partition(":")
        if op not in DENSE or not (feat or str(FEAT)).isdigit():
            raise ArgumentError(f"expected operations such as spmm:32, of {', '.join(DENSE)}, got {part!r}")
        programs.append((op, int(feat or FEAT)))
    return programs


def measured(
    records: Labelled,
    matrix: Any,
    op: str,
    feat: int,
    *,
    most: int,
    seconds: float | None,
    seed: int,
    where: Mapping[str, Any] | None = None,
) -> int:
    """Measure candidates for one case until there are `most`; returns how many are new."""
    before = len(records.trials())
    if before >= most:
        return 0
    case = make_case(op, matrix, feat=feat)
    drawn = round(most * (1 - SEARCHED))
    with closing(Session(case.program, case.inputs, None, isolate=True, **(where or {}))) as session:
        for strategy, count in (("portfolio", drawn), ("evolution", most)):
            if len(records.trials()) < count:
                # The shipped model must not bias the training data of the next one.
                search, budget = session.search(seed, strategy, informed=False), Budget(count, seconds)
                explore(session, search, budget, records)
    return len(records.trials()) - before


def explore(session: Session, search: CandidateSource, budget: Budget, records: Database) -> None:
    """Run trials; raise what ended them early."""
    run = SearchRun(session, search, budget, records)
    run.explore()
    if run.interrupted:
        gone = session.pool.gone
        raise KeyboardInterrupt if gone is None else gone


@dataclass
class Again:
    """Source of given candidates, with the interface of a search."""

    waiting: list[Candidate]
    seed: int

    def ask(self, count: int = BATCH) -> list[Candidate]:
        """Return the next few."""
        batch, self.waiting = self.waiting[:count], self.waiting[count:]
        return batch

    def predicted(self, candidates: Sequence[Candidate]) -> list[None]:
        """Predict nothing."""
        return [None] * len(candidates)

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """Ignore the measurement: the strategy uses none."""


def measured_again(
    records: Labelled, matrix: Any, op: str, feat: int, *, seed: int, where: Mapping[str, Any] | None = None
) -> int:
    """Measure the candidates of a case that ran once more; returns how many there are."""
    recorded = records.trials()
    ran = [record for record in recorded if record.seconds is not None and not is_untuned(record)]
    waiting = list(dict.fromkeys(record.candidate for record in ran))
    if not waiting:
        return 0
    order = np.random.default_rng(seed + len(recorded)).permutation(len(waiting))
    search, budget = Again([waiting[n] for n in order], seed), Budget(len(recorded) + len(waiting))
    case = make_case(op, matrix, feat=feat)
    formats = list(dict.fromkeys(c.format for c in waiting if c.format is not None))
    with closing(Session(case.program, case.inputs, None, formats, isolate=True, **(where or {}))) as session:
        explore(session, search, budget, records)
    return len(records.trials()) - len(recorded)


def collect(
    sources: Sequence[CollectionSource],
    ops: Sequence[tuple[str, int]],
    records: Labelled,
    *,
    most: int,
    seconds: float | None = None,
    budget: float | None = None,
    seed: int = 0,
    again: bool = False,
    where: Mapping[str, Any] | None = None,
) -> None:
    """Measure every operation on every matrix; what fails is said and left out.

    Parameters
    ----------
    sources : sequence of CollectionSource
    ops : sequence of (str, int)
        Operations and the lengths of dense rows.
    records : Labelled
    most : int
        Trials of each case.
    seconds : float, optional
        For each half of a case.
    budget : float, optional
        Seconds after which no further case is begun.
    seed : int
    again : bool
        Whether to measure what is recorded once more instead.
    where : mapping of str to object, optional
        The executor whose workers measure, and whether their machines may differ: see `Session`.

    Raises
    ------
    ExecutorLostError
        The executor was lost; run the same command to continue.
    """
    seconds = None if seconds is None else as_seconds(seconds, "seconds")
    budget = None if budget is None else as_seconds(budget, "budget")
    begun = time.perf_counter()
    for number, source in enumerate(sources):
        matrix = None
        for op, feat in ops:
            if budget is not None and time.perf_counter() - begun > budget:
                say(f"stopped after {budget:.0f} s; the same command goes on")
                return
            named = f"{op}:{feat}"
            records.label = {"matrix": source.name, "family": source.family, "op": named}
            start = time.perf_counter()
            try:
                matrix = source.load() if matrix is None else matrix
                if again:
                    new = measured_again(records, matrix, op, feat, seed=seed, where=where)
                else:
                    new = measured(records, matrix, op, feat, most=most, seconds=seconds, seed=seed, where=where)
            except ExecutorLostError:
                raise
            except (SparseTIRError, MemoryError, RuntimeError) as error:
                say(f"without {source.name} {named}: {' '.join(str(error).split())[:200]}")
                continue
            took = time.perf_counter() - start
            say(f"[{number + 1}/{len(sources)}] {source.name} {named}: {new} new trials in {took:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Collect."""
    parser = argparse.ArgumentParser(prog="python -m sparsetir.tuning.train.collect", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines; it is only added to")
    parser.add_argument("--suite", default="all", metavar="NAMES", help="families of generated matrices; '' for none")
    parser.add_argument("--sizes", default=SIZES, help="entries of generated matrices")
    parser.add_argument("--matrices", type=int, default=1, metavar="N", help="of each family and size")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="also every matrix below a folder")
    parser.add_argument("--ops", default=OPS, help="operations with the length of dense rows")
    parser.add_argument("--trials", type=int, default=TRIALS, help="of each case")
    parser.add_argument("--case-seconds", type=parse_seconds, help="for each half of a case")
    parser.add_argument("--seconds", type=parse_seconds, help="after which no further case is begun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="measure what the file holds once more")
    workers = "whose workers measure: processes:N, tcp://host:port of a dask scheduler, or rpc://host:port/key"
    parser.add_argument("--executor", metavar="WHICH", help=workers)
    parser.add_argument("--machines", choices=("same", "each"), default="same", help="whether these are of one kind")
    args = parser.parse_args(argv)
    try:
        sizes = [int(size) for size in args.sizes.split(",")]
        sources = [*generated(args.suite, sizes, args.matrices), *listed(args.data)]
        ops = operations(args.ops)
    except (SparseTIRError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    records = Labelled(args.out)
    limits: dict[str, Any] = {"most": args.trials, "seconds": args.case_seconds, "budget": args.seconds}
    try:
        with opened(args.executor) as executor:
            where = {"executor": executor, "machines": args.machines}
            collect(sources, ops, records, seed=args.seed, again=args.again, where=where, **limits)
    except SparseTIRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
