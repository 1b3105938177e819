# SPDX-License-Identifier: Apache-2.0
"""Entry point that TVM calls at the end of ``import tvm`` (group ``tvm.backends``).

It names the dialect and its operators; the parser and the compiler are imported when a program first asks for them.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from typing import Any

GROUP = "tvm.backends"

importlib.import_module("sparsetir.utils.machine")  # counts the cores while this process may still use all of them


def load() -> None:
    """Make ``from tvm.script import sparsetir`` work. Calling it again changes nothing."""
    # Inside the function: when TVM calls this, `tvm` itself is still being imported.
    from tvm.script import register_dialect
    from tvm.tirx import register_tir_pipeline

    importlib.import_module("sparsetir.ir.dialect")  # so that programs can be unpickled wherever TVM is
    register_dialect("sparsetir", "sparsetir.script")
    register_tir_pipeline("sparsetir", _pipeline)


def ensure() -> None:
    """`load`, unless ``import tvm`` will call it: importing this package alone must not take as long as TVM does."""
    off = os.environ.get("TVM_DEVICE_BACKEND_AUTOLOAD", "1") == "0"
    if "tvm" in sys.modules or off or not any(p.name == "sparsetir" for p in metadata.entry_points(group=GROUP)):
        load()


def _pipeline() -> tuple[Any, Any, Any]:
    from sparsetir.codegen.pipeline import pipeline

    return pipeline()
