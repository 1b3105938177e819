# SPDX-License-Identifier: Apache-2.0
"""Sparse arguments laid out as axes and back, against a slow reading of the stored arrays."""

from __future__ import annotations

import array
import copy
import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
from each import examples
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.interop import (
    CooTensor,
    Level,
    aligned_contiguous,
    check_level,
    is_sparse,
    restore,
    storage,
    store,
    to_torch,
    writable_alias,
)
from sparsetir.interop import is_sound as found_sound
from sparsetir.utils import buffers
from sparsetir.utils.caches import CACHES

settings.register_profile("interop", max_examples=examples(60), deadline=None)
settings.load_profile("interop")

CLASSES = [f"{f}_{kind}" for f in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok") for kind in ("array", "matrix")]


# A slow reading of stored arrays, straight from the meaning of the axes


def fiber(stored, levels, d, parent, above):
    """(position, coordinate) of every slot below a parent position."""
    level, length = levels[d], stored.lengths[d]
    if level.kind == "dense_fixed":
        return [(s, s) for s in range(length)]
    if level.kind == "dense_implicit":
        return [(int(level.offset_rule(*above)) + s, s) for s in range(int(level.extent_rule(*above)))]
    if level.kind in ("dense_variable", "sparse_variable"):
        begin, end = (int(x) for x in stored.indptr[d][parent : parent + 2])
        coordinate = stored.indices.get(d, np.arange(end) - begin)
        return [(q, int(coordinate[q])) for q in range(begin, end)]
    width = 1 if level.kind == "singleton" else stored.widths[d]
    slots = [(parent * width + s, s) for s in range(width)]
    if level.rule is not None:
        return [(q, int(level.rule(*above, s, q))) for q, s in slots]
    return [(q, int(stored.indices[d][q])) for q, _ in slots]


def chains(levels):
    """Levels of each tree, root first."""
    children = {level.parent: d for d, level in enumerate(levels) if level.parent is not None}
    found = []
    for d in range(len(levels)):
        root = d
        while levels[root].parent is not None:
            root = levels[root].parent
        chain = [root]
        while chain[-1] in children:
            chain.append(children[chain[-1]])
        if chain not in found:
            found.append(chain)
    return found


def leaves(stored, levels, chain):
    """(position, {level: coordinate}) of every stored element of a tree."""
    found = [(0, {})]
    for d in chain:
        found = [
            (q, {**coords, d: c})
            for p, coords in found
            for q, c in fiber(stored, levels, d, p, list(coords.values()))
            if 0 <= c < stored.lengths[d]
        ]
    return found


def dense_of(stored, levels):
    dense = np.zeros([stored.lengths[d] for d in range(len(levels))], stored.values.dtype)
    for parts in itertools.product(*(leaves(stored, levels, chain) for chain in chains(levels))):
        coords = {d: c for _, part in parts for d, c in part.items()}
        dense[tuple(coords[d] for d in range(len(levels)))] += stored.values[tuple(q for q, _ in parts)]
    return dense


def check_stored(stored, levels, name="A"):
    """Every array that came out would be accepted as a raw argument, and has the axis' index type."""
    for chain in chains(levels):
        count = 1
        for d in chain:
            indptr, indices = stored.indptr.get(d), stored.indices.get(d)
            level = replace(levels[d], width=stored.widths.get(d))
            lengths = {"parent_count": count, "length": stored.lengths[d]}
            check_level(level, indptr, indices, **lengths, name=name, need_sorted=level.sorted)
            assert all(a.dtype == level.idtype for a in (indptr, indices) if a is not None)
            if level.kind == "dense_fixed":
                count = stored.lengths[d]
            elif indptr is not None:
                count = int(indptr[-1])
            elif level.kind == "sparse_fixed":
                count *= stored.widths[d]
            elif level.kind == "dense_implicit":
                count = stored.values.shape[0]
        assert count == stored.values.shape[chains(levels).index(chain)]


# Formats


def axes(*specs, idtype="int32"):
    return [Level(name, kind, parent, idtype, **more) for name, kind, parent, more in specs]


def matrix_formats(idtype="int32"):
    """Level lists that any matrix can be stored in."""
    loose = {"unique": False}
    lists = {
        "csr": [("I", "dense_fixed", None, {}), ("J", "sparse_variable", 0, {})],
        "csc": [("I", "sparse_variable", 1, {}), ("J", "dense_fixed", None, {})],
        "coo": [("I", "sparse_variable", None, loose), ("J", "singleton", 0, {})],
        "coo by column": [("I", "singleton", 1, {}), ("J", "sparse_variable", None, loose)],
        "coo unsorted": [("I", "sparse_variable", None, {"sorted": False, **loose}), ("J", "singleton", 0, {})],
        "csr with repeats": [("I", "dense_fixed", None, {}), ("J", "sparse_variable", 0, loose)],
        "csr unsorted": [("I", "dense_fixed", None, {}), ("J", "sparse_variable", 0, {"sorted": False})],
        "dcsr": [("I", "sparse_variable", None, {}), ("J", "sparse_variable", 0, {})],
        "dcsc": [("I", "sparse_variable", 1, {}), ("J", "sparse_variable", None, {})],
        "dcsr below a root": [
            ("O", "dense_fixed", None, {"length": 1}),
            ("I", "sparse_variable", 0, {}),
            ("J", "sparse_variable", 1, {}),
        ],
        "ell": [("I", "dense_fixed", None, {}), ("J", "sparse_fixed", 0, {})],
        "ell by column": [("I", "sparse_fixed", 1, {}), ("J", "dense_fixed", None, {})],
        "ell of ell": [("I", "sparse_fixed", None, {}), ("J", "sparse_fixed", 0, {})],
        "csr below ell": [("I", "sparse_fixed", None, {}), ("J", "sparse_variable", 0, {})],
        "ragged": [("I", "dense_fixed", None, {}), ("J", "dense_variable", 0, {})],
        "ragged below sparse": [("I", "sparse_variable", None, {}), ("J", "dense_variable", 0, {})],
        "dense": [("I", "dense_fixed", None, {}), ("J", "dense_fixed", None, {})],
        "band": [
            ("I", "dense_fixed", None, {}),
            ("J", "sparse_fixed", 0, {"width": 13, "rule": lambda i, s, p: i + s - 6}),
        ],
        "band backwards": [
            ("I", "sparse_fixed", None, {"width": 7, "rule": lambda s, p: 6 - s}),
            ("J", "sparse_variable", 0, {}),
        ],
        "packed": [
            ("I", "dense_fixed", None, {}),
            ("J", "dense_implicit", 0, {"extent_rule": lambda i: i + 6, "offset_rule": lambda i: i * (i + 11) // 2}),
        ],
    }
    return {name: axes(*specs, idtype=idtype) for name, specs in lists.items()}


MATRIX_FORMATS = sorted(matrix_formats())


def csf(modes, root="dense_fixed", idtype="int32"):
    """Compressed sparse fibers, with the dimensions nested in the order of `modes`."""
    levels = [Level("", "")] * len(modes)
    for depth, d in enumerate(modes):
        kind = root if depth == 0 else "sparse_variable"
        levels[d] = Level(f"D{d}", kind, None if depth == 0 else modes[depth - 1], idtype)
    return levels


def coo(modes, idtype="int32"):
    """A list of coordinates: the first of `modes` holds the rows of the list, the others hang below it."""
    root, *others = csf(range(len(modes)), "sparse_variable", idtype)
    chain = [replace(root, unique=False), *(replace(level, kind="singleton") for level in others)]
    return [replace(chain[depth], parent=None if depth == 0 else modes[depth - 1]) for depth in np.argsort(modes)]


# Arguments


@st.composite
def tensors(draw, order, max_extent=6, repeats=True, nonzero=False):
    """A CooTensor with whole values (sums are exact), entries in any order, some perhaps equal."""
    shape = tuple(draw(st.lists(st.integers(0, max_extent), min_size=order, max_size=order)))
    size = int(np.prod(shape))
    cells = draw(st.lists(st.integers(0, size - 1), max_size=14, unique=not repeats)) if size else []
    dtype = draw(st.sampled_from(["float32", "float64"]))
    low = 1 if nonzero else -3
    values = np.array(draw(st.lists(st.integers(low, 9), min_size=len(cells), max_size=len(cells))), dtype)
    coords = np.stack(np.unravel_index(np.array(cells, np.int64), shape)) if cells else np.zeros((order, 0), np.int64)
    return CooTensor(coords.astype(draw(st.sampled_from([np.int32, np.int64]))), values, shape)


def as_scipy(tensor, cls):
    made = sp.coo_array(
        (tensor.values.copy(), tuple(tensor.coords.copy())), shape=tensor.shape
    )  # scipy may sum in place
    return made if cls == "coo_array" else getattr(sp, cls)(made)


def shuffled_csr(tensor):
    """A csr_array with unsorted and repeated indices, as scipy allows."""
    order = np.argsort(tensor.coords[0], kind="stable")
    rows, cols = tensor.coords[:, order]
    indptr = np.searchsorted(rows, np.arange(tensor.shape[0] + 1))
    return sp.csr_array((tensor.values[order], cols.astype(np.int32), indptr.astype(np.int32)), shape=tensor.shape)


def round_trip(value, dense, levels):
    """Store, read slowly, restore; nothing of the argument may change."""
    before = copy.deepcopy(value)
    stored = store(value, levels, name="A", dtype=str(dense.dtype))
    check_stored(stored, levels)
    assert stored.values.dtype == dense.dtype
    np.testing.assert_array_equal(dense_of(stored, levels).reshape(dense.shape), dense)
    for share in (True, False):
        doubled = restore(stored, stored.values * 2, copy_structure=not share)
        assert type(doubled) is type(value)
        np.testing.assert_array_equal(dense_again(doubled), dense * 2)
        assert entries(doubled) == entries(value)
    for part in ("data", "indices", "indptr", "values", "coords"):
        if isinstance(getattr(before, part, None), (np.ndarray, tuple)):
            np.testing.assert_array_equal(getattr(value, part), getattr(before, part))
    np.testing.assert_array_equal(dense_again(value), dense_again(before))
    return stored


def dense_again(value):
    return value.toarray() if sp.issparse(value) else value.to_dense()


def entries(value):
    return value.nnz


@pytest.mark.slow
@given(st.data(), st.sampled_from(CLASSES), st.sampled_from(MATRIX_FORMATS), st.sampled_from(["int32", "int64"]))
@settings(max_examples=examples(400))
def test_matrix_classes_and_formats(data, cls, fmt, idtype):
    tensor = data.draw(tensors(2))
    value = as_scipy(tensor, cls)
    round_trip(value, tensor.to_dense(), matrix_formats(idtype)[fmt])


@pytest.mark.slow
@given(tensors(2), st.sampled_from(MATRIX_FORMATS))
@settings(max_examples=examples(150))
def test_unsorted_and_repeated_csr(tensor, fmt):
    round_trip(shuffled_csr(tensor), tensor.to_dense(), matrix_formats()[fmt])


@pytest.mark.slow
@given(tensors(2), st.sampled_from(MATRIX_FORMATS))
@settings(max_examples=examples(150))
def test_coo_tensor_of_order_2(tensor, fmt):
    round_trip(tensor, tensor.to_dense(), matrix_formats()[fmt])


@pytest.mark.slow
@given(st.data(), st.integers(2, 5), st.sampled_from(["dense_fixed", "sparse_variable", "sparse_fixed"]))
@settings(max_examples=examples(120))
def test_csf_in_every_mode_order(data, order, root):
    tensor = data.draw(tensors(order, max_extent=4))
    modes = data.draw(st.permutations(range(order)))
    round_trip(tensor, tensor.to_dense(), csf(modes, root, data.draw(st.sampled_from(["int32", "int64"]))))


@given(st.data(), st.integers(1, 5))
def test_coo_levels_in_every_mode_order(data, order):
    tensor = data.draw(tensors(order, max_extent=4))
    stored = round_trip(tensor, tensor.to_dense(), coo(data.draw(st.permutations(range(order)))))
    assert stored.values.size == tensor.nnz  # repeated entries are kept apart


@pytest.mark.slow
@given(tensors(3, max_extent=4), st.sampled_from(["csr", "csc", "dcsr", "ell", "ragged", "coo"]), st.integers(0, 2))
@settings(max_examples=examples(120))
def test_batches(tensor, fmt, where):
    """A dense axis beside a tree, before, between or behind its levels."""
    inner = [d if d < where else d + 1 for d in range(2)]
    levels = [replace(f, parent=None if f.parent is None else inner[f.parent]) for f in matrix_formats()[fmt]]
    levels.insert(where, Level("B", "dense_fixed"))
    stored = round_trip(tensor, tensor.to_dense(), levels)
    assert stored.values.ndim == 2


@given(tensors(4, max_extent=3))
def test_two_sparse_trees(tensor):
    pair = axes(("I", "dense_fixed", None, {}), ("J", "sparse_variable", 0, {}))
    other = axes(("K", "dense_fixed", None, {}), ("L", "sparse_fixed", 2, {}))
    round_trip(tensor, tensor.to_dense(), pair + other)


@pytest.mark.slow
@given(tensors(1, max_extent=9))
def test_vectors(tensor):
    for levels in ([Level("I", "sparse_variable")], [Level("I", "sparse_fixed")], [Level("I", "dense_fixed")],
                   [Level("I", "dense_variable")], csf([0]), coo([0])):  # fmt: skip
        round_trip(tensor, tensor.to_dense(), levels)
        for cls in ("coo_array", "csr_array", "dok_array"):
            round_trip(as_scipy(tensor, cls), tensor.to_dense(), levels)


@given(tensors(3, max_extent=4))
def test_scipy_coo_of_order_3(tensor):
    round_trip(as_scipy(tensor, "coo_array"), tensor.to_dense(), csf([2, 0, 1]))


@pytest.mark.slow
@given(
    st.data(),
    st.sampled_from(CLASSES),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["bsr", "bsc", "ell", "dcsr"]),
)
@settings(max_examples=examples(200))
def test_blocks(data, cls, rows, cols, fmt):
    grid = data.draw(tensors(2, max_extent=3))
    fill = data.draw(tensors(2, max_extent=9))
    shape = (grid.shape[0] * rows, grid.shape[1] * cols)
    dense = np.zeros(shape, fill.values.dtype)
    part = fill.to_dense()[: shape[0], : shape[1]]
    dense[: part.shape[0], : part.shape[1]] = part
    outer = matrix_formats()[{"bsc": "csc", "bsr": "csr"}.get(fmt, fmt)]
    levels = [*outer, Level("II", "dense_fixed", length=rows), Level("JI", "dense_fixed", length=cols)]
    if cls.startswith("bsr"):
        if 0 in shape:
            return
        value = getattr(sp, cls)(dense, blocksize=(rows, cols))
    else:
        value = getattr(sp, cls)(dense)
    stored = store(value, levels, name="A", dtype=str(dense.dtype))
    check_stored(stored, levels)
    blocked = dense.reshape(grid.shape[0], rows, grid.shape[1], cols).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(dense_of(stored, levels), blocked)
    assert stored.values.shape[1:] == (rows, cols)
    again = restore(stored, stored.values * 3)
    assert type(again) is type(value)
    np.testing.assert_array_equal(again.toarray(), dense * 3)


def test_explicit_zeros_stay_entries():
    csr = sp.csr_array((np.array([0.0, 2.0]), [0, 2], [0, 2, 2]), shape=(2, 3))
    for fmt in ("csr", "csc", "coo", "dcsr"):
        assert store(csr, matrix_formats()[fmt], name="A", dtype="float64").values.size == 2
    dia = sp.dia_array((np.array([[1.0, 0.0, 3.0]]), [0]), shape=(3, 3))
    stored = store(dia, matrix_formats()["csr"], name="A", dtype="float64")
    assert stored.indices[1].tolist() == [0, 1, 2]
    assert restore(stored, np.array([4.0, 5.0, 6.0])).data.tolist() == [[4, 5, 6]]


def test_ell_padding_is_out_of_range():
    csr = sp.csr_array(np.array([[1.0, 0, 2], [0, 0, 0], [0, 3, 0]]))
    stored = store(csr, matrix_formats()["ell"], name="A", dtype="float64")
    assert stored.indices[1].tolist() == [0, 2, 3, 3, 1, 3]
    assert stored.values.tolist() == [1, 2, 0, 0, 3, 0]
    wider = [Level("I", "dense_fixed"), Level("J", "sparse_fixed", 0, width=3)]
    assert store(csr, wider, name="A", dtype="float64").widths == {1: 3}


def test_singleton_below_a_dense_axis():
    permutation = sp.csr_array(np.array([[0, 1.0, 0], [0, 0, 0], [2.0, 0, 0]]))
    levels = [Level("I", "dense_fixed"), Level("J", "singleton", 0)]
    stored = store(permutation, levels, name="P", dtype="float64")
    assert stored.indices[1].tolist() == [1, 3, 0]
    assert stored.values.tolist() == [1, 0, 2]
    np.testing.assert_array_equal(restore(stored, stored.values).toarray(), permutation.toarray())


def test_singleton_by_rule():
    levels = [Level("I", "dense_fixed"), Level("J", "singleton", 0, rule=lambda i, s, p: i + 1)]
    shifted = sp.dia_array((np.array([[9.0, 1, 2]]), [1]), shape=(3, 3))
    assert store(shifted, levels, name="A", dtype="float64").values.tolist() == [1, 2, 0]


def test_packed_triangle():
    lower = sp.csr_array(np.tril(np.arange(1.0, 10).reshape(3, 3)))
    rules = {"extent_rule": lambda i: i + 1, "offset_rule": lambda i: i * (i + 1) // 2}
    levels = axes(("I", "dense_fixed", None, {}), ("J", "dense_implicit", 0, rules))
    assert store(lower, levels, name="L", dtype="float64").values.tolist() == [1, 4, 5, 7, 8, 9]
    root = [Level("J", "dense_implicit", extent_rule=lambda: 4, offset_rule=lambda: 0)]
    assert store(CooTensor([[2]], np.ones(1), (4,)), root, name="v", dtype="float64").values.tolist() == [0, 0, 1, 0]


def test_repeated_entries_are_added_up_or_kept():
    twice = sp.coo_array((np.array([1.0, 2.0, 4.0]), ([0, 1, 0], [1, 0, 1])), shape=(2, 2))
    summed = store(twice, matrix_formats()["csr"], name="A", dtype="float64")
    assert summed.values.tolist() == [5, 2]
    assert restore(summed, summed.values).data.tolist() == [5, 2, 0]
    kept = store(twice, matrix_formats()["csr with repeats"], name="A", dtype="float64")
    assert kept.values.tolist() == [1, 4, 2]
    assert restore(kept, kept.values).data.tolist() == [1, 2, 4]


def test_huge_extents_are_sorted_without_a_common_key():
    top = 1 << 40
    tensor = CooTensor([[top - 1, 0, 5], [1, top - 1, 0]], np.array([1.0, 2.0, 3.0]), (top, top))
    stored = store(tensor, csf([0, 1], "sparse_variable", "int64"), name="T", dtype="float64")
    assert stored.values.tolist() == [2, 3, 1]
    assert restore(stored, stored.values).coords.tolist() == tensor.coords.tolist()


def test_large_arguments_are_sorted_by_counting():
    rng = np.random.default_rng(0)
    csr = sp.random_array((300, 200), density=0.3, format="csr", rng=rng)
    stored, csc = store(csr, matrix_formats()["csc"], name="A", dtype="float64"), csr.tocsc()
    np.testing.assert_array_equal(stored.indices[0], csc.indices)
    np.testing.assert_array_equal(stored.indptr[0], csc.indptr)
    np.testing.assert_array_equal(stored.values, csc.data)
    np.testing.assert_array_equal(restore(stored, stored.values).data, csr.data)
    tensor = CooTensor(rng.integers(0, 30, (3, 9000)), rng.integers(1, 9, 9000).astype(float), (30, 30, 30))
    round_trip(tensor, tensor.to_dense(), csf([1, 2, 0]))


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8", "int32", "int64", "bool", "bfloat16"])
def test_other_dtypes(dtype):
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    tensor = CooTensor([[1, 0, 1], [0, 1, 0]], np.array([1, 0, 1]).astype(kind), (2, 2))
    for fmt in ("csr", "coo", "ell"):
        stored = store(tensor, matrix_formats()[fmt], name="A", dtype=dtype)
        assert stored.values.dtype == kind
        assert restore(stored, stored.values).values.dtype == kind


# Zero copy


@pytest.mark.parametrize(("cls", "fmt", "d"), [("csr_array", "csr", 1), ("csc_matrix", "csc", 0)])
def test_compressed_layouts_are_borrowed(cls, fmt, d):
    value = getattr(sp, cls)(np.array([[0, 1.0], [2.0, 3.0]]))
    stored = store(value, matrix_formats()[fmt], name="A", dtype="float64")
    assert stored.is_borrowed
    assert stored.values is value.data
    assert np.shares_memory(stored.indptr[d], value.indptr)
    assert np.shares_memory(stored.indices[d], value.indices)
    result = np.array([4.0, 5.0, 6.0])
    shared, separate = restore(stored, result, copy_structure=False), restore(stored, result)
    assert np.shares_memory(shared.data, result)
    assert shared.indices is value.indices
    assert not np.shares_memory(separate.indices, value.indices)


def test_blocks_are_borrowed():
    value = sp.bsr_array(np.kron(np.eye(2), np.ones((2, 3))), blocksize=(2, 3))
    levels = [*matrix_formats()["csr"], Level("II", "dense_fixed"), Level("JI", "dense_fixed")]
    stored = store(value, levels, name="A", dtype="float64")
    assert stored.values is value.data
    assert stored.lengths == {0: 2, 1: 2, 2: 2, 3: 3}


def test_coordinate_lists_are_borrowed():
    coords = np.array([[0, 1], [1, 0]], np.int32)
    value = sp.coo_array((np.array([1.0, 2.0]), tuple(coords)), shape=(2, 2))
    stored = store(value, matrix_formats()["coo"], name="A", dtype="float64")
    assert stored.values is value.data
    assert np.shares_memory(stored.indices[1], value.coords[1])
    assert not store(value, matrix_formats()["coo by column"], name="A", dtype="float64").is_borrowed
    unsorted = sp.coo_array((np.array([1.0, 2.0]), ([1, 0], [1, 0])), shape=(2, 2))
    assert not store(unsorted, matrix_formats()["coo"], name="A", dtype="float64").is_borrowed
    assert store(unsorted, matrix_formats()["coo unsorted"], name="A", dtype="float64").is_borrowed


def test_restoring_after_the_argument_was_changed():
    value = sp.csr_array(np.array([[0, 1.0], [2.0, 3.0]]))
    stored = store(value, matrix_formats()["csr"], name="A", dtype="float64")
    value.data, value.indices, value.indptr = np.zeros(0), np.zeros(0, np.int32), np.zeros(3, np.int32)
    assert restore(stored, stored.values).toarray().tolist() == [[0, 1], [2, 3]]


def test_unchecked_takes_the_argument_as_it_is():
    value = sp.csr_array((np.ones(2), [1, 0], [0, 2]), shape=(1, 2))
    assert store(value, matrix_formats()["csr"], name="A", dtype="float64", check=False).values is value.data


def test_reserve_behind_the_last_row_is_left_out():
    value = sp.csr_array(np.array([[0, 1.0], [2.0, 3.0]]))
    value.data, value.indices = np.append(value.data, 9), np.append(value.indices, np.int32(7))
    stored = store(value, matrix_formats()["csr"], name="A", dtype="float64")
    assert stored.values.tolist() == [1, 2, 3]
    assert restore(stored, stored.values).toarray().tolist() == [[0, 1], [2, 3]]


def test_strided_and_foreign_values_are_copied():
    value = sp.csr_array(np.array([[0, 1.0], [2.0, 3.0]]))
    value.data = np.repeat(value.data, 2)[::2].astype(">f8")
    stored = store(value, matrix_formats()["csr"], name="A", dtype="float64")
    assert stored.values.flags.c_contiguous
    assert stored.values.dtype.isnative
    assert stored.values.tolist() == [1, 2, 3]


def test_read_only_arguments():
    value = sp.csr_array(np.array([[0, 1.0], [2.0, 3.0]]))
    for part in (value.data, value.indices, value.indptr):
        part.flags.writeable = False
    for fmt in ("csr", "csc", "ell", "coo"):
        stored = store(value, matrix_formats()[fmt], name="A", dtype="float64")
        assert restore(stored, stored.values).toarray().tolist() == [[0, 1], [2, 3]]


# Index types


def test_index_width_is_converted():
    csr = sp.csr_array(np.eye(3))
    csr.indices, csr.indptr = csr.indices.astype(np.int64), csr.indptr.astype(np.int64)
    assert store(csr, matrix_formats("int32")["csr"], name="A", dtype="float64").indices[1].dtype == np.int32
    assert store(sp.csr_array(np.eye(3)), matrix_formats("int64")["csr"], name="A", dtype="float64").is_borrowed


def test_index_that_does_not_fit_is_refused():
    wide = CooTensor([[0], [1 << 40]], np.ones(1), (1, 1 << 41))
    for fmt in ("csr", "coo"):
        with pytest.raises(StructureError, match=r'axis J of A reaches 1099511627776.*idtype="int64"'):
            store(wide, matrix_formats()[fmt], name="A", dtype="float64")


# Classes that come without scipy


class Foreign:
    def __init__(self, coords, values, shape):
        self.coords, self.values, self.shape = coords, values, shape


class Renewable(Foreign):
    def with_values(self, values):
        return Renewable(self.coords, values, self.shape)


def test_objects_with_coords_values_and_shape():
    parts = (np.array([[0, 1], [1, 0]]), np.array([1.0, 2.0]), (2, 2))
    for cls, back in ((Foreign, CooTensor), (Renewable, Renewable)):
        assert is_sparse(cls(*parts))
        stored = store(cls(*parts), matrix_formats()["csr"], name="A", dtype="float64")
        again = restore(stored, stored.values * 2)
        assert type(again) is back
        assert again.values.tolist() == [2, 4]


def test_is_sparse():
    assert is_sparse(sp.eye_array(2))
    assert is_sparse(CooTensor.from_dense(np.eye(2)))
    assert not is_sparse(np.eye(2))
    assert not is_sparse([1, 2])
    labelled = SimpleNamespace(coords={"x": [1]}, values=np.eye(2), shape=(2, 2))
    assert not is_sparse(labelled)


def test_coo_tensor():
    tensor = CooTensor.from_dense(np.array([[0, 2.0], [3.0, 0]]))
    assert (tensor.order, tensor.nnz, tensor.dtype) == (2, 2, np.float64)
    assert tensor.with_values(np.ones(2)).to_dense().tolist() == [[0, 1], [1, 0]]
    with pytest.raises(
        ArgumentError, match=r"needs coords \[order, nnz\], values \[nnz\], got coords of shape \(1, 1\)"
    ):
        CooTensor([[0]], np.ones(1), (2, 2))
    with pytest.raises(ArgumentTypeError, match=": expected integers, got float64"):
        CooTensor([[0.5]], np.ones(1), (2,))


# torch


def torch_tensor(torch, layout, dense, index_type):
    tensor = torch.from_numpy(dense)
    if layout == "coo":
        return tensor.to_sparse_coo()
    made = tensor.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=(2, 2) if layout[0] == "b" else None)
    parts = ("crow_indices", "col_indices") if layout in ("csr", "bsr") else ("ccol_indices", "row_indices")
    indices = (getattr(made, part)().to(index_type) for part in parts)
    return torch.sparse_compressed_tensor(*indices, made.values(), size=made.shape, layout=made.layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_torch_layouts(layout):
    torch = pytest.importorskip("torch")
    options = itertools.product(MATRIX_FORMATS, ("float32", "float64"), (torch.int32, torch.int64))
    for fmt, dtype, index_type in options:
        dense = np.array([[0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 4], [0, 5, 0, 6]], dtype)
        tensor = torch_tensor(torch, layout, dense, index_type)
        levels = matrix_formats()[fmt]
        stored = store(tensor, levels, name="A", dtype=dtype)
        np.testing.assert_array_equal(dense_of(stored, levels).reshape(4, 4), dense)
        again = restore(stored, stored.values * 2)
        assert again.layout == tensor.layout
        np.testing.assert_array_equal(again.to_dense().numpy(), dense * 2)
        exact = layout == fmt and (layout == "coo" or index_type == torch.int32)
        assert not exact or np.shares_memory(
            stored.values, tensor._values().numpy() if layout == "coo" else tensor.values().numpy()
        )


def test_torch_blocks():
    torch = pytest.importorskip("torch")
    dense = np.kron(np.array([[0, 1], [2, 3]]), np.ones((2, 2))).astype("float32")
    for layout, fmt in (("bsr", "csr"), ("bsc", "csc")):
        tensor = torch_tensor(torch, layout, dense, torch.int32)
        levels = [*matrix_formats()[fmt], Level("II", "dense_fixed"), Level("JI", "dense_fixed")]
        stored = store(tensor, levels, name="A", dtype="float32")
        assert stored.is_borrowed
        np.testing.assert_array_equal(dense_of(stored, levels).transpose(0, 2, 1, 3).reshape(4, 4), dense)
        np.testing.assert_array_equal(restore(stored, stored.values).to_dense().numpy(), dense)


def test_torch_hybrid_uncoalesced_and_grad():
    torch = pytest.importorskip("torch")
    hybrid = torch.sparse_coo_tensor([[0, 1, 0]], torch.arange(6.0).reshape(3, 2), (2, 2))
    stored = store(hybrid, matrix_formats()["csr"], name="A", dtype="float32")
    assert dense_of(stored, matrix_formats()["csr"]).tolist() == [[4, 6], [2, 3]]
    assert restore(stored, stored.values).to_dense().tolist() == [[4, 6], [2, 3]]
    tracked = torch.eye(2).to_sparse_csr().requires_grad_()
    assert store(tracked, matrix_formats()["csr"], name="A", dtype="float32").values.tolist() == [1, 1]


def test_torch_bfloat16():
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    tensor = torch.eye(2, dtype=torch.bfloat16).to_sparse_csr()
    stored = store(tensor, matrix_formats()["csr"], name="A", dtype="bfloat16")
    assert restore(stored, stored.values).dtype == torch.bfloat16
    held, copied = aligned_contiguous(torch.ones(2, dtype=torch.bfloat16), "bfloat16")
    assert (held.dtype.name, copied) == ("bfloat16", False)
    assert to_torch(held).dtype == torch.bfloat16


def test_torch_refusals():
    torch = pytest.importorskip("torch")
    batched = torch.stack([torch.eye(2), torch.eye(2)]).to_sparse_csr()
    with pytest.raises(ArgumentTypeError, match=r"A is a batched csr tensor of shape \(2, 2, 2\): pass one matrix"):
        store(batched, matrix_formats()["csr"], name="A", dtype="float32")
    with pytest.raises(
        ArgumentTypeError, match=r"pass A.to\(torch.float64\) or build the program with dtype='float32'"
    ):
        store(torch.eye(2).to_sparse_csr(), matrix_formats()["csr"], name="A", dtype="float64")
    with pytest.raises(ArgumentTypeError, match=r"B is on meta, kernels run on the cpu: pass B.cpu\(\)"):
        aligned_contiguous(torch.empty(2, device="meta"), name="B")


def test_torch_dense_argument():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, 3, requires_grad=True)
    assert not is_sparse(tensor)
    assert is_sparse(tensor.to_sparse_csr())
    held, copied = aligned_contiguous(tensor, "float32")
    assert not copied
    assert np.shares_memory(held, tensor.detach().numpy())
    assert aligned_contiguous(tensor.T)[1]
    assert np.shares_memory(to_torch(held).numpy(), held)


# Refusals of store


def refused(error, match, value, levels, dtype="float64"):
    with pytest.raises(error, match=match):
        store(value, levels, name="A", dtype=dtype)


def test_wrong_dtype():
    csr = matrix_formats()["csr"]
    expected = (
        r"A holds float64 but the kernel computes in float32: pass A.astype\('float32'\) or build .* dtype='float64'"
    )
    refused(ArgumentTypeError, expected, sp.eye_array(2), csr, "float32")
    refused(
        ArgumentTypeError,
        "A holds bool but the kernel computes in float32",
        sp.eye_array(2, dtype=bool),
        csr,
        "float32",
    )
    refused(
        ArgumentTypeError,
        r"holds complex128 .*: pass A.astype\('float32'\)$",
        sp.eye_array(2, dtype=complex),
        csr,
        "float32",
    )


def test_wrong_class():
    expected = "A: expected a scipy.sparse array, a torch sparse tensor, or an object with .* and shape, got ndarray"
    refused(ArgumentTypeError, expected, np.eye(2), matrix_formats()["csr"])


def test_wrong_order():
    refused(
        ArgumentError,
        r"A has shape \(2, 2\) but the buffer has 1 axes \(I\)",
        sp.eye_array(2),
        [Level("I", "sparse_variable")],
    )
    refused(ArgumentError, r"A has shape \(2,\) but the buffer has 2 axes", CooTensor([[0]], np.ones(1), (2,)), [
        Level("I", "dense_fixed", length=3), Level("J", "sparse_variable", 0)])  # fmt: skip


def test_wrong_length():
    levels = [Level("I", "dense_fixed", length=3), Level("J", "sparse_variable", 0)]
    refused(ArgumentError, "axis I has length 3 but A has 2 there", sp.eye_array(2), levels)


def test_wrong_blocks():
    inner = [Level("II", "dense_fixed", length=2), Level("JI", "dense_fixed", length=3)]
    levels = [*matrix_formats()["csr"], *inner]
    refused(
        ArgumentError, "A is 5 x 7, which blocks of 2 x 3 do not divide: pad it to 6 x 9", sp.eye_array(5, 7), levels
    )
    unknown = [*matrix_formats()["csr"], *(replace(level, length=None) for level in inner)]
    expected = r"the block size of A is not known: pass A.tobsr\(\(rows, columns\)\) or the lengths of II and JI"
    refused(ArgumentError, expected, sp.csr_array(np.eye(6)), unknown)


@pytest.mark.parametrize("shape", [(0, 0, 2), (0, 2, 0), (0, 2)])
def test_blocks_without_rows_or_columns(shape):
    """scipy makes no such matrix, but takes the array afterwards, and divides by zero itself."""
    value, other = sp.bsr_array((4, 4), dtype="float32"), sp.csr_array((4, 4), dtype="float32")
    value.data = np.zeros(shape, "float32")
    expected = rf"data of .+ has shape {re.escape(str(shape))}, expected blocks of a row and a column at least"
    refused(StructureError, expected, value, matrix_formats()["csr"])
    for call in (
        lambda: sparsetir.matmul(value, np.ones((4, 2), "float32")),
        lambda: sparsetir.matmul(value, other),
        lambda: sparsetir.matmul(other, other, mask=value),
        lambda: sparsetir.add(other, value),
        lambda: sparsetir.triangles(value),
    ):
        with pytest.raises(StructureError, match=expected):
            call()


def damaged(format: str, **parts: Any) -> Any:
    """A matrix whose arrays were changed afterwards, which scipy does not look at."""
    value = sp.csr_array(np.arange(1, 17, dtype="float32").reshape(4, 4)).asformat(format)
    for part, change in parts.items():
        setattr(value, part, change(getattr(value, part)))
    return value


def ragged(rows: np.ndarray) -> np.ndarray:
    """Lists of which the last lacks most of its elements."""
    rows = rows.copy()
    rows[-1] = rows[-1][:1]
    return rows


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (damaged("bsr", data=lambda a: a.reshape(-1)), "expected blocks of a row and a column"),
        (damaged("bsr", data=lambda a: a[:, :1].repeat(3, 1)), r"blocks of shape \(3, 4\), which do not divide"),
        (damaged("bsr", data=lambda a: a[:0]), "has 0 values but 1 indices"),
        (damaged("csr", data=lambda a: a[:, None]), r"data of .* has shape \(16, 1\), expected one dimension"),
        (damaged("csr", indices=lambda a: a.astype(float)), "indices of .*: expected int32 or int64, got float64"),
        (damaged("csr", indices=lambda a: a.tolist()), "indices of .*: expected an array, got list"),
        (damaged("csc", indptr=lambda a: a[:3]), r"has shape \(3,\), expected length 5"),
        (damaged("csc", indptr=lambda a: a[:0]), r"has shape \(0,\), expected length 5"),
        (damaged("csc", indptr=lambda a: a[::-1].copy()), "starts at 16, expected 0"),
        (damaged("csc", indptr=lambda a: a * 1000), "ends at 16000 but there are 16 stored entries"),
        (damaged("csc", indices=lambda a: a + 10**6), r"expected one of \[0, 4\)"),
        (damaged("csc", indices=lambda a: a - 10**6), r"expected one of \[0, 4\)"),
        (damaged("coo", coords=lambda c: (c[0], c[1][:3])), "needs coords"),
        (damaged("coo", coords=lambda c: (c[0] + 10**6, c[1])), "has coordinate 1000000 in dimension 0"),
        (damaged("coo", coords=lambda c: (c[0] + 0.5, c[1])), ": expected int32 or int64, got float64"),
        (damaged("coo", data=lambda a: a[:, None]), "expected one dimension"),
        (damaged("dia", data=lambda a: a[0]), "expected a row for each of the 7 offsets"),
        (damaged("dia", offsets=lambda a: a[:2]), "expected a row for each of the 2 offsets"),
        (damaged("dia", offsets=lambda a: a * 0), "name a diagonal twice"),
        (damaged("lil", rows=lambda a: a[:2]), r"have the shapes \(2,\) and \(4,\), expected \(4,\)"),
        (damaged("lil", rows=ragged), "has 4 values but 1"),
        (damaged("dok", _dict=lambda d: {**d, (9, 0): np.float32(1)}), "do not fit its shape"),
    ],
)
def test_arrays_that_do_not_fit_each_other(value: Any, expected: str) -> None:
    other = sp.csr_array((4, 4), dtype="float32")
    for call in (
        lambda: sparsetir.matmul(value, value),
        lambda: sparsetir.matmul(other, other, mask=value) if value.format != "csr" else sparsetir.matmul(value, other),
        lambda: sparsetir.maximum(other, value),
        lambda: sparsetir.rap(other, value, other),
        lambda: sparsetir.einsum("ij,jk->ik", value, value),
        lambda: sparsetir.einsum_expression("ij,jk->ik", value, value)(value, value),  # as a first call
        lambda: sparsetir.linear_operator(value),
        lambda: sparsetir.SparseTensor.from_any(value),
        *([lambda: sparsetir.triangles(value)] if value.format not in ("csr", "csc") else []),
    ):
        with pytest.raises(StructureError, match=expected):
            call()


