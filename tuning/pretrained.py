# SPDX-License-Identifier: Apache-2.0
"""The cost model that comes with the package.

`python -m sparsetir.tuning.pretrain` makes it from records of `python -m sparsetir.tuning.collect`.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

from sparsetir.errors import TuningError
from sparsetir.tuning.ceilings import USUAL, Rates, measured_rates
from sparsetir.tuning.encoding import Encoding, matrix_names
from sparsetir.tuning.model import CostModel

PLACED = "measured rates"  # what a model says that was trained with them
PATH = Path(__file__).parent / "data" / "pretrained.json"


@cache
def pretrained(path: Path = PATH) -> CostModel | None:
    """The model in a file, read once; None, with a warning, where it is of no use to this version."""
    if not path.exists():
        return None
    try:
        return CostModel.load(path, names=matrix_names())
    except TuningError as error:
        again = "searches begin without it; python -m sparsetir.tuning.pretrain makes another"
        warnings.warn(f"{error}; {again}", stacklevel=2)
        return None


def rates_known() -> Rates:
    """The rates that the shipped model goes by: of this machine, or of a usual one where it knows no other."""
    model = pretrained()
    return measured_rates() if model is not None and model.about.get(PLACED) else USUAL


def prior_for(encoding: Encoding) -> CostModel | None:
    """The shipped model; None where a workload's first features are not those that it was trained on."""
    model = pretrained()
    return model if model is not None and list(model.names) == encoding.names[: len(model.names)] else None


__all__ = ["PATH", "PLACED", "pretrained", "prior_for", "rates_known"]
