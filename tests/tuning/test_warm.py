# SPDX-License-Identifier: Apache-2.0
"""Machine code of candidates that is made ahead, and found by searches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir import formats, ops
from sparsetir.cli import main
from sparsetir.errors import ArgumentError
from sparsetir.formats.format import Format
from sparsetir.schedules import Choices
from sparsetir.tuning import lowered_program, warm
from sparsetir.tuning.api import tune_sparse
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.lowered_program import LoweredProgram, StoredLibrary
from sparsetir.tuning.search import _eager
from sparsetir.tuning.session import Session
from sparsetir.tuning.space import Candidate, Space
from sparsetir.utils.caches import Cache

pytestmark = pytest.mark.usefixtures("quick_comparisons")

FEAT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with two formats of SpMM."""
    found = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSETIR_CACHE", str(found))
        patch.setattr(warm, "FORMATS", (None, formats.bsr(2, 2)))
        made = list(warm.warm(["spmm"], ["float32"], [FEAT], processes=1))
        assert [one.refused for one in made] == [None, None]
        assert all(one.kernels > 2 and one.bytes > 0 and one.seconds > 0 for one in made)
        yield found


def arguments(rows: int = 30, columns: int = 70) -> dict[str, object]:
    A = sp.random_array((rows, columns), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(1))
    return {"A": A, "B": np.ones((columns, FEAT), "float32")}


