# SPDX-License-Identifier: Apache-2.0
"""Calls of exported libraries from C programs written from their headers: each pointer NULL, each size 0, -1, largest.

The package's C text and the programs are compiled with the address and undefined-behaviour sanitizers. The kernel's
machine code is LLVM's; all memory that it is passed is allocated under the sanitizer, exactly as large as it must be.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

import sparsetir
from corpus.computed import PROGRAMS, draw_arguments
from sparsetir import formats

GCC = shutil.which("gcc")
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
# Sanitizers see the same accesses in code that is not optimised, which takes a fifth of the time: the last -O counts.
# A sanitizer is no dependency of a plain library, so the linker has to be told that its symbols come with the program.
COMPILER = f'#!/bin/sh\nexec gcc "$@" -O0 {SANITIZERS} -Wl,--no-as-needed -lasan -lubsan\n'
OPTIONS = {"ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=512:detect_leaks=1"}

pytestmark = [
    pytest.mark.skipif(GCC is None or sys.platform != "linux", reason="needs Linux and gcc"),
    pytest.mark.optimised(level=1),  # unoptimised machine code refers to services that it does not call
]


@dataclass(frozen=True)
class Declared:
    """A parameter as the header declares it."""

    kind: str
    name: str
    stars: int

    @property
    def is_size(self) -> bool:
        return self.stars == 0 and self.kind.startswith("int") and self.name != "least"


@dataclass
class Case:
    """A kernel, what is passed to it, and its results."""

    kernel: Any
    arguments: dict[str, Any]  # by the names of the header
    results: dict[str, np.ndarray]
    empty: frozenset[str] = field(default_factory=frozenset)  # sizes that may be 0


def parse_header(text: str) -> tuple[str, list[Declared]]:
    """Return the name of the header's function and its parameters."""
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    name, declared = re.search(r"\bint (\w+)\(([^)]*)\);", code).groups()  # type: ignore[union-attr]
    found = [re.fullmatch(r"\s*(?:const\s+)?(\w+)\s+(\**)(\w+)\s*", part) for part in declared.split(",")]
    assert all(found), declared
    return name, [Declared(match[1], match[3], len(match[2])) for match in found if match]


HEAD = """\
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "libf.h"

static int failures;

static void *load(const char *name, size_t bytes) {
  void *memory = malloc(bytes);
  FILE *file = fopen(name, "rb");
  if (!memory || !file || fread(memory, 1, bytes, file) != bytes) exit(9);
  fclose(file);
  return memory;
}

static void save(const char *name, const void *memory, size_t bytes) {
  FILE *file = fopen(name, "wb");
  if (!file || fwrite(memory, 1, bytes, file) != bytes) exit(9);
  fclose(file);
}

static void fail(const char *what, const char *why) { printf("%s: %s\\n", what, why), ++failures; }
"""


def driver(name: str, declared: list[Declared], case: Case) -> str:
    """A C program that makes a good call and all the bad ones."""
    results = [p for p in declared if p.stars == 2]
    lines = [HEAD, "int main(void) {"]
    for p in declared:
        if p.stars == 2:
            lines.append(f"  {p.kind} *{p.name} = NULL;")
        elif p.stars == 1:
            lines.append(f'  {p.kind} *{p.name} = load("{p.name}.bin", {case.arguments[p.name].nbytes});')
        else:
            value = case.arguments[p.name]
            lines.append(f"  {p.kind} {p.name} = {'-INFINITY' if value == -np.inf else value};")
    passed = [f"&{p.name}" if p.stars == 2 else p.name for p in declared]

    def call(changed: Declared | None, value: str) -> str:
        arguments = [value if p is changed else text for p, text in zip(declared, passed, strict=True)]
        return f"{name}({', '.join(arguments)})"

    lines.append(f'  if ({call(None, "")}) fail("good call", {name}_last_error());')
    for p in declared:
        if p.name in case.results:
            lines.append(f'  save("{p.name}.out", {p.name}, {case.results[p.name].nbytes});')
    lines += [f"  {name}_free({p.name});" for p in results]
    for p in declared:
        if p.stars == 1 and case.arguments[p.name].size == 0:
            continue  # which may be NULL
        values = ["NULL"] if p.stars else ["0", "-1", f"{p.kind.removesuffix('_t').upper()}_MAX"] if p.is_size else []
        for value in values:
            lines += _bad_call(name, call(p, value), p, value, results, case)
    lines += [f"  free({p.name});" for p in declared if p.stars == 1]
    return "\n".join([*lines, "  return failures;", "}", ""])


