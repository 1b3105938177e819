# SPDX-License-Identifier: Apache-2.0
"""Pass traces: they end in the loops that are compiled, and their differences rebuild each step."""

from __future__ import annotations

import difflib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import sparsetir
from sparsetir.codegen.pipeline import PassStep, PassTrace


@pytest.fixture(scope="module")
def kernel() -> sparsetir.Kernel:
    return sparsetir.build(sparsetir.ops.spmv())


@pytest.fixture(scope="module")
def trace(kernel: sparsetir.Kernel) -> PassTrace:
    return kernel.trace()


class Text(HTMLParser):
    """Collect the text of a page and check that its elements are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open += [] if tag == "meta" else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n" if self.open[-1:] == ["span"] else data


def test_the_ends_are_the_program_and_the_compiled_loops(kernel: sparsetir.Kernel, trace: PassTrace) -> None:
    assert trace[0].text == kernel.script()
    assert trace["schedule"].text == kernel.script(stage=2)
    assert trace[-1].text == kernel.script(stage=3)
    assert [step.stage for step in trace] == sorted(step.stage for step in trace)


def test_names_of_passes_are_unique(trace: PassTrace) -> None:
    assert len({step.name for step in trace}) == len(trace)


def test_changed_steps_are_those_with_a_difference(trace: PassTrace) -> None:
    assert [step.name for step in trace if trace.diff(step.name)] == [step.name for step in trace.changed]
    for step in trace.changed:
        before = trace[trace.steps.index(step) - 1].text.splitlines()
        changes = [line for line in difflib.ndiff(before, step.text.splitlines()) if line[0] in "+-"]
        shown = [line for line in trace.diff(step.name).splitlines() if line[0] in "+-"]
        assert len(shown) >= len(changes) > 0


def test_sizes_and_outline_shorten_it(kernel: sparsetir.Kernel) -> None:
    short = kernel.trace(outline=True, m=8)
    assert short[-1].text == kernel.script(stage=3, outline=True, m=8)


def test_a_pass_that_does_not_exist(trace: PassTrace) -> None:
    with pytest.raises(KeyError, match="nothing: no such pass; passes are program, "):
        trace["nothing"]


def test_a_wrong_path(trace: PassTrace) -> None:
    with pytest.raises(TypeError, match=r"path: expected the path of a file, got 3\. Pass a str or a Path\."):
        trace.html(3)  # type: ignore[arg-type]


def test_the_page_holds_the_text_and_escapes_it(tmp_path: Path) -> None:
    texts = [("program", 1, "a < b"), ("P<1>", 2, "a < c"), ("Q", 3, "a < c")]
    steps = [PassStep(name, stage, f"{text}\nsame\n") for name, stage, text in texts]
    path = PassTrace("<x>", steps).html(tmp_path / "page.html")
    page = path.read_text(encoding="utf-8")
    reader = Text()
    reader.feed(page)
    assert reader.open == []
    assert "-a < b\n+a < c\n same\n" in reader.text
    assert "Passes of <x>" in reader.text
    assert "P<1>" in reader.text
    assert "http" not in page


def test_text_shows_the_program_then_the_differences(trace: PassTrace) -> None:
    text = str(trace)
    assert text.startswith(f"# stage 1, program\n{trace[0].text}")
    assert [step.name for step in trace.changed] == [
        line.split(", ")[1] for line in text.splitlines() if line.startswith("# stage ") and ", program" not in line
    ]
