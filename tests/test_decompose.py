# SPDX-License-Identifier: Apache-2.0
"""Programs rewritten over other formats: against numpy, the interpreter, and the program they were made of.

A format is compiled once for each program and meets every matrix, from no rows to a row of everything.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import permutations, product
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparsetir
from corpus import BY_NAME, Case
from corpus.data import coordinates
from corpus.running import draw
from sparsetir import CooTensor, SparseTensor, formats
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError, VerifyError
from sparsetir.formats import memory
from sparsetir.ir import decode
from sparsetir.sizes import Size
from sparsetir.transform import FormatRewriteRule

#: every registered format of a matrix, with parameters that divide none of the shapes below
FORMATS: dict[str, dict[str, Any]] = {
    "csr": {},
    "csc": {},
    "coo": {},
    "dcsr": {},
    "csf": {"order": (1, 0)},
    "ragged": {},
    "ell": {},
    "ell_rest": {"width": 2},
    "bsr": {"r": 2, "c": 3},
    "dbsr": {"r": 3, "c": 2},
    "sell": {"C": 4, "sigma": 8},
    "padded_csr": {"t": 3},
    "sr_bcrs": {"t": 3, "g": 2},
    "nm": {"n": 4, "m": 4},
    "dia": {},
    "band": {"lower": 40, "upper": 60},
    "columns": {"c": 2},
    "rows": {"p": 2},
    "buckets": {"widths": (1, 3)},
    "hyb": {"c": 2, "widths": (2,)},
    "blocks": {"r": 2, "c": 3, "density": 0.6},
    "dia_rest": {"density": 0.4},
    "hdia": {"C": 4, "density": 0.4},
    "dense_rows": {"density": 0.4},
    "dense_columns": {"density": 0.4},
    "row_groups": {"r": 2, "padding": 0.9},
    "reordered": {},
    "narrow_csr": {},
    "narrow_sell": {"C": 4, "sigma": 8},
}
#: formats without parameters of a matrix
OTHERS = {"tree"}
OPERANDS = {"spmm": "A", "spmv": "A", "sddmm": "S"}
TYPES = list(product(("float32", "float64"), ("int32", "int64")))
FEATURES = (1, 7, 33, 128)


#: with which programs of the corpus are compiled
SHOWN = ("bsr", "ell", "sell", "columns", "rows", "hyb", "blocks")


def parsed(text: str) -> Any:
    """The function of an indented text."""
    return sparsetir.parse(dedent(text))


def made(name: str) -> Any:
    """The format of the table."""
    return formats.make(name, **FORMATS[name])


def compiled(parts: Any) -> Any:
    """A kernel that is compiled in half the time: where it is the program that matters, not the machine code."""
    return sparsetir.build(parts, {"kind": "llvm", "opt-level": 0})


@cache
def ready(op: str, name: str, dtype: str, idtype: str) -> tuple[Any, Any]:
    """A ready program over a format, and its kernel."""
    parts = sparsetir.decompose_format(getattr(sparsetir.ops, op)(dtype, idtype=idtype), {OPERANDS[op]: made(name)})
    return parts, sparsetir.build(parts) if op == "spmm" else compiled(parts)


def types_of(op: str, name: str) -> tuple[str, str]:
    """Value and index type in which a pair is tested: all four in turn."""
    return TYPES[(list(FORMATS).index(name) + list(OPERANDS).index(op)) % len(TYPES)]


# ---------------------------------------------------------------- matrices


def _sparse(dense: Any) -> sp.csr_array:
    return sp.csr_array(np.asarray(dense, "float64"))


def _random(seed: int, m: int, n: int, density: float = 0.3) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    return _sparse(np.where(rng.random((m, n)) < density, rng.uniform(-1, 1, (m, n)), 0))


def _every_other_row(m: int, n: int) -> sp.csr_array:
    dense = _random(2, m, n, 0.4).toarray()
    dense[::2] = 0
    return _sparse(dense)


def _one_each(m: int, n: int) -> sp.csr_array:
    columns = np.random.default_rng(3).integers(0, n, m)
    return sp.csr_array((np.arange(1.0, m + 1), columns, np.arange(m + 1)), (m, n))


def _one_row(m: int, n: int) -> sp.csr_array:
    dense = np.zeros((m, n))
    dense[m // 2] = np.arange(1, n + 1)
    return _sparse(dense)


def _explicit_zeros(m: int, n: int) -> sp.csr_array:
    found = _random(4, m, n)
    found.data[::3] = 0
    return found


def _unsorted(m: int, n: int) -> sp.csr_array:
    """Each row backwards."""
    found = _random(5, m, n)
    rows = np.repeat(np.arange(m), np.diff(found.indptr))
    order = np.lexsort((-found.indices, rows))
    return sp.csr_array((found.data[order], found.indices[order], found.indptr), (m, n))


def _duplicates(m: int, n: int) -> sp.csr_array:
    rng = np.random.default_rng(6)
    counts = rng.integers(0, 5, m)
    indices = rng.integers(0, min(n, 3), counts.sum())
    return sp.csr_array((rng.uniform(-1, 1, len(indices)), indices, np.append(0, np.cumsum(counts))), (m, n))


MATRICES = {
    "random": _random(1, 17, 23),
    "divisible": _random(7, 12, 24),
    "empty_rows": _every_other_row(9, 14),
    "zero_nnz": sp.csr_array((5, 4)),
    "one_by_one": _sparse([[3.0]]),
    "one_row": _one_row(7, 31),
    "one_each": _one_each(13, 5),
    "full": _random(8, 7, 11, 1.1),
    "diagonal": _sparse(np.diag(np.arange(1.0, 11))),
    "explicit_zeros": _explicit_zeros(11, 10),
    "unsorted": _unsorted(10, 19),
    "duplicates": _duplicates(8, 7),
    "no_rows": sp.csr_array((0, 4)),
    "no_columns": sp.csr_array((4, 0)),
}


def typed(matrix: Any, dtype: str) -> sp.csr_array:
    """The matrix with values of another type; scipy's own conversion would sort it and add its duplicates up."""
    return sp.csr_array((matrix.data.astype(dtype), matrix.indices.copy(), matrix.indptr), matrix.shape)


