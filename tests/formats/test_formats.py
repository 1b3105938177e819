# SPDX-License-Identifier: Apache-2.0
"""Tensors in formats and back, against a slow reading of what the axes of each piece say."""

from __future__ import annotations

import itertools
import math
import os
import tracemalloc
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sparsetir
from each import examples
from sparsetir import formats
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.formats import format as limits
from sparsetir.formats.blocks import number_blocks
from sparsetir.interop import CooTensor
from sparsetir.interop.arrays import sorting_order, stable_argsort
from sparsetir.ir.sizes import evaluator, formula
from sparsetir.schedules import Choices

SparseTensor = sparsetir.SparseTensor
quick = settings(max_examples=examples(80), deadline=None)

MATRIX_FORMATS = [
    ("csr", {}),
    ("csc", {}),
    ("coo", {}),
    ("dcsr", {}),
    ("ell", {}),
    ("ell", {"width": 9}),
    ("ragged", {}),
    ("csf", {}),
    ("csf", {"order": (1, 0)}),
    ("bsr", {"r": 1}),
    ("bsr", {"r": 2, "c": 3}),
    ("bsr", {"r": 4}),
    ("dbsr", {"r": 3, "c": 2}),
]
FORMAT_IDS = [str(formats.make(name, **parameters)) for name, parameters in MATRIX_FORMATS]
CLASSES = [f"{f}_{kind}" for f in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok") for kind in ("array", "matrix")]


# --- what the arrays say, straight from the meaning of the axes --------------------------------------------------


def steps(axis, pos, coords, piece):
    """Parent row, position and coordinate of every slot of an axis below the positions `pos`."""
    (length,) = evaluator([axis.length])(piece.sizes)
    if axis.kind == "dense_fixed":
        return np.zeros(length, int), np.arange(length), np.arange(length)
    if axis.indptr is not None:
        indptr = piece.arrays[str(axis.indptr.name)].astype(int)
        held = indptr[pos + 1] - indptr[pos]
        parent = np.repeat(np.arange(len(pos)), held)
        slot = np.concatenate([np.zeros(0, int), *map(np.arange, held)])
        child = indptr[pos][parent] + slot
    else:
        width = 1 if axis.kind == "singleton" else evaluator([axis.width])(piece.sizes)[0]
        parent, slot = (a.ravel() for a in np.indices((len(pos), width)))
        child = pos[parent] * width + slot
    if axis.indices is not None:
        return parent, child, piece.arrays[str(axis.indices.name)].reshape(-1)[child]
    if axis.rule is not None:
        index = formula(axis.rule, piece.sizes)(*(c[parent] for c in coords), slot)
        return parent, child, np.broadcast_to(index, child.shape)
    return parent, child, slot


def leaves(tree, piece):
    """Coordinates and position of every stored element of a tree, without padding; and the number of positions."""
    pos, coords, count = np.zeros(1, int), [], 1
    for axis in tree:
        parent, pos, index = steps(axis, pos, coords, piece)
        (length,) = evaluator([axis.length])(piece.sizes)
        (count,) = evaluator([axis.count])(piece.sizes)
        assert len(set(pos.tolist())) == len(pos)
        assert np.all(pos < count)
        inside = (index >= 0) & (index < length)
        pos, coords = pos[inside], [c[parent][inside] for c in coords] + [np.asarray(index)[inside]]
    return coords, pos, count


def meaning(piece, shape):
    """The dense tensor that a piece stores, and how many values it stores."""
    buffer = piece.rule.buffer
    slot, coords, total = np.zeros(1, int), {}, 1
    for tree in buffer.trees:
        own, pos, count = leaves(tree, piece)
        a, b = (i.ravel() for i in np.indices((len(slot), len(pos))))
        slot, total = slot[a] * count + pos[b], total * count
        coords = {axis: c[a] for axis, c in coords.items()}
        coords |= {axis: c[b] for axis, c in zip(tree, own, strict=True)}
    old = [np.asarray(c) for c in piece.rule.old_coords([coords[axis] for axis in buffer.axes])]
    values = piece.values[slot]
    inside = np.logical_and.reduce([(c >= 0) & (c < n) for c, n in zip(old, shape, strict=True)])
    assert not values[~inside].any()
    dense = np.zeros(shape, piece.values.dtype)
    np.add.at(dense, tuple(c[inside] for c in old), values[inside])
    return dense, total


def check_stored(tensor, expected):
    """The pieces together say `expected`, with arrays of the right types and padding counted right."""
    found, stored = np.zeros_like(expected), 0
    for piece in tensor.pieces:
        sparsetir.verify(piece.rule.description)
        dense, total = meaning(piece, tensor.shape)
        assert piece.values.shape == (total,)
        found, stored = found + dense, stored + total
        names = {str(p.name) for p in piece.rule.description.params}
        assert {*piece.arrays, *piece.sizes, "a"} == names
        assert all(a.dtype == tensor.idtype and a.flags.c_contiguous for a in piece.arrays.values())
    np.testing.assert_array_equal(found, expected)
    assert tensor.padding == pytest.approx(1 - tensor.nnz / stored if stored else 0)
    assert tensor.nbytes == sum(a.nbytes for p in tensor.pieces for a in (p.values, *p.arrays.values()))


# --- what goes in ------------------------------------------------------------------------------------------------


@st.composite
def lists(draw, order=None, most=9):
    """Coordinates in any order, some twice, with small whole values, zeros too: sums of them are exact."""
    order = draw(st.integers(1, 4)) if order is None else order
    shape = tuple(draw(st.lists(st.integers(0, most), min_size=order, max_size=order)))
    count = 0 if 0 in shape else draw(st.integers(0, 25))
    coords = [draw(st.lists(st.integers(0, max(n - 1, 0)), min_size=count, max_size=count)) for n in shape]
    values = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
    dtype, idtype = draw(st.sampled_from(["float32", "float64"])), draw(st.sampled_from(["int32", "int64"]))
    return CooTensor(np.array(coords, idtype).reshape(order, count), np.array(values, dtype), shape)


def compressed(coo, major, repeats=True):
    """A CSR or CSC array with the entries of each fiber in the order of the list."""
    if not repeats:
        _, first = np.unique(coo.coords, axis=1, return_index=True)
        coo = CooTensor(coo.coords[:, first], coo.values[first], coo.shape)
    order = np.argsort(coo.coords[major], kind="stable")
    indptr = np.searchsorted(coo.coords[major][order], np.arange(coo.shape[major] + 1)).astype(coo.coords.dtype)
    make = sp.csc_array if major else sp.csr_array
    return make((coo.values[order], coo.coords[1 - major][order], indptr), shape=coo.shape)


def as_class(coo, kind):
    """The list as an object of a scipy class; csr, csc and coo keep the order and what is there twice."""
    if kind.startswith(("csr", "csc")):
        return getattr(sp, kind)(compressed(coo, int(kind.startswith("csc"))))
    listed = sp.coo_array((coo.values, tuple(coo.coords)), shape=coo.shape)
    return listed if kind == "coo_array" else getattr(sp, kind)(listed)


def entry_list(value):
    """(coordinates, value) of each entry of a scipy object or `CooTensor` in its own order."""
    if isinstance(value, CooTensor):
        return list(zip(map(tuple, value.coords.T.tolist()), value.values.tolist(), strict=True))
    if value.format == "dia":  # scipy's own list leaves out zeros
        diagonals = zip(value.offsets.tolist(), value.data.tolist(), strict=True)
        listed = [((j - k, j), x) for k, row in diagonals for j, x in enumerate(row)]
        return [(at, x) for at, x in listed if 0 <= at[0] < value.shape[0] and at[1] < value.shape[1]]
    listed = value.tocoo()
    return list(zip(map(tuple, np.transpose(listed.coords).tolist()), listed.data.tolist(), strict=True))


def index_types(value):
    arrays = [getattr(value, part) for part in ("indptr", "indices", "offsets") if hasattr(value, part)]
    return {a.dtype.name for a in [*arrays, *(value.coords if value.format == "coo" else [])]}


def check_restored(found, original, values=None):
    """Class, shape and order of `original`; of equal coordinates the first has the sum, the others zero."""
    assert type(found) is type(original)
    assert found.shape == original.shape
    before, after = entry_list(original), entry_list(found)
    sums = defaultdict(int)
    for where, x in before:
        sums[where] += x if values is None else 0
    if values is not None:
        sums |= values
    assert [where for where, _ in after] == [where for where, _ in before]
    seen = set()
    for where, x in after:
        assert x == (0 if where in seen else sums[where])
        seen.add(where)


DEGENERATE = [
    CooTensor(np.zeros((2, 0), "int32"), np.zeros(0, "float32"), shape)
    for shape in ((0, 0), (0, 5), (5, 0), (1, 1), (7, 3))
] + [CooTensor(np.array([[0], [0]], "int32"), np.ones(1, "float32"), (1, 1))]


def with_degenerate(test):
    for matrix, (name, parameters) in itertools.product(DEGENERATE, MATRIX_FORMATS):
        test = example(matrix=matrix, kind="csr_array", chosen=(name, parameters))(test)
    return test


# --- there and back ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@quick
@given(matrix=lists(order=2), kind=st.sampled_from(CLASSES), chosen=st.sampled_from(MATRIX_FORMATS))
@with_degenerate
def test_a_matrix_comes_back_as_it_was(matrix, kind, chosen):
    name, parameters = chosen
    value = as_class(matrix, kind)
    tensor = SparseTensor.from_scipy(value, name, **parameters)
    dense = matrix.to_dense()
    check_stored(tensor, dense)
    assert tensor.shape == matrix.shape
    assert tensor.dtype == matrix.dtype
    assert tensor.nnz == len({where for where, _ in entry_list(value)})
    assert tensor.idtype == ("int64" if "int64" in index_types(value) else "int32")
    np.testing.assert_array_equal(tensor.to_dense(), dense)
    np.testing.assert_array_equal(tensor.to_coo().to_dense(), dense)
    np.testing.assert_array_equal(tensor.to_scipy().toarray(), dense)
    check_restored(tensor.restore(), value)


@pytest.mark.slow
@quick
@given(lists(), st.data())
def test_a_tensor_of_any_order_comes_back_as_it_was(tensor, data):
    orders = st.permutations(range(tensor.order)).map(tuple)
    name, parameters = data.draw(st.sampled_from(["coo", "csf", None])), {}
    if name == "csf":
        parameters = {"order": data.draw(orders)}
    stored = SparseTensor.from_any(tensor, name, **parameters)
    check_stored(stored, tensor.to_dense())
    check_restored(stored.restore(), tensor)
    np.testing.assert_array_equal(stored.to_dense(), tensor.to_dense())
    np.testing.assert_array_equal(stored.convert("coo").to_dense(), tensor.to_dense())
    if tensor.order != 2:
        assert stored.to_scipy().shape == tensor.shape


@pytest.mark.slow
@quick
@given(lists(order=2), st.sampled_from(CLASSES), st.sampled_from(MATRIX_FORMATS), st.sampled_from(MATRIX_FORMATS))
def test_any_format_converts_to_any_other(matrix, kind, first, second):
    value = as_class(matrix, kind)
    converted = SparseTensor.from_any(value, first[0], **first[1]).convert(second[0], **second[1])
    direct = SparseTensor.from_any(value, second[0], **second[1])
    check_stored(converted, matrix.to_dense())
    check_restored(converted.restore(), value)
    if kind.startswith("bsr") and second[0] == "bsr":
        return  # scipy's own blocks may hold zeros in other places
    for a, b in zip(converted.pieces, direct.pieces, strict=True):
        assert a.sizes == b.sizes
        np.testing.assert_array_equal(a.values, b.values)
        for array in a.arrays:
            np.testing.assert_array_equal(a.arrays[array], b.arrays[array])


@pytest.mark.slow
@quick
@given(lists(order=2), st.sampled_from(CLASSES), st.sampled_from(MATRIX_FORMATS), st.integers(0, 99))
def test_values_laid_out_like_the_pieces_come_back_in_the_arguments_order(matrix, kind, chosen, seed):
    value = as_class(matrix, kind)
    tensor = SparseTensor.from_any(value, chosen[0], **chosen[1])
    rng = np.random.default_rng(seed)
    new = [rng.integers(1, 99, p.values.shape).astype("int64") for p in tensor.pieces]  # padding is not zero here
    changed = tensor.with_values(new)
    expected = dict(zip(map(tuple, np.transpose(changed.coords).tolist()), changed.values.tolist(), strict=True))
    for restored in (tensor.restore(new), changed.restore(), tensor.restore(changed.values)):
        check_restored(restored, value, expected)
    check_stored(changed, changed.to_dense())
    for coordinates, x in expected.items():
        assert x in new[0]
        assert changed.to_dense()[coordinates] == x


@pytest.mark.slow
@quick
@given(lists(order=2), st.sampled_from(MATRIX_FORMATS), st.sampled_from(["int32", "int64"]))
def test_the_axes_tree_alone_gives_the_same_arrays(matrix, chosen, idtype):
    tensor = SparseTensor.from_any(matrix, chosen[0], idtype=idtype, **chosen[1])
    (rule,) = tensor.format.rules
    by_axes = formats.tree(
        rule.description, rule.axis_map, inverse=rule.inverse, forward=rule.forward, fills=rule.fills
    )
    if tensor.format.name == "coo" and not tensor.nnz:
        return  # the one slot that a fixed width keeps
    other = tensor.convert(by_axes)
    if tensor.format.name in ("bsr", "dbsr"):
        block = tensor.format.parameters
        assert tensor.pieces[0].sizes["mb"] == math.ceil(matrix.shape[0] / block["r"])
    for name, array in tensor.pieces[0].arrays.items():
        np.testing.assert_array_equal(other.pieces[0].arrays[name], array)
        assert other.pieces[0].arrays[name].dtype == idtype
    np.testing.assert_array_equal(other.pieces[0].values, tensor.pieces[0].values)
    assert other.pieces[0].sizes == tensor.pieces[0].sizes


# --- classes of arguments ----------------------------------------------------------------------------------------


def small(dtype="float32"):
    return np.array([[0, 2, 0, 1], [0, 0, 0, 0], [4, 0, 3, 0]], dtype)


@pytest.mark.parametrize(("name", "parameters"), MATRIX_FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, "float32") for layout in ("coo", "csr", "csc", "bsr", "bsc")),
        *(("csc", dtype) for dtype in ("bfloat16", "float16", "int8", "bool")),
    ],
)
def test_torch_tensors_of_any_layout_and_dtype(layout, dtype, name, parameters):
    torch = pytest.importorskip("torch")
    dense = torch.tensor(small()[:, [0, 1, 2, 3]].repeat(2, 0)).to(getattr(torch, dtype))
    make = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}
    value = make[layout]() if layout in make else getattr(dense, f"to_sparse_{layout}")((2, 2))
    tensor = SparseTensor.from_torch(value, name, **parameters)
    back = tensor.restore()
    assert back.layout == value.layout
    assert back.dtype == value.dtype
    assert torch.equal(back.to_dense(), dense)
    assert torch.equal(tensor.to_torch().to_dense(), dense)
    np.testing.assert_array_equal(tensor.to_dense().astype("float32"), dense.to(torch.float32).numpy())


