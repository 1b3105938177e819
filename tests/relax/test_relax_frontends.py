# SPDX-License-Identifier: Apache-2.0
"""Models from torch, ONNX and relax.frontend.nn: compiled, called, saved, loaded elsewhere, run from C++."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import ir, relax
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.support.cc import get_cc

import sparsetir.relax as srelax
from sparsetir.errors import ArgumentError, ArgumentTypeError, WriteError
from sparsetir.relax.model import attached
from sparsetir.relax.nn import SparseLinear

ROOT = Path(__file__).resolve().parents[2]
M, N, F = 12, 16, 8
needs_compiler = pytest.mark.skipif(get_cc() is None, reason="needs a C++ compiler")


def csr(m: int = M, n: int = N, idtype: str = "int32", seed: int = 0) -> Any:
    """A matrix with an empty row."""
    rng = np.random.default_rng(seed)
    found = sp.random_array((m, n), density=0.3, format="lil", dtype="float32", rng=rng)
    found[1] = 0
    out = found.tocsr()
    out.indptr, out.indices = out.indptr.astype(idtype), out.indices.astype(idtype)
    return out


def dense(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy whose memory begins at no multiple of 64 bytes."""
    held = np.empty(array.size + 32, array.dtype)
    first = next(n for n in range(32) if held[n:].ctypes.data % 64 == 4)
    out = held[first : first + array.size].reshape(array.shape)
    out[...] = array
    return out


def operators(mod: ir.IRModule, function: str = "main") -> list[str]:
    found: list[str] = []
    note = lambda e: found.append(e.op.name) if isinstance(e, ir.Call) and isinstance(e.op, ir.Op) else None  # noqa: E731
    relax.analysis.post_order_visit(mod[function], note)
    return found


# ------------------------------------------------------------------ any module


@I.ir_module
class Affine:
    @R.function
    def main(x: R.Tensor(("n", 16), "float32"), y: R.Tensor(("n", 16), "float32"), W: R.Tensor((16,), "float32")):
        with R.dataflow():
            a = R.multiply(x, W)
            b = R.add(a, y)
            R.output(a, b)
        return (b, (a,))


@pytest.fixture(scope="module")
def affine() -> srelax.CompiledModel:
    return srelax.compile_model(Affine, params={"W": np.full(16, 2, "float32")})


def test_a_model_takes_arrays_by_position_and_name_and_gives_arrays(affine: srelax.CompiledModel) -> None:
    x, y = dense(3, 16), dense(3, 16, seed=2)
    for b, (a,) in (affine(x, y), affine(x, y=y), affine(y=y, x=np.asfortranarray(x)), affine(unaligned(x), y)):
        np.testing.assert_allclose(a, 2 * x)
        np.testing.assert_allclose(b, 2 * x + y)
    b, _ = affine(tvm.runtime.tensor(x), y)
    assert isinstance(b, tvm.runtime.Tensor)
    assert str(affine) == "CompiledModel (x: float32[n, 16], y: float32[n, 16])"


def test_wrong_arguments_are_named(affine: srelax.CompiledModel) -> None:
    x = dense(3, 16)
    for args, named, kind, message in (
        ((x,), {}, TypeError, r"takes \(x: float32\[n, 16\], y: .*\), got 1 arguments"),
        ((x, x), {"x": x}, TypeError, "got another argument x"),
        ((x, x.astype("float64")), {}, TypeError, "y has dtype float64; expected float32"),
        ((x, x[:, :5]), {}, ValueError, r"y has shape \(3, 5\); expected y: float32\[n, 16\]"),
        ((x, x[0]), {}, ValueError, r"y has shape \(16,\); expected"),
        ((x, x[:2]), {}, ValueError, r"y.shape\[0\] is 2 but x.shape\[0\] is 3: they are one size, n"),
        ((x, [1.0]), {}, TypeError, "y: expected a torch tensor, a numpy array or a TVM tensor, got list"),
    ):
        with pytest.raises(kind, match=message):
            affine(*args, **named)


