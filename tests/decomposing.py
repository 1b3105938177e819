# SPDX-License-Identifier: Apache-2.0
"""Formats, matrices and checks of the tests of decompositions."""

from __future__ import annotations

from functools import cache
from itertools import permutations, product
from textwrap import dedent
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm_ffi
from hypothesis import strategies as st

import sparsetir
from each import share
from sparsetir import formats

#: every registered format of a matrix, with parameters that divide none of the shapes below
FORMATS: dict[str, dict[str, Any]] = {
    "csr": {},
    "csc": {},
    "coo": {},
    "dcsr": {},
    "csf": {"order": (1, 0)},
    "ragged": {},
    "ell": {},
    "ell_rest": {"width": 2},
    "bsr": {"r": 2, "c": 3},
    "dbsr": {"r": 3, "c": 2},
    "sell": {"C": 4, "sigma": 8},
    "padded_csr": {"t": 3},
    "sr_bcrs": {"t": 3, "g": 2},
    "nm": {"n": 4, "m": 4},
    "dia": {},
    "band": {"lower": 40, "upper": 60},
    "columns": {"c": 2},
    "rows": {"p": 2},
    "buckets": {"widths": (1, 3)},
    "hyb": {"c": 2, "widths": (2,)},
    "blocks": {"r": 2, "c": 3, "density": 0.6},
    "dia_rest": {"density": 0.4},
    "hdia": {"C": 4, "density": 0.4},
    "dense_rows": {"density": 0.4},
    "dense_columns": {"density": 0.4},
    "row_groups": {"r": 2, "padding": 0.9},
    "reordered": {},
    "narrow_csr": {},
    "narrow_sell": {"C": 4, "sigma": 8},
}


OPERANDS = {"spmm": "A", "spmv": "A", "sddmm": "S"}

#: every format in one program or two
READY = share(product(FORMATS, OPERANDS), 2)


TYPES = list(product(("float32", "float64"), ("int32", "int64")))


def parsed(text: str) -> Any:
    """The function of an indented text."""
    return sparsetir.parse(dedent(text))


def made(name: str) -> Any:
    """The format of the table."""
    return formats.make(name, **FORMATS[name])


def compiled(parts: Any) -> Any:
    """A kernel that is compiled in half the time: where it is the program that matters, not the machine code."""
    return sparsetir.build(parts, {"kind": "llvm", "opt-level": 0})


@cache
def ready(op: str, name: str, dtype: str, idtype: str) -> tuple[Any, Any]:
    """A ready program over a format, and its kernel."""
    parts = sparsetir.decompose_format(getattr(sparsetir.ops, op)(dtype, idtype=idtype), {OPERANDS[op]: made(name)})
    return parts, sparsetir.build(parts) if op == "spmm" else compiled(parts)


def types_of(op: str, name: str) -> tuple[str, str]:
    """Value and index type in which a pair is tested: all four in turn."""
    return TYPES[(list(FORMATS).index(name) + list(OPERANDS).index(op)) % len(TYPES)]


def as_csr(dense: Any) -> sp.csr_array:
    return sp.csr_array(np.asarray(dense, "float64"))


def random_matrix(seed: int, m: int, n: int, density: float = 0.3) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    return as_csr(np.where(rng.random((m, n)) < density, rng.uniform(-1, 1, (m, n)), 0))


def _every_other_row(m: int, n: int) -> sp.csr_array:
    dense = random_matrix(2, m, n, 0.4).toarray()
    dense[::2] = 0
    return as_csr(dense)


def _one_each(m: int, n: int) -> sp.csr_array:
    columns = np.random.default_rng(3).integers(0, n, m)
    return sp.csr_array((np.arange(1.0, m + 1), columns, np.arange(m + 1)), (m, n))


