# SPDX-License-Identifier: Apache-2.0
"""Several structures and steps, and rules of a user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from decomposing import (
    FORMATS,
    MATRICES,
    OPERANDS,
    USUAL,
    as_csr,
    check_call,
    check_function,
    close,
    compiled,
    made,
    operands,
    parsed,
    random_matrix,
    typed,
)
from sparsetir import SparseTensor, formats
from sparsetir.errors import ArgumentError, VerifyError
from sparsetir.ir.sizes import Size
from sparsetir.transform import FormatRewriteRule

# ---------------------------------------------------------------- several structures, several steps


TWO_STRUCTURES = """
@T.prim_func
def func(a: T.handle, b: T.handle, y: T.handle, p: T.handle, j: T.handle, q: T.handle, k: T.handle,
         m: T.int32, n: T.int32, nnz: T.int32, nnz_b: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, j))
    K = T.sparse_variable(I, (n, nnz_b), (q, k))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, K), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "first") as [i, j_]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j_]
    with T.sp_iter([I, K], "SR", "second") as [i, k_]:
        Y[i] = Y[i] + 2.0 * B[i, k_]
"""


@pytest.mark.slow
def test_two_structures() -> None:
    """Two matrices of different formats, one program."""
    func = parsed(TWO_STRUCTURES)
    A, B = (typed(random_matrix(seed, 17, 23), "float32") for seed in (1, 9))
    for chosen in ({"A": made("bsr"), "B": made("ell")}, {"B": made("hyb")}, {"A": made("coo"), "B": made("coo")}):
        parts = sparsetir.decompose_format(func, chosen)
        check_function(parts)
        kernel = compiled(parts)
        close(kernel(A=A, B=B), A.sum(axis=1) + 2 * B.sum(axis=1))
        close(kernel(A=B, B=A), B.sum(axis=1) + 2 * A.sum(axis=1))
    step = sparsetir.decompose_format(sparsetir.decompose_format(func, {"A": made("bsr")}), {"B": made("ell")})
    close(compiled(step)(A=A, B=B), A.sum(axis=1) + 2 * B.sum(axis=1))


def test_two_structures_of_different_sizes() -> None:
    A, B = (typed(MATRICES[kind], "float32") for kind in ("random", "divisible"))
    func = parsed(TWO_STRUCTURES)
    for chosen in ({"A": made("bsr"), "B": made("ell")}, {"A": made("coo"), "B": made("coo")}):
        kernel = compiled(sparsetir.decompose_format(func, chosen))
        with pytest.raises(ArgumentError, match=r"m is 17 from A.shape\[0\] but 12 from B.shape\[0\]"):
            kernel(A=A, B=B)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "outer", "inner"),
    [
        ("spmm", "columns", "bsr"),
        ("spmm", "columns", "csc"),
        ("spmm", "rows", "ell"),
        ("spmm", "rows", "coo"),
        ("sddmm", "columns", "coo"),
        ("sddmm", "rows", "bsr"),
    ],
)
def test_a_format_within_a_format(op: str, outer: str, inner: str) -> None:
    format = formats.make(outer, **FORMATS[outer], each=made(inner))
    parts = sparsetir.decompose_format(getattr(sparsetir.ops, op)(), {OPERANDS[op]: format})
    check_function(parts)
    kernel = compiled(parts)
    for kind in USUAL:
        check_call(kernel, op, MATRICES[kind], "float32", 7)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("coo", "ell"),
        ("bsr", "csc"),
        ("bsr", "ell"),
        ("csr", "ell"),
    ],
)
def test_two_rules_add_up(first: str, second: str) -> None:
    """Pieces that hold the same elements are added: twice the matrix, initialised once."""
    chosen = [made(first), made(second)]
    func = sparsetir.ops.spmm("float64")
    both = sparsetir.decompose_format(func, {"A": [f.resolve(2, "int32").rules[0] for f in chosen]})
    check_function(both)
    A, _, B = operands(MATRICES["random"], "float64", 3)
    tensors = [SparseTensor.from_any(A, f) for f in chosen]
    args = {"b": B, "m": 17, "n": 23, "feat": 3}
    for piece, tensor in zip(both.groups[0].pieces, tensors, strict=True):
        held = tensor.pieces[0]
        known = {**held.arrays, **held.sizes}
        args |= {param: known[own_name] for own_name, param in piece.params.items()}
        shape = [Size(n).known(held.sizes) for n in piece.rule.buffer.storage_shape]
        args[piece.values["a"]] = held.values.reshape(shape)
    close(sparsetir.interpret(both.func, args)["c"], 2 * (A @ B), "float64")
    close(compiled(both.func)(**args), 2 * (A @ B), "float64")


@pytest.mark.parametrize(
    ("name", "in_first"), [("hdia", True), ("ell_rest", True), ("blocks", True), ("row_groups of ell", False)]
)
@pytest.mark.parametrize("op", ["spmm", "spmv"])
def test_the_first_piece_initialises_if_it_goes_over_all_rows(name: str, in_first: bool, op: str) -> None:
    format = formats.row_groups(2, rest="ell") if name == "row_groups of ell" else made(name)
    parts = sparsetir.decompose_format(getattr(sparsetir.ops, op)(), {"A": format})
    nests = sparsetir.ir.decode(parts.func).iterations
    assert [it.block.init is not None for it in nests] == ([True, False] if in_first else [False] * 3)
    for A, _, B in (operands(matrix, "float32", 3) for matrix in MATRICES.values()):
        dense = {"x": B[:, 0].copy()} if op == "spmv" else {"B": B}
        expected = A @ next(iter(dense.values()))
        out = np.full_like(expected, np.nan)
        close(sparsetir.build(parts)(A=A, **{"y" if op == "spmv" else "C": out}, **dense), expected, "float32")


def test_a_rule_without_a_format_says_what_to_pass() -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(2, 3).rules[0]})
    A, _, B = operands(MATRICES["random"], "float32", 3)
    with pytest.raises(sparsetir.SparseTIRError, match=r"formats\.tree"):
        compiled(parts)(A=A, B=B)


def test_a_piece_is_decomposed_again() -> None:
    first = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": made("ell_rest")})
    second = sparsetir.decompose_format(first, {"A_rest_dcsr": formats.bsr(2, 3)})
    check_function(second)
    kernel = compiled(second)
    for kind in USUAL:
        check_call(kernel, "spmm", MATRICES[kind], "float32", 7)


@pytest.mark.parametrize(
    ("outer", "piece", "inner"),
    [
        (formats.rows(2), "A_r1_csr", "ell"),
        (formats.rows(2), "A_r1_csr", "buckets"),
        (formats.hyb(1, (1, 2, 4)), "A_c0_w2", "ell"),
    ],
    ids=repr,
)
def test_a_piece_of_some_rows_is_decomposed_again(outer: Any, piece: str, inner: str) -> None:
    A = as_csr([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0]])
    first = sparsetir.decompose_format(sparsetir.ops.spmv("float64"), {"A": outer})
    kernel = compiled(sparsetir.decompose_format(first, {piece: formats.make(inner)}))
    close(kernel(A=A, x=np.ones(3)), A @ np.ones(3), "float64")


# ---------------------------------------------------------------- operands of dense programs

MATMUL = """
@T.prim_func
def func(a: T.handle, b: T.handle, c: T.handle, m: T.int32, n: T.int32, q: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_fixed(n)
    K = T.dense_fixed(q)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "product") as [i, j, k]:
        with T.init():
            C[i, k] = 0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]
