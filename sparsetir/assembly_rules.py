# SPDX-License-Identifier: Apache-2.0
"""The rules of stage I about unions, intersections, and axes that a program computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tvm_ffi
from tvm import ir
from tvm.ir import Var

from sparsetir.ir import Axis, Entry, SparseBuffer, label
from sparsetir.operands import leaves, operand_coordinates
from sparsetir.rules import Access, Facts, Place, Problem, loads, merge_fault, stores
from sparsetir.walks import structural_walk

REMEDY = "T.sparse_variable(parent, (length, nnz), (indptr, indices))"


def _at(place: Place, message: str, node: Any = None) -> Problem:
    iteration = place.iteration
    span = getattr(node, "span", None) or iteration.node.span
    return Problem(f"{message} (sp_iter {iteration.name!r})", iteration.name, span)


def _computed(buffer: SparseBuffer) -> list[Axis]:
    return [a for a in buffer.axes if a.is_assembled]


def _entries(place: Place) -> list[Entry]:
    """The entries in force, outermost first."""
    return [e for it in (*place.outer, place.iteration) for e in it.entries]


def _own(place: Place, facts: Facts, accesses: list[Access]) -> list[Access]:
    """The accesses of an iteration that stand in no iteration within it."""
    inner = [p.iteration.block for p in facts.places if place.iteration in p.outer]
    nodes = {a.node for block in inner for a in (*stores(block), *loads(block))}
    return [a for a in accesses if a.node not in nodes]


# ---------------------------------------------------------------------------------------------- unions, intersections


def merges_fit(facts: Facts) -> Iterator[Problem]:
    """The members of a union or an intersection can be walked together."""
    for place in facts.places:
        for entry in (e for e in place.iteration.entries if e.merge):
            fault = merge_fault(entry.merge, entry.axes) or _split_fault(entry, place)
            if fault:
                yield _at(place, fault)


def _split_fault(entry: Entry, place: Place) -> str:
    """Whether entries of one coordinate have children: a union would visit those apart."""
    listed = {a for e in _entries(place) for a in e.axes}
    for axis in (a for a in entry.axes if not a.unique and entry.merge == "union"):
        below = next((a for a in listed if a.parent is axis), None)
        if below is not None:
            fault = f"{label(entry)} visits repeated coordinates of {axis.name} one by one, and {below.name} below each"
            return f"{fault}; give rows once each (CSR or DCSR instead of COO), with all of their {below.name}"
    return ""


# ---------------------------------------------------------------------------------------------- assembled axes


def assembled_axes_are_results(facts: Facts) -> Iterator[Problem]:
    """Only results lie over an assembled axis, and only assembled axes hang from one."""
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
    """A result over an assembled axis is read by the statement that stores the same element."""
    for place in facts.places:
        own = _own(place, facts, stores(place.iteration.block))
        kept = [(a.buffer, a.indices) for a in own]
        for access in _own(place, facts, loads(place.iteration.block)):
            buffer = facts.program.buffers.get(access.buffer)
            if buffer is None or not _computed(buffer):
                continue
            if access.buffer not in {b for b, _ in kept}:
                message = f"{access.name} is read before its pattern is known: it lies over {_computed(buffer)[0].name}"
                how = "which another program reads as an operand once this one has run"
                yield _at(place, f"{message}, {how}", access.node)
            elif not any(access.buffer.same_as(b) and _same(access.indices, i) for b, i in kept):
                message = f"{access.name} is read at another element than the one that is stored"
                yield _at(place, f"{message}: its pattern is being computed", access.node)


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(tvm_ffi.structural_equal(x, y) for x, y in zip(a, b, strict=True))


def rows_come_first(facts: Facts) -> Iterator[Problem]:
    """The rows of an assembled axis are iterated before what is stored in them."""
    for place in facts.places:
        for access in _own(place, facts, stores(place.iteration.block)):
            buffer = facts.program.buffers.get(access.buffer)
            if buffer is not None and _computed(buffer) and len(access.indices) == len(buffer.axes):
                fault = _row_fault(access, buffer, place)
                if fault:
                    yield _at(place, fault, access.node)


def _row_fault(access: Access, buffer: SparseBuffer, place: Place) -> str:
    tree = next(t for t in buffer.trees if t[-1].is_assembled)
    at = dict(zip(buffer.axes, access.indices, strict=True))
    kinds = {v: k for e in _entries(place) for v, k in zip(e.vars, e.kinds, strict=True)}
    axes = {v: e.axes for e in _entries(place) for v in e.vars}
    order = list(kinds)
    rows = [(axis, at[axis]) for axis in tree if not axis.is_assembled]
    for axis, index in rows:
        if not isinstance(index, Var) or index not in kinds:
            message = f"the row of {buffer.name} along {axis.name} must be a variable of the sp_iter, found {index}"
            return f"{message}: rows of a computed pattern are filled one after the other"
    used = [v for axis in tree if axis.is_assembled for v in _variables(at[axis]) if v in kinds]
    for axis, index in rows:
        late = [v for v in order[: order.index(index)] if v in used or kinds[v] == "R"]
        if late:
            message = f"{buffer.name} is stored row by row along {axis.name}, but {late[0].name} is iterated before"
            message = f"{message} {index.name}"
            if _is_below(axes[index], axes[late[0]]):
                other = f"declare operands that are stored along {index.name} first, as csc in place of csr"
                return f"{message}, whose axis lies below; {other}, or store the result untransposed"
            return f"{message}; list the axis of {index.name} first"
    summed = next((v for v in used if kinds[v] == "R"), None)
    if summed is not None:
        return f"{buffer.name} keeps a coordinate for each {summed.name}, whose letter is R; write S"
    return ""


def _is_below(axes: Sequence[Axis], others: Sequence[Axis]) -> bool:
    """Whether one of some axes depends on one of the others."""
    return any(other in axis.ancestors for axis in axes for other in others)


def _variables(expr: ir.Expr) -> list[Var]:
    found: dict[Var, None] = {}
    structural_walk(expr, (Var, lambda v: found.setdefault(v)))
    return list(found)


def assembled_entries_have_operands(facts: Facts) -> Iterator[Problem]:
    """An assembled axis in a list runs over what operands store at the variables before it."""
    for place in facts.places:
        for entry in (e for e in place.iteration.entries if any(a.is_assembled for a in e.axes)):
            fault = _entry_fault(entry, place, facts)
            if fault:
                yield _at(place, fault)


def _entry_fault(entry: Entry, place: Place, facts: Facts) -> str:
    axis = next(a for a in entry.axes if a.is_assembled)
    if entry.is_fused or entry.attached_to is not None:
        fault = f"{label(entry)} walks positions that are stored, but those of {axis.name} are computed"
        return f"{fault}; list {axis.name}"
    var, body = entry.vars[0], place.iteration.block.body
    mine = [b for b in facts.program.buffers.values() if axis in b.axes]
    kept = [a for a in stores(body) for b in mine if a.buffer.same_as(b.view)]
    if not any(var.same_as(a.indices[b.axes.index(axis)]) for a in kept for b in mine if a.buffer.same_as(b.view)):
        results = " or ".join(f"{b.name}[{', '.join(a.name.lower() for a in b.axes)}]" for b in mine)
        return f"{axis.name} is listed, but nothing is stored at {var.name}; store {results or 'a result over it'}"
    wanted = operand_coordinates(place.iteration, var, axis, facts.program)
    if wanted is None:
        fault = f"no operand says which coordinates {var.name} of {axis.name} has: none stores coordinates along it"
        cell = next((a.name for a in stores(body) if a.buffer not in facts.program.buffers), None)
        if cell is not None:
            fault += f", nor is it looked at what {cell} was set to: write that in its place"
        return f"{fault}; subscript a sparse axis by {var.name}, or list the axis that {var.name} runs over"
    order = [v for e in _entries(place) for v in e.vars]
    later = order[order.index(var) :]
    for leaf in leaves(wanted):
        buffer = facts.program.buffers[leaf.buffer]
        above = [i for a, i in zip(buffer.axes, leaf.indices, strict=True) if a in leaf.axis.ancestors]
        needed = next((v for i in above for v in _variables(i) if v in later), None)
        if needed is not None:
            fault = f"the coordinates {var.name} of {buffer.name} depend on {needed.name}, which is iterated after it"
            return f"{fault}; list the axis of {needed.name} before {axis.name}"
    return ""


__all__ = [
    "assembled_axes_are_results",
    "assembled_entries_have_operands",
    "merges_fit",
    "results_are_read_where_stored",
    "rows_come_first",
]
