# SPDX-License-Identifier: Apache-2.0
"""Planning: from the letters of an expression and the kinds of its operands to steps in the cheapest order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir.einsum.emit import ContractionNest, Operand, walked
from sparsetir.einsum.operands import Kind, Layout, StorageLevel, rows
from sparsetir.einsum.steps import DenseStep, EvaluationStep, FlatStep, KernelStep, MaskedStep, pays, roles
from sparsetir.einsum.subscripts import Semiring, Terms
from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.formats.canonical import compressed_rows
from sparsetir.interop import HALVES, is_half, transposed

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
class EinsumTask:
    """One expression with known dtypes and layouts.

    Parameters
    ----------
    terms : Terms
    kinds : tuple of Kind
        Of the operands, in one dtype.
    ring : Semiring
    result : {"auto", "dense", "sparse"}
    in_parts : bool
        Whether products of two float32 operands are computed by three products of bfloat16 numbers.
    """

    terms: Terms
    kinds: tuple[Kind, ...]
    ring: Semiring
    result: str = "auto"
    in_parts: bool = False

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


def target(task: EinsumTask) -> Target:
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


def _is_sparse(task: EinsumTask) -> bool:
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


def _merges(task: EinsumTask) -> bool:
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


def _assembled(task: EinsumTask, members: Sequence[Operand], output: str) -> ContractionNest:
    """Return the contraction that computes its result's pattern: of matrices by rows, else by a walk of all trees."""
    terms = [o.letters for o in members if o.layout is not None]
    if len(output) == 2 and all(len(t) == 2 == len(set(t)) for t in terms):
        turned = tuple(_turned(operand, output, unique=not task.ring.adds_entries) for operand in members)
        nest = ContractionNest(turned, output, None, task.ring, task.dtype, task.idtype, assembled=True)
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
    level = StorageLevel(dims[1], "compressed", sorted=unique, unique=unique)
    return Operand(operand.letters, Layout((StorageLevel(dims[0], "dense"), level), operand.layout.idtype))


def _keeps(task: EinsumTask) -> bool:
    """Return whether elements that a sparse operand does not store are `fill` in the result, too."""
    alone = len(task.kinds) == 1 and not task.terms.summed
    absorbed = len(task.kinds) == 1 or task.ring.absorbs(task.dtype)
    constant = task.ring.reduce in ("max", "min") or not task.terms.summed or task.ring.fill == 0
    return alone or (absorbed and constant)


def _pattern(task: EinsumTask) -> int | None:
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


MOST_MERGED = 3  # sparse operands that one kernel merges: its branches double with each


def plan(
    task: EinsumTask,
    sizes: Mapping[str, int],
    stored: Sequence[float | None],
    pair_statistics: Mapping[tuple[int, int], Statistics] | None = None,
) -> tuple[list[EvaluationStep], Target]:
    """Return the steps of an expression, and the storage of its result.

    Parameters
    ----------
    task : EinsumTask
        Its terms after `broadcast`.
    sizes : mapping of str to int
        The extent of each letter.
    stored : sequence of float or None
        The number of entries of each sparse operand.
    pair_statistics : mapping, optional
        Statistics of pairs of them.
    """
    goal = target(task)
    task = _with_trees(task, goal)
    is_prefix = goal.pattern is not None and len(task.terms.inputs[goal.pattern]) > len(goal.letters)
    masked = _masked(task, goal, sizes, stored)
    if masked is not None:
        return [masked], goal
    is_one = len(task.kinds) < 3 or not task.ring.is_usual or is_prefix
    count = len(task.kinds)
    is_merge = goal.assembled and _merges(task)
    if is_merge and count > MOST_MERGED and all(kind.layout is not None for kind in task.kinds):
        firsts = [0, *range(count, 2 * count - 2)]  # the result so far
        order = [Contraction((first, at), goal.letters, 0.0) for at, first in enumerate(firsts, 1)]
    elif is_one or is_merge:
        order = [Contraction(tuple(range(count)), goal.letters, 0.0)]
    else:
        order = _order(task, goal, sizes, stored, pair_statistics)
    return _steps(task, order, goal, is_merge=is_merge), goal


