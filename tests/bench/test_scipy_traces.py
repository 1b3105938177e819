# SPDX-License-Identifier: Apache-2.0
"""The measurement of traces beside scipy."""

from __future__ import annotations

import pytest
import scipy.sparse as sp

from sparsetir.bench import scipy_traces


@pytest.mark.slow
def test_each_operation_runs_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    scipy_traces.main(["--rows", "40", "--calls", "2", "--repeat", "1"])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["`A @ x`", "`A @ X`", "`A @ A`", "`A + A`"]
    assert all(float(row.split("|")[4]) > 0 for row in rows[2:])
    assert all(min(pair) > 0 for pair in scipy_traces.run("A + A", 40, 2, pairs=2))
    assert "__add__" not in vars(sp.csr_array)
