# SPDX-License-Identifier: Apache-2.0
"""Index notation against numpy: right, or refused with a reason."""

from __future__ import annotations

from functools import cache, reduce
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
import torch
from each import examples, on
from sparsetir import CooTensor, SparseTensor, einsum, einsum_expression
from sparsetir.einsum import expression, subscripts
from sparsetir.einsum.planning import Value, contractions, joins, statistics
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.runtime import signature

EXTENTS = dict(zip("abcdefghijklmnrst", (4, 5, 3, 6, 4, 5, 3, 2, 9, 7, 5, 3, 4, 5, 3, 2, 2), strict=True))
JOIN = {"mul": np.multiply, "add": np.add, "max": np.maximum, "min": np.minimum}
FOLD = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def dense(value: Any) -> np.ndarray:
    """Any result as a numpy array."""
    if isinstance(value, torch.Tensor):
        return value.to_dense().numpy()
    for name in ("toarray", "to_dense"):
        if hasattr(value, name):
            return np.asarray(getattr(value, name)())
    return np.asarray(value)


def oracle(text: str, *operands: np.ndarray, how: str = "sum", combine: str = "mul") -> np.ndarray:
    """Every element of every operand, combined and reduced in float64."""
    terms = subscripts.parse(text, tuple(np.ndim(o) for o in operands))
    order = terms.output + terms.summed
    if how == "sum" and combine == "mul":
        return np.einsum(str(terms), *operands)
    spread = [np.einsum(f"{t}->{''.join(dict.fromkeys(t))}", o) for t, o in zip(terms.inputs, operands, strict=True)]
    lined = []
    for term, array in zip(terms.inputs, spread, strict=True):
        term = "".join(dict.fromkeys(term))
        held = [c for c in order if c in term]
        array = array.transpose([term.index(c) for c in held])
        lined.append(array.reshape([EXTENTS[c] if c in held else 1 for c in order]))
    joined = np.broadcast_to(reduce(JOIN[combine], lined), [EXTENTS[c] for c in order])
    last = tuple(range(len(terms.output), len(order)))
    return FOLD[how].reduce(joined, axis=last) if last else joined


