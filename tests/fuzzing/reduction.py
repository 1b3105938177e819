# SPDX-License-Identifier: Apache-2.0
"""Smaller programs: an iteration, a statement or a part of an expression less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fuzzing.program import Expr, Iteration, Program, Store, reads

#: operators whose operands have the type of the whole
ALIKE = ("add", "sub", "mul", "max", "min", "and", "or")


def smaller_programs(program: Program) -> Iterator[Program]:
    """Programs with a part less."""
    for n in range(len(program.iterations)):
        if len(program.iterations) > 1:
            yield pruned(program, program.iterations[:n] + program.iterations[n + 1 :])
    if program.repeats > 1:
        yield replace(program, repeats=1)
    for n, it in enumerate(program.iterations):
        for other in smaller_iterations(it):
            yield pruned(program, [*program.iterations[:n], other, *program.iterations[n + 1 :]])
    for buffer in program.buffers:
        if buffer.default and buffer.role != "scratch":
            yield with_buffer(program, buffer, replace(buffer, default=0))


def smaller_iterations(it: Iteration) -> Iterator[Iteration]:
    """Iterations with a statement, an annotation or a part of an expression less."""
    for n in range(len(it.body)):
        if len(it.body) > 1:
            yield replace(it, body=it.body[:n] + it.body[n + 1 :])
    for n in range(len(it.init)):
        yield replace(it, init=it.init[:n] + it.init[n + 1 :])
    if it.search != "inline":
        yield replace(it, search="inline")
    if it.fused:
        yield replace(it, fused=0)
    for n, step in enumerate(it.body):
        smaller = smaller_iterations(step) if isinstance(step, Iteration) else smaller_stores(step)
        yield from (replace(it, body=[*it.body[:n], other, *it.body[n + 1 :]]) for other in smaller)
    for n, step in enumerate(it.init):
        yield from (replace(it, init=[*it.init[:n], other, *it.init[n + 1 :]]) for other in smaller_stores(step))


def smaller_stores(store: Store) -> Iterator[Store]:
    yield from (replace(store, value=value) for value in smaller_values(store.value))


def smaller_values(e: Expr) -> Iterator[Expr]:
    """Expressions of the same type with a part less."""
    kind, *rest = e
    if kind in ALIKE:
        yield from rest
    if kind in ("select", "if_then_else"):
        yield from rest[1:]
    if kind == "cast" and rest[1][0] != "const":
        yield ("cast", rest[0], ("const", 1))
    for n, part in enumerate(rest):
        if isinstance(part, tuple) and part and isinstance(part[0], str) and kind != "read":
            yield from ((kind, *rest[:n], other, *rest[n + 1 :]) for other in smaller_values(part))


def pruned(program: Program, iterations: list[Iteration]) -> Program:
    """The program of these iterations, with the buffers and axes that they use."""
    made = replace(program, iterations=iterations)
    every = [e for s in made.stores for e in (s.value, *s.subscripts)]
    used = {s.buffer for s in made.stores} | {r[1] for e in every for r in reads(e)}
    written = {s.buffer for s in made.stores}
    made.buffers = [b for b in program.buffers if b in used]
    axes = [a for it in made.every_iteration for a in (*it.axes, *it.attached.values())]
    axes += [a for b in made.buffers for a in b.axes]
    axes += [a.like for a in axes if a.like is not None]
    chained = dict.fromkeys(a for axis in axes for a in axis.chain)
    made.axes = sorted(chained, key=lambda a: a.like is not None)
    for buffer in made.buffers:
        if buffer.role == "out" and buffer not in written:
            made = with_buffer(made, buffer, replace(buffer, role="in"))
    return made


def with_buffer(program: Program, old: object, new: object) -> Program:
    """The program with another buffer in place of one."""
    from fuzzing.fronts.programs import with_buffers

    buffers = {b: new if b is old else b for b in program.buffers}
    iterations = [with_buffers(it, buffers) for it in program.iterations]
    return replace(program, buffers=list(buffers.values()), iterations=iterations)  # type: ignore[arg-type]


__all__ = ["smaller_programs"]
