# SPDX-License-Identifier: Apache-2.0
"""`patch_pyg`: message passing of torch_geometric on kernels of this package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

from torch.utils import _pytree as pytree

import torch
from sparsetir.torch.deferred_edges import PLAIN, GatheredRows, note, recipe, values
from sparsetir.torch.functions import NAMES
from sparsetir.torch.graph import Graph
from sparsetir.torch.graph_caches import Contents, GraphCache, Recent
from sparsetir.utils.caches import ForkLock
from sparsetir.utils.packages import require
from torch import Tensor

# Layers of torch_geometric that are one product with a weight: GCNConv and SAGEConv.
#
# As `Graph.conv` they sum rows of the narrower kind, and sums of constant features only once. A layer that does
# anything else, or that something looks into, is run as it is.


PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
HOOKS = [f"_{step}_forward{when}_hooks" for step in ("propagate", "message", "aggregate") for when in ("_pre", "")]
STEPS = {"propagate", "message", "aggregate", "update"}  # that one layer may have of its own
INNER = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_usual(layer: Any, kind: Any, reductions: tuple[str, ...], edge_index: Any, *nodes: Any) -> bool:
    """Return whether a layer of torch_geometric is unmodified, and its operands are plain floats and edges."""
    if torch.compiler.is_compiling() or type(layer) is not kind or layer.explain:
        return False
    if any(getattr(layer, name) for name in HOOKS) or not STEPS.isdisjoint(vars(layer)):
        return False
    if layer.flow != "source_to_target" or not isinstance(layer.aggr, str) or layer.aggr not in reductions:
        return False
    if not all(type(x) in PLAIN_TENSORS and x.dim() == 2 and x.dtype in NAMES and x.is_cpu for x in nodes):
        return False
    if len({x.dtype for x in nodes}) != 1 or torch.is_autocast_enabled("cpu"):
        return False
    is_index = type(edge_index) is Tensor and edge_index.dtype is torch.int64 and edge_index.is_cpu
    return bool(is_index and edge_index.dim() == 2 and edge_index.shape[0] == 2)


def _is_plain(linear: Any, x: Tensor) -> bool:
    """Return whether a linear layer is unmodified, and has the dtype of its inputs."""
    from torch_geometric.nn.dense import Linear

    if type(linear) is not Linear or any(getattr(linear, name) for name in INNER) or "forward" in vars(linear):
        return False
    return type(linear.weight) is torch.nn.Parameter and linear.weight.dtype is x.dtype


def _plus(out: Tensor, linear: Any, x: Tensor) -> Tensor:
    """Add a linear layer of `x` to a result that nothing else refers to; in place where the layer is unmodified."""
    if _is_plain(linear, x) and linear.bias is None:
        return out.addmm_(x, linear.weight.t())
    return out + linear(x)


def _is_worth(graphs: GraphCache, edges: Any, features: int) -> bool:
    """Return whether edges are worth a graph; traced edges and those of other classes are checked later."""
    return torch.compiler.is_compiling() or type(edges) is not Tensor or graphs.is_worth(edges, features)


def gcn(original: Callable[..., Any], graphs: GraphCache, norm: Callable[..., Any]) -> Callable[..., Any]:
    """``GCNConv.forward`` by `Graph.conv`, where it does nothing else."""

    @wraps(original)
    def forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
        if self._cached_edge_index is None and not _is_worth(graphs, edge_index, self.out_channels):
            return graphs.run_plainly(original, self, x, edge_index, edge_weight)
        from torch_geometric.nn import GCNConv

        weights = () if edge_weight is None else (edge_weight,)
        is_fit = is_usual(self, GCNConv, ("sum", "add", "mean"), edge_index, x) and _is_plain(self.lin, x)
        if not is_fit or not all(type(w) in PLAIN_TENSORS and w.dim() == 1 and w.dtype is x.dtype for w in weights):
            return original(self, x, edge_index, edge_weight)
        nodes = x.shape[0]
        if self.normalize:
            cached = self._cached_edge_index
            if cached is None:
                options = (self.improved, self.add_self_loops, self.flow, x.dtype)
                cached = norm(edge_index, edge_weight, nodes, *options)
                if self.cached:
                    self._cached_edge_index = cached
            edge_index, edge_weight = cached
        graph = graphs.of_both(edge_index, (1, 0), nodes, nodes).weighted(edge_weight)
        return graph.conv(x, self.lin.weight, self.bias, self.aggr)

    return forward


def sage(original: Callable[..., Any], graphs: GraphCache) -> Callable[..., Any]:
    """``SAGEConv.forward`` by `Graph.conv`, where it does nothing else."""

    @wraps(original)
    def forward(self: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
        features = x.shape[-1] if isinstance(x, Tensor) else x[0].shape[-1]
        if not _is_worth(graphs, edge_index, features):
            return graphs.run_plainly(original, self, x, edge_index, size)
        from torch_geometric.nn import SAGEConv

        sources, targets = x if isinstance(x, tuple) and len(x) == 2 else (x, x)
        is_fit = is_usual(self, SAGEConv, ("sum", "add", "mean", "max", "min"), edge_index, sources, targets)
        is_fit = is_fit and size is None and not self.project and _is_plain(self.lin_l, sources)
        if not is_fit:
            return original(self, x, edge_index, size)
        graph = graphs.of_both(edge_index, (1, 0), targets.shape[0], sources.shape[0])
        out = graph.conv(sources, self.lin_l.weight, self.lin_l.bias, self.aggr)
        out = _plus(out, self.lin_r, targets) if self.root_weight else out
        return torch.nn.functional.normalize(out, p=2.0, dim=-1) if self.normalize else out

    return forward


# The layer of relational graph networks, over the pairs of relation and target that exist.
#
# RGCNConv reduces the messages of one relation after the other at all nodes, and multiplies all of these by the
# weight of that relation. Most nodes have no edge of most relations: here only the pairs that have one are reduced,
# by one product, multiplied, and added up at their targets by another.


RELATIONAL_REDUCTIONS = ("sum", "add", "mean", "max", "min")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a relation and a target, by relations.

    Parameters
    ----------
    into : Graph
        From the sources of edges to their pairs.
    sums : Graph
        From pairs to targets.
    counts : list of int
        How many pairs each relation has.
    """

    into: Graph
    sums: Graph
    counts: list[int]

    @classmethod
    def of(cls, edge_index: Tensor, relation: Tensor, relations: int, sources: int, targets: int) -> Pairs:
        """Return the pairs of relation and target of edges with a relation each."""
        pairs, at = torch.unique(relation * targets + edge_index[1], return_inverse=True)
        into = Graph(torch.stack([edge_index[0], at.to(edge_index.dtype)]), (sources, pairs.numel()))
        ends = torch.stack([torch.arange(pairs.numel()), pairs % max(targets, 1)])
        counts = torch.bincount(pairs // max(targets, 1), minlength=relations)
        return cls(into, Graph(ends, (pairs.numel(), targets)), counts.tolist())

    def product(self, x: Tensor, weight: Tensor, reduce: str) -> Tensor:
        """Compute ``sum_r reduce_r(x) W_r``; weights of blocks are [relations, blocks, inputs, outputs]."""
        parts = self.into.spmm(x, None, reduce).split(self.counts)
        return self.sums.spmm(torch.cat([_times(part, w) for part, w in zip(parts, weight, strict=True)]))


def _times(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return x @ weight
    blocks = x.view(x.shape[0], *weight.shape[:2])
    return torch.einsum("abc,bcd->abd", blocks, weight).flatten(1)


def replaced(original: Callable[..., Any], graphs: GraphCache, pairs_of: Callable[..., Pairs]) -> Callable[..., Any]:
    """Return an ``RGCNConv.forward`` over pairs, for layers that do nothing else."""

    @wraps(original)
    def forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
        sources, targets = x if isinstance(x, tuple) else (x, x)
        if not _is_worth(graphs, edge_index, self.out_channels):
            return graphs.run_plainly(original, self, x, edge_index, edge_type)
        if not _is_fit(self, sources, targets, edge_index, edge_type):
            return original(self, x, edge_index, edge_type)
        weight = self.weight
        if self.num_bases is not None:
            weight = (self.comp @ weight.flatten(1)).view(self.num_relations, *weight.shape[1:])
        sizes = (self.num_relations, sources.shape[0], targets.shape[0])
        out = pairs_of(edge_index, edge_type, *sizes).product(sources, weight, self.aggr)
        out = out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))  # as the layer adds into such zeros
        out = out if self.root is None else out + targets @ self.root
        return out if self.bias is None else out + self.bias

    return forward


