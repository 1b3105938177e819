# SPDX-License-Identifier: Apache-2.0
"""LLVM IR that computes what the dot-product and tile instructions of x86 do, for processors without them.

A target with the key ``"emulated_units"`` gets it:

    {"kind": "llvm", "mcpu": ..., "keys": ["cpu", "emulated_units"]}

Numbers are those of the instructions, as Intel's manual defines them. Floats are rounded to the nearest, ties to even,
whatever the thread's rounding mode; denormal operands and results count as zeros with their sign.

* ``vdpbf16ps`` adds the product of the second elements of two pairs to the sum, then that of the first ones, each by a
  fused multiply-add.
* ``tdpbf16ps`` and ``tdpfp16ps`` sum the products of first and of second elements apart, from zero on and each by a
  fused multiply-add. They add both sums, and then add the result to the tile.
* ``vcvtneps2bf16``, which narrows results, keeps NaN.
* Sums of 8-bit products wrap around.

One number differs: results that round up to the smallest normal number from below are zero on processors that detect
tininess after rounding, and that number here. Tiles are 8,256 bytes of the caller, one such state for each thread: the
configuration, and eight tiles. An operation on tiles that are not configured, or whose shapes do not fit together, ends
the process, as the instruction would.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

KEY = "emulated_units"  # of a target
STATE_BYTES = 64 + 8 * 1024
WORDS, FLOATS = "<16 x i32>", "<16 x float>"

TILE_KINDS = {"tdpbf16ps": "bfloat", "tdpfp16ps": "half"}
SIGNED = {"tdpbssd": (True, True), "tdpbsud": (True, False), "tdpbusd": (False, True), "tdpbuud": (False, False)}


def is_emulated(target: Any) -> bool:
    """Return whether a target has matrix units emulated."""
    return KEY in [str(key) for key in target.keys]


def emulate(text: str) -> str:
    """Return imported IR that calls emulations in place of LLVM's intrinsics, on any target."""
    text = re.sub(r' "target-features"="[^"]*"', "", text)
    needed: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        name = match[1].replace(".", "_")
        needed[name] = match[1]
        return f"@st_emulated_{name}("

    text = re.sub(r"@llvm\.x86\.([\w.]+)\(", renamed, text)
    text = re.sub(r"^declare .*@st_emulated_.*$", "", text, flags=re.MULTILINE)
    rounded = rf"call <16 x i16> @st_emulated_narrow({FLOATS} \1)"
    text, count = re.subn(rf"fptrunc {FLOATS} (%\w+) to <16 x bfloat>", rounded, text)
    text = text.replace("bitcast <16 x bfloat> %n to", "bitcast <16 x i16> %n to")
    text, accesses = _through_loops(text)
    dots = (_dot(name, full) for name, full in needed.items())
    return "\n".join([text, *accesses, *dots, _narrowing() if count else ""])


def _through_loops(text: str) -> tuple[str, list[str]]:
    """Return IR whose masked loads and stores are loops, and their functions: LLVM writes each element out."""
    codes: dict[tuple[str, str], None] = {}

    def on_load(match: re.Match[str]) -> str:
        codes["load", match[2]] = None
        return f"call {match[1]} @st_masked_load_{match[2]}(ptr {match[3]}, {match[4]})"

    def on_store(match: re.Match[str]) -> str:
        codes["store", match[1]] = None
        return f"call void @st_masked_store_{match[1]}({match[2]}, ptr {match[3]}, {match[4]})"

    vector = r"<\d+ x \w+>"
    load = rf"call ({vector}) @llvm\.masked\.load\.(\w+)\.p0\(ptr (%\w+), i32 1, ({vector} %\w+), [^)]*\)"
    store = rf"call void @llvm\.masked\.store\.(\w+)\.p0\(({vector} %\w+), ptr (%\w+), i32 1, ({vector} %\w+)\)"
    text = re.sub(store, on_store, re.sub(load, on_load, text))
    text = re.sub(r"^declare .*@llvm\.masked\..*$", "", text, flags=re.MULTILINE)
    return text, [*([_MASKED] if codes else []), *(_masked(*code) for code in codes)]


