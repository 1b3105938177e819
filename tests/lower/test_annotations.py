# SPDX-License-Identifier: Apache-2.0
"""The table of annotations and attributes is true, and none that a sketch wrote is dropped in silence."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import tvm
from tvm import ir, tirx

from corpus import BY_NAME
from each import FULL, share
from sparsetir.codegen.pipeline import lowered, to_stage_2
from sparsetir.errors import ScheduleError
from sparsetir.lower import annotations as marks
from sparsetir.lower.annotations import CARRY, CHUNKS, DOT, HELD, PANEL, PREFETCH, STREAM, TABLE, refusals, refused
from sparsetir.lower.loops import serial
from sparsetir.schedules import Choices

TARGET = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"})
NAMES = {mark.name: mark for mark in TABLE}


def test_every_mark_stands_in_the_table_once_and_has_a_meaning() -> None:
    defined = {value for name, value in vars(marks).items() if name.isupper() and isinstance(value, str)}
    assert defined <= set(NAMES)
    assert len(NAMES) == len(TABLE)
    assert all(mark.meaning and mark.elsewhere for mark in TABLE)


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
    """Return a third of its programs at stage II."""
    return [to_stage_2(case.make(case.dtypes[0], "int32")) for case in share(BY_NAME.values(), 3)]


def refused_by(choices: Choices | None) -> Counter[str]:
    """Return how often each annotation of the sketches is refused in programs of the corpus."""
    count: Counter[str] = Counter()
    for second in corpus():
        with refusals() as found:
            lowered(second, choices, TARGET)
        count.update(r.mark for r in found)
    return count


@pytest.mark.slow
def test_the_sketches_of_a_default_build_write_nothing_that_is_refused_but_shared_rows() -> None:
    count = refused_by(None)
    assert set(count) <= {HELD}  # sums that share no row, which only the flat loops show
    assert not FULL or count[HELD] == 5


@pytest.mark.slow
def test_of_all_knobs_only_those_that_are_hints_are_refused() -> None:
    every = Choices(chunks=2, carry=1, unroll=4, prefetch=8, stream=1, panel=32)
    assert set(refused_by(every)) <= {CARRY, HELD, PANEL, PREFETCH, STREAM}
