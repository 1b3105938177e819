# SPDX-License-Identifier: Apache-2.0
"""Steps of training as one executable: losses and parameters are those of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch.nn.utils.prune
import tvm
from torch.nn import functional as F
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.training import optimizer as tvm_optimizers

import sparsetir.relax as srelax
import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError, FileFormatError, LoweringError, MissingFileError

NODES, FEATURES, HIDDEN, CLASSES = 40, 12, 8, 3
op = relax.op


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def dense(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return rng(seed).standard_normal(shape).astype(dtype)


def module(make: Callable[..., Any], **shapes: tuple[int, ...]) -> Any:
    """A module whose main makes one expression of its parameters."""
    builder = relax.BlockBuilder()
    params = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            found = builder.emit_output(make(builder.emit, **params))
        builder.emit_func_output(found)
    return builder.get()


def adjacency() -> sp.csr_array:
    """A graph with an isolated node, rows normalised."""
    found = sp.random_array((NODES, NODES), density=0.1, format="lil", dtype="float32", rng=rng(1))
    found[5], found[:, 5] = 0, 0
    csr = found.tocsr()
    csr.data[:] = 1 / np.repeat(np.maximum(np.diff(csr.indptr), 1), np.diff(csr.indptr))
    return csr


def gcn(matrix: sp.csr_array) -> tuple[Any, dict[str, np.ndarray]]:
    """Two layers over a constant graph, and their weights."""
    arrays = srelax.csr_constants(matrix)

    def make(emit: Any, x: Any, w1: Any, b1: Any, w2: Any) -> Any:
        h = emit(op.nn.relu(emit(srelax.spmm(*arrays, emit(op.matmul(x, w1)))) + b1))
        return srelax.spmm(*arrays, emit(op.matmul(h, w2)))

    shapes = {"w1": (FEATURES, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES)}
    mod = module(make, x=(NODES, FEATURES), **shapes)
    return mod, {name: 0.5 * dense(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}


def labels() -> np.ndarray:
    found = rng(3).integers(0, CLASSES, NODES)
    found[::4] = -100
    return found


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], Callable[..., Any]]] = {
    "sgd": ("sgd", {"lr": 0.5}, lambda p: torch.optim.SGD(p, 0.5)),
    "adam": ("adam", {"lr": 0.05}, lambda p: torch.optim.Adam(p, 0.05)),
    "momentum": (
        "momentum",
        {"lr": 0.1, "weight_decay": 0.01, "nesterov": True},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
    ),
    "adam with decay": ("adam", {"weight_decay": 0.1}, lambda p: torch.optim.Adam(p, weight_decay=0.1)),
    "adamw": ("adamw", {"lr": 0.02, "betas": (0.8, 0.9)}, lambda p: torch.optim.AdamW(p, 0.02, (0.8, 0.9))),
    "tvm": (tvm_optimizers.Adam(0.05, (0.8, 0.99)), {}, lambda p: torch.optim.Adam(p, 0.05, (0.8, 0.99))),
}


def torch_losses(
    model: Callable[..., Any], params: dict[str, np.ndarray], loss: Any, make: Callable[..., Any], steps: int = 20
) -> tuple[list[float], dict[str, np.ndarray]]:
    held = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
    optimizer, losses = make(held.values()), []
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss(model(**held))
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return losses, {name: value.detach().numpy() for name, value in held.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["adam", *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS if n != "adam")]
)
def test_a_gcn_learns_as_in_torch(name: str) -> None:
    optimizer, options, reference = OPTIMIZERS[name]
    matrix, x, y = adjacency(), dense(NODES, FEATURES, seed=7), labels()
    mod, params = gcn(matrix)
    step = srelax.train_step(mod, "cross_entropy", optimizer, params=params, **options)
    A = torch.tensor(matrix.toarray())
    model = lambda w1, b1, w2: A @ F.relu(A @ (torch.tensor(x) @ w1) + b1) @ w2  # noqa: E731
    loss = lambda scores: F.cross_entropy(scores, torch.tensor(y))  # noqa: E731
    want, after = torch_losses(model, params, loss, reference)
    np.testing.assert_allclose([step(x, y) for _ in range(20)], want, rtol=1e-4, atol=1e-5)
    for key, value in step.params.items():
        np.testing.assert_allclose(value, after[key], rtol=1e-3, atol=1e-4)
    scores = model(**{k: torch.tensor(v) for k, v in after.items()})
    np.testing.assert_allclose(step.predict(x), scores.numpy(), rtol=1e-3, atol=1e-3)


class Pruned(nn.Module):
    """A network with a sparse weight, its values trained."""

    def __init__(self, weight: sp.csr_array) -> None:
        super().__init__()
        self.first = srelax.nn.SparseLinear.from_scipy(weight, dense(weight.shape[0], seed=2))
        self.last = nn.Linear(weight.shape[0], 1)
        self.last.weight.data, self.last.bias.data = dense(1, weight.shape[0], seed=4), dense(1, seed=5)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.last(nn.op.gelu(self.first(x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_pruned_network_learns_as_in_torch(name: str) -> None:
    weight = sp.random_array((16, FEATURES), density=0.2, format="csr", dtype="float32", rng=rng(2))
    mod, found = Pruned(weight).export_tvm({"forward": {"x": nn.spec.Tensor([30, FEATURES], "float32")}})
    rate = {"sgd": 0.05, "adam": 0.01}[name]
    step = srelax.train_step(mod, "mse", name, params=dict(found), lr=rate)
    x, y = dense(30, FEATURES, seed=7), dense(30, 1, seed=8)
    rows, columns = weight.nonzero()
    names = {"first.data": "data", "first.bias": "b1", "last.weight": "w2", "last.bias": "b2"}
    assert set(step.params) == set(names)

    def model(data: Any, b1: Any, w2: Any, b2: Any) -> Any:
        w1 = torch.zeros(16, FEATURES).index_put((torch.tensor(rows), torch.tensor(columns)), data)
        return F.gelu(torch.tensor(x) @ w1.T + b1) @ w2.T + b2

    params = {names[key]: value for key, value in step.params.items()}
    reference = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    want, after = torch_losses(model, params, lambda p: F.mse_loss(p, torch.tensor(y)), lambda p: reference(p, rate))
    np.testing.assert_allclose([step(x, y) for _ in range(20)], want, rtol=1e-4)
    for key, value in step.params.items():
        np.testing.assert_allclose(value, after[names[key]], rtol=1e-3, atol=1e-4)


LOSSES = {
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "own": lambda a, b: ((a - b) ** 4).sum(),
}


def scaled(loss: Any = "mse", optimizer: Any = "sgd", dtype: str = "float32", **options: Any) -> Any:
    """A step of a model with one row of weights."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(n, relax.TensorType(s, dtype)) for n, s in (("x", [4, 3]), ("w", [3])))
    with builder.function("main", [x, w]):
        builder.emit_func_output(builder.emit(x * w))
    options = {"params": {"w": np.array([1, -2, 0.5], dtype)}, "lr": 0.1, **options}
    return srelax.train_step(builder.get(), loss, optimizer, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_torch(name: str) -> None:
    loss = name if name != "own" else lambda a, b: op.sum(op.power(a - b, relax.const(4.0, "float64")))
    step = scaled(loss, dtype="float64", lr=0.01)
    x, y = dense(4, 3, seed=1, dtype="float64"), rng(2).random((4, 3))
    model = lambda w: torch.tensor(x) * w  # noqa: E731
    want, _ = torch_losses(
        model, step.params, lambda p: LOSSES[name](p, torch.tensor(y)), lambda p: torch.optim.SGD(p, 0.01), 3
    )
    np.testing.assert_allclose([step(x, y) for _ in range(3)], want, rtol=1e-7)


# ------------------------------------------------------------------ the object


@pytest.mark.slow
def test_training_goes_on_from_a_file(tmp_path: Path) -> None:
    x, y = dense(4, 3), np.ones((4, 3), "float32")
    step = scaled(optimizer="adam")
    for _ in range(3):
        step.step(x, y)
    step.lr = 0.05
    path = step.save(tmp_path / "state.npz")
    want = [step(x, y) for _ in range(3)]
    other = scaled(optimizer="adam")
    other.load(path)
    assert (other.count, other.lr) == (3, 0.05)
    assert [other(x, y) for _ in range(3)] == want
    assert str(other) == "TrainStep (x: float32[4, 3], target: float32[4, 3]): 6 steps"
    assert set(other.state) == {"count", "lr", "w_first", "w_second"}


@pytest.mark.slow
def test_wrong_files_are_refused_and_change_nothing(tmp_path: Path) -> None:
    step, other = scaled(), scaled(optimizer="momentum")
    with pytest.raises(ArgumentError, match=r"expected a name ending in \.npz"):
        step.save(tmp_path / "state.so")
    with pytest.raises(ArgumentError, match="no folder"):
        step.save(tmp_path / "none" / "state.npz")
    with pytest.raises(MissingFileError, match="no state of training"):
        step.load(tmp_path / "none.npz")
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(step.save(tmp_path / "state.npz").read_bytes()[:100])
    with pytest.raises(FileFormatError, match=r"damaged\.npz is no state of training"):
        step.load(damaged)
    with pytest.raises(ArgumentError, match="has no w_velocity: it is of another model or optimizer"):
        other.load(tmp_path / "state.npz")
    other.save(tmp_path / "other.npz")
    with pytest.raises(ArgumentError, match="there is no state w_velocity"):
        step.load(tmp_path / "other.npz")
    with pytest.raises(ArgumentError, match=r"parameter w has shape \(2,\); expected \(3,\)"):
        step.set({"w": np.zeros(2, "float32")})
    with pytest.raises(ArgumentTypeError, match="parameter w has dtype float64; expected float32"):
        step.set({"w": np.zeros(3)})
    np.testing.assert_array_equal(step.params["w"], np.array([1, -2, 0.5], "float32"))


def test_rates_change_between_steps_and_inputs_come_from_torch() -> None:
    step = scaled()
    x, y = torch.tensor(dense(4, 3)), torch.zeros(4, 3)
    step.lr = 0
    assert step(x, y) == step(x, target=y) == step(x=x, target=y)
    assert isinstance(step.predict(x), torch.Tensor)
    with pytest.raises(ArgumentError, match=r"x has shape \(3, 3\); expected x: float32\[4, 3\]"):
        step(x[:3], y)
    with pytest.raises(ArgumentTypeError, match=r"takes \(x: float32\[4, 3\], target: float32\[4, 3\]\), got 1"):
        step(x)


@pytest.mark.slow
def test_labels_are_looked_at_in_each_step() -> None:
    mod = module(lambda emit, x, w: x * w, x=(4, 3), w=(3,))
    step = srelax.train_step(mod, params={"w": np.ones(3, "float32")}, lr=0.1)
    x = dense(4, 3)
    assert step(x, np.full(4, -100)) == 0
    assert step(x, np.zeros(4, "uint8")) > 0
    for wrong in ([0, 1, 2, 3], [0, 1, 2, -1]):
        with pytest.raises(ArgumentError, match=r"label -?\d; expected classes from 0 to 2, or -100"):
            step(x, np.array(wrong))
    with pytest.raises(ArgumentTypeError, match="cross_entropy takes a class for each row, as integers"):
        step(x, np.zeros(4))


def test_frozen_parameters_and_others_stay() -> None:
    make = lambda emit, x, w, v: emit(x * w) + v  # noqa: E731
    params = {name: dense(3, seed=n) for n, name in enumerate("wv")}
    mod = module(make, x=(4, 3), w=(3,), v=(3,))
    step = srelax.train_step(mod, "mse", "sgd", params=params, frozen=["v"], lr=0.1)
    assert set(step.params) == {"w"}
    x, y = dense(4, 3), np.zeros((4, 3), "float32")
    assert step(x, y) == pytest.approx(float(((x * params["w"] + params["v"]) ** 2).mean()), rel=1e-5)


@pytest.mark.slow
def test_what_was_trained_is_compiled_as_a_model() -> None:
    mod, params = gcn(sp.csr_array((NODES, NODES), dtype="float32"))  # without edges
    step, x = srelax.train_step(mod, params=params, lr=0.1), dense(NODES, FEATURES)
    assert step(x, labels()) == pytest.approx(np.log(CLASSES))
    mod, params = gcn(adjacency())
    step = srelax.train_step(mod, params=params, lr=0.1)
    assert step(x, labels()) > step(x, labels())
    model = srelax.compile_model(mod, params=step.params)
    np.testing.assert_allclose(model(x), step.predict(x), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ dropout


@pytest.mark.slow
def test_dropout_drops_other_elements_in_each_step_and_none_in_predictions() -> None:
    def make(emit: Any, x: Any, w: Any) -> Any:
        return emit(relax.TupleGetItem(emit(op.nn.dropout(emit(x * w), 0.25)), 0))

    mod = module(make, x=(100, 50), w=(50,))
    params = {"w": np.ones(50, "float32")}
    x, y = np.ones((100, 50), "float32"), np.zeros((100, 50), "float32")
    steps = [srelax.train_step(mod, "mse", "sgd", params=params, lr=0.0, seed=seed) for seed in (0, 0, 1)]
    losses = [[step(x, y) for _ in range(3)] for step in steps]
    assert losses[0] == losses[1] != losses[2]
    assert len({*losses[0], *losses[2]}) == 6
    # a share of 3/4 is left, each element 4/3 of what it was
    np.testing.assert_allclose(losses, 16 / 9 * 0.75, rtol=0.05)
    np.testing.assert_array_equal(steps[0].predict(x), x)
    steps[0].lr = 1.0
    left = losses[0][0] * 9 / 16  # of the elements of this step, all of whose gradients are alike
    steps[0].set(state={"count": 0})
    assert steps[0](x, y) == losses[0][0]
    change = 1 - steps[0].params["w"].mean()
    assert change == pytest.approx(2 * 16 / 9 * left / 50, rel=1e-4)


def test_the_mask_of_dropout_is_not_kept() -> None:
    def make(emit: Any, x: Any, w: Any) -> Any:
        return emit(relax.TupleGetItem(emit(op.nn.dropout(emit(x * w), 0.25)), 1))

    with pytest.raises(LoweringError, match=r"mask of R\.nn\.dropout is not kept"):
        srelax.train_step(module(make, x=(4, 3), w=(3,)), "mse", params={"w": np.ones(3, "float32")})


# ------------------------------------------------------------------ models of torch


class Graphs(torch.nn.Module):
    """A graph network of torch_geometric, one of its weights not trained."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        layers = pytest.importorskip("torch_geometric.nn")
        self.first, self.last = layers.GCNConv(FEATURES, HIDDEN), layers.SAGEConv(HIDDEN, CLASSES)
        self.norm, self.rate = torch.nn.LayerNorm(HIDDEN), rate
        self.last.lin_r.weight.requires_grad_(False)

    def forward(self, x: Any, edges: Any) -> Any:
        h = F.dropout(F.relu(self.norm(self.first(x, edges))), self.rate, training=self.training)
        return self.last(h, edges)


@pytest.mark.slow
def test_a_model_of_torch_learns_as_in_torch() -> None:
    torch.manual_seed(0)
    model, edges = Graphs(0.0), torch.randint(0, NODES, (2, 150))
    x, y = torch.tensor(dense(NODES, FEATURES)), torch.tensor(labels())
    step = srelax.train_step(model, optimizer="adam", lr=0.02, example_args=(x, edges), static=["edges"])
    trained = [p for p in model.parameters() if p.requires_grad]
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(step.params) == names
    optimizer = torch.optim.Adam(trained, 0.02)
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges), y)
        loss.backward()
        optimizer.step()
        assert step(x, y) == pytest.approx(float(loss.detach()), rel=1e-4)
    other = copy.deepcopy(model).eval()
    other.load_state_dict({name: torch.tensor(value) for name, value in step.params.items()}, strict=False)
    torch.testing.assert_close(step.predict(x), other(x, edges).detach(), rtol=1e-4, atol=1e-4)


class Normed(torch.nn.Module):
    """Batch norms of every kind: one that is used twice, one without averages, one that is still, and of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, HIDDEN)
        self.twice = torch.nn.BatchNorm1d(HIDDEN, momentum=0.3, affine=False)
        self.alone = torch.nn.BatchNorm1d(HIDDEN, track_running_stats=False)
        self.still, self.images = torch.nn.BatchNorm1d(HIDDEN), torch.nn.BatchNorm2d(2)
        self.groups, self.last = torch.nn.GroupNorm(2, 4), torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.still(self.alone(F.relu(self.twice(self.twice(self.first(x))))))
        images = F.gelu(self.images(h.view(-1, 2, 2, 2)))
        return self.last(F.silu(self.groups(images.view(-1, 4, 2)).flatten(1)))


@pytest.mark.slow
def test_batch_norm_keeps_averages_as_in_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normed()
    model.still.eval()
    own, y = copy.deepcopy(model), torch.tensor(labels())
    batches = [torch.tensor(dense(NODES, FEATURES, seed=n)) * (n + 1) for n in range(5)]
    step = srelax.train_step(model, optimizer="sgd", lr=0.1, example_args=(batches[0],))
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    for n, x in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(own(x), y)
        loss.backward()
        optimizer.step()
        if n == 3:
            step.load(step.save(tmp_path / "state.npz"))
        assert step(x, y) == pytest.approx(float(loss.detach()), abs=1e-5)
    kept = {n: b for n, b in own.named_buffers() if n.startswith(("twice.running", "images.running"))}
    assert set(step.state) == {*kept, "count", "lr"}
    for name, value in {**kept, **dict(own.named_parameters())}.items():
        found = {**step.params, **step.state}[name]
        np.testing.assert_allclose(found, value.detach().numpy(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.predict(batches[0]), own.eval()(batches[0]).detach(), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), Normed().buffers(), strict=True))