def _masked(operation: str, code: str) -> str:
    """Return the function of masked loads or stores of vectors such as ``"v16f32"``."""
    count, dtype, bits = re.findall(r"v(\d+)([fi])(\d+)", code)[0]
    kind = {"f32": "float"}.get(dtype + bits, f"i{bits}")
    vector, size = f"<{count} x {kind}>", int(bits) // 8
    mask = f"  %m = bitcast <{count} x i1> %bits to i{count}\n"
    mask += "  %w = or i64 %m, 0" if count == "64" else f"  %w = zext i{count} %m to i64"
    head = "define linkonce_odr"
    if operation == "load":
        return f"""
{head} {vector} @st_masked_load_{code}(ptr %at, <{count} x i1> %bits) alwaysinline nounwind {{
  %out = alloca {vector}, align 64
  store {vector} zeroinitializer, ptr %out, align 64
{mask}
  call void @st_masked_copy(ptr %out, ptr %at, i64 %w, i64 {count}, i64 {size})
  %x = load {vector}, ptr %out, align 64
  ret {vector} %x
}}"""
    return f"""
{head} void @st_masked_store_{code}({vector} %x, ptr %at, <{count} x i1> %bits) alwaysinline nounwind {{
  %in = alloca {vector}, align 64
  store {vector} %x, ptr %in, align 64
{mask}
  call void @st_masked_copy(ptr %at, ptr %in, i64 %w, i64 {count}, i64 {size})
  ret void
}}"""


_MASKED = """
define linkonce_odr void @st_masked_copy(ptr %to, ptr %from, i64 %mask, i64 %count, i64 %size) noinline nounwind {
entry:
  br label %head
head:
  %n = phi i64 [ 0, %entry ], [ %next, %tail ]
  %moved = lshr i64 %mask, %n
  %bit = trunc i64 %moved to i1
  br i1 %bit, label %copy, label %tail
copy:
  %offset = mul i64 %n, %size
  %a = getelementptr i8, ptr %to, i64 %offset
  %b = getelementptr i8, ptr %from, i64 %offset
  call void @llvm.memcpy.p0.p0.i64(ptr %a, ptr %b, i64 %size, i1 false)
  br label %tail
tail:
  %next = add i64 %n, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %head, label %done
done:
  ret void
}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1 immarg)"""


def _dot(name: str, intrinsic: str) -> str:
    """Return the function that emulates a dot product of registers."""
    lanes = int(intrinsic.rpartition(".")[2]) // 32
    words, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    head = f"define linkonce_odr {{acc}} @st_emulated_{name}({{acc}} %acc, {{operand}} %a, {{operand}} %b) alwaysinline"
    lines: list[str] = []
    if "dpbf16ps" in intrinsic:
        operand = f"<{2 * lanes} x bfloat>"
        lines += [f"%x = bitcast {operand} %a to {words}", f"%y = bitcast {operand} %b to {words}"]
        acc = _flushed(lines, "c", "%acc", lanes)
        for half in (1, 0):
            left, right = (_half(lines, f"{side}{half}", f"%{side}", half, lanes, "bfloat") for side in "xy")
            acc = _fused(lines, f"s{half}", left, right, acc, lanes)
        body = "\n  ".join([*lines, f"ret {floats} {acc}"])
        return f"{head.format(acc=floats, operand=operand)} {{\n  {body}\n}}\n{_fma(lanes)}"
    operand = f"<{4 * lanes} x i8>"
    lines += [f"%x = bitcast {operand} %a to {words}", f"%y = bitcast {operand} %b to {words}"]
    acc = _bytes(lines, "%x", "%y", "%acc", lanes, (False, True))
    body = "\n  ".join([*lines, f"ret {words} {acc}"])
    return f"{head.format(acc=words, operand=operand)} {{\n  {body}\n}}"


def _fma(lanes: int) -> str:
    vector = f"<{lanes} x float>"
    return f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})"


def _splat(value: int, lanes: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * lanes) + ">"


