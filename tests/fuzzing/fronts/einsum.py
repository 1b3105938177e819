# SPDX-License-Identifier: Apache-2.0
"""Index notation over drawn operands of every class, format and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np

from fuzzing.case import Case, CodeCase, CodeFront, Expected
from fuzzing.dense_oracle import evaluate, evaluate_filled, wrapped
from fuzzing.values import PADDED, Value, dense_value, sparse_value

MATRICES = ("csr_array", "csr_array", "csr_matrix", "csc_array", "coo_array", "bsr_array", "torch_csr", "torch_coo")
MATRICES += ("CooTensor", "SparseTensor csr", "SparseTensor csc", "SparseTensor dcsr", "SparseTensor coo")
MATRICES += ("SparseTensor csf", "SparseTensor bsr(r=1, c=1)", "dia_array", "lil_array")
TENSORS = ("CooTensor", "SparseTensor csf", "SparseTensor coo")
DTYPES = ("float32",) * 5 + ("float64",) * 4 + ("int32", "int64", "int8", "bool", "float16", "bfloat16", "complex64")
SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 7)
WAYS = ("einsum", "einsum", "expression", "bound", "again")
#: reductions whose results are defined over all elements
OTHERS: tuple[dict[str, Any], ...] = (
    {"reduce": "max"},
    {"reduce": "min"},
    {"combine": "add"},
    {"combine": "max"},
    {"reduce": "max", "combine": "add", "fill": float("-inf"), "result": "dense"},
    {"reduce": "min", "combine": "add", "fill": float("inf"), "result": "dense"},
    {"reduce": "prod", "result": "dense"},
)
INPUTS = 24


def drawn_subscripts(rng: Random) -> list[str]:
    """The letters of one to three operands, and of the result."""
    while True:
        count = rng.choice([1, 2, 2, 2, 2, 3])
        letters = rng.choice(["ij", "ijk", "ijk", "ijkl"])
        operands = ["".join(rng.sample(letters, min(len(letters), rng.choice([1, 2, 2, 2, 3])))) for _ in range(count)]
        if rng.random() < 0.05:
            operands[0] += operands[0][0]
        union = sorted(set("".join(operands)))
        kept = rng.sample(union, rng.randint(0, min(3, len(union))))
        if len(union) < 5:
            return [*operands, "".join(kept)]


class Einsum(CodeFront):
    """`sparsetir.einsum` and its expressions."""

    name, groups = "einsum", 2

    def draw(self, rng: Random) -> Iterator[Case]:
        *letters, kept = drawn_subscripts(rng)
        options = rng.choice(OTHERS) if rng.random() < 0.15 else {}
        names = [f"X{n}" for n in range(len(letters))]
        is_sparse = [len(own) in (2, 3) and rng.random() < 0.7 for own in letters]
        kinds = [rng.choice(MATRICES if len(own) == 2 else TENSORS) for own in letters]
        if options:
            kinds = [kind if kind not in PADDED else "csr_array" for kind in kinds]
        dtype = rng.choice(DTYPES)
        dtypes = [rng.choice(DTYPES) if rng.random() < 0.1 else dtype for _ in letters]
        facts = {"subscripts": f"{','.join(letters)}->{kept}", "options": options, "operands": names}
        for _ in range(INPUTS):
            sizes = {c: rng.choice(SIZES) for c in "ijkl"}
            may_be_special = not set(kinds) & set(PADDED)
            style = rng.choice(["whole", "whole", "real", "special" if may_be_special else "whole"])
            may_repeat = not options and style != "special" and len(set(dtypes)) == 1
            values: dict[str, Value] = {}
            for name, own, sparse, kind, each in zip(names, letters, is_sparse, kinds, dtypes, strict=True):
                if sparse:
                    values[name] = sparse_value(rng, own, sizes, each, style, (kind,), repeats=may_repeat)
                else:
                    values[name] = dense_value(rng, own, sizes, each, style)
            if {"float16", "bfloat16"} <= {v.dtype for v in values.values()}:
                return  # numpy has no common dtype
            yield CodeCase(self, values, {**facts, "way": rng.choice(WAYS)})

    def code(self, case: CodeCase) -> list[str]:
        names = ", ".join(case.facts["operands"])
        options = "".join(f", {k}={v!r}" for k, v in case.facts["options"].items())
        text, way = case.facts["subscripts"], case.facts["way"]
        if way in ("einsum", "again"):
            return [f"got = sparsetir.einsum({text!r}, {names}{options})"] * (1 + (way == "again"))
        made = f"step = sparsetir.einsum_expression({text!r}, {names}{options})"
        first, _, rest = names.partition(", ")
        call = f"got = step.bind({first})({rest})" if way == "bound" and rest else f"got = step({names})"
        return [made, call]

    def expected(self, case: CodeCase) -> Expected | None:
        values = [case.values[name] for name in case.facts["operands"]]
        text, options = case.facts["subscripts"], case.facts["options"]
        if not options:
            return evaluate(text, values).expected()
        chosen = {"reduce": "sum", "combine": "mul", "fill": 0, **options}
        result = evaluate(text, values)
        want = evaluate_filled(text, values, **chosen)
        if want is None:
            return None
        if result.dtype in ("float32", "float64"):
            size = 1 + abs(np.nan_to_num(want, nan=0, posinf=0, neginf=0))
            return Expected(want, (1e-4 if result.dtype == "float32" else 1e-9) * size)
        return None if result.dtype[0] in "cb" or result.dtype == "float16" else Expected(wrapped(want, result.dtype))

    def simpler(self, case: CodeCase) -> Iterator[Mapping[str, Any]]:
        facts = case.facts
        if facts["way"] != "einsum":
            yield {**facts, "way": "einsum"}
        for name in facts["options"]:
            yield {**facts, "options": {k: v for k, v in facts["options"].items() if k != name}}
        left, _, kept = facts["subscripts"].partition("->")
        letters = left.split(",")
        for n in range(len(letters) if len(letters) > 1 else 0):
            rest = letters[:n] + letters[n + 1 :]
            own = "".join(c for c in kept if c in "".join(rest))
            names = facts["operands"][:n] + facts["operands"][n + 1 :]
            yield {**facts, "subscripts": f"{','.join(rest)}->{own}", "operands": names}
        for letter in kept:
            yield {**facts, "subscripts": f"{left}->{kept.replace(letter, '')}"}

    def label(self, case: CodeCase) -> str:
        kinds = sorted({"sparse" if v.is_sparse else "dense" for v in case.values.values()})
        return f"{super().label(case)} {len(case.values)} {'and '.join(kinds)} {sorted(case.facts['options'])}"


__all__ = ["Einsum"]
