# SPDX-License-Identifier: Apache-2.0
"""The figures of the README come from the measured results in docs/benchmarks."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def draw() -> Any:
    spec = importlib.util.spec_from_file_location("draw_benchmarks", ROOT / "docs" / "benchmarks" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_readme_is_that_of_the_latest_runs(draw: Any) -> None:
    assert draw.table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_has_the_rows_of_the_latest_run(draw: Any) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = draw.latest(draw.read("amd_zen4"), "SpMM").rows
    assert len(rows) == 47
    missing = [
        row
        for row in rows
        if not re.search(rf"^\| {row.matrix} \|.* {row.columns} \| {row.ours:g} ", page, re.MULTILINE)
    ]
    assert not missing


def test_pictures_are_drawn(draw: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw.draw_speed(tmp_path / "speed.svg")
    draw.draw_history(tmp_path / "history.svg")
    assert all("</svg>" in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
