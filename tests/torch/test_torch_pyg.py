# SPDX-License-Identifier: Apache-2.0
"""Layers of torch_geometric on kernels of this package: the values and gradients that they have without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from sparsetir.errors import StructureError

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch_geometric")
    from torch_geometric import EdgeIndex
    from torch_geometric.nn import conv

import sparsetir.torch  # noqa: E402
from sparsetir.torch import Graph, graph_caches, patch_pyg, pyg  # noqa: E402

checksum = graph_caches.checksum
pytestmark = pytest.mark.filterwarnings("ignore")
N, E, F = 20, 90, 6
torch.manual_seed(0)
INDEX, X = torch.randint(0, N - 2, (2, E)), torch.randn(N, F)
TYPES, WEIGHT = torch.randint(0, 3, (E,)), torch.rand(E)


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(F, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


class Own(conv.MessagePassing):
    """A layer that uses its messages in every way."""

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Any, x_j: Any) -> Any:
        assert (x_j.shape, x_j.size(0), x_j.dim()) == ((E, F), E, 2)
        near = x_j[:, :1] + (x_j - x_i).abs() / (1 + x_j**2) + 2 * x_j - x_j.mean() + x_i * x_j
        return torch.cat([near, -x_j, torch.where(x_j > 0, x_j, x_i)], dim=-1)


# What is made of products, and what falls back on rows.
LAYERS: dict[str, tuple[Any, tuple[Any, ...], bool]] = {
    "gcn": (lambda: conv.GCNConv(F, 4), (INDEX,), True),
    "gcn, weighted": (lambda: conv.GCNConv(F, 4), (INDEX, WEIGHT), True),
    "sage, mean": (lambda: conv.SAGEConv(F, 4), (INDEX,), True),
    "sage, max": (lambda: conv.SAGEConv(F, 4, aggr="max"), (INDEX,), True),
    "sage, several": (lambda: conv.SAGEConv(F, 4, aggr=["min", "std"]), (INDEX,), False),
    "sage, from target": (lambda: conv.SAGEConv(F, 4, flow="target_to_source"), (INDEX,), True),
    "gat": (lambda: conv.GATConv(F, 4, heads=2), (INDEX,), True),
    "gat, from target": (lambda: conv.GATConv(F, 4, flow="target_to_source"), (INDEX,), True),
    "gat, edges": (lambda: conv.GATConv(F, 4, heads=2, edge_dim=1), (INDEX, WEIGHT[:, None]), True),
    "gatv2": (lambda: conv.GATv2Conv(F, 4, heads=2), (INDEX,), True),
    "gin": (lambda: conv.GINConv(network()), (INDEX,), True),
    "rgcn": (lambda: conv.RGCNConv(F, 4, 3), (INDEX, TYPES), True),
    "rgcn, bases": (lambda: conv.RGCNConv(F, 4, 3, num_bases=2), (INDEX, TYPES), True),
    "rgcn, blocks": (lambda: conv.RGCNConv(F, 4, 3, num_blocks=2), (INDEX, TYPES), True),
    "rgcn, max": (lambda: conv.RGCNConv(F, 4, 3, aggr="max", root_weight=False, bias=False), (INDEX, TYPES), True),
    "rgcn, no edges": (lambda: conv.RGCNConv(F, 4, 3), (INDEX[:, :0], TYPES[:0]), True),
    "transformer": (lambda: conv.TransformerConv(F, 4, heads=2), (INDEX,), True),
    "graph": (lambda: conv.GraphConv(F, 4), (INDEX, WEIGHT), True),
    "no edges": (lambda: conv.GATConv(F, 4), (INDEX[:, :0],), True),
    "edge": (lambda: conv.EdgeConv(torch.nn.Linear(2 * F, 4)), (INDEX,), False),
    "own": (Own, (INDEX,), False),
}


@pytest.fixture(autouse=True)
def structures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the structures of small graphs when they are first used, as those of large ones are."""
    monkeypatch.setattr(graph_caches, "MIN_USES", 0)


