# SPDX-License-Identifier: Apache-2.0
"""Packages at run time: version and source digest of this one, TVM imported without torch, and optional ones.

`tvm_ffi` imports torch, if it is installed, before anything else. That import takes longer than all of TVM, and few
processes use both. An import hook hides torch from the thread that imports `tvm_ffi`, and does what `tvm_ffi` would
have done with torch once something else imports torch. Tensors are exchanged by DLPack as ever; only `torch.dtype` as
an argument of a function of TVM needs torch to be imported first. On Windows torch is not hidden: there `tvm_ffi` must
load its library after torch.

The hook also answers two questions that TVM asks again and again while it is imported: which functions its libraries
have, and whether a type or an operator exists. TVM lists some thousand names dozens of times, and learns that one is
missing by an error of C++, whose first backtrace reads the debug information of every loaded library.
"""

from __future__ import annotations

import _thread
import hashlib
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeAlias, TypeVar

from sparsetir.errors import SparseTIRError
from sparsetir.utils.files import cache_text
from sparsetir.utils.memory import uncollected

__version__ = "0.2.0"  # as in pyproject.toml
DIGEST_DIGITS = 64
TYPE_INDEX = "_object_type_key_to_index"  # of `tvm_ffi.core`


@cache
def source_files() -> tuple[Path, ...]:
    """Return every file of the installed package that may decide what is compiled, in a fixed order.

    `schedules` and `tuning` are installed inside of the package, but lie beside it in a checkout.
    """
    package = Path(__file__).parents[1]
    specs = [find_spec(f"sparsetir.{name}") for name in ("schedules", "tuning")]
    beside = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    roots = [package, *(folder for folder in beside if package not in folder.parents)]
    return tuple(sorted(path for root in roots for kind in ("*.py", "*.c") for path in root.rglob(kind)))


@cache
def source_digest() -> str:
    """Return a hash of the contents of all source files: other sources may make other machine code."""
    digest = hashlib.sha256()
    for path in source_files():
        content = path.read_bytes()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def quick_source_digest(folder: Path) -> str:
    """Return `source_digest`, read from `folder` where no source file was replaced or written since it was stored.

    Parameters
    ----------
    folder : Path
        A folder that only this user can write to. The digest is stored below the sizes, times and numbers of the files.
    """
    listing = hashlib.sha256()
    for path in source_files():
        status = path.stat()
        listing.update(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}\n".encode())
    stored = folder / "sources" / listing.hexdigest()[:32]
    with suppress(OSError, ValueError):
        if len(text := stored.read_text()) == DIGEST_DIGITS:
            return text
    digest = source_digest()
    cache_text(stored, digest)
    return digest


Execute: TypeAlias = Callable[[ModuleType], None]
Runner: TypeAlias = Callable[[Execute], Execute]


P = ParamSpec("P")
R = TypeVar("R")
INTERRUPTED_LATE = ("sparsetir", "tvm", "tvm_ffi")
INTERRUPTED_LATE_SECONDS = 0.05


def in_one_piece(execute: Callable[P, R]) -> Callable[P, R]:
    """Return a function for imports that runs without garbage collection, and holds Ctrl-C back until they end.

    TVM registers its classes as it is imported. What an interrupt left of it could not be imported again. The interrupt
    comes once no module of TVM and of this package is being imported: an error in the import of one would remove it.
    """

    @uncollected
    @wraps(execute)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.current_thread() is not threading.main_thread():
            return execute(*args, **kwargs)  # interrupts go to the main thread
        before, pressed = signal.getsignal(signal.SIGINT), threading.Event()
        if not callable(before):
            return execute(*args, **kwargs)

        def note(*_event: Any) -> None:
            pressed.set()

        signal.signal(signal.SIGINT, note)
        try:
            return execute(*args, **kwargs)
        finally:
            if signal.getsignal(signal.SIGINT) is note:  # a module may have set a handler of its own
                signal.signal(signal.SIGINT, before)
            if pressed.is_set():
                threading.Thread(target=_interrupt_after_imports, daemon=True).start()

    return run


def _interrupt_after_imports() -> None:
    """Press Ctrl-C once no module of TVM and of this package is being imported."""
    is_importing = True
    while is_importing:
        time.sleep(INTERRUPTED_LATE_SECONDS)  # also after the last one: importlib is not done with it yet
        is_importing = any(
            getattr(getattr(module, "__spec__", None), "_initializing", False)
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in INTERRUPTED_LATE
        )
    _thread.interrupt_main()


