# SPDX-License-Identifier: Apache-2.0
"""A pruned transformer layer for inference beside torch: eager in float32 and bfloat16, and compiled by inductor.

``sparsetir bench pruned`` prints a table: milliseconds of a call, the gain over torch in float32, the error
of the outputs relative to float32, and how many weights of the layer are sparse. With ``--densities`` it is about one
matrix product: by shape of blocks and density, and the density at which sparse and dense take as long.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sparsetir.utils.arguments import parse_seconds
from sparsetir.utils.packages import require
from sparsetir.utils.threads import set_num_threads
from sparsetir.workloads.inputs import reason, say
from sparsetir.workloads.plot import markdown

if TYPE_CHECKING:
    from torch import Tensor, nn

HEAD = ("weights", "way", "ms", "gain", "error", "sparse")
EAGER, BFLOAT16, INT8, INDUCTOR = "torch float32", "torch bfloat16", "torch int8", "torch inductor"
OURS = {"sparsetir float32": None, "sparsetir bfloat16": "bfloat16", "sparsetir int8": "int8"}
WAYS = (EAGER, BFLOAT16, INT8, INDUCTOR, *OURS)
ROUNDS = 5


# ------------------------------------------------------------------ pruning


def in_blocks(weight: Tensor, height: int, width: int, density: float) -> Tensor:
    """Return a mask of the blocks with the largest sums of magnitudes."""
    import torch

    rows, columns = weight.shape[0] // height, weight.shape[1] // width
    sums = weight.abs().view(rows, height, columns, width).sum(dim=(1, 3))
    least = torch.topk(sums.flatten(), max(round(density * sums.numel()), 1)).values[-1]
    return (sums >= least).repeat_interleave(height, 0).repeat_interleave(width, 1)


def two_of_four(weight: Tensor) -> Tensor:
    """Return a mask of the two largest of four neighbours in each row."""
    import torch

    groups = weight.abs().view(weight.shape[0], -1, 4)
    return torch.zeros_like(groups).scatter_(2, groups.topk(2, dim=2).indices, 1).view_as(weight)


MASKS: dict[str, Callable[[Any], Any]] = {
    "90 % in 16x1": partial(in_blocks, height=16, width=1, density=0.1),
    "80 % in 4x4": partial(in_blocks, height=4, width=4, density=0.2),
    "2:4": two_of_four,
    "90 % unstructured": partial(in_blocks, height=1, width=1, density=0.1),
}


def pruned_layer(features: int, mask: Callable[[Any], Any]) -> nn.Module:
    """Return a transformer layer whose matrices are pruned."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(features, features // 64, 4 * features, dropout=0.0, batch_first=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter *= mask(parameter)
    return layer.eval()


# ------------------------------------------------------------------ ways


def made(way: str, layer: Any, x: Any) -> tuple[Callable[[], Any], str]:
    """Return the call of a layer in one way, and the share of its weights in sparse layers."""
    import sparsetir.torch
    import torch

    if way == BFLOAT16:
        return partial(copy.deepcopy(layer).bfloat16(), x.bfloat16()), ""
    if way == INT8:
        return partial(_quantized(layer), x), ""
    if way in OURS:
        report = sparsetir.torch.SparsifyReport()
        model = sparsetir.torch.sparsify_(
            copy.deepcopy(layer), keep="nonzeros", dtype=OURS[way], examples=[x], report=report
        )
        say(f"{way}\n{report}")
        measured = [change for change in report if change.times]
        sparse = sum(c.weights for c in measured if c.is_sparse) / max(sum(c.weights for c in measured), 1)
        return partial(model, x), f"{sparse:.0%}"
    return partial(torch.compile(layer) if way == INDUCTOR else layer, x), ""


