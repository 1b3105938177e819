# SPDX-License-Identifier: Apache-2.0
"""Calls of the operators as calls of stage-I functions in the module.

before::

    lv = R.sparse.spmm(data, indptr, indices, B)
    gv = R.nn.relu(lv)

after::

    gv = R.call_tir(cls.spmm, (indptr, indices, data, B), out_ty=R.Tensor((m, feat), "float32"))

`LowerSparse` takes elementwise operators that follow into the kernel, and dense matrix products with known weights too.
TVM's own ``LegalizeOps`` does the same call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import tvm
from tvm import ir, relax
from tvm.relax.transform.legalize_ops.common import register_legalize

from sparsetir.compile.target import native_target
from sparsetir.relax import checks, dense
from sparsetir.relax.arguments import Arguments
from sparsetir.relax.constants import Options
from sparsetir.relax.epilogues import Result, is_elementwise, written
from sparsetir.relax.lowered import Head, Lowered, emitted, known, product, same_size
from sparsetir.relax.makers import MAKERS
from sparsetir.relax.operators import OPERATORS, PREFIX, operator_of
from sparsetir.relax.programs import Epilogue


def head_of(call: Any, options: Options, value_of: Callable[[Any], Any] = lambda var: None) -> Head | None:
    """The head that a call is; None if it is no call of ours."""
    operator = operator_of(call)
    if operator is None:
        return dense.head_of(call, options, value_of)
    a = operator.arguments(call)
    out = operator.infer(a)
    if isinstance(out, ir.TupleType):
        return Head(Result((), (), "", ()), lambda _epilogue: MAKERS[operator.name][0](a, [], "", None, options), a)
    shape, maker, axes = list(out.shape.values), *MAKERS[operator.name]
    flat, names = _flattened(operator.name, shape, axes)
    result = Result(tuple(flat), names, str(out.dtype.dtype), tuple(shape))

    def make(epilogue: Epilogue | None) -> Lowered:
        return maker(a, shape, result.dtype if epilogue is None else epilogue.dtype, epilogue, options)

    return Head(result, make, a)


def _flattened(name: str, shape: list[Any], axes: tuple[str, ...]) -> tuple[list[Any], tuple[str, ...]]:
    """The dimensions of a result as its program has them, and their names."""
    if name == "linear" and known(shape[:-1]) and all(int(size) == 1 for size in shape[:-1]):
        return shape[-1:], ("I",)
    if name == "linear":
        return [product(shape[:-1]), shape[-1]], axes
    return shape, axes[: len(shape)] if name.startswith("segment") else axes[max(len(axes) - len(shape), 0) :]


def _checked(builder: relax.BlockBuilder, a: Arguments, seen: dict[Any, Any] | None) -> Any:
    """The row pointers of a call, validated with its index arrays.

    Constants are checked now; with `seen`, what comes at run time, or what its limits are, in each call, once.
    """
    limits = {
        "indices": a.columns,
        "kinds": lambda: a.shape("W")[0],
        "left": lambda: a.shape("X")[0],
        "right": lambda: a.shape("Y")[0],
    }
    bounds = {name: (a[name], limit()) for name, limit in limits.items() if name in a.names}
    count = None if bounds else a.entries()
    arrays = (a["indptr"], *(array for array, _ in bounds.values()))
    numbers = [limit for _, limit in bounds.values()] or [count]
    if checks.is_known(*arrays) and known(numbers):
        held = {name: (array, int(limit)) for name, (array, limit) in bounds.items()}
        checks.check_constants(a.name, a["indptr"], held, None if count is None else int(count))
        return a["indptr"]
    if seen is None:
        return a["indptr"]
    checked = seen.setdefault(arrays, [])  # with the limits: two variables may have one name, so text would not do
    for limits_of, starts in checked:
        if all(map(same_size, limits_of, numbers)):
            return starts
    checked.append((numbers, checks.checked(builder, a.name, a["indptr"], bounds, count)))
    return checked[-1][1]


def lower_call(
    builder: relax.BlockBuilder, head: Head, epilogue: Epilogue | None = None, seen: dict[Any, Any] | None = None
) -> Any:
    """The call of a head's program; with `seen`, structures that come at run time are checked, each once."""
    a = head.arguments
    indptr = _checked(builder, a, seen) if a is not None and "indptr" in a.names else None
    lowered = head.make(epilogue)
    if indptr is not None and "indptr" in lowered.given:
        lowered.given["indptr"] = indptr
    for n, operand in enumerate(epilogue.operands if epilogue is not None else ()):
        lowered.given[f"e{n}_data"] = operand.value
    return lowered.emit(builder)


def register() -> None:
    """Tell TVM's ``LegalizeOps`` how to lower the operators."""
    for name in OPERATORS:
        register_legalize(PREFIX + name, _legalized)


def _legalized(builder: relax.BlockBuilder, call: ir.Call) -> Any:
    head = head_of(call, Options())
    return call if head is None else lower_call(builder, head)


