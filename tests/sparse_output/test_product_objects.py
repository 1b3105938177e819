# SPDX-License-Identifier: Apache-2.0
"""Products of sparse matrices as objects: their classes, memory and bits, and whatever a matrix may be stored like."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import on
from product_oracle import DTYPES
from sparsetir import ops
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.sparse_output import fast_paths
from sparsetir.sparse_output import kernel as assembled
from sparsetir.sparse_output.fast_paths import CompressedRows, SmallCalls
from sparsetir.workloads import suite

# --- classes ----------------------------------------------------------------------------------------------


def same(found: Any, expected: Any) -> None:
    """Entry by entry, however both are stored."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.toarray(), expected.toarray(), rtol=1e-5, atol=1e-6)


def finite(m: int, n: int, seed: int = 0, dtype: str = "float32") -> sp.csr_array:
    """A canonical matrix without zeros."""
    return sp.random_array((m, n), density=0.3, format="csr", dtype=dtype, rng=np.random.default_rng(seed))


TABLE = sparsetir.Accumulators(kind="table")
FORMATS = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_the_class_of_the_first_comes_back(kind: str) -> None:
    """In its format; blocks are sorted, too."""
    A, B, other = finite(8, 30), finite(30, 8, 1), finite(8, 30, 2)
    blocks = {"bsr": {"blocksize": (2, 3)}}
    for format in FORMATS:
        given = getattr(sp, f"{format}_{kind}")(A, **blocks.get(format, {}))
        with on(format):
            for found, expected in ((sparsetir.matmul(given, B), A @ B), (sparsetir.add(given, other), A + other)):
                assert type(found) is type(given)
                same(found, expected)
                for begin, end in itertools.pairwise(found.indptr if format == "bsr" else ()):
                    assert np.all(np.diff(found.indices[begin:end]) > 0)
    for format in FORMATS:
        with on(("second", format)):
            found = sparsetir.matmul(A, getattr(sp, f"{format}_{kind}")(B))
            assert type(found) is sp.csr_array
            same(found, A @ B)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_classes_of_scipy_hold_halves(dtype: str) -> None:
    """scipy has no such matrix of its own, but a torch tensor decides the common dtype."""
    torch = pytest.importorskip("torch")
    A, B = sp.csr_array(np.round(finite(8, 6) * 8).astype("int8")), finite(8, 6, 1)
    other = torch.tensor(np.round(B.toarray() * 4)).to(getattr(torch, dtype)).to_sparse_csr()
    expected = A.toarray() + np.round(B.toarray() * 4)
    for format, kind in itertools.product(FORMATS, ("array", "matrix")):
        given = getattr(sp, f"{format}_{kind}")(A, **({"blocksize": (2, 3)} if format == "bsr" else {}))
        with on((format, kind)):
            found = sparsetir.add(given, other)
            assert type(found) is (getattr(sp, f"csr_{kind}") if format in ("lil", "dok") else type(given))
            assert str(found.dtype) == dtype
            found.data = found.data.astype("float32")
            np.testing.assert_array_equal(found.toarray(), expected)