def drawn(letters: str, seed: int, density: float = 0.3, fill: float = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = [EXTENTS[c] for c in letters]
    return np.where(rng.random(shape) < density, rng.uniform(-1, 1, shape), fill)


def stored(array: np.ndarray, kind: str) -> Any:
    """A dense array in a class: r(ows), c(olumns), l(ist of coordinates), t(ensor), d(ense)."""
    if kind == "d":
        return array
    if kind == "t":
        return SparseTensor.from_dense(array)
    if kind == "l" or array.ndim != 2:
        return CooTensor.from_dense(array) if array.ndim != 2 else sp.coo_array(array)
    return sp.csr_array(array) if kind == "r" else sp.csc_array(array)


# The lists of opt_einsum's tests and paper examples, TACO's and Finch's kernels, and requests to sparse libraries;
# after each text the class of each operand.
EXPRESSIONS = """
ij,j->i rd | ij,j->i cd | ij,j->i ld | ij,i->j rd | ji,j->i rd | ij,jk->ik rd | ij,jk->ik cd | ij,jk->ki rd
ij,kj->ik rd | ij,ik->jk rd | ij,jk->ik dr | ij,jk->ik dc | ij,ij->ij rd | ij,i->ij rd | ij,j->ij cd | ij->ji r
ij->ij r | ij->i r | ij->j c | ij-> r | ii-> r | ii->i r | ij,ij-> rr | ij,ij-> rd | i,ij,j-> drd | ij,ik,jk->ij rdd
ij,ik,kj->ij cdd | ij,ik,jk->ji rdd | ij,jk,kl->il rdd | ij,jk,kl->il drd | ij,jk,kl->il ddr | ij,jk,kl,lm->im rddd
ij,jk,kl,lm->im drdr | ij,jk,kl,lm,mn->in rdddd | ijk,jr,kr->ir tdd | ijk,jr,kr->ir ldd | ijk,ir,kr->jr tdd
ijk,k->ij td | ijk,k->ij ld | ijk,k->ji td | ijk,kr->ijr ld | ijk,ir,js,kt->rst lddd | ijk,ijk-> tt | ijk->k l
ijk,j,k->i tdd | ijkl,jr,kr,lr->ir tddd | ijk,ljk->il td | ab,bc->ac rr | ab,bc,cd->ad rrd | ab,cb->ac rr
ab,ac,cb->ab rrr | ab,bc,ca-> rrr | abc,bad-> td | ea,fb,abcd,gc,hd->efgh ddtdd | bdik,acaj,ikab,ajac,ikbd-> ddldd
cd,bdhe,aidb,hgca,gc,hgibcd,hgac-> rdddddd
abhe,hidj,jgba,hiab,gab-> ddddd | eb,cb,fb->cef rdd
dd,fb,be,cdb->cef drdd
bca,cdb,dbf,afc-> dldd | dcc,fce,ea,dbf->ab ddrd | fdf,cdd,ccd,afe->ae dddl | abcd,ad ld | ed,ff,cd,dbe,fb rdddd
abc,abc ld | efc,dbc,acf,fd->abe dddr | ba,ac,da->bcd rdd | ecb,fef,bad,ed->ac dddr | i,i-> ld | i,i->i ld | ,ij->ij dr
"""
EVERY = [case.split() for line in EXPRESSIONS.strip().splitlines() for case in line.split("|")]


def terms_of(text: str, kinds: str) -> tuple[str, ...]:
    return tuple(text.partition("->")[0].split(","))


@pytest.mark.parametrize(("text", "kinds"), EVERY, ids=lambda v: v)
def test_expressions(text: str, kinds: str) -> None:
    pairs = zip(terms_of(text, kinds), kinds, strict=True)
    arrays = [drawn(term, n, 0.3 if kind != "d" else 1.0) for n, (term, kind) in enumerate(pairs)]
    operands = [stored(a, k) for a, k in zip(arrays, kinds, strict=True)]
    found = einsum(text, *operands)
    expected = np.einsum(text, *arrays)
    assert np.shape(dense(found)) == expected.shape
    np.testing.assert_allclose(dense(found), expected, atol=1e-12)
    again = einsum(text, *operands)
    np.testing.assert_array_equal(dense(again), dense(found))


RINGS = [
    ("sum", "mul", 0), ("max", "add", -np.inf), ("min", "add", np.inf), ("max", "min", -np.inf), ("min", "max", np.inf),
    ("max", "mul", 0), ("min", "mul", 0), ("prod", "mul", 1), ("sum", "add", 0), ("max", "max", 0), ("sum", "mul", 2),
    ("prod", "mul", 0), ("max", "add", 0),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("how", "combine", "fill"), RINGS)
@pytest.mark.parametrize(
    ("text", "kinds"), [("ij,j->i", "rd"), ("ij,jk->ik", "cd"), ("ij->i", "r"), ("ij,ij->i", "rr")]
)
def test_semirings(text: str, kinds: str, how: str, combine: str, fill: float) -> None:
    terms = terms_of(text, kinds)
    pairs = enumerate(zip(terms, kinds, strict=True))
    arrays = [drawn(t, n, 1.0 if k == "d" else 0.4, 0 if k == "d" else fill) for n, (t, k) in pairs]
    operands = []
    for array, kind in zip(arrays, kinds, strict=True):
        if kind == "d":
            operands.append(array)
            continue
        coords = np.nonzero(array != fill)
        made = sp.coo_array((array[coords], coords), array.shape)
        operands.append(made.tocsr() if kind == "r" else made.tocsc())
    found = einsum(text, *operands, reduce=how, combine=combine, fill=fill)
    np.testing.assert_allclose(dense(found), oracle(text, *arrays, how=how, combine=combine), atol=1e-12)


@cache
def matrix(dtype: str) -> sp.csr_array:
    rng = np.random.default_rng(3)
    return sp.csr_array(np.where(rng.random((6, 5)) < 0.4, rng.integers(1, 3, (6, 5)), 0).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "int8", "uint8", "bool"])
def test_dtypes(dtype: str) -> None:
    A, x = matrix(dtype), np.ones(5, dtype)
    found = einsum("ij,j->i", A, x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.einsum("ij,j->i", A.toarray(), x))


