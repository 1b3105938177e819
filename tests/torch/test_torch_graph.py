# SPDX-License-Identifier: Apache-2.0
"""Graphs for training with torch: values and gradients of every operator against dense ones, and what may go wrong."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError
from sparsetir.ir.sizes import LARGEST_INT32
from sparsetir.runtime import signature

torch = pytest.importorskip("torch")
from sparsetir.torch import Graph, programs, structure  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

M, N = 4, 5
INDEX = torch.tensor([[0, 2, 1, 1, 3, 0, 0, 4], [1, 1, 0, 2, 2, 2, 2, 0]])  # one edge twice, a row without any
SORTED = INDEX[:, np.lexsort((INDEX[0], INDEX[1]))].contiguous()
EDGES = INDEX.shape[1]


@pytest.fixture(scope="module", params=["unsorted", "sorted", "empty"])
def graph(request: pytest.FixtureRequest) -> Any:
    index = {"unsorted": INDEX, "sorted": SORTED, "empty": INDEX[:, :0]}[request.param]
    made = Graph(index, (N, M))
    return made, index


def real(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def wanting(*tensors: Any) -> tuple[Any, ...]:
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


def by_torch(index: Any, x: Any, weight: Any, reduce: str, rows: int) -> Any:
    """A product by torch's own scatter."""
    messages = x[index[0]]
    if weight is not None:
        messages = messages * weight.reshape(*weight.shape, *[1] * (messages.dim() - weight.dim()))
    places = index[1].reshape(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    out = torch.zeros(rows, *messages.shape[1:], dtype=x.dtype)
    return out.scatter_reduce(0, places, messages, name, include_self=False)


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ values and gradients

PRODUCTS = [
    ("sum", (3,), (EDGES,)),
    ("mean", (2, 3), (EDGES, 2)),
    ("max", (3,), (EDGES,)),
    ("min", (2, 3), (EDGES, 2)),
    ("max", (3,), None),
    ("mean", (), None),
    ("sum", (2,), (EDGES, 2)),
    ("sum", (2, 3), (EDGES,)),
]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("reduce", "inner", "weights"), PRODUCTS)
def test_products(graph, reduce, inner, weights):
    made, index = graph
    x, weight = real(N, *inner), None if weights is None else real(index.shape[1], *weights[1:])
    inputs = wanting(x) if weight is None else wanting(x, weight)
    found, expected = made.spmm(*inputs, reduce=reduce), by_torch(index, x, weight, reduce, M)
    close(found, expected)
    assert torch.autograd.gradcheck(lambda *a: made.spmm(*a, reduce=reduce), inputs)


@pytest.mark.scheduled
@pytest.mark.parametrize(("heads", "is_via", "is_once"), [(4, False, True), (4, True, False), (64, False, False)])
def test_a_few_heads_go_over_the_edges_of_a_row_once(heads, is_via, is_once):
    """Unless their weights are gathered, where more of these are on their way when one head goes after the other."""
    inner = (("H", heads), ("K", 8))
    text = programs.kernel("spmm", "float32", "int32", inner, is_via, "sum", True, "").script(stage=3)
    ragged = text.index("for j in range(indptr")
    assert (f"for h in T.unroll({heads})" in text[ragged:]) == is_once
    assert ("for i, h in T.grid(" in text[:ragged]) != is_once


@pytest.mark.slow
@pytest.mark.parametrize(("reduce", "inner"), [("sum", (3,)), ("mean", (2, 3)), ("max", (3,))])
def test_products_with_a_bias_and_an_activation(graph, reduce, inner):
    made, index = graph
    x, bias = wanting(real(N, *inner), torch.linspace(-1, 0.5, 3, dtype=torch.float64).expand(inner))
    for activation in (None, "relu"):
        expected = by_torch(index, x, None, reduce, M) + bias
        expected = expected if activation is None else expected.relu()
        assert activation is None or bool((expected == 0).any())
        call = lambda *a, how=activation: made.spmm(a[0], None, reduce, bias=a[1], activation=how)  # noqa: E731
        close(call(x, bias), expected)
        assert torch.autograd.gradcheck(call, (x, bias))
    alone = made.spmm(x.detach(), None, reduce, activation="relu")
    close(alone, by_torch(index, x.detach(), None, reduce, M).relu())


PRECISE = {"precision": "bf16x3"}


@pytest.mark.parametrize(
    ("reduce", "inner", "weights"), [("sum", (18,), ()), ("mean", (2, 9), ()), ("mean", (2, 9), (2,))]
)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_products_by_bfloat16_numbers(reduce, inner, weights, activation):
    """Each sum and each gradient is off by at most 3 * 2**-16 times the sum of magnitudes."""
    graph = Graph(INDEX, (N, M))
    x, w, bias = real(N, *inner), real(EDGES, *weights), real(*inner)
    y = graph.spmm(x, w, reduce, bias=bias)
    g = real(M, *inner) * (y > 0 if activation else 1)

    def computed(dtype: Any, magnitudes: Any = lambda t: t, **options: Any) -> tuple[Any, ...]:
        operands = wanting(*(magnitudes(t.to(dtype)) for t in (x, w)))
        b = magnitudes(bias.to(dtype))
        result = graph.spmm(*operands, reduce, bias=b, **options)
        return result, *torch.autograd.grad(result, operands, magnitudes(g.to(dtype)))

    exact, single = computed(torch.float64, activation=activation), computed(torch.float32, activation=activation)
    halves = computed(torch.float32, activation=activation, **PRECISE)
    for found, expected, total in zip(halves, exact, computed(torch.float64, torch.abs), strict=True):
        assert ((found - expected).abs() <= 3 * 2**-16 * total + 1e-6).all()
    assert not torch.equal(halves[0], single[0])
    assert not torch.equal(halves[1], single[1])
    assert not torch.equal(halves[2], single[2])


@pytest.mark.parametrize("inner", [(21,), (2, 9)])
def test_dot_products_along_edges_by_bfloat16_numbers(inner):
    graph, g = Graph(INDEX, (N, M)), real(EDGES, *inner[:-1])

    def computed(dtype: Any, magnitudes: Any = lambda t: t, **options: Any) -> tuple[Any, ...]:
        operands = wanting(*(magnitudes(real(n, *inner).to(dtype)) for n in (M, N)))
        result = graph.sddmm(*operands, **options)
        return result, *torch.autograd.grad(result, operands, magnitudes(g.to(dtype)))

    exact, total = computed(torch.float64), computed(torch.float64, torch.abs)
    halves, single = computed(torch.float32, **PRECISE), computed(torch.float32)
    for found, expected, most, plain in zip(halves, exact, total, single, strict=True):
        assert ((found - expected).abs() <= 3 * 2**-16 * most + 1e-6).all()
        assert not torch.equal(found, plain)


