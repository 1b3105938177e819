# SPDX-License-Identifier: Apache-2.0
"""Kernels on disk and in other processes.

A pickled kernel is its program, target, schedule and choices of formats: machine code comes from the cache on disk, or
is compiled again. A file that `save` writes holds the machine code too, which is used where processor, threads and
versions are those it was made with.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsetir.compile.cache import SHIPPED, content_key
from sparsetir.compile.compiled import Compiled
from sparsetir.compile.disk_cache import writing
from sparsetir.errors import ArgumentError, ArgumentTypeError, FileFormatError, MissingFileError

HEAD = b"SparseTIR kernel 1\n"
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
        path = Path(path)
        if not path.parent.is_dir():
            raise ArgumentError(f"there is no folder {path.parent} to save {path.name} in")
        held: Libraries = {}
        for compiled in self.compiled_parts():
            with contextlib.suppress(Exception):  # without a linker it is compiled again where it is loaded
                held[key_of(compiled)] = machine_code(compiled)
        data = HEAD + pickle.dumps((held, pickle.dumps(self)))
        with writing(path, len(data)), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_bytes(data)
            whole.replace(path)
        return path


def load(path: str | Path) -> Any:
    """A kernel from a file that `Kernel.save` wrote.

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
    if not isinstance(path, (str, Path)):
        raise ArgumentTypeError(f"path: expected a str or Path, got {type(path).__name__}. Pass the path of a kernel.")
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"there is no file {path}")
    data = path.read_bytes()
    if not data.startswith(HEAD):
        raise FileFormatError(f"{path.name} is no saved kernel: expected a file that kernel.save wrote")
    try:
        held, kernel = pickle.load(io.BytesIO(data[len(HEAD) :]))
    except (pickle.UnpicklingError, EOFError, ValueError) as error:
        raise FileFormatError(f"{path.name} is damaged: {error}; save the kernel again") from error
    with shipped(held):
        return pickle.loads(kernel)


# ------------------------------------------------------------------------------------------- machine code


def key_of(compiled: Any) -> str:
    """The name of the machine code, as in the caches."""
    schedule = compiled.second if callable(compiled.schedule) else compiled.schedule
    return content_key(compiled.func, compiled.target, schedule)


def machine_code(compiled: Any) -> tuple[bytes, dict[str, Any]]:
    """A library as bytes, and its metadata."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        if not hasattr(compiled.library, "mod"):  # it came from a library itself
            compiled = type(compiled)(compiled.func, compiled.target, compiled.schedule)
            compiled.compile()
        compiled.save(path)
        return path.read_bytes(), json.loads(path.with_suffix(".json").read_text())


@contextlib.contextmanager
def shipped(held: Libraries) -> Iterator[None]:
    """Machine code that is taken before anything is compiled."""
    SHIPPED.update(held)
    try:
        yield
    finally:
        for key in held:
            SHIPPED.pop(key, None)


__all__ = ["Saved", "load"]