@needs_compiler
def test_a_saved_model_describes_itself(affine: srelax.CompiledModel, tmp_path: Path, capfd: Any) -> None:
    x, y = dense(3, 16), dense(3, 16, seed=2)
    model = srelax.load(affine.save(tmp_path / "affine.so"))
    assert str(model) == str(affine)
    b, (a,) = model(x, y=y)
    np.testing.assert_allclose(a, 2 * x)
    np.testing.assert_allclose(b, 2 * x + y)
    with pytest.raises(ArgumentTypeError, match="y has dtype float64"):
        model(x, y.astype("float64"))
    # Where another library was loaded before, TVM notes that both call their data alike.
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if "SystemLib symbol __tvm_ffi__library_bin" not in line] == []


@needs_compiler
def test_a_file_of_tvm_alone_is_loaded_too(tmp_path: Path) -> None:
    executable = srelax.build(Affine)
    executable.export_library(str(tmp_path / "plain.so"))
    model = srelax.load(tmp_path / "plain.so")
    b, _ = model(dense(3, 16), dense(3, 16), np.ones(16, "float32"))
    np.testing.assert_allclose(b, 2 * dense(3, 16))
    with pytest.raises(ArgumentError, match="copy its file"):
        model.save(tmp_path / "again.so")


def with_constant(constant: np.ndarray) -> srelax.CompiledModel:
    """A model that returns its argument and a constant."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([2], "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.Tuple([x, relax.const(constant)])))
    return srelax.compile_model(builder.get())


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 4)])
def test_constants_without_entries_are_kept(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = with_constant(np.zeros(shape, "float16"))
    for one in (model, srelax.load(model.save(tmp_path / "empty.so"))):
        x, constant = one(np.ones(2, "float32"))
        assert (x.tolist(), constant.shape, constant.dtype) == ([1, 1], shape, np.dtype("float16"))


@needs_compiler
def test_a_file_that_is_written_again_is_loaded_again(tmp_path: Path) -> None:
    loaded = []
    for number in (2, 3):
        loaded.append(srelax.load(with_constant(np.full(1, number, "float32")).save(tmp_path / "model.so")))
    assert [model(np.ones(2, "float32"))[1].tolist() for model in loaded] == [[2], [3]]
    with pytest.raises(pickle.PicklingError, match="has been written again since: load it again"):
        pickle.dumps(loaded[0])
    assert pickle.loads(pickle.dumps(loaded[1]))(np.ones(2, "float32"))[1].tolist() == [3]


@needs_compiler
def test_wrong_files_and_modules_are_refused(affine: srelax.CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model at"):
        srelax.load(tmp_path / "missing.so")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ArgumentError, match=r"a model is a library: expected a name ending in .so, got x.npy"):
        srelax.load(tmp_path / "x.npy")
    (tmp_path / "x.so").write_bytes(b"\x93NUMPY")
    with pytest.raises(ArgumentError, match=r"x.so is no library for this machine"):
        srelax.load(tmp_path / "x.so")
    with pytest.raises(ArgumentError, match=r"ending in .so, got model.bin"):
        affine.save(tmp_path / "model.bin")
    with pytest.raises(ArgumentError, match=r"there is no folder .* to save model.so in"):
        affine.save(tmp_path / "missing" / "model.so")
    with pytest.raises(ArgumentError, match="no parameter V: main has x, y, W"):
        srelax.compile_model(Affine, params={"V": np.ones(1)})
    with pytest.raises(ArgumentTypeError, match="takes passes over an IRModule, got str"):
        srelax.compile_model(Affine, sparsify=["weights"])
    with pytest.raises(ArgumentError, match="with a function main, or with one Relax function, got f, g"):
        srelax.compile_model(ir.IRModule({"f": Affine["main"], "g": Affine["main"]}))


@needs_compiler
@pytest.mark.parametrize("described", ["text", {}, {"signature": [], "nesting": None}])
def test_a_damaged_description_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: Any) -> None:
    monkeypatch.setattr("sparsetir.relax.model.attached", lambda mod, _: attached(mod, described))
    saved = srelax.compile_model(Affine).save(tmp_path / "affine.so")
    with pytest.raises(ArgumentError, match=r"what affine.so says of the model's arguments is damaged .*: save the m"):
        srelax.load(saved)


@needs_compiler
def test_a_full_disk_is_said(affine: srelax.CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sparsetir.codegen.cache.check_room", full)
    with pytest.raises(WriteError, match=r"affine.so cannot be written: No space left on device"):
        affine.save(tmp_path / "affine.so")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ relax.frontend.nn


class Network(nn.Module):
    def __init__(self, first: SparseLinear, second: SparseLinear) -> None:
        self.first, self.second = first, second

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.second(nn.op.relu(self.first(x)))


SPEC = {"forward": {"x": nn.spec.Tensor(["batch", N], "float32")}}


@pytest.mark.slow
def test_a_sparse_layer_of_relax_nn() -> None:
    A, B, bias = csr(), csr(F, M, seed=1), dense(M)
    mod, params = Network(SparseLinear.from_scipy(A, bias), SparseLinear.from_scipy(B)).export_tvm(SPEC)
    assert operators(mod, "forward").count("relax.sparse.linear") == 2
    model = srelax.compile_model(mod, params=dict(params))
    for batch in (1, 5):
        x = dense(batch, N)
        np.testing.assert_allclose(model(x), np.maximum(x @ A.T + bias, 0) @ B.T, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_sparse_layer_whose_weight_comes_at_run_time() -> None:
    A, x = csr(), dense(5, N)
    layer = SparseLinear(N, M, A.nnz, bias=False)
    mod, params = layer.export_tvm(SPEC)
    vm = relax.VirtualMachine(srelax.build(mod, params=dict(params)), tvm.cpu())
    y = vm["forward"](*(tvm.runtime.tensor(a) for a in (x, A.data, A.indptr, A.indices))).numpy()
    np.testing.assert_allclose(y, x @ A.T, rtol=1e-4, atol=1e-5)
    layer.set_weight(A)
    model = srelax.compile_model(mod, params=dict(params))
    np.testing.assert_allclose(model(x), y, rtol=1e-5, atol=1e-6)


def test_a_sparse_layer_refuses_what_does_not_fit() -> None:
    A = csr()
    with pytest.raises(ArgumentError, match=r"shape \(12, 16\); expected \(12, 15\), outputs by inputs"):
        SparseLinear(15, 12, A)
    with pytest.raises(ArgumentTypeError, match=r"a number of entries or a scipy.sparse matrix, got list"):
        SparseLinear(15, 12, [1])
    with pytest.raises(ArgumentTypeError, match=r"expected a scipy.sparse matrix, got ndarray"):
        SparseLinear.from_scipy(A.toarray())
    with pytest.raises(ArgumentError, match=r"bias has shape \(3,\); expected \(12,\)"):
        SparseLinear.from_scipy(A, np.ones(3, "float32"))
    with pytest.raises(ArgumentError, match="made for 5 entries"):
        SparseLinear(16, 12, 5).set_weight(A)


# ------------------------------------------------------------------ ONNX


def onnx_network(weights: dict[str, np.ndarray]) -> Any:
    """MatMul and Add, Relu, Gemm with a transposed weight."""
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "V", "e"], ["y"], transB=1),
    ]
    value = lambda name, size: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])  # noqa: E731
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "network", [value("x", N)], [value("y", F)], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_a_pruned_network_from_onnx(keep: bool) -> None:
    pytest.importorskip("onnx")
    from tvm.relax.frontend.onnx import from_onnx

    weights = {"W": csr().toarray().T.copy(), "b": dense(M), "V": csr(F, M).toarray(), "e": dense(F)}
    mod = from_onnx(onnx_network(weights), keep_params_in_input=keep)
    params = None
    if keep:  # the weights are the parameters after the input
        mod, detached = relax.frontend.detach_params(mod)
        names = [str(p.name) for p in mod["main"].params][1:]
        params = dict(zip(names, detached["main"], strict=True))
    model = srelax.compile_model(mod, params=params)
    x = dense(5, N)
    want = np.maximum(x @ weights["W"] + weights["b"], 0) @ weights["V"].T + weights["e"]
    np.testing.assert_allclose(model(x), want, rtol=1e-4, atol=1e-5)
    vm = relax.VirtualMachine(srelax.build(mod, params=params), tvm.cpu())
    np.testing.assert_allclose(vm["main"](tvm.runtime.tensor(x)).numpy(), want, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ C++


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_saved_model_runs_from_cpp() -> None:
    script = ROOT / "examples" / "relax_cpp" / "build_and_run.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "they are those of numpy" in done.stdout
