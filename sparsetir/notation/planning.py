# SPDX-License-Identifier: Apache-2.0
"""From the letters of an expression and the kinds of its operands to steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.notation.nest import Nest, Operand
from sparsetir.notation.operands import Kind, Layout, Level, rows
from sparsetir.notation.orders import Contraction, Value, contractions, is_assembled
from sparsetir.notation.semiring import Semiring
from sparsetir.notation.steps import DenseStep, KernelStep, Step
from sparsetir.notation.subscripts import Terms

RESULTS = ("auto", "dense", "sparse")


@dataclass(frozen=True)
class Target:
    """What the result is stored as.

    Parameters
    ----------
    pattern : int, optional
        The operand whose pattern it has.
    letters : str
        The letters in the order in which the last step makes them.
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
    """One expression, dtypes and layouts known.

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


def common_dtype(dtypes: Sequence[str]) -> str:
    """The dtype of a result, by numpy's rules."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    known = [np.dtype("float32" if name == "bfloat16" else name) for name in dtypes]
    return str(np.result_type(*known).name)


def agreed(kind: Kind, dtype: str, ring: Semiring) -> Kind:
    """A kind in the dtype of the expression; zeros that its format stores must be what is not stored anyway."""
    layout = kind.layout
    if layout is not None and layout.fills and ring.fill != 0:
        layout = Layout(rows(kind.order), layout.idtype)
    return replace(kind, dtype=dtype, layout=layout)


# ------------------------------------------------------------------ letters


def broadcast(terms: Terms, kinds: Sequence[Kind]) -> Terms:
    """The terms with a letter of its own for each dimension of extent 1 that meets others."""
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
    """The terms with each letter once in a dense operand, and how numpy makes these views of the operands."""
    once = ["".join(dict.fromkeys(t)) if k.layout is None else t for t, k in zip(terms.inputs, kinds, strict=True)]
    views = [None if a == b else f"{a}->{b}" for a, b in zip(terms.inputs, once, strict=True)]
    return Terms(tuple(once), terms.output), views


