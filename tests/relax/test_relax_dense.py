# SPDX-License-Identifier: Apache-2.0
"""What surrounds the sparse operators in a model: dense products with what follows them, and ordinary functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from scipy.special import erf, expit
from tvm import relax, te, tirx
from tvm.relax import op

import sparsetir.relax as srelax
from sparsetir.codegen.target import native_target
from sparsetir.ir.rewriting import collect
from sparsetir.relax.dense import scheduled
from sparsetir.relax.model import lowered
from sparsetir.relax.operators import constant

pytestmark = pytest.mark.scheduled  # of dense kernels, too


def dense(*shape: int, dtype: str = "float32", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def module(body: Callable[..., Any], *inputs: np.ndarray) -> Any:
    """A module whose main emits what `body` makes of the inputs."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", relax.TensorType(a.shape, str(a.dtype))) for n, a in enumerate(inputs)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(body(builder, *params)))
        builder.emit_func_output(out)
    return builder.get()


def run(mod: Any, *inputs: np.ndarray) -> np.ndarray:
    vm = relax.VirtualMachine(srelax.build(mod), tvm.cpu())
    return vm["main"](*(tvm.runtime.tensor(a) for a in inputs)).numpy()


def kernels(mod: Any) -> list[str]:
    """The functions that compute something in a lowered module."""
    functions = lowered(mod, native_target()).functions.items()
    names = [str(var.name_hint) for var, f in functions if isinstance(f, tirx.PrimFunc)]
    return [name for name in names if not name.startswith("reshape")]


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (2, 3, 48), (1, 1, 48)])
@pytest.mark.parametrize("columns", [512, 100])
def test_a_bias_a_column_and_a_residual_join_a_product_with_a_known_weight(
    shape: tuple[int, ...], columns: int
) -> None:
    x, W, bias, scale = dense(*shape), dense(48, columns), dense(columns, seed=2), dense(1, seed=3)
    other = dense(*shape[:-1], columns, seed=4)

    def body(b: Any, x: Any, other: Any) -> Any:
        y = b.emit(op.add(b.emit(op.matmul(x, constant(W))), constant(bias)))
        return op.nn.relu(b.emit(op.add(other, b.emit(op.multiply(y, constant(scale))))))

    mod = module(body, x, other)
    np.testing.assert_allclose(run(mod, x, other), np.maximum(other + (x @ W + bias) * scale, 0), rtol=1e-4, atol=1e-4)
    assert len(kernels(mod)) == 1


def test_a_sum_of_two_products_is_taken_by_one_of_them() -> None:
    x, y, V, W, bias = dense(5, 24), dense(5, 40), dense(24, 512), dense(40, 512), dense(512)

    def body(b: Any, x: Any, y: Any) -> Any:
        both = b.emit(op.add(b.emit(op.matmul(x, constant(V))), b.emit(op.matmul(y, constant(W)))))
        return op.nn.relu(b.emit(op.add(both, constant(bias))))

    mod = module(body, x, y)
    np.testing.assert_allclose(run(mod, x, y), np.maximum(x @ V + y @ W + bias, 0), rtol=1e-4, atol=1e-4)
    assert len(kernels(mod)) == 2


def test_a_known_left_operand_needs_no_packing() -> None:
    A, x = dense(9, 7), dense(7, 5)
    bias = dense(5)
    body = lambda b, x: op.add(b.emit(op.matmul(constant(A), b.emit(op.add(x, x)))), constant(bias))  # noqa: E731
    np.testing.assert_allclose(run(module(body, x), x), A @ (2 * x) + bias, rtol=1e-4, atol=1e-5)
    W = dense(7, 5, seed=2)  # too narrow to pack
    body = lambda b, x: op.matmul(x, constant(W))  # noqa: E731
    np.testing.assert_allclose(run(module(body, A), A), A @ W, rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_stored_in_blocks() -> None:
    blocks = sp.random_array((48, 16), density=0.06, rng=np.random.default_rng(0), dtype="float32")
    W = sp.csr_array(sp.kron(blocks, np.ones((4, 4), "float32")).multiply(dense(192, 64)))
    x = dense(16, 64)
    body = lambda b, x: srelax.linear(x, *srelax.csr_constants(W))  # noqa: E731
    np.testing.assert_allclose(run(module(body, x), x), x @ W.T, rtol=1e-4, atol=1e-4)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sigmoid": (op.sigmoid, expit),
    "tanh": (op.tanh, np.tanh),
    "erf": (op.erf, erf),
    "exp": (op.exp, np.exp),
    "silu": (op.nn.silu, lambda x: x * expit(x)),
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_ordinary_operators_are_arithmetic(name: str, dtype: str) -> None:
    make, by_numpy = FUNCTIONS[name]
    special = np.array([0.0, -0.0, 1e-8, -1e-8, 40.0, -40.0, 80.0, -80.0])
    x = np.concatenate([special, 4 * dense(300, dtype="float64")]).astype(dtype)
    got = run(module(lambda b, x: make(x), x), x)
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(got, by_numpy(x.astype("float64")), rtol=tolerance, atol=tolerance)


def test_the_exponentials_of_a_softmax_are_computed_once() -> None:
    x = dense(40, 100)
    mod = module(lambda b, x: op.nn.softmax(x), x)
    power = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(run(mod, x), power / power.sum(axis=1, keepdims=True), rtol=1e-5)
    assert lowered(mod, native_target()).script().count("rint") == 1


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_of_an_operand_that_is_broadcast_are_computed_once(name: str) -> None:
    """As a gate of each row, column or channel: TVM's vectorizer refuses arithmetic in which no lane differs."""
    make, by_numpy = FUNCTIONS[name]
    shapes = [((1, 1), (30, 64)), ((30, 1), (30, 64)), ((64,), (30, 64)), ((2, 5, 1, 1), (2, 5, 3, 16)), ((1,), (1,))]
    for gate, shape in shapes:
        x, y = 4 * dense(*gate), dense(*shape, seed=2)
        mod = module(lambda b, x, y: op.multiply(b.emit(op.multiply(b.emit(make(x)), x)), y), x, y)
        np.testing.assert_allclose(run(mod, x, y), by_numpy(x.astype("f8")) * x * y, rtol=1e-5, atol=1e-5)


def test_functions_keep_infinities_and_what_is_no_number() -> None:
    x = np.array([np.inf, -np.inf, np.nan] * 6, "float32")
    for name, want in (("sigmoid", [1, 0, np.nan]), ("tanh", [1, -1, np.nan]), ("erf", [1, -1, np.nan])):
        got = run(module(lambda b, x, name=name: FUNCTIONS[name][0](x), x), x)
        np.testing.assert_allclose(got, np.array(want * 6, "float32"), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0), (0, 2), (1, 0)])
