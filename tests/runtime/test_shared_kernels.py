# SPDX-License-Identifier: Apache-2.0
"""Kernels that several threads of Python call: what one puts away another takes at once, and writes into it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi

import sparsetir
from sparsetir import ops
from sparsetir.sparse_output import fast_paths, products
from sparsetir.sparse_output import kernel as assembled
from sparsetir.sparse_output.fast_paths import RowWorkspace
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.utils.buffers import LEAST_ROOM, BufferPool, Copies, OutputPool


class Emptied(list[Any]):
    """A list that another thread empties right after the look whether something is in it."""

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 1


class Taken(list[Any]):
    """A list out of which another thread takes each thing at once, and writes into its arrays."""

    def append(self, held: Any) -> None:
        for array in (held.keys, held.values) if isinstance(held, RowWorkspace) else held:
            array.view(np.uint8)[...] = 0xFF


@pytest.fixture
def operands() -> dict[str, sp.csr_array]:
    rng = np.random.default_rng(0)
    return {n: sp.random_array((400, 400), density=0.05, format="csr", dtype="float32", rng=rng) for n in "AB"}


@pytest.fixture
def kernel() -> SparseOutputKernel:
    """One that no other test has the memory of."""
    made = sparsetir.build(ops.spgemm())
    return SparseOutputKernel(made.compiled)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = sparsetir.get_num_threads()
    sparsetir.set_num_threads(request.param)
    yield
    sparsetir.set_num_threads(before)


def bits(made: Any) -> list[bytes]:
    return [a.tobytes() for a in (made.indptr, made.indices, made.data)]


def test_kept_memory_that_another_thread_takes_first(kernel: SparseOutputKernel, operands: dict[str, Any]) -> None:
    expected = bits(kernel(**operands))
    kernel._spare, kernel._stamps, kernel._rooms, kernel._counts = (Emptied() for _ in range(4))
    assert bits(kernel(**operands)) == expected
    masked = sparsetir.build(ops.masked_spgemm())
    expected = bits(masked(**operands, M=operands["A"].astype(bool)))
    masked._stamps, masked._rooms = Emptied(), Emptied()
    assert bits(masked(**operands, M=operands["A"].astype(bool))) == expected


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("function", ["small", "shared"])
def test_a_small_product_is_read_before_its_room_is_put_away(function: str, operands: dict[str, Any]) -> None:
    A, B = (sp.csr_array(o[:40, :40]) for o in operands.values())
    kernel = SparseOutputKernel(sparsetir.build(ops.spgemm()).compiled)
    first = kernel.small_at_once(function, {"A": A, "B": B})
    assert kernel.small_calls is not None
    kernel.small_calls.spare = Taken()
    assert bits(kernel.small_at_once(function, {"A": A, "B": B})) == bits(first)
    kernel.small_calls.spare = Emptied()
    assert bits(kernel.small_at_once(function, {"A": A, "B": B})) == bits(first)


def test_a_small_product_that_fills_its_room_keeps_it_until_nobody_reads_it(
    operands: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = (sp.csr_array(o[:200, :200]) for o in operands.values())
    expected = bits(sp.csr_array(A @ B).sorted_indices())[:2]
    monkeypatch.setattr(fast_paths, "limits", lambda: (30_000, 1 << 20))
    kernel = SparseOutputKernel(sparsetir.build(ops.spgemm()).compiled)
    first = kernel.small_at_once("small", {"A": A, "B": B})
    assert LEAST_ROOM // 8 <= 30_000 <= 2 * first.nnz, "no longer most of the room"
    second = kernel.small_at_once("small", {"A": A * 2, "B": B})
    assert bits(first)[:2] == bits(second)[:2] == expected
    np.testing.assert_array_equal(first.data * 2, second.data)
    part, where = second.data[:10], second.data.ctypes.data
    kept = part.copy()
    del second
    for factor in range(3, 6):
        third = kernel.small_at_once("small", {"A": A * factor, "B": B})
        assert third.data.ctypes.data != where
        np.testing.assert_allclose(first.data * factor, third.data, rtol=1e-6)
    np.testing.assert_array_equal(part, kept)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("least", [1, None])
def test_a_room_is_copied_before_it_is_put_away(
    kernel: SparseOutputKernel, operands: dict[str, Any], least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results elsewhere than in the room they were written in, in memory that is kept and in memory that is not."""
    expected = bits(kernel(**operands))
    monkeypatch.setattr(assembled, "MOST_WASTE", 0)
    if least is not None:
        monkeypatch.setattr(assembled, "LEAST_ROOM", least)
    kernel._rooms = Taken()
    assert bits(kernel(**operands)) == expected


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("waste", [0, 100, None])
def test_memory_of_a_result_is_not_free_when_it_is_kept(
    waste: int | None, kernel: SparseOutputKernel, operands: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that are copied to memory of earlier ones, that stay where they were written, and sums."""
    if waste is None:
        kernel = SparseOutputKernel(sparsetir.build(ops.add()).compiled)
        operands = {name: sp.csr_array(sp.vstack([part] * 2)) for name, part in operands.items()}
    else:
        monkeypatch.setattr(assembled, "MOST_WASTE", waste)
    expected, lend, taken = bits(kernel(**operands)), BufferPool.lend, []

    def lend_and_take(pool: BufferPool, arrays: Any, count: int) -> list[np.ndarray]:
        views = lend(pool, arrays, count)
        taken.extend(pool.take(len(arrays[0])))
        return views

    monkeypatch.setattr(BufferPool, "lend", lend_and_take)
    found = kernel(**operands)
    assert bits(found) == expected
    assert taken
    assert not any(np.may_share_memory(a, b) for a in (found.indices, found.data) for b in taken)


LAYOUT = (64,), np.dtype("float32")


class Met(list[Any]):
    """A list out of which another thread takes the memory that has just come into it, if it may."""

    def __init__(self, pool: OutputPool, found: list[np.ndarray]) -> None:
        self.pool, self.found = pool, found

    def append(self, entry: Any) -> None:
        super().append(entry)
        self.pool.lent.append(self.pop())
        self.found.append(self.pool.filler(*LAYOUT, 0)([None]))


def test_an_array_is_not_free_when_it_is_lent() -> None:
    pool, other, found = OutputPool(), OutputPool(), []
    pool.lent = Met(other, found)
    array = pool.filler(*LAYOUT, 0)([None])
    assert len(found) == 1
    assert not np.may_share_memory(array, found[0])


def from_outputs() -> Callable[[], np.ndarray]:
    fill = OutputPool().filler(*LAYOUT, 0)
    return lambda: fill([None])


def from_buffers() -> Callable[[], np.ndarray]:
    pool = BufferPool((np.dtype("float32"),))
    return lambda: pool.lend(pool.take(LEAST_ROOM), LEAST_ROOM - 4)[0]


def from_copies() -> Callable[[], np.ndarray]:
    return Copies(np.zeros(64, np.float32)).take


#: What a caller may keep of a result instead of the result.
KEPT: dict[str, Callable[[np.ndarray], Any]] = {
    "the array": lambda a: a,
    "part of a part": lambda a: a[3:][1:9],
    "another shape": lambda a: a[:60].reshape(3, 20).T[2:],
    "other elements": lambda a: a.view("uint8")[5:],
    "a matrix": lambda a: a.view(np.matrix)[0, 2:],
    "a subclass": lambda a: a.view(np.recarray)[4:],
    "memory": lambda a: memoryview(a)[2:],
    "a tensor": lambda a: tvm_ffi.from_dlpack(a[:16]),
    "an iterator": lambda a: a[7:].flat,
}


@pytest.mark.parametrize("pool", [from_outputs, from_buffers, from_copies])
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_memory_that_a_caller_can_read_is_not_given_to_another(
    pool: Callable[[], Callable[[], np.ndarray]], keep: Callable[[np.ndarray], Any]
) -> None:
    take = pool()
    first = take()
    where, kept = first.ctypes.data, keep(first)
    del first
    others = [take() for _ in range(3)]
    assert all(abs(other.ctypes.data - where) >= other.nbytes for other in others)
    del kept


@pytest.mark.parametrize("pool", [from_outputs, from_buffers, from_copies])
def test_memory_without_an_array_is_used_again_under_a_debugger(pool: Callable[[], Callable[[], np.ndarray]]) -> None:
    """A debugger holds the variables of frames, here those of the pool, but no array of the caller."""
    take, frames = pool(), []

    def trace(frame: Any, _event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename.endswith("buffers.py"):
            frames.append({n: v for n, v in frame.f_locals.items() if n in ("memory", "arrays", "passed", "original")})
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        where = take().ctypes.data
        again = take().ctypes.data
    finally:
        sys.settrace(before)
    assert frames
    assert again == where


def test_a_plan_is_called_with_other_values_meanwhile(
    operands: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = operands.values()
    plan = sparsetir.matmul_plan(A, B)
    expected, take, inner = bits(plan(A, B)), SparseOutputKernel.take, []

    def take_late(kernel: SparseOutputKernel, call: Any) -> Any:
        if not inner:
            inner.append(None)
            plan(A * np.float32(2), B)
        return take(kernel, call)

    monkeypatch.setattr(SparseOutputKernel, "take", take_late)
    plan._refill._spare.clear()
    assert bits(plan(A, B)) == expected
    assert inner


def test_small_products_of_many_threads() -> None:
    rng = np.random.default_rng(0)
    matrices = [sp.random_array((60, 60), density=0.1, format="csr", rng=rng) for _ in range(4)]
    expected = [bits(products.matmul(A, A)) for A in matrices]

    def work(first: int) -> list[bool]:
        turns = [(first + n) % len(matrices) for n in range(150)]
        return [bits(products.matmul(matrices[n], matrices[n])) == expected[n] for n in turns]

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as pool:
            assert all(itertools.chain.from_iterable(pool.map(work, range(4))))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("passes", [0, 1])
def test_memory_that_another_thread_takes_while_some_is_lent_is_not_there_any_more(passes: int) -> None:
    pool, count = BufferPool((np.dtype("int32"), np.dtype("float32"))), LEAST_ROOM
    taken: list[tuple[np.ndarray, ...]] = []

    class Interrupted(list[np.ndarray]):
        """Arrays; another thread takes memory when something has gone through them so often."""

        left = passes

        def __iter__(self) -> Iterator[np.ndarray]:
            if self.left == 0:
                taken.append(pool.take(count))
            self.left -= 1
            return super().__iter__()

    pool.lend(pool.take(count), count)  # released at once
    kept = pool.lend(Interrupted([np.empty(count, dtype) for dtype in pool.dtypes]), count)
    taken += [pool.take(count) for _ in range(3)]
    assert len({arrays[0].ctypes.data for arrays in (kept, *taken)}) == len(taken) + 1
