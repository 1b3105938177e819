# SPDX-License-Identifier: Apache-2.0
"""scipy's methods on compiled kernels: results, classes and errors are scipy's, as are the methods after `restore`."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.scipy import accelerate, libraries, selection
from sparsetir.scipy.selection import TRIALS, SizeClass

CLASSES = (sp.csr_array, sp.csr_matrix, sp.csc_array, sp.csc_matrix)
OPERATIONS: dict[str, Callable[[Any, Any, Any, np.ndarray], Any]] = {
    "vector": lambda A, B, C, x: A @ x[:, 0],
    "column": lambda A, B, C, x: A @ x[:, :1],
    "dense": lambda A, B, C, x: A @ x,
    "dense in columns": lambda A, B, C, x: A @ np.asfortranarray(x),
    "dot": lambda A, B, C, x: A.dot(x),
    "dense on the left": lambda A, B, C, x: x.T @ C,
    "vector on the left": lambda A, B, C, x: x[:, 0] @ C,
    "sparse": lambda A, B, C, x: A @ C,
    "sparse of the other order": lambda A, B, C, x: A @ C.T.T.asformat("csc" if C.format == "csr" else "csr"),
    "sum": lambda A, B, C, x: A + B,
    "difference": lambda A, B, C, x: A - B,
    "difference of itself": lambda A, B, C, x: A - A,
    "elementwise": lambda A, B, C, x: A.multiply(B),
    "sum over rows": lambda A, B, C, x: A.sum(axis=0),
    "sum over columns": lambda A, B, C, x: A.sum(axis=1),
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Libraries of this module's tests, in a folder of their own."""
    folder = tmp_path_factory.mktemp("libraries")
    libraries.folder.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSETIR_CACHE", str(folder))
        yield
    libraries.folder.cache_clear()


def draw(shape: tuple[int, int], seed: int, dtype: str, make: Any = sp.csr_array) -> Any:
    rng = np.random.default_rng(seed)
    return make(sp.random_array(shape, density=0.1, format="csr", dtype=dtype, rng=rng))


def same(result: Any, expected: Any) -> None:
    """Results agree in class, shape, dtypes and, but for rounding, in values."""
    assert type(result) is type(expected)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    if sp.issparse(expected):
        assert (result.nnz, result.format) == (expected.nnz, expected.format)
        if result.format in ("csr", "csc"):
            assert (result.indices.dtype, result.indptr.dtype) == (expected.indices.dtype, expected.indptr.dtype)
            result.check_format()
        result, expected = result.toarray(), expected.toarray()
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "dtype"), [*((make, "float64") for make in CLASSES), (sp.csr_array, "float32")])
def test_results_are_those_of_scipy(make: Any, dtype: str) -> None:
    A, B, C = draw((60, 40), 0, dtype, make), draw((60, 40), 1, dtype, make), draw((40, 50), 2, dtype, make)
    x = np.random.default_rng(3).standard_normal((40, 20)).astype(dtype)
    expected = {name: call(A, B, C, x) for name, call in OPERATIONS.items()}
    with accelerate(min_entries=0, wait=True, threads=2) as acceleration:
        for _ in range(2 * TRIALS + 2):
            for name, call in OPERATIONS.items():
                same(call(A, B, C, x), expected[name])
    assert not acceleration.selection.libraries.failures
    assert {key[0] for key in acceleration.selection.libraries.loaded} == set(libraries.OPERATIONS)


