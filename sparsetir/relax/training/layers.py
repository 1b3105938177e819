# SPDX-License-Identifier: Apache-2.0
"""Training layers (dropout, batch normalization), losses, and update rules of `train_step`, with torch's semantics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from tvm import ir, relax
from tvm.relax.training import optimizer as tvm_optimizers

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.relax.operators import call, reshape
from sparsetir.relax.programs import NamedProgram, OperatorWriter
from sparsetir.utils.arguments import shown

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
    draft = OperatorWriter("dropout")
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

    def visit_call_(self, node: ir.Call) -> Any:
        node = self.visit_expr_post_order(node)
        if node.op != ir.Op.get("relax.nn.dropout"):
            return node
        rate, x = float(node.attrs.rate), node.args[0]
        if not 0 <= rate < 1:
            raise ArgumentError(f"dropout takes a rate from 0 to less than 1, got {rate}")
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
    value = mutator.lookup_binding(first) if isinstance(first, relax.Var) else first
    return isinstance(value, ir.Call) and value.op == ir.Op.get("relax.sparse.dropout")


def with_dropout(func: relax.Function, seed: int) -> relax.Function | None:
    """Add a parameter ``count``, the step count, to a function with dropout; return None if it has no dropout."""
    dropouts: list[Any] = []
    is_dropout = lambda e: isinstance(e, ir.Call) and e.op == ir.Op.get("relax.nn.dropout")  # noqa: E731
    relax.analysis.post_order_visit(func, lambda e: dropouts.append(e) if is_dropout(e) else None)
    if not dropouts:
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
    names: set[str] = set()
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
                    names.update(str(value.name) for value in averages if isinstance(value, relax.Var))

    relax.analysis.post_order_visit(func, visit)
    return [str(p.name) for p in func.params if str(p.name) in names]


def _is_batch_norm(value: Any) -> bool:
    return isinstance(value, ir.Call) and value.op == BATCH_NORM


@relax.expr_functor.mutator
class _Normalised(relax.PyExprMutator):
    """Mutator that replaces TVM's batch normalization by dense operators, and tracks updates of running averages."""

    def __init__(self, mod: ir.IRModule, kept: dict[str, Any]) -> None:
        super().__init__(mod)
        self.kept = kept  # The latest value of each running average, by the name of its parameter.
        self.names: dict[Any, str] = {var: name for name, var in kept.items()}

    def visit_call_(self, node: ir.Call) -> Any:
        node = self.visit_expr_post_order(node)
        if not _is_batch_norm(node):
            return node
        x, attrs, emit = node.args[0], node.attrs, self.builder_.emit
        axis, shape = int(attrs.axis) % x.ty.ndim, [int(n) for n in x.ty.shape.values]
        along = lambda value: emit(reshape(value, [n if d == axis else 1 for d, n in enumerate(shape)]))  # noqa: E731
        olds = [self._followed(node.args[n]) for n in (MEAN, VARIANCE)]
        if attrs.training:
            y, mean, variance = standardised(emit, x, [d for d in range(len(shape)) if d != axis], float(attrs.epsilon))
            news = self._averages(node, olds, mean, variance, math.prod(shape) // shape[axis])
        else:
            mean, variance = map(along, olds)
            y, news = emit(_scaled(emit, emit(op.subtract(x, mean)), variance, float(attrs.epsilon))), olds
        if attrs.scale:
            y = emit(op.multiply(y, along(node.args[1])))
        if attrs.center:
            y = emit(op.add(y, along(node.args[2])))
        return relax.Tuple([y, *news])

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        item = self.visit_expr_post_order(item)
        source = item.tuple_value
        value = self.lookup_binding(source) if isinstance(source, relax.Var) else source
        return value.fields[item.index] if isinstance(value, relax.Tuple) else item

    def _followed(self, value: Any) -> Any:
        """Resolve a variable through its aliases, up to a running average."""
        while isinstance(value, relax.Var) and value not in self.names:
            bound = self.lookup_binding(value)
            if not isinstance(bound, relax.Var):
                break
            value = bound
        return value

    def _averages(self, node: ir.Call, olds: list[Any], mean: Any, variance: Any, count: int) -> list[Any]:
        """Compute the updated running averages, and record them by the names of the parameters that they replace."""
        if count < 2:
            raise ArgumentError(
                f"R.nn.batch_norm of {node.args[0].ty} has one element for each channel: take more rows"
            )
        emit, share, news = self.builder_.emit, float(node.attrs.momentum), []
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
    current: dict[str, Any] = {str(p.name): p for p in func.params if str(p.name) in kept}
    original = dict(current)
    mutator = _Normalised(ir.IRModule({"main": func}), current)
    body = mutator.visit_expr(func).body
    if all(current[name] is original[name] for name in kept):
        return relax.Function(func.params, body, None, func.is_pure, func.attrs)
    builder = relax.BlockBuilder()
    with builder.function("main", list(func.params)):
        with builder.dataflow():
            for binding in (b for block in body.blocks for b in block.bindings):
                builder.emit_normalized(binding)
            outputs = [builder.emit_output(value) for value in (body.body, *(current[name] for name in kept))]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get()["main"]


# Losses of `sparsetir.relax.train_step`, with torch's semantics.


IGNORED = -100  # The label of rows that the loss ignores, as in torch.


@dataclass(frozen=True)
class Loss:
    """A loss function of predictions and a target.

    Parameters
    ----------
    name : str
    write : callable
        Takes the predictions, the target and an emit function; returns a scalar expression.
    is_classes : bool
        Whether the target is a class for each row.
    """

    name: str
    write: Callable[[Any, Any, Callable[[Any], Any]], Any]
    is_classes: bool = False

    def target(self, predictions: Any) -> relax.TensorType:
        """Return the type of the target.

        Raises
        ------
        ArgumentError
            Predictions have no classes.
        """
        shape = list(predictions.shape.values)
        if not self.is_classes:
            return relax.TensorType(shape, predictions.dtype)
        if len(shape) != 2:
            raise ArgumentError(f"cross_entropy takes a model with a row of scores for each sample, got {predictions}")
        return relax.TensorType(shape[:1], "int64")

    def function(self, predictions: Any) -> relax.Function:
        """Return the loss as a Relax function of predictions and a target."""
        builder = relax.BlockBuilder()
        x, target = relax.Var("predictions", predictions), relax.Var("target", self.target(predictions))
        with builder.function("loss", [x, target]):
            with builder.dataflow():
                loss = builder.emit_output(self.write(x, target, builder.emit))
            builder.emit_func_output(loss)
        return builder.get()["loss"]


def _cross_entropy(x: Any, target: Any, emit: Callable[[Any], Any]) -> Any:
    """Return the mean of the negative log-probability of the labels, over rows with a label other than `IGNORED`."""
    dtype, ignored = str(x.ty.dtype.dtype), relax.const(IGNORED, "int64")
    counts = emit(op.astype(op.not_equal(target, ignored), dtype))
    safe = emit(op.where(op.equal(target, ignored), relax.const(0, "int64"), target))
    losses = emit(op.nn.nll_loss(emit(op.nn.log_softmax(x, -1)), safe, reduction="none"))
    return op.sum(losses * counts) / op.maximum(op.sum(counts), relax.const(1.0, dtype))


def _mse(x: Any, target: Any, emit: Callable[[Any], Any]) -> Any:
    error = emit(x - target)
    return op.mean(error * error)


def _l1(x: Any, target: Any, _emit: Callable[[Any], Any]) -> Any:
    return op.mean(op.abs(x - target))


def _binary_cross_entropy(x: Any, target: Any, _emit: Callable[[Any], Any]) -> Any:
    """Return the mean binary cross entropy of scores before the sigmoid."""
    zero, one = (relax.const(n, str(x.ty.dtype.dtype)) for n in (0.0, 1.0))
    return op.mean(op.maximum(x, zero) - x * target + op.log(one + op.exp(op.negative(op.abs(x)))))


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, is_classes=True),
        Loss("binary_cross_entropy", _binary_cross_entropy),
        Loss("mse", _mse),
        Loss("l1", _l1),
    )
}


