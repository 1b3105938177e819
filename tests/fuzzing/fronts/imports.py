# SPDX-License-Identifier: Apache-2.0
"""Drawn functions of torch that `relax.from_torch` imports, compared with torch on other inputs than the examples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from fuzzing.case import Case, Expected, Finding, Front, Skip, difference, plain, unclear
from sparsetir.errors import LoweringError, SparseTIRError

INPUTS = 6
MISMATCH = "imported as another one"  # what an import that differs from torch on its examples says
FLOATS, WHOLE = ("float32", "float64", "float16", "bfloat16"), ("int32", "int64", "int8", "uint8", "bool")
SHAPES = ((3, 4), (3, 4), (2, 5), (1, 4), (3, 1), (0, 4), (4, 0))
#: operators that are exact for the numbers drawn, so that results of others may be compared and rounded
EXACT = (
    "({a} + {b})",
    "({a} - {b})",
    "({a} * {b})",
    "({a} * 2)",
    "(1 - {a})",
    "({a} + 0.5)",
    "(-{a})",
    "{a}.abs()",
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})",
    "torch.where({a} > {b}, {a}, {b})",
    "torch.where({a} >= 1.5, {a}, 0)",
    "({a} == {b})",
    "({a} != {b})",
    "({a} < 0.5)",
    "({a} % 3)",
    "({a} % {b})",
    "({a} // {b})",
    "torch.fmod({a}, {b})",
    "torch.div({a}, {b}, rounding_mode='trunc')",
    "torch.clamp({a}, -1, 2)",
    "torch.clamp({a}, {b}, {b} + 1)",
    "{a}.sign()",
    "{a}.floor()",
    "{a}.ceil()",
    "{a}.trunc()",
    "{a}.round()",
    "F.relu({a})",
    "F.relu6({a})",
    "F.hardtanh({a})",
    "F.threshold({a}, 0.5, 2.0)",
    "torch.isnan({a})",
    "torch.isinf({a})",
    "torch.isfinite({a})",
    "torch.nan_to_num({a}, 0.5, 3.0, -3.0)",
    "torch.logical_and({a}, {b})",
    "torch.logical_or({a}, {b})",
    "torch.logical_not({a})",
    "({a} & {b})",
    "({a} ^ {b})",
    "(~{a})",
    "{a}.masked_fill({b} > 1, 1)",
    "torch.heaviside({a}, {b})",
    "{a}.roll(1, 0)",
    "{a}.flip(1)",
    "{a}.tril()",
    "{a}.float()",
    "{a}.double()",
    "{a}.bool()",
)
#: operators that round, or change the shape: at the root
LAST = (
    "({a} / {b})",
    "({a} / 3)",
    "({a} ** 2)",
    "({a} ** 0.5)",
    "{a}.exp()",
    "{a}.sigmoid()",
    "{a}.tanh()",
    "{a}.sqrt()",
    "{a}.rsqrt()",
    "{a}.log1p()",
    "{a}.reciprocal()",
    "F.silu({a})",
    "F.gelu({a})",
    "F.softplus({a})",
    "F.elu({a})",
    "torch.logaddexp({a}, {b})",
    "{a}.sum({d})",
    "{a}.sum()",
    "{a}.mean({d})",
    "{a}.prod({d})",
    "{a}.var({d})",
    "{a}.amax({d})",
    "{a}.amin({d}, keepdim=True)",
    "{a}.max()",
    "{a}.max({d})[0]",
    "{a}.min({d})[0]",
    "{a}.argmax({d})",
    "{a}.any({d})",
    "{a}.all()",
    "{a}.cumsum({d})",
    "{a}.logsumexp({d})",
    "{a}.softmax({d})",
    "{a}.log_softmax({d})",
    "{a}.norm(dim={d})",
    "torch.sort({a}, dim={d}, stable=True)[0]",
    "torch.argsort({a}, dim={d}, descending=True, stable=True)",
    "{a}.topk(1, {d})[0]",
    "{a}.topk(1, {d}, largest=False)[0]",
    "{a}.median({d})[0]",
    "{a}.kthvalue(1, {d})[0]",
    "torch.cat([{a}, {b}], {d})",
    "torch.stack([{a}, {b}], {d})",
    "{a}.t()",
    "{a}.reshape(-1)",
    "{a}[:, ::2]",
    "{a}[-1:]",
    "{a}[[0, -1, 0]]",
    "{a}.repeat(2, 1)",
    "{a}.unsqueeze({d})",
    "F.pad({a}, (1, 2))",
    "({a} @ {b}.t())",
    "torch.count_nonzero({a}, dim={d})",
    "torch.einsum('ij,kj->ik', {a}, {b})",
    "F.layer_norm({a}, ({a}.shape[1],))",
    "F.normalize({a})",
)
#: numbers of which sums and products of a few are exact, and others
NUMBERS = (0.0, 1.0, -1.0, 0.5, 2.0, -2.5, 3.0, 0.25, -0.0)
UNUSUAL = (float("nan"), float("inf"), -float("inf"))


def drawn_text(rng: Random) -> str:
    """The text of a function of x and y."""

    def nested(depth: int) -> str:
        if depth == 0:
            return rng.choice("xxy")
        return rng.choice(EXACT).format(a=nested(depth - 1), b=rng.choice(("x", "y", nested(depth - 1))))

    inner = nested(rng.choice((0, 0, 1, 1, 2)))
    if rng.random() < 0.3:
        return nested(rng.choice((1, 2)))
    return rng.choice(LAST).format(a=inner, b=rng.choice("xy"), d=rng.choice((0, 1, -1)))


def drawn_array(draw: np.random.Generator, shape: tuple[int, int], dtype: str, unusual: float) -> tuple[Any, ...]:
    """Nested tuples of numbers."""
    if dtype in FLOATS:
        whole = draw.choice(NUMBERS, shape)
        whole = np.where(draw.random(shape) < unusual, draw.choice(UNUSUAL, shape), whole)
    else:
        whole = draw.integers({"bool": 0, "uint8": 0}.get(dtype, -4), 2 if dtype == "bool" else 6, shape)
    return tuple(tuple(row.tolist()) for row in whole)


SCRIPT = """
import warnings, torch
import torch.nn.functional as F
from math import inf, nan
from sparsetir import relax
warnings.simplefilter("ignore")