def _flushed(lines: list[str], name: str, value: str, lanes: int) -> str:
    """Append what turns denormal numbers into zeros of their sign, and return the value."""
    words, floats = f"<{lanes} x i32>", f"<{lanes} x float>"
    lines += [
        f"%{name}.w = bitcast {floats} {value} to {words}",
        f"%{name}.e = and {words} %{name}.w, {_splat(0x7F800000, lanes)}",
        f"%{name}.d = icmp eq {words} %{name}.e, zeroinitializer",
        f"%{name}.z = and {words} %{name}.w, {_splat(-0x80000000, lanes)}",
        f"%{name}.r = select <{lanes} x i1> %{name}.d, {words} %{name}.z, {words} %{name}.w",
        f"%{name} = bitcast {words} %{name}.r to {floats}",
    ]
    return f"%{name}"


def _half(lines: list[str], name: str, words_value: str, half: int, lanes: int, kind: str) -> str:
    """Append what takes the first or second 16-bit float of each word, and return it in float32."""
    words, floats, halves = f"<{lanes} x i32>", f"<{lanes} x float>", f"<{lanes} x half>"
    if kind == "half":  # whose denormal numbers are normal ones in float32
        shift = _splat(16 * half, lanes)
        lines += [
            f"%{name}.s = lshr {words} {words_value}, {shift}",
            f"%{name}.t = trunc {words} %{name}.s to <{lanes} x i16>",
            f"%{name}.h = bitcast <{lanes} x i16> %{name}.t to {halves}",
            f"%{name} = fpext {halves} %{name}.h to {floats}",
        ]
        return f"%{name}"
    step = f"and {words} {words_value}, {_splat(-0x10000, lanes)}"
    lines.append(f"%{name}.s = {step if half else f'shl {words} {words_value}, {_splat(16, lanes)}'}")
    lines.append(f"%{name}.f = bitcast {words} %{name}.s to {floats}")
    return _flushed(lines, name, f"%{name}.f", lanes)


def _fused(lines: list[str], name: str, a: str, b: str, c: str, lanes: int) -> str:
    floats = f"<{lanes} x float>"
    lines.append(f"%{name}.m = call {floats} @llvm.fma.v{lanes}f32({floats} {a}, {floats} {b}, {floats} {c})")
    return _flushed(lines, name, f"%{name}.m", lanes)


def _bytes(lines: list[str], a: str, b: str, acc: str, lanes: int, signed: tuple[bool, bool]) -> str:
    """Append the products of four bytes each, added to `acc`."""
    words = f"<{lanes} x i32>"
    for n in range(4):
        for side, value, is_signed in (("p", a, signed[0]), ("q", b, signed[1])):
            shift = "ashr" if is_signed else "lshr"
            lines.append(f"%{side}{n}.l = shl {words} {value}, {_splat(24 - 8 * n, lanes)}")
            lines.append(f"%{side}{n} = {shift} {words} %{side}{n}.l, {_splat(24, lanes)}")
        lines += [f"%t{n} = mul {words} %p{n}, %q{n}", f"%u{n} = add {words} {acc}, %t{n}"]
        acc = f"%u{n}"
    return acc


def _narrowing() -> str:
    """Return the function that rounds float32 to bfloat16."""
    lines: list[str] = []
    value = _flushed(lines, "f", "%x", 16)
    lines += [
        f"%w = bitcast {FLOATS} {value} to {WORDS}",
        f"%high = lshr {WORDS} %w, {_splat(16, 16)}",
        f"%odd = and {WORDS} %high, {_splat(1, 16)}",
        f"%half = add {WORDS} %odd, {_splat(0x7FFF, 16)}",
        f"%sum = add {WORDS} %w, %half",
        f"%rounded = lshr {WORDS} %sum, {_splat(16, 16)}",
        f"%quiet = or {WORDS} %high, {_splat(0x40, 16)}",
        f"%nan = fcmp uno {FLOATS} {value}, {value}",
        f"%bits = select <16 x i1> %nan, {WORDS} %quiet, {WORDS} %rounded",
        f"%y = trunc {WORDS} %bits to <16 x i16>",
        "ret <16 x i16> %y",
    ]
    body = "\n  ".join(lines)
    return f"define linkonce_odr <16 x i16> @st_emulated_narrow({FLOATS} %x) alwaysinline {{\n  {body}\n}}"


# ------------------------------------------------------------------ tiles


