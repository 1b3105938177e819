# SPDX-License-Identifier: Apache-2.0
"""Decisions judged on measured points."""

from __future__ import annotations

import lzma
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sparsetir import formats
from sparsetir.cli import main
from sparsetir.errors import TuningError
from sparsetir.schedules import Choices
from sparsetir.tuning.features import CHOICES
from sparsetir.tuning.records import Recording
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.train import judge
from sparsetir.tuning.train.dataset import collect, sources

FIRST, SECOND = Candidate(Choices(tile=8)), Candidate(Choices(tile=16))


def case(untuned: float, first: float, second: float) -> Recording:
    rows = {FIRST: np.zeros(1, np.float32), SECOND: np.ones(1, np.float32)}
    measured = {FIRST: first, SECOND: second}
    return Recording("case", measured, rows, ("a",), "matrix", "family", "spmm:8", (untuned, rows[FIRST]))


def test_shares_are_those_of_the_best_point_or_of_the_baseline() -> None:
    (verdict,) = judge.judge([case(2.0, 1.0, 4.0)], judge.rules)
    assert verdict.share == 0.5
    assert not verdict.is_slower
    (verdict,) = judge.judge([case(2.0, 1.0, 4.0)], lambda _case: 1)
    assert verdict.share == 0.25
    assert verdict.is_slower
    (verdict,) = judge.judge([case(1.0, 2.0, 4.0)], judge.best_schedule)
    assert verdict.share == 1.0
    assert not verdict.is_slower
    (verdict,) = judge.judge([case(4.0, 2.0, 1.0)], judge.best_schedule)
    assert verdict.share == 1.0


def test_cases_without_a_baseline_are_left_out() -> None:
    assert not judge.judge([case(np.inf, 1.0, 2.0)], judge.rules)


def test_points_are_judged_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tmp_path / "points.jsonl"
    collect(points, sources(1, seed=3), programs=2, threads=(1,))
    packed = tmp_path / "points.jsonl.xz"
    packed.write_bytes(lzma.compress(points.read_bytes()))
    assert [c.name for c in judge.read(packed)] == [c.name for c in judge.read(points)]
    assert main(["bench", "--from", str(packed), "--train", str(points)]) == 0
    text = capsys.readouterr().out
    assert "rules (build without a hint)" in text
    assert "model of the other machine, first" in text
    # On a busy machine the measurements of a case may differ too much: such a case is not judged.
    assert all(f"| {case.op} " in text for case in judge.read(points))


def test_files_without_points_are_refused(tmp_path: Path) -> None:
    empty, damaged = tmp_path / "empty.jsonl", tmp_path / "damaged.jsonl.xz"
    empty.write_text("")
    damaged.write_bytes(b"no archive")
    with pytest.raises(TuningError, match="expected cases with measured points, got none"):
        judge.read(empty)
    with pytest.raises(TuningError, match="expected measured points compressed by xz"):
        judge.read(damaged)
    assert main(["bench", "--from", str(empty)]) == 2


@pytest.mark.parametrize(("over", "share"), [([3.0, 1.0, 2.0], 0.5), ([9.0, 8.0, 7.0], 0.25)])
def test_a_format_is_tried_beside_the_rules(over: list[float], share: float) -> None:
    """The median of the schedules over the format that the model ranks first, where it is faster than the rules."""
    tried = [Candidate(Choices(tile=tile), formats.bsr(4, 4)) for tile in (8, 16, 32)]
    other, own = Candidate(Choices(tile=8), formats.ell(3)), Candidate(Choices(tile=64, panel=32))
    seconds = dict(zip([*tried, other, own], [*over, 1.0, 5.0], strict=True))
    rows = {candidate: np.full(len(CHOICES), n, np.float32) for n, candidate in enumerate(seconds)}
    untuned = (4.0, np.full(len(CHOICES), 9.0, np.float32))
    recording = Recording("case", seconds, rows, tuple(CHOICES), "matrix", "family", "spmm:128", untuned)
    model = SimpleNamespace(predict=lambda rows: 10.0 - rows[:, 0])
    (verdict,) = judge.judge([recording], judge.of_trial(model))
    assert verdict.share == share
