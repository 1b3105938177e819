# SPDX-License-Identifier: Apache-2.0
"""How one piece of a format stores a tensor: new axes, and formulas between old and new coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pickle import PicklingError
from typing import Any

from tvm import tirx

from sparsetir.errors import VerifyError
from sparsetir.ir import Program, SparseBuffer, decode

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
        Pieces of one sweep are gone over together, a few rows at a time; all rows are done in one sweep before the next
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
            found = f"{len(program.buffers)} sparse buffers and {len(program.iterations)} iterations"
            message = f"the description of rule {self.name!r} must declare one sparse buffer and no iteration"
            raise VerifyError(f"{message}, found {found}", self.name)
        return next(iter(program.buffers.values()))

    @property
    def order(self) -> int:
        """Number of dimensions of the tensors that it stores."""
        return len(self.axis_map)

    def old_coords(self, new: Sequence[Any]) -> list[Any]:
        """Coordinates in the old buffer of the point `new`."""
        if self.inverse is not None:
            return list(self.inverse(*new))
        at = {axis.name: coord for axis, coord in zip(self.buffer.axes, new, strict=True)}
        return [at[self.axis_map[d][0]] for d in range(self.order)]

    def new_coords(self, old: Sequence[Any]) -> list[Any]:
        """Coordinates in the new buffer of the point `old`."""
        if self.forward is not None:
            return list(self.forward(*old))
        if self.inverse is not None:
            message = f"rule {self.name!r} cannot place entries by coordinate: give forward="
            raise VerifyError(message, self.name)
        dimension = {group[0]: d for d, group in self.axis_map.items()}
        return [old[dimension[axis.name]] for axis in self.buffer.axes]


__all__ = ["FormatRewriteRule"]
