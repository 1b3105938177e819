# SPDX-License-Identifier: Apache-2.0
"""Every dtype through the ready programs, the formats and the functions: right against numpy, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import sparsetir
from sparsetir import T, formats, ops
from sparsetir.errors import ArgumentError, ScheduleError, ScriptError
from sparsetir.interop import CooTensor
from sparsetir.ir.rules import FLOAT_FUNCTIONS, FLOATS
from sparsetir.schedules import Choices
from tests.decomposing import FORMATS, compiled, made

FAST = {"kind": "llvm", "opt-level": 0}
SHAPES = ((17, 24), (5, 4), (0, 3))
FEAT = 5


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def small(rng: np.random.Generator, shape: Any, dtype: str) -> np.ndarray:
    """Numbers whose sums of products every dtype holds."""
    least, end = (0, 2) if numpy_dtype(dtype).kind in "bu" else (-1, 2)
    return rng.integers(least, end, shape).astype(numpy_dtype(dtype))


def sparse(rng: np.random.Generator, m: int, n: int, dtype: str) -> tuple[CooTensor, np.ndarray]:
    """A matrix, and the same one as dense integers."""
    dense = np.where(rng.random((m, n)) < 0.3, 1 if dtype in ("bool", "uint8") else rng.choice([-1, 1], (m, n)), 0)
    at = np.nonzero(dense)
    return CooTensor(np.stack(at), dense[at].astype(numpy_dtype(dtype)), (m, n)), dense


def dense_of(found: Any, m: int, n: int) -> np.ndarray:
    out = np.zeros((m, n), found.values.dtype)
    out[tuple(found.coords)] = np.asarray(found.values)
    return out


def run(op: str, kernel: Any, rng: np.random.Generator, m: int, n: int, dtype: str) -> tuple[Any, np.ndarray]:
    """What a kernel of a ready program computes, and what numpy does in integers."""
    A, dense = sparse(rng, m, n, dtype)
    wide: Callable[[Any], Any] = lambda x: np.asarray(x).astype(np.int64)  # noqa: E731
    if op == "spmm":
        B = small(rng, (n, FEAT), dtype)
        return kernel(A=A, B=B), dense @ wide(B)
    if op == "spmv":
        x = small(rng, n, dtype)
        return kernel(A=A, x=x), dense @ wide(x)
    if op == "linear":
        X = small(rng, (FEAT, n), dtype)
        return kernel(A=A, X=X), wide(X) @ dense.T
    X, Y = small(rng, (m, FEAT), dtype), small(rng, (n, FEAT), dtype)
    return dense_of(kernel(S=A, X=X, Y=Y), m, n), dense * (wide(X) @ wide(Y).T)


def check(op: str, kernel: Any, dtype: str) -> None:
    rng = np.random.default_rng(5)
    for m, n in SHAPES:
        found, want = run(op, kernel, rng, m, n, dtype)
        found = np.asarray(found)
        assert found.dtype == numpy_dtype(dtype)
        want = want != 0 if dtype == "bool" else want
        np.testing.assert_array_equal(found.astype(np.float64), want.astype(np.float64))


OPERAND = {"spmm": "A", "spmv": "A", "linear": "A", "sddmm": "S"}
NARROW = ("bool", "int8", "uint8", "float16", "bfloat16")
#: every format in one op and dtype of the narrow ones, in turn
PAIRS = [(name, list(OPERAND)[n % 4], NARROW[n % 5]) for n, name in enumerate(FORMATS)]


@pytest.mark.shared(2)
@pytest.mark.parametrize(("name", "op", "dtype"), PAIRS)
def test_every_format(name: str, op: str, dtype: str) -> None:
    check(op, compiled(sparsetir.decompose_format(getattr(ops, op)(dtype), {OPERAND[op]: made(name)})), dtype)


@pytest.mark.parametrize("op", OPERAND)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
def test_every_ready_program(op: str, dtype: str) -> None:
    check(op, compiled(getattr(ops, op)(dtype)), dtype)


@pytest.mark.parametrize("format", [f for f in ops.FORMATS if f not in ("csr", "bsr")])
def test_bools_in_every_format_of_the_ready_product(format: str) -> None:
    check("spmm", sparsetir.build(ops.spmm("bool", format=format), FAST), "bool")


# --- bools ------------------------------------------------------------------------------------------------------

ELEMENTWISE = """
@T.prim_func
def func(a: T.handle, b: T.handle, c: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I,), "{dtype}")
    B = T.match_sparse_buffer(b, (I,), "{dtype}")
    C = T.match_sparse_buffer(c, (I,), "{dtype}")
    with T.sp_iter([I], "S") as [i]:
        C[i] = {value}
