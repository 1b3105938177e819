# SPDX-License-Identifier: Apache-2.0
"""Rewrite rules of formats: axes, coordinate formulas, descriptions in TVMScript, estimated storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pickle import PicklingError
from typing import Any

import numpy as np
from tvm import tirx

from sparsetir.errors import VerifyError
from sparsetir.ir.views import Program, SparseBuffer, decode
from sparsetir.script.printer import parse
from sparsetir.script.writer import ProgramWriter
from sparsetir.utils.caches import cached_property

# How one piece of a format stores a tensor: new axes, and formulas between old and new coordinates.


Formula = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class FormatRewriteRule:
    """One piece of a format.

    Parameters
    ----------
    name : str
        Ends the names of what the piece adds to a program: ``A_blocks``, ``indptr_blocks``.
    description : PrimFunc
        Declares the new axes and one sparse buffer over them (``T.match_sparse_buffer``); it has no iteration.
        Its sizes stay symbolic where they depend on the data.
    axis_map : mapping of int to sequence of str
        The new axes that stand for each dimension of the old buffer. A new axis that only groups others (a slice, a
        part of a long row) belongs to the dimension it groups.
    inverse : callable, optional
        Old coordinates from the new ones, in the order of the new buffer's axes. Called with TIR expressions and with
        numpy arrays. By default each dimension must have one new axis with the same coordinates.
    forward : callable, optional
        New coordinates from the old ones, for converting entries that are given by their coordinates.
    fills : bool
        Whether the piece stores slots between the entries (dense blocks): their value is zero, and a program for which
        that is not neutral must leave them out.
    partitions_rows : bool
        Whether no other piece of the format holds entries of the same first coordinate, and a loop over the slots of
        some piece meets it, padding or not, so that each piece can initialise its own results. What repeats below all
        slots of an axis of another dimension counts without a slot.
    meets_rows : bool
        Whether a loop over the slots of this piece meets every first coordinate, so that the first of several pieces
        can initialise what the others add to.
    independent : bool
        Whether steps of the first new axis never meet in a first coordinate although its formula does not show it.
    sweep : str, optional
        Pieces of one sweep are traversed together, a few rows at a time; all rows are done in one sweep before the next
        begins. For pieces that use a part of an operand each, which should stay in cache.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir.transform import FormatRewriteRule
    >>> blocks = sparsetir.parse('''
    ... @T.prim_func
    ... def blocks(a: T.handle, indptr: T.handle, indices: T.handle, mb: T.int32, nb: T.int32, nnzb: T.int32):
    ...     IO = T.dense_fixed(mb)
    ...     JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices))
    ...     II = T.dense_fixed(4)
    ...     JI = T.dense_fixed(4)
    ...     A = T.match_sparse_buffer(a, (IO, JO, II, JI))
    ... ''')
    >>> rule = FormatRewriteRule(
    ...     "blocks", blocks, axis_map={0: ["IO", "II"], 1: ["JO", "JI"]}, fills=True,
    ...     inverse=lambda io, jo, ii, ji: (io * 4 + ii, jo * 4 + ji),
    ...     forward=lambda i, j: (i // 4, j // 4, i % 4, j % 4))
    >>> [axis.name for axis in rule.buffer.axes]
    ['IO', 'JO', 'II', 'JI']
    """

    name: str
    description: tirx.PrimFunc
    axis_map: Mapping[int, Sequence[str]] = field(default_factory=dict)
    inverse: Formula | None = None
    forward: Formula | None = None
    fills: bool = False
    partitions_rows: bool = False
    meets_rows: bool = False
    independent: bool = False
    sweep: str | None = None

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.buffer.axes]
        mapped = [name for group in self.axis_map.values() for name in group]
        unknown = [name for name in mapped if name not in names]
        if unknown:
            message = f"axis_map of rule {self.name!r} names {unknown[0]}, its buffer has the axes {', '.join(names)}"
            raise VerifyError(message, self.name)
        if sorted(mapped) != sorted(names):
            missing = next((n for n in names if n not in mapped), None)
            fault = f"leaves out axis {missing}" if missing else "names an axis twice"
            raise VerifyError(f"axis_map of rule {self.name!r} {fault}", self.name)
        if self.inverse is None and any(len(group) != 1 for group in self.axis_map.values()):
            fault = "maps a dimension to several axes: give inverse=, the old coordinates from the new ones"
            raise VerifyError(f"rule {self.name!r} {fault}", self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        for formula in (self.inverse, self.forward):
            if formula is not None and "<" in getattr(formula, "__qualname__", ""):
                fault = f"rule {self.name!r} has a formula, {formula.__qualname__}, that has no name in a module"
                raise PicklingError(f"{fault}: define it there with def to pickle or save what uses it")
        return FormatRewriteRule, tuple(getattr(self, f.name) for f in fields(self))

    @cached_property
    def program(self) -> Program:
        """The description, decoded."""
        return decode(self.description)

    @cached_property
    def buffer(self) -> SparseBuffer:
        """The new buffer."""
        program = self.program
        if len(program.buffers) != 1 or program.iterations:
            counts = f"{len(program.buffers)} sparse buffers and {len(program.iterations)} iterations"
            message = f"the description of rule {self.name!r} must declare one sparse buffer and no iteration"
            raise VerifyError(f"{message}, got {counts}", self.name)
        return next(iter(program.buffers.values()))

    @property
    def order(self) -> int:
        """Number of dimensions of the tensors that it stores."""
        return len(self.axis_map)

    def old_coords(self, new: Sequence[Any]) -> list[Any]:
        """Return the coordinates in the old buffer of the point `new`."""
        if self.inverse is not None:
            return list(self.inverse(*new))
        at = {axis.name: coord for axis, coord in zip(self.buffer.axes, new, strict=True)}
        return [at[self.axis_map[d][0]] for d in range(self.order)]

    def new_coords(self, old: Sequence[Any]) -> list[Any]:
        """Return the coordinates in the new buffer of the point `old`."""
        if self.forward is not None:
            return list(self.forward(*old))
        if self.inverse is not None:
            message = f"rule {self.name!r} cannot place entries by coordinate: give forward="
            raise VerifyError(message, self.name)
        dimension = {group[0]: d for d, group in self.axis_map.items()}
        return [old[dimension[axis.name]] for axis in self.buffer.axes]


# Descriptions of pieces: the axes of a format as a small function in TVMScript.


LETTERS = "IJKLMN"


def axis_name(dimension: int) -> str:
    """Return the axis name of a dimension: I, J, K, ..."""
    return LETTERS[dimension] if dimension < len(LETTERS) else f"D{dimension}"


@lru_cache(maxsize=256)
def describe(
    name: str, idtype: str, *, arrays: str, sizes: str, axes: str, buffer: str, table: str = ""
) -> tirx.PrimFunc:
    """Return the description of a piece.

    Parameters
    ----------
    name : str
        Of the function.
    idtype : {"int32", "int64"}
        Of the axes and the sizes.
    arrays, sizes : str
        Names of the array and the scalar parameters, separated by blanks.
    axes : str
        One axis a line, ``name = constructor(arguments)`` without ``T.`` and without the index type.
    buffer : str
        The axes of the buffer A in subscript order.
    table : str
        Name and number of elements of each array that formulas of the axes may subscript, one a line; ``name:dtype``
        where it does not hold the index type.

    Examples
    --------
    >>> import sparsetir
    >>> func = describe("ragged", "int32", arrays="indptr", sizes="m n nnz", buffer="I, J", axes='''
    ...     I = dense_fixed(m)
    ...     J = dense_variable(I, (n, nnz), indptr)
    ... ''')
    >>> print(sparsetir.script(func).strip())
    # from tvm.script import sparsetir as T
    <BLANKLINE>
    @T.prim_func
    def ragged(a: T.handle, indptr: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (n, nnz), indptr, "int32")
        A = T.match_sparse_buffer(a, (I, J), "float32")
    >>> func = describe("corner", "int32", arrays="", sizes="m n", table="shift m", buffer="I, J", axes='''
    ...     I = dense_fixed(m)
    ...     J = sparse_fixed(I, (n, 2), lambda i, s: shift[i] + s)
    ... ''')
    >>> [axis.name for axis in sparsetir.ir.decode(func).axes.values()]
    ['I', 'J']
    """
    tables = [line.strip().partition(" ") for line in table.strip().splitlines()]
    dtype_and_extent = {
        name.partition(":")[0]: (name.partition(":")[2] or idtype, extent) for name, _, extent in tables
    }
    writer = ProgramWriter(name, ["a", *arrays.split(), *(f"{name}_data" for name in dtype_and_extent)])
    writer.scalars(idtype, *sizes.split())
    writer.lines += [_table(name, *what) for name, what in dtype_and_extent.items()]
    writer.lines += [_declaration(line.strip(), idtype) for line in axes.strip().splitlines()]
    writer.match("A", "a", (buffer,), "float32")
    return parse(writer.text())


def _table(name: str, dtype: str, extent: str) -> str:
    return f'{name} = T.match_buffer({name}_data, ({extent},), "{dtype}", align={np.dtype(dtype).itemsize})'


def _declaration(line: str, idtype: str) -> str:
    axis, _, call = line.partition(" = ")
    return f'{axis} = T.{call[:-1]}, idtype="{idtype}")'


# How a format would store a tensor, from the numbers of its pattern: nothing is converted.


@dataclass(frozen=True)
class Estimate:
    """Storage that a format would need for a tensor.

    Parameters
    ----------
    values : float
        Padding included.
    most : float, optional
        The same at most, where the pattern leaves it open.
    pieces : int
        Each with loops of its own.
    per_index : int
        Values that share a column number; 0 where none is stored.

    Examples
    --------
    >>> Estimate(5).at_most, Estimate(5, most=8).at_most
    (5, 8)
    """

    values: float
    most: float | None = None
    pieces: int = 1
    per_index: int = 1

    @property
    def at_most(self) -> float:
        """Values that are stored at most."""
        return self.values if self.most is None else self.most


__all__ = ["Estimate", "FormatRewriteRule"]
