# SPDX-License-Identifier: Apache-2.0
"""Ask no more of a caller's arrays than their element's alignment, and say that they do not overlap.

before::

    def spmm(x: T.Buffer((n,), "float32")): ...

after::

    def spmm(x: T.Buffer((n,), "float32", align=4)):
        T.func_attr({"tirx.noalias": True})

TVM assumes 64 bytes and does not check it for numpy arrays: a vector load from one would crash.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import Axis, decode, substitute_args
from sparsetir.lower.marks import ASCENDING, DISTINCT, FIBERS, INDPTR, STRUCTURE
from sparsetir.walks import structural_mutate

NOALIAS = "tirx.noalias"


def _itemsize(dtype: str) -> int:
    bits = "".join(c for c in dtype if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


def _realigned(buffer: Var) -> Var:
    ty = buffer.ty
    dtype = str(ty.dtype)
    return tirx.decl_buffer(
        ty.shape, dtype, name=str(buffer.name), strides=ty.strides, data_alignment=_itemsize(dtype), layout=None
    )


def _has_one_fiber(axis: Axis) -> bool:
    """Whether all positions of an axis belong together: a root, or below one position."""
    above = None if axis.parent is None else axis.parent.count
    return above is None or (isinstance(above, tirx.IntImm) and int(above) == 1)


def _fibers(axis: Axis) -> str:
    """The list that holds the coordinates of an axis in groups of one size, none twice in a group, as name:size."""
    if not axis.unique or not isinstance(axis.width, tirx.IntImm) or axis.kind != "sparse_fixed":
        return ""
    if axis.rule is None:
        return "" if axis.indices is None else f"{axis.indices.name}:{int(axis.width)}"
    slot, begin, *above = (Var(f"at_{n}", ir.PrimType(axis.idtype)) for n in range(2 + len(axis.ancestors)))
    load = substitute_args(axis.rule, [*above, slot, begin + slot])
    if not isinstance(load, ir.TensorLoad) or len(load.indices) != 1:
        return ""
    start = sym.Analyzer().simplify(tirx.floormod(load.indices[0] - slot, axis.width))
    return f"{load.source.name}:{int(axis.width)}" if isinstance(start, tirx.IntImm) and int(start) == 0 else ""


def realign(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with buffer parameters of natural alignment."""
    fresh: dict[Var, Var] = {}
    for param in func.params:
        if tirx.is_buffer_var(param) and int(param.ty.data_alignment) > _itemsize(str(param.ty.dtype)):
            fresh[param] = _realigned(param)
    if not fresh:
        return func

    def on_var(var: Var, _mutator: Any) -> Var:
        return fresh.get(var, var)

    body = structural_mutate(func.body, [(Var, on_var)])
    params = [fresh.get(p, p) for p in func.params]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.AlignParams")
def AlignParams(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Realign the parameters of a stage-I function and note its row pointers."""
    program = decode(func)
    if not program.axes:
        return func
    pointers = [str(a.indptr.name) for a in program.axes.values() if a.indptr is not None]
    indices = [str(a.indices.name) for a in program.axes.values() if a.indices is not None]
    lists = [a for a in program.axes.values() if a.parent is None and a.kind == "sparse_variable" and a.sorted]
    ascending = [str(a.indices.name) for a in lists if a.indices is not None]
    alone = [a for a in program.axes.values() if a.unique and _has_one_fiber(a)]
    distinct = sorted({str(a.indices.name) for a in alone if a.indices is not None})
    if distinct:
        func = func.with_attr(DISTINCT, distinct)
    fibers = sorted({f for f in map(_fibers, program.axes.values()) if f})
    if fibers:
        func = func.with_attr(FIBERS, fibers)
    out = realign(func).with_attr(NOALIAS, True).with_attr(INDPTR, pointers)
    return out.with_attr(STRUCTURE, sorted({*pointers, *indices})).with_attr(ASCENDING, ascending)
