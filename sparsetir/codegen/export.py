# SPDX-License-Identifier: Apache-2.0
"""Write a kernel as a shared library with a plain C function: no Python, no TVM; its header and source.

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
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.codegen.cache import writing
from sparsetir.codegen.pipeline import machine_code
from sparsetir.errors import ArgumentError, LoweringError, SparseTIRError
from sparsetir.ir.visitor import structural_walk
from sparsetir.utils.caches import cached_property
from sparsetir.utils.files import replacing

COMPILERS = ("cc", "gcc", "clang")
CLASH = "-Werror=builtin-declaration-mismatch"  # A kernel called exp would take the place of libm's in its users.

# Services of TVM's runtime that `export_runtime.c` does not have, and what asks for them.
MISSING = {
    b"__TVMFFIFunctionCall": "calls functions registered in TVM (call_packed)",
    b"__TVMFFIEnvModLookupFromImports": "calls functions registered in TVM (call_packed)",
    b"__TVMBackendParallelBarrier": "has a barrier inside a parallel loop",
}


def export(kernel: Exportable, path: Path, header: Path | None = None, *, interface: Interface | None = None) -> Path:
    r"""Write `kernel` as a shared library with a C header; see `Kernel.export`.

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
    interface : Interface, optional
        The C function, where it is not that of the kernel's parameters.

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
    The function returns 0, or -1 with a message in ``spmm_last_error`` (one per thread). It refuses NULL (for an array
    with elements and for the place of a result), negative and inconsistent sizes, row pointers that do not end at the
    number of stored entries, entries of an axis of length 0, and outputs that overlap another array; the index arrays
    are trusted otherwise. It may be called from several threads at once.

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
            fprintf(stderr, "%s\n", spmm_last_error());
            return 1;
          }
          printf("%g %g\n", c[0], c[1]); /* 1 32 */
        }
    """
    if not path.name:
        raise ArgumentError(f"a kernel becomes a shared library: expected a name ending in .so, got {str(path)!r}")
    header = path.with_suffix(".h") if header is None else header
    _check_places(path, header)
    _check_target(kernel.target)
    interface = interface or Interface(kernel)
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


# ---------------------------------------------------------------------------------------------- machine code


def _check_target(target: Any) -> None:
    """Raise unless the target is of this machine's architecture: other code cannot be linked here."""
    here = dict(tvm.target.Target.from_device(tvm.cpu()).export())["mtriple"]
    there = dict(target.export()).get("mtriple", here)
    if str(there).split("-")[0] != str(here).split("-")[0]:
        message = f"this kernel is compiled for {there} and cannot be linked on {here}"
        raise ArgumentError(f"{message}: build it without a target, or export it on such a machine")


def _optimised(target: Any) -> Any:
    """Return a target for which LLVM optimises: elsewhere it keeps references to functions that are never called."""
    config = dict(target.export())
    return target if config.pop("opt-level", 1) else tvm.target.Target(config)


def _write_object(kernel: Exportable, path: Path) -> None:
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
    """Return the command of the C compiler."""
    if not sys.platform.startswith("linux"):
        raise SparseTIRError(f"export writes ELF libraries: it needs Linux, got {sys.platform}")
    configured = shlex.split(os.environ.get("CC", ""))
    for command in [configured] if configured else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    missing = f"CC = {' '.join(configured)} is not there" if configured else f"found none of {', '.join(COMPILERS)}"
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
        raise ArgumentError(f"a kernel becomes a shared library: expected a name ending in .so, got {path.name}")
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
        for source, place in files.items():
            shutil.copy(source, stack.enter_context(replacing(place)))


# ------------------------------------------------------------------------------------------ C function


RUNTIME = Path(__file__).with_name("export_runtime.c")

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
    tirx.Add: "rt_plus({}, {})",
    tirx.Sub: "rt_minus({}, {})",
    tirx.Mul: "rt_times({}, {})",
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