@pytest.mark.slow
def test_special_operands_are_scipy_s() -> None:
    """Duplicates, unsorted rows, zeros, infinities, empty operands, other dtypes, scalars and dense sums."""
    A = sp.csr_array((np.array([1, 2, np.inf, 0.0]), [3, 0, 3, 1], [0, 3, 3, 4]), shape=(3, 4))
    D, S = sp.csr_array((np.ones(3), [1, 1, 0], [0, 2, 3, 3]), shape=(3, 4)), sp.csr_array((3, 4))
    others = [A, D, S, A.tocoo(), A.astype("float32"), A.astype("complex64"), 2.0, np.ones((3, 4))]
    with np.errstate(invalid="ignore"), accelerate(min_entries=0, wait=True) as acceleration:
        for other in others:
            for run in (lambda a, b: a.multiply(b), lambda a, b: a @ b.T, lambda a, b: a + b, lambda a, b: a - b):
                for _ in range(4):
                    outcomes = []
                    for is_plain in (True, False):
                        if is_plain:
                            acceleration.restore()
                        else:
                            acceleration.__init__(min_entries=0, wait=True)  # type: ignore[misc]
                        try:
                            outcomes.append(run(A, other))
                        except Exception as error:
                            outcomes.append((type(error), str(error)))
                    expected, result = outcomes
                    if isinstance(expected, tuple):
                        assert result == expected
                    else:
                        same(result, expected)


@pytest.mark.slow
def test_index_arrays_that_were_changed_in_place() -> None:
    """scipy remembers that rows were in order; its sums do not rely on that, nor do those of kernels."""
    A, B = draw((60, 40), 0, "float64"), draw((60, 40), 1, "float64")
    assert A.has_canonical_format
    assert B.has_canonical_format
    for start, stop in zip(A.indptr[:-1], A.indptr[1:], strict=True):
        A.indices[start:stop] = A.indices[start:stop][::-1].copy()
        A.data[start:stop] = A.data[start:stop][::-1].copy()
    expected = A.toarray() + B.toarray()
    with accelerate(min_entries=0, wait=True):
        for _ in range(2 * TRIALS + 2):
            np.testing.assert_allclose((A + B).toarray(), expected)


def test_errors_are_scipy_s() -> None:
    A = draw((60, 40), 0, "float64")
    for call in (lambda: A @ np.ones(3), lambda: A + A.T, lambda: A @ A, lambda: A.multiply(A.T)):
        with pytest.raises(ValueError, match=r"dimension|inconsistent") as expected:
            call()
        with accelerate(min_entries=0), pytest.raises(ValueError, match=r"dimension|inconsistent") as raised:
            call()
        assert str(raised.value) == str(expected.value)


def test_methods_are_put_back() -> None:
    before = {make: dict(vars(make)) for make in CLASSES}
    outer = accelerate()
    with accelerate(threads=1):
        assert sp.csr_array.__matmul__ is not before[sp.csr_array].get("__matmul__")
    assert "__matmul__" in vars(sp.csr_array)  # of the outer one
    outer.restore()
    outer.restore()
    assert {make: dict(vars(make)) for make in CLASSES} == before


def test_an_acceleration_is_entered_again() -> None:
    acceleration = accelerate()
    for _ in range(2):
        with acceleration:
            assert "__matmul__" in vars(sp.csr_array)
        assert "__matmul__" not in vars(sp.csr_array)


@pytest.mark.parametrize("make", CLASSES)
def test_methods_are_pickled_by_name(make: Any) -> None:
    with accelerate():
        pickled = {name: pickle.dumps(getattr(make, name)) for name in ("__matmul__", "__add__", "multiply")}
        assert all(pickle.loads(text) is getattr(make, name) for name, text in pickled.items())
    assert all(pickle.loads(text) is getattr(make, name) for name, text in pickled.items())


@pytest.mark.slow
@pytest.mark.parametrize("make", CLASSES)
def test_what_is_not_finite_or_empty_is_as_in_scipy(make: Any) -> None:
    A, B = draw((20, 30), 0, "float64", make), draw((20, 30), 1, "float64", make)
    wide = make(A)
    wide.indices, wide.indptr = A.indices.astype("int64"), A.indptr.astype("int64")
    nothing = make((30, 5))
    nothing.indices, nothing.indptr = nothing.indices.astype("int64"), nothing.indptr.astype("int64")
    calls = [lambda: wide @ nothing, lambda: A.multiply(B), lambda: B.multiply(A), lambda: A + B, lambda: A - B]
    for value in (np.nan, np.inf, -np.inf):
        A.data[:3] = value
        with np.errstate(invalid="ignore"):
            expected = [call() for call in calls]
            with accelerate(min_entries=0, wait=True):
                for _ in range(2 * TRIALS + 2):
                    for call, result in zip(calls, expected, strict=True):
                        same(call(), result)


