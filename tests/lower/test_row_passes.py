# SPDX-License-Identifier: Apache-2.0
"""Passes that bring the loops of several pieces together and take tests out of them."""

from __future__ import annotations

import platform
import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import ir, tirx
from tvm.script import tirx as tir

import sparsetir
from each import FULL, pairwise
from fences import fenced
from sparsetir import formats
from sparsetir.codegen.target import native_target
from sparsetir.ir.rewriting import collect
from sparsetir.lower import as_module
from sparsetir.lower.annotations import GATHERS
from sparsetir.lower.rows.fuse_loops import FuseLoops
from sparsetir.lower.vector.loop_transforms import UnswitchLoops, VersionLoops
from sparsetir.lower.vector.vectorize import LowerGathers, VectorizeMasked, gather
from sparsetir.schedules import Choices

PARALLEL = tirx.ForKind.PARALLEL
PIECES = {
    "dcsr": formats.dcsr(),
    "columns": formats.columns(3),
    "buckets": formats.buckets((1, 2, 4)),
    "hyb": formats.hyb(2, (1, 3)),
    "blocks": formats.blocks(2, 3),
    "ell_rest": formats.ell_rest(width=2),
    "dia_rest": formats.dia_rest(0.2),
    "sr_bcrs": formats.sr_bcrs(2, 2),
}


SWEEPS = {"columns": 3, "hyb": 2}


def decomposed(format: Any, choices: Choices | None = None) -> Any:
    """SpMM over a format, one compiled kernel."""
    return sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": format}), schedule=choices)


def flat(kernel: Any) -> tirx.PrimFunc:
    """Its loops."""
    return kernel.kernel.compiled.stage(3)


def parallel_loops(func: tirx.PrimFunc) -> list[tirx.For]:
    return [f for f in collect(func.body, tirx.For) if f.kind == PARALLEL]


def matrices() -> dict[str, Any]:
    """Row lengths of every kind."""
    rng = np.random.default_rng(0)
    wide = sp.random_array((70, 40), density=0.1, format="lil", rng=rng)
    wide[3] = rng.random(40)  # longer than any bucket
    wide[10:30] = 0
    found = {"skewed": wide.tocsr(), "empty": sp.csr_array((5, 7)), "one": sp.csr_array(np.ones((1, 1)))}
    found["tall"] = sp.random_array((333, 3), density=0.2, format="csr", rng=rng)
    found["last row"] = sp.csr_array(([1.0], ([129], [0])), shape=(130, 2))
    found["no rows"] = sp.csr_array((0, 4))
    return {name: sp.csr_array(a).astype(np.float32) for name, a in found.items()}


# ---------------------------------------------------------------- FuseLoops


#: each number of chunks with every other format
CHUNKS = ((1, 16), (2, 3))
CHUNKED = [(name, n) for at, name in enumerate(PIECES) for n in (sum(CHUNKS, ()) if FULL else CHUNKS[at % 2])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "chunks"), CHUNKED)
def test_pieces_share_their_rows_in_any_number_of_chunks(name: str, chunks: int) -> None:
    format = PIECES[name]
    kernel = decomposed(format, Choices(tile=8, chunks=chunks))
    assert len(parallel_loops(flat(kernel))) == SWEEPS.get(format.name, 1)
    rng = np.random.default_rng(1)
    for name, A in matrices().items():
        B = rng.random((A.shape[1], 9), dtype=np.float32)
        np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_range_of_columns_is_done_before_the_next() -> None:
    loops = parallel_loops(flat(decomposed(formats.columns(3))))
    assert [re.findall(r"indptr_(c\d)", str(loop))[0] for loop in loops] == ["c0", "c1", "c2"]


@pytest.mark.slow
def test_rows_of_blocks_stay_together() -> None:
    A = sp.random_array((29, 31), density=0.3, format="csr", dtype=np.float32, rng=np.random.default_rng(2))
    text = sparsetir.script(flat(decomposed(formats.blocks(2, 2, rest=formats.bsr(3, 3)))))
    assert "+ T.int64(5)) // T.int64(6)" in text  # rows are shared out in groups that no block of 2 or 3 rows crosses
    for chunks in (2, 5, 16):
        kernel = decomposed(formats.blocks(2, 2, rest=formats.bsr(3, 3)), Choices(chunks=chunks))
        B = np.ones((31, 4), np.float32)
        np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-5)


