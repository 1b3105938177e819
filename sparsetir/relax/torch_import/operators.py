# SPDX-License-Identifier: Apache-2.0
"""Registration of the operators with torch: ``torch.ops.sparsetir.spmm(data, indptr, indices, B)`` and others.

In torch they run the kernels of this package; ``torch.export`` keeps them as they are, and `from_torch` makes
``R.sparse`` calls of them. They have no gradients; `sparsetir.torch.Graph` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from tvm import tirx

from sparsetir.build import build
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.interop.levels import first_outside
from sparsetir.interop.sources import HAVE_GRADIENTS
from sparsetir.relax import programs
from sparsetir.relax.operators import FLOATS, INTS, REDUCTIONS
from sparsetir.relax.programs import attention
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.signature import checks_are_on
from sparsetir.utils.arguments import shown

NAMESPACE = "sparsetir"


@dataclass(frozen=True)
class TorchOperator:
    """An operator as registered with torch.

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

    @property
    def options(self) -> list[str]:
        """Names of the arguments that are no tensors."""
        return [n for n in ("reduce", "scale") if f" {n}=" in self.schema]


@cache
def _kernel(name: str, sizes: str, dtype: str, idtype: str, *extra: Any) -> Kernel:
    """Build the program of an operator for any sizes."""
    shape = {size: tirx.Var(size, "int64") for size in sizes.split()}
    return build(getattr(programs, name)(shape, dtype, idtype, *extra).func)


@lru_cache(maxsize=64)
def _attention_kernel(sizes: tuple[tuple[str, int], ...], dtype: str, idtype: str, scale: float) -> Kernel:
    shape = {**dict(sizes), "nnz": tirx.Var("nnz", "int64")}
    return build(attention(shape, dtype, idtype, scale).func)


def _dtypes(value: Any, indptr: Any) -> tuple[str, str]:
    """Return the dtype of the values and that of the structure."""
    return _dtype(value), _dtype(indptr)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def validate(name: str, tensors: Mapping[str, Any], reduce: str = "sum") -> None:
    """Raise unless tensors have the layouts, dtypes, ranks and lengths that an operator takes.

    Lengths that are not known while a model is traced are not compared; kernels do so in each call.
    """
    forms, fault = FORMS[name], f"{NAMESPACE}::{name}: "
    if reduce not in REDUCTIONS:
        raise ArgumentError(f"{fault}reduce: expected one of {', '.join(REDUCTIONS)}, got {shown(reduce)}.")
    structure = [a for a in tensors if a in INTEGERS]
    for names, dtypes in (([a for a in tensors if a not in INTEGERS], FLOATS), (structure, INTS)):
        for argument in names:
            tensor = tensors[argument]
            if str(tensor.layout) != "torch.strided":
                raise ArgumentTypeError(f"{fault}{argument}: expected a dense tensor, got {tensor.layout}.")
            if _dtype(tensor) not in dtypes:
                expected = f"one of {', '.join(dtypes)}"
                raise ArgumentTypeError(f"{fault}{argument}: expected {expected}, got {tensor.dtype}.")
            if tensor.dtype != tensors[names[0]].dtype:
                mismatch = f"{names[0]} is {tensors[names[0]].dtype} and {argument} is {tensor.dtype}"
                raise ArgumentTypeError(f"{fault}expected one dtype, got: {mismatch}. Convert one of them.")
    sizes: dict[str, tuple[Any, str]] = {}
    for argument, tensor in tensors.items():
        for size, length, where in _lengths(fault, argument, tensor, forms[argument]):
            expected_length, first_place = sizes.setdefault(size, (length, where))
            if _differ(expected_length, length):
                raise ArgumentError(f"{fault}{where}: expected {expected_length}, as {first_place}, got {length}.")
    _validate_rows(fault, sizes)


def _lengths(fault: str, argument: str, tensor: Any, forms: tuple[str, ...]) -> list[tuple[str, Any, str]]:
    """Return the dimensions of a tensor: the name of its size, the length, and the position for messages."""
    if forms == (ANY_RANK,) and tensor.dim():
        forms = (f"{'.' * (tensor.dim() - 1)}n",)
    letters = next((form for form in forms if len(form) == tensor.dim()), None)
    if letters is None:
        expected = "1 or more" if forms == (ANY_RANK,) else " or ".join(str(len(form)) for form in forms)
        raise ArgumentError(f"{fault}{argument}: expected {expected} dimensions, got shape {list(tensor.shape)}.")
    dimensions = zip(letters, tensor.shape, strict=True)
    return [(c, length, f"{argument}.shape[{at}]") for at, (c, length) in enumerate(dimensions) if c != "."]


