# SPDX-License-Identifier: Apache-2.0
"""The same network in several ways: with our graphs, torch's sparse matrices, and torch_geometric."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from shutil import which
from typing import Any

import numpy as np
import scipy.sparse as sp

import torch
from sparsetir.bench.training.networks import GAT, GCN, RGCN, SAGE, GATv2, Inputs, Neighbours, Network
from sparsetir.bench.training.problems import NodeProblem
from sparsetir.errors import ArgumentError
from sparsetir.torch import Graph, patch_pyg
from torch import nn

KINDS = ("gcn", "sage-mean", "sage-max", "gat", "gatv2", "rgcn")
HEADED = ("gat", "gatv2")
OURS, TORCH, INDEX, EDGE_INDEX, PATCHED = "ours", "torch CSR", "PyG edge_index", "PyG EdgeIndex", "PyG patched"
FIRST, SPARSE = ("gcn", "sage-mean", "gat"), 0.1  # the kinds whose layers can begin with a product of features
COMPILED, INDUCTOR = "PyG torch.compile sparsetir", "PyG torch.compile inductor"
NETWORKS = 100  # that one process may compile; torch gives up after a few
BACKENDS = {COMPILED: "sparsetir", INDUCTOR: "inductor"}
WAYS = (OURS, TORCH, INDEX, EDGE_INDEX, PATCHED, COMPILED, INDUCTOR)


@dataclass(frozen=True)
class Spec:
    """A network of two layers.

    Parameters
    ----------
    kind : str
        Of `KINDS`.
    hidden : int
        Features between the layers, for GAT and GATv2 of each head.
    heads : int
        Of the first layer of GAT and GATv2; the second has one.
    """

    kind: str
    hidden: int
    heads: int = 1

    @classmethod
    def parse(cls, text: str) -> Spec:
        """``gcn:16``, ``sage-mean:128``, ``gat:8x8`` (heads, features).

        Raises
        ------
        ArgumentError
            Another kind, or sizes that are none.
        """
        kind, _, sizes = text.partition(":")
        heads, _, hidden = (sizes or ("8x8" if kind in HEADED else "16")).rpartition("x")
        if (
            kind not in KINDS
            or not hidden.isdecimal()
            or not (heads or "1").isdecimal()
            or (heads and kind not in HEADED)
        ):
            raise ArgumentError(f"expected a network such as gcn:16 or gat:8x8, of {', '.join(KINDS)}; found {text!r}")
        return cls(kind, int(hidden), int(heads or 1))

    def __str__(self) -> str:
        return f"{self.kind}:{self.heads}x{self.hidden}" if self.kind in HEADED else f"{self.kind}:{self.hidden}"


@dataclass(frozen=True)
class Contender:
    """A network, the features of nodes as it takes them, and what its passes run in."""

    network: nn.Module
    x: Inputs
    context: AbstractContextManager[None] = field(default_factory=nullcontext)


def ways(kind: str) -> list[str]:
    """Return the ways in which a network can be trained.

    torch has no attention with sparse matrices, and its own compiler needs one of C++.
    """
    available = [way for way in WAYS if way != TORCH or kind not in HEADED]
    if not has_compiler():
        available.remove(INDUCTOR)
    return [way for way in available if not way.startswith("PyG") or find_spec("torch_geometric")]


def has_compiler() -> bool:
    """Return whether there is a compiler of C++."""
    return any(which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name)


def make(way: str, spec: Spec, problem: NodeProblem) -> Contender:
    """Return a network on a graph."""
    if way in (OURS, TORCH):
        structure = _graph if way == OURS else _matrix
        return Contender(_by_products(spec, problem, structure), _inputs(spec, problem, structure))
    network = _by_layers(spec, problem, is_cached=way == EDGE_INDEX)
    if way not in BACKENDS:
        return Contender(network, problem.x, patch_pyg() if way == PATCHED else nullcontext())
    network.compile(backend=BACKENDS[way])
    # Where layers add loops, torch divides programs unless told otherwise, which its own compiler does not survive.
    options = {"recompile_limit": NETWORKS, "capture_dynamic_output_shape_ops": way == COMPILED}
    return Contender(network, problem.x, importlib.import_module("torch._dynamo.config").patch(**options))


# ------------------------------------------------------------------ over products

Structure = Callable[[sp.csr_array, str], Callable[[Any], Any]]


def _graph(matrix: sp.csr_array, reduce: str) -> Callable[[Any], Any]:
    graph = Graph(matrix)
    return Neighbours(graph if reduce == "sum" else graph.weighted(None), reduce)


def _matrix(matrix: sp.csr_array, reduce: str) -> Callable[[Any], Any]:
    if reduce == "mean":
        counts = np.maximum(np.diff(matrix.indptr), 1)
        matrix = sp.csr_array(
            (np.repeat(1 / counts, np.diff(matrix.indptr)), matrix.indices, matrix.indptr), matrix.shape
        )
    parts = (torch.from_numpy(part) for part in (matrix.indptr, matrix.indices, matrix.data.astype(np.float32)))
    tensor = torch.sparse_csr_tensor(*parts, size=matrix.shape, check_invariants=False)
    if reduce != "max":
        return lambda x: tensor @ x
    return lambda x: torch.sparse.mm(tensor, x, "amax")


def _inputs(spec: Spec, problem: NodeProblem, structure: Structure) -> Inputs:
    """Features of which few are not zero as a sparse matrix, where a layer multiplies them with a weight first."""
    if spec.kind not in FIRST or torch.count_nonzero(problem.x) > SPARSE * problem.x.numel():
        return problem.x
    return structure(sp.csr_array(problem.x.numpy()), "sum")


def _by_products(spec: Spec, problem: NodeProblem, structure: Structure) -> Network:
    kind, sizes = spec.kind, (problem.x.shape[1], spec.hidden, problem.classes)
    if kind == "gcn":
        product = structure(normalised(problem.adjacency), "sum")
        return Network(*_two(GCN, sizes), product)
    if kind.startswith("sage"):
        return Network(*_two(SAGE, sizes), structure(problem.adjacency, kind.removeprefix("sage-")))
    if kind in HEADED:
        layer = GAT if kind == "gat" else GATv2
        first, second = (layer(a, b, heads) for a, b, heads in _heads(spec, sizes))
        return Network(first, second, Graph(with_loops(problem.adjacency)).weighted(None), is_elu=True)
    means, sums, counts = by_relation(problem)
    layers = (RGCN(a, b, problem.num_relations) for a, b in pairwise(sizes))
    return Network(*layers, structure(means, "mean"), structure(sums, "sum"), counts)


def _two(layer: Any, sizes: tuple[int, int, int]) -> Any:
    return (layer(a, b) for a, b in pairwise(sizes))


def _heads(spec: Spec, sizes: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return inputs, outputs of a head, and heads."""
    return (sizes[0], spec.hidden, spec.heads), (spec.heads * spec.hidden, sizes[2], 1)


