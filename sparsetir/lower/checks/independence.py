# SPDX-License-Identifier: Apache-2.0
"""The proof that steps of a loop are independent: none touches an element that another one writes.

Whatever runs steps at the same time or in another order asks here: `is_parallel` of an iteration and `init_is_parallel`
of its initialisation while the program still has coordinates, and `sparsetir.lower.checks.apart` of any other loop
once it is flat. A loop that is proven carries `PARALLEL_MARK`; the others run in order, or are refused where a schedule
asks for more.

What is looked at is every access to every array that a step writes and that is there after the step: loads and stores,
in the initialisation, the body and the iterations within, and in the extents of loops. For each such array one of these
must hold:

* One dimension tells the steps apart: each of the loop's variables alone subscripts the same dimension in all accesses.
* All accesses have the same subscripts, and these are different for different values of the iteration's variables,
  of which the loop's are some.

Further, the coordinates of the steps differ, nothing is called that may do more than compute, and no step writes an
array that says where elements are: searches and the extents of loops read it as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.ir import INDEPENDENT, Axis, Entry, Program, SpIter, cast, const, substitute_args
from sparsetir.lower.checks.apart import is_one_to_one
from sparsetir.lower.rewriting import all_same, collect, mentions
from sparsetir.walks import structural_walk

PURE = 1  # the effect of an operator that only computes
ARRAY_NAMES = ("tirx.address_of", "tirx.tvm_access_ptr", "tirx.call_pure_extern", "tirx.call_pure_packed")


@dataclass(frozen=True, eq=False)
class Access:
    """One load or store: which array, through which view, with which subscripts."""

    array: Var
    view: Var
    indices: list[ir.Expr]
    is_store: bool


def is_parallel(iteration: SpIter, program: Program) -> bool:
    """Whether the steps of an iteration's outermost loop are independent, as proven or promised (``independent``)."""
    first = iteration.entries[0]
    if set(first.kinds) != {"S"} or not _differ(first):
        return False
    if INDEPENDENT in iteration.block.annotations:
        return True
    parts = [iteration.block.body, *([] if iteration.block.init is None else [iteration.block.init])]
    return _are_apart(parts, list(first.vars), iteration, program)


def init_is_parallel(iteration: SpIter, variables: Sequence[Var], program: Program, by_position: bool) -> bool:
    """Whether an initialisation may set elements for different values of `variables` at the same time.

    They take the values that their axes store where it goes `by_position`, else all coordinates, once each.
    """
    entries = [e for e in iteration.entries if any(v in e.vars for v in variables)]
    if not entries or (by_position and not all(_differ(e) for e in entries)):
        return False
    return _are_apart([iteration.block.init], list(variables), iteration, program)


def injective(indices: Sequence[ir.Expr], variables: Sequence[Var], iteration: SpIter) -> bool:
    """Whether elements with different values of `variables` are different ones."""
    if all(any(i.same_as(v) for i in indices) for v in variables):
        return True
    axis_of = dict(zip(iteration.vars, iteration.axes, strict=True))
    used = [v for v in iteration.vars if mentions(indices, [v])]
    if any(v not in used for v in variables) or any(collect(i, ir.TensorLoad) for i in indices):
        return False
    ranges = {v: ir.Range(const(0, axis_of[v].idtype), cast(axis_of[v].length, axis_of[v].idtype)) for v in used}
    return is_one_to_one(indices, ranges)


# ---------------------------------------------------------------------------------------------- an iteration


def _differ(entry: Entry) -> bool:
    """Whether the coordinates of an entry's steps differ. Those of a union do, but its steps follow each other."""
    return entry.merge != "union" and all(map(differ, entry.axes))


def differ(axis: Axis) -> bool:
    """Whether the coordinates of an axis differ below a position: as promised of an array, as proven of a formula."""
    return bool(axis.unique and (axis.rule is None or axis.kind == "singleton" or _advances(axis)))


def _advances(axis: Axis) -> bool:
    """Whether the coordinate that a formula gives moves by the same number, not zero, from slot to slot."""
    slot = Var("slot", ir.PrimType(axis.idtype))
    above = [Var(f"above_{n}", ir.PrimType(axis.idtype)) for n in range(len(axis.ancestors))]
    begin = Var("begin", ir.PrimType(axis.idtype))
    at = lambda s: substitute_args(axis.rule, [*above, s, begin + s])  # noqa: E731
    gap = sym.Analyzer().simplify(at(slot + const(1, axis.idtype)) - at(slot))
    return isinstance(gap, tirx.IntImm) and int(gap) != 0