@pytest.mark.parametrize("bad", [{"threads": 0}, {"threads": 1.5}, {"min_entries": -1}, {"threads": True}])
def test_bad_arguments(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(bad))}: expected an integer"):
        accelerate(**bad)
    assert "__matmul__" not in vars(sp.csr_array)


def test_the_slower_side_is_left() -> None:
    times = SizeClass()
    times.add("scipy", 1.0)
    times.add("kernel", 3.0)
    assert not times.choice  # the first call of a kernel counts for little
    times.add("kernel", 2.0)
    assert times.choice == "scipy"
    times = SizeClass()
    for _ in range(TRIALS):
        times.add("scipy", 1.0)
        times.add("kernel", 0.5)
    assert times.choice == "kernel"


def test_a_kernel_of_short_calls_may_warm_up() -> None:
    times = SizeClass()
    for _ in range(TRIALS):
        assert times.wants_scipy
        times.add("scipy", 1e-5)
    for seconds in [6e-5, 5e-5, 3e-5, 2e-5, 1e-5] + 7 * [5e-6]:
        assert not times.choice
        assert not times.wants_scipy
        times.add("kernel", seconds)
    assert times.choice == "kernel"


def test_few_calls_are_timed_while_a_kernel_cannot_be_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    A, timed = sp.csr_array(np.ones((100, 100))), []
    run = selection.TimedSelection.run
    monkeypatch.setattr(selection.TimedSelection, "run", lambda *args: (timed.append(1), run(*args))[1])
    monkeypatch.setattr(libraries.Libraries, "want", lambda *_: None)
    with accelerate(min_entries=0) as acceleration:
        for _ in range(160):
            np.testing.assert_array_equal(A @ np.ones(100), np.full(100, 100.0))
    assert len(timed) < 20
    ((times),) = acceleration.selection.classes.values()
    assert 140 < times.calls <= 160


class Clock:
    """A clock that only simulated calls move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> str:
        self.now += seconds
        return "done"


@pytest.mark.shared(4)
@pytest.mark.parametrize("seed", range(40))
def test_regret_is_bounded_on_every_trace(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever loading and calls of kernels cost, a trace takes at most a few per cent more than by scipy alone."""
    rng = np.random.default_rng(seed)
    clock = Clock()
    monkeypatch.setattr(selection, "perf_counter", clock)
    monkeypatch.setattr(selection, "folder", lambda: tmp_path)
    sizes = [(size,) for size in range(rng.integers(1, 6))]
    scipy_seconds = {size: 10.0 ** rng.uniform(-6, -1) for size in sizes}
    ratios = {size: 2.0 ** rng.uniform(-3, 2) for size in sizes}
    load_seconds = 10.0 ** rng.uniform(-4, -2)

    class Loaded(libraries.Libraries):
        def want(self, key: Any, seconds: float, account: Any) -> None:
            if account.covers(load_seconds):
                clock.spend(load_seconds)
                account.pay(load_seconds)
                self.loaded[key] = SimpleNamespace(use_threads=lambda _: None)  # type: ignore[assignment]

    for program in range(2):  # the second one starts with the outcomes of the first
        chosen = selection.TimedSelection(threads=None, min_entries=0, wait=False)
        chosen.libraries = Loaded()
        start, by_scipy, used = clock.now, 0.0, 0
        for call in range(2000):
            size = sizes[rng.integers(len(sizes))]
            seconds, ratio = scipy_seconds[size], ratios[size]

            def kernel(_: Any, seconds: float = seconds, ratio: float = ratio) -> str:
                nonlocal used
                used += 1
                return clock.spend(seconds * ratio * (1 if used > 3 else 2))

            args = ("spmv", "float64", "int32"), size
            if left := chosen.untimed.get(size, 0):  # as the replaced methods do
                chosen.untimed[size] = left - 1
                clock.spend(seconds)
            else:
                assert chosen.run(*args, lambda s=seconds: clock.spend(s), kernel) == "done"
            by_scipy += seconds
            assert clock.now - start <= 1.05 * by_scipy + 2 * max(scipy_seconds.values()), (program, call)
        chosen.save()
        best = min(ratios, key=lambda s: ratios[s])
        if ratios[best] < 0.5 and 0.02 * by_scipy > load_seconds + 2 * scipy_seconds[best]:
            assert used


