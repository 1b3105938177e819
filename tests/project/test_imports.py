# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: no circles between modules or packages, and no private names of another file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOPS = {"sparsetir": "sparsetir", "sparsetir.schedules": "schedules", "sparsetir.tuning": "tuning"}
FACADE = "sparsetir"  # what users import
# The packages, and the files beside them: each imports from those before it.
LISTED = re.compile(r"From bottom to top:\n\n```\n(.*?)```", re.DOTALL)
ORDER = LISTED.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))[0].split()
# Private attributes of torch's and TVM's classes, whose names some file of ours has, too.
FOREIGN = {"_buffers", "_expr", "_indices", "_values"}

Graph = Mapping[str, set[str]]


@cache
def paths() -> dict[str, Path]:
    """Every module of the project by name."""
    found = {}
    for package, folder in TOPS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return found


@cache
def modules() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths().items()}


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Trees that are kept make garbage collections long, in which CPython 3.11 mixes up the parsers of two threads."""
    yield
    graph.cache_clear()
    modules.cache_clear()


def running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from running(child)


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """The modules of the project that a module imports, inside functions too."""
    is_package = paths()[name].name == "__init__.py"
    for node in running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            here = name.split(".")
            base = here[: len(here) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            each = {f"{source}.{alias.name}" for alias in node.names}
            known = each & modules().keys()
            yield from known
            if source in modules() and (each - known or node.names[0].name == "*"):
                yield source


@cache
def graph() -> dict[str, set[str]]:
    """The imports of each module."""
    return {name: set(imported(name, tree)) - {name} for name, tree in modules().items()}


def package(name: str) -> str:
    """The part of the project that a module belongs to."""
    return name.split(".")[1] if "." in name else FACADE


def between_packages() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, others in graph().items():
        found.setdefault(package(name), set()).update(package(o) for o in others if package(o) != package(name))
    return found


def circle(edges: Graph) -> list[str]:
    """The way round a circle; empty where there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            if found := walk(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := walk(node, []))), [])


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.slow
@pytest.mark.parametrize("edges", [graph, between_packages])
def test_there_are_no_circles(edges):
    assert " -> ".join(circle(edges())) == ""


@pytest.mark.slow
def test_packages_import_what_is_below_them():
    edges = between_packages()
    assert sorted(ORDER) == sorted(edges)
    assert [(p, o) for p, others in edges.items() for o in others if ORDER.index(o) > ORDER.index(p)] == []


def test_no_two_classes_share_a_name():
    places: dict[str, list[str]] = {}
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    # A layer of torch and one of Relax, with the arguments of the same layer.
    assert set(shared) == {"SparseLinear"}, shared


@pytest.mark.slow
def test_nobody_imports_what_users_import():
    assert [name for name, others in graph().items() if FACADE in others] == []


# ---------------------------------------------------------------------------------------------- names


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def attributes(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Private attributes of other objects than the method's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            owner = node.value
            is_super = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
            if not is_super and not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield node


def defined(tree: ast.Module) -> set[str]:
    """The names that a file gives to functions, classes, variables, fields and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


@pytest.mark.slow
def test_private_names_stay_in_their_file():
    owners: dict[str, set[str]] = {}
    for name, tree in modules().items():
        for each in defined(tree):
            owners.setdefault(each, set()).add(name)
    found = []
    for name, tree in modules().items():
        used = [a for a in attributes(tree) if a.attr not in FOREIGN and name not in owners.get(a.attr, {name})]
        found += [f"{name}: {ast.unparse(a)}" for a in used]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparsetir"):
                found += [f"{name}: imports {a.name}" for a in node.names if private(a.name)]
    assert found == []
