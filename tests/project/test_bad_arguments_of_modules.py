# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of functions of submodules and of methods of results end in a result or an error of the package."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest
from tvm import relax

import sparsetir
import sparsetir.dask
import sparsetir.relax as srelax
import torch
from sparsetir import bench, blocks, formats, ops, tuning
from sparsetir import scipy as accelerated
from sparsetir.errors import ArgumentError
from tests.bad_arguments import BAD, Case, faults_of, matrix, positional
from tests.quick_code import quick_code

INDPTR, INDICES = np.array([0, 2, 3, 4, 5], "int32"), np.array([0, 1, 1, 2, 3], "int32")
CSR = {"data": np.ones(5, "float32"), "indptr": INDPTR, "indices": INDICES}
X = np.ones((4, 3), "float32")
HEADS = {name: np.ones((2, 8, 6), "float32") for name in "QKV"}
#: what is compiled for each call, and is tried with a few arguments
FEW = {
    name: BAD[name] for name in ("None", "str", "bytes", "negative", "nan", "class", "2-d", "sparse", "long indices")
}
EXAMPLES = {"example_args": (torch.ones(2, 4),), "example_kwargs": None, "static": ()}
#: names without a case: classes that functions with a case return, and functions without arguments
WITHOUT_CASE = {
    "relax": {"CompiledModel", "Layer", "TrainStep", "register_torch_ops"},
    "tuning": {"Candidate", "Key", "Record", "TuneManyResult", "TuneResult", "TuneTask"},
    "blocks": {"BlockMatrix", "Plan", "open_blocks", "save_blocks"},
    "dask": set(),
    "bench": {"MissingPackageError"},
    "scipy": set(),
}  # fmt: skip
MODULES = {
    "relax": srelax,
    "tuning": tuning,
    "blocks": blocks,
    "dask": sparsetir.dask,
    "bench": bench,
    "scipy": accelerated,
}


def dense_module() -> Any:
    """A product with a constant."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([2, 4], "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.matmul(x, relax.const(np.eye(4, dtype="float32")))))
    return builder.get()


@cache
def sparse_module() -> Any:
    """A product with a constant sparse matrix."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([2, 4], "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(srelax.linear(x, *map(relax.const, CSR.values()))))
    return builder.get()


@cache
def step() -> Any:
    """A step of training."""
    return srelax.train_step(torch.nn.Linear(4, 3), **EXAMPLES)


@cache
def stored() -> Any:
    """A matrix on disk, in the folder in which the module's first test runs."""
    sparsetir.save_blocks(matrix(), FOLDER[0] / "blocks", rows=3)
    return sparsetir.open_blocks(FOLDER[0] / "blocks")


FOLDER: list[Path] = []


def chunks() -> Any:
    """A matrix in chunks."""
    A = matrix()
    rows = dask.array.from_array(np.arange(4), chunks=2)
    return rows.map_blocks(lambda at: A[at], new_axis=1, chunks=((2, 2), (4,)), dtype="float32", meta=A[:0])


def pass_over(make: Callable[..., Any], module: Callable[[], Any]) -> Callable[..., Any]:
    """A function that makes a pass of options, and runs it."""
    return lambda **options: make(**options)(module())


def method(owner: Callable[[], Any], name: str) -> Callable[..., Any]:
    """A method of an object that is made at the first call."""
    return lambda **options: getattr(owner(), name)(**options)


def tuned() -> Any:
    """The result of a search, made once."""
    return RESULTS[0] if RESULTS else RESULTS.append(sparsetir.tune_sparse(
        ops.spmm(), {"A": matrix(), "B": X}, max_trials=1, max_seconds=0.5)) or RESULTS[0]  # fmt: skip


RESULTS: list[Any] = []


def tensor() -> Any:
    return sparsetir.SparseTensor.from_any(matrix())


@cache
def composed() -> Any:
    return sparsetir.build(sparsetir.decompose_format(ops.spmm(), {"A": formats.ell()}))


@cache
def spmm() -> Any:
    return sparsetir.build(ops.spmm())


