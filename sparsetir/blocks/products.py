# SPDX-License-Identifier: Apache-2.0
"""Passes over the blocks of a store: products along its lines and across them, and the results they write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.blocks.kernels import compute_dtype, multiply, multiply_transposed, run, to_scipy
from sparsetir.blocks.plan import Plan, make_plan
from sparsetir.blocks.reading import MAX_BLOCK_BYTES, Bar, block_starts, iterate, read_blocks
from sparsetir.blocks.results import Checkpoint, NpyResult, check_path, digest, file_result
from sparsetir.blocks.saving import check_new, write_lines
from sparsetir.errors import WriteError
from sparsetir.stores import Array, Buffers, Store, is_stored, open_store

ROWS_AT_ONCE = 1 << 16  # of a dense operand that is converted or written


class MemoryResult:
    """A result in memory, with the methods of `FileResult`."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.array = np.empty(shape, dtype)
        self.done: set[str] = set()

    def rows(self, begin: int, count: int, columns: slice, buffers: Buffers) -> Array:
        """Return memory for a part of the result: its own, where it is contiguous."""
        part = self.array[begin : begin + count, columns]
        return part if part.flags.c_contiguous else buffers.array("rows", part.size, part.dtype).reshape(part.shape)

    def write(self, begin: int, values: Array, columns: slice | None = None) -> None:
        rows = self.array[begin : begin + len(values)][..., columns or slice(None)]
        if not np.may_share_memory(rows, values):
            rows[...] = values

    def record(self, part: str) -> None:
        """Do nothing: the memory ends with the process."""

    def close(self, is_complete: bool) -> None:
        """Do nothing."""


def plan_product(store: Store, memory: int, operand: Array, is_along: bool, out: Any) -> Plan:
    """Plan a product whose result rows are the lines of the store (along), or their indices (across)."""
    dtype, width = compute_dtype(store.data.dtype, operand.dtype), operand.shape[1]
    lines, extent = store.lines
    held = 0 if out is not None else (lines if is_along else extent) * width * dtype.itemsize
    column = extent * (dtype.itemsize if is_along else 8 + 2 * dtype.itemsize)
    name = "along the lines" if is_along else "across the lines"
    return make_plan(store, memory, name, dtype, width, held=held, column=column, line=dtype.itemsize)


def product(store: Store, memory: int, operand: Array, *, is_along: bool, out: Any, bar: bool,
            finish: Callable[[Array], Array] | None = None, tag: str = "") -> Any:  # fmt: skip
    """Multiply a store by a dense matrix; return an array, or the path of the result.

    Parameters
    ----------
    finish : callable, optional
        Applied to parts of the result before they are written.
    tag : str
        Of `finish`, for results that are continued.
    """
    if out is not None:
        check_path(out)
    plan = plan_product(store, memory, operand, is_along, out)
    dtype = compute_dtype(store.data.dtype, operand.dtype)
    shape = (store.lines[not is_along], operand.shape[1])
    result: Any = MemoryResult(shape, dtype)
    if out is not None:
        job = {"store": identity(store), "operand": digest(operand), "along": is_along, "tag": tag}
        result = file_result(out, shape, dtype, {**job, "starts": digest(np.array(plan.starts)), "panel": plan.panel})
    is_complete = False
    try:
        progress = Bar(plan.bytes_read, bar)
        for begin in range(0, shape[1], max(plan.panel, 1)):
            columns = slice(begin, min(begin + plan.panel, shape[1]))
            (_along if is_along else _across)(store, plan, operand, columns, dtype, result, finish, progress)
        is_complete = True
    finally:
        result.close(is_complete)
    return result.array if out is None else Path(out)


def _along(store: Store, plan: Plan, operand: Array, columns: slice, dtype: Any, result: Any, finish: Any, bar: Bar
           ) -> None:  # fmt: skip
    names = {number: f"{columns.start}:{number}" for number in range(plan.blocks)}
    numbers = [number for number, name in names.items() if name not in result.done]
    if not numbers:
        return
    panel = dense_panel(operand, columns, dtype)
    for block in iterate(store, plan.starts, dtype, bar, numbers):
        count = block.end - block.begin
        values = multiply(block, panel, result.rows(block.begin, count, columns, block.buffers))
        result.write(block.begin, values if finish is None else finish(values), columns)
        result.record(names[block.number])