@pytest.mark.parametrize("name", ["csr", "bsr", "coo"])
def test_tensors_of_torch_are_made_without_its_warning_of_checks(name):
    torch = pytest.importorskip("torch")
    tensor = SparseTensor.from_dense(small(), name)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = tensor.to_torch()
    finally:
        torch.set_warn_always(False)
    assert not [w for w in caught if "invariant" in str(w.message)]
    np.testing.assert_array_equal(made.to_dense(), small())


def test_an_uncoalesced_torch_tensor_keeps_its_entries_apart():
    torch = pytest.importorskip("torch")
    value = torch.sparse_coo_tensor([[1, 0, 1], [2, 0, 2]], [1.0, 5.0, 2.0], (2, 3))
    tensor = SparseTensor.from_torch(value)
    assert tensor.nnz == 2
    assert tensor.restore()._values().tolist() == [3.0, 5.0, 0.0]


def test_a_hybrid_torch_tensor_is_a_tensor_of_numbers():
    torch = pytest.importorskip("torch")
    value = torch.sparse_coo_tensor([[2, 0]], [[1.0, 2.0], [3.0, 0.0]], (3, 2))
    tensor = SparseTensor.from_torch(value, "csr")
    assert tensor.to_dense().tolist() == [[3, 0], [0, 0], [1, 2]]
    assert torch.equal(tensor.restore()._values(), value._values())


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 1, 2, 3)])
def test_a_dense_array_comes_back_as_one(shape):
    dense = np.arange(math.prod(shape), dtype="float32").reshape(shape) % 3
    tensor = SparseTensor.from_dense(dense)
    assert tensor.nnz == np.count_nonzero(dense)
    found = tensor.restore([2 * p.values for p in tensor.pieces])
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, 2 * dense)
    check_stored(tensor, dense)