@pytest.fixture
def structures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are built."""
    built: list[Any] = []
    build = Graph.__init__
    monkeypatch.setattr(Graph, "__init__", lambda self, *a, **b: built.append(self) or build(self, *a, **b))
    return built


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches a graph, as products or as attention."""
    calls: list[Any] = []
    for name in ("spmm", "attention", "additive_attention", "dynamic_attention"):
        record(monkeypatch, name, calls)
    return calls


@pytest.fixture
def attentions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs whose attention was called."""
    calls: list[Any] = []
    for name in ("attention", "additive_attention", "dynamic_attention"):
        record(monkeypatch, name, calls)
    return calls


def record(monkeypatch: pytest.MonkeyPatch, name: str, calls: list[Any]) -> None:
    method = getattr(Graph, name)
    monkeypatch.setattr(Graph, name, lambda self, *a, **b: calls.append(self) or method(self, *a, **b))


def passes(layer: Any, *args: Any, x: Any = X, parameters: Any = None) -> list[Any]:
    """The result of a layer and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    parameters = parameters or layer
    parameters.zero_grad()
    y = layer(x, *args)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in parameters.parameters() if p.grad is not None)]


def passes_patched(*args: Any) -> list[Any]:
    with patch_pyg():
        return passes(*args)


def same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_they_were(products, name):
    make, args, is_product = LAYERS[name]
    torch.manual_seed(1)
    layer = make().eval()
    expected = passes(layer, *args)
    with patch_pyg():
        same(passes(layer, *args), expected)
        same(passes(layer, *args), expected)
    assert bool(products) == is_product
    count = len(products)
    same(passes(layer, *args), expected)
    assert len(products) == count


EDGED = {"edge_attr": WEIGHT[:, None]}
ATTENTIONS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], bool]] = {
    "1 head": (conv.GATConv, {}, {}, True),
    "8 heads": (conv.GATConv, {"heads": 8}, {}, True),
    "means of heads": (conv.GATConv, {"heads": 8, "concat": False}, {}, True),
    "no loops": (conv.GATConv, {"heads": 2, "add_self_loops": False}, {}, True),
    "residual, slope": (conv.GATConv, {"heads": 2, "residual": True, "negative_slope": 0.5}, {}, True),
    "steeper": (conv.GATConv, {"heads": 2, "negative_slope": 1.5}, {}, True),
    "dropout": (conv.GATConv, {"heads": 2, "dropout": 0.5}, {}, True),
    "dropout, edges": (conv.GATConv, {"heads": 2, "edge_dim": 1, "dropout": 0.3}, EDGED, True),
    "edges": (conv.GATConv, {"heads": 8, "edge_dim": 1}, EDGED, True),
    "edges, 1 head": (conv.GATConv, {"edge_dim": 1, "add_self_loops": False}, EDGED, True),
    "v2, 1 head": (conv.GATv2Conv, {"negative_slope": 1.5}, {}, True),
    "v2, means of heads": (conv.GATv2Conv, {"heads": 8, "concat": False, "share_weights": True}, {}, True),
    "v2, edges": (conv.GATv2Conv, {"heads": 2, "edge_dim": 1, "add_self_loops": False}, EDGED, True),
    "v2, dropout": (conv.GATv2Conv, {"heads": 2, "dropout": 0.5}, {}, True),
    "v2, from target": (conv.GATv2Conv, {"heads": 2, "flow": "target_to_source"}, {}, True),
    "transformer": (conv.TransformerConv, {"heads": 2, "beta": True}, {}, True),
    "transformer, 1 head": (conv.TransformerConv, {"concat": False}, {}, True),
    "transformer, edges": (conv.TransformerConv, {"heads": 2, "edge_dim": 1}, EDGED, True),
    "transformer, edges, 1 head": (conv.TransformerConv, {"edge_dim": 1, "beta": True}, EDGED, True),
    "transformer, all": (conv.TransformerConv, {"heads": 2, "edge_dim": 1, "dropout": 0.5}, EDGED, True),
    "transformer, dropout": (conv.TransformerConv, {"heads": 2, "dropout": 0.5}, {}, True),
}


