# SPDX-License-Identifier: Apache-2.0
"""Programs that compute the pattern of their results, against the interpreter: every accumulator, one phase and two."""

from __future__ import annotations

import copy
import math
import pickle
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import tirx

import sparsetir
from corpus.computed import PROGRAMS, SHAPES, draw_arguments, matrix
from sparsetir import Accumulators, CooTensor
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, ScriptError, VerifyError
from sparsetir.sparse_output import AccumulatorOptions, functions, workspace
from sparsetir.sparse_output import kernel as assembled
from sparsetir.sparse_output.accumulators import FIRST, FUNCTIONS
from sparsetir.sparse_output.blocks import assembled_kernel
from sparsetir.sparse_output.kernel import SparseOutputKernel


@cache
def _kernel(name: str, *, table: bool = False) -> SparseOutputKernel:
    return assembled_kernel(
        sparsetir.parse(PROGRAMS[name]),
        None,
        AccumulatorOptions(accumulators=Accumulators(kind="table" if table else "both")),
    )


def _agrees(name: str, kernel: SparseOutputKernel, arguments: dict[str, Any], *, phases: int = 1) -> None:
    """Compare pattern and values with the interpreter's, bit by bit."""
    args = kernel.prepare((), arguments)
    wanted = sparsetir.interpret(sparsetir.parse(PROGRAMS[name]), {**args.arrays, **args.sizes})
    call = kernel.begin(args)
    pattern = kernel.two_phases(call) if phases == 2 else kernel.one_phase(call)
    found = kernel.returned(args, pattern, arguments)
    if isinstance(found, tuple):
        found, other = found
        assert np.array_equal(wanted["d"].ravel(), other.values)
    assert np.array_equal(wanted["c"], found.values if isinstance(found, CooTensor) else found.data)
    if isinstance(found, CooTensor):
        rows = np.repeat(np.arange(found.shape[0]), np.diff(wanted["J_indptr"]))
        last = next(n[0] for n in wanted if n.endswith("_indptr") and n[0] != "J")
        counts = np.diff(wanted[f"{last}_indptr"])
        coords = [np.repeat(rows, counts), np.repeat(wanted["J_indices"], counts), wanted[f"{last}_indices"]]
        assert np.array_equal(np.stack(coords), found.coords)
    else:
        assert np.array_equal(wanted["J_indptr"], found.indptr)
        assert np.array_equal(wanted["J_indices"], found.indices)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree_with_the_interpreter(name: str) -> None:
    for shape in SHAPES:
        for density in (0, 0.1, 0.6):
            _agrees(name, _kernel(name), draw_arguments(name, shape, density))


@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_need_the_alignment_of_their_elements(name: str) -> None:
    for func in _kernel(name).compiled.functions.module(FUNCTIONS).functions.values():
        for param in filter(tirx.is_buffer_var, func.params):
            assert int(param.ty.data_alignment) <= max(np.dtype(str(param.ty.dtype)).itemsize, 1), param


@pytest.mark.slow
def test_rows_are_counted_in_vectors_wherever_arrays_begin() -> None:
    name = "computed subscripts"  # what a row enters is known without a loop
    for rows in (31, 32, 33, 61, 64, 65, 130, 257):
        _agrees(name, _kernel(name), draw_arguments(name, (rows, 9, 1, 1), 0.3))