def operands(matrix: Any, dtype: str, feat: int, seed: int = 0) -> tuple[Any, np.ndarray, np.ndarray]:
    """A matrix of a type, and dense ones with as many rows as it has rows and columns."""
    rng = np.random.default_rng(seed)
    tall, wide = (rng.uniform(-1, 1, (n, feat)).astype(dtype) for n in matrix.shape)
    return typed(matrix, dtype), tall, wide


def close(found: Any, expected: Any, dtype: str = "float32", terms: int = 40) -> None:
    """Compare sums of some terms of magnitude 1."""
    assert found.shape == expected.shape
    tolerance = terms * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(found, expected, rtol=4 * tolerance, atol=8 * tolerance)


def check_call(kernel: Any, op: str, matrix: Any, dtype: str, feat: int) -> None:
    """Call a ready program's kernel and compare with numpy in double precision."""
    A, tall, wide = operands(matrix, dtype, feat)
    dense, X, Y = (a.astype("float64") for a in (A.toarray(), tall, wide))
    if op == "spmm":
        close(kernel(A=A, B=wide), dense @ Y, dtype)
    elif op == "spmv":
        close(kernel(A=A, x=np.ascontiguousarray(wide[:, 0])), dense @ Y[:, 0], dtype)
    else:
        O = kernel(S=A, X=tall, Y=wide)
        assert type(O) is type(A)
        assert np.array_equal(O.indptr, A.indptr)
        assert np.array_equal(O.indices, A.indices)
        close(O.toarray(), dense * (X @ Y.T), dtype, 4 * feat)


def test_every_registered_format_is_here() -> None:
    assert set(FORMATS) | OTHERS == set(formats.REGISTRY)


@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("name", FORMATS)
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


def check_function(parts: Any) -> None:
    """It verifies, and its text is the same function."""
    sparsetir.verify(parts.func)
    text = sparsetir.script(parts.func)
    again = sparsetir.parse(text)
    assert tvm_ffi.structural_equal(parts.func, again), text
    assert sparsetir.script(again) == text


@pytest.mark.parametrize(("name", "op"), [(name, ("spmm", "sddmm")[at % 2]) for at, name in enumerate(FORMATS)])
def test_rewritten_functions_are_ordinary_programs(name: str, op: str) -> None:
    func = getattr(sparsetir.ops, op)("float64")
    parts = sparsetir.decompose_format(func, {OPERANDS[op]: made(name)})
    check_function(parts)
    kept = {str(p.name) for p in func.params} - {"a", "s", "o", "indptr", "indices", "nnz"}
    assert kept <= {str(p.name) for p in parts.func.params}


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


# ---------------------------------------------------------------- tensors of three dimensions


def _leaves_last() -> Any:
    """Fibers along the second dimension in slots of two: a tree of a user's own."""
    description = parsed("""
        @T.prim_func
        def slots(t: T.handle, p: T.handle, k: T.handle, m: T.int32, l: T.int32, n: T.int32, nnz: T.int32):
            I = T.dense_fixed(m)
            K = T.sparse_variable(I, (n, nnz), (p, k))
            J = T.dense_fixed(l)
            X = T.match_sparse_buffer(t, (I, K, J))
    """)
    axis_map = {0: ["I"], 1: ["J"], 2: ["K"]}
    coords = {"inverse": lambda i, k, j: (i, j, k), "forward": lambda i, j, k: (i, k, j)}
    return formats.tree(description, axis_map, fills=True, name="slots", **coords)


CUBES = {
    **{f"csf {order}": lambda order=order: formats.csf(order) for order in permutations(range(3))},
    "coo": formats.coo,
    "tree": _leaves_last,
}


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
    with pytest.raises(ArgumentError, match="bsr stores tensors of 2 dimensions, found one of 3: take csf, coo"):
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
    "symmetrise": "iteration symmetrise reads A elsewhere than where it stands, which is a search in every piece",
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


@pytest.mark.parametrize("name", ["bsr", "hyb"])
@pytest.mark.parametrize("program", WALKING)
def test_programs_of_the_corpus_are_rewritten(program: str, name: str) -> None:
    func = BY_NAME[program].make("float32", "int32")
    check_function(sparsetir.decompose_format(func, {structure_of(BY_NAME[program], func).name: made(name)}))


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


# ---------------------------------------------------------------- programs of this file


def program(buffers: str, body: str, sizes: str = "", axes: str = "", before: str = "") -> Any:
    """A function over a CSR structure I, J: parameters (``name:axes``), further axes, and a body."""
    pairs = [b.split(":") for b in buffers.split()]
    names = [*(f"{name.lower()}_: T.handle" for name, _ in pairs), "indptr: T.handle", "indices: T.handle"]
    names += [f"{size}: T.int32" for size in ("m", "n", "nnz", *sizes.split())]
    indent = lambda text: [f"    {line}" for line in text.strip("\n").splitlines()]  # noqa: E731
    drop = min((len(line) - len(line.lstrip()) for line in body.splitlines() if line.strip()), default=0)
    lines = [
        "@T.prim_func",
        f"def func({', '.join(names)}):",
        "    I = T.dense_fixed(m)",
        "    J = T.sparse_variable(I, (n, nnz), (indptr, indices))",
        "    JD = T.dense_fixed(n)",
        *indent(axes),
        *(f"    {name} = T.match_sparse_buffer({name.lower()}_, ({on},))" for name, on in pairs if on[0] != "("),
        *(f"    {name} = T.match_buffer({name.lower()}_, {on})" for name, on in pairs if on[0] == "("),
        *indent("\n".join(line[drop:] for line in body.splitlines())),
    ]
    return sparsetir.parse("\n".join(lines))


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
SCALE = """
    with T.sp_iter([I, J], "SS", "scale") as [i, j]:
        A[i, j] = T.exp(A[i, j])
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


@cache
def own(name: str, body: str, buffers: str, sizes: str = "", axes: str = "", at: str = "A") -> Any:
    parts = sparsetir.decompose_format(program(buffers, body, sizes, axes), {at: made(name)})
    check_function(parts)
    return compiled(parts)


def stored_in(A: Any) -> np.ndarray:
    """Where a matrix has entries, explicit zeros too."""
    return sp.csr_array((np.ones(len(A.data)), A.indices, A.indptr), A.shape).toarray() > 0


USUAL = ("random", "divisible", "empty_rows", "zero_nnz", "one_by_one", "one_row", "explicit_zeros", "unsorted")
some = pytest.mark.parametrize("name", ["bsr", "sell", "columns", "hyb"])


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
    with pytest.raises(ArgumentError, match="B and another argument share axes but have different structures"):
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
import numpy as np, sparsetir, test_decompose as t
from fences import fenced
A, _, x = t.operands(t.MATRICES["random"], "float32", 1)
y = fenced(np.zeros(17, "float32"))
kernel = t.own("{name}", t.PLAIN, "A:I,J X:(n,) Y:(m,)")
kernel(A=A, X=fenced(x[:, 0]), Y=y)
t.close(y, A @ x[:, 0])
"""


