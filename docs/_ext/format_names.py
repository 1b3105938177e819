# SPDX-License-Identifier: Apache-2.0
"""Classes of formats under their public names: Sphinx describes a class of another name only as an alias."""

from __future__ import annotations

from typing import Any

from sparsetir import formats


def name_formats() -> None:
    """Give each class the name under which the package has it, in the process of Sphinx."""
    for name in formats.__all__:
        value = getattr(formats, name)
        if isinstance(value, type):
            value.__name__ = name


def setup(app: Any) -> dict[str, bool]:
    """Rename before the reference is generated."""
    app.connect("config-inited", lambda _app, _config: name_formats())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
