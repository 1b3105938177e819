# SPDX-License-Identifier: Apache-2.0
"""Rules of stage I: types, axes that a program computes, buffers and iterations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.errors import VerifyError
from sparsetir.ir import dialect
from sparsetir.ir.effects import leaves, operand_coordinates
from sparsetir.ir.rewriting import all_same
from sparsetir.ir.views import REDUCE, SPARSE_ITER, Axis, Entry, Program, SparseBuffer, SpIter, cast, decode, label
from sparsetir.ir.visitor import structural_walk
from sparsetir.utils.arguments import VALUE_DTYPES
from sparsetir.utils.caches import cached_property

# The rules of stage I about what stands where: types of operands, and names that are no values.
#
# Each is a rule like those of `sparsetir.ir.rules`. TVM takes such programs, and fails in the midst of code generation.


FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT_FUNCTIONS = (
    "exp exp2 exp10 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "sigmoid erf hypot atan2 copysign ldexp pow"
).split()
WIDE_INTEGERS = ("int32", "uint32", "int64", "uint64")
FUNCTIONS = {  # and what their first operand is
    **dict.fromkeys(FLOAT_FUNCTIONS, FLOATS),
    "nextafter": FLOATS[2:],
    "popcount": ("int8", "uint8", "int16", "uint16", *WIDE_INTEGERS),
    "clz": WIDE_INTEGERS,
    "likely": ("bool",),
}
INSTEAD = {"fmod": "A - T.trunc(A / B) * B"}  # functions without machine code
LEAVING = {
    "break_loop": "an sp_iter has no order that break could end; store under a condition, or use a loop inside of it",
    "continue_loop": "an sp_iter has no continue; put what follows under a condition",
}
NOT_OF_BOOLS = {tirx.Sub: "-", tirx.Div: "/"}


def _faults(facts: Facts, kinds: dict[type, Callable[[Any], str]]) -> Iterator[Problem]:
    """Yield the problems that `kinds` report for nodes of their types, each with the line of its statement."""
    problems: list[Problem] = []
    statement: list[Any] = [None]

    def on_store(node: tirx.BufferStore, visitor: Any) -> None:
        statement[0] = node
        visitor.default_visit(node)

    def on_node(node: Any, visitor: Any) -> None:
        message = kinds[type(node)](node)
        if message:
            where = getattr(node, "span", None) or getattr(statement[0], "span", None)
            problems.append(Problem(message, span=where))
        visitor.default_visit(node)

    callbacks = [(tirx.BufferStore, on_store), *((kind, on_node) for kind in kinds)]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


def functions_take_floats(facts: Facts) -> Iterator[Problem]:
    """Require that functions of real numbers take floats."""

    def fault(call: Call) -> str:
        name = dialect.function_of(call)
        if name in INSTEAD:
            return f"T.{name} has no machine code on CPUs; write {INSTEAD[name]}"
        dtypes = FUNCTIONS.get(name)
        if dtypes is None or str(call.args[0].ty.dtype) in dtypes:
            return ""
        operand = f"got {call.args[0]} of {call.args[0].ty.dtype}"
        usual = "float32" if "float32" in dtypes else dtypes[-1]
        return f"T.{name} takes {', '.join(dtypes)}, {operand}; convert it first, as by T.{usual}(...)"

    yield from _faults(facts, {Call: fault})


def bools_are_logic(facts: Facts) -> Iterator[Problem]:
    """Bools have sums (or) and products (and), maxima and minima, but no differences and quotients."""

    def fault(expr: Any) -> str:
        if str(expr.ty.dtype) != "bool":
            return ""
        message = f"expected + (or), * (and), T.max, T.min or a comparison of bools, got {expr.a} {{}} {expr.b}"
        return f"{message.format(NOT_OF_BOOLS[type(expr)])}; convert them first, as by T.int32(...)"

    yield from _faults(facts, dict.fromkeys(NOT_OF_BOOLS, fault))


def conditions_are_bools(facts: Facts) -> Iterator[Problem]:
    """Require that conditions are comparisons."""

    def fault(condition: Any) -> str:
        dtype = str(condition.ty.dtype)
        return "" if dtype == "bool" else f"a condition must be a comparison, got {condition} of {dtype}; compare it"

    of_statement = lambda node: fault(node.condition)  # noqa: E731
    yield from _faults(facts, {tirx.IfThenElse: of_statement, tirx.While: of_statement})


def nothing_is_returned(facts: Facts) -> Iterator[Problem]:
    """Require that a program returns nothing: results are buffers."""
    message = "a program returns nothing: its results are the buffers that it stores to; leave the return out"
    problems: list[Problem] = []
    on_return = lambda node: problems.append(Problem(message, span=getattr(node, "span", None)))  # noqa: E731
    structural_walk(facts.func.body, [(tirx.Return, on_return)])
    yield from problems


def axes_are_not_numbers(facts: Facts) -> Iterator[Problem]:
    """Require that axes are used as axes only, not in arithmetic."""
    axes = facts.program.axes
    problems: list[Problem] = []
    statement: list[Any] = [None]

    def problem(message: str, name: str = "") -> None:
        problems.append(Problem(message, name, getattr(statement[0], "span", None)))

    def on_store(node: tirx.BufferStore, visitor: Any) -> None:
        statement[0] = node
        visitor.default_visit(node)

    def on_call(call: Call, visitor: Any) -> None:
        if dialect.is_call(call, "attach", "fuse", *dialect.MERGES):
            name = dialect.name_of(call)
            problem(f"T.{name} belongs into the list of an sp_iter: T.sp_iter([.., T.{name}(..)], ..)")
        elif not dialect.is_call(call, "coord", "bind_axes", *dialect.AXIS_NAMES):  # those take axes
            visitor.default_visit(call)

    def on_var(var: Var, _visitor: Any) -> None:
        if var in axes:
            problem(f"{var.name} is an axis, not a number; use a variable of an sp_iter over it", str(var.name))

    def on_bind(node: tirx.Bind, visitor: Any) -> None:
        if node.var not in axes:
            visitor.default_visit(node)

    callbacks = [(tirx.BufferStore, on_store), (tirx.Bind, on_bind), (Call, on_call), (Var, on_var)]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


def iterations_are_not_left(facts: Facts) -> Iterator[Problem]:
    """Require that no statement leaves an iteration, which has no order; loops inside it may be left."""
    nodes = {place.iteration.node for place in facts.places}
    inside: list[bool] = []  # of what stands around, innermost last: whether it is an iteration
    problems: list[Problem] = []

    def enter(node: Any, visitor: Any) -> None:
        inside.append(node in nodes)
        visitor.default_visit(node)
        inside.pop()

    def on_realize(node: s_tir.SBlockRealize, visitor: Any) -> None:
        if node in nodes:
            enter(node, visitor)
        else:
            visitor.default_visit(node)

    def on_evaluate(node: tirx.Evaluate, _visitor: Any) -> None:
        instead = LEAVING.get(dialect.function_of(node.value))
        if instead is not None and inside and inside[-1]:
            problems.append(Problem(instead, span=node.span))

    callbacks = [
        (s_tir.SBlockRealize, on_realize),
        (tirx.For, enter),
        (tirx.While, enter),
        (tirx.Evaluate, on_evaluate),
    ]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


# The rules of stage I about unions, intersections, and axes that a program computes.


REMEDY = "T.sparse_variable(parent, (length, nnz), (indptr, indices))"


def _entry_problem(place: IterationScope, message: str, node: Any = None) -> Problem:
    iteration = place.iteration
    span = getattr(node, "span", None) or iteration.node.span
    return Problem(f"{message} (sp_iter {iteration.name!r})", iteration.name, span)


def _computed(buffer: SparseBuffer) -> list[Axis]:
    return [a for a in buffer.axes if a.is_assembled]


def _entries(place: IterationScope) -> list[Entry]:
    """Return the entries in force, outermost first."""
    return [e for it in (*place.outer, place.iteration) for e in it.entries]


def _own(place: IterationScope, facts: Facts, accesses: list[Access]) -> list[Access]:
    """Return the accesses of an iteration that stand in no iteration within it."""
    inner = [p.iteration.block for p in facts.places if place.iteration in p.outer]
    nodes = {a.node for block in inner for a in (*stores(block), *loads(block))}
    return [a for a in accesses if a.node not in nodes]


# ---------------------------------------------------------------------------------------------- unions, intersections


def merges_fit(facts: Facts) -> Iterator[Problem]:
    """Require that the members of a union or an intersection can be iterated together."""
    for place in facts.places:
        for entry in (e for e in place.iteration.entries if e.merge):
            fault = merge_fault(entry.merge, entry.axes) or _split_fault(entry, place)
            if fault:
                yield _entry_problem(place, fault)


def _split_fault(entry: Entry, place: IterationScope) -> str:
    """Return the fault of a union over repeated coordinates with children; empty if there is none."""
    listed = {a for e in _entries(place) for a in e.axes}
    for axis in (a for a in entry.axes if not a.unique and entry.merge == "union"):
        below = next((a for a in listed if a.parent is axis), None)
        if below is not None:
            fault = f"{label(entry)} visits repeated coordinates of {axis.name} one by one, and {below.name} below each"
            return f"{fault}; give rows once each (CSR or DCSR instead of COO), with all of their {below.name}"
    return ""


# ---------------------------------------------------------------------------------------------- assembled axes


def assembled_axes_are_results(facts: Facts) -> Iterator[Problem]:
    """Require that only results lie over an assembled axis, and only assembled axes below one."""
    stored = {a.buffer for a in stores(facts.func.body)}
    for axis in facts.program.axes.values():
        if axis.parent is not None and axis.parent.is_assembled and not axis.is_assembled:
            message = f"axis {axis.name} hangs from {axis.parent.name}, whose positions are computed"
            yield Problem(f"{message}; below it there are only T.sparse_assembled axes", axis.name)
    for buffer in facts.program.buffers.values():
        computed = _computed(buffer)
        if len([tree for tree in buffer.trees if tree[-1].is_assembled]) > 1:
            names = " and ".join(tree[-1].name for tree in buffer.trees if tree[-1].is_assembled)
            message = f"{buffer.name} lies over {names}, two patterns that are computed apart"
            yield Problem(f"{message}; hang one axis from the other", buffer.name)
        if computed and buffer.view not in stored:
            message = f"{buffer.name} lies over {computed[0].name}, which is computed, and nothing stores to it"
            yield Problem(f"{message}; an operand lies over axes that are given: {REMEDY}", buffer.name)


def results_are_read_where_stored(facts: Facts) -> Iterator[Problem]:
    """Require that a result over an assembled axis is only read by the statement that stores the same element."""
    for place in facts.places:
        own_stores = _own(place, facts, stores(place.iteration.block))
        stored_elements = [(a.buffer, a.indices) for a in own_stores]
        for access in _own(place, facts, loads(place.iteration.block)):
            buffer = facts.program.buffers.get(access.buffer)
            if buffer is None or not _computed(buffer):
                continue
            if access.buffer not in {b for b, _ in stored_elements}:
                message = f"{access.name} is read before its pattern is known: it lies over {_computed(buffer)[0].name}"
                how = "which another program reads as an operand once this one has run"
                yield _entry_problem(place, f"{message}, {how}", access.node)
            elif not any(access.buffer.same_as(b) and all_same(access.indices, i) for b, i in stored_elements):
                message = f"{access.name} is read at another element than the one that is stored"
                yield _entry_problem(place, f"{message}: its pattern is being computed", access.node)


def rows_come_first(facts: Facts) -> Iterator[Problem]:
    """Require that the rows of an assembled axis are iterated before their entries."""
    for place in facts.places:
        for access in _own(place, facts, stores(place.iteration.block)):
            buffer = facts.program.buffers.get(access.buffer)
            if buffer is not None and _computed(buffer) and len(access.indices) == len(buffer.axes):
                fault = _row_fault(access, buffer, place)
                if fault:
                    yield _entry_problem(place, fault, access.node)


def _row_fault(access: Access, buffer: SparseBuffer, place: IterationScope) -> str:
    tree = next(t for t in buffer.trees if t[-1].is_assembled)
    at = dict(zip(buffer.axes, access.indices, strict=True))
    kinds = {v: k for e in _entries(place) for v, k in zip(e.vars, e.kinds, strict=True)}
    axes = {v: e.axes for e in _entries(place) for v in e.vars}
    order = list(kinds)
    rows = [(axis, at[axis]) for axis in tree if not axis.is_assembled]
    for axis, index in rows:
        if not isinstance(index, Var) or index not in kinds:
            message = f"the row of {buffer.name} along {axis.name} must be a variable of the sp_iter, got {index}"
            return f"{message}: rows of a computed pattern are filled one after the other"
    used = [v for axis in tree if axis.is_assembled for v in _variables(at[axis]) if v in kinds]
    for axis, index in rows:
        late = [v for v in order[: order.index(index)] if v in used or kinds[v] == "R"]
        if late:
            message = f"{buffer.name} is stored row by row along {axis.name}, but {late[0].name} is iterated before"
            message = f"{message} {index.name}"
            if _is_below(axes[index], axes[late[0]]):
                advice = f"declare operands that are stored along {index.name} first, as csc in place of csr"
                return f"{message}, whose axis lies below; {advice}, or store the result untransposed"
            return f"{message}; list the axis of {index.name} first"
    summed = next((v for v in used if kinds[v] == "R"), None)
    if summed is not None:
        return f"{buffer.name} keeps a coordinate for each {summed.name}, whose letter is R; write S"
    return ""


def _is_below(axes: Sequence[Axis], other_axes: Sequence[Axis]) -> bool:
    """Return whether one of some axes depends on one of the others."""
    return any(ancestor in axis.ancestors for axis in axes for ancestor in other_axes)


def _variables(expr: ir.Expr) -> list[Var]:
    variables: dict[Var, None] = {}
    structural_walk(expr, (Var, lambda v: variables.setdefault(v)))
    return list(variables)


def assembled_entries_have_operands(facts: Facts) -> Iterator[Problem]:
    """Require that operands store the coordinates of an assembled axis at the variables before it."""
    for place in facts.places:
        for entry in (e for e in place.iteration.entries if any(a.is_assembled for a in e.axes)):
            fault = _entry_fault(entry, place, facts)
            if fault:
                yield _entry_problem(place, fault)


def _entry_fault(entry: Entry, place: IterationScope, facts: Facts) -> str:
    axis = next(a for a in entry.axes if a.is_assembled)
    if entry.is_fused or entry.attached_to is not None:
        fault = f"{label(entry)} walks positions that are stored, but those of {axis.name} are computed"
        return f"{fault}; list {axis.name}"
    var, body = entry.vars[0], place.iteration.block.body
    over_axis = [b for b in facts.program.buffers.values() if axis in b.axes]
    result_stores = [a for a in stores(body) for b in over_axis if a.buffer.same_as(b.view)]
    if not any(
        var.same_as(a.indices[b.axes.index(axis)]) for a in result_stores for b in over_axis if a.buffer.same_as(b.view)
    ):
        results = " or ".join(f"{b.name}[{', '.join(a.name.lower() for a in b.axes)}]" for b in over_axis)
        return f"{axis.name} is listed, but nothing is stored at {var.name}; store {results or 'a result over it'}"
    coordinates = operand_coordinates(place.iteration, var, axis, facts.program)
    if coordinates is None:
        fault = f"no operand says which coordinates {var.name} of {axis.name} has: none stores coordinates along it"
        cell = next((a.name for a in stores(body) if a.buffer not in facts.program.buffers), None)
        if cell is not None:
            fault += f", nor is it looked at what {cell} was set to: write that in its place"
        return f"{fault}; subscript a sparse axis by {var.name}, or list the axis that {var.name} runs over"
    order = [v for e in _entries(place) for v in e.vars]
    later = order[order.index(var) :]
    for leaf in leaves(coordinates):
        buffer = facts.program.buffers[leaf.buffer]
        above = [i for a, i in zip(buffer.axes, leaf.indices, strict=True) if a in leaf.axis.ancestors]
        needed = next((v for i in above for v in _variables(i) if v in later), None)
        if needed is not None:
            fault = f"the coordinates {var.name} of {buffer.name} depend on {needed.name}, which is iterated after it"
            return f"{fault}; list the axis of {needed.name} before {axis.name}"
    return ""


# The rules of stage I.
#
# A rule is a function of the `Facts` of a program that yields a `Problem` for every place where the program breaks
# it. A message says what was expected, what was found and what to try. `sparsetir.verify` has the tables.


INDEX_DTYPES = ("int32", "int64")
SEARCHES = ("inline", "hoist", "merge")


@dataclass(frozen=True)
class Problem:
    """One broken rule: what, in which axis, buffer or iteration, and where in the source if that is known."""

    message: str
    construct: str = ""
    span: Any = None


@dataclass(frozen=True, eq=False)
class IterationScope:
    """A sparse iteration and the sparse iterations around it, outermost first."""

    iteration: SpIter
    outer: tuple[SpIter, ...]

    @property
    def variables(self) -> dict[Var, Axis]:
        """The axis of every iteration variable in force whose position is at hand."""
        entries = [e for it in (*self.outer, self.iteration) for e in it.entries]
        return {v: a for e in entries for v, a in zip(e.vars, e.domains, strict=True)}


@dataclass(frozen=True, eq=False)
class Facts:
    """Facts about a program that the rules of stage I require."""

    func: tirx.PrimFunc
    program: Program
    places: list[IterationScope] = field(default_factory=list)

    @cached_property
    def storages(self) -> dict[Var, Var]:
        """The buffer behind every declared view."""
        storage_of: dict[Var, Var] = {}

        def on_decl(node: tirx.DeclBuffer) -> None:
            if isinstance(node.data, Call) and node.data.args and tirx.is_buffer_var(node.data.args[0]):
                storage_of[node.buffer] = storage_of.get(node.data.args[0], node.data.args[0])

        structural_walk(self.func.body, (tirx.DeclBuffer, on_decl))
        return storage_of

    def storage(self, buffer: Var) -> Var:
        """Return the buffer that holds the values of `buffer`."""
        return self.storages.get(buffer, buffer)


@dataclass(frozen=True, eq=False)
class Access:
    """A load or a store of a buffer."""

    buffer: Var
    indices: list[ir.Expr]
    node: Any

    @property
    def name(self) -> str:
        return str(self.buffer.name)


Rule = Callable[[Any], Iterator[Problem]]


def stores(node: Any) -> list[Access]:
    """Return every store below `node`."""
    accesses: list[Access] = []
    on_store = lambda s: accesses.append(Access(s.buffer, list(s.indices), s))  # noqa: E731
    structural_walk(node, (tirx.BufferStore, on_store), order="pre")
    return accesses


def loads(node: Any) -> list[Access]:
    """Return every load below `node`."""
    accesses: list[Access] = []
    on_load = lambda x: accesses.append(Access(x.source, list(x.indices), x))  # noqa: E731
    structural_walk(node, (ir.TensorLoad, on_load), order="pre")
    return accesses


def _parts(block: s_tir.SBlock) -> list[tirx.Stmt]:
    """Return the statements of a block, in order."""
    return [block.body] if block.init is None else [block.init, block.body]


def _uses(node: Any, variables: Sequence[Var]) -> list[Var]:
    """Return those of `variables` that occur in `node`."""
    used: dict[Var, None] = {}
    structural_walk(node, (Var, lambda v: used.setdefault(v) if v in variables else None))
    return list(used)


def _places(func: tirx.PrimFunc, program: Program) -> list[IterationScope]:
    """Return the sparse iterations of a function in the order of its text."""
    iterations = {it.node: it for it in program.iterations}
    outer: list[SpIter] = []
    places: list[IterationScope] = []

    def on_realize(node: s_tir.SBlockRealize, visitor: Any) -> None:
        iteration = iterations.get(node)
        if iteration is None:
            visitor.default_visit(node)
            return
        places.append(IterationScope(iteration, tuple(outer)))
        outer.append(iteration)
        visitor.visit(node.block.body)
        outer.pop()

    tvm_ffi.structural_visit(func.body, (s_tir.SBlockRealize, on_realize))
    return places


def facts_of(func: tirx.PrimFunc) -> Facts:
    """Decode a function, with an error that says why if it cannot be."""
    try:
        program = decode(func)
    except KeyError as error:
        name = getattr(error.args[0], "name", error.args[0])
        message = f"{name} is used as an axis, but this function does not declare it as one [axis-known]"
        raise VerifyError(message, str(name)) from None
    except (AttributeError, IndexError):
        message = "every variable of a sparse iteration is bound to T.sp.coord(axis, member), with one letter for each"
        raise VerifyError(f"{message} [letters]") from None
    return Facts(func, program, _places(func, program))


# ---------------------------------------------------------------------------------------------- axes and buffers


def sizes_are_sizes(facts: Facts) -> Iterator[Problem]:
    """Require that sizes are non-negative integers."""
    for axis in facts.program.axes.values():
        for meaning, size in (("length", axis.length), ("number of positions", axis.count)):
            what = f"the {meaning} of axis {axis.name}"
            if not _is_index(str(size.ty.dtype)):
                yield Problem(f"{what} must be an integer, got {size} of {size.ty.dtype}", axis.name)
            if isinstance(size, tirx.IntImm) and int(size) < 0:
                yield Problem(f"{what} must not be negative, got {int(size)}", axis.name)


def axes_count_in_integers(facts: Facts) -> Iterator[Problem]:
    """Require that index types are int32 or int64."""
    for axis in facts.program.axes.values():
        if axis.idtype not in INDEX_DTYPES:
            yield Problem(f"axis {axis.name} must count in int32 or int64, got {axis.idtype}", axis.name)
        for array in (axis.indptr, axis.indices):
            if array is not None and str(array.ty.dtype) not in INDEX_DTYPES:
                message = f"{array.name} of axis {axis.name} must hold int32 or int64, got {array.ty.dtype}"
                yield Problem(message, axis.name)


def values_have_a_known_dtype(facts: Facts) -> Iterator[Problem]:
    """Require that sparse buffers hold one of the dialect's types."""
    for buffer in facts.program.buffers.values():
        if buffer.dtype not in VALUE_DTYPES:
            message = f"sparse buffer {buffer.name} must hold one of {', '.join(VALUE_DTYPES)}, got {buffer.dtype}"
            yield Problem(message, buffer.name)


