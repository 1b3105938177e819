# SPDX-License-Identifier: Apache-2.0
"""Candidates measured by servers of TVM's RPC: a tracker and a server on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir import formats, ops
from sparsetir.errors import ArgumentError, ExecutorLostError
from sparsetir.schedules import Choices
from sparsetir.tuning import Candidate, tune_sparse
from sparsetir.tuning.evaluator import Evaluator
from sparsetir.tuning.workers import rpc as module
from sparsetir.tuning.workers.rpc import RPCMeasurer, parsed

pytest.importorskip("tornado")  # TVM's RPC asks for these
pytest.importorskip("cloudpickle")
pytest.importorskip("psutil")
has_compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
pytestmark = [
    pytest.mark.usefixtures("quick_comparisons"),
    pytest.mark.slow,
    pytest.mark.skipif(not has_compiler, reason="libraries are linked by a C compiler"),
]

CANDIDATES = [Candidate(Choices(tile=8)), Candidate(Choices(tile=8), formats.bsr(2, 2))]


def arguments() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    A = sp.csr_array(sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=rng))
    return {"A": A, "B": rng.standard_normal((30, 16)).astype("float32")}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(module: str, *options: str) -> subprocess.Popen[bytes]:
    """A process of TVM, in a group with those that it starts."""
    command = [sys.executable, "-m", f"tvm.exec.{module}", "--host", "127.0.0.1", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **quiet)


def ended(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens at {port}")


@pytest.fixture(scope="module")
def tracker() -> Iterator[int]:
    port = free_port()
    process = started("rpc_tracker", "--port", str(port), "--port-end", str(port + 1))
    wait_for(port)
    yield port
    ended(process)


@pytest.fixture
def server(tracker: int) -> Iterator[subprocess.Popen[bytes]]:
    process = started("rpc_server", "--tracker", f"127.0.0.1:{tracker}", "--key", "board")
    from tvm import rpc

    for _ in range(600):
        queue = rpc.connect_tracker("127.0.0.1", tracker).summary()["queue_info"]
        if queue.get("board", {}).get("free"):
            break
        time.sleep(0.1)
    yield process
    if process.poll() is None:
        ended(process)


def test_a_server_measures(tracker: int, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, inputs, address = tmp_path / "tuning.jsonl", arguments(), f"rpc://127.0.0.1:{tracker}/board"
    boards = RPCMeasurer(address, Evaluator(ops.spmm(), inputs, None))
    assert boards.values(CANDIDATES[1].format)
    before, found = boards.time(), dict(boards.measure(CANDIDATES))
    assert before.seconds
    assert all(each.seconds for each in found.values()), found
    assert all(0 < seconds < 1 for seconds in boards.compare(CANDIDATES).values())
    boards.evaluator.reference.expected["c"] += 1
    assert "wrong result: c[0, 0] is" in (boards.time(CANDIDATES[0]).error or "")
    boards.close()

    result = tune_sparse(ops.spmm(), inputs, max_trials=3, executor=address, database=path)
    np.testing.assert_allclose(result.kernel(**inputs), inputs["A"] @ inputs["B"], rtol=1e-4, atol=1e-5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["machine"] for line in lines} == {"rpc board"}
    assert len(result.history) == 3
    assert not any(record.error for record in result.history)
    ended(server)
    monkeypatch.setattr(module, "FREE_SECONDS", 0.5)
    with pytest.raises(ExecutorLostError, match="has no free server 'board'; begin one by python"):
        tune_sparse(ops.spmm(), inputs, max_trials=5, executor=address, database=path)


def test_what_is_no_address() -> None:
    assert parsed("rpc://board.lab:9190/rasp-4") == ("board.lab", 9190, "rasp-4")
    for address in ("rpc://host/key", "rpc://host:9190", "rpc://:9190/key", "rpc:host:9190/key"):
        with pytest.raises(ArgumentError, match="expected the address of an RPC tracker, rpc://host:port/key, got"):
            tune_sparse(ops.spmm(), arguments(), executor=address)
    port = free_port()
    with pytest.raises(ArgumentError, match=rf"no RPC tracker answers at 127\.0\.0\.1:{port}: .* begin one by"):
        tune_sparse(ops.spmm(), arguments(), executor=f"rpc://127.0.0.1:{port}/board")
