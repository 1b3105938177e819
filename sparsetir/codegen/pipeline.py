# SPDX-License-Identifier: Apache-2.0
"""From a program to machine code, composed once: verified stages around the schedule, and traces of their passes."""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Var
from tvm.tirx import register_tir_pipeline

from sparsetir.codegen.target import native_target
from sparsetir.errors import ArgumentTypeError, OffsetError, ScheduleError, VerifyError
from sparsetir.intrin.emulation import is_emulated
from sparsetir.ir.rewriting import KINDS, collect, seq, substitute
from sparsetir.ir.sizes import fits_int32, narrow_extents, with_sizes
from sparsetir.ir.verifier import verify
from sparsetir.ir.views import REDUCE, accesses, decode
from sparsetir.lower import SCHEDULED, TO_MACHINE, TO_STAGE_2, TO_STAGE_3, as_module, run, single
from sparsetir.lower.annotations import EMULATED, GATHERS, from_dialect
from sparsetir.lower.iterations.normalize import keeping_nan
from sparsetir.lower.loops import with_body
from sparsetir.lower.target.initialization import DecomposeInit
from sparsetir.lower.target.scratch import LimitScratch, has_unknown_scratch
from sparsetir.script.printer import outline, script
from sparsetir.utils.arguments import as_path, shown
from sparsetir.utils.files import write_text


def to_stage_2(func: Any) -> ir.IRModule:
    """Lower a program or module to nested blocks over positions."""
    return _verified(run(TO_STAGE_2, as_module(func)), 2)


def to_stage_3(mod: ir.IRModule) -> ir.IRModule:
    """Lower a stage-II module, scheduled or not, to loops over flat arrays."""
    return _verified(run(TO_STAGE_3, _verified(run(SCHEDULED, mod), 2)), 3)


def _verified(mod: ir.IRModule, stage: int) -> ir.IRModule:
    verify(mod, stage=stage)
    return mod


def lower(func: Any, stage: int = 3, **sizes: int) -> Any:
    """Lower a stage-I function or module.

    Parameters
    ----------
    func : PrimFunc or IRModule
        A program of the dialect; functions that are none pass through unchanged.
    stage : {2, 3}
        2: nested blocks over positions, ready for the stock ``tvm.s_tir.Schedule``.
        3: flat loops over one-dimensional arrays, nothing of the dialect left.
    **sizes
        Sizes of a function that are known.

    Returns
    -------
    PrimFunc or IRModule
        What was given, lowered.

    Raises
    ------
    VerifyError
        The program breaks a rule of stage I, or `stage` is neither 2 nor 3.
    """
    if not isinstance(stage, int) or stage not in (2, 3):
        raise VerifyError(f"stage: expected 2 or 3, got {shown(stage)}; stage 1 is the function itself")
    if sizes:
        func = with_sizes(func, sizes)
    mod = to_stage_2(func)
    if stage == 3:
        mod = to_stage_3(mod)
    return mod if isinstance(func, ir.IRModule) else next(iter(mod.functions.values()))


def scheduled(mod: ir.IRModule, schedule: Any, target: Any = None) -> ir.IRModule:
    """Apply a schedule to a stage-II module: choices of the sketches, a stock schedule, or a function of one."""
    return _with_marks(_scheduled(mod, schedule, target), target)


def _scheduled(mod: ir.IRModule, schedule: Any, target: Any) -> ir.IRModule:
    from sparsetir.schedules import Registers
    from sparsetir.schedules import schedule as apply_sketches

    names = [gv.name_hint for gv in mod.functions]
    if isinstance(schedule, s_tir.Schedule):
        return _same_params(mod, _renamed(schedule.mod, names))
    if callable(schedule):
        sch = s_tir.Schedule(mod)
        sch.work_on(names[0])
        return _same_params(mod, _of_function(schedule, sch).mod)
    check_schedule(schedule)
    registers = Registers.of(target or native_target())
    # The sketches reorder nothing but reductions, whose order the dialect leaves open; fast-math flags cover every sum.
    return apply_sketches(mod, schedule, registers=registers).mod


def check_schedule(schedule: Any) -> None:
    """Raise unless a schedule is of a class that programs can be scheduled by."""
    from sparsetir.schedules import Choices

    if schedule is not None and not isinstance(schedule, (Choices, s_tir.Schedule)) and not callable(schedule):
        expected = "sparsetir.Choices, a template, a tvm.s_tir.Schedule or a function of one"
        raise ArgumentTypeError(f"a schedule is {expected}, got {type(schedule).__name__}")


def _of_function(schedule: Any, sch: s_tir.Schedule) -> s_tir.Schedule:
    """Return the schedule that a user's function changes or returns."""
    is_layer = any(base.__module__ == "torch.nn.modules.module" for base in type(schedule).__mro__)
    is_operator = hasattr(schedule, "shape") and hasattr(schedule, "dtype")  # of scipy, which is callable
    if is_layer or is_operator or isinstance(schedule, (type, BuiltinFunctionType, ir.BaseFunc)):
        name = getattr(schedule, "__name__", type(schedule).__name__)
        fault = f"schedule: expected a function of a tvm.s_tir.Schedule, got {name}."
        raise ArgumentTypeError(f"{fault} Pass one that changes its argument.")
    result = schedule(sch)
    if result is not None and not isinstance(result, s_tir.Schedule):
        fault = f"schedule: expected a function that returns a tvm.s_tir.Schedule or None, got {type(result).__name__}."
        raise ArgumentTypeError(f"{fault} Change the schedule that the function is given.")
    return sch if result is None else result


