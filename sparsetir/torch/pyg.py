# SPDX-License-Identifier: Apache-2.0
"""Message passing of torch_geometric on kernels of this package.

Layers there select the rows of nodes for every edge, make messages of them, and scatter these. Here a selection is only
noted (noted.py); where a message is no more than that, or that times a weight of its edge, scattering it is a product
with the graph, and where the weight is the softmax of scores as in GAT, attention. Whatever else is done with it is
done with the rows, as before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsetir.harness.optional import require
from sparsetir.torch import layers, relational
from sparsetir.torch.functions import NAMES
from sparsetir.torch.noted import PLAIN, Rows, note, recipe, values
from sparsetir.torch.recent import Contents, Graphs, Recent

REDUCTIONS = {"sum", "add", "mean", "max", "amax", "min", "amin"}


# ------------------------------------------------------------------ what takes the places of functions


def _selecting(original: Callable[..., Any], graphs: Graphs) -> Callable[..., Any]:
    """``MessagePassing._index_select`` that only notes what is selected."""

    @wraps(original)
    def select(self: Any, src: Any, index: Tensor) -> Any:
        is_usual = type(src) in PLAIN and src.dtype in NAMES and src.is_cpu and src.dim() > 0
        if torch.compiler.is_compiling() or not is_usual or self.node_dim not in (0, -src.dim()) or index.dim() != 1:
            return original(self, src, index)
        if not graphs.is_worth(index, src.shape[1:].numel()):
            return original(self, src, index)
        whole, is_target = index._base, None
        if whole is not None and whole.dim() == 2 and whole.shape[0] == 2 and whole.is_contiguous():
            row = (index.storage_offset() - whole.storage_offset()) // max(whole.shape[1], 1)
            is_target = row == (1 if self.flow == "source_to_target" else 0)
        return note(Rows(index, is_target, graphs), src)

    return select


def _scattering(original: Callable[..., Any]) -> Callable[..., Any]:
    """``scatter`` that is a product for what was only selected."""

    @wraps(original)
    def scatter(src: Any, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Any:
        how, size = recipe(src), None if dim_size is None else int(dim_size)
        rows = getattr(how, "rows", how)
        if how is None or not isinstance(rows, Rows) or size is None or reduce not in REDUCTIONS:
            return original(values(src), index, dim, dim_size, reduce)
        if dim not in (0, -src.dim()) or index.shape != rows.index.shape:
            return original(values(src), index, dim, dim_size, reduce)
        graph = rows.graphs.of(index, rows.index, size, src.tensors[0].shape[0])
        found = how.reduced(graph, src.tensors, reduce)
        return original(values(src), index, dim, dim_size, reduce) if found is None else found

    return scatter


def _normalizing(original: Callable[..., Any], graphs: Graphs) -> Callable[..., Any]:
    """``softmax`` of values of edges, where their targets are known."""

    @wraps(original)
    def softmax(src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: int = 0) -> Any:
        graph = None
        if isinstance(index, Tensor) and num_nodes is not None and not torch.compiler.is_compiling():
            graph = graphs.at_targets(index, int(num_nodes))
        if graph is None or dim != 0 or src.dim() not in (1, 2) or src.dtype not in NAMES:
            return original(values(src), index, ptr, num_nodes, dim)
        how = recipe(src)
        found = None if how is None else how.shares(src.tensors, graph)
        return graph.softmax(values(src)) if found is None else found

    return softmax


def _remembering(original: Callable[..., Any], graphs: Graphs) -> Callable[..., Any]:
    """A function of tensors that gives for the same ones, or for equal ones, what it gave before."""
    recent, contents = Recent(), Contents()

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        edges = args[0] if args else None
        if type(edges) is Tensor and not torch.compiler.is_compiling() and not graphs.is_worth(edges, uses=0):
            result = original(*args, **kwargs)
            if type(result) is tuple and type(result[0]) is Tensor:
                graphs.share_count(edges, result[0])
            return result
        given = pytree.tree_leaves((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        if not tensors or not all(map(_is_constant, tensors)) or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        rest = tuple("tensor" if isinstance(value, Tensor) else str(value) for value in given)
        options = (rest, len(args), tuple(kwargs), torch.is_grad_enabled())
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


_lock = threading.Lock()
_active: list[Patch] = []  # one for each time that one was entered
_undo: list[tuple[Any, str, Any]] = []


class Patch:
    """What `patch_pyg` returns: it keeps the graphs that it met, and can be entered again."""

    def __init__(self) -> None:
        self._graphs = Graphs()
        self._ours: dict[Any, Any] = {}

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
        """Put our functions in the places of torch_geometric's."""
        from torch_geometric.nn import GCNConv, RGCNConv, SAGEConv
        from torch_geometric.nn.aggr import base
        from torch_geometric.nn.conv.message_passing import MessagePassing

        ours = self._ours = self._ours or _replacements(self._graphs)
        _put(MessagePassing, "_index_select", ours[MessagePassing._index_select])
        _put(base, "scatter", ours[base.scatter])
        for layer in (GCNConv, RGCNConv, SAGEConv):
            _put(layer, "forward", ours[layer.forward])
        for name, module in list(sys.modules.items()):
            if not name.startswith("torch_geometric.nn.conv."):
                continue
            for attribute, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in ours:
                    _put(module, attribute, ours[value])


def _replacements(graphs: Graphs) -> dict[Any, Any]:
    """Our functions by torch_geometric's."""
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
        RGCNConv.forward: relational.replaced(RGCNConv.forward, graphs, _remembering(relational.Pairs.of, graphs)),
        GCNConv.forward: layers.gcn(GCNConv.forward, graphs, remembered[gcn_conv.gcn_norm]),
        SAGEConv.forward: layers.sage(SAGEConv.forward, graphs),
        utils.softmax: _normalizing(utils.softmax, graphs),
        **remembered,
    }


def patch_pyg() -> Patch:
    """Run message passing of torch_geometric on kernels of this package, forward and backward.

    Inside, messages that are what the sources of edges have, or that times a weight of each edge (of each head), are
    added, averaged or compared without being made: those of GCNConv, SAGEConv, GATConv, GINConv, RGCNConv and many more
    layers, your own among them. A softmax over edges is one kernel. Other messages and other steps are as before.
    Structures are kept for later passes, as are the normalised edges of GCNConv and edges with loops, which are
    made anew only for other tensors or after a change in place.

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


__all__ = ["Patch", "patch_pyg"]
