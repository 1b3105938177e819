# SPDX-License-Identifier: Apache-2.0
"""Quantized models: products with 8-bit weights become sparse, with the integers of ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

import sparsetir.relax as srelax
from sparsetir.build import build
from sparsetir.codegen.target import cpu_target, emulating_target, native_target
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.relax.integer_products import DENSE_WAY, WAY
from sparsetir.relax.model import lowered
from sparsetir.relax.onnx_import import _imported
from sparsetir.relax.operators import call

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx.reference")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
pytestmark = pytest.mark.usefixtures("quick_comparisons")

N, M = 64, 80
DTYPES = {"uint8": onnx.TensorProto.UINT8, "int8": onnx.TensorProto.INT8, "int32": onnx.TensorProto.INT32}


def weight(*shape: int, seed: int = 0, density: float = 0.05, dtype: str = "int8") -> np.ndarray:
    rng, limits = np.random.default_rng(seed), np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max + 1, shape)
    return np.where(rng.random(shape) < density, values, 0).astype(dtype)


def network(nodes: list[Any], x: Any, y: Any, tensors: dict[str, Any], sparse: tuple[Any, ...] = ()) -> Any:
    value = lambda name, dtype, shape: helper.make_tensor_value_info(name, DTYPES[dtype], shape)  # noqa: E731
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "network", [value("x", *x)], [value("y", *y)], stored, sparse_initializer=sparse)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def parameters(outputs: int, zero: str = "uint8", weight_zero: Any = 0) -> dict[str, Any]:
    """Scales and zero points, whose results reach both limits and halves."""
    rng = np.random.default_rng(3)
    return {
        "sx": np.float32(0.25),
        "zx": np.array(7, zero),
        "sw": (2.0 ** rng.integers(-6, -2, outputs)).astype("float32"),
        "zw": np.full(outputs, weight_zero, "int8"),
        "sy": np.float32(8),
        "zy": np.uint8(121),
    }


def check(model: Any, x: np.ndarray, *, is_sparse: bool = True) -> Any:
    """Compare with the reference evaluator, and return the pass."""
    sparsify = srelax.SparsifyWeights(decide="predict")
    result = srelax.from_onnx(model, sparsify=sparsify)(x)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)
    assert [layer.is_sparse for layer in sparsify.layers] == [is_sparse]
    return sparsify


def inputs(*shape: int, dtype: str = "uint8") -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.random.default_rng(1).integers(limits.min, limits.max + 1, shape).astype(dtype)


@pytest.mark.parametrize(("shape", "dtype"), [((5, N), "uint8"), ((1, N), "int8"), ((2, 3, N), "uint8")])
def test_products_of_integers(shape: tuple[int, ...], dtype: str) -> None:
    node = helper.make_node("MatMulInteger", ["x", "W", "zx"], ["y"])
    out = ["n", *shape[1:-1], M]
    tensors = {"W": weight(N, M), "zx": np.array(9, dtype)}
    layer = check(network([node], (dtype, ["n", *shape[1:]]), ("int32", out), tensors), inputs(*shape, dtype=dtype))
    assert layer.layers[0].way == WAY


def test_a_weight_on_the_left_and_its_zero_point() -> None:
    node = helper.make_node("MatMulInteger", ["W", "x", "zw", "zx"], ["y"])
    tensors = {"W": weight(M, N) + np.int8(0), "zw": np.int8(0), "zx": np.uint8(200)}
    tensors["W"] = np.where(tensors["W"], tensors["W"] // 2, 0).astype("int8") + np.int8(13)
    tensors["zw"] = np.int8(13)
    check(network([node], ("uint8", [N, "n"]), ("int32", [M, "n"]), tensors), inputs(N, 6))


def test_weights_of_nine_bits_stay() -> None:
    node = helper.make_node("MatMulInteger", ["x", "W", "zx", "zw"], ["y"])
    tensors = {"W": weight(N, M), "zw": np.int8(100), "zx": np.uint8(3)}
    tensors["W"][:2] = [[127], [-128]]
    model = network([node], ("uint8", ["n", N]), ("int32", ["n", M]), tensors)
    x, sparsify = inputs(5, N), srelax.SparsifyWeights(decide="predict")
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(srelax.from_onnx(model, sparsify=sparsify)(x), expected)
    assert not sparsify.layers


@pytest.mark.parametrize(("zero", "per_output"), [("uint8", True), ("int8", False)])
def test_qlinear_matmul(zero: str, per_output: bool) -> None:
    node = helper.make_node("QLinearMatMul", ["x", "sx", "zx", "W", "sw", "zw", "sy", "zy"], ["y"])
    tensors = {"W": weight(N, M), **parameters(M, zero), "zy": np.array(21, zero)}
    if not per_output:
        tensors |= {name: tensors[name][:1] for name in ("sw", "zw")}
    check(network([node], (zero, ["n", N]), (zero, ["n", M]), tensors), inputs(5, N, dtype=zero))


@pytest.mark.parametrize(("kind", "group", "options"), [
    ("ConvInteger", 1, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("QLinearConv", 1, {"pads": [1, 0, 1, 2], "strides": [2, 1]}),
    ("QLinearConv", 4, {"dilations": [2, 1], "pads": [2, 1, 0, 1]}),
])  # fmt: skip
def test_convolutions(kind: str, group: int, options: dict[str, Any]) -> None:
    images, tensors = 2, {"W": weight(32, 16 // group, 3, 3, density=0.1), **parameters(32)}
    names = ["x", "W", "zx"] if kind == "ConvInteger" else ["x", "sx", "zx", "W", "sw", "zw", "sy", "zy", "B"]
    tensors["B"] = np.arange(-16, 16).astype("int32") * 100
    node = helper.make_node(kind, names, ["y"], group=group, **options)
    tensors = {name: array for name, array in tensors.items() if name in names}
    x = inputs(images, 16, 9, 8)
    result = "int32" if kind == "ConvInteger" else "uint8"
    check(network([node], ("uint8", ["n", 16, 9, 8]), (result, ["n", 32, "h", "w"]), tensors), x)


def dequantized(transposed: bool = False) -> list[Any]:
    return [
        helper.make_node("DequantizeLinear", ["x", "sx", "zx"], ["xf"]),
        helper.make_node("DequantizeLinear", ["W", "sw", "zw"], ["wf"], axis=0 if transposed else 1),
        helper.make_node("Gemm", ["xf", "wf", "B"], ["g"], transB=int(transposed)),
        helper.make_node("Relu", ["g"], ["r"]),
        helper.make_node("QuantizeLinear", ["r", "sy", "zy"], ["y"]),
    ]


@pytest.mark.parametrize(("dtype", "transposed"), [("uint8", False), ("int8", True)])
def test_dequantize_gemm_quantize(dtype: str, transposed: bool) -> None:
    # All scales are powers of two, so that sums in float32 are exact, too.
    tensors = {**parameters(M, dtype), "B": np.arange(M, dtype="float32") / 4, "zy": np.array(21, dtype)}
    tensors["W"] = weight(M, N) if transposed else weight(N, M)
    model = network(dequantized(transposed), (dtype, ["n", N]), (dtype, ["n", M]), tensors)
    check(model, inputs(5, N, dtype=dtype))


def test_scales_along_a_sum_are_products_in_float32() -> None:
    nodes, tensors = dequantized(), {**parameters(N), "B": np.zeros(N, "float32"), "W": weight(N, N)}
    nodes[1] = helper.make_node("DequantizeLinear", ["W", "sw", "zw"], ["wf"], axis=0)
    sparsify = srelax.SparsifyWeights(decide="predict")
    model, x = network(nodes, ("uint8", ["n", N]), ("uint8", ["n", N]), tensors), inputs(4, N)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(srelax.from_onnx(model, sparsify=sparsify)(x), expected)
    assert [layer.operator for layer in sparsify.layers] == ["linear"]


def test_layers_between_are_integers_alone() -> None:
    first = {**parameters(M), "B": np.ones(M, "float32"), "W": weight(N, M)}
    second = {f"{name}2": array for name, array in {**parameters(N), "W": weight(M, N, seed=5)}.items()}
    second["B2"] = np.zeros(N, "float32")
    nodes = dequantized()
    for node in dequantized():
        names = [n if n in ("x", "y") else f"{n}2" for n in node.input]
        renamed = helper.make_node(node.op_type, ["y" if n == "x" else n for n in names], [f"{node.output[0]}2"])
        renamed.attribute.extend(node.attribute)
        nodes.append(renamed)
    nodes[5].input[1:] = ["sy", "zy"]
    nodes[-1].output[0] = "out"
    tensors = {**first, **{name: array for name, array in second.items() if name not in ("sx2", "zx2")}}
    model = network(nodes, ("uint8", ["n", N]), ("uint8", ["n", N]), tensors)
    model.graph.output[0].name = "out"
    sparsify = srelax.SparsifyWeights(decide="predict")
    compiled, x = srelax.from_onnx(model, sparsify=sparsify), inputs(3, N)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(compiled(x), expected)
    text = sparsify(_imported(model, None)).script()
    assert text.count("R.sparse.spmm_int32") == text.count("R.permute_dims") == 2  # none between the layers
    assert "dequantize" not in text
    # Bias, rounding and the conversion are in the kernels: three functions and no other.
    assert lowered(sparsify(_imported(model, None)), native_target()).script().count("R.call_tir") == 4


def test_scales_known_at_run_time() -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "W", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "s"], ["y"]),
    ]
    value = lambda name, size: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, size])  # noqa: E731
    stored = [numpy_helper.from_array(weight(N, M), "W")]
    graph = helper.make_graph(nodes, "g", [value("x", N)], [value("y", M)], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x, sparsify = np.random.default_rng(0).standard_normal((4, N)).astype("float32"), srelax.SparsifyWeights()
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(srelax.from_onnx(model, sparsify=sparsify)(x), expected, rtol=1e-5)
    assert [layer.way in (WAY, DENSE_WAY) for layer in sparsify.layers] == [True]


def test_sparse_initializers_of_integers() -> None:
    W = weight(N, M)
    values = numpy_helper.from_array(W[W != 0], "W")
    stored = helper.make_sparse_tensor(values, numpy_helper.from_array(np.flatnonzero(W)), list(W.shape))
    node = helper.make_node("MatMulInteger", ["x", "W", "zx"], ["y"])
    report: list[Any] = []
    model = network([node], ("uint8", ["n", N]), ("int32", ["n", M]), {"zx": np.uint8(5)}, (stored,))
    x = inputs(3, N)
    np.testing.assert_array_equal(srelax.from_onnx(model, report=report)(x), (x.astype(int) - 5) @ W)
    assert [(layer.name, layer.is_sparse) for layer in report] == [("W", True)]


@pytest.mark.parametrize("rows", [1, "n"])
def test_both_ways_are_timed(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.SECONDS", 1e-3)
    tensors = {**parameters(M), "B": np.ones(M, "float32"), "W": weight(N, M)}
    model = network(dequantized(), ("uint8", [rows, N]), ("uint8", [rows, M]), tensors)
    sparsify = srelax.SparsifyWeights(rows=3)
    x = inputs(1, N)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(srelax.from_onnx(model, sparsify=sparsify)(x), expected)
    assert set(sparsify.layers[0].times) - {DENSE_WAY} == {"dense", WAY}


def test_dense_weights_are_constants_of_float32() -> None:
    tensors = {**parameters(M), "B": np.ones(M, "float32"), "W": weight(N, M, density=1)}
    model = network(dequantized(), ("uint8", ["n", N]), ("uint8", ["n", M]), tensors)
    sparsify = check(model, inputs(3, N), is_sparse=False)
    assert sparsify(_imported(model, None)).script().count("R.dequantize") == 1


def integers_in_one_kernel(density: float) -> dict[str, tuple[Any, tuple[int, ...], str]]:
    """Models with weights of a density, the shapes of their inputs, and the dtypes of these."""
    conv = ["x", "sx", "zx", "W", "sw", "zw", "sy", "zy"]
    rows = helper.make_node("MatMulInteger", ["x", "W", "zx"], ["y"])
    columns = helper.make_node("MatMulInteger", ["W", "x", "", "zx"], ["y"])
    image = helper.make_node("QLinearConv", conv, ["y"], pads=[1, 0, 1, 2], strides=[2, 1])
    weights = {"W": weight(N, M, density=density), "zx": np.array(9, "uint8")}
    left = {"W": weight(M, N, density=density), "zx": np.array(9, "int8")}
    gemm = {**parameters(M), "B": np.arange(M, dtype="float32") / 4, "W": weights["W"]}
    kernel = {**parameters(32), "W": weight(32, 16, 3, 3, density=density)}
    return {
        "rows": (network([rows], ("uint8", ["n", N]), ("int32", ["n", M]), weights), (5, N), "uint8"),
        "batch": (network([rows], ("uint8", ["n", 3, N]), ("int32", ["n", 3, M]), weights), (2, 3, N), "uint8"),
        "columns": (network([columns], ("int8", [N, 7]), ("int32", [M, 7]), left), (N, 7), "int8"),
        "gemm": (network(dequantized(), ("uint8", ["n", N]), ("uint8", ["n", M]), gemm), (5, N), "uint8"),
        "image": (
            network([image], ("uint8", [1, 16, 9, 8]), ("uint8", [1, 32, "h", "w"]), kernel),
            (1, 16, 9, 8),
            "uint8",
        ),
        "images": (
            network([image], ("uint8", ["n", 16, 9, 8]), ("uint8", ["n", 32, "h", "w"]), kernel),
            (3, 16, 9, 8),
            "uint8",
        ),
    }


@pytest.fixture
def prefers_dense_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.SECONDS", 1e-4)
    for module in ("sparsetir.workloads.timing", "sparsetir.relax.sparsify"):
        monkeypatch.setattr(f"{module}.fastest", lambda _times: DENSE_WAY)


@pytest.mark.usefixtures("prefers_dense_integers")
@pytest.mark.parametrize(
    ("kind", "density"),
    [
        *(("rows", 0.3), ("batch", 1.0), ("columns", 1.0), ("gemm", 0.3), ("gemm", 1.0), ("image", 0.3)),
        *(("images", 0.3), ("images", 1.0)),
    ],
)
def test_dense_products_of_integers(kind: str, density: float) -> None:
    """They are candidates at any density, with the integers of the reference evaluator."""
    (model, shape, dtype), target = integers_in_one_kernel(density)[kind], emulating_target()
    sparsify = srelax.SparsifyWeights(target=target)
    x = inputs(*shape, dtype=dtype)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    result = srelax.from_onnx(model, sparsify=sparsify, target=target)(x)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)
    (layer,) = sparsify.layers
    sparse = {WAY} if density <= sparsify.most_dense else set()
    assert set(layer.times) == {DENSE_WAY} | sparse | ({"dense"} if kind == "gemm" else set())
    assert (layer.way, layer.is_sparse) == (DENSE_WAY, False)


def test_dense_products_of_integers_need_units() -> None:
    model, *_ = integers_in_one_kernel(1.0)["gemm"]
    plain = cpu_target({"kind": "llvm", "mcpu": "znver3"}, "models")
    sparsify = srelax.SparsifyWeights(target=plain)
    sparsify(_imported(model, None))
    assert [(layer.way, layer.reason) for layer in sparsify.layers] == [("", "more than 70% of it is not zero")]


@pytest.mark.optimised
@pytest.mark.parametrize(("mcpu", "instruction"), [("znver4", "vpdpbusd"), ("sapphirerapids", "tdpbsud")])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_dense_products_of_integers_use_the_units(mcpu: str, instruction: str, batch: tuple[int, ...]) -> None:
    target = {**native_target().export(), "mcpu": mcpu}
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([*batch, N, 32], "uint8"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(relax.const(weight(M, N)), x, out_dtype="int32"))
        builder.emit_func_output(y)
    cpu = cpu_target(target, "models")
    assert instruction in build(lowered(builder.get(), cpu)["matmul"], cpu).source("asm")


@pytest.mark.parametrize("target", ["plain", "emulated"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("one", "other"), [("int8", "uint8"), ("uint8", "int8"), ("int8", "int8"), ("uint8", "uint8")])
def test_products_of_8_bits_in_int32(one: str, other: str, side: str, target: str) -> None:
    A, B = inputs(33, 50, dtype=one), inputs(50, 128, dtype=other)
    given, (shape, dtype) = (B, (B.shape, other)) if side == "left" else (A, (A.shape, one))
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(list(shape), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            operands = (relax.const(A), x) if side == "left" else (x, relax.const(B))
            y = builder.emit_output(relax.op.matmul(*operands, out_dtype="int32"))
        builder.emit_func_output(y)
    cpu = emulating_target() if target == "emulated" else native_target()
    np.testing.assert_array_equal(srelax.compile_model(builder.get(), cpu)(given), A.astype(int) @ B.astype(int))


@pytest.mark.parametrize("target", ["emulated", "znver4", "sapphirerapids"])
def test_products_use_the_units(target: str) -> None:
    cpu = emulating_target() if target == "emulated" else cpu_target({"kind": "llvm", "mcpu": target}, "models")
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([N, 32], "uint8"))
    csr = srelax.csr_constants(np.ones((16, N), "float32"))
    data = relax.const(np.ones(16 * N, "int8"), "int8")
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(call("spmm_int32", data, *csr[1:], x))
        builder.emit_func_output(y)
    if target == "emulated":
        given = inputs(N, 32)
        result = srelax.compile_model(builder.get(), cpu)(given)
        np.testing.assert_array_equal(result, np.broadcast_to(given.sum(0, dtype="int32"), (16, 32)))
    else:
        text = build(lowered(builder.get(), cpu)["spmm"], cpu).source("asm")
        assert "vpdpbusd" in text


# ------------------------------------------------------------------ quantization of models in float32


def real(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def pruned(*shape: int, seed: int = 0) -> np.ndarray:
    return np.where(np.random.default_rng(seed).random(shape) < 0.05, real(*shape, seed=seed + 1), 0).astype("float32")


def module(shape: list[Any], make: Any) -> Any:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(make(builder.emit, x)))
        builder.emit_func_output(out)
    return builder.get()


@pytest.fixture
def prefers_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the sparse product of integers unless its results are refused."""
    monkeypatch.setattr("sparsetir.relax.sparsify.SECONDS", 1e-4)
    monkeypatch.setattr("sparsetir.relax.sparsify.fastest", lambda times: WAY if WAY in times else "dense")


