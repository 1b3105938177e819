# SPDX-License-Identifier: Apache-2.0
"""Graph networks from torch: messages along edges are sparse products and reductions of segments."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

import sparsetir.relax as srelax
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch_geometric")
    import torch_geometric
    from torch_geometric.nn import conv

pytestmark = pytest.mark.filterwarnings("ignore")
N, E, F = 12, 50, 6
torch.manual_seed(0)
INDEX, X, TYPES = torch.randint(0, N - 1, (2, E)), torch.randn(N, F), torch.randint(0, 3, (E,))


class Stack(torch.nn.Module):
    """Two layers, and a head that reads all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv.GCNConv(F, 8), conv.GATConv(8, 4, heads=2)

    def forward(self, x: Any, edge_index: Any, scale: Any = None) -> Any:
        y = self.second(self.first(x, edge_index).relu(), edge_index)
        return y if scale is None else y * scale


class Scatter(torch.nn.Module):
    """Reductions as torch has them; the index is a buffer, or an argument."""

    def __init__(self, reduce: str, index: Any = None) -> None:
        super().__init__()
        self.reduce = reduce
        self.register_buffer("index", index)

    def forward(self, x: Any, index: Any = None) -> Any:
        index = self.index if index is None else index
        places = index[:, None].expand(-1, x.shape[1])
        return x.new_zeros(N, x.shape[1]).scatter_reduce(0, places, x, self.reduce, include_self=False)


def operators(model: srelax.CompiledModel) -> set[str]:
    return set(re.findall(r"R\.(?:sparse\.\w+|scatter_elements)", model.mod.script()))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


