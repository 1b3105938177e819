# SPDX-License-Identifier: Apache-2.0
"""`einsum` and `einsum_expression`: index notation over operands in memory or on disk, and front doors of warm calls.

Front doors: calls whose operands are of known kinds go straight to the kernel of an earlier call.

`inspect_operands` reads each operand once, for the door and for the kernel's call plan. A door is kept for the kinds of
the operands of an expression that is one kernel with a dense result and takes the operands as they are; the kernel
validates what differs between such calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sp

from sparsetir.blocks import BlockMatrix, open_blocks
from sparsetir.blocks.cluster import is_dask
from sparsetir.blocks.cluster import matmul as matmul_by_chunks
from sparsetir.einsum import subscripts as notation
from sparsetir.einsum.operands import Kind, Shape, admitted, fits_layout, kind_of, look, passed
from sparsetir.einsum.planning import (
    RESULTS,
    EinsumTask,
    Join,
    agreed,
    broadcast,
    diagonals,
    extents,
    joins,
    plan,
    statistics,
    stored_about,
)
from sparsetir.einsum.steps import (
    DenseStep,
    EvaluationStep,
    FlatStep,
    KernelStep,
    MaskedStep,
    ReorderingKernel,
    array_dtype,
    cast,
    classed,
    classed_pattern,
    transposed,
)
from sparsetir.einsum.subscripts import semiring
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.formats.canonical import has_hypersparse, renumber
from sparsetir.formats.tensor import MIN_HYPERSPARSE, SparseTensor
from sparsetir.interop import is_sparse, is_torch, to_torch
from sparsetir.io.stores import is_open
from sparsetir.ir.halves import check_precision
from sparsetir.runtime.call_plan import CallKey, PlanMismatch, make_call_key
from sparsetir.runtime.kernel import Kernel
from sparsetir.utils.arguments import VALUE_DTYPES, as_seconds, common_dtype, dtype_name, shown
from sparsetir.utils.caches import Cache, cached_property, shared_cache
from sparsetir.utils.memory import raise_of_memory

_expressions = shared_cache("einsum expressions", 256)


class EinsumOptions(NamedTuple):
    """Options of `einsum`, as callers pass them."""

    reduce: str
    combine: str
    fill: Any
    result: str
    precision: str | None


def einsum(
    subscripts: str,
    *operands: Any,
    reduce: str = "sum",
    combine: str = "mul",
    fill: float | None = 0,
    result: str = "auto",
    precision: str | None = None,
) -> Any:
    """Evaluate index notation over sparse and dense operands, without making sparse ones dense.

    Parameters
    ----------
    subscripts : str
        As for `numpy.einsum`: ``"ik,kj->ij"``, with ``...`` for dimensions that broadcast; letters that the result
        lacks are reduced.
    *operands : array, sparse object or number
        Any number of them: numpy and torch arrays; scipy, torch and `CooTensor` sparse ones, `SparseTensor`. One
        may be on disk (see `matmul`) where one pass suffices. Their dtypes meet as
        numpy's do. Dimensions of extent 1 broadcast.
    reduce : {"sum", "prod", "max", "min", "any", "all"}
        How the terms of one element of the result are reduced.
    combine : {"mul", "add", "max", "min", "and", "or"}
        How the elements of the operands are combined.
    fill : number or None
        The value of what sparse operands, and a sparse result, do not store. Where it changes no result (0 for sums of
        products, -inf for the largest sum) loops iterate over stored entries only; so they do for the largest and the
        least product with 0 of numpy's arrays and one sparse operand of scipy or `SparseTensor`, if all numbers are
        finite. Else they iterate over all elements.
        None leaves elements that are not stored out, of one sparse operand: an element of the result to which no entry
        leads is the identity of `reduce`.
    result : {"auto", "dense", "sparse"}
        By default sparse where the result has all letters of a sparse operand or, of more than one letter, only
        letters of sparse operands.
    precision : {"bf16x3"}, optional
        For float32: compute sums of products of a sparse and a dense operand by three sums of products of bfloat16
        numbers, as `sparsetir.ops.spmm` does and says. Meant for processors that multiply those.

    Returns
    -------
    array, sparse object or number
        A dense result is a numpy array, which may be a transposed view, or a torch tensor if an operand is one. A
        sparse one has the class of the operand whose pattern it has; entries may hold zero. Of no letters: a number.

    Raises
    ------
    ArgumentError
        When the text does not fit the operands, or their shapes do not fit each other.
    ArgumentTypeError
        When an operand is of no known class or dtype.
    LoweringError
        When `result="sparse"` is asked for where what is not stored changes the result.

    Notes
    -----
    Three operands and more are contracted in the order that is expected to cost least, some in one loop nest. Elements
    that are not stored are not multiplied: a NaN that would meet one has no effect.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2.0], [3.0, 0]]))
    >>> sparsetir.einsum("ij,jk->ik", A, np.eye(2)).tolist()
    [[0.0, 2.0], [3.0, 0.0]]
    >>> sparsetir.einsum("ij,ik,jk->ij", A, np.ones((2, 3)), np.ones((2, 3))).toarray().tolist()
    [[0.0, 6.0], [9.0, 0.0]]
    >>> inf = float("inf")
    >>> sparsetir.einsum("ij,j->i", A, np.array([1.0, 5.0]), reduce="max", combine="add", fill=-inf).tolist()
    [7.0, 4.0]
    """
    if combine == "mul" and type(fill) in (int, float) and fill == 0 and isinstance(reduce, str) and reduce in EXTREMES:
        extreme = _extreme_product(subscripts, operands, reduce, result)
        if extreme is not None:
            return extreme
    options = reduce, combine, fill, result, precision
    if not 0 < len(operands) < 3:  # the sizes of three decide their order
        return _evaluate(subscripts, operands, EinsumOptions(*options))
    call = subscripts, type(fill), options
    value = evaluate_by_door(call, operands)
    if value is None:
        value = _evaluate(subscripts, operands, EinsumOptions(*options))
        add_door(call, operands)
    return value


EXTREMES = {"max": np.maximum, "min": np.minimum}


def _extreme_product(text: Any, operands: Sequence[Any], reduce: str, result: Any) -> Any:
    """Return the largest or least products, of entries and of the zeros where not every element is stored.

    None for operands of which a zero may meet another number than a finite one, and other results than dense arrays.
    """
    places = [at for at, value in enumerate(operands) if is_sparse(value) and not is_outside(value)]
    if len(places) != 1 or result not in ("auto", "dense") or not isinstance(text, str):
        return None
    arrays = [value for value in operands if not is_sparse(value)]
    if any(type(value) is not np.ndarray or value.dtype.kind not in "biuf" for value in arrays):
        return None
    value = operands[places[0]]
    if not (sp.issparse(value) or isinstance(value, SparseTensor)) or value.dtype.kind not in "iuf":
        return None
    terms = notation.parse(text, tuple(len(operand.shape) for operand in operands))
    term, shape = terms.inputs[places[0]], tuple(value.shape)
    kept = "".join(c for c in term if c in terms.output)
    is_wide = any(1 in operand.shape for operand in operands) or max(shape, default=0) >= MIN_HYPERSPARSE
    is_empty = any(0 in operand.shape for operand in operands)
    if len(set(term)) < len(term) or kept == term or len(kept) == len(terms.output) > 1 or is_wide or is_empty:
        return None
    tensor = SparseTensor.from_any(value)
    if not all(np.isfinite(array).all() for array in (tensor.values, *arrays)):
        return None
    of_entries = einsum(text, *operands, reduce=reduce, fill=None, result="dense")
    if tensor.nnz == math.prod(shape):
        return of_entries
    counts = entry_counts(tensor, [term.index(c) for c in terms.output if c in kept])
    is_full = counts == math.prod(shape) // counts.size
    is_full = is_full.reshape([shape[term.index(c)] if c in kept else 1 for c in terms.output])
    return np.where(is_full, of_entries, EXTREMES[reduce](of_entries, of_entries.dtype.type(0)))[()]


def entry_counts(tensor: SparseTensor, dims: list[int]) -> np.ndarray:
    """Return the number of entries at each coordinate tuple of some dimensions, an array over these."""
    if not dims:
        return np.asarray(tensor.nnz)
    matrix = tensor.scipy_matrix if dims == [0] and tensor.format.name == "csr" else None
    if matrix is not None:
        return np.diff(matrix.indptr)
    shape = tuple(tensor.shape[d] for d in dims)
    flat = np.ravel_multi_index([tensor.coords[d] for d in dims], shape) if tensor.nnz else np.zeros(0, np.int64)
    return np.bincount(flat, minlength=math.prod(shape)).reshape(shape)


def _evaluate(text: str, operands: Sequence[Any], options: EinsumOptions) -> Any:
    """Evaluate an expression over operands of any kind."""
    if any(is_outside(value) for value in operands):
        if (options.reduce, options.combine, options.fill, options.precision) != ("sum", "mul", 0, None):
            raise ArgumentError(
                "reduce, combine, fill, precision: expected none with operands outside of memory, whose products are "
                "summed in their dtype. Read the matrix"
            )
        return einsum_outside(text, operands)
    values = [passed(value, at) for at, value in enumerate(operands)]
    if has_hypersparse(values):
        return _over_short(text, values, options)
    return _expression(text, values, options).run(values)


def _over_short(text: str, values: list[Any], options: EinsumOptions) -> Any:
    """Evaluate over the coordinates that occur, if elements that are not stored change no result."""
    terms = notation.parse(text, tuple(len(value.shape) for value in values))
    reduce, combine, fill, *_ = options
    is_sum = (reduce, combine, fill) == ("sum", "mul", 0)
    is_elementwise = all(set(term) == set(terms.output) for term in terms.inputs)
    if not is_sum and is_elementwise and fill == 0:  # nothing is reduced, and elements stored nowhere stay 0
        return _expression(text, values, options).run(values)
    if not is_sum and (len(values) > 1 or reduce not in EXTREMES or fill is None):
        shape = max((tuple(v.shape) for v in values), key=max)
        raise ArgumentError(
            f"an operand has shape {shape}, of which reduce={reduce!r} with combine={combine!r} and fill={fill} would "
            "take every element: number the rows and columns that hold entries first"
        )
    short = renumber(terms.inputs, values)
    short_result = _expression(text, short.values, options).run(short.values)
    return short.restore(short_result, terms.output)


def einsum_expression(
    subscripts: str,
    *operands: Any,
    reduce: str = "sum",
    combine: str = "mul",
    fill: float | None = 0,
    result: str = "auto",
    precision: str | None = None,
) -> Expression:
    """Prepare an expression for operands like the examples.

    Parameters
    ----------
    subscripts, reduce, combine, fill, result, precision
        As for `einsum`.
    *operands : array, sparse object or tuple of int
        Operands like those of the calls; a tuple is the shape of a dense one, of the dtype of the others.

    Returns
    -------
    Expression
        Called with the operands. `Expression.tune` changes neither `einsum` nor another expression.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2.0], [3.0, 0]]))
    >>> step = sparsetir.einsum_expression("ij,jk->ik", A, (2, 1))
    >>> step(A, np.ones((2, 1))).tolist()
    [[2.0], [3.0]]
    >>> step.bind(A)(np.ones((2, 1))).tolist()
    [[2.0], [3.0]]
    """
    arrays = [value for value in operands if not isinstance(value, tuple) and hasattr(value, "dtype")]
    dtype = common_dtype([dtype_name(value.dtype) for value in arrays]) if arrays else "float32"
    values = [Shape(v, dtype) if isinstance(v, tuple) else admitted(v, at) for at, v in enumerate(operands)]
    if has_hypersparse([v for v in values if not isinstance(v, Shape)]):
        shapes = ", ".join(str(tuple(v.shape)) for v in values)
        raise ArgumentError(f"operands of shapes {shapes} have far more rows than entries: call sparsetir.einsum")
    return _expression(subscripts, values, EinsumOptions(reduce, combine, fill, result, precision)).apart(values)


def _expression(text: str, values: Sequence[Any], options: EinsumOptions) -> Expression:
    """Return the expression for such operands, cached by their kinds."""
    try:
        key: Any = (text, options, *[look(value) for value in values])
        pairs = _statistics(text, values) if len(values) > 2 else {}
        if len(values) > 2:
            key = (key, tuple(pairs.items()), *[(tuple(v.shape), stored_bits(v)) for v in values])
        expression = _expressions.get(key)
    except (TypeError, AttributeError, ValueError, IndexError):  # no valid key: `Expression` raises a clear error
        key, expression, pairs = None, None, {}
    if expression is None:
        expression = Expression(text, values, options, pairs)
        if key is not None:
            _expressions[key] = expression
    return expression


def _statistics(text: str, values: Sequence[Any]) -> dict[Join, tuple[int, int]]:
    """Return the statistics of operand pairs that decide the contraction order; empty if the text does not fit."""
    try:
        terms = notation.parse(text, tuple(len(value.shape) for value in values))
    except (ArgumentError, ArgumentTypeError):
        return {}
    return joins(terms.inputs, values)


def stored_bits(value: Any) -> int:
    """Return the magnitude of an operand's number of entries, which decides the contraction order."""
    count = stored_of(value)
    return -1 if count is None else int(count).bit_length()


