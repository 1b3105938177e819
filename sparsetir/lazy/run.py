# SPDX-License-Identifier: Apache-2.0
"""Computation of lazy arrays: `compute` and `fused`, and the lowering of a graph to one Relax module."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import ir, relax, tirx

from sparsetir import ops
from sparsetir.einsum.planning import Value, contractions
from sparsetir.errors import ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import as_numpy, check_detached, is_sparse, is_torch, to_torch
from sparsetir.lazy.array import Lazy, lazy
from sparsetir.relax import calls
from sparsetir.relax.operators import reshape
from sparsetir.utils.arguments import as_seconds, shown
from sparsetir.utils.caches import Cache, exact, shared_cache

MOST = 256  # compiled graphs that are kept

_known = shared_cache("lazy arrays", MOST)


def compute(*arrays: Any, tune: float | None = None, database: str | Path | None = None) -> Any:
    """Compute lazy arrays together, as one compiled module.

    Parameters
    ----------
    *arrays : Lazy
        What is wanted of a graph.
    tune : float, optional
        Seconds to search formats and schedules for the products with sparse matrices; the matrices become constants.
    database : str or Path, optional
        Records of searches, which are read, and added to with `tune`.

    Returns
    -------
    array, sparse object, or tuple of them
        Dense ones of numpy, or torch where an array of the graph is; sparse ones in the class of the matrix whose
        structure they have.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> mask = sparsetir.lazy(sp.csr_array(np.array([[1.0, 0], [1.0, 1.0]])))
    >>> Q = np.eye(2)
    >>> weights = sparsetir.softmax(mask * (sparsetir.lazy(Q) @ Q.T))
    >>> sparsetir.compute(weights).toarray().round(2).tolist()
    [[1.0, 0.0], [0.27, 0.73]]
    """
    for array in arrays:
        if not isinstance(array, Lazy):
            raise ArgumentTypeError(f"compute takes lazy arrays, got {type(array).__name__}: see sparsetir.lazy")
        array.plain()
    if not arrays:
        return ()
    leaves = [node for node in nodes(arrays) if node.op in ("dense", "sparse")]
    if tune is not None or database is not None:
        return CompiledGraph(arrays, leaves, constant=leaves, tune=tune, database=database)([])
    key = _key(arrays, leaves)
    compiled = _known.get(key)
    if compiled is None:
        compiled = CompiledGraph(arrays, leaves)
        _known[key] = compiled
    return compiled([leaf.value for leaf in leaves])


def _key(arrays: Sequence[Lazy], leaves: Sequence[Lazy]) -> Any:
    """Return the key of a graph: all that its compilation depends on."""
    graph = nodes(arrays)
    number = {id(node): n for n, node in enumerate(graph)}
    operations = [
        (node.op, node.shape, node.dtype, node.option, repr(node.value) if node.op == "number" else None,
         *(number[id(arg)] for arg in node.args))
        for node in graph
    ]  # fmt: skip
    leaf_keys = [_leaf_key(leaf.value) for leaf in leaves]
    return tuple(operations), tuple(leaf_keys), tuple(number[id(array)] for array in arrays)


def _leaf_key(value: Any) -> Any:
    if not is_sparse(value):
        return is_torch(value)
    matrix = _compressed(value)
    return type(value), str(matrix.indices.dtype), int(matrix.nnz).bit_length()


def _compressed(value: Any) -> Any:
    """Convert a sparse matrix to scipy's sorted rows without duplicates."""
    if sp.issparse(value) and value.format == "csr":
        has_kernels = all(str(part.dtype) in ("int32", "int64") for part in (value.indptr, value.indices))  # in scipy
        if has_kernels and value.has_canonical_format:
            return value
    return SparseTensor.from_any(value, "csr").to_scipy("csr", copy=False)


