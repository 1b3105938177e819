# SPDX-License-Identifier: Apache-2.0
"""Steps that store to one element keep their order through stock schedules, or the build refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import s_tir

import sparsetir
from each import pairwise
from sparsetir.errors import ScheduleError

ROWS, COLUMNS = 5, 7

PROGRAM = """
@T.prim_func
def program(x: T.handle, p: T.handle, j: T.handle, y: T.handle, m: T.int32, n: T.int32, z: T.int32):
    I = T.dense_fixed(m)
    K = T.dense_fixed(n)
    E = T.dense_fixed(2)
    X = T.match_sparse_buffer(x, (I, K), "float32")
    P = T.match_sparse_buffer(p, (K,), "int32")
    J = T.match_sparse_buffer(j, (I,), "int32")
    Y = T.match_sparse_buffer(y, (K,), "float32")
    with T.sp_iter([I, K], "KINDS", "work") as [i, k]:
        BODY
"""

BODIES = {  # what is stored, the letters of i and k, and whether the order of i and of k counts
    "own": ("Y[k] = Y[k] + X[i, k]", "RS", ""),
    "largest": ("Y[0] = T.max(Y[0], X[i, k])", "RR", ""),
    "constant": ("Y[P[k]] = 3", "SS", ""),
    "last row": ("Y[k] = X[i, k]", "SS", "i"),
    "last row of a sum": ("Y[k] = X[i, k]", "RS", "i"),
    "last": ("Y[0] = X[i, k]", "SS", "ik"),
    "scatter": ("Y[P[k]] = X[i, k]", "SS", "ik"),
    "decay": ("Y[k] = Y[k] * 0.5 + X[i, k]", "RS", "i"),
    "two operators": ("Y[0] = Y[0] + X[i, k]\n        Y[0] = Y[0] * 2", "RR", "ik"),
    "two elements": ("Y[k] = X[i, k]\n        Y[k // 2] = X[i, k] + 1", "SS", "ik"),
    "neighbour": ("Y[k] = Y[T.max(k - 1, 0)] + X[i, k]", "SS", "ik"),
    "initialised": ("with T.init():\n            Y[k] = 1\n        Y[k] = Y[k] * 0.5 + X[i, k]", "RS", "i"),
}


def _split(axis: int) -> Callable[[s_tir.Schedule], None]:
    def schedule(sch: s_tir.Schedule) -> None:
        sch.split(sch.get_loops(sch.get_sblock("work"))[axis], [None, 3])

    return schedule


def _turn(axis: int) -> Callable[[s_tir.Schedule], None]:
    def schedule(sch: s_tir.Schedule) -> None:
        outer, inner = sch.split(sch.get_loops(sch.get_sblock("work"))[axis], [None, 3])
        sch.reorder(inner, outer)

    return schedule


def _swap(sch: s_tir.Schedule) -> None:
    i, k = sch.get_loops(sch.get_sblock("work"))
    sch.reorder(k, i)


def _fuse(sch: s_tir.Schedule) -> None:
    sch.split(sch.fuse(*sch.get_loops(sch.get_sblock("work"))), [None, 4])


def _fuse_turned(sch: s_tir.Schedule) -> None:
    outer, inner = sch.split(sch.fuse(*sch.get_loops(sch.get_sblock("work"))), [None, 4])
    sch.reorder(inner, outer)


SCHEDULES = {  # and what they change the order of
    "split rows": (_split(0), ""),
    "split columns": (_split(1), ""),
    "fuse": (_fuse, ""),
    "turn rows": (_turn(0), "i"),
    "turn columns": (_turn(1), "k"),
    "turn all": (_fuse_turned, "ik"),
    "swap": (_swap, "both"),
}
# A fused loop that has no steps for an empty row does not initialise it: refused for that.
CASES = [c for c in pairwise(list(BODIES), list(SCHEDULES)) if c != ("initialised", "fuse")]


def arguments() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    drawn = {"x": rng.integers(-9, 9, (ROWS, COLUMNS)), "y": rng.integers(-9, 9, COLUMNS)}
    places = {"p": rng.integers(0, COLUMNS, COLUMNS), "j": rng.integers(0, COLUMNS, ROWS)}
    values = {name: value.astype("float32") for name, value in drawn.items()}
    return {
        **values,
        **{name: value.astype("int32") for name, value in places.items()},
        "m": ROWS,
        "n": COLUMNS,
        "z": 0,
    }


def is_kept(counts: str, changes: str) -> bool:
    """Whether a schedule leaves alone what counts: two axes in turn are only mixed where both count."""
    return len(counts) < 2 if changes == "both" else not set(counts) & set(changes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("body", "schedule"), CASES)
def test_the_order_of_steps_is_kept_or_the_schedule_refused(body: str, schedule: str) -> None:
    (text, kinds, counts), (apply, changes) = BODIES[body], SCHEDULES[schedule]
    func = sparsetir.parse(PROGRAM.replace("BODY", text).replace("KINDS", kinds))
    sch = s_tir.Schedule(sparsetir.lower(func, stage=2))
    apply(sch)
    if not is_kept(counts, changes):
        with pytest.raises(ScheduleError, match="whose order counts"):
            sparsetir.lower(sch.mod["main"], stage=3)
        return
    args = arguments()
    expected = sparsetir.interpret(func, {**args, "y": args["y"].copy()})["y"]
    sparsetir.build(sch)(**args)
    np.testing.assert_array_equal(args["y"], expected)


def lowered(text: str, schedule: Callable[[s_tir.Schedule], None]) -> None:
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(text), stage=2))
    schedule(sch)
    sparsetir.lower(sch.mod["main"], stage=3)


LAST_ROW = PROGRAM.replace("BODY", "Y[k] = X[i, k]").replace("KINDS", "SS")


@pytest.mark.parametrize("primitive", ["transform_block_layout", "blockize"])
def test_what_hides_the_order_is_refused(primitive: str) -> None:
    def schedule(sch: s_tir.Schedule) -> None:
        block = sch.get_sblock("work")
        if primitive == "blockize":
            sch.blockize(sch.get_loops(block)[1])
        else:
            sch.transform_block_layout(block, lambda i, k: (k, i))

    with pytest.raises(ScheduleError, match="blockize and transform_block_layout hide it; leave the block as it is"):
        lowered(LAST_ROW, schedule)


SWEEPS = LAST_ROW.replace(
    '    with T.sp_iter([I, K], "SS", "work") as [i, k]:\n        Y[k] = X[i, k]',
    '    for t in range(3):\n        with T.sp_iter([K], "S", "work") as [k]:\n            Y[k] = VALUE',
)


@pytest.mark.parametrize(
    ("value", "is_refused"), [("Y[k] + X[t, k]", False), ("Y[k] * 0.5 + X[t, k]", False), ("Y[T.max(k - 1, 0)]", True)]
)
def test_sweeps_of_a_loop_of_the_program_stay_outside(value: str, is_refused: bool) -> None:
    def inside(sch: s_tir.Schedule) -> None:
        t, k = sch.get_loops(sch.get_sblock("work"))
        sch.reorder(k, t)

    def turned(sch: s_tir.Schedule) -> None:
        outer, inner = sch.split(sch.get_loops(sch.get_sblock("work"))[0], [None, 2])
        sch.reorder(inner, outer)

    text = SWEEPS.replace("VALUE", value)
    for schedule, counts in ((inside, is_refused), (turned, "0.5" in value)):
        if counts:
            with pytest.raises(ScheduleError, match="whose order counts"):
                lowered(text, schedule)
        else:
            lowered(text, schedule)


SCATTER = LAST_ROW.replace('[I, K], "SS", "work") as [i, k]', '[K], "S", "work") as [k]').replace(
    "Y[k] = X[i", "Y[P[k]] = X[0"
)


def test_steps_that_are_promised_to_be_independent_may_change_places() -> None:
    with pytest.raises(ScheduleError, match="whose order counts"):
        lowered(SCATTER, _turn(0))
    lowered(SCATTER.replace("        Y[P", '        T.sp_iter_attr({"independent": True})\n        Y[P'), _turn(0))
