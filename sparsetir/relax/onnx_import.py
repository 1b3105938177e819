# SPDX-License-Identifier: Apache-2.0
"""Models from ONNX: sparse initializers become sparse weights, dense ones where a pass says so."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import ir, relax
from tvm.error import InternalError

from sparsetir.errors import (
    ArgumentError,
    ArgumentTypeError,
    LoweringError,
    MissingFileError,
    SparseTIRError,
    VerifyError,
)
from sparsetir.formats.pattern import hash_arrays
from sparsetir.relax.integer_products import IntegerProduct
from sparsetir.relax.model import CompiledModel, Passes, compile_model
from sparsetir.relax.operators import constant
from sparsetir.relax.sparsify import UNKNOWN_ROWS, ConstantProduct, HalfRewrite, Layer, ProductRewriter
from sparsetir.utils.packages import require

STORED = "stored as a sparse initializer"
MOST_ELEMENTS = 1 << 34  # of a sparse initializer, which is made dense
NO_PRODUCT = "a sparse initializer that is not the constant matrix of a product"


def from_onnx(
    model: Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    sparsify: Passes = None,
    report: list[Layer] | None = None,
    database: str | Path | None = None,
    target: Any = None,
) -> CompiledModel:
    """Compile an ONNX model to a `CompiledModel`, with sparse kernels for its sparse weights.

    Sparse initializers and sparse values of ``Constant`` nodes become sparse weights where a matrix product, a
    ``Gemm``, a 1 x 1 convolution or a quantized convolution takes them, and dense constants elsewhere. Dense
    initializers stay dense unless a pass given as `sparsify`, such as `SparsifyWeights`, makes them sparse.

    Quantized operators, ``QLinearMatMul``, ``QLinearConv``, ``MatMulInteger``, ``ConvInteger``, ``QuantizeLinear`` and
    ``DequantizeLinear``, return the integers of ONNX's reference evaluator, dense and sparse.

    Parameters
    ----------
    model : onnx.ModelProto, str, Path or bytes
        The model, its file, or the bytes of the file. It is not modified.
    shapes : mapping of str to sequence of int, optional
        Shapes of inputs, in place of those in the model.
    sparsify : Pass or sequence of Pass, optional
        Passes that run on the model before it is lowered.
    report : list, optional
        A `Layer` is appended for each sparse initializer and each product with it, and for each weight that
        `SparsifyWeights` decided about.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The model is no ONNX model, or a sparse initializer is not canonical.
    LoweringError
        The model has operators that TVM's importer does not know, or that TVM does not compile.
    MissingPackageError
        The package onnx is not installed.

    Examples
    --------
    >>> import numpy as np, onnx, sparsetir.relax
    >>> from onnx import helper, numpy_helper
    >>> values = numpy_helper.from_array(np.ones(2, "float32"), "W")
    >>> weight = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([0, 5])), [3, 2])
    >>> shape = lambda name, size: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, size])
    >>> node = helper.make_node("MatMul", ["x", "W"], ["y"])
    >>> graph = helper.make_graph([node], "g", [shape("x", 3)], [shape("y", 2)], sparse_initializer=[weight])
    >>> model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    >>> sparsetir.relax.from_onnx(model)(np.ones((4, 3), "float32"))[0]
    array([1., 1.], dtype=float32)
    """
    require("onnx", extra="onnx", purpose="sparsetir.relax.from_onnx")
    plain, stored = with_dense_initializers(_loaded(model))
    mod = _imported(plain, shapes)
    owner = StoredWeights(stored)
    mod = owner.rewritten(mod)
    if report is not None:
        report.extend(owner.layers)
    passes = list(sparsify) if isinstance(sparsify, Sequence) else [sparsify]
    before = [len(getattr(each, "layers", ())) for each in passes]
    with _lowering_errors("TVM does not compile an operator of it"):
        compiled = compile_model(mod, target, sparsify=sparsify, database=database)
    if report is not None:
        for each, count in zip(passes, before, strict=True):
            report.extend(list(getattr(each, "layers", ()))[count:])
    return compiled


RAW_ERRORS = (
    InternalError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def _lowering_errors(fault: str) -> Iterator[None]:
    """Raise TVM's errors, and those of programs that TVM makes of an operator, as a `LoweringError`."""
    try:
        yield
    except RAW_ERRORS as error:
        if isinstance(error, SparseTIRError) and not isinstance(error, VerifyError):
            raise
        reason = str(error).partition("\n")[0]
        raise LoweringError(f"model: {fault}: {reason}") from error


