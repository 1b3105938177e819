# SPDX-License-Identifier: Apache-2.0
"""The examples of whole models on small inputs: each checks its results itself, and prints a table."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsetir.workloads.timing import Timing

EXAMPLES = Path(__file__).parents[2] / "examples" / "relax"
OTHERS = ("common", "tune_models")
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in OTHERS)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example, as if it was run in its folder; no calls are timed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "interleave", lambda calls, **_: {name: Timing.of([1e-3]) for name in calls})
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_checked_results(name: str, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = example(name).main(["--small", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "input: generated (--small)" in printed or name == "sparse_attention"
    assert "difference" in printed
    assert all(f"| {line.name} " in printed for line in lines)
    assert all(line.times["ours"] > 0 and np.isfinite(line.difference) for line in lines)


@pytest.mark.slow
def test_models_are_tuned_by_either_policy(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("tune_models")
    monkeypatch.setattr(module, "EXAMPLES", ("gcn", "sparse_attention"))
    called = []
    timing = Timing.of([1e-3])
    monkeypatch.setattr(
        module,
        "interleave",
        lambda calls, **_: called.extend(c() for c in calls.values()) or dict.fromkeys(calls, timing),
    )
    (line,) = module.main(["--small", "--seconds", "0.5", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "sparse_attention: no product with a constant matrix" in printed
    assert "| gcn " in printed
    assert line.tasks >= 3
    assert len(called) == 3 * line.tasks


@pytest.mark.slow
def test_without_torch_its_columns_are_left_out(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("lidar_conv")
    monkeypatch.setattr(importlib.import_module("common"), "torch", None)
    (line,) = module.main(["--small", "--rounds", "1"])
    assert "torch" not in line.times
    printed = capsys.readouterr().out
    assert "torch not installed" in printed
    assert "vs torch" not in printed


def test_a_wrong_result_is_refused(example: Any) -> None:
    common = importlib.import_module("common")
    with pytest.raises(AssertionError, match=r"differs from numpy by 1.00e-02"):
        common.check("numpy", np.zeros(3), np.full(3, 0.01), 1e-4)