def loss_of(loss: Any) -> Loss:
    """Return the loss of a name, or wrap a function of predictions and a target of the same shape."""
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]
    if callable(loss) and not isinstance(loss, type):
        return Loss("loss", lambda x, target, _emit: loss(x, target))
    expected = f"one of {', '.join(LOSSES)}, or a function of two Relax expressions"
    raise ArgumentTypeError(f"loss is {expected}, got {shown(loss)}")


def check_classes(target: np.ndarray, classes: int) -> None:
    """Raise unless every label is a class or the label of ignored rows."""
    invalid = target[((target < 0) | (target >= classes)) & (target != IGNORED)]
    if invalid.size:
        limits = f"from 0 to {classes - 1}, or {IGNORED} for rows that do not count"
        raise ArgumentError(f"the target has label {invalid[0]}; expected classes {limits}")


# Optimizers of `sparsetir.relax.train_step`: update rules with torch's semantics.


Emit: TypeAlias = Callable[[Any], Any]


Scalars: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Sgd:
    """``v = momentum * v + g``, ``p -= lr * v``; with `nesterov` ``p -= lr * (g + momentum * v)``."""

    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def scalars(self, lr: float, count: int) -> dict[str, float]:
        """Return the scalars of one step, where `count` is its number from 1 on."""
        return {"lr": lr}

    @property
    def slots(self) -> tuple[str, ...]:
        """Optimizer state of each parameter, zero before the first step."""
        return ("velocity",) if self.momentum else ()

    def update(self, emit: Emit, p: Any, g: Any, slots: list[Any], scalars: Scalars) -> tuple[Any, list[Any]]:
        """Return the parameter and its state after a step."""
        number = _numbers(p)
        if self.weight_decay:
            g = emit(g + number(self.weight_decay) * p)
        if not self.momentum:
            return emit(p - scalars["lr"] * g), []
        velocity = emit(number(self.momentum) * slots[0] + g)
        direction = g + number(self.momentum) * velocity if self.nesterov else velocity
        return emit(p - scalars["lr"] * direction), [velocity]


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015); with `decoupled` weight decay is applied apart from the gradient (AdamW)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    slots = ("first", "second")

    def scalars(self, lr: float, count: int) -> dict[str, float]:
        """Return the scalars of one step, where `count` is its number from 1 on."""
        first, second = (1 - beta**count for beta in self.betas)
        return {"lr": lr, "first_share": first, "second_share": second}

    def update(self, emit: Emit, p: Any, g: Any, slots: list[Any], scalars: Scalars) -> tuple[Any, list[Any]]:
        """Return the parameter and its state after a step."""
        number = _numbers(p)
        if self.weight_decay and self.decoupled:
            p = emit(p * (number(1.0) - scalars["lr"] * number(self.weight_decay)))
        elif self.weight_decay:
            g = emit(g + number(self.weight_decay) * p)
        first = emit(number(self.betas[0]) * slots[0] + number(1 - self.betas[0]) * g)
        second = emit(number(self.betas[1]) * slots[1] + number(1 - self.betas[1]) * g * g)
        deviation = op.sqrt(second / scalars["second_share"]) + number(self.eps)
        return emit(p - scalars["lr"] * (first / scalars["first_share"]) / deviation), [first, second]


