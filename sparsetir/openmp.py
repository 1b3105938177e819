# SPDX-License-Identifier: Apache-2.0
"""One pool of threads for kernels and torch.

The threads of a pool wait awake for a while before they sleep. Those of TVM and those of torch's OpenMP would keep the
cores from each other, each time that a kernel follows an operator of torch or the other way round: a time slice of the
system, some milliseconds. So the parallel loops of kernels can run on the threads that torch has.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

SYMBOL = b"__TVMBackendParallelLaunch"  # what compiled modules look up when they are loaded
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
ERRORS = (
    "TVMFFIErrorMoveFromRaised",
    "TVMFFIErrorSetRaised",
    "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIObjectDecRef",
)
LAUNCH = ("TVMBackendParallelLaunch",)


def launcher() -> Any:
    """Let the modules that are loaded from now on ask whose threads they run their parallel loops on.

    Returns
    -------
    Module or None
        It must be kept. Its function `use` sets how many threads of torch's OpenMP to use; 0, as at first, for those of
        TVM. None where torch has other threads than these.
    """
    torch: Any = sys.modules["torch"]
    ffi = tvm_ffi.libinfo.find_libtvm_ffi()
    try:
        # What torch links is found, and not another library of the same name.
        openmp = _addresses(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", OPENMP)
    except (OSError, AttributeError):
        return None
    found = {**openmp, **_addresses(ffi, ERRORS), **_addresses(tvm.libinfo.find_libtvm_runtime(), LAUNCH)}
    made = _loaded({**found, **_header()})
    register = ctypes.CDLL(str(ffi)).TVMFFIEnvModRegisterContextSymbol
    register.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    register(SYMBOL, made["address"]())
    return made


def _addresses(library: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Where functions of a library are, as LLVM writes it."""
    held = ctypes.CDLL(str(library))
    places = {name: ctypes.cast(getattr(held, name), ctypes.c_void_p).value for name in names}
    return {name: f"inttoptr (i64 {place} to ptr)" for name, place in places.items()}


def _header() -> dict[str, str]:
    """What TVM says of this machine at the top and at the end of its modules."""
    nothing = tirx.PrimFunc([], tirx.Evaluate(0)).with_attr("global_symbol", "nothing")
    lines = tvm.compile(nothing, target="llvm").mod.inspect_source("ll").splitlines()
    flag = next(line for line in lines if '!"tvm_target"' in line)
    head = [line for line in lines if line.startswith("target ")]
    return {"head": "\n".join(head), "target": flag.partition(" = ")[2]}


def _loaded(parts: dict[str, str]) -> Any:
    """The machine code."""
    text = Template((files("sparsetir") / "openmp.ll").read_text()).substitute(parts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "openmp.ll")
        path.write_text(text)
        made = tvm.runtime.load_module(str(path))
        made["address"]  # is compiled now
    return made


__all__ = ["launcher"]
