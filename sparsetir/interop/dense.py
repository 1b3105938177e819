# SPDX-License-Identifier: Apache-2.0
"""Dense arguments as numpy arrays."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentTypeError
from sparsetir.interop.levels import HOST_DEVICES, Array, check_dtype
from sparsetir.interop.sources import is_sparse
from sparsetir.interop.torch_arrays import is_torch, torch_to_numpy


def aligned_contiguous(
    x: Any, dtype: str | None = None, *, name: str = "the argument", option: str = "dtype"
) -> tuple[Array, bool]:
    """A dense argument as a C-contiguous, aligned numpy array in native byte order.

    Parameters
    ----------
    x : array
        numpy of any strides, a torch tensor in host memory, or anything with DLPack, the buffer protocol or
        ``__array__``. Read-only arrays stay read-only.
    dtype : str, optional
        What `x` must hold.
    name : str
        The argument, for messages.
    option : str
        The argument of `sparsetir.ops` that decides `dtype`, for messages.

    Returns
    -------
    array : ndarray
        Shares memory with `x` if that has the layout already.
    copied : bool
        Whether it does not.

    Raises
    ------
    ArgumentTypeError
        When `x` is no array, is sparse, is not in host memory, or holds another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> array, copied = aligned_contiguous(np.ones((2, 3)).T)
    >>> array.flags.c_contiguous, copied
    (True, True)
    """
    array, copied = as_numpy(x, name)
    if dtype is not None:
        check_dtype(array.dtype, dtype, name=name, torch=is_torch(x), option=option)
    if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
        return array, copied
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True), True


def writable_alias(array: Array) -> Array:
    """The memory of a read-only array as a writable one: DLPack refuses to hand out read-only arrays.

    Only for consumers that do not write.
    """
    return array if array.flags.writeable else np.asarray(_Alias(array)).view(array.dtype)


class _Alias:
    def __init__(self, array: Array) -> None:
        self.owner = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def as_numpy(x: Any, name: str) -> tuple[Array, bool]:
    """Any array-like object as numpy, and whether that may have taken a copy.

    Raises
    ------
    ArgumentTypeError
        When `x` is no array, has a mask, is sparse, or is not in host memory.
    """
    if type(x) is np.ndarray:
        return x, False
    if is_sparse(x):
        raise ArgumentTypeError(
            f"{name} is sparse ({type(x).__name__}) but the kernel takes it dense: pass it as an array"
        )
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name} has a mask, which kernels do not look at: pass {name}.filled(0), or another value"
        )
    if isinstance(x, np.ndarray):
        return np.asarray(x), False
    if is_torch(x):
        return torch_to_numpy(x, name), False
    if hasattr(x, "__dlpack__"):
        return _dlpack_to_numpy(x, name)
    try:
        return np.asarray(memoryview(x)), False
    except TypeError:
        pass
    return _from_protocol(x, name), True


def _from_protocol(x: Any, name: str) -> Array:
    """An array of an object that numpy knows how to ask for one."""
    found = f"{name} must be an array, found {type(x).__name__}"
    if isinstance(x, (str, PathLike)):
        raise ArgumentTypeError(f"{found}: pass sparsetir.read(path) for a file")
    if not hasattr(x, "__array__") and not hasattr(x, "__array_interface__"):
        raise ArgumentTypeError(f"{found}: pass numpy.asarray of it with a dtype")
    try:
        return np.asarray(x)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{found}, which numpy cannot read: {error}") from None


def _dlpack_to_numpy(x: Any, name: str) -> tuple[Array, bool]:
    if x.__dlpack_device__()[0] not in HOST_DEVICES:
        raise ArgumentTypeError(f"{name} is not in host memory, where kernels run: copy it to the cpu first")
    try:
        return np.from_dlpack(x), False
    except (RuntimeError, BufferError, TypeError):  # numpy imports no bfloat16
        return x.numpy(), True
