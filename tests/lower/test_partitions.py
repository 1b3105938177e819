# SPDX-License-Identifier: Apache-2.0
"""Special layouts and partitions: what their axes trees hold is the matrix, whatever the matrix."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import ir, tirx
from tvm.ir import Var

import sparsetir
from each import each
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.formats import make
from sparsetir.formats.base import FormatRewriteRule
from sparsetir.formats.format import CapacityError, Entries, Format, Packed
from sparsetir.ir import dialect
from sparsetir.ir.interpreter import interpret
from sparsetir.ir.views import Axis

# ---------------------------------------------------------------------------------------------- matrices


def random(m: int, n: int, density: float, seed: int = 0) -> Any:
    found = sp.random_array((m, n), density=density, rng=np.random.default_rng(seed), format="csr")
    return sp.csr_array((np.arange(1, found.nnz + 1, dtype="float32"), found.indices, found.indptr), shape=(m, n))


def of_dense(dense: Any) -> Any:
    found = sp.csr_array(np.asarray(dense, "float32"))
    found.data = np.arange(1, found.nnz + 1, dtype="float32")
    return found


def giant_row(m: int, n: int) -> Any:
    dense = np.eye(m, n)
    dense[m // 2] = 1
    return of_dense(dense)


def empty_rows() -> Any:
    dense = random(11, 9, 0.4).toarray()
    dense[[0, 1, 4, 5, 6, 7, 10]] = 0
    return of_dense(dense)


MATRICES = {
    "random": random(13, 11, 0.3),
    "wide": random(5, 29, 0.2),
    "tall": random(31, 4, 0.3),
    "dense": of_dense(np.ones((6, 7))),
    "blocks": of_dense(np.kron(random(4, 3, 0.5).toarray() > 0, np.ones((2, 4)))),
    "diagonals": of_dense(np.eye(9, 10, 1) + np.eye(9, 10, -3) + np.eye(9, 10)),
    "giant row": giant_row(10, 23),
    "empty rows": empty_rows(),
    "one": of_dense([[1]]),
    "no entries": of_dense(np.zeros((4, 3))),
    "no rows": of_dense(np.zeros((0, 3))),
    "no columns": of_dense(np.zeros((3, 0))),
    "nothing": of_dense(np.zeros((0, 0))),
}

# Each stores any matrix of less than 64 rows and columns.
FORMATS: dict[str, Format] = {
    "sell": make("sell", C=4, sigma=8),
    "sell, one window": make("sell", C=2, sigma=1000),
    "sell, no window": make("sell", C=3, sigma=1),
    "narrow_csr": make("narrow_csr"),
    "narrow_sell": make("narrow_sell", C=4, sigma=8),
    "narrow_sell, no window": make("narrow_sell", C=3, sigma=1),
    "padded_csr": make("padded_csr", t=3),
    "sr_bcrs": make("sr_bcrs", t=4, g=2),
    "sr_bcrs of vectors": make("sr_bcrs", t=1, g=3),
    "dia": make("dia"),
    "band": make("band", lower=63, upper=63),
    "nm": make("nm", n=3, m=3),
    "columns": make("columns", c=3),
    "columns of one range": make("columns", c=1),
    "rows": make("rows", p=4),
    "buckets": make("buckets", widths=(1, 2, 4)),
    "buckets of one width": make("buckets", widths=[3], empty=False),
    "hyb": make("hyb", c=2, widths=(1, 3)),
    "hyb of one range": make("hyb", c=1, widths=(1, 2, 4)),
    "blocks": make("blocks", r=2, c=3, density=0.6),
    "dia_rest": make("dia_rest", density=0.7),
    "hdia": make("hdia", C=2),
    "hdia of whole diagonals": make("hdia", C=3, density=1, rest="dcsr"),
    "dense_rows": make("dense_rows", density=0.4),
    "dense_columns": make("dense_columns", density=0.4),
    "ell_rest": make("ell_rest", width=2),
    "reordered": make("reordered"),
    "row_groups": make("row_groups", r=2, padding=1.0),
    "row_groups of whole rows": make("row_groups", r=3, padding=0, rest="ell"),
    "columns of blocks": make("columns", c=2, each=make("blocks", r=2)),
    "columns of rows": make("columns", c=2, each="rows"),
    "columns of buckets": make("columns", c=1, each=make("buckets", widths=(1, 2))),
    "rows of sell": make("rows", p=2, each=make("sell", C=2, sigma=4)),
    "rows of hdia": make("rows", p=2, each=make("hdia", C=2, density=0.1)),
    "rows of buckets": make("rows", p=3, each=make("buckets", widths=(1, 4))),
    "blocks and hyb": make("blocks", r=2, rest=make("hyb", c=2, widths=(1, 2))),
    "dense columns, dense rows, diagonals": make(
        "dense_columns", rest=make("dense_rows", rest=make("dia_rest", rest="coo"))
    ),
    "ell and padded rows": make("ell_rest", width=1, rest=make("padded_csr", t=2)),
}
WIDE = {name: format.resolve(2, "int64") for name, format in FORMATS.items()}
MATRIX = each("matrix", MATRICES)
FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def entries_of(matrix: Any) -> Entries:
    return Entries.of_rows(matrix.shape, matrix.indptr, matrix.indices)


# ---------------------------------------------------------------------------------------------- oracle


@dataclass
class Slots:
    """Stored positions of a chain of axes: the coordinates of each, and whether all of them exist."""

    coords: dict[Axis, np.ndarray]
    position: np.ndarray
    present: np.ndarray

    def take(self, which: np.ndarray) -> dict[Axis, np.ndarray]:
        return {axis: held[which] for axis, held in self.coords.items()}


class Walk:
    """The axes trees of one piece in numpy, literally as the language defines them."""

    def __init__(self, rule: FormatRewriteRule, packed: Packed) -> None:
        self.rule, self.packed = rule, packed
        self.names = {**packed.arrays, **packed.sizes}

    def eval(self, expr: Any, args: Sequence[np.ndarray] = ()) -> Any:
        if isinstance(expr, tirx.IntImm):
            return int(expr)
        if isinstance(expr, Var):
            return self.names[str(expr.name)]
        if dialect.is_call(expr, "arg"):
            return args[int(expr.args[0])]
        if isinstance(expr, ir.TensorLoad):
            return self.names[str(expr.source.name)].astype("int64")[self.eval(expr.indices[0], args)]
        if isinstance(expr, tirx.Cast):
            return self.eval(expr.value, args)
        if isinstance(expr, tirx.Select):
            parts = (expr.condition, expr.true_value, expr.false_value)
            return np.where(*(self.eval(part, args) for part in parts))
        known = {tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.LT: np.less}
        binary = known[type(expr)]
        return binary(self.eval(expr.a, args), self.eval(expr.b, args))

    def array(self, var: Var) -> np.ndarray:
        return self.names[str(var.name)].astype("int64")

    def below(self, axis: Axis, above: Slots, *, any_slot: bool = False) -> Slots:
        """The slots of `axis` below those of its parent, or one that stands for all and for none."""
        if any_slot:
            begin, extent = np.zeros_like(above.position), np.ones(len(above.position), "int64")
        elif axis.indptr is not None:
            indptr = self.array(axis.indptr)
            begin, extent = indptr[above.position], np.diff(indptr)[above.position]
        else:
            width = int(self.eval(axis.length if axis.width is None else axis.width))
            begin, extent = above.position * width, np.full(len(above.position), width)
        parent = np.repeat(np.arange(len(extent)), extent)
        slot = np.arange(len(parent)) - np.repeat(np.cumsum(extent) - extent, extent)
        position = begin[parent] + slot
        coords = above.take(parent)
        if any_slot:  # which it is does not matter: there may be none
            return Slots({**coords, axis: slot}, position, above.present[parent])
        coords[axis] = self.coordinate(axis, list(coords.values()), position, slot)
        inside = (coords[axis] >= 0) & (coords[axis] < int(self.eval(axis.length)))
        return Slots(coords, position, above.present[parent] & inside)

    def coordinate(self, axis: Axis, above: list[np.ndarray], position: np.ndarray, slot: np.ndarray) -> np.ndarray:
        if axis.rule is not None:
            return self.eval(axis.rule, [*above, slot, position]) + np.zeros(len(slot), "int64")
        return slot if axis.indices is None else self.array(axis.indices)[position]

    def chain(self, axes: Sequence[Axis], any_slot: Collection[Axis] = ()) -> Slots:
        root = np.zeros(1, "int64")
        found = Slots({}, root, root == 0)
        for axis in axes:
            found = self.below(axis, found, any_slot=axis in any_slot)
        return found

    def slots(self) -> Slots:
        """Every slot of the buffer in the order of its flat values."""
        found, *others = [self.chain(tree) for tree in self.rule.buffer.trees]
        for other in others:
            count = len(other.position)
            left, right = np.divmod(np.arange(len(found.position) * count), max(count, 1))
            coords = {**found.take(left), **other.take(right)}
            position = found.position[left] * count + other.position[right]
            found = Slots(coords, position, found.present[left] & other.present[right])
        return found

    def rows(self) -> np.ndarray:
        """First coordinates that a loop over the axes of the first dimension alone meets.

        What repeats below all slots of another axis is met once, and where there is no slot too.
        """
        axes = [a for a in self.rule.buffer.axes if a.name in self.rule.axis_map[0]]
        trees = {a.root: a for a in axes}
        below = {up: [a for a in axes if up in a.ancestors] for last in axes for up in last.ancestors}
        repeated = [up for up in below if up not in axes and all(a.repeats_below(up) for a in below[up])]
        chains = [self.chain([*last.ancestors, last], repeated) for last in trees.values()]
        of = self.rule.buffer.axes
        if len(chains) == 1:
            met = np.stack([chains[0].coords[a][chains[0].present] for a in axes])
            none = np.zeros(met.shape[1], "int64")
            return np.asarray(self.rule.old_coords([met[axes.index(a)] if a in axes else none for a in of])[0])
        outer, inner = (next(iter(c.coords.values())) for c in chains)
        new = [outer[:, None] if a is axes[0] else inner[None, :] if a is axes[1] else 0 for a in of]
        return np.asarray(self.rule.old_coords(new)[0]).reshape(-1)


def held_by(rule: FormatRewriteRule, packed: Packed, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows (i, j, value) of a piece; checks its padding and that no slot is left over or met twice."""
    walk = Walk(rule, packed)
    slots, flat = walk.slots(), packed.values(values)
    np.testing.assert_array_equal(np.sort(slots.position), np.arange(packed.count))
    assert len(flat) == packed.count
    old = rule.old_coords([slots.coords[axis] for axis in rule.buffer.axes])
    present = slots.present.copy()
    for coords, extent in zip(old, shape, strict=True):
        assert np.all(coords[present] >= 0)
        assert rule.fills or np.all(coords[present] < extent)
        present &= (coords >= 0) & (coords < extent)
    stored = flat[slots.position]
    points = (old[0] * shape[1] + old[1])[present]
    assert len(np.unique(points)) == len(points), "a coordinate has two slots"
    assert not stored[~present].any(), "padding must be zero"
    if not rule.fills:
        assert stored[present].all(), "only a format that fills has slots without an entry"
    assert np.count_nonzero(stored) == packed.size
    taken = stored != 0
    return np.stack([old[0][taken], old[1][taken], stored[taken]], axis=1)