SUM, MAX, SPMM, COUNT, SCATTER = (
    f"R.{n}"
    for n in ("sparse.segment_sum", "sparse.segment_max", "sparse.spmm", "sparse.transpose", "scatter_elements")
)
LAYERS = {
    "gcn": (lambda: conv.GCNConv(F, 4), {SPMM}),
    "sage, mean": (lambda: conv.SAGEConv(F, 4), {SPMM}),
    "sage, max": (lambda: conv.SAGEConv(F, 4, aggr="max"), {MAX}),
    "gin": (lambda: conv.GINConv(torch.nn.Linear(F, 4)), {SPMM}),
    "gat": (lambda: conv.GATConv(F, 4, heads=2), {SUM, MAX}),
    "stack": (Stack, {SUM, MAX, SPMM}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_constant_edges(name):
    make, expected = LAYERS[name]
    model = make().eval()
    compiled = srelax.from_torch(model, (X, INDEX), static=["edge_index"])
    assert operators(compiled) == expected
    close(compiled(X), model(X, INDEX))


@pytest.mark.slow
def test_edges_in_a_buffer(monkeypatch):
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", False)

    class Relations(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = conv.RGCNConv(F, 4, 3)
            self.register_buffer("edges", INDEX)
            self.register_buffer("types", TYPES)

        def forward(self, x: Any) -> Any:
            return self.layer(x, self.edges, self.types)

    model = Relations().eval()
    compiled = srelax.from_torch(model, (X,))
    assert operators(compiled) == {SPMM}
    close(compiled(X), model(X))


CALLS = {
    "sage, mean": (lambda: conv.SAGEConv(F, 4), False, {COUNT, SPMM, SUM}),
    "sage, max": (lambda: conv.SAGEConv(F, 4, aggr="max"), False, {COUNT, MAX}),
    "gcn, weighted": (lambda: conv.GCNConv(F, 4, normalize=False), True, {COUNT, SPMM}),
    "gat": (lambda: conv.GATConv(F, 4, heads=2, add_self_loops=False), False, {COUNT, SUM, MAX}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_edges_of_a_call(name):
    make, is_weighted, expected = CALLS[name]
    model = make().eval()
    edges, nodes = torch.export.Dim("edges", min=2, max=1000), torch.export.Dim("nodes", min=2, max=100)
    weight = lambda count: (torch.rand(count),) if is_weighted else ()  # noqa: E731
    shapes = ({0: nodes}, {1: edges}, *([{0: edges}] if is_weighted else []))
    compiled = srelax.from_torch(model, (X, INDEX, *weight(E)), dynamic_shapes=shapes)
    assert operators(compiled) == expected
    assert compiled.mod.script().count("R.sparse.transpose(") == 1
    for count, size in ((E, N), (30, 5), (2, 40)):
        args = torch.randn(size, F), torch.randint(0, size, (2, count)), *weight(count)
        close(compiled(*args), model(*args))
    args = X, torch.full((2, 7), 3), *weight(7)
    close(compiled(*args), model(*args))


@pytest.mark.slow
def test_no_edges():
    """Nothing is reduced: each layer keeps what it does to the nodes themselves, and what an empty softmax leaves."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(conv.SAGEConv(F, 4, aggr=aggr) for aggr in ("mean", "max", "softmax"))
            self.layers.append(conv.TransformerConv(F, 4))
            self.register_buffer("edges", INDEX[:, :0])

        def forward(self, x: Any, edges: Any) -> Any:
            return [layer(x, index) for layer in self.layers for index in (edges, self.edges)]

    model = Both().eval()
    compiled = srelax.from_torch(model, (X, INDEX[:, :0]))
    for found, expected in zip(compiled(X, INDEX[:, :0]), model(X, INDEX[:, :0]), strict=True):
        close(found, expected)


@pytest.mark.slow
def test_rows_that_a_known_mask_selects():
    """As in GPSConv, which puts the nodes of graphs one after the other and takes out what is padding."""

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.arange(2 * 5).reshape(2, 5) % 3 != 1)

        def forward(self, x: Any) -> Any:
            return x[torch.ones(2, dtype=torch.bool)].relu(), x[self.mask].exp(), x[self.mask & False]

    x, model = torch.randn(2, 5, 3), Padded()
    for found, expected in zip(srelax.from_torch(model, (x,))(x), model(x), strict=True):
        close(found, expected)


@pytest.mark.slow
def test_edges_of_a_call_out_of_range():
    for aggr, end in (("mean", 0), ("mean", 1), ("max", 0), ("max", 1)):
        compiled = srelax.from_torch(conv.SAGEConv(F, 4, aggr=aggr).eval(), (X, INDEX))
        for bad in (N, -1):
            edges = INDEX.clone()
            edges[end, 7] = bad
            with pytest.raises(Exception, match="indices must be from 0 to one less than the number of columns"):
                compiled(X, edges)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("index", ["sorted", "unsorted", "alike"])
def test_reductions(reduce, index):
    places = {"sorted": INDEX[0].sort().values, "unsorted": INDEX[0], "alike": torch.full((E,), 3)}[index]
    x = torch.randn(E, 3)
    model = Scatter(reduce, places).eval()
    compiled = srelax.from_torch(model, (x,))
    assert SCATTER not in operators(compiled)
    close(compiled(x), model(x))


@pytest.mark.slow
def test_reductions_of_a_call():
    x = torch.randn(E, 3)
    for reduce in ("sum", "mean", "amin", "prod"):
        model = Scatter(reduce).eval()
        compiled = srelax.from_torch(model, (x, INDEX[0]))
        assert (SCATTER in operators(compiled)) == (reduce == "prod")
        for index in (INDEX[0], INDEX[0].sort().values, torch.full((E,), 3)):
            close(compiled(x, index), model(x, index))
    small = INDEX[0].int()
    close(srelax.from_torch(Scatter("mean").eval(), (x, small))(x, small), Scatter("mean")(x, small.long()))


@pytest.mark.slow
def test_rows_that_are_not_kept_together():
    class Elements(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.randint(0, N, (E, 3)))

        def forward(self, x: Any) -> Any:
            return x.new_zeros(N, 3).scatter_add(0, self.places, x) + torch.ones(N, 3).scatter_add(0, self.places, x)

    model, x = Elements().eval(), torch.randn(E, 3)
    compiled = srelax.from_torch(model, (x,))
    assert operators(compiled) == {SCATTER}
    close(compiled(x), model(x))


def test_an_index_of_fewer_elements_than_the_source():
    class Narrow(torch.nn.Module):
        def forward(self, x: Any, index: Any) -> Any:
            columns = index[:, None]
            return x.new_zeros(N, 3).scatter_add(0, columns, x) - x.new_zeros(N, 3).scatter_add(0, columns[:20], x)

    model, x = Narrow().eval(), torch.randn(E, 3)
    close(srelax.from_torch(model, (x, INDEX[0]))(x, INDEX[0]), model(x, INDEX[0]))


def by_hand(kind: str, x: Any, edges: Any) -> Any:
    """Messages as people write them without a library."""
    sources, targets = edges
    rows = x.new_zeros(N, F)
    match kind:
        case "weighted":
            weight = torch.sigmoid((x[sources] * x[targets]).sum(-1, keepdim=True))
            return rows.index_add(0, targets, weight * x[sources])
        case "counted":
            return rows.index_add(0, targets, (sources % 3)[:, None] * x[sources])
        case "degrees":
            degrees = torch.zeros(N).index_add_(0, targets, torch.ones(edges.shape[1]))
            return rows.index_add(0, targets, x[sources]) / degrees.clamp(min=1)[:, None]
        case "max":
            return rows.index_reduce(0, targets, x[sources], "amax", include_self=False)
        case "into x":
            return x.index_add(0, targets, x[sources])
        case "put":
            return x.index_put((targets[:5],), torch.zeros(()))
        case "put where":
            whole = x.clone()
            whole[x[:, 0] > 0] = 2.0
            return whole.index_put((x > 1,), torch.ones(()), accumulate=True)
        case _:
            dense = torch.zeros(N, N)
            dense[targets, sources] = 1.0
            return dense @ x


class ByHand(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any, edges: Any) -> Any:
        return by_hand(self.kind, x, edges)


def test_values_that_are_put_where_a_mask_is_true():
    class Put(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.index_put((x > 0,), x[x > 0] * 2)

    with pytest.raises(LoweringError, match="mask"):
        srelax.from_torch(Put(), (X,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("kind", ["weighted", "counted", "degrees", "max", "into x", "put", "put where", "dense"])
def test_messages_by_hand(kind, is_static):
    model = ByHand(kind).eval()
    compiled = srelax.from_torch(model, (X, INDEX), static=["edges"] if is_static else [])
    close(compiled(X) if is_static else compiled(X, INDEX), model(X, INDEX))
    if kind in ("weighted", "counted", "degrees", "max"):
        assert operators(compiled) & {SUM, MAX, SPMM}


@pytest.mark.slow
def test_indices_from_the_end():
    class FromTheEnd(torch.nn.Module):
        def forward(self, x: Any, edges: Any) -> Any:
            return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0] - N])

    model = FromTheEnd().eval()
    close(srelax.from_torch(model, (X, INDEX), static=["edges"])(X), model(X, INDEX))
    with pytest.raises(Exception, match="indices must be from 0 to one less than the number of columns"):
        srelax.from_torch(model, (X, INDEX))(X, INDEX)


class Pooled(torch.nn.Module):
    """A graph network that asks the values of its arguments for numbers and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv.GCNConv(F, 8), conv.RGCNConv(8, 8, 3)

    def forward(self, x: Any, edges: Any, types: Any, batch: Any, weight: Any, mask: Any) -> Any:
        x = self.second(self.first(x, edges, weight).relu(), edges, types)
        counts = torch.zeros(3).index_add_(0, batch, torch.ones(N))
        dropped = torch.nn.functional.dropout(counts, 0.5, self.training).sum()
        found = torch_geometric.nn.global_max_pool(x, batch), x[mask], counts
        return torch.cat(found[:2]) * counts.tolist()[0] + int(torch.ones(2).sum()) + 0 * dropped


STATIC = ["edges", "types", "batch", "weight", "mask"]
VALUES = (INDEX, TYPES, torch.arange(N) // 5, torch.rand(E), torch.arange(N) % 3 == 0)


@pytest.mark.slow
def test_numbers_that_fixed_arguments_tell():
    model = Pooled().eval()
    compiled = srelax.from_torch(model, (X, *VALUES), static=STATIC)
    assert SCATTER not in operators(compiled)
    close(compiled(X), model(X, *VALUES))
    with pytest.raises(LoweringError, match=r"needs a number, or a size, .* name those arguments in static="):
        srelax.from_torch(model, (X, *VALUES), static=STATIC[:2])


def test_what_is_drawn_is_no_number_that_is_known():
    class Drawn(torch.nn.Module):
        def forward(self, x: Any, edges: Any) -> Any:
            return x * int(torch.bernoulli(edges[0] / N).sum())

    with pytest.raises(LoweringError, match="needs a number, or a size, that depends on the values"):
        srelax.from_torch(Drawn().eval(), (X, INDEX), static=["edges"])


@pytest.mark.slow
def test_fixed_arguments_by_name():
    model, scale = Stack().eval(), torch.tensor(2.0)
    compiled = srelax.from_torch(
        model, (X,), example_kwargs={"edge_index": INDEX, "scale": scale}, static=["edge_index"]
    )
    close(compiled(X, scale=scale), model(X, INDEX, scale))


@pytest.mark.slow
def test_medians_of_neighbours():
    layer = conv.SAGEConv(F, 4, aggr="median").eval()
    close(srelax.from_torch(layer, (X, INDEX), static=["edge_index"])(X), layer(X, INDEX))


class OfSpectrum(conv.SAGEConv):
    """A layer with an operator that TVM does not import."""

    def forward(self, x, edge_index):
        return super().forward(torch.linalg.eigvalsh(x @ x.T)[:, None] * x, edge_index)


@pytest.mark.slow
def test_refusals():
    model = conv.GCNConv(F, 4).eval()
    with pytest.raises(LoweringError, match=r"selects by a mask, .* pass static=\[\"edge_index\"\]"):
        srelax.from_torch(model, (X, INDEX))
    layer = conv.MFConv(F, 4, max_degree=3).eval()
    with pytest.raises(
        LoweringError, match=r"nonzero asks where a mask is true, .* MFConv; pass static=\[\"edge_index\"\]"
    ):
        srelax.from_torch(layer, (X, INDEX))
    close(srelax.from_torch(layer, (X, INDEX), static=["edge_index"])(X), layer(X, INDEX))
    with pytest.raises(ArgumentError, match=r"static has 'edges', expected some of \[x, edge_index\]"):
        srelax.from_torch(model, (X, INDEX), static=["edges"])
    with pytest.raises(LoweringError, match=r"_linalg_eigh.*; replace these .* torch.compile\(model, backend=\"spars"):
        srelax.from_torch(OfSpectrum(F, 4).eval(), (X, INDEX), static=["edge_index"])
    exported = torch.export.export(conv.SAGEConv(F, 4).eval(), (X, INDEX))
    with pytest.raises(ArgumentTypeError, match="no dynamic_shapes and nothing static"):
        srelax.from_torch(exported, static=["edge_index"])