@pytest.mark.parametrize(("name", "parameters"), MATRIX_FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("dtype", ["float16", "bool", "uint8", "int16", "complex128", ">f4"])
def test_values_of_other_dtypes(dtype, name, parameters):
    dense = small(dtype)
    tensor = SparseTensor.from_dense(dense, name, **parameters)
    np.testing.assert_array_equal(tensor.to_dense(), dense)
    np.testing.assert_array_equal(tensor.restore(), dense)
    assert tensor.dtype == np.dtype(dtype).newbyteorder("=")


def test_constructors_say_what_they_expect():
    with pytest.raises(ArgumentTypeError, match=r"expected a scipy.sparse array or matrix, got ndarray"):
        SparseTensor.from_scipy(small())
    with pytest.raises(ArgumentTypeError, match="expected a torch sparse tensor, got csr_array"):
        SparseTensor.from_torch(sp.csr_array(small()))
    with pytest.raises(ArgumentTypeError, match=r": expected a scipy.sparse array.*got list"):
        SparseTensor.from_any([[1.0]])
    with pytest.raises(ArgumentError, match="has no dimension"):
        SparseTensor.from_dense(np.array(1.0))
    with pytest.raises(ArgumentError, match="needs coords"):
        SparseTensor.from_coo([[0], [1]], [1.0, 2.0], (2, 2))
    halves = SimpleNamespace(coords=(np.array([0.5]), np.array([1.0])), values=np.ones(1), shape=(2, 2))
    with pytest.raises(ArgumentTypeError, match="coordinates of the SimpleNamespace: expected integers"):
        SparseTensor.from_any(halves)


def test_files_of_each_kind(tmp_path):
    matrix = sp.csr_array(small("float64"))
    sp.save_npz(tmp_path / "matrix.npz", matrix)
    (tmp_path / "pattern.smtx").write_text("2, 3, 2\n0 1 2\n0 2\n")
    (tmp_path / "cube.tns").write_text("1 1 1 5\n2 1 3 7\n")
    (tmp_path / "matrix.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 2 1\n2 1 3.5\n")
    found = SparseTensor.from_file(tmp_path / "matrix.npz", "bsr", r=2)
    np.testing.assert_array_equal(found.to_dense(), matrix.toarray())
    assert type(found.restore()) is sp.csr_array
    assert SparseTensor.from_file(str(tmp_path / "pattern.smtx")).to_dense().tolist() == [[1, 0, 0], [0, 0, 1]]
    assert SparseTensor.from_any(tmp_path / "cube.tns", "csf", order=(2, 0, 1)).to_dense()[1, 0, 2] == 7
    assert SparseTensor.from_file(tmp_path / "matrix.mtx").to_dense().tolist() == [[0, 0], [3.5, 0]]
    with pytest.raises(FileNotFoundError):
        SparseTensor.from_file(tmp_path / "nothing.npz")


# --- arrays that are shared, and how wide they are ---------------------------------------------------------------


def sorted_argument(kind, idtype="int32"):
    csr = sp.csr_array(small())
    value = csr.tobsr((3, 2)) if kind == "bsr" else csr.asformat(kind)
    for part in ("indptr", "indices"):
        if hasattr(value, part):
            setattr(value, part, getattr(value, part).astype(idtype))
    if kind == "coo":
        value.coords = tuple(c.astype(idtype) for c in value.coords)
    return value


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr"])
def test_an_argument_in_the_layout_of_the_format_lends_its_arrays(kind, idtype):
    value = sorted_argument(kind, idtype)
    parameters = {"r": 3, "c": 2} if kind == "bsr" else {}
    piece = SparseTensor.from_scipy(value, kind, **parameters).pieces[0]
    assert np.shares_memory(piece.values, value.data)
    own = value.coords if kind == "coo" else (value.indptr, value.indices)
    for array, other in zip(piece.arrays.values(), own, strict=True):
        assert np.shares_memory(array, other)


def test_what_comes_back_shares_nothing_with_the_argument():
    value = sorted_argument("csr")
    tensor = SparseTensor.from_scipy(value)
    copies = [tensor.restore(), tensor.to_scipy(), SparseTensor.from_scipy(value, "csr").to_scipy("csc")]
    for found in copies:
        for part in ("data", "indices", "indptr"):
            assert not np.shares_memory(getattr(found, part), getattr(value, part))
    shared = tensor.to_scipy(copy=False)
    assert np.shares_memory(shared.data, value.data)
    assert np.shares_memory(shared.indices, value.indices)


def test_index_types_follow_the_argument_unless_told():
    matrix = sorted_argument("csr", "int64")
    assert SparseTensor.from_any(matrix).idtype == "int64"
    assert SparseTensor.from_any(matrix, idtype="int32").idtype == "int32"
    assert SparseTensor.from_any(matrix, formats.csr(idtype="int32")).idtype == "int32"
    assert SparseTensor.from_any(sorted_argument("csr")).idtype == "int32"
    assert SparseTensor.from_dense(small()).idtype == "int32"
    assert SparseTensor.from_any(sorted_argument("csr")).convert("bsr", r=2, idtype="int64").idtype == "int64"
    assert SparseTensor.from_any(matrix).convert(formats.ell(idtype="int64"), idtype="int32").idtype == "int32"
    assert SparseTensor.from_dense(small(), idtype="int64").convert("csc").idtype == "int64"
    tensor = SparseTensor.from_any(matrix, "bsr", r=2)
    assert SparseTensor.from_any(tensor).format == tensor.format
    assert SparseTensor.from_any(tensor, idtype="int32").pieces[0].arrays["indices"].dtype == "int32"


@pytest.mark.parametrize(("name", "parameters"), MATRIX_FORMATS, ids=FORMAT_IDS)
def test_indices_widen_where_the_stored_values_need_it(monkeypatch, name, parameters):
    dense = small()
    stored = SparseTensor.from_dense(dense, name, **parameters).pieces[0].packed.count
    monkeypatch.setattr(limits, "INT32_END", stored + 1 if stored > 4 else 5)
    assert SparseTensor.from_dense(dense, name, **parameters).idtype == "int32"
    monkeypatch.setattr(limits, "INT32_END", max(stored, 5))
    wide = SparseTensor.from_dense(dense, name, **parameters)
    assert wide.idtype == ("int64" if stored >= 5 else "int32")
    check_stored(wide, dense)
    if stored >= 5:
        with pytest.raises(StructureError, match=f"would store {stored} values.*idtype"):
            SparseTensor.from_dense(dense, name, idtype="int32", **parameters)


@pytest.mark.parametrize("name", ["coo", "csf", "dcsr", "csc", "dbsr"])
def test_a_dimension_beyond_32_bits(name):
    far = 2**31 + 5
    value = CooTensor(np.array([[far, 7, far], [1, 0, 0]]), np.array([1.0, 2.0, 3.0]), (far + 1, 3))
    tensor = SparseTensor.from_any(value, name)
    assert tensor.idtype == "int64"
    check_restored(tensor.restore(), value)
    assert tensor.convert("coo").pieces[0].arrays["indices_i"].tolist() == [7, far, far]
    with pytest.raises(StructureError, match="int32 indices cannot count the dimensions 2147483654 x 3"):
        SparseTensor.from_any(value, name, idtype="int32")


# --- what is refused ---------------------------------------------------------------------------------------------


def broken(kind):
    value = sorted_argument("csr")
    if kind == "column":
        value.indices[1] = 9
    elif kind == "decreasing":
        value.indptr[1] = 4
        value.indptr[2] = 1
    elif kind == "short":
        value.indices = value.indices[:-1]
    else:
        value = value.tocoo()
        value.coords[0][1] = -1
    return value


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("column", r"indices of axis 1 of the csr_array hold 9 at position 1, expected one of \[0, 4\)"),
        ("decreasing", "indptr of axis 1 of the csr_array decreases at row 1"),
        ("short", "the csr_array has 4 values but 3 indices"),
        ("negative", r"entry 1 of the coo_array has coordinate -1 in dimension 0, expected one of \[0, 3\)"),
    ],
)
def test_broken_arguments(kind, message):
    for name, parameters in MATRIX_FORMATS:
        with pytest.raises(StructureError, match=message):
            SparseTensor.from_any(broken(kind), name, **parameters)