@pytest.mark.slow
def test_torch_comes_back_for_torch() -> None:
    torch = pytest.importorskip("torch")
    A, B = finite(9, 7), finite(7, 8, 1)
    dense = {name: torch.from_numpy(M.toarray()) for name, M in (("A", A), ("B", B))}
    makers = {"csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc, "coo": torch.Tensor.to_sparse}
    for (name, first), (other, second) in itertools.product(makers.items(), makers.items()):
        with on((name, other)):
            found = sparsetir.matmul(first(dense["A"]), second(dense["B"]))
            assert found.layout == first(dense["A"]).layout
            assert found.dtype == torch.float32
            np.testing.assert_allclose(found.to_dense().numpy(), (A @ B).toarray(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_tensors_of_halves(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    dense = torch.tensor([[1.0, 0, 3], [0, 0, 0], [2, 3, 0]])
    A = dense.to(getattr(torch, dtype)).to_sparse_csr()
    expected = {
        "matmul": dense @ dense,
        "top": torch.tensor([[7.0, 9, 0], [0, 0, 0], [0, 0, 6]]),
        "add": 2 * dense,
        "multiply": dense * dense,
        "maximum": dense,
    }
    for name, value in expected.items():
        with on(name):
            found = sparsetir.matmul(A, A, top=2, threshold=2) if name == "top" else getattr(sparsetir, name)(A, A)
            assert found.dtype == A.dtype
            np.testing.assert_array_equal(found.to_dense().float(), value)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_halves_are_rounded_once(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind, rng, every = getattr(torch, dtype), np.random.default_rng(3), torch.ones(4, 90).to_sparse_csr()
    few = torch.sparse_csr_tensor(torch.arange(5), torch.tensor([3, 0, 5, 8]), torch.ones(4), (4, 90))
    for count in (3, 30, 300):  # a row of each length is collected in another way
        left, right = (torch.tensor(rng.random(shape) + 0.5).to(kind) for shape in ((4, count), (count, 90)))
        A, B, exact = left.to_sparse_csr(), right.to_sparse_csr(), left.double() @ right.double()
        plan = sparsetir.matmul_plan(A, B)
        found = {
            "whole": sparsetir.matmul(A, B),
            "masked": sparsetir.matmul(A, B, mask=every),
            "outside": sparsetir.matmul(A, B, mask=few, complement=True),
            "top": sparsetir.matmul(A, B, top=90),
            "plan": plan(A, B),
            "table": sparsetir.build(sparsetir.ops.spgemm(dtype, idtype="int64"), schedule=TABLE)(A=A, B=B),
        }
        for name, C in found.items():
            with on((count, name)):
                assert C.dtype == kind
                held = C.to_dense()
                wanted = torch.where(few.to_dense() > 0, 0, exact) if name == "outside" else exact
                assert torch.all((held.double() - wanted).abs() <= 0.52 * torch.finfo(kind).eps * wanted)


@pytest.mark.slow
def test_what_is_not_finite_among_the_largest() -> None:
    A = sp.csr_array(np.float32([[1, -np.inf, np.nan], [np.inf, 3, 4]]))
    eye = sp.eye_array(2, format="csr", dtype="float32")
    kept = sparsetir.matmul(eye, A, top=3)
    np.testing.assert_array_equal(kept.data, np.float32([1, -np.inf, np.inf, 3, 4]))
    np.testing.assert_array_equal(sparsetir.matmul(eye, A, top=1).toarray(), [[1, 0, 0], [np.inf, 0, 0]])


@pytest.mark.slow
def test_a_limit_that_nothing_exceeds_is_an_error() -> None:
    A = sp.csr_array(np.ones((2, 2), "uint8"))
    assert sparsetir.matmul(A, A, threshold=1.5).nnz == 4
    assert sparsetir.matmul(A, A, threshold=2).nnz == 0
    assert sparsetir.matmul(A, A, threshold=-7).nnz == 4
    with pytest.raises(ArgumentError, match="less than the largest uint8, 255, got 255"):
        sparsetir.matmul(A, A, threshold=255)


@pytest.mark.parametrize("program", ["add", "scaled_add"])
def test_no_argument_of_a_sum_is_passed_over(program: str) -> None:
    A = sp.csr_array(np.eye(3, dtype="float32"))
    kernel, given = sparsetir.build(getattr(ops, program)()), {"A": A, "B": A}
    given |= {"alpha": 1.0, "beta": 1.0} if program == "scaled_add" else {}
    assert kernel(**given, n=3).nnz == kernel(**given).nnz == 3
    with pytest.raises(ArgumentError, match="n is"):
        kernel(**given, n=4)
    for name, value in (("C", A), ("gamma", 2.0)):
        with pytest.raises(ArgumentTypeError, match=name):
            kernel(**given, **{name: value})


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_beyond_int64_choose_entries(wide: bool) -> None:
    """As many entries as no row has, and limits in the upper half of uint64; also of calls that are shared out."""
    A = sp.csr_array(np.array([[2**63, 1], [0, 2**63 + 7]], "uint64"))
    eye = sp.eye_array(2, 2**16 + 1 if wide else 2, format="csr", dtype="uint64")
    assert sparsetir.matmul(A, eye, top=2**70).nnz == 3
    for above in (2**63 - 1, 2**63, 2**63 + 6):
        assert sparsetir.matmul(A, eye, threshold=above).data.tolist() == A.data[A.data > above].tolist()


@pytest.mark.parametrize("layout", ["bsr", "bsc"])
def test_torch_tensors_of_blocks(layout: str) -> None:
    torch = pytest.importorskip("torch")
    dense = torch.arange(36.0).reshape(6, 6) * (torch.arange(36).reshape(6, 6) % 3 > 0)
    blocks = getattr(torch.Tensor, f"to_sparse_{layout}")(dense, (2, 3))
    found = sparsetir.matmul(blocks, blocks)
    assert found.layout == torch.sparse_csr
    np.testing.assert_array_equal(found.to_dense(), dense @ dense)


def test_tensors_of_this_package_come_back() -> None:
    A, B = finite(9, 7), finite(7, 8, 1)
    coords = np.stack(A.tocoo().coords).astype("int32")
    coo = sparsetir.CooTensor(coords, A.data, A.shape)
    for first in (coo, sparsetir.SparseTensor.from_any(A), sparsetir.SparseTensor.from_any(A, "ell")):
        for second in (B, sparsetir.SparseTensor.from_any(B, "csc")):
            found = sparsetir.matmul(first, second)
            assert type(found) is type(first)
            np.testing.assert_allclose(found.to_dense(), (A @ B).toarray(), rtol=1e-5, atol=1e-6)
    same(sparsetir.matmul(A, sparsetir.SparseTensor.from_any(B)), A @ B)


def test_torch_tensors_that_are_not_coalesced() -> None:
    torch = pytest.importorskip("torch")
    at = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 2]])
    A = torch.sparse_coo_tensor(at, torch.tensor([1.0, 2.0, 3.0, 4.0]), (2, 3))
    found = sparsetir.matmul(A, A.transpose(0, 1))
    np.testing.assert_array_equal(found.to_dense().numpy(), [[20, 0], [0, 16]])


@pytest.mark.slow
def test_dtypes_are_promoted_as_by_numpy() -> None:
    for one, other in itertools.combinations_with_replacement(DTYPES, 2):
        with on((one, other)):
            A, B = (sp.csr_array(np.array([[1, 0], [1, 1]], dtype)) for dtype in (one, other))
            found = sparsetir.matmul(A, B)
            assert found.dtype == np.result_type(one, other)
            same(found, A @ B)


# --- memory -----------------------------------------------------------------------------------------------


def arrays(A: Any) -> list[np.ndarray]:
    return [A.data, A.indices, A.indptr]


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda A, B: sparsetir.matmul(A, B),
    "masked": lambda A, B: sparsetir.matmul(A, B, mask=B),
    "complement": lambda A, B: sparsetir.matmul(A, B, mask=B, complement=True),
    "top": lambda A, B: sparsetir.matmul(A, B, top=2),
    "add": lambda A, B: sparsetir.add(A, B),
    "subtract": lambda A, B: sparsetir.subtract(A, B),
    "multiply": lambda A, B: sparsetir.multiply(A, B),
    "maximum": lambda A, B: sparsetir.maximum(A, B),
    "rap": lambda A, B: sparsetir.rap(A, B, A),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_have_memory_of_their_own(name: str) -> None:
    eye, none, some = (
        sp.eye_array(9, format="csr", dtype="float32"),
        sp.csr_array((9, 9), dtype="float32"),
        finite(9, 9),
    )
    for A, B in itertools.product((some, eye, none), repeat=2):
        before = [[part.copy() for part in arrays(M)] for M in (A, B)]
        first, second = CALLS[name](A, B), CALLS[name](A, B)
        held = [*arrays(first), *arrays(second), *arrays(A), *(arrays(B) if B is not A else [])]
        assert not any(np.shares_memory(x, y) for x, y in itertools.combinations(held, 2))
        for kept, M in zip(before, (A, B), strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(kept, arrays(M), strict=True))
        for part in arrays(first):
            part[...] = 0
        assert [part.tobytes() for part in arrays(CALLS[name](A, B))] == [part.tobytes() for part in arrays(second)]


def test_a_plan_gives_arrays_of_their_own() -> None:
    A = finite(9, 9)
    plan = sparsetir.matmul_plan(A, A)
    first, second = plan(A, A), plan(A, A)
    held = [*arrays(first), *arrays(second), *arrays(A)]
    assert not any(np.shares_memory(x, y) for x, y in itertools.combinations(held, 2))
    first.data[...] = first.indices[...] = first.indptr[...] = 0
    same(second, A @ A)
    same(plan(A, A), A @ A)


def test_a_plan_keeps_no_values_of_its_operands() -> None:
    A = sp.random_array((9, 9), density=0.4, format="csr", rng=np.random.default_rng(3))
    plan, other, held = sparsetir.matmul_plan(A, A), A.copy(), weakref.ref(A.data)
    plan(A, A)
    del A
    gc.collect()
    assert held() is None
    same(plan(other, other), other @ other)


def test_a_plan_is_for_one_pattern() -> None:
    A, B = finite(9, 9), finite(9, 9, 1)
    plan = sparsetir.matmul_plan(A, A)
    for other in ((A, B), (B, A), (B, B), (A[:8], A), (A, A[:, :8])):
        with pytest.raises(ArgumentError, match="pattern"):
            plan(*other)
    same(plan(A, A), A @ A)


PEAK = """
import numpy as np, scipy.sparse as sp, sparsetir
from sparsetir.utils import memory
rng, n = np.random.default_rng(0), 150_000
columns, indptr = rng.integers(0, n, 8 * n, "int32"), np.arange(0, 8 * n + 1, 8, "int32")
A = sp.csr_array((rng.standard_normal(8 * n, "float32"), columns, indptr), (n, n))
A.sort_indices()
sparsetir.matmul(A[:100], A)
held = lambda M: M.data.nbytes + M.indices.nbytes + M.indptr.nbytes
C = sparsetir.matmul(A, A)
size = held(A) + held(C)
entries = C.nnz
del C
added = memory.added(lambda: sparsetir.matmul(A, A))
print("none" if added is None else (held(A) + added) / size, entries)
"""


@pytest.mark.slow
def test_the_peak_is_little_more_than_operands_and_result() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, count = done.stdout.split()
    assert int(count) > 9_000_000
    if peak == "none":
        pytest.skip("the system does not tell the peak")
    assert float(peak) <= 1.3


# --- threads ----------------------------------------------------------------------------------------------


def skewed(n: int, seed: int) -> sp.csr_array:
    """A few rows and columns have most of the entries."""
    rng = np.random.default_rng(seed)
    rows, columns = ((n * rng.random(16 * n) ** 3).astype(int) for _ in range(2))
    return sp.csr_array((rng.standard_normal(16 * n, "float32"), (rows, columns)), shape=(n, n))


@pytest.mark.parametrize("name", CALLS)
def test_bits_do_not_depend_on_threads(name: str) -> None:
    A, B = skewed(600, 0), skewed(600, 1)
    before, found = sparsetir.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 1):
            sparsetir.set_num_threads(threads)
            found.append([part.tobytes() for part in arrays(CALLS[name](A, B))])
    finally:
        sparsetir.set_num_threads(before)
    assert all(other == found[0] for other in found[1:])


def test_threads_of_python_do_not_meet() -> None:
    matrices = [suite.generate(name, 3000) for name in ("rmat", "uniform", "giant_row")]
    expected = [sparsetir.matmul(A, A).data.tobytes() for A in matrices]

    def work(first: int) -> list[bool]:
        turns = [(first + n) % len(matrices) for n in range(12)]
        return [sparsetir.matmul(matrices[n], matrices[n]).data.tobytes() == expected[n] for n in turns]

    with ThreadPoolExecutor(4) as pool:
        assert all(itertools.chain.from_iterable(pool.map(work, range(4))))


# --- storage that scipy allows ----------------------------------------------------------------------------


def rebuilt(A: sp.csr_array, **parts: np.ndarray) -> sp.csr_array:
    found = A.copy()
    for name, part in parts.items():
        setattr(found, name, part)
    return found


def test_any_storage_of_scipy() -> None:
    A, B = finite(9, 7), finite(7, 8, 1)
    fixed = A.copy()
    for part in arrays(fixed):
        part.setflags(write=False)
    spare = {"data": np.append(A.data, np.float32([9, 9])), "indices": np.append(A.indices, np.int32([99, -5]))}
    stored = {
        "long row pointers": rebuilt(A, indptr=A.indptr.astype("int64")),
        "long indices": rebuilt(A, indices=A.indices.astype("int64")),
        "spare room": rebuilt(A, **spare),
        "strided": rebuilt(A, data=np.repeat(A.data, 2)[::2]),
        "other byte order": rebuilt(A, data=A.data.astype(">f4")),
        "read only": fixed,
    }
    for title, given in stored.items():
        with on(title):
            same(sparsetir.matmul(given, B), A @ B)
            same(sparsetir.matmul(B.T.tocsr(), sp.csr_array(given.T)), (A @ B).T)


BROKEN: dict[str, Callable[[sp.csr_array], dict[str, np.ndarray]]] = {
    "after the last column": lambda A: {"indices": np.where(np.arange(A.nnz) == 3, A.shape[1], A.indices)},
    "before the first column": lambda A: {"indices": np.where(np.arange(A.nnz) == 3, -1, A.indices)},
    "far": lambda A: {"indices": np.where(np.arange(A.nnz) == 3, 2**31 - 1, A.indices)},
    "row pointers that decrease": lambda A: {"indptr": np.where(np.arange(A.shape[0] + 1) == 2, A.nnz, A.indptr)},
    "row pointers past the end": lambda A: {"indptr": A.indptr + (np.arange(A.shape[0] + 1) == A.shape[0])},
}


@pytest.mark.parametrize("name", CALLS)
def test_broken_structures_are_errors(name: str) -> None:
    A = finite(9, 9)
    CALLS[name](A, A)
    for (title, parts), place in itertools.product(BROKEN.items(), (0, 1)):
        with on((title, place)):
            broken = rebuilt(A, **{part: array.astype("int32") for part, array in parts(A).items()})
            with pytest.raises(StructureError):
                CALLS[name](*((broken, A) if place == 0 else (A, broken)))


# --- matrices that are stored as the programs read them ------------------------------------------------------


def _reserved(A):
    made = A.copy()
    made.data, made.indices = np.append(made.data, np.float32(7)), np.append(made.indices, np.int32(0))
    return made


def _changed(part, change):
    def make(A):
        made = A.copy()
        array = getattr(made, part).copy()
        change(array)
        setattr(made, part, array)
        return made

    return make


def _read_only(A):
    made = A.copy()
    made.data.flags.writeable = False
    return made


def _set(at, value):
    return lambda array: array.__setitem__(at, value)


STORED = {
    "as it is": lambda A: A,
    "a matrix": sp.csr_matrix,
    "room at the end": _reserved,
    "unsorted": _changed("indices", lambda i: i.__setitem__(slice(None), i[::-1].copy())),
    "out of range": _changed("indices", _set(1, 99)),
    "negative": _changed("indices", _set(0, -1)),
    "twice": _changed("indices", lambda i: i.__setitem__(1, i[0])),
    "decreasing pointers": _changed("indptr", _set(2, 0)),
    "pointers beyond the end": _changed("indptr", _set(-1, 10**6)),
    "strided values": lambda A: sp.csr_array((np.repeat(A.data, 2)[::2], A.indices, A.indptr), A.shape, copy=False),
    "read-only": _read_only,
    "wide indices": lambda A: sp.csr_array((A.data, A.indices.astype("int64"), A.indptr.astype("int64")), A.shape),
    "doubles": lambda A: A.astype("float64"),
    "columns": lambda A: A.tocsc(),
    "fewer rows": lambda A: A[:3],
    "no entries": lambda A: sp.csr_array(A.shape, dtype=A.dtype),
}


def outcome(kernel, arguments):
    try:
        found = kernel(**arguments)
    except Exception as error:
        return type(error), str(error)
    return type(found), found.shape, found.dtype, *(a.tobytes() for a in (found.indptr, found.indices, found.data))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["add", "spgemm", "scaled_add"])
