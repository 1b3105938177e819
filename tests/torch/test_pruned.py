# SPDX-License-Identifier: Apache-2.0
"""Pruned models for inference: every way computes the layer, choices are reported, models are saved and traced."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from typing import Any

import pytest
from torch.nn.utils import parametrize, prune

import sparsetir.torch as st
import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.torch.pruned_layers import INT8_MAX, suits_ranges, ways
from sparsetir.torch.sparsify import TOLERANCES, Inputs, SparsifyOptions, decide, made
from torch import Tensor, nn

QUICK = {"seconds": 1e-4}
ALL = ways(torch.float32, torch.int8)


def masked(layer: Any, density: float = 0.1, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            parameter.data *= torch.rand(parameter.shape) < density
    return layer.eval()


def sparse(layer: Any, x: Tensor, way: str = "columns float32") -> Any:
    return made(layer, way, float(x.abs().max()) / INT8_MAX if x.numel() else 1.0)


def close(got: Tensor, expected: Tensor, way: str = "columns float32") -> bool:
    assert got.shape == expected.shape
    assert got.dtype is expected.dtype
    norm = torch.linalg.vector_norm(expected.double())
    error = torch.linalg.vector_norm(got.double() - expected.double())
    return bool(error <= TOLERANCES[way.split()[1]] * norm + 1e-12)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let one way appear to be the fastest."""
    from sparsetir.torch import sparsify
    from sparsetir.workloads.timing import FastestCandidate

    def choose_only(way: str) -> None:
        monkeypatch.setattr(
            sparsify,
            "choose",
            lambda timers, seconds, refused: FastestCandidate(
                way if way in timers else next(iter(timers)), {name: 1.0 for name in timers}, refused
            ),
        )

    return choose_only


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize("shape", [(128,), (0, 128), (2, 3, 4, 128)])
def test_every_way_is_the_linear_layer(way: str, shape: tuple[int, ...]) -> None:
    for bias in (True, False):
        layer, x = masked(nn.Linear(128, 96, bias=bias)), torch.randn(shape)
        with torch.no_grad():
            assert close(sparse(layer, x, way)(x), layer(x), way)


