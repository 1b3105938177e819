# SPDX-License-Identifier: Apache-2.0
"""Graph networks on a whole graph: a GCN of two layers and a GraphSAGE layer with the mean of the neighbours.

The adjacency is a constant of the model, so that its storage is chosen when the model is built. The features of Cora
are sparse as well, and a constant too; the first weight is an input there, so that nothing is computed beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import Case, Line, compare, graph, model, options, random, real_file, torch
from tvm.relax import op

import sparsetir.relax as srelax

constant = srelax.operators.constant
Call = Callable[[], Any]


def normalised(A: sp.csr_array) -> sp.csr_array:
    """Return ``D^-1/2 (A + I) D^-1/2``."""
    loops = sp.csr_array(A + sp.eye_array(A.shape[0], dtype=np.float32))
    root = sp.diags_array(1 / np.sqrt(loops.sum(axis=1)))
    return sp.csr_array(root @ loops @ root).astype(np.float32)


def averaging(A: sp.csr_array) -> sp.csr_array:
    """Every row divided by its sum."""
    return sp.csr_array(sp.diags_array(1 / np.maximum(A.sum(axis=1), 1)) @ A).astype(np.float32)


def words(nodes: int, *, small: bool) -> sp.csr_array:
    """Return the bag of words of each paper of Cora."""
    found = real_file("graphs/cora_features.npz", small=small)
    if found is not None:
        return sp.csr_array(sp.load_npz(found)).astype(np.float32)
    width = 100 if small else 1433
    return sp.random_array((nodes, width), density=0.0127, format="csr", dtype=np.float32, rng=np.random.default_rng(1))


def times(b: Any, A: sp.csr_array, X: Any, *, sparse: bool) -> Any:
    """Emit ``A @ X`` for a constant A."""
    if sparse:
        return b.emit(srelax.spmm(*srelax.csr_constants(A), X))
    return b.emit(op.matmul(constant(A.toarray()), X))


# ------------------------------------------------------------------ GCN


def gcn(name: str, A: sp.csr_array, X: Any, hidden: int, classes: int) -> Case:
    """Emit ``A relu(A X W1 + b1) W2 + b2``; X is an input, or a sparse constant while W1 is the input."""
    features = X.shape[1]
    W1, W2 = random(features, hidden, seed=1, scale=features**-0.5), random(hidden, classes, seed=2, scale=hidden**-0.5)
    b1, b2 = random(hidden, seed=3), random(classes, seed=4)
    fixed = sp.issparse(X)

    def network(sparse: bool) -> Any:
        def body(b: Any, given: Any) -> Any:
            first = times(b, X, given, sparse=sparse) if fixed else b.emit(op.matmul(given, constant(W1)))
            inner = b.emit(op.nn.relu(b.emit(op.add(times(b, A, first, sparse=sparse), constant(b1)))))
            second = b.emit(op.matmul(inner, constant(W2)))
            return op.add(times(b, A, second, sparse=sparse), constant(b2))

        return model(body, W1 if fixed else X)

    want = A @ (np.maximum(A @ (X @ W1) + b1, 0) @ W2) + b2
    weights = (W1, b1, W2, b2)
    return Case(
        f"GCN {features}-{hidden}-{classes}, {name}",
        [W1 if fixed else X],
        network(sparse=True),
        network(sparse=False),
        lambda: torch_gcn(A, X, weights),
        want.astype(np.float32),
    )


def torch_gcn(A: sp.csr_array, X: Any, weights: Sequence[np.ndarray]) -> Mapping[str, Call]:
    """With the adjacency as a sparse CSR tensor, and by index_add_ over the edges."""
    W1, b1, W2, b2 = (torch.from_numpy(w) for w in weights)
    held = csr_tensor(X) if sp.issparse(X) else torch.from_numpy(X)
    adjacency, edges = csr_tensor(A), Edges(A)

    def call(product: Callable[[Any], Any]) -> Call:
        def run() -> Any:
            with torch.inference_mode():
                inner = torch.relu(product(held @ W1) + b1)
                return product(inner @ W2) + b2

        return run

    return {"sparse CSR": call(lambda H: adjacency @ H), "index_add_": call(edges.sum)}


def csr_tensor(A: sp.csr_array) -> Any:
    """Return a matrix as a sparse CSR tensor."""
    parts = (torch.from_numpy(part) for part in (A.indptr, A.indices, A.data))
    return torch.sparse_csr_tensor(*parts, size=A.shape, check_invariants=False)


class Edges:
    """A graph as a list of edges, for gathering and scattering."""

    def __init__(self, A: sp.csr_array) -> None:
        rows, columns = A.tocoo().coords
        self.count = A.shape[0]
        self.rows, self.columns = (torch.from_numpy(ends.astype(np.int64)) for ends in (rows, columns))
        self.values = torch.from_numpy(A.data)[:, None]

    def sum(self, H: Any) -> Any:
        """Return ``A @ H``."""
        return H.new_zeros(self.count, H.shape[1]).index_add_(0, self.rows, H[self.columns] * self.values)


# ------------------------------------------------------------------ GraphSAGE


def sage(name: str, A: sp.csr_array, X: np.ndarray, hidden: int) -> Case:
    """``relu(X W_self + mean(neighbours) W_near + b)``; if it has fewer columns, the mean is taken after W_near."""
    near, features = averaging(A), X.shape[1]
    W_self, W_near = (random(features, hidden, seed=seed, scale=features**-0.5) for seed in (1, 2))
    bias = random(hidden, seed=3)

    def network(sparse: bool) -> Any:
        def body(b: Any, X: Any) -> Any:
            own = b.emit(op.matmul(X, constant(W_self)))
            if hidden < features:
                mean = times(b, near, b.emit(op.matmul(X, constant(W_near))), sparse=sparse)
            else:
                mean = b.emit(op.matmul(times(b, near, X, sparse=sparse), constant(W_near)))
            return op.nn.relu(b.emit(op.add(b.emit(op.add(mean, own)), constant(bias))))

        return model(body, X)

    want = np.maximum(X @ W_self + (near @ X) @ W_near + bias, 0)
    return Case(
        f"GraphSAGE {features}-{hidden}, {name}",
        [X],
        network(sparse=True),
        network(sparse=False),
        lambda: torch_sage(near, X, (W_self, W_near, bias)),
        want.astype(np.float32),
    )


def torch_sage(near: sp.csr_array, X: np.ndarray, weights: Sequence[np.ndarray]) -> Mapping[str, Call]:
    """With a sparse CSR tensor, and by index_add_ over the edges."""
    W_self, W_near, bias, held = (torch.from_numpy(w) for w in (*weights, X))
    adjacency, edges = csr_tensor(near), Edges(near)

    def call(product: Callable[[Any], Any]) -> Call:
        def run() -> Any:
            with torch.inference_mode():
                mean = product(held @ W_near) if W_near.shape[1] < W_near.shape[0] else product(held) @ W_near
                return torch.relu(held @ W_self + mean + bias)

        return run

    return {"sparse CSR": call(lambda H: adjacency @ H), "index_add_": call(edges.sum)}


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Print the table."""
    args = options(__doc__, argv)
    wide = 16 if args.small else 128
    cora = graph("graphs/cora.npz", 2708, 10_556, small=args.small)
    tolokers = graph("graphs/tolokers.npz", 11_758, 1_038_000, small=args.small)
    X = words(cora.shape[0], small=args.small)
    dense = random(tolokers.shape[0], wide, seed=5)
    cases = [gcn("Cora", normalised(cora), X, 16, 7), sage("tolokers", tolokers, dense, wide)]
    if not args.small:
        cases += [sage("Cora", cora, X.toarray(), 16), gcn("tolokers", normalised(tolokers), dense, wide, wide)]
    return compare("Graph networks", cases, rounds=args.rounds)


if __name__ == "__main__":
    main()
