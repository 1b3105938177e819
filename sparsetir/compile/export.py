# SPDX-License-Identifier: Apache-2.0
"""Write a kernel as a shared library with a plain C function: no Python, no TVM.

The machine code is TVM's object file. What it expects of TVM's runtime is in ``export_runtime.c``; the function made
here checks its arguments, describes them to the machine code and calls it. The C compiler puts the three together.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.compile.disk_cache import writing
from sparsetir.compile.pipeline import machine_code
from sparsetir.errors import ArgumentError, LoweringError, SparseTIRError

if TYPE_CHECKING:
    from sparsetir.call.kernel import Kernel

RUNTIME = Path(__file__).with_name("export_runtime.c")
COMPILERS = ("cc", "gcc", "clang")
CLASH = "-Werror=builtin-declaration-mismatch"  # A kernel called exp would take the place of libm's in its users.

# dtype -> C type, DLPack's name of its kind, bits
TYPES = {
    "bool": ("uint8_t", "kDLBool", 8),
    "float16": ("uint16_t", "kDLFloat", 16),
    "bfloat16": ("uint16_t", "kDLBfloat", 16),
    "float32": ("float", "kDLFloat", 32),
    "float64": ("double", "kDLFloat", 64),
    **{f"int{bits}": (f"int{bits}_t", "kDLInt", bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (f"uint{bits}_t", "kDLUInt", bits) for bits in (8, 16, 32, 64)},
}

SIZES = {
    tirx.Add: "({} + {})",
    tirx.Sub: "({} - {})",
    tirx.Mul: "({} * {})",
    tirx.FloorDiv: "rt_floor_div({}, {})",
    tirx.FloorMod: "rt_floor_mod({}, {})",
    tirx.Min: "rt_smaller({}, {})",
    tirx.Max: "rt_larger({}, {})",
}

# Words that cannot name a parameter or function in C or C++, and macros of compilers and common headers.
RESERVED = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
    concept const const_cast consteval constexpr constinit continue co_await co_return co_yield decltype default delete
    do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long main mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires restrict return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename typeof union unsigned using virtual void volatile wchar_t while
    xor xor_eq
    EOF I NULL assert complex errno linux offsetof stderr stdin stdout unix
    """.split()
)

# Services of TVM's runtime that `export_runtime.c` does not have, and what asks for them.
MISSING = {
    b"__TVMFFIFunctionCall": "calls functions registered in TVM (call_packed)",
    b"__TVMFFIEnvModLookupFromImports": "calls functions registered in TVM (call_packed)",
    b"__TVMBackendParallelBarrier": "has a barrier inside a parallel loop",
}


def export(kernel: Kernel, path: Path, header: Path | None = None, *, notes: Sequence[str] = ()) -> Path:
    """Write `kernel` as a shared library with a C header; see `Kernel.export`.

    The library needs libc, libm and POSIX threads, and a processor with the features of the kernel's target. For a
    kernel of ``sparsetir.ops.spmm()`` the header declares::

        int spmm(const float *a, const float *b, float *c, const int32_t *indptr, const int32_t *indices,
                 int32_t m, int32_t n, int32_t nnz, int32_t feat);
        const char *spmm_last_error(void);
        void spmm_set_num_threads(int threads);

    The parameters are those of the script in its order. Sizes that the script leaves to the shapes of its arrays
    follow as further parameters. Halves are passed as ``uint16_t``, bools as ``uint8_t``.

    Parameters
    ----------
    kernel : Kernel
        What `sparsetir.build` returned, compiled for this kind of machine.
    path : Path
        The library, ``.so``.
    header : Path, optional
        The header, by default next to the library with suffix ``.h``.
    notes : sequence of str
        Lines for the header's comment.

    Returns
    -------
    Path
        The header.

    Raises
    ------
    SparseTIRError
        There is no C compiler.
    ArgumentError
        A name that does not end in ``.so``, no such folder, or a kernel for another kind of machine.
    WriteError
        The disk is full.
    LoweringError
        A parameter that has no plain C type, or a kernel that needs more of TVM than machine code.

    Notes
    -----
    The function returns 0, or -1 with a message in ``spmm_last_error`` (one per thread). It notices NULL, negative and
    inconsistent sizes, row pointers that do not end at the number of stored entries, and outputs that overlap another
    array; the index arrays are trusted otherwise. It may be called from several threads at once.

    Examples
    --------
    >>> import sparsetir
    >>> sparsetir.build(sparsetir.ops.spmm()).export("libspmm.so")  # doctest: +SKIP
    PosixPath('libspmm.h')

    Then in C, compiled with ``cc main.c -L. -lspmm -Wl,-rpath,'$ORIGIN'``::

        #include <stdio.h>
        #include "libspmm.h"

        int main(void) {
          const int32_t indptr[] = {0, 1, 3}, indices[] = {0, 0, 1};
          const float a[] = {1, 2, 3}, b[] = {1, 10};
          float c[2];
          if (spmm(a, b, c, indptr, indices, 2, 2, 3, 1)) {
            fprintf(stderr, "%s\\n", spmm_last_error());
            return 1;
          }
          printf("%g %g\\n", c[0], c[1]); /* 1 32 */
        }
    """
    header = path.with_suffix(".h") if header is None else header
    _check_places(path, header)
    _check_target(kernel.target)
    interface = Interface(kernel, notes)
    compiler = _compiler()
    with writing(path), tempfile.TemporaryDirectory() as folder:
        build = Path(folder)
        (build / "interface.h").write_text(interface.header(header.stem), encoding="utf-8")
        (build / "kernel.c").write_text(interface.source(), encoding="utf-8")
        (build / "exports").write_text(interface.exports())
        _write_object(kernel, build / "kernel.o")
        _link(compiler, build, path.name)
        _place({build / "library": path, build / "interface.h": header})
    return header


