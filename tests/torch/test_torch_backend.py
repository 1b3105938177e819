# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="sparsetir")``: what it takes and leaves, values and gradients of eager calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sparsetir.errors import StructureError

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import conv
    from torch_geometric.utils import softmax

from sparsetir.codegen import cache  # noqa: E402
from sparsetir.torch import Graph, SparseLinear, graph_caches, patch_pyg, tracing  # noqa: E402
from sparsetir.torch.fx_patterns import Messages  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N, E, F = 20, 90, 6
torch.manual_seed(0)
INDEX, X, TYPES = torch.randint(0, N - 2, (2, E)), torch.randn(N, F), torch.randint(0, 3, (E,))
I, J = INDEX
WEIGHT = torch.rand(E)


@pytest.fixture(autouse=True)
def structures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the structures of small graphs when they are first used, as those of large ones are."""
    monkeypatch.setattr(graph_caches, "MIN_USES", 0)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of graphs that programs call."""
    found: list[str] = []
    replace = Messages.replace
    monkeypatch.setattr(Messages, "replace", lambda self: found.extend(replace(self)))
    return found


def passes(call: Callable[..., Any], inputs: Any, parameters: Any = ()) -> list[Any]:
    """What a function returns, and the gradients of what goes into it."""
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = call(*inputs)
    wanted = [x for x in (*inputs, *parameters) if x.requires_grad]
    total = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return [y.detach(), *torch.autograd.grad(total, wanted, allow_unused=True)]


def same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def compiled(call: Any, dense: str = "eager", **options: Any) -> Any:
    return torch.compile(call, backend="sparsetir", options={"dense": dense}, **options)


# ------------------------------------------------------------------ layers