def fused(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return FuseLoops(as_module(func))[func.attrs["global_symbol"]]


def pair(second: str, *, ascending: str = "rows") -> tirx.PrimFunc:
    """A loop that sets y, and one more."""
    text = f'''
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((64,), "float32"), y: tir.Buffer((64,), "float32"), z: tir.Buffer((64,), "float32"),
         rows: tir.Buffer((20,), "int32")):
    tir.func_attr({{"sparsetir.indptr": ["starts"], "sparsetir.ascending": ["{ascending}"]}})
    for i in tir.serial(64, annotations={{"sparsetir.chunks": 3, "sparsetir.parallel": True}}):
        y[i] = x[i]
    for r in tir.serial(20, annotations={{"sparsetir.chunks": 3, "sparsetir.parallel": True}}):
        {second}
'''
    return tvm.script.from_source(text, {"tir": tir})


@pytest.mark.parametrize("second", ["y[rows[r]] = y[rows[r]] + x[r]", "z[r] = y[r]", "y[r] = y[r] * 2.0"])
def test_loops_over_the_same_rows_are_one(second: str) -> None:
    func = fused(pair(second))
    assert len(parallel_loops(func)) == 1
    rows = np.sort(np.random.default_rng(0).choice(64, 20, replace=False)).astype(np.int32)
    x, y, z = (np.arange(64, dtype=np.float32) + k for k in range(3))
    want_y, want_z = x.copy(), z.copy()
    if "rows" in second:
        want_y[rows] += x[:20]
    elif "z" in second:
        want_z[:20] = want_y[:20]
    else:
        want_y[:20] *= 2
    tvm.compile(as_module(func), target="llvm", tir_pipeline="s_tir")["main"](*map(tvm.runtime.tensor, (x, y, z, rows)))
    found = [tvm.runtime.tensor(a) for a in (x, y, z, rows)]
    tvm.compile(as_module(func), target="llvm", tir_pipeline="s_tir")["main"](*found)
    np.testing.assert_array_equal(found[1].numpy(), want_y)
    np.testing.assert_array_equal(found[2].numpy(), want_z)


FIBERS = """
@tir.prim_func(s_tir=True)
def main(y: tir.Buffer((64,), "float32"), z: tir.Buffer((64,), "float32"), w: tir.Buffer((4, 64), "float32"),
         starts: tir.Buffer((9,), "int32"), others: tir.Buffer((9,), "int32"), rows: tir.Buffer((8,), "int32")):
    tir.func_attr({{"sparsetir.indptr": ["starts", "others"], "sparsetir.ascending": []}})
    for i in tir.serial(8, annotations={{"sparsetir.chunks": 3, "sparsetir.parallel": True}}):
        for j in range(starts[i + 1] - starts[i]):
            y[starts[i] + j] = z[starts[i] + j]
            w[i % 4, starts[i] + j] = z[starts[i] + j]
    for r in tir.serial(8, annotations={{"sparsetir.chunks": 3, "sparsetir.parallel": True}}):
        {second}
"""


@pytest.mark.parametrize(
    ("second", "loops"),
    [
        ("for j in range(starts[r + 1] - starts[r]): z[r] = z[r] + y[starts[r] + j]", 2),  # z by nonzero, then by row
        ("for j in range(starts[r + 1] - starts[r]): y[starts[r] + j] = y[starts[r] + j] * 2.0", 1),
        ("for j in range(starts[r + 1] - starts[r]): w[r % 4, starts[r] + j] = w[1, starts[r] + j] + 1.0", 1),
        ("for j in range(others[r + 1] - others[r]): y[others[r] + j] = y[others[r] + j] * 2.0", 2),
        ("for j in range(starts[r + 1] - starts[r]): y[starts[r] + j] = y[starts[r] + j + 1]", 2),
        ("for j in range(starts[r + 1] - starts[r] + 1): y[starts[r] + j] = 2.0", 2),
        ("for j in range(starts[r + 1] - starts[r]): y[starts[r] + j] = y[r]", 2),
        ("for j in range(starts[rows[r] + 1] - starts[rows[r]]): y[starts[rows[r]] + j] = 2.0", 2),
    ],
)
def test_loops_over_the_nonzeros_of_the_same_rows_are_one(second: str, loops: int) -> None:
    func = fused(tvm.script.from_source(FIBERS.format(second=second), {"tir": tir}))
    found = collect(func.body, tirx.For)
    assert len(parallel_loops(func)) == (loops == 1)
    assert len([f for f in found if "sparsetir.chunks" in f.annotations]) == (0 if loops == 1 else 2)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("z[r] = y[63 - r]", "reads rows that another thread may not have written"),
        ("z[r] = y[rows[63 - r]]", "goes through the list backwards"),
        ("y[r] = y[0]", "reads a row that is not its own"),
        ("z[r] = x[r]", "shares nothing with the first"),
    ],
    ids=lambda text: text,
)
def test_other_loops_stay_apart(second: str, why: str) -> None:
    func = fused(pair(second))
    assert len(collect(func.body, tirx.For)) == 2, why
    assert not parallel_loops(func), why


