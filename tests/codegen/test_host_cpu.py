# SPDX-License-Identifier: Apache-2.0
"""The target's name and features follow from the flags that an operating system reports."""

from __future__ import annotations

import errno
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm.target import codegen

from sparsetir.cli import main
from sparsetir.codegen import target
from sparsetir.codegen.target import Cpu, choose_target, parse_cpuinfo, parse_sysctl
from sparsetir.errors import ArgumentError
from sparsetir.ops import spmm
from sparsetir.schedules import Registers

# Flags of these processors, put together from published lists in the form that Linux prints; not captured.
X86_BASE = "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ht"
ZEN2 = f"""{X86_BASE} pni pclmulqdq monitor ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand
    lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch bmi1 avx2 smep bmi2 rdseed adx smap
    clflushopt clwb sha_ni xsaveopt xsavec xgetbv1 xsaves clzero irperf xsaveerptr rdpru wbnoinvd umip rdpid"""
ZEN3 = f"{ZEN2} erms invpcid pku ospke vaes vpclmulqdq overflow_recov succor smca fsrm"
AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"
ICE = "avx512ifma avx512vbmi avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq"
ZEN4 = f"{ZEN3} {AVX512} {ICE} avx512_bf16 la57"
ZEN5 = f"{ZEN4} avx_vnni movdiri movdir64b avx512_vp2intersect flush_l1d"
HASWELL = f"""{X86_BASE} ss syscall nx pdpe1gb rdtscp lm constant_tsc pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2
    x2apic movbe popcnt aes xsave avx f16c rdrand hypervisor lahf_lm abm fsgsbase bmi1 avx2 smep bmi2 erms invpcid"""
SKYLAKE_X = f"{HASWELL} rtm mpx {AVX512} rdseed adx smap clflushopt clwb 3dnowprefetch xsaveopt xsavec xgetbv1 arat"
CASCADE_LAKE = f"{SKYLAKE_X} avx512_vnni arch_capabilities"
ICE_LAKE = f"{SKYLAKE_X} {ICE} sha_ni la57 rdpid fsrm arch_capabilities"
NO_AMX = f"{ICE_LAKE} avx_vnni avx512_bf16 wbnoinvd waitpkg cldemote movdiri movdir64b serialize tsxldtrk avx512_fp16"
SAPPHIRE_RAPIDS = f"{NO_AMX} amx_bf16 amx_tile amx_int8"
GRANITE_RAPIDS = f"{SAPPHIRE_RAPIDS} amx_fp16 prefetchi"

GRAVITON2 = """fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
    ssbs"""
GRAVITON3 = """fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop
    sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh
    rng"""
GRAVITON4 = """fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop
    sha3 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm sb paca pacg dcpodp sve2 sveaes svepmull svebitperm svesha3
    flagm2 frint svei8mm svebf16 i8mm bf16 dgh rng bti"""
ASAHI_M1 = """fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3
    asimddp sha512 asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp flagm2 frint"""

AMD, INTEL, ARM, APPLE = "AuthenticAMD", "GenuineIntel", "0x41", "0x61"
MACHINES = {
    "EPYC 7702": (AMD, ZEN2, "znver2", "znver2"),
    "EPYC 7763": (AMD, ZEN3, "znver3", "znver3"),
    "EPYC 9654": (AMD, ZEN4, "znver4", "znver4"),
    "EPYC 9755": (AMD, ZEN5, "znver5", "znver5"),
    "EPYC 9755 with the model masked": (AMD, ZEN5, "znver3", "znver5"),
    "Haswell": (INTEL, HASWELL, "haswell", "haswell"),
    "Xeon 6132": (INTEL, SKYLAKE_X, "skylake-avx512", "skylake-avx512"),
    "Xeon 6242": (INTEL, CASCADE_LAKE, "cascadelake", "cascadelake"),
    "Xeon 8370C": (INTEL, ICE_LAKE, "icelake-server", "icelake-server"),
    "Core i9-11900K": (INTEL, ICE_LAKE, "rocketlake", "rocketlake"),
    "Xeon 8480 with the model masked": (INTEL, SAPPHIRE_RAPIDS, "rocketlake", "sapphirerapids"),
    "Xeon 6980P with the model masked": (INTEL, GRANITE_RAPIDS, "rocketlake", "graniterapids"),
    "Graviton 2": (ARM, GRAVITON2, "neoverse-n1", "neoverse-n1"),
    "Graviton 3": (ARM, GRAVITON3, "neoverse-v1", "neoverse-v1"),
    "Graviton 4": (ARM, GRAVITON4, "neoverse-v2", "neoverse-v2"),
    "Graviton 4 with the part masked": (ARM, GRAVITON4, "generic", "neoverse-v3"),
    "M1 under Linux": (APPLE, ASAHI_M1, "apple-m1", "apple-a14"),
}
M3 = """hw.optional.arm.FEAT_FlagM: 1
hw.optional.arm.FEAT_FlagM2: 1
hw.optional.arm.FEAT_FHM: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_SHA3: 1
hw.optional.arm.FEAT_RDM: 1
hw.optional.arm.FEAT_LSE: 1
hw.optional.arm.FEAT_SHA256: 1
hw.optional.arm.FEAT_SHA512: 1
hw.optional.arm.FEAT_SHA1: 1
hw.optional.arm.FEAT_AES: 1
hw.optional.arm.FEAT_PMULL: 1
hw.optional.arm.FEAT_FRINTTS: 1
hw.optional.arm.FEAT_LRCPC: 1
hw.optional.arm.FEAT_LRCPC2: 1
hw.optional.arm.FEAT_FCMA: 1
hw.optional.arm.FEAT_JSCVT: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_LSE2: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.floatingpoint: 1
hw.optional.armv8_crc32: 1
hw.optional.AdvSIMD: 1
"""
# Features of the names in use that code generation does not depend on: those of operating systems and intrinsics, and
# LLVM's tuning. A feature that a new LLVM adds to a name fails the test until it is listed in one of the tables.
UNREPORTED = """64bit 64bit-mode cldemote clflushopt clwb clzero cmov crc32 cx8 enqcmd ermsb fsgsbase fsrm fxsr hreset
    invpcid kl mmx movdir64b movdiri mwaitx nopl pconfig pku prefetchi prfchw ptwrite rdpid rdpru rdrnd rdseed serialize
    sha512 shstk sm3 sm4 sse sse2 tsxldtrk uintr vzeroupper waitpkg wbnoinvd widekl x87 xsave xsavec xsaveopt xsaves
    """.split()
