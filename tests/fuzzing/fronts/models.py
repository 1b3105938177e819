# SPDX-License-Identifier: Apache-2.0
"""Relax models with several pruned layers of one shape, through `SparsifyWeights`, compared with numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from fuzzing.case import Case, Expected, Finding, Front, difference, unclear
from fuzzing.values import PRELUDE, literal
from sparsetir.errors import SparseTIRError

INPUTS = 8
#: statements that build `model` of `weights`, `sides` and `functions`
BUILD = '''
import tvm
from tvm import relax
import sparsetir.relax

def product(builder, x, weight, side):
    """A layer, written as front ends write it."""
    if side == "x @ W":
        return relax.op.matmul(x, relax.const(weight, str(weight.dtype)))
    if side == "x @ W.T":
        return relax.op.matmul(x, builder.emit(relax.op.permute_dims(relax.const(weight.T.copy(), str(weight.dtype)))))
    return relax.op.linear(x, relax.const(weight.T.copy(), str(weight.dtype)))

def build(weights, sides, functions, rows):
    """A compiled chain of layers."""
    dtype = str(weights[0].dtype)
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([rows, len(weights[0])], dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for weight, side, function in zip(weights, sides, functions):
                y = builder.emit(product(builder, y, weight, side))
                y = builder.emit(getattr(relax.op, function)(y)) if function in ("tanh", "abs") else y
            y = builder.emit_output(relax.op.add(y, relax.const(np.zeros((), dtype), dtype)))
        builder.emit_func_output(y)
    module = sparsetir.relax.SparsifyWeights(decide="predict")(builder.get())
    return relax.VirtualMachine(sparsetir.relax.build(module), tvm.cpu())["main"]
'''
_TOOLS: dict[str, Any] = {}


def tools() -> dict[str, Any]:
    """The functions of `BUILD`, compiled once."""
    if not _TOOLS:
        exec(compile("import numpy as np\n" + BUILD, "<models>", "exec"), _TOOLS)
    return _TOOLS


@dataclass(frozen=True, eq=False)
class ModelCase(Case):
    """Layers and an input."""

    weights: tuple[np.ndarray, ...]
    sides: tuple[str, ...]
    functions: tuple[str, ...]
    x: np.ndarray

    def run(self) -> Finding | None:
        import tvm

        try:
            got = model(Layers(self)).__call__(tvm.runtime.tensor(self.x)).numpy()
        except SparseTIRError:
            raise
        except Exception as error:
            return unclear(error)
        text = difference(got, self.expected())
        return Finding("wrong", f"{len(self.weights)} layers", text) if text else None

    def expected(self) -> Expected:
        y, size = self.x.astype(np.float64), np.abs(self.x.astype(np.float64))
        for weight, function in zip(self.weights, self.functions, strict=True):
            y, size = y @ weight.astype(np.float64), size @ np.abs(weight.astype(np.float64))
            y = np.tanh(y) if function == "tanh" else np.abs(y) if function == "abs" else y
        return Expected(y, (1e-5 if self.x.dtype == np.float32 else 1e-12) * (1 + size))

    def smaller(self) -> Iterator[Case]:
        for n in range(len(self.weights) if len(self.weights) > 1 else 0):
            kept = [m for m in range(len(self.weights)) if m != n]
            parts = [tuple(part[m] for m in kept) for part in (self.weights, self.sides, self.functions)]
            if all(a.shape[1] == b.shape[0] for a, b in zip(parts[0], parts[0][1:], strict=False)):
                if parts[0][0].shape[0] == self.x.shape[1]:
                    yield replace(self, weights=parts[0], sides=parts[1], functions=parts[2])
        if set(self.functions) != {""}:
            yield replace(self, functions=("",) * len(self.weights))
        if set(self.sides) != {"x @ W"}:
            yield replace(self, sides=("x @ W",) * len(self.weights))
        if len(self.x) > 1:
            yield replace(self, x=self.x[:1])

    def script(self) -> str:
        want = self.expected()
        lines = [PRELUDE, BUILD, f"weights = [{', '.join(literal(w) for w in self.weights)}]", f"x = {literal(self.x)}"]
        lines += [
            f"run = build(weights, {self.sides}, {self.functions}, {len(self.x)})",
            "got = run(tvm.runtime.tensor(x)).numpy()",
            f"want, slack = {literal(want.values)}, {literal(np.asarray(want.slack))}",
            "print('expected', want.tolist())\nprint('got     ', got.tolist())",
            "raise SystemExit(not (abs(got - want) <= slack).all())\n",
        ]
        return "\n".join(lines)


class Layers:
    """The layers of a case, which have one model for all inputs."""

    def __init__(self, case: ModelCase) -> None:
        self.case = case
        self.key = tuple(id(w) for w in case.weights), case.sides, case.functions, len(case.x)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layers) and self.key == other.key


@lru_cache(maxsize=1)
def model(layers: Layers) -> Any:
    case = layers.case
    return tools()["build"](list(case.weights), case.sides, case.functions, len(case.x))


class Models(Front):
    """Pruned models."""

    name, groups = "models", 1

    def draw(self, rng: Random) -> Iterator[Case]:
        draw = np.random.default_rng(rng.randrange(1 << 62))
        dtype, width = rng.choice(["float32", "float32", "float64"]), rng.choice([32, 64, 128])
        count, rows = rng.choice([2, 3, 4]), rng.choice([1, 2, 5, 8])
        weights = [pruned(draw, rng, width, dtype) for _ in range(count)]
        if rng.random() < 0.3:  # one bit, or the sign of a zero, apart
            weights[-1] = weights[0].copy()
            at = tuple(np.argwhere(weights[0])[0]) if weights[0].any() else (0, 0)
            weights[-1][at] = (
                np.nextafter(weights[0][at], np.array(9, dtype)) if rng.random() < 0.5 else -weights[0][at]
            )
        sides = tuple(rng.choice(["x @ W", "x @ W.T", "linear"]) for _ in weights)
        functions = tuple(rng.choice(["", "tanh", "abs"]) for _ in weights)
        for _ in range(INPUTS):
            x = draw.standard_normal((rows, width)).astype(dtype)
            yield ModelCase(tuple(weights), sides, functions, x)


def pruned(draw: np.random.Generator, rng: Random, width: int, dtype: str) -> np.ndarray:
    """A weight of which few elements are left, of about one size, or small ones."""
    weight = draw.standard_normal((width, width)) * rng.choice([0.01, 0.3, 3.0])
    return np.where(draw.random((width, width)) < rng.choice([0.02, 0.05, 0.2]), weight, 0).astype(dtype)


__all__ = ["ModelCase", "Models"]