def test_an_unsorted_list_stays_apart() -> None:
    assert not parallel_loops(fused(pair("y[rows[r]] = y[rows[r]] + x[r]", ascending="others")))


# ---------------------------------------------------------------- VersionLoops


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(m, n) for m in (1, 2, 3, 4, 5, 8, 13) for n in (1, 4, 7)])
@pytest.mark.parametrize("block", [(2, 2), (3, 4), (4, 1)])
def test_blocks_that_stick_out(block: tuple[int, int], shape: tuple[int, int]) -> None:
    kernel = decomposed(formats.bsr(*block))
    A = sp.random_array(shape, density=0.5, format="csr", dtype=np.float32, rng=np.random.default_rng(3))
    B = np.random.default_rng(4).random((shape[1], 21), dtype=np.float32)
    np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-5, atol=1e-6)


EDGE = """
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((64,), "float32"), m: tir.int32):
    for i in range((m + 3) // 4):
        for ii in tir.unroll(4):
            if {condition}:
                x[i * 4 + ii] = 0.0
"""


def versioned(condition: str) -> tirx.For:
    """The outer loop of a program that tests `condition` in its inner one."""
    func = tvm.script.from_source(EDGE.format(condition=condition), {"tir": tir})
    return collect(VersionLoops(as_module(func))["main"].body, tirx.For)[0]


def test_a_row_is_tested_at_its_hardest_lane() -> None:
    outer = versioned("i * 4 + ii < m")
    assert str(outer.body.condition) == "i * 4 + 3 < m"
    assert not collect(outer.body.then_case, tirx.IfThenElse)
    assert collect(outer.body.else_case, tirx.IfThenElse)


@pytest.mark.parametrize("condition", ["ii < m", "i < m", "x[i * 4 + ii] < 1.0", "(i * 4 + ii) % 3 < m"])
def test_what_no_row_decides_stays(condition: str) -> None:
    assert not isinstance(versioned(condition).body, tirx.IfThenElse)


# ---------------------------------------------------------------- UnswitchLoops

GUARDED = """
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((64,), "float32"), y: tir.Buffer((64,), "float32"), at: tir.Buffer((8,), "int32"), n: tir.int32):
    for p in range(8):
        for k in {lanes}:
            {store}
"""


def hoisted(store: str, lanes: str = "tir.vectorized(8)") -> tirx.For:
    text = GUARDED.format(store=store, lanes=lanes)
    return collect(UnswitchLoops(as_module(tvm.script.from_source(text, {"tir": tir})))["main"].body, tirx.For)[0]


@pytest.mark.parametrize(
    "store",
    [
        "y[k] = y[k] + tir.if_then_else(at[p] < n, x[k], 0.0)",
        "y[k] = y[k] + x[p] * tir.if_then_else(at[p] < n, x[k], 0.0)",
        "y[k] = y[k] - tir.if_then_else(at[p] < n, x[k], 0.0) * x[p]",
    ],
)
def test_a_guarded_term_guards_the_loop(store: str) -> None:
    body = hoisted(store).body
    assert isinstance(body, tirx.IfThenElse)
    assert isinstance(body.then_case, tirx.For)
    assert "if_then_else" not in str(body)


