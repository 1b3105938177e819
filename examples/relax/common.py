# SPDX-License-Identifier: Apache-2.0
"""What the examples share: real data or a generated stand-in, models from a few lines, and a table of times."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm
from tvm import ir, relax

import sparsetir.relax as srelax
from sparsetir.codegen.target import native_target
from sparsetir.workloads.timing import Timing, interleave

try:
    import torch
except ImportError:
    torch = None

SLOW, PATIENCE = 1.0, 5.0  # seconds: a longer call is timed once more and not in bursts; or not again
REST = 0.2  # seconds before a burst
OTHERS = ("torch", "dense, TVM", "dense, our build")
Model = Callable[..., Any]
Torch = Callable[[], Mapping[str, Callable[[], Any]]]


# ------------------------------------------------------------------ data


def options(about: str, argv: Sequence[str] | None, **numbers: tuple[float, str]) -> argparse.Namespace:
    """Return the command line of an example; `numbers` are more options, each with its default and meaning."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small generated inputs, for a quick check")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of calls for each contender (default: 5)")
    for name, (usual, text) in numbers.items():
        parser.add_argument(f"--{name}", type=float, default=usual, help=text)
    return parser.parse_args(argv)


def real_file(path: str, *, small: bool) -> Path | None:
    """Find a file below the folder that SPARSETIR_DATA names, or return None; print what is used."""
    found = Path(os.environ.get("SPARSETIR_DATA", "/nowhere"), path)
    if not small and found.is_file():
        print(f"input: {path}")
        return found
    why = "--small" if small else f"no {path} in a folder that SPARSETIR_DATA names"
    print(f"input: generated ({why})")
    return None