def _loaded(model: Any) -> Any:
    onnx = importlib.import_module("onnx")
    if isinstance(model, onnx.ModelProto):
        return model
    if not isinstance(model, (str, Path, bytes)):
        raise ArgumentTypeError(f"model: expected an onnx.ModelProto, a path or bytes, got {type(model).__name__}.")
    if not isinstance(model, bytes) and not Path(model).is_file():
        raise MissingFileError(f"model: expected a file, got {str(model)!r}.")
    try:
        return onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(str(model))
    except Exception as error:  # Protobuf's decoder raises classes of its own.
        raise ArgumentError(f"model: expected an ONNX model, got data that onnx does not read ({error}).") from None


def _imported(model: Any, shapes: Mapping[str, Sequence[int]] | None) -> ir.IRModule:
    from tvm.relax.frontend.onnx import from_onnx as import_onnx

    from sparsetir.relax.onnx_operators import more_converters

    _check_version(model)
    with _lowering_errors("TVM's importer for ONNX does not take it"), more_converters():
        sizes = None if shapes is None else {n: list(s) for n, s in shapes.items()}
        return _with_tensors_of_shapes(import_onnx(model, shape_dict=sizes))


def _check_version(model: Any) -> None:
    """Raise for a version of ONNX's operators that the installed package does not know."""
    onnx = importlib.import_module("onnx")
    newest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > newest:
            fault = f"model: expected operators of version {newest} or earlier, got version {opset.version}"
            raise LoweringError(f"{fault}. Convert it with onnx.version_converter, or install a later onnx.")


def _with_tensors_of_shapes(mod: ir.IRModule) -> ir.IRModule:
    """Return a module whose function returns shapes, as results of ``Shape`` are, as tensors of int64."""
    func = mod["main"]
    body = func.body
    parts = list(body.body.fields) if isinstance(body.body, relax.Tuple) else [body.body]
    if not any(isinstance(part.ty, relax.ShapeType) for part in parts):
        return mod
    results, bindings = [], []
    for part in parts:
        if isinstance(part.ty, relax.ShapeType):
            tensor = relax.Var("shape", relax.TensorType([int(part.ty.ndim)], "int64"))
            bindings.append(relax.VarBinding(tensor, relax.op.shape_to_tensor(part)))
            part = tensor
        results.append(part)
    result = relax.Tuple(results) if isinstance(body.body, relax.Tuple) else results[0]
    types = [part.ty for part in results]
    whole = relax.SeqExpr([*body.blocks, relax.BindingBlock(bindings)], result)
    returned = ir.TupleType(types) if isinstance(body.body, relax.Tuple) else types[0]
    mod["main"] = relax.Function(func.params, whole, returned, func.is_pure, func.attrs)
    return relax.transform.Normalize()(mod)


# ------------------------------------------------------------------ sparse initializers