def stored_of(value: Any) -> int | None:
    """Return the number of entries that a sparse operand stores; None for a dense one."""
    if isinstance(value, (np.ndarray, Shape)):
        return None
    if is_torch(value):
        layout = str(value.layout)
        entries = (
            value._indices()[0] if layout == "torch.sparse_coo" else value.values() if "sparse" in layout else None
        )
        return None if entries is None else len(entries)
    try:
        return int(value.nnz)
    except (IndexError, TypeError, ValueError, AttributeError):  # damaged arrays, which the call names
        return 0


class Expression:
    """Index notation prepared for operands of some kinds; created by `einsum_expression`.

    Attributes
    ----------
    steps : list of EvaluationStep
        Its contractions in order.
    """

    def __init__(
        self,
        text: str,
        values: Sequence[Any],
        options: EinsumOptions,
        pairs: Mapping[Join, tuple[int, int]],
    ) -> None:
        reduce, combine, fill, result, precision = options
        if not values:
            raise ArgumentError("an expression needs an operand, got none")
        if not isinstance(result, str) or result not in RESULTS:
            raise ArgumentError(f"result is one of {', '.join(RESULTS)}, got {shown(result)}")
        if not isinstance(text, str):
            raise ArgumentTypeError(f"subscripts: expected a string, got {shown(text)}. Pass one such as 'ij,jk->ik'.")
        kinds = [kind_of(value, at) for at, value in enumerate(values)]
        self.text, self.kinds = text, kinds
        self.dtype = common_dtype([kind.dtype for kind in kinds])
        if self.dtype not in VALUE_DTYPES:
            dtypes = ", ".join(dict.fromkeys(kind.dtype for kind in kinds))
            raise ArgumentTypeError(
                f"operands of {dtypes} meet in {self.dtype}, expressions are computed in {', '.join(VALUE_DTYPES)}: "
                "pass .astype(...)"
            )
        casts = [None if kind.dtype == self.dtype else self.dtype for kind in kinds]
        terms = notation.parse(text, tuple(kind.order for kind in kinds))
        self.terms = broadcast(terms, kinds)
        term_pairs = zip(terms.inputs, self.terms.inputs, strict=True)
        self.spread = [[d for d, (a, b) in enumerate(zip(*pair, strict=True)) if a != b] for pair in term_pairs]
        self.letters = self.terms
        sizes = extents(self.letters, [value.shape for value in values])
        self.terms, views = diagonals(self.terms, kinds)
        self.views = [pair if any(pair) else None for pair in zip(casts, views, strict=True)]
        ring = semiring(reduce, combine, fill, self.dtype)
        if fill is None and (count := sum(kind.layout is not None for kind in kinds)) != 1:
            raise ArgumentError(f"fill: expected a number for {count} sparse operands, got None. Pass 0, or inf.")
        if set(self.terms.letters) <= set(self.terms.output):
            ring = ring.without_reduction(self.dtype, len(kinds))
        same = tuple(agreed(kind, self.dtype, ring) for kind in kinds)
        self.task = EinsumTask(self.terms, same, ring, result, check_precision(precision, self.dtype))
        # Plans depend only on what the cache key contains of the operands, not on details of the first call's.
        stored = [None if stored_of(value) is None else stored_about(stored_bits(value)) for value in values]
        self.steps, self.target = plan(self.task, sizes, stored, statistics(pairs))
        if self.task.in_parts and not any(isinstance(s, KernelStep) and s.nest.in_parts for s in self.steps):
            fault = (
                f"precision: expected None for {text!r}, got {precision!r}: it has no sum of products of two operands"
            )
            raise ArgumentError(f"{fault}, a sparse one and a dense one. Leave it out.")
        self.order = [self.target.letters.index(c) for c in self.terms.output]
        self.is_torch = any(kind.family == "torch" for kind in kinds)
        self.family = "numpy" if self.target.pattern is None else kinds[self.target.pattern].family
        if self.target.assembled:
            self.family = next(kind.family for kind in kinds if kind.layout is not None)
        self.is_plain = len(self.steps) == 1 and not any(self.views) and not self.target.is_sparse
        self.is_plain = self.is_plain and self.steps[0].members == tuple(range(len(kinds)))
        self.examples: Sequence[Any] = ()

    def apart(self, examples: Sequence[Any]) -> Expression:
        """Return the same expression with its own steps, to be tuned with these operands by default."""
        copied = copy.copy(self)
        copied.steps, copied.examples = [step.apart() for step in self.steps], examples
        return copied

    # ------------------------------------------------------------------ calls

    def __call__(self, *operands: Any) -> Any:
        """Evaluate the expression.

        Parameters
        ----------
        *operands : array, sparse object or number
            Of the kinds that the expression was made for; any sizes.
        """
        values = [passed(value, at) for at, value in enumerate(operands)]
        self._check(values)
        return self.run(values)

    def _check(self, values: Sequence[Any]) -> None:
        if len(values) != len(self.kinds):
            raise ArgumentTypeError(f"{self.text!r} takes {len(self.kinds)} operands, got {len(values)}")
        for at, value in enumerate(values):
            self.check(at, value)

    def check(self, at: int, value: Any) -> None:
        """Raise unless an operand is of the kind, and broadcast in the dimensions, that the expression was made for."""
        kind, actual = self.kinds[at], kind_of(value, at)
        advice = "make another with einsum_expression, or call einsum"
        if actual != kind and not _is_like(value, actual, kind):
            raise ArgumentTypeError(
                f"operand {at} is {_shown(actual)}, but the expression was made for {_shown(kind)}: {advice}"
            )
        wide = [d for d in self.spread[at] if value.shape[d] != 1]
        if wide:
            extent = f"dimension {wide[0]} of operand {at} has extent {value.shape[wide[0]]}"
            raise ArgumentError(f"{extent}, but the expression was made for 1, which is broadcast: {advice}")

    def run(self, values: Sequence[Any]) -> Any:
        try:
            if self.is_plain:
                computed = self.steps[0](values)
            else:
                computed = self._evaluate([self.viewed(n, value) for n, value in enumerate(values)])
        except ValueError:
            # Kernels and numpy speak of their own names: say in those of the expression which extents differ.
            extents(self.letters, [value.shape for value in values])
            raise
        return self.finished(computed)

    @property
    def kernel(self) -> Kernel | ReorderingKernel | None:
        """The kernel of an expression that is one kernel with a dense result and arguments A and B; None for others."""
        step = self.steps[0]
        if not self.is_plain or type(step) is not KernelStep or not isinstance(step.compiled, Kernel):
            return None
        nest = step.nest
        takes = all(o.layout is not None or o.letters for o in nest.operands)  # numbers are passed as arrays
        takes = takes and not any(layout is not None and layout.held for layout in step.layouts)
        # A kernel returns tensors of torch for dense ones, an expression for sparse ones as well.
        takes = takes and (not self.is_torch or any(k.layout is None and k.family == "torch" for k in self.kinds))
        takes = takes and tuple(step.program.buffers) == ("A", "B")[: len(nest.operands)]
        return None if nest.pattern is not None or nest.assembled or not nest.output or not takes else step.kernel

    def viewed(self, at: int, value: Any) -> Any:
        """Convert an operand to the dtype of the expression, and to its diagonal if a letter occurs twice."""
        view = self.views[at]
        if view is None:
            return value
        dtype, text = view
        value = cast(value, dtype) if dtype else value
        return value if text is None else DenseStep((at,), [text.partition("->")[0]], text.partition("->")[2])([value])

    def _evaluate(self, values: Sequence[Any]) -> Any:
        computed = list(values)
        for step in self.steps:
            computed.append(step([computed[n] for n in step.members]))
        return computed[-1]

    def finished(self, value: Any) -> Any:
        """Convert the result to its class, with the dimensions in order."""
        if self.target.assembled:
            return classed_pattern(value, self.family)
        if self.target.pattern is None:
            return to_torch(np.asarray(value)) if self.is_torch and not is_torch(value) else _number(value)
        return classed(transposed(value, self.order), self.family)

    def bind(self, *operands: Any) -> Callable[..., Any]:
        """Fix some operands, usually the sparse ones, which are converted once.

        Parameters
        ----------
        *operands : array, sparse object or None
            The operands from the first on; None, or nothing, for those that calls pass.

        Returns
        -------
        callable
            Takes the open operands in their order. Values that depend on fixed operands alone are computed in advance.
        """
        if len(operands) > len(self.kinds):
            raise ArgumentTypeError(f"{self.text!r} takes {len(self.kinds)} operands, got {len(operands)}")
        fixed = {at: passed(value, at) for at, value in enumerate(operands) if value is not None}
        for at, value in fixed.items():
            self.check(at, value)
        return BoundExpression(self, fixed)

    # ------------------------------------------------------------------ looking inside, and searching

    def script(self) -> str:
        """Return the programs of its steps, one after the other, as they could be written by hand."""
        return "\n".join(step.script().strip() + "\n" for step in self.steps)

    def explain(self) -> str:
        """Return one line for each step: what it computes, and what its loops iterate over."""
        names = [f"operand {n}" for n in range(len(self.kinds))]
        lines = []
        for number, step in enumerate(self.steps, 1):
            member_names = [names[n] for n in step.members]
            lines.append(f"{number}. {_explained(step, member_names)}")
            names.append(f"step {number}")
        where = "dense" if self.target.pattern is None else f"the pattern of operand {self.target.pattern}"
        where = "a pattern that is computed" if self.target.assembled else where
        return "\n".join([f"{self.terms} in {self.dtype}, result: {where}", *lines])

    def tune(self, *operands: Any, seconds: float = 10.0, database: Any = None) -> Expression:
        """Search for the fastest format and schedule of its steps on these operands.

        Parameters
        ----------
        *operands : array, sparse object or None
            Those to measure with. By default, and for None, those that the expression was made for; in place of a
            shape, random numbers.
        seconds : float
            For all steps together.
        database : str, Path or Database, optional
            Where trials are kept; see `sparsetir.tune_sparse`.

        Returns
        -------
        Expression
            This one, whose later calls and `bind` use the tuned steps.
        """
        from sparsetir.tuning import tune_sparse

        budget = as_seconds(seconds, "seconds", positive=True)
        examples = operands or [None] * len(self.kinds)
        values = [self._example(at) if value is None else admitted(value, at) for at, value in enumerate(examples)]
        self._check(values)
        computed = [self.viewed(n, value) for n, value in enumerate(values)]
        kernels = [step for step in self.steps if isinstance(step, KernelStep)]
        for step in self.steps:
            members = [computed[n] for n in step.members]
            if isinstance(step, KernelStep):
                called, arguments = step.called(members)
                limit = budget / len(kernels)
                func = called.program.func
                arguments = called.reordered(arguments)
                result = tune_sparse(func, arguments, max_seconds=limit, database=database, progress=False)
                called.tuned = result.kernel
            computed.append(step(members))
        return self

    def _example(self, at: int) -> Any:
        """Return an operand that the expression was made for; random numbers if only its shape is known."""
        if at >= len(self.examples):
            raise ArgumentTypeError(f"{self.text!r} takes {len(self.kinds)} operands, got {at + 1} or more")
        value = self.examples[at]
        if not isinstance(value, Shape):
            return value
        return np.random.default_rng(at).integers(1, 4, value.shape).astype(array_dtype(value.dtype))

    def __repr__(self) -> str:
        operands = ", ".join(_shown(kind) for kind in self.kinds)
        return f"Expression {self.text!r} of {operands}: {len(self.steps)} step{'s' * (len(self.steps) != 1)}"


