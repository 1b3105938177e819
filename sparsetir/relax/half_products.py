# SPDX-License-Identifier: Apache-2.0
"""Products with constant weights in bfloat16: candidates of `SparsifyWeights`, dense and sparse.

before::

    lv1 = R.matmul(x, w)

after ("dense bfloat16")::

    lv1 = R.matmul(R.astype(x, "bfloat16"), w_rounded, out_dtype="float32")

after ("sparse bf16x3")::

    lv1 = R.permute_dims(R.sparse.spmm_bf16x3(data, indptr, indices, R.permute_dims(x)))

Units multiply rows of a dense operand that are interleaved, so that sparse products have the columns of x last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse as sp
import tvm
from tvm import relax

from sparsetir.ir.halves import PRECISIONS
from sparsetir.relax import dense
from sparsetir.relax.epilogues import product
from sparsetir.relax.model import build
from sparsetir.relax.operators import call as sparse_call
from sparsetir.relax.operators import constant, reshape
from sparsetir.workloads.choice import Timer, timer_of

(IN_PARTS,) = PRECISIONS
DTYPES = ("float32", IN_PARTS, dense.HALF)
TOLERANCES = {IN_PARTS: 1e-3, dense.HALF: 2e-2}  # Of the norm of a result.
Rewrite = Callable[[Any], Any]


def _astype(x: Any, dtype: str) -> Any:
    return relax.op.astype(x, dtype)


def _dense(weight: np.ndarray, x: Any, *, is_linear: bool) -> Any:
    rounded = np.ascontiguousarray(weight.T if is_linear else weight).astype(ml_dtypes.bfloat16)
    operands = (_astype(x, dense.HALF), constant(rounded))
    return relax.op.matmul(*(operands if is_linear else operands[::-1]), out_dtype="float32")


def _sparse(csr: tuple[Any, ...], x: Any, *, is_linear: bool, in_parts: bool) -> Any:
    x = x if in_parts else _astype(x, dense.HALF)
    columns = relax.op.permute_dims(x) if is_linear else x
    result = sparse_call("spmm_bf16x3" if in_parts else "spmm", *csr, columns)
    result = relax.op.permute_dims(result) if is_linear else result
    return result if in_parts else _astype(result, "float32")


def rewrites(operator: str, weight: np.ndarray, x: Any, lowest: str, target: Any) -> dict[str, Rewrite]:
    """Return the candidates that a precision allows, by name.

    Parameters
    ----------
    operator : {"linear", "spmm", "spmv"}
        ``x @ weight.T``, ``weight @ x``, and the product with one vector, which has no candidates.
    weight : ndarray
        Of float32.
    x : Expr
        The other operand.
    lowest : str
        One of `DTYPES`.
    target : Target
        Without units for bfloat16 it has no candidates.
    """
    is_linear = operator == "linear"
    is_taken = (is_linear and x.ty.ndim > 1) or (operator == "spmm" and x.ty.ndim == 2)
    if lowest == "float32" or not is_taken or weight.dtype != np.float32 or not dense.has_unit(target):
        return {}
    matrix = sp.csr_array(weight)
    places = (constant(matrix.indptr.astype("int32")), constant(matrix.indices.astype("int32")))
    products: dict[str, Rewrite] = {}
    if lowest == dense.HALF:
        rounded = (constant(matrix.data.astype(ml_dtypes.bfloat16)), *places)
        products["dense bfloat16"] = partial(_dense, weight, is_linear=is_linear)
        products["sparse bfloat16"] = partial(_sparse, rounded, is_linear=is_linear, in_parts=False)
    csr = (constant(matrix.data), *places)
    products[f"sparse {IN_PARTS}"] = partial(_sparse, csr, is_linear=is_linear, in_parts=True)
    return {name: partial(_of_rows, multiply, weight.shape[0]) for name, multiply in products.items()}


def _of_rows(multiply: Rewrite, outputs: int, x: Any) -> Any:
    """Apply a product of matrices to rows in several dimensions."""
    *batch, n = x.ty.shape.values
    if len(batch) == 1:
        return multiply(x)
    flat = relax.BlockBuilder().normalize(reshape(x, [product(batch), n]))
    return reshape(multiply(flat), [*batch, outputs])


def timers(
    rewritten: Mapping[str, Rewrite], x: np.ndarray, expected: np.ndarray, target: Any
) -> tuple[dict[str, Timer], dict[str, str]]:
    """Return timers of candidates that are accurate, each as a model of its own, and reasons against the others.

    Parameters
    ----------
    rewritten : mapping
        From `rewrites`.
    x : ndarray
        An operand.
    expected : ndarray
        The exact result.
    target : Target
    """
    norm, timed, refused = float(np.linalg.norm(expected)) or 1.0, {}, {}
    operand = tvm.runtime.tensor(x)
    for name, rewrite in rewritten.items():
        builder, var = relax.BlockBuilder(), relax.Var("x", relax.TensorType(list(x.shape), "float32"))
        with builder.function("main", [var]):
            with builder.dataflow():
                out = builder.emit_output(builder.normalize(rewrite(var)))
            builder.emit_func_output(out)
        run = partial(relax.VirtualMachine(build(builder.get(), target=target), tvm.cpu())["main"], operand)
        error = float(np.linalg.norm(run().numpy() - expected)) / norm
        if error <= TOLERANCES[name.split()[1]]:
            timed[name] = timer_of(run)
        else:
            refused[name] = f"relative error {error:.1e}"
    return timed, refused


__all__ = ["DTYPES", "rewrites", "timers"]
