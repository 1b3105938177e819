# SPDX-License-Identifier: Apache-2.0
"""The link check of the built site."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check_site() -> Any:
    spec = importlib.util.spec_from_file_location("check_site", ROOT / "docs" / "_ext" / "check_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(site: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (site / f"{name}.html").write_text(text, encoding="utf-8")
    return site


GOOD = (
    '<h1 id="top">x</h1><a href="b.html#c%20d">b</a> <a href="#top">up</a>'
    '<a href="https://x.org/y">x</a><img src="p.png">'
)


def test_a_site_without_faults(check_site: Any, tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"")
    write(tmp_path, a=GOOD, b='<p id="c d"><link rel="canonical" href="https://x.org">')
    assert check_site.check(tmp_path) == ([], 3, 1)
    assert check_site.main([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ('<a href="c.html">', "a.html: no file c.html"),
        ('<a href="b.html#top">', "a.html: no anchor b.html#top"),
        ('<a href="#top">', "a.html: no anchor #top"),
        ('<script src="s.js"></script>', "a.html: no file s.js"),
        ('<script src="https://x.org/s.js"></script>', "a.html loads https://x.org/s.js from a network"),
        ('<link rel="stylesheet" href="https://x.org/s.css">', "a.html loads https://x.org/s.css from a network"),
    ],
)
def test_a_fault_is_named(check_site: Any, tmp_path: Path, page: str, message: str) -> None:
    write(tmp_path, a=page, b="<p>")
    assert check_site.check(tmp_path)[0] == [message]
    assert check_site.main([str(tmp_path)]) == 1


def test_a_folder_without_pages_is_refused(check_site: Any, tmp_path: Path) -> None:
    assert check_site.main([str(tmp_path)]) == 1


def test_make_docs_checks_the_site() -> None:
    rule = re.search(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert rule is not None
    assert "check_site.py build/site" in rule[1]
