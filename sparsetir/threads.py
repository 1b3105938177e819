# SPDX-License-Identifier: Apache-2.0
"""How many cores kernels use. TVM takes half of them unless told otherwise."""

from __future__ import annotations

import os

import tvm

from sparsetir.errors import ArgumentError

_state = {"threads": 0}


def _available() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_num_threads() -> int:
    """Number of threads of parallel kernels: what was set, else ``TVM_NUM_THREADS``, else all cores."""
    if _state["threads"] == 0:
        set_num_threads(int(os.environ.get("TVM_NUM_THREADS", "0")) or _available())
    return _state["threads"]


def set_num_threads(count: int) -> None:
    """Run parallel kernels on `count` threads.

    Raises
    ------
    ArgumentError
        `count` is not a positive integer.
    """
    if not isinstance(count, int) or count < 1:
        raise ArgumentError(f"the number of threads must be a positive integer, found {count!r}")
    # -1 is TVM's "big cores first" mode; on machines with one kind of core it just takes `count` of them.
    tvm.get_global_func("runtime.config_threadpool")(-1, count)
    _state["threads"] = count
