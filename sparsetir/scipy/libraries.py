# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels for scipy's operations as C libraries: compiled by another process, loaded without TVM.

    python -m sparsetir.scipy.libraries spmv float64 int32 FOLDER

compiles one library, and is what `Libraries` starts. The libraries are in the folder of compiled kernels, below a hash
of the package's sources and of the processor's features, under their final name only when complete.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Protocol

from sparsetir.utils.caches import ForkLock
from sparsetir.utils.files import PREFIX, cache_folder, replacing
from sparsetir.utils.machine import CORES

OPERATIONS = ("spmv", "spmm", "spgemm", "add", "subtract", "multiply")
BUILD_SECONDS = 0.3  # seconds that scipy spends in an operation before its kernel is compiled
FOLDER_SECONDS = 0.004  # assumed cost of computing the folder's name
LOAD_SECONDS = 0.001  # assumed cost of loading a library
START_SECONDS = 0.005  # assumed cost of starting a process that compiles
POLL_SECONDS = 0.05  # how often a library that is being compiled is looked for
COMPILE_TIMEOUT = 600.0  # seconds after which a compilation counts as failed
PROTOTYPE = re.compile(r"^int (\w+)\(([^;]*)\);", re.MULTILINE | re.DOTALL)
PARAMETER = re.compile(r"(?:const )?(\w+?)(?:_t)? (\**)(\w+)$")
C_TYPES = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
}


class AccountRecord(Protocol):
    """Seconds that may be lost to plain scipy, `sparsetir.scipy.selection.AccountRecord`."""

    def pay(self, seconds: float) -> None: ...
    def covers(self, seconds: float) -> bool: ...


class Library:
    """An exported kernel, called by the names of its header.

    Parameters
    ----------
    path : Path
        The shared library; the JSON file beside it lists the parameters of its function.
    threads : int, optional
    """

    def __init__(self, path: Path, threads: int | None = None) -> None:
        described = json.loads(path.with_suffix(".json").read_text())
        name, self.parameters = described["name"], described["parameters"]
        library = ctypes.CDLL(str(path))
        self.function = getattr(library, name)
        self.function.argtypes = [C_TYPES[t] if stars == 0 else ctypes.c_void_p for t, stars, _ in self.parameters]
        self.function.restype = ctypes.c_int
        self.free = getattr(library, f"{name}_free", None)
        if self.free is not None:
            self.free.argtypes, self.free.restype = [ctypes.c_void_p], None
        self.set_num_threads, self.threads = getattr(library, f"{name}_set_num_threads"), -1
        self.use_threads(threads or 0)
        self.names = [parameter for _, _, parameter in self.parameters]

    def use_threads(self, threads: int) -> None:
        """Run later calls on so many threads, 0 for all."""
        if threads != self.threads:
            self.set_num_threads(threads)
            self.threads = threads

    def __call__(self, **arguments: Any) -> bool:
        """Call the function on addresses and numbers; return whether it succeeded."""
        return self.function(*[arguments[name] for name in self.names]) == 0


