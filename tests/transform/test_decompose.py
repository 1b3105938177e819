# SPDX-License-Identifier: Apache-2.0
"""Programs rewritten over other formats: against numpy, the interpreter, and the program they were made of.

A format is compiled once for each program and meets every matrix, from no rows to a row of everything.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from corpus import BY_NAME, Case
from corpus.data import coordinates
from corpus.running import draw
from decomposing import (
    CUBES,
    FORMATS,
    MATRICES,
    OPERANDS,
    READY,
    SCALE,
    TYPES,
    USUAL,
    check_call,
    check_function,
    close,
    compiled,
    made,
    operands,
    own,
    parsed,
    program,
    ready,
    typed,
    types_of,
)
from sparsetir import CooTensor, SparseTensor, formats
from sparsetir.errors import ArgumentError, VerifyError
from sparsetir.ir.views import decode

#: formats without parameters of a matrix
OTHERS = {"encoded", "tree"}


FEATURES = (1, 7, 33, 128)


#: with which programs of the corpus are compiled
SHOWN = ("bsr", "ell", "sell", "columns", "rows", "hyb", "blocks")


def test_every_registered_format_is_here() -> None:
    assert set(FORMATS) | OTHERS == set(formats.REGISTRY)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "op"), READY)
def test_ready_programs(name: str, op: str) -> None:
    dtype, idtype = types_of(op, name)
    _, kernel = ready(op, name, dtype, idtype)
    for matrix in MATRICES.values():
        check_call(kernel, op, matrix, dtype, 7)
    for feat in FEATURES if op != "spmv" else ():
        check_call(kernel, op, MATRICES["random"], dtype, feat)
        check_call(kernel, op, MATRICES["divisible"], dtype, feat)


@pytest.mark.parametrize(("dtype", "idtype"), TYPES)
@pytest.mark.parametrize(("op", "name"), [("sddmm", "bsr")])
def test_every_type(op: str, name: str, dtype: str, idtype: str) -> None:
    _, kernel = ready(op, name, dtype, idtype)
    for kind in ("random", "divisible", "empty_rows", "zero_nnz", "one_by_one", "no_rows"):
        check_call(kernel, op, MATRICES[kind], dtype, 33)


@pytest.mark.slow
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_index_arrays_have_the_type_of_the_program(idtype: str) -> None:
    parts, kernel = ready("sddmm", "rows", "float32", idtype)
    assert parts.formats["S"].index_type == idtype
    assert kernel.convert("S", typed(MATRICES["random"], "float32")).idtype == idtype
    assert {axis.idtype for axis in decode(parts.func).axes.values()} == {idtype}


# ---------------------------------------------------------------- what the rewritten function is


def packed(parts: Any, **given: Any) -> dict[str, Any]:
    """Arguments of a rewritten function: sparse ones, by buffer name, converted; the others as they are."""
    program, found = decode(parts.original), {}
    groups = {name: group for group in parts.groups for name in group.buffers}
    for name, value in given.items():
        if name not in groups:
            found[name] = value
            continue
        group, storage = groups[name], str(program.buffer(name).storage.name)
        tensor = SparseTensor.from_any(value, parts.formats[group.name])
        for piece, held in zip(group.pieces, tensor.pieces, strict=True):
            known = {**held.arrays, **held.sizes}
            found |= {param: known[own] for own, param in piece.params.items()}
            found |= {piece.values[storage]: held.values} if storage in piece.values else {}
            found |= {piece.mask: held.packed.values(np.ones(tensor.nnz, "int8"))} if piece.mask else {}
    return found


@pytest.mark.shared(2)
@pytest.mark.parametrize(("name", "op"), [(name, ("spmm", "sddmm")[at % 2]) for at, name in enumerate(FORMATS)])
def test_rewritten_functions_are_ordinary_programs(name: str, op: str) -> None:
    func = getattr(sparsetir.ops, op)("float64")
    parts = sparsetir.decompose_format(func, {OPERANDS[op]: made(name)})
    check_function(parts)
    kept = {str(p.name) for p in func.params} - {"a", "s", "o", "indptr", "indices", "nnz"}
    assert kept <= {str(p.name) for p in parts.func.params}


@pytest.mark.shared(2)
@pytest.mark.parametrize("name", FORMATS)
def test_the_interpreter_agrees(name: str) -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.spmm("float64"), {"A": made(name)})
    for kind in ("duplicates", "empty_rows", "one_each", "zero_nnz", "one_by_one"):
        A, _, B = operands(MATRICES[kind], "float64", 2)
        args = packed(parts, A=A, b=B, m=A.shape[0], n=A.shape[1], feat=2)
        out = sparsetir.interpret(parts.func, args)["c"]
        close(out, A.toarray() @ B, "float64")


@pytest.mark.parametrize("name", ["bsr", "ell", "sell", "dia", "blocks", "hyb"])
def test_the_interpreter_agrees_on_sparse_results(name: str) -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.sddmm("float64"), {"S": made(name)})
    S, X, Y = operands(MATRICES["explicit_zeros"], "float64", 2)
    stored = sparsetir.interpret(parts.func, packed(parts, S=S, x=X, y=Y, m=11, n=10, feat=2))
    tensor = SparseTensor.from_any(S, parts.formats["S"])
    O = tensor.restore([stored[piece.values["o"]] for piece in parts.groups[0].pieces])
    close(O.toarray(), S.toarray() * (X @ Y.T), "float64")


@pytest.mark.slow
@pytest.mark.parametrize("name", CUBES)
def test_mttkrp(name: str) -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.mttkrp("float64"), {"T_": CUBES[name]()})
    check_function(parts)
    kernel = compiled(parts)
    for kind, shape in product(("random", "empty_rows", "zero_nnz", "skewed"), [(6, 4, 5), (1, 1, 1), (0, 2, 3)]):
        rng = np.random.default_rng(len(kind))
        found = coordinates(rng, kind, shape) if 0 not in shape else np.zeros((0, 3), np.int64)
        found = rng.permutation(found)
        tensor = CooTensor(found.T.astype("int32"), rng.uniform(-1, 1, len(found)), shape)
        dense = np.zeros(shape)
        np.add.at(dense, tuple(found.T), tensor.values)
        B, C = (rng.uniform(-1, 1, (n, 7)) for n in shape[1:])
        close(kernel(T_=tensor, B=B, C=C), np.einsum("ijk,jr,kr->ir", dense, B, C), "float64")


def test_a_matrix_format_is_refused_for_a_tensor() -> None:
    with pytest.raises(ArgumentError, match="bsr stores tensors of 2 dimensions, got one of 3: take csf, coo"):
        sparsetir.decompose_format(sparsetir.ops.mttkrp(), {"T_": formats.bsr(2, 2)})


# ---------------------------------------------------------------- programs of the corpus

#: programs that walk a CSR structure; every other format serves them
WALKING = (
    "csrmm csrmm_loose fused_spmm csrmm_transposed spmv sddmm fused_sddmm csr_reduce csr_max "
    "csr_element_wise sparse_softmax rgcn_homo accumulate beta_scale batched_spmm scratch plain_buffers conditional "
    "quantised implicit_sizes buffer_params rfc_names row_dot row_dot_hoist row_dot_merge power_iteration"
).split()


#: programs that look elements up, and what is said of each
REFUSED = {
    "csrmm_dense_iter": "iteration csrmm does not iterate axis J, its elements would have to be looked up",
    "csrmm_dense_merge": "iteration csrmm does not iterate axis J",
    "csrmm_scan": "iteration csrmm does not iterate axis J",
    "default_value": "iteration fill does not iterate axis J",
    "two_stores": "iteration two_stores does not iterate axis J",
    "stencil": "iteration stencil does not iterate axis J",
    "union_add": "iteration union_add does not iterate axis J",
    "bool_mask": "iteration choose does not iterate axis J",
    "symmetrise": "iteration symmetrise reads A at other coordinates than its own, which is a search in every piece",
    "sparse_softmax_nested": "iteration rows does not iterate axis J",
    "attach_compressed": "iteration spgemm attaches BK",
    "masked_dense": "the program has no sparse buffer to decompose",
    "hyper_gnn": "the program has no sparse buffer to decompose",
}


KINDS = ("random", "empty_rows", "zero_nnz", "one_by_one", "skewed", "no_rows")


def structure_of(case: Case, func: Any) -> Any:
    """The first sparse buffer that is a parameter."""
    return next(b for b in decode(func).buffers.values() if not b.is_dense and not b.allocated)


def named(case: Case, func: Any, group: tuple[str, ...], args: dict[str, Any]) -> dict[str, Any]:
    """Raw arguments of a case as a user passes them: matrices by buffer name, sizes left out."""
    program, found = decode(func), {}
    arrays = [n for n in args if n not in ("indptr", "indices") and isinstance(args[n], np.ndarray)]
    shape = (args["m"] if "m" in args else len(args["indptr"]) - 1, args.get("n", len(args["indptr"]) - 1))
    for name in arrays:
        holder = next((b.name for b in program.buffers.values() if str(b.storage.name) == name), name)
        if holder in group:
            found[holder] = sp.csr_array((args[name].copy(), args["indices"], args["indptr"]), shape)
        else:
            found[name] = args[name].copy()
    if not any(name in found for name in group):
        first = structure_of(case, func)
        ones = np.full(len(args["indices"]), 7, first.dtype)
        found[first.name] = sp.csr_array((ones, args["indices"], args["indptr"]), shape)
    return found | {n: args[n] for n in ("beta", "batch", "steps", "r") if n in args}


def flat(value: Any) -> np.ndarray:
    return value.data if sp.issparse(value) else value


@pytest.mark.shared(3)
@pytest.mark.parametrize("name", ["bsr", "hyb"])
@pytest.mark.parametrize("program", WALKING)
def test_programs_of_the_corpus_are_rewritten(program: str, name: str) -> None:
    func = BY_NAME[program].make("float32", "int32")
    check_function(sparsetir.decompose_format(func, {structure_of(BY_NAME[program], func).name: made(name)}))


@pytest.mark.shared(2)
@pytest.mark.parametrize(("program", "name"), [(p, SHOWN[at % len(SHOWN)]) for at, p in enumerate(WALKING)])
def test_programs_of_the_corpus(program: str, name: str) -> None:
    case, dtype = BY_NAME[program], "float64" if "float64" in BY_NAME[program].dtypes else "float32"
    func = case.make(dtype, "int32")
    parts = sparsetir.decompose_format(func, {structure_of(case, func).name: made(name)})
    kernel, group = compiled(parts), parts.groups[0].buffers
    outputs = [next((b.name for b in decode(func).buffers.values() if str(b.storage.name) == n), n)
               for n in case.output_names]  # fmt: skip
    for kind in [k for k in KINDS if k in case.kinds]:
        args = draw(case, kind, dtype, "int32")
        given = named(case, func, group, args)
        results = kernel(**given)
        returned = iter(results if isinstance(results, tuple) else (results,))
        for handle, buffer, expected in zip(case.output_names, outputs, case.expected(args), strict=True):
            found = given[handle] if handle in given else next(returned)
            np.testing.assert_allclose(flat(found), expected, rtol=1e-4, atol=1e-5, err_msg=f"{buffer}, {kind}")


@pytest.mark.parametrize("program", REFUSED)
def test_programs_that_search_are_refused(program: str) -> None:
    func = BY_NAME[program].make("float32", "int32")
    with pytest.raises(VerifyError, match=REFUSED[program]):
        sparsetir.decompose_format(func, formats.bsr(2, 3))


@pytest.mark.parametrize(
    ("given_as", "name"), [("csc", "bsr"), ("coo", "sell"), ("dcsr", "rows"), ("ell", "columns"), ("csc", "hyb")]
)
def test_programs_over_other_structures(given_as: str, name: str) -> None:
    func = sparsetir.ops.spmm("float64", given_as, idtype="int64")
    parts = sparsetir.decompose_format(func, {"A": made(name)})
    check_function(parts)
    kernel = compiled(parts)
    for kind in ("random", "divisible", "empty_rows", "zero_nnz", "no_rows"):
        check_call(kernel, "spmm", MATRICES[kind], "float64", 7)


ATTENTION = """
    S = T.alloc_sparse_buffer((I, J), "float32")
    top = T.alloc_sparse_buffer((I,), "float32")
    total = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([I, J, K], "SSR", "scores") as [i, j, k]:
        with T.init():
            S[i, j] = 0
        S[i, j] = S[i, j] + Q[i, k] * P[j, k]
    with T.sp_iter([I, J], "SR", "top") as [i, j]:
        with T.init():
            top[i] = T.min_value("float32")
        top[i] = T.max(top[i], S[i, j])
    with T.sp_iter([I, J], "SS", "exponent") as [i, j]:
        S[i, j] = T.exp(S[i, j] - top[i])
    with T.sp_iter([I, J], "SR", "total") as [i, j]:
        with T.init():
            total[i] = 0
        total[i] = total[i] + S[i, j]
    with T.sp_iter([I, K, J], "SSR", "mix") as [i, k, j]:
        with T.init():
            Y[i, k] = 0
        Y[i, k] = Y[i, k] + A[i, j] * S[i, j] / total[i] * V[j, k]