@pytest.mark.parametrize("way", ALL)
def test_degenerate_weights_and_inputs(way: str) -> None:
    x = torch.randn(128, 6).t()
    for density, outputs in ((0.0, 40), (1.0, 1), (0.2, 33)):
        layer = masked(nn.Linear(128, outputs), density)
        with torch.no_grad():
            assert close(sparse(layer, x, way)(x), layer(x), way)
    for inputs, outputs in ((0, 3), (3, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of empty weights
            layer = nn.Linear(inputs, outputs).eval()
        x = torch.randn(4, inputs)
        with torch.no_grad():
            assert close(sparse(layer, x, way)(x), layer(x), way)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_of_models(dtype: torch.dtype) -> None:
    layer, x = masked(nn.Linear(128, 96, dtype=dtype)), torch.randn(7, 128, dtype=dtype)
    for way in ways(dtype, None):
        with torch.no_grad():
            expected = layer(x)
            got = sparse(layer, x, way)(x)
        assert got.dtype is dtype
        assert float((got - expected).abs().max()) <= (1e-12 if dtype is torch.float64 else 0.05)


CONVOLUTIONS = [
    (nn.Conv2d, {"kernel_size": 1}),
    (nn.Conv2d, {"kernel_size": 3, "padding": "same", "bias": False}),
    (nn.Conv2d, {"kernel_size": (4, 3), "padding": "same"}),
    (nn.Conv2d, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
    (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    (nn.Conv2d, {"kernel_size": 3, "groups": 2}),
    (nn.Conv1d, {"kernel_size": 3, "padding": 2, "stride": 2}),
    (nn.Conv1d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
]


@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS, ids=str)
def test_convolutions(kind: Any, options: dict[str, Any]) -> None:
    layer = masked(kind(16, 24, **options), 0.3)
    sizes = (9, 11) if kind is nn.Conv2d else (13,)
    for images, way in itertools.product((1, 3, 0, None), ("columns float32", "rows float32")):
        x = torch.randn(*(() if images is None else (images,)), 16, *sizes)
        with torch.no_grad():
            assert close(sparse(layer, x, way)(x), layer(x))
    x = torch.randn(2, 16, *sizes)
    with torch.no_grad():
        assert close(sparse(layer, x, "columns int8")(x), layer(x), "columns int8")
    with pytest.raises(ArgumentError, match="x: expected a tensor of shape"):
        sparse(layer, x)(torch.randn(2, 15, *sizes))


class Encoder(nn.Module):
    """Transformer layers between linear ones, one of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.first = nn.Linear(64, 64)
        self.again = self.first
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(self.again(self.first(x)), src_key_padding_mask=padding)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["columns float32", "columns int8", "dense bfloat16"])
def test_transformers_are_replaced_whole(way: str, take: Any) -> None:
    take(way)
    model, x = masked(Encoder()), torch.randn(3, 10, 64)
    padding = torch.zeros(3, 10, dtype=torch.bool)
    padding[1, 7:] = True
    with torch.no_grad():
        expected, with_padding = model(x), model(x, padding)
    report = st.SparsifyReport()
    changed = st.sparsify_(
        copy.deepcopy(model), dtype="int8", examples=[x, {"x": x, "padding": padding}], report=report, **QUICK
    )
    names = {c.name for c in report if c.reason.startswith(way)}
    parts = [f"encoder.layers.{n}.{p}" for n in (0, 1) for p in ("self_attn.in_proj", "linear1", "linear2")]
    assert names >= set(parts)
    assert {"first", "encoder.layers.0.self_attn.out_proj"} <= {c.name for c in report}
    with torch.no_grad():
        assert float((changed(x) - expected).abs().max()) < 0.2
        got = changed(x, padding)
    assert float((got - with_padding)[~padding].abs().max()) < 0.2
    if way == "columns float32":
        assert torch.allclose(got[~padding], with_padding[~padding], atol=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_is_that_of_torch(batch_first: bool, need_weights: bool, take: Any) -> None:
    take("columns float32")
    layer = masked(nn.MultiheadAttention(64, 4, batch_first=batch_first), 0.2)
    q, k, v = torch.randn(5, 5, 64), torch.randn(5, 5, 64), torch.randn(5, 5, 64)
    changed = st.sparsify_(copy.deepcopy(layer), examples=[(q, q, q)], **QUICK)
    assert isinstance(changed, st.PrunedAttention)
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    padding = torch.zeros(5, 5, dtype=torch.bool)
    padding[0, 3:] = True
    heads = causal.repeat(20, 1, 1)
    for options in ({}, {"attn_mask": causal}, {"attn_mask": heads}, {"key_padding_mask": padding}):
        for operands in ((q, q, q), (q, k, k), (q, k, v)):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got, expected = (m(*operands, need_weights=need_weights, **options) for m in (changed, layer))
            assert torch.allclose(got[0], expected[0], atol=1e-5)
            assert (got[1] is None) == (expected[1] is None)
            assert got[1] is None or torch.allclose(got[1], expected[1], atol=1e-6)
    with torch.no_grad():
        got, expected = (m(q[0], k[0], v[0], average_attn_weights=False) for m in (changed, layer))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


def test_masks_of_prune_and_parametrize(take: Any) -> None:
    take("columns float32")

    class Mask(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * (weight > 0.05)

    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 64), nn.MultiheadAttention(64, 4, batch_first=True)).eval()
    prune.l1_unstructured(model[0], "weight", 0.9)
    prune.random_unstructured(model[2], "in_proj_weight", 0.9)
    parametrize.register_parametrization(model[1], "weight", Mask())
    x = torch.randn(2, 5, 128)

    def run(layers: Any) -> Tensor:
        with torch.no_grad():
            y = layers[1](layers[0](x))
            return layers[2](y, y, y)[0]

    expected, report = run(model), st.SparsifyReport()
    st.sparsify_(model, keep="nonzeros", decide="measure", report=report, **QUICK)
    assert torch.allclose(run(model), expected, atol=1e-5)
    assert [c.name for c in report if c.is_sparse] == ["0", "1", "2.in_proj"]
    assert report[0].nonzeros == round(0.1 * 128 * 64)


@pytest.mark.slow
def test_saving_and_tracing(take: Any) -> None:
    take("columns int8")
    model, x = masked(Encoder()), torch.randn(3, 10, 64)
    changed = st.sparsify_(model, dtype="int8", examples=[x], **QUICK)
    file = io.BytesIO()
    torch.save(changed, file)
    file.seek(0)
    other = st.sparsify_(masked(Encoder(), 0.3, seed=1), dtype="int8", examples=[x], **QUICK)
    other.load_state_dict(changed.state_dict())
    with torch.no_grad():
        expected = changed(x)
        for copied in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(changed)), other):
            assert torch.equal(copied(x), expected)
        assert torch.equal(torch.compile(changed, backend="eager", fullgraph=True)(x), expected)
        assert torch.equal(torch.export.export(changed, (x,)).module()(x), expected)
        with pytest.raises(LoweringError, match=r"torch\.jit\.trace"):
            torch.jit.trace(changed.first, (x,))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["columns float32", "dense bfloat16"])
def test_models_for_cpp(way: str, take: Any) -> None:
    from sparsetir.relax import from_torch

    take(way)
    model = masked(nn.Sequential(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, groups=2), nn.Flatten()))
    model.append(masked(nn.Linear(576, 64)))
    x = torch.randn(2, 64, 5, 5)
    changed = st.sparsify_(model, examples=[x], dtype="bfloat16", **QUICK)
    with torch.no_grad():
        assert close(from_torch(changed, (x,))(x), changed(x), way)
    encoder, y = masked(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)), torch.randn(2, 6, 64)
    changed = st.sparsify_(encoder, examples=[y], dtype="bfloat16", **QUICK)
    with torch.no_grad():
        assert close(from_torch(changed, (y,))(y), changed(y), way)


def test_gradients_reach_inputs_and_nothing_else() -> None:
    layer = masked(nn.Linear(128, 96))
    changed, x = sparse(layer, torch.randn(4, 128)), torch.randn(4, 128, requires_grad=True)
    changed(x).square().sum().backward()
    got, x.grad = x.grad, None
    layer(x).square().sum().backward()
    assert got is not None
    assert x.grad is not None
    assert torch.allclose(got, x.grad, atol=1e-4)
    assert not list(changed.parameters())
    with pytest.warns(UserWarning, match="PrunedLinear.train: the weights are constant"):
        changed.train()


def test_autocast_and_conversion() -> None:
    layer, x = masked(nn.Linear(128, 96)), torch.randn(4, 128)
    changed = sparse(layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert close(changed(x), layer(x), "columns bfloat16")
    changed.double()
    assert changed(x.double()).dtype is torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():  # which leaves float64 alone
        assert changed(x.double()).dtype is torch.float64
    with pytest.raises(ArgumentTypeError, match=r"x: expected torch\.float64, got torch\.float32"):
        changed(x)
    with pytest.raises(ArgumentTypeError, match="constant weight of a pruned layer"):
        torch.relu(changed.weight)
    assert changed.weight.toarray().shape == (96, 128)
    with pytest.raises(ArgumentError, match="x: expected a tensor of shape"):
        changed(torch.tensor(1.0))


def test_what_stays_dense_is_named(take: Any) -> None:
    take("nothing")
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(64, 64), nn.LayerNorm((8, 64)), nn.Conv2d(64, 64, 1), nn.Bilinear(8, 8, 9)
    ).eval()
    model.append(nn.MultiheadAttention(64, 4, add_zero_attn=True))
    report = st.SparsifyReport()
    before = list(model)
    st.sparsify_(model, decide="measure", report=report, skip=["1"], **QUICK)
    assert list(model) == before
    reasons = {c.name: c.reason for c in report}
    assert "smaller than" in reasons["0"]
    assert reasons["1"] == "in skip"
    assert "no examples" in reasons["3"]
    assert "stays as it is" in reasons["4"]
    assert "add_zero_attn" in reasons["5"]
    assert all(str(c).startswith(c.name) and not c.is_sparse for c in report)


def test_tied_weights(take: Any) -> None:
    take("columns float32")
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100, bias=False), nn.Linear(64, 100, bias=False)).eval()
    model[1].weight = model[2].weight = model[0].weight
    model[0].weight.data *= torch.rand(100, 64) < 0.1
    x = torch.randn(4, 64)
    expected = model[1](x)
    st.sparsify_(model, decide="measure", **QUICK)
    assert torch.allclose(model[1](x), expected, atol=1e-5)
    assert torch.equal(model[1](x), model[2](x))


@pytest.mark.slow
def test_wrong_candidates_are_refused() -> None:
    layer, x = masked(nn.Linear(128, 96)), torch.randn(64, 128)
    decision = decide(layer, Inputs(x, 1e-3), SparsifyOptions(torch.int8, examples=(x,), seconds=1e-4))
    assert decision.layer is None or "int8" not in decision.layer.way  # almost all inputs are clipped
    with_values = decide(
        layer, Inputs(x, float(x.abs().max())), SparsifyOptions(torch.int8, examples=(x,), seconds=1e-4)
    )
    assert set(with_values.times) == set(ALL)
    assert not {"dense int8", "columns int8"} & set(decision.times)


@torch.no_grad()
@pytest.mark.parametrize("way", [pytest.param("columns int8", marks=pytest.mark.slow), "dense int8"])
def test_inputs_of_one_sign_have_the_resolution_of_eight_bits(way: str) -> None:
    layer, x = masked(nn.Linear(128, 96), 0.5), torch.randn(64, 128)
    for offset in (0.0, 5.0, -5.0):
        moved, inputs = x.abs() * (1 if offset >= 0 else -1) + offset, Inputs()
        inputs.note_range(moved, 100.0)
        symmetric = float(moved.abs().max()) / INT8_MAX
        errors = [
            torch.linalg.vector_norm(made(layer, way, *quantization)(moved) - layer(moved))
            for quantization in (inputs.quantization, (symmetric,))
        ]
        assert inputs.quantization[1] == (255 if offset < 0 else 0)  # zero itself is represented
        assert errors[0] < 0.95 * errors[1]


def test_ranges_are_clipped_on_both_sides() -> None:
    inputs = Inputs()
    inputs.note_range(torch.cat([torch.linspace(-1, 3, 999), torch.tensor([1e6])]), 99.8)
    scale, zero = inputs.quantization
    assert 0.9 < scale * 255 / 4 < 1.1
    assert 55 < zero < 75


def test_three_products_are_ways_where_the_processor_has_units(monkeypatch: pytest.MonkeyPatch, take: Any) -> None:
    from sparsetir.torch import pruned_layers

    in_parts = {"columns bf16x3", "rows bf16x3"}
    monkeypatch.setattr(pruned_layers, "has_unit", lambda _target: False)
    assert not in_parts & set(ways(torch.float32, torch.int8))
    monkeypatch.setattr(pruned_layers, "has_unit", lambda _target: True)
    assert in_parts <= set(ways(torch.float32, "bf16x3"))
    assert not {*in_parts, "dense bfloat16"} & set(ways(torch.float32, torch.float32))
    assert not in_parts & set(ways(torch.float64, torch.int8))
    take("columns bf16x3")
    layer, x = masked(nn.Linear(128, 96)), torch.randn(5, 128)
    expected = layer(x).detach()
    changed = st.sparsify_(layer, dtype="bf16x3", **QUICK)
    assert changed.way == "columns bf16x3"
    error = torch.linalg.vector_norm(changed(x) - expected) / torch.linalg.vector_norm(expected)
    assert 1e-7 < float(error) < 1e-5
    for _ in range(300):  # until no formats are timed, between which sums differ
        changed(x)
    assert torch.equal(pickle.loads(pickle.dumps(changed))(x), changed(x))


def two_of_four(layer: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        groups = layer.weight.flatten(1).abs().view(len(layer.weight), -1, 4)
        mask = torch.zeros_like(groups).scatter_(2, groups.topk(2, dim=2).indices, 1)
        layer.weight *= mask.view_as(layer.weight)
    return layer.eval()


@torch.no_grad()
@pytest.mark.parametrize("rows", [0, 1, 64, 70])
def test_two_of_four_weights_are_multiplied_by_ranges(rows: int) -> None:
    layer, x = two_of_four(nn.Linear(128, 96)), torch.randn(rows, 128)
    assert suits_ranges(layer.weight)
    assert not suits_ranges(masked(nn.Linear(128, 96)).weight)
    assert not suits_ranges(two_of_four(nn.Linear(100, 96)).weight)  # no whole number of ranges
    assert close(made(layer, "ranges float32")(x), layer(x), "ranges float32")


@torch.no_grad()
def test_convolutions_and_decisions_with_ranges(take: Any) -> None:
    layer, x = two_of_four(nn.Conv2d(64, 70, 1)), torch.randn(2, 64, 5, 9)
    assert close(made(layer, "ranges float32")(x), layer(x), "ranges float32")
    take("ranges float32")
    linear, rows = two_of_four(nn.Linear(128, 96)), torch.randn(5, 128)
    expected, report = linear(rows), st.SparsifyReport()
    changed = st.sparsify_(linear, decide="measure", report=report, **QUICK)
    assert changed.way == "ranges float32"
    assert report[0].is_sparse
    assert close(pickle.loads(pickle.dumps(changed))(rows), expected, "ranges float32")


def test_values_that_are_not_finite_stay_dense() -> None:
    layer = masked(nn.Linear(128, 96))
    layer.weight.data[0, 0] = float("nan")
    assert decide(layer, Inputs(), SparsifyOptions()).reason == "its weights are not finite"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "examples: expected batches with dtype='int8', got none"),
        ({"dtype": "int4"}, "dtype: expected one of 'float32', 'bf16x3', 'bfloat16', 'int8' or None, got 'int4'"),
        ({"decide": "guess"}, "decide: expected 'always' or 'measure'"),
        ({"decide": "always", "dtype": "int8"}, "decide: expected 'measure' with a dtype"),
        ({"decide": "measure", "density": 0.1}, "keep: expected 'nonzeros'"),
        ({"decide": "measure", "rows": 0}, "rows: expected a positive number"),
        ({"decide": "measure", "percentile": 0}, "percentile: expected a number in"),
        ({"decide": "measure", "seconds": -1}, "seconds: expected a positive, finite number"),
        ({"decide": "measure", "examples": torch.ones(3)}, "examples: expected a list of batches, got Tensor"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message.replace("(", r"\(")):
        st.sparsify_(nn.Linear(64, 64).eval(), **options)
    with pytest.raises(ArgumentError, match="model: expected evaluation mode"):
        st.sparsify_(nn.Linear(64, 64), decide="measure")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_programs_choose_layers(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsetir.torch import sparsify

    take("columns float32")
    calls = []
    original = sparsify.PrunedLinear.forward
    monkeypatch.setattr(sparsify.PrunedLinear, "forward", lambda self, x: calls.append(1) or original(self, x))
    model = masked(nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)))
    compiled = torch.compile(model, backend="sparsetir", options={"sparsify": True})
    for rows in (5, 5, 0, 1):
        x = torch.randn(rows, 128)
        with torch.no_grad():
            assert close(compiled(x), model(x))
    assert len(calls) >= 4  # and some that measure
    with torch.no_grad():
        model[0].weight.mul_(2)
        assert close(compiled(x), model(x))
    count, x = len(calls), torch.randn(5, 128, requires_grad=True)
    compiled(x).sum().backward()
    assert len(calls) == count  # gradients are those of torch
    assert model[0].weight.grad is not None
    torch._dynamo.reset()
    with pytest.raises(Exception, match="expected sparsify to be True or 'bfloat16'"):
        torch.compile(model, backend="sparsetir", options={"sparsify": "int4"})(x)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["SparseLinear", "PrunedLinear", "PrunedConv"])
def test_inputs_of_other_kinds_are_refused(kind: str) -> None:
    dense: Any = masked(nn.Conv1d(4, 5, 3) if kind == "PrunedConv" else nn.Linear(12, 7))
    x = torch.randn(3, 4, 12) if kind == "PrunedConv" else torch.randn(3, 12)
    layer: Any = st.SparseLinear.from_dense(dense) if kind == "SparseLinear" else sparse(dense, x)
    assert close(layer(x), dense(x))
    with pytest.raises(ArgumentTypeError, match=r"expected a dense tensor, got a sparse_coo one. Pass x.to_dense"):
        layer(x.to_sparse())
    if kind != "PrunedConv":
        nested = torch.nested.nested_tensor([x[:1], x], layout=torch.jagged)
        with pytest.raises(ArgumentTypeError, match=r"expected a dense tensor, got a nested one. Pass x.values"):
            layer(nested)
    for transform in (torch.func.vmap, torch.func.jacfwd, torch.func.jacrev):
        with pytest.raises(LoweringError, match=r"transforms of torch.func .* do not go through"):
            transform(layer)(x[None] if transform is torch.func.vmap else x)
