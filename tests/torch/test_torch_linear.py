# SPDX-License-Identifier: Apache-2.0
"""Linear layers with sparse weights: against dense ones, and how their pattern changes."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError

torch = pytest.importorskip("torch")
from torch.nn.utils import parametrize  # noqa: E402

from sparsetir.torch import SparseLinear, sparsify_  # noqa: E402

IN, OUT = 7, 5
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture
def layer():
    torch.manual_seed(1)
    return SparseLinear(IN, OUT, density=0.4, dtype=torch.float64)


def dense(layer):
    made = torch.nn.Linear(IN, OUT, dtype=layer.values.dtype, bias=layer.bias is not None)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(layer.weight.toarray()))
        if layer.bias is not None:
            made.bias.copy_(layer.bias)
    return made


@pytest.mark.parametrize("shape", [(3,), (), (0,), (2, 4)])
@pytest.mark.parametrize("kind", ["usual", "empty", "full"])
def test_a_layer_is_the_dense_one(layer, shape, kind):
    mask = {"empty": np.zeros((OUT, IN)), "full": np.ones((OUT, IN))}.get(kind)
    layer = layer if mask is None else SparseLinear(IN, OUT, mask=mask, bias=False, dtype=torch.float64)
    other = dense(layer)
    x = torch.randn(*shape, IN, dtype=torch.float64, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    y, expected = layer(x), other(z)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    rows, columns = layer.weight.tocoo().coords
    torch.testing.assert_close(layer.values.grad, other.weight.grad[rows, columns])
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, other.bias.grad)


@pytest.mark.parametrize("shape", [(3,), (2, 4), ()])
def test_a_layer_by_bfloat16_numbers(shape):
    """Each sum and each gradient is off by at most 3 * 2**-16 times the sum of magnitudes."""
    torch.manual_seed(2)
    precise = SparseLinear(40, 24, density=0.4, precision="bf16x3")
    single, exact = (copy.deepcopy(precise) for _ in range(2))
    single.precision = exact.precision = None
    exact = exact.double()
    totals = copy.deepcopy(exact)
    with torch.no_grad():
        for parameter in totals.parameters():
            parameter.abs_()
    x, g = torch.randn(*shape, 40), torch.randn(*shape, 24)

    def computed(layer: SparseLinear, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().to(layer.values.dtype).requires_grad_()
        y = layer(x)
        y.backward(g.to(y.dtype))
        return [y, x.grad, layer.values.grad]

    halves, whole = computed(precise, x, g), computed(single, x, g)
    for found, expected, total in zip(halves, computed(exact, x, g), computed(totals, x.abs(), g.abs()), strict=True):
        assert ((found - expected).abs() <= 3 * 2**-16 * total + 1e-6).all()
    assert not torch.equal(halves[0], whole[0])
    assert not torch.equal(halves[1], whole[1])
    assert not torch.equal(halves[2], whole[2])


def test_the_precision_of_layers():
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2, bias=False))
    sparsify_(model, 0.5, precision="bf16x3")
    assert [m.precision for m in model] == ["bf16x3"] * 2
    assert str(model[1]) == "SparseLinear(in_features=6, out_features=2, density=0.5, bias=False, precision=bf16x3)"
    assert copy.deepcopy(model)[0].precision == "bf16x3"
    with torch.autocast("cpu", dtype=torch.bfloat16):  # whose dtype counts
        assert model(torch.ones(3, 8)).dtype is torch.bfloat16
    with pytest.raises(ArgumentError, match=r"precision: expected None, or 'bf16x3' for float32, got .* for float64"):
        model.double()(torch.ones(3, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SparseLinear(4, 4, precision="bf16"),
            "expected None, or 'bf16x3' for float32, got 'bf16' for float32",
        ),
        (lambda: SparseLinear(4, 4, dtype=torch.float64, precision="bf16x3"), "got 'bf16x3' for float64"),
        (lambda: SparseLinear.from_dense(torch.nn.Linear(4, 4), precision="high"), "got 'high' for float32"),
        (lambda: sparsify_(torch.nn.Linear(4, 4), 0.5, precision=3), "got 3 for float32"),
        (lambda: sparsify_(torch.nn.Linear(4, 4).double(), 0.5, precision="bf16x3"), "got 'bf16x3' for float64"),
        (
            lambda: sparsify_(torch.nn.Linear(4, 4), decide="measure", precision="bf16x3"),
            "expected None with a measured choice, got 'bf16x3'. Pass it as dtype.",
        ),
    ],
)
def test_precisions_of_layers_that_do_not_apply(call, message):
    with pytest.raises(ArgumentError, match=f"precision: .*{message}"):
        call()


def test_gradients(layer):
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())
    call = lambda x, *values: torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, *parameters.values()))


def test_patterns(layer):
    assert (layer.values.numel(), round(layer.density, 2)) == (14, 0.4)
    assert repr(layer) == "SparseLinear(in_features=7, out_features=5, density=0.4, bias=True)"
    again = SparseLinear(IN, OUT, mask=layer.weight)
    assert (again.weight.indices == layer.weight.indices).all()
    torch.manual_seed(1)
    assert (SparseLinear(IN, OUT, density=0.4).weight.indices == layer.weight.indices).all()


def test_the_largest_weights_are_kept():
    layer = torch.nn.Linear(IN, OUT)
    made = SparseLinear.from_dense(layer, 0.2)
    kept = torch.from_numpy(made.weight.toarray())
    smallest = kept[kept != 0].abs().min()
    assert torch.equal(kept, torch.where(layer.weight.detach().abs() >= smallest, layer.weight.detach(), 0))
    assert made.values.numel() == 7
    assert torch.equal(made.bias, layer.bias)
    assert made.bias is not layer.bias
    pruned = torch.nn.Linear(IN, OUT)
    pruned.weight.data[:, 2:] = 0
    assert SparseLinear.from_dense(pruned).values.numel() == 2 * OUT


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_what_regrows_starts_at_zero_and_the_rest_goes_on(layer, optimizer):
    made, parameter = optimizer(layer.parameters()), layer.values
    x = torch.randn(4, IN, dtype=torch.float64)
    layer(x).square().sum().backward()
    made.step()
    before = layer.weight.toarray()
    mask = (before != 0) & (np.arange(IN) % 2 == 0)
    mask[:, 1] = True
    stay = mask & (before != 0)
    layer.regrow(mask, made)
    assert layer.values is parameter
    np.testing.assert_array_equal(layer.weight.toarray(), np.where(stay, before, 0))
    np.testing.assert_array_equal(sp.csr_array(mask).indices, layer.weight.indices)
    layer(x).square().sum().backward()
    made.step()
    assert (layer.weight.toarray()[mask] != 0).all()
    layer.regrow(np.zeros((OUT, IN)), made)
    layer.regrow(mask, made)
    assert layer.values.tolist() == [0] * int(mask.sum())


@pytest.mark.parametrize("is_scored", [True, False])
def test_drop_and_grow(layer, is_scored):
    before = layer.weight.toarray()
    scores = torch.zeros(OUT, IN)
    absent = np.argwhere(before == 0)[:4]
    scores[absent[:, 0], absent[:, 1]] = -1
    layer.drop_and_grow(0.3, scores if is_scored else None)
    pattern = np.zeros_like(before, bool)
    rows, columns = layer.weight.tocoo().coords
    pattern[rows, columns] = True
    dropped = before[(before != 0) & ~pattern]
    assert (dropped.size, layer.values.numel()) == (4, 14)
    assert abs(dropped).max() <= abs(before[(before != 0) & pattern]).min()
    assert not is_scored or pattern[absent[:, 0], absent[:, 1]].all()


def test_a_full_layer_does_not_move():
    layer = SparseLinear(3, 2, density=1)
    before = layer.weight.toarray()
    layer.drop_and_grow(0.5)
    np.testing.assert_array_equal(layer.weight.toarray(), before)


def test_state_is_plain_csr(layer):
    state = layer.state_dict()
    assert sorted(state) == ["bias", "col_indices", "crow_indices", "values"]
    made = torch.sparse_csr_tensor(*(state[n] for n in ("crow_indices", "col_indices", "values")), size=(OUT, IN))
    np.testing.assert_array_equal(made.to_dense().numpy(), layer.weight.toarray())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = torch.nn.Sequential(SparseLinear(IN, OUT, density=0.9, dtype=torch.float64))
    other.load_state_dict({f"0.{k}": v for k, v in torch.load(file, weights_only=True).items()})
    np.testing.assert_array_equal(other[0].weight.toarray(), layer.weight.toarray())
    x = torch.randn(2, IN, dtype=torch.float64)
    torch.testing.assert_close(other(x), layer(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("crow_indices"), "Missing key.*crow_indices"),
        (lambda s: s.update(crow_indices=s["crow_indices"][1:]), "expected 6 row pointers, .* got 5 row pointers"),
        (lambda s: s["col_indices"].fill_(3), "lists a place twice"),
        (lambda s: s["col_indices"].fill_(-1), "crow_indices and col_indices"),
        (lambda s: s.update(col_indices=s["col_indices"] + 0.5), "col_indices: expected integers, got torch.float"),
        (lambda s: s.update(col_indices=s["col_indices"].tolist()), "col_indices: expected a tensor .* got list"),
        (lambda s: s.update(col_indices=s["col_indices"].numpy()), "col_indices: expected a tensor .* got ndarray"),
        (
            lambda s: s.update(values=s["values"][None], col_indices=s["col_indices"][None]),
            "expected a tensor of one dim",
        ),
        (lambda s: s["crow_indices"].add_(1), "crow_indices: expected numbers that ascend from 0"),
        (
            lambda s: s["crow_indices"][1:3].copy_(s["crow_indices"][[3, 0]]),
            "crow_indices: expected numbers that ascend",
        ),
    ],
)
def test_what_is_no_state(layer, change, message):
    state = layer.state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)


def test_autocast_leaves_float64_alone():
    layer, dense = SparseLinear(3, 2, density=1.0, dtype=torch.float64), torch.nn.Linear(3, 2, dtype=torch.float64)
    x = torch.ones(1, 3, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            for linear in (layer, dense):
                assert linear(x).dtype is torch.float64
                with pytest.raises((ArgumentTypeError, RuntimeError)):  # the second of torch
                    linear(x.float())
            with pytest.raises(ArgumentTypeError, match=r"x is torch\.int64"):
                layer.float()(x.long())
            layer.double()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: layer.drop_and_grow(0.2, scores=[[1.0]]), "scores: expected a tensor, got list"),
        (lambda layer: layer.drop_and_grow(0.2, scores=np.ones((5, 8))), "scores: expected a tensor, got ndarray"),
        (lambda layer: layer.regrow(np.ones((5, 8)), "adam"), "optimizer: expected one of torch.optim, got 'adam'"),
    ],
)
def test_arguments_of_regrowth_are_checked(layer, call, message):
    with pytest.raises(ArgumentTypeError, match=message):
        call(layer)


def test_a_model_is_made_sparse():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.ModuleDict({"last": torch.nn.Linear(16, 4, bias=False)})
    )
    shared = torch.nn.Sequential(model[0], model[0])
    assert sparsify_(model, 0.5, skip=["2.last"]) is model
    assert [type(m).__name__ for m in (model[0], model[2]["last"])] == ["SparseLinear", "Linear"]
    sparsify_(shared, 0.25)
    assert shared[0] is shared[1]
    assert isinstance(sparsify_(torch.nn.Linear(3, 3), 0.5), SparseLinear)
    attention = torch.nn.MultiheadAttention(4, 2)
    sparsify_(attention, 0.5)
    attention(*[torch.ones(3, 1, 4)] * 3)


class Masked(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight):
        return weight * self.mask


def pruned_layers():
    """Linear layers with a fifth of their weights, pruned in each of torch's ways."""
    torch.manual_seed(0)
    plain, hooked, masked, both = (torch.nn.Linear(10, 10) for _ in range(4))
    torch.nn.utils.prune.l1_unstructured(hooked, "weight", 0.8)
    torch.nn.utils.prune.l1_unstructured(both, "weight", 0.8)
    torch.nn.utils.prune.l1_unstructured(both, "bias", 0.5)
    mask = hooked.weight_mask.clone()
    plain.weight.data *= mask
    parametrize.register_parametrization(masked, "weight", Masked(mask))
    return torch.nn.Sequential(plain, hooked, masked, both)


