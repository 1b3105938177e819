# SPDX-License-Identifier: Apache-2.0
"""One matrix in every dtype and class through the doors without a program, against numpy on what is stored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import sparsetir
import torch
from sparsetir import CooTensor, SparseTensor, einsum, einsum_expression
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError

DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("csr", "csc", "coo", "dcsr", "ell", "bsr")
INF = float("inf")


def drawn(seed: int, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """Small whole numbers, which every dtype holds."""
    rng = np.random.default_rng(seed)
    low = 0 if np.dtype(dtype).kind in "ub" else -3
    return np.where(rng.random(shape) < 0.4, rng.integers(low, 4, shape), 0).astype(dtype)


def same(found: Any, expected: np.ndarray, dtype: Any) -> None:
    assert found.dtype == dtype
    found = found if isinstance(found, np.ndarray) else SparseTensor.from_any(found).to_dense()
    np.testing.assert_array_equal(found.astype(np.float64), expected.astype(dtype).astype(np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_short_dtypes(name: str) -> None:
    dtype = DTYPES[name]
    X, Y = drawn(1, (5, 6), dtype), drawn(2, (5, 6), dtype)
    x, y = X.astype(np.int64), Y.astype(np.int64)
    for number, format in enumerate(FORMATS):
        A, B = SparseTensor.from_dense(X, format), SparseTensor.from_dense(Y, FORMATS[number - 1])
        same(sparsetir.matmul(A, B.T), x @ y.T, dtype)
        same(A @ B.T, x @ y.T, dtype)
        same(A + B, x + y, dtype)
        same(A - B, x - y, dtype)
        same(A * B, x * y, dtype)
        same(sparsetir.maximum(A, B), np.maximum(x, y), dtype)
        same(sparsetir.add(A, B, 2, 3), 2 * x + 3 * y, dtype)
        same(einsum("ij,ij->ij", A, B, combine="add"), x + y, dtype)
        same(A - Y, x - y, dtype)
        same(Y - A, y - x, dtype)
    best = sparsetir.matmul(A, B.T, top=2, threshold=0)
    kept = np.sort(np.where(x @ y.T > 0, x @ y.T, 0), axis=1)[:, -2:]
    np.testing.assert_array_equal(np.sort(best.to_dense().astype(int), axis=1)[:, -2:], kept)
    T, U = (SparseTensor.from_dense(Z.reshape(5, 3, 2)) for Z in (X, Y))
    same(T - U, (x - y).reshape(5, 3, 2), dtype)
    same(einsum("ijk,ijk->ijk", T, U, combine="add"), (x + y).reshape(5, 3, 2), dtype)
    for format in ("csc", "coo"):
        assert A.to_scipy(format).dtype == dtype


@pytest.mark.slow
def test_mixed_dtypes() -> None:
    """A difference is taken in the common dtype, whatever each operand can hold."""
    shape = (2, 3, 2)
    for order in ((2, 6), shape):
        low, five = np.full(order, -128, np.int8), np.full(order, 5, np.int32)
        S, R = SparseTensor.from_dense(five), SparseTensor.from_dense(low)
        for found in (S - R, S - low, five - R):
            same(found, np.full(order, 133), np.int32)
        half = SparseTensor.from_dense(low.astype(ml_dtypes.bfloat16))
        same(half * S, np.full(order, -640), np.float64)
        same(half + S, np.full(order, -123), np.float64)
        with pytest.raises(ArgumentTypeError, match="bools have no difference"):
            S.astype(bool) - R.astype(bool)
    pattern = sp.csr_array(np.eye(3, dtype=bool)[:, :2])
    for matrix in (pattern, pattern.tolil(), pattern.tocoo()):
        for name in ("float16", "bfloat16"):
            same(einsum("ij,jk->ik", matrix, np.ones((2, 2), DTYPES[name])), pattern @ np.ones((2, 2)), DTYPES[name])
    wide = einsum("ij,j->i", pattern.astype(np.uint8) * 200, np.full(2, -2, np.int8))
    same(wide, np.array([-400, -400, 0]), np.int16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_short_reductions(name: str) -> None:
    dtype = DTYPES[name]
    S = SparseTensor.from_dense(np.full((100, 100), 1000, dtype))
    assert S.mean().dtype == dtype
    assert abs(float(S.mean()) - 1000) <= 8
    D = np.array([[0, 2.0, 0], [np.nan, -1, 0], [0, 0, 3]])
    N = SparseTensor.from_dense(D.astype(dtype))
    for axis in (None, 0, 1):
        for which in ("max", "min"):
            found = getattr(N, which)(axis)
            assert found.dtype == dtype
            np.testing.assert_array_equal(np.asarray(found, float), getattr(D, which)(axis))
    assert sparsetir.linear_operator(N).dtype == np.float64


@pytest.mark.slow
def test_numbers() -> None:
    """What a number does to zeros that are not stored, and numbers of other classes than Python's."""
    D = np.array([[49.0, 0], [0, 1e-310]])
    S, A = SparseTensor.from_dense(D), sp.csr_array(np.array([[1, 2], [0, 3]]))
    same(S / D.clip(1e-310), np.eye(2), np.float64)  # no reciprocal, which would overflow
    same(S * Fraction(1, 2), D / 2, np.float64)
    same(SparseTensor.from_dense(A.toarray()) + 0.0, A.toarray(), np.float64)
    copied = S + 0
    copied.values[:] = 7
    assert S.values[0] == 49
    for bad in (INF, -INF, np.nan):
        with pytest.raises(ArgumentError, match=r"zeros that are not stored would not stay zero under \*"):
            S * bad
    for bad in (0, np.nan):
        with pytest.raises(ArgumentError, match="zeros that are not stored would not stay zero under /"):
            S / bad
    for half in (0.5, np.float32(0.5), Fraction(1, 2), np.array(0.5)):
        same(sparsetir.add(A, A, alpha=half), 1.5 * A.toarray(), np.float64)
    same(sparsetir.add(A, A, alpha=1e30), 1e30 * A.toarray() + A.toarray(), np.float64)
    for bad in (1j, "2", None, np.ones(2)):
        with pytest.raises(ArgumentTypeError, match="alpha of add: expected a real number"):
            sparsetir.add(A, A, alpha=bad)
    with pytest.raises(ArgumentError, match="takes factors of 64 bits"):
        sparsetir.add(A, A, alpha=10**30)
    Y = sp.csr_array(np.array([[1, 2], [0, INF]]))
    assert sparsetir.matmul(Y, sp.eye_array(2, format="csr"), threshold=INF).nnz == 0
    assert sparsetir.matmul(Y, Y, threshold=np.nan).nnz == 0
    with pytest.raises(ArgumentError, match="threshold: expected less than the largest int64"):
        sparsetir.matmul(A, A, threshold=np.nan)
    with pytest.raises(ArgumentTypeError, match="threshold: expected a real number"):
        sparsetir.matmul(A, A, threshold="x")
    with pytest.raises(ArgumentTypeError, match="an axis is a whole number"):
        S.sum(axis=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("reduce", "combine", "fill"), [("sum", "min", 0), ("max", "add", -INF)])
