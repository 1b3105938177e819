# SPDX-License-Identifier: Apache-2.0
"""The stage-I programs behind the operators, written for the sizes and the epilogue of one call.

Sizes that are known stand in the text as numbers; the others are parameters between the inputs and the result, as
``R.call_tir`` passes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.lower.marks import FREE_SUMS
from sparsetir.script.printer import parse

OPAQUE = 8  # for Relax: nothing is to be fused with it
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Operand:
    """A further tensor of an epilogue: its Relax expression, and the axes of the result that it goes along.

    An axis of extent one is None.
    """

    value: Any
    axes: tuple[str | None, ...]
    dtype: str


@dataclass(frozen=True)
class Epilogue:
    """What is done to every element of a result before it is left: an expression in its text.

    Parameters
    ----------
    text : str
        TVMScript, with ``{0}`` for the element and ``{1}``, ``{2}``, ... for those of the operands.
    dtype : str
        Of the final element.
    operands : tuple of Operand
    """

    text: str
    dtype: str
    operands: tuple[Operand, ...] = ()


@dataclass
class Draft:
    """A program in the making."""

    name: str
    inputs: list[str] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    def size(self, name: str, value: Any) -> str:
        """A size in the text: a number, or a parameter."""
        if isinstance(value, (int, tirx.IntImm)):
            return str(int(value))
        known = next((n for n, v in self.sizes.items() if tvm_ffi.structural_equal(v, value)), name)
        self.sizes[known] = value
        return known

    def dense(self, name: str, extent: Any, idtype: str = "int32", *, is_known: bool = True) -> None:
        """An axis without an index array; one that is not known is a parameter though it is a number."""
        size = f"{name.lower()}_size"
        if is_known:
            size = self.size(size, extent)
        else:
            self.sizes[size] = tirx.const(0, "int64") + extent
        self.lines.append(f'{name} = T.dense_fixed({size}, "{idtype}")')

    def rows(self, name: str, parent: str, length: Any, nnz: Any, idtype: str, *, indices: bool = True) -> None:
        """An axis of rows of any lengths, with an index array or (the first few) without."""
        each = [self.size(name.lower() + "_size", length), self.size(name.lower() + "_nnz", nnz)]
        arrays = ["indptr", "indices"][: 1 + indices]
        self.inputs += arrays
        held = f"({', '.join(arrays)})" if indices else arrays[0]
        kind = "sparse_variable" if indices else "dense_variable"
        self.lines.append(f'{name} = T.{kind}({parent}, ({", ".join(each)}), {held}, "{idtype}")')

    def array(self, name: str, axes: Axes, dtype: str, *, result: bool = False) -> None:
        """A buffer that the caller passes."""
        (self.results if result else self.inputs).append(f"{name.lower()}_data")
        self.lines.append(f'{name} = T.match_sparse_buffer({name.lower()}_data, ({", ".join(axes)},), "{dtype}")')

    def scratch(self, name: str, axes: Axes, dtype: str) -> None:
        """A buffer of its own; of every step of the iteration around it, if there is one."""
        self.lines.append(f'{name} = T.alloc_sparse_buffer(({", ".join(axes)},), "{dtype}")')

    def iterate(
        self,
        axes: Axes,
        kinds: str,
        name: str,
        body: Sequence[str],
        *,
        init: str | None = None,
        is_stored: bool = False,
    ) -> None:
        """An iteration; its variables are the axes in lower case. `is_stored`: only what it visits is initialised."""
        self.lines.append(f'with T.sp_iter([{", ".join(axes)}], "{kinds}", "{name}") as [{", ".join(axes).lower()}]:')
        if is_stored:
            self.lines.append('    T.sp_iter_attr({"init": "stored"})')
        if init is not None:
            self.lines += ["    with T.init():", f"        {init}"]
        self.lines += [f"    {line}" for line in body]

    @contextmanager
    def steps(self, axes: Axes, name: str) -> Iterator[None]:
        """A spatial iteration around what is written inside."""
        outside, self.lines = self.lines, []
        yield
        inside, self.lines = self.lines, outside
        self.iterate(axes, "S" * len(axes), name, inside)

    def finish(self, result: str, axes: Axes, dtype: str, epilogue: Epilogue | None) -> str:
        """Declare a result that an epilogue may follow; the buffer to compute it in."""
        out = epilogue.dtype if epilogue is not None else dtype
        self.array(result, axes, out, result=True)
        if out == dtype:
            return result
        self.scratch(f"{result}_sum", axes, dtype)
        return f"{result}_sum"

    def follow(
        self, result: str, held: str, axes: Axes, epilogue: Epilogue | None, axes_of: Mapping[str, Axes] | None = None
    ) -> None:
        """Write the iteration of an epilogue. `axes_of`: what an axis of the result is made of."""
        if epilogue is None:
            return
        names = [f"{held}[{', '.join(axes).lower()}]", *self.operands(epilogue, axes_of)]
        body = f"{result}[{', '.join(axes).lower()}] = {epilogue.text.format(*names)}"
        self.iterate(axes, "S" * len(axes), "epilogue", [body])

    def operands(self, epilogue: Epilogue, axes_of: Mapping[str, Axes] | None = None) -> list[str]:
        """Declare the operands of an epilogue; their elements. `axes_of`: what an axis of the result is made of."""
        if any(axis is None for operand in epilogue.operands for axis in operand.axes):
            self.lines.append("ONE = T.dense_fixed(1)")
        names = []
        for n, operand in enumerate(epilogue.operands):
            axes = [part for axis in operand.axes for part in (axes_of or {}).get(axis or "", (axis,))]
            self.array(f"E{n}", tuple(axis or "ONE" for axis in axes), operand.dtype)
            names.append(f"E{n}[{', '.join(axis.lower() if axis else '0' for axis in axes)}]")
        return names

    def program(self) -> Program:
        """The finished function."""
        handles = [f"{name}: T.handle" for name in self.inputs]
        sizes = [f"{name}: T.int64" for name in self.sizes]
        results = [f"{name}: T.handle" for name in self.results]
        head = f"@T.prim_func\ndef {self.name}({', '.join(handles + sizes + results)}):"
        attrs = f'T.func_attr({{"op_pattern": {OPAQUE}, "{FREE_SUMS}": True}})'
        func = _parsed("\n    ".join([head, attrs, *self.lines]) + "\n")
        return Program(func, tuple(self.inputs), tuple(self.sizes.values()))


@lru_cache(maxsize=256)
def _parsed(text: str) -> tirx.PrimFunc:
    """The function of a text: layers of a model often differ by their constants only."""
    return parse(text)


@dataclass(frozen=True)
class Program:
    """A function, the names of its input parameters, and the sizes to pass after them."""

    func: tirx.PrimFunc
    inputs: tuple[str, ...]
    sizes: tuple[ir.Expr, ...]


def spmm(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> Program:
    """``C[i, k] = sum_j A[i, j] * B[j, k]``, for each matrix B of a batch if `shape` has one."""
    draft = Draft("spmm")
    outer = ("L",) if "batch" in shape else ()
    if outer:
        draft.dense("L", shape["batch"], idtype)
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.dense("K", shape["feat"], idtype)
    draft.array("A", ("I", "J"), dtype)
    draft.array("B", (*outer, "N", "K"), dtype)
    axes = (*outer, "I", "K")
    held = draft.finish("C", axes, dtype, epilogue)
    place, row = f"{held}[{', '.join(axes).lower()}]", ", ".join((*outer, "J", "K")).lower()
    body = [f"{place} = {place} + A[i, j] * B[{row}]"]
    draft.iterate((*outer, "I", "J", "K"), "S" * len(outer) + "SRS", "spmm", body, init=f"{place} = 0")
    draft.follow("C", held, axes, epilogue)
    return draft.program()


def spmv(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> Program:
    """``y[i] = sum_j A[i, j] * x[j]``."""
    draft = Draft("spmv")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.array("A", ("I", "J"), dtype)
    draft.array("X", ("N",), dtype)
    held = draft.finish("Y", ("I",), dtype, epilogue)
    body = [f"{held}[i] = {held}[i] + A[i, j] * X[j]"]
    draft.iterate(("I", "J"), "SR", "spmv", body, init=f"{held}[i] = 0")
    draft.follow("Y", held, ("I",), epilogue)
    return draft.program()


def linear(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> Program:
    """``Y[b, o] = sum_i A[o, i] * X[b, i]``, rows of X in memory one after the other."""
    draft = Draft("linear")
    draft.dense("O", shape["m"], idtype)
    draft.rows("I", "O", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.dense("B", shape["batch"], idtype)
    draft.array("A", ("O", "I"), dtype)
    draft.array("X", ("B", "N"), dtype)
    held = draft.finish("Y", ("B", "O"), dtype, epilogue)
    body = [f"{held}[b, o] = {held}[b, o] + A[o, i] * X[b, i]"]
    draft.iterate(("O", "I", "B"), "SRS", "linear", body, init=f"{held}[b, o] = 0")
    draft.follow("Y", held, ("B", "O"), epilogue)
    return draft.program()


def sddmm(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> Program:
    """``O[i, j] = S[i, j] * sum_k X[i, k] * Y[j, k]`` at the entries of S."""
    draft = Draft("sddmm")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    draft.dense("N", shape["n"], idtype)
    draft.dense("K", shape["feat"], idtype)
    draft.array("S", ("I", "J"), dtype)
    draft.array("X", ("I", "K"), dtype)
    draft.array("Y", ("N", "K"), dtype)
    held = draft.finish("O", ("I", "J"), dtype, epilogue)
    body = [f"{held}[i, j] = {held}[i, j] + S[i, j] * X[i, k] * Y[j, k]"]
    draft.iterate(("I", "J", "K"), "SSR", "sddmm", body, init=f"{held}[i, j] = 0")
    draft.follow("O", held, ("I", "J"), epilogue)
    return draft.program()


def softmax(shape: dict[str, Any], dtype: str, idtype: str) -> Program:
    """The softmax of every row's entries; a row without any has none."""
    wide = "float64" if dtype == "float64" else "float32"
    draft = Draft("sparse_softmax")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["nnz"], shape["nnz"], idtype, indices=False)
    draft.array("A", ("I", "J"), dtype)
    draft.array("P", ("I", "J"), dtype, result=True)
    draft.scratch("top", ("I",), wide)
    draft.scratch("total", ("I",), wide)
    draft.scratch("power", ("I", "J"), wide)
    value = f'T.Cast("{wide}", A[i, j])'
    draft.iterate(
        ("I", "J"), "SR", "row_max", [f"top[i] = T.max(top[i], {value})"], init=f'top[i] = T.min_value("{wide}")'
    )
    draft.iterate(("I", "J"), "SS", "exponent", [f"power[i, j] = T.exp({value} - top[i])"])
    draft.iterate(("I", "J"), "SR", "row_sum", ["total[i] = total[i] + power[i, j]"], init="total[i] = 0")
    draft.iterate(("I", "J"), "SS", "share", [f'P[i, j] = T.Cast("{dtype}", power[i, j] / total[i])'])
    return draft.program()