# ---------------------------------------------------------------------------------------------- what C sees


@dataclass(frozen=True)
class Parameter:
    """One parameter of the C function."""

    name: str
    symbol: str
    dtype: str
    shape: tuple[Any, ...] | None
    shown: str
    read: bool
    written: bool

    @property
    def declaration(self) -> str:
        kind = TYPES[self.dtype][0]
        if self.shape is None:
            return f"{'float' if self.dtype in ('float16', 'bfloat16') else kind} {self.name}"
        return f"{'' if self.written else 'const '}{kind} *{self.name}"

    @property
    def description(self) -> str:
        """What the header says of an array."""
        use = "read and written" if self.read and self.written else "written" if self.written else "read"
        other = f" ({self.shown})" if self.shown != self.name else ""
        return f"{self.name}{other}: {self.dtype}[{', '.join(map(str, self.shape or ()))}], {use}"


class Interface:
    """The C text around a kernel.

    Parameters
    ----------
    kernel : Kernel
        What is exported.
    notes : sequence of str
        Lines for the header's comment.

    Raises
    ------
    LoweringError
        A parameter that has no plain C type.
    """

    def __init__(self, kernel: Kernel, notes: Sequence[str] = ()) -> None:
        self.kernel, self.notes = kernel, list(notes)
        self.name = identifier(kernel.name, set())
        taken: set[str] = set()
        self.given = [self._parameter(var, taken) for var in kernel.func.params]
        self.implied = [_scalar(var, taken) for var in self._implied_sizes()]
        self.parameters = [*self.given, *self.implied]

    def _parameter(self, var: Var, taken: set[str]) -> Parameter:
        if not tirx.is_buffer_var(var):
            return _scalar(var, taken)
        effects, symbol = self.kernel.signature.effects, str(var.name)
        if len(var.ty.strides) > 0:
            raise LoweringError(f"{symbol} has strides; exported kernels take arrays without gaps: leave strides out")
        shown = self.kernel.signature.shown(symbol)
        written = symbol in effects.written
        read = not written or symbol in effects.updated
        dtype = _plain(symbol, str(var.ty.dtype))
        return Parameter(identifier(symbol, taken), symbol, dtype, tuple(var.ty.shape), shown, read, written)

    def _implied_sizes(self) -> list[Var]:
        """Symbols of shapes that are no parameters."""
        found: dict[str, Var] = {}

        def note(var: Var) -> None:
            found.setdefault(str(var.name), var)

        for parameter in self.given:
            for extent in parameter.shape or ():
                tvm_ffi.structural_walk(extent, (Var, note))
        known = {p.symbol for p in self.given}
        return [var for name, var in found.items() if name not in known]

    @cached_property
    def arrays(self) -> list[tuple[int, Parameter]]:
        """Arrays by their place among the parameters."""
        return [(at, p) for at, p in enumerate(self.given) if p.shape is not None]

    def _offsets(self) -> list[tuple[str, Any]]:
        """Row pointers, and the number of entries they end at."""
        found = {}
        for axis in self.kernel.signature.program.axes.values():
            if axis.indptr is not None:
                found[str(axis.indptr.name)] = axis.indices.ty.shape[0] if axis.indices is not None else axis.count
        return list(found.items())

    # ------------------------------------------------------------------ texts

    @property
    def prototypes(self) -> list[str]:
        """The three public functions."""
        return [
            f"int {self.name}({', '.join(p.declaration for p in self.parameters) or 'void'});",
            f"const char *{self.name}_last_error(void);",
            f"void {self.name}_set_num_threads(int threads);",
        ]

    def header(self, stem: str) -> str:
        """The header for users."""
        guard = re.sub(r"\W", "_", f"SPARSETIR_{stem}_H", flags=re.ASCII).upper()
        lines = [*(f"  {p.description}" for _, p in self.arrays), *([""] if self.notes else []), *self.notes]
        described = "\n".join(f" * {line}".rstrip() for line in lines).replace("*/", "* /")
        main, last_error, set_threads = (_wrapped(p) for p in self.prototypes)
        return f"""\
#ifndef {guard}
#define {guard}

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

/* Compiled by SparseTIR. Returns 0, or nonzero with a message in {self.name}_last_error().
 *
{described}
 *
 * Arrays are row-major without gaps; one that is written must not overlap another. Sizes and pointers are checked,
 * the contents of index arrays are trusted.
 */
{main}

/* The message of this thread's last call that returned nonzero. */
{last_error}

/* How many threads each call uses; 0, the default, means all cores. */
{set_threads}

#ifdef __cplusplus
}}
#endif

#endif
"""

    def exports(self) -> str:
        """The linker's list of what is visible: everything else could collide with a TVM in the same process."""
        return f"{{ global: {self.name}; {self.name}_last_error; {self.name}_set_num_threads; local: *; }};\n"

    def source(self) -> str:
        """The C file: the runtime, then the function."""
        rank = max((len(p.shape or ()) for p in self.given), default=0)
        return f"""\
#define _GNU_SOURCE
#define MAX_DIM {max(rank, 1)}
#define NARROW {int(self.kernel.signature.narrow)}
#include "interface.h"
{RUNTIME.read_text(encoding="utf-8")}
extern int rt_machine_code(void *, const TVMFFIAny *, int32_t, TVMFFIAny *) __asm__("__tvm_ffi_{self.kernel.name}");

const char *{self.name}_last_error(void) {{ return rt_message; }}

void {self.name}_set_num_threads(int threads) {{ __atomic_store_n(&rt_wanted, threads, __ATOMIC_RELAXED); }}

{self._function()}"""

    def _function(self) -> str:
        """The function itself. Its parameters are p0, p1, ...: names of users cannot collide with those above."""
        renamed = [p.declaration.removesuffix(p.name) + f"p{at}" for at, p in enumerate(self.parameters)]
        place = {p.symbol: n for n, (_, p) in enumerate(self.arrays)}
        passed = ", ".join(self._passed(at, p, place) for at, p in enumerate(self.given))
        checks = [f"rt_check_arrays(arrays, {len(place)})"] if place else []
        checks += [f"rt_check_offsets(&arrays[{place[n]}], {self._size(count)})" for n, count in self._offsets()]
        return "\n".join(
            [
                f"int {self.name}({', '.join(renamed) or 'void'}) {{",
                *(["  struct array arrays[] = {", *map(self._described, self.arrays), "  };"] if place else []),
                *(f"  if ({check}) return -1;" for check in checks),
                f"  TVMFFIAny values[] = {{{passed or '{0}'}}}, result = {{0}};",
                f"  return rt_machine_code(NULL, values, {len(self.given)}, &result);",
                "}",
                "",
            ]
        )

    def _described(self, array: tuple[int, Parameter]) -> str:
        at, p = array
        _, kind, bits = TYPES[p.dtype]
        shape = ", ".join(map(self._size, p.shape or ())) or "0"
        dtype = f"{{{kind}, {bits}, 1}}"
        return f'    {{"{p.name}", p{at}, {int(p.written)}, {dtype}, {len(p.shape or ())}, {{{shape}}}, 0, {{0}}}},'

    def _passed(self, at: int, parameter: Parameter, place: dict[str, int]) -> str:
        if parameter.shape is not None:
            return f"rt_pass_array(&arrays[{place[parameter.symbol]}])"
        return f"rt_pass_{'real' if 'float' in parameter.dtype else 'integer'}(p{at})"

    def _size(self, expr: ir.Expr) -> str:
        """C text of a size."""
        if isinstance(expr, tirx.IntImm):
            return f"INT64_C({int(expr)})"
        if isinstance(expr, tirx.Cast):
            return self._size(expr.value)
        if isinstance(expr, Var):
            at = next(n for n, p in enumerate(self.parameters) if p.symbol == str(expr.name))
            return f"(int64_t)p{at}"
        pattern = SIZES.get(type(expr))
        if pattern is None:
            raise LoweringError(f"a size of an exported kernel may use + - * // % min and max, found {expr}")
        return pattern.format(self._size(expr.a), self._size(expr.b))


