# SPDX-License-Identifier: Apache-2.0
"""Operators along edges in a traced program of torch, as calls of graphs.

Layers of graph networks select the rows of nodes by one index, make messages of them, and add them up, or compare them,
at the places of another. What is found here:

=====================================================  =============================================
``zeros.scatter_add(0, i, w * x[j])``, and others       ``spmm``: sum, mean, max, min
``zeros.scatter_add(0, i, messages)``, and others       ``spmm`` over a column for each edge
``exp(s - max(s)[i]) / (sum(exp(..))[i] + epsilon)``    ``softmax``
``a[i] + b[j]``                                         ``edge_sum``
``(q[i] * k[j]).sum(-1)``                               ``sddmm``
``spmm(x, softmax(leaky_relu(edge_sum(a, b) (+ e))))``  ``additive_attention``
``spmm(x, softmax(sddmm(q, k) / c))``                   ``attention``
``spmm(x, softmax((w * leaky_relu(..)).sum(-1)))``      ``dynamic_attention``, of ``a[i] + b[j] (+ e)``
=====================================================  =============================================

The softmax may have dropout; a product may be followed by a bias, and by ``relu``. The structure is not known here: the
calls find or make it by what the indices hold when the program runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

import torch
from sparsetir.interop import torch_graphs
from sparsetir.interop.torch_graphs import SCATTERS, GraphReader, RowGather, keeps_elements
from sparsetir.torch.functions import NAMES
from sparsetir.torch.graph import SEEDS
from sparsetir.torch.tracing import along_edges

SIGNATURES = {
    **torch_graphs.SIGNATURES,
    "div": ("input", "other"),
    "add": ("input", "other", "alpha"),
    "sub": ("input", "other", "alpha"),
    "exp": ("input",),
    "detach": ("input",),
    "sum": ("input", "dim", "keepdim"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like"), ("input",)),
    "zeros": (),
}
ALIASES = {"truediv": "div", "divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub"}
FUSED = ("sum", "mean")  # reductions that a bias and an activation are one kernel with
RELUS = {torch.relu, torch.relu_, functional.relu, functional.relu_, "relu", "relu_"}
ZEROS = ("new_zeros", "zeros", "zeros_like")
# Calls that switch gradients or precision on or off.
SWITCHES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode", "_enter_autocast", "_exit_autocast")
MADE = ("new_zeros", "new_ones", "new_full", "new_empty")
CHANGES = {
    operator.setitem,
    *(getattr(operator, name) for name in "iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor".split()),
}
FUNCTIONS = {
    getattr(module, name): ALIASES.get(name, name)
    for module in (torch, operator)
    for name in (*SIGNATURES, *ALIASES)
    if hasattr(module, name)
}


class FxGraphs(GraphReader):
    """The names of functions and methods in graphs of `torch.compile`."""

    tensor_key, signatures = "example_value", SIGNATURES

    def name(self, node: Any) -> str:
        """Return what a node computes, "" where that is nothing of interest."""
        if not isinstance(node, Node):
            return ""
        if node.op == "call_function":
            return FUNCTIONS.get(node.target, "")
        if node.op != "call_method":
            return ""
        name = str(node.target).removesuffix("_")
        name = ALIASES.get(name, name)
        return name if name in SIGNATURES else ""

    def is_feature(self, node: Any) -> bool:
        """Return whether a node is a tensor of floats that kernels take."""
        tensor = value(node)
        return (
            tensor is not None
            and tensor.dtype in NAMES
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
        )


FX = FxGraphs()
name_of, arguments, value = FX.name, FX.arguments, FX.tensor


def is_in_place(node: Node) -> bool:
    """Return whether a node changes one of its arguments."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    name = str(getattr(node.target, "__name__", ""))
    if node.target in CHANGES or name.endswith("_") or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    return getattr(node.target, "__module__", "") == "torch.nn.functional" and True in node.args[1:]


