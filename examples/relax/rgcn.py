# SPDX-License-Identifier: Apache-2.0
"""A relational graph convolution on a knowledge graph: a matrix for each relation and direction.

``relu(X W_self + 1 / degree * sum over the edges of X[other end] W[relation] + b)``, where the sum over the edges is
`R.sparse.gather_matmul_scatter`, and the degrees, the product of W_self, the bias and the ReLU join its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import Case, Line, compare, model, options, random, real_file, torch
from tvm.relax import op

import sparsetir.relax as srelax

constant = srelax.operators.constant


@dataclass(frozen=True)
class Relations:
    """Edges with a relation each, as rows of the target's incoming ones."""

    nodes: int
    relations: int
    rows: np.ndarray
    indices: np.ndarray
    kinds: np.ndarray

    @property
    def indptr(self) -> np.ndarray:
        """Where the edges of each node begin."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.rows, minlength=self.nodes))]).astype(np.int32)

    @property
    def share(self) -> np.ndarray:
        """One over the number of each node's edges, as a column."""
        return (1 / np.maximum(np.diff(self.indptr), 1)).astype(np.float32)[:, None]


def knowledge_graph(*, small: bool) -> Relations:
    """Every triple in both directions; the inverse of a relation is one of its own."""
    found = real_file("relational/fb15k237.npz", small=small)
    if found is not None:
        held = np.load(found)
        (relation, subject, object_), (relations, nodes, _) = held["coords"], (int(size) for size in held["shape"])
    else:
        relations, nodes, triples = (7, 200, 900) if small else (237, 14_541, 310_116)
        rng = np.random.default_rng(0)
        relation, subject = (np.minimum(rng.zipf(1.3, triples), most) - 1 for most in (relations, nodes))
        object_ = rng.integers(0, nodes, triples)
    rows, columns = np.concatenate([object_, subject]), np.concatenate([subject, object_])
    kinds = np.concatenate([relation, relation + relations])
    order = np.lexsort((kinds, rows))
    return Relations(nodes, 2 * relations, rows[order], columns[order].astype(np.int32), kinds[order].astype(np.int32))


def layer(name: str, edges: Relations, features: int, hidden: int) -> Case:
    """One layer with a full weight for each relation."""
    X = random(edges.nodes, features, seed=1)
    W = random(edges.relations, features, hidden, seed=2, scale=features**-0.5)
    W_self, bias = random(features, hidden, seed=3, scale=features**-0.5), random(hidden, seed=4)

    def sparse(b: Any, X: Any, W: Any) -> Any:
        structure = [constant(part) for part in (edges.indptr, edges.indices, edges.kinds)]
        total = b.emit(srelax.gather_matmul_scatter(X, W, *structure))
        return finish(b, X, total)

    def by_relation(b: Any, X: Any, W: Any) -> Any:
        wide = b.emit(op.reshape(b.emit(op.permute_dims(W, [1, 0, 2])), [features, -1]))
        every = b.emit(op.reshape(b.emit(op.matmul(X, wide)), [edges.nodes * edges.relations, hidden]))
        place = edges.indices.astype(np.int64) * edges.relations + edges.kinds
        each = b.emit(op.take(every, constant(place), axis=0))
        rows = constant(edges.rows.astype(np.int64)[:, None])
        zeros = constant(np.zeros((edges.nodes, hidden), np.float32))
        return finish(b, X, b.emit(op.scatter_nd(zeros, rows, each, "add")))

    def finish(b: Any, X: Any, total: Any) -> Any:
        mean = b.emit(op.multiply(total, constant(edges.share)))
        both = b.emit(op.add(mean, b.emit(op.matmul(X, constant(W_self)))))
        return op.nn.relu(b.emit(op.add(both, constant(bias))))

    total = np.zeros((edges.nodes, hidden), np.float32)
    for kind in range(edges.relations):
        at = edges.kinds == kind
        np.add.at(total, edges.rows[at], X[edges.indices[at]] @ W[kind])
    want = np.maximum(total * edges.share + X @ W_self + bias, 0)
    weights = (W, W_self, bias)
    return Case(
        f"RGCN {features}-{hidden}, {edges.relations} relations, {name}",
        [X, W],
        model(sparse, X, W),
        model(by_relation, X, W),
        lambda: torch_layer(edges, X, weights),
        want,
    )


def torch_layer(edges: Relations, X: np.ndarray, weights: Sequence[np.ndarray]) -> Mapping[str, Callable[[], Any]]:
    """Return a product for each relation, and all nodes through all relations, of which edges take what they need."""
    W, W_self, bias, held, share = (torch.from_numpy(a) for a in (*weights, X, edges.share))
    rows, columns = (torch.from_numpy(a.astype(np.int64)) for a in (edges.rows, edges.indices))
    place = columns * edges.relations + torch.from_numpy(edges.kinds.astype(np.int64))
    groups = [torch.from_numpy(np.flatnonzero(edges.kinds == kind)) for kind in range(edges.relations)]
    lists = [(rows[group], columns[group], W[kind]) for kind, group in enumerate(groups) if len(group)]

    def each(total: Any) -> Any:
        for to, of, weight in lists:
            total.index_add_(0, to, held[of] @ weight)
        return total

    def every(total: Any) -> Any:
        through = torch.einsum("nc,rcd->nrd", held, W).reshape(-1, W.shape[2])
        return total.index_add_(0, rows, through[place])

    def call(sums: Callable[[Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.inference_mode():
                total = sums(held.new_zeros(edges.nodes, W.shape[2]))
                return torch.relu(total * share + held @ W_self + bias)

        return run

    return {"mm by relation": call(each), "all nodes": call(every)}


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Print the table."""
    args = options(__doc__, argv)
    edges = knowledge_graph(small=args.small)
    width = 8 if args.small else 32
    lines = compare("Relational graph convolution", [layer("fb15k237", edges, width, width)], rounds=args.rounds)
    print("dense: all nodes through the matrices of all relations, and the edges take what they need")
    return lines


if __name__ == "__main__":
    main()
