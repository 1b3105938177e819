# SPDX-License-Identifier: Apache-2.0
"""Structures of matrices: specialization for constant ones, and validation and transposition of ones known at run time.

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
from tvm import ir, relax, tirx

from sparsetir import ops
from sparsetir.codegen.target import make_target
from sparsetir.errors import ArgumentError, LoweringError, SparseTIRError, StructureError
from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import choose_format
from sparsetir.interop.arrays import HALVES
from sparsetir.ir.effects import Usage
from sparsetir.ir.rewriting import KINDS
from sparsetir.ir.views import decode
from sparsetir.lower.annotations import CHOICES
from sparsetir.relax.programs import NamedProgram
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.runtime.signature import numpy_dtype
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.script.printer import parse
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
class BuildOptions:
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
    if values.dtype not in (np.float32, np.float64, np.int8, np.uint8):
        return None  # scipy has no 16-bit floats.
    matrix = sp.csr_array((values, numbers, starts), shape=(starts.size - 1, columns))
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    # Merging repeated entries would change their number, which is a size of the program.
    return matrix if matrix.has_canonical_format else None


def chosen(
    name: str, program: NamedProgram, matrix: sp.csr_array, shapes: Mapping[str, Any], options: BuildOptions
) -> Chosen:
    """Choose the format and the schedule of an operator's program for one matrix.

    Parameters
    ----------
    name : {"spmm", "spmv", "linear"}
    program : NamedProgram
        The program with the matrix as buffer A.
    matrix : csr_array
    shapes : mapping of str to tuple of int
        Shapes of the dense arguments, by buffer; empty where a size is not known.
    options : BuildOptions
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
    program: NamedProgram, matrix: sp.csr_array, format: Format, *, assume_finite: bool
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


def _suited(program: NamedProgram, matrix: sp.csr_array, shapes: Mapping[str, tuple[int, ...]]) -> Format | None:
    """Return the format that the heuristics choose."""
    widths = shapes or {"X": (1, 64)}  # A typical width stands for a size that is known only at run time.
    if any(str(buffer.dtype) in HALVES for buffer in decode(program.func).buffers.values()):
        return None
    choice = choose_format(decode(program.func), matrix, widths)
    return choice.format if choice is not None else None


def _untuned(
    func: tirx.PrimFunc, values: Mapping[str, Any], shapes: Mapping[str, Any], options: BuildOptions
) -> Choices:
    """Return the choices of the heuristics for an untuned kernel."""
    base = defaults.usual(func, Registers.of(make_target(options.target, func)))
    if not shapes:
        return base
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    dtypes = {str(buffer.name): str(buffer.dtype) for buffer in decode(func).buffers.values()}
    for name, shape in shapes.items():
        arrays[f"{name.lower()}_data"] = np.broadcast_to(np.zeros(1, numpy_dtype(dtypes[name])), shape)
    return base.changed(**defaults.changes(Usage.of(decode(func)), arrays))


