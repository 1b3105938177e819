# SPDX-License-Identifier: Apache-2.0
"""Files appear under their names when they are complete: whatever fails, what was there before stays."""

from __future__ import annotations

import ast
import errno
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import cli, ops
from sparsetir.blocks.results import Checkpoint, NpyResult
from sparsetir.codegen import cache, calibration
from sparsetir.codegen.pipeline import PassTrace
from sparsetir.errors import FileFormatError, WriteError
from sparsetir.relax import CompiledModel
from sparsetir.relax.training.trainer import TrainStep
from sparsetir.utils import files, packages
from sparsetir.workloads import plot
from tests.quick_code import quick_code

A = sp.csr_array(np.eye(4, dtype="float32"))
OLD = b"what was there before"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """A kernel that is built once."""
    with quick_code():
        yield sparsetir.build(ops.spmv())


def model() -> Any:
    """Return the parts of a model that `CompiledModel.save` needs."""
    return SimpleNamespace(
        mod=None, executable=SimpleNamespace(export_library=lambda path: Path(path).write_bytes(OLD))
    )


def checkpoint(folder: Path) -> Path:
    sums = Checkpoint(folder / "y", {})
    sums.next_save = 0.0
    sums.save(1, np.ones(3))
    return folder / "y.sums.npz"


def figure(folder: Path) -> Path:
    pytest.importorskip("matplotlib")
    return plot.save(plot.new_figure(1, 1)[0], folder / "one.png")


def trained(folder: Path) -> Path:
    step = SimpleNamespace(params={"w": np.ones(3)}, state={"count": 1})
    return TrainStep.save(step, folder / "state.npz")  # type: ignore[arg-type]


def traced(folder: Path) -> Path:
    trace = SimpleNamespace(name="spmv", _repr_html_=lambda: "<p>passes</p>")
    return PassTrace.html(trace, folder / "passes.html")  # type: ignore[arg-type]


def json_of(folder: Path) -> Path:
    cli.write_json(str(folder / "out.json"), {"one": 1})
    return folder / "out.json"


def facts(folder: Path) -> Path:
    cache.write_facts(folder / "facts.json", {"one": 1})
    return folder / "facts.json"


def library(folder: Path, kernel: Any) -> Path:
    cache._keep(kernel.compiled, folder / "kernel.so")
    return folder / "kernel.so"


#: each writes one file, or a folder, into a folder
Writer = Callable[[Path, Any], Path]
WRITERS: dict[str, Writer] = {
    "kernel": lambda folder, kernel: kernel.save(folder / "spmv.kernel"),
    "exported": lambda folder, kernel: kernel.export(folder / "spmv.so"),
    "trace": lambda folder, kernel: traced(folder),
    "model": lambda folder, kernel: CompiledModel.save(model(), folder / "model.so"),
    "training": lambda folder, kernel: trained(folder),
    "figure": lambda folder, kernel: figure(folder),
    "json": lambda folder, kernel: json_of(folder),
    "checkpoint": lambda folder, kernel: checkpoint(folder),
    "text": lambda folder, kernel: files.write_text(folder / "text.md", "words"),
}
NEW = {  # these refuse to replace what is there
    "folder": lambda folder, kernel: sparsetir.save_blocks(A, folder / "blocks"),
    "h5": lambda folder, kernel: sparsetir.save_blocks(A, folder / "blocks.h5"),
}
CACHES: dict[str, Writer] = {
    "library": library,
    "profile": lambda folder, kernel: calibration.write_profile(calibration.family_profile()) or folder,
    "sources": lambda folder, kernel: packages.quick_source_digest(folder) and folder,
}


def left(folder: Path) -> list[str]:
    """Return the remains of an unfinished file."""
    return [path.name for path in folder.rglob(f"{files.PREFIX}*")]