class CompiledGraph:
    """A graph that is compiled.

    Parameters
    ----------
    arrays : sequence of Lazy
        The results.
    leaves : sequence of Lazy
        What calls pass, in order.
    constant : sequence of Lazy
        Leaves whose values are compiled in.
    """

    def __init__(
        self,
        arrays: Sequence[Lazy],
        leaves: Sequence[Lazy],
        *,
        constant: Sequence[Lazy] = (),
        tune: float | None = None,
        database: Any = None,
    ) -> None:
        from sparsetir.relax.model import Machines, build

        outputs, copies = detached(arrays, leaves)
        values = {id(copy): leaf.value for copy, leaf in zip(copies, leaves, strict=True)}
        constants = {id(copy) for copy, leaf in zip(copies, leaves, strict=True) if any(leaf is c for c in constant)}
        matrices = {id(leaf): _compressed(values[id(leaf)]) for leaf in copies if leaf.op == "sparse"}
        self.outputs = reordered(outputs, {n: matrix.nnz for n, matrix in matrices.items()})
        lowering = Lowering(self.outputs, {n: str(matrix.indices.dtype) for n, matrix in matrices.items()})
        self.mod = lowering.module()
        bound = {
            str(lowering.parts[id(part.leaf), part.what].name): _array(part, values[id(part.leaf)])
            for part in lowering.order
            if id(part.leaf) in constants
        }
        self.parts = [part for part in lowering.order if id(part.leaf) not in constants]
        if tune is not None:
            tune = as_seconds(tune, "tune", positive=True)
            database = _tuned(self.outputs, matrices, tune, database)
        self.function = Machines(build(self.mod, params=bound, database=database), "main")
        self.is_torch = any(is_torch(value) for value in values.values())
        self.place = {id(leaf): n for n, leaf in enumerate(copies)}
        self.held = {n: values[n] for n in constants if n in matrices}

    def __call__(self, values: Sequence[Any]) -> Any:
        """Return the results for these leaves."""
        from sparsetir.relax.model import to_tvm

        try:
            arrays = [_array(part, values[self.place[id(part.leaf)]]) for part in self.parts]
            out = self.function(*(to_tvm(array, part.what) for array, part in zip(arrays, self.parts, strict=True)))
        except (RuntimeError, ValueError, IndexError):  # of the module, or of numpy: say what is wrong with a matrix
            for value in values:
                if is_sparse(value):
                    SparseTensor.from_any(value, "csr")
            raise
        results = [out] if len(self.outputs) == 1 else list(out)
        converted = [self._result(o, r.numpy(), values) for o, r in zip(self.outputs, results, strict=True)]
        return converted[0] if len(converted) == 1 else tuple(converted)

    def _result(self, node: Lazy, array: Any, values: Sequence[Any]) -> Any:
        if node.pattern is None:
            return to_torch(array) if self.is_torch else array[()] if array.ndim == 0 else array
        leaf = node.pattern
        value = self.held[id(leaf)] if id(leaf) in self.held else values[self.place[id(leaf)]]
        tensor = value if isinstance(value, SparseTensor) else SparseTensor.from_any(value, "csr")
        sparse = tensor.with_values(np.asarray(array))
        return sparse if isinstance(value, SparseTensor) else sparse.restore()


def _array(part: Part, value: Any) -> Any:
    """Return one array of a leaf."""
    if is_torch(value):
        check_detached(value, "array", "sparsetir.compute")
    if part.what == "dense":
        return value if is_torch(value) else np.asarray(as_numpy(value, "a lazy array")[0], order="C")
    matrix = _compressed(value)
    if part.what == "order_t":
        return np.argsort(matrix.indices, kind="stable")
    if part.what.endswith("_t"):
        matrix = SparseTensor.from_any(matrix, "csc").to_scipy("csc", copy=False).T
    if part.what == "places":
        rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        return rows * matrix.shape[1] + matrix.indices
    return np.ascontiguousarray(getattr(matrix, part.what.removesuffix("_t")))


def _tuned(outputs: Sequence[Lazy], matrices: dict[int, Any], seconds: float, database: Any) -> Path:
    """Search for the products with sparse matrices; the file with what was found."""
    from sparsetir.tuning import tune_sparse

    path = Path(tempfile.mkdtemp(prefix="sparsetir-")) / "tuned.jsonl" if database is None else Path(database)
    products = [n for n in nodes(outputs) if n.op == "matmul" and n.args[0].op == "sparse" and n.args[1].ndim == 2]
    for node in products:
        matrix, shape = matrices[id(node.args[0])], node.args[1].shape
        program = ops.spmm(node.dtype, idtype=str(matrix.indices.dtype))
        inputs = {"A": matrix.astype(node.dtype), "B": np.ones(shape, node.dtype)}
        tune_sparse(program, inputs, max_seconds=seconds / len(products), database=path, progress=False)
    return path


