# SPDX-License-Identifier: Apache-2.0
"""Random axes trees, patterns, sizes, types and programs: compiled code against the interpreter."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsetir

EXAMPLES = int(os.environ.get("SPARSETIR_EXAMPLES", "25"))
DATA_SETS = 3
ROOTS = ("dense_fixed", "sparse_fixed", "sparse_variable")
INNER = ("dense_variable", "sparse_fixed", "sparse_variable", "singleton")


@dataclass(frozen=True)
class Level:
    """One axis of the drawn tree."""

    kind: str
    sorted: bool
    unique: bool


@dataclass(frozen=True)
class Program:
    """What is drawn: a tree for A, what is computed over it, types, and how searches run."""

    tree: tuple[Level, ...]
    shape: str
    dtype: str
    idtype: str
    search: str
    default: float


@st.composite
def levels(draw: Any, kinds: tuple[str, ...]) -> Level:
    """An axis; a search by coordinate needs distinct coordinates except at the leaves."""
    kind = draw(st.sampled_from(kinds))
    return Level(kind, draw(st.booleans()), True)


@st.composite
def programs(draw: Any) -> Program:
    """A program over a tree of one to three axes."""
    depth = draw(st.integers(1, 3))
    tree = [draw(levels(ROOTS)), *(draw(levels(INNER)) for _ in range(depth - 1))]
    shapes = ["reduce", "map", "lookup", "scatter", "update"]
    search = draw(st.sampled_from(["inline", "hoist", "merge"]))
    if search == "merge":
        tree = [Level(level.kind, True, True) for level in tree]
    return Program(
        tuple(tree),
        draw(st.sampled_from(shapes)),
        draw(st.sampled_from(["float32", "float64"])),
        draw(st.sampled_from(["int32", "int64"])),
        search,
        draw(st.sampled_from([0.0, 1.5])),
    )


def declaration(n: int, level: Level) -> tuple[str, list[str]]:
    """The line that declares axis n and the handles it needs."""
    above = "None" if n == 0 else f"X{n - 1}"
    flags = f"sorted={level.sorted}, unique={level.unique}"
    if level.kind == "dense_fixed":
        return f"X{n} = T.dense_fixed(n{n}, idtype)", []
    if level.kind == "dense_variable":
        return f"X{n} = T.dense_variable({above}, (n{n}, c{n}), p{n}, idtype)", [f"p{n}"]
    if level.kind == "sparse_fixed":
        return f"X{n} = T.sparse_fixed({above}, (n{n}, w{n}), i{n}, idtype, {flags})", [f"i{n}"]
    if level.kind == "sparse_variable":
        return f"X{n} = T.sparse_variable({above}, (n{n}, c{n}), (p{n}, i{n}), idtype, {flags})", [f"p{n}", f"i{n}"]
    return f"X{n} = T.singleton({above}, n{n}, i{n}, idtype, {flags})", [f"i{n}"]


def text(program: Program) -> str:
    """The program in the dialect."""
    depth = len(program.tree)
    lines, handles = zip(*(declaration(n, level) for n, level in enumerate(program.tree)), strict=True)
    arrays = ["a", "b", "c", *(h for hs in handles for h in hs)]
    sizes = [f"n{n}" for n in range(depth)] + [f"c{n}" for n in range(depth)] + [f"w{n}" for n in range(depth)] + ["k"]
    axes, variables = [f"X{n}" for n in range(depth)], [f"x{n}" for n in range(depth)]
    dense = [f"D{n}" for n in range(depth)]
    params = ", ".join([f"{h}: T.handle" for h in arrays] + [f"{s}: T.int64" for s in sizes])
    out = [f"@T.prim_func\ndef program({params}):"]
    out += [f"    {line}" for line in lines]
    out += [f"    D{n} = T.dense_fixed(n{n}, idtype)" for n in range(depth)]
    out += ["    K = T.dense_fixed(k, idtype)"]
    out += [f"    A = T.match_sparse_buffer(a, ({', '.join(axes)},), dtype, default_value={program.default})"]
    at = ", ".join(variables)
    if program.shape == "map":
        buffers, letters, listed = [f"b, ({', '.join(axes)},)", "c, (K,)"], "S" * depth, axes
        body, init = [f"B[{at}] = A[{at}] * 2 + {variables[-1]}"], []
    elif program.shape == "lookup":
        buffers, letters, listed = ["b, (K,)", f"c, ({', '.join(dense)},)"], "S" * depth, dense
        body, init = [f"C[{at}] = A[{at}] + A[{variables[0]} + 1{''.join(', ' + v for v in variables[1:])}]"], []
    elif program.shape == "scatter":
        buffers, letters, listed = ["b, (K,)", f"c, ({dense[-1]}, K)"], "R" * (depth - 1) + "SS", [*axes, "K"]
        variables = [*variables, "k0"]
        body = [f"C[x{depth - 1}, k0] = C[x{depth - 1}, k0] + A[{at}] * B[k0]"]
        init = [f"C[x{depth - 1}, k0] = 1"]
    else:
        buffers, listed = [f"b, ({dense[-1]}, K)", f"c, ({dense[0]}, K)"], [*axes, "K"]
        letters = "S" + "R" * (depth - 1) + "S"
        variables = [*variables, "k0"]
        body = [f"C[x0, k0] = C[x0, k0] + A[{at}] * B[x{depth - 1}, k0]"]
        init = ["C[x0, k0] = 0"] if program.shape == "reduce" else []
    out += [f"    {b[0].upper()} = T.match_sparse_buffer({b}, dtype)" for b in buffers]
    out += [f"    with T.sp_iter([{', '.join(listed)}], '{letters}', 'work') as [{', '.join(variables)}]:"]
    out += [f"        T.sp_iter_attr({{'search': '{program.search}'}})"]
    out += ["        with T.init():", *(f"            {s}" for s in init)] if init else []
    out += [f"        {s}" for s in body]
    return "\n".join(out).replace("idtype", repr(program.idtype)).replace("dtype", repr(program.dtype), 0).replace(
        ", dtype", f", {program.dtype!r}"
    )


def fibers(rng: np.random.Generator, level: Level, parents: int, length: int) -> tuple[list[np.ndarray], int]:
    """Coordinates of every fiber of an axis, and its fixed width (0 where it has none)."""
    if level.kind == "singleton":
        return [rng.integers(0, length, 1) for _ in range(parents)] if length else [np.array([0])] * parents, 1
    width = int(rng.integers(0, length + 1)) if level.kind == "sparse_fixed" else 0
    out = []
    for _ in range(parents):
        count = width if level.kind == "sparse_fixed" else int(rng.integers(0, length + 1))
        held = np.arange(count) if level.kind == "dense_variable" else rng.permutation(length)[:count]
        out.append(np.sort(held) if level.sorted else held)
    return out, width


def data(rng: np.random.Generator, program: Program) -> dict[str, Any]:
    """Arrays and sizes for one call."""
    args: dict[str, Any] = {"k": int(rng.integers(1, 20))}
    parents = 1
    for n, level in enumerate(program.tree):
        length = int(rng.integers(1, 6)) if level.kind == "singleton" else int(rng.integers(0, 6))
        args[f"n{n}"], args[f"c{n}"], args[f"w{n}"] = length, 0, 0
        if level.kind == "dense_fixed":
            parents = length
            continue
        held, args[f"w{n}"] = fibers(rng, level, parents, length)
        if level.kind in ("dense_variable", "sparse_variable"):
            args[f"p{n}"] = np.cumsum([0, *(len(h) for h in held)]).astype(program.idtype)
        if level.kind != "dense_variable":
            args[f"i{n}"] = np.concatenate([np.array([], int), *held]).astype(program.idtype)
        parents = args[f"c{n}"] = sum(len(h) for h in held)
    args["a"] = rng.uniform(-1, 1, parents).astype(program.dtype)
    first, last, width = args["n0"], args[f"n{len(program.tree) - 1}"], args["k"]
    if program.shape == "map":
        args["c"] = np.zeros(width, program.dtype)
    elif program.shape in ("lookup", "scatter"):
        args["b"] = rng.uniform(-1, 1, width).astype(program.dtype)
    else:
        args["b"] = rng.uniform(-1, 1, (last, width)).astype(program.dtype)
    if program.shape == "update":
        args["c"] = rng.uniform(-1, 1, (first, width)).astype(program.dtype)
    return args


def result_name(program: Program) -> str:
    return "b" if program.shape == "map" else "c"


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=programs(), seed=st.integers(0, 2**16))
def test_compiled_programs_agree_with_the_interpreter(program: Program, seed: int) -> None:
    source = text(program)
    func = sparsetir.parse(source)
    assert sparsetir.script(sparsetir.parse(sparsetir.script(func))) == sparsetir.script(func)
    kernel = sparsetir.build(func)
    rng = np.random.default_rng(seed)
    name = result_name(program)
    for _ in range(DATA_SETS):
        args = data(rng, program)
        expected = sparsetir.interpret(func, args)[name]
        held = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in args.items()}
        found = kernel(**held)
        found = held[name] if name in held else found
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=source)


@pytest.mark.parametrize("feat", [1, 3, 7, 8, 31, 33, 64, 100, 200])
def test_every_choice_gives_the_same_numbers(feat: int) -> None:
    import scipy.sparse as sp

    rng = np.random.default_rng(feat)
    A = sp.csr_array(sp.random_array((37, 29), density=0.2, dtype="float32", rng=rng))
    B = rng.uniform(-1, 1, (29, feat)).astype("float32")
    for tile, chunks, unroll, prefetch in [(8, 0, 1, 0), (16, 3, 2, 4), (128, 64, 4, 16), (32, 1, 8, 32)]:
        choices = sparsetir.Choices(tile=tile, chunks=chunks, unroll=unroll, prefetch=prefetch)
        kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=choices)
        np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-5, atol=1e-5)
