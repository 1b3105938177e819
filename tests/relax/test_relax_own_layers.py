# SPDX-License-Identifier: Apache-2.0
"""Models with this package's own torch layers go through `from_torch` and equal the torch model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparsetir.relax as srelax
import torch
from sparsetir.errors import LoweringError
from sparsetir.torch import Graph, SparseLinear, sparsify_

NODES, EDGES, FEATURES = 6, 15, 4


class Network(torch.nn.Module):
    """A function of a graph, its edges in any order, with weights of edges and a dense layer."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function, self.dense = function, torch.nn.Linear(FEATURES, FEATURES)
        self.graph = Graph(torch.randint(0, NODES - 1, (2, EDGES), generator=generator), NODES)
        self.weight = torch.nn.Parameter(torch.randn(EDGES, generator=generator))
        self.heads = torch.nn.Parameter(torch.randn(EDGES, 2, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def split(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 2, 2)


GRAPHS: dict[str, Callable[[Any, Any], Any]] = {
    "spmm": lambda net, x: net.graph.spmm(net.dense(x)),
    "spmm, weighted": lambda net, x: net.graph.spmm(x, net.weight, bias=x[0], activation="relu"),
    "spmm, vector": lambda net, x: net.graph.spmm(x[:, 0]),
    "spmm, heads": lambda net, x: net.graph.spmm(split(x), net.heads),
    "spmm, mean": lambda net, x: net.graph.spmm(x, reduce="mean"),
    "spmm, max": lambda net, x: net.graph.spmm(x, net.weight, reduce="max"),
    "spmm, min": lambda net, x: net.graph.spmm(x, reduce="min"),
    "conv": lambda net, x: net.graph.conv(x, net.dense.weight, net.dense.bias, "mean"),
    "softmax": lambda net, x: net.graph.softmax(net.weight) * x.sum(),
    "softmax, heads": lambda net, x: net.graph.softmax(net.heads) * x.sum(),
    "sddmm": lambda net, x: net.graph.sddmm(x, net.dense(x)),
    "attention": lambda net, x: net.graph.attention(x, net.dense(x), x, scale=0.3),
    "attention, heads": lambda net, x: net.graph.attention(split(x), split(net.dense(x)), split(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_operations_of_a_graph_equal_torch(name: str) -> None:
    model, x = Network(GRAPHS[name]).eval(), torch.randn(NODES, FEATURES)
    with torch.no_grad():
        compiled = srelax.from_torch(model, (x,))
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert "R.sparse." in compiled.mod.script()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("density", [0.0, 0.3])
def test_sparse_layers_equal_torch_for_any_batch(dtype: torch.dtype, density: float, tmp_path: Path) -> None:
    first, last = SparseLinear(8, 6, density=density, dtype=dtype), SparseLinear(6, 3, bias=False, dtype=dtype)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), last).eval()
    batch = torch.export.Dim("batch")
    compiled = srelax.from_torch(model, (torch.randn(4, 8, dtype=dtype),), dynamic_shapes=({0: batch},))
    assert compiled.mod.script().count("R.sparse.linear(") == 2
    path = tmp_path / "model.so"
    compiled.save(path)
    for loaded in (compiled, srelax.load(path)):
        for rows in (1, 5):
            x = torch.randn(rows, 8, dtype=dtype)
            torch.testing.assert_close(loaded(x), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_sparsified_transformer_layer_equals_torch() -> None:
    torch.manual_seed(0)
    feed_forward = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), sparsify_(feed_forward, 0.2)).eval()
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(srelax.from_torch(model, (x,))(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_operations_without_an_operator_are_named() -> None:
    model = Network(lambda net, x: net.graph.additive_attention(x[:, 0], x[:, 1], x))
    with pytest.raises(LoweringError, match=r"Graph\.additive_attention: expected one of linear, spmm, softmax"):
        srelax.from_torch(model, (torch.randn(NODES, FEATURES),))
    model = torch.nn.Sequential(SparseLinear(8, 6, precision="bf16x3"))
    with pytest.raises(LoweringError, match=r"Graph\.linear with a precision: expected one of linear, spmm"):
        srelax.from_torch(model, (torch.randn(4, 8),))