@pytest.mark.parametrize("options", [{}, {"keep": "nonzeros"}, {"density": 0.2}, {"density": 0.2, "keep": "largest"}])
def test_pruned_layers_of_all_kinds_keep_their_nonzeros(options):
    model, x, report = pruned_layers(), torch.randn(3, 10), []
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_(model, **options, report=report)
    torch.testing.assert_close(model(x), expected)
    assert all(isinstance(layer, SparseLinear) for layer in model)
    assert all(layer.values.requires_grad and layer.bias.requires_grad for layer in model)
    assert [(c.name, c.kind, c.is_sparse, c.weights, c.nonzeros, c.kept) for c in report] == [
        (str(n), "Linear", True, 100, 20, 20) for n in range(4)
    ]


def test_weights_that_a_low_density_drops_are_counted():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparsify_(pruned_layers(), 0.05)
    message = r"drops 15 of the 20 weights of {} that earlier pruning left: give a density of 0.2 or more"
    assert len(caught) == 4
    assert all(message.format(n) in str(c.message) for n, c in enumerate(caught))


def test_every_layer_is_reported_and_dense_ones_are_named():
    inner = {"attention": torch.nn.MultiheadAttention(4, 2), "conv": torch.nn.Conv2d(4, 4, 3)}
    others = {"embedding": torch.nn.Embedding(5, 4), "norm": torch.nn.LayerNorm(4), "done": SparseLinear(4, 4)}
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "last": torch.nn.Linear(4, 4), **inner, **others})
    report = []
    with pytest.warns(UserWarning, match="leaves attention .MultiheadAttention., .*conv .Conv2d. dense"):
        sparsify_(model, 0.5, skip=["last"], report=report)
    made = {change.name: change.is_sparse for change in report}
    assert made == {
        "first": True, "last": False, "attention": False, "attention.out_proj": False, "conv": False, "embedding": False
    }  # fmt: skip
    assert "first (Linear): sparse, 8 of 16 weights, the largest weights" in map(str, report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_(torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.Linear(4, 4)), skip=["0"])


