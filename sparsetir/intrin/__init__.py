# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions of processors as TVM tensor intrinsics.

Importing the package registers each intrinsic of the `TABLE` as ``sparsetir.NAME``, so that
``sch.tensorize(loop, "sparsetir.dot_u8s8_512")`` replaces the loops that it stands for:

>>> from sparsetir import intrin
>>> intrin.get("dot_bf16_512").operand_shapes
((2,), (16, 2), (16,))

`available` lists those of a target, `Intrinsic.compute` is their meaning in numpy.

The functions of tensor intrinsics are built of nodes: to parse as many texts would take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Range, Var

from sparsetir.intrin import tiles
from sparsetir.intrin.llvm_ir import BYTES, IMPORT, define, function_name
from sparsetir.intrin.table import TABLE, Intrinsic, get
from sparsetir.ir.views import cast

SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce
A_TILE, B_TILE, C_TILE = 1, 2, 0


def describe(unit: Intrinsic) -> tirx.PrimFunc:
    """Return the loops that an intrinsic stands for, over operands in its layout."""
    a, b, c = _operands(unit, has_strides=False)
    extents = {"i": unit.m, "p": unit.groups, "j": unit.n, "q": unit.group}
    used = {name: extent for name, extent in extents.items() if extent > 1}
    loops = {name: Var(name, ir.PrimType("int32")) for name in used}
    inner = {name: Var(f"v{name}", ir.PrimType("int32")) for name in used}

    def at(names: str) -> list[ir.Expr]:
        return [inner[name] for name in names if name in used] or [tirx.const(0, "int32")]

    left, right, out = tirx.BufferLoad(a, at("ipq")), tirx.BufferLoad(b, at("pjq")), tirx.BufferLoad(c, at("ij"))
    term = cast(left, unit.c) * cast(right, unit.c)
    update = tirx.BufferStore(c, out + term, at("ij"))
    kinds = {"i": SPATIAL, "j": SPATIAL, "p": REDUCE, "q": REDUCE}
    bound = [tirx.IterVar(Range(0, used[name]), var, kinds[name]) for name, var in inner.items()]
    reads, writes = [_point(c, at("ij")), _point(a, at("ipq")), _point(b, at("pjq"))], [_point(c, at("ij"))]
    block = s_tir.SBlock(bound, reads, writes, "update", update)
    body: tirx.Stmt = s_tir.SBlockRealize(list(loops.values()), True, block)
    for name, var in reversed(loops.items()):
        body = tirx.For(var, tirx.const(0, "int32"), tirx.const(used[name], "int32"), tirx.ForKind.SERIAL, body)
    return _function(a, b, c, body)


def implement(unit: Intrinsic) -> tirx.PrimFunc:
    """Return the function that calls an intrinsic, with the parameters of `describe`."""
    a, b, c = _operands(unit, has_strides=not unit.is_dot)
    if unit.is_tile:
        return _function(a, b, c, _tile_product(unit, a, b, c))
    name, addresses = function_name(unit), [_address(a), _address(b)]
    if unit.is_dot:
        lanes = [tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), unit.n)]
        value = tirx.call_extern(f"{unit.c}x{unit.n}", name, tirx.BufferLoad(c, lanes), *addresses)
        body: tirx.Stmt = tirx.BufferStore(c, value, lanes)
    else:
        arguments = [x for buffer in (c, a, b) for x in (_address(buffer), tirx.Cast("int64", buffer.ty.strides[0]))]
        body = tirx.Evaluate(tirx.call_extern("void", name, *arguments))
    imported = tirx.AttrStmt(tirx.const(0, "int32"), IMPORT, ir.StringImm(define(unit)), body)
    return _function(a, b, c, imported)


def register(unit: Intrinsic) -> None:
    """Register an intrinsic with TVM's schedules."""
    s_tir.TensorIntrin.register(unit.tensor_intrinsic, describe(unit), implement(unit), override=True)


def _operands(unit: Intrinsic, *, has_strides: bool) -> list[Any]:
    """Return the buffers of an intrinsic; with strides, the rows of each may lie apart."""
    out = []
    for name, shape, dtype in zip("ABC", unit.operand_shapes, (unit.a, unit.b, unit.c), strict=True):
        strides: Sequence[Any] | None = None
        if has_strides:
            inner = [tirx.const(unit.group, "int32")] if len(shape) == 3 else []
            strides = [Var(f"{name}_stride", ir.PrimType("int32")), *inner, tirx.const(1, "int32")]
        out.append(tirx.decl_buffer(shape, dtype, name=name, strides=strides, offset_factor=1, layout=None))
    return out


def _point(buffer: Any, indices: Sequence[ir.Expr]) -> tirx.BufferRegion:
    return tirx.BufferRegion(buffer, [Range.from_min_extent(index, tirx.const(1, "int32")) for index in indices])


def _whole(buffer: Any) -> tirx.BufferRegion:
    return tirx.BufferRegion(buffer, [Range(0, extent) for extent in buffer.ty.shape])


def _address(buffer: Any) -> ir.Expr:
    return tirx.address_of(tirx.BufferLoad(buffer, [tirx.const(0, "int32")] * len(buffer.ty.shape)))


def _tile_product(unit: Intrinsic, a: Any, b: Any, c: Any) -> tirx.Stmt:
    """Return the statements that load tiles, multiply them, and store the sum."""
    strides = [x.ty.strides[0] * BYTES[dtype] for x, dtype in ((a, unit.a), (b, unit.b), (c, unit.c))]
    return tirx.SeqStmt(
        [
            tiles.load(C_TILE, _address(c), strides[2]),
            tiles.load(A_TILE, _address(a), strides[0]),
            tiles.load(B_TILE, _address(b), strides[1]),
            tiles.multiply(unit.instruction, C_TILE, A_TILE, B_TILE),
            tiles.store(C_TILE, _address(c), strides[2]),
        ]
    )


def _function(a: Any, b: Any, c: Any, body: tirx.Stmt) -> tirx.PrimFunc:
    """Return a function of three buffers with a body in one block."""
    block = s_tir.SBlock([], [_whole(c), _whole(a), _whole(b)], [_whole(c)], "root", body)
    return tirx.PrimFunc([a, b, c], s_tir.SBlockRealize([], True, block)).with_attr("s_tir", True)


def available(target: Any) -> list[Intrinsic]:
    """Return the intrinsics whose features a target has.

    Parameters
    ----------
    target : tvm.target.Target
        An LLVM target.

    Returns
    -------
    list of Intrinsic

    Examples
    --------
    >>> import tvm
    >>> from sparsetir import intrin
    >>> target = tvm.target.Target({"kind": "llvm", "mcpu": "cascadelake"})
    >>> [unit.name for unit in intrin.available(target)]
    ['dot_u8s8_512', 'dot_s8u8_512', 'dot_u8s8_256', 'dot_s8u8_256']
    """
    from tvm.target import codegen

    return [unit for unit in TABLE if all(codegen.target_has_features(feature, target) for feature in unit.features)]


for _unit in TABLE:
    register(_unit)


__all__ = ["TABLE", "Intrinsic", "available", "get"]
