# SPDX-License-Identifier: Apache-2.0
"""`grouped_mm` beside loops of `torch.mm`, its gradients, and its refusals."""

import sys

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

import sparsetir.torch  # noqa: E402
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError  # noqa: E402
from sparsetir.torch import products  # noqa: E402

ENDS = {"ragged": [0, 1, 9, 9, 30, 37], "one": [12], "ones": [1, 2, 3, 4], "empty": [0, 0, 0]}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
grouped_mm = sparsetir.torch.grouped_mm


def operands(dims: tuple[int, int], ends: list[int], dtype: torch.dtype = torch.float64, *, feat: int = 5) -> tuple:
    """Return the two operands, and the ends of groups, three positions behind which the ragged dimension ends."""
    torch.manual_seed(0)
    total, groups = ends[-1] + 3, len(ends)
    shapes = {
        (2, 3): ((total, 4), (groups, 4, feat)),
        (2, 2): ((4, total), (total, feat)),
        (3, 2): ((groups, feat, 4), (4, total)),
    }
    left, right = (torch.randn(shape).to(dtype) for shape in shapes[dims])
    return left, right, torch.tensor(ends)


def looped(left: torch.Tensor, right: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return the product by a loop in double precision, zeros behind the last end."""
    left, right = left.double(), right.double()
    parts = list(zip([0, *ends[:-1]], ends, strict=True))
    if left.dim() == right.dim():
        return torch.stack([left[:, low:high] @ right[low:high] for low, high in parts])
    if left.dim() == 2:
        y = left.new_zeros(left.shape[0], right.shape[2])
        for g, (low, high) in enumerate(parts):
            y[low:high] = left[low:high] @ right[g]
        return y
    y = left.new_zeros(left.shape[1], right.shape[1])
    for g, (low, high) in enumerate(parts):
        y[:, low:high] = left[g] @ right[:, low:high]
    return y


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float64) for case in ENDS), *(("ragged", dtype) for dtype in TOLERANCES)]
)
def test_products_are_those_of_a_loop(dims: tuple[int, int], case: str, dtype: torch.dtype) -> None:
    for feat in (1, 17, 70):
        left, right, offs = operands(dims, ENDS[case], dtype, feat=feat)
        y = grouped_mm(left, right, offs=offs.int() if feat == 1 else offs)
        assert y.dtype == dtype
        expected = looped(left, right, ENDS[case])
        torch.testing.assert_close(y.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("result", ["rows", "weights"])
@pytest.mark.parametrize("case", ["ragged", "one", "ones"])
def test_ways_agree(result: str, case: str) -> None:
    ends = ENDS[case]
    groups = products.GroupEnds([*ends, ends[-1]])
    for depth, dtype in ((7, torch.float64), (8, torch.float32)):
        x = torch.randn(ends[-1], depth, dtype=dtype)
        w = torch.randn(*((len(groups), depth, 20) if result == "rows" else (ends[-1], 20)), dtype=dtype)
        ways = [*products.WAYS[result].values()]
        if products._takes(products.OF_TORCH[result], x, w, groups):
            ways.append(products.OF_TORCH[result])
        assert len(ways) == (4 if dtype is torch.float32 and hasattr(torch.nn.functional, "grouped_mm") else 3)
        first, *others = [way(x, w, groups) for way in ways]
        for y in others:
            torch.testing.assert_close(y, first)


def test_operands_that_torch_refuses_later_are_another_class() -> None:
    """Aligned rows may be computed by torch's own product, which takes no rows at odd addresses or of odd strides."""
    base = torch.randn(41, 24)
    w = torch.randn(2, 8, 20)
    flat = base.reshape(-1)
    for x in (base[:40, :8], base[:40, 1:9], flat[1:321].view(40, 8), flat[:360].view(40, 9)[:, :8]):
        y = grouped_mm(x, w, offs=torch.tensor([11, 40]))
        torch.testing.assert_close(y, torch.cat([x[:11] @ w[0], x[11:] @ w[1]]))


def test_class_of_shapes_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products._fastest.clear()
    runs, compare = [], products._compare
    monkeypatch.setattr(
        products, "_compare", lambda ways, *operands: runs.append(list(ways)) or compare(ways, *operands)
    )
    left, right, offs = operands((2, 3), [2, 5])
    for _ in range(2):
        torch.testing.assert_close(grouped_mm(left, right, offs=offs), looped(left, right, [2, 5]))
    assert runs == [["kernel", "loop", "padded"]]  # float64, which torch's own product does not take
    products._fastest.clear()


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2)])
def test_gradients(dims: tuple[int, int]) -> None:
    left, right, offs = operands(dims, [0, 1, 4, 4, 6])
    pair = left.requires_grad_(), right.requires_grad_()
    product = lambda a, b: grouped_mm(a, b, offs=offs)  # noqa: E731
    assert gradcheck(product, pair)
    assert gradgradcheck(product, pair)


