# SPDX-License-Identifier: Apache-2.0
"""Relax operators: every one against numpy, with structure known and given at run time, alone and with what follows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from scipy.special import erf
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import sparsetir as T

import sparsetir.relax as srelax
from each import pairwise, share
from sparsetir.codegen.target import native_target
from sparsetir.errors import StructureError
from sparsetir.ir.rewriting import collect
from sparsetir.lower import TO_STAGE_2, TO_STAGE_3, as_module
from sparsetir.lower import run as run_passes
from sparsetir.relax.model import lowered
from sparsetir.relax.operators import constant
from sparsetir.relax.programs import attention
from sparsetir.schedules import Registers, schedule

M, N, F = 37, 29, 20
RTOL = {"bfloat16": 5e-2, "float16": 2e-2, "float32": 2e-4, "float64": 1e-10}


def matrix(dtype: str = "float32", idtype: str = "int32", *, m: int = M, n: int = N, density: float = 0.15) -> Any:
    """A matrix with empty rows."""
    rng = np.random.default_rng(m * n)
    found = sp.random_array((m, n), density=density, format="lil", dtype="float64", rng=rng)
    found[3] = 0
    found[-1] = 0
    out = found.tocsr()
    out.data = np.asarray(out.data.astype(dtype), "float64") if "16" in dtype else out.data.astype(dtype)
    out.indptr, out.indices = out.indptr.astype(idtype), out.indices.astype(idtype)
    return out


def dense(*shape: int, dtype: str = "float32", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def module(make: Callable[..., Any], args: dict[str, Any], fixed: set[str], symbolic: bool) -> Any:
    """A module whose main makes one expression of its parameters; `fixed` ones are constants."""
    builder, known, params = relax.BlockBuilder(), {}, []
    sizes: dict[int, Any] = {}
    static = {1, M} if "indptr" in fixed else {1}
    symbol = lambda n: n if n in static else sizes.setdefault(n, tirx.Var(f"s{n}", "int64"))  # noqa: E731
    for name, value in args.items():
        if name in fixed:
            known[name] = constant(value)
            continue
        shape = [symbol(n) if symbolic else n for n in value.shape]
        if symbolic and name == "indptr" and any(M in v.shape for n, v in args.items() if n not in fixed):
            shape = [symbol(M) + 1]  # which Relax can only take apart if it knows m already
        known[name] = relax.Var(name, relax.TensorType(shape, str(value.dtype)))
        params.append(known[name])
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(make(builder, **known)))
        builder.emit_func_output(out)
    return builder.get()


def run(mod: Any, *args: np.ndarray, **options: Any) -> np.ndarray:
    vm = relax.VirtualMachine(srelax.build(mod, **options), tvm.cpu())
    return vm["main"](*(tvm.runtime.tensor(a) for a in args)).numpy()


#: whether the structure is known, and whether sizes are symbolic
WAYS = [(False, False), (False, True), (True, False), (True, True)]


def check(make: Any, args: dict[str, Any], want: np.ndarray, *, rtol: float = 2e-4, ways: Any = WAYS) -> None:
    """The same result with everything at run time, with symbolic sizes, and with the structure known."""
    structure = {"data", "indptr", "indices", "kinds"} & set(args)
    for is_known, symbolic in ways:
        fixed = structure if is_known else set()
        got = run(module(make, args, fixed, symbolic), *(v for n, v in args.items() if n not in fixed))
        assert got.shape == want.shape
        np.testing.assert_allclose(got.astype("float64"), want, rtol=rtol, atol=rtol * max(1.0, np.abs(want).max()))


def csr(A: Any) -> dict[str, Any]:
    return {"data": A.data, "indptr": A.indptr, "indices": A.indices}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "idtype"), [("float32", "int32"), ("float64", "int64"), ("float16", "int32"), ("bfloat16", "int64")]
)
def test_spmm(dtype: str, idtype: str) -> None:
    A, B = matrix(dtype, idtype), dense(N, F, dtype=dtype)
    make = lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B)  # noqa: E731
    want = A.astype("float64") @ B.astype("float64")
    check(make, {**csr(A), "data": A.data.astype(dtype), "B": B}, want, rtol=RTOL[dtype])


@pytest.mark.slow
def test_spmm_of_a_batch() -> None:
    A, B = matrix(), dense(3, N, F)
    make = lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B)  # noqa: E731
    check(make, {**csr(A), "B": B}, np.stack([A @ x for x in B]))


@pytest.mark.slow
def test_spmv() -> None:
    A, x = matrix(), dense(N)
    check(lambda b, data, indptr, indices, x: srelax.spmv(data, indptr, indices, x), {**csr(A), "x": x}, A @ x)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(N,), (1, N), (5, N), (2, 3, N)])
def test_linear(shape: tuple[int, ...]) -> None:
    A, x = matrix(), dense(*shape)
    want = (A @ x.reshape(-1, N).T).T.reshape(*shape[:-1], M)
    check(lambda b, data, indptr, indices, x: srelax.linear(x, data, indptr, indices), {**csr(A), "x": x}, want)


@pytest.mark.slow
def test_sddmm() -> None:
    A, X, Y = matrix(), dense(M, F), dense(N, F, seed=2)
    make = lambda b, data, indptr, indices, X, Y: srelax.sddmm(data, indptr, indices, X, Y)  # noqa: E731
    rows, cols = A.tocoo().coords
    check(make, {**csr(A), "X": X, "Y": Y}, A.data * np.einsum("ef,ef->e", X[rows], Y[cols]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_softmax(dtype: str) -> None:
    A = matrix(dtype)
    values = A.data.astype("float64")
    parts = [values[s:e] for s, e in zip(A.indptr, A.indptr[1:], strict=False)]
    want = np.concatenate([np.exp(p - p.max()) / np.exp(p - p.max()).sum() for p in parts if p.size])
    args = {"data": A.data.astype(dtype), "indptr": A.indptr}
    check(lambda b, data, indptr: srelax.softmax(data, indptr), args, want, rtol=RTOL[dtype])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("feat", [(), (F,)])
def test_segment_reduce(reduce: str, feat: tuple[int, ...]) -> None:
    A = matrix()
    x = dense(A.nnz, *feat)
    by = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[reduce]
    parts = [x[s:e] for s, e in zip(A.indptr, A.indptr[1:], strict=False)]
    want = np.stack([by(p, axis=0) if len(p) else np.zeros(feat) for p in parts])
    check(lambda b, x, indptr: srelax.segment_reduce(x, indptr, reduce), {"x": x, "indptr": A.indptr}, want)


@pytest.mark.slow
def test_gather_matmul_scatter() -> None:
    A = matrix()
    kinds = np.random.default_rng(0).integers(0, 4, A.nnz).astype("int32")
    X, W = dense(N, 12), dense(4, 12, F, seed=2)
    rows, cols = A.tocoo().coords
    want = np.zeros((M, F))
    np.add.at(want, rows, np.einsum("ec,ecd->ed", X[cols], W[kinds]))
    args = {"X": X, "W": W, "indptr": A.indptr, "indices": A.indices, "kinds": kinds}
    make = lambda b, X, W, indptr, indices, kinds: srelax.gather_matmul_scatter(X, W, indptr, indices, kinds)  # noqa: E731
    check(make, args, want)


def _meeting() -> dict[str, Any]:
    """A structure in which entries of a kind meet, some of them in one row."""
    A = matrix(m=300, n=80, density=0.2)
    kinds = np.random.default_rng(0).choice(5, A.nnz, p=[0.9, 0.07, 0.02, 0.01, 0]).astype("int32")
    return {"indptr": A.indptr, "indices": A.indices, "kinds": kinds}


def _summed(X: np.ndarray, W: np.ndarray, structure: dict[str, np.ndarray]) -> np.ndarray:
    rows = np.repeat(np.arange(300), np.diff(structure["indptr"]))
    want = np.zeros((300, W.shape[2]))
    np.add.at(want, rows, np.einsum("ec,ecd->ed", X[structure["indices"]], W[structure["kinds"]]))
    return want


@pytest.mark.parametrize(("dtype", "out"), [("float32", 48), ("float32", 5), ("float64", 64), ("float16", 32)])
def test_entries_of_one_kind_are_computed_together(dtype: str, out: int) -> None:
    X, W, bias, structure = dense(80, 12, dtype=dtype), dense(5, 12, out, dtype=dtype, seed=2), dense(out), _meeting()

    def make(b: Any, X: Any, W: Any, bias: Any, **structure: Any) -> Any:
        y = b.emit(srelax.gather_matmul_scatter(X, W, *structure.values()))
        wide = y if dtype == "float32" else b.emit(relax.op.astype(y, "float32"))
        return relax.op.nn.relu(b.emit(relax.op.add(wide, bias)))

    mod = module(make, {"X": X, "W": W, "bias": bias, **structure}, set(structure), False)
    want = np.maximum(_summed(X.astype("float64"), W.astype("float64"), structure) + bias, 0)
    rtol = RTOL["float32"] if dtype == "float64" else RTOL[dtype]  # the bias is added in float32
    np.testing.assert_allclose(run(mod, X, W, bias), want, rtol=rtol, atol=rtol * np.abs(want).max())
    (kernel,) = [f for f in lowered(mod, native_target()).functions.values() if isinstance(f, tirx.PrimFunc)]
    assert "group_ptr" in [str(p.name) for p in kernel.params]


def test_entries_of_a_constant_structure_are_checked() -> None:
    make = lambda b, X, W, indptr, indices, kinds: srelax.gather_matmul_scatter(X, W, indptr, indices, kinds)  # noqa: E731
    for name, message in (("kinds", "from 0 to 4"), ("indices", "from 0 to 79"), ("indptr", "rise from 0")):
        structure = _meeting()
        structure[name] = structure[name] + 77
        mod = module(make, {"X": dense(80, 12), "W": dense(5, 12, 8), **structure}, set(structure), False)
        with pytest.raises(ValueError, match=rf"gather_matmul_scatter: {name} must .*{message}"):
            srelax.build(mod)


OTHER_DTYPES = [(16, "float64"), (16, "float16"), (32, "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize(("block", "dtype"), [*((n, "float32") for n in (1, 4, 16, 64)), *OTHER_DTYPES])
def test_attention(block: int, dtype: str) -> None:
    blocks, heads, feat = 6, 2, 24
    mask = sp.random_array((blocks, blocks), density=0.5, format="lil", rng=np.random.default_rng(block))
    mask.setdiag(1)
    mask[2] = 0  # positions that see nothing
    mask = mask.tocsr()
    Q, K, V = (dense(heads, blocks * block, feat, seed=s).astype(dtype) for s in range(3))
    want = _attended(*(x.astype("float64") for x in (Q, K, V)), mask, block)
    args = {"Q": Q, "K": K, "V": V, "indptr": mask.indptr.astype("int32"), "indices": mask.indices.astype("int32")}
    make = lambda b, Q, K, V, indptr, indices: srelax.attention(Q, K, V, indptr, indices)  # noqa: E731
    for fixed in (set(), {"indptr", "indices"}):
        got = run(module(make, args, fixed, False), *(v for n, v in args.items() if n not in fixed))
        np.testing.assert_allclose(got.astype("float64"), want, rtol=RTOL[dtype], atol=RTOL[dtype])


def test_products_of_attention_are_register_tiles_of_a_parallel_loop() -> None:
    shape = {"heads": 2, "blocks": 6, "block": 64, "nnz": 20, "feat": 64, "out": 64}
    second = run_passes(TO_STAGE_2, as_module(attention(shape, "float32", "int32", 0.125).func))
    third = run_passes(TO_STAGE_3, schedule(second, registers=Registers(32, 512)).mod)
    (func,) = third.functions.values()
    tiles = [a.buffer for a in collect(func.body, tirx.AllocBuffer) if str(a.buffer.name).startswith("acc_")]
    assert [int(b.ty.shape[0]) for b in tiles] == [32] * 8 * 2  # eight rows of two vectors, in each product
    assert sum(loop.kind == tirx.ForKind.PARALLEL for loop in collect(func.body, tirx.For)) == 1


def _attended(Q: np.ndarray, K: np.ndarray, V: np.ndarray, mask: Any, block: int) -> np.ndarray:
    seen = np.kron(mask.toarray() != 0, np.ones((block, block))) > 0
    scores = np.where(seen, np.einsum("hif,hjf->hij", Q, K) / np.sqrt(Q.shape[2]), -1e9)
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("hij,hjd->hid", weights / np.maximum(weights.sum(-1, keepdims=True), 1), V)


# ------------------------------------------------------------------ epilogues

STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (relax.op.nn.relu, lambda x: np.maximum(x, 0)),
    "gelu": (relax.op.nn.gelu, lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2)))),
    "gelu_tanh": (
        relax.op.nn.gelu_tanh,
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    "silu": (relax.op.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "sigmoid": (relax.op.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (relax.op.tanh, np.tanh),
    "negative": (relax.op.negative, np.negative),
    "abs": (relax.op.abs, np.abs),
    "square": (relax.op.square, np.square),
    "leakyrelu": (lambda x: relax.op.nn.leakyrelu(x, 0.1), lambda x: np.where(x > 0, x, 0.1 * x)),
    "scale": (lambda x: relax.op.multiply(x, relax.const(0.5, "float32")), lambda x: 0.5 * x),
    "reverse": (lambda x: relax.op.subtract(relax.const(1.0, "float32"), x), lambda x: 1 - x),
    "cast": (lambda x: relax.op.astype(x, "float16"), lambda x: x),
}


def kernels(mod: Any) -> list[str]:
    """The functions that compute something in a lowered module."""
    found = lowered(mod, native_target())
    names = [str(var.name_hint) for var, f in found.functions.items() if isinstance(f, tirx.PrimFunc)]
    return [name for name in names if not name.startswith(("reshape", "check"))]


@pytest.mark.parametrize(("name", "operator", "way"), share(pairwise(sorted(STEPS), ["spmm", "linear"], WAYS), 3))
def test_what_follows_is_done_in_the_same_kernel(name: str, operator: str, way: tuple[bool, bool]) -> None:
    step, by_numpy = STEPS[name]
    A, bias = matrix(), dense(F if operator == "spmm" else M, seed=3)
    B = dense(N, F) if operator == "spmm" else dense(2, 3, N)

    def make(b: Any, data: Any, indptr: Any, indices: Any, B: Any, bias: Any) -> Any:
        matrix = (data, indptr, indices)
        y = b.emit(srelax.spmm(*matrix, B) if operator == "spmm" else srelax.linear(B, *matrix))
        return step(b.emit(relax.op.add(y, bias)))

    plain = A @ B if operator == "spmm" else (A @ B.reshape(-1, N).T).T.reshape(2, 3, M)
    args = {**csr(A), "B": B, "bias": bias}
    check(make, args, by_numpy((plain + bias).astype("float64")), rtol=2e-3 if name == "cast" else 2e-4, ways=[way])
    is_known, symbolic = way
    if is_known != symbolic:
        assert len(kernels(module(make, args, {"data", "indptr", "indices"} if is_known else set(), symbolic))) == 1


@pytest.mark.slow
def test_gelu_in_float64_is_exact() -> None:
    A, B = matrix("float64"), dense(N, F, dtype="float64")
    make = lambda b, data, indptr, indices, B: relax.op.nn.gelu(b.emit(srelax.spmm(data, indptr, indices, B)))  # noqa: E731
    plain = A @ B
    check(make, {**csr(A), "B": B}, 0.5 * plain * (1 + erf(plain / np.sqrt(2))), rtol=1e-12)


@pytest.mark.slow
def test_residuals_and_columns_join_too() -> None:
    A, B, other, scale = matrix(), dense(N, F), dense(M, F, seed=4), dense(M, 1, seed=5)

    def make(b: Any, data: Any, indptr: Any, indices: Any, B: Any, other: Any, scale: Any) -> Any:
        y = b.emit(relax.op.multiply(scale, b.emit(srelax.spmm(data, indptr, indices, B))))
        return relax.op.nn.relu(b.emit(relax.op.add(other, y)))

    args = {**csr(A), "B": B, "other": other, "scale": scale}
    check(make, args, np.maximum(scale * (A @ B) + other, 0))
    assert len(kernels(module(make, args, set(), True))) == 1


@pytest.mark.slow
def test_a_result_with_two_uses_stays_whole() -> None:
    A, B = matrix(), dense(N, F)

    def make(b: Any, data: Any, indptr: Any, indices: Any, B: Any) -> Any:
        y = b.emit(srelax.spmm(data, indptr, indices, B))
        return relax.op.add(b.emit(relax.op.nn.relu(y)), y)

    want = A @ B
    check(make, {**csr(A), "B": B}, want + np.maximum(want, 0))


@pytest.mark.slow
def test_steps_that_widen_the_result_are_left_to_relax() -> None:
    A, B, wide = matrix(), dense(N, F), dense(2, M, F, seed=4)

    def make(b: Any, data: Any, indptr: Any, indices: Any, B: Any, wide: Any) -> Any:
        return relax.op.add(b.emit(srelax.spmm(data, indptr, indices, B)), wide)

    check(make, {**csr(A), "B": B, "wide": wide}, A @ B + wide)


# ------------------------------------------------------------------ scripts and errors


def test_calls_print_and_parse_back() -> None:
    @I.ir_module
    class Model:
        @R.function
        def main(
            data: R.Tensor(("nnz",), "float32"),
            indptr: R.Tensor(("p",), "int32"),
            indices: R.Tensor(("nnz",), "int32"),
            x: R.Tensor(("n", "f"), "float32"),
        ):
            with R.dataflow():
                y = R.sparse.spmm(data, indptr, indices, x)
                z = R.sparse.segment_max(y, indptr)
                R.output(z)
            return z

    text = Model.script()
    assert "R.sparse.spmm(data, indptr, indices, x)" in text
    tvm.ir.assert_structural_equal(tvm.script.from_source(text), Model)


def shaped(*shapes: Any) -> list[Any]:
    return [relax.Var(f"v{n}", relax.TensorType(shape, dtype)) for n, (shape, dtype) in enumerate(shapes)]


@pytest.mark.parametrize(
    ("call", "shapes", "message"),
    [
        (
            srelax.spmm,
            [([5], "int32"), ([4], "int32"), ([5], "int32"), ([3, 2], "float32")],
            "spmm takes data of float",
        ),
        (
            srelax.spmm,
            [([5], "float32"), ([4], "float32"), ([5], "int32"), ([3, 2], "float32")],
            "spmm takes indptr of",
        ),
        (
            srelax.spmm,
            [([5], "float32"), ([4], "int32"), ([6], "int32"), ([3, 2], "float32")],
            "data.shape.0. is 5 but",
        ),
        (srelax.spmm, [([5], "float32"), ([4], "int32"), ([5], "int32"), ([3], "float32")], "B with 2 or 3 dimensions"),
        (srelax.spmm, [([5], "float32"), ([4], "int32"), ([5], "int64"), ([3, 2], "float32")], "of one dtype"),
        (srelax.spmv, [([5], "float32"), ([4], "int32"), ([5], "int32"), ([3], "float64")], "data and x of one dtype"),
        (srelax.softmax, [([5], "float32"), ([0], "int32")], "one element more than there are rows"),
        (
            srelax.sddmm,
            [([5], "float32"), ([4], "int32"), ([5], "int32"), ([3, 2], "float32"), ([4, 3], "float32")],
            "X.shape.1. is 2 but Y.shape.1. is 3",
        ),
    ],
)
def test_wrong_types_name_the_operator_and_the_argument(call: Any, shapes: Any, message: str) -> None:
    builder, params = relax.BlockBuilder(), shaped(*shapes)
    with pytest.raises(Exception, match=message), builder.function("main", params):
        builder.emit_func_output(builder.emit(call(*params)))


def test_a_wrong_constant_structure_is_refused() -> None:
    A, B = matrix(), dense(N, F)
    make = lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B)  # noqa: E731
    for name, value in (("indices", A.indices + 7), ("indptr", A.indptr[::-1].copy())):
        mod = module(make, {**csr(A), name: value, "B": B}, {"data", "indptr", "indices"}, False)
        with pytest.raises(ValueError, match=rf"R.sparse.spmm: {name} must"):
            srelax.build(mod)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spmm", "linear", "spmv"])
def test_a_known_matrix_is_stored_as_suits_it(name: str) -> None:
    A = sp.csr_array(np.kron(matrix(m=40, n=30).toarray(), np.ones((4, 4), "float32")))
    x = {"spmm": dense(120, F), "linear": dense(F, 120), "spmv": dense(120)}[name]
    want = x @ A.T if name == "linear" else A @ x

    def make(b: Any, data: Any, indptr: Any, indices: Any, x: Any) -> Any:
        call = {"spmm": srelax.spmm, "spmv": srelax.spmv}.get(name)
        y = srelax.linear(x, data, indptr, indices) if call is None else call(data, indptr, indices, x)
        return relax.op.nn.relu(b.emit(y))

    args = {"data": A.data, "indptr": A.indptr.astype("int32"), "indices": A.indices.astype("int32"), "x": x}
    check(make, args, np.maximum(want, 0))
    found = lowered(module(make, args, {"data", "indptr", "indices"}, False), native_target())
    text = next(str(f.script()) for v, f in found.functions.items() if v.name_hint.startswith(name))
    assert "_bsr" in text


def test_infinities_stay_where_they_belong() -> None:
    """A known matrix goes to a format that stores zeros only where its operands are promised to be finite."""
    A = sp.csr_array(np.kron(matrix(m=40, n=30).toarray(), np.ones((4, 4), "float32")))
    A.data[::9] = 0
    A.eliminate_zeros()
    B = dense(120, F)
    B[5], B[6, 0] = np.inf, np.nan
    make = lambda b, data, indptr, indices, x: srelax.spmm(data, indptr, indices, x)  # noqa: E731
    args = {"data": A.data, "indptr": A.indptr.astype("int32"), "indices": A.indices.astype("int32"), "x": B}
    mod = module(make, args, {"data", "indptr", "indices"}, False)
    vm = relax.VirtualMachine(srelax.build(mod), tvm.cpu())
    np.testing.assert_array_equal(np.isnan(vm["main"](tvm.runtime.tensor(B)).numpy()), np.isnan(A @ B))
    for finite in (False, True):
        found = lowered(mod, native_target(), assume_finite=finite)
        text = next(str(f.script()) for v, f in found.functions.items() if v.name_hint.startswith("spmm"))
        assert ("_bsr" in text) is finite


@pytest.mark.parametrize(("rows", "columns", "feat"), [(2, 3, 0), (1, 0, 0), (0, 3, 4), (2, 3, 4)])
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_without_elements_and_in_the_other_byte_order(rows: int, columns: int, feat: int, order: str) -> None:
    make = lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B)  # noqa: E731
    A = sp.csr_array(np.ones((rows, columns), "float32"))
    args = {**csr(A), "B": np.ones((columns, feat), "float32")}
    model = srelax.compile_model(module(make, {**csr(matrix()), "B": dense(N, F)}, set(), True))
    found = model(*(array.astype(array.dtype.newbyteorder(order)) for array in args.values()))
    np.testing.assert_array_equal(found, A @ args["B"])


def bad_structures(A: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    far, negative, falling, short = A.indices.copy(), A.indices.copy(), A.indptr.copy(), A.indptr.copy()
    far[7], negative[-1], falling[5], short[-1] = 10**8, -1, A.nnz, A.nnz - 1
    return {
        "indices must": (A.indptr, far),
        "indices must be": (A.indptr, negative),
        "indptr must rise": (falling, A.indices),
        "indptr must rise from 0": (short, A.indices),
    }


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_wrong_structure_at_run_time_raises(symbolic: bool) -> None:
    A, B = matrix(), dense(N, F)
    make = lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B)  # noqa: E731
    vm = relax.VirtualMachine(srelax.build(module(make, {**csr(A), "B": B}, set(), symbolic)), tvm.cpu())
    for message, (indptr, indices) in bad_structures(A).items():
        with pytest.raises(StructureError, match=f"R.sparse.spmm: {message}"):
            vm["main"](*(tvm.runtime.tensor(a) for a in (A.data, indptr, indices, B)))


@pytest.mark.parametrize("known", ["sddmm", "softmax", "segment_sum", "gather_matmul_scatter", "attention", "batch"])
def test_every_operator_refuses_wrong_constants(known: str) -> None:
    A = matrix(m=N)
    far = A.indices.copy()
    far[7] = 10**8
    given = {"data": A.data, "indptr": A.indptr, "indices": far}
    if known in ("softmax", "segment_sum"):
        given = {"data": A.data, "indptr": np.append(A.indptr[:-1], A.nnz - 1).astype("int32")}
    kinds = np.zeros(A.nnz, "int32")
    calls = {
        "sddmm": lambda data, indptr, indices: srelax.sddmm(data, indptr, indices, dense(N, F), dense(N, F)),
        "softmax": srelax.softmax,
        "segment_sum": srelax.segment_reduce,
        "gather_matmul_scatter": lambda data, indptr, indices: srelax.gather_matmul_scatter(
            constant(dense(N, 3)), constant(dense(1, 3, 5)), indptr, indices, constant(kinds)
        ),
        "attention": lambda data, indptr, indices: srelax.attention(
            *(constant(dense(1, N, 4)) for _ in range(3)), indptr, indices
        ),
        "batch": lambda data, indptr, indices: srelax.spmm(data, indptr, indices, dense(2, N, F)),
    }
    make = lambda b, x, **parts: relax.op.add(b.emit(calls[known](**parts)), x)  # noqa: E731
    if known in ("softmax", "segment_sum"):
        make = lambda b, x, data, indptr: relax.op.add(b.emit(calls[known](data, indptr)), x)  # noqa: E731
    for fixed in (set(given), set(given) - {"data"}):
        mod = module(make, {"x": dense(1), **given}, fixed, False)
        with pytest.raises(ValueError, match=rf"R.sparse.(spmm|{known}): (indices|indptr) must"):
            srelax.build(mod)


def test_constants_for_any_number_of_columns_are_checked_in_each_call() -> None:
    A = matrix()
    make = lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B)  # noqa: E731
    mod = module(make, {**csr(A), "B": dense(N, F)}, {"data", "indptr", "indices"}, True)
    vm = relax.VirtualMachine(srelax.build(mod), tvm.cpu())
    with pytest.raises(StructureError, match="indices must be from 0 to one less than the number of columns"):
        vm["main"](tvm.runtime.tensor(dense(3, F)))


@pytest.mark.slow
def test_entries_that_repeat_add_up() -> None:
    A = sp.csr_array(np.kron(np.eye(12, dtype="float32"), np.ones((4, 4), "float32")))
    doubled = {"data": np.repeat(A.data, 2), "indptr": 2 * A.indptr, "indices": np.repeat(A.indices, 2)}
    parts = {name: value.astype("float32" if name == "data" else "int32") for name, value in doubled.items()}
    make = lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B)  # noqa: E731
    B = dense(48, F)
    check(make, {**parts, "B": B}, 2 * (A @ B))


def test_row_pointers_of_nothing_are_refused() -> None:
    make = lambda b, x, indptr: srelax.segment_reduce(x, indptr)  # noqa: E731
    mod = module(make, {"x": dense(3), "indptr": np.zeros(5, "int32")}, set(), True)
    vm = relax.VirtualMachine(srelax.build(mod), tvm.cpu())
    with pytest.raises(StructureError, match="segment_sum: indptr must have one element more than there are rows"):
        vm["main"](tvm.runtime.tensor(dense(3)), tvm.runtime.tensor(np.zeros(0, "int32")))


def test_other_operators_look_at_their_structures_too() -> None:
    A = matrix()
    kinds = np.full(A.nnz, 4, "int32")
    args = {"X": dense(N, 3), "W": dense(4, 3, 5), "indptr": A.indptr, "indices": A.indices, "kinds": kinds}
    make = lambda b, X, W, indptr, indices, kinds: srelax.gather_matmul_scatter(X, W, indptr, indices, kinds)  # noqa: E731
    with pytest.raises(StructureError, match="gather_matmul_scatter: kinds must be from 0 to one less than"):
        run(module(make, args, set(), False), *args.values())
    segments = {"x": dense(A.nnz - 1), "indptr": A.indptr}
    with pytest.raises(StructureError, match="segment_sum: indptr must rise from 0 to the number of entries"):
        run(module(lambda b, x, indptr: srelax.segment_reduce(x, indptr), segments, set(), True), *segments.values())


def test_a_structure_is_looked_over_once() -> None:
    A, B = matrix(m=N), dense(N, F)

    def make(b: Any, data: Any, indptr: Any, indices: Any, B: Any) -> Any:
        return srelax.spmm(data, indptr, indices, b.emit(srelax.spmm(data, indptr, indices, B)))

    mod = module(make, {**csr(A), "B": B}, set(), False)
    assert str(lowered(mod, native_target()).script()).count("R.call_tir(cls.check_spmm") == 1
    assert "check_spmm" not in str(lowered(mod, native_target(), checked=False).script())


def test_sizes_of_one_name_are_checked_each() -> None:
    A = matrix(m=N)
    length, nnz = (tirx.Var(name, "int64") for name in ("p", "nnz"))
    n, other = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    shapes = {"data": [nnz], "indptr": [length], "indices": [nnz], "B": [n, 2], "C": [other, 2]}
    dtypes = {"indptr": "int32", "indices": "int32"}
    params = [relax.Var(name, relax.TensorType(shape, dtypes.get(name, "float32"))) for name, shape in shapes.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        *csr_arrays, B, C = params
        results = [builder.emit(srelax.spmm(*csr_arrays, X)) for X in (B, C)]
        builder.emit_func_output(relax.Tuple(results))
    vm = relax.VirtualMachine(srelax.build(builder.get()), tvm.cpu())
    given = [tvm.runtime.tensor(array) for array in csr(A).values()]
    with pytest.raises(StructureError, match="indices must be from 0 to one less than the number of columns"):
        vm["main"](*given, tvm.runtime.tensor(dense(N, 2)), tvm.runtime.tensor(dense(3, 2)))


@pytest.mark.slow
def test_programs_of_the_user_join() -> None:
    @T.prim_func
    def twice(
        indptr: T.handle,
        indices: T.handle,
        a: T.handle,
        b: T.handle,
        m: T.int64,
        n: T.int64,
        nnz: T.int64,
        feat: T.int64,
        c: T.handle,
    ):
        I_ = T.dense_fixed(m)
        J = T.sparse_variable(I_, (n, nnz), (indptr, indices))
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I_, J), "float32")
        B = T.match_sparse_buffer(b, (J_dense, K), "float32")
        C = T.match_sparse_buffer(c, (I_, K), "float32")
        with T.sp_iter([I_, J, K], "SRS", "twice") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + T.float32(2) * A[i, j] * B[j, k]

    def make(b: Any, data: Any, indptr: Any, indices: Any, B: Any) -> Any:
        var = b.add_func(twice, "twice")
        m, (n, feat), (nnz,) = indptr.ty.shape[0] - 1, B.ty.shape, data.ty.shape
        out = relax.TensorType([m, feat], "float32")
        y = b.emit(relax.call_tir(var, [indptr, indices, data, B, m, n, nnz, feat], out))
        return srelax.spmm(data, indptr, indices, b.emit(relax.op.nn.relu(y)))

    A = matrix(m=N)
    B = dense(N, F)
    want = A @ np.maximum(2 * (A @ B), 0)
    args = {**csr(A), "B": B}
    for symbolic in (False, True):
        got = run(module(make, args, set(), symbolic), *args.values())
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_sizes_may_change_from_call_to_call() -> None:
    mod = module(
        lambda b, data, indptr, indices, B: srelax.spmm(data, indptr, indices, B),
        {**csr(matrix()), "B": dense(N, F)},
        set(),
        True,
    )
    vm = relax.VirtualMachine(srelax.build(mod), tvm.cpu())
    for m, n, f in ((5, 7, 3), (40, 11, 64), (1, 1, 1)):
        A, B = sp.random_array((m, n), density=0.4, format="csr", dtype="float32"), dense(n, f)
        args = (A.data, A.indptr.astype("int32"), A.indices.astype("int32"), B)
        got = vm["main"](*(tvm.runtime.tensor(a) for a in args)).numpy()
        np.testing.assert_allclose(got, A @ B, rtol=1e-4, atol=1e-5)


def test_models_are_called_from_threads(tmp_path: Path) -> None:
    """Each thread has a machine of its own, also of a model from a file."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((20, 30), "float32"))
    with builder.function("main", [x]):
        total = builder.emit(relax.op.matmul(x, relax.const(np.ones((30, 8), "float32"))))
        builder.emit_func_output(builder.emit(relax.op.add(total, relax.const(1.0, "float32"))))
    model = srelax.compile_model(builder.get())
    X = np.ones((20, 30), "float32")
    for called in (model, srelax.load(model.save(tmp_path / "model.so"))):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda n, called=called: called(X * n), range(200)))
        assert all((array == 30 * n + 1).all() for n, array in enumerate(found))