def chain_fault(axes: Sequence[Axis]) -> str:
    """Return why `axes` cannot be a buffer's axes; empty if they can.

    The axes of one tree must run from the root to a node without a gap or a fork.
    """
    for axis in axes:
        if list(axes).count(axis) > 1:
            return f"axis {axis.name} appears twice in one buffer; a second dimension needs an axis of its own"
        if axis.parent is not None and axis.parent not in axes:
            axis_names = ", ".join(a.name for a in axes)
            return f"a buffer over axis {axis.name} must also have its parent {axis.parent.name}, got ({axis_names})"
    for axis in axes:
        children = [a.name for a in axes if a.parent is axis]
        if len(children) > 1:
            names, last = " and ".join(children), children[-1]
            fault = f"axes {names} are both below {axis.name}; the axes of one tree must form a chain in a buffer"
            way = f"declare {last} below {children[-2]}, with row pointers for each position of {children[-2]}"
            return f"{fault}: {way}"
    return ""


def handles_are_matched(facts: Facts) -> Iterator[Problem]:
    """Require that every parameter is a size or becomes an array."""
    for param in facts.func.params:
        if isinstance(param.ty, ir.PointerType):
            message = f"parameter {param.name} is a T.handle that nothing is made of"
            way = "remove it, or match a buffer to it (T.match_sparse_buffer, T.match_buffer)"
            yield Problem(f"{message}: {way}", str(param.name), param.span)


