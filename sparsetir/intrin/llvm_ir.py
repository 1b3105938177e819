# SPDX-License-Identifier: Apache-2.0
"""LLVM IR of the intrinsics: one inlined function each, with operands passed by address.

TVM widens arguments of dtype bfloat16 to float32 and stores them as integers, so that no call with bfloat16 vectors
passes its legalization. A function of integers and addresses does: it is imported as text and inlined by LLVM.
"""

from __future__ import annotations

from functools import cache

from sparsetir.intrin.table import Intrinsic

TYPES = {
    "int8": "i8",
    "uint8": "i8",
    "int32": "i32",
    "bfloat16": "bfloat",
    "float16": "half",
    "float32": "float",
}
BYTES = {"int8": 1, "uint8": 1, "int32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
# Instruction and bits -> LLVM's intrinsic, and whether the vectors of 8-bit operands are passed as bytes.
X86 = {
    ("vdpbf16ps", 512): "llvm.x86.avx512bf16.dpbf16ps.512",
    ("vdpbf16ps", 256): "llvm.x86.avx512bf16.dpbf16ps.256",
    ("vpdpbusd", 512): "llvm.x86.avx512.vpdpbusd.512",
    ("vpdpbusd", 256): "llvm.x86.avx512.vpdpbusd.256",
}
ARM = {
    "sdot": "llvm.aarch64.neon.sdot.v4i32.v16i8",
    "udot": "llvm.aarch64.neon.udot.v4i32.v16i8",
    "bfdot": "llvm.aarch64.neon.bfdot.v4f32.v8bf16",
    "smmla": "llvm.aarch64.neon.smmla.v4i32.v16i8",
    "ummla": "llvm.aarch64.neon.ummla.v4i32.v16i8",
    "usmmla": "llvm.aarch64.neon.usmmla.v4i32.v16i8",
    "bfmmla": "llvm.aarch64.neon.bfmmla",
}


def function_name(unit: Intrinsic) -> str:
    """Return the name of the function that the IR of an intrinsic defines."""
    return f"st_{unit.name}"


def attributes(unit: Intrinsic) -> str:
    """Return the attributes of its function: always inlined, with the features of its instruction."""
    features = ",".join(f"+{feature}" for feature in unit.features)
    return f'alwaysinline nounwind "target-features"="{features}"'


@cache
def define(unit: Intrinsic) -> str:
    """Return the LLVM IR that defines an intrinsic's function; tiles have none (`sparsetir.intrin.tiles`).

    Of a dot product or a multiply-add it is ``C' = f(C, address of A, address of B)`` with the vector C. Of a small
    matrix product it is ``f(address of C, its row stride, address of A, its row stride, address of B, its row stride)``
    with strides in elements.
    """
    if unit.instruction == "vfmadd231ph":
        return _multiply_add(unit)
    if unit.is_dot:
        return _dot(unit)
    return _small_product(unit)


def _operand(unit: Intrinsic, side: str) -> str:
    """Return the vector type of an operand of a dot product."""
    dtype = getattr(unit, side)
    return f"<{unit.n * unit.group} x {TYPES[dtype]}>"


def _dot(unit: Intrinsic) -> str:
    words = f"<{unit.n} x i32>"
    acc = f"<{unit.n} x {TYPES[unit.c]}>"
    operand = _operand(unit, "a")
    bits = 32 * unit.n
    callee = X86[unit.instruction, bits] if unit.architecture == "x86_64" else ARM[unit.instruction]
    # vpdpbusd takes the unsigned operand first.
    first, second = ("%s", "%v") if unit.a == "uint8" else ("%v", "%s")
    return f"""
define linkonce_odr {acc} @{function_name(unit)}({acc} %acc, ptr %a, ptr %b) {attributes(unit)} {{
  %word = load i32, ptr %a, align {BYTES[unit.a]}
  %one = insertelement {words} poison, i32 %word, i64 0
  %all = shufflevector {words} %one, {words} poison, {words} zeroinitializer
  %s = bitcast {words} %all to {operand}
  %v = load {operand}, ptr %b, align {BYTES[unit.b]}
  %r = call {acc} @{callee}({acc} %acc, {operand} {first}, {operand} {second})
  ret {acc} %r
}}
declare {acc} @{callee}({acc}, {operand}, {operand})
"""


def _multiply_add(unit: Intrinsic) -> str:
    vector = f"<{unit.n} x half>"
    return f"""
define linkonce_odr {vector} @{function_name(unit)}({vector} %acc, ptr %a, ptr %b) {attributes(unit)} {{
  %x = load half, ptr %a, align 2
  %one = insertelement {vector} poison, half %x, i64 0
  %all = shufflevector {vector} %one, {vector} poison, <{unit.n} x i32> zeroinitializer
  %v = load {vector}, ptr %b, align 2
  %r = call {vector} @llvm.fma.v{unit.n}f16({vector} %all, {vector} %v, {vector} %acc)
  ret {vector} %r
}}
declare {vector} @llvm.fma.v{unit.n}f16({vector}, {vector}, {vector})
"""


def _small_product(unit: Intrinsic) -> str:
    c, a, b = TYPES[unit.c], TYPES[unit.a], TYPES[unit.b]
    half_acc, acc = f"<2 x {c}>", f"<4 x {c}>"
    half, whole = f"<{unit.k} x {a}>", f"<{2 * unit.k} x {a}>"
    joined = ", ".join(f"i32 {n}" for n in range(2 * unit.k))
    loads = []
    for name, kind, dtype, size in (("a", half, a, BYTES[unit.a]), ("b", half, b, BYTES[unit.b])):
        loads.append(f"""  %{name}0 = load {kind}, ptr %{name}, align {size}
  %{name}p = getelementptr {dtype}, ptr %{name}, i64 %s{name}
  %{name}1 = load {kind}, ptr %{name}p, align {size}
  %{name}v = shufflevector {kind} %{name}0, {kind} %{name}1, <{2 * unit.k} x i32> <{joined}>""")
    callee = ARM[unit.instruction]
    return f"""
define linkonce_odr void @{function_name(unit)}(ptr %c, i64 %sc, ptr %a, i64 %sa, ptr %b, i64 %sb) {attributes(unit)} {{
{loads[0]}
{loads[1]}
  %c0 = load {half_acc}, ptr %c, align 4
  %cp = getelementptr {c}, ptr %c, i64 %sc
  %c1 = load {half_acc}, ptr %cp, align 4
  %cv = shufflevector {half_acc} %c0, {half_acc} %c1, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  %r = call {acc} @{callee}({acc} %cv, {whole} %av, {whole} %bv)
  %r0 = shufflevector {acc} %r, {acc} poison, <2 x i32> <i32 0, i32 1>
  %r1 = shufflevector {acc} %r, {acc} poison, <2 x i32> <i32 2, i32 3>
  store {half_acc} %r0, ptr %c, align 4
  store {half_acc} %r1, ptr %cp, align 4
  ret void
}}
declare {acc} @{callee}({acc}, {whole}, {whole})
"""


__all__ = ["BYTES", "TYPES", "attributes", "define", "function_name"]
