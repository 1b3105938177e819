# SPDX-License-Identifier: Apache-2.0
"""Search strategies behind one interface: they choose which candidates to measure next.

A batch depends only on the seed and the trials before it, so that an interrupted search resumes with the same batches,
and a recorded search can be replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np
from scipy.special import ndtr

from sparsetir.errors import ArgumentError
from sparsetir.formats.format import Format
from sparsetir.tuning.model import CostModel, Model, labels_of, of_width, scores_of
from sparsetir.tuning.space import Candidate, Space
from sparsetir.utils.arguments import shown

BATCH = 4
WARMUP = 8  # trials before the model ranks candidates
EPSILON = 0.1  # share of random candidates after that
POPULATION, CHILDREN = 16, 192  # the best trials, and how many candidates are bred from them for the model to rank
MUTATED, CROSSED = 0.6, 0.25  # shares of the children; the others are drawn at random
STEPS = 12  # trials without an improvement, after which the neighbours of the best are tried
OUTLINED, ADDED = 256, 64  # candidates of all formats that a pretrained model ranks: at first, then each time
COLD = 0.25  # by how much faster a candidate must be predicted if it is not compiled yet and others are
ALIKE = 1  # candidates of one format in a batch during the first trials
SURE = 1  # candidates of a batch from the rest of the portfolio
BELIEF = 8  # weight of the prior model, in trials
MODELS = 2  # fitted models to keep: of the trials before a batch, and of all
HEAT, COOLING = 0.3, 0.97  # of annealing: the slowdown accepted with probability 1/e, and its factor after each batch

FASTER = 1.03  # gain over the best so far that a search may miss
LATELY, FEWEST_ERRORS, LEAST_ERROR = 16, 8, 0.03  # trials whose errors count, at least, and the least error of a model

Known = Mapping[Candidate, float]
Score = Callable[[Sequence[Candidate]], np.ndarray]


class Strategy(Protocol):
    """Function that draws up to `BATCH` candidates that are not known."""

    def __call__(self, space: Space, trials: Known, score: Score | None, rng: np.random.Generator) -> list[Candidate]:
        """Draw candidates; `score` ranks candidates, higher is better; None while too little is known."""


def exhaustive(space: Space, trials: Known, score: Score | None, rng: np.random.Generator) -> list[Candidate]:
    """Return every candidate in order."""
    return list(islice((c for c in space if c not in trials), BATCH))


def random(space: Space, trials: Known, score: Score | None, rng: np.random.Generator) -> list[Candidate]:
    """Return candidates drawn at random."""
    return _filled([], space, trials, rng)


def annealing(space: Space, trials: Known, score: Score | None, rng: np.random.Generator) -> list[Candidate]:
    """Propose candidates by parallel simulated annealing: each chain goes on from its last candidate that was taken."""
    pairs = list(trials.items())
    if len(pairs) < BATCH:
        return _filled([], space, trials, rng)
    heat, chains = HEAT, pairs[:BATCH]
    for n in range(BATCH, len(pairs) - len(pairs) % BATCH, BATCH):
        accepted = [_is_taken(old, new, heat, rng) for old, new in zip(chains, pairs[n : n + BATCH], strict=True)]
        chains = [new if yes else old for old, new, yes in zip(chains, pairs[n : n + BATCH], accepted, strict=True)]
        heat *= COOLING
    moved = [space.mutate(candidate, rng) for candidate, _ in chains]
    return _filled(moved, space, trials, rng)


def _is_taken(
    old: tuple[Candidate, float], new: tuple[Candidate, float], heat: float, rng: np.random.Generator
) -> bool:
    draw = rng.random()
    if not np.isfinite(new[1]):
        return False
    return not np.isfinite(old[1]) or draw < np.exp(min(0.0, (1 - new[1] / old[1]) / heat))


def portfolio(space: Space, trials: Known, score: Score | None, rng: np.random.Generator) -> list[Candidate]:
    """Return the portfolio of the space, then candidates drawn at random."""
    return _filled(list(islice((c for c in space.first() if c not in trials), BATCH)), space, trials, rng)


def evolution(space: Space, trials: Known, score: Score | None, rng: np.random.Generator) -> list[Candidate]:
    """Propose the portfolio, then the model's favourite offspring of good trials, then steps around the best."""
    proposed = list(islice((c for c in space.first() if c not in trials), BATCH))
    if len(proposed) == BATCH:
        return proposed
    best = [c for c, seconds in sorted(trials.items(), key=lambda item: item[1]) if np.isfinite(seconds)]
    if not best or score is None:
        return _filled(proposed, space, trials, rng)
    if _stale(trials) >= STEPS:
        proposed += _ranked((c for c in space.steps(best[0]) if c not in trials), score)
    ranked = _ranked((c for c in _children(space, best[:POPULATION], rng) if c not in trials), score)
    proposed += [c for c in ranked if rng.random() >= EPSILON][:BATCH]
    return _filled(proposed, space, trials, rng)


