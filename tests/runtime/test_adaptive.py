# SPDX-License-Identifier: Apache-2.0
"""Bound kernels that convert their matrix while they are called."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import time
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

import sparsetir
from fences import Fences
from sparsetir import formats, ops
from sparsetir.codegen.cache import variant, variant_with_padded_rows
from sparsetir.errors import ArgumentError
from sparsetir.formats import heuristics
from sparsetir.ir import effects
from sparsetir.ir.views import decode
from sparsetir.runtime import adaptive
from sparsetir.runtime.adaptive import AlignedOperand
from sparsetir.runtime.call_plan import PlanMismatch
from sparsetir.schedules import Registers, defaults
from sparsetir.transform.decompose import decompose_format
from sparsetir.utils.buffers import as_tensor
from sparsetir.utils.memory import MemoryLimitError

ROWS = 240


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for another format after a few calls, however short they are, and time few of them."""
    monkeypatch.setattr(adaptive, "TRIAL_CALLS", 2)
    monkeypatch.setattr(adaptive, "TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(adaptive, "MIN_ENTRIES", 1)
    monkeypatch.setattr(adaptive, "SAMPLED_SECONDS", 0.0)
    for name in ("COMPOSING", "CONVERSION", "SLICING", "GROUPING", "SAMPLING"):
        monkeypatch.setattr(heuristics, name, 0.0)


def blocks(dtype: str = "float32") -> Any:
    mask = sp.random_array((ROWS // 4, ROWS // 4), density=0.1, rng=np.random.default_rng(0))
    A = sp.csr_array(sp.kron(mask, np.ones((4, 4))), dtype=dtype)
    A.data = np.random.default_rng(1).standard_normal(A.nnz).astype(dtype)
    return A


def operand(op: str, dtype: str = "float32", columns: int = 32) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    if op == "spmv":
        return {"x": rng.standard_normal(ROWS).astype(dtype)}
    return {"B": rng.standard_normal((ROWS, columns)).astype(dtype)}


def settle(candidate: Any, seconds: float) -> None:
    """Set the time of a candidate's calls, in place of a clock; it is not called again in the trial."""
    candidate.seconds[:], candidate.calls = [seconds] * 5, 10**6


def other_wins(bound: Any, *, is_faster: bool) -> None:
    for trial in bound.adaptive.trials.values():
        settle(trial.candidates[0], 1.0 if is_faster else 1e-9)


def until_converted(bound: Any, arguments: dict[str, Any]) -> None:
    for _ in range(50):
        bound(**arguments)
        if bound.adaptive.converter is not None:
            bound.adaptive.converter.join()
        if bound.over_another is not None:
            return
    pytest.fail(bound.explain())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["spmm", "spmv"])
@pytest.mark.parametrize("is_faster", [True, False])
def test_results_before_while_and_after_formats_are_compared(op: str, dtype: str, is_faster: bool) -> None:
    A, arguments = blocks(dtype), operand(op, dtype)
    bound = sparsetir.build(getattr(ops, op)(dtype)).bind(A=A)
    expected = A @ next(iter(arguments.values()))
    until_converted(bound, arguments)
    for number in range(20):
        np.testing.assert_allclose(bound(**arguments), expected, rtol=1e-4, atol=1e-4)
        if number == 2:
            other_wins(bound, is_faster=is_faster)
    assert (bound.over_another is not None) is is_faster
    assert "kept" in bound.explain()
    np.testing.assert_allclose(bound(**arguments), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("op", ["spmm", "spmv"])
@pytest.mark.parametrize("change", ["sign of all", "one value", "zero's sign", "back and forth"])
@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_values_that_change_in_place_are_seen(op: str, change: str, after: int) -> None:
    """At any time: before another format is looked for, while it is converted, on trial and in use."""
    A, arguments = blocks(), operand(op)
    bound = sparsetir.build(getattr(ops, op)()).bind(A=A)
    if after:
        until_converted(bound, arguments)
    for number in range(24):
        if number >= after:
            if change == "sign of all":
                A.data *= -1
            elif change == "one value":
                A.data[number] += 1
            elif change == "zero's sign":
                A.data[:] = np.where(A.data == 0, -A.data, 0)
            else:
                A.data[:] = A.data[::-1].copy()
        np.testing.assert_allclose(bound(**arguments), A @ next(iter(arguments.values())), rtol=1e-4, atol=1e-4)
        if after > 1 and number == 2:
            other_wins(bound, is_faster=True)


@pytest.mark.usefixtures("eager")
def test_a_conversion_that_ends_within_a_call_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would take checksums of other values than those on trial."""
    jobs: list[Any] = []
    monkeypatch.setattr(adaptive, "in_background", lambda *job: (jobs.append(job), threading.Thread())[1])
    A, arguments = blocks(), operand("spmv")
    bound, count = sparsetir.build(ops.spmv()).bind(A=A), adaptive.Adaptive._count

    def ends_before(self: Any, given: Any, seconds: float, calls: int = 1) -> None:
        if len(jobs) == 1 and not self.others and self.calls + 1 >= self.next_calls:
            jobs[0][0](*jobs[0][1:])
        count(self, given, max(seconds, 1.0), calls)  # so that time is no reason against another one

    monkeypatch.setattr(adaptive.Adaptive, "_count", ends_before)
    for _ in range(24):
        A.data *= -1
        np.testing.assert_allclose(bound(**arguments), A @ arguments["x"], rtol=1e-4, atol=1e-4)
    assert len(jobs) == 1


@pytest.mark.usefixtures("eager")
def test_what_cannot_change_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    A, arguments = blocks(), operand("spmm")
    A.data.flags.writeable = False
    monkeypatch.setattr(adaptive, "checksum", lambda _array: pytest.fail("read"))
    bound = sparsetir.build(ops.spmm()).bind(A=A)
    until_converted(bound, arguments)
    for _ in range(8):
        np.testing.assert_allclose(bound(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)
    seen_by_others = np.ones(3)
    view = seen_by_others[:]
    view.flags.writeable = False
    assert not adaptive.is_frozen(view)
    assert adaptive.is_frozen(np.frombuffer(b"12345678"))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("fastest", [0, 1])
def test_the_fastest_of_several_padded_formats_is_kept(monkeypatch: pytest.MonkeyPatch, fastest: int) -> None:
    """Their kernels are guarded against values that are not finite."""
    padded = [formats.bsr(8, 8), formats.bsr(16, 1)]
    found = [heuristics.Conversion(format, 0.0) for format in padded]
    A, arguments = blocks(), operand("spmm")
    bound = sparsetir.build(ops.spmm(), expected_calls=10**9).bind(A=A)
    monkeypatch.setattr("sparsetir.kernel_factory._conversions_for", lambda *_, **__: found)
    monkeypatch.setattr(adaptive, "SHORT_CALL", 0.0)
    bound.adaptive.ask(arguments)
    bound(**arguments)
    (trial,) = bound.adaptive.trials.values()
    for candidate in trial.candidates:
        settle(candidate, 1e-9 if candidate.name == repr(padded[fastest]) else 1.0)
        assert candidate.name in ("as passed", *map(repr, padded))
    np.testing.assert_allclose(bound(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)
    assert repr(padded[fastest]) in bound.adaptive.description
    arguments["B"][3, 4] = np.inf
    np.testing.assert_allclose(bound(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eager")
def test_each_shape_has_a_trial_of_its_own() -> None:
    A = blocks()
    bound = sparsetir.build(ops.spmm()).bind(A=A)
    for columns, is_faster in ((32, True), (8, False), (64, True)):
        arguments = operand("spmm", columns=columns)
        until_converted(bound, arguments)
        for number in range(20):
            np.testing.assert_allclose(bound(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)
            if number == 2:
                other_wins_for(bound, columns, is_faster=is_faster)
    assert [line.split("kept ")[1].split("(")[0] for line in bound.explain().splitlines()[-3:]] == [
        "bsr",
        "as passed",
        "bsr",
    ]
    assert list(bound.adaptive.trials.values()) == [True, False, True]


@pytest.mark.parametrize("first", ["slow", "fast"])
def test_calls_after_a_compilation_do_not_decide_a_trial(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer, as a compilation leaves nothing of the operands in the caches."""
    now, cold = [0.0], [0]
    monkeypatch.setattr(adaptive.time, "perf_counter", lambda: now[0])

    def lasting(seconds: float) -> Any:
        compiled: list[bool] = []

        def call() -> None:
            if not compiled:
                compiled.append(True)
                now[0] += 100.0
                cold[0] = 5
            now[0] += seconds * (2 if cold[0] else 1)
            cold[0] = max(cold[0] - 1, 0)

        return call

    candidates = {"slow": lasting(2.0), "fast": lasting(1.5)}
    trial = adaptive.Trial([(name, candidates[name]) for name in sorted(candidates, key=lambda name: name != first)])
    calls = 0
    while trial.best is None:
        trial()
        calls += 1
    assert trial.winner == "fast"
    assert calls == 2 * (1 + 2 * adaptive.BURST)


@pytest.mark.parametrize("order", [1, -1])
def test_a_candidate_that_fails_does_not_win_a_trial(order: int) -> None:
    def fails() -> None:
        raise MemoryError("no memory for the copy")

    trial = adaptive.Trial([("as passed", lambda: time.sleep(1e-3)), ("copied", fails)][::order])
    for _ in range(40):
        with contextlib.suppress(MemoryError):
            (trial.best or trial)()
    assert trial.winner == "as passed"


def test_wrong_arguments_decide_no_trial() -> None:
    def lasting(seconds: float) -> Any:
        def call(is_right: bool) -> None:
            if not is_right:
                raise ValueError("expected other arguments")
            time.sleep(seconds)

        return call

    trial = adaptive.Trial([("slow", lasting(2e-3)), ("fast", lasting(1e-3))])
    for _ in range(13):
        with pytest.raises(ValueError, match="other arguments"):
            trial(False)
    while trial.best is None:
        trial(True)
    assert trial.winner == "fast"


@pytest.mark.parametrize("columns", [16, 32])
def test_temporaries_with_the_identity_of_an_aligned_operand_are_copied(columns: int) -> None:
    copied: list[int] = []
    called = adaptive.AlignedOperand(lambda _: None, 0, lambda operand: (lambda _: copied.append(1), operand.shape[-1]))
    called(_at(0, np.ones((64, columns), "float32")))
    called(_at(16, np.ones((64, columns), "float32")))
    called.trials[columns][0].best = called.trials[columns][0].candidates[1].call
    copied.clear()
    for _ in range(9):
        called(_at(0, np.ones((64, columns), "float32")))
        called(_at(16, np.ones((64, columns), "float32")))
    assert len(copied) == 9


OTHERS = (formats.bsr(4, 4), formats.ell(), formats.sell(4, 8))


def over_each(kernel: Any, fixed: Any, arguments: Any, **_how: Any) -> list[Any]:
    """Convert to three formats, whatever they are worth."""
    parts = [decompose_format(kernel.func, {"A": format}) for format in OTHERS]
    return [sparsetir.build(part).bind(**fixed) for part in parts]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize("winner", ["as passed", *map(repr, OTHERS)])
def test_the_fastest_of_several_is_kept(winner: str, is_announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "SHORT_CALL", 0.0)
    A = blocks()
    bound = sparsetir.build(ops.spmm(), expected_calls=10**9 if is_announced else None).bind(A=A)
    bound.kernel.convert = over_each
    for columns in (32, 8, 32, 8):
        arguments = operand("spmm", columns=columns)
        until_converted(bound, arguments) if not bound.adaptive.is_settled else None
        for _ in range(40):
            np.testing.assert_allclose(bound(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)
            for trial in bound.adaptive.trials.values():
                for candidate in getattr(trial, "candidates", ()):
                    candidate.seconds[:] = [0.0 if candidate.name == winner else 1.0] * len(candidate.seconds)
    assert bound.explain().endswith(f"kept {winner}")
    assert [repr(other.formats["A"]) for other in map(kernel_of, bound.over_others)] == [winner] * (
        winner != "as passed"
    )


def kernel_of(bound: Any) -> Any:
    return bound.kernel


@pytest.mark.usefixtures("eager")
def test_a_format_with_other_results_is_left_out_alone() -> None:
    A, arguments = blocks(), operand("spmm")

    def one_is_wrong(kernel: Any, fixed: Any, arguments: Any, **how: Any) -> list[Any]:
        right = over_each(kernel, fixed, arguments, **how)
        return [*over_each(kernel, {"A": 2 * fixed["A"]}, arguments)[:1], right[1]]

    bound = sparsetir.build(ops.spmm()).bind(A=A)
    bound.kernel.convert = one_is_wrong
    until_converted(bound, arguments)
    assert "results over bsr(r=4, c=4) differ: it is not used" in bound.explain()
    for _ in range(12):
        np.testing.assert_allclose(bound(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)


def other_wins_for(bound: Any, columns: int, *, is_faster: bool) -> None:
    for key, trial in bound.adaptive.trials.items():
        if isinstance(trial, adaptive.Trial) and key[0][1][-1] == columns:
            settle(trial.candidates[0], 1.0 if is_faster else 1e-9)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("reason", ["deterministic", "switch", "schedule", "memory"])
def test_a_matrix_stays_as_it_was_passed(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    A, arguments, facts = blocks(), operand("spmm"), {}
    if reason == "switch":
        monkeypatch.setenv("SPARSETIR_CONVERT", "0")
    elif reason == "deterministic":
        facts = {"deterministic": True}
    elif reason == "schedule":
        facts = {"schedule": sparsetir.Choices(tile=16)}
    bound = sparsetir.build(ops.spmm(), **facts).bind(A=A)
    if reason == "memory":

        def full(*_arguments: Any, **_named: Any) -> Any:
            raise MemoryLimitError("no room for another format")

        bound.kernel.convert = full
    first = bound(**arguments)
    for _ in range(8):
        np.testing.assert_array_equal(bound(**arguments), first)
        if bound.adaptive is not None and bound.adaptive.converter is not None:
            bound.adaptive.converter.join()
    assert bound.over_another is None
    assert bound.explain().startswith("converting failed: no room" if reason == "memory" else "as passed")


def test_a_format_is_kept_or_found_not_both() -> None:
    with pytest.raises(ArgumentError, match="deterministic=True keeps the format"):
        sparsetir.build(ops.spmm(), expected_calls=10, deterministic=True)


@pytest.mark.usefixtures("eager")
def test_two_threads_call_while_the_matrix_is_converted() -> None:
    A, arguments, faults = blocks(), operand("spmm"), []
    expected = A @ arguments["B"]
    bound = sparsetir.build(ops.spmm()).bind(A=A)

    def call() -> None:
        for _ in range(200):
            result = bound(**arguments)
            if not np.allclose(result, expected, rtol=1e-4, atol=1e-4):
                faults.append(result)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("calls", [1, 4, 20])
def test_a_bound_kernel_is_freed_when_it_is_dropped(calls: int) -> None:
    A, arguments = blocks(), operand("spmm")
    bound = sparsetir.build(ops.spmm()).bind(A=A)
    for number in range(calls):
        bound(**arguments)
        if bound.adaptive.converter is not None:
            bound.adaptive.converter.join()
        if number == 6:
            other_wins(bound, is_faster=True)
    gc.collect()
    gc.disable()
    try:
        dropped = weakref.ref(bound)
        del bound
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("eager")
def test_a_fork_waits_for_conversions() -> None:
    """A child could not compile where a thread of its parent held the locks of the compiler."""
    A, arguments = blocks(), operand("spmm")
    bound = sparsetir.build(ops.spmm()).bind(A=A)
    for _ in range(3):
        bound(**arguments)
    converter = bound.adaptive.converter
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kernel = sparsetir.build(ops.spmm("float64"), schedule=sparsetir.Choices(tile=2))  # not in any cache
            status = int(kernel(A=A.astype("float64"), B=np.ones((ROWS, 3))).shape != (ROWS, 3))
        finally:
            os._exit(status)
    assert converter is None or not converter.is_alive()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_allclose(bound(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eager")
def test_pickled_while_a_format_is_on_trial() -> None:
    A, arguments = blocks(), operand("spmm")
    bound = sparsetir.build(ops.spmm()).bind(A=A)
    until_converted(bound, arguments)
    copied = pickle.loads(pickle.dumps(bound))
    for _ in range(6):
        np.testing.assert_allclose(copied(**arguments), A @ arguments["B"], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eager")
def test_infinities_reach_the_same_results() -> None:
    """Blocks store zeros, which make NaN of infinities; the rows as passed do not."""
    A, arguments = blocks(), operand("spmm")
    A.data[::7] = 0
    A.eliminate_zeros()
    bound = sparsetir.build(ops.spmm()).bind(A=A)
    until_converted(bound, arguments)
    for number in range(10):
        B = arguments["B"].copy()
        B[number] = np.inf
        with np.errstate(invalid="ignore"):
            expected = A @ B
        np.testing.assert_allclose(bound(B=B), expected, rtol=1e-4, atol=1e-4)
        if number == 2:
            other_wins(bound, is_faster=True)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_format_is_looked_for_only_where_the_announced_calls_take_long(calls: int) -> None:
    """Looking for a format and writing a program over it takes longer than a few calls with a small matrix."""
    A, arguments = blocks(), operand("spmv")
    bound = sparsetir.build(ops.spmv(), expected_calls=calls).bind(A=A)
    looked: list[int] = []
    bound.kernel.convert = lambda *_, **__: looked.append(1)
    for _ in range(3):
        np.testing.assert_allclose(bound(**arguments), A @ arguments["x"], rtol=1e-4, atol=1e-4)
    assert not looked
    assert bound.explain() == f"no other format pays within {calls} calls"


@pytest.mark.usefixtures("eager")
def test_more_calls_than_were_announced_are_counted_as_if_none_had_been(monkeypatch: pytest.MonkeyPatch) -> None:
    A, arguments = blocks(), operand("spmv")
    bound = sparsetir.build(ops.spmv(), expected_calls=3).bind(A=A)
    with monkeypatch.context() as patch:
        patch.setattr(heuristics, "is_worth_looking", lambda *_: False)
        for _ in range(4):
            np.testing.assert_allclose(bound(**arguments), A @ arguments["x"], rtol=1e-4, atol=1e-4)
    assert bound.explain() == "no other format pays within 3 calls"
    until_converted(bound, arguments)
    other_wins(bound, is_faster=True)
    for factor in (1, 2):
        A.data *= factor
        np.testing.assert_allclose(bound(**arguments), A @ arguments["x"], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("op", ["spmm", "spmv"])
def test_a_bound_result_is_written_by_calls_only(op: str) -> None:
    """A conversion that tries formats on a thread would write the results of an earlier call to it."""
    A, arguments = blocks(), operand(op)
    expected = A @ next(iter(arguments.values()))
    out = {"C" if op == "spmm" else "y": np.zeros_like(expected)}
    bound = sparsetir.build(getattr(ops, op)()).bind(A=A, **out)
    for _ in range(6):
        assert bound(**arguments) is next(iter(out.values()))
        np.testing.assert_allclose(next(iter(out.values())), expected, rtol=1e-4, atol=1e-4)
    assert bound.adaptive is None
    assert bound.explain().endswith("because a result is bound, which a background thread must not write to")


@pytest.mark.parametrize("seconds", [1e-6, 1e-3])
def test_short_calls_are_timed_once_in_several(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[float, int]] = []

    class Counter:
        others, is_settled = (), False

        def _count(self, _arguments: Any, seconds: float, calls: int) -> None:
            counted.append((seconds, calls))

    clock = iter(range(1000))
    monkeypatch.setattr(adaptive.time, "perf_counter", lambda: next(clock) * seconds)
    run = adaptive._CountedRun(Counter(), lambda _arguments: "result")
    assert [run({}) for _ in range(33)] == ["result"] * 33
    assert sum(calls for _, calls in counted) == 33
    assert sum(seconds for seconds, _ in counted) == pytest.approx(33 * seconds)
    assert len(counted) == (33 if seconds > adaptive.SHORT_CALL else 3)


# ---------------------------------------------------------------- operands that begin within a cache line


def _at(offset: int, values: np.ndarray) -> np.ndarray:
    """A copy that begins so many bytes behind a cache line."""
    memory = np.empty(values.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    copy = memory[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def _gathering(rows: int = 3000, feat: int = 16) -> tuple[sp.csr_array, np.ndarray]:
    rng = np.random.default_rng(0)
    A = sp.random_array((rows, rows), density=12 / rows, format="csr", dtype="float32", rng=rng)
    return A, rng.standard_normal((rows, feat), dtype=np.float32)


@pytest.mark.parametrize("is_bound", [False, True])
def test_unaligned_operands_of_changing_values_give_the_products(is_bound: bool) -> None:
    A, B = _gathering()
    kernel = sparsetir.build(sparsetir.ops.spmm())
    call = kernel.bind(A=A) if is_bound else lambda B: kernel(A=A, B=B)
    for n in range(16):
        for offset in (16, 0, 4):
            given = _at(offset, B + n)
            np.testing.assert_allclose(call(B=given), A @ given, rtol=1e-3, atol=1e-3)
    narrow = _at(16, B[:, :8])
    np.testing.assert_allclose(call(B=narrow), A @ narrow, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("slow", ["as passed", "copied"])
def test_an_unaligned_operand_is_copied_only_where_calls_are_faster(slow: str) -> None:
    seen: list[int] = []

    def function(_first: int, operand: np.ndarray) -> None:
        seen.append(operand.ctypes.data % 64)
        if (seen[-1] == 0) == (slow == "copied"):
            time.sleep(2e-3)

    called = AlignedOperand(function, 1, lambda operand: (function, operand.shape[-1]))
    unaligned = _at(16, np.ones(64))
    while called.trials.get(64, (None,))[0] is None or called.trials[64][0].best is None:
        called(0, unaligned)
    assert {*seen} == {0, 16}
    seen.clear()
    for _ in range(3):
        called(0, unaligned)
    assert seen == [16 if slow == "copied" else 0] * 3


def test_two_threads_copy_an_unaligned_operand_apart() -> None:
    def function(operand: np.ndarray) -> None:
        first = operand[0, 0]
        time.sleep(1e-4)
        results.append(bool((operand[:, :30] == first).all()))

    results: list[bool] = []
    called = AlignedOperand(function, 0, lambda _: (function, 32))
    called(_at(16, np.zeros((512, 30))))
    called.trials[30][0].best = called.trials[30][0].candidates[1].call
    threads = [
        threading.Thread(target=lambda n=n: [called(_at(16, np.full((512, 30), float(n)))) for _ in range(40)])
        for n in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 81
    assert all(results)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8"])
@pytest.mark.parametrize(("op", "gathered"), [(ops.spmm, "b"), (ops.sddmm, "y")])
def test_gaps_between_rows_do_not_change_results(op: Any, gathered: str, dtype: str) -> None:
    rng, rows = np.random.default_rng(3), 40
    item = np.dtype(getattr(ml_dtypes, dtype, dtype))
    draw = lambda *shape: rng.integers(-3, 4, shape).astype(item)  # noqa: E731
    pattern = sp.random_array((rows, rows), density=0.2, format="csr", rng=rng)
    kernel = sparsetir.build(op(dtype=dtype))
    (result,) = kernel.signature.outputs
    for columns in (1, 5, 17, 30, 63, 90):
        dense = draw(rows, columns)
        padded = np.full((rows, -(-dense[:1].nbytes // 64) * 64 // item.itemsize), 7).astype(item)
        if item.kind not in "iu":
            padded[...] = np.nan
        padded[:, :columns] = dense
        given = {n: draw(pattern.nnz) for n in "as"} | {n: draw(rows, columns) for n in "bxy"}
        given |= {"indptr": pattern.indptr, "indices": pattern.indices, "m": rows, "n": rows, "nnz": pattern.nnz}
        given["feat"] = columns
        sizes = {"feat": columns} if columns <= 64 else None
        tile = {"tile": defaults.least_power(columns)} if sizes and columns > 1 else {}
        on_padded = variant_with_padded_rows(kernel.compiled, {gathered: padded.shape[1]}, sizes, **tile)
        assert on_padded is not None
        results = []
        for function, operand in ((variant(kernel.compiled, sizes, **tile), dense), (on_padded, padded)):
            given[result] = np.zeros((rows, columns) if op is ops.spmm else pattern.nnz, item)
            given[gathered] = operand
            ready = [given[p.name] for p in kernel.signature.params]
            function(*(as_tensor(value) if isinstance(value, np.ndarray) else value for value in ready))
            results.append(given[result].astype(complex))
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("index", ["k * 2", "k * 4", "k + 3", "k + feat", "feat - 1 - k", "k"])
@pytest.mark.parametrize("feat", [5, 17, 33])
def test_no_lane_reads_behind_the_last_row(index: str, feat: int) -> None:
    text = """@T.prim_func
def shifted(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
            m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_all = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    K_all = T.dense_fixed(feat * 4)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_all, K_all), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "shifted") as [i, j, k]:
        with T.init():
            C[i, k] = T.float32(0)
        C[i, k] = C[i, k] + A[i, j] * B[j, INDEX]
"""
    kernel, n = sparsetir.build(sparsetir.parse(text.replace("INDEX", index))), 8
    B = np.arange(n * 4 * feat, dtype=np.float32).reshape(n, -1)
    padded = np.full((n, -(-4 * feat // 16) * 16), np.nan, np.float32)
    padded[:, : 4 * feat] = B
    changes = {"tile": defaults.least_power(feat)}
    called = variant_with_padded_rows(kernel.compiled, {"b": padded.shape[1]}, {"feat": feat}, **changes)
    assert called is not None
    C, fences = np.zeros((1, feat), np.float32), Fences()
    given = {"a": np.ones(1, np.float32), "b": fences.fenced(padded), "c": C, "m": 1, "n": n, "nnz": 1, "feat": feat}
    given |= {"indptr": np.array([0, 1], np.int32), "indices": np.array([n - 1], np.int32)}
    called(*(given[p.name] for p in kernel.signature.params))
    k = np.arange(feat)
    np.testing.assert_array_equal(C[0], B[-1, eval(index, {"k": k, "feat": feat})])


def test_kernels_share_the_memory_of_copies() -> None:
    seen: list[int] = []
    adaptive._spare.clear()
    for columns in (30, 17, 30):
        called = AlignedOperand(seen.append, 0, lambda operand: (lambda copy: seen.append(copy.ctypes.data), 32))
        called.trials[columns] = called._trial(np.zeros((10, columns)))
        called.trials[columns][0].best = called.trials[columns][0].candidates[1].call
        called(np.zeros((10, columns)))
    assert len({*seen}) == 1
    assert len(adaptive._spare) == 1


@T.prim_func
def _scattered(
    a: T.handle,
    b: T.handle,
    c: T.handle,
    indptr: T.handle,
    indices: T.handle,
    m: T.int32,
    n: T.int32,
    nnz: T.int32,
    feat: T.int32,
) -> None:
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_all = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, K), "float32")
    C = T.match_sparse_buffer(c, (J_all, K), "float32")
    with T.sp_iter([I, J, K], "RRS", "scattered") as [i, j, k]:
        C[j, k] = C[j, k] + A[i, j] * B[i, k]


def test_a_gathered_result_is_not_copied() -> None:
    A, B = _gathering()
    kernel = sparsetir.build(_scattered)
    for offset in [16] * 16:
        C = _at(offset, np.zeros_like(B))
        kernel(A=A, B=B, C=C)
        np.testing.assert_allclose(C, A.T @ B, rtol=1e-3, atol=1e-3)


def test_which_operands_are_worth_a_copy() -> None:
    usage = effects.Usage.of(decode(sparsetir.ops.spmm()))
    indices = np.zeros(1 << 16, np.int32)
    worth = lambda rows, feat, entries=indices, bits=256, written=(): defaults.unaligned_operand(  # noqa: E731
        usage, {"indices": entries, "b": np.zeros((rows, feat), np.float32)}, Registers(32, bits), written
    )
    assert [feat for feat in (1, 4, 8, 16, 17, 28, 30, 32, 33, 48, 50, 64, 256) if worth(100, feat)] == [
        *(8, 16, 28, 30, 32, 48, 64),
    ]
    assert [feat for feat in (1, 4, 17, 30, 64, 128, 300) if worth(100, feat, bits=512)] == [17, 30, 64, 128]
    assert worth(1 << 14, 16)
    assert not worth(1 << 14, 16, written=("b",))
    assert not worth(1 << 15, 16)
    assert not worth(10, 16, indices[:100])
    lengths = [defaults.padded_length(np.zeros((9, feat), np.float32), Registers(32, 512)) for feat in (1, 5, 30, 64)]
    assert lengths == [0, 8, 32, 64]
    assert defaults.padded_length(np.zeros((9, 2, 15), np.float32), Registers(32, 512)) == 0


@pytest.mark.usefixtures("eager")
def test_values_that_one_thread_finds_changed_are_changed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has its plan over the other format when another thread finds out must not go on with it."""
    A, B = blocks(), np.random.default_rng(2).random((ROWS, 32), dtype="float32")
    bound = sparsetir.build(ops.spmm()).bind(A=A)
    while not bound.adaptive.others:
        bound(B=B)
        if bound.adaptive.converter is not None:
            bound.adaptive.converter.join()
    bound(B=B)
    for trial in bound.adaptive.trials.values():
        settle(trial.candidates[0], 1.0)  # as if calls over the matrix as it was passed took seconds
    for _ in range(20):
        bound(B=B)
    plan = bound.last[1]
    assert bound.over_another is not None
    assert plan is not None
    A.data *= 2
    np.testing.assert_allclose(bound(B=B), A @ B, rtol=1e-4, atol=1e-4)
    with pytest.raises(PlanMismatch):
        plan({"B": B})


def test_calls_of_another_class_do_not_count_plans_again() -> None:
    torch = pytest.importorskip("torch")
    # Rows for which no other loops are chosen, which would take the terms of a sum in another order.
    A = sp.diags_array([np.arange(1.0, 1493)] * 8, offsets=range(8), shape=(1492, 1500), dtype="float32").tocsr()
    bound, x = sparsetir.build(ops.spmv()).bind(A=A), np.ones(1500, "float32")
    number = bound(x=x), bound(x=x)
    t = torch.from_numpy(x)
    for _ in range(1200):
        bound(x=t)
    np.testing.assert_array_equal(bound(x=x), number[0])
