# SPDX-License-Identifier: Apache-2.0
"""Quantized exports of torch: products with pruned 8-bit weights become sparse products of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.ao.quantization.fx._decomposed")

import sparsetir.relax as srelax  # noqa: E402
from sparsetir.codegen.target import native_target  # noqa: E402
from sparsetir.relax.integer_products import WAY  # noqa: E402
from sparsetir.relax.model import lowered  # noqa: E402

q = torch.ops.quantized_decomposed
UINT8, INT8 = (0, 255, torch.uint8), (-127, 127, torch.int8)


class Quantized(torch.nn.Module):
    """A linear layer or a convolution as ``convert_pt2e`` leaves it: integers, scales and a bias."""

    def __init__(self, layer: Any, *, pruned: float = 0.95, by_channel: bool = True, relu: bool = True) -> None:
        super().__init__()
        weight, self.relu, self.by_channel = layer.weight.detach(), relu, by_channel
        generator = torch.Generator().manual_seed(0)
        weight = weight * (torch.rand(weight.shape, generator=generator) > pruned)
        largest = weight.abs().flatten(1).amax(1) if by_channel else weight.abs().max().reshape(1)
        scales = torch.where(largest > 0, largest / 127, 1.0)
        factors = scales.view(-1, *[1] * (weight.dim() - 1))
        self.register_buffer("integers", (weight / factors).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int64))
        self.bias, self.call = layer.bias.detach(), self._call(layer)

    @staticmethod
    def _call(layer: Any) -> Any:
        if isinstance(layer, torch.nn.Linear):
            return torch.nn.functional.linear
        return lambda x, w, b: torch.nn.functional.conv2d(x, w, b, layer.stride, layer.padding, layer.dilation)

    def forward(self, x: Any) -> Any:
        x = q.dequantize_per_tensor(q.quantize_per_tensor(x, 0.021, 117, *UINT8), 0.021, 117, *UINT8)
        if self.by_channel:
            weight = q.dequantize_per_channel(self.integers, self.scales, self.zeros, 0, *INT8)
        else:
            weight = q.dequantize_per_tensor(self.integers, self.scales, self.zeros, *INT8)
        y = self.call(x, weight, self.bias)
        y = torch.relu(y) if self.relu else y
        return q.dequantize_per_tensor(q.quantize_per_tensor(y, 0.05, 3, *UINT8), 0.05, 3, *UINT8)


def check(model: Any, x: Any, ways: list[str], *, near: float = 0.999) -> Any:
    """Compare with torch, whose sums in float32 may round a few halves to the other side."""
    sparsify = srelax.SparsifyWeights(decide="predict")
    compiled = srelax.from_torch(model, (x,), sparsify=sparsify)
    found, expected = compiled(x), model(x)
    assert found.shape == expected.shape
    steps = (found - expected).abs() / 0.05
    assert float(steps.max()) < 1.01
    assert float((steps < 1e-4).float().mean()) >= near
    assert [layer.way for layer in sparsify.layers] == ways
    return sparsify


@pytest.mark.parametrize(("shape", "by_channel"), [((7, 96), True), ((2, 5, 96), False)])
def test_linear_layers(shape: tuple[int, ...], by_channel: bool) -> None:
    torch.manual_seed(0)
    check(Quantized(torch.nn.Linear(96, 64), by_channel=by_channel), torch.randn(shape), [WAY])


def test_convolutions() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(16, 32, 3, padding=1, stride=2)
    check(Quantized(layer, relu=False), torch.randn(2, 16, 9, 8), [WAY])


def test_two_layers_and_a_dense_one() -> None:
    torch.manual_seed(0)
    first, second = Quantized(torch.nn.Linear(96, 64)), Quantized(torch.nn.Linear(64, 96), pruned=0.0)
    check(torch.nn.Sequential(first, second), torch.randn(3, 96), [WAY, ""], near=0.99)


def test_weights_alone() -> None:
    """Only the weight is quantized: the product is one in float32, dense or sparse."""

    class Weights(Quantized):
        def forward(self, x: Any) -> Any:
            return self.call(x, q.dequantize_per_channel(self.integers, self.scales, self.zeros, 0, *INT8), self.bias)

    torch.manual_seed(0)
    model, x = Weights(torch.nn.Linear(96, 64)), torch.randn(5, 96)
    sparsify = srelax.SparsifyWeights(decide="predict")
    compiled = srelax.from_torch(model, (x,), sparsify=sparsify)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert [layer.operator for layer in sparsify.layers] == ["linear"]
    text = lowered(srelax.from_torch(model, (x,)).mod, native_target()).script()
    assert "dequantize" not in text[text.index("def main") :]


def test_conversions_alone() -> None:
    class Conversions(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            scales, zeros = torch.tensor([0.1, 0.3, 0.02]), torch.tensor([1, -4, 0])
            by_channel = q.quantize_per_channel(x, scales, zeros, 1, -128, 127, torch.int8)
            wide = q.quantize_per_tensor(x, torch.tensor(0.01), torch.tensor(5), -32768, 32767, torch.int16)
            real = q.dequantize_per_tensor(wide, torch.tensor(0.01), torch.tensor(5), -32768, 32767, torch.int16)
            return by_channel, wide, real, q.dequantize_per_channel(by_channel, scales, zeros, 1, -128, 127, torch.int8)

    model, x = Conversions(), torch.linspace(-20, 20, 123).view(41, 3)
    for found, expected in zip(srelax.from_torch(model, (x,))(x), model(x), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)
