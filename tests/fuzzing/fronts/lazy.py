# SPDX-License-Identifier: Apache-2.0
"""Lazy expressions: every operation as either operand of every other, over sparse and dense leaves of ranks 0 to 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np
import scipy.special

from fuzzing.case import Case, CodeCase, CodeFront, Expected, Skip
from fuzzing.values import Array, Value, dense_value, sparse_value

SHAPES = ("mn", "mn", "nm", "mm", "nn", "m", "n", "")
UNARY = ("relu", "tanh", "abs", "negative", "sqrt", "sigmoid", "exp", "gelu", "silu", "log", "softmax")
BINARY = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "power": "**"}
NUMBERS = (2.0, 0.5, -1.0, 1.0, 3.0, 0.0)
KINDS = (
    "csr_array",
    "csr_array",
    "csc_array",
    "coo_array",
    "torch_csr",
    "CooTensor",
    "SparseTensor csr",
    "SparseTensor dcsr",
)
NOISE = {"float16": 2.0**-10, "float32": 2.0**-22, "float64": 2.0**-50}
TRIALS, INPUTS = 3, 10
#: an expression: an operation and its operands; ("leaf", name), ("number", value), ("sum", e, axis)
Expr = tuple[Any, ...]
Part = tuple[Array, "Array | None"]


class Grower:
    """Draws an expression of a shape."""

    def __init__(self, rng: Random, products: int) -> None:
        self.rng, self.products = rng, products

    def grow(self, shape: str, depth: int) -> Expr:
        kind = self.rng.random()
        if depth == 0 or kind < 0.12:
            return ("leaf", f"{'S' if len(shape) == 2 and self.rng.random() < 0.5 else 'D'}_{shape or '0'}")
        if kind < 0.4 and shape and self.products:
            self.products -= 1
            return self.product(shape, depth)
        if kind < 0.65:
            return self.binary(shape, depth)
        if kind < 0.9 or (len(shape) == 2 and kind < 0.94):
            return (self.rng.choice(UNARY), self.grow(shape, depth - 1))
        if len(shape) == 2:
            return ("T", self.grow(shape[::-1], depth - 1))
        return self.reduction(shape, depth)

    def product(self, shape: str, depth: int) -> Expr:
        inner = self.rng.choice("mn")
        if len(shape) == 2:
            return ("matmul", self.grow(shape[0] + inner, depth - 1), self.grow(inner + shape[1], depth - 1))
        pair = (self.grow(shape + inner, depth - 1), self.grow(inner, depth - 1))
        turned = (self.grow(inner, depth - 1), self.grow(inner + shape, depth - 1))
        return ("matmul", *self.rng.choice([pair, turned]))

    def binary(self, shape: str, depth: int) -> Expr:
        op = self.rng.choice(list(BINARY))
        one = self.grow(shape, depth - 1)
        if op == "power" or self.rng.random() < 0.4:
            other: Expr = ("number", self.rng.choice(NUMBERS))
        else:
            other = self.grow(self.rng.choice([shape, shape, shape[-1:]]), self.rng.randint(0, depth - 1))
        swapped = op != "power" and self.rng.random() < 0.3
        return (op, other, one) if swapped else (op, one, other)

    def reduction(self, shape: str, depth: int) -> Expr:
        name = self.rng.choice(["sum", "mean", "max"])
        if not shape:
            return (name, self.grow(self.rng.choice(["m", "mn"]), depth - 1), None)
        other = self.rng.choice("mn")
        axis = self.rng.choice([0, 1])
        return (name, self.grow(shape + other if axis else other + shape, depth - 1), axis)


class Lazies(CodeFront):
    """`sparsetir.lazy` and `sparsetir.compute`."""

    name, groups = "lazy", 2

    def draw(self, rng: Random) -> Iterator[Case]:
        is_special = rng.random() < 0.25
        shape = rng.choice(SHAPES)
        expr = Grower(rng, 1 if is_special else 3).grow(shape, rng.randint(1, 4))
        dtype = rng.choice(["float32", "float32", "float64", "float16"])
        kinds = {name: rng.choice(KINDS) for name in leaves(expr)}
        for _ in range(INPUTS):
            sizes = {c: rng.choice([1, 2, 3, 3, 4, 5, 0]) for c in "mn"}
            style = "special" if is_special else rng.choice(["whole", "real"])
            values: dict[str, Value] = {}
            for name, kind in kinds.items():
                own = name.partition("_")[2].replace("0", "")
                if name[0] == "S":
                    values[name] = sparse_value(rng, own, sizes, dtype, style, (kind,), repeats=False)
                else:
                    values[name] = dense_value(rng, own, sizes, dtype, style)
            yield CodeCase(self, values, {"expr": expr, "operands": list(values)})

    def code(self, case: CodeCase) -> list[str]:
        lines = [f"{name} = sparsetir.lazy({name})" for name in case.facts["operands"]]
        return [*lines, f"got = sparsetir.compute({shown(case.facts['expr'])})"]

    def expected(self, case: CodeCase) -> Expected | None:
        dtype = next(iter(case.values.values())).dtype if case.values else "float64"
        operands = {name: leaf(value) for name, value in case.values.items()}
        with np.errstate(all="ignore"):
            evaluation = Evaluation(operands, 0, least=float(np.finfo(dtype).smallest_subnormal))
            want = shut(evaluation.of(case.facts["expr"]))
            if evaluation.has_tiny and evaluation.has_infinite:
                raise Skip  # infinity times a number is infinite, and times one that has become zero it is NaN
            others = [shut(Evaluation(operands, NOISE[dtype], n).of(case.facts["expr"])) for n in range(TRIALS)]
            most = {"float16": 6e4, "float32": 1e38}.get(dtype, 1e300)
            if any((np.isfinite(want) != np.isfinite(other)).any() for other in others):
                raise Skip
            if (np.abs(want[np.isfinite(want)]) > most / 100).any():
                raise Skip
            spread = sum(np.abs(np.nan_to_num(other - want)) for other in others)
        least = float(np.finfo(dtype).smallest_subnormal)  # what is smaller becomes zero
        return Expected(want, 60 * spread + 64 * NOISE[dtype] * np.abs(np.nan_to_num(want)) + max(4 * least, 1e-30))

    def simpler(self, case: CodeCase) -> Iterator[Mapping[str, Any]]:
        for expr in smaller(case.facts["expr"]):
            if any(isinstance(part, tuple) for part in expr) or expr[0] == "leaf":
                yield {"expr": expr, "operands": [n for n in case.facts["operands"] if n in leaves(expr)]}

    def label(self, case: CodeCase) -> str:
        expr = case.facts["expr"]
        return f"{super().label(case)} {expr[0]} of {', '.join(p[0] for p in expr[1:] if isinstance(p, tuple))}"


def leaves(e: Expr) -> list[str]:
    """The names of its leaves."""
    if e[0] == "leaf":
        return [e[1]]
    return list(dict.fromkeys(n for part in e[1:] if isinstance(part, tuple) for n in leaves(part)))


def smaller(e: Expr) -> Iterator[Expr]:
    """Its parts, and expressions in which a part is replaced by one of its own parts."""
    if e[0] in ("leaf", "number"):
        return
    yield from (part for part in e[1:] if isinstance(part, tuple))
    for n, part in enumerate(e[1:], 1):
        if isinstance(part, tuple):
            yield from ((*e[:n], other, *e[n + 1 :]) for other in smaller(part))


def shown(e: Expr) -> str:
    """It as Python."""
    kind, *rest = e
    if kind == "leaf":
        return str(rest[0])
    if kind == "number":
        return repr(rest[0])
    if kind == "matmul":
        return f"({shown(rest[0])} @ {shown(rest[1])})"
    if kind in BINARY:
        return f"({shown(rest[0])} {BINARY[kind]} {shown(rest[1])})"
    if kind == "T":
        return f"{shown(rest[0])}.T"
    return f"{shown(rest[0])}.{kind}({f'axis={rest[1]}' if len(rest) > 1 else ''})"


def leaf(value: Value) -> Part:
    """Elements, and where a sparse operand stores some."""
    whole, mask = value.dense()
    return whole.astype(np.float64), mask if value.is_sparse else None


def shut(part: Part) -> Array:
    """Zero where nothing is stored."""
    values, mask = part
    return np.asarray(values if mask is None else np.where(mask, values, 0))


class Evaluation:
    """Evaluates an expression in float64; with noise, as arithmetic of less precision may."""

    def __init__(self, operands: dict[str, Part], noise: float, seed: int = 0, least: float = 0.0) -> None:
        self.operands, self.noise, self.rng = operands, noise, np.random.default_rng(seed)
        self.least, self.has_tiny, self.has_infinite = least, False, False

    def of(self, e: Expr) -> Part:
        values, mask = self.exact(e)
        sizes = np.abs(values)
        self.has_tiny |= bool(((sizes > 0) & (sizes < 2 * self.least)).any())
        self.has_infinite |= bool(np.isinf(sizes).any())
        if self.noise and e[0] not in ("leaf", "number", "T", "relu", "abs", "negative"):
            values = values * (1 + self.noise * self.rng.standard_normal(np.shape(values)))
        if self.noise and e[0] == "relu":  # IEEE 754 leaves open which zero the maximum of 0 and -0 is
            signs = np.where(self.rng.random(np.shape(values)) < 0.5, -0.0, 0.0)
            values = np.where(values == 0, signs, values)
        if self.noise and e[0] == "gelu":  # 1 + erf(x / sqrt(2)) cancels below zero
            values = values + self.noise * np.abs(self.of(e[1])[0]) * self.rng.standard_normal(np.shape(values))
        return values, mask

    def exact(self, e: Expr) -> Part:
        kind, *rest = e
        if kind == "leaf":
            return self.operands[rest[0]]
        if kind == "number":
            return np.float64(rest[0]), None
        if kind == "matmul":
            return self.product(self.of(rest[0]), self.of(rest[1])), None
        if kind in BINARY:
            return self.binary(kind, self.of(rest[0]), self.of(rest[1]))
        values, mask = self.of(rest[0])
        if kind == "T":
            return values.T, None if mask is None else mask.T
        if len(rest) > 1:
            if kind == "max" and not np.size(values):
                raise Skip
            return getattr(np, kind)(values, axis=rest[1]), None
        return softmax(values, mask) if kind == "softmax" else FUNCTIONS[kind](values), mask

    def product(self, a: Part, b: Part) -> Array:
        if a[1] is None and b[1] is None:
            return np.matmul(a[0], b[0])
        (one, in_one), (other, in_other) = ((v, np.ones(np.shape(v), bool) if m is None else m) for v, m in (a, b))
        is_row, is_column = one.ndim == 1, other.ndim == 1
        one, in_one = (x[None] if is_row else x for x in (one, in_one))
        other, in_other = (x[:, None] if is_column else x for x in (other, in_other))
        both = in_one[:, :, None] & in_other[None]
        made = np.where(both, one[:, :, None] * other[None], 0).sum(1)
        return made[0] if is_row else made[:, 0] if is_column else made

    def binary(self, op: str, a: Part, b: Part) -> Part:
        if op == "power" and np.size(b[0]) == 1 and b[0] % 1 and np.isneginf(a[0]).any():
            raise Skip  # C and numpy disagree about the root of -inf
        made = getattr(np, op)(a[0], b[0])
        masks = [m for m in (a[1], b[1]) if m is not None]
        if not masks:
            return made, None
        return made, np.broadcast_to(masks[0], made.shape)


def softmax(values: Array, mask: Array | None) -> Array:
    """Compute the softmax of each row over its entries."""
    inside = np.ones(np.shape(values), bool) if mask is None else mask
    if not np.size(values):
        return values
    top = np.where(inside, values, -np.inf).max(-1, keepdims=True)
    powers = np.where(inside, np.exp(values - np.where(inside.any(-1, keepdims=True), top, 0)), 0)
    return powers / powers.sum(-1, keepdims=True)


FUNCTIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "abs": np.abs,
    "negative": np.negative,
    "sqrt": np.sqrt,
    "sigmoid": scipy.special.expit,
    "exp": np.exp,
    "gelu": lambda x: x * (0.5 * (1 + scipy.special.erf(x / np.sqrt(2)))),
    "silu": lambda x: x * scipy.special.expit(x),
    "log": np.log,
}

__all__ = ["Lazies"]
