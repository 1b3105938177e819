# SPDX-License-Identifier: Apache-2.0
"""Files that are cut, changed, empty, folders or no text end in an error of this package."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import sparsetir
from sparsetir import ops, relax, tuning
from sparsetir.relax.training.trainer import TrainStep
from sparsetir.schedules import Choices
from sparsetir.tuning.model import CostModel
from sparsetir.tuning.train import dataset, judge
from sparsetir.utils import files
from tests.bad_arguments import raw
from tests.quick_code import quick_code

A = sp.csr_array(np.eye(5, dtype="float32"))


def written(write: Callable[[Path], Any]) -> Callable[[Path], Path]:
    """A function that writes a file and returns its path."""

    def make(path: Path) -> Path:
        write(path)
        return path

    return make


def state(path: Path) -> None:
    step = SimpleNamespace(params={"w": np.ones(3, "float32")}, state={"count": 1, "lr": 0.1})
    TrainStep.save(step, path)  # type: ignore[arg-type]


def records(path: Path) -> None:
    """Write one record of a search."""
    database = tuning.Database(path)
    key = tuning.Key("spmv", "0", "0", {"m": 5}, "float32", "llvm", "here", 1, "1")
    database.append(key, tuning.Record(Choices(), seconds=1.0, median=1.0, spread=0.1))
    database.close()


def trained(path: Path) -> Any:
    step = SimpleNamespace(_params={"w": np.ones(3, "float32")}, _slots={}, set=lambda *_arguments: None)
    return TrainStep.load(step, path)  # type: ignore[arg-type]


def sealed(path: Path) -> None:
    sparsetir.build(ops.spmv()).export(path)
    files.seal(path)


#: by name of the file: what writes it, and what reads it
FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "A.mtx": (lambda path: scipy.io.mmwrite(path, A), sparsetir.read),
    "A.npz": (lambda path: sp.save_npz(path, A), sparsetir.read),
    "A.smtx": (lambda path: path.write_text("2, 3, 2\n0 1 2\n0 2\n"), sparsetir.read),
    "A.tns": (lambda path: path.write_text("1 1 1 2.0\n2 2 2 1.0\n"), sparsetir.read),
    "A.tns.gz": (lambda path: path.write_bytes(gzip.compress(b"1 1 1 2.0\n2 2 2 1.0\n")), sparsetir.read),
    "A.h5ad": (lambda path: sparsetir.save_blocks(A, path), sparsetir.open_blocks),
    "A.bsp.h5": (lambda path: sparsetir.save_blocks(A, path), sparsetir.read),
    "state.npz": (state, trained),
    "kernel": (lambda path: sparsetir.build(ops.spmv()).save(path), sparsetir.load),
    "records.jsonl": (records, lambda path: list(tuning.Database(path).everything())),
    "points.jsonl": (records, dataset.recordings),
    "points.jsonl.xz": (lambda path: path.write_bytes(b"\xfd7zXZ\x00"), judge.read),
    "model.json": (lambda path: path.write_text('{"format": 3, "trees": ""}'), CostModel.load),
    "model.so": (sealed, relax.load),
    "trace.json": (
        lambda path: path.write_text(sparsetir.Schedule(ops.spmv()).trace.to_json()),
        lambda path: type(sparsetir.Schedule(ops.spmv()).trace).from_json(path.read_text(errors="surrogateescape")),
    ),
}
FOLDERS = {"A": lambda path: sparsetir.save_blocks(A, path), "A.zarr": lambda path: sparsetir.save_blocks(A, path)}


def damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Contents like those of a sound file, and others that have nothing of it."""
    for share in (0, 1, 10, 35, 50, 80, 99):
        yield f"cut at {share} %", whole[: len(whole) * share // 100]
    for place in range(0, len(whole), max(1, len(whole) // 12)):
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        yield f"byte {place} changed", bytes(changed)
    yield "no text", b"\xff\xfe\x00\x80" * 20
    yield "more behind it", whole + b"\xff\x00more"
    yield "lines of something else", b'[1, 2]\n{}\nnull\n{"format": []}\n' * 3
    yield "deep", b"[" * 20_000


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_end_in_own_errors(name: str, tmp_path: Path) -> None:
    write, read = FILES[name]
    if name.endswith(("h5ad", ".h5")):
        pytest.importorskip("h5py")
        pytest.importorskip("anndata")
    path = tmp_path / name
    with quick_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(path)
        whole, faults = path.read_bytes(), []
        for kind, content in damaged(whole):
            path.unlink()  # a library that is loaded must not change
            path.write_bytes(content)
            faults += [f"{kind}: {fault}"] if (fault := raw(lambda: read(path), {})) else []
        path.unlink()
        faults += [f"missing: {fault}"] if (fault := raw(lambda: read(path), {})) and name != "trace.json" else []
        path.mkdir()
        faults += [f"a folder: {fault}"] if (fault := raw(lambda: read(path), {})) and name != "trace.json" else []
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_damaged_folders_end_in_own_errors(name: str, tmp_path: Path) -> None:
    if name.endswith("zarr"):
        pytest.importorskip("zarr")
        pytest.importorskip("anndata")
    FOLDERS[name](tmp_path / name)
    faults = []
    for file in sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for content in (b"", whole[: len(whole) // 2], b"\xff" * len(whole)):
            file.write_bytes(content)
            if fault := raw(lambda: use(tmp_path / name), {}):
                faults.append(f"{file.relative_to(tmp_path)} of {len(content)} bytes: {fault}")
        file.unlink()
        if fault := raw(lambda: use(tmp_path / name), {}):
            faults.append(f"without {file.relative_to(tmp_path)}: {fault}")
        file.write_bytes(whole)
    assert not faults, "\n".join(faults)


def use(path: Path) -> Any:
    """Multiply a matrix that is read block by block."""
    blocks = sparsetir.open_blocks(path)
    return blocks @ np.ones((blocks.shape[1], 2), "float32")
