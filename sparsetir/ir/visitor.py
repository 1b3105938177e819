# SPDX-License-Identifier: Apache-2.0
"""TVM's structural walks, begun in less time.

A build begins hundreds of them. TVM's own functions ask for the signature of each callback and the index of each class
every time, which was a quarter of the time of lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import tvm_ffi
from tvm_ffi.core import TypeSchema

#: a class or several, and what is called with each of their nodes
Entry: TypeAlias = tuple[Any, Callable[..., Any]]

_walk = tvm_ffi.get_global_func("ffi.StructuralWalk")
_mutate = tvm_ffi.get_global_func("ffi.StructuralMutate")
_PRE, _POST = int(tvm_ffi.WalkOrder.PREORDER), int(tvm_ffi.WalkOrder.POSTORDER)


def structural_walk(root: Any, callbacks: Entry | Sequence[Entry], order: str = "post") -> Any:
    """As `tvm_ffi.structural_walk`, without callbacks that are told of definitions."""
    return _walk(root, list(_by_index(callbacks)), [], _PRE if order == "pre" else _POST)


def structural_mutate(root: Any, callbacks: Entry | Sequence[Entry]) -> Any:
    """As `tvm_ffi.structural_mutate`; a callback takes the node and the mutator, and changes nothing in place."""
    return _mutate(root, [(index, callback, False) for index, callback in _by_index(callbacks)])


def _by_index(callbacks: Entry | Sequence[Entry]) -> Iterator[tuple[int, Callable[..., Any]]]:
    entries = [callbacks] if isinstance(callbacks, tuple) else callbacks
    for classes, callback in entries:
        for node_class in classes if isinstance(classes, tuple) else (classes,):
            yield _index(node_class), callback


@cache
def _index(kind: Any) -> int:
    return int(TypeSchema.from_annotation(kind).origin_type_index)
