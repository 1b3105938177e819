# SPDX-License-Identifier: Apache-2.0
"""What a search returned is what later processes get, and its report speaks of one set of times."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from clocks import keep_time
from sparsetir import formats, ops
from sparsetir.build import build
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.schedules import Choices
from sparsetir.tuning import Database, Key, Record, session, tune_sparse
from sparsetir.tuning.loop import Comparison, compared, last_of, note
from sparsetir.tuning.space import Candidate

pytestmark = pytest.mark.usefixtures("quick_comparisons")

BLOCKS = formats.bsr(4, 4)
FEAT = 16


def arguments(seed: int = 0) -> dict[str, Any]:
    A = sp.random_array((60, 50), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(seed))
    return {"A": A, "B": np.random.default_rng(seed + 1).standard_normal((50, FEAT)).astype("float32")}


def blocked() -> dict[str, Any]:
    """A matrix of blocks that are not quite full."""
    rng = np.random.default_rng(0)
    A = sp.kron(sp.random_array((60, 60), density=0.1, rng=rng), np.ones((4, 4)), format="csr").astype("float32")
    A.data[rng.random(A.nnz) < 0.1] = 0
    A.eliminate_zeros()
    return {"A": sp.csr_array(A), "B": rng.standard_normal((240, 32)).astype("float32")}


def decided(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Candidate | None], float]) -> None:
    """Let every comparison find these times."""
    keep_time(monkeypatch, lambda cases: {c: seconds(c) for c in cases})


@pytest.mark.slow
def test_what_a_search_returned_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the trials took: the last comparison counts, in a search without trials and in `build`."""
    inputs, path = arguments(), tmp_path / "tuning.jsonl"
    wanted: list[Candidate] = []
    decided(monkeypatch, lambda c: 1.0 if c is None else 0.5 if c in wanted else 0.9)
    monkeypatch.setattr(session, "finalists", lambda history, _cost: [r.candidate for r in history])
    for turn in range(3):
        wanted[:] = [r.candidate for r in found.history if r.fixed][turn:][:1] if turn else []
        found = tune_sparse(ops.spmm(), inputs, max_trials=5 + turn, formats=[], database=path, progress=False)
        assert found.speedup == pytest.approx(2.0 if turn else 1 / 0.9)
        assert not wanted or found.best.candidate in wanted
        again = tune_sparse(ops.spmm(), inputs, max_trials=0, database=path, progress=False)
        assert (again.best.candidate, again.speedup) == (found.best.candidate, found.speedup)
        assert again.is_recalled
        assert "nothing was timed again" in again.report()
        kernel = build(ops.spmm(), database=path)
        assert kernel.chosen(inputs).compiled is found.kernel.chosen(inputs).compiled is again.kernel.best.compiled
        np.testing.assert_allclose(kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_untuned_kernel_is_recalled_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs, path = arguments(), tmp_path / "tuning.jsonl"
    decided(monkeypatch, lambda c: 1.0 if c is None else 1.1)
    assert tune_sparse(ops.spmm(), inputs, max_trials=3, database=path, progress=False).schedule is None
    again = tune_sparse(ops.spmm(), inputs, max_trials=0, database=path, progress=False)
    assert again.best == again.untuned
    assert "nothing is clearly faster" in again.explain()
    assert build(ops.spmm(), database=path).variants == ()
    with pytest.warns(UserWarning, match="no records of this program"):
        other = build(ops.spmv(), database=path)
    assert other.best is other.plain
    with pytest.raises(ArgumentError, match=r"there is no database .*nothing\.jsonl"):
        build(ops.spmm(), database=tmp_path / "nothing.jsonl")
    with pytest.raises(ArgumentError, match="give one of them"):
        build(ops.spmm(), expected_calls=9, database=path)
    with pytest.raises(ArgumentTypeError, match="a template that was tuned"):
        build(ops.spmm(), schedule=Choices(), database=path)


@pytest.mark.slow
def test_one_set_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of the report stands beside the untuned kernel of the last comparison."""
    decided(monkeypatch, lambda c: 4.0 if c is None else 2.0 + c.choices.tile / 1000)
    found = tune_sparse(ops.spmm(), arguments(), max_trials=12, formats=[], progress=False)
    rows = [line.split() for line in found.report().splitlines() if "as it is" in line]
    head = next(line.split() for line in found.report().splitlines() if "speedup" in line)
    assert {"sizes", "ms"} <= set(head)
    assert [row[0] for row in rows if row[0] in ("best", "untuned")] == ["best", "untuned"]
    compared = [r for r in found.timed if found.comparison is not None and found.comparison.seconds(r) is not None]
    assert {r.seconds for r in compared} == {2.0 + r.choices.tile / 1000 for r in compared}
    assert found.best.seconds == min(r.seconds for r in compared)
    trial = {r.candidate: r.seconds for r in found.history}
    others = [r for r in found.timed if r not in compared and r != found.untuned]
    assert all(r.seconds == pytest.approx(4.0 * trial[r.candidate] / trial[Candidate()]) for r in others)
    assert found.report().count("not compared again") <= len(others)
    assert f"{found.best.seconds * 1e3:.4g}" in found.explain()


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, BLOCKS])
def test_a_tuned_kernel_takes_other_sizes(format: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs, path = blocked(), tmp_path / "tuning.jsonl"
    decided(monkeypatch, lambda c: 0.5 if c is not None and c.format == format else 1.0)
    formats = [] if format is None else [format]
    monkeypatch.setattr(session, "finalists", lambda history, _cost: [r.candidate for r in history])
    found = tune_sparse(ops.spmm(), inputs, max_trials=6, formats=formats, database=path, progress=False)
    assert found.best.candidate.format == format
    A = inputs["A"]
    for kernel in (found.kernel, build(ops.spmm(), database=path)):
        bound = kernel.bind(A=A)
        for feat in (32, 8, 32, 0, 1, 40):
            B = np.random.default_rng(feat).standard_normal((240, feat)).astype("float32")
            for call in (lambda B=B, k=kernel: k(A=A, B=B), lambda B=B, b=bound: b(B=B)):
                np.testing.assert_allclose(call(), A @ B, rtol=1e-3, atol=1e-3)
        assert ("bsr" in repr(kernel)) is (format is not None)
        assert bool(kernel.formats) is (format is not None)
        B = np.ones((240, 32), "float32")
        B[3], B[4, 1] = np.inf, np.nan
        np.testing.assert_array_equal(np.isnan(bound(B=B)), np.isnan(A @ B))
        np.testing.assert_array_equal(np.isnan(kernel(A=A, B=B)), np.isnan(A @ B))
        with pytest.raises(ArgumentError, match="n is 240"):
            bound(B=B[1:])
        assert kernel.time(A=A, B=B, seconds=0.01).calls >= 3


@pytest.mark.slow
def test_each_pattern_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, first, second = tmp_path / "tuning.jsonl", arguments(), arguments(1)
    decided(monkeypatch, lambda c: 0.5 if c is not None else 1.0)
    for inputs in (first, second):
        tune_sparse(ops.spmm(), inputs, max_trials=3, formats=[], database=path, progress=False)
    kernel = build(ops.spmm(), database=path)
    assert len(kernel.variants) == 2
    assert kernel.chosen(first) is not kernel.chosen(second)
    other = {**first, "A": first["A"][::-1].tocsr()}
    assert kernel.chosen(other) is kernel.plain
    raw = {"a": first["A"].data, "indptr": first["A"].indptr, "indices": first["A"].indices, "B": first["B"]}
    assert kernel.chosen(raw) is kernel.chosen(first)
    for inputs in (first, second, other, raw):
        A = inputs.get("A", first["A"])
        np.testing.assert_allclose(kernel(**inputs), A @ inputs["B"], rtol=1e-4, atol=1e-5)
        bound = kernel.bind(B=inputs["B"])  # the matrix is seen with the call only
        rest = {n: v for n, v in inputs.items() if n != "B"}
        np.testing.assert_allclose(bound(**rest), A @ inputs["B"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_matrix_that_the_format_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer rows than its slots: the untuned kernel takes it."""
    inputs, width = arguments(), formats.ell(width=20)
    decided(monkeypatch, lambda c: 0.5 if c is not None and c.format == width else 1.0)
    monkeypatch.setattr(session, "finalists", lambda history, _cost: [r.candidate for r in history])
    kernel = tune_sparse(ops.spmm(), inputs, max_trials=4, formats=[width], progress=False).kernel
    assert "ell(width=20)" in repr(kernel)
    full = sp.csr_array(np.ones((5, 50), "float32"))
    np.testing.assert_allclose(kernel(A=full, B=inputs["B"]), full @ inputs["B"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(kernel.bind(A=full)(B=inputs["B"]), full @ inputs["B"], rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="n is 50"):
        kernel(A=full, B=inputs["B"][1:])


WRONG = [
    ("untuned", "fast"), ("untuned", -1.0), ("untuned", True), ("untuned", None), ("chosen", 99), ("chosen", "0"),
    ("chosen", -1), ("amortize_over", []), ("argument", 3), ("candidates", "x"), ("candidates", [3]),
    ("seconds", "x"), ("seconds", float("nan")), ("conversion", {}), ("stored_as", []), ("stored_as", "(" * 150),
    ("fixed", "x"), ("fixed", {"feat": "16"}), ("choices", {"tile": [8]}), ("choices", {"size": 3}), ("choices", 3),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:12])
def test_damaged_lines_are_no_comparisons(field: str, value: Any, tmp_path: Path) -> None:
    key = Key("spmm", "p", "s", {"m": 3}, "float32", "llvm", "a machine", 2, "1")
    path, held = tmp_path / "tuning.jsonl", Record(Choices(tile=8), None, {"feat": 16}, 0.5)
    note(Database(path), key, Comparison(1.0, (held,), held.candidate, None, "A"))
    found = last_of(Database(path), key)
    assert found is not None
    assert found.best is not None
    assert (found.best.candidate, found.best.seconds, found.untuned) == (held.candidate, 0.5, 1.0)
    line = json.loads(path.read_text())
    (line["comparison"] if field in line["comparison"] else line["comparison"]["candidates"][0])[field] = value
    path.write_text(json.dumps(line) + "\n")
    assert last_of(Database(path), key) is None
    assert list(Database(path).everything()) == []


@pytest.mark.parametrize("value", [None, "x", 1, {"m": None}, []], ids=str)
@pytest.mark.parametrize("field", [f.name for f in fields(Key)])
def test_lines_whose_key_is_damaged_are_left_out(field: str, value: Any, tmp_path: Path) -> None:
    key = Key("spmm", "p", "s", {"m": 3}, "float32", "llvm", "a machine", 2, "1")
    path, record = tmp_path / "tuning.jsonl", Record(Choices(tile=8), None, {"feat": 16}, 0.5)
    note(Database(path), key, Comparison(1.0, (record,), record.candidate, None, "A"))
    Database(path).append(key, record)
    lines = [json.loads(line) | {field: value} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = [*compared(Database(path)), *Database(path).everything()]
    assert all(
        type(getattr(entry[0], each.name)) is type(getattr(key, each.name)) for entry in entries for each in fields(Key)
    )
    build(ops.spmm(), database=path)