TUNING = (
    *("allow-", "branch", "false-", "fast", "idivq", "macrofusion", "no-bypass", "prefer-", "sbb-", "slow-"),
    *("tuning-", "use-"),
)


def cpuinfo(vendor: str, flags: str, cores: int = 2) -> str:
    """Return the text of a machine with equal cores."""
    words = " ".join(flags.split())
    if vendor.startswith("0x"):
        block = f"processor\t: 0\nFeatures\t: {words}\nCPU implementer\t: {vendor}\nCPU part\t: 0xd40\n"
    else:
        block = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t\t: 167\nflags\t\t: {words}\nbugs\t\t: taa\n"
    return "\n".join([block] * cores)


def processor(name: str) -> Cpu:
    """Return what is read of a machine in the table."""
    vendor, flags, _, _ = MACHINES[name]
    cpu = parse_cpuinfo(cpuinfo(vendor, flags), "aarch64" if vendor.startswith("0x") else "x86_64")
    assert cpu is not None
    return cpu


@pytest.mark.parametrize("name", MACHINES)
def test_name_follows_from_flags(name: str) -> None:
    _, _, guess, expected = MACHINES[name]
    choice = choose_target(processor(name), guess)
    assert choice.mcpu == expected
    assert (f"LLVM says {guess}" in choice.reason) == (guess != expected)


@pytest.mark.parametrize("name", MACHINES)
def test_code_uses_exactly_the_reported_features(name: str) -> None:
    cpu = processor(name)
    choice = choose_target(cpu, MACHINES[name][2])
    table = target.ARM_FLAGS if cpu.architecture == "aarch64" else target.X86_FLAGS
    config = {"kind": "llvm", "mtriple": target.TRIPLES[cpu.architecture], "mcpu": choice.mcpu}
    features = {str(f) for f in codegen.llvm_get_cpu_features(tvm.target.Target({**config, "mattr": [*choice.mattr]}))}
    assert features & set(table) == cpu.features
    assert ("+prefer-no-gather" in choice.mattr) == (cpu.vendor == AMD)


def test_masked_feature_keeps_the_others() -> None:
    cpu = parse_cpuinfo(cpuinfo(INTEL, NO_AMX), "x86_64")
    assert cpu is not None
    choice = choose_target(cpu, "sapphirerapids")
    assert (choice.mcpu, choice.mattr) == ("icelake-server", ("+avx512bf16", "+avx512fp16", "+avxvnni"))
    assert choice.reason.endswith("/proc/cpuinfo lacks amx-bf16, amx-int8, amx-tile")


@pytest.mark.parametrize("vendor", ["SomeHypervisor", ""])
@pytest.mark.parametrize(("flags", "level"), [(ZEN4, "x86-64-v4"), (HASWELL, "x86-64-v3"), (X86_BASE, "x86-64")])
def test_unknown_vendor_gets_a_level_and_its_features(vendor: str, flags: str, level: str) -> None:
    cpu = parse_cpuinfo(cpuinfo(vendor, flags), "x86_64")
    assert cpu is not None
    choice = choose_target(cpu)
    assert choice.mcpu == level
    assert ("+avx512bf16" in choice.mattr) == (flags == ZEN4)


