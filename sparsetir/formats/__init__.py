# SPDX-License-Identifier: Apache-2.0
"""Formats: how a sparse tensor is stored, in one piece or several.

A `Format` is made by name (``formats.make("bsr", r=4, c=4)``) or by its own function (``formats.bsr(4, 4)``).
`sparsetir.SparseTensor` holds a tensor in one; the rules of a format rewrite a program for it.
"""

from __future__ import annotations

from sparsetir.formats.blocks import BSR as bsr
from sparsetir.formats.blocks import DBSR as dbsr
from sparsetir.formats.compressed import COO as coo
from sparsetir.formats.compressed import CSC as csc
from sparsetir.formats.compressed import CSF as csf
from sparsetir.formats.compressed import CSR as csr
from sparsetir.formats.compressed import DCSR as dcsr
from sparsetir.formats.compressed import ELL as ell
from sparsetir.formats.compressed import Ragged as ragged
from sparsetir.formats.diagonals import DIA as dia
from sparsetir.formats.diagonals import Band as band
from sparsetir.formats.encoding import Encoded as encoded
from sparsetir.formats.format import REGISTRY, Entries, Format, Packed, make, register
from sparsetir.formats.hybrid import HDIA as hdia
from sparsetir.formats.hybrid import BlocksAndRest as blocks
from sparsetir.formats.hybrid import DenseColumns as dense_columns
from sparsetir.formats.hybrid import DenseRows as dense_rows
from sparsetir.formats.hybrid import DiaRest as dia_rest
from sparsetir.formats.hybrid import EllRest as ell_rest
from sparsetir.formats.padded import NM as nm
from sparsetir.formats.padded import SELL as sell
from sparsetir.formats.padded import SRBCRS as sr_bcrs
from sparsetir.formats.padded import NarrowCSR as narrow_csr
from sparsetir.formats.padded import NarrowSELL as narrow_sell
from sparsetir.formats.padded import PaddedCSR as padded_csr
from sparsetir.formats.partitioned import Buckets as buckets
from sparsetir.formats.partitioned import ColumnRanges as columns
from sparsetir.formats.partitioned import Hyb as hyb
from sparsetir.formats.partitioned import RowRanges as rows
from sparsetir.formats.row_groups import Reordered as reordered
from sparsetir.formats.row_groups import RowGroups as row_groups
from sparsetir.formats.tree import Tree as tree

__all__ = [
    "REGISTRY",
    "Entries",
    "Format",
    "Packed",
    "band",
    "blocks",
    "bsr",
    "buckets",
    "columns",
    "coo",
    "csc",
    "csf",
    "csr",
    "dbsr",
    "dcsr",
    "dense_columns",
    "dense_rows",
    "dia",
    "dia_rest",
    "ell",
    "ell_rest",
    "encoded",
    "hdia",
    "hyb",
    "make",
    "narrow_csr",
    "narrow_sell",
    "nm",
    "padded_csr",
    "ragged",
    "register",
    "reordered",
    "row_groups",
    "rows",
    "sell",
    "sr_bcrs",
    "tree",
]