class Weights(torch.nn.Module):
    """A layer whose weights of edges are needed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv.GATConv(F, 4, heads=2, add_self_loops=False)

    def forward(self, x: Any, edge_index: Any) -> Any:
        y, (_, weights) = self.layer(x, edge_index, return_attention_weights=True)
        return torch.cat([y.flatten(), weights.flatten()])


class Scaled(conv.MessagePassing):
    """Dot products times a number that is not the usual one."""

    def __init__(self) -> None:
        super().__init__(node_dim=0)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=x.view(N, 2, -1)).flatten(1)

    def message(self, x_i: Any, x_j: Any, index: Any, size_i: Any) -> Any:
        return softmax(self.scores(x_i, x_j), index, num_nodes=size_i)[..., None] * x_j

    def scores(self, x_i: Any, x_j: Any) -> Any:
        return 0.3 * (x_i * x_j).sum(dim=[-1])


class Needed(Scaled):
    """Dot products that something else needs."""

    def forward(self, x: Any, edge_index: Any) -> Any:
        return super().forward(x, edge_index) + self.kept.sum()

    def scores(self, x_i: Any, x_j: Any) -> Any:
        self.kept = (x_i * x_j).sum(-1)
        return self.kept / 3


LAYERS: dict[str, tuple[Any, tuple[Any, ...], set[str]]] = {
    "gcn": (lambda: conv.GCNConv(F, 4), (INDEX,), {"spmm"}),
    "gcn, weighted": (lambda: conv.GCNConv(F, 4, normalize=False), (INDEX, WEIGHT), {"spmm"}),
    "sage": (lambda: conv.SAGEConv(F, 4), (INDEX,), {"spmm"}),
    "sage, max": (lambda: conv.SAGEConv(F, 4, aggr="max"), (INDEX,), {"spmm"}),
    "gat": (lambda: conv.GATConv(F, 4, heads=2), (INDEX,), {"additive_attention"}),
    "gat, 1 head": (lambda: conv.GATConv(F, 4, negative_slope=0.5), (INDEX,), {"additive_attention"}),
    "gat, no loops": (
        lambda: conv.GATConv(F, 4, heads=2, add_self_loops=False, concat=False, residual=True, dropout=0.5),
        (INDEX,),
        {"additive_attention"},
    ),
    "gat, edges": (
        lambda: conv.GATConv(F, 4, heads=2, edge_dim=1, add_self_loops=False),
        (INDEX, WEIGHT[:, None]),
        {"additive_attention"},
    ),
    "gat, edges, loops": (
        lambda: conv.GATConv(F, 4, heads=2, edge_dim=1),
        (INDEX, WEIGHT[:, None]),
        {"additive_attention", "spmm"},  # means of features are those of loops
    ),
    "gat, edges, loops of sums": (
        lambda: conv.GATConv(F, 4, edge_dim=1, fill_value="add", concat=False),
        (INDEX, WEIGHT[:, None]),
        {"additive_attention", "spmm"},
    ),
    "gat, weights": (lambda: Weights(), (INDEX,), {"spmm", "softmax", "edge_sum"}),
    "gin": (lambda: conv.GINConv(torch.nn.Linear(F, 4)), (INDEX,), {"spmm"}),
    "rgcn": (lambda: conv.RGCNConv(F, 4, 3), (INDEX, TYPES), {"spmm"}),
    "gatv2": (lambda: conv.GATv2Conv(F, 4, heads=2), (INDEX,), {"dynamic_attention"}),
    "gatv2, edges": (
        lambda: conv.GATv2Conv(F, 4, edge_dim=1, add_self_loops=False, negative_slope=1.5),
        (INDEX, WEIGHT[:, None]),
        {"dynamic_attention"},
    ),
    "transformer": (lambda: conv.TransformerConv(F, 4, heads=2), (INDEX,), {"attention"}),
    "scaled": (lambda: Scaled(), (INDEX,), {"attention"}),
    "needed": (lambda: Needed(), (INDEX,), {"spmm", "softmax", "sddmm"}),
    "edge": (lambda: conv.EdgeConv(torch.nn.Linear(2 * F, 4)), (INDEX,), {"spmm"}),
    "no edges": (lambda: conv.SAGEConv(F, 4), (INDEX[:, :0],), {"spmm"}),
}


@pytest.mark.slow
def test_weights_that_are_dropped(taken):
    layer = conv.GATConv(F, 4, heads=2, dropout=0.5, add_self_loops=False).train()
    call, found = compiled(layer), []
    for run in (call, call, patched(layer)):
        torch.manual_seed(2)
        found.append(passes(run, [X, INDEX], list(layer.parameters())))
    assert set(taken) == {"additive_attention"}
    same(found[0], found[1])
    same(found[0], found[2])
    assert not torch.allclose(call(X, INDEX), found[0][0])


def patched(layer: Any) -> Any:
    """A layer inside `patch_pyg`."""

    def call(*given: Any) -> Any:
        with patch_pyg():
            return layer(*given)

    return call


@pytest.mark.slow
def test_a_bias_and_relu_are_of_the_product(monkeypatch):
    layer, seen, spmm = conv.GCNConv(F, 4, add_self_loops=False), [], Graph.spmm
    record = lambda self, x, weight=None, **how: seen.append({*how}) or spmm(self, x, weight, **how)  # noqa: E731
    monkeypatch.setattr(Graph, "spmm", record)
    kept: list[Any] = []

    def twice(x: Any) -> Any:  # something else needs the sums
        kept[:] = [layer(x, INDEX)]
        return kept[0].relu() + kept[0]

    models = {
        "relu": lambda x: layer(x, INDEX).relu(),
        "in place": lambda x: torch.relu_(layer(x, INDEX)),
        "functional": lambda x: torch.nn.functional.relu(layer(x, INDEX)),
        "twice": twice,
        "other": lambda x: layer(x, INDEX).sigmoid(),
    }
    for name, model in models.items():
        parameters = list(layer.parameters())
        expected = passes(model, [X], parameters)
        seen.clear()
        same(passes(compiled(model), [X], parameters), expected)
        assert {"bias"} <= seen[-1]
        assert ("activation" in seen[-1]) == (name in ("relu", "in place", "functional"))


@pytest.mark.slow
@pytest.mark.shared(2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_what_they_were(taken, name):
    make, args, methods = LAYERS[name]
    layer = make().eval()
    call = compiled(layer)
    expected = passes(layer, [X, *args], list(layer.parameters()))
    same(passes(call, [X, *args], list(layer.parameters())), expected)
    assert set(taken) == methods
    with torch.no_grad():
        same([call(X, *args)], expected[:1])


@pytest.mark.slow
def test_loops_in_one_program(taken):
    layer = conv.GCNConv(F, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(layer, fullgraph=True)
        for index in (INDEX, torch.randint(0, N, (2, E))):
            same(
                passes(call, [X, index], list(layer.parameters())), passes(layer, [X, index], list(layer.parameters()))
            )
    assert taken == ["spmm", "spmm"]


class Network(torch.nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.second, self.drop = kind(F, 8), kind(8, 3), torch.nn.Dropout(0.3)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.second(self.drop(self.first(x, edge_index).relu()), edge_index).log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dense"), [(conv.GCNConv, "eager"), (conv.SAGEConv, "aot_eager"), (conv.GATConv, "eager")]
)
def test_training(kind, dense):
    torch.manual_seed(1)
    model = Network(kind)
    other, y = copy.deepcopy(model), torch.randint(0, 3, (N,))

    def losses(model: Any, call: Any) -> list[float]:
        torch.manual_seed(2)
        optimizer, found = torch.optim.Adam(model.parameters(), 0.05), []
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.nll_loss(call(X, INDEX), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    found, expected = losses(other, compiled(other, dense)), losses(model, model)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found[-1] < found[0]
    same([compiled(other.eval(), dense)(X, INDEX)], [model.eval()(X, INDEX)])


# ------------------------------------------------------------------ programs

Y = torch.randn(N, 2, 3)
TAKEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "index_add": (lambda x, w: torch.zeros(N, F).index_add(0, I, w[:, None] * x[J]), (X, WEIGHT)),
    "index_add_ of a slice of 1": (lambda x: x.new_zeros((N, F)).index_add_(-2, I, torch.index_select(x, 0, J)), (X,)),
    "numbers of edges": (lambda w: torch.zeros(N).scatter_add_(0, I, w * 2).sqrt(), (WEIGHT,)),
    "messages": (lambda x: torch.zeros(N, F).index_add_(0, I, (x[I] - x[J]).exp()), (X,)),
    "minima": (
        lambda x: torch.zeros(N, F).scatter_reduce(0, I[:, None].expand(E, F), x[J], "amin", include_self=False),
        (X,),
    ),
    "means": (
        lambda x, w: torch.zeros_like(x).scatter_reduce_(
            0, I.unsqueeze(1).expand(-1, F), x[J] * w.view(-1, 1), reduce="mean", include_self=False
        ),
        (X, WEIGHT),
    ),
    "heads": (
        lambda y, w: y.new_zeros(N, 2, 3).scatter_add_(0, I.view(-1, 1, 1).expand(E, 2, 3), y[J] * w.unsqueeze(-1)),
        (Y, torch.rand(E, 2)),
    ),
    "heads, one weight": (lambda y, w: torch.zeros(N, 2, 3).index_add(0, I, w.view(-1, 1, 1) * y[J]), (Y, WEIGHT)),
    "vectors": (lambda x, w: torch.zeros(N).index_add(0, I, x[J] * w), (X[:, 0], WEIGHT)),
    "rows that are changed later": (lambda x: _rows_changed(x), (X,)),
    "zeros that are changed later": (lambda x: _changed_later(x), (X,)),
}


def _rows_changed(x: Any) -> Any:
    x = x * 1
    rows = x[J]
    x.add_(1)
    torch.nn.functional.relu(x, inplace=True)
    return torch.zeros(N, F).index_add_(0, I, rows) + x


def _changed_later(x: Any) -> Any:
    out = torch.zeros(N, F)
    out.index_add_(0, I, x[J])
    out.mul_(2)
    return out + x


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_programs(taken, name):
    call, inputs = TAKEN[name]
    same(passes(compiled(call, fullgraph=True), inputs), passes(call, inputs))
    assert set(taken) == {"spmm"}


def _changed_before(x: Any) -> Any:
    out = torch.zeros(N, F)
    out += 1
    return out.index_add_(0, I, x[J])


ROWS = I[:, None].expand(E, F)
LEFT: dict[str, tuple[Callable[..., Any], str]] = {
    "ones": (lambda x: torch.ones(N, F).index_add(0, I, x[J]), "index_add"),
    "changed before": (_changed_before, "index_add"),
    "with zeros": (lambda x: torch.zeros(N, F).scatter_reduce(0, ROWS, x[J], "amax"), "scatter_reduce"),
    "products": (
        lambda x: torch.zeros(N, F).scatter_reduce(0, ROWS, x[J], "prod", include_self=False),
        "scatter_reduce",
    ),
    "columns": (lambda x: torch.zeros(F, N).index_add(1, I, x[J].t()), "index_add"),
    "several times": (lambda x: torch.zeros(N, F).index_add(0, I, x[J], alpha=2), "index_add"),
    "elements": (lambda x: torch.zeros(N, F).scatter_add(0, torch.flip(ROWS.contiguous(), (0,)), x[J]), "scatter_add"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch_is_named_once(taken, name):
    call, operator = LEFT[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = compiled(call)
        same(passes(found, [X]), passes(call, [X]))
        with torch.no_grad():  # compiles it again
            found(X)
    assert taken == []
    ours = [str(w.message) for w in seen if "sparsetir" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].startswith(f"torch runs {operator} as before: the kernels of sparsetir are")


@pytest.mark.slow
def test_dense_models_are_left_alone(taken):
    model = torch.nn.Sequential(torch.nn.Linear(F, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        same(passes(compiled(model), [X], list(model.parameters())), passes(model, [X], list(model.parameters())))
    assert not [w for w in seen if "sparsetir" in str(w.message)]
    assert taken == []


# ------------------------------------------------------------------ calls


def sums(x: Any, index: Any) -> Any:
    return x.new_zeros(x.shape).index_add_(0, index[1], x[index[0]].relu()) + x.new_zeros(x.shape).index_add_(
        0, index[1], x[index[0]]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["eager", "aot_eager"])
def test_edges_of_any_number(taken, dense):
    call = compiled(sums, dense, dynamic=True)
    for size in (N, 7, 31):
        x, index = torch.randn(size, F), torch.randint(0, size, (2, 4 * size))
        same(passes(call, [x, index]), passes(sums, [x, index]))
    assert taken == ["spmm", "spmm"]


def _message_without_gradients(x, w, edges):
    with torch.no_grad():
        message = w[:, None] * x[edges[0]]
    return torch.zeros_like(x).index_add_(0, edges[1], message) * x


def _relu_without_gradients(x, w, edges):
    y = torch.zeros_like(x).index_add_(0, edges[1], w[:, None] * x[edges[0]])
    with torch.no_grad():
        y = torch.relu(y)
    return y * x


def _sum_without_gradients(x, w, edges):
    message = w[:, None] * x[edges[0]]
    with torch.no_grad():
        y = torch.zeros_like(x).index_add_(0, edges[1], message)
    return y * x + message.sum()


@pytest.mark.parametrize("dense", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [_message_without_gradients, _relu_without_gradients, _sum_without_gradients])
def test_gradients_are_switched_where_torch_switches_them(program, dense):
    torch.manual_seed(0)
    edges, results = torch.randint(0, 50, (2, 4000)), []
    torch._dynamo.reset()
    for function in (program, torch.compile(program, backend="sparsetir", options={"dense": dense})):
        for _ in range(2):
            x, w = torch.linspace(-1, 1, 50 * 64).reshape(50, 64).requires_grad_(), torch.ones(4000, requires_grad=True)
            function(x, w, edges).sum().backward()
        results.append((x.grad, torch.zeros(0) if w.grad is None else w.grad))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_edges_that_change():
    call, index = compiled(sums), INDEX.clone()
    for _ in range(3):
        same([call(X, index)], [sums(X, index)])
        index[0] = index[0].flip(0)
        same([call(X, index.int())], [sums(X, index)])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same([call(X, index)], [sums(X, index)])
    with pytest.raises(StructureError, match=r"target 25, expected one of \[0, 20\)"):
        call(X, torch.stack([index[0], index[1] + 25 - index[1].max()]))


INDICES = {
    "one column": lambda index: index[:, None],
    "by columns": lambda index: index.expand(F, F),
    "permuted": lambda index: index[:, None][torch.arange(F - 1, -1, -1)].expand(F, F),
}


@pytest.mark.parametrize("kind", INDICES)
def test_indices_that_are_not_repeated_along_rows(kind, taken):
    def scattered(x: Any, index: Any) -> Any:
        return x.new_zeros(N, F).scatter_add(0, INDICES[kind](index), x)

    x, index = torch.randn(F, F), torch.randint(0, N, (F,))
    torch.testing.assert_close(compiled(scattered)(x, index), scattered(x, index))
    assert not taken


@pytest.mark.slow
def test_threads_and_two_models():
    calls = [compiled(sums), compiled(lambda x, index: sums(x, index) * 2)]

    def work(seed: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        x, index = torch.randn(N, F, generator=generator), torch.randint(0, N, (2, E), generator=generator)
        expected = passes(lambda x, index: sums(x, index) * (1 + seed % 2), [x, index])
        return passes(calls[seed % 2], [x, index]), expected

    with ThreadPoolExecutor(4) as pool:
        for found, expected in pool.map(work, range(8)):
            same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["eager", "aot_eager"])
def test_graphs_and_sparse_layers(dense):
    graph, layer = Graph(INDEX, N), SparseLinear(F, 4, density=0.5)
    model = lambda x: graph.spmm(layer(x).relu(), reduce="mean")  # noqa: E731
    same(passes(compiled(model, dense), [X], [layer.values]), passes(model, [X], [layer.values]))


def test_other_options_are_refused():
    with pytest.raises(Exception, match=r'options are \{"dense": one of \'eager\', .*\}, got dense=\'tvm\''):
        compiled(sums, "tvm")(X, INDEX)
    with pytest.raises(Exception, match="has no modes, got mode='max-autotune'"):
        torch.compile(sums, backend="sparsetir", mode="max-autotune")(X, INDEX)
    assert "sparsetir" in torch.compiler.list_backends()


# ------------------------------------------------------------------ few edges


@pytest.fixture
def structures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are built, where none were before."""
    monkeypatch.setattr(tracing, "GRAPHS", graph_caches.GraphCache())
    built: list[Any] = []
    build = Graph.__init__
    monkeypatch.setattr(Graph, "__init__", lambda self, *a, **b: built.append(self) or build(self, *a, **b))
    return built


