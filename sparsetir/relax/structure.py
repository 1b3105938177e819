# SPDX-License-Identifier: Apache-2.0
"""Structures that are known only at run time: validation and transposition."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import ir, relax, tirx

from sparsetir.errors import ArgumentError
from sparsetir.script.printer import parse

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
        assert p >= 1, "R.sparse.{name}: indptr must have one element more than there are rows; found none"
        bad = T.alloc_buffer((1,), "int32", scope="local")
        bad[0] = T.Cast("int32", T.Or(indptr[0] != 0, T.Cast("int64", indptr[p - 1]) != T.Cast("int64", {count})))
        for i in T.serial(p - 1):
            bad[0] = T.bitwise_or(bad[0], T.Cast("int32", indptr[i + 1] < indptr[i]))
            out[i] = indptr[i]
        out[p - 1] = indptr[p - 1]
        assert bad[0] == 0, "R.sparse.{name}: indptr must rise from 0 to the number of entries"
"""
RANGE = """
        for j in T.serial(nnz):
            outside = T.Or({array}[j] < 0, T.Cast("int64", {array}[j]) >= n_{array})
            bad[0] = T.bitwise_or(bad[0], T.Cast("int32", outside))
        assert bad[0] == 0, "R.sparse.{name}: {array} must be from 0 to one less than the {meaning}"
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
    count = "nnz" if arrays else "count"
    text = TEXT.format(inputs=", ".join(inputs), sizes="".join(sizes), idtype=idtype, name=name, count=count)
    text += "".join(RANGE.format(array=array, name=name, meaning=MEANINGS[array]) for array in arrays)
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
            fault = f"{array} must be from 0 to {limit - 1}; found {values.min()} to {values.max()}"
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


__all__ = ["check_constants", "check_structure", "checked", "is_known", "program", "transposed"]
