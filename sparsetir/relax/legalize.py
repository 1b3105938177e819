# SPDX-License-Identifier: Apache-2.0
"""Legalization of the operators: each call becomes a call of a stage-I function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

import tvm
from tvm import ir, relax
from tvm.relax.transform.legalize_ops.common import register_legalize
from tvm.runtime import DataType

from sparsetir.codegen.target import cpu_target, native_target
from sparsetir.errors import ArgumentTypeError
from sparsetir.ir.halves import by_three_products
from sparsetir.relax import dense, programs, structures
from sparsetir.relax.epilogues import (
    EpilogueResult,
    Head,
    Lowered,
    emitted,
    is_elementwise,
    known,
    product,
    same_size,
    written,
)
from sparsetir.relax.operators import (
    ATTENTION_OPERANDS,
    OPERATORS,
    PREFIX,
    REDUCTIONS,
    OperatorArguments,
    operator_of,
    reshape,
)
from sparsetir.relax.programs import Epilogue, NamedProgram, attention, grouped, groups_of
from sparsetir.relax.structures import BuildOptions, chosen, csr_of
from sparsetir.relax.training import layers
from sparsetir.utils.arguments import as_flag, as_path, renamed_parameters, shown
from sparsetir.utils.threads import get_num_threads

# Lowering rules: the program of each operator, and the arguments of its call.


Maker = Callable[[OperatorArguments, list[Any], str, "Epilogue | None", BuildOptions], Lowered]


def _with_matrix(
    name: str, lowered: Lowered, a: OperatorArguments, shapes: dict[str, list[Any]], columns: Any, options: BuildOptions
) -> Lowered:
    """Specialize a call for its matrix if that is a constant: choose the format, and bind the arrays that are known."""
    matrix = csr_of(a["data"], a["indptr"], a["indices"], int(columns)) if known([columns]) else None
    if matrix is None:
        return lowered
    is_known = all(known(shape) for shape in shapes.values())
    of_operands = {n: tuple(int(size) for size in shape) for n, shape in shapes.items()} if is_known else {}
    choice = chosen(name, lowered.program, matrix, of_operands, options)
    lowered.func, lowered.fixed = choice.func, dict(choice.given)
    if choice.format is not None:
        for part in ("indptr", "indices", "a_data"):
            if part not in choice.given:
                lowered.given.pop(part, None)
    return lowered


def _arrays(a: OperatorArguments) -> dict[str, Any]:
    """Return the arrays of the matrix of a call by the names of parameters of its program."""
    return {"indptr": a["indptr"], "indices": a["indices"], "a_data": a["data"]}


def _matrix_product(
    a: OperatorArguments,
    out: list[Any],
    dtype: str,
    program_of: Callable[[dict[str, Any]], NamedProgram],
    options: BuildOptions,
) -> Lowered:
    """Lower a product with a dense matrix, or with each of a batch, whose program is a function of the sizes."""
    *batch, n, feat = a.shape("B")
    sizes = {"m": out[-2], "n": n, "nnz": a.shape("indices")[0], "feat": feat}
    if batch:
        sizes["batch"] = batch[0]
    lowered = Lowered(program_of(sizes), {**_arrays(a), "b_data": a["B"]}, out, out, dtype)
    return lowered if batch else _with_matrix("spmm", lowered, a, {"B": [n, feat]}, n, options)


def _spmm(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: BuildOptions
) -> Lowered:
    program_of = partial(programs.spmm, dtype=a.dtype("B"), idtype=a.dtype("indptr"), epilogue=epilogue)
    return _matrix_product(a, out, dtype, program_of, options)


def _untuned(options: BuildOptions) -> BuildOptions:
    """Return options without records, which are of products whose operands and sums have one dtype."""
    return dataclasses.replace(options, asked=None, database=None)


def _spmm_bf16x3(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: BuildOptions
) -> Lowered:
    def program_of(sizes: dict[str, Any]) -> NamedProgram:
        whole = programs.spmm(sizes, "float32", a.dtype("indptr"), epilogue)
        return dataclasses.replace(whole, func=by_three_products(whole.func))

    return _matrix_product(a, out, dtype, program_of, _untuned(options))


def _spmm_int32(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: BuildOptions
) -> Lowered:
    def program_of(sizes: dict[str, Any]) -> NamedProgram:
        return programs.spmm(sizes, a.dtype("data"), a.dtype("indptr"), epilogue, a.dtype("B"))

    return _matrix_product(a, out, dtype, program_of, _untuned(options))


def _spmv(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: BuildOptions
) -> Lowered:
    (n,) = a.shape("x")
    sizes = {"m": out[0], "n": n, "nnz": a.shape("indices")[0]}
    program = programs.spmv(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
    operands = {**_arrays(a), "x_data": a["x"]}
    return _with_matrix("spmv", Lowered(program, operands, out, out, dtype), a, {"X": [n]}, n, options)


def _linear(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: BuildOptions
) -> Lowered:
    *batch, n = a.shape("x")
    rows, m = product(batch), out[-1]
    sizes = {"m": m, "n": n, "nnz": a.shape("indices")[0], "batch": rows}
    if known([rows]) and int(rows) == 1:
        program = programs.spmv(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
        lowered = Lowered(program, {**_arrays(a), "x_data": _reshaped(a["x"], [n])}, [m], out, dtype)
        return _with_matrix("spmv", lowered, a, {"X": [n]}, n, options)
    program = programs.linear(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
    lowered = Lowered(program, {**_arrays(a), "x_data": _reshaped(a["x"], [rows, n])}, [rows, m], out, dtype)
    return _with_matrix("linear", lowered, a, {"X": [rows, n]}, n, options)


def _sddmm(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, _options: BuildOptions
) -> Lowered:
    (m, feat), (n, _) = a.shape("X"), a.shape("Y")
    sizes = {"m": m, "n": n, "nnz": out[0], "feat": feat}
    program = programs.sddmm(sizes, a.dtype("X"), a.dtype("indptr"), epilogue)
    operands = {"indptr": a["indptr"], "indices": a["indices"], "s_data": a["data"], "x_data": a["X"], "y_data": a["Y"]}
    return Lowered(program, operands, out, out, dtype)


def _softmax(
    a: OperatorArguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: BuildOptions
) -> Lowered:
    program = programs.softmax({"m": a.rows(), "nnz": out[0]}, dtype, a.dtype("indptr"))
    return Lowered(program, {"indptr": a["indptr"], "a_data": a["data"]}, out, out, dtype)


def _segments(reduce: str) -> Maker:
    def lower(
        a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, _options: BuildOptions
    ) -> Lowered:
        nnz, *feat = a.shape("x")
        sizes = {"m": out[0], "nnz": nnz, **({"feat": feat[0]} if feat else {})}
        program = programs.segment_reduce(sizes, a.dtype("x"), a.dtype("indptr"), reduce, epilogue)
        return Lowered(program, {"indptr": a["indptr"], "x_data": a["x"]}, out, out, dtype)

    return lower


def _gather(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: BuildOptions
) -> Lowered:
    (n, _), (kinds, inner, outer) = a.shape("X"), a.shape("W")
    sizes = {"m": out[0], "n": n, "nnz": a.shape("indices")[0], "kinds": kinds, "in": inner, "out": outer}
    structure = {name: a[name] for name in ("indptr", "indices", "kinds")}
    size, bytes_each = dense.tile_height(options.target or native_target()), DataType(a.dtype("X")).itemsize
    groups = groups_of(structure, sizes, bytes_each, size=size, threads=get_num_threads())
    if groups is not None:
        program = grouped(sizes, a.dtype("X"), groups, size, epilogue)
        return Lowered(program, {**groups.arrays, "x_data": a["X"], "w_data": a["W"]}, out, out, dtype)
    program = programs.gather_matmul_scatter(sizes, a.dtype("X"), a.dtype("indptr"), epilogue)
    names = {"indptr": "indptr", "indices": "indices", "kinds": "kinds_data", "X": "x_data", "W": "w_data"}
    return Lowered(program, {param: a[name] for name, param in names.items()}, out, out, dtype)


def _transpose(
    a: OperatorArguments, _out: list[Any], _dtype: str, _epilogue: Epilogue | None, _options: BuildOptions
) -> Lowered:
    func, n = structures.program(a.dtype("indptr")), a.size("n")
    program = NamedProgram(func, ("indptr", "indices"), (n,))
    operands = {"indptr": a["indptr"], "indices": a["indices"]}
    return Lowered(program, operands, [], [], "", several=list(OPERATORS["transpose"].infer(a).fields))


def _segment_expand(
    a: OperatorArguments, out: list[Any], dtype: str, epilogue: Epilogue | None, _options: BuildOptions
) -> Lowered:
    nnz, *feat = out
    sizes = {"m": a.shape("x")[0], "nnz": nnz, **({"feat": feat[0]} if feat else {})}
    program = programs.segment_expand(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
    return Lowered(program, {"indptr": a["indptr"], "x_data": a["x"]}, out, out, dtype)


def _gather_outer(
    a: OperatorArguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: BuildOptions
) -> Lowered:
    (n, inner), (columns, outer) = a.shape("X"), a.shape("Y")
    sizes = {"m": out[0], "nnz": a.shape("left")[0], "n": n, "others": columns, "in": inner, "out": outer}
    program = programs.gather_outer(sizes, dtype, a.dtype("indptr"))
    names = {"left": "left_data", "right": "right_data", "X": "x_data", "Y": "y_data"}
    operands = {"indptr": a["indptr"], **{param: a[name] for name, param in names.items()}}
    return Lowered(program, operands, out, out, dtype)


def _dropout(
    a: OperatorArguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: BuildOptions
) -> Lowered:
    size = product(out)
    program = layers.program(size, dtype, a.number("rate"), int(a.size("seed")))
    operands = {"count_data": reshape(a["count"], [1]), "x_data": _reshaped(a["x"], [size])}
    return Lowered(program, operands, [size], out, dtype)


def _of_blocks(write: Callable[..., NamedProgram], names: tuple[str, ...]) -> Maker:
    """Return the rule of a block-sparse attention whose program is `write`; its operands are split into blocks."""

    def lower(
        a: OperatorArguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: BuildOptions
    ) -> Lowered:
        heads, length, feat = (int(size) for size in a.shape("Q"))
        block = length // (int(a.shape("indptr")[0]) - 1)
        sizes = {"heads": heads, "blocks": length // block, "block": block, "feat": feat}
        sizes |= {"nnz": a.shape("indices")[0], **({"out": int(a.shape("V")[2])} if "V" in a.names else {})}
        split = lambda shape: [heads, length // block, block, *shape[2:]]  # noqa: E731
        program = write(sizes, a.dtype("Q"), a.dtype("indptr"), a.number("scale"))
        operands = {f"{name.lower()}_data": _reshaped(a[name], split(a.shape(name))) for name in names}
        return Lowered(program, {"indptr": a["indptr"], "indices": a["indices"], **operands}, split(out), out, dtype)

    return lower


def _attention_backward(operand: str) -> Maker:
    names = ("Q", "K", "V", "G", "lse", "delta") if operand in ("query", "key") else ("Q", "K", "G", "lse")
    return _of_blocks(partial(programs.attention_backward, operand=operand), names)


def _reshaped(value: Any, shape: list[Any]) -> Any:
    return value if len(value.ty.shape.values) == len(shape) else reshape(value, shape)


# The lowering rule of each operator, and the names of the result's last dimensions if an epilogue may follow.
MAKERS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "spmm": (_spmm, ("L", "I", "K")),
    "spmm_bf16x3": (_spmm_bf16x3, ("I", "K")),
    "spmm_int32": (_spmm_int32, ("L", "I", "K")),
    "spmv": (_spmv, ("I",)),
    "linear": (_linear, ("B", "O")),
    "sddmm": (_sddmm, ()),
    "softmax": (_softmax, ()),
    **{f"segment_{kind}": (_segments(kind), ("I", "K")) for kind in REDUCTIONS},
    "gather_matmul_scatter": (_gather, ("I", "D")),
    "attention": (_of_blocks(attention, ("Q", "K", "V")), ()),
    "transpose": (_transpose, ()),
    "segment_expand": (_segment_expand, ("E", "K")),
    "gather_outer": (_gather_outer, ()),
    "dropout": (_dropout, ()),
    "attention_lse": (_of_blocks(programs.attention_lse, ("Q", "K")), ()),
    **{f"attention_backward_{operand}": (_attention_backward(operand), ()) for operand in ATTENTION_OPERANDS},
}


# Lowering of calls of the operators to calls of stage-I functions in the module.
#
# before::
#
#     lv = R.sparse.spmm(data, indptr, indices, B)
#     gv = R.nn.relu(lv)
#
# after::
#
#     gv = R.call_tir(cls.spmm, (indptr, indices, data, B), out_ty=R.Tensor((m, feat), "float32"))
#
# `LowerSparse` fuses elementwise operators that follow into the kernel, and lowers dense matrix products of known
# sizes, too. TVM's own ``LegalizeOps`` lowers call by call, without fusion.


def head_of(call: Any, options: BuildOptions, value_of: Callable[[Any], Any] = lambda var: None) -> Head | None:
    """Return the head of a fusion that a call is; None if the call is no operator and no supported dense product."""
    operator = operator_of(call)
    if operator is None:
        return dense.head_of(call, options, value_of)
    a = operator.arguments(call)
    out = operator.infer(a)
    if isinstance(out, ir.TupleType):
        return Head(
            EpilogueResult((), (), "", ()), lambda _epilogue: MAKERS[operator.name][0](a, [], "", None, options), a
        )
    shape, maker, axes = list(out.shape.values), *MAKERS[operator.name]
    flat, names = _flattened(operator.name, shape, axes)
    result = EpilogueResult(tuple(flat), names, str(out.dtype.dtype), tuple(shape))

    def make(epilogue: Epilogue | None) -> Lowered:
        return maker(a, shape, result.dtype if epilogue is None else epilogue.dtype, epilogue, options)

    return Head(result, make, a)


def _flattened(name: str, shape: list[Any], axes: tuple[str, ...]) -> tuple[list[Any], tuple[str, ...]]:
    """Return the dimensions of a result as its program has them, and their names."""
    if name == "linear" and known(shape[:-1]) and all(int(size) == 1 for size in shape[:-1]):
        return shape[-1:], ("I",)
    if name == "linear":
        return [product(shape[:-1]), shape[-1]], axes
    return shape, axes[: len(shape)] if name.startswith("segment") else axes[max(len(axes) - len(shape), 0) :]


def _checked(builder: relax.BlockBuilder, a: OperatorArguments, validated: dict[Any, Any] | None) -> Any:
    """Return the row pointers of a call after validation with its index arrays.

    Constants are validated now. With `validated`, arrays and limits that are known at run time are validated in each
    call, once for all operators that share them.
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
    if structures.is_known(*arrays) and known(numbers):
        constants = {name: (array, int(limit)) for name, (array, limit) in bounds.items()}
        structures.check_constants(a.name, a["indptr"], constants, None if count is None else int(count))
        return a["indptr"]
    if validated is None:
        return a["indptr"]
    # Limits are compared structurally, because two variables may have the same name.
    earlier = validated.setdefault(arrays, [])
    for limits_of, starts in earlier:
        if all(map(same_size, limits_of, numbers)):
            return starts
    earlier.append((numbers, structures.checked(builder, a.name, a["indptr"], bounds, count)))
    return earlier[-1][1]