def test_formats_say_what_they_expect():
    cube = CooTensor.from_dense(np.ones((2, 2, 2)))
    with pytest.raises(ArgumentError, match=r"no format is called 'crs'; there are .*csr"):
        SparseTensor.from_any(cube, "crs")
    with pytest.raises(ArgumentError, match="csr stores tensors of 2 dimensions, got one of 3: take csf"):
        SparseTensor.from_any(cube, "csr")
    with pytest.raises(ArgumentError, match="csf stores tensors of 2 dimensions, got one of 3"):
        SparseTensor.from_any(cube, "csf", order=(1, 0))
    with pytest.raises(ArgumentError, match="order of csf must name each dimension from 0 on once"):
        formats.csf((0, 2))
    with pytest.raises(ArgumentError, match="csf does not know its dimensions yet"):
        formats.csf().rules
    with pytest.raises(ArgumentTypeError, match="width: expected one of r, c, idtype, got a name that bsr"):
        SparseTensor.from_dense(small(), "bsr", width=3)
    with pytest.raises(ArgumentError, match="r of bsr: expected a positive integer, got 0"):
        formats.bsr(0)
    with pytest.raises(ArgumentTypeError, match="idtype: expected one of int32, int64, got 'int16'"):
        SparseTensor.from_dense(small(), idtype="int16")
    with pytest.raises(ArgumentTypeError, match="idtype: expected one of"):
        formats.csr(idtype="float32")
    with pytest.raises(ArgumentError, match=r"bsr\(r=2, c=2\) has its parameters; r go with the name"):
        SparseTensor.from_dense(small(), formats.bsr(2), r=2)
    with pytest.raises(StructureError, match=r"row 0 holds 2 entries but ell\(width=1\) has 1 slots in a row"):
        SparseTensor.from_dense(small(), "ell", width=1)


