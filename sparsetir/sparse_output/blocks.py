# SPDX-License-Identifier: Apache-2.0
"""Block products: multiply matrices that consist of full dense blocks block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.codegen.cache import Compiled, write_one
from sparsetir.codegen.target import make_target
from sparsetir.errors import LoweringError
from sparsetir.ir.rewriting import collect
from sparsetir.ir.sizes import Size
from sparsetir.ir.views import Axis, Program, SparseBuffer, SpIter, decode
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower import single
from sparsetir.ops import sparse_output
from sparsetir.runtime.signature import LARGEST_INT32, Arguments
from sparsetir.sparse_output import AccumulatorOptions, Accumulators, AssembledCompiled
from sparsetir.sparse_output.functions import compiled_functions
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.sparse_output.result import OfPatterns, ResultPattern
from sparsetir.utils.caches import cached_property
from sparsetir.utils.memory import uncollected

# A product of two matrices, rewritten as a product of block matrices.


Block = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class BlockProduct:
    """A program that multiplies two matrices in the form of `sparsetir.ops.spgemm`, over any semiring.

    Parameters
    ----------
    left, right, result : SparseBuffer
    value : Expr
        The value that its one statement stores.
    initial : Expr
        The initial value of an element.
    """

    left: SparseBuffer
    right: SparseBuffer
    result: SparseBuffer
    value: ir.Expr
    initial: ir.Expr

    @classmethod
    def of(cls, program: Program) -> BlockProduct | None:
        """Return the program as a product, or None if it is not one."""
        if len(program.iterations) != 1 or len(program.buffers) != 3:
            return None
        (iteration,) = program.iterations
        body, init = iteration.block.body, iteration.block.init
        is_plain = (
            iteration.kinds == "SRS" and isinstance(body, tirx.BufferStore) and isinstance(init, tirx.BufferStore)
        )
        parts = _parts(program, iteration) if is_plain else None
        if parts is None or not _are_compressed_rows(*parts) or _free(body.value) or _free(init.value):
            return None
        return cls(*parts, body.value, init.value)

    @property
    def dtype(self) -> str:
        return self.result.dtype

    @property
    def idtype(self) -> str:
        return self.result.axes[1].idtype

    def over(self, block: Block) -> tirx.PrimFunc:
        """Return the program over blocks of shapes (r, q), (q, s) and (r, s).

        rewrite: ``C[i, j] = T.min(C[i, j], A[i, k] + B[k, j])`` becomes
        ``C[i, j, x, z] = T.min(C[i, j, x, z], A[i, k, x, y] + B[k, j, y, z])``.
        """
        template = sparse_output.spgemm(self.dtype, idtype=self.idtype, block=block)
        (block_iteration,) = decode(template).iterations
        body = block_iteration.block.body
        loads = {str(x.source.name): x for x in collect(body, ir.TensorLoad)}
        operands = {self.left.view: loads["A"], self.right.view: loads["B"], self.result.view: loads["C"]}
        on_load = lambda x, _mutator: operands[x.source]  # noqa: E731
        value = structural_mutate(self.value, [(ir.TensorLoad, on_load)])

        def on_store(node: tirx.BufferStore, _mutator: Any) -> tirx.Stmt:
            stored = value if node.same_as(body) else self.initial
            return tirx.BufferStore(node.buffer, stored, list(node.indices))

        mutated = structural_mutate(template.body, [(tirx.BufferStore, on_store)])
        return tirx.PrimFunc(template.params, mutated, template.ret_type, template.attrs)


def _parts(program: Program, iteration: SpIter) -> tuple[SparseBuffer, SparseBuffer, SparseBuffer] | None:
    """Return the buffers over (i, k), (k, j) and (i, j), or None."""
    i, k, j = iteration.vars
    store = iteration.block.body
    matrices: dict[int, SparseBuffer] = {}
    positions = ((i, k), (k, j), (i, j))
    for load in [*collect(store.value, ir.TensorLoad), store]:
        source = load.buffer if load is store else load.source
        places = [n for n, at in enumerate(positions) if _are(load.indices, at)]
        if source not in program.buffers or not places:
            return None
        if not matrices.setdefault(places[0], program.buffers[source]).view.same_as(source):
            return None
    return (matrices[0], matrices[1], matrices[2]) if len(matrices) == 3 else None


def _are(indices: Any, variables: tuple[Var, Var]) -> bool:
    return len(indices) == 2 and all(x.same_as(v) for x, v in zip(indices, variables, strict=True))


def _are_compressed_rows(left: SparseBuffer, right: SparseBuffer, result: SparseBuffer) -> bool:
    """Return whether these are matrices in compressed rows of one dtype, the result with computed columns."""
    if len({left.dtype, right.dtype, result.dtype}) > 1 or any(len(b.axes) != 2 for b in (left, right, result)):
        return False
    are_rows = all(b.axes[0].kind == "dense_fixed" and b.axes[0].parent is None for b in (left, right, result))
    are_compressed = all(_is_compressed(b.axes[1], b.axes[0]) for b in (left, right))
    return are_rows and are_compressed and result.axes[1].is_assembled and left.axes[0] is result.axes[0]


def _is_compressed(axis: Axis, rows: Axis) -> bool:
    return axis.kind == "sparse_variable" and axis.parent is rows and axis.rule is None and axis.indices is not None


def _free(value: ir.Expr) -> bool:
    """Return whether an expression reads anything but elements of matrices."""
    without = structural_mutate(value, [(ir.TensorLoad, lambda x, _mutator: tirx.const(0, str(x.ty.dtype)))])
    return bool(collect(without, Var))


# Products of matrices that consist of full blocks, computed by the product of blocks.


LARGEST_BLOCK = 8


@dataclass(frozen=True)
class MatrixBlocks:
    """The pattern of a matrix's blocks, and the index of the value for each position in them."""

    indptr: np.ndarray
    indices: np.ndarray
    taken: np.ndarray

    @classmethod
    def of(cls, rows: Any, block: tuple[int, int]) -> MatrixBlocks | None:
        """Group a matrix in compressed rows into blocks; return None if a block is not full or has duplicates."""
        if rows.shape[0] % block[0] or rows.shape[1] % block[1] or rows.nnz % (block[0] * block[1]):
            return None
        idtype = rows.indices.dtype
        numbered = sp.csr_array(rows.shape, dtype=np.int64)
        numbered.indptr, numbered.indices = rows.indptr, rows.indices
        numbered.data = np.arange(1, len(rows.indices) + 1)
        blocks = numbered.tobsr(blocksize=block)
        is_full = blocks.data.size == len(rows.indices) and bool(blocks.data.all())
        if not is_full:
            return None
        return cls(blocks.indptr.astype(idtype), blocks.indices.astype(idtype), blocks.data.ravel() - 1)


