# SPDX-License-Identifier: Apache-2.0
"""Sparsification of constant weights: products with mostly zero weights become sparse where that is faster.

before::

    lv = R.permute_dims(metadata["ir.GenericConst"][0])      # (out, in), most of it zero
    lv1 = R.matmul(x, lv)

after::

    lv1 = R.sparse.linear(x, data, indptr, indices)

Candidates are matrix products with a constant matrix on either side, transposed or not, and 1 x 1 convolutions. Nothing
is rounded to zero: results differ by the order of sums, and where an input is not finite, since zeros are skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse as sp
import tvm
from tvm import ir, relax

from sparsetir.build import build as build_kernel
from sparsetir.codegen.target import cpu_target
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.heuristics import most_dense
from sparsetir.formats.pattern import hash_arrays
from sparsetir.ir.halves import PRECISIONS
from sparsetir.relax import dense, integer_products, programs
from sparsetir.relax.epilogues import emitted, known, name_of, product
from sparsetir.relax.legalize import Uses, takes_modules
from sparsetir.relax.model import build, compile_model
from sparsetir.relax.operators import call as sparse_call
from sparsetir.relax.operators import constant, reshape
from sparsetir.relax.structures import task_of, tunable
from sparsetir.schedules import has_unit
from sparsetir.tuning import tune_many
from sparsetir.utils.arguments import as_flag, as_path, as_seconds, is_real, shown
from sparsetir.workloads.timing import LEAST_SIZE, MOST_DENSE, Timer, choose, fastest, timer_of

(IN_PARTS,) = PRECISIONS
HALF_DTYPES = ("float32", IN_PARTS, dense.HALF, integer_products.INT8)
TOLERANCES = {IN_PARTS: 1e-3, dense.HALF: 2e-2, integer_products.INT8: 0.1}  # Of the norm of a result.
HalfRewrite = Callable[[Any], Any]


def _astype(x: Any, dtype: str) -> Any:
    return relax.op.astype(x, dtype)


def _dense(weight: np.ndarray, x: Any, *, is_linear: bool) -> Any:
    rounded = np.ascontiguousarray(weight.T if is_linear else weight).astype(ml_dtypes.bfloat16)
    operands = (_astype(x, dense.HALF), constant(rounded))
    return relax.op.matmul(*(operands if is_linear else operands[::-1]), out_dtype="float32")


def _sparse(csr: tuple[Any, ...], x: Any, *, is_linear: bool, in_parts: bool) -> Any:
    x = x if in_parts else _astype(x, dense.HALF)
    columns = relax.op.permute_dims(x) if is_linear else x
    result = sparse_call("spmm_bf16x3" if in_parts else "spmm", *csr, columns)
    result = relax.op.permute_dims(result) if is_linear else result
    return result if in_parts else _astype(result, "float32")


def _sparse_rows(csr: tuple[Any, ...], x: Any) -> Any:
    """Multiply rows of x, which the kernel packs in panels of columns."""
    return _astype(sparse_call("linear", _astype(x, dense.HALF), *csr), "float32")


def half_rewrites(operator: str, weight: np.ndarray, x: Any, lowest: str, target: Any) -> dict[str, HalfRewrite]:
    """Return the candidates that a precision allows, by name.

    Parameters
    ----------
    operator : {"linear", "spmm", "spmv"}
        ``x @ weight.T``, ``weight @ x``, and the product with one vector, which has no candidates.
    weight : ndarray
        Of float32.
    x : Expr
        The other operand.
    lowest : str
        One of `HALF_DTYPES`.
    target : Target
        Without units for bfloat16 it has no candidates.
    """
    is_linear = operator == "linear"
    is_taken = (is_linear and x.ty.ndim > 1) or (operator == "spmm" and x.ty.ndim in (2, 3, 4))
    if lowest == "float32" or not is_taken or weight.dtype != np.float32 or not has_unit(target):
        return {}
    matrix = sp.csr_array(weight)
    places = (constant(matrix.indptr.astype("int32")), constant(matrix.indices.astype("int32")))
    products: dict[str, HalfRewrite] = {}
    if lowest == dense.HALF:
        rounded = (constant(matrix.data.astype(ml_dtypes.bfloat16)), *places)
        products["dense bfloat16"] = partial(_dense, weight, is_linear=is_linear)
        products["sparse bfloat16"] = partial(_sparse, rounded, is_linear=is_linear, in_parts=False)
        if is_linear:
            products["sparse bfloat16 rows"] = partial(_sparse_rows, rounded)
    if is_linear or x.ty.ndim == 2:
        csr = (constant(matrix.data), *places)
        products[f"sparse {IN_PARTS}"] = partial(_sparse, csr, is_linear=is_linear, in_parts=True)
    around = _of_rows if is_linear else _of_images
    return {name: partial(around, multiply, weight.shape[0]) for name, multiply in products.items()}


def _of_rows(multiply: HalfRewrite, outputs: int, x: Any) -> Any:
    """Apply a product of matrices to rows in several dimensions."""
    *batch, n = x.ty.shape.values
    if len(batch) == 1:
        return multiply(x)
    flat = relax.BlockBuilder().normalize(reshape(x, [product(batch), n]))
    return reshape(multiply(flat), [*batch, outputs])


def _of_images(multiply: HalfRewrite, outputs: int, x: Any) -> Any:
    """Apply a product with matrices of columns to images, whose columns have two dimensions."""
    if x.ty.ndim < 4:
        return multiply(x)
    images, channels, height, width = x.ty.shape.values
    flat = relax.BlockBuilder().normalize(reshape(x, [images, channels, height * width]))
    return reshape(multiply(flat), [images, outputs, height, width])


def half_timers(
    rewritten: Mapping[str, HalfRewrite], x: np.ndarray, expected: np.ndarray, target: Any
) -> tuple[dict[str, Timer], dict[str, str]]:
    """Return timers of candidates that are accurate, each as a model of its own, and reasons against the others.

    Parameters
    ----------
    rewritten : mapping
        From `half_rewrites`.
    x : ndarray
        An operand.
    expected : ndarray
        The exact result.
    target : Target
    """
    norm, timed, refused = float(np.linalg.norm(expected)) or 1.0, {}, {}
    operand = tvm.runtime.tensor(x)
    for name, rewrite in rewritten.items():
        builder, var = relax.BlockBuilder(), relax.Var("x", relax.TensorType(list(x.shape), "float32"))
        with builder.function("main", [var]):
            with builder.dataflow():
                out = builder.emit_output(builder.normalize(rewrite(var)))
            builder.emit_func_output(out)
        run = partial(relax.VirtualMachine(build(builder.get(), target=target), tvm.cpu())["main"], operand)
        error = float(np.linalg.norm(run().numpy() - expected)) / norm
        if error <= TOLERANCES[name.split()[1]]:
            timed[name] = timer_of(run)
        else:
            refused[name] = f"relative error {error:.1e}"
    return timed, refused


UNKNOWN_ROWS = 64  # The assumed number of rows of an input where it is known only at run time.
CALLS = 1_000_000  # The cost of a conversion is divided by this number, since a model is built once.
SECONDS = 0.1  # For timing a kernel.
RTOL = 1e-3


@dataclass(frozen=True)
class Layer:
    """A decision about one product.

    Parameters
    ----------
    name : str
        Name of the variable that is bound to the product.
    operator : {"linear", "spmm", "spmv"}
    shape : tuple of int
        Shape of the weight: outputs and inputs.
    density : float
        Share of elements that are not zero.
    rows : int
        Products of the weight with a vector, for which it was decided.
    is_sparse : bool
    reason : str
    sparse, dense : float, optional
        Seconds of a call in the dtype of the weight.
    way : str
        The candidate that was chosen, such as "sparse" or "dense bfloat16".
    times : mapping of str to float
        Seconds of a call of each candidate that was timed.
    """

    name: str
    operator: str
    shape: tuple[int, int]
    density: float
    rows: int
    is_sparse: bool
    reason: str
    sparse: float | None = None
    dense: float | None = None
    way: str = ""
    times: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        size = f"{self.shape[0]} x {self.shape[1]}"
        storage = self.way or ("sparse" if self.is_sparse else "dense")
        return f"{self.name}: {size}, {self.density:.1%} not zero, {self.rows} rows: {storage}, {self.reason}"


@dataclass(frozen=True)
class ConstantProduct:
    """A product with a constant matrix, and its rewrite to a sparse product."""

    operator: str
    weight: np.ndarray
    rows: int
    x: Any
    rewrite: Callable[[tuple[Any, Any, Any], Any], Any]

    @property
    def density(self) -> float:
        return np.count_nonzero(self.weight) / max(self.weight.size, 1)


def match_constant_product(call: Any, value_of: Callable[[Any], Any], rows: int) -> ConstantProduct | None:
    """Return the product that a call is; None if it is another call or its weight is not known.

    Parameters
    ----------
    call : Expr
    value_of : callable
        Returns the value that a variable is bound to.
    rows : int
        Assumed where the number of rows is not known.
    """
    name = name_of(call)
    if name == dense.MATMUL:
        return _right(call, value_of, rows) or _left(call, value_of, rows)
    return _convolution(call, value_of, rows) if name == "relax.nn.conv2d" else None


def _count(sizes: Any, rows: int) -> int:
    total = product(list(sizes))
    return int(total) if known([total]) else rows


def _is_taken(value: Any) -> bool:
    shape, dtype = value.ty.shape, str(value.ty.dtype.dtype)
    return isinstance(shape, relax.ShapeExpr) and dtype in ("float32", "float64")


def _right(call: ir.Call, value_of: Callable[[Any], Any], rows: int) -> ConstantProduct | None:
    """Match ``x @ W``."""
    x, right = call.args
    weight = dense.weight_of(right, value_of)
    if weight is None or not _is_taken(x) or x.ty.ndim > 6:
        return None
    count = _count(x.ty.shape.values[:-1], rows)
    operator = "linear" if count > 1 else "spmv"
    return ConstantProduct(
        operator, np.ascontiguousarray(weight.T), count, x, lambda csr, x: sparse_call("linear", x, *csr)
    )


def _left(call: ir.Call, value_of: Callable[[Any], Any], rows: int) -> ConstantProduct | None:
    """Match ``W @ x``."""
    left, x = call.args
    weight = dense.weight_of(left, value_of)
    if weight is None or not _is_taken(x) or x.ty.ndim not in (2, 3):
        return None
    count = _count(x.ty.shape.values[-1:], rows)
    return ConstantProduct("spmm", weight, count, x, lambda csr, x: sparse_call("spmm", *csr, x))


def _convolution(call: ir.Call, value_of: Callable[[Any], Any], rows: int) -> ConstantProduct | None:
    """Match a 1 x 1 convolution: ``W @ x`` per image with channels first, ``x @ W^T`` with channels last."""
    (x, right), attrs = call.args, call.attrs
    bound = value_of(right) if isinstance(right, relax.Var) else right
    plain = [int(s) for s in (*attrs.strides, *attrs.dilation)] == [1] * 4 and not any(int(p) for p in attrs.padding)
    if not isinstance(bound, ir.GenericConst) or not _is_taken(x) or not plain or int(attrs.groups) != 1:
        return None
    weight, layouts = bound.value.numpy(), (str(attrs.data_layout), str(attrs.kernel_layout))
    if layouts[0] == "NHWC":
        flat = _last_channels(weight, layouts[1])
        count = _count(x.ty.shape.values[:3], rows)
        return (
            None
            if flat is None
            else ConstantProduct("linear", flat, count, x, lambda m, x: sparse_call("linear", x, *m))
        )
    if layouts != ("NCHW", "OIHW") or weight.shape[2:] != (1, 1):
        return None
    images, channels, height, width = x.ty.shape.values

    def rewrite(csr: tuple[Any, Any, Any], x: Any) -> Any:
        flat = reshape(x, [images, channels, height * width])
        return reshape(sparse_call("spmm", *csr, flat), list(call.ty.shape.values))

    return ConstantProduct("spmm", weight[:, :, 0, 0], _count([height, width], rows), x, rewrite)


def _last_channels(weight: np.ndarray, layout: str) -> np.ndarray | None:
    """Return the matrix of a 1 x 1 kernel in a layout with channels last; None for any other kernel."""
    if layout == "OHWI" and weight.shape[1:3] == (1, 1):
        return np.ascontiguousarray(weight[:, 0, 0])
    return np.ascontiguousarray(weight[0, 0].T) if layout == "HWIO" and weight.shape[:2] == (1, 1) else None


# ------------------------------------------------------------------ deciding


@dataclass(frozen=True)
class Times:
    """Seconds per call of the sparse and the dense kernel, whether their results agree, and of other candidates."""

    sparse: float | None
    dense: float
    agree: bool
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)


def arguments_of(operator: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows that a weight is multiplied with as the dense argument of the operator's program."""
    return {"linear": {"X": x}, "spmv": {"x": x[0]}, "spmm": {"B": np.ascontiguousarray(x.T)}}[operator]