def test_three_dimensions_bias_and_dtype() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    torch.testing.assert_close(grouped_mm(a, b), torch.bmm(a, b))
    y = grouped_mm(a[0], b[:1], offs=torch.tensor([3]), bias=torch.ones(5), out_dtype=torch.float64)
    torch.testing.assert_close(y, (a[0] @ b[0] + 1).double())


@pytest.mark.parametrize(
    ("ends", "fault"),
    [
        ([3, 2], r"offs: expected ascending positions"),
        ([-1, 2], r"offs: expected ascending positions"),
        ([2, 11], r"offs: expected positions up to 10, the number of rows, got 11"),
        ([1, 2, 3], r"offs: expected 2 ends, one for each matrix, got 3"),
    ],
)
def test_wrong_offsets(ends: list[int], fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        grouped_mm(torch.ones(10, 4), torch.ones(2, 4, 5), offs=torch.tensor(ends))


@pytest.mark.parametrize("offs", [None, [1, 2], torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])])
def test_offsets_of_another_kind(offs: object) -> None:
    with pytest.raises(ArgumentTypeError, match="offs: expected one dimension of int32 or int64"):
        grouped_mm(torch.ones(10, 4), torch.ones(2, 4, 5), offs=offs)


def test_wrong_operands() -> None:
    x, w, offs = torch.ones(10, 4), torch.ones(2, 4, 5), torch.tensor([4, 10])
    with pytest.raises(ArgumentTypeError, match="self: expected a tensor of floats"):
        grouped_mm(x.int(), w, offs=offs)
    with pytest.raises(ArgumentTypeError, match=r"mat2: expected torch\.float32 as self has"):
        grouped_mm(x, w.double(), offs=offs)
    with pytest.raises(ArgumentError, match="mat2: expected 4 rows in each matrix"):
        grouped_mm(x, w.transpose(1, 2), offs=offs)
    with pytest.raises(ArgumentError, match="self: expected 2 or 3 dense dimensions"):
        grouped_mm(x[0], w, offs=offs)
    with pytest.raises(ArgumentError, match="offs: expected None for 3d x 3d"):
        grouped_mm(w, w.transpose(1, 2), offs=offs)


def test_parameters_without_gradients() -> None:
    left, right, offs = operands((2, 3), [2, 5])
    expected = looped(left, right, [2, 5])
    with torch.no_grad():
        torch.testing.assert_close(grouped_mm(left, right.requires_grad_(), offs=offs), expected)
    with torch.inference_mode():
        torch.testing.assert_close(grouped_mm(torch._neg_view(-left), right, offs=offs), expected)


