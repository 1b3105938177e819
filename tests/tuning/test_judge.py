# SPDX-License-Identifier: Apache-2.0
"""Decisions judged on measured points."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sparsetir import formats
from sparsetir.cli import main
from sparsetir.errors import TuningError
from sparsetir.schedules import Choices
from sparsetir.tuning.features import CHOICES, matrix_names
from sparsetir.tuning.records import Recording
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.train import dataset, judge, pretrain
from sparsetir.tuning.train.dataset import collect, encoding_of, lines, of_processor, profiled, sources
from sparsetir.tuning.train.pretrain import train_with
from sparsetir.tuning.work import USUAL
from sparsetir.utils.machine import shipped_profile

FIRST, SECOND = Candidate(Choices(tile=8)), Candidate(Choices(tile=16))


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Points of two programs on a small matrix."""
    path = tmp_path_factory.mktemp("collected") / "points.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        few = {"OWN_CHOICES": 9, "CHOICES": 1, "SURE_FORMATS": 2, "OTHER_FORMATS": 0, "BURST": 1e-5}
        for name, value in {**few, "SMALLEST": 300, "LARGEST": 900}.items():
            patch.setattr(dataset, name, value)
        patch.setattr(dataset, "measure_rates", lambda _target: USUAL)
        patch.setattr(dataset, "machine_profile", lambda: shipped_profile("znver4"))
        collect(path, sources(1, seed=3), programs=2, threads=(1,))
    return path


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


@pytest.mark.slow
def test_points_are_judged_without_measuring(
    collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = collected
    monkeypatch.setattr(judge, "SPREAD", float("inf"))  # a busy machine is no reason to fail
    packed = tmp_path / "points.jsonl.xz"
    packed.write_bytes(lzma.compress(points.read_bytes()))
    assert [c.name for c in judge.read(packed)] == [c.name for c in judge.read(points)]
    assert main(["bench", "--from", str(packed), "--train", str(points)]) == 0
    text = capsys.readouterr().out
    assert "rules (build without a hint)" in text
    assert "model of the other machine, first" in text
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


@pytest.mark.parametrize(("most", "first", "share"), [(1, 2.0, 0.5), (1, 9.0, 0.25), (2, 9.0, 1.0)])
@pytest.mark.parametrize("kind", ["spmm", "mttkrp"])
def test_what_a_model_ranks_first_is_tried_beside_the_rules(kind: str, most: int, first: float, share: float) -> None:
    """The fastest of all counts."""
    tried, other = Candidate(Choices(tile=8), formats.bsr(4, 4)), Candidate(Choices(tile=8), formats.ell(3))
    seconds = {tried: first, other: 1.0, Candidate(Choices(tile=64, panel=32)): 5.0}
    rows = {candidate: np.full(len(CHOICES), n, np.float32) for n, candidate in enumerate(seconds)}
    untuned = (4.0, np.full(len(CHOICES), 9.0, np.float32))
    about = {"untuned": untuned, "kind": kind}
    recording = Recording("case", seconds, rows, tuple(CHOICES), "matrix", "family", f"{kind}:128", **about)
    model = SimpleNamespace(about={}, predict=lambda rows: 10.0 - rows[:, 0])
    (verdict,) = judge.judge([recording], judge.of_trial(model, most))
    assert verdict.share == share


def test_points_go_by_the_profile_of_their_machine(collected: Path, tmp_path: Path) -> None:
    """Read the profile of the file, or of a named processor where a hypervisor hid it."""
    line, second = lines(collected)
    assert "profile" not in second  # once is enough
    far = {**line, "profile": {**line["profile"], "private": 1 << 12, "last": 1 << 13}}
    old = {**second, "mcpu": "znver4"}
    cases = profiled([far, old, {**old, "machine": "another"}])
    assert [c["profile"].caches for c in cases] == [(1 << 12, 1 << 13), (1 << 12, 1 << 13), (1 << 20, 32 << 20)]
    assert next(profiled([far], "sapphirerapids"))["profile"] == shipped_profile("sapphirerapids")
    at = encoding_of(line).names.index("result_in_cache")
    rows = [encoding_of(each).rows([FIRST])[0] for each in (*profiled([far]), line)]
    assert rows[0][at] > rows[1][at]
    named = of_processor(tmp_path / "points.jsonl@znver3")
    assert named == (tmp_path / "points.jsonl", "znver3")
    assert of_processor(collected) == (collected, None)


def test_what_a_model_expects_of_another_machine_is_taught(collected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "EVERY", 1)
    monkeypatch.setattr(pretrain, "LEAST", 1)
    at = matrix_names().index("chunks")
    model = SimpleNamespace(predict=lambda rows: rows[:, at])
    cases = pretrain.taught(profiled(lines(collected)), model, shipped_profile("znver4"))
    assert len(cases) == 2
    for case, line in zip(cases, lines(collected), strict=True):
        assert (case.matrix, case.threads, case.is_placed) == (line["matrix"], 2, True)
        for candidate, seconds in case.seconds.items():
            assert candidate.choices.chunks in (0, 2, 8, 16)
            assert np.log(seconds) == pytest.approx(-case.features[candidate][at])
    taken: list[str] = []
    monkeypatch.setattr(pretrain, "train", lambda cases, **_how: taken.extend(case.family for case in cases))
    train_with([replace(cases[0], family="left out"), cases[0]], cases)
    assert taken == [cases[0].family] * 3  # nothing is taught about what is left out
