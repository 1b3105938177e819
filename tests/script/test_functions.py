# SPDX-License-Identifier: Apache-2.0
"""Functions of one number in kernels whose sums may be taken in any order, and in models beside them, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import relax
from tvm.script import relax as R

import sparsetir
import sparsetir.relax
from each import share

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sinh": np.sinh, "cosh": np.cosh, "tan": np.tan, "sin": np.sin, "cos": np.cos, "exp": np.exp, "log": np.log,
    "sqrt": np.sqrt, "tanh": np.tanh, "atan": np.arctan, "asin": np.arcsin, "acos": np.arccos, "asinh": np.arcsinh,
    "atanh": np.arctanh, "floor": np.floor, "ceil": np.ceil, "round": np.round, "trunc": np.trunc,
}  # fmt: skip
PROGRAM = """
@T.prim_func
def program(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
            m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "{dtype}")
    B = T.match_sparse_buffer(b, (J_dense, K), "{dtype}")
    C = T.match_sparse_buffer(c, (I, K), "{dtype}")
    with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]:
        with T.init():
            C[i, k] = T.{dtype}(0)
        C[i, k] = C[i, k] + A[i, j] * {value}
"""
A = sp.random_array((20, 30), density=0.3, format="csr", dtype="float64", rng=np.random.default_rng(0))


def numbers(dtype: str) -> np.ndarray:
    return np.linspace(0.003, 0.95, 30 * 16).reshape(30, 16).astype(dtype)


def agrees(value: str, dtype: str, expected: Callable[[Any], Any]) -> None:
    kernel = sparsetir.build(sparsetir.parse(PROGRAM.format(dtype=dtype, value=value)))
    B, matrix = numbers(dtype), A.astype(dtype)
    rtol = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(kernel(A=matrix, B=B), matrix @ expected(B), rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FUNCTIONS][:3] + share([*FUNCTIONS][3:], 5))
def test_in_a_kernel(name: str) -> None:
    for dtype in ("float32", "float64"):
        agrees(f"T.{name}(B[j, k])", dtype, FUNCTIONS[name])


def test_a_sine_over_a_cosine() -> None:
    agrees("(T.sin(B[j, k]) / T.cos(B[j, k]))", "float32", np.tan)


@pytest.mark.slow
def test_hyperbolic_functions_of_any_size() -> None:
    for dtype, largest in (("float32", 89.0), ("float64", 710.0)):
        x = np.concatenate([np.logspace(-30, 0, 200), np.linspace(0.5, largest, 200)]).astype(dtype)
        x = np.concatenate([-x, [0], x]).astype(dtype)
        one = sp.csr_array(np.ones((1, 1), dtype))
        for name in ("sinh", "cosh"):
            kernel = sparsetir.build(sparsetir.parse(PROGRAM.format(dtype=dtype, value=f"T.{name}(B[j, k])")))
            found, wanted = kernel(A=one, B=x[None])[0], FUNCTIONS[name](x.astype("float64"))
            np.testing.assert_allclose(found, wanted.astype(dtype), rtol=2e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_numbers(dtype: str) -> None:
    """No function loses the digits of small numbers, nor a power of ten those of its exponent."""
    x = np.concatenate([np.logspace(-37, -0.01, 150), [0.0]]).astype(dtype)
    x = np.concatenate([-x, x, [20.0, -30.0, 37.0]]).astype(dtype)
    inner = {name: FUNCTIONS[name] for name in ("tanh", "sinh", "atanh", "asinh", "tan", "sin", "atan", "asin")}
    wanted = {**inner, "log1p": np.log1p, "exp10": lambda v: 10.0**v}
    handles = "".join(f"c{n}: T.handle, " for n in range(len(wanted)))
    declared = "".join(f'    C{n} = T.match_sparse_buffer(c{n}, (I,), "{dtype}")\n' for n in range(len(wanted)))
    bodies = "".join(f"        C{n}[i] = T.{name}(A[i])\n" for n, name in enumerate(wanted))
    program = sparsetir.parse(
        f"@T.prim_func\ndef f(a: T.handle, {handles}m: T.int32):\n    I = T.dense_fixed(m)\n"
        f'    A = T.match_sparse_buffer(a, (I,), "{dtype}")\n{declared}'
        f'    with T.sp_iter([I], "S", "f") as [i]:\n{bodies}'
    )
    found = sparsetir.build(program)(A=x)
    rtol = 5e-6 if dtype == "float32" else 1e-13
    for (name, function), array in zip(wanted.items(), found, strict=True):
        held = array[:-3] if name != "exp10" else array
        with np.errstate(all="ignore"):
            expected = function(x.astype("float64"))[: len(held)].astype(dtype)
        np.testing.assert_allclose(held, expected, rtol=rtol, err_msg=name)
        assert np.array_equal(np.signbit(held), np.signbit(expected)), name


@pytest.mark.slow
def test_functions_that_bind_names_of_every_bfloat16() -> None:
    """Arguments are widened and results are rounded inside expressions with bound names."""
    every = np.arange(1 << 16, dtype="uint16").view(ml_dtypes.bfloat16)
    x = every[np.abs(every.astype("float32")) < 80]
    one = sp.csr_array(np.ones((1, 1), "float32"))
    for name in ("sinh", "exp"):
        text = PROGRAM.format(dtype="bfloat16", value=f"T.{name}(B[j, k])").replace(
            '(a, (I, J), "bfloat16")', '(a, (I, J), "float32")'
        )
        text = text.replace("A[i, j] *", "T.bfloat16(A[i, j]) *")
        found = sparsetir.build(sparsetir.parse(text))(A=one, B=x[None])[0]
        wanted = FUNCTIONS[name](x.astype("float64")).astype(ml_dtypes.bfloat16)
        np.testing.assert_allclose(found.astype("float64"), wanted.astype("float64"), rtol=2**-8)


@pytest.mark.parametrize("name", ["sinh", "cosh", "tan"])
def test_in_a_model(name: str) -> None:
    builder = relax.BlockBuilder()
    types = [R.Tensor((30, 16), "float32"), R.Tensor((A.nnz,), "float32")]
    types += [R.Tensor((21,), "int32"), R.Tensor((A.nnz,), "int32")]
    x, *matrix = [relax.Var(n, t) for n, t in zip(("x", "data", "indptr", "indices"), types, strict=True)]
    with builder.function("main", [x, *matrix]):
        with builder.dataflow():
            inner = builder.emit(getattr(relax.op, name)(x))
            out = builder.emit_output(builder.emit(sparsetir.relax.spmm(*matrix, inner)))
        builder.emit_func_output(out)
    machine = relax.VirtualMachine(sparsetir.relax.build(builder.get()), tvm.cpu())
    arrays = [numbers("float32"), A.data.astype("float32"), A.indptr.astype("int32"), A.indices.astype("int32")]
    found = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    np.testing.assert_allclose(found, A @ FUNCTIONS[name](arrays[0].astype("float64")), rtol=1e-4)
