# SPDX-License-Identifier: Apache-2.0
"""Random programs under random schedules and formats, compared with numpy; `tests/fuzzing/programs.py` runs more."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import numpy as np
import pytest

import sparsetir
from each import FULL
from fences import Fences
from fuzzing.calls import Call
from fuzzing.generate import draw
from fuzzing.inputs import Inputs
from fuzzing.oracle import Oracle, Unclear
from fuzzing.programs import Run
from fuzzing.recipe import MODES, Recipe

pytestmark = pytest.mark.optimised

SEED, PROGRAMS = 1, 35 if FULL else 20
#: share of the programs that the package may refuse: stage-II schedules and formats do not serve every one
MOST_REFUSED = 0.3


@pytest.mark.slow
def test_random_programs_are_right() -> None:
    run = Run("all", SEED, cases=1 << 30, programs=PROGRAMS).run(jobs=1)
    assert not run.failures, f"{len(run.failures)} failures, printed above"
    assert run.counts["programs"] == PROGRAMS
    assert run.counts["refused"] <= MOST_REFUSED * PROGRAMS, run.refusals
    assert all(run.modes[mode, "right"] > 0 for mode in MODES), run.summary()
    assert run.counts["refused calls"] <= 0.1 * run.counts["cases"], run.refusals


@pytest.mark.slow
def test_the_oracle_agrees_with_the_interpreter() -> None:
    """Two evaluations that share nothing."""
    for number in range(40):
        program = draw(random.Random(f"oracle {number}"))
        func = sparsetir.parse(program.text)
        inputs = Inputs(program, number, 4)
        arrays = {b.name.lower(): inputs.args[b.name.lower()] for b in program.buffers if not b.scratch}
        try:
            expected = Oracle(program, inputs).run(arrays)
        except Unclear:
            continue
        found = sparsetir.interpret(func, inputs.args)
        for name, want in expected.items():
            got, want = found[name].reshape(want.shape).astype("float64"), want.astype("float64")
            np.testing.assert_array_equal(got, want, err_msg=f"{name} of\n{program.text}")


TEXT = """
@T.prim_func
def total(a: T.handle, y: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    O = T.dense_fixed(1)
    A = T.match_sparse_buffer(a, (I,), "float32")
    Y = T.match_sparse_buffer(y, (O,), "float32")
    with T.sp_iter([I], "R", "total") as [i]:
        Y[0] = Y[0] + A[i]
"""


@pytest.mark.parametrize(("expected", "is_wrong"), [(6.0, False), (7.0, True)])
def test_a_wrong_result_is_noticed_and_survives_json(expected: float, is_wrong: bool) -> None:
    arguments = {"a": np.array([1, 2, 3], "float32"), "y": np.zeros(1, "float32"), "n": 3}
    call = Call(arguments, {"y": np.array([expected])}, {"y": 0.0}, {}, "a call")
    recipe = Recipe(**json.loads(json.dumps(asdict(Recipe(TEXT)))))
    again = Call.from_json(json.loads(json.dumps(call.as_json())))
    assert bool(again.objections(recipe.build(), Fences())) == is_wrong
