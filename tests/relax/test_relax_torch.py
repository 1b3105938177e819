# SPDX-License-Identifier: Apache-2.0
"""Models from torch: tensors in and out, sizes that change, sparse parameters, operators of our own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm.support.cc import get_cc

import sparsetir.relax as srelax
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Sparse CSR")  # torch's own

N, M = 16, 12
ops = srelax.register_torch_ops()


class Network(torch.nn.Module):
    """Everything that may nest, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(N, M), torch.nn.Dropout()
        self.register_buffer("scale", torch.full((M,), 2.0))

    def forward(self, x: Any, signed: bool, more: dict[str, Any], *, shift: Any) -> dict[str, Any]:
        y = self.drop(torch.relu(self.layer(x))) * (self.scale if signed else 1)
        return {"y": y + more["bias"][0] + shift, "none": None, "rest": (x, 3)}


def arguments(batch: int) -> tuple[Any, bool, dict[str, Any]]:
    return torch.randn(batch, N), True, {"bias": [torch.ones(M)]}


def export(model: Any) -> Any:
    batch = torch.export.Dim("batch", min=2, max=16)
    shapes = {"x": {0: batch}, "signed": None, "more": {"bias": [None]}, "shift": None}
    with torch.no_grad():
        return torch.export.export(model, arguments(4), {"shift": torch.ones(M)}, dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def network() -> Any:
    return Network().eval()


@pytest.fixture(scope="module")
def compiled(network: Any) -> srelax.CompiledModel:
    return srelax.from_torch(export(network))


@pytest.mark.slow
def test_a_model_nests_as_in_torch_and_takes_any_batch(network: Any, compiled: srelax.CompiledModel) -> None:
    for batch in (2, 5, 16):
        args, shift = arguments(batch), torch.randn(M)
        got, want = compiled(*args, shift=shift), network(*args, shift=shift)
        assert list(got) == ["y", "none", "rest"]
        assert got["none"] is None
        assert got["rest"][1] == 3
        torch.testing.assert_close(got["y"], want["y"].detach(), rtol=1e-4, atol=1e-5)


def test_memory_is_shared_where_it_is_aligned(compiled: srelax.CompiledModel) -> None:
    x, *rest = arguments(5)
    assert x.data_ptr() % 64 == 0
    assert compiled(x, *rest, shift=torch.ones(M))["rest"][0].data_ptr() == x.data_ptr()
    held = torch.randn(5 * N + 1)
    shifted, strided = held[1:].view(5, N), torch.randn(N, 5).t()
    one_row = torch.randn(2, 3 * N)[:, N : 2 * N]
    for part in (shifted, strided, one_row):
        returned = compiled(part, *rest, shift=torch.ones(M))["rest"][0]
        assert returned.data_ptr() != part.data_ptr()
        assert torch.equal(returned, part)


@pytest.mark.slow
def test_results_outlive_the_model_and_later_calls() -> None:
    model = srelax.from_torch(torch.nn.Linear(N, M), (torch.randn(4, N),))
    x = torch.randn(4, N)
    first = model(x)
    kept = first.clone()
    model(torch.randn(4, N))
    del model
    gc.collect()
    assert torch.equal(first, kept)


@pytest.mark.slow
def test_a_module_is_traced_as_in_eval_mode_and_not_changed() -> None:
    model = Network()
    compiled = srelax.from_torch(model, arguments(4), example_kwargs={"shift": torch.ones(M)})
    assert model.training
    args = arguments(4)
    want = model.eval()(*args, shift=torch.ones(M))["y"].detach()
    torch.testing.assert_close(compiled(*args, shift=torch.ones(M))["y"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_keep_their_dtype(dtype: Any) -> None:
    layer, x = torch.nn.Linear(N, M, dtype=dtype), torch.randn(4, N, dtype=dtype)
    got, want = srelax.from_torch(layer, (x,))(x), layer(x).detach()
    torch.testing.assert_close(got, want, **({"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: x.double(), ArgumentTypeError, "x has dtype float64; expected float32"),
        (lambda x: x[:, :7], ArgumentError, r"x has shape \(4, 7\); expected"),
        (lambda x: x[:1], ArgumentError, r"x.shape\[0\] is 1; the model was traced for 2 to 16"),
        (lambda x: x.to_sparse(), ArgumentTypeError, "x is sparse .* pass x.to_dense"),
        (lambda x: x.to("meta"), ArgumentTypeError, "x is on meta; models run on the cpu"),
        (lambda x: x.clone().requires_grad_(), ArgumentTypeError, "x requires grad, .* pass x.detach"),
        (lambda x: 3, ArgumentTypeError, "x: expected a torch tensor, .* got int"),
    ],
)
def test_wrong_tensors_are_named(compiled: srelax.CompiledModel, change: Any, kind: Any, message: str) -> None:
    x, *rest = arguments(4)
    with pytest.raises(kind, match=message):
        compiled(change(x), *rest, shift=torch.ones(M))


def test_wrong_nesting_is_refused(compiled: srelax.CompiledModel) -> None:
    x, _, more = arguments(4)
    with pytest.raises(ArgumentTypeError, match="got 2 positional arguments and shift"):
        compiled(x, True, shift=torch.ones(M))
    with pytest.raises(ArgumentError, match="an argument was True when the model was traced, got False"):
        compiled(x, False, more, shift=torch.ones(M))
    needs_none = x.clone().requires_grad_()
    with torch.no_grad():
        compiled(needs_none, True, more, shift=torch.ones(M))


@pytest.mark.slow
def test_what_cannot_be_traced_is_refused() -> None:
    x = torch.randn(4, N)
    layer = torch.nn.Linear(N, M)
    for model, args, options, message in (
        (lambda x: x, (x,), {}, "expected a torch.nn.Module or an ExportedProgram, got function"),
        (layer, None, {}, "pass example_args"),
        (layer, x, {}, r"pass \(tensor,\)"),
        (torch.export.export(layer, (x,)), (x,), {}, "traced already"),
        (layer, (x.to_sparse_csr(),), {}, r"example_args\[0\] is sparse \(torch.sparse_csr\)"),
        (layer, (x,), {"sparsify": 3}, "takes passes over an IRModule, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            srelax.from_torch(model, args, **options)

    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.count += 1
            return x * self.count

    with pytest.raises(ArgumentError, match="changes count when it is called"):
        srelax.from_torch(Counter(), (x,))


def test_operators_that_tvm_does_not_know_are_named() -> None:
    class Rare(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.bessel_j0(x)

    with pytest.raises(LoweringError, match="bessel_j0"):
        srelax.from_torch(Rare(), (torch.randn(4, N),))


@pytest.mark.slow
@pytest.mark.skipif(get_cc() is None, reason="needs a C++ compiler")
def test_a_saved_model_nests_and_checks_too(compiled: srelax.CompiledModel, tmp_path: Path) -> None:
    path = compiled.save(tmp_path / "network.so")
    args, shift = arguments(3), torch.randn(M)
    torch.save((args, shift, compiled(*args, shift=shift)), tmp_path / "case.pt")
    program = f"""
import torch, sparsetir.relax
args, shift, want = torch.load({str(tmp_path / "case.pt")!r})
model = sparsetir.relax.load({str(path)!r})
got = model(*args, shift=shift)
print(torch.equal(got["y"], want["y"]), got["none"], got["rest"][1])
try:
    model(args[0][:1], *args[1:], shift=shift)
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    with_torch = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=with_torch, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True None 3", "x.shape[0] is 1; the model was traced for 2 to 16"]
    assert done.stderr == ""


@pytest.mark.slow
def test_passes_run_before_the_model_is_lowered() -> None:
    seen: list[str] = []

    @tvm.transform.module_pass(opt_level=0)
    def note(mod: Any, _ctx: Any) -> Any:
        seen.append(mod["main"].script())
        return mod

    exported = torch.export.export(torch.nn.Linear(N, M), (torch.randn(4, N),))
    srelax.from_torch(exported, sparsify=note)
    srelax.from_torch(exported, sparsify=[note, note])  # the exported program was not changed
    assert len(seen) == 3
    assert all("R.matmul" in text for text in seen)


# ------------------------------------------------------------------ sparse parameters

LAYOUTS = {
    "csr": lambda W: W.to_sparse_csr(),
    "bsr": lambda W: W.to_sparse_bsr((2, 2)),
}


class Pruned(torch.nn.Module):
    """Sparse tensors as a parameter, a buffer and an attribute; two names for one of them."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        found = sp.random_array((M, N), density=0.3, dtype="float32", rng=np.random.default_rng(0))
        W = torch.from_numpy(found.toarray())
        make = LAYOUTS[layout]
        self.weight = torch.nn.Parameter(make(W), requires_grad=False)
        self.tied = self.weight
        self.register_buffer("adjacency", W.to_sparse_csr())
        self.plain = W.to_sparse_coo()
        self.bias = torch.nn.Parameter(torch.ones(M))

    def forward(self, x: Any) -> Any:
        y = self.weight @ x.t() + torch.sparse.mm(self.adjacency, x.t())
        y = y + torch.mm(self.plain, x.t()) - self.tied @ x.t()
        return torch.relu(y.t() + self.bias)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["csr", "bsr"])
def test_sparse_parameters_are_traced_as_dense_ones(layout: str) -> None:
    model, x = Pruned(layout), torch.randn(5, N)
    weight, bias = model.weight, model.bias
    compiled = srelax.from_torch(model, (torch.randn(4, N),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert model.weight is weight
    assert model.bias is bias
    assert model.weight.layout != torch.strided
    torch.testing.assert_close(compiled(x), model(x).detach(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ operators


def graph(idtype: Any = torch.int32, m: int = M, n: int = N) -> tuple[Any, ...]:
    """A matrix with an empty row as arrays, and as a dense tensor."""
    found = sp.random_array((m, n), density=0.3, format="lil", dtype="float32", rng=np.random.default_rng(0))
    found[1] = 0
    A = found.tocsr()
    arrays = (torch.from_numpy(A.data), torch.from_numpy(A.indptr).to(idtype), torch.from_numpy(A.indices).to(idtype))
    return (*arrays, torch.from_numpy(A.toarray()))


def cases() -> dict[str, tuple[Any, tuple[Any, ...], Any]]:
    """Operator, its arguments, and the result by torch."""
    data, indptr, indices, A = graph()
    rows = torch.repeat_interleave(torch.arange(M), indptr.long().diff())
    x, B, X, Y = (torch.randn(*shape) for shape in ((2, 3, N), (N, 5), (M, 7), (N, 7)))
    kinds, W, T = (indices % 3).int(), torch.randn(3, 7, 5), torch.randn(4, N, 5)
    shares = torch.cat([torch.softmax(data[s:e], 0) for s, e in pairwise(indptr)])
    parts = torch.split(B[indices.long()], indptr.diff().tolist())
    largest = torch.stack([part.amax(0) if len(part) else torch.zeros(5) for part in parts])
    typed = torch.zeros(M, 5).index_add(0, rows, torch.einsum("ec,ecd->ed", Y[indices.long()], W[kinds.long()]))
    mask_indptr, mask_indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0, 0, 1], dtype=torch.int32)
    Q, K, V = (torch.randn(2, 8, 6) for _ in range(3))
    seen = torch.ones(2, 2).tril().bool().repeat_interleave(4, 0).repeat_interleave(4, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=seen)
    matrix = (data, indptr, indices)
    return {
        "spmm": (ops.spmm, (*matrix, B), A @ B),
        "spmm of a batch": (ops.spmm, (*matrix, T), A @ T),
        "spmv": (ops.spmv, (*matrix, B[:, 0].contiguous()), A @ B[:, 0]),
        "linear": (ops.linear, (x, *matrix), x @ A.T),
        "linear of a vector": (ops.linear, (x[0, 0], *matrix), x[0, 0] @ A.T),
        "sddmm": (ops.sddmm, (*matrix, X, Y), data * (X[rows] * Y[indices.long()]).sum(1)),
        "softmax": (ops.softmax, (data, indptr), shares),
        "segment_reduce": (ops.segment_reduce, (B[indices.long()], indptr, "max"), largest),
        "gather_matmul_scatter": (ops.gather_matmul_scatter, (Y, W, indptr, indices, kinds), typed),
        "attention": (ops.attention, (Q, K, V, mask_indptr, mask_indices), attended),
    }


CASES = cases()


class Applied(torch.nn.Module):
    """One operator with its structure as buffers."""

    def __init__(self, operator: Any, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.operator, self.names = operator, []
        self.rest = [a for a in args if not isinstance(a, torch.Tensor)]
        for n, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32:
                self.register_buffer(f"held{n}", arg)
                self.names.append(f"held{n}")
            elif isinstance(arg, torch.Tensor):
                self.names.append("")

    def forward(self, *given: Any) -> Any:
        values = iter(given)
        return self.operator(*(getattr(self, name) if name else next(values) for name in self.names), *self.rest)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_an_operator_in_torch(name: str) -> None:
    operator, args, want = CASES[name]
    torch.testing.assert_close(operator(*args), want, rtol=1e-4, atol=1e-5)
    shape = operator(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)).shape
    assert shape == want.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spmm", "linear", "segment_reduce", "gather_matmul_scatter", "attention"])
def test_an_operator_in_a_model(name: str) -> None:
    operator, args, want = CASES[name]
    given = tuple(a for a in args if isinstance(a, torch.Tensor) and a.dtype != torch.int32)
    model = srelax.from_torch(Applied(operator, args), given)
    assert "R.sparse." in model.mod.script()
    torch.testing.assert_close(model(*given), want, rtol=1e-4, atol=1e-5)


def test_operators_refuse_kinds_out_of_range_and_backward_passes() -> None:
    starts, entries = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    with pytest.raises(StructureError, match=r"kinds hold 7 at position 1, expected one of \[0, 1\)"):
        ops.gather_matmul_scatter(torch.ones(2, 3), torch.ones(1, 3, 2), starts, entries, torch.tensor([0, 7]))
    found = ops.spmm(torch.ones(2), starts, entries, torch.ones(2, 3, requires_grad=True))
    with pytest.raises(ArgumentTypeError, match="sparsetir::spmm has no gradients: pass detached tensors"):
        found.sum().backward()


@pytest.mark.slow
def test_operators_mix_with_those_of_torch_and_take_graphs_as_arguments() -> None:
    class Convolution(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(7, 5)

        def forward(self, X: Any, data: Any, indptr: Any, indices: Any) -> Any:
            shares = ops.softmax(data, indptr)
            pooled = ops.segment_reduce(data, indptr, reduce="mean")
            return torch.relu(ops.spmm(shares, indptr, indices, self.dense(X))), pooled

    model = Convolution().eval()
    n, nnz, m = (torch.export.Dim(name, min=3) for name in ("n", "nnz", "m"))
    data, indptr, indices, _ = graph(torch.int64)
    args = (torch.randn(N, 7), data, indptr, indices)
    shapes = ({0: n}, {0: nnz}, {0: m}, {0: nnz})
    compiled = srelax.from_torch(model, args, dynamic_shapes=shapes)
    for size in ((M, N), (20, 9)):
        data, indptr, indices, _ = graph(torch.int64, *size)
        args = (torch.randn(size[1], 7), data, indptr, indices)
        for got, want in zip(compiled(*args), model(*args), strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)


def test_wrong_arguments_of_an_operator_are_refused_in_torch() -> None:
    data, indptr, indices, _ = graph()
    with pytest.raises(ValueError, match="indices"):
        ops.spmm(data, indptr, indices + N, torch.randn(N, 5))
    with pytest.raises(TypeError, match=r"data is torch.float32 and B is torch.float64"):
        ops.spmm(data, indptr, indices, torch.randn(N, 5).double())


def pruned_network() -> Any:
    """A feed-forward block, a convolution and a product with parameters of its own, a tenth of their weights left."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
            self.mixed = torch.nn.Conv2d(64, 64, 1, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.down(torch.nn.functional.gelu(self.up(x))) + x
            return y + self.mixed(y.T.reshape(1, 64, -1, 1)).reshape(64, -1).T

    torch.manual_seed(0)
    found = Block().eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.ndim > 1:
                parameter *= torch.rand_like(parameter) < 0.1
    return found


@pytest.mark.slow
def test_pruned_weights_of_torch_become_sparse() -> None:
    network, x = pruned_network(), torch.randn(8, 64)
    sparsify = srelax.SparsifyWeights(decide="predict")
    model = srelax.from_torch(network, (x,), sparsify=sparsify)
    assert [layer.is_sparse for layer in sparsify.layers] == [True] * 3
    with torch.no_grad():
        np.testing.assert_allclose(model(x).numpy(), network(x).numpy(), rtol=1e-4, atol=1e-5)


def test_a_linear_layer_of_no_rows() -> None:
    structure = torch.ones(2), torch.tensor([0, 1, 2]), torch.tensor([0, 2])
    assert ops.linear(torch.zeros(0, 3), *structure).shape == (0, 2)
    assert ops.linear(torch.zeros(4, 0, 3), *structure).shape == (4, 0, 2)


@pytest.mark.slow
def test_pruned_layers_are_seen_with_their_hooks() -> None:
    """As `prune.remove` would leave them; the model keeps its hooks."""
    prune = torch.nn.utils.prune
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).eval()
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.9)
    prune.random_unstructured(model[0], "bias", amount=0.5)
    x = torch.randn(4, 64)
    with torch.no_grad():
        want = model(x)
    sparsify = srelax.SparsifyWeights(decide="predict")
    compiled = srelax.from_torch(model, (x,), sparsify=sparsify)
    assert [layer.is_sparse for layer in sparsify.layers] == [True, True]
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
    assert prune.is_pruned(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)


@pytest.mark.slow
def test_small_weights_are_named() -> None:
    sparsify = srelax.SparsifyWeights(decide="predict")
    srelax.from_torch(torch.nn.Linear(30, 30, bias=False), (torch.randn(2, 30),), sparsify=sparsify)
    assert "smaller than 4,096 elements" in str(*sparsify.layers)


def test_views_of_conjugates_are_read_with_their_sign() -> None:
    net = torch.nn.Linear(8, 4).eval()
    model = srelax.from_torch(net, (torch.randn(16, 8),))
    z = torch.complex(torch.randn(16, 8), torch.randn(16, 8))
    for x in (torch._neg_view(z.real), z.conj().imag):
        with torch.no_grad():
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)
