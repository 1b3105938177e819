# SPDX-License-Identifier: Apache-2.0
"""Every access to a buffer of a stage-II function, in the order of execution, with what stands around it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.ir import const
from sparsetir.lower.marks import SCRATCH, names_in
from sparsetir.lower.rewriting import collect, conjuncts, same, substitute
from sparsetir.walks import structural_mutate

Node: TypeAlias = "tirx.For | s_tir.SBlockRealize | tirx.IfThenElse"


@dataclass(frozen=True)
class Guard:
    """A condition of an access, in the variables of the first ``depth`` blocks around it; ``path`` says where it is."""

    condition: ir.Expr
    depth: int
    is_bound: bool
    """Whether it only keeps variables within their domains: the ``T.where`` of a block, or a loop that runs."""


@dataclass(frozen=True, eq=False)
class Site:
    """One load or store.

    ``path`` has the loops, blocks and conditional statements around it, outermost first.
    """

    buffer: Var
    indices: list[ir.Expr]
    value: Any
    path: tuple[Node, ...]
    guards: tuple[Guard, ...]

    @property
    def is_store(self) -> bool:
        return self.value is not None

    @property
    def place(self) -> tuple[int, ...]:
        """What accesses have in common that stand at one place under the same conditions."""
        return (*map(hash, self.path), *map(hash, (g.condition for g in self.guards)))

    @property
    def loops(self) -> list[tirx.For]:
        return [n for n in self.path if isinstance(n, tirx.For)]

    @property
    def blocks(self) -> list[s_tir.SBlockRealize]:
        return [n for n in self.path if isinstance(n, s_tir.SBlockRealize)]

    @property
    def block(self) -> str:
        """Name of the innermost block."""
        return str(self.blocks[-1].block.name_hint)

    def is_beside(self, other: Site) -> bool:
        """Whether the innermost block is that of another access."""
        return bool(self.blocks[-1].same_as(other.blocks[-1]))

    def within(self, buffer: Var) -> list[s_tir.SBlockRealize]:
        """The blocks below the one that allocates `buffer`."""
        blocks = self.blocks
        at = [n for n, realize in enumerate(blocks) if buffer in list(realize.block.alloc_buffers)]
        return blocks[at[0] + 1 :] if at else blocks

    def outwards(self, expr: ir.Expr, depth: int, to: int) -> ir.Expr:
        """`expr`, of the block at `depth`, in the variables that are visible where `to` blocks stand around."""
        for realize in reversed(self.blocks[to:depth]):
            pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
            expr = substitute(expr, {iv.var: value for iv, value in pairs})
        return expr


def loops_of_blocks(site: Site) -> Iterator[tuple[tirx.For, s_tir.SBlockRealize]]:
    """Each loop around an access with the next block inside it."""
    waiting: list[tirx.For] = []
    for node in site.path:
        if isinstance(node, tirx.For):
            waiting.append(node)
        elif isinstance(node, s_tir.SBlockRealize):
            yield from ((loop, node) for loop in waiting)
            waiting = []


def places(found: Sequence[Site]) -> list[Site]:
    """One access for each place and the conditions there."""
    return list({site.place: site for site in reversed(found)}.values())[::-1]


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading nodes two paths share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if not x.same_as(y)), min(len(a), len(b)))


class _Walk:
    def __init__(self) -> None:
        self.found: list[Site] = []
        self.path: list[Node] = []
        self.guards: list[Guard] = []
        self.views: dict[Var, Any] = {}
        self.known: dict[int, list[ir.Expr]] = {}

    def walk(self, node: Any) -> None:
        """Visit `node` in the order of execution."""
        callbacks = [
            (tirx.For, self._for),
            (s_tir.SBlockRealize, self._realize),
            (tirx.IfThenElse, self._if),
            (Call, self._call),
            (tirx.BufferStore, self._store),
            (ir.TensorLoad, self._load),
        ]
        structural_mutate(node, callbacks)

    def _under(self, node: Node | None, conditions: Sequence[ir.Expr], *inner: Any, is_bound: bool = False) -> None:
        """Visit what stands below a node, or below conditions."""
        path, guards = list(self.path), list(self.guards)
        depth = sum(isinstance(n, s_tir.SBlockRealize) for n in path)
        self.path += [] if node is None else [node]
        self.guards += [Guard(self._one(c), depth, is_bound) for c in conditions]
        for part in inner:
            if part is not None:
                self.walk(part)
        self.path, self.guards = path, guards

    def _one(self, condition: ir.Expr) -> ir.Expr:
        """The first condition that equals this one: nested choices repeat theirs hundreds of times."""
        equal = self.known.setdefault(tvm_ffi.structural_hash(condition), [])
        found = next((c for c in equal if same(c, condition)), None)
        if found is None:
            equal.append(condition)
        return condition if found is None else found

    def _for(self, node: tirx.For, mutator: Any) -> tirx.For:
        mutator.mutate(node.extent)
        # A loop of an attached axis has no steps where there is nothing to attach it to.
        conditions = conjuncts(node.extent.args[0]) if op.is_if_then_else(node.extent) else []
        self._under(node, conditions, node.body, is_bound=True)
        return node

    def _realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        for expr in (node.predicate, *node.iter_values):
            mutator.mutate(expr)
        self.views.update({view.buffer: view.source for view in node.block.match_buffers})
        self._under(node, conjuncts(node.predicate), node.block.init, node.block.body, is_bound=True)
        return node

    def _if(self, node: tirx.IfThenElse, mutator: Any) -> tirx.IfThenElse:
        mutator.mutate(node.condition)
        self._under(node, conjuncts(node.condition), node.then_case)
        self._under(node, [tirx.Not(node.condition)], node.else_case)
        return node

    def _call(self, node: Call, mutator: Any) -> Call:
        if not op.is_if_then_else(node):
            return mutator.default_mutate(node)
        condition, yes, no = node.args
        mutator.mutate(condition)
        self._under(None, conjuncts(condition), yes)
        self._under(None, [tirx.Not(condition)], no)
        return node

    def _add(self, buffer: Var, indices: Sequence[ir.Expr], value: ir.Expr | None) -> None:
        """Note an access; one of a view is one of the buffer behind it."""
        region = self.views.get(buffer)
        if region is not None:
            starts = [r.min for r in region.region]
            inner = [const(0)] * (len(starts) - len(indices)) + list(indices)
            buffer, indices = region.source, [s + i for s, i in zip(starts, inner, strict=True)]
        self.found.append(Site(buffer, list(indices), value, tuple(self.path), tuple(self.guards)))

    def _load(self, node: ir.TensorLoad, mutator: Any) -> ir.TensorLoad:
        mutator.default_mutate(node)
        self._add(node.source, node.indices, None)
        return node

    def _store(self, node: tirx.BufferStore, mutator: Any) -> tirx.BufferStore:
        for expr in (*node.indices, node.value):
            mutator.mutate(expr)
        self._add(node.buffer, node.indices, node.value)
        return node


def caches(func: tirx.PrimFunc) -> list[Var]:
    """The buffers that a schedule added to a stage-II function, but for those a foreign kernel is handed."""
    own = names_in(func, SCRATCH)
    held = [b for block in collect(func.body, s_tir.SBlock) for b in block.alloc_buffers if str(b.name) not in own]
    handed = {arg for call in collect(func.body, Call) for arg in call.args if isinstance(arg, Var)}
    return [b for b in held if b not in handed]


@functools.lru_cache(maxsize=1)  # the checks that follow each other ask for the same function
def sites(func: tirx.PrimFunc) -> list[Site]:
    """The loads and stores of a function."""
    walk = _Walk()
    walk.walk(func.body)
    return walk.found