def shared_blocks(product: BlockProduct, args: Arguments) -> list[Block]:
    """Return the block sizes (r, q, s) of which both operands of a call consist, the largest first."""
    left, right = (_full_blocks(matrix_of(buffer, args)) for buffer in (product.left, product.right))
    sizes = [(r, q, s) for r, q in left for inner, s in right if q == inner and r * q * s > 1]
    return sorted(sizes, key=lambda block: (-math.prod(block), block))


def _full_blocks(rows: Any) -> list[tuple[int, int]]:
    """Return the shapes of full blocks of which a matrix consists."""
    shapes = [(r, c) for r in range(1, LARGEST_BLOCK + 1) for c in range(1, LARGEST_BLOCK + 1)]
    return [shape for shape in shapes if _may_be_full(rows, shape) and MatrixBlocks.of(rows, shape) is not None]


def _may_be_full(rows: Any, shape: tuple[int, int]) -> bool:
    """Return whether the rows of each block have equal lengths, a cheap necessary condition."""
    counts = np.diff(rows.indptr)
    if not rows.nnz or rows.shape[0] % shape[0] or (counts % shape[1]).any():
        return False
    counts = counts.reshape(-1, shape[0])
    return bool((counts == counts[:, :1]).all())


def matrix_of(buffer: SparseBuffer, args: Arguments) -> Any:
    """Return the pattern of an operand of a call."""
    axis = buffer.axes[1]
    rows = sp.csr_array(tuple(int(Size(a.length).at(args.sizes)) for a in buffer.axes), dtype=np.bool_)
    rows.indptr, rows.indices = (args.arrays[str(a.name)] for a in (axis.indptr, axis.indices) if a is not None)
    rows.data = np.ones(len(rows.indices), np.bool_)
    return rows


