# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of every operator, in Relax and in torch: each is refused, in terms of the operator's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import relax

import sparsetir.relax as srelax
import torch
from sparsetir.errors import ArgumentError, SparseTIRError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.relax.operators import OPERATORS
from sparsetir.relax.operators import call as relax_call
from sparsetir.relax.torch_import.operators import TORCH_OPERATORS

OPS = srelax.register_torch_ops()
M, N, NNZ = 3, 4, 5
INDPTR, INDICES = np.array([0, 2, 2, 5], "int32"), np.array([0, 3, 0, 1, 2], "int32")
BLOCKS = {"indptr": np.array([0, 1, 3], "int32"), "indices": np.array([0, 0, 1], "int32")}
CSR = {"data": np.ones(NNZ, "float32"), "indptr": INDPTR, "indices": INDICES}


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, "float32")


HEADS = {name: ones(2, 8, 6) for name in "QKVG"}
SUMS = {name: ones(2, 8) for name in ("lse", "delta")}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "spmm": {**CSR, "B": ones(N, 2)},
    "spmm_bf16x3": {**CSR, "B": ones(N, 2)},
    "spmm_int32": {**CSR, "data": np.ones(NNZ, "int8"), "B": np.ones((N, 2), "uint8")},
    "spmv": {**CSR, "x": ones(N)},
    "linear": {"x": ones(2, N), **CSR},
    "sddmm": {**CSR, "X": ones(M, 2), "Y": ones(N, 2)},
    "softmax": {"data": ones(NNZ), "indptr": INDPTR},
    "gather_matmul_scatter": {
        "X": ones(N, 2), "W": ones(2, 2, 3), "indptr": INDPTR, "indices": INDICES, "kinds": np.zeros(NNZ, "int32"),
    },
    "attention": {**{n: HEADS[n] for n in "QKV"}, **BLOCKS, "scale": 0.5},
    "transpose": {"indptr": INDPTR, "indices": INDICES, "n": N},
    "segment_expand": {"x": ones(M, 2), "indptr": INDPTR, "nnz": NNZ},
    "gather_outer": {"X": ones(M, 2), "Y": ones(N, 2), "indptr": INDPTR, "left": INDICES % M, "right": INDICES},
    "dropout": {"x": ones(NNZ), "count": np.array(0, "int64"), "rate": 0.5, "seed": 1},
    "attention_lse": {**{n: HEADS[n] for n in "QK"}, **BLOCKS, "scale": 0.5},
    **{f"segment_{kind}": {"x": ones(NNZ, 2), "indptr": INDPTR} for kind in ("sum", "mean", "max", "min")},
    **{f"attention_backward_{name}": {**HEADS, **SUMS, **BLOCKS, "scale": 0.5} for name in ("query", "key", "value")},
}  # fmt: skip
INTEGERS = ("indptr", "indices", "kinds", "left", "right", "count")
# Dimensions of any length, if the indices are below it.
SEGMENTS = [f"segment_{kind}" for kind in ("sum", "mean", "max", "min")]
ROWS = (
    "spmm",
    "spmm_bf16x3",
    "spmm_int32",
    "spmv",
    "linear",
    "softmax",
    "transpose",
    "gather_matmul_scatter",
    "gather_outer",
    *SEGMENTS,
)
FREE = {
    "spmm": {("B", 0), ("B", 1)}, "spmm_bf16x3": {("B", 0), ("B", 1)}, "spmm_int32": {("B", 0), ("B", 1)},
    "spmv": {("x", 0)}, "linear": {("x", 0), ("x", 1)}, "sddmm": {("Y", 0)},
    "gather_matmul_scatter": {("X", 0), ("W", 0), ("W", 2)}, "attention": {("V", 2)},
    "gather_outer": {("X", 0), ("X", 1), ("Y", 0), ("Y", 1)}, "dropout": {("x", 0)}, "segment_expand": {("x", 1)},
    **{name: {("x", 1)} for name in SEGMENTS},
}  # fmt: skip
RANKS = {
    "spmm": {"B": (2, 3)}, "spmm_int32": {"B": (2, 3)},
    "linear": {"x": (1, 2, 3, 4, 5, 6)}, "dropout": {"x": (1, 2, 3, 4, 5, 6)},
    **{f"segment_{kind}": {"x": (1, 2)} for kind in ("sum", "mean", "max", "min", "expand")},
}  # fmt: skip


