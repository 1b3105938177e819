# SPDX-License-Identifier: Apache-2.0
"""Operators of imported torch models beside torch: those that TVM's importer lacks, or converts to other ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparsetir import relax
from sparsetir.errors import LoweringError
from sparsetir.relax import dense
from sparsetir.relax.torch_import import importer

torch = pytest.importorskip("torch")
F = torch.nn.functional

NAN, INF = float("nan"), float("inf")


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype("float32"))


X = drawn(4, 6, 8)
PLACES, OTHERS = torch.tensor([0, -1, 2]), torch.tensor([1, -1, -3])
WITH_NAN = torch.tensor([[1.0, NAN, -2.0], [0.5, 2.0, -0.5]])
WHOLE = torch.tensor([[-7, -3, 0], [2, 5, 9]])
BAGS = torch.tensor([[0, 3, 3], [8, 1, 2]])
IMAGE = drawn(1, 2, 6, 6, seed=1)


def put_columns(x: Any, places: Any) -> Any:
    y = x.clone()
    y[:, places] = 0.0
    y[:, -1, 1:3] = x[:, 0, :2]
    return y


def put_pairs(x: Any, first: Any, second: Any) -> Any:
    y = x.clone()
    y[:, first, second] = torch.arange(3.0)
    y[first, :, second] += 1
    return y


# Rows with ties, NaN, nothing but NaN, and nothing larger or smaller than what a search begins with.
UNUSUAL = torch.tensor([[1.0, NAN, 3.0, NAN], [NAN] * 4, [2.0, 5.0, 1.0, 5.0], [-INF] * 4, [INF] * 4, [0.0] * 4])
LEAST = torch.stack([torch.full((4,), torch.iinfo(torch.int32).min), torch.full((4,), torch.iinfo(torch.int32).max)])
BYTES = torch.tensor([[0, 0, 0], [0, 7, 7]], dtype=torch.uint8)

PLACES_OF_EXTREMES = [
    lambda x: x.argmax(1),
    lambda x: x.argmin(1, keepdim=True),
    lambda x: x.argmax(),
    lambda x: x.argmin(keepdim=True),
    lambda x: torch.max(x, 1)[1],
    lambda x: torch.min(x, 0).indices,
    lambda x: torch.max(x, 1, keepdim=True)[0],
]
WHETHER_ANY = [
    lambda x: x.any(),
    lambda x: x.any(1),
    lambda x: x.any(0, keepdim=True),
    lambda x: torch.any(x, dim=(0, 1)),
    lambda x: torch.where(x.any(1, keepdim=True), x, x + 1),
    lambda x: x.all(1),
]

# Rows with NaN beside infinities, and zeros of both signs; all numbers of a row differ otherwise.
MIXED = torch.tensor(
    [[3.0, NAN, INF, -INF, 0.0, NAN], [2.0, -0.0, 1.0, 0.0, -1.0, -NAN], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]
)
ORDERS = [
    lambda x: torch.sort(x, dim=1, stable=True)[0],
    lambda x: torch.sort(x, stable=True, dim=0, descending=True)[1],
    lambda x: torch.sort(x, 0)[0],
    lambda x: torch.argsort(x, dim=1, stable=True),
    lambda x: torch.argsort(x, dim=-1, descending=True, stable=True),
    torch.msort,
    lambda x: x.sum(1).sort()[0],
    lambda x: x.topk(3, 1)[0],
    lambda x: x.topk(2, 0, largest=False, sorted=False)[0],
    lambda x: x.topk(0, 1)[0],
    lambda x: x.median(1)[0],
    lambda x: x.median(0, keepdim=True)[1],
    lambda x: x.median(),
    lambda x: x.kthvalue(4, 1)[0],
    lambda x: x.kthvalue(1, 0, keepdim=True)[0],
]

NUMBERS = torch.tensor([4e9, 5e7, 1.0, -1.0, 0.0, INF, -INF, NAN, 7.5, -7.5, -3.0, 0.1])[:, None].expand(-1, 6)
DIVISORS = torch.tensor([3.0, -2.0, INF, -INF, 0.0, NAN]).expand(12, -1)
QUOTIENTS = [
    lambda x, y: x % y,
    lambda x, y: x % 3,
    lambda x, y: 3 % torch.where(x.abs() > 1, x, 2 * y),
    torch.fmod,
    lambda x, y: x // y,
    lambda x, y: torch.div(x, y, rounding_mode="floor"),
    lambda x, y: x // -2,
]
CONDITIONS = [
    lambda x, y: torch.isfinite(x),
    lambda x, y: (x > 1) * (y > 0),
    lambda x, y: torch.heaviside(x, y),
    lambda x, y: torch.clamp(x, y, y + 1),
    lambda x, y: torch.clamp(x, max=y),
    lambda x, y: x**0.5,
    lambda x, y: x**-0.5,
    torch.logaddexp,
]

COMPARED = [
    lambda x, y: x == y,
    lambda x, y: x != y,
    lambda x, y: x < y,
    lambda x, y: x >= 1,
    lambda x, y: x <= 0.5,
    lambda x, y: x == 1.5,
    lambda x, y: x > y.float(),
    lambda x, y: torch.where(x > 0, x.double(), y),
    torch.maximum,
    torch.minimum,
    lambda x, y: x.max(),
    lambda x, y: x.min(1)[0],
    lambda x, y: x.amax(0, keepdim=True),
    lambda x, y: x.int().argmax(0),
]
WHOLE_PAIRS = torch.tensor([[3, -1, 0], [1, 2, -5]]), torch.tensor([[2, -1, 1], [1, 0, 7]])

# By theme: what is computed of which arguments, whose results torch and the compiled model agree on.
GROUPS: dict[str, tuple[list[Callable[..., Any]], tuple[Any, ...]]] = {
    "places of extremes": (PLACES_OF_EXTREMES, (UNUSUAL,)),
    "places of extremes in halves": (PLACES_OF_EXTREMES, (UNUSUAL.bfloat16(),)),
    "places of extremes of integers": (PLACES_OF_EXTREMES, (LEAST,)),
    "places of extremes of bytes": (PLACES_OF_EXTREMES, (BYTES,)),
    "orders": (ORDERS, (MIXED,)),
    "orders of halves": (ORDERS, (MIXED.half(),)),
    "orders of doubles": (ORDERS, (MIXED.double(),)),
    "orders of bytes": (ORDERS, (torch.tensor([[200, 3, 7, 8, 1, 0], [1, 2, 3, 4, 5, 255]], dtype=torch.uint8),)),
    "quotients": (QUOTIENTS, (NUMBERS, DIVISORS)),
    "quotients of doubles": (QUOTIENTS, (NUMBERS.double(), DIVISORS.double())),
    "quotients of halves": (QUOTIENTS[:2] + QUOTIENTS[3:4], (NUMBERS[2:].half(), DIVISORS[2:].half())),
    "conditions": (CONDITIONS, (NUMBERS, DIVISORS)),
    "comparisons of integers": (COMPARED, WHOLE_PAIRS),
    "comparisons of booleans": (COMPARED, tuple(x > 0 for x in WHOLE_PAIRS)),
    "comparisons of halves": (COMPARED, tuple(x.bfloat16() for x in WHOLE_PAIRS)),
    "whether any": (WHETHER_ANY, (UNUSUAL,)),
    "whether any of nothing": (WHETHER_ANY, (UNUSUAL[:0],)),
    "whether any in nothing": (WHETHER_ANY, (UNUSUAL[:, :0],)),
    "whether any integer": (WHETHER_ANY, (LEAST - LEAST[0],)),
    "whether any byte": ([*WHETHER_ANY[:4], WHETHER_ANY[5]], (BYTES,)),
    "whether neither": ([lambda x: ~x.any(1), lambda x: ~(x > 0).any(0)], (UNUSUAL,)),
    "limits and NaN": (
        [
            F.relu6,
            F.hardtanh,
            lambda x: F.hardtanh(x, -3.0, 2.0),
            lambda x: torch.maximum(x, x.flip(1)),
            lambda x: torch.minimum(x, x.flip(1)),
            lambda x: F.elu(x.bfloat16()).float(),
            lambda x: x.bfloat16().clamp(0, 2).float(),
        ],
        (UNUSUAL,),
    ),
    "negative places": (
        [
            lambda x, i, j: x[:, -1],
            lambda x, i, j: x[-2],
            lambda x, i, j: x[..., -3],
            lambda x, i, j: x[i],
            lambda x, i, j: x[:, i],
            lambda x, i, j: x[:, torch.tensor([-1, 1]), torch.tensor([0, -2])],
        ],
        (X, PLACES, OTHERS),
    ),
    "several places": (
        [
            lambda x, i, j: x[i, j],
            lambda x, i, j: x[:, i, j],
            lambda x, i, j: x[i, :, j],
            lambda x, i, j: x[i[:, None], j],
            lambda x, i, j: x[:, i.view(3, 1).expand(3, 2)],
        ],
        (X, PLACES, OTHERS),
    ),
    "values that are put": (
        [
            lambda x, i, j: put_columns(x, i),
            put_pairs,
            lambda x, i, j: x.index_put((i,), torch.ones(3, 6, 8), accumulate=True),
            lambda x, i, j: x.index_put((i, j), torch.zeros(())),
            lambda x, i, j: x.index_add(1, i % 6, x[:, :3], alpha=2),
        ],
        (X, PLACES, OTHERS),
    ),
    "factors": (
        [
            lambda x: torch.add(x, x.flip(1), alpha=2),
            lambda x: torch.sub(x, x.flip(0), alpha=0.5),
            lambda x: torch.sub(x, 2, alpha=3),
            lambda x: torch.rsub(x, 2, alpha=3),
            F.selu,
            lambda x: F.elu(x, 1.7),
            lambda x: F.celu(x, 2.0),
        ],
        (X,),
    ),
    "integers": (
        [
            lambda n: n / 3,
            lambda n: n // 3,
            lambda n: n % -3,
            lambda n: n * 2.5,
            lambda n: n + 1.5,
            lambda n: torch.div(n, -3, rounding_mode="trunc"),
            lambda n: torch.div(n, -3, rounding_mode="floor"),
            lambda n: n << 2,
            lambda n: n >> 1,
            lambda n: n.prod(-1),
            lambda n: n.clamp(-2, 5),
        ],
        (WHOLE,),
    ),
    "booleans": (
        [
            lambda x: (x > 0) + (x < 1),
            lambda x: (x > 0).cumsum(-1),
            lambda x: (x > 0).count_nonzero(),
            lambda x: (x > 0).sum(-1),
            lambda x: (x > 2).any(),
            lambda x: (x > 0) * x,
        ],
        (X,),
    ),
    "masks": (  # read and compared in vectors
        [
            lambda m, x: m & (x > 0),
            lambda m, x: m[None, 0] | (x > 0) | ~m,
            lambda m, x: (m ^ (x > 1)) & m,
            lambda m, x: torch.where(m & (x > 0), x, 2 * x),
            lambda m, x: torch.where(~m, x, m * x),
            lambda m, x: m == (x > 0),
            lambda m, x: (m != m.T) & (x < 1),
            lambda m, x: m.clone(),
            lambda m, x: (m & (x > 0)).sum(-1),
            lambda m, x: x.masked_fill(m | (x < -1), 0.5) + m,
            lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m & (x > -2)),
            lambda m, x: F.scaled_dot_product_attention(x, 2 * x, x, attn_mask=m),
        ],
        (drawn(128, 128, seed=5) > -1, drawn(128, 128, seed=6)),
    ),
    "NaN": (
        [
            lambda x: x.clamp(0, 1),
            lambda x: x.clamp(min=0.1),
            lambda x: x.amax(-1),
            lambda x: x.amin(),
            lambda x: x.max(-1)[0],
            F.elu,
            torch.relu,
            torch.nansum,
        ],
        (WITH_NAN,),
    ),
    "extremes": (
        [
            lambda x: x.min(1)[1],
            lambda x: x.max(-1, keepdim=True)[0],
            lambda x: x.amax((0, 2)),
            lambda x: x.logsumexp(-1),
            lambda x: x.logsumexp((0, 1), keepdim=True),
            lambda x: x.prod(-1),
            lambda x: F.adaptive_max_pool2d(x, 1),
        ],
        (X,),
    ),
    "searches": (
        [
            lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x),
            lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, side="right", out_int32=True),
            lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
            lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]), right=True),
        ],
        (torch.tensor([[0.0, -1.0, 2.0], [-3.0, 0.5, 1.0]]),),
    ),
    "bags": (
        [
            lambda w, i: F.embedding_bag(i, w),
            lambda w, i: F.embedding_bag(i, w, mode="sum", per_sample_weights=w[:2, :3]),
            lambda w, i: F.embedding_bag(i.view(-1), w, torch.tensor([0, 2, 2, 5])),
            lambda w, i: F.embedding_bag(i.view(-1), w, torch.tensor([0, 2, 6]), include_last_offset=True, mode="sum"),
            lambda w, i: F.embedding(i, w),
        ],
        (drawn(9, 4, seed=2), BAGS),
    ),
    "distances": (
        [
            lambda x, y: torch.cdist(x, y),
            lambda x, y: torch.cdist(x, y, p=1),
            lambda x, y: torch.cdist(x, y, p=3),
            lambda x, y: torch.cdist(x, y, p=float("inf")),
            lambda x, y: torch.dist(x[:3], y[:3]),
            lambda x, y: F.bilinear(x[:3], y[:3], torch.ones(2, 5, 5)),
        ],
        (drawn(4, 5), drawn(3, 5, seed=3)),
    ),
    "images": (
        [
            lambda x: x.unfold(2, 3, 2),
            lambda x: F.unfold(x, 3, padding=1),
            lambda x: F.interpolate(x, size=(5, 7)),
            lambda x: F.grid_sample(x, x[:, :, :3, :4].permute(0, 2, 3, 1).tanh(), align_corners=False),
            lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"),
        ],
        (IMAGE,),
    ),
}


class Several(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *arguments: Any) -> Any:
        return tuple(function(*arguments) for function in self.functions)


@pytest.mark.parametrize("group", GROUPS)
def test_operators_of_models_compute_what_torch_computes(group: str) -> None:
    functions, arguments = GROUPS[group]
    model = Several(functions).eval()
    found = relax.from_torch(model, arguments)(*arguments)
    for number, (own, expected) in enumerate(zip(found, model(*arguments), strict=True)):
        where = f"{group} {number}"
        assert own.dtype == expected.dtype, where
        torch.testing.assert_close(
            own, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, w=where: f"{w}: {m}"
        )


@pytest.mark.scheduled
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_alone(is_causal: bool) -> None:
    """Its mask is loaded and compared in vectors."""
    q = drawn(1, 1, 64, 16)
    model = Several([lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)]).eval()
    torch.testing.assert_close(relax.from_torch(model, (q,))(q)[0], model(q)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.scheduled
@pytest.mark.parametrize("number", range(len(GROUPS["masks"][0])))
def test_masks_are_read_and_compared_in_vectors(number: int) -> None:
    functions, arguments = GROUPS["masks"]
    model = Several(functions[number : number + 1]).eval()
    (found,) = relax.from_torch(model, arguments)(*arguments)
    torch.testing.assert_close(found, model(*arguments)[0], rtol=1e-4, atol=1e-5)


def test_places_may_be_negative_where_sizes_change() -> None:
    model = Several([lambda x, i: x[:, -1], lambda x, i: x[i], lambda x, i: x[-2]]).eval()
    rows = torch.export.Dim("rows", min=3)
    compiled = relax.from_torch(model, (X, PLACES), dynamic_shapes=(({0: rows}, None),))
    for count in (4, 9):
        x = drawn(count, 6, 8, seed=count)
        for own, expected in zip(compiled(x, PLACES), model(x, PLACES), strict=True):
            torch.testing.assert_close(own, expected)


def test_recurrent_layers_whose_last_state_is_taken() -> None:
    layer = torch.nn.LSTM(8, 5, batch_first=True)
    model = Several([lambda x: layer(x)[0][:, -1]]).eval()
    with torch.no_grad():
        (expected,) = model(X[:, :3])
    (own,) = relax.from_torch(model, (X[:, :3],))(X[:, :3])
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_places_out_of_range_are_not_read() -> None:
    """Where torch raises, a compiled model gives NaN: no memory outside of the weight is read."""
    model = Several([lambda w, i: F.embedding(i, w)]).eval()
    weight = drawn(3, 4)
    compiled = relax.from_torch(model, (weight, torch.tensor([0, 2])))
    (rows,) = compiled(weight, torch.tensor([1, 1 << 40]))
    assert torch.equal(rows[0], weight[1])
    assert rows[1].isnan().all()


def test_sums_of_no_terms_are_zero() -> None:
    """TVM initialises a sum in the step of its first term; the memory holds what the call before left there."""
    functions = [lambda x: (x + 1).sum(0), lambda x: (x * 2).sum(), lambda x: x.t() @ x, lambda x: (x > 0).any(0)]
    model, rows = Several(functions).eval(), torch.export.Dim("rows", min=0, max=100)
    compiled = relax.from_torch(model, (X[0],), dynamic_shapes=(({0: rows},),))
    for count in (60, 0, 1, 0):
        x = drawn(count, 8, seed=count)
        for own, expected in zip(compiled(x), model(x), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_imported_as_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm import relax as tvm_relax

    own = importer.converters
    wrong = lambda node, of: of.block_builder.emit(tvm_relax.op.cos(of.retrieve_args(node)[0]))  # noqa: E731
    monkeypatch.setattr(importer, "converters", lambda: {**own(), "sin.default": wrong})
    model = Several([torch.sin]).eval()
    with pytest.raises(LoweringError, match=r"result 0 of the examples is off by .* imported as another one"):
        relax.from_torch(model, (X,))


def test_examples_may_require_gradients() -> None:
    """Leaves, and results of other layers, which torch does not copy."""
    layer = torch.nn.Linear(8, 3).eval()
    for x in (X[0].clone().requires_grad_(), torch.nn.Linear(8, 8)(X[0])):
        compiled = relax.from_torch(layer, (x,))
        torch.testing.assert_close(compiled(x.detach()), layer(x).detach())


def test_results_that_ties_decide_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores choose either row: with operators that jump, other results lead to a warning only."""
    from tvm import relax as tvm_relax

    own = importer.converters
    wrong = lambda node, of: of.block_builder.emit(tvm_relax.op.cos(of.retrieve_args(node)[0]))  # noqa: E731
    monkeypatch.setattr(importer, "converters", lambda: {**own(), "sin.default": wrong})
    model = Several([lambda x: torch.sin(x).topk(2)[0]]).eval()
    with pytest.warns(UserWarning, match="a rounding may have decided otherwise"):
        relax.from_torch(model, (X,))


