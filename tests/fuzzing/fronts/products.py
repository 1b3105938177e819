# SPDX-License-Identifier: Apache-2.0
"""Results whose pattern is computed: products, masks, largest entries, sums, chains, and kernels with accumulators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np

from fuzzing.case import Case, CodeCase, CodeFront, Expected
from fuzzing.dense_oracle import EPSILON, Result, common, evaluate, wrapped
from fuzzing.values import PADDED, Array, Value, dense_value, sparse_value
from sparsetir.sparse_output.accumulators import KINDS, ORDERS

CLASSES = ("csr_array",) * 4 + ("csr_matrix", "csc_array", "coo_array", "bsr_array", "torch_csr", "torch_coo")
CLASSES += ("CooTensor", "SparseTensor csr", "SparseTensor dcsr", "SparseTensor coo", "lil_array", "dia_array")
DTYPES = ("float32",) * 5 + ("float64",) * 5 + ("int32", "int64", "bool", "int8", "float16", "complex128")
SIZES = (0, 1, 1, 2, 3, 4, 5, 6, 8)
INPUTS = 20
#: a call by its name: the letters of its operands
CALLS = {
    "matmul": ("ij", "jk"),
    "masked": ("ij", "jk", "ik"),
    "complement": ("ij", "jk", "ik"),
    "top": ("ij", "jk"),
    "above": ("ij", "jk"),
    "plan": ("ij", "jk"),
    "dense": ("ij", "jk"),
    "vector": ("ij", "j"),
    "rap": ("ij", "jk", "kl"),
    "add": ("ij", "ij"),
    "subtract": ("ij", "ij"),
    "multiply": ("ij", "ij"),
    "multiply_dense": ("ij", "ij"),
    "maximum": ("ij", "ij"),
    "spgemm": ("ij", "jk"),
}
#: whose results depend on which entries are stored, and on comparisons that rounding must not decide
ENTRYWISE = ("masked", "complement", "top", "above")
NAMES = "ABC"


class Products(CodeFront):
    """`sparsetir.matmul` and its siblings."""

    name, groups = "products", 2

    def draw(self, rng: Random) -> Iterator[Case]:
        call = rng.choice(list(CALLS))
        dtype = rng.choice(DTYPES[:10] if call == "spgemm" else DTYPES)
        dtypes = [rng.choice(DTYPES) if rng.random() < 0.1 and call != "spgemm" else dtype for _ in CALLS[call]]
        kinds = [rng.choice(CLASSES) for _ in CALLS[call]]
        if call in ENTRYWISE:
            kinds = [kind if kind not in PADDED else "csr_array" for kind in kinds]
        numbers: dict[str, Any] = {}
        if call == "spgemm":
            numbers = {"kind": rng.choice(KINDS), "order": rng.choice(ORDERS), "counted": rng.random() < 0.5}
            numbers |= {"insertion": rng.choice([0, 1, 2, 24]), "ranked": rng.choice([0, 1, 96])}
        for _ in range(INPUTS):
            sizes = {c: rng.choice(SIZES) for c in "ijkl"}
            if numbers.get("order") == "banded":
                sizes = dict.fromkeys("ijkl", sizes["i"])
            styles = ["whole", "whole", "real", "whole" if set(kinds) & set(PADDED) else "special"]
            style = "whole" if call in ENTRYWISE else rng.choice(styles)
            may_repeat = style != "special" and len(set(dtypes)) == 1
            values = {}
            for n, (own, kind, each) in enumerate(zip(CALLS[call], kinds, dtypes, strict=True)):
                if n == 1 and call in ("dense", "vector", "multiply_dense"):
                    values["B"] = dense_value(rng, own, sizes, each, style)
                else:
                    values[NAMES[n]] = sparse_value(rng, own, sizes, each, style, (kind,), repeats=may_repeat)
            facts = {"call": call, "top": rng.choice([0, 1, 2, 5]), "above": rng.choice([-1, 0, 1, 2.5]), **numbers}
            yield CodeCase(self, values, {**facts, "alpha": rng.choice([1, -2, 0.5]), "beta": rng.choice([1, 3, 0])})

    def code(self, case: CodeCase) -> list[str]:
        facts = case.facts
        call = facts["call"]
        if call == "spgemm":
            chosen = {k: facts[k] for k in ("kind", "order", "counted", "insertion", "ranked") if k in facts}
            dtype, idtype = case.values["A"].dtype, case.values["A"].idtype
            return [
                f"chosen = sparsetir.Accumulators(**{chosen})",
                f"got = sparsetir.build(sparsetir.ops.spgemm({dtype!r}, idtype={idtype!r}), schedule=chosen)(A=A, B=B)",
            ]
        texts = {
            "masked": "matmul(A, B, mask=C)",
            "complement": "matmul(A, B, mask=C, complement=True)",
            "top": f"matmul(A, B, top={facts['top']})",
            "above": f"matmul(A, B, threshold={facts['above']})",
            "plan": "matmul_plan(A, B)(A, B)",
            "rap": "rap(A, B, C)",
            "add": f"add(A, B, {facts['alpha']}, {facts['beta']})",
            "dense": "matmul(A, B)",
            "vector": "matmul(A, B)",
            "multiply_dense": "multiply(A, B)",
        }
        return [f"got = sparsetir.{texts.get(call, f'{call}(A, B)')}"]

    def expected(self, case: CodeCase) -> Expected | None:
        facts, values = case.facts, list(case.values.values())
        call = facts["call"]
        if call in ("add", "subtract", "maximum"):
            return self._joined(call, facts, values)
        text = {"vector": "ij,j->i", "rap": "ij,jk,kl->il", "multiply": "ij,ij->ij", "multiply_dense": "ij,ij->ij"}
        result = evaluate(text.get(call, "ij,jk->ik"), values if call == "rap" else values[:2])
        if call == "rap" and not all(np.isfinite(v.data.astype(complex)).all() for v in values):
            return None
        if call in ("masked", "complement"):
            mask = values[2].dense()[1]
            return cut(result, mask if call == "masked" else ~mask)
        if call in ("above", "top") and result.dtype[0] in "bc":
            return None
        if call == "above":
            return cut(result, result.stored & (result.values > facts["above"]))
        return cut(result, largest(result, facts["top"])) if call == "top" else result.expected()

    def _joined(self, call: str, facts: Mapping[str, Any], values: list[Value]) -> Expected | None:
        dtype = common(values)
        (a, in_a), (b, in_b) = (value.dense() for value in values)
        alpha, beta = (facts["alpha"], facts["beta"]) if call == "add" else (1, -1)
        if dtype == "bool" or (dtype[0] in "iu" and (alpha % 1 or beta % 1)):
            return None
        wide = np.complex128 if dtype[0] == "c" else np.float64
        a, b = a.astype(wide), b.astype(wide)
        with np.errstate(all="ignore"):
            if call == "maximum":
                return None if wide is np.complex128 or np.isnan(a + b).any() else near(np.maximum(a, b), values, dtype)
            want = np.where(in_a, scaled(a, alpha), 0) + np.where(in_b, scaled(b, beta), 0)
            one, other = (value.sizes().astype(np.float64) for value in values)
            size = np.nan_to_num(abs(alpha) * one + abs(beta) * other, posinf=0)
        return Expected(want, 4 * EPSILON[dtype] * size) if dtype in EPSILON else Expected(wrapped(want, dtype))

    def simpler(self, case: CodeCase) -> Iterator[Mapping[str, Any]]:
        facts = case.facts
        for name, simple in (("alpha", 1), ("beta", 1), ("kind", "both"), ("order", "stored"), ("counted", False)):
            if name in facts and facts[name] != simple:
                yield {**facts, name: simple}

    def label(self, case: CodeCase) -> str:
        return f"{super().label(case)} {case.facts['call']}"


def scaled(array: Array, number: float) -> Array:
    """Multiply the parts of complex numbers: numpy makes a complex number of the factor, and NaN of infinities."""
    if array.dtype.kind != "c":
        return array * number
    out = np.empty_like(array)
    out.real, out.imag = array.real * number, array.imag * number
    return out


def near(want: Array, values: list[Value], dtype: str) -> Expected:
    """Return the expected result, with slack for the rounding of sums of repeated entries."""
    size = sum(value.sizes().astype(np.float64) for value in values)
    return Expected(want, 4 * EPSILON[dtype] * np.nan_to_num(size, posinf=0)) if dtype in EPSILON else Expected(want)


def cut(result: Result, kept: Array) -> Expected:
    """The entries that are kept."""
    expected = result.expected()
    kept = kept & result.stored
    slack = np.where(kept, expected.slack, 0)
    return Expected(np.where(kept, expected.values, np.zeros((), expected.values.dtype)), slack)


def largest(result: Result, top: int) -> Array:
    """Where the largest entries of each row are, the first of equal ones."""
    kept = np.zeros(result.stored.shape, bool)
    for row, (values, stored) in enumerate(zip(result.values, result.stored, strict=True)):
        columns = [c for c in np.flatnonzero(stored) if values[c] == values[c]]
        columns.sort(key=lambda c: (-values[c], c))
        kept[row, columns[:top]] = True
    return kept


__all__ = ["Products"]
