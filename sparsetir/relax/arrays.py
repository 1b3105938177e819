# SPDX-License-Identifier: Apache-2.0
"""Arrays of numpy, torch and TVM as arguments of a compiled model, and its results as theirs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tvm

from sparsetir.errors import ArgumentTypeError
from sparsetir.interop.torch_arrays import check_detached, is_torch

ALIGNMENT = 64  # bytes: what TVM's own kernels may ask of the memory of a tensor


def library_of(values: Iterable[Any]) -> str:
    """The library whose arrays a caller works with: "torch", "tvm" or "numpy"."""
    found = {"torch" if is_torch(v) else "tvm" if isinstance(v, tvm.runtime.Tensor) else "numpy" for v in values}
    return next((name for name in ("torch", "tvm") if name in found), "numpy")


def to_tvm(value: Any, name: str) -> tvm.runtime.Tensor:
    """An argument as a TVM tensor, in the same memory if that is contiguous and aligned to 64 bytes, else as a copy.

    Raises
    ------
    ArgumentTypeError
        It is no dense array in host memory, or gradients are asked of it.
    """
    if isinstance(value, tvm.runtime.Tensor):
        if value.device.type != "cpu":
            raise ArgumentTypeError(f"{name} is on {value.device}; models run on the cpu: pass a tensor there")
        return value
    if is_torch(value):
        return _from_torch(value, name)
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    expected = "a torch tensor, a numpy array or a TVM tensor"
    raise ArgumentTypeError(f"{name} must be {expected}; found {type(value).__name__}")


def _from_torch(tensor: Any, name: str) -> tvm.runtime.Tensor:
    torch = importlib.import_module("torch")
    if tensor.layout != torch.strided:
        fault = f"{name} is sparse ({tensor.layout}) but the model takes it dense"
        raise ArgumentTypeError(f"{fault}: pass {name}.to_dense()")
    if tensor.device.type != "cpu":
        raise ArgumentTypeError(f"{name} is on {tensor.device}; models run on the cpu: pass {name}.cpu()")
    check_detached(tensor, name, "a compiled model")
    tensor = tensor.detach()
    if not tensor.numel():
        return tvm.runtime.empty(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tvm.runtime.from_dlpack(tensor)


def _from_numpy(array: np.ndarray) -> tvm.runtime.Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.size:  # numpy's strides of it are not the compact ones that the compiled checks ask for
        return tvm.runtime.empty(array.shape, str(array.dtype))
    flags = array.flags
    is_shared = flags.c_contiguous and flags.writeable and array.ctypes.data % ALIGNMENT == 0
    if is_shared and array.dtype.kind in "biuf":  # bfloat16 has no DLPack in numpy
        return tvm.runtime.from_dlpack(array)
    return tvm.runtime.tensor(array)


def from_tvm(result: Any, library: str) -> Any:
    """A result, or a tuple of them, for a library; torch tensors share its memory."""
    if not isinstance(result, tvm.runtime.Tensor):
        is_many = not isinstance(result, (str, int, float)) and hasattr(result, "__iter__")
        return tuple(from_tvm(part, library) for part in result) if is_many else result
    if library == "torch":
        return importlib.import_module("torch").from_dlpack(result)
    return result if library == "tvm" else result.numpy()


__all__ = ["ALIGNMENT", "from_tvm", "library_of", "to_tvm"]
