# SPDX-License-Identifier: Apache-2.0
"""What is decomposed: the buffers that share one structure, and the declarations of their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tvm import tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.effects import analyse
from sparsetir.errors import VerifyError
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.ir import Axis, Program, SparseBuffer, cast, const
from sparsetir.lower.rewriting import collect
from sparsetir.rules import Facts
from sparsetir.transform.splice import Spliced, make_buffer, splice
from sparsetir.transform.tidy import names_of

MASK_DTYPE = "int8"


@dataclass
class Made:
    """A piece while the program is rewritten."""

    spliced: Spliced
    buffers: dict[Var, SparseBuffer]
    mask: SparseBuffer | None = None
    statements: list[tirx.Stmt] = field(default_factory=list)
    declarations: dict[Var, list[tirx.Stmt]] = field(default_factory=dict)
    mask_statements: list[tirx.Stmt] = field(default_factory=list)

    @property
    def rule(self) -> FormatRewriteRule:
        return self.spliced.rule


class Structure:
    """The buffers over one list of axes, and the pieces they become.

    ``padded`` are those whose slots between the entries are known to hold zero so far. With ``finite``, zeros there are
    multiplied as if they were entries; ``multiplies_zeros`` tells whether any are. ``adds_up`` says whether all
    iterations seen so far compute the same of entries that were added up.
    """

    def __init__(self, program: Program, name: str, rules: Sequence[FormatRewriteRule], *, finite: bool = True) -> None:
        self.program, self.name, self.finite = program, name, finite
        self.multiplies_zeros = False
        self.axes = program.buffer(name).axes
        self.rules = list(rules)
        self.names = names_of(program.func)
        self.group = self._group()
        self.padded = {b.view for b in self.group} - _made_here(program) - _stored_in_loops(program)
        self.adds_up = True
        self._check()
        self.made = [self._make(rule) for rule in self.rules]

    @cached_property
    def facts(self) -> Facts:
        """The program as the tests of dependence ask for it."""
        return Facts(self.program.func, self.program)

    @property
    def is_dense(self) -> bool:
        """Whether the program walks every coordinate: then its entries are what is not zero."""
        return all(a.kind == "dense_fixed" for a in self.axes)

    # ------------------------------------------------------------------ what iterations say of it

    def keep_repeated(self) -> None:
        """Entries with the same coordinates are not added up: an iteration computes something else of their sum."""
        self.adds_up = False

    def multiply_zeros(self) -> None:
        """An iteration multiplies zeros between the entries."""
        self.multiplies_zeros = True

    def set_clean(self, view: Var, is_clean: bool) -> None:
        """Whether slots between the entries hold zero after an iteration that stores to a buffer."""
        (self.padded.add if is_clean else self.padded.discard)(view)

    # ------------------------------------------------------------------ what is rewritten

    def _group(self) -> list[SparseBuffer]:
        """The buffers over all of the structure's axes; one over dense axes alone is stored sparse by itself."""
        if self.is_dense:
            return [self.program.buffer(self.name)]
        wanted, found = set(self.axes), []
        for buffer in self.program.buffers.values():
            held = wanted & set(buffer.axes)
            if held == wanted:
                found.append(buffer)
            elif sparse := [a.name for a in buffer.axes if a in held and a.kind != "dense_fixed"]:
                message = f"{buffer.name} has axis {sparse[0]} of {self.name} but not all its axes"
                raise VerifyError(f"{message}: decompose a buffer over all of them", buffer.name)
        return found

    def _check(self) -> None:
        if not self.rules:
            raise VerifyError(f"the format of {self.name} has no rules", self.name)
        for rule in self.rules:
            if rule.order != len(self.axes):
                found = f"rule {rule.name!r} is for {rule.order} dimensions"
                raise VerifyError(f"{found}, {self.name} has {len(self.axes)}", self.name)
        repeated = {r.name for r in self.rules if sum(r.name == o.name for o in self.rules) > 1}
        if repeated:
            raise VerifyError(f"two rules for {self.name} are called {min(repeated)!r}", self.name)

    def rename(self, suffix: str, name: str) -> str:
        """A free name for something of a piece."""
        wanted = f"{name}_{suffix}"
        for candidate in (wanted, f"{wanted}_{self.name}", *(f"{wanted}_{n}" for n in range(len(self.names) + 1))):
            if candidate not in self.names:
                self.names.add(candidate)
                return candidate
        return wanted

    def _make(self, rule: FormatRewriteRule) -> Made:
        rename = lambda name: self.rename(rule.name, name)  # noqa: E731
        spliced = splice(rule, self.axes, rename)
        made = Made(spliced, {}, statements=list(spliced.statements))
        for buffer in self.group:
            axes = self._axes_of(buffer, spliced)
            made.buffers[buffer.view], made.declarations[buffer.view] = make_buffer(buffer, axes, rename)
        return made

    def _axes_of(self, buffer: SparseBuffer, spliced: Spliced) -> tuple[Axis, ...]:
        """The buffer's axes with the structure's replaced, all at the place of the first."""
        first = min(buffer.axes.index(a) for a in self.axes)
        before = [a for a in buffer.axes[:first] if a not in self.axes]
        after = [a for a in buffer.axes[first:] if a not in self.axes]
        return (*before, *spliced.axes, *after)

    def mask(self, made: Made) -> SparseBuffer:
        """The buffer that is 1 at the entries of a piece."""
        if made.mask is None:
            rename = lambda name: self.rename(made.rule.name, name)  # noqa: E731
            like = tirx.decl_buffer([const(1)], MASK_DTYPE, name="valid", layout=None, data_alignment=1)
            zero = const(0, MASK_DTYPE)
            made.mask, made.mask_statements = make_buffer(
                SparseBuffer(like, like, (), zero), tuple(made.spliced.axes), rename
            )
        return made.mask

    def dense(self, axis: Axis) -> Axis:
        """`axis`, or a new dense one of its length."""
        if axis.kind == "dense_fixed":
            return axis
        name = self.rename("dense", axis.name)
        var = Var(name, axis.var.ty)
        value = op.call("dense_fixed", [cast(axis.length, axis.idtype)], axis.idtype)
        self.made[0].statements.append(tirx.Bind(var, value))
        return Axis(var, "dense_fixed", length=axis.length, count=axis.length)


def _stored_in_loops(program: Program) -> set[Var]:
    """Buffers that a loop around an iteration stores to: what it reads first may come from the round before."""
    loops = collect(program.func.body, tirx.For)
    return {store.buffer for loop in loops for store in collect(loop, tirx.BufferStore)}


def _made_here(program: Program) -> set[Var]:
    """Buffers that hold nothing before the program runs."""
    outputs = analyse(program).outputs
    return {b.view for b in program.buffers.values() if b.allocated or str(b.storage.name) in outputs}


__all__ = ["MASK_DTYPE", "Made", "Structure"]
