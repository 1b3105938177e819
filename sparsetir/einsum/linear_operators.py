# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices as linear operators of scipy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as linalg

from sparsetir import ops
from sparsetir.build import build
from sparsetir.einsum.expression import einsum_expression
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.formats import heuristics
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import is_sparse
from sparsetir.interop.arrays import compressed_of
from sparsetir.kernel_factory import make_kernel
from sparsetir.runtime.adaptive import MIN_ENTRIES, TRIAL_CALLS, TRIAL_SECONDS, Trial, in_background
from sparsetir.runtime.bound import BoundKernel
from sparsetir.utils.arguments import is_float, is_integer, renamed_parameters, shown
from sparsetir.utils.caches import cached_property

Convert: TypeAlias = "Callable[[Any, int], tuple[list[Callable[[Any], Any]], bool]]"

REAL = np.dtype("float32"), np.dtype("float64")
COMPLEX = np.dtype("complex64"), np.dtype("complex128")
LOOKS, AGAIN = 4, 4  # times that a format is looked for, each after so many times the products before


@renamed_parameters(calls="expected_calls")
def linear_operator(A: Any, *, expected_calls: int | None = None) -> linalg.LinearOperator:
    """Wrap a sparse matrix as a linear operator for scipy's solvers.

    The first products of a matrix in compressed rows or columns are scipy's, and those of a complex matrix remain
    scipy's. Once those with vectors, or with matrices, have taken some time, a thread compiles that kind of product and
    converts the matrix to the format that ``sparsetir.build(program, expected_calls=...)`` finds for it, while scipy
    goes on. Then some are timed each way, and the fastest one makes the others. A second copy of the matrix is kept for
    each format.

    Parameters
    ----------
    A : sparse matrix, shape (m, n)
        Of scipy, torch or a `SparseTensor`, of float32 or float64, complex64 or complex128. Integers, bools and other
        floats become float64.
    expected_calls : int, optional
        About how many products of each kind will be made. Where so many take much longer than looking for a format, the
        first one waits until that is found and compiled. By default as many are expected as have been made, once these
        are eight and have taken 0.2 seconds, and again after four times as many until a format pays. 0 keeps the format
        of `A`.

    Returns
    -------
    scipy.sparse.linalg.LinearOperator
        Its products, also those with the transposed matrix, run on all threads. Values of `A` that change later may
        not be seen. It can be pickled; formats are then looked for again.

    Raises
    ------
    ArgumentTypeError
        `A` is not sparse, or holds numbers that float64 and complex128 do not, or `expected_calls` is no integer.
    ArgumentError
        `A` is no matrix, or `expected_calls` is negative.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, scipy.sparse.linalg as linalg, sparsetir
    >>> A = sp.diags_array([-np.ones(9), 2.5 * np.ones(10), -np.ones(9)], offsets=[-1, 0, 1]).tocsr()
    >>> x, info = linalg.cg(sparsetir.linear_operator(A), np.ones(10))
    >>> info, bool(np.allclose(A @ x, np.ones(10), atol=1e-4))
    (0, True)
    """
    if not is_sparse(A):
        raise ArgumentTypeError(f"linear_operator takes a sparse matrix, got {type(A).__name__}")
    if len(A.shape) != 2:
        raise ArgumentError(f"linear_operator takes a matrix, got {len(A.shape)} dimensions")
    matrix = _plain_matrix(A)
    tensor = None
    if matrix is None:
        tensor = A if isinstance(A, SparseTensor) else SparseTensor.from_any(A, "csr")
        if tensor.dtype in COMPLEX:
            matrix = _plain_matrix(tensor.to_scipy("csr", copy=False))
            tensor = None
        elif tensor.dtype.kind not in "iub" and not is_float(tensor.dtype):
            raise ArgumentTypeError(
                f"A: expected numbers that float64 or complex128 holds, got {tensor.dtype}. Convert them with astype."
            )
        elif tensor.dtype not in REAL:
            tensor = _in_float64(tensor)
    if expected_calls is not None and not is_integer(expected_calls):
        raise ArgumentTypeError(
            f"expected_calls: expected an integer, got {shown(expected_calls)}. Pass a number of products."
        )
    if expected_calls is not None and expected_calls < 0:
        raise ArgumentError(
            f"expected_calls: expected a non-negative integer, got {expected_calls}. Pass 0 to keep the format."
        )
    return _Operator(matrix, tensor, expected_calls)