@pytest.mark.parametrize(
    ("store", "lanes", "why"),
    [
        ("y[k] = y[k] + tir.if_then_else(at[p] < n, x[k], 1.0)", "tir.vectorized(8)", "the other term is not zero"),
        ("y[k] = y[k] * tir.if_then_else(at[p] < n, x[k], 0.0)", "tir.vectorized(8)", "a factor of zero counts"),
        ("y[k] = x[k] + tir.if_then_else(at[p] < n, x[k], 0.0)", "tir.vectorized(8)", "the store must happen"),
        ("y[k] = y[k] + tir.if_then_else(at[k] < n, x[k], 0.0)", "tir.serial(8)", "the condition moves"),
        ("y[k] = y[k] + tir.if_then_else(y[0] < 1.0, x[k], 0.0)", "tir.serial(8)", "the condition is changed"),
        ("y[k] = y[k] + tir.if_then_else(at[p] < n, x[k], 0.0)", "tir.serial(n)", "the loop may have no step"),
    ],
    ids=lambda text: text if " " in text and "[" not in text else "",
)
def test_what_must_be_tested_inside_stays_inside(store: str, lanes: str, why: str) -> None:
    assert isinstance(hoisted(store, lanes).body, tirx.For), why


@pytest.mark.slow
def test_padding_does_not_spread_what_is_not_finite() -> None:
    A = sp.csr_array(np.array([[0, 2, 0], [1, 0, 3], [0, 0, 0]], np.float32))
    B = np.array([[np.inf, 1], [1, 2], [np.nan, 3]], np.float32)
    for format in (formats.ell(), formats.sell(2, 2), formats.buckets((1, 4)), formats.padded_csr(4)):
        np.testing.assert_array_equal(decomposed(format)(A=A, B=B), A @ B)


# ---------------------------------------------------------------- LowerGathers


def lanes_in(func: tirx.PrimFunc) -> list[tirx.For]:
    return [f for f in collect(func.body, tirx.For) if f.kind == tirx.ForKind.VECTORIZED]


GATHER = """
@tir.prim_func(s_tir=True)
def main(
    a: tir.Buffer((64,), "float32"), x: tir.Buffer((9, 3), "float32"), y: tir.Buffer(({lanes},), "float32"),
    indices: tir.Buffer((64,), "{idtype}"), p: tir.int32, n: tir.int32,
):
    for j in tir.vectorized({lanes}):
        y[j] = {value}
"""
GATHERED = "a[p + j] * x[indices[p + j], 2]"


def worded(value: str = GATHERED, idtype: str = "int32", lanes: int = 8) -> tirx.PrimFunc:
    text = GATHER.format(value=value, idtype=idtype, lanes=lanes)
    return LowerGathers(as_module(tvm.script.from_source(text, {"tir": tir})))["main"]


def run_lanes(func: tirx.PrimFunc, *args: Any) -> None:
    """Call it with arrays that begin at a line, as TVM takes for granted."""
    tvm.compile(func, target=native_target())["main"](
        *(sparsetir.aligned(x) if isinstance(x, np.ndarray) else x for x in args)
    )


@pytest.mark.parametrize(
    ("idtype", "lanes", "loads"),
    [("int32", 8, 4), ("int32", 2, 1), ("uint16", 8, 2), ("uint16", 2, 1), ("uint8", 16, 2), ("int64", 4, 4)],
)
def test_indices_are_loaded_by_words(idtype: str, lanes: int, loads: int) -> None:
    func = worded(idtype=idtype, lanes=lanes)
    (words,) = (f for f in collect(func.body, tirx.For) if f.kind == tirx.ForKind.UNROLLED)
    assert int(words.extent) == loads
    (lane,) = lanes_in(func)
    assert "indices" not in str(lane)
    rng = np.random.default_rng(3)
    a, x = rng.random(64, np.float32), rng.random((9, 3), np.float32)
    indices, y = rng.integers(0, 9, 64).astype(idtype), sparsetir.aligned(np.zeros(lanes, np.float32))
    run_lanes(func, a, x, y, indices, 5, 9)
    np.testing.assert_allclose(y, a[5 : 5 + lanes] * x[indices[5 : 5 + lanes], 2])


