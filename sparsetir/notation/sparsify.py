# SPDX-License-Identifier: Apache-2.0
"""Sparsity as a property of a dense program: `sparsify`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from tvm import ir, tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.formats.encodings import format as format_of
from sparsetir.formats.format import Format
from sparsetir.ir import decode
from sparsetir.lower import single
from sparsetir.notation.dense_text import DenseBuffer, DenseProgram, Statement, read, subscripts
from sparsetir.notation.emit import Names
from sparsetir.notation.operands import Level, own_levels, rows
from sparsetir.script.printer import parse
from sparsetir.transform.decompose import decompose_format


def sparsify(func: Any, formats: Mapping[str, Any]) -> Any:
    """Store some buffers of a dense program in formats.

    Parameters
    ----------
    func : PrimFunc
        A program of plain buffers, loops or blocks, and stores, each of them a ``for`` nest of its own after the
        loops are split.
    formats : mapping of str to Format or str
        For buffers by name, as `sparsetir.format` takes them. A result may be named where an operand in the same format
        is read with the same subscripts: it has that operand's pattern.

    Returns
    -------
    PrimFunc or Decomposition
        The program over these formats, for `sparsetir.build`; a decomposition where a format is no tree of levels.
        What reads zero where nothing is stored runs over stored entries only; all else looks entries up.

    Raises
    ------
    ArgumentError
        A name or a format does not fit.
    LoweringError
        The program holds something else, or its loops cannot be split.

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
        raise ArgumentTypeError(f"sparsify takes a PrimFunc, found {type(func).__name__}")
    func = single(func)
    if decode(func).iterations:
        raise ArgumentError("sparsify takes a dense program; this one has sparse iterations: see decompose_format")
    program = read(func)
    chosen = {name: _chosen(program, name, fmt) for name, fmt in formats.items()}
    trees = {name: own_levels(tuple(fmt.rules)) for name, fmt in chosen.items()}
    levels = {n: t if t is not None else rows(len(program.buffers[n].shape)) for n, t in trees.items()}
    for first, second in pairwise(program.statements):
        _check_split(first, second)
    writer = _Writer(program, levels, chosen)
    made = parse(writer.text())
    pieces = {name: chosen[name] for name, tree in trees.items() if tree is None}
    return decompose_format(made, pieces) if pieces else made


def _chosen(program: DenseProgram, name: str, fmt: Any) -> Format:
    buffer = program.buffers.get(name)
    if buffer is None:
        raise ArgumentError(f"{program.name} has no buffer {name!r}; there are {', '.join(program.buffers)}")
    return format_of(fmt).resolve(len(buffer.shape), "int32")


# ------------------------------------------------------------------ what may be done


def vanishes(value: ast.expr, buffer: str) -> bool:
    """Whether an expression is zero where the elements of a buffer that it reads are."""
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
    """Whether an expression is the number zero."""
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
    """Whether an expression that reads a buffer adds up where elements of it do."""
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
    """Raise unless two statements may have loops of their own."""
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
    """The name of an axis."""
    return variable.upper() if variable.upper() != variable else f"{variable}_axis"