@pytest.mark.slow
@pytest.mark.shared(2)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_one_kernel(attentions, name, monkeypatch):
    kind, options, given, is_one = ATTENTIONS[name]
    torch.manual_seed(1)
    layer = kind(F, 4, **options).train()
    call = lambda x: layer(x, INDEX, **given)  # noqa: E731
    torch.manual_seed(2)
    with patch_pyg():
        found = passes(call, parameters=layer)
    assert len(attentions) == is_one
    if options.get("dropout"):  # of the same shares
        torch.manual_seed(2)
        shares = torch.ones(attentions[0].num_edges, options["heads"])
        mask = attentions[0].dropout(shares, options["dropout"])
        assert 0 < int((mask == 0).sum()) < mask.numel()
        monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, **_options: x * mask)
    same(found, passes(call, parameters=layer))
    monkeypatch.undo()
    layer.eval()
    same(passes(layer, INDEX, *given.values()), passes_patched(layer, INDEX, *given.values()))


@pytest.mark.slow
def test_dropped_attention_weights_are_those_that_were_used(attentions):
    torch.manual_seed(1)
    layer = conv.GATConv(F, 4, heads=2, dropout=0.5, bias=False).train()
    with patch_pyg():
        y, (index, weights) = layer(X, INDEX, return_attention_weights=True)
    assert attentions
    assert 0 < int((weights == 0).sum()) < weights.numel()
    h = layer.lin(X).view(N, 2, 4)
    expected = torch.zeros(N, 2, 4).index_add(0, index[1], weights[..., None] * h[index[0]])
    same([y], [expected.flatten(1)])


@pytest.mark.slow
def test_attention_weights(tmp_path):
    layer = conv.GATConv(F, 4, heads=2)

    def both(x: Any) -> Any:
        y, (index, weights) = layer(x, INDEX, return_attention_weights=True)
        assert isinstance(weights, torch.Tensor)
        assert (weights.requires_grad, weights.dtype) == (True, torch.float32)
        assert tuple(weights.shape) == (len(weights), 2) == (index.shape[1], 2)
        torch.save(weights.detach(), tmp_path / "weights")
        torch.testing.assert_close(torch.load(tmp_path / "weights"), weights.detach())
        return torch.cat([y.flatten(), weights.flatten() ** 2])

    expected = passes(both, parameters=layer)
    with patch_pyg():
        same(passes(both, parameters=layer), expected)


class Near(conv.GATConv):
    """Scores of its own, and what it keeps of them."""

    def edge_update(self, alpha_j: Any, alpha_i: Any, edge_attr: Any, index: Any, ptr: Any, dim_size: Any) -> Any:
        scores = torch.nn.functional.leaky_relu(alpha_i + alpha_j, self.negative_slope)
        self.seen = scores
        return conv.gat_conv.softmax(scores, index, ptr, dim_size)

    def message(self, x_j: Any, alpha: Any) -> Any:
        return x_j * alpha.view(-1, self.heads, 1)


class Doubled(torch.autograd.Function):
    """A function that torch does not see into."""

    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, g: Any) -> Any:
        return g * 2


class Opaque(Near):
    """Messages that pass through such a function."""

    def message(self, x_j: Any, alpha: Any) -> Any:
        return Doubled.apply(x_j) * Doubled.apply(alpha).unsqueeze(-1)


class Scaled(Near):
    """Scores and messages that are changed in place."""

    def edge_update(self, alpha_j: Any, alpha_i: Any, edge_attr: Any, index: Any, ptr: Any, dim_size: Any) -> Any:
        scores = (alpha_j + alpha_i).mul_(2)
        return conv.gat_conv.softmax(torch.nn.functional.leaky_relu(scores, 0.2, True), index, ptr, dim_size)

    def message(self, x_j: Any, alpha: Any) -> Any:
        x_j += 1
        return x_j * alpha.unsqueeze(-1)


