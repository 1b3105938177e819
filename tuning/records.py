# SPDX-License-Identifier: Apache-2.0
"""Records of trials on disk, JSON lines that are only appended, and those of similar matrices for warm starts."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from math import log2, sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sparsetir.errors import ArgumentTypeError, TuningError
from sparsetir.formats.encoding import parse_format
from sparsetir.formats.pattern import hash_indices
from sparsetir.ir.views import Program
from sparsetir.schedules import Choices
from sparsetir.tuning.features import SPECIALISED
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.measure import MeasurementPlace
from sparsetir.tuning.model import of_width
from sparsetir.tuning.space import Candidate
from sparsetir.utils.arguments import as_path, shown
from sparsetir.utils.caches import cached_property

# Trials on disk: one JSON object per line, append-only.
#
# Several processes may write to one file: a line is written by a single call at the end of the file. A line that a
# killed process left half-written is skipped, and the next writer begins a new one.


FORMAT = 2
HEAD = b'{"format"'  # the beginning of a line of any version
CHOICES, KNOBS = "choices", "knobs"  # each line has one of these keys


@dataclass(frozen=True)
class Key:
    """Key of a record: what a time depends on besides the choices; records of another key do not count.

    Parameters
    ----------
    name, program : str
        Name of the function, and a hash of its text; of a template's, too, where one is searched.
    pattern : str
        Hash of the index arrays, see `fingerprint`.
    sizes : dict of str to int
        Every size symbol.
    dtype : str
        Of the outputs.
    target, machine : str
    threads : int
    versions : str
        Of this package, its compiler sources and TVM.
    """

    name: str
    program: str
    pattern: str
    sizes: dict[str, int]
    dtype: str
    target: str
    machine: str
    threads: int
    versions: str


@dataclass(frozen=True)
class Record:
    """One trial.

    Parameters
    ----------
    choices : Choices or Config
        Of the sketches, or of a template's knobs.
    stored_as : str or None
        The format of the sparse argument as it prints; None is as the program declares it.
    fixed : dict of str to int
        Sizes that were compiled in; none in the untuned kernel.
    seconds : float or None
        Of a typical call, a quarter of the calls being faster, at the usual pace of the machine; None if the candidate
        failed.
    median, spread : float or None
        Of the calls as they were measured; the spread is the distance of the quartiles relative to the median.
    error : str or None
        Why it failed.
    predicted : float or None
        What the cost model said before.
    conversion : float
        Seconds that storing the argument in the format took.
    elapsed : float
        Seconds of search when the trial was done.
    seed : int
        Of the search.
    best : float or None
        The fastest trial so far, this one included; not written to disk.
    reused : bool
        Whether it was read from the database.
    place : MeasurementPlace, optional
        Where a worker of an executor measured it; on disk part of the key.
    load : float, optional
        The load average of that machine.
    """

    choices: Choices | Config
    stored_as: str | None = None
    fixed: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
    median: float | None = None
    spread: float | None = None
    error: str | None = None
    predicted: float | None = None
    conversion: float = 0.0
    elapsed: float = 0.0
    seed: int = 0
    best: float | None = None
    reused: bool = False
    place: MeasurementPlace | None = None
    load: float | None = None

    @cached_property
    def candidate(self) -> Candidate:
        """The candidate that was measured."""
        return Candidate(self.choices, parse_format(self.stored_as) if self.stored_as else None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "choices": self.choices.as_dict()}


NUMBER = (int, float)
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("stored_as", "error"), (str, type(None))),
    **dict.fromkeys(("seconds", "median", "spread", "predicted"), (*NUMBER, type(None))),
    **dict.fromkeys(("conversion", "elapsed"), NUMBER),
    **dict.fromkeys(("fixed", "sizes"), (dict,)),
    **dict.fromkeys(("seed", "threads"), (int,)),
    **dict.fromkeys(("name", "program", "pattern", "dtype", "target", "machine", "versions"), (str,)),
}
KEYS = [f.name for f in fields(Key)]
SAVED = [f.name for f in fields(Record) if f.name not in ("choices", "best", "reused", "place", "load")]


def digest(text: str | bytes) -> str:
    """Return a short name for a content."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def fingerprint(program: Program, arrays: Mapping[str, np.ndarray]) -> str:
    """Return a hash of the patterns of a program's arguments as they are stored: of the axes and every index array."""
    axes = list(program.axes.values())
    buffers = [buffer for axis in axes for buffer in (axis.indptr, axis.indices) if buffer is not None]
    return hash_indices(" ".join(axis.kind for axis in axes), [arrays[str(buffer.name)] for buffer in buffers])