@pytest.mark.parametrize("name", ["ell", "sell"])
def test_ordinary_buffers_end_where_they_end(name: str) -> None:
    """In a process of its own: a step past the end ends it."""
    options = {"cwd": Path(__file__).parent, "capture_output": True, "check": False, "text": True}
    done = subprocess.run([sys.executable, "-c", FENCED.replace("{name}", name)], **options)
    assert done.returncode == 0, done.stderr[-300:]


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


def test_two_structures() -> None:
    """Two matrices of different formats, one program."""
    func = parsed(TWO_STRUCTURES)
    A, B = (typed(_random(seed, 17, 23), "float32") for seed in (1, 9))
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
    A = _sparse([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0]])
    first = sparsetir.decompose_format(sparsetir.ops.spmv("float64"), {"A": outer})
    kernel = compiled(sparsetir.decompose_format(first, {piece: formats.make(inner)}))
    close(kernel(A=A, x=np.ones(3)), A @ np.ones(3), "float64")


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
        ({"B": formats.bsr(2)}, "B is dense: only sparse buffers are decomposed"),
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


# ---------------------------------------------------------------- calls

SPARSE_CLASSES = ("csr", "csc", "coo", "bsr", "lil", "dok", "dia")


@cache
def blocked(op: str) -> Any:
    return ready(op, "bsr", "float32", "int32")[1]


@pytest.fixture
def given_csr() -> tuple[Any, np.ndarray, np.ndarray]:
    return operands(MATRICES["random"], "float32", 7)


@pytest.mark.parametrize("kind", SPARSE_CLASSES)
@pytest.mark.parametrize("family", ["array", "matrix"])
def test_sparse_classes(kind: str, family: str, given_csr: Any) -> None:
    csr, X, Y = given_csr
    A = getattr(sp, f"{kind}_{family}")(csr)
    close(blocked("spmm")(A=A, B=Y), csr @ Y)
    O = blocked("sddmm")(S=A, X=X, Y=Y)
    assert type(O) is type(A)
    close(O.toarray(), csr.toarray() * (X @ Y.T))


def test_tensors_of_coordinates(given_csr: Any) -> None:
    csr, X, Y = given_csr
    coo = csr.tocoo()
    order = np.random.default_rng(0).permutation(csr.nnz)
    tensor = CooTensor(np.stack(coo.coords)[:, order], coo.data[order], coo.shape)
    close(blocked("spmm")(A=tensor, B=Y), csr @ Y)
    O = blocked("sddmm")(S=tensor, X=X, Y=Y)
    assert isinstance(O, CooTensor)
    assert np.array_equal(O.coords, tensor.coords)
    i, j = tensor.coords
    close(O.values, tensor.values * np.einsum("pk,pk->p", X[i], Y[j]))


@pytest.mark.parametrize("name", ["csr", "bsr", "hyb", "coo"])
def test_sparse_tensors(name: str, given_csr: Any) -> None:
    csr, X, Y = given_csr
    tensor = SparseTensor.from_scipy(csr, made(name))
    close(blocked("spmm")(A=tensor, B=Y), csr @ Y)
    O = blocked("sddmm")(S=tensor, X=X, Y=Y)
    dense = O.to_dense() if isinstance(O, SparseTensor) else O.toarray()
    close(dense, csr.toarray() * (X @ Y.T))


def test_torch_tensors(given_csr: Any) -> None:
    torch = pytest.importorskip("torch")
    csr, X, Y = given_csr
    A = torch.sparse_csr_tensor(*(torch.from_numpy(a.copy()) for a in (csr.indptr, csr.indices, csr.data)), csr.shape)
    C = blocked("spmm")(A=A, B=torch.from_numpy(Y))
    assert isinstance(C, torch.Tensor)
    close(C.numpy(), csr @ Y)
    O = blocked("sddmm")(S=A, X=torch.from_numpy(X), Y=torch.from_numpy(Y))
    assert O.layout == torch.sparse_csr