"""


COUNT = """
    with T.sp_iter([I, J], "SR", "count") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + T.if_then_else(A[i, j] < 5.0, T.float32(1), T.float32(0))
"""


LOWEST = """
    with T.sp_iter([I, J], "SR", "lowest") as [i, j]:
        with T.init():
            Y[i] = 3.0
        Y[i] = T.min(Y[i], A[i, j] + 1.0)
"""


ROW_SUM = """
    with T.sp_iter([I, J], "SR", "sum") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j]
"""


SCATTER = """
    with T.sp_iter([I, JD], "SS", "clear") as [i, j]:
        D[i, j] = -1.0
    with T.sp_iter([I, J], "SS", "scatter") as [i, j]:
        D[i, j] = A[i, j]
"""


TWO = """
    with T.sp_iter([I, J], "SS", "map") as [i, j]:
        O[i, j] = A[i, j] * B[i, j] + 1.0
"""


PLAIN = """
    with T.sp_iter([I, J], "SR", "plain") as [i, j]:
        Y[i] = Y[i] + A[i, j] * X[j]
"""


TRIPLE = """
    with T.sp_iter([I, J], "SR", "triple") as [i, j]:
        with T.init():
            Y[i] = 0
        for l in T.serial(3):
            Y[i] = Y[i] + A[i, j]