def test_matrices_are_bound_alike_in_both_ways(program, monkeypatch):
    A = sp.random_array((6, 6), density=0.6, format="csr", dtype="float32", rng=np.random.default_rng(3))
    A.sort_indices()
    kernel, numbers = sparsetir.build(getattr(sparsetir.ops, program)()), {}
    if program == "scaled_add":
        numbers = {"alpha": 2.0, "beta": 3}
    calls = [{"A": make(A), "B": other(A), **numbers} for make in STORED.values() for other in STORED.values()]
    quick = [outcome(kernel, call) for call in calls]
    rows = CompressedRows(kernel.signature)
    assert sum(rows.bind(call) is not None for call in calls) > 5
    monkeypatch.setattr(CompressedRows, "bind", lambda self, arguments, listing=None: None)
    assert [outcome(kernel, call) for call in calls] == quick


SMALL = {
    "matmul": lambda A, B: sparsetir.matmul(A, B),
    "mask": lambda A, B: sparsetir.matmul(A, A, mask=B),
    "outside of a mask": lambda A, B: sparsetir.matmul(A, A, mask=B, complement=True),
    "top": lambda A, B: sparsetir.matmul(A, B, top=2, threshold=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_small_products_are_those_of_large_ones(name, is_shared, monkeypatch):
    """Errors, too."""
    monkeypatch.setattr(fast_paths, "SHARED_WORK", -1 if is_shared else 1 << 30)
    A = sp.random_array((6, 6), density=0.6, format="csr", dtype="float32", rng=np.random.default_rng(3))
    A.sort_indices()
    call = lambda A, B: SMALL[name](A, B)  # noqa: E731
    pairs = [{"A": make(A), "B": other(A)} for make in STORED.values() for other in STORED.values()]
    made = []
    whole = SmallCalls.__call__

    def noted(*given):
        made.append(whole(*given))
        return made[-1]

    monkeypatch.setattr(SmallCalls, "__call__", noted)
    found = [outcome(call, pair) for pair in pairs]
    assert sum(result is not None for result in made) > 5
    made.clear()
    monkeypatch.setattr(fast_paths, "limits", lambda: (-1, -1))
    assert [outcome(call, pair) for pair in pairs] == found
    assert not made


@pytest.mark.slow
@pytest.mark.parametrize("selects", [False, True])
def test_kernels_that_are_called_often_compile_a_function_for_little_work(selects, monkeypatch):
    monkeypatch.setattr(assembled, "OFTEN", 3)
    kernel = sparsetir.build(ops.spgemm())
    A = sp.random_array((9, 9), density=0.4, format="csr", dtype="float32", rng=np.random.default_rng(3))
    given = {"A": A, "B": A.T.tocsr()}
    if selects:
        kernel, given = kernel.selecting(), given | {"top": 2}
    monkeypatch.setattr(kernel, "_functions", {})
    monkeypatch.setattr(kernel, "has", lambda name: name in kernel._functions)
    first = kernel(**given)
    found = [kernel(**given) for _ in range(4)]
    assert kernel.has("small")
    for C in found:
        assert type(C) is type(A)
        for name in ("data", "indices", "indptr"):
            np.testing.assert_array_equal(getattr(C, name), getattr(first, name))
    with pytest.raises(ArgumentError):
        kernel(**given, p=7)
    with pytest.raises(ArgumentTypeError):
        kernel(**given, D=A)
    with pytest.raises(ArgumentError):
        kernel(**given | {"B": A[:4]})


def test_a_plan_takes_other_classes_and_refuses_other_patterns():
    A = sp.random_array((9, 9), density=0.4, format="csr", rng=np.random.default_rng(3))
    A.sort_indices()
    plan = sparsetir.matmul_plan(A, A)
    B = A.copy()
    B.data = B.data[::-1]  # not contiguous
    same(plan(A, B), A @ B)
    found = plan(A.tocsc(), A.tocoo())
    assert type(found) is sp.csc_array
    same(found.tocsr(), A @ A)
    B = A.copy()
    B.indices[0] = (B.indices[0] + 1) % 9
    for pair, name in (((B, A), "A"), ((A, B), "B"), ((A, A[:, :8]), "B")):
        with pytest.raises(ArgumentError, match=f"{name} has another pattern|shape|columns"):
            plan(*pair)
    A.indices[:] = A.indices[:]  # the same again
    same(plan(A, A), A @ A)
    A.indices[0] = (A.indices[0] + 1) % 9
    with pytest.raises(ArgumentError, match="A has another pattern"):
        plan(A, A)


def test_products_of_few_entries_with_much_work():
    """Each entry of a column meets each of a row."""
    rng = np.random.default_rng(0)
    for n in (181, 182):
        A = sp.csr_array((rng.random(n), (np.arange(n), np.zeros(n, int))), shape=(n, 200))
        same(sparsetir.matmul(A, A.T), A @ A.T)
        same(sparsetir.matmul(A, A.T.tocsr(), top=n), A @ A.T)


# --- blocks -----------------------------------------------------------------------------------------------


def blocked(m: int, n: int, block: tuple[int, int], seed: int, dtype: str) -> sp.bsr_array:
    """Whole numbers in blocks; rows of blocks are unsorted, and hold some twice."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 4, m) if n else np.zeros(m, int)
    indptr = np.concatenate([[0], np.cumsum(count)])
    values = rng.integers(0, 2 if dtype == "bool" else 5, (indptr[-1], *block)).astype(dtype)
    made = sp.bsr_array((m * block[0], n * block[1]), blocksize=block, dtype=dtype)
    made.data, made.indices, made.indptr = values, rng.integers(0, max(n, 1), indptr[-1]).astype("int32"), indptr
    made.indptr = made.indptr.astype("int32")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_blocks(dtype: str) -> None:
    cases = [(5, 6, 7, 2, 3, 4), (40, 30, 50, 3, 3, 3), (0, 3, 2, 2, 2, 1), (4, 0, 3, 1, 2, 2)]
    for seed, (m, p, n, r, q, s) in enumerate(cases):
        A, B = blocked(m, p, (r, q), seed, dtype), blocked(p, n, (q, s), seed + 9, dtype)
        with on((dtype, m, p, n)):
            found = sparsetir.matmul(A, B)
            assert (found.format, found.blocksize, str(found.dtype)) == ("bsr", (r, s), dtype)
            assert found.has_canonical_format
            wide = "float64" if dtype == "float16" else dtype
            same(found.astype(wide), sp.csr_array(A.toarray().astype(wide)) @ sp.csr_array(B.toarray().astype(wide)))


def test_blocks_of_no_size_are_refused() -> None:
    for block in ((2, 3), (2, 0, 3), 3, (2, 3, 4.5)):
        with pytest.raises(ArgumentError, match="block is a tuple of three positive sizes"):
            sparsetir.ops.spgemm(block=block)  # type: ignore[arg-type]
    assert sparsetir.ops.spgemm(block=(2, 3, 4)) is sparsetir.ops.spgemm(block=(2.0, np.int64(3), 4))  # type: ignore[arg-type]


@pytest.mark.slow
def test_blocks_keep_their_shape() -> None:
    A, B = blocked(6, 5, (2, 3), 0, "float64"), blocked(5, 4, (3, 2), 1, "float64")
    right, left = sp.csr_array(B.T), B.T.tobsr(blocksize=(2, 3))
    square = (A.T @ A).tobsr(blocksize=(3, 3))
    for found, wanted, blocks in [
        (sparsetir.add(A, A), A + A, (2, 3)),
        (sparsetir.matmul(A, B, mask=A @ B), A @ B, (2, 2)),
        (sparsetir.rap(left, square, B), B.T @ square @ B, (2, 2)),
        (sparsetir.rap(A, B, right), A @ B @ B.T, (2, 3)),
    ]:
        assert (found.format, found.blocksize) == ("bsr", blocks)
        same(found, wanted)
    same(sparsetir.matmul(A, blocked(15, 2, (1, 2), 3, "float64")), A @ blocked(15, 2, (1, 2), 3, "float64"))
    with pytest.raises(ArgumentError, match="as many columns of A as rows of B"):
        sparsetir.matmul(A, blocked(6, 4, (3, 2), 1, "float64"))


# --- one dense operand --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_operand_may_be_dense() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    A, X = sp.random_array((5, 4), density=0.4, format="csc", dtype="float32", rng=rng), rng.random((4, 3), "float32")
    D = A.toarray()
    T, S = torch.tensor(D).to_sparse_csr(), sparsetir.SparseTensor.from_any(A)
    for found, expected in (
        (sparsetir.matmul(A, X), D @ X),
        (sparsetir.matmul(X.T, A.T), X.T @ D.T),
        (sparsetir.matmul(A, X[:, 0]), D @ X[:, 0]),
        (sparsetir.matmul(np.ones(5), A), np.ones(5) @ D),
        (sparsetir.matmul(S, X), D @ X),
        (sparsetir.matmul(T, torch.tensor(X)).numpy(), D @ X),
        (sparsetir.matmul(A[:0], X), D[:0] @ X),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    row, column = np.arange(4, dtype="float32"), np.arange(5, dtype="float32")[:, None]
    for dense in (D + 1, row, row[None], column, np.full((1, 1), 3, "float32"), np.array(2, "float32")):
        for found in (sparsetir.multiply(A, dense), sparsetir.multiply(dense, A)):
            assert type(found) is sp.csc_array
            assert found.nnz == A.nnz
            np.testing.assert_allclose(found.toarray(), D * dense, rtol=1e-6)
    found = sparsetir.multiply(T, torch.tensor(D))
    assert found.layout == torch.sparse_csr
    np.testing.assert_allclose(found.to_dense(), D * D, rtol=1e-6)
    assert sparsetir.multiply(A, np.full((5, 4), np.nan, "float32")).nnz == A.nnz


NUMBERS = (2, -1, 0, 2.5, -0.0, True, 300, np.float32(2.5), np.float64(2.5), np.int64(3), float("inf"), float("nan"))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "float32", "float64"])
def test_numbers_multiply_as_in_numpy(dtype: str) -> None:
    coords = (np.array([0, 1, 3], "int64"), np.array([2, 0, 1], "int64"))
    A = sp.coo_array((np.ones(3, dtype), coords), shape=(4, 3))
    for number in NUMBERS:
        try:
            expected = A.data * number
        except OverflowError:  # 300 is no int8, -1 no uint8
            with pytest.raises(ArgumentError, match=rf"{number} is no {dtype}: convert one of the two first"):
                sparsetir.multiply(A, number)
            continue
        for found in (sparsetir.multiply(A, number), sparsetir.multiply(number, A)):
            assert type(found) is sp.coo_array
            assert (found.dtype, found.nnz) == (expected.dtype, 3)
            np.testing.assert_array_equal(found.data, expected)


def test_numbers_multiply_in_every_class() -> None:
    torch = pytest.importorskip("torch")
    D = np.array([[0, 2], [3, 1]], "float32")
    for A in (sp.csr_array(D), sp.csc_matrix(D), sp.bsr_array(D, blocksize=(1, 2))):
        assert type(sparsetir.multiply(A, 2)) is type(A)
        np.testing.assert_array_equal(sparsetir.multiply(2.0, A).toarray(), 2 * D)
    T = sparsetir.multiply(torch.tensor(D).to_sparse_csr(), 2.0)
    assert (T.layout, T.dtype) == (torch.sparse_csr, torch.float32)
    np.testing.assert_array_equal(T.to_dense(), 2 * D)
    S = sparsetir.SparseTensor.from_any(sp.csr_array(D))
    for found in (sparsetir.multiply(S, 2.0), S * 2.0, 2.0 * S):
        assert isinstance(found, sparsetir.SparseTensor)
        assert found.dtype == "float32"
        np.testing.assert_array_equal(found.to_dense(), 2 * D)
    with pytest.raises(ArgumentTypeError, match=r"B of add is a sparse matrix"):
        sparsetir.add(sp.csr_array(D), 2.0)


def test_dense_operands_that_do_not_fit() -> None:
    A = sp.csr_array(np.eye(4, 3))
    with pytest.raises(ArgumentError, match=r"choose entries of sparse results, but an operand is dense"):
        sparsetir.matmul(A, np.ones((3, 2)), top=1)
    with pytest.raises(ArgumentError, match=r"the shapes \(4, 3\) and \(4, 2\) do not fit @"):
        sparsetir.matmul(A, np.ones((4, 2)))
    with pytest.raises(ArgumentError, match=r"an array of shape \(4,\) does not stretch to the sparse one's, \(4, 3\)"):
        sparsetir.multiply(A, np.ones(4))
    with pytest.raises(ArgumentError, match=r"an array of 3 dimensions times a sparse one of 2: use einsum"):
        sparsetir.multiply(A, np.ones((1, 4, 3)))
    with pytest.raises(ArgumentTypeError, match=r"A of matmul is a sparse matrix"):
        sparsetir.matmul(np.ones((2, 2)), np.ones((2, 2)))
    S = sparsetir.SparseTensor.from_dense(np.ones((2, 2, 2)))
    with pytest.raises(ArgumentTypeError, match=r"got SparseTensor of shape .*; operators .* take any order"):
        sparsetir.add(S, S)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bool"])
@pytest.mark.parametrize("other", [sp.csr_array, sp.csc_array, sp.csr_matrix, sp.csc_matrix], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [sp.csc_array, sp.csc_matrix], ids=lambda f: f.__name__)
def test_products_of_columns_are_those_of_rows(kind, other, dtype):
    """Class, dtype, order of entries, masks and empty operands."""
    rng = np.random.default_rng(5)
    for m, p, n in ((6, 5, 7), (1, 4, 1), (0, 3, 2), (3, 0, 4), (40, 30, 20)):
        A, B = (sp.random_array(s, density=0.4, rng=rng, format="csr") for s in ((m, p), (p, n)))
        A, B = (sp.csr_array((x * 9).astype(dtype)) for x in (A, B))
        M = sp.random_array((m, n), density=0.5, rng=rng, format="csr", dtype="float32")
        for how in ({}, {"mask": M}, {"mask": M, "complement": True}):
            expected = sparsetir.matmul(A, B, **how)
            found = sparsetir.matmul(kind(A), other(B), **how)
            assert type(found) is kind
            assert found.dtype == expected.dtype
            assert found.shape == (m, n)
            as_rows = sp.csr_array(found)
            for array in ("indptr", "indices", "data"):
                np.testing.assert_allclose(getattr(as_rows, array), getattr(expected, array), rtol=1e-5)
            assert all(np.all(np.diff(found.indices[a:b]) > 0) for a, b in itertools.pairwise(found.indptr))


def test_products_of_columns_name_the_operand_that_is_wrong():
    A = sp.random_array((6, 5), density=0.5, format="csc", dtype="float32", rng=np.random.default_rng(0))
    for name in ("A", "B"):
        for number in (-1, 9, 2**31 - 1):
            operands = {"A": A.copy(), "B": sp.csr_array(A.T, copy=True)}
            wrong = operands[name]
            wrong.indices[-1] = number
            with pytest.raises(StructureError, match=f"of {name} hold {number} at position {wrong.nnz - 1}"):
                sparsetir.matmul(**operands)


@pytest.mark.parametrize("formats", itertools.product(("csr", "csc", "coo", "bsr", "dia"), repeat=2))
def test_values_of_the_other_byte_order_are_numbers_too(formats: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    matrices = [sp.random_array((6, 6), density=0.4, rng=rng) for _ in formats]
    dense, swapped = [m.toarray() for m in matrices], []
    for matrix, kind in zip(matrices, formats, strict=True):
        other = matrix.asformat(kind).copy()
        other.data = other.data.astype(other.dtype.newbyteorder())  # astype of scipy refuses it
        swapped.append(other)
    for A, B in [swapped, (swapped[0], matrices[1]), (matrices[0], swapped[1])]:
        for function, expected in {
            sparsetir.matmul: dense[0] @ dense[1],
            sparsetir.multiply: dense[0] * dense[1],
            sparsetir.add: dense[0] + dense[1],
        }.items():
            result = function(A, B)
            assert result.dtype == np.float64
            np.testing.assert_allclose(result.toarray(), expected)


@pytest.mark.parametrize("function", ["add", "matmul", "multiply"])
def test_results_on_many_diagonals_come_in_rows(function: str) -> None:
    """A matrix by diagonals would hold a dense one; of few diagonals it stays one."""
    rng = np.random.default_rng(0)
    band = sp.diags_array([np.ones(300)] * 3, offsets=[-1, 0, 1], shape=(300, 300))
    other = sp.random_array((300, 300), density=0.01, format="csr", rng=rng)
    exact = {"add": lambda a, b: a + b, "matmul": lambda a, b: a @ b, "multiply": lambda a, b: a * b}[function]
    for second in (band, other):
        result = getattr(sparsetir, function)(band, second)
        assert result.format == ("dia" if second is band or function == "multiply" else "csr")
        np.testing.assert_allclose(result.toarray(), exact(band.toarray(), second.toarray()))