@pytest.mark.parametrize(("reduce", "outputs"), [("sum", 20), ("mean", 2)])
def test_a_convolution_by_bfloat16_numbers(reduce, outputs):
    """The sums along edges are off by at most 3 * 2**-16 times those of magnitudes."""
    graph, x, w = Graph(INDEX, (N, M)), real(N, 16), real(outputs, 16)

    def computed(dtype: Any, magnitudes: Any = lambda t: t, **options: Any) -> tuple[Any, ...]:
        weighted = graph.weighted(magnitudes(real(EDGES).to(dtype)))
        operands = wanting(*(magnitudes(t.to(dtype)) for t in (x, w)))
        result = weighted.conv(*operands, reduce=reduce, **options)
        constant = [weighted.conv(operands[0].detach(), operands[1], reduce=reduce, **options) for _ in range(2)]
        return result, *constant, *torch.autograd.grad(result.sum(), operands)

    exact, total = computed(torch.float64), computed(torch.float64, torch.abs)
    halves, single = computed(torch.float32, **PRECISE), computed(torch.float32)
    for found, expected, most in zip(halves, exact, total, strict=True):
        assert ((found - expected).abs() <= 3 * 2**-16 * most + 1e-5).all()
    assert not torch.equal(halves[0], single[0])


def test_sums_of_constant_features_are_kept_for_each_precision():
    graph, x, w = Graph(INDEX, (N, M)).weighted(real(EDGES).float()), real(N, 3).float(), real(2, 3).float()
    kept = [graph.conv(x, w) for _ in range(2)]
    assert not torch.equal(graph.conv(x, w, **PRECISE), kept[1])


def test_precisions_of_copies_and_heads_without_any():
    graph, x, w = Graph(INDEX, (N, M)), real(N, 3).float(), real(EDGES).float()
    y = graph.spmm(x, w, **PRECISE)
    assert torch.equal(pickle.loads(pickle.dumps(graph)).spmm(x, w, **PRECISE), y)
    assert torch.equal(copy.deepcopy(graph).spmm(x, w, **PRECISE), y)
    assert graph.spmm(x[:, None][:, :0], w[:, None][:, :0], **PRECISE).shape == (M, 0, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x, w: g.spmm(x, w, precision="bf16"), "expected None, or 'bf16x3' for float32, got 'bf16'"),
        (lambda g, x, w: g.spmm(x, w, precision=3), "expected None, or 'bf16x3' for float32, got 3"),
        (lambda g, x, w: g.spmm(x.double(), w.double(), **PRECISE), "got 'bf16x3' for float64"),
        (lambda g, x, w: g.spmm(x.int(), w.int(), **PRECISE), "got 'bf16x3' for int32"),
        (lambda g, x, w: g.spmm(x, w, "max", **PRECISE), "expected None but for sums and means of rows"),
        (lambda g, x, w: g.spmm(x, **PRECISE), "which weights multiply, got 'bf16x3'. Leave it out."),
        (lambda g, x, w: g.spmm(x[:, 0], w, **PRECISE), "expected None but for sums and means of rows"),
        (lambda g, x, w: g.spmm(x[:, :1], w[:, None], **PRECISE), "expected None but for sums and means of rows"),
        (lambda g, x, w: g.conv(x, x, **PRECISE), "expected None but for sums and means of rows"),
        (lambda g, x, w: g.conv(x, x, precision="high"), "expected None, or 'bf16x3' for float32, got 'high'"),
        (lambda g, x, w: g.sddmm(x, x, precision="high"), "expected None, or 'bf16x3' for float32, got 'high'"),
        (lambda g, x, w: g.linear(w, x.t(), precision="high"), "expected None, or 'bf16x3' for float32, got 'high'"),
    ],
)
def test_precisions_that_do_not_apply_are_refused(call, message):
    with pytest.raises(ArgumentError, match=f"precision: .*{message}"):
        call(Graph(INDEX, (N, M)), torch.ones(N, 3), torch.ones(EDGES))


def test_what_is_no_number_stays_none():
    made, x = Graph(INDEX, (N, M)), real(N, 3)
    x[2, 0] = torch.nan
    assert made.spmm(x, activation="relu").isnan().tolist() == made.spmm(x).isnan().tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("reduce", "outputs"), [("sum", 2), ("mean", 5), ("max", 2)])
def test_a_convolution(graph, reduce, outputs):
    made, index = graph
    x, weight, bias = wanting(real(N, 3), real(outputs, 3), real(outputs))
    expected = (by_torch(index, x, None, reduce, M) @ weight.t() + bias).relu()
    call = lambda *a: made.conv(*a, reduce=reduce, activation="relu")  # noqa: E731
    close(call(x, weight, bias), expected)
    assert torch.autograd.gradcheck(call, (x, weight, bias))
    constant = x.detach()
    for _ in range(3):
        found = call(constant, weight, bias)
        close(found, expected.detach())
        wanted = torch.autograd.grad(expected.sum(), (weight, bias), retain_graph=True)
        close(torch.autograd.grad(found.sum(), (weight, bias)), wanted)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_fingerprints_tell_changes(dtype):
    for shape in ((3,), (0, 5), (70, 64), (31, 7)):
        x = real(*shape).to(getattr(torch, dtype))
        before = structure.fingerprint(x)
        assert all(map(torch.equal, before, structure.fingerprint(x.t().contiguous().t() if x.dim() == 2 else x)))
        if x.numel():
            for other in (x.flip(0), x.flip(-1), torch.where(x == x.max(), x - 1e-3, x)):
                assert not all(map(torch.equal, before, structure.fingerprint(other)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_fingerprints_tell_crosswise_exchanges(dtype):
    x = torch.eye(64, dtype=getattr(torch, dtype))
    other = x.clone()
    other[[3, 40]] = x[[40, 3]]  # rows and columns have the same sums
    assert not all(map(torch.equal, structure.fingerprint(x), structure.fingerprint(other)))


def test_sums_of_constant_features_are_computed_once(monkeypatch):
    made, calls = Graph(sp.coo_array(([1.0, 2.0, 3.0], ([2, 0, 1], [0, 1, 2])), shape=(3, 3))), []
    run = structure.GraphRows.run
    monkeypatch.setattr(structure.GraphRows, "run", lambda self, *a, **b: calls.append(a) or run(self, *a, **b))
    x, (weight,) = real(3, 2), wanting(real(2, 2))

    def check(expected: int) -> None:
        calls.clear()
        close(made.conv(x, weight), made.weight.new_tensor([[0, 2, 0], [0, 0, 3], [1, 0, 0]]) * factor @ x @ weight.t())
        assert len(calls) == expected

    factor = 1
    for expected in (1, 1, 1, 0, 0):
        check(expected)
    made.conv(x.clone(), weight)  # of others in between
    check(0)
    x[0] += 1
    for expected in (1, 1, 1, 0):
        check(expected)
    with torch.no_grad():
        check(0)
        made.weight.mul_(2)
    factor = 2
    for expected in (1, 1, 1, 0):
        check(expected)
    x.numpy()[:] = x.numpy()[[2, 0, 1]]  # which torch does not see
    for expected in (1, 1, 0):
        check(expected)
    assert len(made.rows.kept.entries) == 1
    close(pickle.loads(pickle.dumps(made)).conv(x, weight), made.conv(x, weight))
    with torch.inference_mode():
        close(made.conv(x, weight), made.conv(x.clone(), weight))
    for size in range(9):
        made.conv(real(3, size), real(2, size))
    held = [real(3, size) for size in range(9)]
    for features in (*held, *held):
        made.conv(features, real(2, features.shape[1]))
    assert len(made.rows.kept.entries) == structure.MOST
    del held, features, x
    assert not made.rows.kept.entries


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(), (2,)])
def test_what_is_made_of_edges(graph, heads):
    made, index = graph
    q, k, v = wanting(real(M, *heads, 3), real(N, *heads, 3) + 1, real(N, *heads, 4))
    close(made.sddmm(q, k), (q[index[1]] * k[index[0]]).sum(-1))
    assert torch.autograd.gradcheck(made.sddmm, (q, k))
    a, b = wanting(real(M, *heads), real(N, *heads))
    close(made.edge_sum(a, b), a[index[1]] + b[index[0]])
    assert torch.autograd.gradcheck(made.edge_sum, (a, b))
    (scores,) = wanting(real(index.shape[1], *heads))
    close(made.softmax(scores), softmax(scores, index))
    assert torch.autograd.gradcheck(made.softmax, (scores,))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", [(), (2,)])
