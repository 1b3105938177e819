# SPDX-License-Identifier: Apache-2.0
"""TVM's diagnostics of a script in the words of the dialect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

# What TVM says -> what a user can act on.
HINTS = [
    (
        r"Undefined variable: (\w+)",
        r"\1 is not defined here: an axis or a buffer is declared before it is used, "
        "an iteration variable lives inside its own sp_iter only; several are a list, `as [i, j]` with brackets",
    ),
    (
        r"too many values to unpack \(expected (\d+)\)",
        r"expected one name for each value, found \1 name(s) for more values; "
        "an sp_iter gives one variable per axis: `as [i, j]` for two axes",
    ),
    (
        r"not enough values to unpack \(expected (\d+), got (\d+)\)",
        r"expected one name for each of \2 value(s), found \1 names; "
        "an sp_iter gives one variable per axis: `as [i, j]` for two axes",
    ),
    (
        r".*BufferVar (\w+) is (\d+)-dimensional, cannot be indexed with the (\d+)-dimensional.*",
        r"expected one subscript for each of the \2 dimensions of \1, found \3",
    ),
    (
        r".*\((\d+) vs\. (\d+)\) : Too many indices for a \d+-dimensional buffer",
        r"expected one subscript for each of the \2 dimensions of the buffer, found \1",
    ),
    (
        r"Mismatched type on argument #0 when calling: `\S*BufferStore\(.*",
        "only a buffer can be stored to, found another kind of name; "
        "a T.handle parameter or an axis becomes one by T.match_sparse_buffer",
    ),
    (
        r"Mismatched type on argument #1 when calling: `\S*BufferStore\(.* got `ir.TensorRegion`"
        r"|TensorRegion is not a primitive operand.*",
        "a buffer is read with fewer subscripts than it has dimensions, or with a slice `:`; "
        "give one subscript per axis, an iteration variable or a number",
    ),
    (
        r"Mismatched type on argument #1 when calling: `\S*BufferStore\(.* got `(?:ffi\.)?(\w+)`",
        r"the value stored must be a number or an expression, found \1",
    ),
    (
        r"Mismatched type on argument #2 when calling: `\S*BufferStore\(.*",
        "a subscript must be an integer expression, found a list; "
        "an sp_iter over one axis is written `as [i]`, not `as i`",
    ),
    (
        r"T\.init must be called at the top of a T\.sblock\(\).*",
        "T.init belongs at the top of an sp_iter (or of a T.sblock), found it outside of one; "
        "a condition stands inside",
    ),
    (
        r"(?:ValueError: )?Unexpected type for TIR Arg: ffi.String",
        "the annotation of a parameter cannot be evaluated; "
        "if it quotes a size, no Python variable may have the same name",
    ),
    (
        r"T\.match_buffer must be called at the top of a PrimFunc.*",
        "a handle becomes a buffer at the top of the function; "
        "move its declaration before any T.decl_buffer, loop or block, or declare the parameter as T.Buffer",
    ),
    (
        r"Mismatched type on argument #1 when calling: `script\.ir_builder\.tirx\.Arg\(.*",
        "a parameter is annotated with T.handle, T.Buffer, or the type of a size or number such as T.int32",
    ),
    (
        r"Cannot use and / or / not operator to Expr, hint: .*",
        "Python's max, min, if, and, or and not would have to know the value now; "
        "write T.max, T.min, T.if_then_else, T.And, T.Or or T.Not",
    ),
    (
        r".*\((?:a|b|condition)_ty\.MatchesCode\(DLDataTypeCode::kDLBool\)\) is false: .*",
        "and, or, not and T.Select take conditions, found a number; compare it first, as by a > 0",
    ),
    (
        r"loop of ufunc does not support argument \d of type \w+ which has no callable (\w+) method",
        r"numpy's functions take numbers, found an expression; write T.\1",
    ),
    (
        r"must be real number, not \w+",
        "Python's functions of numbers take numbers, found an expression; write T.exp, T.sqrt and so on",
    ),
    (
        r"bad operand type for abs\(\): '\w+'",
        "Python's abs takes numbers, found an expression; write T.abs",
    ),
    (
        r"type \w+ doesn't define __round__ method",
        "Python's round takes numbers, found an expression; write T.round",
    ),
    (
        r"(float|int)\(\) argument must be a string.*",
        r"Python's \1 takes numbers, found an expression; convert it by T.float32, T.int32 and so on",
    ),
    (
        r"unsupported operand type\(s\) for \*\* or pow\(\): .*|.*power only applies to float",
        "powers are T.pow(a, b), of float16, float32 or float64; a square is a * a",
    ),
    (
        r".*a\.ty\(\)\.MatchesCode\(DLDataTypeCode::kDLInt, DLDataTypeCode::kDLUInt\)\) is false: (.*)",
        r"//, % and the like take integers, found \1; of floats, T.floor(a / b) rounds a quotient",
    ),
    (
        r"TVM supports multiple types of integer divisions.*",
        "/ divides floats; of integers write a // b, or convert them first: T.float32(a) / T.float32(b)",
    ),
    (
        r".*: Type ir\.(?:PointerType|PrimType) does not support subscript",
        "a handle, a size or a number has no elements: an index array is passed whole, as in (indptr, indices), "
        "and is read in a body once it is declared as T.Buffer",
    ),
    (
        r"(?:.*: )?(\S+) exceeds range of bool",
        r"a bool holds True or False, found the number \1; write T.bool(True), or compare it, as by x != 0",
    ),
    (
        r"where\(\) takes 1 positional argument but \d were given",
        "a choice of two values is T.if_then_else(condition, a, b)",
    ),
    (
        r".*if_then_else only accept the condition.*",
        "a condition must be a comparison, found another value; compare it, as by a > 0",
    ),
    (
        r"Mismatched type on argument #\d when calling: .* but got `ir\.Var`.*",
        "a whole buffer or a handle stands where a number is expected; give one subscript for each axis",
    ),
    (
        r"Check failed: \(.*\) is false: (\S.*)",
        r"\1",
    ),
    (
        r"",
        "a program returns nothing: its results are the buffers that it stores to",
    ),
    (
        r"Expect the for loop to be one of the following: (.*)",
        r"a for loop takes one of \1; a sparse iteration is a `with` statement: `with T.sp_iter(...) as [i, j]:`",
    ),
]

# What other libraries and versions call something -> what it is here.
OTHER_NAMES = {
    "maximum": "T.max(a, b)",
    "minimum": "T.min(a, b)",
    "power": "T.pow(a, b)",
    "relu": "T.max(a, 0)",
    "clip": "T.min(T.max(a, low), high)",
    "sum": "an iteration with the letter R and `C[i] = C[i] + ...`",
    "where": "T.if_then_else(condition, a, b)",
    "ragged": "T.dense_variable(parent, (length, nnz), indptr)",
    "dynamic": "T.dense_variable(parent, (length, nnz), indptr)",
    "dense": "T.dense_fixed(length)",
    "compressed": "T.sparse_variable(parent, (length, nnz), (indptr, indices))",
    "axis": "T.dense_fixed, T.dense_variable, T.sparse_fixed, T.sparse_variable, T.singleton or T.sparse_assembled",
    "block": "T.sblock",
}
UNKNOWN = re.compile(r"(?:module 'sparsetir\.script(?:\.parser)?'|type object 'sp') has no attribute '(\w+)'")


def explain(diagnostic: str, names: Sequence[str]) -> str:
    """Translate the first line of TVM's diagnostic to the words of the dialect; `names` are those of its module."""
    first, newline, remainder = diagnostic.partition("\n")
    message = first.removeprefix("error: ")
    for pattern, sentence in HINTS:
        if re.fullmatch(pattern, message):
            return f"error: {re.sub(pattern, sentence, message)}{newline}{remainder}"
    unknown = UNKNOWN.fullmatch(message)
    if unknown is None:
        return diagnostic
    return f"error: T has no name {unknown[1]}{_instead(unknown[1], names)}{newline}{remainder}"


def _instead(name: str, names: Sequence[str]) -> str:
    if name in OTHER_NAMES:
        return f"; write {OTHER_NAMES[name]}"
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean T.{close[0]}?" if close else ""


__all__ = ["explain"]