def _bad_call(name: str, call: str, p: Declared, value: str, results: list[Declared], case: Case) -> list[str]:
    what = f'"{p.name} = {value}"'
    lines = [f"  {r.name} = (void *)-1;" for r in results]
    is_lawful = value.endswith("MAX") or (value == "0" and p.name in case.empty)
    lines += [f"  if ({call} == 0) {{"]
    lines += [f"    {name}_free({r.name});" for r in results]
    lines += ["  } else {" if is_lawful else f'    fail({what}, "returned 0");\n  }} else {{']
    lines += [f'    if ({r.name}) fail({what}, "{r.name} is not NULL");' for r in results if r.name != p.name]
    lines += [f'    if (!*{name}_last_error()) fail({what}, "no message");']
    if p.stars:
        lines += [f'    if (!strstr({name}_last_error(), "{p.name} is NULL")) fail({what}, {name}_last_error());']
    return [*lines, "  }"]


def check(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export, compile and run, and compare the results of the good call."""
    compiler = folder / "cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    header = case.kernel.export(folder / "libf.so")
    name, declared = parse_header(header.read_text())
    for p in declared:
        if p.stars == 1:
            case.arguments[p.name].tofile(folder / f"{p.name}.bin")
    (folder / "main.c").write_text(driver(name, declared, case))
    command = [*SANITIZERS.split(), "-Wall", "-Wextra", "-std=c99", "main.c", "libf.so", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([str(GCC), *command, "-o", "main"], cwd=folder, check=True)
    done = subprocess.run(
        [folder / "main"], cwd=folder, env=OPTIONS, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reported = done.stderr.replace("WARNING: AddressSanitizer failed to allocate", "")  # which is the largest size
    assert not re.search("Sanitizer|runtime error", reported), done.stderr
    for output, wanted in case.results.items():
        result = np.fromfile(folder / f"{output}.out", wanted.dtype).reshape(wanted.shape)
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5, err_msg=output)


# ---------------------------------------------------------------------------------------------- kernels


def draw(rows: int, cols: int, seed: int, dtype: str = "float32") -> sp.csr_array:
    rng = np.random.default_rng(seed)
    matrix = sp.random_array((rows, cols), density=0.3, format="csr", dtype="float64", rng=rng).astype(dtype)
    matrix.sort_indices()
    return matrix


def ready(kernel: Any, results: dict[str, np.ndarray], empty: str = "", **arguments: Any) -> Case:
    """A kernel with plain outputs."""
    gathered = kernel.signature.gather(arguments)
    kernel.signature.allocate(gathered)
    return Case(kernel, {**gathered.arrays, **gathered.sizes}, results, frozenset(empty.split()))


def dense(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


def spmm() -> Case:
    A, B = draw(7, 6, 0), dense(6, 4)
    return ready(sparsetir.build(sparsetir.ops.spmm()), {"c": A @ B}, "feat", A=A, B=B)


def spmv() -> Case:
    A, x = draw(7, 6, 1, "float64"), dense(6).astype("float64")
    kernel = sparsetir.build(sparsetir.ops.spmv("float64", idtype="int64"))
    A.indptr, A.indices = A.indptr.astype("int64"), A.indices.astype("int64")
    return ready(kernel, {"y_data": A @ x}, A=A, x=x)


def sddmm() -> Case:
    S, X, Y = draw(7, 6, 2), dense(7, 3), dense(6, 3)
    rows, cols = S.tocoo().coords
    return ready(
        sparsetir.build(sparsetir.ops.sddmm()), {"o": S.data * (X[rows] * Y[cols]).sum(1)}, "feat", S=S, X=X, Y=Y
    )


@T.prim_func
def sums_of_two_kinds(
    a: T.handle, s: T.handle, t: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    S = T.match_sparse_buffer(s, (I,), "float32")
    R = T.match_sparse_buffer(t, (I,), "float32")
    with T.sp_iter([I, J], "SR", "sum") as [i, j]:
        with T.init():
            S[i] = 0
        S[i] = S[i] + A[i, j]
    with T.sp_iter([I, J], "SR", "squares") as [i, j]:
        with T.init():
            R[i] = 0
        R[i] = R[i] + A[i, j] * A[i, j]


def several_outputs() -> Case:
    A = draw(7, 6, 3)
    return ready(sparsetir.build(sums_of_two_kinds), {"s": A.sum(axis=1), "t": (A * A).sum(axis=1)}, A=A)


def decomposed() -> Case:
    A, B = draw(8, 6, 4), dense(6, 4)
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(2, 2)}))
    bound, pieces = kernel.bind(A=A), kernel.pieces(A=A)
    arguments = {**{n: np.ascontiguousarray(v) if np.ndim(v) else v for n, v in pieces.items()}, "m": 8, "n": 6}
    return Case(
        bound,
        {**arguments, "b": B, "c": np.zeros((8, 4), "float32"), "feat": 4},
        {"c": A @ B},
        frozenset(["feat", "m", "n"]),
    )


def assembled(kernel: Any, wanted: sp.csr_array, **arguments: Any) -> Case:
    """A kernel that allocates its results."""
    args = kernel.prepare((), arguments)
    wanted = sp.csr_array(wanted)
    wanted.sort_indices()
    names = {"J_indptr": wanted.indptr.astype("int64"), "J_indices": wanted.indices.astype("int32")}
    return Case(
        kernel,
        {**args.arrays, **args.sizes, "top": 2, "least": -np.inf},
        {**names, "c": wanted.data},
        frozenset(["top"]),
    )


def spgemm() -> Case:
    A, B = draw(7, 6, 5), draw(6, 5, 6)
    return assembled(sparsetir.build(sparsetir.ops.spgemm()), A @ B, A=A, B=B)


def hash_tables() -> Case:
    A, B = draw(7, 6, 5), draw(6, 5, 6)
    schedule = sparsetir.Accumulators(insertion=4, kind="table")
    return assembled(sparsetir.build(sparsetir.ops.spgemm(), schedule=schedule), A @ B, A=A, B=B)


def add() -> Case:
    A, B = draw(7, 6, 7), draw(7, 6, 8)
    return assembled(sparsetir.build(sparsetir.ops.add()), A + B, A=A, B=B)


def masked() -> Case:
    A, B, M = draw(7, 6, 9), draw(6, 5, 10), draw(7, 5, 11)
    M.data[:] = 1
    kernel = sparsetir.build(sparsetir.ops.masked_spgemm())
    return assembled(kernel, kernel(A=A, B=B, M=M.astype(bool)), A=A, B=B, M=M.astype(bool))


def largest() -> Case:
    A, B = draw(7, 6, 12), draw(6, 5, 13)
    kernel, product = sparsetir.build(sparsetir.ops.spgemm()).selecting(), (A @ B).toarray()
    top = np.where(product >= np.sort(product, axis=1)[:, -2:-1], product, 0)
    return assembled(kernel, sp.csr_array(top), A=A, B=B)


def least_sums() -> Case:
    kernel = sparsetir.build(sparsetir.parse(PROGRAMS["least sums"]))
    arguments = draw_arguments("least sums", (7, 6, 5, 4), 0.4)
    A, B = (np.full(arguments[name].shape, np.inf) for name in "AB")
    A[arguments["A"].tocoo().coords] = arguments["A"].data
    B[arguments["B"].tocoo().coords] = arguments["B"].data
    sums = (A[:, :, None] + B[None]).min(axis=1)
    rows, cols = np.nonzero(np.isfinite(sums))
    wanted = sp.csr_array((sums[rows, cols].astype("float32"), (rows, cols)), shape=sums.shape)
    return assembled(kernel, wanted, **arguments)


CASES: list[Callable[[], Case]] = [
    spmm, spmv, sddmm, several_outputs, decomposed, spgemm, hash_tables, add, masked, largest, least_sums
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_bad_pointers_and_sizes_are_refused(
    make: Callable[[], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(make(), tmp_path, monkeypatch)


@pytest.mark.slow
def test_results_with_one_place_are_refused(tmp_path: Path) -> None:
    """Two results cannot have the same pointer."""
    case = spgemm()
    header = case.kernel.export(tmp_path / "libf.so")
    name, declared = parse_header(header.read_text())
    library, place = ctypes.CDLL(str(tmp_path / "libf.so")), ctypes.c_void_p(1)
    passed = [
        ctypes.byref(place) if p.stars == 2
        else ctypes.c_void_p(case.arguments[p.name].ctypes.data) if p.stars
        else int(case.arguments[p.name])
        for p in declared
    ]  # fmt: skip
    library.spgemm_last_error.restype = ctypes.c_char_p
    assert getattr(library, name)(*passed) == -1
    assert b"are the same address" in library.spgemm_last_error()
    assert place.value is None
