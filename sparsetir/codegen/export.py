# SPDX-License-Identifier: Apache-2.0
"""Write a kernel as a shared library with a plain C function: no Python, no TVM.

The machine code is TVM's object file. What it expects of TVM's runtime is in ``export_runtime.c``; the function made
here checks its arguments, describes them to the machine code and calls it. The C compiler puts the three together.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from sparsetir.codegen.c_abi import Exportable, Interface
from sparsetir.codegen.cache import writing
from sparsetir.codegen.pipeline import machine_code
from sparsetir.errors import ArgumentError, LoweringError, SparseTIRError
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
            fprintf(stderr, "%s\\n", spmm_last_error());
            return 1;
          }
          printf("%g %g\\n", c[0], c[1]); /* 1 32 */
        }
    """
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
        raise SparseTIRError(f"export writes ELF libraries: it needs Linux, found {sys.platform}")
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
        for source, place in files.items():
            shutil.copy(source, stack.enter_context(replacing(place)))


__all__ = ["export"]