def test_values_are_read_at_each_call(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel, C = blocked("spmm"), A @ B
    close(kernel(A=A, B=B), C)
    A.data *= 2
    close(kernel(A=A, B=B), 2 * C)
    A.data = A.data / 4
    close(kernel(A=A, B=B), C / 2)


def test_another_matrix_with_the_same_index_arrays(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel = blocked("spmm")
    other = sp.csr_array((np.ones(A.nnz, "float32"), A.indices, A.indptr), A.shape)
    close(kernel(A=A, B=B), A @ B)
    count = len(kernel.converted)
    close(kernel(A=other, B=B), other @ B)
    assert len(kernel.converted) == count


def test_the_same_index_arrays_with_another_shape(given_csr: Any) -> None:
    A, _, B = given_csr
    wider = sp.csr_array((A.data, A.indices, A.indptr), (17, 24))
    kernel = blocked("spmm")
    close(kernel(A=A, B=B), A @ B)
    with pytest.raises(ArgumentError, match=r"n is 24 from A.shape\[1\] but 23 from B.shape\[0\]"):
        kernel(A=wider, B=B)


def test_more_matrices_than_are_remembered(given_csr: Any) -> None:
    _, _, B = given_csr
    kernel = blocked("spmm")
    many = [_random(seed, 17, 23).astype("float32") for seed in range(12)]
    for _ in range(2):
        for A in many:
            close(kernel(A=A, B=B), A @ B)


def test_entries_sorted_between_calls(given_csr: Any) -> None:
    """`sort_indices` and many scipy operations move entries within their arrays."""
    _, _, B = given_csr
    A = typed(_unsorted(10, 23), "float32")
    kernel, C = blocked("spmm"), A.toarray() @ B
    close(kernel(A=A, B=B), C)
    A.sort_indices()
    close(kernel(A=A, B=B), C)


def test_columns_changed_between_calls(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel = blocked("spmm")
    kernel(A=A, B=B)
    A.indices[:] = 22 - A.indices
    close(kernel(A=A, B=B), A.toarray() @ B)


def test_a_structure_outlives_the_matrix_it_was_seen_in(given_csr: Any) -> None:
    """The csr format shares the arrays of the first matrix; what happens to them is nothing to the second."""
    A, _, B = given_csr
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.csr()}))
    first, expected = A.copy(), A.toarray() @ B
    close(kernel(A=first, B=B), expected)
    first.indices[:] = 22 - first.indices[::-1]
    close(kernel(A=A, B=B), expected)


@pytest.mark.parametrize("kind", ["lil", "dok"])
def test_elements_set_between_calls(kind: str, given_csr: Any) -> None:
    csr, _, B = given_csr
    A = csr.asformat(kind)
    kernel = blocked("spmm")
    close(kernel(A=A, B=B), csr @ B)
    A[0, 0], A[1, 1], A[16, 22] = 9, 3, 7
    close(kernel(A=A, B=B), A.toarray() @ B)


def test_results_in_place(given_csr: Any) -> None:
    A, X, B = given_csr
    C = np.full((17, 7), np.nan, "float32")
    assert blocked("spmm")(A=A, B=B, C=C) is C
    close(C, A @ B)
    O = A.copy()
    assert blocked("sddmm")(S=A, X=X, Y=B, O=O) is O
    close(O.toarray(), A.toarray() * (X @ B.T))


@pytest.mark.parametrize("kind", ["csc", "shuffled coo", "unsorted"])
def test_results_in_place_in_another_order(kind: str, given_csr: Any) -> None:
    A, X, B = given_csr
    O = {"csc": A.tocsc(), "shuffled coo": _reversed_rows(A).tocoo(), "unsorted": _reversed_rows(A)}[kind]
    assert blocked("sddmm")(S=A, X=X, Y=B, O=O) is O
    close(O.toarray(), A.toarray() * (X @ B.T))


def _reversed_rows(A: Any) -> Any:
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    order = np.lexsort((-A.indices, rows))
    return sp.csr_array((A.data[order], A.indices[order], A.indptr), A.shape)


def test_a_result_that_cannot_be_written_to(given_csr: Any) -> None:
    A, X, B = given_csr
    coo = A.tocoo()
    O = CooTensor(np.stack(coo.coords), coo.data, coo.shape)
    with pytest.raises(ArgumentError, match="a CooTensor cannot be written in place: leave it out"):
        blocked("sddmm")(S=A, X=X, Y=B, O=O)


def test_bound_arguments(given_csr: Any) -> None:
    A, X, B = given_csr
    kernel = blocked("spmm")
    bound = kernel.bind(A=A)
    for _ in range(2):
        close(bound(B=B), A @ B)
    close(bound(B=2 * B), 2 * (A @ B))
    C = np.zeros((17, 7), "float32")
    assert bound(B=B, C=C) is C
    open_matrix = kernel.bind(B=B)
    for other in (A, _random(12, 18, 23).astype("float32"), _random(13, 3, 23).astype("float32")):
        close(open_matrix(A=other), other @ B)
    O = blocked("sddmm").bind(S=A)(X=X, Y=B)
    assert type(O) is type(A)
    close(O.toarray(), A.toarray() * (X @ B.T))


def test_bound_arguments_updated_in_place(given_csr: Any) -> None:
    A, _, _ = given_csr
    expected = np.exp(A.data)
    own("bsr", SCALE, "A:I,J").bind(A=A)()
    close(A.data, expected)


@pytest.mark.parametrize("kind", ["random", "divisible"])
def test_what_is_wrong_with_a_call(kind: str) -> None:
    A, _, B = operands(MATRICES[kind], "float32", 7)
    kernel, (m, n) = blocked("spmm"), A.shape
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"A": A, "B": B[:-1]}, ArgumentError, rf"n is {n} from A.shape\[1\] but {n - 1} from B.shape\[0\]"),
        ({"A": A, "B": B, "C": np.zeros((m + 1, 7), "float32")}, ArgumentError, rf"m is {m} .*but {m + 1} from C\."),
        ({"A": A.astype("float64"), "B": B}, ArgumentTypeError, "A holds float64 but the kernel computes in float32"),
        ({"A": A, "B": B.astype("float64")}, ArgumentTypeError, "B holds float64 but the kernel computes in float32"),
        ({"A": A}, ArgumentTypeError, "missing argument B"),
        ({"A": A.toarray(), "B": B}, ArgumentTypeError, "A is stored as bsr.*pass a sparse object, found ndarray"),
        ({"a": A.data, "B": B}, ArgumentTypeError, "a is stored as bsr.*pass a sparse object, found ndarray"),
        ({"A": A, "B": B, "Z": 1}, ArgumentTypeError, "this kernel has no argument 'Z'"),
        ({"A": sp.coo_array(np.ones(5, "float32")), "B": B}, ArgumentError, r"A has shape \(5,\) but .*axes I, J"),
    ]
    for given_arguments, error, message in cases:
        with pytest.raises(error, match=message):
            kernel(**given_arguments)
    with pytest.raises(ArgumentTypeError, match="A is fixed by bind; do not pass it again"):
        kernel.bind(A=A)(A=A, B=B)
    with pytest.raises(ArgumentError, match=rf"n is {n} from A.shape\[1\] but 2 from B.shape\[0\]"):
        kernel.bind(A=A)(B=B[:2])