def _is_fit(layer: Any, sources: Any, targets: Any, edge_index: Any, edge_type: Any) -> bool:
    """Return whether nothing but the layer itself is to be run, over edges that have one of its relations each."""
    from torch_geometric import typing
    from torch_geometric.nn import RGCNConv

    if typing.WITH_SEGMM or not is_usual(layer, RGCNConv, RELATIONAL_REDUCTIONS, edge_index, sources, targets):
        return False
    if sources.dtype is not layer.weight.dtype or type(edge_type) is not Tensor or edge_type.dtype is not torch.int64:
        return False
    if not edge_type.is_cpu or edge_type.shape != edge_index.shape[1:]:
        return False
    return _are_below(edge_type, layer.num_relations) and _are_below(edge_index[1], targets.shape[0])


def _are_below(numbers: Tensor, count: int) -> bool:
    """Return whether all relations, or all targets, are in range; the layer reports errors of others."""
    return not numbers.numel() or (int(numbers.min()) >= 0 and int(numbers.max()) < count)


# Message passing of torch_geometric on kernels of this package.
#
# Layers there select the rows of nodes for every edge, make messages of them, and scatter these. Here a selection is
# only recorded (deferred_edges.py). Where a message is no more than that, or that times a weight of its edge,
# scattering it is a product with the graph, and where the weight is the softmax of scores as in GAT, attention.
# Everything else is computed from the rows, as before.