class Dotted(conv.MessagePassing):
    """Dot products times another number than usual, of which something else is needed, too, or not."""

    is_needed = False

    def __init__(self, *sizes: int, heads: int) -> None:
        super().__init__(node_dim=0)
        self.lin = torch.nn.Linear(F, heads * F)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=self.lin(x).view(N, 2, F))

    def message(self, x_i: Any, x_j: Any, index: Any, size_i: Any) -> Any:
        scores = 0.3 * (x_i * x_j).sum(dim=[-1])
        weight = conv.gat_conv.softmax(scores, index, num_nodes=size_i)[..., None]
        return x_j * weight + scores.mean() * (x_i * x_j) if self.is_needed else x_j * weight


class Needed(Dotted):
    is_needed = True


@pytest.mark.parametrize(("kind", "count"), [(Near, 1), (Opaque, 0), (Scaled, 0), (Dotted, 1), (Needed, 0)])
def test_attention_of_own_layers(attentions, kind, count):
    layer = kind(F, 4, heads=2)
    expected = passes(layer, INDEX)
    seen = getattr(layer, "seen", torch.ones(())).detach()
    with patch_pyg():
        same(passes(layer, INDEX), expected)
    assert len(attentions) == count
    same([getattr(layer, "seen", torch.ones(())).detach()], [seen])


def test_hooks_of_gradients_in_messages():
    class Hooked(conv.GATConv):
        def message(self, x_j: Any, alpha: Any) -> Any:
            alpha.register_hook(lambda g: g * 0)
            return x_j * alpha.unsqueeze(-1)

    layer = Hooked(F, 4)
    expected = passes(layer, INDEX)
    with patch_pyg():
        same(passes(layer, INDEX), expected)


def test_messages_kept_over_a_change_of_nodes():
    class Kept(conv.SAGEConv):
        def message(self, x_j: Any) -> Any:
            self.kept = x_j
            return x_j

    layer, x = Kept(F, 4), X.clone()
    with patch_pyg():
        layer(x, INDEX)
    x += 1
    with pytest.raises(StructureError, match="changed in place after they were made"):
        layer.kept.sum()


def test_bipartite_layers():
    layer, index = conv.GATConv((F, 3), 4, heads=2, add_self_loops=False), INDEX % 7
    nodes = torch.randn(9, 3)
    expected = layer((X, nodes), index)
    with patch_pyg():
        same([layer((X, nodes), index)], [expected])


def test_nodes_changed_before_their_messages_are_summed():
    class Changing(conv.SAGEConv):
        def message(self, x_j: Any) -> Any:
            with torch.no_grad():
                self.nodes.mul_(2.0)
            return x_j

    layer = Changing(F, 4)
    layer.nodes = X.clone()
    with patch_pyg(), pytest.raises(StructureError, match="changed in place after they were made"):
        layer(layer.nodes, INDEX)


def test_relations_of_short_floats_and_out_of_range():
    layer = conv.RGCNConv(F, 4, 3).bfloat16()
    expected = layer(X.bfloat16(), INDEX, TYPES)
    beyond = INDEX.clone()
    beyond[1, 0] = len(X)
    with patch_pyg():
        found = layer(X.bfloat16(), INDEX, TYPES)
        with pytest.raises(StructureError, match="target 20, expected one of"):
            layer(X.bfloat16(), beyond, TYPES)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_relations_are_two_products_together(products):
    layer, types = conv.RGCNConv((F, F), 4, 50), torch.randint(0, 50, (E,))
    x, index = torch.randn(N, F), INDEX.clone()
    expected = passes(lambda x: layer((x, X[:-1]), index, types), x=x, parameters=layer)
    with patch_pyg():
        for _ in range(2):
            same(passes(lambda x: layer((x, X[:-1]), index, types), x=x, parameters=layer), expected)
        assert len(products) == 4
        types[:9] = 7
        changed = passes(layer, index, types, x=x)
        handle = layer.register_message_forward_hook(lambda _layer, _inputs, out: out * 2)
        hooked = passes(layer, index, types, x=x)
        with pytest.raises(RuntimeError, match="is out of bounds for dimension 0 with size 50"):  # of torch_geometric
            layer(x, index, types + 50)
    handle.remove()
    same(changed, passes(layer, index, types, x=x))
    assert not torch.allclose(changed[0], hooked[0])