def _wrapped(prototype: str) -> str:
    """A prototype on lines of at most 120 characters."""
    return "\n".join(textwrap.wrap(prototype, 120, subsequent_indent=" " * 9, break_long_words=False))


def _scalar(var: Var, taken: set[str]) -> Parameter:
    name = str(var.name)
    dtype = _plain(name, str(var.ty.dtype) if hasattr(var.ty, "dtype") else str(var.ty))
    return Parameter(identifier(name, taken), name, dtype, None, name, True, False)


def _plain(name: str, dtype: str) -> str:
    """`dtype` if C has it."""
    if dtype not in TYPES:
        raise LoweringError(f"{name} is {dtype}, which has no plain C type: exported kernels take {', '.join(TYPES)}")
    return dtype


def identifier(name: str, taken: set[str]) -> str:
    """`name` as a C identifier that is in nobody's way; it is added to `taken`."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    found = f"_{found}" if not found or found[0].isdigit() else found
    while found in RESERVED or found in taken or re.fullmatch(r"u?int\w*_t", found):
        found += "_"
    taken.add(found)
    return found


# ---------------------------------------------------------------------------------------------- machine code


def _check_target(target: Any) -> None:
    """Only machine code of this kind of machine can be linked here."""
    here = dict(tvm.target.Target.from_device(tvm.cpu()).export())["mtriple"]
    there = dict(target.export()).get("mtriple", here)
    if str(there).split("-")[0] != str(here).split("-")[0]:
        message = f"this kernel is compiled for {there} and cannot be linked on {here}"
        raise ArgumentError(f"{message}: build it without a target, or export it on such a machine")


def _optimised(target: Any) -> Any:
    """A target for which LLVM optimises: elsewhere it keeps references to functions that are never called."""
    config = dict(target.export())
    return target if config.pop("opt-level", 1) else tvm.target.Target(config)


def _write_object(kernel: Kernel, path: Path) -> None:
    """Write TVM's object file."""
    compiled = kernel.compiled
    library = compiled.library
    target = _optimised(compiled.target)
    if target is not compiled.target or not hasattr(library, "mod"):  # It came from the disk cache, already linked.
        library = machine_code(compiled.stages[3], target)
    library.mod.write_to_file(str(path), "o")
    code = path.read_bytes()
    for symbol, what in MISSING.items():
        if symbol in code:
            raise LoweringError(f"{kernel.name} {what}, which a library without TVM does not have")