def _are_apart(parts: list[Any], variables: list[Var], iteration: SpIter, program: Program) -> bool:
    if any(_may_act(part) for part in parts):
        return False
    touched = list(_accesses(parts, iteration, program))
    stored = {t.array for t in touched if t.is_store}
    if stored & _structure(parts, iteration, touched, program):
        return False
    moving = _defined_inside(parts)
    groups = [[t for t in touched if t.array.same_as(array)] for array in stored]
    return all(_tells_apart(group, variables, iteration, moving) for group in groups)


def _tells_apart(group: list[Access], variables: list[Var], iteration: SpIter, moving: list[Var]) -> bool:
    """Whether different steps use different elements of the one array of `group`."""
    if not all(t.view.same_as(group[0].view) for t in group):
        return False
    indices = [t.indices for t in group]
    own = [_whole(indices[0], v) for v in variables]
    if None not in own and all([_whole(i, v) for v in variables] == own for i in indices):
        return True
    same = all(all_same(i, indices[0]) for i in indices) and not mentions(indices[0], moving)
    return same and injective(indices[0], variables, iteration)


def _whole(indices: list[ir.Expr], var: Var) -> int | None:
    """Dimension that `var` alone subscripts."""
    return next((n for n, i in enumerate(indices) if i.same_as(var)), None)


def _accesses(parts: list[Any], iteration: SpIter, program: Program) -> Iterable[Access]:
    """Every access to an array that is not a step's own."""
    local = _allocated_inside(iteration.block)
    found: list[tuple[Var, list[ir.Expr], bool]] = []
    callbacks = [
        (tirx.BufferStore, lambda s: found.append((s.buffer, list(s.indices), True))),
        (ir.TensorLoad, lambda x: found.append((x.source, list(x.indices), False))),
    ]
    for part in parts:
        structural_walk(part, callbacks)
    for view, indices, is_store in found:
        buffer = program.buffers.get(view)
        array = view if buffer is None else buffer.storage
        if view not in local and array not in local:
            yield Access(array, view, indices, is_store)


def _structure(parts: list[Any], iteration: SpIter, touched: list[Access], program: Program) -> set[Var]:
    """The arrays that say where the elements are which the steps visit or look up."""
    within = [it for it in program.iterations if any(_holds(part, it) for part in parts)]
    used = {a for it in (iteration, *within) for a in it.axes}
    used |= {a for t in touched if t.view in program.buffers for a in program.buffers[t.view].axes}
    used |= {up for a in used for up in a.ancestors}
    arrays = {array for a in used for array in (a.indptr, a.indices) if array is not None}
    rules = [r for a in used for r in (a.rule, a.extent_rule, a.offset_rule) if r is not None]
    return arrays | {x.source for r in rules for x in collect(r, ir.TensorLoad)}


def _holds(part: Any, iteration: SpIter) -> bool:
    return any(b.same_as(iteration.block) for b in collect(part, s_tir.SBlock))


def _defined_inside(parts: list[Any]) -> list[Var]:
    """Variables that have several values, or none yet, in one step."""
    found: list[Var] = []
    callbacks = [
        (tirx.For, lambda f: found.append(f.loop_var)),
        (s_tir.SBlock, lambda b: found.extend(iv.var for iv in b.iter_vars)),
        (tirx.Bind, lambda b: found.append(b.var)),
        (tirx.Let, lambda x: found.append(x.var)),
    ]
    for part in parts:
        structural_walk(part, callbacks)
    return found


def _may_act(node: Any) -> bool:
    """Whether something is called that may do more than compute, or reach an array by its address."""
    hit: list[int] = []

    def on_call(call: Call) -> None:
        if not isinstance(call.op, ir.Op) or str(call.op.name) in ARRAY_NAMES or _effect(call.op) > PURE:
            hit.append(1)

    structural_walk(node, (Call, on_call))
    return bool(hit)


def _effect(operator: ir.Op) -> int:
    """What a call may do; nothing said means that it computes."""
    kind = operator.get_attr("TCallEffectKind")
    return PURE if kind is None else int(kind)


def _allocated_inside(block: s_tir.SBlock) -> set[Var]:
    found: set[Var] = set(block.alloc_buffers)
    views: dict[Var, Var] = {}

    def on_decl(node: tirx.DeclBuffer) -> None:
        if node.data.args:
            views[node.buffer] = node.data.args[0]

    callbacks = [
        (s_tir.SBlock, lambda b: found.update(b.alloc_buffers)),
        (tirx.AllocBuffer, lambda a: found.add(a.buffer)),
        (tirx.DeclBuffer, on_decl),
    ]
    structural_walk(block.body, callbacks)
    return found | {v for v, s in views.items() if s in found}
