# SPDX-License-Identifier: Apache-2.0
"""Build of Relax models with sparse operators, and compiled models: signature, conversion, calls, saving."""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import PicklingError
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import ir, relax, tirx
from tvm.relax.frontend.nn import Parameter
from tvm.support.cc import get_cc

from sparsetir.codegen.cache import ROOM, writing
from sparsetir.codegen.target import cpu_target, host_cpu, make_target, makes_tangents, may_reassociate
from sparsetir.errors import ArgumentError, ArgumentTypeError, MissingFileError, SparseTIRError, own_errors
from sparsetir.formats.pattern import hash_indices
from sparsetir.interop.sources import array_of_numbers, check_detached, is_torch
from sparsetir.ir.visitor import structural_walk
from sparsetir.relax.dense import ConvolutionsAsProducts, ScheduleDense, SumInSinglePrecision, is_ours
from sparsetir.relax.legalize import LowerSparse
from sparsetir.relax.operators import has_zero, reshape
from sparsetir.relax.programs import OPAQUE
from sparsetir.relax.structures import task_of
from sparsetir.relax.torch_import.importer import Nesting
from sparsetir.tuning import TuneTask, tune_many
from sparsetir.utils.arguments import (
    VALUE_DTYPES,
    as_flag,
    as_mapping,
    as_path,
    as_seconds,
    dtype_name,
    renamed_parameters,
    shown,
)
from sparsetir.utils.files import check_folder_of, is_whole_library, seal, writing_file
from sparsetir.utils.threads import get_num_threads

# Signatures: names, dtypes and shapes of arguments, validated at every call and stored in a saved model.