def extents(terms: Terms, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The extent of each letter.

    Raises
    ------
    ArgumentError
        When operands disagree.
    """
    found: dict[str, tuple[int, int]] = {}
    for at, (term, shape) in enumerate(zip(terms.inputs, shapes, strict=True)):
        for d, (c, n) in enumerate(zip(term, shape, strict=True)):
            known = found.setdefault(c, (int(n), at))
            if known[0] != n:
                message = f"dimension {d} of operand {at} has extent {n}, expected {known[0]} as in operand {known[1]}"
                raise ArgumentError(f"{message}: both are {c!r} in {str(terms)!r}")
    return {c: n for c, (n, _) in found.items()}


# ------------------------------------------------------------------ the result


def target(task: Task) -> Target:
    """What the result is stored as.

    Raises
    ------
    ArgumentError
        A sparse result was asked for, or would be usual, and there is none.
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
    if _multiplies(task):
        return Target(None, output, assembled=True)
    text = str(task.terms)
    if not any(kind.layout is not None for kind in task.kinds):
        raise ArgumentError(f"no operand of {text!r} is sparse, and so is no result: leave result='sparse' out")
    raise LoweringError(
        f"the result of {text!r} has a pattern that none of its operands has, and patterns are computed of matrices "
        "alone: pass result='dense' for a dense array"
    )


def _is_sparse(task: Task) -> bool:
    """Whether a sparse result is what the operands suggest: what they do not store makes most of it empty."""
    sparse = [set(t) for t, k in zip(task.terms.inputs, task.kinds, strict=True) if k.layout is not None]
    output = set(task.terms.output)
    if not sparse or not output:
        return False
    if _merges(task):
        return True
    if _pattern(task) is not None and any(letters == output for letters in sparse):
        return True
    return len(output) > 1 and output <= set().union(*sparse) and task.drives


def _matrices(task: Task) -> list[str] | None:
    """The letters of the sparse operands, where all are matrices and the result is one."""
    sparse = [t for t, k in zip(task.terms.inputs, task.kinds, strict=True) if k.layout is not None]
    is_matrix = all(len(t) == 2 == len(set(t)) for t in [*sparse, task.terms.output])
    return sparse if is_matrix and len(sparse) > 1 else None


def _merges(task: Task) -> bool:
    """Whether the result is stored where all sparse matrices are, or, of sums, where one is."""
    sparse = _matrices(task)
    if sparse is None or task.terms.summed or any(set(t) != set(task.terms.output) for t in sparse):
        return False
    if task.drives:
        return True
    joins = task.ring.combine in ("max", "min") or (task.ring.combine == "add" and task.ring.fill == 0)
    return joins and len(sparse) == len(task.kinds)


def _multiplies(task: Task) -> bool:
    """Whether the result is a chain of products of sparse matrices, which dense vectors and matrices may scale."""
    sparse = _matrices(task)
    if sparse is None or not task.drives:
        return False
    if len(task.kinds) > 2 and task.ring.is_usual and len(sparse) == len(task.kinds):
        return set(task.terms.output) <= set("".join(sparse))
    nest = _assembled(task, _operands(task), task.terms.output)
    first, last = task.terms.output[0], task.terms.output[1]
    owned = all(loop.owner is not None or loop.assembled or loop.letter == first for loop in nest.loops)
    return owned and any(last in t for t in sparse)


def _assembled(task: Task, members: Sequence[Operand], output: str) -> Nest:
    """The contraction of sparse matrices that computes the pattern of its result."""
    turned = [_turned(operand, output) for operand in members]
    return Nest(tuple(turned), output, None, task.ring, task.dtype, task.idtype, assembled=True)


def _turned(operand: Operand, output: str) -> Operand:
    """A sparse matrix by rows of the letter that comes first: the result's own first, its second last."""
    if operand.layout is None:
        return operand
    if set(operand.letters) == set(output):
        layout = Layout(rows(2), operand.layout.idtype, transposed=operand.letters != output)
        return Operand(output, layout)
    rank = {output[0]: -1, output[1]: 1}
    first, second = sorted(operand.letters, key=lambda c: rank.get(c, 0))
    dims = (operand.letters.index(first), operand.letters.index(second))
    level = Level(dims[1], "compressed", sorted=False, unique=False)
    return Operand(operand.letters, Layout((Level(dims[0], "dense"), level), operand.layout.idtype))


def _keeps(task: Task) -> bool:
    """Whether elements that a sparse operand does not store are `fill` in the result, too."""
    alone = len(task.kinds) == 1 and not task.terms.summed
    absorbed = len(task.kinds) == 1 or task.ring.absorbs(task.dtype)
    constant = task.ring.reduce in ("max", "min") or not task.terms.summed or task.ring.fill == 0
    return alone or (absorbed and constant)


def _pattern(task: Task) -> int | None:
    """The operand whose pattern the result has, or the pattern of whose first levels."""
    output, found = set(task.terms.output), []
    for at, (term, kind) in enumerate(zip(task.terms.inputs, task.kinds, strict=True)):
        if kind.layout is None or len(set(term)) < len(term):
            continue
        if set(term) == output and _keeps(task):
            found.append((0, at))
        elif task.drives and _first(term, kind, len(output)) == output and len(output) > 1:
            found.append((1, at))
    return min(found)[1] if found else None


def _first(term: str, kind: Kind, count: int) -> set[str]:
    """The letters of the first levels."""
    assert kind.layout is not None
    return {term[d] for d in kind.layout.order[:count]}


# ------------------------------------------------------------------ steps


def plan(task: Task, sizes: Mapping[str, int], stored: Sequence[float | None]) -> tuple[list[Step], Target]:
    """The steps of an expression, and what its result is.

    Parameters
    ----------
    task : Task
        Its terms after `broadcast`.
    sizes : mapping of str to int
        The extent of each letter.
    stored : sequence of float or None
        How many entries each sparse operand stores.
    """
    goal = target(task)
    task = _with_trees(task, goal)
    is_prefix = goal.pattern is not None and len(task.terms.inputs[goal.pattern]) > len(goal.letters)
    if len(task.kinds) < 3 or not task.ring.is_usual or is_prefix:
        order = [Contraction(tuple(range(len(task.kinds))), goal.letters, 0.0)]
    elif goal.assembled and not _is_chain(task):
        order = [Contraction(tuple(range(len(task.kinds))), goal.letters, 0.0)]
    else:
        order = _order(task, goal, sizes, stored)
    return _steps(task, order, goal), goal


def _is_chain(task: Task) -> bool:
    """Whether every operand is a sparse matrix, so that pairs of them are multiplied."""
    return all(kind.layout is not None for kind in task.kinds) and not _merges(task)


def _with_trees(task: Task, goal: Target) -> Task:
    """The task with the operand of the pattern as a tree, where the result has that of its first levels."""
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


def _order(task: Task, goal: Target, sizes: Mapping[str, int], stored: Sequence[float | None]) -> list[Contraction]:
    values = []
    for operand, count in zip(_operands(task), stored, strict=True):
        is_plain = operand.layout is None or len(set(operand.letters)) < len(operand.letters)
        values.append(Value(operand.letters, None if is_plain else count or 0.0, operand.path))
    return contractions(
        values, goal.letters, sizes, needs_pattern=goal.is_sparse, assembles=goal.assembled and _is_chain(task)
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
        assembled = goal.assembled and at is None and (is_last or _is_product(members, letters))
        steps.append(_step(task, members, replace(step, output=letters), at, assembled=assembled))
        values.append(Operand(letters, _made_layout(members, at, assembled=assembled)))
    return steps


def _is_product(members: Sequence[Operand], letters: str) -> bool:
    return is_assembled([Value(o.letters, None if o.layout is None else 0.0) for o in members], letters)


def _made_layout(members: Sequence[Operand], at: int | None, *, assembled: bool) -> Layout | None:
    """How a step stores its result."""
    if at is not None:
        return members[at].layout
    if not assembled:
        return None
    first = next(o.layout for o in members if o.layout is not None)
    by_columns = not first.held and first.order == (1, 0)
    return Layout((Level(1, "dense"), Level(0, "compressed")) if by_columns else rows(2), first.idtype)


def _carries(operand: Operand, output: str) -> bool:
    distinct = len(set(operand.letters)) == len(operand.letters)
    return operand.layout is not None and distinct and set(operand.letters) == set(output)


def _step(
    task: Task, members: Sequence[Operand], step: Contraction, pattern: int | None, *, assembled: bool = False
) -> Step:
    if assembled:
        return KernelStep(step.members, _assembled(task, members, step.output))
    letters = [operand.letters for operand in members]
    if all(operand.layout is None for operand in members) and task.ring.is_usual:
        return DenseStep(step.members, letters, step.output)
    nest = Nest(tuple(members), step.output, pattern, task.ring, task.dtype, task.idtype)
    return KernelStep(step.members, nest)


__all__ = ["RESULTS", "Target", "Task", "agreed", "broadcast", "common_dtype", "diagonals", "extents", "plan", "target"]
