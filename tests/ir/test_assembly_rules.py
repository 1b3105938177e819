# SPDX-License-Identifier: Apache-2.0
"""What is said of unions, intersections and computed axes that cannot be."""

from __future__ import annotations

import re

import pytest
from tvm.script import sparsetir as T  # noqa: F401  what the texts below are written in

import sparsetir
from sparsetir.errors import SparseTIRError

HEAD = """
@T.prim_func
def wrong(a: T.handle, b: T.handle, c: T.handle, d: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
          m: T.int32, n: T.int32, p: T.int32):
    I = T.dense_fixed(m)
    N = T.dense_fixed(n)
    JA = T.sparse_variable(I, n, (ap, ai))
    JB = T.sparse_variable(I, {length}, (bp, bi))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, JA), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    D = T.match_sparse_buffer(d, ({over}), "float32")
"""


def refuse(body: str, sentence: str, rule: str = "", *, length: str = "n", over: str = "I,") -> None:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    refuse_text(HEAD.format(length=length, over=over) + lines + "\n", sentence, rule)


def refuse_text(text: str, sentence: str, rule: str = "") -> None:
    with pytest.raises(SparseTIRError, match=re.escape(sentence)) as caught:
        sparsetir.parse(text)
    assert not rule or f"[{rule}]" in str(caught.value)


def add(
    entries: str, kinds: str = "SS", names: str = "i, j", value: str = "A[i, j] + B[i, j]", at: str = "i, j"
) -> str:
    return (
        f'with T.sp_iter([{entries}], "{kinds}", "add") as [{names}]:\n    C[{at}] = {value}\n    D[i] = T.float32(1)'
    )


# ---------------------------------------------------------------------------------------------- unions, intersections


def test_members_are_several():
    refuse(add("I, T.union(JA)"), "T.union takes two axes or more, got 1; list a single axis by itself")
    refuse(add("I, T.intersect()"), "T.intersect takes two axes or more, got 0")


def test_members_are_axes():
    refuse(add("I, T.union(JA, n)"), "every item of a T.union must be an axis declared earlier in this function")


def test_members_have_one_length():
    sentence = "the axes of T.union must have one length, got JA has n, JB has p; declare both with the same size"
    refuse(add("I, T.union(JA, JB)"), sentence, length="p")


def test_members_store_coordinates():
    refuse(add("I, T.union(JA, N)"), "with the dense axis N it is all of them: list N alone")
    refuse(add("I, T.intersect(JA, N)"), "with the dense axis N it adds nothing: leave N out")
    refuse(add("I, T.union(JA, J)"), "T.union walks coordinates that are stored, but J is computed here; list J itself")


def test_members_stand_below_their_parents():
    refuse(add("T.union(JA, JB), I", names="j, i"), "JA is listed before its parent I; list I first")
    refuse(add("I, T.union(JA, T.attach(JB, JA))"), "T.attach(JB, JA) is listed before the axis it is attached to, JA")


def test_a_merge_has_one_letter():
    refuse(add("I, T.union(JA, JB)", "SSS"), "sp_iter iterates 2 axes but 'SSS' has 3 letters; give one per axis")


def test_a_merge_stands_in_a_list():
    refuse("D[0] = T.union(JA, JB)", "T.union belongs into the list of an sp_iter: T.sp_iter([.., T.union(..)], ..)")


def test_a_union_of_lists_of_coordinates_is_refused():
    text = """
@T.prim_func
def wrong(a: T.handle, b: T.handle, y: T.handle, ra: T.handle, ca: T.handle, rb: T.handle, cb: T.handle, m: T.int32):
    IA = T.sparse_fixed(None, m, ra, unique=False)
    JA = T.singleton(IA, m, ca)
    IB = T.sparse_fixed(None, m, rb, unique=False)
    JB = T.singleton(IB, m, cb)
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (IA, JA), "float32")
    B = T.match_sparse_buffer(b, (IB, JB), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([T.union(IA, IB), T.union(JA, JB)], "SR", "lists") as [i, j]:
        Y[i] = Y[i] + A[i, j] + B[i, j]
"""
    sentence = "T.union(IA, IB) visits repeated coordinates of IA one by one, and JA below each; give rows once each"
    refuse_text(text, sentence, "merge-members")


# ---------------------------------------------------------------------------------------------- assembled axes

STORED = add("I, T.union(JA, JB)") + "\n"


def test_an_operand_does_not_lie_over_a_computed_axis():
    sentence = "D lies over J, which is computed, and nothing stores to it; an operand lies over axes that are given"
    body = 'with T.sp_iter([I, J], "SS", "add") as [i, j]:\n    C[i, j] = D[i, j] * A[i, j]'
    refuse(body, sentence, over="I, J")