def guided(space: Space, trials: Known, score: Score | None, rng: np.random.Generator) -> list[Candidate]:
    """Propose what a pretrained model, corrected by the trials, ranks first: of all formats, and offspring.

    Besides these, propose the portfolio and every format once, in the order of the scores: a model that errs must not
    exclude them for good.
    """
    if score is None:
        return evolution(space, trials, score, rng)
    eager = partial(_eager, space, score)
    sure = _ranked((c for c in space.introduced() if c not in trials), eager)
    best = [c for c, seconds in sorted(trials.items(), key=lambda item: item[1]) if np.isfinite(seconds)]
    pool = [*space.outline(rng, ADDED if trials else OUTLINED), *space.ready(rng, ADDED if trials else OUTLINED)]
    if len(trials) >= WARMUP and best:
        pool += _children(space, best[:POPULATION], rng, list(dict.fromkeys(c.format for c in best)))
        pool += space.steps(best[0]) if _stale(trials) >= STEPS else []
    ranked = _ranked((c for c in dict.fromkeys(pool) if c not in trials), eager)
    alike = ALIKE if len(trials) < WARMUP else BATCH
    likely = (c for c in ranked if rng.random() >= EPSILON)
    proposed = [*_settled(space, sure, trials, alike, SURE), *_settled(space, likely, trials, alike)]
    return _filled(proposed, space, trials, rng)


def _eager(space: Space, score: Score, candidates: Sequence[Candidate]) -> np.ndarray:
    """Return scores, less for candidates that are to be compiled: that takes as long as some trials of others."""
    cold = [not space.is_ready(c) for c in candidates]
    return score(candidates) - (COLD * np.array(cold) if not all(cold) else 0.0)


def _ranked(candidates: Iterable[Candidate], score: Score) -> list[Candidate]:
    """Return candidates, what the model likes best first."""
    pool = list(candidates)
    return [pool[n] for n in np.argsort(-score(pool), kind="stable")] if pool else []


def _settled(
    space: Space, ranked: Iterable[Candidate], trials: Known, alike: int, count: int = BATCH
) -> list[Candidate]:
    """Return the first few as they are in the space, a few of each format at most."""
    batch: list[Candidate] = []
    for candidate in ranked:
        if len(batch) == count:
            break
        if sum(c.format == candidate.format for c in batch) < alike:
            settled = space.settle(candidate)
            batch += [settled] if settled is not None and settled not in trials and settled not in batch else []
    return batch


def _stale(trials: Known) -> int:
    """Return trials since the best one."""
    times = list(trials.values())
    return len(times) - 1 - int(np.argmin(times))


def _children(
    space: Space, best: list[Candidate], rng: np.random.Generator, formats: Sequence[Format | None] | None = None
) -> list[Candidate]:
    """Return candidates bred from good ones, and some drawn at random, none twice; of formats that ran well or at all.

    Only those of `formats` where they are given.
    """

    def one() -> Candidate:
        return best[int(len(best) * rng.random() ** 2)]  # better ones with a higher probability

    formats_tried = list(dict.fromkeys(c.format for c in best))
    children = []
    for draw in rng.random(CHILDREN):
        if draw < MUTATED:
            children.append(space.mutate(one(), rng, formats))
        elif draw < MUTATED + CROSSED:
            children.append(space.crossover(one(), one(), rng))
        else:
            children.append(space.sample(rng, formats_tried))
    return list(dict.fromkeys(children))


def _filled(picked: list[Candidate], space: Space, trials: Known, rng: np.random.Generator) -> list[Candidate]:
    """Return `picked` without what is known or double, filled up with draws to a batch as long as there are any."""
    batch = list(dict.fromkeys(c for c in picked if c not in trials))[:BATCH]
    while len(batch) < BATCH:
        candidate = space.fresh(rng, {*trials, *batch})
        if candidate is None:
            return batch
        batch.append(candidate)
    return batch


def spread_below(errors: np.ndarray) -> float:
    """Return the deviation of a normal distribution around 0 whose lower half is as wide as that of some errors.

    Trials that were slower than expected, as whatever else a machine does makes them, say nothing of how much faster
    others may be.

    Examples
    --------
    >>> spread_below(np.array([-0.2, 0.2])), spread_below(np.array([-0.2, 0.2, 0.3, 0.9])) < 0.2
    (0.2, True)
    """
    return float(np.sqrt(2 * np.mean(np.minimum(errors, 0.0) ** 2)))


