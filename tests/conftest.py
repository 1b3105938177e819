# SPDX-License-Identifier: Apache-2.0
"""What several test files share: golden texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Hundreds of programs are compiled here once: none of them belongs in the user's cache.
os.environ.setdefault("SPARSETIR_CACHE", "off")
# A sketch that does not lower is an error here, and not left out.
os.environ.setdefault("SPARSETIR_STRICT", "1")
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts in tests/golden anew")


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
