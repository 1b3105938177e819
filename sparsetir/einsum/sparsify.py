# SPDX-License-Identifier: Apache-2.0
"""`sparsify`: store operands of dense programs in sparse formats."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from tvm import ir, tirx

from sparsetir.einsum.operands import StorageLevel, own_levels, rows
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.formats.encoding import format as format_of
from sparsetir.formats.format import Format
from sparsetir.ir.views import decode
from sparsetir.lower import single
from sparsetir.script import parser
from sparsetir.script.printer import parse
from sparsetir.script.writer import Names, ProgramWriter
from sparsetir.transform.decompose import decompose_format

# Reader of a dense program of loops or blocks as statements: what each stores, and the loops around it.


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
        Number of each of these loops in the program.
    target : ast.Subscript
    value : ast.expr
    init : ast.expr, optional
        The value to which a block first sets the element.
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
        """Operator and operand, if the statement adds to its element or subtracts from it, else None."""
        target_text, value = ast.unparse(self.target), self.value
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, (ast.Add, ast.Sub)):
            return None
        if ast.unparse(value.left) == target_text:
            return ("+" if isinstance(value.op, ast.Add) else "-"), value.right
        if isinstance(value.op, ast.Add) and ast.unparse(value.right) == target_text:
            return "+", value.left
        return None

    @property
    def term(self) -> ast.expr:
        """The operand that the statement adds or subtracts, else the value that it stores."""
        return self.added[1] if self.added else self.value

    def reads(self) -> list[ast.Subscript]:
        """Return the elements that it reads, its own included."""
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
    """Return the text of each subscript."""
    elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [ast.unparse(index) for index in elements]


def read(func: tirx.PrimFunc) -> DenseProgram:
    """Return the statements of a dense program.

    Raises
    ------
    LoweringError
        It contains anything but loops, blocks and stores.
    """
    tree = parser.parse(func.script(extra_config={"tirx.prefix": "T", "script.use_pep695": False}))
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    buffers: dict[str, DenseBuffer] = {}
    scalars: dict[str, str] = {}
    for param in func.params:
        if tirx.is_buffer_var(param):
            shape = tuple(_extent(n, scalars) for n in param.ty.shape)
            buffers[str(param.name)] = DenseBuffer(str(param.name), shape, str(param.ty.dtype))
        else:
            scalars[str(param.name)] = str(param.ty.dtype)
    program = DenseProgram(str(func.attrs["global_symbol"]), buffers, scalars)
    _ProgramReader(program).body(node.body, {}, {}, {}, None)
    return program


def _extent(expr: Any, scalars: dict[str, str]) -> str:
    if isinstance(expr, tirx.IntImm):
        return str(int(expr))
    for name, dtype in ((str(v.name), str(v.ty.dtype)) for v in _variables(expr)):
        scalars.setdefault(name, dtype)
    return str(expr.name) if hasattr(expr, "name") else str(expr)


def _variables(expr: Any) -> list[Any]:
    from sparsetir.ir.rewriting import collect

    return collect(expr, tirx.Var)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.names.get(node.id, node))


class _ProgramReader:
    """Reader that traverses the text of a program."""

    def __init__(self, program: DenseProgram) -> None:
        self.program, self.count = program, 0

    def refuse(self, node: ast.AST, construct: str) -> LoweringError:
        line = ast.unparse(node).splitlines()[0]
        return LoweringError(f"sparsify reads loops, blocks and stores, got {construct}: {line}")

    def body(
        self,
        nodes: Sequence[ast.stmt],
        loops: dict[str, str],
        numbers: dict[str, int],
        names: dict[str, ast.expr],
        init: Mapping[str, ast.expr] | None,
    ) -> None:
        """Read the statements of a body; `names` are those of a block's variables."""
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
            self.program.statements.append(Statement(dict(loops), dict(numbers), place, value, first))
            return
        call = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        if call == "T.axis.remap" and isinstance(node.value, ast.Call):
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            bound = node.value.args[1]
            assert isinstance(bound, ast.List)
            names.update({ast.unparse(v): _Renamed(names).visit(e) for v, e in zip(targets, bound.elts, strict=True)})
        elif call in ("T.axis.spatial", "T.axis.reduce") and isinstance(node.value, ast.Call):
            names[ast.unparse(target)] = _Renamed(names).visit(node.value.args[-1])
        elif call in ("T.alloc_buffer", "T.sblock_alloc_buffer") and isinstance(node.value, ast.Call):
            self.allocate(ast.unparse(target), node.value)
        elif not _is_sizes(node.value):
            raise self.refuse(node, "an assignment")

    def allocate(self, name: str, call: ast.Call) -> None:
        extents = call.args[0]
        shape = [ast.unparse(n) for n in (extents.elts if isinstance(extents, ast.Tuple) else [extents])]
        dtype_node = (
            call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "dtype"), None)
        )
        dtype = dtype_node.value if isinstance(dtype_node, ast.Constant) else "float32"
        self.program.buffers[name] = DenseBuffer(name, tuple(shape), str(dtype), allocated=True)


