# SPDX-License-Identifier: Apache-2.0
"""Executors that a command line names: processes of this machine, or the workers of a dask scheduler."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import current_process, get_context, spawn
from typing import Any

from sparsetir.errors import ArgumentError
from sparsetir.tuning.boards import parsed

PROCESSES, RPC = "processes", "rpc"
SCHEMES = ("tcp", "tls", "ucx", "ws", "wss")  # of dask's addresses
ADDRESSES = "tcp://host:8786 of a dask scheduler, or rpc://host:9190/key of TVM's RPC tracker"
EXPECTED = f"an executor by name is processes:2, or an address such as {ADDRESSES}"
CONNECT_SECONDS = 10.0
START_SECONDS = 60.0  # of a main module that is imported once more, for the error it ends with
GUARD = 'RuntimeError: the script starts processes as it is imported, which each of them does: \
move what it runs below `if __name__ == "__main__":`'
# What a process of a pool does before its first job, with the text of errors kept.
START = """
import pickle, sys
from multiprocessing import process, spawn
process.current_process()._inheriting = True
spawn.prepare(pickle.load(sys.stdin.buffer))
initializer, arguments = pickle.load(sys.stdin.buffer)
if initializer is not None:
    initializer(*arguments)
"""


@contextmanager
def opened(given: Executor | str | None) -> Iterator[Executor | str | None]:
    """An executor as it is, or the one that a text names, which is shut down afterwards; an RPC address as it is.

    Raises
    ------
    ArgumentError
        The text names none, dask is not installed, or no scheduler answers.

    Examples
    --------
    >>> with opened("processes:2") as executor:
    ...     print(type(executor).__name__)
    ProcessPoolExecutor
    """
    if isinstance(given, ProcessPoolExecutor) or (isinstance(given, str) and given.partition(":")[0] == PROCESSES):
        refuse_import()
    if not isinstance(given, str):
        yield given
        return
    kind, _, rest = given.partition(":")
    if kind == RPC:
        parsed(given)
        yield given
    elif kind == PROCESSES and (not rest or (rest.isdecimal() and int(rest) > 0)):
        # Spawned: a fork would copy what this process holds and none of its threads.
        with ProcessPoolExecutor(int(rest) if rest else None, get_context("spawn")) as processes:
            yield processes
    elif kind in SCHEMES and rest.startswith("//"):
        with dask_client(given) as client:
            yield client.get_executor()
    else:
        raise ArgumentError(f"{EXPECTED}; found {given!r}")


def refuse_import() -> None:
    """End a process of a pool whose import of the main module begins a search with processes of its own.

    Raises
    ------
    SystemExit
        An `Exception` might be caught by the script, which would then run to its end in each process.
    """
    if getattr(current_process(), "_inheriting", False):
        raise SystemExit(GUARD)


def start_error(executor: Executor) -> str | None:
    """Return the error that ends the processes of a pool before their first job, or None where they start."""
    context = getattr(executor, "_mp_context", None)
    if context is None or context.get_start_method() == "fork":
        return None
    prepared = spawn.get_preparation_data("SparseTIR")
    prepared["authkey"] = bytes(prepared["authkey"])  # its own class is pickled for children of this process only
    first = getattr(executor, "_initializer", None), getattr(executor, "_initargs", ())
    try:
        sent = pickle.dumps(prepared) + pickle.dumps(first)
        command = [sys.executable, "-c", START]
        done = subprocess.run(command, input=sent, capture_output=True, timeout=START_SECONDS, check=False)
    except Exception:  # what cannot be sent or does not end has no error to tell
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if done.returncode and lines else None


def dask_client(address: str) -> Any:
    """A client of a dask scheduler.

    Raises
    ------
    ArgumentError
        dask.distributed is not installed, or nobody answers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ArgumentError(f"{address} is dask's, which is not installed: pip install distributed") from None
    try:
        return Client(address, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ArgumentError(f"no dask scheduler answers at {address}: {why}") from error


__all__ = ["dask_client", "opened", "start_error"]
