# SPDX-License-Identifier: Apache-2.0
"""Message passing as graph networks in torch write it, rewritten to sparse operators, with constant or given indices.

A layer selects the rows of nodes with one index, and reduces them by another (``scatter_add``, ``scatter_reduce``).
Where both indices are constants, a sum is a product with a sparse matrix. Messages that are computed otherwise are
permuted into the order of their targets and reduced as segments. What depends on constant indices only, such as the
degrees of nodes, is folded here. Indices that are arguments are sorted to row pointers by counting.

Message passing along edge indices that are arguments: each index of targets is sorted to row pointers by counting.

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

import numpy as np
import scipy.sparse as sp
from tvm import relax

from sparsetir.errors import LoweringError
from sparsetir.relax import calls
from sparsetir.relax.epilogues import product, same_size
from sparsetir.relax.operators import reshape
from sparsetir.relax.structures import checked

QUANTIZED = "quantized_decomposed"
REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


def with_sparse_products(program: Any) -> None:
    """Rewrite a decomposed exported program in place."""
    constants = Constants(program)
    constants.fold()
    _propagate_shapes(program)
    _settle_sizes(program.graph)
    _refuse_masks(program, constants)
    share_selects(program.graph)
    for node in list(program.graph.nodes):
        scatter = ScatterReduction.of(node, constants)
        if scatter is not None:
            scatter.replace()
    program.graph.eliminate_dead_code()
    constants.drop_unused()


def _refuse_masks(program: Any, constants: Constants) -> None:
    """Raise if rows are selected by a mask that is known only at run time, since the result's size is unknown."""
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target) == "aten.nonzero.default" and node not in constants.known:
            fault = f"{node.name} asks where a mask is true, so that its size is known only when the model is called"
            advice = 'layers that go by the degrees of nodes do, such as MFConv; pass static=["edge_index"]'
            alternative = 'or leave the model to torch: torch.compile(model, backend="sparsetir")'
            raise LoweringError(f"{fault}: {advice}, {alternative}")
        is_index = node.op == "call_function" and str(node.target) == "aten.index.Tensor"
        for index in node.args[1] if is_index and node not in constants.known else ():
            if index is not None and str(index.meta["val"].dtype) == "torch.bool":
                fault = f"{node.name} selects by a mask, so that its size is known only when the model is called"
                advice = 'layers that add loops do; pass static=["edge_index"], or add_self_loops=False to them'
                raise LoweringError(f"{fault}: {advice}")


def _propagate_shapes(program: Any) -> None:
    """Propagate the shapes of all values again: shapes that depended on constants are known after folding."""
    placeholders = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    mode = importlib.import_module("torch._guards").detect_fake_mode(placeholders)
    if mode is None:
        return
    tensor = importlib.import_module("torch").Tensor
    inputs = [mode.from_tensor(v, static_shapes=True) if type(v) is tensor else v for v in placeholders]
    passes = importlib.import_module("torch.fx.passes.fake_tensor_prop")
    passes.FakeTensorProp(program.graph_module, mode).propagate_dont_convert_inputs(*inputs)


def _settle_sizes(graph: Any) -> None:
    """Replace sizes that are known by numbers, and remove the assertions about them."""
    torch = importlib.import_module("torch")
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        is_size = node.target is torch.ops.aten.sym_size.int
        if is_size and isinstance(size := shape_of(node.args[0])[node.args[1]], int):
            _put_number(node, size)
        elif not node.all_input_nodes and getattr(node.target, "__module__", "") in ("_operator", "math"):
            _put_number(node, node.target(*node.args))
        elif not node.all_input_nodes and str(node.target).split(".")[-2:-1] == ["_assert_scalar"]:
            graph.erase_node(node)
        elif str(node.target).startswith("aten.sym_constrain_range") and not node.all_input_nodes:
            graph.erase_node(node)


def _put_number(node: Any, number: Any) -> None:
    map_arg = importlib.import_module("torch").fx.node.map_arg
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda n: number if n is node else n)
    node.graph.erase_node(node)