def test_attention(graph, heads):
    made, index = graph
    q, k, v = wanting(real(M, *heads, 3), real(N, *heads, 3) + 1, real(N, *heads, 4))
    shares = softmax((q[index[1]] * k[index[0]]).sum(-1) * 0.3, index)
    expected = torch.zeros(M, *heads, 4, dtype=q.dtype).index_add(0, index[1], shares[..., None] * v[index[0]])
    close(made.attention(q, k, v, scale=0.3), expected)
    close(made.attention(q.detach(), k.detach(), v.detach(), scale=0.3), expected.detach())
    assert torch.autograd.gradcheck(lambda *a: made.attention(*a, scale=0.3), (q, k, v))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "slope"), [((), 1.5), ((2,), 0.2)])
def test_additive_attention(graph, heads, slope):
    made, index = graph
    targets, sources, v = wanting(real(M, *heads), real(N, *heads), real(N, *heads, 4))
    scores = torch.nn.functional.leaky_relu(targets[index[1]] + sources[index[0]], slope)
    assert scores.numel() == 0 or bool((scores > 0).any()) == bool((scores < 0).any())  # both sides of the bend
    shares = softmax(scores, index)
    expected = torch.zeros(M, *heads, 4, dtype=v.dtype).index_add(0, index[1], shares[..., None] * v[index[0]])
    call = lambda *a: made.additive_attention(*a, slope=slope)  # noqa: E731
    close(call(targets, sources, v), expected)
    close(call(targets.detach(), sources.detach(), v.detach()), expected.detach())
    assert torch.autograd.gradcheck(call, (targets, sources, v))
    (only,) = torch.autograd.grad(call(targets, sources.detach(), v.detach()).sum(), targets)
    assert only.shape == targets.shape


@pytest.mark.parametrize("slope", [0.2, 1.5, -0.5])
@pytest.mark.parametrize("other", [float("nan"), float("inf"), -float("inf")])
def test_additive_attention_to_what_is_no_number(other, slope):
    index = torch.tensor([[0, 1, 2, 1, 2, 2], [0, 0, 0, 1, 1, 3]])  # a row without edges, one with that source alone
    targets, sources, v = real(4, 2), real(3, 2), real(3, 2, 4)
    sources[2, 1] = other
    scores = torch.nn.functional.leaky_relu(targets[index[1]] + sources[index[0]], slope)
    expected = torch.zeros(4, 2, 4, dtype=v.dtype)
    expected.index_add_(0, index[1], softmax(scores, index)[..., None] * v[index[0]])
    found = Graph(index, (3, 4)).additive_attention(targets, sources, v, slope)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", [(), (2,)])
def test_attention_drops_shares(graph, heads):
    """And adds numbers of edges, in attention as in GAT."""
    made, index = graph
    seed, rate, count = torch.tensor([7]), 0.4, index.shape[1]
    mask = made.dropout(torch.ones(count, *heads, dtype=torch.float64), rate, seed=seed)
    assert set(mask.flatten().tolist()) == (set() if not count else {0.0, 1 / (1 - rate)})
    q, k, v, weight = wanting(real(M, *heads, 3), real(N, *heads, 3), real(N, *heads, 4), real(*heads, 3))
    targets, sources, edges = wanting(real(M, *heads), real(N, *heads), real(count, *heads))
    bent = lambda t: torch.nn.functional.leaky_relu(t, 0.2)  # noqa: E731
    cases = [
        (made.attention, (q, k, v), lambda: (q[index[1]] * k[index[0]]).sum(-1) * 3**-0.5),
        (made.additive_attention, (targets, sources, v), lambda: bent(targets[index[1]] + sources[index[0]])),
        (
            lambda t, s, v, e, **options: made.additive_attention(t, s, v, edges=e, **options),
            (targets, sources, v, edges),
            lambda: bent(targets[index[1]] + sources[index[0]] + edges),
        ),
        (made.dynamic_attention, (q, k, weight, v), lambda: (bent(q[index[1]] + k[index[0]]) * weight).sum(-1)),
    ]
    for call, inputs, scores in cases:
        shares = softmax(scores(), index) * mask
        expected = torch.zeros(M, *heads, 4, dtype=v.dtype).index_add(0, index[1], shares[..., None] * v[index[0]])
        found, gradient = call(*inputs, dropout=rate, seed=seed), real(*expected.shape)
        close(found, expected)
        wanted = torch.autograd.grad(expected, inputs, gradient)
        close(torch.autograd.grad(found, inputs, gradient), wanted)
    call, inputs, _ = cases[2]
    assert torch.autograd.gradcheck(lambda *a: call(*a, dropout=rate, seed=seed), inputs)
    close(call(*(t.detach() for t in inputs), dropout=rate, seed=seed), call(*inputs, dropout=rate, seed=seed).detach())
    close(call(*inputs, dropout=rate, training=False), call(*inputs))
    (values,) = wanting(real(count, *heads))
    assert torch.autograd.gradcheck(lambda x: made.dropout(x, rate, seed=seed), values)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", [(), (2,)])
def test_attention_to_features_of_edges(graph, heads):
    made, index = graph
    inputs = q, k, v, e = wanting(*(real(n, *heads, 3) for n in (M, N, N, index.shape[1])))
    call = lambda q, k, v, e, **options: made.attention(q, k, v, 0.3, edges=e, **options)  # noqa: E731
    shares = softmax((q[index[1]] * (k[index[0]] + e)).sum(-1) * 0.3, index)
    for options in ({}, {"dropout": 0.5, "seed": torch.tensor([1])}):
        weight = shares * made.dropout(torch.ones_like(shares), **options) if options else shares
        expected = torch.zeros(M, *heads, 3, dtype=v.dtype).index_add(
            0, index[1], weight[..., None] * (v[index[0]] + e)
        )
        close(call(*inputs, **options), expected)
        assert torch.autograd.gradcheck(lambda *a, more=options: call(*a, **more), inputs)
    with pytest.raises(ArgumentError, match="expected edges and v with rows as those of q"):
        made.attention(q, k, v[..., :2], edges=e)