def _check_class(value: Any, kind: type, name: str) -> None:
    """Raise unless an argument is of the class that it should be."""
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name}: expected a {kind.__name__}, got {shown(value)}. Pass one.")


@dataclass
class Database:
    """Records in a JSON-lines file, or in memory only.

    Parameters
    ----------
    path : Path, optional
        The file; made with its folder when the first record is added.
    """

    path: Path | None = None
    _file: int | None = field(default=None, repr=False)
    _is_checked: bool = field(default=False, repr=False)
    _has_written: bool = field(default=False, repr=False)
    _is_lost: bool = field(default=False, repr=False)
    is_vital: ClassVar[bool] = False  # whether a search without a writable file is useless

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path = as_path(self.path, "path", "the path of a file of records")

    def load(self, key: Key) -> list[Record]:
        """Return records of `key` in the order of the file; of several for one candidate the first."""
        _check_class(key, Key, "key")
        self._has_written = self._is_lost = False  # a new search begins
        key_fields = json.loads(json.dumps(asdict(key)))
        records_by_kind: dict[Any, Record] = {}
        for line in self.lines(key.pattern.encode()):
            if line.get("format") != FORMAT or any(line.get(name) != value for name, value in key_fields.items()):
                continue
            record = _record(line)
            if record is not None:
                records_by_kind.setdefault((record.choices, record.stored_as, bool(record.fixed)), record)
        return list(records_by_kind.values())

    def of_program(self, program: str) -> Iterator[tuple[Key, Record, dict[str, Any]]]:
        """Return `everything` of a program, by the hash of its text."""
        _check_class(program, str, "program")
        return self._read(program.encode())

    def everything(self) -> Iterator[tuple[Key, Record, dict[str, Any]]]:
        """Return every record with its key, and its line with whatever else was noted."""
        return self._read(b"")

    def _read(self, text: bytes) -> Iterator[tuple[Key, Record, dict[str, Any]]]:
        for line in self.lines(text):
            record = _record(line) if line.get("format") == FORMAT else None
            key = key_of(line)
            if record is not None and key is not None:
                yield key, record, line

    def lines(self, text: bytes = b"") -> Iterator[dict[str, Any]]:
        """Yield the objects of the file whose lines contain a text."""
        if self.path is None or not self.path.exists():
            return
        self._check(self.path)
        with self.path.open("rb") as stream:
            for raw in stream:
                if text not in raw:
                    continue
                try:
                    line = json.loads(raw)
                except (ValueError, RecursionError):
                    continue
                if isinstance(line, dict):
                    yield line

    def _check(self, path: Path) -> None:
        """Refuse a file that holds something else, before lines are added to it."""
        if self._is_checked:
            return
        self._check_kind(path)
        try:
            with path.open("rb") as stream:
                is_ours = path.stat().st_size == 0 or any(line.startswith(HEAD) for line in stream)
        except OSError as error:
            fault = f"the database {path} cannot be read: {error.strerror or error}"
            raise TuningError(f"{fault}; try another path") from error
        if not is_ours:
            fault = "expected lines of records, got something else"
            raise TuningError(f"{path} is no database: {fault}; try another path")
        self._is_checked = True

    @staticmethod
    def _check_kind(path: Path) -> None:
        """Refuse a device or a pipe: reading one may have no end."""
        if path.exists() and not path.is_file() and not path.is_dir():
            raise TuningError(f"the database {path} is no file; try another path")

    def append(self, key: Key, record: Record, **facts: Any) -> None:
        """Add a record, with more facts about it if there are any."""
        _check_class(key, Key, "key")
        _check_class(record, Record, "record")
        saved = {name: getattr(record, name) for name in SAVED}
        saved |= {"load": record.load} if record.load is not None else {}
        kind = KNOBS if isinstance(record.choices, Config) else CHOICES
        self.add({"format": FORMAT, **asdict(key), kind: record.choices.as_dict(), **saved, **facts})

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Raises
        ------
        TuningError
            It cannot be written. Where others were before it, that is a warning, and no more are: a search of an hour
            must not be lost with its disk.
        """
        if self.path is None or self._is_lost:
            return
        if self._file is None:
            self._file = self._open(self.path)
        data = json.dumps(line).encode() + b"\n"
        with self._going_on(), self._writing():
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._has_written = True

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Warn of what cannot be written after something was."""
        try:
            yield
        except TuningError as error:
            if not self._has_written or self.is_vital:
                raise
            self._is_lost = True
            warnings.warn(f"no more trials are recorded: {error}", RuntimeWarning, stacklevel=2)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"the database {self.path} cannot be written: {error.strerror or error}"
            raise TuningError(f"{why}; try another path") from error

    def _open(self, path: Path) -> int:
        self._check_kind(path)
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self._check(path)
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                with self._writing():
                    os.write(file, b"\n")
        except TuningError:
            os.close(file)
            raise
        return file

    def close(self) -> None:
        """Return when every record is on disk."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            with self._going_on(), self._writing():
                os.fsync(file)
        finally:
            os.close(file)


def _record(line: dict[str, Any]) -> Record | None:
    """Return the record of a line; None if another version of the choices wrote it, or something else."""
    if not all(_fits(line, name) for name in SAVED):
        return None
    try:
        choices = Config.of(dict(line[KNOBS])) if KNOBS in line else Choices(**line[CHOICES])
        record = Record(choices, **{name: line[name] for name in SAVED}, reused=True)
        return record if record.candidate else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def key_of(line: dict[str, Any]) -> Key | None:
    """Return the key of a line; None if a field is missing or of another type."""
    return Key(**{name: line[name] for name in KEYS}) if all(_fits(line, name) for name in KEYS) else None


def _fits(line: dict[str, Any], name: str) -> bool:
    """Return whether a field is there and of its type; a dict names whole numbers."""
    value = line.get(name, ...)
    parts = value.values() if isinstance(value, dict) else []
    is_whole = all(isinstance(part, int) and not isinstance(part, bool) for part in parts)
    return isinstance(value, KINDS[name]) and not isinstance(value, bool) and is_whole


# Recorded trials, grouped by what was tuned.


LEAST = 8  # minimum trials of a case


@dataclass(frozen=True, eq=False)
class Recording:
    """The recorded trials of one program on one matrix.

    Parameters
    ----------
    name : str
    seconds : mapping of Candidate to float
        Infinite for those that failed.
    features : mapping of Candidate to ndarray
        What the cost model saw; not a number where a candidate lacks a knob of another.
    names : tuple of str
        Of the features.
    matrix, family, op : str
        What the matrix is called, what kind it is, and the operation; "" where unknown.
    untuned : (float, ndarray) or None
        Seconds and features of the kernel that is built without tuning.
    passes : sequence of mapping of Candidate to float
        The first and the second measurement of those that were measured more than once and ran; `seconds` has the
        mean of all.
    kind, dtype : str
        The operation without its sizes, and the type of its values; "" where unknown.
    threads : int
        0 where unknown.
    mcpu : str
        The processor that kernels were compiled for; "" where unknown.
    is_placed : bool
        Whether times among the features use measured rates of the machine, rather than those of a usual one.
    """

    name: str
    seconds: Mapping[Candidate, float]
    features: Mapping[Candidate, np.ndarray]
    names: tuple[str, ...] = ()
    matrix: str = ""
    family: str = ""
    op: str = ""
    untuned: tuple[float, np.ndarray] | None = field(default=None, repr=False)
    passes: tuple[Mapping[Candidate, float], ...] = field(default=(), repr=False)
    kind: str = ""
    dtype: str = ""
    threads: int = 0
    mcpu: str = ""
    is_placed: bool = False

    @property
    def best(self) -> float:
        """The fastest of all."""
        return min(self.seconds.values())

    @property
    def ran(self) -> list[Candidate]:
        """Those that did not fail."""
        return [c for c, seconds in self.seconds.items() if np.isfinite(seconds)]

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return features of the trials that ran, and their seconds."""
        candidates = self.ran
        return np.array([self.features[c] for c in candidates]), np.array([self.seconds[c] for c in candidates])