def test_dtypes_meet_as_those_of_numpy_do() -> None:
    A = matrix("float32")
    assert einsum("ij,j->i", A, np.ones(5)).dtype == "float64"
    assert einsum("ij,j->i", A, np.ones(5, "int64")).dtype == "float64"
    assert einsum("ij,j->ij", A, np.ones(5)).dtype == "float64"
    assert einsum("ij,j->i", matrix("bool"), np.ones(5, "int32")).dtype == "int32"


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (1, 1), (3, 4)])
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_degenerate(shape: tuple[int, int], idtype: str) -> None:
    A = sp.csr_array(shape, dtype="float64")
    A.indptr, A.indices = A.indptr.astype(idtype), A.indices.astype(idtype)
    X = np.ones((shape[1], 2))
    np.testing.assert_array_equal(einsum("ij,jk->ik", A, X), np.zeros((shape[0], 2)))
    assert einsum("ij,ik,jk->ij", A, np.ones((shape[0], 3)), np.ones((shape[1], 3))).shape == shape
    assert einsum("ij->", A) == 0
    assert einsum("ij->i", A, reduce="max", fill=-np.inf).tolist() == [-np.inf] * shape[0]


@pytest.mark.parametrize("kind", ["r", "c"])
@pytest.mark.parametrize("text", ["ij,jk->ik", "ij,jk->ki", "ij,jk->", "ij,ik,jk->ij", "ij,ik->jk", "ij->i"])
def test_operands_of_more_elements_than_32_bits_count(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound of few elements in place of 2**31: kernels with 64-bit offsets take over."""
    terms = text.split("->")[0].split(",")
    arrays = [drawn(term, n, 0.4 if n == 0 else 1.0) for n, term in enumerate(terms)]
    operands = [stored(array, "d" if n else kind) for n, array in enumerate(arrays)]
    monkeypatch.setattr(signature, "LARGEST_INT32", 3)
    np.testing.assert_allclose(dense(einsum(text, *operands)), np.einsum(text, *arrays), atol=1e-12)


def test_unsorted_and_repeated_entries() -> None:
    A = sp.csr_array((np.array([1.0, 2, 3, 4]), np.array([2, 0, 2, 1]), np.array([0, 3, 4])), (2, 3))
    np.testing.assert_allclose(einsum("ij,j->i", A, np.arange(3.0)), A.toarray() @ np.arange(3.0))
    L = sp.coo_array((np.array([1.0, 2, 3]), (np.array([1, 0, 1]), np.array([1, 0, 1]))), (2, 2))
    np.testing.assert_allclose(dense(einsum("ij,j->ij", L, np.array([2.0, 5.0]))), L.toarray() * [2.0, 5.0])


def test_nan_is_met_where_it_is_stored() -> None:
    A = sp.csr_array(np.array([[np.nan, 0], [1, 2]]))
    found = einsum("ij,j->i", A, np.array([1.0, np.inf]))
    assert np.isnan(found[0])
    assert found[1] == np.inf


@pytest.mark.slow
def test_class_of_the_result() -> None:
    A, X = matrix("float32"), np.ones((5, 2), "float32")
    Y = np.ones((6, 2), "float32")
    assert type(einsum("ij,ik,jk->ij", A, Y, X)) is sp.csr_array
    assert type(einsum("ij,ik,jk->ij", sp.csr_matrix(A), Y, X)) is sp.csr_matrix
    assert type(einsum("ij->ji", A)) is sp.csc_array
    assert type(einsum("ij,ik,jk->ij", SparseTensor.from_any(A), Y, X)) is SparseTensor
    assert type(einsum("ij,jk->ik", A, torch.from_numpy(X))) is torch.Tensor
    B = torch.from_numpy(A.toarray()).to_sparse_csr()
    found = einsum("ij,ik,jk->ij", B, Y, X)
    assert found.layout == torch.sparse_csr
    np.testing.assert_allclose(dense(found), A.toarray() * (Y @ X.T))
    assert einsum("ij,jk->ik", B, X).layout == torch.strided
    T = torch.from_numpy(drawn("ijk", 1)).to_sparse_coo()
    np.testing.assert_allclose(dense(einsum("ijk,k->ij", T, np.ones(5))), dense(T).sum(2), atol=1e-12)
    assert isinstance(einsum("ij->", A), np.floating)
    assert type(einsum("ij,ik,jk->ij", A, Y, X, result="dense")) is np.ndarray


def test_ellipsis_and_broadcasting() -> None:
    A = matrix("float64")
    X = np.random.default_rng(1).random((2, 3, 5))
    np.testing.assert_allclose(einsum("ij,...j->...i", A, X), np.einsum("ij,...j->...i", A.toarray(), X))
    np.testing.assert_allclose(einsum("ij,...j", A, X), np.einsum("ij,...j", A.toarray(), X))
    row = np.arange(5.0)[None]
    np.testing.assert_allclose(dense(einsum("ij,ij->ij", A, row)), A.toarray() * row)
    one = sp.csr_array(np.arange(5.0)[None])
    np.testing.assert_allclose(dense(einsum("ij,ij->ij", one, A.toarray())), A.toarray() * row)
    np.testing.assert_allclose(dense(einsum("...,...->...", A, 2.0)), 2 * A.toarray())


def test_letters_that_occur_twice_in_a_format_with_dense_levels() -> None:
    array = drawn("aab", 5)
    for levels in ("k : compressed, i : dense, j : dense", "i : dense, j : dense, k : dense"):
        text = f"(i, j, k) -> ({levels})"
        S = SparseTensor.from_dense(array, text)
        np.testing.assert_allclose(einsum("aab->b", S), np.einsum("aab->b", array))
        np.testing.assert_allclose(einsum("rsb->b", SparseTensor.from_dense(array, text)), array.sum((0, 1)))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "operands", "message"),
    [
        ("ij,jk->ik", (matrix("float32"),), "is written for 2 operands, got 1"),
        ("ij->ik", (matrix("float32"),), "has the letter 'k', which no operand has"),
        ("ij->ii", (matrix("float32"),), "has the letter 'i' twice"),
        ("ijk->i", (matrix("float32"),), "operand 0 of 'ijk->i' has 2 dimensions, but 'ijk' names 3 dimensions"),
        ("i1,j->i", (matrix("float32"), np.ones(3)), "got '1' in"),
        ("ij,jk->ik", (matrix("float32"), np.ones((4, 2))), "dimension 0 of operand 1 has extent 4, expected 5"),
        ("ij->i", (matrix("float32").astype(complex),), "operand 0 holds complex128"),
        ("ij->i", ("text",), "got str"),
        ("ij->i", (None,), "got NoneType"),
    ],
)
def test_refusals(text: str, operands: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message.replace("'", ".")):
        einsum(text, *operands)


def test_refused_options() -> None:
    A = matrix("float32")
    with pytest.raises(ArgumentError, match="reduce is one of sum, add"):
        einsum("ij->i", A, reduce="mean")
    with pytest.raises(ArgumentError, match="combine is one of mul"):
        einsum("ij->i", A, combine="sub")
    with pytest.raises(ArgumentError, match="reduce='any' is for operands of bool"):
        einsum("ij->i", A, reduce="any")
    with pytest.raises(ArgumentError, match="result is one of auto, dense, sparse"):
        einsum("ij->i", A, result="csr")
    with pytest.raises(ArgumentError, match="fill is a value of int32, got inf"):
        einsum("ij->i", matrix("int32"), fill=np.inf)
    with pytest.raises(ArgumentError, match="no operand of 'ij->i' is sparse"):
        einsum("ij->i", np.ones((2, 2)), result="sparse")
    with pytest.raises(ArgumentError, match="needs an operand"):
        einsum("")


# ------------------------------------------------------------------ expressions


def test_an_expression_is_made_once() -> None:
    A = matrix("float64")
    step = einsum_expression("ij,jk->ik", A, (5, 3))
    X = np.random.default_rng(2).random((5, 3))
    np.testing.assert_allclose(step(A, X), A @ X)
    np.testing.assert_allclose(step(2 * A, X[:, :1]), 2 * (A @ X[:, :1]))
    np.testing.assert_allclose(step.bind(A)(X), A @ X)
    np.testing.assert_allclose(step.bind(None, X)(A), A @ X)
    with pytest.raises(ArgumentTypeError, match="operand 0 is dense float64"):
        step(X, X)
    with pytest.raises(ArgumentTypeError, match="takes 2 operands, got 1"):
        step(A)
    with pytest.raises(ArgumentTypeError, match="1 operands are open, got 2"):
        step.bind(A)(X, X)
    assert repr(step).startswith("Expression 'ij,jk->ik' of sparse (0: dense, 1: compressed) float64")


def test_expressions_that_differ_in_letters_share_a_kernel() -> None:
    A, X = matrix("float64"), np.random.default_rng(2).random((5, 3))
    first, second = einsum_expression("ij,jk->ik", A, X), einsum_expression("pq,qa->pa", A, X)
    assert first.steps[0].kernel is second.steps[0].kernel
    np.testing.assert_allclose(second(A, X), A @ X)
    assert "[p, q, a]:" in second.script()
    assert "pq,qa->pa of operand 0, operand 1" in second.explain()


def test_fixed_operands_are_combined_once() -> None:
    A = sp.random_array((300, 200), density=0.02, format="csr", rng=np.random.default_rng(0))
    W, V, x = np.random.default_rng(1).random((200, 40)), np.random.default_rng(2).random((40, 30)), np.ones(30)
    step = einsum_expression("ij,jk,kl,l->i", A, W, V, x)
    bound = step.bind(None, W, V, x)
    np.testing.assert_allclose(bound(A), A @ (W @ (V @ x)))
    assert len(bound.calls) == 1
    np.testing.assert_allclose(step(A, W, V, x), A @ (W @ (V @ x)))
    other = step.bind(A)
    np.testing.assert_allclose(other(W, V, x), A @ (W @ (V @ x)))
    T = SparseTensor.from_dense(drawn("ijk", 3))
    ttv = einsum_expression("ijk,k->ij", T, (5,))
    np.testing.assert_allclose(dense(ttv.bind(T)(np.ones(5))), T.to_dense().sum(2), atol=1e-12)


def test_script_and_explain() -> None:
    A = matrix("float32")
    step = einsum_expression("ij,ik,jk->ij", A, (6, 4), (5, 4))
    assert step.explain().splitlines() == [
        "ij,ik,jk->ij in float32, result: the pattern of operand 0",
        "1. ij,ik,jk->ij of operand 0, operand 1, operand 2; runs over what operand 0 stores",
    ]
    program = sparsetir.parse(step.script())
    X, Y = np.ones((6, 4), "float32"), np.ones((5, 4), "float32")
    found = sparsetir.build(program)(A=A, B=X, C=Y)
    np.testing.assert_allclose(found.toarray(), 4 * A.toarray())
    for line in ("I = T.dense_fixed(n_i)", 'with T.sp_iter([I, J, K], "SSR", "einsum") as [i, j, k]:'):
        assert line in step.script()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["r", "c", "l", "t"])
@pytest.mark.parametrize("sparse", ["ab", "abc"])
def test_letters_of_operands_and_results_in_any_order(sparse: str, kind: str) -> None:
    """Where stored coordinates are added to, the program has the letters of dense operands last."""
    if kind in "rc" and sparse != "ab":
        return
    S = drawn(sparse, 1)
    for dense_letters, output in product(permutations(sparse[0] + "de"), permutations(sparse[1:] + "de")):
        text = f"{sparse},{''.join(dense_letters)}->{''.join(output)}"
        D = drawn("".join(dense_letters), 2, 1.0)
        with on(text):
            step = einsum_expression(text, stored(S, kind), D)
            expected = np.einsum(text, S, D)
            for _ in range(2):
                np.testing.assert_allclose(step(stored(S, kind), D), expected, atol=1e-12)
            np.testing.assert_allclose(step.bind(stored(S, kind))(D), expected, atol=1e-12)
            np.testing.assert_allclose(step.bind(None, D)(stored(S, kind)), expected, atol=1e-12)
            tensor = einsum(text, stored(S, kind), torch.from_numpy(D))
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_allclose(tensor.numpy(), expected, atol=1e-12)


def test_columns_of_a_product_are_added_up_in_vectors() -> None:
    A, X = matrix("float32"), np.random.default_rng(0).random((3, 6), "float32")
    for text, turned in [("ij,jk->ik", "(K_dense, I)"), ("jk,ij->ki", "(K_dense, I)"), ("ij,jk->ki", "(K_dense, I)")]:
        operands = (A, X) if text.startswith("jk") else (X, A)
        step = einsum_expression(text, *operands)
        assert f"c, {turned}" in step.script()
        expected = np.einsum(text, *[dense(o) for o in operands])
        np.testing.assert_allclose(step(*operands), expected, rtol=1e-5)
    tuned = step.tune(*operands, seconds=0.2)
    np.testing.assert_allclose(tuned(*operands), expected, rtol=1e-5)
    step = einsum_expression("ij,jk->k", X, A)
    assert "a, (J, I)" in step.script()  # summed
    np.testing.assert_allclose(step(X, A), np.einsum("ij,jk->k", X, A.toarray()), rtol=1e-5)
    assert "c, (I, K)" in einsum_expression("ij,jk->ik", A, (5, 3)).script()  # rows of sums


@pytest.mark.slow
def test_tune() -> None:
    A = sp.random_array((200, 200), density=0.05, format="csr", dtype="float32", rng=np.random.default_rng(0))
    X = np.random.default_rng(1).random((200, 16), "float32")
    step = einsum_expression("ij,jk->ik", A, X).tune(A, X, seconds=1.0)
    np.testing.assert_allclose(step(A, X), A @ X, rtol=1e-4)
    np.testing.assert_allclose(step.bind(A)(X), A @ X, rtol=1e-4)


@pytest.mark.slow
def test_expressions_are_tuned_apart_with_what_they_were_made_for() -> None:
    A = sp.random_array((200, 200), density=0.05, format="csr", dtype="float32", rng=np.random.default_rng(0))
    X = np.random.default_rng(1).random((200, 16), "float32")
    other = einsum_expression("ij,jk->ik", A, X)
    step = einsum_expression("ij,jk->ik", A, (200, 16)).tune(seconds=0.5)
    assert step.steps[0].tuned is not None
    assert other.steps[0].tuned is None
    assert einsum_expression("ij,jk->ik", A, X).steps[0].tuned is None
    assert step.tune(None, X, seconds=0.5) is step
    for found in (step(A, X), other(A, X), einsum("ij,jk->ik", A, X)):
        np.testing.assert_allclose(found, A @ X, rtol=1e-4)
    with pytest.raises(ArgumentTypeError, match="2 operands, got 3"):
        step.tune(A, X, X)
    with pytest.raises(ArgumentTypeError, match="2 operands, got 1"):
        step.tune(A)


@pytest.mark.slow
def test_joined_tensors_are_tuned() -> None:
    dense = [drawn("ijk", n, 0.4) for n in (1, 2)]
    S, T = map(SparseTensor.from_dense, dense)
    step = einsum_expression("ijk,ijk->ijk", S, T).tune(seconds=0.5)
    assert step.steps[0].called([S, T])[0].tuned is not None
    np.testing.assert_allclose(step(S, T).to_dense(), dense[0] * dense[1])


def test_orders_follow_the_pattern() -> None:
    sizes = {"i": 10_000, "j": 10_000, "k": 64, "l": 8}
    thin = [Value("ij", 50_000, "ij"), Value("jk"), Value("kl")]
    assert [s.members for s in contractions(thin, "il", sizes)] == [(1, 2), (0, 3)]
    few = {"i": 1000, "j": 1_000_000, "k": 64, "l": 64}
    assert [s.members for s in contractions(thin, "il", few)] == [(0, 1), (2, 3)]
    sampled = [Value("ij", 50_000, "ij"), Value("ik"), Value("jk")]
    assert [s.members for s in contractions(sampled, "ij", sizes, needs_pattern=True)] == [(0, 1, 2)]


def test_orders_keep_a_sparse_operand_outermost_where_an_intermediate_result_is_large() -> None:
    """A relational convolution: [r, i, f] has far more elements than the sum has products below an entry."""
    sizes = {"r": 200, "i": 4000, "j": 4000, "f": 32, "o": 32}
    others = [Value("jf"), Value("rfo")]
    few, many = (Value("rij", stored, "rij") for stored in (150_000.0, 1e9))
    assert [s.members for s in contractions([few, *others], "io", sizes)] == [(0, 1, 2)]
    assert len(contractions([many, *others], "io", sizes)) == 2
    rng = np.random.default_rng(0)
    coords = np.stack([rng.integers(0, n, 30_000) for n in (50, 3000, 3000)])
    edges = sparsetir.SparseTensor.from_any(CooTensor(coords, np.ones(30_000, "float32"), (50, 3000, 3000)), "csf")
    X, W = rng.random((3000, 16), dtype="float32"), rng.random((50, 16, 16), dtype="float32")
    step = einsum_expression("rij,jf,rfo->io", edges, X, W)
    assert [s.members for s in step.steps] == [(0, 1, 2)]
    assert step.script().count("T.sp_iter([R, I, J, ") == 1
    expected = np.zeros((3000, 16), "float32")
    r, i, j = edges.coords
    np.add.at(expected, i, edges.values[:, None] * np.einsum("ef,efo->eo", X[j], W[r]))
    np.testing.assert_allclose(step(edges, X, W), expected, rtol=1e-4)


def test_orders_follow_what_was_counted() -> None:
    """A banded matrix, twice, and the aggregates of its rows: the product with them is small, which no size tells."""
    n = 4000
    A = sp.diags_array(np.ones(81), offsets=range(-40, 41), shape=(n, n), format="csr")
    P = sp.csr_array((np.ones(n), np.arange(n) // 40, np.arange(n + 1)), shape=(n, n // 40))
    step = einsum_expression("ij,jk,kl->il", A, A, P)
    assert [s.members for s in step.steps] == [(1, 2), (0, 3)]
    assert einsum_expression("ji,kj,lk->il", A, A, P.T.tocsr()).steps[0].members == (1, 2)
    counted = statistics(joins(["ij", "jk", "kl"], [A, A, P]))
    products, collisions = counted[0, 1]
    assert 0.8 < products / int(np.diff(A.indptr)[A.indices].sum()) < 1.25
    assert 0.8 < collisions / (products / (A @ A).nnz) < 1.25
    assert joins(["ij", "jk"], [A, np.ones((n, 3))]) == {}


def test_orders_do_not_follow_the_operands_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands with one key get one order, whichever came first."""
    rng = np.random.default_rng(0)
    B, C = np.ones((2000, 64)), np.ones((64, 55))
    few, many = (sp.random_array((100, 2000), density=d, rng=rng, format="csr") for d in (0.175, 0.32))
    for first, second in ((few, many), (many, few)):
        monkeypatch.setattr(expression, "_expressions", {})
        steps = [[s.members for s in einsum_expression("ij,jk,kl->il", A, B, C).steps] for A in (first, second)]
        assert steps == [[(0, 1), (2, 3)]] * 2


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.integers(0, 6), st.floats(0, 1))
def test_data_of_one_expression(seed: int, m: int, n: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    A = sp.random_array((m, n), density=density, format="csr", rng=rng)
    X, Y = rng.random((m, 3)), rng.random((n, 3))
    np.testing.assert_allclose(einsum("ij,jk->ik", A, Y), A @ Y, atol=1e-12)
    np.testing.assert_allclose(dense(einsum("ij,ik,jk->ij", A, X, Y)), A.toarray() * (X @ Y.T), atol=1e-12)


# ------------------------------------------------------------------ computed patterns


CHAINS = """
ab,bc->ac rr | ab,bc->ca rc | ba,cb->ac cr | ab,bc->ac tt | ab,bc->ac lr | ab,bc,cd->ad rrr | ab,bc,cd,de->ae rcrr
ab,b,bc->ac rdr | a,ab,bc,c->ac drrd | ab,ab->ab rr | ab,ab->ba rc | ab,ba->ab rr | ab,ab,ab->ab rrt | ab,ab,a->ab rrd
"""


@pytest.mark.parametrize("case", [c.strip() for line in CHAINS.strip().splitlines() for c in line.split("|")])
def test_computed_patterns(case: str) -> None:
    text, kinds = case.split()
    pairs = zip(terms_of(text, kinds), kinds, strict=True)
    arrays = [drawn(term, n, 0.3 if kind != "d" else 1.0) for n, (term, kind) in enumerate(pairs)]
    operands = [stored(a, k) for a, k in zip(arrays, kinds, strict=True)]
    step = einsum_expression(text, *operands)
    assert "a pattern that is computed" in step.explain()
    found, expected = step(*operands), np.einsum(text, *arrays)
    np.testing.assert_allclose(dense(found), expected, atol=1e-12)
    assert found.nnz == np.count_nonzero(expected)
    assert isinstance(found, SparseTensor) == (kinds[0] == "t")
    for at in (0, len(operands) - 1):
        bound = step.bind(*[None] * at, operands[at])
        again = bound(*operands[:at], *operands[at + 1 :])
        assert type(again) is type(found)
        np.testing.assert_allclose(dense(again), expected, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["mul", "add", "max", "min"])
@pytest.mark.parametrize("kind", ["r", "l", "t"])
def test_many_sparse_operands_are_merged_in_pairs(kind: str, combine: str) -> None:
    letters = "abc" if kind == "t" else "ab"
    arrays = [drawn(letters, n, 0.7) for n in range(12)]
    found = einsum(f"{','.join([letters] * 12)}->{letters}", *(stored(a, kind) for a in arrays), combine=combine)
    np.testing.assert_allclose(dense(found), reduce(JOIN[combine], arrays), atol=1e-12)


@pytest.mark.parametrize(
    ("how", "combine", "fill"),
    [
        ("sum", "mul", 0), ("prod", "mul", 0), ("max", "add", -np.inf), ("min", "add", np.inf), ("max", "min", -np.inf),
        ("min", "max", np.inf), ("max", "max", 0), ("min", "min", 0), ("sum", "add", 0),
    ],
)  # fmt: skip
def test_many_operands_are_merged_as_two_and_two(how: str, combine: str, fill: float) -> None:
    arrays = [drawn("ab", n, 0.6, fill) for n in range(5)]
    operands = []
    for array in arrays:
        rows, columns = np.nonzero(array != fill)
        operands.append(sp.csr_array((array[rows, columns], (rows, columns)), shape=array.shape))
    found = einsum("ij,ij,ij,ij,ij->ij", *operands, reduce=how, combine=combine, fill=fill)
    pairs = operands[0]
    for other in operands[1:]:
        pairs = einsum("ij,ij->ij", pairs, other, reduce=how, combine=combine, fill=fill)
    np.testing.assert_allclose(found.toarray(), pairs.toarray())
    assert found.nnz == pairs.nnz


@pytest.mark.parametrize("combine", ["add", "max", "min"])
def test_unions(combine: str) -> None:
    A, B = drawn("ab", 1), drawn("ab", 2)
    found = einsum("ij,ij->ij", sp.csr_array(A), sp.csc_array(B), combine=combine)
    np.testing.assert_allclose(found.toarray(), JOIN[combine](A, B))
    assert found.nnz == np.count_nonzero((A != 0) | (B != 0))


def test_shortest_ways_stay_sparse() -> None:
    W = sp.csr_array(np.array([[0, 2.0, 9.0], [0, 0, 3.0], [0, 0, 0]]))
    found = einsum("ik,kj->ij", W, W, reduce="min", combine="add", fill=np.inf)
    assert found.toarray().tolist() == [[0, 0, 5.0], [0, 0, 0], [0, 0, 0]]


def test_torch_products_stay_sparse() -> None:
    A = torch.from_numpy(drawn("ab", 1)).to_sparse_csr()
    found = einsum("ab,cb->ac", A, A)
    assert found.layout == torch.sparse_csr
    np.testing.assert_allclose(dense(found), dense(A) @ dense(A).T, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("text", ["ij,jk->ik", "ij,ij->ij", "ij,j->i"])
def test_warm_calls_name_the_letter_of_a_wrong_extent(text: str, dtype: str) -> None:
    first, second = text.partition("->")[0].split(",")
    sizes = dict.fromkeys("ijk", 3)
    right = [np.ones([sizes[c] for c in letters], dtype) for letters in (first, second)]
    sparsetir.einsum(text, *right)
    wrong = [right[0], np.ones([{"j": 0}.get(c, 3) for c in second], dtype)]
    for operands in (wrong, [np.ones((3, 0), dtype), right[1]]):
        with pytest.raises(sparsetir.errors.ArgumentError, match="'j'"):
            sparsetir.einsum(text, *operands)