@pytest.fixture
def fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in another process."""
    monkeypatch.setattr(lowered_program, "_forms", Cache(64))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, formats.bsr(2, 2)], ids=str)
@pytest.mark.usefixtures("fresh")
def test_a_search_on_another_matrix_finds_it(format: Format | None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Evaluator(ops.spmm(), arguments(), None)
    ready = known.variants(format)
    made = list(ready.form.codes)
    assert len(made) > 2
    assert ready.values["chunks"]

    def refuse(*_args: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(LoweredProgram, "shared_loops", refuse)
    for choices in made:
        for chunks in (3, 8) if choices.chunks else (0,):
            call = ready.call(choices.changed(chunks=chunks))
            assert known.reference.disagreement(ready.workload.fresh(call)) is None


@pytest.mark.slow
@pytest.mark.parametrize("op", warm.OPS)
@pytest.mark.usefixtures("fresh")
def test_every_operation_has_kernels(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "portfolio", lambda values, base, pieces=0: [base])
    made = warm.make(warm.WarmTask(op, "float64", 3, None))
    assert (made.kernels, made.refused) == (1, None)


@pytest.mark.slow
def test_what_a_search_made_and_proved_serves_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path))
    monkeypatch.setattr(lowered_program, "_forms", Cache(64))
    lowered_program.fresh.clear()
    blocks, wrong = formats.bsr(2, 2), Choices(tile=4)
    known = Evaluator(ops.spmm(), arguments(), None)
    proved = [Candidate(Choices(tile=8)), Candidate(Choices(tile=8), blocks)]
    known.compile_together([*proved, Candidate(wrong)])
    assert all(known.time(candidate).seconds for candidate in proved)
    assert len(lowered_program.fresh) == 1  # one call of the compiler for two formats
    lowered_program.keep()
    monkeypatch.setattr(lowered_program, "_forms", Cache(64))
    monkeypatch.setattr(LoweredProgram, "shared_loops", lambda *_: pytest.fail("compiled again"))
    again = Evaluator(ops.spmm(), arguments(50), None)
    for candidate in proved:
        assert again.variants.shelf.listed(candidate.format) == (lowered_program.shared(candidate.choices),)
        assert again.time(candidate).seconds
    assert warm.there(warm.WarmTask("spmm", "float32", FEAT, None)) is None  # a search makes no portfolio


@pytest.mark.parametrize("name", ["*.so", "*-*.json"])
def test_what_is_damaged_is_compiled_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path))
    monkeypatch.setattr(lowered_program, "_forms", Cache(64))
    lowered_program.fresh.clear()
    known, candidate = Evaluator(ops.spmm(), arguments(), None), Candidate(Choices(tile=8))
    assert known.time(candidate).seconds
    lowered_program.keep()
    (path,) = (tmp_path / lowered_program.FOLDER).glob(name)
    path.write_bytes(path.read_bytes()[:-9])
    monkeypatch.setattr(lowered_program, "_forms", Cache(64))
    again = Evaluator(ops.spmm(), arguments(), None)
    assert not again.variants(None).form.codes
    assert again.time(candidate).seconds


def test_a_full_disk_costs_the_next_search_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path))
    lowered_program.fresh.clear()
    known = Evaluator(ops.spmm(), arguments(20), None)
    assert known.time(Candidate(Choices(tile=2))).seconds

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lowered_program.cache, "write", full)
    lowered_program.keep()
    assert not lowered_program.fresh


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_a_search_ends_with_a_right_kernel() -> None:
    inputs = arguments()
    result = tune_sparse(ops.spmm(), inputs, max_trials=4, progress=False)
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_what_is_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "make", lambda task: pytest.fail(f"made {task} again"))
    again = list(warm.warm(["spmm"], ["float32"], [FEAT], processes=1))
    assert [one.seconds for one in again] == [0.0, 0.0]
    assert all(one.kernels > 2 for one in again)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_an_interrupted_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    task = warm.tasks(["spmm"], ["float32"], [FEAT])[1]
    path = warm.shelf_of(task).path(task.format)
    assert path is not None
    path.with_suffix(".json").unlink()
    assert main(["warm", "--ops", "spmm", "--feat", str(FEAT), "--processes", "1"]) == 0
    out, err = capsys.readouterr()
    assert "1 of 2: spmm:24 float32 as it is: " in err
    assert "there already" in err
    assert "2 of 2: spmm:24 float32 bsr(r=2, c=2): " in err
    assert " of them compiled now, in " in out
    assert StoredLibrary.read(path) is not None


@pytest.mark.usefixtures("fresh")
def test_a_damaged_library_is_compiled_again() -> None:
    task = warm.tasks(["spmm"], ["float32"], [FEAT])[0]
    path = warm.shelf_of(task).path(None)
    assert path is not None
    kept = path.rename(path.with_suffix(".kept"))  # it may be loaded: its bytes must stay
    try:
        path.write_bytes(kept.read_bytes()[:100])
        ready = Evaluator(ops.spmm(), arguments(), None).variants(None)
        assert not ready.form.codes
        ready.call(Choices(tile=16))()
    finally:
        kept.replace(path)


@pytest.mark.usefixtures("fresh")
def test_a_wrong_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "is_right", lambda known, ready, function: False)
    task = warm.WarmTask("spmv", "float32", 1, None)
    assert warm.make(task).refused == "nothing could be compiled"
    assert warm.there(task) is None


@pytest.mark.usefixtures("fresh")
def test_what_is_ready_is_drawn_and_preferred() -> None:
    with closing(Session(ops.spmm(), arguments(), None)) as session:
        space, rng = session.space, np.random.default_rng(0)
        ready = space.ready(rng, 64)
        assert {c.format for c in ready} == {None, formats.bsr(2, 2)} & set(space.formats)
        assert all(space.is_ready(c) for c in ready)
        settled = [c for c in ready if c.format is None]
        assert all(c in space for c in settled)
        assert len({c.choices.chunks for c in settled}) > 2
        odd = Candidate(settled[0].choices.changed(unroll=8, tile=8))
        assert not space.is_ready(odd)
        even = lambda candidates: np.zeros(len(candidates))  # noqa: E731
        scores = _eager(space, even, [odd, settled[0]])
        assert scores[0] < scores[1] == 0


def test_without_machine_code_nothing_is_preferred() -> None:
    space = Space([None], lambda _format: {"tile": (8, 16)})
    assert space.ready(np.random.default_rng(0), 8) == []
    odd = [Candidate(Choices(tile=8)), Candidate(Choices(tile=16))]
    assert _eager(space, lambda candidates: np.arange(len(candidates)), odd).tolist() == [0, 1]


@pytest.mark.slow
def test_the_list_says_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--ops", "spmm", "--feat", str(FEAT), "8", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "spmm:24 float32 as it is, there already"
    assert lines[2] == "spmm:8 float32 as it is"
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((["mttkrp"], ["float32"], [8]), "expected some of the operations spmm, spmv, sddmm, got mttkrp"),
        ((["spmm"], ["float16"], [8]), "expected some of the dtypes float32, float64, got float16"),
        ((["spmm"], ["float32"], [0]), "feat: expected positive numbers of columns, got 0"),
        (([], ["float32"], [8]), "expected some of the operations spmm, spmv, sddmm, got none"),
    ],
)
def test_messages(given: tuple[list[str], list[str], list[int]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        list(warm.warm(*given))


def test_without_a_cache_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSETIR_CACHE", "off")
    with pytest.raises(ArgumentError, match="compiled kernels are not kept"):
        list(warm.warm(["spmm"], ["float32"], [8]))