def test_entries_with_the_same_coordinates(reduce: str, combine: str, fill: float) -> None:
    """They add up before anything else is done with them, in each class that can hold them."""
    A = sp.csr_array(([1.0, 1, 1, 2], [0, 0, 1, 1], [0, 2, 4]), shape=(2, 2))
    B = np.array([[2.0, 5], [3, 1]])
    whole = A.copy()
    whole.sum_duplicates()
    options = {"reduce": reduce, "combine": combine, "fill": fill}
    for other in (sp.csr_array(B), SparseTensor.from_dense(B)):
        expected = einsum("ij,kj->ik", whole, B, result="dense", **options)
        for matrix in (A, A.tocsc(), sp.coo_array(A)):
            np.testing.assert_array_equal(einsum("ij,kj->ik", matrix, other, result="dense", **options), expected)
            if (reduce, combine) != ("sum", "min"):
                found = einsum("ij,kj->ik", matrix, other, result="sparse", **options)
                np.testing.assert_array_equal(SparseTensor.from_any(found).to_dense(), expected)


def test_operands_of_another_kind_are_refused() -> None:
    """An expression is called with, and bound to, operands like its own only; broadcasting is part of that."""
    D, x = drawn(3, (4, 4)), np.arange(4.0)
    step = einsum_expression("ij,j->i", SparseTensor.from_dense(D), x)
    for wrong in (SparseTensor.from_dense(D, "csc"), SparseTensor.from_dense(D[None]), sp.csr_array(D), D):
        with pytest.raises(ArgumentTypeError, match="but the expression was made for"):
            step.bind(wrong)
        with pytest.raises(ArgumentTypeError, match="but the expression was made for"):
            step.bind(None, x)(wrong)
    for wrong in (x.astype("float32"), np.arange(4), np.ones((4, 2))):
        with pytest.raises(ArgumentTypeError, match="operand 1 is dense"):
            step.bind(SparseTensor.from_dense(D))(wrong)
    spread = einsum_expression("ij,ij->ij", sp.csr_array(D), (1, 4))
    for call in (spread, lambda a, b: spread.bind(a)(b)):
        np.testing.assert_array_equal(call(sp.csr_array(D), x[None]).toarray(), D * x)
        with pytest.raises(ArgumentError, match="was made for 1, which is broadcast"):
            call(sp.csr_array(D), np.ones((4, 4)))


