# SPDX-License-Identifier: Apache-2.0
"""Gradients of Relax operators in float64, element by element against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import ir, relax, tirx

import sparsetir.relax as srelax
from each import share
from sparsetir.errors import ArgumentError, LoweringError, own_errors
from sparsetir.relax import gradients
from sparsetir.relax.gradients import GRADIENTS
from sparsetir.relax.operators import OPERATORS, call, constant
from sparsetir.relax.structures import transposed

STEP = 1e-6
ZEROS = np.zeros(3, "int32")
INDICES = {"count", "indptr", "indices", "kinds", "left", "right"}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def matrix(m: int = 7, n: int = 5, *, nnz: int = 15, idtype: str = "int32") -> dict[str, np.ndarray]:
    """CSR arrays with an empty row and an empty column."""
    found = sp.random_array((m, n), density=nnz / (m * n), format="lil", rng=rng(m + n))
    found[2], found[:, n - 1] = 0, 0
    csr = found.tocsr()
    arrays = {"data": csr.data, "indptr": csr.indptr.astype(idtype), "indices": csr.indices.astype(idtype)}
    return {**arrays, "data": rng(1).standard_normal(csr.nnz)}


def dense(*shape: int, seed: int = 3) -> np.ndarray:
    return rng(seed).standard_normal(shape)


def summed(
    make: Callable[..., Any],
    args: dict[str, np.ndarray],
    fixed: set[str],
    symbolic: bool = False,
    *,
    emits: bool = False,
) -> Any:
    """A module whose main makes an expression of its parameters and sums it with different weights."""
    builder, known, params, sizes = relax.BlockBuilder(), {}, [], {}
    symbol = lambda n: sizes.setdefault(n, tirx.Var(f"s{n}", "int64")) if symbolic else n  # noqa: E731
    for name, value in args.items():
        known[name] = constant(value)
        if name not in fixed:
            shape = [symbol(n) for n in value.shape]
            known[name] = relax.Var(name, relax.TensorType(shape, str(value.dtype)))
            params.append(known[name])
    with builder.function("main", params):
        with builder.dataflow():
            y = builder.emit(make(*known.values(), **({"emit": builder.emit} if emits else {})))
            wave = builder.emit(relax.op.sin(relax.op.multiply(y, relax.const(3.0, str(y.ty.dtype.dtype)))))
            loss = builder.emit_output(relax.op.sum(wave))
        builder.emit_func_output(loss)
    return builder.get()


def check(
    make: Callable[..., Any],
    args: dict[str, np.ndarray],
    *,
    fixed: set[str] = frozenset(),
    forward: Callable[..., np.ndarray] | None = None,
    **options: Any,
) -> Any:
    """Compare every gradient with finite differences; the module with the gradient.

    They are those of the module, or of `forward` in float64 where TVM computes in float32.
    """
    mod = summed(make, args, fixed, **options)
    params = [p for p in mod["main"].params if str(p.name) not in INDICES]
    both = relax.transform.Gradient("main", require_grads=params)(mod)
    vm = relax.VirtualMachine(srelax.build(both), tvm.cpu())
    names = [n for n in args if n not in fixed]
    held = {n: np.array(args[n]) for n in names}
    call = lambda function: vm[function](*(tvm.runtime.tensor(held[n]) for n in names))  # noqa: E731
    gradients = [g.numpy() for g in call("main_adjoint")[1]]
    value = lambda: float(call("main").numpy())  # noqa: E731
    if forward is not None:
        held = {n: array.astype("float64") for n, array in held.items()}
        value = lambda: float(np.sin(3 * forward(*held.values())).sum())  # noqa: E731
    rtol, atol = (1e-5, 1e-7) if forward is None else (1e-3, 1e-5)
    for param, found in zip(params, gradients, strict=True):
        want = differences(held[str(param.name)], value)
        np.testing.assert_allclose(found, want, rtol=rtol, atol=atol, err_msg=str(param.name))
    return both


def differences(array: np.ndarray, value: Callable[[], float]) -> np.ndarray:
    """How a value changes with each element of an array."""
    found = np.zeros_like(array)
    for at in np.ndindex(*array.shape):
        kept, sides = array[at], []
        for side in (STEP, -STEP):
            array[at] = kept + side
            sides.append(value())
        array[at], found[at] = kept, (sides[0] - sides[1]) / (2 * STEP)
    return found


A, S = matrix(), {"indptr": matrix()["indptr"]}
NNZ = A["data"].size
KINDS = {"X": dense(5, 3), "W": dense(4, 3, 2), "indptr": A["indptr"], "indices": A["indices"]}
MASK = matrix(4, 4, nnz=8)
BLOCKS = {
    **{name: dense(2, 8, feat, seed=n) for n, (name, feat) in enumerate({"Q": 3, "K": 3, "V": 2}.items())},
    **{name: MASK[name] for name in ("indptr", "indices")},
}
CASES: dict[str, tuple[Callable[..., Any], dict[str, np.ndarray]]] = {
    "spmm": (srelax.spmm, {**A, "B": dense(5, 3)}),
    "spmm of a batch": (srelax.spmm, {**A, "B": dense(2, 5, 3)}),
    "spmv": (srelax.spmv, {**A, "x": dense(5)}),
    "linear": (srelax.linear, {"x": dense(2, 3, 5), **A}),
    "linear of a vector": (srelax.linear, {"x": dense(5), **A}),
    "sddmm": (srelax.sddmm, {**A, "X": dense(7, 3), "Y": dense(5, 3, seed=4)}),
    "softmax": (srelax.softmax, {"data": A["data"], **S}),
    **{
        f"segment_{kind} {len(feat)}": (partial(srelax.segment_reduce, reduce=kind), {"x": dense(NNZ, *feat), **S})
        for kind in ("sum", "mean", "max", "min")
        for feat in ((), (3,))
    },
    "gather_matmul_scatter": (
        srelax.gather_matmul_scatter,
        {**KINDS, "kinds": rng().choice([0, 1, 3], NNZ).astype("int32")},
    ),
    "attention": (partial(srelax.attention, scale=0.7), BLOCKS),
    "dropout": (lambda x, count: call("dropout", x, count, 0.4, 1), {"x": dense(4, 5), "count": np.array(3)}),
    "segment_expand": (lambda x, indptr: srelax.segment_expand(x, indptr, NNZ), {"x": dense(7, 3), **S}),
}


QUICK = ("spmm", "linear", "sddmm", "softmax", "segment_max 1", "segment_mean 0", "gather_matmul_scatter", "dropout")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    make, args = CASES[name]
    check(make, args)


def test_gradients_of_three_products() -> None:
    """The product takes float32 only; its gradients are in float32."""
    half = {"data": A["data"] / 2, "B": dense(5, 3) / 2}  # so that the loss changes slowly with the product
    args = {**A, **{name: array.astype("float32") for name, array in half.items()}}

    def forward(data: np.ndarray, indptr: np.ndarray, indices: np.ndarray, B: np.ndarray) -> np.ndarray:
        return sp.csr_array((data, indices.astype("int32"), indptr.astype("int32")), shape=(7, 5)) @ B

    check(partial(call, "spmm_bf16x3"), args, forward=forward)


@pytest.mark.slow
@pytest.mark.parametrize("name", share(CASES, 2))
def test_gradients_with_a_constant_structure(name: str) -> None:
    make, args = CASES[name]
    both = check(make, args, fixed=INDICES & set(args))
    assert "sparse.transpose" not in both.script()


op = relax.op
X = dense(2, 4, 3)
DENSE: dict[str, tuple[Callable[..., Any], dict[str, np.ndarray]]] = {
    "nn.gelu": (op.nn.gelu, {"x": X}),
    "nn.gelu_tanh": (op.nn.gelu_tanh, {"x": X}),
    "nn.leakyrelu": (lambda x: op.nn.leakyrelu(x, 0.1), {"x": X}),
    "nn.relu": (op.nn.relu, {"x": X}),
    "nn.selu": (op.nn.selu, {"x": X}),
    "nn.softplus": (lambda x: op.nn.softplus(x, 2.0, 1.5), {"x": X}),
    "clip": (lambda x: op.clip(x, -0.5, 0.5), {"x": X}),
    "erf": (op.erf, {"x": X}),
    "rsqrt": (op.rsqrt, {"x": np.abs(X) + 0.5}),
    "square": (op.square, {"x": X}),
    "sinh": (op.sinh, {"x": X}),
    "cosh": (op.cosh, {"x": X}),
    "tan": (op.tan, {"x": X / 3}),
    "atan": (op.atan, {"x": X}),
    "squeeze": (lambda x: op.squeeze(x, [1]), {"x": dense(4, 1, 3)}),
    "flatten": (op.flatten, {"x": X}),
    "nn.batch_flatten": (op.nn.batch_flatten, {"x": X}),
    "stack": (lambda x, y: op.stack([x, y, x], axis=1), {"x": X, "y": dense(2, 4, 3, seed=7)}),
    "max": (lambda x: op.max(x, axis=[0, -1]), {"x": X}),
    "min": (lambda x: op.min(x, axis=1, keepdims=True), {"x": X}),
    "take": (lambda x: op.take(x, relax.const([2, 0, 2, 3], "int64"), axis=-2, mode="clip"), {"x": X}),
    "strided_slice": (lambda x: op.strided_slice(x, [1, -1], [1, 2], [3, -9], [1, -2]), {"x": X}),
    "flip": (lambda x: op.flip(x, 1), {"x": X}),
    "topk": (lambda x: relax.TupleGetItem(op.topk(x, 2, -1), 0), {"x": X}),
    "scatter_elements": (
        lambda x, y: op.scatter_elements(x, relax.const([[1, 0, 1], [1, 3, 1]], "int64"), y, -2, "add"),
        {"x": X[0], "y": dense(2, 3, seed=8)},
    ),
    "gather_elements": (lambda x: op.gather_elements(x, relax.const([[1, 0, 1]], "int64"), 0), {"x": X[0]}),
    "concat": (lambda x: op.concat([op.concat([x], 0), x], -1), {"x": X}),
    "tile": (lambda x: op.tile(x, [2, 1, 3, 2]), {"x": X}),
    "nn.dropout": (lambda x: relax.TupleGetItem(op.nn.dropout(x, 0.5), 0), {"x": X}),
}
OTHERS = {
    "max of all": (op.max, {"x": X}),
    "take of one": (lambda x: op.take(x, relax.const(1, "int64"), 1, mode="clip"), {"x": X}),
    "slice of nothing": (lambda x: op.concat([op.strided_slice(x, [0], [1], [1]), x], 0), {"x": X}),
    "slice of all": (lambda x: op.strided_slice(x, [1], [-9], [9]), {"x": X}),
    "topk, values": (lambda x: op.topk(x, 1, 1, "values", False), {"x": X}),
    "scatter_elements, update": (
        lambda x, y: op.scatter_elements(x, relax.const([[1, 0, 3], [2, 3, 1]], "int64"), y, 0),
        {"x": X[0], "y": dense(2, 3, seed=8)},
    ),
    "stack of one": (lambda x: op.stack([x]), {"x": X}),
}


def normed(x: np.ndarray, weight: Any = 1, bias: Any = 0, *, axes: Any = -1, center: bool = True) -> np.ndarray:
    """A norm in numpy."""
    centred = x - x.mean(axes, keepdims=True) if center else x
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-5) * weight + bias


NORMS = {
    "layer_norm": (-1, (3,), {}),
    "layer_norm of two axes": ([-2, -1], (4, 3), {}),
    "layer_norm without weights": (-1, (3,), {"center": False, "scale": False}),
    "layer_norm of everything": ([0, 1, 2], (2, 4, 3), {}),
    "rms_norm": (-1, (3,), None),
}


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms(name: str) -> None:
    axes, shape, options = NORMS[name]
    own = {"x": X.astype("float32"), "weight": dense(*shape, seed=5).astype("float32")}
    along = tuple(np.atleast_1d(axes))
    if options is None:
        forward = partial(normed, axes=along, center=False)
        check(lambda x, weight: op.nn.rms_norm(x, weight, axes=axes), own, forward=forward)
        return
    own["bias"] = dense(*shape, seed=6).astype("float32")
    if options:  # TVM computes with both all the same
        own["weight"], own["bias"] = np.ones(shape, "float32"), np.zeros(shape, "float32")
    forward = (lambda x, _weight, _bias: normed(x, axes=along)) if options else partial(normed, axes=along)
    check(lambda *a: op.nn.layer_norm(*a, axes=axes, **options), own, forward=forward)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"center": False, "scale": False}])
def test_gradients_of_group_norm(options: dict[str, bool]) -> None:
    own = {"x": dense(2, 4, 3, seed=4).astype("float32")}
    own["weight"], own["bias"] = (dense(4, seed=n).astype("float32") for n in (5, 6))
    if options:  # TVM computes with both all the same
        own["weight"], own["bias"] = np.ones(4, "float32"), np.zeros(4, "float32")

    def forward(x: Any, weight: Any, bias: Any) -> Any:
        along = [part.reshape(2, 2, 1) for part in ((np.ones(4), np.zeros(4)) if options else (weight, bias))]
        return normed(x.reshape(2, 2, 2, 3), *along, axes=(2, 3)).reshape(x.shape)

    make = lambda *a: op.nn.group_norm(*a, num_groups=2, channel_axis=1, axes=[2], **options)  # noqa: E731
    check(make, own, forward=forward)


@pytest.mark.slow
def test_gradients_of_dense_operators() -> None:
    """All in one module, which takes a second to compile; a message names the operator."""
    cases = {**DENSE, **OTHERS}

    def make(*params: Any, emit: Callable[[Any], Any]) -> Any:
        left = iter(params)
        parts = [emit(write(*(next(left) for _ in args))) for write, args in cases.values()]
        return op.concat([emit(op.reshape(part, [-1])) for part in parts])

    check(
        make, {f"{name} {arg}": value for name, (_, args) in cases.items() for arg, value in args.items()}, emits=True
    )


ROWS = {
    "take of rows": (lambda x: op.take(x, relax.const([[3, 0], [3, 1]], "int64"), 0, mode="clip"), {"x": X[0]}),
    "take of sorted rows": (lambda x: op.take(x, relax.const([0, 1, 1], "int64"), 0, mode="clip"), {"x": X}),
}


@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_rows_that_are_taken(name: str) -> None:
    make, args = ROWS[name]
    assert "R.sparse.segment_sum" in check(make, args).script()


def test_every_dense_gradient_is_compared() -> None:
    others = {"nn.layer_norm", "nn.rms_norm", "nn.group_norm", "grad.no_grad"}
    assert {*DENSE, *others} == set(gradients.DENSE_GRADIENTS)


def test_gradients_end_where_a_program_says_so() -> None:
    x = np.array([0.5, -2.0, 3.0])
    mod = summed(lambda x: x * op.grad.no_grad(x * x), {"x": x}, set())
    both = relax.transform.Gradient("main")(mod)
    vm = relax.VirtualMachine(srelax.build(both), tvm.cpu())
    (found,) = vm["main_adjoint"](tvm.runtime.tensor(x))[1]
    np.testing.assert_allclose(found.numpy(), 3 * x**2 * np.cos(3 * x**3), rtol=1e-5)


def test_the_gradient_of_relu_at_zero_is_zero() -> None:
    mod = summed(op.nn.relu, {"x": np.zeros(2)}, set())
    both = relax.transform.Gradient("main")(mod)
    vm = relax.VirtualMachine(srelax.build(both), tvm.cpu())
    (found,) = vm["main_adjoint"](tvm.runtime.tensor(np.array([0.0, 1.0])))[1]
    np.testing.assert_allclose(found.numpy(), [0, 3 * np.cos(3)])


@pytest.mark.slow
@pytest.mark.parametrize("m", [7, 1])
def test_gradients_with_symbolic_sizes(m: int) -> None:
    found = matrix(m, 11, nnz=9, idtype="int64") if m > 1 else {**A, "indptr": np.array([0, NNZ], "int32")}
    both = check(srelax.spmm, {**found, "B": dense(11 if m > 1 else 5, 3)}, symbolic=True)
    assert "R.sparse.transpose(indptr, indices, s" in both.script()
    tvm.ir.assert_structural_equal(tvm.script.from_source(both.script()), both)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 2)])
def test_gradients_of_nothing(shape: tuple[int, int]) -> None:
    m, n = shape
    none = {"data": np.zeros(0), "indptr": np.zeros(m + 1, "int32"), "indices": np.zeros(0, "int32")}
    check(srelax.spmm, {**none, "B": dense(n, 2)})


@pytest.mark.slow
def test_gradients_of_equal_maxima_are_shared() -> None:
    args = {"x": np.array([1.0, 2.0, 2.0, 3.0]), "indptr": np.array([0, 3, 3, 4], "int32")}
    mod = summed(lambda x, indptr: srelax.segment_reduce(x, indptr, "max"), args, set())
    both = relax.transform.Gradient("main", require_grads=mod["main"].params[0])(mod)
    vm = relax.VirtualMachine(srelax.build(both), tvm.cpu())
    (found,) = vm["main_adjoint"](*map(tvm.runtime.tensor, args.values()))[1]
    slope = 3 * np.cos(3 * np.array([2.0, 3.0]))
    np.testing.assert_allclose(found.numpy(), [0, slope[0] / 2, slope[0] / 2, slope[1]])


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_structures_transposed_at_run_time_are_those_of_scipy(idtype: str) -> None:
    builder = relax.BlockBuilder()
    p, nnz, n = (tirx.Var(name, "int64") for name in ("p", "nnz", "n"))
    params = [relax.Var(name, relax.TensorType([size], idtype)) for name, size in (("indptr", p), ("indices", nnz))]
    params.append(relax.Var("like", relax.TensorType([n], "float32")))
    with builder.function("main", params):
        with builder.dataflow():
            found = builder.emit_output(builder.emit(srelax.transpose(*params[:2], n)))
        builder.emit_func_output(found)
    run = relax.VirtualMachine(srelax.build(builder.get()), tvm.cpu())["main"]
    many = matrix(40, 30, nnz=200, idtype=idtype)
    several = {"indptr": np.array([0, 3, 4], idtype), "indices": np.array([1, 0, 1, 1], idtype)}  # unsorted, repeated
    none = {"indptr": np.zeros(1, idtype), "indices": np.zeros(0, idtype)}
    for structure, columns in ((many, 30), (several, 2), (none, 0), (none, 5)):
        arrays = (structure["indptr"], structure["indices"], np.zeros(columns, "float32"))
        parts = [part.numpy() for part in run(*map(tvm.runtime.tensor, arrays))]
        for part, want in zip(parts, transposed(*arrays[:2], columns), strict=True):
            assert part.dtype == idtype
            np.testing.assert_array_equal(part, want)
    with pytest.raises(Exception, match=r"R\.sparse\.transpose: indices must be from 0"):
        run(*map(tvm.runtime.tensor, (many["indptr"], many["indices"], np.zeros(3, "float32"))))


def test_wrong_constant_structures_are_refused_before_they_are_transposed() -> None:
    wrong = {**A, "indices": A["indices"] + 3}
    with pytest.raises(ArgumentError, match=r"R\.sparse\.spmm: indices must be from 0 to 4, got 3 to"):
        gradient(summed(srelax.spmm, {**wrong, "B": dense(5, 3)}, {"indptr", "indices"}))


def gradient(mod: Any) -> Any:
    with own_errors():
        return relax.transform.Gradient("main")(mod)


def test_every_operator_has_a_gradient_or_refuses_it() -> None:
    assert set(GRADIENTS) == set(OPERATORS)
    for name in OPERATORS:
        assert ir.Op.get(f"relax.sparse.{name}").get_attr("FPrimalGradient") is not None


def test_gradients_of_gradients_of_attention_are_refused() -> None:
    lse = lambda Q, K, indptr, indices: call("attention_lse", Q, K, indptr, indices, 1.0)  # noqa: E731
    args = {name: BLOCKS[name] for name in ("Q", "K", "indptr", "indices")}
    with pytest.raises(LoweringError, match=r"attention_lse stands in a gradient and has no gradient itself"):
        gradient(summed(lse, args, set()))


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (
            lambda x, indptr: srelax.segment_expand(x, indptr, 4),
            {"x": dense(3), "indptr": np.zeros(3, "int32")},
            "segment_expand takes x with an element for each row, got 3 for 2 rows",
        ),
        (
            lambda x, indptr: srelax.segment_expand(x, indptr, relax.const(4)),
            {"x": dense(2), "indptr": np.zeros(3, "int32")},
            "segment_expand takes nnz as a number of int64",
        ),
        (
            srelax.gather_outer,
            {"X": dense(2, 2), "Y": dense(2, 2), "indptr": ZEROS[:3], "left": ZEROS[:3], "right": ZEROS[:2]},
            "left.shape.0. is 3 but right.shape.0. is 2",
        ),
    ],
)
def test_wrong_arguments_name_the_operator(make: Any, args: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        summed(make, args, set())
