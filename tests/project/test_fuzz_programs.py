# SPDX-License-Identifier: Apache-2.0
"""The oracle of drawn programs against the interpreter, and what a wrong result looks like."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import numpy as np
import pytest

import sparsetir
from fences import Fences
from fuzzing.calls import Call
from fuzzing.generate import draw
from fuzzing.inputs import Inputs
from fuzzing.oracle import Oracle, Unclear
from fuzzing.recipe import Recipe


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
