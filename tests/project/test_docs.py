# SPDX-License-Identifier: Apache-2.0
"""What the documents say is true: their code runs and prints what stands below it, their paths and commands exist."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sparsetir

pytestmark = pytest.mark.usefixtures("quick_ceilings", "quick_comparisons")

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Commands of a shell block that change the machine or take minutes; make's targets are looked up.
NOT_RUN = {"make", "pip", "git"}
# Blocks that only run where there is a C compiler.
WITH_COMPILER = re.compile(r"\.export\(|\.save\(\".*\.so\"|^cc |^/\* \w+\.c \*/", re.MULTILINE)
# Blocks that only run where these are installed: those that name one.
OPTIONAL = ("torch", "onnx", "dask")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
FOLDERS = "sparsetir|schedules|tuning|tests|docs|examples"


def title(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- the code in the documents ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line on which the text begins, and where the fence lies."""

    language: str
    text: str
    line: int
    start: int
    end: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = FENCE.finditer(text)
    return [Block(m["language"], m["text"], text.count("\n", 0, m.start()) + 2, m.start(), m.end()) for m in found]


def with_output(path: Path) -> list[tuple[Block, Block | None]]:
    """Every block that is code, and the text block that follows it at once: what it prints."""
    text, found = path.read_text(encoding="utf-8"), blocks(path)
    pairs: list[tuple[Block, Block | None]] = []
    for block, after in zip_longest(found, found[1:]):
        if block.language == "text":
            continue
        belongs = after is not None and after.language == "text" and not text[block.end : after.start].strip()
        pairs.append((block, after if belongs else None))
    return pairs


def run_python(block: Block, path: Path, names: dict[str, Any]) -> str:
    """What the code prints. It stands in a file at the document's line numbers: the parser reads its source."""
    source = "\n" * (block.line - 1) + block.text
    file = Path(f"{path.stem}_line_{block.line}.py").resolve()
    file.write_text(source, encoding="utf-8")
    names["__file__"] = str(file)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, str(file), "exec", dont_inherit=True), names)
    return out.getvalue()


def run_shell(block: Block) -> str:
    """What the commands print, those that are run.

    The package's own run in this process: to load TVM for each takes longer than what it does.
    """
    lines = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    return "".join(run_command(words) for words in lines if words and words[0] not in NOT_RUN)


