# SPDX-License-Identifier: Apache-2.0
"""Kernels from the records of earlier searches, without a search: `sparsetir.build(func, database=...)`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from sparsetir.call.assembled import AssembledKernel
from sparsetir.call.kernel import Kernel
from sparsetir.call.make import make_kernel
from sparsetir.compile.cache import versions
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.lower import single
from sparsetir.machine import machine_name
from sparsetir.script.printer import script
from sparsetir.threads import get_num_threads
from sparsetir.tuning.comparison import WORTH, Comparison, compared
from sparsetir.tuning.database import Database, Key, Record, digest
from sparsetir.tuning.templates import Template
from sparsetir.tuning.trials import is_untuned
from sparsetir.tuning.tuned import TunedKernel, Variant
from sparsetir.version import __version__


def circumstances(kernel: Kernel | AssembledKernel, template: Template | None = None) -> dict[str, Any]:
    """What a record's key says of everything but the arguments."""
    texts = [script(kernel.func), *([template.text] if template is not None else [])]
    written = kernel.signature.effects.written
    return {
        "name": kernel.name,
        "program": digest("\0".join(texts)),
        "dtype": " ".join(kernel.signature.by_name[name].dtype for name in written),
        "target": str(kernel.target),
        "machine": machine_name(),
        "threads": get_num_threads(),
        "versions": f"sparsetir {__version__} {digest(versions())}, tvm {tvm.__version__}",
    }


def recorded(func: Any, target: Any, schedule: Any, path: str | Path, *, finite: bool = False) -> TunedKernel:
    """The kernel that takes for each call what the last search for such arguments ended with.

    Parameters
    ----------
    func : PrimFunc or IRModule with one PrimFunc
    target : Target, str or dict, optional
    schedule : Template or None
        Whose knobs were searched.
    path : str or Path
        The database.
    finite : bool
        See `TunedKernel`.

    Raises
    ------
    ArgumentError
        There is no such file.
    ArgumentTypeError
        `schedule` is something else.
    """
    if schedule is not None and not isinstance(schedule, Template):
        found = type(schedule).__name__
        raise ArgumentTypeError(f"with a database the schedule is a template that was tuned, or none; found {found}")
    path = Path(path)
    if not path.is_file():
        raise ArgumentError(f"there is no database {path}: tune_sparse(..., database={str(path)!r}) makes one")
    program = single(func)
    plain: Kernel = make_kernel(program, target)
    about, records = circumstances(plain, schedule), Database(path)
    ended = {_arguments(key): (key, found) for key, found in compared(records, about["program"]) if agrees(key, about)}
    best: list[tuple[Key, dict[str, int], Record, Comparison | None]]
    best = [(key, r.fixed, r, found) for key, found in ended.values() if (r := found.best) is not None]
    best += [(key, r.fixed, r, None) for key, r in unfinished(records, about) if _arguments(key) not in ended]
    if not ended and not best:
        warn_of_no_records(path, stacklevel=4)
    variants = [_variant(program, target, schedule, *each) for each in reversed(best)]
    return TunedKernel(plain, variants, finite=finite)


def warn_of_no_records(path: Path, *, stacklevel: int) -> None:
    """Say that a database holds nothing for a kernel."""
    fields = "program, target, machine, number of threads and versions"
    warnings.warn(f"{path} has no records of this {fields}: the kernel is untuned", stacklevel=stacklevel)


def _variant(
    program: tirx.PrimFunc,
    target: Any,
    template: Template | None,
    key: Key,
    fixed: dict[str, int],
    record: Record,
    found: Comparison | None,
) -> Variant:
    argument = found.argument if found is not None else None
    return Variant(program, target, record.candidate, argument, fixed, template, key.sizes, key.pattern)


def agrees(key: Key, about: dict[str, Any]) -> bool:
    """Whether records of a key count in these `circumstances`."""
    return all(getattr(key, name) == value for name, value in about.items())


def _arguments(key: Key) -> tuple[Any, ...]:
    """What tells calls apart."""
    return key.pattern, *sorted(key.sizes.items())


def unfinished(records: Database, about: dict[str, Any]) -> Iterator[tuple[Key, Record]]:
    """The best trials of searches that were ended before their last comparison, where they are clearly better."""
    trials: dict[tuple[Any, ...], list[tuple[Key, Record]]] = {}
    for key, record, _line in records.of_program(about["program"]):
        if agrees(key, about) and record.seconds is not None:
            trials.setdefault(_arguments(key), []).append((key, record))
    for held in trials.values():
        before = [r.seconds for _, r in held if is_untuned(r) and r.seconds is not None]
        tuned = [(key, r) for key, r in held if not is_untuned(r)]
        best = min(tuned, key=lambda each: each[1].seconds or 0.0, default=None)
        if best is not None and before and (best[1].seconds or 0.0) <= WORTH * before[0]:
            yield best


__all__ = ["agrees", "circumstances", "recorded", "unfinished", "warn_of_no_records"]