def test_a_slow_call_says_nothing_about_those_that_were_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(selection, "perf_counter", clock)
    chosen = selection.TimedSelection(threads=None, min_entries=0, wait=False)
    monkeypatch.setattr(chosen.libraries, "want", lambda *_: None)
    run = lambda seconds: chosen.run(("spmv", "float64", "int32"), (1,), lambda: clock.spend(seconds), None)  # noqa: E731
    run(1e-4)
    (times,) = chosen.classes.values()
    times.skipped = 1000
    before = chosen.account.balance
    run(1.0)
    assert chosen.account.balance - before <= selection.REGRET_SHARE * (1.0 + 1000 * 1e-4) * 1.01


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": [1, null]}', "{"])
def test_damaged_outcomes_are_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "outcomes.json").write_text(text)
    assert selection.read_outcomes(tmp_path / "outcomes.json") == {}


def test_without_a_kernel_scipy_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "C_TYPES", {})
    monkeypatch.setattr(libraries.subprocess, "Popen", lambda *a, **b: (_ for _ in ()).throw(OSError("no process")))
    libraries.folder.cache_clear()
    monkeypatch.setenv("SPARSETIR_CACHE", "off")
    A = draw((60, 40), 0, "float64")
    with accelerate(min_entries=0, wait=True) as acceleration:
        np.testing.assert_allclose(A @ np.ones(40), A.toarray().sum(1))
    assert "no process" in acceleration.report()
    libraries.folder.cache_clear()


@pytest.mark.slow
def test_a_script_runs_accelerated_without_tvm(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, numpy as np, scipy.sparse as sp\n"
        "A = sp.random_array((300, 300), density=0.5, format='csr', rng=np.random.default_rng(0))\n"
        "for _ in range(8): y = A @ np.ones(300)\n"
        "print(np.allclose(y, A.sum(axis=1)), 'tvm' in sys.modules, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "sparsetir.scipy", "--wait", "--report", str(script), "argument"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True False ['argument']"
    assert "spmv float64 int32" in done.stderr


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_a_script_sees_the_modules_that_python_shows_it(place: str, tmp_path: Path) -> None:
    """The folder of the script comes first, the current one is not searched, and `__file__` is absolute."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    script = folder / "script.py"
    script.write_text(
        "import sys\nprint(__file__, sys.path[0], sys.path[1] != __import__('os').getcwd(), sys.argv[1:])\n"
    )
    current = folder if place == "beside" else other
    (other / "decimal.py").write_text("raise SystemExit('imported from the current folder')")
    path = "script.py" if place == "beside" else "../folder/script.py"
    printed = [
        subprocess.run(
            [sys.executable, *how, path, "-a"], cwd=current, capture_output=True, text=True, check=True
        ).stdout
        for how in ([], ["-m", "sparsetir.scipy"])
    ]
    assert printed[0].split(" ", 1)[1] == printed[1].split(" ", 1)[1]
    assert Path(printed[1].split(" ")[0]).samefile(script)


def test_what_a_package_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import sys; print(sys.argv[1:]); import lacking")
    (tmp_path / "package" / "part.py").write_text("")
    command = [sys.executable, "-m", "sparsetir.scipy", "-m", "package.part", "argument"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "['argument']\n"
    assert "No module named 'lacking'" in done.stderr


def test_a_command_line_without_sense() -> None:
    for arguments, fault in (
        (["--threads", "0", __file__], "--threads: expected"),
        (["none.py"], "no file none.py"),
        (["-m", "none.such"], "no module none.such"),
        (["-m", ".."], "no module .."),
    ):
        command = [sys.executable, "-m", "sparsetir.scipy", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert fault in done.stderr
        assert "Traceback" not in done.stderr
