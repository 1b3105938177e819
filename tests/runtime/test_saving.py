# SPDX-License-Identifier: Apache-2.0
"""Kernels, tensors and results of searches survive pickle, copies, files and other processes."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import relax, s_tir

import sparsetir
from sparsetir import formats, ops
from sparsetir.errors import ArgumentError, FileFormatError
from sparsetir.formats.encoding import parse_format
from sparsetir.runtime import serialization
from sparsetir.schedules import Choices

pytestmark = pytest.mark.usefixtures("quick_comparisons")

builds = importlib.import_module("sparsetir.codegen.cache")
A = sp.random_array((24, 20), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
B = np.random.default_rng(1).standard_normal((20, 8)).astype("float32")


@sparsetir.template
def tiled(cfg: Any, sch: Any) -> None:
    j, k = sch.get_loops(sch.get_sblock("spmm"))
    cfg.define_split("tile", k, policy="power2", max_factor=16)
    outer, inner = cfg["tile"].apply(sch, k)
    sch.reorder(outer, j, inner)
    sch.vectorize(inner)


def scheduled() -> Any:
    sch = s_tir.Schedule(sparsetir.lower(ops.spmm(), stage=2))
    j, k = sch.get_loops(sch.get_sblock("spmm"))
    outer, lanes = sch.split(k, [None, 4])
    sch.reorder(outer, j, lanes)
    return sparsetir.build(ops.spmm(), schedule=sch)


def tuned() -> Any:
    return sparsetir.tune_sparse(ops.spmm(), {"A": A, "B": B}, max_trials=3, progress=False)


def over(*named: Any) -> Any:
    parts = sparsetir.decompose_format(ops.spmm(), {"A": named[0]})
    for name, format in named[1:]:
        parts = sparsetir.decompose_format(parts, {name: format})
    return sparsetir.build(parts)


KERNELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: sparsetir.build(ops.spmm()),
    "choices": lambda: sparsetir.build(ops.spmm(), schedule=Choices(tile=8)),
    "schedule": scheduled,
    "function": lambda: sparsetir.build(ops.spmm(), schedule=lambda sch: None),
    "template": lambda: sparsetir.build(ops.spmm(), schedule=tiled.with_values(tile=(None, 4))),
    "calls": lambda: sparsetir.build(ops.spmm(), expected_calls=1000),
    "composed": lambda: over(formats.bsr(2, 2)),
    "pieces": lambda: over(formats.blocks(2, 2)),
    "nested": lambda: over(formats.columns(2), ("A_c0_csr", formats.ell(8))),
    "tuned": lambda: tuned().kernel,
}


def ways(thing: Any, folder: Path) -> dict[str, Any]:
    found = {"pickle": pickle.loads(pickle.dumps(thing)), "deepcopy": copy.deepcopy(thing)}
    return found if not hasattr(thing, "save") else {**found, "file": sparsetir.load(thing.save(folder / "kernel"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_stay_what_they_are(name: str, tmp_path: Path) -> None:
    kernel = KERNELS[name]()
    bound = kernel.bind(A=A)
    want = bound(B=B)
    for way, again in ways(kernel, tmp_path).items():
        assert repr(again) == repr(kernel), way
        np.testing.assert_array_equal(again(A=A, B=B), kernel(A=A, B=B), err_msg=way)
        assert again.script(stage=3) == kernel.script(stage=3)
    for way, again in ways(bound, tmp_path).items():
        assert repr(again) == repr(bound), way
        np.testing.assert_array_equal(again(B=B), want, err_msg=way)


@pytest.mark.slow
def test_a_search_survives() -> None:
    found = tuned()
    again = pickle.loads(pickle.dumps(found))
    assert again.report() == found.report()
    assert again.history == found.history
    assert copy.deepcopy(found).best == found.best


def test_a_file_holds_the_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = over(formats.bsr(2, 2)).save(tmp_path / "spmm.kernel")
    monkeypatch.setenv("SPARSETIR_CACHE", "off")
    monkeypatch.setattr(builds.Compiled, "compile", lambda _self: pytest.fail("compiled"))
    with builds.separate():
        np.testing.assert_allclose(sparsetir.load(path)(A=A, B=B), A @ B, rtol=1e-5)
    assert builds.SHIPPED == {}


def test_on_another_machine_it_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sparsetir.build(ops.spmm())
    monkeypatch.setattr(serialization, "key_of", lambda _compiled: "of another machine")
    path = kernel.save(tmp_path / "spmm.kernel")
    with builds.separate():
        np.testing.assert_allclose(sparsetir.load(path)(A=A, B=B), A @ B, rtol=1e-5)


def test_files_that_hold_no_kernel(tmp_path: Path) -> None:
    path = sparsetir.build(ops.spmm()).save(tmp_path / "spmm.kernel")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FileFormatError, match=r"spmm\.kernel is damaged"):
        sparsetir.load(path)
    path.write_bytes(b"no kernel")
    with pytest.raises(FileFormatError, match=r"expected a file that kernel\.save wrote"):
        sparsetir.load(path)
    with pytest.raises(FileNotFoundError):
        sparsetir.load(tmp_path / "nothing")
    with pytest.raises(ArgumentError, match="there is no folder"):
        sparsetir.build(ops.spmm()).save(tmp_path / "missing" / "spmm.kernel")


def _product(kernel: Any, func: Any) -> tuple[Any, str]:
    return kernel(A=A, B=B), str(func.attrs["global_symbol"])


@pytest.mark.slow
def test_a_pool_of_fresh_processes() -> None:
    """What TVM unpickles there first is a program of the dialect."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        product, name = pool.apply_async(_product, (over(formats.bsr(2, 2)), ops.spmm())).get(timeout=120)
    np.testing.assert_allclose(product, A @ B, rtol=1e-5)
    assert name == "spmm"


