# SPDX-License-Identifier: Apache-2.0
"""Planning: from the letters of an expression and the kinds of its operands to contraction steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sparsetir.einsum.elementwise import FlatStep, MaskedStep, pays, roles
from sparsetir.einsum.emit import Nest, Operand, walked
from sparsetir.einsum.operands import Kind, Layout, Level, rows
from sparsetir.einsum.order import Contraction, Statistics, Value, contractions, is_assembled
from sparsetir.einsum.steps import DenseStep, KernelStep, Step
from sparsetir.einsum.subscripts import Semiring, Terms
from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.interop import HALVES

RESULTS = ("auto", "dense", "sparse")


@dataclass(frozen=True)
class Target:
    """Storage of the result.

    Parameters
    ----------
    pattern : int, optional
        The operand whose pattern it has.
    letters : str
        The letters in the order in which the last step computes them.
    assembled : bool
        Whether its pattern is computed.
    """

    pattern: int | None
    letters: str
    assembled: bool = False

    @property
    def is_sparse(self) -> bool:
        return self.assembled or self.pattern is not None


@dataclass(frozen=True)
class Task:
    """One expression with known dtypes and layouts.

    Parameters
    ----------
    terms : Terms
    kinds : tuple of Kind
        Of the operands, in one dtype.
    ring : Semiring
    result : {"auto", "dense", "sparse"}
    """

    terms: Terms
    kinds: tuple[Kind, ...]
    ring: Semiring
    result: str = "auto"

    @property
    def dtype(self) -> str:
        return self.kinds[0].dtype

    @property
    def idtype(self) -> str:
        wide = any(k.layout is not None and k.layout.idtype == "int64" for k in self.kinds)
        return "int64" if wide else "int32"

    @property
    def drives(self) -> bool:
        return self.ring.skips(self.dtype, len(self.kinds))


def agreed(kind: Kind, dtype: str, ring: Semiring) -> Kind:
    """Return a kind in the dtype of the expression; layouts that store padding zeros need a fill of zero."""
    layout = kind.layout
    if layout is not None and layout.fills and ring.fill != 0:
        layout = Layout(rows(kind.order), layout.idtype)
    return replace(kind, dtype=dtype, layout=layout)


# ------------------------------------------------------------------ letters


def broadcast(terms: Terms, kinds: Sequence[Kind]) -> Terms:
    """Give each dimension of extent 1 that broadcasts its own letter."""
    wide = {c for t, k in zip(terms.inputs, kinds, strict=True) for c, one in zip(t, k.ones, strict=True) if not one}
    inputs, spare = [], (chr(c) for c in range(0xE0, 0x2000) if chr(c).isalpha() and chr(c).islower())
    plain = (c for c in "uvwzyxqpsroabcdefghlmnijkt" if c not in terms.letters)
    for term, kind in zip(terms.inputs, kinds, strict=True):
        moved = {c for c, one in zip(term, kind.ones, strict=True) if one and c in wide}
        if any(term.count(c) > 1 for c in moved):
            raise ArgumentError(f"the dimensions of {term!r} with one letter must have one extent")
        names = {c: next(plain, None) or next(spare) for c in moved}
        inputs.append("".join(names.get(c, c) for c in term))
    return Terms(tuple(inputs), terms.output)


def diagonals(terms: Terms, kinds: Sequence[Kind]) -> tuple[Terms, list[str | None]]:
    """Remove repeated letters of dense operands; return the terms and the einsum texts of numpy's diagonal views."""
    once = ["".join(dict.fromkeys(t)) if k.layout is None else t for t, k in zip(terms.inputs, kinds, strict=True)]
    views = [None if a == b else f"{a}->{b}" for a, b in zip(terms.inputs, once, strict=True)]
    return Terms(tuple(once), terms.output), views