class Libraries:
    """The kernels of this process: wanted, being compiled, loaded or failed.

    Parameters
    ----------
    threads : int, optional
    wait : bool
        Compile in `get`, and wait.
    """

    def __init__(self, *, threads: int | None = None, wait: bool = False) -> None:
        self.threads, self.wait = threads, wait
        self.loaded: dict[tuple[str, str, str], Library] = {}
        self.failures: dict[tuple[str, str, str], str] = {}
        self.seconds: dict[tuple[str, str, str], float] = {}
        self.running: dict[tuple[str, str, str], tuple[subprocess.Popen[bytes], float]] = {}
        self.next_poll = 0.0
        self.lock = ForkLock()

    def get(self, key: tuple[str, str, str]) -> Library | None:
        """Return the kernel of an operation, dtype and index dtype; None until there is one."""
        library = self.loaded.get(key)
        if library is None and self.wait and key not in self.failures:
            with self.lock:
                self._start(key)
                if key in self.running:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.running[key][0].wait(COMPILE_TIMEOUT)
                    self._check(key)
                if key not in self.failures:
                    self._load(key)
            return self.loaded.get(key)
        return library

    def want(self, key: tuple[str, str, str], seconds: float, account: AccountRecord) -> None:
        """Record seconds that scipy spent; load or compile the kernel once `account` covers the cost."""
        if key in self.failures:
            return
        spent = self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        cost = LOAD_SECONDS + (0.0 if folder.cache_info().currsize else FOLDER_SECONDS)
        if not account.covers(cost) or monotonic() < self.next_poll or not self.lock.acquire(blocking=False):
            return
        start = perf_counter()
        try:
            self.next_poll = monotonic() + POLL_SECONDS
            if library_path(key).exists():
                self._load(key)
            elif key in self.running:
                self._check(key)
            elif spent >= BUILD_SECONDS and not self.running and account.covers(START_SECONDS):
                self._start(key)  # one compilation at a time leaves the other cores alone
        finally:
            self.lock.release()
            account.pay(perf_counter() - start)

    def state(self, key: tuple[str, str, str]) -> str:
        """Return what has become of a kernel."""
        if key in self.failures:
            return f"scipy ({self.failures[key]})"
        return "timing" if key in self.loaded else "compiling" if key in self.running else "scipy so far"

    def _start(self, key: tuple[str, str, str]) -> None:
        if library_path(key).exists() or key in self.running:
            return
        command = [sys.executable, "-m", "sparsetir.scipy.libraries", *key, str(library_path(key).parent)]
        environment = {**os.environ, "TVM_NUM_THREADS": str(CORES)}  # default choices depend on the cores
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.failures[key] = f"no process could be started: {error}"
            return
        self.running[key] = (process, monotonic())

    def _check(self, key: tuple[str, str, str]) -> None:
        process, start = self.running[key]
        if process.poll() is None and monotonic() - start < COMPILE_TIMEOUT:
            return
        del self.running[key]
        if not library_path(key).exists():
            process.kill()
            self.failures[key] = "the kernel could not be compiled: is there a C compiler?"

    def _load(self, key: tuple[str, str, str]) -> None:
        self.running.pop(key, None)
        try:
            self.loaded[key] = Library(library_path(key), self.threads)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            self.failures[key] = f"the library could not be loaded: {error}"


@cache
def folder() -> Path:
    """Return the folder of the libraries of these sources and this processor; a temporary one without a cache."""
    base = cache_folder()
    if base is None:
        temporary = tempfile.mkdtemp(prefix="sparsetir-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary)
    from sparsetir.utils.packages import quick_source_digest

    facts = "\n".join([quick_source_digest(base), platform.machine(), sys.platform, str(CORES), *processor()])
    return base / "scipy" / hashlib.sha256(facts.encode()).hexdigest()[:20]


def processor() -> list[str]:
    """Return what machine code depends on: the model and the features of the first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]


def library_path(key: tuple[str, str, str]) -> Path:
    """Return the path of a kernel's library."""
    return folder() / f"{'-'.join(key)}.so"


# ---------------------------------------------------------------------------------------------- compiling


def compile_library(operation: str, dtype: str, idtype: str, target: Path) -> None:
    """Compile the library of one operation into a folder: first its description, then itself, both at once whole."""
    from sparsetir import ops
    from sparsetir.build import build

    programs = {"subtract": "scaled_add"}
    program = getattr(ops, programs.get(operation, operation))(dtype, idtype=idtype)
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target, prefix=PREFIX) as scratch:
        built = Path(scratch) / f"{operation}-{dtype}-{idtype}.so"
        header = build(program).export(built).read_text()
        name, parameters = _prototype(header)
        built.with_suffix(".json").write_text(json.dumps({"name": name, "parameters": parameters}))
        for path in (built.with_suffix(".json"), built):
            with replacing(target / path.name) as partial:
                path.replace(partial)


def _prototype(header: str) -> tuple[str, list[tuple[str, int, str]]]:
    """Return the name of the kernel's function, and type, indirections and name of each parameter."""
    name, declared = PROTOTYPE.findall(header)[0]
    matches = [PARAMETER.match(" ".join(text.split())) for text in declared.split(",")]
    return name, [(match[1], len(match[2]), match[3]) for match in matches if match]


def main(arguments: list[str]) -> None:
    """Compile the library that the command line names, at the lowest priority."""
    os.nice(19)
    operation, dtype, idtype, target = arguments
    compile_library(operation, dtype, idtype, Path(target))


if __name__ == "__main__":
    main(sys.argv[1:])


__all__ = ["OPERATIONS", "Libraries", "Library", "compile_library", "library_path"]
