# SPDX-License-Identifier: Apache-2.0
"""The benchmark of products over blocks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from sparsetir.bench import blocks


@pytest.mark.parametrize("is_cold", [False, True])
def test_products_of_families(is_cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anndata")
    forgotten = []

    def measure(way: str, path: Path, width: int, memory: str) -> dict[str, float]:
        if way.endswith("pair"):
            return blocks.run_pair(str(path), width, memory, is_cold=way != "pair")
        return {"seconds": 1.0, "peak": 2**20}

    monkeypatch.setattr(blocks, "measure", measure)
    monkeypatch.setattr(blocks, "forget", forgotten.append)
    monkeypatch.setattr(blocks, "PAIRS", 2)
    named = [("rmat", blocks.write_matrix("rmat", 4000, tmp_path))]
    head, rule, *rows = blocks.products(named, "1MiB", "cold pair" if is_cold else "pair")
    assert head.count("|") == rule.count("|") == 7
    assert [row.split("|")[1:3] for row in rows] == [[" rmat ", f" {n} "] for n in blocks.WIDTHS]
    assert all(float(row.split("|")[5]) > 0 for row in rows)
    assert len(forgotten) == (8 if is_cold else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the page cache of Linux")
def test_files_are_forgotten(tmp_path: Path) -> None:
    from sparsetir.io.stores import is_cached

    file = tmp_path / "a"
    file.write_bytes(bytes(1 << 20))
    if not is_cached(str(file), 0):
        pytest.skip("this file system does not tell what is in memory")
    for _ in range(20):  # Linux keeps a page that another core is about to put on its lists
        blocks.forget(str(tmp_path))
        if not is_cached(str(file), 0):
            return
        time.sleep(0.05)
    raise AssertionError("the file is still in memory")
