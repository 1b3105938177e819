# SPDX-License-Identifier: Apache-2.0
"""The printed text: golden texts of the corpus, and programs the corpus does not have.

tests/test_script.py has the round trips of the whole corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import sparsetir as T
from tvm.script import tirx as plain

from corpus import BY_NAME
from sparsetir.errors import ScriptError, VerifyError
from sparsetir.script.printer import parse, script

GOLDEN = [
    ("csrmm", "int32"),
    ("triangular", "int64"),
    ("hyper_gnn", "int32"),
    ("ttv_5d", "int32"),
    ("rgcn_hetero", "int64"),
    ("sparse_softmax_nested", "int32"),
    ("buffer_params", "int64"),
    ("coo_unsorted", "int64"),
    ("rfc_bsr_rewrite", "int32"),
]


@pytest.mark.parametrize(("name", "idtype"), GOLDEN)
def test_golden(name: str, idtype: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}_{idtype}", script(BY_NAME[name].make("float32", idtype)))


def round_trip(func: Any) -> str:
    """Print, parse, compare in every way; returns the text."""
    text = script(func)
    parsed = parse(text)
    mismatch = tvm_ffi.get_first_structural_mismatch(func, parsed, map_free_vars=True)
    assert mismatch is None, f"{mismatch}\n{text}"
    assert tvm_ffi.structural_hash(parsed, map_free_vars=True) == tvm_ffi.structural_hash(func, map_free_vars=True)
    assert script(parsed) == text
    assert script(tvm.ir.load_json(tvm.ir.save_json(func))) == text
    if isinstance(func, tirx.PrimFunc):
        assert [p.name for p in parsed.params] == [p.name for p in func.params]
    return text


def raw_round_trip(func: Any) -> None:
    """The text of TVM's own printer parses back too."""
    parsed = parse(func.script(extra_config={"script.use_pep695": False}))
    assert tvm_ffi.structural_equal(func, parsed, map_free_vars=True)


# ---------------------------------------------------------------- axes


@T.prim_func
def every_axis(
    a: T.handle, v: T.handle, p0: T.handle, p1: T.handle, i1: T.handle, i2: T.handle, i3: T.handle,
    m: T.int32, n: T.int32, n0: T.int32, n1: T.int32, w: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m, "int64")
    J = T.dense_variable(I, (n, n0), p0, "int64")
    K = T.sparse_variable(J, (n, n1), (p1, i1), "int64", unique=False)
    L = T.sparse_fixed(K, (n, w), i2, "int64", sorted=False)
    S = T.singleton(L, n, i3, "int64")
    B = T.sparse_fixed(I, (n, 2 * w + 1), lambda i, s: i + s - w, "int64")
    P = T.dense_variable(I, (n, 7), extent=lambda i: i + 1, offset=lambda i: i * (i + 1) // 2, idtype="int64")
    IN = T.singleton(P, n, lambda i, p, s: i - p)
    U = T.sparse_variable(None, (n, n1), (p1, i1), "int64")
    A = T.match_sparse_buffer(a, (I, J, K, L, S), "float64", default_value=-1)
    V = T.match_sparse_buffer(v, (I, B), "int8")
    with T.sp_iter([I, B], "SS", "band") as [i, b]:
        V[i, b] = T.int8(0)


def test_every_axis() -> None:
    text = round_trip(every_axis)
    raw_round_trip(every_axis)
    for line in (
        'I = T.dense_fixed(m, "int64")',
        'J = T.dense_variable(I, (n, n0), p0, "int64")',
        'K = T.sparse_variable(J, (n, n1), (p1, i1), "int64", unique=False)',
        'L = T.sparse_fixed(K, (n, w), i2, "int64", sorted=False)',
        'S = T.singleton(L, n, i3, "int64")',
        "lambda i, s: i + s - T.Cast(",
        'IN = T.singleton(P, n, lambda i, p, s: i - p, "int32")',
        'U = T.sparse_variable(None, (n, n1), (p1, i1), "int64")',
        'A = T.match_sparse_buffer(a, (I, J, K, L, S), "float64", default_value=-1.0)',
        'V = T.match_sparse_buffer(v, (I, B), "int8")',
    ):
        assert line in text, f"{line}\n{text}"


@T.prim_func
def counts_without_a_name(
    a: T.handle, b: T.handle, r: T.handle, indptr: T.handle, indices: T.handle, ell: T.handle, m: T.int32
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, 9, (indptr, indices), "int64")
    again = T.sparse_variable(I, 9, (indptr, indices), "int64", sorted=False)
    W = T.sparse_fixed(I, 9, ell)
    D = T.dense_variable(I, 9, indptr, "int64")
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, W), "bool")
    R = T.match_sparse_buffer(r, (I, D), "bfloat16")
    with T.sp_iter([I, J], "SS") as [i, j]:
        A[i, j] = T.float32(0)


def test_sizes_that_only_an_array_tells_need_no_name() -> None:
    text = round_trip(counts_without_a_name)
    assert "T.Buffer" not in text
    assert 'J = T.sparse_variable(I, 9, (indptr, indices), "int64")' in text


