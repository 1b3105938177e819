# SPDX-License-Identifier: Apache-2.0
"""Message passing along edge indices that are arguments: each index of targets is sorted to row pointers by counting.

before::

    aten.scatter_add(zeros, 0, expand(targets), weight * index_select(x, 0, sources))

after::

    indptr, _, order = R.sparse.transpose(arange(edges + 1), targets, rows)
    R.sparse.spmm(take(weight, order), indptr, take(sources, order), x)

Messages that are no such product are permuted into the order of their targets, and reduced as segments. In the program
that torch exported, both cases appear as calls of `sum_edges` and `reduce_edges`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tvm import relax

from sparsetir.relax import calls
from sparsetir.relax.lowered import product, same_size
from sparsetir.relax.operators import reshape
from sparsetir.relax.structure import checked

Converter = Callable[[Any, Any], Any]


def sum_edges(x: Any, sources: Any, weight: Any, targets: Any, zeros: Any) -> Any:
    """Sum rows of `x`, each times the weight of its edge if there is one, by target: the semantics in torch."""
    rows = x.index_select(0, sources)
    return zeros.index_add(0, targets, rows if weight is None else rows * weight[:, None])


def reduce_edges(messages: Any, sources: Any, targets: Any, zeros: Any, reduce: str) -> Any:
    """Reduce messages, or the rows of them that `sources` selects, by target: the semantics in torch."""
    rows = messages if sources is None else messages.index_select(0, sources)
    if reduce == "sum":
        return zeros.index_add(0, targets, rows)
    reduction = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    return zeros.index_reduce(0, targets, rows, reduction, include_self=False)


# ------------------------------------------------------------------ in the exported program


def shape_of(node: Any) -> Any:
    """Return the shape of a node that is a tensor, None for any other."""
    return getattr(getattr(node, "meta", {}).get("val"), "shape", None)


def share_selects(graph: Any) -> None:
    """Merge nodes that select the same row of an edge index."""
    select = importlib.import_module("torch").ops.aten.select.int
    first: dict[Any, Any] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is select and not node.meta["val"].is_floating_point():
            original = first.setdefault(node.args, node)
            if original is not node:
                node.replace_all_uses_with(original)
                graph.erase_node(node)


def targets_of(index: Any) -> Any:
    """Return the vector of targets that was expanded to the shape of the messages; None if targets differ in a row."""
    aten = importlib.import_module("torch").ops.aten
    views = (aten.view.default, aten.unsqueeze.default, aten.expand.default)
    whole = shape_of(index)
    while index.target in views and len(shape_of(index)) > 1:
        inner = shape_of(index.args[0])
        if not inner or inner[0] != whole[0] or any(n != 1 for n in inner[1:]):
            return None
        index = index.args[0]
    return index if len(shape_of(index)) == 1 and shape_of(index)[0] == whole[0] else None


def is_zeros(node: Any) -> bool:
    """Return whether a node makes zeros, of a size that may be known only at run time."""
    aten = importlib.import_module("torch").ops.aten
    return node.target is aten.full.default and node.args[1] == 0


def as_call(graph: Any, scatter: Any, reduce: str) -> Any:
    """Return a call that reduces the messages of a scatter, or None where the elements of a row have several targets.

    Parameters
    ----------
    graph : torch.fx.Graph
        The call is inserted at the graph's insertion point.
    scatter : torch.fx.Node
        Scatters floats into zeros along the first dimension.
    reduce : {"sum", "mean", "max", "min"}
    """
    aten = importlib.import_module("torch").ops.aten
    zeros, index, src = scattered(scatter)
    targets = targets_of(index)
    if targets is None or tuple(shape_of(src)[1:]) != tuple(shape_of(zeros)[1:]) or shape_of(src)[0] == 0:
        return None
    if shape_of(src)[0] != shape_of(targets)[0]:
        return None
    weight, rows = _weighted(src, aten)
    selection = selected(rows)
    if reduce == "sum" and selection is not None and len(shape_of(rows)) == 2:
        weight = None if weight is None else graph.call_function(aten.view.default, (weight, [-1]))
        return graph.call_function(sum_edges, (*selection, weight, targets, zeros))
    messages, sources = selected(src) or (src, None)
    return graph.call_function(reduce_edges, (messages, sources, targets, zeros, reduce))


def _weighted(src: Any, aten: Any) -> tuple[Any, Any]:
    """Return the weight of each edge, [edges, 1], or None, and the rows."""
    if src.target is aten.mul.Tensor:
        for weight, rows in (src.args, src.args[::-1]):
            shape = shape_of(weight)
            if shape is not None and len(shape) == 2 and shape[1] == 1 and selected(rows) is not None:
                return weight, rows
    return None, src


def selected(node: Any) -> tuple[Any, Any] | None:
    """Return the source and index of a row selection, ``x[i]`` or ``x.index_select(0, i)``; None for other nodes."""
    aten, target = importlib.import_module("torch").ops.aten, getattr(node, "target", None)
    if target is aten.index_select.default and node.args[1] in (0, -len(shape_of(node.args[0]))):
        return node.args[0], node.args[2]
    places: Any = node.args[1] if target is aten.index.Tensor else ()
    return (node.args[0], places[0]) if len(places) == 1 and _is_index(places[0]) else None


def scattered(node: Any) -> tuple[Any, Any, Any]:
    """Return the destination, the index and the source of a scatter along the first dimension."""
    if _is_put(node):
        return node.args[0], node.args[1][0], node.args[2]
    return node.args[0], node.args[2], node.args[3]


def is_by_rows(node: Any) -> bool:
    """Return whether a node reduces whole rows along the first dimension by one index, which has one target per row."""
    is_reduced = node.target is importlib.import_module("torch").ops.aten.index_reduce.default
    return _is_put(node) or (is_reduced and node.args[1] in (0, -len(shape_of(node.args[0]))))


def _is_put(node: Any) -> bool:
    """Return whether a node adds up rows by one index, as ``x.index_add(0, i, rows)`` is exported."""
    aten = importlib.import_module("torch").ops.aten
    if node.target is not aten.index_put.default or len(node.args) < 4 or not node.args[3]:
        return False
    places = node.args[1]
    return len(places) == 1 and _is_index(places[0]) and len(shape_of(node.args[2])) == len(shape_of(node.args[0]))


def _is_index(node: Any) -> bool:
    """Return whether a node is a vector of integers; a mask is not."""
    value = getattr(node, "meta", {}).get("val")
    return value is not None and len(shape_of(node)) == 1 and str(value.dtype) in ("torch.int64", "torch.int32")


# ------------------------------------------------------------------ in Relax


def converters() -> dict[str, Converter]:
    """Return the converters of the calls by name; each index of targets is sorted once."""
    structures: dict[Any, list[tuple[Any, tuple[Any, Any]]]] = {}

    def structure(importer: Any, targets: Any, zeros: Any) -> tuple[Any, Any]:
        rows = zeros.ty.shape.values[0]
        transposed = structures.setdefault(targets, [])
        for size, parts in transposed:
            if same_size(size, rows):
                return parts
        emit, dtype = importer.block_builder.emit, str(targets.ty.dtype.dtype)
        starts = emit(relax.op.arange(0, targets.ty.shape.values[0] + 1, 1, dtype))
        both = emit(calls.transpose(starts, targets, rows))
        transposed.append((rows, (emit(relax.TupleGetItem(both, 0)), emit(relax.TupleGetItem(both, 2)))))
        return transposed[-1][1]

    def convert_sum(node: Any, importer: Any) -> Any:
        x, sources, weight, targets, zeros = importer.retrieve_args(node)
        emit = importer.block_builder.emit
        indptr, order = structure(importer, targets, zeros)
        one = relax.const(1, str(x.ty.dtype.dtype))
        data = relax.op.full([targets.ty.shape.values[0]], one) if weight is None else _taken(weight, order)
        return emit(calls.spmm(emit(data), indptr, emit(_ordered(sources, order)), x))

    def convert_reduce(node: Any, importer: Any) -> Any:
        messages, sources, targets, zeros, reduce = importer.retrieve_args(node)
        emit = importer.block_builder.emit
        indptr, order = structure(importer, targets, zeros)
        places = order if sources is None else emit(_ordered(sources, order))
        if sources is not None:
            bounds = {"indices": (places, messages.ty.shape.values[0])}
            indptr = checked(importer.block_builder, f"segment_{reduce}", indptr, bounds, None)
        rows, shape = emit(_taken(messages, places)), list(zeros.ty.shape.values)
        if len(shape) > 2:
            rows = emit(reshape(rows, [rows.ty.shape.values[0], product(rows.ty.shape.values[1:])]))
        reduced = emit(calls.segment_reduce(rows, indptr, reduce))
        return emit(reshape(reduced, shape)) if len(shape) > 2 else reduced

    return {"sum_edges": convert_sum, "reduce_edges": convert_reduce}


def _taken(rows: Any, places: Any) -> Any:
    """Select rows by an index that was validated; in every other mode TVM warns."""
    return relax.op.take(rows, places, 0, mode="clip")


def _ordered(sources: Any, order: Any) -> Any:
    """Permute sources into the order of targets, and cast them to the index dtype of the structure."""
    permuted, dtype = _taken(sources, order), str(order.ty.dtype.dtype)
    return permuted if str(sources.ty.dtype.dtype) == dtype else relax.op.astype(permuted, dtype)


__all__ = [
    "as_call",
    "converters",
    "is_by_rows",
    "is_zeros",
    "reduce_edges",
    "scattered",
    "selected",
    "share_selects",
    "sum_edges",
]
