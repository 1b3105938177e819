# SPDX-License-Identifier: Apache-2.0
"""The table of expressions, on tiny inputs."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import scipy.sparse as sp

from each import share
from sparsetir.bench import expressions as bench
from sparsetir.bench.expressions import CASES, PEERS, agree, entries
from sparsetir.einsum import einsum

BY_NAME = {case.name: case for case in CASES}
CHOSEN = ["spmv", "sddmm", "product", "min-plus spmv", "tensor sum", "mttkrp"]


def test_there_are_twenty_expressions_and_more() -> None:
    assert len(BY_NAME) == len(CASES) >= 20
    assert {*bench.PROGRAMS, *bench.BY_HAND} <= set(BY_NAME)
    for case in CASES:
        operands = case.operands(40)
        assert [np.ndim(v) if k == "d" else len(v.shape) for k, v in zip(case.kinds, operands, strict=True)] == [
            len(term) for term in case.terms
        ]


@pytest.mark.parametrize("name", share(list(bench.BY_HAND), 3))
def test_programs_by_hand(name: str) -> None:
    case = BY_NAME[name]
    operands = case.operands(60)
    call = bench.program_call(case, operands)
    assert call is not None
    assert bench.same(case, call(), einsum(case.text, *operands, **case.options))


@pytest.mark.parametrize("name", [case.name for case in CASES if case.scipy is not None])
def test_what_scipy_says_is_what_numpy_computes(name: str) -> None:
    case = BY_NAME[name]
    operands = case.operands(30)
    found = PEERS["scipy"](case, operands)()
    if not case.options:
        dense = [v if isinstance(v, np.ndarray) else v.toarray() for v in operands]
        expected = np.einsum(case.text, *dense)
        assert agree(found, expected) or np.isclose(found.sum(), expected.sum())


@pytest.mark.slow
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = ["--rounds", "1", "--rest", "0", "--size", "60"]
    assert bench.main(["--only", ",".join(CHOSEN), *rounds]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("|  | expression | first | einsum | bound | program | scipy |")
    assert [line.split("|")[1].strip() for line in lines[2:8]] == [c.name for c in CASES if c.name in CHOSEN]
    assert lines[8].startswith("| geometric mean |")


def test_results_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "scipy", lambda case, operands: lambda: operands[0] @ operands[1] * 2)
    row = bench.measure(BY_NAME["spmv"], 50, compare_with=["scipy"], rounds=1, rest=0, burst=0.001)
    assert row.findings == ["spmv: scipy differs from einsum"]
    assert set(row.times) == {"einsum", "bound", "program", "scipy"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sparse") is None, reason="pydata/sparse is not installed")
def test_pydata_sparse_agrees() -> None:
    case = BY_NAME["tensor hadamard"]
    operands = case.operands(60)
    assert agree(PEERS["sparse"](case, operands)(), einsum(case.text, *operands))


def test_results_of_all_classes_are_compared() -> None:
    dense = np.array([[0, 2.0], [3.0, 0]])
    assert [part.tolist() for part in entries(sp.csr_array(dense))] == [[1, 2], [2.0, 3.0]]
    assert agree(sp.coo_array(dense), dense)
    assert not agree(sp.csr_array(dense * 2), dense)
    assert agree(5.0, np.float32(5.0))


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--compare-with", "nobody"], ["--size", "0"]])
def test_wrong_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "some of" in capsys.readouterr().err