def test_another_pattern_of_the_same_format() -> None:
    """How full the first level is decides about loops, not about which operands fit."""
    thin = np.zeros((2000, 3, 2))
    thin[[5, 1999], 1, 1] = 2, 3
    full = drawn(4, (2000, 3, 2))
    v = np.array([1.0, 2])
    for first, second in ((thin, full), (full, thin)):
        step = einsum_expression("ijk,k->i", SparseTensor.from_dense(first), v)
        if first is full:
            np.testing.assert_array_equal(step(SparseTensor.from_dense(second), v), np.einsum("ijk,k->i", second, v))
        np.testing.assert_array_equal(step(SparseTensor.from_dense(first), v), np.einsum("ijk,k->i", first, v))
    for format in ("coo", "csf"):  # the result has the first levels of a tree, which a list is made into
        found = einsum("ijk,k->ij", SparseTensor.from_dense(full, format), v, result="sparse")
        np.testing.assert_array_equal(SparseTensor.from_any(found).to_dense(), np.einsum("ijk,k->ij", full, v))


@pytest.mark.slow
def test_wide_coordinates_after_narrow_ones() -> None:
    """An expression that is kept for 32 bits is not used for coordinates that need 64."""
    for wide in (False, True):
        n = 2**34 if wide else 3
        coords = (
            np.array([0, 1], np.int64 if wide else np.int32),
            np.array([0, n - 1], np.int64 if wide else np.int32),
        )
        coo = sp.coo_array((np.array([1.0, 2]), coords), shape=(2, n))
        for value in (coo, CooTensor(np.stack(coords), coo.data, coo.shape), coo.todok(), SparseTensor.from_any(coo)):
            assert einsum("ij,ij->i", value, value).tolist() == [1, 4]
            total = SparseTensor.from_any(einsum("ij,ij->ij", value, value, combine="add"))
            assert total.shape == (2, n)
            assert total.values.tolist() == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (1, 0, 2)])