class BoundExpression:
    """An expression with some operands fixed; made by `Expression.bind`."""

    def __init__(self, expression: Expression, fixed: dict[int, Any]) -> None:
        self.expression, self.fixed = expression, fixed
        count = len(expression.kinds)
        computed: dict[int, Any] = {}
        for at, value in fixed.items():
            computed[at] = expression.viewed(at, value)
        self.open = [n for n in range(count) if n not in fixed]
        self.plain = [_plain(*pair) for pair in zip(expression.kinds, expression.spread, strict=True)]
        self.calls: list[tuple[int, EvaluationStep, Any]] = []
        for number, step in enumerate(expression.steps, count):
            fixed_members = {place: computed[n] for place, n in enumerate(step.members) if n in computed}
            if len(fixed_members) == len(step.members):
                computed[number] = step([fixed_members[place] for place in range(len(fixed_members))])
            else:
                self.calls.append((number, step, step.bind(fixed_members)))
        self.known = computed

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the expression and the fixed operands, which are bound again; bound calls are machine code."""
        return BoundExpression, (self.expression, self.fixed)

    @cached_property
    def _template(self) -> list[Any]:
        return [self.known.get(n) for n in range(len(self.expression.kinds) + len(self.expression.steps))]

    def __call__(self, *operands: Any) -> Any:
        """Evaluate the expression with the open operands."""
        if len(operands) != len(self.open):
            raise ArgumentTypeError(f"{len(self.open)} operands are open, got {len(operands)}")
        expression, computed = self.expression, self._template.copy()
        for n, value in zip(self.open, operands, strict=True):
            operand, expected = value, self.plain[n]
            if type(value) is not np.ndarray or (value.ndim, value.dtype) != expected:
                operand = passed(value, n)
                expression.check(n, operand)
            computed[n] = operand if expression.views[n] is None else expression.viewed(n, operand)
        for number, step, call in self.calls:
            computed[number] = call([computed[n] for n in step.members])
        return expression.finished(computed[-1])

    def __repr__(self) -> str:
        return f"{self.expression!r}, {len(self.expression.kinds) - len(self.open)} fixed"


def _number(value: Any) -> Any:
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _plain(kind: Kind, spread: Sequence[int]) -> Any:
    """Return order and dtype of arrays that need no further validation; None if each operand is validated."""
    return None if kind.layout is not None or spread else (kind.order, np.dtype(array_dtype(kind.dtype)))


def _is_like(value: Any, actual: Kind, kind: Kind) -> bool:
    """Return whether an operand may replace another whose kind is not quite the same."""
    if (actual.order, actual.dtype, actual.family == kind.family) != (kind.order, kind.dtype, True):
        return actual.layout is kind.layout is None and (actual.order, actual.dtype) == (kind.order, kind.dtype)
    if kind.layout is None or actual.layout is None:
        return kind.layout is actual.layout
    return actual.layout == kind.layout or fits_layout(value, kind.layout)


def _shown(kind: Kind) -> str:
    description = f"{kind.dtype} of {kind.order} dimension{'s' * (kind.order != 1)}"
    if kind.layout is None:
        return f"dense {description}"
    classes = {"scipy": "scipy", "torch": "torch", "tensor": "SparseTensor", "coo": "CooTensor"}
    return f"sparse ({kind.layout}) {description}, a {classes[kind.family]} one with {kind.layout.idtype} indices"


def _explained(step: EvaluationStep, names: Sequence[str]) -> str:
    if isinstance(step, DenseStep):
        return f"numpy.einsum({step.text!r}) of {', '.join(names)}"
    if isinstance(step, MaskedStep):
        mask, first, second = (names[n] for n in step.roles[:3])
        return f"{first} times {second} where {mask} stores entries, times those; adds up rows in the order of {mask}'s"
    assert isinstance(step, KernelStep)
    if isinstance(step, FlatStep):
        return f"{','.join(step.letters)}->{step.output} of {', '.join(names)}; merges them as matrices of their rows"
    nest = step.written
    text = f"{','.join(o.letters for o in nest.operands)}->{nest.output}"
    parts = [f"{text} of {', '.join(names)}"]
    for at, (operand, name) in enumerate(zip(nest.operands, names, strict=True)):
        if operand.layout is not None:
            owned = "".join(loop.letter for loop in nest.loops if at in loop.owners)
            action = f"runs over what {name} stores" if owned else f"looks {name} up"
            parts.append(action if nest.is_direct(at) or not owned else f"{action}, and looks it up")
    return "; ".join(parts)


# ----------------------------------------------------------------------------------------- front doors


COMPRESSED = (sp.csr_array, sp.csc_array, sp.csr_matrix, sp.csc_matrix)

# The properties of operands that decide which kernel evaluates an expression; the key of its call, and its arguments.
Inspection: TypeAlias = tuple[tuple[Any, ...], CallKey, dict[str, Any]]

# Calls the kernel of an earlier call, for operands that its call plan takes as they are.
Door: TypeAlias = Callable[[CallKey, dict[str, Any]], Any]

doors: Cache[Door] = shared_cache("front doors", 256)

PRODUCT = ()  # a call of `matmul` and ``@``, whose expression depends on the operands


def evaluate_by_door(call: tuple[Any, ...], operands: Sequence[Any]) -> Any:
    """Evaluate one or two operands by the kernel of an earlier call; return None where there is none.

    Parameters
    ----------
    call : tuple
        The expression, the class of the fill value and `EinsumOptions`; or `PRODUCT`.
    operands : sequence of array or sparse object
    """
    inspection = inspect_operands(operands)
    if inspection is None:
        return None
    kinds, seen, arguments = inspection
    try:
        door = doors.get((call, kinds))
        return None if door is None else door(seen, arguments)
    except (SparseTIRError, PlanMismatch, TypeError):
        # The long way names the fault of operands that the kernel refuses, and of options without a hash.
        return None
    except RuntimeError as error:
        raise_of_memory(error, "the product")


def inspect_operands(operands: Sequence[Any]) -> Inspection | None:
    """Inspect one or two operands; return None for those that need conversion."""
    arguments = {"A": operands[0], "B": operands[1]} if len(operands) == 2 else dict(zip("A", operands, strict=True))
    seen = make_call_key(arguments)
    if seen is None:
        return None
    kinds, dims, _, _ = seen
    if not dims or max(dims) >= MIN_HYPERSPARSE:
        return None
    if 1 in dims:  # which may be broadcast
        kinds += tuple(at for at, extent in enumerate(dims) if extent == 1)
    return kinds, seen, arguments


def add_door(call: tuple[Any, ...], operands: Sequence[Any]) -> None:
    """Keep the kernel of a call that was made, if it takes such operands as they are."""
    try:
        hash(call)
    except TypeError:
        return
    inspection = inspect_operands(operands)
    values = [operand.compressed if type(operand) is SparseTensor else operand for operand in operands]
    if inspection is None or not all(is_torch(v) or type(v) in (*COMPRESSED, np.ndarray, np.memmap) for v in values):
        return
    kinds, seen, _ = inspection
    if (call, kinds) in doors:
        return
    subscripts, _, options = call
    kernel = _expression(subscripts, values, EinsumOptions(*options)).kernel
    plan = kernel.plans.get(seen[0]) if isinstance(kernel, Kernel) else None
    doors[call, kinds] = plan.call if plan is not None else kernel.call_inspected if kernel is not None else _no_door


def _no_door(_seen: CallKey, _arguments: dict[str, Any]) -> None:
    """Return None: the expression is more than one kernel."""


def share_door(call: tuple[Any, ...], other: tuple[Any, ...], operands: Sequence[Any]) -> None:
    """Keep the kernel of a call for another call of the same operands as well."""
    inspection = inspect_operands(operands)
    door = None if inspection is None else doors.get((call, inspection[0]))
    if inspection is not None and door is not None:
        doors[other, inspection[0]] = door


# -------------------------------------------------------------------------- operands outside of memory


FORMS = "products with a dense operand ('ij,jk->ik'), sampled products ('ij,ik,jk->ij') and sums ('ij->j')"


def is_outside(value: Any) -> bool:
    """Return whether an operand is outside of memory: on disk, or a dask array."""
    return isinstance(value, BlockMatrix) or is_open(value) or is_dask(value)


def matmul_outside(A: Any, B: Any) -> Any:
    """Multiply a matrix on disk, or a dask array, by a dense operand, or a dense operand by a matrix on disk."""
    if is_outside(A) and is_outside(B):
        raise ArgumentError("matmul(A, B): expected one operand in memory, got two that are not. Read one of them.")
    if is_dask(A):
        return matmul_by_chunks(A, B)
    if is_dask(B):
        raise ArgumentError("B: expected a matrix in memory or on disk, got a dask array. Pass it as A.")
    return _opened(A) @ B if is_outside(A) else A @ _opened(B)


def einsum_outside(text: str, operands: Sequence[Any]) -> Any:
    """Evaluate an expression that is one pass over a matrix on disk; of dask arrays a product.

    Raises
    ------
    ArgumentError
        It is another expression.
    """
    operands = [open_blocks(value) if is_open(value) else value for value in operands]
    terms = notation.parse(text, tuple(len(value.shape) for value in operands))
    at = next(n for n, value in enumerate(operands) if is_outside(value))
    M, rows_columns = operands[at], terms.inputs[at]
    others = [(term, value) for n, (term, value) in enumerate(zip(terms.inputs, operands, strict=True)) if n != at]
    if len(rows_columns) == 2 and not any(is_outside(value) for _, value in others):
        row, column = rows_columns[0], rows_columns[1]
        if len(others) == 1:
            product = _product(M, row, column, *others[0], terms.output)
            if product is not None:
                return product
        if not is_dask(M):
            if not others and len(terms.output) == 1:
                return (M if terms.output == column else M.T).colsums()
            if len(others) == 2 and terms.output == row + column:
                by_first = {term[:1]: (term[1:], value) for term, value in others if len(term) == 2}
                if by_first.keys() == {row, column} and by_first[row][0] == by_first[column][0]:
                    return M.sddmm(by_first[row][1], by_first[column][1])
    raise ArgumentError(f"{text!r}: expected {FORMS} of operands outside of memory. Read the matrix whole for others.")


def _product(M: Any, row: str, column: str, term: str, dense: Any, output: str) -> Any:
    """Return the product that sums over a row or column letter, or None if the expression is another one."""
    shared = [letter for letter in (row, column) if letter in term]
    kept = row if shared == [column] else column
    rest = term.replace(shared[0], "", 1) if len(shared) == 1 else term
    if len(shared) != 1 or len(term) > 2 or shared[0] in output or set(output) != {kept, *rest} or row == column:
        return None
    operand = dense if term[0] == shared[0] else dense.T
    if is_dask(M):
        product = matmul_by_chunks(M, operand) if kept == row and operand.ndim == 2 else None
    else:
        product = (M if kept == row else M.T) @ operand
    return product if product is None or output == kept + rest else product.T


def _opened(value: Any) -> BlockMatrix:
    return value if isinstance(value, BlockMatrix) else open_blocks(value)


__all__ = [
    "COMPRESSED",
    "PRODUCT",
    "BoundExpression",
    "EinsumOptions",
    "Expression",
    "einsum",
    "einsum_expression",
    "einsum_outside",
    "entry_counts",
    "evaluate_by_door",
    "is_outside",
    "matmul_outside",
    "share_door",
]