CASES: dict[str, Case] = {
    "relax.attention": (srelax.attention, {**HEADS, "indptr": np.array([0, 1, 3], "int32"),
                                           "indices": np.array([0, 0, 1], "int32"), "scale": None}),
    "relax.csr_constants": (srelax.csr_constants, {"matrix": matrix(), "dtype": "float32", "idtype": "int32"}),
    "relax.from_onnx": (srelax.from_onnx, {"model": "missing.onnx", "shapes": None, "report": None}),
    "relax.gather_matmul_scatter": (srelax.gather_matmul_scatter, {
        "X": X, "W": np.ones((1, 3, 2), "float32"), "indptr": INDPTR, "indices": INDICES,
        "kinds": np.zeros(5, "int32")}),
    "relax.gather_outer": (srelax.gather_outer, {"X": X, "Y": X, "indptr": INDPTR, "left": INDICES, "right": INDICES}),
    "relax.linear": (srelax.linear, {"x": np.ones((2, 4), "float32"), **CSR}),
    "relax.load": (srelax.load, {"path": "missing"}),
    "relax.sddmm": (srelax.sddmm, {**CSR, "X": X, "Y": X}),
    "relax.segment_expand": (srelax.segment_expand, {"x": X, "indptr": INDPTR, "nnz": 5}),
    "relax.segment_reduce": (srelax.segment_reduce, {
        "x": np.ones((5, 2), "float32"), "indptr": INDPTR, "reduce": "sum"}),
    "relax.softmax": (srelax.softmax, {"data": CSR["data"], "indptr": INDPTR}),
    "relax.spmm": (srelax.spmm, {**CSR, "B": X}),
    "relax.spmv": (srelax.spmv, {**CSR, "x": np.ones(4, "float32")}),
    "relax.tasks": (srelax.tasks, {"mod": sparse_module(), "target": None, "params": None}),
    "relax.transpose": (srelax.transpose, {"indptr": INDPTR, "indices": INDICES, "n": 4}),
    "TrainStep.step": (lambda x, y: step().step(x, y), {"x": np.ones((2, 4), "float32"), "y": np.array([0, 1])}),
    "TrainStep.predict": (lambda x: step().predict(x), {"x": np.ones((2, 4), "float32")}),
    "TrainStep.set": (method(step, "set"), {"params": None, "state": None}),
    "TrainStep.load": (method(step, "load"), {"path": "missing.npz"}),
    "Database": (tuning.Database, {"path": None}),
    "Database.load": (lambda key: tuning.Database().load(key), {"key": None}),
    "Database.of_program": (lambda text: list(tuning.Database().of_program(text)), {"text": "x"}),
    "Database.append": (lambda key, record: tuning.Database().append(key, record), {"key": None, "record": None}),
    "TuneResult.break_even_with": (lambda peer: tuned().break_even_with(peer), {"peer": "scipy"}),
    "TuneResult.plot": (lambda path: tuned().plot(path), {"path": "missing/x.nothing"}),
    "Decomposition.with_formats": (
        lambda formats: composed().decomposition.with_formats(formats), {"formats": {"A": formats.ell()}}),
    "autotune": (lambda **options: sparsetir.autotune(options.pop("program"), **options)(lambda sch: None), {
        "program": ops.spmm(), "configs": (), "key": (), "target": None, "database": None}),
    "SparseTensor.argmax": (tensor().argmax, {"axis": 0, "keepdims": False}),
    "SparseTensor.logsumexp": (tensor().logsumexp, {"axis": 0, "keepdims": False}),
    "SparseTensor.var": (tensor().var, {"axis": 0, "ddof": 0, "keepdims": False}),
    "SparseTensor.reshape": (positional(tensor().reshape, "rows", "columns"), {"rows": 2, "columns": 8}),
    "SparseTensor.from_binsparse": (tensor().from_binsparse, {
        "descriptor": tensor().__binsparse_descriptor__(), "arrays": tensor().__binsparse__()}),
    "SparseTensor.from_torch": (tensor().from_torch, {"value": torch.eye(3).to_sparse_coo(), "format": None}),
    "Postings.top": (lambda Q, k: sparsetir.Postings(matrix()).top(Q, k), {"Q": matrix(), "k": 2}),
    "scipy.accelerate": (lambda **options: accelerated.accelerate(**options).restore(), {
        "threads": None, "min_entries": 8192, "wait": False}),
    "dask.matmul": (lambda dx, B: sparsetir.dask.matmul(dx, B).compute(), {"dx": chunks(), "B": X}),
    "dask.pca": (sparsetir.dask.pca, {"dx": chunks(), "k": 1}),
    "BlockMatrix.spmm": (method(stored, "spmm"), {"B": X, "out": None, "progress": False, "client": None}),
    "BlockMatrix.plan": (method(stored, "plan"), {"B": X, "out": None}),
    "BlockMatrix.rmatmul": (method(stored, "rmatmul"), {"Y": X, "out": None}),
    "BlockMatrix.colvars": (method(stored, "colvars"), {"ddof": 0}),
    "BlockMatrix.gram": (method(stored, "gram"), {"center": False, "out": None}),
    "BlockMatrix.pca": (method(stored, "pca"), {"k": 1}),
    "BlockMatrix.sddmm": (method(stored, "sddmm"), {"X": X, "Y": X, "out": None}),
    "BlockMatrix.gcn": (method(stored, "gcn"), {"weights": [np.ones((3, 2), "float32")], "X": X, "out": None}),
    "bench.Timing": (bench.Timing.of, {"samples": [1.0, 2.0], "discarded": 0}),
    "bench.available": (bench.available, {"op": "spmm"}),
    "bench.curve": (bench.curve, {
        "history": [{"seconds": 1.0}, {"seconds": 0.5}], "path": "missing/x.nothing", "title": "", "labels": ["a", "b"],
        "untuned": 2.0}),
    "bench.density": (bench.density, {"matrix": matrix(), "bins": 2}),
    "bench.missing": (bench.missing, {}),
    "bench.mttkrp": (bench.mttkrp, {
        "peer": "numpy", "tensor": sparsetir.CooTensor(np.zeros((3, 1), "int32"), np.ones(1, "float32"), (2, 4, 4)),
        "B": X, "C": X}),
    "bench.sddmm": (bench.sddmm, {"peer": "scipy", "csr": matrix(), "X": X, "Y": X}),
    "bench.set_threads": (bench.set_threads, {"count": 1}),
    "bench.spmm": (bench.spmm, {"peer": "scipy", "csr": matrix(), "B": X}),
    "bench.spmv": (bench.spmv, {"peer": "scipy", "csr": matrix(), "x": np.ones(4, "float32")}),
    "bench.spy": (bench.spy, {"matrix": matrix(), "path": "missing/x.nothing"}),
    "bench.term_document": (bench.term_document, {"root": Path("missing")}),
    "Kernel.script": (method(spmm, "script"), {"stage": 1, "outline": False, "m": 4}),
    "Kernel.source": (method(spmm, "source"), {"kind": "ll"}),
    "ComposedKernel.time": (method(composed, "time"), {"A": matrix(), "B": X, "seconds": 0.0}),
    "ComposedKernel.bind": (method(composed, "bind"), {"A": matrix(), "B": X}),
    "ComposedKernel.convert": (method(composed, "convert"), {"name": "A", "value": matrix()}),
    "ComposedKernel.write_pieces": (method(composed, "write_pieces"), {"folder": "pieces", "A": matrix()}),
    "BoundKernel.time": (lambda **options: spmm().bind(A=matrix()).time(**options), {"B": X, "seconds": 0.0}),
}  # fmt: skip
#: with a few of the bad arguments, because each call compiles, or waits
COMPILED: dict[str, Case] = {
    "bench.interleave": (bench.interleave, {"cases": {"a": int}, "rounds": 1, "burst_seconds": 0.0, "rest": 0.0}),
    "relax.build": (srelax.build, {
        "mod": sparse_module(), "target": None, "params": None, "database": None, "tune_seconds": None, "checked": True,
        "assume_finite": False}),
    "relax.compile_model": (srelax.compile_model, {
        "mod": sparse_module(), "target": None, "params": None, "sparsify": None, "database": None, "nesting": None}),
    "relax.from_torch": (srelax.from_torch, {
        "model": torch.nn.Linear(4, 4), **EXAMPLES, "dynamic_shapes": None, "sparsify": None}),
    "relax.train_step": (srelax.train_step, {
        "model": torch.nn.Linear(4, 3), "loss": "mse", "optimizer": "sgd", **EXAMPLES, "params": None, "frozen": (),
        "lr": 0.1}),
    "relax.SparsifyWeights": (pass_over(srelax.SparsifyWeights, dense_module), {
        "decide": "predict", "rows": 64, "most_dense": 0.7, "tune": False, "max_seconds": 1.0, "database": None,
        "target": None, "progress": False}),
    "SparsifyWeights.call": (lambda mod: srelax.SparsifyWeights(decide="predict")(mod), {"mod": dense_module()}),
    "LowerSparse.call": (lambda mod: srelax.LowerSparse()(mod), {"mod": sparse_module()}),
    "relax.LowerSparse": (pass_over(srelax.LowerSparse, sparse_module), {
        "target": None, "database": None, "checked": True, "assume_finite": False, "asked": None}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder: a text passed as a path may name a file that is then written."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build without LLVM's optimisations."""
    FOLDER.append(tmp_path_factory.mktemp("blocks"))
    with quick_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_case(module: str) -> None:
    public = {n for n in MODULES[module].__all__ if not inspect.ismodule(getattr(MODULES[module], n))}
    cases = {n.partition(".")[2] for n in {**CASES, **COMPILED} if n.startswith(f"{module}.")}
    cases |= {n for n in CASES if n in public}
    assert public - cases - set(sparsetir.__all__) == WITHOUT_CASE[module] - set(sparsetir.__all__)


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments_end_in_own_errors(name: str) -> None:
    faults = faults_of(CASES[name], name)
    assert not faults, faults


@pytest.mark.parametrize("options", [{"rounds": 10**30}, {"rest": 1e8}, {"burst_seconds": 1e7, "rounds": 2}])
def test_a_measurement_that_would_not_end_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"rounds: expected|to be done in 86400 seconds"):
        bench.interleave({"a": int}, **{"burst_seconds": 0, "rest": 0, **options})


@pytest.mark.slow
@pytest.mark.shared(3)
@pytest.mark.parametrize("name", COMPILED)
def test_bad_arguments_of_compilers_end_in_own_errors(name: str) -> None:
    faults = faults_of(COMPILED[name], name, FEW)
    assert not faults, faults
