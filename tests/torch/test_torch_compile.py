# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` and `torch.export` of models with graphs and sparse layers: values and gradients of eager calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sparsetir.errors import StructureError

torch = pytest.importorskip("torch")
from sparsetir.torch import Graph, SparseLinear  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
M, N = 4, 5
INDEX = torch.tensor([[0, 2, 1, 1, 3, 0, 0, 4], [1, 1, 0, 2, 2, 2, 2, 0]])  # one edge twice, a row without any
EDGES = INDEX.shape[1]
WHOLE = {"fullgraph": True}
COMPILERS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Programs of one test are not those of another."""
    yield
    torch._dynamo.reset()


def real(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def passes(call: Callable[..., Any], inputs: list[Any], parameters: Any = ()) -> list[Any]:
    """What a function returns, and the gradients of what goes into it."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    found = call(*inputs)
    results = list(found) if isinstance(found, tuple) else [found]
    total = sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in results)
    return [*(y.detach() for y in results), *torch.autograd.grad(total, [*inputs, *parameters])]


def same(found: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def everything(graph: Graph) -> Callable[..., Any]:
    """All operators of a graph in one function."""

    def call(x: Any, xs: Any, w: Any, ws: Any, q: Any, k: Any, v: Any, qs: Any) -> Any:
        products = [graph.spmm(x.sin()), graph.spmm(xs, ws), graph.spmm(x, w, "mean"), graph.spmm(x[:, 0])]
        extremes = [graph.spmm(x, w, reduce="max"), graph.spmm(xs, ws, reduce="min")]
        scores = [graph.sddmm(q, k).relu(), graph.edge_sum(q, k), graph.softmax(ws * 2)]
        products += [graph.spmm(x, w, "mean", bias=x[0], activation="relu"), graph.conv(x, v.t()[:2, :3])]
        mixed = [graph.attention(q, k, v, scale=0.3), graph.attention(qs, xs, xs)]
        drops = {"dropout": 0.5, "seed": torch.tensor([3])}
        mixed += [
            graph.additive_attention(q[:, 0], k[:, 0], v, slope=0.3),
            graph.additive_attention(qs[..., 0], xs[..., 1], xs),
            graph.dynamic_attention(q, k, k[0], v, slope=0.3),
            graph.dynamic_attention(qs, xs, xs[0], xs, ws[..., None].expand(-1, -1, 3)),
            graph.attention(q, k, v, **drops) + graph.additive_attention(q[:, 0], k[:, 0], v, edges=w, **drops),
            graph.dynamic_attention(q, k, k[0], v, **drops),
        ]
        return (*products, *extremes, *scores, *mixed, graph.linear(w, v.t()))

    return call


def operands(count: int, dtype: Any = torch.float32) -> list[Any]:
    shapes = [(N, 3), (N, 2, 3), (count,), (count, 2), (M, 3), (N, 3), (N, 7), (M, 2, 3)]
    return [real(*shape, dtype=dtype) + 0.1 for shape in shapes]


GRAPHS = {
    "unsorted": lambda: Graph(INDEX, (N, M)),
    "sorted": lambda: Graph(Graph(INDEX, (N, M)).edge_index, (N, M)),
    "no edges": lambda: Graph(INDEX[:, :0], (N, M)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend"), zip(GRAPHS, [*COMPILERS, *COMPILERS], strict=False))
def test_every_operator_without_a_break(kind, backend):
    graph = GRAPHS[kind]()
    call, inputs = everything(graph), operands(graph.num_edges)
    same(passes(torch.compile(call, backend=backend, **WHOLE), inputs), passes(call, inputs))
    with torch.no_grad():
        same(torch.compile(call, backend=backend, **WHOLE)(*inputs), call(*inputs))


def test_products_by_bfloat16_numbers():
    """Programs and their gradients have the kernels of the calls."""
    graph, options = GRAPHS["unsorted"](), {"precision": "bf16x3"}

    def call(x: Any, w: Any) -> Any:
        return graph.spmm(x, w, bias=x[0], activation="relu", **options), graph.linear(w, x.t(), **options)

    inputs = [real(N, 3).float(), real(graph.num_edges).float()]
    same(passes(torch.compile(call, backend="aot_eager", **WHOLE), inputs), passes(call, inputs), 1e-7)
    assert not torch.equal(call(*inputs)[0], graph.spmm(*inputs, bias=inputs[0][0], activation="relu"))


def test_the_weight_of_a_graph():
    matrix = torch.tensor([[0, 2.0, 0], [3, 0, 0.5]])
    graph, x = Graph(matrix.to_sparse_csr()), real(3, 2)
    for made, expected in ((graph, matrix @ x), (graph.weighted(None), (matrix != 0).float() @ x)):
        same([torch.compile(made.spmm, backend="eager", **WHOLE)(x)], [expected])


class Network(torch.nn.Module):
    """Two sparse layers, with a product in between."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.first, self.second = SparseLinear(3, 8, density=0.5), SparseLinear(8, 2, density=0.5, bias=False)
        self.graph, self.drop = graph, torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.second(self.drop(self.graph.spmm(torch.relu(self.first(x)))))


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILERS)
def test_layers_train_and_change_their_places(backend):
    torch.manual_seed(0)
    model = Network(Graph(INDEX, N)).eval()
    compiled, x = torch.compile(model, backend=backend, **WHOLE), real(N, 3)
    same(passes(compiled, [x], list(model.parameters())), passes(model, [x], list(model.parameters())))
    for share in (0.2, 1.0):
        model.first.drop_and_grow(0.5)
        model.second.regrow(torch.rand(2, 8) <= share)
        same(passes(compiled, [x], list(model.parameters())), passes(model, [x], list(model.parameters())))
    model.train()
    torch.manual_seed(1)
    found = compiled(x)
    torch.manual_seed(1)
    same([found], [model(x)])


@pytest.mark.slow
def test_another_graph_of_another_size():
    call = torch.compile(lambda graph, x: graph.spmm(x).relu(), backend="aot_eager", **WHOLE)
    for size in (N, 7, 9, 12):
        index = torch.randint(0, size, (2, 3 * size))
        graph, x = Graph(index, size), real(size, 3)
        same(passes(lambda x, g=graph: call(g, x), [x]), passes(lambda x, g=graph: g.spmm(x).relu(), [x]))
    two = Graph(INDEX, N), Graph(INDEX.flip(0), N)
    for graph in (*two, *two):
        same([call(graph, real(N, 3))], [graph.spmm(real(N, 3)).relu()])


@pytest.mark.slow
def test_a_structure_changed_in_place():
    index = INDEX.clone()
    graph, x = Graph(index, N), real(N, 3)
    for backend in COMPILERS:
        call = torch.compile(graph.spmm, backend=backend)
        call(x)
        index[0, 0] = 1
        with pytest.raises(StructureError, match="were changed in place: make a new Graph"):
            call(x)
        index, x = INDEX.clone(), real(N, 3)
        graph = Graph(index, N)


@pytest.mark.slow
def test_threads():
    graph = Graph(INDEX, N)
    call = torch.compile(lambda x: graph.spmm(x, reduce="mean").square(), backend="aot_eager", **WHOLE)
    inputs = [real(N, 3) + n for n in range(8)]
    expected = [passes(lambda x: graph.spmm(x, reduce="mean").square(), [x]) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for found, wanted in zip(pool.map(lambda x: passes(call, [x]), inputs), expected, strict=True):
            same(found, wanted)


def test_an_exported_model():
    graph = Graph(INDEX, N)
    model = Network(graph).eval()
    x = real(N, 3)
    exported = torch.export.export(model, (x,))
    assert (
        "sparsetir.edges_kernel" in exported.graph_module.code or "sparsetir.along_rows" in exported.graph_module.code
    )
    same([exported.module()(x)], [model(x)])


def test_wrong_operands_are_named():
    graph = Graph(INDEX, (N, M))
    with pytest.raises(Exception, match=r"the graph has 5 columns \(sources\), and x is \[3, 2\] of float32"):
        torch.compile(graph.spmm, backend="eager", **WHOLE)(real(3, 2))
