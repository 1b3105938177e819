# SPDX-License-Identifier: Apache-2.0
"""A matrix that is known when the model is built: its program over the format and with the choices that suit it.

A record of earlier tuning decides if a database has one for the matrix; else the rules of the untuned kernel do, with
conversion for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import ir, tirx

from sparsetir import ops
from sparsetir.codegen.target import make_target
from sparsetir.errors import LoweringError, SparseTIRError
from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import suited
from sparsetir.ir.usage import Usage
from sparsetir.ir.views import decode
from sparsetir.lower.annotations import CHOICES
from sparsetir.relax.programs import Program
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.transform.decompose import decompose_format
from sparsetir.tuning import TuneTask, tune_sparse


@dataclass(frozen=True)
class Chosen:
    """A program for one matrix: the function, and the arrays and numbers of its parameters but for the dense ones."""

    func: tirx.PrimFunc
    given: Mapping[str, Any]
    format: Format | None
    choices: Choices


@dataclass(frozen=True)
class Options:
    """What a model is built with.

    Parameters
    ----------
    target : Target
    database : Path, optional
        Records of `sparsetir.tune_sparse`.
    checked : bool
        Whether structures passed at run time are validated before they are used.
    finite : bool
        Whether operands are promised to hold neither infinities nor NaN.
    asked : list, optional
        Where products with constant matrices are noted, for `tasks_of`.
    """

    target: Any = None
    database: Path | None = None
    checked: bool = False
    finite: bool = False
    asked: list[tuple[str, sp.csr_array, Mapping[str, Any]]] | None = field(default=None, compare=False)


def csr_of(data: Any, indptr: Any, indices: Any, columns: int) -> sp.csr_array | None:
    """The matrix of constant arrays, rows sorted; None if one is not constant, or no format takes them as they are."""
    if not all(isinstance(part, ir.GenericConst) for part in (data, indptr, indices)):
        return None
    values, starts, numbers = (np.asarray(part.value.numpy()) for part in (data, indptr, indices))
    if values.dtype not in (np.float32, np.float64):
        return None  # scipy has no 16-bit floats
    matrix = sp.csr_array((values, numbers, starts), shape=(starts.size - 1, columns))
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    # Entries that repeat add up as the program comes to them; without them there would be fewer than it says.
    return matrix if matrix.has_canonical_format else None


def chosen(name: str, program: Program, matrix: sp.csr_array, shapes: Mapping[str, Any], options: Options) -> Chosen:
    """The program of an operator over the format and with the choices for one matrix.

    Parameters
    ----------
    name : {"spmm", "spmv", "linear"}
    program : Program
        With the matrix as buffer A.
    matrix : csr_array
    shapes : mapping of str to tuple of int
        Of the dense arguments, by buffer; empty where some size is not known.
    options : Options
    """
    if options.asked is not None and shapes:
        options.asked.append((name, matrix, shapes))
    found = _recorded(name, matrix, shapes, options) if shapes and options.database is not None else None
    format, choices = found if found is not None else (_suited(program, matrix, shapes), None)
    func, given = program.func, _arrays(matrix)
    if format is not None:
        try:
            func, given = _over(program, matrix, format, finite=options.finite or name == "linear")
        except SparseTIRError:  # the program cannot be written over it
            format = None
    if choices is None:
        choices = _untuned(func, given, shapes, options)
    return Chosen(with_choices(func, choices), given, format, choices)


def with_choices(func: tirx.PrimFunc, choices: Choices) -> tirx.PrimFunc:
    """A function that is scheduled with these choices wherever it is built."""
    return func.with_attr(CHOICES, choices.as_dict())


def _arrays(matrix: sp.csr_array) -> dict[str, Any]:
    return {"a_data": matrix.data, "indptr": matrix.indptr, "indices": matrix.indices}


def _over(
    program: Program, matrix: sp.csr_array, format: Format, *, finite: bool
) -> tuple[tirx.PrimFunc, dict[str, Any]]:
    """The program over a format, and the matrix in it by the names of parameters.

    Unless the operands may be taken as finite, not over one whose zeros are multiplied. They may where an infinity in a
    row makes NaN of that row's results only: a dense product would do no less.

    Raises
    ------
    LoweringError, VerifyError
        The program cannot be written over it.
    """
    decomposition = decompose_format(program.func, {"A": format})
    composed = ComposedKernel(decomposition)
    if decomposition.multiplies_zeros and not finite and composed.convert("A", matrix).padding:
        raise LoweringError(f"{format!r} stores zeros, which would make NaN of infinities in results without them")
    given = composed.pieces(A=matrix)
    held = {str(p.name) for p in decomposition.func.params}
    func = decomposition.func
    attrs = {name: value for name, value in program.func.attrs.items() if name not in (func.attrs or {})}
    return func.with_attr(attrs) if attrs else func, {name: value for name, value in given.items() if name in held}


def _suited(program: Program, matrix: sp.csr_array, shapes: Mapping[str, tuple[int, ...]]) -> Format | None:
    """The format of the rules."""
    widths = shapes or {"X": (1, 64)}  # a size known only at run time is assumed to be a usual one
    if any(str(buffer.dtype) in ("float16", "bfloat16") for buffer in decode(program.func).buffers.values()):
        return None
    found = suited(decode(program.func), matrix, widths)
    return found.format if found is not None else None


def _untuned(func: tirx.PrimFunc, given: Mapping[str, Any], shapes: Mapping[str, Any], options: Options) -> Choices:
    """The choices of the rules."""
    base = defaults.usual(func, Registers.of(make_target(options.target, func)))
    if not shapes:
        return base
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    dtype = next(array.dtype for array in arrays.values() if array.dtype.kind == "f")
    for name, shape in shapes.items():
        arrays[f"{name.lower()}_data"] = np.broadcast_to(np.zeros(1, dtype), shape)
    return base.changed(**defaults.changes(Usage.of(decode(func)), arrays))


def _recorded(
    name: str, matrix: sp.csr_array, shapes: Mapping[str, Any], options: Options
) -> tuple[Format | None, Choices] | None:
    """The best of earlier searches; None if there is none that is better than the untuned kernel."""
    dtype, idtype = str(matrix.data.dtype), str(matrix.indices.dtype)
    inputs = {"A": matrix, **{n: np.zeros(shape, dtype) for n, shape in operands(name, shapes).items()}}
    result = tune_sparse(tunable(name, dtype, idtype), inputs, max_trials=0, database=options.database, progress=False)
    best = result.best.candidate
    if best == result.untuned.candidate or not isinstance(best.choices, Choices):
        return None
    return best.format, best.choices


def task_of(name: str, matrix: sp.csr_array, shapes: Mapping[str, Any], calls: int = 1) -> TuneTask:
    """A product with a constant matrix as `tune_many` takes it, on random numbers."""
    rng, dtype = np.random.default_rng(0), matrix.data.dtype
    dense = {n: rng.standard_normal(shape).astype(dtype) for n, shape in operands(name, shapes).items()}
    program = tunable(name, str(dtype), str(matrix.indices.dtype))
    return TuneTask(program, {"A": matrix, **dense}, calls)


@lru_cache
def tunable(name: str, dtype: str, idtype: str) -> tirx.PrimFunc:
    """The program whose records stand for an operator."""
    return getattr(ops, name)(dtype, idtype=idtype)


def operands(name: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of the dense arguments by the names in `tunable`."""
    return {("x" if name == "spmv" else n): shape for n, shape in shapes.items()}


__all__ = ["Chosen", "Options", "chosen", "csr_of", "operands", "task_of", "tunable", "with_choices"]
