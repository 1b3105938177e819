# SPDX-License-Identifier: Apache-2.0
"""Version of the package, and a digest of its sources for cache keys."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sparsetir.utils.files import caching

__version__ = "0.2.0"  # as in pyproject.toml
DIGEST_DIGITS = 64


@cache
def source_files() -> tuple[Path, ...]:
    """Return every file of the installed package that may decide what is compiled, in a fixed order.

    `schedules` and `tuning` are installed inside of the package, but lie beside it in a checkout.
    """
    package = Path(__file__).parents[1]
    specs = [find_spec(f"sparsetir.{name}") for name in ("schedules", "tuning")]
    beside = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    roots = [package, *(folder for folder in beside if package not in folder.parents)]
    return tuple(sorted(path for root in roots for kind in ("*.py", "*.c") for path in root.rglob(kind)))


@cache
def source_digest() -> str:
    """Return a hash of the contents of all source files: other sources may make other machine code."""
    digest = hashlib.sha256()
    for path in source_files():
        content = path.read_bytes()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def quick_source_digest(folder: Path) -> str:
    """Return `source_digest`, read from `folder` where no source file was replaced or written since it was stored.

    Parameters
    ----------
    folder : Path
        A folder that only this user can write to. The digest is stored below the sizes, times and numbers of the files.
    """
    listing = hashlib.sha256()
    for path in source_files():
        status = path.stat()
        listing.update(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}\n".encode())
    stored = folder / "sources" / listing.hexdigest()[:32]
    with suppress(OSError, ValueError):
        if len(text := stored.read_text()) == DIGEST_DIGITS:
            return text
    digest = source_digest()
    with caching(stored) as partial:
        partial.write_text(digest)
    return digest


__all__ = ["__version__", "quick_source_digest", "source_digest", "source_files"]