def is_quiet(first: Node, last: Node) -> bool:
    """Return whether two nodes may run as one.

    Nothing between them is changed in place, but for sums into zeros that were just made, and gradients and precision
    are not switched there.
    """
    node = first.next
    while node is not last and node.op != "root":
        if node.op == "call_function" and getattr(node.target, "__name__", "") in SWITCHES:
            return False
        into = node.args[0] if node.args else None
        if is_in_place(node) and not (name_of(node) in SCATTERS and name_of(into) in ZEROS):
            return False
        node = node.next
    return node is last


def _method(node: Any) -> str:
    """Return the method that a node calls along edges, "" for other nodes."""
    return node.args[4] if isinstance(node, Node) and node.target is along_edges else ""


def _plain_views(node: Any) -> list[Any]:
    """Return a node, and the nodes that it is a view of with the same elements in the same order."""
    views = [node]
    while isinstance(node, Node) and _is_plain_view(node):
        node = node.args[0]
        views.append(node)
    return views


def _is_plain_view(node: Node) -> bool:
    if node.target is functional.dropout:
        return _dropout(node) == 0
    if name_of(node) == "getitem" and value(node.args[0]) is not None:
        return keeps_elements(node.args[1])
    return node.target in ("squeeze", torch.squeeze) or name_of(node) in ("view", "reshape", "unsqueeze")


def _is_relu(node: Any) -> bool:
    """Return whether a node is relu of one tensor, in place or not."""
    if not isinstance(node, Node) or len(node.all_input_nodes) != 1 or "out" in node.kwargs:
        return False
    return node.target in RELUS if node.op == "call_function" else node.op == "call_method" and node.target in RELUS


def _dropout(node: Any) -> float | None:
    """Return the probability with which a node drops elements; None if it is unknown, and for other nodes."""
    if not isinstance(node, Node) or node.target is not functional.dropout or is_in_place(node):
        return None
    options = {**dict(zip(("input", "p", "training"), node.args, strict=False)), **node.kwargs}
    rate, is_training = options.get("p", 0.5), options.get("training", True)
    if rate == 0 or is_training is False:
        return 0.0
    return float(rate) if is_training is True and isinstance(rate, (int, float)) and 0 <= rate <= 1 else None


def _slope(node: Any) -> float | None:
    """Return the slope of a leaky ReLU, None for other nodes."""
    if not isinstance(node, Node) or node.target is not functional.leaky_relu or is_in_place(node):
        return None
    options = {**dict(zip(("input", "negative_slope"), node.args, strict=False)), **node.kwargs}
    slope = options.get("negative_slope", 0.01)
    return float(slope) if isinstance(slope, (int, float)) else None


def _summed(node: Any) -> Any:
    """Return the node whose last axis is summed, None for other nodes."""
    if name_of(node) != "sum":
        return None
    options = arguments(node)
    inner, dim = options["input"], options.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if value(inner) is None or options.get("keepdim") or "dtype" in options:
        return None
    return inner if dim in (-1, value(inner).dim() - 1) else None


def _ordered(pair: Any, is_first: Callable[[Any], Any]) -> Any:
    """Return both operands with the one first that a condition holds for, None twice if it holds for neither."""
    return next((both for both in (pair, pair[::-1]) if is_first(both[0])), (None, None))


def _is_like(node: Any, like: Any) -> bool:
    """Return whether both nodes are tensors of one shape and dtype."""
    tensor, expected = value(node), value(like)
    return tensor is not None and tensor.shape == expected.shape and tensor.dtype is expected.dtype


def _is_plain_add(node: Any) -> bool:
    return name_of(node) == "add" and len(node.args) == 2 and not node.kwargs and not is_in_place(node)


@dataclass(frozen=True)
class _Scores:
    """Scores of attention.

    Parameters
    ----------
    method : str
        The kind of attention.
    chain : list of Node
        The steps that compute them, the last first.
    tensors : sequence of Node
        The operands of the method.
    heads : tuple of int
        The axes of heads.
    first : Node
        After which nothing may be changed in place.
    options : dict
    ends : tuple of RowGather
        Selected rows that may have no other use.
    """

    method: str
    chain: list[Any]
    tensors: Any
    heads: tuple[int, ...]
    first: Node
    options: dict[str, Any]
    ends: tuple[RowGather, ...] = ()


