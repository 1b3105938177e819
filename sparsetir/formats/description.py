# SPDX-License-Identifier: Apache-2.0
"""Descriptions of pieces: the axes of a format as a small function in TVMScript."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from tvm import tirx

from sparsetir.script.printer import parse

LETTERS = "IJKLMN"


def axis_name(dimension: int) -> str:
    """I, J, K ... for the dimensions of a tensor."""
    return LETTERS[dimension] if dimension < len(LETTERS) else f"D{dimension}"


@lru_cache(maxsize=256)
def describe(
    name: str, idtype: str, *, arrays: str, sizes: str, axes: str, buffer: str, table: str = ""
) -> tirx.PrimFunc:
    """The description of a piece.

    Parameters
    ----------
    name : str
        Of the function.
    idtype : {"int32", "int64"}
        Of the axes and the sizes.
    arrays, sizes : str
        Names of the array and the scalar parameters, separated by blanks.
    axes : str
        One axis a line, ``name = constructor(arguments)`` without ``T.`` and without the index type.
    buffer : str
        The axes of the buffer A in subscript order.
    table : str
        Name and number of elements of each array that formulas of the axes may subscript, one a line; ``name:dtype``
        where it does not hold the index type.

    Examples
    --------
    >>> import sparsetir
    >>> func = describe("ragged", "int32", arrays="indptr", sizes="m n nnz", buffer="I, J", axes='''
    ...     I = dense_fixed(m)
    ...     J = dense_variable(I, (n, nnz), indptr)
    ... ''')
    >>> print(sparsetir.script(func).strip())
    # from tvm.script import sparsetir as T
    <BLANKLINE>
    @T.prim_func
    def ragged(a: T.handle, indptr: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (n, nnz), indptr, "int32")
        A = T.match_sparse_buffer(a, (I, J), "float32")
    >>> func = describe("corner", "int32", arrays="", sizes="m n", table="shift m", buffer="I, J", axes='''
    ...     I = dense_fixed(m)
    ...     J = sparse_fixed(I, (n, 2), lambda i, s: shift[i] + s)
    ... ''')
    >>> [axis.name for axis in sparsetir.ir.decode(func).axes.values()]
    ['I', 'J']
    """
    tables = [line.strip().partition(" ") for line in table.strip().splitlines()]
    held = {name.partition(":")[0]: (name.partition(":")[2] or idtype, extent) for name, _, extent in tables}
    handles = ["a", *arrays.split(), *(f"{name}_data" for name in held)]
    params = [f"{p}: T.handle" for p in handles] + [f"{p}: T.{idtype}" for p in sizes.split()]
    lines = [_declaration(line.strip(), idtype) for line in axes.strip().splitlines()]
    lines = [*(_table(name, *what) for name, what in held.items()), *lines]
    body = "\n".join(f"    {line}" for line in [*lines, f"A = T.match_sparse_buffer(a, ({buffer},))"])
    return parse(f"@T.prim_func\ndef {name}({', '.join(params)}):\n{body}\n")


def _table(name: str, dtype: str, extent: str) -> str:
    return f'{name} = T.match_buffer({name}_data, ({extent},), "{dtype}", align={np.dtype(dtype).itemsize})'


def _declaration(line: str, idtype: str) -> str:
    axis, _, call = line.partition(" = ")
    return f'{axis} = T.{call[:-1]}, idtype="{idtype}")'
