# SPDX-License-Identifier: Apache-2.0
"""Print programs in the dialect's syntax from TVM's raw text, and parse printed programs."""

from __future__ import annotations

import ast
import itertools
import json
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var
from tvm.script.parser import ir as script_ir
from tvm.tirx import layout

from sparsetir.errors import ArgumentTypeError, ScriptError, VerifyError
from sparsetir.ir.dialect import AXIS_NAMES, MERGES
from sparsetir.ir.views import SPARSE_ITER, Axis, SparseBuffer, const, decode
from sparsetir.ir.visitor import structural_walk
from sparsetir.script import builder, parser
from sparsetir.script import parser as trees
from sparsetir.utils.arguments import itemsize

# Print programs in the dialect's own words, and parse what was printed.
#
# TVM prints a stage-I function from its standard nodes. Its text is Python: `script` reads it with `ast`, lets
# `sweeten` put the dialect's statements in place of the raw ones, and prints the tree again. Expressions and
# ordinary statements stay TVM's.


WIDTH = 120
STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")
HEADER = "# from tvm.script import sparsetir as T"
MODULE_HEADER = f"# from tvm.script import ir as I\n{HEADER}\n# from tvm.script import relax as R"


def script(func: Any) -> str:
    """Print a function or module in the dialect.

    Parameters
    ----------
    func : PrimFunc or IRModule
        A program of any stage.

    Returns
    -------
    str
        A text that `parse` turns into an equal program.

    Examples
    --------
    >>> import sparsetir, tvm_ffi
    >>> func = sparsetir.ops.spmv()
    >>> tvm_ffi.structural_equal(sparsetir.parse(sparsetir.script(func)), func, map_free_vars=True)
    True
    """
    if not isinstance(func, (tirx.PrimFunc, tvm.IRModule)):
        raise VerifyError(f"expected a tirx.PrimFunc or an IRModule, got {type(func).__name__}")
    tree = trees.parse(func.script(extra_config={"tirx.prefix": "T", "script.use_pep695": False}))
    is_module = isinstance(func, tvm.IRModule)
    functions = {g.name_hint: f for g, f in func.functions.items()} if is_module else {}
    for node in _functions(tree):
        function = functions[node.name] if is_module else func
        if isinstance(function, tirx.PrimFunc):
            sweeten(node, function)
    _drop_unused_type_variables(tree)
    body = _layout(tree)
    typing = "# from typing import TypeVar\n" if "TypeVar(" in body else ""
    return f"{typing}{MODULE_HEADER if is_module else HEADER}\n\n{body}\n"