def check(format: Format, matrix: Any) -> list[Packed]:
    """Pack a matrix, compare what the trees hold with its entries, and bring the values back."""
    packed = format.pack(entries_of(matrix))
    assert len(packed) == len(format.rules)
    held = []
    for rule, piece in zip(format.rules, packed, strict=True):
        declared = {str(p.name): p for p in rule.description.params if not p.same_as(rule.buffer.storage)}
        assert set(piece.arrays) | set(piece.sizes) == set(declared)
        types = {n: str(a.dtype) for n, a in piece.arrays.items()}
        assert types == {n: str(declared[n].ty.dtype) for n in types}
        assert {t for n, t in types.items() if n != "offsets" or format.name == "dia"} <= {format.index_type}
        held.append(held_by(rule, piece, matrix.data, matrix.shape))
    found = np.concatenate(held)
    found = found[np.lexsort((found[:, 1], found[:, 0]))]
    coo = matrix.tocoo()
    np.testing.assert_array_equal(found, np.stack([coo.row, coo.col, coo.data], axis=1))
    back = np.full(matrix.nnz, -1, matrix.dtype)
    for piece in packed:
        piece.gather(piece.values(matrix.data), back)
    np.testing.assert_array_equal(back, matrix.data)
    return packed


# ---------------------------------------------------------------------------------------------- structure