def _plain_matrix(A: Any) -> Any:
    """Return scipy's matrix in compressed rows or columns around the arrays of `A`; None where that needs conversions.

    Converting to a `SparseTensor` takes as long as many products of a small matrix, so only long solves pay for it.
    """
    if not sp.issparse(A):
        return None
    kind = {"csr": sp.csr_array, "csc": sp.csc_array}.get(A.format)
    if kind is None or A.dtype not in REAL + COMPLEX or not A.dtype.isnative:
        return None
    indptr, indices, minor = A.indptr, A.indices, A.shape[A.format == "csr"]
    arrays = (indptr, indices, A.data)
    if any(type(array) is not np.ndarray or array.ndim != 1 or not array.flags.c_contiguous for array in arrays):
        return None
    is_whole = indptr.size == A.shape[A.format == "csc"] + 1 and indptr[0] == 0 and indptr[-1] == indices.size
    if not is_whole or indices.size != A.data.size or indptr.dtype != indices.dtype or indices.dtype.kind != "i":
        return None
    if indices.size and (indices.min() < 0 or indices.max() >= minor or (indptr[1:] < indptr[:-1]).any()):
        return None
    return compressed_of(kind, indptr, indices, A.data, A.shape)


def _in_float64(tensor: SparseTensor) -> SparseTensor:
    """Convert the values to float64; raise for values that it does not hold."""
    wide = tensor.astype("float64")
    if tensor.dtype.itemsize < 8:
        return wide
    values, exact = tensor.values, wide.values
    limit = {"i": 2.0**63, "u": 2.0**64}.get(tensor.dtype.kind, np.inf)
    inside = np.abs(exact) < limit if np.isfinite(limit) else np.full(exact.shape, fill_value=True)
    same = (np.where(inside, exact, 0).astype(tensor.dtype) == values) & inside | (values != values)
    if not same.all():
        raise ArgumentTypeError(f"A: expected values that float64 holds, got {tensor.dtype} {values[~same][0]}")
    return wide


class _Operator(linalg.LinearOperator):
    def __init__(self, matrix: Any, tensor: SparseTensor | None, expected_calls: int | None) -> None:
        self.matrix, self.expected_calls = matrix, expected_calls
        if tensor is not None:
            self.tensor, self.matrix = tensor, tensor.compressed
        passed = matrix if tensor is None else tensor
        self.nnz = passed.nnz
        super().__init__(passed.dtype, passed.shape)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the compiled products, which are created again when needed."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_products", "_bound")}

    @cached_property
    def tensor(self) -> SparseTensor:
        """The matrix in its format."""
        return SparseTensor.from_any(self.matrix, self.matrix.format)

    @cached_property
    def _products(self) -> dict[tuple[str, np.dtype[Any]], _Product]:
        return {}

    @cached_property
    def _bound(self) -> dict[str, BoundKernel]:
        return {}

    def _product(self, text: str, x: Any) -> Any:
        x = np.ascontiguousarray(x)
        if not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
        if x.dtype.kind == "c" and self.dtype.kind != "c":
            return self._product(text, x.real) + 1j * self._product(text, x.imag)
        if x.dtype != self.dtype:
            x = x.astype(self._common_dtype(x))
        key = text, x.dtype
        product = self._products.get(key)
        if product is None:
            is_large = self.nnz >= MIN_ENTRIES if self.expected_calls is None else self.expected_calls > 0
            is_alike = x.dtype == self.dtype
            is_complex = self.dtype.kind == "c"
            matrix = self.matrix if is_complex or (self.expected_calls != 0 and is_alike) else None
            first = self._own(text, x) if matrix is None else _by_scipy(matrix, text)
            is_converted = is_alike and is_large and not is_complex
            convert = self._others(text, with_own=matrix is not None) if is_converted else None
            product = self._products[key] = _Product(first, convert, self.expected_calls, self.nnz)
        return product(x)

    def _own(self, text: str, x: Any) -> Callable[[Any], Any]:
        """Return the compiled product over the format of the matrix."""
        return einsum_expression(text, self.tensor, x).bind(self.tensor)

    def _common_dtype(self, x: Any) -> np.dtype[Any]:
        """Return the dtype that a vector is multiplied in, by numpy's rules."""
        if x.dtype not in COMPLEX and (x.dtype.kind not in "biuf" or x.dtype.itemsize > 8):
            raise ArgumentTypeError(f"x: expected numbers that float64 holds, got {x.dtype}. Convert them with astype.")
        return np.result_type(x.dtype, self.dtype)

    def _others(self, text: str, *, with_own: bool) -> Convert:
        """Return a function that converts: to the tensor's own format, if requested, and to formats that pay."""
        is_transposed, has_own = text[3] == "i", not with_own

        def convert(x: Any, expected_calls: int) -> tuple[list[Callable[[Any], Any]], bool]:
            nonlocal has_own
            tensor = self.tensor
            own = [] if has_own else [self._own(text, x)]
            has_own = True
            matrix = tensor.to_scipy("csr", copy=False)
            matrix = matrix.T.tocsr() if is_transposed else matrix
            program, name = (ops.spmv, "x") if x.ndim == 1 else (ops.spmm, "B")
            func = program(tensor.dtype.name, idtype=matrix.indices.dtype.name)
            bound = build(func, expected_calls=max(int(expected_calls), 1)).bind(A=matrix)
            if bound.adaptive is not None and expected_calls:
                bound.adaptive.ask({name: x})
            others = bound.over_others
            if not others and is_transposed and own:
                own.append(_by_kernel(make_kernel(func).bind(A=matrix), name))
            if others:
                self._bound[text] = bound  # which the others call where values are not finite
            return [*own, *(_by_kernel(other, name) for other in others)], bool(others)

        return convert

    def _matvec(self, x: Any) -> Any:
        return self._product("ij,j->i", np.asarray(x).reshape(-1))

    def _rmatvec(self, x: Any) -> Any:
        return self._product("ij,i->j", np.asarray(x).reshape(-1))

    def _matmat(self, X: Any) -> Any:
        return self._product("ij,jk->ik", X)

    def _rmatmat(self, X: Any) -> Any:
        return self._product("ij,ik->jk", X)


