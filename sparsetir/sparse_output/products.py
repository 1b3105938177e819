# SPDX-License-Identifier: Apache-2.0
"""Products, sums and elementwise products of sparse matrices, and plans that reuse a product's pattern."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import interop, ops
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.formats.canonical import add_duplicates, compressed_rows, distinct_rows, has_hypersparse, renumber
from sparsetir.formats.tensor import MIN_HYPERSPARSE, SparseTensor
from sparsetir.interop import CooTensor, check_parts
from sparsetir.ir.sizes import LARGEST_INT32
from sparsetir.runtime.signature import Arguments, argument_list, as_passed, checks_are_on, numpy_dtype
from sparsetir.runtime.validation import is_sound
from sparsetir.sparse_output import AccumulatorOptions
from sparsetir.sparse_output.blocks import assembled_kernel
from sparsetir.sparse_output.fast_paths import ROWS, function_for, limits
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.sparse_output.result import ResultPattern, as_object, least_of, top_of
from sparsetir.sparse_output.workspace import KEPT_BYTES, ChunkWorkspace, passed, popped, tensor
from sparsetir.utils.arguments import VALUE_DTYPES, as_flag, as_real, common_dtype
from sparsetir.utils.caches import remember, shared_cache
from sparsetir.utils.memory import check_memory

# Numeric phase alone: the values of a result whose pattern is known, for operands with new values.


FEW_BYTES = 1 << 14  # that are compared as bytes, which numpy takes longer to begin with


class NumericPhase:
    """Numeric phase for one pattern; every call must have the pattern's index arrays.

    Parameters
    ----------
    kernel : SparseOutputKernel
    args : Arguments
        Of a call with the pattern.
    """

    def __init__(self, kernel: SparseOutputKernel, args: Arguments) -> None:
        self.kernel = kernel
        values = {str(b.storage.name) for b in kernel.signature.buffers.values()}
        self.structure = {name: array.copy() for name, array in args.arrays.items() if name not in values}
        copies = Arguments(sizes=args.sizes, arrays={**args.arrays, **self.structure})
        self.pattern: ResultPattern = kernel.assemble(args)
        self.has_values = kernel.can_refill(args)
        if not self.has_values:
            return
        call, results = kernel.begin(copies), {r.storage for r in kernel.assembly.results}
        params = [p for p in kernel.signature.params if p.name not in results]
        self.places = {p.name: (at, p.dtype) for at, p in enumerate(params) if p.name in values}
        # Every call brings its own values, so those of the first operands are not kept alive.
        pairs = zip(params, argument_list(kernel.signature, copies, without=results), strict=True)
        self.common = [None if p.name in self.places else tensor(a) for p, a in pairs]
        self.split = [tensor(a) for a in call.split[len(call.common) :]]
        self.entries = [len(self.pattern.keys), *map(tensor, (self.pattern.indptr, self.pattern.keys))]
        self.call = replace(call, common=[])
        self._spare: list[ChunkWorkspace] = []

    def other(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Return the name of the first index array that differs from the pattern's, or None."""
        return next((name for name, stored in self.structure.items() if not is_same(stored, arrays[name])), None)

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Compute the values for operand arrays, given by the names of parameters."""
        kernel, call = self.kernel, self.call
        values = kernel.entries(len(self.pattern.keys), call.sizes)[1]
        if not call.rows or not self.entries[0]:
            return values
        operands = list(self.common)
        for name, (at, dtype) in self.places.items():
            operands[at] = as_passed(arrays[name], dtype)
        work = next(popped(self._spare), None) or kernel.take(call)
        function = kernel.function("values")
        function(*operands, *self.split, *self.entries, *map(passed, values), *work.values_params)
        if work.nbytes <= KEPT_BYTES and not self._spare:
            self._spare.append(work)
        return values


def is_same(stored: np.ndarray, array: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and elements."""
    if stored.shape != array.shape or stored.dtype != array.dtype:
        return False
    return stored.tobytes() == array.tobytes() if stored.nbytes <= FEW_BYTES else np.array_equal(stored, array)


# Products, sums and elementwise products of sparse matrices whose pattern is computed, in one call each.


