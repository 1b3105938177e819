# SPDX-License-Identifier: Apache-2.0
"""A graph attention layer: scores, softmax and mixture along the edges in one kernel, written by hand.

The kernel is a program of the dialect and stands in the module beside ordinary Relax operators, which call it with
`R.call_tir`: inputs first, then the result. Every node has an edge at least, to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import Case, Line, compare, graph, model, options, random, torch
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import sparsetir as T

import sparsetir.relax as srelax

SLOPE = 0.2
constant = srelax.operators.constant


def attention_kernel(n: int, nnz: int, heads: int, feat: int) -> tirx.PrimFunc:
    """Return the kernel for one graph: known sizes are numbers in it, and its loops over them have no remainders.

    ``S[j]`` are the shares of node j in a score, as a target and as a source; X are its features for each head.
    """

    @T.prim_func
    def graph_attention(indptr: T.handle, indices: T.handle, s: T.handle, x: T.handle, y: T.handle):
        T.func_attr({"op_pattern": 8})  # for Relax: nothing is to be fused with it
        I = T.dense_fixed(n)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        N = T.dense_fixed(n)
        SIDE = T.dense_fixed(2)
        H = T.dense_fixed(heads)
        F = T.dense_fixed(feat)
        S = T.match_sparse_buffer(s, (N, SIDE, H), "float32")
        X = T.match_sparse_buffer(x, (N, H, F), "float32")
        Y = T.match_sparse_buffer(y, (I, H, F), "float32")
        score = T.alloc_sparse_buffer((I, J, H), "float32")
        top = T.alloc_sparse_buffer((I, H), "float32")
        total = T.alloc_sparse_buffer((I, H), "float32")
        with T.sp_iter([I, J, H], "SSS", "leaky_relu") as [i, j, h]:
            score[i, j, h] = T.max(S[i, 0, h] + S[j, 1, h], T.float32(SLOPE) * (S[i, 0, h] + S[j, 1, h]))
        with T.sp_iter([I, J, H], "SRS", "row_max") as [i, j, h]:
            with T.init():
                top[i, h] = T.min_value("float32")
            top[i, h] = T.max(top[i, h], score[i, j, h])
        with T.sp_iter([I, J, H], "SSS", "exponent") as [i, j, h]:
            score[i, j, h] = T.exp(score[i, j, h] - top[i, h])
        with T.sp_iter([I, J, H], "SRS", "row_sum") as [i, j, h]:
            with T.init():
                total[i, h] = 0
            total[i, h] = total[i, h] + score[i, j, h]
        with T.sp_iter([I, J, H, F], "SRSS", "mix") as [i, j, h, f]:
            with T.init():
                Y[i, h, f] = 0
            Y[i, h, f] = Y[i, h, f] + score[i, j, h] * X[j, h, f]
        with T.sp_iter([I, H, F], "SSS", "share") as [i, h, f]:
            Y[i, h, f] = Y[i, h, f] / total[i, h]

    return graph_attention


def side_weights(both: np.ndarray) -> np.ndarray:
    """Return the vectors of a score, (2, heads, feat), as a matrix (heads * feat, 2 * heads)."""
    _, heads, feat = both.shape
    out = np.zeros((heads, feat, 2, heads), np.float32)
    for h in range(heads):
        out[h, :, :, h] = both[:, h].T
    return out.reshape(heads * feat, 2 * heads)


def layer(name: str, A: sp.csr_array, features: int, heads: int, feat: int, *, dense: bool) -> Case:
    """``relu(attention(X W) + b)`` over the edges of A and a loop at every node."""
    A = sp.csr_array(A + sp.eye_array(A.shape[0], dtype=np.float32)).astype(np.float32)
    A.data[:] = 1
    n = A.shape[0]
    X, W = random(n, features, seed=1), random(features, heads * feat, seed=2, scale=features**-0.5)
    both, bias = random(2, heads, feat, seed=3, scale=feat**-0.5), random(heads * feat, seed=4)
    weights = (W, side_weights(both), bias)
    return Case(
        f"GAT {features}-{heads}x{feat}, {name}",
        [X],
        model(
            sparse_body(A, weights, heads, feat),
            X,
            functions={"graph_attention": attention_kernel(n, A.nnz, heads, feat)},
        ),
        model(dense_body(A, weights, heads, feat), X) if dense else None,
        lambda: torch_layer(A, X, weights, heads, feat),
        by_numpy(A, X, weights, heads, feat),
    )


def sparse_body(A: sp.csr_array, weights: Sequence[np.ndarray], heads: int, feat: int) -> Any:
    """Return the layer with the kernel in it."""
    W, sides, bias = weights
    n = A.shape[0]

    def body(b: Any, X: Any, graph_attention: Any) -> Any:
        H = b.emit(op.matmul(X, constant(W)))
        scores = b.emit(op.reshape(b.emit(op.matmul(H, constant(sides))), [n, 2, heads]))
        split = b.emit(op.reshape(H, [n, heads, feat]))
        args = [constant(A.indptr), constant(A.indices), scores, split]
        mixed = b.emit(relax.call_tir(graph_attention, args, relax.TensorType([n, heads, feat], "float32")))
        flat = b.emit(op.reshape(mixed, [n, heads * feat]))
        return op.nn.relu(b.emit(op.add(flat, constant(bias))))

    return body


def dense_body(A: sp.csr_array, weights: Sequence[np.ndarray], heads: int, feat: int) -> Any:
    """Return the layer with a dense matrix of scores for each head."""
    W, sides, bias = weights
    n = A.shape[0]
    mask = np.where(A.toarray() != 0, np.float32(0), np.float32(-1e30))

    def body(b: Any, X: Any) -> Any:
        H = b.emit(op.matmul(X, constant(W)))
        scores = b.emit(op.permute_dims(b.emit(op.matmul(H, constant(sides))), [1, 0]))
        target, source = (
            b.emit(s) for s in (op.strided_slice(scores, [0], [k * heads], [(k + 1) * heads]) for k in (0, 1))
        )
        pair = b.emit(op.add(b.emit(op.expand_dims(target, 2)), b.emit(op.expand_dims(source, 1))))
        masked = b.emit(op.add(b.emit(op.nn.leakyrelu(pair, SLOPE)), constant(mask)))
        split = b.emit(op.permute_dims(b.emit(op.reshape(H, [n, heads, feat])), [1, 0, 2]))
        mixed = b.emit(op.matmul(b.emit(op.nn.softmax(masked, axis=-1)), split))
        flat = b.emit(op.reshape(b.emit(op.permute_dims(mixed, [1, 0, 2])), [n, heads * feat]))
        return op.nn.relu(b.emit(op.add(flat, constant(bias))))

    return body


def by_numpy(A: sp.csr_array, X: np.ndarray, weights: Sequence[np.ndarray], heads: int, feat: int) -> np.ndarray:
    """Return the layer along the list of edges; every row has one, so that segments are never empty."""
    W, sides, bias = weights
    H = X @ W
    scores = (H @ sides).reshape(-1, 2, heads)
    rows, columns = A.tocoo().coords
    edge = scores[rows, 0] + scores[columns, 1]
    edge = np.maximum(edge, SLOPE * edge)
    power = np.exp(edge - np.maximum.reduceat(edge, A.indptr[:-1])[rows])
    share = power / np.add.reduceat(power, A.indptr[:-1])[rows]
    mixed = [
        sp.csr_array((share[:, h], A.indices, A.indptr), A.shape) @ H[:, h * feat : (h + 1) * feat]
        for h in range(heads)
    ]
    return np.maximum(np.concatenate(mixed, axis=1) + bias, 0).astype(np.float32)


def torch_layer(
    A: sp.csr_array, X: np.ndarray, weights: Sequence[np.ndarray], heads: int, feat: int
) -> Mapping[str, Callable[[], Any]]:
    """By gathering and scattering, and with a sparse CSR product for each head."""
    W, sides, bias, held = (torch.from_numpy(a) for a in (*weights, X))
    rows, columns = (torch.from_numpy(ends.astype(np.int64)) for ends in A.tocoo().coords)
    indptr, indices, n = torch.from_numpy(A.indptr), torch.from_numpy(A.indices), A.shape[0]

    def shares(H: Any) -> Any:
        scores = (H @ sides).view(n, 2, heads)
        edge = torch.nn.functional.leaky_relu(scores[rows, 0] + scores[columns, 1], SLOPE)
        top = edge.new_full((n, heads), -torch.inf).scatter_reduce_(0, rows[:, None].expand_as(edge), edge, "amax")
        power = torch.exp(edge - top[rows])
        return power / power.new_zeros(n, heads).index_add_(0, rows, power)[rows]

    def scattered(H: Any, share: Any) -> Any:
        split = H.view(n, heads, feat)
        return H.new_zeros(n, heads, feat).index_add_(0, rows, share[:, :, None] * split[columns]).view(n, -1)

    def products(H: Any, share: Any) -> Any:
        each = share.T.contiguous()
        matrices = (
            torch.sparse_csr_tensor(indptr, indices, each[h], A.shape, check_invariants=False) for h in range(heads)
        )
        return torch.cat([m @ H[:, h * feat : (h + 1) * feat] for h, m in enumerate(matrices)], dim=1)

    def call(mix: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.inference_mode():
                H = held @ W
                return torch.relu(mix(H, shares(H)) + bias)

        return run

    return {"index_add_": call(scattered), "sparse CSR": call(products)}


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Print the table."""
    args = options(__doc__, argv)
    cora = graph("graphs/cora.npz", 2708, 10_556, small=args.small)
    bought = graph("graphs/amazon_computers.npz", 13_752, 491_722, small=args.small)
    features = 24 if args.small else 128
    cases = [
        layer("Cora", cora, features, 8, 8, dense=True),
        layer("amazon_computers", bought, features, 4, 32, dense=False),
    ]
    return compare("Graph attention", cases, rounds=args.rounds)


if __name__ == "__main__":
    main()
