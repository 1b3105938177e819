# SPDX-License-Identifier: Apache-2.0
"""Measurement of a machine's profile with small compiled loops, and its file beside the compiled kernels."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tvm

from sparsetir.codegen.cache import cache_folder
from sparsetir.codegen.target import closest_name, host_cpu, native_target
from sparsetir.errors import ArgumentError
from sparsetir.schedules.registers import NO_GATHER
from sparsetir.utils.arguments import as_seconds
from sparsetir.utils.files import cache_text
from sparsetir.utils.machine import (
    ROW_ENTRIES,
    MachineProfile,
    last_cache,
    levels,
    machine_name,
    private_cache,
    shipped_families,
    shipped_profile,
)
from sparsetir.utils.packages import __version__
from sparsetir.utils.threads import get_num_threads

SWITCH = "SPARSETIR_CALIBRATE"
SECONDS = 3.0  # of the measurement that happens by itself
ROW_BYTES, PREFETCH = (64, 128, 256, 512, 2048), (0, 8, 32)
LEAST_SET, TIMES_LAST, MOST_SET = 16 << 10, 4, 256 << 20
ROWS = 64  # in a window of fresh indices
WINDOWS = 12
LANES, TILE = 16, 128  # float32 elements of a vector, and those that accumulate in registers
SUMS = (1, 2, 4, 8, 12)
STEPS = 4096  # dependent multiply-adds of a call
STORED = 16 << 20  # float32 elements of the array that is written
WAKES, BETWEEN_WAKES = 9, 2e-3  # measurements of waking a thread, and seconds between them
SUMMED = 1 << 14  # numbers gathered from the first-level cache

GATHER = """
@T.prim_func(s_tir=True)
def gather_{bytes}_{ahead}(operand: T.handle, index: T.handle, out: T.handle, n: T.int32, total: T.int32,
                           begin: T.int32):
    T.func_attr({{"tirx.noalias": True}})
    a = T.match_buffer(operand, (n * {row},), "float32", align=4)
    idx = T.match_buffer(index, (total,), "int32", align=4)
    o = T.match_buffer(out, (8 * {row},), "float32", align=4)
    for i in range({rows}):
        for t in range({tiles}):
            acc = T.alloc_buffer(({tile},), "float32", scope="local")
            for u in T.unroll({vectors}):
                for v in T.vectorized(16):
                    acc[u * 16 + v] = T.float32(0)
            for e in range({entries}):{prefetch}
                for u in T.unroll({vectors}):
                    for v in T.vectorized(16):
                        acc[u * 16 + v] = acc[u * 16 + v] + T.float32(0.5) * a[
                            idx[begin + i * {entries} + e] * {row} + t * {tile} + u * 16 + v]
            for u in T.unroll({vectors}):
                for v in T.vectorized(16):
                    o[(i % 8) * {row} + t * {tile} + u * 16 + v] = acc[u * 16 + v]
"""
AHEAD = """
                for u in T.unroll({vectors}):
                    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(
                        a[idx[begin + i * {entries} + e + {ahead}] * {row} + t * {tile} + u * 16]),
                        T.int32(0), T.int32(3), T.int32(1)))"""
FMA = """
@T.prim_func(s_tir=True)
def fma_{sums}(data: T.handle, out: T.handle):
    T.func_attr({{"tirx.noalias": True}})
    a = T.match_buffer(data, (32,), "float32", align=4)
    o = T.match_buffer(out, ({sums} * 16,), "float32", align=4)
    acc = T.alloc_buffer(({sums} * 16,), "float32", scope="local")
    for u in T.unroll({sums}):
        for v in T.vectorized(16):
            acc[u * 16 + v] = a[v]
    for r in range({steps}):
        for u in T.unroll({sums}):
            for v in T.vectorized(16):
                acc[u * 16 + v] = acc[u * 16 + v] * a[v] + a[16 + v]
    for u in T.unroll({sums}):
        for v in T.vectorized(16):
            o[u * 16 + v] = acc[u * 16 + v]
"""
DOT = """
@T.prim_func(s_tir=True)
def dot_{dtype}(left: T.handle, right: T.handle, out: T.handle):
    T.func_attr({{"tirx.noalias": True}})
    a = T.match_buffer(left, (64,), "int8", align=4)
    b = T.match_buffer(right, (64,), "int8", align=4)
    o = T.match_buffer(out, (8 * 16,), "{sum}", align=4)
    acc = T.alloc_buffer((8 * 16,), "{sum}", scope="local")
    for u in T.unroll(8 * 16):
        acc[u] = T.{sum}(0)
    with T.attr(0, "pragma_import_llvm", {ir}):
        for r in range({steps}):
            for u in T.unroll(8):
                T.evaluate(T.call_extern("void", "sparsetir_calibrate_{dtype}",
                    T.address_of(a[0]), T.address_of(b[0]), T.address_of(acc[u * 16])))
    for u in T.unroll(8 * 16):
        o[u] = acc[u]