@FORMAT
@MATRIX
def test_the_axes_hold_the_matrix(format: Format, matrix: Any) -> None:
    check(format, matrix)


@FORMAT
def test_the_axes_hold_the_matrix_with_wide_indices(format: Format) -> None:
    wide = format.resolve(2, "int64")
    for kind in ("random", "no entries", "no rows", "giant row"):
        matrix = MATRICES[kind].copy()
        check(wide, matrix)
        matrix.indptr, matrix.indices = matrix.indptr.astype("int64"), matrix.indices.astype("int64")
        check(wide, matrix)


@FORMAT
@given(st.integers(0, 12), st.integers(0, 12), st.floats(0, 1), st.integers(0, 1000))
@settings(max_examples=12, deadline=None)
def test_the_axes_hold_any_matrix(format: Format, m: int, n: int, density: float, seed: int) -> None:
    check(format, random(m, n, density, seed))


@FORMAT
@MATRIX
def test_what_is_done_in_chunks_does_not_depend_on_them(
    format: Format, matrix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = format.pack(entries_of(matrix))
    modules = [module for name, module in sys.modules.items() if name.startswith("sparsetir.formats.")]
    chunked = [(m, size) for m in modules for size in ("CHUNK", "BATCH") if hasattr(m, size)]
    assert (sys.modules["sparsetir.formats.format"], "CHUNK") in chunked
    with monkeypatch.context() as patch:
        for module, size in chunked:
            patch.setattr(module, size, 3)
        pieces = check(format, matrix)
    for one, other in zip(whole, pieces, strict=True):
        assert (one.sizes, one.count) == (other.sizes, other.count)
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name])
        np.testing.assert_array_equal(one.values(matrix.data), other.values(matrix.data))


