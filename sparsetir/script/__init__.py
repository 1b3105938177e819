# SPDX-License-Identifier: Apache-2.0
"""The dialect's TVMScript: ``from tvm.script import sparsetir as T``."""

from sparsetir.script.shown import show_programs_as_scripts

from .parser import *  # noqa: F403
from .parser import prim_func as prim_func
from .parser import sp as sp

show_programs_as_scripts()
