# SPDX-License-Identifier: Apache-2.0
"""What a program of each stage must keep: one table of rules a stage.

`check` runs a table, `verify` raises the first problem. A message ends with the name of its rule in brackets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.errors import VerifyError
from sparsetir.ir import dialect, rules
from sparsetir.ir import rules as assembly_rules
from sparsetir.ir import rules as type_rules
from sparsetir.ir.rules import INDEX_DTYPES, SEARCHES, Facts, Problem, Rule, loads, stores
from sparsetir.ir.views import is_sp_iter
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
        return f"expected a member, a step, and three arguments for each member, found {len(args)}"
    if expected is None:
        return ""
    if len(args) != expected:
        return f"expected {expected} arguments, found {len(args)}"
    if name != "find_rule" and not isinstance(args[0], ir.TensorLoad):
        return f"expected the first element of a fiber as first argument, found {args[0]}"
    if name == "find" and getattr(args[4], "value", None) not in (*SEARCHES, "walk"):
        return f"expected one of {', '.join(SEARCHES)} as last argument, found {args[4]}"
    wrong = [a for a in args[:3] if str(a.ty.dtype) not in INDEX_DTYPES]
    return f"expected int32 or int64 arguments, found {wrong[0]} of {wrong[0].ty.dtype}" if wrong else ""


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
            message = f"buffer {access.name} must be one-dimensional in stage III, found {rank} subscripts"
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
        raise VerifyError(f"stage must be 1, 2 or 3, found {shown(stage)}")
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
                raise VerifyError(f"expected a tirx.PrimFunc or an IRModule, found {type(func).__name__}")
            continue
        for problem in check(function, stage=stage):
            raise VerifyError(f"{problem.message}{_line(problem.span)}", problem.construct)


def _line(span: Any) -> str:
    return "" if span is None else f"\n --> {span.source_name.name}:{span.line}"
