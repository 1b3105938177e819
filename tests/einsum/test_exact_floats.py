# SPDX-License-Identifier: Apache-2.0
"""Algebraic rewrites hold for infinities, NaN, empty sums and overflow: compared with numpy, element by element."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from scipy.special import erf, expit
from tvm import tirx
from tvm.script import ir as tvm_ir
from tvm.script import tirx as tvm_tirx

import sparsetir
from each import on, share
from sparsetir import lazy
from sparsetir.ir.interpreter import interpret
from sparsetir.ir.rewriting import collect
from sparsetir.script import tvmscript

SPECIAL = np.array([1, 0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-40, -2.5, 16777216], "float32")
X, Y = (grid.ravel().copy() for grid in np.meshgrid(SPECIAL, SPECIAL))
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "x - x": lambda x, y: x - x,
    "(x + y) - y": lambda x, y: (x + y) - y,
    "(y + x) - y": lambda x, y: (y + x) - y,
    "x - (x + y)": lambda x, y: x - (x + y),
    "(x - y) + y": lambda x, y: (x - y) + y,
    "x * y - x * y": lambda x, y: x * y - x * y,
    "x / x": lambda x, y: x / x,
    "x * y / y": lambda x, y: x * y / y,
    "x * 2 - x": lambda x, y: x * 2.0 - x,
    "(x * 2) * 0.5": lambda x, y: (x * 2.0) * 0.5,
    "(x * 3e38) * 3e38": lambda x, y: (x * 3e38) * 3e38,
}
PROGRAM = """@T.prim_func
def program(x: T.handle, y: T.handle, z: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I,), "float32")
    with T.sp_iter([I], "S", "work") as [i]:
        Z[i] = VALUE
"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def check(computed: Any, expected: Any, rtol: float = 1e-5) -> None:
    assert np.shape(computed) == np.shape(expected)
    np.testing.assert_allclose(computed, expected, rtol=rtol, atol=1e-5, equal_nan=True)


# ------------------------------------------------------------------ programs


@pytest.mark.parametrize("text", BINARY)
def test_programs_are_not_simplified_as_if_floats_were_finite(text: str) -> None:
    value = text.replace("x", "X[i]").replace("y", "Y[i]")
    kernel = sparsetir.build(sparsetir.parse(PROGRAM.replace("VALUE", value)))
    np.testing.assert_allclose(kernel(X=X, Y=Y), BINARY[text](X, Y), rtol=1e-6, equal_nan=True)


# ------------------------------------------------------------------ einsum over stored entries


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    huge = {"float32": 3e38, "float64": 1e308}[dtype]
    values = rng.standard_normal(shape)
    special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, huge, 1 / huge], size=shape)
    return np.where(rng.random(shape) < 0.15, special, values).astype(dtype)


