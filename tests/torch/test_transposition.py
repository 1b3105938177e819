# SPDX-License-Identifier: Apache-2.0
"""Transposed copies are those of torch, in every dtype, for sizes that fill no tile, in one chunk and in several."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sparsetir.torch import transposition  # noqa: E402
from sparsetir.torch.transposition import quantized, transposed  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PAIRS = [(F32, F32), (BF16, BF16), (F16, F16), (torch.uint8, torch.uint8), (F32, BF16), (BF16, F32), (F16, F32)]
SHAPES = [(1, 1), (16, 16), (33, 129), (100, 31), (5, 200), (0, 7)]


@pytest.fixture(params=["one chunk", "several chunks", "torch's copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transposition, "LEAST_ELEMENTS", 1 << 30 if request.param == "torch's copy" else 1)
    monkeypatch.setattr(transposition, "LEAST_SHARE", 64 if request.param == "several chunks" else 1 << 30)
    monkeypatch.setattr(transposition, "get_num_threads", lambda: 3)


def special(rows: int, cols: int) -> torch.Tensor:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)) * 50
    for first, value in enumerate((float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 3.3e38, 1.00390625)):
        x.view(-1)[first :: 7 + first] = value
    return x


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("given", "wanted"), PAIRS, ids=str)
def test_copies_are_those_of_torch(given: torch.dtype, wanted: torch.dtype) -> None:
    for shape in SHAPES:
        x = special(*shape)
        x = x.nan_to_num().abs().clamp(0, 255).to(given) if given is torch.uint8 else x.to(given)
        result, expected = transposed(x, wanted), x.t().to(wanted).contiguous()
        assert result.is_contiguous()
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(result.float()), torch.signbit(expected.float())) or bool(
            expected.isnan().any()
        )
        torch.testing.assert_close(transposed(x.t(), wanted), x.to(wanted), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("way")
def test_bytes_are_rounded_to_even_and_clamped() -> None:
    for shape in SHAPES:
        x = special(*shape).nan_to_num(posinf=1e30, neginf=-1e30)
        x.view(-1)[2::5] = 0.05 * 2.5
        expected = ((x / 0.05).round() + 128).clamp(0, 255).to(torch.uint8)
        assert torch.equal(quantized(x, 0.05, 128, transposes=True), expected.t())
        assert torch.equal(quantized(x, 0.05, 128), expected)
        assert torch.equal(quantized(x.bfloat16(), 0.05, 128, transposes=True), quantized(x.bfloat16(), 0.05, 128).t())
