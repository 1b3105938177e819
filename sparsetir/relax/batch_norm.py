# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation while a model is trained: by the batch's own mean and variance, of which averages are kept.

before::

    lv = R.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, momentum=0.1)
    return lv[0]

after::

    batch_mean = R.mean(x, axis=[0], keepdims=True)
    centred = x - batch_mean
    batch_variance = R.mean(centred * centred, axis=[0], keepdims=True)
    y = centred * R.rsqrt(batch_variance + epsilon) * gamma + beta
    return y, 0.9 * mean + 0.1 * batch_mean, 0.9 * variance + 0.1 * batch_variance * n / (n - 1)

The averages are torch's: variances are divided by one less than there are elements. With ``training=False`` the
averages normalise, and stay. Predictions are always made with the averages.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import ir, relax

from sparsetir.errors import ArgumentError

op = relax.op
BATCH_NORM = ir.Op.get("relax.nn.batch_norm")
MEAN, VARIANCE = 3, 4  # the arguments that are averages, results 1 and 2


def averages(func: relax.Function) -> list[str]:
    """The parameters that batch normalisations in training keep averages in, in the order of the function."""
    found: set[str] = set()
    renamed: dict[Any, Any] = {}  # variables, and results 1 and 2 of normalisations, by what they stand for

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
                    found.update(str(renamed[binding.var, n].name) for n in (1, 2) if _is_var(renamed[binding.var, n]))

    relax.analysis.post_order_visit(func, visit)
    return [str(p.name) for p in func.params if str(p.name) in found]


def _is_var(value: Any) -> bool:
    return isinstance(value, relax.Var)


def _is_batch_norm(value: Any) -> bool:
    return isinstance(value, ir.Call) and value.op == BATCH_NORM


@relax.expr_functor.mutator
class _Normalised(relax.PyExprMutator):
    """Puts dense operators in the place of TVM's, and follows the averages."""

    def __init__(self, mod: ir.IRModule, kept: dict[str, Any]) -> None:
        super().__init__(mod)
        self.kept = kept  # the newest values by the names of parameters
        self.names: dict[Any, str] = {var: name for name, var in kept.items()}

    def visit_call_(self, made: ir.Call) -> Any:
        made = self.visit_expr_post_order(made)
        if not _is_batch_norm(made):
            return made
        x, attrs, emit = made.args[0], made.attrs, self.builder_.emit
        axis, shape = int(attrs.axis) % x.ty.ndim, [int(n) for n in x.ty.shape.values]
        along = lambda value: emit(op.reshape(value, [n if d == axis else 1 for d, n in enumerate(shape)]))  # noqa: E731
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
        """What a variable stands for."""
        while isinstance(value, relax.Var) and value not in self.names:
            found = self.lookup_binding(value)
            if not isinstance(found, relax.Var):
                break
            value = found
        return value

    def _averages(self, made: ir.Call, olds: list[Any], mean: Any, variance: Any, count: int) -> list[Any]:
        """The new averages, noted by the names of the parameters that they replace."""
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
            fresh = emit(op.multiply(emit(op.reshape(new, old.ty.shape)), relax.const(factor, dtype)))
            news.append(emit(op.add(emit(op.multiply(old, relax.const(1 - share, dtype))), fresh)))
            name = self.names[old]
            self.kept[name], self.names[news[-1]] = news[-1], name
        return news


def standardised(emit: Any, x: Any, axes: list[int], epsilon: float) -> tuple[Any, Any, Any]:
    """A tensor whose mean along axes is 0, and whose variance is 1; and what these were."""
    mean = emit(op.mean(x, axes, keepdims=True))
    centred = emit(op.subtract(x, mean))
    variance = emit(op.mean(emit(op.multiply(centred, centred)), axes, keepdims=True))
    return emit(_scaled(emit, centred, variance, epsilon)), mean, variance


def _scaled(emit: Any, centred: Any, variance: Any, epsilon: float) -> Any:
    added = emit(op.add(variance, relax.const(epsilon, str(variance.ty.dtype.dtype))))
    return op.multiply(centred, emit(op.rsqrt(added)))


def with_batch_norm(func: relax.Function, kept: list[str]) -> relax.Function:
    """The function with dense operators in the places of batch normalisations, and new averages as further results."""
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


__all__ = ["averages", "standardised", "with_batch_norm"]
