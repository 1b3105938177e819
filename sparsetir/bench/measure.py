# SPDX-License-Identifier: Apache-2.0
"""One operation on matrices or tensors: our kernels of each kind checked, then timed in turn with the peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.bench.roofline import OperationWork, TimeBound, limit_of_work, structure, t_fair, work_of
from sparsetir.bench.sweep import best_of
from sparsetir.build import build
from sparsetir.einsum.products import matmul, multiply
from sparsetir.errors import ArgumentError
from sparsetir.runtime.kernel import Kernel
from sparsetir.sparse_output.products import add, matmul_plan, rap
from sparsetir.sparse_output.triangles import triangles
from sparsetir.tuning import tune_sparse
from sparsetir.utils import memory
from sparsetir.utils.buffers import aligned
from sparsetir.utils.machine import MachineProfile
from sparsetir.utils.threads import get_num_threads
from sparsetir.workloads import peers, results
from sparsetir.workloads.inputs import DENSE, Case, free_memory, make_case, reason, say
from sparsetir.workloads.reference import COLUMNS, PART, WrongResultError, check
from sparsetir.workloads.results import OPERATIONS, SQUARE_ONLY, ResultCase, check_result, make_result_case
from sparsetir.workloads.timing import Timing, interleave

OUTPUTS = {"spmm": "C", "spmv": "y", "sddmm": "O", "mttkrp": "D"}
MANY_TRIALS = 10_000
CALLS = 1000  # announced to an untuned kernel
ON_TRIAL, MOST_UNDECIDED = "on trial", 200  # how a kernel says that it compares formats, and for how many calls at most


@dataclass(frozen=True)
class MeasurementPlan:
    """Rounds, pauses and searches of a measurement.

    Parameters
    ----------
    tune : float
        Seconds of tuning before a case; 0 for none.
    database : Path, optional
        Where tuning keeps its trials.
    rounds : int
        Turns of each kernel and peer.
    rest : float
        Seconds of sleep before each turn.
    repeat : int
        How often a case that other work disturbed is measured again.
    sweep : bool
        Whether formats and choices are swept for the best kernel.
    """

    tune: float = 0.0
    database: Path | None = None
    rounds: int = 3
    rest: float = 0.25
    repeat: int = 2
    sweep: bool = False


Kind = Callable[[Case, MeasurementPlan], dict[str, Any]]


def untuned(case: Case, _plan: MeasurementPlan) -> dict[str, Any]:
    """Return what `sparsetir.build` makes of the program for many calls."""
    return {"untuned": build(case.program, expected_calls=CALLS)}


def tuned(case: Case, plan: MeasurementPlan) -> dict[str, Any]:
    """Return what a search on the operands finds, where one is asked for."""
    if not plan.tune:
        return {}
    budget: dict[str, Any] = {"max_trials": MANY_TRIALS, "max_seconds": plan.tune}
    result = tune_sparse(case.program, case.inputs, database=plan.database, progress=False, **budget)
    return {"tuned": result.kernel}


def best(case: Case, plan: MeasurementPlan) -> dict[str, Any]:
    """Return the fastest of a coarse sweep, where one is asked for."""
    fastest = best_of(case) if plan.sweep else None
    if fastest is None:
        return {}
    kernel, option = fastest
    say(f"{case.op}: best of the sweep: {option}")
    return {"best": kernel}


# In the order of the columns.
KINDS: list[Kind] = [untuned, best, tuned]
# Kinds whose time is set in relation to the peers'.
RATED = ("untuned", "tuned", "best", "ours")


def kernels(case: Case, plan: MeasurementPlan, failures: list[str]) -> dict[str, Any]:
    """Every kernel of ours that is measured on a case.

    Parameters
    ----------
    case : Case
    plan : MeasurementPlan
    failures : list of str
        What went wrong in a kind is added to it; the others are still made.

    Returns
    -------
    dict of str to Kernel
        By the name of its column; a name stands for the same way of choosing a schedule in every case. Those in `RATED`
        are compared with the peers.
    """
    kernels_by_kind: dict[str, Any] = {}
    for kind in KINDS:
        try:
            kernels_by_kind |= kind(case, plan)
        except Exception as error:  # one kind must not end a run over many cases
            failures.append(f"{kind.__name__}: {reason(error)}")
    return kernels_by_kind


def our_calls(kernels: Mapping[str, Any], case: Case) -> dict[str, Callable[[], np.ndarray]]:
    """Return calls of several kernels, all in the same way: see `our_call`."""
    returns = not all(_takes_result(kernel, case) for kernel in kernels.values())
    return {name: our_call(kernel, case, returns=returns) for name, kernel in kernels.items()}


def _takes_result(kernel: Any, case: Case) -> bool:
    """Return whether a kernel writes to an array that is passed.

    Kernels that store the values of O in another format have no such array.
    """
    return case.op != "sddmm" or isinstance(getattr(kernel, "best", kernel), Kernel)


def our_call(kernel: Any, case: Case, *, returns: bool = False) -> Callable[[], np.ndarray]:
    """Return a call as a user makes it in a loop: the sparse operand bound, the memory of the result used again.

    It returns the result, for sddmm the values of O. Until the first call the memory holds NaN. For sddmm a kernel over
    another format than CSR returns a new sparse array, as it has no other way to hand out its values; others do so if
    `returns`.
    """
    (name, sparse), *remaining = case.inputs.items()
    bound, dense = kernel.bind(**{name: sparse}), dict(remaining)
    if case.op == "sddmm" and (returns or not _takes_result(kernel, case)):
        values = lambda: bound(**dense).data  # noqa: E731
        until_decided(bound, values)
        return values
    out = aligned(np.full(output_shape(case), np.nan, np.float32))
    arguments = {**dense, kernel.signature.outputs[0] if case.op == "sddmm" else OUTPUTS[case.op]: out}

    def call() -> np.ndarray:
        bound(**arguments)
        return out

    until_decided(bound, call)
    out.fill(np.nan)
    return call


def until_decided(bound: Any, call: Call) -> None:
    """Make the calls in which a bound kernel compares formats and schedules, as they are none of those to come."""
    call()
    calls = 1
    while calls < MOST_UNDECIDED and hasattr(bound, "explain") and bound.explain().startswith(ON_TRIAL):
        call()
        calls += 1


def output_shape(case: Case) -> tuple[int, ...]:
    """Return the shape of the array that holds the result."""
    if case.op == "sddmm":
        return (case.sparse.nnz,)
    last = next(reversed(case.inputs.values()))
    return (case.sparse.shape[0], *last.shape[1:])


Call = Callable[[], Any]
DIMENSIONS = {"spmm": 2, "spmv": 2, "sddmm": 2, "mttkrp": 3}
TAKEN = {**DIMENSIONS, **dict.fromkeys(OPERATIONS, 2)}  # by all operations, those with computed patterns too
DEFAULT_FEAT = {"spmm": 128, "sddmm": 128, "mttkrp": 32, "topn": 10}
COUNTED = {"topn": "entries in a row"}  # what the number is where it is not that of columns
# Results of ours that are held at once, and what tuning adds.
OWN_RESULTS, TUNING_RESULTS = 3, 2
# Bytes for each entry: ours, the peers' and the reference's copies of values and indices.
ENTRY = 64
# What the peer of each operation is called that a table's ratios begin with.
BASELINES = ("scipy", "numpy")
BEST = "best peer"


@dataclass(frozen=True)
class SizedOp:
    """An operation with a number of columns, as in ``spmm:128``, for topn of entries in a row; 1 where it has none."""

    op: str
    feat: int

    def __str__(self) -> str:
        return f"{self.op}:{self.feat}" if self.op in DEFAULT_FEAT else self.op


@dataclass(frozen=True)
class Row:
    """Times of one operation on one matrix or tensor.

    Parameters
    ----------
    name : str
        Of the matrix or tensor.
    product : SizedOp
    shape : tuple of int
    nnz : int
    ours, peers : dict of str to Timing
    work : OperationWork
    bound : TimeBound or None
        None where no profile of the machine was given.
    repeats : int
        How often it was measured again because other work disturbed it.
    sizes : dict of str to float
        More columns of the table, in place of the number of columns.
    """

    name: str
    product: SizedOp
    shape: tuple[int, ...]
    nnz: int
    ours: dict[str, Timing]
    peers: dict[str, Timing]
    work: OperationWork
    bound: TimeBound | None = None
    repeats: int = 0
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, Timing]:
        """All of them, ours first."""
        return self.ours | self.peers

    @property
    def spread(self) -> float:
        """The largest of all."""
        return max(timing.spread for timing in self.times.values())

    @property
    def disturbed(self) -> bool:
        """Whether any of the times is."""
        return any(timing.disturbed for timing in self.times.values())

    @property
    def baseline(self) -> str | None:
        """The peer named first in ratios."""
        return next((name for name in BASELINES if name in self.peers), None)

    def ratio(self, ours: str, other: str | None) -> float | None:
        """Return how many times faster a kernel of ours is than a peer, or the fastest one (`BEST`), if any."""
        names = list(self.peers) if other == BEST else [other]
        peer_seconds = [self.peers[name].median for name in names if name in self.peers]
        if ours not in self.ours or not peer_seconds:
            return None
        return min(peer_seconds) / self.ours[ours].median

    def fraction(self, ours: str | None = None) -> float | None:
        """Return the least predicted time over the time of a kernel of ours, by default the fastest."""
        if self.bound is None:
            return None
        timings = self.ours.values() if ours is None else [self.ours[ours]]
        return self.bound.seconds / min(timing.median for timing in timings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ours = {name: {**t.as_dict(), "t_fair/t": self.fraction(name)} for name, t in self.ours.items()}
        limits = {"t_fair": self.bound.seconds, "limit": self.bound.limit} if self.bound else {}
        return {
            "name": self.name,
            "op": self.product.op,
            "feat": self.product.feat,
            "shape": list(self.shape),
            "nnz": self.nnz,
            **self.sizes,
            "flops": self.work.flops,
            "bytes": self.work.compulsory,
            **limits,
            "ours": ours,
            "peers": {name: timing.as_dict() for name, timing in self.peers.items()},
            "repeats": self.repeats,
            "disturbed": self.disturbed,
        }

    def __str__(self) -> str:
        times = ", ".join(f"{name} {timing.median * 1e3:.4g}" for name, timing in self.times.items())
        again = f" (measured {self.repeats + 1} times)" if self.repeats else ""
        return f"{self.name} {self.product}: {times} ms{again}"


@dataclass(frozen=True)
class MeasuredRow:
    """A row, if there is one, and what was found wrong on the way."""

    row: Row | None
    findings: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------- products


def parse_products(text: str) -> list[SizedOp]:
    """Operations separated by commas, each with its number of columns behind a colon.

    Examples
    --------
    >>> [str(product) for product in parse_products("spmm:32,spmv,sddmm")]
    ['spmm:32', 'spmv', 'sddmm:128']
    """
    products = [parse_product(part.strip()) for part in text.split(",")]
    return list(dict.fromkeys(products))


def parse_product(text: str) -> SizedOp:
    """One of them."""
    op, colon, feat = text.partition(":")
    if op not in TAKEN:
        raise ArgumentError(f"expected operations such as spmm:128, of {', '.join(TAKEN)}, got {text!r}")
    if op not in DEFAULT_FEAT:
        if colon:
            raise ArgumentError(f"{op} has no number of columns, got {text!r}; try {op}")
        return SizedOp(op, 1)
    if not colon:
        return SizedOp(op, DEFAULT_FEAT[op])
    if not (feat.isascii() and feat.isdigit() and int(feat) > 0):
        counted = COUNTED.get(op, "columns")
        raise ArgumentError(f"expected a positive number of {counted} as in {op}:{DEFAULT_FEAT[op]}, got {text!r}")
    return SizedOp(op, int(feat))


def suits(product: SizedOp, sparse: Any) -> bool:
    """Return whether the operation accepts an operand with that many dimensions."""
    return TAKEN[product.op] == len(sparse.shape)


# ---------------------------------------------------------------------------------------------------- measuring


def needed_bytes(product: SizedOp, sparse: Any, plan: MeasurementPlan) -> int:
    """About how much memory the operands, results and checks take."""
    dense = sum(sparse.shape[dim] for dim, _ in DENSE[product.op].values()) * product.feat
    nnz = int(sparse.nnz)
    result = nnz if product.op == "sddmm" else sparse.shape[0] * product.feat
    result_count = OWN_RESULTS + len(peers.available(product.op)) + (TUNING_RESULTS if plan.tune else 0)
    checked = 16 * (min(COLUMNS, product.feat) * sum(sparse.shape) + 2 * min(PART, nnz * product.feat))
    return int(4 * (dense + result_count * result) + ENTRY * nnz + checked)


def measure(
    name: str, sparse: Any, product: SizedOp, plan: MeasurementPlan, profile: MachineProfile | None = None
) -> MeasuredRow:
    """Check and time an operation.

    Parameters
    ----------
    name : str
        What the operand is called.
    sparse : scipy.sparse array or CooTensor
        Taken as float32.
    product : SizedOp
        Which takes an operand of its dimensions.
    plan : MeasurementPlan
    profile : MachineProfile, optional
        For the bound.

    Returns
    -------
    MeasuredRow
        Without a row where the operands do not fit into memory, which is said on stderr, or no kernel of ours is right.
    """
    needed = needed_bytes(product, sparse, plan)
    if needed > free_memory():
        say(f"skipped: {name} {product} needs {needed / 1e9:.1f} GB of memory for its operands")
        return MeasuredRow(None)
    case = make_case(product.op, sparse, feat=product.feat)
    title = f"{name} {product}"
    findings: list[str] = []
    kernels = checked_calls(title, case, plan, findings)
    if not kernels:
        return MeasuredRow(None, findings)
    set_up = lambda peer: getattr(peers, case.op)(peer, *case.inputs.values())  # noqa: E731
    by_peers = peer_calls(title, peers.available(case.op), set_up)
    times, repeats = undisturbed(kernels | by_peers, plan, title)
    work = work_of(product.op, case.inputs)
    row = Row(
        name,
        product,
        tuple(int(n) for n in case.sparse.shape),
        int(case.sparse.nnz),
        {kind: times[kind] for kind in kernels},
        {peer: times[peer] for peer in by_peers},
        work,
        t_fair(case.sparse, product.op, product.feat, profile, threads=get_num_threads()) if profile else None,
        repeats,
    )
    return MeasuredRow(row, findings)


def checked_calls(title: str, case: Case, plan: MeasurementPlan, findings: list[str]) -> dict[str, Call]:
    """Return the kernels whose result is right; what is wrong with the others is added to `findings`."""
    calls: dict[str, Call] = {}
    failures: list[str] = []
    for kind, kernel in kernels(case, plan, failures).items():
        try:
            call = our_call(kernel, case)
            check(kind, call, case)
            calls[kind] = call
        except WrongResultError as error:
            failures.append(str(error))
        except Exception as error:  # one kernel must not end a run over many cases
            failures.append(f"{kind}: {reason(error)}")
    for failure in failures:
        findings.append(f"{title}, {failure}")
        say(findings[-1])
    return calls


def peer_calls(title: str, names: Sequence[str], set_up: Callable[[str], Call]) -> dict[str, Call]:
    """Return the calls of libraries that take a case; one that does not is named on stderr."""
    calls: dict[str, Call] = {}
    for peer in names:
        try:
            call = set_up(peer)
            call()
            calls[peer] = call
        except Exception as error:  # what other libraries raise is theirs to choose
            say(f"{title}: without {peer}: {reason(error)}")
    return calls


def undisturbed(calls: dict[str, Call], plan: MeasurementPlan, title: str) -> tuple[dict[str, Timing], int]:
    """Return times without a sign of other work, or the quietest of a few attempts; and how many were repeats."""
    attempts = []
    for attempt in range(plan.repeat + 1):
        times = interleave(calls, rounds=plan.rounds, rest=plan.rest)
        if not any(timing.disturbed for timing in times.values()):
            return times, attempt
        attempts.append(times)
        if attempt < plan.repeat:
            say(f"{title}: disturbed by other work, measured again")
    return min(attempts, key=lambda times: max(timing.spread for timing in times.values())), plan.repeat


# ------------------------------------------------------------ operations whose results have patterns of their own


RESULT_ENTRY_BYTES = 8  # a value and its column
RESULTS_AT_ONCE = 3  # ours or a peer's, and what it takes to sort one
BOUNDED = ("spgemm", "add", "multiply")  # operations of which it is known what must be done at least


def products(case: ResultCase) -> dict[str, Call]:
    """Return the whole, and the numeric phase alone for patterns that are known."""
    A, B = case.operands
    return {"ours": partial(matmul, A, B), "numeric": partial(matmul_plan(A, B), A, B)}


OURS: dict[str, Callable[[ResultCase], dict[str, Call]]] = {
    "spgemm": products,
    "add": lambda case: {"ours": partial(add, *case.operands)},
    "multiply": lambda case: {"ours": partial(multiply, *case.operands)},
    "masked": lambda case: {"ours": partial(matmul, *case.operands[:2], mask=case.operands[2])},
    "topn": lambda case: {"ours": partial(matmul, *case.operands, top=case.kept)},
    "rap": lambda case: {"ours": partial(rap, *case.operands)},
    "triangles": lambda case: {"ours": partial(triangles, case.operands[0])},
}


def our_result_calls(title: str, case: ResultCase, findings: list[str]) -> dict[str, Call]:
    """Our calls whose result is right; what is wrong with the others is added to `findings`."""
    right: dict[str, Call] = {}
    try:
        for kind, call in OURS[case.op](case).items():
            check_result(f"{title}, {kind}", call(), case)
            right[kind] = call
    except WrongResultError as error:
        findings.append(str(error))
    except Exception as error:  # one operation must not end a run over many
        findings.append(f"{title}: {reason(error)}")
    for finding in findings:
        say(finding)
    return right


def measure_result(
    name: str, sparse: Any, product: SizedOp, plan: MeasurementPlan, profile: MachineProfile | None = None
) -> MeasuredRow:
    """Check and time an operation that computes the pattern of its result.

    Parameters
    ----------
    name, sparse, product, plan, profile
        As for `measure`; the operation is one of `sparsetir.workloads.results.OPERATIONS`.

    Returns
    -------
    MeasuredRow
        Without a row where the matrix does not suit or the result does not fit into memory, which is said on stderr, or
        where ours is wrong.
    """
    title = f"{name} {product}"
    if product.op in SQUARE_ONLY and sparse.shape[0] != sparse.shape[1]:
        say(f"skipped: {title} takes a square matrix, got {sparse.shape[0]} x {sparse.shape[1]}")
        return MeasuredRow(None)
    case = make_result_case(product.op, sparse, kept=product.feat)
    needed = RESULTS_AT_ONCE * RESULT_ENTRY_BYTES * most_entries(case)
    if needed > free_memory():
        say(f"skipped: {title} may need {needed / 1e9:.1f} GB of memory for its results")
        return MeasuredRow(None)
    findings: list[str] = []
    kernels = our_result_calls(title, case, findings)
    if not kernels:
        return MeasuredRow(None, findings)
    by_peers = peer_calls(title, results.available(case.op), partial(results.setup, case=case))
    sizes, work = facts(case, kernels["ours"])
    times, repeats = undisturbed(kernels | by_peers, plan, title)
    row = Row(
        name,
        product,
        tuple(int(n) for n in sparse.shape),
        int(sparse.nnz),
        {kind: times[kind] for kind in kernels},
        {peer: times[peer] for peer in by_peers},
        work,
        limit_of_work(work, profile, threads=get_num_threads()) if profile and product.op in BOUNDED else None,
        repeats,
        sizes,
    )
    return MeasuredRow(row, findings)


def most_entries(case: ResultCase) -> int:
    """Entries that a result has at most, that of a product before it is masked or shortened."""
    m, n = case.shape
    return min(case.products, m * n)


def facts(case: ResultCase, call: Call) -> tuple[dict[str, float], OperationWork]:
    """Return what the table says of a case besides times, and what has to be done at least."""
    result = call()
    operands = sum(structure(operand) for operand in unique(case.operands))
    result_bytes = structure(result) if hasattr(result, "indptr") else 0
    entries = int(result.nnz) if result_bytes else int(result)
    del result
    sizes: dict[str, float] = {"kept": case.kept} if case.kept else {}
    sizes |= {"products": case.products, "result": entries}
    if case.op in ("spgemm", "rap"):
        sizes["products/result"] = case.products / max(1, entries)
    peak = memory.added(call)
    if peak is not None and result_bytes:
        sizes["peak"] = (operands + peak) / (operands + result_bytes)
    return sizes, work_of_result(case, operands + result_bytes)


def unique(operands: tuple[Any, ...]) -> list[Any]:
    """Each matrix once."""
    return list({id(operand): operand for operand in operands}.values())


def work_of_result(case: ResultCase, moved: int) -> OperationWork:
    """Operations and bytes: a product loads a row of B for each entry of A."""
    if case.op in ("add", "multiply"):
        return OperationWork(case.products // 2, 0, 0, moved)
    A, B = case.operands[:2]
    rows = np.flatnonzero(np.bincount(A.indices, minlength=B.shape[0]))
    gathered = int(np.diff(B.indptr)[rows].sum()) * RESULT_ENTRY_BYTES
    return OperationWork(2 * case.products, case.products * RESULT_ENTRY_BYTES, gathered, moved)


__all__ = [
    "BEST",
    "KINDS",
    "OURS",
    "RATED",
    "Kind",
    "MeasuredRow",
    "MeasurementPlan",
    "Row",
    "SizedOp",
    "kernels",
    "measure",
    "measure_result",
    "our_call",
    "our_calls",
    "parse_products",
    "suits",
]
