# SPDX-License-Identifier: Apache-2.0
"""Version of the package, and a digest of its sources for cache keys."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"  # as in pyproject.toml


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


__all__ = ["__version__", "source_digest", "source_files"]