def lower_call(
    builder: relax.BlockBuilder, head: Head, epilogue: Epilogue | None = None, seen: dict[Any, Any] | None = None
) -> Any:
    """Emit the call of a head's program; with `seen`, structures that come at run time are validated, each once."""
    a = head.arguments
    indptr = _checked(builder, a, seen) if a is not None and "indptr" in a.names else None
    lowered = head.make(epilogue)
    if indptr is not None and "indptr" in lowered.given:
        lowered.given["indptr"] = indptr
    for n, operand in enumerate(epilogue.operands if epilogue is not None else ()):
        lowered.given[f"e{n}_data"] = operand.value
    return lowered.emit(builder)


def register() -> None:
    """Register the lowering of the operators with TVM's ``LegalizeOps``."""
    for name in OPERATORS:
        register_legalize(PREFIX + name, _legalized)


def _legalized(builder: relax.BlockBuilder, call: ir.Call) -> Any:
    head = head_of(call, BuildOptions())
    return call if head is None else lower_call(builder, head)


# ------------------------------------------------------------------ the pass


class Uses:
    """Def-use chains of a function: the value of each variable, and the variables that use it."""

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
        """Return the chain of elementwise calls that follow a variable, each the only use of the one before."""
        chain: list[tuple[Any, ir.Call]] = []
        while True:
            users = self.users.get(var, [])
            if len(users) != 1 or users[0] is None:
                return chain
            call = self.value[users[0]]
            if not is_elementwise(call) or sum(arg.same_as(var) for arg in call.args) != 1:
                return chain
            chain.append((users[0], call))
            var = users[0]