def _validate_rows(fault: str, sizes: Mapping[str, tuple[Any, str]]) -> None:
    """Raise unless the number of row pointers fits the number of rows, or of blocks."""
    count = sizes["p"][0]
    if not isinstance(count, int):
        return
    if count < 1:
        raise ArgumentError(f"{fault}indptr: expected one element more than there are rows, got none.")
    rows, where = sizes.get("m", (count - 1, ""))
    if _differ(rows, count - 1):
        raise ArgumentError(f"{fault}{where}: expected {count - 1}, the rows of indptr, got {rows}.")
    length, where = sizes.get("l", (0, ""))
    if where and isinstance(length, int) and (count < 2 or length % (count - 1)):
        expected = f"a multiple of {count - 1}, the blocks of indptr" if count > 1 else "a block for indptr"
        raise ArgumentError(f"{fault}{where}: expected {expected}, got {length}.")


def _differ(one: Any, other: Any) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one != other


def _spmm(data: Any, indptr: Any, indices: Any, B: Any) -> Any:
    sizes = "m n nnz feat batch" if B.dim() == 3 else "m n nnz feat"
    kernel = _kernel("spmm", sizes, *_dtypes(data, indptr))
    return kernel(a_data=data, indptr=indptr, indices=indices, B=B)


def _spmv(data: Any, indptr: Any, indices: Any, x: Any) -> Any:
    kernel = _kernel("spmv", "m n nnz", *_dtypes(data, indptr))
    return kernel(a_data=data, indptr=indptr, indices=indices, X=x)


def _linear(x: Any, data: Any, indptr: Any, indices: Any) -> Any:
    kernel = _kernel("linear", "m n nnz batch", *_dtypes(data, indptr))
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return kernel(a_data=data, indptr=indptr, indices=indices, X=rows).reshape(*x.shape[:-1], indptr.shape[0] - 1)


def _sddmm(data: Any, indptr: Any, indices: Any, X: Any, Y: Any) -> Any:
    kernel = _kernel("sddmm", "m n nnz feat", *_dtypes(data, indptr))
    return kernel(s_data=data, indptr=indptr, indices=indices, X=X, Y=Y)


def _softmax(data: Any, indptr: Any) -> Any:
    return _kernel("softmax", "m nnz", *_dtypes(data, indptr))(a_data=data, indptr=indptr)


def _segment_reduce(x: Any, indptr: Any, reduce: str = "sum") -> Any:
    kernel = _kernel("segment_reduce", "m nnz feat" if x.dim() == 2 else "m nnz", *_dtypes(x, indptr), reduce)
    return kernel(x_data=x, indptr=indptr)


def _gather_matmul_scatter(X: Any, W: Any, indptr: Any, indices: Any, kinds: Any) -> Any:
    kernel = _kernel("gather_matmul_scatter", "m n nnz kinds in out", *_dtypes(X, indptr))
    _check_kinds(kinds, W.shape[0])
    return kernel(X=X, W=W, indptr=indptr, indices=indices, kinds_data=kinds)


def _check_kinds(kinds: Any, count: int) -> None:
    """Raise unless every kind is the number of a matrix."""
    bad = first_outside(kinds.numpy(), count) if checks_are_on() else None
    if bad is not None:
        fault = f"kinds hold {int(kinds[bad])} at position {bad}"
        raise StructureError(f"{fault}, expected one of [0, {count}), the number of matrices")