def with_dense_initializers(model: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a copy of a model with dense initializers in place of sparse ones, and the arrays of these by name."""
    onnx = importlib.import_module("onnx")
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    graph, stored = copied.graph, {}
    sparse = [(str(tensor.values.name), tensor) for tensor in graph.sparse_initializer]
    nodes = [node for node in graph.node if node.op_type == "Constant" and _sparse_value(node) is not None]
    sparse += [(str(node.output[0]), _sparse_value(node)) for node in nodes]
    for name, tensor in sparse:
        stored[name] = _dense(onnx, name, tensor)
        graph.initializer.append(onnx.numpy_helper.from_array(stored[name], name))
    for node in nodes:
        graph.node.remove(node)
    del graph.sparse_initializer[:]
    return copied, stored


def _sparse_value(node: Any) -> Any:
    return next((a.sparse_tensor for a in node.attribute if a.name == "sparse_value"), None)


def _dense(onnx: Any, name: str, tensor: Any) -> np.ndarray:
    """Return the array of a sparse tensor, whose indices are linear or one row for each entry."""
    shape = tuple(int(size) for size in tensor.dims)
    if math.prod(shape) > MOST_ELEMENTS:
        raise ArgumentError(f"model: expected up to {MOST_ELEMENTS} elements in {name!r}, got the shape {shape}.")
    if tensor.values.data_type == onnx.TensorProto.STRING:
        raise ArgumentTypeError(f"model: expected numbers in {name!r}, got strings.")
    values = onnx.numpy_helper.to_array(tensor.values).reshape(-1)
    indices = onnx.numpy_helper.to_array(tensor.indices).astype("int64")
    total = math.prod(shape)
    if indices.ndim == 2 and indices.shape[1] == len(shape):
        if np.any((indices < 0) | (indices >= np.array(shape, "int64"))):
            raise ArgumentError(f"model: expected indices inside of {shape} in {name!r}, got others.")
        indices = np.ravel_multi_index(tuple(indices.T), shape) if indices.size else np.zeros(0, "int64")
    if indices.ndim != 1 or indices.size != values.size:
        raise ArgumentError(f"model: expected {values.size} indices in {name!r}, got an array {indices.shape}.")
    if np.any((indices < 0) | (indices >= total)):
        raise ArgumentError(f"model: expected indices from 0 to {total - 1} in {name!r}, got others.")
    if np.unique(indices).size != indices.size:
        raise ArgumentError(f"model: expected each place once in {name!r}, got repeated ones. Sum them first.")
    dense = np.zeros(total, values.dtype)
    dense[indices] = values
    return dense.reshape(shape)


class StoredWeights:
    """Decisions for the rewriter of `SparsifyWeights`: weights from sparse initializers are sparse, others unchanged.

    Parameters
    ----------
    stored : mapping of str to ndarray
        Arrays by the name of the initializer.

    Attributes
    ----------
    layers : list of Layer
    """

    rows = UNKNOWN_ROWS
    folds = False

    def __init__(self, stored: Mapping[str, np.ndarray]) -> None:
        self.layers: list[Layer] = []
        self._stored = dict(stored)
        self._names = {key: name for name, array in stored.items() for key in _keys(array)}
        self._used: set[str] = set()

    def rewritten(self, mod: ir.IRModule) -> ir.IRModule:
        """Return a module with sparse products."""
        rewriter = ProductRewriter(mod, self)
        for var, func in mod.functions.items():
            if isinstance(func, relax.Function) and self._names:
                rewriter.builder_.update_func(var, rewriter.run(func))
        for name in self._stored.keys() - self._used:
            array = self._stored[name]
            density = np.count_nonzero(array) / max(array.size, 1)
            self.layers.append(Layer(name, "", array.shape, density, 0, False, NO_PRODUCT))
        return rewriter.builder_.get()

    def decided(self, _name: str, match: ConstantProduct) -> HalfRewrite | None:
        """Return the rewrite of a product with a weight that was stored as a sparse one."""
        csr = self._taken(match, match.weight)
        return None if csr is None else lambda x: match.rewrite(csr, x)

    def decided_integers(self, _name: str, match: IntegerProduct) -> tuple[Any, ...] | None:
        """Return the constants of a product with an 8-bit weight that was stored as a sparse one."""
        return self._taken(match, match.stored)

    def _taken(self, match: ConstantProduct | IntegerProduct, array: np.ndarray) -> tuple[Any, ...] | None:
        name = self._names.get(_hash(array))
        if name is None:
            return None
        self._used.add(name)
        self.layers.append(Layer(name, match.operator, match.weight.shape, match.density, match.rows, True, STORED))
        matrix = sp.csr_array(match.weight)
        parts = matrix.data, matrix.indptr.astype("int32"), matrix.indices.astype("int32")
        return tuple(map(constant, parts))


def _hash(array: np.ndarray) -> str:
    """Return a hash that is the same for the int32 that 8-bit integers become in products."""
    matrix = array.astype("int32") if array.dtype.kind in "iu" and array.dtype.itemsize == 1 else array
    return hash_arrays("weight", [np.ascontiguousarray(matrix)])


def _keys(array: np.ndarray) -> list[str]:
    """Return hashes of an array as the weight of a product, as it is and transposed."""
    if array.ndim == 4 and array.dtype.kind in "iu":
        return [_hash(array)]
    matrix = array[:, :, 0, 0] if array.ndim == 4 and array.shape[2:] == (1, 1) else array
    if matrix.ndim != 2:
        return []
    return [_hash(m) for m in (matrix, matrix.T)]


__all__ = ["from_onnx"]