def test_graphs_are_found_again(products):
    layers = [conv.SAGEConv(F, F), conv.GCNConv(F, F), conv.SAGEConv(F, F)]
    with patch_pyg():
        for _ in range(2):
            for layer in layers:
                layer(X.clone(), INDEX)
        layers[0](X.clone(), INDEX.clone())
    sage, gcn = {id(g.rows) for g in products[::3]}, {id(g.rows) for g in products[1::3]}
    assert (len(products), len(sage | {id(g.rows) for g in products[2::3]}), len(gcn)) == (7, 1, 1)


@pytest.mark.slow
def test_sums_of_constant_features_are_kept(products):
    layers = [conv.SAGEConv(F, F), conv.GCNConv(F, 2), conv.SAGEConv(F, 4, aggr="max")]
    expected = []
    for layer in layers:
        layer.zero_grad()
        layer(X, INDEX).square().sum().backward()
        expected.append([p.grad.clone() for p in layer.parameters()])
    with patch_pyg():
        for count in (3, 3, 3, 0, 0):
            products.clear()
            for layer, wanted in zip(layers, expected, strict=True):
                layer.zero_grad()
                layer(X, INDEX).square().sum().backward()
                torch.testing.assert_close([p.grad for p in layer.parameters()], wanted, rtol=1e-5, atol=1e-4)
            assert len(products) == count


def test_a_patch_entered_again_keeps_its_graphs(products):
    layer, patch = conv.GCNConv(F, F), patch_pyg()
    for _ in range(2):
        with patch:
            layer(X, INDEX)
    with patch_pyg():
        layer(X, INDEX)
    assert products[0].rows is products[1].rows is not products[2].rows


def test_edges_changed_in_place():
    index = INDEX.clone()
    layers = [conv.SAGEConv(F, 4), conv.GCNConv(F, 4), conv.GATConv(F, 4)]
    with patch_pyg():
        for layer in layers:
            layer(X, index)
        index[0] = index[0].flip(0)
        found = [layer(X, index) for layer in layers]
    same(found, [layer(X, index) for layer in layers])


@pytest.mark.slow
def test_indices_of_the_same_size():
    layer = conv.SAGEConv(F, 4)
    indices = [torch.randint(0, N, (2, E)) for _ in range(40)]
    expected = [layer(X, index) for index in indices]
    with patch_pyg():
        for _ in range(2):
            same([layer(X, index.clone()) for index in indices], expected)


class FusedLayer(conv.SAGEConv):
    """PyG writes the loop over edges for a class as its first layer needs it, here one that takes matrices."""


def test_other_kinds_of_edges():
    layer = FusedLayer(F, 4)
    order = torch.argsort(INDEX[1])
    sorted_ = EdgeIndex(INDEX[:, order], sparse_size=(N, N), sort_order="col")
    matrix = torch.sparse_coo_tensor(INDEX.flip(0), torch.ones(E), (N, N)).to_sparse_csr()
    for edges in (sorted_, matrix):
        expected = layer(X, edges)
        with patch_pyg():
            same([layer(X, edges)], [expected])


def test_contexts_nest_and_end():
    before = conv.MessagePassing._index_select
    with patch_pyg():
        inside = conv.MessagePassing._index_select
        with pytest.raises(ZeroDivisionError), patch_pyg():
            1 / 0
        assert conv.MessagePassing._index_select is inside
    assert conv.MessagePassing._index_select is before
    assert inside is not before