def _masked(
    task: EinsumTask, goal: Target, sizes: Mapping[str, int], stored: Sequence[float | None]
) -> MaskedStep | None:
    """Return the product of scipy's matrices under a mask that the expression is, if searches would take longer."""
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
    nest = ContractionNest(tuple(_operands(task)), goal.letters, goal.pattern, task.ring, task.dtype, task.idtype)
    return MaskedStep(KernelStep((0, 1, 2), nest), masked_roles)


def _with_trees(task: EinsumTask, goal: Target) -> EinsumTask:
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


def _operands(task: EinsumTask) -> list[Operand]:
    return [Operand(term, kind.layout) for term, kind in zip(task.terms.inputs, task.kinds, strict=True)]


def _order(
    task: EinsumTask,
    goal: Target,
    sizes: Mapping[str, int],
    stored: Sequence[float | None],
    pair_statistics: Mapping[tuple[int, int], Statistics] | None,
) -> list[Contraction]:
    values = []
    for number, (operand, count) in enumerate(zip(_operands(task), stored, strict=True)):
        once = "".join(dict.fromkeys(operand.letters))
        is_plain = operand.layout is None or (len(once) < len(operand.letters) and not goal.assembled)
        parts = frozenset() if is_plain else frozenset({number})
        values.append(Value(once, None if is_plain else count or 0.0, operand.path, parts))
    return contractions(
        values,
        goal.letters,
        sizes,
        needs_pattern=goal.is_sparse,
        assembles=goal.assembled,
        pair_statistics=pair_statistics,
    )


def _steps(task: EinsumTask, order: Sequence[Contraction], goal: Target, *, is_merge: bool) -> list[EvaluationStep]:
    """Return the steps of contractions in an order; no operand alone has the pattern of a merge."""
    values, steps = _operands(task), []
    for step in order:
        members = [values[n] for n in step.members]
        at = None if is_merge else next((n for n, o in enumerate(members) if _carries(o, step.output)), None)
        is_last = step is order[-1]
        if is_last:
            at = goal.pattern if len(order) == 1 or goal.pattern is None else at
        letters = step.output if at is None else members[at].letters
        letters = goal.letters if is_last else letters
        sparsity = [Value(o.letters, None if o.layout is None else 0.0) for o in members]
        assembled = goal.assembled and at is None and is_assembled(sparsity, letters, is_last=is_last)
        steps.append(_step(task, members, replace(step, output=letters), at, assembled=assembled))
        values.append(Operand(letters, _made_layout(members, at, letters, assembled=assembled)))
    return steps


def _made_layout(members: Sequence[Operand], at: int | None, letters: str, *, assembled: bool) -> Layout | None:
    """Return the layout in which a step stores its result."""
    if at is not None:
        return members[at].layout
    if not assembled:
        return None
    first = next(o.layout for o in members if o.layout is not None)
    by_columns = len(letters) == 2 and not first.held and first.order == (1, 0)
    return Layout(
        (StorageLevel(1, "dense"), StorageLevel(0, "compressed")) if by_columns else rows(len(letters)), first.idtype
    )


def _carries(operand: Operand, output: str) -> bool:
    distinct = len(set(operand.letters)) == len(operand.letters)
    return operand.layout is not None and distinct and set(operand.letters) == set(output)


def _step(
    task: EinsumTask, members: Sequence[Operand], step: Contraction, pattern: int | None, *, assembled: bool = False
) -> EvaluationStep:
    letters = [operand.letters for operand in members]
    if assembled and len(step.output) != 2 and _is_flat(members, step.output):
        nest = ContractionNest(tuple(members), step.output, None, task.ring, task.dtype, task.idtype)
        return FlatStep(step.members, letters, step.output, nest)
    if assembled:
        return KernelStep(step.members, _assembled(task, members, step.output))
    if all(operand.layout is None for operand in members) and task.ring.is_usual:
        return DenseStep(step.members, letters, step.output)
    nest = ContractionNest(tuple(members), step.output, pattern, task.ring, task.dtype, task.idtype)
    if task.in_parts and task.ring.is_usual:
        summed = [operand for operand in members if not set(operand.letters) <= set(step.output)]
        dense = [operand for operand in members if operand.layout is None]
        is_product = len(members) == 2 and len(dense) == 1 and bool(summed)
        is_sampled = len(summed) == 2 and all(operand.layout is None for operand in summed)
        nest = replace(nest, in_parts=is_product if pattern is None else is_sampled)
    return KernelStep(step.members, nest)