def _across(store: Store, plan: Plan, operand: Array, columns: slice, dtype: Any, result: Any, finish: Any, bar: Bar
            ) -> None:  # fmt: skip
    if str(columns.start) in result.done:
        return
    extent = store.lines[1]
    checkpoint = Checkpoint(getattr(result, "path", None), {"job": getattr(result, "job", ""), "panel": columns.start})
    begin, saved = checkpoint.load()
    total = np.zeros((extent, columns.stop - columns.start), np.float64) if saved is None else saved
    for block in iterate(store, plan.starts, dtype, bar, range(begin, plan.blocks)):
        rows = dense_panel(operand[block.begin : block.end], columns, dtype)
        total += multiply_transposed(block, rows, extent)
        checkpoint.save(block.number + 1, total)
    for begin in range(0, extent, ROWS_AT_ONCE):
        values = total[begin : begin + ROWS_AT_ONCE].astype(dtype)
        result.write(begin, values if finish is None else finish(values), columns)
    result.record(str(columns.start))
    checkpoint.end()


def dense_panel(operand: Array, columns: slice, dtype: Any) -> Array:
    """Return columns of an operand as a contiguous array in memory; memory maps are copied row by row."""
    panel = operand[:, columns]
    if panel.dtype == dtype and panel.flags.c_contiguous and not isinstance(operand, np.memmap):
        return panel
    copy = np.empty(panel.shape, dtype)
    for begin in range(0, len(copy), ROWS_AT_ONCE):
        copy[begin : begin + ROWS_AT_ONCE] = panel[begin : begin + ROWS_AT_ONCE]
    return copy


def identity(store: Store) -> dict[str, Any]:
    """Return what tells a file from its next version: size and time of its parts."""
    path = Path(store.path)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    sizes = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    return {"file": store.label, "format": store.format, "nnz": store.nnz, "files": digest(np.array(sizes, np.int64))}


# ------------------------------------------------------------------------------------------ sampled products


def sampled(store: Store, memory: int, left: Array, right: Array, out: Any, bar: bool) -> Any:
    """Multiply each entry by the product of its rows of `left` (of its line) and `right` (of its index)."""
    dtype = compute_dtype(store.data.dtype, left.dtype, right.dtype)
    held = right.size * dtype.itemsize
    held += store.nnz * (dtype.itemsize + store.indices.dtype.itemsize) if out is None else 0
    line = left.shape[1] * dtype.itemsize
    plan = make_plan(store, memory, "sampled", dtype, 0, held=held + line, column=0, line=0)
    everything = slice(None)
    right = dense_panel(right, everything, dtype)
    target = _Folder(store, Path(out), dtype, digest(left, right, np.array(plan.starts))) if out is not None else None
    parts: list[Any] = [MemoryResult((store.nnz,), t) for t in (dtype, store.indices.dtype)]
    if target is not None:
        parts = list(target.parts)
    numbers = [n for n in range(plan.blocks) if not all(str(n) in part.done for part in parts)]
    is_complete = False
    try:
        for block in iterate(store, plan.starts, dtype, Bar(plan.bytes_read, bar), numbers):
            values = np.zeros(len(block.data), dtype)
            if len(values):
                rows = dense_panel(left[block.begin : block.end], everything, dtype)
                run("sddmm", block, dtype, X=rows, Y=right, o=values)
            for part, array in zip(parts, (values, block.indices.astype(store.indices.dtype)), strict=True):
                part.write(int(store.indptr[block.begin]), array)
                part.record(str(block.number))
        is_complete = True
    finally:
        for part in parts:
            part.close(is_complete)
    return target.finish() if target is not None else (parts[0].array, parts[1].array)


class _Folder:
    """A folder of .npy files with the pattern of a store and new values; in the end in the form that its name says."""

    def __init__(self, store: Store, path: Path, dtype: Any, key: str) -> None:
        self.store, self.path, self.partial = store, check_new(path, "out"), Path(f"{path}.partial")
        job = {"store": identity(store), "key": key}
        try:
            self.partial.mkdir(exist_ok=True)
            np.save(self.partial / "indptr.npy", store.indptr)
            np.save(self.partial / "shape.npy", np.array(store.shape))
            np.save(self.partial / "format.npy", np.array(store.format.encode()))
        except OSError as error:
            raise WriteError(f"out: {path} cannot be written: {error.strerror}.") from error
        types = {"data": dtype, "indices": store.indices.dtype}
        self.parts = [NpyResult(self.partial / f"{n}.npy", (store.nnz,), t, job) for n, t in types.items()]

    def finish(self) -> Path:
        """Give the folder its name, or copy it to another form block by block."""
        if not is_stored(self.path):
            os.replace(self.partial, self.path)
            return self.path
        store = open_store(self.partial)
        starts = block_starts(store.indptr, store.entry_bytes, 16, MAX_BLOCK_BYTES)
        blocks = read_blocks(store, starts, store.data.dtype, range(len(starts) - 1))
        write_lines((to_scipy(block, store.lines[1]) for block in blocks), self.path, store.format)
        shutil.rmtree(self.partial)
        return self.path


__all__ = ["dense_panel", "identity", "plan_product", "product", "sampled"]
