# SPDX-License-Identifier: Apache-2.0
"""Many cases in one test, where setting up costs more than a case; pairs or shares instead of whole products."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

FULL = "SPARSETIR_FULL" in os.environ


@contextlib.contextmanager
def on(case: object) -> Iterator[None]:
    """Say of which case an error is."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"on {case!r}: {error}") from error


def each(name: str, cases: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize`` of one argument, but in one test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(**fixtures: Any) -> None:
            for title, case in cases.items():
                with on(title):
                    test(**fixtures, **{name: case})

        signature = inspect.signature(test)
        left = [param for param in signature.parameters.values() if param.name != name]
        every.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return every

    return decorate


def pairwise(*families: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few of the product's elements, always the same: each two members of two families are in one of them.

    All of the product if SPARSETIR_FULL is set.
    """
    if FULL:
        return list(product(*families))
    pairs = [(a, b) for a, b in combinations(range(len(families)), 2)]
    left = {(a, b, x, y) for a, b in pairs for x in range(len(families[a])) for y in range(len(families[b]))}
    found = []
    every = list(product(*(range(len(family)) for family in families)))
    while left and every:
        best = max(every, key=lambda at: sum((a, b, at[a], at[b]) in left for a, b in pairs))
        left -= {(a, b, best[a], best[b]) for a, b in pairs}
        found.append(tuple(family[at] for family, at in zip(families, best, strict=True)))
    return found


def sample(cases: Sequence[Mapping[str, Any]], of: int) -> list[int]:
    """Places of one case in `of`, always the same, or of more: each value of each parameter is in one of them.

    Those come first that bring most values, and most pairs of values, for the first time.
    """
    bare = [{(name, _bare(value)) for name, value in case.items()} for case in cases]
    pairs = [values | set(combinations(sorted(values), 2)) for values in bare]
    left = sorted(range(len(cases)), key=lambda at: zlib.crc32(b"%d" % at))
    found: list[int] = []
    seen, every = set[Any](), set[Any]().union(*bare)
    while len(found) * of < len(cases) or not every <= seen:
        best = max(left, key=lambda at: (len(bare[at] - seen), len(pairs[at] - seen)))
        left.remove(best)
        seen |= pairs[best]
        found.append(best)
    return sorted(found)


def _bare(value: Any) -> str:
    """What tells values apart, in all processes alike."""
    return f"{type(value).__name__} {value!r}".partition(" at 0x")[0]


def share(cases: Iterable[Any], of: int, first: int = 0) -> list[Any]:
    """One case in `of`: tests of the same programs take others each, so that each program is in some of them.

    All of them if SPARSETIR_FULL is set.
    """
    return list(cases) if FULL else list(cases)[first % of :: of]


def examples(count: int) -> int:
    """Return how many examples hypothesis draws: a third of `count`, or all of them if SPARSETIR_FULL is set."""
    return count if FULL else count // 3