@pytest.mark.parametrize("kind", ["random", "divisible"])
def test_sizes_that_contradict_a_matrix(kind: str) -> None:
    A, _, B = operands(MATRICES[kind], "float32", 7)
    with pytest.raises(ArgumentError, match=f"m is {A.shape[0]} from A.shape.*but {A.shape[0] - 1}"):
        blocked("spmm")(A=A, B=B, m=A.shape[0] - 1)


@pytest.mark.parametrize("kind", ["random", "divisible"])
def test_sizes_given_by_name(kind: str) -> None:
    """As for every kernel: a size that is said twice is fine when both agree."""
    A, _, B = operands(MATRICES[kind], "float32", 7)
    close(blocked("spmm")(A=A, B=B, m=A.shape[0], nnz=A.nnz), A @ B)


def test_messages_use_the_names_of_the_program(given_csr: Any) -> None:
    A, _, B = given_csr
    with pytest.raises(ArgumentTypeError, match=r"missing argument A$"):
        blocked("spmm")(B=B)
    with pytest.raises(ArgumentTypeError, match="it takes the buffers A, B, C"):
        blocked("spmm")(A=A, B=B, Z=1)


def test_broken_index_arrays_are_refused(given_csr: Any) -> None:
    A, _, B = given_csr
    A.indices[3] = 99
    with pytest.raises(StructureError, match=r"hold 99 at position 3, expected one of \[0, 23\)"):
        blocked("spmm")(A=A, B=B)


def test_a_matrix_that_a_format_cannot_hold() -> None:
    A, _, B = operands(MATRICES["full"], "float32", 3)
    for format, message in ((formats.make("nm", n=2, m=4), r"expected at most 2"), (formats.make("band"), "band")):
        kernel = compiled(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": format}))
        with pytest.raises(StructureError, match=message):
            kernel(A=A, B=B)


def test_what_a_kernel_shows(given_csr: Any) -> None:
    A, _, B = given_csr
    kernel = blocked("spmm")
    assert repr(kernel) == "Kernel spmm(A, B) -> C with A as bsr(r=2, c=3)"
    assert kernel.formats["A"].name == "bsr"
    assert "spmm_bsr" in kernel.script()
    assert kernel.convert("A", A).padding > 0
    assert kernel.time(A=A, B=B, seconds=0.01).median > 0


# ---------------------------------------------------------------- drawn formats and matrices

small = st.integers(1, 4)
nested = st.sampled_from(("csr", "coo", "ell", "dcsr", "csc", "bsr"))
DRAWN: dict[str, dict[str, Any]] = {
    "bsr": {"r": small, "c": small},
    "dbsr": {"r": small, "c": small},
    "sell": {"C": small, "sigma": st.integers(1, 9)},
    "padded_csr": {"t": small},
    "sr_bcrs": {"t": small, "g": small},
    "ell_rest": {"width": small, "rest": nested},
    "columns": {"c": small, "each": nested},
    "rows": {"p": small, "each": nested},
    "buckets": {"widths": st.sets(st.integers(1, 6), min_size=1, max_size=2).map(sorted)},
    "hyb": {"c": st.integers(1, 2), "widths": st.sets(st.integers(1, 6), min_size=1, max_size=2).map(sorted)},
    "blocks": {"r": small, "c": small, "density": st.floats(0.1, 1), "rest": nested},
    "dia_rest": {"density": st.floats(0.1, 1), "rest": nested},
    "hdia": {"C": small, "density": st.floats(0.1, 1), "rest": nested},
    "dense_rows": {"density": st.floats(0.1, 1), "rest": nested},
    "dense_columns": {"density": st.floats(0.1, 1), "rest": nested},
}
drawn_formats = st.sampled_from(sorted(DRAWN)).flatmap(
    lambda name: st.fixed_dictionaries(DRAWN[name]).map(lambda chosen: (name, chosen))
)


@st.composite
def matrices(draw_: Any) -> sp.coo_array:
    """Entries in any order, some of them twice, whole numbers: sums are exact."""
    m, n = draw_(st.integers(0, 12)), draw_(st.integers(0, 12))
    at = st.tuples(st.integers(0, max(m - 1, 0)), st.integers(0, max(n - 1, 0)), st.integers(-3, 3))
    found = draw_(st.lists(at, max_size=40 if m * n else 0))
    rows, columns, values = np.array(found, np.int32).reshape(-1, 3).T
    return sp.coo_array((values.astype("float64"), (rows, columns)), (m, n))


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn_formats, st.lists(matrices(), min_size=4, max_size=4), st.sampled_from(("spmm", "sddmm")), small)
def test_drawn_formats(chosen: Any, found: list[Any], op: str, feat: int) -> None:
    name, parameters = chosen
    func = getattr(sparsetir.ops, op)("float64")
    kernel = compiled(sparsetir.decompose_format(func, {OPERANDS[op]: formats.make(name, **parameters)}))
    for A in found:
        X, Y = (np.arange(n * feat, dtype="float64").reshape(n, feat) % 5 for n in A.shape)
        if op == "spmm":
            np.testing.assert_array_equal(kernel(A=A, B=Y), A.toarray() @ Y)
        else:
            O = kernel(S=A, X=X, Y=Y)
            assert np.array_equal(O.coords, A.coords)
            np.testing.assert_array_equal(O.toarray(), A.toarray() * (X @ Y.T))


# ---------------------------------------------------------------- numbers that are not finite

