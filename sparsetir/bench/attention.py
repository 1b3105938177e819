# SPDX-License-Identifier: Apache-2.0
"""Attention under masks and of jagged batches beside torch, and our attention along single edges.

Run ``sparsetir bench attention``. Times are the least of interleaved runs, in milliseconds: of a forward
pass, and of a forward and a backward pass. With ``--jagged`` the table is about sequences of ragged lengths in place of
masks: padded, one after the other, and as nested tensors of torch.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsetir.utils.packages import require
from sparsetir.workloads.inputs import reason, say

require("torch", extra="torch", purpose="sparsetir.bench.attention")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import sparsetir.torch  # noqa: E402
import torch  # noqa: E402

Attend = Callable[..., torch.Tensor]
MASKS = ("blocks64", "blocks32", "blocks16", "window", "causal")
PASSES = ("forward", "both")


def mask_of(name: str, length: int) -> np.ndarray:
    """Return a mask [length, length]: a tenth of all blocks of a size and those on the diagonal, or a window."""
    distance = np.arange(length)[:, None] - np.arange(length)
    if name == "window":
        return np.abs(distance) <= length // 16
    if name == "causal":
        return (distance >= 0) & (distance <= length // 8)
    size = int(name.removeprefix("blocks"))
    count = length // size
    chosen = np.random.default_rng(0).random((count, count)) < 0.1
    return np.kron(chosen | np.eye(count, dtype=bool), np.ones((size, size), bool))


def _flexible(mask: torch.Tensor) -> Attend:
    """Return compiled flex_attention under a mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = mask.shape[0]
    is_edge = lambda _batch, _head, i, j: mask[i, j]  # noqa: E731
    blocks = create_block_mask(is_edge, None, None, length, length, device="cpu", BLOCK_SIZE=64)
    compiled = torch.compile(flex_attention)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        # It has no gradients on CPUs; after that error the compiler would leave the forward pass to eager execution.
        has_gradient = any(t.requires_grad for t in tensors)
        return (flex_attention if has_gradient else compiled)(*tensors, block_mask=blocks)

    return attend


def _along(graph: sparsetir.torch.Graph) -> Attend:
    """Return attention of a graph for tensors [batch, heads, length, features]."""
    return lambda *tensors: graph.attention(*(t.transpose(1, 2) for t in tensors)).transpose(1, 2)


def ways(mask: np.ndarray, names: Sequence[str]) -> dict[str, Attend]:
    """Return the ways to compute attention of tensors [batch, heads, length, features] under a mask."""
    dense = torch.from_numpy(mask)
    by_edges = sparsetir.torch.Graph(dense)
    by_edges.rows.blocks = None
    makers: dict[str, Callable[[], Attend]] = {
        "torch": lambda: partial(scaled_dot_product_attention, attn_mask=dense),
        "flex": lambda: _flexible(dense),
        "edges": lambda: _along(by_edges),
        "sparsetir": lambda: _along(sparsetir.torch.Graph(dense)),
    }
    return {name: makers[name]() for name in names}


WAYS = ("torch", "flex", "edges", "sparsetir")


