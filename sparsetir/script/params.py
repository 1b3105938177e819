# SPDX-License-Identifier: Apache-2.0
"""The parameters of a printed function: ``a: T.handle`` where the body's declarations make just this array of it.

before::

    def spmv(a: T.Buffer(("nnz",), "float32", align=4), x: T.Buffer(("n",), "float32"), ...):

after::

    def spmv(a: T.handle, x: T.Buffer(("n",), "float32"), ...):
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import Axis, const
from sparsetir.script import builder, trees
from sparsetir.script.sugar import Body, same_type, told_width
from sparsetir.walks import structural_walk


class Signature:
    """Chooses ``T.handle`` or ``T.Buffer`` for each array parameter, and which sizes go without a name.

    A handle is right when the body's declarations make exactly this parameter of it. A size that only an array
    tells has no name then, unless the body needs it.
    """

    def __init__(self, node: ast.FunctionDef, func: tirx.PrimFunc, body: Body) -> None:
        self.node, self.func, self.body = node, func, body
        self.names = trees.names_in(*node.body)
        self.args = dict(zip(func.params, node.args.args, strict=True))
        self.arrays = [p for p in func.params if tirx.is_buffer_var(p)]
        self.buffers = [p for p in self.arrays if not self._is_handle(p)]

    def write(self) -> None:
        """Set the annotations, and drop the counts that are not named."""
        while self._name_one_more_size():
            pass
        for size in [s for s in self.body.sizes if self._is_hidden(s.var)]:
            size.call.args[1] = size.call.args[1].elts[0]  # type: ignore[attr-defined]
        for param in self.arrays:
            if param not in self.buffers:
                self.args[param].annotation = trees.member("handle")
        _quote_new_names(self.node)

    # ------------------------------------------------------------------ handles

    def _is_handle(self, param: Var) -> bool:
        name = self.args[param].arg
        mentions = self.body.mentions[name]
        if not mentions or mentions != self.names[name] or name in self.body.late:
            return False
        matched = self.body.matched.get(param, [])
        roles = list(self._roles(param))
        if matched:
            return len(matched) == 1 and not roles and same_type(param, matched[0].storage_shape, matched[0].dtype)
        shape, dtype = roles[0]
        return same_type(param, shape, dtype)

    def _roles(self, param: Var) -> Iterator[tuple[list[ir.Expr], str]]:
        """The shape and type that each axis over `param` would give it."""
        for axis in self.body.program.axes.values():
            above = const(1) if axis.parent is None else axis.parent.count
            if axis.indptr is not None and axis.indptr.same_as(param):
                yield [above + 1], axis.idtype
            if axis.indices is not None and axis.indices.same_as(param):
                yield [_index_count(axis, above)], axis.idtype

    # ------------------------------------------------------------------ sizes

    def _free_sizes(self) -> list[Var]:
        """The sizes that are no parameters."""
        found: dict[Var, None] = {}
        for param in self.arrays:
            for var in _variables(param):
                if var not in self.func.params:
                    found.setdefault(var)
        return list(found)

    def _is_hidden(self, var: Var) -> bool:
        """Whether the program can do without a name for the size `var`."""
        if var in self.body.computed:
            return not self.names[self.body.computed[var]] and not any(var in _variables(p) for p in self.buffers)
        here = [s for s in self.body.sizes if s.var.same_as(var)]
        arrays = {s.axis.indices if s.axis.indices is not None else s.call for s in here}
        if len(arrays) != 1 or any(var in _variables(p) for p in self.buffers):
            return False
        count = here[0].call.args[1].elts[1]  # type: ignore[attr-defined]
        name = ast.unparse(count.left if isinstance(count, ast.BinOp) else count)
        return self.names[name] == len(here)

    def _name_one_more_size(self) -> bool:
        """Make a buffer of one parameter that a nameless size needs; False when none is left."""
        for var in self._free_sizes():
            if self._is_hidden(var) or any(_defines(p, var) for p in self.buffers):
                continue
            able = [p for p in self.arrays if _defines(p, var) and p not in self.buffers]
            if able:
                self.buffers.append(able[-1])
                return True
        return False


def _index_count(axis: Axis, above: ir.Expr) -> ir.Expr:
    """How many elements the dialect expects in the index array of `axis`."""
    if axis.kind == "sparse_fixed":
        told = told_width(axis)
        return builder.times(above, axis.width) if told is None else told
    return above if axis.kind == "singleton" else _uncast(axis.count, axis.idtype)


def _uncast(expr: ir.Expr, dtype: str) -> ir.Expr:
    """`expr` as it was before the dialect converted it to `dtype`."""
    is_cast = isinstance(expr, tirx.Cast) and str(expr.ty.dtype) == dtype
    return expr.value if is_cast and not isinstance(expr.value, tirx.IntImm) else expr


def _variables(param: Var) -> list[Var]:
    """The variables in the shape of an array parameter."""
    found: dict[Var, None] = {}
    for extent in param.ty.shape:
        structural_walk(extent, (Var, lambda v: found.setdefault(v)))
    return list(found)


def _defines(param: Var, var: Var) -> bool:
    return any(extent.same_as(var) for extent in param.ty.shape)


def _quote_new_names(node: ast.FunctionDef) -> None:
    """Quote a size in the signature where it is met first, as TVM's parser wants it."""
    known = {"T"}
    for arg in node.args.args:
        annotation: Any = arg.annotation
        if trees.called(annotation) == "Buffer":
            shape = annotation.args[0]
            shape.elts = [_quoted(_unquoted(extent), known) for extent in shape.elts]
        known.add(arg.arg)


def _unquoted(extent: ast.expr) -> ast.expr:
    is_text = isinstance(extent, ast.Constant) and isinstance(extent.value, str)
    return trees.parse(extent.value, mode="eval").body if is_text else extent  # type: ignore[attr-defined]


def _has_text(extent: ast.expr) -> bool:
    """Whether it holds a string, which TVM would take for a size unless the whole is quoted."""
    return any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(extent))


def _quoted(extent: ast.expr, known: set[str]) -> ast.expr:
    names = set(trees.names_in(extent))
    if names <= known and not _has_text(extent):
        return extent
    known |= names
    return ast.Constant(ast.unparse(extent))
