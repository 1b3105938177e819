# SPDX-License-Identifier: Apache-2.0
"""Products of sparse operands run over what all of them store: what one lacks meets no infinity of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.interop import CooTensor

# Finite ones are whole and small: their products and sums are exact in any order, in 16 bits as well.
SPECIAL = [1.0, 2.0, -3.0, np.inf, -np.inf, np.nan]
WIDE = 3_000_017  # distance of coordinates in shapes that no dense array could have

Operand = tuple[Any, np.ndarray, np.ndarray]


def unsorted_rows(tensor: CooTensor) -> sp.csr_array:
    """Rows whose columns descend."""
    made = sp.csr_array(sp.coo_array((tensor.values, tuple(tensor.coords)), shape=tensor.shape))
    made.sort_indices()
    for a, b in zip(made.indptr[:-1], made.indptr[1:], strict=True):
        made.indices[a:b], made.data[a:b] = made.indices[a:b][::-1].copy(), made.data[a:b][::-1].copy()
    made.has_sorted_indices = False
    return made


CLASSES: dict[str, Callable[[CooTensor], Any]] = {
    "CooTensor": lambda tensor: tensor,
    "unsorted csr": unsorted_rows,
    **{
        kind: lambda tensor, kind=kind: getattr(sp, kind)(  # type: ignore[misc]
            sp.coo_array((tensor.values, tuple(tensor.coords)), shape=tensor.shape)
        )
        for kind in ("csr_array", "csc_array", "coo_array")
    },
    **{
        format: lambda tensor, format=format: sparsetir.SparseTensor.from_any(tensor, format)  # type: ignore[misc]
        for format in ("csf", "coo", "dcsr")
    },
}
MATRICES = ("csr_array", "unsorted csr", "csc_array", "coo_array", "CooTensor", "csf", "coo", "dcsr")
TENSORS = ("CooTensor", "csf", "coo")

SUBSCRIPTS = [
    *("ki,kji->kji", "kji,ki->kji", "ij,kij->ikj", "kij,kj->jik", "ki,jik->kij", "kji,ki->k", "ki,kji->ji"),
    *("kji,jik->", "ijk,kj->kji", "ij,ji->ij", "ij,ij,ij->", "ij,ji,ij->j", "ik,ijk,jik->", "kij,ikj,ji->kij"),
    *("kij,ik,ijk->ijk", "jki,kij,ki->ij", "ij,ij->ij"),
    *("ij,ij,jk->ik", "ji,ji,kj->ik", "jk,ji,jk->ki", "ij,ji,ij,jk->ik"),
]
#: reductions and combinations with what is not stored, which changes no result
RINGS = [("max", "add", -np.inf), ("max", "min", -np.inf), ("min", "add", np.inf), ("min", "max", np.inf)]
FUNCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def drawn(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: Any) -> Operand:
    """An operand, its elements and where they are stored; entries are listed in any order."""
    is_stored = rng.random(shape) < rng.choice([0.2, 0.6, 1.0])
    coords = rng.permutation(np.argwhere(is_stored)).T
    values = rng.choice(SPECIAL, coords.shape[1]).astype(dtype)
    elements = np.zeros(shape)
    elements[tuple(coords)] = values
    return CLASSES[kind](CooTensor(coords, values, shape)), elements, is_stored


def expected(subscripts: str, operands: list[Operand]) -> np.ndarray:
    """Sums of products over what all operands store."""
    terms, _, output = subscripts.partition("->")
    letters = output + "".join(sorted(set(terms) - set(output) - {","}))
    product, meets = np.ones(()), np.ones((), bool)
    for term, (_, elements, is_stored) in zip(terms.split(","), operands, strict=True):
        order = [term.index(c) for c in letters if c in term]
        view = tuple(slice(None) if c in term else None for c in letters)
        product, meets = product * elements.transpose(order)[view], meets & is_stored.transpose(order)[view]
    return np.where(meets, product, 0).sum(axis=tuple(range(len(output), len(letters))))


def elements_of(result: Any) -> np.ndarray:
    if hasattr(result, "toarray"):
        return np.asarray(result.toarray())
    if hasattr(result, "to_dense"):
        return np.asarray(result.to_dense())
    if hasattr(result, "coords"):
        elements = np.zeros(result.shape)
        np.add.at(elements, tuple(result.coords), result.values.astype(float))
        return elements
    return np.asarray(result)


@pytest.mark.parametrize("case", range(len(SUBSCRIPTS)), ids=SUBSCRIPTS)
def test_products_of_sparse_operands_run_over_their_intersection(case: int) -> None:
    subscripts, rng = SUBSCRIPTS[case], np.random.default_rng(case)
    terms = subscripts.partition("->")[0].split(",")
    kinds = [rng.choice(MATRICES if len(term) == 2 else TENSORS) for term in terms]
    is_tensor = any(len(term) == 3 for term in terms)
    dtype = [np.float32, np.float64, np.float32, ml_dtypes.bfloat16, np.float16][case % 5 if is_tensor else case % 3]
    if dtype in (np.float16, ml_dtypes.bfloat16):
        kinds = ["CooTensor"] * len(terms)
    for _ in range(12):
        sizes = dict(zip("ijk", rng.integers(1, 5, 3), strict=True))
        shapes = [tuple(int(sizes[c]) for c in term) for term in terms]
        operands = [drawn(rng, shape, kind, dtype) for shape, kind in zip(shapes, kinds, strict=True)]
        computed = elements_of(sparsetir.einsum(subscripts, *(operand[0] for operand in operands)))
        np.testing.assert_array_equal(computed.astype(float), expected(subscripts, operands), str(kinds))


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: " of ".join(ring[:2]))
@pytest.mark.parametrize("subscripts", ["ij,ji->j", "ij,ij->", "ij,j->i", "ij,ij,jk->ik", "ji,ji,ik->", "ij,jk->ik"])
def test_other_reductions_leave_out_what_is_not_stored(subscripts: str, ring: tuple[str, str, float]) -> None:
    """A dense operand, the last one of some, and stored elements may be NaN or infinities of either sign."""
    (reduce, combine, fill), rng = ring, np.random.default_rng(8)
    inputs, _, output = subscripts.partition("->")
    terms = inputs.split(",")
    letters = output + "".join(sorted(set(inputs) - set(output) - {","}))
    for _ in range(8):
        sizes = dict(zip("ijk", rng.integers(1, 20, 3), strict=True))
        operands: list[Any] = []
        term, meets = None, np.ones([sizes[c] for c in letters], bool)
        for n, own in enumerate(terms):
            shape = tuple(int(sizes[c]) for c in own)
            is_dense = len(own) == 1 or (n == len(terms) - 1 and "k" in own)
            tensor, elements, is_stored = drawn(rng, shape, "csr_array" if len(own) == 2 else "CooTensor", np.float64)
            operands.append(elements if is_dense else tensor)
            view = tuple(slice(None) if c in own else None for c in letters)
            part = elements.transpose([own.index(c) for c in letters if c in own])[view]
            term = part if term is None else FUNCTIONS[combine](term, part)
            meets = meets & (is_dense | is_stored.transpose([own.index(c) for c in letters if c in own])[view])
        axes = tuple(range(len(output), len(letters)))
        want = FUNCTIONS[reduce].reduce(np.where(meets, term, fill), axis=axes)
        got = sparsetir.einsum(subscripts, *operands, reduce=reduce, combine=combine, fill=fill, result="dense")
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("reduce", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("subscripts", ["ji,ji->ij", "ij,ij->ij", "ij,ij,ij->ji"])
def test_a_reduction_of_nothing_is_none(subscripts: str, reduce: str) -> None:
    stored, empty = sp.csr_array(np.array([[np.inf, np.nan], [1.0, -np.inf]])), sp.csr_array((2, 2))
    for operands in ([stored, empty, stored], [empty, stored, empty]):
        chosen = operands[: subscripts.count(",") + 1]
        assert not elements_of(sparsetir.einsum(subscripts, *chosen, reduce=reduce)).any()


def test_elements_of_a_diagonal_are_looked_up() -> None:
    empty = sp.csr_array((2, 2))
    others = np.array([[np.inf, 1.0], [2.0, 3.0]]), sp.csr_array(np.array([[1.0, 0.0], [4.0, 5.0]]))
    assert not sparsetir.einsum("jj,kj,kj->kj", empty, *others).toarray().any()


@pytest.mark.parametrize("subscripts", ["ii,i->i", "ii,k->ik", "k,ii->ki", "ii,ik->ik"])
@pytest.mark.parametrize("format", ["csr", "csc", "coo"])
def test_a_diagonal_leaves_out_what_it_does_not_store(subscripts: str, format: str) -> None:
    A = sp.coo_array(([np.inf], ([0], [0])), shape=(2, 2)).asformat(format)
    operands = [
        A if term == "ii" else np.full((2,) * len(term), np.inf) for term in subscripts.partition("->")[0].split(",")
    ]
    got = sparsetir.einsum(subscripts, *operands)
    want = np.zeros(got.shape)
    want[tuple(0 if letter == "i" else slice(None) for letter in subscripts.partition("->")[2])] = np.inf
    np.testing.assert_array_equal(elements_of(got), want)


@pytest.mark.parametrize("search", ["inline", "hoist", "merge"])
def test_every_search_leaves_out_what_is_not_stored(search: str) -> None:
    rng = np.random.default_rng(3)
    (X, x, in_x), (Y, y, in_y) = (drawn(rng, shape, "csf", "float32") for shape in ((5, 7), (5, 4, 7)))
    step = sparsetir.einsum_expression("ki,kji->kji", X, Y).steps[0]
    schedule = sparsetir.Schedule(step.program.func)
    schedule.set_search("einsum", search)
    arguments = step.arguments([step.tree(0, X), step.tree(1, Y)])
    got = step.finished(sparsetir.build(schedule.func)(**arguments), [X, step.tree(1, Y)])
    meets = (in_x[:, None, :] & in_y).astype(bool)
    want = np.where(meets, x[:, None, :] * y, 0)
    np.testing.assert_array_equal(elements_of(got), want)


@pytest.mark.parametrize("format", ["CooTensor", "dcsr", "csf"])
@pytest.mark.parametrize("order", ["ij,kij->kij", "kij,ij->kij"])
def test_hypersparse_shapes_too(format: str, order: str) -> None:
    rng = np.random.default_rng(5)
    (_, x, in_x), (_, y, in_y) = (drawn(rng, shape, "CooTensor", "float32") for shape in ((3, 4), (2, 3, 4)))

    def stretched(elements: np.ndarray, is_stored: np.ndarray) -> CooTensor:
        coords = np.argwhere(is_stored).T
        values = elements[tuple(coords)].astype("float32")
        return CooTensor(coords * WIDE, values, tuple(WIDE * n for n in elements.shape))

    X = stretched(x, in_x)
    X = X if format == "CooTensor" else sparsetir.SparseTensor.from_any(X, format)
    operands = [X, stretched(y, in_y)]
    result = sparsetir.einsum(order, *(operands if order[0] == "i" else operands[::-1]))
    found = np.zeros(y.shape)
    np.add.at(found, tuple(result.coords // WIDE), result.values)
    np.testing.assert_array_equal(found, np.where(in_x & in_y, x * y, 0))