def test_a_pass_ends_outside():
    layer = conv.SAGEConv(F, 4, aggr="max")
    expected = passes(layer, INDEX)
    layer.zero_grad()
    with patch_pyg():
        y = layer(X, INDEX)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    same([p.grad for p in layer.parameters()], expected[2:])


def test_modes_without_gradients(products):
    layer = conv.GCNConv(F, 4)
    expected = layer(X, INDEX)
    for mode in (torch.no_grad, torch.inference_mode):
        with patch_pyg(), mode():
            same([layer(X, INDEX)], [expected])
    assert len(products) == 2


def test_hooks_and_explanations_see_messages():
    layer, seen = conv.GCNConv(F, 4), []
    layer.register_message_forward_hook(lambda _layer, _given, messages: seen.append(messages * 1))
    expected = layer(X, INDEX)
    with patch_pyg():
        same([layer(X, INDEX)], [expected])
    same(seen[1:], seen[:1])


def test_edges_out_of_range():
    with patch_pyg(), pytest.raises(StructureError, match=r"source 25, expected one of \[0, 20\)"):
        conv.SAGEConv(F, 4)(X, torch.tensor([[25], [1]]))


def test_relations_refuse_targets_that_are_none():
    layer, index = conv.RGCNConv(F, 4, 3), INDEX.clone()
    index[1, 0] = N
    with patch_pyg(), pytest.raises((RuntimeError, IndexError, ValueError)):
        layer(X, index, TYPES)


@pytest.mark.parametrize("change", ["types", "edges", "both"])
def test_relations_of_equal_content_are_found(change, monkeypatch):
    structures = []
    build = pyg.Pairs.of.__func__
    monkeypatch.setattr(pyg.Pairs, "of", classmethod(lambda kind, *args: structures.append(args) or build(kind, *args)))
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 50, (2, 300), generator=generator)
    kinds = torch.randint(0, 3, (300,), generator=generator)
    x, layer = torch.randn(50, 4, generator=generator), conv.RGCNConv(4, 5, 3)
    with sparsetir.torch.patch_pyg():
        first = layer(x, index, kinds)
        for _ in range(3):
            equal = (index if change == "types" else index.clone(), kinds if change == "edges" else kinds.clone())
            assert torch.equal(layer(x, *equal), first)
        assert len(structures) == 1
        other = kinds.clone()
        other[0], other[64] = (other[0] + 1) % 3, (other[64] + 2) % 3
        changed = layer(x, index, other)
        kinds[:3] = (kinds[:3] + 1) % 3
        mutated = layer(x, index, kinds)
    assert torch.allclose(changed, layer(x, index, other), atol=1e-5)
    assert torch.allclose(mutated, layer(x, index, kinds), atol=1e-5)


def test_kept_contents_are_compared_bit_by_bit():
    contents = graph_caches.Contents()
    index = torch.arange(256).view(2, 128)
    exchanged = index.clone()
    exchanged[0, 0], exchanged[0, 64] = 64, 0  # the same sums in each lane
    zeros = torch.zeros(3)
    for count, tensor in enumerate([index, exchanged, zeros, -zeros, zeros.int(), zeros.half(), zeros.view(1, 3)]):
        key = contents.key([tensor], ())
        assert contents.get(key) is None
        contents.put(key, count)
        tensor_again = tensor.clone()
        assert contents.get(contents.key([tensor_again], ())) == count
    assert contents.key([index.float().to_sparse()], ()) is None


