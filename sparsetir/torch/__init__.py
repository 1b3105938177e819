# SPDX-License-Identifier: Apache-2.0
"""Training with torch: graphs whose products, softmax and attention have gradients.

>>> import torch, sparsetir.torch
>>> graph = sparsetir.torch.Graph(torch.eye(3))
>>> graph.spmm(torch.ones(3, 2, requires_grad=True)).sum().item()
6.0
"""

from __future__ import annotations

from sparsetir.harness.optional import require

require("torch", extra="torch", purpose="sparsetir.torch")

from sparsetir.torch import traced as _traced  # noqa: E402, F401
from sparsetir.torch.graph import Graph  # noqa: E402
from sparsetir.torch.linear import LayerChange, SparseLinear, sparsify_  # noqa: E402
from sparsetir.torch.pyg import patch_pyg  # noqa: E402

__all__ = ["Graph", "LayerChange", "SparseLinear", "patch_pyg", "sparsify_"]
