# SPDX-License-Identifier: Apache-2.0
"""Dropout while a model is trained: a mask that is computed from a seed and the number of the step, not kept.

before::

    lv = R.nn.dropout(x, rate=0.5)
    y = lv[0]

after::

    y = R.sparse.dropout(x, count, 0.5, seed)

Its gradient is the same call on the gradient of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import ir, relax

from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.relax.operators import call
from sparsetir.relax.programs import Draft, Program

GOLDEN = 0x9E3779B1
MASK = (1 << 32) - 1


def program(size: Any, dtype: str, rate: float, seed: int) -> Program:
    """Elements of X, scaled by ``1 / (1 - rate)``, or zero with probability `rate`.

    Whether an element is zero is told by 32 bits that are mixed from its place, the seed and the count
    (lowbias32, Wellons 2018).
    """
    draft = Draft("dropout")
    draft.dense("ONE", 1, "int32")
    draft.dense("I", size, "int32")
    draft.array("COUNT", ("ONE",), "int64")
    draft.array("X", ("I",), dtype)
    draft.array("Y", ("I",), dtype, result=True)
    draft.scratch("key", ("ONE",), "int64")
    first = np.random.SeedSequence(seed).generate_state(1)[0]
    start = f"T.bitwise_and(COUNT[one] * T.int64({GOLDEN}) + T.int64({first}), T.int64({MASK}))"
    key = mixed(f'T.Cast("uint32", {start})')
    draft.iterate(("ONE",), "S", "start", [f'key[one] = T.Cast("int64", {key})'])
    bits = mixed('T.bitwise_xor(T.Cast("uint32", i), T.Cast("uint32", key[0]))')
    kept = f"X[i] * T.{dtype}({1 / (1 - rate)!r})"
    line = f"Y[i] = T.if_then_else({bits} < T.uint32({min(int(rate * 2**32), MASK)}), T.{dtype}(0), {kept})"
    draft.iterate(("I",), "S", "dropout", [line])
    return draft.program()


def mixed(bits: str) -> str:
    """The text of 32 bits, each of which depends on all of those given."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = f"(T.bitwise_xor({bits}, T.shift_right({bits}, T.uint32({shift}))) * T.uint32({factor}))"
    return f"T.bitwise_xor({bits}, T.shift_right({bits}, T.uint32(16)))"


@relax.expr_functor.mutator
class _Dropped(relax.PyExprMutator):
    """Puts the operator in the place of TVM's."""

    def __init__(self, mod: ir.IRModule, count: Any, seed: int) -> None:
        super().__init__(mod)
        self.count, self.seed, self.made = count, seed, 0

    def visit_call_(self, made: ir.Call) -> Any:
        made = self.visit_expr_post_order(made)
        if made.op != ir.Op.get("relax.nn.dropout"):
            return made
        rate, x = float(made.attrs.rate), made.args[0]
        if not 0 <= rate < 1:
            raise ArgumentError(f"dropout takes a rate from 0 to less than 1; found {rate}")
        self.made += 1
        y = call("dropout", x, self.count, rate, self.seed + (self.made << 16))
        return relax.Tuple([self.builder_.emit(y), x])

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        item = self.visit_expr_post_order(item)
        source = self.lookup_binding(item.tuple_value) if isinstance(item.tuple_value, relax.Var) else item.tuple_value
        is_mask = isinstance(source, relax.Tuple) and _is_dropout(self, source) and item.index == 1
        if is_mask:
            raise LoweringError("the mask of R.nn.dropout is not kept in training: use its first result only")
        return item


def _is_dropout(mutator: Any, source: relax.Tuple) -> bool:
    first = source.fields[0]
    made = mutator.lookup_binding(first) if isinstance(first, relax.Var) else first
    return isinstance(made, ir.Call) and made.op == ir.Op.get("relax.sparse.dropout")


def with_dropout(func: relax.Function, seed: int) -> relax.Function | None:
    """The function with one argument more, ``count``, the number of the step; None if it drops nothing."""
    found: list[Any] = []
    is_dropout = lambda e: isinstance(e, ir.Call) and e.op == ir.Op.get("relax.nn.dropout")  # noqa: E731
    relax.analysis.post_order_visit(func, lambda e: found.append(e) if is_dropout(e) else None)
    if not found:
        return None
    count = relax.Var("count", relax.TensorType([], "int64"))
    func = relax.Function([*func.params, count], func.body, func.ret_ty, func.is_pure, func.attrs)
    mod = ir.IRModule({"main": func})
    return _Dropped(mod, count, seed).visit_expr(func)


__all__ = ["GOLDEN", "MASK", "mixed", "program", "with_dropout"]