Optimizer: TypeAlias = "Sgd | Adam"
NAMED: Mapping[str, Optimizer] = {
    "sgd": Sgd(),
    "momentum": Sgd(momentum=0.9),
    "adam": Adam(),
    "adamw": Adam(weight_decay=0.01, decoupled=True),
}


def _numbers(p: Any) -> Callable[[float], Any]:
    return lambda value: relax.const(value, str(p.ty.dtype.dtype))


def optimizer_of(optimizer: Any, options: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer of a name with its options, or convert one of ``tvm.relax.training``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no such optimizer, or it has no such option.
    """
    base = NAMED.get(optimizer) if isinstance(optimizer, str) else _of_tvm(optimizer)
    if base is None:
        raise ArgumentError(f"optimizer is one of {', '.join(NAMED)}, got {shown(optimizer)}")
    chosen_options = {name: value for name, value in options.items() if value is not None}
    names = [field.name for field in fields(base) if field.name != "decoupled"]
    unknown = next((name for name in chosen_options if name not in names), None)
    if unknown is not None:
        raise ArgumentTypeError(f"{type(base).__name__.lower()} takes {', '.join(names)}, got another option {unknown}")
    return type(base)(**{**{field.name: getattr(base, field.name) for field in fields(base)}, **chosen_options})


def _of_tvm(optimizer: Any) -> Optimizer:
    if isinstance(optimizer, (Sgd, Adam)):
        return optimizer
    if type(optimizer) is tvm_optimizers.SGD:
        return Sgd(optimizer.lr, weight_decay=optimizer.weight_decay)
    if type(optimizer) is tvm_optimizers.Adam:
        return Adam(optimizer.lr, (optimizer.beta1, optimizer.beta2), optimizer.eps, optimizer.weight_decay)
    if type(optimizer) is tvm_optimizers.MomentumSGD and not optimizer.dampening:
        return Sgd(optimizer.lr, optimizer.momentum, optimizer.nesterov, optimizer.weight_decay)
    expected = f"one of {', '.join(NAMED)}, or SGD, MomentumSGD without dampening or Adam of tvm.relax.training"
    raise ArgumentTypeError(f"optimizer is {expected}, got {type(optimizer).__name__}")


__all__ = [
    "GOLDEN",
    "IGNORED",
    "LOSSES",
    "MASK",
    "NAMED",
    "Adam",
    "Loss",
    "Optimizer",
    "Scalars",
    "Sgd",
    "averages",
    "check_classes",
    "loss_of",
    "mixed",
    "optimizer_of",
    "program",
    "standardised",
    "with_batch_norm",
    "with_dropout",
]