# ------------------------------------------------------------------------------- order of contractions


# Statistics of pairs of sparse operands with a common letter: the number of products, and of entries they fall on.
#
# Entries are rarely spread evenly: hubs have more products, blocks and bands fewer entries. Products are counted
# exactly, entries in a sample of rows.


LARGE = 1_000_000  # expected products above which they are counted
SAMPLED = 32  # rows
MOST = 50_000  # their products
STEPS = 2  # in which a number doubles: operands whose numbers round to the same step share an expression

Join = tuple[int, int]


class Statistics(NamedTuple):
    """Statistics of two operands: the products of their entries, and the products per entry of the result."""

    products: float
    collisions: float


def stored_about(bits: int) -> float:
    """Return a typical number of entries of so many bits."""
    return 0.75 * 2.0**bits if bits > 0 else 0.0


def joins(terms: Sequence[str], values: Sequence[Any]) -> dict[Join, tuple[int, int]]:
    """Compute products and collisions, as rounded logarithms, of pairs of sparse operands that share one letter.

    Parameters
    ----------
    terms : sequence of str
        The letters of each operand.
    values : sequence of array or sparse object
        All of them scipy's matrices; others are not counted but assumed to be spread evenly.

    Examples
    --------
    >>> A = sp.csr_array(np.ones((100, 100)))
    >>> statistics(joins(["ij", "jk"], [A, A]))[0, 1]
    Statistics(products=1048576.0, collisions=90.50966799187809)
    """
    if not all(_is_counted(*pair) for pair in zip(terms, values, strict=True)):
        return {}
    pairs = [pair for pair in combinations(range(len(values)), 2) if len(_shared(terms, pair)) == 1]
    if all(_even(terms, values, pair) < LARGE for pair in pairs):
        return {}
    return {pair: _counted(*_factors(terms, values, pair)) for pair in pairs}


def statistics(rounded: Mapping[Join, tuple[int, int]]) -> dict[Join, Statistics]:
    """Convert the rounded logarithms of `joins` to statistics."""
    return {pair: Statistics(*(2.0 ** (n / STEPS) for n in numbers)) for pair, numbers in rounded.items()}


def _is_counted(term: str, value: Any) -> bool:
    return sp.issparse(value) and value.ndim == 2 and len(set(term)) == 2 and not is_half(value)


def _shared(terms: Sequence[str], pair: Join) -> str:
    return "".join(set(terms[pair[0]]) & set(terms[pair[1]]))


def _even(terms: Sequence[str], values: Sequence[Any], pair: Join) -> float:
    """Return the products of operands whose entries are spread evenly."""
    first, second = (values[n] for n in pair)
    return float(first.nnz) * second.nnz / max(first.shape[terms[pair[0]].index(_shared(terms, pair))], 1)


def _factors(terms: Sequence[str], values: Sequence[Any], pair: Join) -> tuple[Any, Any]:
    """Return the operands in rows, such that their product sums over the letter that they share."""
    (a, b), letter = pair, _shared(terms, pair)
    first = values[a] if terms[a].index(letter) else transposed(values[a], (1, 0))
    second = transposed(values[b], (1, 0)) if terms[b].index(letter) else values[b]
    return compressed_rows(first), compressed_rows(second)


def _counted(first: Any, second: Any) -> tuple[int, int]:
    """Compute the statistics of ``first @ second``."""
    count = np.diff(second.indptr)
    products = float(count[first.indices].sum(dtype=np.float64))
    if not products:
        return 0, 0
    rows = np.unique(np.linspace(0, first.shape[0] - 1, SAMPLED).astype(np.int64))
    part = _ones(first[rows])
    cumulated = np.cumsum(part @ count)
    part = part[: max(1, int(np.searchsorted(cumulated, MOST)))]
    joined = float((part @ count).sum())
    collisions = joined / (part @ _ones(second)).nnz if joined else 1.0
    return round(STEPS * np.log2(products)), round(STEPS * np.log2(collisions))


