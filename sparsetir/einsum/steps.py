# SPDX-License-Identifier: Apache-2.0
"""Steps of an expression: kernels, products of dense arrays, elementwise steps, and products under masks."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir import interop, ops
from sparsetir.build import build
from sparsetir.einsum.emit import ContractionNest, EmittedProgram, Operand, program
from sparsetir.einsum.operands import Layout, diagonal, full_root, root_axis, rows, tree_of
from sparsetir.errors import ArgumentError, OffsetError
from sparsetir.formats.canonical import add_duplicates, compressed_rows
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import HALVES, CooTensor, as_numpy, compressed_of, is_sparse, is_torch, recast, to_torch
from sparsetir.runtime.call_plan import make_call_key
from sparsetir.runtime.kernel import Kernel
from sparsetir.sparse_output import AccumulatorOptions
from sparsetir.sparse_output.blocks import assembled_kernel
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.sparse_output.result import write_coordinates
from sparsetir.utils.arguments import dtype_name
from sparsetir.utils.caches import cached_property, remember
from sparsetir.utils.memory import uncollected


class EvaluationStep:
    """Computation of one value from others.

    Parameters
    ----------
    members : tuple of int
        Numbers of the values that it takes.
    """

    members: tuple[int, ...]

    def __call__(self, values: Sequence[Any]) -> Any:
        """Compute the value; `values` are those of the members."""
        raise NotImplementedError

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        """Bind some of the operands, by their position, with layouts converted once."""
        raise NotImplementedError

    def script(self) -> str:
        """Return the computation as text."""
        raise NotImplementedError

    def apart(self) -> EvaluationStep:
        """Return a step that does the same and is tuned separately."""
        return copy.copy(self)


class DenseStep(EvaluationStep):
    """Product of dense arrays, computed by numpy."""

    def __init__(self, members: tuple[int, ...], letters: Sequence[str], output: str) -> None:
        self.members, self.letters, self.output = members, tuple(letters), output
        self.text = f"{','.join(letters)}->{output}"

    def __call__(self, values: Sequence[Any]) -> Any:
        arrays = [as_numpy(value, f"operand {n}")[0] for n, value in enumerate(values)]
        dtype = arrays[0].dtype.newbyteorder("=")
        if dtype.name in HALVES:
            arrays = [array.astype(np.float32) for array in arrays]
        product = np.asarray(self._contract(arrays)).astype(dtype, copy=False)
        return to_torch(product) if any(is_torch(value) for value in values) else product

    def _contract(self, arrays: Sequence[np.ndarray]) -> Any:
        """Sum products of floats in numpy's order only where the order cannot decide about infinities and NaN."""
        dims = {(c, n) for a, t in zip(arrays, self.letters, strict=True) for c, n in zip(t, a.shape, strict=True)}
        extents = dict(dims)
        if len(dims) == len(extents) and 0 in extents.values():  # numpy reads an element of empty arrays
            return np.zeros([extents[c] for c in self.output], np.result_type(*arrays))
        factored = {other for at in self._summed_alone for other in range(len(arrays)) if other != at}
        factored = set(range(len(arrays))) if len(arrays) > 2 else factored
        if all(arrays[at].dtype.kind not in "fc" or np.isfinite(arrays[at]).all() for at in factored):
            return np.einsum(self.text, *arrays, optimize=True)
        summed = [c for c in dict.fromkeys("".join(self.letters)) if c not in self.output]
        space = [*self.output, *summed]
        with np.errstate(all="ignore"):
            return _sum_products([_spread(a, t, space) for a, t in zip(arrays, self.letters, strict=True)], len(summed))

    @cached_property
    def _summed_alone(self) -> list[int]:
        """Operands with a letter of their own that is summed: numpy sums it before it multiplies."""
        terms = [*self.letters, self.output]
        return [
            at
            for at, term in enumerate(self.letters)
            if any(not any(c in other for n, other in enumerate(terms) if n != at) for c in term)
        ]

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        return self

    def script(self) -> str:
        return f"# numpy.einsum({self.text!r}, ...) of dense arrays\n"