def buffers_follow_chains(facts: Facts) -> Iterator[Problem]:
    """Require one axis for each dimension of a buffer, and whole chains of axes."""
    for buffer in facts.program.buffers.values():
        rank = len(buffer.view.ty.shape)
        if rank != len(buffer.axes):
            message = f"expected one axis for each of the {rank} dimensions of {buffer.name}, got {len(buffer.axes)}"
            yield Problem(message, buffer.name)
        fault = chain_fault(buffer.axes)
        if fault:
            yield Problem(f"buffer {buffer.name}: {fault}", buffer.name)


# ---------------------------------------------------------------------------------------------- iterations


def _at(iteration: SpIter, message: str, node: Any = None) -> Problem:
    """Return a problem in an iteration, at the line of `node` if known."""
    span = getattr(node, "span", None) or iteration.node.span
    return Problem(f"{message} (sp_iter {iteration.name!r})", iteration.name, span)


def letters_fit(facts: Facts) -> Iterator[Problem]:
    """Require one letter S or R for each iteration variable."""
    for place in facts.places:
        iteration, kinds = place.iteration, str(place.iteration.block.annotations[SPARSE_ITER])
        letters = ["R" if iv.iter_type == REDUCE else "S" for iv in iteration.block.iter_vars]
        if kinds != "".join(letters):
            yield _at(iteration, f"expected one letter S or R for each variable, {''.join(letters)!r}, got {kinds!r}")