def test_what_dropout_drops():
    nodes, edges, heads, rate = 50, 20_000, 2, 0.3
    index = torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(0))
    made, ones = Graph(index, nodes), torch.ones(edges, heads)
    torch.manual_seed(3)
    first, second = made.dropout(ones, rate), made.dropout(ones, rate)
    torch.manual_seed(3)
    assert torch.equal(made.dropout(ones, rate), first)
    is_kept, other = first != 0, second != 0
    near = lambda found, expected: abs(found - expected) < 5 * (expected * (1 - expected) / edges) ** 0.5  # noqa: E731
    kept = 1 - rate
    for head in range(heads):
        assert near(is_kept[:, head].float().mean().item(), kept)
    both = (is_kept[:, 0] & is_kept[:, 1], is_kept[:, 0] & other[:, 0], is_kept[1:, 0] & is_kept[:-1, 0])
    for pair in both:  # of heads, calls and neighbours, which know nothing of each other
        assert near(pair.float().mean().item(), kept**2)
    assert first[is_kept].unique().tolist() == pytest.approx([1 / kept])
    assert not made.dropout(ones, 1.0).any()
    assert made.dropout(ones, rate, training=False) is ones
    again = Graph(made.edge_index, nodes)  # in the order of rows: places are those of rows
    order = np.lexsort((index[0], index[1]))
    assert torch.equal(
        again.dropout(ones, rate, seed=torch.tensor(5)), made.dropout(ones, rate, seed=torch.tensor(5))[order]
    )


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "slope"), [((), 1.5), ((2,), 0.2)])
def test_dynamic_attention(graph, heads, slope):
    made, index = graph
    sizes = [(M, *heads, 3), (N, *heads, 3), (*heads, 3), (N, *heads, 4), (index.shape[1], *heads, 3)]
    targets, sources, weight, v, edges = operands = wanting(*(real(*size) for size in sizes))
    for inputs in (operands[:4], operands):
        sums = targets[index[1]] + sources[index[0]] + (edges if len(inputs) == 5 else 0)
        scores = (torch.nn.functional.leaky_relu(sums, slope) * weight).sum(-1)
        shares = softmax(scores, index)
        expected = torch.zeros(M, *heads, 4, dtype=v.dtype).index_add(0, index[1], shares[..., None] * v[index[0]])
        call = lambda *a: made.dynamic_attention(*a, slope=slope)  # noqa: E731
        close(call(*inputs), expected)
        if len(inputs) == 4:
            close(call(*(t.detach() for t in inputs)), expected.detach())
        gradient = real(*expected.shape)
        for wanted in inputs:  # and nothing else
            alone = call(*(t if t is wanted else t.detach() for t in inputs))
            close(torch.autograd.grad(alone, wanted, gradient), torch.autograd.grad(expected, wanted, gradient, True))


@pytest.mark.slow
def test_attention_of_halves(graph):
    made, _ = graph
    q, k, v, w = real(M, 2, 3), real(N, 2, 3), real(N, 2, 4), real(2, 3)
    calls = [(made.attention, (q, k, v)), (made.additive_attention, (q[..., 0], k[..., 0], v))]
    for call, inputs in (*calls, (made.dynamic_attention, (q, k, w, v))):
        inputs = wanting(*(x.bfloat16().double() for x in inputs))
        narrow = wanting(*(x.bfloat16() for x in inputs))
        expected = torch.autograd.grad(call(*inputs).sum(), inputs)
        for found, right in zip(torch.autograd.grad(call(*narrow).sum(), narrow), expected, strict=True):
            close(found.double(), right, 0.05)


def softmax(scores: Any, index: Any) -> Any:
    power = scores.exp()
    total = torch.zeros(M, *scores.shape[1:], dtype=scores.dtype).index_add(0, index[1], power)
    return power / total[index[1]]


@pytest.mark.slow
def test_equal_maxima_share_a_gradient():
    made = Graph(torch.tensor([[0, 1, 2], [0, 0, 0]]), (3, 1))
    x = torch.tensor([[2.0], [2.0], [1.0]], requires_grad=True)
    made.spmm(x, reduce="max").backward(torch.ones(1, 1))
    assert x.grad.flatten().tolist() == [0.5, 0.5, 0]


def test_maxima_of_infinities():
    made = Graph(torch.tensor([[0, 0], [0, 1]]), (1, 3))
    x = torch.tensor([[-torch.inf, torch.inf, 1.0]])
    assert made.spmm(x, reduce="max").tolist() == [[-torch.inf, torch.inf, 1]] * 2 + [[0, 0, 0]]


def test_large_scores():
    made = Graph(torch.tensor([[0, 1], [0, 0]]), (2, 1))
    assert made.softmax(torch.tensor([1000.0, 1000.0])).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes(dtype):
    made, kind = Graph(INDEX, (N, M)), getattr(torch, dtype)
    x, weight = (t.to(kind).requires_grad_() for t in (real(N, 3), real(EDGES)))
    wide = wanting(x.double(), weight.double())
    expected = by_torch(INDEX, *wide, "sum", M)
    found = made.spmm(x, weight)
    assert found.dtype is kind
    found.sum().backward()
    expected.sum().backward()
    tolerance = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}[dtype]
    for one, other in ((found, expected), (x.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        close(one.double(), other, tolerance)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("SPARSETIR_EXAMPLES", "15")), deadline=None)
@given(st.data())
def test_drawn_graphs(data):
    m, n, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 30))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    index = torch.from_numpy(np.stack([rng.integers(0, n, count), rng.integers(0, m, count)]))
    x, weight = wanting(real(n, 3), real(count))
    made, expected = Graph(index, (n, m)), by_torch(index, x, weight, "sum", m)
    close(made.spmm(x, weight), expected)
    got = torch.autograd.grad(made.spmm(x, weight).square().sum(), (x, weight))
    for one, other in zip(got, torch.autograd.grad(expected.square().sum(), (x, weight)), strict=True):
        close(one, other)


def test_strided_operands():
    made, x = Graph(SORTED, (N, M)), real(3, N).t().requires_grad_()
    close(made.spmm(x), by_torch(SORTED, x, None, "sum", M))
    assert torch.autograd.gradcheck(lambda x: made.spmm(x).t(), (x,))


def test_no_gradient_is_computed_that_nobody_wants():
    made, x = Graph(SORTED, (N, M)), real(N, 3)
    (weight,) = wanting(real(EDGES))
    assert not made.spmm(x).requires_grad
    made.spmm(x, weight).sum().backward()
    assert weight.grad is not None
    assert "transposed" not in vars(made.rows)


# ------------------------------------------------------------------ what graphs are made of

DENSE = np.array([[0, 2, 0], [3, 0, 0.5]])


def made_from(kind: str) -> Any:
    tensor = torch.from_numpy(DENSE)
    return {
        "csr": lambda: sp.csr_array(DENSE),
        "csc": lambda: sp.csc_matrix(DENSE),
        "coo": lambda: sp.coo_array(DENSE),
        "torch csr": tensor.to_sparse_csr,
        "torch csc": tensor.to_sparse_csc,
        "torch coo": tensor.to_sparse,
        "dense": lambda: tensor,
        "array": lambda: DENSE,
    }[kind]()


KINDS = ["csr", "csc", "coo", "torch csr", "torch csc", "torch coo", "dense", "array"]


@pytest.mark.parametrize("kind", KINDS)
def test_matrices(kind):
    made, x = Graph(made_from(kind)), real(3, 2)
    assert made.shape == (2, 3)
    close(made.spmm(x), torch.from_numpy(DENSE) @ x)
    close(made.spmm(x, made.weight), torch.from_numpy(DENSE) @ x)
    close(made.weighted(None).spmm(x), torch.from_numpy(DENSE != 0).double() @ x)