class PostponeTorch:
    """Finder of modules of TVM and of torch, which runs code around the import of each of them."""

    def __init__(self) -> None:
        self.importing: int | None = None  # the thread that executes a module of TVM that could do without torch
        self.is_postponed = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return the specification of one of these modules, else None.

        Raises
        ------
        ModuleNotFoundError
            A module of TVM imports torch.
        """
        if name == "torch" and self.importing == threading.get_ident():
            self.is_postponed = True
            raise ModuleNotFoundError("TVM does without torch until something else imports it", name=name)
        runners: dict[str, Runner] = {
            "tvm": in_one_piece,
            "tvm_ffi": lambda execute: in_one_piece(self._without_torch(execute)),
            "tvm.relax": self._without_torch,
            "torch": self._with_completion,
        }
        return _spec(self, runners, name, path, target)

    def _without_torch(self, execute: Execute) -> Execute:
        """Hide torch from this thread while a module is executed."""

        def run(module: ModuleType) -> None:
            self.importing = threading.get_ident()
            try:
                execute(module)
            finally:
                self.importing = None

        return run

    def _with_completion(self, execute: Execute) -> Execute:
        """Complete `tvm_ffi` after torch has been executed."""

        def run(module: ModuleType) -> None:
            execute(module)
            if self.is_postponed:
                self.is_postponed = False
                complete_tvm_ffi(module)

        return run


class TellNames:
    """Finder of two modules of TVM, which are told which names exist while they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return the specification of one of these modules, else None."""
        return _spec(self, {"tvm": with_known_names, "tvm.ir.op": with_known_operators}, name, path, target)


def _spec(finder: Any, runners: Mapping[str, Runner], name: str, path: Any, target: Any) -> Any:
    """Return the specification of a module by the finders behind one, executed by its runner; None without one."""
    if name not in runners:
        return None
    after = [n + 1 for n, other in enumerate(sys.meta_path) if other is finder]
    specs = (other.find_spec(name, path, target) for other in sys.meta_path[after[0] if after else 0 :])
    return _with_runner(next((spec for spec in specs if spec is not None), None), runners[name])


def with_known_names(execute: Execute) -> Execute:
    """Return a function that imports TVM, which is told at once which names its libraries have."""

    def run(module: ModuleType) -> None:
        registry: Any = import_module("tvm_ffi.registry")
        core = getattr(registry, "core", None)
        lists, type_index = vars(registry).get("list_global_func_names"), getattr(core, TYPE_INDEX, None)
        if lists is None or type_index is None:  # another version, which is left alone
            return execute(module)
        get = registry.get_global_func
        type_keys = get("ffi.GetRegisteredTypeKeys", allow_missing=True)
        names: list[str] = []
        keys: set[str] = set()

        def listed() -> list[str]:
            if get("ffi.FunctionListGlobalNamesFunctor")()(-1) != len(names):  # a library or a function is new
                names[:] = lists()
            return names

        def index_of(key: str) -> Any:
            if key not in keys:
                keys.update(map(str, type_keys()))
            return type_index(key) if key in keys else None

        registry.list_global_func_names = listed
        if type_keys is not None:
            setattr(core, TYPE_INDEX, index_of)
        try:
            return execute(module)
        finally:
            registry.list_global_func_names = lists
            setattr(core, TYPE_INDEX, type_index)

    return run


def with_known_operators(execute: Execute) -> Execute:
    """Return a function that imports the class of operators, which refuses names by itself while TVM is imported."""

    def run(module: ModuleType) -> None:
        execute(module)
        operators, register = vars(module).get("Op"), vars(module).get("register_op_attr")
        if operators is None or register is None:  # another version, which is left alone
            return
        get, names = operators.get, set(operators.list_op_names())

        def is_importing() -> bool:
            return bool(getattr(sys.modules["tvm"].__spec__, "_initializing", False))

        def known(name: str) -> Any:
            if name not in names and is_importing():
                raise AttributeError(f"Operator {name} is not registered")
            return get(name)

        @wraps(register)
        def registered(op_name: str, attr_key: str, value: Any = None, level: int = 10) -> Any:
            is_known = isinstance(value, str) and is_importing() and op_name in names
            if is_known and get(op_name).get_attr(attr_key) == value:
                return value  # TVM would raise, and catch the error
            names.add(op_name)  # which is a new one otherwise
            return register(op_name, attr_key, value, level)

        operators.get, vars(module)["register_op_attr"] = staticmethod(known), registered

    return run


def _with_runner(spec: ModuleSpec | None, runner: Runner) -> ModuleSpec | None:
    """Wrap the function that executes a module in a file; loaders of other kinds serve several modules."""
    if spec is not None and isinstance(spec.loader, (SourceFileLoader, SourcelessFileLoader)):
        vars(spec.loader)["exec_module"] = runner(spec.loader.exec_module)
    return spec


def complete_tvm_ffi(torch: ModuleType) -> None:
    """Execute again what differs in `tvm_ffi` if torch is installed."""
    import tvm_ffi
    from tvm_ffi import _convert, _optional_torch_c_dlpack, core, stream

    _convert.torch = torch
    vars(core)["_convert_torch_dtype_to_ffi_dtype"] = lambda dtype: tvm_ffi.dtype(str(dtype).removeprefix("torch."))
    tvm_ffi.use_torch_stream = importlib.reload(stream).use_torch_stream
    importlib.reload(_optional_torch_c_dlpack)


def postpone_torch() -> None:
    """Keep a later ``import tvm`` from importing torch, and tell it which names exist."""
    if sys.platform != "win32" and not {"torch", "tvm_ffi"} & sys.modules.keys():
        sys.meta_path.insert(0, PostponeTorch())
    if "tvm" not in sys.modules:
        sys.meta_path.insert(0, TellNames())


# ----------------------------------------------------------------------------------- imports at the first use


def load_at_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are defined in modules that are imported when one is used.

    Parameters
    ----------
    package : str
    modules : mapping of str to str
        The module that defines each name, or that is called so in the package.
    """

    def load(name: str) -> Any:
        where = modules.get(name)
        if where is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(where)
        return module if where == f"{package}.{name}" else getattr(module, name)

    return load


# ----------------------------------------------------------------------------------- optional packages


class MissingPackageError(SparseTIRError, ImportError):
    """A feature needs an optional package that is not installed or does not load."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or say which extra of this package brings it.

    Raises
    ------
    MissingPackageError
        If the import fails.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        advice = f"try: pip install 'sparsetir[{extra}]'"
        message = f"{purpose} needs {package}, which cannot be imported ({error}); {advice}"
        raise MissingPackageError(message) from error


__all__ = [
    "MissingPackageError",
    "PostponeTorch",
    "__version__",
    "complete_tvm_ffi",
    "in_one_piece",
    "load_at_first_use",
    "postpone_torch",
    "quick_source_digest",
    "require",
    "source_digest",
    "source_files",
]
