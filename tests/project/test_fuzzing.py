# SPDX-License-Identifier: Apache-2.0
"""The fuzzer of tests/fuzzing: a fixed list of cases of each front, and what it does with what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from fuzzing import command, minimise
from fuzzing.arguments import Item
from fuzzing.case import Case, CodeCase, CodeFront, Expected, Finding, Front, difference
from fuzzing.child import Place, run_group
from fuzzing.command import Run, group_script
from fuzzing.dense_oracle import evaluate, evaluate_filled
from fuzzing.fronts import FRONTS
from fuzzing.histories import History
from fuzzing.report import END, START, added, table, write_report
from fuzzing.values import Value, sparse_value

SEED = 1
#: share of a front's cases that must be right: the others are refused by rules of the package
LEAST_RIGHT = {
    "files": 0.1,
    "arguments": 0.05,
    "lazy": 0.3,
    "products": 0.5,
    "einsum": 0.5,
    "models": 0.4,
    "torch": 0.5,
}


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    """The fixed groups of all fronts, in one process beside this one."""
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)  # it hides torch from other processes
        run = Run(list(FRONTS), SEED, groups={name: front.groups for name, front in FRONTS.items()}).run()
    return run.summary()


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_a_fixed_list_of_cases_is_right(front: str, summary: dict[str, Any]) -> None:
    counts = summary["fronts"][front]
    findings = [f for f in summary["findings"] if f["front"] == front]
    assert not findings, "\n".join(command.described(f) for f in findings)
    assert counts["wrong"] == counts["crashed"] == counts["unclear"] == 0
    assert counts["cases"] == sum(counts[o] for o in ("right", "refused", "known"))
    assert counts["right"] + counts["known"] > LEAST_RIGHT.get(front, 0.7) * counts["cases"], summary["refusals"][front]


# ---------------------------------------------------------------------------------------------- findings


class Faulty(CodeFront):
    """A front over `matmul` whose oracle is wrong wherever an operand has an entry in column 1."""

    name = "faulty"

    def draw(self, rng: Random) -> Iterator[Case]:
        for _ in range(20):
            sizes = {"i": 4, "j": 5}
            operand = sparse_value(rng, "ij", sizes, "float32", "real", ("csc_array",))
            yield CodeCase(self, {"A": operand}, {"code": ["got = sparsetir.multiply(A, 2.0)"]})

    def expected(self, case: CodeCase) -> Expected | None:
        coords = case.values["A"].coords
        factor = 3 if coords is not None and (coords[1] == 1).any() else 2
        return Expected(factor * case.values["A"].dense()[0], 1e-6)


@dataclass(frozen=True)
class Ending(Case):
    """A case that ends its process if it has a certain part."""

    parts: tuple[int, ...]

    def run(self) -> Finding | None:
        if 7 in self.parts:
            import ctypes

            ctypes.string_at(0)
        return None

    def smaller(self) -> Iterator[Case]:
        yield from (Ending(self.parts[:n] + self.parts[n + 1 :]) for n in range(len(self.parts)))

    def script(self) -> str:
        return f"raise SystemExit({7 in self.parts})"


class Ends(Front):
    """A front of which some cases end the process."""

    name = "ends"

    def draw(self, rng: Random) -> Iterator[Case]:
        yield from (Ending(tuple(range(n, n + 4))) for n in (0, 2, 5))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    path = tmp_path / "place"
    path.write_bytes(bytes(64))
    return Place(str(path))


def test_wrong_results_are_counted_and_told(place: Place) -> None:
    told: list[dict[str, Any]] = []
    run_group(Faulty(), 0, 0, place, lambda **facts: told.append(facts))
    counts = told[-1]["counts"]
    assert counts["wrong"] == len(told) - 1 > 5
    assert counts["right"] == 20 - counts["wrong"] > 0
    assert place.count == 21
    assert all("expected" in facts["finding"]["detail"] for facts in told[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["ell", "spmm"])
def test_histories_write_no_results_to_bound_arguments(kernel: str) -> None:
    """A bound kernel may have a copy of them, so that it would differ from one that is bound later."""
    for seed in range(40):
        history = History(kernel, Random(seed))
        before: dict[int, tuple[bytes, ...]] = {}
        for _ in range(20):
            history.step()
            results = {n for _, fixed in history.bound for n in memory(fixed.get("C"))}  # to which calls write
            inputs = [item for item in history.fixed if not results & memory(item)]
            before = {id(item): before.get(id(item), item.state()) for item in inputs}
            assert before == {id(item): item.state() for item in inputs}, history.log


def memory(item: Item | None) -> set[int]:
    """The arrays that own the memory of an argument, by identity."""
    arrays = () if item is None else item.arrays
    return {id(array) if array.base is None else id(array.base) for array in arrays}


@pytest.mark.slow
def test_a_case_is_reduced_to_a_script_that_shows_it(tmp_path: Path) -> None:
    cases = list(Faulty().draw(Random("reduce")))
    case = next(c for c in cases if c.run() is not None)
    smaller, finding = minimised_elsewhere(case)
    assert finding is not None
    operand = smaller.values["A"]
    assert (operand.shape, operand.coords.tolist(), operand.kind) == ((1, 2), [[0], [1]], "csr_array")
    path = tmp_path / "script.py"
    path.write_text(smaller.script())
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == ["expected [[0.0, 3.0]]", "got      [[0.0, 2.0]]"]


def minimised_elsewhere(case: Any) -> Any:
    """The minimiser, cases being run in this process: a fork of one that has compiled kernels would hang."""

    class Here:
        pid = 0

        def run(self, other: Any) -> Any:
            try:
                return other.run()
            except Exception:
                return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimise, "Runner", Here)
        return minimise.minimised(case, case.run(), 60)


@pytest.mark.slow
def test_crashes_are_attributed_and_reduced(tmp_path: Path) -> None:
    """In processes of their own, with a front that is not one of the package's."""
    code = (
        "import json, sys\n"
        "sys.path[:0] = [{tests!r}, {own!r}]\n"
        "from fuzzing import fronts, minimise, case\n"
        "from test_fuzzing import Ending\n"
        "smaller, got = minimise.minimised(Ending((5, 6, 7, 8)), case.Finding('crashed', '', ''), 30)\n"
        "print(json.dumps([smaller.parts, got.detail, minimise.Runner().run(Ending((1,)))]))\n"
    )
    own = Path(__file__).parent
    code = code.format(tests=str(own.parent), own=str(own))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts, detail, other = json.loads(done.stdout.splitlines()[-1])
    assert parts == [7]
    assert "signal 11" in detail
    assert other is None


