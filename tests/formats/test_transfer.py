# SPDX-License-Identifier: Apache-2.0
"""Models of one setting are judged on another, on matrices that no model saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from sparsetir.schedules import Choices
from sparsetir.tuning.records import Recording
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.train.evaluate import SHARES, WEIGHT, cells, transferred

TILES = [2**n for n in range(10)]
CANDIDATES = [Candidate(Choices(tile=tile)) for tile in TILES]


def case(matrix: str, threads: int) -> Recording:
    """A low tile is best on one thread, a high one on two."""
    seconds = {c: float(c.choices.tile if threads == 1 else TILES[-1] / c.choices.tile) for c in CANDIDATES}
    rows = {c: np.array([float(c.choices.tile)]) for c in CANDIDATES}
    return Recording(f"{matrix} {threads}", seconds, rows, ("tile",), matrix, threads=threads)


@dataclass
class Remembered:
    """Ranks as the setting did that most of its cases are of."""

    threads: int

    def predict(self, features: np.ndarray) -> np.ndarray:
        return -features[:, 0] if self.threads == 1 else features[:, 0]


def test_a_model_of_another_setting_is_as_wrong_as_its_records() -> None:
    cases = [case(f"m{n}", threads) for n, threads in product(range(10), (1, 2))]
    trained: list[Sequence[Recording]] = []

    def trainer(given: Sequence[Recording]) -> Remembered:
        trained.append(given)
        return Remembered(2 if sum(c.threads == 2 for c in given) > len(given) / 2 else 1)

    found = transferred(cases, trainer, "threads")
    assert list(found) == [1, 2]
    for ranked in found.values():
        assert list(ranked) == ["0% of its cases", "1% of its cases", "5% of its cases", "its own model"]
        assert all(len(ranks) == 10 for ranks in ranked.values())
        assert {r.pairs for r in ranked["0% of its cases"]} == {0.0}
        assert {r.pairs for r in ranked["its own model"]} == {1.0}
    # Two of ten matrices are left out of every model; a share of the other setting is one case at least.
    assert {len({c.matrix for c in given}) for given in trained} == {8}
    assert [sum(c.threads == 1 for c in given) for given in trained[: len(SHARES) + 1]] == [0, WEIGHT, WEIGHT, 8]
    assert [len(given) for given in trained[: len(SHARES) + 1]] == [8, 8 + WEIGHT, 8 + WEIGHT, 8]
    table = cells(found, "to another number of threads")
    assert table[1][:3] == ["1", "0% of its cases", "0.000"]
    assert [row[-1] for row in table[1:]] == ["0.002", "0.002", "0.002", "1.000"] * 2


def test_one_setting_is_carried_nowhere() -> None:
    assert transferred([case(f"m{n}", 1) for n in range(4)], lambda _cases: Remembered(1), "threads") == {}
    alone = [case("a", 1), case("b", 1), case("a", 2)]
    assert 2 not in transferred(alone, lambda _cases: Remembered(1), "threads")
