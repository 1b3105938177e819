# SPDX-License-Identifier: Apache-2.0
"""Grouped products beside a loop of ``torch.mm``, padded ``torch.bmm`` and ``torch.nn.functional.grouped_mm``.

Run ``sparsetir bench grouped``. Times are the least of interleaved runs, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sparsetir.utils.packages import require

require("torch", extra="torch", purpose="sparsetir.bench.grouped")

SHAPES = ("8x512", "64x16", "64x1", "16xragged")
MEAN_RAGGED = 64  # rows of a group, on average, where lengths are ragged


def lengths_of(shape: str) -> np.ndarray:
    """Return the rows of each group of a shape such as ``8x512``, or ``16xragged`` for geometric lengths."""
    groups, _, rows = shape.partition("x")
    if rows == "ragged":
        return np.random.default_rng(0).geometric(1 / MEAN_RAGGED, int(groups))
    return np.full(int(groups), int(rows))


def ways(lengths: np.ndarray, depth: int, feat: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """Return the calls to compare, on drawn operands."""
    import sparsetir.torch
    import torch
    from sparsetir.torch.products import WAYS, GroupEnds

    kind = getattr(torch, dtype)
    ends = np.cumsum(lengths)
    groups = GroupEnds(ends.tolist())
    x = torch.randn(int(ends[-1]), depth).to(kind)
    w = torch.randn(lengths.size, depth, feat).to(kind)
    offs = torch.from_numpy(ends).int()
    parts = list(groups.bounds)
    padded = x.new_zeros(lengths.size, int(lengths.max()), depth)
    for g, (low, high) in enumerate(parts):
        padded[g, : high - low] = x[low:high]
    return {
        "loop of mm": lambda: torch.cat([torch.mm(x[low:high], w[g]) for g, (low, high) in enumerate(parts)]),
        "bmm, padded before": lambda: torch.bmm(padded, w),
        "torch's own": lambda: torch.nn.functional.grouped_mm(x, w, offs=offs),
        "our kernel": lambda: WAYS["rows"]["kernel"](x, w, groups),
        "grouped_mm": lambda: sparsetir.torch.grouped_mm(x, w, offs),
    }


def measure(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Return the least seconds of each call."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(repeat):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def lines(shapes: Sequence[str], dtypes: Sequence[str], depth: int, feat: int, repeat: int) -> Iterator[str]:
    """Yield the rows of the table."""
    names: list[str] = []
    for dtype in dtypes:
        for shape in shapes:
            seconds = measure(ways(lengths_of(shape), depth, feat, dtype), repeat)
            if not names:
                names = list(seconds)
                yield f"| groups x rows | dtype | {' | '.join(names)} | loop / grouped_mm |"
                yield "|---" * (len(names) + 3) + "|"
            times = " | ".join(f"{seconds[name] * 1e3:.2f}" for name in names)
            yield f"| {shape} | {dtype} | {times} | {seconds['loop of mm'] / seconds['grouped_mm']:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("sparsetir bench grouped", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="groups x rows, or groups x ragged")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--feat", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args(arguments)
    import torch
    from sparsetir.utils.threads import set_num_threads

    set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    for line in lines(options.shapes, options.dtypes, options.depth, options.feat, options.repeat):
        print(line, flush=True)


if __name__ == "__main__":
    main()


__all__ = ["lengths_of", "lines", "measure", "ways"]
