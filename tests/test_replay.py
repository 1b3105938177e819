# SPDX-License-Identifier: Apache-2.0
"""The loops of a few programs are those of the golden file, which `python tests/replay.py` compares in full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import replay

pytestmark = pytest.mark.slow


def test_the_loops_are_as_before() -> None:
    command = [sys.executable, str(Path(replay.__file__)), "--every", "60", "--jobs", "1"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, f"python tests/replay.py --update writes these anew:\n{made.stdout}{made.stderr}"


def test_a_difference_is_told() -> None:
    assert replay.report({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}, is_all=True) == ["b: 3 -> 2", "c: gone"]
    assert replay.report({"b": "2"}, {"c": "4"}, is_all=False) == ["b: new -> 2"]