def wrong(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bad arguments of an operator, each with what is bad."""
    arguments = ARGUMENTS[name]
    for argument, value in arguments.items():
        if not isinstance(value, np.ndarray):
            continue
        ranks = RANKS.get(name, {}).get(argument, (value.ndim,))
        for rank in range(8):
            if rank not in ranks and value.size:
                yield f"{argument} of rank {rank}", {argument: np.ones((1,) * rank, value.dtype)}
        dtypes = ("float32", "int8", "bool") if argument in INTEGERS else ("int32", "complex64", "bool")
        yield from ((f"{argument} of {d}", {argument: value.astype(d)}) for d in dtypes)
        partners = [a for a, v in arguments.items() if a != argument and isinstance(v, np.ndarray)]
        if any((a in INTEGERS) == (argument in INTEGERS) for a in partners):
            yield f"{argument} of another dtype", {argument: value.astype(f"{value.dtype.kind}8")}
        for at in range(value.ndim):
            is_free = (argument, at) in FREE.get(name, set()) or (argument == "indptr" and name in ROWS)
            if not is_free:
                longer = np.concatenate([value, value.take([-1], axis=at)], axis=at)
                yield f"{argument} longer in dimension {at}", {argument: longer}
    if "indptr" in arguments:
        yield "indptr of none", {"indptr": np.zeros(0, "int32")}
        falling = np.sort(arguments["indptr"])[::-1].copy()
        yield "falling indptr", {"indptr": falling}
    yield from (
        (f"{a} outside", {a: arguments[a] + 9}) for a in ("indices", "kinds", "left", "right") if a in arguments
    )


def bad_cases(names: Any, more: Any = None) -> list[Any]:
    cases = [(name, what, bad) for name in names for what, bad in wrong(name)]
    return [pytest.param(name, bad, id=f"{name}: {what}") for name, what, bad in cases + (more or [])]


def no_tensors() -> list[tuple[str, str, dict[str, Any]]]:
    values = (None, "x", object(), {})
    return [(n, f"{a} {v!r:.12}", {a: v}) for n, given in ARGUMENTS.items() for a in given for v in values]


def built(name: str, arguments: dict[str, Any]) -> Any:
    """Compile a call of an operator with constants, beside an input that is returned as it is."""
    builder, x = relax.BlockBuilder(), relax.Var("input", relax.TensorType([1], "float32"))
    with builder.function("main", [x]):
        result = builder.emit(relax_call(name, *arguments.values()))
        builder.emit_func_output(relax.Tuple([x, result]))
    return srelax.build(builder.get())


def test_every_operator_is_in_the_table() -> None:
    assert set(ARGUMENTS) == set(OPERATORS)
    assert {name.replace("segment_reduce", "segment_sum") for name in TORCH_OPERATORS} <= set(ARGUMENTS)


@pytest.mark.shared(3)
@pytest.mark.parametrize(("name", "bad"), bad_cases(ARGUMENTS, no_tensors()))
def test_relax_refuses(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(SparseTIRError, match=f"R.sparse.{name}"):
        built(name, ARGUMENTS[name] | bad)


def torch_arguments(name: str, arguments: dict[str, Any]) -> list[Any]:
    return [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in arguments.values()]


@pytest.mark.parametrize("name", TORCH_OPERATORS)
def test_torch_takes_the_arguments_of_the_table(name: str) -> None:
    assert getattr(OPS, name)(*torch_arguments(name, ARGUMENTS[name.replace("reduce", "sum")])).numel()


@pytest.mark.shared(3)
@pytest.mark.parametrize(
    ("name", "bad"), bad_cases([n.replace("segment_reduce", "segment_sum") for n in TORCH_OPERATORS])
)
def test_torch_refuses(name: str, bad: dict[str, Any]) -> None:
    if name == "linear" and bad.get("x", ones(1)).ndim == 7:
        pytest.skip("torch has x of any rank")
    operator = getattr(OPS, name.replace("segment_sum", "segment_reduce"))
    with pytest.raises(SparseTIRError):
        operator(*torch_arguments(name, ARGUMENTS[name] | bad))


def test_torch_refuses_other_layouts_and_reductions() -> None:
    given = torch_arguments("spmm", ARGUMENTS["spmm"])
    with pytest.raises(SparseTIRError, match="spmm: B: expected a dense tensor"):
        OPS.spmm(*given[:3], given[3].to_sparse())
    with pytest.raises(SparseTIRError, match="segment_reduce: reduce: expected one of sum, mean, max, min, got 'prod'"):
        OPS.segment_reduce(*torch_arguments("segment_sum", ARGUMENTS["segment_sum"]), "prod")


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_constants_of_a_matrix_are_those_of_its_csr(idtype: str) -> None:
    coords, values = (np.array([2, 0, 2, 0]), np.array([1, 3, 1, 0])), np.array([1, 2, 3, 0], "float64")
    coo = sp.coo_array((values, coords), shape=(4, 5))
    want = coo.tocsr()
    want.sum_duplicates()
    whole = torch.sparse_coo_tensor(np.stack(coords), torch.from_numpy(values), (4, 5), check_invariants=True)
    for matrix in (coo, coo.tocsr(), coo.tocsc(), coo.tolil(), SparseTensor.from_any(coo), whole):
        got = [constant.value.numpy() for constant in srelax.csr_constants(matrix, dtype="float32", idtype=idtype)]
        for array, expected in zip(got, (want.data, want.indptr, want.indices), strict=True):
            np.testing.assert_array_equal(array, expected)
        assert [str(array.dtype) for array in got] == ["float32", idtype, idtype]
    data, _, columns = (constant.value.numpy() for constant in srelax.csr_constants(want.toarray()))
    assert (data.tolist(), columns.tolist()) == ([2, 4], [3, 1])


def test_scale_of_attention_is_that_of_arrays_and_expressions() -> None:
    blocks = [BLOCKS["indptr"], BLOCKS["indices"]]
    by_arrays = srelax.attention(*(HEADS[n] for n in "QKV"), *blocks)
    Q = relax.Var("Q", relax.TensorType(HEADS["Q"].shape, "float32"))
    by_names = srelax.attention(Q, HEADS["K"], HEADS["V"], *blocks)
    assert float(by_arrays.args[-1]) == float(by_names.args[-1]) == pytest.approx(6**-0.5)
    unknown = relax.Var("Q", relax.TensorType(ndim=3, dtype="float32"))
    with pytest.raises(ArgumentError, match="scale: expected a number where Q has no known number of features"):
        srelax.attention(unknown, HEADS["K"], HEADS["V"], *blocks)
