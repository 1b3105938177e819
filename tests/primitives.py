# SPDX-License-Identifier: Apache-2.0
"""Programs and checks of the tests of stage-I schedules."""

from __future__ import annotations

import itertools
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME, Case
from corpus.running import draw
from sparsetir.errors import ScheduleError, VerifyError
from sparsetir.ir.views import decode
from sparsetir.transform import Trace

ROOT = Path(__file__).resolve().parents[1]


def schedule(name: str, dtype: str = "float32", idtype: str = "int32") -> sparsetir.Schedule:
    """A schedule of a program of the corpus."""
    return sparsetir.Schedule(BY_NAME[name].make(dtype, idtype))


def iterations(sch: sparsetir.Schedule) -> str:
    """The text of a program from its first iteration on."""
    lines = sch.script().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("    with T.sp_iter"))
    return textwrap.dedent("\n".join(lines[first:])).rstrip()


def declaration(sch: sparsetir.Schedule, name: str) -> str:
    """The line that declares `name`."""
    return next(line.strip() for line in sch.script().splitlines() if line.strip().startswith(f"{name} = "))


def is_equal(a: Any, b: Any) -> bool:
    return bool(tvm_ffi.structural_equal(a, b, map_free_vars=True))


def arguments(case: Case, kind: str, dtype: str, idtype: str) -> dict[str, Any]:
    """Inputs for the interpreter; outputs hold a number that no program leaves there by accident."""
    args, params = draw(case, kind, dtype, idtype), decode(case.make(dtype, idtype)).params
    held = {name: value for name, value in args.items() if name in params}
    for name, want in zip(case.output_names, case.expected(args), strict=True):
        held.setdefault(name, np.full(want.shape, 7).astype(str(params[name].ty.dtype)))
    return held


def same_results(found: dict[str, np.ndarray], want: dict[str, np.ndarray], note: str) -> None:
    """Whether two runs left the same in every parameter; sums may be rounded in another order."""
    for name, array in want.items():
        got, expected = found[name].astype(np.float64), array.astype(np.float64)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=f"{name}: {note}")


def is_sound(sch: sparsetir.Schedule, base: Any) -> None:
    """Whether a scheduled program verifies, prints, parses, and is made again by its trace."""
    sparsetir.verify(sch.func)
    text = sch.script()
    assert is_equal(sparsetir.parse(text), sch.func), text
    again = Trace.from_json(sch.trace.to_json())
    assert is_equal(again.apply(base), sch.func), str(sch.trace)
    copied = sparsetir.Schedule(base)
    exec(str(sch.trace), {"sch": copied, "sparsetir": sparsetir})
    assert is_equal(copied.func, sch.func), str(sch.trace)


def keeps_meaning(
    sch: sparsetir.Schedule, name: str, kinds: Any, dtype: str = "float32", idtype: str = "int32"
) -> None:
    """Whether a scheduled program of the corpus is sound and computes what it did before."""
    case = BY_NAME[name]
    base = case.make(dtype, idtype)
    is_sound(sch, base)
    for kind in kinds:
        args = arguments(case, kind, dtype, idtype)
        want = sparsetir.interpret(base, args)
        same_results(sparsetir.interpret(sch.func, args), want, f"{kind}\n{sch.trace}\n{sch.script()}")


def refused(
    sch: sparsetir.Schedule, message: str, primitive: str, *given: Any, error: Any = ScheduleError, **options: Any
):
    """Whether a primitive is refused with the message and leaves the schedule as it was."""
    before, steps = sch.func, len(sch.trace)
    with pytest.raises(error, match=re.escape(message)):
        getattr(sch, primitive)(*given, **options)
    assert sch.func is before
    assert len(sch.trace) == steps


def attention() -> Any:
    """The program of examples/gallery/fused_attention.py, without what the example does with it."""
    text = (ROOT / "examples" / "gallery" / "fused_attention.py").read_text(encoding="utf-8")
    program = re.search(r"^@T\.prim_func\n.*?(?=\n\n\n)", text, re.MULTILINE | re.DOTALL)
    return sparsetir.parse(program[0])


@T.prim_func
def two_stores(
    a: T.handle, b: T.handle, c: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "both") as [i, j]:
        with T.init():
            Y[i] = 0
        B[i, j] = A[i, j] * 2
        Y[i] = Y[i] + B[i, j]
        C[i, j] = A[i, j] + 1
        C[i, j] = C[i, j] * B[i, j]


@T.prim_func
def two_products(
    a: T.handle, x: T.handle, y: T.handle, z: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I,), "float32")
    with T.sp_iter([I, J], "SR", "first") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j] * X[j]
    with T.sp_iter([I, J], "SR", "second") as [i, j]:
        with T.init():
            Z[i] = 1
        Z[i] = Z[i] + A[i, j]


def csr_arguments(func: Any, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A small matrix with empty rows for every CSR program of this file, and random values for its other arrays."""
    rng = np.random.default_rng(seed)
    matrix = sp.random_array((7, 9), density=0.3, format="csr", dtype=np.float32, rng=rng)
    matrix.data[:] = rng.uniform(-1, 1, matrix.nnz)
    sizes = {"m": 7, "n": 9, "nnz": matrix.nnz, **more}
    known = {"indptr": matrix.indptr, "indices": matrix.indices, **sizes}
    shapes = {"a": matrix.nnz, "b": matrix.nnz, "c": matrix.nnz, "x": 9, "y": 7, "z": 7}
    arrays = {name: rng.uniform(-1, 1, shape).astype("float32") for name, shape in shapes.items()}
    return {name: ({**arrays, **known})[name] for name in decode(func).params}


def keeps_csr(sch: sparsetir.Schedule, base: Any, **more: Any) -> None:
    """The same as `keeps_meaning` for a CSR program of this file."""
    is_sound(sch, base)
    args = csr_arguments(base, **more)
    same_results(sparsetir.interpret(sch.func, args), sparsetir.interpret(base, args), str(sch.trace))


# ---------------------------------------------------------------- moves drawn at random


def moves(sch: sparsetir.Schedule, rng: random.Random) -> Iterator[tuple[Any, ...]]:
    """What might be done next, legal or not."""
    for name in sch.sp_iters:
        entries = sch.get_axes(name)
        if len(entries) > 1:
            yield "sparse_reorder", name, rng.sample(entries, len(entries))
        yield from (("sparse_fuse", name, list(pair)) for pair in itertools.pairwise(entries))
        for entry in entries:
            yield "sparse_split", name, entry, rng.choice([1, 2, 3, 4])
            yield "pad", name, entry, rng.choice([2, 3, 8])
            yield "to_dense", name, entry
            yield "to_dense", name, entry, "guard"
        yield from (("set_search", name, strategy) for strategy in ("hoist", "merge", "inline"))
        yield from ((primitive, name) for primitive in ("split_init", "split_iteration"))
    yield from (("fuse_iterations", *pair) for pair in itertools.permutations(sch.sp_iters, 2))


def attempt(sch: sparsetir.Schedule, move: tuple[Any, ...]) -> bool:
    """Make a move; False if it is refused; any other error is a mistake."""
    primitive, *given = move
    options = {"guard": True} if given[-1] == "guard" else {}
    try:
        getattr(sch, primitive)(*given[: len(given) - len(options)], **options)
    except (ScheduleError, VerifyError):
        return False
    return True
