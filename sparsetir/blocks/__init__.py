# SPDX-License-Identifier: Apache-2.0
"""Matrices on disk that are larger than memory, multiplied block by block within a memory limit."""

from __future__ import annotations

from sparsetir.blocks.matrix import BlockMatrix, open_blocks
from sparsetir.blocks.reading import Plan
from sparsetir.blocks.results import save_blocks

__all__ = ["BlockMatrix", "Plan", "open_blocks", "save_blocks"]