"""
DOT_IR = """
declare {sum} @{intrinsic}({sum}, {operand}, {operand})
define void @sparsetir_calibrate_{dtype}(ptr %left, ptr %right, ptr %to) alwaysinline {{
  %a = load {operand}, ptr %left, align 4
  %b = load {operand}, ptr %right, align 4
  %sum = load {sum}, ptr %to, align 4
  %new = call {sum} @{intrinsic}({sum} %sum, {operand} %a, {operand} %b)
  store {sum} %new, ptr %to, align 4
  ret void
}}
"""


@dataclass(frozen=True)
class DotInstruction:
    """An instruction that sums products of narrow numbers.

    Parameters
    ----------
    feature : str
        The processor's feature that provides it.
    intrinsic, operand, total : str
        LLVM's names of the instruction, of the vectors that are multiplied, and of their sums.
    sum_dtype : str
    products : int
        Of one instruction.
    """

    feature: str
    intrinsic: str
    operand: str
    total: str
    sum_dtype: str
    products: int

    def source(self, dtype: str) -> str:
        """Return the loop for a dtype of the operands."""
        ir = DOT_IR.format(dtype=dtype, sum=self.total, intrinsic=self.intrinsic, operand=self.operand)
        return DOT.format(dtype=dtype, sum=self.sum_dtype, ir=repr(ir), steps=STEPS)


X86_BF16, X86_INT8 = "llvm.x86.avx512bf16.dpbf16ps.512", "llvm.x86.avx512.vpdpbusd.512"
DOTS = {
    "bfloat16": DotInstruction("avx512bf16", X86_BF16, "<32 x bfloat>", "<16 x float>", "float32", 32),
    "int8": DotInstruction("avx512vnni", X86_INT8, "<64 x i8>", "<16 x i32>", "int32", 64),
}
SUM = """
@T.prim_func(s_tir=True)
def sum_{how}(operand: T.handle, index: T.handle, out: T.handle, n: T.int32):
    T.func_attr({{"tirx.noalias": True}})
    a = T.match_buffer(operand, (n,), "float32", align=4)
    idx = T.match_buffer(index, ({count},), "int32", align=4)
    o = T.match_buffer(out, (16,), "float32", align=4)
    with T.attr(0, "pragma_import_llvm", {ir}):
        for e in range({count} // 16):
            T.evaluate(T.call_extern("void", "sparsetir_calibrate_gather",
                T.address_of(a[0]), T.address_of(idx[e * 16]), T.address_of(o[0])))
"""
SUM_IR = """
declare <16 x float> @llvm.masked.gather.v16f32.v16p0(<16 x ptr>, i32, <16 x i1>, <16 x float>)
define void @sparsetir_calibrate_gather(ptr %from, ptr %index, ptr %to) alwaysinline {
  %at = load <16 x i32>, ptr %index, align 4
  %where = getelementptr float, ptr %from, <16 x i32> %at
  %all = shufflevector <16 x i1> <i1 1, i1 1, i1 1, i1 1, i1 1, i1 1, i1 1, i1 1,
    i1 1, i1 1, i1 1, i1 1, i1 1, i1 1, i1 1, i1 1>, <16 x i1> poison, <16 x i32> zeroinitializer
  %some = call <16 x float> @llvm.masked.gather.v16f32.v16p0(
    <16 x ptr> %where, i32 4, <16 x i1> %all, <16 x float> poison)
  %sum = load <16 x float>, ptr %to, align 4
  %new = fadd <16 x float> %sum, %some
  store <16 x float> %new, ptr %to, align 4
  ret void
}
"""
STORE = """
@T.prim_func(s_tir=True)
def store(out: T.handle, count: T.int32, value: T.float32):
    T.func_attr({"tirx.noalias": True})
    o = T.match_buffer(out, (count * 16,), "float32", align=64)
    for i in range(count):
        for v in T.vectorized(16):
            o[i * 16 + v] = value
"""
STREAM = """
@T.prim_func(s_tir=True)
def stream(out: T.handle, count: T.int32, value: T.float32):
    T.func_attr({"tirx.noalias": True})
    o = T.match_buffer(out, (count * 16,), "float32", align=64)
    with T.attr(0, "pragma_import_llvm", IR):
        for i in range(count):
            T.evaluate(T.call_extern("void", "sparsetir_calibrate_stream", T.address_of(o[i * 16]), value))
"""
STREAM_IR = """
define void @sparsetir_calibrate_stream(ptr %to, float %value) alwaysinline {
  %one = insertelement <16 x float> poison, float %value, i32 0
  %all = shufflevector <16 x float> %one, <16 x float> poison, <16 x i32> zeroinitializer
  store <16 x float> %all, ptr %to, align 64, !nontemporal !0
  ret void
}
!0 = !{i32 1}
"""
WAKE = """
@T.prim_func(s_tir=True)
def {kind}(out: T.handle, threads: T.int32):
    T.func_attr({{"tirx.noalias": True}})
    o = T.match_buffer(out, (threads * 16,), "float32", align=4)
    for t in T.{kind}(threads):
        for v in T.vectorized(16):
            o[t * 16 + v] = o[t * 16 + v] + T.float32(1)
"""


# ------------------------------------------------------------------ the profile in use


@cache
def machine_profile() -> MachineProfile:
    """Return the profile of this machine: the measured one, or that of its family of processors.

    It is measured on first use, in at most three seconds, and kept beside the compiled kernels. With
    ``SPARSETIR_CALIBRATE=0`` nothing is measured: the shipped profile of the processor's family is returned.
    """
    if os.environ.get(SWITCH) == "0":
        return family_profile()
    return read_profile() or calibrate(seconds=SECONDS)


@cache
def profile_in_use() -> MachineProfile:
    """Return the profile that default choices go by: the measured one if there is one, else that of the family.

    Nothing is measured for it: the first call of a kernel does not wait.
    """
    return family_profile() if os.environ.get(SWITCH) == "0" else read_profile() or family_profile()


def family_profile() -> MachineProfile:
    """Return the shipped profile for the processor that code is generated for, or for the one most like it."""
    target = native_target()
    mcpu, added = str(target.attrs.get("mcpu", "")), [str(x) for x in target.attrs.get("mattr", None) or ()]
    cpu = host_cpu()
    architecture = "x86_64" if cpu is None else cpu.architecture
    return shipped_profile(closest_name(mcpu, shipped_families(), added, architecture=architecture) or mcpu)


def profile_key() -> str:
    """Return what a measured profile belongs to: the processor's features and its cache sizes."""
    cpu = host_cpu()
    features = sorted(cpu.features) if cpu is not None else [machine_name()]
    sizes = [(level.name, level.size, level.cores) for level in levels()]
    return hashlib.sha256(f"{features} {sizes} {native_target()} {__version__}".encode()).hexdigest()[:32]


def read_profile() -> MachineProfile | None:
    """Return the profile that was measured before; None if there is none, or its file is damaged."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        return MachineProfile.from_dict(json.loads((folder / f"profile-{profile_key()}.json").read_text()))
    except (OSError, ValueError, ArgumentError, RecursionError):
        return None


def write_profile(profile: MachineProfile) -> None:
    """Keep a measured profile beside the compiled kernels; a folder that cannot be written to is left alone."""
    folder = cache_folder()
    if folder is None:
        return
    path = folder / f"profile-{profile_key()}.json"
    cache_text(path, json.dumps(profile.as_dict()))


def calibrate(*, seconds: float = SECONDS) -> MachineProfile:
    """Measure the profile of this machine and keep it beside the compiled kernels.

    Parameters
    ----------
    seconds : float
        Time for it. All loops are measured again and again while it lasts, at least once, and the fastest of each
        counts: other work on the machine only makes rates lower. Of waking a thread the median counts.

    Raises
    ------
    ArgumentError
        When `seconds` is not positive or not finite.
    """
    end = time.perf_counter() + as_seconds(seconds, "seconds", positive=True)
    loops = _compile()
    rates, rounds, reads, longest = list[dict[str, Any]](), list[Any](), list[list[float]](), 0.0
    while not rounds or time.perf_counter() + longest < end:
        begun = time.perf_counter()
        rates.append(_rates(loops))
        rounds.append(_gather(loops))
        reads.append(_read(loops))
        longest = max(longest, time.perf_counter() - begun)
    curves = ROW_BYTES, working_sets(), PREFETCH, _fastest(rounds)
    best = _best_rates(rates) | {"noise": _noise(rounds), "private": private_cache(), "last": last_cache()}
    best["read"] = tuple(np.min(np.array(reads), axis=0).tolist())
    profile = MachineProfile(machine_name(), "measured", *curves, **best)
    write_profile(profile)
    machine_profile.cache_clear()
    profile_in_use.cache_clear()
    return profile


def _fastest(rounds: list[Any]) -> Any:
    return tuple(map(tuple, (map(tuple, curve) for curve in np.min(np.array(rounds), axis=0).tolist())))


def _best_rates(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest of each rate and the least of each time; of waking a thread the median."""
    taken: dict[str, Callable[[Any], float]] = {"wake": statistics.median}
    taken |= dict.fromkeys(("fma_latency", "scalar_load", "vector_gather"), min)
    best: dict[str, Any] = {}
    for name, first in rounds[0].items():
        if isinstance(first, dict):
            best[name] = {key: max(rates[name][key] for rates in rounds) for key in first}
        else:
            best[name] = taken.get(name, max)([rates[name] for rates in rounds])
    return best


def _noise(rounds: list[Any]) -> float:
    """Return the median over all points of the distance between the two fastest rounds."""
    if len(rounds) < 2:
        return 0.0
    first, second = np.sort(np.array(rounds), axis=0)[:2]
    return float(np.median(second / first - 1))


def working_sets() -> tuple[int, ...]:
    """Return the bytes of the gathered operands: doubled from 16 KiB to four times the largest cache."""
    most = min(max(TIMES_LAST * last_cache(), 64 << 20), MOST_SET)
    return tuple(LEAST_SET << n for n in range((most // LEAST_SET).bit_length()))


# ------------------------------------------------------------------ measuring


def _compile() -> Callable[[str], Callable[..., None]]:
    """Compile every loop; a dot product that this LLVM or processor lacks is left out."""
    get_num_threads()  # sets up TVM's thread pool before the first parallel loop starts it
    main = _module(dict(_sources()))
    sums = {
        how: _module({f"sum_{how}": SUM.format(how=how, count=SUMMED, ir=repr(SUM_IR))}, how)
        for how in ("load", "vector")
    }
    dots = {name: module for name in DOTS if (module := _dot_module(name)) is not None}

    def loop(name: str) -> Callable[..., None]:
        kind, _, variant = name.partition("_")
        module = sums[variant] if kind == "sum" else dots[variant] if kind == "dot" else main
        return module[name]

    loop.dots = tuple(dots)  # type: ignore[attr-defined]
    return loop


def _sources() -> Iterator[tuple[str, str]]:
    for size in ROW_BYTES:
        row = size // 4
        tile = min(row, TILE)
        shape = {"row": row, "tile": tile, "tiles": row // tile, "vectors": tile // LANES, "entries": ROW_ENTRIES}
        for ahead in PREFETCH:
            prefetch = AHEAD.format(ahead=ahead, **shape) if ahead else ""
            how = {"bytes": size, "ahead": ahead, "rows": ROWS, "prefetch": prefetch}
            yield f"gather_{size}_{ahead}", GATHER.format(**how, **shape)
    yield from ((f"fma_{sums}", FMA.format(sums=sums, steps=STEPS)) for sums in SUMS)
    yield "store", STORE
    yield "stream", STREAM.replace("IR", repr(STREAM_IR))
    yield from ((kind, WAKE.format(kind=kind)) for kind in ("serial", "parallel"))


def _module(sources: dict[str, str], gathers: str = "") -> Any:
    target = native_target()
    if gathers:
        config = dict(target.export())
        attributes = [name for name in config.get("mattr", ()) if not name.endswith(NO_GATHER)]
        is_x86 = str(config.get("mtriple", "")).startswith("x86_64")
        mattr = [*attributes, f"+{NO_GATHER}"] if gathers == "load" and is_x86 else attributes
        target = tvm.target.Target({**{k: v for k, v in config.items() if k != "mattr"}, "mattr": mattr})
    functions = {name: tvm.script.from_source(source) for name, source in sources.items()}
    return tvm.compile(tvm.IRModule(functions), target=target, tir_pipeline="s_tir")


def _dot_module(name: str) -> Any:
    cpu = host_cpu()
    if cpu is None or DOTS[name].feature not in cpu.features:
        return None
    try:
        return _module({f"dot_{name}": DOTS[name].source(name)})
    except Exception:  # LLVM's intrinsics change between versions, and TVM raises several classes
        return None


def _seconds(call: Callable[[], None], times: int = 5) -> float:
    """Return the seconds of the fastest of several calls, the first of which does not count."""
    call()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _gather(loop: Callable[[str], Callable[..., None]]) -> Any:
    rng = np.random.default_rng(0)
    data = np.ones(working_sets()[-1] // 4, np.float32)
    drawn = rng.random(WINDOWS * ROWS * ROW_ENTRIES + max(PREFETCH), dtype=np.float32)
    return tuple(
        tuple(_gather_at(loop, data, drawn, size, working_set) for working_set in working_sets()) for size in ROW_BYTES
    )


def _read(loop: Callable[[str], Callable[..., None]]) -> list[float]:
    """Return seconds a byte of arrays that are read in order, for each working set: medians of windows."""
    size, seconds_a_byte = ROW_BYTES[-1], []
    data, out = np.ones(working_sets()[-1] // 4, np.float32), np.empty(8 * size // 4, np.float32)
    for working_set in working_sets():
        count, seconds = working_set // size, []
        operand, call = data[: working_set // 4], loop(f"gather_{size}_0")
        index = (np.arange(WINDOWS * ROWS * ROW_ENTRIES) % count).astype(np.int32)
        operand.max()
        for window in range(WINDOWS):
            begin = time.perf_counter()
            call(operand, index, out, count, index.size, window * ROWS * ROW_ENTRIES)
            seconds.append(time.perf_counter() - begin)
        seconds_a_byte.append(statistics.median(seconds) / (ROWS * ROW_ENTRIES * size))
    return seconds_a_byte


def _gather_at(loop: Any, data: np.ndarray, drawn: np.ndarray, size: int, working_set: int) -> tuple[float, ...]:
    """Return seconds an entry for each prefetch distance: medians of windows whose rows were not read lately."""
    count, medians = working_set // size, []
    operand, out = data[: working_set // 4], np.empty(8 * size // 4, np.float32)
    index = np.minimum((drawn * count).astype(np.int32), count - 1)
    for ahead in PREFETCH:
        call, seconds = loop(f"gather_{size}_{ahead}"), []
        operand.max()  # what a cache can hold of the working set is in it
        for window in range(WINDOWS):
            begin = time.perf_counter()
            call(operand, index, out, count, index.size, window * ROWS * ROW_ENTRIES)
            seconds.append(time.perf_counter() - begin)
        medians.append(statistics.median(seconds) / (ROWS * ROW_ENTRIES))
    return tuple(medians)


def _rates(loop: Any) -> dict[str, Any]:
    times = {sums: _fma_seconds(loop(f"fma_{sums}"), sums) for sums in SUMS}
    return {
        "store": _store_rate(loop("store")),
        "streaming_store": _store_rate(loop("stream")),
        "fma": {sums: 2 * LANES * sums * STEPS / seconds for sums, seconds in times.items()},
        "fma_latency": times[1] / STEPS,
        "scalar_load": _sum_seconds(loop("sum_load")),
        "vector_gather": _sum_seconds(loop("sum_vector")),
        "wake": _wake_seconds(loop),
        "dots": {name: _dot_rate(loop(f"dot_{name}"), DOTS[name]) for name in loop.dots},
    }


def _fma_seconds(call: Callable[..., None], sums: int) -> float:
    factors, out = np.full(2 * LANES, 0.5, np.float32), np.empty(sums * LANES, np.float32)
    return _seconds(lambda: call(factors, out))


def _store_rate(call: Callable[..., None]) -> float:
    memory = np.zeros(STORED + LANES, np.float32)
    out = memory[-memory.ctypes.data % 64 // 4 :][:STORED]  # non-temporal stores need whole cache lines
    return out.nbytes / _seconds(lambda: call(out, STORED // LANES, 1.0), 2)


def _wake_seconds(loop: Any) -> float:
    """Return the median of several times: it takes longer while the system has both threads on one core."""
    seconds = []
    for _ in range(WAKES):
        time.sleep(BETWEEN_WAKES)  # so that threads are placed again
        seconds.append(max(_loop_seconds(loop("parallel")) - _loop_seconds(loop("serial")), 0.0))
    return statistics.median(seconds)


def _loop_seconds(call: Callable[..., None]) -> float:
    threads = get_num_threads()
    out = np.zeros(threads * LANES, np.float32)
    return _seconds(lambda: call(out, threads), 50)


def _sum_seconds(call: Callable[..., None]) -> float:
    operand, out = np.ones(1 << 11, np.float32), np.empty(LANES, np.float32)
    index = np.random.default_rng(0).integers(0, operand.size, SUMMED, dtype=np.int32)
    return _seconds(lambda: call(operand, index, out, operand.size)) / SUMMED


def _dot_rate(call: Callable[..., None], dot: DotInstruction) -> float:
    data, out = np.zeros(64, np.int8), np.empty(8 * LANES, dot.sum_dtype)
    return 2 * dot.products * 8 * STEPS / _seconds(lambda: call(data, data, out))


__all__ = ["calibrate", "family_profile", "machine_profile", "read_profile", "working_sets", "write_profile"]
