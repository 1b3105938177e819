# SPDX-License-Identifier: Apache-2.0
"""Sparse operators for Relax: whole models with kernels of this package inside."""

from __future__ import annotations

from sparsetir.relax import legalize, operators
from sparsetir.relax.build import build
from sparsetir.relax.calls import attention, gather_matmul_scatter, linear, sddmm, segment_reduce, softmax, spmm, spmv
from sparsetir.relax.legalize import LowerSparse
from sparsetir.relax.operators import csr_constants
from sparsetir.relax.sparsify import Layer, SparsifyWeights

operators.register()
legalize.register()

__all__ = [
    "Layer",
    "LowerSparse",
    "SparsifyWeights",
    "attention",
    "build",
    "csr_constants",
    "gather_matmul_scatter",
    "linear",
    "sddmm",
    "segment_reduce",
    "softmax",
    "spmm",
    "spmv",
]
