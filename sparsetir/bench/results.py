# SPDX-License-Identifier: Apache-2.0
"""One operation whose result has a pattern of its own: ours checked, then timed in turn with the peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sparsetir.bench.measure import MeasuredRow, MeasurementPlan, Row, SizedOp, undisturbed
from sparsetir.bench.roofline import OperationWork, limit_of_work, structure
from sparsetir.einsum.products import matmul, multiply
from sparsetir.sparse_output.products import add, matmul_plan, rap
from sparsetir.sparse_output.triangles import triangles
from sparsetir.utils import memory
from sparsetir.utils.machine import MachineProfile
from sparsetir.utils.threads import get_num_threads
from sparsetir.workloads import results
from sparsetir.workloads.inputs import free_memory, reason, say
from sparsetir.workloads.reference import WrongResultError
from sparsetir.workloads.results import SQUARE_ONLY, ResultCase, check_result, make_result_case

Call = Callable[[], Any]
ENTRY = 8  # bytes of a value and its column
HELD = 3  # results at once: ours or a peer's, and what it takes to sort one
BOUNDED = ("spgemm", "add", "multiply")  # operations of which it is known what must be done at least


# ------------------------------------------------------------------------------------------------ our calls


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


def our_calls(title: str, case: ResultCase, findings: list[str]) -> dict[str, Call]:
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


def peer_calls(title: str, case: ResultCase) -> dict[str, Call]:
    """Return the installed libraries that take this case; one that does not is named on stderr."""
    calls: dict[str, Call] = {}
    for peer in results.available(case.op):
        try:
            call = results.setup(peer, case)
            call()
            calls[peer] = call
        except Exception as error:  # what other libraries raise is theirs to choose
            say(f"{title}: without {peer}: {reason(error)}")
    return calls


# ------------------------------------------------------------------------------------------------ measuring


def measure_result(
    name: str, sparse: Any, product: SizedOp, plan: MeasurementPlan, profile: MachineProfile | None = None
) -> MeasuredRow:
    """Check and time an operation.

    Parameters
    ----------
    name : str
        What the operand is called.
    sparse : scipy.sparse array
        Taken as float32.
    product : SizedOp
        One of `sparsetir.workloads.results.OPERATIONS`.
    plan : MeasurementPlan
    profile : MachineProfile, optional
        For the bound.

    Returns
    -------
    MeasuredRow
        Without a row where the matrix does not suit or the result does not fit into memory, which is said on stderr, or
        where ours is wrong.
    """
    title = f"{name} {product}"
    if product.op in SQUARE_ONLY and sparse.shape[0] != sparse.shape[1]:
        say(f"skipped: {title} takes a square matrix, found {sparse.shape[0]} x {sparse.shape[1]}")
        return MeasuredRow(None)
    case = make_result_case(product.op, sparse, kept=product.feat)
    needed = HELD * ENTRY * most_entries(case)
    if needed > free_memory():
        say(f"skipped: {title} may need {needed / 1e9:.1f} GB of memory for its results")
        return MeasuredRow(None)
    findings: list[str] = []
    kernels = our_calls(title, case, findings)
    if not kernels:
        return MeasuredRow(None, findings)
    peers = peer_calls(title, case)
    sizes, work = facts(case, kernels["ours"])
    times, repeats = undisturbed(kernels | peers, plan, title)
    row = Row(
        name,
        product,
        tuple(int(n) for n in sparse.shape),
        int(sparse.nnz),
        {kind: times[kind] for kind in kernels},
        {peer: times[peer] for peer in peers},
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
    return sizes, work_of(case, operands + result_bytes)


def unique(operands: tuple[Any, ...]) -> list[Any]:
    """Each matrix once."""
    return list({id(operand): operand for operand in operands}.values())


def work_of(case: ResultCase, moved: int) -> OperationWork:
    """Operations and bytes: a product loads a row of B for each entry of A."""
    if case.op in ("add", "multiply"):
        return OperationWork(case.products // 2, 0, 0, moved)
    A, B = case.operands[:2]
    rows = np.flatnonzero(np.bincount(A.indices, minlength=B.shape[0]))
    gathered = int(np.diff(B.indptr)[rows].sum()) * ENTRY
    return OperationWork(2 * case.products, case.products * ENTRY, gathered, moved)


__all__ = ["OURS", "measure_result"]