"""


@pytest.mark.parametrize("format", [formats.csr(), formats.bsr(2, 3), formats.hyb(2, (1, 2))], ids=repr)
def test_an_operand_of_a_dense_program_is_stored_sparse(format: Any) -> None:
    parts = sparsetir.decompose_format(parsed(MATMUL), {"A": format})
    check_function(parts)
    kernel = compiled(parts)
    for kind in USUAL:
        check_call(kernel, "spmm", MATRICES[kind], "float32", 7)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("C[i, k] + T.exp(A[i, j]) * B[j, k]", "does something where A is zero, which is left out"),
        ("T.max(C[i, k], A[i, j] * B[j, k])", "does something where A is zero, which is left out"),
    ],
)
def test_dense_programs_that_need_the_zeros(body: str, message: str) -> None:
    text = MATMUL.replace("C[i, k] + A[i, j] * B[j, k]", body)
    with pytest.raises(VerifyError, match=f"cannot decompose A: iteration product {message}"):
        sparsetir.decompose_format(parsed(text), {"A": formats.csr()})


def test_a_dense_result_is_not_stored_sparse() -> None:
    with pytest.raises(VerifyError, match="stores to C, of which only entries that are not zero are kept"):
        sparsetir.decompose_format(parsed(MATMUL), {"C": formats.csr()})


# ---------------------------------------------------------------- rules of a user's own


def _user_format() -> Any:
    """The blocks of `FormatRewriteRule`'s own example, here 4 x 2."""
    description = parsed("""
        @T.prim_func
        def mine(a: T.handle, indptr: T.handle, indices: T.handle, mb: T.int32, nb: T.int32, nnzb: T.int32):
            IO = T.dense_fixed(mb)
            JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
            II = T.dense_fixed(4)
            JI = T.dense_fixed(2)
            A = T.match_sparse_buffer(a, (IO, JO, II, JI))
    """)
    return formats.tree(
        description,
        {0: ["IO", "II"], 1: ["JO", "JI"]},
        fills=True,
        inverse=lambda io, jo, ii, ji: (io * 4 + ii, jo * 2 + ji),
        forward=lambda i, j: (i // 4, j // 2, i % 4, j % 2),
        name="mine",
    )


@pytest.mark.parametrize("op", OPERANDS)
def test_a_rule_of_a_users_own(op: str) -> None:
    parts = sparsetir.decompose_format(getattr(sparsetir.ops, op)(), {OPERANDS[op]: _user_format()})
    check_function(parts)
    kernel = compiled(parts)
    for kind, matrix in MATRICES.items():
        if kind not in ("no_rows", "no_columns"):
            check_call(kernel, op, matrix, "float32", 7)


def test_a_rule_that_only_reorders_axes() -> None:
    func = parsed("""
        @T.prim_func
        def columns(a: T.handle, p: T.handle, i: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
            J = T.dense_fixed(n)
            I = T.sparse_variable(J, (m, nnz), (p, i))
            A = T.match_sparse_buffer(a, (J, I))
    """)
    kernel = compiled(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.tree(func, {0: ["I"], 1: ["J"]})}))
    for kind in USUAL:
        check_call(kernel, "spmm", MATRICES[kind], "float32", 7)


