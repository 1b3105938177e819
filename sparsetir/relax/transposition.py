# SPDX-License-Identifier: Apache-2.0
"""The transpose of a structure: where columns begin, the rows of their entries, and which entries those are."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir.script.printer import parse

TEXT = """
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
    """The function that transposes a structure given at run time, by counting."""
    return parse(TEXT.format(idtype=idtype))


def transposed(indptr: np.ndarray, indices: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns of a structure; equal ones keep their order.

    Returns
    -------
    tuple of ndarray
        ``indptr`` of the columns, the row of each entry, and which entry of the given structure it is.
    """
    dtype = indptr.dtype
    found = sp.csr_array(
        (np.arange(indices.size, dtype=dtype), indices, indptr), shape=(indptr.size - 1, columns)
    ).tocsc()
    return tuple(part.astype(dtype, copy=False) for part in (found.indptr, found.indices, found.data))


__all__ = ["program", "transposed"]
