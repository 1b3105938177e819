# SPDX-License-Identifier: Apache-2.0
"""Layers with pruned weights: a transformer's feed-forward block and a GRU cell.

The weights are blocks of 4 by 4 of a trained WaveRNN GRU kernel, 95 % zeros. Bias, GELU, the residual and the gates are
ordinary Relax operators, which `sparsetir.relax.build` takes into the kernels of the products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import Case, Line, compare, model, options, random, real_file, torch
from scipy.special import erf, expit
from tvm.relax import op

import sparsetir.relax as srelax

TOKENS = (1, 16, 128)


def pruned_weight(*, small: bool) -> sp.csr_array:
    """Return the weight of 3 * hidden by hidden."""
    found = real_file("pruned/wavernn_gru_4x4.npz", small=small)
    if found is not None:
        return sp.csr_array(sp.load_npz(found))
    hidden, rng = 64 if small else 1024, np.random.default_rng(0)
    blocks = sp.random_array((3 * hidden // 4, hidden // 4), density=0.05, rng=rng, dtype=np.float32)
    return sp.csr_array(sp.kron(blocks, np.ones((4, 4), np.float32)).multiply(random(3 * hidden, hidden, scale=0.3)))


def product(b: Any, x: Any, weight: sp.csr_array, *, sparse: bool) -> Any:
    """Emit ``x @ weight.T``."""
    if sparse:
        return b.emit(srelax.linear(x, *srelax.csr_constants(weight)))
    return b.emit(op.matmul(x, srelax.operators.constant(weight.toarray().T)))


# ------------------------------------------------------------------ feed-forward block


def feed_forward(weight: sp.csr_array, tokens: int) -> Case:
    """``x + W2 gelu(W1 x + b1) + b2``; W2 is the transpose of W1 with its rows in reverse."""
    wide, hidden = weight.shape
    W1, W2 = weight, sp.csr_array(weight.T.tocsr()[::-1])
    b1, b2, x = random(wide, seed=1), random(hidden, seed=2), random(tokens, hidden, seed=3)

    def block(sparse: bool) -> Any:
        def body(b: Any, x: Any) -> Any:
            inner = b.emit(op.add(product(b, x, W1, sparse=sparse), srelax.operators.constant(b1)))
            outer = product(b, b.emit(op.nn.gelu(inner)), W2, sparse=sparse)
            return op.add(b.emit(op.add(outer, srelax.operators.constant(b2))), x)

        return model(body, x)

    inner = x @ W1.T + b1
    want = x + (0.5 * inner * (1 + erf(inner / np.sqrt(2)))) @ W2.T + b2
    return Case(
        f"feed-forward {hidden}-{wide}-{hidden}, batch {tokens}",
        [x],
        block(sparse=True),
        block(sparse=False),
        lambda: {"nn.Linear": torch_feed_forward(W1, b1, W2, b2, x)},
        want.astype(np.float32),
    )


def torch_feed_forward(W1: Any, b1: Any, W2: Any, b2: Any, x: np.ndarray) -> Any:
    """Return the block with dense weights, in eager mode."""
    w1, w2 = (torch.from_numpy(np.ascontiguousarray(w.toarray())) for w in (W1, W2))
    c1, c2, given = (torch.from_numpy(a) for a in (b1, b2, x))
    linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu

    def call() -> Any:
        with torch.inference_mode():
            return given + linear(gelu(linear(given, w1, c1)), w2, c2)

    return call


# ------------------------------------------------------------------ GRU cell


def gru_cell(weight: sp.csr_array, batch: int) -> Case:
    """One step of a GRU; the gates are in the order of PyTorch: reset, update, new."""
    hidden = weight.shape[1]
    Wi, Wh = sp.csr_array(weight.tocsr()[::-1]), weight
    bi, bh = random(3 * hidden, seed=1), random(3 * hidden, seed=2)
    x, h = random(batch, hidden, seed=3), np.tanh(random(batch, hidden, seed=4))

    def cell(sparse: bool) -> Any:
        def body(b: Any, x: Any, h: Any) -> Any:
            gi = b.emit(op.add(product(b, x, Wi, sparse=sparse), srelax.operators.constant(bi)))
            gh = b.emit(op.add(product(b, h, Wh, sparse=sparse), srelax.operators.constant(bh)))
            (ir, iz, i_new), (hr, hz, h_new) = (b.emit(op.split(g, 3, axis=1)) for g in (gi, gh))
            reset, update = (b.emit(op.sigmoid(b.emit(op.add(i, j)))) for i, j in ((ir, hr), (iz, hz)))
            new = b.emit(op.tanh(b.emit(op.add(i_new, b.emit(op.multiply(reset, h_new))))))
            return op.add(new, b.emit(op.multiply(update, b.emit(op.subtract(h, new)))))

        return model(body, x, h)

    (ir, iz, i_new), (hr, hz, h_new) = np.split(x @ Wi.T + bi, 3, axis=1), np.split(h @ Wh.T + bh, 3, axis=1)
    new = np.tanh(i_new + expit(ir + hr) * h_new)
    want = new + expit(iz + hz) * (h - new)
    parts = {"weight_ih": Wi.toarray(), "weight_hh": Wh.toarray(), "bias_ih": bi, "bias_hh": bh}
    return Case(
        f"GRU cell {hidden}, batch {batch}",
        [x, h],
        cell(sparse=True),
        cell(sparse=False),
        lambda: {"nn.GRUCell": torch_gru_cell(parts, x, h)},
        want.astype(np.float32),
    )


def torch_gru_cell(parts: Mapping[str, np.ndarray], x: np.ndarray, h: np.ndarray) -> Any:
    """``torch.nn.GRUCell`` with these weights, in eager mode."""
    cell = torch.nn.GRUCell(x.shape[1], h.shape[1])
    cell.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()})
    given = (torch.from_numpy(x), torch.from_numpy(h))

    def call() -> Any:
        with torch.inference_mode():
            return cell(*given)

    return call


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Print the table."""
    args = options(__doc__, argv)
    weight = pruned_weight(small=args.small)
    tokens = (4,) if args.small else TOKENS
    cases = [make(weight, batch) for make in (feed_forward, gru_cell) for batch in tokens]
    return compare("Pruned layers", cases, rounds=args.rounds)


if __name__ == "__main__":
    main()