def lowered(mod: ir.IRModule, schedule: Any, target: Any = None) -> dict[int, ir.IRModule]:
    """Return the stage-II module after a schedule, and its loops; fall back to legal choices if sketches fail."""
    from sparsetir.schedules import Choices, Registers, is_strict, legal_schedule

    try:
        second = scheduled(mod, schedule, target)
        return {2: second, 3: to_stage_3(second)}
    except Exception:
        if not (schedule is None or isinstance(schedule, Choices)) or is_strict():
            raise
    registers = Registers.of(target or native_target())
    second = legal_schedule(mod, schedule, to_stage_3, registers=registers)
    second = _with_marks(second, target)
    return {2: second, 3: to_stage_3(second)}


def _with_marks(mod: ir.IRModule, target: Any) -> ir.IRModule:
    """Mark the functions of a module by what the target emulates and gathers."""
    from sparsetir.schedules.registers import gathers_vectors

    if target is None:
        return mod
    marks = {mark: True for mark, holds in ((EMULATED, is_emulated), (GATHERS, gathers_vectors)) if holds(target)}
    functions = mod.functions.items()
    return ir.IRModule({gv: f.with_attrs(marks) if marks and from_dialect(f) else f for gv, f in functions})


def _same_params(before: ir.IRModule, after: ir.IRModule) -> ir.IRModule:
    """Return the scheduled module; raise unless its parameters have the layouts that callers pass."""
    for gv, func in after.functions.items():
        old = next((f for v, f in before.functions.items() if v.name_hint == gv.name_hint), None)
        for was, now in zip(getattr(old, "params", []), getattr(func, "params", []), strict=False):
            if _layout(was) != _layout(now):
                fault = f"the schedule changes parameter {was.name} from {_layout(was)} to {_layout(now)}"
                raise ScheduleError(f"{fault}, but callers pass it as the program declares it: transform a copy of it")
    return after


def _layout(param: Any) -> str:
    """Return the shape and type of a parameter as text."""
    if not tirx.is_buffer_var(param):
        return str(param.ty)
    return f"({', '.join(str(extent) for extent in param.ty.shape)}) {param.ty.dtype}"


def _renamed(mod: ir.IRModule, names: list[str]) -> ir.IRModule:
    """Rename the function of a schedule to its name in the program: a schedule of a PrimFunc calls it main."""
    function_names = [gv.name_hint for gv in mod.functions]
    if len(function_names) != 1 or len(names) != 1 or function_names == names:
        return mod
    return ir.IRModule({names[0]: mod[function_names[0]].with_attr("global_symbol", names[0])})


def machine_code(third: ir.IRModule, target: Any) -> Any:
    """Compile a stage-III module."""
    with separate_storage(third):
        ready = run(TO_MACHINE, third)
        with separate_names(ready):
            return tvm.compile(ready, target=target, tir_pipeline=LOOPS)


def separate_storage(third: ir.IRModule) -> tvm.transform.PassContext:
    """Return the pass settings of a stage-III module: the current ones, without storage shared by several arrays.

    LLVM keeps a tile in registers only if narrower tiles for the last columns do not lie in the same array. Nor must
    TVM shrink an array to the place that a search finds: it would ask for the place before the search. Arrays whose
    sizes are known have been shrunk before (`CompactScratch`): to prove again that they are small takes TVM seconds in
    deep nests.
    """
    now = tvm.transform.PassContext.current()
    is_compact = all(from_dialect(f) and not has_unknown_scratch(f) for f in _functions(third))
    compaction = [COMPACTION] if is_compact or _has_found_scratch(third) else []
    config = {**now.config, "tirx.disable_storage_rewrite": True}
    return tvm.transform.PassContext(
        opt_level=now.opt_level,
        required_pass=list(now.required_pass),
        disabled_pass=[*now.disabled_pass, *compaction],
        config=config,  # and no instruments: TVM restarts them where contexts are nested, which loses what they saw
    )


def separate_names(ready: ir.IRModule) -> tvm.transform.PassContext:
    """Return the current settings, without common subexpressions of TVM where an expression binds a name.

    TVM replaces expressions inside the meaning of such a name by a variable that another branch binds. LLVM finds
    common subexpressions as well.
    """
    now = tvm.transform.PassContext.current()
    binds = any(collect(func.body, tirx.Let) for func in _functions(ready))
    return tvm.transform.PassContext(
        opt_level=now.opt_level,
        required_pass=list(now.required_pass),
        disabled_pass=list(now.disabled_pass),
        config={**now.config, **({"tirx.disable_cse_tir": True} if binds else {})},
    )


def _functions(mod: ir.IRModule) -> list[tirx.PrimFunc]:
    return [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]


