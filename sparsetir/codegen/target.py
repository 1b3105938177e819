# SPDX-License-Identifier: Apache-2.0
"""The LLVM target of a program: the host's processor by its reported flags, and floating-point freedom.

The processor of this machine as a target: the LLVM name and features that its reported flags allow.

LLVM derives a processor's name from its family and model, which hypervisors mask: one with AMX may be called
`rocketlake`, whose code uses neither AVX512-BF16 nor FP16. The flags that the operating system reports are those that
programs may use, so the name is the newest one all of whose features are among them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.target import codegen

from sparsetir.errors import ArgumentError
from sparsetir.intrin.emulation import KEY
from sparsetir.ir.views import decode
from sparsetir.ir.visitor import structural_walk
from sparsetir.lower.annotations import FREE_SUMS
from sparsetir.schedules.registers import NO_GATHER, REASSOCIATE
from sparsetir.utils.arguments import shown


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
    llvm_target = cpu_target(target)
    _check_machine(llvm_target)
    if not may_reassociate(func):
        return llvm_target
    config = dict(llvm_target.export())
    config[REASSOCIATE] = True
    return tvm.target.Target(config)


def cpu_target(target: Any, what: str = "kernels") -> Any:
    """Return the LLVM target that an argument describes, this machine's by default.

    Raises
    ------
    ArgumentError
        It describes none, or one that is no CPU.
    """
    llvm_target = native_target() if target is None else _parsed_target(target)
    if str(llvm_target.kind.name) != "llvm":
        raise ArgumentError(f"{what} are compiled for CPUs: expected an llvm target, got {llvm_target.kind.name!r}")
    return llvm_target


def _parsed_target(target: Any) -> Any:
    try:
        return tvm.target.Target(target)
    except Exception as error:  # TVM raises several classes
        why = str(error).strip().splitlines()[-1]
        expected = 'an LLVM target such as "llvm" or {"kind": "llvm", "mcpu": "znver4"}'
        raise ArgumentError(f"target: expected {expected}, got {shown(target)}: {why}") from None


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


# -------------------------------------------------------------------------------------- host processor


CPUINFO = Path("/proc/cpuinfo")
GATHER_MITIGATION = Path("/sys/devices/system/cpu/vulnerabilities/gather_data_sampling")
SYSCTL_SECONDS = 5.0

# ------------------------------------------------------------------ features
# LLVM's features that change generated code, with the flags that report them. Others, such as `pku` or `clwb`, name
# instructions that only operating systems and intrinsics use, and hypervisors hide them often.

X86_FLAGS: Mapping[str, tuple[str, ...]] = {
    "sse3": ("pni",),
    "sse4.1": ("sse4_1",),
    "sse4.2": ("sse4_2",),
    "sahf": ("lahf_lm",),
    "lzcnt": ("abm",),
    "bmi": ("bmi1",),
    "pclmul": ("pclmulqdq",),
    "sha": ("sha_ni",),
    "avxvnni": ("avx_vnni",),
    "avxifma": ("avx_ifma",),
    "avxvnniint8": ("avx_vnni_int8",),
    "avxvnniint16": ("avx_vnni_int16",),
    "avxneconvert": ("avx_ne_convert",),
    "cmpccxadd": ("cmpccxadd",),
    **{name: (name,) for name in ("ssse3", "sse4a", "popcnt", "cx16", "avx", "avx2", "bmi2", "fma", "f16c", "movbe")},
    **{name: (name,) for name in ("aes", "adx", "gfni", "vaes", "vpclmulqdq")},
    **{name: (name,) for name in ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma")},
    **{f"avx512{name}": (f"avx512_{name}",) for name in ("vbmi2", "vnni", "bitalg", "vpopcntdq", "bf16", "fp16")},
    "avx512vbmi": ("avx512vbmi",),
    "avx512vp2intersect": ("avx512_vp2intersect",),
    **{f"amx-{name}": (f"amx_{name}",) for name in ("tile", "bf16", "int8", "fp16", "complex")},
}
ARM_FLAGS: Mapping[str, tuple[str, ...]] = {
    "fp-armv8": ("fp",),
    "neon": ("asimd",),
    "crc": ("crc32",),
    "lse": ("atomics",),
    "lse2": ("uscat",),
    "aes": ("aes", "pmull"),
    "sha2": ("sha1", "sha2"),
    "sha3": ("sha3", "sha512"),
    "sm4": ("sm3", "sm4"),
    "fullfp16": ("fphp", "asimdhp"),
    "fp16fml": ("asimdfhm",),
    "rdm": ("asimdrdm",),
    "dotprod": ("asimddp",),
    "complxnum": ("fcma",),
    "jsconv": ("jscvt",),
    "fptoint": ("frint",),
    "flagm": ("flagm",),
    "altnzcv": ("flagm2",),
    "rcpc": ("lrcpc",),
    "rcpc-immo": ("ilrcpc",),
    "bf16": ("bf16",),
    "i8mm": ("i8mm",),
    "sve": ("sve",),
    "sve2": ("sve2",),
    "cssc": ("cssc",),
    "sme": ("sme",),
}
# The same by the names that macOS has below `hw.optional`.
APPLE_FLAGS: Mapping[str, tuple[str, ...]] = {
    "fp-armv8": ("AdvSIMD",),
    "neon": ("AdvSIMD",),
    "crc": ("armv8_crc32",),
    "lse": ("FEAT_LSE",),
    "lse2": ("FEAT_LSE2",),
    "aes": ("FEAT_AES", "FEAT_PMULL"),
    "sha2": ("FEAT_SHA1", "FEAT_SHA256"),
    "sha3": ("FEAT_SHA3", "FEAT_SHA512"),
    "fullfp16": ("FEAT_FP16",),
    "fp16fml": ("FEAT_FHM",),
    "rdm": ("FEAT_RDM",),
    "dotprod": ("FEAT_DotProd",),
    "complxnum": ("FEAT_FCMA",),
    "jsconv": ("FEAT_JSCVT",),
    "fptoint": ("FEAT_FRINTTS",),
    "flagm": ("FEAT_FlagM",),
    "altnzcv": ("FEAT_FlagM2",),
    "rcpc": ("FEAT_LRCPC",),
    "rcpc-immo": ("FEAT_LRCPC2",),
    "bf16": ("FEAT_BF16",),
    "i8mm": ("FEAT_I8MM",),
    "cssc": ("FEAT_CSSC",),
    "sme": ("FEAT_SME",),
}

# ------------------------------------------------------------------ names
# LLVM's names by vendor, the newest first; among names with equally many features LLVM's own guess is preferred.

AMD = ("znver5", "znver4", "znver3", "znver2", "znver1")
INTEL = (
    *("graniterapids-d", "graniterapids", "sapphirerapids", "cooperlake", "tigerlake", "icelake-server", "rocketlake"),
    *("icelake-client", "cascadelake", "skylake-avx512", "sierraforest", "arrowlake-s", "arrowlake", "gracemont"),
    *("alderlake", "skylake", "broadwell", "haswell", "ivybridge", "sandybridge", "goldmont", "westmere", "nehalem"),
)
LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64")
ARM = (
    *("neoverse-v3", "neoverse-v2", "neoverse-n3", "neoverse-n2", "neoverse-v1", "neoverse-n1", "cortex-x4"),
    *("cortex-a710", "cortex-a76", "cortex-a72", "cortex-a53"),
)
APPLE = ("apple-m4", "apple-a17", "apple-a16", "apple-a15", "apple-a14")
NAMES: Mapping[str, tuple[str, ...]] = {
    "AuthenticAMD": AMD,
    "HygonGenuine": ("znver1",),
    "GenuineIntel": INTEL,
    "0x41": ARM,
    "0x46": ("a64fx",),
    "0x51": ("oryon-1",),
    "0x61": APPLE,
    "0xc0": ("ampere1b", "ampere1a", "ampere1"),
}
SLOW_GATHERS = ("AuthenticAMD", "HygonGenuine")
# The system call by which a process asks Linux for the state of tile registers (arch_prctl).
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
TILE_FEATURES = frozenset(name for name in X86_FLAGS if name.startswith("amx-"))
TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}


@dataclass(frozen=True)
class Cpu:
    """A processor as the operating system reports it.

    Parameters
    ----------
    architecture : str
        ``"x86_64"`` or ``"aarch64"``.
    vendor : str
        ``"GenuineIntel"``, or the implementer of an ARM core such as ``"0x41"``.
    features : frozenset of str
        LLVM's names of the features in `X86_FLAGS` or `ARM_FLAGS` that every core has.
    source : str
        Where this was read.
    slow_gathers : bool
        Whether vector gathers are slower than as many loads.
    """

    architecture: str
    vendor: str
    features: frozenset[str]
    source: str
    slow_gathers: bool = False


@dataclass(frozen=True)
class TargetCpu:
    """The processor that code is generated for.

    Parameters
    ----------
    mcpu : str
        LLVM's name.
    mattr : tuple of str
        Features that the name does not imply, such as ``"+avx512bf16"``.
    reason : str
        Why this name is used.
    """

    mcpu: str
    mattr: tuple[str, ...]
    reason: str


# ------------------------------------------------------------------ reading


def parse_cpuinfo(text: str, architecture: str) -> Cpu | None:
    """Return the processor that the text of ``/proc/cpuinfo`` describes; None if it lists no flags.

    Cores of several kinds share the flags that all of them have.
    """
    cores = [dict(_fields(block)) for block in text.strip().split("\n\n")]
    lists = [set(core[key].split()) for core in cores for key in ("flags", "Features") if key in core]
    if not lists:
        return None
    vendor = next((core[key] for core in cores for key in ("vendor_id", "CPU implementer") if key in core), "")
    features = match_features(set.intersection(*lists), ARM_FLAGS if architecture == "aarch64" else X86_FLAGS)
    return Cpu(architecture, vendor, features, str(CPUINFO), vendor in SLOW_GATHERS)


def _fields(block: str) -> Iterable[tuple[str, str]]:
    return ((key.strip(), value.strip()) for key, colon, value in (line.partition(":") for line in block.split("\n")))


def parse_sysctl(text: str) -> Cpu | None:
    """Return the processor that ``sysctl hw.optional`` of macOS describes; None if it lists no flags."""
    values = dict(_fields(text))
    flags = {key.rpartition(".")[2] for key, value in values.items() if value == "1"}
    features = match_features(flags, APPLE_FLAGS)
    return Cpu("aarch64", "0x61", features, "sysctl hw.optional") if features else None


def match_features(flags: Iterable[str], table: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """Return the features of a table all of whose flags are reported."""
    reported = set(flags)
    return frozenset(feature for feature, names in table.items() if reported.issuperset(names))


@cache
def host_cpu() -> Cpu | None:
    """Return the processor of this machine; None where the operating system reports no flags."""
    architecture = {"amd64": "x86_64", "arm64": "aarch64"}.get(name := platform.machine().lower(), name)
    if architecture not in TRIPLES:
        return None
    if platform.system() == "Darwin":
        return parse_sysctl(_read_sysctl()) if architecture == "aarch64" else None
    cpu = parse_cpuinfo(_read(CPUINFO), architecture)
    if cpu is not None and (why := refused_tiles(cpu)):
        cpu = replace(cpu, features=cpu.features - TILE_FEATURES, source=f"{cpu.source}, without AMX: {why}")
    if cpu is None or not _read(GATHER_MITIGATION).startswith("Mitigation"):
        return cpu
    # The microcode that prevents leaks through gathers ("Downfall") makes each of them wait.
    return replace(cpu, slow_gathers=True)


def refused_tiles(cpu: Cpu) -> str:
    """Ask the operating system for the tile registers of AMX; return why it refuses them, or an empty text.

    Linux saves their 8 KiB only for processes that ask, and ends others at the first tile instruction. A permission
    holds for all threads of a process, and for its children.
    """
    if "amx-tile" not in cpu.features:
        return ""
    if platform.system() != "Linux":
        return "how to ask for tile registers is known of Linux only"
    error = _request_tiles()
    return f"the kernel refuses tile registers ({os.strerror(error)})" if error else ""


def _request_tiles() -> int:
    """Return 0, or the error number of the request."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(x) for x in (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))
    return ctypes.get_errno() if libc.syscall(*arguments) else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_sysctl() -> str:
    command = ["/usr/sbin/sysctl", "hw.optional"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SYSCTL_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout


# ------------------------------------------------------------------ choosing


def choose_target(cpu: Cpu, guess: str = "") -> TargetCpu:
    """Return the LLVM name and features for a processor.

    Parameters
    ----------
    cpu : Cpu
    guess : str
        LLVM's name for it, preferred among names that imply equally many of its features.
    """
    generic = LEVELS if cpu.architecture == "x86_64" else ("generic",)
    names = [*NAMES.get(cpu.vendor, ()), *generic]
    if guess and guess not in names:
        names.insert(0, guess)
    required = {name: needed for name in names if (needed := _required(cpu.architecture, name)) is not None}
    fitting = [name for name in required if required[name] <= cpu.features]
    mcpu = max(fitting, key=lambda name: (len(required[name]), name == guess), default=generic[-1])
    extra = sorted(cpu.features - required.get(mcpu, frozenset()))
    mattr = [*(f"+{feature}" for feature in extra), *([f"+{NO_GATHER}"] if cpu.slow_gathers else [])]
    return TargetCpu(mcpu, tuple(mattr), _reason(cpu, mcpu, guess, required))


def _reason(cpu: Cpu, mcpu: str, guess: str, required: Mapping[str, frozenset[str]]) -> str:
    """Return a sentence on why a name was chosen instead of LLVM's guess."""
    if not guess or guess == mcpu:
        return f"all of its features are reported by {cpu.source}"
    missing = sorted(required.get(guess, frozenset()) - cpu.features)
    if missing:
        return f"LLVM says {guess}, of whose features {cpu.source} lacks {', '.join(missing)}"
    more = sorted(required[mcpu] - required.get(guess, frozenset()))
    return f"LLVM says {guess}, but {cpu.source} reports {', '.join(more)} as well"


def closest_name(
    mcpu: str, names: Iterable[str], mattr: Iterable[str] = (), *, architecture: str = "x86_64"
) -> str | None:
    """Return the name whose features a processor has, and most of them; None where it has those of no name.

    Parameters
    ----------
    mcpu : str
        LLVM's name for the processor; it is its own closest one.
    names : iterable of str
    mattr : iterable of str, optional
        Features that the processor has as well, such as ``"+avx512bf16"``.
    architecture : str
        ``"x86_64"`` or ``"aarch64"``.

    Examples
    --------
    >>> closest_name("raptorlake", ["skylake", "sapphirerapids", "znver3"])
    'skylake'
    """
    implied = _required(architecture, mcpu)
    if implied is None:
        return None
    own = implied | {feature[1:] for feature in mattr if feature.startswith("+")}
    others = {name: _required(architecture, name) for name in names}
    fitting = {name: len(needed) for name, needed in others.items() if needed is not None and needed <= own}
    return max(fitting, key=lambda name: (fitting[name], name == mcpu), default=None)


@cache
def _required(architecture: str, mcpu: str) -> frozenset[str] | None:
    """Return the features of `X86_FLAGS` or `ARM_FLAGS` that a name implies; None if this LLVM does not know it."""
    base = tvm.target.Target({"kind": "llvm", "mtriple": TRIPLES[architecture]})
    if mcpu not in {str(name) for name in codegen.llvm_get_cpu_archlist(base)}:
        return None
    target = tvm.target.Target({"kind": "llvm", "mtriple": TRIPLES[architecture], "mcpu": mcpu})
    table = ARM_FLAGS if architecture == "aarch64" else X86_FLAGS
    return frozenset(str(name) for name in codegen.llvm_get_cpu_features(target)) & frozenset(table)


__all__ = [
    "REASSOCIATE",
    "Cpu",
    "TargetCpu",
    "choose_target",
    "closest_name",
    "cpu_target",
    "describe_target",
    "emulating_target",
    "host_cpu",
    "llvm_cpu",
    "make_target",
    "makes_tangents",
    "match_features",
    "may_reassociate",
    "native_target",
    "parse_cpuinfo",
    "parse_sysctl",
]