class Constants:
    """The known values of a program: constants, and values computed from them."""

    def __init__(self, program: Any) -> None:
        self.torch = importlib.import_module("torch")
        self.program, self.graph = program, program.graph
        self.known: dict[Any, Any] = {}
        self.from_index: set[Any] = set()
        self.made: list[str] = []

    def fold(self) -> None:
        """Fold values computed from constant indices, and replace them by constants where other nodes use them."""
        constants = self._held()
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and node.target in constants:
                value = self.known[node] = constants[node.target]
                if not value.is_floating_point() and not value.is_complex():
                    self.from_index.add(node)
            elif node.op == "call_function" and self._is_computable(node):
                self._compute(node)
        for node in list(self.graph.nodes):
            if node in self.from_index and node.op != "placeholder":
                self._settle(node)
        for node in list(self.graph.nodes):
            if node.target is self.torch.ops.aten.index.Tensor and node not in self.known:
                self._number(node)

    def _number(self, node: Any) -> None:
        """Replace a selection by a known mask with a selection by row numbers."""
        mask = self.known.get(node.args[1][0]) if len(node.args[1]) == 1 else None
        if mask is None or mask.dtype != self.torch.bool or mask.dim() == 0:
            return
        base, aten = node.args[0], self.torch.ops.aten
        if mask.dim() > 1:
            shape = [mask.numel(), *base.meta["val"].shape[mask.dim() :]]
            with self.graph.inserting_before(node):
                base = self.graph.call_function(aten.reshape.default, (base, shape))
        node.target = aten.index_select.default
        node.args = base, 0, self.constant(mask.flatten().nonzero().flatten())

    def _held(self) -> dict[str, Any]:
        """Return the constant tensors, by the names of their placeholders."""
        values = {**dict(self.program.named_buffers()), **self.program.constants}
        constants = {}
        for spec in self.program.graph_signature.input_specs:
            value = values.get(spec.target) if spec.target is not None else None
            if isinstance(value, self.torch.Tensor):
                constants[spec.arg.name] = value
        return constants

    def _is_computable(self, node: Any) -> bool:
        tags = getattr(node.target, "tags", ())
        if getattr(node.target, "namespace", "") == QUANTIZED:
            return False  # The integers of a weight are recognized before the product.
        if self.torch.Tag.nondeterministic_seeded in tags or not all(n in self.known for n in node.all_input_nodes):
            return False
        sizes = [value for value in _leaves((node.args, node.kwargs)) if isinstance(value, self.torch.SymInt)]
        return not sizes

    def _compute(self, node: Any) -> None:
        args, kwargs = self.torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        with self.torch.no_grad():
            value = node.target(*args, **kwargs)
        if isinstance(value, self.torch.Tensor) and value.layout != self.torch.strided:
            return
        self.known[node] = value
        if any(n in self.from_index for n in node.all_input_nodes):
            self.from_index.add(node)

    def _settle(self, node: Any) -> None:
        """Replace a node by its value in all users that are not folded themselves."""
        outside = [user for user in node.users if user not in self.from_index]
        value = self.known[node]
        if not outside and (node.users or isinstance(value, self.torch.Tensor)):
            return
        if isinstance(value, self.torch.Tensor):
            new = self.constant(value)
            for user in outside:
                user.replace_input_with(node, new)
        elif isinstance(value, (int, float, bool)):
            for user in outside:
                user.args, user.kwargs = self.torch.fx.node.map_arg(
                    (user.args, user.kwargs), lambda n: value if n is node else n
                )
        elif value is None and not node.users:  # An assertion that holds.
            self.graph.erase_node(node)

    def constant(self, value: Any) -> Any:
        """Add a constant to the program."""
        signature = importlib.import_module("torch.export.graph_signature")
        name = f"edges_{len(self.program.constants)}_{len(self.made)}"
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        specs = self.program.graph_signature.input_specs
        argument = signature.TensorArgument(name=node.name)
        specs.insert(0, signature.InputSpec(signature.InputKind.CONSTANT_TENSOR, argument, name, None))
        self.program.constants[name] = value.contiguous()
        self.made.append(name)
        self.known[node] = value
        return node

    def drop_unused(self) -> None:
        """Remove unused constants from the program."""
        specs = self.program.graph_signature.input_specs
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and not node.users and (node in self.known):
                for spec in specs:
                    if spec.arg.name == node.name:
                        self.program.constants.pop(spec.target, None)
                specs[:] = [spec for spec in specs if spec.arg.name != node.name]
                self.graph.erase_node(node)


