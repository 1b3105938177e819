# SPDX-License-Identifier: Apache-2.0
"""ONNX models: sparse initializers as sparse weights, and operators beside the reference evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsetir
import sparsetir.relax as srelax
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, MissingFileError

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
ReferenceEvaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator


def pruned(*shape: int, density: float = 0.2, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < density, rng.standard_normal(shape), 0).astype("float32")


def stored(name: str, array: np.ndarray, *, linear: bool = True) -> Any:
    places = np.flatnonzero(array) if linear else np.argwhere(array)
    values = numpy_helper.from_array(array[array != 0], name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(places.astype("int64")), list(array.shape))


def network(nodes: list[Any], inputs: list[Any], outputs: list[Any], dense: dict[str, Any], sparse: list[Any]) -> Any:
    value = lambda name, shape: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)  # noqa: E731
    tensors = [numpy_helper.from_array(array, name) for name, array in dense.items()]
    sides = [value(*side) for side in inputs], [value(*side) for side in outputs]
    graph = helper.make_graph(nodes, "network", *sides, tensors, sparse_initializer=sparse)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def X(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal(shape).astype("float32")


V, W, B = pruned(30, 24, seed=1), pruned(40, 30), np.ones(24, "float32")


def perceptron(linear: bool = True) -> Any:
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Gemm", ["b", "V", "B"], ["y"], transB=1),
    ]
    weights = [stored("W", W, linear=linear), stored("V", np.ascontiguousarray(V.T), linear=linear)]
    return network(nodes, [("x", ["batch", 40])], [("y", ["batch", 24])], {"B": B}, weights)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("source", ["model", "path", "bytes"])
def test_sparse_initializers_are_sparse_weights(linear: bool, source: str, tmp_path: Path) -> None:
    model = perceptron(linear)
    before = model.SerializeToString()
    onnx.save(model, tmp_path / "model.onnx")
    given = {"model": model, "path": tmp_path / "model.onnx", "bytes": before}[source]
    report: list[Any] = []
    compiled = srelax.from_onnx(given, report=report)
    for rows in (0, 1, 5):
        x = np.random.default_rng(2).standard_normal((rows, 40)).astype("float32")
        np.testing.assert_allclose(compiled(x), np.maximum(x @ W, 0) @ V + B, rtol=1e-4, atol=1e-5)
    assert [(layer.name, layer.is_sparse, layer.shape) for layer in report] == [
        ("W", True, (30, 40)),
        ("V", True, (24, 30)),
    ]
    assert model.SerializeToString() == before


def test_constants_convolutions_and_other_uses() -> None:
    kernel, shift = pruned(8, 6, 1, 1), pruned(8, 4, 5)
    constant = helper.make_node("Constant", [], ["S"], sparse_value=stored("", shift))
    nodes = [constant, helper.make_node("Conv", ["x", "K"], ["a"]), helper.make_node("Add", ["a", "S"], ["y"])]
    model = network(nodes, [("x", [2, 6, 4, 5])], [("y", [2, 8, 4, 5])], {}, [stored("K", kernel)])
    report: list[Any] = []
    x = np.random.default_rng(3).standard_normal((2, 6, 4, 5)).astype("float32")
    expected = np.einsum("oi,nihw->nohw", kernel[:, :, 0, 0], x) + shift
    np.testing.assert_allclose(srelax.from_onnx(model, report=report)(x), expected, rtol=1e-4, atol=1e-5)
    assert [(layer.name, layer.is_sparse) for layer in report] == [("K", True), ("S", False)]


def test_no_entries_and_dense_weights_beside() -> None:
    nodes = [helper.make_node("MatMul", ["x", "Z"], ["a"]), helper.make_node("MatMul", ["a", "W"], ["y"])]
    wide, zeros = pruned(64, 128, density=0.05), np.zeros((40, 64), "float32")
    model = network(nodes, [("x", ["n", 40])], [("y", ["n", 128])], {"W": wide}, [stored("Z", zeros)])
    sparsify = srelax.SparsifyWeights(decide="predict")
    report: list[Any] = []
    compiled = srelax.from_onnx(model, sparsify=sparsify, report=report)
    assert [layer.shape for layer in report][-len(sparsify.layers) :] == [layer.shape for layer in sparsify.layers]
    assert len(report) == 1 + len(sparsify.layers)
    assert not compiled(np.ones((3, 40), "float32")).any()
    assert [layer.is_sparse for layer in sparsify.layers] == [True]


@pytest.mark.parametrize(
    ("indices", "message"),
    [([0, 0], "expected each place once"), ([0, 99], "expected indices from 0 to 5"), ([-1, 2], "from 0 to 5")],
)
def test_bad_indices(indices: list[int], message: str) -> None:
    values = numpy_helper.from_array(np.ones(2, "float32"), "W")
    weight = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices)), [3, 2])
    node = helper.make_node("MatMul", ["x", "W"], ["y"])
    with pytest.raises(ArgumentError, match=message):
        srelax.from_onnx(network([node], [("x", [4, 3])], [("y", [4, 2])], {}, [weight]))


def test_bad_models(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="model: expected an onnx"):
        srelax.from_onnx(3)
    with pytest.raises(MissingFileError, match="model: expected a file"):
        srelax.from_onnx(tmp_path / "none.onnx")
    with pytest.raises(ArgumentError, match="model: expected an ONNX model"):
        srelax.from_onnx(b"no model")


SIGNAL = np.random.default_rng(3).standard_normal((2, 6, 4, 4)).astype("float32")


@pytest.mark.parametrize(
    ("op", "attributes", "x"),
    [
        ("Celu", {"alpha": 1.7}, SIGNAL),
        ("Clip", {"limits": (0.0, 1.0)}, np.array([np.nan, 2, -1, 0.5], "float32")),
        ("Clip", {"limits": (0.0,)}, np.array([np.nan, 2, -1, 0.5], "float32")),
    ],
)
def test_operators_are_those_of_the_reference(op: str, attributes: dict[str, Any], x: np.ndarray) -> None:
    attributes = dict(attributes)
    limits = attributes.pop("limits", ())
    names = [f"limit{n}" for n in range(len(limits))]
    stored = [onnx.numpy_helper.from_array(np.float32(v), n) for n, v in zip(names, limits, strict=True)]
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, x.shape)
    node = onnx.helper.make_node(op, ["x", *names], ["y"], **attributes)
    graph = onnx.helper.make_graph([node], "one", [given], [result], stored)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(srelax.from_onnx(model)(x)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "int64", "int8"])
def test_places_of_extremes_are_those_of_the_reference(op: str, last: int, dtype: str) -> None:
    """Also where all elements are the smallest, or the largest, of their dtype, and of NaN."""
    limits = (-np.inf, np.inf) if dtype == "float32" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    x = np.array([[low] * 3 for low in limits] + [[1, 5, 5], [2, 1, 1], [limits[0], limits[1], limits[0]]], dtype)
    kind = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    node = onnx.helper.make_node(op, ["x"], ["y"], axis=-1, keepdims=0, select_last_index=last)
    given = onnx.helper.make_tensor_value_info("x", kind, x.shape)
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT64, x.shape[:1])
    graph = onnx.helper.make_graph([node], "places", [given], [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    compiled = srelax.from_onnx(model)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(compiled(x), expected)
    if dtype == "float32":
        x[2:, 1] = np.nan
        np.testing.assert_array_equal(compiled(x)[2:], [1, 1, 1])


def test_a_number_is_added_to_a_product() -> None:
    W, x, c = pruned(12, 5), np.ones((3, 12), "float32"), np.array(2.5, "float32")
    node = onnx.helper.make_node("Gemm", ["x", "W", "C"], ["y"])
    info = lambda name, shape: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)  # noqa: E731
    parts = [info("x", [3, 12]), info("C", [])], [info("y", [3, 5])], [onnx.numpy_helper.from_array(W, "W")]
    graph = onnx.helper.make_graph([node], "number", *parts)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    np.testing.assert_allclose(srelax.from_onnx(model)(x, c), x @ W + c, rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 8, 15])
def test_sparse_weights_with_few_outputs_and_any_batch_on_one_thread(columns: int) -> None:
    """TVM bounds a subscript of their scratch beyond 32 bits."""
    before = sparsetir.get_num_threads()
    sparsetir.set_num_threads(1)
    try:
        W = pruned(20, columns)
        info = lambda name, count: onnx.helper.make_tensor_value_info(name, 1, ["b", count])  # noqa: E731
        node = onnx.helper.make_node("MatMul", ["x", "W"], ["y"])
        graph = onnx.helper.make_graph(
            [node], "head", [info("x", 20)], [info("y", columns)], sparse_initializer=[stored("W", W)]
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
        compiled = srelax.from_onnx(model)
        for batch in (1, 3, 200):
            x = np.random.default_rng(batch).random((batch, 20), dtype="float32")
            np.testing.assert_allclose(compiled(x), x @ W, rtol=1e-5, atol=1e-5)
    finally:
        sparsetir.set_num_threads(before)


def test_what_tvm_does_not_compile_is_refused_by_an_error_of_ours() -> None:
    info = lambda name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, [3])  # noqa: E731
    graph = onnx.helper.make_graph([onnx.helper.make_node("Acosh", ["x"], ["y"])], "half", [info("x")], [info("y")])
    with pytest.raises(LoweringError, match="TVM"):
        srelax.from_onnx(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]))


WITH_NAN = np.array([[1, np.nan, -np.inf, 3], [2, 0.5, 4, 8]], "float32")
AXES = np.array([1])


@pytest.mark.parametrize(
    ("op", "attributes", "arrays"),
    [
        ("ReduceMin", {"keepdims": 0}, [WITH_NAN, AXES]),
        ("ReduceMax", {"keepdims": 1}, [WITH_NAN, AXES]),
        ("ReduceMax", {}, [WITH_NAN[1:]]),
        ("ReduceMin", {"keepdims": 0}, [np.array([[3, -1, 2]], "int32"), AXES]),
        ("Min", {}, [WITH_NAN, WITH_NAN[:, :1], WITH_NAN[1]]),
        ("Max", {}, [WITH_NAN[1], WITH_NAN]),
        ("ReduceSumSquare", {"noop_with_empty_axes": 1}, [WITH_NAN[1]]),
        ("ReduceL1", {"noop_with_empty_axes": 1}, [-WITH_NAN[1]]),
        ("ReduceL2", {"noop_with_empty_axes": 1}, [-WITH_NAN[1]]),
        ("ReduceLogSum", {"noop_with_empty_axes": 1}, [WITH_NAN[1]]),
        ("ReduceSumSquare", {"noop_with_empty_axes": 1, "keepdims": 0}, [WITH_NAN[1:], AXES]),
        ("OneHot", {}, [np.array([2, 0]), np.array(3), np.array([0, 1.5], "float16")]),
        ("OneHot", {"axis": 0}, [np.array([2, -1]), np.array(3), np.array([1, 7], "uint8")]),
    ],
)
def test_corrected_operators_are_those_of_the_reference(op: str, attributes: Any, arrays: list[np.ndarray]) -> None:
    """All inputs but the first are constants where they are integers or values of one-hot rows."""
    names = [f"x{n}" for n in range(len(arrays))]
    is_given = [n == 0 or op in ("Min", "Max") for n in range(len(arrays))]
    info = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a, given in zip(names, arrays, is_given, strict=True)
        if given
    ]
    constants = [numpy_helper.from_array(a, n) for n, a, g in zip(names, arrays, is_given, strict=True) if not g]
    out = helper.make_tensor_value_info(
        "y", helper.np_dtype_to_tensor_dtype(arrays[-1 if op == "OneHot" else 0].dtype), None
    )
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attributes)], "one", info, [out], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    given = {n: a for n, a, is_input in zip(names, arrays, is_given, strict=True) if is_input}
    (expected,) = ReferenceEvaluator(model).run(None, given)
    found = np.asarray(srelax.from_onnx(model)(*given.values()))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def one_node(op: str, arrays: dict[str, np.ndarray], outputs: int = 1, *, fixed: bool = True, **attributes: Any) -> Any:
    """A model of a node with these inputs; those after the first are constants if they are fixed."""
    node = helper.make_node(op, list(arrays), [f"y{n}" for n in range(outputs)], **attributes)
    held = [numpy_helper.from_array(array, name) for name, array in arrays.items() if fixed and name != "x"]
    kind = lambda array: helper.np_dtype_to_tensor_dtype(array.dtype)  # noqa: E731
    given = [
        helper.make_tensor_value_info(name, kind(array), array.shape)
        for name, array in arrays.items()
        if name not in [tensor.name for tensor in held]
    ]
    results = [helper.make_value_info(f"y{n}", onnx.TypeProto()) for n in range(outputs)]
    graph = helper.make_graph([node], "one", given, results, held)
    opset = 20 if op in ("ReduceMax", "ReduceMin", "AveragePool", "IsInf") else 18
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


ROW = np.arange(6, dtype="float32").reshape(1, 1, 6)
SAME_NODES: dict[str, Any] = {
    "layer norm": ("LayerNormalization", {"x": X(2, 3, 4), "s": X(3, 4), "b": X(3, 4)}, 3, {"axis": 1}),
    "positive infinities": ("IsInf", {"x": np.array([1, np.inf, -np.inf], "f4")}, 1, {"detect_negative": 0}),
    "negative infinities": ("IsInf", {"x": np.array([1, np.inf, -np.inf], "f4")}, 1, {"detect_positive": 0}),
    "no rows": ("ReduceMax", {"x": np.ones((3, 0), "f4"), "a": np.array([1])}, 1, {}),
    "no columns": ("ReduceMin", {"x": np.ones((3, 0), "f8"), "a": np.array([1])}, 1, {}),
    "shifted out": ("BitShift", {"x": np.array([1, 6, 7], "u4"), "n": np.array([1, 31, 33], "u4")}, 1,
                    {"direction": "LEFT"}),
    "shape": ("Shape", {"x": X(3, 4, 5)}, 1, {}),
    "part of a shape": ("Shape", {"x": X(3, 4, 5)}, 1, {"start": 1, "end": 2}),
}  # fmt: skip


# Where the reference evaluator leaves the specification.
SPECIFIED_NODES: dict[str, Any] = {
    "dilated window": ("AveragePool", {"kernel_shape": [3], "dilations": [2], "auto_pad": "SAME_UPPER"},
                       [1, 2, 2, 3, 3, 4]),
    "window with gaps": ("MaxPool", {"kernel_shape": [1], "strides": [4], "auto_pad": "SAME_UPPER"}, [0, 4]),
    "valid": ("MaxPool", {"kernel_shape": [3], "strides": [2], "auto_pad": "VALID", "ceil_mode": 1}, [2, 4]),
    "output shape": ("ConvTranspose", {"strides": [2], "output_shape": [12]}, [0, 1, 1, 3, 2, 5, 3, 7, 4, 9, 5, 5]),
    "same sizes": ("ConvTranspose", {"strides": [3], "auto_pad": "SAME_UPPER"},
                   [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIFIED_NODES)
def test_nodes_are_those_of_the_specification(name: str) -> None:
    op, attributes, expected = SPECIFIED_NODES[name]
    arrays = {"x": ROW, "w": np.ones((1, 1, 3), "f4")} if op == "ConvTranspose" else {"x": ROW}
    found = srelax.from_onnx(one_node(op, arrays, **attributes))(ROW)
    np.testing.assert_allclose(found, np.array(expected, "f4").reshape(1, 1, -1))


@pytest.mark.parametrize("name", SAME_NODES)
def test_nodes_are_those_of_the_reference(name: str) -> None:
    op, arrays, outputs, attributes = SAME_NODES[name]
    model = one_node(op, arrays, outputs, **attributes)
    compiled = srelax.from_onnx(model)(arrays["x"])
    expected = ReferenceEvaluator(model).run(None, {"x": arrays["x"]})
    found = compiled if isinstance(compiled, tuple) else (compiled,)
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert (own.shape, own.dtype) == (np.shape(other), np.asarray(other).dtype)
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [[2, 1, 6], [1, 1], [3, 4], [1], [5, 1, 1, 1]])
def test_tensors_are_expanded_to_shapes_that_are_passed(shape: list[int]) -> None:
    x = X(3, 1 if shape[-1] > 4 else 4)
    arrays = {"x": x, "shape": np.array(shape)}
    compiled = srelax.from_onnx(one_node("Expand", arrays, fixed=False))
    np.testing.assert_array_equal(compiled(x, arrays["shape"]), x * np.ones(shape, "f4"))


def test_dropout_keeps_all() -> None:
    kept, mask = srelax.from_onnx(one_node("Dropout", {"x": ROW}, 2))(ROW)
    np.testing.assert_array_equal(kept, ROW)
    assert mask.dtype == bool
    assert mask.all()


IMAGE = X(1, 1, 7)
REFUSED_NODES: dict[str, Any] = {
    "no whole number": ("Resize", {"x": IMAGE, "": None, "s": np.array([1, 1, 0.5], "f4")}, {"mode": "linear"}),
    "antialias=1": ("Resize", {"x": IMAGE, "": None, "s": np.ones(3, "f4")}, {"antialias": 1, "mode": "linear"}),
    "ceil_mode=1": ("LpPool", {"x": IMAGE}, {"kernel_shape": [2], "strides": [2], "ceil_mode": 1}),
    "orders uint64": ("TopK", {"x": np.arange(4, dtype="u8"), "k": np.array([2])}, {}),
    "Only constant axes": ("ReduceSum", {"x": IMAGE, "a": np.array([2])}, {}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_NODES)
def test_nodes_that_tvm_computes_otherwise_are_refused(message: str) -> None:
    op, arrays, attributes = REFUSED_NODES[message]
    arrays = {name: np.zeros(0, "f4") if array is None else array for name, array in arrays.items()}
    names = [name for name in arrays if name]
    model = one_node(op, {name or "roi": array for name, array in arrays.items()}, 1, fixed="axes" not in message,
                     **attributes)  # fmt: skip
    if len(names) < len(arrays):
        model.graph.node[0].input[1] = ""
        del model.graph.initializer[0]
    if op == "TopK":
        model = one_node(op, arrays, 2, **attributes)
    with pytest.raises(LoweringError, match=message):
        srelax.from_onnx(model)


def test_versions_that_the_package_does_not_know_are_refused() -> None:
    model = one_node("Relu", {"x": ROW})
    model.opset_import[0].version = onnx.defs.onnx_opset_version() + 1
    with pytest.raises(LoweringError, match=r"expected operators of version .* or earlier"):
        srelax.from_onnx(model)


@pytest.mark.parametrize(("dims", "message"), [([2**40, 2**30], "elements in 'W'"), (None, "got strings")])
def test_sparse_initializers_that_cannot_be_weights(dims: list[int] | None, message: str) -> None:
    values = numpy_helper.from_array(np.ones(1, "f4") if dims else np.array(["a"], object), "W")
    weight = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([0])), dims or [40, 24])
    nodes = [helper.make_node("MatMul", ["x", "W"], ["y"])]
    with pytest.raises(ArgumentError if dims else ArgumentTypeError, match=message):
        srelax.from_onnx(network(nodes, [("x", [2, 40])], [("y", [2, 24])], {}, [weight]))