def run_command(words: list[str]) -> str:
    """What a command prints."""
    if words[0] == "sparsetir" and "--help" not in words:
        return run_main("sparsetir.cli", words[1:])
    if words[:2] == ["python", "-m"] and words[2].startswith("sparsetir."):
        return run_main(words[2], words[3:])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_main(module: str, arguments: list[str]) -> str:
    """What a module's `main` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            status = importlib.import_module(module).main(arguments)
        except SystemExit as end:  # as of --help
            status = end.code
    assert not status, f"{module} {shlex.join(arguments)} ends with {status}"
    return out.getvalue()


def write_c(block: Block) -> str:
    """A C program goes into the file that its first line names in a comment."""
    name = re.match(r"/\* (\w+\.c) \*/", block.text)
    assert name is not None, "the first line of a C block names its file: /* main.c */"
    Path(name[1]).write_text(block.text, encoding="utf-8")
    return ""


def run_block(block: Block, path: Path, names: dict[str, Any]) -> str:
    if block.language == "python":
        return run_python(block, path, names)
    if block.language == "sh":
        return run_shell(block)
    if block.language == "c":
        return write_c(block)
    if block.language == "cpp":  # parts of a program among the examples, which is compiled there
        return ""
    assert not block.language, f"a block of {block.language} cannot be checked; a drawing has no language"
    return ""


def can_run(block: Block) -> bool:
    """Whether what a block needs is installed."""
    if WITH_COMPILER.search(block.text) and shutil.which("cc") is None:
        return False
    needed = [name for name in OPTIONAL if block.language == "python" and re.search(rf"\b{name}\b", block.text)]
    return all(importlib.util.find_spec(name) is not None for name in needed)


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=title)
def test_the_code_runs_and_prints_what_stands_below_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line ... in the output stands for any number of lines."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where the parser looks for source lines
    names = vars(module)
    checker = doctest.OutputChecker()
    for block, output in with_output(path):
        if not can_run(block):
            continue
        printed = run_block(block, path, names)
        if output is not None and not checker.check_output(output.text, printed, doctest.ELLIPSIS):
            example = doctest.Example(block.text, output.text)
            difference = checker.output_difference(example, printed, doctest.ELLIPSIS)
            pytest.fail(f"{title(path)}, line {output.line}:\n{difference}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=title)
def test_every_output_belongs_to_code(path: Path) -> None:
    outputs = {block.line for block in blocks(path) if block.language == "text"}
    assert outputs == {output.line for _, output in with_output(path) if output is not None}


# --- the code in the docstrings ---------------------------------------------------------------------------------


def modules() -> list[str]:
    """Those with an example in a docstring."""
    folders = {"sparsetir": "sparsetir", "schedules": "sparsetir.schedules", "tuning": "sparsetir.tuning"}
    found = []
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join([package, *parts]).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_are_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted > 0
    assert done.failed == 0


# --- what else the documents mention ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=title)
def test_links_lead_somewhere(path: Path) -> None:
    missing = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=title)
def test_paths_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.]*\w)", text)
    assert not [name for name in found if not (ROOT / name).exists()]


def test_every_public_name_is_explained() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert not [name for name in sparsetir.__all__ if not re.search(rf"sparsetir\.{name}\b|`{name}\b", text)]


def test_a_package_that_is_imported_by_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(sparsetir), "dask", raising=False)
    with pytest.raises(AttributeError, match=r"has no attribute 'dask': import sparsetir\.dask$"):
        _ = sparsetir.dask
    with pytest.raises(AttributeError, match=r"has no attribute 'dusk'$"):
        _ = sparsetir.dusk


@pytest.mark.parametrize("package", ["relax", "tuning"])
def test_names_that_packages_import_at_the_first_use(package: str) -> None:
    module = importlib.import_module(f"sparsetir.{package}")
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match=rf"^module 'sparsetir\.{package}' has no attribute 'dusk'$"):
        _ = module.dusk


# --- examples ---------------------------------------------------------------------------------------------------


# What each example prints: patterns of whole lines, in this order.
LOOP = r" *for \w+ in (range|T\.\w+)\(.+\):"
MILLISECONDS = r" +\d+\.\d+ ms.*"
PRINTED = {
    "csf_mttkrp": [LOOP, r".*\d (ms|us).*"],
    "graph_attention": [r"\d+ edges, \d+ nodes without any; .*", LOOP, r".*\d (ms|us).*"],
    "experts": [LOOP, r"\d+ tokens, .*", " *the dialect" + MILLISECONDS, " *Relax" + MILLISECONDS],
    "retrieval": [r"\d+\.\d+ ms a query", r"best documents for .*", r"document \d+: \d+\.\d+"],
    "single_cell_pca": [r"\d+ cells x \d+ genes, \d+% nonzero", r"shares of the variance.*: \d.*%"],
    "spmm": [LOOP, "sparsetir" + MILLISECONDS, "scipy" + MILLISECONDS],
    "string_matching": [r"[\d,]+ words, .* pairs above 0\.8: [1-9][\d,]*", LOOP, "sparsetir" + MILLISECONDS],
    "tensorize_bsr": [r"loops for .* need a processor with .*|.* in the machine code: True"],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=title)
def test_the_example_runs_and_prints_what_it_is_about(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: another one would take longer to load TVM than most examples take to run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = iter(printed.out.splitlines())
    missing = [pattern for pattern in PRINTED[path.stem] if not any(re.fullmatch(pattern, line) for line in lines)]
    assert missing == [], printed.out


# --- the site ---------------------------------------------------------------------------------------------------


def test_every_page_is_in_one_section_of_the_site() -> None:
    tree = re.compile(r"^:::\{toctree\}\n(?:^:.*\n)*\n(.*?)^:::$", re.MULTILINE | re.DOTALL)
    pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    listed = [name for text in pages.values() for entries in tree.findall(text) for name in entries.split()]
    generated = {"gallery/index"}
    assert sorted(listed) == sorted((pages.keys() - {"index"}) | generated)


@pytest.mark.parametrize("page", ["scipy", "torch", "pruned", "language"])
def test_the_pages_of_newcomers_are_one_click_from_the_readme(page: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start = readme[readme.index("## What do you have?") : readme.index("## Features")]
    assert f"(docs/{page}.md)" in start
    assert f":link: {page}\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_anchors_of_the_documents_are_headings() -> None:
    """Anchors as GitHub and the site make them: lower case, hyphens for spaces, no punctuation."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    titles = {path: re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE) for path, text in texts.items()}
    anchors = {p: {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in found} for p, found in titles.items()}
    wrong = []
    for path, text in texts.items():
        for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
            target = (path.parent / file).resolve() if file else path
            if anchor not in anchors.get(target, set()):
                wrong.append(f"{title(path)}: {file}#{anchor}")
    assert not wrong


