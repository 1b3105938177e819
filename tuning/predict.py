# SPDX-License-Identifier: Apache-2.0
"""Recommendations of the cost model without measuring, and conformal bounds of the gains that it predicts.

The bounds hold for nine matrices in ten. On held-out cases the model predicts the speedup of its first candidate over
the untuned kernel. Split-conformal prediction takes a quantile of these errors as the bound of the next error: Vovk,
Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005. Cases are grouped by operation and by the distance
of the matrix from the training families; each group has its own quantiles.

Cases of an operation outside of the training data are not exchangeable with these groups. For them, a model is trained
without each known operation in turn, and the widest bound that one of these models needs is used. If the new operation
is exchangeable with the k known ones, it needs wider bounds with a probability of 1 / (k + 1): see Lee, Barber and
Willett, "Distribution-free inference with hierarchical data", 2023. Their method, one quantile in which each operation
has a share, gives no bound with fewer than ten operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import COMPOSING, Conversion, dense_rows, ranked_candidates, tile_formats
from sparsetir.formats.pattern import Pattern, pattern
from sparsetir.interop import open_source
from sparsetir.interop.sources import CompressedSource, Source
from sparsetir.ir.views import decode
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.tuning import features
from sparsetir.tuning.features import Operands, WorkloadEncoding
from sparsetir.tuning.model import CostModel, pretrained, prior_for, rates_known
from sparsetir.tuning.space import Candidate, Space
from sparsetir.tuning.variants import own_storage
from sparsetir.tuning.work import USUAL, Work
from sparsetir.utils.memory import fits
from sparsetir.utils.threads import get_num_threads

if TYPE_CHECKING:
    from sparsetir.tuning.train.evaluate import Ranking

# Expected speedup of one kernel over the untuned one, its bounds, and the features that decide it.


@dataclass(frozen=True)
class Prediction:
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


def judge(model: CostModel, encoding: WorkloadEncoding, candidate: Candidate, usual: Candidate) -> Prediction | None:
    """Return a model's prediction for a candidate relative to an untuned kernel; None if it has no bounds."""
    bounds = bounds_of(model.about)
    if bounds is None:
        return None
    row, other = encoding.rows([candidate])[0], encoding.rows([usual], specialised=False)[0]
    gain = float(np.diff(model.predict(np.array([other, row])))[0])
    values_by_name = dict(zip(encoding.names, row.tolist(), strict=False))
    bound, low, high = np.exp(bounds.interval(gain, values_by_name)).tolist()
    return Prediction(float(np.exp(gain)), bound, low, high, model.decided(row, other))


# Model-only choice: the kernel that the pretrained model ranks first, without measuring candidates.


MARGIN = 1.2  # least predicted gain, for models without bounds
LOOKED_AT = 512  # candidates that are ranked besides the portfolio
DISPATCH = 2e-6  # seconds that the dispatch of a tuned kernel adds to a call
FORMATS = 3  # conversions to try at most before the untuned kernel is kept


class Workload(Protocol):
    """Interface of a session that predictions use."""

    space: Space

    @property
    def encoding(self) -> WorkloadEncoding: ...

    @property
    def usual(self) -> Candidate: ...

    def conversion(self, format: Format | None) -> float: ...


@dataclass(frozen=True)
class Recommendation:
    """A candidate, how many times faster than the untuned kernel it should be, and how many times it is at least."""

    candidate: Candidate
    gain: float
    least: float = 1.0


def guess(
    session: Workload, model: CostModel, *, seconds: float, amortize_over: float | None = None, seed: int = 0
) -> Recommendation | None:
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
            return Recommendation(settled, gain, gain / margin)
    return None


def _margin(model: CostModel, session: Workload) -> float:
    """Return how many times faster a candidate must look; all candidates have the features that bounds depend on."""
    bounds, encoding = bounds_of(model.about), session.encoding
    if bounds is None:
        return float(model.about.get("margin", MARGIN))
    row = encoding.rows([session.usual])[0]
    return bounds.margin(dict(zip(encoding.names, row.tolist(), strict=False)))


