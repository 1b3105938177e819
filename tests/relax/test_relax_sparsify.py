# SPDX-License-Identifier: Apache-2.0
"""Constant weights that are mostly zero: found in every layout, made sparse where that wins, the rest left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import relax, tirx

import sparsetir.relax as srelax
from sparsetir import ops
from sparsetir.build import build
from sparsetir.codegen.target import emulating_target, native_target
from sparsetir.errors import ArgumentError
from sparsetir.formats.heuristics import BLOCKED, SCATTERED, most_dense
from sparsetir.relax import programs
from sparsetir.relax.dense import packed
from sparsetir.relax.model import lowered
from sparsetir.relax.sparsify import Times, half_rewrites, timed
from sparsetir.tuning import tune_sparse

pytestmark = pytest.mark.usefixtures("quick_comparisons")

OUT, IN = 96, 128


def pruned(m: int = OUT, n: int = IN, density: float = 0.1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return sp.random_array((m, n), density=density, rng=rng, dtype="float64").toarray().astype("float32")


def dense(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def module(shape: list[Any], make: Callable[[Any, Any], Any]) -> Any:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(make(builder, x)))
        builder.emit_func_output(out)
    return builder.get()


def run(mod: Any, x: np.ndarray, **options: Any) -> np.ndarray:
    return relax.VirtualMachine(srelax.build(mod, **options), tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()


def calls(mod: Any) -> list[str]:
    """The operators of main."""
    names: list[str] = []
    note = lambda e: names.append(str(getattr(e.op, "name", ""))) if isinstance(e, tvm.ir.Call) else None  # noqa: E731
    relax.analysis.post_order_visit(mod["main"], note)
    return names


W = pruned()
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "x @ W": ((5, IN), lambda b, x: relax.op.matmul(x, relax.const(W.T.copy())), lambda x: x @ W.T),
    "x @ W, one row": ((1, IN), lambda b, x: relax.op.matmul(x, relax.const(W.T.copy())), lambda x: x @ W.T),
    "x @ W.T": (
        (5, IN),
        lambda b, x: relax.op.matmul(x, b.emit(relax.op.permute_dims(relax.const(W)))),
        lambda x: x @ W.T,
    ),
    "x @ W.T, axes given": (
        (2, 3, IN),
        lambda b, x: relax.op.matmul(x, b.emit(relax.op.permute_dims(relax.const(W), [1, 0]))),
        lambda x: x @ W.T,
    ),
    "linear": (
        (4, IN),
        lambda b, x: relax.op.linear(x, relax.const(W), relax.const(dense(OUT))),
        lambda x: x @ W.T + dense(OUT),
    ),
    "W @ x": ((IN, 7), lambda b, x: relax.op.matmul(relax.const(W), x), lambda x: W @ x),
    "W @ batch": ((2, IN, 7), lambda b, x: relax.op.matmul(relax.const(W), x), lambda x: W @ x),
    "conv NCHW": (
        (2, IN, 3, 4),
        lambda b, x: relax.op.nn.conv2d(x, relax.const(W[:, :, None, None].copy())),
        lambda x: np.einsum("oc,nchw->nohw", W, x),
    ),
    "conv NHWC": (
        (2, 3, 4, IN),
        lambda b, x: relax.op.nn.conv2d(
            x, relax.const(W[:, None, None, :].copy()), data_layout="NHWC", kernel_layout="OHWI"
        ),
        lambda x: x @ W.T,
    ),
    "conv HWIO": (
        (2, 3, 4, IN),
        lambda b, x: relax.op.nn.conv2d(
            x, relax.const(W.T[None, None].copy()), data_layout="NHWC", kernel_layout="HWIO"
        ),
        lambda x: x @ W.T,
    ),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_layout_is_found(layout: str) -> None:
    shape, make, by_numpy = LAYOUTS[layout]
    sparsify = srelax.SparsifyWeights(decide="predict")
    mod = sparsify(module(list(shape), make))
    assert any(name.startswith("relax.sparse.") for name in calls(mod))
    assert not {"relax.matmul", "relax.nn.conv2d", "relax.permute_dims"} & set(calls(mod))
    (layer,) = sparsify.layers
    assert layer.is_sparse
    assert layer.shape == (OUT, IN)
    x = dense(*shape, seed=2)
    np.testing.assert_allclose(run(mod, x), by_numpy(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda b, x: relax.op.nn.conv2d(x, relax.const(pruned(8, IN * 9).reshape(8, IN, 3, 3)), padding=1),
        lambda b, x: relax.op.nn.conv2d(x, relax.const(W[:, :, None, None].copy()), strides=2),
        lambda b, x: relax.op.nn.relu(x),
    ],
)
def test_what_is_no_product_stays(make: Any) -> None:
    mod = module([1, IN, 6, 6], make)
    tvm.ir.assert_structural_equal(srelax.SparsifyWeights(decide="predict")(mod), mod)


@pytest.mark.parametrize("decide", ["predict", "measure"])
def test_an_unpruned_model_is_not_changed(decide: str) -> None:
    mod = module([16, IN], lambda b, x: relax.op.matmul(x, b.emit(relax.op.permute_dims(relax.const(dense(OUT, IN))))))
    sparsify = srelax.SparsifyWeights(decide=decide)
    tvm.ir.assert_structural_equal(sparsify(mod), mod)
    (layer,) = sparsify.layers
    assert "100.0% not zero, 16 rows: dense, more than 70% of it is not zero" in str(layer)


@pytest.mark.parametrize(
    ("times", "is_sparse", "reason"),
    [
        (Times(1e-6, 2e-6, True), True, "1 us against 2 us"),
        (Times(2e-6, 1e-6, True), False, "2 us against 1 us"),
        (Times(1e-6, 2e-6, False), False, "results differ by more than 0.001"),
    ],
)
def test_measuring_decides_by_time(monkeypatch: pytest.MonkeyPatch, times: Times, is_sparse: bool, reason: str) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.timed", lambda *_: times)
    sparsify = srelax.SparsifyWeights()
    mod = sparsify(module([5, IN], LAYOUTS["x @ W.T"][1]))
    (layer,) = sparsify.layers
    assert layer.is_sparse == is_sparse
    assert layer.reason == reason
    assert ("relax.sparse.linear" in calls(mod)) == is_sparse


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "rows"), [("linear", 9), ("spmm", 9), ("spmv", 1)])
def test_both_kernels_are_timed_and_compared(operator: str, rows: int) -> None:
    csr = sp.csr_array(W)
    csr.indptr, csr.indices = csr.indptr.astype("int32"), csr.indices.astype("int32")
    found = timed(operator, csr, W, rows, native_target())
    assert found.agree
    assert found.sparse > 0
    assert found.dense > 0
    assert not timed(operator, csr, W + 1, rows, native_target()).agree


def test_a_shared_weight_is_judged_and_stored_once() -> None:
    W = pruned(IN, IN)

    def make(b: Any, x: Any) -> Any:
        weight = relax.const(W)
        for _ in range(3):
            x = b.emit(relax.op.matmul(x, b.emit(relax.op.permute_dims(weight))))
        return relax.op.nn.relu(x)

    sparsify = srelax.SparsifyWeights(decide="predict")
    mod = sparsify(module([4, IN], make))
    assert calls(mod).count("relax.sparse.linear") == len(sparsify.layers) == 3
    held: list[Any] = []

    def note(expr: Any) -> None:
        if isinstance(expr, tvm.ir.GenericConst) and not any(expr.same_as(other) for other in held):
            held.append(expr)

    relax.analysis.post_order_visit(mod["main"], note)
    assert len(held) == 3  # data, indptr, indices
    x = dense(4, IN)
    want = x @ W.T @ W.T @ W.T
    np.testing.assert_allclose(run(mod, x), np.maximum(want, 0), rtol=1e-3, atol=1e-3)


def stacked(weights: list[np.ndarray]) -> Any:
    def make(builder: Any, x: Any) -> Any:
        for weight in weights:
            x = builder.emit(relax.op.matmul(x, relax.const(weight)))
        return x

    return module([8, IN], make)


@pytest.mark.slow
@pytest.mark.parametrize("decide", ["predict", "measure"])
@pytest.mark.parametrize("front", ["relax", "torch"])
def test_layers_of_one_shape_keep_their_own_weights(front: str, decide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.timed", lambda *_: Times(1.0, 2.0, True))
    first = pruned(IN, IN, 0.05)
    others = [pruned(IN, IN, 0.05, seed=1), -first, 2 * first, np.where(first == first.max(), 0.75, first)]
    weights = [first, *others, first.copy(), np.asfortranarray(first)]
    x, sparsify = dense(8, IN), srelax.SparsifyWeights(decide=decide)
    if front == "relax":
        result = srelax.compile_model(stacked(weights), sparsify=sparsify)(x)
    else:
        torch = pytest.importorskip("torch")
        model = torch.nn.Sequential(*(torch.nn.Linear(IN, IN, bias=False) for _ in weights))
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.data = torch.from_numpy(weight.T.copy())
        result = srelax.from_torch(model, (torch.from_numpy(x),), sparsify=sparsify)(torch.from_numpy(x)).numpy()
    expected = x.astype("float64")
    for weight in weights:
        expected = expected @ weight
    assert all(layer.is_sparse for layer in sparsify.layers)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * abs(expected).max())
    assert len(sparsify._matrices) == 1 + len(others)  # equal weights share one matrix


def test_tasks_of_another_dtype_or_mask_are_apart() -> None:
    mask = pruned()
    products = [(mask, "float32"), (2 * mask, "float32"), (mask, "float64"), (pruned(seed=1), "float32")]
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", relax.TensorType([IN, 4], dtype)) for n, (_, dtype) in enumerate(products)]
    with builder.function("main", params):
        results = [
            builder.emit(srelax.spmm(*srelax.csr_constants(sp.csr_array(w), dtype=dtype), x))
            for x, (w, dtype) in zip(params, products, strict=True)
        ]
        builder.emit_func_output(relax.Tuple(results))
    listed = sorted((str(task.inputs["A"].dtype), task.expected_calls) for task in srelax.tasks(builder.get()))
    assert listed == [("float32", 1), ("float32", 2), ("float64", 1)]


def test_the_batch_may_come_at_run_time() -> None:
    make = lambda b, x: relax.op.nn.gelu(b.emit(relax.op.matmul(x, relax.const(W.T.copy()))))  # noqa: E731
    mod = srelax.SparsifyWeights(decide="predict", rows=8)(module([tirx.Var("batch", "int64"), IN], make))
    vm = relax.VirtualMachine(srelax.build(mod), tvm.cpu())
    from scipy.special import erf

    for batch in (1, 3, 130):
        x = dense(batch, IN)
        y = x @ W.T
        want = 0.5 * y * (1 + erf(y / np.sqrt(2)))
        np.testing.assert_allclose(vm["main"](tvm.runtime.tensor(x)).numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_tuned_records_are_used(tmp_path: Path) -> None:
    W = np.kron(pruned(64, 64, 0.1), np.ones((4, 4), "float32"))
    mod = module([32, 256], lambda b, x: relax.op.matmul(x, relax.const(W.T.copy())))
    database = tmp_path / "records.jsonl"
    sparsify = srelax.SparsifyWeights(decide="predict", tune=True, max_seconds=1, database=database)
    tuned = sparsify(mod)
    assert database.read_text()
    csr = sp.csr_array(W)
    csr.indptr, csr.indices = csr.indptr.astype("int32"), csr.indices.astype("int32")
    x = dense(32, 256)
    tune_sparse(ops.linear(), {"A": csr, "X": x}, max_trials=8, database=database, progress=False)
    lines = [json.loads(line) for line in database.read_text().splitlines()]
    records = [line for line in lines if "comparison" not in line]  # of searches that did not end: trials decide
    best = next(record for record in records if record["stored_as"] is not None and record["seconds"])
    best["seconds"] = 1e-9  # whatever this machine found
    database.write_text("".join(json.dumps(record) + "\n" for record in records))
    functions = lowered(tuned, native_target(), None, database).functions
    found = next(func for var, func in functions.items() if "linear" in var.name_hint)
    assert {str(k): int(v) for k, v in found.attrs["sparsetir.choices"].items()} == best["choices"]
    np.testing.assert_allclose(run(tuned, x, database=database), x @ W.T, rtol=1e-4, atol=1e-4)


def test_blocks_are_seen() -> None:
    assert most_dense(sp.csr_array(np.kron(np.eye(8), np.ones((4, 4))))) == BLOCKED
    assert most_dense(sp.csr_array(W)) == SCATTERED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decide": "guess"}, "decide is 'measure' or 'predict'"),
        ({"rows": 0}, "rows must be positive"),
        ({"rows": np.ones(2)}, "rows must be positive"),
        ({"most_dense": "1"}, "rows must be positive"),
        ({"decide": np.ones(2)}, "decide is 'measure' or 'predict'"),
        ({"most_dense": 2.0}, "most_dense from 0 to 1"),
        ({"tune": True}, "tune needs a database"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        srelax.SparsifyWeights(**options)


EVERY = {"dense", "sparse", "dense bfloat16", "sparse bfloat16", "sparse bfloat16 rows", "sparse bf16x3"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [[16, IN], [2, 8, IN]])
@pytest.mark.parametrize(
    ("way", "least", "most"),
    [
        ("dense bfloat16", 1e-4, 2e-2),
        ("sparse bfloat16", 1e-4, 2e-2),
        ("sparse bfloat16 rows", 1e-4, 2e-2),
        ("sparse bf16x3", 1e-7, 1e-5),
    ],
)
def test_products_in_bfloat16_are_candidates(
    monkeypatch: pytest.MonkeyPatch, way: str, least: float, most: float, shape: list[int]
) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.fastest", lambda _times: way)
    target = emulating_target()
    sparsify = srelax.SparsifyWeights(dtype="bfloat16", target=target)
    mod = sparsify(module(shape, LAYOUTS["x @ W.T"][1]))
    (layer,) = sparsify.layers
    assert layer.way == way
    assert layer.is_sparse == way.startswith("sparse")
    assert set(layer.times) == EVERY
    x = dense(*shape)
    expected = x.astype(float) @ W.T.astype(float)
    error = np.linalg.norm(run(mod, x, target=target) - expected) / np.linalg.norm(expected)
    assert least < error < most


@pytest.mark.parametrize("layout", ["W @ x", "W @ batch", "conv NCHW"])
@pytest.mark.parametrize("way", ["dense bfloat16", "sparse bfloat16"])
def test_batches_in_bfloat16(monkeypatch: pytest.MonkeyPatch, layout: str, way: str) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.SECONDS", 1e-4)
    monkeypatch.setattr("sparsetir.relax.sparsify.fastest", lambda _times: way)
    shape, make, by_numpy = LAYOUTS[layout]
    sparsify = srelax.SparsifyWeights(dtype="bfloat16", target=emulating_target())
    mod = sparsify(module(list(shape), make))
    x = dense(*shape)
    error = np.linalg.norm(run(mod, x, target=emulating_target()) - by_numpy(x)) / np.linalg.norm(by_numpy(x))
    assert 1e-4 < error < 2e-2
    (layer,) = sparsify.layers
    assert set(layer.times) == EVERY - {"sparse bfloat16 rows"} - (set() if layout == "W @ x" else {"sparse bf16x3"})


@pytest.mark.parametrize("most_dense", [0.02, 1.0])
def test_weights_that_are_too_dense_have_dense_candidates(monkeypatch: pytest.MonkeyPatch, most_dense: float) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.SECONDS", 1e-4)
    monkeypatch.setattr("sparsetir.relax.sparsify.fastest", lambda _times: "dense bfloat16")
    target = emulating_target()
    mod = module([16, IN], LAYOUTS["x @ W.T"][1])
    sparsify = srelax.SparsifyWeights(dtype="bfloat16", target=target, most_dense=most_dense)
    x = dense(16, IN)
    np.testing.assert_allclose(run(sparsify(mod), x, target=target), x @ W.T, atol=2e-2 * np.abs(x @ W.T).max())
    (layer,) = sparsify.layers
    assert set(layer.times) == (EVERY if most_dense == 1 else {"dense", "dense bfloat16"})
    assert (layer.way, layer.is_sparse, layer.sparse is None) == ("dense bfloat16", False, most_dense < 1)
    one = srelax.SparsifyWeights(dtype="bf16x3", target=target, most_dense=0.02)
    one(mod)
    assert not one.layers[0].times


def test_precisions_need_units_and_permission() -> None:
    x = relax.Var("x", relax.TensorType([16, IN], "float32"))
    names = {
        lowest: set(half_rewrites("linear", W, x, lowest, emulating_target()))
        for lowest in ("float32", "bf16x3", "bfloat16")
    }
    assert names["float32"] == set()
    assert names["bf16x3"] == {"sparse bf16x3"}
    assert names["bfloat16"] == EVERY - {"dense", "sparse"}
    plain = tvm.target.Target({"kind": "llvm", "mcpu": "znver3"})
    assert not half_rewrites("linear", W, x, "bfloat16", plain)
    assert not half_rewrites("linear", W.astype("float64"), x, "bfloat16", emulating_target())
    with pytest.raises(
        ArgumentError, match="dtype: expected one of 'float32', 'bf16x3', 'bfloat16', 'int8' or None, got 'int4'"
    ):
        srelax.SparsifyWeights(dtype="int4")
    with pytest.raises(ArgumentError, match="dtype: expected None with decide='predict'"):
        srelax.SparsifyWeights(dtype="bfloat16", decide="predict")


@pytest.mark.optimised
@pytest.mark.parametrize(("mcpu", "instruction"), [("znver4", "vdpbf16ps"), ("sapphirerapids", "tdpbf16ps")])
@pytest.mark.parametrize("panel", [0, 32])
def test_dense_products_use_the_units(mcpu: str, instruction: str, panel: int) -> None:
    target = {**native_target().export(), "mcpu": mcpu}
    program = programs.matmul({"m": 60, "n": 96, "feat": 64}, "bfloat16", 16, None, panel, "float32")
    assert instruction in build(program.func, target).source("asm")


@pytest.mark.slow
@pytest.mark.parametrize("panel", [0, 32])
@pytest.mark.parametrize("rows", [1, 15, 33])
def test_dense_products_by_units_are_exact(panel: int, rows: int) -> None:
    rng = np.random.default_rng(rows)
    A, B = ((rng.integers(-32, 32, shape) / 8).astype(ml_dtypes.bfloat16) for shape in ((rows, 50), (50, 64)))
    program = programs.matmul({"m": rows, "n": 50, "feat": 64}, "bfloat16", 8, None, panel, "float32")
    arguments = {"A": A, "B": packed(B, panel) if panel else B, **({"io_size": -(-rows // 8)} if panel else {})}
    result = build(program.func, emulating_target())(**arguments).reshape(rows, 64)
    np.testing.assert_array_equal(result, A.astype(np.float32) @ B.astype(np.float32))


def test_tanh_after_a_sparse_layer_keeps_the_digits_of_small_numbers() -> None:
    rng = np.random.default_rng(0)
    weight = np.where(rng.random((64, 64)) < 0.05, 1e-3 * rng.standard_normal((64, 64)), 0).astype("float32")
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([4, 64], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.tanh(builder.emit(relax.op.matmul(x, relax.const(weight)))))
        builder.emit_func_output(y)
    sparsify = srelax.SparsifyWeights(decide="predict")
    run = srelax.compile_model(builder.get(), sparsify=sparsify)
    values = rng.standard_normal((4, 64), dtype="float32")
    exact = values.astype("float64") @ weight
    assert sparsify.layers
    np.testing.assert_allclose(run(values), np.tanh(exact), rtol=1e-5, atol=1e-8)