def load(path: Path, *, spread: float = float("inf")) -> list[Recording]:
    """Return the cases of a database, those of at least `LEAST` trials.

    Of several measurements of one candidate the geometric mean counts. Records that say which matrix they are of belong
    together whatever version measured them; others by their key. The untuned kernel is no candidate of a search of
    knobs, and templates are identified by their text.

    Parameters
    ----------
    path : Path
    spread : float
        Trials whose quartiles were farther apart than this, relative to the median, are left out: the machine was busy.

    Raises
    ------
    TuningError
        There is none, or the records have no features.
    """
    cases_by_name: dict[str, dict[str, Any]] = {}
    for key, record, line in Database(path).everything():
        if "features" not in line or (record.spread or 0.0) > spread:
            continue
        label = {name: str(line.get(name, "")) for name in ("matrix", "family", "op")}
        sizes = {} if line["features"].get(SPECIALISED) == 0.0 else record.fixed
        kind = f"Config {key.program}" if isinstance(record.choices, Config) else "Choices"
        name = f"{key.name} {label['matrix'] or key.pattern} {label['op'] or json.dumps(sizes)} {kind}"
        seconds = float("inf") if record.seconds is None else record.seconds
        case = cases_by_name.setdefault(name, {**label, "names": list(line["features"]), "trials": {}, "untuned": None})
        names, features = case["names"], line["features"]
        if isinstance(record.choices, Config):  # of which formats may have different ones
            names += [name for name in features if name not in names]
        elif list(features) != names:
            continue
        row = np.array([features.get(name, np.nan) for name in names], np.float32)
        if line["features"].get(SPECIALISED) == 0.0:
            case["untuned"] = case["untuned"] or (seconds, row)
        else:
            case["trials"].setdefault(record.candidate, ([], row))[0].append(seconds)
    cases = [
        _recording(name, case_facts) for name, case_facts in cases_by_name.items() if len(case_facts["trials"]) >= LEAST
    ]
    cases = [case for case in cases if np.isfinite(case.best)]
    if not cases:
        raise TuningError(f"expected records of at least {LEAST} trials of one case in {path}, got none")
    return cases