def segment_reduce(
    shape: dict[str, Any], dtype: str, idtype: str, reduce: str, epilogue: Epilogue | None = None
) -> Program:
    """The sum, mean, maximum or minimum of the rows of X that belong together; 0 where there are none."""
    draft = Draft(f"segment_{reduce}")
    inner = ("K",) if "feat" in shape else ()
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["nnz"], shape["nnz"], idtype, indices=False)
    if inner:
        draft.dense("K", shape["feat"], idtype)
    draft.array("X", ("I", "J", *inner), dtype)
    axes = ("I", *inner)
    held = draft.finish("Y", axes, dtype, epilogue)
    at = ", ".join(axes).lower()
    y, x = f"{held}[{at}]", f"X[{', '.join(('I', 'J', *inner)).lower()}]"
    step = {"max": f"T.max({y}, {x})", "min": f"T.min({y}, {x})"}.get(reduce, f"{y} + {x}")
    first = {"max": f'T.min_value("{dtype}")', "min": f'T.max_value("{dtype}")'}.get(reduce, "0")
    if reduce != "sum":
        draft.scratch("count", ("I",), "int32")
        draft.iterate(("I", "J"), "SR", "count", ["count[i] = count[i] + 1"], init="count[i] = 0")
    draft.iterate(("I", "J", *inner), "SR" + "S" * len(inner), "reduce", [f"{y} = {step}"], init=f"{y} = {first}")
    if reduce == "mean":
        share = f'{y} / T.Cast("{dtype}", T.max(count[i], 1))'
        draft.iterate(axes, "S" * len(axes), "mean", [f"{y} = {share}"])
    elif reduce != "sum":
        draft.iterate(axes, "S" * len(axes), "empty", [f"{y} = T.if_then_else(count[i] > 0, {y}, T.{dtype}(0))"])
    draft.follow("Y", held, axes, epilogue)
    return draft.program()


