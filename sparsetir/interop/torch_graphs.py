# SPDX-License-Identifier: Apache-2.0
"""Patterns of message passing in graphs that torch traced: rows gathered by one index, and reduced by another.

=====================================================  ===============================================
``x[i]``, ``x.index_select(0, i)``                     `gather`
``x[i]``, ``w * x[i]``                                 `message`: a weight for each edge, or edge and head
``i[:, None].expand(-1, f)``, ``i.view(-1, 1)``        `edge_index`: ``i``
``base.scatter_add(0, i, src)``, and others            `scatter`, and `targets` where it reduces whole rows
=====================================================  ===============================================

`torch.compile` passes graphs of Python functions and methods, `torch.export` graphs of aten operators. A subclass of
`GraphReader` names their nodes, and the patterns are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCATTERS = ("scatter_add", "scatter_reduce", "index_add", "index_reduce")
REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}
EXPANSIONS = ("expand", "expand_as", "broadcast_to")
VIEWS = ("view", "reshape", "unsqueeze", "getitem", *EXPANSIONS)
# The names of arguments, by the name of an operator.
SIGNATURES = {
    "index_select": ("input", "dim", "index"),
    "getitem": ("input", "index"),
    "select": ("input", "dim", "index"),
    "scatter_add": ("input", "dim", "index", "src"),
    "scatter_reduce": ("input", "dim", "index", "src", "reduce", "include_self"),
    "index_add": ("input", "dim", "index", "src", "alpha"),
    "index_reduce": ("input", "dim", "index", "src", "reduce", "include_self"),
    "mul": ("input", "other"),
    **dict.fromkeys(set(VIEWS) - {"getitem"}, ("input",)),
}


@dataclass(frozen=True)
class RowGather:
    """Rows of `x`, one for each edge, perhaps times a weight; `at` is the node that selects them."""

    x: Any
    index: Any
    at: Any
    weight: Any = None


@dataclass(frozen=True)
class RowScatter:
    """A reduction of `src` into `base` along the first dimension: "sum", "mean", "max" or "min".

    `is_elementwise` tells whether each element has an index, not each row.
    """

    base: Any
    index: Any
    src: Any
    reduce: str
    is_elementwise: bool


def keeps_elements(index: Any) -> bool:
    """Return whether ``x[index]`` is a view of all elements of `x` in their order."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)