def test_computed_indices_are_loaded_by_words() -> None:
    func = worded("x[tir.max(tir.min(indices[p + j], n - 1), 0), 1] + x[indices[p + j], 0]")
    a, x = np.zeros(64, np.float32), np.random.default_rng(3).random((9, 3), np.float32)
    y, indices = sparsetir.aligned(np.zeros(8, np.float32)), np.arange(64, dtype=np.int32) % 9
    run_lanes(func, a, x, y, indices, 0, 4)
    np.testing.assert_allclose(y, x[[0, 1, 2, 3, 3, 3, 3, 3], 1] + x[indices[:8], 0])


@pytest.mark.parametrize(
    "value",
    [
        "a[p + j]",  # no gather
        "x[indices[p], 2] * a[p + j]",  # one element for all lanes
        "x[indices[p + j * 2], 2]",  # indices that do not lie beside each other
        "x[indices[p + j], indices[p - j]]",
        "x[tir.Cast('int32', a[p + j]), 2]",  # no integers
        "tir.if_then_else(indices[p + j] < n, x[indices[p + j], 2], tir.float32(0))",  # which may not be read
    ],
)
def test_other_lanes_stay(value: str) -> None:
    func = worded(value)
    assert [f.kind for f in collect(func.body, tirx.For)] == [tirx.ForKind.VECTORIZED]
    assert "reinterpret" not in func.script()


def test_what_a_named_value_leads_to_stays() -> None:
    (loop,) = collect(worded("x[indices[p + j], 2]", lanes=3).body, tirx.For)  # three lanes are no whole words
    (load,) = (x for x in collect(loop.body.value, ir.TensorLoad) if len(x.indices) == 2)
    column = ir.Var("column", load.indices[1].ty)
    named = tirx.Let(column, load.indices[1], tirx.BufferLoad(load.source, [load.indices[0], column]))
    for value, stays in ((named, True), (load, False)):
        store = tirx.BufferStore(loop.body.buffer, value, loop.body.indices)
        lanes = tirx.For(loop.loop_var, loop.min, tirx.const(4, "int32"), loop.kind, store)
        assert (gather(lanes) is None) is stays


VECTOR_GATHER = """
@tir.prim_func(s_tir=True)
def main(
    x: tir.Buffer((3, 99), "{dtype}"), y: tir.Buffer(({lanes},), "{dtype}"), indices: tir.Buffer((64,), "{idtype}"),
    p: tir.int32, row: tir.int32,
):
    for j in tir.vectorized({lanes}):
        y[j] = {value}
"""


def gathered(value: str, dtype: str, idtype: str, lanes: int) -> tirx.PrimFunc:
    text = VECTOR_GATHER.format(value=value, dtype=dtype, idtype=idtype, lanes=lanes)
    func = as_module(tvm.script.from_source(text, {"tir": tir}))["main"]
    return LowerGathers(as_module(func.with_attr(GATHERS, True)))["main"]


@pytest.mark.parametrize(
    ("dtype", "idtype", "lanes"),
    pairwise(
        ["float32", "float64", "int32", "int64", "uint32"],
        ["int32", "uint16", "int64", "uint8", "int8", "uint32"],
        [4, 8, 16, 32],
    ),
)
def test_vectors_are_gathered_by_one_call(dtype: str, idtype: str, lanes: int) -> None:
    func = gathered("x[row, indices[p + j] + 2]", dtype, idtype, lanes)
    assert f"st_gather_{dtype}x{lanes}" in func.script()
    assert not [f for f in collect(func.body, tirx.For) if f.kind == tirx.ForKind.UNROLLED]
    rng = np.random.default_rng(lanes)
    x = sparsetir.aligned((rng.random((3, 99)) * 1000).astype(dtype))
    indices, y = sparsetir.aligned(rng.integers(0, 97, 64).astype(idtype)), sparsetir.aligned(np.zeros(lanes, dtype))
    run_lanes(func, x, y, indices, 7, 1)
    np.testing.assert_array_equal(y, x[1, indices[7 : 7 + lanes].astype(np.int64) + 2])