def gather_matmul_scatter(shape: dict[str, Any], dtype: str, idtype: str, epilogue: Epilogue | None = None) -> Program:
    """``Y[i, d] = sum_jc X[j, c] * W[kind[i, j], c, d]`` over the entries j of row i."""
    draft = Draft("gather_matmul_scatter")
    draft.dense("I", shape["m"], idtype)
    draft.rows("J", "I", shape["n"], shape["nnz"], idtype)
    for name, size in (("N", "n"), ("R", "kinds"), ("C", "in"), ("D", "out")):
        draft.dense(name, shape[size], idtype)
    draft.array("X", ("N", "C"), dtype)
    draft.array("W", ("R", "C", "D"), dtype)
    draft.array("kinds", ("I", "J"), idtype)
    held = draft.finish("Y", ("I", "D"), dtype, epilogue)
    body = [f"{held}[i, d] = {held}[i, d] + X[j, c] * W[kinds[i, j], c, d]"]
    draft.iterate(("I", "J", "C", "D"), "SRRS", "gather_matmul_scatter", body, init=f"{held}[i, d] = 0")
    draft.follow("Y", held, ("I", "D"), epilogue)
    return draft.program()


def matmul(shape: dict[str, Any], dtype: str, rows: int, epilogue: Epilogue | None = None, panel: int = 0) -> Program:
    """``C[i, k] = sum_j A[i, j] * B[j, k]`` of dense matrices, `rows` rows of A at a time.

    With a `panel`, which divides the columns, B comes as panels of that many, ``B[k // panel, j, k % panel]``; C and
    what the epilogue needs have their columns in two dimensions, ``C[i, k // panel, k % panel]``.
    """
    draft = Draft("matmul")
    columns: Axes = ("KO", "KI") if panel else ("K",)
    draft.dense("IO", _pieces(shape["m"], rows), is_known=not panel)  # not to be taken for a few rows to unroll
    for name, extent in (("II", rows), ("I", shape["m"]), ("J", shape["n"])):
        draft.dense(name, extent)
    for name, extent in zip(
        columns, (_pieces(shape["feat"], panel), panel) if panel else (shape["feat"],), strict=True
    ):
        draft.dense(name, extent)
    draft.array("A", ("I", "J"), dtype)
    draft.array("B", (*columns[:-1], "J", columns[-1]), dtype)
    held = draft.finish("C", ("I", *columns), dtype, epilogue)
    row, at = f"io * {rows} + ii", ", ".join(columns).lower()
    factor = ", ".join((*columns[:-1], "J", columns[-1])).lower()
    body = [f"{held}[{row}, {at}] = {held}[{row}, {at}] + A[{row}, j] * B[{factor}]"]
    axes = (*columns[:-1], "IO", "II", "J", columns[-1])
    kinds = "S" * (len(columns) - 1) + "SSRS"
    draft.iterate(axes, kinds, "matmul", body, init=f"{held}[{row}, {at}] = 0")
    draft.follow("C", held, ("I", *columns), epilogue)
    return draft.program()


