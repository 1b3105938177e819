# SPDX-License-Identifier: Apache-2.0
"""How many cores kernels use. TVM takes half of them unless told otherwise, and pins the caller to one of them."""

from __future__ import annotations

import os

import tvm

from sparsetir._autoload import CORES
from sparsetir.errors import ArgumentError
from sparsetir.scalars import as_whole

_state = {"threads": 0}


def _prepare() -> None:
    """Tell TVM's thread pool, before it starts, to allow every core and to leave the caller's affinity alone.

    Pinned, every other library of the process (numpy, torch) would share the caller's one core.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(CORES))
    os.environ.setdefault("TVM_BIND_THREADS", "0")


def get_num_threads() -> int:
    """Number of threads of parallel kernels: what was set, else ``TVM_NUM_THREADS``, else all cores."""
    if _state["threads"] == 0:
        _prepare()
        # A pool that TVM started earlier keeps its size.
        _state["threads"] = int(tvm.get_global_func("runtime.NumThreads")())
    return _state["threads"]


def set_num_threads(count: int) -> None:
    """Run parallel kernels on `count` threads, at most as many as the pool has: all cores or ``TVM_NUM_THREADS``.

    Raises
    ------
    ArgumentError
        `count` is not a positive integer, or more than the pool has.
    """
    count = as_whole(count)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ArgumentError(f"the number of threads must be a positive integer, found {count!r}")
    _prepare()
    # -1 is TVM's mode that leaves the choice of cores to the system.
    tvm.get_global_func("runtime.config_threadpool")(-1, count)
    have = int(tvm.get_global_func("runtime.NumThreads")())
    _state["threads"] = have
    if have < count:
        message = f"asked for {count} threads but TVM's thread pool has {have}"
        raise ArgumentError(f"{message}: set TVM_NUM_THREADS={count} before starting Python")