def _ones(rows: Any) -> Any:
    """Return the pattern with ones, which do not cancel."""
    return sp.csr_array((np.ones(len(rows.indices), np.float32), rows.indices, rows.indptr), shape=rows.shape)


# Order of the contractions of an expression, by expected cost.
#
# Up to six operands every grouping is evaluated, with more than two operands at a time included: one loop nest over a
# sparse operand often beats pairs. Above that the cheapest pair is merged first until six are left.


EXHAUSTIVE = 6  # operands of which every grouping is evaluated
# Times relative to that of a product in a vector loop below stored entries.
DENSE_PRODUCT = 1 / 16  # two dense operands go to BLAS
NESTED = 1 / 4  # two or more vector loops below an entry reuse loaded data
SCALAR = 6  # of a product where all loops run over stored entries
ENTERED = 16  # of one that is entered into a computed pattern
STARTED = 16  # of the beginning and end of a loop over a row of a sparse operand
STEP = 20_000  # products in the time that one more call takes
LARGEST = 2.0**34  # elements of an intermediate result
CACHED = 1 << 20  # elements of a result that is read again before it leaves the cache
SPILLED = 8  # of each element more: fresh memory is written, and read again in another order


@dataclass(frozen=True)
class Value:
    """Operand or intermediate result, with the properties that costs depend on.

    Parameters
    ----------
    letters : str
    stored : float, optional
        Entries that it stores; None for a dense one.
    path : str
        Letters of a sparse one in the order in which they are stored.
    parts : frozenset of int
        Numbers of the sparse operands from which it is computed.
    """

    letters: str
    stored: float | None = None
    path: str = ""
    parts: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Contraction:
    """One step.

    Parameters
    ----------
    members : tuple of int
        Numbers of values: the operands, then the results of the steps before.
    output : str
        The letters of the result.
    cost : float
        Expected number of products.
    """

    members: tuple[int, ...]
    output: str
    cost: float


def contractions(
    values: Sequence[Value],
    output: str,
    sizes: Mapping[str, int],
    *,
    needs_pattern: bool = False,
    assembles: bool = False,
    pair_statistics: Mapping[tuple[int, int], Statistics] | None = None,
) -> list[Contraction]:
    """Return the steps that compute an expression.

    Parameters
    ----------
    values : sequence of Value
        The operands.
    output : str
        The letters of the result.
    sizes : mapping of str to int
        The extent of each letter.
    needs_pattern : bool
        Whether the result must be sparse.
    assembles : bool
        Whether the last step, and steps over two sparse operands, compute the pattern of their result.
    pair_statistics : mapping of pairs of int to Statistics, optional
        Statistics of pairs of operands; others are assumed to be spread evenly.

    Examples
    --------
    >>> sizes = {"i": 10_000, "j": 10_000, "k": 64, "l": 8}
    >>> chain = [Value("ij", 50_000, "ij"), Value("jk"), Value("kl")]
    >>> [step.members for step in contractions(chain, "il", sizes)]  # A (B C)
    [(1, 2), (0, 3)]
    """
    search = _OrderSearch(list(values), output, sizes, needs_pattern, assembles, pair_statistics or {})
    while len(search.open) > EXHAUSTIVE:
        search.merge_cheapest()
    search.finish()
    return search.steps


def is_assembled(members: Sequence[Value], letters: str, *, is_last: bool = False) -> bool:
    """Return whether a step computes the pattern of its result: the last one, and products of two sparse operands."""
    if is_last:
        return any(value.stored is not None for value in members)
    if len(members) != 2 or len(letters) < 2 or any(value.stored is None for value in members):
        return False
    return bool(set(members[0].letters) & set(members[1].letters))


