# SPDX-License-Identifier: Apache-2.0
"""Operators, reductions and slices of `SparseTensor`, compared with numpy over what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import numpy as np

from fuzzing.case import Case, CodeCase, CodeFront, Expected
from fuzzing.dense_oracle import EPSILON, evaluate
from fuzzing.values import Array, dense_value, sparse_value

MATRICES = ("SparseTensor csr", "SparseTensor csr", "SparseTensor csc", "SparseTensor dcsr", "SparseTensor coo")
TENSORS = ("SparseTensor csf", "SparseTensor coo")
DTYPES = ("float32",) * 4 + ("float64",) * 4 + ("int32", "int64", "int8", "bool", "float16", "complex64")
SIZES = (0, 1, 2, 3, 4, 5)
INPUTS = 16
#: an operation as Python; of tensors T and U, a dense array D of the same shape, and a matrix M
MATRIX_OPERATIONS = ("T @ M", "M.T @ T", "T @ V", "T @ U.T", "T.T", "T.diagonal()", "T.trace()")
OPERATIONS = (
    "T + U; T - U; T * U; T * D; D * T; T * 3; 2.5 * T; T / 2; T ** 2; -T; abs(T); T > 1; T < -1; T != 0; "
    "T.sum(); T.sum(axis=0); T.sum(axis=-1); T.mean(); T.mean(axis=0); T.max(); T.max(axis=0); "
    "T.min(axis=-1); T[1:]; T[::-1]; T[-1]; T[:, 1:3]; T[[0, 0]]; T[..., 0]; T.copy(); "
    "T.astype('float64'); T.astype('int32')"
).split("; ")


class Tensors(CodeFront):
    """`SparseTensor` as an array."""

    name, groups = "tensors", 2

    def draw(self, rng: Random) -> Iterator[Case]:
        order = rng.choice([2, 2, 2, 3])
        operation = rng.choice(OPERATIONS + list(MATRIX_OPERATIONS) * (order == 2))
        dtype, own = rng.choice(DTYPES), "ijk"[:order]
        kinds = [rng.choice(MATRICES if order == 2 else TENSORS) for _ in "TU"]
        for _ in range(INPUTS):
            sizes = {c: rng.choice(SIZES) for c in "ijkl"}
            if "[" in operation:
                sizes = {c: max(n, 1) for c, n in sizes.items()}
            style = rng.choice(["whole", "real", "special"])
            values = {"T": sparse_value(rng, own, sizes, dtype, style, kinds[:1], repeats=False)}
            if "U" in operation:
                values["U"] = sparse_value(rng, own, sizes, dtype, style, kinds[1:], repeats=False)
            if "D" in operation:
                values["D"] = dense_value(rng, own, sizes, dtype, style, ("numpy",))
            if "V" in operation:
                values["V"] = dense_value(rng, "j", sizes, dtype, style, ("numpy",))
            if "M" in operation:
                letters = "jl" if operation.startswith("T") else "il"
                values["M"] = dense_value(rng, letters, sizes, dtype, style, ("numpy",))
            yield CodeCase(self, values, {"operation": operation})

    def code(self, case: CodeCase) -> list[str]:
        return [f"got = {case.facts['operation']}"]

    def expected(self, case: CodeCase) -> Expected | None:
        operation, values = case.facts["operation"], case.values
        dtype = values["T"].dtype
        texts = {"T @ M": "ij,jl->il", "M.T @ T": "il,ij->lj", "T @ V": "ij,j->i", "T @ U.T": "ij,kj->ik"}
        if operation in texts:
            operands = list(values.values())
            return evaluate(texts[operation], operands[::-1] if operation == "M.T @ T" else operands).expected()
        if dtype == "bool" and operation not in ("T.T", "T * D", "T * U", "T.copy()") and "[" not in operation:
            return None
        if dtype[0] == "c" and any(word in operation for word in ("max", "min", ">", "<", "astype")):
            return None
        if "astype('int" in operation and dtype.startswith("float"):
            return None
        names = {name: np.where(value.dense()[1], value.dense()[0], 0) for name, value in values.items()}
        if dtype == "float16":
            names = {name: array.astype(np.float32) for name, array in names.items()}
        stored = values["T"].dense()[1]
        return judged(operation, names, stored & values["U"].dense()[1] if "U" in values else stored, dtype)

    def label(self, case: CodeCase) -> str:
        return f"{super().label(case)} {case.facts['operation']}"

    def simpler(self, case: CodeCase) -> Iterator[Mapping[str, Any]]:
        return iter(())


def judged(operation: str, names: dict[str, Array], stored: Array, dtype: str) -> Expected | None:
    """Compute with numpy on arrays that are zero where nothing is stored."""
    with np.errstate(all="ignore"):
        try:
            want = np.asarray(eval(operation, {"abs": abs}, names))
        except (ValueError, IndexError, TypeError):
            return None
        size = sum(float(np.nan_to_num(np.abs(a.astype(complex)), posinf=0).sum()) for a in names.values())
    if operation in ("T * D", "D * T", "T * U"):
        want = np.where(stored, want, np.zeros((), want.dtype))
    if dtype not in EPSILON:
        return Expected(want, 1e-12 * (1 + size))
    return Expected(want, EPSILON[dtype] * (8 + size) * (4 + size if "**" in operation or "*" in operation else 4))


__all__ = ["Tensors"]