def matmul(
    A: Any,
    B: Any,
    *,
    mask: Any = None,
    complement: bool = False,
    top: int | None = None,
    threshold: float | None = None,
) -> Any:
    """Multiply sparse matrices; `sparsetir.matmul` documents the arguments."""
    complement = as_flag(complement, "complement")
    if complement and mask is None:
        raise ArgumentError("matmul(..., complement=True) computes a product outside of a mask: pass mask=")
    selects = top is not None or threshold is not None
    program = "spgemm" if mask is None else "masked_spgemm"
    key = program, complement, selects, threshold is not None
    kernel = _made_before(key, A, B)
    if kernel is not None:
        selected = _selected(kernel, top, threshold) if selects else ()
        product = _small_product(kernel, {"A": A, "B": B}, mask, selected)
        if product is not None:
            return product
        if A.shape[1] == B.shape[0]:
            return _large_product(kernel, {"A": A, "B": B}, mask, selected)
    if (
        not selects
        and type(A) in COLUMNS
        and type(B) in (*ROWS, *COLUMNS)
        and max(*A.shape, *B.shape) < MIN_HYPERSPARSE
    ):
        product = _by_columns(A, B, mask, complement=complement)
        if product is not None:
            return product
    if mask is None and not selects and _share_blocks(A, B):
        return _of_blocks(A, B)
    if _are_matrices(A, B) and A.shape[1] == B.shape[0] and has_hypersparse([A, B]):
        operands = [A, B] if mask is None else [A, B, mask]
        short = renumber(("ik", "kj", "ij")[: len(operands)], operands)
        A, B, *masks = short.values
        choice: dict[str, Any] = {"complement": complement, "top": top, "threshold": threshold}
        return short.restore(_matmul(key, A, B, masks[0] if masks else None, **choice), "ij")
    product = None if selects else _by_columns(A, B, mask, complement=complement)
    return _matmul(key, A, B, mask, complement=complement, top=top, threshold=threshold) if product is None else product


def _matmul(key: Any, A: Any, B: Any, mask: Any, *, complement: bool, top: Any, threshold: Any) -> Any:
    """Multiply sparse matrices by rows."""
    program, _, selects, _ = key
    operands = _Operands.of("matmul", A=A, B=B)
    _check_inner("matmul(A, B)", "A", operands["A"], "B", operands["B"])
    options = AccumulatorOptions(complement=bool(complement), select=selects, limited=threshold is not None)
    kernel = _kernel_of_product(program, operands, options, operands["A"], operands["B"])
    operands.keep(kernel, key)
    return operands.like_first(_product(kernel, dict(operands), mask, top, threshold))


def _are_matrices(*values: Any) -> bool:
    return all(interop.is_sparse(v) and len(v.shape) == 2 for v in values)


def _are_columns(A: Any, B: Any, mask: Any) -> bool:
    """Return whether the first operand is stored by columns, so that those of the result can be computed as rows."""
    if not (sp.issparse(A) and sp.issparse(B) and (mask is None or sp.issparse(mask))):
        return False
    if A.format != "csc" or B.format not in ("csr", "csc") or not len(A.shape) == len(B.shape) == 2:
        return False
    return bool(A.shape[1] == B.shape[0] and (mask is None or mask.shape == (A.shape[0], B.shape[1])))


def _by_columns(A: Any, B: Any, mask: Any, *, complement: bool) -> Any:
    """Multiply the transposes, whose compressed rows are the columns of `A`; return None for unsuitable operands.

    Neither `A` nor the result is converted then.
    """
    if not _are_columns(A, B, mask):
        return None
    transposes = _row_transposes(A, B)
    if transposes is None:
        return None
    second, first = transposes
    try:
        product = matmul(first, second, mask=None if mask is None else mask.T, complement=complement)
    except (SparseTIRError, ValueError, IndexError):  # the product by rows names the wrong operand
        return None
    return _in_columns(A, product)


def _row_transposes(A: Any, B: Any) -> tuple[Any, Any] | None:
    """Return the transposes of a matrix in columns, and of another, in rows; None where those of `B` cannot be made."""
    rows = sp.csr_array if isinstance(A, sp.sparray) else sp.csr_matrix
    try:
        check_parts(A, "A")
        if not all(map(interop.holds_numbers, (A, B))):
            return None
        first = interop.compressed_of(rows, A.indptr, A.indices, A.data, A.shape[::-1])
        return first, _transposed_rows(rows, B)
    except (SparseTIRError, ValueError, IndexError):  # of scipy, which checks what it transposes
        return None


COLUMNS = (sp.csc_array, sp.csc_matrix)
_UNORDERED = interop.Level("1", "sparse_variable", sorted=False, unique=False)