def parse(text: str) -> Any:
    """Parse a program text; in it `T` is the dialect, `I` and `R` are TVM's. Its imports are not run.

    Parameters
    ----------
    text : str
        What `script` or TVM's own printer printed, or what a user wrote.

    Returns
    -------
    PrimFunc or IRModule

    Raises
    ------
    ScriptError
        The text breaks a rule of the dialect; the message quotes the line.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"parse takes the text of a program, got {type(text).__name__}")
    try:
        tree = trees.parse(text)
    except SyntaxError as error:
        raise ScriptError(f"error: {error.msg}\n --> <str>:{error.lineno}:{error.offset}\n{error.text or ''}") from None
    if not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body):
        raise ScriptError("a text to parse is one function under @T.prim_func, or one class under @I.ir_module")
    names = {"T": parser, "I": script_ir, "tvm": tvm, "Axis": layout.Axis, "TypeVar": TypeVar}
    if re.search(r"\bR\.", text):
        from tvm.script.parser import relax as script_relax  # takes longer to import than most programs to parse

        names["R"] = script_relax
    imports = re.compile(r"^(?:import|from) .*$", re.MULTILINE)
    return parser.parse_text(imports.sub("", text), names)


def sweeten(node: ast.FunctionDef, func: tirx.PrimFunc) -> None:
    """Rewrite the raw tree of `func` in place."""
    body = Body(node, func)
    node.body = body.block(node.body)
    _plain_decorator(node)
    SignaturePrinter(node, func, body).write()
    _restore_names(node, body)


def _plain_decorator(node: ast.FunctionDef) -> None:
    """``@T.prim_func`` makes ``s_tir`` functions; only the others have to say it."""
    decorator: Any = node.decorator_list[-1]
    keywords = list(decorator.keywords) if isinstance(decorator, ast.Call) else []
    keywords_left = [k for k in keywords if k.arg != "s_tir"]
    if len(keywords_left) == len(keywords):
        keywords_left.append(ast.keyword("s_tir", ast.Constant(False)))
    node.decorator_list[-1] = (
        ast.Call(trees.member("prim_func"), [], keywords_left) if keywords_left else trees.member("prim_func")
    )


def _restore_names(node: ast.FunctionDef, body: Body) -> None:
    """Restore the names of axes that TVM reserves for its own modules, such as I and R."""
    used = set(trees.names_in(node)) | {a.arg for a in node.args.args}
    renamed = {name: axis.name for name, axis in body.axes.items() if name != axis.name and axis.name not in used}
    for child in trees.names(node) if renamed else ():
        child.id = renamed.get(child.id, child.id)


def _functions(tree: Any) -> list[ast.FunctionDef]:
    """Return the functions of a text, and those of its module's class, in order."""
    inside = [_functions(node) if isinstance(node, ast.ClassDef) else [node] for node in tree.body]
    return [node for nodes in inside for node in nodes if isinstance(node, ast.FunctionDef)]


