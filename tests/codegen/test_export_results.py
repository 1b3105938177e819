# SPDX-License-Identifier: Apache-2.0
"""Exported kernels that compute patterns: the C function allocates what the kernel returns, bit by bit."""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from corpus.computed import PROGRAMS, SHAPES, draw_arguments, matrix
from each import FULL
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.runtime.signature import Arguments, numpy_dtype
from sparsetir.sparse_output.c_functions import AssembledInterface
from sparsetir.sparse_output.kernel import SparseOutputKernel

CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
READY = {name: getattr(sparsetir.ops, name) for name in ("spgemm", "masked_spgemm", "add", "multiply")}
DRAWN = [*PROGRAMS] if FULL else ["least sums", "a tensor times a matrix", "a product of blocks", "blocks under a mask"]

pytestmark = [
    pytest.mark.skipif(CC is None or sys.platform != "linux", reason="needs Linux and a C compiler"),
    pytest.mark.optimised(level=1),  # unoptimised machine code refers to services that it does not call
    pytest.mark.usefixtures("quick_compiler"),
]


@dataclass
class Exported:
    """A kernel, its library and the C function."""

    kernel: SparseOutputKernel
    library: Path

    @functools.cached_property
    def interface(self) -> AssembledInterface:
        return AssembledInterface(self.kernel, self.kernel.assembly, self.kernel.options)

    @functools.cached_property
    def loaded(self) -> ctypes.CDLL:
        loaded = ctypes.CDLL(str(self.library))
        self.function(loaded, "_last_error").restype = ctypes.c_char_p
        self.function(loaded, "_free").argtypes = [ctypes.c_void_p]
        return loaded

    def function(self, loaded: ctypes.CDLL, ending: str = "") -> Any:
        return getattr(loaded, self.interface.name + ending)

    @property
    def message(self) -> str:
        return self.function(self.loaded, "_last_error")().decode()

    def call(self, args: Arguments, **others: Any) -> list[np.ndarray] | None:
        """Row pointers, coordinates and values; None if the function fails, which sets all of them to NULL."""
        given = {**args.arrays, **args.sizes, **others}
        passed = [as_c(given[p.symbol], p.dtype) for p in self.interface.parameters]
        out = [ctypes.c_void_p(1) for _ in self.interface.outputs]
        if self.function(self.loaded)(*passed, *map(ctypes.byref, out)):
            assert not any(pointer.value for pointer in out)
            return None
        rows = 1 if self.kernel.assembly.rows == () else int(args.sizes["m"])
        indptr = taken(out[0], "int64", rows + 1)
        results = self.kernel.assembly.results
        dtypes = [self.kernel.assembly.key_dtype, *(str(numpy_dtype(r.dtype)) for r in results)]
        blocks = [1, *(math.prod(self.kernel.block(n, args.sizes)) for n in range(len(results)))]
        counts = [int(indptr[-1]) * block for block in blocks]
        found = [indptr, *(taken(at, d, n) for at, d, n in zip(out[1:], dtypes, counts, strict=True))]
        for pointer in out:
            self.function(self.loaded, "_free")(pointer)
        return found


def as_c(value: Any, dtype: str) -> Any:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    return (ctypes.c_double if dtype == "float64" else ctypes.c_float if "float" in dtype else ctypes.c_int64)(value)


def taken(pointer: ctypes.c_void_p, dtype: str, count: int) -> np.ndarray:
    """A copy of what C allocated."""
    held = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(pointer.value or 0)
    return np.frombuffer(bytes(held), dtype)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """A program of the corpus or a ready one, exported once."""

    @functools.cache
    def make(name: str) -> Exported:
        func = READY[name]() if name in READY else sparsetir.parse(PROGRAMS[name])
        kernel = sparsetir.build(func)
        library = tmp_path_factory.mktemp("exported") / "libf.so"
        kernel.export(library)
        return Exported(kernel, library)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spgemm", "masked_spgemm"])
def test_hash_tables(name: str, tmp_path: Path) -> None:
    kernel = sparsetir.build(READY[name](), schedule=sparsetir.Accumulators(insertion=4, kind="table"))
    library = Exported(kernel, kernel.export(tmp_path / "libf.so").with_suffix(".so"))
    for threads in (1, 2):
        library.function(library.loaded, "_set_num_threads")(threads)
        for rows, density in ((600, 0.02), (30, 0.5), (20, 0.0)):
            agrees(library, operands(name, rows, density))
    if name == "spgemm":  # an array for each column would take 16 GB
        wide, given = 2**31 - 8, operands(name, 40, 0.3)
        B = given["B"]
        given["B"] = sp.csr_array((B.data, B.indices * 50_000_000, B.indptr), shape=(40, wide))
        agrees(library, given)