def _recording(name: str, facts: dict[str, Any]) -> Recording:
    trials = facts["trials"]
    return Recording(
        name,
        {c: _mean(seconds) for c, (seconds, _) in trials.items()},
        dict(zip(trials, of_width([row for _, row in trials.values()], len(facts["names"])), strict=True)),
        tuple(facts["names"]),
        facts["matrix"] or name,
        facts["family"] or name,
        facts["op"] or name.partition(" ")[0],
        facts["untuned"],
        tuple({c: ran(seconds)[n] for c, (seconds, _) in trials.items() if len(ran(seconds)) > 1} for n in range(2)),
    )


def _mean(seconds: Sequence[float]) -> float:
    """Return the geometric mean of the measurements that ran: the least of several would be that of the luckiest."""
    return float(np.exp(np.mean(np.log(ran(seconds))))) if ran(seconds) else float("inf")


def ran(seconds: Sequence[float]) -> list[float]:
    """Return the measurements that are numbers."""
    return [value for value in seconds if np.isfinite(value)]


# ------------------------------------------------------------------------------------ similar matrices


# Generated matrices of one family with 20,000 and 100,000 entries are 0.3 to 0.7 apart; of pairs from different
# families, one in twenty-five is nearer than this.
RADIUS = 0.6
PATTERNS, EACH = 2, 2  # number of similar patterns, and of candidates from each
FARTHEST = 4.0  # maximum contribution of one feature to the distance
# Features that grow with the matrix have a small weight: a kernel suits larger matrices of the same kind, too.
SIZES = ("nnz", "rows", "columns", "fibers_0", "fibers_1", "row_max", "column_max", "reuse", "diagonals", "profile")
IMAGE = "cell_"  # prefix of the features of the density image
SIZE_WEIGHT = 0.1