def calls_of(attend: Attend, tensors: Sequence[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Return a call of the forward pass alone, and one of both passes."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    gradient = torch.ones_like(tensors[2])

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend(*tensors)

    return {"forward": forward, "both": lambda: torch.autograd.grad(attend(*leaves), leaves, gradient)}


def measure(calls: dict[str, Callable[[], Any]], repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the least milliseconds of each call that succeeds."""
    least = {}
    for name, call in calls.items():
        try:
            call()
            least[name] = float("inf")
        except Exception as fault:  # Another library's; the others go on.
            if "sparsetir" in name or "edges" in name:
                raise
            say(f"left out: {name} ({reason(fault)})")
    for _ in range(repeat):
        for name in least:
            start = clock()
            calls[name]()
            least[name] = min(least[name], (clock() - start) * 1e3)
    return least


JAGGED_WAYS = ("padded", "loop", "nested", "sparsetir")


def jagged_ways(lengths: np.ndarray, is_causal: bool) -> dict[str, Attend]:
    """Return the ways to compute attention of rows [positions, heads, features] of sequences of these lengths."""
    parts = lengths.tolist()
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    position = torch.arange(int(lengths.max()))
    is_there = position < torch.from_numpy(lengths)[:, None]
    mask = is_there[:, None, None] & (position[:, None] >= position if is_causal else True)
    nested = lambda rows: torch.nested.nested_tensor_from_jagged(rows, offsets)  # noqa: E731

    places = is_there.flatten().nonzero().squeeze(1)

    def spread(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.new_zeros(is_there.numel(), *rows.shape[1:]).index_copy(0, places, rows)
        return wide.view(*is_there.shape, *rows.shape[1:]).transpose(1, 2)

    def padded(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = map(spread, tensors)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(0, 1)[places]

    def loop(*tensors: torch.Tensor) -> torch.Tensor:
        split = zip(*(t.transpose(0, 1)[None].split(parts, dim=2) for t in tensors), strict=True)
        each = [scaled_dot_product_attention(q, k, v, is_causal=is_causal) for q, k, v in split]
        return torch.cat(each, dim=2)[0].transpose(0, 1)

    def of_torch(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = (nested(t).transpose(1, 2) for t in tensors)
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).values()

    ours = lambda *tensors: sparsetir.torch.jagged_attention(*map(nested, tensors), is_causal=is_causal).values()  # noqa: E731
    return {"padded": padded, "loop": loop, "nested": of_torch, "sparsetir": ours}


def jagged_lines(args: argparse.Namespace) -> Iterator[str]:
    """Yield the rows of the table of jagged batches."""
    heads = [f"{name}, {each}" for each in PASSES for name in JAGGED_WAYS]
    yield f"| sequences x length | dtype | causal | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 3) + "|"
    for batch in args.jagged.split(","):
        count, _, mean = batch.partition("x")
        lengths = np.random.default_rng(0).geometric(1 / int(mean), int(count))
        for dtype, is_causal in itertools.product(args.dtypes.split(","), (False, True)):
            torch.manual_seed(0)
            shape = (int(lengths.sum()), args.heads, args.features)
            tensors = [torch.randn(shape).to(getattr(torch, dtype)) for _ in range(3)]
            calls_by_way = {name: calls_of(way, tensors) for name, way in jagged_ways(lengths, is_causal).items()}
            calls = {f"{name}, {each}": calls_by_way[name][each] for each in PASSES for name in JAGGED_WAYS}
            least = measure(calls, args.repeat, time.process_time if args.cpu else time.perf_counter)
            times = " | ".join(f"{least[head]:.1f}" if head in least else "" for head in heads)
            yield f"| {batch} | {dtype} | {'yes' if is_causal else 'no'} | {times} |"


def lines(args: argparse.Namespace) -> Iterator[str]:
    """Yield the rows of the table of masks."""
    names = args.ways.split(",")
    heads = [f"{name}, {each}" for each in PASSES for name in names]
    yield f"| mask | dtype | edges | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 3) + "|"
    for mask_name in args.masks.split(","):
        mask = mask_of(mask_name, args.length)
        attend = ways(mask, names)
        for dtype in args.dtypes.split(","):
            torch.manual_seed(0)
            shape = (args.batch, args.heads, args.length, args.features)
            tensors = [torch.randn(shape).to(getattr(torch, dtype)) for _ in range(3)]
            calls_by_way = {name: calls_of(way, tensors) for name, way in attend.items()}
            calls = {f"{name}, {each}": calls_by_way[name][each] for each in PASSES for name in names}
            least = measure(calls, args.repeat, time.process_time if args.cpu else time.perf_counter)
            times = " | ".join(f"{least[head]:.1f}" if head in least else "" for head in heads)
            yield f"| {mask_name} | {dtype} | {mask.mean():.1%} | {times} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("sparsetir bench attention", description=__doc__)
    add = parser.add_argument
    add("--masks", default=",".join(MASKS), help=f"of {', '.join(MASKS)}")
    add("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    add("--jagged", default="", help="batches such as 32x128, of 32 sequences of 128 positions on average")
    add("--dtypes", default="float32,bfloat16")
    add("--length", type=int, default=2048, help="a multiple of 64 (default: 2048)")
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=8)
    add("--features", type=int, default=64)
    add("--threads", type=int, default=1)
    add("--repeat", type=int, default=5)
    add("--cpu", action="store_true", help="CPU time in place of time: for one thread on a busy machine")
    args = parser.parse_args(arguments)
    from sparsetir.utils.threads import set_num_threads

    set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    for line in jagged_lines(args) if args.jagged else lines(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()


__all__ = ["calls_of", "jagged_lines", "jagged_ways", "lines", "mask_of", "measure", "ways"]
