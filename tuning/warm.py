# SPDX-License-Identifier: Apache-2.0
"""`sparsetir warm`: machine code of candidates, compiled once a machine, for searches on any matrix.

A program depends on the matrix only by its types, so that one small matrix serves as the sample. Each kernel runs on
it, and its results are compared with those of the untuned kernel.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import formats, ops
from sparsetir.codegen.cache import CACHE_VARIABLE, cache_folder
from sparsetir.errors import ArgumentError, SparseTIRError
from sparsetir.formats.format import Format
from sparsetir.ir.effects import free_sizes
from sparsetir.ir.views import decode
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.lowered_program import Function, KernelCache
from sparsetir.tuning.measure import reason
from sparsetir.tuning.space import Values, shared, start
from sparsetir.tuning.variants import PreparedFormat
from sparsetir.utils.machine import CORES
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads.inputs import DENSE

OPS = ("spmm", "spmv", "sddmm")
DTYPES = ("float32", "float64")
ROWS, COLUMNS, DENSITY = 96, 80, 0.1  # of the sample matrix
PROCESSES = 2

# Formats that suit many patterns, and whose programs do not depend on the pattern.
FORMATS: tuple[Format | None, ...] = (
    None,
    formats.sell(C=8, sigma=64),
    formats.dcsr(),
    formats.ell(),
    formats.bsr(2, 2),
    formats.bsr(4, 1),
    formats.bsr(4, 4),
    formats.reordered(),
    formats.padded_csr(t=4),
    formats.buckets(),
    formats.sell(C=8, sigma=8192),
    formats.sell(C=16, sigma=1024),
    formats.bsr(3, 3),
    formats.bsr(8, 1),
    formats.bsr(8, 8),
    formats.blocks(2, 2),
    formats.blocks(4, 4),
    formats.columns(2),
    formats.columns(4),
    formats.hyb(2),
)


@dataclass(frozen=True)
class WarmTask:
    """A library to make: one format of a program.

    Parameters
    ----------
    op : str
        One of `OPS`.
    dtype : str
    feat : int
        Columns of the dense operands; 1 where there are none.
    format : Format or None
    """

    op: str
    dtype: str
    feat: int
    format: Format | None

    def __str__(self) -> str:
        columns = f":{self.feat}" if has_columns(self.op) else ""
        return f"{self.op}{columns} {self.dtype} {self.format if self.format is not None else 'as it is'}"


@dataclass(frozen=True)
class WarmResult:
    """Outcome of a task.

    Parameters
    ----------
    task : WarmTask
    kernels : int
    bytes : int
        Of the library.
    seconds : float
        That it took; 0 if it was there.
    refused : str, optional
        Why there is no library.
    """

    task: WarmTask
    kernels: int = 0
    bytes: int = 0
    seconds: float = 0.0
    refused: str | None = None


def has_columns(op: str) -> bool:
    """Return whether the dense operands of an operation are matrices."""
    return any(wide for _, wide in DENSE[op].values())


def tasks(ops: Sequence[str], dtypes: Sequence[str], feats: Sequence[int]) -> list[WarmTask]:
    """Return every library that is wanted.

    Raises
    ------
    ArgumentError
        There is no such operation or dtype, or a number of columns is not positive.
    """
    for names, allowed, what in ((ops, OPS, "operations"), (dtypes, DTYPES, "dtypes")):
        wrong = next((name for name in names if name not in allowed), None)
        if wrong is not None or not names:
            raise ArgumentError(f"expected some of the {what} {', '.join(allowed)}, got {wrong or 'none'}")
    if not feats or min(feats) < 1:
        raise ArgumentError(f"feat: expected positive numbers of columns, got {', '.join(map(str, feats)) or 'none'}")
    cases = [(op, dtype, f) for op, dtype in product(ops, dtypes) for f in (feats if has_columns(op) else (1,))]
    return [WarmTask(*case, format) for case in dict.fromkeys(cases) for format in FORMATS]


def portfolio(values: Values, base: Choices, pieces: int = 0) -> list[Choices]:
    """Return the choices that are compiled for a format: those that change the code, fewer for a matrix in pieces.

    Parameters
    ----------
    values : mapping of str to tuple
        The open choices.
    base : Choices
        What the untuned kernel does.
    pieces : int
        Of the format; 0 for the program as it is.
    """
    begin = start(values, base)
    assert isinstance(begin, Choices)
    fetched, smaller = {"prefetch": 8}, {"tile": begin.tile // 2}
    changes: list[dict[str, int]] = [fetched, {"stream": 1, **fetched}, {"lanes": 4}]
    if pieces < 2:
        changes += [smaller, {**smaller, **fetched}, {"stream": 1}, {"chunks": 0}]
    if not pieces:
        changes += [{**c, "tile": tile} for c in ({}, fetched) for tile in (2 * begin.tile, begin.tile // 4)]
        changes += [
            {"unroll": 2},
            {"unroll": 4},
            {"lanes": 8},
            {"lanes": 8, "staged": 64},
            {"chunks": 0, **fetched},
            {"stream": 1, **smaller},
        ]
        changes += [{"panel": panel, **fetched} for panel in values.get("panel", ()) if panel]
    inside = [c for c in changes if all(value in values.get(name, ()) for name, value in c.items())]
    return list(dict.fromkeys(shared(begin.changed(**change)) for change in ({}, *inside)))


@cache
def evaluator(op: str, dtype: str, feat: int) -> Evaluator:
    """Return an operation on the matrix that stands for all."""
    rng = np.random.default_rng(0)
    A = sp.random_array((ROWS, COLUMNS), density=DENSITY, format="csr", dtype=dtype, rng=rng)
    A.indices, A.indptr = A.indices.astype("int32"), A.indptr.astype("int32")
    func = getattr(ops, op)(dtype)
    sparse = next(buffer.name for buffer in decode(func).buffers.values() if not buffer.is_dense)
    inputs: dict[str, Any] = {sparse: A}
    for name, (dimension, wide) in DENSE[op].items():
        inputs[name] = rng.random((A.shape[dimension], feat) if wide else A.shape[dimension]).astype(dtype)
    return Evaluator(func, inputs, None)


def is_right(evaluator: Evaluator, ready: PreparedFormat, function: Function) -> bool:
    """Return whether a function computes what the untuned kernel does."""
    call = ready.workload.call(function, ready.form.names)
    return evaluator.reference.disagreement(ready.workload.fresh(call)) is None


def shelf_of(task: WarmTask) -> KernelCache:
    """Return where the library of a task is."""
    func = getattr(ops, task.op)(task.dtype)
    return KernelCache(func, None, dict.fromkeys(free_sizes(decode(func)), task.feat))


def there(task: WarmTask) -> WarmResult | None:
    """Return the library that was compiled before."""
    entry = shelf_of(task).compiled_ahead(task.format)
    return WarmResult(task, len(entry.kernels), entry.path.stat().st_size) if entry is not None else None


def make(task: WarmTask) -> WarmResult:
    """Compile a library."""
    began = time.perf_counter()
    try:
        timer, shelf = evaluator(task.op, task.dtype, task.feat), shelf_of(task)
        ready = timer.variants(task.format)
        base = defaults.usual(timer.func, Registers.of(ready.form.target))
        chosen = portfolio(ready.values, base, 0 if task.format is None else ready.stored.pieces)
        count = shelf.put(ready.form, task.format, ready.workload.feat, chosen, partial(is_right, timer, ready))
        path = shelf.path(task.format)
        size = path.stat().st_size if count and path is not None else 0
        return WarmResult(
            task, count, size, time.perf_counter() - began, None if count else "nothing could be compiled"
        )
    except (SparseTIRError, RuntimeError, OSError) as error:
        return WarmResult(task, refused=reason(error))


def warm(
    ops: Sequence[str] = OPS,
    dtypes: Sequence[str] = DTYPES[:1],
    feats: Sequence[int] = (64, 128),
    *,
    processes: int = PROCESSES,
) -> Iterator[WarmResult]:
    """Compile machine code of candidates for the searches of this machine; what is there already is left alone.

    Parameters
    ----------
    ops : sequence of {"spmm", "spmv", "sddmm"}
    dtypes : sequence of {"float32", "float64"}
    feats : sequence of int
        Columns of the dense operands, which are compiled in.
    processes : int
        That compile side by side; 1 is this one.

    Yields
    ------
    WarmResult
        Each library when it is done.

    Raises
    ------
    ArgumentError
        There is no such operation or dtype, or compiled kernels are not kept.

    Examples
    --------
    >>> from sparsetir.tuning.warm import warm
    >>> next(warm(["spmm"], ["float16"]))
    Traceback (most recent call last):
    sparsetir.errors.ArgumentError: expected some of the dtypes float32, float64, got float16
    """
    wanted = tasks(ops, dtypes, feats)
    if cache_folder() is None:
        raise ArgumentError(
            f"compiled kernels are not kept, so none can be made ahead: set {CACHE_VARIABLE} to a folder"
        )
    results = {task: there(task) for task in wanted}
    yield from (result for result in results.values() if result is not None)
    wanted = [task for task, result in results.items() if result is None]
    if processes < 2 or len(wanted) < 2:
        yield from map(make, wanted)
        return
    how: dict[str, Any] = {"mp_context": multiprocessing.get_context("spawn"), "initializer": set_num_threads}
    with ProcessPoolExecutor(min(processes, CORES), initargs=(get_num_threads(),), **how) as pool:
        try:
            for done in as_completed([pool.submit(make, task) for task in wanted]):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


__all__ = ["DTYPES", "OPS", "WarmResult", "WarmTask", "warm"]