"""


LOCAL = """
    with T.sp_iter([I, J], "SR", "local") as [i, j]:
        held = T.alloc_buffer((1,), "float32")
        with T.init():
            Y[i] = 0
        held[0] = A[i, j] * 3.0
        Y[i] = Y[i] + held[0]
"""


BESIDE = """
    with T.sp_iter([I], "S", "bias") as [i]:
        Z[i] = X[i] * 2.0
    with T.sp_iter([I, J], "SR", "sum") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j] * X[j]
    with T.sp_iter([I], "S", "add") as [i]:
        Y[i] = Y[i] + Z[i]
"""


def _softmax(scores: np.ndarray, stored: np.ndarray) -> np.ndarray:
    weights = np.where(stored, np.exp(scores - np.max(scores, axis=1, where=stored, initial=-1e9, keepdims=True)), 0)
    return weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)


def stored_in(A: Any) -> np.ndarray:
    """Where a matrix has entries, explicit zeros too."""
    return sp.csr_array((np.ones(len(A.data)), A.indices, A.indptr), A.shape).toarray() > 0


some = pytest.mark.parametrize("name", ["bsr", "sell", "columns", "hyb"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bsr", "sell", "columns", "hyb"])
def test_fused_attention(name: str) -> None:
    kernel = own(name, ATTENTION, "A:I,J Q:I,K P:JD,K V:JD,K Y:I,K", "feat", "K = T.dense_fixed(feat)")
    for kind in USUAL:
        A, Q, P = operands(MATRICES[kind], "float32", 5)
        V = operands(MATRICES[kind], "float32", 5, seed=1)[2]
        weights = _softmax((30 * Q) @ P.T, stored_in(A))
        found = kernel(A=A, Q=30 * Q, P=P, V=V)
        np.testing.assert_allclose(found, (weights * A.toarray()) @ V, rtol=1e-4, atol=1e-4, err_msg=kind)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        *((COUNT, name) for name in ("bsr", "dia", "sell", "hyb")),
        *((LOWEST, name) for name in ("bsr", "sr_bcrs", "dense_columns", "dense_rows", "band")),
    ],
    ids=lambda value: "count" if value == COUNT else "lowest" if value == LOWEST else value,
)
def test_padding_does_not_count(body: str, name: str) -> None:
    kernel = own(name, body, "A:I,J Y:I")
    for kind in USUAL:
        A = typed(MATRICES[kind], "float32")
        A.data[...] = abs(A.data) + 1.5  # what padding holds would be the least
        stored, dense = stored_in(A), A.toarray()
        least = np.min(dense + 1, axis=1, where=stored, initial=3)
        expected = (stored & (dense < 5)).sum(axis=1) if body == COUNT else least
        close(kernel(A=A), expected.astype("float32"))


@pytest.mark.parametrize("name", ["bsr", "ell", "blocks", "hyb"])
def test_updates_in_place(name: str) -> None:
    kernel = own(name, SCALE, "A:I,J")
    for kind in USUAL:
        A = typed(MATRICES[kind], "float32")
        expected = np.exp(A.data)
        assert kernel(A=A) is A
        np.testing.assert_allclose(A.data, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["bsr", "ell", "columns"])
def test_an_update_makes_padding_count_no_more(name: str) -> None:
    kernel = own(name, SCALE + ROW_SUM, "A:I,J Y:I")
    for kind in USUAL:
        A = typed(MATRICES[kind], "float32")
        expected = np.where(stored_in(A), np.exp(A.toarray()), 0).sum(axis=1)
        close(kernel(A=A), expected)


def test_padding_in_a_loop() -> None:
    """What an iteration leaves in the padding is met by those before it, the next time round."""
    loop = "for t in T.serial(2):\n" + "\n".join(f"    {line[4:]}" for line in (ROW_SUM + SCALE).splitlines() if line)
    kernel = own("bsr", loop, "A:I,J Y:I")
    A = typed(MATRICES["random"], "float32")
    expected = np.where(stored_in(A), np.exp(A.toarray()), 0).sum(axis=1)
    close(kernel(A=A), expected)


@pytest.mark.parametrize("name", ["bsr", "csr"])
def test_an_updated_argument_beside_a_result(name: str) -> None:
    kernel = own(name, SCALE + ROW_SUM, "A:I,J Y:I")
    A = typed(MATRICES["random"], "float32")
    expected = np.exp(A.data)
    kernel(A=A)
    np.testing.assert_allclose(A.data, expected, rtol=1e-5)
    kernel.bind(A=A)()
    np.testing.assert_allclose(A.data, np.exp(expected), rtol=1e-5)


@some
def test_scatter_to_a_dense_buffer(name: str) -> None:
    kernel = own(name, SCATTER, "A:I,J D:I,JD")
    for kind in USUAL:
        A = typed(MATRICES[kind], "float32")
        close(kernel(A=A), np.where(stored_in(A), A.toarray(), -1))


@some
def test_two_buffers_over_one_structure(name: str) -> None:
    kernel = own(name, TWO, "A:I,J B:I,J O:I,J")
    for kind in USUAL:
        A = typed(MATRICES[kind], "float32")
        B = sp.csr_array((np.arange(len(A.data), dtype="float32"), A.indices, A.indptr), A.shape)
        O = kernel(A=A, B=B)
        assert np.array_equal(O.indices, A.indices)
        close(O.data, A.data * B.data + 1)


def test_two_orders_of_one_structure() -> None:
    kernel = own("bsr", TWO, "A:I,J B:I,J O:I,J")
    A = typed(MATRICES["random"], "float32")
    B = (3 * A).tocsc()
    O = kernel(A=A, B=B)
    close(O.data, 3 * A.data**2 + 1)


def test_different_structures_are_refused() -> None:
    kernel = own("bsr", TWO, "A:I,J B:I,J O:I,J")
    A = typed(MATRICES["random"], "float32")
    B = MATRICES["random"].T.tocsr().T.tocsr().astype("float32")
    B.data[:] = 1
    B = sp.csr_array(B - sp.csr_array(([B.data[0]], ([0], [B.indices[0]])), B.shape))
    B.eliminate_zeros()
    with pytest.raises(ArgumentError, match="B and A share axes but have different structures"):
        kernel(A=A, B=B)


@pytest.mark.parametrize("name", SHOWN)
def test_ordinary_buffers(name: str) -> None:
    """Blocks that stick out of the matrix touch nothing outside of a buffer without axes."""
    parts = sparsetir.decompose_format(program("A:I,J X:(n,) Y:(m,)", PLAIN), {"A": made(name)})
    check_function(parts)
    A, _, x = operands(MATRICES["random"], "float32", 1)
    start = np.ones(17, "float32")
    args = packed(parts, A=A, X=x[:, 0], Y=start, m=17, n=23)
    close(sparsetir.interpret(parts.func, args)["Y"], 1 + A @ x[:, 0])


FENCED = """
import sys
sys.path.append("transform")
import numpy as np, sparsetir, test_decompose as t
from fences import fenced
A, _, x = t.operands(t.MATRICES["random"], "float32", 1)
for name in ("ell", "sell"):
    y = fenced(np.zeros(17, "float32"))
    kernel = t.own(name, t.PLAIN, "A:I,J X:(n,) Y:(m,)")
    print("calls the kernel of", name, flush=True)
    kernel(A=A, X=fenced(x[:, 0]), Y=y)
    t.close(y, A @ x[:, 0])
