# SPDX-License-Identifier: Apache-2.0
"""Kernels over drawn formats, and numbers that are not finite."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparsetir
from decomposing import (
    DRAWN,
    FORMATS,
    MATRICES,
    OPERANDS,
    SPECIAL,
    by_entries,
    close,
    compiled,
    made,
    matrices,
    operands,
    ready,
    small,
    typed,
    types_of,
)
from sparsetir import formats

drawn_formats = st.sampled_from(sorted(DRAWN)).flatmap(
    lambda name: st.fixed_dictionaries(DRAWN[name]).map(lambda chosen: (name, chosen))
)


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn_formats, st.lists(matrices(), min_size=4, max_size=4), st.sampled_from(("spmm", "sddmm")), small)
def test_drawn_formats(chosen: Any, found: list[Any], op: str, feat: int) -> None:
    name, parameters = chosen
    func = getattr(sparsetir.ops, op)("float64")
    kernel = compiled(sparsetir.decompose_format(func, {OPERANDS[op]: formats.make(name, **parameters)}))
    for A in found:
        X, Y = (np.arange(n * feat, dtype="float64").reshape(n, feat) % 5 for n in A.shape)
        if op == "spmm":
            np.testing.assert_array_equal(kernel(A=A, B=Y), A.toarray() @ Y)
        else:
            O = kernel(S=A, X=X, Y=Y)
            assert np.array_equal(O.coords, A.coords)
            np.testing.assert_array_equal(O.toarray(), A.toarray() * (X @ Y.T))


# ---------------------------------------------------------------- numbers that are not finite

#: formats that multiply what lies between the entries: as in every library of blocks, infinity times zero is NaN
FILLING = {name for name in FORMATS if any(rule.fills for rule in made(name).resolve(2, "int32").rules)}


TESTING = tuple(name for name in FORMATS if name not in FILLING)


NESTED = {
    "columns of ell": lambda: formats.columns(2, each="ell"),
    "columns of buckets": lambda: formats.columns(3, each=formats.buckets((1, 2))),
    "ell_rest of ell": lambda: formats.ell_rest(2, rest="ell"),
}


def check_specials(kernel: Any, A: Any, dtype: str) -> None:
    """NaN and infinity in the first, the last and an inner row of B reach the rows with entries there, no others."""
    n, rng = A.shape[1], np.random.default_rng(0)
    for number, at in product(SPECIAL, sorted({0, n // 2, n - 1})):
        B = rng.uniform(0.5, 1, (n, 5)).astype(dtype)
        B[at, :3] = number
        np.testing.assert_allclose(kernel(A=A, B=B), by_entries(A, B), rtol=1e-4, atol=1e-4)


def test_which_formats_fill() -> None:
    assert {"ell", "sell", "narrow_sell", "padded_csr", "buckets", "hyb", "ell_rest", "nm"} < set(TESTING)
    assert {"bsr", "dia", "band", "sr_bcrs", "ragged"} < FILLING


@pytest.mark.shared(2)
@pytest.mark.parametrize("name", TESTING)
def test_padding_spreads_neither_nan_nor_infinity(name: str) -> None:
    dtype, idtype = types_of("spmm", name)
    kernel = ready("spmm", name, dtype, idtype)[1]
    for kind in ("random", "empty_rows", "one_row", "one_each", "explicit_zeros", "unsorted", "one_by_one"):
        check_specials(kernel, typed(MATRICES[kind], dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", NESTED)
def test_padding_within_a_format_spreads_nothing(name: str) -> None:
    kernel = compiled(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": NESTED[name]()}))
    for kind in ("random", "one_row", "empty_rows"):
        check_specials(kernel, typed(MATRICES[kind], "float32"), "float32")


@pytest.mark.shared(2)
@pytest.mark.parametrize("name", sorted(FILLING))
def test_filled_slots_spread_nothing_to_other_features(name: str) -> None:
    dtype, idtype = types_of("spmm", name)
    kernel = ready("spmm", name, dtype, idtype)[1]
    for kind, number in product(("random", "divisible", "empty_rows"), SPECIAL):
        A, _, B = operands(MATRICES[kind], dtype, 7)
        B[[0, -1], 3] = number
        expected = by_entries(A, B)
        found, special = kernel(A=A, B=B), ~np.isfinite(expected)
        close(np.delete(found, 3, 1), np.delete(expected, 3, 1), dtype)
        assert not np.isfinite(found[special]).any()


@pytest.mark.shared(2)
@pytest.mark.parametrize("name", FORMATS)
def test_entries_that_are_not_finite(name: str) -> None:
    """A value of an entry reaches its row; an entry that holds zero times infinity is NaN, for it is an entry."""
    dtype, idtype = types_of("spmm", name)
    A, _, B = operands(MATRICES["random"], dtype, 5)
    A.data[::4], A.data[1::5], A.data[2::7] = np.nan, -np.inf, 0
    kernel = ready("spmm", name, dtype, idtype)[1]
    np.testing.assert_allclose(kernel(A=A, B=abs(B)), by_entries(A, abs(B)), rtol=1e-4, atol=1e-4)
    A.data[...] = 0
    B[5] = np.inf
    expected = by_entries(A, B)
    assert np.isnan(expected).any()
    assert np.isnan(kernel(A=A, B=B)[np.isnan(expected)]).all()


@pytest.mark.shared(2)
@pytest.mark.parametrize("name", FORMATS)
def test_sampled_products_that_are_not_finite(name: str) -> None:
    dtype, idtype = types_of("sddmm", name)
    S, X, Y = operands(MATRICES["random"], dtype, 5)
    X, Y = abs(X), abs(Y)
    X[2], X[4], Y[0], Y[-1] = np.nan, np.inf, -np.inf, np.nan
    rows = np.repeat(np.arange(17), np.diff(S.indptr))
    with np.errstate(invalid="ignore"):
        expected = S.data * np.einsum("pk,pk->p", X[rows], Y[S.indices])
    O = ready("sddmm", name, dtype, idtype)[1](S=S, X=X, Y=Y)
    np.testing.assert_allclose(O.data, expected, rtol=1e-4, atol=1e-4)
