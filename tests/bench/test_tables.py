# SPDX-License-Identifier: Apache-2.0
"""Tables of `sparsetir bench NAME` on small inputs: every row has finite figures above zero."""

from __future__ import annotations

import math
import re

import pytest
import scipy.sparse as sp

from sparsetir.bench import scipy_traces
from sparsetir.cli import main

SMALL = {
    "scipy_traces": ["--rows", "40", "--calls", "2", "--repeat", "1"],
    "solvers": ["--sides", "6", "--iterations", "3", "--repeat", "1"],
    "conversions": ["--matrices", "banded", "--size", "small", "--calls", "1", "3", "--columns", "4", "--repeat", "1"],
    "retrieval": [
        *["--documents", "300", "--terms", "80", "--length", "6"],
        *["--queries", "2", "--top", "3", "--repeat", "1"],
    ],
    "grouped": ["--shapes", "2x3", "2xragged", "--dtypes", "float32", "--depth", "4", "--feat", "4", "--repeat", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, *SMALL[name]]) == 0
    shown = capsys.readouterr().out.splitlines()
    table = [line for line in shown if line.startswith("|")]
    assert len(table) > 2
    for row in table[2:]:
        figures = [float(cell) for cell in re.split(r"[| ]+", row) if re.fullmatch(r"\d+(\.\d+)?", cell)]
        assert figures
        assert all(math.isfinite(figure) for figure in figures)
        assert max(figures) > 0


@pytest.mark.slow
def test_traces_run_both_ways_and_leave_scipy_as_it_was() -> None:
    assert all(min(pair) > 0 for pair in scipy_traces.run("A + A", 40, 2, pairs=2))
    assert "__add__" not in vars(sp.csr_array)
