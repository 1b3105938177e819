# SPDX-License-Identifier: Apache-2.0
"""Formats as one line of text: both ways, stored in, computed with, or refused with the reason."""

from __future__ import annotations

import pickle
from itertools import permutations, product

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import pairwise
from sparsetir import SparseTensor, formats
from sparsetir.errors import ArgumentError
from sparsetir.formats.encoding import KINDS, Encoding, LevelText, parse

CUBE = np.where(np.random.default_rng(0).random((4, 5, 6)) < 0.2, np.random.default_rng(1).random((4, 5, 6)), 0)
ORDERS, KINDS_OF_LEVELS = list(permutations("ijk")), [("dense", "compressed")] * 3


def text_of(order: tuple[str, ...], *kinds: str) -> str:
    return "(i, j, k) -> (" + ", ".join(f"{c} : {kind}" for c, kind in zip(order, kinds, strict=True)) + ")"


ALL = [text_of(*each) for each in product(ORDERS, *KINDS_OF_LEVELS)]
SOME = [text_of(*each) for each in pairwise(ORDERS, *KINDS_OF_LEVELS)]


def drawn(seed: int) -> Encoding:
    """Any encoding that the grammar has, storable or not."""
    rng = np.random.default_rng(seed)
    order = int(rng.integers(1, 5))
    levels = []
    for dim in rng.permutation(order):
        whole = ("", 0) if rng.random() < 0.6 else ("floordiv", int(rng.integers(1, 9)))
        parts = [whole] if not whole[0] else [whole, ("mod", whole[1])]
        for part, block in parts:
            kind = str(rng.choice(KINDS))
            ratio = (1, 4) if kind == "structured" else ()
            held = tuple(p for p in ("nonunique", "nonordered", "soa") if rng.random() < 0.2)
            levels.append(LevelText(int(dim), kind, part, block, ratio=ratio, properties=held))
    widths = [int(w) for w in rng.choice((0, 8, 16, 32, 64), 2)]
    names = tuple("ijkl"[:order]) if rng.random() < 0.5 else ()
    return Encoding(order, tuple(levels), *widths, names=names)


@pytest.mark.parametrize("seed", range(200))
def test_texts_round_trip(seed: int) -> None:
    encoding = drawn(seed)
    assert parse(encoding.mlir) == parse(str(encoding)) == encoding
    assert str(parse(str(encoding))) == str(encoding)
    try:
        fmt = sparsetir.format(str(encoding))
    except ArgumentError:
        return
    again = sparsetir.format(SparseTensor.from_dense(np.ones((3,) * encoding.order), fmt).encoding().mlir)
    assert again.resolve(encoding.order, "int32") == fmt.resolve(encoding.order, "int32")


def test_texts_of_mlir() -> None:
    levels = "map = (i, j) -> (i : dense, j : compressed), posWidth = 64, crdWidth = 64"
    text = f"#CSR = #sparse_tensor.encoding<{{\n  {levels} }}>"
    assert sparsetir.format(text) == formats.csr(idtype="int64")
    assert parse("(d0, d1) -> (d0 : dense, d1 : compressed)").mlir == (
        "#sparse_tensor.encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }>"
    )
    assert SparseTensor.from_dense(np.eye(2), "coo").encoding().levels[1].properties == ("soa",)


@pytest.mark.parametrize("text", ALL)
def test_all_orders_of_three_levels(text: str) -> None:
    S = SparseTensor.from_dense(CUBE, text)
    np.testing.assert_array_equal(S.to_dense(), CUBE)
    assert S.nnz == np.count_nonzero(CUBE)
    assert sparsetir.format(str(parse(text))).resolve(3, "int32") == S.format
    assert str(S.encoding()).partition("->")[2].count("dense") == text.count("dense")
    empty = SparseTensor.from_dense(np.zeros((2, 0, 3)), text)
    assert empty.to_dense().shape == (2, 0, 3)
    assert pickle.loads(pickle.dumps(S)).format == S.format


@pytest.mark.slow
@pytest.mark.shared(2)
@pytest.mark.parametrize("text", SOME)
def test_computing_with_all_orders(text: str) -> None:
    S, X = SparseTensor.from_dense(CUBE, text), np.random.default_rng(2).random((6, 3))
    found = sparsetir.einsum("ijk,kr->ijr", S, X, result="dense")
    np.testing.assert_allclose(found, np.einsum("ijk,kr->ijr", CUBE, X))
    scaled = sparsetir.einsum("ijk,j->ijk", S, np.arange(5.0))
    assert scaled.format == S.format
    np.testing.assert_allclose(scaled.to_dense(), CUBE * np.arange(5.0)[:, None])


