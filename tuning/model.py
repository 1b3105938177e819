# SPDX-License-Identifier: Apache-2.0
"""Cost models: from features to scores, and the shipped model."""

from __future__ import annotations

import base64
import json
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError, TuningError
from sparsetir.tuning.features import PARALLEL, WorkloadEncoding, matrix_names
from sparsetir.tuning.work import USUAL, CoreRates, measured_rates
from sparsetir.utils.arguments import shown
from sparsetir.utils.files import write_text
from sparsetir.utils.packages import __version__

# Cost models: from features to scores, higher for faster.
#
# `CostModel` is gradient-boosted trees, fitted to times or to the order of times within each case. `AnalyticModel` and
# `RandomModel` are baselines.


FORMAT = 1
ROUNDS = 60
# One thread: the result does not depend on the machine, and a fit on some hundred rows takes milliseconds.
SETTINGS: dict[str, Any] = {
    "max_depth": 5,
    "eta": 0.2,
    "min_child_weight": 1,
    "subsample": 1.0,
    "nthread": 1,
    "verbosity": 0,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "regression": {"objective": "reg:squarederror"},
    "rank": {"objective": "rank:pairwise", "lambdarank_pair_method": "mean", "lambdarank_num_pair_per_sample": 4},
}
SERIAL = "serial"  # key of the metadata: whether the model was trained on kernels of one thread only
# Target of a failed candidate, as a multiple of the slowest time of the case.
FAILED = 2.0
# Where what is good counts, slower trials are capped at that many times the best.
WORST = 3.0


class Model(Protocol):
    """Anything that ranks candidates."""

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return scores, higher for faster."""


def labels_of(seconds: np.ndarray, cases: np.ndarray) -> np.ndarray:
    """Return how much faster than its case's mean each trial is, on a logarithmic scale."""
    labels = np.empty(len(seconds))
    for case in np.unique(cases):
        at = cases == case
        finite = seconds[at][np.isfinite(seconds[at])]
        worst = FAILED * finite.max() if finite.size else 1.0
        logs = np.log(np.where(np.isfinite(seconds[at]), seconds[at], worst))
        labels[at] = logs.mean() - logs
    return labels


def closeness(seconds: np.ndarray, cases: np.ndarray) -> np.ndarray:
    """Return the best time of its case over that of each trial; no less than where that is `WORST` times slower.

    Examples
    --------
    >>> closeness(np.array([1.0, 2.0, 4.0, np.inf]), np.zeros(4)).round(2).tolist()
    [1.0, 0.5, 0.33, 0.33]
    """
    _, place = np.unique(cases, return_inverse=True)
    best = np.full(place.max(initial=0) + 1, np.inf)
    np.minimum.at(best, place, seconds)
    return np.maximum(np.where(np.isfinite(seconds), best[place], 0.0) / seconds, 1 / WORST)


