# SPDX-License-Identifier: Apache-2.0
"""Kernels as shared libraries: called from C without Python, and from a process that has TVM."""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME
from corpus.running import check, draw
from sparsetir import formats
from sparsetir.codegen.cache import CACHE_VARIABLE
from sparsetir.codegen.export import Interface, export, identifier
from sparsetir.errors import ArgumentError, LoweringError, SparseTIRError
from sparsetir.utils.arguments import VALUE_DTYPES

CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
CXX = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]

pytestmark = [
    pytest.mark.skipif(CC is None or sys.platform != "linux", reason="needs Linux and a C compiler"),
    pytest.mark.optimised(level=1),  # unoptimised machine code refers to services that it does not call
    pytest.mark.usefixtures("quick_compiler"),
]

building = importlib.import_module("sparsetir.codegen.cache")
C_TYPES = {f"{kind}_t": getattr(ctypes, f"c_{kind}") for kind in ("int8", "uint8", "int16", "uint16", "int32", "int64")}
C_TYPES |= {"float": ctypes.c_float, "double": ctypes.c_double}


@dataclass
class Exported:
    """A kernel and its library."""

    kernel: Any
    library: Path

    @property
    def header(self) -> Path:
        return self.library.with_suffix(".h")

    @functools.cached_property
    def interface(self) -> Interface:
        return Interface(self.kernel)

    @functools.cached_property
    def loaded(self) -> ctypes.CDLL:
        loaded = ctypes.CDLL(str(self.library))
        getattr(loaded, f"{self.interface.name}_last_error").restype = ctypes.c_char_p
        return loaded

    def set_num_threads(self, count: int) -> None:
        getattr(self.loaded, f"{self.interface.name}_set_num_threads")(count)

    def call(self, arguments: dict[str, Any]) -> str:
        """The message of a call with arrays and numbers by parameter name; "" for success."""
        passed = []
        for parameter in self.interface.parameters:
            value = arguments[parameter.symbol]
            if parameter.shape is None:
                value = C_TYPES[parameter.declaration.split()[0]](value)
            elif value is not None:
                value = ctypes.c_void_p(value.ctypes.data)
            passed.append(value)
        if getattr(self.loaded, self.interface.name)(*passed) == 0:
            return ""
        return getattr(self.loaded, f"{self.interface.name}_last_error")().decode()


