# SPDX-License-Identifier: Apache-2.0
"""What is in the repository is what ships: a static package list silently drops a folder it does not name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tvm.script

import sparsetir
from sparsetir import _tvm_plugin

pytestmark = pytest.mark.slow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = ("sparsetir", "schedules", "tuning")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def package_name(folder: Path, mapping: dict[str, str]) -> str:
    """The import name under which `folder` ships."""
    parts = folder.relative_to(ROOT).parts
    above = {Path(where): package for package, where in mapping.items()}
    head = above.get(Path(parts[0]), parts[0])
    return ".".join((head, *parts[1:]))


def test_no_module_stands_in_a_folder_without_init() -> None:
    modules = [path for top in TOP_FOLDERS for path in (ROOT / top).rglob("*.py")]
    orphans = [path.relative_to(ROOT) for path in modules if not (path.parent / "__init__.py").exists()]
    assert not orphans


def test_loading_the_entry_point_registers_the_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, str] = {}
    monkeypatch.setattr(tvm.script, "register_dialect", registered.__setitem__)
    _tvm_plugin.load()
    assert registered == {"sparsetir": "sparsetir.script"}


def is_installed() -> bool:
    """Whether this interpreter finds an installed sparsetir, and so its entry points."""
    try:
        metadata.distribution("sparsetir")
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not is_installed(), reason="sparsetir is not installed")
def test_the_dialect_is_there_without_importing_sparsetir(tmp_path: Path) -> None:
    program = "from tvm.script import sparsetir as T; print(T.__name__)"
    done = subprocess.run(
        [sys.executable, "-W", "error:Failed to autoload", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("sparsetir.script", "")


def can_build() -> bool:
    """Whether the wheel can be built without a network."""
    try:
        return int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False


def wheel_files(destination: Path) -> set[str]:
    """Build the wheel of a copy of the repository (building leaves files behind) and list it."""
    source = destination / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for top in TOP_FOLDERS:
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(destination), str(source)], check=True)
    with zipfile.ZipFile(next(destination.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


@pytest.mark.skipif(not can_build(), reason="setuptools 77 or later is not installed")
def test_the_wheel_holds_every_module(tmp_path: Path, pyproject: dict[str, Any]) -> None:
    mapping = pyproject["tool"]["setuptools"]["package-dir"]
    modules = [path for top in TOP_FOLDERS for path in (ROOT / top).rglob("*.py")]
    expected = {f"{package_name(path.parent, mapping).replace('.', '/')}/{path.name}" for path in modules}
    shipped = wheel_files(tmp_path)
    assert {name for name in shipped if name.endswith(".py")} == expected
    assert "sparsetir/py.typed" in shipped
    data = {f"sparsetir/tuning/data/{path.name}" for path in (ROOT / "tuning" / "data").glob("*")}
    assert data <= shipped
    assert any(re.fullmatch(r"sparsetir-.*\.dist-info/entry_points\.txt", name) for name in shipped)


def test_the_version_is_the_same_everywhere(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert (sparsetir.__version__, cited[1]) == (version, version)


def test_the_changelog_has_its_sections() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert unreleased is not None
    sections = re.findall(r"^### (.+)$", unreleased[1], re.MULTILINE)
    assert set(sections) <= {"New", "Quicker", "Changed", "Fixed"}
    assert len(sections) == len(set(sections))


def test_the_files_of_changes_have_a_section(pyproject: dict[str, Any]) -> None:
    """A misspelt kind would be left out of the changelog without a word."""
    kinds = {kind["directory"]: kind["name"] for kind in pyproject["tool"]["towncrier"]["type"]}
    assert list(kinds.values()) == ["New", "Quicker", "Changed", "Fixed"]
    files = {path.name: path.read_text(encoding="utf-8").strip() for path in (ROOT / "changes").iterdir()}
    texts = {name: text for name, text in files.items() if name not in pyproject["tool"]["towncrier"]["ignore"]}
    assert not [name for name in texts if not re.fullmatch(rf"\w+\.({'|'.join(kinds)})\.md", name)]
    assert not [name for name, text in texts.items() if not text.endswith(".") or text.startswith(("*", "-", "#"))]


def test_a_release_finds_its_place_in_the_changelog(pyproject: dict[str, Any]) -> None:
    start = pyproject["tool"]["towncrier"]["start_string"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count(start) == 1
    assert "\n## " not in text[: text.index(start)]


def test_extras_are_complete(pyproject: dict[str, Any]) -> None:
    """`all` has what users may need; the README names every extra."""
    extras = pyproject["project"]["optional-dependencies"]
    inside = re.search(r"\[(.*)\]", extras["all"][0])
    assert inside is not None
    assert set(inside[1].split(",")) == set(extras) - {"all", "dev", "docs"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in extras if f"`{name}`" not in readme]
