# SPDX-License-Identifier: Apache-2.0
"""Graphs to train on, and networks over products that are passed in: of our graphs, torch's, and torch_geometric.

Parameters have the names and shapes of those of torch_geometric, so that all networks begin alike.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from torch.nn.functional import linear

import torch
from sparsetir.errors import ArgumentError
from sparsetir.torch import Graph, patch_pyg
from sparsetir.workloads import suite
from torch import Tensor, nn

# Graphs to train on: real ones where there is a folder of them, or generated.


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
        raise ArgumentError(f"expected a graph, one of {names}, got {name!r}")
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
        raise ArgumentError(f"expected a number of edges behind the colon, as in rmat:1e6, got {name!r}")
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


# Networks, whose products are passed in.


Product = Callable[[Tensor], Tensor]  # sums, means or maxima of what the sources of each node have
Inputs: TypeAlias = Tensor | Product  # features of nodes; sparse ones as the product with them


@dataclass(frozen=True)
class Neighbours:
    """Sums, means or maxima of what the sources of each node of a graph have."""

    graph: Graph
    reduce: str = "sum"

    def __call__(self, x: Tensor) -> Tensor:
        return self.graph.spmm(x, reduce=self.reduce)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return these rows of x, times ``weight.T``, and a bias."""
        return self.graph.conv(x, weight, bias, self.reduce)


def times(x: Inputs, weight: Tensor) -> Tensor:
    """``x @ weight.T``."""
    return linear(x, weight) if isinstance(x, Tensor) else x(weight.t())


class GCN(nn.Module):
    """``A (x W) + b``, A the adjacency with loops, normalised by the degrees of both ends.

    Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Inputs, product: Product) -> Tensor:
        if isinstance(product, Neighbours) and isinstance(x, Tensor):
            return product.conv(x, self.lin.weight, self.bias)
        return product(times(x, self.lin.weight)) + self.bias


class SAGE(nn.Module):
    """``reduce(x) W_l + x W_r + b``, the mean or the maximum of neighbours.

    Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(inputs, outputs)
        self.lin_r = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Inputs, product: Product) -> Tensor:
        if isinstance(product, Neighbours) and isinstance(x, Tensor):
            return product.conv(x, self.lin_l.weight, self.lin_l.bias).addmm_(x, self.lin_r.weight.t())
        if isinstance(x, Tensor):
            return self.lin_l(product(x)).addmm_(x, self.lin_r.weight.t())
        return product(times(x, self.lin_l.weight)) + self.lin_l.bias + times(x, self.lin_r.weight)  # of means only


class GAT(nn.Module):
    """Attention with scores ``leaky_relu(a_dst . h_i + a_src . h_j)``, h = x W; the heads one after the other.

    Velickovic et al., "Graph Attention Networks", ICLR 2018.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin = nn.Linear(inputs, heads * outputs, bias=False)
        self.att_src = nn.Parameter(torch.zeros(1, heads, outputs))
        self.att_dst = nn.Parameter(torch.zeros(1, heads, outputs))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x: Inputs, graph: Graph) -> Tensor:
        h = times(x, self.lin.weight).unflatten(1, (self.heads, -1))
        targets, sources = self.ends(x, h)
        return graph.additive_attention(targets, sources, h).flatten(1) + self.bias

    def ends(self, x: Inputs, h: Tensor) -> Iterator[Tensor]:
        """Return ``a . h`` for the targets and for the sources, as ``x (W a)`` where h has no fewer features than x."""
        if not isinstance(x, Tensor) or self.lin.in_features > self.lin.out_features:
            return ((h * weight).sum(-1) for weight in (self.att_dst, self.att_src))
        weight = self.lin.weight.unflatten(0, (self.heads, -1))
        return (linear(x, (weight * a.movedim(0, -1)).sum(1)) for a in (self.att_dst, self.att_src))


class GATv2(nn.Module):
    """Attention with scores ``a . leaky_relu(W_r x_i + W_l x_j)``; the heads one after the other.

    Brody, Alon and Yahav, "How Attentive are Graph Attention Networks?", ICLR 2022.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin_l = nn.Linear(inputs, heads * outputs)
        self.lin_r = nn.Linear(inputs, heads * outputs)
        self.att = nn.Parameter(torch.zeros(1, heads, outputs))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        sources, targets = (lin(x).unflatten(1, (self.heads, -1)) for lin in (self.lin_l, self.lin_r))
        return graph.dynamic_attention(targets, sources, self.att[0], sources).flatten(1) + self.bias


class RGCN(nn.Module):
    """``sum_r mean_r(x) W_r + x W_0 + b``, the means over the neighbours by edges of each relation.

    Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", ESWC 2018.
    """

    def __init__(self, inputs: int, outputs: int, relations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(relations, inputs, outputs))
        self.root = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, means: Product, sums: Product, counts: list[int]) -> Tensor:
        """`means` gives one row for each node and relation that meet, by relations; `sums` adds those of a node."""
        parts = means(x).split(counts)
        messages = torch.cat([part @ weight for part, weight in zip(parts, self.weight, strict=True)])
        return linear(x, self.root.t(), self.bias) + sums(messages)


class Network(nn.Module):
    """Two layers of a kind, with a ReLU between them (ELU for GAT)."""

    def __init__(self, first: nn.Module, second: nn.Module, *structure: Any, is_elu: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([first, second])
        self.structure, self.is_elu = structure, is_elu

    def forward(self, x: Inputs) -> Tensor:
        first, second = self.layers
        inner = first(x, *self.structure)
        return second(nn.functional.elu(inner) if self.is_elu else inner.relu_(), *self.structure)


def initialise(network: nn.Module, seed: int) -> None:
    """Draw all parameters, those of one name alike for every network; biases are zero."""
    for name, parameter in sorted(network.named_parameters()):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            bound = (6 / (parameter.shape[-2] + parameter.shape[-1])) ** 0.5
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


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
            raise ArgumentError(f"expected a network such as gcn:16 or gat:8x8, of {', '.join(KINDS)}, got {text!r}")
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


__all__ = [
    "BACKENDS",
    "FAMILIES",
    "FILES",
    "GAT",
    "GCN",
    "KINDS",
    "OURS",
    "RGCN",
    "SAGE",
    "WAYS",
    "Contender",
    "GATv2",
    "Neighbours",
    "Network",
    "NodeProblem",
    "Spec",
    "available",
    "initialise",
    "load",
    "make",
    "usual",
    "ways",
]