def graph(path: str, nodes: int, edges: int, *, small: bool) -> sp.csr_array:
    """Return a real graph, or a random one of about that size with a few popular nodes."""
    found = real_file(path, small=small)
    if found is not None:
        return sp.csr_array(sp.load_npz(found))
    if small:
        nodes, edges = 300, 1500
    rng = np.random.default_rng(0)
    ends = (rng.integers(0, nodes, edges // 2), np.minimum(rng.zipf(1.6, edges // 2), nodes) - 1)
    half = sp.coo_array((np.ones(edges // 2, np.float32), ends), shape=(nodes, nodes))
    whole = sp.csr_array(half + half.T)
    parts = (np.ones(whole.nnz, np.float32), whole.indices.astype(np.int32), whole.indptr.astype(np.int32))
    return sp.csr_array(parts, shape=whole.shape)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Numbers of a normal distribution, float32."""
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# ------------------------------------------------------------------ models


def model(body: Model, *inputs: np.ndarray, functions: Mapping[str, Any] | None = None) -> ir.IRModule:
    """Return a module whose main is `body(builder, *variables)`, which emits all but its last expression.

    `functions` are added to the module; `body` takes their variables by name.
    """
    builder = relax.BlockBuilder()
    added = {name: builder.add_func(func, name) for name, func in (functions or {}).items()}
    params = [relax.Var(f"x{n}", relax.TensorType(a.shape, str(a.dtype))) for n, a in enumerate(inputs)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(body(builder, *params, **added)))
        builder.emit_func_output(out)
    return builder.get()


def runner(executable: Any, inputs: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
    """Return a call of a built model."""
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    arrays = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in inputs]
    return lambda: main(*arrays)


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Parameters
    ----------
    name : str
    inputs : sequence of ndarray
        Of both modules.
    sparse, dense : IRModule
        The model with the operators of this package, and the same with dense tensors; None if the latter do not fit.
    torch : callable
        Gives formulations in PyTorch by name; called only where it is installed. The fastest counts.
    want : ndarray
        The result, computed with numpy or scipy.
    """

    name: str
    inputs: Sequence[np.ndarray]
    sparse: ir.IRModule
    dense: ir.IRModule | None
    torch: Torch
    want: np.ndarray


@dataclass(frozen=True)
class Line:
    """What was measured: milliseconds by contender, and the largest difference of our result from PyTorch's."""

    name: str
    times: dict[str, float]
    formulation: str
    difference: float

    def cells(self, others: Sequence[str]) -> list[str]:
        """For a table in which these stand beside us."""
        ours = self.times["ours"]
        shown = [f"{self.times[name]:.3g}" if name in self.times else "-" for name in ("ours", *others)]
        ratios = [f"{self.times[name] / ours:.2f}" if name in self.times else "-" for name in others]
        return [self.name, *shown, *ratios, self.formulation, f"{self.difference:.1e}"]


# ------------------------------------------------------------------ measuring


def compare(title: str, cases: Sequence[Case], *, rounds: int, tolerance: float = 1e-4) -> list[Line]:
    """Check and time the cases, and print the table.

    Parameters
    ----------
    title : str
    cases : sequence of Case
    rounds : int
    tolerance : float
        Of the largest difference, relative to the largest element.

    Raises
    ------
    AssertionError
        A result differs by more.
    """
    lines = []
    for case in cases:
        print(f"{title}: {case.name} ...", flush=True)
        lines.append(measure(case, rounds, tolerance))
    print("\n" + table(title, lines) + "\n")
    return lines


def measure(case: Case, rounds: int, tolerance: float) -> Line:
    """Build, check and time one case."""
    contenders = {"ours": runner(srelax.build(case.sparse), case.inputs)}
    if case.dense is not None:
        contenders["dense, TVM"] = runner(relax.build(case.dense, native_target()), case.inputs)
        contenders["dense, our build"] = runner(srelax.build(case.dense), case.inputs)
    if torch is not None:
        contenders |= {f"torch {name}": call for name, call in case.torch().items()}
    got = as_array(contenders["ours"]())
    differences, first = {"numpy": check("numpy", got, case.want, tolerance)}, {}
    for name, call in contenders.items():
        result, first[name] = once(call)
        differences[name] = check(name, as_array(result), got, tolerance)
    times = {name: 1e3 * value for name, value in seconds(contenders, first, rounds).items()}
    by_torch = [name for name in times if name.startswith("torch ")]
    kept = {name: value for name, value in times.items() if name not in by_torch}
    if not by_torch:
        return Line(case.name, kept, "-", differences["numpy"])
    best = min(by_torch, key=times.__getitem__)
    kept["torch"] = times[best]
    return Line(case.name, kept, best.removeprefix("torch "), max(differences[name] for name in by_torch))


def as_array(result: Any) -> np.ndarray:
    """Return a result as a numpy array."""
    return result.numpy() if hasattr(result, "numpy") else np.asarray(result)


def check(name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> float:
    """Return the largest difference from another result.

    Raises
    ------
    AssertionError
        It is too large.
    """
    if got.shape != want.shape:
        raise AssertionError(f"has the shape {got.shape}, {name} {want.shape}")
    difference, largest = float(np.abs(got - want).max()), float(np.abs(want).max())
    allowed = tolerance * max(largest, 1.0)
    if not difference <= allowed:
        raise AssertionError(f"differs from {name} by {difference:.2e}; at most {allowed:.2e} was expected")
    return difference


def seconds(contenders: Mapping[str, Callable[[], Any]], first: Mapping[str, float], rounds: int) -> dict[str, float]:
    """Return the time of a call of each.

    All are timed in turn, a burst of calls each, with a rest between in which the threads of one library go to sleep.
    The median of the quietest burst counts, for other programs on the machine only ever add to a time; while every
    burst of a contender had calls that waited for a core, there are further rounds, twice as many as asked for at most.
    A call that takes long is a burst; if it takes very long, `first`, the time of the first call, stands.
    """
    again = lambda name: min(first[name], once(contenders[name])[1]) if first[name] < PATIENCE else first[name]  # noqa: E731
    slow = {name: again(name) for name in contenders if first[name] > SLOW}
    best: dict[str, Timing] = {}
    waiting = {name: call for name, call in contenders.items() if name not in slow}
    for n in range(3 * rounds):
        for name, timing in interleave(waiting, rounds=1, rest=REST).items():
            best[name] = min(best.get(name, timing), timing, key=lambda t: t.median)
        if n + 1 >= rounds:
            waiting = {name: call for name, call in waiting.items() if best[name].waited}
    for name in waiting:
        print(f"  {name}: calls waited for a core in every burst; its time says little")
    return slow | {name: timing.median for name, timing in best.items()}


def once(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and its time."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def table(title: str, lines: Sequence[Line]) -> str:
    """Return the lines under their heads, in columns; contenders that no line has are left out."""
    others = [name for name in OTHERS if any(name in line.times for line in lines)]
    head = ["model", "ours", *others, *(f"vs {name}" for name in others), "torch formulation", "difference"]
    rows = [head, *(line.cells(others) for line in lines)]
    if "torch" not in others:
        rows = [[*row[:-2], row[-1]] for row in rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    text = ("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in ruled)
    by = f"torch {torch.__version__}, {torch.get_num_threads()} threads" if torch is not None else "torch not installed"
    notes = f"{by}; difference: largest from {'torch' if torch is not None else 'numpy'}"
    return "\n".join([title, *text, "milliseconds, median of the quietest burst of calls; " + notes])