def extents(terms: Terms, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the extent of each letter.

    Raises
    ------
    ArgumentError
        When operands disagree.
    """
    by_letter: dict[str, tuple[int, int]] = {}
    for at, (term, shape) in enumerate(zip(terms.inputs, shapes, strict=True)):
        for d, (c, n) in enumerate(zip(term, shape, strict=True)):
            earlier = by_letter.setdefault(c, (int(n), at))
            if earlier[0] != n:
                message = (
                    f"dimension {d} of operand {at} has extent {n}, expected {earlier[0]} as in operand {earlier[1]}"
                )
                raise ArgumentError(f"{message}: both are {c!r} in {str(terms)!r}")
    return {c: n for c, (n, _) in by_letter.items()}


# ------------------------------------------------------------------ the result


def target(task: Task) -> Target:
    """Decide the storage of the result.

    Raises
    ------
    ArgumentError
        A sparse result was asked for, or would be the default, and is not possible.
    """
    output = task.terms.output
    if task.result == "dense" or (task.result == "auto" and not _is_sparse(task)):
        return Target(None, output)
    if len(task.kinds) > 1 and _merges(task):
        return Target(None, output, assembled=True)
    at = _pattern(task)
    if at is not None:
        term = task.terms.inputs[at]
        return Target(at, "".join(c for c in term if c in output))
    text = str(task.terms)
    if not any(kind.layout is not None for kind in task.kinds):
        raise ArgumentError(f"no operand of {text!r} is sparse, and so is no result: leave result='sparse' out")
    if output and task.drives:
        return Target(None, output, assembled=True)
    reason = "what its operands do not store changes it" if output else "it has no letters"
    raise LoweringError(f"the result of {text!r} is not sparse: {reason}; pass result='dense'")


def _is_sparse(task: Task) -> bool:
    """Return whether a sparse result is the default: elements that operands do not store leave most of it empty."""
    sparse = [set(t) for t, k in zip(task.terms.inputs, task.kinds, strict=True) if k.layout is not None]
    output = set(task.terms.output)
    if not sparse or not output:
        return False
    if _merges(task):
        return True
    if _pattern(task) is not None and any(letters == output for letters in sparse):
        return True
    return len(output) > 1 and output <= set().union(*sparse) and task.drives


def _merges(task: Task) -> bool:
    """Return whether the result is stored where all sparse operands are, or, of sums, where one is."""
    terms = [t for t, k in zip(task.terms.inputs, task.kinds, strict=True) if k.layout is not None]
    if len(terms) < 2 or task.terms.summed or not _is_elementwise(terms, task.terms.output):
        return False
    if task.drives:
        return True
    joins = task.ring.combine in ("max", "min") or (task.ring.combine == "add" and task.ring.fill == 0)
    return joins and len(terms) == len(task.kinds)


def _is_flat(members: Sequence[Operand], output: str) -> bool:
    """Return whether all operands are sparse and have the letters of the result."""
    return all(o.layout is not None for o in members) and _is_elementwise([o.letters for o in members], output)


def _is_elementwise(terms: Sequence[str], output: str) -> bool:
    return all(set(t) == set(output) and len(t) == len(output) for t in terms)


def _assembled(task: Task, members: Sequence[Operand], output: str) -> Nest:
    """Return the contraction that computes its result's pattern: of matrices by rows, else by a walk of all trees."""
    terms = [o.letters for o in members if o.layout is not None]
    if len(output) == 2 and all(len(t) == 2 == len(set(t)) for t in terms):
        turned = tuple(_turned(operand, output, unique=not task.ring.adds_entries) for operand in members)
        nest = Nest(turned, output, None, task.ring, task.dtype, task.idtype, assembled=True)
        owned = all(loop.owner is not None or loop.assembled or loop.letter == output[0] for loop in nest.loops)
        if not task.drives or (owned and any(output[-1] in t for t in terms)):
            return nest
    return walked(members, output, task.ring, task.dtype, task.idtype)


def _turned(operand: Operand, output: str, *, unique: bool) -> Operand:
    """Return a sparse matrix by rows of the letter that comes first: the result's own first, its second last.

    Duplicate entries are added up before if `unique`.
    """
    if operand.layout is None:
        return operand
    if set(operand.letters) == set(output):
        layout = Layout(rows(2), operand.layout.idtype, transposed=operand.letters != output)
        return Operand(output, layout)
    rank = {output[0]: -1, output[1]: 1}
    first, second = sorted(operand.letters, key=lambda c: rank.get(c, 0))
    dims = (operand.letters.index(first), operand.letters.index(second))
    level = Level(dims[1], "compressed", sorted=unique, unique=unique)
    return Operand(operand.letters, Layout((Level(dims[0], "dense"), level), operand.layout.idtype))


def _keeps(task: Task) -> bool:
    """Return whether elements that a sparse operand does not store are `fill` in the result, too."""
    alone = len(task.kinds) == 1 and not task.terms.summed
    absorbed = len(task.kinds) == 1 or task.ring.absorbs(task.dtype)
    constant = task.ring.reduce in ("max", "min") or not task.terms.summed or task.ring.fill == 0
    return alone or (absorbed and constant)


def _pattern(task: Task) -> int | None:
    """Return the operand whose pattern, or that of whose first levels, the result has."""
    output, candidates = set(task.terms.output), []
    for at, (term, kind) in enumerate(zip(task.terms.inputs, task.kinds, strict=True)):
        if kind.layout is None or len(set(term)) < len(term):
            continue
        if set(term) == output and _keeps(task):
            candidates.append((0, at))
        elif task.drives and _first(term, kind, len(output)) == output and len(output) > 1:
            candidates.append((1, at))
    return min(candidates)[1] if candidates else None


def _first(term: str, kind: Kind, count: int) -> set[str]:
    """Return the letters of the first levels."""
    assert kind.layout is not None
    return {term[d] for d in kind.layout.order[:count]}


# ------------------------------------------------------------------ steps


def plan(
    task: Task,
    sizes: Mapping[str, int],
    stored: Sequence[float | None],
    known: Mapping[tuple[int, int], Statistics] | None = None,
) -> tuple[list[Step], Target]:
    """Return the steps of an expression, and the storage of its result.

    Parameters
    ----------
    task : Task
        Its terms after `broadcast`.
    sizes : mapping of str to int
        The extent of each letter.
    stored : sequence of float or None
        The number of entries of each sparse operand.
    known : mapping, optional
        Statistics of pairs of them.
    """
    goal = target(task)
    task = _with_trees(task, goal)
    is_prefix = goal.pattern is not None and len(task.terms.inputs[goal.pattern]) > len(goal.letters)
    masked = _masked(task, goal, sizes, stored)
    if masked is not None:
        return [masked], goal
    is_one = len(task.kinds) < 3 or not task.ring.is_usual or is_prefix
    if is_one or (goal.assembled and _merges(task)):
        order = [Contraction(tuple(range(len(task.kinds))), goal.letters, 0.0)]
    else:
        order = _order(task, goal, sizes, stored, known)
    return _steps(task, order, goal), goal


def _masked(task: Task, goal: Target, sizes: Mapping[str, int], stored: Sequence[float | None]) -> MaskedStep | None:
    """Return the expression as a product under a mask, if it is one of scipy's matrices and searches would take
    longer.
    """
    terms = task.terms.inputs
    is_plain = task.ring.is_usual and all(k.family == "scipy" and k.layout is not None for k in task.kinds)
    is_plain = is_plain and task.dtype not in ("bool", *HALVES)
    masked_roles = roles(terms, goal.pattern) if is_plain and not goal.assembled else None
    if masked_roles is None or (goal.letters and goal.pattern is None):
        return None
    layout = task.kinds[masked_roles.mask].layout
    is_kept = layout is not None and layout.order == (0, 1) and not (layout.held or layout.transposed)
    shapes = [(sizes[term[0]], sizes[term[1]]) for term in terms]
    if (goal.letters and not is_kept) or not pays(masked_roles, stored, shapes):
        return None
    nest = Nest(tuple(_operands(task)), goal.letters, goal.pattern, task.ring, task.dtype, task.idtype)
    return MaskedStep(KernelStep((0, 1, 2), nest), masked_roles)


def _with_trees(task: Task, goal: Target) -> Task:
    """Return the task with the pattern's operand as a tree, if the result has the pattern of its first levels."""
    at = goal.pattern
    if at is None or len(task.terms.inputs[at]) == len(goal.letters):
        return task
    layout = task.kinds[at].layout
    if layout is None or layout.held:
        return task
    kinds = list(task.kinds)
    kinds[at] = replace(kinds[at], layout=replace(layout, held=True))
    return replace(task, kinds=tuple(kinds))


def _operands(task: Task) -> list[Operand]:
    return [Operand(term, kind.layout) for term, kind in zip(task.terms.inputs, task.kinds, strict=True)]


def _order(
    task: Task,
    goal: Target,
    sizes: Mapping[str, int],
    stored: Sequence[float | None],
    known: Mapping[tuple[int, int], Statistics] | None,
) -> list[Contraction]:
    values = []
    for number, (operand, count) in enumerate(zip(_operands(task), stored, strict=True)):
        once = "".join(dict.fromkeys(operand.letters))
        is_plain = operand.layout is None or (len(once) < len(operand.letters) and not goal.assembled)
        parts = frozenset() if is_plain else frozenset({number})
        values.append(Value(once, None if is_plain else count or 0.0, operand.path, parts))
    return contractions(
        values, goal.letters, sizes, needs_pattern=goal.is_sparse, assembles=goal.assembled, known=known
    )


def _steps(task: Task, order: Sequence[Contraction], goal: Target) -> list[Step]:
    values, steps = _operands(task), []
    for step in order:
        members = [values[n] for n in step.members]
        at = next((n for n, o in enumerate(members) if _carries(o, step.output)), None)
        is_last = step is order[-1]
        if is_last:
            at = goal.pattern if len(order) == 1 or goal.pattern is None else at
        letters = step.output if at is None else members[at].letters
        letters = goal.letters if is_last else letters
        assembled = goal.assembled and at is None and _is_made(members, letters, is_last=is_last)
        steps.append(_step(task, members, replace(step, output=letters), at, assembled=assembled))
        values.append(Operand(letters, _made_layout(members, at, letters, assembled=assembled)))
    return steps


def _is_made(members: Sequence[Operand], letters: str, *, is_last: bool) -> bool:
    values = [Value(o.letters, None if o.layout is None else 0.0) for o in members]
    return is_assembled(values, letters, is_last=is_last)


def _made_layout(members: Sequence[Operand], at: int | None, letters: str, *, assembled: bool) -> Layout | None:
    """Return the layout in which a step stores its result."""
    if at is not None:
        return members[at].layout
    if not assembled:
        return None
    first = next(o.layout for o in members if o.layout is not None)
    by_columns = len(letters) == 2 and not first.held and first.order == (1, 0)
    return Layout((Level(1, "dense"), Level(0, "compressed")) if by_columns else rows(len(letters)), first.idtype)


def _carries(operand: Operand, output: str) -> bool:
    distinct = len(set(operand.letters)) == len(operand.letters)
    return operand.layout is not None and distinct and set(operand.letters) == set(output)


def _step(
    task: Task, members: Sequence[Operand], step: Contraction, pattern: int | None, *, assembled: bool = False
) -> Step:
    letters = [operand.letters for operand in members]
    if assembled and len(step.output) != 2 and _is_flat(members, step.output):
        nest = Nest(tuple(members), step.output, None, task.ring, task.dtype, task.idtype)
        return FlatStep(step.members, letters, step.output, nest)
    if assembled:
        return KernelStep(step.members, _assembled(task, members, step.output))
    if all(operand.layout is None for operand in members) and task.ring.is_usual:
        return DenseStep(step.members, letters, step.output)
    nest = Nest(tuple(members), step.output, pattern, task.ring, task.dtype, task.idtype)
    return KernelStep(step.members, nest)


__all__ = ["RESULTS", "Target", "Task", "agreed", "broadcast", "diagonals", "extents", "plan", "target"]