def test_damaged_lists_of_torch() -> None:
    torch = pytest.importorskip("torch")
    where = torch.tensor([[0, 10**6], [0, 1]])
    value = torch.sparse_coo_tensor(where, torch.ones(2), (4, 4), is_coalesced=True, check_invariants=False)
    for call in (lambda: sparsetir.matmul(value, value), lambda: sparsetir.einsum("ij,jk->ik", value, value)):
        with pytest.raises(StructureError, match="has coordinate 1000000 in dimension 0"):
            call()


def test_fiber_longer_than_the_width():
    levels = [Level("I", "dense_fixed"), Level("J", "sparse_fixed", 0, width=1)]
    dense = sp.csr_array(np.array([[1.0, 0], [1, 1]]))
    refused(StructureError, "row 1 of A holds 2 entries but axis J has 1 slots per row", dense, levels)


def test_singleton_with_two_coordinates():
    levels = [Level("I", "dense_fixed"), Level("J", "singleton", 0)]
    dense = sp.csr_array(np.array([[1.0, 0], [1, 1]]))
    refused(
        StructureError,
        "axis J of A is a singleton but would hold coordinates 0 and 1 below the same position 1",
        dense,
        levels,
    )


def test_entries_outside_a_formula():
    band = [Level("I", "dense_fixed"), Level("J", "sparse_fixed", 0, width=1, rule=lambda i, s, p: i + s)]
    lower = sp.csr_array(np.array([[1.0, 0], [1, 1]]))
    refused(StructureError, r"entry \(1, 0\) of A lies outside the pattern that axis J has by formula", lower, band)
    rules = {"extent_rule": lambda i: i + 1, "offset_rule": lambda i: i * (i + 1) // 2}
    triangle = axes(("I", "dense_fixed", None, {}), ("J", "dense_implicit", 0, rules))
    refused(StructureError, r"entry \(0, 1\) of A lies outside", sp.csr_array(lower.T), triangle)
    refused(
        ArgumentError,
        "needs the width of axis J, whose indices are a formula",
        lower,
        [band[0], replace(band[1], width=None)],
    )
    below = [Level("I", "sparse_variable"), replace(triangle[1])]
    refused(
        ArgumentError, "cannot be converted for axis J, its parent I is sparse_variable: pass its arrays", lower, below
    )


def test_broken_arguments():
    def csr(**parts):
        value = sp.csr_array(np.array([[0, 1.0], [2.0, 3.0]]))
        vars(value).update({k: np.array(v, np.int32) for k, v in parts.items()})
        return value

    for fmt in ("csr", "ell"):
        levels = matrix_formats()[fmt]
        refused(
            StructureError,
            "indptr of axis 1 of A decreases at row 1: 5 is followed by 3",
            csr(indptr=[0, 5, 3]),
            levels,
        )
        refused(StructureError, "starts at 1, expected 0", csr(indptr=[1, 1, 3]), levels)
        refused(StructureError, "ends at 4 but there are 3 stored entries", csr(indptr=[0, 1, 4]), levels)
        refused(StructureError, r"has shape \(2,\), expected length 3", csr(indptr=[0, 3]), levels)
        refused(
            StructureError,
            r"indices of axis 1 of A hold 2 at position 1, expected one of \[0, 2\)",
            csr(indices=[1, 2, 1]),
            levels,
        )
        refused(StructureError, "hold -1 at position 0", csr(indices=[-1, 0, 1]), levels)
        refused(StructureError, "A has 3 values but 4 indices", csr(indices=[1, 0, 1, 0], indptr=[0, 1, 4]), levels)
        broken = CooTensor([[0, 2], [0, 0]], np.ones(2), (2, 2))
        refused(
            StructureError, r"entry 1 of A has coordinate 2 in dimension 0, expected one of \[0, 2\)", broken, levels
        )
        refused(StructureError, "has coordinate -1 in dimension 1", CooTensor([[0], [-1]], np.ones(1), (2, 2)), levels)
    foreign = Foreign(np.zeros((2, 3), int), np.ones(2), (2, 2))
    refused(StructureError, r"needs coords \[order, nnz\], values \[nnz\]", foreign, matrix_formats()["csr"])


def test_restore_wants_as_many_values():
    stored = store(sp.eye_array(2, format="csr"), matrix_formats()["csr"], name="A", dtype="float64")
    with pytest.raises(ArgumentError, match="expected 2 values, as many as were stored, got 3"):
        restore(stored, np.ones(3))


# Raw arrays

VARIABLE = Level("J", "sparse_variable", 0)
FIXED = Level("J", "sparse_fixed", 0, width=2)


def judge(level, indptr, indices, *, parent_count=3, length=4, need_sorted=True, dtype=np.int32, **more):
    indptr, indices = (None if a is None else np.array(a, dtype) for a in (indptr, indices))
    check_level(
        level, indptr, indices, parent_count=parent_count, length=length, name="A", need_sorted=need_sorted, **more
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sound_arrays(dtype):
    judge(VARIABLE, [0, 2, 2, 3], [1, 3, 0], dtype=dtype)
    judge(VARIABLE, [0], [], parent_count=0, length=0, dtype=dtype)
    judge(VARIABLE, [0, 2, 2, 3], [3, 1, 0], need_sorted=False, dtype=dtype)
    judge(VARIABLE, [0, 2, 2, 3], [9, 12, 0], length=None, dtype=dtype)
    judge(replace(VARIABLE, unique=False), [0, 2, 2, 3], [1, 1, 0], dtype=dtype)
    judge(FIXED, None, [0, 3, 1, 4, 4, 4], dtype=dtype)
    judge(replace(FIXED, width=None), None, [[0, 3], [1, 4], [4, 4]], dtype=dtype)
    judge(Level("J", "singleton", 0), None, [3, 0, 4], dtype=dtype)
    judge(Level("J", "dense_variable", 0), [0, 1, 1, 5], None, count=5, dtype=dtype)


BROKEN = [
    (FIXED, None, [-1, 3, 0, 1, 4, 4], r"-1 at position 0, expected one of \[0, 4\), or 4 where there is no entry"),
    (FIXED, None, [0, 3, 0, 1, 5, 4], "hold 5 at position 4"),
    (Level("J", "singleton", 0), None, [3, 0, 5], "hold 5 at position 2"),
    (
        VARIABLE,
        [0, 3],
        [0, 1, 2],
        r"indptr of axis J of A has shape \(2,\), expected length 4, one more than the 3 positions",
    ),
    (VARIABLE, [[0, 1, 2, 3]], [0, 1, 2], r"has shape \(1, 4\), expected length 4"),
    (VARIABLE, [1, 1, 2, 3], [0, 1, 2], "indptr of axis J of A starts at 1, expected 0"),
    (VARIABLE, [0, 2, 1, 3], [0, 1, 2], "indptr of axis J of A decreases at row 1: 2 is followed by 1"),
    (VARIABLE, [0, 1, 2, 4], [0, 1, 2], "indptr of axis J of A ends at 4 but there are 3 stored entries"),
    (VARIABLE, [0, 1, 2, 3], [0, 4, 9], r"indices of axis J of A hold 4 at position 1, expected one of \[0, 4\)"),
    (VARIABLE, [0, 1, 2, 3], [0, 1, -7], "hold -7 at position 2"),
    (
        VARIABLE,
        [0, 1, 1, 3],
        [0, 3, 2],
        "are not sorted in row 2: 3 is followed by 2 at position 2: sort the row or declare",
    ),
    (
        VARIABLE,
        [0, 1, 1, 3],
        [0, 3, 3],
        r"hold coordinate 3 twice in row 2 \(positions 1 and 2\): add the entries up or",
    ),
    (FIXED, None, [0, 1, 2], "indices of axis J of A have 3 entries, expected 2 for each of the 3 positions above it"),
    (replace(FIXED, width=None), None, [0, 1, 2, 3], "have 4 entries, expected 1 for each of the 3"),
    (FIXED, None, [0, 1, 2, 1, 0, 1], "are not sorted in row 1: 2 is followed by 1 at position 3"),
    (FIXED, None, [0, 1, 4, 2, 0, 1], "not sorted in row 1.*padding at the end of a row must be 4"),
    (FIXED, None, [0, 1, 2, 3, 3, 3], "hold coordinate 3 twice in row 2"),
    (Level("J", "singleton", 0), None, [0, 1], "have 2 entries, expected 1 for each of the 3"),
]


@pytest.mark.parametrize(("level", "indptr", "indices", "match"), BROKEN)
def test_broken_arrays(level, indptr, indices, match):
    for dtype in (np.int32, np.int64):
        with pytest.raises(StructureError, match=match):
            judge(level, indptr, indices, dtype=dtype)


def test_broken_ragged_and_float_arrays():
    with pytest.raises(StructureError, match="ends at 3 but there are 5 stored entries"):
        judge(Level("J", "dense_variable", 0), [0, 1, 2, 3], None, count=5)
    with pytest.raises(StructureError, match="indptr of axis J of A: expected int32 or int64, got float64"):
        judge(VARIABLE, [0, 1, 2, 3], [0, 1, 2], dtype=np.float64)
    with pytest.raises(StructureError, match="indices of axis J of A: expected int32 or int64, got float32"):
        judge(FIXED, None, [0, 1, 2, 3, 0, 1], dtype=np.float32)


def is_sound(indptr, indices, parent_count, length, in_order, unique):
    """What `check_level` promises of a sparse_variable axis, said slowly."""
    if len(indptr) != parent_count + 1 or indptr[0] != 0 or indptr[-1] != len(indices) or indptr != sorted(indptr):
        return False
    if any(not 0 <= i < length for i in indices):
        return False
    rows = [indices[a:b] for a, b in itertools.pairwise(indptr)]
    return not in_order or all(row == sorted(set(row) if unique else row) for row in rows)


@pytest.mark.slow
@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=examples(300))
def test_check_level_agrees_with_a_slow_one(data, in_order, unique):
    indices = data.draw(st.lists(st.integers(-1, 4), max_size=5))
    inner = st.lists(st.integers(-1, 6), max_size=3).map(lambda x: x if data.draw(st.booleans()) else sorted(x))
    indptr = [0, *data.draw(inner), data.draw(st.sampled_from([len(indices), len(indices), 2]))]
    sound = is_sound(indptr, indices, 3, 4, in_order, unique)
    level = replace(VARIABLE, unique=unique)
    arrays = (np.array(a, np.int32) for a in (indptr, indices))
    assert found_sound(level, *arrays, parent_count=3, length=4, need_sorted=in_order) == sound
    try:
        judge(level, indptr, indices, need_sorted=in_order)
    except StructureError:
        assert not sound
    else:
        assert sound


@given(st.data())
@settings(max_examples=examples(30))
def test_disorder_is_found_across_chunks(data):
    """Arrays longer than one chunk: the row start on a chunk boundary counts, a wrong pair there too."""
    chunk = 1 << 16
    size = 2 * chunk + 5
    cut = data.draw(st.sampled_from([chunk - 1, chunk, chunk + 1, chunk + 2, 2 * chunk, 2 * chunk + 1]))
    indices = np.concatenate([np.arange(cut), np.arange(size - cut)]).astype(np.int32)
    indptr = np.array([0, cut, cut, size], np.int32)
    judge(VARIABLE, indptr, indices, length=size)
    assert found_sound(VARIABLE, indptr, indices, parent_count=3, length=size, need_sorted=True)
    spoiled = data.draw(st.sampled_from([p for p in (1, chunk, chunk + 1, 2 * chunk + 1, size - 1) if p != cut]))
    indices[spoiled] = indices[spoiled - 1]
    assert not found_sound(VARIABLE, indptr, indices, parent_count=3, length=size, need_sorted=True)
    with pytest.raises(StructureError, match=rf"positions {spoiled - 1} and {spoiled}"):
        judge(VARIABLE, indptr, indices, length=size)


def test_fixed_rows_across_chunks():
    indices = np.tile(np.arange(7, dtype=np.int32), 20000)
    judge(replace(FIXED, width=7), None, indices, parent_count=20000, length=7)
    indices[100_000] = 6
    with pytest.raises(StructureError, match="in row 14285"):
        judge(replace(FIXED, width=7), None, indices, parent_count=20000, length=7)


# Dense arguments


class Subclass(np.ndarray):
    pass


class Lent:
    """Only DLPack, as another library's tensor."""

    def __init__(self, held, device=1, dtype_known=True):
        self.held, self.device, self.dtype_known = held, device, dtype_known

    def __dlpack__(self, **options):
        if not self.dtype_known:
            raise BufferError("no such dtype")
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device, 0

    def numpy(self):
        return self.held.copy()


def test_dense_arguments_are_shared_where_possible():
    base = np.arange(12.0).reshape(3, 4)
    frozen = base.copy()
    frozen.flags.writeable = False
    for x in (base, frozen, base[1:], base.view(Subclass), Lent(base), memoryview(base), array.array("d", [1, 2])):
        held, copied = aligned_contiguous(x)
        assert type(held) is np.ndarray
        assert not copied
        assert held.flags.c_contiguous
    assert np.shares_memory(aligned_contiguous(Lent(base))[0], base)
    assert aligned_contiguous(base)[0] is base


def test_dense_arguments_are_copied_where_needed():
    base = np.arange(12.0).reshape(3, 4)
    shifted = np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(np.float64)
    for x, expected in (
        (base.T, base.T),
        (base[:, ::2], base[:, ::2]),
        (base.astype(">f8"), base),
        (shifted, base.ravel()),
    ):
        held, copied = aligned_contiguous(x, "float64")
        assert copied
        assert held.flags.c_contiguous
        assert held.flags.aligned
        assert held.dtype.isnative
        np.testing.assert_array_equal(held, expected)
    held, copied = aligned_contiguous(np.array(3.0).astype(">f8"))
    assert held.shape == ()
    held, copied = aligned_contiguous(Lent(base, dtype_known=False))
    assert copied
    assert aligned_contiguous(SimpleArray())[1]


class SimpleArray:
    def __array__(self, dtype=None, copy=None):
        return np.ones(3)


def test_dense_refusals():
    with pytest.raises(ArgumentTypeError, match=r"B: expected an array, got list: pass numpy.asarray of it"):
        aligned_contiguous([1.0], name="B")
    with pytest.raises(ArgumentTypeError, match=r"B is sparse \(csr_array\) but the kernel takes it dense"):
        aligned_contiguous(sp.csr_array(np.eye(2)), name="B")
    with pytest.raises(ArgumentTypeError, match="B is not in host memory"):
        aligned_contiguous(Lent(np.ones(2), device=2), name="B")
    with pytest.raises(ArgumentTypeError, match="B holds int64 but the kernel computes in float32"):
        aligned_contiguous(np.arange(3), "float32", name="B")


def test_writable_alias():
    held = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert writable_alias(held) is held
    held.flags.writeable = False
    alias = writable_alias(held)
    assert alias.flags.writeable
    assert (alias.dtype, alias.shape, alias.ctypes.data) == (held.dtype, held.shape, held.ctypes.data)
    np.from_dlpack(alias)


# --- arrays that begin at a cache line -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (2, 3, 4)])
def test_aligned_arrays_hold_the_same(shape: tuple[int, ...]) -> None:
    for dtype in ("float32", "float64", "int8", "bool", "complex64"):
        memory = np.arange(math.prod(shape) + 1).astype(dtype)
        for source in (memory[1:].reshape(shape), memory[1:].reshape(shape).T):
            found = sparsetir.aligned(source)
            assert found.ctypes.data % 64 == 0 or not found.size
            assert found.flags.c_contiguous
            assert found.flags.writeable
            np.testing.assert_array_equal(found, source, strict=True)
            assert sparsetir.aligned(found) is found


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ([1.0], "list"),
        (np.array([None]), "ndarray of objects"),
        (np.ma.array([1.0], mask=[True]), "MaskedArray"),
        (SimpleNamespace(dtype="float32"), "SimpleNamespace"),
    ],
)
def test_only_arrays_of_numbers_are_aligned(wrong: object, found: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"got {found}"):
        sparsetir.aligned(wrong)


