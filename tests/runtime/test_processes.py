# SPDX-License-Identifier: Apache-2.0
"""Forked children and threads: kernels give the same there, and what one does is not felt by another."""

from __future__ import annotations

import ast
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import formats, ops
from sparsetir.codegen.cache import CACHE_VARIABLE, separate, waiting
from sparsetir.errors import ArgumentError
from sparsetir.runtime.signature import checks_are_on
from sparsetir.script import parser
from sparsetir.tuning.workers.local import Process
from sparsetir.utils.machine import CORES

pytestmark = pytest.mark.slow

SECONDS = 120  # in which a child that does not hang has answered, however busy the machine is
A = sp.random_array((4000, 300), density=0.02, format="csr", dtype="float32", rng=np.random.default_rng(0))
B = np.random.default_rng(1).standard_normal((300, 32)).astype("float32")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@pytest.fixture(scope="module")
def kernel() -> Any:
    """Its rows are computed in parallel, so that it needs the thread pool."""
    return sparsetir.build(ops.spmm(), schedule=sparsetir.Choices(chunks=8))


def is_right(found: Any, scale: float = 1.0) -> bool:
    return np.allclose(found, A @ B * scale, rtol=1e-4, atol=1e-4)


def in_children(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """What forked children return for 0, 1, ...; an error if one hangs or dies."""
    _tasks.append(work)
    try:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map_async(_task, range(count)).get(SECONDS)
    finally:
        _tasks.pop()


_tasks: list[Callable[[int], Any]] = []


def _task(n: int) -> Any:
    return _tasks[-1](n)


@forks
@pytest.mark.parametrize("used", [False, True])
def test_a_kernel_of_the_parent_runs_in_forked_children(kernel: Any, used: bool) -> None:
    bound = kernel.bind(A=A)
    if used:
        assert is_right(kernel(A=A, B=B))
        assert is_right(bound(B=B))

    def work(n: int) -> bool:
        return is_right(kernel(A=A, B=B * n), n) and is_right(bound(B=B * n), n)

    assert in_children(work) == [True] * 4
    assert is_right(kernel(A=A, B=B))  # the parent's pool is as it was


@forks
def test_children_build_and_have_threads_of_their_own(kernel: Any) -> None:
    kernel(A=A, B=B)
    twice = formats.ell()

    def work(n: int) -> tuple[bool, ...]:
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda k: is_right(kernel(A=A, B=B * k), k), range(1, 7)))
        composed = sparsetir.build(sparsetir.decompose_format(ops.spmm(), {"A": twice}))
        fresh = sparsetir.build(ops.spmm(), schedule=sparsetir.Choices(chunks=n + 2))
        return (*found, is_right(fresh(A=A, B=B)), is_right(composed(A=A, B=B)))

    assert in_children(work, 2) == [(True,) * 8] * 2


@forks
def test_a_fork_while_threads_call_kernels(kernel: Any) -> None:
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            assert is_right(kernel(A=A, B=B))

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(call) for _ in range(3)]
        try:
            assert in_children(lambda n: is_right(kernel(A=A, B=B * n), n)) == [True] * 4
        finally:
            stop.set()
        for each in calls:
            each.result()


@forks
def test_a_child_of_a_thread_and_a_child_of_a_child(kernel: Any) -> None:
    def work(n: int) -> int:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"1" if is_right(kernel(A=A, B=B * n), n) else b"0")
            os._exit(0)
        os.waitpid(child, 0)
        return int(os.read(read, 1))

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_children, work).result(SECONDS) == [1] * 4


@forks
def test_the_forked_thread_is_alone(kernel: Any) -> None:
    def work(_n: int) -> tuple[int, str]:
        sparsetir.set_num_threads(1)
        with pytest.raises(ArgumentError) as error:
            sparsetir.set_num_threads(2)
        return sparsetir.get_num_threads(), str(error.value)

    [(count, message)] = in_children(work, 1)
    assert count == 1
    assert "a thread that a fork copied has no others to share kernels with: expected 1, got 2" in message
    assert "'spawn'" in message


LEAVING = """
import atexit, os, signal, sys, threading, time
import numpy as np, scipy.sparse as sp, sparsetir
A, B = sp.eye_array(500, format="csr", dtype="float32"), np.ones((500, 32), "float32")
kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=sparsetir.Choices(chunks=4))
atexit.register(lambda: print("left", flush=True))
for how in ["sys.exit(7)", "raise ValueError", "pass", "sys.exit('in words')"]:
    kernel(A=A, B=B)
    time.sleep(0.05)  # the pool's thread sleeps when it is copied, or does not
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        started = [threading.Thread(target=lambda: kernel(A=A, B=B)) for _ in range(3)]
        [each.start() for each in started]
        [each.join() for each in started]
        assert np.array_equal(kernel(A=A, B=B), B)
        exec(how)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@forks
def test_a_child_leaves_like_any_process() -> None:
    """Its exit handlers run, its status is told, and no thread that it lacks is waited for."""
    code = LEAVING.replace("SECONDS", str(SECONDS))
    environment = {**os.environ, "SPARSETIR_CACHE": "off", "TVM_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5 * SECONDS)
    assert done.stdout.split() == ["left", "7", "left", "1", "left", "0", "left", "1", "left"], done.stderr


@forks
def test_a_child_leaves_the_cache_and_the_workers_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    workers: list[Any] = Process.idle
    with separate():
        sparsetir.build(ops.spmv())
        workers.append(None)
        try:
            assert in_children(lambda _: [waiting(), len(workers)], 1) == [[0, 0]]
            assert waiting() == 1
            assert workers
        finally:
            workers.pop()


@forks
def test_kernels_in_the_workers_of_a_data_loader(kernel: Any) -> None:
    data = pytest.importorskip("torch.utils.data")
    kernel(A=A, B=B)

    class Products(data.Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, n: int) -> Any:
            return kernel(A=A, B=B * n)

    loader = data.DataLoader(Products(), batch_size=3, num_workers=2, timeout=SECONDS, multiprocessing_context="fork")
    found = [product for batch in loader for product in batch.numpy()]
    assert len(found) == 6
    assert all(is_right(product, n) for n, product in enumerate(found))


# ---------------------------------------------------------------------------------------------- threads


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """What eight threads return that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(work, range(count)))
    finally:
        sys.setswitchinterval(before)


