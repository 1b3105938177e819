# SPDX-License-Identifier: Apache-2.0
"""Products of float32 numbers by three products of bfloat16 numbers, for units that multiply these.

before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

after::

    with T.sp_iter([I, J], "SS", "split_A") as [i, j]:
        A_high[i, j] = T.Cast("bfloat16", A[i, j])
        A_low[i, j] = T.Cast("bfloat16", A[i, j] - T.Cast("float32", A_high[i, j]))
    ...  # the same of B
    with T.sp_iter([I, J, K], "SRS", "spmm_low_high") as [i, j, k]:
        with T.init():
            C[i, k] = 0
        C[i, k] = C[i, k] + T.Cast("float32", A_low[i, j]) * T.Cast("float32", B_high[j, k])
    ...  # the sums of A_high * B_low and A_high * B_high

Where the innermost axis is reduced, as those of dot products are, or is not the last one of the result, as that of a
linear layer with rows of inputs, one iteration adds all three::

    with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
        O[i, j] = O[i, j] + S[i, j] * (T.Cast("float32", X_low[i, k]) * T.Cast("float32", Y_high[j, k]) + ...)

Both rows are read once, and factors that no reduced axis has are multiplied as they are.

A number is the sum of its halves but for ``2**-17`` of it, and the fourth product is below ``2**-16`` of the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import ArgumentError
from sparsetir.ir.rewriting import all_same, collect, factors, mentions, seq, sequence, substitute
from sparsetir.ir.rewriting import product as multiply
from sparsetir.ir.views import (
    SPARSE_ITER,
    Axis,
    Entry,
    SparseBuffer,
    SpIter,
    declare_buffer,
    decode,
    fresh_name,
    make_iteration,
    names_in,
)
from sparsetir.ir.visitor import structural_mutate
from sparsetir.utils.arguments import shown

HALF, WHOLE, HALF_BYTES = "bfloat16", "float32", 2
PRECISIONS = ("bf16x3",)
TERMS = (("low", "high"), ("high", "low"), ("high", "high"))  # Small terms first.


@dataclass(frozen=True, eq=False)
class _HalvedProduct:
    """An iteration that adds products of elements of two buffers, its store, and factors that the sum has outside."""

    iteration: SpIter
    store: tirx.BufferStore
    factors: tuple[ir.TensorLoad, ir.TensorLoad]
    outside: tuple[ir.Expr, ...]

    @property
    def groups(self) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
        """The names of the iterations that add parts of the product, and these parts."""
        name, innermost = self.iteration.name, self.iteration.vars[-1]
        if self.iteration.kinds.endswith("R") or not self.store.indices[-1].same_as(innermost):
            return ((name, TERMS),)
        return tuple((f"{name}_{'_'.join(parts)}", (parts,)) for parts in TERMS)


def by_three_products(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compute sums of products of two float32 elements by three sums of products of bfloat16 numbers.

    Parameters
    ----------
    func : PrimFunc
        A stage-I program.

    Returns
    -------
    PrimFunc
        With the same parameters. Iterations that add no products of two float32 elements are those of `func`.

    Raises
    ------
    ArgumentError
        No iteration adds such products.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir.ir.halves import by_three_products
    >>> program = sparsetir.ir.decode(by_three_products(sparsetir.ops.spmm(format="bsr")))
    >>> [iteration.name for iteration in program.iterations]
    ['split_A', 'split_B', 'spmm_low_high', 'spmm_high_low', 'spmm_high_high']
    """
    program, names = decode(func), names_in(func)
    written = {id(b) for b in program.buffers.values() for it in program.iterations if _is_written(it, b)}
    products = [p for it in program.iterations if (p := _product(it, program.buffers, written)) is not None]
    if not products:
        fault = "precision: expected None for a program without sums of products of two float32 elements, got 'bf16x3'"
        raise ArgumentError(f"{fault}. Leave it out.")
    split: dict[Var, tuple[Var, Var]] = {}

    def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
        product = next((p for p in products if p.iteration.node.same_as(node)), None)
        if product is None:
            return mutator.default_mutate(node)
        statements: list[tirx.Stmt] = []
        for factor in product.factors:
            if factor.source not in split:
                halves, conversions = _split(program.buffers[factor.source], names)
                split[factor.source] = halves
                statements += conversions
        return seq(*statements, *_sums(product, split))

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return sequence(*map(mutator.mutate, node.seq))  # so that declarations reach what follows them

    body = structural_mutate(func.body, [(s_tir.SBlockRealize, on_realize), (tirx.SeqStmt, on_seq)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def _is_written(iteration: SpIter, buffer: SparseBuffer) -> bool:
    return any(store.buffer.same_as(buffer.view) for store in collect(iteration.block.body, tirx.BufferStore))


def _product(iteration: SpIter, buffers: dict[Var, SparseBuffer], written: set[int]) -> _HalvedProduct | None:
    """Return the product of an iteration; None for one that computes something else."""
    store = iteration.block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    before, term = store.value.a, store.value.b
    is_own = isinstance(before, ir.TensorLoad) and before.source.same_as(store.buffer)
    if not is_own or not all_same(before.indices, store.indices) or not isinstance(term, tirx.Mul):
        return None
    reduced = [v for v, kind in zip(iteration.vars, iteration.kinds, strict=True) if kind == "R"]
    parts = factors(term)
    inner = parts if len(parts) == 2 else [factor for factor in parts if mentions(factor, reduced)]
    outside = [factor for factor in parts if not any(factor is x for x in inner)]
    if not reduced or len(inner) != 2 or any(entry.merge for entry in iteration.entries):
        return None
    if any(id(buffers.get(load.source)) in written for load in collect(outside, ir.TensorLoad)):
        return None
    for factor in inner:
        buffer = buffers.get(factor.source) if isinstance(factor, ir.TensorLoad) else None
        if buffer is None or buffer.dtype != WHOLE or id(buffer) in written:
            return None
    return _HalvedProduct(iteration, store, (inner[0], inner[1]), tuple(outside))


def _half_buffer(name: str, axes: tuple[Axis, ...]) -> tuple[Var, list[tirx.Stmt]]:
    """Return a buffer of halves over axes, and the statements that allocate and declare it."""
    options = {"layout": None, "data_alignment": HALF_BYTES}
    view = tirx.decl_buffer([axis.length for axis in axes], HALF, name, **options)
    default = tirx.const(0, HALF)
    shape = SparseBuffer(view, view, axes, default).storage_shape
    storage = tirx.decl_buffer(shape, HALF, f"{name}_data", **options)
    return view, [tirx.AllocBuffer(storage), *declare_buffer(view, storage, default, axes)]


def _split(buffer: SparseBuffer, names: set[str]) -> tuple[tuple[Var, Var], list[tirx.Stmt]]:
    """Return buffers for the halves of a buffer's elements, and the statements that fill them."""
    high, declared_high = _half_buffer(fresh_name(f"{buffer.name}_high", names), buffer.axes)
    low, declared_low = _half_buffer(fresh_name(f"{buffer.name}_low", names), buffer.axes)
    order = sorted(dict.fromkeys(buffer.axes), key=lambda axis: _rank(axis, buffer))
    variables = {axis: Var(axis.name.lower(), ir.PrimType(axis.idtype)) for axis in order}
    at = [variables[axis] for axis in buffer.axes]
    element = tirx.BufferLoad(buffer.view, at)
    rest = element - tirx.Cast(WHOLE, tirx.BufferLoad(high, at))
    body = seq(tirx.BufferStore(high, tirx.Cast(HALF, element), at), tirx.BufferStore(low, tirx.Cast(HALF, rest), at))
    entries = [Entry((axis,), (variables[axis],), "S") for axis in order]
    iteration = make_iteration(fresh_name(f"split_{buffer.name}", names), entries, body)
    return (high, low), [*declared_high, *declared_low, iteration]


def _rank(axis: Axis, buffer: SparseBuffer) -> tuple[int, int]:
    """Return the place of an axis in a list where parents come before their children."""
    tree = next(n for n, tree in enumerate(buffer.trees) if axis in tree)
    return tree, len(axis.ancestors)


def _sums(product: _HalvedProduct, split: dict[Var, tuple[Var, Var]]) -> list[tirx.Stmt]:
    """Return the iterations that add the products of halves; the first one initializes the sums."""
    iteration, block = product.iteration, product.iteration.block
    notes = {str(key): value for key, value in block.annotations.items() if key != SPARSE_ITER}
    sums: list[tirx.Stmt] = []
    for name, terms in product.groups:
        variables = {v: Var(str(v.name), v.ty) for v in iteration.vars}

        def half(factor: ir.TensorLoad, part: str, variables: dict[Var, Var] = variables) -> ir.Expr:
            array = split[factor.source][part == "low"]
            return tirx.Cast(WHOLE, tirx.BufferLoad(array, [substitute(i, variables) for i in factor.indices]))

        first, second = product.factors
        products = [half(first, left) * half(second, right) for left, right in terms]
        outside = [substitute(factor, variables) for factor in product.outside]
        at = [substitute(i, variables) for i in product.store.indices]
        before = tirx.BufferLoad(product.store.buffer, at)
        body = tirx.BufferStore(product.store.buffer, before + multiply([*outside, sum(products[1:], products[0])]), at)
        init = substitute(block.init, variables) if block.init is not None and not sums else None
        entries = [_with_vars(entry, variables) for entry in iteration.entries]
        sums.append(make_iteration(name, entries, body, init=init, notes=notes))
    return sums


def _with_vars(entry: Entry, variables: dict[Var, Var]) -> Entry:
    new = tuple(variables[v] for v in entry.vars)
    return Entry(entry.axes, new, entry.kinds, entry.attached_to, entry.merge, entry.hosts)


def check_precision(precision: Any, dtype: str) -> bool:
    """Return whether a program computes by three products; raise for a precision that its dtype does not have."""
    if precision is None:
        return False
    if not isinstance(precision, str) or precision not in PRECISIONS or dtype != WHOLE:
        fault = f"precision: expected None, or 'bf16x3' for float32, got {shown(precision)} for {dtype}"
        raise ArgumentError(f"{fault}. Leave it out for products in the dtype itself.")
    return True


__all__ = ["PRECISIONS", "by_three_products", "check_precision"]