class Exportable(Protocol):
    """The parts of a kernel that are exported."""

    @property
    def name(self) -> str: ...
    @property
    def func(self) -> tirx.PrimFunc: ...
    @property
    def signature(self) -> Any: ...
    @property
    def target(self) -> Any: ...
    @property
    def compiled(self) -> Any: ...


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
        """Describe an array for the header."""
        use = "read and written" if self.read and self.written else "written" if self.written else "read"
        original_name = f" ({self.shown})" if self.shown != self.name else ""
        return f"{self.name}{original_name}: {self.dtype}[{', '.join(map(str, self.shape or ()))}], {use}"


class Interface:
    """The C text around a kernel.

    Parameters
    ----------
    kernel : Kernel
        What is exported.
    notes : sequence of str
        Lines for the header's comment.
    params : sequence of Var, optional
        The parameters, where they are not those of the kernel's program.

    Raises
    ------
    LoweringError
        A parameter that has no plain C type.
    """

    least_rank = 1  # of the arrays that the C text can describe

    def __init__(self, kernel: Exportable, notes: Sequence[str] = (), params: Sequence[Var] | None = None) -> None:
        self.kernel, self.notes = kernel, list(notes)
        self.name = identifier(kernel.name, set())
        self.taken: set[str] = set()
        self.given = [self._parameter(var) for var in (kernel.func.params if params is None else params)]
        self.implied = [_scalar(var, self.taken) for var in self._implied_sizes()]
        self.parameters = [*self.given, *self.implied]

    def _parameter(self, var: Var) -> Parameter:
        if not tirx.is_buffer_var(var):
            return _scalar(var, self.taken)
        effects, symbol = self.kernel.signature.effects, str(var.name)
        if len(var.ty.strides) > 0:
            raise LoweringError(f"{symbol} has strides; exported kernels take arrays without gaps: leave strides out")
        shown = self.kernel.signature.shown(symbol)
        written = symbol in effects.written
        read = not written or symbol in effects.updated
        dtype = plain(symbol, str(var.ty.dtype))
        return Parameter(identifier(symbol, self.taken), symbol, dtype, tuple(var.ty.shape), shown, read, written)

    def _implied_sizes(self) -> list[Var]:
        """Return the symbols of shapes that are no parameters."""
        symbols: dict[str, Var] = {}

        def note(var: Var) -> None:
            symbols.setdefault(str(var.name), var)

        for parameter in self.given:
            for extent in parameter.shape or ():
                structural_walk(extent, (Var, note))
        passed = {p.symbol for p in self.given}
        return [var for name, var in symbols.items() if name not in passed]

    @cached_property
    def arrays(self) -> list[tuple[int, Parameter]]:
        """Arrays by their place among the parameters."""
        return [(at, p) for at, p in enumerate(self.given) if p.shape is not None]

    def _filled(self) -> list[tuple[str, Any]]:
        """Return the index arrays and the lengths of the axes of their entries."""
        symbols = {p.symbol for p in self.parameters}
        axes = [a for a in self.kernel.signature.program.axes.values() if a.indices is not None and not a.may_be_absent]
        stored = [(str(a.indices.name), a.length) for a in axes if str(a.indices.name) in self.places]
        return [(name, n) for name, n in stored if isinstance(n, Var) and str(n.name) in symbols]

    def _offsets(self) -> list[tuple[str, Any]]:
        """Return the row pointers and the number of entries that they end at."""
        lengths = {}
        for axis in self.kernel.signature.program.axes.values():
            if axis.indptr is not None:
                lengths[str(axis.indptr.name)] = axis.indices.ty.shape[0] if axis.indices is not None else axis.count
        return list(lengths.items())

    # ------------------------------------------------------------------ texts

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """C types and names of what the function allocates, behind its parameters."""
        return []

    @property
    def prototypes(self) -> dict[str, tuple[str, str]]:
        """The public functions by name: what the header says of each, and its declaration."""
        name, declared = self.name, [*(p.declaration for p in self.parameters), *(f"{t}{n}" for t, n in self.outputs)]
        threads = "How many threads each call uses, at most 1024; 0, the default, means all cores."
        return {
            name: ("", f"int {name}({', '.join(declared) or 'void'});"),
            f"{name}_last_error": (
                "The message of this thread's last call that returned nonzero.",
                f"const char *{name}_last_error(void);",
            ),
            f"{name}_set_num_threads": (threads, f"void {name}_set_num_threads(int threads);"),
        }

    @property
    def described(self) -> list[str]:
        """Descriptions of the arrays for the header."""
        return [p.description for _, p in self.arrays]

    def header(self, stem: str) -> str:
        """Return the header for users."""
        guard = re.sub(r"\W", "_", f"SPARSETIR_{stem}_H", flags=re.ASCII).upper()
        lines = [*(f"  {line}" for line in self.described), *([""] if self.notes else []), *self.notes]
        described = "\n".join(f" * {line}".rstrip() for line in lines).replace("*/", "* /")
        commented = [(f"/* {said} */\n" if said else "", text) for said, text in self.prototypes.values()]
        functions = "\n\n".join(comment + _wrapped(text) for comment, text in commented)
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
{functions}