@FORMAT
@MATRIX
def test_pieces_meet_the_rows_that_the_rules_say(format: Format, matrix: Any) -> None:
    """All rows once where pieces partition them, all where a piece meets them, and always those with entries.

    The pieces hold every entry once, each in a slot: what every format promises.
    """
    every = set(range(matrix.shape[0]))
    assert len({rule.partitions_rows for rule in format.rules}) == 1
    met, pieces = [], format.pack(entries_of(matrix))
    assert sum(packed.size for packed in pieces) == matrix.nnz
    assert all(packed.size <= packed.count for packed in pieces)
    for rule, packed in zip(format.rules, pieces, strict=True):
        rows = Walk(rule, packed).rows()
        met.append(rows[rows < matrix.shape[0]])
        assert not rule.meets_rows or set(met[-1].tolist()) == every
    found = np.concatenate(met).tolist()
    if format.rules[0].partitions_rows:
        assert sorted(found) == sorted(every)
    assert {*np.flatnonzero(np.diff(matrix.indptr)).tolist()} <= set(found) <= every


PARTITIONS = {
    True: [
        "columns of one range",
        "rows",
        "buckets",
        "hyb of one range",
        "columns of buckets",
        "padded_csr",
        "dia",
        "narrow_csr",
        "sell",
        "narrow_sell",
        "reordered",
        "row_groups",
    ],
    False: [
        "columns",
        "hyb",
        "blocks",
        "buckets of one width",
        "rows of sell",
        "rows of buckets",
        "ell_rest",
    ],
}


@pytest.mark.parametrize(("expected", "name"), [(kind, name) for kind, names in PARTITIONS.items() for name in names])
def test_which_formats_partition_the_rows(expected: bool, name: str) -> None:
    assert {rule.partitions_rows for rule in FORMATS[name].rules} == {expected}


@FORMAT
def test_names_of_rules_differ_and_the_parameters_make_the_format_again(format: Format) -> None:
    names = [rule.name for rule in format.rules]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    again = make(format.name, **format.parameters)
    assert repr(again) == repr(format)
    assert [rule.name for rule in again.rules] == names


def test_names_are_joined() -> None:
    names = [rule.name for rule in FORMATS["blocks and hyb"].rules]
    assert names == ["main_bsr", "rest_c0_w1", "rest_c0_w2", "rest_c1_w1", "rest_c1_w2"]
    assert repr(FORMATS["blocks"]) == "blocks(r=2, c=3, rest='dcsr', density=0.6)"