def test_dimensions_in_another_order(order: tuple[int, ...]) -> None:
    D = drawn(5, (2, 3, 4))
    text = "ijk->" + "".join("ijk"[d] for d in order)
    listed = torch.from_numpy(D)
    for value in (SparseTensor.from_dense(D), sp.coo_array(D), *(listed.to_sparse(n) for n in (1, 2, 3))):
        np.testing.assert_array_equal(SparseTensor.from_any(einsum(text, value)).to_dense(), D.transpose(order))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_computed_patterns_of_every_class(name: str) -> None:
    """Layouts of which torch makes no rows itself, and formats of which scipy makes none of 16 bits."""
    dtype = DTYPES[name]
    D = drawn(6, (4, 6), dtype)
    d, half = D.astype(np.int64), name != "float32"
    dense = torch.from_numpy(D.astype("float32")).to(getattr(torch, name))
    values: list[Any] = [dense.to_sparse(1), dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    values += [dense.to_sparse_bsr((2, 3)), dense.to_sparse_bsc((2, 3))]
    values += [SparseTensor.from_dense(D, f) for f in FORMATS]
    values += [SparseTensor.from_dense(D).to_scipy(f) for f in ("csr", "csc", "coo")]
    values += [] if half else [sp.csr_array(D).asformat(f) for f in ("bsr", "lil", "dok", "dia")]
    kernel = sparsetir.build(sparsetir.ops.add(name))
    for value, other in zip(values, [*values[1:], values[0]], strict=True):
        for found, expected in (
            (einsum("ij,kj->ik", value, other), d @ d.T),
            (einsum("ij,ij->ji", value, other, combine="add"), 2 * d.T),
            (sparsetir.add(value, other, 2), 3 * d),
            (sparsetir.maximum(value, other), d),
        ):
            assert str(found.dtype).removeprefix("torch.") == name
            np.testing.assert_array_equal(SparseTensor.from_any(found).to_dense().astype(np.int64), expected)
        if sp.issparse(value):
            found = kernel(A=value, B=value)
            assert (found.format, found.dtype) == (value.format, dtype)
            np.testing.assert_array_equal(SparseTensor.from_any(found).to_dense().astype(np.int64), 2 * d)


@pytest.mark.slow
def test_the_other_byte_order() -> None:
    """Results are in the order of this machine."""
    D = drawn(7, (4, 4))
    E = D.astype(D.dtype.newbyteorder())
    assert einsum("ij,jk->ik", E, D).dtype.isnative
    assert einsum("ij->ji", E).dtype.isnative
    np.testing.assert_array_equal(einsum("ij,jk->ik", E, torch.from_numpy(D)), D @ D)
    np.testing.assert_array_equal(einsum("ij,jk->ik", sp.csr_array(D), E), D @ D)


@pytest.mark.slow
def test_gradients_are_not_lost() -> None:
    """What torch expects gradients of is refused, and computed with where it expects none."""
    D = torch.from_numpy(drawn(8, (4, 6)))
    layouts = [D.to_sparse(n) for n in (1, 2)] + [D.to_sparse_csr(), D.to_sparse_csc()]
    layouts += [D.to_sparse_bsr((2, 3)), D.to_sparse_bsc((2, 3)), D]
    calls = {
        "einsum": lambda A: einsum("ij,kj->ik", A, A),
        "expression": lambda A: einsum_expression("ij,kj->ik", A, A)(A, A),
        "bind": lambda A: einsum_expression("ij,kj->ik", A, A).bind(None, A),
        "bound": lambda A: einsum_expression("ij,kj->ik", A, A).bind(A.detach())(A),
        "compute": lambda A: sparsetir.compute(sparsetir.lazy(A) @ np.ones((6, 2))),
        "fused": lambda A: sparsetir.fused(lambda x: sparsetir.lazy(A) @ x)(np.ones((6, 2))),
    }
    for A in layouts:
        parameter = A.detach().clone().requires_grad_()
        for call in calls.values():
            with pytest.raises(ArgumentTypeError, match=r"requires grad, but .* has no gradients"):
                call(parameter)
        with torch.no_grad():
            calls["einsum"](parameter)
            calls["bound"](parameter)
    with torch.inference_mode():
        calls["compute"](layouts[0].detach().clone().requires_grad_())


BROKEN = 10**9


def broken(layout: str) -> Any:
    """A matrix with an index that scipy and torch, which do not look, would write at."""
    A = sp.csr_array(np.ones((4, 4))).asformat(layout.removeprefix("torch "))
    if layout.startswith("torch"):
        rows, columns, ones = torch.tensor([0, BROKEN]), torch.tensor([1, 2]), torch.ones(2)
        if layout == "torch coo":
            return torch.sparse_coo_tensor(torch.stack([rows, columns]), ones, (4, 4), check_invariants=False)
        starts = torch.tensor([0, 1, 2, 2, 2])
        return torch.sparse_csc_tensor(starts, rows, ones, (4, 4), check_invariants=False)
    if layout == "coo":
        A.coords[0][3] = BROKEN
    elif layout == "csc":
        A.indptr[2] = BROKEN
    else:
        A.indices[-1] = BROKEN
    return A


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr", "torch coo", "torch csc"])
def test_broken_structures_are_refused(layout: str) -> None:
    A, S = broken(layout), sp.csr_array(np.ones((4, 4)))
    calls = {
        "product": lambda: sparsetir.matmul(A, S),
        "mask": lambda: sparsetir.matmul(S, S, mask=A),
        "sum": lambda: sparsetir.add(S, A),
        "triangles": lambda: sparsetir.triangles(A),
        "transposed": lambda: einsum("ij,ji->ij", S, A, combine="add"),
        "under a mask": lambda: einsum("ij,jk,ki->", A, S, S),
        "as a factor": lambda: einsum("ij,ik,jk->ij", S, S, A),
    }
    for call in calls.values():
        with pytest.raises(StructureError):
            call()


class Derived(torch.Tensor):
    """A class of tensors as users derive them."""


@pytest.mark.slow
def test_tensors_of_derived_classes() -> None:
    D = drawn(9, (4, 4))
    S, X = sp.csr_array(D), torch.from_numpy(drawn(10, (4, 2))).as_subclass(Derived)
    for found in (
        einsum("ij,jk->ik", S, X),
        sparsetir.matmul(S, X),
        sparsetir.compute(sparsetir.lazy(S) @ X),
        sparsetir.build(sparsetir.ops.spmm("float64"))(A=S, B=X),
    ):
        assert isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(found.numpy(), D @ X.numpy())
    with pytest.raises(ArgumentTypeError, match="requires grad"):
        sparsetir.matmul(S, X.requires_grad_())


def products_with(A: Any) -> dict[str, Callable[[Any], Any]]:
    """Multiply a matrix by a tensor through each door."""
    kernel, S = sparsetir.build(sparsetir.ops.spmm("float64")), SparseTensor.from_any(A)
    return {
        "kernel": lambda X: kernel(A=A, B=X),
        "bound kernel": lambda X: kernel.bind(A=A)(B=X),
        "matmul": lambda X: sparsetir.matmul(A, X),
        "einsum": lambda X: einsum("ij,jk->ik", A, X),
        "SparseTensor": lambda X: S @ X,
        "lazy": lambda X: sparsetir.compute(sparsetir.lazy(A) @ X),
    }


DOORS = list(products_with(sp.csr_array(np.eye(2))))


@pytest.mark.parametrize("name", DOORS)
def test_derivatives_that_no_kernel_has_are_refused(name: str) -> None:
    """Warm calls refuse what first calls refuse: gradients, tangents, transforms and tensors without numbers."""
    D, X = drawn(9, (4, 4)), torch.from_numpy(drawn(10, (4, 2)))
    product, parameter = products_with(sp.csr_array(D))[name], torch.nn.Parameter(X.clone())
    expected = D @ X.numpy()
    with FakeTensorMode():
        fake = torch.rand(4, 2, dtype=torch.float64)
    for _ in range(3):
        with torch.no_grad():
            for tensor in (X, parameter):
                result = product(tensor)
                assert type(result) is torch.Tensor
                assert not result.requires_grad
                np.testing.assert_array_equal(result.numpy(), expected)
        with torch.inference_mode():
            np.testing.assert_array_equal(product(X).numpy(), expected)
        np.testing.assert_array_equal(product(torch._neg_view(X)).numpy(), -expected)
        with pytest.raises(ArgumentTypeError, match="requires grad"):
            product(parameter)
        with forward_ad.dual_level():
            with pytest.raises(ArgumentTypeError, match="tangent"):
                product(forward_ad.make_dual(X, X))
            np.testing.assert_array_equal(product(X).numpy(), expected)
        for transform in (torch.func.vmap(product), lambda X: torch.func.jvp(product, (X[0],), (X[0],))):
            with pytest.raises(LoweringError, match=r"torch\.func"):
                transform(X[None])
        with pytest.raises(LoweringError, match=r"torch\.func"):  # the update in place is not in its memory yet
            torch.func.functionalize(lambda x: product(x.clone().add_(1)))(X)
        constant = torch.func.vmap(lambda y: y + product(X).sum())(torch.zeros(2, dtype=torch.float64))
        np.testing.assert_array_equal(constant.numpy(), [expected.sum()] * 2)
        with pytest.raises(ArgumentTypeError, match="FakeTensor"):
            product(fake)


# ------------------------------------------------------------------ frames of warm calls


def count_frames(call: Callable[[], Any]) -> int:
    """Count the Python functions that a warm call enters."""
    for _ in range(40):  # plans, compiled validation, functions for small products and for short rows are there then
        call()
    count = [0]

    def note(_frame: Any, event: str, _argument: Any) -> None:
        count[0] += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count[0]


def test_warm_calls_enter_few_functions() -> None:
    A = sp.random_array((300, 300), density=0.05, format="csr", dtype="float32", rng=np.random.default_rng(0))
    A.sort_indices()
    x, B, S = np.ones(300, "float32"), np.ones((300, 8), "float32"), sparsetir.SparseTensor.from_any(A)
    kernel = sparsetir.build(sparsetir.ops.spmm())
    bound, T, X, C = kernel.bind(A=A), A.T, torch.ones(300, 8), np.ones((4, 300), "float32")
    thin = sp.random_array((300, 300), density=0.01, format="csr", dtype="float32", rng=np.random.default_rng(0))
    thin.sort_indices()
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "matmul(A, B)": (lambda: sparsetir.matmul(A, A), 36),
        "small matmul(A, B)": (lambda: sparsetir.matmul(thin, thin), 28),
        "matmul(A, B, mask)": (lambda: sparsetir.matmul(thin, thin, mask=A), 30),
        "matmul(A, B, top)": (lambda: sparsetir.matmul(thin, thin, top=2), 36),
        "matmul(A.T, A)": (lambda: sparsetir.matmul(T, A), 160),
        "matmul(A, x)": (lambda: sparsetir.matmul(A, x), 18),
        "matmul(A.T, x)": (lambda: sparsetir.matmul(T, x), 18),
        "matmul(x, A)": (lambda: sparsetir.matmul(x, A), 18),
        "matmul(A, dense)": (lambda: sparsetir.matmul(A, B), 18),
        "matmul(A, column)": (lambda: sparsetir.matmul(A, x[:, None]), 18),
        "SparseTensor @ column": (lambda: S @ x[:, None], 20),
        "matmul(A, torch)": (lambda: sparsetir.matmul(A, X), 20),
        "einsum": (lambda: sparsetir.einsum("ij,j->i", A, x), 18),
        "einsum of torch": (lambda: sparsetir.einsum("ij,jk->ik", A, X), 20),
        "einsum of SparseTensor": (lambda: sparsetir.einsum("ij,jk->ik", S, B), 18),
        "kernel": (lambda: kernel(A=A, B=B), 16),
        "kernel of SparseTensor": (lambda: kernel(A=S, B=B), 16),
        "bound kernel": (lambda: bound(B=B), 8),
        "SparseTensor @ x": (lambda: S @ x, 20),
        "SparseTensor @ dense": (lambda: S @ B, 20),
        "dense @ SparseTensor": (lambda: C @ S, 23),
        "SparseTensor @ SparseTensor": (lambda: S @ S, 181),
    }
    frames = {name: count_frames(call) for name, (call, _) in calls.items()}
    assert not {name: count for name, count in frames.items() if count > calls[name][1]}