class Model(torch.nn.Module):
    def forward(self, x, y):
        return {text}

x, y = (torch.tensor(v, dtype=torch.{dtype}).reshape({shape}) for v in ({x}, {y}))
examples = [torch.ones({shape}, dtype=torch.{dtype})] * 2
want = Model()(x, y)
got = relax.from_torch(Model(), tuple(examples))(x, y)
print("expected", want)
print("got     ", got)
same = got.dtype == want.dtype and got.shape == want.shape
near = same and torch.allclose(got.double(), want.double(), rtol={slack}, atol={slack}, equal_nan=True)
raise SystemExit(not near)
"""


@dataclass(frozen=True)
class ImportCase(Case):
    """A function, and what it is called with."""

    text: str
    dtype: str
    shape: tuple[int, int]
    x: tuple[Any, ...]
    y: tuple[Any, ...]

    @property
    def slack(self) -> float:
        return {"float16": 1e-2, "bfloat16": 6e-2, "float64": 1e-9}.get(self.dtype, 2e-5)

    def operands(self) -> list[Any]:
        import torch

        dtype = getattr(torch, self.dtype)
        return [torch.tensor(value, dtype=dtype).reshape(self.shape) for value in (self.x, self.y)]

    def run(self) -> Finding | None:
        try:
            want = function(self.text)(*self.operands())
        except Exception as error:
            raise Skip from error
        try:
            got = compiled(self.text, self.dtype, self.shape)(*self.operands())
        except LoweringError as error:
            if MISMATCH not in str(error):
                raise
            return Finding("wrong", self.operators, str(error))
        except SparseTIRError:
            raise
        except Exception as error:
            return unclear(error)
        if got.dtype != want.dtype:
            return Finding("wrong", self.operators, f"{self.text}: the dtype is {got.dtype}, expected {want.dtype}")
        values = plain(want)
        with np.errstate(all="ignore"):
            slack = self.slack * (1 + np.abs(values.astype(np.float64)))
        text = difference(plain(got), Expected(values, slack))
        return Finding("wrong", self.operators, f"{self.text}: {text}") if text else None

    @property
    def operators(self) -> str:
        """The outermost operator, as far as a name tells."""
        return self.text.partition("(")[0] or self.text[:40]

    def smaller(self) -> Iterator[Case]:
        for template in (*EXACT, *LAST):
            for name in "xy":
                for dim in (0, 1, -1):
                    text = template.format(a=name, b="y", d=dim)
                    if len(text) < len(self.text):
                        yield replace(self, text=text)
        if self.x != self.y:
            yield replace(self, y=self.x)

    def script(self) -> str:
        facts = {name: getattr(self, name) for name in ("text", "dtype", "shape", "x", "y", "slack")}
        return SCRIPT.format(**facts)


@lru_cache(maxsize=4)
def function(text: str) -> Any:
    import torch

    return eval(f"lambda x, y: {text}", {"torch": torch, "F": torch.nn.functional})


@lru_cache(maxsize=1)
def compiled(text: str, dtype: str, shape: tuple[int, int]) -> Any:
    """The imported function; the examples are ordinary, so that what differs elsewhere is not refused."""
    import torch
    from sparsetir import relax

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            return function(text)(x, y)

    example = torch.ones(shape, dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return relax.from_torch(Model(), (example, example.clone()))


class Imports(Front):
    """Imported functions."""

    name, groups, fenced = "imports", 3, False

    def draw(self, rng: Random) -> Iterator[Case]:
        draw = np.random.default_rng(rng.randrange(1 << 62))
        text, shape = drawn_text(rng), rng.choice(SHAPES)
        dtype = rng.choice(FLOATS[:1] * 4 + FLOATS + WHOLE)
        for n in range(INPUTS):
            x, y = (drawn_array(draw, shape, dtype, 0.25 * (n % 2)) for _ in "xy")
            yield ImportCase(text, dtype, shape, x, y)


__all__ = ["ImportCase", "Imports"]