"""
LOGIC = {
    "A[i] + B[i]": np.logical_or,
    "T.max(A[i], B[i])": np.logical_or,
    "A[i] * B[i]": np.logical_and,
    "T.min(A[i], B[i])": np.logical_and,
    "A[i] == B[i]": np.equal,
    "A[i] != B[i]": np.not_equal,
    "A[i] < B[i]": np.less,
    "A[i] <= B[i]": np.less_equal,
    "A[i] > B[i]": np.greater,
    "A[i] >= B[i]": np.greater_equal,
}


def test_bools_are_combined_as_numpy_does() -> None:
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    lines = "\n".join(f"        C{n}[i] = {value}" for n, value in enumerate(LOGIC))
    handles = "".join(f"c{n}: T.handle, " for n in range(len(LOGIC)))
    buffers = "\n".join(f'    C{n} = T.match_sparse_buffer(c{n}, (I,), "bool")' for n in range(len(LOGIC)))
    text = ELEMENTWISE.format(dtype="bool", value="").replace("c: T.handle, ", handles)
    text = text.replace('    C = T.match_sparse_buffer(c, (I,), "bool")', buffers).replace("        C[i] = ", lines)
    func = sparsetir.parse(text)
    found = sparsetir.build(func, FAST)(A=a, B=b)
    judged = sparsetir.interpret(func, {"a": a, "b": b})
    for n, combine in enumerate(LOGIC.values()):
        np.testing.assert_array_equal(found[n], combine(a, b))
        np.testing.assert_array_equal(judged[f"c{n}"], combine(a, b))


@pytest.fixture(scope="module")
def reached() -> list[Any]:
    """SpMM of bools under schedules that sum in other orders."""
    schedules = [None, Choices(chunks=3, tile=8), Choices(chunks=0, unroll=4, tile=16), Choices(carry=1, chunks=2)]
    return [sparsetir.build(ops.spmm("bool"), FAST, schedule=schedule) for schedule in schedules]


@pytest.mark.slow
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 20)),
    density=st.sampled_from([0, 0.1, 0.5, 1]),
    seed=st.integers(0, 99),
)
def test_products_of_bools_say_what_is_reached(
    reached: list[Any], shape: tuple[int, int, int], density: float, seed: int
) -> None:
    m, n, feat = shape
    rng = np.random.default_rng(seed)
    A, B = rng.random((m, n)) < density, rng.random((n, feat)) < 0.4
    at = np.nonzero(A)
    for kernel in reached:
        found = kernel(A=CooTensor(np.stack(at), A[at], A.shape), B=B)
        np.testing.assert_array_equal(found, A.astype(int) @ B.astype(int) > 0)


@pytest.mark.parametrize("operator", ["-", "/"])
def test_bools_have_no_differences(operator: str) -> None:
    with pytest.raises(ScriptError) as caught:
        sparsetir.parse(ELEMENTWISE.format(dtype="bool", value=f"A[i] {operator} B[i]"))
    message = "expected + (or), * (and), T.max, T.min or a comparison of bools, got A[i] {} B[i]; convert them first"
    assert message.format(operator) in str(caught.value)
    assert "<str>:9:" in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int64"])
def test_a_number_is_true_unless_it_is_zero(dtype: str) -> None:
    values = [0, -0.0, 0.5, -1.5, 2, 256, np.inf, np.nan] if dtype in FLOATS else [0, 1, 2, 64]
    a = np.array(values, numpy_dtype(dtype))
    func = sparsetir.parse(
        ELEMENTWISE.format(dtype=dtype, value="A[i]").replace(f'(c, (I,), "{dtype}"', '(c, (I,), "bool"')
    )
    judged = sparsetir.interpret(func, {"a": a, "b": a})["c"]
    np.testing.assert_array_equal(sparsetir.build(func, FAST)(A=a, B=a), judged)
    np.testing.assert_array_equal(judged, a.astype(bool))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_constant_of_16_bits_is_true_unless_it_is_zero(dtype: str) -> None:
    text = ELEMENTWISE.format(dtype="bool", value=f"-T.{dtype}(3) / 2")
    kernel = sparsetir.build(sparsetir.parse(text), FAST)
    assert kernel(A=np.zeros(2, bool), B=np.zeros(2, bool)).tolist() == [True, True]


@pytest.mark.parametrize(("value", "found"), [("3", "3"), ("-T.float32(2)", "-2")])
def test_other_numbers_are_no_bools(value: str, found: str) -> None:
    with pytest.raises(ScriptError, match=f"a bool holds True or False, got the number {found}; write T.bool"):
        sparsetir.parse(ELEMENTWISE.format(dtype="bool", value=value))


OF_TWO = ("atan2", "copysign", "hypot", "ldexp", "pow")


# --- functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_functions_of_numbers_that_are_no_floats_are_refused(dtype: str) -> None:
    for name in FLOAT_FUNCTIONS:
        if name in (*OF_TWO, "sin", "cos", "tan"):  # TVM itself refuses the last
            continue
        with pytest.raises(ScriptError) as caught:
            sparsetir.parse(ELEMENTWISE.format(dtype=dtype, value=f"T.{name}(A[i])"))
        message = f"T.{name} takes {', '.join(FLOATS)}, got A[i] of {dtype}; convert it first, as by T.float32(...)"
        assert message in str(caught.value)


def test_functions_without_machine_code_are_refused() -> None:
    with pytest.raises(ScriptError, match=r"T.fmod has no machine code on CPUs; write A - T.trunc\(A / B\) \* B"):
        sparsetir.parse(ELEMENTWISE.format(dtype="float32", value="T.fmod(A[i], B[i])"))
    with pytest.raises(ScriptError, match=r"T.nextafter takes float32, float64, got A\[i\] of float16"):
        sparsetir.parse(ELEMENTWISE.format(dtype="float16", value="T.nextafter(A[i], B[i])"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_of_16_bit_floats_are_computed_in_float32(dtype: str) -> None:
    terms = [f"T.{name}(A[i])" for name in FLOAT_FUNCTIONS if name not in (*OF_TWO, "acosh")]
    terms += ["T.hypot(A[i], B[i])", "T.atan2(A[i], B[i])", "T.copysign(A[i], B[i])", "T.ldexp(A[i], 1)"]
    text = ELEMENTWISE.format(dtype=dtype, value=" + ".join(terms))
    a, b = (np.array(x).astype(numpy_dtype(dtype)) for x in ([0.5, 0.25, 0.75], [1, -2, 3]))
    found = sparsetir.build(sparsetir.parse(text), FAST)(A=a, B=b).astype(float)
    wide = sparsetir.parse(text.replace(dtype, "float64"))
    want = sparsetir.interpret(wide, {"a": a.astype(float), "b": b.astype(float)})["c"]
    np.testing.assert_allclose(found, want, rtol=float(ml_dtypes.finfo(a.dtype).eps))


# --- how dtypes and numbers are spelled -------------------------------------------------------------------------

SPELLINGS = ["double", "f8", "<f8", float, np.float64, np.dtype("float64")]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_spellings_of_a_dtype_make_one_program(spelling: Any) -> None:
    assert ops.spmv(spelling) is ops.spmv("float64")
    assert ops.spmv(dtype=spelling, idtype=np.int64) is ops.spmv("float64", idtype="int64")


def test_other_spellings() -> None:
    assert ops.spmv(None) is ops.spmv() is ops.spmv("float32")
    assert ops.spmv(ml_dtypes.bfloat16) is ops.spmv("bfloat16")
    assert ops.spmm(format="bsr", block=np.int64(2)) is ops.spmm(format="bsr", block=2)


def test_dtypes_that_are_none_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dtype is one of float16, .*, bool, got 'complex64'$"):
        ops.spmm("complex64")
    with pytest.raises(ArgumentError, match=r"idtype is one of int32, int64, got 'uint32'$"):
        ops.spmm(idtype="uint32")
    with pytest.raises(ArgumentError, match=r"got ndarray; sparsetir.ops.spmm makes a program: build it"):
        ops.spmm(np.ones((2, 2)), np.ones((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"block is the edge of a block of the format bsr, got block=3 for csr"):
        ops.spmm(block=3)


def test_scripts_take_numpy_s_numbers_and_dtypes() -> None:
    from tvm.script import sparsetir as T

    n, dtype, idtype, two = np.int64(3), np.dtype("float32"), np.int32, np.float32(2)

    @T.prim_func
    def double(a: T.handle, c: T.handle):
        I = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I,), dtype)
        C = T.match_sparse_buffer(c, (I,), T.float32)
        with T.sp_iter([I], "S") as [i]:
            C[i] = two * A[i]

    np.testing.assert_array_equal(sparsetir.build(double, FAST)(A=np.ones(3, "float32")), [2, 2, 2])


def test_numpy_s_numbers_everywhere_else() -> None:
    whole = np.int64
    assert Choices(tile=whole(32), chunks=whole(2)) == Choices(tile=32, chunks=2)
    assert repr(formats.bsr(whole(2), whole(4))) == "bsr(r=2, c=4)"
    sparsetir.set_num_threads(whole(sparsetir.get_num_threads()))
    assert sparsetir.build(ops.spmm(), expected_calls=whole(1000)).expected_calls == 1000
    for value in ("x", 2.5):
        with pytest.raises(ScheduleError, match=f"tile: expected an integer, got {value!r}"):
            Choices(tile=value)  # type: ignore[arg-type]


COMPARED = {
    "A[i] != B[i]": lambda a, b: a != b,
    "A[i] == A[i]": lambda a, b: a == a,
    "T.Not(A[i] == B[i])": lambda a, b: ~(a == b),
    "T.Not(A[i] < B[i])": lambda a, b: ~(a < b),
    "T.Not(A[i] >= B[i])": lambda a, b: ~(a >= b),
    "T.Not(T.And(A[i] < B[i], B[i] != A[i]))": lambda a, b: ~((a < b) & (a != b)),
    "T.if_then_else(A[i] != B[i], A[i] != A[i], A[i] > B[i])": lambda a, b: np.where(a != b, a != a, a > b),
}
COMPARING = """
@T.prim_func
def compare(a: T.handle, b: T.handle, y: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I,), "{dtype}")
    B = T.match_sparse_buffer(b, (I,), "{dtype}")
    Y = T.match_sparse_buffer(y, (I,), "bool")
    with T.sp_iter([I], "S", "compare") as [i]:
        Y[i] = {expression}
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_compared_as_numpy_does(dtype: str) -> None:
    values = np.array([np.nan, 1, -np.inf, np.inf, 0, -0.0, 3]).astype(numpy_dtype(dtype))
    a, b = np.repeat(values, len(values)), np.tile(values, len(values))
    for expression, expected in COMPARED.items():
        kernel = sparsetir.build(sparsetir.parse(COMPARING.format(dtype=dtype, expression=expression)))
        np.testing.assert_array_equal(kernel(A=a, B=b), expected(a, b), expression)