def _one_row(m: int, n: int) -> sp.csr_array:
    dense = np.zeros((m, n))
    dense[m // 2] = np.arange(1, n + 1)
    return as_csr(dense)


def _explicit_zeros(m: int, n: int) -> sp.csr_array:
    found = random_matrix(4, m, n)
    found.data[::3] = 0
    return found


def with_unsorted_rows(m: int, n: int) -> sp.csr_array:
    """Each row backwards."""
    found = random_matrix(5, m, n)
    rows = np.repeat(np.arange(m), np.diff(found.indptr))
    order = np.lexsort((-found.indices, rows))
    return sp.csr_array((found.data[order], found.indices[order], found.indptr), (m, n))


def _duplicates(m: int, n: int) -> sp.csr_array:
    rng = np.random.default_rng(6)
    counts = rng.integers(0, 5, m)
    indices = rng.integers(0, min(n, 3), counts.sum())
    return sp.csr_array((rng.uniform(-1, 1, len(indices)), indices, np.append(0, np.cumsum(counts))), (m, n))


MATRICES = {
    "random": random_matrix(1, 17, 23),
    "divisible": random_matrix(7, 12, 24),
    "empty_rows": _every_other_row(9, 14),
    "zero_nnz": sp.csr_array((5, 4)),
    "one_by_one": as_csr([[3.0]]),
    "one_row": _one_row(7, 31),
    "one_each": _one_each(13, 5),
    "full": random_matrix(8, 7, 11, 1.1),
    "diagonal": as_csr(np.diag(np.arange(1.0, 11))),
    "explicit_zeros": _explicit_zeros(11, 10),
    "unsorted": with_unsorted_rows(10, 19),
    "duplicates": _duplicates(8, 7),
    "no_rows": sp.csr_array((0, 4)),
    "no_columns": sp.csr_array((4, 0)),
}


def typed(matrix: Any, dtype: str) -> sp.csr_array:
    """The matrix with values of another type; scipy's own conversion would sort it and add its duplicates up."""
    return sp.csr_array((matrix.data.astype(dtype), matrix.indices.copy(), matrix.indptr), matrix.shape)


def operands(matrix: Any, dtype: str, feat: int, seed: int = 0) -> tuple[Any, np.ndarray, np.ndarray]:
    """A matrix of a type, and dense ones with as many rows as it has rows and columns."""
    rng = np.random.default_rng(seed)
    tall, wide = (rng.uniform(-1, 1, (n, feat)).astype(dtype) for n in matrix.shape)
    return typed(matrix, dtype), tall, wide


def close(found: Any, expected: Any, dtype: str = "float32", terms: int = 40) -> None:
    """Compare sums of some terms of magnitude 1."""
    assert found.shape == expected.shape
    tolerance = terms * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(found, expected, rtol=4 * tolerance, atol=8 * tolerance)


def check_call(kernel: Any, op: str, matrix: Any, dtype: str, feat: int) -> None:
    """Call a ready program's kernel and compare with numpy in double precision."""
    A, tall, wide = operands(matrix, dtype, feat)
    dense, X, Y = (a.astype("float64") for a in (A.toarray(), tall, wide))
    if op == "spmm":
        close(kernel(A=A, B=wide), dense @ Y, dtype)
    elif op == "spmv":
        close(kernel(A=A, x=np.ascontiguousarray(wide[:, 0])), dense @ Y[:, 0], dtype)
    else:
        O = kernel(S=A, X=tall, Y=wide)
        assert type(O) is type(A)
        assert np.array_equal(O.indptr, A.indptr)
        assert np.array_equal(O.indices, A.indices)
        close(O.toarray(), dense * (X @ Y.T), dtype, 4 * feat)


def check_function(parts: Any) -> None:
    """It verifies, and its text is the same function."""
    sparsetir.verify(parts.func)
    text = sparsetir.script(parts.func)
    again = sparsetir.parse(text)
    assert tvm_ffi.structural_equal(parts.func, again), text
    assert sparsetir.script(again) == text


def _leaves_last() -> Any:
    """Fibers along the second dimension in slots of two: a tree of a user's own."""
    description = parsed("""
        @T.prim_func
        def slots(t: T.handle, p: T.handle, k: T.handle, m: T.int32, l: T.int32, n: T.int32, nnz: T.int32):
            I = T.dense_fixed(m)
            K = T.sparse_variable(I, (n, nnz), (p, k))
            J = T.dense_fixed(l)
            X = T.match_sparse_buffer(t, (I, K, J))
    """)
    axis_map = {0: ["I"], 1: ["J"], 2: ["K"]}
    coords = {"inverse": lambda i, k, j: (i, j, k), "forward": lambda i, j, k: (i, k, j)}
    return formats.tree(description, axis_map, fills=True, name="slots", **coords)


CUBES = {
    **{f"csf {order}": lambda order=order: formats.csf(order) for order in permutations(range(3))},
    "coo": formats.coo,
    "tree": _leaves_last,
}


def program(buffers: str, body: str, sizes: str = "", axes: str = "", before: str = "") -> Any:
    """A function over a CSR structure I, J: parameters (``name:axes``), further axes, and a body."""
    pairs = [b.split(":") for b in buffers.split()]
    names = [*(f"{name.lower()}_: T.handle" for name, _ in pairs), "indptr: T.handle", "indices: T.handle"]
    names += [f"{size}: T.int32" for size in ("m", "n", "nnz", *sizes.split())]
    indent = lambda text: [f"    {line}" for line in text.strip("\n").splitlines()]  # noqa: E731
    drop = min((len(line) - len(line.lstrip()) for line in body.splitlines() if line.strip()), default=0)
    lines = [
        "@T.prim_func",
        f"def func({', '.join(names)}):",
        "    I = T.dense_fixed(m)",
        "    J = T.sparse_variable(I, (n, nnz), (indptr, indices))",
        "    JD = T.dense_fixed(n)",
        *indent(axes),
        *(f"    {name} = T.match_sparse_buffer({name.lower()}_, ({on},))" for name, on in pairs if on[0] != "("),
        *(f"    {name} = T.match_buffer({name.lower()}_, {on})" for name, on in pairs if on[0] == "("),
        *indent("\n".join(line[drop:] for line in body.splitlines())),
    ]
    return sparsetir.parse("\n".join(lines))


SCALE = """
    with T.sp_iter([I, J], "SS", "scale") as [i, j]:
        A[i, j] = T.exp(A[i, j])
"""


@cache
def own(name: str, body: str, buffers: str, sizes: str = "", axes: str = "", at: str = "A") -> Any:
    parts = sparsetir.decompose_format(program(buffers, body, sizes, axes), {at: made(name)})
    check_function(parts)
    return compiled(parts)


USUAL = ("random", "divisible", "empty_rows", "zero_nnz", "one_by_one", "one_row", "explicit_zeros", "unsorted")


small = st.integers(1, 4)


nested = st.sampled_from(("csr", "coo", "ell", "dcsr", "csc", "bsr"))


DRAWN: dict[str, dict[str, Any]] = {
    "bsr": {"r": small, "c": small},
    "dbsr": {"r": small, "c": small},
    "sell": {"C": small, "sigma": st.integers(1, 9)},
    "padded_csr": {"t": small},
    "sr_bcrs": {"t": small, "g": small},
    "ell_rest": {"width": small, "rest": nested},
    "columns": {"c": small, "each": nested},
    "rows": {"p": small, "each": nested},
    "buckets": {"widths": st.sets(st.integers(1, 6), min_size=1, max_size=2).map(sorted)},
    "hyb": {"c": st.integers(1, 2), "widths": st.sets(st.integers(1, 6), min_size=1, max_size=2).map(sorted)},
    "blocks": {"r": small, "c": small, "density": st.floats(0.1, 1), "rest": nested},
    "dia_rest": {"density": st.floats(0.1, 1), "rest": nested},
    "hdia": {"C": small, "density": st.floats(0.1, 1), "rest": nested},
    "dense_rows": {"density": st.floats(0.1, 1), "rest": nested},
    "dense_columns": {"density": st.floats(0.1, 1), "rest": nested},
}


@st.composite
def matrices(draw_: Any) -> sp.coo_array:
    """Entries in any order, some of them twice, whole numbers: sums are exact."""
    m, n = draw_(st.integers(0, 12)), draw_(st.integers(0, 12))
    at = st.tuples(st.integers(0, max(m - 1, 0)), st.integers(0, max(n - 1, 0)), st.integers(-3, 3))
    found = draw_(st.lists(at, max_size=40 if m * n else 0))
    rows, columns, values = np.array(found, np.int32).reshape(-1, 3).T
    return sp.coo_array((values.astype("float64"), (rows, columns)), (m, n))


SPECIAL = (np.nan, np.inf, -np.inf)


def by_entries(A: Any, B: np.ndarray) -> np.ndarray:
    """The product in double precision, of the entries alone."""
    C, rows = np.zeros((A.shape[0], B.shape[1])), np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(C, rows, A.data[:, None].astype("float64") * B[A.indices].astype("float64"))
    return C
