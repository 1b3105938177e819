# SPDX-License-Identifier: Apache-2.0
"""The operators as torch operators, ``torch.ops.sparsetir.spmm(data, indptr, indices, B)`` and so on.

In torch they run the kernels of this package; ``torch.export`` keeps them as they are, and `from_torch` makes
``R.sparse`` calls of them. They have no gradients; `sparsetir.torch.Graph` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from tvm import tirx

from sparsetir.build import build
from sparsetir.call.arguments import checks_are_on
from sparsetir.call.kernel import Kernel
from sparsetir.errors import ArgumentTypeError, StructureError
from sparsetir.interop.structure import first_outside
from sparsetir.interop.torch_arrays import HAVE_GRADIENTS
from sparsetir.relax import programs
from sparsetir.relax.attention import attention

NAMESPACE = "sparsetir"


@dataclass(frozen=True)
class TorchOperator:
    """An operator in torch.

    Parameters
    ----------
    schema : str
        Its arguments and result in torch's notation, named like those of the Relax operator.
    shape : callable
        The shape of the result; the result has the dtype of the first argument.
    run : callable
        Computes it.
    """

    schema: str
    shape: Callable[..., list[Any]]
    run: Callable[..., Any]


@cache
def _kernel(name: str, sizes: str, dtype: str, idtype: str, *more: Any) -> Kernel:
    """The program of an operator, built for any sizes."""
    shape = {size: tirx.Var(size, "int64") for size in sizes.split()}
    return build(getattr(programs, name)(shape, dtype, idtype, *more).func)


@lru_cache(maxsize=64)
def _attention_kernel(sizes: tuple[tuple[str, int], ...], dtype: str, idtype: str, scale: float) -> Kernel:
    shape = {**dict(sizes), "nnz": tirx.Var("nnz", "int64")}
    return build(attention(shape, dtype, idtype, scale).func)


def _dtypes(indptr: Any, **values: Any) -> tuple[str, str]:
    """The dtype of the values, which is one, and that of the structure."""
    (first, one), *others = values.items()
    for name, value in others:
        if value.dtype != one.dtype:
            found = f"{first} is {one.dtype} and {name} is {value.dtype}"
            raise ArgumentTypeError(f"{first} and {name} must have one dtype; {found}")
    return str(one.dtype).removeprefix("torch."), str(indptr.dtype).removeprefix("torch.")


def _spmm(data: Any, indptr: Any, indices: Any, B: Any) -> Any:
    sizes = "m n nnz feat batch" if B.dim() == 3 else "m n nnz feat"
    kernel = _kernel("spmm", sizes, *_dtypes(indptr, data=data, B=B))
    return kernel(a_data=data, indptr=indptr, indices=indices, B=B)


def _spmv(data: Any, indptr: Any, indices: Any, x: Any) -> Any:
    kernel = _kernel("spmv", "m n nnz", *_dtypes(indptr, data=data, x=x))
    return kernel(a_data=data, indptr=indptr, indices=indices, X=x)


def _linear(x: Any, data: Any, indptr: Any, indices: Any) -> Any:
    kernel = _kernel("linear", "m n nnz batch", *_dtypes(indptr, x=x, data=data))
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return kernel(a_data=data, indptr=indptr, indices=indices, X=rows).reshape(*x.shape[:-1], indptr.shape[0] - 1)


def _sddmm(data: Any, indptr: Any, indices: Any, X: Any, Y: Any) -> Any:
    kernel = _kernel("sddmm", "m n nnz feat", *_dtypes(indptr, data=data, X=X, Y=Y))
    return kernel(s_data=data, indptr=indptr, indices=indices, X=X, Y=Y)


def _softmax(data: Any, indptr: Any) -> Any:
    return _kernel("softmax", "m nnz", *_dtypes(indptr, data=data))(a_data=data, indptr=indptr)


def _segment_reduce(x: Any, indptr: Any, reduce: str = "sum") -> Any:
    kernel = _kernel("segment_reduce", "m nnz feat" if x.dim() == 2 else "m nnz", *_dtypes(indptr, x=x), reduce)
    return kernel(x_data=x, indptr=indptr)


def _gather_matmul_scatter(X: Any, W: Any, indptr: Any, indices: Any, kinds: Any) -> Any:
    kernel = _kernel("gather_matmul_scatter", "m n nnz kinds in out", *_dtypes(indptr, X=X, W=W))
    _check_kinds(kinds, W.shape[0])
    return kernel(X=X, W=W, indptr=indptr, indices=indices, kinds_data=kinds)


def _check_kinds(kinds: Any, count: int) -> None:
    """Raise unless every entry has one of the matrices."""
    bad = first_outside(kinds.numpy(), count) if checks_are_on() else None
    if bad is not None:
        found = f"kinds hold {int(kinds[bad])} at position {bad}"
        raise StructureError(f"{found}, expected one of [0, {count}), the number of matrices")


def _attention(Q: Any, K: Any, V: Any, indptr: Any, indices: Any, scale: float | None = None) -> Any:
    (heads, length, feat), out, blocks = Q.shape, V.shape[-1], indptr.shape[0] - 1
    sizes = {"heads": heads, "blocks": blocks, "block": length // blocks, "feat": feat, "out": out}
    kernel = _attention_kernel(
        tuple(sizes.items()), *_dtypes(indptr, Q=Q, K=K, V=V), feat**-0.5 if scale is None else scale
    )
    q, k, v = (part.reshape(heads, blocks, sizes["block"], part.shape[-1]) for part in (Q, K, V))
    return kernel(Q=q, K=k, V=v, indptr=indptr, indices=indices).reshape(heads, length, out)


_CSR = "Tensor data, Tensor indptr, Tensor indices"
TORCH_OPERATORS = {
    "spmm": TorchOperator(
        f"({_CSR}, Tensor B)", lambda d, p, i, B: [*B.shape[:-2], p.shape[0] - 1, B.shape[-1]], _spmm
    ),
    "spmv": TorchOperator(f"({_CSR}, Tensor x)", lambda d, p, i, x: [p.shape[0] - 1], _spmv),
    "linear": TorchOperator(f"(Tensor x, {_CSR})", lambda x, d, p, i: [*x.shape[:-1], p.shape[0] - 1], _linear),
    "sddmm": TorchOperator(f"({_CSR}, Tensor X, Tensor Y)", lambda d, p, i, X, Y: list(d.shape), _sddmm),
    "softmax": TorchOperator("(Tensor data, Tensor indptr)", lambda d, p: list(d.shape), _softmax),
    "segment_reduce": TorchOperator(
        '(Tensor x, Tensor indptr, str reduce="sum")',
        lambda x, p, reduce="sum": [p.shape[0] - 1, *x.shape[1:]],
        _segment_reduce,
    ),
    "gather_matmul_scatter": TorchOperator(
        "(Tensor X, Tensor W, Tensor indptr, Tensor indices, Tensor kinds)",
        lambda X, W, p, i, kinds: [p.shape[0] - 1, W.shape[2]],
        _gather_matmul_scatter,
    ),
    "attention": TorchOperator(
        "(Tensor Q, Tensor K, Tensor V, Tensor indptr, Tensor indices, float? scale=None)",
        lambda Q, K, V, p, i, scale=None: [*Q.shape[:2], V.shape[2]],
        _attention,
    ),
}


def register_torch_ops() -> Any:
    """Make the operators known to torch. Calling it again changes nothing.

    They are ``spmm``, ``spmv``, ``linear``, ``sddmm``, ``softmax``, ``segment_reduce``, ``gather_matmul_scatter`` and
    ``attention``, with the arguments of the functions of the same names in `sparsetir.relax`.

    Returns
    -------
    ``torch.ops.sparsetir``
    """
    torch = importlib.import_module("torch")
    found = getattr(torch.ops, NAMESPACE)
    for name, operator in TORCH_OPERATORS.items():
        if not hasattr(found, name):
            _register(torch, name, operator)
    return found


def _register(torch: Any, name: str, operator: TorchOperator) -> None:
    full, schema = f"{NAMESPACE}::{name}", f"{operator.schema} -> Tensor"
    made = torch.library.custom_op(full, operator.run, mutates_args=(), device_types="cpu", schema=schema)
    made.register_autograd(lambda *_: _no_gradient(name))
    made.register_fake(lambda first, *rest, **named: first.new_empty(operator.shape(first, *rest, **named)))


def _no_gradient(name: str) -> None:
    fault = f"{NAMESPACE}::{name} has no gradients"
    raise ArgumentTypeError(f"{fault}: pass detached tensors, or call it under torch.no_grad(); {HAVE_GRADIENTS}")


__all__ = ["NAMESPACE", "TORCH_OPERATORS", "TorchOperator", "register_torch_ops"]
