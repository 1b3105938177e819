# SPDX-License-Identifier: Apache-2.0
"""Rewrite a program over other formats of its sparse buffers: one iteration becomes one for each piece.

before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

after, with A stored as 4 x 4 blocks and a rest::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0
    with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm_blocks") as [io, jo, ii, ji, k]:
        C[io * 4 + ii, k] = C[io * 4 + ii, k] + A_blocks[io, jo, ii, ji] * B[jo * 4 + ji, k]
    with T.sp_iter([I_rest, J_rest, K], "SRS", "spmm_rest") as [i, j, k]:
        C[i, k] = C[i, k] + A_rest[i, j] * B[j, k]

Every buffer over the same axes is stored in the same pieces. What is initialised once in the program is initialised
once here. Slots that a format adds between the entries are left out where they would change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import VerifyError, own_errors
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.ir import Axis, Program, SpIter, accesses, decode, is_sp_iter, label
from sparsetir.lower.rewriting import mentions, seq
from sparsetir.transform.pieces import Pieces
from sparsetir.transform.structure import Structure
from sparsetir.transform.tidy import declares, with_declarations, without_unused
from sparsetir.walks import structural_mutate


@dataclass(frozen=True, eq=False)
class Piece:
    """One piece of a decomposed buffer's format within the new program.

    ``params`` maps the description's parameters to the new function's, ``values`` the arrays of the program's buffers
    over the old axes to their arrays here, and ``buffers`` the buffers themselves. ``mask`` is the parameter that tells
    entries from padding, None where that is not needed.
    """

    rule: FormatRewriteRule
    params: dict[str, str]
    values: dict[str, str]
    buffers: dict[str, str]
    mask: str | None


@dataclass(frozen=True, eq=False)
class Group:
    """The buffers that share one structure, named by the one that was asked for, and the pieces they became.

    ``multiplies_zeros`` tells whether zeros between the entries are multiplied with other operands' numbers,
    ``adds_up`` whether entries with the same coordinates may be added up before the program runs: it takes no such
    entries, or computes the same with their sum.
    """

    name: str
    buffers: tuple[str, ...]
    axes: tuple[Axis, ...]
    pieces: tuple[Piece, ...]
    multiplies_zeros: bool = False
    adds_up: bool = True


class Rewriter:
    """Rewrites one structure of one program."""

    def __init__(self, program: Program, name: str, rules: Sequence[FormatRewriteRule], *, finite: bool = True) -> None:
        self.program = program
        self.structure = Structure(program, name, rules, finite=finite)

    # ------------------------------------------------------------------ the function

    def function(self) -> tirx.PrimFunc:
        """The new function."""
        dropped = {b.view for b in self.structure.group} | {b.storage for b in self.structure.group}

        def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
            return seq(*(new for s in node.seq for new in self._statements(s, dropped, mutator)))

        def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
            if not is_sp_iter(node):
                return mutator.default_mutate(node)
            iteration = next((it for it in self.program.iterations if it.node.same_as(node)), None)
            return self.iteration(iteration) if iteration is not None else node

        body = structural_mutate(self.program.func.body, [(tirx.SeqStmt, on_seq), (s_tir.SBlockRealize, on_realize)])
        lost = [v for v in dropped if mentions(body, [v])]
        if lost:
            fault = f"{lost[0].name} is used outside of an iteration over its axes"
            raise VerifyError(f"cannot decompose {self.structure.name}: {fault}, which is a search in every piece")
        fresh = [s for made in self.structure.made for s in (*made.statements, *made.mask_statements)]
        body = with_declarations(body, fresh)
        return without_unused(self.program.func, body, self._params())

    def _statements(self, stmt: tirx.Stmt, dropped: set[Var], mutator: Any) -> list[tirx.Stmt]:
        """A statement of the old program in the new one; a buffer's declaration becomes those of its pieces."""
        if not declares(stmt, dropped):
            return [mutator.mutate(stmt)]
        bound = stmt.value.args[0] if isinstance(stmt, tirx.Evaluate) else None
        return [] if bound is None else [s for made in self.structure.made for s in made.declarations[bound]]

    def _params(self) -> list[Var]:
        out: list[Var] = list(self.program.func.params)
        for made in self.structure.made:
            out += [b.storage for b in made.buffers.values() if not b.allocated]
            out += list(made.spliced.params.values())
            out += [made.mask.storage] if made.mask is not None else []
        return out

    def record(self, func: tirx.PrimFunc) -> Group:
        """What the caller needs to know to fill the new parameters."""
        held = {str(p.name) for p in func.params}
        pieces = []
        for made in self.structure.made:
            params = {name: str(var.name) for name, var in made.spliced.params.items() if str(var.name) in held}
            values = {
                str(self.program.buffers[view].storage.name): str(b.storage.name)
                for view, b in made.buffers.items()
                if str(b.storage.name) in held
            }
            mask = None if made.mask is None else str(made.mask.storage.name)
            buffers = {self.program.buffers[view].name: b.name for view, b in made.buffers.items()}
            pieces.append(Piece(made.rule, params, values, buffers, mask))
        names, axes = tuple(b.name for b in self.structure.group), self.structure.axes
        adds_up = self.structure.adds_up or all(a.unique for a in axes)
        return Group(self.structure.name, names, axes, tuple(pieces), self.structure.multiplies_zeros, adds_up)

    # ------------------------------------------------------------------ one iteration

    def iteration(self, it: SpIter) -> tirx.Stmt:
        """An iteration of the old program as the new program has it."""
        views = {b.view for b in self.structure.group}
        touched = {b for b, _, _ in accesses(it.block)} & views
        walked = [a for a in self.structure.axes if a in it.listed and a.kind != "dense_fixed"]
        if not touched and not walked:
            return it.node
        for entry in (e for e in it.entries if e.merge or e.axes[-1].is_assembled):
            fault = f"walks {label(entry)}, whose members have no order over several pieces"
            how = "store this buffer as it is"
            raise VerifyError(f"cannot decompose {self.structure.name}: iteration {it.name} {fault}; {how}", it.name)
        missing = [a.name for a in self.structure.axes if a not in it.axes]
        if missing or any(e.attached_to for e in it.entries if set(e.axes) & set(self.structure.axes)):
            fault = f"does not iterate axis {missing[0]}" if missing else "attaches an axis of it to another"
            reason = "its elements would have to be looked up in every piece"
            raise VerifyError(f"cannot decompose {self.structure.name}: iteration {it.name} {fault}, {reason}", it.name)
        self._check_others(it)
        return Pieces(self.structure, it).statement()

    def _check_others(self, it: SpIter) -> None:
        """No other axis of the iteration may hang from one that is replaced."""
        attached = [e for e in it.entries if e.attached_to in self.structure.axes]
        if attached:
            fault = f"attaches {attached[0].axes[0].name} to an axis of it"
            raise VerifyError(f"cannot decompose {self.structure.name}: iteration {it.name} {fault}", it.name)
        for axis in it.axes:
            below = [a for a in axis.ancestors if a in self.structure.axes]
            if axis not in self.structure.axes and below:
                fault = f"iterates {axis.name} below {below[-1].name}"
                raise VerifyError(
                    f"cannot decompose {self.structure.name}: iteration {it.name} {fault}, which the new axes replace",
                    it.name,
                )


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A program over other formats, and how its parameters come from those of the original.

    ``func`` is an ordinary stage-I function. ``formats`` are what was asked for, ``groups`` what became of it;
    ``steps`` has one item for each structure that was rewritten, in order.
    """

    original: tirx.PrimFunc
    func: tirx.PrimFunc
    formats: dict[str, Any]
    groups: tuple[Group, ...]
    finite: bool = True

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name} as {format!r}" for name, format in self.formats.items())
        name = self.original.attrs["global_symbol"]
        return f"# {name} with {chosen or ', '.join(g.name for g in self.groups)}\n{self.func!r}"

    @property
    def multiplies_zeros(self) -> bool:
        """Whether zeros that the formats store are multiplied: an infinity or a NaN reaches results that do not use it.

        Examples
        --------
        >>> import sparsetir
        >>> from sparsetir import formats
        >>> spmm = sparsetir.ops.spmm()
        >>> [sparsetir.decompose_format(spmm, {"A": f}).multiplies_zeros for f in (formats.bsr(4, 4), formats.ell())]
        [True, False]
        """
        return any(group.multiplies_zeros for group in self.groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.original, self.formats, self.finite)

    def with_formats(self, formats: Any) -> dict[str, Any]:
        """The formats of the original's buffers when more are given, some for pieces by their buffers' names."""
        if not isinstance(formats, Mapping):
            raise VerifyError("say which buffer of the decomposed program to decompose: {'A_rest': format}")
        pieces = {n: (g.name, p.rule.name) for g in self.groups for p in g.pieces for n in p.buffers.values()}
        found = dict(self.formats)
        for name, format in formats.items():
            if name in pieces:
                buffer, piece = pieces[name]
                found[buffer] = self._nested(buffer, piece, format)
            elif name in found:
                raise VerifyError(f"{name} is decomposed already; its pieces are {', '.join(pieces)}", name)
            else:
                found[name] = format
        return found

    def _nested(self, buffer: str, piece: str, format: Any) -> Any:
        from sparsetir.formats.nested import Nested

        base = self.formats[buffer]
        if isinstance(base, Nested) and piece not in base.inner:
            return Nested(base.base, {**base.inner, piece: format})
        return Nested(base, {piece: format})


def _resolved(format: Any, axes: Sequence[Axis]) -> Any:
    """A format that knows how many dimensions it stores and how wide its indices are."""
    if not hasattr(format, "resolve"):
        return format
    wide = any(axis.idtype == "int64" for axis in axes)
    return format.resolve(len(axes), format.idtype or ("int64" if wide else "int32"))


def _rules(format: Any, name: str) -> list[FormatRewriteRule]:
    """The rules of a format, or those that are given; of a bare list it is not known that each has rows of its own."""
    found = [format] if isinstance(format, FormatRewriteRule) else getattr(format, "rules", format)
    if not isinstance(found, (list, tuple)) or not all(isinstance(r, FormatRewriteRule) for r in found):
        hint = f"formats.make({format!r}, ...)" if isinstance(format, str) else "one of sparsetir.formats"
        raise VerifyError(f"{name} must have a format or a list of rules, found {format!r}; try {hint}", name)
    is_bare = found is format and len(found) > 1
    return [replace(rule, partitions_rows=False) if is_bare else rule for rule in found]


def decompose_format(func: Any, formats: Mapping[str, Any] | Any, *, finite: bool | None = None) -> Decomposition:
    """Rewrite a program so that sparse buffers are stored in other formats.

    Parameters
    ----------
    func : PrimFunc or Decomposition
        At stage I.
    formats : mapping of str to Format, FormatRewriteRule or list of FormatRewriteRule
        For each buffer by name; every buffer over the same axes is stored alike. A single format stands for the
        program's first sparse buffer. The pieces of a decomposed buffer are buffers like any other: decompose them
        again by name (``A_rest``).
    finite : bool, optional
        Whether the dense operands are taken to hold neither infinities nor NaNs: zeros that a format stores between the
        entries, as in blocks, are then multiplied like entries. False leaves them out one by one, which is slow. True
        by default, or as it was for a decomposition that is decomposed again.

    Returns
    -------
    Decomposition
        ``sparsetir.build`` makes a kernel of it that is called like the original.

    Raises
    ------
    VerifyError
        When an iteration uses the buffer in a way that has no counterpart in pieces; the message says which.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir import formats
    >>> parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(4, 4)})
    >>> [str(p.name) for p in parts.func.params][:3]
    ['b', 'c', 'm']

    Notes
    -----
    Composable formats are those of SparseTIR (Ye et al., ASPLOS 2023).
    """
    if isinstance(func, Decomposition):
        finite = func.finite if finite is None else finite
        return decompose_format(func.original, func.with_formats(formats), finite=finite)
    current, groups = func, []
    wanted = dict(formats) if isinstance(formats, Mapping) else {_first_sparse(func): formats}
    for name, format in wanted.items():
        program = decode(current)
        wanted[name] = format = _resolved(format, program.buffer(name).axes)
        rewriter = Rewriter(program, name, _rules(format, name), finite=finite is not False)
        with own_errors():
            current = rewriter.function()
        groups.append(rewriter.record(current))
    return Decomposition(func, current, wanted, tuple(groups), finite is not False)


def _again(func: Any, formats: Mapping[str, Any], finite: bool) -> Decomposition:
    """A decomposition out of what pickle kept: formulas of formats have no names."""
    return decompose_format(func, formats, finite=finite)


def _first_sparse(func: tirx.PrimFunc) -> str:
    found = [b.name for b in decode(func).buffers.values() if not b.is_dense and not b.allocated]
    if not found:
        raise VerifyError("the program has no sparse buffer to decompose")
    return found[0]


__all__ = ["Decomposition", "Group", "Piece", "decompose_format"]