def gemv(shape: dict[str, Any], dtype: str, epilogue: Epilogue | None = None) -> Program:
    """``Y[i] = sum_j A[i, j] * X[j]`` of a dense matrix and a vector."""
    draft = Draft("gemv")
    draft.dense("I", shape["m"])
    draft.dense("J", shape["n"])
    draft.array("A", ("I", "J"), dtype)
    draft.array("X", ("J",), dtype)
    held = draft.finish("Y", ("I",), dtype, epilogue)
    draft.iterate(("I", "J"), "SR", "gemv", [f"{held}[i] = {held}[i] + A[i, j] * X[j]"], init=f"{held}[i] = 0")
    draft.follow("Y", held, ("I",), epilogue)
    return draft.program()


def _pieces(extent: Any, size: int) -> Any:
    """How many pieces of a size there are."""
    if isinstance(extent, (int, tirx.IntImm)):
        return -(-int(extent) // size)
    return tirx.floordiv(extent + (size - 1), tirx.const(size, "int64"))


__all__ = [
    "Draft",
    "Epilogue",
    "Operand",
    "Program",
    "gather_matmul_scatter",
    "gemv",
    "linear",
    "matmul",
    "sddmm",
    "segment_reduce",
    "softmax",
    "spmm",
    "spmv",
]
