# SPDX-License-Identifier: Apache-2.0
"""Patterns are what counting by hand says, fingerprints see the structure only, and the command shows both."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import sparsetir
from sparsetir import CooTensor, SparseTensor, formats
from sparsetir.bench import MissingPackageError, roofline
from sparsetir.bench import formats as bench_formats
from sparsetir.bench.roofline import portrait as draw_portrait
from sparsetir.cli import main, parser
from sparsetir.codegen.cache import write_cache
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError, VerifyError
from sparsetir.formats import statistics
from sparsetir.formats.heuristics import MOST_VALUES, RULES, candidates, considered
from sparsetir.formats.pattern import BLOCKS, PARTS, MatrixPattern, Pattern, pattern
from sparsetir.tuning.records import fingerprint as fingerprint_of_arguments
from sparsetir.workloads import timing

DATA = Path(os.environ.get("SPARSETIR_DATA", ""))
MANIFEST = DATA / "MANIFEST.json"
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")


def random(m: int, n: int, density: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((m, n)) < density


def ragged_rows(m: int, n: int) -> np.ndarray:
    """Rows of every length up to n, in disorder."""
    lengths = np.random.default_rng(1).integers(0, n + 1, m)
    return np.arange(n) < lengths[:, None]


MATRICES = {
    "no rows": np.zeros((0, 5), bool),
    "no columns": np.zeros((5, 0), bool),
    "nothing at all": np.zeros((0, 0), bool),
    "no entries": np.zeros((4, 6), bool),
    "one absent": np.zeros((1, 1), bool),
    "one stored": np.ones((1, 1), bool),
    "a row": random(1, 40, 0.3),
    "a column": random(40, 1, 0.3),
    "dense": np.ones((9, 7), bool),
    "diagonal": np.eye(12, dtype=bool),
    "tridiagonal": np.abs(np.subtract.outer(np.arange(20), np.arange(20))) <= 1,
    "two wide diagonals": np.eye(9, 30, 4, dtype=bool) | np.eye(9, 30, 17, dtype=bool),
    "square": random(70, 70, 0.1),
    "tall": random(150, 20, 0.2),
    "wide": random(20, 150, 0.2),
    "nearly empty": random(80, 90, 0.002, 3),
    "a dense row": random(33, 41, 0.05) | (np.arange(33) == 7)[:, None],
    "blocks": np.kron(random(9, 11, 0.2), np.ones((3, 3), bool)),
    "ragged": ragged_rows(50, 40),
    "two of four": np.tile([True, False, False, True], (30, 9)),
}


@pytest.fixture(params=MATRICES, ids=lambda name: name.replace(" ", "_"))
def stored(request: pytest.FixtureRequest) -> np.ndarray:
    """Which coordinates of a matrix are stored."""
    return MATRICES[request.param]


@pytest.fixture(params=["all lines", "lines in use"])
def numbering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether every row and column has a number, or those that hold something."""
    if request.param == "lines in use":
        monkeypatch.setattr(statistics, "SPARSE_LINES", 0)
        monkeypatch.setattr(statistics, "FEW_LINES", 0)


def found_in(stored: np.ndarray) -> MatrixPattern:
    found = pattern(sp.csr_array(stored.astype("float32")))
    assert isinstance(found, MatrixPattern)
    return found


# --- oracles, entry by entry --------------------------------------------------------------------------------


def entries_of(stored: np.ndarray) -> list[tuple[int, int]]:
    return [(i, j) for i in range(stored.shape[0]) for j in range(stored.shape[1]) if stored[i, j]]


def check_degrees(found: statistics.Degrees, lengths: list[int]) -> None:
    assert found.count == len(lengths)
    assert found.empty == lengths.count(0)
    if not lengths:
        assert (found.min, found.max, found.mean, found.median, found.histogram) == (0, 0, 0, 0, ())
        return
    assert (found.min, found.max) == (min(lengths), max(lengths))
    assert found.mean == pytest.approx(np.mean(lengths))
    assert found.median == np.median(lengths)
    assert found.std == pytest.approx(np.std(lengths))
    assert found.cv == pytest.approx(np.std(lengths) / np.mean(lengths) if sum(lengths) else 0.0)
    differences = sum(abs(a - b) for a in lengths for b in lengths)
    gini = differences / (2 * len(lengths) * sum(lengths)) if sum(lengths) else 0.0
    assert found.gini == pytest.approx(gini, abs=1e-12)
    bins = Counter(length.bit_length() for length in lengths)
    assert found.histogram == tuple(bins[k] for k in range(max(bins) + 1))