def normed(rows: int, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A batch norm in Relax, and its parameters."""

    def make(emit: Any, x: Any, w: Any, mean: Any, variance: Any) -> Any:
        return relax.TupleGetItem(emit(op.nn.batch_norm(x, w, w, mean, variance, axis=1, **options)), 0)

    shapes = dict.fromkeys(("w", "mean", "variance"), (3,))
    return module(make, x=(rows, 3), **shapes), {name: np.ones(3, "float32") for name in shapes}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"training": False}, {"center": False, "momentum": 0.5}])
def test_batch_norm_in_relax(options: dict[str, Any]) -> None:
    mod, params = normed(6, **options)
    is_training, momentum = options.get("training", True), options.get("momentum", 0.1)
    frozen = [] if is_training else ["mean", "variance"]
    step = srelax.train_step(mod, "mse", "sgd", params=params, frozen=frozen, lr=0.1)
    w, mean, variance = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3)
    bias = torch.zeros(3) if "center" in options else w
    for n in range(3):
        x = torch.tensor(dense(6, 3, seed=n))
        w.grad, y = None, F.batch_norm(x, mean, variance, w, bias, is_training, momentum)
        loss = y.square().mean()
        loss.backward()
        assert step(x, torch.zeros(6, 3)) == pytest.approx(float(loss.detach()), rel=1e-4)
        with torch.no_grad():
            w -= 0.1 * w.grad
    kept = {"mean": mean, "variance": variance} if is_training else {}
    assert {n for n in step.state if n not in ("count", "lr")} == set(kept)
    for name, value in kept.items():
        np.testing.assert_allclose(step.state[name], value, rtol=1e-4, atol=1e-5)


class Parts(torch.nn.Module):
    """Two layers, one of which is tied, detached, computed without gradients, or not used at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = torch.nn.Embedding(7, 6, padding_idx=2 if how == "padding" else None)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        if how == "tied":
            self.second.weight = self.first.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words).mean(1)
        if self.how == "detached":
            x = self.first(x).detach() + x
        elif self.how == "detached in place":
            h = self.first(x)
            h.detach_()
            x = h + x
        elif self.how == "slices":
            x = torch.relu(self.first(x)[:, :][...]) + torch.ops.aten.alias(x)
        elif self.how == "mask":
            x = x * (self.first(x) > 0).float() + torch.where(self.first(x) > 1, x, 0.0)
        elif self.how == "no_grad":
            with torch.no_grad():
                h = torch.relu(self.first(x))
                total = h.sum(dim=1, keepdim=True)
            x = x + h / (1 + total)
        elif self.how != "unused":
            x = torch.relu(self.first(x))
        return self.second(x)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["usual", "tied", "padding", "detached", "detached in place", "slices", "mask", "no_grad", "unused"],
)
def test_parameters_that_torch_leaves_are_left(how: str, optimizer: str) -> None:
    """Gradients end where they do in torch, and weight decay shrinks nothing that has none."""
    torch.manual_seed(0)
    model = Parts(how)
    words, target = torch.randint(0, 7, (12, 4)), torch.randn(12, 6)
    options = {"lr": 0.1, "weight_decay": 0.3}
    step = srelax.train_step(model, "mse", optimizer, example_args=(words,), **options)
    theirs = copy.deepcopy(model)
    rule = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](theirs.parameters(), **options)
    for _ in range(4):
        loss = F.mse_loss(theirs(words), target)
        rule.zero_grad()
        loss.backward()
        rule.step()
        assert step(words, target) == pytest.approx(loss.item(), rel=1e-4)
    expected = {name: p.detach().numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    assert step.params.keys() == expected.keys()
    for name, value in step.params.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-4)