# Which formats and schedules a bound matrix is tried in: the rules propose, the cost model may add others.
#
# A query of the model takes time, mostly for the features of the pattern, so that it pays only if the expected calls
# take much longer. Predictions may be wrong, so that all candidates are timed in the next calls: see
# `sparsetir.runtime.adaptive`.
#
# On a machine outside of its training data, the model's first candidate reaches 0.90 of the best measured point. It is
# 0.93 if this candidate is timed beside that of the rules, and 0.967 with four candidates (`sparsetir bench --from`). A
# candidate is therefore ranked by its expected improvement, which depends on the spread of the model's errors, too:
# Jones, Schonlau and Welch, "Efficient global optimization of expensive black-box functions", 1998. Each further
# candidate must improve on those before it, whose predictions are taken as their times.


ASKING, PER_ENTRY = 0.15, 0.6e-6  # seconds of a query: once in a process, and for each entry
WORTH = 4.0  # the expected calls must take this many times the seconds of a query
SLOWER = 3.0  # typical time of a call, as a multiple of the analytic bound
CONVERSION = 60e-9  # typical seconds to convert an entry
MOST = 6  # formats to rank
MOST_TRIED = 4  # formats and schedules to time, besides those of the matrix as it is
SPREAD = 0.2  # standard deviation of the logarithm of gains, for models without bounds
TILED_COLUMNS = 16  # columns of a dense operand from which on tiles are tried
LANES = (0, 4, 8)
STEPS: tuple[dict[str, int], ...] = (
    {"prefetch": 8},
    {"unroll": 4},
    {"unroll": 4, "prefetch": 8},
    {"unroll": 4, "prefetch": 32},
)
PANELS: tuple[dict[str, int], ...] = ({"panel": 64, "unroll": 4, "prefetch": 8}, {"panel": 64, "unroll": 4})


def chosen(
    kernel: Kernel,
    matrix: Any,
    arguments: Mapping[str, Any],
    ruled: Conversion | None,
    *,
    calls: float,
    seconds: float | None = None,
    described: Pattern | None = None,
) -> list[Conversion]:
    """Return the formats and schedules that a matrix or tensor should be tried in, the likeliest first.

    Parameters
    ----------
    kernel : Kernel
    matrix : object
        The only sparse argument.
    arguments : mapping of str to object
        Of the first call.
    ruled : Conversion or None
        What the rules say; None is the format of the program.
    calls : float
        That are to come.
    seconds : float, optional
        That a call takes over the matrix as it is; estimated by default.
    described : Pattern, optional
        Numbers of the matrix, where they are known.
    """
    by_rules = [] if ruled is None else [ruled]
    source = open_source(matrix, "the matrix")
    is_readable = not isinstance(source, CompressedSource) or not (source.major or source.block)
    if not is_readable or not source.values.size:
        return by_rules
    args = kernel.prepare(dict(arguments))
    sizes = {name: int(value) for name, value in args.sizes.items()}
    work = Work.of(decode(kernel.func), sizes)
    if seconds is None:
        seconds = SLOWER * 2.0 ** work.numbers(USUAL, 1.0)["time_floor"]
    if calls * seconds < WORTH * (ASKING + PER_ENTRY * source.values.size):
        return by_rules
    described = pattern(matrix) if described is None else described
    if work.is_sparse:
        return by_rules
    encoding = _encoding(kernel, args.arrays, described, source, work)
    base = defaults.usual(kernel.func, Registers.of(kernel.target)).changed(**kernel.suitable(args))
    shapes = [np.shape(value) for value in arguments.values() if value is not matrix]
    has_room = fits(2 * MOST_TRIED * source.values.nbytes)
    likely = ranked_candidates(described, feat=dense_rows(shapes))[:MOST] if has_room else []
    on_tiles = _on_tiles(kernel, source, work) if has_room else {}
    # The model was not trained on tiles.
    formats: list[Format | None] = [None, *(f for f in likely if f not in on_tiles)]
    if ruled is not None and ruled.format not in formats:
        formats.append(ruled.format)
    pool = [(format, change) for format in formats for change in _schedules(base, encoding.operands.feat, format)]
    gains = _gains(encoding, [Candidate(base.changed(**change), format) for format, change in pool])
    if gains is None and not on_tiles:
        return by_rules
    if gains is None:
        pool, gains = pool[:1], np.ones(1)
    pool += [(format, {}) for format in on_tiles]
    gains = np.append(gains, list(on_tiles.values()))
    converting = CONVERSION * source.values.size
    return worth_trying(
        pool, gains, ruled, calls=calls, seconds=seconds, converting=converting, spread=spread_of(pretrained())
    )


