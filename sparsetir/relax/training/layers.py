# SPDX-License-Identifier: Apache-2.0
"""Training layers: dropout, batch normalization."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, relax

from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.relax.operators import call, reshape
from sparsetir.relax.programs import NamedProgram, ProgramWriter

# Dropout in training: the mask is computed from a seed and the step count in both passes, so it is not stored.
#
# before::
#
#     lv = R.nn.dropout(x, rate=0.5)
#     y = lv[0]
#
# after::
#
#     y = R.sparse.dropout(x, count, 0.5, seed)
#
# The gradient is the same call on the gradient of the result.


GOLDEN = 0x9E3779B1
MASK = (1 << 32) - 1


def program(size: Any, dtype: str, rate: float, seed: int) -> NamedProgram:
    """Return the program that scales elements of X by ``1 / (1 - rate)``, or drops them with probability `rate`.

    The decision for an element is a 32-bit hash of its index, the seed and the step count (lowbias32, Wellons 2018).
    """
    draft = ProgramWriter("dropout")
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
    """Return the text of a 32-bit hash in which each bit depends on all bits of the input."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = f"(T.bitwise_xor({bits}, T.shift_right({bits}, T.uint32({shift}))) * T.uint32({factor}))"
    return f"T.bitwise_xor({bits}, T.shift_right({bits}, T.uint32(16)))"


@relax.expr_functor.mutator
class _Dropped(relax.PyExprMutator):
    """Mutator that replaces TVM's dropout by the operator ``R.sparse.dropout``."""

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
    """Add a parameter ``count``, the step count, to a function with dropout; return None if it has no dropout."""
    found: list[Any] = []
    is_dropout = lambda e: isinstance(e, ir.Call) and e.op == ir.Op.get("relax.nn.dropout")  # noqa: E731
    relax.analysis.post_order_visit(func, lambda e: found.append(e) if is_dropout(e) else None)
    if not found:
        return None
    count = relax.Var("count", relax.TensorType([], "int64"))
    func = relax.Function([*func.params, count], func.body, func.ret_ty, func.is_pure, func.attrs)
    mod = ir.IRModule({"main": func})
    return _Dropped(mod, count, seed).visit_expr(func)


# Batch normalization in training: normalize by the mean and variance of the batch, and update running averages.
#
# before::
#
#     lv = R.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, momentum=0.1)
#     return lv[0]
#
# after::
#
#     batch_mean = R.mean(x, axis=[0], keepdims=True)
#     centred = x - batch_mean
#     batch_variance = R.mean(centred * centred, axis=[0], keepdims=True)
#     y = centred * R.rsqrt(batch_variance + epsilon) * gamma + beta
#     return y, 0.9 * mean + 0.1 * batch_mean, 0.9 * variance + 0.1 * batch_variance * n / (n - 1)
#
# The running averages follow torch: the variance that they take is the unbiased one (divided by n - 1). With
# ``training=False`` the running averages normalize and are not updated. Predictions always use the running averages.


op = relax.op
BATCH_NORM = ir.Op.get("relax.nn.batch_norm")
MEAN, VARIANCE = 3, 4  # Positions of the running averages among the arguments; their updates are results 1 and 2.


def averages(func: relax.Function) -> list[str]:
    """Return the parameters that hold running averages of batch normalization in training, in the function's order."""
    found: set[str] = set()
    # Aliases: variables, and results 1 and 2 of normalizations, by the variable that they equal.
    renamed: dict[Any, Any] = {}

    def visit(e: Any) -> None:
        if not isinstance(e, relax.SeqExpr):
            return
        for binding in (b for block in e.blocks for b in block.bindings):
            value = binding.value
            if isinstance(value, relax.Var):
                renamed[binding.var] = renamed.get(value, value)
            elif isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
                renamed[binding.var] = renamed.get((value.tuple_value, int(value.index)), binding.var)
            elif _is_batch_norm(value):
                for n in (1, 2):
                    kept = value.args[MEAN + n - 1]
                    renamed[binding.var, n] = renamed.get(kept, kept)
                if value.attrs.training:
                    averages = (renamed[binding.var, n] for n in (1, 2))
                    found.update(str(value.name) for value in averages if isinstance(value, relax.Var))

    relax.analysis.post_order_visit(func, visit)
    return [str(p.name) for p in func.params if str(p.name) in found]


def _is_batch_norm(value: Any) -> bool:
    return isinstance(value, ir.Call) and value.op == BATCH_NORM


