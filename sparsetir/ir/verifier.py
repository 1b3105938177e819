# SPDX-License-Identifier: Apache-2.0
"""Rules of each stage, one table a stage, and warnings about legal programs that are probably mistakes.

`check` runs a table, `verify` raises the first problem. A message ends with the name of its rule in brackets.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.errors import ScriptWarning, UpstreamWarning, VerifyError
from sparsetir.ir import dialect, rules
from sparsetir.ir import rules as assembly_rules
from sparsetir.ir import rules as type_rules
from sparsetir.ir.rewriting import collect, mentions
from sparsetir.ir.rules import INDEX_DTYPES, SEARCHES, Access, Facts, Problem, Rule, loads, stores
from sparsetir.ir.views import INIT, STORED, Axis, Program, SparseBuffer, SpIter, is_sp_iter
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.utils.arguments import shown

# ---------------------------------------------------------------------------------------------- any stage


def _complaint(func: tirx.PrimFunc) -> str:
    """Return the message of TVM's own check in one line; empty if it passes."""
    try:
        s_tir.analysis.verify_well_formed(func)
    except Exception as error:  # TVM raises several classes
        return str(error).strip().splitlines()[-1]
    return ""


def functions_are_well_formed(func: tirx.PrimFunc) -> Iterator[Problem]:
    """TVM's own check passes, apart from pragmas: TVM writes them around the loop whose variable they name."""
    complaint = _complaint(func) and _complaint(_without_pragmas(func))
    if complaint:
        yield Problem(complaint)