class _OrderSearch:
    """Search that merges values until one is left."""

    def __init__(
        self,
        values: list[Value],
        output: str,
        sizes: Mapping[str, int],
        needs_pattern: bool,
        assembles: bool,
        pair_statistics: Mapping[tuple[int, int], Statistics],
    ) -> None:
        self.assembles, self.pair_statistics = assembles, pair_statistics
        self.even = {(a, b): self._even(values[a], values[b], sizes) for a, b in pair_statistics}
        self.values, self.output, self.sizes, self.needs_pattern = values, output, sizes, needs_pattern
        self.open = list(range(len(values)))
        self.steps: list[Contraction] = []

    # -------------------------------------------------------------- one step

    def kept(self, members: Sequence[int], remaining: Sequence[int]) -> str:
        """Return the letters of members that others or the result need."""
        needed = set(self.output).union(*(self.values[n].letters for n in remaining))
        letters = dict.fromkeys("".join(self.values[n].letters for n in members))
        return "".join(c for c in letters if c in needed)

    def merged(self, members: Sequence[Value], letters: str, *, is_last: bool = False) -> Value:
        """Return the result of a step over these values."""
        for value in members:
            if value.stored is not None and set(value.letters) == set(letters) and len(letters) == len(value.letters):
                return value
        if self.assembles and is_assembled(members, letters, is_last=is_last):
            all_letters = set("".join(value.letters for value in members))
            products = self._met(members, all_letters)
            for pair in self._pairs(members):
                products /= self.pair_statistics[pair].collisions
            stored = min(products, math.prod(float(self.sizes[c]) for c in letters))
            return Value(letters, stored, letters, frozenset().union(*(v.parts for v in members)))
        return Value(letters)

    def cost(self, members: Sequence[Value], result: Value) -> float:
        """Return the expected products of a step, with the elements that it writes."""
        extents = self.sizes
        written = math.prod(extents[c] for c in result.letters) if result.stored is None else result.stored
        if written > LARGEST:
            return math.inf
        if result.stored is None and set(result.letters) != set(self.output):
            written += SPILLED * max(written - CACHED, 0)
        sparse = [value for value in members if value.stored is not None]
        letters = set("".join(value.letters for value in members))
        if not sparse:
            rate = DENSE_PRODUCT if len(members) <= 2 else 1.0
            return STEP + written + rate * math.prod(extents[c] for c in letters)
        if result.stored is not None and all(value is not result for value in members):
            before = (sparse[:n] for n in range(1, len(sparse)))
            rows = sum(self._met(part, set("".join(v.letters for v in part))) for part in before)
            return STEP + written + ENTERED * self._met(members, letters) + STARTED * rows
        sparse.sort(key=lambda v: (v is not result, v.path[0] not in result.letters))
        return STEP + written + self._driven(sparse, letters, result)

    @staticmethod
    def _even(first: Value, second: Value, sizes: Mapping[str, int]) -> float:
        """Return the products of two operands whose entries are spread evenly."""
        shared = set(first.letters) & set(second.letters)
        return (first.stored or 0.0) * (second.stored or 0.0) / math.prod(max(sizes[c], 1) for c in shared)

    def _pairs(self, members: Sequence[Value]) -> list[tuple[int, int]]:
        """Return the pairs of operands with statistics that meet in a step over these values."""
        of = {n: at for at, value in enumerate(members) for n in value.parts}
        return [(a, b) for a, b in self.pair_statistics if a in of and b in of and of[a] != of[b]]

    def _met(self, members: Sequence[Value], letters: set[str]) -> float:
        """Return the products of loops over the coordinates that all sparse operands store."""
        bound: set[str] = set()
        products = 1.0
        for value in (v for v in members if v.stored is not None):
            products *= (value.stored or 0.0) / math.prod(max(self.sizes[c], 1) for c in bound & set(value.letters))
            bound |= set(value.letters)
        for pair in self._pairs(members):
            products *= self.pair_statistics[pair].products / max(self.even[pair], 1.0)
        return products * math.prod(self.sizes[c] for c in letters - bound)

    def _driven(self, sparse: list[Value], letters: set[str], result: Value) -> float:
        """Return the products of loops over the stored entries of sparse operands."""
        bound: set[str] = set()
        products, searches, rows = 1.0, 0.0, 0.0
        for value in sparse:
            fresh = set(value.letters) - bound
            stored = value.stored or 0.0
            if len(fresh) == len(set(value.letters)):
                products *= stored
            elif fresh and value.path[0] in bound:
                rows += products
                products *= stored / max(self.sizes[value.path[0]], 1)
            else:
                searches += math.log2(2 + stored / max(self.sizes[value.path[0]], 1))
                products *= math.prod(self.sizes[c] for c in fresh)
            bound |= fresh
        free = letters - bound
        steps = products * (math.prod(self.sizes[c] for c in free) if free else SCALAR)
        if len(free) > 1 and not free.isdisjoint(result.letters):
            steps *= NESTED
        return steps * (1 + searches) + STARTED * rows

    # -------------------------------------------------------------- many steps

    def merge_cheapest(self) -> None:
        """Merge the two values that cost least."""
        self._add(min(combinations(self.open, 2), key=lambda pair: self._pair_cost(*pair)))

    def _pair_cost(self, a: int, b: int) -> float:
        members = [self.values[a], self.values[b]]
        letters = self.kept((a, b), [n for n in self.open if n not in (a, b)])
        apart = not set(members[0].letters) & set(members[1].letters)
        return self.cost(members, self.merged(members, letters)) * (1e6 if apart else 1)

    def _add(self, members: tuple[int, ...]) -> None:
        others = [n for n in self.open if n not in members]
        letters = self.kept(members, others) if others else self.output
        values = [self.values[n] for n in members]
        result = self.merged(values, letters, is_last=not others)
        self.steps.append(Contraction(members, result.letters, self.cost(values, result)))
        self.open = [*others, len(self.values)]
        self.values.append(result)

    def finish(self) -> None:
        """Merge the remaining values in the cheapest of all ways."""
        self._replay(self._best()(frozenset(self.open))[1])

    def _replay(self, tree: object) -> int:
        if isinstance(tree, int):
            return tree
        assert isinstance(tree, tuple)
        members = tuple(sorted(self._replay(part) for part in tree))
        self._add(members)
        return len(self.values) - 1

    def _best(self) -> Callable[[frozenset[int]], tuple[float, object, Value]]:
        """Return a function of a set of values: the cost, the tree and the result of the cheapest way to merge it."""
        every = frozenset(self.open)

        @cache
        def best(part: frozenset[int]) -> tuple[float, object, Value]:
            if len(part) == 1:
                (number,) = part
                return 0.0, number, self.values[number]
            cheapest: tuple[float, object, Value] | None = None
            letters = self.output if part == every else self.kept(sorted(part), sorted(every - part))
            for blocks in partitions(sorted(part)):
                parts = [best(block) for block in blocks]
                members = [value for *_, value in parts]
                result = self.merged(members, letters, is_last=part == every)
                lacks = self.needs_pattern and part == every and result.stored is None
                cost = math.inf if lacks else self.cost(members, result) + sum(part_cost for part_cost, *_ in parts)
                if cheapest is None or cost < cheapest[0]:
                    cheapest = cost, tuple(tree for _, tree, _ in parts), result
            assert cheapest is not None
            return cheapest

        return best


def partitions(items: Sequence[int]) -> Iterator[list[frozenset[int]]]:
    """Yield the ways to put items into two groups or more.

    Examples
    --------
    >>> [len(list(partitions(range(n)))) for n in (2, 3, 4)]
    [1, 4, 14]
    """
    yield from (blocks for blocks in _partitions(list(items)) if len(blocks) > 1)


def _partitions(items: list[int]) -> Iterator[list[frozenset[int]]]:
    if not items:
        yield []
        return
    first, remaining = items[0], items[1:]
    for blocks in _partitions(remaining):
        yield [frozenset({first}), *blocks]
        for n, block in enumerate(blocks):
            yield [*blocks[:n], block | {first}, *blocks[n + 1 :]]


__all__ = [
    "RESULTS",
    "Contraction",
    "EinsumTask",
    "Statistics",
    "Target",
    "Value",
    "agreed",
    "broadcast",
    "contractions",
    "diagonals",
    "extents",
    "is_assembled",
    "joins",
    "plan",
    "statistics",
    "stored_about",
    "target",
]