TWICE = ["least sums", "two iterations over the same rows", "a tensor times a matrix", "a product of blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TWICE)
def test_tables_and_two_phases_agree(name: str) -> None:
    for shape in SHAPES:
        arguments = draw_arguments(name, shape, 0.4)
        _agrees(name, _kernel(name), arguments, phases=2)
        _agrees(name, _kernel(name, table=True), arguments)
        _agrees(name, _kernel(name, table=True), arguments, phases=2)


@pytest.mark.slow
def test_wide_results_are_collected_in_tables() -> None:
    wide, rng = 2**31 - 8, np.random.default_rng(0)
    A = sp.random_array((50, 40), density=0.5, format="csr", dtype="float64", rng=rng)
    narrow = sp.random_array((40, 90), density=0.4, format="csr", dtype="float64", rng=rng)
    narrow.sort_indices()
    columns = np.sort(rng.choice(wide, 90, replace=False)).astype("int32")
    B = sp.csr_array((narrow.data, columns[narrow.indices], narrow.indptr), shape=(40, wide))
    found, wanted = sparsetir.matmul(A, B), A @ narrow
    wanted.sort_indices()
    assert np.array_equal(found.indptr, wanted.indptr)
    assert np.array_equal(found.indices, columns[wanted.indices])
    assert np.allclose(found.data, wanted.data)


@pytest.mark.slow
def test_coordinates_that_64_bits_cannot_count_are_an_error() -> None:
    text = re.sub(r"(T\.(?:dense_fixed|sparse_\w+)\(.*)\)\n", r'\1, "int64")\n', PROGRAMS["a tensor times a matrix"])
    kernel = sparsetir.build(sparsetir.parse(text.replace("T.int32", "T.int64")), {"kind": "llvm", "opt-level": 0})
    for n, q in ((2**32, 2**32), (2**62, 2), (2**62, 3), (2**31, 2**31)):
        A = CooTensor(np.array([[0, 1], [n - 1, 0], [0, 1]]), np.ones(2, "float32"), (2, n, 2))
        B = sp.csr_array((np.ones(2, "float32"), np.array([q - 1, 0]), np.array([0, 1, 2])), shape=(2, q))
        if n * q < 2**63:
            assert kernel(A=A, B=B).coords.tolist() == [[0, 1], [n - 1, 0], [q - 1, 0]]
            continue
        with pytest.raises(ArgumentError, match=f"{n} x {q} coordinates, more than 64 bits can count"):
            kernel(A=A, B=B)


def test_merged_rows_take_no_accumulators() -> None:
    wide = 10_000_000
    A, B = (sp.csr_array((np.ones(3, "float32"), ([0, 1, 1], [0, n, wide - 1])), shape=(2, wide)) for n in (5, 7))
    kernel = sparsetir.build(sparsetir.ops.add())
    args = kernel.prepare((), {"A": A, "B": B})
    assert kernel.take(kernel.begin(args)).nbytes < 4096
    assert (kernel(A=A, B=B) != A + B).nnz == 0


def test_large_results_are_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    A = sp.random_array((80, 80), density=0.3, format="csr", dtype="float64", rng=np.random.default_rng(0))
    expected = sparsetir.matmul(A, A)
    monkeypatch.setattr(assembled, "ROOMY_BYTES", 0)
    found = sparsetir.matmul(A, A)
    assert np.array_equal(found.indices, expected.indices)
    assert np.array_equal(found.data, expected.data)


def test_where_no_addresses_are_left_results_are_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise MemoryError

    A = sp.random_array((90, 90), density=0.3, format="csr", dtype="float64", rng=np.random.default_rng(0))
    expected = sparsetir.matmul(A, A)
    monkeypatch.setattr(assembled.SparseOutputKernel, "room", refused)
    found = sparsetir.matmul(A, A)
    assert np.array_equal(found.indices, expected.indices)
    assert np.array_equal(found.data, expected.data)


@pytest.mark.parametrize("step", [1, 4096, 10_000, 1 << 24])
@pytest.mark.parametrize("width", [(), (3,)])
def test_gaps_are_closed_in_place(step: int, width: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that overlap where they belong, and parts that do not, in steps of less than a page and of more."""
    monkeypatch.setattr(workspace, "STEP_BYTES", step)
    array = np.arange(9000 * math.prod(width), dtype="int32").reshape(9000, *width).copy()
    parts = [(0, 0, 1100), (1500, 1100, 2000), (8000, 3100, 1000)]
    expected = np.concatenate([array[source : source + count] for source, _, count in parts])
    assert np.array_equal(workspace.closed(array, parts), expected)


def repeated(rng: np.random.Generator, rows: int, columns: int) -> sp.csr_array:
    """A matrix whose rows are not sorted and hold entries with the same coordinates."""
    counts = rng.integers(0, 2 * columns + 1, rows) if columns else np.zeros(rows, int)
    indptr = np.append(0, np.cumsum(counts)).astype("int32")
    indices = rng.integers(0, max(columns, 1), indptr[-1]).astype("int32")
    made = sp.csr_array((rng.integers(1, 5, indptr[-1]).astype("float32"), indices, indptr), shape=(rows, columns))
    made.has_canonical_format = False
    return made


@pytest.mark.parametrize("is_read", [False, True], ids=["only the pattern", "values, too"])
def test_entries_meet_each_one_of_a_mask_whose_coordinates_repeat(is_read: bool) -> None:
    text = PROGRAMS["two iterations over the same rows"].partition('    with T.sp_iter([I, K, J], "SRS", "mm")')[0]
    for axis in ("(I, (p, za), (pa, ja)", "(KD, (n, zb), (pb, jb)", "(I, (n, zd), (pd, jd)"):
        text = text.replace(axis, f"{axis}, sorted=False, unique=False")
    text += '    with T.sp_iter([I, K, T.intersect(T.attach(JB, K), JD)], "SRS", "mm") as [i, k, j]:\n'
    text += "        C[i, j] = C[i, j] + A[i, k] * B[k, j]" + " * D[i, j]" * is_read + "\n"
    kernel, rng = sparsetir.build(sparsetir.parse(text)), np.random.default_rng(4)
    for m, p, n in [(1, 1, 1), (3, 4, 5), (20, 9, 30), (4, 0, 3), (2, 3, 0)]:
        A, B, D = repeated(rng, m, p), repeated(rng, p, n), repeated(rng, m, n)
        often = np.zeros((m, n))
        np.add.at(often, (np.repeat(np.arange(m), np.diff(D.indptr)), D.indices), D.data if is_read else 1)
        found, wanted = kernel(A=A, B=B, D=D), (A.toarray() @ B.toarray()) * often
        np.testing.assert_array_equal(found.toarray(), wanted)
        assert found.nnz == np.count_nonzero(wanted)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_mask_is_that_of_its_iteration_alone(is_first: bool) -> None:
    """Another iteration over the same result stores where the mask has nothing."""
    head, first, rest = PROGRAMS["two iterations over the same rows"].partition("    with T.sp_iter([I, K, J]")
    product, plus = (first + rest).split("    with T.sp_iter([I, JD]")
    masked = product.replace("[I, K, J]", "[I, K, T.intersect(T.attach(JB, K), JD)]")
    plain = '    with T.sp_iter([I, K], "SS", "plus") as [i, k]:\n        C[i, k] = C[i, k] + A[i, k]\n'
    assert "D[i, j]" in plus
    kernel = sparsetir.build(sparsetir.parse(head + (masked + plain if is_first else plain + masked)))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        A, B, D = (matrix(rng, 6, 6, density) for density in (0.4, 0.5, 0.2))
        A.data += 1
        D.data[:] = 1
        np.testing.assert_array_equal(kernel(A=A, B=B, D=D).toarray(), (A + (A @ B).multiply(D)).toarray())


@pytest.mark.slow
def test_results_over_the_same_pattern_share_no_memory() -> None:
    text = PROGRAMS["a union of three axes"].replace("c: T.handle", "c: T.handle, e: T.handle", 1)
    both = text.rstrip().replace(
        "    with T.sp_iter", '    E = T.match_sparse_buffer(e, (I, J), "float32")\n    with T.sp_iter'
    )
    kernel = sparsetir.build(sparsetir.parse(both + "\n        E[i, j] = A[i, j] * 2\n"))
    arguments = draw_arguments("a union of three axes", (5, 6, 0, 0), 0.5)
    c, e = kernel(**arguments)
    assert np.array_equal(c.indices, e.indices)
    assert not np.shares_memory(c.indices, e.indices)
    assert not np.shares_memory(c.indptr, e.indptr)
    assert np.array_equal(e.toarray(), arguments["A"].toarray() * 2)


def test_a_computed_pattern_cannot_be_passed() -> None:
    A = sp.eye_array(3, format="csr", dtype="float32")
    kernel = sparsetir.build(sparsetir.ops.spgemm())
    with pytest.raises(ArgumentTypeError, match="the pattern of C is computed: leave it out and take the result"):
        kernel(A=A, B=A, C=A)
    with pytest.raises(ArgumentTypeError, match=r"missing .*B"):
        kernel(A=A)
    with pytest.raises(ArgumentTypeError, match=r"its schedule is a sparsetir.Accumulators, got Choices"):
        sparsetir.build(sparsetir.ops.spgemm(), schedule=sparsetir.Choices())
    with pytest.raises(VerifyError, match="stage: expected 1, 2 or 3"):
        kernel.script(4)


def test_a_result_is_read_where_it_is_set_alone() -> None:
    text = PROGRAMS["least sums"].replace("C[i, j] = T.min(C[i, j],", "C[i, j] = T.min(C[i, j + 1],")
    with pytest.raises((LoweringError, ScriptError, VerifyError), match="C"):
        sparsetir.build(sparsetir.parse(text))


def test_functions_are_shown() -> None:
    kernel = sparsetir.build(sparsetir.ops.spgemm())
    assert "T.sparse_assembled(I, n" in kernel.script()
    assert "spgemm_numeric" in kernel.script(3)
    assert repr(kernel) == "Kernel spgemm(A: float32[m, p] csr, B: float32[p, n] csr) -> C: float32[m, n] csr"
    assert "spgemm_symbolic" in kernel.source("asm")
    with pytest.raises(ArgumentTypeError, match=r"as in kernel\(A=..., B=...\), got 2 without names"):
        kernel(1, 2)


def test_kernels_are_bound_copied_and_written(tmp_path: Path) -> None:
    A = sp.random_array((9, 9), density=0.4, format="csr", dtype="float32", rng=np.random.default_rng(0))
    kernel = sparsetir.build(sparsetir.ops.spgemm())
    expected = kernel(A=A, B=A).toarray()
    others = [copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel)), sparsetir.load(kernel.save(tmp_path / "k"))]
    for other in others:
        assert np.array_equal(other(A=A, B=A).toarray(), expected)
    bound = kernel.bind(B=A)
    assert np.array_equal(bound(A=A).toarray(), expected)
    assert kernel.time(A=A, B=A, seconds=0.001).median > 0
    with pytest.raises(ArgumentTypeError, match="B is fixed in this kernel: leave it out"):
        bound(A=A, B=A)
    with pytest.raises(ArgumentTypeError, match="this kernel has no argument 'X'; it takes the buffers A, B, indptr_a"):
        kernel.bind(X=A)


@pytest.mark.slow
def test_elements_begin_with_one_number() -> None:
    text = PROGRAMS["two iterations over the same rows"].replace(
        '"mm") as [i, k, j]:\n', '"mm") as [i, k, j]:\n        with T.init():\n            C[i, j] = T.float32(3)\n'
    )
    kernel = assembled_kernel(sparsetir.parse(text))
    arguments = draw_arguments("two iterations over the same rows", (4, 5, 6, 3), 0.4)
    args = kernel.prepare((), arguments)
    wanted = sparsetir.interpret(sparsetir.parse(text), {**args.arrays, **args.sizes})
    assert np.array_equal(kernel(**arguments).data, wanted["c"])
    other = text.replace(
        '"plus") as [i, j]:\n', '"plus") as [i, j]:\n        with T.init():\n            C[i, j] = T.float32(4)\n'
    )
    with pytest.raises(LoweringError, match=r"C begins with .*3.* in one iteration and with .*4.* in another"):
        sparsetir.build(sparsetir.parse(other))


MIXED = """
@T.prim_func
def f(a: T.handle, b: T.handle, d: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
      dp: T.handle, di: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, n, (ap, ai))
    JB = T.sparse_variable(I, n, (bp, bi))
    JD = T.sparse_variable(I, n, (dp, di))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, JA))
    B = T.match_sparse_buffer(b, (I, JB))
    D = T.match_sparse_buffer(d, (I, JD))
    C = T.match_sparse_buffer(c, (I, J))
    with T.sp_iter([I, J], "SS", "mixed") as [i, j]:
        C[i, j] = A[i, j] * (B[i, j] + D[i, j])