@relax.expr_functor.mutator
class _Normalised(relax.PyExprMutator):
    """Mutator that replaces TVM's batch normalization by dense operators, and tracks updates of running averages."""

    def __init__(self, mod: ir.IRModule, kept: dict[str, Any]) -> None:
        super().__init__(mod)
        self.kept = kept  # The latest value of each running average, by the name of its parameter.
        self.names: dict[Any, str] = {var: name for name, var in kept.items()}

    def visit_call_(self, made: ir.Call) -> Any:
        made = self.visit_expr_post_order(made)
        if not _is_batch_norm(made):
            return made
        x, attrs, emit = made.args[0], made.attrs, self.builder_.emit
        axis, shape = int(attrs.axis) % x.ty.ndim, [int(n) for n in x.ty.shape.values]
        along = lambda value: emit(reshape(value, [n if d == axis else 1 for d, n in enumerate(shape)]))  # noqa: E731
        olds = [self._followed(made.args[n]) for n in (MEAN, VARIANCE)]
        if attrs.training:
            y, mean, variance = standardised(emit, x, [d for d in range(len(shape)) if d != axis], float(attrs.epsilon))
            news = self._averages(made, olds, mean, variance, math.prod(shape) // shape[axis])
        else:
            mean, variance = map(along, olds)
            y, news = emit(_scaled(emit, emit(op.subtract(x, mean)), variance, float(attrs.epsilon))), olds
        if attrs.scale:
            y = emit(op.multiply(y, along(made.args[1])))
        if attrs.center:
            y = emit(op.add(y, along(made.args[2])))
        return relax.Tuple([y, *news])

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        item = self.visit_expr_post_order(item)
        source = item.tuple_value
        made = self.lookup_binding(source) if isinstance(source, relax.Var) else source
        return made.fields[item.index] if isinstance(made, relax.Tuple) else item

    def _followed(self, value: Any) -> Any:
        """Resolve a variable through its aliases, up to a running average."""
        while isinstance(value, relax.Var) and value not in self.names:
            found = self.lookup_binding(value)
            if not isinstance(found, relax.Var):
                break
            value = found
        return value

    def _averages(self, made: ir.Call, olds: list[Any], mean: Any, variance: Any, count: int) -> list[Any]:
        """Compute the updated running averages, and record them by the names of the parameters that they replace."""
        if count < 2:
            raise ArgumentError(
                f"R.nn.batch_norm of {made.args[0].ty} has one element for each channel: take more rows"
            )
        emit, share, news = self.builder_.emit, float(made.attrs.momentum), []
        for old, new, factor in zip(olds, (mean, variance), (share, share * count / (count - 1)), strict=True):
            if old not in self.names:
                raise ArgumentError(
                    "R.nn.batch_norm keeps averages that are no parameters of the model, where nothing can keep them: "
                    "make them parameters with values in params, or pass training=False"
                )
            dtype = str(old.ty.dtype.dtype)
            fresh = emit(op.multiply(emit(reshape(new, old.ty.shape)), relax.const(factor, dtype)))
            news.append(emit(op.add(emit(op.multiply(old, relax.const(1 - share, dtype))), fresh)))
            name = self.names[old]
            self.kept[name], self.names[news[-1]] = news[-1], name
        return news


def standardised(emit: Any, x: Any, axes: list[int], epsilon: float) -> tuple[Any, Any, Any]:
    """Return a tensor normalized to mean 0 and variance 1 along axes, and its mean and variance."""
    mean = emit(op.mean(x, axes, keepdims=True))
    centred = emit(op.subtract(x, mean))
    variance = emit(op.mean(emit(op.multiply(centred, centred)), axes, keepdims=True))
    return emit(_scaled(emit, centred, variance, epsilon)), mean, variance


def _scaled(emit: Any, centred: Any, variance: Any, epsilon: float) -> Any:
    added = emit(op.add(variance, relax.const(epsilon, str(variance.ty.dtype.dtype))))
    return op.multiply(centred, emit(op.rsqrt(added)))


def with_batch_norm(func: relax.Function, kept: list[str]) -> relax.Function:
    """Replace batch normalization in a function by dense operators; updated running averages are further results."""
    held: dict[str, Any] = {str(p.name): p for p in func.params if str(p.name) in kept}
    given = dict(held)
    mutator = _Normalised(ir.IRModule({"main": func}), held)
    body = mutator.visit_expr(func).body
    if all(held[name] is given[name] for name in kept):
        return relax.Function(func.params, body, None, func.is_pure, func.attrs)
    builder = relax.BlockBuilder()
    with builder.function("main", list(func.params)):
        with builder.dataflow():
            for binding in (b for block in body.blocks for b in block.bindings):
                builder.emit_normalized(binding)
            found = [builder.emit_output(value) for value in (body.body, *(held[name] for name in kept))]
        builder.emit_func_output(relax.Tuple(found))
    return builder.get()["main"]


__all__ = ["GOLDEN", "MASK", "averages", "mixed", "program", "standardised", "with_batch_norm", "with_dropout"]
