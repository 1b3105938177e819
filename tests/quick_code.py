# SPDX-License-Identifier: Apache-2.0
"""Machine code that is made quickly, for tests that judge loops and numbers, and loops without a schedule."""

from __future__ import annotations

import contextlib
import textwrap
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from each import FULL

# LLVM's optimisation level is not that of its code generator, which TVM always asks for its best: these are the passes
# that take most of its time.
PLAIN_CODE = [
    "-fast-isel:bool=1",
    "-disable-lsr:bool=1",
    "-disable-cgp:bool=1",
    "-enable-misched:bool=0",
    "-disable-machine-licm:bool=1",
    "-disable-machine-cse:bool=1",
    "-disable-constant-hoisting:bool=1",
    "-disable-peephole:bool=1",
    "-disable-tail-duplicate:bool=1",
    "-disable-early-taildup:bool=1",
    "-disable-copyprop:bool=1",
    "-disable-branch-fold:bool=1",
    "-disable-block-placement:bool=1",
    "-disable-post-ra:bool=1",
    "-optimize-regalloc:int=2",  # of LLVM's "true", "false" and "unset": the fast register allocator
]
UNSCHEDULED = "unscheduled"  # a key of targets, which keeps kernels with and without a schedule apart
OF_UNSCHEDULED: dict[str, OrderedDict[Any, Any]] = {}  # values of the package's caches by the name of the cache
IN_A_CHILD = f"""\
import contextlib, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from quick_code import plain_loops, quick_code
quick = contextlib.ExitStack()
quick.enter_context(quick_code())
quick.enter_context(plain_loops())
"""


def quickly(code: str) -> str:
    """Return the code of a Python process that builds its kernels as the tests do that only judge numbers."""
    return textwrap.dedent(code) if FULL else IN_A_CHILD + textwrap.dedent(code)


@contextlib.contextmanager
def quick_code(level: int = 0) -> Iterator[None]:
    """LLVM does not optimise what is built for this machine, or at level 1 removes what is not used."""
    with _changed_target({"opt-level": level, "cl-opt": PLAIN_CODE}):
        yield


@contextlib.contextmanager
def plain_loops() -> Iterator[None]:
    """Programs without choices of their own keep their loops as they are lowered, which takes a fifth of the time."""
    from tvm import s_tir

    from sparsetir import schedules
    from sparsetir.lower.annotations import CHOICES
    from sparsetir.relax import dense

    schedule = schedules.schedule

    def unscheduled(mod: Any, choices: Any = None, **options: Any) -> Any:
        if choices is not None or any(CHOICES in (func.attrs or {}) for func in mod.functions.values()):
            return schedule(mod, choices, **options)
        return s_tir.Schedule(mod)

    def unscheduled_kernel(func: Any) -> Any:
        return dense.in_arithmetic(func).with_attr("tirx.is_scheduled", True)

    with (
        _separate_caches(),
        _changed_target({"keys": ["cpu", UNSCHEDULED]}),
        mock.patch.object(schedules, "schedule", unscheduled),
        mock.patch.object(dense, "scheduled", unscheduled_kernel),
    ):
        yield


@contextlib.contextmanager
def _separate_caches() -> Iterator[None]:
    """Caches of the package have values of their own, which they had the last time."""
    from sparsetir.utils.caches import CACHES

    kept = {name: cache._values for name, cache in CACHES.items()}
    for name, cache in CACHES.items():
        cache._values = OF_UNSCHEDULED.setdefault(name, OrderedDict())
    try:
        yield
    finally:
        for name, cache in CACHES.items():
            OF_UNSCHEDULED[name], cache._values = cache._values, kept.get(name, OrderedDict())


@contextlib.contextmanager
def _changed_target(changes: dict[str, Any]) -> Iterator[None]:
    """The target of this machine has other properties."""
    # Not at the top: the process that hands tests out to the workers needs no TVM.
    import tvm

    from sparsetir.codegen.target import native_target

    detect = tvm.target.Target.from_device
    made = staticmethod(lambda device: tvm.target.Target({**detect(device).export(), **changes}))
    with mock.patch.object(tvm.target.Target, "from_device", made):
        native_target.cache_clear()
        try:
            yield
        finally:
            native_target.cache_clear()