@FORMAT
def test_tensors_hold_it(format: Format) -> None:
    for kind in ("random", "giant row", "no rows"):
        tensor = sparsetir.SparseTensor.from_scipy(MATRICES[kind], format=format)
        np.testing.assert_array_equal(tensor.restore().toarray(), MATRICES[kind].toarray())
        np.testing.assert_array_equal(tensor.convert("csr").restore().toarray(), MATRICES[kind].toarray())


def test_forward_and_inverse_of_nm_agree() -> None:
    [rule] = make("nm", n=2, m=4).rules
    i, j = np.arange(5), np.array([0, 3, 4, 9, 11])
    np.testing.assert_array_equal(rule.old_coords(rule.new_coords([i, j])), [i, j])


# ---------------------------------------------------------------------------------------------- what goes where


def counts(format: Format, matrix: Any) -> list[tuple[int, int]]:
    """Entries and stored values of each piece."""
    return [(piece.size, piece.count) for piece in format.pack(entries_of(matrix))]


def test_padding_is_what_the_formats_promise() -> None:
    lengths = of_dense(np.tri(8, 8))  # rows of 1 to 8 entries
    assert counts(make("padded_csr", t=4), lengths) == [(36, 4 * 4 + 4 * 8)]
    assert counts(make("sell", C=4, sigma=8), lengths) == [(36, 4 * 8 + 4 * 4)]
    assert counts(make("sell", C=4, sigma=1), lengths) == [(36, 4 * 4 + 4 * 8)]
    assert counts(make("buckets", widths=(1, 2, 4)), lengths) == [(0, 0), (1, 1), (2, 2), (33, 2 * 4 + 4 * 8)]
    assert counts(make("dia"), lengths) == [(36, 8 * 8)]
    assert counts(make("sr_bcrs", t=4, g=3), lengths) == [(36, (2 + 3) * 3 * 4)]
    assert counts(make("nm", n=4, m=4), lengths) == [(36, 64)]
    assert counts(make("ell_rest", width=4), lengths) == [(1 + 2 + 3 + 5 * 4, 32), (1 + 2 + 3 + 4, 10)]


def test_sigma_saves_padding() -> None:
    rng = np.random.default_rng(0)
    matrix = of_dense(rng.random((64, 40)) < rng.random((64, 1)))
    stored = [counts(make("sell", C=8, sigma=s), matrix)[0][1] for s in (1, 16, 64)]
    assert stored == sorted(stored, reverse=True)
    assert stored[0] > stored[-1]


def test_a_bucket_without_rows_stores_nothing() -> None:
    packed = make("buckets", widths=(1, 2, 4)).pack(entries_of(of_dense(np.eye(4))))
    assert [(p.sizes["mr"], p.count) for p in packed] == [(0, 0), (4, 4), (0, 0), (0, 0)]
    assert packed[3].sizes == {"m": 4, "n": 4, "mr": 0, "most": 0, "total": 0}


def test_a_long_row_is_split_and_stays_one_row() -> None:
    *_, last = make("buckets", widths=(1, 4)).pack(entries_of(MATRICES["giant row"]))
    assert last.arrays["rows"].tolist() == [5]
    assert last.arrays["split_ptr"].tolist() == [0, 6]


def test_ranges_of_rows_hold_as_much_work() -> None:
    packed = make("rows", p=4).pack(entries_of(random(1000, 1000, 0.01)))
    work = [piece.count + piece.sizes["mp"] for piece in packed]
    assert max(work) - min(work) < 100
    assert [piece.sizes["begin"] for piece in packed] == np.cumsum([0, *(p.sizes["mp"] for p in packed[:-1])]).tolist()


def test_ranges_of_rows_share_the_arrays() -> None:
    matrix = MATRICES["random"]
    filled = make("rows", p=2).fill(entries_of(matrix), matrix.data)
    assert all(np.shares_memory(flat, matrix.data) for _, flat in filled)
    assert all(np.shares_memory(piece.arrays["indices"], matrix.indices) for piece, _ in filled)
    for piece, flat in filled:
        np.testing.assert_array_equal(flat, piece.values(matrix.data))