def _transposed_rows(kind: Any, B: Any) -> Any:
    """Return the transpose of compressed rows or columns as compressed rows, of one of scipy's two classes.

    Raises
    ------
    StructureError
        The index arrays are broken: scipy would convert them past their ends.
    """
    parts = B.indptr, B.indices, B.data
    is_plain = type(B) in ROWS and all([type(part) is np.ndarray and part.ndim == 1 for part in parts])
    if not is_plain or interop.is_half(B) or len(B.indices) != len(B.data) or B.indices.dtype.kind != "i":
        transposed = _rows(B.T, "B", "matmul")
        return (
            transposed
            if type(transposed) is kind
            else interop.compressed_of(kind, transposed.indptr, transposed.indices, transposed.data, transposed.shape)
        )
    rows, columns = B.shape
    if not is_sound(_UNORDERED, B.indptr, B.indices, parent_count=rows, length=columns, need_sorted=False):
        return _rows(B.T, "B", "matmul")
    check_memory(8 * columns, f"B: pointers to the {columns} columns of shape {B.shape}")
    by_columns = sp.csc_array if kind is sp.csr_array else sp.csc_matrix
    return interop.compressed_of(by_columns, *parts, (columns, rows)).tocsr()


def _product(kernel: SparseOutputKernel, operands: dict[str, Any], mask: Any, top: Any, threshold: Any) -> Any:
    """Multiply operands that have the dtypes of the kernel."""
    selected = _selected(kernel, top, threshold)
    product = _small_product(kernel, operands, mask, selected)
    return _large_product(kernel, operands, mask, selected) if product is None else product


def _selected(kernel: SparseOutputKernel, top: Any, threshold: Any) -> tuple[Any, ...]:
    """Return the validated selection of a row's entries; empty if all are kept."""
    if top is None and threshold is None:
        return ()
    return top_of(top), least_of(threshold, kernel.assembly.results[0].dtype)


def _small_product(kernel: SparseOutputKernel, named: dict[str, Any], mask: Any, selected: tuple[Any, ...]) -> Any:
    """Multiply by one compiled function; return None if the operands are too large, invalid or need conversion."""
    name = _at_once_by(named["A"], named["B"], kernel)
    if not name:
        return None
    return kernel.small_at_once(name, named if mask is None else {**named, "M": mask}, *selected)


def _large_product(kernel: SparseOutputKernel, named: dict[str, Any], mask: Any, selected: tuple[Any, ...]) -> Any:
    if mask is not None:
        named["M"] = _mask(mask, (named["A"].shape[0], named["B"].shape[1]))
    args = kernel.prepare((), named)
    return kernel.returned(args, kernel.assemble(args, *selected), named)


def _at_once_by(A: Any, B: Any, kernel: SparseOutputKernel | None = None) -> str:
    """Return the name of the function that computes a small product in one call, or "" if the product is too large.

    The choice depends on the mean length of rows; if the function would first be compiled, on the exact work.
    """
    name = function_for((A, B))
    if not name or (kernel is not None and kernel.has(name)) or len(B.indptr) < 2:
        return name
    return name if np.diff(B.indptr).take(A.indices, mode="clip").sum() <= limits()[0] else ""


def _kernel_of_product(
    program: str, operands: _Operands, options: AccumulatorOptions, A: Any, B: Any
) -> SparseOutputKernel:
    """Return the kernel of a product, with only the functions compiled that the operands need."""
    name = "" if operands.dtype == "bfloat16" else _at_once_by(A, B)
    if name:
        options = replace(options, functions=(name,))
    return _kernel(program, operands.dtype, operands.idtype, options)


def _share_blocks(A: Any, B: Any) -> bool:
    """Return whether both are block matrices whose blocks can be multiplied with each other."""
    both = all(sp.issparse(x) and x.format == "bsr" and np.ndim(x.data) == 3 for x in (A, B))
    return both and A.shape[1] == B.shape[0] and A.blocksize[1] == B.blocksize[0]


def _of_blocks(A: Any, B: Any) -> Any:
    """Multiply block matrices; the result has blocks, too."""
    dtype = _common({_dtype_name(A), _dtype_name(B)}, [])
    if dtype not in VALUE_DTYPES:
        raise _refused("matmul", dtype)
    idtype = "int64" if _has_wide_indices(A) or _has_wide_indices(B) else "int32"
    kernel = _kernel("spgemm", dtype, idtype, AccumulatorOptions(), block=(*A.blocksize, B.blocksize[1]))
    return kernel(A=_cast(A, dtype), B=_cast(B, dtype))


