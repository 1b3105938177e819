# SPDX-License-Identifier: Apache-2.0
"""The dialect's TVMScript: ``from tvm.script import sparsetir as T``."""

from __future__ import annotations

from sparsetir.script.parser import *  # noqa: F403
from sparsetir.script.parser import prim_func as prim_func
from sparsetir.script.parser import sp as sp
from sparsetir.script.printer import show_programs_as_scripts

show_programs_as_scripts()