@pytest.mark.slow
def test_a_pruned_model_learns():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2]], 1)
    model = sparsify_(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)), 0.3)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.02), []
    for step in range(60):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 10:
            model[0].drop_and_grow(0.2, optimizer=optimizer)
    assert losses[-1] < 0.3 * losses[0]


def test_what_is_frozen_stays_so():
    model = torch.nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    made = sparsify_(model, 0.5)
    assert (made.values.requires_grad, made.bias.requires_grad) == (False, True)


def test_a_weight_that_hooks_make_in_each_pass():
    layer = torch.nn.Linear(8, 8)
    torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    with torch.no_grad():
        layer.weight_orig.mul_(2)  # as an optimizer does after the last pass
    made, x = SparseLinear.from_dense(layer), torch.randn(3, 8)
    torch.testing.assert_close(made(x), layer(x))
    assert made.graph.num_edges == 32


def test_a_transformer_is_made_sparse():
    torch.manual_seed(0)
    model = sparsify_(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 0.4)
    x = torch.randn(2, 3, 8)
    expected = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    layer, x = SparseLinear(IN, OUT, density=0.4), torch.randn(3, IN)
    with torch.autocast("cpu", dtype=dtype):
        inner = layer(torch.nn.Identity()(x))
        assert inner.dtype is torch.nn.Linear(IN, OUT)(x).dtype is dtype
        inner.sum().backward()
    assert layer.values.grad.dtype is torch.float32
    torch.testing.assert_close(inner.float(), dense(layer)(x), rtol=0.03, atol=0.03)
    narrow = layer.to(dtype)
    assert narrow.weight.dtype == np.float32
    torch.testing.assert_close(narrow(x.to(dtype)).float(), dense(narrow.float())(x), rtol=0.03, atol=0.03)