def worth_trying(
    pool: Sequence[tuple[Format | None, dict[str, int]]],
    gains: np.ndarray,
    ruled: Conversion | None,
    *,
    calls: float,
    seconds: float,
    converting: float,
    spread: float,
    most: int = MOST_TRIED,
) -> list[Conversion]:
    """Return the members of a pool that may save more than trying them takes, the likeliest first.

    The second one that is tried is of another format than the first, because a model that is wrong about a format is
    wrong about all its schedules. Each must save what it and those before it take, because all are tried before any is
    kept.

    Parameters
    ----------
    pool : sequence of (Format or None, dict of str to int)
        Formats and choices; the first is the matrix as it is.
    gains : np.ndarray
        How many times as fast as the first each is expected to be.
    ruled : Conversion or None
        What the rules say, which is tried in any case.
    calls, seconds : float
        Number of calls to come, and what one takes over the matrix as it is.
    converting : float
        Seconds of a conversion.
    spread : float
        See `expected_saving`.
    most : int
        That are tried.
    """
    expected = {n: float(gain) for n, gain in enumerate(gains)}
    best, spent = expected.pop(0), 0.0
    conversions: list[Conversion] = []
    if ruled is not None:
        same = [n for n, (format, change) in enumerate(pool) if format == ruled.format and change == ruled.choices]
        best = max([best, *(expected.pop(n) for n in same if n in expected)])
        conversions.append(ruled)
    while expected and len(conversions) < most:
        tried = {conversion.format for conversion in conversions} if len(conversions) == 1 else set()
        likeliest = max((n for n in expected if pool[n][0] not in tried), key=expected.__getitem__, default=None)
        if likeliest is None:
            break
        gain, (format, change) = expected.pop(likeliest), pool[likeliest]
        spent += COMPOSING + (0.0 if format is None else converting)
        needed = spent / (seconds * expected_saving(gain / best, spread))
        if needed > calls:
            break
        conversion = Conversion(format, needed, change)
        conversions.insert(0 if gain > best else len(conversions), conversion)
        best = max(best, gain)
    return conversions


def expected_saving(gain: float, spread: float) -> float:
    """Return the share of the time that is saved, on average, where what is slower after all is not used.

    Parameters
    ----------
    gain : float
        How many times as fast a candidate is expected to be.
    spread : float
        Standard deviation of the logarithm of what the expectation is wrong by, taken to be normal.

    Examples
    --------
    >>> [round(expected_saving(gain, 0.2), 3) for gain in (0.5, 0.8, 1.0, 1.25, 2.0)]
    [0.0, 0.013, 0.077, 0.211, 0.5]
    """
    mean = math.log(gain)
    z = mean / spread
    density, share = math.exp(-z * z / 2) / math.sqrt(2 * math.pi), (1 + math.erf(z / math.sqrt(2))) / 2
    return max(-math.expm1(-(spread * density + mean * share)), 1e-12)


def spread_of(model: CostModel | None) -> float:
    """Return the standard deviation of the logarithms of what a model is wrong by."""
    bounds = None if model is None else bounds_of(model.about)
    if bounds is None:
        return SPREAD
    low, _, high = bounds.margins[""]  # quantiles of 5 and 95 in a hundred
    return (high - low) / (2 * 1.645)