MATRICES = {
    "(i, j) -> (i : dense, j : compressed)": "csr()",
    "(i, j) -> (j : dense, i : compressed)": "csc()",
    "(i, j) -> (i : compressed, j : compressed), posWidth = 32, crdWidth = 32": "dcsr()",
    "(i, j) -> (i : compressed(nonunique), j : singleton(soa))": "coo(ndim=2)",
    "(i, j) -> (i : compressed(nonunique), j : singleton)": "coo(ndim=2)",
    "(i, j) -> (i floordiv 2 : dense, j floordiv 3 : compressed, i mod 2 : dense, j mod 3 : dense)": "bsr(r=2, c=3)",
    "(i, j) -> (i / 2 : compressed, j / 2 : compressed, i % 2 : dense, j % 2 : dense)": "dbsr(r=2, c=2)",
    "(i, j) -> (i : dense, j / 4 : dense, j % 4 : structured[3, 4])": "nm(n=3, m=4)",
    "(i, j) -> (j - i : compressed, i : range)": "dia()",
    "(i, j) -> (j : compressed(nonunique), i : singleton)": "encoded(",
    "(i, j) -> (j : compressed, i : dense)": "encoded(",
    "(i, j) -> (i / 2 : dense, j : compressed, i % 2 : dense)": "encoded(",
    "(i, j) -> (j / 4 : compressed, i : compressed, j % 4 : compressed)": "encoded(",
    "(i, j) -> (i : dense, j : compressed(nonordered))": "encoded(",
    "(i, j) -> (i : dense, j : dense)": "encoded(",
}


@pytest.mark.parametrize("text", MATRICES)
def test_matrices(text: str) -> None:
    fmt = sparsetir.format(text)
    assert repr(fmt).startswith(MATRICES[text])
    A = np.where(np.random.default_rng(0).random((7, 9)) < 0.3, 1 + np.random.default_rng(1).random((7, 9)), 0)
    A[:, 4:] *= (np.arange(9) % 4 != 1)[4:]
    A[:, :4] *= np.arange(4) != 1
    S = SparseTensor.from_scipy(sp.csr_array(A), format=text)
    np.testing.assert_array_equal(S.to_dense(), A)
    np.testing.assert_array_equal(S.restore().toarray(), A)
    again = sparsetir.format(S.encoding().mlir)
    assert repr(again).partition("(")[0] == repr(fmt).partition("(")[0]
    np.testing.assert_allclose(sparsetir.einsum("ij,jk->ik", S, np.eye(9)[:, :3]), A[:, :3])
    np.testing.assert_allclose(S.sum(axis=0), A.sum(axis=0))


@pytest.mark.parametrize("text", ["(i, j) -> (i / 2 : dense, j : compressed, i % 2 : dense)",
                                  "(i, j) -> (j : compressed, i : dense)"])  # fmt: skip