def ready(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the C function: outputs allocated, all sizes known."""
    held = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    gathered = kernel.signature.gather(held)
    kernel.signature.allocate(gathered)
    return {**gathered.arrays, **gathered.sizes}


def csr(*, rows: int = 50, cols: int = 40, dtype: str = "float32", idtype: str = "int32") -> dict[str, Any]:
    """A random matrix with some empty rows, by parameter name of the ready programs."""
    rng = np.random.default_rng(3)
    dense = rng.random((rows, cols)) < 0.2
    dense[::7] = False
    indptr = np.concatenate([[0], np.cumsum(dense.sum(1))]).astype(idtype)
    indices = np.nonzero(dense)[1].astype(idtype)
    data = rng.uniform(-1, 1, len(indices)).astype(dtype)
    return {"a": data, "indptr": indptr, "indices": indices, "m": rows, "n": cols, "nnz": len(indices)}


def densified(args: dict[str, Any]) -> np.ndarray:
    dense = np.zeros((args["m"], args["n"]))
    rows = np.repeat(np.arange(args["m"]), np.diff(args["indptr"]))
    np.add.at(dense, (rows, args["indices"]), args["a"])
    return dense


def spmm_arguments() -> tuple[dict[str, Any], np.ndarray]:
    args = csr()
    b = np.random.default_rng(4).uniform(-1, 1, (40, 37)).astype("float32")
    return {**args, "b": b, "feat": 37, "c": np.full((50, 37), np.nan, "float32")}, densified(args) @ b


def spmv_arguments() -> tuple[dict[str, Any], np.ndarray]:
    args = csr(dtype="float64", idtype="int64")
    x = np.random.default_rng(5).uniform(-1, 1, 40)
    return {**args, "x_data": x, "y_data": np.full(50, np.nan)}, densified(args) @ x


def sddmm_arguments() -> tuple[dict[str, Any], np.ndarray]:
    args, rng = csr(), np.random.default_rng(6)
    x, y = rng.uniform(-1, 1, (50, 9)).astype("float32"), rng.uniform(-1, 1, (40, 9)).astype("float32")
    s = args.pop("a")
    rows = np.repeat(np.arange(50), np.diff(args["indptr"]))
    wanted = s * (x[rows].astype("float64") * y[args["indices"]]).sum(1)
    return {**args, "s": s, "x": x, "y": y, "o": np.full(len(s), np.nan, "float32"), "feat": 9}, wanted


@T.prim_func
def normalised(a: T.handle, o: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    """Rows divided by their sums of squares, which are scratch; the steps run in parallel."""
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    O = T.match_sparse_buffer(o, (I, J), "float32")
    S = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([I, J], "SR", "sum") as [i, j]:
        with T.init():
            S[i] = 0
        S[i] = S[i] + A[i, j] * A[i, j]
    with T.sp_iter([I], "S", "invert") as [i]:
        S[i] = T.if_then_else(S[i] > 0, 1 / S[i], T.float32(0))
    with T.sp_iter([I, J], "SS", "scale") as [i, j]:
        O[i, j] = A[i, j] * S[i]


def normalised_arguments() -> tuple[dict[str, Any], np.ndarray]:
    args = csr()
    rows = np.repeat(np.arange(50), np.diff(args["indptr"]))
    sums = np.bincount(rows, args["a"].astype("float64") ** 2, minlength=50)
    return {**args, "o": np.full(args["nnz"], np.nan, "float32")}, args["a"] / sums[rows]


# program, arguments, output
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[dict[str, Any], np.ndarray]], str]] = {
    "spmm": (sparsetir.ops.spmm, spmm_arguments, "c"),
    "spmv": (lambda: sparsetir.ops.spmv("float64", idtype="int64"), spmv_arguments, "y_data"),
    "sddmm": (sparsetir.ops.sddmm, sddmm_arguments, "o"),
    "normalised": (lambda: normalised, normalised_arguments, "o"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Export a program of `PROGRAMS`, once."""

    @functools.cache
    def make(name: str) -> Exported:
        kernel = sparsetir.build(PROGRAMS[name][0]())
        library = tmp_path_factory.mktemp(name) / f"lib{name}.so"
        assert kernel.export(library) == library.with_suffix(".h")
        return Exported(kernel, library)

    return make


def made(kernel: Any, library: Path) -> Exported:
    kernel.export(library)
    return Exported(kernel, library)


# ---------------------------------------------------------------------------------------------- from C


def embedded(parameter: Any, value: Any) -> str:
    """C text that declares an argument."""
    kind = parameter.declaration.removesuffix(parameter.name).replace("const", "").replace("*", "").strip()
    if parameter.shape is None:
        return f"{kind} {parameter.name} = {value};"
    numbers = ", ".join("-1" if np.isnan(v) else repr(v.item()) for v in value.ravel())
    return f"static {kind} {parameter.name}[] = {{{numbers}}};"


def c_program(exported: Exported, arguments: dict[str, Any], output: str) -> str:
    """A program that calls the kernel and prints an output."""
    parameters = exported.interface.parameters
    name, out = exported.interface.name, next(p.name for p in parameters if p.symbol == output)
    declared = "\n  ".join(embedded(p, arguments[p.symbol]) for p in parameters)
    return f"""\
#include <stdio.h>
#include "{exported.header.name}"

int main(void) {{
  {declared}
  if ({name}({", ".join(p.name for p in parameters)})) {{
    puts({name}_last_error());
    return 1;
  }}
  for (size_t n = 0; n < sizeof {out} / sizeof *{out}; ++n) printf("%.17g\\n", (double){out}[n]);
  return 0;
}}
"""


def run_c(exported: Exported, text: str, *flags: str, compiler: str | None = None) -> list[str]:
    """Compile a program against the library, run it without any environment, and split what it prints."""
    suffix = "cpp" if compiler else "c"
    folder = exported.library.parent
    (folder / f"main.{suffix}").write_text(text)
    linked = [exported.library.name, "-pthread", "-Wl,-rpath,$ORIGIN", "-o", "main"]
    subprocess.run([compiler or CC, *STRICT, *flags, f"main.{suffix}", *linked], cwd=folder, check=True)
    done = subprocess.run([str(folder / "main")], env={}, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_c_program_gets_the_right_numbers(name: str, exported: Callable[[str], Exported]) -> None:
    library, (arguments, wanted) = exported(name), PROGRAMS[name][1]()
    printed = run_c(library, c_program(library, arguments, PROGRAMS[name][2]), "-std=c99")
    np.testing.assert_allclose(np.array(printed, float), wanted.ravel(), rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
def test_the_header_is_cpp_too(exported: Callable[[str], Exported]) -> None:
    library, (arguments, wanted) = exported("spmv"), spmv_arguments()
    printed = run_c(library, c_program(library, arguments, "y_data"), "-std=c++11", compiler=CXX)
    np.testing.assert_allclose(np.array(printed, float), wanted)


def test_the_example_in_the_documentation_runs(exported: Callable[[str], Exported]) -> None:
    documented = inspect.getdoc(export) or ""
    text = textwrap.dedent(documented[documented.index("    #include <stdio.h>") :])
    assert run_c(exported("spmm"), text) == ["1", "32"]


def test_the_library_needs_no_python_and_no_tvm(exported: Callable[[str], Exported]) -> None:
    library = exported("normalised").library
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"lib(\w+)\.so", needed)) <= {"c", "m", "pthread"}
    assert "not found" not in needed


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_nothing_else_is_visible(exported: Callable[[str], Exported]) -> None:
    listing = ["nm", "--dynamic", "--defined-only", "--format=posix", exported("spmm").library]
    lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["spmm", "spmm_last_error", "spmm_set_num_threads"]


def test_a_forked_process_may_call(exported: Callable[[str], Exported]) -> None:
    library, (arguments, wanted) = exported("normalised"), normalised_arguments()
    declared = "\n  ".join(embedded(p, arguments[p.symbol]) for p in library.interface.parameters)
    call = f"normalised({', '.join(p.name for p in library.interface.parameters)})"
    text = f"""\
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
#include "{library.header.name}"

int main(void) {{
  {declared}
  int status = 1;
  normalised_set_num_threads(3);
  if ({call}) return 1;
  pid_t child = fork();
  if (child == 0) _exit({call});
  waitpid(child, &status, 0);
  printf("%d %d", status, {call});
  return 0;
}}
"""
    assert run_c(library, text) == ["0", "0"]


# ---------------------------------------------------------------------------------------------- beside TVM


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("threads", [1, 3, 0])
def test_it_runs_in_a_process_with_tvm(name: str, threads: int, exported: Callable[[str], Exported]) -> None:
    library, (arguments, wanted) = exported(name), PROGRAMS[name][1]()
    library.set_num_threads(threads)
    assert library.call(arguments) == ""
    np.testing.assert_allclose(arguments[PROGRAMS[name][2]].ravel(), wanted.ravel(), rtol=2e-5, atol=2e-5)
    own = dict(arguments)
    del own[PROGRAMS[name][2]]
    np.testing.assert_allclose(library.kernel(**own).ravel(), wanted.ravel(), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("csrmm_half", "float16"),  # passed as uint16_t
        ("csrmm_half", "bfloat16"),
        ("bool_mask", "float32"),
        ("quantised", "float32"),
        ("beta_scale", "float32"),  # a float parameter, an array that is read and written
        ("implicit_sizes", "float32"),  # the number of entries becomes a parameter
        ("buffer_params", "float32"),
        ("ell_spmm", "float64"),
        ("mttkrp_3d", "float64"),
    ],
)
def test_programs_of_all_kinds(name: str, dtype: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    func = case.make(dtype, "int32")
    library = made(sparsetir.build(func), tmp_path / f"{name}.so")
    for kind in ("random", "zero_nnz", "no_rows"):
        if kind in case.kinds:
            arguments = draw(case, kind, dtype, "int32")
            passed = ready(library.kernel, arguments)
            assert library.call(passed) == ""
            check(case, func, dtype, [passed[output] for output in case.output_names], arguments)


def test_several_threads_call_at_once(exported: Callable[[str], Exported]) -> None:
    library = exported("normalised")
    assert "T.parallel" in library.kernel.compiled.stages[3].script()
    library.set_num_threads(3)

    def repeat(_: int) -> float:
        arguments, wanted = normalised_arguments()
        worst = 0.0
        for _ in range(200):
            arguments["o"].fill(np.nan)
            assert library.call(arguments) == ""
            worst = max(worst, float(np.abs(arguments["o"] - wanted).max()))
        return worst

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(repeat, range(4))) < 1e-4


