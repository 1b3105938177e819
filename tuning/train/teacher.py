# SPDX-License-Identifier: Apache-2.0
"""Make training cases of what an earlier model predicts: for machines whose points are no longer at hand.

A model that is trained on points of some machines forgets the others, and points of one thread say nothing of two. So
some of its cases are taken once more, as if they ran on the machine that the earlier model was trained on, on two
threads, with the times that the earlier model predicts. Hinton, Vinyals and Dean, "Distilling the knowledge in a neural
network", 2015.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from sparsetir.formats.encoding import parse_format
from sparsetir.schedules import Choices
from sparsetir.tuning.features import matrix_names
from sparsetir.tuning.model import CostModel
from sparsetir.tuning.records import LEAST, Recording
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.train.dataset import encoding_of
from sparsetir.utils.machine import MachineProfile
from sparsetir.workloads.inputs import say

EVERY = 4  # one case of so many
THREADS = 2
PIECES = (0, 1, 4, 8)  # for each thread


def taught(lines: Iterable[Mapping[str, Any]], model: CostModel, profile: MachineProfile) -> list[Recording]:
    """Return every few cases of a data set with the times that a model predicts for another machine.

    Parameters
    ----------
    lines : iterable of mapping
        Of the data set.
    model : CostModel
        Trained on points of the other machine.
    profile : MachineProfile
        Of the other machine.
    """
    found = [_taught(line, model, profile, n) for n, line in enumerate(islice(lines, 0, None, EVERY))]
    cases = [case for case in found if case is not None]
    say(f"{len(cases)} cases as the earlier model expects them on {profile.name}")
    return cases


def _taught(line: Mapping[str, Any], model: CostModel, profile: MachineProfile, number: int) -> Recording | None:
    job = {**line["job"], "threads": THREADS}
    encoding = encoding_of({**line, "job": job, "rates": _rates(profile), "profile": profile})
    rng = np.random.default_rng(number)
    drawn = THREADS * rng.choice(PIECES, len(line["points"]))
    candidates = dict.fromkeys(
        Candidate(Choices(**{**choices, "chunks": int(chunks)}), parse_format(text) if text else None)
        for (text, choices, *_), chunks in zip(line["points"], drawn, strict=True)
    )
    usual = Candidate(Choices(**{**line["usual"], "chunks": THREADS}))
    if len(candidates) < LEAST:
        return None
    rows = encoding.rows(list(candidates))
    plain = encoding.rows([usual], specialised=False)[0]
    seconds = np.exp(-model.predict(np.vstack([rows, plain]))).tolist()
    return Recording(
        f"{line['case']} taught",
        dict(zip(candidates, seconds, strict=False)),
        dict(zip(candidates, rows, strict=True)),
        matrix_names(),
        line["matrix"],
        line["family"],
        f"{job['op'].partition('_')[0]}:{job['feat']}",
        (seconds[-1], plain),
        (),
        job["op"].partition("_")[0],
        job["dtype"],
        THREADS,
        profile.name,
        is_placed=True,
    )


def _rates(profile: MachineProfile) -> dict[str, float]:
    """Return rates for arrays of half the private cache, of a quarter of the last one, and of four times it."""
    private, last = profile.caches
    sizes = {"private": private // 2, "last": last // 4, "memory": 4 * last}
    rates = {name: 2048 / profile.gather_seconds(2048, size) for name, size in sizes.items()}
    return {"peak": max(profile.fma.values()), **rates}


__all__ = ["taught"]