def test_two_axes_over_one_array_share_its_size() -> None:
    """Without a count of their own, both take the size of the array that the first one matched."""
    axes = {p.name: p for p in counts_without_a_name.params}
    text = script(counts_without_a_name)
    assert 'again = T.sparse_variable(I, 9, (indptr, indices), "int64", sorted=False)' in text
    assert axes["indices"].ty.shape[0].same_as(axes["a"].ty.shape[0])


# ---------------------------------------------------------------- parameters and buffers


@T.prim_func
def sizes_from_buffers(
    x: T.Buffer(("k",), "float32", align=4), y: T.Buffer(("k", "h"), "float32"),
    ind: T.Buffer(("z",), "int64"), v: T.Buffer(("z",), "float32", align=4),
    m: T.int32, indptr: T.Buffer((m + 1,), "int32", align=4),
):  # fmt: skip
    I = T.dense_fixed(m)
    K = T.dense_fixed(x.ty.shape[0])
    H = T.dense_fixed(y.ty.shape[1])
    Z = T.sparse_variable(I, 9, (indptr, ind))
    X = T.match_sparse_buffer(x, (K,), "float32")
    Y = T.match_sparse_buffer(y, (K, H), "float32")
    V = T.match_sparse_buffer(v, (I, Z), "float32")
    with T.sp_iter([K, H], "SS", "outer") as [k, h]:
        Y[k, h] = X[k] + x[k]
    for t in T.serial(10):
        with T.sp_iter([I, Z], "SS", "inner") as [i, z]:
            V[i, z] = T.float32(t)


def test_a_buffer_stays_one_where_a_handle_would_not_do() -> None:
    text = round_trip(sizes_from_buffers)
    raw_round_trip(sizes_from_buffers)
    assert 'x: T.Buffer(("k",), "float32", align=4)' in text, "the body subscripts x itself and names k"
    assert 'y: T.Buffer((k, "h"), "float32")' in text, "another alignment"
    assert 'v: T.Buffer((z,), "float32", align=4)' in text, "a handle would have the size as int64"
    assert 'indptr: T.Buffer((m + 1,), "int32", align=4)' in text, "the axis counts in int64"


@T.prim_func
def declared_late(x: T.handle, y: T.Buffer((9,), "float32", align=4), z: T.Buffer((9,), "float32"), m: T.int32):
    I = T.dense_fixed(9)
    X = T.match_sparse_buffer(x, (I,), "float32")
    with T.sp_iter([I], "S", "first") as [i]:
        X[i] = T.float32(0)
    square = T.decl_buffer((3, 3), "float32", data=z.data)
    J = T.dense_fixed(9)
    Y = T.match_sparse_buffer(y, (J,), "float32")
    with T.sp_iter([J], "S", "second") as [j]:
        Y[j] = square[0, j]


def test_a_buffer_stays_one_where_tvm_matches_no_handles() -> None:
    text = round_trip(declared_late)
    assert "x: T.handle, y: T.Buffer((9,)" in text


@T.prim_func
def scratch_buffers(a: T.handle, m: T.int32):
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (I,), "float16", default_value=float("-inf"))
    S = T.alloc_sparse_buffer((I,), "float32", "local", default_value=2.5)
    flat = T.alloc_buffer((m,), "float32")
    F = T.match_sparse_buffer(flat, (I,), "float32")
    with T.sp_iter([I], "S", "copy") as [i]:
        cell = T.alloc_buffer((1,), "float32")
        cell[0] = 0.1
        S[i] = cell[0]
        F[i] = flat[i] + S[i]
        A[i] = T.float16(0)


def test_scratch_buffers() -> None:
    text = round_trip(scratch_buffers)
    assert 'S = T.alloc_sparse_buffer((I,), "float32", scope="local", default_value=2.5)' in text
    assert 'F = T.match_sparse_buffer(flat, (I,), "float32")' in text
    assert 'default_value=T.float16("-inf")' in text


# ---------------------------------------------------------------- iterations


