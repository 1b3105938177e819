# SPDX-License-Identifier: Apache-2.0
"""Executors that a command line names: processes of this machine, or the workers of a dask scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from sparsetir.errors import ArgumentError
from sparsetir.tuning.boards import parsed

PROCESSES, RPC = "processes", "rpc"
SCHEMES = ("tcp", "tls", "ucx", "ws", "wss")  # of dask's addresses
ADDRESSES = "tcp://host:8786 of a dask scheduler, or rpc://host:9190/key of TVM's RPC tracker"
EXPECTED = f"an executor by name is processes:2, or an address such as {ADDRESSES}"
CONNECT_SECONDS = 10.0


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


__all__ = ["dask_client", "opened"]