class Messages:
    """The operators along edges of a program, which is changed in place.

    Parameters
    ----------
    module : GraphModule
        As `torch.compile` passes it to its backends.
    """

    def __init__(self, module: GraphModule) -> None:
        self.graph: Graph = module.graph
        self.sources: dict[Node, RowGather] = {}  # by targets, what is summed there

    def replace(self) -> list[str]:
        """Replace the patterns that are found; return the methods that the program calls."""
        self._share_indices()
        for node in self.graph.nodes:
            self._note_sources(node)
        for find in (self._softmax, self._scatter, self._edge_sum, self._sddmm):
            for node in list(self.graph.nodes):
                match = None if node.op == "output" else find(node)
                if match is not None:
                    self._put(node, match)
        for extend in (self._attention, self._bias, self._relu):
            for node in list(self.graph.nodes):
                if _method(node) == "spmm":
                    extend(node)
        return [method for node in self.graph.nodes if (method := _method(node))]

    def left(self) -> list[str]:
        """Return the names of operators that still scatter floats."""
        names = {name_of(n) for n in self.graph.nodes if name_of(n) in SCATTERS and FX.is_feature(n)}
        return sorted(names)

    # ------------------------------------------------------------------ indices and sources

    def _share_indices(self) -> None:
        """Let equal rows of one edge index be one node, unless integers change in place."""
        changed = [n.args[0] for n in self.graph.nodes if is_in_place(n) and n.args]
        if all(value(node) is None or FX.is_feature(node) for node in changed):
            FX.share_rows(self.graph)

    def _note_sources(self, node: Node) -> None:
        if name_of(node) in SCATTERS:
            index, message = FX.edge_index(arguments(node).get("index")), FX.message(arguments(node).get("src"))
            if index is not None and message is not None:
                self.sources.setdefault(index, message)

    # ------------------------------------------------------------------ replacements

    def _scatter(self, node: Node) -> Node | None:
        """Return a product, for rows that are reduced into zeros."""
        scatter = FX.scatter(node)
        index = None if scatter is None else FX.targets(scatter)
        if scatter is None or index is None or not FX.is_feature(scatter.src) or not self._is_zero(scatter.base, node):
            return None
        src, message = scatter.src, FX.message(scatter.src)
        operands = () if message is None else (message.x, message.weight or src)
        with self.graph.inserting_before(node):
            rows = self._rows(scatter.base)
            if rows is None:
                return None
            is_alike = all(value(operand).dtype is value(src).dtype for operand in operands)
            if message is None or not is_alike or not is_quiet(message.at, node):
                return self._call("spmm", index, None, rows, self._length(src), [src, None], reduce=scatter.reduce)
            columns, tensors = self._length(message.x), [message.x, self._weight(message)]
            return self._call("spmm", index, message.index, rows, columns, tensors, reduce=scatter.reduce)

    def _weight(self, message: RowGather) -> Node | None:
        """Return the weight of a message, without the axes of length 1."""
        if message.weight is None or value(message.weight).dim() == 1:
            return message.weight
        for node in _plain_views(message.weight):
            if value(node) is not None and value(node).shape == value(message.weight).shape[:1]:
                return node
        shape = value(message.weight).shape
        if value(message.weight).dim() == 3 and shape[1] != 1:
            return self.graph.call_method("squeeze", (message.weight, -1))
        return self.graph.call_method("reshape", (message.weight, -1))

    def _is_zero(self, base: Node, scatter: Node) -> bool:
        """Return whether a node makes zeros that nothing has changed before they are scattered to."""
        if name_of(base) not in ZEROS:
            return False
        return all(user is scatter or scatter < user for user in base.users)

    def _rows(self, base: Node) -> Any:
        """Return how many rows zeros have; None where that cannot be told."""
        rows = value(base).shape[0]
        if isinstance(rows, int):
            return rows
        if name_of(base) == "zeros_like":
            return self.graph.call_method("size", (base.args[0], 0))
        sizes = base.args[1:] if name_of(base) == "new_zeros" else base.args
        first = sizes[0] if sizes else base.kwargs.get("size")
        if isinstance(first, Node) and isinstance(first.meta.get("example_value"), tuple):
            return self.graph.call_function(operator.getitem, (first, 0))
        return first[0] if isinstance(first, (tuple, list)) else first

    def _length(self, node: Node) -> Any:
        length = value(node).shape[0]
        return length if isinstance(length, int) else self.graph.call_method("size", (node, 0))

    def _softmax(self, node: Node) -> Node | None:
        """Return the softmax of scores over the edges of each target."""
        if name_of(node) != "div" or not all(isinstance(n, Node) for n in node.args) or node.kwargs:
            return None
        power, total = node.args
        scores, top = self._shifted(power)
        total = FX.gather(total)
        if scores is None or top is None or total is None or total.index is not top.index:
            return None
        added = total.x
        if name_of(added) == "add" and isinstance(added.args[1], float) and 0 <= added.args[1] < 1e-6:
            added = added.args[0]
        if not self._is_reduced(added, power, top.index, "sum") or value(scores).dim() not in (1, 2):
            return None
        if not any(self._is_reduced(top.x, s, top.index, "max") for s in (scores, *self._detached(scores))):
            return None
        if not is_quiet(top.x, node):
            return None
        sources = self.sources.get(top.index)
        with self.graph.inserting_before(node):
            rows = self._rows(arguments(added)["input"])
            if sources is None:
                return self._call("softmax", top.index, None, rows, self._length(scores), [scores])
            return self._call("softmax", top.index, sources.index, rows, self._length(sources.x), [scores])

    def _shifted(self, power: Any) -> tuple[Any, Any]:
        """Of an exponential: the scores, and the maxima that are subtracted from them."""
        shifted: Any = power.args[0] if name_of(power) == "exp" and power.args else None
        if name_of(shifted) != "sub" or len(shifted.args) != 2:
            return None, None
        scores, top = shifted.args
        return (scores, FX.gather(top)) if FX.is_feature(scores) else (None, None)

    def _detached(self, scores: Node) -> Iterator[Node]:
        return (user for user in scores.users if name_of(user) == "detach")

    def _is_reduced(self, node: Any, src: Node, index: Node, reduce: str) -> bool:
        """Return whether a node reduces edges at the places of an index into zeros."""
        scatter = FX.scatter(node)
        if scatter is None or scatter.src is not src or scatter.reduce != reduce or FX.targets(scatter) is not index:
            return False
        return self._is_zero(scatter.base, node) and self._rows(scatter.base) is not None

    def _ends(self, one: Any, other: Any) -> tuple[RowGather, RowGather] | None:
        """Return what is selected at targets, and what at sources, of edges along which messages are reduced."""
        pair = FX.gather(one), FX.gather(other)
        for targets, sources in (pair, pair[::-1]):
            if targets is None or sources is None or targets.index not in self.sources:
                continue
            is_like = value(targets.x).shape[1:] == value(sources.x).shape[1:]
            if is_like and self.sources[targets.index].index is sources.index:
                return (targets, sources) if value(targets.x).dtype is value(sources.x).dtype else None
        return None

    def _edge_sum(self, node: Node) -> Node | None:
        """Return the sums of the values of the two ends of edges."""
        ends = self._plain_sum(node)
        return None if ends is None or value(ends[0].x).dim() > 2 else self._along("edge_sum", node, *ends)

    def _sddmm(self, node: Node) -> Node | None:
        """Return the dot products of the values of the two ends of edges."""
        product = _summed(node)
        if name_of(product) != "mul" or len(product.args) != 2:
            return None
        ends = self._ends(*product.args)
        if ends is None or value(product).dim() not in (2, 3):
            return None
        return self._along("sddmm", node, *ends)

    def _attention(self, product: Node) -> None:
        """Replace a product with the softmax of scores that have no other use by attention."""
        x, weight = product.args[5]
        views = _plain_views(weight)
        rate = _dropout(views[-1])
        if rate:
            views += _plain_views(views[-1].all_input_nodes[0])
        softmax = views[-1]
        if _method(softmax) != "softmax" or product.kwargs.get("reduce") != "sum":
            return
        if softmax.args[:2] != product.args[:2]:
            return
        finders = (self._additive, self._dots, self._dynamic)
        scores = next(filter(None, (find(softmax.args[5][0], product) for find in finders)), None)
        if scores is None:
            return
        chain, v = [*views, *scores.chain], value(x)
        is_fit = v.shape[1:-1] == scores.heads and v.dtype is value(scores.tensors[0]).dtype
        is_alone = all(len(node.users) == 1 for node in chain)
        if not is_fit or v.dim() != len(scores.heads) + 2 or not is_alone or not is_quiet(scores.first, product):
            return
        with self.graph.inserting_before(product):
            tensors, options = self._operands(scores, x), scores.options
            if rate:
                tensors.append(self.graph.call_function(torch.randint, (SEEDS, (1,))))
                options = {**options, "dropout": rate}
            new = self._call(scores.method, *product.args[:4], tensors, **options)
        new.meta["example_value"] = product.meta["example_value"]
        product.replace_all_uses_with(new)
        for node in (product, *chain):
            self.graph.erase_node(node)
        for end in scores.ends:
            if not end.at.users:
                self._drop(end.at)

    def _bias(self, product: Node) -> None:
        """Fuse the addition of a row into the product before it."""
        user: Any = next(iter(product.users), None)
        if len(product.users) != 1 or not _is_plain_add(user) or product.kwargs.get("reduce") not in FUSED:
            return
        bias, row = next((other for other in user.args if other is not product), None), value(product)
        if value(bias) is None or row.dim() < 2 or value(bias).shape != row.shape[1:]:
            return
        if value(bias).dtype is row.dtype and len(product.args[5]) == 2 and is_quiet(product, user):
            self._fuse(product, user, user, [*product.args[5], bias], {})

    def _relu(self, product: Node) -> None:
        """Fuse a relu into the product before it."""
        user: Any = next(iter(product.users), None)
        is_fit = len(product.users) == 1 and _is_relu(user) and product.kwargs.get("reduce") in FUSED
        if is_fit and is_quiet(product, user):
            self._fuse(product, user, product, product.args[5], {"activation": "relu"})

    def _fuse(self, product: Node, last: Any, at: Node, tensors: Any, options: dict[str, Any]) -> None:
        """Replace a product and the node that follows it by one call."""
        with self.graph.inserting_before(at):
            new = self._call("spmm", *product.args[:4], tensors, **{**product.kwargs, **options})
        new.meta["example_value"] = last.meta["example_value"]
        last.replace_all_uses_with(new)
        self.graph.erase_node(last)
        self.graph.erase_node(product)

    def _operands(self, scores: _Scores, x: Node) -> list[Any]:
        """Return the tensors that attention takes, `x` among them."""
        if scores.method == "attention":
            return [*scores.tensors, x]
        if scores.method == "additive_attention":
            targets, sources, *edges = scores.tensors
            return [targets, sources, x, *edges]
        targets, sources, weight, edges = scores.tensors
        weight = self.graph.call_method("squeeze", (weight, 0)) if value(weight).shape[0] == 1 else weight
        return [targets, sources, weight, x, edges]

    def _additive(self, scores: Any, product: Node) -> _Scores | None:
        """Rectified sums of a number of each end, and perhaps of one of the edge."""
        slope = _slope(scores)
        sums: Any = scores.args[0] if slope is not None else None
        chain, edges = [scores, sums], []
        if _is_plain_add(sums):
            inside, edge_values = _ordered(sums.args, lambda node: _method(node) == "edge_sum")
            if not _is_like(edge_values, sums):
                return None
            sums, edges = inside, [edge_values]
            chain.append(inside)
        if _method(sums) != "edge_sum" or sums.args[:2] != product.args[:2]:
            return None
        tensors = [*sums.args[5], *edges]
        heads = value(tensors[0]).shape[1:]
        return _Scores("additive_attention", chain, tensors, heads, sums, {"scale": slope})

    def _dots(self, scores: Any, product: Node) -> _Scores | None:
        """Dot products of both ends, perhaps times a number."""
        chain, factor = [scores], 1.0
        if name_of(scores) in ("mul", "div") and len(scores.args) == 2 and not scores.kwargs:
            first, number = scores.args
            if name_of(scores) == "mul" and isinstance(number, Node):
                first, number = number, first
            if not isinstance(number, (int, float)) or not number or is_in_place(scores):
                return None
            factor = float(number) if name_of(scores) == "mul" else 1 / number
            chain.append(first)
        dots: Any = chain[-1]
        if _method(dots) != "sddmm" or dots.args[:2] != product.args[:2]:
            return None
        tensors = dots.args[5]
        *heads, features = value(tensors[0]).shape[1:]
        is_usual = isinstance(features, int) and math.isclose(factor, max(features, 1) ** -0.5)
        options = {"scale": None if is_usual else factor}
        return _Scores("attention", chain, tensors, torch.Size(heads), dots, options)

    def _dynamic(self, scores: Any, product: Node) -> _Scores | None:
        """Return a weight times rectified sums of features of both ends, and perhaps of features of the edge."""
        weighed = _summed(scores)
        if name_of(weighed) != "mul" or len(weighed.args) != 2 or weighed.kwargs or is_in_place(weighed):
            return None
        rectified, weight = _ordered(weighed.args, lambda node: _slope(node) is not None)
        slope, shape = _slope(rectified), value(rectified)
        if slope is None or shape is None or value(weight) is None:
            return None
        inner = shape.shape[1:]
        if value(weight).shape not in (inner, (1, *inner)) or value(weight).dtype is not shape.dtype:
            return None
        chain = [scores, weighed, rectified, rectified.args[0]]
        ends = self._plain_sum(chain[-1])
        edges = None
        if ends is None and _is_plain_add(chain[-1]):
            inside, edges = _ordered(chain[-1].args, self._plain_sum)
            ends = self._plain_sum(inside)
            chain.append(inside)
        if ends is None or (ends[0].index, ends[1].index) != product.args[:2] or len(inner) not in (1, 2):
            return None
        if edges is not None and not _is_like(edges, rectified):
            return None
        tensors, first = [ends[0].x, ends[1].x, weight, edges], min(ends[0].at, ends[1].at)
        options = {"scale": slope}
        return _Scores("dynamic_attention", chain, tensors, inner[:-1], first, options, ends)

    def _plain_sum(self, node: Any) -> tuple[RowGather, RowGather] | None:
        """Return what is selected at targets and sources, of their sum."""
        return self._ends(*node.args) if _is_plain_add(node) else None

    def _along(self, method: str, node: Node, targets: RowGather, sources: RowGather) -> Node | None:
        if not is_quiet(min(targets.at, sources.at), node):
            return None
        with self.graph.inserting_before(node):
            sizes = self._length(targets.x), self._length(sources.x)
            return self._call(method, targets.index, sources.index, *sizes, [targets.x, sources.x])

    def _call(self, method: str, *where: Any, **options: Any) -> Node:
        *structure, tensors = where
        return self.graph.call_function(along_edges, (*structure, method, tensors), options)

    # ------------------------------------------------------------------ the program

    def _put(self, node: Node, new: Node) -> None:
        """Replace a node by another, and erase the nodes that are no longer used."""
        new.meta["example_value"] = node.meta["example_value"]
        if is_in_place(node):
            node.args[0].replace_all_uses_with(new, lambda user: user is not node)
        node.replace_all_uses_with(new)
        self._drop(node)

    def _drop(self, node: Node) -> None:
        """Erase a node that nothing uses, and then its inputs; methods in place stay, but for replaced ones."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            inputs = node.all_input_nodes
            self.graph.erase_node(node)
            for before in inputs:
                self._keep_no_rows(before)
            waiting += [before for before in inputs if before not in waiting and self._is_dead(before)]

    def _is_dead(self, node: Node) -> bool:
        if node.users or not name_of(node):
            return False
        return not is_in_place(node) or (name_of(node) in SCATTERS and len(node.args[0].users) == 1)

    def _keep_no_rows(self, rows: Node) -> None:
        """Let nodes that only need the dtype of selected rows use the tensor that these are selected from."""
        selection = FX.gather(rows)
        for user in list(rows.users) if selection is not None else ():
            if name_of(user) in MADE and user.args and user.args[0] is rows and user.args[1:]:
                user.replace_input_with(rows, selection.x)  # type: ignore[union-attr]


__all__ = ["Messages", "value"]