class ScatterReduction:
    """A reduction of rows into zeros, by an index that may be constant."""

    def __init__(self, node: Any, constants: Constants, rows: int, index: Any, src: Any, reduce: str) -> None:
        self.node, self.constants, self.rows = node, constants, rows
        self.index, self.src, self.reduce = index, src, reduce
        self.graph, self.aten = constants.graph, constants.torch.ops.aten

    @classmethod
    def of(cls, node: Any, constants: Constants) -> ScatterReduction | None:
        """Create a scatter from a node; None if the node is something else, or a scatter that is not supported."""
        aten = constants.torch.ops.aten
        is_scatter = node.target in (aten.scatter_add.default, aten.scatter_reduce.two)
        if node.op != "call_function" or not (is_scatter or is_by_rows(node)):
            return None
        base, index, src = scattered(node)
        dim, name = node.args[1] if is_scatter else 0, node.args[4] if len(node.args) > 4 else "sum"
        reduce = REDUCTIONS.get(name)
        shape, places = base.meta["val"].shape, constants.known.get(index)
        includes_self = node.kwargs.get("include_self", True) and reduce != "sum"
        if dim != 0 or reduce is None or includes_self or not _is_zero(base, constants):
            return None
        if places is None:
            return cls(node, constants, shape[0], None, src, reduce) if src.meta["val"].is_floating_point() else None
        if not all(isinstance(n, int) for n in shape) or not _is_of_rows(places) or src in constants.known:
            return None
        whole = tuple(places.shape) if is_scatter else (places.numel(), *shape[1:])
        if whole != tuple(src.meta["val"].shape):
            return None
        places = places if is_scatter else places % shape[0]
        return cls(node, constants, int(shape[0]), places.reshape(places.shape[0], -1)[:, 0], src, reduce)

    def replace(self) -> None:
        """Replace the node by a sparse operator."""
        with self.graph.inserting_before(self.node):
            new = self._fixed() if self.index is not None else as_call(self.graph, self.node, self.reduce)
        if new is None:
            return
        new.meta["val"] = self.node.meta["val"]
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)

    def _fixed(self) -> Any:
        """Return the sparse operator for a constant index."""
        return self._product() or self._segments()

    def _product(self) -> Any:
        """Return a product with a sparse matrix if the rows are a selection, perhaps weighted; else None."""
        weight, rows = None, self.src
        if rows.target is self.aten.mul.Tensor:
            weight, rows = self._weighted(*rows.args)
        selected = self._selected(rows)
        if self.reduce != "sum" or selected is None or selected[0].meta["val"].dim() != 2:
            return None
        x, sources = selected
        dtype = x.meta["val"].dtype
        ones = self.constants.torch.ones(sources.numel(), dtype=dtype) if weight is None else weight
        shape = (self.rows, int(x.meta["val"].shape[0]))
        matrix = sp.coo_array((ones.double().numpy(), (self.index.numpy(), sources.numpy())), shape=shape).tocsr()
        from_numpy = self.constants.torch.from_numpy
        arrays = (from_numpy(matrix.data).to(dtype), *map(from_numpy, (_int32(matrix.indptr), _int32(matrix.indices))))
        return self._call("spmm", *map(self.constants.constant, arrays), x)

    def _weighted(self, first: Any, second: Any) -> tuple[Any, Any]:
        """Return the constant weight of each row, or None, and the rows."""
        for factor, rows in ((first, second), (second, first)):
            weight = self.constants.known.get(factor)
            if weight is not None and tuple(weight.shape) == (self.index.numel(), 1):
                return weight.reshape(-1), rows
        return None, self.src

    def _selected(self, node: Any) -> tuple[Any, Any] | None:
        """Return the source and the row numbers of a selection by a constant index; None for any other node."""
        x, index = selected(node) or (None, None)
        sources = self.constants.known.get(index)
        if x is None or sources is None or not isinstance(x.meta["val"].shape[0], int):
            return None
        return x, sources % x.meta["val"].shape[0]

    def _segments(self) -> Any:
        """Return a reduction of segments, with the rows permuted into the order of their targets."""
        order = self.constants.torch.argsort(self.index, stable=True)
        counts = np.bincount(self.index.numpy(), minlength=self.rows)
        indptr = self.constants.torch.from_numpy(_int32(np.append(0, np.cumsum(counts))))
        call, inner = self.graph.call_function, self.node.meta["val"].shape[1:]
        rows, selected = self.src, self._selected(self.src)
        if selected is not None:
            rows = call(self.aten.index_select.default, (selected[0], 0, self.constants.constant(selected[1][order])))
        elif not bool((self.index[1:] >= self.index[:-1]).all()):
            rows = call(self.aten.index_select.default, (rows, 0, self.constants.constant(order)))
        if len(inner) > 1:
            rows = call(self.aten.view.default, (rows, [self.index.numel(), int(np.prod(inner))]))
        reduced = self._call("segment_reduce", rows, self.constants.constant(indptr), self.reduce)
        return call(self.aten.view.default, (reduced, [self.rows, *inner])) if len(inner) > 1 else reduced

    def _call(self, name: str, *args: Any) -> Any:
        from sparsetir.relax.torch_import.operators import register_torch_ops

        return self.graph.call_function(getattr(register_torch_ops(), name).default, args)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _is_zero(node: Any, constants: Constants) -> bool:
    value = constants.known.get(node)
    return is_zeros(node) if value is None else not bool(value.any())


def _is_of_rows(index: Any) -> bool:
    """Return whether the elements of each row have one target."""
    if index.numel() == 0:
        return False
    flat = index.reshape(index.shape[0], -1)
    return bool((flat == flat[:, :1]).all())


def _int32(array: Any) -> np.ndarray:
    """Convert an index array to int32, or to int64 if its values need it."""
    fits = array.size == 0 or int(array.max()) < 2**31
    return np.ascontiguousarray(array, np.int32 if fits else np.int64)


# --------------------------------------------------------------------- edge indices that are arguments


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
    "with_sparse_products",
]