def test_a_layer_without_memory_is_filled_by_a_state(layer):
    with torch.device("meta"):
        empty = SparseLinear(IN, OUT, dtype=torch.float64)
    empty.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(3, IN, dtype=torch.float64)
    torch.testing.assert_close(empty(x), layer(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(torch.ones(2, 6)), ArgumentError, r"expected a tensor of shape \[..., 7\], got \[2, 6\]"),
        (lambda m: m(torch.ones(2, 7)), ArgumentTypeError, "x is torch.float32 and the weights are torch.float64"),
        (lambda m: m.regrow(np.ones((2, 7))), ArgumentError, r"mask has shape \[2, 7\], expected \[5, 7\]"),
        (lambda m: m.drop_and_grow(2), ArgumentError, r"fraction is a share in \[0, 1\], got 2"),
        (lambda m: m.drop_and_grow(0.5, torch.ones(2, 2)), ArgumentError, r"scores have shape \[2, 2\]"),
        (lambda m: SparseLinear(2, 2, density=-1), ArgumentError, "density is a share"),
        (
            lambda m: sparsify_(torch.nn.Sequential(torch.nn.Linear(2, 2)), 0.5, skip=["1"]),
            ArgumentError,
            "layers are 0",
        ),
        (
            lambda m: m(torch.eye(IN).double().to_sparse()),
            ArgumentTypeError,
            "x: expected a dense tensor, got a sparse_coo one",
        ),
        (lambda m: torch.sum(m.weight), ArgumentTypeError, "torch's sum was called with the weight of a SparseLinear"),
        (lambda m: sparsify_(torch.nn.LazyLinear(3), 0.5), ArgumentError, "no weights yet: call the model once"),
        (lambda m: sparsify_(m, 0.5, keep="nonzeros"), ArgumentError, "density: expected None with keep='nonzeros'"),
        (lambda m: sparsify_(m, keep="largest"), ArgumentError, "density: expected a share"),
        (lambda m: sparsify_(m, keep="all"), ArgumentError, "keep: expected 'largest' or 'nonzeros', got 'all'"),
        (lambda m: sparsify_(tied(), 0.5), ArgumentError, r"1 shares its weight with 0: pass skip=\['1'\]"),
    ],
)
def test_refusals(layer, call, error, message):
    with pytest.raises(error, match=message):
        call(layer)


def tied():
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6))
    model[1].weight = model[0].weight
    return model


def test_another_number_of_weights_while_a_loss_is_held() -> None:
    layer, x = SparseLinear(6, 4, density=0.5), torch.ones(2, 6)
    optimizer = torch.optim.Adam(layer.parameters())
    loss = layer(x).sum()
    loss.backward()
    optimizer.step()
    values = layer.values
    for mask in (torch.ones(4, 6), torch.eye(4, 6)):
        layer.regrow(mask, optimizer)
        layer(x).sum().backward()
        optimizer.step()
        assert layer.values is values
        assert values.grad.shape == values.shape == (int(mask.sum()),)


def test_sizes_and_dtypes_that_are_none() -> None:
    for options in ({"out_features": -1}, {"in_features": 2.5}, {"dtype": torch.int32}, {"density": "x"}):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="got"):
            SparseLinear(**{"in_features": 3, "out_features": 3, **options})


def test_export_with_any_batch() -> None:
    layer, batch = SparseLinear(6, 4, density=0.5), torch.export.Dim("batch")
    program = torch.export.export(layer, (torch.ones(3, 6),), dynamic_shapes=({0: batch},))
    assert torch.equal(program.module()(torch.ones(5, 6)), layer(torch.ones(5, 6)))
