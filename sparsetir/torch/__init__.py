# SPDX-License-Identifier: Apache-2.0
"""Training with torch: graphs whose products, softmax and attention have gradients.

>>> import torch, sparsetir.torch
>>> graph = sparsetir.torch.Graph(torch.eye(3))
>>> graph.spmm(torch.ones(3, 2, requires_grad=True)).sum().item()
6.0
"""

from __future__ import annotations

from sparsetir.torch import tracing as _traced  # noqa: F401
from sparsetir.torch.graph import Graph
from sparsetir.torch.jagged import jagged_attention
from sparsetir.torch.linear import SparseLinear
from sparsetir.torch.products import grouped_mm, matmul
from sparsetir.torch.pruned_layers import PrunedAttention, PrunedConv, PrunedLinear
from sparsetir.torch.pyg import patch_pyg
from sparsetir.torch.sparsify import LayerChange, SparsifyReport, sparsify_
from sparsetir.utils.packages import require

require("torch", extra="torch", purpose="sparsetir.torch")


__all__ = [
    "Graph",
    "LayerChange",
    "PrunedAttention",
    "PrunedConv",
    "PrunedLinear",
    "SparseLinear",
    "SparsifyReport",
    "grouped_mm",
    "jagged_attention",
    "matmul",
    "patch_pyg",
    "sparsify_",
]