"""


@pytest.mark.slow
def test_ordinary_buffers_end_where_they_end() -> None:
    """In a process of its own: a step past the end ends it."""
    options = {"cwd": Path(__file__).parents[1], "capture_output": True, "check": False, "text": True}
    done = subprocess.run([sys.executable, "-c", FENCED], **options)
    assert done.returncode == 0, done.stdout + done.stderr[-300:]


@pytest.mark.parametrize("name", ["bsr", "columns", "hyb"])
@pytest.mark.parametrize("body", [TRIPLE, LOCAL], ids=["loop", "buffer"])
def test_what_a_body_defines(name: str, body: str) -> None:
    kernel = own(name, body, "A:I,J Y:I")
    A = typed(MATRICES["random"], "float32")
    close(kernel(A=A), 3 * A.sum(axis=1))


@some
def test_iterations_that_do_not_touch_it(name: str) -> None:
    kernel = own(name, BESIDE, "A:I,J X:I Y:I Z:I")
    for kind in ("diagonal", "one_by_one"):
        A, x, _ = operands(MATRICES[kind], "float32", 1)
        Y, Z = kernel(A=A, X=x[:, 0])
        close(Z, 2 * x[:, 0])
        close(Y, A @ x[:, 0] + 2 * x[:, 0])


def test_an_access_outside_of_an_iteration_is_refused() -> None:
    body = ROW_SUM + "\n    for r in T.serial(m):\n        Y[r] = Y[r] + A[r, 0]\n"
    with pytest.raises(VerifyError, match=r"cannot decompose A: .*outside"):
        sparsetir.decompose_format(program("A:I,J Y:I", body), formats.bsr(2, 3))


def test_rows_in_order() -> None:
    """A recurrence over the rows is either kept in order or refused."""
    body = """
    with T.sp_iter([I, J], "SR", "solve") as [i, j]:
        with T.init():
            Y[i] = 1.0
        Y[i] = Y[i] - A[i, j] * Y[j]
    """
    A = sp.csr_array(sp.tril(MATRICES["full"][:, :7], -1)).astype("float32")
    expected = np.linalg.solve(np.eye(7) + A.toarray(), np.ones(7))
    close(compiled(program("A:I,J Y:I", body))(A=A), expected)
    for name in ("sell", "hyb", "csc"):
        try:
            parts = sparsetir.decompose_format(program("A:I,J Y:I", body), {"A": made(name)})
        except VerifyError:
            continue
        close(compiled(parts)(A=A), expected)


EDGES = """
    with T.sp_iter([I, J, F], "SRS", "sum") as [i, j, f]:
        with T.init():
            Y[i, f] = 0
        Y[i, f] = Y[i, f] + A[i, j] * E[i, j, f]
