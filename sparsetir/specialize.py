# SPDX-License-Identifier: Apache-2.0
"""Programs for given sizes."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from sparsetir.errors import ArgumentError
from sparsetir.scalars import as_whole


def with_sizes(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc:
    """A program with some of its sizes fixed; they are no parameters any more.

    Raises
    ------
    ArgumentError
        There is no such size, or it is no whole number from 0 on.

    Examples
    --------
    >>> import sparsetir
    >>> [str(p.name) for p in with_sizes(sparsetir.ops.spmm(), {"feat": 64}).params][-3:]
    ['m', 'n', 'nnz']
    """
    known = {str(p.name): p for p in func.params if not tirx.is_buffer_var(p)}
    values = {name: as_whole(value) for name, value in sizes.items()}
    for name, value in values.items():
        if name not in known:
            raise ArgumentError(f"no size is called {name!r}; there are: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(f"{name} must be a whole number from 0 on, found {value!r}")
    return func.specialize({known[name]: value for name, value in values.items()}) if values else func


__all__ = ["with_sizes"]