def test_changes_in_place_without_gradients_are_refused() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            with torch.no_grad():
                y.view(-1).mul_(2)
            return y

    with pytest.raises(ArgumentError, match="changes a tensor in place"):
        srelax.train_step(Scaled(3, 3), "mse", "sgd", example_args=(torch.ones(2, 3),))


def test_tied_parameters_are_frozen_by_either_name() -> None:
    model, words = Parts("tied"), torch.ones(2, 4, dtype=torch.int64)
    for name in ("first.weight", "second.weight"):
        step = srelax.train_step(model, "mse", "sgd", example_args=(words,), frozen=[name])
        assert {"first.weight", "second.weight"}.isdisjoint(step.params)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_learning_rates_are_numbers_that_are_not_negative(rate: float) -> None:
    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with pytest.raises(ArgumentError, match="lr: expected a finite number that is not negative"):
        srelax.train_step(model, "mse", "sgd", example_args=(x,), lr=rate)
    step = srelax.train_step(model, "mse", "sgd", example_args=(x,), lr=0.5)
    for change in (lambda: setattr(step, "lr", rate), lambda: step.set(state={"lr": rate})):
        with pytest.raises(ArgumentError, match="lr: expected"):
            change()
    assert step.lr == 0.5


@pytest.mark.slow
def test_models_of_torch_drop_in_train_mode_only() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    x, y = torch.tensor(dense(30, FEATURES)), torch.zeros(30, 1)
    still, dropping = (
        srelax.train_step(model.train(is_training), "mse", "sgd", lr=0.0, example_args=(x,))
        for is_training in (False, True)
    )
    assert still(x, y) == still(x, y) == pytest.approx(float(model.eval()(x).square().mean().detach()), rel=1e-4)
    assert dropping(x, y) != dropping(x, y)
    torch.testing.assert_close(dropping.predict(x), still.predict(x))


