# SPDX-License-Identifier: Apache-2.0
"""torch tensors in host memory as numpy arrays, and back."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentTypeError
from sparsetir.interop.levels import Array

HAVE_GRADIENTS = "sparsetir.torch.Graph has operators with gradients"


def to_torch(array: Array) -> Any:
    """A torch tensor that shares the array's memory; bfloat16 included."""
    torch = importlib.import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise ArgumentTypeError(f"torch has no tensors of {array.dtype}: convert the values with astype") from None


def is_torch(value: Any) -> bool:
    kind: Any = type(value)
    return _is_of_torch(kind)


@cache
def _is_of_torch(kind: Any) -> bool:
    """Whether a class is one of torch's own, or of tensors that somebody derived from torch's."""
    is_own = kind.__module__.partition(".")[0] == "torch"
    return is_own or any((base.__module__, base.__name__) == ("torch", "Tensor") for base in kind.__mro__)


def check_detached(tensor: Any, name: str, what: str) -> None:
    """Raise `ArgumentTypeError` where gradients are asked of a tensor: `what` has none."""
    if tensor.requires_grad and importlib.import_module("torch").is_grad_enabled():
        fault = f"{name} requires grad, but {what} has no gradients"
        raise ArgumentTypeError(f"{fault}: pass {name}.detach(), or call under torch.no_grad(); {HAVE_GRADIENTS}")


def torch_to_numpy(tensor: Any, name: str) -> Array:
    if tensor.device.type != "cpu":
        raise ArgumentTypeError(f"{name} is on {tensor.device}, kernels run on the cpu: pass {name}.cpu()")
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        torch, ml_dtypes = importlib.import_module("torch"), importlib.import_module("ml_dtypes")
        return np.asarray(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.asarray(tensor.resolve_conj().resolve_neg())