REFERENCE = sorted((ROOT / "docs").glob("api*.md"))
PUBLIC = "blocks dask einsum formats intrin ir lazy ops relax schedules scipy torch tuning bench".split()
TABLE = re.compile(r"currentmodule:: (\S+)\n\.\. autosummary::\n   :toctree: generated\n\n((?:   \w+\n)+)")


@pytest.fixture(scope="module")
def reference() -> dict[str, list[str]]:
    """The names that the pages of the reference list, by module."""
    listed: dict[str, list[str]] = {}
    for path in REFERENCE:
        for module, names in TABLE.findall(path.read_text(encoding="utf-8")):
            listed.setdefault(module, []).extend(names.split())
    return listed


def test_the_reference_lists_every_public_name(reference: dict[str, list[str]]) -> None:
    assert sorted(reference["sparsetir"]) == sorted(sparsetir.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_lists_the_names_of_a_module(name: str, reference: dict[str, list[str]]) -> None:
    """Those of the package itself are on its own page; constants are explained in sentences."""
    if name in OPTIONAL:
        pytest.importorskip(name)
    module = importlib.import_module(f"sparsetir.{name}")
    text = "".join(path.read_text(encoding="utf-8") for path in REFERENCE)
    said = set(re.findall(rf"`{module.__name__}\.(\w+)`", text))
    above = {n for n in sparsetir.__all__ if getattr(sparsetir, n) is getattr(module, n, None)}
    listed = reference[module.__name__]
    assert len(listed) == len(set(listed))
    assert set(listed) | said | above == set(module.__all__) | said | above
    assert said <= set(module.__all__)


def test_the_reference_lists_every_error(reference: dict[str, list[str]]) -> None:
    classes = {n: value for n, value in vars(sparsetir.errors).items() if isinstance(value, type)}
    kinds = [n for n, value in classes.items() if issubclass(value, Exception)]
    assert sorted(reference["sparsetir.errors"]) == sorted(kinds)


def test_the_reference_lists_the_names_of_the_dialect() -> None:
    stub = ast.parse((ROOT / "sparsetir" / "script" / "tvmscript.pyi").read_text(encoding="utf-8"))
    names = {n.name for n in stub.body if isinstance(n, ast.FunctionDef | ast.ClassDef)} - {"__getattr__"}
    page = (ROOT / "docs" / "api_language.md").read_text(encoding="utf-8")
    listed = " ".join(re.findall(r"^```\{dialect-names\}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).split()
    assert sorted(listed) == sorted(names)
