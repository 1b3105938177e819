# SPDX-License-Identifier: Apache-2.0
"""Message passing as graph networks in torch write it, rewritten to sparse operators, with constant or given indices.

A layer selects the rows of nodes with one index, and reduces them by another (``scatter_add``, ``scatter_reduce``).
Where both indices are constants, a sum is a product with a sparse matrix. Messages that are computed otherwise are
permuted into the order of their targets and reduced as segments. What depends on constant indices only, such as the
degrees of nodes, is folded here. Each index of targets that is an argument is sorted to row pointers by counting.

before::

    aten.scatter_add(zeros, 0, expand(targets), weight * index_select(x, 0, sources))

after::

    indptr, _, order = R.sparse.transpose(arange(edges + 1), targets, rows)
    R.sparse.spmm(take(weight, order), indptr, take(sources, order), x)

In the program that torch exported, reductions by such an index appear as calls of `sum_edges` and `reduce_edges`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import relax

from sparsetir.errors import LoweringError
from sparsetir.interop.torch_graphs import GraphReader, RowGather, RowScatter
from sparsetir.relax import calls
from sparsetir.relax.epilogues import product, same_size
from sparsetir.relax.operators import reshape
from sparsetir.relax.structures import checked

QUANTIZED = "quantized_decomposed"
OPERATORS = {
    **{f"aten.{name}.default": name for name in ("index_select", "scatter_add", "index_reduce")},
    **{f"aten.{name}.default": name for name in ("view", "unsqueeze", "expand")},
    **{"aten.index.Tensor": "getitem", "aten.select.int": "select", "aten.mul.Tensor": "mul"},
    **{"aten.scatter_reduce.two": "scatter_reduce", "aten.index_put.default": "index_add"},
}


class AtenGraphs(GraphReader):
    """The names of operators in graphs of `torch.export`, where ``index_add`` has become ``index_put``."""

    tensor_key = "val"

    def name(self, node: Any) -> str:
        """Return the operator of a node, "" for one that is no part of message passing."""
        name = OPERATORS.get(str(getattr(node, "target", "")), "")
        return "" if name == "index_add" and not self._adds_rows(*node.args) else name

    def _adds_rows(self, base: Any, places: Any, rows: Any, accumulate: bool = False) -> bool:
        """Return whether an ``index_put`` adds up rows by one index."""
        is_by_one = accumulate and len(places) == 1 and self.is_index(places[0])
        return is_by_one and self.tensor(rows).dim() == self.tensor(base).dim()

    def arguments(self, node: Any) -> dict[str, Any]:
        """Return the arguments of a node by their names."""
        if self.name(node) == "index_add":
            return {"input": node.args[0], "dim": 0, "index": node.args[1][0], "src": node.args[2]}
        options = super().arguments(node)
        return {**options, "index": tuple(options["index"])} if self.name(node) == "getitem" else options


ATEN = AtenGraphs()


def shape_of(node: Any) -> Any:
    """Return the shape of a node that is a tensor, None for any other."""
    return getattr(ATEN.tensor(node), "shape", None)


def with_sparse_products(program: Any) -> None:
    """Rewrite a decomposed exported program in place."""
    constants = Constants(program)
    constants.fold()
    _propagate_shapes(program)
    _settle_sizes(program.graph)
    _refuse_masks(program, constants)
    ATEN.share_rows(program.graph)
    for node in list(program.graph.nodes):
        reduction = ScatterReduction.of(node, constants)
        if reduction is not None:
            reduction.replace()
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
        leaves = importlib.import_module("torch.utils._pytree").tree_leaves((node.args, node.kwargs))
        return not any(isinstance(leaf, self.torch.SymInt) for leaf in leaves)

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

    def __init__(self, node: Any, constants: Constants, scatter: RowScatter, index: Any) -> None:
        self.node, self.constants, self.scatter, self.index = node, constants, scatter, index
        self.graph, self.aten = constants.graph, constants.torch.ops.aten

    @classmethod
    def of(cls, node: Any, constants: Constants) -> ScatterReduction | None:
        """Create a reduction from a node; None if the node is something else, or a scatter that is not supported."""
        scatter = ATEN.scatter(node)
        if scatter is None or not _is_zero(scatter.base, constants):
            return None
        src, shape, places = ATEN.tensor(scatter.src), shape_of(scatter.base), constants.known.get(scatter.index)
        if places is None:
            return cls(node, constants, scatter, None) if src.is_floating_point() else None
        if not all(isinstance(n, int) for n in shape) or not _is_of_rows(places) or scatter.src in constants.known:
            return None
        whole = tuple(places.shape) if scatter.is_elementwise else (places.numel(), *shape[1:])
        if whole != tuple(src.shape):
            return None
        places = places if scatter.is_elementwise else places % shape[0]
        return cls(node, constants, scatter, places.reshape(places.shape[0], -1)[:, 0])

    def replace(self) -> None:
        """Replace the node by a sparse operator."""
        with self.graph.inserting_before(self.node):
            new = self._by_argument() if self.index is None else self._product() or self._segments()
        if new is None:
            return
        new.meta["val"] = self.node.meta["val"]
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)

    def _product(self) -> Any:
        """Return a product with a sparse matrix if the rows are a selection, perhaps weighted; else None."""
        message = ATEN.message(self.scatter.src)
        if self.scatter.reduce != "sum" or message is None or len(shape_of(message.at)) != 2:
            return None
        sources, weight = self._sources(message), self.constants.known.get(message.weight)
        if sources is None or (weight is None) != (message.weight is None):
            return None
        dtype = message.x.meta["val"].dtype
        ones = self.constants.torch.ones(sources.numel()) if weight is None else weight.reshape(-1)
        shape = (self.rows, int(shape_of(message.x)[0]))
        matrix = sp.coo_array((ones.double().numpy(), (self.index.numpy(), sources.numpy())), shape=shape).tocsr()
        from_numpy = self.constants.torch.from_numpy
        arrays = (from_numpy(matrix.data).to(dtype), *map(from_numpy, (_int32(matrix.indptr), _int32(matrix.indices))))
        return self._call("spmm", *map(self.constants.constant, arrays), message.x)

    @property
    def rows(self) -> int:
        """The number of targets."""
        return int(shape_of(self.scatter.base)[0])

    def _sources(self, message: RowGather | None) -> Any:
        """Return the row numbers of a selection by a constant index; None for any other."""
        if message is None or message.index not in self.constants.known:
            return None
        rows = shape_of(message.x)[0]
        return self.constants.known[message.index] % rows if isinstance(rows, int) else None

    def _segments(self) -> Any:
        """Return a reduction of segments, with the rows permuted into the order of their targets."""
        order = self.constants.torch.argsort(self.index, stable=True)
        counts = np.bincount(self.index.numpy(), minlength=self.rows)
        indptr = self.constants.torch.from_numpy(_int32(np.append(0, np.cumsum(counts))))
        call, inner = self.graph.call_function, self.node.meta["val"].shape[1:]
        rows, message = self.scatter.src, ATEN.gather(self.scatter.src)
        sources = self._sources(message)
        if message is not None and sources is not None:
            rows = call(self.aten.index_select.default, (message.x, 0, self.constants.constant(sources[order])))
        elif not bool((self.index[1:] >= self.index[:-1]).all()):
            rows = call(self.aten.index_select.default, (rows, 0, self.constants.constant(order)))
        if len(inner) > 1:
            rows = call(self.aten.view.default, (rows, [self.index.numel(), int(np.prod(inner))]))
        reduced = self._call("segment_reduce", rows, self.constants.constant(indptr), self.scatter.reduce)
        return call(self.aten.view.default, (reduced, [self.rows, *inner])) if len(inner) > 1 else reduced

    def _by_argument(self) -> Any:
        """Return a call of `sum_edges` or `reduce_edges`, None where the elements of a row have several targets."""
        scatter, src, call = self.scatter, self.scatter.src, self.graph.call_function
        targets, message, rows = ATEN.targets(scatter), ATEN.message(src), ATEN.gather(src)
        if targets is None or shape_of(src)[0] == 0:
            return None
        if scatter.reduce == "sum" and message is not None and len(shape_of(message.at)) == 2:
            weight, dtype = message.weight, ATEN.tensor(message.x).dtype
            if weight is not None and ATEN.tensor(weight).dtype is not dtype:
                weight = call(self.aten._to_copy.default, (weight,), {"dtype": dtype})
            weight = None if weight is None else call(self.aten.view.default, (weight, [-1]))
            return call(sum_edges, (message.x, message.index, weight, targets, scatter.base))
        messages, sources = (src, None) if rows is None else (rows.x, rows.index)
        return call(reduce_edges, (messages, sources, targets, scatter.base, scatter.reduce))

    def _call(self, name: str, *args: Any) -> Any:
        from sparsetir.relax.torch_import.operators import register_torch_ops

        return self.graph.call_function(getattr(register_torch_ops(), name).default, args)


def _is_zero(node: Any, constants: Constants) -> bool:
    """Return whether a node makes zeros, of a size that may be known only at run time."""
    value = constants.known.get(node)
    return (str(node.target) == "aten.full.default" and node.args[1] == 0) if value is None else not bool(value.any())


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


__all__ = ["converters", "reduce_edges", "sum_edges", "with_sparse_products"]