def axes_come_once(facts: Facts) -> Iterator[Problem]:
    """Require that no axis appears twice in one list, unless attached elsewhere."""
    for place in facts.places:
        listed = [a for e in place.iteration.entries if e.attached_to is None and not e.merge for a in e.axes]
        listed += [a for e in place.iteration.entries for a in dict.fromkeys(_unattached(e))]
        for axis in dict.fromkeys(a for a in listed if listed.count(a) > 1):
            yield _at(place.iteration, f"axis {axis.name} is listed twice; declare another axis for a second loop")


def _unattached(entry: Entry) -> list[Axis]:
    """Return the members of a union or an intersection that are walked below their own parents."""
    return [a for a, host in zip(entry.axes, entry.hosts, strict=False) if host is None]


def parents_come_first(facts: Facts) -> Iterator[Problem]:
    """Require that an axis is iterated below its parent, an attached axis below its host."""
    for place in facts.places:
        iterated = {a for it in place.outer for a in it.listed}
        for entry in place.iteration.entries:
            for axis, host in entry.heads:
                message = _order_fault(axis, host, iterated, place.iteration)
                if message:
                    yield _at(place.iteration, message)
            iterated.update(entry.axes)


def _order_fault(axis: Axis, host: Axis | None, seen: set[Axis], iteration: SpIter) -> str:
    if axis.parent is None:
        return "" if host is None else f"axis {axis.name} has no parent, there is nothing to attach elsewhere"
    if host is None:
        return "" if axis.parent in seen else _missing(axis.name, axis.parent, iteration, "its parent")
    what = f"T.attach({axis.name}, {host.name})"
    if host not in seen:
        return _missing(what, host, iteration, "the axis it is attached to,")
    above, role = axis.parent.parent, f"the parent of {axis.parent.name},"
    return "" if above is None or above in seen else _missing(what, above, iteration, role)