def define_tiles(names: Sequence[str]) -> str:
    """Return the functions of tiles that are called by these names, with the state before all other arguments."""
    parts = [_SHARED]
    for name in names:
        operation, *tiles = name.split("_")
        numbers = "".join(f", i64 {tile}" for tile in tiles)
        extra = {"config": ", ptr %at", "load": ", ptr %at, i64 %stride", "store": ", ptr %at, i64 %stride"}
        parameters = extra.get(operation, "")
        parts.append(
            f"define linkonce_odr void @st_tile_{name}(ptr %state{parameters}) alwaysinline nounwind {{\n"
            f"  call void @st_emulated_{operation}(ptr %state{numbers}{parameters})\n  ret void\n}}"
        )
    instructions = dict.fromkeys(name.partition("_")[0] for name in names if name.startswith("tdp"))
    parts += [_product(instruction) for instruction in instructions]
    return "\n".join([*parts, _fma(16)])


@cache
def _product(instruction: str) -> str:
    """Return the function that emulates a product of tiles."""
    lines: list[str] = []
    if kind := TILE_KINDS.get(instruction):
        sums = []
        for half in (0, 1):
            left, right = (_half(lines, f"{side}{half}", f"%{side}", half, 16, kind) for side in "xy")
            sums.append(_fused(lines, f"s{half}", left, right, f"%part{half}", 16))
        end: list[str] = [f"%both = fadd {FLOATS} %part0, %part1"]
        both = _flushed(end, "sum", "%both", 16)
        end.append(f"%old.f = bitcast {WORDS} %old to {FLOATS}")
        old = _flushed(end, "before", "%old.f", 16)
        end.append(f"%new = fadd {FLOATS} {old}, {both}")
        last = _flushed(end, "after", "%new", 16)
        end.append(f"store {FLOATS} {last}, ptr %c.at, align 1")
        vector = FLOATS
    else:
        sums = [_bytes(lines, "%x", "%y", "%part0", 16, SIGNED[instruction]), "zeroinitializer"]
        end = [f"%new = add {WORDS} %old, %part0", f"store {WORDS} %new, ptr %c.at, align 1"]
        vector = WORDS
    body, after = "\n  ".join(lines), "\n  ".join(end)
    return f"""
define linkonce_odr void @st_emulated_{instruction}(ptr %state, i64 %c, i64 %a, i64 %b) noinline nounwind {{
entry:
  %rows = call i64 @st_emulated_rows(ptr %state, i64 %c)
  %rows.a = call i64 @st_emulated_rows(ptr %state, i64 %a)
  %groups = call i64 @st_emulated_rows(ptr %state, i64 %b)
  %bytes.c = call i64 @st_emulated_bytes(ptr %state, i64 %c)
  %bytes.b = call i64 @st_emulated_bytes(ptr %state, i64 %b)
  %bytes.a = call i64 @st_emulated_bytes(ptr %state, i64 %a)
  %k = udiv i64 %bytes.a, 4
  %f0 = icmp eq i64 %rows, %rows.a
  %f1 = icmp eq i64 %bytes.c, %bytes.b
  %f2 = icmp eq i64 %k, %groups
  %f3 = and i1 %f0, %f1
  %fits = and i1 %f2, %f3
  br i1 %fits, label %rows.head, label %bad
bad:
  call void @llvm.trap()
  unreachable
rows.head:
  %m = phi i64 [ 0, %entry ], [ %m.next, %rows.end ]
  %a.row = call ptr @st_emulated_row(ptr %state, i64 %a, i64 %m)
  %c.at = call ptr @st_emulated_row(ptr %state, i64 %c, i64 %m)
  br label %groups.head
groups.head:
  %g = phi i64 [ 0, %rows.head ], [ %g.next, %groups.head ]
  %part0 = phi {vector} [ zeroinitializer, %rows.head ], [ {sums[0]}, %groups.head ]
  %part1 = phi {vector} [ zeroinitializer, %rows.head ], [ {sums[1]}, %groups.head ]
  %a.at = getelementptr i32, ptr %a.row, i64 %g
  %word = load i32, ptr %a.at, align 1
  %one = insertelement {WORDS} poison, i32 %word, i64 0
  %x = shufflevector {WORDS} %one, {WORDS} poison, {WORDS} zeroinitializer
  %b.at = call ptr @st_emulated_row(ptr %state, i64 %b, i64 %g)
  %y = load {WORDS}, ptr %b.at, align 1
  {body}
  %g.next = add i64 %g, 1
  %g.more = icmp ult i64 %g.next, %k
  br i1 %g.more, label %groups.head, label %rows.end
rows.end:
  %old = load {WORDS}, ptr %c.at, align 1
  {after.replace("%part0", sums[0]).replace("%part1", sums[1])}
  %m.next = add i64 %m, 1
  %m.more = icmp ult i64 %m.next, %rows
  br i1 %m.more, label %rows.head, label %done
done:
  ret void
}}"""


