# SPDX-License-Identifier: Apache-2.0
"""Write files that appear under their names only when they are complete, and locate the folder of compiled kernels.

Every file of the package is written by `replacing`, or by `cache_text` where it is only there to save time. What may be
continued after an interruption has a name of its own until then: see `sparsetir.blocks.results`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

from sparsetir.errors import ArgumentError, SparseTIRError, WriteError

PREFIX = ".partial-"
ELF_HEAD = 64  # bytes
SEAL = b"SparseTIR library\n"  # followed by a digest
SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size

_warned: set[Path] = set()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file or folder that takes the name `path` when the block ends without an error.

    It lies in the same folder and has the same suffix. A device or a pipe is written to as it is, and a symbolic link
    stays one. The former file of that name is left as it was until then, and if anything fails.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    path = Path(os.path.realpath(path))
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        yield path
        return
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(13, "the file is read-only", str(path))
    partial = path.with_name(f"{PREFIX}{secrets.token_hex(6)}{path.suffix}")
    try:
        yield partial
        if mode is not None:
            partial.chmod(stat.S_IMODE(mode))
        sync(partial)
        os.replace(partial, path)
    finally:
        remove(partial)


@contextlib.contextmanager
def writing_file(path: Path, name: str = "", *, makes_folder: bool = False) -> Iterator[Path]:
    """Write a file that a user names by `replacing`; name the argument if it cannot be written.

    Raises
    ------
    WriteError
    """
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            yield partial
    except SparseTIRError:
        raise
    except OSError as error:
        where = f"{name}: {path}" if name else f"{path}"
        raise WriteError(f"{where} cannot be written: {error.strerror or error}. Choose another name.") from error


def check_folder_of(path: Path, name: str = "path") -> None:
    """Raise unless the folder exists in which a file or folder is to be made."""
    if not path.parent.is_dir():
        raise ArgumentError(f"{name}: there is no folder {path.parent} to save {path.name} in. Make it first.")


def write_text(path: Path, text: str, name: str = "", *, makes_folder: bool = False) -> Path:
    """Write a text file that a user names.

    Raises
    ------
    WriteError
    """
    with writing_file(path, name, makes_folder=makes_folder) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def cache_text(path: Path, text: str) -> None:
    """Write a file that only saves time, and its folder, by `replacing`: warn once if the folder cannot be written."""
    try:
        make_private(path.parent)
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        warn_unwritable(path.parent, error)


def warn_unwritable(folder: Path, error: OSError) -> None:
    """Warn that a cache is left out, once for each folder."""
    if folder not in _warned:
        _warned.add(folder)
        fault = error.strerror or str(error)
        message = f"nothing is kept in {folder}: {fault}; set SPARSETIR_CACHE to another folder, or to off"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def sync(path: Path) -> None:
    """Return when a file, or all files below a folder, are on the disk."""
    for file in [path] if path.is_file() else [below for below in path.rglob("*") if below.is_file()]:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def seal(path: Path) -> None:
    """Append a digest to a shared library; loaders do not read behind its sections."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as stream:
        stream.write(SEAL + digest)


def is_whole_library(path: Path) -> bool:
    """Return whether a shared library is as it was sealed: loading a damaged one may end the process.

    One without a seal must have the length that its header says. Other files than ELF's of 64 bits are taken to be
    whole.
    """
    content = path.read_bytes()
    code, seal_of_it = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    if seal_of_it.startswith(SEAL):
        return seal_of_it[len(SEAL) :] == hashlib.sha256(code).digest()
    head = content[:ELF_HEAD]
    if head[:5] != b"\x7fELF\x02":
        return True
    if len(head) < ELF_HEAD:
        return False
    order = "<" if head[5] == 1 else ">"
    start, (size, count) = struct.unpack_from(f"{order}Q", head, 40)[0], struct.unpack_from(f"{order}HH", head, 58)
    return bool(start + size * count <= len(content))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """Return kind and permissions of what has a name; None if nothing has it."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------------------------------- cache folder


CACHE_VARIABLE = "SPARSETIR_CACHE"

_warned_folders: set[Path] = set()


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels: ``SPARSETIR_CACHE``, by default below ``~/.cache``.

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
    if folder not in _warned_folders:
        _warned_folders.add(folder)
        advice = f"set {CACHE_VARIABLE} to a folder of your own, or to off"
        warnings.warn(f"compiled kernels are not kept in {folder}: {fault}; {advice}", RuntimeWarning, stacklevel=2)
    return None


def _named_folder() -> Path | None:
    setting = os.environ.get(CACHE_VARIABLE)
    if setting in ("", "0", "off"):
        return None
    try:
        if setting is not None:
            return Path(setting).expanduser().absolute()
        # An empty or relative XDG_CACHE_HOME counts as none.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "sparsetir"
    except RuntimeError:  # there is no home directory
        return None


def _fault(folder: Path) -> str:
    """Return why loading code from a folder is unsafe, empty if it is safe; of a missing folder, check its parent."""
    missing = not folder.exists()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder"
    if not hasattr(os, "getuid"):
        return ""
    if status.st_uid not in (os.getuid(), 0):
        return f"{folder} belongs to another user"
    group_bits = stat.S_IWOTH if _is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    # Where the sticky bit is set, as in /tmp, other users cannot replace the files made there.
    is_open = bool(status.st_mode & group_bits) and not (missing and status.st_mode & stat.S_ISVTX)
    return f"other users may write to {folder}" if is_open else ""


def _is_private(group: int) -> bool:
    """Return whether a group is that of the user alone, which many systems make for each."""
    try:
        import grp
        import pwd

        entry = grp.getgrgid(group)
        user = pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return False
    return entry.gr_name == user and not set(entry.gr_mem) - {user}


__all__ = [
    "CACHE_VARIABLE",
    "PREFIX",
    "cache_folder",
    "cache_text",
    "check_folder_of",
    "is_whole_library",
    "make_private",
    "remove",
    "replacing",
    "seal",
    "sync",
    "warn_unwritable",
    "write_text",
    "writing_file",
]
