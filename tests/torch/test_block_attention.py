# SPDX-License-Identifier: Apache-2.0
"""Attention over edges that lie in blocks: found blocks, values, gradients, batches, halves and what is not finite."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from sparsetir.build import build as build_program  # noqa: E402
from sparsetir.codegen.target import cpu_target, emulating_target  # noqa: E402
from sparsetir.errors import ArgumentError  # noqa: E402
from sparsetir.lower.annotations import FREE_SUMS  # noqa: E402
from sparsetir.script.writer import ProgramWriter  # noqa: E402
from sparsetir.torch import Graph, block_attention, structure  # noqa: E402
from sparsetir.utils.caches import CACHES  # noqa: E402

INFINITY = float("inf")


def full_mask():
    """Blocks of 16, one row of blocks without any."""
    return np.kron(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool), np.ones((16, 16), bool))


def partial_mask():
    """Blocks with gaps, a row without edges inside a block, and sizes that no block divides."""
    mask = full_mask()[:, :45]
    mask[[0, 3, 40], [2, 40, 20]] = False
    mask[5] = False
    return mask[:43]


MASKS = {"full": full_mask, "partial": partial_mask}


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch):
    monkeypatch.setattr(structure, "MIN_BLOCKED", 1)
    monkeypatch.setattr(block_attention, "COSTS", {16: 0.5})


@pytest.fixture(params=list(MASKS))
def mask(request):
    return torch.from_numpy(MASKS[request.param]())


def blocked(mask):
    """Return a graph whose attention runs over blocks."""
    graph = Graph(mask)
    assert graph.rows.blocks.size == 16
    return graph


def operands(mask, *heads, batch=(), dtype=torch.float64, features=3):
    torch.manual_seed(0)
    rows, columns = mask.shape
    sizes = ((rows, features), (columns, features), (columns, 2))
    return tuple(torch.randn(*batch, n, *heads, f, dtype=dtype).requires_grad_() for n, f in sizes)


def dense(mask, q, k, v, scale):
    """Attention of [..., nodes, heads, features] with all scores; zero for rows without edges."""
    scores = torch.einsum("...ihd,...jhd->...hij", q, k) * scale
    shares = torch.softmax(scores.masked_fill(~mask, -INFINITY), -1).masked_fill(~mask, 0)
    return torch.einsum("...hij,...jhd->...ihd", shares, v)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_values_and_gradients(mask, batch):
    graph, tensors = blocked(mask), operands(mask, 2, batch=batch)
    y, expected = graph.attention(*tensors, scale=0.3), dense(mask, *tensors, 0.3)
    torch.testing.assert_close(y, expected)
    assert not y[..., ~mask.any(1), :, :].any()
    gradient = torch.randn_like(y)
    for one, other in zip(
        torch.autograd.grad(y, tensors, gradient), torch.autograd.grad(expected, tensors, gradient), strict=True
    ):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(graph.attention(*tensors, scale=0.3), expected)


def test_gradcheck():
    mask = torch.from_numpy(partial_mask())
    graph, tensors = blocked(mask), operands(mask)
    assert torch.autograd.gradcheck(graph.attention, tensors, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_are_summed_in_float32(mask, dtype):
    graph, tensors = blocked(mask), operands(mask, 2, dtype=dtype)
    y, expected = graph.attention(*tensors), dense(mask, *(t.double() for t in tensors), 3**-0.5)
    assert y.dtype is dtype
    error = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=error, atol=error)
    gradient = torch.randn_like(y)
    for one, other in zip(
        torch.autograd.grad(y, tensors, gradient),
        torch.autograd.grad(expected, tensors, gradient.double()),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=error, atol=error)


@pytest.fixture
def emulated_units(monkeypatch):
    """Units of another processor, emulated; the kernels that are built."""
    built = []

    def build(program):
        built.append(build_program(program, emulating_target()))
        return built[-1]

    monkeypatch.setattr(block_attention, "has_unit", lambda _target: True)
    monkeypatch.setattr(block_attention, "build", build)
    CACHES["kernels of block attention"].clear()
    yield built
    CACHES["kernels of block attention"].clear()


@pytest.mark.scheduled
@pytest.mark.parametrize("features", [3, 32])
def test_units_multiply_bfloat16_numbers(mask, features, emulated_units):
    """Probabilities are rounded to bfloat16; an odd number of features is computed in vectors."""
    graph, tensors = blocked(mask), operands(mask, 2, dtype=torch.bfloat16, features=features)
    scale = 0.3 / features
    exact = dense(mask, *(t.double() for t in tensors), scale)
    most = dense(mask, *(t.double() for t in tensors[:2]), tensors[2].double().abs(), scale)
    with torch.no_grad():
        y = graph.attention(*tensors, scale=scale)
    assert ((y.double() - exact).abs() <= 2.0**-8 * most).all()
    assert not y[~mask.any(1)].any()
    [kernel] = emulated_units
    assert "tdpbf16ps" in kernel.script(stage=3)


@pytest.mark.scheduled
def test_gradients_after_units(mask, emulated_units):
    """Units sum the gradients of bfloat16 numbers in float32, from probabilities that are rounded to bfloat16."""
    graph, tensors = blocked(mask), operands(mask, 2, dtype=torch.bfloat16, features=8)
    y, exact = graph.attention(*tensors), dense(mask, *(t.double() for t in tensors), 8**-0.5)
    gradient = torch.randn_like(y)
    for one, other in zip(
        torch.autograd.grad(y, tensors, gradient), torch.autograd.grad(exact, tensors, gradient.double()), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)
    assert ["tdpbf16ps" in kernel.script(stage=3) for kernel in emulated_units] == [True] * 3


@pytest.mark.scheduled
def test_gradients_of_queries_alone_after_units(mask, emulated_units):
    graph, (q, k, v) = blocked(mask), operands(mask, dtype=torch.bfloat16, features=4)
    y = graph.attention(q, k.detach(), v.detach())
    exact = dense(mask, *(t[:, None].double() for t in (q, k, v)), 0.5)[:, 0]
    g = torch.randn_like(y)
    expected = torch.autograd.grad(exact, q, g.double())[0]
    torch.testing.assert_close(torch.autograd.grad(y, q, g)[0], expected.to(y.dtype), rtol=0.03, atol=0.03)
    assert len(emulated_units) == 2


@pytest.mark.optimised
@pytest.mark.parametrize(("mcpu", "code"), [("znver4", "vdpbf16ps"), ("sapphirerapids", "tdpbf16ps")])
def test_the_instructions_of_processors(mcpu, code):
    draft = ProgramWriter("attention", attributes={FREE_SUMS: True})
    block_attention.forward_halves(draft, 32, "bfloat16", "int32", 32, 32, False, False)
    kernel = build_program(draft.function(), cpu_target({"kind": "llvm", "mcpu": mcpu}, "kernels"))
    assert code in kernel.source("asm")
    assert "st_copy" not in kernel.script(stage=3)  # tiles are read where they are


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("value", [float("nan"), 1e200])
def test_values_reach_only_rows_with_edges_to_them(mask, which, value):
    """As along single edges: in q, k, v and in the gradient of the result."""
    tensors = [t.detach() for t in operands(mask, 2)]
    tensors.append(torch.randn(mask.shape[0], 2, 2, dtype=torch.float64))
    tensors[which][2, 1] = value
    *leaves, gradient = tensors
    by_edges = Graph(mask)
    by_edges.rows.blocks = None
    results = []
    for graph in (blocked(mask), by_edges):
        inputs = [t.clone().requires_grad_() for t in leaves]
        y = graph.attention(*inputs, scale=0.3)
        results.append((y.detach(), *torch.autograd.grad(y, inputs, gradient)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        torch.testing.assert_close(one[one.isfinite()], other[one.isfinite()])


def test_dropout_and_single_edges_agree(mask):
    """Dropout goes along single edges, also of batches."""
    graph, (q, k, v) = blocked(mask), operands(mask, 2, batch=(2,))
    seed = torch.tensor([3])
    y = graph.attention(q, k, v, dropout=0.5, seed=seed)
    by_heads = [t.transpose(0, 1).flatten(1, 2) for t in (q, k, v)]
    expected = graph.attention(*by_heads, dropout=0.5, seed=seed).unflatten(1, (2, 2)).transpose(0, 1)
    assert torch.equal(y, expected)


def test_compiled_programs_run_over_blocks(mask, monkeypatch):
    graph, tensors = blocked(mask), [t.detach() for t in operands(mask, 2)]
    programs = []
    run = structure.GraphRows.run
    monkeypatch.setattr(
        structure.GraphRows, "run", lambda self, name, *a, **kw: programs.append(name) or run(self, name, *a, **kw)
    )
    compiled = torch.compile(lambda *a: graph.attention(*a, scale=0.3), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), dense(mask, *tensors, 0.3))
    assert programs == []


def test_blocks_that_pay(monkeypatch):
    """Large blocks where these are full, small ones where only these are; single edges elsewhere."""
    monkeypatch.undo()
    monkeypatch.setattr(structure, "MIN_BLOCKED", 1)
    draw = np.random.default_rng(0)
    eye = np.eye(3, dtype=bool)
    assert Graph(torch.from_numpy(np.kron(eye, np.ones((64, 64))))).rows.blocks.size == 64
    assert Graph(torch.from_numpy(np.kron(eye, np.ones((16, 16))))).rows.blocks.size == 16
    assert Graph(torch.from_numpy(np.roll(np.kron(eye, np.ones((16, 16))), 8, axis=1))).rows.blocks is None
    assert Graph(torch.from_numpy(draw.random((64, 64)) < 0.5)).rows.blocks is None
    assert Graph(torch.zeros(16, 16)).rows.blocks is None
    repeated = torch.from_numpy(np.stack(np.nonzero(np.ones((16, 16)))).repeat(2, axis=1))
    assert Graph(repeated, 16).rows.blocks is None


def test_masks_are_stored_once():
    distance = np.subtract.outer(np.arange(256), np.arange(256))
    pattern = Graph(torch.from_numpy((distance >= 0) & (distance < 64))).rows.blocks
    assert pattern.size == 16
    assert pattern.masks.shape[0] == 3  # the diagonal, the other end of the window, and full blocks between
    assert pattern.indices.size == pattern.which.size


def test_operands_of_batches_that_do_not_fit(mask):
    graph, (q, k, v) = blocked(mask), operands(mask, 2, batch=(2,))
    with pytest.raises(ArgumentError, match="k: expected the batches and heads of q"):
        graph.attention(q, k[:1], v)
    with pytest.raises(ArgumentError, match="v: expected the batches and heads of q"):
        graph.attention(q, k, v[..., :1, :])
    with pytest.raises(ArgumentError, match="edges: expected None"):
        graph.attention(q, k, v, edges=torch.zeros(int(mask.sum()), 2, 3, dtype=torch.float64))
