# SPDX-License-Identifier: Apache-2.0
"""Import of TVM without torch, and torch after it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from sparsetir.utils.packages import PostponeTorch

AFTER = """
import sys
import numpy as np, scipy.sparse as sp, sparsetir
A = sp.csr_array(np.eye(4, dtype="float32"))
assert sparsetir.matmul(A, np.ones((4, 2), "float32")).tolist() == [[1, 1]] * 4
import tvm, tvm_ffi
from tvm import relax
assert "torch" not in sys.modules
import torch
x = torch.ones(4)
back = torch.from_dlpack(tvm_ffi.from_dlpack(x))
back[0] = 9
assert x[0] == 9 and back.data_ptr() == x.data_ptr()
assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
assert tvm_ffi.convert(torch.float32) == "float32" and isinstance(tvm_ffi.convert(torch.int8), tvm_ffi.dtype)
tvm_ffi.use_torch_stream(None)
found = sparsetir.matmul(A, torch.ones(4, 2))
assert isinstance(found, torch.Tensor) and found.tolist() == [[1, 1]] * 4
"""
BEFORE = """
import sys, torch
import sparsetir, tvm_ffi
assert not any(type(finder).__name__ == "PostponeTorch" for finder in sys.meta_path)
assert tvm_ffi._convert.torch is torch
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [AFTER, BEFORE], ids=["torch after TVM", "torch before TVM"])
def test_torch_is_imported_by_its_users_only(code: str) -> None:
    """In a process where torch is installed: other tests run their processes without it."""
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not p.endswith("no_torch")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


NAMES = """
import sys
import sparsetir
errors, listed = [], []
def note(frame, event, value):
    if frame.f_code.co_name == "list_global_func_names":
        listed.append(event)
    is_asked = frame.f_code.co_filename.endswith(("tvm/ir/op.py", "tvm_ffi/registry.py"))
    if event == "exception" and "Check failed" in str(value[1]):
        errors.append(value[1])
    return note if is_asked else None
sys.settrace(note)
sparsetir.build
sys.settrace(None)
assert not errors and listed.count("call") < 20, (errors, len(listed))
import tvm, tvm_ffi
from tvm_ffi import core, registry
assert type(core._object_type_key_to_index).__name__ == "cython_function_or_method"
assert "ir.IRModule" in map(str, tvm_ffi.get_global_func("ffi.GetRegisteredTypeKeys")())
assert registry.list_global_func_names.__module__ == "tvm_ffi.registry"
assert core._object_type_key_to_index("ir.IRModule") > 0 and core._object_type_key_to_index("no.Such") is None
assert str(tvm.ir.Op.get("tirx.exp").name) == "tirx.exp"
for ask in (lambda: tvm.ir.Op.get("tirx.none"), lambda: tvm.ir.register_op_attr("tirx.exp", "sparsetir.test", "a", 3)):
    try:
        ask(), ask()
    except Exception as error:
        assert "Check failed" in str(error) or "already registered" in str(error)
    else:
        raise SystemExit("an error of TVM is lost")
tvm.ir.register_op_attr("tirx.log", "sparsetir.test", "a")
assert tvm.ir.Op.get("tirx.log").get_attr("sparsetir.test") == "a"
"""


@pytest.mark.slow
def test_tvm_is_told_which_names_exist_while_it_is_imported() -> None:
    """So that no error of C++ is raised, and names are not listed again for each module."""
    run = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


INTERRUPTED = """
import signal, sys, threading, time
import _thread
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
import numpy as np, scipy.sparse as sp, sparsetir
A = sp.csr_array(np.eye(4, dtype="float32"))
def press():
    while "tvm.base" not in sys.modules:
        time.sleep(0)
    _thread.interrupt_main()
threading.Thread(target=press).start()
try:
    {first}
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
import tvm, sparsetir.relax
print(sparsetir.matmul(A, np.ones((4, 2), "float32")).sum())
"""


@pytest.mark.parametrize("first", ["sparsetir.matmul", "import tvm", "import sparsetir.relax"])
def test_an_interrupt_waits_for_the_end_of_an_import(first: str) -> None:
    code = INTERRUPTED.format(first=first)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["interrupted", "8.0"], run.stderr


def test_torch_is_hidden_from_the_importing_thread_only() -> None:
    finder, specs = PostponeTorch(), []
    finder.importing = threading.get_ident()
    with pytest.raises(ModuleNotFoundError, match="TVM does without torch"):
        finder.find_spec("torch")
    thread = threading.Thread(target=lambda: specs.append(finder.find_spec("torch")))
    thread.start()
    thread.join()
    assert specs[0].name == "torch"
    assert finder.find_spec("numpy") is None
