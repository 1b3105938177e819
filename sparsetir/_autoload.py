# SPDX-License-Identifier: Apache-2.0
"""Entry point that TVM calls at the end of ``import tvm`` (group ``tvm.backends``).

It only names the dialect; the parser and the compiler are imported when a program first asks for them.
"""

from __future__ import annotations


def load() -> None:
    """Make ``from tvm.script import sparsetir`` work. Calling it again changes nothing."""
    # Inside the function: when TVM calls this, `tvm` itself is still being imported.
    from tvm.script import register_dialect

    register_dialect("sparsetir", "sparsetir.script")
