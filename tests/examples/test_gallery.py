# SPDX-License-Identifier: Apache-2.0
"""The examples of the gallery on small inputs: what they compare agrees, and each draws a picture."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparsetir.workloads.timing import Timing

pytestmark = pytest.mark.usefixtures("quick_comparisons")

GALLERY = sorted((Path(__file__).parents[2] / "examples" / "gallery").glob("*.py"))
OPTIONAL = ("torch", "torch_geometric", "dask")  # an example that imports one runs only where it is installed


@pytest.mark.slow
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_the_example_is_right_and_ends_in_a_picture(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    text = path.read_text(encoding="utf-8")
    needed = [name for name in OPTIONAL if re.search(rf"^(import|from) {name}\b", text, re.MULTILINE)]
    if not all(importlib.util.find_spec(name) for name in needed) or ("to_c" in path.stem and not shutil.which("cc")):
        pytest.skip("what the example needs is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSETIR_GALLERY_SCALE", "0.1")
    monkeypatch.setattr("sparsetir.bench.interleave", call_once)
    pyplot.switch_backend("agg")
    runpy.run_path(str(path), run_name="__main__")
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    assert figures
    assert all(axes.has_data() for figure in figures for axes in figure.axes)
    printed = capsys.readouterr().out
    assert printed.strip()
    assert "False" not in printed  # results that were compared


def call_once(cases: dict[str, Any], **_options: Any) -> dict[str, Timing]:
    """Stand in for `interleave`: call each case once and time nothing."""
    for call in cases.values():
        call()
    return {name: Timing.of([1e-3]) for name in cases}
