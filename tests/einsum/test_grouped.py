# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul` of arrays, its kernels at the edges of their tiles, and the programs of the dialect."""

import itertools

import numpy as np
import pytest

import sparsetir
from sparsetir.einsum.products import run
from sparsetir.errors import ArgumentError, ArgumentTypeError

LENGTHS = [0, 1, 5, 6, 7, 0, 30, 3, 2, 4, 0]
STARTS = np.cumsum([0, *LENGTHS])


def drawn(feat: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, matrices and the product in double precision."""
    rng = np.random.default_rng(feat)
    x = rng.standard_normal((STARTS[-1], 9)).astype(dtype)
    W = rng.standard_normal((len(LENGTHS), 9, feat)).astype(dtype)
    parts = [x[low:high].astype("float64") @ W[g] for g, (low, high) in enumerate(itertools.pairwise(STARTS))]
    return x, W, np.concatenate(parts)


@pytest.mark.parametrize("idtype", ["int32", "int64", "uint8"])
def test_columns_at_the_edges_of_tiles(idtype: str) -> None:
    for feat in (1, 15, 16, 17, 63, 64, 65, 130):
        x, W, expected = drawn(feat)
        np.testing.assert_allclose(sparsetir.grouped_matmul(x, STARTS.astype(idtype), W), expected, atol=1e-4)


@pytest.mark.slow
def test_sums_over_groups() -> None:
    for feat in (3, 20, 64):
        x, W, y = drawn(feat, "float64")
        gradient = np.full_like(W, np.nan)
        run("float64", "weights", x, y, gradient, STARTS)
        for g, (low, high) in enumerate(itertools.pairwise(STARTS)):
            np.testing.assert_allclose(gradient[g], x[low:high].T @ y[low:high], atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_programs_of_the_dialect(idtype: str) -> None:
    x, W, y = drawn(6, "float64")
    sizes = {"offsets": STARTS.astype(idtype), "longest": max(LENGTHS)}
    kernel = {
        r: sparsetir.build(sparsetir.ops.grouped_matmul("float64", r, idtype=idtype))
        for r in ("rows", "transposed", "weights")
    }
    np.testing.assert_allclose(kernel["rows"](X=x, W=W, **sizes), y, atol=1e-12)
    groups = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    np.testing.assert_allclose(
        kernel["transposed"](Y=y, W=W, **sizes), np.einsum("rk,rdk->rd", y, W[groups]), atol=1e-12
    )
    expected = np.zeros_like(W)
    np.add.at(expected, groups, x[:, :, None] * y[:, None])
    np.testing.assert_allclose(kernel["weights"](X=x, Y=y, **sizes), expected, atol=1e-12)


def test_no_rows_groups_or_columns() -> None:
    grouped = sparsetir.grouped_matmul
    assert grouped(np.ones((0, 2)), [0, 0], np.ones((1, 2, 3))).shape == (0, 3)
    assert grouped(np.ones((0, 2)), [0], np.ones((0, 2, 3))).shape == (0, 3)
    assert grouped(np.ones((2, 2)), [0, 2], np.ones((1, 2, 0))).shape == (2, 0)
    assert (grouped(np.ones((2, 0)), [0, 2], np.ones((1, 0, 3))) == 0).all()


@pytest.mark.parametrize(
    ("offsets", "fault"),
    [
        ([0, 3, 2], "offsets: expected ascending positions from 0"),
        ([1, 2, 4], "offsets: expected 0 as the first position"),
        ([0, 2, 5], "offsets: expected positions up to 4"),
        (np.array([0, 2, 2**63 + 4], np.uint64), "offsets: expected positions up to 4"),
        (np.array([0, 2**63 + 4, 4], np.uint64), "offsets: expected ascending positions"),
        ([0, 2, 3], "offsets: expected 4, the number of rows, as the last position"),
        ([0, 4], r"x, W: expected \(rows, depth\) and \(1, depth, feat\)"),
    ],
)
def test_wrong_offsets(offsets: list[int], fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        sparsetir.grouped_matmul(np.ones((4, 2)), offsets, np.ones((2, 2, 3)))


def test_wrong_dtypes() -> None:
    x, W = np.ones((4, 2)), np.ones((1, 2, 3))
    with pytest.raises(ArgumentTypeError, match="x, W: expected arrays of one dtype"):
        sparsetir.grouped_matmul(x.astype(int), [0, 4], W)
    with pytest.raises(ArgumentTypeError, match="offsets: expected one dimension of integers"):
        sparsetir.grouped_matmul(x, [0.0, 4.0], W)
    with pytest.raises(ArgumentError, match="result: expected one of rows, transposed, weights"):
        sparsetir.ops.grouped_matmul(result="columns")
