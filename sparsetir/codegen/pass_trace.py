# SPDX-License-Identifier: Apache-2.0
"""Pass traces: the IR of one program after each pass, as text and as a page of differences."""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import ir

from sparsetir.lower import SCHEDULED, TO_STAGE_2, TO_STAGE_3, as_module, run
from sparsetir.script.printer import script
from sparsetir.script.sugar import outline
from sparsetir.utils.arguments import as_path
from sparsetir.utils.files import write_text

CONTEXT_LINES = 3
STYLE = """
.sparsetir-trace{--fg:#1f2328;--bg:#fff;--dim:#59636e;--line:#d1d9e0;--add:#dafbe1;--cut:#ffebe9;
color:var(--fg);background:var(--bg);font:14px/1.45 system-ui,sans-serif;text-align:left;max-width:100%}
@media(prefers-color-scheme:dark){.sparsetir-trace{--fg:#e6edf3;--bg:#0d1117;--dim:#9198a1;--line:#3d444d;
--add:#12361f;--cut:#481a1d}}
html[data-theme=light] .sparsetir-trace{--fg:#1f2328;--bg:#fff;--dim:#59636e;--line:#d1d9e0;
--add:#dafbe1;--cut:#ffebe9}
html[data-theme=dark] .sparsetir-trace{--fg:#e6edf3;--bg:#0d1117;--dim:#9198a1;--line:#3d444d;
--add:#12361f;--cut:#481a1d}
.sparsetir-trace details{border-top:1px solid var(--line);padding:.35em .2em}
.sparsetir-trace summary{cursor:pointer}.sparsetir-trace .same{color:var(--dim)}
.sparsetir-trace pre{overflow-x:auto;margin:.4em 0;padding:.4em 0;background:none;color:inherit;border:0;
font:12px/1.5 ui-monospace,monospace}
.sparsetir-trace pre span{display:block;min-width:max-content;white-space:pre;padding:0 .5em}
.sparsetir-trace .add{background:var(--add)}.sparsetir-trace .cut{background:var(--cut)}
.sparsetir-trace .at{color:var(--dim)}
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title></head><body>{body}</body></html>
"""


@dataclass(frozen=True)
class PassStep:
    """The program after one pass.

    Attributes
    ----------
    name : str
        The name of the pass; ``program`` for the first step, ``schedule`` for the schedule.
    stage : int
        The stage that the pass belongs to: 1, 2 or 3.
    text : str
        The program after the pass.
    """

    name: str
    stage: int
    text: str


class PassTrace:
    """The steps from a program to the loops that are compiled.

    Iterate, or index by position or by the name of a pass. In a notebook a trace is shown as a page of differences.

    Parameters
    ----------
    name : str
        The name of the program.
    steps : list of PassStep
        In order; the first is the program itself.

    Examples
    --------
    >>> import sparsetir
    >>> trace = sparsetir.build(sparsetir.ops.spmv()).trace()
    >>> trace[0].name, trace["schedule"].stage, trace[-1].stage
    ('program', 2, 3)
    >>> "sp_iter" in trace["EmitNest"].text
    False
    """

    def __init__(self, name: str, steps: list[PassStep]) -> None:
        self.name, self.steps = name, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[PassStep]:
        return iter(self.steps)

    def __getitem__(self, key: int | str) -> PassStep:
        if not isinstance(key, str):
            return self.steps[key]
        for step in self.steps:
            if step.name == key:
                return step
        raise KeyError(f"{key}: no such pass; passes are {', '.join(step.name for step in self.steps)}")

    def __repr__(self) -> str:
        return f"PassTrace of {self.name}: {len(self)} steps, {len(self.changed)} of them change the program"

    def __str__(self) -> str:
        parts = [f"# stage {self.steps[0].stage}, {self.steps[0].name}\n{self.steps[0].text}"]
        parts += [f"# stage {step.stage}, {step.name}\n{self.diff(step.name)}" for step in self.changed]
        return "\n".join(parts)

    @property
    def changed(self) -> list[PassStep]:
        """The steps after which the text differs from the step before."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [after for before, after in pairs if before.text != after.text]

    def diff(self, name: str) -> str:
        """Return the unified difference that a pass makes; empty if it changes nothing.

        Parameters
        ----------
        name : str
            The name of the pass.

        Raises
        ------
        KeyError
            No pass has this name.
        """
        position = self.steps.index(self[name])
        before = self.steps[max(position - 1, 0)].text.splitlines()
        lines = difflib.unified_diff(before, self.steps[position].text.splitlines(), n=CONTEXT_LINES, lineterm="")
        return "".join(f"{line}\n" for line in list(lines)[2:])

    def html(self, path: str | Path) -> Path:
        """Write a page that needs no other file and no network.

        Parameters
        ----------
        path : str or Path
            The file to write.

        Returns
        -------
        Path
            `path`.
        """
        path = as_path(path, "path")
        page = PAGE.format(title=f"Passes of {html.escape(self.name)}", body=self._repr_html_())
        return write_text(path, page, "path")

    def _repr_html_(self) -> str:
        changed = {step.name for step in self.changed}
        parts = [_details(self.steps[0], _lines(self.steps[0].text), is_open=True)]
        for step in self.steps[1:]:
            if step.name in changed:
                parts.append(_details(step, _lines(self.diff(step.name), is_diff=True)))
            else:
                parts.append(f'<details class="same"><summary>{_title(step)}: no change</summary></details>')
        parts.append(_details(PassStep("result", 3, ""), _lines(self.steps[-1].text)))
        return f'<div class="sparsetir-trace"><style>{STYLE}</style>{"".join(parts)}</div>'


def _title(step: PassStep) -> str:
    return f"stage {step.stage} &middot; <b>{html.escape(step.name)}</b>"


def _details(step: PassStep, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{_title(step)}</summary><pre>{body}</pre></details>"


def _lines(text: str, *, is_diff: bool = False) -> str:
    """Return lines of a text or of a difference as HTML."""
    classes = {"+": "add", "-": "cut", "@": "at"} if is_diff else {}
    marked = ((classes.get(line[:1], ""), html.escape(line) or " ") for line in text.splitlines())
    return "".join(f'<span class="{name}">{line}</span>' if name else f"<span>{line}</span>" for name, line in marked)


def trace_passes(func: Any, second: ir.IRModule, name: str, *, outlined: bool = False) -> PassTrace:
    """Apply each pass by itself and print the program after it.

    Parameters
    ----------
    func : PrimFunc
        The stage-I program.
    second : IRModule
        Its scheduled stage-II module.
    name : str
        The name of the function.
    outlined : bool
        Print loops, conditions and the names of what is stored only.
    """

    def show(mod: ir.IRModule) -> str:
        text = script(mod[name])
        return outline(text) if outlined else text

    mod = as_module(func)
    steps = [PassStep("program", 1, show(mod))]
    for step in TO_STAGE_2:
        mod = run([step], mod)
        steps.append(PassStep(_name(step), 2, show(mod)))
    steps.append(PassStep("schedule", 2, show(second)))
    mod = second
    for step in [*SCHEDULED, *TO_STAGE_3]:
        mod = run([step], mod)
        steps.append(PassStep(_name(step), 3, show(mod)))
    return PassTrace(name, steps)


def _name(step: Any) -> str:
    """Return the name of a pass without its namespace."""
    return str(step.info.name).rsplit(".", 1)[-1]