def _compiler() -> list[str]:
    """The command of the C compiler."""
    if not sys.platform.startswith("linux"):
        raise SparseTIRError(f"export writes ELF libraries: it needs Linux, found {sys.platform}")
    wanted = shlex.split(os.environ.get("CC", ""))
    for command in [wanted] if wanted else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    missing = f"CC = {' '.join(wanted)} is not there" if wanted else f"found none of {', '.join(COMPILERS)}"
    raise SparseTIRError(f"export needs a C compiler, {missing}: install one (such as the package gcc) or set CC")


def _link(compiler: list[str], build: Path, soname: str) -> None:
    """Make ``library`` from the files in `build`."""
    include = [Path(tvm_ffi.libinfo.find_include_path()), Path(tvm.__file__).parent / "include"]
    flags = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", CLASH, *(f"-I{folder}" for folder in include)]
    # Workers run code of the library, so it stays loaded.
    linking = ["-z,defs", "-z,nodelete", "--version-script=exports", f"-soname,{soname}"]
    files = ["kernel.c", "kernel.o", "-lm", "-o", "library"]
    command = [*compiler, *flags, *(f"-Wl,{option}" for option in linking), *files]
    done = subprocess.run(command, cwd=build, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoweringError(f"the C compiler could not make the library; {shlex.join(command)} says:\n{done.stderr}")


# ---------------------------------------------------------------------------------------------- files


def _check_places(path: Path, header: Path) -> None:
    if ".so" not in path.suffixes and not path.is_dir():
        raise ArgumentError(f"a kernel becomes a shared library: expected a name ending in .so, found {path.name}")
    if path == header:
        raise ArgumentError(f"library and header would both be {path}: give the header another name")
    for place in (path, header):
        if place.is_dir():
            raise ArgumentError(f"{place} is a folder; expected the name of a file")
        if not place.parent.is_dir():
            raise ArgumentError(f"the folder {place.parent} does not exist; create it first")


def _place(files: dict[Path, Path]) -> None:
    """Move finished files to their places, which are left alone until all are complete."""
    with ExitStack() as stack:
        staged = []
        for source, place in files.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=place.parent, prefix=".export-"))
            staged.append((shutil.copy(source, folder), place))
        for file, place in staged:
            os.replace(file, place)


__all__ = ["Interface", "export"]