def test_copies_without_elements(shape: tuple[int, int]) -> None:
    """TVM makes copies reshapes, in which a size of zero means "as in the argument"."""
    x = np.zeros(shape, "float32")
    for body, expected in (
        (lambda b, v: op.permute_dims(v), x.T),
        (lambda b, v: op.concat([v, v], 1), np.concatenate([x, x], 1)),
        (lambda b, v: op.broadcast_to(v, (3, *shape)), np.broadcast_to(x, (3, *shape))),
        (lambda b, v: op.sum(b.emit(op.permute_dims(v)), 0), x.T.sum(0)),
    ):
        np.testing.assert_array_equal(run(module(body, x), x), expected)


def test_transpositions_in_tiles() -> None:
    """Transpositions of any shape and dtype, with arithmetic around them, also of sizes that are known at run time."""
    rng, builder = np.random.default_rng(0), relax.BlockBuilder()
    shapes = [(64, 1024), (200, 328), (193, 251), (3, 128, 96), (4, 48, 16, 24), (256, 7)]
    arrays = [(100 * rng.standard_normal(shape)).astype(d) for shape in shapes for d in ("float32", "int8")]
    rows = tirx.Var("rows", "int64")
    params = [relax.Var(f"x{n}", relax.TensorType(list(a.shape), str(a.dtype))) for n, a in enumerate(arrays)]
    params.append(relax.Var("x", relax.TensorType([rows, 300], "float32")))
    arrays.append(rng.standard_normal((190, 300)).astype("float32"))
    with builder.function("main", params):
        with builder.dataflow():
            results = []
            for param in params:
                order = [*range(param.ty.ndim - 2), param.ty.ndim - 1, param.ty.ndim - 2]
                more = builder.emit(op.add(param, relax.const(1, str(param.ty.dtype.dtype))))
                results += [builder.emit(op.permute_dims(value, order)) for value in (param, more)]
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    found = relax.VirtualMachine(srelax.build(builder.get()), tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    for n, array in enumerate(arrays):
        np.testing.assert_array_equal(found[2 * n].numpy(), array.swapaxes(-1, -2))
        np.testing.assert_array_equal(found[2 * n + 1].numpy(), (array + array.dtype.type(1)).swapaxes(-1, -2))


def test_transpositions_read_lines_whole() -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([64, 1024], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(op.permute_dims(x))
        builder.emit_func_output(out)
    mod = lowered(builder.get(), native_target())
    (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert [int(loop.extent) for loop in collect(func.body, tirx.For)] == [1024 // 8 * 64 // 8, 8, 8]


def test_a_mask_meets_one_that_is_constant_in_vectors() -> None:
    """TVM keeps a vector of loaded bools in bytes and one of constants in bits, and LLVM refuses to combine them."""
    mask, x = te.placeholder((64, 64), "bool", name="mask"), te.placeholder((64, 64), "float32", name="x")
    whole = te.compute((64, 64), lambda *_: tirx.const(True, "bool"), name="whole")

    def element(_b: Any, i: Any, j: Any) -> Any:
        chosen = tirx.Cast("int64", tirx.And(mask[i, j], whole[i, j])) > tirx.const(0, "int64")
        return tirx.Select(chosen, x[i, j], tirx.const(2, "float32"))

    func = scheduled(te.create_prim_func([mask, x, te.compute((4, 64, 64), element, name="y")]))
    assert "T.vectorized" in func.script()
    rng = np.random.default_rng(0)
    arrays = rng.random((64, 64)) < 0.5, rng.random((64, 64), "float32"), np.zeros((4, 64, 64), "float32")
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(func, target=native_target())(*tensors)
    np.testing.assert_array_equal(tensors[2].numpy()[3], np.where(arrays[0], arrays[1], 2))


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_run_in_lanes(kind: str, axis: int) -> None:
    """Each lane has some elements of a row, or a column; the largest and smallest begin with infinities."""
    x, k = te.placeholder((128, 128), "float32", name="x"), te.reduce_axis((0, 128), "k")
    read = (lambda i: x[k, i]) if axis == 0 else (lambda i: x[i, k])
    y = te.compute((128,), lambda i: getattr(te, kind)(read(i), axis=k), name="y")
    text = scheduled(te.create_prim_func([x, y])).script()
    assert "T.vectorized(16)" in text
    assert ("y_rf" in text) == (axis == 1)
    assert ("inf" in text) == (kind != "sum")