def agrees(exported: Exported, arguments: dict[str, Any]) -> None:
    args = exported.kernel.prepare((), arguments)
    wanted, found = exported.kernel.assemble(args), exported.call(args)
    assert found is not None, exported.message
    for one, other in zip((wanted.indptr, wanted.keys, *wanted.values), found, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_programs_agree_with_their_kernels(name: str, exported: Callable[[str], Exported]) -> None:
    for shape in SHAPES:
        for density in (0, 0.1, 0.6):
            agrees(exported(name), draw_arguments(name, shape, density))


def operands(name: str, rows: int, density: float) -> dict[str, sp.csr_array]:
    rng = np.random.default_rng(7)
    made = [matrix(rng, rows, rows, density) for _ in "ABM"]
    if name == "masked_spgemm":
        made[2].data = np.ones(made[2].nnz, "bool")
        return dict(zip("ABM", made, strict=True))
    return dict(zip("AB", made[:2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
def test_large_operands_are_shared_out(name: str, exported: Callable[[str], Exported]) -> None:
    library = exported(name)
    for threads in (1, 3, 0):
        library.function(library.loaded, "_set_num_threads")(threads)
        agrees(library, operands(name, 1500, 0.01))
        agrees(library, operands(name, 70, 0.5))


@pytest.mark.slow
def test_arguments_that_disagree_get_a_message(exported: Callable[[str], Exported]) -> None:
    library = exported("spgemm")
    args = library.kernel.prepare((), operands("spgemm", 10, 0.3))
    assert library.call(args, nnz_a=3) is None
    assert "indptr_a ends at" in library.message
    assert "3 stored entries" in library.message
    for size in ("m", "n"):
        assert library.call(args, **{size: -2}) is None
        assert "sizes must not be negative" in library.message


@pytest.mark.slow
def test_sizes_that_64_bits_cannot_count_get_a_message(tmp_path: Path) -> None:
    kernel = sparsetir.build(sparsetir.ops.spgemm(idtype="int64"))
    library = Exported(kernel, kernel.export(tmp_path / "libf.so").with_suffix(".so"))
    args = kernel.prepare((), operands("spgemm", 10, 0.3))
    for threads in (1, 2):
        library.function(library.loaded, "_set_num_threads")(threads)
        for columns in (2**63 - 1, 2**63 - 100, 2**62):
            assert library.call(args, n=columns) is None
            assert "out of memory" in library.message


@pytest.mark.slow
def test_a_negative_size_is_not_made_up_for_by_another(exported: Callable[[str], Exported]) -> None:
    name = "a tensor times a matrix"
    library = exported(name)
    args = library.kernel.prepare((), draw_arguments(name, (9, 8, 10, 7), 0.6))
    for sizes in ({"n": -2, "q": -3}, {"n": -(2**31), "q": -(2**31)}, {"n": -1}, {"q": -1}):
        assert library.call(args, **sizes) is None
        assert "sizes must not be negative" in library.message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add", "multiply"])
def test_merged_rows_of_a_negative_length_get_a_message(name: str, exported: Callable[[str], Exported]) -> None:
    library = exported(name)
    args = library.kernel.prepare((), operands(name, 10, 0.3))
    for columns in (-1, -(2**31)):
        assert library.call(args, n=columns) is None
        assert "sizes must not be negative" in library.message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add", "multiply"])
def test_merged_rows_that_are_not_sorted_get_a_message(name: str, exported: Callable[[str], Exported]) -> None:
    made = exported(name)
    A = sp.csr_array(np.ones((90, 4), "float32"))
    args = made.kernel.prepare((), {"A": A, "B": A})
    assert made.call(args) is not None
    for at, value in ((1, 0), (302, 3), (302, 4), (302, -1)):
        wrong = A.indices.astype("int32")
        wrong[at] = value
        assert made.call(args, indices_b=wrong) is None
        assert "sorted" in made.message


@pytest.mark.parametrize("name", ["add", "multiply"])
def test_merged_rows_behind_unsound_ones_are_not_written_past_the_end(
    name: str, exported: Callable[[str], Exported]
) -> None:
    made, count = exported(name), 200_000
    good = sp.csr_array((np.ones(count, "float32"), np.arange(count, dtype="int32"), [0, *[count] * 64 * 79]))
    args = made.kernel.prepare((), {"A": good, "B": good})
    wrong = np.concatenate([[0], np.tile(np.repeat((count, 0), 64), 40)[: 64 * 79]]).astype("int32")
    assert made.call(args, indptr_a=wrong, indptr_b=wrong) is None
    assert "sorted" in made.message or "row pointers" in made.message, made.message


@pytest.mark.slow
def test_memory_that_is_not_there_gets_a_message(exported: Callable[[str], Exported]) -> None:
    library = exported("spgemm")
    args = library.kernel.prepare((), operands("spgemm", 10, 0.3))
    library.function(library.loaded, "_set_num_threads")(1)
    with limited_memory():
        assert library.call(args, n=2**31 - 1) is None
    assert "out of memory" in library.message


class limited_memory:
    """A limit on the memory of this process that leaves no room for two thousand million elements."""

    def __enter__(self) -> None:
        import resource

        self.before = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), self.before[1]))

    def __exit__(self, *_: object) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, self.before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spgemm", "masked_spgemm"])
def test_the_largest_of_each_row(name: str, tmp_path: Path) -> None:
    kernel = sparsetir.build(READY[name]()).selecting()
    library = Exported(kernel, kernel.export(tmp_path / "libf.so").with_suffix(".so"))
    assert "A top of 0 keeps all" in (tmp_path / "libf.h").read_text()
    for threads, rows, density in ((1, 600, 0.02), (2, 600, 0.03), (2, 30, 0.5), (1, 20, 0.0)):
        library.function(library.loaded, "_set_num_threads")(threads)
        args = kernel.prepare((), operands(name, rows, density))
        for top, least in ((None, -np.inf), (1, -np.inf), (3, 2.0), (10**9, -1.0), (None, np.inf)):
            wanted = kernel.assemble(args, top, least)
            found = library.call(args, top=np.int64(top or 0), least=np.float32(least))
            assert found is not None, library.message
            pairs = zip((wanted.indptr, wanted.keys, *wanted.values), found, strict=True)
            assert all(one.tobytes() == other.tobytes() for one, other in pairs), (threads, rows, top, least)


@pytest.mark.slow
def test_a_kernel_that_selects_is_called_like_matmul() -> None:
    kernel = sparsetir.build(sparsetir.ops.spgemm()).selecting()
    given = operands("spgemm", 60, 0.1)
    for how in ({"top": 2}, {"threshold": 3}, {"top": 4, "threshold": -1}, {}):
        assert (kernel(**given, **how) != sparsetir.matmul(given["A"], given["B"], **how)).nnz == 0
    assert (kernel.bind(A=given["A"], top=2)(B=given["B"]) != kernel(**given, top=2)).nnz == 0
    with pytest.raises(ArgumentError, match="at least 1, got 0"):
        kernel(**given, top=0)
    for call in (sparsetir.build(sparsetir.ops.spgemm()), sparsetir.build(sparsetir.ops.spgemm()).bind):
        with pytest.raises(ArgumentTypeError, match=r"top is an argument of kernel.selecting\(\)"):
            call(**given, top=2)
    with pytest.raises(LoweringError, match="add merges rows: the largest entries are those of one product"):
        sparsetir.build(sparsetir.ops.add()).selecting()


C_PROGRAM = """\
#include <stdio.h>
#include "libf.h"

int main(void) {
  const int32_t indptr[] = {0, 1, 3}, indices[] = {1, 0, 1};
  const float values[] = {2, 3, 4};
  int64_t *starts;
  int32_t *columns;
  float *products;
  if (spgemm(values, values, indptr, indices, indptr, indices, 2, 2, 2, 3, 3, &starts, &columns, &products)) {
    puts(spgemm_last_error());
    return 1;
  }
  for (int row = 0; row < 2; ++row)
    for (int64_t at = starts[row]; at < starts[row + 1]; ++at) printf("%d %d %g\\n", row, columns[at], products[at]);
  spgemm_free(starts);
  spgemm_free(columns);
  spgemm_free(products);
  return 0;
}
"""


def test_a_c_program_gets_a_product(exported: Callable[[str], Exported]) -> None:
    folder = exported("spgemm").library.parent
    (folder / "main.c").write_text(C_PROGRAM)
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-std=c99"]
    subprocess.run([CC, *strict, "main.c", "libf.so", "-Wl,-rpath,$ORIGIN", "-o", "main"], cwd=folder, check=True)
    done = subprocess.run([folder / "main"], env={}, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["0 0 6", "0 1 8", "1 0 12", "1 1 22"]
