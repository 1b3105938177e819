# SPDX-License-Identifier: Apache-2.0
"""The last decision of a search: which kernel it returns, so that it is not behind what nobody tuned.

The untuned kernel and what ``sparsetir.build(program, calls=1000)`` makes are the *incumbents*. Another kernel takes
their place only if it is clearly faster, and sure to be hardly behind any of them. Where the machine is so noisy that
the usual number of rounds does not tell, there are more of them; where these do not tell either, the incumbent that was
faster stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr

from sparsetir.tuning import measure
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.comparison import WORTH
from sparsetir.tuning.measure import Timed, at_one_pace

BEHIND = 1.03  # times the time of an incumbent: what the result may need at most
DOUBT = 0.05  # how likely it may be that it needs more

Name = Candidate | None
Costs = Mapping[Name, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What a contest ended with.

    Parameters
    ----------
    times : mapping
        Seconds of a call of each contestant.
    chosen : Candidate or None
        The one to return; None is the untuned kernel.
    is_sure : bool
        Whether further rounds would hardly change it.
    """

    times: dict[Name, float]
    chosen: Name
    is_sure: bool = True


def contest(
    cases: Mapping[Name, Timed], incumbents: Sequence[Name] = (None,), extra: Mapping[Candidate, float] | None = None
) -> Outcome:
    """Time kernels in turn until it is clear which one to return.

    Parameters
    ----------
    cases : mapping of callable
        See `sparsetir.tuning.measure.turns`.
    incumbents : sequence of Candidate or None
        Those of the cases that the result must not be behind, the one to prefer first.
    extra : mapping of Candidate to float, optional
        Seconds by which a call costs more than it takes.
    """
    names = list(cases)

    def outcome(found: np.ndarray) -> Outcome:
        return judged(dict(zip(names, at_one_pace(found), strict=True)), incumbents, extra)

    return outcome(measure.turns(cases, enough=lambda found: outcome(found).is_sure))


def judged(
    times: Costs, incumbents: Sequence[Name] = (None,), extra: Mapping[Candidate, float] | None = None
) -> Outcome:
    """The outcome of turns that were taken, those of one round at the same place in each array.

    Examples
    --------
    >>> from sparsetir.schedules import Choices
    >>> quick, lucky = Candidate(Choices(tile=8)), Candidate(Choices(tile=16))
    >>> times = {None: [1.0, 1.0, 1.0], quick: [0.6, 0.6, 0.6], lucky: [0.2, 1.2, 0.2]}
    >>> judged({name: np.array(each) for name, each in times.items()}).chosen == quick
    True
    """
    more = {} if extra is None else extra
    costs = {name: each + (more.get(name, 0.0) if name is not None else 0.0) for name, each in times.items()}
    typical = {name: float(np.median(each)) for name, each in costs.items()}
    held = [name for name in incumbents if np.isfinite(typical.get(name, np.inf))] or [None]
    best = min(held, key=lambda name: typical[name])
    clear = [name for name in costs if name not in held and typical[name] <= WORTH * typical[best]]
    clear.sort(key=lambda name: (typical[name], () if name is None else name.key))
    able = [name for name in clear if _is_level(costs, name, held)]
    chosen = able[0] if able else best
    # A contestant that only looks faster, and is not yet sure to be, may still turn out to be.
    is_sure = clear[:1] == able[:1] and _is_level(costs, chosen, held)
    return Outcome({name: float(np.median(each)) for name, each in times.items()}, chosen, is_sure)


def _is_level(costs: Costs, name: Name, incumbents: Sequence[Name]) -> bool:
    """Whether a contestant is sure to be hardly behind any of the incumbents."""
    return all(at_most(costs[name] / costs[other]) <= BEHIND for other in incumbents if other != name)


def at_most(ratios: np.ndarray) -> float:
    """What the median of what ratios are drawn from is at most, but for a chance of `DOUBT`, whatever the distribution.

    Half of the draws lie above the median: that hardly any do is unlikely (the sign test). The largest one where there
    are too few.

    Examples
    --------
    >>> at_most(np.array([1.0, 1.1, 0.9, 1.2, 1.0])), at_most(np.array([1.0, 1.1, 0.9, 1.0, 1.0, 1.0, 9.0, 1.0]))
    (1.2, 1.1)
    """
    ordered = np.sort(ratios)
    likely = bdtr(np.arange(len(ordered)), len(ordered), 0.5)  # that no more than so many lie above
    return float(ordered[len(ordered) - max(int(np.sum(likely <= DOUBT)), 1)])


__all__ = ["BEHIND", "Outcome", "at_most", "contest", "judged"]