@dataclass(frozen=True, eq=False)
class CostModel:
    """Gradient-boosted trees that predict how fast candidates are.

    Parameters
    ----------
    booster : xgboost.Booster
    names : sequence of str
        Of the features, in the order of the columns; empty if they are not needed.
    objective : str
        A key of `OBJECTIVES`.
    scale : float
        From the trees' numbers to logarithms of times.
    about : dict
        What it was trained on, for the saved file.
    """

    booster: Any
    names: Sequence[str] = ()
    objective: str = "regression"
    scale: float = 1.0
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        features: np.ndarray,
        seconds: np.ndarray,
        *,
        cases: np.ndarray | None = None,
        prior: np.ndarray | None = None,
        names: Sequence[str] = (),
        objective: str = "regression",
        rounds: int = ROUNDS,
        seed: int = 0,
        focused: bool = False,
        **settings: Any,
    ) -> CostModel:
        """Train a model.

        Parameters
        ----------
        features : ndarray, shape (trials, features)
            NaN where a number is not known.
        seconds : ndarray, shape (trials,)
            Measured times; infinite for candidates that failed. At least one is finite.
        cases : ndarray of int, shape (trials,), optional
            Which trials belong together: times of different cases are not compared. By default one case.
        prior : ndarray, shape (trials,), optional
            Scores of another model; this one learns what is to be added to them. Only with regression.
        names : sequence of str, optional
        objective : {"regression", "rank"}
            Squared error of logarithms of times relative to their case, or the share of pairs of a case in the right
            order.
        rounds : int
            Trees.
        seed : int
        focused : bool
            Whether to learn above all what is good: trials count the less, the farther they are from the best of their
            case, and how bad the bad ones are is not told.
        **settings
            Of xgboost, instead of `SETTINGS`.

        Raises
        ------
        ArgumentError
            There is no such objective.
        """
        import xgboost

        if objective not in OBJECTIVES:
            raise ArgumentError(f"expected one of the objectives {', '.join(OBJECTIVES)}, got {shown(objective)}")
        cases = np.zeros(len(seconds), np.int64) if cases is None else cases
        order = np.argsort(cases, kind="stable")
        features, seconds, cases = features[order], seconds[order], cases[order]
        near = closeness(seconds, cases)
        labels = centred(np.log(near), cases) if focused else labels_of(seconds, cases)
        if prior is not None:
            labels -= centred(prior[order], cases)
        data = xgboost.DMatrix(features, label=_targets(labels, cases, objective), nthread=1)
        if objective == "rank":
            data.set_group(np.unique(cases, return_counts=True)[1])
        elif focused:
            data.set_weight(near)
        parameters = {**SETTINGS, **OBJECTIVES[objective], **settings, "seed": seed}
        booster = xgboost.train(parameters, data, num_boost_round=rounds)
        scale = 1.0
        if objective == "rank":
            predictions = centred(booster.predict(data), cases)
            scale = float(predictions @ labels / max(predictions @ predictions, 1e-12))
        return cls(booster, tuple(names), objective, scale)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return scores, higher for faster; differences are ratios of times on a logarithmic scale."""
        rows = of_width(features, self.booster.num_features())
        if not len(rows):
            return np.zeros(0)
        scores: np.ndarray = self.scale * self.booster.inplace_predict(rows)
        if not self.about.get(SERIAL):
            return scores
        # Trained on one thread: the analytic model estimates the gain of several.
        return np.asarray(scores - np.log(2.0) * rows[:, list(self.names).index(PARALLEL)])

    def importance(self, names: Sequence[str] = ()) -> dict[str, float]:
        """Return each feature's share of what the trees gain, the most important first; those not used are left out."""
        names = names or self.names
        gains = self.booster.get_score(importance_type="total_gain")
        total = sum(gains.values()) or 1.0
        shares = {names[int(key[1:])]: float(value) / total for key, value in gains.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def decided(self, row: np.ndarray, other: np.ndarray) -> dict[str, float]:
        """Return the share of each feature in the difference of the scores of two candidates, the largest first.

        The sums of Shapley values, which xgboost computes for trees: Lundberg et al., "From local explanations to
        global understanding with explainable AI for trees", Nature Machine Intelligence 2020.
        """
        import xgboost

        both = of_width([row, other], self.booster.num_features())
        shares = self.booster.predict(xgboost.DMatrix(both, nthread=1), pred_contribs=True)[:, :-1]
        apart = self.scale * (shares[0] - shares[1])
        differences = {name: float(value) for name, value in zip(self.names, apart, strict=False) if value}
        return dict(sorted(differences.items(), key=lambda item: -abs(item[1])))

    # ------------------------------------------------------------------ files

    def save(self, path: Path) -> None:
        """Write the model as JSON; the trees are compressed in it."""
        trees = base64.b64encode(zlib.compress(bytes(self.booster.save_raw("ubj")), 9)).decode()
        shares = {name: round(share, 5) for name, share in self.importance().items()}
        facts = {"format": FORMAT, "sparsetir": __version__, "objective": self.objective}
        facts |= {"scale": self.scale, "about": self.about, "importance": shares, "names": list(self.names)}
        write_text(path, json.dumps({**facts, "trees": trees}, indent=1) + "\n", makes_folder=True)

    @classmethod
    def load(cls, path: Path, *, names: Sequence[str] | None = None) -> CostModel:
        """Read a saved model.

        Parameters
        ----------
        path : Path
        names : sequence of str, optional
            Names of features, of which it must have been trained on the first ones.

        Raises
        ------
        TuningError
            The file is none of a model or of another version, or the model was trained on other features.
        """
        import xgboost

        expected = f"expected a cost model of format {FORMAT} in {path}"
        try:
            facts = json.loads(Path(path).read_text(encoding="utf-8"))
            version = facts["format"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TuningError(f"{expected}, got {type(error).__name__}: {error}") from error
        if version != FORMAT:
            raise TuningError(f"{expected}, got format {version!r}")
        names_stored = facts.get("names", [])
        if names is not None and (not names_stored or list(names)[: len(names_stored)] != names_stored):
            raise TuningError(f"{path} was trained on other features: {difference(names_stored, names)}")
        try:
            booster = xgboost.Booster({"nthread": 1})
            booster.load_model(bytearray(zlib.decompress(base64.b64decode(facts["trees"]))))
            model = cls(booster, tuple(facts["names"]), facts["objective"], float(facts["scale"]), facts["about"])
        except (KeyError, TypeError, ValueError, zlib.error, xgboost.core.XGBoostError) as error:
            raise TuningError(f"{expected}, got {type(error).__name__}: {error}") from error
        return model


def of_width(rows: Sequence[np.ndarray] | np.ndarray, width: int) -> np.ndarray:
    """Return rows with `width` columns: later ones are dropped, missing ones are not numbers.

    Columns are added during a search where a format has knobs that those before it had not.
    """
    if isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] == width:
        return rows
    padded = np.full((len(rows), width), np.nan, np.float32)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row[:width]
    return padded


def difference(first: Sequence[str], second: Sequence[str]) -> str:
    """Return how two lists of names differ, in words."""
    more, fewer = sorted(set(first) - set(second)), sorted(set(second) - set(first))
    parts = [f"it does not know {', '.join(fewer[:5])}"] if fewer else []
    parts += [f"it wants {', '.join(more[:5])}"] if more else []
    return " and ".join(parts) or "they come in another order"


def centred(numbers: np.ndarray, cases: np.ndarray) -> np.ndarray:
    """Return numbers without the mean of their case."""
    _, place, counts = np.unique(cases, return_inverse=True, return_counts=True)
    return numbers - (np.bincount(place, weights=numbers) / counts)[place]


def _targets(labels: np.ndarray, cases: np.ndarray, objective: str) -> np.ndarray:
    """Return the labels for xgboost, whose ranks must not be negative."""
    if objective != "rank":
        return labels
    _, place = np.unique(cases, return_inverse=True)
    least = np.full(place.max(initial=0) + 1, np.inf)
    np.minimum.at(least, place, labels)
    return labels - least[place]


class RandomModel:
    """Scores drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return a number for each candidate."""
        return self.rng.random(len(features))


class AnalyticModel:
    """The time below which a kernel cannot come, by the sizes of its loops: see `sparsetir.tuning.features`.

    Parameters
    ----------
    names : sequence of str
        Of the features.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.at = list(names).index("roofline")

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Return scores, higher for faster."""
        return -np.log(2.0) * features[:, self.at]


# The pretrained cost model shipped with the package.
#
# `python -m sparsetir.tuning.train.pretrain` makes it from records of `python -m sparsetir.tuning.train.collect`.


PLACED = "measured rates"  # key of the metadata of models that were trained with measured rates
PATH = Path(__file__).parent / "data" / "pretrained.json"


@cache
def pretrained(path: Path = PATH) -> CostModel | None:
    """Return the model in a file, read once; None, with a warning, where it is of no use to this version."""
    if not path.exists():
        return None
    try:
        return CostModel.load(path, names=matrix_names())
    except TuningError as error:
        again = "searches begin without it; python -m sparsetir.tuning.train.pretrain makes another"
        warnings.warn(f"{error}; {again}", stacklevel=2)
        return None


def as_model(value: Any) -> Model:
    """Return a model of the user's own: the path of a trained one, or an object that ranks candidates.

    Raises
    ------
    ArgumentTypeError
        It is neither.
    TuningError
        The file holds no model, or one that was trained on other features.
    """
    if isinstance(value, (str, Path)):
        return CostModel.load(Path(value), names=matrix_names())
    if isinstance(value, type) or not callable(getattr(value, "predict", None)):
        fault = f"model: expected the path of a trained model or an object with predict(features), got {shown(value)}."
        raise ArgumentTypeError(f"{fault} See docs/own_models.md.")
    return value


def scores_of(model: Model, rows: np.ndarray) -> np.ndarray:
    """Return a model's scores of rows of features.

    Raises
    ------
    TuningError
        It returns something else than a number for each row.
    """
    scores = np.asarray(model.predict(rows))
    if scores.shape != (len(rows),) or scores.dtype.kind not in "biuf" or np.isnan(scores).any():
        got = "NaN" if scores.shape == (len(rows),) and scores.dtype.kind == "f" else f"{scores.dtype} {scores.shape}"
        fault = f"model: expected {type(model).__name__}.predict to return {len(rows)} numbers, got {got}"
        raise TuningError(f"{fault}. Return one score for each row, higher for faster.")
    return scores


def rates_known(model: CostModel | None = None) -> CoreRates:
    """Return the rates that a model uses: of this machine, or of a usual one where it knows no other."""
    model = pretrained() if model is None else model
    return measured_rates() if model is not None and model.about.get(PLACED) else USUAL


def prior_for(encoding: WorkloadEncoding) -> CostModel | None:
    """Return the shipped model; None where a workload's first features are not those that it was trained on."""
    model = pretrained()
    return model if model is not None and list(model.names) == encoding.names[: len(model.names)] else None


__all__ = [
    "OBJECTIVES",
    "PATH",
    "PLACED",
    "AnalyticModel",
    "CostModel",
    "Model",
    "RandomModel",
    "as_model",
    "centred",
    "closeness",
    "labels_of",
    "of_width",
    "pretrained",
    "prior_for",
    "rates_known",
    "scores_of",
]
