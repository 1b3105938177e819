# SPDX-License-Identifier: Apache-2.0
"""A dense program of loops or blocks, read as statements: what each stores, and the loops around it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from sparsetir.errors import LoweringError
from sparsetir.script import trees

LOOPS = ("range", "serial", "parallel", "vectorized", "unroll", "grid", "thread_binding")
IGNORED = ("reads", "writes", "evaluate", "func_attr", "sblock_attr", "block_attr")


@dataclass(frozen=True)
class DenseBuffer:
    """A buffer of a dense program.

    Parameters
    ----------
    name : str
    shape : tuple of str
        The text of each extent.
    dtype : str
    allocated : bool
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    allocated: bool = False


@dataclass(frozen=True)
class Statement:
    """One store.

    Parameters
    ----------
    loops : dict of str to str
        The extents of the loops around it, outermost first.
    numbers : dict of str to int
        Which loop of the program each of these is.
    target : ast.Subscript
    value : ast.expr
    init : ast.expr, optional
        What a block sets the element to first.
    """

    loops: dict[str, str]
    numbers: dict[str, int]
    target: ast.Subscript
    value: ast.expr
    init: ast.expr | None = None

    @property
    def buffer(self) -> str:
        return ast.unparse(self.target.value)

    @property
    def subscripts(self) -> list[str]:
        return subscripts(self.target)

    @property
    def added(self) -> tuple[str, ast.expr] | None:
        """The operator and the other side, where the statement adds to its element or subtracts from it."""
        own, value = ast.unparse(self.target), self.value
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, (ast.Add, ast.Sub)):
            return None
        if ast.unparse(value.left) == own:
            return ("+" if isinstance(value.op, ast.Add) else "-"), value.right
        if isinstance(value.op, ast.Add) and ast.unparse(value.right) == own:
            return "+", value.left
        return None

    def reads(self) -> list[ast.Subscript]:
        """The elements that it reads, its own included."""
        return [node for node in ast.walk(self.value) if isinstance(node, ast.Subscript)]


@dataclass
class DenseProgram:
    """A dense program.

    Parameters
    ----------
    name : str
    buffers : dict of str to DenseBuffer
    scalars : dict of str to str
        Parameters that are no buffers, and symbolic sizes, with their dtypes.
    statements : list of Statement
    """

    name: str
    buffers: dict[str, DenseBuffer]
    scalars: dict[str, str]
    statements: list[Statement] = field(default_factory=list)


def subscripts(node: ast.Subscript) -> list[str]:
    """The text of each subscript."""
    held = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [ast.unparse(index) for index in held]


def read(func: tirx.PrimFunc) -> DenseProgram:
    """The statements of a dense program.

    Raises
    ------
    LoweringError
        It holds what is no loop, block or store.
    """
    tree = trees.parse(func.script(extra_config={"tirx.prefix": "T", "script.use_pep695": False}))
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    buffers: dict[str, DenseBuffer] = {}
    scalars: dict[str, str] = {}
    for param in func.params:
        if tirx.is_buffer_var(param):
            shape = tuple(_extent(n, scalars) for n in param.ty.shape)
            buffers[str(param.name)] = DenseBuffer(str(param.name), shape, str(param.ty.dtype))
        else:
            scalars[str(param.name)] = str(param.ty.dtype)
    made = DenseProgram(str(func.attrs["global_symbol"]), buffers, scalars)
    _Reader(made).body(node.body, {}, {}, {}, None)
    return made


def _extent(expr: Any, scalars: dict[str, str]) -> str:
    if isinstance(expr, tirx.IntImm):
        return str(int(expr))
    for name, dtype in ((str(v.name), str(v.ty.dtype)) for v in _variables(expr)):
        scalars.setdefault(name, dtype)
    return str(expr.name) if hasattr(expr, "name") else str(expr)


def _variables(expr: Any) -> list[Any]:
    from sparsetir.lower.rewriting import collect

    return collect(expr, tirx.Var)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.names.get(node.id, node))