def test_values_of_the_wrong_size_are_refused():
    tensor = SparseTensor.from_dense(small(), "bsr", r=2)
    with pytest.raises(ArgumentError, match="expected values for 1 pieces, got 2"):
        tensor.restore([np.ones(12), np.ones(12)])
    with pytest.raises(ArgumentError, match="values in piece bsr, got an array of shape"):
        tensor.with_values([np.ones(3)])
    with pytest.raises(ArgumentError, match=r"expected 4 entries, got an array of shape \(5,\)"):
        tensor.restore(np.ones(5))


def test_scipy_classes_that_cannot_hold_the_tensor():
    with pytest.raises(ArgumentError, match="scipy stores csr as a matrix, the tensor has 3 dimensions"):
        SparseTensor.from_dense(np.ones((2, 2, 2))).to_scipy("csr")
    with pytest.raises(ArgumentError, match=r"scipy has the formats .*, got 'sell'"):
        SparseTensor.from_dense(small()).to_scipy("sell")
    sticking_out = SparseTensor.from_dense(small(), "bsr", r=2)
    assert sticking_out.to_scipy().format == "csr"
    with pytest.raises(ArgumentError, match="blocks of 2 x 2 do not divide 3 x 4"):
        sticking_out.to_scipy("bsr")


# --- trees that a user declares ----------------------------------------------------------------------------------

BAND = """
@T.prim_func
def band(a: T.handle, m: T.int32, n: T.int32, w: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_fixed(I, (n, 2 * w + 1), lambda i, s: i + s - w)
    A = T.match_sparse_buffer(a, (I, J))
"""

SLICES = """
@T.prim_func
def slices(a: T.handle, indptr: T.handle, indices: T.handle, ms: T.int32, n: T.int32, nnz: T.int32):
    S = T.dense_fixed(ms)
    J = T.sparse_variable(S, (n, nnz), (indptr, indices))
    R = T.dense_fixed(3)
    A = T.match_sparse_buffer(a, (S, J, R))
"""


def test_a_band_by_formula():
    dense = np.diag([1.0, 2, 3, 4]) + np.diag([5.0, 6, 7], 1)
    tensor = SparseTensor.from_dense(dense, formats.tree(sparsetir.parse(BAND), sizes={"w": 1}, fills=True))
    check_stored(tensor, dense)
    assert tensor.padding == pytest.approx(5 / 12)
    with pytest.raises(ArgumentError, match=r"does not show the size w of the formula of axis J: pass sizes="):
        SparseTensor.from_dense(dense, formats.tree(sparsetir.parse(BAND)))
    with pytest.raises(StructureError, match="lies outside the pattern"):
        SparseTensor.from_dense(np.ones((4, 4)), formats.tree(sparsetir.parse(BAND), sizes={"w": 1}))


