# SPDX-License-Identifier: Apache-2.0
"""What is known of the arguments of one call, and whether their index arrays are checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsetir import interop
from sparsetir.errors import ArgumentError

LARGEST_INT32 = 2**31 - 1
# Of a thread or an asyncio task, so that a block of one takes no check from another.
_checks: ContextVar[bool] = ContextVar("_checks", default=True)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Trust the index arrays of sparse arguments inside the block: no check, and a crash if they are wrong.

    Only calls in the block's own thread are meant, and without ``with`` nothing changes.

    Examples
    --------
    >>> import sparsetir
    >>> with sparsetir.unchecked():
    ...     pass
    """
    before = _checks.get()
    _checks.set(False)
    try:
        yield
    finally:
        _checks.set(before)


def checks_are_on() -> bool:
    """Whether index arrays are checked where they enter."""
    return _checks.get()


class SizeOf(int):
    """A size that knows what it was taken from, for messages."""

    source: str

    def __new__(cls, value: int, source: str) -> SizeOf:
        size = super().__new__(cls, value)
        size.source = source
        return size


@dataclass
class Arguments:
    """What one call knows so far."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    stored: dict[str, interop.Stored] = field(default_factory=dict)
    raw: set[str] = field(default_factory=set)
    given: dict[str, str] = field(default_factory=dict)
    copy_back: list[tuple[Any, str]] = field(default_factory=list)
    torch: bool = False

    def size(self, name: str, value: Any, source: str) -> None:
        """Note that symbol `name` is `value`; a disagreement is an error that names both sources."""
        known = self.sizes.get(name)
        if known is None:
            self.sizes[name], self.sources[name] = value, source
        elif known != value:
            raise ArgumentError(f"{name} is {known} from {self.sources[name]} but {value} from {source}")


def is_integer(value: Any) -> bool:
    """Whether a value can be a size."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's dtype of a TVM dtype; bfloat16 comes from ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


__all__ = ["LARGEST_INT32", "Arguments", "SizeOf", "checks_are_on", "is_integer", "numpy_dtype", "unchecked"]