class GraphReader(ABC):
    """The patterns in graphs of one kind, by the names of their operators."""

    tensor_key: str  # of a node's `meta`: its symbolic tensor
    signatures: Mapping[str, tuple[str, ...]] = SIGNATURES

    @abstractmethod
    def name(self, node: Any) -> str:
        """Return the operator of a node, "" for one without a signature."""

    def arguments(self, node: Any) -> dict[str, Any]:
        """Return the arguments of a node by their names."""
        return {**dict(zip(self.signatures[self.name(node)], node.args, strict=False)), **node.kwargs}

    def tensor(self, node: Any) -> Any:
        """Return the symbolic tensor that a node is, None where it is something else."""
        example = getattr(node, "meta", {}).get(self.tensor_key)
        return example if hasattr(example, "dim") else None

    def is_feature(self, node: Any) -> bool:
        """Return whether a node is a tensor whose rows may be gathered."""
        return self.tensor(node) is not None

    def is_index(self, node: Any) -> bool:
        """Return whether a node is a vector of integers; a mask is not."""
        tensor = self.tensor(node)
        return tensor is not None and tensor.dim() == 1 and str(tensor.dtype) in ("torch.int64", "torch.int32")

    def is_first(self, dim: Any, node: Any) -> bool:
        """Return whether a dimension is the first one of a tensor."""
        return isinstance(dim, int) and dim in (0, -self.tensor(node).dim())

    def gather(self, node: Any) -> RowGather | None:
        """Return the rows that a node selects by one index, None for any other node."""
        name = self.name(node)
        if name not in ("index_select", "getitem"):
            return None
        options = self.arguments(node)
        x, index = options["input"], options.get("index")
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        if not self.is_feature(x) or not self.is_index(index) or self.tensor(x).dim() == 0:
            return None
        return RowGather(x, index, node) if name == "getitem" or self.is_first(options.get("dim"), x) else None

    def message(self, node: Any) -> RowGather | None:
        """Return gathered rows, or such times a number for each edge, or for each edge and head; else None."""
        if self.name(node) != "mul":
            return self.gather(node)
        for factor, weight in (node.args, node.args[::-1]) if len(node.args) == 2 else ():
            rows = self.gather(factor)
            if rows is None or not self.is_feature(weight) or self.tensor(node).dtype is not self.tensor(factor).dtype:
                continue
            shape, inner = self.tensor(weight).shape, self.tensor(factor).shape
            if len(shape) != len(inner) or shape[0] != inner[0]:
                continue
            is_by_heads = len(inner) == 3 and shape[1] == inner[1] and shape[2] == 1
            if is_by_heads or len(inner) == 1 or all(n == 1 for n in shape[1:]):
                return RowGather(rows.x, rows.index, rows.at, weight)
        return None

    def edge_index(self, node: Any) -> Any:
        """Return the vector that an index of the shape of messages repeats; None if a row has several indices."""
        whole = self.tensor(node)
        while (repeated := self._repeated(node)) is not None:
            node = repeated
        is_whole = whole is not None and self.is_index(node) and self.tensor(node).shape[0] == whole.shape[0]
        return node if is_whole else None

    def _repeated(self, node: Any) -> Any:
        """Return a tensor with one element a row that a node repeats along its other dimensions, or None."""
        name, view = self.name(node), self.tensor(node)
        if name not in VIEWS or view is None or view.dim() < 2:
            return None
        options = self.arguments(node)
        source = self.tensor(options["input"])
        if source is None or source.dim() == 0 or source.shape[0] != view.shape[0]:
            return None
        if name == "getitem" and not keeps_elements(options["index"]):
            return None
        # An expansion adds dimensions in front: each row holds the whole vector then.
        is_by_rows = name not in EXPANSIONS or source.dim() == view.dim()
        return options["input"] if is_by_rows and all(n == 1 for n in source.shape[1:]) else None

    def scatter(self, node: Any) -> RowScatter | None:
        """Return the reduction along the first dimension that a node is, without what was in the base; else None."""
        name = self.name(node)
        if name not in SCATTERS:
            return None
        options = self.arguments(node)
        base, reduce = options["input"], REDUCTIONS.get(options.get("reduce", "sum"))
        includes_base = reduce != "sum" and options.get("include_self", True)
        if reduce is None or includes_base or options.get("alpha", 1) != 1:
            return None
        if self.tensor(base) is None or not self.is_first(options.get("dim"), base):
            return None
        return RowScatter(base, options.get("index"), options.get("src"), reduce, name.startswith("scatter"))

    def targets(self, scatter: RowScatter) -> Any:
        """Return the vector of targets of a scatter of whole rows, None where elements of a row are treated apart."""
        index, src, base = self.edge_index(scatter.index), self.tensor(scatter.src), self.tensor(scatter.base)
        if index is None or src is None or src.dim() == 0 or src.shape[1:] != base.shape[1:]:
            return None
        shape = self.tensor(scatter.index).shape
        is_whole = shape == src.shape if scatter.is_elementwise else shape[0] == src.shape[0]
        return index if is_whole else None

    def share_rows(self, graph: Any) -> None:
        """Merge nodes that select the same row of an edge index."""
        first: dict[Any, Any] = {}
        for node in list(graph.nodes):
            options = self.arguments(node) if self.name(node) in ("getitem", "select") else {}
            if isinstance(options.get("index"), int) and self.is_index(node):
                original = first.setdefault(tuple(sorted(options.items())), node)
                if original is not node:
                    node.replace_all_uses_with(original)
                    graph.erase_node(node)


__all__ = ["SCATTERS", "SIGNATURES", "GraphReader", "RowGather", "RowScatter", "keeps_elements"]
