# SPDX-License-Identifier: Apache-2.0
"""The argument list of the compiled function."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from sparsetir import interop
from sparsetir.call.arguments import Arguments
from sparsetir.call.parameters import Param
from sparsetir.call.signature import Signature
from sparsetir.errors import ArgumentError


def argument_list(signature: Signature, args: Arguments, *, without: Collection[str] = ()) -> list[Any]:
    """Arrays and sizes in the order of the parameters, `without` some."""
    return [_passed(args, param) for param in signature.params if param.name not in without]


def _passed(args: Arguments, param: Param) -> Any:
    if not param.is_array:
        return args.sizes[param.name]
    return as_passed(args.arrays[param.name], param.dtype)


def as_passed(array: np.ndarray, dtype: str) -> Any:
    """An array as the function takes it."""
    if array.size == 0:
        # numpy's strides of an empty array are not the compact ones that the compiled checks ask for.
        return tvm.runtime.empty(array.shape, dtype)
    return as_bfloat16(array) if dtype == "bfloat16" else interop.writable_alias(array)


def as_bfloat16(array: np.ndarray) -> Any:
    """A TVM tensor over a bfloat16 array, which numpy itself cannot hand out."""
    bits = tvm_ffi.from_dlpack(interop.writable_alias(array.view(np.uint16)))
    return bits._create_view(array.shape, "bfloat16")


def check_overlap(signature: Signature, args: Arguments) -> None:
    """Raise where an output passed by the caller lies in an input: the loops assume that it does not."""
    for storage in signature.effects.written:
        if storage not in args.given:
            continue
        for other, array in args.arrays.items():
            if other != storage and np.may_share_memory(args.arrays[storage], array):
                name = signature.shown(storage)
                pair = f"{name} and {signature.shown(other)} share memory"
                raise ArgumentError(f"{pair}, and {name} is written: pass a separate array")


__all__ = ["argument_list", "as_bfloat16", "as_passed", "check_overlap"]
