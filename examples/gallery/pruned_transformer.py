# SPDX-License-Identifier: Apache-2.0
"""
A pruned transformer in bfloat16 and int8
=========================================

``sparsetir.torch.sparsify_`` times every layer of a pruned model, dense and sparse, in the dtypes that it may use,
and keeps what is fastest.
"""

import copy
import os
import warnings

from matplotlib import pyplot
from torch.nn.utils import prune

import sparsetir.torch
import torch
from sparsetir.bench import interleave

WIDTH = 16 * int(15 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)) + 1)

# %%
# A pruned model
# --------------
# A layer of a transformer, 90 % of whose weights are set to zero by torch's own pruning.

torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True).eval()
for linear, name in [
    (model.self_attn, "in_proj_weight"),
    (model.self_attn.out_proj, "weight"),
    (model.linear1, "weight"),
    (model.linear2, "weight"),
]:
    prune.l1_unstructured(linear, name, 0.9)
    prune.remove(linear, name)
tokens = torch.randn(2, 32, WIDTH)
with torch.no_grad():
    expected = model(tokens)

# %%
# Three precisions
# ----------------
# ``dtype`` is the lowest precision allowed. The reports name what each layer became and why.

models, reports = {"torch": model}, {}
for dtype in (None, "bfloat16", "int8"):
    name = str(dtype or "float32")
    reports[name] = sparsetir.torch.SparsifyReport()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which layers stay dense is in the report
        models[name] = sparsetir.torch.sparsify_(
            copy.deepcopy(model), keep="nonzeros", dtype=dtype, examples=[tokens], report=reports[name], seconds=0.05
        )
print(reports["int8"])

# %%
# Time and error
# --------------


def run(candidate: torch.nn.Module) -> torch.Tensor:
    """Return the output without gradients."""
    with torch.no_grad():
        return candidate(tokens)


times = interleave(
    {name: lambda candidate=candidate: run(candidate) for name, candidate in models.items()}, rounds=2, rest=0.05
)
errors = [
    float(torch.linalg.norm(run(candidate) - expected) / torch.linalg.norm(expected)) for candidate in models.values()
]
figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
names = ["torch float32, dense", *(f"sparsify_, down to {name}" for name in reports)]
bars = axes.barh(names, [timing.median * 1e3 for timing in times.values()], color=["C7", "C0", "C0", "C0"])
axes.bar_label(bars, [f"error {error:.0e}" if error else "" for error in errors], padding=4)
axes.invert_yaxis()
axes.margins(x=0.25)
axes.set(xlabel="milliseconds a call")
pyplot.show()