def _is_sizes(value: ast.expr) -> bool:
    """Return whether these are symbolic sizes."""
    elements = value.elts if isinstance(value, ast.Tuple) else [value]
    return all(isinstance(v, ast.Call) and ast.unparse(v).startswith("T.int") and not v.args for v in elements)


# Sparsity as a property of a dense program: `sparsify`.


def sparsify(func: Any, formats: Mapping[str, Any]) -> Any:
    """Store some buffers of a dense program in formats.

    Parameters
    ----------
    func : PrimFunc
        A program of plain buffers, loops or blocks, and stores, each of them a ``for`` nest of its own after the
        loops are split.
    formats : mapping of str to Format or str
        For buffers by name, as `sparsetir.format` takes them. A result may be named if an operand in the same format is
        read with the same subscripts: it has that operand's pattern.

    Returns
    -------
    PrimFunc or Decomposition
        The program over these formats, for `sparsetir.build`; a decomposition if a format is no tree of levels.
        Statements that are zero where nothing is stored iterate over stored entries only; all others search entries.

    Raises
    ------
    ArgumentError
        A name or a format does not fit.
    LoweringError
        The program contains anything else, or its loops cannot be split.

    Examples
    --------
    >>> import sparsetir
    >>> from tvm.script import tirx as T
    >>> @T.prim_func
    ... def spmv(A: T.Buffer((16, 8), "float32"), x: T.Buffer((8,), "float32"), y: T.Buffer((16,), "float32")):
    ...     for i in range(16):
    ...         y[i] = T.float32(0)
    ...         for j in range(8):
    ...             y[i] = y[i] + A[i, j] * x[j]
    >>> program = sparsetir.sparsify(spmv, {"A": "csr"})
    >>> print(sparsetir.script(program).partition("with ")[2].strip())
    T.sp_iter([I], "S", "spmv_1") as [i]:
            y[i] = T.float32(0.0)
        with T.sp_iter([I, J], "SR", "spmv_2") as [i, j]:
            y[i] = y[i] + A[i, j] * x[j]
    """
    if not isinstance(func, (tirx.PrimFunc, ir.IRModule)):
        raise ArgumentTypeError(f"sparsify takes a PrimFunc, got {type(func).__name__}")
    func = single(func)
    if decode(func).iterations:
        raise ArgumentError("sparsify takes a dense program; this one has sparse iterations: see decompose_format")
    program = read(func)
    formats_of = {name: _chosen(program, name, fmt) for name, fmt in formats.items()}
    trees = {name: own_levels(tuple(fmt.rules)) for name, fmt in formats_of.items()}
    levels = {n: t if t is not None else rows(len(program.buffers[n].shape)) for n, t in trees.items()}
    for first, second in pairwise(program.statements):
        _check_split(first, second)
    writer = _SparseProgramWriter(program, levels, formats_of)
    sparse_program = parse(writer.text())
    pieces = {name: formats_of[name] for name, tree in trees.items() if tree is None}
    return decompose_format(sparse_program, pieces) if pieces else sparse_program


def _chosen(program: DenseProgram, name: str, fmt: Any) -> Format:
    buffer = program.buffers.get(name)
    if buffer is None:
        raise ArgumentError(f"{program.name} has no buffer {name!r}; there are {', '.join(program.buffers)}")
    return format_of(fmt).resolve(len(buffer.shape), "int32")


# ------------------------------------------------------------------ legality


