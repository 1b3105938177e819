# SPDX-License-Identifier: Apache-2.0
"""Budgets in seconds are finite and not negative, wherever they are passed: nothing measures for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import ir, relax

import sparsetir
import sparsetir.relax as srelax
from sparsetir import formats, ops
from sparsetir.cli import main
from sparsetir.codegen.calibration import calibrate
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.tuning.train.collect import collect
from sparsetir.utils.arguments import as_seconds
from sparsetir.workloads.ceilings import measure_roofline
from sparsetir.workloads.timing import choose, interleave

A = sp.csr_array(np.eye(4, dtype="float32"))
B = np.ones((4, 2), "float32")
BAD = (float("inf"), float("nan"), -float("inf"), 10**30, -1, -1e-9, True, "1", 1j, np.ones(2), [1])
NOT_ZERO = {"tune_sparse", "tune_many", "Expression.tune", "compute", "relax.build", "SparsifyWeights", "calibrate"}


def timed(kernel: Any) -> Callable[[Any], Any]:
    """The time of a kernel of `ops.spmm`, measured for so many seconds."""
    return lambda seconds: kernel.time(seconds=seconds, A=A, B=B)


def spmm_over_ell() -> Any:
    return sparsetir.build(sparsetir.decompose_format(ops.spmm(), {"A": formats.ell()}))


def model() -> ir.IRModule:
    """A model that returns its argument."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(x)
        builder.emit_func_output(out)
    return builder.get()


def search(**options: Any) -> Any:
    return sparsetir.tune_sparse(ops.spmm(), {"A": A, "B": B}, **{"max_trials": 0, **options})


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "Kernel.time": lambda s: timed(sparsetir.build(ops.spmm()))(s),
    "BoundKernel.time": lambda s: sparsetir.build(ops.spmm()).bind(A=A).time(seconds=s, B=B),
    "ComposedKernel.time": lambda s: timed(spmm_over_ell())(s),
    "SparseOutputKernel.time": lambda s: sparsetir.build(ops.spgemm()).time(seconds=s, A=A, B=A),
    "Expression.tune": lambda s: sparsetir.einsum_expression("ij,jk->ik", A, B).tune(seconds=s),
    "tune_sparse": lambda s: search(max_seconds=s),
    "tune_sparse, timeout": lambda s: search(timeout=s),
    "tune_many": lambda s: sparsetir.tune_many([(ops.spmm(), {"A": A, "B": B})], seconds=s),
    "tune_many, timeout": lambda s: sparsetir.tune_many([(ops.spmm(), {"A": A, "B": B})], seconds=1, timeout=s),
    "compute": lambda s: sparsetir.compute(sparsetir.lazy(A) @ B, tune=s),
    "relax.build": lambda s: srelax.build(model(), tune_seconds=s),
    "SparsifyWeights": lambda s: srelax.SparsifyWeights(max_seconds=s),
    "calibrate": lambda s: calibrate(seconds=s),
    "collect": lambda s: collect([], [], None, most=1, seconds=s),  # type: ignore[arg-type]
    "collect, budget": lambda s: collect([], [], None, most=1, budget=s),  # type: ignore[arg-type]
    "measure_roofline": lambda s: measure_roofline(seconds=s, rounds=1),
    "choose": lambda s: choose({"one": lambda _: 1.0}, seconds=s),
    "interleave": lambda s: interleave({"one": int}, rounds=1, burst_seconds=s, rest=0),
    "interleave, rest": lambda s: interleave({"one": int}, rounds=1, burst_seconds=0, rest=s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_seconds_are_finite_and_not_negative(name: str) -> None:
    for seconds in (*BAD, *[0] * (name in NOT_ZERO)):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"finite number of seconds.*, got .*\. Pass"):
            FUNCTIONS[name](seconds)


@pytest.mark.parametrize("name", ["Kernel.time", "SparseOutputKernel.time", "choose", "interleave", "interleave, rest"])
def test_no_time_is_a_time(name: str) -> None:
    FUNCTIONS[name](0)


def test_seconds_are_floats() -> None:
    values = (0, 2, 0.5, np.float32(0.5), np.int8(3), np.array(1.5))
    assert [as_seconds(v, "seconds") for v in values] == [0.0, 2.0, 0.5, 0.5, 3.0, 1.5]


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "x"])
@pytest.mark.parametrize(
    "options",
    [
        ["bench", "--rest"],
        ["bench", "--tune"],
        ["calibrate", "--seconds"],
        ["demo", "--seconds"],
        ["tune", "--seconds"],
    ],
)
def test_options_in_seconds(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, text]) == 2
    assert options[-1] in capsys.readouterr().err
