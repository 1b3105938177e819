# SPDX-License-Identifier: Apache-2.0
"""The table of a pruned transformer layer, and the masks that it prunes with."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from sparsetir.bench import pruned  # noqa: E402


@pytest.mark.parametrize(("name", "density"), list(zip(pruned.MASKS, (0.1, 0.2, 0.5, 0.1), strict=True)))
def test_masks_keep_the_largest(name: str, density: float) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    mask = pruned.MASKS[name](weight)
    assert abs(float(mask.float().mean()) - density) < 0.01
    assert float(weight[mask.bool()].abs().mean()) > float(weight.abs().mean())


def test_two_of_four_are_kept_in_each_group() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    assert bool((pruned.two_of_four(weight).view(-1, 4).sum(dim=1) == 2).all())


@pytest.mark.slow
def test_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruned, "set_num_threads", lambda threads: None)  # Other tests of the process keep theirs.
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    ways = [pruned.EAGER, pruned.BFLOAT16, pruned.INT8, "sparsetir float32"]
    sizes = ["--features", "64", "--batch", "1", "--length", "4", "--seconds", "1e-3", "--threads", "1"]
    pruned.main([*sizes, "--weights", "2:4", "--ways", ",".join(ways)])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    table = {row[1]: row for row in rows if row[0] == "2:4"}
    assert list(table) == ways
    assert float(table[pruned.EAGER][4]) == 0
    assert float(table["sparsetir float32"][4]) < 1e-5


@pytest.mark.slow
def test_tables_by_density(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruned, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(pruned, "SHAPES", {"16x1": (16, 1)})
    sizes = ["--features", "64", "--batch", "1", "--length", "8", "--seconds", "1e-3"]
    pruned.main([*sizes, "--densities", "0.25,0.5"])
    tables = capsys.readouterr().out.split("\n\n")
    times, meeting = ([line.split("|")[1:-1] for line in table.splitlines()] for table in tables)
    assert [[cell.strip() for cell in row[:2]] for row in times[2:]] == [
        ["16x1", "25%"],
        ["16x1", "50%"],
        ["2:4", "50%"],
    ]
    assert all(float(cell) > 0 for row in times[2:] for cell in row[2:8])
    assert float(times[2][8]) < 1e-6
    assert float(times[2][10]) < 0.1
    assert meeting[2][0].strip() == "16x1"


@pytest.mark.parametrize(
    ("sparse", "dense", "expected"),
    [([2, 4], [1, 1], "< 10%"), ([1, 3], [2, 2], "20%"), ([1, 2], [3, 3], "> 30%")],
)
def test_break_even_density(sparse: list[float], dense: list[float], expected: str) -> None:
    assert pruned.break_even([0.1, 0.3], sparse, dense) == expected