class _Writer:
    """Writes the program."""

    def __init__(self, program: DenseProgram, levels: Mapping[str, tuple[Level, ...]], formats: Any) -> None:
        self.program, self.levels, self.formats = program, levels, formats
        self.names = Names()
        for name in [*program.buffers, *program.scalars, *(v for s in program.statements for v in s.loops)]:
            self.names.taken.add(name)
        self.handles: list[str] = []
        self.scalars = [f"{name}: T.{dtype}" for name, dtype in program.scalars.items()]
        self.axes: list[str] = []
        self.matches: list[str] = []
        self.body: list[str] = []
        self.dense: dict[tuple[str, str, int], str] = {}  # of a loop and its extent
        self.sparse: dict[str, list[str]] = {}  # of a buffer, by depth
        self.idtype = "int64" if any(f.index_type == "int64" for f in formats.values()) else "int32"
        self.results = {n: self._model(n) for n in levels if self._is_result(n)}
        for statement in program.statements:
            if statement.buffer in self.results:
                self._check_zero(statement, self.results[statement.buffer])

    # -------------------------------------------------------------- results with a pattern

    def _is_result(self, name: str) -> bool:
        return any(s.buffer == name for s in self.program.statements)

    def _model(self, name: str) -> str:
        """The operand whose pattern a result has."""
        for statement in self.program.statements:
            if statement.buffer != name:
                continue
            value = statement.added[1] if statement.added else statement.value
            for node in ast.walk(value):
                other = ast.unparse(node.value) if isinstance(node, ast.Subscript) else ""
                if other in self.levels and other != name and isinstance(node, ast.Subscript):
                    alike = self.levels[other] == self.levels[name] and subscripts(node) == statement.subscripts
                    if alike and vanishes(value, other):
                        return other
        raise ArgumentError(
            f"{name} is a result: it can be sparse where a factor in the same format is read with the same subscripts"
        )

    def _check_zero(self, statement: Statement, model: str) -> None:
        """Raise unless a sparse result is zero where its model stores nothing."""
        value = statement.added[1] if statement.added else statement.value
        if not (_is_zero(value) or vanishes(value, model)) or not (statement.init is None or _is_zero(statement.init)):
            raise ArgumentError(
                f"{statement.buffer} cannot be sparse: {ast.unparse(value)} is not zero where {model} stores nothing"
            )

    # -------------------------------------------------------------- axes

    def dense_axis(self, variable: str, extent: str, at: int = 0) -> str:
        """The axis of all coordinates of a loop, or of a dimension."""
        key = (variable, extent, at)
        if key not in self.dense:
            top = _top(variable)
            self.dense[key] = self.names.new(top, f"{top}_dense")
            self.axes.append(f"{self.dense[key]} = T.dense_fixed({extent}{self._wide})")
        return self.dense[key]

    @property
    def _wide(self) -> str:
        return ', "int64"' if self.idtype == "int64" else ""

    def buffer_variables(self, buffer: DenseBuffer) -> list[str]:
        """A loop variable for each dimension of a buffer, that of its first use where there is one of its extent."""
        found = [f"{buffer.name.lower()}{d}" for d in range(len(buffer.shape))]
        for statement in self.program.statements:
            for node in [statement.target, *statement.reads()]:
                if ast.unparse(node.value) != buffer.name:
                    continue
                for d, index in enumerate(subscripts(node)):
                    if statement.loops.get(index) == buffer.shape[d] and found.count(index) == 0:
                        found[d] = index if found[d] not in statement.loops else found[d]
        return found

    def declare(self, buffer: DenseBuffer) -> None:
        """A buffer and its axes."""
        variables = self.buffer_variables(buffer)
        if buffer.name in self.results:
            axes = self._ordered(self.results[buffer.name])
        elif buffer.name in self.levels:
            self._declare_levels(buffer, variables)
            axes = self._ordered(buffer.name)
        else:
            axes = [self.dense_axis(v, n) for v, n in zip(variables, buffer.shape, strict=True)]
        held = ", ".join(axes) + ("," if len(axes) == 1 else "")
        if buffer.allocated:
            self.matches.append(f'{buffer.name} = T.alloc_sparse_buffer(({held}), "{buffer.dtype}")')
            return
        handle = self.names.new(buffer.name.lower(), f"{buffer.name.lower()}_data")
        self.handles.append(f"{handle}: T.handle")
        self.matches.append(f'{buffer.name} = T.match_sparse_buffer({handle}, ({held}), "{buffer.dtype}")')

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
                self.axes.append(f"{axes[-1]} = T.{self._level(level, axes[-1], parent, extent, depth)}")
            parent = axes[-1]

    def _level(self, level: Level, axis: str, parent: str, extent: str, depth: int) -> str:
        low = axis.lower()
        flags = "".join(f", {f}=False" for f in ("sorted", "unique") if not getattr(level, f))
        if level.kind == "full":
            above = ", ".join([*(f"c{n}" for n in range(depth)), "s"])
            return f"sparse_fixed({parent}, ({extent}, {extent}), lambda {above}: s{self._wide}, full=True)"
        indices = self._array(f"indices_{low}")
        if level.kind == "singleton":
            return f"singleton({parent}, {extent}, {indices}{self._wide}{flags})"
        indptr, nnz = self._array(f"indptr_{low}"), self.names.new(f"nnz_{low}")
        self.scalars.append(f"{nnz}: T.{self.idtype}")
        return f"sparse_variable({parent}, ({extent}, {nnz}), ({indptr}, {indices}){self._wide}{flags})"

    def _array(self, name: str) -> str:
        made = self.names.new(name)
        self.handles.append(f"{made}: T.handle")
        return made

    # -------------------------------------------------------------- iterations

    def driver(self, statement: Statement) -> str | None:
        """The buffer over whose stored entries a statement may run."""
        value = statement.added[1] if statement.added else statement.value
        for node in ast.walk(value):
            name = ast.unparse(node.value) if isinstance(node, ast.Subscript) else ""
            if name not in self.levels or name in self.results or not isinstance(node, ast.Subscript):
                continue
            held = subscripts(node)
            shape = self.program.buffers[name].shape
            whole = all(statement.loops.get(v) == n for v, n in zip(held, shape, strict=True))
            if whole and len(set(held)) == len(held) and vanishes(value, name):
                return name if self.read_once(value, name, held) and self.may_repeat(value, name) else None
        return None

    def may_repeat(self, value: ast.expr, name: str) -> bool:
        """Whether entries with the same coordinates, where a format keeps them apart, still add up."""
        return _is_linear(value, name) or all(level.unique for level in self.levels[name])

    def read_once(self, value: ast.expr, name: str, held: list[str]) -> bool:
        """Whether all reads of a buffer are at the same element."""
        reads = [n for n in ast.walk(value) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == name]
        return all(subscripts(n) == held for n in reads)

    def iterate(self, statement: Statement, name: str) -> None:
        """One statement as an iteration."""
        driver = self.driver(statement)
        if statement.buffer in self.results:
            driver = self.results[statement.buffer]
        loops: dict[str, str] = {}
        if driver is not None:
            held = self._entered(statement, driver)
            loops = {held[v.dim]: axis for v, axis in zip(self.levels[driver], self.sparse[driver], strict=True)}
        for variable, extent in statement.loops.items():
            loops.setdefault(variable, self.dense_axis(variable, extent))
        kinds = "".join("S" if v in statement.subscripts else "R" for v in loops)
        self._check_kinds(statement, kinds)
        self.body.append(f'with T.sp_iter([{", ".join(loops.values())}], "{kinds}", "{name}") as [{", ".join(loops)}]:')
        self.body += [f"    {line}" for line in self._lines(statement, driver)]

    def _entered(self, statement: Statement, driver: str) -> list[str]:
        """The loops that a driver's dimensions are."""
        if statement.buffer in self.results:
            return statement.subscripts
        return subscripts(next(n for n in statement.reads() if ast.unparse(n.value) == driver))

    def _check_kinds(self, statement: Statement, kinds: str) -> None:
        own = any(ast.unparse(node) == ast.unparse(statement.target) for node in statement.reads())
        if "R" in kinds and not own:
            text = f"{ast.unparse(statement.target)} = {ast.unparse(statement.value)}"
            raise LoweringError(f"a loop stores the same element of {statement.buffer} again and again: {text}")

    def _lines(self, statement: Statement, driver: str | None) -> list[str]:
        target, value = ast.unparse(statement.target), ast.unparse(statement.value)
        init = statement.init
        is_dense = driver is not None and statement.buffer not in self.results
        if is_dense and statement.added is None:  # zero where nothing is stored
            return ["with T.init():", f"    {target} = 0", f"{target} = {target} + {value}"]
        if init is None:
            return [f"{target} = {value}"]
        return ["with T.init():", f"    {target} = {ast.unparse(init)}", f"{target} = {value}"]

    def text(self) -> str:
        for name in sorted(self.program.buffers, key=lambda n: 2 if n not in self.levels else int(n in self.results)):
            self.declare(self.program.buffers[name])
        many = len(self.program.statements) > 1
        for number, statement in enumerate(self.program.statements, 1):
            self.iterate(statement, f"{self.program.name}_{number}" if many else self.program.name)
        lines = "\n".join(f"    {line}" for line in [*self.axes, *self.matches, *self.body])
        return f"@T.prim_func\ndef {self.program.name}({', '.join([*self.handles, *self.scalars])}):\n{lines}\n"


__all__ = ["sparsify"]