def test_a_crash_names_its_case_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(command.Child):
        """A process that ends in the second group."""

        def __init__(self) -> None:
            self.told = [{"group": 0, "counts": {"cases": 3, "right": 3}, "refusals": {}, "seconds": 0.1}, None]

        place = (1, 2, 9)

        def facts(self, job: dict[str, Any], _stop: threading.Event) -> Any:
            if job["first"] == 2:
                return iter([{"finished": 3, "is_over": True, "is_full": False}])
            return iter(self.told)

        def stop(self) -> None:
            self.process = subprocess.CompletedProcess([], -11)

        def close(self) -> None:
            pass

        def error(self) -> str:
            return "Segmentation fault"

    monkeypatch.setattr(command, "Child", Dying)
    run = Run(["einsum"], 0, groups={"einsum": 3}).run()
    counts = run.summary()["fronts"]["einsum"]
    assert (counts["cases"], counts["right"], counts["crashed"]) == (4, 3, 1)
    (finding,) = run.findings
    assert (finding["outcome"], finding["group"], finding["index"]) == ("crashed", 1, 2)
    assert "--group=1" in group_script(finding)


class Child(command.Child):
    """A process that is none: it finishes the groups of a front until it fails in a given one."""

    place, fails_in, error_of_failure = (0, -1, 0), "lazy", ""

    def __init__(self) -> None:
        pass

    def facts(self, job: dict[str, Any], _stop: threading.Event) -> Iterator[dict[str, Any] | None]:
        if job["front"] == self.fails_in:
            yield self.failure()
        else:
            yield {"group": 0, "counts": {"cases": 3, "right": 3}, "refusals": {}, "seconds": 0.1}
            yield {"finished": job["first"] + 1, "is_over": True, "is_full": False}

    def failure(self) -> None:
        self.process = subprocess.CompletedProcess([], 1)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass

    def error(self) -> str:
        return "Traceback (most recent call last)\nOSError: no room"