"""


HEADS = """
    with T.sp_iter([H, I, J], "SSS", "scale") as [h, i, j]:
        O[h, i, j] = A[i, j] * X[h, i]
"""


@pytest.mark.parametrize("name", ["bsr", "csr", "columns"])
def test_a_buffer_with_a_further_axis(name: str) -> None:
    func = program("A:I,J E:I,J,F Y:I,F", EDGES, "feat", "F = T.dense_fixed(feat)")
    parts = sparsetir.decompose_format(func, {"A": made(name)})
    check_function(parts)


@pytest.mark.parametrize("name", ["bsr", "csr"])
def test_a_buffer_with_an_axis_before(name: str) -> None:
    func = program("A:I,J X:H,I O:H,I,J", HEADS, "heads", "H = T.dense_fixed(heads)")
    check_function(sparsetir.decompose_format(func, {"A": made(name)}))


def test_defaults_and_names_survive() -> None:
    """A default value goes to each piece, and a name that is taken is not taken twice."""
    func = parsed("""
        @T.prim_func
        def func(a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32,
                 indptr_bsr: T.int32, mb_bsr: T.int32):
            I = T.dense_fixed(m)
            J = T.sparse_variable(I, (n, nnz), (indptr, indices))
            IO_bsr = T.dense_fixed(m)
            A = T.match_sparse_buffer(a, (I, J), "float32", default_value=2.5)
            Y = T.match_sparse_buffer(y, (IO_bsr,), "float32")
            with T.sp_iter([I, J], "SR", "sum") as [io, jo]:
                with T.init():
                    Y[io] = T.cast(indptr_bsr + mb_bsr, "float32")
                Y[io] = Y[io] + A[io, jo]
    """)
    parts = sparsetir.decompose_format(func, formats.bsr(2, 3))
    check_function(parts)
    assert [float(b.default.value) for b in decode(parts.func).buffers.values() if not b.is_dense] == [2.5]
    A = typed(MATRICES["random"], "float32")
    close(compiled(parts)(A=A, indptr_bsr=3, mb_bsr=4), A.sum(axis=1) + 7)


@pytest.mark.parametrize("name", ["bsr", "coo", "ell", "dbsr"])
def test_constant_sizes_are_checked(name: str) -> None:
    text = sparsetir.script(program("A:I,J Y:I", ROW_SUM))
    constants = {"d(m)": "d(4)", "(n, n": "(6, n", "d(n)": "d(6)", "m: T.int32, n: T.int32, ": ""}
    for symbolic, constant in constants.items():
        text = text.replace(symbolic, constant)
    func = sparsetir.parse(text)
    kernel = compiled(sparsetir.decompose_format(func, {"A": made(name)}))
    close(kernel(A=sp.csr_array(np.ones((4, 6), "float32"))), np.full(4, 6.0))
    for wrong, d in (((8, 6), 0), ((4, 9), 1)):
        with pytest.raises(ArgumentError, match=rf"A.shape\[{d}\] is {wrong[d]} but"):
            kernel(A=sp.csr_array(np.ones(wrong, "float32")))
