# SPDX-License-Identifier: Apache-2.0
"""A cost model of one pass over a matrix on several machines, checked against workers on this one.

Run ``sparsetir bench cluster``. Rates are measured with one worker: reading and multiplying blocks together,
sending an operand, and what a task costs. The model predicts the pass with more workers; that pass is then made and
timed. A second table is what the rates assumed for a cluster, `CLUSTER`, lead to; they are not measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FLOAT = 4  # bytes
ENTRY = 8  # bytes of a value and a column


@dataclass(frozen=True)
class ClusterRates:
    """Rates of a cluster.

    Parameters
    ----------
    read : float
        Bytes a second that one machine reads by itself.
    shared : float
        Bytes a second that all machines read together at most, from storage they share.
    multiply : float
        Entries times columns a second that one machine multiplies.
    network : float
        Bytes a second between two machines.
    task : float
        Seconds that the scheduler takes for a task.
    """

    read: float
    shared: float
    multiply: float
    network: float
    task: float


@dataclass(frozen=True)
class Pass:
    """One pass over a matrix.

    Parameters
    ----------
    columns, nnz : int
        Of the sparse matrix.
    width : int
        Columns of the dense operand.
    blocks : int
        Tasks.
    """

    columns: int
    nnz: int
    width: int
    blocks: int

    @property
    def operand(self) -> int:
        """Bytes of the dense operand that each machine gets; of a sum over rows (``M.T @ Y``) as many come back."""
        return FLOAT * self.columns * self.width


def predict(work: Pass, rates: ClusterRates, machines: int) -> dict[str, float]:
    """Return the seconds of each part of a pass, and of all.

    Reading and multiplying overlap, so the longer one counts. An operand goes to every machine by a tree, and sums over
    rows, which are as large, come back by one. The scheduler hands out tasks one after the other.

    Examples
    --------
    >>> work = Pass(columns=10**6, nnz=10**11, width=64, blocks=20_000)
    >>> rates = ClusterRates(read=2e9, shared=100e9, multiply=8e9, network=1.2e9, task=0.5e-3)
    >>> ten, hundred = (predict(work, rates, machines) for machines in (10, 100))
    >>> round(ten["total"] / hundred["total"], 1)
    7.0
    """
    steps = int(np.ceil(np.log2(machines))) if machines > 1 else 0
    parts = {
        "read": ENTRY * work.nnz / min(machines * rates.read, rates.shared),
        "multiply": work.nnz * work.width / (machines * rates.multiply),
        "send": steps * work.operand / rates.network,
        "schedule": work.blocks * rates.task,
    }
    working = max(parts["read"], parts["multiply"], parts["schedule"])
    return {**parts, "total": working + parts["send"]}


def saturation(work: Pass, rates: ClusterRates) -> dict[str, float]:
    """Return from how many machines on a part that does not shrink takes longer than those that do."""
    shrinking = max(ENTRY * work.nnz / rates.read, work.nnz * work.width / rates.multiply)
    machines = 1.0
    while shrinking / machines > predict(work, rates, int(machines))["send"]:
        machines *= 2
    return {
        "shared storage": rates.shared / rates.read,
        "scheduler": shrinking / (work.blocks * rates.task),
        "sending the operand": machines,
    }


# ------------------------------------------------------------------------------------------------ measuring


def seconds_of(call: Any, repeat: int = 3) -> float:
    """Return the least time of a few calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(path: Path, width: int, workers: int) -> tuple[float, ClusterRates, Pass]:
    """Time a product of a file's blocks on processes of this machine; return it with one process's rates."""
    from dask.distributed import Client, wait

    from sparsetir.blocks import open_blocks

    M = open_blocks(path, memory="64MiB")
    B = np.random.default_rng(0).random((M.shape[1], width), np.float32)
    with Client(n_workers=workers, threads_per_worker=1, dashboard_address=None) as client:

        def product() -> None:
            wait(M.spmm(B, client=client).persist())

        taken = seconds_of(product)
        blocks = M.spmm(B, client=client).numblocks[0]
        send = seconds_of(lambda: wait(client.scatter(B.copy(), broadcast=True)))
        task = seconds_of(lambda: wait(client.map(abs, range(200), pure=False))) / 200
        bare = max(taken - blocks * task, 1e-9)
    rate = workers * M.nnz * width / bare
    work = Pass(M.shape[1], M.nnz, width, blocks)
    # Reading from the page cache is part of the rate of multiplication.
    return taken, ClusterRates(np.inf, np.inf, rate, max(workers - 1, 1) * B.nbytes / send, task), work


def checked(entries: int, widths: Sequence[int], workers: int) -> Iterator[str]:
    """Yield a table of predicted and measured seconds."""
    from sparsetir.blocks import save_blocks
    from sparsetir.workloads.suite import families

    yield "| columns | 1 worker s | workers | predicted s | measured s | predicted / measured |"
    yield "|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rmat"
        save_blocks(families()["rmat"](entries), path)
        for width in widths:
            one, rates, work = measure(path, width, 1)
            several, _, work = measure(path, width, workers)
            expected = predict(work, rates, workers)["total"]
            yield f"| {width} | {one:.2f} | {workers} | {expected:.2f} | {several:.2f} | {expected / several:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("sparsetir bench cluster", description=__doc__)
    parser.add_argument("--entries", type=int, default=5_000_000, help="of the matrix that is measured")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 128], help="columns of the dense operand")
    parser.add_argument("--workers", type=int, default=2, help="processes of this machine")
    parser.add_argument("--machines", type=int, nargs="+", default=[1, 10, 30, 100, 300], help="to predict for")
    options = parser.parse_args(arguments)
    for line in [*checked(options.entries, options.widths, options.workers), "", *lines(options.machines)]:
        print(line, flush=True)


LARGE = Pass(columns=10**6, nnz=10**11, width=64, blocks=20_000)
CLUSTER = ClusterRates(read=2e9, shared=100e9, multiply=8e9, network=1.2e9, task=0.5e-3)


def lines(machines: Sequence[int], work: Pass = LARGE, rates: ClusterRates = CLUSTER) -> Iterator[str]:
    """Yield a table of predicted seconds, and the numbers of machines from which on more do not help."""
    yield "| machines | read s | multiply s | send s | schedule s | in all s |"
    yield "|---|---|---|---|---|---|"
    for count in machines:
        parts = predict(work, rates, count)
        shown = " | ".join(f"{parts[name]:.1f}" for name in ("read", "multiply", "send", "schedule", "total"))
        yield f"| {count} | {shown} |"
    yield ""
    yield "saturated: " + ", ".join(
        f"{name} from {count:.0f} machines" for name, count in saturation(work, rates).items()
    )


if __name__ == "__main__":
    main()


__all__ = ["ClusterRates", "Pass", "lines", "main", "measure", "predict", "saturation"]