def stored(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> sp.coo_array:
    """A matrix with empty rows and columns, and explicit zeros among its entries."""
    mask = rng.random(shape) < 0.4
    mask[rng.integers(shape[0])] = False
    mask[:, rng.integers(shape[1])] = False
    rows, columns = np.nonzero(mask)
    return sp.coo_array((drawn(rng, rows.shape, dtype), (rows, columns)), shape=shape)


def reference(subscripts: str, operands: list[Any], dtype: str) -> np.ndarray:
    """Sum the products over the coordinates that all sparse operands store."""
    terms, result = subscripts.split("->")
    names = terms.split(",")
    sizes = {
        letter: n for name, x in zip(names, operands, strict=True) for letter, n in zip(name, x.shape, strict=True)
    }
    letters = sorted(sizes)
    entries = [
        {tuple(map(int, at)): v for *at, v in zip(*x.coords, x.data, strict=True)} if sp.issparse(x) else None
        for x in operands
    ]
    total = np.zeros([sizes[c] for c in result], dtype)
    for at in itertools.product(*(range(sizes[c]) for c in letters)):
        place = dict(zip(letters, at, strict=True))
        value: Any = np.dtype(dtype).type(1)
        for name, x, held in zip(names, operands, entries, strict=True):
            index = tuple(place[c] for c in name)
            if held is not None and index not in held:
                break
            value = value * (x[index] if held is None else held[index])
        else:
            total[tuple(place[c] for c in result)] += value
    return total


def elements_of(value: Any) -> np.ndarray:
    """The elements of a result of any class."""
    value = value.to_scipy() if hasattr(value, "to_scipy") else value
    return value.toarray() if sp.issparse(value) else np.asarray(value)


CASES = [
    "ij,i->i",
    "ij,i->",
    "jk,j->",
    "ij,j->i",
    "ij,i,j->i",
    "ij,ik->ik",
    "ij,i,jk->ik",
    "ij,ik,jk->ij",
    "ij,i->j",
    "ij->i",
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("format", ["csr", "csc", "coo", "dcsr"])
@pytest.mark.parametrize("subscripts", CASES)
def test_factors_of_sums_keep_infinities_and_overflow(subscripts: str, format: str, dtype: str) -> None:
    rng = np.random.default_rng(len(subscripts))
    sizes = {"i": 7, "j": 11, "k": 9}
    for _ in range(4):
        shapes = [tuple(sizes[c] for c in term) for term in subscripts.split("->")[0].split(",")]
        matrix = stored(rng, shapes[0], dtype)  # type: ignore[arg-type]
        others = [drawn(rng, shape, dtype) for shape in shapes[1:]]
        is_scipy = format in ("csr", "csc", "coo")
        given = matrix.asformat(format) if is_scipy else sparsetir.SparseTensor.from_any(matrix, format)
        computed = elements_of(sparsetir.einsum(subscripts, given, *others))
        expected = reference(subscripts, [matrix, *others], dtype)
        # Sums may be taken in any order: where one overflows on the way, another need not.
        longer = [x.astype("longdouble") for x in (matrix, *others)]
        wide = reference(subscripts, longer, "longdouble").astype(dtype)
        rtol = 1e-4 if dtype == "float32" else 1e-9
        close = [np.isclose(computed, x, rtol=rtol, atol=1e-4, equal_nan=True) for x in (expected, wide)]
        overflows = ~np.isfinite(expected) & np.isfinite(wide)
        assert (close[0] | close[1] | overflows).all(), (subscripts, format, computed, expected)


def test_an_infinite_factor_of_an_empty_row_adds_nothing() -> None:
    A = sp.csr_array(np.array([[0, 1.0, 2], [0, 0, 0], [3, 0, 0]]))
    inverse = 1 / np.asarray((A != 0).sum(axis=1), float)
    for matrix in (A, A.tocsc(), A.tocoo()):
        np.testing.assert_array_equal(sparsetir.einsum("ij,i->i", matrix, inverse), [1.5, 0, 3])


@pytest.mark.parametrize("columns", [3, 8, 24, 70])
def test_sampled_products_are_as_their_terms(columns: int) -> None:
    """The value of an entry multiplies each term: an infinite one of an empty sum, or a sum that overflows."""
    S = sp.csr_array(np.array([[np.inf, 0, 1e-30], [0, 0, 0], [0, 2.0, np.nan]], "float32"))
    left = np.full((3, columns), 1e30, "float32")
    right = np.full((3, columns), 1e8, "float32")
    right[2, 0] = 2e8
    computed = sparsetir.build(sparsetir.ops.sddmm())(S=S, X=left, Y=right)
    rows = np.repeat(np.arange(3), np.diff(S.indptr))
    terms = S.data[:, None] * left[rows] * right[S.indices]
    np.testing.assert_allclose(computed.data, terms.sum(1), rtol=1e-4)


# ------------------------------------------------------------------ lazy arrays

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0)),
    "tanh": np.tanh,
    "abs": np.abs,
    "negative": np.negative,
    "sqrt": np.sqrt,
    "sigmoid": expit,
    "exp": np.exp,
    "log": np.log,
    "silu": lambda x: x * expit(x),
    "gelu": lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))),
}
ZEROS: dict[str, Callable[[Any, Any], Any]] = {
    "0 / x": lambda x, y: 0 / x,
    "x * 0": lambda x, y: x * 0,
    "0 * x": lambda x, y: 0 * x,
    "x * -0": lambda x, y: x * -0.0,
    "(x * 0) * y": lambda x, y: (x * 0) * y,
    "x / 0": lambda x, y: x / 0,
    "x ** 0": lambda x, y: x**0,
}


