# SPDX-License-Identifier: Apache-2.0
"""Measurement of candidates by a TVM RPC server, which needs neither Python nor this package.

This process converts the arguments, compiles, and verifies the results; the server loads a library, runs and times it.
Arguments are sent once per connection.
"""

from __future__ import annotations

import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from sparsetir.codegen.pipeline import lowered, to_stage_2
from sparsetir.errors import ArgumentError, ExecutorLostError, TuningError
from sparsetir.formats.format import Format
from sparsetir.schedules import Registers, defaults
from sparsetir.tuning.evaluator import Evaluator, Measurer
from sparsetir.tuning.lowered_program import unchecked, with_knobs
from sparsetir.tuning.measure import (
    BURST_SECONDS,
    PACE_SECONDS,
    Measurement,
    MeasurementPlace,
    duel,
    lower_quartile,
    reason,
    summary,
)
from sparsetir.tuning.records import Key
from sparsetir.tuning.space import Candidate, Values
from sparsetir.tuning.tuned_kernel import circumstances
from sparsetir.tuning.workers.local import PATIENT, TIMEOUT

ADDRESS = re.compile(r"rpc://([\w.-]+):(\d{1,5})/([\w.-]+)")
FEW, MANY = 5, 500  # minimum and maximum calls of a burst
CONNECT_SECONDS = 5.0
FREE_SECONDS, LOOK_SECONDS = 10.0, 0.05  # to wait for a free server, and between requests to the tracker
MOST_HELD = 3  # formats whose arguments stay on a server
TRACKER = "python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port"


@dataclass
class Connection:
    """A session of a server, and what was sent to it.

    Parameters
    ----------
    session : tvm.rpc.RPCSession
    begun : float
        When, in seconds.
    arguments : dict
        By format: the tensors and numbers of its parameters, by name.
    functions : dict
        By candidate, None being the untuned kernel: the library, and the format.
    """

    session: Any
    begun: float
    arguments: dict[Format | None, dict[str, Any]] = field(default_factory=dict)
    libraries: dict[Candidate | None, Any] = field(default_factory=dict)