MAX_PRODUCTS = 1 << 22  # elements of a buffer of products


def _spread(array: np.ndarray, letters: str, space: Sequence[str]) -> np.ndarray:
    """Return a view with a dimension for each letter of the space, of length 1 where the operand lacks the letter."""
    extents = dict(zip(letters, array.shape, strict=True))
    moved = array.transpose([letters.index(c) for c in space if c in extents])
    return moved.reshape([extents.get(c, 1) for c in space])


def _sum_products(factors: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Multiply the factors at every point, then sum the last `count` dimensions; large spaces are halved."""
    shape = np.broadcast_shapes(*(f.shape for f in factors))
    if math.prod(shape) <= MAX_PRODUCTS:
        product = functools.reduce(np.multiply, factors)
        return np.asarray(product.sum(axis=tuple(range(len(shape) - count, len(shape))), dtype=product.dtype))
    axis = int(np.argmax(shape))
    parts = []
    for half in np.array_split(np.arange(shape[axis]), 2):
        cut = (slice(None),) * axis + (slice(half[0], half[-1] + 1),)
        parts.append(_sum_products([f if f.shape[axis] == 1 else f[cut] for f in factors], count))
    return np.concatenate(parts, axis) if axis < len(shape) - count else parts[0] + parts[1]


class KernelStep(EvaluationStep):
    """Contraction by its own kernel.

    Parameters
    ----------
    members : tuple of int
    nest : ContractionNest
    name : str
        Name of the program.

    Attributes
    ----------
    asked, written, nest : ContractionNest
        As in the expression; with dense operands in the order of the program; and that with canonical letters: all
        contractions of the same form share a kernel.
    tuned : Kernel, optional
        The kernel that a search chose.
    """

    tuned: Any = None

    def __init__(self, members: tuple[int, ...], nest: ContractionNest, name: str = "einsum") -> None:
        self.members, self.asked, self.written, self.name = members, nest, nest.in_vectors, name
        self.nest = renamed(self.written)
        self.layouts = [operand.layout for operand in nest.operands]
        source = nest.operands[nest.pattern] if nest.pattern is not None else None
        self.is_prefix = source is not None and len(nest.output) < len(source.letters)

    @cached_property
    def program(self) -> EmittedProgram:
        return program(self.nest, self.name)

    @property
    def kernel(self) -> Any:
        """The kernel, which takes operands in the order of the expression."""
        return (
            self.compiled if self.written is self.asked else ReorderingKernel(self.compiled, self._orders, self._back)
        )

    @property
    def compiled(self) -> Any:
        """The kernel of the program."""
        return self._baseline if self.tuned is None else self.tuned

    @cached_property
    def _orders(self) -> dict[str, tuple[int, ...]]:
        """The order of dimensions in which the program takes operands, where that is another one."""
        letters = zip(self.program.buffers, self.asked.operands, self.written.operands, strict=True)
        return {
            name: tuple(asked.letters.index(c) for c in written.letters)
            for name, asked, written in letters
            if asked.letters != written.letters
        }

    @cached_property
    def _back(self) -> tuple[int, ...]:
        return tuple(self.written.output.index(c) for c in self.asked.output)

    def reordered(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the compiled kernel."""
        return _reordered(arguments, self._orders)

    @cached_property
    def _baseline(self) -> Any:
        """The untuned kernel, shared by all steps of this form."""
        return _kernel(self.nest, self.name)

    def script(self) -> str:
        return _printed(program(self.written, self.name)) if self.tuned is None else str(self.tuned.script())

    # -------------------------------------------------------------- calls

    def called(self, values: Sequence[Any]) -> tuple[KernelStep, dict[str, Any]]:
        """Return the step whose kernel is called for such values, and its arguments."""
        return self, self.arguments([self.tree(at, value) for at, value in enumerate(values)])

    def arguments(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the kernel's arguments by name."""
        merged: dict[str, Any] = {}
        for at, value in enumerate(values):
            merged |= self.argument(at, value)
        return merged

    def argument(self, at: int, value: Any) -> dict[str, Any]:
        """Return the kernel's arguments for one operand."""
        layout = self.layouts[at]
        if layout is not None and layout.held:
            return self._held(at, layout, value)
        if layout is not None and self.nest.assembled:
            value = in_order(value, layout)
        if layout is None and value.ndim == 0:
            value = value.reshape(1)
        return {self.program.buffers[at]: value}

    def _held(self, at: int, layout: Layout, value: SparseTensor) -> dict[str, Any]:
        """Return the arrays of a tensor without conversion."""
        names, (piece,) = self.program, value.pieces
        axes = sorted(piece.rule.buffer.axes, key=lambda axis: len(axis.ancestors))
        arrays: dict[str, Any] = {names.values[at]: piece.values}
        for depth, array_names in names.arrays[at].items():
            for name, array in zip(array_names, (axes[depth].indptr, axes[depth].indices), strict=True):
                if name and array is not None:
                    arrays[name] = piece.arrays[str(array.name)].astype(self.nest.idtype, copy=False)
        if layout.levels[0].kind == "dense" and axes[0].indices is not None:
            starts, root = names.arrays[at][1][0], layout.levels[0].dim
            arrays[starts] = full_root(root_axis(value), arrays[starts], value.shape[root])
        letters = self.nest.operands[at].letters
        return arrays | {names.sizes[c]: n for c, n in zip(letters, value.shape, strict=True)}

    def __call__(self, values: Sequence[Any]) -> Any:
        trees = self._as_trees(values)
        try:
            return self.finished(self.kernel(**self.arguments(trees)), trees)
        except OffsetError:
            return self.widened(values)

    def widened(self, values: Sequence[Any]) -> Any:
        """Compute the result by a kernel with 64-bit offsets, for more elements than 32 bits count.

        Raises
        ------
        OffsetError
            This kernel has 64-bit offsets already.
        """
        if self.nest.idtype == "int64" or self.tuned is not None:
            raise
        return KernelStep(self.members, replace(self.asked, idtype="int64"), self.name)(values)

    def _as_trees(self, values: Sequence[Any]) -> Sequence[Any]:
        """Convert operands to tensors if a layout requires their arrays."""
        if not any(layout is not None and layout.held for layout in self.layouts):
            return values
        return [self.tree(at, value) for at, value in enumerate(values)]

    def finished(self, returned: Any, values: Sequence[Any]) -> Any:
        """Convert the result of the kernel to that of the step."""
        at = self.nest.pattern
        if at is None:
            return returned if self.nest.output else returned[0]
        layout = self.layouts[at]
        if layout is None or not layout.held:
            return returned
        array = as_numpy(returned, "the result")[0]
        return self._first_levels(values[at], array) if self.is_prefix else values[at].with_values([array])

    def _first_levels(self, tensor: SparseTensor, values: Any) -> CooTensor:
        """Return values over the first levels of a tensor, with the coordinates of those."""
        assert self.nest.pattern is not None
        operand = self.nest.operands[self.nest.pattern]
        coords = dict(zip(operand.path, level_coords(tensor, len(self.nest.output)), strict=False))
        shape = dict(zip(operand.letters, tensor.shape, strict=True))
        output = self.nest.output
        stacked = np.stack([coords[c] for c in output]).astype(tensor.idtype, copy=False)
        return CooTensor(stacked, values, tuple(shape[c] for c in output))

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        bound_arguments: dict[str, Any] = {}
        trees = {at: self.tree(at, value) for at, value in fixed.items()}
        for at, value in trees.items():
            bound_arguments |= self.argument(at, value)
        bound = self.kernel.bind(**bound_arguments)
        buffers, open_ = self.program.buffers, [n for n in range(len(self.layouts)) if n not in fixed]
        is_plain = all(self.layouts[n] is None for n in open_) and self.nest.pattern is None and self.nest.output
        if is_plain and all(self.nest.operands[n].letters for n in open_):
            return lambda values: bound(**{buffers[n]: values[n] for n in open_})
        return lambda values: self._call_bound(bound, bound_arguments, trees, values)

    def _call_bound(
        self, bound: Any, bound_arguments: Mapping[str, Any], trees: Mapping[int, Any], values: Sequence[Any]
    ) -> Any:
        values = [trees[n] if n in trees else self.tree(n, value) for n, value in enumerate(values)]
        arguments: dict[str, Any] = {}
        for n in range(len(values)):
            if n not in trees:
                arguments |= self._fitting(bound_arguments, self.argument(n, values[n]))
        return self.finished(bound(**arguments), values)

    def _fitting(self, bound_arguments: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check arguments against the sizes of fixed operands, and return the ones that are not fixed."""
        for name in (n for n in arguments if n in bound_arguments):
            if arguments[name] != bound_arguments[name]:
                letter = next(c for c, size in self.program.sizes.items() if size == name)
                mismatch = (
                    f"{letter!r} is {bound_arguments[name]} in the fixed operands and {arguments[name]} in the others"
                )
                raise ArgumentError(f"the extents of one letter are equal: {mismatch}")
        return {n: value for n, value in arguments.items() if n not in bound_arguments}

    def tree(self, at: int, value: Any) -> Any:
        layout, operand = self.layouts[at], self.nest.operands[at]
        if layout is None or not layout.held:
            return value
        if operand.given:
            value = diagonal(value, operand.given, operand.letters)
        return tree_of(value, layout, layout.order if self.nest.assembled else ())


class ReorderingKernel:
    """A kernel that takes dense operands, and returns its result, with dimensions in another order than its program.

    Parameters
    ----------
    kernel : Kernel or BoundKernel
    orders : mapping of str to tuple of int
        The dimensions of an operand in the order of the program.
    back : tuple of int
        The dimensions of the program's result in the order of the one that is returned, which is a view, but of torch.
    """

    def __init__(self, kernel: Any, orders: Mapping[str, Sequence[int]], back: Sequence[int]) -> None:
        self.kernel, self.orders, self.back = kernel, orders, back

    def __call__(self, **arguments: Any) -> Any:
        return self.call_inspected(None, arguments)

    def call_inspected(self, _seen: Any, arguments: dict[str, Any]) -> Any:
        """Run the kernel on arguments whose call key, which another order changes, was made before."""
        for name, order in self.orders.items():
            if (value := arguments.get(name)) is not None:
                is_array = type(value) is np.ndarray  # sooner than a function finds it
                arguments[name] = value.transpose(order) if is_array else transposed(value, order)
        kernel = self.kernel
        is_bound = not isinstance(kernel, Kernel)
        result = kernel(**arguments) if is_bound else kernel.call_inspected(make_call_key(arguments), arguments)
        return result.transpose(self.back) if type(result) is np.ndarray else transposed(result, self.back).contiguous()

    def bind(self, **fixed: Any) -> ReorderingKernel:
        return ReorderingKernel(self.kernel.bind(**_reordered(fixed, self.orders)), self.orders, self.back)


def _reordered(arguments: Mapping[str, Any], orders: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    return {name: transposed(value, orders[name]) if name in orders else value for name, value in arguments.items()}


LETTERS = "ijklmnopqrstuvwxyzabcdefgh"


def renamed(nest: ContractionNest) -> ContractionNest:
    """Rename the letters of a contraction to canonical ones, so that those that differ in letters alone are equal."""
    letters = nest.letters
    if len(letters) > len(LETTERS):
        return nest
    new = str.maketrans(dict(zip(letters, LETTERS, strict=False)))
    operands = tuple(
        replace(operand, letters=operand.letters.translate(new), given=operand.given.translate(new))
        for operand in nest.operands
    )
    return replace(nest, operands=operands, output=nest.output.translate(new), walk=nest.walk.translate(new))


@remember("kernels of einsum", 256)
@uncollected
def _kernel(nest: ContractionNest, name: str) -> Any:
    return build(program(nest, name).func)


def _printed(program: EmittedProgram) -> str:
    from sparsetir.script.printer import script

    return script(program.func)


def level_coords(tensor: SparseTensor, depth: int) -> list[Any]:
    """Return the coordinates of the positions of a level, one array for each level down to it."""
    (piece,) = tensor.pieces
    axes = sorted(piece.rule.buffer.axes, key=lambda axis: len(axis.ancestors))[:depth]
    dims = {group[0]: d for d, group in piece.rule.axis_map.items()}
    coords: list[Any] = []
    count = 1
    for axis in axes:
        indptr = None if axis.indptr is None else piece.arrays[str(axis.indptr.name)]
        indices = None if axis.indices is None else piece.arrays[str(axis.indices.name)]
        length = tensor.shape[dims[axis.name]]
        sizes = np.diff(indptr) if indptr is not None else np.full(count, 1 if indices is not None else length)
        level_indices = np.tile(np.arange(length), count) if indices is None else indices
        coords = [np.repeat(c, sizes) for c in coords] + [level_indices.astype(np.int64, copy=False)]
        count = len(level_indices)
    return coords


def in_order(value: Any, layout: Layout) -> Any:
    """Return a sparse matrix in the storage order that a program with computed patterns reads."""
    if layout.transposed:
        value = transposed(value.to_scipy() if isinstance(value, SparseTensor) else value, (1, 0))
    if isinstance(value, SparseTensor):
        return value.to_scipy("csr" if layout.order == (0, 1) else "csc", copy=False)
    is_compressed = "sparse_cs" in str(value.layout) if is_torch(value) else getattr(value, "format", "") == "csc"
    return value if is_compressed else compressed_rows(value)


# ------------------------------------------------------------------ results


def transposed(value: Any, order: Sequence[int]) -> Any:
    """Return a value with its dimensions in another order."""
    if list(order) == list(range(len(order))):
        return value
    if sp.issparse(value):
        return interop.transposed(value, order)
    if isinstance(value, SparseTensor):
        if (matrix := value.scipy_matrix) is not None:
            return SparseTensor.from_any(matrix.T.tocsr(copy=True), "csr", idtype=value.idtype, check=False)
        return SparseTensor.from_any(transposed(value.to_coo(), order))
    if isinstance(value, CooTensor):
        return CooTensor(value.coords[list(order)], value.values, tuple(value.shape[d] for d in order))
    if is_torch(value):
        if is_sparse(value) and value.dense_dim() > 0:  # torch cannot permute dense dimensions of sparse tensors
            value = SparseTensor.from_any(value, "coo").to_torch()
        return value.transpose(0, 1) if len(order) == 2 else value.permute(*order)
    return value.transpose(*order)


def classed(value: Any, family: str) -> Any:
    """Convert a `CooTensor` to the class of the operands."""
    if not isinstance(value, CooTensor) or family == "coo":
        return value
    tensor = SparseTensor.from_any(value)
    if family == "torch":
        return tensor.convert("coo").to_torch()
    return tensor


def classed_pattern(value: Any, family: str) -> Any:
    """Convert a kernel's result with a computed pattern to the class of the operands."""
    if family == "torch" and not is_torch(value):
        tensor = SparseTensor.from_any(value)
        return (tensor if tensor.ndim == 2 else tensor.convert("coo")).to_torch()
    if family == "coo":
        return value if isinstance(value, CooTensor) else SparseTensor.from_any(value).to_coo()
    return SparseTensor.from_any(value) if family == "tensor" or isinstance(value, CooTensor) else value


def cast(value: Any, dtype: str) -> Any:
    """Convert a value to another dtype; duplicates are added up before, in their own dtype."""
    value = add_duplicates(value) if is_sparse(value) else value
    if isinstance(value, SparseTensor):
        return value.with_values([piece.values.astype(dtype) for piece in value.pieces])
    if isinstance(value, CooTensor):
        return value.with_values(value.values.astype(dtype))
    if is_torch(value):
        import torch

        return value.to(getattr(torch, dtype))
    return recast(value, array_dtype(dtype)) if sp.issparse(value) else value.astype(array_dtype(dtype))


def array_dtype(dtype: str) -> Any:
    """Return a dtype as numpy takes it."""
    if dtype != "bfloat16":
        return dtype
    import ml_dtypes

    return ml_dtypes.bfloat16


# ----------------------------------------------------------------------------------- elementwise steps


# Elementwise sums and products of tensors: their rows are merged as those of matrices.
#
# The dimensions after the first are flattened to one, so that the program is that of two matrices, whatever the order
# of the tensors is.


MOST_ROWS = 1 << 22  # above, a whole tensor is one row: its row pointers would be longer than most lists of entries
LARGEST = {"int32": 2**31 - 1, "int64": 2**63 - 1}


class FlatStep(KernelStep):
    """Elementwise step over sparse tensors of one dimension or of more than two.

    Parameters
    ----------
    members : tuple of int
    letters : sequence of str
        Letters of the operands; the result has them in the order of `nest.output`, which is that of the tensors.
    output : str
    nest : ContractionNest
        The operation on two or more matrices.
    """

    def __init__(self, members: tuple[int, ...], letters: Sequence[str], output: str, nest: ContractionNest) -> None:
        super().__init__(members, matrices(nest))
        self.letters, self.output = tuple(letters), output
        self.wide: KernelStep = self
        if nest.idtype != "int64":
            self.wide = KernelStep(members, replace(self.nest, idtype="int64"))

    def __call__(self, values: Sequence[Any]) -> Any:
        return self._merged([self.flat(at, value) for at, value in enumerate(values)], self.shape(values))

    def called(self, values: Sequence[Any]) -> tuple[KernelStep, dict[str, Any]]:
        flat = [self.flat(at, value) for at, value in enumerate(values)]
        return self._fitting_step(flat), self.arguments(flat)

    def apart(self) -> FlatStep:
        copied = copy.copy(self)
        copied.wide = copied if self.wide is self else copy.copy(self.wide)
        return copied

    def _fitting_step(self, flat: Sequence[Any]) -> KernelStep:
        """Return the step for the index type of the matrices."""
        return self if flat[0].indices.dtype == np.int32 else self.wide

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        fixed_flat = {at: self.flat(at, value) for at, value in fixed.items()}

        def call(values: Sequence[Any]) -> Any:
            flat = [fixed_flat[at] if at in fixed_flat else self.flat(at, value) for at, value in enumerate(values)]
            return self._merged(flat, self.shape(values))

        return call

    def shape(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the shape of the result."""
        return tuple(values[0].shape[self.letters[0].index(c)] for c in self.output)

    def flat(self, at: int, value: Any) -> sp.csr_array:
        """Convert an operand to a matrix."""
        dims = [self.letters[at].index(c) for c in self.output]
        tensor = value if isinstance(value, SparseTensor) else SparseTensor.from_any(value)
        return matrix(tensor, dims)

    def _merged(self, flat: Sequence[Any], shape: tuple[int, ...]) -> CooTensor:
        if any(m.shape != flat[0].shape for m in flat):
            raise ArgumentError(f"tensors that are joined element by element have one shape, got one of {shape}")
        return tensor(KernelStep.__call__(self._fitting_step(flat), flat), shape)


def matrices(nest: ContractionNest) -> ContractionNest:
    """Return the step over matrices by rows."""
    operand = Operand("ij", Layout(rows(2), nest.idtype))
    return replace(nest, operands=(operand,) * len(nest.operands), output="ij", assembled=True)


def first_numbered(shape: Sequence[int]) -> int:
    """Return the first flattened dimension: 1, or 0 if the tensor becomes one row."""
    return int(len(shape) > 1 and (shape[0] <= MOST_ROWS or math.prod(shape) > LARGEST["int64"]))


def matrix(tensor: SparseTensor, dims: Sequence[int]) -> sp.csr_array:
    """Flatten a tensor to a matrix, with its dimensions in the order `dims`."""
    shape, coords, values = [tensor.shape[d] for d in dims], [tensor.coords[d] for d in dims], tensor.values
    first = first_numbered(shape)
    count, width = math.prod(shape[:first]), math.prod(shape[first:])
    if width > LARGEST["int64"]:
        raise ArgumentError(f"the elements of a tensor of shape {tuple(shape)} cannot be numbered in 64 bits")
    key = np.zeros(len(values), np.int64)
    for d in range(first, len(shape)):
        key = key * shape[d] + coords[d]
    if list(dims) != sorted(dims):
        by = np.lexsort((key, coords[0]))
        key, values = key[by], values[by]
    dtype = "int32" if max(width, len(key)) <= LARGEST["int32"] else "int64"
    counts = np.bincount(coords[0], minlength=count) if first else np.array([len(key)])
    starts = np.concatenate(([0], np.cumsum(counts))).astype(dtype)
    csr: sp.csr_array = compressed_of(sp.csr_array, starts, key.astype(dtype, copy=False), values, (count, width))
    return csr


def tensor(csr: Any, shape: Sequence[int]) -> CooTensor:
    """Restore the tensor from a flattened matrix."""
    first = first_numbered(shape)
    narrow = np.int32 if max(*shape, csr.nnz, 0) <= LARGEST["int32"] else np.int64
    coords = np.empty((len(shape), csr.nnz), narrow)
    if first:
        coords[0] = np.repeat(np.arange(shape[0], dtype=narrow), np.diff(csr.indptr))
    write_coordinates(coords, csr.indices, shape, first)
    return CooTensor(coords, csr.data, tuple(shape))


# Masked product: three matrices whose letters form a triangle, one of which masks the product of the others.
#
# ``S[i, j] * A[i, k] * B[k, j]``, summed over k or over all letters, is a product under a mask: rows of B are added
# up in the order of a row of S. A loop over S would search each of its columns in every row of B.


SEARCHED = 6  # products in the time of a search


class Roles(NamedTuple):
    """The operands that are mask and factors, and which of the three are transposed."""

    mask: int
    first: int
    second: int
    transposed: tuple[bool, bool, bool]


def roles(terms: Sequence[str], pattern: int | None) -> Roles | None:
    """Assign roles to three operands whose letters form a triangle; the mask is that of the pattern, if there is one.

    Examples
    --------
    >>> roles(["ij", "ik", "kj"], 0)
    Roles(mask=0, first=1, second=2, transposed=(False, False, False))
    >>> roles(["ij", "jk", "ki"], None)  # B @ C under the transpose of A
    Roles(mask=0, first=1, second=2, transposed=(True, False, False))
    """
    if len(terms) != 3 or any(len(set(term)) != 2 or len(term) != 2 for term in terms):
        return None
    candidates: list[Roles] = []
    for mask, first, second in permutations(range(3)):
        for row, column in permutations(terms[mask]):
            inner = terms[first].replace(row, "")
            if len(inner) != 1 or set(terms[second]) != {inner, column}:
                continue
            expected = (row + column, row + inner, inner + column)
            flipped = tuple(terms[n] != w for n, w in zip((mask, first, second), expected, strict=True))
            candidates.append(Roles(mask, first, second, flipped))  # type: ignore[arg-type]
    suited = [r for r in candidates if pattern is None or (r.mask == pattern and not r.transposed[0])]
    return min(suited, key=lambda r: (sum(r.transposed), r), default=None)


def pays(roles: Roles, stored: Sequence[float | None], sizes: Sequence[tuple[int, int]]) -> bool:
    """Return whether the products take less work than searching the entries of the mask one by one."""
    mask, first, second = (stored[n] or 0.0 for n in roles[:3])
    rows, inner = sizes[roles.first][:: -1 if roles.transposed[1] else 1]
    products = first * second / max(inner, 1)
    return products < SEARCHED * mask * first / max(rows, 1) + mask


class MaskedStep(EvaluationStep):
    """Product under a mask.

    Parameters
    ----------
    nested : KernelStep
        The same contraction as one loop nest over the mask, for masks whose pattern is kept and is not in sorted rows.
    roles : Roles
    """

    def __init__(self, nested: KernelStep, roles: Roles) -> None:
        self.members, self.nested, self.roles = nested.members, nested, roles
        self.keeps = bool(nested.nest.output)

    def __call__(self, values: Sequence[Any]) -> Any:
        return self.made(values, [self.laid(place, values) for place in (1, 2)])

    def laid(self, place: int, values: Sequence[Any] | Mapping[int, Any]) -> Any:
        """Return the mask or a factor in compressed rows."""
        value = values[self.roles[:3][place]]
        return compressed_rows(interop.transposed(value, (1, 0)) if self.roles.transposed[place] else value)

    def made(self, values: Sequence[Any], factors: Sequence[Any]) -> Any:
        """Compute the result from the operands and the converted factors."""
        if self.keeps and values[self.roles.mask].format != "csr":
            return self.nested(values)
        mask_matrix = self.laid(0, values)
        interop.open_source(mask_matrix, "the mask").check("the mask")
        mask = _ones_at(mask_matrix)
        if not mask.has_canonical_format:
            if self.keeps:
                return self.nested(values)
            mask_matrix = mask_matrix.copy()
            mask_matrix.has_canonical_format = False
            mask_matrix.sum_duplicates()
            mask = _ones_at(mask_matrix)
        wide = any(m.indices.dtype == np.int64 for m in (mask, *factors))
        sums = _elementwise_kernel(dtype_name(mask_matrix.dtype), "int64" if wide else "int32")(
            A=factors[0], B=factors[1], M=mask
        ).data
        # The mask is too wide for a table of columns, or infinity and NaN would be multiplied by products that are
        # not stored.
        if len(sums) != len(mask_matrix.data) or not np.isfinite(mask_matrix.data).all():
            return self.nested(values)
        if not self.keeps:
            return np.dot(mask_matrix.data, sums)
        # The result has the class of the mask, and its own index arrays.
        return type(mask_matrix)(
            (mask_matrix.data * sums, mask_matrix.indices.copy(), mask_matrix.indptr.copy()), shape=mask_matrix.shape
        )

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        fixed_factors = {place: self.laid(place, fixed) for place in (1, 2) if self.roles[:3][place] in fixed}
        return lambda values: self.made(
            values, [fixed_factors[place] if place in fixed_factors else self.laid(place, values) for place in (1, 2)]
        )

    def script(self) -> str:
        from sparsetir.script.printer import script

        return script(ops.masked_spgemm(self.nested.nest.dtype, idtype="int32"))


def _ones_at(matrix: Any) -> sp.csr_array:
    """Return a mask of the entries of a matrix in compressed rows."""
    return sp.csr_array((np.ones(len(matrix.data), np.bool_), matrix.indices, matrix.indptr), shape=matrix.shape)


@cache
def _elementwise_kernel(dtype: str, idtype: str) -> SparseOutputKernel:
    return assembled_kernel(ops.masked_spgemm(dtype, idtype=idtype), None, AccumulatorOptions(whole=True))


__all__ = [
    "DenseStep",
    "EvaluationStep",
    "FlatStep",
    "KernelStep",
    "MaskedStep",
    "Roles",
    "array_dtype",
    "cast",
    "classed",
    "classed_pattern",
    "is_sparse",
    "level_coords",
    "pays",
    "roles",
    "transposed",
]
