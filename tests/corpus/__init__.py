# SPDX-License-Identifier: Apache-2.0
"""The programs the whole test suite runs on, each with inputs and an independent oracle."""

from __future__ import annotations

import sparsetir  # noqa: F401  (registers the dialect)
from corpus import axes, blocks, graph, language, levels, matrix, padded, spellings, tensors
from corpus.case import Case as Case
from corpus.data import KINDS as KINDS
from corpus.data import LARGE_KIND as LARGE_KIND
from corpus.data import SMALL_KINDS as SMALL_KINDS

_MODULES = (matrix, blocks, padded, levels, tensors, graph, axes, language, spellings)
CASES: list[Case] = [found for module in _MODULES for found in vars(module).values() if isinstance(found, Case)]
BY_NAME = {found.name: found for found in CASES}