def test_lazy_arrays_are_not_folded() -> None:
    functions = {**ZEROS, **BINARY}
    results = sparsetir.compute(*(function(lazy(X), lazy(Y)) for function in functions.values()))
    for (text, function), result in zip(functions.items(), results, strict=True):
        with on(text):
            check(result, function(X, Y).astype("float32"))


SHAPES = [(), (1,), (5,), (0,), (3, 4), (0, 3), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_functions_of_every_rank(shape: tuple[int, ...]) -> None:
    """All in one module, which takes as long to compile as one function."""
    values = np.abs(np.random.default_rng(0).standard_normal(shape)).astype("float32")
    results = sparsetir.compute(*(getattr(lazy(values), name)() for name in FUNCTIONS))
    for name, result in zip(FUNCTIONS, results, strict=True):
        with on(name):
            check(result, FUNCTIONS[name](values))


@pytest.mark.parametrize("shape", SHAPES)
def test_operators_of_every_rank(shape: tuple[int, ...]) -> None:
    values = np.abs(np.random.default_rng(0).standard_normal(shape)).astype("float32") + 0.5
    functions = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "**": np.power}
    methods = {"+": "__add__", "-": "__sub__", "*": "__mul__", "/": "__truediv__", "**": "__pow__"}
    cases = list(itertools.product(functions, (values, 2.0, -1.0)))
    results = sparsetir.compute(*(getattr(lazy(values), methods[name])(other) for name, other in cases))
    for (name, other), result in zip(cases, results, strict=True):
        with on((name, other)):
            check(result, functions[name](values, np.float32(other)))