def _missing(what: str, needed: Axis, iteration: SpIter, role: str) -> str:
    if needed in iteration.listed:
        return f"{what} is listed before {role} {needed.name}; list {needed.name} first"
    return f"{what} is iterated but {role} {needed.name} is not; list {needed.name} before it"


def attached_axes_are_found(facts: Facts) -> Iterator[Problem]:
    """Require that the parent of an attached axis stores each coordinate once."""
    for place in facts.places:
        heads = [head for entry in place.iteration.entries for head in entry.heads]
        for axis, host in heads:
            above = axis.parent
            if host is None or above is None or host is above or above.unique:
                continue
            message = f"T.attach({axis.name}, {host.name}) goes to one place of {above.name}"
            message += f", which may store a coordinate several times (unique=False): entries of {axis.name} are lost"
            yield _at(place.iteration, f"{message}; store {above.name} once each, as CSR or DCSR instead of COO")


def fused_axes_are_chains(facts: Facts) -> Iterator[Problem]:
    """Require that fused axes form a chain from a root."""
    for place in facts.places:
        for entry in place.iteration.entries:
            fault = fuse_fault(entry.axes) if entry.is_fused else ""
            if fault:
                yield _at(place.iteration, fault)


def fuse_fault(axes: Sequence[Axis]) -> str:
    """Return why `axes` cannot be iterated as one loop; empty if they can."""
    for above, below in itertools.pairwise(axes):
        if below.parent is not above:
            return f"T.fuse takes a parent followed by its child: {above.name} is not the parent of {below.name}"
    if axes[0].parent is not None:
        return f"T.fuse must start at a root axis, {axes[0].name} lies below {axes[0].parent.name}"
    return ""


