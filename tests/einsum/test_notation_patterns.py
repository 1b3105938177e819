# SPDX-License-Identifier: Apache-2.0
"""Expressions whose sparse result has a pattern of its own, of tensors of any order, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_notation import JOIN, dense, drawn, stored, terms_of

import sparsetir
import torch
from each import examples
from sparsetir import CooTensor, SparseTensor, einsum, einsum_expression
from sparsetir.errors import LoweringError

# After each text the classes of the operands, as in test_notation.py, and the loops of the program.
CASES = """
ijk,ijk->ijk tt [I, J]
ijk,kji->ijk tl [I, J]
ijk,ijk,ijk->ijk ttt [I, J]
ijk,ijk,j->ijk ttd [I, T.intersect(J_0, J_1), T.intersect(K_0, K_1)]
ijk,kl->ijl tr [I, J_0, K, T.attach(L_1, K)]
ijk,kl->ijl lc [I, J_0, K, T.attach(L_1, K)]
ijk,il->jkl tr [J, I, K_0, T.attach(L_1, I)]
ijk,ljk->il tt [I, J, T.intersect(K, T.attach(K_1, J)), L_1]
ijk,jl,kl->il trr [I, J, K, T.intersect(T.attach(L_1, J), T.attach(L_2, K))]
ijk->ik t [I, J, K_0]
ijk->ki l [K, I_0, J]
i,j->ij ll [I_0, J_1]
ij,kl->ijkl rr [I, J_0, K_1, L_1]
i,ij,jk->ik lrr [I_0, T.attach(J, I_0), T.attach(K_2, J)]
iij,jk->ik tr [I, J, T.attach(K_1, J)]
ijk,ik,jl->lk trd [L, I, T.intersect(K_0, T.attach(K_1, I)), J]
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_products(case: str) -> None:
    text, kinds, loops = case.split(maxsplit=2)
    pairs = enumerate(zip(terms_of(text, kinds), kinds, strict=True))
    arrays = [drawn(t, n, 0.3 if k != "d" else 1.0) for n, (t, k) in pairs]
    operands = [stored(a, k) for a, k in zip(arrays, kinds, strict=True)]
    step = einsum_expression(text, *operands, result="sparse")
    assert step.script().partition("T.sp_iter(")[2].startswith(loops)
    found, expected = step(*operands), np.einsum(text, *arrays)
    np.testing.assert_allclose(dense(found), expected, atol=1e-12)
    assert found.nnz == np.count_nonzero(expected)
    assert isinstance(found, {"t": SparseTensor, "l": CooTensor}.get(kinds[0], SparseTensor))
    sparsetir.verify(sparsetir.parse(step.script()))
    np.testing.assert_allclose(dense(step.bind(operands[0])(*operands[1:])), expected, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("letters", ["i", "ijk", "cdkl"])
@pytest.mark.parametrize("combine", ["add", "max"])
def test_unions(letters: str, combine: str) -> None:
    A, B, C = (drawn(letters, seed) for seed in (1, 2, 3))
    text = f"{letters},{letters}->{letters}"
    found = einsum(text, SparseTensor.from_dense(A), CooTensor.from_dense(B), combine=combine)
    np.testing.assert_allclose(dense(found), JOIN[combine](A, B))
    assert found.nnz == np.count_nonzero((A != 0) | (B != 0))
    if combine == "add":
        three = einsum(f"{letters},{text}", *map(CooTensor.from_dense, (A, B, C)), combine="add")
        assert isinstance(three, CooTensor)
        np.testing.assert_allclose(dense(three), A + B + C)


def test_sums_in_another_order_of_dimensions() -> None:
    A, B = drawn("ijk", 1), drawn("kij", 2)
    found = einsum("ijk,kij->ijk", SparseTensor.from_dense(A), SparseTensor.from_dense(B), combine="add")
    np.testing.assert_allclose(dense(found), A + B.transpose(1, 2, 0))


def test_chains_of_tensors_are_taken_in_pairs() -> None:
    rng = np.random.default_rng(0)
    T = CooTensor(np.stack([rng.integers(0, n, 5000) for n in (30, 20, 100)]), rng.random(5000), (30, 20, 100))
    A, B = (sp.random_array((100, n), density=0.3, format="csr", rng=rng) for n in (100, 80))
    step = einsum_expression("ijk,kl,lm->ijm", SparseTensor.from_any(T), A, B)
    assert len(step.steps) == 2
    np.testing.assert_allclose(dense(step(SparseTensor.from_any(T), A, B)), np.einsum(
        "ijk,kl,lm->ijm", T.to_dense(), A.toarray(), B.toarray(), optimize=True), atol=1e-12)  # fmt: skip


@pytest.mark.slow
def test_classes_of_results() -> None:
    A, B = drawn("ab", 1), drawn("cd", 2)
    outer = einsum("ab,cd->abcd", *(torch.from_numpy(x).to_sparse_csr() for x in (A, B)))
    assert outer.layout == torch.sparse_coo
    np.testing.assert_allclose(dense(outer), np.einsum("ab,cd->abcd", A, B))
    T = SparseTensor.from_dense(drawn("ijk", 3))
    assert einsum("ijk->ik", T).format == sparsetir.formats.csr().resolve(2, "int32")
    assert einsum("ijk,ijk->ijk", T, T).idtype == T.idtype
    assert isinstance(einsum("ijk->ik", torch.from_numpy(T.to_dense()).to_sparse_coo()), torch.Tensor)


@pytest.mark.slow
def test_other_semirings() -> None:
    inf = float("inf")
    A, B = (CooTensor.from_dense(drawn(t, n)) for n, t in enumerate(("ijk", "kl")))
    found = einsum("ijk,kl->ijl", A, B, reduce="min", combine="add", fill=inf)
    a, b = (np.where(x.to_dense() == 0, inf, x.to_dense()) for x in (A, B))
    expected = (a[..., None] + b).min(axis=2)
    np.testing.assert_allclose(dense(found), np.where(np.isinf(expected), 0, expected))
    bools = [CooTensor(x.coords, x.values != 0, x.shape) for x in (A, B)]
    found = einsum("ijk,kl->ijl", *bools, reduce="any", combine="and")
    np.testing.assert_array_equal(dense(found), np.isfinite(expected))


def test_what_is_not_sparse_is_refused() -> None:
    T = SparseTensor.from_dense(drawn("ijk", 0))
    with pytest.raises(
        LoweringError, match=r"is not sparse: what its operands do not store changes it; pass result='d"
    ):
        einsum("ijk->ik", T, fill=1, result="sparse")
    with pytest.raises(LoweringError, match=r"is not sparse: it has no letters"):
        einsum("ijk->", T, result="sparse")


TEXTS = ["ijk,ijk->ijk", "ijk,jl->ikl", "ijk,ljk->il", "i,j->ij"]


def tensor(data: Any, shape: tuple[int, ...]) -> CooTensor:
    """Entries in any order, some of them twice."""
    count = data.draw(st.integers(0, 12)) if all(shape) else 0
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    coords = np.stack([rng.integers(0, max(n, 1), count) for n in shape])
    values = rng.integers(1, 5, count).astype("float64")
    return CooTensor(coords.astype(data.draw(st.sampled_from(["int32", "int64"]))), values, shape)


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
@pytest.mark.parametrize("text", TEXTS)
def test_data(text: str, data: Any) -> None:
    sizes = {c: data.draw(st.integers(0, 5)) for c in "ijkl"}
    sizes = {c: n if n != 1 else 2 for c, n in sizes.items()}  # those of extent 1 broadcast, as programs of their own
    operands = [tensor(data, tuple(sizes[c] for c in term)) for term in text.partition("->")[0].split(",")]
    found = einsum(text, *operands, result="sparse")
    expected = np.einsum(text, *(o.to_dense() for o in operands))
    np.testing.assert_array_equal(dense(found), expected)
    assert len(found.values) == np.count_nonzero(expected)
    if text == TEXTS[0]:
        joined = einsum(text, *operands, combine="add")
        np.testing.assert_array_equal(dense(joined), sum(o.to_dense() for o in operands))