def test_formulas_that_disagree() -> None:
    wrong = formats.tree(
        _user_format().rules[0].description,
        {0: ["IO", "II"], 1: ["JO", "JI"]},
        inverse=lambda io, jo, ii, ji: (io * 4 + ii, jo * 2 + ji),
        forward=lambda i, j: (i // 4, j // 2, i % 4, 1 - j % 2),
        fills=True,
    )
    kernel = compiled(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": wrong}))
    A, _, B = operands(MATRICES["random"], "float32", 3)
    with pytest.raises(ArgumentError, match=r"forward= and inverse= disagree: entry \(0, \d+\) comes back as"):
        kernel(A=A, B=B)


AXES = "def x(a: T.handle, m: T.int32, n: T.int32):\n    I = T.dense_fixed(m)\n    J = T.dense_fixed(n)\n"


ONE = "@T.prim_func\n" + AXES + "    A = T.match_sparse_buffer(a, (I, J))\n"


@pytest.mark.parametrize(
    ("axis_map", "message"),
    [
        ({0: ["I"]}, "axis_map of rule 'x' leaves out axis J"),
        ({0: ["I"], 1: ["J", "Q"]}, "axis_map of rule 'x' names Q, its buffer has the axes I, J"),
        ({0: ["I"], 1: ["J", "J"]}, "names an axis twice"),
        ({0: ["I", "J"]}, "maps a dimension to several axes: give inverse="),
    ],
)
def test_axis_maps_are_checked(axis_map: Any, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        FormatRewriteRule("x", sparsetir.parse(ONE), axis_map)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"B": formats.bsr(2)}, "cannot decompose B: iteration spmm does not iterate axis J_dense"),
        ({"Q": formats.bsr(2)}, "no sparse buffer is called 'Q'; there are: A, B, C"),
        ({"A": []}, "the format of A has no rules"),
        ({"A": [formats.csr().rules[0], formats.csr().rules[0]]}, "two rules for A are called 'csr'"),
        ({"A": FormatRewriteRule("x", sparsetir.parse(ONE.replace("(I, J)", "(I,)")), {0: ["I"]})},
         "rule 'x' is for 1 dimensions, A has 2"),
    ],
)  # fmt: skip
def test_formats_that_do_not_fit(chosen: Any, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        sparsetir.decompose_format(sparsetir.ops.spmm(), chosen)


def test_a_name_is_no_format() -> None:
    with pytest.raises(sparsetir.SparseTIRError, match="bsr"):
        sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": "bsr"})