def check_blocks(found: MatrixPattern, entries: list[tuple[int, int]]) -> None:
    for r, c in BLOCKS:
        held = Counter((i // r, j // c) for i, j in entries)
        block = found.blocks[r, c]
        assert (block.r, block.c, block.count) == (r, c, len(held))
        assert block.most == max(held.values(), default=0)
        assert block.fill == pytest.approx(np.mean(list(held.values())) / (r * c) if held else 0.0)
        dense = sum(n for n in held.values() if n >= r * c / 2)
        assert block.share == pytest.approx(dense / max(len(entries), 1))


def mean_distance(entries: list[tuple[int, int]]) -> float | None:
    """From each entry to the next one of its column."""
    distances = []
    for column in {j for _, j in entries}:
        rows = sorted(i for i, j in entries if j == column)
        distances += [b - a for a, b in pairwise(rows)]
    return float(np.mean(distances)) if distances else None


def slices(lengths: list[int]) -> int:
    """Slots of SELL-8-64."""
    slots = 0
    for begin in range(0, len(lengths), 64):
        window = sorted(lengths[begin : begin + 64], reverse=True)
        slots += sum(8 * max(window[k], 1) for k in range(0, len(window), 8))
    return slots


@pytest.mark.usefixtures("numbering")
def test_rows_and_columns_are_as_long_as_counted(stored: np.ndarray) -> None:
    found = found_in(stored)
    check_degrees(found.rows, stored.sum(axis=1).tolist())
    check_degrees(found.columns, stored.sum(axis=0).tolist())
    assert found.shape == stored.shape
    assert found.nnz == stored.sum()
    assert found.density == (stored.mean() if stored.size else 0.0)
    assert found.fibers == (stored.any(axis=0).sum(), stored.any(axis=1).sum())


@pytest.mark.usefixtures("numbering")
def test_entries_lie_where_counted(stored: np.ndarray) -> None:
    found, entries, (m, n) = found_in(stored), entries_of(stored), stored.shape
    assert found.bandwidth == (max([0, *(i - j for i, j in entries)]), max([0, *(j - i for i, j in entries)]))
    by_row = {i: min(j for k, j in entries if k == i) for i, _ in entries}
    by_column = {j: min(i for i, k in entries if k == j) for _, j in entries}
    assert found.profile == tuple(sum(max(a - b, 0) for a, b in first.items()) for first in (by_row, by_column))
    assert found.prefix == sum(1 + max(j for k, j in entries if k == i) for i in by_row)
    windows = [[j for i, j in entries if i // 64 == k] for k in range(-(-m // 64))]
    in_rows = [[j for k, j in entries if k == i] for i in by_row]
    assert found.reach == tuple(max([0, *(max(r) - min(r) for r in rows if r)]) for rows in (in_rows, windows))
    assert found.sliced == slices(stored.sum(axis=1).tolist())

    diagonals = Counter(j - i for i, j in entries)
    full = [count for count in diagonals.values() if count >= min(m, n) / 2]
    assert (found.diagonals, found.full_diagonals) == (len(diagonals), len(full))
    assert found.diagonal_share == pytest.approx(sum(full) / max(len(entries), 1))


@pytest.mark.usefixtures("numbering")
def test_blocks_are_as_full_as_counted(stored: np.ndarray) -> None:
    check_blocks(found_in(stored), entries_of(stored))


@pytest.mark.usefixtures("numbering")
def test_rows_meet_in_columns_as_counted(stored: np.ndarray) -> None:
    found, entries, (m, n) = found_in(stored), entries_of(stored), stored.shape
    assert found.panel_columns == len({(i // 64, j) for i, j in entries}) / max(len(entries), 1)
    assert found.reuse_distance == pytest.approx(mean_distance(entries))
    for parts in PARTS:
        edges = [k * m // parts for k in range(parts + 1)]
        held = [int(stored[a:b].sum()) for a, b in pairwise(edges)]
        assert found.imbalance[parts] == pytest.approx(max(held) * parts / len(entries) if entries else 1.0)
    away = [(i, j) for i, j in entries if i != j]
    mirrored = sum((j, i) in set(away) for i, j in away)
    symmetry = mirrored / len(away) if away else 1.0
    assert found.symmetry == (pytest.approx(symmetry) if m == n else None)


def test_large_matrices_are_counted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random(90, 60, 0.2, 5)
    at_once = found_in(stored)
    monkeypatch.setattr(import_module("sparsetir.formats.blocks"), "BATCH", 7)
    monkeypatch.setattr(statistics, "CHUNK", 5)
    assert found_in(stored) == at_once


def test_tensors_have_fibers_along_each_mode() -> None:
    coords = np.array([[0, 0, 1, 1, 1], [2, 2, 0, 2, 2], [1, 3, 1, 1, 0]])
    found = pattern(CooTensor(coords, np.ones(5), (2, 3, 4)))
    assert type(found) is Pattern
    assert (found.shape, found.nnz, found.ndim, found.density) == ((2, 3, 4), 5, 3, 5 / 24)
    listed = list(zip(*coords.tolist(), strict=True))
    assert found.fibers == tuple(len({c[:d] + c[d + 1 :] for c in listed}) for d in range(3))
    line = pattern(sp.coo_array(np.array([0.0, 1.0, 0.0, 2.0])))
    assert (line.shape, line.nnz, line.fibers) == ((4,), 2, (1,))


# --- arguments ----------------------------------------------------------------------------------------------


def test_order_and_duplicates_are_those_of_the_argument() -> None:
    tidy = pattern(sp.coo_array((np.ones(3), ([0, 1, 1], [2, 0, 1])), shape=(2, 3)))
    assert (tidy.is_sorted, tidy.duplicates) == (True, 0)
    twice = pattern(sp.coo_array((np.ones(4), ([0, 1, 1, 1], [2, 0, 0, 1])), shape=(2, 3)))
    assert (twice.is_sorted, twice.duplicates, twice.nnz) == (True, 1, 3)
    rows = sp.csr_array((np.ones(3), [2, 1, 0], [0, 1, 3]), shape=(2, 3))
    assert not pattern(rows).is_sorted
    columns = sp.csc_array((np.ones(3), [1, 1, 0], [0, 1, 2, 3]), shape=(2, 3))
    assert pattern(columns).is_sorted
    assert {p.fingerprint for p in (tidy, twice, pattern(rows), pattern(columns))} == {tidy.fingerprint}


@pytest.mark.parametrize("value", [np.eye(3), [[1]], "file.mtx", None])
def test_what_is_not_sparse_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r": expected a scipy\.sparse array"):
        pattern(value)


def test_broken_structure_is_refused() -> None:
    broken = sp.csr_array(np.eye(3))
    broken.indices[1] = 7
    with pytest.raises(StructureError, match="hold 7 at position 1"):
        pattern(broken)


def test_a_pattern_is_a_value() -> None:
    one, other = found_in(MATRICES["square"]), found_in(MATRICES["square"])
    assert one == other
    assert hash(one) == hash(other)
    assert one != found_in(MATRICES["tall"])
    with pytest.raises(AttributeError):
        one.nnz = 3  # type: ignore[misc]


def test_it_goes_to_json_and_back(stored: np.ndarray) -> None:
    found = found_in(stored)
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again["nnz"] == found.nnz
    assert again["rows"]["histogram"] == list(found.rows.histogram)
    assert [(b["r"], b["c"]) for b in again["blocks"]] == list(BLOCKS)
    assert list(again["imbalance"]) == [str(parts) for parts in PARTS]


def test_it_is_shown_as_a_line_and_as_a_table() -> None:
    found = found_in(MATRICES["tridiagonal"])
    assert repr(found) == "<MatrixPattern 20 x 20, 58 nonzeros, density 0.145>"
    lines = str(found).splitlines()
    assert lines[0].endswith(found.fingerprint)
    assert "diagonals: 3 hold something, 3 half full with 100% of the nonzeros" in lines
    assert "bandwidth 1 and 1, profile 19 and 19 (below and above the main diagonal)" in lines
    assert lines[-1] == "100% symmetric, sorted, no duplicates"
    widths = {len(line) for line in lines if line.startswith(("nonzeros of", "rows", "columns  "))}
    assert len(widths) == 2  # the table of statistics, and that of lengths
    cube = pattern(CooTensor.from_dense(np.ones((2, 2, 2))))
    assert str(cube).splitlines()[1:] == ["fibers of each mode: 4, 4, 4", "sorted, no duplicates"]


# --- fingerprints -------------------------------------------------------------------------------------------


def shuffled(coo: Any, seed: int = 0) -> Any:
    order = np.random.default_rng(seed).permutation(coo.nnz)
    return sp.coo_array((coo.data[order], tuple(c[order] for c in coo.coords)), shape=coo.shape)


def other_containers(csr: Any) -> Iterator[Any]:
    """The same structure in other classes, orders, widths and values."""
    coo = csr.tocoo()
    for name in ("csc", "coo", "lil", "dok"):
        yield csr.asformat(name)
    yield shuffled(coo)
    yield sp.coo_array((np.tile(coo.data, 2), tuple(np.tile(c, 2) for c in coo.coords)), shape=coo.shape)
    wide = csr.copy()
    wide.indptr, wide.indices = wide.indptr.astype("int64"), wide.indices.astype("int64")
    yield wide
    yield csr * 0
    yield csr.astype("float64") * 3
    yield CooTensor(np.stack(shuffled(coo, 1).coords), coo.data, coo.shape)
    for stored in ("csr", "csc", "coo", "dcsr", "ell"):
        yield SparseTensor.from_any(csr, stored)
    yield SparseTensor.from_any(csr, "bsr", r=2, c=3)


@pytest.mark.parametrize("name", [n for n, stored in MATRICES.items() if min(stored.shape)])
def test_a_fingerprint_does_not_depend_on_the_container(name: str) -> None:
    csr = sp.csr_array(MATRICES[name].astype("float32"))
    assert {pattern(other).fingerprint for other in other_containers(csr)} == {pattern(csr).fingerprint}


def test_blocks_and_diagonals_have_the_fingerprint_of_their_entries() -> None:
    csr = sp.csr_array(np.kron(random(4, 5, 0.5), np.ones((2, 2))))
    assert pattern(csr.tobsr((2, 2))).fingerprint == pattern(csr).fingerprint
    band = sp.csr_array(MATRICES["tridiagonal"].astype("float32"))
    assert pattern(band.todia()).fingerprint == pattern(band).fingerprint


@needs_torch
def test_torch_tensors_have_the_fingerprint_of_their_entries() -> None:
    torch = importlib.import_module("torch")
    csr = sp.csr_array(MATRICES["square"].astype("float32"))
    rows, columns = csr.tocoo().coords
    listed = torch.sparse_coo_tensor(np.stack([rows, columns])[:, ::-1].copy(), csr.data, csr.shape)
    for tensor in (listed, listed.coalesce().to_sparse_csr(), listed.coalesce().to_sparse_csc()):
        found = pattern(tensor)
        assert isinstance(found, MatrixPattern)
        assert found.fingerprint == pattern(csr).fingerprint


def test_different_structures_have_different_fingerprints() -> None:
    base = sp.csr_array(MATRICES["square"].astype("float32"))
    taller = sp.csr_array((base.data, base.indices, np.append(base.indptr, base.nnz)), shape=(71, 70))
    moved = MATRICES["square"].copy()
    moved[0] = np.roll(moved[0], 1)
    structures = [base, base.T, taller, sp.csr_array(moved), *(sp.csr_array(s) for s in MATRICES.values())]
    structures += [CooTensor(np.zeros((d, 0), int), np.zeros(0), (2,) * d) for d in (1, 2, 3)]
    found = [pattern(s).fingerprint for s in structures]
    assert len(set(found)) == len(found) - 1  # base is one of the matrices


def test_a_fingerprint_is_the_hash_that_its_docstring_says() -> None:
    matrix = sp.coo_array((np.ones(3), ([1, 3, 3], [2, 0, 5])), shape=(4, 6))
    state = hashlib.sha256(b"(4, 6)")
    for numbers in ([1, 3], [0, 1, 3], [2, 0, 5]):
        state.update(f"({len(numbers)},)".encode() + b"".join(n.to_bytes(8, "little") for n in numbers))
    assert pattern(matrix).fingerprint == state.hexdigest()[:16]


def test_tensors_have_the_same_fingerprint_in_any_order() -> None:
    dense = np.random.default_rng(2).random((4, 5, 6)) < 0.3
    tensor = CooTensor.from_dense(dense.astype("float32"))
    order = np.random.default_rng(0).permutation(tensor.nnz)
    mixed = CooTensor(tensor.coords[:, order], tensor.values[order] * 2, tensor.shape)
    stored = SparseTensor.from_any(tensor, "csf", order=(2, 0, 1))
    assert len({pattern(t).fingerprint for t in (tensor, mixed, stored)}) == 1
    turned = CooTensor(tensor.coords[[1, 0, 2]], tensor.values, (5, 4, 6))
    assert pattern(turned).fingerprint != pattern(tensor).fingerprint


def test_the_width_of_indices_does_not_enter_the_tuner_s_fingerprint_either() -> None:
    program = sparsetir.ir.decode(sparsetir.ops.spmm())
    csr = sp.csr_array(MATRICES["square"].astype("float32"))

    def of(idtype: str, **changed: Any) -> str:
        arrays = {"indptr": csr.indptr, "indices": csr.indices, **changed}
        return fingerprint_of_arguments(program, {n: a.astype(idtype) for n, a in arrays.items()})

    assert of("int32") == of("int64")
    assert of("int32") != of("int32", indices=csr.indices[::-1])


# --- cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extent", [10**6, 10**12])
def test_the_cost_goes_with_the_entries_and_not_with_the_shape(extent: int) -> None:
    coords = np.random.default_rng(0).integers(0, extent, (2, 100_000))
    tensor = CooTensor(coords, np.ones(100_000, "float32"), (extent, extent))
    tracemalloc.start()
    found = pattern(tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, MatrixPattern)
    assert found.rows.count - found.rows.empty == len(np.unique(coords[0]))
    assert peak < 40e6


def test_sums_may_be_greater_than_64_bits() -> None:
    large = 2**62
    coords = np.array([[large - 1, large - 2, large - 3], [0, 1, 2]])
    found = pattern(CooTensor(coords, np.ones(3), (large, large)))
    assert isinstance(found, MatrixPattern)
    assert found.profile == (sum(int(i) - int(j) for i, j in coords.T), 0)


# --- candidates ---------------------------------------------------------------------------------------------


def test_candidates_store_no_more_than_they_say(stored: np.ndarray) -> None:
    matrix = sp.csr_array(stored.astype("float32"))
    for one in considered(pattern(matrix), most=1e9):
        tensor = SparseTensor.from_any(matrix, one.format)
        values = sum(piece.packed.count for piece in tensor.pieces)
        assert values <= one.values * max(matrix.nnz, 1) * (1 + 1e-12), one.format
        np.testing.assert_array_equal(tensor.to_dense(), stored)


def test_candidates_are_those_that_suit() -> None:
    def names(stored: np.ndarray) -> set[str]:
        return {format.name for format in candidates(found_in(stored))}

    always = {"csr", "csc", "dcsr", "coo"}
    for stored in MATRICES.values():
        assert always <= names(stored)
    assert {"dia", "band", "ell", "sell"} <= names(MATRICES["tridiagonal"])
    assert formats.nm(2, 4) in candidates(found_in(MATRICES["two of four"]))
    assert not {"dia", "band", "ell", "nm", "ragged", "dense_columns"} & names(MATRICES["a dense row"])
    assert "dense_rows" in names(MATRICES["a dense row"])
    assert {"ragged", "dense_rows", "buckets"} <= names(MATRICES["ragged"])
    assert formats.bsr(3, 3) in candidates(found_in(MATRICES["blocks"]))
    assert formats.bsr(16, 16) not in candidates(found_in(MATRICES["blocks"]))
    assert formats.columns(2) not in candidates(found_in(MATRICES["wide"]))
    wide = sp.random_array((10, 5000), density=0.01, rng=np.random.default_rng(0))
    assert {formats.columns(2), formats.columns(4), formats.hyb(2)} <= set(candidates(pattern(wide)))


def test_candidates_are_named_once_and_the_others_say_why(stored: np.ndarray) -> None:
    found = considered(found_in(stored), most=2)
    assert len({repr(one.format) for one in found}) == len(found)
    for one in found:
        if one.objection is not None:
            assert one.values > 2
            assert "values for each entry, more than 2" in one.objection
    assert [one.format for one in found if one.objection is None] == candidates(found_in(stored), most=2)


def test_every_rule_proposes_something() -> None:
    found = [found_in(stored) for stored in MATRICES.values() if stored.any()]
    found.append(found_in(random(40, 3000, 0.1)))
    for rule in RULES:
        assert any(list(rule(one)) for one in found), rule.__name__


def test_nothing_is_proposed_for_the_shape_of_an_empty_matrix() -> None:
    assert candidates(found_in(MATRICES["no entries"])) == [formats.csr(), formats.csc(), formats.dcsr(), formats.coo()]


def test_a_matrix_with_few_entries_for_its_lines_is_stored_by_entries_only() -> None:
    lonely = pattern(CooTensor(np.array([[5], [7]]), np.ones(1), (10**9, 10**9)))
    assert candidates(lonely) == [formats.dcsr(), formats.coo()]


def test_candidates_of_a_tensor_have_each_mode_at_the_root() -> None:
    found = candidates(pattern(CooTensor.from_dense(np.ones((2, 3, 4)))))
    orders = [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
    assert found == [formats.coo(3), *(formats.csf(order) for order in orders)]


def test_candidates_of_a_tensor_have_the_shortest_modes_above_the_fibers() -> None:
    found = candidates(pattern(CooTensor.from_dense(np.ones((4, 3, 2)))))
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    assert found == [formats.coo(3), *(formats.csf(order) for order in orders)]


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A matrix of blocks, a wide one, a tensor and a file that is none of these; kernels go to a folder beside."""
    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path / "cache"))
    scipy.io.mmwrite(tmp_path / "blocks.mtx", sp.coo_array(MATRICES["blocks"].astype("float64")))
    sp.save_npz(tmp_path / "wide.npz", sp.csr_array(MATRICES["wide"].astype("float32")))
    (tmp_path / "cube.tns").write_text("1 1 1 2.0\n2 2 2 1.0\n")
    (tmp_path / "broken.mtx").write_text("no matrix\n")
    yield tmp_path
    write_cache()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short turns."""
    monkeypatch.setattr(timing, "MIN_CALLS", 1)
    monkeypatch.setattr(bench_formats, "ROUNDS", 1)


def test_formats_prints_the_pattern_and_a_table(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", str(files / "blocks.mtx"), "--json", str(files / "new" / "out.json")]) == 0
    shown = capsys.readouterr()
    expected = pattern(sparsetir.read(files / "blocks.mtx"))
    assert str(expected) in shown.out
    rows = {line.split("  ")[0]: line.split() for line in shown.out.splitlines() if "(" in line}
    assert rows["bsr(r=3, c=3)"][-3] == "0%"
    assert "not stored: bsr(r=16, c=16): it would store up to" in shown.out
    assert shown.err == ""

    facts = json.loads((files / "new" / "out.json").read_text())
    assert facts["pattern"]["fingerprint"] == expected.fingerprint
    assert [row["format"] for row in facts["stored"]] == [repr(format) for format in candidates(expected)]
    by_format = {row["format"]: row for row in facts["stored"]}
    bsr = SparseTensor.from_any(sparsetir.read(files / "blocks.mtx").astype("float32"), "bsr", r=2, c=2)
    found = by_format["bsr(r=2, c=2)"]
    assert (found["nbytes"], found["padding"], found["pieces"]) == (bsr.nbytes, bsr.padding, 1)
    assert all(row["seconds"] > 0 and "spmm" not in row for row in facts["stored"])
    assert {row["format"] for row in facts["skipped"]} >= {"bsr(r=16, c=16)"}


def test_formats_prints_json_and_nothing_else(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", str(files / "cube.tns"), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["pattern"]["fibers"] == [2, 2, 2]
    assert len(facts["stored"]) == 4


def test_formats_leaves_out_what_stores_too_much(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", str(files / "wide.npz"), "--most", "1", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {row["padding"] for row in facts["stored"]} == {0.0}
    assert all(row["values"] > 1 for row in facts["skipped"])


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_formats_times_the_product_in_turn_with_csr(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_formats, "candidates", lambda *_, **__: [formats.csr(), formats.bsr(3, 3)])
    assert main(["formats", str(files / "blocks.mtx"), "--feat", "5", "--json", str(files / "out.json")]) == 0
    shown = capsys.readouterr()
    heading = next(line for line in shown.out.splitlines() if line.startswith("format"))
    assert heading.split()[-4:] == ["ms", "vs", "csr", "spread"]
    facts = json.loads((files / "out.json").read_text())
    assert {row["format"] for row in facts["stored"]} == {"csr()", "bsr(r=3, c=3)"}
    for row in facts["stored"]:
        assert 0 < row["spmm"]["min"] <= row["spmm"]["median"]
        assert row["csr"]["median"] > 0
    ratios = [row["spmm"]["median"] / row["csr"]["median"] for row in facts["stored"]]
    assert ratios == sorted(ratios)


@pytest.mark.usefixtures("quick")
def test_formats_finds_wrong_products_and_goes_on(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench_formats.our_call

    def wrong_for_bsr(kernel: Any, case: Any) -> Any:
        call = right(kernel, case)
        return (lambda: 0 * call()) if "bsr" in repr(kernel) else call

    monkeypatch.setattr(bench_formats, "our_call", wrong_for_bsr)
    monkeypatch.setattr(bench_formats, "candidates", lambda *_, **__: [formats.bsr(2, 2), formats.csr()])
    assert main(["formats", str(files / "blocks.mtx"), "--feat", "4"]) == 1
    shown = capsys.readouterr()
    assert "failed: bsr(r=2, c=2): blocks.mtx as bsr(r=2, c=2): our result differs from" in shown.out
    assert any(line.startswith("csr()") for line in shown.out.splitlines())


def test_formats_says_which_format_failed(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_with(error: Exception) -> Any:
        def fail(*_: Any) -> None:
            raise error

        return fail

    monkeypatch.setattr(formats.coo, "packed", fail_with(VerifyError("nothing fits")))
    monkeypatch.setattr(formats.csc, "fill", fail_with(MemoryError("much\ntoo large")))
    assert main(["formats", str(files / "wide.npz")]) == 1
    shown = capsys.readouterr()
    assert "failed: coo(ndim=2): nothing fits" in shown.out
    assert "failed: csc(): MemoryError: too large" in shown.out
    assert any(line.startswith("dcsr()") for line in shown.out.splitlines())


@pytest.mark.slow
@needs_matplotlib
@pytest.mark.parametrize("name", ["square", "nothing at all", "no rows", "one stored", "a dense row", "no entries"])
def test_a_portrait_is_drawn(name: str, tmp_path: Path) -> None:
    matrix = sp.csr_array(MATRICES[name].astype("float32"))
    path = draw_portrait(matrix, pattern(matrix), tmp_path / "new" / "portrait.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@needs_matplotlib
def test_formats_draws(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = files / "out" / "picture.svg"
    assert main(["formats", str(files / "blocks.mtx"), "--plot", str(picture), "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert f"wrote {picture}" in shown.err
    json.loads(shown.out)
    assert "<svg" in picture.read_text()


def test_formats_says_that_matplotlib_is_missing(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def require(*_args: object, **_kwargs: object) -> None:
        raise MissingPackageError("drawing needs matplotlib; try: pip install 'sparsetir[plot]'")

    monkeypatch.setattr(roofline, "require", require)
    assert main(["formats", str(files / "blocks.mtx"), "--plot", str(files / "a.png")]) == 2
    shown = capsys.readouterr()
    assert "drawing needs matplotlib; try: pip install" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.mtx"], "there is no file missing.mtx"),
        (["{files}/broken.mtx"], "not a readable .mtx file"),
        (["{files}/cube.tns", "--feat", "8"], "SpMM takes a matrix, got 2 x 2 x 2 in cube.tns"),
        (["{files}/cube.tns", "--plot", "{files}/a.png"], "only a matrix can be drawn, got a tensor of 3 dimensions"),
        (["{files}/blocks.mtx", "--feat", "0"], "positive"),
        (["{files}/blocks.mtx", "--most", "-1"], "positive"),
        ([], "FILE"),
    ],
)
def test_formats_says_what_is_wrong(
    arguments: list[str], said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["formats", *(a.format(files=files) for a in arguments)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_formats_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--help"]) == 0
    assert "usage: sparsetir formats" in capsys.readouterr().out
    assert parser().parse_args(["formats", "a.mtx"]).most == MOST_VALUES


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 6), (1, 1)])
def test_formats_of_an_empty_matrix(shape: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sp.save_npz(tmp_path / "empty.npz", sp.csr_array(shape, dtype="float32"))
    assert main(["formats", str(tmp_path / "empty.npz"), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"csr()", "csc()", "dcsr()", "coo(ndim=2)"} <= {row["format"] for row in facts["stored"]}


# --- many matrices ------------------------------------------------------------------------------------------


def test_the_benchmark_has_a_row_for_each_matrix_and_format(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", str(files), "--feat", "0", "--markdown", str(files / "out" / "table.md")]
    assert bench_formats.main([*arguments, "--json", str(files / "table.json")]) == 0
    shown = capsys.readouterr()
    rows = [line.split()[0] for line in shown.out.splitlines() if line]
    assert rows.count("blocks") == len(candidates(found_in(MATRICES["blocks"])))
    assert rows.count("wide") == len(candidates(found_in(MATRICES["wide"])))
    assert "blocks: not stored, with too many values for each entry: " in shown.out
    assert "cube.tns is a tensor of 3 dimensions" in shown.err
    assert "broken.mtx is not a readable .mtx file" in shown.err
    table = (files / "out" / "table.md").read_text()
    assert table.count("\n| blocks |") == rows.count("blocks")
    assert [one["name"] for one in json.loads((files / "table.json").read_text())] == ["blocks", "wide"]


@pytest.mark.usefixtures("quick")
def test_the_benchmark_times_and_reports_findings(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_formats, "candidates", lambda *_, **__: [formats.csr(), formats.dcsr()])
    arguments = [str(files / "wide.npz"), "--feat", "4", "--rounds", "1", "--threads", str(sparsetir.get_num_threads())]
    assert bench_formats.main(arguments) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:3]] == ["wide", "wide"]
    monkeypatch.setattr(bench_formats, "our_call", lambda kernel, case: lambda: np.zeros((20, 4), "float32"))
    assert bench_formats.main(arguments) == 1
    assert capsys.readouterr().out.count("our result differs from the reference") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected files with matrices, or --data FOLDER, got none"),
        (["missing.mtx"], "there is no file missing.mtx"),
        (["--data", "missing"], "there is no folder missing"),
        (["--feat", "x", "a.mtx"], "expected a number of columns, 0 to time nothing, got 'x'"),
        (["{files}/cube.tns"], "none of the files could be measured"),
    ],
)
def test_the_benchmark_says_what_is_wrong(
    arguments: list[str], said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_formats.main([a.format(files=files) for a in arguments]) == 2
    assert said in capsys.readouterr().err


def test_operands_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_formats, "free_memory", lambda: 1000.0)
    with pytest.raises(ArgumentError, match="try fewer columns"):
        bench_formats.survey("wide", sparsetir.read(files / "wide.npz"), feat=8)
    assert bench_formats.main([str(files / "wide.npz"), "--feat", "8"]) == 2
    assert "skipped: SpMM of wide with 8 columns needs" in capsys.readouterr().err


def test_the_benchmark_says_that_the_machine_was_busy() -> None:
    def surveyed(*samples: float) -> bench_formats.Survey:
        times = {"spmm": timing.Timing.of(list(samples)), "csr": timing.Timing.of([1.0])}
        row = bench_formats.StoredTensor(formats.csr(), 1, 0.0, 1, 1.0, **times)
        return bench_formats.Survey("a", found_in(MATRICES["square"]), 8, [row])

    assert bench_formats.busy([surveyed(1.0, 1.0)]) == []
    assert bench_formats.busy([surveyed(1.0, 1.0), surveyed(1.0, 2.0, 3.0, 4.0)]) == [
        "the machine was busy (spread above 30% in 1 of 2 rows): repeat on a quiet one before quoting these times"
    ]


# --- real matrices ------------------------------------------------------------------------------------------


def described(order: int) -> list[dict[str, Any]]:
    """What the folder's manifest, written by other means, says of matrices (2) or tensors."""
    files = json.loads(MANIFEST.read_text())["files"] if os.environ.get("SPARSETIR_DATA") and MANIFEST.exists() else []
    found = [facts for facts in files if "row_degree" in facts and facts["nnz"] < 1_200_000]
    return [facts for facts in found if (facts.get("order", 2) == 2) == (order == 2)]


def check_described(held: statistics.Degrees, facts: dict[str, Any]) -> None:
    exact = ("min", "max", "median", "empty")
    assert {n: getattr(held, n) for n in exact} == {n: facts[n] for n in exact}
    assert (held.mean, held.cv) == pytest.approx((facts["mean"], facts["cv"]), abs=6e-4)


@pytest.mark.real
@pytest.mark.parametrize("facts", described(2), ids=lambda facts: facts["name"])
def test_real_matrices_are_what_their_manifest_says(facts: dict[str, Any]) -> None:
    found = pattern(sparsetir.read(DATA / facts["file"]))
    assert isinstance(found, MatrixPattern)
    assert (*found.shape, found.nnz) == (facts["rows"], facts["cols"], facts["nnz"])
    check_described(found.rows, facts["row_degree"])
    if "col_degree" in facts:
        check_described(found.columns, facts["col_degree"])
    assert max(found.bandwidth) == facts.get("bandwidth", max(found.bandwidth))
    for size, fill in facts.get("block_fill", {}).items():
        assert found.blocks[int(size), int(size)].fill == pytest.approx(fill, abs=6e-4)
    if facts.get("symmetric"):
        assert found.symmetry == 1.0


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("facts", described(3), ids=lambda facts: facts["name"])
def test_real_tensors_are_what_their_manifest_says(facts: dict[str, Any]) -> None:
    found = pattern(sparsetir.read(DATA / facts["file"]))
    assert (list(found.shape), found.nnz) == (facts["shape"], facts["nnz"])
    tensor = sparsetir.read(DATA / facts["file"])
    for mode, fibers in enumerate(found.fibers):
        others = np.delete(tensor.coords, mode, axis=0)
        assert fibers == np.unique(others, axis=1).shape[1]