def _recorded(
    name: str, matrix: sp.csr_array, shapes: Mapping[str, Any], options: BuildOptions
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


# ------------------------------------------------------------------------ structures known at run time


# Validation of a structure that comes at run time, before a kernel follows its indices.
#
# before::
#
#     lv = R.call_tir(cls.spmm, (indptr, indices, data, B), ...)
#
# after::
#
#     lv = R.call_tir(cls.check_structure, (indptr, indices, n), out_ty=R.Tensor((p,), "int32"))
#     lv1 = R.call_tir(cls.spmm, (lv, indices, data, B), ...)
#
# The check returns a copy of `indptr`, so that no pass removes it as unused. It costs one pass over the index arrays.


TEXT = """
@T.prim_func
def check_structure({inputs}, {sizes}out: T.Buffer((p,), "{idtype}")):
    T.func_attr({{"op_pattern": 8, "tirx.is_scheduled": True}})
    with T.sblock("check"):
        T.reads()
        T.writes()
        assert p >= 1, (
            "{kind}", ["R.sparse.{name}: indptr must have one element more than there are rows, got none"])
        bad = T.alloc_buffer((1,), "int32", scope="local")
        bad[0] = T.Cast("int32", T.Or(indptr[0] != 0, T.Cast("int64", indptr[p - 1]) != T.Cast("int64", {count})))
        for i in T.serial(p - 1):
            bad[0] = T.bitwise_or(bad[0], T.Cast("int32", indptr[i + 1] < indptr[i]))
            out[i] = indptr[i]
        out[p - 1] = indptr[p - 1]
        assert bad[0] == 0, ("{kind}", ["R.sparse.{name}: indptr must rise from 0 to the number of entries"])
"""
RANGE = """
        for j in T.serial(nnz):
            outside = T.Or({array}[j] < 0, T.Cast("int64", {array}[j]) >= n_{array})
            bad[0] = T.bitwise_or(bad[0], T.Cast("int32", outside))
        assert bad[0] == 0, ("{kind}", ["R.sparse.{name}: {array} must be from 0 to one less than the {meaning}"])
"""
MEANINGS = {
    "indices": "number of columns",
    "kinds": "number of matrices",
    "left": "number of rows of X",
    "right": "number of rows of Y",
}


@lru_cache
def check_structure(name: str, idtype: str, arrays: tuple[str, ...]) -> tirx.PrimFunc:
    """Return the function that validates ``indptr`` and the ranges of index arrays, and copies ``indptr``.

    Parameters
    ----------
    name : str
        Name of the operator, for messages.
    idtype : {"int32", "int64"}
    arrays : tuple of {"indices", "kinds", "left", "right"}
        Each adds its upper bound as a parameter. Without index arrays the number of entries is a parameter.
    """
    inputs = [f'indptr: T.Buffer(("p",), "{idtype}")']
    inputs += [
        f'{array}: T.Buffer(({"nnz" if n else chr(34) + "nnz" + chr(34)},), "{idtype}")'
        for n, array in enumerate(arrays)
    ]
    sizes = [f"n_{array}: T.int64, " for array in arrays] or ["count: T.int64, "]
    count, kind = "nnz" if arrays else "count", KINDS[StructureError]
    text = TEXT.format(inputs=", ".join(inputs), sizes="".join(sizes), idtype=idtype, name=name, count=count, kind=kind)
    text += "".join(RANGE.format(array=array, name=name, kind=kind, meaning=MEANINGS[array]) for array in arrays)
    return parse(text).without_attr("global_symbol")


def checked(builder: relax.BlockBuilder, name: str, indptr: Any, bounds: dict[str, tuple[Any, Any]], count: Any) -> Any:
    """Emit the validation of `indptr` and index arrays, and return the validated copy of `indptr`.

    Parameters
    ----------
    builder : BlockBuilder
    name : str
        Name of the operator.
    indptr : Expr
    bounds : dict of str to (Expr, Expr)
        Index arrays by name, each with the exclusive upper bound of its elements.
    count : Expr
        The number of entries, used where there are no index arrays.
    """
    idtype = str(indptr.ty.dtype.dtype)
    var = builder.add_func(check_structure(name, idtype, tuple(bounds)), f"check_{name}")
    limits = [limit for _, limit in bounds.values()] or [count]
    numbers = [tirx.const(0, "int64") + limit if isinstance(limit, int) else limit for limit in limits]
    args = [indptr, *(array for array, _ in bounds.values()), *numbers]
    return builder.emit(relax.call_tir(var, args, indptr.ty))


def check_constants(name: str, indptr: Any, bounds: dict[str, tuple[Any, int]], count: int | None) -> None:
    """Raise unless constant arrays are a valid structure.

    Parameters
    ----------
    name : str
        Name of the operator.
    indptr : GenericConst
    bounds : dict of str to (GenericConst, int)
        Index arrays by name, each with the exclusive upper bound of its elements.
    count : int, optional
        The number of entries, used where there are no index arrays.

    Raises
    ------
    ArgumentError
    """
    starts = indptr.value.numpy()
    index_arrays = {array: (array_constant.value.numpy(), limit) for array, (array_constant, limit) in bounds.items()}
    nnz = next((values.size for values, _ in index_arrays.values()), count)
    if starts.size < 1 or starts[0] != 0 or starts[-1] != nnz or np.any(np.diff(starts) < 0):
        raise ArgumentError(f"R.sparse.{name}: indptr must rise from 0 to {nnz}, the number of entries")
    for array, (values, limit) in index_arrays.items():
        if values.size and not 0 <= values.min() <= values.max() < limit:
            fault = f"{array} must be from 0 to {limit - 1}, got {values.min()} to {values.max()}"
            raise ArgumentError(f"R.sparse.{name}: {fault}")


def is_known(*arrays: Any) -> bool:
    """Return whether all arrays are constants."""
    return all(isinstance(array, ir.GenericConst) for array in arrays)


# Transposition of a structure: column pointers, the row of each entry, and the permutation of the entries.


TRANSPOSE_TEXT = """
@T.prim_func
def transpose(
    indptr: T.Buffer(("p",), "{idtype}"), indices: T.Buffer(("nnz",), "{idtype}"), n: T.int64,
    starts: T.Buffer((n + 1,), "{idtype}"), rows: T.Buffer((nnz,), "{idtype}"), order: T.Buffer((nnz,), "{idtype}"),
):
    T.func_attr({{"op_pattern": 8, "tirx.is_scheduled": True}})
    with T.sblock("transpose"):
        T.reads()
        T.writes()
        for j in T.serial(n + 1):
            starts[j] = T.{idtype}(0)
        for e in T.serial(nnz):
            starts[indices[e] + 1] = starts[indices[e] + 1] + T.{idtype}(1)
        for j in T.serial(n):
            starts[j + 1] = starts[j + 1] + starts[j]
        for i in T.serial(p - 1):
            for e in T.serial(indptr[i], indptr[i + 1]):
                rows[starts[indices[e]]] = T.Cast("{idtype}", i)
                order[starts[indices[e]]] = T.Cast("{idtype}", e)
                starts[indices[e]] = starts[indices[e]] + T.{idtype}(1)
        for j in T.serial(n):  # each start is now that of the next column
            starts[n - j] = starts[n - j - 1]
        starts[0] = T.{idtype}(0)
"""


@lru_cache
def program(idtype: str) -> tirx.PrimFunc:
    """Return the program that transposes a structure given at run time, by a counting sort."""
    return parse(TRANSPOSE_TEXT.format(idtype=idtype))


def transposed(indptr: np.ndarray, indices: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Transpose a structure of constants; entries of one column keep their order.

    Returns
    -------
    tuple of ndarray
        Row pointers of the transpose, the row of each entry, and the position of each entry in the given structure.
    """
    dtype = indptr.dtype
    columns_first = sp.csr_array(
        (np.arange(indices.size, dtype=dtype), indices, indptr), shape=(indptr.size - 1, columns)
    ).tocsc()
    return tuple(
        part.astype(dtype, copy=False) for part in (columns_first.indptr, columns_first.indices, columns_first.data)
    )


__all__ = [
    "BuildOptions",
    "Chosen",
    "check_constants",
    "check_structure",
    "checked",
    "chosen",
    "csr_of",
    "is_known",
    "operands",
    "program",
    "task_of",
    "transposed",
    "tunable",
    "with_choices",
]