REDUCTIONS = {"sum", "add", "mean", "max", "amax", "min", "amin"}


# ------------------------------------------------------------------ replacements of functions


def _selecting(original: Callable[..., Any], graphs: GraphCache) -> Callable[..., Any]:
    """Return a ``MessagePassing._index_select`` that only records the selection."""

    @wraps(original)
    def select(self: Any, src: Any, index: Tensor) -> Any:
        if graphs.local.is_plain:
            return original(self, src, index)
        is_usual = type(src) in PLAIN and src.dtype in NAMES and src.is_cpu and src.dim() > 0
        if torch.compiler.is_compiling() or not is_usual or self.node_dim not in (0, -src.dim()) or index.dim() != 1:
            return original(self, src, index)
        if not graphs.is_worth(index, src.shape[1:].numel()):
            return original(self, src, index)
        whole, is_target = index._base, None
        if whole is not None and whole.dim() == 2 and whole.shape[0] == 2 and whole.is_contiguous():
            row = (index.storage_offset() - whole.storage_offset()) // max(whole.shape[1], 1)
            is_target = row == (1 if self.flow == "source_to_target" else 0)
        return note(GatheredRows(index, is_target, graphs), src)

    return select


def _scattering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``scatter`` that computes a product from rows that were only selected."""

    @wraps(original)
    def scatter(src: Any, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Any:
        if type(src) is Tensor:
            return original(src, index, dim, dim_size, reduce)
        source, size = recipe(src), None if dim_size is None else int(dim_size)
        rows = getattr(source, "rows", source)
        if source is None or not isinstance(rows, GatheredRows) or size is None or reduce not in REDUCTIONS:
            return original(values(src), index, dim, dim_size, reduce)
        if dim not in (0, -src.dim()) or index.shape != rows.index.shape:
            return original(values(src), index, dim, dim_size, reduce)
        graph = rows.graphs.of(index, rows.index, size, src.tensors[0].shape[0])
        reduced = source.reduced(graph, src.tensors, reduce)
        return original(values(src), index, dim, dim_size, reduce) if reduced is None else reduced

    return scatter


def _normalizing(original: Callable[..., Any], graphs: GraphCache) -> Callable[..., Any]:
    """Return a ``softmax`` over the edges of each target, for targets of a graph that was seen."""

    @wraps(original)
    def softmax(src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: int = 0) -> Any:
        graph = None
        if isinstance(index, Tensor) and num_nodes is not None and not torch.compiler.is_compiling():
            graph = graphs.at_targets(index, int(num_nodes))
        if graph is None or dim != 0 or src.dim() not in (1, 2) or src.dtype not in NAMES:
            return original(values(src), index, ptr, num_nodes, dim)
        source = recipe(src)
        shares = None if source is None else source.shares(src.tensors, graph)
        return graph.softmax(values(src)) if shares is None else shares

    return softmax


def _remembering(original: Callable[..., Any], graphs: GraphCache) -> Callable[..., Any]:
    """Memoize a function of tensors, by their identity and by their contents."""
    recent, contents = Recent(), Contents()

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        edges = args[0] if args else None
        if type(edges) is Tensor and not torch.compiler.is_compiling() and not graphs.is_worth(edges, uses=0):
            result = original(*args, **kwargs)
            if type(result) is tuple and type(result[0]) is Tensor:
                graphs.share_count(edges, result[0])
            return result
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [value for value in leaves if isinstance(value, Tensor)]
        if not tensors or not all(map(_is_constant, tensors)) or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        kinds = tuple("tensor" if isinstance(value, Tensor) else str(value) for value in leaves)
        options = (kinds, len(args), tuple(kwargs), torch.is_grad_enabled())
        key = (tuple(map(id, tensors)), options)
        entry = recent.get(key)
        if entry is not None and _is_as_kept(*entry[1:]):
            return entry[0]
        content = contents.key(tensors, options)
        entry = None if content is None else contents.get(content)
        is_new = entry is None or not _is_as_kept(*entry[1:])
        result = original(*args, **kwargs) if entry is None or is_new else entry[0]
        parts = [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]
        # The tensors themselves are kept, so that no other has their identity.
        owners = [*tensors, *parts]
        if any(t.is_inference() or t.requires_grad for t in owners):
            return result
        recent.put(key, (result, owners, [t._version for t in owners]), max(t.numel() for t in owners))
        if is_new and content is not None:
            contents.put(content, (result, parts, [t._version for t in parts]))
        return result

    return call


def _is_as_kept(tensors: list[Tensor], versions: list[int]) -> bool:
    """Return whether nothing changed tensors in place since their versions were read."""
    return [t._version for t in tensors] == versions


def _is_constant(tensor: Tensor) -> bool:
    return not tensor.requires_grad and not tensor.is_inference() and type(tensor) is Tensor


_lock = ForkLock()
_active: list[Patch] = []  # one for each time that one was entered
_undo: list[tuple[Any, str, Any]] = []


class Patch:
    """What `patch_pyg` returns: it keeps the graphs that it met, and can be entered again."""

    def __init__(self) -> None:
        self._graphs = GraphCache()
        self._ours: dict[Any, Any] = {}
        # Where modules of layers have functions that are replaced, and how many modules there were when they were read.
        self._places: list[tuple[ModuleType, str, Any]] = []
        self._module_count = 0

    def __enter__(self) -> None:
        with _lock:
            if not _active:
                self._replace()
            _active.append(self)

    def __exit__(self, *_error: object) -> None:
        with _lock:
            _active.pop()
            if not _active:
                _restore()

    def _replace(self) -> None:
        """Replace functions of torch_geometric by those of this package."""
        from torch_geometric.nn import GCNConv, RGCNConv, SAGEConv
        from torch_geometric.nn.aggr import base
        from torch_geometric.nn.conv.message_passing import MessagePassing

        replacements = self._ours = self._ours or _replacements(self._graphs)
        _put(MessagePassing, "_index_select", replacements[MessagePassing._index_select])
        _put(base, "scatter", replacements[base.scatter])
        for layer in (GCNConv, RGCNConv, SAGEConv):
            _put(layer, "forward", replacements[layer.forward])
        if self._module_count != len(sys.modules):
            self._places, self._module_count = _places_of(replacements), len(sys.modules)
        for module, attribute, value in self._places:
            if vars(module).get(attribute) is value:
                _put(module, attribute, replacements[value])


def _places_of(functions: Collection[Any]) -> list[tuple[ModuleType, str, Any]]:
    """Return where the modules of torch_geometric's layers have one of these functions."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("torch_geometric.nn.conv.")]
    return [
        (module, attribute, value)
        for module in modules
        for attribute, value in list(vars(module).items())
        if isinstance(value, FunctionType) and value in functions
    ]