def _by_kernel(bound: Any, name: str) -> Callable[[Any], Any]:
    """Return the product of a bound kernel with its operand."""
    return lambda x: bound(**{name: x})


def _by_scipy(matrix: Any, text: str) -> Callable[[Any], Any]:
    """Return scipy's product with a matrix, or with its adjoint, which is the transpose of a real one."""
    if text[3] != "i":
        return matrix.__matmul__
    transpose = matrix.T
    return transpose.__matmul__ if matrix.dtype.kind != "c" else lambda x: (transpose @ x.conj()).conj()


class _Product:
    """One kind of product: by the first way at hand, and later by others if one of them is faster.

    Parameters
    ----------
    first : callable
    convert : callable or None
        Takes an operand and how many products are expected; returns other candidates, and whether one is over a format
        that pays.
    expected_calls : int or None
        Number of products that the caller expects; None converts in a thread after some, and so do few.
    nnz : int
        Entries of the matrix.
    """

    def __init__(
        self,
        first: Callable[[Any], Any],
        convert: Convert | None,
        expected_calls: int | None,
        nnz: int,
    ) -> None:
        self.best, self.convert = first, convert
        self.expected_calls, self.nnz = expected_calls, nnz
        self.calls, self.seconds = 0, 0.0
        self.next_calls, self.next_seconds = TRIAL_CALLS, TRIAL_SECONDS  # at which formats are looked for
        self.looks = LOOKS
        self.converter: threading.Thread | None = None
        self.trial: Trial | None = None

    def __call__(self, x: Any) -> Any:
        if (trial := self.trial) is not None:
            y = trial(x)
            if trial.best is not None:
                self.best, self.trial = trial.best, None
            return y
        if self.convert is None:
            return self.best(x)
        start = time.perf_counter()
        y = self.best(x)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.calls += 1
        if self.expected_calls is not None:
            calls, self.expected_calls = self.expected_calls, None
            if heuristics.is_worth_looking(self.nnz, calls, seconds):
                self._begin(x, calls, waits=True)
        elif self.calls > self.next_calls and self.seconds >= self.next_seconds:
            self._begin(x, self.calls)
        return y

    def _begin(self, x: Any, calls: int, *, waits: bool = False) -> None:
        """Convert the matrix for so many later products, in the background unless the caller waits."""
        # `convert` is cleared first, so that a second thread does not convert the matrix as well.
        convert, self.convert = self.convert, None
        if convert is None:
            return
        if waits:
            self._add(convert(x, calls)[0])
            return
        self.next_calls, self.next_seconds = AGAIN * self.calls, AGAIN * self.seconds
        self.looks -= 1
        self.converter = in_background(self._convert, convert, x.copy(), calls)

    def _convert(self, convert: Convert, x: Any, calls: int) -> None:
        with contextlib.suppress(SparseTIRError, MemoryError):  # the first way stays
            others, pays = convert(x, calls)
            self._add(others)
            if not pays and self.looks:
                self.convert = convert

    def _add(self, others: list[Any]) -> None:
        if others:
            self.trial = Trial([(f"candidate {n}", run) for n, run in enumerate((self.best, *others))])


__all__ = ["linear_operator"]