class RPCMeasurer(Measurer):
    """The servers of a key at a tracker, of which one is used at a time.

    Parameters
    ----------
    address : str
        ``"rpc://host:port/key"``: of the tracker.
    evaluator : Evaluator
    timeout : float
        Seconds of a measurement.

    Raises
    ------
    ArgumentError
        The address is none, or no tracker answers.
    ExecutorLostError
        The tracker has no server of that key.
    """

    is_here = False

    def __init__(self, address: str, evaluator: Evaluator, *, timeout: float = TIMEOUT) -> None:
        self.host, self.port, self.name = parsed(address)
        self.evaluator, self.timeout = evaluator, timeout
        super().__init__()
        self.paths: dict[Candidate | None, Path] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="sparsetir-")
        self.connection: Connection | None = None
        about = circumstances(evaluator.kernel, evaluator.template)
        threads = int(self._connected().session.get_function("runtime.NumThreads")())
        self.place = MeasurementPlace(f"rpc {self.name}", threads, about["target"], about["versions"])

    # ----------------------------------------------------------------------------------------------- the server

    def _connected(self) -> Connection:
        """Return a connection that lives for another measurement."""
        limit = PATIENT * self.timeout
        if self.connection is not None and time.monotonic() - self.connection.begun > limit / 2:
            self.connection = None  # the server closes it after a while
        if self.connection is None:
            self.connection = Connection(self._requested(int(limit) + 1), time.monotonic())
        return self.connection

    def _requested(self, limit: int) -> Any:
        from tvm import rpc

        where = f"{self.host}:{self.port}"
        try:
            # This fails at once where TVM would retry for a minute.
            socket.create_connection((self.host, self.port), CONNECT_SECONDS).close()
            tracker = rpc.connect_tracker(self.host, self.port)
        except Exception as error:
            hint = f"begin one by {TRACKER} {self.port}"
            raise ArgumentError(f"no RPC tracker answers at {where}: {reason(error)}; {hint}") from error
        try:
            if self._is_free(tracker):  # a request without a free server would block
                return tracker.request(self.name, session_timeout=limit, max_retry=2)
            why = "has no free server"
        except Exception as error:  # the tracker cannot be reached
            why = f"({reason(error)}) gives no server"
        hint = f"begin one by python -m tvm.exec.rpc_server --tracker {where} --key {self.name}"
        self.gone = ExecutorLostError(f"the RPC tracker at {where} {why} {self.name!r}; {hint}")
        raise self.gone

    def _is_free(self, tracker: Any) -> bool:
        """Return whether a server is free now or within some seconds."""
        end = time.monotonic() + FREE_SECONDS
        while not tracker.summary()["queue_info"].get(self.name, {}).get("free"):
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _arguments(self, connection: Connection, format: Format | None) -> dict[str, Any]:
        """Return the parameters of a format's function, on the server."""
        cached = connection.arguments
        if format not in cached:
            while len(cached) >= MOST_HELD:
                cached.pop(next(iter(cached)))
            workload, device = self.evaluator.variants(format).workload, connection.session.cpu()
            cached[format] = {
                name: on(device, workload.arrays[name]) if name in workload.arrays else value
                for name, value in workload.ready.items()
            }
        return cached[format]

    def _library(self, connection: Connection, candidate: Candidate | None) -> Any:
        """Return a candidate's machine code, on the server."""
        if candidate not in connection.libraries:
            path = self._compiled(candidate)
            connection.session.upload(str(path))
            connection.libraries[candidate] = connection.session.load_module(path.name)
        return connection.libraries[candidate]

    def _compiled(self, candidate: Candidate | None) -> Path:
        """Return a library of a candidate."""
        if candidate not in self.paths:
            evaluator = self.evaluator
            if candidate is None:
                base = defaults.usual(evaluator.func, Registers.of(evaluator.kernel.compiled.target))
                chosen = base.changed(**evaluator.kernel.suitable(evaluator.workload.args))
                second, target = to_stage_2(evaluator.func), evaluator.kernel.compiled.target
            else:
                form = evaluator.variants(candidate.format).form
                second, target, chosen = form.second, form.target, with_knobs(evaluator.template, candidate.choices)
            path = Path(self.folder.name, f"candidate{len(self.paths)}.so")
            unchecked(lowered(second, chosen, target)[3], target).export_library(str(path))
            self.paths[candidate] = path
        return self.paths[candidate]

    # ---------------------------------------------------------------------------------------------- measurements

    def time(self, candidate: Candidate | None = None) -> Measurement:
        """Check and time a candidate, None for the untuned kernel.

        Raises
        ------
        TuningError
            The server cannot run the untuned kernel.
        ExecutorLostError
            There is no server any more.
        """
        measurement = self._tried(candidate)
        if candidate is not None:
            return measurement if self.usual is None else measurement.paced(self.usual)
        if measurement.seconds is None:
            raise TuningError(f"the RPC server {self.name!r} cannot run the untuned kernel: {measurement.error}")
        self.usual = self.usual or measurement.seconds
        return measurement

    def _tried(self, candidate: Candidate | None) -> Measurement:
        try:
            self._compiled(candidate)
        except Exception as error:
            return Measurement(error=reason(error))
        try:
            return self._measured(self._connected(), candidate)
        except ExecutorLostError:
            raise
        except Exception as error:  # the candidate may have ended the session of the server
            self.connection = None
            return Measurement(error=f"on the RPC server: {reason(error)}")

    def _measured(self, connection: Connection, candidate: Candidate | None) -> Measurement:
        wrong = self._wrong(connection, candidate)
        if wrong is not None:
            return Measurement(error=f"wrong result: {wrong}")
        if candidate is None:
            return replace(summary(self._burst(connection, None, BURST_SECONDS)), place=self.place)
        before = lower_quartile(self._burst(connection, None, PACE_SECONDS))
        timing = summary(self._burst(connection, candidate, BURST_SECONDS))
        after = lower_quartile(self._burst(connection, None, PACE_SECONDS))
        return replace(timing, usual=min(before, after), place=self.place)

    def _wrong(self, connection: Connection, candidate: Candidate | None) -> str | None:
        """Return the error in the results of one run on reset arrays, if any."""
        format = None if candidate is None else candidate.format
        tensors, workload = self._arguments(connection, format), self.evaluator.variants(format).workload
        workload.reset()
        for name, array in workload.written.items():
            tensors[name].copyfrom(plain(array))
        self._function(connection, candidate)()
        results = {name: like(tensors[name].numpy(), array) for name, array in workload.written.items()}
        return self.evaluator.reference.disagreement(results)

    def _function(self, connection: Connection, candidate: Candidate | None) -> Callable[[], Any]:
        """Return a call on the server."""
        name, values = self._call(connection, candidate)
        return partial(self._library(connection, candidate)[name], *values)

    def _call(self, connection: Connection, candidate: Candidate | None) -> tuple[str, list[Any]]:
        """Return the name of a candidate's function, and its arguments in order."""
        evaluator = self.evaluator
        tensors = self._arguments(connection, None if candidate is None else candidate.format)
        if candidate is None:
            return evaluator.kernel.name, [tensors[name] for name in evaluator.names]
        form = evaluator.variants(candidate.format).form
        return form.name, [tensors[name] for name in form.names]

    def _burst(self, connection: Connection, candidate: Candidate | None, seconds: float) -> list[float]:
        """Return seconds of consecutive calls."""
        name, values = self._call(connection, candidate)
        library, device = self._library(connection, candidate), connection.session.cpu()
        first = library.time_evaluator(name, device, number=1, repeat=1)(*values).results[0]
        count = int(np.clip(seconds / max(first, 1e-9), FEW, MANY))
        return [float(t) for t in library.time_evaluator(name, device, number=1, repeat=count)(*values).results]

    def measure(self, batch: Sequence[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Compile, check and time candidates, one after another."""
        yield from ((candidate, self.time(candidate)) for candidate in batch)

    def compare(self, candidates: Sequence[Candidate]) -> dict[Candidate | None, float]:
        """Return seconds of candidates and, at None, of the untuned kernel, in turn."""

        def typical(candidate: Candidate | None, seconds: float) -> float:
            try:
                return lower_quartile(self._burst(self._connected(), candidate, seconds))
            except ArgumentError as error:
                raise ExecutorLostError(str(error)) from error

        return duel({candidate: partial(typical, candidate) for candidate in (None, *candidates)})

    # -------------------------------------------------------------------------- what else a search wants of a pool

    def keyed(self, key: Key) -> Key:
        """Return the key of records of this kind of server."""
        return replace(key, **asdict(self.place))

    def values(self, format: Format | None) -> Values | None:
        """Return the open choices of a format; None where it has no variant."""
        if format not in self.known:
            self.known[format] = self.evaluator.prepare(format)
        return self.known[format].values

    def rest(self) -> None:
        """Release the server until the next job."""
        self.connection = None

    def close(self) -> None:
        """Release the server, and delete the libraries."""
        self.rest()
        self.folder.cleanup()


def parsed(address: str) -> tuple[str, int, str]:
    """Return host, port and key of an address.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> parsed("rpc://127.0.0.1:9190/board")
    ('127.0.0.1', 9190, 'board')
    """
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise ArgumentError(f"expected the address of an RPC tracker, rpc://host:port/key, got {address!r}")
    return match[1], int(match[2]), match[3]


def on(device: Any, array: np.ndarray) -> Any:
    """Return an array on a server."""
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        buffer = tvm.runtime.empty(array.shape, "bfloat16", device)
        return buffer.copyfrom(plain(array))
    return tvm.runtime.tensor(np.ascontiguousarray(array), device)


def plain(array: np.ndarray) -> np.ndarray:
    """Return an array that numpy owns, contiguous."""
    return np.ascontiguousarray(array)


def like(received: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Return an array from a server in the dtype of a local one."""
    return (
        received.view(array.dtype) if received.dtype.itemsize == array.dtype.itemsize else received.astype(array.dtype)
    )


__all__ = ["RPCMeasurer", "parsed"]