def test_views_of_aligned_arrays_hold_them() -> None:
    """Who reuses the memory of an array that nobody has must not take that of a view."""
    array = buffers.empty((4, 5), np.dtype("float32"))
    assert array[1:].base is array
    assert array.reshape(-1)[::2].T.base is array
    assert type(array) is np.ndarray


ROOT_LIST = """
@T.prim_func
def add(a: T.handle, y: T.handle, rows: T.handle, m: T.int32, n: T.int32):
    R = T.sparse_fixed(None, (m, n), rows, sorted={sorted}, unique={unique})
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (R,))
    Y = T.match_sparse_buffer(y, (I,))
    with T.sp_iter([R], "S", "add") as [r]:
        Y[r] = Y[r] + A[r]
"""


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lists_of_rows_hold_each_once_unless_the_axis_says_so(is_sorted: bool) -> None:
    rows = [0, 2, 2, 5] if is_sorted else [2, 5, 0, 2]
    a, y = np.arange(1, 5, dtype=np.float32), np.zeros(5, np.float32)
    unique = sparsetir.build(sparsetir.parse(ROOT_LIST.format(sorted=is_sorted, unique=True)))
    for _ in range(3):  # planned calls, too
        with pytest.raises(StructureError, match=r"hold coordinate 2 twice: .* unique=False"):
            unique(a=a, rows=np.array(rows, np.int32), Y=y, m=5)
        unique(a=a, rows=np.array([0, 1, 4, 5] if is_sorted else [4, 5, 0, 5], np.int32), Y=y.copy(), m=5)
    repeats = sparsetir.build(sparsetir.parse(ROOT_LIST.format(sorted=is_sorted, unique=False)))
    repeats(a=a, rows=np.array(rows, np.int32), Y=y, m=5)
    assert y[2] == sum(x for x, row in zip(a, rows, strict=True) if row == 2)