def test_functions_of_several_gathers_declare_what_they_call_once() -> None:
    """LLVM refuses a module that declares a function twice."""
    text = """
@tir.prim_func(s_tir=True)
def main(
    x: tir.Buffer((99,), "float32"), y: tir.Buffer((16,), "float32"), indices: tir.Buffer((64,), "int32"),
    longs: tir.Buffer((64,), "int64"),
):
    for j in tir.vectorized(8):
        y[j] = x[indices[j]]
    for j in tir.vectorized(8):
        y[j + 8] = x[tir.Cast("int32", longs[j])]
"""
    func = as_module(tvm.script.from_source(text, {"tir": tir}))["main"]
    func = LowerGathers(as_module(func.with_attr(GATHERS, True)))["main"]
    x, y = np.random.default_rng(1).random(99, np.float32), sparsetir.aligned(np.zeros(16, np.float32))
    indices = np.arange(64, dtype=np.int32)[::-1].copy()
    run_lanes(func, x, y, indices, indices.astype(np.int64) + 20)
    np.testing.assert_array_equal(y, np.concatenate([x[indices[:8]], x[indices[:8] + 20]]))


@pytest.mark.parametrize(
    ("value", "dtype", "lanes"),
    [
        ("x[indices[p + j], row]", "float32", 8),  # elements of a column
        ("x[row, indices[p + j] * 2]", "float32", 8),
        ("x[row, indices[p + j] + j]", "float32", 8),
        ("x[row, indices[p + j]]", "int16", 8),  # no instruction
        ("x[row, indices[p + j]]", "float32", 2),
    ],
)
def test_other_gathers_are_loaded_one_by_one(value: str, dtype: str, lanes: int) -> None:
    func = gathered(value, dtype, "int32", lanes)
    assert "st_gather" not in func.script()
    rng = np.random.default_rng(lanes)
    x = sparsetir.aligned((rng.random((3, 99)) * 1000).astype(dtype))
    indices = sparsetir.aligned(rng.integers(0, 3, 64).astype(np.int32))
    y, at, j = sparsetir.aligned(np.zeros(lanes, dtype)), indices[7 : 7 + lanes], np.arange(lanes)
    run_lanes(func, x, y, indices, 7, 1)
    wanted = {"p + j], row": x[at, 1], "* 2": x[1, at * 2], "+ j]]": x[1, at], "] + j": x[1, at + j]}
    np.testing.assert_array_equal(y, next(array for part, array in wanted.items() if part in value))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("staged", [0, 64])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_sums_of_targets_that_gather_vectors(dtype: str, staged: int, lanes: int) -> None:
    matrix = sp.random_array((80, 70), density=0.2, format="csr", dtype=dtype, rng=np.random.default_rng(lanes))
    matrix = sp.vstack(
        [matrix, sp.csr_array((3, 70), dtype=dtype), sp.csr_array(np.ones((1, 70), dtype))], format="csr"
    )
    x = np.random.default_rng(1).standard_normal(70).astype(dtype)
    target = {"kind": "llvm", "mcpu": "skylake"} if "x86" in platform.machine().lower() else None
    choices = Choices(lanes=lanes, staged=staged)
    kernel = sparsetir.build(sparsetir.ops.spmv(dtype), target, schedule=choices)
    if target is not None:
        assert "st_gather" in kernel.script(stage=3)
        assert "vgather" in kernel.source("asm")
    np.testing.assert_allclose(kernel(A=matrix, x=x), matrix @ x, rtol=1e-5)


# ---------------------------------------------------------------- VectorizeMasked


def lanes_of(kernel: Any) -> list[tirx.For]:
    return lanes_in(flat(kernel))


