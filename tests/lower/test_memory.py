# SPDX-License-Identifier: Apache-2.0
"""No call touches memory that it was not given, of its arguments or of the package: see tests/fuzzing/memory.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fences import environment, fence_compiler
from fuzzing.memory import GROUPS, outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(fence_compiler() is None, reason="needs Linux and a C compiler"),
]
#: blocks that compiled functions allocate themselves, of groups that have programs which do
WITH_WORKSPACES = ("functions", "programs")


@pytest.mark.parametrize("group", GROUPS)
def test_calls_stay_within_their_memory(group: str) -> None:
    found = outcome(group)
    if found.failures:
        pytest.fail("\n\n".join(found.failures), pytrace=False)
    assert len(found.cases) == len(list(GROUPS[group]()))
    arrays, workspaces = found.fenced
    assert arrays > 10 * len(found.cases)
    assert (workspaces > 0) or group not in WITH_WORKSPACES


def test_faults_are_found_and_said() -> None:
    """Of a child that dies another one goes on with the next case."""
    found = outcome("faults")
    died, wrong = found.failures
    assert died.startswith("faults, a step too far died of SIGSEGV: a call\nFatal Python error: Segmentation fault")
    assert wrong.startswith("faults, another result: 4 x 5 x 6, 2 threads, kept memory that ends at unreadable pages")
    assert "AssertionError: other coordinates" in wrong
    assert found.cases == ["a step too far", "another result", "no fault"]


CHECK = """
import ctypes, mmap, os
import numpy as np
from fences import Everything

fences, numbers = Everything(), []
def held(begins=False, fill=1):
    fences.place(begins=begins, fill=fill)
    with fences.within():
        return np.empty(10, "float32")
def touched(at, write=False, freed=False, **how):
    array = held(**how)
    byte = ctypes.c_char.from_address(array.ctypes.data + at)
    if freed:
        del array
    value = byte.value
    if write:
        byte.value = b"x"
def status(at, **how):
    child = os.fork()
    if not child:
        touched(at, **how)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([status(at) for at in (0, 39, 40)], [status(at, begins=True) for at in (0, 39, -1)])
print(status(39, write=True), status(-1, write=True), status(40, begins=True, write=True), status(0, freed=True))
with fences.within():
    shrunk = np.arange(1000)
    shrunk.resize(3, refcheck=False)
end = shrunk.ctypes.data + shrunk.nbytes
print(held(fill=7).view(np.uint8)[-1], shrunk.tolist(), end % mmap.PAGESIZE, fences.made[1])
"""


def test_fences_stand_where_they_should() -> None:
    """Reads and writes outside end the process at once, or when memory is freed whose rest of a page was written."""
    env = {**os.environ, **(environment() or {}), "PYTHONPATH": str(Path(__file__).parents[1])}
    made = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=env, check=False)
    assert made.returncode == 0, made.stderr
    fault, abort = -signal.SIGSEGV, -signal.SIGABRT
    assert made.stdout.splitlines() == [
        f"[0, 0, {fault}] [0, 0, {fault}]",
        f"0 {abort} {abort} {fault}",
        "7 [0, 1, 2] 0 0",
    ]
    assert "a byte before a block of 40 bytes was written, -1 from its start" in made.stderr
    assert "a byte after a block of 40 bytes was written, 40 from its start" in made.stderr