def test_a_fuzzer_that_fails_ends_one_front_and_keeps_all_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "Child", Child)
    path = tmp_path / "new" / "summary.json"
    run = Run(["lazy", "torch"], 0, groups={"lazy": 9, "torch": 1}, path=path).run()
    summary = json.loads(path.read_text())
    assert run.state == summary["state"] == "finished"
    assert summary["fronts"]["torch"]["right"] == 3
    assert summary["fronts"]["lazy"]["unclear"] == command.MAX_FAILURES
    assert summary["findings"][0]["label"] == "the fuzzer itself failed: OSError: no room"


def test_an_interrupted_run_keeps_its_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Child):
        def failure(self) -> None:
            assert json.loads(path.read_text())["fronts"]["torch"]["right"] == 6  # three of them of a run before
            raise KeyboardInterrupt

    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "Child", Interrupted)
    path = tmp_path / "summary.json"
    before = Run(["torch"], 8)
    before.counts["torch"].add({"cases": 3, "right": 3}, {})
    path.write_text(json.dumps(before.summary()))
    assert command.main(["--front=torch", "--front=lazy", "--add", "--seed=9", f"--out={tmp_path}"]) == 130
    summary = json.loads(path.read_text())
    assert (summary["state"], summary["seed"], summary["fronts"]["torch"]["right"]) == ("interrupted", "8, 9", 6)
    assert "| torch | 6 | 6 |" in (text := capsys.readouterr().out)
    assert "interrupted after" in text


def test_a_process_that_waits_for_a_processor_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limit = 0.0, command.HANG_SECONDS
    monkeypatch.setattr(command.time, "monotonic", lambda: now)

    def ends_at(share: float, *, is_advancing: bool = False) -> float | None:
        """When a process with this share of a processor is found to hang, if it is at all."""
        nonlocal now
        now, progress = 0.0, command.Progress()
        while now < 20 * limit:
            now += 1.0
            if progress.is_stuck(now if is_advancing else 0, share * now):
                return now
        return None

    assert ends_at(1.0) == pytest.approx(limit, abs=3)
    assert ends_at(0.1) == pytest.approx(10 * limit, abs=30)
    assert ends_at(0.0) == pytest.approx(limit, abs=3)
    assert ends_at(0.0, is_advancing=True) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_time_is_counted() -> None:
    before = command.processor_seconds(os.getpid())
    while time.process_time() < before + 0.1:
        pass
    assert command.processor_seconds(os.getpid()) > before
    assert command.processor_seconds(2**30) == 0


# ---------------------------------------------------------------------------------------------- judging


@pytest.mark.parametrize(
    ("got", "want", "slack", "differs"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0, False),
        ([1.0, np.inf], [1.0, -np.inf], 0, True),
        ([1.0, np.inf], [1.0, 2.0], 9, True),
        ([1.0, np.nan], [1.0, 0.0], 9, True),
        ([0.0], [-0.0], 0, False),
        ([1.1], [1.0], 0.2, False),
        ([1.1], [1.0], 0.05, True),
        ([[1.0]], [1.0], 0, True),
    ],
)
def test_results_are_compared_aware_of_what_is_not_finite(got: Any, want: Any, slack: float, differs: bool) -> None:
    assert bool(difference(np.array(got), Expected(np.array(want), slack))) == differs


