# SPDX-License-Identifier: Apache-2.0
"""Attention under block-sparse masks: the sliding window of a Longformer, and a butterfly.

`R.sparse.attention` takes the blocks that each block of rows sees; scores, softmax and mixture are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import Case, Line, compare, model, options, random, torch
from tvm.relax import op

import sparsetir.relax as srelax

constant = srelax.operators.constant


def longformer(blocks: int, window: int) -> sp.csr_array:
    """`window` blocks on either side of the diagonal, and the first block for all, which sees all."""
    i, j = np.indices((blocks, blocks))
    return structure((np.abs(i - j) <= window) | (i == 0) | (j == 0))


def butterfly(blocks: int) -> sp.csr_array:
    """Blocks whose numbers differ in one bit at most: the factors of a fast Fourier transform, added up."""
    i, j = np.indices((blocks, blocks))
    differing = i ^ j
    return structure((differing & (differing - 1)) == 0)


def structure(mask: np.ndarray) -> sp.csr_array:
    """Return a mask of blocks with int32 index arrays."""
    found = sp.csr_array(mask)
    parts = (found.data, found.indices.astype(np.int32), found.indptr.astype(np.int32))
    return sp.csr_array(parts, shape=mask.shape)


def attention(name: str, seen: sp.csr_array, block: int, heads: int, feat: int, *, dense: bool) -> Case:
    """One attention, from Q, K and V; with all scores beside it if `dense`."""
    length = block * seen.shape[0]
    Q, K, V = (random(heads, length, feat, seed=seed) for seed in range(3))
    mask = np.kron(seen.toarray(), np.ones((block, block), bool))
    scale = feat**-0.5

    def sparse(b: Any, Q: Any, K: Any, V: Any) -> Any:
        return srelax.attention(Q, K, V, constant(seen.indptr), constant(seen.indices), scale)

    def all_scores(b: Any, Q: Any, K: Any, V: Any) -> Any:
        scores = b.emit(op.matmul(Q, b.emit(op.permute_dims(K, [0, 2, 1]))))
        scaled = b.emit(op.multiply(scores, constant(np.float32(scale).reshape(()))))
        masked = b.emit(op.add(scaled, constant(np.where(mask, np.float32(0), np.float32(-1e30)))))
        return op.matmul(b.emit(op.nn.softmax(masked, axis=-1)), V)

    share = seen.nnz / seen.shape[0] ** 2
    return Case(
        f"{name}, length {length}, {heads} x {feat}, block {block}, {share:.0%} of the mask",
        [Q, K, V],
        model(sparse, Q, K, V),
        model(all_scores, Q, K, V) if dense else None,
        lambda: torch_attention(Q, K, V, mask),
        np.stack([by_numpy(q, k, v, mask, scale) for q, k, v in zip(Q, K, V, strict=True)]),
    )


def by_numpy(Q: np.ndarray, K: np.ndarray, V: np.ndarray, mask: np.ndarray, scale: float) -> np.ndarray:
    """One head."""
    scores = np.where(mask, Q @ K.T * np.float32(scale), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ V / weights.sum(axis=1, keepdims=True)


def torch_attention(Q: np.ndarray, K: np.ndarray, V: np.ndarray, mask: np.ndarray) -> Mapping[str, Callable[[], Any]]:
    """With the mask as booleans, and step by step."""
    q, k, v, seen = (torch.from_numpy(a) for a in (Q, K, V, mask))
    hidden = torch.zeros(mask.shape).masked_fill_(~seen, -torch.inf)

    def fused() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen)[0]

    def steps() -> Any:
        with torch.inference_mode():
            return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + hidden, dim=-1) @ v

    return {"scaled_dot_product": fused, "matmul, softmax": steps}


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Print the table."""
    args = options(__doc__, argv)
    length, heads, feat = (256, 2, 16) if args.small else (4096, 12, 64)
    cases: list[Case] = []
    for block in (32,) if args.small else (32, 64):
        blocks = length // block
        cases.append(
            attention("Longformer", longformer(blocks, length // 16 // block), block, heads, feat, dense=not cases)
        )
        cases.append(attention("butterfly", butterfly(blocks), block, heads, feat, dense=False))
    lines = compare("Sparse attention", cases, rounds=args.rounds)
    print("dense: all scores, which take as long under any mask and are computed for the first one only")
    return lines


if __name__ == "__main__":
    main()
