# SPDX-License-Identifier: Apache-2.0
"""Recommendations of the cost model without measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import Conversion, dense_rows, promising
from sparsetir.formats.pattern import MatrixPattern, Pattern, pattern
from sparsetir.interop import open_source
from sparsetir.interop.sources import Compressed
from sparsetir.ir.views import decode
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import Registers, defaults
from sparsetir.tuning import features
from sparsetir.tuning.conformal import Bounds
from sparsetir.tuning.features import Encoding, Operands, Stored
from sparsetir.tuning.model import CostModel, prior_for, rates_known
from sparsetir.tuning.space import Candidate, Space
from sparsetir.tuning.work import USUAL, Work
from sparsetir.utils.threads import get_num_threads

# Expected speedup of one kernel over the untuned one, its bounds, and the features that decide it.


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
        """Return the features that decided, with the factor that each is worth."""
        largest = list(self.decided.items())[:most]
        return ", ".join(f"{name} {np.exp(share):.2f}x" for name, share in largest)


def bounds_of(about: dict[str, Any]) -> Bounds | None:
    """Return the bounds that come with a model, if any do."""
    bounds = about.get("bounds")
    return Bounds(**bounds) if isinstance(bounds, dict) else None


def judge(model: CostModel, encoding: Encoding, candidate: Candidate, usual: Candidate) -> Judgement | None:
    """Return what a model thinks of a candidate next to what an untuned kernel does; None where it knows no bounds."""
    bounds = bounds_of(model.about)
    if bounds is None:
        return None
    row, other = encoding.rows([candidate])[0], encoding.rows([usual], specialised=False)[0]
    gain = float(np.diff(model.predict(np.array([other, row])))[0])
    values_by_name = dict(zip(encoding.names, row.tolist(), strict=False))
    bound, low, high = np.exp(bounds.interval(gain, values_by_name)).tolist()
    return Judgement(float(np.exp(gain)), bound, low, high, model.decided(row, other))


# Model-only choice: the kernel that the pretrained model ranks first, without measuring candidates.


MARGIN = 1.2  # of models that do not say how far they can be believed
LOOKED_AT = 512  # candidates of the outline, besides the portfolio
DISPATCH = 2e-6  # seconds by which a call of a tuned kernel takes longer
FORMATS = 3  # that are converted at most before the untuned kernel is kept


class Workload(Protocol):
    """Interface of a session that predictions use."""

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
    """Return the candidate that a model expects most of; None where none is clearly better than the untuned kernel.

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
    formats_tried: set[Format | None] = set()
    for n in np.argsort(-gains, kind="stable"):
        candidate = pool[n]
        if gains[n] < margin or len(formats_tried) > FORMATS:
            return None
        settled = session.space.settle(candidate)
        if settled is None:
            continue
        gain = float(np.exp(model.predict(session.encoding.rows([settled])) - usual)[0])
        share = session.conversion(settled.format) / amortize_over if amortize_over is not None else 0.0
        formats_tried.add(settled.format)
        if margin * (seconds / gain + share + DISPATCH) <= seconds:
            return Guess(settled, gain, gain / margin)
    return None


def _margin(model: CostModel, session: Workload) -> float:
    """Return how many times faster a candidate must look: the features that bounds go by are the same for all."""
    bounds, encoding = bounds_of(model.about), session.encoding
    if bounds is None:
        return float(model.about.get("margin", MARGIN))
    row = encoding.rows([session.usual])[0]
    return bounds.margin(dict(zip(encoding.names, row.tolist(), strict=False)))


# Which format a bound matrix is tried in: the rules propose, the cost model may overrule.
#
# Asking takes time, mostly for the numbers of the pattern: the model is asked only where the calls to come take longer
# than that. What it expects is no promise, so both kernels are timed in the next calls: see
# `sparsetir.runtime.adaptive`. That reaches 0.93 of the best measured point on a machine that the model was not trained
# on (`sparsetir bench --from`), where taking its word reaches 0.90, and only what it is certain of, 0.87.


ASKING, PER_ENTRY = 0.15, 0.6e-6  # seconds that asking takes: once in a process, and for each entry
WORTH = 4.0  # times as long as asking the calls must take
TRIED = 1.05  # gain from which on a format is tried
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
    seconds: float | None = None,
    described: Pattern | None = None,
) -> Conversion | None:
    """Return the format that a matrix should be tried in: `found`, or another one that the model expects more of.

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
    seconds : float, optional
        That a call takes over the matrix as it is; estimated by default.
    described : Pattern, optional
        Numbers of the matrix, where they are known.
    """
    source = open_source(matrix, "the matrix")
    if not isinstance(source, Compressed) or source.major or source.block or not source.indices.size:
        return found
    args = kernel.prepare(dict(arguments))
    sizes = {name: int(value) for name, value in args.sizes.items()}
    work = Work.of(decode(kernel.func), sizes)
    if seconds is None:
        seconds = SLOWER * 2.0 ** work.numbers(USUAL, 1.0)["time_floor"]
    if calls * seconds < WORTH * (ASKING + PER_ENTRY * source.indices.size):
        return found
    described = pattern(matrix) if described is None else described
    if not isinstance(described, MatrixPattern) or work.is_sparse:
        return found
    encoding = _encoding(described, source, work)
    base = defaults.usual(kernel.func, Registers.of(kernel.target)).changed(**kernel.suitable(args))
    shapes = [np.shape(value) for value in arguments.values() if value is not matrix]
    own = None if found is None else found.format
    formats = [own, *(f for f in promising(described, feat=dense_rows(shapes))[:MOST] if f != own)]
    gains = _gains(encoding, [Candidate(base, format) for format in formats])
    best = int(np.argmax(gains))
    gain = float(gains[best])
    if best == 0 or gain < TRIED or (other := formats[best]) is None:
        return found
    needed = CONVERSION * source.indices.size / (seconds * (1 - 1 / gain))
    return Conversion(other, needed) if needed <= calls else found


def _encoding(described: MatrixPattern, source: Compressed, work: Work) -> Encoding:
    """Return what the model sees of candidates for a matrix."""
    facts = features.of_pattern(described) | features.density(source.indptr, source.indices, described.shape[1])
    entry_bytes = source.values.itemsize + source.indices.itemsize
    own = Stored(described.nnz, described.nnz * entry_bytes + source.indptr.nbytes)
    return Encoding(facts, described, own, Operands.of(work, get_num_threads(), rates_known()))


def _gains(encoding: Encoding, candidates: list[Candidate]) -> np.ndarray:
    """Return the expected speedup of each candidate over the first."""
    model = prior_for(encoding)
    if model is None:
        return np.ones(len(candidates))
    scores = model.predict(encoding.rows(candidates))
    return np.exp(scores - scores[0])


__all__ = ["Guess", "Judgement", "bounds_of", "chosen", "guess", "judge"]
