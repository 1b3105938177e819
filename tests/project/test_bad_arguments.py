# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of public functions end in a result or an error of this package, never in one of another library."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsetir
from sparsetir import formats, ops
from tests.bad_arguments import Case, faults_of, matrix, positional
from tests.quick_code import quick_code

B = np.ones((4, 3), "float32")
PAIR = {"A": matrix(), "B": matrix()}
COORDS = np.array([[0, 1], [1, 0]])
INPUTS = {"A": matrix(), "B": B}
SEARCH = {"strategy": "guided", "seed": 0, "database": None, "target": None, "isolate": False, "executor": None,
          "machines": "same", "assume_finite": False}  # fmt: skip
TEXT = sparsetir.script(ops.spmv())


def tensor() -> sparsetir.SparseTensor:
    """A tensor of this package."""
    return sparsetir.SparseTensor.from_any(matrix())


def scheduled(method: str) -> Callable[..., Any]:
    """A function that calls a method of a fresh schedule of spmm."""
    return lambda **options: getattr(sparsetir.Schedule(ops.spmm()), method)(**options)


def cases() -> dict[str, Case]:
    """A call that works of each function, by its public name."""
    coo = sparsetir.CooTensor(COORDS, np.ones(2, "float32"), (4, 4))
    T = sparsetir.SparseTensor
    parts = sparsetir.decompose_format(ops.spmm(), {"A": formats.ell()})
    shallow = lambda owner: {f.name: getattr(owner, f.name) for f in dataclasses.fields(owner)}  # noqa: E731
    found: dict[str, Case] = {
        "Accumulators": (sparsetir.Accumulators, {"insertion": 8, "kind": "both", "counted": False, "order": "stored",
                                                  "block": None, "ranked": 16}),
        "Choices": (sparsetir.Choices, {"tile": 64, "chunks": 1, "unroll": 1, "prefetch": 0, "stream": 0, "carry": 0,
                                        "panel": 0, "lanes": 0}),
        "Choices.changed": (sparsetir.Choices().changed, {"tile": 16}),
        "Choices.space": (sparsetir.Choices.space, {"threads": 1, "feat": 8}),
        "CooTensor": (sparsetir.CooTensor, {"coords": COORDS, "values": np.ones(2, "float32"), "shape": (4, 4)}),
        "CooTensor.from_dense": (sparsetir.CooTensor.from_dense, {"array": np.eye(3)}),
        "CooTensor.with_values": (coo.with_values, {"values": np.ones(2, "float32")}),
        "Schedule": (sparsetir.Schedule, {"func": ops.spmm()}),
        "Schedule.annotate": (scheduled("annotate"), {"iteration": "spmm", "key": "sparse_note", "value": 1}),
        "Schedule.fuse_iterations": (scheduled("fuse_iterations"), {"first": "spmm", "second": "spmm", "depth": 1}),
        "Schedule.get_axes": (scheduled("get_axes"), {"iteration": "spmm"}),
        "Schedule.get_sp_iter": (scheduled("get_sp_iter"), {"name": "spmm"}),
        "Schedule.pad": (scheduled("pad"), {"iteration": "spmm", "axis": "K", "multiple": 4}),
        "Schedule.set_search": (scheduled("set_search"), {"iteration": "spmm", "strategy": "binary"}),
        "Schedule.sparse_fuse": (scheduled("sparse_fuse"), {"iteration": "spmm", "axes": ["I", "J"]}),
        "Schedule.sparse_reorder": (scheduled("sparse_reorder"), {"iteration": "spmm", "order": ["I", "J", "K"]}),
        "Schedule.sparse_split": (scheduled("sparse_split"), {"iteration": "spmm", "axis": "K", "factor": 4}),
        "Schedule.split_init": (scheduled("split_init"), {"iteration": "spmm"}),
        "Schedule.split_iteration": (scheduled("split_iteration"), {"iteration": "spmm", "at": None}),
        "Schedule.to_dense": (scheduled("to_dense"), {"iteration": "spmm", "axis": "J", "guard": False}),
        "Schedule.decompose": (scheduled("decompose"), {"formats": {"A": formats.csr()}}),
        "SparseTensor.astype": (tensor().astype, {"dtype": "float64"}),
        "SparseTensor.convert": (tensor().convert, {"format": "coo", "idtype": "int64"}),
        "SparseTensor.from_any": (T.from_any, {"value": matrix(), "format": "csr", "idtype": "int32", "check": True}),
        "SparseTensor.from_coo": (T.from_coo, {"coords": COORDS, "values": np.ones(2, "float32"), "shape": (4, 4),
                                               "format": "csr"}),
        "SparseTensor.from_dense": (T.from_dense, {"array": np.eye(3), "format": "csr", "idtype": "int32"}),
        "SparseTensor.from_file": (T.from_file, {"path": "missing.mtx", "format": "csr"}),
        "SparseTensor.from_scipy": (T.from_scipy, {"value": matrix(), "format": "csr"}),
        "SparseTensor.max": (tensor().max, {"axis": 0}),
        "SparseTensor.mean": (tensor().mean, {"axis": 0}),
        "SparseTensor.min": (tensor().min, {"axis": 0}),
        "SparseTensor.sum": (tensor().sum, {"axis": 0}),
        "SparseTensor.restore": (tensor().restore, {"values": np.ones(5, "float32")}),
        "SparseTensor.to_scipy": (tensor().to_scipy, {"format": "csr", "copy": True}),
        "SparseTensor.transpose": (positional(tensor().transpose, "one", "two"), {"one": 1, "two": 0}),
        "SparseTensor.with_values": (tensor().with_values, {"values": np.ones(5, "float32")}),
        "Decomposition": (sparsetir.Decomposition, shallow(parts)),
        "Pattern": (sparsetir.Pattern, shallow(sparsetir.pattern(matrix()))),
        "SparseTIRError": (positional(sparsetir.SparseTIRError, "text"), {"text": "a text"}),
        "SparseTensor": (T, {name: getattr(tensor(), name) for name in ("format", "pieces", "origin")}),
        "TuneManyResult": (sparsetir.TuneManyResult, {
            "results": (), "tasks": (), "spent": (), "seconds": 0.0, "interrupted": False}),
        "TuneResult": (sparsetir.TuneResult, {
            "kernel": None, "best": None, "untuned": None, "history": [], "space": {}, "seconds": 0.0, "key": None,
            "checked_against": "", "flops": None}),
        "autotune": (positional(sparsetir.autotune, "program"), {
            "program": ops.spmm(), "configs": (), "key": (), "target": None, "database": None}),
        "unchecked": (sparsetir.unchecked, {}),
        "FormatRewriteRule": (sparsetir.FormatRewriteRule, {}),
        "Kernel": (sparsetir.build(ops.spmm()), {"A": matrix(), "B": B}),
        "Kernel.bind": (sparsetir.build(ops.spmm()).bind, {"A": matrix(), "B": B}),
        "Kernel.time": (sparsetir.build(ops.spmm()).time, {"A": matrix(), "B": B, "seconds": 0.0}),
        "BoundKernel": (sparsetir.build(ops.spmm()).bind(A=matrix()), {"B": B}),
        "TuneTask": (sparsetir.TuneTask, {"program": ops.spmm(), "inputs": INPUTS, "expected_calls": 1}),
        "compute": (sparsetir.compute, {"tune": None, "database": None}),
        "fused": (sparsetir.fused, {"function": lambda A: A}),
        "get_num_threads": (sparsetir.get_num_threads, {}),
        "template": (sparsetir.template, {"function": lambda sch: None}),
        "tune_many": (sparsetir.tune_many, {
            "tasks": [(ops.spmm(), INPUTS)], "seconds": 0.01, "policy": "gain", "patience": 2, "timeout": 5.0,
            **SEARCH}),
        "tune_sparse": (sparsetir.tune_sparse, {
            "program": ops.spmm(), "inputs": INPUTS, "max_trials": 0, "max_seconds": 0.01, "preset": "quick",
            "patience": None, "timeout": 5.0, "formats": None, "schedule": None, "compare_with": (),
            "amortize_over": None, "model": None, "stop_probability": None, "progress": False, **SEARCH}),
        "add": (sparsetir.add, {**PAIR, "alpha": 1, "beta": 2}),
        "aligned": (sparsetir.aligned, {"array": B}),
        "build": (sparsetir.build, {"func": ops.spmv(), "target": None, "schedule": None, "expected_calls": 1,
                                    "database": None, "assume_finite": False}),
        "decompose_format": (sparsetir.decompose_format, {"func": ops.spmm(), "formats": {"A": formats.csr()},
                                                          "assume_finite": None}),
        "einsum": (positional(sparsetir.einsum, "subscripts", "A", "B"),
                   {"subscripts": "ij,jk->ik", "A": matrix(), "B": B, "reduce": "sum", "combine": "mul", "fill": 0,
                    "result": "auto"}),
        "einsum_expression": (positional(sparsetir.einsum_expression, "subscripts", "A", "B"),
                              {"subscripts": "ij,jk->ik", "A": matrix(), "B": B, "reduce": "sum", "fill": 0}),
        "format": (sparsetir.format, {"text": "csr"}),
        "interpret": (sparsetir.interpret, {"func": ops.spmv(), "args": {"A": matrix(), "X": np.ones(4, "float32")}}),
        "lazy": (sparsetir.lazy, {"value": matrix(), "dtype": "float32"}),
        "linear_operator": (sparsetir.linear_operator, {"A": matrix(), "expected_calls": 1}),
        "load": (sparsetir.load, {"path": "missing"}),
        "lower": (sparsetir.lower, {"func": ops.spmv(), "stage": 2}),
        "matmul": (sparsetir.matmul, {**PAIR, "mask": None, "complement": False, "top": None, "threshold": None}),
        "matmul_plan": (sparsetir.matmul_plan, PAIR),
        "maximum": (sparsetir.maximum, PAIR),
        "multiply": (sparsetir.multiply, PAIR),
        "open_blocks": (sparsetir.open_blocks, {"path": "missing.h5ad", "name": "X", "memory": "1MiB"}),
        "save_blocks": (sparsetir.save_blocks, {"A": matrix(), "path": "missing/folder", "rows": 3}),
        "parse": (sparsetir.parse, {"text": TEXT}),
        "pattern": (sparsetir.pattern, {"value": matrix()}),
        "rap": (sparsetir.rap, {"R": matrix(), "A": matrix(), "P": matrix()}),
        "read": (sparsetir.read, {"path": "missing.mtx"}),
        "relu": (sparsetir.relu, {"value": matrix()}),
        "ops.pack_ranges": (ops.pack_ranges, {"matrix": np.ones((2, 64), "float32"), "width": 64}),
        "script": (sparsetir.script, {"func": ops.spmv()}),
        "set_num_threads": (sparsetir.set_num_threads, {"count": 1}),
        "softmax": (sparsetir.softmax, {"value": matrix()}),
        "sparsify": (sparsetir.sparsify, {"func": ops.spmm(), "formats": {"A": "csr"}}),
        "Postings": (lambda D, Q, k: sparsetir.Postings(D).search(Q, k), {"D": matrix(), "Q": matrix(), "k": 2}),
        "subtract": (sparsetir.subtract, PAIR),
        "grouped_matmul": (
            sparsetir.grouped_matmul, {"x": np.ones((4, 4)), "offsets": [0, 4], "W": np.ones((1, 4, 4))}),
        "hstack": (lambda A, B: sparsetir.hstack([A, B]), PAIR),
        "tensordot": (sparsetir.tensordot, {"a": matrix(), "b": matrix(), "axes": 1}),
        "vstack": (sparsetir.vstack, {"operands": [matrix(), matrix()]}),
        "triangles": (sparsetir.triangles, {"A": matrix()}),
        "verify": (sparsetir.verify, {"func": ops.spmv(), "stage": 1}),
        "formats.make": (formats.make, {"name": "csr", "idtype": "int32"}),
        "formats.encoded": (formats.encoded, {"text": "(i, j) -> (i : dense, j : compressed)", "idtype": None}),
    }  # fmt: skip
    return found | dict(of_defaults("ops", ops.__all__, ops)) | dict(of_defaults("formats", formats.REGISTRY, formats))


def of_defaults(module: str, names: Any, owner: Any) -> Iterator[tuple[str, Case]]:
    """Calls of functions each of whose parameters has a default."""
    for name in names:
        function = getattr(owner, name)
        parameters = inspect.signature(function).parameters.values()
        if all(p.default is not p.empty for p in parameters):
            yield f"{module}.{name}", (function, {p.name: p.default for p in parameters})


CASES = cases()


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder: a text passed as a path may name a file that is then written."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Restore the number of threads; build without LLVM's optimisations."""
    threads = sparsetir.get_num_threads()
    with quick_code(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    sparsetir.set_num_threads(threads)


def test_every_public_name_has_a_case() -> None:
    public = {name for name in sparsetir.__all__ if not inspect.ismodule(getattr(sparsetir, name))}
    public |= {f"ops.{name}" for name in ops.__all__}
    tried = {name for name in CASES if name.startswith("ops.") or "." not in name}
    assert not public - tried
    assert tried <= public


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments_end_in_own_errors(name: str) -> None:
    faults = faults_of(CASES[name], name)
    assert not faults, faults