@pytest.mark.parametrize("shape", [(3.5, 3), (3.0, 3), (True, 3), ("3", 3), (None, 3)])
def test_sizes_that_are_no_integers_are_refused(shape):
    coords, values = np.array([[0], [0]]), np.array([1.0])
    with pytest.raises(ArgumentTypeError, match=": expected integers, got"):
        sparsetir.CooTensor(coords, values, shape)
    with pytest.raises(ArgumentTypeError, match=": expected integers, got"):
        sparsetir.SparseTensor.from_coo(coords, values, shape)
    eye = sparsetir.SparseTensor.from_dense(np.eye(3))
    descriptor = {**eye.__binsparse_descriptor__()}
    inner = descriptor.get("binsparse", descriptor)
    inner["shape"] = list(shape)
    with pytest.raises(sparsetir.SparseTIRError):
        sparsetir.SparseTensor.from_binsparse(descriptor, eye.__binsparse__())


def test_where_coordinates_are_placed_is_kept_from_the_second_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [Level("I", "sparse_variable"), Level("J", "sparse_variable", 0)]
    tensor = CooTensor(np.array([[2, 0, 1], [0, 7, 11]]), np.ones(3), (3, 13))
    kept = CACHES["placements of entries"]
    kept.clear()
    CACHES["keys of entries that were placed once"].clear()
    for count in (0, 1, 1):
        store(tensor, levels, name="A", dtype="float64")
        assert len(kept) == count
    (key,) = kept
    kept.clear()
    monkeypatch.setattr(storage, "MOST_PLACED", 2 * storage.SLOT_BYTES)
    monkeypatch.setattr(storage.xxhash, "xxh3_128", lambda: pytest.fail("hashed"))
    store(tensor, levels, name="A", dtype="float64")
    assert key not in kept


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16"])
def test_coordinates_of_few_bits_number_more_entries_than_they_count(kind: str) -> None:
    rng = np.random.default_rng(0)
    coords = rng.integers(0, 50, (2, 70_000)).astype(kind)
    tensor = CooTensor(coords, np.ones(70_000), (50, 50))
    want = np.zeros((50, 50))
    np.add.at(want, tuple(coords.astype(int)), 1)
    np.testing.assert_array_equal(sparsetir.SparseTensor.from_any(tensor).to_dense(), want)
    np.testing.assert_array_equal(sparsetir.einsum("ij->i", tensor), want.sum(axis=1))


