# SPDX-License-Identifier: Apache-2.0
"""The stage-I schedule: primitives that change a program but not its meaning, and their trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import s_tir

from sparsetir.codegen.pipeline import to_stage_2
from sparsetir.ir.views import label
from sparsetir.script.printer import script
from sparsetir.transform.editing import Editor
from sparsetir.transform.trace import Scheduled, Step, plain


class Schedule(Scheduled):
    """Changes of a stage-I program, one primitive at a time.

    An iteration is known by its name, an entry of its list by the name of its axis: ``"I"``. A fused entry is a
    list of names, ``["I", "J"]``, or its text, ``"T.fuse(I, J)"``. The names stay valid while the program changes.
    A primitive that is not legal raises `ScheduleError` with the reason and leaves the schedule as it was. After each
    step the program is verified.

    Parameters
    ----------
    func : PrimFunc or IRModule with one PrimFunc
        The program; it is not changed.

    Attributes
    ----------
    func : PrimFunc
        The program as it is now.
    trace : Trace
        The steps so far.

    Examples
    --------
    >>> import sparsetir
    >>> sch = sparsetir.Schedule(sparsetir.ops.spmm())
    >>> sch.sparse_split("spmm", "K", 8)
    ['K_o', 'K_i']
    >>> sch.sparse_reorder("spmm", ["K_o", "I", "J", "K_i"])
    >>> sch.get_axes("spmm")
    ['K_o', 'I', 'J', 'K_i']
    >>> kernel = sparsetir.build(sch)
    """

    # ------------------------------------------------------------------ the program

    def script(self) -> str:
        """Return the program as text."""
        return script(self.func)

    def lower(self) -> s_tir.Schedule:
        """Lower the program to a stock TVM schedule at stage II: loops over positions."""
        mod = to_stage_2(self.mod[self._name])
        sch = s_tir.Schedule(mod)
        sch.work_on(next(iter(mod.functions)).name_hint)
        return sch

    def __repr__(self) -> str:
        names = ", ".join(p.iteration.name for p in Editor(self.func).facts.places)
        return f"Schedule of {self._name.name_hint} ({names}) after {len(self.trace)} steps"

    # ------------------------------------------------------------------ steps

    def _do(self, primitive: str, *arguments: Any, **options: Any) -> Any:
        set_options = {k: plain(v) for k, v in options.items() if v is not None and v is not False}
        return self.take(Step(primitive, plain(arguments), set_options))

    # ------------------------------------------------------------------ names

    def get_sp_iter(self, name: str) -> str:
        """Return the name of an iteration after checking that it exists.

        Raises
        ------
        ScheduleError
            No iteration, or more than one, has the name.
        """
        return Editor(self.func).iteration(name, merged=True).name

    @property
    def sp_iters(self) -> list[str]:
        """The names of all iterations in the order of the text."""
        return [p.iteration.name for p in Editor(self.func).facts.places]

    def get_axes(self, iteration: str) -> list[str]:
        """Return the entries of an iteration's list as they stand in the text."""
        return [label(e) for e in Editor(self.func).iteration(iteration, merged=True).entries]

    # ------------------------------------------------------------------ primitives

    def sparse_reorder(self, iteration: str, order: Sequence[Any]) -> None:
        """Reorder the axes of an iteration; see `sparsetir.transform.primitives.sparse_reorder`."""
        self._do("sparse_reorder", iteration, order)

    def sparse_fuse(self, iteration: str, axes: Sequence[Any]) -> None:
        """Make one loop of a chain of axes; see `sparsetir.transform.fuse.sparse_fuse`."""
        self._do("sparse_fuse", iteration, axes)

    def sparse_split(self, iteration: str, axis: Any, factor: int) -> list[str]:
        """Split an axis into groups and places in a group; see `sparsetir.transform.split.sparse_split`."""
        return self._do("sparse_split", iteration, axis, factor)

    def split_init(self, iteration: str) -> str:
        """Make an iteration of ``T.init()``; see `sparsetir.transform.split_iteration.split_init`."""
        return self._do("split_init", iteration)

    def annotate(self, iteration: str, key: str, value: Any) -> None:
        """Set an annotation of an iteration; see `sparsetir.transform.primitives.annotate`."""
        self.take(Step("annotate", [iteration, key, plain(value)]))

    def set_search(self, iteration: str, strategy: str) -> None:
        """Choose how coordinates are looked up; see `sparsetir.transform.primitives.set_search`."""
        self._do("set_search", iteration, strategy)

    def to_dense(self, iteration: str, axis: Any, *, guard: bool = False) -> str:
        """Iterate all coordinates of a sparse axis; see `sparsetir.transform.primitives.to_dense`."""
        return self._do("to_dense", iteration, axis, guard=guard)

    def pad(self, iteration: str, axis: Any, multiple: int) -> str:
        """Round the extent of a dense loop up; see `sparsetir.transform.primitives.pad`."""
        return self._do("pad", iteration, axis, multiple)

    def fuse_iterations(self, first: str, second: str, *, depth: int | None = None, name: str | None = None) -> str:
        """Run two neighbours together; see `sparsetir.transform.fuse.fuse_iterations`."""
        return self._do("fuse_iterations", first, second, depth=depth, name=name)

    def split_iteration(self, iteration: str, *, at: int | None = None) -> list[str]:
        """Run the statements of a body apart; see `sparsetir.transform.split_iteration.split_iteration`."""
        return self._do("split_iteration", iteration, at=at)

    def decompose(self, formats: Mapping[str, Any]) -> Any:
        """Store sparse buffers in other formats, by buffer name; see `sparsetir.decompose_format`."""
        return self._do("decompose", formats)


__all__ = ["Schedule"]
