# SPDX-License-Identifier: Apache-2.0
"""A kernel without measuring candidates: what the pretrained model expects most of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparsetir.formats.format import Format
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.encoding import Encoding
from sparsetir.tuning.judge import bounds_of
from sparsetir.tuning.model import CostModel
from sparsetir.tuning.space import Space

MARGIN = 1.2  # of models that do not say how far they can be believed
LOOKED_AT = 512  # candidates of the outline, besides the portfolio
DISPATCH = 2e-6  # seconds by which a call of a tuned kernel takes longer
FORMATS = 3  # that are converted at most before the untuned kernel is kept


class Workload(Protocol):
    """What is asked of a session."""

    space: Space

    @property
    def encoding(self) -> Encoding: ...

    @property
    def usual(self) -> Candidate: ...

    def conversion(self, format: Format | None) -> float: ...


@dataclass(frozen=True)
class Guess:
    """A candidate, how many times faster than the untuned kernel it should be, and how many times it is at least."""

    candidate: Candidate
    gain: float
    least: float = 1.0


def guess(
    session: Workload, model: CostModel, *, seconds: float, amortize_over: float | None = None, seed: int = 0
) -> Guess | None:
    """The candidate that a model expects most of; None where none is clearly better than the untuned kernel.

    Formats are ranked before anything is converted. One that is to be converted for few calls must be worth it.

    Parameters
    ----------
    session : Session
    model : CostModel
        Its bounds say how many times faster a candidate must look; ``about["margin"]`` where it has none.
    seconds : float
        Of a call of the untuned kernel.
    amortize_over : float, optional
        How many calls a conversion is shared among; by default it costs nothing.
    seed : int
    """
    margin = _margin(model, session)
    pool = list(dict.fromkeys(session.space.outline(np.random.default_rng(seed), LOOKED_AT)))
    usual = model.predict(session.encoding.rows([session.usual], specialised=False))[0]
    gains = np.exp(model.predict(session.encoding.rows(pool)) - usual) if pool else np.zeros(0)
    tried: set[Format | None] = set()
    for n in np.argsort(-gains, kind="stable"):
        candidate = pool[n]
        if gains[n] < margin or len(tried) > FORMATS:
            return None
        settled = session.space.settle(candidate)
        if settled is None:
            continue
        gain = float(np.exp(model.predict(session.encoding.rows([settled])) - usual)[0])
        share = session.conversion(settled.format) / amortize_over if amortize_over is not None else 0.0
        tried.add(settled.format)
        if margin * (seconds / gain + share + DISPATCH) <= seconds:
            return Guess(settled, gain, gain / margin)
    return None


def _margin(model: CostModel, session: Workload) -> float:
    """How many times faster a candidate must look: the features that bounds go by are the same for all."""
    bounds, encoding = bounds_of(model.about), session.encoding
    if bounds is None:
        return float(model.about.get("margin", MARGIN))
    row = encoding.rows([session.usual])[0]
    return bounds.margin(dict(zip(encoding.names, row.tolist(), strict=False)))


__all__ = ["Guess", "guess"]
