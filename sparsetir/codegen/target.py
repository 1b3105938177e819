# SPDX-License-Identifier: Apache-2.0
"""The LLVM target that a program is compiled for, with the floating-point freedom that the program allows."""

from __future__ import annotations

from functools import cache
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.target import codegen

from sparsetir.codegen.host_cpu import choose_target, host_cpu
from sparsetir.errors import ArgumentError
from sparsetir.intrin.emulation import KEY
from sparsetir.ir.views import decode
from sparsetir.ir.visitor import structural_walk
from sparsetir.lower.annotations import FREE_SUMS
from sparsetir.utils.arguments import shown

REASSOCIATE = "fast-math-reassoc"


@cache
def native_target() -> Any:
    """Return the LLVM target of this machine, from the flags that its operating system reports (`host_cpu`).

    AMD's vector gathers are slower than as many loads, which LLVM 22 does not know (llvm/llvm-project, issue 91370 and
    pull request 198850): it is told to prefer loads.
    """
    cpu, llvm = host_cpu(), tvm.target.Target.from_device(tvm.cpu())
    if cpu is None:
        return llvm
    choice = choose_target(cpu, llvm_cpu())
    config = {**llvm.export(), "mcpu": choice.mcpu, "mattr": list(choice.mattr)}
    return tvm.target.Target({key: value for key, value in config.items() if key != "mattr" or value})


def emulating_target() -> Any:
    """Return the target of this machine with its matrix units, and those that it lacks, emulated."""
    config = native_target().export()
    return tvm.target.Target({**config, "keys": [*config["keys"], KEY]})


@cache
def llvm_cpu() -> str:
    """LLVM's own name for the processor of this machine."""
    return str(tvm.target.Target.from_device(tvm.cpu()).attrs.get("mcpu", ""))


def describe_target() -> list[tuple[str, str]]:
    """Return what was read about the processor, and the name and features that are used and why."""
    cpu = host_cpu()
    if cpu is None:
        return [("processor", f"{llvm_cpu() or 'unknown'}, as LLVM says: the operating system reports no flags")]
    choice = choose_target(cpu, llvm_cpu())
    used = " ".join((choice.mcpu, *choice.mattr))
    return [
        ("processor flags", f"{cpu.vendor} {cpu.architecture}: {', '.join(sorted(cpu.features))} ({cpu.source})"),
        ("processor used", f"{used}: {choice.reason}"),
    ]


def make_target(target: Any, func: tirx.PrimFunc) -> Any:
    """Add the floating-point freedom that the program allows to `target` (None: this machine)."""
    llvm_target = native_target() if target is None else _parsed_target(target)
    if str(llvm_target.kind.name) != "llvm":
        raise ArgumentError(f"kernels are compiled for CPUs: expected an llvm target, found {llvm_target.kind.name!r}")
    _check_machine(llvm_target)
    if not may_reassociate(func):
        return llvm_target
    config = dict(llvm_target.export())
    config[REASSOCIATE] = True
    return tvm.target.Target(config)


def _parsed_target(target: Any) -> Any:
    try:
        return tvm.target.Target(target)
    except Exception as error:  # TVM raises several classes
        why = str(error).strip().splitlines()[-1]
        expected = 'an LLVM target such as "llvm" or {"kind": "llvm", "mcpu": "znver4"}'
        raise ArgumentError(f"target must be {expected}, found {shown(target)}: {why}") from None


def _check_machine(target: Any) -> None:
    """Raise for another machine's target: a kernel is called in this process."""
    requested, native = _architecture(target), _architecture(native_target())
    if requested and native and requested != native:
        fault = f"the target is for {requested}, this machine is {native}"
        raise ArgumentError(f"{fault}, and a kernel runs where it is built: build and export it on the other machine")
    cpu = host_cpu()
    refused = "" if cpu is None else cpu.source.partition("without AMX: ")[2]
    if refused and codegen.target_has_features("amx-tile", target):
        fault = f"target: expected one without AMX, as {refused}, got {target.attrs.get('mcpu')!r}."
        raise ArgumentError(f'{fault} Add "-amx-tile" to its mattr, or allow tile registers to this process.')


def _architecture(target: Any) -> str:
    return str(target.attrs.get("mtriple", "")).partition("-")[0]


def may_reassociate(func: tirx.PrimFunc) -> bool:
    """Return whether every sum is a reduction, whose order the dialect leaves open, or the program permits it."""
    if makes_tangents(func):
        return False
    if func.attrs is not None and FREE_SUMS in func.attrs:
        return True
    program = decode(func)
    if not any("R" in it.kinds for it in program.iterations):
        return False
    free = [True]

    def on_store(store: tirx.BufferStore) -> None:
        value = store.value
        terms = [value.b] if isinstance(value, tirx.Add) else [value]
        for term in terms:
            if str(store.buffer.ty.dtype).startswith(("float", "bfloat")) and _has_sum(term):
                free[0] = False

    structural_walk(func.body, (tirx.BufferStore, on_store))
    return free[0]


def makes_tangents(func: tirx.PrimFunc) -> bool:
    """Return whether LLVM may see a tangent: that of a vector is wrong where sums may be taken in another order.

    It makes one of a sine that is divided by a cosine, too.
    """
    names: set[str] = set()
    structural_walk(func.body, (ir.Call, lambda call: names.add(str(getattr(call.op, "name", "")))))
    return "tirx.tan" in names or names >= {"tirx.sin", "tirx.cos"}


def _has_sum(term: Any) -> bool:
    sums: list[Any] = []
    check = lambda x: sums.append(x) if str(x.ty.dtype).startswith(("float", "bfloat")) else None  # noqa: E731
    structural_walk(term, [(tirx.Add, check), (tirx.Sub, check)])
    return bool(sums)
