# SPDX-License-Identifier: Apache-2.0
"""A model that is compiled: called with arrays, saved as one file and loaded again."""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import PicklingError
from typing import Any, TypeAlias

import tvm
from tvm import ir, relax
from tvm.support.cc import get_cc

from sparsetir.compile.disk_cache import ROOM, writing
from sparsetir.errors import ArgumentError, ArgumentTypeError, MissingFileError, SparseTIRError, own_errors
from sparsetir.relax.arrays import from_tvm, library_of, to_tvm
from sparsetir.relax.build import bind, build, cpu_target
from sparsetir.relax.machines import Machines
from sparsetir.relax.nesting import Nesting
from sparsetir.relax.signature import ATTACHED, Signature, attached
from sparsetir.threads import get_num_threads
from sparsetir.walks import structural_walk

SUFFIXES = (".so", ".dylib", ".dll")
Passes: TypeAlias = "tvm.transform.Pass | Sequence[tvm.transform.Pass] | None"


class CompiledModel:
    """A model that is called like the function that it was made of.

    Arguments are torch tensors, numpy arrays or TVM tensors, and the results are of the same library: torch tensors if
    there is one among the arguments. Memory that is contiguous and aligned to 64 bytes, as torch allocates it, is used
    where it is; other arguments are copied. Results are shared with torch, never copied.

    `compile_model`, `from_torch` and `load` make it.

    Attributes
    ----------
    mod : IRModule or None
        The model as it was before it was lowered; None after `load`.
    executable : relax.VMExecutable or None
        What TVM made of it; None after `load`.
    signature : Signature or None
        What it takes; None if the file was written by TVM alone.
    """

    def __init__(
        self,
        function: Machines,
        signature: Signature | None = None,
        nesting: Nesting | None = None,
        *,
        mod: ir.IRModule | None = None,
        executable: relax.VMExecutable | None = None,
        file: Path | None = None,
    ) -> None:
        self._function, self.signature, self._nesting = function, signature, nesting
        self.mod, self.executable, self._file = mod, executable, file

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            The arguments are not as many as it takes, or one has another dtype or shape, or is not in host memory.
        """
        if self._nesting is not None:
            values = self._nesting.tensors(args, kwargs)
            library = library_of(values) if values else "torch"
        else:
            values = list(args) if self.signature is None else self.signature.positions(args, kwargs)
            library = library_of(values)
        found = from_tvm(self._function(*self._tensors(values)), library)
        return found if self._nesting is None else self._nesting.restored(found)

    def _tensors(self, values: Sequence[Any]) -> list[Any]:
        if self.signature is None:
            return [to_tvm(value, f"argument {n}") for n, value in enumerate(values)]
        arguments = self.signature.arguments
        tensors = [to_tvm(v, a.name) if a.dtype else v for a, v in zip(arguments, values, strict=True)]
        self.signature.check(tensors)
        return tensors

    def save(self, path: str | Path) -> Path:
        """Write the model, weights included, as one shared library for processors like this one.

        `sparsetir.relax.load` reads it; so does C++ through TVM's runtime, without Python. It takes a C++ compiler.

        Parameters
        ----------
        path : str or Path
            Ends in ``.so`` (``.dylib`` on macOS, ``.dll`` on Windows).

        Raises
        ------
        ArgumentError
            The name ends otherwise, there is no such folder, or the model was loaded itself.
        SparseTIRError
            There is no C++ compiler.
        WriteError
            The disk is full.
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise ArgumentError(f"a model is saved as a library: expected a name ending in .so, found {path.name}")
        if not path.parent.is_dir():
            raise ArgumentError(f"there is no folder {path.parent} to save {path.name} in")
        if self.executable is None:
            raise ArgumentError("a model that was loaded is not saved again: copy its file")
        if get_cc() is None:
            raise SparseTIRError("saving a model takes a C++ compiler, and none was found: install g++ or set CXX")
        with writing(path, ROOM + 2 * constant_bytes(self.mod)), _without_notes_on_scopes():
            self.executable.export_library(str(path))
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        """The library, weights included: pickling takes a C++ compiler, as `save` does."""
        if self._file is not None and not self._file.is_file():
            raise PicklingError(f"the model was loaded from {self._file}, which is gone: load it from where it is now")
        with tempfile.TemporaryDirectory() as folder:
            path = self._file or self.save(Path(folder) / "model.so")
            return _unpickled, (path.read_bytes(),)

    def __deepcopy__(self, _memo: Any) -> CompiledModel:
        again = CompiledModel(self._function, self.signature, self._nesting, mod=self.mod, file=self._file)
        again.executable = self.executable
        return again  # a model does not change, so there is nothing to copy

    def __repr__(self) -> str:
        return f"CompiledModel {self.signature if self.signature is not None else ''}".rstrip()


