# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of `sparsetir.torch` end in a result or an error of this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import scipy.sparse as sp

import sparsetir.torch as storch
import torch
from sparsetir.utils.memory import MemoryLimitError
from tests.bad_arguments import BAD, Case, faults_of, matrix
from tests.quick_code import quick_code

#: what a tensor can be beside what arrays can
ARRAYS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.ones(4, 3),
    "scalar": lambda: torch.tensor(1.0),
    "whole numbers": lambda: torch.ones(4, 3, dtype=torch.int64),
    "half": lambda: torch.ones(4, 3, dtype=torch.float16),
    "double": lambda: torch.ones(4, 3, dtype=torch.float64),
    "complex": lambda: torch.ones(4, 3, dtype=torch.complex64),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.qint8),
    "no rows": lambda: torch.ones(0, 3),
    "four dimensions": lambda: torch.ones(1, 1, 4, 3),
    "without memory": lambda: torch.ones(4, 3, device="meta"),
    "conjugate": lambda: torch.ones(4, 3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch._neg_view(torch.ones(4, 3)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "coo": lambda: torch.eye(4).to_sparse(),
    "sparse of three": lambda: torch.ones(2, 2, 2).to_sparse(),
    "edges beyond": lambda: torch.tensor([[0, 9], [1, 99]]),
    "negative edges": lambda: torch.tensor([[0, -1], [-2, 1]]),
    "dtype": lambda: torch.float32,
    "numpy's dtype": lambda: "float99",
    "layer": lambda: torch.nn.Linear(2, 2),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4, 3)),
}


def called(make: Callable[[], Any], method: str) -> Callable[..., Any]:
    """A function that calls a method of a fresh object."""
    return lambda **options: getattr(make(), method)(**options)


def cases() -> dict[str, Case]:
    """A call that works of each function."""
    graph, x, edges = storch.Graph(matrix()), torch.ones(4, 3), torch.ones(5)
    heads = torch.ones(4, 3)

    def sparse() -> Any:
        return storch.SparseLinear(3, 2, density=0.5)

    pruned = torch.nn.Sequential(torch.nn.Linear(4, 4))
    converted = {"density": 0.5, "keep": None, "skip": (), "report": None, "decide": "always", "dtype": None}
    converted |= {"examples": None, "rows": 2, "percentile": 100.0, "seconds": 0.0, "tolerance": None}
    return {
        "Graph": (storch.Graph, {"graph": matrix(), "num_nodes": None}),
        "Graph of edges": (storch.Graph, {"graph": torch.tensor([[0, 1], [1, 0]]), "num_nodes": 4}),
        "weighted": (graph.weighted, {"weight": edges}),
        "spmm": (graph.spmm, {"x": x, "weight": edges, "reduce": "sum", "bias": torch.ones(3), "activation": "relu"}),
        "conv": (graph.conv, {"x": x, "weight": torch.ones(2, 3), "bias": torch.ones(2), "reduce": "sum",
                              "activation": "relu"}),
        "sddmm": (graph.sddmm, {"q": x, "k": x}),
        "edge_sum": (graph.edge_sum, {"targets": torch.ones(4), "sources": torch.ones(4)}),
        "softmax": (graph.softmax, {"scores": edges}),
        "dropout": (graph.dropout, {"values": edges, "dropout": 0.5, "training": True, "seed": None}),
        "attention": (graph.attention, {"q": heads, "k": heads, "v": heads, "scale": 1.0, "edges": None,
                                        "dropout": 0.5, "training": True, "seed": None}),
        "additive_attention": (graph.additive_attention, {"targets": torch.ones(4), "sources": torch.ones(4), "v": x,
                                                          "slope": 0.2, "edges": None, "dropout": 0.0}),
        "dynamic_attention": (graph.dynamic_attention, {"targets": x, "sources": x, "weight": torch.ones(3), "v": x,
                                                        "edges": None, "slope": 0.2, "dropout": 0.0}),
        "linear": (graph.linear, {"values": edges, "x": torch.ones(2, 4)}),
        "by_rows": (graph.by_rows, {"edges": edges}),
        "as_given": (graph.as_given, {"edges": edges}),
        "is_to_trace": (graph.is_to_trace, {"tensor": edges}),
        "matmul": (storch.matmul, {"A": torch.eye(4).to_sparse_csr(), "B": x}),
        "grouped_mm": (storch.grouped_mm, {"self": torch.ones(4, 4), "mat2": torch.ones(2, 4, 4),
                                           "offs": torch.tensor([2, 4], dtype=torch.int32), "bias": None,
                                           "out_dtype": None}),
        "SparseLinear": (storch.SparseLinear, {"in_features": 3, "out_features": 2, "density": 0.5, "bias": True,
                                               "mask": None, "dtype": None}),
        "SparseLinear.forward": (called(sparse, "__call__"), {"x": torch.ones(2, 3)}),
        "SparseLinear.regrow": (called(sparse, "regrow"), {"mask": torch.ones(2, 3, dtype=torch.bool)}),
        "sparsify_": (lambda **options: storch.sparsify_(torch.nn.Sequential(torch.nn.Linear(4, 4)), **options),
                      converted),
        "sparsify_ of": (storch.sparsify_, {"model": pruned, "density": 0.5}),
        "pruned layer": (storch.sparsify_(pruned, 0.5), {"input": torch.ones(2, 4)}),
    }  # fmt: skip


@pytest.mark.slow
def test_wrong_arguments_end_in_own_errors(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad = {**BAD, **ARRAYS}
    with quick_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        faults = {name: faults_of(case, name, bad) for name, case in cases().items()}
    assert not any(faults.values()), "\n".join(f"{name}: {fault}" for name, fault in faults.items() if fault)


@pytest.mark.parametrize("nodes", [1 << 40, (1 << 40, 3), (3, 1 << 40)])
def test_graphs_of_more_nodes_than_memory_are_refused(nodes: Any) -> None:
    edges = torch.tensor([[2, 0, 1], [0, 1, 2]])
    with pytest.raises(MemoryLimitError, match="row pointers of a graph and of its transpose would take 8"):
        storch.Graph(edges, nodes)


def test_a_transpose_of_more_columns_than_memory_is_refused() -> None:
    graph = storch.Graph(sp.csr_array(matrix()))
    with pytest.raises(MemoryLimitError, match="where each row or column of a graph begins"):
        replace(graph.rows, columns=1 << 40).transposed