#ifdef __cplusplus
}}
#endif

#endif
"""

    def exports(self) -> str:
        """Return the linker's list of what is visible: everything else could collide with a TVM in the same process."""
        return f"{{ global: {' '.join(f'{name};' for name in self.prototypes)} local: *; }};\n"

    def source(self) -> str:
        """Return the C file: the runtime, then the functions."""
        return f"""\
#define _GNU_SOURCE
#define MAX_DIM {max([self.least_rank, *(len(p.shape or ()) for p in self.given)])}
#define NARROW {int(self.kernel.signature.narrow)}
#include "interface.h"
{RUNTIME.read_text(encoding="utf-8")}
{self.definitions()}
const char *{self.name}_last_error(void) {{ return rt_message; }}

void {self.name}_set_num_threads(int threads) {{ __atomic_store_n(&rt_wanted, threads, __ATOMIC_RELAXED); }}

{self._function()}"""

    def definitions(self) -> str:
        """Return the text before the function."""
        return declare_machine_code("rt_machine_code", self.kernel.name)

    def _function(self) -> str:
        """Return the text of the function; its parameters p0, p1, ..., r0, ... differ from all names of users."""
        renamed = [p.declaration.removesuffix(p.name) + f"p{at}" for at, p in enumerate(self.parameters)]
        renamed += [f"{kind} r{at}" for at, (kind, _) in enumerate(self.outputs)]
        place = self.places
        checks = [f"rt_check_arrays(arrays, {len(place)})"] if place else []
        checks += [self._extents_check(name, extents) for name, extents in self._narrow_extents()]
        checks += [f"rt_check_offsets(&arrays[{place[n]}], {self.size_of(count)})" for n, count in self._offsets()]
        checks += [f"rt_check_filled(&arrays[{place[n]}], {self.size_of(length)})" for n, length in self._filled()]
        return "\n".join(
            [
                f"int {self.name}({', '.join(renamed) or 'void'}) {{",
                *(f"  {line}" for line in self._cleared()),
                *(["  struct array arrays[] = {", *map(self._described, self.arrays), "  };"] if place else []),
                *(f"  if ({check}) return -1;" for check in checks),
                *(f"  {line}" for line in self.called()),
                "}",
                "",
            ]
        )

    def _cleared(self) -> list[str]:
        """Set the results to NULL, and return where there is no place for one."""
        count, names = len(self.outputs), ", ".join(f'"{name}"' for _, name in self.outputs)
        if not count:
            return []
        return [
            f"void **const places[] = {{{', '.join(f'(void **)r{at}' for at in range(count))}}};",
            f"const char *const names[] = {{{names}}};",
            f"if (rt_clear_places(places, names, {count})) return -1;",
        ]

    def _narrow_extents(self) -> list[tuple[str, list[ir.Expr]]]:
        """Return the extents of buffers whose product must fit 32 bits, of buffers with several."""
        extents = getattr(self.kernel.signature, "narrow_extents", {})
        computed = self.computed
        return [(name, several) for name, several in extents.items() if len(several) > 1 and name not in computed]

    @property
    def computed(self) -> set[str]:
        """Names of the results whose elements are counted while they are computed."""
        return set()

    def _extents_check(self, name: str, extents: list[ir.Expr]) -> str:
        numbers = ", ".join(map(self.size_of, extents))
        return f'rt_check_extents("{name}", {len(extents)}, (const int64_t[]){{{numbers}}})'

    @cached_property
    def places(self) -> dict[str, int]:
        """Position of a parameter's array in the list of arrays."""
        return {p.symbol: n for n, (_, p) in enumerate(self.arrays)}

    @property
    def passed(self) -> str:
        """The arguments of the machine code."""
        return ", ".join(self._passed(at, p, self.places) for at, p in enumerate(self.given)) or "{0}"

    def called(self) -> list[str]:
        """Return the end of the function, after the checks of its arguments."""
        return [
            f"TVMFFIAny values[] = {{{self.passed}}}, result = {{0}};",
            f"return rt_machine_code(NULL, values, {len(self.given)}, &result);",
        ]

    def _described(self, array: tuple[int, Parameter]) -> str:
        at, p = array
        _, kind, bits = TYPES[p.dtype]
        shape = ", ".join(map(self.size_of, p.shape or ())) or "0"
        dtype = f"{{{kind}, {bits}, 1}}"
        return f'    {{"{p.name}", p{at}, {int(p.written)}, {dtype}, {len(p.shape or ())}, {{{shape}}}, 0, {{0}}}},'

    def _passed(self, at: int, parameter: Parameter, place: dict[str, int]) -> str:
        if parameter.shape is not None:
            return f"rt_pass_array(&arrays[{place[parameter.symbol]}])"
        return f"rt_pass_{'real' if 'float' in parameter.dtype else 'integer'}(p{at})"

    def size_of(self, expr: ir.Expr) -> str:
        """Return a size as C text."""
        if isinstance(expr, tirx.IntImm):
            return f"INT64_C({int(expr)})"
        if isinstance(expr, tirx.Cast):
            return self.size_of(expr.value)
        if isinstance(expr, Var):
            at = next(n for n, p in enumerate(self.parameters) if p.symbol == str(expr.name))
            return f"(int64_t)p{at}"
        pattern = SIZES.get(type(expr))
        if pattern is None:
            raise LoweringError(f"a size of an exported kernel may use + - * // % min and max, got {expr}")
        return pattern.format(self.size_of(expr.a), self.size_of(expr.b))