Bounds = tuple[int, "int | None"]


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a compiled model.

    Parameters
    ----------
    name : str
    dtype : str
        Empty for what is no tensor, which TVM checks itself.
    shape : tuple of int, str or None
        A name stands for a size that may change; None for one that is computed from others, which TVM checks.
    """

    name: str
    dtype: str = ""
    shape: tuple[int | str | None, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("..." if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]" if self.dtype else self.name


@dataclass(frozen=True)
class ModelSignature:
    """The arguments of a function.

    Parameters
    ----------
    function : str
    arguments : tuple of Argument
    bounds : mapping of str to (int, int or None)
        The least and the largest value of a named size.
    """

    function: str
    arguments: tuple[Argument, ...]
    bounds: Mapping[str, Bounds] = field(default_factory=dict)

    @classmethod
    def of(cls, mod: ir.IRModule, function: str) -> ModelSignature:
        """Read the signature of a function of a module."""
        func = mod[function]
        lower, upper = (dict((func.attrs or {}).get(f"tir_var_{side}_bound") or {}) for side in ("lower", "upper"))
        bounds = {str(n): (int(lower.get(n, 0)), int(upper[n]) if n in upper else None) for n in {**lower, **upper}}
        return cls(function, tuple(_argument(param) for param in func.params), bounds)

    def check(self, tensors: Sequence[Any]) -> None:
        """Raise unless the tensors match the arguments in dtype and shape; sizes of one name must be equal."""
        sizes: dict[str, tuple[int, str]] = {}
        for argument, tensor in zip(self.arguments, tensors, strict=True):
            if not argument.dtype:
                continue
            if str(tensor.dtype) != argument.dtype:
                raise ArgumentTypeError(f"{argument.name} has dtype {tensor.dtype}; expected {argument.dtype}")
            shape = tuple(tensor.shape)
            if len(shape) != len(argument.shape) or any(
                isinstance(expected, int) and expected != size
                for expected, size in zip(argument.shape, shape, strict=True)
            ):
                raise ArgumentError(f"{argument.name} has shape {shape}; expected {argument}")
            for at, (name, size) in enumerate(zip(argument.shape, shape, strict=True)):
                if isinstance(name, str):
                    self._check_size(sizes, name, int(size), f"{argument.name}.shape[{at}]")

    def _check_size(self, sizes: dict[str, tuple[int, str]], name: str, size: int, where: str) -> None:
        first_size, first_where = sizes.setdefault(name, (size, where))
        if first_size != size:
            raise ArgumentError(f"{where} is {size} but {first_where} is {first_size}: they are one size, {name}")
        least, most = self.bounds.get(name, (0, None))
        if size < least or (most is not None and size > most):
            limit = f"at least {least}" if most is None else f"{least} to {most}"
            raise ArgumentError(f"{where} is {size}; the model was traced for {limit}")

    def positions(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return the arguments in the order of the signature, with keyword arguments in their positions."""
        names = [argument.name for argument in self.arguments]
        unknown = next((name for name in named if name not in names[len(args) :]), None)
        if unknown is not None:
            raise ArgumentTypeError(f"{self.function} takes {self}, got another argument {unknown}")
        if len(args) + len(named) != len(names):
            raise ArgumentTypeError(f"{self.function} takes {self}, got {len(args) + len(named)} arguments")
        return [*args, *(named[name] for name in names[len(args) :])]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.arguments))})"

    def to_json(self) -> dict[str, Any]:
        """Return the signature as a dict of JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSignature:
        """Create a signature from the result of `to_json`, or from that result after a round trip through JSON text."""
        arguments = tuple(Argument(a["name"], a["dtype"], tuple(a["shape"])) for a in data["arguments"])
        return cls(data["function"], arguments, {name: (low, high) for name, (low, high) in data["bounds"].items()})


def _argument(param: relax.Var) -> Argument:
    name, type_ = str(param.name), param.ty
    if not isinstance(type_, relax.TensorType) or not isinstance(type_.shape, relax.ShapeExpr):
        return Argument(name)
    return Argument(name, str(type_.dtype.dtype), tuple(_size(size) for size in type_.shape.values))


def _size(size: Any) -> int | str | None:
    if isinstance(size, tirx.IntImm):
        return int(size)
    return str(size.name) if isinstance(size, ir.Var) else None


ATTACHED = "sparsetir_signature"  # The name of a function of the module that returns the signature as JSON.


def attached(mod: ir.IRModule, data: Any) -> ir.IRModule:
    """Add a function to a module that returns `data` as JSON, so that a saved model carries its own signature."""
    builder = relax.BlockBuilder()
    with builder.function(ATTACHED, []):
        builder.emit_func_output(builder.emit(ir.StringImm(json.dumps(data))))
    functions = {var: func for var, func in mod.functions.items() if var.name_hint != ATTACHED}
    functions[ir.GlobalVar(ATTACHED)] = builder.get()[ATTACHED]
    return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


# A function of a compiled module that any thread can call.


class Machines:
    """A function of a module, run by one virtual machine per thread: a machine has the registers of one call only.

    Parameters
    ----------
    library : VMExecutable or Module
    name : str
        Name of the function.
    machine : VirtualMachine, optional
        The machine of the constructing thread, if it exists already.
    """

    def __init__(self, library: Any, name: str, machine: relax.VirtualMachine | None = None) -> None:
        self.library, self.name = library, name
        self._own = threading.local()
        if machine is not None:
            self._own.function = machine[name]

    def __call__(self, *args: Any) -> Any:
        """Run the function and return its result."""
        if not hasattr(self._own, "function"):
            self._own.function = relax.VirtualMachine(self.library, tvm.cpu())[self.name]
        return self._own.function(*args)


# Conversion of numpy, torch and TVM arrays to the arguments of a compiled model, and of its results back.


ALIGNMENT = 64  # In bytes: the alignment that TVM's own kernels may assume for the data of a tensor.


def library_of(values: Iterable[Any]) -> str:
    """Return the library of the caller's arrays: "torch", "tvm" or "numpy"."""
    libraries = {"torch" if is_torch(v) else "tvm" if isinstance(v, tvm.runtime.Tensor) else "numpy" for v in values}
    return next((name for name in ("torch", "tvm") if name in libraries), "numpy")


