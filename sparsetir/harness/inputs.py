# SPDX-License-Identifier: Apache-2.0
"""What is measured: matrices and tensors in files or from the suite, loaded one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparsetir.errors import ArgumentError, FileFormatError, SparseTIRError
from sparsetir.files import READERS, read
from sparsetir.harness import suite
from sparsetir.unpacking import UNPACKERS


@dataclass(frozen=True)
class Source:
    """A matrix or tensor that is not in memory yet.

    Parameters
    ----------
    name : str
        What it is called in tables.
    load : callable
        Gives a scipy.sparse array or a CooTensor.
    """

    name: str
    load: Callable[[], Any]


def find_files(folder: Path) -> list[Path]:
    """Every file below `folder` whose extension `sparsetir.read` knows."""
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {folder}")
    return sorted(path for path in folder.rglob("*") if path.is_file() and extension(path) in READERS)


def extension(path: Path) -> str:
    """The suffix without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in UNPACKERS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def from_files(paths: Sequence[Path]) -> list[Source]:
    """A source for each file; that they are there is checked now, before a long run."""
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"there is no file {missing[0]}")
    return [Source(path.name.partition(".")[0], partial(read, path)) for path in paths]


def from_suite(names: str, size: str) -> list[Source]:
    """A source for each family of generated inputs: ``"all"``, or names separated by commas."""
    known = suite.families() | suite.tensors()
    chosen = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ArgumentError(f"the suite has all, {', '.join(known)}; found {unknown[0]!r}")
    return [Source(name, partial(known[name], size)) for name in chosen]


def loaded(sources: Sequence[Source]) -> Iterator[tuple[str, Any]]:
    """Name and contents of each source, one after the other; files that cannot be read are named on stderr."""
    for source in sources:
        try:
            found = source.load()
        except FileFormatError as error:
            say(f"skipped: {error}")
            continue
        yield source.name, found
        del found  # before the next one is loaded


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """An error in a line."""
    if isinstance(error, SparseTIRError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def free_memory() -> float:
    """Bytes that can be had without swapping; infinite where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    facts = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(facts["MemAvailable"].split()[0]) * 1024


__all__ = ["Source", "find_files", "free_memory", "from_files", "from_suite", "loaded", "reason", "say"]