def test_results_of_another_dtype_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = importer.converters
    monkeypatch.setattr(
        importer, "converters", lambda: {**own(), "any.dim": lambda node, of: of.retrieve_args(node)[0]}
    )
    model = Several([lambda x: (x > 3).any(2), lambda x: x.any(2)]).eval()
    with pytest.raises(LoweringError, match=r"result 0 of the examples is bool of shape .* imported as another one"):
        relax.from_torch(model, (X,))


def test_a_maximum_with_its_places_is_returned_as_a_tuple() -> None:
    class Extremes(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {"most": x.max(1)}, [torch.min(x, 0)]

    found, (least,) = relax.from_torch(Extremes().eval(), (X,))(X)
    for own, expected in ((found["most"], X.max(1)), (least, X.min(0))):
        assert type(own) is tuple
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_halves_is_no_fault(dtype: Any) -> None:
    layers = [torch.nn.Linear(8, 8), torch.nn.GELU()] * 6
    model = torch.nn.Sequential(*layers).eval().to(dtype)
    compiled = relax.from_torch(model, (X[0].to(dtype),))
    with torch.no_grad():
        torch.testing.assert_close(compiled(X[0].to(dtype)), model(X[0].to(dtype)), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("why", ["mask", "places of maxima", "largest of bags"])
def test_what_cannot_be_compiled_is_named(why: str) -> None:
    function, arguments, text = {
        "mask": (lambda x: x[x > 0], (X,), "selects by a mask"),
        "places of maxima": (
            lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
            (IMAGE,),
            "only its values are used",
        ),
        "largest of bags": (lambda w: F.embedding_bag(BAGS, w, mode="max"), (drawn(9, 4),), "for sums and means"),
    }[why]
    with pytest.raises(LoweringError, match=text):
        relax.from_torch(Several([function]).eval(), arguments)


CONVOLUTIONS: dict[str, Any] = {
    "3 x 3": (lambda: torch.nn.Conv2d(5, 24, 3, padding=1), (2, 5, 9, 19)),
    "1 x 1": (lambda: torch.nn.Conv2d(6, 9, 1), (2, 6, 4, 5)),
    "1 x 1 in steps": (lambda: torch.nn.Conv2d(6, 8, 1, stride=2), (2, 6, 5, 5)),
    "steps and gaps": (lambda: torch.nn.Conv2d(3, 12, (3, 2), (2, 1), padding=(2, 0), dilation=(2, 3)), (1, 3, 11, 9)),
    "uneven": (lambda: torch.nn.Sequential(torch.nn.ZeroPad2d((1, 0, 2, 1)), torch.nn.Conv2d(3, 8, 3)), (1, 3, 6, 7)),
    "transposed": (lambda: torch.nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (1, 3, 6, 7)),
    "same": (lambda: torch.nn.Conv2d(3, 8, 4, padding="same"), (1, 3, 6, 7)),
    "few features": (lambda: torch.nn.Conv2d(1, 2, 5, padding=2), (1, 1, 16, 16)),
    "groups": (lambda: torch.nn.Conv2d(6, 6, 3, padding=1, groups=6), (1, 6, 8, 8)),
    "1-D": (lambda: torch.nn.Conv1d(4, 17, 5, padding=2, stride=3, bias=False), (3, 4, 40)),
    "3-D": (lambda: torch.nn.Conv3d(2, 8, (1, 2, 3), padding=(0, 1, 1)), (1, 2, 3, 4, 5)),
    "two, and more": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, 2)
        ),
        (1, 3, 20, 20),
    ),
}  # fmt: skip