# Functions of a sparse array, and of the dense array with the same elements.
OF_SPARSE: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "itself": (lambda s: s, lambda a: a),
    "2 * S": (lambda s: 2 * s, lambda a: 2 * a),
    "S / 4": (lambda s: s / 4, lambda a: a / 4),
    "-S": (lambda s: -s, lambda a: -a),
    "relu(-S)": (lambda s: (-s).relu(), lambda a: np.maximum(-a, 0)),
    "S ** 0.5": (lambda s: abs(s) ** 0.5, lambda a: np.abs(a) ** 0.5),
    "S + S": (lambda s: s + s, lambda a: a + a),
    "S * S": (lambda s: s * s, lambda a: a * a),
    "tanh(S)": (lambda s: s.tanh(), np.tanh),
    "S * D": (lambda s: s * np.arange(1.0, 13).reshape(3, 4), lambda a: a * np.arange(1.0, 13).reshape(3, 4)),
    "softmax(S)": (
        lambda s: s.softmax(),
        lambda a: np.where(a != 0, np.exp(a), 0) / np.where(a != 0, np.exp(a), 0).sum(1, keepdims=True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_SPARSE)
def test_functions_of_sparse_arrays_as_operands_of_every_product(name: str) -> None:
    """As the left and the right operand, transposed or not, alone and in longer chains."""
    function, of_dense = OF_SPARSE[name]
    elements = np.array([[4.0, 0, -1, 0], [0, 9, 0, 2], [16, 0, 0, 0.5]])
    S, a = lazy(sp.csr_array(elements)), of_dense(elements)
    rng = np.random.default_rng(0)
    rows, columns, v3, v4 = rng.random((2, 3)), rng.random((4, 2)), rng.random(3), rng.random(4)
    made = function(S)
    products = {
        "f(S) @ D": (made @ columns, a @ columns),
        "D @ f(S)": (lazy(rows) @ made, rows @ a),
        "f(S).T @ D": (made.T @ rows.T, a.T @ rows.T),
        "D @ f(S).T": (lazy(columns.T) @ made.T, columns.T @ a.T),
        "f(S) @ v": (made @ v4, a @ v4),
        "v @ f(S)": (lazy(v3) @ made, v3 @ a),
        "D @ f(S) @ D": (lazy(rows) @ made @ columns, rows @ a @ columns),
        "f(S) @ D + D @ f(S)": (
            lazy(rows) @ made @ lazy(columns) + lazy(rows) @ (made @ columns),
            2 * (rows @ a @ columns),
        ),
    }
    for text, (expression, expected) in share(products.items(), 3, first=list(OF_SPARSE).index(name)):
        np.testing.assert_allclose(sparsetir.compute(expression), expected, rtol=1e-10, err_msg=f"{name}: {text}")


def test_one_matrix_and_a_function_of_it_in_one_graph() -> None:
    elements = np.array([[4.0, 0], [9.0, 16.0]])
    S, D = lazy(sp.csr_array(elements)), np.array([[1.0, 2], [3, 4]])
    both = lazy(D) @ S + lazy(D) @ (2 * S) + (S * 3) @ D
    np.testing.assert_allclose(sparsetir.compute(both), D @ elements * 3 + 3 * elements @ D)


# ------------------------------------------------------------------ zeros in scripts

ONE = """@T.prim_func
def program(x: T.handle, z: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I,), "DTYPE")
    Z = T.match_sparse_buffer(z, (I,), "DTYPE")
    with T.sp_iter([I], "S", "work") as [i]:
        Z[i] = VALUE
"""
SCRIPT_ZEROS: dict[str, Callable[[Any, Any], Any]] = {  # of x and the class of its numbers
    "x * T.DTYPE(0)": lambda x, f: x * f(0),
    "T.DTYPE(0) * x": lambda x, f: f(0) * x,
    "x * 0": lambda x, f: x * f(0),
    "0.0 * x": lambda x, f: f(0) * x,
    "x * -0.0": lambda x, f: x * f(-0.0),
    "0.0 / x": lambda x, f: f(0) / x,
    "T.DTYPE(-0.0) / x": lambda x, f: f(-0.0) / x,
    "x / 0.0": lambda x, f: x / f(0),
    "x / T.DTYPE(-0.0)": lambda x, f: x / f(-0.0),
    "x - x": lambda x, f: x - x,
    "T.DTYPE(0) * T.DTYPE(0) * x": lambda x, f: f(0) * x,
    "(x * 0.0) * 0.0": lambda x, f: (x * f(0)) * f(0),
    "T.DTYPE(0) / T.DTYPE(0) * x": lambda x, f: f(np.nan) * x,
    "T.max(x, x * 0.0)": lambda x, f: np.maximum(x, x * f(0)),
    "T.if_then_else(x * 0.0 == 0.0, T.DTYPE(1), T.DTYPE(2))": lambda x, f: np.where(x * f(0) == 0, f(1), f(2)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("text", SCRIPT_ZEROS)
def test_products_with_zeros_and_quotients_keep_infinities_and_nan(text: str, dtype: str) -> None:
    """As numpy has them, with the signs of zeros; in compiled kernels, the interpreter, and after printing."""
    number = getattr(np, dtype)
    x = SPECIAL.astype(dtype)
    expected = SCRIPT_ZEROS[text](x, number).astype(dtype)
    value = re.sub(r"\bx\b", "X[i]", text)
    func = sparsetir.parse(ONE.replace("VALUE", value).replace("DTYPE", dtype))
    again = sparsetir.parse(sparsetir.build(func).script())
    results = [sparsetir.build(func)(X=x), sparsetir.build(again)(X=x)]
    results += [sparsetir.build(func, schedule=sparsetir.Choices(lanes=8))(X=x)]
    for result in (*results, interpret(func, {"x": x, "z": np.ones_like(x)})["z"]):
        np.testing.assert_array_equal(result, expected)
        zero = expected == 0
        np.testing.assert_array_equal(np.signbit(result[zero]), np.signbit(expected[zero]))


def test_a_name_minus_itself_is_no_zero() -> None:
    lines = ["v: T.let[T.float32] = X[i]", "Z[i] = (v - v) * T.float32(0)"]
    text = ONE.replace("        Z[i] = VALUE", "\n".join(f"        {line}" for line in lines))
    kernel = sparsetir.build(sparsetir.parse(text.replace("DTYPE", "float32")))
    np.testing.assert_array_equal(kernel(X=SPECIAL), (SPECIAL - SPECIAL) * np.float32(0))


def test_scripts_of_other_dialects_keep_the_evaluation_of_tvm() -> None:
    text = """
@I.ir_module
class Module:
    @S.prim_func
    def ours(x: S.handle, z: S.handle, n: S.int32):
        I = S.dense_fixed(n)
        X = S.match_sparse_buffer(x, (I,), "float32")
        Z = S.match_sparse_buffer(z, (I,), "float32")
        with S.sp_iter([I], "S", "work") as [i]:
            Z[i] = X[i] * S.float32(0)

    @T.prim_func
    def theirs(X: T.Buffer((4,), "float32"), Z: T.Buffer((4,), "float32")):
        for i in range(4):
            Z[i] = X[i] * T.float32(0)
"""
    names = {"I": tvm_ir, "S": tvmscript, "T": tvm_tirx}
    module = tvm.script.from_source(text, extra_vars=names)
    products = {name: collect(module[name].body, tirx.Mul) for name in ("ours", "theirs")}
    assert [len(products[name]) for name in ("ours", "theirs")] == [1, 0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["ij,j->", "ij,j->j", "i,j->", "ij,jk->k", "ij,kj,j->i", "ji,kl->jl"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("limit", [4, 1 << 22])
def test_dense_operands_are_multiplied_before_they_are_summed(
    text: str, dtype: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("sparsetir.einsum.steps"), "MAX_PRODUCTS", limit)
    rng = np.random.default_rng(3)
    letters = text.partition("->")[0].split(",")
    extents = {"i": 3, "j": 4, "k": 2, "l": 3}
    for special in (np.inf, -np.inf, np.nan):
        arrays = [rng.integers(-1, 2, [extents[c] for c in term]).astype(dtype) for term in letters]
        arrays[-1].reshape(-1)[::2] = special
        np.testing.assert_array_equal(sparsetir.einsum(text, *arrays), products_then_sums(text, arrays))


def test_no_terms_sum_to_zero_beside_an_infinity() -> None:
    empty, infinite = np.ones((0, 2), "float32"), np.full(2, np.inf, "float32")
    assert sparsetir.einsum("ij,j->j", empty, infinite).tolist() == [0, 0]


def products_then_sums(text: str, arrays: list[np.ndarray]) -> np.ndarray:
    """Evaluate index notation one point of the index space after the other."""
    left, _, output = text.partition("->")
    terms = left.split(",")
    extents = {c: n for term, a in zip(terms, arrays, strict=True) for c, n in zip(term, a.shape, strict=True)}
    total = np.zeros([extents[c] for c in output], arrays[0].dtype)
    with np.errstate(all="ignore"):
        for point in itertools.product(*map(range, extents.values())):
            at = dict(zip(extents, point, strict=True))
            product = arrays[0][tuple(at[c] for c in terms[0])]
            for term, array in zip(terms[1:], arrays[1:], strict=True):
                product = product * array[tuple(at[c] for c in term)]
            total[tuple(at[c] for c in output)] += product
    return total


def test_numpy_contracts_no_empty_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its einsum reads an element of an array that has none."""
    monkeypatch.setattr(np, "einsum", lambda *_operands, **_options: pytest.fail("numpy was asked"))
    assert sparsetir.einsum("j,jki->ji", np.ones(4, np.int32), np.ones((4, 1, 0), np.int32)).shape == (4, 0)
    np.testing.assert_array_equal(sparsetir.einsum("jk,k->j", np.ones((3, 0)), np.ones(0)), np.zeros(3))