@pytest.mark.slow
def test_models_of_torch_that_do_not_fit_are_refused() -> None:
    linear, x = torch.nn.Linear(3, 3), torch.zeros(4, 3)
    with pytest.raises(ArgumentTypeError, match="traced with arguments: pass example_args"):
        srelax.train_step(linear)
    with pytest.raises(ArgumentTypeError, match=r"pass \(tensor,\)"):
        srelax.train_step(linear, example_args=x)
    with pytest.raises(ArgumentTypeError, match="parameters of its own: pass no params"):
        srelax.train_step(linear, params={}, example_args=(x,))
    with pytest.raises(ArgumentTypeError, match="only a module of torch is traced"):
        srelax.train_step(tvm.ir.IRModule(), params={}, example_args=(x,))
    pruned = torch.nn.utils.prune.random_unstructured(torch.nn.Linear(3, 3), "weight", 0.5)
    with pytest.raises(ArgumentError, match=r"pruned by hooks of torch\.nn\.utils\.prune"):
        srelax.train_step(pruned, example_args=(x,))
    sparse = torch.nn.Linear(3, 3)
    sparse.weight = torch.nn.Parameter(torch.eye(3).to_sparse_coo(), requires_grad=False)
    with pytest.raises(ArgumentError, match=r"weight is sparse \(torch\.sparse_coo\)"):
        srelax.train_step(sparse, example_args=(x,))
    with pytest.raises(ArgumentError, match="0 is a batch norm with momentum=None, an average over all steps"):
        srelax.train_step(torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=None)), example_args=(x,))

    class Counting(torch.nn.BatchNorm1d):
        def forward(self, x: Any) -> Any:
            self.running_mean.add_(1)
            return super().forward(x)

    with pytest.raises(ArgumentError, match=r"changes running_mean .*which a compiled model does not"):
        srelax.train_step(Counting(3).eval(), example_args=(x,))


