# SPDX-License-Identifier: Apache-2.0
"""Columns of 16 bits, and what they stand on: axes whose coordinates are a formula of their positions."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi
from tvm import tirx

import sparsetir
from fences import fenced
from sparsetir import SparseTensor, formats
from sparsetir.errors import ArgumentError, LoweringError, StructureError
from sparsetir.formats import heuristics
from sparsetir.formats.encoding import parse_format
from sparsetir.formats.heuristics import candidates
from sparsetir.ir.rewriting import collect
from sparsetir.schedules import Choices
from sparsetir.script.printer import script
from sparsetir.workloads.inputs import dense_shapes
from sparsetir.workloads.suite import families

FORMATS = {"rows": formats.narrow_csr(), "slices": formats.narrow_sell(4, 8), "slices of 8": formats.narrow_sell(8, 64)}
FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
TYPES = [("float32", "int32"), ("float64", "int64")]


@cache
def kernel(name: str, dtype: str = "float32", idtype: str = "int32", lanes: int = 0) -> Any:
    """A product with a vector, compiled once."""
    parts = sparsetir.decompose_format(sparsetir.ops.spmv(dtype, idtype=idtype), {"A": FORMATS[name]})
    return sparsetir.build(parts, schedule=Choices(lanes=lanes) if lanes else None)


def of_rows(rows: list[list[int]], n: int, dtype: str = "float32", idtype: str = "int32") -> Any:
    """A matrix with entries in these columns of each row."""
    indptr = np.cumsum([0, *map(len, rows)]).astype(idtype)
    indices = np.array([j for row in rows for j in row], idtype)
    return sp.csr_array((np.arange(1, len(indices) + 1, dtype=dtype), indices, indptr), shape=(len(rows), n))


def far() -> Any:
    """Eight longer rows at one end of many columns and eight shorter ones at the other, as wide as slices can be."""
    n, end = 10**6, 65534
    near = [[0, 9, 20, 21, end], [4, 7, 8, 9], *([[0, 9, end]] * 6)]
    behind = [[n - 1 - end, n - 1], [n - 1], [n - 1 - end], [n - 7], [], [], [], []]
    return of_rows([*near, *behind], n)


def small() -> Any:
    return of_rows([[2, 0, 5], [], [1], [0, 1, 2, 3, 4, 5], []], 6)  # not sorted


# ---------------------------------------------------------------- what is stored


@FORMAT
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_it_comes_back(format: Any, idtype: str) -> None:
    for A in (small(), far(), sp.csr_array((3, 0)), sp.csr_array((0, 3)), sp.csr_array((4, 3)), sp.csr_array([[7.0]])):
        t = SparseTensor.from_any(A, format, idtype=idtype)
        assert (t.to_scipy() != A).nnz == 0
        assert (t.restore() != A).nnz == 0
        assert t.convert("csr").values.tolist() == t.values.tolist()
        arrays = t.pieces[0].arrays
        assert {a.dtype.name for n, a in arrays.items() if n != "offsets"} == {idtype}
        assert arrays["offsets"].dtype == np.uint16
        assert sparsetir.pattern(t).fingerprint == sparsetir.pattern(A).fingerprint


@FORMAT
def test_entries_that_stand_twice_are_added(format: Any) -> None:
    A = sp.coo_array(([1.0, 2.0, 4.0], ([1, 0, 1], [3, 2, 3])), shape=(2, 5))
    t = SparseTensor.from_any(A, format)
    np.testing.assert_array_equal(t.to_dense(), A.toarray())
    assert t.restore().data.tolist() == [5, 2, 0]


@FORMAT
def test_it_prints_and_is_read(format: Any) -> None:
    assert parse_format(repr(format)) == format
    description = format.resolve(2, "int64").rules[0].description
    assert tvm_ffi.structural_equal(sparsetir.parse(script(description)), description, map_free_vars=True)


def test_fewer_bytes() -> None:
    A = families()["stencil_2d"]("small")
    stored = {name: SparseTensor.from_any(A, name).nbytes for name in ("csr", "narrow_csr", "sell", "narrow_sell")}
    assert stored["csr"] - stored["narrow_csr"] == 2 * A.nnz - 4 * A.shape[0]
    assert stored["narrow_sell"] < 0.8 * stored["sell"]


def test_rows_that_are_too_wide() -> None:
    A = of_rows([[3], [5, 9, 65540], [5, 65541]], 10**6)
    found = "row 2 holds columns 5 to 65541, but narrow_csr() reaches 65535 columns from the first one: store it as csr"
    with pytest.raises(StructureError) as caught:
        SparseTensor.from_any(A, "narrow_csr")
    assert str(caught.value) == found
    assert SparseTensor.from_any(A[:2], "narrow_csr").nnz == 4


def test_slices_that_are_too_wide() -> None:
    A = of_rows([[3, 4], [3, 65537], [9], [65538, 65539], [70000], [70000 + 65535]], 10**6)
    found = r"a slice holds column 3 in row 0 and column 65539 in row 3, but narrow_sell\(C=4, sigma=4\) reaches 65534"
    with pytest.raises(StructureError, match=found):
        SparseTensor.from_any(A, "narrow_sell", C=4, sigma=4)
    with pytest.raises(StructureError, match="column 70000 in row 4 and column 135535 in row 5"):
        SparseTensor.from_any(A, "narrow_sell", C=2, sigma=1)
    assert SparseTensor.from_any(A, "narrow_sell", C=1, sigma=1).nnz == A.nnz


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "idtype"), TYPES)
def test_products(name: str, dtype: str, idtype: str) -> None:
    built = kernel(name, dtype, idtype)
    for A in (small(), far(), sp.csr_array((3, 0)), sp.csr_array((0, 3)), sp.csr_array((4, 3)), sp.csr_array([[7.0]])):
        typed = sp.csr_array((A.data, A.indices.astype(idtype), A.indptr.astype(idtype)), shape=A.shape).astype(dtype)
        x = np.random.default_rng(0).standard_normal(A.shape[1]).astype(dtype)
        np.testing.assert_allclose(built(A=typed, x=x), typed @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.shared(3)
@pytest.mark.parametrize("name", families())
def test_every_family(name: str) -> None:
    A = families()[name]("small")
    x = np.random.default_rng(0).standard_normal(A.shape[1]).astype(A.dtype)
    entries = A.tocoo()
    reach = max((np.ptp(entries.col[entries.row == row]) for row in np.unique(entries.row)), default=0)
    for built in (kernel("rows"), kernel("rows", lanes=8), kernel("slices of 8")):
        if reach > 65535:
            with pytest.raises(StructureError, match=r"reaches 6553\d"):
                built(A=A, x=x)
            continue
        np.testing.assert_allclose(built(A=A, x=x), A @ x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_in_its_rows(name: str) -> None:
    """Padding lies 65,535 columns behind the first of a slice: there is such a column, and it is not read."""
    A = far()
    for column in (0, 65535, 65536, A.shape[1] - 1):
        x = np.ones(A.shape[1], np.float32)
        x[column] = np.inf
        np.testing.assert_array_equal(np.isfinite(kernel(name)(A=A, x=x)), np.isfinite(A @ x))


def test_slices_are_summed_in_vectors() -> None:
    loops = collect(kernel("slices of 8").kernel.compiled.stage(3).body, tirx.For)
    # Where all lanes hold something, where some have no entry, and where some have no row: masks have two loops each.
    assert len([f for f in loops if f.kind == tirx.ForKind.VECTORIZED]) == 5


@pytest.mark.parametrize("last", [0, 1, 3, 8, 17])
def test_nothing_is_read_behind_the_arrays(last: int) -> None:
    """The offsets of the next row would lead beyond x from the first column of this one."""
    n = 65535 + 40
    A = of_rows([[n - 2, n - 1], list(range(last)), [0, 65535], list(range(5))], n)
    packed = SparseTensor.from_any(A, "narrow_csr").pieces[0]
    arrays = {f"{name}_narrow_csr": fenced(array) for name, array in packed.arrays.items()}
    x = fenced(np.ones(n, np.float32))
    for lanes in (0, 4, 8):
        inner = kernel("rows", lanes=lanes).kernel
        found = inner(**arrays, A_narrow_csr=fenced(packed.values), x=x, n=n)
        np.testing.assert_allclose(found, A @ x)


def test_only_offsets_move_along_a_row() -> None:
    text = script(kernel("rows").kernel.compiled.stage(3))
    assert 'T.Cast("int64", first_narrow_csr_1[' in text
    assert 'T.Cast("int64", offsets_narrow_csr_1[' in text


def test_the_last_columns_of_32_bits() -> None:
    """A column and any offset are added, also where the offset is another row's."""
    A = sp.coo_array(([1.0, 2.0], ([0, 0], [2**31 - 3, 2**31 - 9])), shape=(1, 2**31 - 1))
    for format in (formats.narrow_csr(), formats.narrow_sell(1, 1)):
        assert SparseTensor.from_any(A, format).idtype == "int64"
        with pytest.raises(StructureError, match="add up to 65535 to 2147483647 columns, more than int32"):
            SparseTensor.from_any(A, format, idtype="int32")