def _on_tiles(kernel: Kernel, source: Source, work: Work) -> dict[Format, float]:
    """Return formats whose products of entries and gathered rows the target adds up by tiles, and their gains."""
    rows = work.gathered
    if not isinstance(source, CompressedSource) or rows is None or rows.run < TILED_COLUMNS:
        return {}
    dtypes = {b.dtype for b in kernel.signature.buffers.values() if not b.is_dense}
    kind = "bf16" if dtypes == {"bfloat16"} else "int8" if dtypes <= {"int8", "uint8"} else ""
    has_tiles = f"tile_{kind}" in Registers.of(kernel.target).units and rows.itemsize == source.values.itemsize
    return tile_formats(source) if has_tiles else {}


def _schedules(base: Choices, feat: int, format: Format | None) -> list[dict[str, int]]:
    """Return changes to choices that are looked at, none first: lanes of sums, and steps and panels of dense rows."""
    if feat == 1:
        changes = [{"lanes": lanes} for lanes in LANES] if format is None else []
    else:
        changes = [*STEPS, *(PANELS if format is None and feat >= 2 * PANELS[0]["panel"] else ())]
    base_values = base.as_dict()
    return [{}, *(c for c in changes if any(base_values[name] != value for name, value in c.items()))]


def _encoding(
    kernel: Kernel, arrays: Mapping[str, np.ndarray], described: Pattern, source: Source, work: Work
) -> WorkloadEncoding:
    """Return the encoding of candidates for a matrix."""
    facts = features.of_pattern(described)
    if isinstance(source, CompressedSource):
        facts |= features.density(source.indptr, source.indices, described.shape[1])
    own = own_storage(kernel.signature, arrays)
    return WorkloadEncoding(facts, described, own, Operands.of(work, get_num_threads(), rates_known()))


def _gains(encoding: WorkloadEncoding, candidates: list[Candidate]) -> np.ndarray | None:
    """Return the expected speedup of each candidate over the first; None without a model."""
    model = prior_for(encoding)
    if model is None:
        return None
    scores = model.predict(encoding.rows(candidates))
    return np.exp(scores - scores[0])


# ------------------------------------------------------------------------------------ conformal bounds


LEVEL = 0.9
UNKNOWN = "unknown"  # the group of operations outside of the training data
LEAST = 40  # cases from which on a group has its own quantiles
# Features that identify operations: numbers of a program that do not change with the sizes of its arguments.
PROGRAM = ("work_gathers", "work_rows", "work_streams", "work_sums", "work_is_sparse")
# Features that identify families: numbers of a matrix that do not grow with it.
COMPARED = ("row_cv", "row_gini", "row_empty", "column_gini", "panel_columns", "diagonal_share", "fill_4x4", "uneven_8")


