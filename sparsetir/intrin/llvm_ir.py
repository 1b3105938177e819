# SPDX-License-Identifier: Apache-2.0
"""LLVM IR of the intrinsics, one inlined function each, and of the vector operations around them.

TVM widens arguments of dtype bfloat16 to float32 and stores them as integers, so that no call with bfloat16 vectors
passes its legalization. A function of integers and addresses does: it is imported as text and inlined by LLVM.
"""

from __future__ import annotations

from functools import cache

from sparsetir.intrin.table import Intrinsic

IMPORT = "pragma_import_llvm"  # the statement attribute by which TVM links LLVM IR
TYPES = {
    "int8": "i8",
    "uint8": "i8",
    "int32": "i32",
    "bfloat16": "bfloat",
    "float16": "half",
    "float32": "float",
}
BYTES = {"int8": 1, "uint8": 1, "int32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
NATURAL = {"32": 4, "64": 8}  # alignment of elements by their bits
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


# ----------------------------------------------------------------------------------- vector operations


LANES = 16  # 32-bit elements of a register
FEATURES = {
    "bf16": "+avx512bf16,+avx512bw,+avx512vl,+avx512f",
    "int8": "+avx512vnni,+avx512bw,+avx512vl,+avx512f",
}
WORD = "<16 x i32>"
# Kind -> LLVM's intrinsic of the dot product, and the vector type of its operands.
DOTS = {
    "bf16": ("llvm.x86.avx512bf16.dpbf16ps.512", "<32 x bfloat>"),
    "int8": ("llvm.x86.avx512.vpdpbusd.512", "<64 x i8>"),
}


def _numbers(values: list[int]) -> str:
    return "<" + ", ".join(f"i32 {value}" for value in values) + ">"


def _unpack(bits: int, high: int) -> list[int]:
    """Return the shuffle that interleaves the low or high halves of each 128 bits of two registers."""
    lane, count = 128 // bits, 512 // bits
    out = []
    for start in range(0, count, lane):
        for n in range(lane // 2):
            at = start + high * (lane // 2) + n
            out += [at, at + count]
    return out


def tile_functions(kind: str) -> str:
    """Return the functions that tiles need besides: they lay out entries."""
    attributes = f'alwaysinline nounwind "target-features"="{FEATURES[kind]}"'
    bits = 16 if kind == "bf16" else 8
    column, code = f"<16 x i{bits}>", f"v16i{bits}"
    head = "define linkonce_odr"
    out = [
        f"""
{head} {WORD} @st_column_{kind}(ptr %at, i32 %mask) {attributes} {{
  %narrow = trunc i32 %mask to i16
  %bits = bitcast i16 %narrow to <16 x i1>
  %x = call {column} @llvm.masked.load.{code}.p0(ptr %at, i32 1, <16 x i1> %bits, {column} zeroinitializer)
  %y = zext {column} %x to {WORD}
  ret {WORD} %y
}}""",
        _transposition(kind, attributes),
    ]
    run = 1
    while run * bits <= 512:
        vector = f"<{run} x i{bits}>"
        out.append(f"""
{head} void @st_copy{run}_{kind}(ptr %to, ptr %from) {attributes} {{
  %x = load {vector}, ptr %from, align 1
  store {vector} %x, ptr %to, align 1
  ret void
}}
{head} void @st_clear{run}_{kind}(ptr %to) {attributes} {{
  store {vector} zeroinitializer, ptr %to, align 1
  ret void
}}""")
        run *= 2
    return "\n".join(out)


def reading(kind: str, result: str) -> str:
    """Return the function that reads results again, to which sums are added."""
    attributes = f'alwaysinline nounwind "target-features"="{FEATURES[kind]}"'
    acc = "<16 x float>" if kind == "bf16" else WORD
    element, code = {"bfloat16": ("i16", "v16i16"), "float32": ("float", "v16f32"), "int32": ("i32", "v16i32")}[result]
    stored = f"<16 x {element}>"
    widened = f"  %y = bitcast {stored} %x to {acc}"
    if result == "bfloat16":
        shift = _numbers([16] * 16)
        widened = f"  %w = zext {stored} %x to {WORD}\n  %s = shl {WORD} %w, {shift}\n  %y = bitcast {WORD} %s to {acc}"
    text = f"""
define linkonce_odr {acc} @st_get_{result}(ptr %at, i32 %mask) {attributes} {{
  %narrow = trunc i32 %mask to i16
  %bits = bitcast i16 %narrow to <16 x i1>
  %x = call {stored} @llvm.masked.load.{code}.p0(ptr %at, i32 1, <16 x i1> %bits, {stored} zeroinitializer)
{widened}
  ret {acc} %y
}}
"""
    if kind == "bf16" and result == "bfloat16":  # as `functions` declares it
        return text
    return f"{text}declare {stored} @llvm.masked.load.{code}.p0(ptr, i32 immarg, <16 x i1>, {stored})"


def _transposition(kind: str, attributes: str) -> str:
    """Return the function that transposes 16 x 16 words."""
    lines = []
    for n in range(LANES):
        lines += [f"%p0_{n} = getelementptr {WORD}, ptr %in, i64 {n}", f"%v0_{n} = load {WORD}, ptr %p0_{n}, align 4"]
    # In each step, rows that are `far` apart exchange every other block of `far` columns.
    for step, far in enumerate((1, 2, 4, 8)):
        for n in range(LANES):
            low, high = n & ~far, n | far
            offset = far if n & far else 0
            picks = [(c & ~far) + offset + (LANES if c & far else 0) for c in range(LANES)]
            pair = f"{WORD} %v{step}_{low}, {WORD} %v{step}_{high}"
            lines.append(f"%v{step + 1}_{n} = shufflevector {pair}, <16 x i32> {_numbers(picks)}")
    for n in range(LANES):
        lines += [f"%q_{n} = getelementptr {WORD}, ptr %out, i64 {n}", f"store {WORD} %v4_{n}, ptr %q_{n}, align 4"]
    body = "\n  ".join(lines)
    return f"define linkonce_odr void @st_transpose_{kind}(ptr %in, ptr %out) {attributes} {{\n  {body}\n  ret void\n}}"


def _rows(kind: str) -> str:
    """Return the functions that load a register of a row: all of it, zeros without a condition, or under a mask."""
    attributes = f'alwaysinline nounwind "target-features"="{FEATURES[kind]}"'
    bits = 16 if kind == "bf16" else 8
    count, scalar = 512 // bits, f"i{bits}"
    rows = f"<{count} x {scalar}>"
    narrowed_mask = "trunc i64 %mask to i32" if count == 32 else "or i64 %mask, 0"
    return f"""
define linkonce_odr {WORD} @st_whole_{kind}(ptr %at) {attributes} {{
  %x = load {WORD}, ptr %at, align 1
  ret {WORD} %x
}}
@st_zeros_{kind} = linkonce_odr hidden constant {WORD} zeroinitializer, align 64
define linkonce_odr {WORD} @st_either_{kind}(ptr %at, i32 %holds) {attributes} {{
  %is = icmp ne i32 %holds, 0
  %from = select i1 %is, ptr %at, ptr @st_zeros_{kind}
  %x = load {WORD}, ptr %from, align 1
  ret {WORD} %x
}}
define linkonce_odr {WORD} @st_rows_{kind}(ptr %at, i64 %mask) {attributes} {{
  %narrow = {narrowed_mask}
  %bits = bitcast i{count} %narrow to <{count} x i1>
  %x = call {rows} @llvm.masked.load.v{count}{scalar}.p0(ptr %at, i32 1, <{count} x i1> %bits, {rows} zeroinitializer)
  %y = bitcast {rows} %x to {WORD}
  ret {WORD} %y
}}
declare {rows} @llvm.masked.load.v{count}{scalar}.p0(ptr, i32 immarg, <{count} x i1>, {rows})"""


def row_functions(kind: str) -> str:
    """Return the functions for sums along rows: loads of registers, and their dot products."""
    attributes = f'alwaysinline nounwind "target-features"="{FEATURES[kind]}"'
    acc = "<16 x float>" if kind == "bf16" else WORD
    callee, operand = DOTS[kind]
    return f"""{_rows(kind)}
define linkonce_odr {acc} @st_dot_rows_{kind}({acc} %acc, {WORD} %a, {WORD} %b) {attributes} {{
  %x = bitcast {WORD} %a to {operand}
  %y = bitcast {WORD} %b to {operand}
  %r = call {acc} @{callee}({acc} %acc, {operand} %x, {operand} %y)
  ret {acc} %r
}}
declare {acc} @{callee}({acc}, {operand}, {operand})"""


def functions(kind: str, result: str) -> str:
    """Return the functions for one kind of dot product (``"bf16"`` or ``"int8"``) and one dtype of results."""
    attributes = f'alwaysinline nounwind "target-features"="{FEATURES[kind]}"'
    bits = 16 if kind == "bf16" else 8
    scalar = f"i{bits}"
    group = 32 // bits
    piece = f"<{group} x {scalar}>"
    head = "define linkonce_odr"
    acc = "<16 x float>" if kind == "bf16" else WORD
    out = [
        _rows(kind),
        f"""
{head} i32 @st_word_{kind}(ptr %at, i32 %mask) {attributes} {{
  %narrow = trunc i32 %mask to i{group}
  %bits = bitcast i{group} %narrow to <{group} x i1>
  %x = call {piece} @llvm.masked.load.v{group}{scalar}.p0(ptr %at, i32 1, <{group} x i1> %bits, {piece} zeroinitializer)
  %y = bitcast {piece} %x to i32
  ret i32 %y
}}
{head} i32 @st_full_{kind}(ptr %at) {attributes} {{
  %y = load i32, ptr %at, align 1
  ret i32 %y
}}
declare {piece} @llvm.masked.load.v{group}{scalar}.p0(ptr, i32 immarg, <{group} x i1>, {piece})""",
    ]
    for width in (8, 16):
        vector = f"<{512 // width} x i{width}>"
        for name, high in (("lo", 0), ("hi", 1)):
            out.append(f"""
{head} {WORD} @st_{name}{width}_{kind}({WORD} %a, {WORD} %b) {attributes} {{
  %x = bitcast {WORD} %a to {vector}
  %y = bitcast {WORD} %b to {vector}
  %z = shufflevector {vector} %x, {vector} %y, <{512 // width} x i32> {_numbers(_unpack(width, high))}
  %r = bitcast {vector} %z to {WORD}
  ret {WORD} %r
}}""")
    callee, operand = DOTS[kind]
    out.append(f"declare {acc} @{callee}({acc}, {operand}, {operand})")
    # The unsigned operand comes first: the rows ("bs") or the scalar ("sb").
    for name, first, second in (("bs", "%v", "%s"), ("sb", "%s", "%v")):
        out.append(f"""
{head} {acc} @st_dot_{name}_{kind}({acc} %acc, i32 %word, {WORD} %b) {attributes} {{
  %one = insertelement {WORD} poison, i32 %word, i64 0
  %all = shufflevector {WORD} %one, {WORD} poison, <16 x i32> zeroinitializer
  %s = bitcast {WORD} %all to {operand}
  %v = bitcast {WORD} %b to {operand}
  %r = call {acc} @{callee}({acc} %acc, {operand} {first}, {operand} {second})
  ret {acc} %r
}}""")
    out += [_few(kind, attributes), *_ordered(kind, acc, attributes)]
    # Stored as integers: without AVX512-BF16, LLVM calls a function for every element of bfloat16.
    element, code = {"bfloat16": ("i16", "i16"), "float32": ("float", "f32"), "int32": ("i32", "i32")}[result]
    stored = f"<16 x {element}>"
    narrowed = f"  %y = bitcast {acc} %x to {stored}"
    if result == "bfloat16":
        narrowed = f"  %n = fptrunc {acc} %x to <16 x bfloat>\n  %y = bitcast <16 x bfloat> %n to {stored}"
    out.append(f"""
{head} void @st_put_{result}(ptr %at, {acc} %x, i32 %mask) {attributes} {{
  %narrow = trunc i32 %mask to i16
  %bits = bitcast i16 %narrow to <16 x i1>
{narrowed}
  call void @llvm.masked.store.v16{code}.p0({stored} %y, ptr %at, i32 1, <16 x i1> %bits)
  ret void
}}
declare void @llvm.masked.store.v16{code}.p0({stored}, ptr, i32 immarg, <16 x i1>)""")
    return "\n".join(out)


def widening_functions() -> str:
    """Return the functions that add products of bfloat16 numbers as those of float32.

    A word of a row holds two columns: a bfloat16 number is the upper half of a float32 number.
    """
    head = "define linkonce_odr"
    attributes = f'alwaysinline nounwind "target-features"="{FEATURES["bf16"]}"'
    floats = "<16 x float>"
    orders = [[16 * (n % 2) + 8 * k + n // 2 for n in range(LANES)] for k in range(2)]
    ordered = [
        f"""
{head} {floats} @st_alternate_{k}_bf16({floats} %x0, {floats} %x1) {attributes} {{
  %r = shufflevector {floats} %x0, {floats} %x1, <16 x i32> {_numbers(order)}
  ret {floats} %r
}}"""
        for k, order in enumerate(orders)
    ]
    return f"""
{head} i32 @st_wide_bf16(ptr %at) {attributes} {{
  %x = load i16, ptr %at, align 1
  %w = zext i16 %x to i32
  %y = shl i32 %w, 16
  ret i32 %y
}}
{head} {WORD} @st_even_bf16({WORD} %x) {attributes} {{
  %y = shl {WORD} %x, {_numbers([16] * LANES)}
  ret {WORD} %y
}}
{head} {WORD} @st_odd_bf16({WORD} %x) {attributes} {{
  %y = and {WORD} %x, {_numbers([-65536] * LANES)}
  ret {WORD} %y
}}
{head} {floats} @st_fma_bf16({floats} %acc, i32 %word, {WORD} %b) {attributes} {{
  %one = insertelement {WORD} poison, i32 %word, i64 0
  %all = shufflevector {WORD} %one, {WORD} poison, <16 x i32> zeroinitializer
  %x = bitcast {WORD} %all to {floats}
  %y = bitcast {WORD} %b to {floats}
  %r = call {floats} @llvm.fmuladd.v16f32({floats} %x, {floats} %y, {floats} %acc)
  ret {floats} %r
}}
declare {floats} @llvm.fmuladd.v16f32({floats}, {floats}, {floats})""" + "".join(ordered)


def gather_function(name: str, element: str, lanes: int, bits: int) -> tuple[str, str]:
    """Return the function that gathers `lanes` elements of an LLVM type by subscripts of so many bits.

    The second text declares what it calls: once in a module, although several functions may call it.
    """
    vector, pointers, mask = f"<{lanes} x {element}>", f"<{lanes} x ptr>", f"<{lanes} x i1>"
    code = {"float": "f32", "double": "f64"}.get(element, element)
    callee = f"@llvm.masked.gather.v{lanes}{code}.v{lanes}p0"
    every = ", ".join(["i1 true"] * lanes)
    function = f"""
define linkonce_odr {vector} @{name}(ptr %base, <{lanes} x i{bits}> %at) alwaysinline nounwind {{
  %places = getelementptr {element}, ptr %base, <{lanes} x i{bits}> %at
  %r = call {vector} {callee}({pointers} %places, i32 {NATURAL[code[1:]]}, {mask} <{every}>, {vector} poison)
  ret {vector} %r
}}"""
    return function, f"declare {vector} {callee}({pointers}, i32 immarg, {mask}, {vector})"


def _few(kind: str, attributes: str) -> str:
    """Return the function that loads 16 columns of the rows of a group, and interleaves them in the columns' order."""
    bits = 16 if kind == "bf16" else 8
    group, row, code = 32 // bits, f"<16 x i{bits}>", f"v16i{bits}"
    parameters = ", ".join([f"ptr %at{n}" for n in range(group)] + [f"i32 %mask{n}" for n in range(group)])
    lines = []
    for n in range(group):
        lines += [
            f"%narrow{n} = trunc i32 %mask{n} to i16",
            f"%bits{n} = bitcast i16 %narrow{n} to <16 x i1>",
            f"%x{n} = call {row} @llvm.masked.load.{code}.p0(ptr %at{n}, i32 1, <16 x i1> %bits{n}, "
            f"{row} zeroinitializer)",
        ]
    sides, width = ["%x0", "%x1"], 16
    if group > len(sides):
        for n, (a, b) in enumerate((("%x0", "%x1"), ("%x2", "%x3"))):
            lines.append(f"%j{n} = shufflevector {row} {a}, {row} {b}, <32 x i32> {_numbers(list(range(32)))}")
        sides, width = ["%j0", "%j1"], 32
    source, order = f"<{width} x i{bits}>", [16 * n + column for column in range(16) for n in range(group)]
    lines.append(f"%z = shufflevector {source} {sides[0]}, {source} {sides[1]}, <{16 * group} x i32> {_numbers(order)}")
    lines.append(f"%r = bitcast <{16 * group} x i{bits}> %z to {WORD}")
    body = "\n  ".join(lines)
    return f"""
define linkonce_odr {WORD} @st_few_{kind}({parameters}) {attributes} {{
  {body}
  ret {WORD} %r
}}
declare {row} @llvm.masked.load.{code}.p0(ptr, i32 immarg, <16 x i1>, {row})"""


def _ordered(kind: str, acc: str, attributes: str) -> list[str]:
    """Return the functions ``st_order_K``: the K-th 16 columns of the sums over interleaved rows."""
    parts = 2 if kind == "bf16" else 4
    names = [f"%x{n}" for n in range(parts)]
    element = acc[6:-1]
    out = []
    for k in range(parts):
        lanes = range(k * 4 // parts, (k + 1) * 4 // parts) if parts == 2 else (k,)
        order = [16 * part + 4 * lane + n for lane in lanes for part in range(parts) for n in range(4)]
        joins, joined, kind_now = [], names, 16
        if parts == 4:
            for n in (0, 2):
                numbers = _numbers(list(range(32)))
                joins.append(f"  %j{n} = shufflevector {acc} {names[n]}, {acc} {names[n + 1]}, <32 x i32> {numbers}")
            joined, kind_now = ["%j0", "%j2"], 32
        source = f"<{kind_now} x {element}>"
        arguments = ", ".join(f"{acc} {name}" for name in names)
        out.append(
            f"define linkonce_odr {acc} @st_order_{k}_{kind}({arguments}) {attributes} {{\n"
            + "\n".join(joins)
            + f"\n  %r = shufflevector {source} {joined[0]}, {source} {joined[1]}, <16 x i32> {_numbers(order)}\n"
            f"  ret {acc} %r\n}}"
        )
    return out


__all__ = [
    "BYTES",
    "IMPORT",
    "LANES",
    "TYPES",
    "attributes",
    "define",
    "function_name",
    "functions",
    "gather_function",
    "reading",
    "row_functions",
    "tile_functions",
    "widening_functions",
]
