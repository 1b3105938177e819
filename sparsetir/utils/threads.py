# SPDX-License-Identifier: Apache-2.0
"""How many cores kernels use. TVM takes half of them unless told otherwise, and pins the caller to one of them."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import warnings
from functools import wraps
from typing import Any, NoReturn

import tvm

from sparsetir.errors import ArgumentError
from sparsetir.utils.arguments import as_count
from sparsetir.utils.machine import CORES

SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"
# How often a waiting thread looks for work before it sleeps, about a millisecond. TVM's own number is a hundred times
# that: it keeps cores from others for a tenth of a second, and on a busy machine a process takes minutes to end.
SPINS = "3000"
MAX_THREADS = 1 << 16
MAX_POOL = 4096  # TVM ends the process when the system cannot start a thread of its pool

_state = {"threads": 0, "copied": 0}


def _prepare() -> None:
    """Tell TVM's thread pool, before it starts, to allow every core and to leave the caller's affinity alone.

    Pinned, every other library of the process (numpy, torch) would share the caller's one core. Threads beyond the
    cores sleep at once: waiting, they would take the cores from each other.
    """
    count = os.environ.setdefault("TVM_NUM_THREADS", str(CORES))
    if count.isdecimal() and int(count) > MAX_POOL:
        message = f"TVM_NUM_THREADS: expected at most {MAX_POOL}, got {count}. {CORES} are used, one for each core."
        warnings.warn(message, stacklevel=2)
        count = os.environ["TVM_NUM_THREADS"] = str(CORES)
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault(SPIN_VARIABLE, "0" if count.isdecimal() and int(count) > CORES else SPINS)


def get_num_threads() -> int:
    """Return the number of threads of kernels: what was set, else ``TVM_NUM_THREADS``, else all cores."""
    if _state["threads"] == 0:
        _prepare()
        # A pool that TVM started earlier keeps its size.
        _state["threads"] = _pool_size()
    return _state["threads"]


def set_num_threads(count: int) -> None:
    """Run parallel kernels on `count` threads, at most as many as the pool has: all cores or ``TVM_NUM_THREADS``.

    Raises
    ------
    ArgumentError
        `count` is not a positive integer, or more than the pool has.
    """
    count = as_count(count, "count", most=MAX_THREADS)
    if count > 1 and _state["copied"] == threading.get_ident():
        fault = f"a thread that a fork copied has no others to share kernels with: expected 1, got {count}"
        raise ArgumentError(f"{fault}; call kernels in a thread started by this process, or start processes by 'spawn'")
    _prepare()
    _use(count)
    have = _state["threads"]
    if have < count:
        message = f"asked for {count} threads but TVM's thread pool has {have}"
        raise ArgumentError(f"{message}: set TVM_NUM_THREADS={count} before starting Python")


def _pool_size() -> int:
    return int(tvm.get_global_func("runtime.NumThreads")())


def _use(count: int) -> None:
    # -1 is TVM's mode that leaves the choice of cores to the system.
    tvm.get_global_func("runtime.config_threadpool")(-1, count)
    _state["threads"] = _pool_size()


# ---------------------------------------------------------------------------------------------- forked children


def _after_fork_in_child() -> None:
    """Let kernels use the calling thread only: a fork copies it, and its pool of threads, but none of the others."""
    if _state["threads"] == 0:
        return  # there is no pool yet
    _use(1)
    _state["copied"] = threading.get_ident()
    _leave_without_the_pool()


def _leave_without_the_pool() -> None:
    """End the process before TVM destroys the pool, which would wait for threads that are not there.

    Python's own exit handlers run. glibc ends a thread by its destructors, the newest first: one that ends the process
    precedes TVM's, one that writes out what C programs print precedes that.
    """
    libc = ctypes.CDLL(None)
    at_thread_exit = getattr(libc, "__cxa_thread_atexit_impl", None)
    if at_thread_exit is None:
        return
    status = {"code": 0}
    before, leave = getattr(sys, "last_value", None), sys.exit

    @wraps(leave)
    def exit(code: Any = None, /) -> NoReturn:
        status["code"] = 0 if code is None else code if isinstance(code, int) else 1
        leave(code)

    def register() -> None:
        crashed = getattr(sys, "last_value", None) is not before
        at_thread_exit(libc._exit, ctypes.c_void_p(1 if crashed else status["code"] & 0xFF), None)
        at_thread_exit(libc.fflush, None, None)

    sys.exit = exit  # Python reports its exit status nowhere else
    atexit.register(register)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
