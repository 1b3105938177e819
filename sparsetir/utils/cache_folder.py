# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled kernels: its location, and whether code may be loaded from it (without TVM and numpy)."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

CACHE_VARIABLE = "SPARSETIR_CACHE"

_warned: set[Path] = set()


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
    if folder not in _warned:
        _warned.add(folder)
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


__all__ = ["CACHE_VARIABLE", "cache_folder"]
