# SPDX-License-Identifier: Apache-2.0
"""CSR whose rows are gone over in another order, for the sake of the caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import reverse_cuthill_mckee

from sparsetir.formats.arrays import Array, begins, index_dtype, spread, take
from sparsetir.formats.description import describe
from sparsetir.formats.format import Entries, Packed, register
from sparsetir.formats.layouts import Layout
from sparsetir.formats.memory import check_memory
from sparsetir.formats.pieces import lengths_of
from sparsetir.formats.rule import FormatRewriteRule


@register("reordered")
@dataclass(frozen=True, repr=False)
class Reordered(Layout):
    """Every row with its number, neighbours using about the same columns: what one has gathered serves the next.

    The order is the reverse Cuthill-McKee order of the graph of the matrix, or where it is not square of the graph
    between its rows and its columns. Coordinates stay what they are: results need no permutation.

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Notes
    -----
    Cuthill and McKee, "Reducing the bandwidth of sparse symmetric matrices", 1969; the order is scipy's.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.reordered import Reordered
    >>> entries = Entries.of_rows((4, 4), np.array([0, 2, 4, 6, 8]), np.array([0, 2, 1, 3, 0, 2, 1, 3]))
    >>> piece, = Reordered().pack(entries)
    >>> rows = piece.arrays["rows"].tolist()
    >>> sorted([sorted(rows[:2]), sorted(rows[2:])])  # rows of the same columns are neighbours
    [[0, 2], [1, 3]]
    """

    name = "reordered"

    def rule(self) -> FormatRewriteRule:
        description = describe(
            "reordered",
            self.index_type,
            arrays="row_ptr rows indptr indices",
            sizes="m n nnz",
            axes="""
                I = sparse_variable(None, (m, m), (row_ptr, rows), sorted=False)
                J = sparse_variable(I, (n, nnz), (indptr, indices))
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("reordered", description, {0: ["I"], 1: ["J"]}, partitions_rows=True)

    def packed(self, entries: Entries) -> Packed:
        (m, n), nnz = entries.shape, self.check_count(entries.nnz)
        rows = order_of(entries)
        runs = begins(lengths_of(entries)[rows])
        index = spread(entries.indptr[rows], runs, index_dtype(nnz))
        arrays = self.arrays(row_ptr=np.array([0, m]), rows=rows, indptr=runs, indices=take(entries.last, index))
        return Packed(arrays, {"m": m, "n": n, "nnz": nnz}, nnz, index)


def order_of(entries: Entries) -> Array:
    """The rows of a matrix in reverse Cuthill-McKee order."""
    (m, n), nnz = entries.shape, entries.nnz
    nodes = m if m == n else m + n
    check_memory(20 * nnz + 16 * nodes, f"the graph of {nnz} entries")
    if not nnz:
        return np.arange(m)
    dtype = index_dtype(max(2 * nnz, nodes))
    matrix = sp.csr_array((np.ones(nnz, np.int8), entries.last.astype(dtype), entries.indptr.astype(dtype)), (m, n))
    graph = matrix + matrix.T if m == n else sp.block_array([[None, matrix], [matrix.T, None]])
    order = reverse_cuthill_mckee(sp.csr_matrix(graph), symmetric_mode=True)
    return order[order < m].astype(np.int64)


__all__ = ["Reordered", "order_of"]
