# SPDX-License-Identifier: Apache-2.0
"""A sample of the cases of a test leaves no value of a parameter out."""

from __future__ import annotations

from itertools import product

import pytest

from each import sample


@pytest.mark.parametrize("of", [1, 2, 3, 100])
def test_each_value_is_in_a_sample(of: int) -> None:
    cases = [dict(zip("xyz", c, strict=True)) for c in product(range(5), ("a", "b", None), (1.0, True))]
    chosen = sample(cases, of)
    assert chosen == sorted(set(chosen))
    assert len(chosen) >= len(cases) / of
    for name in "xyz":
        assert {repr(cases[at][name]) for at in chosen} == {repr(case[name]) for case in cases}
    assert len(chosen) == max(-(-len(cases) // of), 5)  # as few as that takes, or one in so many
    assert sample(cases, of) == chosen


def test_single_cases_and_distinct_ones_are_kept() -> None:
    assert sample([{"x": 3}], 3) == [0]
    assert sample([{"x": n} for n in range(7)], 3) == list(range(7))
    assert sample([], 3) == []
