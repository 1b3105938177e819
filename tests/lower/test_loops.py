# SPDX-License-Identifier: Apache-2.0
"""Loops are built and updates recognised in one place."""

from __future__ import annotations

import pytest
from tvm import ir, tirx
from tvm.ir import Var
from tvm.script import tirx as tir

from sparsetir.ir.rewriting import collect
from sparsetir.lower.loops import (
    PARALLEL,
    VECTORIZED,
    Update,
    each_lane,
    each_loop,
    most,
    parallel,
    place_of,
    serial,
    vectorized,
    with_,
    without,
)

SUMS = (tirx.Add, tirx.Sub)


def counted(name: str = "i") -> Var:
    return Var(name, ir.PrimType("int32"))


def stored(value: str) -> tirx.BufferStore:
    """``x[i] = value`` with two arrays and a number."""
    text = f"""
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((8,), "float32"), y: tir.Buffer((8,), "float32")):
    for i in range(7):
        x[i] = {value}
"""
    (store,) = collect(tir_function(text).body, tirx.BufferStore)
    return store


def tir_function(text: str) -> tirx.PrimFunc:
    from tvm.script import from_source

    return from_source(text, {"tir": tir})


@pytest.mark.parametrize(
    ("value", "op", "term"),
    [
        ("x[i] + y[i]", tirx.Add, "y[i]"),
        ("x[i] - y[i]", tirx.Sub, "y[i]"),
        ("tir.max(x[i], y[i])", tirx.Max, "y[i]"),
        ("x[i] * y[i]", tirx.Mul, "y[i]"),
    ],
)
def test_an_update_has_its_operator_and_its_term(value: str, op: type, term: str) -> None:
    found = Update.of(stored(value), (op,))
    assert found is not None
    assert (found.op, str(found.term), found.dtype, found.is_alone) == (op, term, "float32", True)


@pytest.mark.parametrize("value", ["y[i] + y[i]", "y[i] + x[i]", "x[i + 1] + y[i]", "y[i]", "tir.min(x[i], y[i])"])
def test_other_stores_are_no_sums(value: str) -> None:
    assert Update.of(stored(value), SUMS) is None


def test_the_element_may_come_second_where_the_operator_commutes() -> None:
    found = Update.of(stored("y[i] + x[i]"), SUMS, either=True)
    assert found is not None
    assert str(found.term) == "y[i]"
    assert Update.of(stored("y[i] - x[i]"), SUMS, either=True) is None


def test_a_term_that_reads_the_array_is_told() -> None:
    found = Update.of(stored("x[i] + x[i + 1]"))
    assert found is not None
    assert not found.is_alone


def test_a_copy_keeps_what_is_not_changed() -> None:
    loop = serial(counted(), 4, tirx.Evaluate(0), {"one": 1, "two": 2})
    copy = with_(loop, kind=VECTORIZED, notes=without(loop, "one"))
    assert (copy.kind, int(copy.extent), dict(copy.annotations)) == (VECTORIZED, 4, {"two": 2})
    assert copy.loop_var.same_as(loop.loop_var)


def test_nested_loops_have_places_and_copies() -> None:
    i, j = counted("i"), counted("j")
    lanes = [
        serial(i, 4, tirx.Evaluate(0)),
        vectorized(j, tirx.floormod(counted("n"), tirx.const(8)), tirx.Evaluate(0)),
    ]
    assert [most(f.extent) for f in lanes] == [4, 8]
    assert str(place_of(lanes)) == "i * 8 + j"
    copies = collect(each_lane(lanes, tirx.Evaluate(i + j)), tirx.For)
    assert [str(f.loop_var.name) for f in copies] == ["i", "j"]
    assert not any(f.loop_var in (i, j) for f in copies)


def test_each_loop_asks_before_and_after_the_loops_inside() -> None:
    func = tirx.PrimFunc([], serial(counted("a"), 2, parallel(counted("b"), 2, tirx.Evaluate(0))))
    seen: list[str] = []
    note = lambda when: lambda f: seen.append(f"{when} {f.loop_var.name}")  # noqa: E731
    each_loop(func, outer=note("before"), inner=note("after"))
    assert seen == ["before a", "before b", "after b", "after a"]
    changed = each_loop(func, outer=lambda f: f.body if f.kind == PARALLEL else None)
    assert len(collect(changed.body, tirx.For)) == 1