class Deep(torch.nn.Module):
    """Two layers and a readout of each half of the nodes."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([kind(F, F), kind(F, F)])

    def forward(self, x: Any, edge_index: Any, half: Any) -> Any:
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x.new_zeros(2, F).index_add(0, half, x)


KINDS = {
    "sage": conv.SAGEConv,
    "gcn": conv.GCNConv,
    "gat": conv.GATConv,
    "gin": lambda inputs, outputs: conv.GINConv(torch.nn.Linear(inputs, outputs)),
}
EDGES = {
    "new": lambda step, index: torch.randint(0, N, index.shape, generator=torch.Generator().manual_seed(step)),
    "same": lambda step, index: index,
    "equal": lambda step, index: index.clone(),
    "mutated": lambda step, index: index.copy_(index.roll(step, 1).flip(0)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["gradients", "inference"])
@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("kind", KINDS)
def test_structures_of_few_edges_are_built_when_they_come_again(kind, edges, mode, structures, monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 40)
    torch.manual_seed(0)
    model, index, half = Deep(KINDS[kind]), INDEX.clone(), (torch.arange(N) >= N // 2).long()
    call = compiled(model)
    parameters = list(model.parameters())
    for step in range(24 if edges == "same" else 60):
        index = EDGES[edges](step, index)
        if mode == "inference":
            with torch.inference_mode():
                same([call(X, index.clone(), half)], [model(X, index.clone(), half)])
            continue
        found = passes(lambda x, i=index: call(x, i, half), [X], parameters)
        same(found, passes(lambda x, i=index: model(x, i, half), [X], parameters))
    if edges == "new":
        assert not structures
    elif edges == "equal":
        assert 0 < len(structures) <= 4


def test_much_work_has_a_structure_at_once(structures, monkeypatch):
    monkeypatch.setattr(graph_caches, "MIN_USES", 40)
    call = compiled(sums)
    for step in range(2):
        x, index = torch.randn(N, 500), torch.randint(0, N, (2, 2000), generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(call(x, index), sums(x, index), rtol=1e-4, atol=1e-3)
        assert len(structures) == 2 * (step + 1)  # one has a column for each edge


def neighbours(x: Any, index: Any) -> Any:
    return x.new_zeros(x.shape).index_add_(0, index[1], x[index[0]])


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["eager", "aot_eager"])
def test_new_edges_compile_no_kernels(dense: str, structures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have symbolic sizes: new edges of another number build a structure, and run on the kernels there are."""
    monkeypatch.setattr(graph_caches, "MIN_USES", 0)
    compilations: list[Any] = []
    build = cache.Compiled.compile
    monkeypatch.setattr(cache.Compiled, "compile", lambda self: compilations.append(self) or build(self))
    call = compiled(neighbours, dense, dynamic=True)
    shapes = []
    for size in (20, 23, 29, 31):
        x, index = torch.randn(size, F), torch.randint(0, size, (2, 4 * size))
        same(passes(call, [x, index]), passes(neighbours, [x, index]))
        shapes.append((len(compilations), len(structures)))
        structures.clear()
    warm = shapes[1:]
    assert all(count == warm[0] for count in warm)
    assert warm[0][1] == 1
