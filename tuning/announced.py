# SPDX-License-Identifier: Apache-2.0
"""Which format a kernel gets that was announced to be called often: the rules propose, the cost model may overrule.

Asking takes time, mostly for the numbers of the pattern: the model is asked only where the calls to come take far
longer than that, and is followed only where its gain is one for nine matrices in ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsetir.call.kernel import Kernel
from sparsetir.formats.pattern import MatrixPattern, Pattern, pattern
from sparsetir.formats.suit import Conversion, dense_rows, promising
from sparsetir.interop import open_source
from sparsetir.interop.sources import Compressed
from sparsetir.ir import decode
from sparsetir.schedules import Registers, suit
from sparsetir.threads import get_num_threads
from sparsetir.tuning import features
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.ceilings import USUAL
from sparsetir.tuning.encoding import Encoding
from sparsetir.tuning.features import Operands, Stored
from sparsetir.tuning.judge import bounds_of
from sparsetir.tuning.pretrained import prior_for, rates_known
from sparsetir.tuning.work import Work

ASKING, PER_ENTRY = 0.15, 0.6e-6  # seconds that asking takes: once in a process, and for each entry
WORTH = 10.0  # times as long as asking the calls must take
SLOWER = 3.0  # times the analytic bound that a call takes, usually
CONVERSION = 60e-9  # seconds to convert an entry, usually
MOST = 6  # formats that are looked at


def chosen(
    kernel: Kernel,
    matrix: Any,
    arguments: Mapping[str, Any],
    found: Conversion | None,
    *,
    calls: float,
    described: Pattern | None = None,
) -> Conversion | None:
    """The format for a matrix: `found`, or another one that the model knows to be faster.

    Parameters
    ----------
    kernel : Kernel
    matrix : object
        The only sparse argument, of two dimensions.
    arguments : mapping of str to object
        Of the first call.
    found : Conversion or None
        What the rules say; None is the format of the program.
    calls : float
        That are to come.
    described : Pattern, optional
        Numbers of the matrix, where they are known.
    """
    source = open_source(matrix, "the matrix")
    if not isinstance(source, Compressed) or source.major or source.block or not source.indices.size:
        return found
    args = kernel.prepare(dict(arguments))
    sizes = {name: int(value) for name, value in args.sizes.items()}
    work = Work.of(decode(kernel.func), sizes)
    seconds = SLOWER * 2.0 ** work.numbers(USUAL, 1.0)["time_floor"]
    if calls * seconds < WORTH * (ASKING + PER_ENTRY * source.indices.size):
        return found
    described = pattern(matrix) if described is None else described
    if not isinstance(described, MatrixPattern) or work.is_sparse:
        return found
    encoding = _encoding(described, source, work)
    base = suit.usual(kernel.func, Registers.of(kernel.target)).changed(**kernel.suitable(args))
    shapes = [np.shape(value) for value in arguments.values() if value is not matrix]
    own = None if found is None else found.format
    formats = [own, *(f for f in promising(described, feat=dense_rows(shapes))[:MOST] if f != own)]
    gains, margin = _gains(encoding, [Candidate(base, format) for format in formats])
    best = int(np.argmax(gains))
    least = float(gains[best]) / margin
    if best == 0 or least <= 1 or (other := formats[best]) is None:
        return found
    needed = CONVERSION * source.indices.size / (seconds * (1 - 1 / least))
    return Conversion(other, needed) if needed <= calls else found


def _encoding(described: MatrixPattern, source: Compressed, work: Work) -> Encoding:
    """What the model sees of candidates for a matrix."""
    facts = features.of_pattern(described) | features.density(source.indptr, source.indices, described.shape[1])
    each = source.values.itemsize + source.indices.itemsize
    own = Stored(described.nnz, described.nnz * each + source.indptr.nbytes)
    return Encoding(facts, described, own, Operands.of(work, get_num_threads(), rates_known()))


def _gains(encoding: Encoding, candidates: list[Candidate]) -> tuple[np.ndarray, float]:
    """How many times faster than the first candidate each should be, and what they have to look like to be for sure."""
    model = prior_for(encoding)
    bounds = bounds_of(model.about) if model is not None else None
    if model is None or bounds is None:
        return np.ones(len(candidates)), math.inf
    rows = encoding.rows(candidates)
    scores = model.predict(rows)
    row: dict[str, float] = dict(zip(encoding.names, rows[0].tolist(), strict=False))
    return np.exp(scores - scores[0]), bounds.margin(row)


__all__ = ["chosen"]