W = pruned(M, N)
FLOATS = {
    "rows": ([3, N], lambda emit, x: relax.op.matmul(x, relax.const(W.T.copy())), lambda x: x @ W.T),
    "one row": ([1, N], lambda emit, x: relax.op.matmul(x, relax.const(W.T.copy())), lambda x: x @ W.T),
    "columns": ([N, 3], lambda emit, x: relax.op.matmul(relax.const(W), x), lambda x: W @ x),
    "batch": ([2, 3, N], lambda emit, x: relax.op.matmul(x, relax.const(W.T.copy())), lambda x: x @ W.T),
    "images": (
        [2, N, 3, 4],
        lambda emit, x: relax.op.nn.conv2d(x, relax.const(W[:, :, None, None].copy())),
        lambda x: np.einsum("oc,nchw->nohw", W, x),
    ),
}


@pytest.mark.usefixtures("prefers_integers")
@pytest.mark.parametrize("layout", FLOATS)
def test_models_in_float32_are_quantized(layout: str) -> None:
    shape, make, by_numpy = FLOATS[layout]
    x = real(*shape, seed=4)
    sparsify = srelax.SparsifyWeights(dtype="int8", examples=[x, 0.5 * x])
    compiled, expected = srelax.compile_model(module(shape, make), sparsify=sparsify), by_numpy(x)
    assert [layer.way for layer in sparsify.layers] == [WAY]
    assert np.linalg.norm(compiled(x) - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.usefixtures("prefers_dense_integers")
@pytest.mark.parametrize(("layout", "is_full"), [("rows", False), ("columns", True), ("batch", True), ("images", True)])
def test_models_in_float32_take_dense_products_of_integers(layout: str, is_full: bool) -> None:
    """The integers are those of numpy, and so is the result, up to the rounding of its scale."""
    matrix, target = real(M, N, seed=6) if is_full else W, emulating_target()
    shape, _, _ = FLOATS[layout]
    x = real(*shape, seed=4)
    columns = x if layout == "columns" else x.reshape(2, N, -1) if layout == "images" else x.reshape(-1, N).T

    def make(emit: Any, var: Any) -> Any:
        if layout == "images":
            return relax.op.nn.conv2d(var, relax.const(matrix[:, :, None, None].copy()))
        is_left = layout == "columns"
        return relax.op.matmul(*((relax.const(matrix), var) if is_left else (var, relax.const(matrix.T.copy()))))

    sparsify = srelax.SparsifyWeights(dtype="int8", examples=[x], target=target)
    result = srelax.compile_model(module(shape, make), target, sparsify=sparsify)(x)
    (layer,) = sparsify.layers
    sparse = set() if is_full else {"sparse", WAY, "sparse bfloat16", "sparse bfloat16 rows", "sparse bf16x3"}
    assert set(layer.times) == {"dense", "dense bfloat16", DENSE_WAY} | sparse
    assert (layer.way, layer.is_sparse) == (DENSE_WAY, False)
    step = np.float32(float(x.max()) - float(x.min())) / np.float32(255)
    zero = np.round(-float(x.min()) / step)
    integers = np.clip(np.round(columns / step) + zero, 0, 255) - zero
    largest = np.abs(matrix).max(axis=1, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1))
    expected = (np.rint(matrix / scales) @ integers) * scales * step
    expected = (expected if layout in ("columns", "images") else expected.T).reshape(result.shape)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.usefixtures("prefers_integers")
