# SPDX-License-Identifier: Apache-2.0
"""Patterns of message passing: what is matched computes the same as the nodes that it stands for."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from sparsetir.relax.torch_import.graphs import ATEN  # noqa: E402
from sparsetir.torch.fx_patterns import FX  # noqa: E402

ROWS = 3  # as many as columns, so that an index expanded along the wrong dimension has the same shape
VIEWS = ("unsqueeze", "expand", "view", "getitem")


class Traced:
    """A graph of one of the two kinds, whose nodes have their values in place of symbolic tensors."""

    def __init__(self, reader: Any) -> None:
        self.reader, self.graph = reader, torch.fx.Graph()

    def argument(self, tensor: Any) -> Any:
        node = self.graph.placeholder("x")
        node.meta[self.reader.tensor_key] = tensor
        return node

    def call(self, name: str, *args: Any) -> Any:
        aten = torch.ops.aten
        if name == "getitem":
            target = aten.index.Tensor if self.reader is ATEN else operator.getitem
            node = self.graph.call_function(target, args)
        elif self.reader is ATEN:
            target = {"index_add": aten.index_put.default, "mul": aten.mul.Tensor}.get(name)
            node = self.graph.call_function(target or getattr(aten, name).default, args)
        else:
            node = self.graph.call_method(name, args)
        return self.with_value(node)

    def with_value(self, node: Any) -> Any:
        key = self.reader.tensor_key
        args = torch.fx.node.map_arg(node.args, lambda n: n.meta[key])
        method = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
        node.meta[key] = method(*args).contiguous()
        return node

    def value(self, node: Any) -> Any:
        return node.meta[self.reader.tensor_key]

    def view(self, kind: str, node: Any, draw: Any) -> Any:
        """A view of an index, or the index with its rows in another order."""
        shape = list(self.value(node).shape)
        if kind == "unsqueeze":
            return self.call(kind, node, draw(st.integers(-1, 1)))
        if kind == "expand":
            sizes = [ROWS if n == 1 else n for n in shape]
            return self.call(kind, node, draw(st.sampled_from([sizes, [ROWS, *shape]])))
        if kind == "view":
            return self.call(kind, node, draw(st.sampled_from([[-1, 1], [1, -1], shape])))
        if self.reader is ATEN:
            return self.call(kind, node, [self.argument(torch.randperm(shape[0]))])
        parts = (None, slice(None), slice(None, None, 1), self.argument(torch.randperm(shape[0])))
        return self.call(kind, node, draw(st.sampled_from([parts[1:2], parts[1::-1], parts[0:2], parts[3]])))


readers = pytest.mark.parametrize("reader", [FX, ATEN], ids=["fx", "aten"])


@readers
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_targets_of_scatters(reader, data):
    torch.manual_seed(0)
    traced, draw = Traced(reader), data.draw
    index = traced.argument(torch.randint(0, ROWS, (ROWS,)))
    for kind in draw(st.lists(st.sampled_from(VIEWS), max_size=4)):
        index = traced.view(kind, index, draw)
    vector = reader.edge_index(index)
    places = traced.value(index)
    if vector is not None:
        rows = traced.value(vector).reshape(-1, *[1] * (places.dim() - 1))
        assert torch.equal(places, rows.expand_as(places))
    inner = [draw(st.sampled_from([n, n + 1])) for n in places.shape[1:]]
    base = traced.argument(torch.zeros(ROWS, *inner))
    src = traced.argument(torch.randn(draw(st.sampled_from([places.shape[0], ROWS + 1])), *inner))
    if any(n < m for n, m in zip(traced.value(src).shape, places.shape, strict=True)):
        return
    node = traced.call("scatter_add", base, 0, index, src)
    scatter = reader.scatter(node)
    targets = reader.targets(scatter)
    if targets is not None:
        by_rows = torch.zeros(ROWS, *inner).index_add(0, traced.value(targets), traced.value(src))
        torch.testing.assert_close(traced.value(node), by_rows)


@readers
@pytest.mark.parametrize("shape", [(ROWS, 1), (ROWS, 2, 1), (ROWS, 1, 1), (ROWS,), (1, 1), (ROWS, 2)])
def test_messages(reader, shape):
    traced = Traced(reader)
    x = traced.argument(torch.randn(4, *[2] * (len(shape) - 1)))
    sources = traced.argument(torch.tensor([3, 0, 3]))
    rows = traced.call("getitem", x, [sources] if reader is ATEN else sources)
    weight = traced.argument(torch.rand(shape))
    for factors in ((rows, weight), (weight, rows)):
        message = reader.message(traced.call("mul", *factors))
        is_of_edges = shape not in ((1, 1), (ROWS, 2))
        assert (message is not None) == is_of_edges
        if is_of_edges:
            assert (message.x, message.index, message.at, message.weight) == (x, sources, rows, weight)


@readers
def test_whole_rows_have_targets(reader):
    traced = Traced(reader)
    vector, src = traced.argument(torch.tensor([2, 0, 2, 1])), traced.argument(torch.randn(4, 5))
    base = traced.argument(torch.zeros(ROWS, 5))
    column = traced.call("unsqueeze", vector, -1)
    whole = traced.call("expand", column, [-1, 5])
    found = reader.scatter(traced.call("scatter_add", base, 0, whole, src))
    assert (found.reduce, reader.targets(found)) == ("sum", vector)
    assert reader.targets(reader.scatter(traced.call("scatter_add", base, 0, column, src))) is None
    args = (base, [vector], src, True) if reader is ATEN else (base, 0, vector, src)
    assert reader.targets(reader.scatter(traced.call("index_add", *args))) is vector
