# SPDX-License-Identifier: Apache-2.0
"""Graphs to train on: real ones where there is a folder of them, or generated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

import torch
from sparsetir.errors import ArgumentError
from sparsetir.workloads import suite
from torch import Tensor

FILES = {
    "cora": "graphs/cora.npz",
    "pubmed": "graphs/pubmed.npz",
    "amazon_computers": "graphs/amazon_computers.npz",
    "tolokers": "graphs/tolokers.npz",
    "fb15k237": "relational/fb15k237.npz",
}
RELATIONAL = ("fb15k237",)  # the relations of all others are drawn
FEATURES = {"cora": "graphs/cora_features.npz"}
FAMILIES = ("rmat", "communities")  # of generated graphs
EDGES, RELATIONS = 20_000, 4
HOPS = 2
Array = np.ndarray


@dataclass(frozen=True, eq=False)
class NodeProblem:
    """Nodes of a graph, some of whose classes are known.

    Parameters
    ----------
    name : str
    adjacency : csr_array
        [nodes, nodes], rows are targets.
    x : Tensor
        Features, [nodes, features].
    y : Tensor
        Classes, [nodes].
    train : Tensor
        Numbers of the nodes whose classes are known; `test` are the others.
    test : Tensor
    relations : ndarray
        The kind of each edge, in the order of the adjacency.
    """

    name: str
    adjacency: sp.csr_array
    x: Tensor
    y: Tensor
    train: Tensor
    test: Tensor
    relations: Array

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    @property
    def num_relations(self) -> int:
        return int(self.relations.max(initial=0)) + 1

    @property
    def edge_index(self) -> Tensor:
        """Sources above targets, in the order of the adjacency."""
        rows, columns = self.adjacency.tocoo().coords
        return torch.from_numpy(np.stack([columns, rows]).astype(np.int64))

    def __str__(self) -> str:
        return f"{self.name}: {self.x.shape[0]:,} nodes, {self.adjacency.nnz:,} edges"


def load(name: str, *, features: int = 64, classes: int = 8, seed: int = 0) -> NodeProblem:
    """Return a graph by its name.

    Parameters
    ----------
    name : str
        A real one of the folder that SPARSETIR_DATA names (``cora``); or ``rmat``, ``communities``, with the number of
        edges behind a colon (``rmat:1e6``).
    features : int
        How many a node has. Those of cora are its own: words.
    classes : int
        How many there are. They are made, by a network with random weights of which each node sees two steps far, so
        that training has something to find.
    seed : int

    Raises
    ------
    ArgumentError
        There is no such graph.
    """
    rng = np.random.default_rng(seed)
    family, _, edges = name.partition(":")
    if family in FAMILIES:
        adjacency = _undirected(suite.generate(family, _number(name, edges), seed=seed))
        relations = rng.integers(0, RELATIONS, adjacency.nnz)
    elif name in FILES:
        adjacency, relations = _read(name, rng)
    else:
        names = ", ".join([*FILES, *FAMILIES, f"{FAMILIES[0]}:1e6"])
        raise ArgumentError(f"expected a graph, one of {names}; found {name!r}")
    x = _words(name) if name in FEATURES else rng.standard_normal((adjacency.shape[0], features), np.float32)
    order = torch.from_numpy(rng.permutation(adjacency.shape[0]))
    train_count = order.numel() // 2
    y = _classes(adjacency, x, classes, rng)
    parts = (torch.from_numpy(x), torch.from_numpy(y), order[:train_count], order[train_count:])
    return NodeProblem(name, adjacency, *parts, relations)


def available() -> list[str]:
    """Return the names of the real graphs that are at hand."""
    return [name for name in FILES if _path(FILES[name]).is_file()]


def usual(*, relations: bool) -> str:
    """Return the name of a small graph, real if one is available, with relations of edges where those matter."""
    names = [name for name in available() if (name in RELATIONAL) == relations]
    return next(iter(names), FAMILIES[-1])


def _path(file: str) -> Path:
    return Path(os.environ.get("SPARSETIR_DATA", "/nowhere"), file)


def _number(name: str, text: str) -> int:
    try:
        edges = int(float(text)) if text else EDGES
    except ValueError:
        edges = 0
    if edges < 1:
        raise ArgumentError(f"expected a number of edges behind the colon, as in rmat:1e6; found {name!r}")
    return edges


def _read(name: str, rng: np.random.Generator) -> tuple[sp.csr_array, Array]:
    """Return the adjacency and the relations of a real graph."""
    path = _path(FILES[name])
    if not path.is_file():
        raise ArgumentError(
            f"{name} is read from {FILES[name]} in the folder that SPARSETIR_DATA names, where there is none; "
            f"generated graphs need no files: {FAMILIES[0]}"
        )
    if name not in RELATIONAL:
        adjacency = sp.csr_array(sp.load_npz(path)).astype(np.float32)
        return adjacency, rng.integers(0, RELATIONS, adjacency.nnz)
    with np.load(path) as archive:
        (kinds, heads, tails), size = archive["coords"], archive["shape"]
    nodes = int(size[1])
    order = np.lexsort((heads, tails))
    indptr = np.append(0, np.cumsum(np.bincount(tails, minlength=nodes))).astype(np.int32)
    parts = (np.ones(heads.size, np.float32), heads[order].astype(np.int32), indptr)
    return sp.csr_array(parts, shape=(nodes, nodes)), kinds[order].astype(np.int64)


def _undirected(matrix: sp.csr_array) -> sp.csr_array:
    """Edges in both directions, no loops, each once, of weight one."""
    both = sp.csr_array(abs(matrix) + abs(matrix).T)
    both.setdiag(0)
    both.eliminate_zeros()
    both.sort_indices()
    both.data = np.ones(both.nnz, np.float32)
    return both


def _words(name: str) -> Array:
    path = _path(FEATURES[name])
    if not path.is_file():
        raise ArgumentError(f"the features of {name} are read from {FEATURES[name]}, where there are none")
    return np.asarray(sp.csr_array(sp.load_npz(path)).astype(np.float32).toarray())


def _classes(adjacency: sp.csr_array, x: Array, classes: int, rng: np.random.Generator) -> Array:
    """Return what a linear network of `HOPS` steps says, in equal parts as far as possible."""
    near = sp.csr_array(adjacency + sp.eye_array(adjacency.shape[0], dtype=np.float32))
    near = sp.csr_array(sp.diags_array(1 / near.sum(axis=1)) @ near).astype(np.float32)
    scores = x @ rng.standard_normal((x.shape[1], classes), np.float32)
    for _ in range(HOPS):
        scores = near @ scores
    scores -= scores.mean(axis=0)
    scores /= scores.std(axis=0) + 1e-6
    return np.asarray(scores.argmax(axis=1), np.int64)


__all__ = ["FAMILIES", "FILES", "NodeProblem", "available", "load", "usual"]