@dataclass(frozen=True)
class Bounds:
    """Bounds for gains that a model expects, as logarithms.

    Parameters
    ----------
    margins : mapping of str to (float, float, float)
        By group, the quantiles of what the model was wrong by: those of an interval's ends, and in between the one of
        a bound from below. The group "" is of all cases, `UNKNOWN` of operations that are not `known`.
    centres : sequence of sequence of float
        Of the families that were trained on, by the numbers `COMPARED`.
    near : float
        How far the nearest family is at most, where a matrix counts as near.
    level : float
        How many of a hundred the bounds are to hold for, as a share.
    known : sequence of sequence of int
        The operations that were trained on, see `operation`; none if all are taken to be known.
    least : float
        How many times faster a kernel must look at least, whatever the group: calibrated on machines left out.
    """

    margins: Mapping[str, Sequence[float]]
    centres: Sequence[Sequence[float]] = ()
    near: float = float("inf")
    level: float = LEVEL
    known: Sequence[Sequence[int]] = ()
    least: float = 1.0

    @classmethod
    def fit(
        cls, rankings: Sequence[Ranking], level: float = LEVEL, strange: Sequence[Ranking] = (), least: float = 1.0
    ) -> Bounds:
        """Fit bounds to how a model ranked cases of families that it was not trained on.

        Parameters
        ----------
        rankings : sequence of Ranking
        level : float
        strange : sequence of Ranking
            The same by models that were not trained on the operation; none where all are taken to be known.
        least : float
            See the class.
        """
        families = {r.case.family for r in rankings}
        centres = {f: np.mean([_place(r) for r in rankings if r.case.family == f], axis=0) for f in families}
        away = {id(r): _distance(_place(r), [c for f, c in centres.items() if f != r.case.family]) for r in rankings}
        near = float(np.median(list(away.values()))) if away else float("inf")
        groups: dict[str, list[float]] = {"": []}
        for r in rankings:
            for name in {"", group(r.chosen, away[id(r)] <= near)}:
                groups.setdefault(name, []).append(r.wrong_by)
        kept = {name: quantiles(errors, level) for name, errors in groups.items() if not name or len(errors) >= LEAST}
        of_each = [[r.wrong_by for r in strange if r.case.kind == kind] for kind in {r.case.kind for r in strange}]
        enough = [errors for errors in of_each if len(errors) >= LEAST]
        operations = sorted({operation(r.chosen) for r in rankings}) if enough else []
        return cls(kept | widest(enough, level), [list(c) for c in centres.values()], near, level, operations, least)

    def interval(self, gain: float, row: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the lower bound of a gain, and the ends of its interval.

        Parameters
        ----------
        gain : float
            The logarithm of how many times faster the model expects a kernel to be.
        row : mapping of str to float
            What the model sees of it.
        """
        low, bound, high = self.margins.get(self._group(row), self.margins[""])
        return gain - bound, gain - high, gain - low

    def _group(self, row: Mapping[str, float]) -> str:
        if self.known and operation(row) not in {tuple(each) for each in self.known}:
            return UNKNOWN
        return group(row, _distance(_numbers(row), self.centres) <= self.near)

    def margin(self, row: Mapping[str, float]) -> float:
        """Return how many times faster than the untuned kernel one must look to be faster for sure."""
        return float(max(1.0, self.least, np.exp(-self.interval(0.0, row)[0])))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def group(row: Mapping[str, float], is_near: bool) -> str:
    """Return the group of a prediction: the kind of program, and whether its matrix is near to known ones."""
    does = "entries" if row.get("work_is_sparse", 0) > 0 else "rows" if row.get("work_run", 0) > 1 else "numbers"
    return f"{does} {'near' if is_near else 'far'}"


def operation(row: Mapping[str, float]) -> tuple[int, ...]:
    """Return the identity of a program's operation, independent of its name and of the sizes of its arguments.

    Examples
    --------
    >>> operation({"work_gathers": 1.0, "work_rows": 1.0, "work_streams": 1.0, "work_run": 5.0})  # SpMM
    (1, 1, 1, 0, 0, 1)
    """
    return (*(int(row.get(name, 0)) for name in PROGRAM), int(row.get("work_run", 0) > 1))


def widest(of_each: Sequence[Sequence[float]], level: float) -> dict[str, tuple[float, float, float]]:
    """Return the margins of unknown operations: wide enough for each of some operations; none where there are none.

    Examples
    --------
    >>> widest([[0.0] * 50, [0.5] * 50, [-0.5] * 50], 0.9)
    {'unknown': (-0.5, 0.5, 0.5)}
    """
    if not of_each:
        return {}
    lows, bounds, highs = zip(*(quantiles(ratios, level) for ratios in of_each), strict=True)
    return {UNKNOWN: (min(lows), max(bounds), max(highs))}


def quantiles(wrong_by: Sequence[float], level: float) -> tuple[float, float, float]:
    """Return the conformal quantiles of an interval and, in between, of a one-sided bound.

    Examples
    --------
    >>> quantiles(list(range(99)), 0.9)
    (4.0, 89.0, 94.0)
    """
    ordered = np.sort(np.asarray(wrong_by, float))
    if not ordered.size:
        return float("-inf"), float("inf"), float("inf")
    tail = (1 - level) / 2
    upper = [_at(ordered, share) for share in (level, 1 - tail)]
    return -_at(-ordered[::-1], 1 - tail), *upper  # type: ignore[return-value]


def _at(ordered: np.ndarray, share: float) -> float:
    """Return the least number that a further one is below with that probability."""
    place = math.ceil(round(share * (ordered.size + 1), 9))
    return float(ordered[place - 1]) if place <= ordered.size else float(ordered[-1])


def _place(r: Ranking) -> np.ndarray:
    return _numbers(r.chosen)


def _numbers(row: Mapping[str, float]) -> np.ndarray:
    numbers = np.array([row.get(name, np.nan) for name in COMPARED], float)
    return np.where(np.isfinite(numbers), numbers, 0.0)


def _distance(place: np.ndarray, centres: Sequence[Any]) -> float:
    """Return the distance to the nearest centre."""
    return min((float(np.linalg.norm(place - np.asarray(c))) for c in centres), default=float("inf"))


# ------------------------------------------------------------------ how often they hold


@dataclass
class Coverage:
    """Observed coverage of the bounds, for cases of one kind.

    Parameters
    ----------
    held, inside : list of bool
        Whether the gain was at least the bound, and in the interval.
    taken : list of float
        The gains of the kernels that were used: those whose bound is a gain.
    """

    held: list[bool] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return the cells of a table."""
        count = len(self.held)
        if not count:
            return ["0", "", "", "", "", ""]
        gain = f"{np.exp(np.mean(self.taken)):.2f}" if self.taken else ""
        slower = f"{np.mean(np.array(self.taken) < np.log(0.98)):.1%}" if self.taken else ""
        shares = [f"{np.mean(self.held):.1%}", f"{np.mean(self.inside):.1%}", f"{len(self.taken) / count:.0%}"]
        return [str(count), *shares, gain, slower]


HEADING = ["cases", "gain above its bound", "inside the interval", "kernel used", "its speedup", "slower than untuned"]


def coverage(rankings: Sequence[Ranking], by: str, familiar: Sequence[Ranking] | None = None) -> dict[str, Coverage]:
    """Return how often bounds hold that were made of the other families or operations (`by`), and for all together.

    Parameters
    ----------
    rankings : sequence of Ranking
        By models that were not trained on the family or operation.
    by : str
        An attribute of a case.
    familiar : sequence of Ranking, optional
        How the same cases are ranked by models that know their operation, where `rankings` is of models that do not.
    """
    table: dict[str, Coverage] = {}
    for name in sorted({str(getattr(r.case, by)) for r in rankings}):
        others = [r for r in rankings if str(getattr(r.case, by)) != name]
        if familiar is None:
            bounds = Bounds.fit(others, LEVEL)
        else:
            bounds = Bounds.fit([r for r in familiar if str(getattr(r.case, by)) != name], LEVEL, others)
        for r in (r for r in rankings if str(getattr(r.case, by)) == name):
            bound, low, high = bounds.interval(np.log(r.gain), r.chosen)
            actual = float(np.log(r.actual))
            for entry in (table.setdefault(name, Coverage()), table.setdefault("all", Coverage())):
                entry.held.append(actual >= bound)
                entry.inside.append(low <= actual <= high)
                entry.taken += [actual] if bound > 0 else []
    return table


def cells(coverages: Mapping[str, Coverage], title: str) -> list[list[str]]:
    """Return `coverage` as the cells of a table, all together last."""
    ordered = [*(name for name in coverages if name != "all"), *(["all"] if "all" in coverages else [])]
    return [[title, *HEADING], *([name, *coverages[name].cells()] for name in ordered)]


__all__ = [
    "COMPARED",
    "LEVEL",
    "UNKNOWN",
    "Bounds",
    "Coverage",
    "Prediction",
    "Recommendation",
    "bounds_of",
    "cells",
    "chosen",
    "coverage",
    "expected_saving",
    "group",
    "guess",
    "judge",
    "operation",
    "quantiles",
    "spread_of",
    "widest",
    "worth_trying",
]
