# SPDX-License-Identifier: Apache-2.0
"""A product of two matrices as one of matrices of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import computed
from sparsetir.ir import Axis, Program, SparseBuffer, SpIter, decode
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate

Block = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Product:
    """A program that multiplies two matrices, whatever it takes for products and sums, as `sparsetir.ops.spgemm` does.

    Parameters
    ----------
    left, right, result : SparseBuffer
    value : Expr
        What its one statement stores.
    initial : Expr
        What an element begins with.
    """

    left: SparseBuffer
    right: SparseBuffer
    result: SparseBuffer
    value: ir.Expr
    initial: ir.Expr

    @classmethod
    def of(cls, program: Program) -> Product | None:
        """The program as a product; None if it is something else."""
        if len(program.iterations) != 1 or len(program.buffers) != 3:
            return None
        (iteration,) = program.iterations
        body, init = iteration.block.body, iteration.block.init
        is_plain = (
            iteration.kinds == "SRS" and isinstance(body, tirx.BufferStore) and isinstance(init, tirx.BufferStore)
        )
        parts = _parts(program, iteration) if is_plain else None
        if parts is None or not _lie_so(*parts) or _free(body.value) or _free(init.value):
            return None
        return cls(*parts, body.value, init.value)

    @property
    def dtype(self) -> str:
        return self.result.dtype

    @property
    def idtype(self) -> str:
        return self.result.axes[1].idtype

    def over(self, block: Block) -> tirx.PrimFunc:
        """The program over blocks of shapes (r, q), (q, s) and (r, s).

        rewrite: ``C[i, j] = T.min(C[i, j], A[i, k] + B[k, j])`` becomes
        ``C[i, j, x, z] = T.min(C[i, j, x, z], A[i, k, x, y] + B[k, j, y, z])``.
        """
        made = computed.spgemm(self.dtype, idtype=self.idtype, block=block)
        (block_iteration,) = decode(made).iterations
        body = block_iteration.block.body
        loads = {str(x.source.name): x for x in collect(body, ir.TensorLoad)}
        named = {self.left.view: loads["A"], self.right.view: loads["B"], self.result.view: loads["C"]}
        on_load = lambda x, _mutator: named[x.source]  # noqa: E731
        value = structural_mutate(self.value, [(ir.TensorLoad, on_load)])

        def on_store(node: tirx.BufferStore, _mutator: Any) -> tirx.Stmt:
            stored = value if node.same_as(body) else self.initial
            return tirx.BufferStore(node.buffer, stored, list(node.indices))

        mutated = structural_mutate(made.body, [(tirx.BufferStore, on_store)])
        return tirx.PrimFunc(made.params, mutated, made.ret_type, made.attrs)


def _parts(program: Program, iteration: SpIter) -> tuple[SparseBuffer, SparseBuffer, SparseBuffer] | None:
    """The matrices over (i, k), (k, j) and (i, j)."""
    i, k, j = iteration.vars
    store = iteration.block.body
    found: dict[int, SparseBuffer] = {}
    wanted = ((i, k), (k, j), (i, j))
    for load in [*collect(store.value, ir.TensorLoad), store]:
        source = load.buffer if load is store else load.source
        places = [n for n, at in enumerate(wanted) if _are(load.indices, at)]
        if source not in program.buffers or not places:
            return None
        if not found.setdefault(places[0], program.buffers[source]).view.same_as(source):
            return None
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def _are(indices: Any, variables: tuple[Var, Var]) -> bool:
    return len(indices) == 2 and all(x.same_as(v) for x, v in zip(indices, variables, strict=True))


def _lie_so(left: SparseBuffer, right: SparseBuffer, result: SparseBuffer) -> bool:
    """Whether they are matrices in compressed rows of one dtype, the result with computed columns."""
    if len({left.dtype, right.dtype, result.dtype}) > 1 or any(len(b.axes) != 2 for b in (left, right, result)):
        return False
    rows = all(b.axes[0].kind == "dense_fixed" and b.axes[0].parent is None for b in (left, right, result))
    stored = all(_is_compressed(b.axes[1], b.axes[0]) for b in (left, right))
    return rows and stored and result.axes[1].is_assembled and left.axes[0] is result.axes[0]


def _is_compressed(axis: Axis, rows: Axis) -> bool:
    return axis.kind == "sparse_variable" and axis.parent is rows and axis.rule is None and axis.indices is not None


def _free(value: ir.Expr) -> bool:
    """Whether an expression reads anything but elements of matrices."""
    without = structural_mutate(value, [(ir.TensorLoad, lambda x, _mutator: tirx.const(0, str(x.ty.dtype)))])
    return bool(collect(without, Var))


__all__ = ["Block", "Product"]