def matmul_plan(A: Any, B: Any) -> SpGEMMPlan:
    """Compute the pattern of a product once, for operands whose values change.

    Parameters
    ----------
    A, B : sparse matrix
        As for `matmul`.

    Returns
    -------
    SpGEMMPlan
        ``plan(A2, B2)`` multiplies matrices with the same patterns.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> plan = sparsetir.matmul_plan(A, A)
    >>> plan(A * 2, A).toarray().tolist()
    [[12.0, 0.0], [0.0, 12.0]]
    """
    return SpGEMMPlan(A, B)


class SpGEMMPlan:
    """Product of sparse matrices with fixed patterns; `pattern` is that of the result.

    Parameters
    ----------
    A, B : sparse matrix
        The pattern of the operands.
    """

    def __init__(self, A: Any, B: Any) -> None:
        operands = _Operands.of("matmul_plan", A=A, B=B)
        _check_inner("matmul_plan(A, B)", "A", operands["A"], "B", operands["B"])
        self._dtype, self._idtype = operands.dtype, operands.idtype
        self._kernel = _kernel("spgemm", operands.dtype, operands.idtype, AccumulatorOptions())
        self._shapes = [tuple(v.shape) for v in operands.values()]
        self._refill = NumericPhase(self._kernel, self._kernel.prepare((), dict(operands)))

    @property
    def pattern(self) -> ResultPattern:
        """The pattern of the result."""
        return self._refill.pattern

    def __call__(self, A: Any, B: Any) -> Any:
        """Multiply matrices with the pattern of the plan.

        Parameters
        ----------
        A, B : sparse matrix
            Of the dtype, and with the entries in the order, of those that the plan was made with.

        Returns
        -------
        sparse matrix
            Of the class of `A`.

        Raises
        ------
        ArgumentError
            An operand has another pattern or dtype.
        """
        result = self._at_once(A, B)
        if result is not None:
            return result
        operands = _Operands.of("a plan", A=A, B=B)
        if (operands.dtype, operands.idtype) != (self._dtype, self._idtype):
            dtypes = f"{operands.dtype} values and {operands.idtype} indices"
            expected = f"{self._dtype} values and {self._idtype} indices"
            raise ArgumentError(f"this plan multiplies matrices with {expected}, got {dtypes}: make another plan")
        by_name = dict(operands)
        args = self._kernel.prepare((), by_name)
        other = self._refill.other(args.arrays)
        if other is not None:
            operand = "A" if other.endswith("_a") else "B"
            raise ArgumentError(f"{operand} has another pattern than the plan was made for: make another plan")
        values = self._refill(args.arrays) if self._refill.has_values else self._kernel.assemble(args).values
        return operands.like_first(self._kernel.returned(args, self.pattern.refilled(values), by_name))

    def _at_once(self, A: Any, B: Any) -> Any:
        """Multiply scipy's matrices in the program's storage; return None for others or invalid ones."""
        arrays = self._kernel.rows.arrays_of({"A": A, "B": B}) if self._refill.has_values else None
        if arrays is None or [A.shape, B.shape] != self._shapes or self._refill.other(arrays) is not None:
            return None
        return as_object(self.pattern.refilled(self._refill(arrays)), 0, A)


def add(A: Any, B: Any, alpha: float = 1, beta: float = 1) -> Any:
    """Add two sparse matrices; `sparsetir.add` documents the arguments."""
    return _added("add", A, B, alpha, beta)


def subtract(A: Any, B: Any) -> Any:
    """Subtract a sparse matrix from another one; `sparsetir.subtract` documents the arguments."""
    return _added("subtract", A, B, 1, -1)


def multiply(A: Any, B: Any) -> Any:
    """Multiply two sparse matrices elementwise; `sparsetir.multiply` documents the arguments."""
    return _elementwise("multiply", A, B)


def maximum(A: Any, B: Any) -> Any:
    """Compute the elementwise maximum of two sparse matrices, on all threads; entries that are not stored are zero.

    Parameters
    ----------
    A, B : sparse matrix, shape (m, n)
        As for `matmul`.

    Returns
    -------
    sparse matrix, shape (m, n)
        Of the class of `A`. An entry is stored where one of the two stores one.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [-3, 1]], "float32"))
    >>> sparsetir.maximum(A, A.T).toarray().tolist()
    [[0.0, 2.0], [2.0, 1.0]]
    """
    return _elementwise("maximum", A, B)