def test_ranges_of_columns_are_equally_wide() -> None:
    packed = make("columns", c=3).pack(entries_of(of_dense(np.ones((1, 10)))))
    assert [piece.arrays["indices"].tolist() for piece in packed] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_full_enough_blocks_rows_columns_and_diagonals_are_dense() -> None:
    dense = np.zeros((8, 8))
    dense[:2, :2] = [[1, 1], [0, 0]]  # half full
    dense[2:4, 2:4] = [[1, 0], [0, 0]]  # a quarter
    assert counts(make("blocks", r=2, density=0.5), of_dense(dense)) == [(2, 4), (1, 1)]
    assert counts(make("blocks", r=2, density=0.25), of_dense(dense)) == [(3, 8), (0, 0)]
    assert counts(make("blocks", r=2, density=0.6), of_dense(dense)) == [(0, 0), (3, 3)]
    lines = np.zeros((8, 8))
    lines[3, :4], lines[5, :3] = 1, 1
    assert counts(make("dense_rows", density=0.5), of_dense(lines)) == [(4, 8), (3, 3)]
    assert counts(make("dense_columns", density=0.5), of_dense(lines.T)) == [(4, 8), (3, 3)]
    diagonal = np.diag([1, 1, 1, 1, 0, 0, 0, 0]) + np.diag([1, 1, 1], -5)
    assert counts(make("dia_rest", density=0.5), of_dense(diagonal)) == [(4, 8), (3, 3)]


REAL = ("bcsstk16", "amazon_computers", "wavernn_gru_4x4")
ON_REAL = ["sell", "narrow_sell", "sr_bcrs", "rows", "buckets", "dia_rest", "blocks and hyb"]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("stem", REAL)
def test_real_matrices(stem: str) -> None:
    found = sorted(Path(os.environ.get("SPARSETIR_DATA", "/nowhere")).rglob(f"{stem}.npz"))
    if not found:
        pytest.skip("SPARSETIR_DATA names no folder with this matrix")
    matrix = sp.csr_array(sparsetir.read(found[0]))
    matrix.data = np.arange(1, matrix.nnz + 1, dtype="float32")
    for name in ON_REAL:
        check(FORMATS[name], matrix)


# ---------------------------------------------------------------------------------------------- programs


def spmm_over(rule: FormatRewriteRule) -> tirx.PrimFunc:
    """``C += A B`` with A stored as the rule describes, written over its axes."""
    text = sparsetir.script(rule.description)
    head, _, body = text.partition("):\n")
    size = "T.int64" if rule.buffer.axes[0].idtype == "int64" else "T.int32"
    idtype = f'"{rule.buffer.axes[0].idtype}"'
    axes = [a.name for a in rule.buffer.axes]
    variables = [f"v_{a}".lower() for a in axes]
    kinds = "".join("S" if a in rule.axis_map[0] else "R" for a in axes)
    at = ", ".join(variables)
    text = f"""{head.rstrip().rstrip(",")}, b: T.handle, c: T.handle, m_: {size}, n_: {size}, feat: {size}):
{body.rstrip()}
    I_ = T.dense_fixed(m_, {idtype})
    J_ = T.dense_fixed(n_, {idtype})
    K_ = T.dense_fixed(feat, {idtype})
    B = T.match_sparse_buffer(b, (J_, K_))
    C = T.match_sparse_buffer(c, (I_, K_))
    with T.sp_iter([{", ".join(axes)}, K_], "{kinds}S", "spmm") as [{at}, k]:
        C[row({at}), k] = C[row({at}), k] + A[{at}] * B[col({at}), k]
"""
    from sparsetir.script import parser

    names = {"T": parser, "row": lambda *new: rule.old_coords(new)[0], "col": lambda *new: rule.old_coords(new)[1]}
    return parser.parse_text(text, names)


def arguments(rule: FormatRewriteRule, packed: Packed, matrix: Any, B: np.ndarray, C: np.ndarray) -> dict[str, Any]:
    values = packed.values(matrix.data)
    if len(rule.buffer.trees) == 2:
        (last,) = (int(tree[-1].length) for tree in rule.buffer.trees[1:])
        values = values.reshape(-1, last)
    if len(rule.buffer.trees) == 3:
        values = values.reshape(-1, *(int(tree[-1].length) for tree in rule.buffer.trees[1:]))
    named = {str(rule.buffer.storage.name): values, "b": B, "c": C, "feat": B.shape[1]}
    return {**packed.arrays, **packed.sizes, **named, "m_": matrix.shape[0], "n_": matrix.shape[1]}


