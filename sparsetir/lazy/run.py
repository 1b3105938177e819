# SPDX-License-Identifier: Apache-2.0
"""Computation of lazy arrays: `compute` and `fused`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import ops
from sparsetir.errors import ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import as_numpy, check_detached, is_sparse, is_torch, to_torch
from sparsetir.lazy.array import Lazy, lazy
from sparsetir.lazy.lowering import Lowering, Part, detached, nodes, rebuilt, reordered
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
            raise ArgumentTypeError(f"compute takes lazy arrays, found {type(array).__name__}: see sparsetir.lazy")
        array.plain()
    if not arrays:
        return ()
    leaves = [node for node in nodes(arrays) if node.op in ("dense", "sparse")]
    if tune is not None or database is not None:
        return Compiled(arrays, leaves, constant=leaves, tune=tune, database=database)([])
    key = _key(arrays, leaves)
    compiled = _known.get(key)
    if compiled is None:
        compiled = Compiled(arrays, leaves)
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
    if sp.issparse(value) and value.format == "csr" and value.has_canonical_format:
        return value
    return SparseTensor.from_any(value, "csr").to_scipy("csr", copy=False)


class Compiled:
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
        from sparsetir.relax import build
        from sparsetir.relax.model import Machines

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
            database = _tuned(self.outputs, matrices, tune, database)
        self.function = Machines(build(self.mod, params=bound, database=database), "main")
        self.is_torch = any(is_torch(value) for value in values.values())
        self.place = {id(leaf): n for n, leaf in enumerate(copies)}
        self.held = {n: values[n] for n in constants if n in matrices}

    def __call__(self, values: Sequence[Any]) -> Any:
        """Return the results for these leaves."""
        from sparsetir.relax.model import to_tvm

        arrays: dict[tuple[int, str], Any] = {}
        for part in self.parts:
            arrays[id(part.leaf), part.what] = _array(part, values[self.place[id(part.leaf)]])
        operands = [to_tvm(arrays[id(part.leaf), part.what], part.what) for part in self.parts]
        out = self.function(*operands)
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
    cache = Cache[tuple[Compiled, bool]](MOST)

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
        fault = f"{name} of a fused function is part of its kind, found {type(value).__name__}"
        raise ArgumentTypeError(f"{fault}: pass what can be hashed, and arrays by position") from None
    return exact(value)


def _argument_key(value: Any) -> Any:
    array = value if is_sparse(value) or is_torch(value) else np.asarray(value)
    return tuple(array.shape), str(array.dtype), _leaf_key(value)


def _traced(function: Callable[..., Any], arrays: Sequence[Any], options: dict[str, Any]) -> tuple[Compiled, bool]:
    arguments = [lazy(a if is_sparse(a) or is_torch(a) else np.asarray(a)) for a in arrays]
    returned = function(*arguments, **options)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    for result in results:
        if not isinstance(result, Lazy):
            raise ArgumentTypeError(f"a fused function returns lazy arrays, found {type(result).__name__}")
        result.plain()
    results = _folded(results, arguments)
    leaves = [node for node in nodes(results) if node.op in ("dense", "sparse")]
    constant = [node for node in leaves if not any(node is a for a in arguments)]
    return Compiled(results, [*arguments, *constant], constant=constant), isinstance(returned, tuple)


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


__all__ = ["compute", "fused"]