def test_decomposing(text: str) -> None:
    A = sp.random_array((6, 5), density=0.4, format="csr", dtype="float32", rng=np.random.default_rng(0))
    kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": sparsetir.format(text)}))
    np.testing.assert_allclose(kernel(A=A, B=np.eye(5, dtype="float32")), A.toarray())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(i, j) -> (i : dense)", "stores dimension j not exactly once"),
        ("(i, j) -> (i : dense, j : compressed, j : dense)", "stores dimension j not exactly once"),
        ("(i, j) -> (i : dense, j / 2 : compressed)", "stores dimension j not exactly once"),
        ("(i, j) -> (i : dense, j : squeezed)", "a level is one of dense, batch"),
        ("(i, i) -> (i : dense)", "have different names"),
        ("(i, j) -> (i : dense, k : compressed)", "a level is a dimension"),
        ("(i, j) -> (i : dense, j / n : compressed, j % n : dense)", "the size of a block is a number"),
        ("(i, j) -> (i : dense, j : compressed(sorted))", "properties of a level are nonunique"),
        ("(i, j) -> (i : dense, j : compressed), width = 3", "options are posWidth"),
        ("(i, j) -> (i : dense, j : compressed), posWidth = 12", "posWidth is one of"),
        ("(i, j) -> (i : dense, j : compressed), implicitVal = 1 : f32", "what is not stored is zero"),
        ("(i, j) -> (i : dense, j : compressed), explicitVal = 1", "values are always stored"),
        ("(i, j) -> (i : dense, j : batch)", "levels of a batch come before all others"),
        ("(i, j) -> (i : dense, j : structured)", "how many are kept of how many"),
        ("(i, j) -> (i : dense, j / 4 : compressed, j % 4 : structured[2, 4])", "n of m are kept in a last level"),
        ("(i, j) -> (i : dense, j : range)", "ranges are those of diagonals"),
        ("(i, j) -> (i : dense, j - i : compressed)", "differences are those of diagonals"),
        ("(i, j) -> (i : dense, j : singleton)", "singletons follow such a level"),
        ("(i, j) -> (i : compressed(nonunique), j : compressed)", "singletons follow such a level"),
        ("(i, j) -> (i : dense, j : compressed(nonunique))", "entries with the same coordinates add up"),
        ("i -> (i : dense)", "expected an encoding such as"),
        ("nothing", "expected one of the formats"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sparsetir.format(text)


@pytest.mark.parametrize("text", ["(i, j, k) -> (i : batch, j : dense, k : compressed)",
                                  "(i, j, k) -> (k : batch, i : batch, j : compressed)",
                                  "(i, j, k) -> (i : batch, j : compressed, k : compressed)",
                                  "(i, j, k) -> (i : dense, j : compressed, k : loose_compressed)",
                                  "(i, j, k) -> (k : loose_compressed, i : dense, j : loose_compressed)"])  # fmt: skip
def test_batches_and_loose_levels(text: str) -> None:
    S = SparseTensor.from_dense(CUBE, text)
    np.testing.assert_array_equal(S.to_dense(), CUBE)
    assert S.nnz == np.count_nonzero(CUBE)
    assert S.encoding() == parse(text)
    X = np.random.default_rng(2).random((6, 3))
    found = sparsetir.einsum("ijk,kr->ijr", S, X, result="dense")
    np.testing.assert_allclose(found, np.einsum("ijk,kr->ijr", CUBE, X))
    assert SparseTensor.from_dense(np.zeros((2, 0, 3)), text).to_dense().shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("pos", "crd", "idtype"), [(8, 8, "int32"), (0, 16, "int32"), (64, 32, "int64"), (8, 64, "int64")]
)
def test_widths_are_stored_in_the_type_that_has_room_for_both(pos: int, crd: int, idtype: str) -> None:
    for levels in ("i : dense, j : compressed", "j : compressed, i : dense"):
        fmt = sparsetir.format(f"(i, j) -> ({levels}), posWidth = {pos}, crdWidth = {crd}")
        S = SparseTensor.from_dense(np.eye(300), fmt)
        assert S.idtype == idtype
        assert {a.dtype for a in S.pieces[0].arrays.values()} == {np.dtype(idtype)}
        np.testing.assert_array_equal(S.to_dense(), np.eye(300))


def test_formats_without_an_encoding() -> None:
    with pytest.raises(ArgumentError, match=r"hyb\(.*\) has no encoding"):
        SparseTensor.from_dense(np.eye(4), "hyb").encoding()
    assert sparsetir.format("csr") == formats.csr()
    assert sparsetir.format("bsr(r=2, c=2)") == formats.bsr(2, 2)
    assert sparsetir.format(formats.csr()) == formats.csr()


@pytest.mark.parametrize("kinds", product(*[("dense", "compressed")] * 4))
def test_elements_of_any_encoding_of_order_four_are_looked_up(kinds: tuple[str, ...]) -> None:
    """Dense levels between others are computed, so that guards do not stand within guards for each of them."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 3, shape).astype("float32") for shape in ((5, 4, 3), (4, 3, 3, 5)))
    levels = ", ".join(f"{mode} : {kind}" for mode, kind in zip("kilj", kinds, strict=True))
    operands = SparseTensor.from_dense(x), SparseTensor.from_dense(y, sparsetir.format(f"(i, j, k, l) -> ({levels})"))
    expression = sparsetir.einsum_expression("ikl,kmli->km", *operands, result="dense")
    kernel = sparsetir.build(sparsetir.parse(expression.script()), schedule=None)
    assert len(kernel.script(2)) < 30_000
    result = kernel(A=operands[0], B=operands[1], C=np.zeros((4, 3), "float32"))
    np.testing.assert_array_equal(result, np.einsum("ikl,kmli->km", x, y))
