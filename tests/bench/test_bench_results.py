# SPDX-License-Identifier: Apache-2.0
"""`sparsetir bench` on operations whose result has a pattern of its own: rows, columns, what is left out or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir.bench import Timing, measure, report
from sparsetir.bench.roofline import OperationWork
from sparsetir.errors import ArgumentError
from sparsetir.workloads import inputs, suite
from sparsetir.workloads import results as result_cases
from sparsetir.workloads.results import OPERATIONS, SQUARE_ONLY, make_result_case

pytestmark = pytest.mark.usefixtures("quick_ceilings")

QUICK = measure.MeasurementPlan(rounds=1, rest=0.0, repeat=0)


def rows_of(A: Any, ops: str, name: str = "m") -> dict[str, measure.MeasuredRow]:
    return {p.op: measure.measure_result(name, A, p, QUICK) for p in measure.parse_products(ops)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uniform", "bipartite", "empty"])
def test_rows_of_all_operations(name: str) -> None:
    A = suite.generate(name, 2000)
    taken = [op for op in OPERATIONS if A.shape[0] == A.shape[1] or op not in SQUARE_ONLY]
    for op, found in rows_of(A, ",".join(taken)).items():
        assert found.findings == []
        assert next(iter(found.row.ours)) == "ours"
        absent = {"mkl"} if not A.nnz else set()  # it adds nothing up where there is nothing
        assert set(found.row.peers) | absent >= set(result_cases.available(op))
        facts = found.row.as_dict()
        assert {"products", "result"} <= set(facts)
        assert facts["nnz"] == A.nnz


@pytest.mark.slow
def test_a_product_and_its_numeric_phase() -> None:
    A = sp.random_array((40, 40), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))
    found = rows_of(A, "spgemm")["spgemm"]
    assert found.findings == []
    assert list(found.row.ours) == ["ours", "numeric"]
    case = make_result_case("spgemm", A)
    assert found.row.sizes["products"] == case.products
    assert found.row.sizes["products/result"] == case.products / found.row.sizes["result"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_rows_of_nothing(shape: tuple[int, int]) -> None:
    found = rows_of(sp.csr_array(shape, dtype="float32"), "spgemm,add,multiply,topn")
    assert [measured.findings for measured in found.values()] == [[]] * 4
    text = report.Report([measured.row for measured in found.values()]).text()
    assert all(op in text for op in found)


def test_what_does_not_suit_is_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    A = sp.csr_array((4, 5), dtype="float32")
    found = rows_of(A, "masked,rap,triangles")
    assert [(measured.row, measured.findings) for measured in found.values()] == [(None, [])] * 3
    assert "skipped: m rap takes a square matrix, got 4 x 5" in capsys.readouterr().err
    monkeypatch.setattr(measure, "free_memory", lambda: 100.0)
    square = sp.csr_array(np.ones((9, 9), "float32"))
    assert rows_of(square, "spgemm")["spgemm"].row is None
    assert "skipped: m spgemm may need 0.0 GB of memory for its results" in capsys.readouterr().err


def spoiled(case: Any) -> dict[str, Callable[[], Any]]:
    result = sp.csr_array(case.operands[0] @ case.operands[1])
    result.sort_indices()
    result.data[0] += 1
    return {"ours": lambda: result}


def failing(_case: Any) -> dict[str, Callable[[], Any]]:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("ours", "message"), [(spoiled, "m spgemm, ours: our result differs"), (failing, "m spgemm: RuntimeError: no such")]
)
def test_what_is_wrong_is_a_finding(monkeypatch: pytest.MonkeyPatch, ours: Any, message: str) -> None:
    monkeypatch.setitem(measure.OURS, "spgemm", ours)
    found = rows_of(sp.csr_array(np.ones((3, 3), "float32")), "spgemm")["spgemm"]
    assert found.row is None
    assert len(found.findings) == 1
    assert found.findings[0].startswith(message)


@pytest.mark.slow
def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(result_cases.SETUPS["add"], "scipy", failing)
    found = rows_of(sp.csr_array(np.ones((3, 3), "float32")), "add")["add"]
    assert "scipy" not in found.row.peers
    assert "m add: without scipy: TypeError" in capsys.readouterr().err


# --- command ----------------------------------------------------------------------------------------------


def test_operations_are_named() -> None:
    found = measure.parse_products("spgemm,topn,topn:3,masked,spmm:8")
    assert [str(product) for product in found] == ["spgemm", "topn:10", "topn:3", "masked", "spmm:8"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spgemm:3", "spgemm has no number of columns, got 'spgemm:3'; try spgemm"),
        ("topn:0", "expected a positive number of entries in a row as in topn:10, got 'topn:0'"),
    ],
)
def test_operations_that_are_not(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measure.parse_products(text)


def test_options_that_do_not_reach_an_operation_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    products = measure.parse_products("spmm:8,spgemm,topn:3")
    report.say_of_options(products, measure.MeasurementPlan(tune=2.0))
    assert capsys.readouterr().err.startswith("--tune is not for spgemm, topn:3: sparsetir.tune_sparse searches")
    report.say_of_options(products, measure.MeasurementPlan(tune=2.0, sweep=True))
    assert capsys.readouterr().err.startswith("--sweep and --tune are not for spgemm, topn:3")
    for some, plan in ((products[:1], measure.MeasurementPlan(tune=2.0)), (products, measure.MeasurementPlan())):
        report.say_of_options(some, plan)
        assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(report, "ceilings", lambda: None)
    monkeypatch.setattr(report.peers, "set_threads", lambda _count: told.append("few"))
    monkeypatch.setattr(report.results, "set_threads", lambda _count: told.append("all"))
    sources = inputs.from_suite("stencil_2d", "small")
    for ops in ("spmv,add", "spmv"):
        *_, found = report.run(sources, measure.parse_products(ops), QUICK)
        assert [row.product.op for row in found.rows] == ops.split(",")
    assert told == ["all", "few"]


# --- the table --------------------------------------------------------------------------------------------


def row(op: str, seconds: dict[str, float], **sizes: float) -> measure.Row:
    times = {name: Timing.of([value] * 3) for name, value in seconds.items()}
    ours = {"ours": times.pop("ours")}
    return measure.Row("m", measure.SizedOp(op, 1), (2, 2), 3, ours, times, OperationWork(2, 0, 0, 8), sizes=sizes)


def test_each_peer_has_a_ratio() -> None:
    rows = [row("spgemm", {"ours": 1.0, "scipy": 4.0, "mkl": 2.0}, products=1000, peak=1.25)]
    heading, cells, *_ = report.table(rows)
    assert heading == [
        *("matrix", "nonzeros", "products", "peak", "ours ms", "scipy ms", "mkl ms"),
        *("vs scipy", "vs mkl", "vs best peer", "spread"),
    ]
    assert cells == ["m", "3", "1,000", "1.25", "1000", "4000", "2000", "4.00", "2.00", "2.00", "0%"]


def test_notes_name_what_is_missing_and_what_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cases, "missing", lambda: {"graphblas": "not installed"})
    found = report.Report([row("spgemm", {"ours": 1.0, "torch": 4.0}, products=1)])
    notes = found.notes()
    assert "without graphblas: not installed" in notes
    assert "the rows of torch's products are not sorted, those of all others are" in notes
    assert found.as_dict()["missing"] == {"graphblas": "not installed"}
    other = report.Report([row("add", {"ours": 1.0, "torch": 4.0}, products=1)])
    assert not any("sorted" in note for note in other.notes())
