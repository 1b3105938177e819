# SPDX-License-Identifier: Apache-2.0
"""Programs of upstream's shape that mean something else here: the warnings, and what silences them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import sparsetir
from decomposing import parsed
from sparsetir.errors import UpstreamWarning, VerifyError

TILES = """
@T.prim_func
def tiles(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
          mb: T.int32, n: T.int32, nnzb: T.int32, f: T.int32):
    IO = T.dense_fixed(mb)
    JO = T.dense_variable(IO, (n, nnzb), indptr)
    II = T.dense_fixed(2)
    JI = T.sparse_fixed(JO, (n, 2), indices)
    J = T.dense_fixed(n)
    F = T.dense_fixed(f)
    A = T.match_sparse_buffer(a, AXES, "float32")
    B = T.match_sparse_buffer(b, (J, F), "float32")
    C = T.match_sparse_buffer(c, (IO, II, F), "float32")
    with T.sp_iter([IO, JO, II, JI, F], "SRSRS", "tiles") as [io, jo, ii, ji, k]:
        with T.init():
            C[io, ii, k] = 0
        C[io, ii, k] = C[io, ii, k] + A[SUBSCRIPTS] * B[ji, k]
"""

BUCKETS = """
@T.prim_func
def buckets(a: T.handle, r: T.handle, p: T.handle, d: T.handle, s: T.handle, q: T.handle, c: T.handle,
            m: T.int32, n1: T.int32, n2: T.int32):
    D = T.dense_fixed(m)
    I_1 = T.sparse_variable(None, (m, n1), (p, r))
    I_2 = T.sparse_variable(None, (m, n2), (q, s))
    A = T.match_sparse_buffer(a, (I_1,), "float32")
    E = T.match_sparse_buffer(d, (I_2,), "float32")
    C = T.match_sparse_buffer(c, (D,), "float32")
    with T.sp_iter([I_1], "S", "first") as [i]:
        T.sp_iter_attr({"init": "stored"})
        with T.init():
            C[i] = 0
        C[i] = C[i] + A[i]
    with T.sp_iter([I_2], "S", "second") as [i]:
        T.sp_iter_attr({"init": "stored"})
        with T.init():
            C[i] = 0
        C[i] = C[i] + E[i]
"""


def tiles(axes: str) -> Any:
    subscripts = axes.lower().strip("()")
    return parsed(TILES.replace("AXES", axes).replace("SUBSCRIPTS", subscripts))


@pytest.mark.slow
def test_tiles_that_upstream_lays_out_in_the_order_of_the_list() -> None:
    message = r"A over \(IO, JO, II, JI\) have one dimension .*, \(IO JO JI, II\), .* list \(IO, JO, JI, II\)"
    with pytest.warns(UpstreamWarning, match=message):
        sparsetir.build(tiles("(IO, JO, II, JI)"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = sparsetir.build(tiles("(IO, JO, JI, II)"))
    by_rows = np.array([[[1, 2], [3, 4]]], "float32")  # groups, rows, columns
    a = by_rows.transpose(0, 2, 1).reshape(2, 2)
    found = kernel(
        a=a, b=np.eye(3, dtype="float32"), indptr=np.array([0, 1], "int32"), indices=np.array([0, 1], "int32")
    )
    assert found.tolist() == [[[1, 2, 0], [3, 4, 0]]]


@pytest.mark.slow
def test_initialisations_that_wipe_what_is_there() -> None:
    args = {"a": np.ones(2, "float32"), "p": np.array([0, 2], "int32"), "r": np.array([0, 2], "int32"), "m": 3}
    args |= {"d": np.ones(1, "float32"), "q": np.array([0, 1], "int32"), "s": np.array([1], "int32")}
    with pytest.warns(
        UpstreamWarning, match="T.init.. of sp_iter 'second' sets all of C again, also what sp_iter 'first'"
    ):
        kernel = sparsetir.build(parsed(BUCKETS.replace('        T.sp_iter_attr({"init": "stored"})\n', "")))
    assert kernel(**args).tolist() == [0, 1, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = sparsetir.build(parsed(BUCKETS))
    assert kernel(**args).tolist() == [1, 1, 1]


def test_older_names_of_upstream() -> None:
    text = TILES.replace("AXES", "(IO, JO, JI, II)").replace("SUBSCRIPTS", "io, jo, ji, ii")
    older = parsed(text.replace("T.sp_iter(", "T.iter("))
    assert sparsetir.script(older) == sparsetir.script(parsed(text))


def test_a_size_beside_an_axis() -> None:
    text = (
        "@T.prim_func\ndef f(y: T.handle, m: T.int32):\n    I = T.dense_fixed(m)\n    Y = T.match_buffer(y, (I, m * 2))"
    )
    with pytest.raises(sparsetir.SparseTIRError, match=r"over axes or has sizes, got the size m \* 2 beside axis I"):
        sparsetir.parse(text)
    assert issubclass(VerifyError, sparsetir.SparseTIRError)
