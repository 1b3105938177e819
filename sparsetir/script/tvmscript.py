# SPDX-License-Identifier: Apache-2.0
"""The names of the dialect, for ``from sparsetir import T``: an import that editors and type checkers can follow.

They are those of ``from tvm.script import sparsetir as T``. Types and docstrings are in ``tvmscript.pyi``.
"""

from __future__ import annotations

from sparsetir.script.parser import *  # noqa: F403
from sparsetir.script.parser import prim_func as prim_func
from sparsetir.script.parser import sp as sp
