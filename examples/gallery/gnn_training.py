# SPDX-License-Identifier: Apache-2.0
"""
Training a graph network of PyG
===============================

Inside ``sparsetir.torch.patch_pyg()`` the message passing of torch_geometric runs on compiled kernels, forward and
backward. The model and its training loop stay as they are.
"""

import os
import time

from matplotlib import pyplot
from torch_geometric.nn import GATConv

import sparsetir.torch
import torch

SCALE = float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1))
NODES, EPOCHS, CLASSES, FEATURES = int(2000 * SCALE), 2 + int(6 * SCALE), 5, 64

# %%
# Data and model
# --------------
# Nodes of five classes, mostly linked within a class, with noisy features.

torch.manual_seed(0)
labels = torch.randint(CLASSES, (NODES,))
by_class = labels.argsort()
ends = torch.bincount(labels, minlength=CLASSES).cumsum(0)
sources = torch.randint(NODES, (15 * NODES,))
targets = by_class[
    ends[labels[sources]] - 1 - torch.randint(NODES // 6, sources.shape)
]  # of the same class, nearly always
edges = torch.stack([torch.cat([sources, targets]), torch.cat([targets, sources])])
features = torch.randn(NODES, FEATURES)
features[:, :CLASSES] += 1.5 * torch.nn.functional.one_hot(labels, CLASSES)


class Network(torch.nn.Module):
    """Two layers of graph attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(FEATURES, 8, heads=8)
        self.second = GATConv(64, CLASSES, heads=1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edges).relu(), edges)


def train() -> tuple[list[float], list[float]]:
    """Train a new network; return its losses, and the seconds from the start at which each was reached."""
    torch.manual_seed(1)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses, seconds, start = [], [], time.perf_counter()
    for _ in range(EPOCHS):
        loss = torch.nn.functional.cross_entropy(model(features, edges), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


# %%
# Training, plain and patched
# ---------------------------
# The first patched runs compile, the second layer once its edges were used by 32 layers; a later run is timed.

plain, plain_seconds = train()
with sparsetir.torch.patch_pyg():
    for _ in range(2):
        train()
    patched, patched_seconds = train()

print(f"largest difference of losses: {max(abs(a - b) for a, b in zip(plain, patched, strict=True)):.1e}")
print(f"{plain_seconds[-1] / EPOCHS * 1e3:.0f} ms an epoch, {patched_seconds[-1] / EPOCHS * 1e3:.0f} ms patched")

# %%
# The same losses, earlier
# ------------------------

figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
axes.plot(plain_seconds, plain, "o-", color="C7", label="torch_geometric")
axes.plot(patched_seconds, patched, "o-", color="C0", label="with patch_pyg()")
axes.set(xlabel="seconds", ylabel="loss", title="A network of two GATConv layers")
axes.legend()
pyplot.show()