def _copies(operation: str) -> str:
    """Return the function that loads or stores a tile row by row."""
    clear = "  call void @st_emulated_zero(ptr %state, i64 %t)\n" if operation == "load" else ""
    source, destination = ("%out", "%in") if operation == "load" else ("%in", "%out")
    return f"""
define linkonce_odr void @st_emulated_{operation}(ptr %state, i64 %t, ptr %at, i64 %stride) noinline nounwind {{
entry:
  %rows = call i64 @st_emulated_rows(ptr %state, i64 %t)
  %bytes = call i64 @st_emulated_bytes(ptr %state, i64 %t)
{clear}  br label %head
head:
  %r = phi i64 [ 0, %entry ], [ %next, %head ]
  %in = call ptr @st_emulated_row(ptr %state, i64 %t, i64 %r)
  %distance = mul i64 %r, %stride
  %out = getelementptr i8, ptr %at, i64 %distance
  call void @llvm.memcpy.p0.p0.i64(ptr {destination}, ptr {source}, i64 %bytes, i1 false)
  %next = add i64 %r, 1
  %more = icmp ult i64 %next, %rows
  br i1 %more, label %head, label %done
done:
  ret void
}}"""


_SHARED = f"""
define linkonce_odr ptr @st_emulated_row(ptr %state, i64 %t, i64 %r) alwaysinline nounwind {{
  %tile = mul i64 %t, 1024
  %row = mul i64 %r, 64
  %sum = add i64 %tile, %row
  %offset = add i64 %sum, 64
  %at = getelementptr i8, ptr %state, i64 %offset
  ret ptr %at
}}
define linkonce_odr i64 @st_emulated_rows(ptr %state, i64 %t) noinline nounwind {{
  %offset = add i64 %t, 48
  %at = getelementptr i8, ptr %state, i64 %offset
  %byte = load i8, ptr %at, align 1
  %rows = zext i8 %byte to i64
  %palette = load i8, ptr %state, align 1
  %right = icmp eq i8 %palette, 1
  %some = icmp ne i64 %rows, 0
  %set = and i1 %right, %some
  br i1 %set, label %good, label %bad
bad:
  call void @llvm.trap()
  unreachable
good:
  ret i64 %rows
}}
define linkonce_odr i64 @st_emulated_bytes(ptr %state, i64 %t) alwaysinline nounwind {{
  %double = mul i64 %t, 2
  %offset = add i64 %double, 16
  %at = getelementptr i8, ptr %state, i64 %offset
  %count = load i16, ptr %at, align 1
  %bytes = zext i16 %count to i64
  ret i64 %bytes
}}
define linkonce_odr void @st_emulated_zero(ptr %state, i64 %t) alwaysinline nounwind {{
  %rows = call i64 @st_emulated_rows(ptr %state, i64 %t)
  %at = call ptr @st_emulated_row(ptr %state, i64 %t, i64 0)
  call void @llvm.memset.p0.i64(ptr %at, i8 0, i64 1024, i1 false)
  ret void
}}
define linkonce_odr void @st_emulated_config(ptr %state, ptr %at) alwaysinline nounwind {{
  call void @llvm.memset.p0.i64(ptr %state, i8 0, i64 {STATE_BYTES}, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr %state, ptr %at, i64 64, i1 false)
  ret void
}}
define linkonce_odr void @st_emulated_release(ptr %state) alwaysinline nounwind {{
  call void @llvm.memset.p0.i64(ptr %state, i8 0, i64 {STATE_BYTES}, i1 false)
  ret void
}}
{_copies("load")}
{_copies("store")}
declare void @llvm.trap()
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1 immarg)"""


__all__ = ["KEY", "STATE_BYTES", "define_tiles", "emulate", "is_emulated"]