# ------------------------------------------------------------------ the pass


class Uses:
    """What the variables of a function are bound to, and which bindings use them."""

    def __init__(self, func: relax.Function) -> None:
        self.value: dict[Any, Any] = {}
        self.users: dict[Any, list[Any]] = {}

        def note(user: Any, value: Any) -> None:
            relax.analysis.post_order_visit(
                value, lambda e: self.users.setdefault(e, []).append(user) if isinstance(e, relax.Var) else None
            )

        for block in func.body.blocks:
            for binding in block.bindings:
                if binding.value is not None:
                    self.value[binding.var] = binding.value
                    note(binding.var, binding.value)
        note(None, func.body.body)

    def steps(self, var: Any) -> list[tuple[Any, ir.Call]]:
        """The elementwise calls that follow a variable, each the only use of the one before."""
        found: list[tuple[Any, ir.Call]] = []
        while True:
            users = self.users.get(var, [])
            if len(users) != 1 or users[0] is None:
                return found
            call = self.value[users[0]]
            if not is_elementwise(call) or sum(arg.same_as(var) for arg in call.args) != 1:
                return found
            found.append((users[0], call))
            var = users[0]


@relax.expr_functor.mutator
class Lowerer(relax.PyExprMutator):
    """Rewrites the operators of one module."""

    def __init__(self, mod: ir.IRModule, options: Options) -> None:
        super().__init__(mod)
        self.options = options
        self.chains: dict[Any, tuple[Any, ir.Call, list[tuple[Any, ir.Call]]]] = {}
        self.absorbed: set[Any] = set()
        self.values: dict[Any, Any] = {}
        self.seen: dict[Any, Any] = {}

    def run(self, func: relax.Function) -> relax.Function:
        """One function, lowered."""
        uses = Uses(func)
        self.chains, self.absorbed, self.values, self.seen = {}, set(), uses.value, {}
        taken: set[Any] = set()  # a sum of two heads follows both: the first one takes it
        for var, value in uses.value.items():
            head = head_of(value, self.options, self.values.get)
            if head is None or not head.result.axes:
                continue
            free = list(takewhile(lambda step: step[0] not in taken, uses.steps(var)))  # noqa: B023
            _, count = written(head.result, var, free)
            steps = free[:count]
            taken |= {v for v, _ in steps}
            if steps:
                self.absorbed |= {var, *(v for v, _ in steps[:-1])}
                self.chains[steps[-1][0]] = (var, value, steps)
        return self.visit_expr(func)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.absorbed:
            return
        head, epilogue = None, None
        if binding.var in self.chains:
            var, call, steps = self.chains[binding.var]
            head = head_of(self._mapped(call, set()), self.options, self._value)
            kept = {var, *(w for w, _ in steps)}
            if head is not None:
                epilogue, _ = written(head.result, var, [(v, self._mapped(c, kept)) for v, c in steps])
        elif head_of(binding.value, self.options, self._value) is not None:
            head = head_of(self._mapped(binding.value, set()), self.options, self._value)
        if head is None:
            super().visit_var_binding_(binding)
            return
        seen = self.seen if self.options.checked else None
        result = self.builder_.normalize(lower_call(self.builder_, head, epilogue, seen))
        self.set_var_remap(binding.var, emitted(self.builder_, binding.var, result))

    def _value(self, var: Any) -> Any:
        found = self.lookup_binding(var) if isinstance(var, relax.Var) else None
        return self.values.get(var) if found is None else found

    def _mapped(self, call: ir.Call, kept: set[Any]) -> ir.Call:
        args = [arg if arg in kept else self.visit_expr(arg) for arg in call.args]
        new = relax.Call(call.op, args, call.attrs)
        relax.expr._update_type(new, call.ty)
        return new


def LowerSparse(
    target: Any = None,
    database: Any = None,
    *,
    checked: bool = True,
    finite: bool = False,
    asked: list[Any] | None = None,
) -> tvm.transform.Pass:
    """A pass that lowers the operators, with the elementwise operators that follow them.

    Parameters
    ----------
    target : Target, optional
        This machine by default.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`, looked up for constant matrices.
    checked : bool
        Whether structures passed at run time are validated before they are used.
    finite : bool
        Whether operands are promised to hold neither infinities nor NaN.
    asked : list, optional
        Where products with constant matrices are noted.
    """
    chosen = native_target() if target is None else tvm.target.Target(target)
    options = Options(chosen, None if database is None else Path(database), checked, finite, asked)

    @tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.LowerSparse")
    def lower(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        lowerer = Lowerer(mod, options)
        for var, func in mod.functions.items():
            if isinstance(func, relax.Function):
                lowerer.builder_.update_func(var, lowerer.run(func))
        return lowerer.builder_.get()

    return lower


__all__ = ["LowerSparse", "head_of", "lower_call", "register"]