@T.prim_func
def iterations(a: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    T.func_attr({"note": "kept"})
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    with T.sp_iter([T.fuse(I, J)], "SS", "fused") as [i, j]:
        T.sp_iter_attr({"search": "hoist", "note": [1, 2], "deep": {"x": "y"}})
        A[i, j] = A[i, j] + 1
    with T.sp_iter([I], "S", "rows") as [i]:
        with T.sp_iter([J], "R", "cells") as [j]:
            if A[i, j] > 0:
                A[i, j] = T.exp(A[i, j])
    for s, t in T.grid(2, 3):
        with T.sp_iter([I, J, T.attach(J, J)], "SSR") as [i, j, k]:
            with T.init():
                A[i, j] = 0
            A[i, j] = A[i, j] + A[j, k] * T.float32(s + t)


def test_iterations() -> None:
    text = round_trip(iterations)
    raw_round_trip(iterations)
    for line in (
        'T.func_attr({"note": "kept"})',
        'with T.sp_iter([T.fuse(I, J)], "SS", "fused") as [i, j]:',
        'T.sp_iter_attr({"deep": {"x": "y"}, "note": [1, 2], "search": "hoist"})',
        'with T.sp_iter([J], "R", "cells") as [j]:',
        'with T.sp_iter([I, J, T.attach(J, J)], "SSR", "sp_iter_0") as [i, j, k]:',
        "for s, t in T.grid(2, 3):",
    ):
        assert line in text, f"{line}\n{text}"


def test_a_block_that_sp_iter_would_not_make_stays_raw() -> None:
    raw = parse(script(iterations))

    def on_block(block: Any, mutator: Any) -> Any:
        inner = mutator.default_mutate(block)
        if block.name_hint != "cells":
            return inner
        read = tirx.BufferRegion(raw.params[0], [tvm.ir.Range(0, 1)])
        return type(inner)(inner.iter_vars, [read], [], "cells", inner.body, annotations=inner.annotations)

    body = tvm_ffi.structural_mutate(raw.body, [(tvm.s_tir.SBlock, on_block)])
    odd = tirx.PrimFunc(raw.params, body, attrs=raw.attrs)
    assert 'with T.sblock("cells"):' in round_trip(odd)


# ---------------------------------------------------------------- names, layout, modules


def test_axes_keep_names_that_tvm_has_for_itself() -> None:
    @T.prim_func
    def func(a: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        R = T.dense_fixed(m)
        A = T.match_sparse_buffer(a, (I, R), "float32")
        with T.sp_iter([I, R], "SS", "zero") as [i, r]:
            A[i, r] = T.float32(0)

    assert "A = T.match_sparse_buffer(a, (I, R)" in round_trip(func)


def test_lines_of_a_signature_are_folded() -> None:
    assert all(len(line) <= 120 for line in script(BY_NAME["ttv_5d"].make("float32", "int32")).splitlines())


def test_a_module_with_relax_and_ordinary_functions() -> None:
    @I.ir_module
    class Both:
        @T.prim_func
        def scale(x: T.Buffer((5,), "float32"), y: T.handle):
            I = T.dense_fixed(5)
            R = T.dense_fixed(1)
            Y = T.match_sparse_buffer(y, (I,), "float32")
            with T.sp_iter([I], "S", "scale") as [i]:
                Y[i] = x[i] * 1.5

        @T.prim_func(private=True)
        def helper(a: T.handle, m: T.int64):
            I = T.dense_fixed(m, "int64")
            A = T.match_sparse_buffer(a, (I,), "float32")
            with T.sp_iter([I], "S", "zero") as [i]:
                A[i] = T.float32(0)

        @plain.prim_func
        def ordinary(x: plain.Buffer((5,), "float32")):
            for i in range(5):
                x[i] = plain.float32(0)

        @R.function
        def main(x: R.Tensor((5,), "float32")) -> R.Tensor((5,), "float32"):
            cls = Both
            with R.dataflow():
                y = R.call_tir(cls.scale, (x,), R.Tensor((5,), "float32"))
                R.output(y)
            return y

    text = round_trip(Both)
    assert text.startswith("# from tvm.script import ir as I\n# from tvm.script import sparsetir as T\n")
    assert "@T.prim_func(s_tir=False)\n    def ordinary" in text
    assert "@T.prim_func(private=True)\n    def helper" in text


def test_specialised_functions() -> None:
    sizes = {str(p.name): p for p in iterations.params}
    text = round_trip(iterations.specialize({sizes["m"]: 30, sizes["nnz"]: 0}))
    assert "def iterations(a: T.handle, indptr: T.handle, indices: T.handle, n: T.int32):" in text
    assert 'J = T.sparse_variable(I, (n, 0), (indptr, indices), "int32")' in text
    params = {str(p.name): p for p in every_axis.params}
    round_trip(every_axis.specialize({params[name]: 7 for name in ("m", "n", "n0", "n1", "w")}))


def test_float64_beyond_the_range_of_float32() -> None:
    @T.prim_func
    def func(a: T.handle):
        I = T.dense_fixed(4)
        A = T.match_sparse_buffer(a, (I,), "float64", default_value=1e300)
        with T.sp_iter([I], "S", "least") as [i]:
            A[i] = T.min_value("float64")

    text = round_trip(func)
    assert "A[i] = T.float64(-1.7976931348623157e+308)" in text
    assert "default_value=1e+300" in text


def test_a_text_may_have_its_imports() -> None:
    text = script(scratch_buffers).replace("# from", "from")
    assert text.startswith("from tvm.script import sparsetir as T\n")
    assert script(parse(text)) == script(scratch_buffers)


# ---------------------------------------------------------------- refusals


def test_script_takes_functions_and_modules() -> None:
    with pytest.raises(VerifyError, match=r"expected a tirx.PrimFunc or an IRModule, got str"):
        script("spmm")


def test_parse_quotes_the_line_of_an_error() -> None:
    text = script(iterations).replace("[i, j] + T.float32(1.0)", "[i] + T.float32(1.0)")
    with pytest.raises(ScriptError, match=r"one subscript") as caught:
        parse(text)
    assert "A[i, j] = A[i] + T.float32(1.0)" in str(caught.value)