def merge_fault(name: str, axes: Sequence[Axis]) -> str:
    """Return why `axes` cannot be walked together by ``T.union`` or ``T.intersect``; empty if they can."""
    if len(axes) < 2:
        return f"T.{name} takes two axes or more, got {len(axes)}; list a single axis by itself"
    for axis in axes:
        if axis.is_assembled:
            way = f"list {axis.name} itself: its variable runs over what the body stores"
            return f"T.{name} walks coordinates that are stored, but {axis.name} is computed here; {way}"
        if axis.kind == "dense_fixed":
            what = "is all of them" if name == "union" else "adds nothing"
            way = f"list {axis.name} alone" if name == "union" else f"leave {axis.name} out"
            return f"T.{name} walks the coordinates that axes store; with the dense axis {axis.name} it {what}: {way}"
    first = axes[0]
    for axis in axes[1:]:
        if not _same_length(first.length, axis.length):
            lengths = f"{first.name} has {first.length}, {axis.name} has {axis.length}"
            return f"the axes of T.{name} must have one length, got {lengths}; declare both with the same size"
    return ""


def _same_length(a: ir.Expr, b: ir.Expr) -> bool:
    """Return whether two lengths are one, whatever their index types."""
    wide = [cast(x, "int64") for x in (_uncast(a), _uncast(b))]
    return bool(sym.Analyzer().can_prove_equal(*wide))


