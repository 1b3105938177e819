# SPDX-License-Identifier: Apache-2.0
"""The cache on disk: damaged entries, folders of others, full disks, no home."""

from __future__ import annotations

import importlib
import os
import random
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.codegen.cache import CACHE_VARIABLE, cache_folder
from sparsetir.utils import packages
from sparsetir.utils.files import cache_text

building = importlib.import_module("sparsetir.codegen.cache")
A = sp.csr_array(np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3]], "float32"))
B = np.arange(12, dtype="float32").reshape(3, 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with building.separate():
        yield tmp_path / "cache"


def written(folder: Path) -> Path:
    """The library of a kernel, on disk."""
    building.forget()
    sparsetir.build(sparsetir.ops.spmm())
    building.write_cache()
    return next(folder.glob("*.so"))


def loaded() -> bool:
    """Whether the kernel came from the disk; right in any case."""
    building.forget()
    kernel = sparsetir.build(sparsetir.ops.spmm())
    np.testing.assert_array_equal(kernel(A=A, B=B), A @ B)
    return building.waiting() == 0


@pytest.mark.slow
def test_whole_entries_are_loaded_and_damaged_ones_compiled_anew(folder: Path) -> None:
    library = written(folder)
    assert loaded()
    good, rng = library.read_bytes(), random.Random(0)
    for n in range(12):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        library.unlink()  # what is loaded stays as it is
        library.write_bytes(data[: len(data) // 2] if n == 0 else data)
        assert not loaded()
    library.unlink()
    library.write_bytes(good)
    assert loaded()
    facts = library.with_suffix(".json")
    for text in ('{"searched": []}', "[]", '{"digest": 3}', "", "[" * 100000):
        facts.write_text(text)
        assert not loaded()


def test_nothing_else_is_left_in_the_folder(folder: Path) -> None:
    library = written(folder)
    folders = [path for path in folder.iterdir() if path.is_dir()]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [f"{library.stem}.json", library.name]
    assert [path.name for path in folders] in ([], ["sources"])  # the hash of those that this process has read
    for private in (folder, *folders):
        assert stat.S_IMODE(private.stat().st_mode) & 0o077 == 0


def test_the_folder_of_any_first_file_is_private(tmp_path: Path) -> None:
    cache_text(tmp_path / "cache" / "sources" / "digest", "0")
    for private in (tmp_path / "cache", tmp_path / "cache" / "sources"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_an_empty_or_relative_xdg_folder_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("", "relative", None):
        monkeypatch.setenv("XDG_CACHE_HOME", named) if named is not None else monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_folder() == tmp_path / ".cache" / "sparsetir"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "sparsetir"


def test_the_folder_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, "~/kernels")
    assert cache_folder() == tmp_path / "kernels"
    for off in ("", "0", "off"):
        monkeypatch.setenv(CACHE_VARIABLE, off)
        assert cache_folder() is None


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one warning for a folder that is not used."""
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.setattr("sparsetir.utils.files._warned_folders", set())
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept in ") as caught:
        assert cache_folder() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_folder() is None
    return str(caught[0].message)


def test_folders_that_are_not_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "other users may write to" in refused(shared, monkeypatch)
    assert "other users may write to" in refused(shared / "inside", monkeypatch)
    (tmp_path / "file").touch()
    assert "is no folder" in refused(tmp_path / "file", monkeypatch)
    assert "File name too long" in refused(tmp_path / ("x" * 300), monkeypatch)
    advice = refused(shared, monkeypatch)
    assert advice.endswith("set SPARSETIR_CACHE to a folder of your own, or to off")
    shared.chmod(0o1777)  # as /tmp
    monkeypatch.setenv(CACHE_VARIABLE, str(shared / "inside"))
    assert cache_folder() == shared / "inside"
    assert "other users may write to" in refused(shared, monkeypatch)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner")
def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert "belongs to another user" in refused(tmp_path, monkeypatch)


def test_a_group_of_the_user_alone_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o775)
    monkeypatch.setattr("sparsetir.utils.files._is_private", lambda _: True)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setattr("sparsetir.utils.files._is_private", lambda _: False)
    assert "other users may write" in refused(tmp_path, monkeypatch)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() is None


@pytest.mark.slow
def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    code = """
import atexit, resource
atexit.register(lambda: print("handler"))
import numpy as np, scipy.sparse as sp, sparsetir
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
A = sp.csr_array(np.eye(3, dtype="float32"))
kernel = sparsetir.build(sparsetir.ops.spmm())
print(int(kernel(A=A, B=np.ones((3, 2), "float32")).sum()))
for write in (kernel.export, kernel.save):
    try:
        write("kernel.so")
    except sparsetir.errors.SparseTIRError as error:
        print(str(error).partition(":")[0].replace(" ", "_"))
"""
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    expected = ["6", "kernel.so_cannot_be_written", "kernel.so_cannot_be_written", "handler"]
    assert (done.stdout.split(), done.returncode) == (expected, 0), done.stderr
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [len(path.read_text()) for path in files] == [64]  # the hash of the sources, which fits, and is whole


# ---------------------------------------------------------------------------------------------- cache keys


def test_the_key_covers_every_module_that_the_pipeline_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder or file is listed by hand: a module that moves stays part of the key."""
    import ast

    import test_imports

    reached, open_modules = set(), ["sparsetir.codegen.pipeline", "sparsetir.kernel_factory", "sparsetir.tuning.warm"]
    while open_modules:
        name = open_modules.pop()
        if name not in reached:
            reached.add(name)
            tree = ast.parse(test_imports.paths()[name].read_text(encoding="utf-8"))
            open_modules.extend(test_imports.imported(name, tree))
    assert len(reached) > 100
    assert {test_imports.paths()[name] for name in reached} <= set(packages.source_files())


@pytest.mark.parametrize("change", [b"# another line\n", b""])
def test_a_changed_source_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: bytes) -> None:
    copies = [tmp_path / f"{n}.py" for n in range(3)]
    for copy in copies:
        copy.write_bytes(b"same = 1\n")
    monkeypatch.setattr(packages, "source_files", lambda: tuple(copies))
    before = packages.source_digest.__wrapped__()
    copies[1].write_bytes(change)
    assert packages.source_digest.__wrapped__() != before