FORMATS = ["csr()", "bsr(r=2, c=2)", "hyb(c=2)", "hdia(C=4)", "blocks(r=2, c=2, rest='dcsr')", "coo()"]


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_tensors(text: str, layout: str) -> None:
    format = parse_format(text)
    tensor = sparsetir.SparseTensor.from_any(A.asformat(layout), format)
    for again in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert repr(again) == repr(tensor)
        assert type(again.restore()) is type(tensor.restore())
        np.testing.assert_array_equal(again.restore().toarray(), A.toarray())
        assert all(np.array_equal(p.values, q.values) for p, q in zip(again.pieces, tensor.pieces, strict=True))


def test_compiled_models(tmp_path: Path) -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([3], "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.add(x, x)))
    model = sparsetir.relax.compile_model(builder.get())
    path, value = model.save(tmp_path / "model.so"), np.arange(3, dtype="float32")
    loaded = sparsetir.relax.load(path)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), pickle.loads(pickle.dumps(loaded))):
        assert repr(again) == repr(model)
        np.testing.assert_array_equal(again(value), 2 * value)
    path.unlink()
    with pytest.raises(pickle.PicklingError, match="which no longer exists"):
        pickle.dumps(loaded)


def test_formulas_without_a_name() -> None:
    """Formats that come with the package need none; a tree of one's own does."""
    mine = formats.tree(
        formats.bsr(2, 2).rules[0].description,
        {0: ["IO", "II"], 1: ["JO", "JI"]},
        inverse=lambda io, jo, ii, ji: (io * 2 + ii, jo * 2 + ji),
        forward=lambda i, j: (i // 2, j // 2, i % 2, j % 2),
        fills=True,
    )
    with pytest.raises(pickle.PicklingError, match=r"rule 'bsr' has a formula, .*lambda.*, that has no name"):
        pickle.dumps(mine.rules[0])
    assert "bsr" in repr(pickle.loads(pickle.dumps(formats.bsr(2, 2))).rules[0].name)


# ---------------------------------------------------------------------------------------------- before and after use

rng = np.random.default_rng(11)
SPARSE = sp.random_array((30, 30), density=0.2, format="csr", dtype="float32", rng=rng)
DENSE, VECTOR = rng.standard_normal((30, 6)).astype("float32"), rng.standard_normal(30).astype("float32")
SQUARE = rng.standard_normal((6, 4)).astype("float32")


def tensor(array: np.ndarray) -> Any:
    """An array as a torch tensor; the processes that tests begin have no torch."""
    return importlib.import_module("torch").from_numpy(array)


def of_torch(name: str, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module("sparsetir.torch"), name)(*args, **options)


EDGES = np.stack(SPARSE.tocoo().coords).astype("int64")
einsum_expression = sparsetir.einsum_expression
by_blocks = lambda: sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(2, 2)}))  # noqa: E731