class _Reader:
    """Walks the text of a program."""

    def __init__(self, made: DenseProgram) -> None:
        self.made, self.count = made, 0

    def refuse(self, node: ast.AST, what: str) -> LoweringError:
        line = ast.unparse(node).splitlines()[0]
        return LoweringError(f"sparsify reads loops, blocks and stores; found {what}: {line}")

    def body(
        self,
        nodes: Sequence[ast.stmt],
        loops: dict[str, str],
        numbers: dict[str, int],
        names: dict[str, ast.expr],
        init: Mapping[str, ast.expr] | None,
    ) -> None:
        """The statements of a body; `names` are those of a block's variables."""
        names = dict(names)
        started: dict[str, ast.expr] = dict(init or {})
        for node in nodes:
            if isinstance(node, ast.For):
                self.loop(node, loops, numbers, names)
            elif isinstance(node, ast.With):
                self.block(node, loops, numbers, names, started)
            elif isinstance(node, ast.Assign):
                self.assign(node, loops, numbers, names, started)
            elif not self.is_ignored(node):
                raise self.refuse(node, "something else")

    def is_ignored(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Pass):
            return True
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Constant):
            return True
        return isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in IGNORED

    def loop(self, node: ast.For, loops: Any, numbers: Any, names: Any) -> None:
        call = node.iter
        kind = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or kind not in LOOPS or kind == "thread_binding":
            raise self.refuse(node, "a loop of another kind")
        extents = [ast.unparse(a) for a in call.args]
        variables = [
            ast.unparse(v) for v in (node.target.elts if isinstance(node.target, ast.Tuple) else [node.target])
        ]
        if kind != "grid" and len(extents) == 2:
            extents = [extents[1]] if extents[0] == "0" else []
        if len(extents) != len(variables):
            raise self.refuse(node, "a loop that does not begin at 0")
        self.count += 1
        inner = dict(zip(variables, extents, strict=True))
        self.body(node.body, {**loops, **inner}, {**numbers, **dict.fromkeys(inner, self.count)}, names, None)

    def block(self, node: ast.With, loops: Any, numbers: Any, names: Any, started: dict[str, ast.expr]) -> None:
        call = node.items[0].context_expr
        kind = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if kind == "init":
            for store in node.body:
                if not isinstance(store, ast.Assign) or not isinstance(store.targets[0], ast.Subscript):
                    raise self.refuse(store, "something else in T.init()")
                target, value = (_Renamed(names).visit(copy.deepcopy(e)) for e in (store.targets[0], store.value))
                started[ast.unparse(target)] = value
            return
        if kind not in ("sblock", "block"):
            raise self.refuse(node, "another context")
        self.body(node.body, loops, numbers, names, None)

    def assign(self, node: ast.Assign, loops: Any, numbers: Any, names: Any, started: dict[str, ast.expr]) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Subscript):
            renamed = _Renamed(names)
            place, value = renamed.visit(copy.deepcopy(target)), renamed.visit(copy.deepcopy(node.value))
            first = started.pop(ast.unparse(place), None)
            self.made.statements.append(Statement(dict(loops), dict(numbers), place, value, first))
            return
        call = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        if call == "T.axis.remap" and isinstance(node.value, ast.Call):
            held = target.elts if isinstance(target, ast.Tuple) else [target]
            bound = node.value.args[1]
            assert isinstance(bound, ast.List)
            names.update({ast.unparse(v): _Renamed(names).visit(e) for v, e in zip(held, bound.elts, strict=True)})
        elif call in ("T.axis.spatial", "T.axis.reduce") and isinstance(node.value, ast.Call):
            names[ast.unparse(target)] = _Renamed(names).visit(node.value.args[-1])
        elif call in ("T.alloc_buffer", "T.sblock_alloc_buffer") and isinstance(node.value, ast.Call):
            self.allocate(ast.unparse(target), node.value)
        elif not _is_sizes(node.value):
            raise self.refuse(node, "an assignment")

    def allocate(self, name: str, call: ast.Call) -> None:
        held = call.args[0]
        shape = [ast.unparse(n) for n in (held.elts if isinstance(held, ast.Tuple) else [held])]
        given = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "dtype"), None)
        dtype = given.value if isinstance(given, ast.Constant) else "float32"
        self.made.buffers[name] = DenseBuffer(name, tuple(shape), str(dtype), allocated=True)


def _is_sizes(value: ast.expr) -> bool:
    """Whether these are symbolic sizes."""
    held = value.elts if isinstance(value, ast.Tuple) else [value]
    return all(isinstance(v, ast.Call) and ast.unparse(v).startswith("T.int") and not v.args for v in held)


__all__ = ["DenseBuffer", "DenseProgram", "Statement", "read", "subscripts"]