def test_unknown_arm_core_gets_its_features() -> None:
    cpu = parse_cpuinfo(cpuinfo("0x00", GRAVITON4), "aarch64")
    assert cpu is not None
    choice = choose_target(cpu, "generic")
    assert choice.mcpu == "generic"
    assert {"+sve2", "+bf16", "+i8mm", "+dotprod"} <= set(choice.mattr)


def test_cores_of_two_kinds_share_their_common_flags() -> None:
    text = cpuinfo(ARM, GRAVITON2, 1) + "\n" + cpuinfo(ARM, GRAVITON4, 1)
    cpu = parse_cpuinfo(text, "aarch64")
    assert cpu is not None
    assert choose_target(cpu, "cortex-x4").mcpu == "neoverse-n1"


def test_macos() -> None:
    cpu = parse_sysctl(M3)
    assert cpu is not None
    assert {"bf16", "i8mm", "fullfp16", "neon"} <= cpu.features
    assert "sve" not in cpu.features
    assert choose_target(cpu, "apple-m3").mcpu == "apple-a17"  # LLVM's name for the same core


def test_nothing_reported() -> None:
    assert parse_cpuinfo("", "x86_64") is None
    assert parse_cpuinfo("processor\t: 0\nisa\t: rv64imafdc\n", "riscv64") is None
    assert parse_sysctl("hw.optional.floatingpoint: 1\n") is None


def test_llvm_decides_where_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "host_cpu", lambda: None)
    assert str(target.native_target.__wrapped__()) == str(tvm.target.Target.from_device(tvm.cpu()))
    assert target.describe_target() == [
        ("processor", f"{target.llvm_cpu()}, as LLVM says: the operating system reports no flags")
    ]


def test_mitigated_gathers_are_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {target.CPUINFO: cpuinfo(INTEL, SKYLAKE_X), target.GATHER_MITIGATION: "Mitigation: Microcode\n"}
    monkeypatch.setattr(target, "_read", texts.__getitem__)
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(target.platform, "system", lambda: "Linux")
    for expected in (("+prefer-no-gather",), ()):
        cpu = target.host_cpu.__wrapped__()
        assert cpu is not None
        assert choose_target(cpu, "skylake-avx512").mattr == expected
        texts[target.GATHER_MITIGATION] = "Not affected\n"


def test_every_feature_of_the_x86_names_is_classified() -> None:
    for name in (*target.AMD, *target.INTEL, *target.LEVELS):
        config = {"kind": "llvm", "mtriple": target.TRIPLES["x86_64"], "mcpu": name}
        features = {str(f) for f in codegen.llvm_get_cpu_features(tvm.target.Target(config))}
        unknown = features - set(target.X86_FLAGS) - set(UNREPORTED)
        assert not {feature for feature in unknown if not feature.startswith(TUNING)}, name


@pytest.mark.slow
def test_info_reports_flags_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    cpu = target.host_cpu()
    if cpu is None:
        pytest.skip("the operating system of this machine reports no flags")
    choice = choose_target(cpu, target.llvm_cpu())
    assert f"processor used   {' '.join((choice.mcpu, *choice.mattr))}: {choice.reason}" in out
    assert ", ".join(sorted(cpu.features)) in out
    assert target.native_target().attrs["mcpu"] == choice.mcpu


def test_without_permission_tiles_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[int] = []
    refuse = lambda: requests.append(errno.EPERM) or errno.EPERM  # noqa: E731
    (tmp_path / "cpuinfo").write_text(f"vendor_id: {INTEL}\nflags: {' '.join(SAPPHIRE_RAPIDS.split())}\n")
    monkeypatch.setattr(target, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(target.platform, "system", lambda: "Linux")
    monkeypatch.setattr(target, "_request_tiles", refuse)
    for cached in (target.host_cpu, target.native_target):
        cached.cache_clear()
    try:
        cpu = target.host_cpu()
        native = target.native_target()
        assert cpu is not None
        assert cpu.source.endswith("without AMX: the kernel refuses tile registers (Operation not permitted)")
        assert not codegen.target_has_features("amx-tile", native)
        assert codegen.target_has_features("avx512bf16", native)
        assert "tile_bf16" not in Registers.of(native).units
        with pytest.raises(ArgumentError, match=r"expected one without AMX, as the kernel refuses .* 'sapphirerapids'"):
            target.make_target({**native.export(), "mcpu": "sapphirerapids", "mattr": []}, spmm())
        assert requests == [errno.EPERM]  # once
        allowed = replace(cpu, features=cpu.features | {"amx-tile"})
        monkeypatch.setattr(target, "_request_tiles", lambda: 0)
        assert target.refused_tiles(allowed) == ""
    finally:
        for cached in (target.host_cpu, target.native_target):
            cached.cache_clear()


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="a system call of Linux on x86")
def test_the_kernel_answers_the_request() -> None:
    error = target._request_tiles()
    assert error == 0 or errno.errorcode[error] in ("EINVAL", "EOPNOTSUPP", "ENOTSUP", "EPERM", "ENOSPC", "ENOSYS")
