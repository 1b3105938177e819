# SPDX-License-Identifier: Apache-2.0
"""Kernels on disk and in other processes.

A pickled kernel is its program, target, schedule and choices of formats: machine code comes from the cache on disk, or
is compiled anew. A file that `save` writes holds the machine code too, which is used where processor, threads and
versions are those it was made with.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir, tirx

from sparsetir.call.composed import ComposedKernel
from sparsetir.call.kernel import Kernel
from sparsetir.compile.build import SHIPPED, Compiled, compile_cached, content_key, write_one
from sparsetir.compile.disk_cache import writing
from sparsetir.errors import ArgumentError, FileFormatError, MissingFileError

HEAD = b"SparseTIR kernel 1\n"
Libraries = dict[str, tuple[bytes, dict[str, Any]]]


def save(kernel: Any, path: str | Path) -> Path:
    """Write a kernel to a file that `load` reads; see `Kernel.save`."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ArgumentError(f"there is no folder {path.parent} to save {path.name} in")
    held: Libraries = {}
    for compiled in compiled_in(kernel):
        with contextlib.suppress(Exception):  # without a linker it is compiled again where it is loaded
            held[key_of(compiled)] = machine_code(compiled)
    data = HEAD + pickle.dumps((held, pickle.dumps(kernel)))
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


def compiled_in(kernel: Any) -> Iterator[Any]:
    """Everything compiled that a kernel holds so far."""
    if isinstance(kernel, Kernel):
        yield kernel.compiled
        return
    inner = [getattr(kernel, name, None) for name in ("kernel", "plain", "best")]
    for part in inner:
        if part is not None:
            yield from compiled_in(part)


def key_of(compiled: Any) -> str:
    """The name of the machine code, as in the caches."""
    schedule = compiled.second if callable(compiled.schedule) else compiled.schedule
    return content_key(compiled.func, compiled.target, schedule)


def machine_code(compiled: Any) -> tuple[bytes, dict[str, Any]]:
    """A library as bytes, and the facts beside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        if not hasattr(compiled.library, "mod"):  # it came from a library itself
            compiled = Compiled(compiled.func, compiled.target, compiled.schedule)
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


# ------------------------------------------------------------------------------------------- pickle


def reduced(kernel: Kernel) -> tuple[Any, ...]:
    """What pickle keeps of a kernel."""
    compiled = kernel.compiled
    write_one(compiled)  # for the process that unpickles it
    schedule, scheduled = compiled.schedule, None
    if schedule is not None and not isinstance(schedule, _choices()):
        schedule, scheduled = None, compiled.second
    return restored, (kernel.func, str(compiled.target), schedule, scheduled, kernel.calls, kernel.finite)


def restored(
    func: tirx.PrimFunc, target: str, schedule: Any, scheduled: Any, calls: int | None, finite: bool
) -> Kernel:
    """A kernel out of what pickle kept."""
    chosen = schedule if scheduled is None else s_tir.Schedule(scheduled)
    return Kernel(func, compile_cached(func, tvm.target.Target(target), chosen), calls=calls, finite=finite)


def recomposed(decomposition: Any, kernel: Kernel | None) -> ComposedKernel:
    """A composed kernel out of what pickle kept."""
    return ComposedKernel(decomposition, None if kernel is None else lambda _func: kernel)


def rebound(kernel: Any, arguments: dict[str, Any]) -> Any:
    """A bound kernel out of what pickle kept."""
    return kernel.bind(**arguments)


def _choices() -> type:
    from sparsetir.schedules import Choices

    return Choices


__all__ = ["load", "save"]
