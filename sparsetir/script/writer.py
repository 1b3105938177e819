# SPDX-License-Identifier: Apache-2.0
"""Writer of programs as TVMScript text: for ready programs, index notation, models and graphs.

Known sizes are numbers in the text. The others are parameters between the inputs and the results, as ``R.call_tir``
passes them.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any, ParamSpec

import tvm_ffi
from tvm import tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.ir.rules import INDEX_DTYPES
from sparsetir.ir.sizes import LARGEST_INT32, narrow_extents
from sparsetir.ir.views import decode
from sparsetir.script.printer import parse
from sparsetir.utils.arguments import VALUE_DTYPES, as_index, dtype_name, shown

P = ParamSpec("P")
Axes = tuple[str, ...]
DENSE = re.compile(r'(= T\.dense_fixed)\((\w+), "int32"\)')
RESERVED = {"T"}  # what programs call the dialect


@dataclass
class Names:
    """Names of a program that are in use."""

    taken: set[str] = field(default_factory=lambda: set(RESERVED))

    def new(self, *candidates: str) -> str:
        """Return the first candidate name that is unused, or the last one with a number."""
        for name in candidates:
            if name not in self.taken:
                break
        else:
            name = next(f"{candidates[-1]}_{n}" for n in range(1, 1000) if f"{candidates[-1]}_{n}" not in self.taken)
        self.taken.add(name)
        return name


@dataclass
class ProgramWriter:
    """Writer of the text of a program.

    Parameters
    ----------
    name : str
    inputs, results : list of str
        Names of the parameters that are arrays, before and behind the sizes.
    sizes : dict of str to object
        The scalar parameters with the values that callers pass, or None.
    lines : list of str
        The body.
    size_dtypes : dict of str to str
        Dtypes of scalar parameters; int64 by default.
    attributes : dict of str to object
        Attributes of the function.
    """

    name: str
    inputs: list[str] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    size_dtypes: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    # -------------------------------------------------------------- axes

    def scalars(self, dtype: str, *names: str) -> None:
        """Declare scalar parameters."""
        for name in names:
            self.sizes.setdefault(name, None)
            self.size_dtypes[name] = dtype

    def size(self, name: str, value: Any) -> str:
        """Return a size as text: itself, a number, or the name of a parameter."""
        if isinstance(value, str):
            return value
        if isinstance(value, (int, tirx.IntImm)):
            return str(int(value))
        parameter = next((n for n, v in self.sizes.items() if tvm_ffi.structural_equal(v, value)), name)
        self.sizes[parameter] = value
        return parameter

    def dense(self, name: str, extent: Any, idtype: str = "int32", *, is_known: bool = True) -> None:
        """Declare an axis without an index array; unless `is_known`, a size is a parameter even if it is a number."""
        size = f"{name.lower()}_size"
        if is_known:
            size = self.size(size, extent)
        else:
            self.sizes[size] = tirx.const(0, "int64") + extent
        self.lines.append(f'{name} = T.dense_fixed({size}, "{idtype}")')

    def rows(self, name: str, parent: str, length: Any, nnz: Any, idtype: str, *, indices: bool = True) -> None:
        """Declare an axis of rows of variable length, with an index array, or dense without one."""
        sizes = (self.size(name.lower() + "_size", length), self.size(name.lower() + "_nnz", nnz))
        arrays = ("indptr", "indices")[: 1 + indices]
        self.inputs += arrays
        self.compressed(name, parent, sizes, arrays, idtype)

    def compressed(
        self, name: str, parent: str, sizes: tuple[str, str], arrays: Sequence[str], idtype: str, **flags: bool
    ) -> None:
        """Declare an axis of rows of variable length: row pointers, and coordinates unless the axis is dense."""
        is_dense = len(arrays) == 1
        kind, listing = ("dense_variable", arrays[0]) if is_dense else ("sparse_variable", f"({', '.join(arrays)})")
        self.lines.append(
            f'{name} = T.{kind}({parent}, ({", ".join(sizes)}), {listing}, "{idtype}"{self._flags(flags)})'
        )

    def singleton(self, name: str, parent: str, length: str, indices: str, idtype: str, **flags: bool) -> None:
        """Declare an axis of one coordinate for each position of its parent."""
        self.lines.append(f'{name} = T.singleton({parent}, {length}, {indices}, "{idtype}"{self._flags(flags)})')

    def full(self, name: str, parent: str, length: str, above: Sequence[str], idtype: str) -> None:
        """Declare an axis that stores all coordinates; `above` names the coordinates of the axes above it."""
        formula = f"lambda {', '.join([*above, 's'])}: s"
        self.lines.append(f'{name} = T.sparse_fixed({parent}, ({length}, {length}), {formula}, "{idtype}", full=True)')

    @staticmethod
    def _flags(flags: Mapping[str, bool]) -> str:
        """Return the flags that differ from the default, true."""
        return "".join(f", {name}={value}" for name, value in flags.items() if not value)

    # -------------------------------------------------------------- buffers

    def array(self, name: str, axes: Axes, dtype: str, *, result: bool = False) -> None:
        """Declare a buffer that the caller passes as a parameter of the same name."""
        handle = f"{name.lower()}_data"
        (self.results if result else self.inputs).append(handle)
        self.match(name, handle, axes, dtype)

    def match(self, name: str, handle: str, axes: Sequence[str], dtype: str, default: str = "") -> None:
        """Declare the buffer of a parameter."""
        ending = f", default_value={default}" if default else ""
        self.lines.append(f'{name} = T.match_sparse_buffer({handle}, ({", ".join(axes)},), "{dtype}"{ending})')

    def scratch(self, name: str, axes: Sequence[str], dtype: str) -> None:
        """Declare a scratch buffer, one per step if it is declared within an iteration."""
        self.lines.append(f'{name} = T.alloc_sparse_buffer(({", ".join(axes)},), "{dtype}")')

    # -------------------------------------------------------------- iterations

    def iterate(
        self,
        axes: Sequence[str],
        kinds: str,
        name: str,
        body: Sequence[str],
        *,
        init: str | None = None,
        is_stored: bool = False,
        variables: Sequence[str] | None = None,
    ) -> None:
        """Write an iteration; its variables are by default the lower-case names of the axes.

        `is_stored`: initialize visited elements only.
        """
        names = [axis.lower() for axis in axes] if variables is None else variables
        self.lines.append(f'with T.sp_iter([{", ".join(axes)}], "{kinds}", "{name}") as [{", ".join(names)}]:')
        if is_stored:
            self.lines.append('    T.sp_iter_attr({"init": "stored"})')
        if init is not None:
            self.lines += ["    with T.init():", f"        {init}"]
        self.lines += [f"    {line}" for line in body]

    @contextmanager
    def steps(self, axes: Axes, name: str) -> Iterator[None]:
        """Write a spatial iteration around the lines that are written in the context."""
        outside, self.lines = self.lines, []
        yield
        inside, self.lines = self.lines, outside
        self.iterate(axes, "S" * len(axes), name, inside)

    # -------------------------------------------------------------- the program

    def text(self) -> str:
        """Return the text of the program."""
        handles = [f"{name}: T.handle" for name in self.inputs]
        sizes = [f"{name}: T.{self.size_dtypes.get(name, 'int64')}" for name in self.sizes]
        results = [f"{name}: T.handle" for name in self.results]
        head = f"@T.prim_func\ndef {self.name}({', '.join(handles + sizes + results)}):"
        listed = ", ".join(f'"{key}": {value!r}' for key, value in self.attributes.items())
        attributes = [f"T.func_attr({{{listed}}})"] if listed else []
        return "\n    ".join([head, *attributes, *self.lines]) + "\n"

    def function(self) -> tirx.PrimFunc:
        """Return the program; dense axes count in 64 bits where constant extents make a buffer too large for 32."""
        text = self.text()
        if all(int(size) <= LARGEST_INT32 for _, size in DENSE.findall(text) if size.isdigit()):
            func = _parsed(text)
            extents = narrow_extents(decode(func), with_constants=True).values()
            constant = [[int(n) for n in takewhile(lambda n: isinstance(n, tirx.IntImm), each)] for each in extents]
            if all(math.prod(sizes) <= LARGEST_INT32 for sizes in constant):
                return func
        return _parsed(DENSE.sub(lambda m: f'{m[1]}({f"T.int64({m[2]})" if m[2].isdigit() else m[2]}, "int64")', text))


@lru_cache(maxsize=256)
def _parsed(text: str) -> tirx.PrimFunc:
    """Parse a text, cached because layers of a model often differ by their constants only."""
    return parse(text)


# Ready programs are made once for each choice of dtypes.


def memoize_program(make: Callable[P, tirx.PrimFunc]) -> Callable[P, tirx.PrimFunc]:
    """Make each program once, however its dtypes are spelled: parsing takes as long as many calls of a kernel.

    Raises
    ------
    ArgumentError
        `make` would be given another dtype than those of the dialect.
    """
    signature, cached_make = inspect.signature(make), lru_cache(maxsize=128, typed=True)(make)

    @functools.wraps(make)
    def program(*args: P.args, **kwargs: P.kwargs) -> tirx.PrimFunc:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for argument, value in bound.arguments.items():
            bound.arguments[argument] = _spelled(make.__name__, argument, value, signature.parameters[argument].default)
            if not isinstance(bound.arguments[argument], Hashable):
                fault = f"{argument}: expected {signature.parameters[argument].annotation}, got {type(value).__name__}."
                raise ArgumentTypeError(f"{fault} See help(sparsetir.ops.{make.__name__}).")
        return cached_make(*bound.args, **bound.kwargs)

    return program


def _spelled(name: str, argument: str, value: Any, default: Any) -> Any:
    """Normalize an argument of a ready program for the comparison of `memoize_program`."""
    dtypes = {"dtype": VALUE_DTYPES, "idtype": INDEX_DTYPES}.get(argument)
    if dtypes is None:
        return tuple(map(as_index, value)) if isinstance(value, tuple) else as_index(value)
    spelled = default if value is None else dtype_name(value)
    if spelled in dtypes:
        return spelled
    expected = f"{argument} is one of {', '.join(dtypes)}"
    if isinstance(value, str):
        raise ArgumentError(f"{expected}, got {shown(value)}")
    how = f"sparsetir.ops.{name} makes a program: build it, and call the kernel with arrays by name"
    raise ArgumentError(f"{expected}, got {spelled}; {how}")


__all__ = ["Axes", "Names", "ProgramWriter", "memoize_program"]
