# SPDX-License-Identifier: Apache-2.0
"""What several test files share: golden texts, and machine code that is made quickly."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import math
import os
import shutil
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from each import FULL, sample, share
from quick_code import plain_loops, quick_code

# Hundreds of programs are compiled here once: none of them belongs in the user's cache.
os.environ.setdefault("SPARSETIR_CACHE", "off")
# A sketch that does not lower is an error here, and not left out.
os.environ.setdefault("SPARSETIR_STRICT", "1")
# Two workers have as many threads of torch and MKL each as there are cores: those that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
TURNS = 8  # in which each slow test stands once
# Seconds of a case of the tests that have several, as `--record-seconds` wrote them; the cases of a test that take no
# longer than that together are all in a turn.
SECONDS = Path(__file__).with_name("seconds.json")
TURN_SECONDS = 0.1
LONG_SECONDS = 0.2  # of a test for each turn: one that takes longer stands in fewer turns
NOTED_SECONDS = 0.2  # of tests with one case that are in that file
NEAR_FRAMES = 4  # which tell TVM whether a function stands in a class
TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
# Folders whose tests judge what is computed, not how; one case in `SCHEDULED` of theirs has schedules as users do.
UNSCHEDULED = {"blocks", "einsum", "interop", "lazy", "relax", "torch", "transform"}
SCHEDULED = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts in tests/golden anew")
    parser.addoption("--quick", action="store_true", help="one case of each test, and none of those marked slow")
    parser.addoption(
        "--turn",
        type=int,
        metavar="N",
        help=f"a few cases of each test, and one in {TURNS} of those marked slow; others for each N",
    )
    parser.addoption("--record-seconds", action="store_true", help=f"note the seconds of this run in {SECONDS.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(CaseTimes())


class CaseTimes:
    """Seconds of a case of each test with several cases, or with one that takes long."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, bracket, _ = report.nodeid.partition("[")
        is_noted = bracket or report.duration >= NOTED_SECONDS
        if is_noted and report.when == "call" and report.passed:
            self.seconds.setdefault(test, []).append(report.duration)

    def pytest_sessionfinish(self) -> None:
        means = {test: round(sum(each) / len(each), 3) for test, each in self.seconds.items()}
        merged = sorted({**recorded_seconds(), **means}.items())
        lines = ",\n".join(f"{json.dumps(test)}: {mean}" for test, mean in merged)
        SECONDS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


@functools.cache
def recorded_seconds() -> dict[str, float]:
    """Return the seconds of a case by the name of its test."""
    return json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.is_file() else {}


def pytest_report_header(config: pytest.Config) -> list[str]:
    turn = config.getoption("--turn")
    return [] if turn is None else [f"turn {turn}: `make test TURN={turn}` runs the same cases, `make test-all` all"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some of the cases of tests marked so; with ``--quick`` one case of a test at most, with ``--turn`` a few."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    turn = config.getoption("--turn")
    keep = _quick if config.getoption("--quick") else _sampled if turn is None else functools.partial(_in_turn, turn)
    kept = {item for cases in tests.values() for item in keep(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _quick(cases: list[pytest.Item]) -> list[pytest.Item]:
    return [case for case in cases if not any(case.iter_markers("slow"))][:1]


def _in_turn(turn: int, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Keep the cases that take `TURN_SECONDS` together, others in each turn.

    Of a test that takes longer than `LONG_SECONDS` one, in as many turns as that has room for; of one that is marked
    slow one, in one of `TURNS`.
    """
    name = cases[0].nodeid.partition("[")[0]
    place, seconds = zlib.crc32(name.encode()) + turn, recorded_seconds().get(name, TURN_SECONDS)
    quick = [case for case in cases if not any(case.iter_markers("slow"))]
    turns = min(math.ceil(seconds / LONG_SECONDS), TURNS) if quick else TURNS
    if turns > 1:
        every = quick or cases
        return [every[place // turns % len(every)]] if place % turns == 0 else []
    count = min(len(quick), max(1, int(TURN_SECONDS / max(seconds, 1e-3))))
    return [quick[at] for at in sorted({(place + n * len(quick) // count) % len(quick) for n in range(count)})]


def _sampled(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Keep one case in as many as a mark says; all of them if one is named, or SPARSETIR_FULL is set.

    Tests of one module that share their cases take others each: the first, fourth, ... and the second, fifth, ...
    """
    if FULL or len(cases) == 1:
        return cases
    shared = cases[0].get_closest_marker("shared")
    if shared is not None:
        return share(cases, *shared.args, first=_place_among_shared(cases[0]))
    mark = cases[0].get_closest_marker("sampled")
    if mark is None:
        return cases
    return [cases[at] for at in sample([case.callspec.params for case in cases], *mark.args)]  # type: ignore[attr-defined]


def _place_among_shared(item: Any) -> int:
    """Return how many tests of a module that share their cases stand before one."""
    names = [
        name
        for name, test in vars(item.module).items()
        if any(mark.name == "shared" for mark in getattr(test, "pytestmark", []))
    ]
    return names.index(item.originalname)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the one kept under a name; ``--update-golden`` keeps the new one."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden text {path.name}; run pytest --update-golden and read what it writes"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session", autouse=True)
def quick_children() -> Iterator[None]:
    """Python processes that tests begin have no torch, and load TVM in a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "no_torch"), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def fitted_at_once() -> Iterator[None]:
    """Calls of small kernels come to the code that suits their arguments as soon as those of large ones."""
    from sparsetir.runtime import call_plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_plan, "MOST_UNFITTED", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_stacks() -> Iterator[None]:
    """TVM's own decorators look at the lines of the frames next to them, not of all sixty of pytest.

    Python goes through all modules for the source of a frame, which takes a fiftieth of a second for each program.
    """
    import importlib

    def stack() -> list[inspect.FrameInfo]:
        frame, found = sys._getframe(1), []
        while frame is not None:
            code, is_near = frame.f_code, len(found) < NEAR_FRAMES
            far: Any = (code.co_filename, frame.f_lineno, code.co_name, None, None)
            found.append(inspect.FrameInfo(frame, *(inspect.getframeinfo(frame) if is_near else far)))
            frame = frame.f_back
        return found

    shown = types.SimpleNamespace(**{**vars(inspect), "stack": stack})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tirx.script.parser.entry", "script.parser.ir.entry", "relax.script.parser.entry"):
            patch.setattr(importlib.import_module(f"tvm.{name}"), "inspect", shown)
        yield


@pytest.fixture(scope="module")
def quick_comparisons() -> Iterator[None]:
    """Searches time kernels for a moment, and in the end for two rounds: no test judges which of them is faster."""
    from sparsetir.tuning import evaluator, measure
    from sparsetir.tuning.workers import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "DUEL_SECONDS", 0.0)
        patch.setattr(measure, "DUEL_TURN", 0.002)
        patch.setattr(evaluator, "BURST_SECONDS", 0.002)
        patch.setattr(local, "TURN_SECONDS", 0.002)
        yield


@pytest.fixture(scope="session")
def quick_ceilings() -> Iterator[None]:
    """Commands measure once what the machine can do, and for a moment: no test judges the rates."""
    from sparsetir.bench import report
    from sparsetir.workloads import ceilings

    once = functools.cache(functools.partial(ceilings.measure_roofline, seconds=0.002, rounds=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "measure_roofline", once)
        patch.setattr(ceilings, "LEAST_DRAM", 8 << 20)
        patch.setattr(ceilings, "TIMES_LAST", 0.25)
        yield


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """The garbage collector leaves out what is there before a file: modules, thousands of tests, kernels kept so far.

    Going through all of them takes a third of a second, which tests that measure memory do many times. Programs are
    trees of small objects, too: a collection every 700 of them finds hardly any garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="module", autouse=True)
def quick_machine_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most tests judge loops and numbers: LLVM does not optimise what they build for this machine.

    It does in files that judge machine code: ``pytestmark = pytest.mark.optimised``; a little where that has a level.
    """
    mark = request.node.get_closest_marker("optimised")
    if FULL or (mark is not None and "level" not in mark.kwargs):
        yield
        return
    with quick_code(0 if mark is None else mark.kwargs["level"]):
        yield


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """The number of threads that a test leaves, as the command line does, is not that of the next one."""
    before = _threads()
    yield
    wanted = before or int(os.environ.get("TVM_NUM_THREADS", 0))
    if wanted and _threads() not in (0, wanted):
        sys.modules["sparsetir.utils.threads"].set_num_threads(wanted)


def _threads() -> int:
    """Return the number of threads of kernels, 0 where none has run yet."""
    module = sys.modules.get("sparsetir.utils.threads")
    return 0 if module is None else module._state["threads"]


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The C compiler does not optimise what exported kernels have besides their machine code: the last -O counts."""
    compiler = tmp_path_factory.mktemp("compiler") / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        if not FULL and shutil.which("cc"):
            patch.setenv("CC", str(compiler))
        yield


@pytest.fixture(autouse=True)
def quick_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Three in four tests of the numbers that front ends compute build loops without a schedule.

    Sketches multiply the code of a kernel by five. All tests have them with SPARSETIR_FULL=1, and those always that
    judge loops or schedules: ``pytestmark = pytest.mark.scheduled``.
    """
    if FULL or not _is_unscheduled(request.node):
        yield
        return
    with plain_loops():
        yield


def _is_unscheduled(item: pytest.Item) -> bool:
    if item.get_closest_marker("scheduled") or item.get_closest_marker("optimised"):
        return False
    folder = item.path.relative_to(TESTS).parts[0]
    return folder in UNSCHEDULED and zlib.crc32(item.nodeid.encode()) % SCHEDULED > 0