# ------------------------------------------------------------------ histories of calls


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": sparsetir.matmul,
    "einsum": lambda A, B: einsum("ij,jk->ik" if B.ndim == 2 else "ij,j->i", A, B),
    "operator": lambda A, B: SparseTensor.from_any(A) @ B,
}


class DerivedRows(sp.csr_array):
    """A class of matrices as users derive them."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_history_of_calls_is_right(name: str) -> None:
    """Calls go to the kernel of an earlier call: what differs from that one must be seen."""
    product, rng = PRODUCTS[name], np.random.default_rng(3)

    def check(A: Any, B: Any, dtype: str) -> None:
        found = product(A, B)
        assert found.dtype == dtype
        dense = A.toarray() if sp.issparse(A) else A.to_dense()
        np.testing.assert_array_equal(found, (dense @ np.asarray(B)).astype(dtype))

    def draw(*shape: int, dtype: str = "float32") -> np.ndarray:
        return drawn(int(rng.integers(1000)), shape, np.dtype(dtype))

    A, B = sp.csr_array(draw(9, 7)), draw(7, 4)
    for _ in range(8):
        check(A, B, "float32")
    A.data *= 2  # values in place
    check(A, B, "float32")
    A.indices[:] = np.where(A.indices == 6, 0, A.indices)  # structure in place: entries with the same coordinates
    check(A, B, "float32")
    A.indices[: A.indptr[1]] = A.indices[: A.indptr[1]][::-1]  # rows that are not sorted
    check(A, B, "float32")
    for other in (sp.csr_array(draw(3, 7)), A.tocsc(), sp.csr_matrix(A), sp.coo_array(A), DerivedRows(A), A.tobsr()):
        check(other, B, "float32")
    for values in (
        draw(7, 8)[:, ::2],
        np.asfortranarray(B),
        draw(7),
        draw(14)[::2],
        draw(7, 1),
        np.zeros((7, 0), "f4"),
    ):
        check(A, values, "float32")
    read_only = B.copy()
    read_only.flags.writeable = False
    check(A, read_only, "float32")
    check(A, B.astype(B.dtype.newbyteorder()), "float32")
    for dtype in ("float64", "int64", "int8"):
        check(A.astype(dtype), B.astype(dtype), dtype)
        check(A, B.astype("float64"), "float64")
    wide = sp.csr_array((A.data, A.indices.astype(np.int64), A.indptr.astype(np.int64)), shape=A.shape)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    for _ in range(3):
        check(wide, B, "float32")
    for one in (sp.csr_array(draw(1, 7)), sp.csr_array((1, 7), dtype="float32")):
        check(one, B, "float32")
    column = sp.csr_array(np.ones((5, 1), "float32"))
    for _ in range(3):
        check(column, draw(1, 4), "float32")
    check(A, B, "float32")


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "coo"])
def test_histories_of_torch_tensors(layout: str) -> None:
    D, X = drawn(11, (6, 4)), torch.from_numpy(drawn(12, (4, 3)))
    for number in range(8):
        A = SparseTensor.from_dense(D, "bsr", r=2, c=2).to_torch() if layout == "bsr" else None
        A = torch.from_numpy(D).to_sparse(layout=getattr(torch, f"sparse_{layout}")) if A is None else A
        if layout == "csr" and number % 3 == 2:
            A = torch.sparse_csr_tensor(A.crow_indices().int(), A.col_indices().int(), A.values(), A.shape)
        for found in (sparsetir.matmul(A, X), einsum("ij,jk->ik", A, X), sparsetir.matmul(A, X.numpy())):
            np.testing.assert_array_equal(np.asarray(found), D @ X.numpy())
            assert isinstance(found, torch.Tensor)
        D = drawn(20 + number, (6, 4))


@pytest.mark.parametrize("name", PRODUCTS)
def test_warm_calls_refuse_what_first_calls_refuse(name: str) -> None:
    product, A, B = PRODUCTS[name], sp.csr_array(drawn(5, (6, 5), np.dtype("f4"))), drawn(6, (5, 3), np.dtype("f4"))
    first = []
    for attempt in range(2):
        errors = []
        for wrong in (B[:4], B[:4, 0], torch.ones(5, 3).requires_grad_(), B.astype(object)):
            with pytest.raises((ArgumentError, ArgumentTypeError)) as error:
                product(A, wrong)
            errors.append(str(error.value))
        first = first or errors
        assert errors == first, attempt
        for _ in range(6):
            product(A, B)
    A.indices[1] = 77
    with pytest.raises(StructureError):
        product(A, B)


def test_values_of_a_tensor_change_in_place() -> None:
    S, x = SparseTensor.from_dense(drawn(7, (6, 5))), np.arange(5.0)
    for _ in range(8):
        np.testing.assert_array_equal(S @ x, S.to_dense() @ x)
        S.values[:] += 1
    T = S.astype("float32")
    np.testing.assert_array_equal(T @ x, S.to_dense() @ x)
    np.testing.assert_array_equal((S.with_values(S.values * 2)) @ x, 2 * S.to_dense() @ x)
