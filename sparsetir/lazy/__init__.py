# SPDX-License-Identifier: Apache-2.0
"""Chains of operations on sparse and dense arrays, compiled together: `lazy`, `compute`, `fused`."""

from __future__ import annotations

from sparsetir.lazy.array import Lazy, lazy, relu, softmax
from sparsetir.lazy.run import compute, fused

__all__ = ["Lazy", "compute", "fused", "lazy", "relu", "softmax"]