@pytest.mark.parametrize("make", [sp.csr_array, sp.csc_array, sp.bsr_array])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64"])
def test_compressed_matrices_out_of_order_are_placed_by_their_contents(make: Any, dtype: str) -> None:
    """Values and index arrays of one matrix change in place between calls."""
    rng = np.random.default_rng(0)
    csr = [Level("I", "dense_fixed"), Level("J", "sparse_variable", 0)]
    begin, block = np.array([0, 3, 3, 7]), (2, 2) if make is sp.bsr_array else ()
    values = rng.integers(1, 9, (7, *block)).astype(dtype)
    indices = np.array([4, 0, 4, 2, 1, 3, 1])  # unsorted, and with two pairs of duplicates
    matrix = make(
        (values, indices, begin),
        shape=tuple(n * (block or (1, 1))[0] for n in ((5, 3) if make is sp.csc_array else (3, 5))),
    )
    unchanged = lambda: None  # noqa: E731
    changes = (
        *(unchanged, unchanged, unchanged, lambda: values.__imul__(2), lambda: indices.__setitem__(0, 3)),
        *(unchanged, lambda: indices.sort(), unchanged, lambda: indices.__setitem__(slice(None), 0)),
    )
    for change in changes:
        change()
        stored = store(matrix, csr, name="A", dtype=dtype)
        found = sp.csr_array((stored.values, stored.indices[1], stored.indptr[1]), shape=matrix.shape)
        assert found.has_canonical_format
        np.testing.assert_array_equal(found.toarray(), matrix.toarray())


def test_where_coordinates_are_placed_is_kept_by_their_contents() -> None:
    rng = np.random.default_rng(0)
    tree = [Level("I", "sparse_variable"), Level("J", "sparse_variable", 0), Level("K", "dense_fixed", length=3)]
    coords, values = rng.integers(0, 3, (3, 40)), rng.random(40)
    unchanged = lambda: None  # noqa: E731
    for change in (unchanged, unchanged, unchanged, lambda: coords.__setitem__((0, 5), 2), lambda: coords.sort(axis=1)):
        change()
        tensor = CooTensor(coords, values, (3, 3, 3))
        dense = np.zeros((3, 3, 3))
        np.add.at(dense, tuple(coords), values)
        for levels in (tree, [replace(tree[0], idtype="int64"), *tree[1:]]):
            stored = store(tensor, levels, name="A", dtype="float64")
            np.testing.assert_allclose(dense_of(stored, levels), dense)
            for part in (*stored.indptr.values(), *stored.indices.values()):
                part[...] = 0  # of this one alone
            assert not any(np.shares_memory(coords, part) for part in stored.indices.values())