def _without_pragmas(func: tirx.PrimFunc) -> tirx.PrimFunc:
    def on_attr(node: tirx.AttrStmt, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        return inner.body if inner.attr_key.startswith("pragma_") else inner

    body = structural_mutate(func.body, (tirx.AttrStmt, on_attr))
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def programs_are_well_formed(facts: Facts) -> Iterator[Problem]:
    """TVM's own check passes, apart from what it cannot know.

    It asks that a block takes the variables of loops around it as its own; a sparse iteration gets them when it
    is lowered. It asks that an array tells every size; that of an assembled axis above another is known after the run.
    """
    complaint = _complaint(_with_counts(facts))
    if complaint and not (facts.places and "Loop iterator var" in complaint):
        yield Problem(complaint)


def _with_counts(facts: Facts) -> tirx.PrimFunc:
    """Return the function with the sizes that it computes as parameters, where no array has them."""
    computed = [a.count for a in facts.program.axes.values() if a.is_assembled]
    if not computed:
        return facts.func
    arrays = [p for p in facts.func.params if tirx.is_buffer_var(p)]
    array_sizes = {extent for array in arrays for extent in array.ty.shape if isinstance(extent, Var)}
    params = [*facts.func.params, *(c for c in computed if c not in array_sizes)]
    return tirx.PrimFunc(params, facts.func.body, facts.func.ret_type, facts.func.attrs)


# ---------------------------------------------------------------------------------------------- stages II and III


def _calls(func: tirx.PrimFunc) -> list[Call]:
    calls: list[Call] = []
    on_call = lambda c: calls.append(c) if dialect.is_call(c) else None  # noqa: E731
    structural_walk(func.body, (Call, on_call), order="pre")
    return calls


def _blocks(func: tirx.PrimFunc) -> list[s_tir.SBlockRealize]:
    blocks: list[s_tir.SBlockRealize] = []
    structural_walk(func.body, (s_tir.SBlockRealize, blocks.append), order="pre")
    return blocks


def iterations_are_lowered(func: tirx.PrimFunc) -> Iterator[Problem]:
    """Require that no sparse iteration is left."""
    for realize in _blocks(func):
        if is_sp_iter(realize):
            name = str(realize.block.name_hint)
            yield Problem(f"sp_iter {name!r} has not been lowered; run sparsetir.lower(func, stage=2)", name)


def axes_are_gone(func: tirx.PrimFunc) -> Iterator[Problem]:
    """Require that searches are the only operators of the dialect."""
    for call in _calls(func):
        name = dialect.name_of(call)
        if name not in (*dialect.FIND, "arg"):
            yield Problem(f"T.sp.{name} belongs to stage I; run sparsetir.lower(func, stage=2)")


def searches_fit(func: tirx.PrimFunc) -> Iterator[Problem]:
    """Require that search calls have the arguments that their lowering reads."""
    inside: set[Call] = set()
    for call in _calls(func):
        name = dialect.name_of(call)
        if name == "arg" and call not in inside:
            yield Problem("T.sp.arg stands outside of a T.sp.find_rule")
        for rule in call.args[:1] if name == "find_rule" else call.args[2:] if name == "find_union" else []:
            structural_walk(rule, (Call, inside.add))
        fault = _search_fault(name, list(call.args))
        if fault:
            yield Problem(f"T.sp.{name}: {fault}")


def _search_fault(name: str, args: list[Any]) -> str:
    expected = {"find": 5, "find_rule": 3, "find_fiber": 3}.get(name)
    if name == "find_union" and (len(args) < 5 or len(args) % 3 != 2):
        return f"expected a member, a step, and three arguments for each member, got {len(args)}"
    if expected is None:
        return ""
    if len(args) != expected:
        return f"expected {expected} arguments, got {len(args)}"
    if name != "find_rule" and not isinstance(args[0], ir.TensorLoad):
        return f"expected the first element of a fiber as first argument, got {args[0]}"
    if name == "find" and getattr(args[4], "value", None) not in (*SEARCHES, "walk"):
        return f"expected one of {', '.join(SEARCHES)} as last argument, got {args[4]}"
    wrong = [a for a in args[:3] if str(a.ty.dtype) not in INDEX_DTYPES]
    return f"expected int32 or int64 arguments, got {wrong[0]} of {wrong[0].ty.dtype}" if wrong else ""


def dialect_is_gone(func: tirx.PrimFunc) -> Iterator[Problem]:
    """Require that no operator of the dialect is left."""
    for call in _calls(func):
        yield Problem(f"T.sp.{dialect.name_of(call)} is left in stage III; run sparsetir.lower(func, stage=3)")


def blocks_are_gone(func: tirx.PrimFunc) -> Iterator[Problem]:
    """Require that no block but the root is left."""
    for realize in _blocks(func):
        name = str(realize.block.name_hint)
        if name != "root":
            yield Problem(f"block {name!r} is left in stage III; run sparsetir.lower(func, stage=3)", name)


def buffers_are_flat(func: tirx.PrimFunc) -> Iterator[Problem]:
    """Require that every buffer is subscripted by one number."""
    for access in [*stores(func.body), *loads(func.body)]:
        rank = len(access.indices)
        if rank != 1:
            message = f"buffer {access.name} must be one-dimensional in stage III, got {rank} subscripts"
            yield Problem(message, access.name, access.node.span)


STAGE_1: list[tuple[str, Rule]] = [
    ("parameters", rules.handles_are_matched),
    ("sizes", rules.sizes_are_sizes),
    ("index-dtype", rules.axes_count_in_integers),
    ("value-dtype", rules.values_have_a_known_dtype),
    ("buffer-axes", rules.buffers_follow_chains),
    ("letters", rules.letters_fit),
    ("axis-once", rules.axes_come_once),
    ("fuse-chain", rules.fused_axes_are_chains),
    ("merge-members", assembly_rules.merges_fit),
    ("parent-first", rules.parents_come_first),
    ("attached-once", rules.attached_axes_are_found),
    ("variable-dtype", rules.variables_have_their_axis_dtype),
    ("variable-scope", rules.variables_stay_inside),
    ("subscripts", rules.subscripts_fit),
    ("axes-in-place", type_rules.axes_are_not_numbers),
    ("no-return", type_rules.nothing_is_returned),
    ("no-break", type_rules.iterations_are_not_left),
    ("conditions", type_rules.conditions_are_bools),
    ("float-functions", type_rules.functions_take_floats),
    ("bool-arithmetic", type_rules.bools_are_logic),
    ("computed-axes", assembly_rules.assembled_axes_are_results),
    ("computed-reads", assembly_rules.results_are_read_where_stored),
    ("rows-first", assembly_rules.rows_come_first),
    ("computed-operands", assembly_rules.assembled_entries_have_operands),
    ("init-spatial", rules.init_is_spatial),
    ("first-value", rules.sums_start_somewhere),
    ("structure", rules.structure_is_read_only),
    ("search", rules.search_is_known),
    ("merge-sorted", rules.merges_are_sorted),
    ("hoist-stable", rules.hoists_are_stable),
    ("well-formed", programs_are_well_formed),
]

STAGE_2: list[tuple[str, Rule]] = [
    ("iterations-lowered", iterations_are_lowered),
    ("axes-gone", axes_are_gone),
    ("search-arguments", searches_fit),
    ("well-formed", functions_are_well_formed),
]

STAGE_3: list[tuple[str, Rule]] = [
    ("dialect-gone", dialect_is_gone),
    ("blocks-gone", blocks_are_gone),
    ("flat-buffers", buffers_are_flat),
    ("well-formed", functions_are_well_formed),
]


def check(func: tirx.PrimFunc, *, stage: int = 1) -> Iterator[Problem]:
    """Yield the problems of one function, rule by rule; none for a sound one."""
    if not isinstance(stage, int) or stage not in (1, 2, 3):
        raise VerifyError(f"stage: expected 1, 2 or 3, got {shown(stage)}")
    subject = rules.facts_of(func) if stage == 1 else func
    for name, rule in (STAGE_1, STAGE_2, STAGE_3)[stage - 1]:
        for problem in rule(subject):
            yield replace(problem, message=f"{problem.message} [{name}]")


def verify(func: Any, *, stage: int = 1) -> None:
    """Check a program against the rules of its stage.

    Parameters
    ----------
    func : PrimFunc or IRModule
        A program; of a module, every PrimFunc is checked.
    stage : {1, 2, 3}
        1: the user's program, 2: nested blocks over positions, 3: flat loops.

    Raises
    ------
    VerifyError
        The first broken rule. Its ``construct`` names the axis, buffer or iteration at fault.

    Examples
    --------
    >>> import sparsetir
    >>> sparsetir.verify(sparsetir.ops.spmm())
    """
    functions = func.functions.values() if isinstance(func, tvm.IRModule) else [func]
    for function in functions:
        if not isinstance(function, tirx.PrimFunc):
            if function is func:
                raise VerifyError(f"expected a tirx.PrimFunc or an IRModule, got {type(func).__name__}")
            continue
        for problem in check(function, stage=stage):
            raise VerifyError(f"{problem.message}{_line(problem.span)}", problem.construct)


def _line(span: Any) -> str:
    return "" if span is None else f"\n --> {span.source_name.name}:{span.line}"


# -------------------------------------------------------------------------------------------- warnings


# Warnings of programs that are legal but probably mistakes.


def warn_of_doubtful(program: Program, *, stacklevel: int = 3) -> None:
    """Warn of each initialisation that does not fit what the iteration stores."""
    for iteration in program.iterations:
        for message in _doubts(iteration):
            warnings.warn(f"{message} (sp_iter {iteration.name!r})", ScriptWarning, stacklevel=stacklevel)


def _doubts(iteration: SpIter) -> Iterator[str]:
    block = iteration.block
    for first in stores(block.init) if block.init is not None else []:
        updates = [s for s in stores(block.body) if s.buffer.same_as(first.buffer)]
        if updates and all(_is_permuted(first, update) for update in updates):
            pair = f"T.init() sets {_text(first)}, and the body stores to {_text(updates[0])}"
            yield f"{pair}: give both the same subscripts"
        for update in updates:
            for var in _lost(update, iteration):
                sums = f"{var.name} is spatial (S), but {_text(update)}, which the body adds to, does not depend on it"
                yield f"{sums}: write R for what is summed over, or give the result a subscript {var.name}"


def _is_permuted(a: Access, b: Access) -> bool:
    """Return whether both have the same variables as subscripts, in another order."""
    if not all(isinstance(index, Var) for index in (*a.indices, *b.indices)):
        return False
    return a.indices != b.indices and sorted(map(str, a.indices)) == sorted(map(str, b.indices))


def _lost(update: Access, iteration: SpIter) -> Iterator[Var]:
    """Yield spatial variables of a running sum's value that neither its subscripts nor any axis below theirs use."""
    value = update.node.value
    if not any(load.buffer.same_as(update.buffer) for load in loads(value)):
        return
    target_axes = [a for v, a in zip(iteration.vars, iteration.axes, strict=True) if mentions(update.indices, [v])]
    covered_axes = {*target_axes, *(ancestor for axis in target_axes for ancestor in axis.ancestors)}
    for var, axis, kind in zip(iteration.vars, iteration.axes, iteration.kinds, strict=True):
        if kind == "S" and axis not in covered_axes and mentions(value, [var]):
            yield var


def _text(access: Access) -> str:
    return f"{access.name}[{', '.join(map(str, access.indices))}]"


# Warnings of programs that would mean something else in upstream SparseTIR; see docs/upstream.md.


def warn_of_other_meanings(program: Program, *, stacklevel: int = 3) -> None:
    """Warn of each place where upstream would compute something else without an error."""
    for message in (*_layouts(program), *_initialisations(program)):
        warnings.warn(f"{message}; see docs/upstream.md", UpstreamWarning, stacklevel=stacklevel)


# ---------------------------------------------------------------------------------------------- layouts


def _layouts(program: Program) -> Iterator[str]:
    """Yield buffers whose axes of one tree are not listed side by side, where upstream makes a dimension of each."""
    for buffer in program.buffers.values():
        split = [a for a in buffer.axes if a.kind in ("sparse_fixed", "singleton") and _is_apart(a, buffer)]
        if split and not buffer.allocated:
            listed = ", ".join(a.name for a in buffer.axes)
            trees = ", ".join(" ".join(a.name for a in tree) for tree in buffer.trees)
            side_by_side = ", ".join(a.name for tree in buffer.trees for a in tree)
            yield (
                f"the values of {buffer.name} over ({listed}) have one dimension for each tree of axes, ({trees}), "
                f"whereas upstream SparseTIR lays them out in the order of the list: transpose arrays that come from "
                f"there, and list ({side_by_side}) to say that you did"
            )


def _is_apart(axis: Axis, buffer: SparseBuffer) -> bool:
    """Return whether an axis of another tree is listed between an axis and its parent."""
    if axis.parent is None:
        return False
    between = buffer.axes[buffer.axes.index(axis.parent) + 1 : buffer.axes.index(axis)]
    return any(a.root is not axis.root for a in between)


# ---------------------------------------------------------------------------------------------- initialisations


def _initialisations(program: Program) -> Iterator[str]:
    """Yield initialisations that reach absent coordinates and overwrite what an iteration before has stored there."""
    for n, it in enumerate(program.iterations):
        for buffer, axis in _reaching_beyond(it, program):
            earlier = _unread_before(buffer, program.iterations[:n])
            if earlier is not None:
                yield (
                    f"T.init() of sp_iter {it.name!r} sets all of {buffer.name} again, also what sp_iter "
                    f"{earlier.name!r} stored: it reaches every coordinate of {axis.name}, stored or not, whereas "
                    f'upstream SparseTIR initialises stored ones: T.sp_iter_attr({{"init": "stored"}}) '
                    f"says that, or initialise {buffer.name} once, before both"
                )


def _reaching_beyond(it: SpIter, program: Program) -> Iterator[tuple[Var, Axis]]:
    """Buffers that an iteration initialises beyond its stored points, with the axis whose other points are meant."""
    if it.block.init is None or str(it.block.annotations.get(INIT, "")) == STORED:
        return
    axis_of = dict(zip(it.vars, it.axes, strict=True))
    for store in collect(it.block.init, tirx.BufferStore):
        buffer = program.buffers.get(store.buffer)
        for n, index in enumerate(store.indices):
            axis = axis_of.get(index) if isinstance(index, Var) else None
            is_own = axis is not None and buffer is not None and buffer.axes[n] is axis
            if axis is not None and not is_own and axis.indices is not None:
                yield store.buffer, axis


def _unread_before(buffer: Var, before: list[SpIter]) -> SpIter | None:
    """Return the last iteration that stores to a buffer, if nothing reads the result before the next one does."""
    for it in reversed(before):
        stores = collect(it.block.body, tirx.BufferStore)
        own_stores = [s for s in stores if s.buffer.same_as(buffer)]
        other_values = [s.value for s in stores if not s.buffer.same_as(buffer)]
        if any(load.source.same_as(buffer) for load in collect(other_values, ir.TensorLoad)):
            return None
        if own_stores:
            return it
    return None


__all__ = [
    "STAGE_1",
    "STAGE_2",
    "STAGE_3",
    "axes_are_gone",
    "blocks_are_gone",
    "buffers_are_flat",
    "check",
    "dialect_is_gone",
    "functions_are_well_formed",
    "iterations_are_lowered",
    "programs_are_well_formed",
    "searches_fit",
    "verify",
    "warn_of_doubtful",
    "warn_of_other_meanings",
]
