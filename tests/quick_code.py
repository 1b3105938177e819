# SPDX-License-Identifier: Apache-2.0
"""Machine code that is made quickly, for tests that judge loops and numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

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


@contextlib.contextmanager
def quick_code() -> Iterator[None]:
    """LLVM does not optimise what is built for this machine."""
    # Not at the top: the process that hands tests out to the workers needs no TVM.
    import tvm

    from sparsetir.codegen.target import native_target

    def unoptimised(target: Any) -> Any:
        return tvm.target.Target({**target.export(), "opt-level": 0, "cl-opt": PLAIN_CODE})

    detect = tvm.target.Target.from_device
    made = staticmethod(lambda device: unoptimised(detect(device)))
    with mock.patch.object(tvm.target.Target, "from_device", made):
        native_target.cache_clear()
        yield
    native_target.cache_clear()