# how it is made, and what it is used for
OBJECTS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda: sparsetir.SparseTensor.from_scipy(SPARSE, "ell"), lambda o: o @ VECTOR),
    "coordinates": (lambda: sparsetir.SparseTensor.from_scipy(SPARSE).to_coo(), lambda o: o.to_dense()),
    "operator": (lambda: sparsetir.linear_operator(SPARSE), lambda o: o @ VECTOR),
    "operator.T": (lambda: sparsetir.linear_operator(SPARSE).T, lambda o: o @ VECTOR),
    "operator.H": (lambda: sparsetir.linear_operator(SPARSE).H, lambda o: o @ DENSE),
    "a sum of operators": (lambda: 2 * sparsetir.linear_operator(SPARSE) + sparsetir.linear_operator(SPARSE).T,
                           lambda o: o @ VECTOR),
    "expression": (lambda: einsum_expression("ij,jk->ik", SPARSE, (30, 6)), lambda o: o(SPARSE, DENSE)),
    "expression of three": (lambda: einsum_expression("ij,jk,kl->il", SPARSE, DENSE, (6, 4)),
                            lambda o: o(SPARSE, DENSE, SQUARE)),
    "sparse expression": (lambda: einsum_expression("ij,jk->ik", SPARSE, SPARSE), lambda o: o(SPARSE, SPARSE)),
    "masked expression": (lambda: einsum_expression("ij,jk,ik->ik", SPARSE, SPARSE, SPARSE),
                          lambda o: o(SPARSE, SPARSE, SPARSE)),
    "dense expression": (lambda: einsum_expression("ij,jk->ik", DENSE, SQUARE), lambda o: o(DENSE, SQUARE)),
    "bound expression": (lambda: einsum_expression("ij,jk->ik", SPARSE, (30, 6)).bind(SPARSE), lambda o: o(DENSE)),
    "bound expression of three": (lambda: einsum_expression("ij,jk,kl->il", SPARSE, DENSE, (6, 4)).bind(SPARSE, DENSE),
                                  lambda o: o(SQUARE)),
    "bound sparse expression": (lambda: einsum_expression("ij,jk->ik", SPARSE, SPARSE).bind(SPARSE),
                                lambda o: o(SPARSE)),
    "bound behind": (lambda: einsum_expression("ij,jk->ik", SPARSE, DENSE).bind(None, DENSE), lambda o: o(SPARSE)),
    "plan": (lambda: sparsetir.matmul_plan(SPARSE, SPARSE), lambda o: o(SPARSE, SPARSE)),
    "kernel": (lambda: sparsetir.build(sparsetir.ops.spmm()), lambda o: o(A=SPARSE, B=DENSE)),
    "bound kernel": (lambda: sparsetir.build(sparsetir.ops.spmm()).bind(A=SPARSE), lambda o: o(B=DENSE)),
    "kernel of results": (lambda: sparsetir.build(sparsetir.ops.spgemm()), lambda o: o(A=SPARSE, B=SPARSE)),
    "selecting kernel": (lambda: sparsetir.build(sparsetir.ops.spgemm()).selecting(),
                         lambda o: o(A=SPARSE, B=SPARSE, top=2)),
    "bound kernel of results": (lambda: sparsetir.build(sparsetir.ops.spgemm()).bind(A=SPARSE),
                                lambda o: o(B=SPARSE)),
    "composed kernel": (by_blocks, lambda o: o(A=SPARSE, B=DENSE)),
    "bound composed kernel": (lambda: by_blocks().bind(A=SPARSE), lambda o: o(B=DENSE)),
    "graph": (lambda: of_torch("Graph", tensor(EDGES), num_nodes=30), lambda o: o.spmm(tensor(DENSE))),
    "layer": (lambda: of_torch("SparseLinear", 30, 8), lambda o: o(tensor(DENSE.T.copy()))),
    "lazy": (lambda: sparsetir.lazy(SPARSE) @ DENSE, sparsetir.compute),
    "encoding": (lambda: sparsetir.SparseTensor.from_scipy(SPARSE).encoding(), str),
    "format": (lambda: formats.bsr(2, 2), repr),
}  # fmt: skip
COPIES = {"pickle": lambda o: pickle.loads(pickle.dumps(o)), "copy": copy.copy, "deepcopy": copy.deepcopy}


def comparable(value: Any) -> Any:
    for name in ("toarray", "to_dense", "detach"):
        value = getattr(value, name)() if hasattr(value, name) else value
    return np.asarray(value)


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_copied_before_and_after_use(name: str) -> None:
    make, use = OBJECTS[name]
    thing, expected = make(), None
    for _ in range(2):
        copies = {how: function(thing) for how, function in COPIES.items()}
        expected = comparable(use(thing))
        for how, other in copies.items():
            np.testing.assert_array_equal(comparable(use(other)), expected, err_msg=how)
            again = COPIES["pickle"](other)  # a copy that was used
            np.testing.assert_array_equal(comparable(use(again)), expected, err_msg=how)