def test_structure_of_integers_and_bools():
    assert Graph(sp.csr_array(DENSE != 0)).weight is None
    assert Graph(torch.from_numpy(DENSE != 0)).weight is None
    assert Graph(np.array([[0], [3]])).shape == (4, 4)


def test_symmetric_structures_share_their_arrays():
    symmetric = Graph(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    assert symmetric.is_symmetric
    assert symmetric.columns.indices is symmetric.rows.indices
    assert not Graph(INDEX, N).is_symmetric
    assert not Graph(torch.tensor([[0], [0]]), (1, 2)).is_symmetric
    weight, x = wanting(real(4), real(3, 2))
    assert torch.autograd.gradcheck(symmetric.spmm, (x, weight))


def test_edge_index_is_in_the_order_of_rows():
    made = Graph(INDEX, (N, M))
    assert made.edge_index.tolist() == SORTED.tolist()
    assert Graph(made.edge_index, (N, M)).edge_index.tolist() == SORTED.tolist()
    assert (made.num_edges, repr(made)) == (EDGES, "Graph(4 x 5, 8 edges)")


def test_copies_and_pickles_are_alike():
    made, x = Graph(torch.from_numpy(DENSE).to_sparse_csr()), real(3, 2)
    made.columns
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), copy.copy(made)):
        close(other.spmm(x), made.spmm(x))
        inputs = wanting(x)
        assert torch.autograd.gradcheck(other.spmm, inputs)
    other.weight
    assert copy.deepcopy(made).weight is not made.weight


@pytest.mark.slow
def test_threads():
    made = Graph(INDEX, (N, M))

    def work(seed: int) -> Any:
        x = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        for _ in range(20):
            found = torch.autograd.grad(made.spmm(x, reduce="mean").square().sum(), x)[0]
        return found, torch.autograd.grad(by_torch(INDEX, x, None, "mean", M).square().sum(), x)[0]

    with ThreadPoolExecutor(4) as pool:
        for found, expected in pool.map(work, range(8)):
            close(found, expected)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("kind", ["index", "csr", "coo"])
def test_structure_changed_in_place(kind):
    index = INDEX.clone()
    matrix = torch.from_numpy(DENSE)
    matrix = {"index": index, "csr": matrix.to_sparse_csr(), "coo": matrix.to_sparse()}[kind]
    made, x = Graph(matrix), real(5 if kind == "index" else 3, 2)
    made.spmm(x)
    {"index": lambda: index, "csr": matrix.col_indices, "coo": matrix._indices}[kind]()[..., 0] = 1
    with pytest.raises(StructureError, match="were changed in place: make a new Graph"):
        made.spmm(x)


def test_own_arrays_are_not_those_that_were_passed():
    matrix = sp.csr_array(DENSE)
    made, x = Graph(matrix), real(3, 2)
    before = made.spmm(x)
    matrix.indices[:], matrix.data[:] = 0, 7
    close(made.spmm(x), before)


TWICE = {
    "spmm": (lambda g, x, w: g.spmm(x, w), [(N, 3), (EDGES,)]),
    "mean of heads": (lambda g, x, w: g.spmm(x, w, "mean"), [(N, 2, 3), (EDGES, 2)]),
    "layer": (lambda g, x, w, b: g.conv(x, w, b, activation="relu"), [(N, 3), (2, 3), (2,)]),
    "sddmm": (lambda g, q, k: g.sddmm(q, k), [(M, 2, 3), (N, 2, 3)]),
    "edge_sum": (lambda g, t, s: g.edge_sum(t, s).square(), [(M, 2), (N, 2)]),
    "softmax": (lambda g, s: g.softmax(s), [(EDGES, 2)]),
    "dropout": (lambda g, s: g.dropout(s, seed=torch.tensor([3])).square(), [(EDGES,)]),
    "attention": (
        lambda g, q, k, v: g.attention(q, k, v, dropout=0.4, seed=torch.tensor([3])),
        [(M, 3), (N, 3), (N, 2)],
    ),
    "attention of heads": (lambda g, q, k, v: g.attention(q, k, v), [(M, 2, 3), (N, 2, 3), (N, 2, 2)]),
    "additive_attention": (
        lambda g, t, s, v, e: g.additive_attention(t, s, v, edges=e),
        [(M,), (N,), (N, 2), (EDGES,)],
    ),
    "linear": (lambda g, w, x: g.linear(w, x), [(EDGES,), (3, N)]),
    "maximum": (lambda g, x, w: g.spmm(x, w, "max").square(), [(N, 3), (EDGES,)]),
    "minimum of heads": (lambda g, x, w: g.spmm(x, w, "min").square(), [(N, 2, 3), (EDGES, 2)]),
    "maximum of vectors": (lambda g, x: g.spmm(x, reduce="max").square(), [(N, 3)]),
}


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients(name):
    call, shapes = TWICE[name]
    made, operands = Graph(INDEX, (N, M)), wanting(*(real(*shape) for shape in shapes))
    assert torch.autograd.gradgradcheck(lambda *tensors: call(made, *tensors), operands, atol=1e-6)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_gradients_of_extremes_are_the_same_with_create_graph(reduce, is_weighted):
    """Equal values share a gradient, rows without edges have none, and NaN is kept."""
    made = Graph(INDEX, (N, M))
    for values in (torch.ones(N, 3), torch.tensor([0.0, 1.0, float("nan"), -1.0, 1.0])[:, None].expand(N, 3)):
        x, weight = wanting(values.double().clone(), torch.ones(EDGES, dtype=torch.float64))
        sources = (x, weight) if is_weighted else (x,)
        y = made.spmm(x, weight if is_weighted else None, reduce)
        plain = torch.autograd.grad(y, sources, torch.ones_like(y), retain_graph=True)
        again = torch.autograd.grad(y, sources, torch.ones_like(y), create_graph=True)
        for one, other in zip(plain, again, strict=True):
            torch.testing.assert_close(one, other.detach(), equal_nan=True)