# ------------------------------------------------------------------ functions


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of arrays one compiled module for each kind of its arguments.

    The function is called once with lazy arrays for each kind: shapes and dtypes of dense arguments, shapes, dtypes and
    index types of sparse ones. Numbers and other arguments must be passed by name and are part of the kind. What it
    computes of arrays that are no arguments is computed once.

    Parameters
    ----------
    function : callable
        Takes arrays and returns one, or a tuple.

    Returns
    -------
    callable
        Takes and returns arrays; see `compute`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> @sparsetir.fused
    ... def attend(mask, Q, K, V):
    ...     return sparsetir.softmax(mask * (Q @ K.T)) @ V
    >>> attend(sp.eye_array(2, format="csr"), np.eye(2), np.eye(2), np.ones((2, 1))).tolist()
    [[1.0], [1.0]]
    """
    if not callable(function):
        raise ArgumentTypeError(f"function: expected a function of arrays, got {shown(function)}. Pass one to fuse.")
    cache = Cache[tuple[CompiledGraph, bool]](MOST)

    @functools.wraps(function)
    def call(*arrays: Any, **options: Any) -> Any:
        option_keys = tuple((name, type(value), _option(name, value)) for name, value in sorted(options.items()))
        key = (tuple(_argument_key(a) for a in arrays), option_keys)
        traced = cache.get(key)
        if traced is None:
            traced = cache[key] = _traced(function, arrays, options)
        compiled, is_tuple = traced
        values = compiled(arrays)
        return (values,) if is_tuple and len(compiled.outputs) == 1 else values

    return call


def _option(name: str, value: Any) -> Any:
    """Return the key of an option of a fused function."""
    try:
        hash(value)
    except TypeError:
        fault = f"{name} of a fused function is part of its kind, got {type(value).__name__}"
        raise ArgumentTypeError(f"{fault}: pass what can be hashed, and arrays by position") from None
    return exact(value)


def _argument_key(value: Any) -> Any:
    array = value if is_sparse(value) or is_torch(value) else np.asarray(value)
    return tuple(array.shape), str(array.dtype), _leaf_key(value)


def _traced(function: Callable[..., Any], arrays: Sequence[Any], options: dict[str, Any]) -> tuple[CompiledGraph, bool]:
    arguments = [lazy(a if is_sparse(a) or is_torch(a) else np.asarray(a)) for a in arrays]
    returned = function(*arguments, **options)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    for result in results:
        if not isinstance(result, Lazy):
            raise ArgumentTypeError(f"a fused function returns lazy arrays, got {type(result).__name__}")
        result.plain()
    results = _folded(results, arguments)
    leaves = [node for node in nodes(results) if node.op in ("dense", "sparse")]
    constant = [node for node in leaves if not any(node is a for a in arguments)]
    return CompiledGraph(results, [*arguments, *constant], constant=constant), isinstance(returned, tuple)


def _folded(results: Sequence[Lazy], arguments: Sequence[Lazy]) -> list[Lazy]:
    """Return the graph with the parts that depend on no argument computed."""
    argument_ids = {id(a) for a in arguments}
    open_: dict[int, bool] = {}
    new: dict[int, Lazy] = {}
    for node in nodes(results):
        open_[id(node)] = id(node) in argument_ids or any(open_[id(arg)] for arg in node.args)
        new[id(node)] = node
        if open_[id(node)] and node.args:
            args = tuple(_constant(arg) if not open_[id(arg)] else new[id(arg)] for arg in node.args)
            new[id(node)] = rebuilt(node, args)
    return [new[id(r)] if open_[id(r)] else _constant(r) for r in results]


def _constant(node: Lazy) -> Lazy:
    """Return a node that depends on no argument, computed if it is an operation."""
    is_leaf = node.op in ("dense", "sparse", "number")
    if is_leaf or node.is_sparse or node.is_turned:
        return node
    return lazy(compute(node))


# -------------------------------------------------------------------------------------------- lowering


LETTERS = "abcdefghijklmnopqrstuvwxyz"
BINARY = {
    "add": relax.op.add,
    "subtract": relax.op.subtract,
    "multiply": relax.op.multiply,
    "divide": relax.op.divide,
    "power": relax.op.power,
}
UNARY = {
    "relu": relax.op.nn.relu,
    "gelu": relax.op.nn.gelu,
    "silu": relax.op.nn.silu,
    "tanh": relax.op.tanh,
    "sigmoid": relax.op.sigmoid,
    "exp": relax.op.exp,
    "log": relax.op.log,
    "sqrt": relax.op.sqrt,
    "abs": relax.op.abs,
    "negative": relax.op.negative,
}
REDUCE = {"sum": relax.op.sum, "mean": relax.op.mean, "max": relax.op.max}


@dataclass(frozen=True)
class Part:
    """One array of a leaf, which the compiled function takes.

    Parameters
    ----------
    leaf : Lazy
    what : str
        ``dense``; of a sparse one ``data``, ``indptr``, ``indices``, ``places`` (of its entries among all elements),
        those with ``_t`` of the transposed matrix, ``order_t`` (the entries in the order of the transposed matrix).
    """

    leaf: Lazy
    what: str


def nodes(outputs: Sequence[Lazy]) -> list[Lazy]:
    """Return the nodes of a graph, arguments first."""
    visited: dict[int, Lazy] = {}
    stack = [(node, False) for node in reversed(outputs)]
    while stack:
        node, is_done = stack.pop()
        if id(node) in visited:
            continue
        if is_done:
            visited[id(node)] = node
        else:
            stack.append((node, True))
            stack += [(arg, False) for arg in reversed(node.args)]
    return list(visited.values())


def reordered(outputs: Sequence[Lazy], entries: dict[int, int]) -> list[Lazy]:
    """Return the graph with chains of products in the order that costs least.

    Parameters
    ----------
    outputs : sequence of Lazy
    entries : dict of int to int
        Of the id of each sparse leaf, the entries that it stores.
    """
    graph = nodes(outputs)
    uses: dict[int, int] = {}
    for node in [*(arg for n in graph for arg in n.args), *outputs]:
        uses[id(node)] = uses.get(id(node), 0) + 1
    new: dict[int, Lazy] = {}
    for node in graph:
        members = _flat(node, uses, is_top=True)
        chain = _chain([new[id(m)] for m in members], node.dtype, entries) if len(members) > 2 else None
        new[id(node)] = rebuilt(node, [new[id(arg)] for arg in node.args]) if chain is None else chain
    return [new[id(output)] for output in outputs]


def detached(outputs: Sequence[Lazy], leaves: Sequence[Lazy]) -> tuple[list[Lazy], list[Lazy]]:
    """Return the graph and its leaves without the arrays of the leaves."""
    new = {id(leaf): Lazy(leaf.op, (), leaf.shape, leaf.dtype) for leaf in leaves}
    for node in nodes(outputs):
        if id(node) in new:
            continue
        args = tuple(new[id(arg)] for arg in node.args)
        pattern = None if node.pattern is None else new[id(node.pattern)]
        copy = Lazy(node.op, args, node.shape, node.dtype, pattern=pattern, value=node.value, option=node.option)
        new[id(node)] = copy
    return [new[id(output)] for output in outputs], [new[id(leaf)] for leaf in leaves]


def rebuilt(node: Lazy, args: Sequence[Lazy]) -> Lazy:
    """Return a node over other arguments; the same node if they are its own."""
    if all(a is b for a, b in zip(args, node.args, strict=True)):
        return node
    return Lazy(node.op, tuple(args), node.shape, node.dtype, pattern=node.pattern, option=node.option)


def _chain(members: Sequence[Lazy], dtype: str, entries: dict[int, int]) -> Lazy | None:
    """Return a chain of products in the order that costs least; None if that is no order of pairs."""
    if len(members) > 8 or any(m.ndim != 2 for m in members):
        return None
    sizes = {LETTERS[n]: m.shape[0] for n, m in enumerate(members)} | {LETTERS[len(members)]: members[-1].shape[1]}
    values = []
    for n, member in enumerate(members):
        leaf = member.args[0] if member.op == "transpose" else member
        stored = None if leaf.pattern is None else float(entries.get(id(leaf.pattern), 1))
        letters = LETTERS[n : n + 2]
        values.append(Value(letters, stored, letters if stored is not None else ""))
    steps = contractions(values, LETTERS[0] + LETTERS[len(members)], sizes)
    if any(len(step.members) != 2 for step in steps):
        return None
    products, starts = list(members), list(range(len(members)))
    for step in steps:
        first, second = sorted(step.members, key=lambda n: starts[n])
        a, b = products[first], products[second]
        products.append(Lazy("matmul", (a, b), (a.shape[0], b.shape[1]), dtype))
        starts.append(starts[first])
    return products[-1]


def _flat(node: Lazy, uses: dict[int, int], *, is_top: bool = False) -> list[Lazy]:
    """Return the factors of a chain of products of matrices, none of whose intermediate results has another use."""
    if node.op != "matmul" or (not is_top and uses[id(node)] > 1) or any(a.ndim != 2 for a in node.args):
        return [node]
    return [member for arg in node.args for member in _flat(arg, uses)]


# ------------------------------------------------------------------ Relax


class Lowering:
    """Emits a graph into a Relax function."""

    def __init__(self, outputs: Sequence[Lazy], idtypes: dict[int, str]) -> None:
        self.outputs, self.idtypes = outputs, idtypes
        self.parts: dict[tuple[int, str], relax.Var] = {}
        self.order: list[Part] = []
        self.made: dict[int, Any] = {}
        self.counts: dict[int, tirx.Var] = {}
        self.builder = relax.BlockBuilder()

    def module(self) -> ir.IRModule:
        """Return the module; its parameters are those of `order`."""
        graph = nodes(self.outputs)
        for node in graph:
            self._declare(node)
        with self.builder.function("main", list(self.parts.values())):
            with self.builder.dataflow():
                for node in graph:
                    self.made[id(node)] = self._emit(node)
                results = [self.builder.emit_output(self._whole(self.made[id(o)])) for o in self.outputs]
            self.builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
        return self.builder.get()

    def _whole(self, value: Any) -> Any:
        """Return a result; a parameter alone is copied, since it cannot be a result."""
        if not any(value is parameter for parameter in self.parts.values()):
            return value
        return relax.op.multiply(value, relax.const(1, value.ty.dtype))

    # -------------------------------------------------------------- parameters

    def _declare(self, node: Lazy) -> None:
        if node.op == "dense":
            self._part(node, "dense", node.shape, node.dtype)
        if node.op == "matmul":
            for at, arg in enumerate(node.args):
                matrix = arg.args[0] if arg.is_turned else arg
                if matrix.is_sparse:
                    assert matrix.pattern is not None
                    self._structure(matrix.pattern, "_t" if arg.is_turned != (at == 1) else "", matrix)
        elif node.is_sparse and node.pattern is not None:
            self._structure(node.pattern, "")
            if self._gathers(node):
                self._part(node.pattern, "places", (self._count(node.pattern),), "int64")

    def _gathers(self, node: Lazy) -> bool:
        if node.op not in ("multiply", "divide") or len(node.args) != 2 or node.args[1].is_sparse:
            return False
        return node.args[1].op != "number" and _sampled(node) is None

    def _count(self, leaf: Lazy) -> Any:
        return self.counts.setdefault(id(leaf), tirx.Var(f"nnz_{len(self.counts)}", "int64"))

    def _structure(self, leaf: Lazy, suffix: str, matrix: Lazy | None = None) -> None:
        """Declare the arrays of a leaf, transposed with a suffix; `matrix` is a function of the leaf."""
        count, idtype = self._count(leaf), self.idtypes[id(leaf)]
        rows = leaf.shape[1 if suffix else 0]
        if suffix and matrix is not leaf:
            self._part(leaf, "order_t", (count,), "int64")
        else:
            self._part(leaf, f"data{suffix}", (count,), leaf.dtype)
        self._part(leaf, f"indptr{suffix}", (rows + 1,), idtype)
        self._part(leaf, f"indices{suffix}", (count,), idtype)

    def _part(self, leaf: Lazy, kind: str, shape: Sequence[Any], dtype: str) -> None:
        if (id(leaf), kind) not in self.parts:
            name = f"{kind}_{len(self.parts)}"
            self.parts[id(leaf), kind] = relax.Var(name, relax.TensorType(list(shape), dtype))
            self.order.append(Part(leaf, kind))

    # -------------------------------------------------------------- nodes

    def _emit(self, node: Lazy) -> Any:
        if node.op == "dense":
            return self.parts[id(node), "dense"]
        if node.op == "sparse":
            return self.parts.get((id(node), "data"))
        if node.op == "number":
            return relax.const(node.value, node.dtype)
        if node.is_turned:
            return None  # its product reads the transposed structure
        return self.builder.emit(self._called(node)) if not _is_wide(node) else self._wide(node)

    def _wide(self, node: Lazy) -> Any:
        """Emit a dense function of float16 computed in float32, as in programs."""
        values = dict(self.made)
        for arg in node.args:
            self.made[id(arg)] = self.builder.emit(relax.op.astype(self.made[id(arg)], "float32"))
        value = self.builder.emit(self._called(node))
        self.made = values
        return self.builder.emit(relax.op.astype(value, "float16"))

    def _value(self, node: Lazy, dtype: str) -> Any:
        value = self.made[id(node)]
        return value if node.dtype == dtype else self.builder.emit(relax.op.astype(value, dtype))

    def _called(self, node: Lazy) -> Any:
        if node.op == "matmul":
            return self._matmul(node)
        if node.op == "transpose":
            return relax.op.permute_dims(self.made[id(node.args[0])])
        if node.op == "softmax":
            value = self.made[id(node.args[0])]
            if node.pattern is None:
                return relax.op.nn.softmax(value, axis=-1)
            return calls.softmax(value, self.parts[id(node.pattern), "indptr"])
        if node.op in UNARY:
            return UNARY[node.op](self.made[id(node.args[0])])
        if node.op in REDUCE:
            return REDUCE[node.op](self.made[id(node.args[0])], axis=node.option)
        return self._binary(node)

    def _matmul(self, node: Lazy) -> Any:
        a, b = node.args
        left = a.args[0] if a.is_turned else a
        right = b.args[0] if b.is_turned else b
        if left.is_sparse:
            structure = self._arrays(left, "_t" if left is not a else "", node.dtype)
            return (calls.spmm if b.ndim == 2 else calls.spmv)(*structure, self._value(b, node.dtype))
        if right.is_sparse:
            structure = self._arrays(right, "_t" if right is b else "", node.dtype)
            return calls.linear(self._value(a, node.dtype), *structure)
        if node.dtype == "float16":
            wide = relax.op.matmul(self._value(a, "float32"), self._value(b, "float32"))
            return relax.op.astype(self.builder.emit(wide), "float16")
        return relax.op.matmul(self._value(a, node.dtype), self._value(b, node.dtype))

    def _arrays(self, node: Lazy, suffix: str, dtype: str) -> tuple[Any, Any, Any]:
        leaf = node.pattern
        assert leaf is not None
        if not suffix:
            data = self.made[id(node)]
        elif node is leaf:
            data = self.parts[id(leaf), "data_t"]
        else:
            order = self.parts[id(leaf), "order_t"]
            data = self.builder.emit(relax.op.take(self.made[id(node)], order, axis=0, mode="clip"))
        if node.dtype != dtype:
            data = self.builder.emit(relax.op.astype(data, dtype))
        return data, self.parts[id(leaf), f"indptr{suffix}"], self.parts[id(leaf), f"indices{suffix}"]

    def _binary(self, node: Lazy) -> Any:
        a, b = node.args
        if not node.is_sparse or b.is_sparse or b.op == "number":
            return BINARY[node.op](self._value(a, node.dtype), self._value(b, node.dtype))
        sampled, leaf = _sampled(node), node.pattern
        assert leaf is not None
        if sampled is not None:
            x, y = (self._value(v, node.dtype) for v in sampled[:2])
            y = y if sampled[2] else self.builder.emit(relax.op.permute_dims(y))
            # The sum is multiplied, not its terms: infinity times -1 is no NaN.
            values, indptr, indices = self._arrays(a, "", node.dtype)
            ones = self.builder.emit(relax.op.ones_like(values))
            return relax.op.multiply(values, self.builder.emit(calls.sddmm(ones, indptr, indices, x, y)))
        dense = self._value(b, node.dtype)
        if b.shape != node.shape:
            dense = self.builder.emit(relax.op.broadcast_to(dense, node.shape))
        flat = self.builder.emit(reshape(dense, (node.shape[0] * node.shape[1],)))
        gathered = self.builder.emit(relax.op.take(flat, self.parts[id(leaf), "places"], axis=0, mode="clip"))
        return BINARY[node.op](self._value(a, node.dtype), gathered)


def _is_wide(node: Lazy) -> bool:
    """Return whether a node is a function or a sum that loses too much in its own 16 bits."""
    is_function = node.op in UNARY or node.op in REDUCE or node.op in ("softmax", "power")
    return node.dtype == "float16" and is_function and not node.args[0].is_sparse


def _sampled(node: Lazy) -> tuple[Lazy, Lazy, bool] | None:
    """Return the factors of a product sampled by a sparse array, and whether the second is transposed."""
    if node.op != "multiply" or node.args[1].op != "matmul" or node.args[1].ndim != 2:
        return None
    x, y = node.args[1].args
    if x.ndim != 2 or y.ndim != 2 or x.is_sparse or y.is_sparse:
        return None
    if x.is_turned or y.is_turned:
        return None
    return (x, y.args[0], True) if y.op == "transpose" else (x, y, False)


__all__ = ["Lowering", "Part", "compute", "detached", "fused", "nodes", "rebuilt", "reordered"]