"""


def test_a_mix_of_unions_and_intersections_is_refused_in_words() -> None:
    message = "j of iteration mixed would run over unions and intersections at once: list one axis"
    with pytest.raises(LoweringError, match=message):
        sparsetir.build(sparsetir.parse(MIXED))
    over_one = sparsetir.build(sparsetir.parse(MIXED.replace("[I, J]", "[I, JA]")))
    A, B, D = (sp.random_array((9, 7), density=0.3, format="csr", dtype="float32", rng=n) for n in range(3))
    C = over_one(A=A, B=B, D=D)
    assert np.array_equal(C.indices, A.indices)
    assert np.allclose(C.toarray(), A.toarray() * (B + D).toarray())


DENSE_TOO = """
@T.prim_func
def f(a: T.handle, c: T.handle, y: T.handle, ap: T.handle, ai: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, n, (ap, ai))
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (I, K))
    C = T.match_sparse_buffer(c, (I, J))
    Y = T.match_sparse_buffer(y, (I,))
    with T.sp_iter([I, K], "SS", "both") as [i, k]:
        C[i, k] = A[i, k]
        Y[i] = Y[i] + A[i, k]
"""


@pytest.mark.parametrize("scratch", [False, True])
def test_nothing_is_stored_beside_a_computed_pattern(scratch: bool) -> None:
    """Rows that are counted first are visited twice, and several threads visit them."""
    text = DENSE_TOO
    if scratch:
        text = text.replace("match_sparse_buffer(y, (I,))", "alloc_sparse_buffer((I,))").replace(" y: T.handle,", "")
    with pytest.raises(LoweringError, match="computes the pattern of C stores nothing else, got Y: write a program"):
        sparsetir.build(sparsetir.parse(text))


def test_variables_of_a_body_are_no_results() -> None:
    text = DENSE_TOO.replace("    Y = T.match_sparse_buffer(y, (I,))\n", "").replace(" y: T.handle,", "")
    text = text.replace("        Y[i] = Y[i] + A[i, k]\n", "")
    text = text.replace("C[i, k] = A[i, k]", "v = A[i, k]\n        C[i, k] = v * v")
    A = sp.random_array((9, 7), density=0.3, format="csr", dtype="float32", rng=0)
    for schedule in (None, Accumulators(counted=True)):
        C = sparsetir.build(sparsetir.parse(text), schedule=schedule)(A=A)
        assert np.array_equal(C.toarray(), A.toarray() ** 2)
    with pytest.raises(ScriptError, match="nor is it looked at what v was set to: write that in its place"):
        sparsetir.parse(text.replace("[I, K], ", "[I, J], "))


def test_none_of_a_block_is_the_largest() -> None:
    with pytest.raises(LoweringError, match="C has blocks of elements, of which none is the largest"):
        assembled_kernel(
            sparsetir.parse(PROGRAMS["a product of blocks"]), None, AccumulatorOptions(select=True)
        ).assembly.axes


def test_functions_are_compiled_when_they_are_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted: list[tuple[str, ...]] = []

    def noted(func: Any, target: Any, schedule: Any, make: Any) -> Any:
        wanted.append(FIRST if schedule is None else schedule.functions)
        return compile_cached(func, target, schedule, make)

    A = sp.random_array((30, 30), density=0.3, format="csr", dtype="float32", rng=np.random.default_rng(0))
    kernel = SparseOutputKernel(assembled_kernel(sparsetir.parse(PROGRAMS["least sums"])).compiled)
    compile_cached = functions.compile_cached
    monkeypatch.setattr(functions, "compile_cached", noted)
    first = kernel(A=A, B=A)
    assert not wanted
    monkeypatch.setattr(assembled, "ROOMY_BYTES", 0)
    assert (kernel(A=A, B=A) != first).nnz == 0
    assert [names for names in wanted if names != FIRST] == [("symbolic",)]
    again = sparsetir.load(kernel.save(tmp_path / "least.kernel"))
    assert (again(A=A, B=A) != first).nnz == 0
    assert all(name in kernel.script(3) for name in ("_bound", "_symbolic", "_numeric", "_values"))
