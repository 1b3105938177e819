# SPDX-License-Identifier: Apache-2.0
"""Save kernels, and send them to other processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsetir.codegen.cache import SHIPPED, Compiled, content_key
from sparsetir.codegen.export import identifier
from sparsetir.errors import FileFormatError, MissingFileError, SparseTIRError, WriteError
from sparsetir.script.printer import script
from sparsetir.transform.decompose import DecomposedPiece, Decomposition, Group
from sparsetir.utils.arguments import as_path
from sparsetir.utils.files import check_folder_of, write_text, writing_file

if TYPE_CHECKING:
    from sparsetir.runtime.composed import ComposedKernel


# Formats of an exported kernel for C programs, and its converted arrays.


TABLE = "pieces.h"


def layout(decomposition: Decomposition) -> list[str]:
    """Return lines that describe the layout of each piece by the parameters of the exported function.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir import formats
    >>> parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(2, 2)})
    >>> for line in layout(parts)[:3]:
    ...     print(line)
    A is stored as bsr(r=2, c=2). Its piece bsr, zeros where there is no entry:
      IO = T.dense_fixed(mb_bsr)
      JO = T.sparse_variable(IO, (nb_bsr, nnzb_bsr), (indptr_bsr, indices_bsr), "int32")
    """
    lines: list[str] = []
    for group in decomposition.groups:
        for piece in group.pieces:
            lines += [*_of_piece(decomposition, group, piece), ""]
    return lines[:-1]


def _of_piece(decomposition: Decomposition, group: Group, piece: DecomposedPiece) -> list[str]:
    rule = piece.rule
    stored = f"{', '.join(group.buffers)} is stored as {decomposition.formats[group.name]!r}"
    padding = ", zeros where there is no entry" if rule.fills else ""
    head = f"{stored}. Its piece {rule.name}{padding}:"
    storage = str(rule.buffer.storage.name)
    values = list(piece.values.values())
    names = {**piece.params, storage: values[0] if values else storage}
    body = [line for line in script(rule.description).splitlines() if line.startswith("    ") and " = T." in line]
    lines = [head, *("  " + _renamed(line.strip(), names) for line in body)]
    if len(values) > 1:
        lines.append(f"  {', '.join(values[1:])} are laid out like {values[0]}")
    if piece.mask is not None:
        lines.append(f"  {piece.mask} is 1 where {values[0]} holds an entry, else 0")
    return lines


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(r"\b\w+\b", lambda match: names.get(match[0], match[0]), line)


def write_pieces(kernel: ComposedKernel, folder: Path, arguments: dict[str, Any]) -> Path:
    """Write converted arguments for the exported function; see `ComposedKernel.write_pieces`."""
    check_folder_of(folder, "folder")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        fault = f"folder: {folder} cannot be written: {error.strerror or error}"
        raise WriteError(f"{fault}. Choose another name.") from error
    used_names: set[str] = set()
    lines = ["/* Sizes, and how many elements each array has. */"]
    for name, value in kernel.pieces(**arguments).items():
        macro = identifier(name, used_names)
        if np.ndim(value):
            with writing_file(folder / f"{macro}.bin", "folder") as partial:
                np.ascontiguousarray(value).tofile(partial)
            lines.append(f"#define PIECES_{macro}_COUNT {np.size(value)} /* {value.dtype} */")
        else:
            lines.append(f"#define PIECES_{macro} {value}")
    table = folder / TABLE
    return write_text(table, "\n".join([*lines, ""]), "folder")


# Kernels on disk and in other processes.
#
# A pickled kernel is its program, target, schedule and choices of formats: machine code comes from the cache on disk,
# or is compiled again. A file that `save` writes holds the machine code too, which is used where processor, threads
# and versions are those it was made with.


HEAD = b"SparseTIR kernel 2\n"  # followed by a digest and the pickled kernel
DATA = len(HEAD) + hashlib.sha256().digest_size
Libraries = dict[str, tuple[bytes, dict[str, Any]]]


class Saved(ABC):
    """A kernel of any class, which can be written to a file."""

    @abstractmethod
    def compiled_parts(self) -> Iterator[Compiled]:
        """Everything compiled that it holds so far."""

    def save(self, path: str | Path) -> Path:
        """Write the kernel to a file, machine code included; `sparsetir.load` reads it.

        Arguments that are fixed are written too. Where the processor, the number of threads or the versions differ,
        the program is compiled again when the file is loaded.
        """
        path = as_path(path, "path")
        check_folder_of(path)
        libraries: Libraries = {}
        for compiled in self.compiled_parts():
            with contextlib.suppress(Exception):  # without a linker the loading process compiles it again
                libraries[key_of(compiled)] = machine_code(compiled)
        data = pickle.dumps((libraries, pickle.dumps(self)))
        with writing_file(path) as partial:
            partial.write_bytes(HEAD + hashlib.sha256(data).digest() + data)
        return path


def load(path: str | Path) -> Any:
    """Return a kernel from a file that `Kernel.save` wrote.

    The file holds machine code and Python objects, which are run: load only what you trust, as with pickle.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Kernel, ComposedKernel, TunedKernel, or one of them with arguments bound

    Raises
    ------
    MissingFileError
    FileFormatError
        It is another file.

    Examples
    --------
    >>> import sparsetir, tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = sparsetir.build(sparsetir.ops.spmv()).save(Path(folder) / "spmv.kernel")
    ...     print(sparsetir.load(path))
    Kernel spmv(A: float32[m, n] csr, x: float32[n]) -> y: float32[m]
    """
    path = as_path(path, "path", "the path of a kernel")
    if not path.is_file():
        raise MissingFileError(f"path: there is no file {path}.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if not content.startswith(HEAD):
        raise FileFormatError(f"{path.name} is no saved kernel: expected a file that kernel.save wrote")
    digest, data = content[len(HEAD) : DATA], content[DATA:]
    if hashlib.sha256(data).digest() != digest:
        raise FileFormatError(f"{path.name} is damaged: its digest differs; save the kernel again")
    try:
        libraries, kernel = pickle.loads(data)
        with shipped(libraries):
            return pickle.loads(kernel)
    except SparseTIRError:
        raise
    except Exception as error:  # e.g. classes that this version lacks
        raise FileFormatError(f"{path.name} is of another version: {error}; save the kernel again") from error


# ------------------------------------------------------------------------------------------- machine code


def key_of(compiled: Any) -> str:
    """Return the name of the machine code, as in the caches."""
    schedule = compiled.second if callable(compiled.schedule) else compiled.schedule
    return content_key(compiled.func, compiled.target, schedule)


def machine_code(compiled: Any) -> tuple[bytes, dict[str, Any]]:
    """Return a library as bytes, and its metadata."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        if not hasattr(compiled.library, "mod"):  # it was loaded from a library
            compiled = type(compiled)(compiled.func, compiled.target, compiled.schedule)
            compiled.compile()
        compiled.save(path)
        return path.read_bytes(), json.loads(path.with_suffix(".json").read_text())


@contextlib.contextmanager
def shipped(libraries: Libraries) -> Iterator[None]:
    """Machine code that is taken before anything is compiled."""
    SHIPPED.update(libraries)
    try:
        yield
    finally:
        for key in libraries:
            SHIPPED.pop(key, None)


__all__ = ["Saved", "layout", "load", "write_pieces"]
