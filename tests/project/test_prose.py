# SPDX-License-Identifier: Apache-2.0
"""Lint of the project's English: words to avoid, first words of docstrings, and line lengths of documents."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("sparsetir", "schedules", "tuning") for path in (ROOT / folder).rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
AVOIDED = re.compile(
    r"\b(anew|nobody|whoever|somebody|hither|ever so|be had|goes over|look(s|ed)? over|hardly)\b", re.I
)
QUESTION = re.compile(r"(What|Whether|How|Theirs|That)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*SOURCES, *DOCUMENTS], ids=name_of)
def test_words_to_avoid(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if AVOIDED.search(line)]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    plain = [f for f in functions if not any("property" in ast.unparse(d) for d in f.decorator_list)]
    first = {f.name: (ast.get_docstring(f) or "").split("\n")[0] for f in plain}
    assert not {name: line for name, line in first.items() if QUESTION.match(line)}