def test_lanes_of_narrow_rows_leave_vectors() -> None:
    loops = collect(kernel("rows", lanes=8).kernel.compiled.stage(3).body, tirx.For)
    assert {int(f.extent) for f in loops if f.kind == tirx.ForKind.VECTORIZED} == {8}


# ---------------------------------------------------------------- where they are tried


def test_candidates_where_columns_fit() -> None:
    near = sparsetir.pattern(families()["stencil_2d"]("small"))
    assert set(FORMATS.values()) & set(candidates(near)) == {FORMATS["rows"], FORMATS["slices of 8"]}
    assert set(candidates(sparsetir.pattern(far()))) & set(FORMATS.values()) == {FORMATS["rows"]}
    wide = sparsetir.pattern(of_rows([[0, 65536]], 10**6))
    assert not set(candidates(wide)) & set(FORMATS.values())


def test_they_are_for_vectors_and_matrices_beyond_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    A = families()["stencil_2d"]("small")
    described = sparsetir.pattern(A)
    monkeypatch.setattr(heuristics, "last_cache", lambda: 8 * A.nnz - 1)
    x, column, B = np.ones(9), np.ones((9, 1)), np.ones((9, 8))
    for inputs, wanted in (({"A": A, "x": x}, 2), ({"A": A, "B": column}, 2), ({"A": A, "B": B}, 0)):
        found = heuristics.ranked_candidates(described, most=9, feat=heuristics.dense_rows(dense_shapes(inputs)))
        assert len(set(found) & set(FORMATS.values())) == wanted
    monkeypatch.setattr(heuristics, "last_cache", lambda: 8 * A.nnz)
    assert not set(heuristics.ranked_candidates(described, most=9)) & set(FORMATS.values())