@pytest.mark.slow
@quick
@given(lists(order=2))
def test_columns_of_slices_of_rows(matrix):
    sliced = formats.tree(
        sparsetir.parse(SLICES),
        {0: ["S", "R"], 1: ["J"]},
        inverse=lambda s, j, r: (s * 3 + r, j),
        forward=lambda i, j: (i // 3, j, i % 3),
        fills=True,
    )
    tensor = SparseTensor.from_any(matrix, sliced)
    check_stored(tensor, matrix.to_dense())
    check_restored(tensor.restore(), matrix)


def test_formulas_that_disagree_are_found_out():
    options = {"inverse": lambda s, j, r: (s * 3 + r, j), "fills": True}
    wrong = formats.tree(
        sparsetir.parse(SLICES), {0: ["S", "R"], 1: ["J"]}, forward=lambda i, j: (i // 3, j, 0 * i), **options
    )
    with pytest.raises(ArgumentError, match=r"forward= and inverse= disagree: entry \(2, 0\) comes back as \(0, 0\)"):
        SparseTensor.from_dense(small(), wrong)


# --- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), MATRIX_FORMATS, ids=FORMAT_IDS)
def test_a_tensor_stands_where_a_kernel_takes_a_sparse_argument(name, parameters):
    rng = np.random.default_rng(0)
    matrix = sp.random_array((9, 7), density=0.3, rng=rng, format="csr", dtype=np.float32)
    tensor = SparseTensor.from_scipy(matrix, name, **parameters)
    B = rng.random((7, 4), dtype=np.float32)
    np.testing.assert_allclose(sparsetir.build(sparsetir.ops.spmm())(A=tensor, B=B), matrix @ B, rtol=1e-5)


def test_a_sparse_result_has_the_arguments_format():
    rng = np.random.default_rng(0)
    matrix = sp.random_array((9, 7), density=0.3, rng=rng, format="csr", dtype=np.float32)
    tensor = SparseTensor.from_scipy(matrix, "bsr", r=2)
    X, Y = rng.random((9, 4), dtype=np.float32), rng.random((7, 4), dtype=np.float32)
    found = sparsetir.build(sparsetir.ops.sddmm())(S=tensor, X=X, Y=Y)
    assert isinstance(found, SparseTensor)
    assert found.format == tensor.format
    np.testing.assert_allclose(found.to_dense(), matrix.toarray() * (X @ Y.T), rtol=1e-5)
    check_stored(found, found.to_dense())


def test_the_arrays_of_a_piece_run_in_a_program_over_its_axes():
    dense = small()
    tensor = SparseTensor.from_dense(dense, "ell")
    piece, B = tensor.pieces[0], np.arange(8, dtype="float32").reshape(4, 2)
    kernel = sparsetir.build(sparsetir.ops.spmm(format="ell"))
    found = kernel(a=piece.values, indices=piece.arrays["indices"], B=B, m=3, n=4, width=piece.sizes["width"])
    np.testing.assert_array_equal(found, dense @ B)


# --- other words for it ------------------------------------------------------------------------------------------


@pytest.mark.slow
@quick
@given(lists(), st.data())
def test_binsparse_there_and_back(tensor, data):
    names = ["coo", "csf"] + ["csr", "csc", "dcsr"] * (tensor.order == 2)
    name = data.draw(st.sampled_from(names))
    parameters = {"order": data.draw(st.permutations(range(tensor.order)))} if name == "csf" else {}
    stored = SparseTensor.from_any(tensor, name, **parameters)
    descriptor, arrays = stored.__binsparse_descriptor__(), stored.__binsparse__()
    inner = descriptor["binsparse"]
    assert set(inner["data_types"]) == set(arrays)
    assert inner["number_of_stored_values"] == stored.nnz
    assert all(inner["data_types"][key] == array.dtype.name for key, array in arrays.items())
    again = SparseTensor.from_binsparse(descriptor, arrays)
    np.testing.assert_array_equal(again.to_dense(), tensor.to_dense())
    if tensor.order == 2 and name != "csf":
        assert again.format == stored.format
    foreign = SparseTensor.from_any(Foreign(descriptor, arrays))
    np.testing.assert_array_equal(foreign.to_coo().coords, np.stack(stored.coords))


class Foreign:
    """An object of another library that knows the protocol."""

    def __init__(self, descriptor, arrays):
        self.descriptor, self.arrays = descriptor, arrays

    def __binsparse_descriptor__(self):
        return self.descriptor

    def __binsparse__(self):
        return self.arrays


def described(alias, shape, arrays, **more):
    types = {name: str(a.dtype) for name, a in arrays.items()}
    return {"binsparse": {"version": "0.1", "format": alias, "shape": shape, "data_types": types, **more}}, arrays


SPECIFIED = {
    "pointers_to_1": np.array([0, 1, 3, 3, 5, 6], "uint64"),
    "indices_1": np.array([3, 1, 4, 1, 2, 3], "uint64"),
    "values": np.array([7], "int8"),
}


def test_the_examples_of_the_specification():
    descriptor, arrays = described("CSR", [5, 5], SPECIFIED)
    descriptor["binsparse"]["data_types"]["values"] = "iso[int8]"
    found = SparseTensor.from_binsparse(descriptor, arrays)
    assert found.to_coo().coords.tolist() == [[0, 1, 1, 3, 3, 4], [3, 1, 4, 1, 2, 3]]
    assert found.values.tolist() == [7] * 6
    lower = {
        "pointers_to_1": np.array([0, 1, 3, 5, 7, 9], "uint64"),
        "indices_1": np.array([0, 0, 1, 0, 2, 1, 3, 2, 4], "uint64"),
        "values": np.array([1, 2, 9, 7, 2, 2, 3, 3, 7], "int8"),
    }
    half = SparseTensor.from_binsparse(*described("CSR", [5, 5], lower)).to_dense()
    whole = SparseTensor.from_binsparse(*described("CSR", [5, 5], lower, structure="symmetric_lower")).to_dense()
    np.testing.assert_array_equal(whole, half + np.tril(half, -1).T)
    skew = SparseTensor.from_binsparse(*described("CSR", [5, 5], lower, structure="skew_symmetric_lower")).to_dense()
    np.testing.assert_array_equal(skew, half - np.tril(half, -1).T)


def test_other_descriptors():
    ones = {"indices_0": np.array([2, 4]), "indices_1": np.array([1, 1]), "values": np.array([1.0, 2.0])}
    by_columns = SparseTensor.from_binsparse(*described("COOC", [3, 5], ones, index_base=1))
    assert by_columns.to_dense().tolist() == [[0, 1, 0, 2, 0], [0] * 5, [0] * 5]
    full = {"values": np.arange(6.0)}
    assert SparseTensor.from_binsparse(*described("DMATC", [2, 3], full)).to_dense().tolist() == [[0, 2, 4], [1, 3, 5]]
    truth = SparseTensor.from_dense(np.eye(2, dtype=bool))
    assert truth.__binsparse_descriptor__()["binsparse"]["data_types"]["values"] == "bint8"
    assert SparseTensor.from_binsparse(truth).to_dense().dtype == np.bool_
    waves = SparseTensor.from_dense(np.array([[1j, 0], [0, 2]]))
    assert waves.__binsparse_descriptor__()["binsparse"]["data_types"]["values"] == "complex[float64]"
    np.testing.assert_array_equal(SparseTensor.from_binsparse(waves).to_dense(), waves.to_dense())


def test_descriptors_that_are_refused():
    for change, message in [
        ({"version": "2.0"}, "expected Binsparse version 0.1, got 2.0"),
        ({"format": "HASH"}, "expected one of DVEC.* or a custom format, got 'HASH'"),
        ({"structure": "round"}, "expected a symmetric, hermitian or skew_symmetric matrix"),
        ({"fill": True}, "asks for the array fill_value"),
        ({"format": {"custom": {"level": {"level_desc": "run"}}}}, "expected the levels dense, sparse and element"),
        ({"shape": [5]}, "the levels name the dimensions"),
    ]:
        descriptor, arrays = described("CSR", [5, 5], SPECIFIED)
        descriptor["binsparse"]["data_types"]["values"] = "iso[int8]"
        descriptor["binsparse"] |= change
        with pytest.raises(ArgumentError, match=message):
            SparseTensor.from_binsparse(descriptor, arrays)
    descriptor, arrays = described("CSR", [5, 5], {**SPECIFIED, "fill_value": np.ones(1)}, fill=True)
    with pytest.raises(ArgumentError, match="filled with something else than zero"):
        SparseTensor.from_binsparse(descriptor, arrays)
    with pytest.raises(ArgumentError, match="asks for the array indices_1, got pointers_to_1"):
        SparseTensor.from_binsparse(descriptor | described("CSR", [5, 5], {})[0], {"pointers_to_1": np.arange(6)})
    with pytest.raises(ArgumentError, match="expected 6 values, got 1"):
        SparseTensor.from_binsparse(*described("CSR", [5, 5], SPECIFIED))
    with pytest.raises(ArgumentError, match=r"no words for ell\(\): convert it to one of csr"):
        SparseTensor.from_dense(small(), "ell").__binsparse__()


def test_a_tensor_prints_its_pieces():
    tensor = SparseTensor.from_dense(small(), "bsr", r=2)
    first, second = repr(tensor).splitlines()
    assert first == "SparseTensor 3 x 4 float32 as bsr(r=2, c=2): 4 entries, 75% padding, 92 bytes"
    assert second == "  [IO: dense_fixed, JO: sparse_variable, II: dense_fixed, JI: dense_fixed] mb=2, nb=2, nnzb=4"
    assert repr(tensor.pieces[0]).endswith("4 entries, 75% padding, 92 bytes")


def test_every_format_of_the_registry_is_made_by_its_name():
    for name, maker in formats.REGISTRY.items():
        if name != "tree":
            given = {"bsr": [4], "encoded": ["(i, j) -> (i : dense, j : compressed)"]}
            made = maker(*given.get(name, []))
            assert made.name == name
            assert formats.make(name, **made.parameters) == made


# --- cost --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", ["square", "blocks", "capped"])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("csr", {}), ("csc", {}), ("coo", {}), ("dcsr", {}), ("bsr", {"r": 4}), ("ell", {})],
    ids=["csr", "csc", "coo", "dcsr", "bsr", "ell"],
)
def test_converting_needs_little_memory_beside_input_and_output(shape, name, parameters):
    rng = np.random.default_rng(0)
    if shape == "blocks":
        matrix = sp.kron(sp.random_array((12_000, 12_000), density=1e-3, rng=rng), np.ones((4, 4)), format="csr")
    else:
        side = 30_000 if shape == "square" else 200_000
        matrix = sp.random_array((side, side), density=2_000_000 / side**2, rng=rng, format="csr")
    matrix = sp.csr_array(matrix.astype(np.float32))
    matrix.indptr, matrix.indices = matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32)
    matrix.sort_indices()
    SparseTensor.from_scipy(matrix[:8], name, **parameters)
    tracemalloc.start()
    tensor = SparseTensor.from_scipy(matrix, name, **parameters)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    own = matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes
    assert own + peak <= 1.3 * (own + tensor.nbytes)