def _quantized(model: Any) -> Any:
    """Return a model whose linear layers torch computes in int8, with the range of each batch of inputs."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def side_by_side(calls: dict[str, Callable[[], Any]], seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Return the least seconds of a call of each way, timed in turns."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            end = time.perf_counter() + seconds / ROUNDS
            while True:
                start = clock()
                call()
                least[name] = min(least[name], clock() - start)
                if time.perf_counter() > end:
                    break
    return least


def rows_of(pattern: str, args: argparse.Namespace) -> list[list[str]]:
    """Return a row for each way of a layer with weights of a pattern."""
    import torch

    layer = pruned_layer(args.features, MASKS[pattern])
    x = torch.randn(args.batch, args.length, args.features, generator=torch.Generator().manual_seed(1))
    calls, shares, errors = {}, {}, {}
    with torch.no_grad():
        expected = layer(x)
        for way in args.ways.split(","):
            try:
                call, share = made(way, layer, x)
                error = (call().float() - expected).norm() / expected.norm()
            except Exception as fault:  # Another library's; the others go on.
                if way in OURS:
                    raise
                say(f"left out: {way} ({reason(fault)})")
                continue
            calls[way], shares[way], errors[way] = call, share, float(error)
        clock = time.process_time if args.cpu else time.perf_counter
        times = side_by_side(calls, args.seconds, clock)
    base = times.get(EAGER)
    gains = {way: "" if base is None else f"{base / seconds:.2f}" for way, seconds in times.items()}
    return [[pattern, w, f"{times[w] * 1e3:.3g}", gains[w], f"{errors[w]:.1e}", shares[w]] for w in times]


# ------------------------------------------------------------------ one product


SHAPES = {"1x1": (1, 1), "4x4": (4, 4), "16x1": (16, 1), "32x32": (32, 32)}
DTYPES = ("float32", "bfloat16", "int8")


def products(weight: Tensor, x: Tensor, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return milliseconds and relative error of products with a weight: torch's dense ones, and our sparse ones."""
    import torch
    from sparsetir.torch.pruned_layers import LayerProduct, Weight, suits_ranges

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    scale = float(x.abs().max()) / 127
    calls: dict[str, Callable[[], Any]] = {
        "dense float32": partial(torch.nn.functional.linear, x, weight),
        "dense bfloat16": partial(torch.nn.functional.linear, x.bfloat16(), weight.bfloat16()),
        "dense int8": partial(_quantized(torch.nn.Sequential(layer)), x),
    }
    for dtype in DTYPES:
        for kind in ("columns", "rows") if dtype != "int8" else ("columns",):
            operand = x.bfloat16() if dtype == "bfloat16" else x  # as for the dense product
            product = LayerProduct(Weight.from_dense(weight, f"{kind} {dtype}", scale))
            calls[f"{kind} {dtype}"] = partial(product.rows, operand)
    if suits_ranges(weight):
        calls["ranges float32"] = partial(LayerProduct(Weight.from_dense(weight, "ranges float32")).rows, x)
    expected = x.double() @ weight.double().t()
    errors = {name: float((call().double() - expected).norm() / expected.norm()) for name, call in calls.items()}
    times = side_by_side(calls, args.seconds, time.process_time if args.cpu else time.perf_counter)
    results: dict[str, tuple[float, float]] = {}
    for name in calls:
        kind, dtype = name.split()
        key = name if kind == "dense" else f"sparse {dtype}"
        if key not in results or times[name] * 1e3 < results[key][0]:
            results[key] = times[name] * 1e3, errors[name]
    return results


def break_even(densities: Sequence[float], sparse: Sequence[float], dense: Sequence[float]) -> str:
    """Return the density at which two times meet, interpolated, or a bound of it."""
    ratios = [one / other for one, other in zip(sparse, dense, strict=True)]
    if ratios[0] > 1:
        return f"< {densities[0]:.0%}"
    for n in range(1, len(ratios)):
        if ratios[n] > 1:
            share = (1 - ratios[n - 1]) / (ratios[n] - ratios[n - 1])
            return f"{densities[n - 1] + share * (densities[n] - densities[n - 1]):.0%}"
    return f"> {densities[-1]:.0%}"


def density_tables(args: argparse.Namespace) -> list[list[list[str]]]:
    """Return the table of times and errors by shape of blocks and density, and that of break-even densities."""
    import torch

    torch.manual_seed(0)
    weight, x = torch.randn(args.features, args.features), torch.randn(args.batch * args.length, args.features)
    densities = sorted(map(float, args.densities.split(",")))
    columns = [f"{kind} {dtype}" for dtype in DTYPES for kind in ("dense", "sparse")]
    times = [["blocks", "density", *columns, *(f"error {dtype}" for dtype in DTYPES)]]
    meeting = [["blocks", *(f"sparse {dtype} = dense {dtype}" for dtype in DTYPES), "best sparse = best dense"]]

    def note(name: str, density: float, result: dict[str, tuple[float, float]]) -> None:
        cells = [f"{result[column][0]:.3g}" for column in columns]
        errors = [f"{result[f'sparse {dtype}'][1]:.0e}" for dtype in DTYPES]
        times.append([name, f"{density:.0%}", *cells, *errors])

    with torch.no_grad():
        for name, shape in SHAPES.items():
            results = [products(weight * in_blocks(weight, *shape, density), x, args) for density in densities]
            for density, result in zip(densities, results, strict=True):
                note(name, density, result)
            row = [name]
            for dtypes in (*((dtype,) for dtype in DTYPES), DTYPES):
                least = [
                    [min(result[f"{kind} {dtype}"][0] for dtype in dtypes) for result in results]
                    for kind in ("sparse", "dense")
                ]
                row.append(break_even(densities, *least))
            meeting.append(row)
        note("2:4", 0.5, products(weight * two_of_four(weight), x, args))
    return [times, meeting]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="sparsetir bench pruned", description=__doc__)
    add = parser.add_argument
    add("--features", type=int, default=512, help="of a token, a multiple of 64 (default: 512)")
    add("--batch", type=int, default=4, help="sequences (default: 4)")
    add("--length", type=int, default=64, help="tokens of a sequence (default: 64)")
    add("--weights", default=",".join(MASKS), help="of " + ", ".join(MASKS).replace("%", "%%"))
    add("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    add("--densities", default="", help="of one product in place of a layer, such as 0.05,0.1,0.2,0.3,0.5")
    add("--seconds", type=parse_seconds, default=1.0, help="for each way (default: 1)")
    add("--threads", type=int, default=2, help="of both libraries (default: 2)")
    add("--cpu", action="store_true", help="CPU time in place of time: for one thread on a busy machine")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    require("torch", extra="torch", purpose="sparsetir.bench.pruned")
    import torch

    args = arguments(argv)
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    if args.densities:
        print("\n\n".join(markdown(table) for table in density_tables(args)))
        return
    rows = [list(HEAD)]
    for pattern in args.weights.split(","):
        rows += rows_of(pattern, args)
    print(markdown(rows))


if __name__ == "__main__":
    main()


__all__ = ["main"]
