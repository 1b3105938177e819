# SPDX-License-Identifier: Apache-2.0
"""The data set of measured kernels: what is drawn, what a killed collection leaves, and the tables of it."""

from __future__ import annotations

import importlib
import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import sparsetir
from sparsetir.cli import main
from sparsetir.errors import ArgumentError, TuningError
from sparsetir.formats.encoding import parse_format
from sparsetir.ir.interpreter import interpret
from sparsetir.tuning.features import matrix_names
from sparsetir.tuning.train import dataset
from sparsetir.tuning.train import dataset as plan
from sparsetir.tuning.train import dataset as points
from sparsetir.tuning.train import dataset as table
from sparsetir.tuning.work import CoreRates
from sparsetir.utils.machine import shipped_profile
from sparsetir.utils.packages import MissingPackageError
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads import suite

FAST = CoreRates(peak=4e11, private=8e11, last=2.4e11, memory=1e11)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few kernels, short measurements, and the number of threads as it was."""
    threads = get_num_threads()
    for name, value in {"OWN_CHOICES": 2, "CHOICES": 1, "SURE_FORMATS": 1, "OTHER_FORMATS": 0, "BURST": 1e-5}.items():
        monkeypatch.setattr(dataset, name, value)
    monkeypatch.setattr(dataset, "measure_rates", lambda _target: FAST)
    monkeypatch.setattr(dataset, "machine_profile", lambda: shipped_profile("znver4"))
    monkeypatch.setattr(plan, "SMALLEST", 300)
    monkeypatch.setattr(plan, "LARGEST", 900)
    yield
    set_num_threads(threads)


@pytest.mark.parametrize("seed", range(8))
def test_programs_drawn_at_random_compute_what_they_say(seed: int) -> None:
    found = suite.draw_program(seed, "float64")
    assert found.text == suite.draw_program(seed, "float64").text
    A = sp.random_array((7, 5), density=0.3, format="csr", rng=np.random.default_rng(0))
    inputs = found.inputs(A, 3, "float64")
    assert set(inputs) == {"A", *found.operands}
    program = found.program
    result = sparsetir.build(program)(**inputs)
    arrays = {"a_": A.data, "indptr": A.indptr.astype("int32"), "indices": A.indices.astype("int32")}
    arrays |= {f"{name.lower()}_": inputs[name] for name in found.operands}
    sizes = {"m": 7, "n": 5, "nnz": A.nnz, **({"feat": 3} if found.has_feat else {})}
    expected = interpret(program, {**arrays, **sizes})["c_"]
    values = result.data if sp.issparse(result) else result
    np.testing.assert_allclose(np.asarray(values).reshape(-1), np.asarray(expected).reshape(-1), rtol=1e-9)


def test_drawn_programs_differ() -> None:
    texts = {suite.draw_program(seed).text.partition("\n")[2].partition(")")[2] for seed in range(30)}
    assert len(texts) > 20
    assert {suite.draw_program(seed).has_feat for seed in range(30)} == {True, False}
    with pytest.raises(ArgumentError, match="non-negative integer, got -1"):
        suite.draw_program(-1)


def test_jobs_fit_their_matrices() -> None:
    rng = np.random.default_rng(0)
    wide = sp.csr_array((8, 5_000_000), dtype=np.float32)
    assert all(job.feat == 1 for job in plan.jobs(wide, 4, rng))
    small = suite.generate("uniform", 600)
    found = plan.jobs(small, 6, rng)
    assert len(set(found)) == len(found) == 6
    tensor = suite.generate("tensor_uniform", 600)
    assert {job.op for job in plan.jobs(tensor, 3, rng)} == {"mttkrp"}


def test_sources_are_of_all_families_and_of_files(tmp_path: Path) -> None:
    scipy.io.mmwrite(tmp_path / "mine.mtx", sp.eye_array(4))
    found = list(plan.sources(120, seed=1, data=tmp_path))
    assert (found[-1].name, found[-1].family) == ("mine", "mine")
    assert len({source.family for source in found}) >= 18
    assert len({source.name for source in found}) == 121
    again = list(plan.sources(120, seed=1))
    assert [source.name for source in again] == [source.name for source in found[:-1]]


@pytest.mark.slow
def test_a_collection_goes_on_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "points.jsonl"
    command = ["collect", str(path), "--matrices", "1", "--threads", "1", "--programs"]
    assert main([*command, "1"]) == 0
    first = path.read_bytes()
    assert first.count(b"\n") == 1
    path.write_bytes(first + first[: len(first) // 2])  # killed in the midst of a line
    assert main([*command, "2"]) == 0
    lines = path.read_bytes().split(b"\n")
    assert lines[0] + b"\n" == first
    held = list(dataset.lines(path))
    assert len(held) == len({line["case"] for line in held}) == 2
    assert main([*command, "2"]) == 0
    assert path.read_bytes().split(b"\n") == lines
    assert "all" in capsys.readouterr().out
    for line in held:
        assert len(line["plain"]) == 2 > min(line["plain"]) > 0
        assert line["points"]
        assert line["failed"] == 0
        for format, choices, stored, _conversion, one, two in line["points"]:
            assert not format or parse_format(format)
            assert choices["tile"] > 0
            assert len(stored) == 4
            assert min(one, two) > 0


@pytest.mark.slow
def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "points.jsonl"
    tensor = plan.CollectionSource("flat", "flat", lambda: sp.csr_array((3, 0), dtype=np.float32))
    assert dataset.collect(path, [tensor], programs=2, threads=(1,), seconds=20) >= 0
    other = tmp_path / "no.mtx"
    scipy.io.mmwrite(other, sp.eye_array(3))
    held = other.read_bytes()
    assert main(["collect", str(other), "--matrices", "1"]) == 2
    assert "expected a data set of format 1" in capsys.readouterr().err
    assert other.read_bytes() == held


@pytest.mark.slow
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "points.jsonl", plan.CollectionSource("m", "f", lambda: suite.generate("fem_blocks", 500))
    dataset.collect(path, [made], programs=2, threads=(1,))
    count = sum(len(line["points"]) for line in dataset.lines(path))
    written = np.load(table.export(path, tmp_path / "out" / "points.npz"))
    assert all(len(written[name]) == count for name in written)
    np.testing.assert_allclose(written["noise"], np.abs(np.log(written["seconds_1"] / written["seconds_2"])))
    assert table.summary(path)[-1][1] == str(count)
    with pytest.raises(ArgumentError, match=r"\.parquet or \.npz, got points\.csv"):
        table.export(path, tmp_path / "points.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"sparsetir\[data\]"):
        table.export(path, tmp_path / "points.parquet")
    path.write_text("")
    with pytest.raises(TuningError, match="holds no points yet"):
        table.columns(path)


@pytest.mark.slow
def test_a_case_says_which_processor_it_was_compiled_for(tmp_path: Path) -> None:
    """That of another one is another case, and another setting for a model."""
    path, made = tmp_path / "points.jsonl", next(iter(plan.sources(1)))
    other = "x86-64-v3" if "x86" in platform.machine() else "generic"
    for mcpu in (None, other):
        dataset.collect(path, [made], programs=1, threads=(1,), mcpu=mcpu)
    found = list(dataset.lines(path))
    here = found[0]["mcpu"]
    assert [line["mcpu"] for line in found] == [here, other]
    assert [line["case"] for line in found] == [found[0]["case"], f"{found[0]['case']} {other}"]
    assert {case.mcpu for case in points.recordings(path)} <= {here, other}
    assert dataset.collect(path, [made], programs=1, threads=(1,), mcpu=other) == 0
    with pytest.raises(ArgumentError, match="mcpu is a processor that LLVM knows"):
        dataset.collect(path, [made], mcpu="x86-64-v33")


@pytest.mark.slow
def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path, made = tmp_path / "points.jsonl", plan.CollectionSource("m", "f", lambda: suite.generate("uniform", 500))
    dataset.collect(path, [made], programs=1, threads=(1,))
    held = parquet.read_table(table.export(path, tmp_path / "points.parquet"))
    assert held.column_names == list(table.columns(path))
    assert held.num_rows == sum(len(line["points"]) for line in dataset.lines(path))


@pytest.mark.slow
def test_times_among_the_features_go_by_the_rates_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a case says, else those of a usual server."""
    path, made = tmp_path / "points.jsonl", plan.CollectionSource("m", "f", lambda: suite.generate("uniform", 500))
    dataset.collect(path, [made], programs=1, threads=(1,))
    (line,) = dataset.lines(path)
    assert line["rates"] == FAST.as_dict() == {"peak": 4e11, "private": 8e11, "last": 2.4e11, "memory": 1e11}
    monkeypatch.setattr(points, "LEAST", 1)
    placed = points.recording(line)
    usual = points.recording({name: value for name, value in line.items() if name != "rates"})
    assert placed is not None
    assert usual is not None
    assert (placed.is_placed, usual.is_placed) == (True, False)
    at = matrix_names().index("time_floor")
    for candidate, row in usual.features.items():
        assert placed.features[candidate][at] == pytest.approx(row[at] - 2)  # four times as fast


def test_a_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    dataset.append(path, {"format": 1})
    assert json.loads(path.read_text()) == {"format": 1}
    with pytest.raises(TuningError, match="expected a data set"):
        list(dataset.lines(path))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sparsetir.cli", "collect", "{path}", "--matrices", "0"], "there is nothing to measure: expected --matrices"),
        (["sparsetir.tuning.train.replay", "{path}"], "expected records of at least 8 trials"),
        (
            ["sparsetir.tuning.train.collect", "--out", "{path}", "--sizes", "-3"],
            "sizes are positive numbers of entries",
        ),
        (["sparsetir.bench.search_rate", "--suite", "nothing"], "the suite has all, "),
        (["sparsetir.bench.search", "{path}"], "there is no file "),
    ],
)
def test_wrong_use_ends_with_a_sentence(
    command: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *given = (word.format(path=tmp_path / "points.jsonl") for word in command)
    try:
        code = importlib.import_module(name).main(given)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_read_costs_its_own_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = plan.CollectionSource("broken", "files", lambda: sp.csr_array(np.load(tmp_path / "none.npy")))
    assert dataset.collect(tmp_path / "points.jsonl", [broken], programs=1) == 0
    assert "without broken: " in capsys.readouterr().err