def _drop_unused_type_variables(tree: ast.Module) -> None:
    """Remove ``nnz = TypeVar("nnz")`` where the program no longer names the size."""
    names = trees.names_in(tree)

    def is_unused(node: ast.stmt) -> bool:
        is_declaration = isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar(")
        return is_declaration and names[ast.unparse(node.targets[0])] == 1  # type: ignore[attr-defined]

    tree.body = [node for node in tree.body if not is_unused(node)]


# ---------------------------------------------------------------------------------------------- layout


def _layout(tree: ast.Module) -> str:
    """Return the tree as text: double quotes, signatures folded to the line width."""
    lines = _double_quotes(ast.unparse(tree)).strip().splitlines()
    signatures = iter(_functions(tree))
    out: list[str] = []
    for line in lines:
        if re.match(r"\s*def \w+\(", line) and len(line) > WIDTH:
            out += _folded(line, next(signatures))
            continue
        if re.match(r"\s*def \w+\(", line):
            next(signatures)
        out.append(line)
    return "\n".join(out)


def _folded(line: str, node: ast.FunctionDef) -> Iterator[str]:
    """Yield a signature over several lines, filled to the width."""
    indent = " " * (len(line) - len(line.lstrip()))
    returns = "" if node.returns is None else f" -> {_double_quotes(ast.unparse(node.returns))}"
    yield f"{indent}def {node.name}("
    row = ""
    for arg in node.args.args:
        item = f"{_double_quotes(ast.unparse(arg))},"
        if row and len(indent) + 4 + len(row) + 1 + len(item) > WIDTH:
            yield f"{indent}    {row}"
            row = ""
        row = f"{row} {item}" if row else item
    yield f"{indent}    {row}"
    yield f"{indent}){returns}:"


def _double_quotes(text: str) -> str:
    """Strings as TVM and most formatters write them; `ast.unparse` leaves no comments, and no string over two lines."""
    return STRING.sub(lambda match: json.dumps(trees.literal(match[0])) if match[0][0] == "'" else match[0], text)


# How programs show themselves: as their script.


def is_program(value: Any) -> bool:
    """Return whether `value` is a function of stage I, or a module that contains one."""
    if isinstance(value, ir.IRModule):
        return any(is_program(func) for func in value.functions.values())
    return isinstance(value, tirx.PrimFunc) and bool(decode(value).axes)


def show_programs_as_scripts() -> None:
    """Let functions and modules of the dialect, and no others, be shown as their script.

    TVM's own representation spells out the nodes behind axes and iterations; ``func.script()`` still prints it.
    """
    for kind in (tirx.PrimFunc, ir.IRModule):
        kind.__repr__ = _as_script(kind.__repr__)


def _as_script(plain: Callable[[Any], str]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        try:
            return script(self) if is_program(self) else plain(self)
        except Exception:  # half-made nodes are shown, too
            return plain(self)

    return __repr__


# --------------------------------------------------------------------------- statements of the dialect


# The loops of a program without its arithmetic.


HEADS = ("for ", "if ", "else:", "with T.s")
STORE = re.compile(r"( *)(\w+)\[.*\] = .*")


def outline(text: str) -> str:
    r"""Return the loops and conditions of a script with the arrays that are stored in them, and its searches.

    Examples
    --------
    >>> print(outline("for i in range(m):\n    x = T.int32()\n    y[i * 4] = a[i] + y[i]\n    y[i] = T.exp(a[i])"))
    for i in range(m):
        y[...] = ...
    """
    return "\n".join(line for line, _ in itertools.groupby(_kept(text.splitlines())))


def _kept(lines: list[str]) -> Iterator[str]:
    searched = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if searched is not None and depth > searched:
            continue
        searched = depth if line.lstrip().startswith("while ") else None
        if searched is not None:
            yield f"{line[:depth]}while ...:"
            continue
        store = STORE.fullmatch(line)
        if store is not None:
            yield f"{store[1]}{store[2]}[...] = ..."
        elif line.lstrip().startswith(HEADS):
            yield line


# The parameters of a printed function: ``a: T.handle`` where the body's declarations make just this array of it.
#
# before::
#
#     def spmv(a: T.Buffer(("nnz",), "float32", align=4), x: T.Buffer(("n",), "float32"), ...):
#
# after::
#
#     def spmv(a: T.handle, x: T.Buffer(("n",), "float32"), ...):


class SignaturePrinter:
    """Chooses ``T.handle`` or ``T.Buffer`` for each array parameter, and which sizes go without a name.

    A handle is right when the body's declarations make exactly this parameter of it. A size that only an array
    tells has no name then, unless the body needs it.
    """

    def __init__(self, node: ast.FunctionDef, func: tirx.PrimFunc, body: Body) -> None:
        self.node, self.func, self.body = node, func, body
        self.names = parser.names_in(*node.body)
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
                self.args[param].annotation = parser.member("handle")
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
        """Yield the shape and type that each axis over `param` would give it."""
        for axis in self.body.program.axes.values():
            above = const(1) if axis.parent is None else axis.parent.count
            if axis.indptr is not None and axis.indptr.same_as(param):
                yield [above + 1], axis.idtype
            if axis.indices is not None and axis.indices.same_as(param):
                yield [_index_count(axis, above)], axis.idtype

    # ------------------------------------------------------------------ sizes

    def _free_sizes(self) -> list[Var]:
        """Return the sizes that are no parameters."""
        sizes: dict[Var, None] = {}
        for param in self.arrays:
            for var in _variables(param):
                if var not in self.func.params:
                    sizes.setdefault(var)
        return list(sizes)

    def _is_hidden(self, var: Var) -> bool:
        """Return whether the program can do without a name for the size `var`."""
        if var in self.body.computed:
            return not self.names[self.body.computed[var]] and not any(var in _variables(p) for p in self.buffers)
        own_sizes = [s for s in self.body.sizes if s.var.same_as(var)]
        arrays = {s.axis.indices if s.axis.indices is not None else s.call for s in own_sizes}
        if len(arrays) != 1 or any(var in _variables(p) for p in self.buffers):
            return False
        count = own_sizes[0].call.args[1].elts[1]  # type: ignore[attr-defined]
        name = ast.unparse(count.left if isinstance(count, ast.BinOp) else count)
        return self.names[name] == len(own_sizes)

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
    """Return the number of elements that the dialect expects in the index array of `axis`."""
    if axis.kind == "sparse_fixed":
        explicit = told_width(axis)
        return builder.times(above, axis.width) if explicit is None else explicit
    return above if axis.kind == "singleton" else _uncast(axis.count, axis.idtype)


def _uncast(expr: ir.Expr, dtype: str) -> ir.Expr:
    """Strip the conversion to `dtype` that the dialect added."""
    is_cast = isinstance(expr, tirx.Cast) and str(expr.ty.dtype) == dtype
    return expr.value if is_cast and not isinstance(expr.value, tirx.IntImm) else expr


def _variables(param: Var) -> list[Var]:
    """Return the variables in the shape of an array parameter."""
    variables: dict[Var, None] = {}
    for extent in param.ty.shape:
        structural_walk(extent, (Var, lambda v: variables.setdefault(v)))
    return list(variables)


def _defines(param: Var, var: Var) -> bool:
    return any(extent.same_as(var) for extent in param.ty.shape)


def _quote_new_names(node: ast.FunctionDef) -> None:
    """Quote a size in the signature where it is met first, as TVM's parser wants it."""
    declared = {"T"}
    for arg in node.args.args:
        annotation: Any = arg.annotation
        if parser.called(annotation) == "Buffer":
            shape = annotation.args[0]
            shape.elts = [_quoted(_unquoted(extent), declared) for extent in shape.elts]
        declared.add(arg.arg)


def _unquoted(extent: ast.expr) -> ast.expr:
    is_text = isinstance(extent, ast.Constant) and isinstance(extent.value, str)
    return parser.parse(extent.value, mode="eval").body if is_text else extent  # type: ignore[attr-defined]


def _has_text(extent: ast.expr) -> bool:
    """Return whether `extent` contains a string, which TVM would take for a size unless the whole is quoted."""
    return any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(extent))


def _quoted(extent: ast.expr, declared: set[str]) -> ast.expr:
    names = set(parser.names_in(extent))
    if names <= declared and not _has_text(extent):
        return extent
    declared |= names
    return ast.Constant(ast.unparse(extent))


# From TVM's raw text of a stage-I function to the dialect's statements, as Python trees.
#
# before::
#
#     @T.prim_func(s_tir=True)
#     def spmv(a: T.Buffer(("nnz",), "float32", align=4), ...):
#         I_1: T.let[T.int32] = T.sp.dense_fixed(m)
#         J: T.let[T.int32] = T.sp.sparse_variable(I_1, n, nnz, indptr, indices, 1, 1)
#         A = a.view(m, n)
#         T.sp.bind_axes(A, T.float32(0.0), I_1, J)
#         with T.sblock("spmv"):
#             i = T.axis.spatial(m, T.sp.coord(I_1, 0))
#             j = T.axis.reduce(n, T.sp.coord(J, 0))
#             T.reads()
#             T.writes()
#             T.sblock_attr({"sparse_iter": "SR"})
#             ...
#
# after::
#
#     @T.prim_func
#     def spmv(a: T.handle, ...):
#         I = T.dense_fixed(m)
#         J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
#         A = T.match_sparse_buffer(a, (I, J), "float32")
#         with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
#             ...
#
# A statement that the dialect's words would not give back exactly stays raw, a parameter stays a ``T.Buffer``.


DECLARATIONS = (*AXIS_NAMES, "match_sparse_buffer")


@dataclass
class AxisCount:
    """A count that an axis takes from its array, with the tree that names it: ``(length, count)``."""

    axis: Axis
    var: Var
    call: ast.Call


def told_width(axis: Axis) -> Var | None:
    """Return the number of all indices, of which the width of an axis is a part for each fiber."""
    width = axis.width
    if axis.indices is None or not isinstance(width, tirx.FloorDiv) or not isinstance(width.b, tirx.Max):
        return None
    return width.a if isinstance(width.a, Var) and width.a.same_as(axis.indices.ty.shape[0]) else None


@dataclass
class Body:
    """Rewrites statements; remembers what the signature must know."""

    node: ast.FunctionDef
    func: tirx.PrimFunc
    mentions: Counter[str] = field(default_factory=Counter)
    late: set[str] = field(default_factory=set)
    sizes: list[AxisCount] = field(default_factory=list)
    computed: dict[Var, str] = field(default_factory=dict)  # numbers of entries that the program computes, by name
    matched: dict[Var, list[SparseBuffer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program = decode(self.func)
        self.raw_names = parser.names_in(self.node)
        self.axes: dict[str, Axis] = {}
        self.lengths: dict[str, str] = {}
        self._open: list[list[ast.stmt]] = []
        self._axes = iter(self.program.axes.values())
        self._buffers = iter(self.program.buffers.values())

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of one block, rewritten."""
        out: list[ast.stmt] = []
        self._open.append(out)
        for statement in statements:
            if _is_bind(statement):
                self._bind(statement.value, out)  # type: ignore[attr-defined]
            elif not _is_size(statement):
                out.append(self._statement(statement))
        self._open.pop()
        return out or [ast.Pass()]

    def _mention(self, array: str) -> None:
        """Record a use of `array` by the dialect's syntax; TVM matches no handle once a frame is open."""
        self.mentions[array] += 1
        if len(self._open) > 1 or any(_opens_frame(s) for s in self._open[0]):
            self.late.add(array)

    def _statement(self, statement: Any) -> ast.stmt:
        if _is_axis(statement):
            return self._axis(statement)
        iteration = self._iteration(statement)
        if iteration is not None:
            return iteration
        for part in ("body", "orelse"):
            if getattr(statement, part, None):
                setattr(statement, part, self.block(getattr(statement, part)))
        return statement

    # ------------------------------------------------------------------ axes

    def _axis(self, statement: ast.AnnAssign) -> ast.stmt:
        axis, call = next(self._axes), statement.value
        name = statement.target.id  # type: ignore[union-attr]
        args = [parser.plain(a, axis.idtype) for a in call.args]  # type: ignore[union-attr]
        self.axes[name] = axis
        self.lengths[name] = ast.unparse(call.args[0 if axis.kind == "dense_fixed" else 1])  # type: ignore[union-attr]
        declaration = getattr(self, f"_{axis.kind}")(axis, args)
        return parser.assign(name, declaration)

    def _dense_fixed(self, axis: Axis, args: list[ast.expr]) -> ast.Call:
        idtype = [] if axis.idtype == "int32" else [ast.Constant(axis.idtype)]
        return parser.call("dense_fixed", args[0], *idtype)

    def _dense_variable(self, axis: Axis, args: list[ast.expr]) -> ast.Call:
        declaration = _axis_call("dense_variable", axis, args, self._array(args[3]))
        self._size(axis, axis.count, declaration)
        return declaration

    def _dense_implicit(self, axis: Axis, args: list[ast.expr]) -> ast.Call:
        names = [a.name for a in axis.ancestors]
        rules = {"extent": _lambda(args[3], names), "offset": _lambda(args[4], names)}
        idtype = {} if axis.idtype == "int32" else {"idtype": ast.Constant(axis.idtype)}
        return parser.call("dense_variable", _parent(args[0]), parser.tuple_of(args[1:3]), **rules, **idtype)

    def _sparse_fixed(self, axis: Axis, args: list[ast.expr]) -> ast.Call:
        declaration = _axis_call("sparse_fixed", axis, args, self._where(axis, args[3]))
        if axis.indices is not None:
            self._size(axis, axis.width, declaration)
        return _flagged(declaration, axis)

    def _sparse_variable(self, axis: Axis, args: list[ast.expr]) -> ast.Call:
        arrays = parser.tuple_of([self._array(args[3]), self._where(axis, args[4])])
        declaration = _axis_call("sparse_variable", axis, args, arrays)
        self._size(axis, axis.count, declaration)
        return _flagged(declaration, axis)

    def _singleton(self, axis: Axis, args: list[ast.expr]) -> ast.Call:
        declaration = parser.call(
            "singleton", _parent(args[0]), args[1], self._where(axis, args[2]), ast.Constant(axis.idtype)
        )
        return _flagged(declaration, axis)

    def _sparse_assembled(self, axis: Axis, args: list[ast.expr]) -> ast.Call:
        declaration = parser.call("sparse_assembled", _parent(args[0]), args[1], ast.Constant(axis.idtype))
        self.computed[axis.count] = ast.unparse(args[2])
        return _flagged(declaration, axis)

    def _array(self, node: ast.expr) -> ast.expr:
        self._mention(ast.unparse(node))
        return node

    def _where(self, axis: Axis, node: ast.expr) -> ast.expr:
        if axis.indices is not None:
            return self._array(node)
        names = [*(a.name for a in axis.ancestors), "s"]
        takes_position = any(_argument(n) == len(names) for n in ast.walk(node))
        return _lambda(node, [*names, "p"] if takes_position else names)

    def _size(self, axis: Axis, count: ir.Expr | None, call: ast.Call) -> None:
        explicit = told_width(axis) if axis.kind == "sparse_fixed" else None
        count = count if explicit is None else explicit
        if isinstance(count, Var) and count not in self.func.params:
            self.sizes.append(AxisCount(axis, count, call))

    # ------------------------------------------------------------------ buffers

    def _bind(self, bind: ast.Call, out: list[ast.stmt]) -> None:
        """Append the declaration of a sparse buffer, in place of the raw statements at the end of `out`."""
        buffer, name = next(self._buffers), ast.unparse(bind.args[0])
        declared = bool(out) and parser.target_of(out[-1]) == name
        if not declared or not same_type(buffer.view, [a.length for a in buffer.axes], buffer.dtype):
            out.append(ast.Expr(bind))
            return
        storage = _storage_name(out.pop())
        axes, dtype = parser.tuple_of(list(bind.args[2:])), ast.Constant(buffer.dtype)
        default = _default(bind.args[1], buffer.dtype)
        if buffer.allocated and out and self._is_scratch(out[-1], storage, buffer):
            out.pop()
            scope = str(buffer.storage.ty.storage_scope)
            place = {} if scope == "global" else {"scope": ast.Constant(scope)}
            out.append(parser.assign(name, parser.call("alloc_sparse_buffer", axes, dtype, **place, **default)))
            return
        self._mention(storage)
        self.matched.setdefault(buffer.storage, []).append(buffer)
        out.append(
            parser.assign(name, parser.call("match_sparse_buffer", parser.name(storage), axes, dtype, **default))
        )

    def _is_scratch(self, statement: ast.stmt, storage: str, buffer: SparseBuffer) -> bool:
        """Return whether `statement` allocates just what ``T.alloc_sparse_buffer`` would."""
        if parser.target_of(statement) != storage or not parser.called(statement.value).startswith("alloc_"):  # type: ignore[attr-defined]
            return False
        scope = buffer.storage.ty.storage_scope
        expected = tirx.decl_buffer(buffer.storage_shape, buffer.dtype, scope=scope, layout=None)
        keywords = {k.arg for k in statement.value.keywords}  # type: ignore[attr-defined]
        return (
            self.raw_names[storage] == 2 and keywords <= {"dtype", "scope"} and _equal(expected.ty, buffer.storage.ty)
        )

    # ------------------------------------------------------------------ iterations

    def _iteration(self, statement: Any) -> ast.stmt | None:
        """Return an sp_iter for its raw block; None if it is none, or not one that the dialect would make."""
        if not isinstance(statement, ast.With) or parser.called(statement.items[0].context_expr) != "sblock":
            return None
        block = _RawBlock(statement)
        entries = block.entries(self.lengths)
        if not entries:
            return None
        call = parser.call("sp_iter", ast.List(entries, ast.Load()), ast.Constant(block.kinds), block.name)
        variables: list[ast.expr] = [ast.Name(v, ast.Store()) for v in block.variables]
        item = ast.withitem(call, ast.List(variables, ast.Store()))
        notes: list[ast.stmt] = [ast.Expr(parser.call("sp_iter_attr", block.notes))] if block.notes.keys else []
        return ast.With([item], [*notes, *self.block(block.body)], lineno=0)


def _is_axis(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.AnnAssign):
        return False
    return parser.called(statement.value) in [f"sp.{name}" for name in AXIS_NAMES]


def _is_bind(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and parser.called(statement.value) == "sp.bind_axes"


def _opens_frame(statement: ast.stmt) -> bool:
    """Return whether the statements after `statement` are inside it, as after ``T.decl_buffer``."""
    called = parser.called(getattr(statement, "value", None))
    if isinstance(statement, ast.Expr):
        return called not in ("func_attr", "evaluate")
    if isinstance(statement, ast.Assign) and parser.target_of(statement):
        return not called.startswith("alloc_") and called not in DECLARATIONS
    return isinstance(statement, ast.Assert)


def _is_size(statement: ast.stmt) -> bool:
    """``nnz = T.int32()``: the signature quotes the size instead."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    return parser.called(statement.value).startswith("int") and not statement.value.args


def _parent(node: ast.expr) -> ast.expr:
    return ast.Constant(None) if parser.called(node) == "sp.root" else node


def _axis_call(name: str, axis: Axis, args: list[ast.expr], arrays: ast.expr) -> ast.Call:
    """``T.name(parent, (length, count), arrays, idtype)`` from the operator's arguments."""
    return parser.call(name, _parent(args[0]), parser.tuple_of(args[1:3]), arrays, ast.Constant(axis.idtype))


def _flagged(declaration: ast.Call, axis: Axis) -> ast.Call:
    if axis.full:
        declaration.keywords.append(ast.keyword("full", ast.Constant(True)))
    for flag in ("sorted", "unique"):
        if not getattr(axis, flag):
            declaration.keywords.append(ast.keyword(flag, ast.Constant(False)))
    return declaration


def _lambda(rule: ast.expr, stems: list[str]) -> ast.expr:
    """Return the callable whose k-th parameter is ``T.sp.arg(dtype, k)`` in `rule`."""
    used = set(parser.names_in(rule))
    parameters: list[str] = []
    for name in (str(w).lower() for w in stems):
        while name in used or keyword.iskeyword(name):
            name += "_"
        used.add(name)
        parameters.append(name)

    class Fill(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if _argument(node) >= 0:
                return parser.name(parameters[_argument(node)])
            return self.generic_visit(node)

    arguments = ast.arguments([], [ast.arg(p) for p in parameters], None, [], [], None, [])
    return ast.Lambda(arguments, Fill().visit(rule))


def _argument(node: ast.AST) -> int:
    """Return k of ``T.sp.arg(dtype, k)``, -1 for anything else."""
    return node.args[-1].value if parser.called(node) == "sp.arg" else -1  # type: ignore[attr-defined]


def _default(node: ast.expr, dtype: str) -> dict[str, ast.expr]:
    value = parser.plain(node, dtype)
    return {} if isinstance(value, ast.Constant) and value.value == 0 else {"default_value": value}


def _storage_name(declaration: ast.stmt) -> str:
    """Return ``a`` for ``A = a.view(...)`` and for ``A = T.decl_buffer(..., data=a.data)``."""
    attributes = [n for n in ast.walk(declaration) if isinstance(n, ast.Attribute) and n.attr in ("view", "data")]
    return ast.unparse(attributes[0].value)


def _equal(a: Any, b: Any) -> bool:
    return bool(tvm_ffi.structural_equal(a, b))


def same_type(buffer: Var, shape: list[ir.Expr], dtype: str) -> bool:
    """Return whether the dialect would declare `buffer` like this."""
    align = itemsize(dtype)
    return _equal(tirx.decl_buffer(shape, dtype, data_alignment=align, layout=None).ty, buffer.ty)


class _RawBlock:
    """The raw block of a sparse iteration, taken apart."""

    def __init__(self, statement: ast.With) -> None:
        self.name = statement.items[0].context_expr.args[0]  # type: ignore[attr-defined]
        self.variables: list[str] = []
        self.domains: list[tuple[str, str, ast.Call]] = []
        self.regions: list[ast.expr] = []
        self.notes = ast.Dict([], [])
        self.kinds = ""
        self.body = list(statement.body)
        while self.body and self._head(self.body[0]):
            self.body.pop(0)

    def _head(self, statement: Any) -> bool:
        """Return whether `statement` belongs to the block's head, and read it if it does."""
        value: Any = getattr(statement, "value", None)
        called = parser.called(value)
        if called in ("axis.spatial", "axis.reduce") and parser.called(value.args[1]) == "sp.coord":
            self.variables.append(parser.target_of(statement))
            self.domains.append((called, ast.unparse(value.args[0]), value.args[1]))
        elif called in ("reads", "writes"):
            self.regions += value.args
        elif called == "sblock_attr":
            self._attributes(value.args[0])
        else:
            return False
        return True

    def _attributes(self, attrs: ast.Dict) -> None:
        for key, value in zip(attrs.keys, attrs.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == SPARSE_ITER:
                self.kinds = value.value  # type: ignore[attr-defined]
                continue
            self.notes.keys.append(key)
            self.notes.values.append(value)

    def entries(self, lengths: dict[str, str]) -> list[ast.expr]:
        """Return the items of the sp_iter's list; empty if the dialect would not make this block."""
        letters = "".join("S" if called == "axis.spatial" else "R" for called, _, _ in self.domains)
        if not self.kinds or self.kinds != letters or self.regions:
            return []
        if any(domain not in [lengths.get(m) for m in _members(coord)] for _, domain, coord in self.domains):
            return []
        heads = [coord.args[0] for _, _, coord in self.domains if _number(coord) == 0]
        return [_entry(head) for head in heads] if self._in_order() else []

    def _in_order(self) -> bool:
        """Return whether the members of every fused entry follow each other."""
        expected: list[tuple[str, int]] = []
        for _, _, coord in self.domains:
            if _number(coord) == 0:
                head = coord.args[0]
                count = len(head.args) if parser.called(head) == "sp.fuse" else 1  # type: ignore[attr-defined]
                expected += [(ast.unparse(head), k) for k in range(count)]
        return expected == [(ast.unparse(c.args[0]), _number(c)) for _, _, c in self.domains]


def _number(coord: ast.Call) -> int:
    return int(coord.args[1].value)  # type: ignore[attr-defined]


def _members(coord: ast.Call) -> list[str]:
    """Return the axes whose coordinate ``T.sp.coord(item, member)`` is: one, or all that are walked together."""
    items = [coord.args[0]]
    if parser.called(items[0]) == "sp.fuse":
        items = [items[0].args[_number(coord)]]  # type: ignore[attr-defined]
    elif parser.called(items[0]) in [f"sp.{name}" for name in MERGES]:
        items = items[0].args  # type: ignore[attr-defined]
    return [ast.unparse(i.args[0] if parser.called(i) == "sp.attach" else i) for i in items]  # type: ignore[attr-defined]


def _entry(item: ast.expr) -> ast.expr:
    called = parser.called(item)
    return parser.call(called.removeprefix("sp."), *map(_entry, item.args)) if called else item  # type: ignore[attr-defined]


__all__ = ["outline", "show_programs_as_scripts"]