@pytest.mark.scheduled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_products(name: str, dtype: Any) -> None:
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    model, x = make().to(dtype).eval(), torch.randn(shape, dtype=dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    with torch.no_grad():
        torch.testing.assert_close(relax.from_torch(model, (x,))(x), model(x), rtol=tolerance, atol=tolerance)


@pytest.mark.scheduled
def test_convolutions_of_any_number_of_images_and_of_open_weights() -> None:
    layer = torch.nn.Conv2d(3, 9, 3, padding=1).eval()
    images = torch.export.Dim("images", min=2)
    compiled = relax.from_torch(layer, (drawn(2, 3, 8, 8),), dynamic_shapes=({0: images},))
    open_weights = relax.from_torch(Several([F.conv2d]).eval(), (drawn(1, 3, 8, 8), drawn(9, 3, 2, 2)))
    for count in (2, 5):
        x = drawn(count, 3, 8, 8, seed=count)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    for seed in (1, 2):
        x, weight = drawn(1, 3, 8, 8, seed=seed), drawn(9, 3, 2, 2, seed=seed)
        torch.testing.assert_close(open_weights(x, weight)[0], F.conv2d(x, weight), rtol=1e-4, atol=1e-4)


def test_windows_that_would_not_fit_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MOST_WINDOWS", 100)
    layer, x = torch.nn.Conv2d(3, 9, 3).eval(), drawn(2, 3, 8, 8)
    called: list[Any] = []
    monkeypatch.setattr(dense, "_windows", lambda *_: called.append(1))
    with torch.no_grad():
        torch.testing.assert_close(relax.from_torch(layer, (x,))(x), layer(x), rtol=1e-4, atol=1e-5)
    assert not called


@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 17, 33), (3, 33, 19)), ((2, 3, 5, 7), (2, 3, 7, 9)), ((6, 7), (4, 7, 20)), ((1, 5, 7), (1, 7, 32)),
        ((2, 1, 5, 7), (2, 3, 7, 9)), ((4, 1, 8), (4, 8, 16)), ((2, 64, 64), (2, 64, 64)), ((4, 5, 7), (7, 20)),
        ((4, 5, 7), (7,)), ((7,), (4, 7, 5)), ((5, 7), (7,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_batches(left: tuple[int, ...], right: tuple[int, ...], dtype: Any) -> None:
    a, b = drawn(*left).to(dtype), drawn(*right, seed=1).to(dtype)
    model = Several([torch.matmul, lambda a, b: torch.relu(a @ b + 1), lambda a, b: (a @ b).sum()]).eval()
    for own, expected in zip(relax.from_torch(model, (a, b))(a, b), model(a, b), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.scheduled
def test_products_of_any_number_of_pairs() -> None:
    batch = torch.export.Dim("batch", min=2)
    model = Several([lambda a, b: a @ b.transpose(1, 2)]).eval()
    compiled = relax.from_torch(model, (drawn(3, 5, 8), drawn(3, 6, 8)), dynamic_shapes=(({0: batch}, {0: batch}),))
    for count in (2, 7):
        a, b = drawn(count, 5, 8, seed=count), drawn(count, 6, 8, seed=9)
        torch.testing.assert_close(compiled(a, b)[0], a @ b.transpose(1, 2), rtol=1e-4, atol=1e-4)


REDUCTIONS = {
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: (2 * x).amin(d),
    "prod": lambda x, d: (0.1 * x).exp().prod(d),
    "any": lambda x, d: (x > 2).any(d),
    "variance": lambda x, d: x.var(d),
    "softmax": lambda x, d: x.softmax(d),
    "count": lambda x, d: (x > 0).sum(d),
}


@pytest.mark.scheduled
@pytest.mark.parametrize("shape", [(64, 64), (5, 96), (33, 31), (3, 64, 32), (1, 16), (16, 1), (2, 0, 32)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_in_lanes(name: str, shape: tuple[int, ...]) -> None:
    if name in ("amax", "amin", "variance") and 0 in shape:
        return
    x = drawn(*shape)
    if x.numel() > 40:
        x.view(-1)[3] = NAN if name.startswith("am") else INF if name == "any" else 0.5
    model = Several([lambda x, d=d: REDUCTIONS[name](x, d) for d in (0, -1)]).eval()
    for own, expected in zip(relax.from_torch(model, (x,))(x), model(x), strict=True):
        assert own.dtype == expected.dtype
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.scheduled
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    model, x = Several([]), drawn(3, 4, 16)
    model.layer = kind(16, 32, batch_first=True)
    model.functions = [lambda x: model.layer(x)[0]]
    with torch.no_grad():
        torch.testing.assert_close(relax.from_torch(model.eval(), (x,))(x)[0], model(x)[0], rtol=1e-4, atol=1e-5)


SUMS_OF_HALVES = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(0),
    "variance": lambda x: x.var(-1),
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x[:, :64].cumsum(-1),
    "layer norm": lambda x: F.layer_norm(x, (1024,)),
    "product": lambda x: x[:, :8].prod(-1),
}


@pytest.mark.scheduled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_added_up_in_single_precision(dtype: Any) -> None:
    x = (drawn(64, 1024) + 0.25).to(dtype)
    model = Several(list(SUMS_OF_HALVES.values())).eval()
    exact = [function(x.double()) for function in SUMS_OF_HALVES.values()]
    for name, own, other, right in zip(SUMS_OF_HALVES, relax.from_torch(model, (x,))(x), model(x), exact, strict=True):
        assert own.dtype == dtype
        assert (own.double() - right).abs().max() <= 2 * (other.double() - right).abs().max() + 1e-6, name