def _attention(Q: Any, K: Any, V: Any, indptr: Any, indices: Any, scale: float | None = None) -> Any:
    (heads, length, feat), out, blocks = Q.shape, V.shape[-1], indptr.shape[0] - 1
    sizes = {"heads": heads, "blocks": blocks, "block": length // blocks, "feat": feat, "out": out}
    kernel = _attention_kernel(tuple(sizes.items()), *_dtypes(Q, indptr), feat**-0.5 if scale is None else scale)
    q, k, v = (part.reshape(heads, blocks, sizes["block"], part.shape[-1]) for part in (Q, K, V))
    return kernel(Q=q, K=k, V=v, indptr=indptr, indices=indices).reshape(heads, length, out)


_libraries: list[Any] = []  # Keeps the registrations: torch removes them with the last reference.
INTEGERS = ("indptr", "indices", "kinds")
ANY_RANK = "...n"
_ARRAYS = {"data": ("e",), "indptr": ("p",), "indices": ("e",)}
# The size of each dimension by a letter: p row pointers, m rows, n columns, e entries; alternatives are ranks.
FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "spmm": {**_ARRAYS, "B": ("nf", "bnf")},
    "spmv": {**_ARRAYS, "x": ("n",)},
    "linear": {"x": (ANY_RANK,), **_ARRAYS},
    "sddmm": {**_ARRAYS, "X": ("mk",), "Y": ("nk",)},
    "softmax": {"data": ("e",), "indptr": ("p",)},
    "segment_reduce": {"x": ("e", "ef"), "indptr": ("p",)},
    "gather_matmul_scatter": {"X": ("nk",), "W": ("rko",), "indptr": ("p",), "indices": ("e",), "kinds": ("e",)},
    "attention": {"Q": ("hlf",), "K": ("hlf",), "V": ("hlo",), "indptr": ("p",), "indices": ("e",)},
}
_CSR = "Tensor data, Tensor indptr, Tensor indices"
NO_GRADIENT = "without_gradient"
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
    """Register the operators with torch. A second call has no effect.

    They are ``spmm``, ``spmv``, ``linear``, ``sddmm``, ``softmax``, ``segment_reduce``, ``gather_matmul_scatter`` and
    ``attention``, with the arguments of the functions of the same names in `sparsetir.relax`.

    Returns
    -------
    ``torch.ops.sparsetir``
    """
    torch = importlib.import_module("torch")
    namespace = getattr(torch.ops, NAMESPACE)
    for name, operator in TORCH_OPERATORS.items():
        if not hasattr(namespace, name):
            _register(torch, name, operator)
    return namespace


def _register(torch: Any, name: str, operator: TorchOperator) -> None:
    full, schema = f"{NAMESPACE}::{name}", f"{operator.schema} -> Tensor"
    names = list(FORMS[name])

    def run(*args: Any, **keywords: Any) -> Any:
        check(args, keywords)
        return operator.run(*args, **keywords)

    def fake(*args: Any, **keywords: Any) -> Any:
        check(args, keywords)
        values = [*args, *(keywords.pop(n) for n in names[len(args) :])]
        return values[0].new_empty(operator.shape(*values, **keywords))

    def check(args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        by_name = dict(zip([*names, *operator.options], args, strict=False)) | keywords
        validate(name, {n: by_name[n] for n in names}, by_name.get("reduce", "sum"))

    operator_def = torch.library.custom_op(full, run, mutates_args=(), device_types="cpu", schema=schema)
    operator_def.register_autograd(lambda *_: _no_gradient(name))
    operator_def.register_fake(fake)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    for key in ("SparseCPU", "SparseCsrCPU"):
        # `run` rejects sparse tensors with advice, where torch's own error would list all its backends.
        library.impl(name, run, key)


def without_gradient() -> Any:
    """Return the operator that marks where gradients end, which torch's decompositions keep."""
    torch = importlib.import_module("torch")
    namespace = getattr(torch.ops, NAMESPACE)
    if not hasattr(namespace, NO_GRADIENT):
        full = f"{NAMESPACE}::{NO_GRADIENT}"
        marker = torch.library.custom_op(full, lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
        marker.register_fake(torch.empty_like)
    return getattr(namespace, NO_GRADIENT).default


def _no_gradient(name: str) -> None:
    fault = f"{NAMESPACE}::{name} has no gradients"
    raise ArgumentTypeError(f"{fault}: pass detached tensors, or call it under torch.no_grad(); {HAVE_GRADIENTS}")


__all__ = ["NAMESPACE", "NO_GRADIENT", "TORCH_OPERATORS", "TorchOperator", "register_torch_ops", "without_gradient"]