@quick
@given(st.integers(1, 4), st.integers(0, 30), st.integers(1, 9), st.integers(0, 999))
def test_blocks_are_numbered_as_unique_would(runs, keys, extent, seed):
    rng = np.random.default_rng(seed)
    of = np.sort(rng.integers(0, runs, keys))
    key = rng.integers(0, extent, keys).astype("int32")
    starts = np.searchsorted(of, np.arange(runs + 1))
    found, numbers, held = number_blocks(starts, key, extent)
    expected, inverse = np.unique(of * extent + key, return_inverse=True)
    assert found.tolist() == (expected % extent).tolist()
    assert numbers.tolist() == inverse.tolist()
    assert held.tolist() == np.bincount(expected // extent, minlength=runs).tolist()


def test_large_arrays_sort_by_counting_as_by_comparing():
    rng = np.random.default_rng(0)
    rows, cols = rng.integers(0, 3_000, (2, 20_000)).astype("int32")
    np.testing.assert_array_equal(stable_argsort(rows, 3_000), np.argsort(rows, kind="stable"))
    np.testing.assert_array_equal(sorting_order([rows, cols], [3_000] * 2), np.lexsort((cols, rows)))
    assert sorting_order([np.sort(rows)], [3_000]) is None


@pytest.mark.slow
def test_large_matrices_take_the_same_way():
    rng = np.random.default_rng(0)
    matrix = sp.random_array((700, 900), density=0.05, rng=rng, format="csr")
    mixed = matrix.copy()
    for row in range(700):
        part = slice(mixed.indptr[row], mixed.indptr[row + 1])
        order = rng.permutation(part.stop - part.start)
        mixed.indices[part], mixed.data[part] = mixed.indices[part][order], mixed.data[part][order]
    for value in (matrix, mixed, mixed.tocoo(), matrix.tocsc(), matrix.tobsr((7, 9))):
        for name, parameters in MATRIX_FORMATS[:5] + MATRIX_FORMATS[6:]:
            tensor = SparseTensor.from_scipy(value, name, **parameters)
            np.testing.assert_array_equal(tensor.to_dense(), matrix.toarray())
            restored = tensor.restore()
            np.testing.assert_array_equal(restored.data, value.data)
            for part in ("indices", "indptr"):
                if hasattr(value, part):
                    np.testing.assert_array_equal(getattr(restored, part), getattr(value, part))


# --- real matrices -----------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("SPARSETIR_DATA", ""))
REAL = ["graphs/amazon_computers.npz", "graphs/pubmed.npz", "graphs/usroads.npz"]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(not os.environ.get("SPARSETIR_DATA"), reason="SPARSETIR_DATA names no folder")
@pytest.mark.parametrize("file", REAL)
def test_real_matrices(file):
    matrix = sparsetir.read(DATA / file)
    for name, parameters in MATRIX_FORMATS[:5] + MATRIX_FORMATS[6:]:
        if name in ("ell", "ragged") and matrix.shape[0] > 20_000:
            continue
        tensor = SparseTensor.from_scipy(matrix, name, **parameters)
        restored = tensor.restore([p.values for p in tensor.pieces])
        np.testing.assert_array_equal(restored.indices, matrix.indices)
        np.testing.assert_array_equal(restored.data, matrix.data)
        assert sum(int(np.count_nonzero(p.values)) for p in tensor.pieces) == np.count_nonzero(matrix.data)
        back = tensor.convert("csc").to_scipy() - matrix.tocsc()
        assert abs(back).max() == 0


@pytest.mark.real
@pytest.mark.skipif(not os.environ.get("SPARSETIR_DATA"), reason="SPARSETIR_DATA names no folder")
@pytest.mark.parametrize("file", sorted((DATA / "tensors").glob("*.npz")) if os.environ.get("SPARSETIR_DATA") else [])
def test_real_tensors(file):
    tensor = sparsetir.read(file)
    stored = SparseTensor.from_file(file, "csf", order=tuple(reversed(range(tensor.order))))
    found = stored.restore()
    np.testing.assert_array_equal(found.coords, tensor.coords)
    np.testing.assert_array_equal(found.values, tensor.values)


# --- rows in another order --------------------------------------------------------------------------------------


def shuffled_band(m: int, seed: int = 0) -> Any:
    """A band matrix whose rows and columns were numbered anew."""
    rng = np.random.default_rng(seed)
    band = sp.diags_array([np.ones(m - abs(k)) for k in range(-3, 4)], offsets=range(-3, 4), format="csr")
    order = rng.permutation(m)
    return sp.csr_array(band[order][:, order].astype("float32"))


def test_rows_that_share_columns_become_neighbours() -> None:
    A = shuffled_band(200)
    (piece,) = formats.reordered().pack(formats.Entries.of_rows(A.shape, A.indptr, A.indices))
    rows = piece.arrays["rows"]
    assert sorted(rows.tolist()) == list(range(200))
    shared = [len(np.intersect1d(A.indices[A.indptr[a] : A.indptr[a + 1]], A.indices[A.indptr[b] : A.indptr[b + 1]]))
              for a, b in itertools.pairwise(rows)]  # fmt: skip
    assert np.mean(shared) > 4


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_reordered_rows_keep_their_numbers_in_results(chunks: int) -> None:
    wide = sp.random_array((40, 90), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(1))
    parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.reordered()})
    kernel = sparsetir.build(parts, schedule=Choices(chunks=chunks))
    for A in (shuffled_band(97), wide, sp.csr_array(wide.T), sp.csr_array((6, 6), dtype="float32")):
        B = np.random.default_rng(2).random((A.shape[1], 20), dtype="float32")
        np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-5, atol=1e-6)