@pytest.mark.parametrize("C", [4, 8, 16])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slices_are_summed_in_vectors(C: int, dtype: str) -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.spmv(dtype=dtype), {"A": formats.sell(C, 4 * C)})
    kernel = sparsetir.build(parts)
    # Where all lanes hold something, where some have no entry, and where some have no row: masks have two loops each.
    assert len(lanes_of(kernel)) == 5
    rng = np.random.default_rng(5)
    for name, A in matrices().items():
        x = rng.random(A.shape[1]).astype(dtype)
        np.testing.assert_allclose(kernel(A=A.astype(dtype), x=x), A @ x, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("format", [formats.sell(8, 16), formats.narrow_sell(8, 16), formats.sell(3, 6)], ids=repr)
def test_slices_are_initialised_where_they_are_summed(format: Any) -> None:
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmv(), {"A": format}))
    assert len(parallel_loops(flat(kernel))) == 1
    assert not re.search(r"= y_data", sparsetir.script(flat(kernel)))  # no result is read
    for name, A in matrices().items():
        y = np.full(A.shape[0], np.nan, np.float32)
        kernel(A=A, x=np.ones(A.shape[1], np.float32), y=y)
        np.testing.assert_allclose(y, A @ np.ones(A.shape[1], np.float32), rtol=1e-5, atol=1e-6, err_msg=name)


SHIFTED = """
@T.prim_func
def shifted(
    a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32,
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "shifted") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j] * (X[j + {far}] + 1)
"""


@pytest.mark.parametrize("far", [1, 8, 500_000_000])
@pytest.mark.parametrize("format", [formats.sell(8, 16), formats.narrow_sell(4, 8)], ids=repr)
def test_what_a_slice_reads_under_a_condition_is_not_read_without_it(format: Any, far: int) -> None:
    func = sparsetir.parse(SHIFTED.format(far=far))
    kernel = sparsetir.build(sparsetir.decompose_format(func, {"A": format}), {"kind": "llvm", "opt-level": 0})
    A, X = sp.csr_array(np.ones((64, 8), np.float32)), fenced(np.arange(8, dtype=np.float32))
    read = np.concatenate([X, np.zeros(8, np.float32)])[np.minimum(np.arange(8) + far, 8)]
    np.testing.assert_allclose(kernel(A=A, X=X), A @ (read + 1))


SLICES = """
@T.prim_func
def slices(
    a: T.handle, y_data: T.handle, indptr: T.handle, indices: T.handle, rows: T.Buffer(("s * 4",), "int32", align=4),
    m: T.int32, n: T.int32, s: T.int32, width: T.int32, total: T.int32,
):
    S = T.dense_fixed(s)
    W = T.dense_variable(S, (width, total), indptr, "int32")
    R = T.sparse_fixed(W, (m, 4), lambda i, w, r: rows[{row}], "int32", sorted=False)
    J = T.singleton(R, n, indices, "int32")
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (S, W, R, J), "float32")
    y = T.match_sparse_buffer(y_data, (I,), "float32")
    with T.sp_iter([S, W, R, J], "SRSR", "slices") as [i, w, r, j]:
        T.sp_iter_attr({{"init": "stored", "independent": 1}})
        with T.init():
            y[r] = T.float32(7)
        y[r] = y[r] + A[i, w, r, j]
"""


@pytest.mark.parametrize(("row", "held"), [("i * 4 + r", 7), ("i * 4 + r + w // 99", -1)])
def test_rows_are_listed_by_slices_without_slots_unless_slots_list_them(row: str, held: int) -> None:
    func = sparsetir.parse(SLICES.format(row=row))
    arrays = {
        "a": np.arange(1, 13, dtype=np.float32), "indptr": np.array([0, 1, 1, 3], np.int32),
        "indices": np.array([0, 1, 2, 3, 0, 1, 2, 0, 3, 3, 1, 2], np.int32),
        "rows": np.array([3, 1, 4, 0, 2, 5, 7, 8, 9, 6, 12, 10], np.int32),
    }  # fmt: skip
    given = {**arrays, "y_data": np.full(11, -1, np.float32), "m": 11, "n": 3, "s": 3, "width": 2, "total": 3}
    expected = sparsetir.interpret(func, given)["y_data"]
    assert expected[[2, 5, 7, 8]].tolist() == [held] * 4
    sparsetir.build(func)(**given)
    np.testing.assert_array_equal(given["y_data"], expected)


