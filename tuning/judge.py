# SPDX-License-Identifier: Apache-2.0
"""What the cost model thinks of one kernel next to the untuned one, how sure it is, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsetir.tuning.conformal import Bounds

if TYPE_CHECKING:
    from sparsetir.tuning.candidate import Candidate
    from sparsetir.tuning.encoding import Encoding
    from sparsetir.tuning.model import CostModel


@dataclass(frozen=True)
class Judgement:
    """How many times faster than the untuned kernel a candidate should be.

    Parameters
    ----------
    gain : float
        What the model expects.
    bound : float
        What it is at least, for nine matrices in ten.
    low, high : float
        Ends of the interval that holds it for nine matrices in ten.
    decided : dict of str to float
        What each feature adds to the gain's logarithm, the most first.
    """

    gain: float
    bound: float
    low: float
    high: float
    decided: dict[str, float] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        between = f"between {self.low:.2f} and {self.high:.2f} for nine matrices in ten"
        return f"{self.gain:.2f} times as fast as the untuned kernel, {between}"

    def why(self, most: int = 5) -> str:
        """The features that decided, with the factor that each is worth."""
        shown = list(self.decided.items())[:most]
        return ", ".join(f"{name} {np.exp(share):.2f}x" for name, share in shown)


def bounds_of(about: dict[str, Any]) -> Bounds | None:
    """The bounds that come with a model, if any do."""
    found = about.get("bounds")
    return Bounds(**found) if isinstance(found, dict) else None


def judge(model: CostModel, encoding: Encoding, candidate: Candidate, usual: Candidate) -> Judgement | None:
    """What a model thinks of a candidate next to what an untuned kernel does; None where it knows no bounds."""
    bounds = bounds_of(model.about)
    if bounds is None:
        return None
    row, other = encoding.rows([candidate])[0], encoding.rows([usual], specialised=False)[0]
    gain = float(np.diff(model.predict(np.array([other, row])))[0])
    named = dict(zip(encoding.names, row.tolist(), strict=False))
    bound, low, high = np.exp(bounds.interval(gain, named)).tolist()
    return Judgement(float(np.exp(gain)), bound, low, high, model.decided(row, other))


__all__ = ["Judgement", "bounds_of", "judge"]