def full(_path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", [*WRITERS, *NEW])
def test_a_full_disk_leaves_what_was_there(
    name: str, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = {**WRITERS, **NEW}[name]
    (tmp_path / "first").mkdir()
    path = write(tmp_path / "first", kernel)
    assert path.exists()
    assert not left(tmp_path)
    second = tmp_path / "second"
    second.mkdir()
    if name in WRITERS:
        (second / path.name).write_bytes(OLD)
    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(WriteError, match=os.strerror(errno.ENOSPC)):
        write(second, kernel)
    assert not left(tmp_path)
    assert (second / path.name).read_bytes() == OLD if name in WRITERS else not (second / path.name).exists()


@pytest.mark.parametrize("name", [*WRITERS, *NEW])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_process_leaves_what_was_there(
    name: str, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = {**WRITERS, **NEW}[name]
    if name == "figure":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(files, "sync", lambda _path: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if not child:
        signal.alarm(120)
        write(tmp_path, kernel)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == set(left(tmp_path))


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_cannot_be_written_is_one_warning(
    name: str, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path))
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setattr(files, "sync", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            CACHES[name](tmp_path, kernel)
    assert [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)] == [
        str(w.message) for w in caught if "nothing is kept" in str(w.message)
    ]
    assert len([w for w in caught if "nothing is kept" in str(w.message)]) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cache_whose_folder_cannot_be_made_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_warned", set())
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="nothing is kept"):
        files.cache_text(tmp_path / "file" / "facts", "text")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files.cache_text(tmp_path / "file" / "facts", "text")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_readers_see_whole_files_while_processes_write(tmp_path: Path) -> None:
    path, children = tmp_path / "shared", []
    texts = [str(n) * 100_000 for n in range(2)]
    for text in texts:
        child = os.fork()
        if not child:
            signal.alarm(120)
            for _ in range(50):
                files.write_text(path, text)
            os._exit(0)
        children.append(child)
    while children:
        if path.exists():
            assert path.read_text() in texts
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0)
    assert not left(tmp_path)


def test_a_disk_without_room_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_arguments: full(tmp_path))
    with pytest.raises(WriteError, match=os.strerror(errno.ENOSPC)):
        NpyResult(tmp_path / "y.npy", (4, 4), "float32", {})
    assert not list(tmp_path.iterdir())


def test_links_stay_links_and_devices_are_written_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(OLD)
    target.chmod(0o600)
    link.symlink_to(target)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    files.write_text(Path(os.devnull), "new")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("at", [0, 5, 30, 60, 1000, -1])
def test_damaged_kernels_are_named(at: int, kernel: Any, tmp_path: Path) -> None:
    path = kernel.save(tmp_path / "spmv.kernel")
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[at] ^= 1
    for content in (bytes(changed), whole[:at]):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=r"spmv\.kernel"):
            sparsetir.load(path)


#: functions that write a file under a name that no reader knows, or continue one
OWN = {
    "runtime/serialization.py": {"_load_shipped"},
    "codegen/cache.py": {"_load_shipped"},
    "codegen/export.py": {"export"},
    "scipy/libraries.py": {"compile_library"},
    "blocks/products.py": {"__init__", "finish"},
    "blocks/results.py": {"__init__", "_create", "_publish", "append", "flush", "close", "write"},
    "relax/model.py": {"_unpickled"},
    "utils/memory.py": {"forget_peak"},
    "train/judge.py": {"read"},
}
WRITING = {"write_text", "write_bytes", "savez", "savez_compressed", "save", "tofile", "dump", "rename"}


@pytest.mark.slow
def test_every_writer_goes_through_one_module() -> None:
    """A file that is written elsewhere must be a new one that no reader knows."""
    package = Path(files.__file__).parents[1]
    roots = {package, *(path.parent for path in packages.source_files() if package not in path.parents)}
    faults = []
    for path in {path for root in roots for path in root.rglob("*.py")} - {Path(files.__file__)}:
        name = "/".join(path.parts[-2:])
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in OWN.get(name, ()):
                faults += [f"{name}: {function.name}" for call in ast.walk(function) if writes(call, function)]
    assert not faults


def writes(node: ast.AST, function: ast.FunctionDef) -> bool:
    """Return whether a node writes a file that `with ... as partial` did not name."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Attribute, ast.Name)):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    words = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    if words & {"partial", "whole", "beside"}:
        return False
    if called == "open":
        return any(
            isinstance(a, ast.Constant) and isinstance(a.value, str) and set(a.value) & set("wax+") and len(a.value) < 4
            for a in [*node.args, *(k.value for k in node.keywords)]
        )
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if called in ("savez", "savez_compressed", "save"):
        return owner == "np"
    return (
        called in ("write_bytes", "tofile")
        or (called == "write_text" and owner != "")
        or (owner == "os" and called in ("replace", "rename"))
        or (owner == "json" and called == "dump")
    )
