# SPDX-License-Identifier: Apache-2.0
"""The result of a search is not behind what nobody tuned, however noisy the machine is and whatever the trials said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi

from sparsetir import formats, ops
from sparsetir.build import build
from sparsetir.runtime.validation import GuardedBound
from sparsetir.schedules import Choices
from sparsetir.tuning import Record, measure
from sparsetir.tuning.loop import BEHIND, Outcome, at_most, judged, select_final
from sparsetir.tuning.session import Session, compared, full_cost
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.variants import usual_choices

BLOCKS = formats.bsr(4, 4)
ANNOUNCED = Candidate(Choices(), BLOCKS)
OTHERS = [Candidate(Choices(tile=tile), format) for tile in (8, 16, 32, 64) for format in (None, BLOCKS)][:7]


@pytest.mark.parametrize(("op", "feat"), [("spmm", 8), ("spmm", 48), ("spmv", 0)])
def test_what_is_announced_is_what_is_built_for_many_calls(monkeypatch: pytest.MonkeyPatch, op: str, feat: int) -> None:
    """The format and every choice, which suit the arguments as they are stored in it."""
    monkeypatch.setattr("sparsetir.tuning.session.ANNOUNCED", 10**9)
    rng = np.random.default_rng(0)
    A = sp.csr_array(np.kron(rng.random((12, 12)) < 0.4, np.ones((4, 4))), dtype="float32")
    dense = rng.random((48, feat) if feat else 48).astype("float32")
    inputs = {"A": A, ("B" if feat else "x"): dense}
    program = getattr(ops, op)()
    bound = build(program, expected_calls=10**9).bind(A=A)
    bound(**{name: value for name, value in inputs.items() if name != "A"})
    over = bound.over_another
    with closing(Session(program, inputs, None)) as session:
        assert over is not None
        assert session.announced is not None
        over = over.bound if isinstance(over, GuardedBound) else over
        kernel = over.kernel
        assert repr(kernel.formats["A"]) == repr(session.announced.format)
        args = kernel.kernel.prepare({n: v for n, v in inputs.items() if n != "A"}, over.bound._merged())
        built = usual_choices(kernel.kernel, SimpleNamespace(args=args))
        form = session.evaluator.variants(session.announced.format).form
        loops = [form.shared_loops(choices) for choices in (built, session.announced.choices)]
        assert tvm_ffi.structural_equal(loops[0][0], loops[1][0])


@dataclass
class Machine:
    """Kernels with true times, on a machine whose pace and whose noise change."""

    rng: np.random.Generator
    true: Mapping[Candidate | None, float]
    noise: float
    spikes: float

    def __post_init__(self) -> None:
        self.turn, self.pace = 0, 1.0

    def run(self, name: Candidate | None, _seconds: float = 0.0) -> float:
        """Seconds that a turn finds."""
        self.turn += 1
        if self.turn % 3 == 0:
            self.pace = float(np.exp(self.rng.normal(0.0, 0.2)))
        disturbed = self.rng.uniform(1.2, 3.0) if self.rng.random() < self.spikes else 1.0
        return self.true[name] * self.pace * disturbed * float(np.exp(self.rng.normal(0.0, self.noise)))


class Searched:
    """What a session is to the last comparison: candidates get lost in its workers now and then."""

    def __init__(self, machine: Machine, announced: Candidate | None, losses: float) -> None:
        self.machine, self.announced, self.losses = machine, announced, losses
        self.pool = self

    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        found = measure.duel({name: partial(self.machine.run, name) for name in (None, *candidates)})
        lost = [c for c in candidates if self.machine.rng.random() < self.losses]
        return {c: float("inf") if c in lost[::2] else t for c, t in found.items() if c not in lost[1::2]}

    def variant(self, candidate: Candidate) -> Any:
        return SimpleNamespace(built=lambda: candidate)

    def confirm(self, kernels: Mapping[Candidate, Any], *how: Any) -> Outcome:
        return select_final({name: partial(self.machine.run, name) for name in (None, *kernels)}, *how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "spikes"), [(0.01, 0.0), (0.05, 0.1), (0.2, 0.2)], ids=["quiet", "busy", "overloaded"]
)
def test_the_result_is_not_behind_what_nobody_tuned(noise: float, spikes: float) -> None:
    behind, gained, could = 0, 0, 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        names = [ANNOUNCED, *OTHERS]
        true = {None: 1.0, **{c: float(np.exp(rng.uniform(-0.7, 0.7))) for c in names}}
        announced = ANNOUNCED if seed % 4 else None
        told = [Record(c.choices, c.format and repr(c.format), seconds=rng.uniform(0.2, 5.0)) for c in names]
        machine = Machine(rng, true, noise, spikes)
        times, found = compared(Searched(machine, announced, 0.2), told, full_cost)  # type: ignore[arg-type]
        untuned = min(true[None], true[announced])
        behind += true[found] > BEHIND * untuned
        could += min(true.values()) < 0.9 * untuned
        gained += true[found] < 0.95 * untuned
        assert found is None or found in times
    assert behind <= 0.02 * 300
    assert gained >= could / 2


def test_seconds_of_a_conversion_count_against_an_incumbent() -> None:
    times = {None: np.full(5, 1.0), ANNOUNCED: np.full(5, 0.5)}
    assert judged(times, [None, ANNOUNCED]).chosen == ANNOUNCED
    assert judged(times, [None, ANNOUNCED], {ANNOUNCED: 0.6}).chosen is None


def test_a_kernel_that_looks_faster_has_to_prove_it() -> None:
    """More rounds are taken, and it stays out if they do not tell either."""
    other, doubtful = OTHERS[0], cycle([0.5, 0.5, 2.0, 0.5, 2.0])
    rounds: list[float] = []

    def untuned(_seconds: float) -> float:
        rounds.append(1.0)
        return 1.0

    found = select_final({None: untuned, other: lambda _seconds: next(doubtful)})
    assert (found.chosen, found.is_sure, len(rounds)) == (None, False, measure.MOST_ROUNDS)
    rounds.clear()
    found = select_final({None: untuned, other: lambda _seconds: 0.9})
    assert (found.chosen, found.is_sure, len(rounds)) == (other, True, measure.ROUNDS)


def test_an_incumbent_that_fails_is_none() -> None:
    failed = np.full(5, np.inf)
    assert judged({None: np.full(5, 1.0), ANNOUNCED: failed}, [None, ANNOUNCED]).chosen is None
    assert judged({None: failed, ANNOUNCED: np.full(5, 1.0)}, [None, ANNOUNCED]).chosen == ANNOUNCED


@pytest.mark.parametrize("rounds", [5, 8, 13, 25])
def test_the_bound_of_a_median_holds(rounds: int) -> None:
    draws = np.random.default_rng(rounds).lognormal(0.0, 0.5, (2000, rounds))
    assert np.mean([at_most(each) < 1.0 for each in draws]) <= 0.06