def test_programs_are_parsed_in_threads() -> None:
    texts = [sparsetir.script(program) for program in (ops.spmm(), ops.sddmm(), ops.spmv(), ops.mttkrp())]
    found = in_threads(lambda n: sparsetir.script(sparsetir.parse(texts[n % 4])), 48)
    assert found == texts * 12


def test_trees_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 texts in threads few meet."""
    usual, made = ast.parse, []

    def parse(*given: Any, **how: Any) -> Any:
        made.append(parser.ONE_AT_A_TIME.lock._is_owned())
        return usual(*given, **how)

    monkeypatch.setattr(ast, "parse", parse)
    for program in (ops.spmm(), ops.mttkrp(), ops.spgemm()):
        sparsetir.script(sparsetir.parse(sparsetir.script(program)))
    assert len(made) > 9
    assert all(made)


def test_ready_programs_are_first_asked_for_in_threads() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
import sys, sparsetir
sys.setswitchinterval(1e-5)
makers = [getattr(sparsetir.ops, name) for name in ("spmm", "sddmm", "spmv", "mttkrp")]
ask = lambda n: sparsetir.script(makers[n % 4](("float32", "float64")[n // 4 % 2]))
with ThreadPoolExecutor(8) as threads:
    found = list(threads.map(ask, range(16)))
assert found[:8] == found[8:]
assert len(set(found)) == 8
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


def test_programs_are_decorated_in_threads() -> None:
    from tvm.script import sparsetir as T

    def make(n: int) -> str:
        @T.prim_func
        def scaled(a: T.handle, b: T.handle, m: T.int32):
            I = T.dense_fixed(m)
            A = T.match_sparse_buffer(a, (I,))
            B = T.match_sparse_buffer(b, (I,))
            with T.sp_iter([I], "S") as [i]:
                B[i] = A[i] * T.float32(n)

        return sparsetir.script(scaled)

    assert in_threads(make, 16) == [make(n) for n in range(16)]


def test_programs_are_scheduled_and_lowered_in_threads() -> None:
    def lowered(n: int) -> str:
        sch = sparsetir.Schedule(ops.spmm())
        if n % 3 == 0:
            sch.sparse_fuse("spmm", ["I", "J"])
        elif n % 3 == 1:
            sch.sparse_split("spmm", "K", 8)
        program = sch.func if n % 3 < 2 else sparsetir.decompose_format(ops.spmm(), {"A": formats.bsr(2, 2)}).func
        return sparsetir.script(sparsetir.lower(program, stage=2))

    found = in_threads(lowered, 24)
    assert found == found[:3] * 8


def test_unchecked_is_of_one_thread_and_ends_with_its_block() -> None:
    entered, inner = threading.Event(), threading.Event()
    seen: dict[str, bool] = {}

    def first() -> None:
        with sparsetir.unchecked():
            entered.set()
            inner.wait(SECONDS)
            seen["in the first block"] = checks_are_on()
        seen["behind the first block"] = checks_are_on()

    def second() -> None:
        entered.wait(SECONDS)
        seen["beside the first block"] = checks_are_on()
        with sparsetir.unchecked():
            inner.set()
            one.join(SECONDS)
            seen["in the second block"] = checks_are_on()
        seen["behind the second block"] = checks_are_on()

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start(), two.start()
    one.join(SECONDS), two.join(SECONDS)
    assert seen == {
        "beside the first block": True,
        "in the first block": False,
        "behind the first block": True,
        "in the second block": False,
        "behind the second block": True,
    }
    assert checks_are_on()


def test_more_threads_than_a_system_starts_are_not_asked_for() -> None:
    code = """
import numpy as np, scipy.sparse as sp, sparsetir
A = sp.eye_array(20_000, format="csr", dtype="float32")
print(sparsetir.matmul(A, np.ones((20_000, 8), "float32")).sum(), sparsetir.get_num_threads())
"""
    command, environment = [sys.executable, "-c", code], {**os.environ, "TVM_NUM_THREADS": "99999"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["160000.0", str(CORES)]
    assert "TVM_NUM_THREADS: expected at most 4096, got 99999" in done.stderr


def test_threads_beyond_the_cores_do_not_wait_awake() -> None:
    code = "import os, sparsetir; sparsetir.get_num_threads(); print(os.environ['TVM_THREAD_POOL_SPIN_COUNT'])"
    given = {name: value for name, value in os.environ.items() if name != "TVM_THREAD_POOL_SPIN_COUNT"}
    environments = [{**given, "TVM_NUM_THREADS": count} for count in ("1000", "1")]
    environments.append({**environments[0], "TVM_THREAD_POOL_SPIN_COUNT": "5"})
    found = [
        subprocess.run([sys.executable, "-c", code], env=each, capture_output=True, text=True, timeout=SECONDS).stdout
        for each in environments
    ]
    assert [int(text) for text in found] == [0, 3000, 5]