@pytest.mark.parametrize("C", [3, 128])
def test_other_numbers_of_rows_are_summed_one_by_one(C: int) -> None:
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmv(), {"A": formats.sell(C, C)}))
    assert not lanes_of(kernel)
    for A in matrices().values():
        x = np.ones(A.shape[1], np.float32)
        np.testing.assert_allclose(kernel(A=A, x=x), A @ x, rtol=1e-5, atol=1e-6)


def test_masked_lanes_add_nothing() -> None:
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmv(), {"A": formats.sell(8, 8)}))
    A = sp.csr_array(np.array([[0, 2, 3], [1, 0, 0], [0, 0, 0]], np.float32))
    for x in ([np.inf, 1, 2], [1, 2, np.nan], [np.nan, np.inf, -np.inf]):
        np.testing.assert_array_equal(kernel(A=A, x=np.array(x, np.float32)), A @ np.array(x, np.float32))


def test_masked_subscripts_stay_inside() -> None:
    text = sparsetir.script(flat(sparsetir.build(sparsetir.decompose_format(
        sparsetir.ops.spmv(), {"A": formats.sell(8, 8)}))))  # fmt: skip
    assert re.search(r"x_data_1\[T.max\(T.min\(.*indices_sell_1\[.*\].*, n - 1\), 0\)\]", text)


LANES = """
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((64,), "float32"), y: tir.Buffer((8,), "float32"), at: tir.Buffer((64,), "int32"), n: tir.int32):
    acc = tir.alloc_buffer((8,), "float32", scope="local")
    for p in range(n):
        for r in range(8):
            if {condition}:
                acc[r] = acc[r] + {term}
"""


def masked(condition: str, term: str) -> list[tirx.For]:
    text = LANES.format(condition=condition, term=term)
    func = VectorizeMasked(as_module(tvm.script.from_source(text, {"tir": tir})))["main"]
    return [f for f in collect(func.body, tirx.For) if f.kind == tirx.ForKind.VECTORIZED]


def test_tests_of_slots_become_masks() -> None:
    assert len(masked("at[p * 8 + r] < n", "x[at[p * 8 + r]]")) == 3
    assert len(masked("at[p * 8 + r] < n and p < 7", "x[p * 8 + r]")) == 3


@pytest.mark.parametrize(
    ("condition", "term"),
    [
        ("p * 8 + r < n", "x[p * 8 + r]"),  # slots that do not exist
        ("p * 8 + r < n and at[p * 8 + r] < n", "x[at[p * 8 + r]]"),
        ("at[p * 8 + r] + r < n", "x[at[p * 8 + r]]"),
        ("p < n", "x[p * 8 + r]"),  # nothing to mask
        ("at[at[r]] < n", "x[r]"),  # found through another index
        ("at[r] < n", "x[at[at[r]]]"),
        ("at[r] < n", "x[r * 2]"),  # not contiguous
        ("acc[r] < 1.0", "x[r]"),  # asks for what it changes
    ],
)
def test_other_tests_stay(condition: str, term: str) -> None:
    assert not masked(condition, term)


STORES = """
@tir.prim_func(s_tir=True)
def main(y: tir.Buffer((64,), "float32"), at: tir.Buffer((64,), "int32"), n: tir.int32):
    acc = tir.alloc_buffer((8,), "float32", scope="local")
    for p in range(n):
        for r in range(8):
            if {condition}:
                y[at[p * 8 + r]] = acc[r]
"""


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("at[p * 8 + r] < n", True),
        ("p < 7 and at[p * 8 + r] < n", True),
        ("p < 7", False),  # the same for all
        ("p * 8 + r < n and at[p * 8 + r] < n", False),  # there may be no such slot to look at
        ("at[at[r]] < n", False),
        ("y[r] < 1.0", False),  # asks for what it changes
    ],
)
def test_stores_of_all_lanes_go_without_their_guards(condition: str, expected: bool) -> None:
    module = as_module(tvm.script.from_source(STORES.format(condition=condition), {"tir": tir}))
    func = VectorizeMasked(module)["main"]
    tests = [i for i in collect(func.body, tirx.IfThenElse) if i.else_case is not None]
    assert [("p < 7" in str(i.condition), len(collect(i.then_case, tirx.BufferStore))) for i in tests] == (
        [("p < 7" in condition, 1)] if expected else []
    )