def timed(
    operator: str,
    matrix: sp.csr_array | None,
    weight: np.ndarray,
    rows: int,
    target: Any,
    lower: Mapping[str, HalfRewrite] | None = None,
    sample: np.ndarray | None = None,
) -> Times:
    """Time the sparse and the dense kernel on random rows or a sample, and candidates in other dtypes, in turns.

    Without a `matrix` there is no sparse kernel.
    """
    rng = np.random.default_rng(0)
    dtype = str(weight.dtype)
    x = rng.standard_normal((rows, weight.shape[1])).astype(dtype)
    if sample is not None and sample.size:
        x = np.resize(sample, x.shape).astype(dtype)
    expected = {"linear": x @ weight.T, "spmv": weight @ x[0], "spmm": weight @ x.T}[operator]
    whole, arguments = whole_product(operator, weight, x, target)
    timers: dict[str, Timer] = {"dense": lambda seconds: float(whole.time(seconds=seconds, **arguments).median)}
    agree = True
    if matrix is not None:
        kernel = build_kernel(tunable(operator, dtype, "int32"), target, expected_calls=CALLS).bind(A=matrix)
        operands = arguments_of(operator, x)
        limit = RTOL * float(np.abs(expected).max(initial=1.0))
        agree = np.allclose(kernel(**operands), expected, rtol=RTOL, atol=limit)
        timers["sparse"] = lambda seconds: float(kernel.time(seconds=seconds, **operands).median)
    in_rows = x if operator != "spmm" else arguments_of(operator, x)["B"]
    timers |= half_timers(lower or {}, in_rows, expected, target)[0]
    times = dict(choose(timers, seconds=SECONDS).times)
    return Times(times.pop("sparse", None), times.pop("dense"), bool(agree), times)