@dataclass
class SimilarPattern:
    """A pattern in a database.

    Parameters
    ----------
    distance : float
    records : list of Record
        Of its candidates that ran.
    """

    distance: float
    records: list[Record] = field(default_factory=list)

    def best(self, count: int) -> list[Candidate]:
        """Return its fastest candidates."""
        ranked = sorted(self.records, key=lambda r: (r.seconds or 0.0, r.candidate.key))
        return list(dict.fromkeys(r.candidate for r in ranked))[:count]


def distance(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return the distance of two patterns by the numbers of `features.of_pattern`; infinite if none are shared.

    Sizes count little.
    """
    common = [name for name in first if name in second and not name.startswith(IMAGE)]
    weights = [SIZE_WEIGHT if name in SIZES else 1.0 for name in common]
    apart = [min(abs(first[name] - second[name]), FARTHEST) for name in common]
    total = sum(weights)
    return sqrt(sum(w * a * a for w, a in zip(weights, apart, strict=True)) / total) if total else float("inf")


def neighbours(
    records: Database, key: Key, facts: Mapping[str, float], fixed: Mapping[str, int], *, radius: float = RADIUS
) -> list[SimilarPattern]:
    """Return the patterns in a database that are near one's own, the nearest first.

    Records count if they are of the same program, dtype, target and number of threads, and of the same sizes that are
    compiled in; of the very same pattern, those of other sizes count too, by how far they are.

    Parameters
    ----------
    records : Database
    key : Key
        Of the search; its own records do not count.
    facts : mapping of str to float
        Numbers of the pattern.
    fixed : mapping of str to int
        Sizes that are compiled in.
    radius : float
        Patterns farther away are left out.
    """
    by_place: dict[tuple[object, ...], SimilarPattern] = {}
    for other, record, line in records.of_program(key.program):
        like = (other.dtype, other.target, other.threads) == (key.dtype, key.target, key.threads)
        if not like or record.seconds is None or record.fixed.keys() != fixed.keys() or is_own(other, key):
            continue
        place = (other.pattern, *record.fixed.values())
        if place not in by_place:
            away = _away(other, key, record.fixed, fixed, facts, line.get("features", {}))
            by_place[place] = SimilarPattern(away)
        by_place[place].records.append(record)
    near = [n for n in by_place.values() if n.distance <= radius]
    return sorted(near, key=lambda n: n.distance)


def is_own(other: Key, key: Key) -> bool:
    """Return whether a record is one that the search reads anyway."""
    return (other.pattern, other.sizes, other.versions) == (key.pattern, key.sizes, key.versions)


def _away(
    other: Key,
    key: Key,
    other_sizes: Mapping[str, int],
    fixed: Mapping[str, int],
    facts: Mapping[str, float],
    features: Mapping[str, float],
) -> float:
    """Return how far a case is: of the same pattern by its sizes, else by its numbers if the sizes are equal."""
    if other.pattern == key.pattern:
        return SIZE_WEIGHT * sum(abs(log2(other_sizes[name] / fixed[name])) for name in fixed)
    return distance(facts, features) if dict(other_sizes) == dict(fixed) else float("inf")


def hints(records: Database, key: Key, facts: Mapping[str, float], fixed: Mapping[str, int]) -> Sequence[Candidate]:
    """Return the candidates that were best for the nearest patterns; none where no pattern is near."""
    neighbour_list = neighbours(records, key, facts, fixed)[:PATTERNS] if facts else []
    return list(dict.fromkeys(c for neighbour in neighbour_list for c in neighbour.best(EACH)))


__all__ = ["LEAST", "RADIUS", "Recording", "SimilarPattern", "distance", "hints", "load", "neighbours"]