def _has_found_scratch(third: ir.IRModule) -> bool:
    """Return whether a local array is subscripted by an element of another one."""
    functions = _functions(third)
    local = {a.buffer for f in functions for a in collect(f.body, tirx.AllocBuffer)}
    for func in functions:
        for buffer, indices, _ in accesses(func.body):
            loads = [x.source for i in indices for x in collect(i, ir.TensorLoad)] if buffer in local else []
            if any(source in local and not source.same_as(buffer) for source in loads):
                return True
    return False


def assert_offsets(first: ir.IRModule, third: ir.IRModule) -> ir.IRModule:
    """Assert in each stage-III function that 32-bit offsets address its buffers, as its stage-I function counts them.

    A kernel checks that before its loops are called; here, only the function itself sees the sizes.

    Raises
    ------
    OffsetError
        They do not, whatever the arguments are.
    """
    functions = dict(third.functions)
    for var, func in first.functions.items():
        now = functions.get(var)
        if not isinstance(now, tirx.PrimFunc) or not from_dialect(now):
            continue
        checks = list(_offset_checks(str(var.name_hint), func, now))
        if checks:
            functions[var] = with_body(now, seq(*checks, now.body))
    return ir.IRModule(functions, attrs=third.attrs)


def _offset_checks(name: str, first: tirx.PrimFunc, third: tirx.PrimFunc) -> Iterator[tirx.Stmt]:
    names = {str(v.name): v for p in third.params for v in collect([p, *getattr(p.ty, "shape", [])], Var)}
    for buffer, extents in narrow_extents(decode(first), with_constants=True).items():
        fits = fits_int32(extents)
        message = f"{name}: {buffer} has more elements than 32-bit indices can address. Pass int64 index arrays."
        if isinstance(fits, tirx.IntImm) and not int(fits):
            raise OffsetError(message)
        used = collect(fits, Var)
        if used and all(str(v.name) in names for v in used):
            fits = substitute(fits, {v: names[str(v.name)] for v in used})
            yield tirx.AssertStmt(fits, ir.StringImm(KINDS[OffsetError]), [ir.StringImm(message)])


def loops_pipeline() -> tuple[Any, Any, Any]:
    """Return TVM's passes for loops, with scratch limited once TVM has decided how large it is."""
    stock, host, device = tvm.s_tir.pipeline.default_s_tir_pipeline()

    @tvm.transform.module_pass(opt_level=0, name="sparsetir.StockPasses")
    def lower_loops(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        try:
            return stock(mod)
        except ValueError as error:
            # TVM bounds the subscripts of arrays of unknown sizes by numbers that int32 does not hold.
            if "exceeds range of int" not in str(error):
                raise
        now = tvm.transform.PassContext.current()
        with tvm.transform.PassContext(
            opt_level=now.opt_level,
            required_pass=list(now.required_pass),
            disabled_pass=[*now.disabled_pass, COMPACTION],
            config=dict(now.config),
        ):
            return stock(mod)

    return ir.transform.Sequential([lower_loops, LimitScratch]), host, device


COMPACTION = "s_tir.CompactBufferAllocation"
LOOPS = "sparsetir.loops"
register_tir_pipeline(LOOPS, loops_pipeline)


def pipeline() -> tuple[Any, Any, Any]:
    """Return the passes of ``tir_pipeline="sparsetir"``: ``tvm.compile`` and ``relax.build`` take stage-I functions."""
    stock, host, device = loops_pipeline()

    @tvm.transform.module_pass(opt_level=0, name="sparsetir.Pipeline")
    def lower_all(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        second = _with_own_semantics(to_stage_2(mod))
        has_programs = any(map(from_dialect, second.functions.values()))
        if not has_programs:
            return stock(second)
        third = lowered(second, None, tvm.target.Target.current(allow_none=True))[3]
        third = assert_offsets(mod, third)
        with separate_storage(third):
            ready = run(TO_MACHINE, third)
            with separate_names(ready):
                return stock(ready)

    return lower_all, host, device


def _with_own_semantics(mod: ir.IRModule) -> ir.IRModule:
    """Make dense functions compute what numpy does: sums of no terms, and limits of NaN."""
    functions = dict(mod.functions)
    for var, func in functions.items():
        if not isinstance(func, tirx.PrimFunc) or from_dialect(func):
            continue
        functions[var] = func = with_body(func, keeping_nan(func.body))
        if _may_have_empty_sums(func):  # which TVM initialises in the step of the first term
            with suppress(ScheduleError):  # a loop fused of sums and results stays as it is
                functions[var] = single(DecomposeInit(ir.IRModule({var: func})))
    return ir.IRModule(functions, attrs=mod.attrs)


def _may_have_empty_sums(func: tirx.PrimFunc) -> bool:
    blocks = [block for block in collect(func.body, s_tir.SBlock) if block.init is not None]
    extents = [iv.dom.extent for block in blocks for iv in block.iter_vars if int(iv.iter_type) == REDUCE]
    return any(not isinstance(extent, tirx.IntImm) or int(extent) < 1 for extent in extents)


# ----------------------------------------------------------------------------------------- pass traces


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