def _replacements(graphs: GraphCache) -> dict[Any, Any]:
    """Return the replacement of each function of torch_geometric."""
    from torch_geometric import utils
    from torch_geometric.nn import GCNConv, RGCNConv, SAGEConv
    from torch_geometric.nn.aggr import base
    from torch_geometric.nn.conv import gcn_conv
    from torch_geometric.nn.conv.message_passing import MessagePassing

    functions = (gcn_conv.gcn_norm, utils.remove_self_loops, utils.add_self_loops)
    remembered = {function: _remembering(function, graphs) for function in functions}
    return {
        MessagePassing._index_select: _selecting(MessagePassing._index_select, graphs),
        base.scatter: _scattering(base.scatter),
        RGCNConv.forward: replaced(RGCNConv.forward, graphs, _remembering(Pairs.of, graphs)),
        GCNConv.forward: gcn(GCNConv.forward, graphs, remembered[gcn_conv.gcn_norm]),
        SAGEConv.forward: sage(SAGEConv.forward, graphs),
        utils.softmax: _normalizing(utils.softmax, graphs),
        **remembered,
    }


def patch_pyg() -> Patch:
    """Run message passing of torch_geometric on kernels of this package, forward and backward.

    Inside, messages that are features of the sources, or these times a weight of each edge (of each head), are added,
    averaged or compared without being materialized: those of GCNConv, SAGEConv, GATConv, GINConv, RGCNConv and many
    more layers, your own among them. A softmax over edges is one kernel. Other messages and other steps are as before.
    Structures are kept for later passes, as are the normalised edges of GCNConv and edges with loops, which are
    made again only for other tensors or after a change in place.

    It holds for all threads; a pass that begins inside may end outside.

    Returns
    -------
    context manager
        It may be entered many times, and keeps the structures as long as it lives.

    Raises
    ------
    MissingPackageError
        torch_geometric is not installed.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> from torch_geometric.nn import SAGEConv
    >>> layer, edge_index = SAGEConv(3, 2), torch.tensor([[0, 1, 2], [1, 1, 0]])
    >>> with sparsetir.torch.patch_pyg():
    ...     layer(torch.ones(3, 3), edge_index).sum().backward()
    """
    require("torch_geometric", extra="pyg", purpose="patch_pyg")
    return Patch()


def _put(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _restore() -> None:
    while _undo:
        owner, name, value = _undo.pop()
        setattr(owner, name, value)


__all__ = ["HOOKS", "PLAIN_TENSORS", "Pairs", "Patch", "gcn", "is_usual", "patch_pyg", "replaced", "sage"]