@pytest.mark.parametrize("lengths", [(2, 3, 1), (0, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_parts_of_nested_tensors_are_groups(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randn(sum(lengths), 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    product = lambda rows, w: sparsetir.torch.grouped_mm(  # noqa: E731
        torch.nested.nested_tensor_from_jagged(rows, offsets), w
    )
    y = product(rows, w)
    assert y.layout is torch.jagged
    for part, x, matrix in zip(y.unbind(), rows.split(lengths), w, strict=True):
        torch.testing.assert_close(part, x @ matrix)
    assert gradcheck(lambda rows, w: product(rows, w).values(), (rows, w))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda x, w: (x, w, torch.tensor([5])), "offs: expected None for a nested tensor"),
        (lambda x, w: (x, w[0]), r"mat2: expected a matrix for each part of the nested tensor, got shape \[4, 2\]"),
        (lambda x, w: (x, w[:1]), "mat2: expected 2 matrices, one for each part of the nested tensor, got 1"),
        (lambda x, w: (x.transpose(1, 2), w), r"self: expected a nested tensor \[groups, rows, depth\] without holes"),
    ],
)
def test_wrong_operands_with_nested_tensors(action, message):
    x = torch.nested.nested_tensor_from_jagged(torch.ones(5, 4), torch.tensor([0, 2, 5]))
    with pytest.raises(ArgumentError, match=message):
        sparsetir.torch.grouped_mm(*action(x, torch.ones(2, 4, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_repeated_calls_validate_their_offsets(dtype: torch.dtype, *, requires_grad: bool) -> None:
    """Calls after the first of a shape take a shorter way; results, gradients and refusals are the same."""
    torch.manual_seed(0)
    total, w = 24, torch.randn(3, 4, 8, dtype=dtype)
    x = torch.randn(total, 4, dtype=dtype, requires_grad=requires_grad)
    generator = torch.Generator().manual_seed(1)
    for n in range(12):
        ends = torch.randint(0, total + 1, (3,), generator=generator).sort().values
        ends[-1] = total if n % 3 else ends[-1]
        offs = ends.clone().to(torch.int32 if n % 2 else torch.int64)
        y = grouped_mm(x, w, offs=offs)
        expected = looped(x.detach(), w, ends.tolist())
        torch.testing.assert_close(y.detach().double(), expected, atol=1e-5, rtol=1e-5)
        if requires_grad:
            offs.zero_()  # the caller's own from here on
            (g,) = torch.autograd.grad(y.sum(), x)
            rows = torch.cat([w[e].sum(1).expand(b - a, 4) for e, (a, b) in enumerate(pairs(ends.tolist()))])
            torch.testing.assert_close(g[: len(rows)], rows, atol=1e-5, rtol=1e-5)
            assert not g[len(rows) :].any()
    for wrong in ([8, 4, total], [-1, 4, total], [4, 8, total + 1], [8, total]):
        with pytest.raises(ArgumentError, match="offs: expected"):
            grouped_mm(x, w, offs=torch.tensor(wrong))
    with pytest.raises(ArgumentTypeError, match="mat2: expected"):
        grouped_mm(x, w.to(torch.float16), offs=torch.tensor([4, 8, total]))
    with pytest.raises(ArgumentError, match="mat2: expected 4 rows"):
        grouped_mm(x, w.transpose(1, 2), offs=torch.tensor([4, 8, total]))


def pairs(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


def test_a_repeated_call_runs_few_functions() -> None:
    x, w, offs = torch.ones(32, 16), torch.ones(2, 16, 16), torch.tensor([16, 32], dtype=torch.int32)
    frames: list[str] = []
    for _ in range(2):
        grouped_mm(x, w, offs=offs)
    for key in products._fastest:
        products._fastest[key] = products._rows_by_loop
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        grouped_mm(x, w, offs=offs)
    finally:
        sys.setprofile(None)
        products._fastest.clear()
    assert len(frames) <= 8, frames


def test_transforms_of_functions_are_refused() -> None:
    x, w, offs = torch.ones(6, 4), torch.ones(3, 4, 2), torch.tensor([1, 2, 6])
    A = torch.eye(4).to_sparse_csr()
    nested = torch.nested.nested_tensor_from_jagged(torch.ones(5, 4), torch.tensor([0, 2, 5]))
    operations = {
        "grouped_mm": (lambda x: grouped_mm(x, w, offs=offs), x),
        "matmul": (lambda x: sparsetir.torch.matmul(A, x), torch.ones(4, 2)),
        "jagged_attention": (lambda x: sparsetir.torch.jagged_attention(nested, nested, nested).values() * x, x),
    }
    grouped_mm(x, w, offs=offs)
    for operation, operand in operations.values():
        for transformed in (
            lambda f, x: torch.func.vmap(f)(x[None]),
            lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
            lambda f, x: torch.func.jvp(f, (x,), (x,)),
        ):
            with pytest.raises(LoweringError, match=r"transforms of torch.func .* do not go through"):
                transformed(operation, operand)


@pytest.mark.slow
def test_compiled_programs_call_it() -> None:
    """torch's own function, which may be the fastest way, cannot be traced in float32."""
    torch.manual_seed(0)
    x, w, offs = (
        torch.randn(6, 4, requires_grad=True),
        torch.randn(3, 4, 8, requires_grad=True),
        torch.tensor([1, 2, 6]),
    )
    run = lambda x, w: grouped_mm(x, w, offs=offs).relu().square().sum()  # noqa: E731
    expected = torch.autograd.grad(run(x, w), (x, w))
    for key in products._fastest:
        products._fastest[key] = products._weights_by_torch if "weights" in key else products._rows_by_torch
    try:
        gradients = torch.autograd.grad(torch.compile(run, backend="eager")(x, w), (x, w))
    finally:
        products._fastest.clear()
    torch.testing.assert_close(gradients, expected)
