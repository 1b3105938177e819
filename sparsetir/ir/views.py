# SPDX-License-Identifier: Apache-2.0
"""Decoded views of a stage-I function, which are never changed, and constructors of its nodes.

The source of truth is the ``tirx.PrimFunc``; `decode` reads its standard nodes into the frozen
dataclasses below. A *position* counts stored elements of an axis over all its fibers, a *slot* counts
within one fiber, a *coordinate* is the index a user writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.errors import ArgumentTypeError, VerifyError
from sparsetir.ir import dialect
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.utils.caches import cached_property

SPARSE_ITER = "sparse_iter"
SEARCH = "search"
INIT, STORED = "init", "stored"  # initialise only the points that the iteration visits
INDEPENDENT = "independent"  # a promise: steps of the outermost loop write different elements
SWEEP = "sweep"  # neighbours of one sweep go over the rows together, a few at a time, before those of the next


def const(value: int, dtype: str = "int32") -> ir.Expr:
    """Return an integer constant."""
    return tirx.const(value, dtype)


def cast(expr: ir.Expr, dtype: str) -> ir.Expr:
    """Convert `expr` to `dtype`; return it unchanged if it has that dtype."""
    return expr if str(expr.ty.dtype) == dtype else tirx.Cast(dtype, expr)


def load(buffer: Var, index: ir.Expr) -> ir.Expr:
    """Return the element `index` of a 1-D buffer."""
    return tirx.BufferLoad(buffer, [index])


def substitute_args(rule: ir.Expr, args: Sequence[ir.Expr]) -> ir.Expr:
    """Replace the k-th lambda argument in `rule` by ``args[k]``."""

    def fill(call: Call, mutator: Any) -> ir.Expr:
        if dialect.is_call(call, "arg"):
            return cast(args[int(call.args[0])], str(call.ty.dtype))
        return mutator.default_mutate(call)

    return structural_mutate(rule, [(Call, fill)])


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis: how the coordinates of a dimension are stored.

    ``count`` is the number of stored positions over all fibers, ``width`` the slots per fiber where that is
    fixed. ``indices`` is an array, ``rule`` a formula of (ancestors' coordinates..., slot, position) that replaces it;
    ``extent_rule`` and ``offset_rule`` (of the ancestors' coordinates) replace ``indptr``. A ``full`` axis has a
    coordinate in every slot.
    """

    var: Var
    kind: str
    length: ir.Expr
    count: ir.Expr
    parent: Axis | None = None
    width: ir.Expr | None = None
    indptr: Var | None = None
    indices: Var | None = None
    rule: ir.Expr | None = None
    extent_rule: ir.Expr | None = None
    offset_rule: ir.Expr | None = None
    sorted: bool = True
    unique: bool = True
    full: bool = False

    def __repr__(self) -> str:
        parent = "" if self.parent is None else f", below {self.parent.name}"
        return f"{self.name} = {self.kind} of {self.length}{parent}, {self.count} positions"

    @property
    def name(self) -> str:
        return str(self.var.name)

    @property
    def idtype(self) -> str:
        return str(self.var.ty.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether slot and coordinate are the same number."""
        return self.kind in ("dense_fixed", "dense_variable", "dense_implicit")

    @property
    def is_assembled(self) -> bool:
        """Whether the program computes which coordinates are stored: it has no arrays before the program has run."""
        return self.kind == "sparse_assembled"

    @property
    def is_ragged(self) -> bool:
        """Whether the number of slots differs from fiber to fiber."""
        return self.kind in ("dense_variable", "dense_implicit", "sparse_variable", "sparse_assembled")

    @property
    def may_be_absent(self) -> bool:
        """Whether a stored slot may hold a coordinate outside ``[0, length)``, that is padding."""
        return (self.kind in ("sparse_fixed", "singleton") or self.rule is not None) and not self.full

    def repeats_below(self, up: Axis) -> bool:
        """Return whether every position of an ancestor has the same coordinates below it: a formula that ignores it."""
        if self.kind != "sparse_fixed" or self.rule is None:
            return False
        used: set[int] = set()
        on_call = lambda c: used.add(int(c.args[0])) if dialect.is_call(c, "arg") else None  # noqa: E731
        structural_walk(self.rule, (Call, on_call))
        position = len(self.ancestors) + 1
        return used.isdisjoint({self.ancestors.index(up), position})

    @cached_property
    def ancestors(self) -> tuple[Axis, ...]:
        """The axes above this one, root first."""
        return () if self.parent is None else (*self.parent.ancestors, self.parent)

    @property
    def root(self) -> Axis:
        return self.ancestors[0] if self.parent is not None else self

    def begin(self, parent_pos: ir.Expr, coords: Sequence[ir.Expr]) -> ir.Expr:
        """Return the first position of the fiber below position `parent_pos` (ancestors at `coords`)."""
        if self.indptr is not None:
            return cast(load(self.indptr, parent_pos), self.idtype)
        if self.offset_rule is not None:
            return cast(substitute_args(self.offset_rule, coords), self.idtype)
        if self.kind == "singleton":
            return cast(parent_pos, self.idtype)
        if self.kind == "sparse_fixed":
            return cast(parent_pos, self.idtype) * cast(self.width, self.idtype)
        return const(0, self.idtype)

    def extent(self, parent_pos: ir.Expr, coords: Sequence[ir.Expr]) -> ir.Expr:
        """Return the number of slots of that fiber."""
        if self.indptr is not None:
            bounds = load(self.indptr, parent_pos + 1) - load(self.indptr, parent_pos)
            return cast(bounds, self.idtype)
        if self.extent_rule is not None:
            extent = cast(substitute_args(self.extent_rule, coords), self.idtype)
            return self._within(extent, self.begin(parent_pos, coords)) if self.has_tables else extent
        return cast(self.length if self.width is None else self.width, self.idtype)

    @cached_property
    def is_computed(self) -> bool:
        """True if coordinates come from a formula that reads no array, and all fibers have as many slots."""
        if self.rule is None or self.indptr is not None or self.extent_rule is not None or self.offset_rule is not None:
            return False
        hits: list[Any] = []
        structural_walk(self.rule, (ir.TensorLoad, hits.append))
        return not hits

    @cached_property
    def has_tables(self) -> bool:
        """True if the extents or offsets of fibers are read from arrays, whose contents are not validated."""
        hits: list[Any] = []
        for rule in (self.extent_rule, self.offset_rule):
            if rule is not None:
                structural_walk(rule, (ir.TensorLoad, hits.append))
        return bool(hits)

    def _within(self, extent: ir.Expr, begin: ir.Expr) -> ir.Expr:
        """Return the extent of a fiber within the stored positions and the length of the axis; others are absent."""
        zero, length, count = const(0, self.idtype), cast(self.length, self.idtype), cast(self.count, self.idtype)
        inside = tirx.max(zero, tirx.min(tirx.min(extent, length), count - begin))
        return tirx.Select(begin < zero, zero, inside)

    def position(self, parent_pos: ir.Expr, slot: ir.Expr, coords: Sequence[ir.Expr]) -> ir.Expr:
        """Return the position of `slot` in that fiber."""
        if self.kind == "dense_fixed":
            return slot
        if self.kind == "singleton":
            return self.begin(parent_pos, coords)
        return self.begin(parent_pos, coords) + slot

    def coordinate(self, pos: ir.Expr, slot: ir.Expr, coords: Sequence[ir.Expr]) -> ir.Expr:
        """Coordinate stored at position `pos`, which is `slot` in its fiber."""
        if self.rule is not None:
            return cast(substitute_args(self.rule, [*coords, slot, pos]), self.idtype)
        if self.indices is not None:
            return cast(load(self.indices, pos), self.idtype)
        return slot


@dataclass(frozen=True, eq=False)
class SparseBuffer:
    """A buffer over axes. ``view`` is what the program subscripts, ``storage`` what holds the values.

    The storage has one dimension per axes tree, in the order in which the trees first appear in
    ``axes``; its extent is the number of positions of the tree's last axis.
    """

    view: Var
    storage: Var
    axes: tuple[Axis, ...]
    default: ir.Expr
    allocated: bool = False

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(a.name for a in self.axes)}) of {self.dtype}"

    @property
    def name(self) -> str:
        return str(self.view.name)

    @property
    def dtype(self) -> str:
        return str(self.view.ty.dtype)

    @property
    def is_dense(self) -> bool:
        return all(axis.kind == "dense_fixed" for axis in self.axes)

    @cached_property
    def trees(self) -> tuple[tuple[Axis, ...], ...]:
        """The buffer's axes grouped by tree, root first within each."""
        groups: dict[Axis, list[Axis]] = {}
        for axis in self.axes:
            groups.setdefault(axis.root, []).append(axis)
        return tuple(tuple(sorted(g, key=lambda a: len(a.ancestors))) for g in groups.values())

    @property
    def storage_shape(self) -> list[ir.Expr]:
        return [tree[-1].count for tree in self.trees]


@dataclass(frozen=True, eq=False)
class Entry:
    """One item of an sp_iter's list: a single axis, a fused chain, an attached axis, or a union or an intersection.

    ``merge`` is "union" or "intersect" where one variable walks the coordinates of several axes; ``hosts`` are then
    the axes that its members are attached to, None for a member below its own parent.
    """

    axes: tuple[Axis, ...]
    vars: tuple[Var, ...]
    kinds: str
    attached_to: Axis | None = None
    merge: str = ""
    hosts: tuple[Axis | None, ...] = ()

    @property
    def is_fused(self) -> bool:
        return len(self.axes) > 1 and not self.merge

    @property
    def heads(self) -> tuple[tuple[Axis, Axis | None], ...]:
        """The axes whose parents decide where the entry's loops run, each with the axis that it is attached to."""
        return tuple(zip(self.axes, self.hosts, strict=True)) if self.merge else ((self.axes[0], self.attached_to),)

    @property
    def domains(self) -> tuple[Axis, ...]:
        """The axis that gives each variable its length and its index type."""
        return (merge_domain(self.axes),) if self.merge else self.axes


@dataclass(frozen=True, eq=False)
class SpIter:
    """One sparse iteration."""

    name: str
    entries: tuple[Entry, ...]
    block: s_tir.SBlock
    node: s_tir.SBlockRealize

    def __repr__(self) -> str:
        return f"{self.name} over [{', '.join(map(label, self.entries))}] {self.kinds!r}"

    @property
    def kinds(self) -> str:
        return "".join(e.kinds for e in self.entries)

    @property
    def vars(self) -> tuple[Var, ...]:
        return tuple(v for e in self.entries for v in e.vars)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """One axis for each variable; of a union or an intersection the one that `Entry.domains` says."""
        return tuple(a for e in self.entries for a in e.domains)

    @property
    def listed(self) -> tuple[Axis, ...]:
        """Every axis of the list, all members of unions and intersections among them."""
        return tuple(a for e in self.entries for a in e.axes)

    @property
    def search(self) -> str:
        return str(self.block.annotations.get(SEARCH, "inline"))

    @property
    def walk(self) -> str:
        """How an intersection finds the coordinates of its first member in the others: side by side unless told."""
        search = str(self.block.annotations.get(SEARCH, "merge"))
        return "merge" if search == "merge" else "inline"


@dataclass(frozen=True, eq=False)
class Program:
    """A stage-I function, decoded."""

    func: tirx.PrimFunc
    axes: dict[Var, Axis] = field(default_factory=dict)
    buffers: dict[Var, SparseBuffer] = field(default_factory=dict)
    iterations: list[SpIter] = field(default_factory=list)

    def __repr__(self) -> str:
        parts = {"axes": self.axes.values(), "buffers": self.buffers.values(), "iterations": self.iterations}
        return "\n".join(f"{title}:\n" + "".join(f"    {x!r}\n" for x in part) for title, part in parts.items())

    @property
    def params(self) -> dict[str, Var]:
        """The function's parameters by name."""
        return {str(p.name): p for p in self.func.params}

    def buffer(self, name: str) -> SparseBuffer:
        """Return the sparse buffer called `name`."""
        matches = [b for b in self.buffers.values() if b.name == name]
        if not matches:
            names = ", ".join(b.name for b in self.buffers.values())
            raise VerifyError(f"no sparse buffer is called {name!r}; there are: {names}", name)
        return matches[0]

    def iteration(self, name: str) -> SpIter:
        """Return the sparse iteration called `name`."""
        matches = [it for it in self.iterations if it.name == name]
        if not matches:
            names = ", ".join(it.name for it in self.iterations)
            raise VerifyError(f"no sparse iteration is called {name!r}; there are: {names}", name)
        return matches[0]


def decode_axis(var: Var, value: Call, axes: dict[Var, Axis]) -> Axis:
    """Return the axis that ``var = value`` declares, its parent looked up in `axes`."""
    kind, args = dialect.name_of(value), list(value.args)
    if kind == "dense_fixed":
        return Axis(var, kind, length=args[0], count=args[0])
    parent = None if dialect.is_call(args[0], "root") else axes.get(args[0])
    if parent is None and not dialect.is_call(args[0], "root"):
        message = f"the parent of axis {var.name} must be an axis declared before it, got {args[0]}"
        raise VerifyError(message, str(var.name))
    above = const(1) if parent is None else parent.count
    if kind == "sparse_assembled":
        return Axis(var, kind, args[1], args[2], parent, sorted=bool(int(args[3])))
    if kind == "dense_variable":
        return Axis(var, kind, args[1], args[2], parent, indptr=args[3])
    if kind == "dense_implicit":
        return Axis(var, kind, args[1], args[2], parent, extent_rule=args[3], offset_rule=args[4])
    full = len(args) > dialect.BEFORE_FULL.get(kind, len(args)) and bool(int(args.pop()))
    flags = {"sorted": bool(int(args[-2])), "unique": bool(int(args[-1]))}
    where = {"indices": args[-3]} if tirx.is_buffer_var(args[-3]) else {"rule": args[-3]}
    if kind == "sparse_variable":
        return Axis(var, kind, args[1], args[2], parent, indptr=args[3], full=full, **where, **flags)
    if kind == "singleton":
        return Axis(var, kind, args[1], above, parent, width=const(1), full=full, **where, **flags)
    count = cast(above, str(args[2].ty.dtype)) * args[2] if parent is not None else args[2]
    return Axis(var, kind, args[1], count, parent, width=args[2], full=full, **where, **flags)


def decode_entries(block: s_tir.SBlock, values: Sequence[Call], axes: dict[Var, Axis]) -> tuple[Entry, ...]:
    """Return the items of an iteration's axis list, from its iteration variables' bindings."""
    kinds = str(block.annotations[SPARSE_ITER])
    entries: list[Entry] = []
    n = 0
    while n < len(values):
        target = values[n].args[0]
        if dialect.is_call(target, "fuse"):
            members = tuple(axes[a] for a in target.args)
            last = n + len(members)
            variables = tuple(iv.var for iv in block.iter_vars[n:last])
            entries.append(Entry(members, variables, kinds[n:last]))
            n = last
            continue
        variables = (block.iter_vars[n].var,)
        if dialect.is_call(target, *dialect.MERGES):
            merged = [_attached(member, axes) for member in target.args]
            members, hosts = tuple(a for a, _ in merged), tuple(host for _, host in merged)
            entries.append(Entry(members, variables, kinds[n], merge=dialect.name_of(target), hosts=hosts))
        else:
            axis, attached_to = _attached(target, axes)
            entries.append(Entry((axis,), variables, kinds[n], attached_to))
        n += 1
    return tuple(entries)


def _attached(target: ir.Expr, axes: dict[Var, Axis]) -> tuple[Axis, Axis | None]:
    """Return an axis of a list, and the axis that it is attached to."""
    if dialect.is_call(target, "attach"):
        return axes[target.args[0]], axes[target.args[1]]
    return axes[target], None


def merge_domain(members: Sequence[Axis]) -> Axis:
    """Return the first of the members with the widest index type: the variable counts as it does."""
    return next((a for a in members if a.idtype == "int64"), members[0])


def label(entry: Entry) -> str:
    """Return the text of an entry in the script's list."""
    hosts = entry.hosts or (entry.attached_to,) * len(entry.axes)
    pairs = zip(entry.axes, hosts, strict=True)
    names = ", ".join(a.name if host is None else f"T.attach({a.name}, {host.name})" for a, host in pairs)
    wrapped = "fuse" if entry.is_fused else entry.merge
    return f"T.{wrapped}({names})" if wrapped else names


def is_sp_iter(realize: s_tir.SBlockRealize) -> bool:
    """Return whether the block is a sparse iteration that has not been lowered."""
    return SPARSE_ITER in realize.block.annotations


def decode(func: tirx.PrimFunc) -> Program:
    """Read the axes, sparse buffers and sparse iterations of a stage-I function.

    Examples
    --------
    >>> import sparsetir
    >>> program = sparsetir.ir.decode(sparsetir.ops.spmm())
    >>> [axis.name for axis in program.axes.values()]
    ['I', 'J', 'J_dense', 'K']
    """
    if not isinstance(func, tirx.PrimFunc):
        fault = f"func: expected a PrimFunc, got {type(func).__name__}."
        raise ArgumentTypeError(f"{fault} Pass a program, as of sparsetir.parse.")
    decoded = _decoded(func)
    return Program(func, dict(decoded.axes), dict(decoded.buffers), list(decoded.iterations))


@lru_cache(maxsize=64)
def _decoded(func: tirx.PrimFunc) -> Program:
    """Decode a function once: a build asks for the same one in several places."""
    program = Program(func)
    storage: dict[Var, Var] = {}
    params = set(func.params)

    def on_bind(node: tirx.Bind) -> None:
        if dialect.is_call(node.value, *dialect.AXIS_NAMES):
            program.axes[node.var] = decode_axis(node.var, node.value, program.axes)

    def on_decl(node: tirx.DeclBuffer) -> None:
        if isinstance(node.data, Call) and node.data.args and tirx.is_buffer_var(node.data.args[0]):
            storage[node.buffer] = node.data.args[0]

    def on_evaluate(node: tirx.Evaluate) -> None:
        if dialect.is_call(node.value, "bind_axes"):
            view, default, *axes = node.value.args
            array = storage.get(view, view)
            tree = tuple(program.axes[a] for a in axes)
            program.buffers[view] = SparseBuffer(view, array, tree, default, array not in params)

    def on_realize(node: s_tir.SBlockRealize) -> None:
        if is_sp_iter(node):
            entries = decode_entries(node.block, list(node.iter_values), program.axes)
            program.iterations.append(SpIter(str(node.block.name_hint), entries, node.block, node))

    callbacks = [
        (tirx.Bind, on_bind),
        (tirx.DeclBuffer, on_decl),
        (tirx.Evaluate, on_evaluate),
        (s_tir.SBlockRealize, on_realize),
    ]
    structural_walk(func, callbacks)
    return program


def accesses(node: Any) -> Iterator[tuple[Var, list[ir.Expr], bool]]:
    """Yield every buffer access below `node` as (buffer, subscripts, is_store)."""
    buffer_accesses: list[tuple[Var, list[ir.Expr], bool]] = []
    callbacks = [
        (tirx.BufferStore, lambda s: buffer_accesses.append((s.buffer, list(s.indices), True))),
        (ir.TensorLoad, lambda x: buffer_accesses.append((x.source, list(x.indices), False))),
    ]
    structural_walk(node, callbacks)
    yield from buffer_accesses


SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def _target(entry: Entry) -> ir.Expr:
    hosts = entry.hosts or (entry.attached_to,) * len(entry.axes)
    axes = [_below(axis, host) for axis, host in zip(entry.axes, hosts, strict=True)]
    if entry.is_fused:
        return dialect.call("fuse", axes, entry.axes[-1].idtype)
    return dialect.call(entry.merge, axes, entry.domains[0].idtype) if entry.merge else axes[0]


def _below(axis: Axis, host: Axis | None) -> ir.Expr:
    return axis.var if host is None else dialect.call("attach", [axis.var, host.var], axis.idtype)


def make_iteration(
    name: str,
    entries: Sequence[Entry],
    body: tirx.Stmt,
    *,
    init: tirx.Stmt | None = None,
    notes: dict[str, Any] | None = None,
    allocated: Sequence[Var] = (),
) -> s_tir.SBlockRealize:
    """Return the node of a sparse iteration, as the parser makes it."""
    kinds = "".join(e.kinds for e in entries)
    iter_vars, values = [], []
    for entry in entries:
        target = _target(entry)
        for n, (axis, var, kind) in enumerate(zip(entry.domains, entry.vars, entry.kinds, strict=True)):
            domain = ir.Range(const(0, str(axis.length.ty.dtype)), axis.length)
            iter_vars.append(tirx.IterVar(domain, var, REDUCE if kind == "R" else SPATIAL))
            values.append(dialect.call("coord", [target, n], axis.idtype))
    annotations = {SPARSE_ITER: kinds, **(notes or {})}
    block = s_tir.SBlock(iter_vars, [], [], name, body, init, list(allocated), annotations=annotations)
    return s_tir.SBlockRealize(values, tirx.const(True, "bool"), block)


def declare_buffer(view: Var, storage: Var, default: ir.Expr, axes: Sequence[Axis]) -> list[tirx.Stmt]:
    """Return the statements that give `storage` its axes."""
    bound = dialect.call("bind_axes", [view, default, *(a.var for a in axes)])
    return [tirx.DeclBuffer(view, data=tirx.buffer_data(storage)), tirx.Evaluate(bound)]


def names_in(func: tirx.PrimFunc) -> set[str]:
    """Return the names of all variables and blocks of a function."""
    names: set[str] = set()
    on_block = lambda b: names.add(str(b.name_hint))  # noqa: E731
    structural_walk(func, [(Var, lambda v: names.add(str(v.name))), (s_tir.SBlock, on_block)])
    return names


def fresh_name(base: str, names: set[str]) -> str:
    """Return a name that is not among others, and add it to them."""
    name, k = base, 0
    while name in names:
        k += 1
        name = f"{base}_{k}"
    names.add(name)
    return name


__all__ = ["REDUCE", "SPATIAL", "fresh_name", "make_iteration", "names_in"]
