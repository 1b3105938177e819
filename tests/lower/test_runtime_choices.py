# SPDX-License-Identifier: Apache-2.0
"""One compiled function for every number of parts and every distance of a prefetch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir import formats, ops
from sparsetir.codegen.pipeline import scheduled, to_stage_2
from sparsetir.formats.format import Format
from sparsetir.lower.annotations import with_late_choices
from sparsetir.schedules import Choices
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.lowered_program import LoweredProgram, form_of
from sparsetir.tuning.space import shared

FEAT = 20


def late_text(choices: Choices) -> tuple[str, tuple[str, ...]]:
    module, late = with_late_choices(scheduled(to_stage_2(ops.spmm()), choices))
    return module["spmm"].script(), late


def test_annotations_name_parameters() -> None:
    before = scheduled(to_stage_2(ops.spmm()), Choices(chunks=7, prefetch=9)).script()
    assert '"sparsetir.chunks": 7' in before
    assert '"sparsetir.prefetch": 9' in before
    after, late = late_text(Choices(chunks=7, prefetch=9))
    assert '"sparsetir.chunks": chunks_given' in after
    assert '"sparsetir.prefetch": prefetch_given' in after
    assert "def spmm(chunks_given: T.int32, prefetch_given: T.int32, " in after
    assert late == ("chunks", "prefetch")


def test_what_is_not_asked_for_is_no_parameter() -> None:
    assert late_text(Choices(chunks=0))[1] == ()
    assert late_text(Choices(chunks=2))[1] == ("chunks",)
    assert late_text(Choices(chunks=2, carry=1))[1] == ()  # an element for each part


@cache
def evaluator() -> Evaluator:
    rng = np.random.default_rng(0)
    A = sp.random_array((60, 50), density=0.1, format="lil", dtype="float32", rng=rng)
    A[7:20] = 0
    return Evaluator(ops.spmm(), {"A": sp.csr_array(A), "B": rng.random((50, FEAT), "float32")}, None)


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, formats.bsr(2, 2)], ids=str)
def test_one_function_serves_all_numbers(format: Format | None) -> None:
    ready = evaluator().variants(format)
    for chunks in (1, 2, 3, 61, 100):
        for prefetch in (1, 8, 1000):
            call = ready.call(Choices(tile=16, chunks=chunks, prefetch=prefetch))
            assert evaluator().reference.disagreement(ready.workload.fresh(call)) is None
    key = shared(Choices(tile=16, chunks=5, prefetch=5))
    code = ready.form.codes[key]
    assert code is not None
    assert code.late == ("chunks", "prefetch")
    assert sum(choices.tile == 16 for choices in ready.form.codes) == 1


def test_searches_of_a_program_share_its_form() -> None:
    first, second = form_of(ops.spmm(), None), form_of(ops.spmm(), None)
    assert first is second
    assert form_of(ops.spmm("float64"), None) is not first


def test_choices_that_change_the_code_are_kept() -> None:
    some = Choices(tile=8, chunks=0, prefetch=0, unroll=2)
    assert shared(some) == some
    split = Choices(chunks=4, carry=1)
    assert shared(split) == split


def test_a_schedule_that_must_be_cut_down_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = evaluator()
    form = LoweredProgram(known.variants(None).form.func, None)

    def refuse(*_args: Any) -> Any:
        raise ValueError("no loops")

    monkeypatch.setattr("sparsetir.tuning.lowered_program.to_stage_3", refuse)
    assert form.code(Choices(chunks=2)) is None
    call = known.workload.call(form.compile(Choices(chunks=2)), form.names)
    assert known.reference.disagreement(known.workload.fresh(call)) is None