def compile_model(
    mod: ir.IRModule,
    target: Any = None,
    *,
    params: Mapping[str, Any] | None = None,
    sparsify: Passes = None,
    database: str | Path | None = None,
    nesting: Nesting | None = None,
    finite: bool = False,
) -> CompiledModel:
    """Compile a Relax module, from whichever front end, to a model that takes arrays.

    Parameters
    ----------
    mod : IRModule
        With a function ``main``, or with one Relax function of any name.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.
    params : mapping of str to array, optional
        Values of parameters, which become constants.
    sparsify : Pass or sequence of Pass, optional
        Run on the module before it is lowered, with `params` in their places: what makes weights sparse.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`.
    nesting : Nesting, optional
        How arguments and results nest, for models traced by torch.
    finite : bool
        See `sparsetir.relax.build`.

    Raises
    ------
    ArgumentError, ArgumentTypeError

    Examples
    --------
    >>> import numpy as np, sparsetir.relax
    >>> from tvm import relax
    >>> builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([3], "float32"))
    >>> with builder.function("main", [x]):
    ...     _ = builder.emit_func_output(builder.emit(relax.op.add(x, x)))
    >>> sparsetir.relax.compile_model(builder.get())(np.ones(3, "float32"))
    array([2., 2., 2.], dtype=float32)
    """
    chosen = cpu_target(target)
    mod = _passed(bind(mod, params or {}), sparsify, chosen)
    signature = Signature.of(mod, _function_of(mod))
    described = {"signature": signature.to_json(), "nesting": None if nesting is None else nesting.to_json()}
    executable = build(attached(mod, described), chosen, database=database, finite=finite)
    return CompiledModel(Machines(executable, signature.function), signature, nesting, mod=mod, executable=executable)


def load(path: str | Path) -> CompiledModel:
    """A model from a file that `CompiledModel.save` wrote, or ``VMExecutable.export_library``.

    Raises
    ------
    MissingFileError
    ArgumentError
        The file is no library, the library is no model, or what it says of the model's arguments is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"no model at {path}")
    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"a model is a library: expected a name ending in .so, found {path.name}")
    get_num_threads()  # TVM's own choice is half of the cores
    try:
        with _without_notes_on_scopes():
            library = tvm.runtime.load_module(str(path.resolve()))
    except (RuntimeError, OSError) as error:
        raise ArgumentError(f"{path.name} is no library for this machine: {str(error).splitlines()[-1]}") from error
    if not library.implements_function("vm_load_executable"):
        raise ArgumentError(f"{path.name} is a library but no model; expected one that sparsetir.relax saved")
    machine = relax.VirtualMachine(library, tvm.cpu())
    if not machine.module.implements_function(ATTACHED):
        return CompiledModel(Machines(library, "main", machine), file=path)
    try:
        found = json.loads(machine[ATTACHED]())
        nesting = None if found["nesting"] is None else Nesting.from_json(found["nesting"])
        signature = Signature.from_json(found["signature"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        damaged = f"what {path.name} says of the model's arguments is damaged ({error!r})"
        raise ArgumentError(f"{damaged}: save the model again") from error
    return CompiledModel(Machines(library, signature.function, machine), signature, nesting, file=path)


def _unpickled(library: bytes) -> CompiledModel:
    """A model out of what pickle kept; its library stays in a file as long as the process runs."""
    with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as file:
        file.write(library)
    path = Path(file.name)
    atexit.register(path.unlink, missing_ok=True)
    return load(path)


def _passed(mod: ir.IRModule, passes: Any, target: Any) -> ir.IRModule:
    """A module after the user's passes."""
    listed = [] if passes is None else list(passes) if isinstance(passes, (list, tuple)) else [passes]
    for one in listed:
        if not isinstance(one, tvm.transform.Pass):
            raise ArgumentTypeError(f"sparsify takes passes over an IRModule; found {type(one).__name__}")
    with own_errors(), target:
        for one in listed:
            mod = one(mod)
    return mod


def _function_of(mod: ir.IRModule) -> str:
    names = [str(var.name_hint) for var, func in mod.functions.items() if isinstance(func, relax.Function)]
    if "main" in names:
        return "main"
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise ArgumentError(f"expected a module with a function main, or with one Relax function; found {found}")
    return names[0]


def constant_bytes(mod: ir.IRModule | None) -> int:
    """How much memory the constants of a module take."""
    sizes: list[int] = []
    for func in [] if mod is None else mod.functions.values():
        structural_walk(func, (ir.GenericConst, lambda const: sizes.append(const.value.numpy().nbytes)))
    return sum(sizes)


@contextmanager
def _without_notes_on_scopes() -> Iterator[None]:
    """Leave out a line "Scope Saving:" or "Scope Loaded:" that TVM writes for each constant; other lines pass."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            kept = b"".join(line for line in held if b"Warning: Scope " not in line)
            os.write(2, kept)


__all__ = ["CompiledModel", "compile_model", "load"]