def declare_machine_code(name: str, function: str) -> str:
    """Return the declaration of a compiled function under a name of its own."""
    return f'extern int {name}(void *, const TVMFFIAny *, int32_t, TVMFFIAny *) __asm__("__tvm_ffi_{function}");\n'


def _wrapped(prototype: str) -> str:
    """Return a prototype on lines of at most 120 characters."""
    return "\n".join(textwrap.wrap(prototype, 120, subsequent_indent=" " * 9, break_long_words=False))


def _scalar(var: Var, used: set[str]) -> Parameter:
    name = str(var.name)
    dtype = plain(name, str(var.ty.dtype) if hasattr(var.ty, "dtype") else str(var.ty))
    return Parameter(identifier(name, used), name, dtype, None, name, True, False)


def plain(name: str, dtype: str) -> str:
    """Return `dtype`; raise if C does not have it."""
    if dtype not in TYPES:
        raise LoweringError(f"{name} is {dtype}, which has no plain C type: exported kernels take {', '.join(TYPES)}")
    return dtype


def identifier(name: str, used: set[str]) -> str:
    """Convert `name` to an unused C identifier and add it to `used`."""
    candidate = re.sub(r"\W", "_", name, flags=re.ASCII)
    candidate = f"_{candidate}" if not candidate or candidate[0].isdigit() else candidate
    while candidate in RESERVED or candidate in used or re.fullmatch(r"u?int\w*_t", candidate):
        candidate += "_"
    used.add(candidate)
    return candidate


__all__ = ["TYPES", "Exportable", "Interface", "Parameter", "declare_machine_code", "export", "identifier", "plain"]
