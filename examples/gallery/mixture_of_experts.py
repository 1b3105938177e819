# SPDX-License-Identifier: Apache-2.0
"""
A mixture of experts
====================

Tokens go to a few of many experts. ``sparsetir.torch.grouped_mm`` multiplies the rows of each expert with its own
matrix, with gradients and without padding, however uneven the groups are.
"""

import os

from matplotlib import pyplot

import sparsetir.torch
import torch
from sparsetir.bench import interleave

TOKENS = int(1024 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)))
EXPERTS, WIDTH, HIDDEN, CHOSEN = 16, 64, 128, 2

# %%
# The layer
# ---------
# A router scores the experts; each token goes to the two with the highest scores. Rows are sorted by expert,
# multiplied in groups, and added up where they came from.

torch.manual_seed(0)
tokens = torch.randn(TOKENS, WIDTH)
router = torch.randn(WIDTH, EXPERTS) / WIDTH**0.5 + torch.linspace(0.15, -0.15, EXPERTS)
first = (torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5).requires_grad_()
second = (torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5).requires_grad_()

shares, experts = (tokens @ router).softmax(-1).topk(CHOSEN)
order = experts.flatten().argsort(stable=True)
token = order // CHOSEN
sizes = torch.bincount(experts.flatten(), minlength=EXPERTS)
ends = sizes.cumsum(0).to(torch.int32)


def grouped() -> torch.Tensor:
    """Apply all experts by two grouped products."""
    hidden = sparsetir.torch.grouped_mm(tokens[token], first, offs=ends).relu()
    mixed = sparsetir.torch.grouped_mm(hidden, second, offs=ends)
    return torch.zeros_like(tokens).index_add(0, token, mixed * shares.flatten()[order, None])


def one_by_one() -> torch.Tensor:
    """Apply one expert after the other."""
    out = torch.zeros_like(tokens)
    for expert in range(EXPERTS):
        rows, slot = (experts == expert).nonzero(as_tuple=True)
        out = out.index_add(0, rows, (tokens[rows] @ first[expert]).relu() @ second[expert] * shares[rows, slot, None])
    return out


print("same result:", torch.allclose(grouped(), one_by_one(), atol=1e-4))
gradients = [torch.autograd.grad(layer().square().sum(), (first, second)) for layer in (grouped, one_by_one)]
print("same gradients:", all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*gradients, strict=True)))

# %%
# Load and time
# -------------
# Forward and backward together.


def step(layer):
    """Return a function that computes the layer and its gradients."""
    return lambda: torch.autograd.grad(layer().square().sum(), (first, second))


times = interleave({"loop over experts": step(one_by_one), "grouped_mm": step(grouped)}, rounds=2, rest=0.05)
figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.bar(range(EXPERTS), sizes, color="C0")
left.set(xlabel="expert", ylabel="tokens", title="uneven groups")
bars = right.barh(list(times), [timing.median * 1e3 for timing in times.values()], color=["C7", "C0"])
right.bar_label(bars, fmt="%.1f", padding=4)
right.margins(x=0.15)
right.set(xlabel="milliseconds", title="forward and backward")
pyplot.show()