@relax.expr_functor.mutator
class Lowerer(relax.PyExprMutator):
    """Mutator that lowers the operators of one module."""

    def __init__(self, mod: ir.IRModule, options: BuildOptions) -> None:
        super().__init__(mod)
        self.options = options
        self.chains: dict[Any, tuple[Any, ir.Call, list[tuple[Any, ir.Call]]]] = {}
        self.absorbed: set[Any] = set()
        self.values: dict[Any, Any] = {}
        self.seen: dict[Any, Any] = {}

    def run(self, func: relax.Function) -> relax.Function:
        """Lower a function."""
        uses = Uses(func)
        self.chains, self.absorbed, self.values, self.seen = {}, set(), uses.value, {}
        fused: set[Any] = set()  # A sum of two heads may follow either: the first head takes it.
        for var, value in uses.value.items():
            head = head_of(value, self.options, self.values.get)
            if head is None or not head.result.axes:
                continue
            free = list(takewhile(lambda step: step[0] not in fused, uses.steps(var)))  # noqa: B023
            _, count = written(head.result, var, free)
            steps = free[:count]
            fused |= {v for v, _ in steps}
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
            fused = {var, *(w for w, _ in steps)}
            if head is not None:
                epilogue, _ = written(head.result, var, [(v, self._mapped(c, fused)) for v, c in steps])
        elif head_of(binding.value, self.options, self._value) is not None:
            head = head_of(self._mapped(binding.value, set()), self.options, self._value)
        if head is None:
            super().visit_var_binding_(binding)
            return
        validated = self.seen if self.options.checked else None
        result = self.builder_.normalize(lower_call(self.builder_, head, epilogue, validated))
        self.set_var_remap(binding.var, emitted(self.builder_, binding.var, result))

    def _value(self, var: Any) -> Any:
        value = self.lookup_binding(var) if isinstance(var, relax.Var) else None
        return self.values.get(var) if value is None else value

    def _mapped(self, call: ir.Call, fused: set[Any]) -> ir.Call:
        args = [arg if arg in fused else self.visit_expr(arg) for arg in call.args]
        new = relax.Call(call.op, args, call.attrs)
        relax.expr._update_type(new, call.ty)
        return new


