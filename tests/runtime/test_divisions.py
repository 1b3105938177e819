# SPDX-License-Identifier: Apache-2.0
"""Integer divisions by divisors of any kind and value: no trap, and numpy's results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DIVISORS = (
    "d", "d + 1", "d - e", "d * e", "-d", "i", "i - 2", "2 - i", "i * d", "i + 1", "D[i]", "D[i] - d", "m", "m - 5",
)  # fmt: skip
START = """
import numpy as np, sparsetir
from tvm.script import sparsetir as T

info = np.iinfo("{dtype}")

def check(kernel, divisor_of):
    for m in (5, 0, 1, 40):
        i = np.arange(m).astype("{dtype}")
        A = np.resize(np.array([info.min, info.max, 7, 0, 1, info.max // 3], "{dtype}"), m)
        D = np.resize(np.array([3, 0, info.max, info.min, 1], "{dtype}"), m)
        for d, e in ((3, 2), (0, 1), (1, 0), (2, 2), {signed}):
            with np.errstate(all="ignore"):
                scalars = (np.array(value).astype("{dtype}") for value in (d, e, m))
                divisor = (i * 0 + divisor_of(*scalars, i, D)).astype("{dtype}")
                expected = A // divisor, A % divisor
            actual = kernel(A=A, D=D, d=d, e=e)
            for name, one, other in zip(("quotient", "rest"), actual, expected):
                assert np.array_equal(one, other), (kernel.name, name, m, d, e, divisor, one, other)
"""
PROGRAM = """
@T.prim_func
def divide_{number}(a: T.handle, b: T.handle, q: T.handle, r: T.handle, m: T.int32, d: T.{dtype}, e: T.{dtype}):
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (I,), "{dtype}")
    D = T.match_sparse_buffer(b, (I,), "{dtype}")
    Q = T.match_sparse_buffer(q, (I,), "{dtype}")
    R = T.match_sparse_buffer(r, (I,), "{dtype}")
    with T.sp_iter([I], "S", "divide") as [i]:
        Q[i] = A[i] // ({divisor})
        R[i] = A[i] % ({divisor})

check(sparsetir.build(divide_{number}), lambda d, e, m, i, D: {expected})
"""


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "uint8", "uint32"])
def test_divisions_equal_those_of_numpy(dtype: str, tmp_path: Path) -> None:
    """In a process of its own, which a trap would end."""
    signed = "" if dtype.startswith("u") else "(-4, 3), (-1, 0), (-info.max // 64, -1),"
    lines = [START.format(dtype=dtype, signed=signed)]
    for number, expected in enumerate(DIVISORS):
        if expected in ("-d", "2 - i", "i - 2", "m - 5", "d - e", "D[i] - d") and dtype.startswith("u"):
            continue  # TVM's analysis refuses unsigned numbers that fall below zero
        divisor = re.sub(r"\b[im]\b(?!\])", lambda name: f'T.Cast("{dtype}", {name[0]})', expected)
        lines.append(PROGRAM.format(dtype=dtype, number=number, divisor=divisor, expected=expected))
    script = tmp_path / "divide.py"
    script.write_text("".join(lines))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