OVERFLOWS = {  # into the dtype of the operands, or that which is named
    "A[i] * B[i]": "",
    "T.Cast('int64', A[i] * B[i])": "int64",
    "T.Cast('float64', A[i] - B[i])": "float64",
    "T.Cast('int32', A[i] * 2 == B[i] * 2)": "int32",
    "T.if_then_else(A[i] > B[i], A[i] - B[i], B[i] - A[i])": "",
    "T.max(A[i] + B[i], A[i] * B[i])": "",
}


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_integers_wrap_around(dtype: str) -> None:
    """LLVM is told of no integer that it never overflows, in any expression."""
    limits = np.iinfo(dtype)
    some = np.array([limits.min, limits.min + 1, -1, 0, 1, 2, 7, limits.max // 3, limits.max], dtype)
    a, b = (side.ravel().copy() for side in np.meshgrid(some, some))
    results = list(enumerate(OVERFLOWS.items()))
    handles = "".join(f"c{n}: T.handle, " for n, _ in results)
    declared = "".join(f'    C{n} = T.match_sparse_buffer(c{n}, (I,), "{out or dtype}")\n' for n, (_, out) in results)
    bodies = "".join(f"        C{n}[i] = {text}\n" for n, (text, _) in results)
    program = sparsetir.parse(
        f"@T.prim_func\ndef f(a: T.handle, b: T.handle, {handles}m: T.int32):\n    I = T.dense_fixed(m)\n"
        f'    A = T.match_sparse_buffer(a, (I,), "{dtype}")\n    B = T.match_sparse_buffer(b, (I,), "{dtype}")\n'
        f'{declared}    with T.sp_iter([I], "S", "f") as [i]:\n{bodies}'
    )
    found = sparsetir.build(program, target="llvm")(A=a, B=b)  # with optimisations
    given = {"a": a, "b": b, "m": len(a)}
    given |= {f"c{n}": np.zeros(len(a), out or dtype) for n, out in enumerate(OVERFLOWS.values())}
    with np.errstate(over="ignore"):
        expected = sparsetir.interpret(program, given)
    for number, (text, array) in enumerate(zip(OVERFLOWS, found, strict=True)):
        np.testing.assert_array_equal(array, expected[f"c{number}"], err_msg=text)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremes_with_nan_are_those_of_numpy_over_every_format(reduce: str) -> None:
    """The order of a reduction's steps, which formats and loops choose, decides nothing."""
    numpy_reduce = getattr(np, f"{reduce}imum")
    text = ELEMENTWISE.format(dtype="float32", value=f"T.{reduce}(T.{reduce}(A[i], T.float32(2)), B[i])")
    values = np.array([1, np.nan, 3, -0.0, np.nan, np.inf, -np.inf], "float32")
    a, b = (grid.ravel() for grid in np.meshgrid(values, values))
    found = sparsetir.build(sparsetir.parse(text), FAST)(A=a, B=b)
    np.testing.assert_array_equal(found, numpy_reduce(numpy_reduce(a, np.float32(2)), b))
    rng = np.random.default_rng(5)
    matrix = sp.random_array((40, 50), density=0.3, format="csr", dtype="float32", rng=rng)
    matrix.data[rng.random(matrix.nnz) < 0.05] = np.nan
    B = rng.standard_normal((50, 33)).astype("float32")
    B[rng.random(B.shape) < 0.02] = np.nan
    least = -np.inf if reduce == "max" else np.inf
    terms = np.where((matrix.toarray() != 0)[:, :, None], matrix.toarray()[:, :, None] + B, least)
    wanted = numpy_reduce.reduce(terms, axis=1, initial=least)
    for name in ("csr", "csc", "sell", "hyb", "dcsr", "coo"):
        A = sparsetir.SparseTensor.from_scipy(matrix, format=name)
        found = sparsetir.einsum("ij,jk->ik", A, B, reduce=reduce, combine="add", fill=least)
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6, err_msg=name)


# --- integers of other sizes --------------------------------------------------------------------------------


def full_range(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Integers of all sizes, about half of them small."""
    bounds = np.iinfo(dtype)
    drawn = rng.integers(bounds.min, bounds.max, shape, dtype=dtype, endpoint=True)
    return np.where(rng.random(shape) < 0.5, drawn % 7, drawn).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32", "uint64"])
def test_integers_wrap_as_in_numpy(dtype: str) -> None:
    rng = np.random.default_rng(3)
    dense = [np.where(rng.random((9, 9)) < 0.4, full_range(rng, dtype, (9, 9)), 0).astype(dtype) for _ in range(2)]
    A, B = map(sp.csr_array, dense)
    X = full_range(rng, dtype, (9, 5))
    with np.errstate(over="ignore"):
        for found, expected in (
            (sparsetir.einsum("ij,jk->ik", A, X), dense[0] @ X),
            (sparsetir.matmul(A, B).toarray(), dense[0] @ dense[1]),
            (sparsetir.subtract(A, B).toarray(), dense[0] - dense[1]),
            (sparsetir.maximum(A, B).toarray(), np.maximum(*dense)),
        ):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, expected)


def test_integers_that_a_call_brings() -> None:
    @T.prim_func
    def moved(a: T.handle, b: T.handle, n: T.int32, s: T.uint64, t: T.uint8, w: T.int16):
        I = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I,), "uint64")
        B = T.match_sparse_buffer(b, (I,), "uint64")
        with T.sp_iter([I], "S", "moved") as [i]:
            B[i] = A[i] + s + T.Cast("uint64", t) + T.Cast("uint64", w)

    kernel, x = sparsetir.build(moved), np.arange(3, dtype="uint64")
    for s in (5, 5, 2**63, 2**64 - 1, np.uint64(2**64 - 1), 5):
        np.testing.assert_array_equal(kernel(A=x, s=s, t=255, w=-1), x + np.uint64((int(s) + 254) % 2**64))
    for name, value in (("s", -1), ("s", 2**64), ("t", 256), ("w", -40000)):
        with pytest.raises(ArgumentError, match=f"{name} = {value} does not fit"):
            kernel(A=x, **{"s": 1, "t": 1, "w": 1, name: value})


DIFFERENCE = """
@T.prim_func
def difference(a: T.handle, x: T.handle, y: T.handle, m: T.int32):
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (I,), "{narrow}")
    X = T.match_sparse_buffer(x, (I,), "{narrow}")
    Y = T.match_sparse_buffer(y, (I,), "{wide}")
    with T.sp_iter([I], "S", "difference") as [i]:
        Y[i] = {term}
"""


@pytest.mark.parametrize(("narrow", "wide"), [("uint32", "uint64"), ("uint32", "uint32"), ("uint64", "uint64")])
@pytest.mark.parametrize(
    "term", ["({a} - {x}) * ({a} - {x})", "{x} * {x} * {a} - {x}", "{a} - {x} * T.{wide}(4000000000)"]
)
def test_unsigned_numbers_wrap_around(narrow: str, wide: str, term: str) -> None:
    """As numpy's: LLVM may take sums, differences and products of unsigned numbers for ones that never do."""
    numbers = np.array([0, 1, 3, 2**31, 2**32 - 1] * 8, narrow)
    a, x = numbers, numbers[::-1].copy()
    names = {"a": f"T.Cast('{wide}', A[i])", "x": f"T.Cast('{wide}', X[i])", "wide": wide}
    text = DIFFERENCE.format(narrow=narrow, wide=wide, term=term.format(**names))
    found = sparsetir.build(sparsetir.parse(text))(A=a, X=x)
    a, x, number = a.astype(wide), x.astype(wide), np.array(4_000_000_000, wide)
    want = {"({a}": lambda: (a - x) * (a - x), "{x} ": lambda: x * x * a - x, "{a} ": lambda: a - x * number}[
        term[:4]
    ]()
    np.testing.assert_array_equal(found, want)