HISTORIES = {
    "new": lambda step, index: torch.randint(0, N, index.shape, generator=torch.Generator().manual_seed(step)),
    "same": lambda step, index: index,
    "equal": lambda step, index: index.clone(),
    "alternating": lambda step, index: index.flip(0) if step % 2 else index,
    "mutated": lambda step, index: index.copy_(index.roll(1, 1).flip(0)),
}
SMALL = {
    "sage": lambda: conv.SAGEConv(F, 4),
    "gin": lambda: conv.GINConv(network()),
    "gcn": lambda: conv.GCNConv(F, 4),
    "gat": lambda: conv.GATConv(F, 4, heads=2),
    "gatv2": lambda: conv.GATv2Conv(F, 4),
    "transformer": lambda: conv.TransformerConv(F, 4),
    "rgcn": lambda: conv.RGCNConv(F, 4, 3),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", SMALL)
def test_structures_of_small_graphs_are_built_for_edges_that_come_again(name, history, structures, monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 6)
    layer, index, patch = SMALL[name](), INDEX.clone(), patch_pyg()
    for step in range(24):
        index = HISTORIES[history](step, index)
        others = (TYPES,) if name == "rgcn" else ()
        expected = passes(layer, index, *others)
        with patch:
            same(passes(layer, index, *others), expected)
    if history == "new":
        assert not structures
    elif history != "mutated":
        assert 0 < len(structures) <= 4


@pytest.mark.parametrize(("edges", "features"), [(63_000, F), (2_000, 500)])
@pytest.mark.parametrize("kind", ["sage", "gin", "gcn"])
def test_much_work_has_a_structure_at_once(kind, edges, features, structures, monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 6)
    make = {"sage": conv.SAGEConv, "gin": lambda i, o: conv.GINConv(torch.nn.Linear(i, o)), "gcn": conv.GCNConv}[kind]
    outputs = 4 if kind != "gcn" else features  # the sums of GCNConv are those of its outputs
    wide, narrow = make(features, outputs), make(outputs, 4)
    index, x = torch.randint(0, N, (2, edges)), torch.randn(N, features)
    for step in range(2):
        edge_index = (index + step) % N
        expected = [passes(wide, edge_index, x=x), passes(narrow, edge_index, x=x[:, :outputs])]
        with patch_pyg():
            found = [passes(wide, edge_index, x=x), passes(narrow, edge_index, x=x[:, :outputs])]
        for one, other in zip(found, expected, strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
        assert len(structures) == step + 1  # the narrow layer alone would have none


def test_a_wide_layer_after_a_narrow_one_has_a_structure(structures, monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 6)
    index = torch.randint(0, N, (2, 4_000))
    with patch_pyg():
        passes(conv.SAGEConv(F, 4), index)
        assert not structures
        passes(conv.SAGEConv(600, 4), index, x=torch.randn(N, 600))
        assert len(structures) == 1


@pytest.mark.parametrize("name", SMALL)
def test_new_edges_are_not_read_in_full(name, monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 9)  # three selections by each of three layers
    read: list[Any] = []
    monkeypatch.setattr(graph_caches, "checksum", lambda whole: read.append(whole) or checksum(whole))
    layers, others = [SMALL[name]() for _ in range(3)], (TYPES,) if name == "rgcn" else ()
    with patch_pyg():
        for step in range(8):
            index = HISTORIES["new"](step, INDEX)
            for layer in layers:
                passes(layer, index, *others)
    assert not read


def test_evolving_edges_are_read_once_each(monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 6)
    read: list[Any] = []
    monkeypatch.setattr(graph_caches, "checksum", lambda whole: read.append(whole) or checksum(whole))
    graphs, index = graph_caches.GraphCache(), torch.zeros(2, 100, dtype=torch.int64)
    for step in range(12):
        index[0, 1] = step  # not a sampled column
        assert not any(graphs.is_worth(index[row]) for row in (0, 1, 0))
    assert len(read) == 11


def test_counts_of_uses_are_bounded(monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 6)
    monkeypatch.setattr(graph_caches, "MAX_COUNTED", 5)
    graphs = graph_caches.GraphCache()
    for step in range(20):
        assert not graphs.is_worth(torch.full((2, 3), step))
    assert len(graphs.uses) == 5
    assert not graphs.counted
    index = torch.zeros(2, 3, dtype=torch.int64)
    assert [graphs.is_worth(index.clone()) for _ in range(8)] == [False] * 6 + [True] * 2
    index += 1
    assert not graphs.is_worth(index)