def _uncast(length: ir.Expr) -> ir.Expr:
    return length.value if isinstance(length, tirx.Cast) else length


def variables_have_their_axis_dtype(facts: Facts) -> Iterator[Problem]:
    """Require that an iteration variable has its axis's index type."""
    for place in facts.places:
        for entry in place.iteration.entries:
            for var, axis in zip(entry.vars, entry.domains, strict=True):
                dtype = str(var.ty.dtype)
                if dtype != axis.idtype:
                    message = f"variable {var.name} must be {axis.idtype} like its axis {axis.name}, got {dtype}"
                    yield _at(place.iteration, message)


def variables_stay_inside(facts: Facts) -> Iterator[Problem]:
    """Require that an iteration variable is used inside its own iteration only."""
    owner = {v: p.iteration for p in facts.places for v in p.iteration.vars}
    problems: list[Problem] = []
    active: list[Var] = []
    statement: list[Any] = [None]

    def on_store(node: tirx.BufferStore, visitor: Any) -> None:
        statement[0] = node
        visitor.default_visit(node)

    def on_var(var: Var, _visitor: Any) -> None:
        if var in owner and var not in active:
            message = f"variable {var.name} is used outside of its iteration; move the use inside"
            problems.append(_at(owner[var], message, statement[0]))

    def on_realize(node: s_tir.SBlockRealize, visitor: Any) -> None:
        block_vars = [iv.var for iv in node.block.iter_vars]
        for value in node.iter_values:
            visitor.visit(value)
        active.extend(block_vars)
        for part in _parts(node.block):
            visitor.visit(part)
        del active[len(active) - len(block_vars) :]

    callbacks = [(s_tir.SBlockRealize, on_realize), (tirx.BufferStore, on_store), (Var, on_var)]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


# ---------------------------------------------------------------------------------------------- bodies


def subscripts_fit(facts: Facts) -> Iterator[Problem]:
    """Require one integer subscript for each axis."""
    for access in [*stores(facts.func.body), *loads(facts.func.body)]:
        buffer = facts.program.buffers.get(access.buffer)
        rank = len(access.buffer.ty.shape) if buffer is None else len(buffer.axes)
        count = len(access.indices)
        if count != rank:
            message = f"expected {rank} subscripts for buffer {access.name}, one for each axis, got {count}"
            yield Problem(message, access.name, access.node.span)
        for index in access.indices:
            if buffer is not None and not _is_index(str(index.ty.dtype)):
                message = f"a subscript of {access.name} must be an integer, got {index} of {index.ty.dtype}; cast it"
                yield Problem(message, access.name, access.node.span)


def _is_index(dtype: str) -> bool:
    return dtype.startswith(("int", "uint")) and "x" not in dtype


