# SPDX-License-Identifier: Apache-2.0
"""Formats: how a sparse tensor is stored, in one piece or several.

A `Format` is made by name (``formats.make("bsr", r=4, c=4)``) or by its own function (``formats.bsr(4, 4)``).
`sparsetir.SparseTensor` holds a tensor in one; the rules of a format rewrite a program for it.
"""

from __future__ import annotations

from sparsetir.formats.blocks import BSR as bsr
from sparsetir.formats.blocks import DBSR as dbsr
from sparsetir.formats.coordinates import COO as coo
from sparsetir.formats.coordinates import CSF as csf
from sparsetir.formats.dense_lines import DenseColumns as dense_columns
from sparsetir.formats.dense_lines import DenseRows as dense_rows
from sparsetir.formats.diagonals import DIA as dia
from sparsetir.formats.diagonals import Band as band
from sparsetir.formats.encodings import Encoded as encoded
from sparsetir.formats.format import REGISTRY, Entries, Format, Packed, make, register
from sparsetir.formats.layouts import CSC as csc
from sparsetir.formats.layouts import CSR as csr
from sparsetir.formats.layouts import DCSR as dcsr
from sparsetir.formats.layouts import ELL as ell
from sparsetir.formats.layouts import Ragged as ragged
from sparsetir.formats.narrow import NarrowCSR as narrow_csr
from sparsetir.formats.narrow import NarrowSELL as narrow_sell
from sparsetir.formats.partitions import Columns as columns
from sparsetir.formats.partitions import Rows as rows
from sparsetir.formats.reordered import Reordered as reordered
from sparsetir.formats.row_buckets import Buckets as buckets
from sparsetir.formats.row_buckets import Hyb as hyb
from sparsetir.formats.row_groups import RowGroups as row_groups
from sparsetir.formats.special import NM as nm
from sparsetir.formats.special import SELL as sell
from sparsetir.formats.special import SRBCRS as sr_bcrs
from sparsetir.formats.special import PaddedCSR as padded_csr
from sparsetir.formats.splits import HDIA as hdia
from sparsetir.formats.splits import Blocks as blocks
from sparsetir.formats.splits import DiaRest as dia_rest
from sparsetir.formats.splits import EllRest as ell_rest
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