@pytest.mark.slow
def test_gradients_of_gradients_are_refused():
    made = Graph(INDEX, (N, M))
    (half,) = wanting(real(N, 3).half())
    (gradient,) = torch.autograd.grad(made.spmm(half.square(), reduce="max").sum(), half, create_graph=True)
    with pytest.raises(LoweringError, match="gradients of Extreme are kernels without gradients of their own"):
        gradient.sum().backward()
    (x,) = wanting(real(N, 3))
    q, k, v, e = wanting(*(real(rows, 2) for rows in (M, N, N, EDGES)))
    (gradient,) = torch.autograd.grad(made.attention(q, k, v, edges=e).sum(), q, create_graph=True)
    with pytest.raises(LoweringError, match="gradients of Attention are kernels without"):
        gradient.sum().backward()
    (gradient,) = torch.autograd.grad(made.spmm(x).sum(), x, create_graph=True)
    assert not gradient.requires_grad


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.spmm(real(3, 2)), ArgumentError, r"5 columns \(sources\), and x is \[3, 2\] of float64"),
        (lambda g: g.spmm(np.ones((5, 2))), ArgumentTypeError, "x is a torch tensor, got ndarray"),
        (lambda g: g.sddmm(real(4, 2).int(), real(5, 2).int()), ArgumentTypeError, "floats, got torch.int32: pass q"),
        (lambda g: g.spmm(real(5, 2).to_sparse()), ArgumentTypeError, "x is a dense tensor on the cpu, got one of"),
        (
            lambda g: g.spmm(real(5, 2), real(3)),
            ArgumentError,
            r"one value for each edge: expected \[8\] or \[8, heads",
        ),
        (lambda g: g.spmm(real(5, 2), real(8).float()), ArgumentTypeError, "must have one dtype; x is torch.float64"),
        (lambda g: g.spmm(real(5, 2), real(8, 3)), ArgumentError, r"3 heads: expected x of \[5, 3, features\]"),
        (lambda g: g.spmm(real(5, 2), reduce="mul"), ArgumentError, "reduce is one of .* got 'mul'"),
        (lambda g: g.sddmm(real(4, 2), real(5, 3)), ArgumentError, "q and k with the same after the first"),
        (
            lambda g: g.spmm(real(5, 2), bias=real(3)),
            ArgumentError,
            r"bias is \[3\] of float64, expected the shape and",
        ),
        (
            lambda g: g.spmm(real(5, 2), activation="gelu"),
            ArgumentError,
            "activation is None or \"relu\", got 'gelu'",
        ),
        (
            lambda g: g.conv(real(5, 2), real(3)),
            ArgumentError,
            r"weight of \[outputs, inputs\], got \[5, 2\] of float64",
        ),
        (lambda g: g.conv(real(5, 2), real(3, 2), activation=1), ArgumentError, "activation is None"),
        (lambda g: g.dropout(real(8), 1.5), ArgumentError, "dropout is a probability, from 0 to 1, got 1.5"),
        (lambda g: g.dropout(real(8), np.eye(2)), ArgumentError, "dropout is a probability, from 0 to 1, got"),
        (lambda g: g.attention(real(4, 2), real(5, 2), real(5, 2), "2"), ArgumentError, "scale is a finite number"),
        (lambda g: g.dropout(real(7)), ArgumentError, "values has one value for each edge"),
        (lambda g: g.dropout(real(8), seed=7), ArgumentError, "seed is a tensor of one int64, .* got int"),
        (
            lambda g: g.additive_attention(real(4), real(5), real(5, 1), edges=real(8, 2)),
            ArgumentError,
            r"edges are \[8, 2\] of float64, expected heads and dtype of targets, \[4\]",
        ),
        (lambda g: g.sddmm(real(5, 2), real(5, 2)), ArgumentError, r"4 rows \(targets\), and q is"),
        (lambda g: g.softmax(real(7)), ArgumentError, "scores has one value for each edge"),
        (lambda g: g.attention(real(4, 2), real(5, 2), real(5, 2, 1)), ArgumentError, "v is .* the heads of q"),
        (
            lambda g: g.additive_attention(real(4, 2), real(5, 2), real(5, 3, 1)),
            ArgumentError,
            r"v is \[5, 3, 1\] of float64, expected \[5, heads, out\] with the dtype and heads of \[4, 2\] of float64",
        ),
        (lambda g: g.additive_attention(real(4), real(5, 1), real(5, 1)), ArgumentError, "targets and sources with"),
        (
            lambda g: g.additive_attention(real(4), real(5), real(5, 1), real(1)),
            ArgumentError,
            "slope is a finite number",
        ),
        (
            lambda g: g.dynamic_attention(real(4, 2), real(5, 2), real(3), real(5, 2)),
            ArgumentError,
            r"weight is \[3\] of",
        ),
        (
            lambda g: g.dynamic_attention(real(4, 2), real(5, 2), real(2), real(5, 1, 2)),
            ArgumentError,
            "heads of targets",
        ),
        (
            lambda g: g.dynamic_attention(real(4, 2), real(5, 2), real(2), real(5, 2), real(8, 3)),
            ArgumentError,
            r"edges are \[8, 3\] of float64, expected rows as those of targets",
        ),
        (
            lambda g: g.dynamic_attention(real(4, 2), real(5, 2), real(2), real(5, 2), real(7, 2)),
            ArgumentError,
            r"edges has one value for each edge: expected \[8, features\] or \[8, heads, features\]",
        ),
        (lambda g: g.attention(real(4, 2), real(5, 2), real(5, 2), np.nan), ArgumentError, "scale is a finite number"),
        (
            lambda g: g.attention(real(4, 2), real(5, 2), real(5, 2), real(2)),
            ArgumentError,
            "scale is one number, got",
        ),
    ],
)
def test_wrong_operands(call, error, message):
    with pytest.raises(error, match=message):
        call(Graph(INDEX, (N, M)))


@pytest.mark.parametrize(
    ("graph", "num_nodes", "error", "message"),
    [
        ("edges.csv", None, ArgumentTypeError, "a graph is a sparse matrix of scipy or torch, .*, got str"),
        (torch.zeros(3, 4, dtype=torch.int64), None, ArgumentError, r"shape \[2, edges\] and integers"),
        (INDEX, 3, StructureError, r"edge_index has source 4, expected one of \[0, 3\)"),
        (INDEX, (5, 2), StructureError, r"edge_index has target 2, expected one of \[0, 2\)"),
        (INDEX - 1, None, StructureError, "edge_index holds -1"),
        (INDEX, "five", ArgumentError, "num_nodes is a number, or"),
        (sp.csr_array(DENSE), 4, ArgumentError, "num_nodes is 4, but the matrix has 2 rows and 3 columns"),
        (torch.ones(2, 2, requires_grad=True), None, ArgumentTypeError, "a graph is structure: pass it .detach"),
        (torch.ones(2, 2).to_sparse_csr().requires_grad_(), None, ArgumentTypeError, "its values as weight= to spmm"),
        (sp.bsr_array(np.ones((4, 4)), blocksize=(2, 2)), None, ArgumentError, "two dimensions without blocks"),
    ],
)
def test_what_is_no_graph(graph, num_nodes, error, message):
    with pytest.raises(error, match=message):
        Graph(graph, num_nodes)


def test_transforms_of_functions_are_refused():
    made, x = Graph(INDEX, (N, M)), real(N, 2)
    for call in (
        torch.func.grad(lambda x: made.spmm(x).sum()),
        torch.func.vmap(made.spmm),
        torch.func.jacfwd(made.spmm),
    ):
        with pytest.raises(LoweringError, match=r"transforms of torch.func .* differentiate with torch.autograd"):
            call(x if call is not torch.func.vmap else x[None])
    forward = torch.autograd.forward_ad
    with forward.dual_level(), pytest.raises(LoweringError, match="SpMM has kernels for gradients backward, none for"):
        made.spmm(forward.make_dual(x, x))
    with torch.no_grad(), forward.dual_level(), pytest.raises(LoweringError, match="none for those forward"):
        made.spmm(forward.make_dual(x, x))
    (x,) = wanting(x)
    y = made.spmm(x)
    with pytest.raises(LoweringError, match="SpMM are kernels for one gradient at a time: leave out is_grads_batched"):
        torch.autograd.grad(y, x, real(3, *y.shape), is_grads_batched=True)


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_weight_of_a_graph_that_changes(is_trained):
    matrix = sp.coo_array(([1.0, 2.0, 3.0], ([2, 0, 1], [0, 1, 2])), shape=(3, 3))
    made, x = Graph(matrix), real(3, 2)
    assert not made.is_sorted
    made.weight.requires_grad_(is_trained)
    for factor in (1, 2, 4):
        y = made.spmm(x)
        close(y, factor * torch.from_numpy(matrix @ x.numpy()))
        if is_trained:
            (gradient,) = torch.autograd.grad(y.sum(), made.weight)
            close(gradient, x.sum(1)[matrix.coords[1]])
        with torch.no_grad():
            made.weight.mul_(2)
    close(made.weighted(torch.ones(3, dtype=torch.float64)).spmm(x), x[[1, 2, 0]])


