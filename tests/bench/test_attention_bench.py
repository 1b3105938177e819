# SPDX-License-Identifier: Apache-2.0
"""The table of attention under masks, and its masks."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from sparsetir.bench import attention  # noqa: E402


@pytest.mark.parametrize(("name", "share"), [("blocks16", 0.15), ("window", 0.12), ("causal", 0.12)])
def test_masks(name: str, share: float) -> None:
    mask = attention.mask_of(name, 256)
    assert mask.diagonal().all()
    assert abs(mask.mean() - share) < 0.03


@pytest.mark.slow
def test_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # Other tests of the process keep theirs.
    monkeypatch.setattr("sparsetir.utils.threads.set_num_threads", lambda threads: None)
    options = ["--ways", "torch,sparsetir", "--dtypes", "float32", "--length", "64", "--heads", "1", "--repeat", "1"]
    attention.main([*options, "--masks", "blocks16", "--features", "8"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")][3:] == [
        f"{way}, {each}" for each in ("forward", "both") for way in ("torch", "sparsetir")
    ]
    assert all(float(cell) > 0 for cell in row.strip("|").split("|")[3:])


@pytest.mark.parametrize("is_causal", [False, True])
def test_ways_of_jagged_batches_agree(is_causal: bool) -> None:
    lengths = np.array([3, 1, 6])
    tensors = [torch.randn(10, 2, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    ways = attention.jagged_ways(lengths, is_causal)
    expected = ways["padded"](*tensors)
    for name in ("loop", "sparsetir"):
        torch.testing.assert_close(ways[name](*tensors), expected)