def test_index_notation_is_evaluated_over_stored_entries() -> None:
    A = Value("csr_array", np.array([2.0, 0.0, 1.0]), "ij", (2, 3), np.array([[0, 0, 0], [1, 2, 1]]))
    B = Value("numpy", np.array([np.nan, 10.0, np.inf]), "j", (3,))
    result = evaluate("ij,j->i", [A, B])
    np.testing.assert_array_equal(result.values, [np.nan, 0])  # 3 * 10 + 0 * inf, and nothing
    assert result.stored.tolist() == [True, False]
    np.testing.assert_array_equal(evaluate("ij->ji", [A]).values, [[0, 0], [3, 0], [0, 0]])
    np.testing.assert_array_equal(evaluate_filled("ij->i", [A], "max", "mul", -1), [3, -1])
    assert evaluate_filled("ij->i", [A.cut("j", 0).cut("j", 0)], "max", "mul", 0).tolist() == [0, 0]


def test_smaller_values_lose_one_property_at_a_time() -> None:
    value = sparse_value(Random(5), "ij", {"i": 3, "j": 4}, "float64", "real", ("coo_array",))
    kinds = {(v.kind, v.dtype, v.layout, len(v.data)) for v in value.smaller()}
    assert ("csr_array", "float64", "plain", len(value.data)) in kinds
    assert ("coo_array", "float64", "plain", len(value.data) - 1) in kinds
    assert value.cut("j", 1).shape == (3, 3)
    assert value.cast("float32").dtype == "float32"


# ---------------------------------------------------------------------------------------------- the command


def test_the_report_replaces_the_table_of_a_document(tmp_path: Path) -> None:
    counts = {"cases": 1200, "right": 1199, "refused": 0, "wrong": 1, "crashed": 0, "unclear": 0, "known": 0}
    summary = {"fronts": {"einsum": counts}, "seconds": 7200, "seed": 4, "date": "2026-01-02"}
    summary |= {"version": "1.2 at abc", "machine": "a processor"}
    assert "| einsum | 1,200 | 1,199 | 0 | 1 | 0 | 0 |" in table(summary)
    document, path = tmp_path / "page.md", tmp_path / "summary.json"
    document.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    path.write_text(json.dumps(summary))
    write_report(document, path)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "120 minutes with seed 4, 2026-01-02, version 1.2 at abc on a processor:" in text


def test_summaries_add_up() -> None:
    one = {"cases": 3, "right": 2, "seconds": 1.5}
    before = {"fronts": {"einsum": one, "lazy": one}, "seconds": 60, "seed": 1, "labels": [1], "findings": [2]}
    summary = {"fronts": {"einsum": one, "torch": one}, "seconds": 30, "seed": 2, "labels": [], "findings": [3]}
    before |= {"version": "1", "machine": "this"}
    whole = added(summary | {"version": "2", "machine": "this"}, before)
    assert (whole["version"], whole["machine"]) == ("1 and 2", "this")
    assert whole["fronts"] == {"einsum": {"cases": 6, "right": 4, "seconds": 3.0}, "lazy": one, "torch": one}
    assert (whole["seconds"], whole["seed"], whole["findings"]) == (90, "1, 2", [2, 3])


def test_unknown_fronts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--front", "nothing"])
    assert "--front: expected some of programs, halves" in capsys.readouterr().err


def test_a_fault_of_the_fuzzer_is_told_and_ends_no_run(place: Place) -> None:
    class Failing(Front):
        name = "failing"

        def draw(self, rng: Random) -> Iterator[Case]:
            yield Ending((1,))
            raise OverflowError("drawn too far")

    told: list[dict[str, Any]] = []
    run_group(Failing(), 0, 0, place, lambda **facts: told.append(facts))
    assert told[-1]["counts"] == {"cases": 2, "right": 1, "unclear": 1}
    assert told[0]["finding"]["label"].startswith("in the fuzzer: OverflowError")