def test_quantization_moves_into_the_product_before() -> None:
    first, second, bias = pruned(N, M, seed=5), pruned(M, N, seed=7), real(M)

    def make(emit: Any, x: Any) -> Any:
        y = emit(relax.op.add(emit(relax.op.matmul(x, relax.const(first))), relax.const(bias)))
        return relax.op.matmul(emit(relax.op.nn.relu(y)), relax.const(second))

    x, sparsify = real(5, N), srelax.SparsifyWeights(dtype="int8", examples=[(real(5, N),)], percentile=99.9)
    mod = sparsify(module([5, N], make))
    text = mod.script()
    assert text.count("R.sparse.spmm_int32") == text.count("R.permute_dims") == 2
    expected = np.maximum(x @ first + bias, 0) @ second
    assert np.linalg.norm(srelax.compile_model(mod)(x) - expected) < 0.05 * np.linalg.norm(expected)


def test_inaccurate_integers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsetir.relax.sparsify.SECONDS", 1e-4)
    shape, make, _ = FLOATS["rows"]
    x = real(*shape)
    x[0, 0] = 1e6  # Every other element is zero in steps of 1e6 / 255; the weight of this one is.
    wide = srelax.SparsifyWeights(dtype="int8", examples=[np.where(W.any(axis=0), real(*shape), x[:1, :1])])
    wide(module(shape, make))
    assert WAY not in wide.layers[0].times


@pytest.mark.parametrize(
    "arguments", [{}, {"examples": []}, {"examples": real(3, N)}, {"examples": [1], "percentile": 0}]
)
def test_bad_examples(arguments: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=r"examples: expected|percentile: expected"):
        srelax.SparsifyWeights(dtype="int8", **arguments)