def check_spmm(format: Format, matrices: Sequence[Any], *, interpreted: bool) -> None:
    """Run the program over each piece, one after the other into the same result."""
    programs = [spmm_over(rule) for rule in format.rules]
    for func in programs:
        sparsetir.verify(func)
    kernels = [sparsetir.build(func) for func in programs]
    for matrix in matrices:
        B = np.random.default_rng(1).integers(-3, 4, (matrix.shape[1], 2)).astype("float32")
        C, slow = np.zeros((2, matrix.shape[0], 2), "float32")
        for func, kernel, rule, piece in zip(
            programs, kernels, format.rules, format.pack(entries_of(matrix)), strict=True
        ):
            kernel(**arguments(rule, piece, matrix, B, C))
            if interpreted:
                slow = interpret(func, arguments(rule, piece, matrix, B, slow))["c"]
        np.testing.assert_array_equal(C, matrix @ B)
        if interpreted:
            np.testing.assert_array_equal(slow, matrix @ B)


DIFFERENT = [
    *("sell", "narrow_csr", "narrow_sell", "padded_csr", "sr_bcrs", "dia", "band", "nm", "rows", "buckets"),
    *("blocks", "dense_rows", "dense_columns"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_programs_over_the_descriptions(name: str) -> None:
    check_spmm(FORMATS[name], [MATRICES["empty rows"]], interpreted=True)
    check_spmm(FORMATS[name], list(MATRICES.values()), interpreted=False)


@pytest.mark.parametrize("name", ["sell", "narrow_csr", "narrow_sell", "sr_bcrs", "dia", "nm", "rows", "dense_columns"])
def test_programs_over_the_descriptions_with_wide_indices(name: str) -> None:
    check_spmm(WIDE[name], [MATRICES["random"], MATRICES["no rows"]], interpreted=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hyb", "columns of rows", "rows of sell", "dense columns, dense rows, diagonals"])
def test_decomposed_programs(name: str) -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": FORMATS[name]})
    sparsetir.verify(parts.func)
    kernel = sparsetir.build(parts)
    for matrix in MATRICES.values():
        B = np.random.default_rng(1).integers(-3, 4, (matrix.shape[1], 2)).astype("float32")
        np.testing.assert_array_equal(kernel(A=matrix, B=B), matrix @ B)


# ---------------------------------------------------------------------------------------------- errors

ASCENDING = "expected one or more numbers in ascending order"
WRONG = [
    ("sell", {"C": 0}, "C of sell: expected a positive integer, got 0"),
    ("sell", {"sigma": 2.5}, "sigma of sell: expected a positive integer, got 2.5"),
    ("narrow_sell", {"C": 0}, "C of narrow_sell: expected a positive integer, got 0"),
    ("padded_csr", {"t": -1}, "t of padded_csr: expected a positive integer, got -1"),
    ("sr_bcrs", {"t": 8, "g": True}, "g of sr_bcrs: expected a positive integer, got True"),
    ("band", {"lower": -1}, "lower of band: expected a non-negative integer, got -1"),
    ("band", {"upper": "2"}, "upper of band: expected a non-negative integer, got '2'"),
    ("nm", {"n": 5, "m": 4}, "nm keeps n of m columns, got n=5 and m=4: pass n up to m"),
    ("columns", {"c": 0}, "c of columns: expected a positive integer, got 0"),
    ("rows", {"p": 0}, "p of rows: expected a positive integer, got 0"),
    ("buckets", {"widths": (1, 0)}, "widths of buckets: expected a positive integer, got 0"),
    ("buckets", {"widths": (4, 2)}, rf"widths of buckets: {ASCENDING}, got \(4, 2\)"),
    ("buckets", {"widths": ()}, rf"widths of buckets: {ASCENDING}, got \(\)"),
    ("hyb", {"c": -2}, "c of hyb: expected a positive integer, got -2"),
    ("hyb", {"widths": (2, 2)}, rf"widths of hyb: {ASCENDING}, got \(2, 2\)"),
    ("blocks", {"r": 0}, "r of blocks: expected a positive integer, got 0"),
    ("blocks", {"density": 0}, "density of blocks: expected a number above 0 and at most 1, got 0"),
    ("dia_rest", {"density": 1.5}, "density of dia_rest: expected a number above 0 and at most 1, got 1.5"),
    ("dense_rows", {"density": "all"}, "density of dense_rows: expected a number above 0 and at most 1, got 'all'"),
    ("ell_rest", {"width": 0}, "width of ell_rest: expected a positive integer, got 0"),
]


@pytest.mark.parametrize(("name", "parameters", "message"), WRONG, ids=[f"{n} {p}" for n, p, _ in WRONG])
def test_wrong_parameters(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        make(name, **parameters)


@pytest.mark.parametrize("name", ["sell", "dia", "columns", "buckets", "hyb", "blocks"])
def test_wrong_index_types(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match="idtype: expected one of int32, int64, got 'int8'"):
        make(name, idtype="int8")


def test_a_part_is_a_format() -> None:
    with pytest.raises(ArgumentTypeError, match="a part of columns takes a format or the name of one, got 3"):
        make("columns", each=3).rules
    with pytest.raises(ArgumentError, match="no format is called 'cs'"):
        make("blocks", rest="cs").rules


def test_a_group_with_too_many_entries() -> None:
    dense = np.zeros((4, 10))
    dense[2, [4, 5, 7]] = 1
    found = "row 2 holds 3 entries in group 1, columns 4 to 7, expected at most 2"
    with pytest.raises(StructureError, match=rf"^{found}: prune it or store it as nm\(3, 4\)$"):
        make("nm").pack(entries_of(of_dense(dense)))


@pytest.mark.parametrize(("at", "needed"), [((3, 1), "lower=2"), ((0, 3), "upper=3")])
def test_an_entry_outside_of_the_band(at: tuple[int, int], needed: str) -> None:
    dense = np.eye(4)
    dense[at] = 1
    place = rf"entry \({at[0]}, {at[1]}\) lies outside band\(lower=1, upper=2\)"
    with pytest.raises(StructureError, match=f"^{place}: it needs {needed}$"):
        make("band", lower=1, upper=2).pack(entries_of(of_dense(dense)))


def one_each(shape: tuple[int, int], column: Any) -> Entries:
    """One entry in each row."""
    rows = np.arange(shape[0])
    return Entries.of_rows(shape, np.arange(shape[0] + 1), column(rows))


TOO_MANY = [
    (make("sell", C=1 << 20, sigma=1), Entries.of_rows((1, 5000), np.array([0, 5000]), np.arange(5000))),
    (make("narrow_sell", C=1 << 20, sigma=1), Entries.of_rows((1, 5000), np.array([0, 5000]), np.arange(5000))),
    (make("padded_csr", t=1 << 30), one_each((4, 5), lambda i: i)),
    (make("sr_bcrs", t=1 << 30, g=2), one_each((4, 5), lambda i: i)),
    (make("nm", n=4, m=4), one_each((2, 1 << 31), lambda i: i)),
    (make("dia"), one_each((1 << 17, 1), lambda i: 0 * i)),
    (make("band", lower=1 << 18, upper=0), one_each((1 << 17, 1), lambda i: 0 * i)),
    (make("dense_rows", density=1e-9), one_each((1 << 17, 1 << 17), lambda i: i)),
    (make("dense_columns", density=1e-9), one_each((1 << 17, 1 << 17), lambda i: i)),
    (make("buckets", widths=(1, 1 << 31)), Entries.of_rows((1, 9), np.array([0, 2]), np.arange(2))),
    (make("hyb", widths=(1 << 30,)), one_each((4, 5), lambda i: i)),
]


@pytest.mark.parametrize(("format", "entries"), TOO_MANY, ids=[repr(f) for f, _ in TOO_MANY])
def test_more_values_than_the_index_type_counts(format: Format, entries: Entries) -> None:
    """The check comes before anything is allocated for the values."""
    with pytest.raises(CapacityError, match="more than int32 indices can count"):
        format.pack(entries)