def trust(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the factor, at least 0, by which a model's scores fit the labels best; 1 before there are any.

    Least squares, with `BELIEF` trials added for which it was right.

    Examples
    --------
    >>> scores = np.array([1.0, 0.0])
    >>> trust(scores, scores), trust(scores, -scores)
    (1.0, 0.6)
    """
    scores, labels = scores - scores.mean(), labels - labels.mean()
    believed = BELIEF * scores.var()
    total = float(scores @ scores + believed)
    return float(np.clip((scores @ labels + believed) / total, 0.0, 1.0)) if total > 0 else 1.0


STRATEGIES: dict[str, Strategy] = {
    "evolution": evolution,
    "annealing": annealing,
    "portfolio": portfolio,
    "random": random,
    "exhaustive": exhaustive,
    "guided": guided,
}


@dataclass(frozen=True)
class Fitted:
    """A model of trials, and the trust in the prior one that it corrects: what its scores are multiplied by."""

    model: CostModel
    trust: float


def check_strategy(strategy: object) -> None:
    """Raise unless a strategy has this name."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ArgumentError(f"expected one of the strategies {', '.join(STRATEGIES)}, got {shown(strategy)}")


class Search:
    """A strategy with the trials it was told.

    Parameters
    ----------
    space : Space
    features : callable
        Rows of numbers for a list of candidates.
    strategy : str
        A key of `STRATEGIES`.
    seed : int
    warmup : int
        Trials before a model of them has a say.
    prior : Model, optional
        One that knows other cases, of the same features: "guided" asks it before there are trials, and later
        corrects it by them. Other strategies have no use for it.
    hints : sequence of Candidate
        Tried first, such as what was best for a similar matrix.

    Raises
    ------
    ArgumentError
        No strategy has that name.
    """

    def __init__(
        self,
        space: Space,
        *,
        features: Callable[[Sequence[Candidate]], np.ndarray],
        strategy: str = "evolution",
        seed: int = 0,
        warmup: int = WARMUP,
        prior: Model | None = None,
        hints: Sequence[Candidate] = (),
    ) -> None:
        check_strategy(strategy)
        self.space, self.features = space, features
        self.seed, self.warmup = seed, warmup
        self.prior, self.hints = prior if strategy == "guided" else None, list(hints)
        is_led = strategy != "guided" or prior is not None
        self.strategy = STRATEGIES[strategy if is_led else "evolution"]
        self.told: dict[Candidate, float] = {}
        self._rows: dict[Candidate, np.ndarray] = {}
        self._before: dict[Candidate, float] = {}  # scores of the prior model
        self._models: OrderedDict[int, Fitted] = OrderedDict()  # by the number of trials they are fitted to
        self._foretold: dict[Candidate, float] = {}  # logarithms of predicted seconds
        self._expected: tuple[int, dict[Candidate, float | None]] = (0, {})  # trials, predicted seconds

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """Note a trial; `seconds` is None if it failed. A second time for the same candidate is ignored.

        Candidates outside the space are ignored too.
        """
        if candidate in self.space:
            self.told.setdefault(candidate, float("inf") if seconds is None else seconds)

    def hint(self, candidate: Candidate) -> bool:
        """Try a candidate soon, such as one that was best for a similar matrix; whether it is new."""
        if candidate in self.told or candidate in self.hints:
            return False
        self.hints.append(candidate)
        return True

    def importance(self, names: Sequence[str]) -> dict[str, float]:
        """Return which features the prior model uses, the most important first; else the model of the trials."""
        fitted = self._fitted(self.told)
        model = self.prior or (fitted.model if fitted is not None else None)
        return model.importance(names) if isinstance(model, CostModel) else {}

    def ask(self, count: int = BATCH) -> list[Candidate]:
        """Propose the next candidates; none when the space is exhausted.

        More than a batch is for many workers: what follows the first one is chosen as if that took a usual time.
        """
        batch = self._next()
        times = [seconds for seconds in self.told.values() if np.isfinite(seconds)]
        usual = float(np.median(times)) if times else float("inf")
        while batch and BATCH < count > len(batch):
            more = self._batch({**self.told, **dict.fromkeys(batch, usual)}, self.score(self.told))
            new = [c for c in more if c not in self.told and c not in batch]
            if not new:
                break
            batch += new
        return batch[: max(count, BATCH)]

    def _next(self) -> list[Candidate]:
        """Return the next batch."""
        trials = list(self.told.items())
        begun = len(trials) - len(trials) % BATCH
        measured = dict(trials[:begun])
        batch = [c for c in self._batch(measured, self.score(measured)) if c not in self.told]
        # Records of another search may contain the whole batch.
        batch = batch or self._batch(self.told, self.score(self.told))
        self._foretold |= {c: float(np.log(p)) for c, p in zip(batch, self.predicted(batch), strict=True) if p}
        return batch

    def chance(self) -> float:
        """Return the probability that an untried candidate is more than `FASTER` times faster than the best so far.

        1 while too little is known. A candidate is taken to be faster than the models expect by as much as the last
        trials were, see `spread_below`; formats are taken to be wrong one by one, the candidates of one together.
        """
        timed = [c for c, seconds in self.told.items() if np.isfinite(seconds) and c in self._foretold]
        score = self.score(self.told)
        if score is None or len(timed) < FEWEST_ERRORS:
            return 1.0
        errors = np.array([np.log(self.told[c]) - self._foretold[c] for c in timed[-LATELY:]])
        error = max(spread_below(errors), LEAST_ERROR)
        best = min(self.told, key=self.told.__getitem__)
        pool = [*self.space.outline(np.random.default_rng(self.seed), OUTLINED), *self.space.steps(best)]
        untried = [c for c in dict.fromkeys(pool) if c not in self.told]
        if not untried:
            return 0.0
        expected = np.log([float(p or np.inf) for p in self.predicted(untried)])
        chances = ndtr((np.log(self.told[best] / FASTER) - expected) / error)
        likeliest: dict[Format | None, float] = {}
        for candidate, share in zip(untried, chances.tolist(), strict=True):
            likeliest[candidate.format] = max(share, likeliest.get(candidate.format, 0.0))
        return 1.0 - float(np.prod([1.0 - share for share in likeliest.values()]))

    def _batch(self, trials: Known, score: Score | None) -> list[Candidate]:
        rng = np.random.default_rng([self.seed, len(trials)])
        hinted = _settled(self.space, self.hints, trials, BATCH)
        if len(hinted) == BATCH:
            return hinted
        proposed = self.strategy(self.space, trials, score, rng)
        return list(dict.fromkeys([*hinted, *proposed]))[:BATCH]

    def score(self, trials: Known) -> Score | None:
        """Rank candidates by the trials and the prior model, as far as there are any; None if there are none."""
        fitted = self._fitted(trials)
        if fitted is None:
            return None if self.prior is None else self._of_prior
        if self.prior is None:
            return lambda candidates: fitted.model.predict(self._matrix(candidates))

        def scores(candidates: Sequence[Candidate]) -> np.ndarray:
            own = fitted.model.predict(self._matrix(candidates))
            return fitted.trust * self._of_prior(candidates) + own

        return scores

    def _of_prior(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Return scores of the prior model, which is asked once for each candidate."""
        assert self.prior is not None
        new = list(dict.fromkeys(c for c in candidates if c not in self._before))
        if new:
            self._before.update(zip(new, scores_of(self.prior, self._matrix(new)).tolist(), strict=True))
        return np.array([self._before[c] for c in candidates])

    def _fitted(self, trials: Known) -> Fitted | None:
        """Fit a model to the trials, or to the prior model's errors if there is one; None while there are too few."""
        seconds = np.array(list(trials.values()))
        if len(trials) < self.warmup or not np.isfinite(seconds).any():
            return None
        if len(trials) not in self._models:
            rows, prior, share = self._matrix(list(trials)), None, 1.0
            if self.prior is not None:
                prior = self._of_prior(list(trials))
                share = trust(prior, labels_of(seconds, np.zeros(len(trials))))
                prior = share * prior
            self._models[len(trials)] = Fitted(CostModel.fit(rows, seconds, prior=prior, seed=self.seed), share)
            while len(self._models) > MODELS:
                self._models.popitem(last=False)
        return self._models[len(trials)]

    def predicted(self, candidates: Sequence[Candidate]) -> Iterator[float | None]:
        """Yield the seconds that the models expect of candidates, where anything is known."""
        if self._expected[0] != len(self.told):
            self._expected = len(self.told), {}
        cached = self._expected[1]
        new = [c for c in dict.fromkeys(candidates) if c not in cached]
        cached |= zip(new, self._seconds_of(new), strict=True)
        yield from (cached[c] for c in candidates)

    def _seconds_of(self, candidates: Sequence[Candidate]) -> list[float | None]:
        """Compute the seconds of `predicted` with the models."""
        score = self.score(self.told)
        timed = [c for c, seconds in self.told.items() if np.isfinite(seconds)]
        if score is None or not timed or not candidates:
            return [None for _ in candidates]
        scores = score([*timed, *candidates])
        level = np.median(np.log([self.told[c] for c in timed]) + scores[: len(timed)])
        seconds_expected: list[float | None] = np.exp(level - scores[len(timed) :]).tolist()
        return seconds_expected

    def _matrix(self, candidates: Sequence[Candidate]) -> np.ndarray:
        new = [c for c in candidates if c not in self._rows]
        if new:
            self._rows.update(zip(new, self.features(new), strict=True))
        rows = [self._rows[c] for c in candidates]
        return of_width(rows, max((len(row) for row in rows), default=0))


__all__ = ["BATCH", "FASTER", "STRATEGIES", "Search", "Strategy", "check_strategy"]
