# SPDX-License-Identifier: Apache-2.0
"""Read and write regions of stage-II blocks.

before::

    with T.sblock("spmm_0"):
        vi = T.axis.spatial(m, i)
        T.reads()
        T.writes()

after::

    with T.sblock("spmm_0"):
        vi = T.axis.spatial(m, i)
        T.reads(indptr[vi:vi + 2], indices[0:nnz], a[0:nnz], b[0:n, 0:feat])
        T.writes(c[vi, 0:feat])

A region names a single element if its subscript only depends on variables defined outside the block's inner loops,
else the whole dimension. A buffer that the block itself initialises is not among its reads, as in TVM's reductions.
Searched arrays are read whole. The innermost block omits the axes' index arrays, which are never written:
its regions then equal those of the dense micro kernel that ``tensorize`` compares it with.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.lower.annotations import INIT_MARK, SCRATCH, STRUCTURE


def _bound_inside(body: tirx.Stmt) -> list[Var]:
    """Return the variables that `body` defines."""
    variables: list[Var] = []
    callbacks = [
        (tirx.For, lambda f: variables.append(f.loop_var)),
        (s_tir.SBlock, lambda b: variables.extend(iv.var for iv in b.iter_vars)),
        (tirx.Bind, lambda b: variables.append(b.var)),
        (tirx.Let, lambda x: variables.append(x.var)),
    ]
    structural_walk(body, callbacks)
    return variables


def _local_buffers(block: s_tir.SBlock) -> list[Var]:
    buffers: list[Var] = list(block.alloc_buffers)
    callbacks = [
        (s_tir.SBlock, lambda b: buffers.extend(b.alloc_buffers)),
        (tirx.AllocBuffer, lambda b: buffers.append(b.buffer)),
    ]
    structural_walk(block.body, callbacks)
    return buffers


def _initialised(block: s_tir.SBlock) -> list[Var]:
    """Return the buffers that the block, or a block inside it, initialises before it reads them."""
    buffers: list[Var] = []

    def on_block(inner: s_tir.SBlock) -> None:
        if inner.init is not None:
            structural_walk(inner.init, (tirx.BufferStore, lambda s: buffers.append(s.buffer)))
        if INIT_MARK in inner.annotations:
            structural_walk(inner.body, (tirx.BufferStore, lambda s: buffers.append(s.buffer)))

    structural_walk(block.body, (s_tir.SBlock, on_block))
    if block.init is not None:
        structural_walk(block.init, (tirx.BufferStore, lambda s: buffers.append(s.buffer)))
    return buffers


class _Regions:
    """Union of the accesses to each buffer: in each dimension a single element or the whole extent."""

    def __init__(self, inner: list[Var]) -> None:
        self.inner = set(inner)
        self.by_buffer: dict[Var, list[ir.Range]] = {}

    def add(self, buffer: Var, indices: Any, whole: bool = False) -> None:
        """Add one access to the union."""
        shape = buffer.ty.shape
        ranges = [self._range(i, d, whole) for i, d in zip(indices, shape, strict=True)]
        old_ranges = self.by_buffer.get(buffer)
        if old_ranges is not None:
            ranges = [_join(r, k, d) for r, k, d in zip(ranges, old_ranges, shape, strict=True)]
        self.by_buffer[buffer] = ranges

    def _range(self, index: ir.Expr, extent: ir.Expr, whole: bool) -> ir.Range:
        if whole or self._depends(index):
            return _whole(extent)
        return ir.Range.from_min_extent(index, const(1, str(index.ty.dtype)))

    def _depends(self, index: ir.Expr) -> bool:
        hit: list[int] = []
        check = [
            (Var, lambda v: hit.append(1) if v in self.inner else None),
            (Call, lambda c: hit.append(1) if dialect.is_call(c) else None),
        ]
        structural_walk(index, check)
        return bool(hit)

    def regions(self, without: list[Var]) -> list[tirx.BufferRegion]:
        """Return the union as TVM buffer regions."""
        skip = set(without)
        return [tirx.BufferRegion(b, r) for b, r in self.by_buffer.items() if b not in skip]


def _join(a: ir.Range, b: ir.Range, extent: ir.Expr) -> ir.Range:
    if tvm_ffi.structural_equal(a, b):
        return a
    return _whole(extent)


def _whole(extent: ir.Expr) -> ir.Range:
    """Return the range of a whole dimension, in the form of TVM's parser."""
    return ir.Range(const(0, str(extent.ty.dtype)), sym.Analyzer().simplify(extent))


def with_regions(block: s_tir.SBlock, structure: list[Var]) -> s_tir.SBlock:
    """Compute the reads and writes of `block` from its body; those of an innermost block omit `structure`."""
    bound = _bound_inside(block.body)
    reads, writes = _Regions(bound), _Regions(bound)
    searched: list[ir.TensorLoad] = []

    def on_call(node: Call) -> None:
        if dialect.is_call(node, "find", "find_fiber"):
            searched.append(node.args[0])
            reads.add(node.args[0].source, node.args[0].indices, whole=True)

    callbacks = [
        (Call, on_call),
        (tirx.BufferStore, lambda s: writes.add(s.buffer, s.indices)),
        (ir.TensorLoad, lambda x: reads.add(x.source, x.indices)),
    ]
    structural_walk(block.body, callbacks)
    if block.init is not None:
        structural_walk(block.init, callbacks)
    local = _local_buffers(block)
    hidden = [] if collect(block.body, s_tir.SBlock) else structure
    return s_tir.SBlock(
        block.iter_vars,
        reads.regions([*local, *_initialised(block), *hidden]),
        writes.regions(local),
        block.name_hint,
        block.body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )


def declare_regions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Recompute the regions of every block but the root; annotate the function with the program's scratch buffers.

    The annotation distinguishes these buffers from caches that a schedule adds later.
    """
    is_lowered = func.attrs is not None and STRUCTURE in func.attrs  # AlignParams sets it on stage-I functions.
    names = {str(n) for n in func.attrs[STRUCTURE]} if is_lowered else set()
    written = {s.buffer for s in collect(func.body, tirx.BufferStore)}
    structure = [p for p in func.params if str(p.name) in names and p not in written]

    def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        inner = mutator.default_mutate(node)
        if inner.block.name_hint == "root" and not inner.block.iter_vars:
            return inner
        return s_tir.SBlockRealize(inner.iter_values, inner.predicate, with_regions(inner.block, structure))

    body = structural_mutate(func.body, [(s_tir.SBlockRealize, on_realize)])
    out = tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
    scratch = [str(b.name) for block in collect(body, s_tir.SBlock) for b in block.alloc_buffers]
    return out.with_attr(SCRATCH, scratch) if is_lowered and scratch else out


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.DeclareRegions")
def DeclareRegions(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Run `declare_regions` as a pass."""
    return declare_regions(func)