# ------------------------------------------------------------------ what is refused

ONE = {"w": np.ones(3, "float32")}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"loss": "huber"}, ArgumentTypeError, "loss is one of cross_entropy, binary_cross_entropy, mse, l1, or"),
        ({"optimizer": "lion"}, ArgumentError, "optimizer is one of sgd, momentum, adam, adamw, got 'lion'"),
        ({"optimizer": 3}, ArgumentTypeError, "optimizer is one of .* of tvm.relax.training, got int"),
        ({"betas": (0.9, 0.9)}, ArgumentTypeError, "sgd takes lr, momentum, nesterov, weight_decay, got .* betas"),
        ({"params": {"v": np.ones(3, "float32")}}, ArgumentError, "no parameter v: it has x, w"),
        ({"params": {}}, ArgumentError, "nothing to train"),
        ({"params": ONE, "frozen": ["w"]}, ArgumentError, "nothing to train"),
        ({"params": ONE, "frozen": ["x"]}, ArgumentError, "frozen has x, which has no value"),
        ({"params": {"w": np.ones(4, "float32")}}, ArgumentError, r"params has w of shape \(4,\); the model takes"),
        ({"params": {"w": np.ones(3)}}, ArgumentTypeError, "params has w of float64; the model takes"),
        ({"dtype": "float16"}, ArgumentTypeError, "trained in float32 or in float64, got float16"),
        ({"target": "cuda"}, ArgumentError, "expected an llvm target"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        scaled(**options)


def test_models_that_do_not_fit_are_refused() -> None:
    make = lambda emit, x, w: emit(op.cumprod(emit(x * w), 0))  # noqa: E731
    with pytest.raises(LoweringError, match=r"R\.cumprod has no gradient, and trained parameters come before it"):
        srelax.train_step(module(make, x=(4, 3), w=(3,)), "mse", params=ONE)
    with pytest.raises(ArgumentError, match=r"known sizes, got R\.Tensor\(\(n, 3\)"):
        srelax.train_step(module(lambda emit, x, w: x * w, x=(tvm.tirx.Var("n", "int64"), 3), w=(3,)), params=ONE)
    with pytest.raises(ArgumentError, match="a model that returns one tensor"):
        srelax.train_step(module(lambda emit, x, w: relax.Tuple([x, w]), x=(4, 3), w=(3,)), params=ONE)
    with pytest.raises(ArgumentError, match="a row of scores for each sample"):
        srelax.train_step(module(lambda emit, x, w: x * w, x=(3,), w=(3,)), params=ONE)
    mod, params = normed(4)
    with pytest.raises(ArgumentError, match="params has no value for variance, in which batch_norm keeps an average"):
        srelax.train_step(mod, "mse", params={n: v for n, v in params.items() if n != "variance"})
    with pytest.raises(ArgumentError, match="keeps averages that are no parameters of the model"):
        srelax.train_step(mod, "mse", params=params, frozen=["mean", "variance"])
    with pytest.raises(ArgumentError, match="has one element for each channel: take more rows"):
        srelax.train_step(normed(1)[0], "mse", params=params)
    for name, optimizer in (("target", "sgd"), ("lr", "sgd"), ("w_first", "adam")):
        mod = module(lambda emit, w, **others: w * next(iter(others.values())), w=(3,), **{name: (4, 3)})
        with pytest.raises(ArgumentError, match=f"the model has a parameter {name}, which is a name of the step's own"):
            srelax.train_step(mod, "mse", optimizer, params=ONE)
    with pytest.raises(ArgumentTypeError, match="expected an IRModule"):
        srelax.train_step(3, params=ONE)
    with pytest.raises(ArgumentError, match="one Relax function, got none"):
        srelax.train_step(tvm.ir.IRModule(), params=ONE)