def init_is_spatial(facts: Facts) -> Iterator[Problem]:
    """Require that T.init does not use a reduction variable."""
    for place in facts.places:
        init = place.iteration.block.init
        reduced = [v for v, k in zip(place.iteration.vars, place.iteration.kinds, strict=True) if k == "R"]
        for var in _uses(init, reduced) if init is not None else []:
            message = f"T.init runs before the reduction, but uses {var.name}, a reduction variable; use spatial ones"
            how = "if the sum scatters, set its result to the first value in an sp_iter of its own before this one"
            yield _at(place.iteration, f"{message}, or, {how}", init)


def sums_start_somewhere(facts: Facts) -> Iterator[Problem]:
    """Require that a reduction into a scratch buffer starts from a stored value."""
    initialised = set(facts.func.params)
    nodes = {p.iteration.node: p.iteration for p in facts.places}
    reducing: list[SpIter] = []
    problems: list[Problem] = []

    def on_store(node: tirx.BufferStore, _visitor: Any) -> None:
        storage = facts.storage(node.buffer)
        read = [facts.storage(a.buffer) for a in loads(node.value)]
        if reducing and storage in read and storage not in initialised:
            message = f"scratch buffer {node.buffer.name} is updated before anything is stored in it; use T.init"
            problems.append(_at(reducing[-1], message, node))
        initialised.add(storage)

    def on_realize(node: s_tir.SBlockRealize, visitor: Any) -> None:
        iteration = nodes.get(node)
        is_reduction = iteration is not None and "R" in iteration.kinds
        if iteration is not None and is_reduction:
            reducing.append(iteration)
        for part in _parts(node.block):
            visitor.visit(part)
        if is_reduction:
            reducing.pop()

    callbacks = [(s_tir.SBlockRealize, on_realize), (tirx.BufferStore, on_store)]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


def structure_is_read_only(facts: Facts) -> Iterator[Problem]:
    """Require that an iteration does not write the index arrays of its axes."""
    for place in facts.places:
        arrays = {x: a for a in place.iteration.listed for x in (a.indptr, a.indices) if x is not None}
        for access in stores(place.iteration.block):
            axis = arrays.get(facts.storage(access.buffer))
            if axis is not None:
                message = f"{access.name} holds axis {axis.name}, which is iterated here, and must not be written"
                yield _at(place.iteration, message, access.node)


# ---------------------------------------------------------------------------------------------- searches


def searched_axes(place: IterationScope, facts: Facts) -> Iterator[tuple[Axis, Access]]:
    """Yield the axes whose coordinates the body must look up, and where."""
    variables = place.variables
    block = place.iteration.block
    for access in [*stores(block), *loads(block)]:
        buffer = facts.program.buffers.get(access.buffer)
        if buffer is not None and len(access.indices) == len(buffer.axes):
            yield from ((axis, access) for axis in _looked_up(buffer, access, variables))


def _looked_up(buffer: SparseBuffer, access: Access, variables: dict[Var, Axis]) -> Iterator[Axis]:
    for tree in buffer.trees:
        direct = True
        for axis in tree:
            index = access.indices[buffer.axes.index(axis)]
            direct = direct and isinstance(index, Var) and variables.get(index) is axis
            if not direct and axis.indices is not None:
                yield axis


def search_is_known(facts: Facts) -> Iterator[Problem]:
    """Require that the search of an iteration is one of the strategies."""
    for place in facts.places:
        if place.iteration.search not in SEARCHES:
            message = f"the search of an sp_iter is one of {', '.join(SEARCHES)}, got {place.iteration.search!r}"
            yield _at(place.iteration, message)


def merges_are_sorted(facts: Facts) -> Iterator[Problem]:
    """Require that the search "merge" only uses sorted axes."""
    for place in facts.places:
        if place.iteration.search != "merge":
            continue
        for axis, access in searched_axes(place, facts):
            if not axis.sorted:
                message = f"search 'merge' needs sorted axes, but {axis.name} of {access.name} is not; use 'inline'"
                yield _at(place.iteration, message, access.node)


def hoists_are_stable(facts: Facts) -> Iterator[Problem]:
    """Require that an iteration does not write the arrays that its hoisted searches read."""
    for place in facts.places:
        if place.iteration.search != "hoist":
            continue
        written = {facts.storage(a.buffer) for a in stores(place.iteration.block)}
        for axis, access in searched_axes(place, facts):
            for array in (axis.indptr, axis.indices):
                if array is not None and array in written:
                    message = f"search 'hoist' reads {array.name}, which the body writes; use 'inline'"
                    yield _at(place.iteration, message, access.node)


__all__ = [
    "assembled_axes_are_results",
    "assembled_entries_have_operands",
    "axes_are_not_numbers",
    "bools_are_logic",
    "conditions_are_bools",
    "functions_take_floats",
    "iterations_are_not_left",
    "merges_fit",
    "nothing_is_returned",
    "results_are_read_where_stored",
    "rows_come_first",
]