def whole_product(operator: str, weight: np.ndarray, x: np.ndarray, target: Any) -> tuple[Any, dict[str, Any]]:
    """Return the dense kernel that the model runs without sparsification, and its arguments."""
    if operator == "spmv":
        program = programs.gemv({"m": weight.shape[0], "n": weight.shape[1]}, str(weight.dtype))
        return build_kernel(program.func, target), {"A": weight, "X": x[0]}
    left, right = (weight, np.ascontiguousarray(x.T)) if operator == "spmm" else (x, np.ascontiguousarray(weight.T))
    rows, inner, columns = left.shape[0], left.shape[1], right.shape[1]
    height, panel = dense.tiling(str(weight.dtype), columns if operator != "spmm" else 0, target)
    sizes = {"m": rows, "n": inner, "feat": columns}
    program = programs.matmul(sizes, str(weight.dtype), height, None, panel)
    arguments: dict[str, Any] = {"A": left, "B": dense.packed(right, panel) if panel else right}
    if panel:
        arguments["io_size"] = -(-rows // height)
    return build_kernel(program.func, target), arguments


@takes_modules
@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.SparsifyWeights")
class SparsifyWeights:
    """A pass that replaces products with constant weights by sparse products where these are faster.

    Parameters
    ----------
    decide : {"measure", "predict"}
        Decide by timing both kernels for a weight and its number of rows, a few tenths of a second for each distinct
        one; or by the density alone, which is quick, deterministic, and less accurate.
    rows : int
        The assumed number of rows where it is known only at run time, such as a batch size.
    most_dense : float
        Weights with a larger share of nonzero elements stay dense; they have dense candidates of the `dtype` alone.
    tune : bool
        Also run `sparsetir.tune_many` on the distinct weights that become sparse.
    max_seconds : float
        Budget of all tuning; trials go to the products with the highest expected gain for the whole model.
    database : str or Path, optional
        File of the tuning records; required with `tune`. Pass the same to `sparsetir.relax.build`.
    target : Target, optional
        This machine by default.
    progress : bool
        Whether to print each decision as it is made.
    dtype : {"float32", "bf16x3", "bfloat16", "int8"}, optional
        The lowest precision that a measured product with a float32 weight may have, those of bfloat16 on targets that
        multiply such numbers; inputs and results keep float32. Default: that of the weight. int8 has a scale for each
        output, and one scale and a zero point for the input.
    examples : sequence, optional
        Arguments of ``main``: arrays, tuples of arguments or dicts of arguments by name. int8 takes the range of inputs
        from all of them, and needs them; accuracy is that for the first one.
    percentile : float
        The share of magnitudes of inputs, in percent, that int8 represents; larger ones are clipped.

    Attributes
    ----------
    layers : list of Layer
        The decision about each product in the modules transformed so far.

    Notes
    -----
    Products of quantized models, ``dequantize`` before and ``quantize`` after them, with constant weights of 8 bits are
    timed as dense products in float32 and as sparse products of integers, whatever the `dtype`; on targets with units
    for integers as dense products of these, too. Without units, products in int32 with such weights become sparse at
    any density up to `most_dense`.

    Examples
    --------
    >>> import numpy as np, sparsetir.relax
    >>> from tvm import relax
    >>> weight = np.zeros((512, 512), "float32")
    >>> weight[::16] = 1
    >>> builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([32, 512], "float32"))
    >>> with builder.function("main", [x]):
    ...     with builder.dataflow():
    ...         out = builder.emit_output(relax.op.matmul(x, relax.const(weight.T)))
    ...     _ = builder.emit_func_output(out)
    >>> sparsify = sparsetir.relax.SparsifyWeights(decide="predict")
    >>> mod = sparsify(builder.get())
    >>> print(sparsify.layers[0])
    gv: 512 x 512, 6.2% not zero, 32 rows: sparse, predicted from the density
    """

    folds = True  # Weights of dense products are constants of float32.

    def __init__(
        self,
        *,
        decide: str = "measure",
        rows: int = UNKNOWN_ROWS,
        most_dense: float = MOST_DENSE,
        tune: bool = False,
        max_seconds: float = 60.0,
        database: str | Path | None = None,
        target: Any = None,
        progress: bool = False,
        dtype: str | None = None,
        examples: Sequence[Any] | None = None,
        percentile: float = 100.0,
    ) -> None:
        if dtype is not None and (not isinstance(dtype, str) or dtype not in HALF_DTYPES):
            names = ", ".join(map(repr, HALF_DTYPES))
            raise ArgumentError(f"dtype: expected one of {names} or None, got {shown(dtype)}. Leave it out.")
        if dtype not in (None, "float32") and decide != "measure":
            fault = f"dtype: expected None with decide='predict', got {shown(dtype)}"
            raise ArgumentError(f"{fault}. Measure, or leave it out.")
        if not isinstance(decide, str) or decide not in ("measure", "predict"):
            raise ArgumentError(f"decide is 'measure' or 'predict', got {shown(decide)}")
        if not (is_real(rows) and is_real(most_dense)) or rows < 1 or not 0 <= most_dense <= 1:
            values = f"{shown(rows)} and {shown(most_dense)}"
            raise ArgumentError(f"rows must be positive and most_dense from 0 to 1, got {values}")
        tune, progress = as_flag(tune, "tune"), as_flag(progress, "progress")
        path = None if database is None else as_path(database, "database", "the path of a file of records")
        if tune and path is None:
            raise ArgumentError("tune needs a database, in which sparsetir.relax.build finds what was tuned")
        self.decide, self.rows, self.most_dense, self.progress = decide, rows, most_dense, progress
        self.tune, self.database = tune, path
        self.max_seconds = as_seconds(max_seconds, "max_seconds", positive=True)
        self.target = cpu_target(target, "models")
        self.dtype = dtype or "float32"
        if not is_real(percentile) or not 0 < percentile <= 100:
            raise ArgumentError(f"percentile: expected a number in (0, 100], got {shown(percentile)}.")
        self.examples, self.percentile = _batches(examples), float(percentile)
        if self.dtype == integer_products.INT8 and not self.examples:
            raise ArgumentError(
                "examples: expected batches with dtype='int8', got none. They give the range of inputs."
            )
        self._calibrations: dict[Any, integer_products.Calibration] = {}
        self.layers: list[Layer] = []
        self._known: dict[tuple[Any, ...], Layer] = {}
        self._matrices: dict[Any, tuple[Any, ...]] = {}
        # The third value counts the products with the weight.
        self._chosen: dict[tuple[Any, ...], tuple[sp.csr_array, Layer, int]] = {}

    def transform_module(self, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        """Return the module with sparse products where they are faster."""
        rewriter = ProductRewriter(mod, self)
        if self.dtype == integer_products.INT8:
            self._calibrations = calibrated(mod, self.examples, self.percentile, self.rows, self.target)
        for var, func in mod.functions.items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(var, rewriter.run(func))
        if self.tune:
            self._tune()
        return rewriter.builder_.get()

    def decided(self, name: str, match: ConstantProduct) -> HalfRewrite | None:
        """Return the rewrite of a product, None for one that stays as it is; record the decision."""
        weight = match.weight
        if weight.size < LEAST_SIZE:
            reason = f"smaller than {LEAST_SIZE:,} elements"
            self._note(Layer(name, match.operator, weight.shape, match.density, match.rows, False, reason))
            return None
        if match.density > self.most_dense and not self._lower(match):
            reason = f"more than {self.most_dense:.0%} of it is not zero"
            self._note(Layer(name, match.operator, weight.shape, match.density, match.rows, False, reason))
            return None
        hashed = hash_arrays("weight", [weight])
        key = (match.operator, hashed, match.rows)
        matrix = sp.csr_array(weight)
        matrix.indptr, matrix.indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
        if key not in self._known:
            self._known[key] = self._judged(name, match, matrix)
        layer = dataclasses.replace(self._known[key], name=name)
        self._note(layer)
        if layer.way and layer.way != "sparse":
            return self._lower(match).get(layer.way)
        if not layer.is_sparse:
            return None
        calls = self._chosen[key][2] if key in self._chosen else 0
        self._chosen[key] = (matrix, layer, calls + 1)
        parts = (matrix.data, matrix.indptr, matrix.indices)
        csr = self._matrices.setdefault(hashed, tuple(constant(part) for part in parts))
        return lambda x: match.rewrite(csr, x)

    def decided_integers(self, name: str, match: integer_products.IntegerProduct) -> tuple[Any, ...] | None:
        """Return the constants of a product with an 8-bit weight, None where it stays; record the decision."""
        weight = match.weight
        layer = Layer(name, match.operator, weight.shape, match.density, match.rows, False, "")
        if weight.size < LEAST_SIZE:
            self._note(dataclasses.replace(layer, reason=f"smaller than {LEAST_SIZE:,} elements"))
            return None
        has_dense = self.decide == "measure" and match.takes_dense(self.target)
        if match.density > self.most_dense and not has_dense:
            self._note(dataclasses.replace(layer, reason=f"more than {self.most_dense:.0%} of it is not zero"))
            return None
        hashed = hash_arrays("weight", [weight])
        key = (match.operator, hashed, match.rows, match.layout.axis, match.layout.is_flat, match.scales is None)
        if key not in self._known:
            self._known[key] = self._judged_integers(layer, match)
        layer = dataclasses.replace(self._known[key], name=name)
        self._note(layer)
        if not layer.way:
            return None
        return self._matrices.setdefault((hashed, layer.way), tuple(map(constant, match.parts(layer.way))))

    def _judged_integers(self, layer: Layer, match: integer_products.IntegerProduct) -> Layer:
        sparse = dataclasses.replace(layer, is_sparse=True, way=integer_products.WAY)
        has_dense = self.decide == "measure" and match.takes_dense(self.target)
        if match.scales is None and not has_dense:  # A plain loop of TVM's, thousands of times slower.
            return dataclasses.replace(sparse, reason="dense products of integers are not optimized")
        if self.decide == "predict":
            is_sparse = match.density <= most_dense(match.matrix)
            return dataclasses.replace(sparse if is_sparse else layer, reason="predicted from the density")
        timers, refused = integer_products.timers(match, self.target, self.most_dense)
        choice = choose(timers, seconds=SECONDS, refused=refused)
        way = "" if choice.name == "dense" else choice.name
        judged = dataclasses.replace(layer, is_sparse=way == sparse.way, way=way, times=choice.times)
        judged = dataclasses.replace(judged, dense=choice.times.get("dense"), sparse=choice.times.get(sparse.way))
        return dataclasses.replace(judged, reason=choice.reason(next(iter(timers))))

    def _lower(self, match: ConstantProduct) -> dict[str, HalfRewrite]:
        """Return the candidates of lower precision; only dense ones of a weight that is too dense."""
        lowest = dense.HALF if self.dtype == integer_products.INT8 else self.dtype
        lower = half_rewrites(match.operator, match.weight, match.x, lowest, self.target)
        calibration = self._calibrations.get(match.x)
        if calibration is not None and match.weight.dtype == np.float32:
            rewrite = integer_products.QuantizedRewrite(match.operator, match.weight, *calibration.quantization)
            lower[rewrite.way] = rewrite
            if match.operator != "spmv" and rewrite.product(match.x).takes_dense(self.target):
                lower[integer_products.DENSE_WAY] = dataclasses.replace(rewrite, way=integer_products.DENSE_WAY)
        if match.density > self.most_dense:
            return {way: rewrite for way, rewrite in lower.items() if way.startswith("dense")}
        return lower

    def _note(self, layer: Layer) -> None:
        self.layers.append(layer)
        if self.progress:
            print(layer, flush=True)

    def _judged(self, name: str, match: ConstantProduct, matrix: sp.csr_array) -> Layer:
        layer = Layer(name, match.operator, match.weight.shape, match.density, match.rows, True, "")
        if self.decide == "predict":
            is_sparse = match.density <= most_dense(matrix)
            return dataclasses.replace(layer, is_sparse=is_sparse, reason="predicted from the density")
        lower = self._lower(match)
        calibration = self._calibrations.get(match.x)
        sample = None if calibration is None else calibration.sample
        csr = matrix if match.density <= self.most_dense else None
        times = timed(match.operator, csr, match.weight, match.rows, self.target, lower, sample)
        sparse = {} if times.sparse is None else {"sparse": times.sparse}
        every = {"dense": times.dense, **sparse, **times.others}
        measured = dataclasses.replace(layer, sparse=times.sparse, dense=times.dense, times=every)
        if not times.agree:
            return dataclasses.replace(measured, is_sparse=False, reason=f"results differ by more than {RTOL}")
        way = fastest(every)
        rivals = sparse or times.others
        rival = way if way not in ("dense", "sparse") or not rivals else min(rivals, key=rivals.__getitem__)
        ratio = f"{every[rival] * 1e6:.0f} us against {times.dense * 1e6:.0f} us"
        return dataclasses.replace(
            measured, is_sparse=way.startswith("sparse"), reason=ratio, way="" if way == "dense" else way
        )

    def _tune(self) -> None:
        """Tune the sparse products, where the expected gain for the whole model is highest."""
        if not self._chosen:
            return
        tasks = []
        for matrix, layer, calls in self._chosen.values():
            operands = arguments_of(layer.operator, np.zeros((layer.rows, matrix.shape[1])))
            shapes = {name: x.shape for name, x in operands.items()}
            tasks.append(dataclasses.replace(task_of(layer.operator, matrix, shapes, calls), name=layer.name))
        tuned = tune_many(tasks, seconds=self.max_seconds, database=self.database)
        if self.progress:
            print(tuned.report(), flush=True)
        self._chosen = {}


def _batches(examples: Any) -> list[Any]:
    if isinstance(examples, (np.ndarray, str, Mapping)) or not isinstance(examples, (Iterable, type(None))):
        raise ArgumentTypeError(f"examples: expected a list of batches, got {type(examples).__name__}. Pass [batch].")
    return [] if examples is None else list(examples)


def calibrated(
    mod: ir.IRModule, examples: Sequence[Any], percentile: float, rows: int, target: Any
) -> dict[Any, integer_products.Calibration]:
    """Return the ranges of the inputs of products with constant matrices in ``main``, by their variables."""
    if "main" not in [str(var.name_hint) for var in mod.functions]:
        raise ArgumentError("mod: expected a function main with dtype='int8', got none. Examples are its arguments.")
    main = mod["main"]
    matches = [match for match in _products_of(main, rows) if isinstance(match.x, relax.Var)]
    if not matches:
        return {}
    plain = relax.transform.ToNonDataflow()(ir.IRModule({"main": main}))["main"]
    inputs = [match.x for match in _products_of(plain, rows) if isinstance(match.x, relax.Var)]
    types = relax.TupleType([x.ty for x in inputs])
    result = relax.Var("inputs", types)
    last = relax.BindingBlock([relax.VarBinding(result, relax.Tuple(inputs))])
    probe = relax.Function(plain.params, relax.SeqExpr([*plain.body.blocks, last], result), types)
    probe = probe.with_attr("global_symbol", "main")
    others = {var: func for var, func in mod.functions.items() if str(var.name_hint) != "main"}
    model = compile_model(ir.IRModule({**others, "main": probe}), target)
    calibrations: dict[Any, integer_products.Calibration] = {}
    for example in examples:
        named, positional = (example, ()) if isinstance(example, Mapping) else ({}, example)
        values = model(*(positional if isinstance(positional, (tuple, list)) else (positional,)), **named)
        for match, value in zip(matches, values, strict=True):
            array = np.asarray(value)
            if match.operator == "spmm":  # Inputs are along the second dimension of images, else the one before last.
                array = np.moveaxis(array, 1 if array.ndim > 2 else 0, -1)
            calibration = calibrations.setdefault(match.x, integer_products.Calibration())
            calibration.note(array.reshape(-1, match.weight.shape[1]), percentile)
    return calibrations


def _products_of(func: relax.Function, rows: int) -> list[ConstantProduct]:
    values = Uses(func).value
    matches = [match_constant_product(value, values.get, rows) for value in values.values()]
    return [match for match in matches if match is not None]


@relax.expr_functor.mutator
class ProductRewriter(relax.PyExprMutator):
    """Mutator that rewrites the products of one module."""

    def __init__(self, mod: ir.IRModule, owner: Any) -> None:
        super().__init__(mod)
        self.owner = owner
        self.values: dict[Any, Any] = {}
        self.users: dict[Any, list[Any]] = {}
        # Results of products whose transposition elementwise operators may move behind themselves.
        self.pending: dict[Any, integer_products.Pending] = {}
        self.changed = False

    def run(self, func: relax.Function) -> relax.Function:
        """Rewrite a function; return it unchanged if no product becomes sparse."""
        uses = Uses(func)
        self.values, self.users, self.pending, self.changed = uses.value, uses.users, {}, False
        new = self.visit_expr(func)
        return relax.analysis.remove_all_unused(new) if self.changed else func

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        integers = integer_products.match_integer_product(binding.value, self.values.get, self.owner.rows)
        if self._takes_integers(binding, integers):
            return
        match = match_constant_product(binding.value, self.values.get, self.owner.rows) if integers is None else None
        rewrite = None if match is None else self.owner.decided(str(binding.var.name), match)
        if match is None or rewrite is None:
            super().visit_var_binding_(binding)
            return
        self.changed = True
        if isinstance(rewrite, integer_products.QuantizedRewrite):
            self._set(binding, self._quantized(match.x, rewrite))
            return
        result = self.builder_.normalize(rewrite(self.visit_expr(match.x)))
        self.set_var_remap(binding.var, emitted(self.builder_, binding.var, result))

    def _quantized(self, x: Any, rewrite: integer_products.QuantizedRewrite) -> integer_products.Pending:
        """Quantize an input, in the kernel of the product before if there is one, and multiply it."""
        emit, new = self.builder_.emit, self.visit_expr(x)
        match, call = rewrite.product(new), self.builder_.normalize(rewrite.quantize(new))
        is_only_use = isinstance(x, relax.Var) and len(self.users.get(x, ())) == 1
        before, inner = self.pending.get(new) if is_only_use else None, None
        if before is not None:
            inner = integer_products.moved(call, new, before, emit)
        if before is None or inner is None:
            operand, shift = match.columns(emit(call), emit)
        elif before.layout.transposes and match.layout.transposes:
            operand, shift = inner, 0
        else:
            operand, shift = match.columns(emit(before.layout.whole(inner, emit)), emit)
        parts = tuple(map(constant, match.parts(rewrite.way)))
        return integer_products.Pending(match.multiply(parts, operand, shift, emit), match.layout)

    def _takes_integers(self, binding: relax.VarBinding, match: integer_products.IntegerProduct | None) -> bool:
        """Rewrite a product with an 8-bit weight, or an elementwise operator that follows one."""
        pending = self._followed(binding.value)
        if pending is None:
            if match is None:
                return False
            parts = self.owner.decided_integers(str(binding.var.name), match)
            if parts is None:
                return match.scales is not None and self._folded(binding, match)
            pending = self._multiplied(match, parts)
        self.changed = True
        self._set(binding, pending)
        return True

    def _set(self, binding: relax.VarBinding, pending: integer_products.Pending) -> None:
        whole = self.builder_.normalize(pending.layout.whole(pending.inner, self.builder_.emit))
        result = emitted(self.builder_, binding.var, whole)
        self.pending[result] = pending
        self.set_var_remap(binding.var, result)

    def _folded(self, binding: relax.VarBinding, match: integer_products.IntegerProduct) -> bool:
        """Keep a dense product, with its weight as a constant of float32, which TVM would compute in each call."""
        if not self.owner.folds:
            return False
        operand = self.visit_expr(binding.value.args[1 if match.layout.axis == -2 else 0])
        product = self.builder_.normalize(integer_products.with_constant(match, operand))
        self.set_var_remap(binding.var, emitted(self.builder_, binding.var, product))
        self.changed = True
        return True

    def _multiplied(self, match: integer_products.IntegerProduct, parts: tuple[Any, ...]) -> integer_products.Pending:
        product_input = match.input
        operands = {name: self.visit_expr(part) for name, part in product_input.parts.items()}
        match = dataclasses.replace(match, input=dataclasses.replace(product_input, **operands))
        before = self.pending.get(match.input.x)
        both = (
            before is not None and before.layout.transposes and match.layout.transposes and product_input.shape is None
        )
        operand, shift = match.columns(match.input.x, self.builder_.emit, before.inner if both and before else None)
        return integer_products.Pending(match.multiply(parts, operand, shift, self.builder_.emit), match.layout)

    def _followed(self, call: Any) -> integer_products.Pending | None:
        """Return the result of an elementwise call on a pending result that has no other use."""
        if not isinstance(call, ir.Call) or not isinstance(call.ty, relax.TensorType):
            return None
        for arg in call.args:
            is_only_use = isinstance(arg, relax.Var) and len(self.users.get(arg, ())) == 1
            pending = self.pending.get(self.visit_expr(arg)) if is_only_use else None
            if pending is not None:
                inner = integer_products.moved(call, arg, pending, self.builder_.emit)
                return None if inner is None else integer_products.Pending(inner, pending.layout)
        return None


__all__ = ["ConstantProduct", "Layer", "SparsifyWeights", "match_constant_product", "timed"]
