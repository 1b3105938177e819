# SPDX-License-Identifier: Apache-2.0
"""Import of packages that only an extra installs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from sparsetir.errors import SparseTIRError


class MissingPackageError(SparseTIRError, ImportError):
    """A feature needs an optional package that is not installed or does not load."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or say which extra of this package brings it.

    Raises
    ------
    MissingPackageError
        If the import fails.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        advice = f"try: pip install 'sparsetir[{extra}]'"
        message = f"{purpose} needs {package}, which cannot be imported ({error}); {advice}"
        raise MissingPackageError(message) from error