def rap(R: Any, A: Any, P: Any) -> Any:
    """Compute the product ``R @ A @ P`` of three sparse matrices, the coarse operator of multigrid solvers.

    Parameters
    ----------
    R : sparse matrix, shape (m, p)
    A : sparse matrix, shape (p, q)
    P : sparse matrix, shape (q, n)

    Returns
    -------
    sparse matrix, shape (m, n)
        Of the class of `R`.

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir
    >>> A = sp.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(4, 4)).tocsr()
    >>> P = sp.csr_array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    >>> sparsetir.rap(P.T, A, P).toarray().tolist()
    [[2.0, -1.0], [-1.0, 2.0]]
    """
    if _share_blocks(R, A) and _share_blocks(A, P):
        return _of_blocks(R, _of_blocks(A, P))
    operands = _Operands.of("rap", R=R, A=A, P=P)
    _check_inner("rap(R, A, P)", "R", operands["R"], "A", operands["A"])
    _check_inner("rap(R, A, P)", "A", operands["A"], "P", operands["P"])
    R, A, P = operands.values()
    right = _product(
        _kernel_of_product("spgemm", operands, AccumulatorOptions(), A, P), {"A": A, "B": P}, None, None, None
    )
    kernel = _kernel_of_product("spgemm", operands, AccumulatorOptions(), R, right)
    return operands.like_first(_product(kernel, {"A": R, "B": right}, None, None, None))


def _check_inner(call: str, left: str, first: Any, right: str, second: Any) -> None:
    if first.shape[1] != second.shape[0]:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ArgumentError(f"{call} takes as many columns of {left} as rows of {right}, got shapes {shapes}")


def _check_shapes(call: str, operands: _Operands) -> None:
    first, second = (tuple(v.shape) for v in operands.values())
    if first != second:
        raise ArgumentError(f"{call} takes matrices of one shape, got shapes {first} and {second}")


def _added(function: str, A: Any, B: Any, alpha: Any, beta: Any) -> Any:
    result = _added_at_once(A, B, alpha, beta)
    if result is not None:
        return result
    if (transposes := _transposes(A, B)) is not None:
        with suppress(SparseTIRError):  # the sum by rows names rows and columns of the operands
            return _in_columns(A, _added(function, *transposes, alpha, beta))
    alpha, beta = (as_real(v, f"{name} of {function}") for v, name in ((alpha, "alpha"), (beta, "beta")))
    return _renumbered(partial(_summed, function, alpha, beta), A, B)


def _renumbered(compute: Callable[[Any, Any], Any], A: Any, B: Any) -> Any:
    """Apply a function to matrices of one shape, without their empty rows if they have far more rows than entries."""
    if not (_are_matrices(A, B) and tuple(A.shape) == tuple(B.shape) and has_hypersparse([A, B])):
        return compute(A, B)
    short = renumber(("ij", "ij"), [A, B])
    return short.restore(compute(*short.values), "ij")


def _summed(function: str, alpha: Any, beta: Any, A: Any, B: Any) -> Any:
    """Compute a linear combination of matrices by rows."""
    operands = _Operands.of(function, numbers=(alpha, beta), A=A, B=B)
    _check_shapes(f"{function}(A, B)", operands)
    if alpha == 1 and beta == 1:
        return operands.like_first(operands.merged("add"))
    if operands.dtype == "bool":
        raise ArgumentTypeError(f"{function} of bool matrices joins them: factors other than 1 have no meaning")
    is_whole = operands.dtype not in ("bfloat16", "bool") and np.dtype(operands.dtype).kind in "iu"
    if is_whole and not all(-(2**63) <= v < 2**63 for v in (alpha, beta)):
        raise ArgumentError(f"{function} of {operands.dtype} matrices takes factors of 64 bits, got {alpha}, {beta}")
    kind = np.dtype(operands.dtype).type if operands.dtype != "bfloat16" else float
    numbers = {n: np.asarray(v).astype(kind).item() for n, v in (("alpha", alpha), ("beta", beta))}
    return operands.like_first(operands.merged("scaled_add", **numbers))


