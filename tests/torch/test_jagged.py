# SPDX-License-Identifier: Apache-2.0
"""Attention within sequences of jagged batches, beside torch's attention of each sequence."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from sparsetir.errors import ArgumentError, ArgumentTypeError  # noqa: E402
from sparsetir.torch import block_attention, jagged, jagged_attention  # noqa: E402

SELF, CROSS = [3, 0, 17, 32], [5, 4, 0, 40]


@pytest.fixture(autouse=True)
def one_size(monkeypatch):
    monkeypatch.setattr(jagged, "COSTS", {16: 1.0})


def ragged(lengths, *inner, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(lengths), *inner, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]))
    return rows, torch.nested.nested_tensor_from_jagged(rows, offsets)


def by_sequences(q, k, v, lengths, key_lengths, is_causal, scale):
    """Attention of rows [positions, heads, features], one sequence after the other."""
    results = []
    for one, keys, values in zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True):
        operands = [t.transpose(0, 1)[None] for t in (one, keys, values)]
        if not keys.shape[0]:
            results.append(one.new_zeros(*one.shape[:-1], v.shape[-1]))
            continue
        mixed = scaled_dot_product_attention(*operands, is_causal=is_causal, scale=scale)
        results.append(mixed[0].transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_lengths", [SELF, CROSS])
def test_values_and_gradients(key_lengths, is_causal):
    (q, nested_q), (k, nested_k), (v, nested_v) = (
        ragged(lengths, 2, features, seed=n)
        for n, (lengths, features) in enumerate(((SELF, 3), (key_lengths, 3), (key_lengths, 2)))
    )
    y = jagged_attention(nested_q, nested_k, nested_v, is_causal=is_causal, scale=0.3)
    assert [part.shape for part in y.unbind()] == [(n, 2, 2) for n in SELF]
    expected = by_sequences(q, k, v, SELF, key_lengths, is_causal, 0.3)
    torch.testing.assert_close(y.values(), expected)
    g = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(y.values(), (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g), strict=True
    ):
        torch.testing.assert_close(one, other)
    transposed = (t.transpose(1, 2) for t in (nested_q, nested_k, nested_v))
    by_heads = jagged_attention(*transposed, is_causal=is_causal, scale=0.3)
    assert torch.equal(by_heads.transpose(1, 2).values(), y.values())


def test_halves_are_summed_in_float32():
    rows, x = ragged(SELF, 2, 4, dtype=torch.bfloat16)
    y = jagged_attention(x, x, x)
    wide = rows.detach().double()
    expected = by_sequences(wide, wide, wide, SELF, SELF, False, 0.5)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.values().double(), expected, rtol=2**-8, atol=2**-8)
    (g,) = torch.autograd.grad(y.values().float().square().sum(), rows)
    assert g.dtype is torch.bfloat16
    assert g.isfinite().all()


def test_sequences_are_apart():
    """Infinities and NaN in one sequence reach no other one."""
    rows = ragged(SELF, 2, 3)[0].detach()
    rows[SELF[0] + 1] = float("nan")
    x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor(np.concatenate([[0], np.cumsum(SELF)])))
    first, _, second, last = jagged_attention(x, x, x).unbind()
    assert first.isfinite().all()
    assert last.isfinite().all()
    assert second.isnan().all()


def test_no_positions():
    rows, x = ragged([0, 0], 2, 3)
    y = jagged_attention(x, x, x)
    assert y.values().shape == (0, 2, 3)
    y.values().sum().backward()
    assert rows.grad.shape == (0, 2, 3)


def test_sizes_of_blocks(monkeypatch):
    monkeypatch.setattr(jagged, "COSTS", block_attention.COSTS)
    assert jagged._batch((10,) * 40, (10,) * 40, False)[0].size == 16
    pattern, (places, total), _ = jagged._batch((640, 128), (640, 128), False)
    assert (pattern.size, pattern.masks, places, total) == (64, None, None, 768)


X = ragged(SELF, 2, 3)[1]


@pytest.mark.parametrize(
    ("operands", "error", "message"),
    [
        ((X, X, X.values()), ArgumentTypeError, "v: expected a nested tensor of torch.jagged"),
        ((X, X, ragged(SELF, 2, 3, dtype=torch.float32)[1]), ArgumentTypeError, "expected one dtype"),
        ((X, X.transpose(1, 2), X), ArgumentError, "k: expected the layout of q"),
        ((X, ragged(SELF, 2, 4)[1], X), ArgumentError, "expected the same heads"),
        ((X, ragged(SELF[:3], 2, 3)[1], X), ArgumentError, "k: expected 4 sequences"),
        ((X, X, ragged(CROSS, 2, 3)[1]), ArgumentError, "v: expected the lengths of k"),
    ],
)
def test_operands_that_do_not_fit(operands, error, message):
    with pytest.raises(error, match=message):
        jagged_attention(*operands)


def test_a_scale_that_is_no_number():
    with pytest.raises(ArgumentError, match="scale: expected a number"):
        jagged_attention(X, X, X, scale="1")