# ---------------------------------------------------------------- formulas of positions

LOOK_UP = """
@T.prim_func
def look_up(
    a: T.handle, b: T.handle, indptr: T.handle, first: T.Buffer(("m",), "int32", align=4),
    offsets: T.Buffer(("nnz",), "uint8", align=1), m: T.int32, n: T.int32, nnz: T.int32,
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, lambda i, s, p: first[i] + T.Cast("int32", offsets[p])), "int32")
    J_all = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J_all), "float32")
"""
WALK = """    with T.sp_iter([I, J], "SS", "walk") as [i, j]:
        B[i, j] = A[i, j]
"""
SEARCH = """    with T.sp_iter([I, J_all], "SS", "search") as [i, j]:
        B[i, j] = A[i, j]
"""
DATA = {
    "a": np.array([1, 2, 3, 4], np.float32),
    "indptr": np.array([0, 2, 2, 4], np.int32),
    "first": np.array([1, 0, 3], np.int32),
    "offsets": np.array([0, 2, 0, 5], np.uint8),
}
DENSE = np.array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0], [0, 0, 0, 3, 0]], np.float32)  # the last one lies outside


@pytest.mark.parametrize("body", [WALK, SEARCH], ids=["walk", "search"])
def test_coordinates_may_depend_on_positions(body: str) -> None:
    func = sparsetir.parse(LOOK_UP + body)
    assert "lambda i, s, p: first[i] + " in script(func)
    assert tvm_ffi.structural_equal(sparsetir.parse(script(func)), func, map_free_vars=True)
    sizes = {"m": 3, "n": 5, "nnz": 4}
    expected = sparsetir.interpret(func, {**DATA, **sizes, "b": np.zeros((3, 5), np.float32)})["b"]
    np.testing.assert_array_equal(expected, DENSE)
    np.testing.assert_array_equal(sparsetir.build(func)(**DATA, B=np.zeros((3, 5), np.float32)), DENSE)


def test_axes_with_such_coordinates_are_split() -> None:
    schedule = sparsetir.Schedule(sparsetir.parse(LOOK_UP + WALK))
    schedule.sparse_split("walk", "J", 2)
    assert "offsets[p]" in script(schedule.func)
    found = sparsetir.build(schedule.func)(**DATA, B=np.zeros((3, 5), np.float32))
    np.testing.assert_array_equal(found, DENSE)


def test_a_sparse_argument_has_no_such_coordinates() -> None:
    built = sparsetir.build(sparsetir.parse(LOOK_UP + WALK))
    with pytest.raises(
        LoweringError, match="a formula reads first, which has no value before the call: pass the arrays"
    ):
        built(A=sp.csr_array(DENSE))
    plain = LOOK_UP.replace('first[i] + T.Cast("int32", offsets[p])', "i + s") + WALK
    with pytest.raises(ArgumentError, match="A cannot be converted for axis J, whose indices are a formula: pass its"):
        sparsetir.build(sparsetir.parse(plain))(A=sp.csr_array(DENSE), first=DATA["first"], offsets=DATA["offsets"])
