# SPDX-License-Identifier: Apache-2.0
"""Expressions whose letters form a triangle: products under a mask, against numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from each import on, share
from sparsetir import einsum, einsum_expression
from sparsetir.einsum.steps import MaskedStep, pays, roles
from sparsetir.errors import ArgumentError

SIZES = {"i": 40, "j": 30, "k": 50}
TERMS = list(itertools.product(("ij", "ji"), ("ik", "ki"), ("kj", "jk")))
KEPT = [(*terms, out) for terms in TERMS for out in (terms[0], terms[0][::-1], "")]


def drawn(term: str, seed: int, dtype: str = "float64", *, messy: bool = False) -> sp.csr_array:
    """Whole numbers; where it is messy, unsorted and some of them twice."""
    rng = np.random.default_rng(seed)
    shape = tuple(SIZES[c] for c in term)
    made = sp.csr_array(np.round(sp.random_array(shape, density=0.2, rng=rng) * 9).astype(dtype))
    if not messy:
        return made
    order = np.lexsort((rng.random(2 * made.nnz), np.repeat(np.arange(shape[0]), 2 * np.diff(made.indptr))))
    data, indices = np.repeat(made.data, 2)[order], np.repeat(made.indices, 2)[order]
    return sp.csr_array((data, indices, 2 * made.indptr), shape=shape)


def dense(text: str, operands: list[Any]) -> np.ndarray:
    return np.einsum(text, *(v.toarray() for v in operands))


def agrees(text: str, operands: list[Any]) -> None:
    found, wanted = einsum(text, *operands), dense(text, operands)
    if sp.issparse(found) and text.partition("->")[2] != text[:2]:
        found = found.toarray()
    if sp.issparse(found):
        assert found.format == operands[0].format
        assert np.array_equal(found.indices, operands[0].indices)
        assert np.array_equal(found.indptr, operands[0].indptr)
        assert not np.shares_memory(found.indices, operands[0].indices)
        found = found.toarray()
    np.testing.assert_array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize("case", share(KEPT, 3), ids=" ".join)
def test_triangles_of_letters(case: tuple[str, str, str, str]) -> None:
    text = f"{','.join(case[:3])}->{case[3]}"
    operands = [drawn(term, n) for n, term in enumerate(case[:3])]
    assert isinstance(einsum_expression(text, *operands).steps[0], MaskedStep)
    agrees(text, operands)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_dtypes_and_masks_as_they_come(dtype: str) -> None:
    for messy in itertools.product((False, True), repeat=3):
        operands = [drawn(t, n, dtype, messy=m) for n, (t, m) in enumerate(zip(("ij", "ik", "kj"), messy, strict=True))]
        with on(messy):
            for out in ("ij", ""):
                agrees(f"ij,ik,kj->{out}", operands)
    nothing = [sp.csr_array(tuple(SIZES[c] for c in t), dtype=dtype) for t in ("ij", "ik", "kj")]
    agrees("ij,ik,kj->ij", nothing)
    agrees("ij,ik,kj->", nothing)


def test_classes_of_operands() -> None:
    S, A, B = (drawn(term, n) for n, term in enumerate(("ij", "ik", "kj")))
    wanted = S.toarray() * (A @ B).toarray()
    for name in ("csr_array", "csr_matrix", "csc_array", "coo_array", "bsr_array"):
        kind = getattr(sp, name)
        for operands in ([kind(S), A, B], [S, kind(A), kind(B)]):
            found = einsum("ij,ik,kj->ij", *operands)
            assert type(found) is type(operands[0])
            assert np.array_equal(found.toarray(), wanted)
            assert einsum("ij,ik,kj->", *operands) == wanted.sum()


def test_operands_that_are_fixed() -> None:
    S, A, B = (drawn(term, n) for n, term in enumerate(("ij", "ki", "kj")))
    wanted = dense("ij,ki,kj->ij", [S, A, B])
    step = einsum_expression("ij,ki,kj->ij", S, A, B)
    for fixed in itertools.product((False, True), repeat=3):
        held = [v if is_fixed else None for v, is_fixed in zip((S, A, B), fixed, strict=True)]
        others = [v for v, is_fixed in zip((S, A, B), fixed, strict=True) if not is_fixed]
        assert np.array_equal(step.bind(*held)(*others).toarray(), wanted)
    assert "operand 1 times operand 2 where operand 0 stores entries" in step.explain()
    assert "masked_spgemm" in step.script()


def test_a_short_mask_is_searched() -> None:
    assert roles(["ij", "ik", "kj"], 1) == (1, 0, 2, (False, False, True))
    assert roles(["ij", "ik", "jk"], None) is not None
    assert roles(["ij", "ik", "ij"], None) is None
    assert roles(["ij", "jk", "kl"], None) is None
    one = roles(["ij", "ik", "kj"], 0)
    assert one is not None
    shapes = [(1000, 1000)] * 3
    assert pays(one, [20_000, 20_000, 20_000], shapes)
    assert not pays(one, [10, 200_000, 200_000], shapes)
    A = drawn("ij", 0)
    with pytest.raises(ArgumentError, match="dimension 0 of operand 2 has extent 40, expected 30"):
        einsum("ij,ik,kj->ij", A, A, A)


@pytest.mark.parametrize("out", ["ij", ""])
def test_what_is_not_finite_meets_stored_products_only(out: str) -> None:
    """A row without entries has nothing that infinity could be multiplied with."""
    mask = sp.csr_array(np.array([[np.inf, np.nan], [3.0, 4.0]]))
    first, second = sp.csr_array(np.array([[0.0, 0.0], [1.0, 0.0]])), sp.csr_array(np.array([[5.0, 7.0], [0.0, 7.0]]))
    found = einsum(f"ij,ik,kj->{out}", mask, first, second)
    expected = np.array([[0.0, 0.0], [15.0, 28.0]])
    np.testing.assert_array_equal(found.toarray() if out else found, expected if out else expected.sum())
