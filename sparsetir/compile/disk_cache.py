# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled kernels: where it is, whether it is safe to load from, and whole files in it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsetir.errors import SparseTIRError, WriteError

CACHE_VARIABLE = "SPARSETIR_CACHE"
ROOM = 1 << 24  # bytes that a library may take, its object files included

_warned: set[Path] = set()


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: ``SPARSETIR_CACHE``, by default below ``~/.cache``.

    None if it is switched off, there is no home directory, or others may write to it: kernels are code, which would be
    theirs.
    """
    folder = _named_folder()
    if folder is None:
        return None
    try:
        fault = _fault(folder)
    except (OSError, ValueError) as error:
        fault = str(error)
    if not fault:
        return folder
    if folder not in _warned:
        _warned.add(folder)
        advice = f"set {CACHE_VARIABLE} to a folder of your own, or to off"
        warnings.warn(f"compiled kernels are not kept in {folder}: {fault}; {advice}", RuntimeWarning, stacklevel=2)
    return None


def _named_folder() -> Path | None:
    named = os.environ.get(CACHE_VARIABLE)
    if named in ("", "0", "off"):
        return None
    try:
        if named is not None:
            return Path(named).expanduser().absolute()
        # An empty or relative XDG_CACHE_HOME counts as none.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "sparsetir"
    except RuntimeError:  # there is no home directory
        return None


def _fault(folder: Path) -> str:
    """Why a folder is not safe to load code from, empty if it is; of one that is not there, the one it would be in."""
    missing = not folder.exists()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if not hasattr(os, "getuid"):
        return ""
    if found.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to another user"
    others = stat.S_IWOTH if _is_private(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    # Where the sticky bit is set, as in /tmp, nobody else can replace what is made there.
    is_open = bool(found.st_mode & others) and not (missing and found.st_mode & stat.S_ISVTX)
    return f"other users may write to {folder}" if is_open else ""


def _is_private(group: int) -> bool:
    """Whether a group is that of the user alone, which many systems make for each."""
    try:
        import grp
        import pwd

        found = grp.getgrgid(group)
        user = pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return False
    return found.gr_name == user and not set(found.gr_mem) - {user}


# ---------------------------------------------------------------------------------------------- files


def digest(library: Path) -> str:
    """What tells a damaged library from the one that was written."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def write(library: Any, path: Path, facts: dict[str, Any]) -> None:
    """Write a library and its metadata; readers see all of them or nothing, also after a power cut.

    Raises
    ------
    OSError
        There is no room.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        check_room(Path(folder))
        whole, beside = Path(folder) / path.name, Path(folder) / "facts.json"
        library.export_library(str(whole), workspace_dir=folder)
        beside.write_text(json.dumps({**facts, "digest": digest(whole)}))
        for each in (whole, beside):
            _sync(each)
        beside.replace(path.with_suffix(".json"))
        whole.replace(path)


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write what is known of a library beside it, all or nothing.

    Raises
    ------
    OSError
        There is no room.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        whole.write_text(json.dumps(facts))
        _sync(whole)
        whole.replace(path)


def check_room(folder: Path, size: int = ROOM) -> None:
    """Raise an OSError where a disk has no room: LLVM ends the process when it cannot write."""
    with tempfile.TemporaryFile(dir=folder) as trial:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(trial.fileno(), 0, size)
        elif shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def writing(path: Path, size: int = ROOM) -> Iterator[None]:
    """Make sure that a file of `size` bytes can be written, and name it where that fails all the same."""
    try:
        for folder in {path.parent, Path(tempfile.gettempdir())}:
            check_room(folder, size)
        yield
    except SparseTIRError:
        raise
    except OSError as error:
        raise WriteError(f"{path.name} cannot be written: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


__all__ = ["cache_folder", "digest", "write", "write_facts", "writing"]