def vanishes(value: ast.expr, buffer: str) -> bool:
    """Return whether an expression is zero where the elements of a buffer that it reads are."""
    if _is_zero(value):
        return True
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.value) == buffer
    if isinstance(value, ast.BinOp):
        left, right = vanishes(value.left, buffer), vanishes(value.right, buffer)
        if isinstance(value.op, ast.Mult):
            return left or right
        if isinstance(value.op, (ast.Div, ast.FloorDiv)):
            return left
        return isinstance(value.op, (ast.Add, ast.Sub)) and left and right
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.USub) and vanishes(value.operand, buffer)
    return isinstance(value, ast.Call) and _call_vanishes(value, buffer)


def _is_zero(value: ast.expr) -> bool:
    """Return whether an expression is the number zero."""
    while isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    return isinstance(value, ast.Constant) and value.value == 0


def _call_vanishes(value: ast.Call, buffer: str) -> bool:
    name = ast.unparse(value.func).rpartition(".")[2]
    if name in ("max", "min"):
        return all(vanishes(a, buffer) for a in value.args)
    if name in ("if_then_else", "Select"):
        return all(vanishes(a, buffer) for a in value.args[1:])
    return name in ("Cast", "cast", "abs", "fabs", "sqrt", "tanh", "sin") and vanishes(value.args[-1], buffer)


def _is_linear(value: ast.expr, buffer: str) -> bool:
    """Return whether an expression is linear in the elements of a buffer, so that duplicates add up."""
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.value) == buffer
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.USub) and _is_linear(value.operand, buffer)
    if not isinstance(value, ast.BinOp):
        return False
    left, right = (_reads(side, buffer) for side in (value.left, value.right))
    if isinstance(value.op, (ast.Add, ast.Sub)):
        return left and right and _is_linear(value.left, buffer) and _is_linear(value.right, buffer)
    if isinstance(value.op, ast.Mult):
        return not (left and right) and _is_linear(value.left if left else value.right, buffer)
    return isinstance(value.op, ast.Div) and not right and _is_linear(value.left, buffer)


def _reads(value: ast.expr, buffer: str) -> bool:
    return any(ast.unparse(n.value) == buffer for n in ast.walk(value) if isinstance(n, ast.Subscript))


def _check_split(first: Statement, second: Statement) -> None:
    """Raise unless two statements may have separate loops."""
    common = [v for v, n in first.numbers.items() if second.numbers.get(v) == n]
    for one, other in ((first, second), (second, first)):
        for node in other.reads() + ([other.target] if other is second else []):
            if ast.unparse(node.value) != one.buffer:
                continue
            pairs = list(zip(one.subscripts, subscripts(node), strict=False))
            apart = [v for v in common if (v, v) not in pairs]
            if apart:
                raise LoweringError(
                    f"{one.buffer} is stored and used by two statements of loop {apart[0]}, which cannot be split: "
                    f"give {one.buffer} a dimension for {apart[0]}"
                )


# ------------------------------------------------------------------ the program


def _top(variable: str) -> str:
    """Return the name of an axis."""
    return variable.upper() if variable.upper() != variable else f"{variable}_axis"


