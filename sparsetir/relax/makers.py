# SPDX-License-Identifier: Apache-2.0
"""What each operator becomes: a call of its program, with the arguments of that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax
from tvm.runtime import DataType

from sparsetir.compile.target import native_target
from sparsetir.relax import backward, dense, dropout, programs, transposition
from sparsetir.relax.arguments import Arguments
from sparsetir.relax.attention import attention
from sparsetir.relax.constants import Options, chosen, csr_of
from sparsetir.relax.gather import grouped, groups_of
from sparsetir.relax.lowered import Lowered, known, product
from sparsetir.relax.operators import ATTENTION_OPERANDS, OPERATORS, REDUCTIONS
from sparsetir.relax.programs import Epilogue, Program
from sparsetir.threads import get_num_threads

Maker = Callable[[Arguments, list[Any], str, "Epilogue | None", Options], Lowered]


def _with_matrix(
    name: str, lowered: Lowered, a: Arguments, shapes: dict[str, list[Any]], columns: Any, options: Options
) -> Lowered:
    """The call with what is known of a constant matrix."""
    matrix = csr_of(a["data"], a["indptr"], a["indices"], int(columns)) if known([columns]) else None
    if matrix is None:
        return lowered
    is_known = all(known(shape) for shape in shapes.values())
    dense = {n: tuple(int(size) for size in shape) for n, shape in shapes.items()} if is_known else {}
    found = chosen(name, lowered.program, matrix, dense, options)
    lowered.func, lowered.fixed = found.func, dict(found.given)
    if found.format is not None:
        for part in ("indptr", "indices", "a_data"):
            if part not in found.given:
                lowered.given.pop(part, None)
    return lowered


def _spmm(a: Arguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: Options) -> Lowered:
    *batch, n, feat = a.shape("B")
    sizes = {"m": out[-2], "n": n, "nnz": a.shape("indices")[0], "feat": feat}
    if batch:
        sizes["batch"] = batch[0]
    program = programs.spmm(sizes, a.dtype("B"), a.dtype("indptr"), epilogue)
    given = {"indptr": a["indptr"], "indices": a["indices"], "a_data": a["data"], "b_data": a["B"]}
    lowered = Lowered(program, given, out, out, dtype)
    return lowered if batch else _with_matrix("spmm", lowered, a, {"B": [n, feat]}, n, options)


def _spmv(a: Arguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: Options) -> Lowered:
    (n,) = a.shape("x")
    sizes = {"m": out[0], "n": n, "nnz": a.shape("indices")[0]}
    program = programs.spmv(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
    given = {"indptr": a["indptr"], "indices": a["indices"], "a_data": a["data"], "x_data": a["x"]}
    return _with_matrix("spmv", Lowered(program, given, out, out, dtype), a, {"X": [n]}, n, options)


def _linear(a: Arguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: Options) -> Lowered:
    *batch, n = a.shape("x")
    rows, m = product(batch), out[-1]
    given = {"indptr": a["indptr"], "indices": a["indices"], "a_data": a["data"]}
    sizes = {"m": m, "n": n, "nnz": a.shape("indices")[0], "batch": rows}
    if known([rows]) and int(rows) == 1:
        program = programs.spmv(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
        lowered = Lowered(program, {**given, "x_data": _reshaped(a["x"], [n])}, [m], out, dtype)
        return _with_matrix("spmv", lowered, a, {"X": [n]}, n, options)
    program = programs.linear(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
    lowered = Lowered(program, {**given, "x_data": _reshaped(a["x"], [rows, n])}, [rows, m], out, dtype)
    return _with_matrix("linear", lowered, a, {"X": [rows, n]}, n, options)


def _sddmm(a: Arguments, out: list[Any], dtype: str, epilogue: Epilogue | None, _options: Options) -> Lowered:
    (m, feat), (n, _) = a.shape("X"), a.shape("Y")
    sizes = {"m": m, "n": n, "nnz": out[0], "feat": feat}
    program = programs.sddmm(sizes, a.dtype("X"), a.dtype("indptr"), epilogue)
    given = {"indptr": a["indptr"], "indices": a["indices"], "s_data": a["data"], "x_data": a["X"], "y_data": a["Y"]}
    return Lowered(program, given, out, out, dtype)


def _softmax(a: Arguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: Options) -> Lowered:
    program = programs.softmax({"m": a.rows(), "nnz": out[0]}, dtype, a.dtype("indptr"))
    return Lowered(program, {"indptr": a["indptr"], "a_data": a["data"]}, out, out, dtype)


def _segments(reduce: str) -> Maker:
    def lower(a: Arguments, out: list[Any], dtype: str, epilogue: Epilogue | None, _options: Options) -> Lowered:
        nnz, *feat = a.shape("x")
        sizes = {"m": out[0], "nnz": nnz, **({"feat": feat[0]} if feat else {})}
        program = programs.segment_reduce(sizes, a.dtype("x"), a.dtype("indptr"), reduce, epilogue)
        return Lowered(program, {"indptr": a["indptr"], "x_data": a["x"]}, out, out, dtype)

    return lower


def _gather(a: Arguments, out: list[Any], dtype: str, epilogue: Epilogue | None, options: Options) -> Lowered:
    (n, _), (kinds, inner, outer) = a.shape("X"), a.shape("W")
    sizes = {"m": out[0], "n": n, "nnz": a.shape("indices")[0], "kinds": kinds, "in": inner, "out": outer}
    structure = {name: a[name] for name in ("indptr", "indices", "kinds")}
    size, bytes_each = dense.tile_height(options.target or native_target()), DataType(a.dtype("X")).itemsize
    groups = groups_of(structure, sizes, bytes_each, size=size, threads=get_num_threads())
    if groups is not None:
        program = grouped(sizes, a.dtype("X"), groups, size, epilogue)
        return Lowered(program, {**groups.arrays, "x_data": a["X"], "w_data": a["W"]}, out, out, dtype)
    program = programs.gather_matmul_scatter(sizes, a.dtype("X"), a.dtype("indptr"), epilogue)
    given = {
        "indptr": a["indptr"],
        "indices": a["indices"],
        "kinds_data": a["kinds"],
        "x_data": a["X"],
        "w_data": a["W"],
    }
    return Lowered(program, given, out, out, dtype)


def _transpose(a: Arguments, _out: list[Any], _dtype: str, _epilogue: Epilogue | None, _options: Options) -> Lowered:
    func, n = transposition.program(a.dtype("indptr")), a.size("n")
    program = Program(func, ("indptr", "indices"), (n,))
    given = {"indptr": a["indptr"], "indices": a["indices"]}
    return Lowered(program, given, [], [], "", several=list(OPERATORS["transpose"].infer(a).fields))


def _segment_expand(a: Arguments, out: list[Any], dtype: str, epilogue: Epilogue | None, _options: Options) -> Lowered:
    nnz, *feat = out
    sizes = {"m": a.shape("x")[0], "nnz": nnz, **({"feat": feat[0]} if feat else {})}
    program = backward.segment_expand(sizes, a.dtype("x"), a.dtype("indptr"), epilogue)
    return Lowered(program, {"indptr": a["indptr"], "x_data": a["x"]}, out, out, dtype)


def _gather_outer(a: Arguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: Options) -> Lowered:
    (n, inner), (others, outer) = a.shape("X"), a.shape("Y")
    sizes = {"m": out[0], "nnz": a.shape("left")[0], "n": n, "others": others, "in": inner, "out": outer}
    program = backward.gather_outer(sizes, dtype, a.dtype("indptr"))
    names = {"left": "left_data", "right": "right_data", "X": "x_data", "Y": "y_data"}
    given = {"indptr": a["indptr"], **{param: a[name] for name, param in names.items()}}
    return Lowered(program, given, out, out, dtype)


def _dropout(a: Arguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: Options) -> Lowered:
    size = product(out)
    program = dropout.program(size, dtype, a.number("rate"), int(a.size("seed")))
    given = {"count_data": relax.op.reshape(a["count"], [1]), "x_data": _reshaped(a["x"], [size])}
    return Lowered(program, given, [size], out, dtype)


def _of_blocks(write: Callable[..., Program], names: tuple[str, ...]) -> Maker:
    """Of an attention under a block-sparse mask, what `write` writes; its operands are split into blocks."""

    def lower(a: Arguments, out: list[Any], dtype: str, _epilogue: Epilogue | None, _options: Options) -> Lowered:
        heads, length, feat = (int(size) for size in a.shape("Q"))
        block = length // (int(a.shape("indptr")[0]) - 1)
        sizes = {"heads": heads, "blocks": length // block, "block": block, "feat": feat}
        sizes |= {"nnz": a.shape("indices")[0], **({"out": int(a.shape("V")[2])} if "V" in a.names else {})}
        split = lambda shape: [heads, length // block, block, *shape[2:]]  # noqa: E731
        program = write(sizes, a.dtype("Q"), a.dtype("indptr"), a.number("scale"))
        given = {f"{name.lower()}_data": _reshaped(a[name], split(a.shape(name))) for name in names}
        return Lowered(program, {"indptr": a["indptr"], "indices": a["indices"], **given}, split(out), out, dtype)

    return lower


def _attention_backward(operand: str) -> Maker:
    names = {"query": ("Q", "K", "V", "G", "lse", "delta"), "key": ("Q", "K", "V", "G", "lse", "delta")}
    write = partial(backward.attention_backward, operand=operand)
    return _of_blocks(write, names.get(operand, ("Q", "K", "G", "lse")))


def _reshaped(value: Any, shape: list[Any]) -> Any:
    return value if len(value.ty.shape.values) == len(shape) else relax.op.reshape(value, shape)


# What an operator becomes, and the names of its result's dimensions, from the last one, if an epilogue may follow.
MAKERS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "spmm": (_spmm, ("L", "I", "K")),
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
    "attention_lse": (_of_blocks(backward.attention_lse, ("Q", "K")), ()),
    **{f"attention_backward_{operand}": (_attention_backward(operand), ()) for operand in ATTENTION_OPERANDS},
}


__all__ = ["MAKERS", "Maker"]
