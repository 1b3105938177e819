# SPDX-License-Identifier: Apache-2.0
"""The measurement of the work for which a structure of edges pays."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch_geometric")

from sparsetir.bench import structures
from sparsetir.torch import graph_caches


@pytest.mark.slow
def test_each_step_builds_a_structure_on_one_of_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    graph = graph_caches.Graph
    monkeypatch.setattr(graph_caches, "Graph", lambda index, shape: built.append(shape) or graph(index, shape))
    rows = list(structures.lines([40, 80], [8], steps=2))
    assert len(rows) == 2 + 2 * 2
    assert [row.split("|")[1:4] for row in rows[2:4]] == [[" SAGEConv ", " 40 ", " 8 "], [" SAGEConv ", " 80 ", " 8 "]]
    assert {(10, 10), (20, 20)} <= set(built)
    assert built.count((10, 10)) + built.count((20, 20)) == 3 * 4  # steps, with the first, of two layers and two sizes
    assert graph_caches.MIN_USES > 0
