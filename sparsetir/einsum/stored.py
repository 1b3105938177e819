# SPDX-License-Identifier: Apache-2.0
"""Products of operands that are not in memory: matrices on disk, and dask arrays of scipy's matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetir.blocks import BlockMatrix, open_blocks
from sparsetir.blocks.cluster import is_dask
from sparsetir.blocks.cluster import matmul as matmul_by_chunks
from sparsetir.einsum import subscripts as notation
from sparsetir.errors import ArgumentError
from sparsetir.stores import is_open

FORMS = "products with a dense operand ('ij,jk->ik'), sampled products ('ij,ik,jk->ij') and sums ('ij->j')"


def is_stored(value: Any) -> bool:
    """Return whether an operand is on disk, or a dask array."""
    return isinstance(value, BlockMatrix) or is_open(value) or is_dask(value)


def matmul(A: Any, B: Any) -> Any:
    """Multiply a matrix on disk, or a dask array, by a dense operand, or a dense operand by a matrix on disk."""
    if is_stored(A) and is_stored(B):
        raise ArgumentError("matmul(A, B): expected one operand in memory, got two that are not. Read one of them.")
    if is_dask(A):
        return matmul_by_chunks(A, B)
    if is_dask(B):
        raise ArgumentError("B: expected a matrix in memory or on disk, got a dask array. Pass it as A.")
    return _opened(A) @ B if is_stored(A) else A @ _opened(B)


def einsum(text: str, operands: Sequence[Any]) -> Any:
    """Evaluate an expression that is one pass over a matrix on disk; of dask arrays a product.

    Raises
    ------
    ArgumentError
        It is another expression.
    """
    operands = [open_blocks(value) if is_open(value) else value for value in operands]
    terms = notation.parse(text, tuple(len(value.shape) for value in operands))
    at = next(n for n, value in enumerate(operands) if is_stored(value))
    M, rows_columns = operands[at], terms.inputs[at]
    others = [(term, value) for n, (term, value) in enumerate(zip(terms.inputs, operands, strict=True)) if n != at]
    if len(rows_columns) == 2 and not any(is_stored(value) for _, value in others):
        row, column = rows_columns[0], rows_columns[1]
        if len(others) == 1:
            product = _product(M, row, column, *others[0], terms.output)
            if product is not None:
                return product
        if not is_dask(M):
            if not others and len(terms.output) == 1:
                return (M if terms.output == column else M.T).colsums()
            if len(others) == 2 and terms.output == row + column:
                by_first = {term[:1]: (term[1:], value) for term, value in others if len(term) == 2}
                if by_first.keys() == {row, column} and by_first[row][0] == by_first[column][0]:
                    return M.sddmm(by_first[row][1], by_first[column][1])
    raise ArgumentError(f"{text!r}: expected {FORMS} of operands outside of memory. Read the matrix whole for others.")


def _product(M: Any, row: str, column: str, term: str, dense: Any, output: str) -> Any:
    """Return the product that sums over a row or column letter, or None if the expression is another one."""
    shared = [letter for letter in (row, column) if letter in term]
    kept = row if shared == [column] else column
    rest = term.replace(shared[0], "", 1) if len(shared) == 1 else term
    if len(shared) != 1 or len(term) > 2 or shared[0] in output or set(output) != {kept, *rest} or row == column:
        return None
    operand = dense if term[0] == shared[0] else dense.T
    if is_dask(M):
        product = matmul_by_chunks(M, operand) if kept == row and operand.ndim == 2 else None
    else:
        product = (M if kept == row else M.T) @ operand
    return product if product is None or output == kept + rest else product.T


def _opened(value: Any) -> BlockMatrix:
    return value if isinstance(value, BlockMatrix) else open_blocks(value)


__all__ = ["einsum", "is_stored", "matmul"]