class _SparseProgramWriter(ProgramWriter):
    """Writer of the program."""

    def __init__(self, program: DenseProgram, levels: Mapping[str, tuple[StorageLevel, ...]], formats: Any) -> None:
        super().__init__(program.name)
        self.program, self.levels, self.formats = program, levels, formats
        self.names = Names()
        for name in [*program.buffers, *program.scalars, *(v for s in program.statements for v in s.loops)]:
            self.names.taken.add(name)
        for name, dtype in program.scalars.items():
            self.scalars(dtype, name)
        self.buffers: list[Callable[[], None]] = []  # write the lines that follow those of axes
        self.loops: list[Callable[[], None]] = []
        self.dense_axes: dict[tuple[str, str, int], str] = {}  # of a loop and its extent
        self.sparse: dict[str, list[str]] = {}  # of a buffer, by depth
        self.idtype = "int64" if any(f.index_type == "int64" for f in formats.values()) else "int32"
        self.models = {n: self._model(n) for n in levels if self._is_result(n)}
        for statement in program.statements:
            if statement.buffer in self.models:
                self._check_zero(statement, self.models[statement.buffer])

    # -------------------------------------------------------------- results with a pattern

    def _is_result(self, name: str) -> bool:
        return any(s.buffer == name for s in self.program.statements)

    def _model(self, name: str) -> str:
        """Return the operand whose pattern a result has."""
        for statement in self.program.statements:
            if statement.buffer != name:
                continue
            value = statement.term
            for node in ast.walk(value):
                candidate = ast.unparse(node.value) if isinstance(node, ast.Subscript) else ""
                if candidate in self.levels and candidate != name and isinstance(node, ast.Subscript):
                    alike = self.levels[candidate] == self.levels[name] and subscripts(node) == statement.subscripts
                    if alike and vanishes(value, candidate):
                        return candidate
        raise ArgumentError(
            f"{name} is a result: it can be sparse where a factor in the same format is read with the same subscripts"
        )

    def _check_zero(self, statement: Statement, model: str) -> None:
        """Raise unless a sparse result is zero where its model stores nothing."""
        value = statement.term
        if not (_is_zero(value) or vanishes(value, model)) or not (statement.init is None or _is_zero(statement.init)):
            raise ArgumentError(
                f"{statement.buffer} cannot be sparse: {ast.unparse(value)} is not zero where {model} stores nothing"
            )

    # -------------------------------------------------------------- axes

    def dense_axis(self, variable: str, extent: str, at: int = 0) -> str:
        """Return the axis of all coordinates of a loop, or of a dimension."""
        key = (variable, extent, at)
        if key not in self.dense_axes:
            top = _top(variable)
            self.dense_axes[key] = self.names.new(top, f"{top}_dense")
            self.dense(self.dense_axes[key], extent, self.idtype)
        return self.dense_axes[key]

    def buffer_variables(self, buffer: DenseBuffer) -> list[str]:
        """Return a loop variable for each dimension of a buffer, if possible that of its first use."""
        variables = [f"{buffer.name.lower()}{d}" for d in range(len(buffer.shape))]
        for statement in self.program.statements:
            for node in [statement.target, *statement.reads()]:
                if ast.unparse(node.value) != buffer.name:
                    continue
                for d, index in enumerate(subscripts(node)):
                    if statement.loops.get(index) == buffer.shape[d] and variables.count(index) == 0:
                        variables[d] = index if variables[d] not in statement.loops else variables[d]
        return variables

    def declare(self, buffer: DenseBuffer) -> None:
        """Declare a buffer and its axes."""
        variables = self.buffer_variables(buffer)
        if buffer.name in self.models:
            axes = self._ordered(self.models[buffer.name])
        elif buffer.name in self.levels:
            self._declare_levels(buffer, variables)
            axes = self._ordered(buffer.name)
        else:
            axes = [self.dense_axis(v, n) for v, n in zip(variables, buffer.shape, strict=True)]
        if buffer.allocated:
            self.buffers.append(partial(self.scratch, buffer.name, axes, buffer.dtype))
            return
        handle = self._array(buffer.name.lower(), f"{buffer.name.lower()}_data")
        self.buffers.append(partial(self.match, buffer.name, handle, axes, buffer.dtype))

    def _ordered(self, name: str) -> list[str]:
        levels = self.levels[name]
        by_dim = {level.dim: axis for level, axis in zip(levels, self.sparse[name], strict=True)}
        return [by_dim[d] for d in range(len(levels))]

    def _declare_levels(self, buffer: DenseBuffer, variables: list[str]) -> None:
        self.sparse[buffer.name] = axes = []
        parent = "None"
        for depth, level in enumerate(self.levels[buffer.name]):
            variable, extent = variables[level.dim], buffer.shape[level.dim]
            if level.kind == "dense":
                axes.append(self.dense_axis(variable, extent))
            else:
                axes.append(self.names.new(_top(variable), f"{_top(variable)}_{buffer.name}"))
                self._level(level, axes[-1], parent, extent, depth)
            parent = axes[-1]

    def _level(self, level: StorageLevel, axis: str, parent: str, extent: str, depth: int) -> None:
        if level.kind == "full":
            return self.full(axis, parent, extent, [f"c{n}" for n in range(depth)], self.idtype)
        flags = {"sorted": level.sorted, "unique": level.unique}
        indices = self._array(f"indices_{axis.lower()}")
        if level.kind == "singleton":
            return self.singleton(axis, parent, extent, indices, self.idtype, **flags)
        indptr, nnz = self._array(f"indptr_{axis.lower()}"), self.names.new(f"nnz_{axis.lower()}")
        self.scalars(self.idtype, nnz)
        return self.compressed(axis, parent, (extent, nnz), (indptr, indices), self.idtype, **flags)

    def _array(self, *candidates: str) -> str:
        """Declare a parameter that is an array; return its name."""
        self.inputs.append(self.names.new(*candidates))
        return self.inputs[-1]

    # -------------------------------------------------------------- iterations

    def driver(self, statement: Statement) -> str | None:
        """Return the buffer whose stored entries a statement may iterate over, or None."""
        value = statement.term
        for node in ast.walk(value):
            name = ast.unparse(node.value) if isinstance(node, ast.Subscript) else ""
            if name not in self.levels or name in self.models or not isinstance(node, ast.Subscript):
                continue
            variables = subscripts(node)
            shape = self.program.buffers[name].shape
            whole = all(statement.loops.get(v) == n for v, n in zip(variables, shape, strict=True))
            if whole and len(set(variables)) == len(variables) and vanishes(value, name):
                return name if self.read_once(value, name, variables) and self.may_repeat(value, name) else None
        return None

    def may_repeat(self, value: ast.expr, name: str) -> bool:
        """Return whether duplicate entries, if a format keeps them apart, still add up."""
        return _is_linear(value, name) or all(level.unique for level in self.levels[name])

    def read_once(self, value: ast.expr, name: str, variables: list[str]) -> bool:
        """Return whether all reads of a buffer are at the same element."""
        reads = [n for n in ast.walk(value) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == name]
        return all(subscripts(n) == variables for n in reads)

    def loop_over(self, statement: Statement, name: str) -> None:
        """Write one statement as an iteration."""
        driver = self.driver(statement)
        if statement.buffer in self.models:
            driver = self.models[statement.buffer]
        loops: dict[str, str] = {}
        if driver is not None:
            entered_axes = self._entered(statement, driver)
            loops = {
                entered_axes[v.dim]: axis for v, axis in zip(self.levels[driver], self.sparse[driver], strict=True)
            }
        for variable, extent in statement.loops.items():
            loops.setdefault(variable, self.dense_axis(variable, extent))
        kinds = "".join("S" if v in statement.subscripts else "R" for v in loops)
        self._check_kinds(statement, kinds)
        line, init = self._update(statement, driver)
        self.loops.append(partial(self.iterate, [*loops.values()], kinds, name, [line], init=init, variables=[*loops]))

    def _entered(self, statement: Statement, driver: str) -> list[str]:
        """Return the loops of a driver's dimensions."""
        if statement.buffer in self.models:
            return statement.subscripts
        return subscripts(next(n for n in statement.reads() if ast.unparse(n.value) == driver))

    def _check_kinds(self, statement: Statement, kinds: str) -> None:
        reads_target = any(ast.unparse(node) == ast.unparse(statement.target) for node in statement.reads())
        if "R" in kinds and not reads_target:
            text = f"{ast.unparse(statement.target)} = {ast.unparse(statement.value)}"
            raise LoweringError(f"a loop stores the same element of {statement.buffer} again and again: {text}")

    def _update(self, statement: Statement, driver: str | None) -> tuple[str, str | None]:
        """Return the assignment of a step, and the one before the first step of an element."""
        target, value = ast.unparse(statement.target), ast.unparse(statement.value)
        init = statement.init
        is_dense = driver is not None and statement.buffer not in self.models
        if is_dense and statement.added is None:  # zero where nothing is stored
            return f"{target} = {target} + {value}", f"{target} = 0"
        return f"{target} = {value}", None if init is None else f"{target} = {ast.unparse(init)}"

    def text(self) -> str:
        for name in sorted(self.program.buffers, key=lambda n: 2 if n not in self.levels else int(n in self.models)):
            self.declare(self.program.buffers[name])
        many = len(self.program.statements) > 1
        for number, statement in enumerate(self.program.statements, 1):
            self.loop_over(statement, f"{self.program.name}_{number}" if many else self.program.name)
        for write in [*self.buffers, *self.loops]:
            write()
        return super().text()


__all__ = ["DenseBuffer", "DenseProgram", "Statement", "read", "sparsify", "subscripts"]
