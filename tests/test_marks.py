# SPDX-License-Identifier: Apache-2.0
"""The table of annotations and attributes is true, and none that a sketch wrote is dropped in silence."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import tvm
from tvm import ir, tirx

import sparsetir
from corpus import BY_NAME
from each import FULL
from sparsetir.compile.pipeline import lowered, to_stage_2
from sparsetir.errors import ScheduleError
from sparsetir.lower import marks
from sparsetir.lower.marks import CARRY, CHUNKS, DOT, HELD, PANEL, PREFETCH, STREAM, TABLE, refusals, refused
from sparsetir.lower.nests import serial
from sparsetir.schedules import Choices

ROOT = Path(sparsetir.__file__).parent.parent
FOLDERS = ("sparsetir", "schedules", "tuning")
HOMES = ("marks", "ir")  # where names are defined
WRITERS = ("annotate", "with_attr", "_noted")  # calls that write the annotation or attribute they name
TARGET = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"})
NAMES = {mark.name: mark for mark in TABLE}


@cache
def sources() -> list[tuple[str, list[ast.AST]]]:
    """Every module by its name, a package by its folder's, and all nodes of its tree."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    name = lambda path: path.parent.name if path.stem == "__init__" else path.stem  # noqa: E731
    return [(name(path), list(ast.walk(ast.parse(path.read_text())))) for path in paths]


def constants(nodes: list[ast.AST]) -> set[str]:
    """The constants of marks that a module imports."""
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    homes = [n for n in imports if n.module in ("sparsetir.lower.marks", "sparsetir.ir")]
    return {alias.name for node in homes for alias in node.names if _name(alias.name) in NAMES}


def _name(constant: str) -> str:
    return str(getattr(marks, constant, None) or getattr(sparsetir.ir, constant, None))


def is_written(node: ast.AST, constant: str) -> bool:
    """Whether a node writes what a constant names: a call, the key of a literal, an item, or a program's text."""
    is_it = lambda n: isinstance(n, ast.Name) and n.id == constant  # noqa: E731
    if isinstance(node, ast.Call):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return function in WRITERS and any(is_it(a) for a in node.args)
    if isinstance(node, ast.Dict):
        return any(is_it(k) for k in node.keys)
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Store) and is_it(node.slice)
    return isinstance(node, ast.FormattedValue) and is_it(node.value)


def used() -> dict[str, tuple[set[str], set[str]]]:
    """The modules that write and that read each mark."""
    found: dict[str, tuple[set[str], set[str]]] = {name: (set(), set()) for name in NAMES}
    for path, nodes in sources():
        for constant in constants(nodes) if path not in HOMES else ():
            every = sum(isinstance(n, ast.Name) and n.id == constant for n in nodes)
            written = sum(is_written(n, constant) for n in nodes)
            writers, readers = found[_name(constant)]
            writers |= {path} if written else set()
            readers |= {path} if every > written else set()
    return found


@pytest.mark.slow
def test_the_table_names_those_who_write_and_read() -> None:
    found = used()
    for mark in TABLE:
        writers, readers = found[mark.name]
        assert set(mark.writers.split()) == writers, f"{mark.name} is written by {sorted(writers)}"
        assert set(mark.readers.split()) - set(HOMES) == readers, f"{mark.name} is read by {sorted(readers)}"


def test_every_mark_stands_in_the_table_once_and_has_a_meaning() -> None:
    defined = {value for name, value in vars(marks).items() if name.isupper() and isinstance(value, str)}
    assert defined <= set(NAMES)
    assert len(NAMES) == len(TABLE)
    assert all(mark.meaning and mark.elsewhere for mark in TABLE)
    assert [mark.name for mark in TABLE if not mark.readers] == [marks.DROPPED]  # for people


@pytest.mark.slow
def test_names_are_written_down_nowhere_else() -> None:
    own = {name for name in NAMES if name.startswith("sparse")}
    for path, nodes in sources():
        literals = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert path in HOMES or not literals & own, (path, literals & own)


def loop(**notes: int) -> tirx.For:
    """An empty loop with annotations."""
    i = tirx.Var("i", ir.PrimType("int32"))
    return serial(i, 4, tirx.Evaluate(0), {f"sparsetir.{name}": value for name, value in notes.items()})


def test_a_refusal_is_listed_and_the_annotation_is_gone() -> None:
    with refusals() as found:
        left = refused(loop(dot=8, held=32), DOT, "it is none")
    assert [(r.mark, r.loop, r.why) for r in found] == [(DOT, "i", "it is none")]
    assert list(left.annotations) == [HELD]


def test_a_loop_without_the_annotation_is_left_alone() -> None:
    bare = loop(held=32)
    with refusals() as found:
        assert refused(bare, DOT, "it is none").same_as(bare)
    assert not found


def test_some_annotations_must_apply() -> None:
    with pytest.raises(ScheduleError, match=r"loop i carries sparsetir\.chunks but it is none"):
        refused(loop(chunks=2), CHUNKS, "it is none")


@cache
def corpus() -> list[ir.IRModule]:
    """Its programs at stage II."""
    return [to_stage_2(case.make(case.dtypes[0], "int32")) for case in BY_NAME.values()]


def refused_by(choices: Choices | None, every: int = 1) -> Counter[str]:
    """How often each annotation of the sketches is refused in the programs of the corpus, or in every few of them."""
    count: Counter[str] = Counter()
    for second in corpus()[::every]:
        with refusals() as found:
            lowered(second, choices, TARGET)
        count.update(r.mark for r in found)
    return count


@pytest.mark.slow
def test_the_sketches_of_a_default_build_write_nothing_that_is_refused_but_shared_rows() -> None:
    assert refused_by(None) == {HELD: 5}  # sums that share no row, which only the flat loops show


@pytest.mark.slow
def test_of_all_knobs_only_those_that_are_hints_are_refused() -> None:
    every = Choices(chunks=2, carry=1, unroll=4, prefetch=8, stream=1, panel=32)
    assert set(refused_by(every, 1 if FULL else 3)) <= {CARRY, HELD, PANEL, PREFETCH, STREAM}