def with_loops(adjacency: sp.csr_array) -> sp.csr_array:
    """Return the graph with a loop at each node, of weight one."""
    return sp.csr_array(adjacency + sp.eye_array(adjacency.shape[0], dtype=np.float32))


def normalised(adjacency: sp.csr_array) -> sp.csr_array:
    """``D^-1/2 (A + I) D^-1/2``."""
    loops = with_loops(adjacency)
    root = sp.diags_array(1 / np.sqrt(loops.sum(axis=1)))
    return sp.csr_array(root @ loops @ root).astype(np.float32)


def by_relation(problem: NodeProblem) -> tuple[sp.csr_array, sp.csr_array, list[int]]:
    """Two matrices: to the pairs of relation and target that there are, and from them to the targets.

    The third are the numbers of pairs of each relation.
    """
    nodes = problem.adjacency.shape[0]
    targets, sources = problem.adjacency.tocoo().coords
    pairs, at = np.unique(problem.relations * nodes + targets, return_inverse=True)
    ones = np.ones(at.size, np.float32)
    into = sp.csr_array(sp.coo_array((ones, (at, sources)), shape=(pairs.size, nodes)))
    sums = sp.csr_array((np.ones(pairs.size, np.float32), (pairs % nodes, np.arange(pairs.size))), (nodes, pairs.size))
    counts = np.bincount(pairs // nodes, minlength=problem.num_relations)
    return into, sums, counts.tolist()


# ------------------------------------------------------------------ torch_geometric


def _by_layers(spec: Spec, problem: NodeProblem, *, is_cached: bool) -> Network:
    from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, RGCNConv, SAGEConv

    index: Any = problem.edge_index
    if is_cached:
        index = _edge_index(index, problem.x.shape[0])
    kind, sizes = spec.kind, (problem.x.shape[1], spec.hidden, problem.classes)
    if kind == "gcn":
        return Network(*(GCNConv(*pair, cached=True) for pair in pairwise(sizes)), index)
    if kind.startswith("sage"):
        reduce = kind.removeprefix("sage-")
        return Network(*(SAGEConv(*pair, aggr=reduce) for pair in pairwise(sizes)), index)
    if kind in HEADED:
        layer = GATConv if kind == "gat" else GATv2Conv
        layers = (layer(a, b, heads) for a, b, heads in _heads(spec, sizes))
        return Network(*layers, index, is_elu=True)
    layers = (RGCNConv(*pair, problem.num_relations) for pair in pairwise(sizes))
    return Network(*layers, index, torch.from_numpy(problem.relations))


def _edge_index(index: Any, nodes: int) -> Any:
    """With what it caches filled in."""
    from torch_geometric import EdgeIndex

    edge_index = EdgeIndex(index, sparse_size=(nodes, nodes), sort_order="col")
    edge_index.validate()
    return edge_index.fill_cache_()


__all__ = ["BACKENDS", "KINDS", "OURS", "WAYS", "Contender", "Spec", "make", "ways"]