def to_tvm(value: Any, name: str) -> tvm.runtime.Tensor:
    """Convert an argument to a TVM tensor: share memory that is contiguous and aligned to 64 bytes, else copy it.

    Raises
    ------
    ArgumentTypeError
        It is no dense array in host memory, or gradients are asked of it.
    """
    if isinstance(value, tvm.runtime.Tensor):
        if value.device.type != "cpu":
            raise ArgumentTypeError(f"{name} is on {value.device}; models run on the cpu: pass a tensor there")
        return value
    if is_torch(value):
        return _from_torch(value, name)
    if isinstance(value, np.ndarray):
        array = array_of_numbers(value, name)
        if dtype_name(array.dtype) not in VALUE_DTYPES:
            raise ArgumentTypeError(f"{name}: expected real numbers of up to 64 bits, got {array.dtype}. Convert them.")
        return _from_numpy(array)
    expected = "a torch tensor, a numpy array or a TVM tensor"
    raise ArgumentTypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def _from_torch(tensor: Any, name: str) -> tvm.runtime.Tensor:
    torch = importlib.import_module("torch")
    if tensor.layout != torch.strided:
        fault = f"{name} is sparse ({tensor.layout}) but the model takes it dense"
        raise ArgumentTypeError(f"{fault}: pass {name}.to_dense()")
    if tensor.device.type != "cpu":
        raise ArgumentTypeError(f"{name} is on {tensor.device}; models run on the cpu: pass {name}.cpu()")
    if tensor.is_complex() or tensor.is_quantized or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of {tensor.dtype}"
        raise ArgumentTypeError(f"{name}: expected a dense tensor of real numbers, got {kind}. Convert it.")
    check_detached(tensor, name, "a compiled model")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return tvm.runtime.empty(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tvm.runtime.from_dlpack(tensor)


def _from_numpy(array: np.ndarray) -> tvm.runtime.Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.size:  # The strides that numpy gives an empty array fail the compiled checks for compact strides.
        return tvm.runtime.empty(array.shape, str(array.dtype))
    flags = array.flags
    is_shared = flags.c_contiguous and flags.writeable and array.ctypes.data % ALIGNMENT == 0
    if is_shared and array.dtype.kind in "biuf":  # numpy cannot export bfloat16 through DLPack, so it is copied.
        return tvm.runtime.from_dlpack(array)
    return tvm.runtime.tensor(array)


def from_tvm(result: Any, library: str) -> Any:
    """Convert a result, or a tuple of results, to arrays of a library; torch tensors share memory with the result."""
    if not isinstance(result, tvm.runtime.Tensor):
        is_many = not isinstance(result, (str, int, float)) and hasattr(result, "__iter__")
        return tuple(from_tvm(part, library) for part in result) if is_many else result
    if library == "torch":
        return importlib.import_module("torch").from_dlpack(result)
    return result if library == "tvm" else result.numpy()


# Compiled models: called with arrays, saved as one file and loaded again.


SUFFIXES = (".so", ".dylib", ".dll")
Passes: TypeAlias = "tvm.transform.Pass | Sequence[tvm.transform.Pass] | None"


class CompiledModel:
    """A compiled model, called like the function that it was compiled from.

    Arguments are torch tensors, numpy arrays or TVM tensors. Results are of the same library: torch tensors if one of
    the arguments is one. Memory that is contiguous and aligned to 64 bytes, as torch allocates it, is shared; other
    arguments are copied. Results are shared with torch, never copied.

    It is made by `compile_model`, `from_torch` and `load`.

    Attributes
    ----------
    mod : IRModule or None
        The model before lowering; None after `load`.
    executable : relax.VMExecutable or None
        The model compiled by TVM; None after `load`.
    signature : ModelSignature or None
        The arguments of the model; None if the file was written by TVM alone.
    """

    def __init__(
        self,
        function: Machines,
        signature: ModelSignature | None = None,
        nesting: Nesting | None = None,
        *,
        mod: ir.IRModule | None = None,
        executable: relax.VMExecutable | None = None,
        file: Path | None = None,
    ) -> None:
        self._function, self.signature, self._nesting = function, signature, nesting
        self.mod, self.executable, self._file = mod, executable, file
        self._digest = None if file is None else _digest(file)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            The number, dtypes or shapes of the arguments differ from the signature, or one is not in host memory.
        """
        if self._nesting is not None:
            values = self._nesting.tensors(args, kwargs)
            library = library_of(values) if values else "torch"
        else:
            values = list(args) if self.signature is None else self.signature.positions(args, kwargs)
            library = library_of(values)
        results = from_tvm(self._function(*self._tensors(values)), library)
        return results if self._nesting is None else self._nesting.restored(results)

    def _tensors(self, values: Sequence[Any]) -> list[Any]:
        if self.signature is None:
            return [to_tvm(value, f"argument {n}") for n, value in enumerate(values)]
        arguments = self.signature.arguments
        tensors = [to_tvm(v, a.name) if a.dtype else v for a, v in zip(arguments, values, strict=True)]
        self.signature.check(tensors)
        return tensors

    def save(self, path: str | Path) -> Path:
        """Write the model, weights included, as one shared library for processors like this one.

        The file is read by `sparsetir.relax.load`, and by C++ through TVM's runtime, without Python.

        Parameters
        ----------
        path : str or Path
            File name ending in ``.so`` (``.dylib`` on macOS, ``.dll`` on Windows).

        Raises
        ------
        ArgumentError
            The suffix is wrong, the folder does not exist, or the model was itself loaded from a file.
        SparseTIRError
            No C++ compiler was found; one is required.
        WriteError
            The disk is full.
        """
        path = as_path(path, "path")
        if path.suffix not in SUFFIXES:
            raise ArgumentError(f"a model is saved as a library: expected a name ending in .so, got {path.name}")
        check_folder_of(path)
        if self.executable is None:
            raise ArgumentError("a model that was loaded is not saved again: copy its file")
        if get_cc() is None:
            raise SparseTIRError("saving a model takes a C++ compiler, and none was found: install g++ or set CXX")
        room = ROOM + 2 * constant_bytes(self.mod)
        with writing(path, room), writing_file(path, "path") as partial, _without_notes_on_scopes():
            self.executable.export_library(str(partial))
            seal(partial)
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the shared library, weights included. This needs a C++ compiler, as `save` does."""
        if self._file is not None and not self._file.is_file():
            raise PicklingError(
                f"the model was loaded from {self._file}, which no longer exists: load it from its present place"
            )
        if self._file is not None and self._digest != _digest(self._file):
            raise PicklingError(
                f"the model was loaded from {self._file}, which has been written again since: load it again"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = self._file or self.save(Path(folder) / "model.so")
            return _unpickled, (path.read_bytes(),)

    def __deepcopy__(self, _memo: Any) -> CompiledModel:
        again = CompiledModel(self._function, self.signature, self._nesting, mod=self.mod, file=self._file)
        again.executable = self.executable
        return again  # The copy shares the library, because a model is immutable.

    def __repr__(self) -> str:
        return f"CompiledModel {self.signature if self.signature is not None else ''}".rstrip()


@renamed_parameters(finite="assume_finite")
def compile_model(
    mod: ir.IRModule,
    target: Any = None,
    *,
    params: Mapping[str, Any] | None = None,
    sparsify: Passes = None,
    database: str | Path | None = None,
    nesting: Nesting | None = None,
    assume_finite: bool = False,
) -> CompiledModel:
    """Compile a Relax module from any front end to a model that takes arrays.

    Parameters
    ----------
    mod : IRModule
        A module with a function ``main``, or with one Relax function of any name.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.
    params : mapping of str to array, optional
        Values of parameters, which become constants.
    sparsify : Pass or sequence of Pass, optional
        Passes that run on the module before it is lowered, after `params` are bound, to make weights sparse.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`.
    nesting : Nesting, optional
        Nesting of arguments and results, for models traced by torch.
    assume_finite : bool
        As for `sparsetir.relax.model`.

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
    cpu = cpu_target(target, "models")
    if nesting is not None and not isinstance(nesting, Nesting):
        raise ArgumentTypeError(f"nesting: expected that of a traced model, got {shown(nesting)}. Leave it out.")
    mod = _passed(bind(mod, params), sparsify, cpu)
    signature = ModelSignature.of(mod, _function_of(mod))
    metadata = {"signature": signature.to_json(), "nesting": None if nesting is None else nesting.to_json()}
    executable = build(attached(mod, metadata), cpu, database=database, assume_finite=assume_finite)
    return CompiledModel(Machines(executable, signature.function), signature, nesting, mod=mod, executable=executable)


def load(path: str | Path) -> CompiledModel:
    """Load a model from a file written by `CompiledModel.save` or ``VMExecutable.export_library``.

    Raises
    ------
    MissingFileError
    ArgumentError
        The file is no library, the library is no model, or its signature is damaged.
    """
    path = as_path(path, "path")
    if not path.is_file():
        raise MissingFileError(f"path: there is no model at {path}.")
    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"a model is a library: expected a name ending in .so, got {path.name}")
    if not is_whole_library(path):
        raise ArgumentError(f"{path.name} is damaged. Save the model again.")
    get_num_threads()  # Sets the number of threads: TVM's default is half of the cores.
    host_cpu()  # Asks for tile registers, which the model may use.
    try:
        with _without_notes_on_scopes():
            library = tvm.runtime.load_module(str(_unopened(path.resolve())))
    except (RuntimeError, OSError) as error:
        raise ArgumentError(f"{path.name} is no library for this machine: {str(error).splitlines()[-1]}") from error
    if not library.implements_function("vm_load_executable"):
        raise ArgumentError(f"{path.name} is a library but no model; expected one that sparsetir.relax saved")
    machine = relax.VirtualMachine(library, tvm.cpu())
    if not machine.module.implements_function(ATTACHED):
        return CompiledModel(Machines(library, "main", machine), file=path)
    try:
        metadata = json.loads(machine[ATTACHED]())
        nesting = None if metadata["nesting"] is None else Nesting.from_json(metadata["nesting"])
        signature = ModelSignature.from_json(metadata["signature"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        damaged = f"what {path.name} says of the model's arguments is damaged ({error!r})"
        raise ArgumentError(f"{damaged}: save the model again") from error
    return CompiledModel(Machines(library, signature.function, machine), signature, nesting, file=path)


_opened: dict[Path, bytes] = {}  # libraries, with hashes of their contents


def _unopened(path: Path) -> Path:
    """Return a library, or a copy if another one was opened at its path: the system would return that one again."""
    digest = _digest(path)
    return path if _opened.setdefault(path, digest) == digest else _temporary_library(path.read_bytes())


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _temporary_library(content: bytes) -> Path:
    """Write a library to a file that is deleted when the process exits."""
    with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as file:
        file.write(content)
    path = Path(file.name)
    atexit.register(path.unlink, missing_ok=True)
    return path


def _unpickled(library: bytes) -> CompiledModel:
    """Load a model from pickled bytes."""
    return load(_temporary_library(library))


def _passed(mod: ir.IRModule, passes: Any, target: Any) -> ir.IRModule:
    """Run the user's passes on a module."""
    sequence = [] if passes is None else list(passes) if isinstance(passes, (list, tuple)) else [passes]
    for one in sequence:
        if not isinstance(one, tvm.transform.Pass):
            raise ArgumentTypeError(f"sparsify takes passes over an IRModule, got {type(one).__name__}")
    with own_errors(), target:
        for one in sequence:
            mod = one(mod)
    return mod


def _function_of(mod: ir.IRModule) -> str:
    names = [str(var.name_hint) for var, func in mod.functions.items() if isinstance(func, relax.Function)]
    if "main" in names:
        return "main"
    if len(names) != 1:
        listing = ", ".join(names) or "none"
        raise ArgumentError(f"expected a module with a function main, or with one Relax function, got {listing}")
    return names[0]


def constant_bytes(mod: ir.IRModule | None) -> int:
    """Return the size of a module's constants in bytes."""
    sizes: list[int] = []
    for func in [] if mod is None else mod.functions.values():
        structural_walk(func, (ir.GenericConst, lambda const: sizes.append(const.value.numpy().nbytes)))
    return sum(sizes)


@contextmanager
def _without_notes_on_scopes() -> Iterator[None]:
    """Drop the lines "Scope Saving:" and "Scope Loaded:" that TVM writes to stderr for each constant."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            remaining = b"".join(line for line in captured if b"Warning: Scope " not in line)
            os.write(2, remaining)


# ----------------------------------------------------------------------------------------------- build


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.MarkOpaque")
def MarkOpaque(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Mark the programs of the dialect as opaque, so that Relax fuses nothing with them."""
    for var, func in list(mod.functions.items()):
        if isinstance(func, tirx.PrimFunc) and is_ours(func):
            mod.update_func(var, func.with_attr("op_pattern", OPAQUE))
    return mod


#: operator -> whether an operand at a place that is a zero, negative or not, changes some number: -0 + 0 is 0
MATTERS: dict[str, Callable[[int, bool], bool]] = {
    "relax.add": lambda _, is_negative: not is_negative,
    "relax.subtract": lambda at, is_negative: at == 1 and is_negative,
    "relax.multiply": lambda _at, _is_negative: True,
    "relax.divide": lambda _at, _is_negative: True,
}


@relax.expr_functor.mutator
class _ZeroHider(relax.PyExprMutator):
    """Mutator that gives scalar zeros that TVM must not fold a dimension."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") not in MATTERS:
            return call
        matters = MATTERS[call.op.name]
        args = [
            _with_dimension(arg) if _is_scalar_zero(arg) and matters(at, bool(np.signbit(arg.value.numpy()))) else arg
            for at, arg in enumerate(call.args)
        ]
        if all(a.same_as(b) for a, b in zip(args, call.args, strict=True)):
            return call
        result = self.builder_.emit(relax.Call(call.op, args, call.attrs))
        return result if call.ty.ndim else reshape(result, ())


def _is_scalar_zero(value: relax.Expr) -> bool:
    if not isinstance(value, ir.GenericConst) or value.ty.ndim != 0:
        return False
    return str(value.ty.dtype).startswith(("float", "bfloat")) and not np.any(value.value.numpy())


def _with_dimension(zero: ir.GenericConst) -> ir.GenericConst:
    return relax.const(zero.value.numpy().reshape(1), str(zero.ty.dtype))


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.HideZeros")
def HideZeros(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Keep TVM from folding ``x * 0`` and ``0 / x`` to 0, which is wrong for infinities and NaN."""
    for var, func in list(mod.functions.items()):
        if isinstance(func, relax.Function):
            mod.update_func(var, _ZeroHider(mod).visit_expr(func))
    return mod


@relax.expr_functor.mutator
class _EmptyFolder(relax.PyExprMutator):
    """Mutator that replaces constants, and calls of operators, that are known to have no elements."""

    def visit_generic_const_(self, constant: ir.GenericConst) -> relax.Expr:
        shape = constant.value.shape if isinstance(constant.value, tvm.runtime.Tensor) else ()
        if 0 not in shape:
            return constant
        # TVM cannot read back such a constant.
        empty = relax.op.builtin.alloc_tensor(relax.ShapeExpr(list(shape)), str(constant.value.dtype), 0)
        return self.builder_.emit(empty)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        shape = getattr(call.ty, "shape", None)
        is_legalized = isinstance(call.op, ir.Op) and call.op.has_attr("FLegalize")
        if not is_legalized or not isinstance(shape, relax.ShapeExpr) or not has_zero(shape.values):
            return call
        return relax.op.builtin.alloc_tensor(shape, str(call.ty.dtype.dtype), 0)


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.FoldEmpty")
def FoldEmpty(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Compute nothing for a result without elements, and keep no constant without any.

    TVM makes copies into such results reshapes, whose sizes of zero it takes for "as in the argument".
    """
    for var, func in list(mod.functions.items()):
        if isinstance(func, relax.Function):
            mod.update_func(var, _EmptyFolder(mod).visit_expr(func))
    return mod


def lowering(
    target: Any, database: Path | None, *, checked: bool = True, assume_finite: bool = False
) -> list[tvm.transform.Pass]:
    """Return the passes that run before TVM's own, in order."""
    return [
        MarkOpaque,  # A user's programs are not to be fused with other operators.
        relax.transform.DecomposeOpsForInference(),
        ConvolutionsAsProducts,
        SumInSinglePrecision,
        # Lower the operators and dense products, with their epilogues.
        LowerSparse(target, database, checked=checked, assume_finite=assume_finite),
        relax.transform.RemoveRedundantReshape(),
        HideZeros,
        FoldEmpty,
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.RewriteDataflowReshape(),  # Must run while the loops are still recognized as copies.
        relax.transform.DeadCodeElimination(),
        ScheduleDense,
    ]


@renamed_parameters(finite="assume_finite")
def build(
    mod: ir.IRModule,
    target: Any = None,
    *,
    params: Mapping[str, Any] | None = None,
    database: str | Path | None = None,
    tune_seconds: float | None = None,
    checked: bool = True,
    assume_finite: bool = False,
) -> relax.VMExecutable:
    """Compile a model: sparse operators by this package's kernels, everything else by TVM.

    Parameters
    ----------
    mod : IRModule
        A module with a function ``main``.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.
    params : mapping of str to array, optional
        Values of parameters, which become constants; a parameter of ``tvm.relax.frontend.nn`` provides its own value.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`: the best record of a constant matrix determines its format and schedule.
    tune_seconds : float, optional
        Run `sparsetir.tune_many` for so long on the products with constant matrices first, and add to these records.
    checked : bool
        Whether a structure passed at run time is validated in each call, at the cost of a pass over its index
        arrays: an invalid one raises an error, where it would otherwise cause accesses out of bounds. Constants are
        validated by `build`.
    assume_finite : bool
        A promise that operands hold neither infinities nor NaN: constant matrices are then stored in formats with zeros
        between the entries, too, where they are faster.

    Returns
    -------
    relax.VMExecutable
        For ``tvm.relax.VirtualMachine(executable, tvm.cpu())``; ``executable.export_library("model.so")`` saves it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An operator's arguments do not fit; the message names the operator and the argument.
    """
    get_num_threads()
    cpu = cpu_target(target, "models")
    records = None if database is None else as_path(database, "database", "the path of a file of records")
    checked, assume_finite = as_flag(checked, "checked"), as_flag(assume_finite, "assume_finite")
    with ExitStack() as stack, own_errors():
        if tune_seconds is not None:
            tune_seconds = as_seconds(tune_seconds, "tune_seconds", positive=True)
            folder = stack.enter_context(TemporaryDirectory(prefix="sparsetir-"))
            records = Path(folder, "tuning.jsonl") if records is None else records
            if products := tasks(mod, cpu, params=params):
                tune_many(products, seconds=tune_seconds, database=records, target=target, assume_finite=assume_finite)
        module = lowered(mod, cpu, params, records, checked=checked, assume_finite=assume_finite)
        return relax.build(module, _free(cpu, module), tir_pipeline="sparsetir")


def tasks(mod: ir.IRModule, target: Any = None, *, params: Mapping[str, Any] | None = None) -> list[TuneTask]:
    """Return the products of a model with constant matrices, and the count of each, as tasks for `sparsetir.tune_many`.

    Pass the same database to that call and to `build`. Products whose dense operands have unknown sizes are left out.

    Parameters
    ----------
    mod, target, params
        As for `build`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir.relax
    >>> from tvm import relax
    >>> A = sp.csr_array(np.eye(4, dtype="float32"))
    >>> builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([4, 2], "float32"))
    >>> with builder.function("main", [x]):
    ...     out = builder.emit(sparsetir.relax.spmm(*sparsetir.relax.csr_constants(A), x))
    ...     _ = builder.emit_func_output(builder.emit(sparsetir.relax.spmm(*sparsetir.relax.csr_constants(A), out)))
    >>> [(task.inputs["B"].shape, task.expected_calls) for task in sparsetir.relax.tasks(builder.get())]
    [((4, 2), 2)]
    """
    cpu, products = cpu_target(target, "models"), list[Any]()
    steps = [MarkOpaque, relax.transform.DecomposeOpsForInference(), LowerSparse(cpu, asked=products)]
    with own_errors(), cpu:
        tvm.transform.Sequential(steps)(bind(mod, params))
    counts: dict[Any, tuple[Any, int]] = {}
    for name, matrix, shapes in products:
        # Tuning depends on the positions of the values: weights with the same mask are one task.
        head = f"{name} {matrix.shape} {matrix.data.dtype} {matrix.indices.dtype} {sorted(shapes.items())}"
        key = hash_indices(head, [matrix.indptr, matrix.indices])
        counts[key] = ((name, matrix, shapes), counts[key][1] + 1 if key in counts else 1)
    return [task_of(name, matrix, shapes, calls) for (name, matrix, shapes), calls in counts.values()]


def _free(target: Any, mod: ir.IRModule) -> Any:
    """Return the target with reassociation of sums permitted, if every program of the dialect permits it."""
    loops = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    programs = [func for func in loops if is_ours(func)]
    free = [make_target(target, func) for func in programs]
    may = all(may_reassociate(func) for func in programs) and not any(makes_tangents(func) for func in loops)
    return free[0] if free and may else target


def lowered(
    mod: ir.IRModule,
    target: Any,
    params: Mapping[str, Any] | None = None,
    database: Path | None = None,
    *,
    checked: bool = True,
    assume_finite: bool = False,
) -> ir.IRModule:
    """Return the module as `build` compiles it: calls of functions only."""
    mod = bind(mod, params)
    with own_errors(), target:
        return tvm.transform.Sequential(lowering(target, database, checked=checked, assume_finite=assume_finite))(mod)


def bind(mod: ir.IRModule, params: Mapping[str, Any] | None) -> ir.IRModule:
    """Bind values to the parameters of a module's functions."""
    params = {} if params is None else as_mapping(params, "params", "values by the names of parameters")
    if not isinstance(mod, ir.IRModule):
        advice = ": it is compiled, call it" if isinstance(mod, CompiledModel) else ""
        raise ArgumentTypeError(f"expected an IRModule with a Relax function main, got {type(mod).__name__}{advice}")
    functions = {str(v.name_hint): f for v, f in mod.functions.items() if isinstance(f, relax.Function)}
    names = {function: [str(p.name) for p in func.params] for function, func in functions.items()}
    unknown = next((name for name in params if not any(name in params_of for params_of in names.values())), None)
    if unknown is not None:
        available = "; ".join(
            f"{function} has {', '.join(params_of) or 'none'}" for function, params_of in names.items()
        )
        raise ArgumentError(f"there is no parameter {unknown}: {available}")
    tensors = {name: _tensor(value) for name, value in params.items()}
    for function, params_of in names.items():
        values = {name: tensors[name] for name in params_of if tensors.get(name) is not None}
        if values:
            mod = relax.transform.BindParams(function, values)(mod)
    return mod


def _tensor(value: Any) -> tvm.runtime.Tensor | None:
    """Convert a value to a tensor; return None for a parameter of ``tvm.relax.frontend.nn`` without a value."""
    if isinstance(value, Parameter):
        return value.data
    if isinstance(value, tvm.runtime.Tensor):
        return value
    return tvm.runtime.tensor(array_of_numbers(value, "a parameter"))


__all__ = [
    "ALIGNMENT",
    "ATTACHED",
    "Argument",
    "CompiledModel",
    "Machines",
    "ModelSignature",
    "attached",
    "bind",
    "build",
    "compile_model",
    "from_tvm",
    "library_of",
    "load",
    "lowered",
    "lowering",
    "tasks",
    "to_tvm",
]
