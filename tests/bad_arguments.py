# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of every kind, and the calls of public functions that are made with each of them."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from each import share
from sparsetir import ops
from sparsetir.errors import SparseTIRError

Case = tuple[Callable[..., Any], dict[str, Any]]


def matrix(size: int = 4) -> sp.csr_array:
    """A square matrix with a diagonal and one entry beside it."""
    dense = np.eye(size, dtype="float32")
    dense[0, 1] = 2
    return sp.csr_array(dense)


def damaged(part: str) -> sp.csr_array:
    """A matrix of which one array is not what scipy promises."""
    A = matrix()
    if part == "short indptr":
        A.indptr = A.indptr[:-1]
    elif part == "long indices":
        A.indices = np.full_like(A.indices, 99)
    elif part == "negative indices":
        A.indices = np.full_like(A.indices, -1)
    elif part == "falling indptr":
        A.indptr = A.indptr[::-1].copy()
    elif part == "short data":
        A.data = A.data[:-1]
    elif part == "object data":
        A.data = A.data.astype(object)
    return A


BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "str": lambda: "no such thing",
    "bytes": lambda: b"\x00",
    "negative": lambda: -1,
    "zero": lambda: 0,
    "fraction": lambda: 2.5,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "huge": lambda: 10**30,
    "beyond floats": lambda: 10**400,
    "bool": lambda: True,
    "complex": lambda: 1j,
    "object": object,
    "list": list,
    "dict": dict,
    "tuple": lambda: (None, None),
    "set": lambda: {1, 2},
    "function": lambda: len,
    "class": lambda: int,
    "0-d": lambda: np.array(1.0, "float32"),
    "1-d": lambda: np.ones(4, "float32"),
    "2-d": lambda: np.ones((3, 5), "float32"),
    "3-d": lambda: np.ones((2, 2, 2), "float32"),
    "empty": lambda: np.zeros((0, 0), "float32"),
    "objects": lambda: np.array([[None, 1], [2, "x"]], object),
    "strings": lambda: np.array([["a", "b"], ["c", "d"]]),
    "dates": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "record": lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "complex array": lambda: np.ones((4, 4), "complex64"),
    "longdouble": lambda: np.ones((4, 4), np.longdouble),
    "bools": lambda: np.ones((4, 4), np.bool_),
    "masked": lambda: np.ma.masked_array(np.ones((4, 4), "float32"), np.eye(4)),
    "strided": lambda: np.ones((8, 8), "float32")[::2, ::-2],
    "ragged": lambda: [[1.0], [1.0, 2.0]],
    "nested": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "sparse": matrix,
    "larger sparse": lambda: matrix(7),
    "complex sparse": lambda: matrix().astype("complex64"),
    "no entries": lambda: sp.csr_array((0, 0), dtype="float32"),
    "program": ops.spmv,
    **{part: lambda part=part: damaged(part) for part in  # type: ignore[misc]
       ("short indptr", "long indices", "negative indices", "falling indptr", "short data", "object data")},
}  # fmt: skip


def meta() -> Any:
    """A tensor of torch without memory."""
    torch = pytest.importorskip("torch")
    return torch.empty(4, 4, device="meta")


BAD["meta"] = meta


def positional(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The function, with these arguments passed by position."""
    return lambda **options: function(*(options.pop(name) for name in names), **options)


def raw(function: Callable[..., Any], options: dict[str, Any]) -> str:
    """The error of another library that the call ends in, or nothing."""
    try:
        function(**options)
    except SparseTIRError:
        return ""
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/tests/" not in f.filename]
        if isinstance(error, TypeError) and not frames:
            return ""  # Python's own, for a wrong number or name of arguments
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return f"{type(error).__name__} at {where}: {str(error)[:150]}"
    return ""


def faults_of(case: Case, name: str, bad: dict[str, Callable[[], Any]] | None = None) -> str:
    """The errors of other libraries that a call ends in, with each of its arguments replaced by each third bad one."""
    function, options = case
    faults = [f"as it is: {fault}"] if (fault := raw(function, options)) else []
    for at, argument in enumerate(options, zlib.crc32(name.encode())):
        for kind, make in share((BAD if bad is None else bad).items(), 3, first=at):
            if fault := raw(function, {**options, argument: make()}):
                faults.append(f"{argument}={kind}: {fault}")
    return "\n".join(faults)