#: formats that multiply what lies between the entries: as in every library of blocks, infinity times zero is NaN
FILLING = {name for name in FORMATS if any(rule.fills for rule in made(name).resolve(2, "int32").rules)}
TESTING = tuple(name for name in FORMATS if name not in FILLING)
SPECIAL = (np.nan, np.inf, -np.inf)
NESTED = {
    "columns of ell": lambda: formats.columns(2, each="ell"),
    "columns of buckets": lambda: formats.columns(3, each=formats.buckets((1, 2))),
    "ell_rest of ell": lambda: formats.ell_rest(2, rest="ell"),
}


def by_entries(A: Any, B: np.ndarray) -> np.ndarray:
    """The product in double precision, of the entries alone."""
    C, rows = np.zeros((A.shape[0], B.shape[1])), np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(C, rows, A.data[:, None].astype("float64") * B[A.indices].astype("float64"))
    return C


def check_specials(kernel: Any, A: Any, dtype: str) -> None:
    """NaN and infinity in the first, the last and an inner row of B reach the rows with entries there, no others."""
    n, rng = A.shape[1], np.random.default_rng(0)
    for number, at in product(SPECIAL, sorted({0, n // 2, n - 1})):
        B = rng.uniform(0.5, 1, (n, 5)).astype(dtype)
        B[at, :3] = number
        np.testing.assert_allclose(kernel(A=A, B=B), by_entries(A, B), rtol=1e-4, atol=1e-4)


def test_which_formats_fill() -> None:
    assert {"ell", "sell", "narrow_sell", "padded_csr", "buckets", "hyb", "ell_rest", "nm"} < set(TESTING)
    assert {"bsr", "dia", "band", "sr_bcrs", "ragged"} < FILLING


@pytest.mark.parametrize("name", TESTING)
def test_padding_spreads_neither_nan_nor_infinity(name: str) -> None:
    dtype, idtype = types_of("spmm", name)
    kernel = ready("spmm", name, dtype, idtype)[1]
    for kind in ("random", "empty_rows", "one_row", "one_each", "explicit_zeros", "unsorted", "one_by_one"):
        check_specials(kernel, typed(MATRICES[kind], dtype), dtype)


@pytest.mark.parametrize("name", NESTED)
def test_padding_within_a_format_spreads_nothing(name: str) -> None:
    kernel = compiled(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": NESTED[name]()}))
    for kind in ("random", "one_row", "empty_rows"):
        check_specials(kernel, typed(MATRICES[kind], "float32"), "float32")


@pytest.mark.parametrize("name", sorted(FILLING))
def test_filled_slots_spread_nothing_to_other_features(name: str) -> None:
    dtype, idtype = types_of("spmm", name)
    kernel = ready("spmm", name, dtype, idtype)[1]
    for kind, number in product(("random", "divisible", "empty_rows"), SPECIAL):
        A, _, B = operands(MATRICES[kind], dtype, 7)
        B[[0, -1], 3] = number
        expected = by_entries(A, B)
        found, special = kernel(A=A, B=B), ~np.isfinite(expected)
        close(np.delete(found, 3, 1), np.delete(expected, 3, 1), dtype)
        assert not np.isfinite(found[special]).any()


@pytest.mark.parametrize("name", FORMATS)
def test_entries_that_are_not_finite(name: str) -> None:
    """A value of an entry reaches its row; an entry that holds zero times infinity is NaN, for it is an entry."""
    dtype, idtype = types_of("spmm", name)
    A, _, B = operands(MATRICES["random"], dtype, 5)
    A.data[::4], A.data[1::5], A.data[2::7] = np.nan, -np.inf, 0
    kernel = ready("spmm", name, dtype, idtype)[1]
    np.testing.assert_allclose(kernel(A=A, B=abs(B)), by_entries(A, abs(B)), rtol=1e-4, atol=1e-4)
    A.data[...] = 0
    B[5] = np.inf
    expected = by_entries(A, B)
    assert np.isnan(expected).any()
    assert np.isnan(kernel(A=A, B=B)[np.isnan(expected)]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_sampled_products_that_are_not_finite(name: str) -> None:
    dtype, idtype = types_of("sddmm", name)
    S, X, Y = operands(MATRICES["random"], dtype, 5)
    X, Y = abs(X), abs(Y)
    X[2], X[4], Y[0], Y[-1] = np.nan, np.inf, -np.inf, np.nan
    rows = np.repeat(np.arange(17), np.diff(S.indptr))
    with np.errstate(invalid="ignore"):
        expected = S.data * np.einsum("pk,pk->p", X[rows], Y[S.indices])
    O = ready("sddmm", name, dtype, idtype)[1](S=S, X=X, Y=Y)
    np.testing.assert_allclose(O.data, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- shapes, indices and results of every kind

THIN = [(1, 1), (1, 9), (9, 1), (1, 60), (40, 1), (2, 33), (33, 2), (0, 5), (5, 0), (0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("name", FORMATS)
def test_thin_matrices(name: str, op: str) -> None:
    """One row, one column, none; full and half full; without features too."""
    dtype, idtype = types_of(op, name)
    kernel = ready(op, name, dtype, idtype)[1]
    for shape, density in product(THIN, (1.1, 0.4)):
        for feat in (7,) if op == "spmv" else (0, 7):
            check_call(kernel, op, _random(11, *shape, density), dtype, feat)


@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("name", FORMATS)
def test_lists_of_entries_in_any_order(name: str, op: str) -> None:
    """Coordinates of any integer type, many of them twice; kernels count in the type of their own."""
    dtype, idtype = types_of(op, name)
    kernel, rng = ready(op, name, dtype, idtype)[1], np.random.default_rng(12)
    for (m, n), given_as in product(((9, 7), (1, 6), (6, 1)), ("int32", "int64", "int16", "uint32", "uint8")):
        coords = np.stack([rng.integers(0, extent, 60) for extent in (m, n)]).astype(given_as)
        tensor = CooTensor(coords, rng.integers(-3, 4, 60).astype(dtype), (m, n))
        X, Y = (rng.integers(-3, 4, (extent, 5)).astype(dtype) for extent in (m, n))
        dense = np.zeros((m, n))
        np.add.at(dense, tuple(coords), tensor.values)
        if op == "sddmm":
            O, found = kernel(S=tensor, X=X, Y=Y), np.zeros((m, n))
            assert np.array_equal(O.coords, coords)
            np.add.at(found, tuple(coords), O.values)
            np.testing.assert_array_equal(found, dense * (X @ Y.T))
        elif op == "spmm":
            np.testing.assert_array_equal(kernel(A=tensor, B=Y), dense @ Y)
        else:
            np.testing.assert_array_equal(kernel(A=tensor, x=Y[:, 0].copy()), dense @ Y[:, 0])


@pytest.mark.parametrize("given_as", ["int32", "int64"])
@pytest.mark.parametrize("name", FORMATS)
def test_index_arrays_of_another_type(name: str, given_as: str) -> None:
    dtype, idtype = types_of("spmm", name)
    A, _, B = operands(MATRICES["random"], dtype, 5)
    C = A @ B
    A.indices, A.indptr = A.indices.astype(given_as), A.indptr.astype(given_as)
    close(ready("spmm", name, dtype, idtype)[1](A=A, B=B), C, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_result_held_does_not_matter(name: str) -> None:
    """Nothing of it is left, in any layout, and nothing is written beside it."""
    dtype, idtype = types_of("spmm", name)
    kernel = ready("spmm", name, dtype, idtype)[1]
    for kind in ("random", "empty_rows", "zero_nnz"):
        A, _, B = operands(MATRICES[kind], dtype, 5)
        m, around = A.shape[0], np.full((2 * A.shape[0], 12), np.nan, dtype)
        results = (around[:m, :5].copy(), around[:m, :5].copy("F"), around[::2, 1:11:2], around[m - 1 :: -1, 6:11])
        for C in results:
            C[...] = np.nan
            assert kernel(A=A, B=B, C=C) is C
            close(C, A.astype("float64") @ B, dtype)
            C[...] = np.nan
        assert np.isnan(around).all()


def test_read_only_arguments(given_csr: Any) -> None:
    A, _, B = given_csr
    for array in (A.data, A.indices, A.indptr, B):
        array.flags.writeable = False
    close(blocked("spmm")(A=A, B=B), A @ B)
    C = np.zeros((17, 7), "float32")
    C.flags.writeable = False
    with pytest.raises(sparsetir.SparseTIRError, match=r"C.*read-only"):
        blocked("spmm")(A=A, B=B, C=C)
    assert not C.any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_bound_matrix_meets_many_operands(name: str) -> None:
    """Of any width and layout; each result is an array of its own."""
    dtype, idtype = types_of("spmm", name)
    A = typed(MATRICES["random"], dtype)
    bound, rng, wide = ready("spmm", name, dtype, idtype)[1].bind(A=A), np.random.default_rng(1), A.astype("float64")
    layouts = (np.ascontiguousarray, np.asfortranarray, lambda B: B[::-1], lambda B: np.repeat(B, 2, 1)[:, ::2])
    results = []
    for feat, layout in product((5, 1, 0, 33, 5), layouts):
        B = layout(rng.uniform(-1, 1, (23, feat)).astype(dtype))
        results.append((bound(B=B), wide @ B))
        C = np.full((17, feat), np.nan, dtype)
        assert bound(B=B, C=C) is C
        results.append((C, wide @ B))
    with pytest.raises(ArgumentError, match=r"n is 23 from A.shape\[1\] but 22 from B.shape\[0\]"):
        bound(B=B[1:])
    for found, expected in results:
        close(found, expected, dtype)


@pytest.mark.parametrize("name", ["bsr", "ell", "hyb", "coo"])
def test_a_bound_matrix_meets_operands_at_once(name: str) -> None:
    dtype, idtype = types_of("spmm", name)
    A = typed(MATRICES["random"], dtype)
    bound, rng = ready("spmm", name, dtype, idtype)[1].bind(A=A), np.random.default_rng(1)
    many = [rng.uniform(-1, 1, (23, 9)).astype(dtype) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        for B, found in zip(many, pool.map(lambda B: bound(B=B), many), strict=True):
            close(found, A.astype("float64") @ B, dtype)


@pytest.mark.parametrize("name", CUBES)
def test_mttkrp_of_thin_tensors(name: str) -> None:
    """Entries twice and in any order, coordinates of any type, a result that held something else."""
    dtype, idtype = TYPES[list(CUBES).index(name) % len(TYPES)]
    func = sparsetir.ops.mttkrp(dtype, idtype=idtype)
    kernel, rng = compiled(sparsetir.decompose_format(func, {"T_": CUBES[name]()})), np.random.default_rng(0)
    for shape, given_as in product(
        ((1, 1, 1), (5, 1, 4), (1, 6, 1), (7, 5, 3), (0, 3, 2), (3, 0, 2), (3, 4, 0)), ("int32", "int64", "uint16")
    ):
        nnz = 40 if 0 not in shape else 0
        coords = np.stack([rng.integers(0, max(n, 1), nnz) for n in shape]).astype(given_as)
        tensor, dense = CooTensor(coords, rng.integers(-3, 4, nnz).astype(dtype), shape), np.zeros(shape)
        np.add.at(dense, tuple(coords), tensor.values)
        bound = kernel.bind(T_=tensor)
        for feat in (1, 0, 9):
            B, C = (rng.integers(-3, 4, (n, feat)).astype(dtype) for n in shape[1:])
            D, expected = np.full((shape[0], feat), np.nan, dtype), np.einsum("ijk,jr,kr->ir", dense, B, C)
            assert bound(B=B, C=C, D=D) is D
            np.testing.assert_array_equal(D, expected)
            np.testing.assert_array_equal(kernel(T_=tensor, B=B, C=C), expected)


plain = st.sampled_from(("csr", "coo", "ell", "dcsr", "csc", "sell", "padded_csr"))
DRAWN_TESTING = {name: DRAWN[name] for name in ("sell", "padded_csr", "ell_rest", "columns", "rows", "buckets", "hyb")}
drawn_testing = st.sampled_from(sorted(DRAWN_TESTING)).flatmap(
    lambda name: st.fixed_dictionaries(
        {key: plain if drawn is nested else drawn for key, drawn in DRAWN_TESTING[name].items()}
    ).map(lambda chosen: (name, chosen))
)
numbers = st.lists(st.sampled_from((-2.0, 0.0, 1.0, *SPECIAL)), min_size=1, max_size=24)


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn_testing, st.lists(st.tuples(matrices(), numbers), min_size=4, max_size=4), small)
def test_drawn_numbers_that_are_not_finite(chosen: Any, found: list[Any], feat: int) -> None:
    name, parameters = chosen
    func = sparsetir.ops.spmm("float64")
    kernel = compiled(sparsetir.decompose_format(func, {"A": formats.make(name, **parameters)}))
    for A, values in found:
        B = np.resize(np.array(values), (A.shape[1], feat))
        np.testing.assert_array_equal(kernel(A=A, B=B), by_entries(A.tocsr(), B))


# ---------------------------------------------------------------- more values than there is memory


def _scattered(n: int, nnz: int) -> sp.csr_array:
    rng = np.random.default_rng(0)
    return sp.coo_array((np.ones(nnz, "float32"), rng.integers(0, n, (2, nnz))), (n, n)).tocsr()


def _full_row(n: int) -> sp.csr_array:
    return sp.csr_array((np.ones(n, "float32"), np.arange(n), np.append(0, np.full(n, n))), (n, n))


def _far_down() -> sp.coo_array:
    return sp.coo_array((np.ones(1, "float32"), (np.array([10**14 - 1]), np.array([0]))), (10**14, 5))


SCATTERED, FULL_ROW, FAR_DOWN = _scattered(1_000_000, 50_000), _full_row(1_000_000), _far_down()
HUGE: list[tuple[str, dict[str, Any], Any]] = [
    ("dia", {}, SCATTERED),
    ("dia_rest", {"density": 1e-9}, SCATTERED),
    ("band", {"lower": 10**6, "upper": 10**6}, SCATTERED),
    ("ell", {}, FULL_ROW),
    ("ell", {"width": 10**6}, SCATTERED),
    ("ell_rest", {"width": 10**6}, SCATTERED),
    ("bsr", {"r": 1 << 12}, SCATTERED),
    ("dbsr", {"r": 1 << 12}, SCATTERED),
    ("blocks", {"r": 1 << 12, "density": 1e-9}, SCATTERED),
    ("sell", {"C": 1 << 20, "sigma": 1}, FULL_ROW),
    ("padded_csr", {"t": 1 << 20}, SCATTERED),
    ("sr_bcrs", {"t": 8, "g": 1 << 20}, SCATTERED),
    ("nm", {"n": 4, "m": 4}, SCATTERED),
    ("ragged", {}, SCATTERED),
    ("dense_rows", {"density": 1e-9}, SCATTERED),
    ("dense_columns", {"density": 1e-9}, SCATTERED),
    ("buckets", {"widths": (1 << 20,)}, SCATTERED),
    ("hyb", {"c": 2, "widths": (1 << 20,)}, SCATTERED),
    ("columns", {"c": 2, "each": "dia"}, SCATTERED),
    ("rows", {"each": "ell"}, FULL_ROW),
    ("csr", {}, FAR_DOWN),
    ("narrow_csr", {}, FAR_DOWN),
    ("csc", {}, FAR_DOWN.T),
    ("bsr", {}, FAR_DOWN),
    ("dia", {}, FAR_DOWN),
]


@pytest.mark.parametrize(("name", "parameters", "A"), HUGE, ids=[f"{name} {given}" for name, given, _ in HUGE])
def test_more_values_than_memory(name: str, parameters: Any, A: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is allocated for them."""
    monkeypatch.setattr(memory, "memory_size", lambda: 1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(MemoryError) as caught:
            SparseTensor.from_any(A, name, **parameters)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value, StructureError)
    assert peak < 1 << 28
    shape, chosen = f"{A.shape[0]} x {A.shape[1]} with {A.nnz} entries", formats.make(name, **parameters)
    found = rf"cannot store {shape} as {re.escape(repr(chosen))}: .+ would take \d+\.\d [GT]iB or more"
    assert re.match(rf"{found}, but there are 1\.0 GiB of memory; take a format that stores less", str(caught.value))


def test_a_call_with_more_values_than_memory() -> None:
    """On this machine, whatever memory it has; the kernel goes on with other matrices."""
    _, kernel = ready("spmm", "ell", *types_of("spmm", "ell"))
    dtype = types_of("spmm", "ell")[0]
    with pytest.raises(StructureError, match=r"ell\(.*1000000000000 values.*take one that stores less"):
        kernel(A=typed(FULL_ROW, dtype), B=np.zeros((1_000_000, 1), dtype))
    check_call(kernel, "spmm", MATRICES["random"], dtype, 7)


def test_values_as_wide_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits as float32 may not fit as float64."""
    A = _scattered(1000, 500)
    stored = SparseTensor.from_any(A, "dia").pieces[0].values.nbytes
    monkeypatch.setattr(memory, "memory_size", lambda: stored)
    assert SparseTensor.from_any(A, "dia").nnz == A.nnz
    with pytest.raises(memory.MemoryLimitError, match=f"{stored // 4} values would take"):
        SparseTensor.from_any(A.astype("float64"), "dia")


def test_what_a_container_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTROL_GROUPS", (limit,))
    sizes = []
    for text in ("max\n", "4096\n", None):
        limit.unlink() if text is None else limit.write_text(text, encoding="ascii")
        sizes.append(memory.memory_size.__wrapped__())
    assert sizes == [sizes[0], 4096, sizes[0]]
    assert sizes[0] > 1 << 20
