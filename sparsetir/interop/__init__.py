# SPDX-License-Identifier: Apache-2.0
"""Sparse objects of other libraries, laid out as the axes of a sparse buffer want them, and back.

`store` takes scipy, torch and coordinate tensors apart, `restore` puts new values into an object of the same class
and structure. Where the argument's layout is the buffer's, its arrays are used as they are; every other layout is
converted through sorted coordinates. `check_level` judges arrays that a user passes by name.
"""

from __future__ import annotations

from sparsetir.interop.arrays import (
    HALVES,
    aligned_contiguous,
    as_numpy,
    compressed_of,
    coordinates_of,
    in_format,
    is_half,
    passable,
    recast,
    sorted_rows,
    transposed,
    writable_alias,
)
from sparsetir.interop.levels import (
    Array,
    Level,
    Validator,
    are_ascending,
    check_distinct,
    check_dtype,
    check_level,
    is_sound,
)
from sparsetir.interop.sources import (
    CooTensor,
    Source,
    advice_for_matrix,
    array_of_numbers,
    check_detached,
    check_numbers,
    check_parts,
    check_sound,
    holds_numbers,
    holds_own_values,
    is_sparse,
    is_torch,
    open_source,
    to_torch,
)
from sparsetir.interop.storage import StoredArgument, are_distinct, entries, has_layout, restore, store, with_values

__all__ = [
    "HALVES",
    "Array",
    "CooTensor",
    "Level",
    "Source",
    "StoredArgument",
    "Validator",
    "advice_for_matrix",
    "aligned_contiguous",
    "are_ascending",
    "are_distinct",
    "array_of_numbers",
    "as_numpy",
    "check_detached",
    "check_distinct",
    "check_dtype",
    "check_level",
    "check_numbers",
    "check_parts",
    "check_sound",
    "compressed_of",
    "coordinates_of",
    "entries",
    "has_layout",
    "holds_numbers",
    "holds_own_values",
    "in_format",
    "is_half",
    "is_sound",
    "is_sparse",
    "is_torch",
    "open_source",
    "passable",
    "recast",
    "restore",
    "sorted_rows",
    "store",
    "to_torch",
    "transposed",
    "with_values",
    "writable_alias",
]