def _added_at_once(A: Any, B: Any, alpha: Any, beta: Any) -> Any:
    """Add matrices in the program's storage on the fast path; return None for others."""
    if type(alpha) is type(beta) is int and alpha == beta == 1:
        return _at_once("add", A, B)
    is_plain = type(alpha) in (int, float) and type(beta) in (int, float) and sp.issparse(A) and A.dtype.kind == "f"
    return _at_once("scaled_add", A, B, alpha=alpha, beta=beta) if is_plain else None


# Kernels of earlier calls, by the operation and by the dtypes of values and indices.
_MADE = shared_cache("products", 256)


def _made_before(key: Hashable, A: Any, B: Any) -> SparseOutputKernel | None:
    """Return the cached kernel for scipy's compressed rows with these dtypes, or None."""
    if type(A) not in ROWS or type(B) not in ROWS:
        return None
    try:
        dtype, idtype = A.data.dtype, A.indices.dtype
        is_alike = B.data.dtype == dtype and B.indices.dtype == idtype
    except AttributeError:  # `_rows` raises for values that are no arrays
        return None
    first, second = A.shape, B.shape
    if not is_alike or len(first) != 2 or len(second) != 2:
        return None
    is_counted = idtype.itemsize == 8 or max(*first, *second) <= LARGEST_INT32
    return _MADE.get((key, dtype, idtype)) if is_counted else None


def _at_once(program: str, A: Any, B: Any, **numbers: Any) -> Any:
    """Merge matrices in the program's storage with an earlier call's kernel; return None if that is not possible."""
    kernel = _made_before(program, A, B)
    return None if kernel is None else kernel.merged_at_once({"A": A, "B": B, **numbers})


def _elementwise(function: str, A: Any, B: Any) -> Any:
    result = _at_once(function, A, B)
    if result is not None:
        return result
    if (transposes := _transposes(A, B)) is not None:
        with suppress(SparseTIRError):
            return _in_columns(A, _elementwise(function, *transposes))
    return _renumbered(partial(_merged, function), A, B)


def _merged(function: str, A: Any, B: Any) -> Any:
    """Compute an elementwise function of matrices by rows."""
    operands = _Operands.of(function, A=A, B=B)
    _check_shapes(f"{function}(A, B)", operands)
    program = "add" if function == "maximum" and operands.dtype == "bool" else function
    return operands.like_first(operands.merged(program))


def _transposes(A: Any, B: Any) -> tuple[Any, Any] | None:
    """Return the rows of transposes of two matrices of one shape, the first of which is in columns; None for others."""
    if type(A) not in COLUMNS or type(B) not in (*ROWS, *COLUMNS) or len(A.shape) != 2 or A.shape != B.shape:
        return None
    if max(A.shape) >= MIN_HYPERSPARSE:
        return None
    return _row_transposes(A, B)


def _in_columns(A: Any, result: Any) -> Any:
    """Return the transpose of a matrix in rows, in the class of `A`."""
    return interop.sorted_rows(type(A), result.indptr, result.indices, result.data, result.shape[::-1])


def _mask(mask: Any, shape: tuple[int, int]) -> Any:
    """Convert a mask to compressed rows; its values are ignored."""
    rows = _rows(mask, "mask", "matmul")
    if tuple(rows.shape) != shape:
        raise ArgumentError(f"the mask of matmul has the shape of the product, {shape}, got {tuple(rows.shape)}")
    if interop.is_torch(rows):
        indptr, indices = (np.asarray(p) for p in (rows.crow_indices(), rows.col_indices()))
    else:
        indptr, indices = rows.indptr, rows.indices
    return interop.compressed_of(sp.csr_array, indptr, indices, np.ones(len(indices), np.bool_), shape)