def test_results_are_handles_and_no_scratch():
    refuse('E = T.alloc_sparse_buffer((I, J), "float32")', "scratch over the assembled axis J is not supported")
    text = HEAD.replace("c: T.handle", 'c: T.Buffer((4,), "float32")').format(length="n", over="I,")
    with pytest.raises(SparseTIRError, match=re.escape("a result over J is a T.handle parameter, got c")):
        sparsetir.parse(text + "    T.evaluate(0)\n")


def test_a_computed_axis_takes_its_length_alone():
    refuse("K = T.sparse_assembled(I, (n, p))", "a sparse_assembled axis takes its length alone")


def test_given_axes_do_not_hang_from_computed_ones():
    sentence = "axis K hangs from J, whose positions are computed; below it there are only T.sparse_assembled axes"
    refuse("K = T.sparse_fixed(J, (n, 2), lambda i, j, s: s)\n" + STORED, sentence)


def test_a_result_has_one_pattern():
    body = (
        'with T.sp_iter([I, T.union(JA, JB)], "SS", "add") as [i, j]:\n    D[i, j, j] = A[i, j]\n    C[i, j] = A[i, j]'
    )
    declared = "I, J, K"
    text = HEAD.replace("    D = ", "    K = T.sparse_assembled(None, n)\n    D = ").format(length="n", over=declared)
    sentence = "D lies over J and K, two patterns that are computed apart; hang one axis from the other"
    refuse_text(text + "\n".join(f"    {line}" for line in body.splitlines()) + "\n", sentence, "computed-axes")


def test_results_are_read_by_the_statement_that_stores_them():
    later = 'with T.sp_iter([I, JA], "SR", "sum") as [i, j]:\n    D[i] = D[i] + C[i, j]'
    refuse(STORED + later, "C is read before its pattern is known: it lies over J", "computed-reads")
    other = add("I, T.union(JA, JB)", value="A[i, j] + C[i, j - 1]")
    refuse(other, "C is read at another element than the one that is stored: its pattern is being computed")


def test_rows_are_iterated_first():
    body = add("N, T.union(JA, JB)", names="k, j", value="T.float32(1)", at="j, k")
    refuse(body.replace("D[i]", "D[k]"), "JA is iterated but its parent I is not")
    body = (
        'with T.sp_iter([I, T.union(JA, JB)], "SS", "turn") as [i, j]:\n    C[j, i] = A[i, j]\n    D[i] = T.float32(0)'
    )
    sentence = (
        "C is stored row by row along I, but i is iterated before j, whose axis lies below; declare operands that are "
        "stored along j first, as csc in place of csr, or store the result untransposed"
    )
    refuse(body, sentence, "rows-first")
    body = add("N, I, T.union(JA, JB)", "RSS", "k, i, j")
    refuse(body, "C is stored row by row along I, but k is iterated before i; list the axis of i first")
    refuse(add("I, JA", at="i + 1, j"), "the row of C along I must be a variable of the sp_iter, got i + 1")


def test_coordinates_that_are_kept_are_spatial():
    refuse(add("I, T.union(JA, JB)", "SR"), "C keeps a coordinate for each j, whose letter is R; write S")


def test_a_computed_axis_in_the_list_needs_operands():
    refuse(add("I, J", value="T.float32(1)"), "no operand says which coordinates j of J has: none stores coordinates")
    refuse(add("I, J, JA", "SSS", "i, j, k", at="i, k"), "J is listed, but nothing is stored at j; store C[i, j]")
    refuse(
        add("I, T.attach(J, I)"), "T.attach(J, I) walks positions that are stored, but those of J are computed; list J"
    )


def test_operands_are_placed_before_the_computed_axis():
    text = """
@T.prim_func
def wrong(a: T.handle, b: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle, m: T.int32):
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, m, (ap, ai))
    L = T.dense_fixed(m)
    JB = T.sparse_variable(L, m, (bp, bi))
    J = T.sparse_assembled(I, m)
    A = T.match_sparse_buffer(a, (I, K), "float32")
    B = T.match_sparse_buffer(b, (L, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, J, K], "SSR", "product") as [i, j, k]:
        with T.init():
            C[i, j] = 0
        C[i, j] = C[i, j] + A[i, k] * B[k, j]
"""
    sentence = "the coordinates j of B depend on k, which is iterated after it; list the axis of k before J"
    refuse_text(text, sentence, "computed-operands")