@renamed_parameters(finite="assume_finite")
def LowerSparse(
    target: Any = None,
    database: Any = None,
    *,
    checked: bool = True,
    assume_finite: bool = False,
    asked: list[Any] | None = None,
) -> tvm.transform.Pass:
    """Return a pass that lowers the operators, with the elementwise operators that follow them.

    Parameters
    ----------
    target : Target, optional
        This machine by default.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`, looked up for constant matrices.
    checked : bool
        Whether structures passed at run time are validated before they are used.
    assume_finite : bool
        Whether operands are promised to hold neither infinities nor NaN.
    asked : list, optional
        Records products with constant matrices.
    """
    cpu = cpu_target(target, "models")
    path = None if database is None else as_path(database, "database", "the path of a file of records")
    if asked is not None and not isinstance(asked, list):
        raise ArgumentTypeError(f"asked: expected a list to append to, got {shown(asked)}. Pass an empty one.")
    flags = as_flag(checked, "checked"), as_flag(assume_finite, "assume_finite")
    return _Lowering(BuildOptions(cpu, path, *flags, asked))


def takes_modules(kind: type) -> type:
    """Let a class of passes refuse arguments that are no modules: TVM's own error does not name the argument."""

    def call(self: Any, mod: Any) -> Any:
        if not isinstance(mod, ir.IRModule):
            raise ArgumentTypeError(f"mod: expected an IRModule, got {shown(mod)}. Pass a module of Relax functions.")
        return tvm.transform.Pass.__call__(self, mod)

    kind.__call__ = call  # type: ignore[method-assign]
    return kind


@takes_modules
@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.LowerSparse")
class _Lowering:
    """The pass that `LowerSparse` makes."""

    def __init__(self, options: BuildOptions) -> None:
        self.options = options

    def transform_module(self, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        """Return the module with operators lowered."""
        lowerer = Lowerer(mod, self.options)
        for var, func in mod.functions.items():
            if isinstance(func, relax.Function):
                lowerer.builder_.update_func(var, lowerer.run(func))
        return lowerer.builder_.get()


__all__ = ["MAKERS", "LowerSparse", "Maker", "head_of", "lower_call", "register", "takes_modules"]