class _Operands(dict[str, Any]):
    """Operands in compressed rows, of one dtype and one index dtype."""

    first: Any
    last: Any
    dtype: str
    idtype: str

    @classmethod
    def of(cls, function: str, *, numbers: tuple[Any, ...] = (), **values: Any) -> _Operands:
        """Convert operands to the programs' storage; `numbers` take part in the common dtype."""
        operands = cls()
        operands.first, *_, operands.last = values.values()
        for name, value in values.items():
            operands[name] = _rows(value, name, function)
        names = {_dtype_name(v) for v in operands.values()}
        weak = [n for n in numbers if isinstance(n, float) and not (n.is_integer() and abs(n) < 2.0**63)]
        operands.dtype = names.pop() if len(names) == 1 and not weak else _common(names, weak)
        if operands.dtype not in VALUE_DTYPES:
            raise _refused(function, operands.dtype)
        wide = any(_has_wide_indices(v) or max(v.shape) > LARGEST_INT32 for v in operands.values())
        operands.idtype = "int64" if wide else "int32"
        for name, value in operands.items():
            operands[name] = _cast(value, operands.dtype)
        return operands

    def merged(self, program: str, **numbers: Any) -> Any:
        """Run a program on the operands, and keep its kernel for `_at_once`."""
        kernel = _kernel(program, self.dtype, self.idtype, AccumulatorOptions())
        self.keep(kernel, program)
        if checks_are_on() and all(sp.issparse(value) for value in self.values()):
            rows = {name: distinct_rows(value, name, is_sound) for name, value in self.items()}
            result = kernel.merged_at_once({**rows, **numbers})
            if result is not None:
                return result
        return kernel(**self, **numbers)

    def keep(self, kernel: SparseOutputKernel, key: Hashable) -> None:
        """Keep a kernel for calls with operands of these dtypes."""
        if self.dtype != "bfloat16":
            _MADE[key, np.dtype(self.dtype), np.dtype(self.idtype)] = kernel

    def like_first(self, result: Any) -> Any:
        """Convert a result to the class of the first operand."""
        first = self.first
        if sp.issparse(first) and result.format != first.format:
            return interop.in_format(result, first.format, self.block(result) if first.format == "bsr" else None)
        if interop.is_torch(first):
            return _like_torch(result, first)
        if isinstance(first, (CooTensor, SparseTensor)):
            tensor = SparseTensor.from_any(result)
            return tensor.to_coo() if isinstance(first, CooTensor) else tensor
        return result

    def block(self, result: Any) -> tuple[int, int]:
        """Return the block size of a result: the height of the first operand's blocks, the width of the last one's."""
        last = self.last if sp.issparse(self.last) and self.last.format == "bsr" else self.first
        width = last.blocksize[1]
        return self.first.blocksize[0], 1 if result.shape[1] % width else width


def _rows(value: Any, name: str, function: str) -> Any:
    """Convert an operand to compressed rows."""
    if not (interop.is_sparse(value) or isinstance(value, SparseTensor)) or len(value.shape) != 2:
        raise ArgumentTypeError(f"{name} of {function} is a sparse matrix: {interop.advice_for_matrix(value)}")
    if interop.is_torch(value):
        interop.check_detached(value, name, function)
    elif not interop.holds_numbers(value):  # scipy cannot convert objects that are no numbers to rows
        raise _refused(function, _dtype_name(value))
    return compressed_rows(value, name)


def _refused(function: str, dtype: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{function} takes values of {', '.join(VALUE_DTYPES)}, got {dtype}")


def _dtype_name(value: Any) -> str:
    return _name_of(value.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _common(names: set[str], numbers: list[Any]) -> str:
    """Return the common dtype of matrices and numbers."""
    common = common_dtype(names)
    if not numbers or common == "bfloat16" or np.dtype(common).kind == "f":
        return common
    return str(np.result_type(common, *numbers))


def _has_wide_indices(value: Any) -> bool:
    indices = value.col_indices() if interop.is_torch(value) else value.indices
    return bool(indices.dtype.itemsize == 8)


def _cast(value: Any, dtype: str) -> Any:
    """Convert an operand to another dtype; duplicates are added up before, in their own dtype."""
    if _dtype_name(value) == dtype:
        return value
    value = add_duplicates(value)
    if interop.is_torch(value):
        import torch

        return value.to(getattr(torch, dtype))
    return interop.recast(value, numpy_dtype(dtype))


def _like_torch(result: Any, first: Any) -> Any:
    layout = str(first.layout).removeprefix("torch.sparse_")
    return {"csc": result.to_sparse_csc, "coo": result.to_sparse_coo}[layout]() if layout in ("csc", "coo") else result


@remember("kernels of products", 256)
def _kernel(
    program: str, dtype: str, idtype: str, options: AccumulatorOptions, **axis_options: Any
) -> SparseOutputKernel:
    return assembled_kernel(getattr(ops, program)(dtype, idtype=idtype, **axis_options), None, options)


__all__ = [
    "NumericPhase",
    "SpGEMMPlan",
    "add",
    "is_same",
    "matmul",
    "matmul_plan",
    "maximum",
    "multiply",
    "rap",
    "subtract",
]