class BlockedKernel(SparseOutputKernel):
    """Kernel that multiplies blocks if both operands consist of full ones, and entries otherwise.

    Parameters
    ----------
    compiled : AssembledCompiled
        The product of entries.
    options : AccumulatorOptions
        With the sizes of the blocks.
    """

    def __init__(self, compiled: AssembledCompiled, options: AccumulatorOptions) -> None:
        super().__init__(compiled)
        product = BlockProduct.of(decode(self.func))
        block = options.accumulators.block
        if product is None or block is None:
            expected = "blocks are multiplied by programs like sparsetir.ops.spgemm"
            raise LoweringError(f"{expected}, which {self.name} is not: leave block out")
        self.product, self.whole, self.sizes = product, options, block
        self._structures: OfPatterns[MatrixBlocks | None] = OfPatterns()

    @property
    def accumulators(self) -> Accumulators:
        return self.whole.accumulators

    @cached_property
    def inner(self) -> SparseOutputKernel:
        """The kernel of the product of blocks."""
        func = self.product.over(self.sizes)
        return SparseOutputKernel(compiled_functions(func, self.compiled.target, self.options))

    def assemble(self, args: Arguments, top: int | None = None, threshold: Any = None) -> ResultPattern:
        """Compute pattern and values."""
        r, q, s = self.sizes
        left, right = self.blocks(self.product.left, args, (r, q)), self.blocks(self.product.right, args, (q, s))
        if left is None or right is None:
            return super().assemble(args, top, threshold)
        m, n = (int(size.at(args.sizes)) for size in self._shape)
        p = int(Size(self.product.left.axes[1].length).at(args.sizes))
        inner = Arguments(sizes={"m": m // r, "p": p // q, "n": n // s})
        for name, buffer, blocks, shape in (
            ("a", self.product.left, left, (r, q)),
            ("b", self.product.right, right, (q, s)),
        ):
            values = args.arrays[str(buffer.storage.name)][blocks.taken].reshape(-1, *shape)
            inner.arrays |= {name: values, f"indptr_{name}": blocks.indptr, f"indices_{name}": blocks.indices}
            inner.sizes[f"nnz_{name}"] = len(blocks.indices)
        return entries(self.inner.assemble(inner), (r, s), (m, n))

    def blocks(self, buffer: SparseBuffer, args: Arguments, block: tuple[int, int]) -> MatrixBlocks | None:
        """Return the blocks of an operand, cached by its pattern, or None if they are not full."""
        rows = matrix_of(buffer, args)
        return self._structures.get(
            (rows.shape, block), (rows.indptr, rows.indices), lambda: MatrixBlocks.of(rows, block)
        )

    def compiled_parts(self) -> Iterator[Compiled]:
        yield from super().compiled_parts()
        yield from self.inner.compiled_parts()

    def __reduce__(self) -> tuple[Any, ...]:
        write_one(self.compiled)  # for the process that unpickles it
        return _restored, (self.func, str(self.compiled.target), self.whole)

    def __deepcopy__(self, _memo: Any) -> BlockedKernel:
        return BlockedKernel(self.compiled, self.whole)


def entries(pattern: ResultPattern, block: tuple[int, int], shape: tuple[int, int]) -> ResultPattern:
    """Convert the elements of blocks to entries."""
    keys = pattern.keys
    count = len(keys) * block[0] * block[1]
    if not count:
        return ResultPattern(
            shape, np.zeros(shape[0] + 1, np.int64), keys[:0], [v.reshape(-1)[:0] for v in pattern.values]
        )
    rows, width = block
    lengths = np.repeat(np.diff(pattern.indptr) * width, rows)
    indptr = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    idtype = np.int32 if max(*shape, count) <= LARGEST_INT32 else np.int64
    starts, columns = pattern.indptr.astype(idtype), keys.astype(idtype, copy=False)
    values = [_by_rows(starts, columns, v.reshape(-1, *block), shape) for v in pattern.values]
    return ResultPattern(shape, indptr, values[0].indices.astype(keys.dtype, copy=False), [v.data for v in values])


def _by_rows(indptr: np.ndarray, indices: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> Any:
    matrix = sp.bsr_array(shape, blocksize=values.shape[1:], dtype=values.dtype)
    matrix.indptr, matrix.indices, matrix.data = indptr, indices, values
    return matrix.tocsr()


def _restored(func: Any, target: str, options: AccumulatorOptions) -> BlockedKernel:
    """Restore a kernel from its pickled state."""
    return BlockedKernel(compiled_functions(func, tvm.target.Target(target), options.unblocked()), options)


@uncollected
def assembled_kernel(
    program: tirx.PrimFunc, target: Any = None, options: AccumulatorOptions | None = None
) -> SparseOutputKernel:
    """Compile a program that computes the pattern of its results."""
    plain = None if options is None else options.unblocked()
    compiled = compiled_functions(single(program), make_target(target, program), plain)
    if options is None or options.accumulators.block is None:
        return SparseOutputKernel(compiled)
    return BlockedKernel(compiled, options)


__all__ = ["Block", "BlockProduct", "BlockedKernel", "assembled_kernel", "shared_blocks"]