def test_chunks_of_listed_rows_have_equal_work() -> None:
    text = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.reordered()})).script(3)
    search = text[text.index("while first[0]") :].splitlines()[1]
    assert "indptr_reordered_1[" in search


@pytest.mark.parametrize(
    ("register", "error", "message"),
    [
        (lambda: formats.register("csr")(lambda: formats.make("coo")), ArgumentError, "name: expected a new name"),
        (lambda: formats.register(3), ArgumentTypeError, "name: expected the name of a format, got int"),
        (
            lambda: formats.register(lambda: None),
            ArgumentTypeError,
            "name: expected the name of a format, got function",
        ),
        (lambda: formats.register("a b"), ArgumentError, "name: expected an identifier, got 'a b'"),
        (
            lambda: formats.register("five")(5),
            ArgumentTypeError,
            "format five: expected a class or a function, got int",
        ),
    ],
)
def test_formats_that_are_not_registered(register: Any, error: Any, message: str) -> None:
    before = dict(formats.REGISTRY)
    with pytest.raises(error, match=message):
        register()
    assert formats.REGISTRY == before


def test_a_registered_function_is_replaced_and_returns_a_format() -> None:
    try:
        formats.register("of_this_test")(lambda: None)
        with pytest.raises(ArgumentTypeError, match="format of_this_test: expected its function to return a format"):
            formats.make("of_this_test")
        formats.register("of_this_test")(lambda: formats.make("coo"))
        assert formats.make("of_this_test") == formats.make("coo")
    finally:
        formats.REGISTRY.pop("of_this_test", None)


@pytest.mark.parametrize(("density", "rows"), [(0.25, [0, 1, 3]), (0.5, [1, 3]), (0.75, [3]), (1.0, [3])])
def test_rows_are_stored_whole_from_a_density_on(density: float, rows: list[int]) -> None:
    matrix = sp.csr_array(np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], "float32"))
    tensor = sparsetir.SparseTensor.from_scipy(matrix, formats.dense_rows(density=density))
    assert tensor.pieces[0].arrays["rows"].tolist() == rows
    assert np.array_equal(tensor.to_dense(), matrix.toarray())