@pytest.mark.slow
def test_scales_of_any_kind_are_operands():
    made, (q, k, v, scale) = Graph(INDEX, (N, M)), wanting(real(M, 3), real(N, 3), real(N, 2), torch.tensor(0.3))
    for number in (scale, 0.3, -2.0):
        y, expected = made.attention(q, k, v, number), made.spmm(v, made.softmax(made.sddmm(q, k) * number))
        close(y, expected, 1e-6)
    y = made.attention(q, k, v, scale)
    expected = made.spmm(v, made.softmax(made.sddmm(q, k) * scale))
    close(torch.autograd.grad(y.sum(), scale), torch.autograd.grad(expected.sum(), scale), 1e-6)
    assert made.attention(q[:, :0], k[:, :0], v).shape == (M, 2)


@pytest.mark.slow
def test_operands_inside_autocast_are_of_the_widest_dtype():
    matrix = sp.random_array((4, 4), density=0.5, dtype="float32", rng=np.random.default_rng(0))
    made, layer = Graph(matrix), torch.nn.Linear(3, 3)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, alone = made.spmm(layer(x)), made.weighted(None).spmm(layer(x))
        mixed = made.weighted(None).attention(x, layer(x), layer(x))
    assert (y.dtype, alone.dtype, mixed.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    close(y, torch.from_numpy(matrix @ layer(x).detach().numpy()), 0.05)
    y.sum().backward()
    assert layer.weight.grad.dtype is torch.float32


def test_an_edge_index_that_knows_its_sizes():
    geometric = pytest.importorskip("torch_geometric")
    assert Graph(geometric.EdgeIndex(INDEX, sparse_size=(7, 6))).shape == (6, 7)
    assert Graph(geometric.EdgeIndex(INDEX, sparse_size=(None, 6))).shape == (5, 5)


CALLS = {
    "spmm": lambda g, x, h, e: g.spmm(x[:N], e[:, 0]),
    "heads": lambda g, x, h, e: g.spmm(h[:N], e),
    "mean": lambda g, x, h, e: g.spmm(x[:N], reduce="mean", bias=x[0], activation="relu"),
    "max": lambda g, x, h, e: g.spmm(x[:N], e[:, 0], reduce="max"),
    "conv": lambda g, x, h, e: g.conv(x[:N], x[:3]),
    "sddmm": lambda g, x, h, e: g.sddmm(h[:M], h[:N]),
    "edge_sum": lambda g, x, h, e: g.edge_sum(x[:M], x[:N]),
    "softmax": lambda g, x, h, e: g.softmax(e),
    "dropout": lambda g, x, h, e: g.dropout(e, seed=torch.tensor([3])),
    "attention": lambda g, x, h, e: g.attention(h[:M], h[:N], h[:N]),
    "additive": lambda g, x, h, e: g.additive_attention(h[:M, :, 0], h[:N, :, 1], h[:N]),
    "dynamic": lambda g, x, h, e: g.dynamic_attention(h[:M], h[:N], h[0], h[:N]),
    "linear": lambda g, x, h, e: g.linear(e[:, 0], x[:, :N]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_more_elements_than_32_bits_count(name, dtype, monkeypatch):
    """With a bound of few elements in place of 2**31: values and gradients are those of kernels with 64-bit offsets."""
    operands = wanting(real(6, 7, dtype=dtype), real(6, 2, 5, dtype=dtype), real(EDGES, 2, dtype=dtype))

    def values() -> list[Any]:
        out = CALLS[name](Graph(INDEX, (N, M)), *operands)
        return [out, *torch.autograd.grad(out.float().square().sum(), operands, allow_unused=True)]

    expected, widths = values(), set()
    monkeypatch.setattr(signature, "LARGEST_INT32", 5)
    program = structure.GraphRows._program

    def noted(rows: Any, *args: Any) -> Any:
        widths.add(str(rows.indptr.dtype))
        kernel, arrays = program(rows, *args)
        kernel.plans.clear()  # which were made with the other bound
        return kernel, arrays

    monkeypatch.setattr(structure.GraphRows, "_program", noted)
    close([v for v in values() if v is not None], [v for v in expected if v is not None], 1e-5)
    assert "int64" in widths


FEW_ROWS = """
import sys, torch
from sparsetir.torch import Graph
rows, features = 70_000, 33_000
x = torch.from_file(sys.argv[1], shared=True, size=rows * features, dtype=torch.float16).view(rows, features)
x[60000, 7] = 3; x[69999, -1] = 4; x[0, -1] = 5
index, y = torch.tensor([[0, 60000, 69999], [0, 1, 0]]), torch.full((2, features), 0.5, dtype=torch.float16)
graph = Graph(index, num_nodes=(rows, 2))
for reduce, top in (("sum", 9), ("max", 5)):
    out = graph.spmm(x, reduce=reduce)
    assert (float(out[0, -1]), float(out[1, 7]), int((out != 0).sum())) == (top, 3, 2), reduce
assert graph.sddmm(y, x).tolist() == [2.5, 1.5, 2.0]
assert graph.softmax(graph.sddmm(y, x)).shape == (3,)
"""


@pytest.mark.slow
def test_a_tensor_of_more_elements_than_32_bits_count(tmp_path):
    """In a process of its own: offsets that overflow end it."""
    path = tmp_path / "features"
    with open(path, "wb") as file:
        file.truncate(2 * 70_000 * 33_000)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", FEW_ROWS, path], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("outputs", [2, 9])
def test_nodes_that_no_edge_reads_reach_no_gradient(value, reduce, outputs):
    graph, read = Graph(INDEX[:, INDEX[0] != 1], (N, M)), torch.arange(N) != 1
    x, weight = wanting(real(N, 6), real(outputs, 6))
    expected = torch.autograd.grad(graph.conv(x, weight, reduce=reduce).square().sum(), (x, weight))
    with torch.no_grad():
        x[1] = value
    x_gradient, weight_gradient = torch.autograd.grad(graph.conv(x, weight, reduce=reduce).square().sum(), (x, weight))
    close(weight_gradient, expected[1])
    close(x_gradient[read], expected[0][read])
    assert not x_gradient[1].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("linear", "softmax", "dropout", "edge_sum")])
def test_gradients_of_operators_do_not_see_nodes_that_no_edge_reads(name, value):
    x, h, e = wanting(real(6, 7), real(6, 2, 5), real(EDGES, 2))

    def gradients(last: float) -> Any:
        """With a column N that no edge reads, and a row M that no edge writes."""
        with torch.no_grad():
            x[5], h[5] = last, last
        wide = Graph(torch.cat([INDEX, INDEX[:, :0]], 1), (6, 6))
        call = CALLS[name].__code__
        out = type(CALLS[name])(call, {"N": 6, "M": 6, "torch": torch})(wide, x, h, e)
        return torch.autograd.grad(out[:M].square().sum(), (x, h, e), allow_unused=True)

    for found, expected in zip(gradients(value), gradients(0.0), strict=True):
        if found is not None:
            rows = slice(None) if found.shape[0] == EDGES else slice(0, 5)
            close(found[rows], expected[rows])


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_gradient_of_a_maximum_that_is_nan_is_that_of_torch(reduce, is_weighted):
    x = real(N, 3)
    x[0, 0] = x[4, 1] = float("nan")
    x, weight = wanting(x, real(EDGES).abs() + 0.1)
    graph, scales = Graph(INDEX, (N, M)), weight if is_weighted else torch.ones(EDGES, dtype=x.dtype)
    total = 0
    for row in range(M):
        places = (INDEX[1] == row).nonzero().flatten()
        if places.numel():
            messages = x[INDEX[0, places]] * scales[places, None]
            total = total + (torch.amax if reduce == "max" else torch.amin)(messages, 0).sum()
    wanted = (x, weight) if is_weighted else (x,)
    expected = torch.autograd.grad(total, wanted)
    found = torch.autograd.grad(graph.spmm(x, weight if is_weighted else None, reduce).sum(), wanted)
    assert expected[0].isnan().any()
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_operands_with_the_negative_bit(name):
    """torch negates such tensors when something reads them; numpy does not take them."""
    operands = (real(6, 7), real(6, 2, 5), real(EDGES, 2))
    graph = Graph(INDEX, (N, M))
    expected = CALLS[name](graph, *operands)
    lazy = tuple(torch._neg_view(t.neg()).requires_grad_() for t in operands)
    assert lazy[0].is_neg()
    out = CALLS[name](graph, *lazy)
    close(out, expected)
    out.backward(torch._neg_view(torch.ones_like(out)))
    plain = wanting(*operands)
    CALLS[name](graph, *plain).backward(-torch.ones_like(out))
    for one, other in zip(lazy, plain, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            close(one.grad, other.grad)


def test_an_edge_index_with_the_negative_bit():
    close(Graph(torch._neg_view(-INDEX), (N, M)).spmm(real(N, 2)), Graph(INDEX, (N, M)).spmm(real(N, 2)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_wanted", [True, False])
def test_jit_traces_are_refused(name, is_wanted):
    """They would keep the result of the traced call as a constant."""
    graph, operands = Graph(INDEX, (N, M)), (real(6, 7), real(6, 2, 5), real(EDGES, 2))
    with torch.set_grad_enabled(is_wanted), pytest.raises(LoweringError, match=r"use torch\.export"):
        torch.jit.trace(lambda *values: CALLS[name](graph, *values), operands, check_trace=False)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda x: x.to("meta"), "on the device meta, and kernels run on the cpu"),
        (lambda x: x.to_sparse(), "torch.sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), "a nested one"),
    ],
)
@pytest.mark.parametrize("name", ["spmm", "sddmm", "softmax", "linear", "attention"])
def test_tensors_without_memory_that_kernels_read(name, convert, message):
    graph, operands = Graph(INDEX, (N, M)), {"x": real(N, 2), "v": real(EDGES)}
    x, v = (convert(t) for t in operands.values())
    calls = {
        "spmm": lambda: graph.spmm(x),
        "sddmm": lambda: graph.sddmm(x, x),
        "softmax": lambda: graph.softmax(v),
        "linear": lambda: graph.linear(v, x),
        "attention": lambda: graph.attention(x, x, x),
    }
    with pytest.raises(ArgumentTypeError, match=message):
        calls[name]()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_integers_and_bools(dtype, reduce):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randint(0, 2 if dtype is torch.bool else 10, shape, generator=generator).to(dtype)  # noqa: E731
    made = Graph(INDEX, (N, M))
    for x, weight in ((draw(N, 3), None), (draw(N), draw(EDGES)), (draw(N, 2, 3), draw(EDGES, 2))):
        expected = by_torch(INDEX, x.long(), None if weight is None else weight.long(), reduce, M)
        y = made.spmm(x, weight, reduce)
        assert y.dtype is dtype
        assert torch.equal(y, expected.bool() if dtype is torch.bool else expected.to(dtype))
    with pytest.raises(ArgumentError, match='reduce is "sum", "max" or "min" for'):
        made.spmm(draw(N, 3), reduce="mean")
    for weight in (torch.ones(EDGES), range(EDGES), torch.eye(2).to_sparse()):
        with pytest.raises(ArgumentTypeError, match="weight: expected a dense tensor of"):
            made.spmm(draw(N, 3), weight)
    for bias in ([1, 2, 3], torch.ones(3)):
        with pytest.raises(ArgumentTypeError, match="bias: expected a dense tensor of"):
            made.spmm(draw(N, 3), bias=bias)
    with pytest.raises(ArgumentError, match="expected the shape and dtype of a row of x"):
        made.spmm(draw(N, 3), bias=draw(5))


@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 5), (300, 1), (1, 300), (1 << 30, 9), (9, 1 << 30), (1 << 40, 1 << 30), (9, 1 << 62)]
)
@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_edges_are_put_in_order_as_by_lexsort(
    shape: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal edges in the order in which they came; also where row, column and number take more than 63 bits."""
    rng = np.random.default_rng(count)
    rows, columns = (rng.integers(0, min(n, 20), count) * max((n - 1) // 20, 1) % n for n in shape)
    expected = np.lexsort((columns, rows))
    pointers, rows_in_order = structure._pointers, []
    few = lambda rows, m, dtype: rows_in_order.append(rows) or pointers(rows[:0], min(m, 9), dtype)  # noqa: E731
    dtype = np.dtype(np.int32 if max(shape) <= LARGEST_INT32 else np.int64)
    if shape[0] < 1 << 20:
        indptr = pointers(np.sort(rows), shape[0], dtype)
        assert indptr.dtype == dtype
        assert np.diff(indptr).tolist() == np.bincount(rows, minlength=shape[0]).tolist()
    monkeypatch.setattr(structure, "_pointers", few)  # of so many rows there is no room for pointers
    _, in_order, order = structure._in_order(rows.astype(dtype), columns.astype(dtype), shape)
    assert rows_in_order[0].tolist() == rows[expected].tolist()
    assert order.dtype == in_order.dtype == dtype
    assert order.tolist() == expected.tolist()
    assert in_order.tolist() == columns[expected].tolist()


def test_first_calls_are_those_of_a_bound_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (x,) = Graph(INDEX, (N, M)), wanting(real(N, 6))
    monkeypatch.setattr(structure, "MOST_UNBOUND", 2)
    seen = []
    for _ in range(4):
        y = made.spmm(x, reduce="mean")
        seen.append((y.detach(), torch.autograd.grad(y.square().sum(), x)[0], len(made.rows.bound)))
    assert [bound for *_, bound in seen] == [0, 0, 1, 1]
    for y, gradient, _ in seen[1:]:
        assert torch.equal(y, seen[0][0])
        assert torch.equal(gradient, seen[0][1])