# ---------------------------------------------------------------------------------------------- wrong calls


NNZ = csr()["nnz"]
WRONG = [
    ({"a": None}, f"a is NULL, expected {NNZ} elements"),
    ({"c": None}, "c is NULL, expected 1850 elements"),
    ({"m": -1}, "dimension 0 of c would be -1: sizes must not be negative"),
    ({"feat": -3}, "dimension 1 of b would be -3"),
    ({"nnz": NNZ - 1}, f"indptr ends at {NNZ} but there are {NNZ - 1} stored entries"),
    ({"m": 48}, "indptr ends at"),
    ({"m": 2**31 - 1, "feat": 1}, "more than 32-bit sizes can count"),
    ({"m": 2**31 - 2, "feat": 2**31 - 1}, "more than 32-bit sizes can count"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_calls_are_refused(changes: dict[str, Any], message: str, exported: Callable[[str], Exported]) -> None:
    arguments, _ = spmm_arguments()
    assert message in exported("spmm").call({**arguments, **changes})
    assert np.isnan(arguments["c"]).all()


def test_row_pointers_start_at_zero(exported: Callable[[str], Exported]) -> None:
    arguments, _ = spmm_arguments()
    arguments["indptr"][0] = 1
    assert exported("spmm").call(arguments) == "indptr starts at 1, expected 0"


def test_an_output_must_not_overlap(exported: Callable[[str], Exported]) -> None:
    arguments, _ = spmm_arguments()
    memory = np.zeros(4000, "float32")
    arguments["b"], arguments["c"] = memory[: 40 * 37], memory[40 * 37 - 1 :]
    assert exported("spmm").call(arguments) == "c and b share memory, and c is written"
    arguments["c"] = memory[40 * 37 :]
    assert exported("spmm").call(arguments) == ""


def test_each_thread_has_its_message(exported: Callable[[str], Exported]) -> None:
    library, (arguments, _) = exported("spmm"), spmm_arguments()
    assert "a is NULL" in library.call({**arguments, "a": None})
    with ThreadPoolExecutor(1) as pool:
        assert "b is NULL" in pool.submit(library.call, {**arguments, "b": None}).result()
    assert "a is NULL" in library.loaded.spmm_last_error().decode()


def test_scratch_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    @T.prim_func
    def total(y: T.handle, n: T.int64):
        I = T.dense_fixed(n, "int64")
        K = T.dense_fixed(1, "int64")
        Y = T.match_sparse_buffer(y, (K,), "float32")
        S = T.alloc_sparse_buffer((I,), "float32")
        with T.sp_iter([I], "S", "fill") as [i]:
            S[i] = T.cast(i, "float32")
        with T.sp_iter([K, I], "SR", "sum") as [k, i]:
            with T.init():
                Y[k] = 0
            Y[k] = Y[k] + S[i]

    library, y = made(sparsetir.build(total), tmp_path / "total.so"), np.zeros(1, "float32")
    assert library.call({"y": y, "n": 2**60}) == f"out of memory: {2**62} bytes of scratch"
    assert library.call({"y": y, "n": 5}) == ""
    assert y[0] == 10


def test_a_size_that_64_bits_cannot_count_is_an_error(tmp_path: Path) -> None:
    @T.prim_func
    def ones(y: T.handle, n: T.int64, m: T.int64):
        I = T.dense_fixed(n * m + 1, "int64")
        Y = T.match_sparse_buffer(y, (I,), "float32")
        with T.sp_iter([I], "S", "fill") as [i]:
            Y[i] = T.float32(1)

    library, y = made(sparsetir.build(ones), tmp_path / "ones.so"), np.zeros(7, "float32")
    for n, m in ((2**64 // 3 + 2, 3), (2**62, 4), (2**63 - 1, 1), (2**61, 1)):  # the first wraps around to 5
        assert library.call({"y": y, "n": n, "m": m}) == "y is too large to address"
    assert "sizes must not be negative" in library.call({"y": y, "n": -(2**63), "m": 3})
    assert not y.any()
    assert library.call({"y": y, "n": 2, "m": 3}) == ""
    assert y.all()


# ---------------------------------------------------------------------------------------------- names


@T.prim_func
def double(args: T.handle, register: T.handle, arrays: T.handle, int32_t: T.int32, unix: T.int32):
    I = T.dense_fixed(int32_t)
    K = T.dense_fixed(unix)
    A = T.match_sparse_buffer(args, (I, K), "float32")
    B = T.match_sparse_buffer(register, (I, K), "float32")
    C = T.match_sparse_buffer(arrays, (I, K), "float32")
    with T.sp_iter([I, K], "SS", "twice") as [i, k]:
        C[i, k] = A[i, k] + B[i, k]


def test_names_that_c_cannot_have_get_an_underscore(tmp_path: Path) -> None:
    library = made(sparsetir.build(double), tmp_path / "double.so")
    assert re.sub(r"\s+", " ", library.interface.prototypes["double_"][1]) == (
        "int double_(const float *args, const float *register_, float *arrays, int32_t int32_t_, int32_t unix_);"
    )
    x = np.arange(6, dtype="float32")
    arguments = {"args": x, "register": x, "arrays": np.zeros(6, "float32"), "int32_t": 2, "unix": 3}
    printed = run_c(library, c_program(library, arguments, "arrays"))
    assert np.array(printed, float).tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("x", "x"), ("B_data", "B_data"), ("a.b", "a_b"), ("2d", "_2d"), ("", "_"), ("while", "while_"), ("é", "_")],
)
def test_identifiers(name: str, expected: str) -> None:
    taken: set[str] = set()
    assert identifier(name, taken) == expected
    assert identifier(name, taken) == f"{expected}_"


def test_a_name_of_the_c_library_is_refused(tmp_path: Path) -> None:
    func = sparsetir.ops.spmv().with_attr("global_symbol", "exp")
    with pytest.raises(LoweringError, match="exp"):
        sparsetir.build(func).export(tmp_path / "exp.so")


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_every_dtype_has_a_c_type(dtype: str, tmp_path: Path) -> None:
    @T.prim_func
    def pick(x: T.handle, y: T.handle, n: T.int32):
        I = T.dense_fixed(n)
        X = T.match_sparse_buffer(x, (I,), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I], "S", "pick") as [i]:
            Y[i] = X[i]

    library = made(sparsetir.build(pick), tmp_path / "pick.so")
    storage = np.uint16 if dtype in ("float16", "bfloat16") else np.dtype(dtype)
    x, y = np.array([1, 0, 1], storage), np.zeros(3, storage)
    assert library.call({"x": x, "y": y, "n": 3}) == ""
    assert y.tolist() == x.tolist()


def test_sums_of_halves_in_memory(tmp_path: Path) -> None:
    """In float16 they would stop at 2048."""

    @T.prim_func
    def scatter(x: T.handle, to: T.handle, y: T.handle, n: T.int32, m: T.int32):
        I = T.dense_fixed(n)
        J = T.dense_fixed(m)
        X = T.match_sparse_buffer(x, (I,), "float16")
        To = T.match_sparse_buffer(to, (I,), "int32")
        Y = T.match_sparse_buffer(y, (J,), "float16")
        with T.sp_iter([I], "R", "scatter") as [i]:
            Y[To[i]] = Y[To[i]] + X[i]

    library = made(sparsetir.build(scatter), tmp_path / "scatter.so")
    x, to, y = np.ones(5000, "float16"), np.arange(5000, dtype="int32") % 2, np.full(3, 4, "float16")
    assert library.call({"x": x.view("uint16"), "to": to, "y": y.view("uint16"), "n": 5000, "m": 3}) == ""
    assert y.tolist() == [2504, 2504, 4]


# ---------------------------------------------------------------------------------------------- files and failures


@pytest.fixture
def kernel(exported: Callable[[str], Exported]) -> Any:
    return exported("spmm").kernel


def test_the_header_goes_where_it_is_asked_for(kernel: Any, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "sparse-kernels.h"
    assert kernel.export(tmp_path / "libspmm.so", header=header) == header
    assert "#ifndef SPARSETIR_SPARSE_KERNELS_H" in header.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["include", "libspmm.so"]
    assert header.stat().st_mode & 0o777 == (tmp_path / "libspmm.so").stat().st_mode & 0o666


@pytest.mark.slow
def test_a_kernel_from_the_disk_cache_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with building.separate():
        sparsetir.build(normalised)
        building.write_cache()
        building.forget()
        found = sparsetir.build(normalised)
    assert not hasattr(found.compiled.library, "mod")
    arguments, wanted = normalised_arguments()
    assert made(found, tmp_path / "cached.so").call(arguments) == ""
    np.testing.assert_allclose(arguments["o"], wanted, rtol=2e-5)


def test_without_a_compiler_it_says_what_to_install(
    kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparseTIRError, match=r"needs a C compiler, found none of cc, gcc, clang: install one"):
        kernel.export(tmp_path / "x.so")
    monkeypatch.setenv("CC", "/nowhere/gcc -m64")
    with pytest.raises(SparseTIRError, match="CC = /nowhere/gcc -m64 is not there"):
        kernel.export(tmp_path / "x.so")
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_old_files_alone(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.so", "x.h"):
        (tmp_path / name).write_text("old")
    monkeypatch.setenv("CC", "false")
    with pytest.raises(LoweringError, match="could not make the library"):
        kernel.export(tmp_path / "x.so")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.so": "old", "x.h": "old"}


def test_old_files_are_replaced(kernel: Any, tmp_path: Path) -> None:
    for name in ("x.so", "x.h"):
        (tmp_path / name).write_text("old")
    library = made(kernel, tmp_path / "x.so")
    assert library.call(spmm_arguments()[0]) == ""
    assert "int spmm(" in library.header.read_text()


def test_places_that_cannot_be_written(kernel: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="does not exist; create it first"):
        kernel.export(tmp_path / "missing" / "x.so")
    with pytest.raises(ArgumentError, match="is a folder"):
        kernel.export(tmp_path)
    for name in ("spmm", "spmm.c", "spmm.dll", "libspmm.a", "x.h"):
        with pytest.raises(ArgumentError, match=rf"expected a name ending in \.so, got {re.escape(name)}"):
            kernel.export(tmp_path / name)
    with pytest.raises(ArgumentError, match=r"library and header would both be .*: give the header another name"):
        kernel.export(tmp_path / "x.so", header=tmp_path / "x.so")


def test_a_kernel_for_another_machine_is_refused(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}
    monkeypatch.setattr(kernel.compiled, "target", tvm.target.Target(other))
    with pytest.raises(ArgumentError, match="compiled for riscv64-linux-gnu and cannot be linked on"):
        kernel.export(tmp_path / "x.so")


def test_a_kernel_that_calls_into_tvm_is_refused(tmp_path: Path) -> None:
    @T.prim_func
    def calls(x: T.handle, n: T.int32):
        I = T.dense_fixed(n)
        X = T.match_sparse_buffer(x, (I,), "float32")
        T.evaluate(T.call_packed("testing.nothing", n))
        with T.sp_iter([I], "S", "set") as [i]:
            X[i] = 0

    with pytest.raises(LoweringError, match=r"calls calls functions registered in TVM \(call_packed\)"):
        sparsetir.build(calls).export(tmp_path / "x.so")


@pytest.mark.slow
@pytest.mark.parametrize("format", [formats.bsr(2, 2), formats.blocks(2, 2), formats.sell(4, 8)], ids=repr)
def test_kernels_over_other_formats(format: Any, tmp_path: Path) -> None:
    """The library takes the pieces, which Python writes to files, and the header says what they are."""
    A = sp.random_array((24, 20), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
    B, C = np.random.default_rng(1).standard_normal((20, 8)).astype("float32"), np.zeros((24, 8), "float32")
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": format}))
    header = kernel.bind(A=A).export(tmp_path / "libspmm.so").read_text()
    assert f"A is stored as {format!r}" in header
    table = kernel.write_pieces(tmp_path / "pieces", A=A).read_text()
    given = dict(re.findall(r"#define PIECES_(\w+) (\d+)", table))
    exported = Exported(kernel.kernel, tmp_path / "libspmm.so")
    sizes = {"m": 24, "n": 20, "feat": 8}
    arguments: dict[str, Any] = {"b": B, "c": C}
    for parameter in exported.interface.parameters:
        name = parameter.name
        if parameter.shape is not None and name not in arguments:
            arguments[name] = np.fromfile(tmp_path / "pieces" / f"{name}.bin", parameter.dtype)
            assert arguments[name].size == int(given[f"{name}_COUNT"])
            assert name in header
        elif parameter.shape is None:
            arguments[name] = int(given.get(name, sizes.get(name, 0)))
    assert exported.call(arguments) == ""
    np.testing.assert_allclose(C, A @ B, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["", "."])
def test_a_library_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(ArgumentError, match=r"expected a name ending in \.so"):
        sparsetir.build(sparsetir.ops.spmv()).export(path)
