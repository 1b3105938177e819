# SPDX-License-Identifier: Apache-2.0
"""Specialization for constant matrices: choose the format and the schedule of a product when the model is built.

A tuning record of the matrix decides if the database has one; otherwise the heuristics of the untuned kernel do, with
conversion at no cost, since it happens once.
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
from sparsetir.ir.effects import Usage
from sparsetir.ir.views import decode
from sparsetir.lower.annotations import CHOICES
from sparsetir.relax.programs import Program
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.transform.decompose import decompose_format
from sparsetir.tuning import TuneTask, tune_sparse


@dataclass(frozen=True)
class Chosen:
    """A program specialized for one matrix, with the values of all parameters but the dense operands."""

    func: tirx.PrimFunc
    given: Mapping[str, Any]
    format: Format | None
    choices: Choices


@dataclass(frozen=True)
class Options:
    """Options of a build.

    Parameters
    ----------
    target : Target
    database : Path, optional
        Records of `sparsetir.tune_sparse`.
    checked : bool
        Whether structures passed at run time are validated before they are used.
    assume_finite : bool
        Whether operands are promised to hold neither infinities nor NaN.
    asked : list, optional
        Records products with constant matrices, for `tasks_of`.
    """

    target: Any = None
    database: Path | None = None
    checked: bool = False
    assume_finite: bool = False
    asked: list[tuple[str, sp.csr_array, Mapping[str, Any]]] | None = field(default=None, compare=False)


def csr_of(data: Any, indptr: Any, indices: Any, columns: int) -> sp.csr_array | None:
    """Return the matrix of constant arrays with sorted rows; None if an array is no constant, or no format takes it."""
    if not all(isinstance(part, ir.GenericConst) for part in (data, indptr, indices)):
        return None
    values, starts, numbers = (np.asarray(part.value.numpy()) for part in (data, indptr, indices))
    if values.dtype not in (np.float32, np.float64):
        return None  # scipy has no 16-bit floats.
    matrix = sp.csr_array((values, numbers, starts), shape=(starts.size - 1, columns))
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    # Merging repeated entries would change their number, which is a size of the program.
    return matrix if matrix.has_canonical_format else None


def chosen(name: str, program: Program, matrix: sp.csr_array, shapes: Mapping[str, Any], options: Options) -> Chosen:
    """Choose the format and the schedule of an operator's program for one matrix.

    Parameters
    ----------
    name : {"spmm", "spmv", "linear"}
    program : Program
        The program with the matrix as buffer A.
    matrix : csr_array
    shapes : mapping of str to tuple of int
        Shapes of the dense arguments, by buffer; empty where a size is not known.
    options : Options
    """
    if options.asked is not None and shapes:
        options.asked.append((name, matrix, shapes))
    record = _recorded(name, matrix, shapes, options) if shapes and options.database is not None else None
    format, choices = record if record is not None else (_suited(program, matrix, shapes), None)
    func, arrays = program.func, _arrays(matrix)
    if format is not None:
        try:
            func, arrays = _over(program, matrix, format, assume_finite=options.assume_finite or name == "linear")
        except SparseTIRError:  # The program cannot be written over this format.
            format = None
    if choices is None:
        choices = _untuned(func, arrays, shapes, options)
    return Chosen(with_choices(func, choices), arrays, format, choices)


def with_choices(func: tirx.PrimFunc, choices: Choices) -> tirx.PrimFunc:
    """Return a function with these choices as an attribute, so that every build schedules it with them."""
    return func.with_attr(CHOICES, choices.as_dict())


def _arrays(matrix: sp.csr_array) -> dict[str, Any]:
    return {"a_data": matrix.data, "indptr": matrix.indptr, "indices": matrix.indices}


def _over(
    program: Program, matrix: sp.csr_array, format: Format, *, assume_finite: bool
) -> tuple[tirx.PrimFunc, dict[str, Any]]:
    """Return the program over a format, and the arrays of the converted matrix by the names of parameters.

    Unless `assume_finite`, a format whose padding is multiplied is rejected, since an infinity times a stored zero is
    NaN. A caller may pass `assume_finite` where an infinity affects its own row of results only: a dense product does
    the same.

    Raises
    ------
    LoweringError, VerifyError
        The program cannot be written over the format.
    """
    decomposition = decompose_format(program.func, {"A": format})
    composed = ComposedKernel(decomposition)
    if decomposition.multiplies_zeros and not assume_finite and composed.convert("A", matrix).padding:
        raise LoweringError(f"{format!r} stores zeros, which would make NaN of infinities in results without them")
    arrays = composed.pieces(A=matrix)
    params = {str(p.name) for p in decomposition.func.params}
    func = decomposition.func
    attrs = {name: value for name, value in program.func.attrs.items() if name not in (func.attrs or {})}
    return func.with_attr(attrs) if attrs else func, {name: value for name, value in arrays.items() if name in params}


def _suited(program: Program, matrix: sp.csr_array, shapes: Mapping[str, tuple[int, ...]]) -> Format | None:
    """Return the format that the heuristics choose."""
    widths = shapes or {"X": (1, 64)}  # A typical width stands for a size that is known only at run time.
    if any(str(buffer.dtype) in ("float16", "bfloat16") for buffer in decode(program.func).buffers.values()):
        return None
    choice = suited(decode(program.func), matrix, widths)
    return choice.format if choice is not None else None


def _untuned(func: tirx.PrimFunc, values: Mapping[str, Any], shapes: Mapping[str, Any], options: Options) -> Choices:
    """Return the choices of the heuristics for an untuned kernel."""
    base = defaults.usual(func, Registers.of(make_target(options.target, func)))
    if not shapes:
        return base
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    dtype = next(array.dtype for array in arrays.values() if array.dtype.kind == "f")
    for name, shape in shapes.items():
        arrays[f"{name.lower()}_data"] = np.broadcast_to(np.zeros(1, dtype), shape)
    return base.changed(**defaults.changes(Usage.of(decode(func)), arrays))


def _recorded(
    name: str, matrix: sp.csr_array, shapes: Mapping[str, Any], options: Options
) -> tuple[Format | None, Choices] | None:
    """Return the best format and choices of earlier searches; None if none is faster than the untuned kernel."""
    dtype, idtype = str(matrix.data.dtype), str(matrix.indices.dtype)
    inputs = {"A": matrix, **{n: np.zeros(shape, dtype) for n, shape in operands(name, shapes).items()}}
    result = tune_sparse(tunable(name, dtype, idtype), inputs, max_trials=0, database=options.database, progress=False)
    best = result.best.candidate
    if best == result.untuned.candidate or not isinstance(best.choices, Choices):
        return None
    return best.format, best.choices


def task_of(name: str, matrix: sp.csr_array, shapes: Mapping[str, Any], calls: int = 1) -> TuneTask:
    """Return a product with a constant matrix as a task for `tune_many`, with random operands."""
    rng, dtype = np.random.default_rng(0), matrix.data.dtype
    dense = {n: rng.standard_normal(shape).astype(dtype) for n, shape in operands(name, shapes).items()}
    program = tunable(name, str(dtype), str(matrix.indices.dtype))
    return TuneTask(program, {"A": matrix, **dense}, calls)


@lru_cache
def tunable(name: str, dtype: str, idtype: str) -> tirx.PrimFunc:
    """Return the program under which records of an operator are stored."""
    return getattr(ops, name)(dtype, idtype=idtype)


def operands(name: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of the dense arguments by the names in `tunable`."""
    return {("x" if name == "spmv" else n): shape for n, shape in shapes.items()}


__all__ = ["Chosen", "Options", "chosen", "csr_of", "operands", "task_of", "tunable", "with_choices"]
